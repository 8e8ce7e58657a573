"""Runs `async` handlers, on a loop that is not the machine's.

The loop may be the user's own, so that handlers share its sessions and locks, or one in a thread
started for them. Either way a handler that blocks holds up other handlers and no heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ekiden.machine import Instant
from ekiden.worker.handlers import Batch, Job, Trouble, job_of, result_of, trouble_of
from ekiden.worker.ledger import Attempt
from ekiden.worker.pieces import parted

# A run that takes longer than this is announced as running.
SLOW_NS: Final = 10_000_000

Piece: TypeAlias = tuple[Batch, int, int]
"""Indices [low, end) of a batch that wait to begin."""


class Outcome:
    """How one `async` attempt ended."""

    __slots__ = ("at", "batch", "began", "ended", "output")

    def __init__(self, batch: Batch, at: int, output: bytes | Trouble, began: Instant) -> None:
        self.batch = batch
        self.at = at
        self.output = output
        self.began = began
        self.ended = time.monotonic_ns()


class _Active:
    """One `async` attempt that runs."""

    __slots__ = ("at", "batch", "began", "task", "told")

    def __init__(self, batch: Batch, at: int) -> None:
        self.batch = batch
        self.at = at
        self.task: asyncio.Task[None] | None = None
        self.began = time.monotonic_ns()
        self.told = False


class AsyncSide:
    """Runs `async` handlers, at most `slots` at a time, on a loop that is not the machine's."""

    def __init__(
        self,
        slots: int,
        finished: Callable[[Outcome], None],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._slots = slots
        self._finished = finished
        self._loop = loop
        self._own: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._pieces: deque[Piece] = deque()
        self._active: dict[Attempt, _Active] = {}
        self._closing = False

    # -------------------------------------------------------------- on the machine's loop

    @property
    def pending(self) -> bool:
        """Whether something runs that was not yet announced, or waits and could run."""
        with self._lock:
            room = bool(self._pieces) and len(self._active) < self._slots
            return room or any(not active.told for active in self._active.values())

    def begin(self, pieces: list[Piece]) -> None:
        """Queue these and start what there is room for."""
        with self._lock:
            self._pieces.extend(pieces)
        self._call(self._pump)

    def abort(self, grant: int, asked: set[int], recall: bool) -> list[int]:
        """Drop what waits of these and, unless it is a recall, cancel what runs."""
        dropped: list[int] = []
        with self._lock:
            left: deque[Piece] = deque()
            for piece in self._pieces:
                if piece[0].grant != grant:
                    left.append(piece)
                    continue
                kept, gone = parted(piece[0], range(piece[1], piece[2]), asked)
                left.extend(kept)
                dropped += gone
            self._pieces = left
            running = [key for key in self._active if key[0] == grant and key[1] in asked]
        if running and not recall:
            self._call(self._cancel, running)
        return dropped

    def announce(self, now: Instant) -> list[tuple[int, int, Instant]]:
        """What has become slow since the last look."""
        news: list[tuple[int, int, Instant]] = []
        with self._lock:
            for (grant, offset), active in self._active.items():
                if not active.told and now - active.began >= SLOW_NS:
                    active.told = True
                    news.append((grant, offset, active.began))
        return news

    def close(self) -> None:
        """Cancel what runs; end the loop if it is ours."""
        self._closing = True
        with self._lock:
            self._pieces.clear()
        if self._loop is not None:
            with self._lock:
                running = list(self._active)
            self._call(self._cancel, running)
        if self._own is not None:
            self._call(self._own.stop)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is None:
            self._own = self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._serve, args=(self._own,), name="async-handlers", daemon=True
            ).start()
        # A closed loop has lost its handlers; their leases will be forfeited.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    # -------------------------------------------------------------- on the handlers' loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _pump(self) -> None:
        """Start attempts while there are slots."""
        assert self._loop is not None
        while not self._closing:
            with self._lock:
                if not self._pieces or len(self._active) >= self._slots:
                    return
                batch, at, end = self._pieces.popleft()
                if at + 1 < end:
                    self._pieces.appendleft((batch, at + 1, end))
                key = (batch.grant, batch.first + at)
                active = self._active[key] = _Active(batch, at)
            active.task = self._loop.create_task(self._attempt(active, key))

    async def _attempt(self, active: _Active, key: Attempt) -> None:
        batch, at = active.batch, active.at
        job = job_of(batch, at)
        try:
            value = await batch.handler.function(job) if isinstance(job, Job) else job
        except BaseException as error:
            if at in batch.ended and isinstance(error, asyncio.CancelledError):
                raise  # We asked for it.
            # All else is the handler's own doing, SystemExit included.
            value = trouble_of(error)
        with self._lock:
            mine = self._active.get(key) is active
            if mine:
                del self._active[key]
        if mine:
            self._finished(Outcome(batch, at, result_of(value), active.began))
            assert self._loop is not None
            self._loop.call_soon(self._pump)

    def _cancel(self, keys: list[Attempt]) -> None:
        """End these; their slots are free at once, also if they do not obey."""
        for key in keys:
            with self._lock:
                active = self._active.pop(key, None)
            if active is not None and active.task is not None:
                active.batch.ended.add(active.at)
                active.task.cancel()
        self._pump()
