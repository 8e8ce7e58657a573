"""Rounds of a race: each system in turn, again and again, so that all see the same machine.

A ratio is taken within one round, where both ran seconds apart; the median of these ratios is
reported, with the lowest and the highest. The size of a system's rounds follows from its own speed
in a warm-up, so that all rounds take about as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from msgspec import Struct

from ekiden.bench.processes import Child

ROUND_TIMEOUT_S = 180.0


class Contender(Struct, kw_only=True):
    """A system ready to take load: its load process, and the other processes that pay for it."""

    name: str
    durability: str
    client: Child
    broker: Child
    workers: list[Child]
    warm_up_jobs: int
    note: str = ""


class Round(Struct, frozen=True, kw_only=True):
    """One round of one contender, as measured."""

    jobs: int
    seconds: float
    cpu_s: dict[str, float]
    machine_busy_cores: float

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds

    @property
    def busy_cores(self) -> float:
        """Cores that the contender's own processes kept busy."""
        return sum(self.cpu_s.values()) / self.seconds


def run_round(contender: Contender, jobs: int) -> Round:
    """Let the contender carry `jobs` jobs and measure what each of its processes spent on them."""
    machine_before = _machine_busy_s()
    before = _spent(contender)
    answer = contender.client.ask({"jobs": jobs}, ROUND_TIMEOUT_S)
    after = _spent(contender)
    seconds = float(answer["seconds"])
    return Round(
        jobs=answer.get("jobs", jobs),
        seconds=seconds,
        cpu_s={role: after[role] - before[role] for role in after},
        machine_busy_cores=(_machine_busy_s() - machine_before) / seconds,
    )


def race(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    seconds: float,
    tell: Callable[[str], None],
) -> dict[str, list[Round]]:
    """Warm everyone up, then `rounds` times each contender in turn."""
    sizes: dict[str, int] = {}
    for contender in contenders:
        warm = run_round(contender, contender.warm_up_jobs)
        # The first jobs of a process are slow, so the size is taken from a second warm-up.
        warm = run_round(contender, max(1000, round(warm.rate * seconds / 4)))
        sizes[contender.name] = max(1000, round(warm.rate * seconds))
    taken: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    for number in range(1, rounds + 1):
        for contender in contenders:
            taken[contender.name].append(run_round(contender, sizes[contender.name]))
        rates = "  ".join(f"{name} {done[-1].rate:,.0f}/s" for name, done in taken.items())
        tell(f"round {number}/{rounds}: {rates}")
    return taken


class Ratio(Struct, frozen=True, kw_only=True):
    """Our rate by theirs: median of the rounds, lowest, highest, and the ratio of the medians."""

    median: float
    low: float
    high: float
    of_medians: float


def ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> Ratio:
    """Compare round by round."""
    pairs = zip(ours, theirs, strict=True)
    found = [mine.rate / other.rate for mine, other in pairs]
    return Ratio(
        median=statistics.median(found),
        low=min(found),
        high=max(found),
        of_medians=_median_rate(ours) / _median_rate(theirs),
    )


def _median_rate(rounds: Sequence[Round]) -> float:
    return statistics.median(one.rate for one in rounds)


def summary(contender: Contender, rounds: Sequence[Round]) -> dict[str, Any]:
    """One row of the report."""
    return {
        "system": contender.name,
        "durability": contender.durability,
        "note": contender.note,
        "jobs_per_round": rounds[0].jobs,
        "jobs_per_s": round(_median_rate(rounds)),
        "jobs_per_s_all": [round(one.rate) for one in rounds],
        "cpu_us_per_job": {
            role: round(statistics.median(one.cpu_s[role] / one.jobs for one in rounds) * 1e6, 2)
            for role in rounds[0].cpu_s
        },
        "busy_cores": round(statistics.median(one.busy_cores for one in rounds), 2),
        "machine_busy_cores": round(statistics.median(one.machine_busy_cores for one in rounds), 2),
    }


def _spent(contender: Contender) -> dict[str, float]:
    return {
        "broker": contender.broker.cpu_s(),
        "worker": sum(worker.cpu_s() for worker in contender.workers),
        "client": contender.client.cpu_s(),
    }


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))
