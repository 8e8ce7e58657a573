"""Who runs the jobs: list workers, let one run dry, take it back."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ekiden.cli import options, output

app = typer.Typer(
    help="Workers: list, drain, resume.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)

WorkerId = Annotated[str, typer.Argument(metavar="WORKER")]


@app.command("list", epilog=output.EXIT_CODES)
def list_command(
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """List workers: connected ones, and lost ones with open leases.

    \b
    slots    how many jobs it runs at a time
    running  how many it runs now
    held     how many it was given: running, waiting at the worker, or just finished
    """
    answer = options.ask(connect, key_file, "workers")
    if as_json:
        output.emit(answer)
        return
    output.print_table(
        ("id", "state", "#slots", "#running", "#held", "#load %", "host", "patterns", "labels"),
        (
            (
                worker["id"],
                worker["state"],
                worker.get("slots"),
                worker.get("running"),
                worker.get("held"),
                worker.get("load"),
                worker.get("host"),
                worker.get("patterns"),
                worker.get("labels"),
            )
            for worker in answer["workers"]
        ),
        empty="no workers; start one with: ekiden worker --slots 4",
    )


@app.command("drain", epilog=output.EXIT_CODES)
def drain_command(
    worker: WorkerId,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Give a worker no more jobs; what it has begun it finishes.

    \b
    example:
      $ ekiden workers drain grid7-4f1c22
    """
    _change("drain", worker, connect, key_file, as_json)


@app.command("resume", epilog=output.EXIT_CODES)
def resume_command(
    worker: WorkerId,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Give a drained or quarantined worker jobs again."""
    _change("resume", worker, connect, key_file, as_json)


def _change(verb: str, worker: str, connect: str, key_file: Any, as_json: bool) -> None:
    answer = options.ask(connect, key_file, verb, worker=worker)
    if as_json:
        output.emit(answer)
    else:
        print(f"{output.plain(answer['worker'])} is {answer['state']}")
