"""Futures that cost a fraction of the standard ones, and behave like them.

`concurrent.futures.wait` and `as_completed` take a `JobFuture` like any other. What makes it light:
defaults live on the class, one lock serves all futures of a client, lists of waiters and callbacks
exist only for futures that somebody waits for, and results are set a whole run at a time. A
`JobResult` is made when it is asked for.
"""

from __future__ import annotations

import _thread
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Condition
from typing import Any, Final, Protocol

import msgspec

from ekiden import errors
from ekiden.client.contract import Terms
from ekiden.client.results import Facts, Fetcher, JobResult
from ekiden.model.caches import BlobRef
from ekiden.model.jobs import CANCELLED, DONE
from ekiden.wire.messages import Ended, ResultRun

_PENDING: Final = "PENDING"
_FINISHED: Final = "FINISHED"

_log = logging.getLogger("ekiden.client")


class Desk(Fetcher, Protocol):
    """What a future needs of its client."""

    condition: Condition

    def cancel_job(self, future: JobFuture, timeout: float | None) -> bool:
        """Have the job cancelled; True once that is committed."""

    def check_may_wait(self) -> None:
        """Raise if waiting in this thread would wait for itself."""


class Watcher(Protocol):
    """What is told once: the protocol of `concurrent.futures`."""

    def add_result(self, future: Any, /) -> None: ...
    def add_exception(self, future: Any, /) -> None: ...


class _Latch:
    """What `result` waits on: one lock, made only when there is something to wait for."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def add_result(self, _future: Any) -> None:
        if self._lock.locked():
            self._lock.release()

    add_exception = add_cancelled = add_result

    def wait(self, timeout: float | None) -> None:
        """Return when told, or when time is up."""
        self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0))


class JobFuture(Future[Any]):
    """A job that was submitted or attached to.

    Its outcome is a `JobResult`, or one of `JobFailed`, `JobCancelled`, `ResultGone`, a `Refusal`
    of the broker, or `Closed` if the client was closed first.
    """

    _state = _PENDING
    _exception: BaseException | None = None
    _output: bytes = b""
    _facts: Facts | None = None
    _accepted = False
    _watched = False
    _watchers: list[Any] | None = None
    _callbacks: list[Callable[[Any], Any]] | None = None
    _accept_watchers: list[Watcher] | None = None
    _progress: bytes | None = None
    _progress_attempt = 0

    _more_attributes: tuple[str, ...] = ()
    """What a future of this class has beside those of `_ATTRIBUTES`."""

    body: bytes
    """What was submitted, until the outcome is known."""

    blobs: Sequence[BlobRef] = ()
    """What of the broker's store the body refers to."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        _lay_out(cls)

    def __init__(self, desk: Desk, job_id: str, body: bytes, terms: Terms | None) -> None:
        # Not super().__init__(): it would make a lock and two lists.
        self.desk = desk
        self.job_id = job_id
        self.body = body
        self.terms = terms

    # -------------------------------------------------------------- what concurrent.futures reads

    @property
    def _condition(self) -> Condition:  # type: ignore[override]
        return self.desk.condition

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        if self._watchers is None:
            self._watchers = []
            self._watched = True
        return self._watchers

    @property
    def _result(self) -> JobResult | None:  # type: ignore[override]
        if self._facts is None:
            return None
        return JobResult(self.job_id, self._output, self._facts, self.desk)

    # -------------------------------------------------------------- use

    @property
    def accepted(self) -> bool:
        """Whether the broker has committed the job: from then on it cannot be lost."""
        return self._accepted

    @property
    def progress(self) -> Any:
        """The latest the running job said of itself, or None."""
        return None if self._progress is None else _opened(self._progress)

    def wait_accepted(self, timeout: float | None = None) -> None:
        """Return once the job is committed. Raises what refused it, or TimeoutError."""
        if not self._accepted and self._state != _FINISHED:
            self.desk.check_may_wait()
            latch = _Latch()
            self.watch_accepted(latch)
            latch.wait(timeout)
        if self._accepted:
            return
        if self._exception is not None:
            raise self._exception
        raise TimeoutError(f"job {self.job_id!r} was not accepted within {timeout} s")

    def result(self, timeout: float | None = None) -> JobResult:
        """The result, when it is there. Raises how the job ended otherwise, or TimeoutError."""
        if self._state != _FINISHED:
            self._wait(timeout)
        if self._facts is None:
            assert self._exception is not None
            raise self._exception
        return JobResult(self.job_id, self._output, self._facts, self.desk)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """How the job ended without a result, or None if it has one."""
        if self._state != _FINISHED:
            self._wait(timeout)
        return self._exception

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._state == _FINISHED

    def running(self) -> bool:
        """Whether a worker has said how far it is. Ask `client.job` for the present state."""
        return self._state != _FINISHED and self._progress is not None

    def cancelled(self) -> bool:
        """Whether the job ended because it was cancelled or expired."""
        return isinstance(self._exception, errors.JobCancelled)

    def cancel(self, timeout: float | None = None) -> bool:
        """Have the job cancelled. True once that is committed, False if it was settled before.

        A job that runs may still finish first: the outcome of the future says which came about.
        """
        if self._state == _FINISHED:
            return self.cancelled()
        return self.desk.cancel_job(self, timeout)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with this future when its outcome is known, or at once if it is.

        It runs in the client's own thread: keep it short, and do not wait in it.
        """
        with self._condition:
            if self._state != _FINISHED:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(fn)
                self._watched = True
                return
        self._call(fn)

    def __repr__(self) -> str:
        if self._state != _FINISHED:
            state = "accepted" if self._accepted else "pending"
        else:
            state = "done" if self._exception is None else type(self._exception).__name__
        return f"<{type(self).__name__} {self.job_id} {state}>"

    # -------------------------------------------------------------- for the client

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` when the outcome is known, or now if it is."""
        with self._condition:
            self._waiters.append(watcher)
            if self._state == _FINISHED:
                watcher.add_result(self)

    def watch_accepted(self, watcher: Watcher) -> None:
        """Tell `watcher` when the job is committed or its outcome is known, or now if it is."""
        with self._condition:
            if self._accepted or self._state == _FINISHED:
                watcher.add_result(self)
                return
            self._accept_watchers = [*(self._accept_watchers or ()), watcher]
            self._watched = True

    def note_progress(self, attempt: int, body: bytes) -> None:
        """Keep the latest word of the newest attempt."""
        if attempt >= self._progress_attempt:
            self._progress_attempt = attempt
            self._progress = body

    # -------------------------------------------------------------- inside

    def _wait(self, timeout: float | None) -> None:
        self.desk.check_may_wait()
        latch = _Latch()
        self.watch(latch)
        try:
            latch.wait(timeout)
        finally:
            with self._condition:
                self._waiters.remove(latch)
        if self._state != _FINISHED:
            raise TimeoutError(f"job {self.job_id!r} has no outcome after {timeout} s")

    def _tell_watchers(self) -> None:
        """Wake those who wait. Called with the condition held, once, when the outcome is set."""
        for watcher in self._watchers or ():
            if self._exception is None:
                watcher.add_result(self)
            else:
                watcher.add_exception(self)
        self._tell_accepted()

    def _tell_accepted(self) -> None:
        for watcher in self._accept_watchers or ():
            watcher.add_result(self)
        self._accept_watchers = None

    def _run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for fn in callbacks or ():
            self._call(fn)

    def _call(self, fn: Callable[[Any], object]) -> None:
        try:
            fn(self)
        except Exception:  # noqa: BLE001 - a user's mistake must not end the client
            _log.exception("a callback of job %s failed", self.job_id)


