"""Sending jobs, waiting for them, looking at them, cancelling them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ekiden.cli import options, output
from ekiden.errors import EkidenError

if TYPE_CHECKING:
    from ekiden.client.blocking import Client

app = typer.Typer(
    help="Look at jobs and cancel them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)

Payload = Annotated[
    str,
    typer.Option(
        "--payload", "-p", metavar="TEXT|@FILE|-", help="Input of the job; '-' reads stdin."
    ),
]


def submit(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the workers call it.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARG…]", help="Arguments of the job.")
    ] = None,
    payload: Payload = "",
    arg: Annotated[list[str] | None, typer.Option("--arg", help="One more argument.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Wait for the result and print it.")
    ] = False,
    job_id: Annotated[
        str, typer.Option("--id", help="The job's id; the same id is never run as two jobs.")
    ] = "",
    count: Annotated[
        int, typer.Option("--count", min=1, help="Send it this many times, as ID-1, ID-2, …")
    ] = 1,
    subject: Annotated[
        str, typer.Option("--subject", help="Where to send it [job.assign.NAME].")
    ] = "",
    priority: Annotated[int, typer.Option("--priority", min=-9, max=9, help="Higher first.")] = 0,
    delay: Annotated[
        float, typer.Option("--delay", min=0, metavar="SECONDS", help="Not before this long.")
    ] = 0.0,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="End an attempt that runs longer."),
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", min=1, help="Tries before it is a dead letter.")
    ] = None,
    needs: Annotated[str, typer.Option("--needs", metavar="cpu=2,mem_mb=4000,label.gpu=a100")] = "",
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="Name for filters.")] = "",
    client_id: Annotated[
        str, typer.Option("--client-id", help="On whose behalf [user@host].")
    ] = "",
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    connect_timeout: options.ConnectTimeout = options.CONNECT_TIMEOUT_S,
    as_json: options.Json = False,
) -> int:
    """Send a job to the grid and print its id, or with --wait its output.

    \b
    examples:
      # Run the built-in echo and wait for its output.
      $ ekiden submit --wait echo --payload hello
      # Arguments after '--' go to the job as they are.
      $ ekiden submit --wait pricer -- --mode fast
      # A thousand jobs under ids of your own; asking again changes nothing.
      $ ekiden submit price --id night-0517 --count 1000 --payload @trades.json
    """
    wishes: dict[str, Any] = {
        "payload": options.read_payload(payload),
        "args": [*(arguments or []), *(arg or [])],
        "subject": subject or None,
        "priority": priority,
        "delay_s": delay,
        "timeout_s": timeout,
        "max_attempts": max_attempts,
        "needs": options.parse_needs(needs) or None,
        "run": run,
    }
    ids = _ids(job_id, count)
    identity = {"client_id": client_id} if client_id else {}
    with options.connected(connect, key_file, connect_timeout, **identity) as client:
        futures = [client.submit(name, job_id=one, **wishes) for one in ids]
        if wait:
            return _print_results(futures, as_json=as_json)
        for future in futures:
            future.wait_accepted()
            if as_json:
                output.emit({"id": future.job_id, "name": name, "accepted": True})
            else:
                print(future.job_id)
    return output.DONE


def _ids(job_id: str, count: int) -> list[str | None]:
    if not job_id:
        return [None] * count
    return [job_id] if count == 1 else [f"{job_id}-{number}" for number in range(1, count + 1)]


def wait(
    ids: Annotated[list[str], typer.Argument(metavar="ID…")],
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="Stop waiting; the jobs go on."),
    ] = None,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Wait for jobs, whoever sent them, and print their outputs in the order asked for.

    \b
    examples:
      $ ekiden wait night-0517-1
      $ ekiden wait $(ekiden submit echo --payload hello)
    """
    with options.connected(connect, key_file) as client:
        futures = [client.attach(one) for one in dict.fromkeys(ids)]
        return _print_results(futures, as_json=as_json, timeout=timeout)


def _print_results(futures: list[Any], *, as_json: bool, timeout: float | None = None) -> int:
    """Print every outcome in order; the code of the first that was not good."""
    from time import monotonic

    deadline = None if timeout is None else monotonic() + timeout
    code = output.DONE
    for future in futures:
        left = None if deadline is None else max(0.0, deadline - monotonic())
        try:
            result = future.result(left)
        except TimeoutError:
            raise TimeoutError(
                f"job {future.job_id!r} is not settled after {timeout:g} s; it goes on, "
                f"ask again with: ekiden wait {future.job_id}"
            ) from None
        except EkidenError as error:
            code = code or output.exit_code_of(error)
            output.print_error(error, as_json=as_json)
            continue
        if as_json:
            output.emit(_result_document(result))
        else:
            _print_output(result.output, several=len(futures) > 1)
    return code


def _print_output(data: bytes, *, several: bool) -> None:
    if several and not data.endswith(b"\n"):
        data += b"\n"
    output.write_output(data)


