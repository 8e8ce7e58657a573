"""The promises, checked from outside while a simulated grid runs.

The checkers trust nothing the broker says of itself. They read the disk: whatever a sync has made
safe is decoded and applied to a book of their own, the *mirror*, from entry 1 on and never from a
snapshot. Every frame the broker sends is held against it:

- I1  what is answered with Accepted is in the mirror, and stays there;
- I2  a result is told only if the mirror holds it; it is one that a run of that very attempt
      produced; a job that is done never changes;
- I3  after every start the broker's book equals the mirror, which replayed everything;
- I5  an Assign names leases the mirror holds;
- I6  after the heal every accepted job ends, and every client hears of it;
- I8  at rest nothing is left over: no unconfirmed acks, no open batches, no dead connections;
- I9  only expected refusals are heard; nothing is sent by a broker that is not yet, or no longer,
      entitled to.

A lease may be forfeited only if the worker was really silent, whatever wall clocks say; a worker
never holds more leases than the credit it gave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ekiden.core import commands
from ekiden.core.book import JobBook
from ekiden.core.image import fingerprint
from ekiden.core.invariants import check
from ekiden.core.rows import Grant, Kept, Row, Settlement
from ekiden.journal.records import HEADER_BYTES, RECORD_BYTES, crc_seed, decode_record
from ekiden.model.jobs import DONE, TERMINAL
from ekiden.simulation.network import Party, body_of
from ekiden.simulation.world import Violation
from ekiden.wire import messages
from ekiden.wire.messages import TYPE_OF

if TYPE_CHECKING:
    from ekiden.simulation.cluster import Grid

_ACCEPTED = TYPE_OF[messages.Accepted]
_RESULTS = TYPE_OF[messages.Results]
_ASSIGN = TYPE_OF[messages.Assign]
_SUBMIT = TYPE_OF[messages.Submit]
_JOIN = TYPE_OF[messages.Join]
_CREDIT = TYPE_OF[messages.Credit]

_EXPECTED_REFUSALS = frozenset({"conflict", "disk_full", "queue_full", "unknown_job"})
_EXPECTED_ASK_REFUSALS = frozenset(
    {"unknown_job", "unknown_worker", "connection_lost", "disk_full"}
)


class Mirror:
    """The book as the disk has it, replayed from the first entry, and what it ever contained."""

    def __init__(self, grid: Grid) -> None:
        self.book = JobBook()
        self.leases: dict[tuple[int, int], tuple[str, int, str]] = {}
        """(grant, offset) → job, attempt, worker; of all times."""
        self.done: dict[str, tuple[bytes | None, int]] = {}
        """Job → output (None if it lies in the journal) and attempt."""
        self.digests: list[bytes] = []
        self._grid = grid
        self._read_upto: dict[str, int] = {}

    def synced(self, name: str) -> None:
        """A file became safe: apply what is new in it."""
        if not name.startswith("segment-") or not name.endswith(".log"):
            return
        disk = self._grid.disk
        at = self._read_upto.get(name, HEADER_BYTES)
        data = disk.read(name)
        if len(data) <= at:
            return
        seed = crc_seed(data[HEADER_BYTES - 20 : HEADER_BYTES - 4])
        while (found := decode_record(data, at, seed)) is not None:
            index, _, payload = found
            at += RECORD_BYTES + len(payload)
            self._apply(index, payload)
        self._read_upto[name] = at

    def state_of(self, job: str) -> str:
        """The state of a job, roughly."""
        row = self.book.find(job)
        if row is None:
            return "unknown"
        if isinstance(row.place, Settlement):
            return row.place.state
        return f"leased to {row.place.worker.id}" if isinstance(row.place, Grant) else "waiting"

    def _apply(self, index: int, payload: bytes) -> None:
        book = self.book
        if index <= book.applied:
            raise Violation("I3", f"entry {index} was written twice")
        if index != book.applied + 1:
            raise Violation("I3", f"entry {index} was written after {book.applied}")
        entry = commands.decode_entry(index, payload)
        try:
            changes = book.apply(entry)
        except Exception as error:
            raise Violation("bug", f"apply raised {error!r} at entry {index}") from error
        self._grid.checkers.applied(entry, changes)


class Checkers:
    """All checks of one world."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.mirror = Mirror(grid)
        self.accepted: dict[str, None] = {}
        self._submits: dict[tuple[str, int, int], list[str]] = {}
        self._produced: dict[str, dict[bytes, int]] = {}
        self._credit: dict[str, tuple[int, int]] = {}
        self._cancels: dict[str, None] = {}
        self._told: dict[str, tuple[bytes, int]] = {}
        self._last_heard: dict[str, int] = {}
        grid.network.on_send = self.sent
        grid.network.on_deliver = self.delivered
        grid.disk.on_operation = self.operated

    # -------------------------------------------------------------- what they watch

    def operated(self, kind: str, name: str) -> None:
        """The disk did something."""
        if kind == "sync":
            self.mirror.synced(name)

    def sent(
        self, sender: Party, receiver: Party, kind: int, msg_id: int, corr_id: int, raw: bytes
    ) -> None:
        """A frame left a process."""
        if sender is self.grid.broker:
            if not self.grid.broker.entitled:
                raise Violation(
                    "I9", f"the broker spoke to {receiver.name} before it had recovered"
                )
            if kind == _ASSIGN:
                self._check_assign(receiver, messages.decode(kind, body_of(raw)))
            elif kind == _ACCEPTED:
                self._check_accepted(receiver, messages.decode(kind, body_of(raw)))
            elif kind == _RESULTS:
                self._check_results(messages.decode(kind, body_of(raw)))
        elif kind == _SUBMIT:
            submit: Any = messages.decode(kind, body_of(raw))
            self._submits[sender.name, sender.incarnation, msg_id] = submit.ids
        elif kind in (_JOIN, _CREDIT):
            said: Any = messages.decode(kind, body_of(raw))
            before = self._credit.get(sender.name, (0, 0))
            self._credit[sender.name] = (before[1], said.credit)

    def delivered(self, sender: Party, receiver: Party, frame: Any) -> None:
        """A frame reached a process."""
        if receiver is self.grid.broker:
            self._last_heard[sender.name] = self.grid.universe.now

    def wants_cancel(self, jobs: list[str]) -> None:
        """Somebody is about to cancel these: only they may end as cancelled."""
        for job in jobs:
            self._cancels[job] = None

    # -------------------------------------------------------------- frames of the broker

    def _check_assign(self, receiver: Party, message: Any) -> None:
        for run in message.runs:
            for at, job in enumerate(run.ids):
                attempt = run.attempts[at] if run.attempts else 1
                lease = self.mirror.leases.get((run.grant, run.first + at))
                if lease != (job, attempt, receiver.name):
                    raise Violation(
                        "I5",
                        f"assign of {job} attempt {attempt} (grant {run.grant}) to {receiver.name}; "
                        f"the disk holds {lease}",
                    )

    def _check_accepted(self, receiver: Party, message: Any) -> None:
        refused = {(each.message, each.offset) for each in message.refused}
        for number in message.messages:
            jobs = self._submits.get((receiver.name, receiver.incarnation, number))
            if jobs is None:
                raise Violation("I9", f"{receiver.name} got an answer to a submit it never sent")
            for offset, job in enumerate(jobs):
                if (number, offset) in refused or (number, -1) in refused:
                    continue
                if self.mirror.book.find(job) is None:
                    raise Violation("I1", f"{job} was accepted but is not on disk")
                self.accepted[job] = None

    def _check_results(self, message: Any) -> None:
        for run in message.runs:
            for at, job in enumerate(run.ids):
                told = (run.outputs[at], run.attempts.get(at, 1))
                held = self.mirror.done.get(job)
                if held is None:
                    raise Violation("I2", f"a result of {job} was told, but none is on disk")
                if held[0] is not None and held != told:
                    raise Violation("I2", f"{job}: told {told}, on disk {held}")
                self._check_produced(job, *told)
                if self._told.setdefault(job, told) != told:
                    raise Violation("I2", f"the result of {job} changed to {told}")
        for ended in message.ended:
            row = self.mirror.book.find(ended.id)
            if row is not None and not isinstance(row.place, Settlement):
                raise Violation(
                    "I2", f"{ended.id} was told as {ended.state}, but it is not settled"
                )

    def _check_produced(self, job: str, output: bytes, attempt: int) -> None:
        really = self._produced.get(job, {}).get(output)
        if really is None:
            raise Violation(
                "I2", f"{job} has an output that no run of it produced: {output[:80]!r}"
            )
        if really != attempt:
            raise Violation(
                "I2", f"{job}: output of attempt {really} was recorded as attempt {attempt}"
            )

    # -------------------------------------------------------------- entries that became safe

    def applied(self, entry: commands.Entry, changes: Any) -> None:
        """An entry is on disk and in the mirror."""
        for grant in changes.grants:
            for offset, row in enumerate(grant.rows):
                key = (grant.number, offset)
                if key in self.mirror.leases:
                    raise Violation("I2", f"grant number {grant.number} was used twice")
                self.mirror.leases[key] = (row.id, row.attempt, grant.worker.id)
            self._check_credit(grant)
        for settlement in changes.settlements:
            for row in settlement.rows:
                self._settled(row, settlement)
        for command in entry.commands:
            if isinstance(command, commands.Forfeit):
                self._check_forfeit(command)

    def _settled(self, row: Row, settlement: Settlement) -> None:
        if row.id in self.mirror.done:
            raise Violation("I2", f"{row.id} was done and is settled again as {settlement.state}")
        if settlement.state == DONE:
            output = None if isinstance(row.body, Kept) else row.body
            if output is not None:
                self._check_produced(row.id, output, row.attempt)
            self.mirror.done[row.id] = (output, row.attempt)

    def _check_credit(self, grant: Any) -> None:
        allowed = max(self._credit.get(grant.worker.id, (0, 0)))
        if grant.worker.held > allowed:
            raise Violation(
                "credit", f"{grant.worker.id} holds {grant.worker.held}, it allowed {allowed}"
            )

    def _check_forfeit(self, command: commands.Forfeit) -> None:
        broker = self.grid.broker
        heard = max(self._last_heard.get(command.worker, 0), broker.listening_since)
        silent = self.grid.universe.now - heard
        if silent < broker.patience_ns:
            raise Violation(
                "lease", f"{command.worker} lost its leases after {silent / 1e9:.1f} s of silence"
            )

    # -------------------------------------------------------------- what others report

    def recovered(self, book: JobBook) -> None:
        """The broker has a book again and is about to listen."""
        mirror = self.mirror.book
        if book.applied != mirror.applied:
            raise Violation("I3", f"recovered to {book.applied}, the disk has {mirror.applied}")
        if fingerprint(book) != fingerprint(mirror):
            raise Violation(
                "I3", f"the recovered book differs from a full replay of {book.applied}"
            )
        self._keep_accepted()

    def _keep_accepted(self) -> None:
        for job in self.accepted:
            if self.mirror.book.find(job) is None:
                raise Violation("I1", f"{job} was accepted and is gone")

    def ran(self, worker: str, job: str, attempt: int, output: bytes) -> None:
        """A run produced this."""
        self._produced.setdefault(job, {})[output] = attempt

    def began(self, worker: str, job: str, attempt: int) -> None:
        """A run began."""
        if job in self.mirror.done and self.mirror.done[job][1] < attempt:
            raise Violation("I2", f"{job} is done and runs again as attempt {attempt}")

    def heard(self, client: str, job: str, what: str, detail: Any) -> None:
        """A client was told something."""
        if what == "done":
            held = self.mirror.done.get(job)
            if held is None or (held[0] is not None and held[0] != detail[0]):
                raise Violation("I2", f"{client} got a result of {job} that is not recorded")
        elif what == "refused":
            handle, error = detail
            if error.code not in _EXPECTED_REFUSALS:
                raise Violation("I9", f"{client}: {job} refused with {error.code}: {error}")
            self._check_refusal(client, job, handle, error)
        elif what == "ask refused":
            asked, error = detail
            if error.code not in _EXPECTED_ASK_REFUSALS:
                raise Violation("I9", f"{client}: {asked[1]} refused with {error.code}: {error}")
        elif what == "ended" and detail.state == "cancelled":
            plan = self.grid.plans[job]
            if job not in self._cancels and not plan.terms.expires_at:
                raise Violation("I9", f"{job} ended as cancelled, but nobody asked for it")

    def _check_refusal(self, client: str, job: str, handle: Any, error: Any) -> None:
        plan = self.grid.plans.get(job)
        same = plan is not None and handle.body == plan.body
        if error.code == "conflict" and same:
            row = self.mirror.book.find(job)
            if row is not None and job in self.accepted:
                raise Violation("I9", f"{job} was refused as a conflict with itself")

    # -------------------------------------------------------------- from time to time, and at the end

    def check_book(self) -> None:
        """The mirror is sound in itself."""
        try:
            check(self.mirror.book)
        except AssertionError as broken:
            raise Violation("book", f"an invariant of the book does not hold: {broken}") from broken

    def _open(self) -> list[str]:
        return [job for job in self.accepted if self.mirror.state_of(job) not in TERMINAL]

    def all_ended(self) -> bool:
        """Every accepted job has ended, and every program knows how its jobs ended."""
        return not self._open() and not self._waiting_clients()

    def _waiting_clients(self) -> list[str]:
        return [
            f"{client.name} waits for {job}"
            for client in self.grid.clients
            for job in client.ordered
            if job not in client.settled
        ]

    def why_not_ended(self) -> str:
        """What is still open, for people."""
        open_jobs = [f"{job} is {self.mirror.state_of(job)}" for job in self._open()]
        return "after the heal " + ", ".join([*open_jobs, *self._waiting_clients()][:5])

    def check_rest(self) -> None:
        """Nothing is left over once everything has ended."""
        self._keep_accepted()
        for worker in self.grid.workers:
            machine: Any = worker.machine
            if machine is None or machine.held:
                raise Violation("I8", f"{worker.name} still holds {machine and machine.held}")
        for client in self.grid.clients:
            machine = client.machine
            if machine is None or machine.pending or machine.open_jobs:
                raise Violation("I8", f"{client.name} still has open jobs")
