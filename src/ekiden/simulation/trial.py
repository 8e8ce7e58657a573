"""One seed from its beginning to its end.

There are two phases. In the first, users use the grid and misuse it while faults strike; only
promises of safety are checked. Then everything heals, and every accepted job must end within a
bound, every future must resolve, and everything must come to rest.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from msgspec import Struct

from ekiden.limits import NS
from ekiden.simulation.cluster import Grid
from ekiden.simulation.faults import Faults
from ekiden.simulation.workload import Workload
from ekiden.simulation.world import Violation

# Jobs that lose a worker wait for the lease, those that fail for their backoff, and a worker that
# failed too many jobs is put aside for a minute; the rest is for queueing, reconnecting and runs.
LIVENESS_NS = 180 * NS

# How long after the last job has ended everything must have come to rest.
REST_NS = 5 * NS

CHECK_EVERY_EVENTS = 400


class Outcome(Struct):
    """What became of one seed. `violation` is empty if every promise held."""

    seed: int
    trace: str
    violation: str = ""
    virtual_ns: int = 0
    events: int = 0
    counts: dict[str, int] = {}
    story: list[str] = []


def simulate(seed: int, *, keep_trace: bool = False) -> Outcome:
    """Run one seed to its end or to its first broken promise."""
    was_enabled = gc.isenabled()
    gc.disable()  # a world lives for a tenth of a second
    try:
        grid = Grid(seed, keep_trace=keep_trace)
        violation = ""
        try:
            _run(grid)
        except Violation as broken:
            violation = str(broken)
        universe = grid.universe
        return Outcome(
            seed,
            universe.trace,
            violation,
            universe.now,
            universe.events,
            universe.counts,
            universe.story or [],
        )
    finally:
        if was_enabled:
            gc.enable()


def _run(grid: Grid) -> None:
    universe = grid.universe
    faults, workload = Faults(grid), Workload(grid)
    grid.start()
    until = grid.dice.choice((8, 15, 25)) * NS
    workload.begin(until)
    faults.begin(until)
    _run_checked(grid, until)

    faults.heal()
    limit = universe.now + LIVENESS_NS
    _run_checked(grid, universe.now + NS)  # everybody is up again
    _run_until_none(grid, _questions, limit)
    workload.settle()
    _run_until_none(grid, _open_ends, limit)
    _run_checked(grid, universe.now + REST_NS)
    _check_rest(grid)


def _run_checked(grid: Grid, until: int) -> None:
    universe = grid.universe
    while universe.now < until:
        universe.run(until, events_max=CHECK_EVERY_EVENTS)
        broker = grid.broker.broker
        grid.checkers.check_book(broker.book if broker is not None else None)


def _run_until_none(grid: Grid, left: Callable[[Grid], list[str]], limit: int) -> None:
    """Let time pass until nothing is left; at `limit` there must be nothing."""
    universe = grid.universe
    while found := left(grid):
        if universe.now >= limit:
            raise Violation("I6", "long after the heal " + ", ".join(found[:5]))
        _run_checked(grid, universe.now + NS // 4)


def _questions(grid: Grid) -> list[str]:
    return [f"{client.name} has no answer" for client in grid.clients if client.questions]


def _open_ends(grid: Grid) -> list[str]:
    """Jobs that have not ended, and programs that wait."""
    waiting = [line for client in grid.clients for line in client.waits_for()]
    return grid.checkers.open_jobs() + waiting + _questions(grid)


def _check_rest(grid: Grid) -> None:
    """Nothing is left over once everything has ended."""
    grid.checkers.check_kept()
    for worker in grid.workers:
        if worker.worker is None:
            raise Violation("I8", f"{worker.name} is down")
        if worker.worker.held:
            raise Violation("I8", f"{worker.name} still holds {worker.worker.held}")
    for client in grid.clients:
        if client.client is None or client.client.pending or client.client.open_jobs:
            raise Violation("I8", f"{client.name} still has open jobs")
    broker = grid.broker.broker
    if broker is None or broker.book.grants or broker.herald.waiting:
        raise Violation("I8", "the broker still has leases, or news that it has not told")
