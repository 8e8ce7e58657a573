"""What the worker's machine and its executors say to each other.

The machine hands over attempts in batches and asks for the end of some; whoever runs them answers
in batches. Requests are effects, news are events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ekiden import errors
from ekiden.machine import Instant
from ekiden.model.caches import BlobRef, CacheUse
from ekiden.model.jobs import GrantNo, Note, Spec
from ekiden.wire.messages import AssignRun, Failure

CANCEL: Final = "cancel"
RECALL: Final = "recall"
STALE: Final = "stale"


# ------------------------------------------------------------------ events


class RunFinished(Struct, frozen=True):
    """The executor's word on some attempts of one grant. `offsets` go with `outputs`; failures name
    their own. `ran_ns` is the time all of them took together."""

    grant: GrantNo
    offsets: Sequence[int]
    outputs: list[bytes]
    notes: dict[int, Note] = {}
    failures: list[Failure] = []
    ran_ns: int = 0
    blobs: dict[int, list[BlobRef]] = {}
    """By offset: what the output refers to in the store."""


class Started(Struct, frozen=True):
    """Attempts that have been running for a while, as (grant, offset, since when). What ends within
    milliseconds is never announced."""

    attempts: list[tuple[GrantNo, int, Instant]]


class Dropped(Struct, frozen=True):
    """After an `Abort` with `recall`: these had not begun and never will."""

    grant: GrantNo
    offsets: list[int]


class Gone(Struct, frozen=True):
    """After an `Abort` with `cancel` or `timeout`: nothing of these runs any more."""

    grant: GrantNo
    offsets: list[int]


class ProgressMade(Struct, frozen=True):
    """A note from a running handler, to be passed on if anybody listens."""

    grant: GrantNo
    offset: int
    body: bytes


class LoadMeasured(Struct, frozen=True):
    """How busy the machine is, in percent."""

    percent: int


class CacheSaid(Struct, frozen=True):
    """How it stands with a cache; see `messages.CacheAck`."""

    cache: str
    manifest: str
    status: str
    text: str = ""
    done: int = 0
    total: int = 0


class Seen(Struct, frozen=True):
    """The answer to a `Look`: what was written, or None if no such attempt writes anywhere."""

    number: int
    written: tuple[bytes, bytes] | None


class Drain(Struct, frozen=True):
    """Take no more work, finish what has begun, then leave."""

    reason: str = ""


# ------------------------------------------------------------------ effects


class Run(Struct, frozen=True):
    """Run these attempts; they share `spec`."""

    run: AssignRun
    spec: Spec


class Abort(Struct, frozen=True):
    """End these. `recall`: only what has not begun, and say which (`Dropped`). `cancel`, `timeout`:
    all of them, and say when they are `Gone`, if they did not finish first. `stale`: all of them,
    and report nothing, for nobody waits."""

    grant: GrantNo
    offsets: list[int]
    why: str
    spec: Spec | None = None
    """What they share. It says who runs them."""


class Look(Struct, frozen=True):
    """Somebody watches this attempt: say what it has written to stdout and stderr since these
    positions, at most `limit` bytes of each (`Seen`)."""

    number: int
    grant: GrantNo
    offset: int
    stdout: int
    stderr: int
    limit: int
    spec: Spec


class CachesOffered(Struct, frozen=True):
    """These caches are meant for this worker: have them, and say how it goes (`CacheSaid`). With
    `whole`, others are of no use any more; with `verify`, read what is there and compare."""

    caches: list[CacheUse]
    whole: bool = False
    verify: bool = False


class Exit(Struct, frozen=True):
    """The machine is done: drained, or refused for good by every broker (`error`)."""

    reason: str
    error: errors.EkidenError | None = None
