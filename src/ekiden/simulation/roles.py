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
    LinkDown,
    LinkUp,
    Order,
    ProgressMade,
    RefusedByAll,
    Submitting,
    SubscribeRefused,
)
from ekiden.client.machine import ClientMachine
from ekiden.errors import EkidenError
from ekiden.simulation.network import Network
from ekiden.simulation.plans import JobPlan
from ekiden.simulation.processes import ADDRESS, KEY, Process
from ekiden.simulation.world import MS, Event, Universe, Violation
from ekiden.wire.messages import Ended, Failure
from ekiden.worker.machine import Abort, Dropped, Exit, Run, RunFinished, Started, WorkerMachine

# The real executors announce a run that is still going after about this long.
STARTED_AFTER_NS = 20 * MS


class Watcher(Protocol):
    """Who wants to know what workers and clients see."""

    def ran(self, worker: str, job: str, attempt: int, output: bytes) -> None:
        """A run of the job ended well with this output, whether or not anybody will hear of it."""

    def began(self, worker: str, job: str, attempt: int) -> None:
        """A run began."""

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
    """A worker whose executor is played from the plans of the jobs."""

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
        slowness: int = 1,
        make: Callable[..., WorkerMachine] = WorkerMachine,
    ) -> None:
        super().__init__(universe, network, name)
        self.slots = slots
        self.slowness = slowness
        self.on_death: Callable[[SimWorker], None] | None = None
        self._plans = plans
        self._watcher = watcher
        self._patterns = patterns
        self._labels = labels
        self._make = make
        self._queue: deque[_Attempt] = deque()
        self._running: dict[tuple[int, int], _Attempt] = {}
        self._runs = 0
        self.handlers[Run] = self._run
        self.handlers[Abort] = self._abort
        self.handlers[Exit] = self._exit

    def start(self) -> None:
        """A new life."""
        self.new_life()
        self._queue.clear()
        self._running.clear()
        session = f"{self.name}.{self.incarnation}"
        self.begin(
            self._make(
                [ADDRESS],
                self.name,
                session,
                lambda _address: KEY,
                self._dice.random,
                patterns=self._patterns,
                slots=self.slots,
                labels=self._labels,
                cpu_milli=4000,
                mem_mb=1000,
                host=self.name,
                prefetch=2 * self.slots,
            )
        )

    # -------------------------------------------------------------- the executor

    def _run(self, effect: Run) -> None:
        run = effect.run
        for at, job in enumerate(run.ids):
            plan = self._plans.get(job)
            if plan is None or plan.body != run.bodies[at]:
                raise Violation("I1", f"{self.name} was given {job} with a body nobody submitted")
            attempt = run.attempts[at] if run.attempts else 1
            self._queue.append(_Attempt(run.grant, run.first + at, job, attempt))
        self._fill()

    def _fill(self) -> None:
        while self._queue and len(self._running) < self.slots:
            attempt = self._queue.popleft()
            if (attempt.grant, attempt.offset) in self._running:
                raise Violation("I2", f"{self.name} runs {attempt.job} twice at once in one lease")
            self._running[attempt.grant, attempt.offset] = attempt
            self._begin_run(attempt)

    def _begin_run(self, attempt: _Attempt) -> None:
        attempt.began = self.clock()
        self._runs += 1
        self._watcher.began(self.name, attempt.job, attempt.attempt)
        behaviour = self._plans[attempt.job].behaviour(attempt.attempt)
        duration = behaviour.duration_ns * self.slowness
        life = self.incarnation
        if duration > STARTED_AFTER_NS:
            news = Started([(attempt.grant, attempt.offset, attempt.began)])
            attempt.events.append(self.later(STARTED_AFTER_NS, "started", news))
        output = b"%s/%d by %s run %d" % (
            attempt.job.encode(), attempt.attempt, self.name.encode(), life * 10_000 + self._runs,
        )  # fmt: skip

        def finish() -> None:
            if self.incarnation != life:
                return
            if self.paused:
                # The whole process stands still, its handlers too.
                attempt.events.append(self.universe.after(100 * MS, f"ran {self.name}", finish))
                return
            if behaviour.kills:
                self.universe.count("worker killed by its job")
                self.kill()
                if self.on_death is not None:
                    self.on_death(self)
                return
            self._running.pop((attempt.grant, attempt.offset), None)
            ran_ns = self.clock() - attempt.began
            if behaviour.cause:
                failure = Failure(attempt.offset, behaviour.cause, "as planned")
                self.post(RunFinished(attempt.grant, [], [], {}, [failure], ran_ns))
            else:
                self._watcher.ran(self.name, attempt.job, attempt.attempt, output)
                self.post(RunFinished(attempt.grant, [attempt.offset], [output], ran_ns=ran_ns))
            self._fill()

        attempt.events.append(self.universe.after(duration, f"ran {self.name}", finish))

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
        self._fill()

    def _exit(self, effect: Exit) -> None:
        raise Violation("bug", f"{self.name} gives up: {effect.reason}")


