"""What users do to a simulated grid, wrong things included.

Clients submit batches of their own jobs; now and then somebody submits a job again under the same
id (which must change nothing), uses a taken id for something else (which must be refused), cancels,
replays dead letters, attaches to a stranger's job, asks questions, drains a worker and resumes it.
"""

from __future__ import annotations

from collections.abc import Callable

from ekiden.limits import NS
from ekiden.simulation.cluster import Grid
from ekiden.simulation.plans import JobPlan, make_jobs
from ekiden.simulation.world import MS

_READS = ("stats", "jobs", "workers")


class Workload:
    """Schedules what users do until a moment."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.drained: list[str] = []
        self._dice = grid.universe.chance("workload")
        self._jobs: list[JobPlan] = []

    def begin(self, until: int) -> None:
        """Lay out all submits and mistakes of this seed."""
        dice = self._dice
        left = dice.choice((20, 40, 60, 100, 150))
        while left > 0:
            count = min(left, dice.choice((1, 1, 2, 5, 20)))
            left -= count
            client = dice.choice(self.grid.clients)
            at = dice.randrange(until)
            wall = self.grid.universe.wall + at
            plans = make_jobs(dice, client.name, len(self._jobs), count, wall)
            self._jobs += plans
            for plan in plans:
                self.grid.plans[plan.id] = plan
            self.grid.universe.after(
                at, f"submit {client.name}", self._submitter(client.name, plans)
            )
        for action in (
            self._resubmit, self._resubmit_elsewhere, self._conflict, self._cancel,
            self._cancel_run, self._replay, self._purge, self._attach, self._ask, self._drain,
            self._listen,
        ):  # fmt: skip
            for _ in range(dice.choice((0, 0, 1, 3, 6))):
                self.grid.universe.after(dice.randrange(until), action.__name__, action)

    def settle(self) -> None:
        """After the heal: no more mistakes, and every worker takes work."""
        for worker in self.drained:
            self.grid.clients[0].ask("resume", worker=worker)

    def _submitter(self, client: str, plans: list[JobPlan]) -> Callable[[], None]:
        return lambda: self.grid.client(client).submit(plans)

    # -------------------------------------------------------------- repeats and mistakes

    def _known(self) -> JobPlan | None:
        """Some job that somebody has ordered already."""
        ordered = [job for client in self.grid.clients for job in client.ordered]
        return self.grid.plans[self._dice.choice(ordered)] if ordered else None

    def _resubmit(self) -> None:
        if (plan := self._known()) is not None:
            self.grid.client(plan.client).submit([plan])

    def _resubmit_elsewhere(self) -> None:
        if (plan := self._known()) is not None:
            self._dice.choice(self.grid.clients).submit([plan])

    def _conflict(self) -> None:
        if (plan := self._known()) is not None:
            self._dice.choice(self.grid.clients).submit_other(plan, b"something else")

    def _cancel(self) -> None:
        plans = [plan for _ in range(self._dice.randint(1, 4)) if (plan := self._known())]
        if plans:
            ids = list(dict.fromkeys(plan.id for plan in plans))
            self.grid.checkers.wants_cancel(ids)
            self._dice.choice(self.grid.clients).ask("cancel", ids=ids)

    def _cancel_run(self) -> None:
        if self._dice.random() < 0.3:
            self.grid.checkers.wants_cancel(
                [plan.id for plan in self._jobs if plan.spec.run == "night"]
            )
            self._dice.choice(self.grid.clients).ask("cancel", filter={"run": "night"})

    def _replay(self) -> None:
        self._dice.choice(self.grid.clients).ask("replay", filter={"state": "failed"})

    def _purge(self) -> None:
        self._dice.choice(self.grid.clients).ask("purge", filter={"state": "failed"})

    def _listen(self) -> None:
        self._dice.choice(self.grid.clients).subscribe("news.>")
        self._dice.choice(self.grid.clients).publish("news.weather")

    def _attach(self) -> None:
        if (plan := self._known()) is not None:
            self._dice.choice(self.grid.clients).attach(plan.id)

    def _ask(self) -> None:
        client = self._dice.choice(self.grid.clients)
        plan = self._known()
        if plan is not None and self._dice.random() < 0.5:
            client.ask("job", id=plan.id)
        else:
            client.ask(self._dice.choice(_READS))

    def _drain(self) -> None:
        worker = self._dice.choice(self.grid.workers).name
        self.drained.append(worker)
        self._dice.choice(self.grid.clients).ask("drain", worker=worker)
        self.grid.universe.after(
            self._dice.choice((500, 5000)) * MS + NS,
            "resume worker",
            lambda: self._dice.choice(self.grid.clients).ask("resume", worker=worker),
        )
