"""Files through a broker that dies, over lines that break, in a store that is too small for all."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from ekiden import limits
from ekiden.broker.events import RemoveBlobs
from ekiden.config import BrokerConfig
from ekiden.core.book import JobBook
from ekiden.limits import NS
from ekiden.model.caches import CachedFile, CacheUse, encode_manifest, make_manifest
from ekiden.simulation.blobs import MemoryBlobs
from ekiden.simulation.broker import SimBroker
from ekiden.simulation.carriers import SimCarrier, hash_of
from ekiden.simulation.disk import SimDisk
from ekiden.simulation.network import Network
from ekiden.simulation.world import MS, Universe, Violation

PART = 512
QUOTA = 100 * PART
TROUBLE_NS = 60 * NS
END_NS = 400 * NS


class Grid:
    """A broker, three carriers, and blobs that each is put by one and fetched by another."""

    def __init__(self, seed: int) -> None:
        self.universe = universe = Universe(seed)
        self.dice = universe.chance("carriers")
        self.network = Network(universe)
        config = BrokerConfig(heartbeat_ns=NS, silence_ns=4 * NS, blobs_max=QUOTA)
        self.broker = SimBroker(
            universe, self.network, SimDisk(universe.chance("disk")), config, self
        )
        self.broker.blobs = MemoryBlobs(lambda: universe.wall, grace_ns=20 * NS)
        self.broker.on_crash = lambda _power: self.kill_broker()
        self.broker.on_stopped = self.kill_broker
        self.broker.handlers[RemoveBlobs] = self._remove
        self.cache = self._make_cache()
        self.needed: set[str] = set()
        self.fetched = 0
        self.carriers = [SimCarrier(universe, self.network, f"c{n}") for n in range(3)]
        for n, carrier in enumerate(self.carriers):
            carrier.on_put = lambda data, n=n: self._put(n, data)  # type: ignore[misc]
            carrier.on_fetched = self._fetched

    def _make_cache(self) -> CacheUse:
        """Something old that the book has, and so stays."""
        data = b"cached" * 200
        manifest = encode_manifest(make_manifest([CachedFile("f", len(data), hash_of(data))], []))
        self.kept = {hash_of(data): data, hash_of(manifest): manifest}
        self.broker.blobs.stored.update(self.kept)
        self.broker.blobs.used = dict.fromkeys(self.kept, 0)
        return CacheUse("c", hash_of(manifest), len(manifest))

    # -------------------------------------------------------------- lives

    def recovering(self) -> None:
        """Nothing to do before it has its book."""

    def recovered(self, _book: JobBook) -> None:
        """As a broker would with its book; the machine is listening in a moment."""
        self.universe.after(0, "hold caches", self._hold)

    def _hold(self) -> None:
        machine = self.broker.broker
        assert machine is not None
        machine.store.room._referenced = self.needed.__contains__
        machine.store.hold_caches([self.cache])

    def kill_broker(self) -> None:
        if self.broker.disk.down:
            return
        self.broker.kill()
        delay = self.dice.choice((20 * MS, 500 * MS, 6 * NS))
        self.universe.after(delay, "restart", self.broker.start)

    def trouble(self) -> None:
        """Something breaks, and then something else."""
        what = self.dice.random()
        lines = self.network.connections()
        carrier = self.dice.choice(self.carriers)
        if what < 0.3:
            self.universe.count("broker killed")
            self.kill_broker()
        elif what < 0.4 and carrier.alive:
            self.universe.count("carrier killed")
            carrier.kill()
            self.universe.after(NS, "restart", carrier.start)
        elif what < 0.6 and lines:
            self.universe.count("half-open")
            self.network.half_open(self.dice.choice(lines))
        elif lines:
            self.universe.count("severed")
            self.network.sever(self.dice.choice(lines))
        delay = int(self.dice.expovariate(1.0) * 300 * MS)
        if self.universe.now + delay < TROUBLE_NS:
            self.universe.after(delay, "trouble", self.trouble)

    # -------------------------------------------------------------- blobs

    def _put(self, who: int, data: bytes) -> None:
        blob = hash_of(data)
        if self.broker.blobs.stored.get(blob) != data:
            raise Violation("G11", "what was told to be stored is not there")
        self.needed.add(blob)
        self.carriers[(who + 1) % 3].fetch(blob, len(data))

    def _fetched(self, data: bytes) -> None:
        self.fetched += 1
        self.needed.discard(hash_of(data))

    def _remove(self, effect: RemoveBlobs) -> None:
        before = dict(self.broker.blobs.stored)
        self.broker._perform_blob(effect)
        gone = before.keys() - self.broker.blobs.stored.keys()
        self.universe.counts["removed"] = self.universe.counts.get("removed", 0) + len(gone)
        if gone & (self.needed | self.kept.keys()):
            raise Violation("G11", "a blob that is needed was removed")

    def run(self, blobs: int) -> None:
        self.broker.start()
        for n in range(blobs):
            data = self.dice.randbytes(self.dice.randrange(0, 30 * PART))
            carrier = self.carriers[n % 3]
            at = self.dice.randrange(TROUBLE_NS)
            self.universe.after(at, "put", lambda c=carrier, d=data: c.put(d))  # type: ignore[misc]
        for carrier in self.carriers:
            self.universe.after(MS, "start", carrier.start)
        self.universe.after(200 * MS, "trouble", self.trouble)
        self.universe.run(END_NS)


@pytest.mark.parametrize("seed", range(12))
def test_every_file_arrives_and_nothing_that_is_needed_goes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BLOB_PART_BYTES", PART)
    grid = Grid(seed)

    grid.run(blobs=40)

    blobs = grid.broker.blobs
    assert grid.fetched == 40, grid.universe.counts
    assert (blobs.incoming, blobs.damaged, grid.needed) == ({}, [], set())
    assert grid.universe.counts["removed"] > 0
    assert blobs.held <= QUOTA
    assert all(hashlib.sha256(data).hexdigest() == blob for blob, data in blobs.stored.items())
    assert grid.kept.keys() <= blobs.stored.keys()


def test_a_world_of_carriers_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOB_PART_BYTES", PART)

    def trace(seed: int) -> Any:
        grid = Grid(seed)
        grid.run(blobs=10)
        return grid.universe.trace

    assert trace(1) == trace(1) != trace(2)
