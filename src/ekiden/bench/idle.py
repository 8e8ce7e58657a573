"""What a grid with nothing to do costs: heartbeats, timers and nothing else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ekiden.bench import report
from ekiden.bench.grid import start_grid
from ekiden.bench.processes import Crew

SETTLE_S = 3.0
SHARE_MAX = 1.0


def run(
    *, seconds: float = 20.0, settle_s: float = SETTLE_S, folder: Path | None = None
) -> dict[str, Any]:
    """CPU of an idle broker and worker over `seconds`, in percent of one core."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        grid = start_grid(crew)
        children = [grid.broker, *grid.workers]
        time.sleep(settle_s)
        begin, before = time.monotonic(), [child.cpu_s() for child in children]
        time.sleep(seconds)
        wall = time.monotonic() - begin
        shares = [
            round((child.cpu_s() - spent) / wall * 100, 3)
            for child, spent in zip(children, before, strict=True)
        ]
        memory = [round(child.rss_bytes() / 1e6, 1) for child in children]
    figures = {
        "seconds": round(wall, 1),
        "cpu_percent": {"broker": shares[0], "worker": shares[1]},
        "rss_mb": {"broker": memory[0], "worker": memory[1]},
    }
    goals = [report.at_most("broker and worker", round(sum(shares), 3), SHARE_MAX, "% of a core")]
    return report.outline("idle", facts, figures, goals)
