"""Messages for whoever listens now: never stored, delivered to every subscriber that keeps up."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ekiden.cli import options, output

if TYPE_CHECKING:
    from ekiden.client.core import Message

BACKLOG: Final = 10_000


def pub(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT")],
    payload: Annotated[
        str, typer.Argument(metavar="PAYLOAD", help="TEXT, @FILE, or - for stdin.")
    ] = "",
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Publish a message to all who listen at this moment.

    It is not stored: who is not subscribed now does not get it.

    \b
    example:
      $ ekiden pub prices.renewed 2026-05-17
    """
    data = options.read_payload(payload)
    with options.connected(connect, key_file) as client:
        client.publish(subject, data)
        # An answer to a later question on the same connection says that the broker has read it.
        client.ask("stats")
    if as_json:
        output.emit({"subject": subject, "bytes": len(data)})


def sub(
    patterns: Annotated[list[str], typer.Argument(metavar="PATTERN")],
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="N", help="End after this many messages."),
    ] = None,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Print messages as they are published, until Ctrl-C.

    In a pattern '*' stands for one token and '>' for the rest.

    \b
    example:
      $ ekiden sub 'prices.>' --json
    """
    from queue import Full, Queue

    arrived: Queue[Message] = Queue(BACKLOG)
    lost = 0

    def take(message: Message) -> None:
        # Called in the client's own thread, which must not wait for a slow terminal.
        nonlocal lost
        try:
            arrived.put_nowait(message)
        except Full:
            lost += 1

    with options.connected(connect, key_file) as client:
        for subscription in [client.subscribe(pattern, take) for pattern in patterns]:
            subscription.wait_active()
        output.say(f"listening on {' '.join(patterns)}")
        for _ in range(count) if count else itertools.repeat(None):
            _print_message(arrived.get(), as_json=as_json)
            if lost:
                output.say(f"{lost:,} messages were lost: they came faster than they were printed")
                lost = 0


def _print_message(message: Message, *, as_json: bool) -> None:
    if as_json:
        output.emit({"subject": message.subject, "payload": message.payload})
        return
    text = output.plain(message.payload.decode(errors="replace"), limit=2000)
    print(f"{output.plain(message.subject)}  {text}", flush=True)
