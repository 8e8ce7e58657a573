"""Python functions as jobs: how they are pickled, brought to the grid, and their values read.

A function travels once: its pickle goes into the broker's store under its hash, and jobs only name
it. Functions of modules travel as a name, to be imported by whoever runs them; lambdas, local ones
and those of `__main__` travel whole, with what they refer to (`cloudpickle` decides). Arguments are
pickled for each call, values and exceptions for each result; nothing is opened before it is looked
at, and only by the process that made the call or by a runner.

Before the first job of a function is submitted, the broker must have the function, and it is asked
whether workers could run it at all. Jobs made meanwhile are *parked* and handed over after that.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from time import monotonic
from typing import Any, Final

import cloudpickle
import msgspec

from ekiden import errors, limits
from ekiden.client import futures
from ekiden.client.contract import Terms
from ekiden.client.core import Core
from ekiden.client.futures import JobFuture
from ekiden.client.ids import IdMaker
from ekiden.client.options import JobOptions, TermsBook
from ekiden.core.subjects import match
from ekiden.model.jobs import (
    CANNOT_START,
    FORM_FUNCTION,
    OOM,
    OUT_STORED,
    SIGNAL,
    WORKER_LOST,
)
from ekiden.model.work import FileRef, Function

PYTHON: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"

# An exception is the function's answer, not trouble: it is not tried again unless asked for.
RETRY_ON: Final = (WORKER_LOST, CANNOT_START, OOM, SIGNAL)

# A function's pickle: with data in its globals or its closure it may be large, but every process
# that runs it holds it.
FUNCTION_BYTES_MAX: Final = 16 << 20

# The store forgets what was not used for weeks. A function that is still called is put again this
# often, which costs a question: what the broker has is not sent again.
FRESH_S: Final = 24 * 3600.0

# Functions whose pickle is kept; a caller that makes a new lambda for every call must not fill
# memory.
_KEPT_MAX: Final = 1000

_PROTOCOL: Final = 5
_SUBJECTS: Final = "job.function."
_NOT_OPENED: Final = object()

_decode_ref = msgspec.msgpack.Decoder(FileRef).decode
_encode = msgspec.msgpack.Encoder().encode


# ------------------------------------------------------------------ futures


class RemoteTraceback(Exception):
    """Where a function raised, as text: the cause of the exception that its future raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class CallCancelled(errors.JobCancelled, CancelledError):
    """A call was cancelled; both ekiden's error and that of `concurrent.futures`."""


