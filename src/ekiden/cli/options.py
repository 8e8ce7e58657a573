"""Options that many commands share, and what they mean.

Everything here is cheap to import: a command imports clients and roles when it runs, so that
`ekiden --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

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
    bool, typer.Option("--json", help="Print JSON, whose shape is stable, instead of tables.")
]
Subject: TypeAlias = Annotated[
    str, typer.Option("--subject", metavar="PATTERN", help="Only jobs sent to these subjects.")
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


def chosen(
    ids: list[str] | None, wishes: dict[str, str], everything: bool, what: str
) -> dict[str, Any]:
    """Parameters for a change to some jobs: by id, by filter, or all on purpose."""
    ways = [bool(ids), bool(wishes), everything]
    if sum(ways) > 1:
        raise WrongUsage(
            f"{what} takes ids, or a filter, or --all", remedy="give only one of the three"
        )
    if not any(ways):
        raise WrongUsage(f"{what} what?", remedy="give ids, a filter such as --run, or --all")
    return {"ids": ids} if ids else {"filter": wishes}


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


def parse_labels(pairs: list[str] | None) -> dict[str, str]:
    """`key=value` pairs as a worker's labels."""
    labels: dict[str, str] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not name or not equals or not value:
            raise WrongUsage(f"--label {pair!r} is no pair", remedy="write --label gpu=a100")
        labels[name] = value
    return labels
