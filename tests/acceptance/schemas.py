"""What `--json` promises: these names with these types. More may be added, none may go."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Bytes = str | dict[str, str]
"""Text, or {"base64": …} where it is none."""

State = Literal[
    "delayed", "queued", "leased", "running", "cancelling", "done", "failed", "cancelled"
]


class Version(Struct):
    version: str
    protocol: int
    journal: int
    python: str


class Ready(Struct):
    """`up` and `broker`, once they serve."""

    ready: Literal[True]
    address: str


class Accepted(Struct):
    """`submit`."""

    id: str
    name: str
    accepted: Literal[True]


class Done(Struct):
    """`submit --wait` and `wait`, for a job with a result. Times are wall nanoseconds."""

    id: str
    state: Literal["done"]
    output: Bytes
    exit_code: int
    attempt: int
    worker: str
    submitted: int
    leased: int
    finished: int


class Cause(Struct):
    attempt: int
    worker: str
    cause: str
    message: str
    time: int
    burned: bool


class Trouble(Struct):
    """What is in every `error`."""

    code: str
    message: str
    remedy: str


class JobTrouble(Trouble):
    job: str
    causes: list[Cause] = []


class NotDone(Struct):
    """`submit --wait` and `wait`, for a job without a result."""

    id: str
    state: Literal["failed", "cancelled"]
    error: JobTrouble


class Refused(Struct):
    """On stderr, whenever a command ends with 2, 3 or 4."""

    error: Trouble


class Listed(Struct):
    """`jobs list`, `dlq list`: one a line."""

    id: str
    state: State
    name: str
    subject: str
    client: str
    run: str
    priority: int
    attempt: int
    generation: int
    submitted: int
    worker: str
    leased: int
    finished: int


class Shown(Listed):
    """`jobs show`, `dlq show`."""

    causes: list[Cause]
    why: str
    exit_code: int
    input_bytes: int | None = None
    output_bytes: int | None = None


class Cancelled(Struct):
    cancelled: int
    cancelling: int
    settled: int
    unknown: list[str]


class Replayed(Struct):
    replayed: int
    skipped: int
    unknown: list[str]


class Purged(Struct):
    purged: int
    skipped: int
    unknown: list[str]


class Worker(Struct):
    id: str
    host: str
    state: Literal["ready", "draining", "quarantined", "silent"]
    slots: int
    credit: int
    held: int
    running: int
    patterns: list[str]
    labels: dict[str, str]
    load: int


class Workers(Struct):
    workers: list[Worker]


class WorkerState(Struct):
    worker: str
    state: str


class JobCounts(Struct):
    delayed: int
    queued: int
    leased: int
    cancelling: int
    done: int
    failed: int
    cancelled: int
    accepted_total: int
    settled_total: int
    retried_total: int
    stale_total: int
    evicted_total: int


class QueueCounts(Struct):
    subject: str
    ready: int
    leased: int
    oldest_wait_s: float


class WorkerCounts(Struct):
    connected: int
    draining: int
    quarantined: int
    slots: int
    credit: int


class JournalFacts(Struct):
    segments: int
    bytes: int
    snapshot_index: int
    disk_free: int


class LoopFacts(Struct):
    turns: int
    turn_ms_max: float
    turn_ms_p99: float


class Stats(Struct):
    group: str
    broker: str
    epoch: int
    software: str
    uptime_s: float
    index: int
    sync: Literal["always", "unsafe-interval", "unsafe-never"]
    jobs: JobCounts
    queues: list[QueueCounts]
    workers: WorkerCounts
    clients: int
    journal: JournalFacts
    loop: LoopFacts
    memory_mb: float


class Published(Struct):
    subject: str
    bytes: int


class Message(Struct):
    """`sub`: one a line."""

    subject: str
    payload: Bytes


class Event(Struct):
    """`log dump`: one a line; which further fields there are depends on the event."""

    index: int
    at: str
    event: str
    job: str = ""
    worker: str = ""
    attempt: int = 0


class Problem(Struct):
    file: str
    offset: int
    message: str


class File(Struct):
    name: str
    kind: str
    bytes: int
    records: int
    first: int
    last: int


class Report(Struct):
    """`log verify`."""

    ok: bool
    problems: list[Problem]
    files: list[File]
    notes: list[Any]


# ------------------------------------------------------------------ caches


class CacheWorker(Struct):
    """How a worker stands with a cache."""

    id: str
    status: Literal["pending", "fetching", "ok", "skipped", "failed", "gone"]
    text: str
    done: int
    total: int


class CachePut(Struct):
    """`cache put`."""

    id: str
    manifest: str
    state: Literal["new", "same", "widened"]
    files: int
    bytes: int
    sent_bytes: int
    reached: int
    of: int
    ratio: float
    seconds: float
    workers: list[CacheWorker]


class Cache(Struct):
    """A line of `cache list`. `put` is wall nanoseconds."""

    id: str
    manifest: str
    files: int
    bytes: int
    client: str
    targets: list[str]
    put: int
    jobs: int
    missing: int
    ok: int
    of: int


class CachesRemoved(Struct):
    """`cache rm`."""

    removed: list[str]
    in_use: list[str]
    unknown: list[str]
