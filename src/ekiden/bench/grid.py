"""A grid of real processes for one bench: a broker on a free port, workers, load processes."""

from __future__ import annotations

import os
import socket

import ekiden
from ekiden.bench.processes import BenchFailed, Child, Crew, wait_until
from ekiden.bench.rounds import Contender
from ekiden.errors import EkidenError

START_TIMEOUT_S = 60.0


class Grid:
    """One broker and its workers, all children of `crew`."""

    def __init__(self, crew: Crew, name: str = "ekiden", options: tuple[str, ...] = ()) -> None:
        self._crew = crew
        self._options = options
        self._name = name
        self.data = crew.folder / f"{name}-data"
        self.address = f"127.0.0.1:{_free_port()}"
        self.workers: list[Child] = []
        # The load of this process itself (stats, probes) looks its key up there.
        os.environ["EKIDEN_STATE"] = crew.environment["EKIDEN_STATE"]
        self.broker = self.start_broker()

    def start_broker(self) -> Child:
        """Start the broker on its data folder; it may not be serving yet when this returns."""
        port = self.address.rpartition(":")[2]
        self.broker = self._crew.start_python(
            f"{self._name}-broker",
            *("-m", "ekiden.cli.main", "broker", "--port", port, "--data", self.data),
            *self._options,
        )
        return self.broker

    def wait_serving(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once the port accepts; a broker listens only when it has recovered."""
        host, _, port = self.address.rpartition(":")

        def accepts() -> bool:
            try:
                socket.create_connection((host, int(port)), 0.5).close()
            except OSError:
                return False
            return True

        wait_until(self.broker, "open port", timeout_s, accepts)

    def add_worker(self, slots: int = 2) -> Child:
        """Start a noop worker and wait until the broker counts it."""
        expected = len(self.workers) + 1
        worker = self._crew.start_python(
            f"{self._name}-worker{expected}",
            *("-m", "ekiden.bench.noop_worker", self.address, str(slots)),
        )
        self.workers.append(worker)
        with ekiden.Client(self.address, client_id="bench-probe") as client:

            def joined() -> bool:
                return bool(client.stats()["workers"]["connected"] >= expected)

            wait_until(worker, "join", START_TIMEOUT_S, joined)
        return worker

    def add_load(self, mode: str) -> Child:
        """Start a load process and wait until it is connected."""
        label = f"{self._name}-{mode}"
        module = ("-m", "ekiden.bench.load")
        load = self._crew.start_python(label, *module, mode, self.address, talks=True)
        load.hear(START_TIMEOUT_S)
        return load

    def contender(self, mode: str, name: str, note: str, warm_up_jobs: int) -> Contender:
        """The grid as it takes part in a race, under load of this mode."""
        return Contender(
            name=name,
            durability="fsync before the answer, strict assign",
            client=self.add_load(mode),
            broker=self.broker,
            workers=self.workers,
            warm_up_jobs=warm_up_jobs,
            note=note,
        )

    def disk_bytes(self) -> int:
        """Bytes in the data folder now."""
        total = 0
        for path in self.data.rglob("*"):
            try:
                total += path.stat().st_size
            except OSError:
                continue  # It was rotated away while we looked.
        return total


def start_grid(
    crew: Crew, *, workers: int = 1, slots: int = 2, options: tuple[str, ...] = ()
) -> Grid:
    """A serving broker with `workers` noop workers."""
    try:
        grid = Grid(crew, options=options)
        grid.wait_serving()
        for _ in range(workers):
            grid.add_worker(slots)
    except EkidenError as error:
        raise BenchFailed(f"the grid did not start: {error}") from error
    return grid


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
