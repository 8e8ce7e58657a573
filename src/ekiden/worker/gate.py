"""Between the machine and who runs its jobs: what needs cached data waits here until it is there.

A job without caches passes at once. The others wait together with those that need the same caches,
which are fetched if they are not here, looked at by their stamps, and repaired if something has
written to them. One look is for all that wait when it begins. So a job never begins on what an
earlier one has spoiled before that look; it may see what a job that runs beside it does later.
Where that matters, jobs run sandboxed: then they cannot write there at all.

Looking at ten thousand files takes some 30 ms of the agent's processor. While looks follow each
other they take at most a quarter of the time, so that jobs by the thousand share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

from ekiden.model.caches import CacheUse
from ekiden.model.jobs import CANNOT_START
from ekiden.wire.messages import Failure
from ekiden.worker.contract import RECALL, STALE, Abort, Dropped, Gone, Look, Run, RunFinished
from ekiden.worker.ledger import Attempt, cut, spans

Emit: TypeAlias = Callable[[Any], None]
Uses: TypeAlias = tuple[CacheUse, ...]

# After a look: a pause of so many times as long as it took, but no longer than that: what took so
# long was a fetch.
_PAUSE: Final = 3
_PAUSE_MAX_S: Final = 0.5


class Performer(Protocol):
    """Who runs jobs."""

    def run(self, effect: Run) -> None: ...
    def abort(self, effect: Abort) -> None: ...
    def look(self, effect: Look) -> None: ...
    def close(self) -> None: ...


class Keeping(Protocol):
    """Who has the data."""

    async def ensure(self, uses: Iterable[CacheUse]) -> str: ...
    def pin(self, uses: Iterable[CacheUse], count: int = 1) -> None: ...
    def unpin(self, uses: Iterable[CacheUse]) -> None: ...


class Gate:
    """Performs `Run`, `Abort` and `Look`; `heard` is where performers tell their news."""

    def __init__(self, emit: Emit, caches: Keeping) -> None:
        self._emit = emit
        self._caches = caches
        self._performer: Performer | None = None
        self._held: dict[Attempt, Uses] = {}
        """Attempts that wait here."""
        self._using: dict[Attempt, Uses] = {}
        """Attempts that were handed on, until they are settled."""
        self._lines: dict[Uses, list[Run]] = {}
        """What waits, by what it needs; each has a task."""
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, performer: Performer) -> None:
        """This is who runs jobs."""
        self._performer = performer

    # -------------------------------------------------------------- what the machine asks

    def run(self, effect: Run) -> None:
        """Hand these on when their data is there; without that, fail them with the reason."""
        uses = effect.spec.caches
        if not uses:
            self._perform.run(effect)
            return
        run = effect.run
        for at in range(len(run.ids)):
            self._held[run.grant, run.first + at] = uses
        self._caches.pin(uses, len(run.ids))
        line = self._lines.get(uses)
        if line is not None:
            line.append(effect)
            return
        self._lines[uses] = [effect]
        task = asyncio.get_running_loop().create_task(self._serve(uses), name="cache-gate")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def abort(self, effect: Abort) -> None:
        """End these; see `Abort`. What waits here has not begun."""
        if not self._held and not self._using:
            self._perform.abort(effect)
            return
        ours = [at for at in effect.offsets if (effect.grant, at) in self._held]
        for at in ours:
            self._caches.unpin(self._held.pop((effect.grant, at)))
        if ours and effect.why != STALE:
            kind = Dropped if effect.why == RECALL else Gone
            self._emit(kind(effect.grant, ours))
        rest = [at for at in effect.offsets if at not in set(ours)] if ours else effect.offsets
        if rest:
            self._perform.abort(Abort(effect.grant, rest, effect.why, effect.spec))
            if effect.why == STALE:
                self._settled(effect.grant, rest)

    def look(self, effect: Look) -> None:
        """Whoever runs it knows."""
        self._perform.look(effect)

    def close(self) -> None:
        """Hand nothing on any more, and close who runs jobs."""
        for task in self._tasks:
            task.cancel()
        if self._performer is not None:
            self._performer.close()

    # -------------------------------------------------------------- what performers say

    def heard(self, event: Any) -> None:
        """Pass it on to the machine; what is settled uses its data no more."""
        self._emit(event)
        if self._using and isinstance(event, RunFinished | Dropped | Gone):
            self._settled(event.grant, event.offsets)
            if isinstance(event, RunFinished):
                self._settled(event.grant, [failure.offset for failure in event.failures])

    def _settled(self, grant: int, offsets: Iterable[int]) -> None:
        for offset in offsets:
            uses = self._using.pop((grant, offset), None)
            if uses is not None:
                self._caches.unpin(uses)

    # -------------------------------------------------------------- waiting

    async def _serve(self, uses: Uses) -> None:
        """Let through what waits for these, look by look, until nothing does."""
        loop = asyncio.get_running_loop()
        while line := [effect for effect in self._lines[uses] if self._waits(effect)]:
            self._lines[uses] = []
            began = loop.time()
            why = await self._caches.ensure(uses)
            took_s = loop.time() - began
            for effect in line:
                self._release(effect, why)
            if not self._lines[uses]:
                break
            await asyncio.sleep(min(took_s * _PAUSE, _PAUSE_MAX_S))
        del self._lines[uses]

    def _waits(self, effect: Run) -> bool:
        """Whether any of these has not been given up."""
        run = effect.run
        return any((run.grant, run.first + at) in self._held for at in range(len(run.ids)))

    def _release(self, effect: Run, why: str) -> None:
        run, uses = effect.run, effect.spec.caches
        offsets = range(run.first, run.first + len(run.ids))
        left = [at for at in offsets if self._held.pop((run.grant, at), None) is not None]
        if not left:
            return
        if why:
            for _ in left:
                self._caches.unpin(uses)
            failures = [Failure(at, CANNOT_START, why) for at in left]
            self._emit(RunFinished(run.grant, (), [], {}, failures))
            return
        for at in left:
            self._using[run.grant, at] = uses
        if len(left) == len(offsets):
            self._perform.run(effect)
            return
        for span in spans(left):
            self._perform.run(Run(cut(run, span), effect.spec))

    @property
    def _perform(self) -> Performer:
        assert self._performer is not None
        return self._performer

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