def _result_document(result: Any) -> dict[str, Any]:
    return {
        "id": result.job_id,
        "state": "done",
        "output": result.output,
        "exit_code": result.exit_code,
        "attempt": result.attempt,
        "worker": result.worker,
        "submitted": result.facts.submitted,
        "leased": result.facts.leased,
        "finished": result.facts.finished,
    }


# ------------------------------------------------------------------ jobs list | show | cancel

PAGE = 500


def pages(client: Client, wishes: dict[str, str], *, limit: int, after: str = "") -> Iterator[Any]:
    """Jobs that fit, up to `limit` of them (0: all), asked for page by page."""
    left = limit
    while True:
        size = min(PAGE, left) if limit else PAGE
        answer = client.ask("jobs", **wishes, limit=size, **({"after": after} if after else {}))
        yield from answer["jobs"]
        left -= len(answer["jobs"])
        if not answer["more"] or not answer["jobs"] or (limit and left <= 0):
            return
        after = answer["jobs"][-1]["id"]


def list_jobs(
    wishes: dict[str, str],
    *,
    connect: str,
    key_file: Any,
    limit: int,
    after: str,
    as_json: bool,
    empty: str,
) -> None:
    """Print the jobs that fit, as a table or as JSON Lines."""
    with options.connected(connect, key_file) as client:
        found: Iterable[Any] = pages(client, wishes, limit=limit, after=after)
        if as_json:
            for job in found:
                output.emit(job)
            return
        rows = list(found)
    output.print_table(
        ("id", "state", "name", "#attempt", "worker", "client", "submitted"),
        (
            (
                job["id"],
                job["state"],
                job.get("name"),
                job.get("attempt"),
                job.get("worker"),
                job.get("client"),
                output.clock(job.get("submitted")),
            )
            for job in rows
        ),
        empty=empty,
    )
    if limit and len(rows) == limit:
        output.say(f"the first {limit}; the next: --after {rows[-1]['id']}, or --all")


@app.command("list")
def list_command(
    state: Annotated[
        str, typer.Option("--state", help="delayed, queued, leased, done, failed, cancelled …")
    ] = "",
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most this many.")] = 100,
    after: Annotated[str, typer.Option("--after", metavar="ID", help="Go on after it.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Show all, not the first 100.")] = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """List jobs, finished ones included while they are kept.

    \b
    examples:
      $ ekiden jobs list --state queued --subject 'job.assign.render.>'
      $ ekiden jobs list --run night-0517 --all --json
    """
    list_jobs(
        options.filter_of(state=state, subject=subject, client=client_id, run=run),
        connect=connect,
        key_file=key_file,
        limit=0 if everything else limit,
        after=after,
        as_json=as_json,
        empty="no such jobs; send one with: ekiden submit echo --payload hello",
    )


@app.command("show")
def show_command(
    job_id: Annotated[str, typer.Argument(metavar="ID")],
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Show one job: where it is, why it waits, and how every attempt ended."""
    show_job(job_id, connect=connect, key_file=key_file, as_json=as_json)


def show_job(job_id: str, *, connect: str, key_file: Any, as_json: bool) -> None:
    """Print all that is known of one job."""
    job = options.ask(connect, key_file, "job", id=job_id)
    if as_json:
        output.emit(job)
        return
    times = ("submitted", "leased", "finished")
    facts = {name: value for name, value in job.items() if name not in (*times, "causes")}
    output.print_facts([*facts.items(), *((name, output.clock(job.get(name))) for name in times)])
    if job.get("causes"):
        print()
        output.print_table(
            ("#attempt", "worker", "cause", "burned", "message"),
            (
                (c["attempt"], c["worker"], c["cause"], c["burned"], c["message"])
                for c in job["causes"]
            ),
        )
    if job.get("state") == "failed":
        output.say(f"try it again with: ekiden dlq replay {job['id']}")


@app.command("cancel")
def cancel_command(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID…]")] = None,
    state: Annotated[str, typer.Option("--state", help="queued, delayed, leased …")] = "",
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    everything: Annotated[bool, typer.Option("--all", help="Every unfinished job.")] = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Cancel jobs by id or by filter. What runs is stopped; what is finished stays as it is."""
    wishes = options.filter_of(state=state, subject=subject, client=client_id, run=run)
    params = options.chosen(ids, wishes, everything, "cancel")
    answer = options.ask(connect, key_file, "cancel", **params)
    return report_change(
        answer, ("cancelled", "cancelling", "settled"), as_json=as_json, asked=ids or []
    )


def report_change(
    answer: dict[str, Any], words: tuple[str, ...], *, as_json: bool, asked: list[str]
) -> int:
    """Print how many jobs became what. Refused if none of the ids asked for is known."""
    unknown = answer.get("unknown") or []
    if as_json:
        output.emit(answer)
    else:
        print(" · ".join(f"{answer.get(word, 0):,} {word}" for word in words))
        if unknown:
            shown = ", ".join(output.plain(one) for one in unknown[:5])
            more = f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else ""
            output.say(f"unknown: {shown}{more}; list with: ekiden jobs list --all")
    return output.REFUSED if asked and len(unknown) == len(set(asked)) else output.DONE
