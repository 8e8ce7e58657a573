"""The broker's store as executors of a worker see it.

Everything is asked on the agent's loop. A transfer goes on across reconnects; what ends it is a
refusal of the broker, a file that cannot be read or written, or bytes that do not match their hash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ekiden import limits
from ekiden.errors import EkidenError
from ekiden.world.loop import Driver
from ekiden.world.porter import Porter, Stored

__all__ = ["BrokerStore", "Store", "Stored"]


class Store(Protocol):
    """Bytes by hash. All calls raise EkidenError: a Refusal, or a Fault."""

    async def put(self, source: Path | bytes) -> Stored:
        """Hash and size of these bytes, when the broker has them durably."""

    async def fetch(self, blob: str, size: int, target: Path) -> None:
        """Have them in `target`, verified, whole or not at all."""

    async def read(self, blob: str, size: int) -> bytes:
        """The bytes themselves, verified. Small ones are remembered."""


class BrokerStore:
    """The store behind the connection of a worker's machine. Registers itself with `driver`."""

    def __init__(self, driver: Driver) -> None:
        self._porter = Porter(driver)
        self._remembered: dict[str, bytes] = {}
        """Least lately used first."""
        self._remembered_bytes = 0

    @property
    def direct(self) -> Store:
        """The same store; nothing that is read there is remembered."""
        return self._porter

    async def put(self, source: Path | bytes) -> Stored:
        """See `Store`."""
        return await self._porter.put(source)

    async def fetch(self, blob: str, size: int, target: Path) -> None:
        """See `Store`."""
        await self._porter.fetch(blob, size, target)

    async def read(self, blob: str, size: int) -> bytes:
        """See `Store`."""
        data = self._remembered.get(blob)
        if data is None:
            data = await self._porter.read(blob, size)
        if size <= limits.BLOB_CACHED_BYTES:
            self._remember(blob, data)
        return data

    def _remember(self, blob: str, data: bytes) -> None:
        """As the one used last; the oldest go if all of them take too much memory."""
        self._remembered_bytes += len(data) - len(self._remembered.pop(blob, b""))
        self._remembered[blob] = data
        while self._remembered_bytes > limits.BLOB_CACHE_BYTES:
            oldest = next(iter(self._remembered))
            self._remembered_bytes -= len(self._remembered.pop(oldest))

    def close(self, error: EkidenError | None = None) -> None:
        """The worker ends; so do transfers that are open."""
        self._porter.close(error)
