"""Starting a worker."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
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


Execs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--exec",
        metavar="NAME=PATH",
        help="Let jobs called NAME run this program. May be given again.",
    ),
]
Services: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--service",
        metavar="NAME=COMMAND",
        help="Keep this command running in every slot: a JSON line in, a JSON line out.",
    ),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings in a worker.toml."),
]


def worker(
    connect: options.Connect = "",
    config: Config = None,
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
    execs: Execs = None,
    services: Services = None,
    functions: Annotated[
        bool, typer.Option("--functions", help="Run Python functions that clients send.")
    ] = False,
    any_program: Annotated[
        bool,
        typer.Option(
            "--allow-any-program",
            help="Run any program this account may. Only where all who may submit are trusted.",
        ),
    ] = False,
    pass_env: Annotated[
        list[str] | None,
        typer.Option("--pass-env", metavar="NAME", help="Let programs see this variable of mine."),
    ] = None,
    allow_env: Annotated[
        list[str] | None,
        typer.Option("--allow-env", metavar="NAME", help="Let jobs set this variable."),
    ] = None,
    sandbox: Annotated[
        str,
        typer.Option("--sandbox", metavar="bwrap", help="Run programs inside bubblewrap."),
    ] = "",
    scratch: Annotated[
        Path | None,
        typer.Option("--scratch", metavar="DIR", help="Where jobs have their folders [temporary]."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="DIR", help="Where cached data lies [~/.cache/ekiden/N]."),
    ] = None,
    cache_max_gb: Annotated[
        float | None,
        typer.Option(
            "--cache-max",
            min=0.001,
            metavar="GB",
            help="Keep no more cached data than this [half of what is free there].",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="Jobs may ask for it with --needs."),
    ] = None,
    worker_id: Annotated[
        str, typer.Option("--id", metavar="ID", help="Name of the worker [HOST-RANDOM].")
    ] = "",
    key_file: options.KeyFile = None,
    builtin: Annotated[
        bool, typer.Option("--builtin", hidden=True, help="The built-in handlers as well.")
    ] = False,
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
      # An executable of yours, under a name.
      $ ekiden worker --exec pricer=/opt/pricer/bin/pricer
      # Python functions of whoever holds the key.
      $ ekiden worker --functions
      # A program that is slow to start: once per slot, then a line per job.
      $ ekiden worker --service curves='/opt/curves --warm'
      # Only some subjects, and something jobs can ask for.
      $ ekiden worker --subjects 'job.assign.render.>' --label gpu=a100 --handlers render
    """
    from ekiden.observe.logs import set_up_logs
    from ekiden.worker.offers import WorkerFile, make_offers, read_file
    from ekiden.worker.serve import Worker

    set_up_logs(as_json=as_json, level=log_level.value)
    file = read_file(config) if config is not None else WorkerFile()
    offers = make_offers(
        file,
        execs=execs or (),
        services=services or (),
        functions=functions,
        any_program=any_program,
        env_pass=options.split_list(pass_env),
        env_allow=options.split_list(allow_env),
        sandbox=sandbox,
        scratch=scratch,
        cache=cache,
        cache_max_gb=cache_max_gb,
    )
    agent = Worker(
        connect or file.connect or options.ADDRESS_DEFAULT,
        slots or file.slots,
        worker_id=worker_id or file.id or None,
        subjects=options.split_list(subjects) or file.subjects,
        labels={**file.labels, **options.parse_labels(label)},
        key_file=key_file or file.key_file or None,
        offers=offers,
    )
    reference = handlers or file.handlers
    if reference or not offers or builtin:
        agent.include(_handlers(reference))
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
