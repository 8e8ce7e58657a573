"""Nouns of a job's life that wire, journal and book share.

A `Spec` is what many jobs of one submit have in common; it travels as opaque msgpack and is decoded
once per distinct content. What differs from job to job (id, body) travels in columns beside it.

The *body* is the job's own content and is opaque to the broker: the plain payload (`FORM_PLAIN`),
msgpack of `Call` (`FORM_CALL`), or what a program or a function is called with (see `work`). It is
opened by the worker alone, and so is `Spec.shared`.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from msgspec import Struct

from ekiden.model.caches import BlobRef, CacheUse

JobId: TypeAlias = str
ClientId: TypeAlias = str
WorkerId: TypeAlias = str
SessionId: TypeAlias = str
GrantNo: TypeAlias = int
Index: TypeAlias = int
WallTime: TypeAlias = int
"""Nanoseconds since 1970 by somebody's clock. For display, and for wall-time wishes of users."""

FORM_PLAIN: Final = 0
FORM_CALL: Final = 1
FORM_PROGRAM: Final = 2
FORM_FUNCTION: Final = 3

FORMS: Final = (FORM_PLAIN, FORM_CALL, FORM_PROGRAM, FORM_FUNCTION)

# How to read an output: as it is; as `work.ProgramOutput`; or as a `work.FileRef` to bytes that lie
# in the broker's store because they were too many to travel with the job.
OUT_PLAIN: Final = 0
OUT_PROGRAM: Final = 1
OUT_STORED: Final = 2


class Call(Struct, array_like=True, frozen=True):
    """Body of a job that has more than a payload."""

    payload: bytes = b""
    args: list[Any] = []


class Needs(Struct, array_like=True, frozen=True, order=True, cache_hash=True):
    """What a worker must have to run the job. Resources are integers: cpu in thousandths."""

    cpu_milli: int = 0
    mem_mb: int = 0
    labels: tuple[tuple[str, str], ...] = ()
    """Pairs sorted by name; every one must be among the worker's labels."""


class Route(Struct, array_like=True, frozen=True, cache_hash=True):
    """Where a job waits and who may take it: jobs of one route are alike to the planner."""

    subject: str
    needs: Needs = Needs()
    key: str = ""
    """Sticky key: jobs of one key go to one worker while it lives."""
    pin: str = ""
    """Only this worker may take the job."""
    avoid: str = ""
    """Set by the book on a retry, never by a client: this worker only if no other has room."""
    data: tuple[str, ...] = ()
    """Ids of the caches in `Spec.caches`: workers that have them are preferred."""


class Spec(Struct, array_like=True, frozen=True):
    """What the jobs of one submit share. Zero means "the group's default"."""

    name: str
    route: Route
    priority: int = 0
    timeout_ns: int = 0
    max_attempts: int = 0
    retry_on: tuple[str, ...] | None = None
    form: int = FORM_PLAIN
    run: str = ""
    """Name of the run the job belongs to, for filters."""
    shared: bytes = b""
    """What the worker must know of all these jobs, by form: `work.Program` or `work.Function`."""
    caches: tuple[CacheUse, ...] = ()
    """Data that must lie on the worker before any of these jobs begins."""
    blobs: tuple[BlobRef, ...] = ()
    """Blobs of the store that `shared` refers to: kept while the input of any such job is."""


# ------------------------------------------------------------------ states as users see them

DELAYED: Final = "delayed"
QUEUED: Final = "queued"
LEASED: Final = "leased"
RUNNING: Final = "running"
CANCELLING: Final = "cancelling"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"

TERMINAL: Final = (DONE, FAILED, CANCELLED)

# ------------------------------------------------------------------ why an attempt ended

HANDLER_ERROR: Final = "handler_error"
EXIT_CODE: Final = "exit_code"
SIGNAL: Final = "signal"
TIMEOUT: Final = "timeout"
OOM: Final = "oom"
CANNOT_START: Final = "cannot_start"
WORKER_LOST: Final = "worker_lost"
CANCEL_CONFIRMED: Final = "cancelled"
EXPIRED: Final = "expired"
POISON: Final = "poison"
RESULT_TOO_LARGE: Final = "result_too_large"

CAUSES: Final = (
    HANDLER_ERROR, EXIT_CODE, SIGNAL, TIMEOUT, OOM, CANNOT_START, WORKER_LOST, CANCEL_CONFIRMED,
    EXPIRED, POISON, RESULT_TOO_LARGE,
)  # fmt: skip

# A program that said no, or a run that was too slow, will say the same again; these may not.
RETRY_ON_DEFAULT: Final = (WORKER_LOST, CANNOT_START, OOM, SIGNAL, HANDLER_ERROR)


class Note(Struct, array_like=True, frozen=True):
    """What is worth keeping of a run beside its output. Absent for a quick plain handler."""

    exit_code: int = 0
    ran_ns: int = 0
    cpu_ns: int = 0
    peak_kb: int = 0
    form: int = OUT_PLAIN
    """How to read the output."""


class Cause(Struct, array_like=True, frozen=True):
    """How one attempt ended without a result; `jobs show` prints one line of these per attempt."""

    attempt: int
    worker: WorkerId
    cause: str
    message: str
    time: int
    burned: bool = True
    """False if the attempt never began: it does not count against max_attempts."""
    note: Note | None = None
    detail: bytes = b""
    """More than words, for the client alone: of a function, the exception itself."""
