"""Random lives of a book, told three times: to the book, to a book loaded from an image of it, and
to a naive model that knows nothing but who may settle what."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from ekiden.core import commands as c
from ekiden.core import image, invariants
from ekiden.core.book import JobBook
from ekiden.core.effects import Changes
from ekiden.core.queues import Lane
from ekiden.core.rows import Delay, Grant, Kept, Row, Settlement, Watch
from ekiden.model import jobs as j

ENTRIES = 500
SEEDS = range(6)
WORKERS = ("w1", "w2", "w3")
CLIENTS = ("ann", "bob", "cid")
ROUTES = tuple(j.Route(name) for name in ("a.x", "a.y"))
SPECS = tuple(
    j.Spec("n", route, priority=priority, max_attempts=attempts)
    for route in ROUTES
    for priority in (0, 5)
    for attempts in (0, 2)
)
WAITING, LATER, LEASED = "waiting", "later", "leased"


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:8]


@dataclass
class Job:
    """All the model knows of a job."""

    client: str
    spec: j.Spec
    body: bytes
    state: str = WAITING
    until: int = 0
    wakes: int = 0
    expires: int = 0
    attempts: int = 0
    owner: tuple[int, int] | None = None
    cancelling: bool = False
    burned: int = 0
    lost: int = 0
    generation: int = 0
    output: bytes | None = None
    faded: bool = False


@dataclass
class Model:
    """Says who may settle what. Order and retention are the book's business; it only sees that
    nothing unsettled is lost and nothing settled changes."""

    jobs: dict[str, Job] = field(default_factory=dict)
    grants: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    """Every grant there ever was: its worker, and its jobs by offset."""
    cap: int = 0
    settled: dict[str, str] = field(default_factory=dict)
    """What ended in the present entry."""

    def wake(self, time: int) -> None:
        for job in self.jobs.values():
            if job.state == LATER and not job.wakes and job.until <= time:
                job.state = WAITING

    def owned(self, worker: str, number: int, offset: int) -> tuple[str, Job] | None:
        """The job that this attempt may settle, if it may settle one."""
        holder, ids = self.grants.get(number, ("", []))
        if holder != worker or not 0 <= offset < len(ids):
            return None
        job = self.jobs.get(ids[offset])
        return (ids[offset], job) if job and job.owner == (number, offset) else None

    def end(self, job_id: str, state: str, output: bytes | None = None) -> None:
        job = self.jobs[job_id]
        assert job.state in (WAITING, LATER, LEASED), "settled twice"
        assert job_id not in self.settled
        job.state, job.output, job.owner, job.cancelling = state, output, None, False
        self.settled[job_id] = state

    def apply(self, command: Any, live: JobBook, changes: Changes) -> None:
        match command:
            case c.Submit():
                self.submit(command, live)
            case c.Assign():
                self.assign(command, live, changes)
            case c.Finish():
                offsets = command.offsets
                size = len(self.grants.get(command.grant, ("", []))[1])
                if offsets is not None and any(not 0 <= o < size for o in offsets):
                    return
                for offset, output in zip(
                    range(size) if offsets is None else offsets, command.outputs, strict=False
                ):
                    found = self.owned(command.worker, command.grant, offset)
                    if found:
                        state = j.CANCELLED if found[1].cancelling else j.DONE
                        self.end(found[0], state, output if state == j.DONE else None)
            case c.Fail():
                for offset, cause in zip(command.offsets, command.causes, strict=True):
                    found = self.owned(command.worker, command.grant, offset)
                    if found:
                        self.failed(*found, cause, live)
            case c.Release():
                for offset in command.offsets:
                    found = self.owned(command.worker, command.grant, offset)
                    if found:
                        self.give_back(*found)
            case c.Forfeit():
                for number, (holder, ids) in self.grants.items():
                    for offset in range(len(ids) if holder == command.worker else 0):
                        found = self.owned(holder, number, offset)
                        if found and (number, offset) in command.started:
                            self.failed(*found, j.WORKER_LOST, live)
                        elif found:
                            self.give_back(*found)
            case c.Cancel():
                for job_id in command.ids:
                    job = self.jobs.get(job_id)
                    if job and job.state == LEASED:
                        job.cancelling = True
                    elif job and job.state in (WAITING, LATER):
                        self.end(job_id, j.CANCELLED)
            case c.Clock():
                self.clock(command.wall)
            case c.Replay():
                for job_id in command.ids:
                    job = self.jobs.get(job_id)
                    if job and job.state in (j.FAILED, j.CANCELLED) and not job.faded:
                        job.state, job.generation = WAITING, job.generation + 1
                        job.burned = job.lost = job.expires = job.wakes = 0
            case c.Purge():
                for job_id in command.ids:
                    job = self.jobs.get(job_id)
                    if job and job.state in (j.FAILED, j.CANCELLED):
                        del self.jobs[job_id]
            case c.Configure():
                self.cap = command.settings.client_inflight_max

    def submit(self, command: c.Submit, live: JobBook) -> None:
        spec = msgspec.msgpack.decode(command.spec, type=j.Spec)
        for job_id, body in zip(command.ids, command.bodies, strict=True):
            if job_id in self.jobs:
                continue
            job = self.jobs[job_id] = Job(command.client, spec, body, expires=command.expires_at)
            if command.delay_ns:
                job.state, job.until = LATER, live.time + command.delay_ns
            elif command.not_before > live.wall:
                job.state, job.wakes = LATER, command.not_before

    def assign(self, command: c.Assign, live: JobBook, changes: Changes) -> None:
        room = 0
        for client in CLIENTS:
            mine = [job for job in self.jobs.values() if job.client == client]
            ready = sum(job.state == WAITING and job.spec.route == command.route for job in mine)
            free = self.cap - sum(job.state == LEASED for job in mine) if self.cap else ready
            room += min(ready, max(0, free))
        expected = min(room, command.count)
        assert len(changes.grants) == bool(expected)
        if not expected:
            return
        (grant,) = changes.grants
        assert grant.number not in self.grants, "a grant number came twice"
        assert len(grant.rows) == expected
        self.grants[grant.number] = (command.worker, [row.id for row in grant.rows])
        for offset, row in enumerate(grant.rows):
            job = self.jobs[row.id]
            assert job.state == WAITING
            assert job.spec.route == command.route
            job.state, job.owner = LEASED, (grant.number, offset)
            job.attempts += 1

    def give_back(self, job_id: str, job: Job) -> None:
        if job.cancelling:
            self.end(job_id, j.CANCELLED)
        else:
            job.state, job.owner = WAITING, None

    def failed(self, job_id: str, job: Job, cause: str, live: JobBook) -> None:
        if job.cancelling or cause == j.CANCEL_CONFIRMED:
            self.give_back(job_id, job)
            return
        job.burned += 1
        job.lost += cause == j.WORKER_LOST
        settings = live.settings
        limit = job.spec.max_attempts or settings.max_attempts
        again = cause in j.RETRY_ON_DEFAULT and job.burned < limit
        if job.lost >= settings.lost_workers_max or not again:
            self.end(job_id, j.FAILED)
            return
        job.state, job.owner, job.wakes = LATER, None, 0
        base = min(settings.backoff_first_ns << (job.burned - 1), settings.backoff_max_ns)
        row = live.find(job_id)
        assert row is not None
        assert isinstance(row.place, Delay)
        job.until = row.place.until
        assert base * 8 // 10 <= job.until - live.time <= base * 12 // 10

    def clock(self, wall: int) -> None:
        for job_id, job in self.jobs.items():
            if job.state in (WAITING, LATER) and 0 < job.expires <= wall:
                if job.state == LATER and job.wakes > 0 and (job.wakes < job.expires):
                    job.wakes = 0
                self.end(job_id, j.CANCELLED)
            elif job.state == LATER and 0 < job.wakes <= wall:
                job.state, job.wakes = WAITING, 0
            elif job.state == LEASED and 0 < job.expires <= wall:
                job.expires = 0  # it had begun when its time came

    # -------------------------------------------------------------- comparison

    def compare(self, live: JobBook, changes: Changes) -> None:
        told = {row.id: s.state for s in changes.settlements for row in s.rows}
        gone = {i for i in self.settled if live.find(i) is None}
        assert told == {i: s for i, s in self.settled.items() if i not in gone}
        self.settled = {}
        for job_id, job in list(self.jobs.items()):
            row = live.find(job_id)
            if row is None:
                assert job.state in j.TERMINAL, "an unsettled job was lost"
                del self.jobs[job_id]
                continue
            assert row.attempt == job.attempts
            assert live.generations.get(job_id, (0, 0))[0] == job.generation
            assert (job_id in live.cancelling) == job.cancelling
            self.compare_row(job, row)
        assert sum(map(len, live.known)) == len(self.jobs)

    def compare_row(self, job: Job, row: Row) -> None:
        place = row.place
        if isinstance(place, Settlement):
            assert place.state == job.state
            job.faded = place.faded
            if place.faded:
                assert row.body is None
            elif job.state == j.DONE:
                assert job.output is not None
                kept = isinstance(row.body, Kept)
                assert len(job.output) == row.body.size if kept else row.body == job.output
            else:
                assert row.body == job.body
            return
        assert row.body == job.body
        if isinstance(place, Lane):
            assert job.state == WAITING
        elif isinstance(place, Grant):
            assert job.state == LEASED
            assert job.owner is not None
            number, offset = job.owner
            assert place.number == number
            assert place.rows[offset] is row
        else:
            assert job.state == LATER
            assert isinstance(place, Watch) == bool(job.wakes)


class Walk:
    """A seeded source of commands, right and wrong ones, for the book as it is."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.live = JobBook()
        self.model = Model()
        self.number = 0

    def some_ids(self, most: int = 4) -> list[str]:
        known = list(self.model.jobs) or ["nobody"]
        return [*self.rng.choices(known, k=self.rng.randint(1, most)), "j-none"][: most + 1]

    def fresh(self) -> str:
        # Few names, so that forgotten ones come back.
        self.number += 1
        return f"j{self.number if self.rng.random() < 0.6 else self.rng.randint(0, 150)}"

    def attempt(self) -> tuple[str, int, int]:
        """A grant that is alive (mostly), old or invented, with its worker (mostly) and size."""
        rng = self.rng
        alive = [(g.worker.id, g.number, len(g.rows)) for g in self.live.grants.values()]
        dead = [(w, n, len(ids)) for n, (w, ids) in self.model.grants.items()]
        choices = [alive] * 7 + [dead] * 2
        worker, number, size = rng.choice(rng.choice(choices) or [("w1", 999_999, 3)])
        return (rng.choice(WORKERS) if rng.random() < 0.05 else worker), number, size

    def offsets(self, size: int) -> list[int]:
        rng = self.rng
        found = rng.sample(range(size), rng.randint(1, size))
        if rng.random() < 0.15:
            found += rng.choice(([found[0]], [size], [-1], [size + 300]))
        return found

    def submit(self) -> c.Submit:
        rng, live = self.rng, self.live
        ids = [self.fresh() for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.3:
            ids += self.some_ids()
        bodies = [job_id.encode() * rng.randint(1, 2) for job_id in ids]
        odd: dict[str, int] = {}
        if rng.random() < 0.2:
            odd["delay_ns"] = rng.randint(1, 50)
        elif rng.random() < 0.2:
            odd["not_before"] = live.wall + rng.randint(0, 60)
        if rng.random() < 0.25:
            odd["expires_at"] = live.wall + rng.randint(1, 60)
        spec = msgspec.Raw(msgspec.msgpack.encode(rng.choice(SPECS)))
        digests = b"".join(map(digest, bodies))
        client = rng.choice(CLIENTS)
        return c.Submit(client, f"s-{client}", spec, ids, digests, bodies, **odd)

    def assign(self) -> c.Assign:
        rng = self.rng
        return c.Assign(rng.choice(WORKERS), rng.choice(ROUTES), rng.randint(1, 9))

    def finish(self) -> c.Finish:
        rng = self.rng
        worker, number, size = self.attempt()
        offsets = self.offsets(size) if rng.random() < 0.7 else None
        count = rng.randint(0, size + 1) if offsets is None else len(offsets)
        outputs = [rng.choice((b"", b"out", b"L" * 1500)) + bytes([n]) for n in range(count)]
        notes = {o: j.Note(ran_ns=5) for o in (0, size + 3, -1, -99) if rng.random() < 0.1}
        return c.Finish(worker, number, offsets, outputs, notes)

    def fail(self) -> c.Fail:
        rng = self.rng
        worker, number, size = self.attempt()
        offsets = self.offsets(size)
        causes = rng.choices(
            (j.HANDLER_ERROR, j.TIMEOUT, j.WORKER_LOST, j.CANCEL_CONFIRMED), k=len(offsets)
        )
        return c.Fail(worker, number, offsets, causes, ["said"] * len(offsets))

    def release(self) -> c.Release:
        worker, number, size = self.attempt()
        return c.Release(worker, number, self.offsets(size))

    def forfeit(self) -> c.Forfeit:
        rng = self.rng
        grants = self.live.grants.values()
        started = [(g.number, o) for g in grants for o, _ in g.owned() if rng.random() < 0.5]
        return c.Forfeit(rng.choice((*WORKERS, "w-none")), started)

    def configure(self) -> c.Configure:
        rng = self.rng
        return c.Configure(
            c.Settings(
                backoff_first_ns=20,
                backoff_max_ns=100,
                client_inflight_max=rng.choice((0, 1, 3, 8)),
                retention_ns=rng.choice((200, 2000, 1 << 60)),
                results_max=rng.choice((5, 30)),
                result_bytes_max=rng.choice((100, 1 << 30)),
                ids_max=rng.choice((20, 60)),
            )
        )

    def commands(self) -> list[c.Command]:
        rng = self.rng
        if self.live.applied == 0:
            return [self.configure()]
        kinds = "SSSAAAAFFFFEERXCCKYPQT"
        made: c.Command
        match rng.choice(kinds) if rng.random() < 0.97 else "G":
            case "S":
                made = self.submit()
            case "A":
                return [self.assign()]
            case "F":
                made = self.finish()
            case "E":
                made = self.fail()
            case "R":
                made = self.release()
            case "X":
                made = self.forfeit()
            case "C":
                made = c.Cancel(self.some_ids(), "asked")
            case "K":
                made = c.Clock(self.live.wall + rng.randint(0, 3))
            case "Y" | "P":
                made = c.Replay(self.some_ids(8))
            case "Q":
                made = c.Purge(self.some_ids(2))
            case "G":
                made = self.configure()
            case _:
                made = c.Tick()
        return [made, self.assign()] if rng.random() < 0.3 else [made]

    def payload(self) -> bytes:
        live, step = self.live, self.rng.choice((0, 1, 5, 20))
        return c.encode_payload(live.time + step, live.wall + step, self.commands())


@pytest.mark.parametrize("seed", SEEDS)
def test_book_model_and_reloaded_book_go_the_same_way(seed: int) -> None:
    walk = Walk(seed)
    live, model, loaded = walk.live, walk.model, JobBook()
    for index in range(1, ENTRIES + 1):
        payload = walk.payload()

        entry = c.decode_entry(index, payload)
        changes = live.apply(entry)
        loaded.apply(c.decode_entry(index, payload))

        model.wake(entry.time)
        for command in entry.commands:
            model.apply(command, live, changes)
        model.compare(live, changes)
        invariants.check(live)
        invariants.check(loaded)
        assert image.fingerprint(live) == image.fingerprint(loaded), (index, entry.commands)
        if walk.rng.random() < 0.1:
            loaded = image.load(list(image.dump(live)))
            invariants.check(loaded)
            assert image.fingerprint(live) == image.fingerprint(loaded), index
    totals = live.totals
    assert min(totals.done, totals.failed, totals.cancelled, totals.retried, totals.stale) > 0
    assert min(totals.repeated, totals.faded + totals.evicted) > 0
