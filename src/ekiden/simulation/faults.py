"""Everything that goes wrong in a simulated world, and the end of it.

Each seed draws its own handful of fault kinds and how often they strike: a world in which
everything fails at once hides the trouble that one kind makes when the rest works. `heal` ends all
of it; from then on promises about *when* hold, not only those about *never*.
"""

from __future__ import annotations

from collections.abc import Callable

from ekiden.limits import NS
from ekiden.simulation.cluster import Grid
from ekiden.simulation.processes import Process
from ekiden.simulation.world import MS

DISK_FULL_BYTES_LEFT = (0, 100, 5_000)


class Faults:
    """Schedules faults on a grid until `heal`."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.universe = grid.universe
        self._dice = grid.universe.chance("faults")
        self._kinds: dict[str, Callable[[], None]] = {
            "broker dies": self._broker_dies,
            "broker dies at a failpoint": self._failpoint,
            "broker stops": self.grid.broker.stop,
            "broker pauses": self._broker_pauses,
            "worker dies": self._worker_dies,
            "worker drains": self._worker_drains,
            "worker pauses": self._worker_pauses,
            "client dies": self._client_dies,
            "client closes": self._client_closes,
            "client pauses": self._client_pauses,
            "connection breaks": self._sever,
            "connection half-open": self._half_open,
            "slow reader": self._slow_reader,
            "partition": self._partition,
            "one-way partition": self._one_way,
            "slow network": self._slow_network,
            "frames repeat": self._repeat,
            "bytes flip": self._flip,
            "slow disk": self._slow_disk,
            "disk full": self._disk_full,
            "sync fails": self._sync_fails,
            "snapshot rots": self._rot,
            "wall clock jumps": self._jump_wall,
        }
        self._undo: list[Callable[[], None]] = []

    def begin(self, until: int) -> None:
        """Draw the kinds of this seed and let them strike until then."""
        dice = self._dice
        names = list(self._kinds)
        dice.shuffle(names)
        chosen = names[: dice.choice((1, 2, 3, 4, 6, len(names)))]
        for name in chosen:
            mean = dice.choice((1, 3, 8)) * NS
            self._again(name, mean, until)

    def _again(self, name: str, mean: int, until: int) -> None:
        delay = int(self._dice.expovariate(1.0) * mean) + 10 * MS
        if self.universe.now + delay >= until:
            return

        def strike() -> None:
            if not self.grid.healed:
                self.universe.count(name)
                self._kinds[name]()
                self._again(name, mean, until)

        self.universe.after(delay, f"fault {name}", strike)

    def heal(self) -> None:
        """The end of all trouble: everything is up, connected, has room and the right time."""
        grid = self.grid
        grid.healed = True
        self.universe.note("healed")
        for undo in self._undo:
            undo()
        self._undo.clear()
        grid.network.heal()
        grid.disk.die_at = None
        grid.broker.doomed = False
        grid.disk.fail_sync = False
        grid.disk.capacity = 1 << 40
        grid.broker.slowness_ns = 0
        grid.universe.right_wall()
        for worker in grid.workers:
            worker.slowness = 1
        for process in grid.processes:
            process.resume_now()
            if not process.alive:
                grid.restart(process, 10 * MS)

    # -------------------------------------------------------------- processes

    def _pause_ns(self) -> int:
        """Sometimes a hiccup, sometimes longer than any lease."""
        return self._dice.choice((200 * MS, NS, 3 * NS, 8 * NS, 20 * NS))

    def _broker_dies(self) -> None:
        if self._dice.random() < 0.4:
            self.grid.broker.doomed = True
            return
        self.grid.kill_broker(power=self._dice.random() < 0.6)

    def _failpoint(self) -> None:
        disk = self.grid.disk
        if disk.die_at is None:
            disk.die_at = disk.operations + self._dice.randrange(1, 30)

    def _broker_pauses(self) -> None:
        self.grid.broker.pause(self._pause_ns())

    def _worker_dies(self) -> None:
        self._die(self._dice.choice(self.grid.workers))

    def _client_dies(self) -> None:
        self._die(self._dice.choice(self.grid.clients))

    def _die(self, process: Process) -> None:
        if process.alive:
            process.kill(power=self._dice.random() < 0.4)
            self.grid.restart(process, self._dice.choice((20 * MS, NS, 4 * NS, 12 * NS)))

    def _worker_drains(self) -> None:
        self._dice.choice(self.grid.workers).drain()

    def _worker_pauses(self) -> None:
        self._dice.choice(self.grid.workers).pause(self._pause_ns())

    def _client_closes(self) -> None:
        client = self._dice.choice(self.grid.clients)
        if client.alive and not client.paused:
            client.close()
            self.grid.restart(client, NS)

    def _client_pauses(self) -> None:
        self._dice.choice(self.grid.clients).pause(self._pause_ns())

    # -------------------------------------------------------------- network

    def _sever(self) -> None:
        connections = self.grid.network.connections()
        if connections:
            self.grid.network.sever(self._dice.choice(connections))

    def _half_open(self) -> None:
        connections = self.grid.network.connections()
        if connections:
            self.grid.network.half_open(self._dice.choice(connections))

    def _slow_reader(self) -> None:
        connections = self.grid.network.connections()
        if connections:
            self._for_a_while(self.grid.network.congest(self._dice.choice(connections)))

    def _partition(self) -> None:
        name = self._dice.choice([*self.grid.workers, *self.grid.clients]).name
        self._cut([(name, "broker"), ("broker", name)])

    def _one_way(self) -> None:
        name = self._dice.choice([*self.grid.workers, *self.grid.clients]).name
        self._cut([self._dice.choice([(name, "broker"), ("broker", name)])])

    def _cut(self, pairs: list[tuple[str, str]]) -> None:
        network = self.grid.network
        for pair in pairs:
            network.cut(*pair)

        def mend() -> None:
            for pair in pairs:
                network.mend(*pair)

        self._for_a_while(mend)

    def _slow_network(self) -> None:
        network = self.grid.network
        network.slowness_ns = self._dice.choice((10 * MS, 200 * MS, 2 * NS))
        self._for_a_while(lambda: setattr(network, "slowness_ns", 0))

    def _repeat(self) -> None:
        network = self.grid.network
        network.repeat_rate = self._dice.choice((0.1, 0.5))
        self._for_a_while(lambda: setattr(network, "repeat_rate", 0.0))

    def _flip(self) -> None:
        network = self.grid.network
        network.flip_rate = 0.02
        self._for_a_while(lambda: setattr(network, "flip_rate", 0.0))

    # -------------------------------------------------------------- disk and clock

    def _slow_disk(self) -> None:
        broker = self.grid.broker
        broker.slowness_ns = self._dice.choice((20 * MS, 500 * MS, 2 * NS))
        self._for_a_while(lambda: setattr(broker, "slowness_ns", 0))

    def _disk_full(self) -> None:
        disk = self.grid.disk
        disk.capacity = disk.used + self._dice.choice(DISK_FULL_BYTES_LEFT)
        self.grid.broker.tell_clocks()

        def free() -> None:
            disk.capacity = 1 << 40
            self.grid.broker.tell_clocks()

        self._for_a_while(free)

    def _sync_fails(self) -> None:
        self.grid.disk.fail_sync = True

    def _rot(self) -> None:
        """A bit of the newest snapshot is lost; the one before it, and the log, must do."""
        snapshots = [n for n in self.grid.disk.copy_seen() if n.endswith(".snap")]
        if len(snapshots) > 1:
            self.universe.count("newest snapshot damaged")
            self.grid.disk.rot(max(snapshots))
            self.grid.kill_broker(power=False)

    def _jump_wall(self) -> None:
        hour = 3600 * NS
        self.universe.jump_wall(self._dice.choice((-hour, hour, 30 * NS, -30 * NS, 24 * hour)))

    def _for_a_while(self, undo: Callable[[], None]) -> None:
        """Undo it some seconds from now, or when everything heals."""
        self._undo.append(undo)

        def now() -> None:
            if undo in self._undo:
                self._undo.remove(undo)
                undo()

        self.universe.after(self._dice.choice((300, 2000, 6000, 18000)) * MS, "fault ends", now)