# What a future has sooner or later; rarer attributes may cost more.
_ATTRIBUTES: Final = (
    "desk", "job_id", "body", "terms", "_accepted", "_output", "_facts", "_state", "_exception",
    "_watched", "_watchers", "_callbacks", "blobs",
)  # fmt: skip


def _lay_out(kind: type[JobFuture]) -> None:
    """Show the interpreter one complete future before any other.

    CPython keeps attributes inside an object as long as they are those that the first few objects
    of its class had; one that comes later moves them all to a dict, which made finishing a job six
    times as dear. Thousands of futures are made before the first one is finished.
    """
    whole = kind.__new__(kind)
    for name in (*_ATTRIBUTES, *kind._more_attributes):
        setattr(whole, name, None)


_lay_out(JobFuture)


# ------------------------------------------------------------------ a run at a time


def accept(condition: Condition, futures: Iterable[JobFuture]) -> None:
    """These jobs are committed."""
    with condition:
        for future in futures:
            future._accepted = True
            if future._watched:
                future._tell_accepted()


def finish_run(condition: Condition, run: ResultRun, futures: list[JobFuture | None]) -> None:
    """Set the results of a run: `futures[i]` is the job at offset i, or None."""
    facts = Facts(run.worker, run.submitted, run.leased, run.finished)
    watched = []
    with condition:
        for future, output in zip(futures, run.outputs, strict=True):
            if future is None:
                continue
            future._output = output
            future._facts = facts
            future._accepted = True
            future.body = b""
            future._state = _FINISHED
            if future._watched:
                watched.append(future)
        if run.attempts or run.notes:
            _set_particulars(run, futures, facts)
        for future in watched:
            future._tell_watchers()
    for future in watched:
        future._run_callbacks()


def _set_particulars(run: ResultRun, futures: list[JobFuture | None], facts: Facts) -> None:
    for offset in {**run.attempts, **run.notes}:
        future = futures[offset] if 0 <= offset < len(futures) else None
        if future is not None:
            future._facts = msgspec.structs.replace(
                facts, attempt=run.attempts.get(offset, 1), note=run.notes.get(offset)
            )


def fail(condition: Condition, pairs: Iterable[tuple[JobFuture, errors.EkidenError]]) -> None:
    """Set how these ended without a result."""
    watched = []
    with condition:
        for future, error in pairs:
            if future._state == _FINISHED:
                continue
            future._exception = error
            future.body = b""
            future._state = _FINISHED
            if future._watched:
                watched.append(future)
        for future in watched:
            future._tell_watchers()
    for future in watched:
        future._run_callbacks()


def error_of_end(ended: Ended) -> errors.EkidenError:
    """The exception that a job's end without a result stands for."""
    if ended.state == DONE:
        return errors.ResultGone(
            f"job {ended.id!r} is done, but its result is no longer kept",
            remedy="raise the broker's result retention, or fetch results sooner",
        )
    if ended.state == CANCELLED:
        return errors.JobCancelled(ended.id, ended.reason or "cancelled")
    causes = [msgspec.to_builtins(_named(cause)) for cause in ended.causes]
    failed = errors.JobFailed(ended.id, causes, ended.reason)
    failed.detail = ended.causes[-1].detail if ended.causes else b""
    return failed


def _named(cause: Any) -> dict[str, Any]:
    """All that a person can read of it."""
    facts = msgspec.structs.asdict(cause)
    del facts["detail"]
    if cause.note is not None:
        facts["note"] = msgspec.structs.asdict(cause.note)
        del facts["note"]["form"]
    return facts


def _opened(body: bytes) -> Any:
    """A progress note as it was given: JSON, else text, else bytes."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        pass
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body
