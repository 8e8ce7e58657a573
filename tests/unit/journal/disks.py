"""Disks that fail on demand, and a short way to write a journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ekiden.errors import NoSpace
from ekiden.journal.local import LocalJournal, Recovery, perform
from ekiden.journal.storage import MemoryStorage, Storage

GROUP = bytes(range(16))


class Crash(BaseException):
    """The process died inside an operation; no clean-up of its own runs any more."""


class Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.safe = b""


class CrashingDisk:
    """Counts changing operations and dies before or after the n-th. What is left of it depends on
    how it died: `seen` after a kill, `lost` and `torn` after a power loss."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.die_at = -1
        self.after = False
        self.done = 0
        self.dead = False
        self._names: dict[str, Inode] = {}
        for name, data in (files or {}).items():
            inode = self._names[name] = Inode()
            inode.data, inode.safe = bytearray(data), bytes(data)
        self._safe_names = dict(self._names)

    def _operate(self, action: Callable[[], None]) -> None:
        if self.dead:
            raise Crash
        dies = self.done == self.die_at
        self.done += 1
        if not dies or self.after:
            action()
        if dies:
            self.dead = True
            raise Crash

    def names(self) -> list[str]:
        return sorted(self._names)

    def size(self, name: str) -> int:
        return len(self._names[name].data)

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        return bytes(self._names[name].data[offset : None if size < 0 else offset + size])

    def create(self, name: str) -> None:
        assert name not in self._names
        self._operate(lambda: self._names.update({name: Inode()}))

    def append(self, name: str, data: bytes) -> None:
        self._operate(lambda: self._names[name].data.extend(data))

    def sync(self, name: str) -> None:
        def action() -> None:
            self._names[name].safe = bytes(self._names[name].data)

        self._operate(action)

    def truncate(self, name: str, size: int) -> None:
        def action() -> None:
            del self._names[name].data[size:]

        self._operate(action)

    def rename(self, old: str, new: str) -> None:
        self._operate(lambda: self._names.update({new: self._names.pop(old)}))

    def remove(self, name: str) -> None:
        def action() -> None:
            del self._names[name]

        self._operate(action)

    def sync_folder(self) -> None:
        def action() -> None:
            self._safe_names = dict(self._names)

        self._operate(action)

    def free_bytes(self) -> int:
        return 1 << 40

    def left_by(self, death: str) -> dict[str, bytes]:
        """The files after `death`: "kill" keeps the page cache, "loss" only what was synced,
        "tear" half of the unsynced bytes, "names" all names but only synced bytes."""
        if death == "kill":
            return {name: bytes(inode.data) for name, inode in self._names.items()}
        if death == "names":
            return {name: inode.safe for name, inode in self._names.items()}
        left = {}
        for name, inode in self._safe_names.items():
            extra = inode.data[len(inode.safe) :] if death == "tear" else b""
            left[name] = inode.safe + bytes(extra[: len(extra) // 2])
        return left


DEATHS = ["kill", "loss", "tear", "names"]


class SmallDisk(MemoryStorage):
    """Has room for `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def free_bytes(self) -> int:
        return self.capacity - sum(self.size(name) for name in self.names())

    def append(self, name: str, data: bytes) -> None:
        if len(data) > self.free_bytes():
            raise NoSpace(f"no room for {name!r}")
        super().append(name, data)


def opened(storage: Storage, segment_bytes: int = 1 << 20) -> tuple[LocalJournal, Recovery]:
    return LocalJournal.open(storage, now=0, segment_bytes=segment_bytes, group=GROUP)


def write(storage: Storage, journal: LocalJournal, payloads: Iterable[bytes]) -> None:
    """One append with all payloads."""
    for payload in payloads:
        journal.propose(payload)
    append = journal.advance(0).append
    assert append is not None
    perform(storage, append)
    journal.persisted(append.upto)


def files_of(storage: Storage) -> dict[str, bytes]:
    return {name: storage.read(name) for name in storage.names()}


def payload(index: int) -> bytes:
    return b"entry %d " % index + bytes(index % 7) + b"x" * (index % 23)