class SimClient(Process):
    """A client and the program that uses it: it remembers its jobs across its own deaths."""

    def __init__(
        self,
        universe: Universe,
        network: Network,
        name: str,
        *,
        watcher: Watcher,
        make: Callable[..., ClientMachine] = ClientMachine,
    ) -> None:
        super().__init__(universe, network, name)
        self._watcher = watcher
        self._make = make
        self.ordered: dict[str, JobPlan] = {}
        """Jobs this program wants done, whatever happens to it."""
        self.settled: dict[str, str] = {}
        """Job → how it ended, as this program was told."""
        self.asked: dict[int, tuple[str, Any]] = {}
        self.answers = 0
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
        session = f"{self.name}.{self.incarnation}"
        self.begin(
            self._make([ADDRESS], self.name, session, lambda _address: KEY, self._dice.random)
        )
        open_jobs = [plan for job, plan in self.ordered.items() if job not in self.settled]
        if open_jobs:
            self.post(Submitting([_order(plan) for plan in open_jobs]))

    # -------------------------------------------------------------- the program's wishes

    def submit(self, plans: list[JobPlan]) -> None:
        """Order these. A program that is down orders them when it is back."""
        for plan in plans:
            self.ordered[plan.id] = plan
        self.post(Submitting([_order(plan) for plan in plans]))

    def submit_other(self, plan: JobPlan, body: bytes) -> None:
        """Use an id that is taken for something else: a mistake."""
        self.post(Submitting([Order(plan.id, body, plan.terms)]))

    def attach(self, job: str) -> None:
        """Ask for the outcome of somebody's job."""
        self.post(Attaching([Order(job)]))

    def ask(self, verb: str, **params: Any) -> None:
        """A question or a change by a person."""
        self.post(Asking((self.name, verb, params), verb, params))

    # -------------------------------------------------------------- what it is told

    def _accepted(self, effect: JobsAccepted) -> None:
        for handle in effect.handles:
            self._watcher.heard(self.name, handle.job_id, "accepted", handle)

    def _done(self, effect: JobsDone) -> None:
        run = effect.run
        for at, job in enumerate(run.ids):
            if effect.handles[at] is not None:
                self.settled[job] = "done"
            self._watcher.heard(self.name, job, "done", (run.outputs[at], run.attempts.get(at, 1)))

    def _ended(self, effect: JobsEnded) -> None:
        for _, ended in effect.pairs:
            self.settled[ended.id] = ended.state
            self._tell_end(ended)

    def _tell_end(self, ended: Ended) -> None:
        self._watcher.heard(self.name, ended.id, "ended", ended)

    def _refused(self, effect: JobsRefused) -> None:
        for handle, error in effect.pairs:
            self._watcher.heard(self.name, handle.job_id, "refused", (handle, error))

    def _answered(self, effect: Answered) -> None:
        self.answers += 1
        self._watcher.heard(self.name, "", "answered", (effect.handle, effect.body))

    def _ask_refused(self, effect: AskRefused) -> None:
        self._watcher.heard(self.name, "", "ask refused", (effect.handle, effect.error))

    def _refused_by_all(self, effect: RefusedByAll) -> None:
        error: EkidenError = effect.error
        raise Violation("bug", f"{self.name} is refused for good: {error}")

    def _ignore(self, effect: object) -> None:
        pass


def _order(plan: JobPlan) -> Order:
    return Order(plan.id, plan.body, plan.terms)
