"""Minutes at full speed with everything on: snapshots, rotation, retention.

A short run first says what this machine can do now. Then the load goes on without a pause while
memory, disk, rate and the broker's longest turn are sampled. What must hold: the rate stays, and
once retention has begun to forget, memory and disk stop growing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ekiden
from ekiden.bench import report
from ekiden.bench.grid import Grid, start_grid
from ekiden.bench.processes import BenchFailed, Child, Crew

BASE_S = 8.0
RATE_SHARE_MIN = 0.70
TURN_MS_MAX = 50.0

# Memory may breathe with snapshots and dict growth; it may not climb. The last third of a run is
# compared with the middle one, where retention is already at work.
GROWTH_MAX = 1.15

# Snapshots of a short soak come often enough to see several; closed segments that a snapshot
# covers go at once, because minutes of full speed fill any disk that keeps seven days of them.
OPTIONS = ("--keep-log", "0")


def run(
    *,
    seconds: float = 300.0,
    every_s: float = 3.0,
    options: tuple[str, ...] = OPTIONS,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Carry jobs for `seconds` and sample every `every_s`."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        report.touch_memory(crew.folder, 4 << 30)
        grid = start_grid(crew, options=options)
        load = grid.add_load("batched")
        load.ask({"run_s": 2.0})
        base = load.ask({"run_s": BASE_S})
        base_rate = base["jobs"] / base["seconds"]
        tell(f"short run: {base_rate:,.0f} jobs/s; now {seconds:.0f} s")
        samples, total = _soak(grid, load, seconds, every_s, tell)
        final = samples[-1]
    rate = total["jobs"] / total["seconds"]
    figures = {
        "seconds": round(total["seconds"], 1),
        "jobs": total["jobs"],
        "jobs_per_s": round(rate),
        "short_run_jobs_per_s": round(base_rate),
        "slowest_sample_jobs_per_s": round(min(one["jobs_per_s"] for one in samples)),
        "rss_mb_max": max(one["rss_mb"] for one in samples),
        "rss_growth": _growth(samples, "rss_mb"),
        "disk_mb_max": max(one["disk_mb"] for one in samples),
        "disk_growth": _growth(samples, "disk_mb"),
        "turn_ms_max": final["turn_ms_max"],
        "turn_ms_p99": final["turn_ms_p99"],
        "samples": samples,
    }
    goals = [
        report.at_least("rate, by the short run", round(rate / base_rate, 3), RATE_SHARE_MIN, "×"),
        report.at_most("RSS, last third by middle", figures["rss_growth"], GROWTH_MAX, "×"),
        report.at_most("disk, last third by middle", figures["disk_growth"], GROWTH_MAX, "×"),
        report.at_most("longest turn", final["turn_ms_max"], TURN_MS_MAX, "ms"),
    ]
    return report.outline("soak", facts, figures, goals)


def _soak(
    grid: Grid, load: Child, seconds: float, every_s: float, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    load.tell({"run_s": seconds})
    begin = seen_at = time.monotonic()
    with ekiden.Client(grid.address, client_id="bench-probe") as client:
        settled = int(client.stats()["jobs"]["settled_total"])
        while time.monotonic() - begin < seconds - every_s / 2:
            time.sleep(every_s)
            stats = client.stats()
            now, settled_before = time.monotonic(), settled
            settled = int(stats["jobs"]["settled_total"])
            sample = {
                "at_s": round(now - begin, 1),
                "jobs_per_s": round((settled - settled_before) / (now - seen_at)),
                "rss_mb": round(grid.broker.rss_bytes() / 1e6, 1),
                "family_rss_mb": round(grid.broker.family_rss_bytes() / 1e6, 1),
                "disk_mb": round(grid.disk_bytes() / 1e6, 1),
                "turn_ms_max": stats["loop"]["turn_ms_max"],
                "turn_ms_p99": stats["loop"]["turn_ms_p99"],
                "snapshot_index": stats["journal"]["snapshot_index"],
                "evicted": stats["jobs"]["evicted_total"],
            }
            seen_at = now
            samples.append(sample)
            tell("  ".join(f"{name} {value}" for name, value in sample.items()))
            if not grid.broker.running():
                raise BenchFailed(f"the broker ended: {grid.broker.last_words()}")
    return samples, load.hear(seconds + 120.0)


def _growth(samples: list[dict[str, Any]], figure: str) -> float:
    """The greatest of the last third by the greatest of the third before it."""
    third = max(1, len(samples) // 3)
    middle = max(one[figure] for one in samples[-2 * third : -third] or samples[:third])
    last = max(one[figure] for one in samples[-third:])
    return round(last / middle, 3) if middle else 1.0
