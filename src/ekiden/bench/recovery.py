"""A million jobs waiting: what they weigh, what one more costs, how soon a killed broker is back.

Jobs are sent to a subject nobody listens to. The cost of a submit is taken from the broker's own
CPU clock, chunk by chunk, so the curve from an empty book to a full one can be seen. Then the
broker is killed with SIGKILL and started again; it serves when it answers a question, and it must
count exactly the jobs that were accepted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ekiden
from ekiden.bench import report
from ekiden.bench.grid import Grid, start_grid
from ekiden.bench.processes import BenchFailed, Child, Crew

FIRST_JOBS = 10_000
CHUNK_JOBS = 45_000
RSS_MB_MAX = 450.0
SUBMIT_GROWTH_MAX = 1.15
RESTART_S_MAX = 4.0
RESTART_TIMEOUT_S = 300.0


def run(
    *,
    jobs: int = 1_000_000,
    restarts: int = 3,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Queue `jobs` jobs, then kill and restart the broker `restarts` times."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        report.touch_memory(crew.folder, 2 << 30)
        grid = start_grid(crew, workers=0)
        rss_empty = grid.broker.rss_bytes()
        load = grid.add_load("backlog")
        curve, accepted = _fill(grid.broker, load, jobs, tell)
        rss_full = grid.broker.rss_bytes()
        journal = _stats(grid)["journal"]
        load.stop()
        taken = [_restart(grid, accepted, tell) for _ in range(restarts)]
        rss_after = grid.broker.rss_bytes()
        disk = grid.disk_bytes()
    at_start = curve[1]["broker_us_per_submit"]
    at_end = statistics.median(point["broker_us_per_submit"] for point in curve[-3:])
    figures = {
        "jobs": accepted,
        "rss_empty_mb": round(rss_empty / 1e6, 1),
        "rss_full_mb": round(rss_full / 1e6, 1),
        "rss_after_restart_mb": round(rss_after / 1e6, 1),
        "rss_bytes_per_job": round((rss_full - rss_empty) / accepted),
        "disk_bytes_per_job": round(disk / accepted),
        "submit_us_at_10k": at_start,
        "submit_us_at_end": at_end,
        "restart_s": taken,
        "journal_before_kill": journal,
        "curve": curve,
    }
    restart_s = statistics.median(taken)
    goals = [
        report.at_most(f"RSS with {accepted:,} queued", round(rss_full / 1e6), RSS_MB_MAX, "MB"),
        report.at_most(
            "CPU of a submit, full by 10 k", round(at_end / at_start, 3), SUBMIT_GROWTH_MAX, "×"
        ),
        report.at_most("kill -9 to serving", round(restart_s, 2), RESTART_S_MAX, "s"),
    ]
    return report.outline("recovery", facts, figures, goals)


def _fill(
    broker: Child, load: Child, jobs: int, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], int]:
    """Queue the jobs in chunks; what each chunk cost the broker."""
    curve: list[dict[str, Any]] = []
    queued = 0
    while queued < jobs:
        count = min(CHUNK_JOBS if queued else FIRST_JOBS, jobs - queued)
        before = broker.cpu_s()
        seconds = load.ask({"jobs": count}, 120.0)["seconds"]
        spent = broker.cpu_s() - before
        curve.append(
            {
                "queued_before": queued,
                "broker_us_per_submit": round(spent / count * 1e6, 3),
                "jobs_per_s": round(count / seconds),
                "rss_mb": round(broker.rss_bytes() / 1e6, 1),
            }
        )
        queued += count
        tell(f"{queued:,} queued")
    return curve, queued


def _restart(grid: Grid, accepted: int, tell: Callable[[str], None]) -> float:
    """Seconds from starting the process to its first answer, which must count every job."""
    grid.broker.kill()
    begin = time.perf_counter()
    grid.start_broker(RESTART_TIMEOUT_S)
    queued = _stats(grid)["jobs"]["queued"]
    taken = time.perf_counter() - begin
    if queued != accepted:
        raise BenchFailed(f"{accepted:,} jobs were accepted, {queued:,} are there after a restart")
    tell(f"killed and serving again after {taken:.2f} s")
    return round(taken, 3)


def _stats(grid: Grid) -> dict[str, Any]:
    with ekiden.Client(grid.address, client_id="bench-probe") as client:
        return dict(client.stats())
