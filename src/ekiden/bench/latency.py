"""How long one job takes, from `submit` to its result, when nothing else is going on.

Two commits lie on that path (the submit with its assign, and the settlement), so the figure is read
beside the time one fdatasync takes on the same disk, measured between the rounds. JetStream and the
prototype take turns with it: the first syncs every two minutes, the second before every answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ekiden.bench import report
from ekiden.bench.grid import start_grid
from ekiden.bench.peers import start_jetstream, start_prototype
from ekiden.bench.processes import BenchFailed, Child, Crew

WARM_UP_JOBS = 300
ROUND_TIMEOUT_S = 120.0
P50_MS, P99_MS, AT_SYNC_MS = 0.9, 2.0, 0.17


def run(
    *,
    jobs: int = 3000,
    rounds: int = 6,
    warm_up_jobs: int = WARM_UP_JOBS,
    peers: tuple[str, ...] = ("jetstream", "prototype"),
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Submit `jobs` jobs one after another, in `rounds` turns with the peers."""
    share = max(1, jobs // rounds)
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        clients = {"ekiden": start_grid(crew).add_load("sequence")}
        absent = _add_peers(crew, peers, clients)
        for client in clients.values():
            client.ask({"one_by_one": warm_up_jobs}, ROUND_TIMEOUT_S)
        taken: dict[str, list[float]] = {name: [] for name in clients}
        syncs = []
        for number in range(1, rounds + 1):
            for name, client in clients.items():
                taken[name] += client.ask({"one_by_one": share}, ROUND_TIMEOUT_S)["ms"]
            syncs.append(report.sync_ms(crew.folder))
            tell(f"round {number}/{rounds}: fdatasync {syncs[-1]} ms")
    sync = statistics.median(syncs)
    rows = [_row(name, values) for name, values in taken.items()]
    figures = {"fdatasync_ms": sync, "fdatasync_ms_all": syncs, "rows": rows, "absent": absent}
    return report.outline("latency", facts, figures, _goals(rows[0], sync))


def _add_peers(crew: Crew, peers: tuple[str, ...], clients: dict[str, Child]) -> dict[str, str]:
    absent: dict[str, str] = {}
    for peer in peers:
        try:
            start = start_prototype if peer == "prototype" else start_jetstream
            clients[peer] = start(crew).client
        except BenchFailed as failure:
            absent[peer] = str(failure)
    return absent


def _row(name: str, values: list[float]) -> dict[str, Any]:
    return {
        "system": name,
        "jobs": len(values),
        "p50_ms": round(report.percentile(values, 0.50), 3),
        "p90_ms": round(report.percentile(values, 0.90), 3),
        "p99_ms": round(report.percentile(values, 0.99), 3),
        "max_ms": round(max(values), 3),
    }


def _goals(row: dict[str, Any], sync_ms: float) -> list[report.Goal]:
    # The bounds were set for a disk that syncs in AT_SYNC_MS. Two commits lie on the path, so they
    # move by twice what this disk is slower, or quicker.
    excess = 2 * (sync_ms - AT_SYNC_MS)
    return [
        report.at_most("p50", row["p50_ms"], round(P50_MS + excess, 3), "ms"),
        report.at_most("p99", row["p99_ms"], round(P99_MS + excess, 3), "ms"),
    ]
