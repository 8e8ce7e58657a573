"""What users write: functions that take a `Job` and return its result.

A registry maps patterns to handlers. The most exact pattern that picks a job's subject wins; among
equals the one registered first. A job whose subject no pattern picks is looked up by its name, as
`job.assign.<name>`, so that a worker that subscribes to other subjects can still run named work.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from ekiden import limits
from ekiden.core.subjects import check_pattern, match
from ekiden.errors import TooLarge, WrongUsage
from ekiden.model.jobs import (
    CANNOT_START,
    FORM_CALL,
    HANDLER_ERROR,
    RESULT_TOO_LARGE,
    Call,
    Spec,
)
from ekiden.wire.messages import AssignRun

# A progress note is a line or a few numbers; results have their own way.
PROGRESS_BYTES_MAX: Final = 64 << 10

_TRACEBACK_FRAMES: Final = 5
_FOUND_MAX: Final = 10_000

_decode_call = msgspec.msgpack.Decoder(Call).decode
_encode_json = msgspec.json.encode

F = TypeVar("F", bound=Callable[..., Any])


class Trouble(Struct, frozen=True, gc=False):
    """In place of an output: why there is none."""

    cause: str
    message: str


# ------------------------------------------------------------------ jobs


class Batch:
    """Attempts of one grant that share a spec and a handler, as the executor keeps them."""

    __slots__ = ("ended", "first", "grant", "handler", "progress", "run", "spec")

    def __init__(
        self,
        run: AssignRun,
        spec: Spec,
        handler: Handler,
        progress: Callable[[Batch, int, bytes], None],
    ) -> None:
        self.run = run
        self.spec = spec
        self.handler = handler
        self.grant = run.grant
        self.first = run.first
        self.progress = progress
        self.ended: set[int] = set()
        """Indices whose attempt was cancelled, timed out or is nobody's any more."""


class Job(Struct, gc=False):
    """One attempt of a job, as its handler sees it."""

    payload: bytes
    """What the client sent."""
    args: Any
    """Arguments the client gave, in order; empty if there were none."""
    _at: int
    _batch: Any

    @property
    def id(self) -> str:
        """The job's id."""
        job_id: str = self._batch.run.ids[self._at]
        return job_id

    @property
    def attempt(self) -> int:
        """1 for the first try; grows with every further one."""
        attempts = self._batch.run.attempts
        return attempts[self._at] if attempts else 1

    @property
    def name(self) -> str:
        """The name the job was submitted under."""
        name: str = self._batch.spec.name
        return name

    @property
    def subject(self) -> str:
        """The subject the job was sent to."""
        subject: str = self._batch.spec.route.subject
        return subject

    @property
    def client(self) -> str:
        """Who submitted it."""
        client: str = self._batch.run.client
        return client

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the result any more: cancelled, or over its time limit.

        A plain function cannot be interrupted. One that runs long should look at this now and
        then and return; what it returns is not used.
        """
        return self._at in self._batch.ended

    def json(self) -> Any:
        """The payload, read as JSON."""
        return msgspec.json.decode(self.payload)

    def progress(self, value: Any, text: str = "") -> None:
        """Tell whoever submitted the job how far it is: `progress(0.4, "step 3")`. Cheap; too
        frequent notes are left out, the last one is not. It may be lost, and never fails because
        nobody listens."""
        self._batch.progress(self._batch, self._at, noted(value, text))

    def __repr__(self) -> str:
        return f"<Job {self.id} subject={self.subject} attempt={self.attempt}>"


def call_of(batch: Batch, at: int) -> Job | Trouble:
    """The job of a body that has more than a payload."""
    try:
        call = _decode_call(batch.run.bodies[at])
    except (msgspec.DecodeError, RecursionError) as error:
        return Trouble(CANNOT_START, f"the job's body cannot be read: {error}")
    return Job(call.payload, call.args, at, batch)


def job_of(batch: Batch, at: int) -> Job | Trouble:
    """The job at this place of the batch."""
    if batch.spec.form == FORM_CALL:
        return call_of(batch, at)
    return Job(batch.run.bodies[at], (), at, batch)


# ------------------------------------------------------------------ results


def encoded(value: Any) -> bytes:
    """A handler's value as bytes: text as UTF-8, None as nothing, the rest as JSON."""
    if isinstance(value, bytes):
        return value
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return _encode_json(value)


def noted(value: Any, text: str = "") -> bytes:
    """A note of progress as it travels: the value, or with a text both."""
    body = encoded({"value": value, "text": text} if text else value)
    if len(body) > PROGRESS_BYTES_MAX:
        raise TooLarge(
            f"a progress note of {len(body):,} bytes is over the limit of {PROGRESS_BYTES_MAX:,}",
            remedy="return large data as the result",
        )
    return body


