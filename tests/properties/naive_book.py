"""A book of jobs as one would write it without a care for speed: lists, dicts and plain loops.

It is written from the rules, not from `ekiden.core`, and predicts all that can be seen: who holds
what, in which order jobs are given out, what is told to whom, what is remembered for how long. Only
the jitter of a backoff is not predicted: it is taken from the book and checked against its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from ekiden.core import commands as c
from ekiden.model import jobs as j

WAITING, NAPPING, LEASED = "waiting", "napping", "leased"
IN_MEMORY = 1024


@dataclass(eq=False)
class Group:
    """Jobs that ended together."""

    state: str
    time: int
    wall: int
    worker: str = ""
    leased: int = 0
    reason: str = ""
    jobs: list[Job] = field(default_factory=list)
    faded: bool = False


@dataclass(eq=False)
class Nap:
    """Jobs that sleep until a time, or expire by it."""

    until: int
    order: int
    jobs: list[Job]
    expires: bool = False


@dataclass(eq=False)
class Job:
    """All there is to know of a job."""

    id: str
    client: str
    session: str
    spec: j.Spec
    body: bytes
    digest: bytes
    expires: int = 0
    state: str = WAITING
    nap: Nap | None = None
    grant: int = 0
    offset: int = 0
    cancel_reason: str | None = None
    attempt: int = 0
    causes: list[j.Cause] | None = None
    burned: int = 0
    lost: int = 0
    generation: int = 0
    output: bytes | None = None
    note: j.Note | None = None
    group: Group | None = None
    blobs: list[tuple[str, int]] = field(default_factory=list)
    """What the input refers to."""
    output_blobs: list[tuple[str, int]] = field(default_factory=list)

    def held(self) -> list[tuple[str, int]]:
        """Blobs that are kept for its sake."""
        if self.group is not None and self.group.faded:
            return []
        if self.state == j.DONE:
            return self.output_blobs
        return [*self.blobs, *self.spec.blobs]

    @property
    def route(self) -> j.Route:
        """Where it waits: a retry keeps away from the worker that burned the last attempt."""
        route = self.spec.route
        if self.causes and self.causes[-1].burned and not route.pin:
            return msgspec.structs.replace(route, avoid=self.causes[-1].worker)
        return route

    def bytes_kept(self) -> int:
        if self.group is None or self.group.faded:
            return 0
        kept = self.output if self.state == j.DONE else self.body
        assert kept is not None
        return 0 if self.state == j.DONE and len(kept) > IN_MEMORY else len(kept)


Lane = tuple[j.Route, int, str]


@dataclass
class Told:
    """What one entry has to tell."""

    submits: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """Fresh jobs; offsets of repeated ones; offsets of conflicting ones."""
    tallies: list[tuple[list[str], list[str], list[str], list[str]]] = field(default_factory=list)
    """Changed, stopping, settled, unknown."""
    grants: list[tuple[int, str, list[str]]] = field(default_factory=list)
    stops: list[tuple[int, int]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    stale: int = 0
    puts: list[str] = field(default_factory=list)


class NaiveBook:
    """Jobs by id, and nothing clever."""

    def __init__(self, backoff_until: Callable[[str, int], int]) -> None:
        self._backoff_until = backoff_until
        self.jobs: dict[str, Job] = {}
        self.settings = c.Settings()
        self.time = self.wall = 0
        self.lanes: dict[Lane, list[Job]] = {}
        self.born: dict[Lane, int] = {}
        self.rings: dict[tuple[j.Route, int], list[Lane]] = {}
        self.parked: set[str] = set()
        self.naps: list[Nap] = []
        self.watches: list[Nap] = []
        self.grants: dict[int, tuple[str, int, list[Job]]] = {}
        """Every grant there ever was: worker, wall time, jobs by offset."""
        self.kept: list[Group] = []
        self.faded: list[Group] = []
        self.totals = dict.fromkeys(
            ("accepted", "repeated", "leased", "done", "failed", "cancelled", "retried", "stale",
             "faded", "evicted"), 0,
        )  # fmt: skip
        self.caches: dict[str, tuple[str, list[str]]] = {}
        """Id → manifest and targets."""
        self.told = Told()
        self._count = 0

    def number(self) -> int:
        self._count += 1
        return self._count

    def apply(self, entry: c.Entry) -> Told:
        self.told = Told()
        self.time, self.wall = entry.time, entry.wall
        for nap in sorted(self.naps, key=lambda n: (n.until, n.order)):
            if nap.until <= self.time:
                self.naps.remove(nap)
                self.wake(nap)
        for command in entry.commands:
            getattr(self, "do_" + type(command).__name__.lower())(command)
        self.forget_old()
        self.totals["stale"] += self.told.stale
        return self.told

    # -------------------------------------------------------------- waiting

    def wake(self, nap: Nap) -> None:
        for job in nap.jobs:
            if job.nap is nap:
                job.nap = None
                self.put(job)

    def put(self, job: Job, *, front: bool = False) -> None:
        job.state, job.grant, job.nap = WAITING, 0, None
        lane = (job.route, job.spec.priority, job.client)
        if lane not in self.lanes:
            self.lanes[lane], self.born[lane] = [], self.number()
            if job.client not in self.parked:
                self.rings.setdefault(lane[:2], []).append(lane)
        self.lanes[lane].insert(0 if front else len(self.lanes[lane]), job)

    def pull(self, job: Job) -> None:
        """Out of wherever it waits."""
        job.nap = None
        for lane, jobs in list(self.lanes.items()):
            if job in jobs:
                jobs.remove(job)
                self.drop_if_empty(lane)

    def drop_if_empty(self, lane: Lane) -> None:
        if not self.lanes[lane]:
            del self.lanes[lane]
            if lane in self.rings.get(lane[:2], []):
                self.rings[lane[:2]].remove(lane)

    def inflight(self, client: str) -> int:
        return sum(job.client == client and job.state == LEASED for job in self.jobs.values())

    def park_if_at_cap(self, client: str) -> None:
        cap = self.settings.client_inflight_max
        if cap and self.inflight(client) >= cap and client not in self.parked:
            self.parked.add(client)
            for ring in self.rings.values():
                ring[:] = [lane for lane in ring if lane[2] != client]

    def unpark_if_below_cap(self, clients: Iterable[str]) -> None:
        cap = self.settings.client_inflight_max
        for client in dict.fromkeys(clients):
            if client in self.parked and (not cap or self.inflight(client) < cap):
                self.parked.remove(client)
                mine = [lane for lane in self.lanes if lane[2] == client]
                for lane in sorted(mine, key=self.born.__getitem__):
                    self.rings.setdefault(lane[:2], []).append(lane)

    # -------------------------------------------------------------- commands

    def do_submit(self, command: c.Submit) -> None:
        spec = msgspec.msgpack.decode(command.spec, type=j.Spec)
        fresh: list[Job] = []
        repeated, conflicts = [], []
        for n, (job_id, body) in enumerate(zip(command.ids, command.bodies, strict=True)):
            digest = command.digests[8 * n : 8 * n + 8]
            known = self.jobs.get(job_id)
            if known is None:
                self.jobs[job_id] = Job(
                    job_id, command.client, command.session, spec, body, digest,
                    command.expires_at, blobs=command.blobs.get(n, []),
                )  # fmt: skip
                fresh.append(self.jobs[job_id])
            elif known.digest == digest and known.spec == spec:
                repeated.append(n)
            else:
                conflicts.append(n)
        self.told.submits.append((len(fresh), repeated, conflicts))
        self.totals["accepted"] += len(fresh)
        self.totals["repeated"] += len(repeated)
        if fresh and command.expires_at:
            self.watches.append(Nap(command.expires_at, self.number(), fresh, expires=True))
        if command.delay_ns:
            self.nap(fresh, self.time + command.delay_ns, self.naps)
        elif command.not_before > self.wall:
            self.nap(fresh, command.not_before, self.watches)
        else:
            for job in fresh:
                self.put(job)

    def nap(self, jobs: list[Job], until: int, naps: list[Nap]) -> None:
        nap = Nap(until, self.number(), jobs)
        naps.append(nap)
        for job in jobs:
            job.state, job.nap = NAPPING, nap

    def do_assign(self, command: c.Assign) -> None:
        taken = self.take(command.route, command.count)
        if not taken:
            return
        number = len(self.grants) + 1
        self.grants[number] = (command.worker, self.wall, taken)
        for offset, job in enumerate(taken):
            job.grant, job.offset = number, offset
            job.attempt += 1
        self.totals["leased"] += len(taken)
        self.told.grants.append((number, command.worker, [job.id for job in taken]))

    def take(self, route: j.Route, count: int) -> list[Job]:
        """Highest priority first; round and round the clients, in each round an equal share of what
        is left to give (at least one), never past a client's cap."""
        taken: list[Job] = []
        cap = self.settings.client_inflight_max
        for priority in range(9, -10, -1):
            ring = self.rings.get((route, priority), [])
            while ring and count > len(taken):
                equal = max(1, (count - len(taken)) // len(ring))
                for lane in list(ring):
                    if len(taken) == count:
                        break
                    free = cap - self.inflight(lane[2]) if cap else equal
                    share = min(equal, free)
                    given, self.lanes[lane] = self.lanes[lane][:share], self.lanes[lane][share:]
                    for job in given:
                        job.state = LEASED
                    taken += given
                    ring.remove(lane)
                    ring.append(lane)
                    self.drop_if_empty(lane)
                    self.park_if_at_cap(lane[2])
        return taken

    def owned(self, worker: str, grant: int, offset: int) -> Job | None:
        """The job this attempt may speak for, if it may speak for one."""
        holder, _, jobs = self.grants.get(grant, ("", 0, []))
        if holder != worker or not 0 <= offset < len(jobs):
            return None
        job = jobs[offset]
        return job if job.state == LEASED and (job.grant, job.offset) == (grant, offset) else None

    def do_finish(self, command: c.Finish) -> None:
        size = len(self.grants.get(command.grant, ("", 0, []))[2])
        offsets = list(range(size)) if command.offsets is None else command.offsets
        if any(not 0 <= offset < size for offset in offsets):
            self.told.stale += len(command.outputs)
            return
        pairs = list(zip(offsets, command.outputs, strict=False))
        clients = []
        for offset, _ in pairs:
            job = self.owned(command.worker, command.grant, offset)
            if job is not None and job.cancel_reason is not None:
                clients.append(job.client)
                self.end_cancelled(job)
        self.unpark_if_below_cap(clients)
        group = Group(j.DONE, self.time, self.wall, command.worker)
        clients = []
        for offset, output in pairs:
            job = self.owned(command.worker, command.grant, offset)
            if job is not None:
                job.output, job.note = output, command.notes.get(offset)
                job.output_blobs = command.blobs.get(offset, [])
                group.leased = self.grants[command.grant][1]
                clients.append(job.client)
                self.end(job, group)
        self.told.stale += len(command.outputs) - len(group.jobs)
        self.close(group)
        self.unpark_if_below_cap(clients)

    def do_fail(self, command: c.Fail) -> None:
        clients = []
        for n, offset in enumerate(command.offsets):
            job = self.owned(command.worker, command.grant, offset)
            if job is None:
                self.told.stale += 1
                continue
            clients.append(job.client)
            cause = command.causes[n]
            if job.cancel_reason is not None:
                self.end_cancelled(job)
            elif cause == j.CANCEL_CONFIRMED:
                self.give_back(job)
            else:
                note = command.notes.get(offset)
                self.burn(job, command.worker, cause, command.messages[n], note)
        self.unpark_if_below_cap(clients)

    def do_release(self, command: c.Release) -> None:
        if self.grants.get(command.grant, ("", 0, []))[0] != command.worker or not self.open(
            command.grant
        ):
            self.told.stale += len(command.offsets)
            return
        clients = []
        for offset in sorted(set(command.offsets), reverse=True):
            job = self.owned(command.worker, command.grant, offset)
            if job is None:
                self.told.stale += 1
                continue
            clients.append(job.client)
            self.give_back(job)
        self.unpark_if_below_cap(clients)

    def open(self, grant: int) -> bool:
        return any(job.state == LEASED and job.grant == grant for job in self.grants[grant][2])

    def do_forfeit(self, command: c.Forfeit) -> None:
        clients = []
        for number in sorted(self.grants, reverse=True):
            worker, _, jobs = self.grants[number]
            if worker != command.worker:
                continue
            for offset in range(len(jobs) - 1, -1, -1):
                job = self.owned(worker, number, offset)
                if job is None:
                    continue
                clients.append(job.client)
                if job.cancel_reason is not None:
                    self.end_cancelled(job)
                elif (number, offset) in command.started:
                    self.burn(job, worker, j.WORKER_LOST, "the worker fell silent while it ran")
                else:
                    self.note_cause(job, worker, j.WORKER_LOST, "not known to have begun", False)
                    self.give_back(job)
        self.unpark_if_below_cap(clients)

    def give_back(self, job: Job) -> None:
        """The attempt never began: nothing is burned, and it waits at the front again."""
        if job.cancel_reason is not None:
            self.end_cancelled(job)
            return
        self.totals["retried"] += 1
        self.put(job, front=True)
        self.watch_again(job)

    def watch_again(self, job: Job) -> None:
        if job.expires:
            self.watches.append(Nap(job.expires, self.number(), [job], expires=True))

    def note_cause(
        self, job: Job, worker: str, cause: str, message: str, burned: bool,
        note: j.Note | None = None,
    ) -> None:  # fmt: skip
        job.causes = job.causes or []
        job.causes.append(j.Cause(job.attempt, worker, cause, message, self.wall, burned, note))

    def burn(
        self, job: Job, worker: str, cause: str, message: str, note: j.Note | None = None
    ) -> None:
        self.note_cause(job, worker, cause, message, True, note)
        job.burned += 1
        job.lost += cause == j.WORKER_LOST
        settings = self.settings
        retry_on = j.RETRY_ON_DEFAULT if job.spec.retry_on is None else job.spec.retry_on
        leased = self.grants[job.grant][1]
        if job.lost >= settings.lost_workers_max:
            self.end_alone(job, j.FAILED, j.POISON, worker, leased)
        elif cause not in retry_on or job.burned >= (
            job.spec.max_attempts or settings.max_attempts
        ):
            self.end_alone(job, j.FAILED, cause, worker, leased)
        else:
            self.totals["retried"] += 1
            base = min(settings.backoff_first_ns * 2 ** (job.burned - 1), settings.backoff_max_ns)
            until = self._backoff_until(job.id, self.time + base)
            assert base * 8 // 10 <= until - self.time <= base * 12 // 10, job
            job.grant = 0
            self.nap([job], until, self.naps)
            self.watch_again(job)

    def do_cancel(self, command: c.Cancel) -> None:
        tally: tuple[list[str], ...] = ([], [], [], [])
        group = Group(j.CANCELLED, self.time, self.wall, reason=command.reason)
        for job_id in dict.fromkeys(command.ids):
            job = self.jobs.get(job_id)
            if job is None:
                tally[3].append(job_id)
            elif job.state in j.TERMINAL:
                tally[2].append(job_id)
            elif job.state == LEASED:
                tally[1].append(job_id)
                if job.cancel_reason is None:
                    job.cancel_reason = command.reason
                self.told.stops.append((job.grant, job.offset))
            else:
                tally[0].append(job_id)
                self.pull(job)
                self.end(job, group)
        self.told.tallies.append(tally)  # type: ignore[arg-type]
        self.close(group)

    def do_clock(self, command: c.Clock) -> None:
        for nap in sorted(self.watches, key=lambda n: (n.until, n.order)):
            if nap.until > command.wall:
                continue
            self.watches.remove(nap)
            if not nap.expires:
                self.wake(nap)
                continue
            group = Group(j.CANCELLED, self.time, self.wall, reason=j.EXPIRED)
            for job in nap.jobs:
                waits = job.state in (WAITING, NAPPING) and self.jobs.get(job.id) is job
                if waits and job.expires == nap.until:
                    self.pull(job)
                    self.end(job, group)
            self.close(group)

    def do_replay(self, command: c.Replay) -> None:
        tally: tuple[list[str], ...] = ([], [], [], [])
        for job_id in command.ids:
            job = self.ended_without_result(job_id, tally)
            if job is None:
                continue
            assert job.group is not None
            if job.group.faded:
                tally[2].append(job_id)
                continue
            job.group.jobs.remove(job)
            job.group, job.expires = None, 0
            job.generation += 1
            job.burned = job.lost = 0
            self.put(job)
            tally[0].append(job_id)
        self.told.tallies.append(tally)  # type: ignore[arg-type]

    def do_purge(self, command: c.Purge) -> None:
        tally: tuple[list[str], ...] = ([], [], [], [])
        for job_id in command.ids:
            job = self.ended_without_result(job_id, tally)
            if job is None:
                continue
            assert job.group is not None
            if job.group in self.told.groups:
                tally[2].append(job_id)  # nobody has been told of its end yet
            else:
                job.group.jobs.remove(job)
                del self.jobs[job_id]
                tally[0].append(job_id)
        self.told.tallies.append(tally)  # type: ignore[arg-type]

    def ended_without_result(self, job_id: str, tally: tuple[list[str], ...]) -> Job | None:
        job = self.jobs.get(job_id)
        if job is None:
            tally[3].append(job_id)
            return None
        if job.state not in (j.FAILED, j.CANCELLED):
            tally[2].append(job_id)
            return None
        return job

    def do_configure(self, command: c.Configure) -> None:
        self.settings = command.settings
        clients = sorted({job.client for job in self.jobs.values()})
        for client in clients:
            self.park_if_at_cap(client)
        self.unpark_if_below_cap(clients)

    def do_putcache(self, command: c.PutCache) -> None:
        use = command.cache
        known, targets = self.caches.get(use.id, (use.manifest, []))
        if known != use.manifest:
            self.told.puts.append("conflict")
        elif use.id not in self.caches:
            self.told.puts.append("new")
            self.caches[use.id] = (use.manifest, [command.target])
        elif command.target in targets:
            self.told.puts.append("same")
        else:
            self.told.puts.append("widened")
            targets.append(command.target)

    def do_removecache(self, command: c.RemoveCache) -> None:
        removed, in_use, unknown = [], [], []
        for cache_id in dict.fromkeys(command.ids):
            if cache_id not in self.caches:
                unknown.append(cache_id)
            elif self.users(cache_id):
                in_use.append(cache_id)
            else:
                del self.caches[cache_id]
                removed.append(cache_id)
        self.told.tallies.append((removed, [], in_use, unknown))

    def users(self, cache_id: str) -> int:
        return sum(
            job.group is None and any(use.id == cache_id for use in job.spec.caches)
            for job in self.jobs.values()
        )

    def do_tick(self, _: c.Tick) -> None:
        pass

    # -------------------------------------------------------------- ends

    def end(self, job: Job, group: Group) -> None:
        assert job.state not in j.TERMINAL, "settled twice"
        job.state, job.group, job.grant, job.cancel_reason = group.state, group, 0, None
        group.jobs.append(job)
        self.totals[group.state] += 1

    def end_alone(self, job: Job, state: str, reason: str, worker: str, leased: int) -> None:
        group = Group(state, self.time, self.wall, worker, leased, reason)
        self.end(job, group)
        self.close(group)

    def end_cancelled(self, job: Job) -> None:
        assert job.cancel_reason is not None
        worker, leased, _ = self.grants[job.grant]
        self.end_alone(job, j.CANCELLED, job.cancel_reason, worker, leased)

    def close(self, group: Group) -> None:
        if group.jobs:
            self.kept.append(group)
            self.told.groups.append(group)

    def forget_old(self) -> None:
        """Oldest first, never fewer kept than promised; of the present moment, nothing."""
        settings = self.settings
        oldest = self.time - settings.retention_ns
        while self.kept and self.kept[0].time != self.time:
            head = self.kept[0]
            jobs = sum(len(group.jobs) for group in self.kept) - len(head.jobs)
            size = sum(job.bytes_kept() for group in self.kept[1:] for job in group.jobs)
            early = head.time > oldest
            if early and jobs < settings.results_max and size < settings.result_bytes_max:
                break
            self.kept.pop(0)
            self.faded.append(head)
            head.faded = True
            self.totals["faded"] += len(head.jobs) * early
            for job in head.jobs:
                job.output = job.note = job.causes = None
        while self.faded:
            head = self.faded[0]
            ids = sum(len(group.jobs) for group in self.kept + self.faded) - len(head.jobs)
            early = head.time > oldest
            if early and ids < settings.ids_max:
                break
            self.faded.pop(0)
            self.totals["evicted"] += len(head.jobs) * early
            for job in head.jobs:
                del self.jobs[job.id]
