"""Mistakes planted on purpose: checkers that miss one cannot be trusted with ours.

Each is a mistake that somebody made before: in the notes this grid grew from, or in a trial of it.
Production code knows nothing of them. A mutant replaces a class or a function for the time of one
hunt, where the broker looks it up, so that the checkers' mirror stays sound.

To add one, write what is wrong as a subclass or a function, and an entry in `MUTANTS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from ekiden.broker import machine, recovery
from ekiden.broker.crew import Crew
from ekiden.broker.events import Persisted
from ekiden.broker.machine import BrokerMachine
from ekiden.core import commands as c
from ekiden.core import image
from ekiden.core.book import JobBook
from ekiden.core.image import dump, load
from ekiden.core.roster import RosterWorker
from ekiden.core.rows import Grant, Row
from ekiden.errors import CorruptJournal
from ekiden.journal.journal import Append
from ekiden.journal.local import perform
from ekiden.journal.recovery import Recovery
from ekiden.machine import Instant, Received
from ekiden.simulation.broker import SimBroker
from ekiden.simulation.trial import simulate
from ekiden.simulation.world import MS
from ekiden.wire import messages as m

# ------------------------------------------------------------------ the broker's process


def _write_without_sync(broker: SimBroker, append: Append) -> None:
    """What the page cache has counts as written."""
    perform(broker.disk, append, sync=False)
    broker.post(Persisted(append.upto))


def _serve_at_once(broker: SimBroker) -> None:
    """Listen with what the snapshot had; the entries after it follow when they are read."""
    rest: list[c.Entry] = []

    def replay_snapshot(found: Recovery) -> JobBook:
        rest.extend(c.decode_entry(index, payload) for index, payload in found.entries())
        return _loaded(found)

    with broker.mortal(), _swapped((recovery, "replay", replay_snapshot)):
        machine = broker.open().machine

        def catch_up() -> None:
            for entry in rest:
                machine.book.apply(entry)
            broker.announce(machine)

        broker.listen(machine)
        broker.later_in_this_life(5 * MS if rest else 0, "catch up", catch_up)


# ------------------------------------------------------------------ the machine


class _LeaksCredit(Crew):
    """Every outcome gives its credit back, also one that had given it back before."""

    def ack(self, peer: Any, msg_id: int, message: m.Ack, now: Instant) -> None:
        super().ack(peer, msg_id, message, now)
        worker = self._worker(peer)
        for run in message.runs:
            grant = self._book.grants.get(run.grant)
            for offset in run.offsets if run.offsets is not None else range(len(run.outputs)):
                if grant is None or grant.rows[offset].place is not grant:
                    worker.credit += 1
                    self._scheduler.freed(worker, self._book)


class _TimesLeasesByTheWall(BrokerMachine):
    """Silence is measured with the clock on the wall."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._heard_wall: dict[str, int] = {}
        self.crew._sweep_worker = self._sweep_worker  # type: ignore[method-assign]

    def _received(self, event: Received, now: Instant) -> None:
        super()._received(event, now)
        peer = self.peers.get(event.conn)
        if peer is not None:
            self._heard_wall[peer.id] = self.wall(now)

    def _sweep_worker(self, worker: RosterWorker, now: Instant) -> None:
        peer = self.peers.get(worker.conn) if worker.conn is not None else None
        heard = worker.heard if peer is None else peer.heard
        silent = self.wall(now) - self._heard_wall.get(worker.id, self.wall(now))
        Crew._sweep_worker(self.crew, worker, max(now, heard + silent))


class _AssignsOnce(Crew):
    """What was sent once counts as received: a worker that comes back is not told again."""

    _coming_back = False

    def _reconcile(self, worker: RosterWorker, held: Any) -> None:
        self._coming_back = True
        super()._reconcile(worker, held)
        self._coming_back = False

    def send_grant(self, grant: Grant, owned: list[tuple[int, Row]]) -> None:
        if not self._coming_back:
            super().send_grant(grant, owned)


class _PlansFirst(BrokerMachine):
    """The next entry is planned while the last one, committed, is not in the book."""

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


