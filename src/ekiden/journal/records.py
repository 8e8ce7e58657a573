"""The bytes of the journal: file headers and records, and how to tell a tear from damage.

A record is `u32 length, u32 crc, u64 index, u32 place` and `length` bytes of payload. `place`
counts the records of one append from 0, so `index - place` is where that append began; everything
before it had been synced. The crc covers index, place and payload, and starts from the group's id:
bytes of another group, or a journal sent as somebody's payload, never look like a record of ours.

A write that was cut short by a crash ("torn") can only be the last append of the last file, and was
never acknowledged: it is cut off. Zeros and nothing else behind the last record are room that was
not used yet ("blank"). Anything else that is wrong is damage and is never cut. The rule is in
`_judge`; docs/JOURNAL.md explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct as Layout
from typing import Final

import google_crc32c
from msgspec import Struct

from ekiden.errors import CorruptJournal, VersionMismatch
from ekiden.limits import JOURNAL_VERSION
from ekiden.model.jobs import Index

SEGMENT_MAGIC: Final = b"ekidenj\n"
SNAPSHOT_MAGIC: Final = b"ekidens\n"
GROUP_BYTES: Final = 16

# This shape is the same in every version, so that any release can name a version it cannot read.
_HEADER: Final = Layout("<8sIQ16s")
_CRC: Final = Layout("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size

_RECORD: Final = Layout("<IIQI")
RECORD_BYTES: Final = _RECORD.size
_PLACED: Final = Layout("<QI")
_CRC_FROM: Final = 8  # where the bytes that the crc covers begin

# Bytes a disk writes in one piece. A lost write leaves a hole of zeros of at least this size.
_SECTOR: Final = 512

_INDEX_AT: Final = 8
_INDEX_LOW_BITS: Final = 24


class Header(Struct, frozen=True):
    """The first bytes of a segment (`index` is its first) or a snapshot (`index` it covers)."""

    version: int
    index: Index
    group: bytes


class Record(Struct, frozen=True, gc=False):
    """One entry and where its record begins in the file."""

    index: Index
    offset: int
    payload: bytes


def encode_header(magic: bytes, index: Index, group: bytes) -> bytes:
    """The header of a new file."""
    assert len(group) == GROUP_BYTES, "a group id has 16 bytes"
    head = _HEADER.pack(magic, JOURNAL_VERSION, index, group)
    return head + _CRC.pack(google_crc32c.value(head))


def decode_header(data: bytes, magic: bytes, file: str) -> Header:
    """What the header says. CorruptJournal if it is none, VersionMismatch if we are too old."""
    head = data[: _HEADER.size]
    crc = data[_HEADER.size : HEADER_BYTES]
    if len(crc) < _CRC.size or _CRC.pack(google_crc32c.value(head)) != crc:
        raise damage("the file header is damaged", file, 0)
    found, version, index, group = _HEADER.unpack(head)
    if found != magic:
        raise damage("the file is of another kind than its name says", file, 0)
    if version > JOURNAL_VERSION:
        raise VersionMismatch(
            f"{file!r} has journal version {version}, this release reads up to {JOURNAL_VERSION}",
            remedy="start the newer release again; nothing was changed",
        )
    return Header(version, index, group)


def damage(what: str, file: str, offset: int) -> CorruptJournal:
    """The error for damage at a place."""
    return CorruptJournal(
        f"{what} (file {file!r}, offset {offset})",
        file=file,
        offset=offset,
        remedy="nothing was changed; see docs/JOURNAL.md, 'When it refuses'",
    )


def crc_seed(group: bytes) -> int:
    """Where the crc of the group's records starts."""
    return int(google_crc32c.value(group))


def encode_records(first: Index, payloads: Sequence[bytes], group: bytes) -> bytes:
    """One append: records of consecutive indices."""
    seed, parts = crc_seed(group), []
    for place, payload in enumerate(payloads):
        head_crc = google_crc32c.extend(seed, _PLACED.pack(first + place, place))
        crc = google_crc32c.extend(head_crc, payload)
        parts.append(_RECORD.pack(len(payload), crc, first + place, place))
        parts.append(payload)
    return b"".join(parts)


def peek(data: bytes, at: int) -> tuple[int, Index] | None:
    """(payload length, index) of what claims to be a record at `at`; unchecked."""
    if at + RECORD_BYTES > len(data):
        return None
    length, _, index, _ = _RECORD.unpack_from(data, at)
    return length, index


def decode_record(data: bytes, at: int, seed: int) -> tuple[Index, int, bytes] | None:
    """(index, place, payload) of the record at `at`, or None if there is no whole, sound one."""
    end = at + RECORD_BYTES
    if end > len(data):
        return None
    length, crc, index, place = _RECORD.unpack_from(data, at)
    if end + length > len(data):
        return None
    if google_crc32c.extend(seed, data[at + _CRC_FROM : end + length]) != crc:
        return None
    return index, place, data[end : end + length]


