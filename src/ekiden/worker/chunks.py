"""What lanes are fed with: attempts in batches, cut into chunks, through a socket.

See `lanes` for who uses this and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final, TypeAlias

from ekiden.machine import Instant
from ekiden.model.jobs import Note, Spec
from ekiden.wire.messages import AssignRun, Failure

# A chunk is about this much work and at most so many bytes: what is lost with a child, and what
# waits behind a guess that was wrong.
CHUNK_NS: Final = 2_000_000
CHUNK_BYTES: Final = 1 << 20

_READ_BYTES: Final = 1 << 18


class Kind:
    """Attempts that are alike, and what was learned about them."""

    __slots__ = ("mean_ns",)

    def __init__(self) -> None:
        self.mean_ns = 0
        """How long a run takes, of late. 0: unknown, so nothing shall wait behind it."""

    def learn(self, took_ns: int, runs: int) -> None:
        """Some have finished."""
        each = max(took_ns // runs, 1)
        self.mean_ns = (self.mean_ns + each) // 2 if self.mean_ns else each


class Batch:
    """Attempts of one grant that share a spec, as an executor keeps them."""

    __slots__ = ("bodies", "body_bytes", "ended", "first", "grant", "kind", "run", "spec")

    def __init__(
        self, run: AssignRun, spec: Spec, kind: Kind, bodies: list[bytes] | None = None
    ) -> None:
        """`bodies` are what the child is sent, if not what came."""
        self.run = run
        self.spec = spec
        self.kind = kind
        self.bodies = run.bodies if bodies is None else bodies
        self.body_bytes = sum(map(len, self.bodies)) // len(self.bodies) + 1
        self.grant = run.grant
        self.first = run.first
        self.ended: set[int] = set()
        """Indices that were settled before the batch was put in the line."""

    def chunk_size(self) -> int:
        """How many to give at once."""
        mean_ns = self.kind.mean_ns
        if not mean_ns:
            return 1
        return max(min(CHUNK_NS // mean_ns, CHUNK_BYTES // self.body_bytes), 1)


Piece: TypeAlias = tuple[Batch, int, int]
"""Indices [low, end) of a batch that wait to begin."""


class Chunk:
    """What a child has been given: indices `low` .. `end` of a batch, in order."""

    __slots__ = ("batch", "done", "end", "low", "mark", "number", "recalled", "told")

    def __init__(self, number: int, piece: Piece, now: Instant) -> None:
        self.number = number
        self.batch, self.low, self.end = piece
        self.done = self.low
        """Up to which index outcomes have come."""
        self.mark = now
        """When it came to the front, or the last outcome came."""
        self.told = -1
        """The index that was announced as running."""
        self.recalled = False


class Outcomes:
    """What a child said of a chunk, from `chunk.done` on: one output each, or why there is none.
    `later` are those whose outcome comes by another way."""

    __slots__ = ("failures", "later", "notes", "outputs", "ran_ns")

    def __init__(self, outputs: list[bytes], ran_ns: int) -> None:
        self.outputs = outputs
        self.ran_ns = ran_ns
        self.failures: list[Failure] = []
        self.notes: dict[int, Note] = {}
        self.later: set[int] = set()


# ------------------------------------------------------------------ one child's socket


class Pipe:
    """Our end of a child's socket: bytes in as they come, bytes out without ever waiting."""

    def __init__(
        self, sock: socket.socket, heard: Callable[[bytes], None], closed: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._heard = heard
        self._closed = closed
        self._unsent = bytearray()
        self._reading = True
        self._loop.add_reader(sock.fileno(), self._read)

    def send_fd(self, fd: int) -> None:
        """Hand a descriptor over, with one byte. The first thing on the socket: it has room."""
        socket.send_fds(self._sock, [b"."], [fd])

    def write(self, data: bytes) -> None:
        """Send this after all before it. What cannot be sent any more is the end's business."""
        if not self._unsent:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                return
            if not data:
                return
            self._loop.add_writer(self._sock.fileno(), self._write)
        self._unsent += data

    def _write(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> bool:
        """One look; whether there may be more."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._heard(data)
            return self._reading
        self._stop_reading()
        self._closed()
        return False

    def drain(self) -> None:
        """Take in what the child has left behind."""
        while self._reading and self._read():
            pass

    def finish(self) -> None:
        """The child shall see the end of its input."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """No more of it."""
        if self._sock.fileno() >= 0:
            self._stop_reading()
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())
