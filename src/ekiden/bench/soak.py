"""Minutes at full speed with everything on: snapshots, rotation, retention.

A short run first says what this machine can do now. Then the load goes on without a pause while
memory, disk, rate and the broker's longest turn are sampled. What must hold: the rate stays, and
once retention has begun to forget, memory and disk stop growing.

Snapshots come every 20 s instead of every minute and segments are small, so that a few minutes see
many of each. Results and ids are kept in their usual numbers, whose bounds are reached within the
first ten seconds at this speed, but for ten seconds instead of seven days: covered segments are
kept as long as results are, and full speed fills any disk that keeps days of them.
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

# Memory and disk breathe with snapshots; they may not climb. The last third of a run is compared
# with the middle one, where retention is already at work.
GROWTH_MAX = 1.15

OPTIONS = (
    *("--snapshot-interval", "20", "--segment-mb", "32"),
    *("--keep-log", "0", "--retention", f"{10 / 86400:.6f}"),
)


def run(
    *,
    seconds: float = 300.0,
    every_s: float = 10.0,
    base_s: float = BASE_S,
    options: tuple[str, ...] = OPTIONS,
    memory_bytes: int = 4 << 30,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Carry jobs for `seconds` and look every `every_s`."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        report.touch_memory(crew.folder, memory_bytes)
        grid = start_grid(crew, options=options)
        load = grid.add_load("batch")
        load.ask({"run_s": base_s / 4})
        base = load.ask({"run_s": base_s})
        base_rate = base["jobs"] / base["seconds"]
        tell(f"short run: {base_rate:,.0f} jobs/s; now {seconds:.0f} s")
        windows, total = _soak(grid, load, seconds, every_s, tell)
    rate = total["jobs"] / total["seconds"]
    return report.outline("soak", facts, *_judge(windows, total, rate, base_rate))


def _judge(
    windows: list[dict[str, Any]], total: dict[str, Any], rate: float, base_rate: float
) -> tuple[dict[str, Any], list[report.Goal]]:
    turn_ms_max = max(one["turn_ms_max"] for one in windows)
    figures = {
        "seconds": round(total["seconds"], 1),
        "jobs": total["jobs"],
        "jobs_per_s": round(rate),
        "short_run_jobs_per_s": round(base_rate),
        "slowest_window_jobs_per_s": min(one["jobs_per_s"] for one in windows),
        "rss_mb_max": max(one["rss_mb"] for one in windows),
        "rss_growth": growth(windows, "rss_mb"),
        "disk_mb_max": max(one["disk_mb"] for one in windows),
        "disk_growth": growth(windows, "disk_mb"),
        "turn_ms_max": turn_ms_max,
        "turn_ms_p99": windows[-1]["turn_ms_p99"],
        "snapshots": len({one["snapshot"] for one in windows} - {windows[0]["snapshot"]}),
        "windows": windows,
    }
    goals = [
        report.at_least("rate, by the short run", round(rate / base_rate, 3), RATE_SHARE_MIN, "×"),
        report.at_most("RSS, last third by middle", figures["rss_growth"], GROWTH_MAX, "×"),
        report.at_most("disk, last third by middle", figures["disk_growth"], GROWTH_MAX, "×"),
        report.at_most("longest turn", turn_ms_max, TURN_MS_MAX, "ms"),
    ]
    return figures, goals


def _soak(
    grid: Grid, load: Child, seconds: float, every_s: float, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    windows: list[dict[str, Any]] = []
    with ekiden.Client(grid.address, client_id="bench-probe") as client:
        settled = int(client.stats()["jobs"]["settled_total"])
        load.tell({"run_s": seconds})
        begin = seen_at = time.monotonic()
        end = begin + seconds
        while (left := end - time.monotonic()) > every_s / 2:
            most = _watch(grid, min(every_s, left))
            stats = client.stats()
            now, settled_before = time.monotonic(), settled
            settled = int(stats["jobs"]["settled_total"])
            window = {
                "at_s": round(now - begin, 1),
                "jobs_per_s": round((settled - settled_before) / (now - seen_at)),
                **most,
                "turn_ms_max": stats["loop"]["turn_ms_max"],
                "turn_ms_p99": stats["loop"]["turn_ms_p99"],
                "snapshot": stats["journal"]["snapshot_index"],
                "results_kept": stats["jobs"]["results_kept"],
                "ids_kept": stats["jobs"]["ids_kept"],
            }
            seen_at = now
            windows.append(window)
            tell("  ".join(f"{name} {value:,}" for name, value in window.items()))
            if not grid.broker.running():
                raise BenchFailed(f"the broker ended: {grid.broker.last_words()}")
    return windows, load.hear(seconds + 120.0)


def _watch(grid: Grid, span_s: float) -> dict[str, float]:
    """The most memory and disk within the span: peaks between two looks would be missed."""
    most = {"rss_mb": 0.0, "family_rss_mb": 0.0, "disk_mb": 0.0}
    end = time.monotonic() + span_s
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        for name, count in (
            ("rss_mb", grid.broker.rss_bytes()),
            ("family_rss_mb", grid.broker.family_rss_bytes()),
            ("disk_mb", grid.disk_bytes()),
        ):
            most[name] = max(most[name], round(count / 1e6, 1))
    return most


def growth(windows: list[dict[str, Any]], figure: str) -> float:
    """The greatest of the last third by the greatest of the third before it."""
    third = max(1, len(windows) // 3)
    middle = max(one[figure] for one in windows[-2 * third : -third] or windows[:third])
    last = max(one[figure] for one in windows[-third:])
    return round(last / middle, 3) if middle else 1.0