class _Bytes:
    """A value that was fetched and not opened."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Opening(JobFuture):
    """What futures of functions have in common, whatever they are waited for with.

    `_value` is the value once it was opened, its bytes once they were fetched, or neither yet.
    """

    _more_attributes = ("_value",)
    _value: Any = _NOT_OPENED

    @property
    def _stored(self) -> FileRef | None:
        """Where the value lies, if it did not come with the news and was not fetched."""
        note = self._facts.note if self._facts is not None else None
        if note is None or note.form != OUT_STORED or self._value is not _NOT_OPENED:
            return None
        return _decode_ref(self._output)

    def _open_value(self) -> Any:
        """The value. Its bytes must be here."""
        if type(self._value) is _Bytes:
            self._value = _opened(self._value.data, self.job_id)
        elif self._value is _NOT_OPENED:
            self._value = _opened(self._output, self.job_id)
        return self._value

    def _open_error(self) -> BaseException | None:
        """How the function ended without a value: with its own exception, if that came back."""
        error = self._exception
        if type(error) is errors.JobFailed and error.detail:
            self._exception = error = _own_exception(error)
        elif type(error) is errors.JobCancelled:
            self._exception = error = CallCancelled(error.job_id, error.reason)
        return error

    def _fetch(self, ref: FileRef) -> Any:
        core = self.desk
        assert isinstance(core, Core)
        return core.fetch_blob(ref.blob, ref.size, None)

    def _run_callbacks(self) -> None:
        """A callback cannot wait, so what it may look at is fetched before it is called."""
        ref = self._stored if self._callbacks else None
        if ref is None:
            super()._run_callbacks()
            return
        try:
            self._fetch(ref).add_done_callback(self._fetched)
        except errors.EkidenError:
            super()._run_callbacks()

    def _fetched(self, reply: Any) -> None:
        if not reply.cancelled() and reply.exception() is None:
            self.fetched(reply.result())
        super()._run_callbacks()

    def fetched(self, data: bytes) -> None:
        """The bytes of the value are here."""
        self._value = _Bytes(data)


class FunctionFuture(Opening):
    """A call of a function: `result()` is its value, `exception()` what it raised.

    `concurrent.futures.wait` and `as_completed` take it like any other. An exception has a
    `RemoteTraceback` as its cause. What kept the function from ending by itself is a `JobFailed`:
    a crash, a lost worker, a time limit.
    """

    def result(self, timeout: float | None = None) -> Any:
        """The function's value, when it is there. Raises what it raised, or TimeoutError."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # Or the exception would hold this frame, and that the exception.
        ref = self._stored
        if ref is not None:
            self.desk.check_may_wait()
            self.fetched(self._fetch(ref).result(timeout))
        return self._open_value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the function raised, or why it has no value; None if it has one."""
        if not self.done():
            self._wait(timeout)
        return self._open_error()


def _opened(data: bytes, job_id: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise errors.WrongUsage(
            f"the value of job {job_id!r} cannot be opened here: {type(error).__name__}: {error}",
            remedy="import what it is made of before you look at it",
        ) from error


def _own_exception(failed: errors.JobFailed) -> BaseException:
    """The function's exception, or the failure itself if it cannot be had here."""
    try:
        error, text = pickle.loads(failed.detail)
    except Exception as trouble:  # noqa: BLE001 - whatever a user's type may raise
        failed.detail = b""
        failed.__cause__ = trouble
        return failed
    assert isinstance(error, BaseException)
    error.__cause__ = RemoteTraceback(text)
    return error


# ------------------------------------------------------------------ functions


class CallableJobs:
    """One function as this client knows it: its pickle, and whether the broker has it."""

    def __init__(self, home: Functions, name: str, code: bytes, blob: str) -> None:
        self.name = name
        self.code = code
        self.parked: list[JobFuture] = []
        """Made, and not handed over before the broker has the function."""
        self.prepared: Any = None
        """A reply that is set when the parked are handed over; None while there is no need."""
        self.seen: object = None
        """The welcome of the broker that has the function."""
        self.fresh_until = 0.0
        """Until then the broker is sure to keep it."""
        self._home = home
        self._terms = TermsBook()
        self._plain: Terms | None = None
        self._shared = _encode(Function(blob, len(code), PYTHON, name))
        self._blobs = ((blob, len(code)),)
        self.subject = f"{_SUBJECTS}py{PYTHON.replace('.', '')}.{name}"

    def make(self, args: Any, kwargs: Any, options: JobOptions) -> Any:
        """A future for one call that is not handed over yet."""
        body = packed((args, kwargs))
        if len(body) > limits.PAYLOAD_BYTES_MAX:
            raise self._too_large(len(body))
        home = self._home
        return home.future_type(home.core, home.ids.one(), body, self._terms_for(options))

    def make_many(self, items: Iterable[Any], options: JobOptions) -> list[Any]:
        """Futures for a call with each item, in order; all are checked first."""
        return self.make_calls(((item,) for item in items), options)

    def make_calls(self, calls: Iterable[tuple[Any, ...]], options: JobOptions) -> list[Any]:
        """Futures for a call with each tuple of arguments."""
        bodies = [packed((args, {})) for args in calls]
        largest = max(map(len, bodies), default=0)
        if largest > limits.PAYLOAD_BYTES_MAX:
            raise self._too_large(largest)
        home, terms = self._home, self._terms_for(options)
        make, core = home.future_type, home.core
        ids = home.ids.many(len(bodies))
        return [make(core, job_id, body, terms) for job_id, body in zip(ids, bodies, strict=True)]

    def _terms_for(self, options: JobOptions) -> Terms:
        if not options and self._plain is not None:
            return self._plain
        whole: JobOptions = {"subject": self.subject, "retry_on": RETRY_ON, **options}
        terms = self._terms.terms(self.name, FORM_FUNCTION, whole, self._shared, self._blobs)
        if not options:
            self._plain = terms
        return terms

    def _too_large(self, size: int) -> errors.TooLarge:
        return errors.TooLarge(
            f"the arguments of {self.name!r} have {size:,} bytes, over the limit of "
            f"{limits.PAYLOAD_BYTES_MAX:,} for each call",
            remedy="split them, let the function refer to what all calls share (it travels once), "
            "or pass where the data is",
        )


