"""The journal, read from outside: what happened, and whether the bytes are sound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ekiden.cli import options, output
from ekiden.errors import WrongUsage

if TYPE_CHECKING:
    from ekiden.journal.inspection import Report
    from ekiden.world.disk import FolderStorage

app = typer.Typer(
    help="Read a broker's journal: dump, verify.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Data folder of a broker.")]


@app.command("dump", epilog=output.EXIT_CODES)
def dump_command(
    folder: Folder,
    from_index: Annotated[
        int, typer.Option("--from", min=0, metavar="INDEX", help="Begin with this entry.")
    ] = 0,
    job: Annotated[
        list[str] | None, typer.Option("--job", metavar="ID", help="Only this job; repeatable.")
    ] = None,
    event: Annotated[
        list[str] | None, typer.Option("--event", metavar="NAME", help="Only this; repeatable.")
    ] = None,
    as_json: options.Json = False,  # it is JSON Lines either way
) -> None:
    """Print what happened, one JSON line per job and event.

    The broker may be running. Payloads are not printed, only their size.

    \b
    events: enqueue assign ack assign_failed timeout_requeue worker_down_requeue dlq cancel
            expire replay purge configure snapshot_marker

    \b
    examples:
      $ ekiden log dump /var/lib/ekiden --job night-0517-42
      $ ekiden log dump /var/lib/ekiden --event dlq | jq -r .job
    """
    from ekiden.cli.chronicle import EVENTS, lines

    jobs, events = set(job or ()), set(options.split_list(event))
    if strange := sorted(events - set(EVENTS)):
        raise WrongUsage(f"no such event: {', '.join(strange)}", remedy=f"use {', '.join(EVENTS)}")
    for line in lines(_storage(folder), from_index):
        if (not jobs or line.get("job") in jobs) and (not events or line["event"] in events):
            print(output.to_json(line))


@app.command("verify", epilog=output.EXIT_CODES)
def verify_command(folder: Folder, as_json: options.Json = False) -> int:
    """Check every byte of segments and snapshots.

    Changes nothing; the broker may be running. Ends with 0 if all is sound, with 4 if something is
    damaged or missing.

    \b
    example:
      $ ekiden log verify /var/lib/ekiden
    """
    from ekiden.journal.inspection import verify

    report = verify(_storage(folder))
    if as_json:
        output.emit(_document(report))
    else:
        _print_report(report)
    return output.DONE if report.ok else output.REFUSED


def _storage(folder: Path) -> FolderStorage:
    from ekiden.journal.segments import list_segments
    from ekiden.journal.snapshots import snapshot_names
    from ekiden.world.disk import FolderStorage

    # FolderStorage makes a folder that is not there; a reader must not.
    if folder.is_dir():
        storage = FolderStorage(folder)
        if list_segments(storage) or snapshot_names(storage):
            return storage
    raise WrongUsage(
        f"there is no journal in {str(folder)!r}",
        remedy="name the data folder of a broker, as given to --data",
    )


def _document(report: Report) -> dict[str, Any]:
    import msgspec

    body: dict[str, Any] = msgspec.to_builtins(report)
    problems = msgspec.to_builtins(report.problems)
    return {"ok": report.ok, "problems": problems, **body}


def _print_report(report: Report) -> None:
    output.print_table(
        ("file", "kind", "#bytes", "#records", "#first", "#last", "state"),
        (
            (
                file.name,
                file.kind,
                file.bytes,
                file.records,
                file.first,
                file.last,
                "DAMAGED" if file.problems else "; ".join(file.notes) or "sound",
            )
            for file in report.files
        ),
    )
    for note in report.notes:
        output.say(f"note: {note}")
    for problem in report.problems:
        output.say(f"problem: {problem.file} at offset {problem.offset}: {problem.message}")
    if report.ok:
        print("all sound")
