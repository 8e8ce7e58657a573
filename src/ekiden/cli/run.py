"""Running a program over many inputs, and coming back to a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from ekiden import limits
from ekiden.cli import options, output
from ekiden.errors import EkidenError, WrongUsage

OUT: Final = Path("out")

# An id is the name of the run, a dot, and a number of up to seven digits.
NAME_LETTERS_MAX: Final = limits.ID_LENGTH_MAX - len(".1000000")

Out: TypeAlias = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where outputs go, a folder for every input.")
]
NoSave: TypeAlias = Annotated[bool, typer.Option("--no-save", help="Save no outputs.")]
KeepOrder: TypeAlias = Annotated[
    bool, typer.Option("--keep-order", "-k", help="Print outputs in the order of the inputs.")
]
Log: TypeAlias = Annotated[
    Path | None,
    typer.Option("--joblog", metavar="FILE", help="A line for every job, as GNU parallel's."),
]
Quiet: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, no remarks; failures are told.")
]


def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM",
            help="What to run, its arguments, and after ':::' its inputs ['::::' FILE, or stdin].",
        ),
    ],
    most: Annotated[
        int, typer.Option("--jobs", "-j", min=0, metavar="N", help="Most jobs at a time [no cap].")
    ] = 0,
    out: Out = OUT,
    retry: Annotated[
        int | None,
        typer.Option(
            "--retry", min=0, max=999, metavar="N", help="Try again so often, whatever went wrong."
        ),
    ] = None,
    max_fails: Annotated[
        int, typer.Option("--max-fails", min=0, metavar="N", help="Give up after N failures.")
    ] = 0,
    name: Annotated[
        str, typer.Option("--name", metavar="RUN", help="Name of the run; the same joins it.")
    ] = "",
    keep_order: KeepOrder = False,
    log: Log = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="With --joblog or --name: leave out what is done."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Limit of one attempt."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME[=VALUE]", help="Give the program this variable."),
    ] = None,
    needs: Annotated[
        str, typer.Option("--needs", metavar="NEEDS", help="As cpu=2,mem_mb=4000,label.gpu=a100.")
    ] = "",
    priority: Annotated[
        int, typer.Option("--priority", min=-9, max=9, metavar="N", help="Higher first.")
    ] = 0,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--outputs", metavar="GLOB", help="Bring back these files [all new ones]."),
    ] = None,
    ok_codes: Annotated[
        str,
        typer.Option("--ok-codes", metavar="N[,N]", help="Exit codes that count as done [0]."),
    ] = "",
    along: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="FILE", help="Send this file along with every job."),
    ] = None,
    caches: options.Caches = None,
    no_ship: Annotated[
        bool, typer.Option("--no-ship", help="Inputs are text, also if they name files here.")
    ] = False,
    any_program: Annotated[
        bool | None,
        typer.Option(
            "--any-program/--listed",
            help="PROGRAM is a command, or a name on allow-lists [what workers offer].",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command lines; run nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Hand the jobs over, say how to come back, and leave.")
    ] = False,
    no_save: NoSave = False,
    quiet: Quiet = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Run a program over many inputs, and bring every output back.

    As GNU parallel does, without a shell: {} is the input, {.} without its extension, {/} without
    its folders, {//} its folder, {/.} without both, {#} the job's number, {1} {2} of several lists;
    without any of these the input comes last. An input that names a file here travels with its job,
    and so does a PROGRAM given by path. New files come back to OUT/INPUT/, with stdout and stderr
    beside them.

    Ctrl-C leaves the run to itself; a second one cancels it.

    \b
    examples:
      # A script of yours over many files; results in ./out/NAME/.
      $ ekiden run ./price.sh {} ::: trades/*.json
      # A command the workers have; inputs from a file, four at a time, in order.
      $ ekiden run -j 4 --keep-order wc -l :::: list-of-files.txt
      # Every combination, twice more if it fails, and a log to resume from.
      $ ekiden run --retry 2 --joblog night.log sim --seed {1} --vol {2} ::: 1 2 3 ::: 0.1 0.2
      # Python: the script must travel too.
      $ ekiden run --with model.py python3 model.py {} ::: data/*.csv
      # Data the workers have already: see ekiden cache put.
      $ ekiden run --cache curves sh -c 'price $EKIDEN_CACHE/curves/{}' ::: eur usd
      # Leave it to itself, come back from anywhere.
      $ ekiden run --detach --name night ./price.sh ::: trades/*.json
      $ ekiden attach night
    """
    from ekiden.cli import inputs, starting
    from ekiden.cli.following import Wishes

    # Words after PROGRAM are its own: `--json` among them is not meant for us.
    try:
        _check_wishes(name, log, resume=resume, most=most, detach=detach)
        line = inputs.parse(words)
        common = _common(along)
        order = starting.Order(
            line=line,
            common=common,
            name=name,
            log=log,
            resume=resume,
            shipping=not no_ship,
            any_program=any_program,
            options={
                "env": _env(env),
                "outputs": outputs or None,
                "ok_codes": _ok_codes(ok_codes),
                "timeout_s": timeout,
                "max_attempts": None if retry is None else retry + 1,
                "retry_on": None if retry is None else _retry_on(),
                "needs": options.parse_needs(needs) or None,
                "priority": priority,
                "caches": tuple(options.split_list(caches)) or None,
            },
        )
        rows = starting.read_rows(line)
        if dry_run:
            return starting.print_lines(order, rows, as_json=as_json)
        if not rows:
            output.say("no inputs, nothing to run; inputs come after ':::', or by stdin")
            return output.DONE
        wishes = Wishes(
            out=None if no_save else out,
            jobs=most,
            max_fails=max_fails,
            keep_order=keep_order,
            as_json=as_json,
            quiet=quiet,
            detach=detach,
        )
        with options.connected(connect, key_file) as client:
            for cache in options.split_list(caches):
                client.cache(cache)  # refuses one that is not known, before any job is made
            return starting.Start(client, order, wishes).follow(rows)
    except (EkidenError, TimeoutError) as error:
        output.print_error(error, as_json=as_json)
        return output.exit_code_of(error)