def result_of(value: Any) -> bytes | Trouble:
    """What a handler returned, as the output of its attempt, or why it cannot be one."""
    if isinstance(value, Trouble):
        return value
    try:
        output = encoded(value)
    except Exception as error:  # noqa: BLE001  (whatever a user's type may raise)
        kind = type(value).__name__
        return Trouble(
            HANDLER_ERROR,
            f"the handler returned {kind}, which is neither bytes, text nor JSON: {error}",
        )
    if len(output) > limits.PAYLOAD_BYTES_MAX:
        return Trouble(
            RESULT_TOO_LARGE,
            f"the result has {len(output):,} bytes; the most is {limits.PAYLOAD_BYTES_MAX:,}: "
            f"write it to a file or a store and return where it is",
        )
    return output


def trouble_of(error: BaseException) -> Trouble:
    """An exception out of a handler: its type and text, then the innermost lines that led to it."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (whatever a user's type may raise)
        text = "(its text cannot be shown)"
    head = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # The first frame is ours.
    frames = traceback.extract_tb(error.__traceback__)[1:][-_TRACEBACK_FRAMES:]
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
    message = "\n".join([head[: limits.ERROR_TEXT_MAX // 2], *lines])[: limits.ERROR_TEXT_MAX]
    # What cannot be encoded cannot be told: a lone surrogate in a message must not cost the ack.
    return Trouble(HANDLER_ERROR, message.encode("utf-8", "replace").decode())


# ------------------------------------------------------------------ registry


class Handler:
    """A function and what was learned about it."""

    __slots__ = ("function", "is_async", "mean_ns", "pattern")

    def __init__(self, pattern: str, function: Callable[[Job], Any]) -> None:
        self.pattern = pattern
        self.function = function
        called = getattr(function, "__call__", None)  # noqa: B004  (an object with async __call__)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        self.mean_ns = 1_000_000
        """How long a run takes, of late. Unknown counts as long: nothing shall wait behind it."""


class Handlers:
    """Patterns and the functions behind them."""

    def __init__(self) -> None:
        self._by_pattern: dict[str, Handler] = {}
        self._ranked: list[Handler] = []
        self._found: dict[tuple[str, str], Handler | None] = {}

    def __len__(self) -> int:
        return len(self._by_pattern)

    @property
    def patterns(self) -> list[str]:
        """All patterns, in the order of registration."""
        return list(self._by_pattern)

    def items(self) -> list[tuple[str, Callable[[Job], Any]]]:
        """Patterns with their functions, in the order of registration."""
        return [(pattern, handler.function) for pattern, handler in self._by_pattern.items()]

    def add(self, pattern: str, function: F) -> F:
        """Let `function` handle what `pattern` picks. Each pattern has one handler."""
        check_pattern(pattern)
        if not callable(function):
            raise WrongUsage(f"the handler for {pattern!r} is not callable: {function!r}")
        if pattern in self._by_pattern:
            raise WrongUsage(
                f"pattern {pattern!r} has a handler already",
                remedy="give each handler a pattern of its own",
            )
        if len(self._by_pattern) >= limits.PATTERNS_PER_WORKER:
            raise WrongUsage(f"a worker takes at most {limits.PATTERNS_PER_WORKER:,} patterns")
        self._by_pattern[pattern] = Handler(pattern, function)
        self._ranked = sorted(self._by_pattern.values(), key=_vagueness)
        self._found.clear()
        return function

    def find(self, spec: Spec) -> Handler | None:
        """The handler for jobs of this spec."""
        key = (spec.route.subject, spec.name)
        if key in self._found:
            return self._found[key]
        found = self._search(key[0]) or self._search(f"job.assign.{key[1]}")
        if len(self._found) >= _FOUND_MAX:
            self._found.clear()
        self._found[key] = found
        return found

    def _search(self, subject: str) -> Handler | None:
        for handler in self._ranked:
            if match(handler.pattern, subject):
                return handler
        return None

    def missing(self, spec: Spec) -> Trouble:
        """The sentence for a job that nobody here can run."""
        known = ", ".join(self.patterns[:10]) or "none"
        more = f" and {len(self) - 10} more" if len(self) > 10 else ""
        return Trouble(
            CANNOT_START,
            f"this worker has no handler for subject {spec.route.subject!r} or name "
            f"{spec.name!r}; it handles: {known}{more}",
        )


def _vagueness(handler: Handler) -> tuple[int, int, int]:
    """Orders handlers from exact to vague; sorting is stable, so equals keep their order."""
    tokens = handler.pattern.split(".")
    return (tokens[-1] == ">", tokens.count("*"), -len(tokens))
