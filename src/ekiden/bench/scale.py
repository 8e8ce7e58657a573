"""What a match and an assign cost as workers and patterns grow.

Three curves. The trie by itself: finding who may take a subject, from ten patterns to ten thousand.
The book and the planner by themselves: leasing jobs and settling them, from ten workers to a
thousand, ten patterns each. And a real broker with as many connected workers: its CPU for a job,
with the same number of jobs open at any time, less what it spends on that many idle workers.

All are to stay flat: the cost follows from the question and the answer, not from how much else
there is.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ekiden.bench import report
from ekiden.bench.grid import Grid
from ekiden.bench.processes import Child, Crew, wait_until
from ekiden.core import commands as c
from ekiden.core.book import JobBook
from ekiden.core.roster import Roster, RosterWorker
from ekiden.core.scheduler import Scheduler
from ekiden.core.subjects import SubjectTrie
from ekiden.limits import NS
from ekiden.model.jobs import Route, Spec

PATTERNS = (10, 100, 1_000, 10_000)
WORKERS = (10, 100, 1_000)
PATTERNS_EACH = 10
REPEATS = 7
QUESTIONS = 2_000
GRANTS = 400
OPEN = 8
"""Jobs open at any time: fewer than the fewest workers, so that every grant is one job."""

# Larger tables miss the processor's caches more often; a scan would be a thousand times dearer.
FLAT_MAX = 1.3


# ------------------------------------------------------------------ the trie


def match_curve() -> list[dict[str, Any]]:
    """Cost of finding the workers of a subject, by the number of patterns there are."""
    curve: list[dict[str, Any]] = []
    for count in PATTERNS:
        trie: SubjectTrie[str] = SubjectTrie()
        for number in range(count):
            trie.add(_pattern(number), f"w{number}")
        subjects = [f"team{number * 7919 % count}.render.4k" for number in range(QUESTIONS)]
        cost = _match_us(trie, subjects)
        answers = statistics.mean(len(trie.match(subject)) for subject in subjects)
        curve.append({"patterns": count, "match_us": round(cost, 3), "answers": round(answers, 2)})
    return curve


def _match_us(trie: SubjectTrie[str], subjects: list[str]) -> float:
    def ask() -> None:
        for subject in subjects:
            trie.match(subject)

    return median_us(ask, len(subjects))


def _pattern(number: int) -> str:
    """Four shapes in turn: exact, one token open, the rest open, the middle open."""
    team = f"team{number}"
    return (f"{team}.render.4k", f"{team}.render.*", f"{team}.>", f"{team}.*.4k")[number % 4]


def median_us(work: Callable[[], Any], per: int) -> float:
    """Median microseconds of one of the `per` questions that `work` asks."""
    work()
    taken = []
    gc.collect()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) / per * 1e6


# ------------------------------------------------------------------ the book and the planner


def assign_curve(workers: tuple[int, ...]) -> list[dict[str, Any]]:
    """Cost of one job through planner and book, every job a grant of its own, by workers."""
    return [{"workers": count, "assign_us": round(_assign_us(count), 2)} for count in workers]


class _Planning:
    """A book and a roster with idle workers, each with patterns of its own and one they share."""

    def __init__(self, workers: int) -> None:
        self._book = JobBook()
        self._roster = Roster()
        self._scheduler = Scheduler(self._roster)
        self._route = Route("shared.noop")
        self._spec = msgspec.Raw(msgspec.msgpack.encode(Spec("noop", self._route)))
        self._number = 0
        for number in range(workers):
            worker = RosterWorker(f"w{number}")
            worker.conn, worker.slots, worker.credit = number + 1, 1, 2
            own = [f"own{number}.{n}.>" for n in range(PATTERNS_EACH - 1)]
            self._roster.join(worker, ["shared.>", *own])

    def carry(self, jobs: int) -> None:
        """`jobs` times: a job comes, is given to the best of all workers, and is settled."""
        book, scheduler = self._book, self._scheduler
        for _ in range(jobs):
            self._number += 1
            submit = c.Submit(
                "bench", "s", self._spec, [f"j{self._number}"], bytes(8), [b"p" * 100]
            )
            scheduler.wake(self._route)
            plans = scheduler.plan(book, {self._route: 1})
            (grant,) = self._apply(submit, *plans).grants
            worker = self._roster.workers[grant.worker.id]
            scheduler.forget_plans(book)
            scheduler.freed(worker, book)
            self._apply(c.Finish(worker.id, grant.number, None, [b"r" * 100]))
            scheduler.freed(worker, book)

    def _apply(self, *commands: c.Command) -> Any:
        at = self._book.applied + 1
        return self._book.apply(c.Entry(at, at * NS, at * NS, list(commands)))


def _assign_us(workers: int) -> float:
    planning = _Planning(workers)
    return median_us(lambda: planning.carry(GRANTS), GRANTS)


# ------------------------------------------------------------------ a real broker


def broker_curve(
    crew: Crew, workers: tuple[int, ...], seconds: float, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """CPU of a broker for one job, by connected workers."""
    return [_broker_point(crew, count, seconds, tell) for count in workers]


def _broker_point(
    crew: Crew, workers: int, seconds: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    grid = Grid(crew, name=f"scale{workers}")
    fleet = crew.start_python(
        f"fleet{workers}",
        *("-m", "ekiden.bench.fleet", grid.address, str(workers), str(PATTERNS_EACH)),
        talks=True,
    )
    fleet.hear(60.0)
    wait_until(fleet, "join", 60.0, lambda: grid.stats()["workers"]["connected"] >= workers)
    load = grid.add_load(f"open:{OPEN}")
    load.ask({"run_s": min(1.0, seconds)})
    time.sleep(min(1.0, seconds))
    idle = _share(grid.broker, seconds)
    before = grid.broker.cpu_s()
    done = load.ask({"run_s": seconds})
    spent = grid.broker.cpu_s() - before
    point = {
        "workers": workers,
        "patterns": workers * PATTERNS_EACH,
        "broker_us_per_job": round((spent - idle * done["seconds"]) / done["jobs"] * 1e6, 2),
        "jobs_per_s": round(done["jobs"] / done["seconds"]),
        "idle_cpu_percent": round(idle * 100, 2),
        "rss_mb": round(grid.broker.rss_bytes() / 1e6, 1),
    }
    for child in (load, fleet, grid.broker):
        child.end()
    tell("  ".join(f"{name} {value}" for name, value in point.items()))
    return point


def _share(child: Child, seconds: float) -> float:
    begin, before = time.monotonic(), child.cpu_s()
    time.sleep(seconds)
    return (child.cpu_s() - before) / (time.monotonic() - begin)


def run(
    *,
    seconds: float = 4.0,
    workers: tuple[int, ...] = WORKERS,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """All three curves; `seconds` is how long each broker is watched, idle and busy."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        matches, assigns = match_curve(), assign_curve(workers)
        brokers = broker_curve(crew, workers, seconds, tell)
    span = f"{workers[-1]:,} workers by {workers[0]:,}"
    goals = [
        _flat("match, 10,000 patterns by 10", matches, "match_us"),
        _flat(f"plan, lease and settle, {span}", assigns, "assign_us"),
        _flat(f"broker's CPU of a job, {span}", brokers, "broker_us_per_job"),
    ]
    figures = {"match": matches, "assign": assigns, "broker": brokers}
    return report.outline("scale", facts, figures, goals)


def _flat(name: str, curve: list[dict[str, Any]], figure: str) -> report.Goal:
    return report.at_most(name, round(curve[-1][figure] / curve[0][figure], 2), FLAT_MAX, "×")
