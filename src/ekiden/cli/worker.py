"""Starting a worker."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from ekiden.cli import options
from ekiden.cli.broker import Level, LogLevel
from ekiden.errors import EkidenError, WrongUsage

if TYPE_CHECKING:
    from ekiden.worker.handlers import Handlers

DRAIN_WAIT_S: Final = 10.0

Slots: TypeAlias = Annotated[
    int | None,
    typer.Option("--slots", min=1, metavar="N", help="Jobs at a time [number of cores]."),
]
HandlersReference: TypeAlias = Annotated[
    str,
    typer.Option(
        "--handlers",
        metavar="MODULE[:NAME]|FILE.py",
        help="Where the handlers are [built-in: echo, sleep, sha256, fail].",
    ),
]


def worker(
    connect: options.Connect = options.ADDRESS_DEFAULT,
    slots: Slots = None,
    subjects: Annotated[
        list[str] | None,
        typer.Option(
            "--subjects",
            metavar="PATTERN[,PATTERN]",
            help="Which jobs to take [what its handlers are for].",
        ),
    ] = None,
    handlers: HandlersReference = "",
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="Jobs may ask for it with --needs."),
    ] = None,
    worker_id: Annotated[
        str, typer.Option("--id", metavar="ID", help="Name of the worker [HOST-RANDOM].")
    ] = "",
    key_file: options.KeyFile = None,
    until_stdin_closes: Annotated[
        bool, typer.Option("--until-stdin-closes", hidden=True, help="Stop with the parent.")
    ] = False,
    log_level: Level = LogLevel.INFO,
    as_json: options.Json = False,
) -> int:
    """Start a worker in the foreground.

    SIGTERM or Ctrl-C lets it finish what it has begun; a second one ends it at once. It waits for a
    broker that is not there yet, and reconnects to one that was restarted.

    \b
    examples:
      # Built-in handlers: echo, sleep, sha256, fail.
      $ ekiden worker --slots 4
      # The handlers of the `worker = ekiden.Worker()` in a file of yours.
      $ ekiden worker --connect grid1:7000 --key-file grid1.key --handlers price.py
      # Only some subjects, and something jobs can ask for.
      $ ekiden worker --subjects 'job.assign.render.>' --label gpu=a100 --handlers render
    """
    from ekiden.observe.logs import set_up_logs
    from ekiden.worker.serve import Worker

    set_up_logs(as_json=as_json, level=log_level.value)
    agent = Worker(
        connect,
        slots,
        worker_id=worker_id or None,
        subjects=options.split_list(subjects),
        labels=options.parse_labels(label),
        key_file=key_file,
    )
    agent.include(_handlers(handlers))
    if until_stdin_closes:
        _stop_with_stdin()
    return agent.run()


def _handlers(reference: str) -> Handlers:
    """What `--handlers` names; the built-in ones if it names nothing."""
    if not reference:
        from ekiden.worker.builtin import builtin_handlers

        return builtin_handlers()
    from ekiden.worker.serve import load_handlers

    try:
        return load_handlers(reference)
    except EkidenError:
        raise
    except Exception as error:  # whatever a user's module may do while it is imported
        raise WrongUsage(
            f"cannot load handlers from {reference!r}: {type(error).__name__}: {error}",
            remedy="see that Python can import it",
        ) from error


def _stop_with_stdin() -> None:
    """Drain when whoever holds the other end of our standard input is gone; insist after a while,
    because a broker that went with it will never confirm what was drained."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(DRAIN_WAIT_S)

    threading.Thread(target=watch, name="watch-stdin", daemon=True).start()
