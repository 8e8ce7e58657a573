"""Clients of a simulated grid that put and fetch: the real transfers, with files in memory.

What a carrier is asked to do it does, whatever happens to it: a process that died begins again what
it had not finished, and what the broker had no room for is offered again later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from ekiden.client.contract import LinkDown, LinkUp, RefusedByAll
from ekiden.client.machine import ClientMachine
from ekiden.errors import BlobDamaged, Refusal, UnknownBlob
from ekiden.simulation.network import Network
from ekiden.simulation.processes import ADDRESS, KEY, Process
from ekiden.simulation.world import MS, US, Universe, Violation
from ekiden.wire.transfers import (
    Downloading,
    PartRead,
    PartWritten,
    ReadPart,
    TransferFailed,
    Transferred,
    Uploading,
    WritePart,
)

RETRY_NS = 1000 * MS


def hash_of(data: bytes) -> str:
    """The name of a blob."""
    return hashlib.sha256(data).hexdigest()


class SimCarrier(Process):
    """A client and its files. `on_put` and `on_fetched` are called with what is done."""

    def __init__(self, universe: Universe, network: Network, name: str) -> None:
        super().__init__(universe, network, name)
        self.to_put: dict[str, bytes] = {}
        self.to_fetch: dict[str, int] = {}
        self.on_put: Callable[[bytes], None] = lambda _data: None
        self.on_fetched: Callable[[bytes], None] = lambda _data: None
        self._sinks: dict[str, bytearray] = {}
        news: dict[type, Callable[[Any], None]] = {
            ReadPart: self._read,
            WritePart: self._write,
            Transferred: self._transferred,
            TransferFailed: self._failed,
            LinkUp: lambda _effect: None,
            LinkDown: lambda _effect: None,
            RefusedByAll: self._refused_by_all,
        }
        self.handlers.update(news)

    # -------------------------------------------------------------- wishes

    def start(self) -> None:
        """A new life: begin what is not known to be done."""
        self.new_life()
        self._sinks.clear()
        session = f"{self.name}.{self.incarnation}"
        self.begin(
            ClientMachine([ADDRESS], self.name, session, lambda _address: KEY, self._dice.random)
        )
        for data in self.to_put.values():
            self._begin_put(data)
        for blob, size in self.to_fetch.items():
            self._begin_fetch(blob, size)

    def put(self, data: bytes) -> None:
        """Have the broker store these bytes."""
        self.to_put[hash_of(data)] = data
        self._begin_put(data)

    def fetch(self, blob: str, size: int) -> None:
        """Get these bytes."""
        self.to_fetch[blob] = size
        self._begin_fetch(blob, size)

    def _begin_put(self, data: bytes) -> None:
        if self.alive:
            self.post(Uploading(("put", hash_of(data)), hash_of(data), len(data)))

    def _begin_fetch(self, blob: str, size: int) -> None:
        if self.alive:
            self._sinks[blob] = bytearray()
            self.post(Downloading(("fetch", blob), blob, size))

    # -------------------------------------------------------------- files

    def _file_ns(self) -> int:
        return self._dice.randrange(20 * US, 400 * US)

    def _read(self, effect: ReadPart) -> None:
        data = self.to_put[effect.token[1]][effect.offset : effect.offset + effect.length]
        self.later(self._file_ns(), "read", PartRead(effect.token, effect.offset, data))

    def _write(self, effect: WritePart) -> None:
        blob = effect.token[1]
        sink = self._sinks[blob]
        if len(sink) != effect.offset:
            raise Violation("G11", f"{self.name}: a part at {effect.offset} behind {len(sink)}")
        sink += effect.data
        wrong = effect.last and hash_of(bytes(sink)) != blob
        error = BlobDamaged("another hash") if wrong else None
        self.later(self._file_ns(), "write", PartWritten(effect.token, effect.offset, error))

    # -------------------------------------------------------------- ends

    def _transferred(self, effect: Transferred) -> None:
        what, blob = effect.token
        if what == "put":
            self.on_put(self.to_put.pop(blob))
        else:
            del self.to_fetch[blob]
            self.on_fetched(bytes(self._sinks.pop(blob)))

    def _failed(self, effect: TransferFailed) -> None:
        what, blob = effect.token
        later = isinstance(effect.error, Refusal) and effect.error.retry_after_s
        if what == "fetch" or not later or isinstance(effect.error, UnknownBlob):
            raise Violation("G11", f"{self.name}: {what} of {blob[:12]} ended: {effect.error}")
        self.universe.count(f"refused: {effect.error.code}")
        life, data = self.incarnation, self.to_put[blob]

        def again() -> None:
            if self.incarnation == life:
                self._begin_put(data)

        self.universe.after(RETRY_NS, f"again {self.name}", again)

    def _refused_by_all(self, effect: RefusedByAll) -> None:
        raise Violation("I9", f"{self.name} is refused for good: {effect.error}")
