"""One slot of `lanes`: its child, if there is one, and the chunks the child holds.

A lane knows when its child starts, serves, leaves, crashes or has to be ended, and what becomes of
the attempts it held; `lanes` says the rules. What is said to a child and heard of it is the
business of a `Talk`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from ekiden import limits
from ekiden.machine import Instant
from ekiden.model.jobs import Note
from ekiden.wire.messages import Failure
from ekiden.worker.chunks import Batch, Chunk, Outcomes, Piece, Pipe
from ekiden.worker.contract import RECALL
from ekiden.worker.folders import shorten
from ekiden.worker.launch import Began, Ended, Launch, NotStarted
from ekiden.worker.ledger import Attempt
from ekiden.worker.pieces import parted
from ekiden.worker.verdicts import trouble_of

# A child that was asked to leave, or closed its end, gets this long to end by itself.
LEAVE_S: Final = 2.0

# How often a child's memory is looked at: a look costs 30 microseconds.
WEIGH_NS: Final = 1 * limits.NS

# What a child may have written to stdout and stderr before it is thrown away: it lives for hundreds
# of thousands of jobs, and all that is ever read are its last lines.
OUTPUT_BYTES_MAX: Final = 16 << 20

Current: TypeAlias = tuple[Chunk, int, Instant]
"""What runs: a chunk, the index in its batch, and since when."""


class Children(Protocol):
    """What lanes need of `children.Children`."""

    def spawn(
        self,
        launch: Launch,
        told: Callable[[Began | Ended | NotStarted], None],
        sock: socket.socket | None = None,
    ) -> int: ...

    def kill(self, number: int) -> None: ...

    @property
    def folder(self) -> str: ...


class Owner(Protocol):
    """What a lane needs of the executor it belongs to."""

    children: Children
    closing: bool
    behind_ns: int
    recycle_jobs: int
    recycle_mb: int
    start_timeout_s: float

    def launch(self) -> Launch: ...
    def new_talk(self, lane: Lane) -> Talk: ...
    def feed(self, lane: Lane) -> None: ...
    def pump(self) -> None: ...
    def requeue(self, pieces: list[Piece]) -> None: ...
    def report(self, chunk: Chunk, some: Outcomes) -> None: ...
    def fail(self, grant: int, failures: list[Failure], ran_ns: int = 0) -> None: ...
    def settle(self, grant: int, offsets: list[int], why: str) -> None: ...
    def verdict(self, ended: Ended | None, fault: str, *, fresh: bool) -> tuple[str, str]: ...
    def child_gone(self, ended: Ended | None, fault: str, useful: bool) -> None: ...


class Talk(ABC):
    """One child's conversation: made for each child, tells its lane what it hears."""

    free = True
    """Whether it takes chunks now."""
    warm = False
    """Whether the child has shown that its start-up is over."""

    def begin(self) -> None:  # noqa: B027  (not every conversation has something to do here)
        """The socket is there; the child is being started."""

    def began(self) -> None:  # noqa: B027
        """The child runs."""

    @abstractmethod
    def give(self, chunk: Chunk) -> None:
        """Send a chunk."""

    @abstractmethod
    def heard(self, data: bytes) -> None:
        """Bytes came."""

    @abstractmethod
    def recall(self) -> bool:
        """Ask for what has finished and for what has not begun. False if one cannot."""

    @abstractmethod
    def current(self) -> Current | None:
        """What runs now, as far as one can see from here."""

    def close(self) -> None:  # noqa: B027
        """The child is gone."""


# ------------------------------------------------------------------ one slot

DOWN: Final = "down"
STARTING: Final = "starting"
UP: Final = "up"
LEAVING: Final = "leaving"
ENDING: Final = "ending"


