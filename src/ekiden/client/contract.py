"""What the client's machine and the layer above say to each other.

A job is a *handle*: whatever object the layer above resolves, with the job's id, body and terms on
it. The machine only keeps it and gives it back, so one object per job is all there is. Requests
are events, news are effects, and both speak of many jobs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from ekiden import errors
from ekiden.model.caches import BlobRef
from ekiden.wire import messages
from ekiden.wire.messages import Delivery, Ended, ResultRun


class Terms(Struct, frozen=True):
    """What jobs must share to travel in one Submit. `spec` is msgpack of `model.jobs.Spec`."""

    spec: bytes
    delay_ns: int = 0
    not_before: int = 0
    expires_at: int = 0
    caches: tuple[str, ...] = ()
    """Ids of the caches that the spec is to name, once it is known what they are."""
    stored: bool = False
    """Whether a job may refer to blobs of the store: its handle's `blobs` are looked at."""


class Handle(Protocol):
    """A job as the machine sees it: equal to itself only. `terms` is None if it was only attached
    to; `body` must stay until the job is settled, as it may have to be submitted again."""

    job_id: str
    body: bytes
    terms: Terms | None
    blobs: Sequence[BlobRef]
    """What of the store its body refers to."""


class Order(Struct, eq=False):
    """The plainest handle, for callers that resolve nothing themselves."""

    job_id: str
    body: bytes = b""
    terms: Terms | None = None
    blobs: Sequence[BlobRef] = ()


# ------------------------------------------------------------------ events from the layer above


class Submitting(Struct, frozen=True):
    """New jobs, in order."""

    handles: list[Any]


class Attaching(Struct, frozen=True):
    """Tell these handles what becomes of jobs that somebody submitted."""

    handles: list[Any]


class Asking(Struct, frozen=True):
    """A question, or a change by a person; `handle` gets the answer."""

    handle: Any
    verb: str
    params: dict[str, Any]


class Subscribing(Struct, frozen=True):
    """Deliver what is published on `pattern` under the number `sid`."""

    sid: int
    pattern: str


class Unsubscribing(Struct, frozen=True):
    """No more for this `sid`."""

    sid: int


class Publishing(Struct, frozen=True):
    """To all subscribers. May be lost."""

    subject: str
    payload: bytes


class Leaving(Struct, frozen=True):
    """The client closes: everything open ends with `Closed`."""


# ------------------------------------------------------------------ effects for the layer above


class LinkUp(Struct, frozen=True):
    """A broker welcomed us."""

    address: str
    welcome: messages.Welcome


class LinkDown(Struct, frozen=True):
    """The conversation ended; another is being sought."""

    error: errors.EkidenError


class RefusedByAll(Struct, frozen=True):
    """No broker will have us: wrong key or version. What was open has been refused with it."""

    error: errors.EkidenError


class JobsAccepted(Struct, frozen=True):
    """These are committed, or were attached to."""

    handles: list[Any]


class JobsDone(Struct, frozen=True):
    """`handles[i]` is the job of offset i of the run, or None if nobody waits for it here."""

    run: ResultRun
    handles: list[Any]


class JobsEnded(Struct, frozen=True):
    """Ended without a result; pairs of handle and outcome."""

    pairs: list[tuple[Any, Ended]]


class JobsRefused(Struct, frozen=True):
    """Not taken; pairs of handle and error."""

    pairs: list[tuple[Any, errors.EkidenError]]


class Answered(Struct, frozen=True):
    """The answer to an `Asking`."""

    handle: Any
    body: Any


class AskRefused(Struct, frozen=True):
    """An `Asking` that got no answer."""

    handle: Any
    error: errors.EkidenError


class Deliveries(Struct, frozen=True):
    """Published messages, in the order they came."""

    messages: list[Delivery]


class SubscribeRefused(Struct, frozen=True):
    """The broker did not take the subscription."""

    sid: int
    error: errors.EkidenError


class ProgressMade(Struct, frozen=True):
    """A running job said how far it is."""

    handles: list[Any]
    attempt: int
    body: bytes
