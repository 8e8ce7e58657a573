"""Random lives, told three times over: to a book, to a book loaded from images taken of it at random
moments, and to a naive book that predicts everything either of them shows.

A failure names its seed and entry. `EKIDEN_WALK_SEEDS=100..200` walks other seeds than the usual.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.properties.naive_book import LEASED, NAPPING, WAITING, Job, NaiveBook, Told

from ekiden.core import book as book_module
from ekiden.core import commands as c
from ekiden.core import image, invariants
from ekiden.core.book import JobBook
from ekiden.core.effects import Changes
from ekiden.core.queues import Lane
from ekiden.core.rows import Delay, Grant, Kept, Row, Settlement, Watch
from ekiden.model import jobs as j
from ekiden.model.caches import CacheUse

ENTRIES = 400
SEEDS = range(24)
if "EKIDEN_WALK_SEEDS" in os.environ:
    first, last = map(int, os.environ["EKIDEN_WALK_SEEDS"].split(".."))
    SEEDS = range(first, last + 1)

WORKERS = ("w1", "w2", "w3")
CACHES = ("d1", "d2", "d3")
CLIENTS = ("ann", "bob", "cid", "dee")
SPECS = tuple(
    j.Spec(
        "n",
        route,
        priority=priority,
        max_attempts=attempts,
        retry_on=retry_on,
        run=("", "night")[attempts % 2],
        caches=tuple(CacheUse(each, "aa" * 32, 9) for each in route.data),
        blobs=(("shared", 70_000),) if priority else (),
    )  # fmt: skip
    for route in (j.Route("a.x"), j.Route("a.y", key="k"), j.Route("a.x", pin="w1", data=("d1",)))
    for priority in (0, 5)
    for attempts, retry_on in ((0, None), (2, (j.TIMEOUT, j.WORKER_LOST)), (9, None))
)
TALLIED = (c.Cancel, c.Replay, c.Purge, c.RemoveCache)
CAUSES = (j.HANDLER_ERROR, j.TIMEOUT, j.WORKER_LOST, j.CANCEL_CONFIRMED)


class Walk:
    """A seeded source of commands, sensible and silly, for the book as it is."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.live = JobBook()
        self.naive = NaiveBook(self.backoff_until)
        self.fresh = 0
        kinds = "SSSSAAAAAFFFFEERXCKYQTPM"
        # Some lives are short of workers, some full of failures, some of people changing things.
        self.kinds = kinds + self.rng.choice(("", "SSSSS", "EEEXX", "CCYYQ", "AAFF"))

    def backoff_until(self, job_id: str, about: int) -> int:
        row = self.live.find(job_id)
        if row is not None and type(row.place) is Delay:
            return row.place.until
        return about  # it ended in the same entry, by a cancel say, and is not to be seen any more

    def ids(self, most: int) -> list[str]:
        known = list(self.naive.jobs) or ["nobody"]
        return [*self.rng.choices(known, k=self.rng.randint(1, most)), "j-none"]

    def new_id(self) -> str:
        # Few names, so that forgotten ones come back.
        self.fresh += 1
        return f"j{self.fresh if self.rng.random() < 0.6 else self.rng.randint(0, 150)}"

    def grant(self) -> tuple[str, int, int]:
        """Alive (mostly), old or invented; with its worker (mostly) and its size."""
        rng = self.rng
        alive = [(g.worker.id, g.number, len(g.rows)) for g in self.live.grants.values()]
        ever = [(w, n, len(jobs)) for n, (w, _, jobs) in self.naive.grants.items()]
        worker, number, size = rng.choice(rng.choice([alive] * 7 + [ever]) or [("w1", 999_999, 3)])
        return (rng.choice(WORKERS) if rng.random() < 0.05 else worker), number, size

    def offsets(self, size: int) -> list[int]:
        rng = self.rng
        found = rng.sample(range(size), rng.randint(1, size))
        if rng.random() < 0.15:
            found += rng.choice(([found[0]], [size], [-1], [size + 300]))
        return found

    def submit(self) -> c.Command:
        rng, wall = self.rng, self.live.wall
        ids = [self.new_id() for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.3:
            ids += self.ids(4)
        bodies = [job_id.encode() * rng.choice((1, 1, 1, 2)) for job_id in ids]
        of = rng.choice(SPECS)
        if rng.random() < 0.2 and self.naive.jobs:
            # A client that comes back sends again what it sent before, among other things.
            known = rng.choice(list(self.naive.jobs.values()))
            ids, bodies, of = [known.id, *ids], [known.body, *bodies], known.spec
        odd: dict[str, Any] = {}
        if rng.random() < 0.2:
            odd["delay_ns"] = rng.randint(1, 50)
        elif rng.random() < 0.2:
            odd["not_before"] = max(0, wall + rng.randint(-5, 60))
        if rng.random() < 0.25:
            odd["expires_at"] = max(1, wall + rng.randint(-5, 60))
        spec = msgspec.Raw(msgspec.msgpack.encode(of))
        digests = b"".join(hashlib.sha256(body).digest()[:8] for body in bodies)
        client = rng.choice(CLIENTS)
        if rng.random() < 0.5:
            odd["blobs"] = self.blobs(len(ids))
        return c.Submit(client, f"s-{client}", spec, ids, digests, bodies, **odd)

    def assign(self) -> c.Command:
        rng = self.rng
        waiting = [route for route, queue in self.live.queues.items() if queue.lanes]
        route = rng.choice(waiting or [j.Route("a.none")])
        return c.Assign(rng.choice(WORKERS), route, rng.randint(1, 9))

    def blobs(self, size: int) -> dict[int, list[tuple[str, int]]]:
        """Few names, so that many jobs share one; and named for jobs that are not there."""
        rng = self.rng
        return {
            offset: [(f"b{rng.randint(0, 5)}", 100_000) for _ in range(rng.randint(1, 3))]
            for offset in (*range(size), size + 3, -1)
            if rng.random() < 0.2
        }

    def notes(self, size: int) -> dict[int, j.Note]:
        return {o: j.Note(ran_ns=5) for o in (0, size + 3, -1, -99) if self.rng.random() < 0.1}

    def finish(self) -> c.Command:
        rng = self.rng
        worker, number, size = self.grant()
        offsets = self.offsets(size) if rng.random() < 0.7 else None
        count = rng.randint(1, size + 1) if offsets is None else len(offsets)
        outputs = [rng.choice((b"", b"out", b"L" * 1500)) + bytes([n]) for n in range(count)]
        return c.Finish(worker, number, offsets, outputs, self.notes(size), self.blobs(size))

    def fail(self) -> c.Command:
        worker, number, size = self.grant()
        offsets = self.offsets(size)
        causes = self.rng.choices(CAUSES, k=len(offsets))
        said = ["said"] * len(offsets)
        return c.Fail(worker, number, offsets, causes, said, self.notes(size))

    def release(self) -> c.Command:
        worker, number, size = self.grant()
        return c.Release(worker, number, self.offsets(size))

    def forfeit(self) -> c.Command:
        rng = self.rng
        grants = self.live.grants.values()
        started = [(g.number, o) for g in grants for o, _ in g.owned() if rng.random() < 0.5]
        return c.Forfeit(rng.choice((*WORKERS, "w-none")), started)

    def configure(self) -> c.Command:
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

    def command(self) -> c.Command:
        rng = self.rng
        if rng.random() < 0.03 or self.live.applied == 0:
            return self.configure()
        match rng.choice(self.kinds):
            case "S":
                return self.submit()
            case "A":
                return self.assign()
            case "F":
                return self.finish()
            case "E":
                return self.fail()
            case "R":
                return self.release()
            case "X":
                return self.forfeit()
            case "C":
                return c.Cancel(self.ids(4), rng.choice(("asked", "no need")))
            case "K":
                return c.Clock(max(0, self.live.wall + rng.randint(-3, 3)))
            case "Y":
                return c.Replay(self.ids(8))
            case "Q":
                return c.Purge(self.ids(2))
            case "P":
                use = CacheUse(rng.choice(CACHES), rng.choice(("aa", "bb")) * 32, 9)
                return c.PutCache(use, "ann", rng.choice(("a.>", "b.>")), 3, 1000)
            case "M":
                return c.RemoveCache(rng.choices(CACHES, k=rng.randint(1, 3)))
            case _:
                return c.Tick()

    def entry(self) -> bytes:
        live, rng = self.live, self.rng
        count = rng.choice((1, 1, 1, 2, 3))
        step = rng.choice((0, 1, 5, 20))
        wall = live.wall + step + rng.choice((0, 0, 0, 7, -min(7, live.wall)))
        return c.encode_payload(live.time + step, wall, [self.command() for _ in range(count)])


def seen(book: JobBook, row: Row) -> dict[str, Any]:
    """What a book shows of a job."""
    place = row.place
    view: dict[str, Any] = {
        "client": row.origin.client.id,
        "attempt": row.attempt,
        "causes": row.history,
        "generation": book.generations.get(row.id, (0, 0))[0],
        "cancelling": book.cancelling.get(row.id),
        "note": row.note,
        "body": row.body if not isinstance(row.body, Kept) else row.body.size,
    }
    if isinstance(place, Settlement):
        return view | {
            "state": place.state,
            "ended": (place.worker, place.leased, place.time, place.wall, place.reason),
            "faded": place.faded,
        }
    if isinstance(place, Grant):
        (offset,) = (n for n, other in enumerate(place.rows) if other is row)
        return view | {"state": LEASED, "held": (place.worker.id, place.number, offset)}
    if isinstance(place, Lane):
        return view | {"state": WAITING, "route": place.queue.route}
    assert isinstance(place, Delay)
    return view | {"state": NAPPING, "until": (place.until, isinstance(place, Watch))}


def expected(naive: NaiveBook, job: Job) -> dict[str, Any]:
    """What the book should show of it."""
    body: bytes | int | None = job.body
    if job.group is not None and job.group.faded:
        body = None
    elif job.state == j.DONE and job.output is not None:
        body = job.output if len(job.output) <= 1024 else len(job.output)
    view: dict[str, Any] = {
        "client": job.client,
        "attempt": job.attempt,
        "causes": job.causes,
        "generation": job.generation,
        "cancelling": job.cancel_reason,
        "note": job.note,
        "body": body,
        "state": job.state,
    }
    if job.group is not None:
        end = job.group
        ended = (end.worker, end.leased, end.time, end.wall, end.reason)
        return view | {"ended": ended, "faded": end.faded}
    if job.state == LEASED:
        return view | {"held": (naive.grants[job.grant][0], job.grant, job.offset)}
    if job.state == WAITING:
        return view | {"route": job.route}
    assert job.nap is not None
    return view | {"until": (job.nap.until, job.nap in naive.watches)}


def told(changes: Changes) -> Told:
    """What the book has to tell, in the naive book's words."""
    return Told(
        [
            (s.fresh, [n for n, _ in s.repeated], [n for n, _ in s.conflicts])
            for s in changes.submits
        ],
        [(t.changed, t.stopping, t.settled, t.unknown) for t in changes.tallies],
        [],
        [],
        [],
        changes.stale,
        changes.puts,
    )


def compare(
    live: JobBook, naive: NaiveBook, entry: c.Entry, changes: Changes, saying: Told
) -> None:
    tallied = [each for each in entry.commands if isinstance(each, TALLIED)]
    caches = live.caches.known.values()
    mine = told(changes)
    assert mine.submits == saying.submits
    assert mine.tallies == saying.tallies
    assert mine.stale == saying.stale
    assert mine.puts == saying.puts
    assert [cache.use.id for cache in changes.removed] == [
        cache_id
        for command, (removed, *_) in zip(tallied, saying.tallies, strict=True)
        if isinstance(command, c.RemoveCache)
        for cache_id in removed
    ]
    known = {cache.use.id: (cache.use.manifest, cache.targets) for cache in caches}
    assert known == naive.caches
    assert live.blobs.counts() == Counter(
        blob for job in naive.jobs.values() for blob, _ in job.held()
    )
    assert [(g.number, g.worker.id) for g in changes.grants] == [g[:2] for g in saying.grants]
    assert [(s.state, s.reason, [row.id for row in s.rows]) for s in changes.settlements] == [
        (g.state, g.reason, [job.id for job in g.jobs]) for g in saying.groups
    ]
    assert [grant.number for grant, _ in changes.stops] == [grant for grant, _ in saying.stops]
    assert [offset for _, offset in changes.stops] == [offset for _, offset in saying.stops]
    rows = {row.id: row for shard in live.known for row in shard.values()}
    assert rows.keys() == naive.jobs.keys()
    for job_id, job in naive.jobs.items():
        assert seen(live, rows[job_id]) == expected(naive, job), job_id
    for lane, jobs in naive.lanes.items():
        lying = live.queues[lane[0]].lanes[lane[1:]]
        assert [row.id for row in lying.rows if row.place is lying] == [job.id for job in jobs]
    assert {name: getattr(live.totals, name) for name in naive.totals} == naive.totals


@pytest.mark.parametrize("seed", SEEDS)
def test_book_naive_book_and_reloaded_book_go_the_same_way(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        # Sweeping idle ledgers and queues must not be noticed by anybody.
        monkeypatch.setattr(book_module, "IDLE_KEPT", 2)
    walk = Walk(seed)
    live, naive, loaded = walk.live, walk.naive, JobBook()
    for index in range(1, ENTRIES + 1):
        payload = walk.entry()
        entry = c.decode_entry(index, payload)
        try:
            changes = live.apply(entry)
            saying = naive.apply(entry)
            loaded.apply(c.decode_entry(index, payload))

            compare(live, naive, entry, changes, saying)
            invariants.check(live)
            invariants.check(loaded)
            assert image.fingerprint(live) == image.fingerprint(loaded)
            if walk.rng.random() < 0.1:
                loaded = image.load(list(image.dump(live)))
                invariants.check(loaded)
                assert image.fingerprint(live) == image.fingerprint(loaded)
        except BaseException as error:
            error.add_note(f"seed {seed}, entry {index}: {entry}")
            raise
    happened = walk.naive.totals
    rare = ("faded", "evicted")  # a life under generous settings forgets nothing
    assert all(count for what, count in happened.items() if what not in rare), happened
