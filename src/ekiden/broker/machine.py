"""The broker: gathers what peers say, journals it, applies it, tells them.

The order in a turn is fixed: apply all that is committed, then plan, close the entry and append,
then send. Never plan on a book with committed entries unapplied: a plan on old news proposed ticks
for ever in a trial.

One entry is being written at a time; what arrives meanwhile fills the next. Nothing is told to
anybody before the entry that says it is committed.
"""

from __future__ import annotations

from typing import Any

from ekiden import limits
from ekiden.broker.batch import Batch, first_entry, merged
from ekiden.broker.crew import Crew
from ekiden.broker.desk import Desk
from ekiden.broker.events import (
    AppendFailed,
    CacheChecked,
    DiskSpace,
    Halt,
    Persisted,
    Shutdown,
    SnapshotTaken,
    TakeSnapshot,
    WallClock,
)  # fmt: skip
from ekiden.broker.herald import Herald
from ekiden.broker.intake import Intake, refused
from ekiden.broker.library import Library
from ekiden.broker.peers import Peer
from ekiden.broker.relay import Relay
from ekiden.broker.store import EVENTS as STORE_EVENTS
from ekiden.broker.store import MESSAGES as STORE_MESSAGES
from ekiden.broker.store import Store
from ekiden.config import BrokerConfig
from ekiden.core import commands as c
from ekiden.core.book import JobBook
from ekiden.core.effects import Changes
from ekiden.core.roster import Roster
from ekiden.core.scheduler import Scheduler
from ekiden.errors import BadFrame, DiskFull, EkidenError, Refusal
from ekiden.journal.journal import Journal
from ekiden.limits import NS
from ekiden.machine import (
    Close,
    Congested,
    Connected,
    Disconnected,
    Frame,
    Garbled,
    Instant,
    Log,
    Received,
    Relieved,
    Send,
    Trust,
)  # fmt: skip
from ekiden.wire import messages as m
from ekiden.wire.session import Greeter, refusal_frame

# How often silence, beats and grace periods are looked at. A quarter of a heartbeat is soon enough.
SWEEP_NS = NS // 4

# Kinds of commands. Written out where they are asked for, a union is made anew at every step.
_CHANGES = (c.Cancel, c.Replay, c.Purge, c.RemoveCache)
_OUTCOMES = (c.Finish, c.Fail, c.Release, c.Forfeit)

# After a full disk, how long until the settles that did not fit are tried again.
RETRY_APPEND_NS = NS


