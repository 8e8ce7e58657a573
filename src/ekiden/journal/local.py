"""A journal on one disk: committed when synced.

`LocalJournal` is a machine. It gathers what was proposed into one append at a time; the world
writes that with `perform`, inline or in a thread, and says `persisted`. Meanwhile the next append
fills.

`open` recovers: it picks the newest sound snapshot, cuts a torn tail, syncs what it found (an entry
that was read from the page cache after a kill may not be on disk yet) and refuses damage. It
decides everything before it changes anything, so a refusal leaves the folder as it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from msgspec import Struct

from ekiden import limits
from ekiden.errors import CorruptJournal, NoSpace, StorageFault
from ekiden.journal.journal import Append, Step
from ekiden.journal.records import (
    HEADER_BYTES,
    SEGMENT_MAGIC,
    Header,
    damage,
    decode_header,
    encode_header,
    encode_records,
)
from ekiden.journal.segments import (
    Finder,
    Note,
    Segment,
    is_segment,
    is_stillborn,
    list_segments,
    replay,
    scan_segment,
    segment_name,
)
from ekiden.journal.snapshots import (
    DAMAGED_SUFFIX,
    TEMP_SUFFIX,
    SnapshotReader,
    index_of_snapshot,
    snapshot_names,
)
from ekiden.journal.storage import Storage
from ekiden.machine import Instant
from ekiden.model.jobs import Index


def perform(storage: Storage, append: Append, *, sync: bool = True) -> None:
    """Write one append and return when it is durable; with `sync=False`, when it is written.

    On `NoSpace` everything is as before, durably: withdraw and go on. On any other fault stop.
    """
    if append.closes and not sync:
        storage.sync(append.closes)
    try:
        if append.creates:
            storage.create(append.file)
            storage.append(append.file, append.header)
            storage.sync(append.file)
            storage.sync_folder()
        storage.append(append.file, append.data)
    except NoSpace:
        # What was taken back must not come back after a power loss: it is about to be refused.
        if append.creates:
            if append.file in storage.names():
                storage.remove(append.file)
                storage.sync_folder()
        else:
            storage.sync(append.file)
        raise
    if sync:
        storage.sync(append.file)


class Closed(Struct, frozen=True):
    """A segment that gets no more records. `last` is the index of its last one."""

    name: str
    first: Index
    last: Index


class Recovery:
    """What was on disk: a snapshot, if any, and the entries after it."""

    def __init__(
        self,
        storage: Storage,
        *,
        snapshot: SnapshotReader | None,
        segments: list[Segment],
        last: Index,
        torn: list[str],
        damaged: list[str],
        note: Note | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.last = last
        self.torn = torn
        self.damaged = damaged
        self._storage = storage
        self._segments = segments
        self._note = note

    def entries(self) -> Iterator[tuple[Index, bytes]]:
        """Entries after the snapshot, in order, without gaps. Raises CorruptJournal."""
        after = self.snapshot.index if self.snapshot else 0
        reached = after
        entries = replay(
            self._storage, self._segments, after=after, upto=self.last, note=self._note
        )
        for entry in entries:
            yield entry
            reached = entry[0]
        if reached < self.last:
            raise damage(
                f"entries {reached + 1:,} to {self.last:,} are missing",
                self._segments[-1].name if self._segments else "",
                0,
            )


class LocalJournal:
    """The journal of a broker without peers. It always leads, in epoch 1."""

    def __init__(
        self, storage: Storage, *, group: bytes, segment_bytes: int, segments: list[Segment]
    ) -> None:
        self.group = group
        self.committed: Index = 0
        self._storage = storage
        self._segment_bytes = segment_bytes
        self._finder = Finder(storage)
        self._segments = segments
        self._appendable = False  # whether the last segment may grow
        self._file_bytes = 0
        self._proposed: list[bytes] = []
        self._flying: list[bytes] = []
        self._append: Append | None = None

    @classmethod
    def open(
        cls,
        storage: Storage,
        *,
        now: Instant,
        segment_bytes: int = limits.SEGMENT_BYTES,
        group: bytes,
    ) -> tuple[LocalJournal, Recovery]:
        """Recover the folder, which the caller has locked, or begin a new one as `group`.

        A folder that holds files already keeps the group id they name: see `journal.group`.
        Raises CorruptJournal or VersionMismatch, and then has changed nothing.
        """
        found = _Found.survey(storage)
        found.prepare(storage)
        segments = found.segments
        journal = cls(
            storage,
            group=found.group or group,
            segment_bytes=segment_bytes,
            segments=segments,
        )
        journal.committed = found.last
        journal._file_bytes = found.tail_end
        journal._appendable = found.appendable
        return journal, Recovery(
            storage,
            snapshot=found.snapshot,
            segments=list(segments),
            last=found.last,
            torn=found.torn,
            damaged=found.damaged,
            note=journal._finder.note,
        )

    # -------------------------------------------------------------- writing

    @property
    def in_flight(self) -> bool:
        """Whether an append is out that was neither persisted nor withdrawn."""
        return self._append is not None

    @property
    def last(self) -> Index:
        """The highest index given to anything proposed."""
        return self.committed + len(self._flying) + len(self._proposed)

    def propose(self, payload: bytes) -> Index:
        """Queue a payload for the next append. Its index holds unless it is withdrawn."""
        self._proposed.append(payload)
        return self.last

    def advance(self, now: Instant) -> Step:
        """The next append, if there is something to write and nothing is being written."""
        if self._append is not None or not self._proposed:
            return Step(None, self.committed)
        first = self.committed + 1
        data = encode_records(first, self._proposed, self.group)
        current = self._segments[-1].name if self._segments else ""
        creates = not self._appendable or self._file_bytes >= self._segment_bytes
        self._append = Append(
            file=segment_name(first) if creates else current,
            data=data,
            upto=self.last,
            creates=creates,
            header=encode_header(SEGMENT_MAGIC, first, self.group) if creates else b"",
            closes=current if creates else "",
        )
        self._flying, self._proposed = self._proposed, []
        return Step(self._append, self.committed)

    def persisted(self, upto: Index) -> None:
        """The append that ends at `upto` is on disk: its entries are committed."""
        append = self._append
        assert append is not None, "nothing is being written"
        assert append.upto == upto, "only what was asked for is persisted"
        if append.creates:
            self._segments.append(Segment(self.committed + 1, append.file))
            self._file_bytes = HEADER_BYTES
            self._appendable = True
        self._finder.note(self._segments[-1].first, self.committed + 1, self._file_bytes)
        self._file_bytes += len(append.data)
        self.committed = upto
        self._append, self._flying = None, []

    def withdraw(self) -> list[bytes]:
        """Take back all that is not persisted, in order. The same indices are given again."""
        payloads = self._flying + self._proposed
        self._append, self._flying, self._proposed = None, [], []
        return payloads

    def roll(self) -> None:
        """Close the current segment: the next append begins a new one."""
        if self._file_bytes > HEADER_BYTES:
            self._appendable = False

    # -------------------------------------------------------------- reading

    def closed_segments(self) -> list[Closed]:
        """Segments that get no more records, oldest first."""
        self._refresh()
        last = self.committed if self._append is None and not self._appendable else None
        ends = [segment.first - 1 for segment in self._segments[1:]]
        if last is not None and self._segments:
            ends.append(last)
        return [
            Closed(segment.name, segment.first, end)
            for segment, end in zip(self._segments, ends, strict=False)
        ]

    def read(self, index: Index) -> bytes:
        """The payload of a committed entry. KeyError if it is not there, or not any more."""
        if not 0 < index <= self.committed:
            raise KeyError(index)
        try:
            return self._finder.read(self._holding(index), index)
        except StorageFault:
            # Somebody compressed or deleted the file: look again, once.
            self._refresh()
            return self._finder.read(self._holding(index), index)

    def _holding(self, index: Index) -> Segment:
        which = bisect_right(self._segments, index, key=lambda segment: segment.first) - 1
        if which < 0:
            raise KeyError(index)
        return self._segments[which]

    def _refresh(self) -> None:
        """Take note of what `tidy` did. The segment being made is not ours to see yet."""
        making = self._append.file if self._append and self._append.creates else ""
        self._segments = [found for found in list_segments(self._storage) if found.name != making]


class _Found(Struct):
    """What `open` learned before it changed anything, and the changes to make."""

    segments: list[Segment]
    snapshot: SnapshotReader | None
    damaged: list[str]
    group: bytes = b""
    last: Index = 0
    tail_end: int = 0
    appendable: bool = False
    torn: list[str] = []
    stillborn: str = ""
    cut: bool = False

    @classmethod
    def survey(cls, storage: Storage) -> _Found:
        snapshot, damaged = _newest_sound(storage)
        found = cls(list_segments(storage), snapshot, damaged)
        if snapshot is not None:
            found.group, found.last = snapshot.group, snapshot.index
        found._set_aside_stillborn(storage)
        found._check_headers(storage)
        found._survey_tail(storage)
        if damaged:
            found._check_bridge(storage)
        return found

    @property
    def covered(self) -> Index:
        return self.snapshot.index if self.snapshot else 0

    def _set_aside_stillborn(self, storage: Storage) -> None:
        if self.segments and is_stillborn(storage, self.segments[-1]):
            self.stillborn = self.segments.pop().name
            self.torn.append(f"{self.stillborn!r} was being made and holds nothing")

    def _check_headers(self, storage: Storage) -> None:
        """Refuse newer versions, mixtures, and a beginning that nothing leads up to."""
        for segment in self.segments:
            if not segment.compressed:
                head = storage.read(segment.name, 0, HEADER_BYTES)
                self._belongs(decode_header(head, SEGMENT_MAGIC, segment.name), segment)
        if self.segments and self.segments[0].first > self.covered + 1:
            first = self.segments[0]
            what = f"entries {self.covered + 1:,} to {first.first - 1:,} are in no file"
            raise damage(what, first.name, 0)

    def _belongs(self, header: Header, segment: Segment) -> None:
        if self.group not in (b"", header.group):
            raise damage("the file belongs to another group", segment.name, 0)
        self.group = header.group

    def _survey_tail(self, storage: Storage) -> None:
        if not self.segments:
            return
        tail = self.segments[-1]
        scan = scan_segment(storage, tail)
        for _ in scan:
            pass
        self._belongs(scan.header, tail)
        # A segment is synced before the next one is made or a snapshot covers it, so what is torn
        # there was no interrupted write.
        synced = self.stillborn or tail.compressed or scan.upcoming <= self.covered
        if scan.torn and synced:
            raise damage(f"synced entries are damaged: {scan.torn}", tail.name, scan.end)
        if scan.torn:
            self.torn.append(scan.torn)
            self.cut = True
        self.tail_end = scan.end
        self.last = max(self.covered, scan.upcoming - 1)
        same_version = scan.header.version == limits.JOURNAL_VERSION
        self.appendable = same_version and not tail.compressed and scan.upcoming > self.covered

    def _check_bridge(self, storage: Storage) -> None:
        """An older snapshot will do only if the entries after it are all there."""
        newest = index_of_snapshot(self.damaged[0])
        reached = self.covered
        for index, _ in replay(storage, self.segments, after=self.covered):
            reached = index
        if reached < newest:
            what = f"the snapshot is damaged and entries {reached + 1:,} to {newest:,} are gone"
            raise damage(what, self.damaged[0], 0)

    def prepare(self, storage: Storage) -> None:
        """Make the folder what was decided, durably."""
        names = storage.names()
        for name in names:
            raw_is_there = name.endswith(".zst") and name.removesuffix(".zst") in names
            if _is_temp(name) or (is_segment(name) and raw_is_there) or name == self.stillborn:
                storage.remove(name)
        for name in self.damaged:
            storage.rename(name, name + DAMAGED_SUFFIX)
        if self.segments:
            if self.cut:
                storage.truncate(self.segments[-1].name, self.tail_end)
            storage.sync(self.segments[-1].name)
        storage.sync_folder()


def _is_temp(name: str) -> bool:
    return name.endswith(TEMP_SUFFIX) and name.startswith(("segment-", "snapshot-"))


def _newest_sound(storage: Storage) -> tuple[SnapshotReader | None, list[str]]:
    """The newest snapshot without damage, and the names of newer ones that have some."""
    damaged = []
    for name in snapshot_names(storage):
        try:
            reader = SnapshotReader(storage, name)
            reader.check()
        except CorruptJournal:
            damaged.append(name)
            continue
        return reader, damaged
    return None, damaged


def newest_snapshot(storage: Storage) -> SnapshotReader | None:
    """The newest snapshot without damage. Reads only: works on a live folder, without its lock."""
    return _newest_sound(storage)[0]


def recover_upto(storage: Storage, upto: Index) -> Recovery:
    """Snapshot and entries up to `upto`, which must be in closed segments. Reads only.

    For the child that makes the next snapshot while the broker goes on writing.
    """
    snapshot = newest_snapshot(storage)
    if snapshot is not None and snapshot.index > upto:
        upto = snapshot.index
    return Recovery(
        storage,
        snapshot=snapshot,
        segments=list_segments(storage),
        last=upto,
        torn=[],
        damaged=[],
    )
