"""What a folder holds after whatever happened to it.

The newest sound snapshot is picked, a torn or blank tail is cut, what was found is synced (an entry
that was read from the page cache after a kill may not be on disk yet), and damage is refused.
Everything is decided before anything is changed, so a refusal leaves the folder as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from ekiden import limits
from ekiden.errors import CorruptJournal
from ekiden.journal.records import HEADER_BYTES, SEGMENT_MAGIC, Header, damage, decode_header
from ekiden.journal.segments import (
    Note,
    Segment,
    is_segment,
    is_stillborn,
    list_segments,
    replay,
    scan_segment,
)
from ekiden.journal.snapshots import (
    DAMAGED_SUFFIX,
    TEMP_SUFFIX,
    SnapshotReader,
    index_of_snapshot,
    snapshot_names,
)
from ekiden.journal.storage import Storage
from ekiden.model.jobs import Index


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


class Found(Struct):
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
    def survey(cls, storage: Storage) -> Found:
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
        # A segment is trimmed and synced before the next one is made, and its entries are synced
        # before a snapshot covers them, so what is torn or blank there was no interrupted write.
        synced = self.stillborn or tail.compressed or scan.upcoming <= self.covered
        if scan.unsound and synced:
            raise damage(f"synced entries are damaged: {scan.unsound}", tail.name, scan.end)
        if scan.torn:
            self.torn.append(scan.torn)
        # Room that a crash left is no news. It goes all the same: a storage knows only by the size
        # of a file where it ends.
        self.cut = bool(scan.unsound)
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