class Functions:
    """The functions of one client. Callers in several threads may share it."""

    def __init__(self, core: Core, future_type: type[Opening]) -> None:
        self.core = core
        self.future_type = future_type
        self.ids = IdMaker()
        self._by_id: dict[int, tuple[Any, CallableJobs]] = {}
        self._by_blob: OrderedDict[str, CallableJobs] = OrderedDict()
        self._lock = threading.Lock()
        self._checked: object = None
        """The welcome of the broker whose workers were looked at."""

    def of(self, function: Callable[..., Any]) -> CallableJobs:
        """The jobs of a function. It is pickled when it is first seen, as it is then."""
        found = self._by_id.get(id(function))
        if found is not None and found[0]() is function:
            return found[1]
        return self._add(function)

    def _add(self, function: Callable[..., Any]) -> CallableJobs:
        code = _code_of(function)
        blob = hashlib.sha256(code).hexdigest()
        with self._lock:
            jobs = self._by_blob.get(blob)
            if jobs is None:
                jobs = self._by_blob[blob] = CallableJobs(self, safe_name(function), code, blob)
                if len(self._by_blob) > _KEPT_MAX:
                    self._by_blob.popitem(last=False)
        key = id(function)
        try:
            known = weakref.ref(function, lambda _: self._by_id.pop(key, None))
        except TypeError:
            return jobs  # It is pickled again next time.
        self._by_id[key] = (known, jobs)
        return jobs

    # -------------------------------------------------------------- before the first submit

    def is_ready(self, jobs: CallableJobs) -> bool:
        """Whether the broker has the function: it said so since we are connected to it.

        While there is no connection, what it said before counts: jobs wait anyhow, and the next
        call after the reconnect sees to it again.
        """
        if jobs.seen is None or jobs.prepared is not None or monotonic() > jobs.fresh_until:
            return False
        welcome = self.core.machine.link.welcome
        return welcome is None or welcome is jobs.seen

    def park(self, jobs: CallableJobs, made: list[Any]) -> None:
        """Hand these over as soon as the broker has their function."""
        with self._lock:
            jobs.parked += made
            if jobs.prepared is not None:
                return
            jobs.prepared = self.core.new_reply()
        try:
            self.core.put_blob(jobs.code).add_done_callback(lambda reply: self._put(jobs, reply))
        except errors.EkidenError:
            self._release(jobs, None)
            raise

    def _put(self, jobs: CallableJobs, reply: Any) -> None:
        """On the client's loop: the broker has the function, or there will be no broker."""
        welcome = self.core.machine.link.welcome
        error = errors.Closed("the client is closed") if reply.cancelled() else reply.exception()
        if error is None and (welcome is None or welcome is not self._checked):
            try:
                asked = self.core.ask("workers", {})
            except errors.EkidenError as closed:
                error = closed
            else:
                asked.add_done_callback(lambda reply: self._looked(jobs, welcome, reply))
                return
        self._conclude(jobs, welcome, error)

    def _looked(self, jobs: CallableJobs, welcome: object, reply: Any) -> None:
        """On the client's loop: which workers there are. No answer is no reason to stop."""
        if reply.cancelled() or reply.exception() is not None:
            self._conclude(jobs, welcome, None)
            return
        error = _mismatch(jobs.subject, reply.result().get("workers", ()))
        if error is None:
            self._checked = welcome
        self._conclude(jobs, welcome, error)

    def _conclude(self, jobs: CallableJobs, welcome: object, error: BaseException | None) -> None:
        if error is None:
            jobs.seen = welcome or jobs
            jobs.fresh_until = monotonic() + FRESH_S
        elif not isinstance(error, errors.EkidenError):
            error = errors.Fault(f"the function {jobs.name!r} could not be stored: {error}")
        self._release(jobs, error)

    def _release(self, jobs: CallableJobs, error: errors.EkidenError | None) -> None:
        with self._lock:
            parked, jobs.parked = jobs.parked, []
            prepared, jobs.prepared = jobs.prepared, None
        if error is not None:
            futures.fail(self.core.condition, [(future, error) for future in parked])
        elif parked:
            self.core.budget -= len(parked)
            self.core.inbox.extend(parked)
            self.core.poke()
        if prepared is not None and not prepared.done():
            prepared.set_result(None)

    def preparing(self) -> list[Any]:
        """Replies for functions that are on their way."""
        return [jobs.prepared for jobs in list(self._by_blob.values()) if jobs.prepared is not None]


