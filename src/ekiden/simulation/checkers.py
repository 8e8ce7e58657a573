"""The promises, checked from outside while a simulated grid runs.

The checkers trust nothing the broker says of itself. What is on its disk they know from the mirror,
what was run from the workers' executors, what was told from the frames and from the clients:

- I1  what is answered with Accepted is in the mirror, under the content it was sent with, and stays
      there; no broker claims not to know it;
- I2  a result is told only if the mirror holds it, is one that a run of that very attempt brought,
      and never changes; no outcome but that of a replayed job does;
- I3  after every start the broker's book equals the mirror, and all along the way their digests do;
- I5  an Assign names leases the mirror holds for that worker, no grant number is used twice, and no
      job is leased before its delay is over or out of its client's order;
- I6  after the heal every accepted job ends, and every future of every client resolves, once;
- I8  at rest nothing is left over: no unconfirmed acks, no open batches; and no journal fills with
      entries that change nothing;
- I9  only expected refusals are heard, nothing is sent by a broker that has not recovered, nothing
      ends as cancelled that nobody cancelled.

Beside them: a lease is forfeited only if the worker was silent for as long as it may be, whatever
wall clocks say, and no worker and no client ever holds more attempts than its credit or cap. (I4 is
about elections and I7 about files: neither exists here.)
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count
from typing import Any

from ekiden import limits
from ekiden.config import BrokerConfig
from ekiden.core import commands
from ekiden.core.book import JobBook
from ekiden.core.effects import Changes
from ekiden.core.image import fingerprint
from ekiden.core.invariants import check
from ekiden.core.rows import Grant, Kept, Row, Settlement
from ekiden.machine import Frame
from ekiden.model.jobs import CANCELLED, DONE, EXPIRED, FAILED, TERMINAL, Route
from ekiden.simulation.disk import SimDisk
from ekiden.simulation.mirror import Mirror
from ekiden.simulation.network import End, Network, Party, body_of
from ekiden.simulation.plans import JobPlan
from ekiden.simulation.silences import Silences
from ekiden.simulation.world import Universe, Violation
from ekiden.wire import messages
from ekiden.wire.messages import TYPE_OF

BROKER = "broker"

_ACCEPTED = TYPE_OF[messages.Accepted]
_RESULTS = TYPE_OF[messages.Results]
_ATTACHED = TYPE_OF[messages.Attached]
_ASSIGN = TYPE_OF[messages.Assign]
_SUBMIT = TYPE_OF[messages.Submit]
_HELLO_WORKER = TYPE_OF[messages.HelloWorker]
_JOIN = TYPE_OF[messages.Join]
_CREDIT = TYPE_OF[messages.Credit]
_BYE = TYPE_OF[messages.Bye]
_FIRST_WORKER_TYPE = TYPE_OF[messages.Assign]

_EXPECTED_REFUSALS = frozenset({"conflict", "disk_full", "queue_full", "unknown_job"})
_EXPECTED_ASK_REFUSALS = frozenset(
    {"unknown_job", "unknown_worker", "connection_lost", "disk_full"}
)

# A submit that turns out to be a repeat leaves an assign without jobs; a few in a row are no loop.
_IDLE_ENTRIES_MAX = 8


class Checkers:
    """All checks of one world: hear of everything, raise Violation at the first broken promise."""

    def __init__(
        self,
        universe: Universe,
        network: Network,
        disk: SimDisk,
        config: BrokerConfig,
        plans: dict[str, JobPlan],
    ) -> None:
        self.universe = universe
        self.mirror = Mirror(disk, self.applied)
        self.accepted: dict[str, None] = {}
        """Jobs that a broker said it has accepted, to whomever."""
        self._config = config
        self._plans = plans
        self._entitled = False
        self._submits: dict[tuple[str, int, int], messages.Submit] = {}
        self._produced: dict[str, dict[bytes, int]] = {}
        self._begun: dict[tuple[str, int], None] = {}
        """Attempts of jobs that some executor has begun."""
        self._leases: dict[tuple[int, int], tuple[str, int, str]] = {}
        """(grant, offset) → job, attempt, worker; of all times."""
        self._attempts: dict[str, int] = {}
        self._done: dict[str, tuple[bytes | None, int]] = {}
        """Job → output (None if it lies in the journal) and attempt."""
        self._told: dict[str, tuple[bytes, int]] = {}
        self._told_ended: dict[str, str] = {}
        self._credit: dict[str, int] = {}
        self._cancels: dict[str, None] = {}
        self._stopping: dict[str, None] = {}
        """Jobs whose cancel was committed while they were leased."""
        self._replayed: dict[str, None] = {}
        self._purged: dict[str, None] = {}
        """Jobs that were forgotten, as they should be."""
        self._settled_at: dict[str, int] = {}
        self._silences = Silences(universe, config)
        self._places: dict[str, int] = {}
        self._next_place = count()
        self._line: dict[tuple[Route, int, str], int] = {}
        self._idle_entries = 0
        network.on_send = self.sent
        network.on_deliver = self.delivered
        disk.on_operation = self.operated

    # -------------------------------------------------------------- what they watch

    def operated(self, kind: str, name: str) -> None:
        """The disk did something."""
        if kind == "sync":
            self.mirror.synced(name)

    def sent(self, sender: End, receiver: End, kind: int, msg_id: int, raw: bytes) -> None:
        """A frame left a process."""
        name = sender.party.name
        if name == BROKER:
            if not self._entitled:
                who = receiver.party.name
                raise Violation("I9", f"the broker spoke to {who} before it had recovered")
            if kind == _ASSIGN:
                self._check_assign(receiver.party.name, messages.decode(kind, body_of(raw)))
            elif kind == _ACCEPTED:
                self._check_accepted(receiver, messages.decode(kind, body_of(raw)))
            elif kind == _RESULTS:
                self._check_results(messages.decode(kind, body_of(raw)))
            elif kind == _ATTACHED:
                self._check_attached(messages.decode(kind, body_of(raw)))
        elif kind == _SUBMIT:
            submit: Any = messages.decode(kind, body_of(raw))
            self._submits[name, sender.incarnation, msg_id] = submit
        elif kind in (_JOIN, _CREDIT):
            said: Any = messages.decode(kind, body_of(raw))
            self._credit[name] = max(self._credit.get(name, 0), said.credit)

    def delivered(self, sender: Party, receiver: Party, frame: Frame) -> None:
        """A frame reached a process."""
        if receiver.name != BROKER:
            return
        if frame.type == _HELLO_WORKER:
            hello: Any = messages.decode(frame.type, frame.body)
            self._silences.greeted(sender.name, hello.session)
        elif frame.type == _BYE:
            self._silences.left(sender.name)
        elif frame.type == _JOIN or frame.type >= _FIRST_WORKER_TYPE:
            self._silences.heard(sender.name, joins=frame.type == _JOIN)

    def wants_cancel(self, jobs: list[str]) -> None:
        """Somebody is about to cancel these: only they may end as cancelled."""
        for job in jobs:
            self._cancels[job] = None

    # -------------------------------------------------------------- frames of the broker

    def _check_assign(self, worker: str, message: Any) -> None:
        for run in message.runs:
            for at, job in enumerate(run.ids):
                attempt = run.attempts[at] if run.attempts else 1
                lease = self._leases.get((run.grant, run.first + at))
                if lease != (job, attempt, worker):
                    raise Violation(
                        "I5",
                        f"assign of {job} attempt {attempt} (grant {run.grant}) to {worker}; "
                        f"the disk holds {lease}",
                    )

    def _check_accepted(self, receiver: End, message: Any) -> None:
        client = receiver.party.name
        refused = {(each.message, each.offset) for each in message.refused}
        for number in message.messages:
            submit = self._submits.get((client, receiver.incarnation, number))
            if submit is None:
                raise Violation("I9", f"{client} got an answer to a submit it never sent")
            for offset, job in enumerate(submit.ids):
                if (number, offset) in refused or (number, -1) in refused:
                    continue
                held = self.mirror.digest_of(job)
                if not held and job in self._purged:
                    continue
                if not held:
                    raise Violation("I1", f"{job} was accepted but is not on disk")
                if held != submit.digests[8 * offset : 8 * offset + 8]:
                    raise Violation("I1", f"{job} was accepted, but the disk has other content")
                self.accepted[job] = None

    def _check_results(self, message: Any) -> None:
        for run in message.runs:
            for at, job in enumerate(run.ids):
                told = (run.outputs[at], run.attempts.get(at, 1))
                held = self._done.get(job)
                if held is None:
                    raise Violation("I2", f"a result of {job} was told, but none is on disk")
                if job in self._purged:
                    continue
                if told[1] != held[1] or (held[0] is not None and held[0] != told[0]):
                    raise Violation("I2", f"{job}: told {told}, on disk {held}")
                self._check_produced(job, *told)
                if self._told.setdefault(job, told) != told:
                    raise Violation("I2", f"the result of {job} changed to {told}")
        for ended in message.ended:
            self._check_ended(ended)

    def _check_ended(self, ended: messages.Ended) -> None:
        job, state = ended.id, ended.state
        row = self.mirror.book.find(job)
        if job not in self._replayed and (row is None or not isinstance(row.place, Settlement)):
            raise Violation("I2", f"{job} was told as {state}, but it is not settled")
        before = self._told_ended.setdefault(job, state)
        if job not in self._replayed and (before != state or (job in self._told and state != DONE)):
            raise Violation("I2", f"{job} was told as {before}, now as {state}")
        self._told_ended[job] = state

    def _check_attached(self, message: Any) -> None:
        for job in message.unknown:
            if job in self.accepted:
                raise Violation("I1", f"the broker does not know {job}, which was accepted")

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

    def applied(self, entry: commands.Entry, changes: Changes) -> None:
        """An entry is on disk and in the mirror."""
        tallies = iter(changes.tallies)
        for command in entry.commands:
            match command:
                case commands.Forfeit():
                    self.universe.count("leases forfeited")
                    self._silences.check_forfeit(command.worker)
                case commands.Submit():
                    for job in command.ids:
                        self._places.setdefault(job, next(self._next_place))
                case commands.Cancel():
                    self._stopping.update(dict.fromkeys(next(tallies).stopping))
                case commands.Replay():
                    self._replayed.update(dict.fromkeys(next(tallies).changed))
                case commands.Purge():
                    self._forget(next(tallies).changed)
        for outcome in changes.submits:
            for _ in outcome.repeated:
                self.universe.count("job submitted again")
            for _ in outcome.conflicts:
                self.universe.count("conflicting content")
        for _ in range(changes.stale):
            self.universe.count("outcome of a ghost")
        for row in changes.requeued:
            self._check_burned(row)
        for grant in changes.grants:
            self._granted(grant, entry)
        for settlement in changes.settlements:
            for row in settlement.rows:
                self._settled(row, settlement)
        if self._config.retention_ns < limits.RETENTION_NS:
            self._evict(entry.time)
        self._check_idle(entry, changes)

    def _evict(self, time: int) -> None:
        """Forget what is past its retention and not known any more."""
        oldest = time - self._config.retention_ns
        past = [job for job, ended in self._settled_at.items() if ended <= oldest]
        self._forget([job for job in past if self.mirror.book.find(job) is None])

    def _forget(self, jobs: list[str]) -> None:
        """What was purged, or is past its retention, is a new job when its id comes again."""
        for job in jobs:
            self.universe.count("job forgotten")
            self._settled_at.pop(job, None)
            self._purged[job] = self._replayed[job] = None
            for memory in (self.accepted, self._attempts, self._told_ended, self._places):
                memory.pop(job, None)

    def _granted(self, grant: Grant, entry: commands.Entry) -> None:
        worker = grant.worker
        for offset, row in enumerate(grant.rows):
            key = (grant.number, offset)
            if key in self._leases:
                raise Violation("I5", f"grant number {grant.number} was used twice")
            self._leases[key] = (row.id, row.attempt, worker.id)
            if row.attempt <= self._attempts.get(row.id, 0):
                raise Violation("I5", f"{row.id} was leased twice as attempt {row.attempt}")
            self._attempts[row.id] = row.attempt
            self._check_turn(row, entry)
            cap = self.mirror.book.settings.client_inflight_max
            if cap and row.origin.client.inflight > cap:
                raise Violation("credit", f"{row.origin.client.id} has more than {cap} in flight")
        allowed = self._credit.get(worker.id, 0)
        if worker.held > allowed:
            raise Violation("credit", f"{worker.id} holds {worker.held}, it allowed {allowed}")

    def _check_turn(self, row: Row, entry: commands.Entry) -> None:
        """First attempts go out in the order of acceptance, and not before their time."""
        if row.attempt > 1 or row.id in self._replayed:
            return
        terms = self._plans[row.id].terms
        if terms.delay_ns:
            if entry.time < row.origin.time + terms.delay_ns:
                raise Violation("I5", f"{row.id} was leased before its delay was over")
        elif not terms.not_before:
            spec = row.origin.spec
            line = (spec.route, spec.priority, row.origin.client.id)
            place = self._places[row.id]
            if place < self._line.get(line, -1):
                raise Violation("I5", f"{row.id} was leased after a job that was accepted later")
            self._line[line] = place

    def _check_burned(self, row: Row) -> None:
        """Only an attempt that began may count against the job."""
        for past in row.history or ():
            if past.burned and (row.id, past.attempt) not in self._begun:
                raise Violation("I9", f"attempt {past.attempt} of {row.id} burned but never began")

    def _settled(self, row: Row, settlement: Settlement) -> None:
        if self._stopping.pop(row.id, 0) is None and settlement.state != CANCELLED:
            raise Violation("I2", f"{row.id} was cancelled and ended as {settlement.state}")
        self._settled_at[row.id] = settlement.time
        if row.id in self._done and row.id not in self._purged:
            raise Violation("I2", f"{row.id} was done and is settled again as {settlement.state}")
        if settlement.state == DONE:
            output = None if isinstance(row.body, Kept) else row.body
            if output is not None:
                self._check_produced(row.id, output, row.attempt)
            self._done[row.id] = (output, row.attempt)
        elif settlement.state == FAILED:
            self._check_burned(row)
        elif settlement.state == CANCELLED:
            expired = settlement.reason == EXPIRED and self._plans[row.id].terms.expires_at
            if not expired and row.id not in self._cancels:
                raise Violation("I9", f"{row.id} ended as cancelled, but nobody asked for it")

    def _check_idle(self, entry: commands.Entry, changes: Changes) -> None:
        """A broker that proposes what changes nothing proposes it again, for ever."""
        planned = all(isinstance(c, commands.Tick | commands.Assign) for c in entry.commands)
        if not planned or changes.grants or changes.settlements or changes.woken:
            self._idle_entries = 0
            return
        self._idle_entries += 1
        if self._idle_entries > _IDLE_ENTRIES_MAX:
            raise Violation(
                "I8",
                f"{self._idle_entries} entries in a row changed nothing, last {entry.commands}",
            )

    # -------------------------------------------------------------- what others report

    def recovering(self) -> None:
        """A broker's new life begins; it may not speak yet."""
        self._entitled = False

    def recovered(self, book: JobBook) -> None:
        """The broker has a book again and is about to listen."""
        mirror = self.mirror.book
        if book.applied != mirror.applied:
            raise Violation("I3", f"recovered to {book.applied}, the disk has {mirror.applied}")
        if fingerprint(book) != fingerprint(mirror):
            raise Violation(
                "I3", f"the recovered book differs from a full replay of {book.applied}"
            )
        self.check_kept()
        self._entitled = True
        self._silences.listening()

    def check_kept(self) -> None:
        """Everything that was accepted is still known."""
        for job in self.accepted:
            if self.mirror.book.find(job) is None:
                raise Violation("I1", f"{job} was accepted and is gone")

    def given(self, worker: str, job: str, body: bytes) -> None:
        """A worker was given a job to run."""
        held = self.mirror.digest_of(job)
        if job in self._purged:
            return  # a frame that was long on its way speaks of the job that was forgotten
        if sha256(body).digest()[:8] != held:
            raise Violation("I1", f"{worker} was given {job} with a body nobody submitted")

    def began(self, worker: str, job: str, attempt: int) -> None:
        """A run began."""
        done = self._done.get(job)
        if done is not None and done[1] < attempt and job not in self._purged:
            raise Violation("I2", f"{job} is done and runs again as attempt {attempt}")
        self._begun[job, attempt] = None

    def ran(self, worker: str, job: str, attempt: int, output: bytes) -> None:
        """A run produced this."""
        self._produced.setdefault(job, {})[output] = attempt

    def heard(self, client: str, job: str, what: str, detail: Any) -> None:
        """A client was told something."""
        match what:
            case "accepted":
                if self.mirror.book.find(job) is None and job not in self._purged:
                    raise Violation("I1", f"{client} was told that {job} is accepted; it is not")
            case "done":
                held = self._done.get(job)
                if job in self._purged:
                    return
                if held is None or (held[0] is not None and held[0] != detail):
                    raise Violation("I2", f"{client} got a result of {job} that is not recorded")
            case "refused":
                self._check_refusal(client, job, *detail)
            case "ask refused":
                asked, error = detail
                if error.code not in _EXPECTED_ASK_REFUSALS:
                    raise Violation("I9", f"{client}: {asked} refused with {error.code}: {error}")

    def _check_refusal(self, client: str, job: str, handle: Any, error: Any) -> None:
        if error.code not in _EXPECTED_REFUSALS:
            raise Violation("I9", f"{client}: {job} refused with {error.code}: {error}")
        if error.code == "conflict":
            held = self.mirror.digest_of(job)
            if held == sha256(handle.body).digest()[:8]:
                raise Violation("I9", f"{job} was refused as a conflict with itself")

    # -------------------------------------------------------------- from time to time

    def check_book(self, live: JobBook | None) -> None:
        """The mirror is sound in itself, and so is the broker's book, which is no other."""
        mirror = self.mirror.book
        try:
            check(mirror)
            if live is not None:
                check(live)
        except AssertionError as broken:
            raise Violation("book", f"an invariant of the book does not hold: {broken}") from broken
        if live is not None and live.applied == mirror.applied and live.digest != mirror.digest:
            raise Violation("I3", f"the broker's book differs from the disk at {live.applied}")

    def open_jobs(self) -> list[str]:
        """Accepted jobs that have not ended, and where they are."""
        return [
            f"{job} is {state}"
            for job in self.accepted
            if (state := self.mirror.state_of(job)) not in TERMINAL
        ]
