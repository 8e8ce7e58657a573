"""What the book holds, one small record per job.

A job's state is the container it lies in: `Row.place` is the lane, delay, grant or settlement that
owns it at present. So there is no state field to fall out of step, and ownership is an identity
test: a grant owns exactly the rows whose place it is. (A ghost of an older grant fails that test
even if the job is leased again; "the grant lives and the job is leased" would let it through.)

Rows and origins opt out of the garbage collector: a million of them must not be traversed. The
cycles they could form (row → grant → row) are broken by hand when a grant closes.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from ekiden import limits
from ekiden.model.jobs import Cause, Index, Note, Spec, WallTime

# Shared integers: a row's place in its submit costs a pointer, not an object.
ORDINALS: Final = tuple(range(limits.BATCH_JOBS_MAX))


class ClientLedger:
    """What one client has open. `live` jobs are not terminal; `inflight` ones are leased."""

    __slots__ = ("bytes", "id", "inflight", "lanes", "live", "parked")

    def __init__(self, client_id: str) -> None:
        self.id = client_id
        self.live = 0
        self.bytes = 0
        self.inflight = 0
        self.lanes: dict[Any, None] = {}
        """Its lanes (see `queues`) with something ready."""
        self.parked = False
        """At its cap: its lanes are out of their rings and out of every ready count."""


class Origin(Struct, gc=False):
    """What the jobs of one accepted submit have in common."""

    client: ClientLedger
    session: str
    spec: Spec
    spec_bytes: bytes
    time: int
    wall: WallTime
    digests: bytes
    expires_at: WallTime = 0


class Kept(Struct, array_like=True, frozen=True, gc=False):
    """Where a result too large for memory lies: in the journal entry that settled it."""

    index: Index
    command: int
    slot: int
    size: int


class Row(Struct, gc=False, eq=False):
    """One job. `body` is its input until it is done and its output from then on; None once the
    bytes are past their retention."""

    id: str
    ordinal: int
    body: bytes | Kept | None
    origin: Origin
    place: Any
    attempt: int = 0
    history: list[Cause] | None = None
    note: Note | None = None


class Delay:
    """Rows that wait for an `entry.time`."""

    __slots__ = ("rows", "seq", "until")

    def __init__(self, until: int, seq: int, rows: list[Row]) -> None:
        self.until = until
        self.seq = seq
        self.rows = rows

    def __lt__(self, other: Delay) -> bool:
        return (self.until, self.seq) < (other.until, other.seq)


class Watch(Delay):
    """Rows to look at when the leader's wall clock reaches `until`: to wake or to expire."""

    __slots__ = ("expires",)

    def __init__(self, until: int, seq: int, rows: list[Row], expires: bool) -> None:
        super().__init__(until, seq, rows)
        self.expires = expires


class WorkerLedger:
    """The leases of one worker, by grant."""

    __slots__ = ("grants", "held", "id")

    def __init__(self, worker_id: str) -> None:
        self.id = worker_id
        self.held = 0
        self.grants: dict[int, Grant] = {}


class Grant:
    """Attempts leased to one worker in one go; the number is the fencing token."""

    __slots__ = ("left", "number", "queue", "rows", "time", "wall", "worker")

    def __init__(
        self, number: int, worker: WorkerLedger, queue: Any, rows: list[Row], time: int, wall: int
    ) -> None:
        self.number = number
        self.worker = worker
        self.queue = queue
        self.rows = rows
        self.left = len(rows)
        self.time = time
        self.wall = wall

    def owned(self) -> list[tuple[int, Row]]:
        """Offset and row of every attempt this grant still owns."""
        return [(offset, row) for offset, row in enumerate(self.rows) if row.place is self]


class Settlement:
    """Jobs that ended together: state, by whom, when. Also the unit of retention."""

    __slots__ = ("bytes", "faded", "leased", "reason", "rows", "state", "time", "wall", "worker")

    def __init__(
        self, state: str, worker: str, leased: WallTime, time: int, wall: WallTime, reason: str = ""
    ) -> None:
        self.state = state
        self.worker = worker
        self.leased = leased
        self.time = time
        self.wall = wall
        self.reason = reason
        self.rows: list[Row] = []
        self.bytes = 0
        self.faded = False
        """Its bytes are forgotten; ids and outcomes are still known."""
