"""The one table of messages.

A message is a frame type (see `frames`) and a body: msgpack of an array-like struct. Fields may be
added at the end of a struct with a default: an old reader ignores what it does not know, a new
reader fills in what is missing. A field is never removed, moved or given another meaning; a type
number is never used again. docs/PROTOCOL.md describes every message for other implementers.

Batches travel in columns: what many jobs share is said once, what differs is a list per field, and
an answer refers to (grant, offset) instead of repeating names.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from ekiden.errors import BadFrame
from ekiden.model.caches import BlobRef, CacheUse
from ekiden.model.jobs import Cause, Needs, Note

ROLE_CLIENT: Final = "client"
ROLE_WORKER: Final = "worker"
ROLE_PEER: Final = "peer"


class Message(Struct, array_like=True, frozen=True, gc=False):
    """Base of all that travels. Subclasses repeat `frozen`: msgspec inherits the rest."""


# ------------------------------------------------------------------ hello


class HelloClient(Message, frozen=True):
    """First frame of a client. `session` names this client object across reconnects."""

    protocol: int
    client: str
    session: str
    nonce: bytes
    software: str = ""


class HelloWorker(Message, frozen=True):
    """First frame of a worker. `session` names this process: a restart is another one."""

    protocol: int
    worker: str
    session: str
    nonce: bytes
    software: str = ""


class Challenge(Message, frozen=True):
    """The broker's answer to a hello: prove that you know the key."""

    protocol: int
    nonce: bytes


class Proof(Message, frozen=True):
    """HMAC over both nonces and the claimed identity; the key itself never travels."""

    mac: bytes


class Welcome(Message, frozen=True):
    """The peer belongs. `mac` proves that the broker knows the key too."""

    mac: bytes
    group: str
    broker: str
    epoch: int
    heartbeat_ns: int
    silence_ns: int
    frame_bytes_max: int
    software: str = ""


class Join(Message, frozen=True):
    """A worker's first word after the welcome: what it can do and what it still holds.

    `held` lists [grant, offsets] of attempts it knows and has not yet been told are settled. Leases
    of the book that are not mentioned are assigned again; mentioned ones the book does not know are
    stopped.
    """

    patterns: list[str]
    slots: int
    credit: int
    labels: dict[str, str] = {}
    cpu_milli: int = 0
    mem_mb: int = 0
    host: str = ""
    held: list[tuple[int, list[int]]] = []


class Bye(Message, frozen=True):
    """A peer leaves on purpose. What a worker holds then goes to others at once."""

    reason: str = ""


# ------------------------------------------------------------------ ledger: client and broker


class Submit(Message, frozen=True):
    """Jobs that share `spec`, in columns. `digests` holds 8 bytes per job: sha256 of its body."""

    spec: Raw
    ids: list[str]
    digests: bytes
    bodies: list[bytes]
    delay_ns: int = 0
    not_before: int = 0
    expires_at: int = 0
    blobs: dict[int, list[BlobRef]] = {}
    """By offset: blobs of the store that the body refers to. They are kept while the body is."""


class Refused(Struct, array_like=True, frozen=True, gc=False):
    """One job of a submit (or all, offset -1) that was not taken."""

    message: int
    offset: int
    code: str
    text: str
    remedy: str = ""
    retry_after_ms: int = 0


class Accepted(Message, frozen=True):
    """These submits (by msg_id) are committed, except for what `refused` lists."""

    messages: list[int]
    refused: list[Refused] = []


class ResultRun(Struct, array_like=True, frozen=True, gc=False):
    """Jobs done by one worker in one settlement, in columns."""

    ids: list[str]
    outputs: list[bytes]
    worker: str
    submitted: int
    leased: int
    finished: int
    """Times are wall nanoseconds by the broker's clock, for display."""
    attempts: dict[int, int] = {}
    """Offset → attempt number, where it was not the first."""
    notes: dict[int, Note] = {}


class Ended(Struct, array_like=True, frozen=True, gc=False):
    """A job that ended without a result, or whose result is no longer kept."""

    id: str
    state: str
    causes: list[Cause] = []
    reason: str = ""


class Results(Message, frozen=True):
    """Pushed to whoever submitted or attached, after the settlement is committed."""

    runs: list[ResultRun] = []
    ended: list[Ended] = []


class Attach(Message, frozen=True):
    """Tell me when these are settled. Answered by `Attached`, then by `Results` as they come."""

    ids: list[str]


class Attached(Message, frozen=True):
    """`unknown` lists ids the book does not hold; the others will be told, or were just now."""

    unknown: list[str] = []


