"""Workers and clients of a simulated grid: the real machines, with what surrounds them played."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ekiden.client.contract import (
    Answered,
    Asking,
    AskRefused,
    Attaching,
    Deliveries,
    JobsAccepted,
    JobsDone,
    JobsEnded,
    JobsRefused,
    Leaving,
    LinkDown,
    LinkUp,
    Order,
    ProgressMade,
    Publishing,
    RefusedByAll,
    Submitting,
    SubscribeRefused,
    Subscribing,
)
from ekiden.client.machine import ClientMachine
from ekiden.errors import Closed, Refusal
from ekiden.machine import Send
from ekiden.simulation.network import Network, body_of, frames_of
from ekiden.simulation.plans import JobPlan
from ekiden.simulation.processes import ADDRESS, KEY, Process
from ekiden.simulation.world import MS, Event, Universe, Violation
from ekiden.wire import messages
from ekiden.wire.frames import encode_frame
from ekiden.wire.messages import Ack, AckRun, Failure
from ekiden.worker.machine import (
    STALE,
    Abort,
    CacheSaid,
    CachesOffered,
    Drain,
    Dropped,
    Exit,
    Gone,
    Run,
    RunFinished,
    Started,
    WorkerMachine,
)
from ekiden.worker.machine import ProgressMade as RunProgressed

# The real executors announce a run that is still going after about this long.
STARTED_AFTER_NS = 20 * MS

# How long a program waits after a refusal that said "later".
RETRY_NS = 2000 * MS

_BEAT = messages.TYPE_OF[messages.Beat]


class Watcher(Protocol):
    """Who wants to know what workers and clients see."""

    def given(self, worker: str, job: str, body: bytes) -> None:
        """A worker was handed a job to run."""

    def began(self, worker: str, job: str, attempt: int) -> None:
        """A run began."""

    def ran(self, worker: str, job: str, attempt: int, output: bytes) -> None:
        """A run of the job ended well with this output, whether or not anybody will hear of it."""

    def heard(self, client: str, job: str, what: str, detail: Any) -> None:
        """A client was told something about a job."""


class _Attempt:
    """A run in the executor."""

    __slots__ = ("attempt", "began", "events", "grant", "job", "offset")

    def __init__(self, grant: int, offset: int, job: str, attempt: int) -> None:
        self.grant = grant
        self.offset = offset
        self.job = job
        self.attempt = attempt
        self.began = -1
        self.events: list[Event] = []


class SimWorker(Process):
    """A worker whose executor is played from the plans of the jobs.

    A `careless` one has a fault of its own: after it has reported the failure of a run it may send
    a result of the same attempt as well, past its machine.
    """

    def __init__(
        self,
        universe: Universe,
        network: Network,
        name: str,
        *,
        plans: dict[str, JobPlan],
        watcher: Watcher,
        slots: int,
        patterns: list[str],
        labels: dict[str, str],
        prefetch: int | None,
        slowness: int = 1,
        careless: bool = False,
    ) -> None:
        super().__init__(universe, network, name)
        self.slots = slots
        self.slowness = slowness
        self.careless = careless
        self.on_end: Callable[[SimWorker], None] = lambda worker: None
        """Called when it is dead by its own doing: killed by a job, or drained."""
        self._plans = plans
        self._watcher = watcher
        self._patterns = patterns
        self._labels = labels
        self._prefetch = prefetch
        self._queue: deque[_Attempt] = deque()
        self._running: dict[tuple[int, int], _Attempt] = {}
        self._begun: set[tuple[int, int]] = set()
        """Attempts that this life has run or runs."""
        self._announced: set[tuple[int, int]] = set()
        """Attempts that this life has told a broker it runs, whether or not it was heard."""
        self._done: dict[int, list[tuple[int, bytes, int]]] = {}
        """By grant: what has finished and was not told yet."""
        self._runs = 0
        self.handlers[Run] = self._run
        self.handlers[Abort] = self._abort
        self.handlers[CachesOffered] = self._offered
        self.handlers[Exit] = self._exit

    def start(self) -> None:
        """A new life."""
        self.new_life()
        self._queue.clear()
        self._running.clear()
        self._begun.clear()
        self._announced.clear()
        self._done.clear()
        self.begin(
            WorkerMachine(
                [ADDRESS],
                self.name,
                f"{self.name}.{self.incarnation}",
                lambda _address: KEY,
                self._dice.random,
                patterns=self._patterns,
                slots=self.slots,
                labels=self._labels,
                cpu_milli=4000,
                mem_mb=1000,
                host=self.name,
                prefetch=self._prefetch,
            )
        )

    @property
    def worker(self) -> WorkerMachine | None:
        """The machine, typed; None while the process is down."""
        assert self.machine is None or isinstance(self.machine, WorkerMachine)
        return self.machine

    def drain(self) -> None:
        """Tell it to finish what it has begun and leave."""
        self.post(Drain("restarted by a person"))

    def _send(self, effect: Send) -> None:
        for kind, _, raw in frames_of(effect.data):
            if kind == _BEAT:
                beat: Any = messages.decode(kind, body_of(raw))
                self._announced.update((grant, offset) for grant, offset, _ in beat.running)
        super()._send(effect)

    # -------------------------------------------------------------- the executor

    def _run(self, effect: Run) -> None:
        run = effect.run
        for at, job in enumerate(run.ids):
            self._watcher.given(self.name, job, run.bodies[at])
            attempt = run.attempts[at] if run.attempts else 1
            self._queue.append(_Attempt(run.grant, run.first + at, job, attempt))
        self._fill()

    def _fill(self) -> None:
        while self._queue and len(self._running) < self.slots:
            attempt = self._queue.popleft()
            lease = (attempt.grant, attempt.offset)
            if lease in self._begun:
                raise Violation("I2", f"{self.name} runs {attempt.job} twice in one lease")
            if attempt.attempt > 1 and lease not in self._announced:
                raise Violation("I9", f"{self.name} begins {attempt.job} again without a word")
            self._begun.add(lease)
            self._running[lease] = attempt
            self._begin_run(attempt)

    def _begin_run(self, attempt: _Attempt) -> None:
        attempt.began = self.clock()
        self._runs += 1
        self._watcher.began(self.name, attempt.job, attempt.attempt)
        duration = self._plans[attempt.job].behaviour(attempt.attempt).duration_ns * self.slowness
        if duration > STARTED_AFTER_NS:
            news = Started([(attempt.grant, attempt.offset, attempt.began)])
            attempt.events.append(self.later(STARTED_AFTER_NS, "started", news))
            progress = RunProgressed(attempt.grant, attempt.offset, b"half")
            attempt.events.append(self.later(duration // 2, "progress", progress))
        self._finish_after(duration, attempt, self._runs)

    def _finish_after(self, delay_ns: int, attempt: _Attempt, number: int) -> None:
        life = self.incarnation

        def finish() -> None:
            if self.incarnation != life:
                return
            if self.paused:
                # The whole process stands still, its handlers too.
                self._finish_after(100 * MS, attempt, number)
            else:
                self._finish(attempt, number)

        attempt.events.append(self.universe.after(delay_ns, f"ran {self.name}", finish))

    def _finish(self, attempt: _Attempt, number: int) -> None:
        behaviour = self._plans[attempt.job].behaviour(attempt.attempt)
        if behaviour.kills:
            self.universe.count("worker killed by its job")
            self.kill()
            self.on_end(self)
            return
        self._running.pop((attempt.grant, attempt.offset), None)
        ran_ns = self.clock() - attempt.began
        if behaviour.cause:
            failure = Failure(attempt.offset, behaviour.cause, "as planned")
            self.post(RunFinished(attempt.grant, [], [], {}, [failure], ran_ns))
            if self.careless:
                self._finish_late(attempt, number)
        else:
            output = self._output(attempt, number)
            self._done.setdefault(attempt.grant, []).append((attempt.offset, output, ran_ns))
            self._tell_soon(attempt.grant)
        self._fill()

    def _tell_soon(self, grant: int) -> None:
        """What ends within a moment is told together, and the last to end first."""
        life = self.incarnation

        def tell() -> None:
            if self.incarnation != life or grant not in self._done:
                return
            if self.paused:
                self.universe.after(100 * MS, f"tells {self.name}", tell)
                return
            offsets, outputs, ran = zip(*reversed(self._done.pop(grant)), strict=True)
            self.post(RunFinished(grant, list(offsets), list(outputs), ran_ns=sum(ran)))

        self.universe.after(MS, f"tells {self.name}", tell)

    def _output(self, attempt: _Attempt, number: int) -> bytes:
        """Unique to this run, and large for some jobs."""
        said = f"{attempt.job}/{attempt.attempt} by {self.name} run {self.incarnation}.{number} "
        output = said.encode().ljust(self._plans[attempt.job].output_bytes, b".")
        self._watcher.ran(self.name, attempt.job, attempt.attempt, output)
        return output

    def _finish_late(self, attempt: _Attempt, number: int) -> None:
        """The run was given up, but nobody told the run."""
        life = self.incarnation
        output = self._output(attempt, number)

        def send() -> None:
            conn = self.network.latest(self)
            if self.incarnation != life or self.paused or conn is None:
                return
            if self.worker is not None and self.worker.connected:
                self.universe.count("late result of a failed run")
                ack = Ack([AckRun(attempt.grant, [attempt.offset], [output])])
                self.network.send(self, conn, encode_frame(ack))

        for delay in (50 * MS, 900 * MS, 1400 * MS, 2500 * MS):
            self.universe.after(delay, f"late {self.name}", send)

    def _abort(self, effect: Abort) -> None:
        asked = set(effect.offsets)
        unbegun = [a for a in self._queue if a.grant == effect.grant and a.offset in asked]
        for attempt in unbegun:
            self._queue.remove(attempt)
        if effect.why == "recall":
            dropped = Dropped(effect.grant, [attempt.offset for attempt in unbegun])
            if dropped.offsets:
                self.later(MS // 10, "dropped", dropped)
            return
        for offset in effect.offsets:
            attempt_running = self._running.pop((effect.grant, offset), None)
            if attempt_running is not None:
                for event in attempt_running.events:
                    event.call_off()
        if effect.why != STALE:
            # Processes take their time to end.
            self.later(3 * MS, "gone", Gone(effect.grant, effect.offsets))
        self._fill()

    def _offered(self, effect: CachesOffered) -> None:
        for use in effect.caches:
            self.later(3 * MS, "cache", CacheSaid(use.id, use.manifest, "ok"))

    def _exit(self, effect: Exit) -> None:
        if effect.error is not None:
            raise Violation("I9", f"{self.name} gives up: {effect.error}")
        self.universe.count("worker drained")
        self.kill()
        self.on_end(self)


class SimClient(Process):
    """A client and the program that uses it: it remembers its jobs across its own deaths."""

    def __init__(
        self, universe: Universe, network: Network, name: str, *, watcher: Watcher
    ) -> None:
        super().__init__(universe, network, name)
        self._watcher = watcher
        self.ordered: dict[str, JobPlan] = {}
        """Jobs this program wants done, whatever happens to it."""
        self.settled: dict[str, str] = {}
        """Job → how it ended, as this program was told."""
        self._futures: dict[int, Order] = {}
        """Handles of this life that wait for their outcome, by identity."""
        self.questions = 0
        """Questions of this life without an answer."""
        news: dict[type, Callable[[Any], None]] = {
            JobsAccepted: self._accepted,
            JobsDone: self._done,
            JobsEnded: self._ended,
            JobsRefused: self._refused,
            Answered: self._answered,
            AskRefused: self._ask_refused,
            RefusedByAll: self._refused_by_all,
            LinkUp: self._ignore,
            LinkDown: self._ignore,
            Deliveries: self._ignore,
            ProgressMade: self._ignore,
            SubscribeRefused: self._ignore,
        }
        self.handlers.update(news)

    def start(self) -> None:
        """A new life: submit again what is not known to be settled, under the same ids."""
        self.new_life()
        self._futures.clear()
        self.questions = 0
        session = f"{self.name}.{self.incarnation}"
        self.begin(
            ClientMachine([ADDRESS], self.name, session, lambda _address: KEY, self._dice.random)
        )
        self._submit([p for job, p in self.ordered.items() if job not in self.settled])

    @property
    def client(self) -> ClientMachine | None:
        """The machine, typed; None while the process is down."""
        assert self.machine is None or isinstance(self.machine, ClientMachine)
        return self.machine

    def waits_for(self) -> list[str]:
        """What this program does not know the end of."""
        jobs = [job for job in self.ordered if job not in self.settled]
        jobs += [order.job_id for order in self._futures.values()]
        return [f"{self.name} waits for {job}" for job in dict.fromkeys(jobs)]

    # -------------------------------------------------------------- the program's wishes

    def submit(self, plans: list[JobPlan]) -> None:
        """Order these. A program that is down orders them when it is back."""
        for plan in plans:
            self.ordered[plan.id] = plan
        self._submit(plans)

    def submit_other(self, plan: JobPlan, body: bytes) -> None:
        """Use an id that is taken for something else: a mistake."""
        self._open(Submitting, [Order(plan.id, body, plan.terms)])

    def attach(self, job: str) -> None:
        """Ask for the outcome of somebody's job."""
        self._open(Attaching, [Order(job)])

    def subscribe(self, pattern: str) -> None:
        """Listen in."""
        self.post(Subscribing(1, pattern))

    def publish(self, subject: str) -> None:
        """Tell whoever listens."""
        self.post(Publishing(subject, b"news"))

    def close(self) -> None:
        """Leave in good order: every future of this life ends, and so does the process."""
        self.post(Leaving())
        self.turn()
        if self._futures or self.questions:
            raise Violation("I6", f"{self.name} closed and left {self.waits_for()} open")
        self.kill()

    def ask(self, verb: str, **params: Any) -> None:
        """A question or a change by a person."""
        if self.alive:
            self.questions += 1
            self.post(Asking(verb, verb, params))

    def _submit(self, plans: list[JobPlan]) -> None:
        self._open(Submitting, [Order(plan.id, plan.body, plan.terms) for plan in plans])

    def _open(self, event: type[Submitting | Attaching], orders: list[Order]) -> None:
        if self.alive and orders:
            for order in orders:
                self._futures[id(order)] = order
            self.post(event(orders))

    # -------------------------------------------------------------- what it is told

    def _resolve(self, order: Order, how: str) -> None:
        """A future gets its outcome; empty if that says nothing of the job."""
        if self._futures.pop(id(order), None) is None:
            raise Violation("I6", f"{self.name}: a future of {order.job_id} is resolved twice")
        plan = self.ordered.get(order.job_id)
        if how and plan is not None and order.terms is not None and order.body == plan.body:
            self.settled[order.job_id] = how

    def _accepted(self, effect: JobsAccepted) -> None:
        for handle in effect.handles:
            self._watcher.heard(self.name, handle.job_id, "accepted", None)

    def _done(self, effect: JobsDone) -> None:
        run = effect.run
        for at, job in enumerate(run.ids):
            if effect.handles[at] is not None:
                self._watcher.heard(self.name, job, "done", run.outputs[at])
                self._resolve(effect.handles[at], "done")

    def _ended(self, effect: JobsEnded) -> None:
        for handle, ended in effect.pairs:
            self._watcher.heard(self.name, ended.id, "ended", ended)
            self._resolve(handle, ended.state)

    def _refused(self, effect: JobsRefused) -> None:
        for handle, error in effect.pairs:
            if isinstance(error, Closed):
                self._resolve(handle, "")
                continue
            self._watcher.heard(self.name, handle.job_id, "refused", (handle, error))
            if isinstance(error, Refusal) and error.retry_after_s > 0:
                self._resolve(handle, "")
                self.universe.count("refused for want of room")
                self._submit_later(handle.job_id)
            else:
                self._resolve(handle, error.code)

    def _submit_later(self, job: str) -> None:
        life, plan = self.incarnation, self.ordered.get(job)

        def submit() -> None:
            if plan is not None and self.incarnation == life and job not in self.settled:
                self._submit([plan])

        self.universe.after(RETRY_NS, f"again {self.name}", submit)

    def _answered(self, effect: Answered) -> None:
        self.questions -= 1

    def _ask_refused(self, effect: AskRefused) -> None:
        self.questions -= 1
        if not isinstance(effect.error, Closed):
            self._watcher.heard(self.name, "", "ask refused", (effect.handle, effect.error))

    def _refused_by_all(self, effect: RefusedByAll) -> None:
        raise Violation("I9", f"{self.name} is refused for good: {effect.error}")

    def _ignore(self, effect: object) -> None:
        pass
