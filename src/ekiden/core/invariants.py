"""What is true of every book after every entry. The simulator and the random walks check it."""

from __future__ import annotations

from ekiden.core.book import JobBook
from ekiden.core.caches import Caches
from ekiden.core.holdings import Holdings
from ekiden.core.queues import Lane
from ekiden.core.rows import ClientLedger, Delay, Grant, Row, Settlement
from ekiden.core.runs import Runs
from ekiden.model.jobs import DONE


def check(book: JobBook) -> None:
    """Counters agree with what they count, and every row lies in exactly the place it names."""
    live: dict[str, list[int]] = {}
    ready: dict[int, int] = {}
    leased: dict[int, int] = {}
    delayed = settled = 0
    for shard in book.known:
        for job_id, row in shard.items():
            assert row.id == job_id, (row.id, job_id)
            place = row.place
            if isinstance(place, Settlement):
                settled += 1
                continue
            count = live.setdefault(row.origin.client.id, [0, 0, 0])
            count[0] += 1
            assert isinstance(row.body, bytes), job_id
            count[1] += len(row.body)
            if isinstance(place, Lane):
                ready[id(place)] = ready.get(id(place), 0) + 1
            elif isinstance(place, Grant):
                assert book.grants.get(place.number) is place, job_id
                leased[place.number] = leased.get(place.number, 0) + 1
                count[2] += 1
            else:
                assert isinstance(place, Delay), (job_id, place)
                delayed += 1
    assert delayed == book.delayed, (delayed, book.delayed)
    assert settled == book.ids_kept, (settled, book.ids_kept)
    _check_clients(book, live)
    _check_queues(book, ready)
    _check_grants(book, leased)
    _check_retention(book)
    _check_runs(book)
    _check_data(book)
    for job_id in book.cancelling:
        found = book.find(job_id)
        assert found is not None, job_id
        assert isinstance(found.place, Grant), job_id


def _check_clients(book: JobBook, live: dict[str, list[int]]) -> None:
    assert book.live_bytes == sum(count[1] for count in live.values()), book.live_bytes
    for client in book.clients.values():
        seen = live.pop(client.id, [0, 0, 0])
        assert [client.live, client.bytes, client.inflight] == seen, (client.id, seen)
        cap = book.settings.client_inflight_max
        assert client.parked == bool(cap and client.inflight >= cap), client.id
        _check_parking(client)
    assert not live, live


def _check_parking(client: ClientLedger) -> None:
    for lane in client.lanes:
        assert lane.in_ring != client.parked, client.id
        assert lane.ready, client.id


def _check_queues(book: JobBook, ready: dict[int, int]) -> None:
    for queue in book.queues.values():
        waiting = parked = 0
        for lane in queue.lanes.values():
            assert lane.ready == ready.pop(id(lane), 0), (queue.route, lane.priority)
            assert lane.ready, (queue.route, lane.priority)
            waiting += lane.ready if lane.in_ring else 0
            parked += 0 if lane.in_ring else lane.ready
        assert queue.ready == waiting, (queue.route, queue.ready, waiting)
        assert queue.parked == parked, (queue.route, queue.parked, parked)
        rung = [lane for ring in queue.rings.values() for lane in ring]
        assert len(rung) == len(set(map(id, rung))), queue.route
        assert all(lane.in_ring for lane in rung), queue.route
    assert not ready, "rows in a lane of no queue"


def _check_grants(book: JobBook, leased: dict[int, int]) -> None:
    held: dict[str, int] = {}
    by_queue: dict[int, int] = {}
    for number, grant in book.grants.items():
        assert grant.left == len(grant.owned()) == leased.pop(number, 0), number
        assert grant.left, number
        assert number < book.next_grant, number
        held[grant.worker.id] = held.get(grant.worker.id, 0) + grant.left
        by_queue[id(grant.queue)] = by_queue.get(id(grant.queue), 0) + grant.left
    assert not leased, leased
    assert held == {w.id: w.held for w in book.workers.values()}, held
    for queue in book.queues.values():
        assert queue.leased == by_queue.pop(id(queue), 0), queue.route
    assert not by_queue, "grants of a queue the book does not hold"


def _check_runs(book: JobBook) -> None:
    again = Runs()
    again.recount(row for shard in book.known for row in shard.values())
    counted = {name: tally.counts() for name, tally in book.runs.tallies.items()}
    assert counted == {name: tally.counts() for name, tally in again.tallies.items()}, counted


def _check_data(book: JobBook) -> None:
    caches, blobs = Caches(), Holdings()
    blobs.of_job = book.blobs.of_job
    held: set[str] = set()
    for shard in book.known:
        for row in shard.values():
            ended = row.place if isinstance(row.place, Settlement) else None
            if ended is None:
                caches.submitted(row.origin, 1)
            if ended is None or not ended.faded:
                blobs.loaded(row, is_output=ended is not None and ended.state == DONE)
                held.add(row.id)
    assert caches.jobs == book.caches.jobs, book.caches.jobs
    assert blobs.counts() == book.blobs.counts(), book.blobs.counts()
    assert not book.blobs.of_job.keys() - held, "blobs are held for nobody"


def _check_retention(book: JobBook) -> None:
    kept: list[Row] = [row for s in book.settled for row in s.rows]
    assert book.results_kept == len(kept)
    assert book.result_bytes == sum(s.bytes for s in book.settled)
    assert book.ids_kept == len(kept) + sum(len(s.rows) for s in book.faded)
    for settlement in [*book.settled, *book.faded]:
        for row in settlement.rows:
            assert row.place is settlement, row.id
            assert book.find(row.id) is row, row.id
