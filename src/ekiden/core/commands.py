"""All that may enter the journal.

A command is a change asked of the book, in batches: one command may carry thousands of jobs in
columns. An entry is the commands that share one write, with the time they count as. Adding a
command or a field bumps JOURNAL_VERSION (docs/JOURNAL.md says how); unknown fields are forbidden,
because guessing at history is worse than refusing it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from ekiden import limits
from ekiden.model.caches import BlobRef, CacheUse
from ekiden.model.jobs import Index, Note, Route, WallTime


class Command(Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """Base of all commands."""


class Submit(Command, frozen=True, tag=1):
    """Accept jobs that share `spec`. A job whose id is known is not accepted twice.

    `delay_ns` counts from this entry; `not_before` and `expires_at` are wall time, watched by the
    leader, which proposes `Clock`.
    """

    client: str
    session: str
    spec: Raw
    ids: list[str]
    digests: bytes
    bodies: list[bytes]
    delay_ns: int = 0
    not_before: WallTime = 0
    expires_at: WallTime = 0
    blobs: dict[int, list[BlobRef]] = {}
    """By offset: blobs that the body refers to."""


class Assign(Command, frozen=True, tag=2):
    """Lease up to `count` ready jobs of `route` to `worker`, in queue order at this index."""

    worker: str
    route: Route
    count: int


class Finish(Command, frozen=True, tag=3):
    """Attempts of one grant that brought a result. Offsets the grant no longer owns are dropped."""

    worker: str
    grant: int
    offsets: list[int] | None
    outputs: list[bytes]
    notes: dict[int, Note] = {}
    blobs: dict[int, list[BlobRef]] = {}
    """By offset, like notes: blobs that the output refers to."""


class Fail(Command, frozen=True, tag=4):
    """Attempts of one grant that ended without a result, in columns."""

    worker: str
    grant: int
    offsets: list[int]
    causes: list[str]
    messages: list[str]
    notes: dict[int, Note] = {}
    details: dict[int, bytes] = {}
    """By offset, like notes: what only the client can read."""


class Release(Command, frozen=True, tag=5):
    """Attempts of one grant that never began: they go back to the front of their queue."""

    worker: str
    grant: int
    offsets: list[int]


class Forfeit(Command, frozen=True, tag=6):
    """The worker is lost: its leases end. `started` names the attempts known to have begun; only
    those burn one, the others become suspects whose next start is announced before it runs."""

    worker: str
    started: list[tuple[int, int]] = []


class Cancel(Command, frozen=True, tag=7):
    """Cancel what waits; ask for the end of what runs."""

    ids: list[str]
    reason: str = "cancelled"


class Clock(Command, frozen=True, tag=8):
    """The leader's wall clock has reached `wall`: what waited for a wall time before it wakes,
    what expires by then and has not begun is cancelled."""

    wall: WallTime


class Replay(Command, frozen=True, tag=10):
    """Failed or cancelled jobs wait again, under the same id, one generation later."""

    ids: list[str]


class Purge(Command, frozen=True, tag=11):
    """Forget failed or cancelled jobs before their retention ends."""

    ids: list[str]


class Settings(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What `apply` needs to know of the configuration. It is journaled, never read from a file by
    `apply`: every member must decide alike, also when replaying history under newer defaults."""

    max_attempts: int = limits.MAX_ATTEMPTS
    lost_workers_max: int = limits.LOST_WORKERS_MAX
    backoff_first_ns: int = limits.BACKOFF_FIRST_NS
    backoff_max_ns: int = limits.BACKOFF_MAX_NS
    client_inflight_max: int = 0
    """Most attempts of one client at a time; 0: no cap."""
    retention_ns: int = limits.RETENTION_NS
    results_max: int = limits.RESULTS_KEPT_MAX
    result_bytes_max: int = limits.RESULT_BYTES_KEPT_MAX
    ids_max: int = limits.IDS_KEPT_MAX


class Configure(Command, frozen=True, tag=12):
    """From here on, these settings hold."""

    settings: Settings


class Tick(Command, frozen=True, tag=13):
    """Nothing but time: delays and retention that are due take effect."""


class PutCache(Command, frozen=True, tag=14):
    """A set of files has this id from here on, meant for workers whose patterns overlap `target`.
    All its bytes are in the store. The same content again adds the target; other content under the
    same id changes nothing."""

    cache: CacheUse
    client: str
    target: str
    files: int
    size: int
    """Of all files together."""


class RemoveCache(Command, frozen=True, tag=15):
    """Forget these, unless jobs that have not ended use them."""

    ids: list[str]


AnyCommand = (
    Submit
    | Assign
    | Finish
    | Fail
    | Release
    | Forfeit
    | Cancel
    | Clock
    | Replay
    | Purge
    | Configure
    | Tick
    | PutCache
    | RemoveCache
)


class Entry(Struct, frozen=True):
    """Commands with their place in history. `time` never goes backwards; `wall` is for display."""

    index: Index
    time: int
    wall: WallTime
    commands: list[Any]


class _Payload(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    time: int
    wall: WallTime
    commands: list[AnyCommand]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def encode_payload(time: int, wall: WallTime, commands: list[Any]) -> bytes:
    """The bytes of an entry as the journal keeps them, without its index."""
    return _encode(_Payload(time, wall, commands))


def decode_entry(index: Index, payload: bytes | memoryview) -> Entry:
    """An entry read back. Raises `msgspec.DecodeError`: the caller knows which file is damaged."""
    read = _decode(payload)
    return Entry(index, read.time, read.wall, read.commands)
