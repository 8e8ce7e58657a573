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
        self.end = 0
        self.safe = b""
        self.safe_end = 0

    @classmethod
    def holding(cls, data: bytes) -> Inode:
        inode = cls()
        inode.data, inode.end = bytearray(data), len(data)
        inode.sync()
        return inode

    def append(self, data: bytes) -> None:
        self.data[self.end : self.end + len(data)] = data
        self.end += len(data)

    def reserve(self, size: int) -> None:
        self.data.extend(bytes(max(0, self.end + size - len(self.data))))

    def truncate(self, size: int) -> None:
        del self.data[size:]
        self.end = size

    def sync(self) -> None:
        self.safe, self.safe_end = bytes(self.data), self.end

    def left_by(self, death: str) -> bytes:
        unsynced = self.data[self.safe_end : self.end] if death.startswith("tear") else b""
        size = self.data if death.endswith("room") else self.safe
        content = self.safe[: self.safe_end] + bytes(unsynced[: len(unsynced) // 2])
        return content.ljust(len(size), b"\0")


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
            self._names[name] = Inode.holding(data)
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
        self._operate(lambda: self._names[name].append(data))

    def reserve(self, name: str, size: int) -> None:
        self._operate(lambda: self._names[name].reserve(size))

    def trim(self, name: str) -> None:
        self.truncate(name, self._names[name].end)

    def sync(self, name: str) -> None:
        self._operate(lambda: self._names[name].sync())

    def truncate(self, name: str, size: int) -> None:
        self._operate(lambda: self._names[name].truncate(size))

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
        "tear" half of the unsynced bytes, "names" all names but only synced bytes. "room" and
        "tear in room" lose as much, but the files are as large as they were last."""
        if death == "kill":
            return {name: bytes(inode.data) for name, inode in self._names.items()}
        if death == "names":
            return {name: inode.safe for name, inode in self._names.items()}
        return {name: inode.left_by(death) for name, inode in self._safe_names.items()}


DEATHS = ["kill", "loss", "tear", "names", "room", "tear in room"]


class SmallDisk(MemoryStorage):
    """Has space for `capacity` bytes, and reserves none of it."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def free_bytes(self) -> int:
        return self.capacity - sum(self.size(name) for name in self.names())

    def append(self, name: str, data: bytes) -> None:
        if len(data) > self.free_bytes():
            raise NoSpace(f"no room for {name!r}")
        super().append(name, data)

    def reserve(self, name: str, size: int) -> None:
        pass


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
