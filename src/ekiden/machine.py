"""The contract between decisions and the world.

Every role is a machine: feed it events with `receive`, then drain what it decided with `advance`.
A machine touches no clock, socket, file or random source; the loop in `world` does that for it, and
the simulator does it again in a seeded universe. There are no timer objects: `next_deadline` says
when to call `advance` even if nothing happens.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

Instant: TypeAlias = int
"""Nanoseconds of a monotonic clock. Comparable within one process only."""

ConnId: TypeAlias = int
"""Names one connection of this process; never used again for another."""


class Frame(NamedTuple):
    """One message as it came off the wire: header fields, and a body not yet decoded."""

    type: int
    msg_id: int
    corr_id: int
    body: bytes | memoryview


# ------------------------------------------------------------------ events


class Connected(Struct, frozen=True):
    """A connection is open. `dialled` is the address asked for, or empty if the peer came to us.
    `nonce` is fresh randomness for the handshake."""

    conn: ConnId
    peer: str
    nonce: bytes
    dialled: str = ""


class DialFailed(Struct, frozen=True):
    """No connection to `address` came about."""

    address: str
    reason: str


class Received(Struct, frozen=True):
    """Whole frames, in order."""

    conn: ConnId
    frames: list[Frame]


class Garbled(Struct, frozen=True):
    """Bytes that are no frame: the connection is not to be trusted any further."""

    conn: ConnId
    reason: str


class Congested(Struct, frozen=True):
    """The peer reads more slowly than we write. What may wait should, until `Relieved`."""

    conn: ConnId


class Relieved(Struct, frozen=True):
    """The peer has caught up."""

    conn: ConnId


class Disconnected(Struct, frozen=True):
    """The connection is gone. Nothing sent on it since can be relied upon."""

    conn: ConnId
    reason: str = ""


# ------------------------------------------------------------------ effects


class Send(Struct, frozen=True):
    """Write these bytes (whole frames) to the connection, if it is still there."""

    conn: ConnId
    data: bytes


class Close(Struct, frozen=True):
    """Close the connection after what was sent on it."""

    conn: ConnId
    reason: str = ""


class Trust(Struct, frozen=True):
    """The peer has proved who it is: full frames from now on."""

    conn: ConnId


class Dial(Struct, frozen=True):
    """Try to connect to `host:port`."""

    address: str


class Log(Struct, frozen=True):
    """A line for the log: event first, then facts. Machines do not log; the loop does."""

    level: str
    event: str
    facts: dict[str, Any]


class Machine(Protocol):
    """What the loop and the simulator know of a role."""

    def receive(self, event: Any, now: Instant) -> None:
        """Take note of what happened."""

    def advance(self, now: Instant) -> list[Any]:
        """Decide, once per turn, and say what the world shall do."""

    def next_deadline(self) -> Instant | None:
        """When to call `advance` even if nothing happens."""
