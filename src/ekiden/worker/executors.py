"""Runs handlers: plain functions in threads here, `async` ones in `coroutines`.

The machine hands over batches and gets batches back. A thread takes a *chunk* of a batch, about a
millisecond of work, runs it attempt by attempt and wakes the machine's loop once at the end. A
watch on that loop sees to it that nothing suffers from a guess that was wrong: when a chunk takes
longer, what has finished is reported, what has not begun goes to other threads, and what runs is
announced.

A chunk's attempts are claimed from one shared iterator, by its thread one by one and by the watch
all at once. `next` of a range iterator is a single step under the interpreter's lock, so each
attempt has exactly one taker and the common path needs no lock of ours.

A plain function cannot be interrupted. If its attempt is ended, the thread is *abandoned*: it is
replaced, what it returns is not looked at, and it ends with the function.

No handler runs on the machine's loop: one that blocks cannot hold a heartbeat back.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from ekiden import limits
from ekiden.machine import Instant
from ekiden.model.jobs import FORM_PLAIN
from ekiden.wire.messages import Failure
from ekiden.worker.coroutines import SLOW_NS, AsyncSide, Outcome, Piece
from ekiden.worker.handlers import Batch, Handlers, Job, Trouble, call_of, result_of, trouble_of
from ekiden.worker.ledger import Attempt
from ekiden.worker.machine import (
    RECALL,
    STALE,
    Abort,
    Dropped,
    Gone,
    ProgressMade,
    Run,
    RunFinished,
    Started,
)
from ekiden.worker.pieces import parted

CHUNK_NS: Final = 1_000_000
CHUNK_MAX: Final = limits.GRANT_JOBS_MAX

# How often the watch looks. With the age at which a run counts as slow it bounds how long an
# outcome can wait for its neighbours.
WATCH_S: Final = 0.008

# Runs shorter than this gain nothing from a second thread: the interpreter runs one at a time.
SHORT_NS: Final = 20_000

# Notes of progress leave at most this often.
PROGRESS_S: Final = 0.1

# Functions that never return each keep a thread for ever. Past this many, an ended attempt no
# longer gets its slot back: a worker full of them comes to a stop instead of filling the memory.
ABANDONED_MAX: Final = 256

_OUTPUT_MAX: Final = limits.PAYLOAD_BYTES_MAX

Emit = Callable[[Any], None]


class _Chunk:
    """What one thread has taken: indices `low` .. `end` of a batch, in order."""

    __slots__ = (
        "abandoned", "batch", "began", "end", "ended", "items", "low", "mark", "outputs",
        "reported", "started", "told", "troubled",
    )  # fmt: skip

    def __init__(self, batch: Batch, low: int, end: int, now: Instant) -> None:
        self.batch = batch
        self.low = low
        self.end = end
        self.items: Iterator[int] = iter(range(low, end))
        self.outputs: list[Any] = []
        self.reported = 0
        self.started = now
        self.mark = now
        """Up to when the time of its runs is accounted for."""
        self.began = now
        """When the attempt at hand began."""
        self.ended: Instant = 0
        """When the last attempt ended; 0 until then."""
        self.told = -1
        """The index that was announced as running."""
        self.troubled = False
        self.abandoned = False

    def current(self) -> int | None:
        """The index at hand. Exact only after the rest was taken back."""
        at = self.low + len(self.outputs)
        return at if at < self.end else None


class _Lane:
    """A thread and the chunk it works on."""

    __slots__ = ("chunk", "gone", "thread")

    def __init__(self) -> None:
        self.chunk: _Chunk | None = None
        self.gone = False
        """Abandoned: the thread ends when its handler returns."""
        self.thread: threading.Thread | None = None


class HandlerExecutor:
    """Performs `Run` and `Abort` for the machine that `emit` feeds.

    To be used from the machine's loop only. `handler_loop` runs the `async` handlers; without it,
    a thread with a loop is started when the first of them is needed.
    """

    def __init__(
        self,
        handlers: Handlers,
        slots: int,
        emit: Emit,
        *,
        handler_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._handlers = handlers
        self._slots = slots
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._ready = threading.Condition()
        self._pieces: deque[Piece] = deque()
        self._lanes: list[_Lane] = []
        self._idle = 0
        """Threads that wait and have not been told to look."""
        self._abandoned = 0
        self._starting: list[Batch] = []
        self._closing = False
        self._done: deque[_Chunk | Outcome] = deque()
        self._woken = False
        self._watch_timer: asyncio.TimerHandle | None = None
        self._notes: dict[Attempt, bytes] = {}
        self._notes_timed = False
        self._notes_at = 0.0
        self._async = AsyncSide(slots, self._finished_async, handler_loop)

    # -------------------------------------------------------------- what the machine asks

    def run(self, effect: Run) -> None:
        """Begin these attempts as soon as there are slots."""
        run, spec = effect.run, effect.spec
        handler = self._handlers.find(spec)
        if handler is None:
            why = self._handlers.missing(spec)
            failures = [
                Failure(run.first + at, why.cause, why.message) for at in range(len(run.ids))
            ]
            self._emit(RunFinished(run.grant, (), [], {}, failures))
            return
        batch = Batch(run, spec, handler, self._progress)
        if run.attempts:
            # Announced in this turn; begins in the next one, after the announcement has left.
            self._starting.append(batch)
            self._loop.call_soon(self._begin_next)
        else:
            self._begin(batch)

    def _begin_next(self) -> None:
        self._begin(self._starting.pop(0))

    def _begin(self, batch: Batch) -> None:
        count = len(batch.run.ids)
        offsets = {batch.first + at for at in batch.ended}
        pieces, _ = parted(batch, range(count), offsets)
        if batch.handler.is_async:
            self._async.begin(pieces)
        else:
            with self._ready:
                self._pieces.extend(pieces)
                self._rouse(batch, count)
        self._watch()

    def abort(self, effect: Abort) -> None:
        """End these attempts; see `Abort`."""
        asked = set(effect.offsets)
        recall = effect.why == RECALL
        dropped = self._unstart(effect.grant, asked)
        dropped += self._take_back(effect.grant, asked)
        dropped += self._async.abort(effect.grant, asked, recall)
        for lane in list(self._lanes):
            chunk = lane.chunk
            if chunk is None or chunk.batch.grant != effect.grant:
                continue
            dropped += self._steal(chunk, asked)
            at = chunk.current()
            if not recall and at is not None and chunk.batch.first + at in asked:
                self._abandon(lane, chunk, at)
        if recall and dropped:
            self._emit(Dropped(effect.grant, sorted(dropped)))
        elif not recall and effect.why != STALE:
            # A function in a thread cannot be ended, only disowned: that is all there is to wait
            # for.
            self._emit(Gone(effect.grant, effect.offsets))

    def close(self, wait_s: float = 0.5) -> None:
        """Take no more work. Threads that are idle end; those in a handler end with it."""
        with self._ready:
            self._closing = True
            self._pieces.clear()
            self._ready.notify_all()
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._async.close()
        deadline = time.monotonic() + wait_s
        for lane in self._lanes:
            if lane.thread is not None and lane.chunk is None:
                lane.thread.join(max(deadline - time.monotonic(), 0))

    # -------------------------------------------------------------- threads

    def _rouse(self, batch: Batch, count: int) -> None:
        """Get threads to work on `count` more attempts. The lock is held."""
        if batch.handler.mean_ns < SHORT_NS and any(_is_brisk(lane.chunk) for lane in self._lanes):
            return  # Whoever is at work takes these too, sooner than another thread would.
        roused = min(count, self._idle)
        self._ready.notify(roused)
        self._idle -= roused
        for _ in range(min(count - roused, self._room())):
            self._add_lane()

    def _room(self) -> int:
        """How many more threads there may be."""
        lost = max(self._abandoned - ABANDONED_MAX, 0)
        return self._slots - lost - len(self._lanes)

    def _add_lane(self) -> None:
        lane = _Lane()
        lane.thread = threading.Thread(
            target=self._work, args=(lane,), name=f"handler-{len(self._lanes)}", daemon=True
        )
        self._lanes.append(lane)
        lane.thread.start()

    def _work(self, lane: _Lane) -> None:
        """One thread's life."""
        while (chunk := self._take(lane)) is not None:
            _run_chunk(chunk)
            self._done.append(chunk)
            self._wake()

    def _take(self, lane: _Lane) -> _Chunk | None:
        """The next chunk, sized by how long such runs take; None at the end."""
        with self._ready:
            if lane.chunk is not None:
                _learn(lane.chunk, lane.chunk.ended - lane.chunk.started, len(lane.chunk.outputs))
            lane.chunk = None
            while not self._pieces or lane.gone:
                if self._closing or lane.gone:
                    return None
                self._idle += 1
                self._ready.wait()
            batch, low, end = self._pieces.popleft()
            size = min(max(CHUNK_NS // batch.handler.mean_ns, 1), CHUNK_MAX)
            if end - low > size:
                self._pieces.appendleft((batch, low + size, end))
                end = low + size
            lane.chunk = chunk = _Chunk(batch, low, end, time.monotonic_ns())
            return chunk

    def _wake(self) -> None:
        # Set before the loop looks and cleared before it collects: a wake can be one too many,
        # never one too few.
        if not self._woken:
            self._woken = True
            # A closed loop means that nobody waits for outcomes any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._collect)

    # -------------------------------------------------------------- outcomes

    def _collect(self) -> None:
        self._woken = False
        now = time.monotonic_ns()
        outcomes: dict[Batch, list[Outcome]] = {}
        while self._done:
            done = self._done.popleft()
            if isinstance(done, Outcome):
                outcomes.setdefault(done.batch, []).append(done)
            elif done.abandoned:
                self._abandoned -= 1
            else:
                self._report(done, now)
        for batch, some in outcomes.items():
            self._report_async(batch, some)
        self._watch()

    def _report(self, chunk: _Chunk, now: Instant) -> None:
        """Tell the machine what has finished of a chunk and was not yet told."""
        count = len(chunk.outputs)
        fresh = chunk.outputs[chunk.reported : count]
        if not fresh:
            return
        self._flush_notes()
        batch = chunk.batch
        first = batch.first + chunk.low + chunk.reported
        ran_ns = max((chunk.ended or now) - chunk.mark, 1)
        chunk.reported = count
        chunk.mark = now
        if not chunk.ended:
            _learn(chunk, ran_ns, len(fresh))
        offsets = range(first, first + len(fresh))
        if not chunk.troubled:
            self._emit(RunFinished(batch.grant, offsets, fresh, {}, [], ran_ns))
            return
        plain = [(at, out) for at, out in zip(offsets, fresh, strict=True) if type(out) is bytes]
        failures = [
            Failure(at, out.cause, out.message)
            for at, out in zip(offsets, fresh, strict=True)
            if type(out) is Trouble
        ]
        outputs = [out for _, out in plain]
        self._emit(RunFinished(batch.grant, [at for at, _ in plain], outputs, {}, failures, ran_ns))

    def _report_async(self, batch: Batch, outcomes: list[Outcome]) -> None:
        self._flush_notes()
        ran_ns = max(sum(outcome.ended - outcome.began for outcome in outcomes), 1)
        handler = batch.handler
        handler.mean_ns = (handler.mean_ns + ran_ns // len(outcomes)) // 2
        offsets: list[int] = []
        outputs: list[bytes] = []
        failures: list[Failure] = []
        for outcome in outcomes:
            offset, output = batch.first + outcome.at, outcome.output
            if isinstance(output, Trouble):
                failures.append(Failure(offset, output.cause, output.message))
            else:
                offsets.append(offset)
                outputs.append(output)
        self._emit(RunFinished(batch.grant, offsets, outputs, {}, failures, ran_ns))

    def _finished_async(self, outcome: Outcome) -> None:
        self._done.append(outcome)
        self._wake()

    # -------------------------------------------------------------- watch

    def _watch(self) -> None:
        if self._watch_timer is None and not self._closing:
            self._watch_timer = self._loop.call_later(WATCH_S, self._look)

    def _look(self) -> None:
        """Find what is slow: report, hand on, announce. Stops when there is nothing to find."""
        self._watch_timer = None
        now = time.monotonic_ns()
        news: list[tuple[int, int, Instant]] = self._async.announce(now)
        again = self._async.pending
        for lane in self._lanes:
            chunk = lane.chunk
            if chunk is None:
                continue
            if now - chunk.mark >= SLOW_NS and chunk.told < 0:
                self._steal(chunk, set())
                at = chunk.current()
                self._report(chunk, now)
                if at is not None:
                    chunk.told = at
                    handler = chunk.batch.handler
                    handler.mean_ns = max(handler.mean_ns, now - chunk.began)
                    news.append((chunk.batch.grant, chunk.batch.first + at, chunk.began))
            again = again or chunk.told < 0
        with self._ready:
            if self._pieces and (self._idle or self._room() > 0):
                # Short runs were left to a thread that turned out to be slow.
                again = True
                self._ready.notify()
                if self._idle:
                    self._idle -= 1
                else:
                    self._add_lane()
        if news:
            self._emit(Started(news))
        if again:
            self._watch()

    # -------------------------------------------------------------- taking back

    def _unstart(self, grant: int, asked: set[int]) -> list[int]:
        """Mark what has been announced and not yet been put in the line."""
        dropped: list[int] = []
        for batch in self._starting:
            if batch.grant == grant:
                gone = asked.intersection(range(batch.first, batch.first + len(batch.run.ids)))
                batch.ended.update(offset - batch.first for offset in gone)
                dropped += gone
        return dropped

    def _take_back(self, grant: int, asked: set[int]) -> list[int]:
        """Remove these from the line; says which were in it."""
        dropped: list[int] = []
        with self._ready:
            left: deque[Piece] = deque()
            for batch, low, end in self._pieces:
                if batch.grant != grant:
                    left.append((batch, low, end))
                    continue
                kept, gone = parted(batch, range(low, end), asked)
                dropped += gone
                left.extend(kept)
            self._pieces = left
        return dropped

    def _steal(self, chunk: _Chunk, asked: set[int]) -> list[int]:
        """Take what a chunk has not begun. `asked` of it is dropped, the rest waits in front."""
        rest = list(chunk.items)
        if not rest:
            return []
        chunk.end -= len(rest)
        kept, gone = parted(chunk.batch, range(rest[0], rest[-1] + 1), asked)
        with self._ready:
            self._pieces.extendleft(reversed(kept))
            self._rouse(chunk.batch, sum(end - low for _, low, end in kept))
        return gone

    def _abandon(self, lane: _Lane, chunk: _Chunk, at: int) -> None:
        """Give up on a thread that is inside a handler, and replace it."""
        chunk.batch.ended.add(at)
        self._report(chunk, time.monotonic_ns())
        chunk.abandoned = True
        self._abandoned += 1
        with self._ready:
            if lane.chunk is chunk:
                lane.gone = True
                self._lanes.remove(lane)
            if self._pieces and self._room() > 0:
                self._add_lane()

    # -------------------------------------------------------------- progress

    def _progress(self, batch: Batch, at: int, body: bytes) -> None:
        """From a handler's thread: keep the newest note, and send it soon."""
        if at in batch.ended:
            return
        with self._ready:
            self._notes[batch.grant, batch.first + at] = body
            if self._notes_timed or self._closing:
                return
            self._notes_timed = True
        with contextlib.suppress(RuntimeError):  # The machine's loop is closed.
            self._loop.call_soon_threadsafe(self._time_notes)

    def _time_notes(self) -> None:
        delay_s = self._notes_at + PROGRESS_S - self._loop.time()
        if delay_s <= 0:
            self._flush_notes()
        else:
            self._loop.call_later(delay_s, self._flush_notes)

    def _flush_notes(self) -> None:
        if not self._notes:
            return
        with self._ready:
            notes, self._notes = self._notes, {}
            self._notes_timed = False
        self._notes_at = self._loop.time()
        for (grant, offset), body in notes.items():
            self._emit(ProgressMade(grant, offset, body))


def _learn(chunk: _Chunk, took_ns: int, runs: int) -> None:
    """How long such runs take. Whoever ran them says so before it takes more: left to the loop,
    thousands would be taken one by one before it came to look."""
    if runs:
        handler = chunk.batch.handler
        handler.mean_ns = max((handler.mean_ns + took_ns // runs) // 2, 1)


def _is_brisk(chunk: _Chunk | None) -> bool:
    """Whether a thread is at work on this and was not found to be slow."""
    return chunk is not None and chunk.told < 0


def _run_chunk(chunk: _Chunk) -> None:
    """Run what the chunk's iterator yields. Whatever a handler raises is its own failure."""
    batch = chunk.batch
    function = batch.handler.function
    bodies = batch.run.bodies
    append = chunk.outputs.append
    clock = time.monotonic_ns
    plain = batch.spec.form == FORM_PLAIN
    for at in chunk.items:
        chunk.began = clock()
        job = Job(bodies[at], (), at, batch) if plain else call_of(batch, at)
        try:
            value = function(job) if type(job) is Job else job
        except BaseException as error:  # noqa: BLE001  (SystemExit included)
            value = trouble_of(error)
        if type(value) is not bytes or len(value) > _OUTPUT_MAX:
            value = result_of(value)
            if type(value) is Trouble:
                chunk.troubled = True
        append(value)
    chunk.ended = clock()
