"""Sending jobs and waiting for them.

Many jobs pass through in a window of fixed size, so that a file of any length can be sent. What a
job brought goes to stdout in the order of the jobs; how one failed goes to stderr and does not keep
the others from being sent.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from ekiden.cli import options, output
from ekiden.errors import EkidenError, JobCancelled, JobFailed, TooLarge, WrongUsage

if TYPE_CHECKING:
    from ekiden.client.blocking import Client
    from ekiden.client.futures import JobFuture

WINDOW: Final = 10_000
READ_BYTES: Final = 1 << 16

# Silent for this long without a connection: say so, a person is waiting.
LOST_S: Final = 2.0

Numbered: TypeAlias = tuple[str | None, bytes, str]
"""Id, payload, and what to call it if it is refused before it was sent."""


def submit(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the workers call it.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARG", help="Arguments; after -- as they are.")
    ] = None,
    payload: Annotated[
        str,
        typer.Option(
            "--payload", "-p", metavar="TEXT|@FILE|-", help="Input of the job; '-' reads stdin."
        ),
    ] = "",
    lines: Annotated[
        str, typer.Option("--lines", metavar="FILE|-", help="One job per line of this input.")
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Wait for the result and print it.")
    ] = False,
    job_id: Annotated[
        str,
        typer.Option("--id", metavar="ID", help="The job's id; one id is never run as two jobs."),
    ] = "",
    count: Annotated[
        int, typer.Option("--count", min=1, metavar="N", help="Send it N times: ID-1, ID-2, …")
    ] = 1,
    subject: Annotated[
        str, typer.Option("--subject", metavar="SUBJECT", help="Where to send it [job.assign.NAME]")
    ] = "",
    priority: Annotated[
        int, typer.Option("--priority", min=-9, max=9, metavar="N", help="Higher first.")
    ] = 0,
    delay: Annotated[
        float, typer.Option("--delay", min=0, metavar="SECONDS", help="Start no sooner than this.")
    ] = 0.0,
    not_before: Annotated[
        str, typer.Option("--not-before", metavar="TIME", help="As 2026-05-17T06:00.")
    ] = "",
    expires_at: Annotated[
        str, typer.Option("--expires-at", metavar="TIME", help="Cancel it if not begun by then.")
    ] = "",
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Limit of one attempt."),
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option("--max-attempts", min=1, metavar="N", help="Tries in all [3]."),
    ] = None,
    retry_on: Annotated[
        list[str] | None,
        typer.Option("--retry-on", metavar="CAUSE,…", help="What is worth another try."),
    ] = None,
    needs: Annotated[
        str,
        typer.Option("--needs", metavar="NEEDS", help="As cpu=2,mem_mb=4000,label.gpu=a100."),
    ] = "",
    key: Annotated[
        str, typer.Option("--key", metavar="TEXT", help="Jobs of one key go to one worker.")
    ] = "",
    worker: Annotated[
        str, typer.Option("--worker", metavar="ID", help="Only this worker may run it.")
    ] = "",
    caches: options.Caches = None,
    run: Annotated[
        str, typer.Option("--run", metavar="NAME", help="A name to find its jobs by.")
    ] = "",
    client_id: Annotated[
        str, typer.Option("--client-id", metavar="ID", help="On whose behalf [user@host].")
    ] = "",
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    connect_timeout: options.ConnectTimeout = options.CONNECT_TIMEOUT_S,
    as_json: options.Json = False,
) -> int:
    """Send a job; print its id, or with --wait its output.

    \b
    examples:
      # Run the built-in echo and wait for its output.
      $ ekiden submit --wait echo --payload hello
      # JSON to a handler or a warm service; for a program see: ekiden run --help
      $ ekiden submit --wait pricer --payload '{"trade": 7}'
      # One job per line; under an id of yours, sending again changes nothing.
      $ ekiden submit price --lines trades.txt --id night-0517 --run night
      # Wait for them later, or elsewhere.
      $ ekiden submit price --lines trades.txt | ekiden wait -
    """
    wishes: dict[str, Any] = {
        "args": arguments or [],
        "subject": subject or None,
        "priority": priority,
        "delay_s": delay,
        "not_before": options.parse_time(not_before, "--not-before"),
        "expires_at": options.parse_time(expires_at, "--expires-at"),
        "timeout_s": timeout,
        "max_attempts": max_attempts,
        "retry_on": tuple(options.split_list(retry_on)) or None,
        "needs": options.parse_needs(needs) or None,
        "key": key or None,
        "pin": worker or None,
        "caches": tuple(options.split_list(caches)) or None,
        "run": run,
    }
    batches = _batches(payload, lines, job_id, count)
    identity = {"client_id": client_id} if client_id else {}
    with options.connected(connect, key_file, connect_timeout, **identity) as client:
        several = bool(lines) or count > 1
        report = _Report(client, as_json=as_json, several=several)

        def sent(batch: Iterable[Numbered]) -> Iterator[JobFuture]:
            for own_id, data, place in batch:
                try:
                    yield client.submit(name, payload=data, job_id=own_id, **wishes)
                except TooLarge as error:  # the fault of this line; the others may be well
                    error.message = place + error.message
                    report.failed(error)

        if wait:
            return report.results(future for batch in batches for future in sent(batch))
        for batch in batches:
            report.accepted(name, sent(batch))
        return report.code


# ------------------------------------------------------------------ where jobs come from


def _batches(payload: str, lines: str, job_id: str, count: int) -> Iterator[Iterable[Numbered]]:
    """The jobs to send, in the batches in which they become known."""
    if lines:
        if payload or count > 1:
            raise WrongUsage(
                "--lines says how many jobs there are and what is in them",
                remedy="leave --payload and --count away",
            )
        return _numbered(_lines(lines), job_id)
    data = options.read_payload(payload)
    ids: Iterator[str | None] = (
        iter([job_id or None])
        if count == 1
        else (f"{job_id}-{number}" if job_id else None for number in range(1, count + 1))
    )
    return iter([((one, data, "") for one in ids)])


def _numbered(batches: Iterator[list[bytes]], job_id: str) -> Iterator[Iterable[Numbered]]:
    number = 0
    for batch in batches:
        jobs: list[Numbered] = []
        for line in batch:
            number += 1
            jobs.append((f"{job_id}-{number}" if job_id else None, line, f"line {number}: "))
        yield jobs


def _lines(name: str) -> Iterator[list[bytes]]:
    """Lines without their ends, as many at a time as are there: a slow pipe is not waited for."""
    try:
        stream: Any = sys.stdin.buffer if name == "-" else Path(name).open("rb")  # noqa: SIM115
    except OSError as error:
        raise WrongUsage(
            f"cannot read {name!r}: {error.strerror}", remedy="name a file, or '-' for stdin"
        ) from None
    return _split(stream)


def _split(stream: Any) -> Iterator[list[bytes]]:
    with stream:
        rest = b""
        while chunk := stream.read1(READ_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            if whole:
                yield [line.removesuffix(b"\r") for line in whole]
        if rest:
            yield [rest.removesuffix(b"\r")]


# ------------------------------------------------------------------ wait


def wait(
    ids: Annotated[
        list[str], typer.Argument(metavar="ID", help="Jobs; '-' reads ids from stdin, one a line.")
    ],
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Stop waiting; the jobs go on."),
    ] = None,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Wait for jobs, whoever sent them; print their outputs.

    Outputs come in the order asked for. Ends with 1 if a job failed or was cancelled, with 3 if
    time was up.

    \b
    examples:
      $ ekiden wait night-0517-1 night-0517-2
      $ ekiden submit echo --lines names.txt | ekiden wait -
    """
    asked = ids if ids != ["-"] else [line.decode() for batch in _lines("-") for line in batch]
    wanted = list(dict.fromkeys(one for one in asked if one))
    with options.connected(connect, key_file) as client:
        report = _Report(client, as_json=as_json, several=len(wanted) > 1, timeout=timeout)
        return report.results(client.attach(one) for one in wanted)


