"""The book as the disk has it, by somebody who trusts nothing else.

Whatever a sync has made safe is decoded and applied to a book of the mirror's own, from entry 1 on
and never from a snapshot. So the mirror is what every broker has to come back with after any crash,
and what it may tell others at any moment.
"""

from __future__ import annotations

from collections.abc import Callable

from ekiden.core import commands
from ekiden.core.book import JobBook
from ekiden.core.effects import Changes
from ekiden.core.rows import Grant, Settlement
from ekiden.journal.records import HEADER_BYTES, RECORD_BYTES, crc_seed, decode_record
from ekiden.simulation.disk import SimDisk
from ekiden.simulation.world import Violation

_GROUP_IN_HEADER = slice(HEADER_BYTES - 20, HEADER_BYTES - 4)


class Mirror:
    """A full replay of the disk that is always up to date."""

    def __init__(
        self, disk: SimDisk, on_applied: Callable[[commands.Entry, Changes], None]
    ) -> None:
        self.book = JobBook()
        self._disk = disk
        self._on_applied = on_applied
        self._read_upto: dict[str, int] = {}

    def synced(self, name: str) -> None:
        """A file became safe: apply what is new in it."""
        if not name.startswith("segment-") or not name.endswith(".log"):
            return
        at = self._read_upto.get(name, HEADER_BYTES)
        size = self._disk.size(name)
        if size <= at:
            return
        seed = crc_seed(self._disk.read(name, 0, HEADER_BYTES)[_GROUP_IN_HEADER])
        data = self._disk.read(name, at)
        done = 0
        while (found := decode_record(data, done, seed)) is not None:
            index, _, payload = found
            done += RECORD_BYTES + len(payload)
            self._apply(index, payload)
        self._read_upto[name] = at + done

    def state_of(self, job: str) -> str:
        """The state of a job, roughly."""
        row = self.book.find(job)
        if row is None:
            return "unknown"
        if isinstance(row.place, Settlement):
            return row.place.state
        return f"leased to {row.place.worker.id}" if isinstance(row.place, Grant) else "waiting"

    def digest_of(self, job: str) -> bytes:
        """The digest of the content that has this id; empty if none has."""
        row = self.book.find(job)
        return b"" if row is None else row.origin.digests[8 * row.ordinal : 8 * row.ordinal + 8]

    def _apply(self, index: int, payload: bytes) -> None:
        book = self.book
        if index <= book.applied:
            raise Violation("I3", f"entry {index} was written twice")
        if index != book.applied + 1:
            raise Violation("I3", f"entry {index} was written after {book.applied}")
        entry = commands.decode_entry(index, payload)
        try:
            changes = book.apply(entry)
        except Exception as error:
            raise Violation("bug", f"apply raised {error!r} at entry {index}") from error
        self._on_applied(entry, changes)
