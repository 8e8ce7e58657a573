"""A book and short words for what is done to it."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from ekiden.core import commands as c
from ekiden.core import image, invariants
from ekiden.core.book import JobBook
from ekiden.core.effects import Changes
from ekiden.core.queues import Lane
from ekiden.core.rows import Delay, Grant, Row, Settlement, Watch
from ekiden.limits import NS
from ekiden.model import jobs as j

WALL = 1_700_000_000 * NS


def spec(subject: str = "a.x", **options: Any) -> j.Spec:
    """A spec; what belongs to the route may be given beside the rest."""
    route = {name: options.pop(name) for name in ("needs", "key", "pin") if name in options}
    return j.Spec("n", j.Route(subject, **route), **options)


def submit_of(
    *ids: str, client: str = "ann", of: j.Spec | None = None, body: bytes | None = None, **odd: Any
) -> c.Submit:
    bodies = [job_id.encode() if body is None else body for job_id in ids]
    return c.Submit(
        client,
        f"s-{client}",
        msgspec.Raw(msgspec.msgpack.encode(of or spec())),
        list(ids),
        b"".join(hashlib.sha256(text).digest()[:8] for text in bodies),
        bodies,
        **odd,
    )


class Group:
    """Applies commands, one entry each, checks the invariants after every one, and answers what
    became of a job."""

    def __init__(self, **settings: Any) -> None:
        self.book = JobBook()
        self.now = 0
        self.wall = WALL
        if settings:
            self.apply(c.Configure(c.Settings(**settings)))

    def apply(self, *commands: c.Command) -> Changes:
        payload = c.encode_payload(self.now, self.wall, list(commands))
        changes = self.book.apply(c.decode_entry(self.book.applied + 1, payload))
        invariants.check(self.book)
        return changes

    def later(self, seconds: float) -> Changes:
        """Time goes by, and the leader notices."""
        self.now += int(seconds * NS)
        self.wall += int(seconds * NS)
        return self.apply(c.Tick())

    def reload(self) -> Group:
        """The same, out of an image."""
        other = Group()
        other.book = image.load(list(image.dump(self.book)))
        other.now, other.wall = self.now, self.wall
        invariants.check(other.book)
        assert image.fingerprint(other.book) == image.fingerprint(self.book)
        return other

    # -------------------------------------------------------------- commands

    def submit(self, *ids: str, **options: Any) -> Changes:
        return self.apply(submit_of(*ids, **options))

    def assign(self, worker: str = "w1", count: int = 250, of: j.Spec | None = None) -> Grant:
        (grant,) = self.apply(c.Assign(worker, (of or spec()).route, count)).grants
        return grant

    def retry(self, worker: str, avoid: str, of: j.Spec | None = None) -> Grant:
        """Lease what waits for another attempt after one that `avoid` burned."""
        route = msgspec.structs.replace((of or spec()).route, avoid=avoid)
        (grant,) = self.apply(c.Assign(worker, route, 250)).grants
        return grant

    def finish(self, grant: Grant, *offsets: int, output: bytes = b"out", by: str = "") -> Changes:
        outputs = [output] * len(offsets)
        return self.apply(c.Finish(by or grant.worker.id, grant.number, list(offsets), outputs))

    def fail(
        self, grant: Grant, *offsets: int, cause: str = j.HANDLER_ERROR, by: str = ""
    ) -> Changes:
        count = len(offsets)
        return self.apply(
            c.Fail(
                by or grant.worker.id, grant.number, list(offsets), [cause] * count, ["no"] * count
            )
        )

    def release(self, grant: Grant, *offsets: int) -> Changes:
        return self.apply(c.Release(grant.worker.id, grant.number, list(offsets)))

    def forfeit(self, worker: str, *started: tuple[Grant, int]) -> Changes:
        return self.apply(c.Forfeit(worker, [(grant.number, offset) for grant, offset in started]))

    def cancel(self, *ids: str, reason: str = "cancelled") -> Changes:
        return self.apply(c.Cancel(list(ids), reason))

    def clock(self, wall: int) -> Changes:
        return self.apply(c.Clock(wall))

    def replay(self, *ids: str) -> Changes:
        return self.apply(c.Replay(list(ids)))

    def purge(self, *ids: str) -> Changes:
        return self.apply(c.Purge(list(ids)))

    def lose(self, *ids: str, worker: str = "w1") -> None:
        """Lease these, let them begin, lose the worker; then wait out the backoff."""
        grant = self.assign(worker) if self.job(ids[0]).attempt == 0 else self.again(worker, ids[0])
        self.forfeit(worker, *((grant, n) for n in range(len(ids))))
        self.later(120)

    def again(self, worker: str, job_id: str) -> Grant:
        """Lease the job from wherever it waits."""
        place = self.job(job_id).place
        assert isinstance(place, Lane), self.state(job_id)
        (grant,) = self.apply(c.Assign(worker, place.queue.route, 250)).grants
        return grant

    # -------------------------------------------------------------- questions

    def job(self, job_id: str) -> Row:
        row = self.book.find(job_id)
        assert row is not None, job_id
        return row

    def state(self, job_id: str) -> str:
        row = self.book.find(job_id)
        match row.place if row is not None else None:
            case Settlement(state=state):
                return state
            case Grant():
                return j.CANCELLING if job_id in self.book.cancelling else j.LEASED
            case Lane():
                return j.QUEUED
            case Watch() | Delay():
                return j.DELAYED
            case _:
                return "unknown"

    def states(self, *ids: str) -> list[str]:
        return [self.state(job_id) for job_id in ids]

    def causes(self, job_id: str) -> list[tuple[int, str, str, bool]]:
        return [
            (past.attempt, past.worker, past.cause, past.burned)
            for past in self.job(job_id).history or ()
        ]

    def ended(self, job_id: str) -> tuple[str, str, str]:
        """State, reason, worker."""
        place = self.job(job_id).place
        assert isinstance(place, Settlement), job_id
        return place.state, place.reason, place.worker


def ids_of(grant: Grant) -> list[str]:
    return [row.id for row in grant.rows]


def settled(changes: Changes) -> list[tuple[str, list[str]]]:
    return [(s.state, [row.id for row in s.rows]) for s in changes.settlements]
