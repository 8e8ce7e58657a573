"""How long one job takes, from `submit` to its result, when nothing else is going on.

Two commits lie on that path (the submit with its assign, and the settlement), so the figure is read
beside the time one fdatasync takes on the same disk.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import ekiden
from ekiden.bench import report
from ekiden.bench.grid import start_grid
from ekiden.bench.load import NAME
from ekiden.bench.noop_worker import SUBJECT
from ekiden.bench.peers import PAYLOAD
from ekiden.bench.processes import Crew

WARM_UP_JOBS = 300
P50_MS, P99_MS, AT_SYNC_MS = 0.9, 2.0, 0.17


def run(*, jobs: int = 3000, folder: Path | None = None) -> dict[str, Any]:
    """Submit `jobs` jobs one after another through the blocking client."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        grid = start_grid(crew)
        taken = _measure(grid.address, jobs)
        sync_after = report.sync_ms(crew.folder)
    p50, p99 = report.percentile(taken, 0.50), report.percentile(taken, 0.99)
    figures = {
        "jobs": jobs,
        "p50_ms": round(p50, 3),
        "p99_ms": round(p99, 3),
        "max_ms": round(max(taken), 3),
        "mean_ms": round(statistics.mean(taken), 3),
        "fdatasync_before_ms": facts["fdatasync_ms"],
        "fdatasync_after_ms": sync_after,
    }
    # A slower disk is not our doing: each of the two commits may cost what it costs more there.
    excess = 2 * max(0.0, min(facts["fdatasync_ms"], sync_after) - AT_SYNC_MS)
    goals = [
        report.at_most("p50", round(p50, 3), round(P50_MS + excess, 3), "ms"),
        report.at_most("p99", round(p99, 3), round(P99_MS + excess, 3), "ms"),
    ]
    return report.outline("latency", facts, figures, goals)


def _measure(address: str, jobs: int) -> list[float]:
    """Milliseconds of each."""
    taken = []
    with ekiden.Client(address, client_id="bench") as client:
        for number in range(WARM_UP_JOBS + jobs):
            begin = time.perf_counter()
            client.submit(NAME, payload=PAYLOAD, subject=SUBJECT).result(30.0)
            if number >= WARM_UP_JOBS:
                taken.append((time.perf_counter() - begin) * 1e3)
    return taken
