"""The broker's dealings with its workers: joins, leases told and told again, outcomes, silence.

What a worker holds is in the book; what it is able to do and when it was last heard is in the
roster. This is where the two are held against what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

from ekiden import limits
from ekiden.broker import peers as p
from ekiden.broker.herald import Herald
from ekiden.broker.intake import Intake, check_credit, check_join
from ekiden.broker.library import Library
from ekiden.broker.peers import Peer
from ekiden.config import BrokerConfig
from ekiden.core import commands as c
from ekiden.core.book import JobBook
from ekiden.core.roster import Roster, RosterWorker
from ekiden.core.rows import Grant, Row
from ekiden.core.scheduler import Scheduler
from ekiden.errors import BadRequest, EkidenError, QueueFull, TooLarge
from ekiden.machine import Instant
from ekiden.model import jobs as j
from ekiden.wire import messages as m
from ekiden.wire.frames import encode_frame

# Of stdout and of stderr in one look at a running job: two of them fit a frame with room to spare.
PEEK_BYTES: Final = 64 << 10

# Progress is kept for who asks about a job, if it is a line and not a page, of so many of a worker.
PROGRESS_KEPT_BYTES: Final = 1024
PROGRESS_KEPT_MAX: Final = 10_000

# Looks that wait for a worker's word. Each is a person who watches a job.
PEEKS_MAX: Final = 1000

Asker: TypeAlias = Callable[[m.Peeked], None]


class Broker(Protocol):
    """What the crew sees of the machine it belongs to."""

    config: BrokerConfig
    book: JobBook
    roster: Roster
    scheduler: Scheduler
    intake: Intake
    herald: Herald
    library: Library
    peers: dict[int, Peer]

    def propose(self, command: c.Command, peer: Peer | None = None, msg_id: int = 0) -> None: ...
    def refuse_and_close(self, peer: Peer, error: EkidenError, corr_id: int = 0) -> None: ...
    def log(self, level: str, event: str, **facts: Any) -> None: ...


class Crew:
    """All workers of one broker."""

    def __init__(self, broker: Broker, now: Instant) -> None:
        self._broker = broker
        self._book = broker.book
        self._roster = broker.roster
        self._scheduler = broker.scheduler
        self._ghost_leases = dict.fromkeys(broker.book.workers, now + broker.config.rejoin_grace_ns)
        """Workers with leases that have not joined since this broker started → when to give up."""
        self._peeks: dict[tuple[int, int], Asker] = {}
        """Who waits for a worker's word, by its connection and the number of the question."""
        self._last_peek = 0

    # -------------------------------------------------------------- what they are told

    def send_grant(self, grant: Grant, owned: list[tuple[int, Row]]) -> None:
        """Attempts to run, to the worker that has the lease, if it is here."""
        worker = self._roster.workers.get(grant.worker.id)
        peer = self._broker.peers.get(worker.conn) if worker is not None and worker.conn else None
        if peer is not None and owned:
            for run in p.assign_runs(grant, owned):
                peer.assign(run)

    def stop(self, worker_id: str, grant: int, offsets: list[int] | None, why: str) -> None:
        """Attempts to end, to give back or to forget; None names all of the grant."""
        worker = self._roster.workers.get(worker_id)
        peer = self._broker.peers.get(worker.conn) if worker is not None and worker.conn else None
        if peer is not None:
            peer.send(m.Stop(grant, offsets, why))

    def peek(self, grant: Grant, offset: int, stdout: int, stderr: int, asker: Asker) -> bool:
        """Ask the worker what the attempt has written so far; the asker is answered when it says.
        False if the worker is not here."""
        worker = self._roster.workers.get(grant.worker.id)
        peer = self._broker.peers.get(worker.conn) if worker is not None and worker.conn else None
        if peer is None:
            return False
        if len(self._peeks) >= PEEKS_MAX:
            raise QueueFull(
                f"{PEEKS_MAX:,} looks at running jobs wait for an answer", remedy="ask again later",
                retry_after_s=1,
            )  # fmt: skip
        self._last_peek += 1
        self._peeks[peer.conn, self._last_peek] = asker
        question = m.Peek(grant.number, offset, stdout, stderr, PEEK_BYTES)
        peer.send_frame(encode_frame(question, self._last_peek))
        return True

    # -------------------------------------------------------------- what they say

    def peeked(self, peer: Peer, number: int, message: m.Peeked) -> None:
        """What an attempt has written, for whoever asked."""
        self._worker(peer)
        asker = self._peeks.pop((peer.conn, number), None)
        if asker is not None:
            if max(len(message.stdout), len(message.stderr)) > PEEK_BYTES:
                raise TooLarge("more of an output than was asked for", remedy="obey the limit")
            asker(message)

    def _worker(self, peer: Peer) -> RosterWorker:
        worker = self._roster.workers.get(peer.id) if peer.role == m.ROLE_WORKER else None
        if worker is None or worker.conn != peer.conn:
            raise BadRequest("only a worker that has joined may say this", remedy="send Join first")
        return worker

    def join(self, peer: Peer, message: m.Join, now: Instant) -> None:
        """It is here, and this is what it has and holds."""
        if peer.role != m.ROLE_WORKER:
            raise BadRequest("only a worker joins", remedy="say hello as a worker")
        check_join(message)
        worker = self._roster.workers.get(peer.id) or RosterWorker(peer.id)
        if worker.conn is not None and worker.conn != peer.conn:
            old = self._broker.peers.get(worker.conn)
            if old is not None:  # the newest connection of a worker is the one that counts
                self._broker.refuse_and_close(
                    old, BadRequest("this worker id has joined from elsewhere")
                )
        restarted = worker.session not in ("", peer.session)
        lost = [(grant, offset) for grant, offset, _ in worker.running] if restarted else []
        worker.conn, worker.session, worker.heard = peer.conn, peer.session, now
        worker.slots, worker.credit = message.slots, message.credit
        worker.labels, worker.host = message.labels, message.host
        worker.cpu_milli, worker.mem_mb = message.cpu_milli, message.mem_mb
        worker.running = []
        worker.caches.clear()
        self._roster.join(worker, message.patterns)
        self._ghost_leases.pop(worker.id, None)
        if restarted and worker.id in self._book.workers:
            # The process before took its runs with it. Were they only assigned again, a job that
            # kills whoever runs it would do so for ever without burning an attempt.
            self._broker.propose(c.Forfeit(worker.id, lost))
        else:
            self._reconcile(worker, message.held)
        if self._book.caches.known:
            self._broker.library.welcome(worker)
        self._scheduler.freed(worker, self._book)
        self._broker.log("info", "worker.joined", worker=worker.id, slots=worker.slots,
                  held=worker.held(self._book))  # fmt: skip

    def _reconcile(self, worker: RosterWorker, held: Iterable[tuple[int, list[int]]]) -> None:
        """Leases it does not know are assigned again; what the book does not know is stopped."""
        known = {number: set(offsets) for number, offsets in held}
        ledger = self._book.workers.get(worker.id)
        grants = dict(ledger.grants) if ledger is not None else {}
        for number, grant in grants.items():
            mentioned = known.pop(number, set())
            owned = grant.owned()
            self.send_grant(grant, [(o, row) for o, row in owned if o not in mentioned])
            stale = sorted(mentioned - {offset for offset, _ in owned})
            if stale:
                self.stop(worker.id, number, stale, "stale")
            for offset, row in owned:
                if row.id in self._book.cancelling:
                    self.stop(worker.id, number, [offset], "cancel")
        for number in known:
            self.stop(worker.id, number, None, "stale")

    def recall(self, worker: RosterWorker) -> None:
        """Ask for the attempts back that it has not begun."""
        ledger = self._book.workers.get(worker.id)
        for number in list(ledger.grants) if ledger is not None else ():
            self.stop(worker.id, number, None, "recall")

    def credit(self, peer: Peer, message: m.Credit) -> None:
        """So many attempts it may hold from now on."""
        worker = self._worker(peer)
        check_credit(message.credit)
        worker.credit = message.credit
        self._scheduler.freed(worker, self._book)

    def ack(self, peer: Peer, msg_id: int, message: m.Ack, now: Instant) -> None:
        """Outcomes: confirmed once they are durable."""
        worker = self._worker(peer)
        found = self._broker.intake.settle(peer.id, message)
        # One that says nothing waits in the queue, too: acks are confirmed in their order.
        for command in found or [c.Release(worker.id, 0, [])]:
            self._broker.propose(command, peer, msg_id)
            if isinstance(command, c.Fail):
                self._count_failures(worker, command, now)
            elif isinstance(command, c.Finish):
                worker.failed_in_row.clear()

    def _count_failures(self, worker: RosterWorker, command: c.Fail, now: Instant) -> None:
        grant = self._book.grants.get(command.grant)
        if grant is None or grant.worker.id != worker.id:
            return
        for offset, cause in zip(command.offsets, command.causes, strict=True):
            # A worker that says that attempts were lost lives: its keeper died under all it ran at
            # once. Whether the next one lasts is waited for there.
            if cause in (j.CANCEL_CONFIRMED, j.WORKER_LOST) or not 0 <= offset < len(grant.rows):
                continue
            row = grant.rows[offset]
            retry_on = row.origin.spec.retry_on
            if cause not in j.RETRY_ON_DEFAULT or (retry_on is not None and cause not in retry_on):
                continue  # the job's own answer: another worker would say the same
            if row.place is grant and self._roster.failed(worker, row.id, now):
                self._broker.log("warning", "worker.quarantined", worker=worker.id,
                          failures=limits.QUARANTINE_FAILURES)  # fmt: skip

    def beat(self, peer: Peer, message: m.Beat, now: Instant) -> None:
        """It lives, and this is what it runs."""
        worker = self._worker(peer)
        worker.heard = now
        worker.load = message.load
        worker.running = message.running
        if worker.progress:
            runs = {(number, offset) for number, offset, _ in message.running}
            worker.progress = {at: note for at, note in worker.progress.items() if at in runs}
        for number, offset, elapsed_ms in message.running:
            grant = self._book.grants.get(number)
            if grant is None or not 0 <= offset < len(grant.rows):
                continue
            row = grant.rows[offset]
            if row.place is not grant:
                continue
            limit = row.origin.spec.timeout_ns
            if limit and elapsed_ms * 1_000_000 > limit + limits.TIMEOUT_MARGIN_NS:
                said = "the worker did not end it in time"
                self._broker.propose(c.Fail(worker.id, number, [offset], [j.TIMEOUT], [said]))
                self.stop(worker.id, number, [offset], "timeout")

    def cache_said(self, peer: Peer, message: m.CacheAck) -> None:
        """How it stands with a cache."""
        self._broker.library.said(self._worker(peer), message)

    def progress(self, peer: Peer, message: m.Progress) -> None:
        """Passed on to the session that submitted the job, if it listens."""
        worker = self._worker(peer)
        if len(message.body) > limits.PAYLOAD_BYTES_MAX:
            raise TooLarge(f"progress of {len(message.body):,} bytes", remedy="say less of it")
        grant = self._book.grants.get(message.grant)
        if (
            grant is None
            or grant.worker.id != worker.id
            or not 0 <= message.offset < len(grant.rows)
        ):
            return
        row = grant.rows[message.offset]
        if len(message.body) <= PROGRESS_KEPT_BYTES and len(worker.progress) < PROGRESS_KEPT_MAX:
            worker.progress[message.grant, message.offset] = message.body
        listener = self._broker.herald.session(row.origin.session)
        if row.place is grant and listener is not None:
            listener.send(m.JobProgress(row.id, row.attempt, message.body))

    def bye(self, peer: Peer) -> None:
        """It leaves for good: what it still holds is for others to do."""
        worker = self._roster.workers.get(peer.id) if peer.role == m.ROLE_WORKER else None
        if worker is not None and worker.conn == peer.conn:
            if worker.id in self._book.workers:
                self._broker.propose(c.Forfeit(worker.id, [(g, o) for g, o, _ in worker.running]))
            self._roster.drop(worker)
            worker.conn = None

    def left(self, peer: Peer, now: Instant) -> None:
        """Its connection is gone. It keeps its leases until it has been silent for too long."""
        for key in [key for key in self._peeks if key[0] == peer.conn]:
            self._peeks.pop(key)(m.Peeked(False))
        worker = self._roster.workers.get(peer.id)
        if worker is not None and worker.conn == peer.conn:
            worker.conn = None
            worker.heard = now
            self._roster.leave(worker)
            self._broker.log("info", "worker.left", worker=worker.id, held=worker.held(self._book))

    # -------------------------------------------------------------- silence

    def sweep(self, now: Instant) -> None:
        """Give up on those not heard of for too long; let those in quarantine try again."""
        for worker in list(self._roster.workers.values()):
            self._sweep_worker(worker, now)
        for name, deadline in list(self._ghost_leases.items()):
            if now >= deadline:
                del self._ghost_leases[name]
                if name in self._book.workers:
                    self._broker.propose(c.Forfeit(name))

    def _sweep_worker(self, worker: RosterWorker, now: Instant) -> None:
        if worker.quarantined_until and now >= worker.quarantined_until:
            worker.quarantined_until = 0
            self._scheduler.freed(worker, self._book)
        peer = self._broker.peers.get(worker.conn) if worker.conn is not None else None
        heard = worker.heard if peer is None else peer.heard  # any word is a sign of life
        if now - heard <= self._broker.config.silence_ns:
            return
        if peer is not None:
            peer.close()
        worker.conn = None
        started = [(grant, offset) for grant, offset, _ in worker.running]
        if worker.id in self._book.workers:
            self._broker.propose(c.Forfeit(worker.id, started))
        self._broker.log("warning", "worker.lost", worker=worker.id, held=worker.held(self._book))
        self._roster.drop(worker)