# ------------------------------------------------------------------ what the options mean


def _ok_codes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else (0,)
    except ValueError:
        raise WrongUsage(f"--ok-codes {text!r}", remedy="write numbers: --ok-codes 0,3") from None


def _check_wishes(name: str, log: Path | None, *, resume: bool, most: int, detach: bool) -> None:
    from ekiden.model.ids import check_name

    if name:
        check_name(name, "run")
        if len(name) > NAME_LETTERS_MAX:
            raise WrongUsage(
                f"the name of the run has {len(name)} letters",
                remedy=f"use up to {NAME_LETTERS_MAX}",
            )
    if resume and not (name or log):
        raise WrongUsage(
            "--resume what?", remedy="name the run with --name, or its log with --joblog"
        )
    if detach and most:
        raise WrongUsage(
            "--jobs holds jobs back here, and with --detach nobody is here to do it",
            remedy="give one of the two; how many run at a time is up to the workers",
        )
    if detach and log:
        raise WrongUsage(
            "--joblog is written while the run is followed, and --detach does not follow it",
            remedy="give it to: ekiden attach",
        )


def _retry_on() -> tuple[str, ...]:
    """Who asks for retries means those, too, that are not tried again by themselves."""
    from ekiden.model.jobs import EXIT_CODE, RETRY_ON_DEFAULT, TIMEOUT

    return (*RETRY_ON_DEFAULT, EXIT_CODE, TIMEOUT)


def _env(pairs: list[str] | None) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            if name not in os.environ:
                raise WrongUsage(
                    f"--env {name}: it is not set here", remedy="write --env NAME=VALUE"
                )
            value = os.environ[name]
        found[name] = value
    return found or None


def _common(along: list[Path] | None) -> dict[str, Path]:
    from ekiden.cli.inputs import file_name

    found: dict[str, Path] = {}
    for path in along or []:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is not there"
            raise WrongUsage(f"--with {path}: it {what}", remedy="name files; pack folders (tar)")
        name = file_name(str(path))
        if name in found:
            raise WrongUsage(f"--with has two files called {name!r}", remedy="rename one")
        found[name] = path
    return found


# ------------------------------------------------------------------ coming back


def attach(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    out: Out = OUT,
    keep_order: KeepOrder = False,
    log: Log = None,
    no_save: NoSave = False,
    quiet: Quiet = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Come back to a run, also one that was started elsewhere.

    What is done is saved, what is not is followed. Ctrl-C leaves it to itself again; a second one
    cancels it.

    \b
    examples:
      $ ekiden attach night
      $ ekiden attach night --out results --json
    """
    from ekiden.cli import joblog
    from ekiden.cli import manifest as manifests
    from ekiden.cli.feeding import Attaching
    from ekiden.cli.following import Follower, Wishes

    wishes = Wishes(
        out=None if no_save else out, keep_order=keep_order, as_json=as_json, quiet=quiet
    )
    with options.connected(connect, key_file) as client:
        manifest = manifests.fetch(client, name)
        numbers = manifest.numbers or range(1, len(manifest.entries) + 1)
        if not quiet and not as_json:
            output.say(f"run {name}: {output.count(len(numbers), 'input')}")
        return Follower(
            client, name, manifest, Attaching(client, name), numbers, wishes,
            joblog=joblog.JobLog(log, keep=True) if log else None, hands_over=False,
            skipped=len(manifest.entries) - len(numbers),
        ).follow()  # fmt: skip
