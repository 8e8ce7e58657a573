"""A small universe that runs from one seed: virtual time, chance, and a trace of all that happened.

Everything that happens is an event on one heap, ordered by (time, order of scheduling), so two runs
of a seed are the same to the last event whatever the hash seed of the interpreter. Chance is dealt
in named streams: a change in how often the network rolls its dice does not change the workload.

Time here is true time. A process sees it through its own monotonic clock (true time plus an offset
that differs from process to process) and through the wall clock, which a fault may set forward or
back at any moment.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from random import Random

from ekiden.limits import NS

US = 1_000
MS = 1_000_000

# The wall clock of a new universe: an ordinary moment, far from zero so that mixing up the two
# clocks shows at once.
WALL_AT_START = 1_750_000_000 * NS


class Violation(Exception):
    """A promise was broken. `invariant` names it as GUARANTEES does."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant
        self.message = message


class Event:
    """Something that will happen unless it is called off."""

    __slots__ = ("action", "at", "what")

    def __init__(self, at: int, what: str, action: Callable[[], None] | None) -> None:
        self.at = at
        self.what = what
        self.action = action

    def call_off(self) -> None:
        """It will not happen. Calling off what has happened does nothing."""
        self.action = None


class Universe:
    """Time, chance and trace of one simulated world."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.now = 0
        self.events = 0
        self.counts: dict[str, int] = {}
        self.story: list[str] | None = [] if keep_trace else None
        self._wall_shift = WALL_AT_START
        self._heap: list[tuple[int, int, Event]] = []
        self._order = 0
        self._digest = hashlib.blake2b(digest_size=8)

    # -------------------------------------------------------------- chance

    def chance(self, stream: str) -> Random:
        """Dice of their own for one purpose, the same for every run of this seed."""
        return Random(f"{self.seed}/{stream}")

    # -------------------------------------------------------------- time

    @property
    def wall(self) -> int:
        """What a clock on the wall shows: nanoseconds since 1970, as far as it is right."""
        return self.now + self._wall_shift

    def jump_wall(self, by_ns: int) -> None:
        """Somebody set the clock."""
        self._wall_shift += by_ns
        self.note(f"wall clock jumps by {by_ns / NS:+.0f} s")

    def right_wall(self) -> None:
        """The clock is set right again."""
        self._wall_shift = WALL_AT_START

    def after(self, delay_ns: int, what: str, action: Callable[[], None]) -> Event:
        """Let `action` happen once, `delay_ns` from now."""
        event = Event(self.now + max(0, delay_ns), what, action)
        self._order += 1
        heapq.heappush(self._heap, (event.at, self._order, event))
        return event

    def run(self, until: int, *, events_max: int = 1 << 62) -> None:
        """Let things happen up to `until`, or until so many have happened."""
        heap = self._heap
        stop_at = self.events + events_max
        while heap and heap[0][0] <= until:
            if self.events >= stop_at:
                return
            at, _, event = heapq.heappop(heap)
            action = event.action
            if action is None:
                continue
            event.action = None
            self.now = at
            self.events += 1
            self._digest.update(b"%d %s\n" % (at, event.what.encode()))
            action()
        self.now = max(self.now, until)

    # -------------------------------------------------------------- trace

    def note(self, line: str) -> None:
        """Write a line into the trace."""
        self._digest.update(line.encode())
        self.tell(line)

    def tell(self, line: str) -> None:
        """Write a line into the story only: it follows from the rest and does not count."""
        if self.story is not None:
            self.story.append(f"{self.now / NS:12.6f}  {line}")

    def seen(self, data: bytes) -> None:
        """Let bytes that travelled or were written count in the trace, without keeping them."""
        self._digest.update(data)

    def count(self, what: str) -> None:
        """A fault was injected or a rare path taken; `--seeds` sums these up."""
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def trace(self) -> str:
        """Hex digest of everything that happened so far."""
        return self._digest.hexdigest()
