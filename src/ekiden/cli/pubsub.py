"""Messages for whoever listens now: never stored, delivered to every subscriber that keeps up."""

from __future__ import annotations

from typing import Annotated

import typer

from ekiden.cli import options, output


def pub(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT")],
    payload: Annotated[str, typer.Argument(metavar="TEXT|@FILE|-")] = "",
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Publish a message to all who are subscribed at this moment.

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
    patterns: Annotated[list[str], typer.Argument(metavar="PATTERN…")],
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="End after this many messages.")
    ] = None,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Print messages as they are published; '*' is one token, '>' the rest.

    \b
    example:
      $ ekiden sub 'prices.>' --json
    """
    import queue

    arrived: queue.Queue[tuple[str, bytes]] = queue.Queue(maxsize=10_000)
    with options.connected(connect, key_file) as client:
        for pattern in patterns:
            client.subscribe(
                pattern, lambda message: arrived.put((message.subject, message.payload))
            )
        client.ask("stats")
        output.say(f"listening on {' '.join(patterns)}")
        left = count
        while left is None or left > 0:
            subject, data = arrived.get()
            if as_json:
                output.emit({"subject": subject, "payload": data})
            else:
                text = output.plain(data.decode(errors="replace"), limit=2000)
                print(f"{output.plain(subject)}  {text}", flush=True)
            left = None if left is None else left - 1
