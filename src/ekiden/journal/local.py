"""A journal on one disk: committed when synced.

`LocalJournal` is a machine. It gathers what was proposed into one append at a time; the world
writes that with `perform`, inline or in a thread, and says `persisted`. Meanwhile the next append
fills. How a folder is recovered is in `recovery`.
"""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct

from ekiden import limits
from ekiden.errors import NoSpace, StorageFault
from ekiden.journal.journal import Append, Step
from ekiden.journal.records import HEADER_BYTES, SEGMENT_MAGIC, encode_header, encode_records
from ekiden.journal.recovery import Found, Recovery, newest_snapshot, recover_upto
from ekiden.journal.segments import Finder, Segment, list_segments, segment_name
from ekiden.journal.storage import Storage
from ekiden.machine import Instant
from ekiden.model.jobs import Index

__all__ = ["Closed", "LocalJournal", "Recovery", "newest_snapshot", "perform", "recover_upto"]


def perform(storage: Storage, append: Append, *, sync: bool = True) -> None:
    """Write one append and return when it is durable; with `sync=False`, when it is written.

    On `NoSpace` everything is as before, durably: withdraw and go on. On any other fault stop.
    """
    try:
        if append.closes:
            storage.trim(append.closes)
            storage.sync(append.closes)
        if append.creates:
            storage.create(append.file)
            storage.append(append.file, append.header)
            storage.sync(append.file)
            storage.sync_folder()
        if append.reserve:
            storage.reserve(append.file, append.reserve)
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


class LocalJournal:
    """The journal of a broker without peers. It always leads, in epoch 1."""

    def __init__(
        self,
        storage: Storage,
        *,
        group: bytes,
        segment_bytes: int,
        segments: list[Segment],
        reserve_bytes: int,
    ) -> None:
        self.group = group
        self.committed: Index = 0
        self._storage = storage
        self._segment_bytes = segment_bytes
        self._reserve_bytes = reserve_bytes
        self._finder = Finder(storage)
        self._segments = segments
        self._appendable = False  # whether the last segment may grow
        self._file_bytes = 0
        self._room_end = 0  # up to where room was asked for in the last segment; 0 if nowhere
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
        reserve_bytes: int = limits.RESERVE_BYTES,
        group: bytes,
    ) -> tuple[LocalJournal, Recovery]:
        """Recover the folder, which the caller has locked, or begin a new one as `group`.

        A folder that holds files already keeps the group id they name: see `journal.group`. Room is
        asked for `reserve_bytes` at a time. Ask for none where appends are not synced: after a loss
        of power, zeros before what was written later would look like damage.
        Raises CorruptJournal or VersionMismatch, and then has changed nothing.
        """
        found = Found.survey(storage)
        found.prepare(storage)
        segments = found.segments
        journal = cls(
            storage,
            group=found.group or group,
            segment_bytes=segment_bytes,
            segments=segments,
            reserve_bytes=reserve_bytes,
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
        start, room_end = (HEADER_BYTES, 0) if creates else (self._file_bytes, self._room_end)
        self._append = Append(
            file=segment_name(first) if creates else current,
            data=data,
            upto=self.last,
            creates=creates,
            header=encode_header(SEGMENT_MAGIC, first, self.group) if creates else b"",
            closes=current if creates else "",
            reserve=self._room_wanted(start, len(data)) if start + len(data) > room_end else 0,
        )
        self._flying, self._proposed = self._proposed, []
        return Step(self._append, self.committed)

    def _room_wanted(self, start: int, size: int) -> int:
        """Bytes to reserve for an append of `size` bytes that does not fit into what there is."""
        if size > limits.INLINE_SYNC_BYTES:  # its own bytes take longer than a new size does
            return 0
        room = min(self._reserve_bytes, self._segment_bytes - start)
        return room if room > size else 0

    def persisted(self, upto: Index) -> None:
        """The append that ends at `upto` is on disk: its entries are committed."""
        append = self._append
        assert append is not None, "nothing is being written"
        assert append.upto == upto, "only what was asked for is persisted"
        if append.creates:
            self._segments.append(Segment(self.committed + 1, append.file))
            self._file_bytes = HEADER_BYTES
            self._appendable = True
        if append.creates or append.reserve:
            self._room_end = self._file_bytes + append.reserve
        self._finder.note(self._segments[-1].first, self.committed + 1, self._file_bytes)
        self._file_bytes += len(append.data)
        self.committed = upto
        self._append, self._flying = None, []

    def withdraw(self) -> list[bytes]:
        """Take back all that is not persisted, in order. The same indices are given again."""
        payloads = self._flying + self._proposed
        self._append, self._flying, self._proposed = None, [], []
        self._room_end = 0  # the room went with what was taken back
        return payloads

    def roll(self) -> None:
        """Close the current segment: the next append begins a new one."""
        if self._file_bytes > HEADER_BYTES:
            self._appendable = False

    def trim(self) -> None:
        """Give back, durably, the room behind the last record. For an end in good order."""
        if self._room_end and self._append is None:
            self._storage.trim(self._segments[-1].name)
            self._storage.sync(self._segments[-1].name)
            self._room_end = 0

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
