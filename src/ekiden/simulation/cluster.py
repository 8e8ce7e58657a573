"""A whole grid in a seeded universe: one broker with its disk, workers, clients, checkers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from ekiden import limits
from ekiden.config import BrokerConfig
from ekiden.limits import NS
from ekiden.simulation.broker import SimBroker
from ekiden.simulation.checkers import Checkers
from ekiden.simulation.disk import SimDisk
from ekiden.simulation.network import Network
from ekiden.simulation.plans import JobPlan
from ekiden.simulation.processes import Process
from ekiden.simulation.roles import SimClient, SimWorker
from ekiden.simulation.world import MS, Universe

CAPS = (0, 0, 0, 2, 5)


class Grid:
    """One world and all that lives in it. How large it is, and how set up, the seed decides."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.universe = universe = Universe(seed, keep_trace=keep_trace)
        self.dice = universe.chance("grid")
        self.plans: dict[str, JobPlan] = {}
        self.disk = SimDisk(universe.chance("disk"))
        self.network = Network(universe)
        self.config = _make_config(self.dice)
        self.checkers = Checkers(universe, self.network, self.disk, self.config, self.plans)
        self.broker = SimBroker(universe, self.network, self.disk, self.config, self.checkers)
        self.workers = [
            self._make_worker(number) for number in range(self.dice.choice((1, 2, 3, 4)))
        ]
        self.clients = [
            SimClient(universe, self.network, f"c{number}", watcher=self.checkers)
            for number in range(self.dice.choice((1, 2, 3)))
        ]
        self.healed = False
        self.broker.on_crash = lambda power: self.kill_broker(power=power)
        self.broker.on_stopped = lambda: self.kill_broker(power=False)

    def _make_worker(self, number: int) -> SimWorker:
        dice = self.dice
        slots = dice.choice((1, 2, 4))
        patterns = dice.choice(([">"], ["render.*"], ["price.>", "mail"]))
        worker = SimWorker(
            self.universe,
            self.network,
            f"w{number}",
            plans=self.plans,
            watcher=self.checkers,
            slots=slots,
            # The first can do everything, so that no job waits for ever.
            patterns=[">"] if number == 0 else patterns,
            labels={"gpu": "yes"} if number == 0 or dice.random() < 0.3 else {},
            prefetch=dice.choice((slots, 2 * slots, 2 * slots, 4 * slots, None)),
            slowness=dice.choice((1, 1, 1, 5)),
            careless=dice.random() < 0.2,
        )
        worker.on_end = lambda ended: self.restart(ended, 500 * MS)
        return worker

    @property
    def processes(self) -> list[Process]:
        """Everybody."""
        return [self.broker, *self.workers, *self.clients]

    def client(self, name: str) -> SimClient:
        """The client of that name."""
        return next(client for client in self.clients if client.name == name)

    # -------------------------------------------------------------- life and death

    def start(self) -> None:
        """Everybody begins within a moment."""
        self.broker.start()
        for process in (*self.workers, *self.clients):
            self.restart(process, self.dice.randrange(300 * MS))

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
        self.broker.kill(power=power)
        self.universe.count("broker lost power" if power else "broker killed")
        if self.dice.random() < 0.2:
            self.broker.config = replace(self.config, client_cap=self.dice.choice(CAPS))
        delay = self.dice.choice((20 * MS, 300 * MS, 2 * NS, 5 * NS))
        self.restart(self.broker, 50 * MS if self.healed else delay)


def _make_config(dice: Random) -> BrokerConfig:
    """Small segments and frequent snapshots, so that both happen often in a short life."""
    silence = dice.choice((4, 6, 15))
    return BrokerConfig(
        snapshot_interval_s=dice.choice((0.5, 2.0, 2.0, 7.0)),
        segment_mb=dice.choice((1, 4, 16, 1024)) / 1024,
        client_cap=dice.choice(CAPS),
        retention_ns=dice.choice((limits.RETENTION_NS,) * 4 + (4 * NS,)),
        results_max=dice.choice((1_000_000, 1_000_000, 1_000_000, 20)),
        waiting_max=dice.choice((1_000_000, 1_000_000, 1_000_000, 40)),
        heartbeat_ns=NS if silence == 4 else 2 * NS,
        silence_ns=silence * NS,
        rejoin_grace_ns=dice.choice((2, 10)) * NS if silence == 15 else 3 * NS,
        policies=dice.choice(({}, {}, {">": "round-robin"})),
    )