class Scan:
    """The records of one segment, in order. Iterate once; then the attributes hold.

    `end` is behind the last whole record. If zeros fill the rest, `blank` counts them; if something
    else follows that may be cut off there, `torn` describes it. Raises CorruptJournal where
    something may not be cut.

    `again` reads the file once more. Damage is believed only if a second look finds it as well: a
    broker may write while we read, and a later part of the file can be newer than an earlier one.
    """

    def __init__(self, data: bytes, *, file: str, again: Callable[[], bytes] | None = None) -> None:
        self.header = decode_header(data, SEGMENT_MAGIC, file)
        self.end = HEADER_BYTES
        self.upcoming = self.header.index
        self.torn = ""
        self.blank = 0
        self._data = data
        self._file = file
        self._again = again

    @property
    def unsound(self) -> str:
        """What is wrong with the end of a closed segment, where nothing may follow the records."""
        if self.blank:
            return f"{self.blank:,} zeros follow its last record"
        return self.torn

    def __iter__(self) -> Iterator[Record]:
        seed = crc_seed(self.header.group)
        while self.end < len(self._data):
            found = decode_record(self._data, self.end, seed) or self._look_closer(seed)
            if found is None:
                return
            index, _, payload = found
            if index != self.upcoming:
                what = f"entry {index:,} stands where {self.upcoming:,} should"
                raise damage(what, self._file, self.end)
            record = Record(index, self.end, payload)
            self.end += RECORD_BYTES + len(payload)
            self.upcoming = index + 1
            yield record

    def _look_closer(self, seed: int) -> tuple[Index, int, bytes] | None:
        """What to make of a place without a sound record; the record, if there is one by now."""
        rest = len(self._data) - self.end
        if self._data[self.end :] == bytes(rest):
            self.blank = rest
            return None
        try:
            self.torn = _judge(self._data, self.end, self.upcoming, seed, self._file)
            return None
        except CorruptJournal:
            if self._again is None:
                raise
            now = self._again()
            found = decode_record(now, self.end, seed)
            if found is None:
                raise
            self._data = now
            return found


def scan(data: bytes, *, file: str = "", again: Callable[[], bytes] | None = None) -> Scan:
    """Read a whole segment."""
    return Scan(data, file=file, again=again)


def _judge(data: bytes, at: int, index: Index, seed: int, file: str) -> str:
    """Describe the torn tail that begins at `at`, where entry `index` should be, or raise.

    It is torn if no sound record follows. If some do, they must all belong to the append of `index`
    (so that nothing of it was ever acknowledged), and zeros must show that a part of it never
    reached the disk: a flipped bit in synced data leaves no such hole.
    """
    following = list(_records_after(data, at, index, seed))
    if not following:
        return f"{len(data) - at:,} bytes from offset {at} of {file!r} hold no whole record"
    same_append = all(later - place <= index for _, later, place in following)
    if same_append and _has_hole(data, at, following[0][0]):
        return f"{len(data) - at:,} bytes from offset {at} of {file!r} were only partly written"
    what = f"entry {index:,} is damaged, but entry {following[0][1]:,} after it is sound"
    raise damage(what, file, at)


def _records_after(
    data: bytes, at: int, index: Index, seed: int
) -> Iterator[tuple[int, Index, int]]:
    """(offset, index, place) of all sound records of `index` or later, anywhere behind `at`."""
    # A record holds at least one byte that is not zero, so a tail of zeros needs no search.
    stop = len(data.rstrip(b"\0"))
    highest = index + (len(data) - at) // RECORD_BYTES
    at += 1
    while (at := _candidate(data, at, stop, index, highest)) >= 0:
        found = decode_record(data, at, seed)
        if found is None:
            at += 1
        else:
            yield at, found[0], found[1]
            at += RECORD_BYTES + len(found[2])


def _candidate(data: bytes, at: int, stop: int, lowest: Index, highest: Index) -> int:
    """The next offset whose index field is within bounds, or -1.

    Few indices are possible, so the upper bytes of the field are known and can be searched for;
    looking at every offset in Python would take a minute for a large file.
    """
    low_bytes = _INDEX_LOW_BITS // 8
    shift = _INDEX_AT + low_bytes
    uppers = [
        upper.to_bytes(8 - low_bytes, "little")
        for upper in range(lowest >> _INDEX_LOW_BITS, (highest >> _INDEX_LOW_BITS) + 1)
    ]
    while at < stop:
        hits = [hit for upper in uppers if (hit := data.find(upper, at + shift)) >= 0]
        if not hits:
            return -1
        at = min(hits) - shift
        seen = peek(data, at)
        if at >= stop or seen is None:
            return -1
        if lowest <= seen[1] <= highest:
            return at
        at += 1
    return -1


def _has_hole(data: bytes, start: int, end: int) -> bool:
    """Whether a sector between, or what is left of the first one, holds nothing but zeros."""
    boundary = min(end, (start // _SECTOR + 1) * _SECTOR)
    if not any(data[start:boundary]):
        return True
    zeros = bytes(_SECTOR)
    whole = range(boundary, end - _SECTOR + 1, _SECTOR)
    return any(data[sector : sector + _SECTOR] == zeros for sector in whole)