class BrokerMachine:
    """The leader of a group with one member, or of any journal that says it leads."""

    def __init__(
        self, config: BrokerConfig, journal: Journal, book: JobBook, *, key: bytes, broker_id: str,
        now: Instant, wall: int, software: str = "", codecs: str = "",
    ) -> None:  # fmt: skip
        self.config = config
        self.journal = journal
        self.book = book
        self.roster = Roster()
        self.scheduler = Scheduler(self.roster, config.policies)
        self.intake = Intake(config, book)
        self.relay = Relay()
        self.store = Store(config, self.intake, book.blobs.__contains__, codecs)
        self.peers: dict[int, Peer] = {}
        self.broker_id = broker_id
        self.software = software
        self.started = now
        self.herald = Herald(journal)
        self._key = key
        self._base_time, self._base_now = book.time, now
        self._wall, self._wall_at = wall, now
        self._queue: Batch = []
        """Commands for the next entry, with who asked and the number of the message."""
        self._flying: tuple[c.Entry, Batch, list[int]] | None = None
        """The entry being written, what was asked for, and how many of it each `Submit` is."""
        self._dirty: dict[Peer, None] = {}
        """Peers with something to be sent or closed at the end of this turn."""
        self._effects: list[Any] = []
        self._next_sweep = now
        self._hold_append_until = 0
        self._snapshot_at = now + int(config.snapshot_interval_s * NS)
        self.snapshot_index = book.applied
        self._snapshotting = False
        self._rolled = False
        self._shutdown = False
        self.library = Library(self)
        self.crew = Crew(self, now)
        self.desk = Desk(self)
        for route in book.queues:
            self.scheduler.wake(route)
        self.store.hold_caches(cache.use for cache in book.caches.known.values())
        if book.settings != config.settings():
            self.propose(c.Configure(config.settings()))

    # -------------------------------------------------------------- contract

    def receive(self, event: Any, now: Instant) -> None:
        """Take note of what happened."""
        match event:
            case Received():
                self._received(event, now)
            case Persisted():
                self.journal.persisted(event.upto)
            case Connected():
                self._connected(event, now)
            case Disconnected():
                self._disconnected(event, now)
            case Garbled():
                peer = self.peers.get(event.conn)
                if peer is not None:
                    self.refuse_and_close(peer, BadFrame(event.reason))
            case Congested() | Relieved():
                peer = self.peers.get(event.conn)
                if peer is not None:
                    self.herald.congestion(peer, event)
            case _ if isinstance(event, STORE_EVENTS):
                self.store.receive(event, now)
            case CacheChecked() if event.number < 0:
                # Of the book's own, at the start: the store waits for all of them.
                self.library.checked_own(self.store.room.cache_checked(event), event)
            case CacheChecked():
                self.library.checked(event)
            case WallClock():
                self._wall, self._wall_at = event.wall, now
            case DiskSpace():
                self.intake.disk_free = event.free
            case AppendFailed():
                self._append_failed(event, now)
            case SnapshotTaken():
                self._snapshot_taken(event, now)
            case Shutdown():
                self._shutdown = self.intake.draining = True
            case _:
                raise AssertionError(event)

    def advance(self, now: Instant) -> list[Any]:
        """One turn: apply, plan and append, send."""
        self._apply_committed(now)
        if now >= self._next_sweep:
            self._sweep(now)
        if self._flying is None:
            if self._rolled:
                self._begin_snapshot()
            if now >= self._hold_append_until:
                self._close_entry(now)
        if self.relay.waiting:
            self.relay.pass_on(self.peers)
        self.herald.pay()
        self._effects += self.store.advance(now)
        halts = self._shutdown and self._finish_shutdown()
        # Every write wakes somebody: first those who have work or results to get on with.
        for peer in sorted(self._dirty, key=Peer.has_receipts_only):
            data = peer.drain()
            if data and peer.conn in self.peers:
                peer.spoke = now
                self._effects.append(Send(peer.conn, data))
            if peer.closing and self.peers.pop(peer.conn, None) is not None:
                self._effects.append(Close(peer.conn))
                self._left(peer, now)
        self._dirty.clear()
        if halts:
            self._effects.append(Halt())
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> Instant | None:
        """The next sweep, delay or wall-time wish."""
        if self.relay.waiting or self.herald.waiting:
            return self._base_now
        soonest = self._next_sweep
        if self._flying is None:
            if self.book.delays:
                soonest = min(soonest, self._instant_of(self.book.delays[0].until))
            if self.book.watches:
                soonest = min(soonest, self._wall_at + self.book.watches[0].until - self._wall)
            if self._queue:
                soonest = min(soonest, self._hold_append_until)
            soonest = max(soonest, self._hold_append_until)
        return soonest

    # -------------------------------------------------------------- time

    def time(self, now: Instant) -> int:
        """Entry time: that of the last entry plus the monotonic time since."""
        return self._base_time + now - self._base_now

    def _instant_of(self, time: int) -> Instant:
        return self._base_now + time - self._base_time

    def wall(self, now: Instant) -> int:
        """The wall clock, by its last reading."""
        return self._wall + now - self._wall_at

    # -------------------------------------------------------------- journal

    def propose(self, command: c.Command, peer: Peer | None = None, msg_id: int = 0) -> None:
        self._queue.append((command, peer, msg_id))

    def _close_entry(self, now: Instant) -> None:
        time, wall = self.time(now), self.wall(now)
        self._hold_append_until = 0
        batch = first_entry(self._queue)
        self._queue = self._queue[len(batch) :]
        if self._clock_due(batch, wall):
            batch.append((c.Clock(wall), None, 0))
        for route in self.intake.incoming:
            self.scheduler.wake(route)
        plans = self.scheduler.plan(self.book, self.intake.incoming) if not self._shutdown else []
        self.intake.closed()
        due = bool(self.book.delays) and self.book.delays[0].until <= time
        if not batch and not plans and not due:
            return
        commands, shares = merged(batch)
        commands += plans
        if not commands:
            commands.append(c.Tick())
        index = self.journal.propose(c.encode_payload(time, wall, commands))
        self._flying = (c.Entry(index, time, wall, commands), batch, shares)
        step = self.journal.advance(now)
        if step.append is not None:
            # Measured now and then only: a burst must not eat what is kept free meanwhile.
            self.intake.disk_free -= len(step.append.data)
            self._effects.append(step.append)

    def _clock_due(self, batch: Batch, wall: int) -> bool:
        """Whether something waits for a wall time that has come, or is submitted after it."""
        if self.book.watches and self.book.watches[0].until <= wall:
            return True
        return any(isinstance(cmd, c.Submit) and 0 < cmd.expires_at <= wall for cmd, _, _ in batch)

    def _apply_committed(self, now: Instant) -> None:
        if self._flying is None or self.journal.committed < self._flying[0].index:
            return
        entry, batch, shares = self._flying
        self._flying = None
        changes = self.book.apply(entry)
        self.scheduler.forget_plans(self.book)
        self._tell(changes, batch, shares, now)

    def _begin_snapshot(self) -> None:
        """Nothing is being written, so everything there is lies in closed segments."""
        self._rolled = False
        closed = self.journal.closed_segments()  # type: ignore[attr-defined]
        if closed and closed[-1].last > self.snapshot_index:
            self._snapshotting = True
            self._effects.append(TakeSnapshot(closed[-1].last))

    def _append_failed(self, event: AppendFailed, now: Instant) -> None:
        """No space: new jobs are refused, everything else waits for room and is tried again."""
        assert self._flying is not None
        self.journal.withdraw()
        _, batch, _ = self._flying
        self._flying = None
        self.scheduler.forget_plans(self.book)
        for worker in self.roster.workers.values():
            self.scheduler.freed(worker, self.book)
        for route in self.book.queues:
            self.scheduler.wake(route)
        kept = []
        error = DiskFull("the broker's disk is full", remedy="free some space", retry_after_s=5)
        for command, peer, msg_id in batch:
            if isinstance(command, c.Submit):
                if peer is not None:
                    peer.refuse(refused(msg_id, error))
            elif not isinstance(command, c.Clock):  # a later one will say more
                kept.append((command, peer, msg_id))
        self._queue = kept + self._queue
        self.intake.disk_free = min(self.intake.disk_free, 0)
        self._hold_append_until = now + RETRY_APPEND_NS
        self.log("error", "journal.no_space", reason=event.reason)

    def _snapshot_taken(self, event: SnapshotTaken, now: Instant) -> None:
        self._snapshotting = False
        self._snapshot_at = now + int(self.config.snapshot_interval_s * NS)
        if event.index:
            self.snapshot_index = event.index
        else:
            self.log("error", "snapshot.failed", reason=event.reason)

    # -------------------------------------------------------------- telling

    def _tell(self, changes: Changes, batch: Batch, shares: list[int], now: Instant) -> None:
        submits, tallies, puts = iter(changes.submits), iter(changes.tallies), iter(changes.puts)
        share, left, first = iter(shares), 0, 0
        touched: dict[str, None] = {}
        for command, peer, msg_id in batch:
            here = peer is not None and peer.conn in self.peers
            if isinstance(command, c.Submit):
                if not left:
                    outcome, left, first = next(submits), next(share), 0
                left -= 1
                jobs = range(first, first + len(command.ids))
                if peer is not None and here:
                    self.herald.submitted(peer, msg_id, outcome, jobs)
                first = jobs.stop
            elif isinstance(command, _CHANGES):
                tally = next(tallies)
                if peer is not None and here:
                    self.desk.changed(peer, msg_id, command, tally)
            elif isinstance(command, c.PutCache):
                self.library.put(peer, msg_id, command, next(puts))
            elif isinstance(command, _OUTCOMES):
                touched[command.worker] = None
                if peer is not None:
                    peer.ack(msg_id)
        if changes.removed:
            self.library.removed(changes.removed)
        for queue in changes.woken:
            self.scheduler.wake(queue.route)
        for settlement in changes.settlements:
            self.herald.settled(settlement, changes)
            if settlement.worker:
                touched[settlement.worker] = None
        for grant in changes.grants:
            self.crew.send_grant(grant, grant.owned())
        for grant in changes.forfeited:
            # Its worker may be back already, and busy with what is no longer its own.
            self.crew.stop(grant.worker.id, grant.number, None, "stale")
        for grant, offset in changes.stops:
            self.crew.stop(grant.worker.id, grant.number, [offset], "cancel")
        for name in touched:
            worker = self.roster.workers.get(name)
            if worker is not None:
                self.scheduler.freed(worker, self.book)

    # -------------------------------------------------------------- peers

    def _connected(self, event: Connected, now: Instant) -> None:
        greeter = Greeter(
            self._key, event.nonce, group=self.config.group, broker=self.broker_id, epoch=1,
            heartbeat_ns=self.config.heartbeat_ns, silence_ns=self.config.silence_ns,
            software=self.software,
        )  # fmt: skip
        self.peers[event.conn] = Peer(event.conn, event.peer, greeter, now, self._dirty)

    def _disconnected(self, event: Disconnected, now: Instant) -> None:
        peer = self.peers.pop(event.conn, None)
        if peer is not None:
            self._left(peer, now)

    def _left(self, peer: Peer, now: Instant) -> None:
        self.relay.leave(peer)
        self.herald.left(peer)
        self.store.left(peer)
        if peer.role == m.ROLE_WORKER:
            self.crew.left(peer, now)

    def refuse_and_close(self, peer: Peer, error: EkidenError, corr_id: int = 0) -> None:
        peer.send_frame(refusal_frame(error, corr_id))
        peer.close()
        self.log("warning", "peer.refused", peer=peer.address, id=peer.id, code=error.code,
                  why=error.message)  # fmt: skip

    def _received(self, event: Received, now: Instant) -> None:
        peer = self.peers.get(event.conn)
        if peer is None:
            return
        peer.heard = now
        for frame in event.frames:
            if peer.closing:
                return
            try:
                if peer.greeter is not None:
                    self._greet(peer, frame)
                else:
                    self._message(peer, frame, now)
            except BadFrame as error:
                self.refuse_and_close(peer, error, frame.msg_id)
            except Refusal as error:
                if peer.greeter is not None:
                    self.refuse_and_close(peer, error, frame.msg_id)
                else:
                    peer.send_frame(refusal_frame(error, frame.msg_id))

    def _greet(self, peer: Peer, frame: Frame) -> None:
        assert peer.greeter is not None
        peer.send_frame(peer.greeter.receive(frame))
        identity = peer.greeter.identity
        if identity is None:
            return
        peer.role, peer.id, peer.session = identity.role, identity.id, identity.session
        peer.greeter = None
        self._effects.append(Trust(peer.conn))
        if peer.role == m.ROLE_CLIENT:
            self.herald.came(peer)

    def _message(self, peer: Peer, frame: Frame, now: Instant) -> None:
        message = m.decode(frame.type, frame.body)
        match message:
            case m.Submit():
                self._submit(peer, frame.msg_id, message)
            case m.Ack():
                self.crew.ack(peer, frame.msg_id, message, now)
            case m.Beat():
                if peer.role == m.ROLE_WORKER:
                    self.crew.beat(peer, message, now)
            case m.Credit():
                self.crew.credit(peer, message)
            case m.Join():
                self.crew.join(peer, message, now)
            case m.Attach():
                self._attach(peer, frame.msg_id, message)
            case m.Ask():
                self.desk.asked(peer, frame.msg_id, message, now)
            case m.Publish():
                self.relay.publish(message)
            case m.Subscribe():
                self.relay.subscribe(peer, message)
            case m.Unsubscribe():
                self.relay.unsubscribe(peer, message.sid)
            case m.Progress():
                self.crew.progress(peer, message)
            case m.CacheAck():
                self.crew.cache_said(peer, message)
            case m.Peeked():
                self.crew.peeked(peer, frame.corr_id, message)
            case _ if isinstance(message, STORE_MESSAGES):
                self.store.heard(peer, frame, message, now)
            case m.Bye():
                self.crew.bye(peer)
                peer.close()
            case _:
                raise BadFrame(
                    f"{type(message).__name__} is not for a broker to hear",
                    remedy="see who says what in docs/PROTOCOL.md",
                )

    # -------------------------------------------------------------- clients

    def _submit(self, peer: Peer, msg_id: int, message: m.Submit) -> None:
        try:
            command = self.intake.submit(peer.id, peer.session, message)
        except Refusal as error:
            peer.refuse(refused(msg_id, error))
            return
        self.propose(command, peer, msg_id)

    def _attach(self, peer: Peer, msg_id: int, message: m.Attach) -> None:
        unknown: list[str] = []
        for job_id in message.ids:
            row = self.book.find(job_id)
            if row is None:
                unknown.append(job_id)
            else:
                self.herald.attach(peer, row)
        peer.send(m.Attached(unknown), msg_id)

    # -------------------------------------------------------------- sweeps

    def _sweep(self, now: Instant) -> None:
        self._next_sweep = now + SWEEP_NS
        for peer in list(self.peers.values()):
            if peer.greeter is not None:
                if now - peer.since > limits.HELLO_TIMEOUT_NS:
                    self.refuse_and_close(peer, BadFrame("no hello in time"))
            elif now - peer.heard > self.config.silence_ns:
                peer.close()
            elif now - peer.spoke >= self.config.heartbeat_ns:
                peer.send(m.Beat())
        self.crew.sweep(now)
        self.store.sweep(now)
        if self._snapshot_due(now):
            self.journal.roll()  # type: ignore[attr-defined]
            self._rolled = True

    def _snapshot_due(self, now: Instant) -> bool:
        return (
            now >= self._snapshot_at
            and not self._snapshotting
            and not self._rolled
            and self.book.applied > self.snapshot_index
        )

    def _finish_shutdown(self) -> bool:
        """Say goodbye once all is written. What a full disk keeps from being written was promised
        to nobody, so it is not waited for."""
        if self._flying is not None or (self._queue and not self._hold_append_until):
            return False
        for peer in self.peers.values():
            if peer.greeter is None and not peer.closing:
                peer.send(m.Bye("the broker is shutting down"))
                peer.close()
        self._shutdown = False
        return True

    def perform(self, effect: Any) -> None:
        """With the effects of this turn."""
        self._effects.append(effect)

    def log(self, level: str, event: str, **facts: Any) -> None:
        self._effects.append(Log(level, event, facts))
