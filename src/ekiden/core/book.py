"""The book of jobs: the only state, changed only by `apply`.

A live leader, a follower and a restart run the same `apply` over the same entries, so they cannot
drift apart. It reads no clock and draws no random number: time comes with the entry, jitter from
the entry's index. An exception in here is a bug and ends the process.

What it must never do: let an attempt that does not own a job settle it, lose an accepted job, or
record two results for one.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from ekiden import limits
from ekiden.core import commands as c
from ekiden.core.caches import Caches
from ekiden.core.effects import Changes, SubmitOutcome, Tally
from ekiden.core.holdings import Holdings
from ekiden.core.queues import Lane, Queue, park, unpark
from ekiden.core.rows import (
    ORDINALS,
    ClientLedger,
    Delay,
    Grant,
    Kept,
    Origin,
    Row,
    Settlement,
    Watch,
    WorkerLedger,
)
from ekiden.core.runs import Runs
from ekiden.model import jobs as j
from ekiden.model.caches import BlobRef

# The table of ids is many dicts. A dict that grows to a million keys stalls the loop for 25-55 ms
# while it moves, and each new key is a walk through memory that no cache holds. Ids that differ at
# their end only were mostly made together: they share a dict, which is small and fresh in the cache
# while they come and while they go. Other ids are spread at random. Order is never taken from here.
SHARDS: Final = 1024
SHARED_TAIL: Final = -3
_MASK: Final = SHARDS - 1

# Empty queues and ledgers are kept for reuse up to this many, then swept: a job at a time on one
# subject must not build and drop its queue for each. The next sweep comes when their number has
# doubled, so that ten thousand that are all in use are not looked through for each newcomer.
IDLE_KEPT: Final = 4096

# Causes kept of one job with their words. A job may have more attempts than this, up to its own
# limit; what is beyond is a line without words.
HISTORY_MAX: Final = 64
SPECS_CACHED: Final = 4096

_decode_spec = msgspec.msgpack.Decoder(j.Spec).decode


class Totals(msgspec.Struct):
    """Counters since the group began; part of the state, so a restart does not reset them."""

    accepted: int = 0
    repeated: int = 0
    leased: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    stale: int = 0
    faded: int = 0
    """Results forgotten before their retention ended, for want of room."""
    evicted: int = 0
    """Ids forgotten before their retention ended, for want of room."""


def _spacious() -> dict[str, Row]:
    """An empty dict that will keep the hash of each key beside it.

    CPython leaves hashes out while all keys are plain strings, and then visits the key itself at
    every collision: in a large table that is a cache miss more for every second lookup. A dict that
    ever had a key of another kind keeps them.
    """
    table: dict[Any, Row] = {0: None}  # type: ignore[dict-item]
    del table[0]
    return table


class JobBook:
    """All jobs of a group."""

    def __init__(self) -> None:
        self.applied: j.Index = 0
        self.time = 0
        self.wall: j.WallTime = 0
        self.digest = 0
        """Chained over what every entry did: two books with equal digests went the same way."""
        self.settings = c.Settings()
        self.totals = Totals()
        self.next_grant = 1
        self.next_seq = 1
        self.known: list[dict[str, Row]] = [_spacious() for _ in range(SHARDS)]
        self.queues: dict[j.Route, Queue] = {}
        self.clients: dict[str, ClientLedger] = {}
        self.workers: dict[str, WorkerLedger] = {}
        self.grants: dict[int, Grant] = {}
        self.cancelling: dict[str, str] = {}
        self.generations: dict[str, tuple[int, int]] = {}
        """Id → (generation, length of history when it was replayed), for replayed jobs only."""
        self.delays: list[Delay] = []
        self.watches: list[Watch] = []
        self.delayed = 0
        self.live_bytes = 0
        """Of the inputs of all jobs that have not ended."""
        self.settled: deque[Settlement] = deque()
        self.faded: deque[Settlement] = deque()
        self.results_kept = 0
        self.result_bytes = 0
        self.ids_kept = 0
        self.runs = Runs()
        self.blobs = Holdings()
        self.caches = Caches()
        self._sweep_clients_at = IDLE_KEPT
        self._sweep_queues_at = IDLE_KEPT
        self._specs: dict[bytes, j.Spec] = {}
        self._changes = Changes()
        self._came_in = 0
        self._command = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            c.Submit: self._submit,
            c.Assign: self._assign,
            c.Finish: self._finish,
            c.Fail: self._fail,
            c.Release: self._release,
            c.Forfeit: self._forfeit,
            c.Cancel: self._cancel,
            c.Clock: self._clock,
            c.Replay: self._replay,
            c.Purge: self._purge,
            c.Configure: self._configure,
            c.Tick: lambda _: None,
            c.PutCache: self._put_cache,
            c.RemoveCache: self._remove_cache,
        }

    # -------------------------------------------------------------- entrance

    def apply(self, entry: c.Entry) -> Changes:
        """Change the book as the entry says, once, in order, and tell what changed."""
        assert entry.index == self.applied + 1, (entry.index, self.applied)
        assert entry.time >= self.time, (entry.index, entry.time, self.time)
        self.applied = entry.index
        self.time = entry.time
        self.wall = entry.wall
        self._changes = changes = Changes()
        self._came_in = 0
        if self.delays and self.delays[0].until <= entry.time:
            self._release_delays()
        for number, command in enumerate(entry.commands):
            self._command = number
            self._handlers[type(command)](command)
        self._retain()
        self.totals.stale += changes.stale
        totals = self.totals
        facts = (
            self.digest, entry.index, entry.time, totals.accepted, totals.leased, totals.done,
            totals.failed, totals.cancelled, totals.retried, totals.stale, self.next_grant,
            self.next_seq, self.ids_kept, self.result_bytes,
        )  # fmt: skip
        self.digest = zlib.crc32(repr(facts).encode())
        return changes

    def find(self, job_id: str) -> Row | None:
        """The row of that id, in whatever place it is."""
        return self.known[hash(job_id[:SHARED_TAIL]) & _MASK].get(job_id)

    def spec(self, raw: bytes) -> j.Spec:
        """Decoded once per distinct content. Only a cache: nothing depends on identity."""
        found = self._specs.get(raw)
        if found is None:
            if len(self._specs) >= SPECS_CACHED:
                self._specs.clear()
            found = self._specs[raw] = _decode_spec(raw)
        return found

    @property
    def leased(self) -> int:
        """Attempts leased at present."""
        return sum(worker.held for worker in self.workers.values())

    # -------------------------------------------------------------- submit

    def _submit(self, command: c.Submit) -> None:
        raw = bytes(command.spec)
        spec = self.spec(raw)
        client = self._client(command.client)
        queue = self._queue(spec.route)
        lane = self._lane(queue, spec.priority, client)
        origin = Origin(
            client, command.session, spec, raw, self.time, self.wall, command.digests,
            command.expires_at,
        )  # fmt: skip
        outcome = SubmitOutcome()
        self._changes.submits.append(outcome)
        known = self.known
        rows: list[Row] = []
        append = rows.append
        size = 0
        for job_id, body, ordinal in zip(command.ids, command.bodies, ORDINALS, strict=False):
            row = Row(job_id, ordinal, body, origin, lane)
            found = known[hash(job_id[:SHARED_TAIL]) & _MASK].setdefault(job_id, row)
            if found is not row:
                self._repeat(outcome, found, origin, ordinal)
                continue
            append(row)
            size += len(body)
        outcome.fresh = len(rows)
        self.totals.accepted += len(rows)
        if rows:
            self.runs.submitted(origin, len(rows))
            if command.blobs or spec.blobs:
                self.blobs.submitted(spec, rows, command.blobs)
            if spec.caches:
                self.caches.submitted(origin, len(rows))
            client.live += len(rows)
            client.bytes += size
            self.live_bytes += size
            self._place(command, queue, lane, rows)
        elif not lane.ready:
            queue.lanes.pop((lane.priority, client.id), None)

    def _place(self, command: c.Submit, queue: Queue, lane: Lane, rows: list[Row]) -> None:
        if command.expires_at:
            self._watch(Watch(command.expires_at, self._seq(), rows, expires=True))
        if command.delay_ns:
            self._delay(self.time + command.delay_ns, rows)
        elif command.not_before > self.wall:
            watch = Watch(command.not_before, self._seq(), rows, expires=False)
            for row in rows:
                row.place = watch
            self.delayed += len(rows)
            self._watch(watch)
        else:
            queue.add(lane, rows)
            self._changes.woken[queue] = None
            return
        if not lane.ready:
            queue.lanes.pop((lane.priority, lane.client.id), None)

    def _repeat(self, outcome: SubmitOutcome, row: Row, origin: Origin, ordinal: int) -> None:
        known, at = row.origin, 8 * row.ordinal
        mine = origin.digests[8 * ordinal : 8 * ordinal + 8]
        same = known.digests[at : at + 8] == mine and known.spec == origin.spec
        (outcome.repeated if same else outcome.conflicts).append((ordinal, row))
        self.totals.repeated += same

    def _client(self, client_id: str) -> ClientLedger:
        found = self.clients.get(client_id)
        if found is None:
            if len(self.clients) >= self._sweep_clients_at:
                self.clients = {k: v for k, v in self.clients.items() if v.live}
                self._sweep_clients_at = max(IDLE_KEPT, 2 * len(self.clients))
            found = self.clients[client_id] = ClientLedger(client_id)
        return found

    def _queue(self, route: j.Route) -> Queue:
        found = self.queues.get(route)
        if found is None:
            if len(self.queues) >= self._sweep_queues_at:
                self.queues = {r: q for r, q in self.queues.items() if q.lanes or q.leased}
                self._sweep_queues_at = max(IDLE_KEPT, 2 * len(self.queues))
            found = self.queues[route] = Queue(route)
        return found

    def _lane(self, queue: Queue, priority: int, client: ClientLedger) -> Lane:
        found = queue.lanes.get((priority, client.id))
        if found is None:
            found = Lane(queue, priority, client, self._seq())
            queue.lanes[priority, client.id] = found
        return found

    def _seq(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1

    # -------------------------------------------------------------- time

    def _delay(self, until: int, rows: list[Row]) -> None:
        delay = Delay(until, self._seq(), rows)
        for row in rows:
            row.place = delay
        self.delayed += len(rows)
        heapq.heappush(self.delays, delay)

    def _watch(self, watch: Watch) -> None:
        heapq.heappush(self.watches, watch)

    def _release_delays(self) -> None:
        while self.delays and self.delays[0].until <= self.time:
            self._wake(heapq.heappop(self.delays))

    def _wake(self, delay: Delay) -> None:
        rows = [row for row in delay.rows if row.place is delay]
        self.delayed -= len(rows)
        for row in rows:
            self._ready(row)

    def _clock(self, command: c.Clock) -> None:
        while self.watches and self.watches[0].until <= command.wall:
            watch = heapq.heappop(self.watches)
            if not watch.expires:
                self._wake(watch)
                continue
            self._end_waiting(
                [
                    row
                    for row in watch.rows
                    if isinstance(row.place, Lane | Delay) and row.origin.expires_at == watch.until
                ],
                j.EXPIRED,
            )

    def _ready(self, row: Row, *, front: bool = False, returns: bool = False) -> None:
        spec = row.origin.spec
        route = spec.route
        if row.history is not None and row.history[-1].burned and not route.pin:
            # A route of its own: whoever burned the last attempt is the last to be offered it.
            route = msgspec.structs.replace(route, avoid=row.history[-1].worker)
        queue = self._queue(route)
        lane = self._lane(queue, spec.priority, row.origin.client)
        if returns:
            lane.bury()
        row.place = lane
        queue.add(lane, [row], front=front)
        self._changes.woken[queue] = None

    def _unplace(self, row: Row) -> None:
        """Take a waiting row out of where it waits; it lies dead there until it surfaces."""
        place = row.place
        row.place = None
        if isinstance(place, Lane):
            place.queue.discard(place)
        else:
            self.delayed -= 1

    # -------------------------------------------------------------- leases

    def _assign(self, command: c.Assign) -> None:
        queue = self.queues.get(command.route)
        if queue is None:
            return
        taken = queue.take(command.count, self.settings.client_inflight_max)
        if not taken:
            return
        worker = self.workers.get(command.worker)
        if worker is None:
            worker = self.workers[command.worker] = WorkerLedger(command.worker)
        rows = taken[0][1] if len(taken) == 1 else [row for _, part in taken for row in part]
        grant = Grant(self.next_grant, worker, queue, rows, self.time, self.wall)
        self.next_grant += 1
        for row in rows:
            row.place = grant
            # The number fences ghosts, so it grows even if the start is lost on the way.
            row.attempt += 1
        queue.leased += len(rows)
        worker.held += len(rows)
        worker.grants[grant.number] = self.grants[grant.number] = grant
        self.totals.leased += len(rows)
        self._changes.grants.append(grant)

    def _grant(self, number: int, worker: str) -> Grant | None:
        grant = self.grants.get(number)
        return grant if grant is not None and grant.worker.id == worker else None

    def _unlease(self, grant: Grant, count: int) -> None:
        """`count` rows of the grant have another place now."""
        if not count:
            return
        grant.left -= count
        grant.queue.leased -= count
        worker = grant.worker
        worker.held -= count
        if not grant.left:
            del self.grants[grant.number]
            del worker.grants[grant.number]
            grant.rows = []
            if not worker.grants:
                del self.workers[worker.id]

    def _give_back(self, clients: Iterable[ClientLedger]) -> None:
        cap = self.settings.client_inflight_max
        for client in clients:
            if client.parked and (not cap or client.inflight < cap):
                for queue in unpark(client):
                    self._changes.woken[queue] = None

    def _finish(self, command: c.Finish) -> None:
        outputs = command.outputs
        grant = self._grant(command.grant, command.worker)
        if grant is None:
            self._changes.stale += len(outputs)
            return
        rows = grant.rows
        if command.offsets is not None:
            if any(not 0 <= offset < len(rows) for offset in command.offsets):
                self._changes.stale += len(outputs)
                return
            rows = [rows[offset] for offset in command.offsets]
        if self.cancelling:
            self._finish_cancelled(grant, rows[: len(outputs)])
        settlement = self._settlement(j.DONE, command.worker, grant.wall)
        append = settlement.rows.append
        clients: dict[ClientLedger, None] = {}
        size = freed = 0
        for row, output in zip(rows, outputs, strict=False):
            if row.place is not grant:
                continue
            client = row.origin.client
            clients[client] = None
            client.inflight -= 1
            client.live -= 1
            taken = len(row.body)  # type: ignore[arg-type]
            client.bytes -= taken
            freed += taken
            size += len(output)
            row.place = settlement
            row.body = output
            append(row)
        done = len(settlement.rows)
        self._changes.stale += len(outputs) - done
        if done:
            for offset, note in command.notes.items():
                if 0 <= offset < len(grant.rows) and grant.rows[offset].place is settlement:
                    grant.rows[offset].note = note
            settlement.bytes = size
            self.live_bytes -= freed
            if self.blobs or command.blobs:
                self._hold_outputs(grant, settlement, command.blobs)
            self._spill(settlement, rows, outputs)
            self.totals.done += done
            self._close(settlement)
        self._unlease(grant, done)
        self._give_back(clients)

    def _hold_outputs(
        self, grant: Grant, settlement: Settlement, blobs: dict[int, list[BlobRef]]
    ) -> None:
        """The inputs of these are forgotten, and the outputs refer to `blobs`."""
        for row in settlement.rows:
            self.blobs.drop_input(row)
        for offset, refs in blobs.items():
            if 0 <= offset < len(grant.rows) and grant.rows[offset].place is settlement:
                self.blobs.hold(grant.rows[offset], refs)

    def _spill(self, settlement: Settlement, rows: list[Row], outputs: list[bytes]) -> None:
        """Large outputs leave memory once they are handed on: the journal entry has them."""
        if max(map(len, outputs)) <= limits.RESULT_BYTES_IN_MEMORY:
            return
        for slot, (row, output) in enumerate(zip(rows, outputs, strict=False)):
            if len(output) > limits.RESULT_BYTES_IN_MEMORY and row.body is output:
                row.body = Kept(self.applied, self._command, slot, len(output))
                settlement.bytes -= len(output)
                self._changes.large[row.id] = output

    def _finish_cancelled(self, grant: Grant, rows: list[Row]) -> None:
        """The cancel was committed first: a result that comes later does not count."""
        clients: dict[ClientLedger, None] = {}
        for row in rows:
            if row.place is grant and row.id in self.cancelling:
                self._leave_grant(row)
                clients[row.origin.client] = None
                self._end_cancelled(row, grant)
                self._unlease(grant, 1)
        self._give_back(clients)

    def _leave_grant(self, row: Row) -> None:
        row.place = None
        row.origin.client.inflight -= 1

    def _fail(self, command: c.Fail) -> None:
        grant = self._grant(command.grant, command.worker)
        if grant is None:
            self._changes.stale += len(command.offsets)
            return
        rows, ended = grant.rows, 0
        clients: dict[ClientLedger, None] = {}
        for offset, cause, message in zip(
            command.offsets, command.causes, command.messages, strict=False
        ):
            row = rows[offset] if 0 <= offset < len(rows) else None
            if row is None or row.place is not grant:
                self._changes.stale += 1
                continue
            self._leave_grant(row)
            clients[row.origin.client] = None
            ended += 1
            if row.id in self.cancelling:
                self._end_cancelled(row, grant)
            elif cause == j.CANCEL_CONFIRMED:  # nobody asked for it: the attempt is given back
                self._requeue(row, front=True)
            else:
                self._record(
                    row, grant.worker.id, cause, message, note=command.notes.get(offset),
                    detail=command.details.get(offset, b""),
                )  # fmt: skip
                self._retry_or_end(row, grant, cause)
        self._unlease(grant, ended)
        self._give_back(clients)

    def _release(self, command: c.Release) -> None:
        grant = self._grant(command.grant, command.worker)
        if grant is None:
            self._changes.stale += len(command.offsets)
            return
        rows, ended = grant.rows, 0
        clients: dict[ClientLedger, None] = {}
        # Backwards, so that each goes to the front and they lie in their old order.
        for offset in sorted(set(command.offsets), reverse=True):
            row = rows[offset] if 0 <= offset < len(rows) else None
            if row is None or row.place is not grant:
                self._changes.stale += 1
                continue
            self._leave_grant(row)
            clients[row.origin.client] = None
            ended += 1
            if row.id in self.cancelling:
                self._end_cancelled(row, grant)
            else:
                self._requeue(row, front=True)
        self._unlease(grant, ended)
        self._give_back(clients)

    def _forfeit(self, command: c.Forfeit) -> None:
        worker = self.workers.get(command.worker)
        if worker is None:
            return
        started = set(command.started)
        clients: dict[ClientLedger, None] = {}
        for grant in sorted(worker.grants.values(), key=lambda g: g.number, reverse=True):
            owned = grant.owned()
            for offset, row in reversed(owned):
                self._leave_grant(row)
                clients[row.origin.client] = None
                burned = (grant.number, offset) in started
                if row.id in self.cancelling:
                    self._end_cancelled(row, grant)
                    continue
                said = (
                    "the worker fell silent while it ran" if burned else "not known to have begun"
                )
                self._record(row, worker.id, j.WORKER_LOST, said, burned=burned)
                if burned:
                    self._retry_or_end(row, grant, j.WORKER_LOST)
                else:
                    self._requeue(row, front=True)
            self._unlease(grant, len(owned))
            self._changes.forfeited.append(grant)
        self._give_back(clients)

    # -------------------------------------------------------------- retry

    def _record(
        self, row: Row, worker: str, cause: str, message: str, *, burned: bool = True,
        note: j.Note | None = None, detail: bytes = b"",
    ) -> None:  # fmt: skip
        history = row.history
        if history is None:
            history = row.history = []
        elif history[-1].detail:
            # Only the last word on a job needs more than words.
            history[-1] = msgspec.structs.replace(history[-1], detail=b"")
        message = message[: limits.ERROR_TEXT_MAX]
        history.append(
            j.Cause(row.attempt, worker, cause, message, self.wall, burned, note, detail)
        )
        if len(history) > HISTORY_MAX:
            self._shorten(row.id, history)

    def _shorten(self, job_id: str, history: list[j.Cause]) -> None:
        """Attempts that never began tell least and go first, then those of earlier generations.
        The others are still counted against the limits: of the oldest only the words go."""
        generation, base = self.generations.get(job_id, (0, 0))
        gone = next((n for n, past in enumerate(history) if not past.burned), 0 if base else None)
        if gone is None:
            old = len(history) - HISTORY_MAX - 1
            history[old] = msgspec.structs.replace(history[old], message="", note=None, detail=b"")
            return
        del history[gone]
        if gone < base:
            self.generations[job_id] = (generation, base - 1)

    def burned(self, row: Row) -> list[j.Cause]:
        """Attempts that count against the limit: begun, and of the present generation."""
        base = self.generations.get(row.id, (0, 0))[1]
        return [past for past in (row.history or [])[base:] if past.burned]

    def _retry_or_end(self, row: Row, grant: Grant, cause: str) -> None:
        spec, settings = row.origin.spec, self.settings
        retry_on = j.RETRY_ON_DEFAULT if spec.retry_on is None else spec.retry_on
        burned = self.burned(row)
        lost = sum(past.cause == j.WORKER_LOST for past in burned)
        attempts = spec.max_attempts or settings.max_attempts
        reason = cause
        if lost >= settings.lost_workers_max:
            reason = j.POISON
        elif cause in retry_on and len(burned) < attempts:
            self.totals.retried += 1
            self._changes.requeued.append(row)
            self._delay(self.time + self._backoff(row.id, len(burned)), [row])
            self._may_expire_again(row)
            return
        settlement = self._settlement(j.FAILED, grant.worker.id, grant.wall, reason=reason)
        self._end(row, settlement)
        self._close(settlement)

    def _backoff(self, job_id: str, failures: int) -> int:
        settings = self.settings
        base = min(settings.backoff_first_ns << min(failures - 1, 30), settings.backoff_max_ns)
        # ± 20 %, from the entry, so that every member waits alike and a herd spreads out.
        permille = 800 + zlib.crc32(job_id.encode(), self.applied & 0xFFFFFFFF) % 401
        return base * permille // 1000

    def _requeue(self, row: Row, *, front: bool = False) -> None:
        self.totals.retried += 1
        self._changes.requeued.append(row)
        self._ready(row, front=front)
        self._may_expire_again(row)

    def _may_expire_again(self, row: Row) -> None:
        """Its time may have come while it was leased, when nothing could be done about it."""
        expires_at = row.origin.expires_at
        if expires_at:
            self._watch(Watch(expires_at, self._seq(), [row], expires=True))

    # -------------------------------------------------------------- ends

    def _settlement(self, state: str, worker: str, leased: int, reason: str = "") -> Settlement:
        return Settlement(state, worker, leased, self.time, self.wall, reason)

    def _end(self, row: Row, settlement: Settlement) -> None:
        """A row without a place ends without a result; its input stays, to be seen or replayed."""
        client, size = row.origin.client, len(row.body)  # type: ignore[arg-type]
        client.live -= 1
        client.bytes -= size
        self.live_bytes -= size
        row.place = settlement
        settlement.rows.append(row)
        settlement.bytes += size
        if settlement.state == j.FAILED:
            self.totals.failed += 1
        else:
            self.totals.cancelled += 1

    def _end_cancelled(self, row: Row, grant: Grant) -> None:
        reason = self.cancelling.pop(row.id)
        settlement = self._settlement(j.CANCELLED, grant.worker.id, grant.wall, reason=reason)
        self._end(row, settlement)
        self._close(settlement)

    def _close(self, settlement: Settlement) -> None:
        count = len(settlement.rows)
        self.settled.append(settlement)
        self.results_kept += count
        self.ids_kept += count
        self.result_bytes += settlement.bytes
        self._came_in += count
        if self.runs:
            self.runs.ended(settlement.rows, settlement.state)
        if self.caches.jobs:
            self.caches.ended(settlement.rows)
        self._changes.settlements.append(settlement)

    def _cancel(self, command: c.Cancel) -> None:
        tally = self._tally()
        waiting: list[Row] = []
        for job_id in dict.fromkeys(command.ids):
            row = self.find(job_id)
            if row is None:
                tally.unknown.append(job_id)
            elif isinstance(row.place, Settlement):
                tally.settled.append(job_id)
            elif isinstance(row.place, Grant):
                tally.stopping.append(job_id)
                self.cancelling.setdefault(job_id, command.reason)
                self._changes.stops.append((row.place, row.place.rows.index(row)))
            else:
                waiting.append(row)
                tally.changed.append(job_id)
        self._end_waiting(waiting, command.reason)

    def _end_waiting(self, rows: list[Row], reason: str) -> None:
        """Jobs that never began are cancelled, in settlements small enough to take rows out of."""
        for start in range(0, len(rows), limits.GRANT_JOBS_MAX):
            settlement = self._settlement(j.CANCELLED, "", 0, reason=reason)
            for row in rows[start : start + limits.GRANT_JOBS_MAX]:
                self._unplace(row)
                self._end(row, settlement)
            self._close(settlement)

    def _tally(self) -> Tally:
        tally = Tally()
        self._changes.tallies.append(tally)
        return tally

    def _ended(self, job_id: str, tally: Tally) -> Row | None:
        """The row, if it ended without a result: only such may be replayed or purged."""
        row = self.find(job_id)
        if row is None:
            tally.unknown.append(job_id)
        elif isinstance(row.place, Settlement) and row.place.state != j.DONE:
            return row
        else:
            tally.settled.append(job_id)
        return None

    def _replay(self, command: c.Replay) -> None:
        tally = self._tally()
        for job_id in command.ids:
            row = self._ended(job_id, tally)
            if row is None:
                continue
            if not isinstance(row.body, bytes):
                tally.settled.append(job_id)  # its input is past retention: nothing to run
                continue
            self._forget(row)
            old = row.origin
            client = self._client(old.client.id)
            row.origin = msgspec.structs.replace(old, client=client, time=self.time, expires_at=0)
            client.live += 1
            client.bytes += len(row.body)
            self.live_bytes += len(row.body)
            self.caches.submitted(row.origin, 1)
            generation = self.generations.get(job_id, (0, 0))[0] + 1
            self.generations[job_id] = (generation, len(row.history or ()))
            self._ready(row, returns=True)
            tally.changed.append(job_id)

    def _purge(self, command: c.Purge) -> None:
        tally = self._tally()
        for job_id in command.ids:
            row = self._ended(job_id, tally)
            if row is None:
                continue
            if row.place in self._changes.settlements:
                tally.settled.append(job_id)  # it ended in this very entry: not told yet
            else:
                if self.blobs and not row.place.faded:
                    self.blobs.drop_input(row)
                self._forget(row)
                self._drop(row)  # its place still says how it ended, to who is owed that news
                tally.changed.append(job_id)

    def _configure(self, command: c.Configure) -> None:
        self.settings = command.settings
        cap = command.settings.client_inflight_max
        clients = sorted(self.clients.values(), key=lambda client: client.id)
        for client in clients:
            if cap and client.inflight >= cap and not client.parked:
                park(client)
        self._give_back(clients)

    # -------------------------------------------------------------- caches

    def _put_cache(self, command: c.PutCache) -> None:
        self._changes.puts.append(self.caches.put(command, self.wall))

    def _remove_cache(self, command: c.RemoveCache) -> None:
        tally = self._tally()
        for cache_id in dict.fromkeys(command.ids):
            if cache_id not in self.caches.known:
                tally.unknown.append(cache_id)
            elif cache_id in self.caches.jobs:
                tally.settled.append(cache_id)
            else:
                self._changes.removed.append(self.caches.remove(cache_id))
                tally.changed.append(cache_id)

    # -------------------------------------------------------------- retention

    def _forget(self, row: Row) -> None:
        """A row that ended without a result leaves its settlement."""
        settlement: Settlement = row.place
        settlement.rows.remove(row)
        self.ids_kept -= 1
        self.runs.ended((row,), settlement.state, -1)
        if not settlement.faded:
            size = len(row.body)  # type: ignore[arg-type]
            self.results_kept -= 1
            settlement.bytes -= size
            self.result_bytes -= size

    def _drop(self, row: Row) -> None:
        del self.known[hash(row.id[:SHARED_TAIL]) & _MASK][row.id]
        self.generations.pop(row.id, None)
        if self.runs:
            self.runs.dropped(row)

    def _retain(self) -> None:
        """Forget the oldest results, then the oldest ids: at least as many as came in, in bounded
        steps, never below what was promised, and nothing of the present moment: it is yet to be
        told. Settlements that were emptied count nothing here, because a snapshot does not carry
        them."""
        settings = self.settings
        budget = 2 * self._came_in + 1000
        oldest = self.time - settings.retention_ns
        while self.settled and budget > 0 and self.settled[0].time != self.time:
            head = self.settled[0]
            full = (
                self.results_kept - len(head.rows) >= settings.results_max
                or self.result_bytes - head.bytes >= settings.result_bytes_max
            )
            if not full and head.time > oldest:
                break
            budget -= len(head.rows)
            self._fade(self.settled.popleft(), early=head.time > oldest)
        budget = 2 * self._came_in + 1000
        while self.faded and budget > 0:
            head = self.faded[0]
            early = head.time > oldest
            if early and self.ids_kept - len(head.rows) < settings.ids_max:
                break
            budget -= len(head.rows)
            self.faded.popleft()
            self.ids_kept -= len(head.rows)
            self.totals.evicted += len(head.rows) * early
            rows, head.rows = head.rows, []  # no cycle is left; the rows still know how they ended
            if self.runs:
                self.runs.ended(rows, head.state, -1)
            for row in rows:
                self._drop(row)

    def _fade(self, settlement: Settlement, *, early: bool) -> None:
        self.results_kept -= len(settlement.rows)
        self.result_bytes -= settlement.bytes
        self.totals.faded += len(settlement.rows) * early
        settlement.bytes = 0
        settlement.faded = True
        if self.blobs:
            drop = self.blobs.drop_output if settlement.state == j.DONE else self.blobs.drop_input
            for row in settlement.rows:
                drop(row)
        for row in settlement.rows:
            row.body = row.history = row.note = None
        self.faded.append(settlement)
