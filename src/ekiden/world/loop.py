"""The one loop: carries events into a machine and performs what it decides.

Everything that arrives in one iteration of the event loop is fed to the machine first; then one
turn drains it. So a turn sees a batch, and what it decides leaves in one write per connection.

A machine that raises has a bug, and a process that goes on after one would hang or, worse, answer
from a state nobody understands. So an exception in a turn ends the driver: `failed` gets it, and
the process is expected to exit and be replayed from its journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import Struct

from ekiden.limits import NS
from ekiden.machine import Instant, Machine

T = TypeVar("T")

Handler: TypeAlias = Callable[[Any], None]
Performers: TypeAlias = Callable[[list[Any]], None] | dict[type, Handler]

# Far deadlines are looked at again this often: an early look costs nothing, and event loops treat
# very long timers badly.
_TIMER_S_MAX: Final = 3600.0


class TurnStats(Struct, frozen=True):
    """How long turns keep the loop busy. `turn_ms_p99` is exact to about an eighth."""

    turns: int
    turn_ms_max: float
    turn_ms_p99: float


class Durations:
    """A histogram of fixed size: eight steps for every doubling, from a microsecond to an hour."""

    __slots__ = ("_counts", "count", "max_ns")

    def __init__(self) -> None:
        self._counts = [0] * 320
        self.count = 0
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one."""
        self.count += 1
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns
        units = duration_ns >> 10
        doublings = max(units.bit_length() - 4, 0)
        self._counts[min(doublings * 8 + (units >> doublings), 319)] += 1

    def quantile_ns(self, share: float) -> int:
        """A duration that at most `1 - share` of all exceed."""
        left = self.count * (1 - share)
        for step in range(len(self._counts) - 1, -1, -1):
            left -= self._counts[step]
            if left < 0:
                return min(_upper_ns(step), self.max_ns)
        return 0


def _upper_ns(step: int) -> int:
    doublings = max(step // 8 - 1, 0)
    return ((step - doublings * 8 + 1) << doublings) << 10


class Driver:
    """Runs one machine on the running event loop.

    `perform` is a function of all effects of a turn, or a table from the type of an effect to a
    function of one; `handle` adds to the table. An effect without a handler is a bug.
    """

    def __init__(self, machine: Machine, *, perform: Performers | None = None) -> None:
        self.machine = machine
        self.loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self.loop.create_future()
        """Done when the driver has ended: with the exception of a bug, or None after `stop`."""
        self._table: dict[type, Handler] = dict(perform) if isinstance(perform, dict) else {}
        self._perform = perform if callable(perform) else self._perform_each
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: Instant = 0
        self._busy_ns = 0
        self._durations = Durations()

    # -------------------------------------------------------------- use

    @property
    def ended(self) -> bool:
        """Whether the driver takes no more events."""
        return self.failed.done()

    def handle(self, kind: type, handler: Handler) -> None:
        """Perform effects of this type with `handler`."""
        assert kind not in self._table, f"{kind.__name__} has a handler already"
        self._table[kind] = handler

    def perform_one(self, effect: object) -> None:
        """Perform an effect that the world itself asks for, such as a line of its log."""
        self._perform([effect])

    def feed(self, event: object) -> None:
        """Tell the machine now; let it decide after everything else that has arrived by then."""
        if self.failed.done():
            return
        began = time.monotonic_ns()
        try:
            self.machine.receive(event, began)
        except Exception as error:  # noqa: BLE001 - any bug ends the driver
            self.fail(error)
            return
        self._busy_ns += time.monotonic_ns() - began
        self.wake()

    def wake(self) -> None:
        """See to it that there is a turn soon, also if nothing happens."""
        if not self._scheduled and not self.failed.done():
            self._scheduled = True
            self.loop.call_soon(self._turn_if_due)

    def turn(self) -> None:
        """Drain the machine once. An exception ends the driver."""
        self._scheduled = False
        if self.failed.done():
            return
        began = time.monotonic_ns()
        try:
            self._decide(began)
            if self._scheduled:
                # An effect had its answer at once, such as a quick sync: somebody waits for what
                # follows from it. Only once, so that the sockets have their turn too.
                self._scheduled = False
                self._decide(time.monotonic_ns())
            self._arm()
        except Exception as error:  # noqa: BLE001 - any bug ends the driver
            self.fail(error)
            return
        self._durations.add(self._busy_ns + time.monotonic_ns() - began)
        self._busy_ns = 0

    def stop(self) -> None:
        """End on purpose: no more events, turns or timers."""
        if not self.failed.done():
            self.failed.set_result(None)
        self._disarm()

    def fail(self, error: BaseException) -> None:
        """End because of a bug or a fault that must not be survived. The first one counts."""
        if not self.failed.done():
            self.failed.set_exception(error)
        self._disarm()

    async def wait_ended(self) -> None:
        """Return after `stop`; raise what `fail` was called with."""
        await asyncio.shield(self.failed)

    def stats(self) -> TurnStats:
        """What turns have cost since the start, receiving included."""
        durations = self._durations
        return TurnStats(durations.count, durations.max_ns / 1e6, durations.quantile_ns(0.99) / 1e6)

    # -------------------------------------------------------------- inside

    def _turn_if_due(self) -> None:
        if self._scheduled:
            self.turn()

    def _decide(self, now: Instant) -> None:
        effects = self.machine.advance(now)
        if effects:
            self._perform(effects)

    def _perform_each(self, effects: list[Any]) -> None:
        table = self._table
        for effect in effects:
            table[type(effect)](effect)

    def _arm(self) -> None:
        """Set the timer if the next deadline is earlier than the one it is set for.

        If it is later, the timer stays: it fires early, sees that nothing is due and is set anew.
        That is far cheaper than moving it in every turn.
        """
        deadline = self.machine.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        self._disarm()
        delay_ns = deadline - time.monotonic_ns()
        if delay_ns <= 0:
            self.wake()
            return
        # Rounded up to the loop's milliseconds: too early would mean a turn for nothing.
        delay_s = min(-(-delay_ns // 1_000_000) / 1000, _TIMER_S_MAX)
        self._timer_at = deadline
        self._timer = self.loop.call_later(delay_s, self._ring)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self.failed.done():
            return
        try:
            deadline = self.machine.next_deadline()
            if deadline is None:
                return
            if deadline > time.monotonic_ns():
                self._arm()
                return
        except Exception as error:  # noqa: BLE001 - any bug ends the driver
            self.fail(error)
            return
        self.wake()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on the fastest event loop there is, to its end."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def seconds(duration_ns: int) -> float:
    """For APIs that want seconds."""
    return duration_ns / NS
