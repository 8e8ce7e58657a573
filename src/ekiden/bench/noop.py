"""How many jobs a second, against JetStream and the bare prototype, in turns.

Jobs do nothing, so the figure is what the broker, the client and the wire cost. 100 bytes in,
100 bytes out, kept by the broker for its usual retention; one future per job through the blocking
client; fsync before every answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ekiden.bench import report
from ekiden.bench.grid import Grid, start_grid
from ekiden.bench.peers import start_jetstream, start_prototype
from ekiden.bench.processes import BenchFailed, Crew
from ekiden.bench.rounds import Contender, Round, race, ratio, summary

OURS = "ekiden"
FRAMES = "ekiden, one job per frame"
CLIENTS = "ekiden, 50 clients × 20 open"

# What the rounds of a default run write; see `report.touch_memory`.
MEMORY_BYTES = 4 << 30

GOALS: tuple[tuple[str, str, float], ...] = (
    (OURS, "jetstream", 6.0),
    (OURS, "prototype", 0.35),
    (FRAMES, "jetstream", 2.0),
    (CLIENTS, "jetstream", 1.0),
)

MODES = {
    "batch": (OURS, "one future per job, the blocking client", 50_000),
    "frames": (FRAMES, "one blocking client, 4,000 open", 10_000),
    "clients": (CLIENTS, "one load process, one job per frame", 10_000),
}
PEERS = ("jetstream", "prototype", "packed")


def run(
    *,
    rounds: int = 5,
    seconds: float = 1.5,
    modes: tuple[str, ...] = tuple(MODES),
    peers: tuple[str, ...] = ("jetstream", "prototype"),
    memory_bytes: int = MEMORY_BYTES,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Race the asked modes and peers. A peer that cannot start here is named under `absent`."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        touched = report.touch_memory(crew.folder, memory_bytes)
        tell(f"touched {touched / 1e9:.1f} GB of memory; starting processes")
        grid = start_grid(crew)
        contenders = [_ours(grid, mode) for mode in modes]
        absent = _add_peers(crew, peers, contenders)
        taken = race(contenders, rounds=rounds, seconds=seconds, tell=tell)
    figures = {
        "rows": [summary(contender, taken[contender.name]) for contender in contenders],
        "ratios": _ratios(taken),
        "absent": absent,
    }
    return report.outline("noop", facts, figures, _goals(taken))


def _ours(grid: Grid, mode: str) -> Contender:
    name, note, warm_up_jobs = MODES[mode]
    return grid.contender(mode, name, note, warm_up_jobs)


def _add_peers(crew: Crew, peers: tuple[str, ...], contenders: list[Contender]) -> dict[str, str]:
    absent: dict[str, str] = {}
    for peer in peers:
        try:
            if peer == "prototype":
                contenders.append(start_prototype(crew))
            else:
                contenders.append(start_jetstream(crew, packed=peer == "packed"))
        except BenchFailed as failure:
            absent[peer] = str(failure)
    return absent


def _ratios(taken: dict[str, list[Round]]) -> list[dict[str, Any]]:
    """Every row of ours by every peer."""
    mine = [name for name in taken if name.startswith(OURS)]
    others = [name for name in taken if not name.startswith(OURS)]
    rows: list[dict[str, Any]] = []
    for name in mine:
        for other in others:
            found = ratio(taken[name], taken[other])
            rows.append(
                {
                    "system": name,
                    "by": other,
                    "ratio": round(found.median, 3),
                    "lowest": round(found.low, 3),
                    "highest": round(found.high, 3),
                    "of_medians": round(found.of_medians, 3),
                }
            )
    return rows


def _goals(taken: dict[str, list[Round]]) -> list[report.Goal]:
    goals = []
    for ours, theirs, bound in GOALS:
        if ours in taken and theirs in taken:
            value = round(ratio(taken[ours], taken[theirs]).median, 3)
            goals.append(report.at_least(f"{ours} / {theirs}", value, bound, "×"))
    return goals
