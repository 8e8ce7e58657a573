"""All benches after another, and their figures as a Markdown page.

Each bench has a crew of its own, so a later one starts on a machine as quiet as the first did. A
bench that cannot run here is named with its reason and does not keep the others from running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ekiden.bench import cache, idle, latency, noop, recovery, report, scale, soak, work
from ekiden.bench.processes import BenchFailed
from ekiden.errors import WrongUsage

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

BENCHES = (
    "noop", "latency", "program", "function", "service", "cache", "recovery", "scale",
    "idle", "soak",
)  # fmt: skip

# More than this used by others, and the figures are not those of the systems measured.
QUIET_CORES = 0.25

# Curves are for the terminal and for `--json`; a page shows what a person compares.
_LEFT_OUT = ("curve", "windows", "fdatasync_ms_all")


def run(
    *,
    only: tuple[str, ...] = BENCHES,
    soak_s: float = 300.0,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Run the benches named, in the usual order."""
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "noop": lambda: noop.run(folder=folder, tell=tell),
        "latency": lambda: latency.run(folder=folder, tell=tell),
        "program": lambda: work.program(folder=folder, tell=tell),
        "function": lambda: work.function(folder=folder, tell=tell),
        "service": lambda: work.service(folder=folder, tell=tell),
        "cache": lambda: cache.run(folder=folder, tell=tell),
        "recovery": lambda: recovery.run(folder=folder, tell=tell),
        "scale": lambda: scale.run(folder=folder, tell=tell),
        "idle": lambda: idle.run(folder=folder),
        "soak": lambda: soak.run(seconds=soak_s, folder=folder, tell=tell),
    }
    reports = []
    for name in BENCHES:
        if name not in only:
            continue
        tell(f"bench {name}")
        try:
            reports.append(calls[name]())
        except BenchFailed as failure:
            tell(f"bench {name} failed: {failure}")
            reports.append(report.outline(name, {}, {"failed": str(failure)}, []))
    return reports


def markdown(reports: list[dict[str, Any]]) -> str:
    """The reports as a page: goals of all first, then the rows of each."""
    return "\n".join(_page(reports)).rstrip() + "\n"


def write(path: Path, reports: list[dict[str, Any]]) -> None:
    """Put the page between the two marks in the file."""
    text = path.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise WrongUsage(
            f"{str(path)!r} has no {BEGIN} … {END}", remedy="add these two lines to it"
        )
    path.write_text(f"{head}{BEGIN}\n{markdown(reports)}{END}{tail}")


def _page(reports: list[dict[str, Any]]) -> Iterator[str]:
    facts = next((one["conditions"] for one in reports if one["conditions"]), None)
    if facts is not None:
        yield (
            f"Measured {facts['date']} on {facts['cores']} cores ({facts['cpu']}), "
            f"{facts['memory_gb']:.0f} GB, Linux {facts['kernel']}, Python {facts['python']}, "
            f"uvloop {facts['uvloop']}, msgspec {facts['msgspec']}; fdatasync of a small append "
            f"{facts['fdatasync_ms']} ms; load before the run {facts['load_before']}."
        )
        yield from _disturbance(reports)
        yield ""
    goals = [{"bench": one["bench"], **goal} for one in reports for goal in one["goals"]]
    if goals:
        yield from _table([_goal(goal) for goal in goals])
    for one in reports:
        yield f"### {one['bench']}"
        yield ""
        for name, value in one.items():
            if name in ("bench", "conditions", "goals", *_LEFT_OUT) or value in ({}, []):
                continue
            if isinstance(value, list) and isinstance(value[0], dict):
                yield from _table(value)
            else:
                yield f"- {report.words(name)}: {report.text(value)}"
        yield ""


def _disturbance(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Say so if others were at work meanwhile: the reader cannot see it."""
    rows = [row for one in reports if one["bench"] == "noop" for row in one.get("rows", ())]
    others = [row["machine_busy_cores"] - row["busy_cores"] for row in rows]
    if others and (most := max(others)) > QUIET_CORES:
        yield (
            f"The machine was not quiet: others used up to {most:.1f} cores during the rounds. "
            "Rates, latencies and turns are worse than they would be, and ratios scatter."
        )


def _goal(goal: dict[str, Any]) -> dict[str, Any]:
    sign = "≥" if goal["sense"] == "min" else "≤"
    return {
        "bench": goal["bench"],
        "figure": goal["figure"],
        "measured": f"{report.text(goal['value'])} {goal['unit']}".strip(),
        "goal": f"{sign} {report.text(goal['bound'])} {goal['unit']}".strip(),
        "met": "yes" if goal["ok"] else "**no**",
    }


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield ""
    columns = list(rows[0])
    yield "| " + " | ".join(report.words(column) for column in columns) + " |"
    right = [isinstance(rows[0][column], int | float) for column in columns]
    yield "|" + "|".join("--:" if one else "---" for one in right) + "|"
    for row in rows:
        yield "| " + " | ".join(report.text(row.get(column, "")) for column in columns) + " |"
    yield ""