# ------------------------------------------------------------------ what became of them


class _Report:
    """Prints what became of jobs; `code` is that of the first that did not go well."""

    def __init__(
        self, client: Client, *, as_json: bool, several: bool, timeout: float | None = None
    ) -> None:
        self.code = output.DONE
        self._client = client
        self._as_json = as_json
        self._several = several
        self._timeout = timeout
        self._deadline = None if timeout is None else monotonic() + timeout

    def accepted(self, name: str, futures: Iterable[JobFuture]) -> None:
        """Print the ids of these jobs as they become durable."""

        def settle(future: JobFuture) -> None:
            self._patiently(future, future.wait_accepted)
            if self._as_json:
                output.emit({"id": future.job_id, "name": name, "accepted": True})
            else:
                print(future.job_id, flush=not self._several)

        self._through_window(futures, settle)
        sys.stdout.flush()

    def results(self, futures: Iterable[JobFuture]) -> int:
        """Print what these jobs brought, in order; the exit code."""

        def settle(future: JobFuture) -> None:
            result = self._patiently(future, future.result)
            if self._as_json:
                output.emit(_result_document(result))
            else:
                _print_output(result.output, several=self._several)

        try:
            self._through_window(futures, settle)
        except KeyboardInterrupt:
            output.say("not waiting any more; jobs that were sent go on: ekiden jobs list")
            raise
        return self.code

    def failed(self, error: EkidenError) -> None:
        """A job that was not sent."""
        self.code = self.code or output.exit_code_of(error)
        output.print_error(error, as_json=self._as_json)

    def _through_window(
        self, futures: Iterable[JobFuture], settle: Callable[[JobFuture], None]
    ) -> None:
        open_: deque[JobFuture] = deque()
        for future in futures:
            open_.append(future)
            while open_ and (len(open_) >= WINDOW or open_[0].done()):
                self._settle(open_.popleft(), settle)
        while open_:
            self._settle(open_.popleft(), settle)

    def _settle(self, future: JobFuture, settle: Callable[[JobFuture], None]) -> None:
        try:
            settle(future)
        except (JobFailed, JobCancelled) as error:
            if not self._as_json:
                self.failed(error)
                return
            self.code = self.code or output.exit_code_of(error)
            state = "failed" if isinstance(error, JobFailed) else "cancelled"
            output.emit({"id": future.job_id, "state": state, **output.error_document(error)})
        except EkidenError as error:
            self.failed(error)

    def _patiently(self, future: JobFuture, wait: Callable[[float], Any]) -> Any:
        """`wait` until it has an answer or time is up; says so if the broker is gone meanwhile."""
        missing = False
        while True:
            left = LOST_S if self._deadline is None else self._deadline - monotonic()
            try:
                answer = wait(max(0.0, min(left, LOST_S)))
            except TimeoutError:
                if left <= LOST_S and self._deadline is not None:
                    raise TimeoutError(
                        f"job {future.job_id!r} is not settled after {self._timeout:g} s; it goes "
                        f"on, ask again with: ekiden wait {future.job_id}"
                    ) from None
                if not self._client.connected and not missing:
                    missing = True
                    output.say("the broker is gone; waiting for it to come back (Ctrl-C ends this)")
                continue
            if missing:
                output.say("the broker is back")
            return answer


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
