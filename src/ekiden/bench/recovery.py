"""A million jobs waiting: what they weigh, what one more costs, how soon a broker is back.

Jobs are sent to a subject nobody listens to. The cost of a submit is taken from the broker's own
CPU clock, chunk by chunk, so the curve from an empty book to a full one can be seen. Then the
broker is started again in the three ways it can find its folder: after SIGKILL with nothing but the
journal, after a graceful stop with nothing but a snapshot, and after SIGKILL with both. It serves
when it answers a question, and it must count exactly the jobs that were accepted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ekiden.bench import report
from ekiden.bench.grid import Grid, start_grid
from ekiden.bench.processes import BenchFailed, Child, Crew

FIRST_JOBS = 10_000
CHUNK_JOBS = 45_000
TAIL_JOBS = 100_000
# A chunk costs some tens of milliseconds of CPU, which move by a tenth from one to the next.
FILLS = 5

RSS_MB_MAX = 450.0
SUBMIT_GROWTH_MAX = 1.15
RESTART_S_MAX = 4.0
RESTART_TIMEOUT_S = 300.0

JOURNAL, SNAPSHOT, BOTH = "kill -9, journal only", "graceful stop", "kill -9, snapshot and journal"


def run(
    *,
    jobs: int = 1_000_000,
    restarts: int = 3,
    fills: int = FILLS,
    memory_bytes: int = 2 << 30,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Queue `jobs` jobs, then end and restart the broker `restarts` times in each way."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        report.touch_memory(crew.folder, memory_bytes)
        curves = [_fill_and_drop(crew.folder / f"fill-{n}", jobs, tell) for n in range(1, fills)]
        grid = _start_broker(crew)
        rss_empty = grid.broker.rss_bytes()
        load = grid.add_load("backlog")
        curves.append(_fill(grid.broker, load, jobs, tell))
        rss_full = grid.broker.rss_bytes()
        load.end()
        restart = _Restarts(grid, jobs, tell)
        rows = [restart.row(JOURNAL, restarts)]
        disk = grid.disk_bytes()
        rows.append(restart.row(SNAPSHOT, restarts))
        rss_loaded = grid.broker.rss_bytes()
        restart.queue(min(TAIL_JOBS, jobs // 10))
        rows.append(restart.row(BOTH, restarts))
    at_start = round(statistics.median(map(cost_at_start, curves)), 3)
    at_end = round(statistics.median(map(cost_at_end, curves)), 3)
    figures = {
        "jobs": jobs,
        "rss_empty_mb": round(rss_empty / 1e6, 1),
        "rss_full_mb": round(rss_full / 1e6, 1),
        "rss_loaded_mb": round(rss_loaded / 1e6, 1),
        "rss_bytes_per_job": round((rss_full - rss_empty) / jobs),
        "disk_bytes_per_job": round(disk / jobs),
        "submit_us_at_10k": at_start,
        "submit_us_at_end": at_end,
        "restarts": rows,
        "curve": curves[-1],
        "submit_us_growth_all": [round(cost_at_end(c) / cost_at_start(c), 2) for c in curves],
    }
    goals = [
        report.at_most(f"RSS with {jobs:,} queued", round(rss_full / 1e6), RSS_MB_MAX, "MB"),
        report.at_most(
            "CPU of a submit, full by 10 k", round(at_end / at_start, 3), SUBMIT_GROWTH_MAX, "×"
        ),
        *(
            report.at_most(f"serving after {row['after']}", row["median_s"], RESTART_S_MAX, "s")
            for row in rows
        ),
    ]
    return report.outline("recovery", facts, figures, goals)


def _start_broker(crew: Crew) -> Grid:
    # No snapshot by itself while the book fills: the first restart is to find the journal only.
    return start_grid(crew, workers=0, options=("--snapshot-interval", "3600"))


def _fill_and_drop(folder: Path, jobs: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    folder.mkdir()
    with Crew(folder=folder) as crew:
        grid = _start_broker(crew)
        return _fill(grid.broker, grid.add_load("backlog"), jobs, tell)


def cost_at_start(curve: list[dict[str, Any]]) -> float:
    """µs of a submit with about 10 k queued. The very first jobs also warm the broker up."""
    return float(curve[1]["broker_us_per_submit"] if len(curve) > 1 else _cost(curve[0]))


def cost_at_end(curve: list[dict[str, Any]]) -> float:
    """µs of a submit when the book is full; the median of a few chunks."""
    return float(statistics.median(_cost(point) for point in curve[-3:]))


def _cost(point: dict[str, Any]) -> float:
    return float(point["broker_us_per_submit"])


def _fill(
    broker: Child, load: Child, jobs: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
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
    tell(f"{queued:,} queued, broker has {curve[-1]['rss_mb']:.0f} MB")
    return curve


class _Restarts:
    """Ends and starts one broker, and counts its jobs each time."""

    def __init__(self, grid: Grid, accepted: int, tell: Callable[[str], None]) -> None:
        self._grid = grid
        self._accepted = accepted
        self._tell = tell

    def queue(self, jobs: int) -> None:
        """Some more, which the snapshot does not have."""
        load = self._grid.add_load("backlog")
        load.ask({"jobs": jobs}, 120.0)
        load.end()
        self._accepted += jobs

    def row(self, way: str, times: int) -> dict[str, Any]:
        """Seconds from starting the process to its first answer, `times` times."""
        stops, taken = [], []
        for _ in range(times):
            if way == SNAPSHOT:
                self.queue(1)  # A broker that has written nothing has nothing to snapshot.
            stops.append(self._stop(graceful=way == SNAPSHOT))
            taken.append(self._start())
        self._tell(f"{way}: serving again after {taken} s")
        return {
            "after": way,
            "jobs": self._accepted,
            "median_s": round(statistics.median(taken), 2),
            "all_s": taken,
            "stop_s": round(statistics.median(stops), 2),
            "snapshots": len(list(self._grid.data.glob("*.snap"))),
        }

    def _stop(self, *, graceful: bool) -> float:
        begin = time.perf_counter()
        if graceful:
            self._grid.broker.stop(RESTART_TIMEOUT_S)
        else:
            self._grid.broker.kill()
        return round(time.perf_counter() - begin, 3)

    def _start(self) -> float:
        begin = time.perf_counter()
        self._grid.start_broker(RESTART_TIMEOUT_S)
        queued = self._grid.stats()["jobs"]["queued"]
        taken = time.perf_counter() - begin
        if queued != self._accepted:
            raise BenchFailed(f"{self._accepted:,} jobs were accepted, {queued:,} are there now")
        return round(taken, 3)
