"""What an agent and its keeper say to each other, and how it is framed.

One stream socket carries both directions. A frame is a u32 length and a msgpack list of messages:
whatever one side had to say in one turn of its loop. The two ends are always of one release, so
nothing here is versioned.

This module is all that both ends share, and the keeper wants to be small: it imports nothing else.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

PROGRAM: Final = "program"
"""Counts against the keeper's slots and waits for one. stdin from `Launch.stdin`, or empty."""
RUNNER: Final = "runner"
"""Long-lived: the socket is its fd 3; it does not count against slots."""
SERVICE: Final = "service"
"""Long-lived: the socket is its stdin and stdout."""

# The environment variable by which everything an attempt started is recognised, also after its
# parents are gone: `<token of the keeper>:<number of the child>`.
MARKER: Final = "EKIDEN_ATTEMPT"

# stdout and stderr up to this size come back in `Ended`, so that a small job costs the agent no
# file at all: as much as travels inline in a result.
CAPTURE_BYTES_MAX: Final = 64 << 10

# The number of the program that was started last, in memory that both ends share: what has begun is
# known also when the keeper died before it could say so.
CELL_BYTES: Final = 8

_LENGTH_BYTES: Final = 4


class Limits(Struct, array_like=True, frozen=True):
    """What one child may use of the machine. Zero: as much as the agent itself may."""

    open_files: int = 8192
    """Enough for what compute programs open; low enough that one that closes every descriptor it
    might have, as many do at the start, is done in a millisecond."""
    processes: int = 16384
    """The kernel counts all threads of the account, not those of the job, and never limits root. So
    this can only stop a fork bomb, and must leave room for a thread per core in every slot."""
    file_bytes: int = 16 << 30
    """One file, stdout included: a program that prints for ever ends before the disk is full."""
    cpu_s: int = 0
    """Off: the time limit of a job is what people mean; this one counts per process."""


class Launch(Struct, array_like=True, frozen=True, kw_only=True):
    """What to start, and how."""

    argv: list[str]
    path: str = ""
    """The executable; empty: `argv[0]`, which then is an absolute path."""
    env: dict[str, str] = {}
    """Everything but HOME, TMPDIR and the marker, which the keeper adds."""
    folder: str = ""
    """Where it runs; made by the caller and left alone. Empty: the keeper gives it a fresh one."""
    wiring: str = PROGRAM
    stdin: bytes = b""
    """What a program reads."""
    stdin_file: str = ""
    """A file to read instead, if it is much."""
    limits: Limits | None = None
    """Where they differ from what the keeper was started with. They can only be lower."""
    mem_mb: int = 0
    """Past this much memory of the whole tree, it is ended as `oom`. Zero: not watched."""


# ------------------------------------------------------------------ agent to keeper


class Setup(Struct, array_like=True, frozen=True, tag=0):
    """First of all. The keeper works in `folder` and ends if its parent is not `agent`."""

    agent: int
    token: str
    folder: str
    slots: int
    limits: Limits


class Slots(Struct, array_like=True, frozen=True, tag=1):
    """How many programs may run at once from now on."""

    slots: int


class Spawn(Struct, array_like=True, frozen=True, tag=2):
    """Start this as `no`. With `sock`, a socket for it came with these bytes."""

    no: int
    launch: Launch
    sock: bool = False


class Kill(Struct, array_like=True, frozen=True, tag=3):
    """End everything `no` has started."""

    no: int


class Recall(Struct, array_like=True, frozen=True, tag=4):
    """Forget `no` if it has not begun, and say so; otherwise nothing."""

    no: int


Order: TypeAlias = Setup | Slots | Spawn | Kill | Recall

# ------------------------------------------------------------------ keeper to agent


class Began(Struct, array_like=True, frozen=True, tag=0):
    """It runs since `since_ns` of the monotonic clock, and writes to these files. Not said of a
    program that ended before there was a moment to say it."""

    no: int
    pid: int
    since_ns: int
    folder: str
    out: str
    err: str


class Ended(Struct, array_like=True, frozen=True, tag=1):
    """Nothing of it runs any more."""

    no: int
    exit_code: int = 0
    signal: int = 0
    """What ended it, if it was a signal; the exit code says nothing then."""
    why: str = ""
    """Who ended it: itself, "oom" or "killed"."""
    cpu_ns: int = 0
    peak_kb: int = 0
    ran_ns: int = 0
    stdout: bytes | None = b""
    """None: too much to carry; it lies in the file `out`, for the agent to read and remove."""
    stderr: bytes | None = b""
    clean: bool = True
    """Its folder was the keeper's, was empty and is gone. Otherwise the agent wipes `folder`."""
    folder: str = ""
    out: str = ""
    err: str = ""
    lost: bool = False
    """The keeper died: what became of it is not known, but it is gone."""


class NotStarted(Struct, array_like=True, frozen=True, tag=2):
    """It never ran."""

    no: int
    why: str
    """"recalled", "killed", "lost" (with its keeper, before its turn), or what the system said."""
    errno: int = 0
    """Why the system refused it; 0 if it was never asked."""


Report: TypeAlias = Began | Ended | NotStarted

decode_orders = msgspec.msgpack.Decoder(list[Order]).decode
decode_reports = msgspec.msgpack.Decoder(list[Report]).decode
_encode = msgspec.msgpack.Encoder().encode


def framed(messages: list[Any]) -> bytes:
    """`messages` as one frame."""
    body = _encode(messages)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Frames:
    """Cuts what arrives into the bodies of frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """All bodies that are complete with `data`."""
        held = self._held
        held += data
        bodies: list[bytes] = []
        at = 0
        while len(held) - at >= _LENGTH_BYTES:
            start = at + _LENGTH_BYTES
            end = start + int.from_bytes(held[at:start], "big")
            if len(held) < end:
                break
            bodies.append(bytes(held[start:end]))
            at = end
        del held[:at]
        return bodies
