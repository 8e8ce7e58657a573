"""All that the broker knows of durability.

A journal takes payloads, gives each an index, and says which indices are committed: on this disk,
or later on a majority, or in a shared log. It does not know what a job is. It is a machine: it asks
for one append at a time and is told when that is on disk.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from ekiden.machine import Instant
from ekiden.model.jobs import Index


class Append(Struct, frozen=True, kw_only=True):
    """Bytes to write and sync, by `local.perform`. Records up to index `upto` are in it."""

    file: str
    data: bytes
    upto: Index
    creates: bool
    header: bytes = b""  # the first bytes of a new file, on disk before any record follows
    closes: str = ""  # the file that gets no more records because of this one
    reserve: int = 0  # bytes of room to ask for before it, its own among them


class Step(Struct, frozen=True):
    """What one turn of the journal brought."""

    append: Append | None
    committed: Index  # everything up to here may be applied, and told to others once applied
    epoch: int = 1
    leads: bool = True


class Journal(Protocol):
    """The seam. Payloads proposed are committed in order, without gaps, or not at all."""

    @property
    def in_flight(self) -> bool:
        """Whether an append is out that was neither persisted nor withdrawn."""

    @property
    def committed(self) -> Index:
        """The highest committed index."""

    def propose(self, payload: bytes) -> Index:
        """Queue a payload for the next append. Its index holds unless it is withdrawn."""

    def advance(self, now: Instant) -> Step:
        """Say what to write, if nothing is being written, and what is committed."""

    def persisted(self, upto: Index) -> None:
        """The append that ends at `upto` is on disk."""

    def withdraw(self) -> list[bytes]:
        """Take back all that is not persisted, after `NoSpace`. Its indices are given again."""

    def read(self, index: Index) -> bytes:
        """The payload of a committed entry. KeyError if its segment was deleted."""
