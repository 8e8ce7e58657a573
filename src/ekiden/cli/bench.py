"""`ekiden bench …`: figures of this machine, from real processes on loopback.

Everything runs in a temporary folder with keys of its own and is gone afterwards. A goal that is
missed does not change the exit code: figures are to be read, not to fail a build.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from ekiden.cli import output
from ekiden.cli.options import Json

app = typer.Typer(
    help="Measure this machine: speed, latency, recovery, endurance.",
    epilog=output.EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--folder", metavar="DIR", help="Where the scratch data goes: the disk to be measured."
    ),
]

Rounds: TypeAlias = Annotated[
    int, typer.Option("--rounds", min=1, help="How often each has its turn.")
]
RoundSeconds: TypeAlias = Annotated[
    float, typer.Option("--seconds", min=0.1, help="Length of a round.")
]


def _measure(bench: Callable[[], dict[str, Any]], as_json: bool) -> None:
    """Run a bench and print its report; one that cannot run here ends with `UNREACHABLE`."""
    from ekiden.bench.processes import BenchFailed

    try:
        report = bench()
    except BenchFailed as failure:
        output.print_error(failure, as_json=as_json)
        raise typer.Exit(output.UNREACHABLE) from None
    if as_json:
        output.emit(report)
        return
    from ekiden.bench.report import show

    show(report)


def _choices(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    for part in chosen:
        if part not in allowed:
            raise typer.BadParameter(f"{part!r} is none of {', '.join(allowed)}", param_hint=option)
    return chosen


@app.command()
def noop(
    rounds: Annotated[int, typer.Option(min=1, help="How often each system has its turn.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a round.")] = 1.5,
    modes: Annotated[str, typer.Option(help="Of ekiden.")] = "batch,frames,clients",
    peers: Annotated[
        str, typer.Option(help="To compare with; also: packed.")
    ] = "jetstream,prototype",
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Jobs per second, in turns with NATS JetStream and the bare prototype.

    \b
    examples:
      $ ekiden bench noop
      $ ekiden bench noop --modes batch --peers jetstream,packed --json
    """
    from ekiden.bench import noop as bench

    asked_modes = _choices(modes, tuple(bench.MODES), "--modes")
    asked_peers = _choices(peers, bench.PEERS, "--peers")
    _measure(
        lambda: bench.run(
            rounds=rounds,
            seconds=seconds,
            modes=asked_modes,
            peers=asked_peers,
            folder=folder,
            tell=output.say,
        ),
        as_json,
    )


@app.command()
def latency(
    jobs: Annotated[int, typer.Option(min=1, help="How many, one after another.")] = 3000,
    rounds: Annotated[int, typer.Option(min=1, help="How often each system has its turn.")] = 6,
    peers: Annotated[str, typer.Option(help="To compare with.")] = "jetstream,prototype",
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Time from submit to result, one job at a time, beside what one fdatasync takes."""
    from ekiden.bench import latency as bench

    asked = _choices(peers, ("jetstream", "prototype"), "--peers")
    _measure(
        lambda: bench.run(jobs=jobs, rounds=rounds, peers=asked, folder=folder, tell=output.say),
        as_json,
    )


@app.command()
def recovery(
    jobs: Annotated[int, typer.Option(min=100_000, help="Jobs to queue.")] = 1_000_000,
    restarts: Annotated[int, typer.Option(min=1, help="How often to kill -9.")] = 3,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """A million queued jobs: memory, cost of one more, and time to be back after kill -9."""
    from ekiden.bench import recovery as bench

    _measure(
        lambda: bench.run(jobs=jobs, restarts=restarts, folder=folder, tell=output.say), as_json
    )


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(min=10.0, help="How long.")] = 300.0,
    every_s: Annotated[
        float, typer.Option("--every-s", min=1.0, help="Seconds of a window.")
    ] = 10.0,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Full speed for minutes with snapshots, rotation and retention on."""
    from ekiden.bench import soak as bench

    _measure(
        lambda: bench.run(seconds=seconds, every_s=every_s, folder=folder, tell=output.say), as_json
    )


@app.command()
def scale(
    seconds: Annotated[float, typer.Option(min=0.5, help="To watch each broker.")] = 4.0,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Cost of a match and of an assign from 10 to 1,000 workers and 10,000 patterns."""
    from ekiden.bench import scale as bench

    _measure(lambda: bench.run(seconds=seconds, folder=folder, tell=output.say), as_json)


@app.command()
def idle(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to watch.")] = 20.0,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """CPU of a broker and a worker that have nothing to do."""
    from ekiden.bench import idle as bench

    _measure(lambda: bench.run(seconds=seconds, folder=folder), as_json)


@app.command()
def program(
    rounds: Rounds = 5, seconds: RoundSeconds = 2.0, folder: Folder = None, as_json: Json = False
) -> None:
    """Programs per second by `xargs`, time to start one, and uneven ones by the ideal."""
    from ekiden.bench import work as bench

    _measure(
        lambda: bench.program(rounds=rounds, seconds=seconds, folder=folder, tell=output.say),
        as_json,
    )


@app.command()
def function(
    rounds: Rounds = 5, seconds: RoundSeconds = 2.0, folder: Folder = None, as_json: Json = False
) -> None:
    """Python functions per second, in turns with ProcessPoolExecutor."""
    from ekiden.bench import work as bench

    _measure(
        lambda: bench.function(rounds=rounds, seconds=seconds, folder=folder, tell=output.say),
        as_json,
    )


@app.command()
def service(
    rounds: Rounds = 5, seconds: RoundSeconds = 2.0, folder: Folder = None, as_json: Json = False
) -> None:
    """Lines per second through a warm service."""
    from ekiden.bench import work as bench

    _measure(
        lambda: bench.service(rounds=rounds, seconds=seconds, folder=folder, tell=output.say),
        as_json,
    )


@app.command()
def cache(
    rounds: Rounds = 3,
    large_mb: Annotated[int, typer.Option(min=8, help="Of large files, put to 4 workers.")] = 1024,
    small_files: Annotated[int, typer.Option(min=100, help="In one put.")] = 10_000,
    giant_mb: Annotated[int, typer.Option(min=8, help="Of one file, to see memory.")] = 2048,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Data shipped to four workers, by plain copies; small files; the same again; who waits."""
    from ekiden.bench import cache as bench

    _measure(
        lambda: bench.run(
            rounds=rounds,
            large_mb=large_mb,
            small_files=small_files,
            giant_mb=giant_mb,
            folder=folder,
            tell=output.say,
        ),
        as_json,
    )


@app.command("all")
def everything(
    only: Annotated[str, typer.Option(help="Of these.")] = (
        "noop,latency,program,function,service,cache,recovery,scale,idle,soak"
    ),
    soak_seconds: Annotated[float, typer.Option(min=10.0, help="How long to soak.")] = 300.0,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Put the figures into this Markdown file too."),
    ] = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Every bench after another: about ten minutes on a machine that does nothing else.

    \b
    examples:
      $ ekiden bench all --write bench/README.md
    """
    from ekiden.bench import everything as bench

    chosen = _choices(only, bench.BENCHES, "--only")
    reports = bench.run(only=chosen, soak_s=soak_seconds, folder=folder, tell=output.say)
    if write is not None:
        bench.write(write, reports)
    if as_json:
        output.emit({"bench": "all", "reports": reports})
        return
    from ekiden.bench.report import show

    for report in reports:
        show(report)
