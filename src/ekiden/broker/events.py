"""What a broker hears from its disk and clock, and asks of them, beside the network's events."""

from __future__ import annotations

from msgspec import Struct

from ekiden.model.jobs import Index, WallTime


class Persisted(Struct, frozen=True):
    """The append that ends at `upto` is on disk."""

    upto: Index


class AppendFailed(Struct, frozen=True):
    """The append found no space; nothing of it is on disk. (Any other failure ends the process.)"""

    reason: str


class DiskSpace(Struct, frozen=True):
    """Bytes free where the journal lies; told every second or so."""

    free: int


class WallClock(Struct, frozen=True):
    """What the wall clock says now. It may jump; only users' wall-time wishes follow it."""

    wall: WallTime


class SnapshotTaken(Struct, frozen=True):
    """A snapshot of everything up to `index` is durable; 0 if it failed, and `reason` says why."""

    index: Index
    reason: str = ""


class Shutdown(Struct, frozen=True):
    """Finish what is being written, tell the peers, then `Halt`."""


class TakeSnapshot(Struct, frozen=True):
    """Effect: make a snapshot of everything up to `upto`, which lies in closed segments."""

    upto: Index


class Halt(Struct, frozen=True):
    """Effect: all is written and told; the process may end with code 0."""
