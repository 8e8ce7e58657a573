"""The `ekiden` command: one module per family of verbs, put together here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from ekiden.cli import (
    bench,
    broker,
    cache,
    dlq,
    jobs,
    log,
    logs,
    output,
    pubsub,
    run,
    runs,
    stats,
    submit,
    up,
    worker,
    workers,
)
from ekiden.cli.options import Json
from ekiden.errors import EkidenError, WrongUsage

SECTIONS: Final = {
    "Start": ("up", "broker", "leader", "worker"),
    "Work": ("run", "attach", "submit", "wait", "cache", "pub", "sub"),
    "Look after": ("stats", "runs", "jobs", "logs", "dlq", "workers", "log"),
    "More": ("bench", "version"),
}

# What the parser raises for a command line that makes no sense; typer has no public name for it.
_UsageError: Any = typer.BadParameter.__base__

Command = Callable[..., Any]


class _Sections(TyperGroup):
    """Lists commands by what a person wants to do."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        room = formatter.width - 16
        for title, names in SECTIONS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name, one.get_short_help_str(room)) for name, one in found if one]
                )


app = typer.Typer(
    name="ekiden",
    cls=_Sections,
    epilog=output.EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text starts faster, and reads the same in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _add(name: str, command: Command, **settings: Any) -> None:
    app.command(name, epilog=output.EXIT_CODES, context_settings=settings)(command)


_add("up", up.up)
_add("broker", broker.broker)
_add("leader", broker.leader)
_add("worker", worker.worker)
_add("run", run.run, allow_interspersed_args=False)  # what follows PROGRAM is the program's
_add("attach", run.attach)
_add("submit", submit.submit)
_add("wait", submit.wait)
_add("pub", pubsub.pub)
_add("sub", pubsub.sub)
_add("stats", stats.stats)
_add("logs", logs.logs)
app.add_typer(cache.app, name="cache")
app.add_typer(runs.app, name="runs")
app.add_typer(jobs.app, name="jobs")
app.add_typer(dlq.app, name="dlq")
app.add_typer(workers.app, name="workers")
app.add_typer(log.app, name="log")
app.add_typer(bench.app, name="bench")


def _facts() -> dict[str, Any]:
    from importlib.metadata import version as release_of

    from ekiden import limits

    return {
        "version": release_of("ekiden"),
        "protocol": limits.PROTOCOL_VERSION,
        "journal": limits.JOURNAL_VERSION,
        "python": sys.version.split()[0],
    }


def version(as_json: Json = False) -> None:
    """Print which release this is, and the formats it speaks."""
    facts = _facts()
    if as_json:
        output.emit(facts)
    else:
        print(
            f"ekiden {facts['version']} (protocol {facts['protocol']}, "
            f"journal {facts['journal']}, Python {facts['python']})"
        )


_add("version", version)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def ekiden(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Run jobs on a grid that does not lose them.

    \b
    a first look:
      $ ekiden up
      # and in another terminal:
      $ ekiden submit --wait echo --payload hello
    """


# ------------------------------------------------------------------ running a command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_EKIDEN_COMPLETE" in os.environ:  # the shell asks what may come next
        app(args=arguments, prog_name="ekiden")
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        code = _invoke(arguments, as_json="--json" in own)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe has seen enough, as `head` has. What is left has nowhere to go.
        _drop_output()
        return output.DONE
    except OSError as error:
        _drop_output()
        output.print_error(error, as_json="--json" in own)
        return output.REFUSED
    return code


def _invoke(arguments: list[str], *, as_json: bool) -> int:
    """Not `app(...)`: that ends the process with codes of its own."""
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context("ekiden", arguments) as context:
            code = command.invoke(context)
        return code if isinstance(code, int) else output.DONE
    except typer.Exit as ended:
        return ended.exit_code
    except _UsageError as error:
        return _usage(error, as_json=as_json)
    except (EkidenError, TimeoutError) as error:
        output.print_error(error, as_json=as_json)
        return output.exit_code_of(error)
    except (KeyboardInterrupt, typer.Abort):
        return output.INTERRUPTED
    except OSError:
        raise
    except Exception as bug:
        if os.environ.get("EKIDEN_DEBUG"):
            raise
        output.print_error(_bug(bug), as_json=as_json)
        return output.BUG


def _usage(error: Any, *, as_json: bool) -> int:
    context = error.ctx
    path = context.command_path if context is not None else "ekiden"
    message = error.format_message().rstrip(".")
    if message.startswith("Usage:"):  # asked without a verb: what it says is the help
        print(message)
        return output.WRONG_USAGE
    found = WrongUsage(message[:1].lower() + message[1:], remedy=f"see: {path} --help")
    output.print_error(found, as_json=as_json)
    return output.WRONG_USAGE


def _bug(error: Exception) -> EkidenError:
    text = f"{type(error).__name__}: {error}"
    return EkidenError(
        f"something that must not happen has happened: {text}",
        remedy="that is a bug; EKIDEN_DEBUG=1 shows where",
    )


def _drop_output() -> None:
    """Python writes what is left when it ends, and would complain about the same once more."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    sys.exit(main())
