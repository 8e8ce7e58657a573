"""What a job writes, while it writes it, from wherever it runs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ekiden.cli import options, output
from ekiden.errors import JobCancelled, JobFailed, ResultGone, WrongUsage

if TYPE_CHECKING:
    from ekiden.client.blocking import Client
    from ekiden.client.futures import JobFuture

# Between two looks: soon enough for a person who watches, seldom enough for a worker that works.
POLL_S: Final = 0.3

STREAMS: Final = ("stdout", "stderr")


def logs(
    job_id: Annotated[str, typer.Argument(metavar="JOB")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    only_stdout: Annotated[bool, typer.Option("--stdout", help="Only its stdout.")] = False,
    only_stderr: Annotated[bool, typer.Option("--stderr", help="Only its stderr.")] = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Print what a job has written so far.

    Its stdout goes to stdout, its stderr to stderr. Of a job that failed: how, attempt by attempt.
    With -f the command ends when the job does, with 1 if it failed; what a function or service says
    of its progress is shown, too.

    \b
    examples:
      $ ekiden logs night.42
      $ ekiden logs -f night.42 --stderr
    """
    if only_stdout and only_stderr:
        raise WrongUsage("--stdout and --stderr leave nothing out", remedy="give one, or none")
    wanted = {"stdout"} if only_stdout else {"stderr"} if only_stderr else set(STREAMS)
    with options.connected(connect, key_file) as client:
        return _Reader(client, job_id, wanted, as_json=as_json).read(follow=follow)


class _Reader:
    """Reads one job's streams to their present end, or to their last."""

    def __init__(self, client: Client, job_id: str, wanted: set[str], *, as_json: bool) -> None:
        self._client = client
        self._id = job_id
        self._wanted = wanted
        self._as_json = as_json
        self._at = dict.fromkeys(STREAMS, 0)
        self._attempt = 0
        self._progress: Any = None

    def read(self, *, follow: bool) -> int:
        """Print; the exit code."""
        from ekiden.model.jobs import TERMINAL

        future: JobFuture | None = None
        while True:
            seen = self._client.ask("logs", id=self._id, **self._at)
            if seen["state"] in TERMINAL:
                return self._end(follow=follow)
            self._show(seen)
            if not follow:
                if not seen["known"] and not any(self._at.values()):
                    output.say(f"it has not begun: {self._client.job(self._id)['why']}")
                return output.DONE
            if future is None:
                future = self._client.attach(self._id)
            self._show_progress()
            # More may be there already: only a look that found nothing is worth a pause.
            if not seen["stdout"] and not seen["stderr"]:
                _wait(future)

    def _show(self, seen: dict[str, Any]) -> None:
        if seen["attempt"] != self._attempt:
            if any(self._at.values()):
                output.say(f"--- attempt {seen['attempt']} ---")
                self._at = dict.fromkeys(STREAMS, 0)
                self._attempt = seen["attempt"]
                return  # this was read from where the attempt before had got to
            self._attempt = seen["attempt"]
        for stream in STREAMS:
            self._at[stream] += len(seen[stream])
            self._print(stream, seen[stream])

    def _print(self, stream: str, data: bytes) -> None:
        if not data or stream not in self._wanted:
            return
        if self._as_json:
            line = {"id": self._id, "attempt": self._attempt, "stream": stream, "data": data}
            output.emit(line)
        elif stream == "stdout":
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()

    def _show_progress(self) -> None:
        # Asked for, as news of it go only to who submitted the job.
        progress = self._client.job(self._id)["progress"]
        if progress is None or progress == self._progress:
            return
        self._progress = progress
        text = progress.decode("utf-8", "replace")
        if self._as_json:
            output.emit({"id": self._id, "progress": text})
        else:
            output.say(f"progress: {output.plain(text)}")

    def _end(self, *, follow: bool) -> int:
        """What the result or the causes have that was not shown yet."""
        from ekiden.model.jobs import FORM_FUNCTION

        try:
            result = self._client.attach(self._id).result()
        except JobFailed as error:
            self._tell_failed(error)
            code = output.JOB_FAILED
        except JobCancelled as error:
            output.say(str(error))
            code = output.JOB_FAILED
        except ResultGone as error:
            output.say(output.sentence(error))
            code = output.DONE
        else:
            if self._attempt not in (0, result.attempt):
                self._at = dict.fromkeys(STREAMS, 0)
            self._attempt = result.attempt
            code = output.DONE
            if self._client.job(self._id)["form"] == FORM_FUNCTION:
                output.say("it is a function and has returned; its value is for Python to read")
            else:
                self._print("stdout", result.stdout[self._at["stdout"] :])
                self._print("stderr", result.stderr[self._at["stderr"] :])
        if self._as_json:
            output.emit({"id": self._id, "state": self._client.job(self._id)["state"]})
        return code if follow else output.DONE

    def _tell_failed(self, error: JobFailed) -> None:
        for cause in error.causes:
            if self._as_json:
                output.emit({"id": self._id, "cause": cause})
            else:
                output.say(f"attempt {cause['attempt']}: {cause['cause']} on {cause['worker']}")
                for line in str(cause["message"]).splitlines():
                    output.say(f"  {output.plain(line, limit=2000)}")


def _wait(future: JobFuture) -> None:
    """A pause, cut short when the job ends."""
    deadline = time.monotonic() + POLL_S
    try:
        future.exception(max(deadline - time.monotonic(), 0))
    except TimeoutError:
        pass