def _mismatch(subject: str, workers: Iterable[dict[str, Any]]) -> errors.PythonMismatch | None:
    """Whether functions are run here, but by other versions of Python only."""
    patterns = [pattern for worker in workers for pattern in worker.get("patterns", ())]
    if any(match(pattern, subject) for pattern in patterns):
        return None
    others = {
        pattern.split(".")[2].removeprefix("py")
        for pattern in patterns
        if pattern.startswith(f"{_SUBJECTS}py")
    }
    if not others:
        return None  # Nobody runs functions yet: the jobs wait for whoever will.
    shown = ", ".join(f"{digits[:1]}.{digits[1:]}" for digits in sorted(others))
    return errors.PythonMismatch(
        f"this is Python {PYTHON}, and the workers run functions of Python {shown} only",
        remedy=f"start workers with Python {PYTHON}, or call from one of theirs",
    )


# ------------------------------------------------------------------ pickles


def packed(value: Any) -> bytes:
    """A pickle that opens elsewhere: what is only a name in this `__main__` travels whole."""
    try:
        data = pickle.dumps(value, _PROTOCOL)
        if b"__main__" not in data:
            return data
    except Exception:  # noqa: BLE001 - the other pickler says what is wrong
        pass
    try:
        whole: bytes = cloudpickle.dumps(value, _PROTOCOL)
    except Exception as error:
        raise errors.WrongUsage(
            f"the arguments cannot be pickled: {error}",
            remedy="pass plain data: an open file, a lock or a connection cannot travel",
        ) from error
    return whole


def _code_of(function: Callable[..., Any]) -> bytes:
    if not callable(function):
        raise errors.WrongUsage(f"{function!r} is not callable", remedy="give a function")
    try:
        code: bytes = cloudpickle.dumps(function, _PROTOCOL)
    except Exception as error:
        raise errors.WrongUsage(
            f"the function {safe_name(function)!r} cannot be pickled: {error}",
            remedy="it must not refer to open files, locks or connections: open them inside",
        ) from error
    if len(code) > FUNCTION_BYTES_MAX:
        raise errors.TooLarge(
            f"the function {safe_name(function)!r} has {len(code):,} bytes with what it refers to, "
            f"over the limit of {FUNCTION_BYTES_MAX:,}",
            remedy="pass large data as a file, or load it inside the function",
        )
    return code


def safe_name(function: Any) -> str:
    """A function's name as a token of a subject."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return re.sub(r"[^A-Za-z0-9_-]+", "-", str(name)).strip("-")[:100] or "function"