class Ask(Message, frozen=True):
    """A question or a change by a person or tool: `verb` and its parameters (a map)."""

    verb: str
    params: dict[str, Any] = {}


class Answer(Message, frozen=True):
    """The reply to the Ask with that msg_id."""

    body: Any


class Refusal(Message, frozen=True):
    """The message with that msg_id (corr_id of this frame) was not taken; nothing changed."""

    code: str
    text: str
    remedy: str = ""
    retry_after_ms: int = 0


class NotLeader(Message, frozen=True):
    """Go there. The connection is closed after this."""

    leader: str = ""


# ------------------------------------------------------------------ ledger: worker and broker


class AssignRun(Struct, array_like=True, frozen=True, gc=False):
    """Attempts of one grant that share a spec: offsets `first` .. `first + len(ids) - 1`."""

    grant: int
    first: int
    spec: Raw
    client: str
    ids: list[str]
    bodies: list[bytes]
    attempts: list[int] = []
    """Attempt numbers; empty means all are first attempts. A worker announces the start of any
    later attempt before it runs (a `Beat`), so that a job that kills workers is found out."""


class Assign(Message, frozen=True):
    """Run these. Sent only after the lease is committed; may be sent again."""

    runs: list[AssignRun]


class Failure(Struct, array_like=True, frozen=True, gc=False):
    """One attempt that ended without a result."""

    offset: int
    cause: str
    message: str = ""
    note: Note | None = None
    detail: bytes = b""
    """For the client alone, at most DETAIL_BYTES_MAX: of a function, the exception itself."""


class AckRun(Struct, array_like=True, frozen=True, gc=False):
    """What became of attempts of one grant. `offsets` None: all of the grant, in order."""

    grant: int
    offsets: list[int] | None
    outputs: list[bytes]
    notes: dict[int, Note] = {}
    """By offset."""
    failures: list[Failure] = []
    released: list[int] = []
    """Attempts given back that never began."""
    blobs: dict[int, list[BlobRef]] = {}
    """By offset: blobs of the store that the output refers to. They are kept while it is."""


class Ack(Message, frozen=True):
    """Outcomes, from the worker that holds the leases. Kept by it until `Acked` covers it."""

    runs: list[AckRun]


class Acked(Message, frozen=True):
    """All acks up to this msg_id are committed, or were stale; the worker may forget them."""

    upto: int


class Credit(Message, frozen=True):
    """The most attempts this worker will hold, absolute. Zero: finish what you have, no more."""

    credit: int


class Stop(Message, frozen=True):
    """End these attempts: `cancel` (confirm with a failure `cancelled`), `recall` (give back what
    has not begun), `stale` (nobody waits for them; forget them), `timeout`."""

    grant: int
    offsets: list[int] | None
    why: str


class Beat(Message, frozen=True):
    """I am here. A worker adds what runs, as [grant, offset, elapsed_ms], and its CPU load in
    percent; silence for `silence_ns` forfeits its leases. Clients and brokers send it empty."""

    running: list[tuple[int, int, int]] = []
    load: int = 0


# ------------------------------------------------------------------ relay: not journaled, lossy


class Progress(Message, frozen=True):
    """How far an attempt is; sent on to the session that submitted it."""

    grant: int
    offset: int
    body: bytes


class JobProgress(Message, frozen=True):
    """A progress note on its way to the client."""

    id: str
    attempt: int
    body: bytes


class Peek(Message, frozen=True):
    """To a worker: what has this attempt written since these positions? At most `limit` bytes of
    each. Answered by `Peeked`."""

    grant: int
    offset: int
    stdout: int
    stderr: int
    limit: int


class Peeked(Message, frozen=True):
    """What it has written. `known` is false if nothing of it runs here that writes anywhere."""

    known: bool
    stdout: bytes = b""
    stderr: bytes = b""


class Subscribe(Message, frozen=True):
    """Send me what is published on subjects that match. `sid` is the subscriber's own number."""

    sid: int
    pattern: str


class Unsubscribe(Message, frozen=True):
    """No more for this sid."""

    sid: int


class Publish(Message, frozen=True):
    """To every subscriber whose pattern matches, once per subscription, if it keeps up."""

    subject: str
    payload: bytes


class Delivery(Message, frozen=True):
    """A published message for the subscription `sid`."""

    sid: int
    subject: str
    payload: bytes


# ------------------------------------------------------------------ bulk: file contents by hash


