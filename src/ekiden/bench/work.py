"""Real work: programs, Python functions, warm services, each in turns with what people use instead.

All of it on this machine with two slots, fsync before every answer, and every result looked at.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ekiden.bench import report
from ekiden.bench.grid import START_TIMEOUT_S, Grid
from ekiden.bench.processes import BenchFailed, Child, Crew, wait_until
from ekiden.bench.work_load import SERVICE

ROUND_TIMEOUT_S: Final = 180.0
SLOTS: Final = 2

# Goals, as set for two cores.
XARGS_SHARE: Final = 0.55
STARTED_P50_MS: Final = 4.0
MAKESPAN_SHARE: Final = 1.1
POOL_SHARE: Final = 10.0
CALLS_PER_S: Final = 30_000.0

UNEVEN_JOBS: Final = 1000
UNEVEN_SLOTS: Final = 4
UNEVEN_MS: Final = (1.0, 50.0)
_SEED: Final = 20261118

# What a service costs that does nothing: the loop a user would write, without a JSON library.
_ECHO_SERVICE: Final = """import sys
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""

Tell = Callable[[str], None]


def program(
    *,
    rounds: int = 5,
    seconds: float = 2.0,
    uneven_jobs: int = UNEVEN_JOBS,
    folder: Path | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Programs that do nothing by `xargs`; time to start one; uneven ones by the ideal."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        grid = Grid(crew)
        tools = [f"--exec={name}={_tool(name)}" for name in ("true", "date", "sleep")]
        add_agent(crew, grid, SLOTS, *tools)
        load = start_load(crew, "program", grid.address)
        peers = {"xargs -P2 -n1": start_load(crew, "xargs")}
        rates = race({"ekiden": load, **peers}, rounds, seconds, tell)
        tell("starting programs one by one")
        load.ask({"one_by_one": 20}, ROUND_TIMEOUT_S)
        started = load.ask({"one_by_one": 300}, ROUND_TIMEOUT_S)["ms"]
        makespan = _makespan(crew, uneven_jobs, tell)
    ratios = _ratios(rates["ekiden"], rates["xargs -P2 -n1"])
    p50 = round(report.percentile(started, 0.5), 3)
    figures = {
        "rows": [_row(name, found) for name, found in rates.items()],
        "started_ms": {"p50": p50, "p99": round(report.percentile(started, 0.99), 3)},
        "uneven": makespan,
    }
    goals = [
        report.at_least("ekiden / xargs", ratios, XARGS_SHARE, "×"),
        report.at_most("submit to running, p50", p50, STARTED_P50_MS, "ms"),
        report.at_most("uneven jobs by the ideal", makespan["by_ideal"], MAKESPAN_SHARE, "×"),
    ]
    return report.outline("program", facts, figures, goals)


def function(
    *,
    rounds: int = 5,
    seconds: float = 2.0,
    folder: Path | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Functions that do nothing, by ProcessPoolExecutor."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        grid = Grid(crew)
        add_agent(crew, grid, SLOTS, "--functions")
        loads = {
            "ekiden": start_load(crew, "function", grid.address),
            "ProcessPoolExecutor(2)": start_load(crew, "pool"),
        }
        rates = race(loads, rounds, seconds, tell)
    ratio = _ratios(rates["ekiden"], rates["ProcessPoolExecutor(2)"])
    rate = statistics.median(rates["ekiden"])
    # Either is enough: the pool's own speed differs by a factor between machines.
    met = ratio >= POOL_SHARE
    goal = (
        report.at_least("ekiden / pool, chunksize 1", ratio, POOL_SHARE, "×")
        if met
        else report.at_least("functions", rate, CALLS_PER_S, "/s")
    )
    rows = [_row(name, found) for name, found in rates.items()]
    return report.outline("function", facts, {"rows": rows, "ratio": round(ratio, 2)}, [goal])


def service(
    *,
    rounds: int = 5,
    seconds: float = 2.0,
    folder: Path | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Lines to a warm service that echoes them, and back."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        grid = Grid(crew)
        script = crew.folder / "echo_service.py"
        script.write_text(_ECHO_SERVICE)
        add_agent(crew, grid, SLOTS, f"--service={SERVICE}={sys.executable} {script}")
        load = start_load(crew, "service", grid.address)
        rates = race({"ekiden": load}, rounds, seconds, tell)
    goals = [report.at_least("lines", statistics.median(rates["ekiden"]), CALLS_PER_S, "/s")]
    rows = [_row(name, found) for name, found in rates.items()]
    return report.outline("service", facts, {"rows": rows}, goals)


# ------------------------------------------------------------------ parts


def add_agent(crew: Crew, grid: Grid, slots: int, *offers: str) -> Child:
    """Start a worker that offers these, and wait until the broker counts it."""
    expected = grid.stats()["workers"]["connected"] + 1
    agent = crew.start_python(
        f"agent{expected}",
        *("-m", "ekiden.cli.main", "worker", "--connect", grid.address, "--slots", str(slots)),
        *("--log-level", "warning", "--scratch", str(crew.folder / f"scratch{expected}")),
        *offers,
    )
    joined = lambda: grid.stats()["workers"]["connected"] >= expected  # noqa: E731
    wait_until(agent, "join", START_TIMEOUT_S, joined)
    return agent


def start_load(crew: Crew, mode: str, address: str = "") -> Child:
    """Start a load process and wait until it is ready."""
    module = ("-m", "ekiden.bench.work_load", mode)
    load = crew.start_python(f"load-{mode}", *module, *([address] if address else []), talks=True)
    load.hear(START_TIMEOUT_S)
    return load


def race(
    loads: dict[str, Child], rounds: int, seconds: float, tell: Tell
) -> dict[str, list[float]]:
    """Jobs per second of each in turn, in rounds of about `seconds`."""
    sizes = {}
    for name, load in loads.items():
        load.ask({"jobs": 200}, ROUND_TIMEOUT_S)
        rate = _rate(load, 1000)
        sizes[name] = max(1000, round(rate * seconds))
    rates: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(1, rounds + 1):
        for name, load in loads.items():
            rates[name].append(_rate(load, sizes[name]))
        shown = "  ".join(f"{name} {found[-1]:,.0f}/s" for name, found in rates.items())
        tell(f"round {number}/{rounds}: {shown}")
    return rates


def _rate(load: Child, jobs: int) -> float:
    answer = load.ask({"jobs": jobs}, ROUND_TIMEOUT_S)
    return float(answer["jobs"] / answer["seconds"])


def _makespan(crew: Crew, jobs: int, tell: Tell) -> dict[str, Any]:
    """Programs of very different length on four slots: how near to the ideal is the end?"""
    tell(f"{jobs:,} uneven programs on {UNEVEN_SLOTS} slots")
    grid = Grid(crew, "uneven")
    add_agent(crew, grid, UNEVEN_SLOTS, f"--exec=sleep={_tool('sleep')}")
    load = start_load(crew, "program", grid.address)
    dice = random.Random(_SEED)
    lengths = [round(dice.uniform(*UNEVEN_MS), 1) for _ in range(jobs)]
    load.ask({"sleeps_ms": lengths[:20]}, ROUND_TIMEOUT_S)
    took = float(load.ask({"sleeps_ms": lengths}, ROUND_TIMEOUT_S)["seconds"])
    ideal = sum(lengths) / 1000 / UNEVEN_SLOTS
    return {"seconds": round(took, 2), "ideal_s": round(ideal, 2), "by_ideal": took / ideal}


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise BenchFailed(f"there is no {name} on this machine")
    return found


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios within rounds, where both ran seconds apart."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def _row(name: str, rates: Sequence[float]) -> dict[str, Any]:
    return {
        "system": name,
        "jobs_per_s": round(statistics.median(rates)),
        "rounds": [round(rate) for rate in rates],
    }
