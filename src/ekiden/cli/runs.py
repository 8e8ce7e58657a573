"""Runs: jobs that were submitted under one name."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ekiden.cli import jobs, options, output
from ekiden.errors import EkidenError
from ekiden.limits import NS

if TYPE_CHECKING:
    from ekiden.client.blocking import Client

app = typer.Typer(
    help="Runs: list, show, cancel.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)

COLUMNS: Final = (
    "run", "client", "begun", "#total", "#done", "#failed", "#cancelled", "#open",
)  # fmt: skip
FAILED_COLUMNS: Final = ("id", "input", "#attempts", "cause", "message", "worker")

Name = Annotated[str, typer.Argument(metavar="RUN")]


@app.command("list", epilog=output.EXIT_CODES)
def list_command(
    limit: options.Limit = 100,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """List runs, the newest first, while their jobs are kept.

    \b
    examples:
      $ ekiden runs list
      $ ekiden runs list --json | jq -r 'select(.open > 0) | .name'
    """
    answer = options.ask(connect, key_file, "runs", limit=limit)
    if as_json:
        for run in answer["runs"]:
            output.emit(run)
        return
    rows = [
        (
            run["name"],
            run["client"],
            age(run["submitted"]),
            *(run[word] for word in ("total", "done", "failed", "cancelled", "open")),
        )
        for run in answer["runs"]
    ]
    empty = "no runs; start one: ekiden run wc -c ::: *.txt"
    output.print_table(COLUMNS, rows, empty=empty)
    if answer["more"]:
        output.say(f"these are {output.count(len(rows), 'run')}; there are more: --limit N")


def age(wall_ns: int) -> str:
    """How long ago that was."""
    return f"{output.span(max(time.time() - wall_ns / NS, 0))} ago"


@app.command("show", epilog=output.EXIT_CODES)
def show_command(
    name: Name,
    limit: options.Limit = 20,
    everything: Annotated[bool, typer.Option("--all", help="Show all that failed.")] = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Show how far a run is, and what failed of it.

    \b
    examples:
      $ ekiden runs show night
      $ ekiden runs show night --all --json | jq -r '.failed_jobs[].id'
    """
    with options.connected(connect, key_file) as client:
        (run,) = client.ask("runs", name=name)["runs"]
        most = 0 if everything else limit
        wishes = {"run": name, "state": "failed"}
        failed = list(jobs.found_jobs(client, wishes, limit=most)) if run["failed"] else []
        labels = _labels(client, name) if failed else {}
    for job in failed:
        job["input"] = labels.get(job["id"])
    if as_json:
        output.emit({**run, "failed_jobs": failed})
        return
    _print(run, failed)


def _labels(client: Client, name: str) -> dict[str, list[str]]:
    """The inputs of a run by the ids of their jobs; none if it has no list of them."""
    from ekiden.cli import manifest as manifests

    try:
        entries = manifests.fetch(client, name).entries
    except EkidenError:
        return {}
    return {manifests.job_id(name, n): list(entry.inputs) for n, entry in enumerate(entries, 1)}


def _print(run: dict[str, Any], failed: list[dict[str, Any]]) -> None:
    words = ("done", "failed", "cancelled", "open")
    output.print_facts(
        [
            ("run", run["name"]),
            ("client", run["client"]),
            ("begun", f"{output.clock(run['submitted'])} ({age(run['submitted'])})"),
            ("jobs", f"{run['total']:,}"),
            ("", " · ".join(f"{run[word]:,} {word}" for word in words)),
        ]
    )
    if failed:
        print()
        output.print_table(FAILED_COLUMNS, map(_line, failed))
        if len(failed) < run["failed"]:
            output.say(f"these are {len(failed):,} of {run['failed']:,} that failed: --all")
        output.say(f"\nrun them again with: ekiden dlq replay --run {run['name']}")
    if run["open"]:
        output.say(f"\nfollow it with: ekiden attach {run['name']}")


def _line(job: dict[str, Any]) -> tuple[Any, ...]:
    return (
        job["id"],
        " ".join(job["input"] or ()),
        job["attempt"],
        job.get("last_cause") or job.get("reason"),
        output.first_line(job.get("last_message", "")),
        job["worker"],
    )


@app.command("cancel", epilog=output.EXIT_CODES)
def cancel_command(
    name: Name,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Cancel what has not ended of a run.

    What runs is stopped; what is finished stays as it is.

    \b
    example:
      $ ekiden runs cancel night
    """
    with options.connected(connect, key_file) as client:
        client.ask("runs", name=name)  # refuses a run that is not known
        answer = jobs.change(client, "cancel", None, {"run": name, "live": True})
    words = ("cancelled", "cancelling", "settled")
    return jobs.report_change(answer, words, as_json=as_json, asked=[])
