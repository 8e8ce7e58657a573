"""A whole grid in a seeded universe: one broker with its disk, workers, clients, and their troubles.

`simulate` runs one seed in two phases. In the first, users use the grid and misuse it while faults
strike; only promises of safety are checked. Then everything heals, and every accepted job must end
within a bound. The checkers watch from outside: frames, the disk, and what clients are told.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from ekiden.limits import NS
from ekiden.simulation.broker import SimBroker
from ekiden.simulation.checkers import Checkers
from ekiden.simulation.disk import SimDisk
from ekiden.simulation.faults import Faults
from ekiden.simulation.network import Network
from ekiden.simulation.plans import JobPlan
from ekiden.simulation.processes import Process
from ekiden.simulation.roles import SimClient, SimWorker
from ekiden.simulation.workload import Workload
from ekiden.simulation.world import MS, Universe, Violation

# Jobs that lose a worker wait for the lease, those that fail for their backoff; this much comes on
# top for queueing, reconnecting and the runs themselves.
LIVENESS_NS = 60 * NS

# How long after the last job has ended everything must have come to rest.
REST_NS = 8 * NS

CHECK_EVERY_EVENTS = 400


class Outcome(Struct):
    """What became of one seed. `violation` is empty if every promise held."""

    seed: int
    trace: str
    violation: str = ""
    virtual_ns: int = 0
    events: int = 0
    counts: dict[str, int] = {}
    story: list[str] = []


class Grid:
    """One world. `parts` replaces classes of it: that is how mutants are planted."""

    def __init__(self, seed: int, *, keep_trace: bool = False, **parts: Any) -> None:
        self.universe = universe = Universe(seed, keep_trace=keep_trace)
        self.plans: dict[str, JobPlan] = {}
        self.disk = SimDisk(universe.chance("disk"))
        self.disk_slowness_ns = 0
        self.network = Network(universe)
        dice = universe.chance("grid")
        self.checkers = Checkers(self)
        make_broker: Callable[[Grid], SimBroker] = parts.get("broker", SimBroker)
        self.broker = make_broker(self)
        self.workers = [
            SimWorker(
                universe,
                self.network,
                f"w{number}",
                plans=self.plans,
                watcher=self.checkers,
                slots=dice.choice((1, 2, 4)),
                # The first can do everything, so that no job waits for ever.
                patterns=[">"]
                if number == 0
                else dice.choice(([">"], ["render.*"], ["price.>", "mail"])),
                labels={"gpu": "yes"} if number == 0 or dice.random() < 0.3 else {},
                slowness=dice.choice((1, 1, 1, 5)),
                **parts.get("worker", {}),
            )
            for number in range(dice.choice((1, 2, 3, 4)))
        ]
        self.clients = [
            SimClient(universe, self.network, f"c{number}", watcher=self.checkers)
            for number in range(dice.choice((1, 2, 3)))
        ]
        for worker in self.workers:
            worker.on_death = lambda dead: self.restart(dead, 500 * MS)
        self.faults = Faults(self)
        self.workload = Workload(self)
        self._dice = dice

    def client(self, name: str) -> SimClient:
        """The client of that name."""
        return next(client for client in self.clients if client.name == name)

    # -------------------------------------------------------------- life and death

    def restart(self, process: Process, delay_ns: int) -> None:
        """Start a dead process after a while, unless somebody else did."""
        life = process.incarnation

        def start() -> None:
            if not process.alive and process.incarnation == life:
                process.start()

        self.universe.after(delay_ns, f"restart {process.name}", start)

    def kill_broker(self, *, power: bool) -> None:
        """The broker ends here; it is back a little later."""
        if self.disk.down:
            return
        self.disk.die(power=power)
        self.broker.kill(power=power)
        delay = self._dice.choice((20 * MS, 300 * MS, 2 * NS, 5 * NS))
        self.restart(self.broker, 50 * MS if self.faults.healed else delay)

    def tell_disk_space(self) -> None:
        """The broker looks at its disk now and then; this is such a moment."""
        self.broker.tell_disk_space()

    # -------------------------------------------------------------- the two phases

    def run(self) -> None:
        """Both phases. Raises Violation."""
        universe = self.universe
        self.broker.start()
        for process in (*self.workers, *self.clients):
            self.restart(process, self._dice.randrange(300 * MS))
        until = self._dice.choice((8, 15, 25)) * NS
        self.workload.begin(until)
        self.faults.begin(until)
        self._run_checked(until)
        self.faults.heal()
        self._run_checked(universe.now + NS)
        self.workload.settle()
        limit = universe.now + LIVENESS_NS
        while not self.checkers.all_ended():
            if universe.now >= limit:
                raise Violation("I6", self.checkers.why_not_ended())
            self._run_checked(universe.now + NS // 4)
        self._run_checked(universe.now + REST_NS)
        self.checkers.check_rest()

    def _run_checked(self, until: int) -> None:
        universe = self.universe
        while universe.now < until:
            stop_at = universe.events + CHECK_EVERY_EVENTS
            universe.run(until, enough=lambda stop_at=stop_at: universe.events >= stop_at)  # type: ignore[misc]
            self.checkers.check_book()


def simulate(seed: int, *, keep_trace: bool = False, **parts: Any) -> Outcome:
    """Run one seed to its end or to its first broken promise."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        grid = Grid(seed, keep_trace=keep_trace, **parts)
        violation = ""
        try:
            grid.run()
        except Violation as broken:
            violation = str(broken)
        universe = grid.universe
        return Outcome(
            seed,
            universe.trace,
            violation,
            universe.now,
            universe.events,
            universe.counts,
            universe.story or [],
        )
    finally:
        if was_enabled:
            gc.enable()