class BlobOffer(Message, frozen=True):
    """I can give you these bytes. Answered by `BlobStored`, or by pulls and then `BlobStored`."""

    blob: str
    """SHA-256 of the bytes, in lower-case hex."""
    size: int


class BlobPull(Message, frozen=True):
    """Send me that part. Answered by one `BlobPart` or by a `Refusal`. Of a broker it is itself the
    answer to an offer (corr_id)."""

    blob: str
    offset: int
    length: int
    codecs: str = ""
    """How it may be packed, the best first, as "zstd,gzip"; empty: not at all."""


class BlobPart(Message, frozen=True):
    """The part that was asked for, whole. `size` is that of all the bytes under this name."""

    blob: str
    offset: int
    data: bytes
    size: int
    codec: str = ""
    """How `data` is packed: it unpacks to just as many bytes as were asked for."""


class BlobStored(Message, frozen=True):
    """The broker has all of it, verified and on disk; it needs no more parts."""

    blob: str


class BlobWhere(Message, frozen=True):
    """Where does that blob lie? Asked by who speaks from the same machine. Answered by `BlobAt`."""

    blob: str
    size: int


class BlobAt(Message, frozen=True):
    """There, for who may read it: whoever does verifies it. Empty: pull it."""

    blob: str
    path: str = ""


class BlobSpoiled(Message, frozen=True):
    """To the broker: all parts of this blob came, and together they have another hash. It looks at
    its own copy, and sets it aside if that is damaged. No answer."""

    blob: str
    size: int


class CacheOffer(Message, frozen=True):
    """To a worker: these caches are meant for you. Answered by a `CacheAck` for each.

    With `whole` it names all that are, as after each Join: what else the worker has of this group
    is of no use any more.
    """

    caches: list[CacheUse]
    whole: bool = False
    verify: bool = False
    """Read and compare also what is there already."""


class CacheAck(Message, frozen=True):
    """From a worker: how it stands with a cache. Said again whenever that changes, and now and then
    while it is being fetched."""

    cache: str
    manifest: str
    status: str
    """`fetching`, `ok` (it came, or was repaired), `skipped` (it was there), `failed`, or `gone`
    (removed for want of room)."""
    text: str = ""
    done: int = 0
    """Bytes laid down so far; of `total`."""
    total: int = 0


# Type numbers: 1-9 hello, 10-29 client ledger, 30-49 worker ledger, 50-69 relay, 70-89 cluster,
# 90-99 bulk.
TYPE_OF: Final[dict[type[Message], int]] = {
    HelloClient: 1,
    HelloWorker: 2,
    Challenge: 3,
    Proof: 4,
    Welcome: 5,
    Join: 6,
    Bye: 7,
    Submit: 10,
    Accepted: 11,
    Results: 12,
    Attach: 13,
    Attached: 14,
    Ask: 15,
    Answer: 16,
    Refusal: 17,
    NotLeader: 18,
    Assign: 30,
    Ack: 31,
    Acked: 32,
    Credit: 33,
    Stop: 34,
    Beat: 35,
    Progress: 50,
    JobProgress: 51,
    Subscribe: 52,
    Unsubscribe: 53,
    Publish: 54,
    Delivery: 55,
    Peek: 56,
    Peeked: 57,
    BlobOffer: 90,
    BlobPull: 91,
    BlobPart: 92,
    BlobStored: 93,
    BlobSpoiled: 94,
    CacheOffer: 95,
    CacheAck: 96,
    BlobWhere: 97,
    BlobAt: 98,
}
NAME_OF: Final[dict[int, str]] = {number: kind.__name__ for kind, number in TYPE_OF.items()}

_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    number: msgspec.msgpack.Decoder(kind) for kind, number in TYPE_OF.items()
}
_encoder: Final = msgspec.msgpack.Encoder()
encode_body = _encoder.encode

M = TypeVar("M", bound=Message)


def decode(type_number: int, body: bytes | memoryview) -> Message:
    """The message in a frame, typed and validated; `BadFrame` if it is none of ours."""
    decoder = _DECODERS.get(type_number)
    if decoder is None:
        raise BadFrame(f"unknown message type {type_number}", remedy="speak protocol version 1")
    try:
        message: Message = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(
            f"malformed {NAME_OF[type_number]}: {error}",
            remedy="see its fields in docs/PROTOCOL.md",
        ) from None
    return message


__all__ = [kind.__name__ for kind in TYPE_OF] + [
    "AckRun",
    "AssignRun",
    "Ended",
    "Failure",
    "Needs",
    "Refused",
    "ResultRun",
]