class _SettlesById(JobBook):
    """A result counts for the job it names, whoever has the lease by now."""

    def __init__(self) -> None:
        super().__init__()
        self._granted: dict[int, list[Row]] = {}

    def _assign(self, command: c.Assign) -> None:
        super()._assign(command)
        for grant in self._changes.grants:
            self._granted.setdefault(grant.number, list(grant.rows))

    def _finish(self, command: c.Finish) -> None:
        rows = self._granted.get(command.grant, [])
        for offset, output in zip(_offsets(command), command.outputs, strict=False):
            owner = rows[offset].place if offset < len(rows) else None
            if isinstance(owner, Grant) and owner.number != command.grant:
                at = owner.rows.index(rows[offset])
                super()._finish(c.Finish(owner.worker.id, owner.number, [at], [output]))
        super()._finish(command)


class _OldGrantSettles(JobBook):
    """That the grant lives and the job is leased is taken for ownership."""

    def _finish(self, command: c.Finish) -> None:
        grant = self._grant(command.grant, command.worker)
        for offset in _offsets(command) if grant is not None else ():
            assert grant is not None
            row = grant.rows[offset]
            if isinstance(row.place, Grant) and row.place is not grant:
                self._take_over(row, row.place, grant)
        super()._finish(command)

    def _take_over(self, row: Row, owner: Grant, grant: Grant) -> None:
        row.place = grant
        grant.left += 1
        grant.queue.leased += 1
        grant.worker.held += 1
        self._unlease(owner, 1)


def _offsets(command: c.Finish) -> list[int]:
    return list(range(len(command.outputs))) if command.offsets is None else command.offsets


# ------------------------------------------------------------------ recovery


def _loaded(found: Recovery) -> JobBook:
    return load(found.snapshot.chunks()) if found.snapshot is not None else JobBook()


def _dump_open_jobs(book: JobBook) -> Iterator[bytes]:
    """The snapshot has what is open; what has ended is remembered by nobody."""
    kept = book.settled, book.faded
    book.settled, book.faded = deque(), deque()
    yield from dump(book)
    book.settled, book.faded = kept


def _replay_everything(found: Recovery) -> JobBook:
    """The whole log over a snapshot that has most of it already."""
    book = _loaded(found)
    snapshot, found.snapshot = found.snapshot, None
    try:
        entries = list(found.entries())
    except CorruptJournal:  # the beginning has been deleted by now
        found.snapshot = snapshot
        entries = list(found.entries())
    for index, payload in entries:
        entry = c.decode_entry(index, payload)
        book.applied = index - 1
        book.apply(c.Entry(index, max(entry.time, book.time), entry.wall, entry.commands))
    return book


def _replay_without_leases(found: Recovery) -> JobBook:
    """A job that was assigned when the broker died is found in its queue."""
    book = _loaded(found)
    for index, payload in found.entries():
        entry = c.decode_entry(index, payload)
        kept = [command for command in entry.commands if not isinstance(command, c.Assign)]
        book.apply(c.Entry(index, entry.time, entry.wall, kept))
    return book


# ------------------------------------------------------------------ the list, and the hunt

MUTANTS: Final[dict[str, list[tuple[Any, str, Any]]]] = {
    "answer-before-fsync": [(SimBroker, "write", _write_without_sync)],
    "ack-by-job-id-only": [(recovery, "JobBook", _SettlesById), (image, "JobBook", _SettlesById)],
    "dedup-not-in-snapshot": [(recovery, "dump", _dump_open_jobs)],
    "whole-log-over-snapshot": [(recovery, "replay", _replay_everything)],
    "credit-leaked-on-duplicates": [(machine, "Crew", _LeaksCredit)],
    "replayed-assign-left-queued": [(recovery, "replay", _replay_without_leases)],
    "wall-clock-for-leases": [(recovery, "BrokerMachine", _TimesLeasesByTheWall)],
    "served-while-recovering": [(SimBroker, "recover", _serve_at_once)],
    "assign-sent-only-once": [(machine, "Crew", _AssignsOnce)],
    "old-grant-settles-new-attempt": [
        (recovery, "JobBook", _OldGrantSettles),
        (image, "JobBook", _OldGrantSettles),
    ],
    "planned-before-applied": [(recovery, "BrokerMachine", _PlansFirst)],
}
"""Name → what is replaced: (module or class, name in it, by what)."""


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


def planted(name: str) -> AbstractContextManager[None]:
    """The mutant lives as long as this is open."""
    return _swapped(*MUTANTS[name])


def hunt(name: str, tries: int) -> tuple[int | None, str]:
    """Plant a mutant and run seeds from 1 on: the first that catches it, and what it saw."""
    with planted(name):
        for seed in range(1, tries + 1):
            violation = simulate(seed).violation
            if violation:
                return seed, violation
    return None, ""
