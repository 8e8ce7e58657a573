"""Lanes: one long-lived child per slot, fed with chunks of attempts.

The machine hands over batches and gets batches back. A lane takes a *chunk* of a batch, about two
milliseconds of work, and sends it to its child whole; while the child works on one, the next lies
behind it, so that the child never waits for us. Nothing is done per attempt on the common path.

A chunk is a guess about how long its attempts take. A watch sees to it that nothing suffers from a
wrong one: when a chunk takes longer, the child is asked for what has finished and for what has not
begun, which other lanes may then take, and what runs is announced.

When a child ends, whatever the reason:

- what had not begun goes back to the front of the line, as if it had never left;
- the one that ran is told as gone if it was ended on purpose, and fails if the child crashed;
- what is told as gone is so because everything the child ever started has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

from ekiden.limits import NS
from ekiden.machine import Instant, Log
from ekiden.model.caches import BlobRef
from ekiden.model.jobs import CANNOT_START, HANDLER_ERROR, TIMEOUT, Note
from ekiden.observe.logs import log_effect
from ekiden.wire.messages import Failure
from ekiden.worker.chunks import Batch, Chunk, Outcomes, Piece
from ekiden.worker.contract import (
    CANCEL,
    RECALL,
    Abort,
    Dropped,
    Gone,
    ProgressMade,
    Run,
    RunFinished,
    Started,
)
from ekiden.worker.coroutines import SLOW_NS
from ekiden.worker.folders import wipe
from ekiden.worker.lane import DOWN, STARTING, UP, Children, Lane, Talk
from ekiden.worker.launch import Ended, Launch
from ekiden.worker.ledger import Attempt
from ekiden.worker.pieces import parted
from ekiden.worker.verdicts import tail_of, told, trouble_of

# How often the watch looks.
WATCH_S: Final = 0.008

# Notes of progress leave at most this often.
PROGRESS_S: Final = 0.1

# A child that ends without having been of any use is started again after this long, doubled every
# time. After so many in a row, what waits is told that it cannot be started here.
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
FALLS_MAX: Final = 3

# A fresh child costs some 100 ms. At the rate of the shortest runs this many take several seconds,
# so that it hardly shows; a leak of a kilobyte in each has come to 100 MB.
RECYCLE_JOBS: Final = 100_000

# What a child may grow by after its first work, which has loaded what it needs, before it is
# replaced: a leak that matters on a machine with a gigabyte for each core, and no working set.
RECYCLE_MB: Final = 512

# A chunk's number fits four bytes and is never 0; long before one comes again, it is forgotten.
_NUMBER_MAX: Final = 0xFFFF_FFFF

Emit: TypeAlias = Callable[[Any], None]


class LaneExecutor(ABC):
    """Performs `Run` and `Abort` with a child in every slot. To be used from the agent's loop."""

    what = "the child"
    """What a child is called in messages."""

    behind_ns = 5_000_000
    """A chunk lies behind another only if runs are shorter than this: else it would be taken back
    before its turn came, and asking for the next costs little beside them."""

    def __init__(
        self,
        slots: int,
        emit: Emit,
        children: Children,
        *,
        recycle_jobs: int = RECYCLE_JOBS,
        recycle_mb: int = RECYCLE_MB,
        start_timeout_s: float = 60.0,
    ) -> None:
        self.children = children
        self.recycle_jobs = recycle_jobs
        self.recycle_mb = recycle_mb
        self.start_timeout_s = start_timeout_s
        self.closing = False
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._line: deque[Piece] = deque()
        self.lanes = [Lane(self) for _ in range(slots)]
        self._held: list[Batch] = []
        """Batches that may not begin yet."""
        self._chunk_number = 0
        self._falls = 0
        """Children in a row that were of no use."""
        self._watch_timer: asyncio.TimerHandle | None = None
        self._notes: dict[Attempt, bytes] = {}
        self._notes_timer: asyncio.TimerHandle | None = None
        self._notes_at = 0.0

    # -------------------------------------------------------------- what differs by kind

    @abstractmethod
    def run(self, effect: Run) -> None:
        """Begin these attempts as soon as there are slots."""

    @abstractmethod
    def launch(self) -> Launch:
        """How a child is started."""

    @abstractmethod
    def new_talk(self, lane: Lane) -> Talk:
        """The conversation with a child that is about to start."""

    def may_begin(self) -> bool:
        """Whether anything may be begun now."""
        return True

    def verdict(self, ended: Ended | None, fault: str, *, fresh: bool) -> tuple[str, str]:
        """Cause and words for the attempt that ran when its child ended. A child that is `fresh`
        has not shown that it was able to start."""
        assert ended is not None
        if fault:
            cause, text = HANDLER_ERROR, f"{self.what} was ended while it ran this: {fault}"
        else:
            trouble = trouble_of(ended, (), 0, sandboxed=False)
            assert trouble is not None
            cause, text = trouble[0], f"{self.what} did not survive this: {trouble[1]}"
        return cause, told(text, stderr_of(ended), b"")

    # -------------------------------------------------------------- what the machine asks

    def abort(self, effect: Abort) -> None:
        """End these attempts; see `Abort`."""
        grant, why, asked = effect.grant, effect.why, set(effect.offsets)
        gone = self._unhold(grant, asked) + self._take_out(grant, asked)
        if gone:
            self.settle(grant, sorted(gone), why)
        for lane in self.lanes:
            lane.abort(grant, asked, why)

    def close(self) -> None:
        """End every child. Nothing is told any more."""
        self.closing = True
        self._line.clear()
        for timer in (self._watch_timer, self._notes_timer):
            if timer is not None:
                timer.cancel()
        for lane in self.lanes:
            lane.close()

    # -------------------------------------------------------------- the line

    def begin(self, batch: Batch) -> None:
        """Put a batch in the line."""
        self.hold(batch)
        if batch.run.attempts:
            # Announced in this turn; begins in the next one, after the announcement has left.
            self._loop.call_soon(self.release, batch)
        else:
            self.release(batch)

    def hold(self, batch: Batch) -> None:
        """Keep a batch that may not begin yet, until `release` or `fail_held`."""
        self._held.append(batch)

    def release(self, batch: Batch) -> None:
        """Put a batch that was held in the line, less what was taken back meanwhile."""
        if batch not in self._held or self.closing:
            return
        self._held.remove(batch)
        ended = {batch.first + at for at in batch.ended}
        pieces, _ = parted(batch, range(len(batch.run.ids)), ended)
        self._line.extend(pieces)
        self.pump()

    def fail_held(self, batch: Batch, cause: str, text: str) -> None:
        """A batch that was held cannot begin at all."""
        if batch in self._held:
            self._held.remove(batch)
            left = [at for at in range(len(batch.run.ids)) if at not in batch.ended]
            self.fail(batch.grant, [Failure(batch.first + at, cause, text) for at in left])

    def requeue(self, pieces: list[Piece]) -> None:
        """To the front, in this order."""
        self._line.extendleft(reversed(pieces))

    def pump(self) -> None:
        """Give work to whoever has room; start children if some must wait."""
        if not self._line or self.closing:
            return
        for lane in self.lanes:
            if not lane.chunks:
                self.feed(lane)
        self._start_lanes()
        for lane in self.lanes:
            self.feed(lane)

    def feed(self, lane: Lane) -> None:
        """Give work to this lane, as far as it has room."""
        if lane.spent and not lane.chunks and lane.state == UP:
            lane.leave()
        line = self._line
        while line and lane.has_room(line[0][0].kind.mean_ns) and self.may_begin():
            batch, low, end = line.popleft()
            size = batch.chunk_size()
            if end - low > size:
                line.appendleft((batch, low + size, end))
                end = low + size
            self._chunk_number = self._chunk_number % _NUMBER_MAX + 1
            lane.give(Chunk(self._chunk_number, (batch, low, end), time.monotonic_ns()))
            self._watch()

    def _start_lanes(self) -> None:
        wanted = sum(end - low for _, low, end in islice(self._line, len(self.lanes)))
        wanted -= sum(lane.state == STARTING for lane in self.lanes)
        delay_s = 0.0
        if self._falls:
            delay_s = min(BACKOFF_FIRST_S * 2 ** (self._falls - 1), BACKOFF_MAX_S)
        for lane in self.lanes:
            if wanted > 0 and lane.state == DOWN:
                lane.start(delay_s)
                wanted -= 1

    def _unhold(self, grant: int, asked: set[int]) -> list[int]:
        gone: list[int] = []
        for batch in self._held:
            if batch.grant == grant:
                span = range(batch.first, batch.first + len(batch.run.ids))
                fresh = {offset - batch.first for offset in asked.intersection(span)} - batch.ended
                batch.ended |= fresh
                gone += [batch.first + at for at in fresh]
        return gone

    def _take_out(self, grant: int, asked: set[int]) -> list[int]:
        gone: list[int] = []
        left: deque[Piece] = deque()
        for piece in self._line:
            if piece[0].grant != grant:
                left.append(piece)
                continue
            kept, found = parted(piece[0], range(piece[1], piece[2]), asked)
            left.extend(kept)
            gone += found
        self._line = left
        return gone

    # -------------------------------------------------------------- outcomes

    def report(self, chunk: Chunk, some: Outcomes) -> None:
        """Tell the machine how attempts ended."""
        self._falls = 0
        self._flush_notes()
        batch = chunk.batch
        first = batch.first + chunk.done
        offsets: Sequence[int] = range(first, first + len(some.outputs))
        outputs = some.outputs
        if some.failures or some.later:
            other = {failure.offset for failure in some.failures} | some.later
            plain = [(at, out) for at, out in zip(offsets, outputs, strict=True) if at not in other]
            offsets = [at for at, _ in plain]
            outputs = [out for _, out in plain]
        if outputs or some.failures:
            self._emit(RunFinished(batch.grant, offsets, outputs, {}, some.failures, some.ran_ns))

    def finish(
        self, grant: int, offset: int, output: bytes, note: Note, blobs: list[BlobRef]
    ) -> None:
        """One attempt whose outcome came by another way, and refers to these."""
        refs = {offset: blobs}
        self._emit(RunFinished(grant, [offset], [output], {offset: note}, [], 0, refs))

    def fail(self, grant: int, failures: list[Failure], ran_ns: int = 0) -> None:
        """These have failed."""
        if failures:
            self._flush_notes()
            self._emit(RunFinished(grant, (), [], {}, failures, ran_ns))

    def settle(self, grant: int, offsets: list[int], why: str) -> None:
        """What was asked for has not begun, or is gone."""
        if why == RECALL:
            self._emit(Dropped(grant, offsets))
        elif why in (CANCEL, TIMEOUT):
            self._emit(Gone(grant, offsets))

    def child_gone(self, ended: Ended | None, fault: str, useful: bool) -> None:
        """A child is gone, and what it held was given back. `fault` is empty if that was meant."""
        if fault:
            # Who died with the keeper has not fallen: the keeper is started again after pauses of
            # its own, and what waits here waits for that.
            fell = ended is None or not ended.lost
            self._falls = 0 if useful else self._falls + fell
            facts = {"what": self.what, "why": fault, "falls": self._falls}
            log_effect(Log("warning", "child.ended", facts))
            if fell and self._falls >= FALLS_MAX:
                said = stderr_of(ended) if ended is not None else b""
                self._give_up(told(f"{self.what} cannot be kept running: {fault}", said, b""))
        if ended is not None:
            self._clear(ended)
        self.pump()

    def _give_up(self, text: str) -> None:
        """Nothing can be begun here: say so of all that waits, instead of keeping it."""
        line, self._line = self._line, deque()
        for batch, low, end in line:
            offsets = range(batch.first + low, batch.first + end)
            self.fail(batch.grant, [Failure(at, CANNOT_START, text) for at in offsets])

    def _clear(self, ended: Ended) -> None:
        """Remove what a child left on the disk, in a thread: it may be much."""
        left = [path for path in (ended.out, ended.err) if path]
        if not ended.clean and ended.folder:
            left.append(ended.folder)
        if left:
            self._loop.run_in_executor(None, _wipe_all, left)

    # -------------------------------------------------------------- watch

    def _watch(self) -> None:
        if self._watch_timer is None and not self.closing:
            self._watch_timer = self._loop.call_later(WATCH_S, self._look)

    def _look(self) -> None:
        """Find what is slow: have it taken back or announced. Stops when there is nothing to."""
        self._watch_timer = None
        now = time.monotonic_ns()
        news: list[tuple[int, int, Instant]] = []
        again = False
        for lane in self.lanes:
            if lane.state == UP and lane.chunks:
                again = self._look_at(lane, now, news) or again
        if news:
            self._emit(Started(news))
        if again:
            self._watch()

    def _look_at(self, lane: Lane, now: Instant, news: list[tuple[int, int, Instant]]) -> bool:
        """Whether to look again."""
        chunk = lane.chunks[0]
        if now - chunk.mark < SLOW_NS:
            return True
        if not chunk.recalled:
            # The next look finds what is left, or a child that does not answer.
            chunk.recalled = True
            if lane.ask_back():
                return True
        found = lane.current()
        if found is None or found[0] is not chunk:
            return True
        if not lane.is_warm and now - chunk.mark < self.start_timeout_s * NS:
            return True  # It may still be starting up, which is no part of the run.
        _, at, since = found
        if at != chunk.told:
            chunk.told = at
            kind = chunk.batch.kind
            kind.mean_ns = max(kind.mean_ns, now - since)
            news.append((chunk.batch.grant, chunk.batch.first + at, since))
        return chunk.end - at > 1

    # -------------------------------------------------------------- progress

    def note(self, chunk: Chunk, at: int, body: bytes) -> None:
        """Keep the newest note of an attempt, and send it soon."""
        self._notes[chunk.batch.grant, chunk.batch.first + at] = body
        if self._notes_timer is None:
            delay_s = max(self._notes_at + PROGRESS_S - self._loop.time(), 0)
            self._notes_timer = self._loop.call_later(delay_s, self._flush_notes)

    def _flush_notes(self) -> None:
        if self._notes_timer is None:
            return
        self._notes_timer.cancel()
        self._notes_timer = None
        self._notes_at = self._loop.time()
        notes, self._notes = self._notes, {}
        for (grant, offset), body in notes.items():
            self._emit(ProgressMade(grant, offset, body))


def stderr_of(ended: Ended) -> bytes:
    """The end of what a child wrote to stderr."""
    return tail_of(ended.err) if ended.stderr is None else ended.stderr


def _wipe_all(paths: list[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            wipe(path)
