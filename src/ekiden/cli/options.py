"""Options that many commands share, and what they mean.

Everything here is cheap to import: a command imports clients and roles when it runs, so that
`ekiden --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from ekiden.cli import output
from ekiden.errors import WrongUsage

if TYPE_CHECKING:
    from ekiden.client.blocking import Client

ADDRESS_DEFAULT: Final = "127.0.0.1:7000"
CONNECT_TIMEOUT_S: Final = 3.0

Connect: TypeAlias = Annotated[
    str,
    typer.Option(
        "--connect",
        metavar="HOST:PORT[,HOST:PORT]",
        envvar="EKIDEN_CONNECT",
        help="The broker to speak to.",
    ),
]
KeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        envvar="EKIDEN_KEY_FILE",
        help="Key of a broker that is not this user's own.",
    ),
]
ConnectTimeout: TypeAlias = Annotated[
    float,
    typer.Option("--connect-timeout", metavar="SECONDS", help="Give up if no broker answers."),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON of a stable shape, for programs.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask back.")]
Limit: TypeAlias = Annotated[
    int, typer.Option("--limit", min=1, metavar="N", help="Show at most this many.")
]
Subject: TypeAlias = Annotated[
    str, typer.Option("--subject", metavar="PATTERN", help="Only jobs sent to these subjects.")
]
Caches: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--cache", metavar="ID[,ID]", help="Data that must be there: ekiden cache put."),
]
ClientId: TypeAlias = Annotated[
    str, typer.Option("--client", metavar="ID", help="Only jobs of this client.")
]
Run: TypeAlias = Annotated[
    str, typer.Option("--run", metavar="NAME", help="Only jobs of this run.")
]


@contextmanager
def connected(
    connect: str, key_file: Path | None, timeout_s: float = CONNECT_TIMEOUT_S, **options: Any
) -> Iterator[Client]:
    """A client that a broker has welcomed. Raises `Unreachable` if none does in time."""
    from ekiden.client.blocking import Client

    with Client(connect, key_file=key_file, **options) as client:
        client.wait_connected(timeout_s)
        yield client


def ask(connect: str, key_file: Path | None, verb: str, **params: Any) -> Any:
    """The broker's answer to one question."""
    with connected(connect, key_file) as client:
        return client.ask(verb, **params)


def filter_of(**wishes: str) -> dict[str, str]:
    """The filter that these options describe; empty if none was given."""
    return {name: wish for name, wish in wishes.items() if wish}


def confirm(question: str) -> None:
    """Go on only if a person says yes; where there is none to ask, `--yes` must have been given."""
    if not sys.stdin.isatty():
        raise WrongUsage(
            "this changes many jobs and there is nobody to ask", remedy="add --yes if you mean it"
        )
    if not typer.confirm(question, err=True):
        output.say("nothing was changed")
        raise typer.Abort


def read_payload(text: str) -> bytes:
    """The bytes meant by `TEXT`, `@FILE` or `-` (standard input)."""
    if text == "-":
        return sys.stdin.buffer.read()
    if not text.startswith("@"):
        return text.encode()
    try:
        return Path(text[1:]).read_bytes()
    except OSError as error:
        raise WrongUsage(
            f"cannot read {text[1:]!r}: {error.strerror}",
            remedy="after '@' comes the name of a readable file; '-' reads standard input",
        ) from None


def parse_needs(text: str) -> dict[str, Any]:
    """`cpu=2,mem_mb=4000,label.gpu=a100` as `submit(needs=…)` takes it."""
    needs: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        try:
            if not equals or not value:
                raise ValueError
            if name == "cpu":
                needs["cpu"] = float(value) if "." in value else int(value)
            elif name == "mem_mb":
                needs["mem_mb"] = int(value)
            elif name.startswith("label.") and len(name) > len("label."):
                needs.setdefault("label", {})[name.removeprefix("label.")] = value
            else:
                raise ValueError
        except ValueError:
            raise WrongUsage(
                f"--needs does not understand {part!r}",
                remedy="write cpu=2,mem_mb=4000,label.gpu=a100",
            ) from None
    return needs


def parse_time(text: str, option: str) -> datetime | None:
    """`2026-05-17T06:00`, in this machine's zone unless it names one."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise WrongUsage(
            f"{option} does not understand {text!r}",
            remedy="write a date and time such as 2026-05-17T06:00 or 2026-05-17T06:00+09:00",
        ) from None
    return moment.astimezone()


def split_list(texts: list[str] | None) -> list[str]:
    """What was given with commas, by repeating an option, or both."""
    return [part.strip() for text in texts or [] for part in text.split(",") if part.strip()]


def parse_labels(pairs: list[str] | None) -> dict[str, str]:
    """`key=value` pairs as a worker's labels."""
    labels: dict[str, str] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not name or not equals or not value:
            raise WrongUsage(f"--label {pair!r} is no pair", remedy="write --label gpu=a100")
        labels[name] = value
    return labels
