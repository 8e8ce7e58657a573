"""How the group is doing."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ekiden.cli import options, output


def stats(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again and again until interrupted.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Between two looks.")
    ] = 2.0,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Show how the group is doing: jobs, queues, workers, journal.

    \b
    examples:
      $ ekiden stats
      $ ekiden stats --watch --json | jq .jobs.queued
    """
    from time import sleep

    with options.connected(connect, key_file) as client:
        while True:
            answer = client.ask("stats")
            if as_json:
                output.emit(answer)
            else:
                if watch and sys.stdout.isatty():
                    typer.echo("\x1b[2J\x1b[H", nl=False)
                print_stats(answer)
                sys.stdout.flush()
            if not watch:
                return
            sleep(interval)
            if not as_json:
                print()


def print_stats(stats: dict[str, Any]) -> None:
    """The answer of the broker for people."""
    jobs, crew = stats.get("jobs", {}), stats.get("workers", {})
    journal, loop = stats.get("journal", {}), stats.get("loop", {})
    states = ("delayed", "queued", "leased", "cancelling", "done", "failed", "cancelled")
    totals = ("accepted", "settled", "retried", "stale", "evicted")
    sync = str(stats.get("sync", ""))
    if sync.startswith("unsafe"):
        sync += "  (a power loss may lose accepted jobs)"
    output.print_facts(
        [
            ("broker", f"{stats.get('broker', '')} of group {stats.get('group', '')!r}"),
            ("up", output.span(stats.get("uptime_s", 0))),
            ("sync", sync),
            ("jobs", _counts(jobs, states)),
            ("in all", _counts({n: jobs.get(f"{n}_total", 0) for n in totals}, totals)),
            ("workers", _counts(crew, ("connected", "draining", "quarantined", "slots", "credit"))),
            ("clients", stats.get("clients")),
            ("journal", _journal(journal)),
            ("store", _store(stats.get("blobs", {}))),
            ("loop", _turns(loop)),
            ("memory", f"{stats.get('memory_mb', 0):,.0f} MB"),
        ]
    )
    queues = stats.get("queues") or []
    if queues:
        print()
        output.print_table(
            ("subject", "#ready", "#leased", "oldest waits"),
            (
                (
                    q["subject"],
                    q["ready"],
                    q.get("leased"),
                    output.span(q.get("oldest_wait_s") or 0),
                )
                for q in queues
            ),
        )


def _counts(values: dict[str, Any], names: tuple[str, ...]) -> str:
    return " · ".join(f"{values.get(name, 0):,} {name}" for name in names if name in values)


def _store(blobs: dict[str, Any]) -> str | None:
    """Files by hash; nothing is said of a store that was never used."""
    if not blobs.get("count"):
        return None
    quota = f" of {output.size(blobs['quota'])}" if blobs.get("quota") else ""
    return f"{output.count(blobs['count'], 'file')}, {output.size(blobs['bytes'])}{quota}"


def _journal(journal: dict[str, Any]) -> str:
    if not journal:
        return ""
    return (
        f"{output.count(journal.get('segments', 0), 'segment')}, "
        f"{output.size(journal.get('bytes', 0))}, "
        f"snapshot at {journal.get('snapshot_index', 0):,}, "
        f"{output.size(journal.get('disk_free', 0))} free"
    )


def _turns(loop: dict[str, Any]) -> str:
    if not loop:
        return ""
    p99, longest = loop.get("turn_ms_p99", 0), loop.get("turn_ms_max", 0)
    turns = output.count(loop.get("turns", 0), "turn")
    return f"{turns}, 99 % within {p99:.1f} ms, the longest {longest:.1f} ms"