class Lane:
    """A slot: its child, if there is one, and what the child holds."""

    def __init__(self, owner: Owner) -> None:
        self.state = DOWN
        self.chunks: deque[Chunk] = deque()
        """At hand and behind."""
        self.talk: Talk | None = None
        self.folder = ""
        """Where the child runs; empty until it does."""
        self.spent = False
        """The child is to be replaced as soon as it holds nothing."""
        self.marks: dict[Attempt, str] = {}
        """Attempts in `chunks` that are to end, and why."""
        self._owner = owner
        self._pipe: Pipe | None = None
        self._number = 0
        self._written: tuple[str, ...] = ()
        """The files its child writes to beside the conversation."""
        self._pid = 0
        self._is_ready = False
        self._mute = False
        """It hears us no more."""
        self._asked = False
        """What has not begun was asked for, and no answer has come."""
        self._fault = ""
        """Why we end the child, if that is its own doing."""
        self._served = 0
        self._base_bytes = 0
        self._weigh_at: Instant = 0
        self._timer: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------- life

    def start(self, delay_s: float) -> None:
        """Start a child after `delay_s`, if there is none."""
        if self.state == DOWN:
            self.state = STARTING
            self._time(delay_s, self._start)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._fault = ""
        self._served = self._base_bytes = self._pid = 0
        self._is_ready = self._asked = self._mute = self.spent = False
        self.folder = ""
        self._pipe = Pipe(ours, self._heard, self._closed)
        self.talk = self._owner.new_talk(self)
        self._time(self._owner.start_timeout_s, self._start_over)
        self._number = self._owner.children.spawn(self._owner.launch(), self._told, theirs)
        self.talk.begin()

    def send(self, data: bytes) -> None:
        """Write to the child."""
        if self._pipe is not None:
            self._pipe.write(data)

    def send_fd(self, fd: int) -> None:
        """Hand a descriptor over, before anything else."""
        assert self._pipe is not None
        self._pipe.send_fd(fd)

    def ready(self) -> None:
        """The child says that it takes attempts from now on."""
        self._is_ready = True
        self._serve()

    def _serve(self) -> None:
        """Begin once the child is ready and the keeper has said where it runs."""
        if self.state == STARTING and self._is_ready and self._pid:
            self._stop_timer()
            self.state = UP
            self._owner.feed(self)

    def _start_over(self) -> None:
        self.condemn(f"it was not ready within {self._owner.start_timeout_s:g} s")

    def condemn(self, fault: str) -> None:
        """The child has done what it must not, or not done what it must: replace it."""
        if self.state in (STARTING, UP):
            self._fault = fault
            self.kill()

    def kill(self) -> None:
        """End the child with all it has started; what it holds is settled when that is done."""
        self._stop_timer()
        if self.state not in (DOWN, ENDING):
            self.state = ENDING
            self._owner.children.kill(self._number)

    def leave(self) -> None:
        """Ask a child that holds nothing to end, so that a fresh one may take its place."""
        assert self._pipe is not None
        self.state = LEAVING
        self._pipe.finish()
        self._time(LEAVE_S, self.kill)

    def close(self) -> None:
        """The agent ends: no answer is expected any more."""
        self._stop_timer()
        if self._pipe is not None:
            if self.state != ENDING:
                self._owner.children.kill(self._number)
            self._drop_child()
        self.state = DOWN

    def _drop_child(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self.talk is not None:
            self.talk.close()
        self._pipe = self.talk = None

    def _time(self, delay_s: float, what: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, what)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -------------------------------------------------------------- work

    def has_room(self, ahead_ns: int) -> bool:
        """Whether it takes a chunk of attempts that last `ahead_ns` each; 0: unknown."""
        if self.state != UP or self.spent or self._mute:
            return False
        if self.talk is None or not self.talk.free:
            return False
        if not self.chunks:
            return True
        # Nothing more behind one that was found to be slow.
        brisk = len(self.chunks) == 1 and not self.chunks[0].recalled
        return brisk and 0 < ahead_ns < self._owner.behind_ns

    def give(self, chunk: Chunk) -> None:
        """Hand a chunk to the child."""
        assert self.talk is not None
        self.chunks.append(chunk)
        self.talk.give(chunk)

    def outcomes(self, chunk: Chunk, some: Outcomes) -> None:
        """Attempts of `chunk` have ended, from `chunk.done` on."""
        now = time.monotonic_ns()
        count = len(some.outputs)
        self._served += count
        chunk.batch.kind.learn(some.ran_ns, count)
        self._owner.report(chunk, some)
        chunk.done += count
        chunk.mark = now
        if self.marks:
            grant, first = chunk.batch.grant, chunk.batch.first
            for at in range(chunk.done - count, chunk.done):
                self.marks.pop((grant, first + at), None)
        self._pop_done(now)
        if now >= self._weigh_at:
            self._weigh(now)
        if self._served >= self._owner.recycle_jobs:
            self.spent = True

    def _pop_done(self, now: Instant) -> None:
        while self.chunks and self.chunks[0].done >= self.chunks[0].end:
            self.chunks.popleft()
            if self.chunks:
                self.chunks[0].mark = now

    def _weigh(self, now: Instant) -> None:
        """The weight after its first work is what the child needs; far beyond, it leaks."""
        import psutil  # Late: it needs more of the system than whoever only imports us may have.

        self._weigh_at = now + WEIGH_NS
        for path in self._written:
            shorten(path, OUTPUT_BYTES_MAX)
        try:
            weight = int(psutil.Process(self._pid).memory_info().rss)
        except psutil.Error:
            return
        self._base_bytes = self._base_bytes or weight
        self.spent = weight - self._base_bytes > self._owner.recycle_mb << 20

    def chunk_of(self, number: int) -> Chunk | None:
        """The chunk of this number, if the child has it."""
        for chunk in self.chunks:
            if chunk.number == number:
                return chunk
        return None

    # -------------------------------------------------------------- taking back

    def abort(self, grant: int, asked: set[int], why: str) -> None:
        """End these as far as they are here. What has been asked for more than once ends for the
        stronger reason."""
        found = False
        for chunk in self.chunks:
            if chunk.batch.grant != grant:
                continue
            first = chunk.batch.first
            for offset in asked.intersection(range(first + chunk.done, first + chunk.end)):
                found = True
                if self.marks.get((grant, offset), RECALL) == RECALL:
                    self.marks[grant, offset] = why
        if not found or self.state != UP:
            return
        if why != RECALL and self._is_marked(self.current()):
            self.kill()
        else:
            self.ask_back()

    def ask_back(self) -> bool:
        """Ask for what has finished and what has not begun; False if this child cannot be."""
        if not self._asked and self.talk is not None:
            self._asked = self.talk.recall()
        return self._asked

    def rest(self, places: Sequence[tuple[int, int]]) -> None:
        """The answer: of these chunks, all from an index on has not begun and never will."""
        self._asked = False
        for number, low in reversed(places):
            chunk = self.chunk_of(number)
            if chunk is not None and chunk.done <= low < chunk.end:
                unbegun, chunk.end = range(low, chunk.end), low
                self._give_back(chunk.batch, unbegun, None)
        self._pop_done(time.monotonic_ns())
        # What was to end and did not come back has begun; that is the end of a mere recall.
        self.marks = {at: why for at, why in self.marks.items() if why != RECALL}
        if self._is_marked(self.current()):
            self.kill()
        self._owner.pump()

    @property
    def is_warm(self) -> bool:
        """Whether its child has shown that its start-up is over."""
        return self.talk is not None and self.talk.warm

    def current(self) -> Current | None:
        """What runs now, as far as one can see."""
        return self.talk.current() if self.talk is not None else None

    def _is_marked(self, found: Current | None) -> bool:
        return found is not None and _attempt_of(found) in self.marks

    def _give_back(self, batch: Batch, indices: range, blamed: Attempt | None) -> None:
        """These have not begun, or will not be heard of: settle what was asked for, requeue the
        rest."""
        skipped = {offset for grant, offset in self.marks if grant == batch.grant}
        if blamed is not None and blamed[0] == batch.grant:
            skipped.add(blamed[1])
        kept, gone = parted(batch, indices, skipped)
        self._owner.requeue(kept)
        for offset in gone:
            why = self.marks.pop((batch.grant, offset), "")
            self._owner.settle(batch.grant, [offset], why)

    # -------------------------------------------------------------- the child is heard of

    def _heard(self, data: bytes) -> None:
        if self.talk is not None and not self._fault:
            self.talk.heard(data)
            self._owner.feed(self)

    def _closed(self) -> None:
        """The child has closed its end: most likely it ends, and its exit will say how."""
        self._mute = True
        if self.state in (STARTING, UP):
            self._time(LEAVE_S, self._deaf)

    def _deaf(self) -> None:
        self.condemn("it closed its end of the conversation and went on without us")

    def _told(self, news: Began | Ended | NotStarted) -> None:
        if self._owner.closing:
            return
        match news:
            case Began():
                self._pid = news.pid
                self.folder = news.folder
                self._written = (news.out, news.err)
                if self.talk is not None:
                    self.talk.began()
                self._serve()
            case NotStarted():
                self._gone(None, f"it could not be started: {news.why}")
            case Ended():
                self._mute = True
                if self._pipe is not None:
                    self._pipe.drain()
                self._gone(news, how_it_ended(news))

    def _gone(self, ended: Ended | None, how: str) -> None:
        """Nothing of the child is left: say so of what it held, and give the rest back."""
        self._stop_timer()
        was, self.state = self.state, DOWN
        blamed = None
        if was != ENDING or self._fault:
            blamed = self._blame(ended)
        useful = self._served > 0 or (blamed is not None and self.is_warm)
        self._drop_child()
        chunks, self.chunks = self.chunks, deque()
        for chunk in reversed(chunks):
            self._give_back(chunk.batch, range(chunk.done, chunk.end), blamed)
        self.marks.clear()
        meant = was == LEAVING or (was == ENDING and not self._fault)
        self._owner.child_gone(ended, "" if meant else self._fault or how, useful)

    def _blame(self, ended: Ended | None) -> Attempt | None:
        """Fail what ran when the child crashed or was condemned."""
        found = self.current()
        if found is None or self._is_marked(found):
            return None
        ran_ns = max(time.monotonic_ns() - found[2], 1)
        grant, offset = _attempt_of(found)
        assert self.talk is not None
        cause, text = self._owner.verdict(ended, self._fault, fresh=not self.talk.warm)
        note = Note(exit_code=ended.exit_code, ran_ns=ran_ns) if ended is not None else None
        self._owner.fail(grant, [Failure(offset, cause, text, note)], ran_ns)
        return grant, offset


def _attempt_of(found: Current) -> Attempt:
    chunk, at, _ = found
    return chunk.batch.grant, chunk.batch.first + at


def how_it_ended(ended: Ended) -> str:
    """In words; a child of a lane should not end at all, so no exit code is a good one."""
    trouble = trouble_of(ended, (), 0, sandboxed=False)
    assert trouble is not None
    return trouble[1]
