"""What the seeds found, told as small stories that do not depend on a seed."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from ekiden.client.contract import Terms
from ekiden.core import commands as c
from ekiden.core.book import JobBook
from ekiden.core.roster import Roster, RosterWorker
from ekiden.core.rows import Settlement
from ekiden.core.scheduler import Scheduler
from ekiden.limits import NS
from ekiden.model.jobs import FAILED, POISON, Route, Spec
from ekiden.simulation.cluster import Grid
from ekiden.simulation.plans import Behaviour, JobPlan
from ekiden.simulation.world import MS
from ekiden.wire.messages import AssignRun
from ekiden.worker.ledger import Ledger

SPEC = Spec("work", Route("render.4k"))
RAW = msgspec.msgpack.encode(SPEC)


def _quiet_grid(seed: int = 1) -> Grid:
    """Everybody is there and nothing goes wrong."""
    grid = Grid(seed)
    grid.start()
    grid.universe.run(2 * NS)
    return grid


def _submit(grid: Grid, *attempts: Behaviour) -> JobPlan:
    plan = JobPlan("j", "c0", b"body", Terms(RAW), SPEC, list(attempts))
    grid.plans["j"] = plan
    grid.clients[0].submit([plan])
    return plan


def test_a_job_that_kills_whoever_runs_it_ends_as_poison() -> None:
    grid = _quiet_grid()
    _submit(grid, Behaviour(5 * MS, kills=True))

    grid.universe.run(60 * NS)

    row = grid.checkers.mirror.book.find("j")
    assert row is not None
    assert isinstance(row.place, Settlement)
    assert (row.place.state, row.place.reason) == (FAILED, POISON)
    assert grid.clients[0].settled == {"j": FAILED}


def test_an_idle_broker_writes_nothing_and_makes_no_snapshots() -> None:
    grid = _quiet_grid()
    _submit(grid, Behaviour(5 * MS))
    grid.universe.run(30 * NS)
    written, snapshots = grid.disk.syncs, grid.universe.counts["snapshot taken"]

    grid.universe.run(300 * NS)

    assert (grid.disk.syncs, grid.universe.counts["snapshot taken"]) == (written, snapshots)


def test_a_worker_whose_plan_came_to_nothing_is_planned_for_again() -> None:
    # given: a submit that repeats known jobs, for which a worker's whole credit was planned
    book, roster = JobBook(), Roster()
    scheduler = Scheduler(roster)
    worker = RosterWorker("w")
    worker.conn, worker.slots, worker.credit = 1, 1, 2
    roster.join(worker, [">"])

    def apply(*commands: c.Command) -> None:
        at = book.applied + 1
        book.apply(c.Entry(at, at * NS, at * NS, list(commands)))
        scheduler.forget_plans(book)

    def submit(*ids: str) -> c.Submit:
        return c.Submit("c", "s", Raw(RAW), list(ids), bytes(8 * len(ids)), [b""] * len(ids))

    apply(submit("a", "b", "c"), c.Cancel(["a", "b", "c"]))
    scheduler.wake(SPEC.route)
    apply(submit("a", "b", "c"), *scheduler.plan(book, {SPEC.route: 3}))

    # when: a job comes that is new
    scheduler.wake(SPEC.route)
    plans = scheduler.plan(book, {SPEC.route: 1})

    # then
    assert plans == [c.Assign("w", SPEC.route, 1)]


def test_an_assign_that_comes_again_before_the_outcome_left_is_not_run_again() -> None:
    ledger = Ledger()
    run = AssignRun(7, 0, Raw(RAW), "c", ["a", "b"], [b"", b""])
    ledger.take(run, SPEC)
    outcome = ledger.finish(7, [0], [b"out"], [], {})
    assert outcome is not None

    parts, again = ledger.take(run, SPEC, [outcome])

    assert (parts, again) == ([], [])
