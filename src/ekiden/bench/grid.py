"""A grid of real processes for one bench: a broker on a free port, workers, load processes."""

from __future__ import annotations

import os
from typing import Any

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
        self._port = "0"
        self.data = crew.folder / f"{name}-data"
        self.workers: list[Child] = []
        # What this process itself asks of the broker looks its key up there.
        os.environ["EKIDEN_STATE"] = crew.environment["EKIDEN_STATE"]
        self.broker, self.address = self.start_broker()

    def start_broker(self, timeout_s: float = START_TIMEOUT_S) -> tuple[Child, str]:
        """Start the broker on its data folder and return when it says that it serves."""
        self.broker = self._crew.start_python(
            f"{self._name}-broker",
            *("-m", "ekiden.cli.main", "broker", "--json", "--log-level", "warning"),
            *("--port", self._port, "--data", self.data),
            *self._options,
            talks=True,
        )
        self.address = str(self.broker.hear(timeout_s)["address"])
        self._port = self.address.rpartition(":")[2]
        return self.broker, self.address

    def add_worker(self, slots: int = 2) -> Child:
        """Start a noop worker and wait until the broker counts it."""
        expected = len(self.workers) + 1
        worker = self._crew.start_python(
            f"{self._name}-worker{expected}",
            *("-m", "ekiden.bench.noop_worker", self.address, str(slots)),
        )
        self.workers.append(worker)
        wait_until(
            worker,
            "join",
            START_TIMEOUT_S,
            lambda: self.stats()["workers"]["connected"] >= expected,
        )
        return worker

    def stats(self) -> dict[str, Any]:
        """What the broker says of itself."""
        with ekiden.Client(self.address, client_id="bench-probe") as client:
            return client.stats()

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
        for _ in range(workers):
            grid.add_worker(slots)
    except EkidenError as error:
        raise BenchFailed(f"the grid did not start: {error}") from error
    return grid
