"""Segment files: which there are, and how to read them, raw or compressed.

`segment-<first index>.log` holds a header and records. Once a snapshot covers it, it is kept as
`.log.zst`: zstd frames that each begin at a record, then a table in a skippable frame, so that one
entry can be read by unpacking one frame while `zstd -d` still gives back the raw file.

If both exist, a crash interrupted the compression: the raw one counts.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from struct import Struct as Layout
from typing import Final, NamedTuple, TypeAlias, TypeVar

import google_crc32c

from ekiden.errors import CorruptJournal, StorageFault
from ekiden.journal.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    SEGMENT_MAGIC,
    Scan,
    crc_seed,
    damage,
    decode_header,
    decode_record,
    peek,
    scan,
)
from ekiden.journal.storage import Storage
from ekiden.model.jobs import Index

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# Raw bytes in one zstd frame, and between two remembered offsets of a raw file: what has to be read
# to find one entry. Unpacking this much takes well under a millisecond.
STRIDE_BYTES: Final = 256 << 10

# Segments whose offsets are remembered. Reads of old results go to few segments at a time.
_REMEMBERED_MAX: Final = 64

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_NAME: Final = re.compile(r"segment-(\d{20})\.log(\.zst)?")

_SKIPPABLE: Final = 0x184D2A50
_TABLE_HEAD: Final = Layout("<IIQI")  # skippable magic, size, wall time, rows
_TABLE_ROW: Final = Layout("<QII")  # first index, packed bytes, raw bytes
_TABLE_TAIL: Final = Layout("<II")  # crc of all before, bytes of the whole table


Note: TypeAlias = Callable[[Index, Index, int], None]


class Segment(NamedTuple):
    """One segment, by the file that counts."""

    first: Index
    name: str

    @property
    def compressed(self) -> bool:
        return self.name.endswith(".zst")


class Part(NamedTuple):
    """One zstd frame of a compressed segment."""

    first: Index
    offset: int
    packed: int
    raw: int


class Table(NamedTuple):
    """What a compressed segment says of itself. `wall_ns` is when it was compressed."""

    wall_ns: int
    parts: list[Part]


def segment_name(first: Index) -> str:
    """The raw file that begins with entry `first`."""
    return f"segment-{first:020d}.log"


def list_segments(storage: Storage) -> list[Segment]:
    """All segments in order."""
    found: dict[Index, str] = {}
    for name in storage.names():  # sorted: `.log` comes before `.log.zst`
        if match := _NAME.fullmatch(name):
            found.setdefault(int(match[1]), name)
    return [Segment(first, name) for first, name in sorted(found.items())]


def is_segment(name: str) -> bool:
    """Whether the file is a segment, raw or compressed."""
    return _NAME.fullmatch(name) is not None


# ------------------------------------------------------------------ whole segments


def load(storage: Storage, segment: Segment) -> bytes:
    """The raw bytes of a segment. Survives being compressed by somebody else meanwhile."""
    try:
        return _load(storage, segment)
    except StorageFault:
        now = {other.first: other for other in list_segments(storage)}.get(segment.first)
        if now is None or now.name == segment.name:
            raise
        return _load(storage, now)


def _load(storage: Storage, segment: Segment) -> bytes:
    if not segment.compressed:
        return storage.read(segment.name)
    return b"".join(raw for _, raw in unpack(storage, segment.name))


def is_stillborn(storage: Storage, segment: Segment) -> bool:
    """Whether a crash, or a reader who came too early, met the file before its header was whole.

    The header is synced before any record follows, so a bad one with nothing behind it held
    nothing; with something behind it, it is damage.
    """
    if segment.compressed or storage.size(segment.name) > HEADER_BYTES:
        return False
    try:
        decode_header(storage.read(segment.name), SEGMENT_MAGIC, segment.name)
    except CorruptJournal:
        return True
    return False


def scan_segment(storage: Storage, segment: Segment) -> Scan:
    """The records of a segment, whose header must agree with its name."""
    found = scan(load(storage, segment), file=segment.name, again=lambda: load(storage, segment))
    if found.header.index != segment.first:
        what = f"the header says first index {found.header.index:,}, unlike the name"
        raise damage(what, segment.name, 0)
    return found


def replay(
    storage: Storage,
    segments: list[Segment],
    *,
    after: Index,
    upto: Index | None = None,
    note: Note | None = None,
) -> Iterator[tuple[Index, bytes]]:
    """Entries after `after`, up to `upto`, without gaps. The last segment may end torn or blank.

    `note` is told the segment, index and offset of every record that was read in a raw file.
    """
    expected = after + 1
    group = b""
    for position, segment in enumerate(segments):
        follower = segments[position + 1] if position + 1 < len(segments) else None
        if follower is not None and follower.first <= expected:
            continue
        if upto is not None and expected > upto:
            return
        if segment.first > expected:
            raise _gap(expected, segment)
        if follower is None and is_stillborn(storage, segment):
            return
        found = scan_segment(storage, segment)
        if group not in (b"", found.header.group):
            raise damage("the file belongs to another group", segment.name, 0)
        group = found.header.group
        for record in found:
            if note is not None and not segment.compressed:
                note(segment.first, record.index, record.offset)
            if record.index >= expected:
                if upto is not None and record.index > upto:
                    return
                yield record.index, record.payload
                expected = record.index + 1
        if follower is None:
            return
        if found.unsound:
            raise damage(f"a closed segment ends badly: {found.unsound}", segment.name, found.end)
        if found.upcoming != follower.first:
            raise _gap(found.upcoming, follower)


def _gap(expected: Index, segment: Segment) -> Exception:
    what = f"entries {expected:,} to {segment.first - 1:,} are missing before this segment"
    return damage(what, segment.name, 0)


# ------------------------------------------------------------------ compression


def compress(raw: bytes, found: Scan, *, wall_ns: int) -> bytes:
    """The compressed form of a segment whose records are `found`. Raises on any damage."""
    cuts, last = [(found.header.index, 0)], 0
    for record in found:
        if record.offset - last >= STRIDE_BYTES:
            last = record.offset
            cuts.append((record.index, last))
    if found.unsound:
        raise damage(f"a closed segment ends badly: {found.unsound}", "", found.end)
    ends = [offset for _, offset in cuts[1:]] + [len(raw)]
    options = {int(zstd.CompressionParameter.checksum_flag): 1}
    frames = [
        zstd.compress(raw[start:end], options=options)
        for (_, start), end in zip(cuts, ends, strict=True)
    ]
    rows = [
        _TABLE_ROW.pack(first, len(frame), end - start)
        for (first, start), end, frame in zip(cuts, ends, frames, strict=True)
    ]
    return b"".join(frames) + _encode_table(rows, wall_ns)


def _encode_table(rows: list[bytes], wall_ns: int) -> bytes:
    total = _TABLE_HEAD.size + len(rows) * _TABLE_ROW.size + _TABLE_TAIL.size
    body = _TABLE_HEAD.pack(_SKIPPABLE, total - 8, wall_ns, len(rows)) + b"".join(rows)
    return body + _TABLE_TAIL.pack(google_crc32c.value(body), total)


def decode_table(data: bytes, file: str) -> Table:
    """The table at the end of a whole compressed segment, or of its last bytes."""
    tail = data[-_TABLE_TAIL.size :]
    if len(tail) == _TABLE_TAIL.size:
        crc, total = _TABLE_TAIL.unpack(tail)
        body = data[-total : -_TABLE_TAIL.size] if total <= len(data) else b""
        if len(body) >= _TABLE_HEAD.size and google_crc32c.value(body) == crc:
            return _decode_rows(body)
    raise damage("the table of the compressed segment is damaged", file, max(0, len(data) - 8))


def _decode_rows(body: bytes) -> Table:
    _, _, wall_ns, _ = _TABLE_HEAD.unpack_from(body)
    parts, offset = [], 0
    for first, packed, raw in _TABLE_ROW.iter_unpack(body[_TABLE_HEAD.size :]):
        parts.append(Part(first, offset, packed, raw))
        offset += packed
    return Table(wall_ns, parts)


def unpack(storage: Storage, name: str) -> Iterator[tuple[Part, bytes]]:
    """The parts of a compressed segment and their raw bytes, in order."""
    for part in read_table(storage, name).parts:
        yield part, _unpack(storage.read(name, part.offset, part.packed), part, name)


def read_table(storage: Storage, name: str) -> Table:
    """The table of a compressed segment, without reading the rest."""
    size = storage.size(name)
    tail = storage.read(name, max(0, size - _TABLE_TAIL.size))
    total = _TABLE_TAIL.unpack(tail)[1] if len(tail) == _TABLE_TAIL.size else 0
    return decode_table(storage.read(name, max(0, size - min(total, size))), name)


def _unpack(packed: bytes, part: Part, file: str) -> bytes:
    # The bound comes from a table under a crc: a damaged frame cannot make us allocate more.
    unpacker = zstd.ZstdDecompressor()
    try:
        raw = unpacker.decompress(packed, max_length=part.raw)
        if len(raw) == part.raw and not unpacker.eof:
            # The frame's checksum is looked at only when its end is reached.
            raw += unpacker.decompress(b"", max_length=1)
    except zstd.ZstdError as error:
        raise damage(f"a compressed part is damaged ({error})", file, part.offset) from None
    if len(raw) != part.raw or not unpacker.eof:
        raise damage("a compressed part has the wrong size", file, part.offset)
    return raw


# ------------------------------------------------------------------ single entries


class Finder:
    """Reads single entries, and remembers a few offsets so that each read touches little."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._marks: dict[Index, list[tuple[Index, int]]] = {}
        self._tables: dict[str, Table] = {}
        self._seeds: dict[str, int] = {}

    def note(self, first: Index, index: Index, offset: int) -> None:
        """Entry `index` of the segment that begins with `first` lies at `offset`."""
        marks = self._marks.get(first)
        if marks is None:
            marks = self._marks[first] = [(first, HEADER_BYTES)]
            _forget_oldest(self._marks)
        if offset - marks[-1][1] >= STRIDE_BYTES and index > marks[-1][0]:
            marks.append((index, offset))

    def read(self, segment: Segment, index: Index) -> bytes:
        """The payload of `index`, which must be in `segment`. StorageFault if the file is gone."""
        if segment.compressed:
            return self._read_compressed(segment, index)
        seed = self._seed(segment.name, lambda: self._storage.read(segment.name, 0, HEADER_BYTES))
        marks = self._marks.get(segment.first, [(segment.first, HEADER_BYTES)])
        at = marks[bisect_right(marks, index, key=lambda mark: mark[0]) - 1][1]
        window_at, window = at, b""
        while True:
            seen = peek(window, at - window_at)
            if seen is None:
                window_at, window = at, self._storage.read(segment.name, at, STRIDE_BYTES)
                seen = peek(window, 0)
            if seen is None or not 0 < seen[1] <= index:
                raise damage(f"entry {index:,} is not where it should be", segment.name, at)
            length, found = seen
            if found == index:
                data = self._storage.read(segment.name, at, RECORD_BYTES + length)
                return _checked(data, 0, seed, index, segment.name, at)
            self.note(segment.first, found, at)
            at += RECORD_BYTES + length

    def _read_compressed(self, segment: Segment, index: Index) -> bytes:
        table = self._tables.get(segment.name)
        if table is None:
            table = self._tables[segment.name] = read_table(self._storage, segment.name)
            _forget_oldest(self._tables)
        which = bisect_right(table.parts, index, key=lambda part: part.first) - 1
        raw = self._part(segment.name, table.parts[max(which, 0)])
        seed = self._seed(segment.name, lambda: self._part(segment.name, table.parts[0]))
        at = HEADER_BYTES if which == 0 else 0
        while (seen := peek(raw, at)) is not None and seen[1] < index:
            at += RECORD_BYTES + seen[0]
        return _checked(raw, at, seed, index, segment.name, table.parts[max(which, 0)].offset)

    def _part(self, name: str, part: Part) -> bytes:
        return _unpack(self._storage.read(name, part.offset, part.packed), part, name)

    def _seed(self, name: str, head: Callable[[], bytes]) -> int:
        seed = self._seeds.get(name)
        if seed is None:
            header = decode_header(head(), SEGMENT_MAGIC, name)
            seed = self._seeds[name] = crc_seed(header.group)
            _forget_oldest(self._seeds)
        return seed


def _checked(data: bytes, at: int, seed: int, index: Index, file: str, offset: int) -> bytes:
    found = decode_record(data, at, seed)
    if found is None or found[0] != index:
        raise damage(f"entry {index:,} is damaged", file, offset)
    return found[2]


def _forget_oldest(memory: dict[_Key, _Value]) -> None:
    while len(memory) > _REMEMBERED_MAX:
        del memory[next(iter(memory))]
