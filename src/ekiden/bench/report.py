"""How figures are written down: conditions first, then rows, then goals and whether they were met.

Every bench returns one plain map with the same outline, which is what `--json` prints:
`bench`, `conditions`, its own figures, and `goals`. A goal compares a figure with what the project
set out to reach; a goal that was missed is a fact to look at, never an error.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct, to_builtins
from rich import box
from rich.console import Console
from rich.table import Table

SYNC_SAMPLES = 300
SYNC_BYTES = 400  # About what the journal writes for one small job.


class Goal(Struct, frozen=True, kw_only=True):
    """A figure and its bound. `sense` is "min" if more is better, "max" if less is."""

    figure: str
    value: float
    bound: float
    sense: str
    unit: str = ""
    ok: bool = False


def at_least(figure: str, value: float, bound: float, unit: str = "") -> Goal:
    """More is better."""
    return Goal(figure=figure, value=value, bound=bound, sense="min", unit=unit, ok=value >= bound)


def at_most(figure: str, value: float, bound: float, unit: str = "") -> Goal:
    """Less is better."""
    return Goal(figure=figure, value=value, bound=bound, sense="max", unit=unit, ok=value <= bound)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def sync_ms(folder: Path) -> float:
    """Median milliseconds of a small append and its fdatasync on the disk of `folder`."""
    path = folder / "sync-probe"
    taken = []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    try:
        for _ in range(SYNC_SAMPLES):
            begin = time.perf_counter()
            os.write(descriptor, b"s" * SYNC_BYTES)
            os.fdatasync(descriptor)
            taken.append(time.perf_counter() - begin)
    finally:
        os.close(descriptor)
        path.unlink()
    return round(statistics.median(taken) * 1e3, 3)


def touch_memory(folder: Path, bytes_wanted: int) -> int:
    """Fill and free page cache, so that no one pays for memory the machine never used before.

    A virtual machine gets its memory from the host on first touch, which makes a write to the page
    cache three times as dear; whoever writes first would pay for all. Returns the bytes touched.
    """
    room = min(psutil.virtual_memory().available, psutil.disk_usage(str(folder)).free) // 2
    left = touched = min(bytes_wanted, room)
    path = folder / "memory-probe"
    block = bytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(block)
    path.unlink()
    return touched


def conditions(folder: Path) -> dict[str, Any]:
    """What the figures of this run depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "ekiden": _version("ekiden"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "fdatasync_ms": sync_ms(folder),
        "msgspec": _version("msgspec"),
        "uvloop": _version("uvloop"),
    }


def outline(
    bench: str, facts: dict[str, Any], figures: dict[str, Any], goals: Sequence[Goal]
) -> dict[str, Any]:
    """The map that `--json` prints."""
    plain: list[dict[str, Any]] = to_builtins(list(goals))
    return {"bench": bench, "conditions": facts, **figures, "goals": plain}


def show(report: dict[str, Any]) -> None:
    """Print a report for a person: conditions in one line, rows as tables, goals last."""
    # Not a terminal: as wide as the content, so that a file keeps whole rows.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    facts = report["conditions"]
    console.print(f"[bold]ekiden bench {report['bench']}[/]")
    if facts:
        console.print(
            f"{facts['cores']} cores, {facts['cpu']}, Python {facts['python']}, "
            f"fdatasync {facts['fdatasync_ms']} ms, load {facts['load_before']}"
        )
    for name, value in report.items():
        if name in ("bench", "conditions", "goals") or value in ({}, []):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            console.print(_rows(name, value))
        else:
            console.print(f"{words(name)}: {text(value)}")
    if report["goals"]:
        console.print(_goals(report["goals"]))


def _rows(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=words(name), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in rows[0]:
        right = isinstance(rows[0][column], int | float)
        table.add_column(words(column), justify="right" if right else "left")
    for row in rows:
        table.add_row(*(text(row.get(column, "")) for column in rows[0]))
    return table


def _goals(goals: list[dict[str, Any]]) -> Table:
    table = Table(title="goals", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("figure", "measured", "goal", ""):
        table.add_column(column)
    for goal in goals:
        sign = "≥" if goal["sense"] == "min" else "≤"
        unit = f" {goal['unit']}" if goal["unit"] else ""
        mark = "[green]met[/]" if goal["ok"] else "[red]missed[/]"
        table.add_row(
            goal["figure"], f"{text(goal['value'])}{unit}", f"{sign} {text(goal['bound'])}{unit}",
            mark,
        )  # fmt: skip
    return table


def text(value: Any) -> str:
    """A value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, dict):
        return "  ".join(f"{key} {text(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " ".join(text(part) for part in value)
    return str(value)


def words(name: str) -> str:
    """The name of a figure for people."""
    return name.replace("_", " ")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
