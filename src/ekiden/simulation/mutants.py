"""Mistakes planted on purpose: if the checkers miss one, they cannot be trusted with ours.

Each is a mistake that somebody made before, in the notes this grid grew from or in a trial of it.
Production code knows nothing of this: a mutant replaces a class or a function of it for the time of
one hunt, always where the broker looks it up, so that the checkers' mirror stays sound.

To add one: write what is wrong as a subclass or a function, and an entry in `MUTANTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ekiden.broker import recovery
from ekiden.broker.machine import BrokerMachine
from ekiden.core import commands as c
from ekiden.core import image
from ekiden.core.book import JobBook
from ekiden.core.image import dump, load
from ekiden.core.roster import RosterWorker
from ekiden.core.rows import Grant, Row
from ekiden.journal.journal import Append
from ekiden.journal.local import LocalJournal, perform
from ekiden.journal.recovery import Recovery
from ekiden.machine import Instant, Received
from ekiden.simulation.broker import SimBroker
from ekiden.simulation.processes import KEY
from ekiden.simulation.trial import Outcome, simulate
from ekiden.simulation.world import MS
from ekiden.wire import messages as m

# ------------------------------------------------------------------ the broker's process


def _write_later(broker: SimBroker, append: Append) -> None:
    """Say that it is on disk when the page cache has it; sync some time after that."""
    perform(broker.disk, append, sync=False)
    broker.post(recovery_event(append))


def recovery_event(append: Append) -> Any:
    """What the disk says when an append is done."""
    from ekiden.broker.events import Persisted

    return Persisted(append.upto)


def _serve_at_once(broker: SimBroker) -> None:
    """Listen with what the snapshot had; replay the rest while clients are being served."""
    journal, found = LocalJournal.open(
        broker.disk,
        now=broker.clock(),
        segment_bytes=int(broker.config.segment_mb * (1 << 20)),
        group=bytes(16),
    )
    book = load(found.snapshot.chunks()) if found.snapshot is not None else JobBook()
    entries = [c.decode_entry(index, payload) for index, payload in found.entries()]
    machine = BrokerMachine(
        broker.config, journal, book, key=KEY, broker_id="early", now=broker.clock(),
        wall=broker.universe.wall,
    )  # fmt: skip
    if not entries:
        broker.serve(machine)
        return
    broker.listen(machine)
    broker.later_in_this_life(5 * MS, "replay", lambda: [book.apply(entry) for entry in entries])


# ------------------------------------------------------------------ the machine


class _LeaksCredit(BrokerMachine):
    """Every outcome gives its credit back, also one that had been given back before."""

    def _ack(self, peer: Any, msg_id: int, message: m.Ack, now: Instant) -> None:
        super()._ack(peer, msg_id, message, now)
        worker = self._worker(peer)
        for run in message.runs:
            grant = self.book.grants.get(run.grant)
            told = run.offsets if run.offsets is not None else range(len(run.outputs))
            for offset in [*told, *(failure.offset for failure in run.failures)]:
                if grant is None or grant.rows[offset].place is not grant:
                    worker.credit += 1
                    self.scheduler.freed(worker, self.book)


class _LeasesByWallClock(BrokerMachine):
    """Silence is measured with the clock on the wall."""

    def _received(self, event: Received, now: Instant) -> None:
        super()._received(event, now)
        peer = self.peers.get(event.conn)
        if peer is not None:
            self._seen()[peer.id] = self.wall(now)

    def _sweep_worker(self, worker: RosterWorker, now: Instant) -> None:
        peer = self.peers.get(worker.conn) if worker.conn is not None else None
        heard = worker.heard if peer is None else peer.heard
        silent = self.wall(now) - self._seen().get(worker.id, self.wall(now))
        super()._sweep_worker(worker, max(now, heard + silent))

    def _seen(self) -> dict[str, int]:
        found: dict[str, int] = self.__dict__.setdefault("_seen_at", {})
        return found


class _AssignsOnce(BrokerMachine):
    """What was sent counts as received."""

    def _reconcile(self, worker: RosterWorker, held: Any) -> None:
        del worker, held


class _PlansFirst(BrokerMachine):
    """Plans the next entry while the last one, committed, is not in the book."""

    def advance(self, now: Instant) -> list[Any]:
        flying = self._flying
        if flying is not None and self.journal.committed >= flying[0].index:
            self._flying = None
            self._close_entry(now)
            planned, self._flying = self._flying, flying
            self._apply_committed(now)
            self._flying = planned
        return super().advance(now)


# ------------------------------------------------------------------ the book


class _Book(JobBook):
    """A book with a hook before every result."""

    def _finish(self, command: c.Finish) -> None:
        self._before_finish(command)
        super()._finish(command)

    def _before_finish(self, command: c.Finish) -> None:
        raise NotImplementedError

    def _hand_over(self, row: Row, grant: Grant) -> None:
        """The lease is taken from its owner and counted for `grant`."""
        owner: Grant = row.place
        row.place = grant
        grant.left += 1
        grant.queue.leased += 1
        grant.worker.held += 1
        self._unlease(owner, 1)


class _AcksById(_Book):
    """A result counts for whatever job it names, whoever holds the lease by now."""

    def __init__(self) -> None:
        super().__init__()
        self._ever: dict[int, list[Row]] = {}

    def _assign(self, command: c.Assign) -> None:
        super()._assign(command)
        for grant in self._changes.grants:
            self._ever.setdefault(grant.number, list(grant.rows))

    def _before_finish(self, command: c.Finish) -> None:
        rows = self._ever.get(command.grant, [])
        offsets = command.offsets if command.offsets is not None else range(len(rows))
        for offset, output in zip(offsets, command.outputs, strict=False):
            row = rows[offset] if offset < len(rows) else None
            owner = row.place if row is not None else None
            if row is not None and isinstance(owner, Grant) and owner.number != command.grant:
                at = owner.rows.index(row)
                super()._finish(c.Finish(owner.worker.id, owner.number, [at], [output]))

    def _finish(self, command: c.Finish) -> None:
        self._before_finish(command)
        JobBook._finish(self, command)


class _OldGrantSettles(_Book):
    """"The grant lives and the job is leased" is taken for ownership."""

    def _before_finish(self, command: c.Finish) -> None:
        grant = self._grant(command.grant, command.worker)
        if grant is None:
            return
        offsets = command.offsets if command.offsets is not None else range(len(grant.rows))
        for offset in offsets:
            row = grant.rows[offset] if offset < len(grant.rows) else None
            if row is not None and isinstance(row.place, Grant) and row.place is not grant:
                self._hand_over(row, grant)


class _LeavesAssignedQueued(JobBook):
    """Leases are not restored: what was assigned is queued again after a restart."""

    def _assign(self, command: c.Assign) -> None:
        del command


# ------------------------------------------------------------------ recovery


def _dump_without_settled(book: JobBook) -> Iterator[bytes]:
    """The snapshot has what is open; what has ended is remembered by nobody."""
    kept = book.settled, book.faded
    book.settled, book.faded = type(book.settled)(), type(book.faded)()
    yield from dump(book)
    book.settled, book.faded = kept


def _replay_all(found: Recovery) -> JobBook:
    """The whole log over the snapshot, which has most of it already."""
    book = load(found.snapshot.chunks()) if found.snapshot is not None else JobBook()
    whole = Recovery(
        found._storage, snapshot=None, segments=found._segments, last=found.last, torn=[], damaged=[]
    )
    first = found._segments[0].first if found._segments else 1
    found.snapshot, snapshot = None, found.snapshot
    del whole
    for index, payload in _entries_from(found, first):
        entry = c.decode_entry(index, payload)
        book.applied = index - 1
        book.apply(c.Entry(index, max(entry.time, book.time), entry.wall, entry.commands))
    found.snapshot = snapshot
    return book


def _entries_from(found: Recovery, first: int) -> Iterator[tuple[int, bytes]]:
    from ekiden.journal.segments import replay

    yield from replay(found._storage, found._segments, after=first - 1, upto=found.last)


def _replay_without_leases(found: Recovery) -> JobBook:
    book = load(found.snapshot.chunks()) if found.snapshot is not None else JobBook()
    careless = _LeavesAssignedQueued()
    for index, payload in found.entries():
        entry = c.decode_entry(index, payload)
        kept = [command for command in entry.commands if not isinstance(command, c.Assign)]
        book.apply(c.Entry(index, entry.time, entry.wall, kept))
    del careless
    return book


# ------------------------------------------------------------------ the list, and the hunt


@contextmanager
def _swapped(*swaps: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    for owner, name, value in swaps:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
