"""The `ekiden` command: one module per family of verbs, put together here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from ekiden.cli import bench, broker, dlq, jobs, log, output, pubsub, stats, up, worker, workers
from ekiden.cli.options import Json
from ekiden.errors import EkidenError, WrongUsage

app = typer.Typer(
    name="ekiden",
    help="Run jobs on the machines you have; lose a machine, lose no result.",
    epilog=output.EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text starts faster, and reads the same in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Command = Callable[..., Any]

# What the parser raises for a command line that makes no sense; typer has no public name for it.
_UsageError: Any = typer.BadParameter.__base__


def _add(name: str, command: Command, **settings: Any) -> None:
    app.command(name, epilog=output.EXIT_CODES, **settings)(command)


_add("up", up.up)
_add("broker", broker.broker)
_add("leader", broker.leader)
_add("worker", worker.worker)
_add("submit", jobs.submit)
_add("wait", jobs.wait)
app.add_typer(jobs.app, name="jobs")
app.add_typer(dlq.app, name="dlq")
app.add_typer(workers.app, name="workers")
_add("stats", stats.stats)
_add("pub", pubsub.pub)
_add("sub", pubsub.sub)
app.add_typer(log.app, name="log")
app.add_typer(bench.app, name="bench")


def version(as_json: Json = False) -> None:
    """Print which release this is, and the formats it speaks."""
    from importlib.metadata import version as release_of

    from ekiden import limits

    facts = {
        "version": release_of("ekiden"),
        "protocol": limits.PROTOCOL_VERSION,
        "journal": limits.JOURNAL_VERSION,
        "python": sys.version.split()[0],
    }
    if as_json:
        output.emit(facts)
    else:
        print(
            f"ekiden {facts['version']} (protocol {facts['protocol']}, "
            f"journal {facts['journal']}, Python {facts['python']})"
        )


_add("version", version)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _run(app, arguments, "ekiden")


def _run(command: typer.Typer, arguments: list[str], name: str) -> int:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in own
    try:
        code = command(args=arguments, prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else output.DONE
    except _UsageError as error:
        output.print_error(_usage(error, name), as_json=as_json)
        return output.WRONG_USAGE
    except (EkidenError, TimeoutError) as error:
        output.print_error(error, as_json=as_json)
        return output.exit_code_of(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader of a pipe has seen enough, as `head` has.
        sys.stderr.close()
        return output.DONE


def _usage(error: Any, name: str) -> WrongUsage:
    context = error.ctx
    path = context.command_path if context is not None else name
    message = error.format_message().rstrip(".")
    return WrongUsage(message[:1].lower() + message[1:], remedy=f"see: {path} --help")


if __name__ == "__main__":
    sys.exit(main())
