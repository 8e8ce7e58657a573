"""A disk with a page cache that keeps only what was synced, and perhaps some of the rest.

What a process writes is visible to it at once and safe only after a sync: file contents by syncing
the file, names (create, rename, remove) by syncing the folder. When the power fails, unsynced bytes
of a file are lost, kept up to any byte, or kept in holes (some sectors written, others zero), and
the size is the synced one or the last one: what is missing in it are zeros. Unsynced changes of
names are undone from some point on. When only the process dies, its page cache lives on; where a
file ended and its room began, only the process knew.

Faults on demand: no space, an input/output error on sync (the bytes it was to make safe are gone
for good, as on Linux), and a *failpoint*: the process dies at the k-th operation, before or after
it took effect.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from ekiden.errors import NoSpace, StorageFault
from ekiden.journal.storage import MemoryStorage

SECTOR = 512

# Room given at most: often less than asked for, so that appends end before, in and behind it.
ROOM_BYTES = 4096


class Died(BaseException):
    """The process is gone in the middle of an operation. Nothing of it may run on, so this is no
    `Exception` that somebody's clean-up could catch."""


class Inode:
    """Content of one file: what the process sees, and how much of it is safe."""

    __slots__ = ("data", "end", "safe", "safe_before_cut", "safe_size")

    def __init__(self) -> None:
        self.data = bytearray()
        self.end = 0
        """Where the next append goes; zeros behind it."""
        self.safe = 0
        """So many bytes are as they were written."""
        self.safe_size = 0
        """So long the file is, whatever is in it."""
        self.safe_before_cut: bytes | None = None
        """What was safe when an unsynced truncate came: it may all be back after a power loss."""


class SimDisk:
    """One flat folder on a simulated disk; a `journal.storage.Storage`."""

    def __init__(self, dice: Random, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.operations = 0
        self.die_at: int | None = None
        """The operation (counted from the start of the universe) at which the process dies."""
        self.fail_sync = False
        self.down = False
        self.syncs = 0
        self.on_operation: Callable[[str, str], None] | None = None
        self._dice = dice
        self._names: dict[str, Inode] = {}
        self._safe_names: dict[str, Inode] = {}
        self._changes: list[tuple[str, str, Inode | None]] = []
        """Changes of names since the folder was synced: (kind or new name, name, inode)."""
        self._damned: list[tuple[Inode, int, int, int]] = []
        """Ranges whose sync failed, and the size that was safe: they never reach the platter."""

    # -------------------------------------------------------------- Storage

    def names(self) -> list[str]:
        self._alive()
        return sorted(self._names)

    def size(self, name: str) -> int:
        return len(self._inode(name).data)

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        data = self._inode(name).data
        return bytes(data[offset:] if size < 0 else data[offset : offset + size])

    def create(self, name: str) -> None:
        self._operate("create", name, lambda: self._create(name))

    def append(self, name: str, data: bytes) -> None:
        self._operate("append", name, lambda: self._append(name, data))

    def reserve(self, name: str, size: int) -> None:
        self._operate("reserve", name, lambda: self._reserve(name, size))

    def trim(self, name: str) -> None:
        self._operate("trim", name, lambda: self._truncate(name, self._inode(name).end))

    def sync(self, name: str) -> None:
        self._operate("sync", name, lambda: self._sync(name))

    def truncate(self, name: str, size: int) -> None:
        self._operate("truncate", name, lambda: self._truncate(name, size))

    def rename(self, old: str, new: str) -> None:
        self._operate("rename", old, lambda: self._rename(old, new))

    def remove(self, name: str) -> None:
        self._operate("remove", name, lambda: self._remove(name))

    def sync_folder(self) -> None:
        self._operate("sync_folder", "", self._sync_folder)

    def free_bytes(self) -> int:
        self._alive()
        return max(0, self.capacity - self.used)

    @property
    def used(self) -> int:
        """Bytes in all files."""
        return sum(len(inode.data) for inode in self._names.values())

    # -------------------------------------------------------------- death and return

    def die(self, *, power: bool) -> None:
        """The process is gone; with it, if the power failed, what was not synced."""
        self.down = True
        self.die_at = None
        if power:
            self._lose()
        for inode, start, end, size in self._damned:
            _doom(inode, start, end, size)
        self._damned.clear()

    def revive(self) -> None:
        """A new process opens the folder."""
        self.down = False
        self.fail_sync = False
        for inode in self._names.values():
            inode.end = len(inode.data)

    def rot(self, name: str) -> None:
        """A bit of a file at rest changes."""
        data = self._names[name].data
        data[self._dice.randrange(len(data))] ^= 1 << self._dice.randrange(8)

    def copy_safe(self) -> dict[str, bytes]:
        """What would certainly be there after a power loss."""
        return {name: bytes(node.data[: node.safe]) for name, node in self._safe_names.items()}

    def copy_seen(self) -> dict[str, bytes]:
        """What a process reads now, whether it is safe or not. Works on a disk that is down."""
        return {name: bytes(node.data) for name, node in self._names.items()}

    # -------------------------------------------------------------- operations

    def _alive(self) -> None:
        if self.down:
            raise Died

    def _operate(self, kind: str, name: str, action: Callable[[], None]) -> None:
        self._alive()
        self.operations += 1
        dies = self.die_at is not None and self.operations >= self.die_at
        if dies and self._dice.random() < 0.5:
            raise Died
        action()
        if self.on_operation is not None:
            self.on_operation(kind, name)
        if dies:
            raise Died

    def _inode(self, name: str) -> Inode:
        self._alive()
        try:
            return self._names[name]
        except KeyError:
            raise StorageFault(f"no file {name!r}") from None

    def _create(self, name: str) -> None:
        if name in self._names:
            raise StorageFault(f"file {name!r} exists")
        self._names[name] = inode = Inode()
        self._changes.append(("", name, inode))

    def _append(self, name: str, data: bytes) -> None:
        inode = self._inode(name)
        if inode.end + len(data) - len(inode.data) > self.capacity - self.used:
            del inode.data[inode.end :]
            raise NoSpace(f"no space left for {len(data):,} bytes in {name!r}")
        inode.data[inode.end : inode.end + len(data)] = data
        inode.end += len(data)

    def _reserve(self, name: str, size: int) -> None:
        inode = self._inode(name)
        wanted = inode.end + self._dice.randint(0, min(size, ROOM_BYTES)) - len(inode.data)
        inode.data += bytes(max(0, min(wanted, self.capacity - self.used)))

    def _sync(self, name: str) -> None:
        inode = self._inode(name)
        if self.fail_sync:
            self.fail_sync = False
            self._damned.append((inode, inode.safe, inode.end, inode.safe_size))
            raise StorageFault(f"input/output error while syncing {name!r}")
        self.syncs += 1
        inode.safe, inode.safe_size = inode.end, len(inode.data)
        inode.safe_before_cut = None

    def _truncate(self, name: str, size: int) -> None:
        inode = self._inode(name)
        if size < inode.safe:
            if inode.safe_before_cut is None:
                inode.safe_before_cut = bytes(inode.data[: inode.safe_size])
            inode.safe = inode.safe_size = size
        del inode.data[size:]
        inode.end = min(inode.end, size)

    def _rename(self, old: str, new: str) -> None:
        inode = self._inode(old)
        del self._names[old]
        self._names[new] = inode
        self._changes.append((new, old, inode))

    def _remove(self, name: str) -> None:
        self._inode(name)
        del self._names[name]
        self._changes.append(("", name, None))

    def _sync_folder(self) -> None:
        if self.fail_sync:
            self.fail_sync = False
            raise StorageFault("input/output error while syncing the folder")
        self.syncs += 1
        self._safe_names = dict(self._names)
        self._changes.clear()

    # -------------------------------------------------------------- power loss

    def _lose(self) -> None:
        names = dict(self._safe_names)
        for new, name, inode in self._changes[: self._dice.randint(0, len(self._changes))]:
            if new:
                del names[name]
                names[new] = inode or Inode()
            elif inode is None:
                del names[name]
            else:
                names[name] = inode
        self._changes.clear()
        self._names = names
        self._safe_names = dict(names)
        for inode in names.values():
            self._tear(inode)

    def _tear(self, inode: Inode) -> None:
        if inode.safe_before_cut is not None and self._dice.random() < 0.5:
            inode.data = bytearray(inode.safe_before_cut)
        else:
            self._lose_content(inode)
            self._lose_size(inode)
        inode.end = inode.safe = inode.safe_size = len(inode.data)
        inode.safe_before_cut = None

    def _lose_content(self, inode: Inode) -> None:
        """All, nothing or some sectors of the unsynced part never reached the platter."""
        rate = self._dice.choice((0.0, 0.5, 1.0))
        for start in range(inode.safe // SECTOR * SECTOR, inode.end, SECTOR):
            if self._dice.random() < rate:
                begin, end = max(start, inode.safe), min(start + SECTOR, inode.end)
                inode.data[begin:end] = bytes(end - begin)

    def _lose_size(self, inode: Inode) -> None:
        """The size is a matter of its own: the synced one, the last, or one between."""
        low, high = sorted((inode.safe_size, len(inode.data)))
        size = self._dice.choice((low, high, self._dice.randint(low, high)))
        del inode.data[size:]
        inode.data += bytes(size - len(inode.data))


def _doom(inode: Inode, start: int, end: int, size: int) -> None:
    """The bytes of this range never arrived: within `size` there are zeros instead."""
    end = min(end, len(inode.data))
    middle = max(start, min(end, size))
    inode.data[start:end] = bytes(middle - start)
    inode.end = len(inode.data)
    inode.safe = min(inode.safe, len(inode.data))


class Rehearsal(MemoryStorage):
    """A copy of what a process sees, on which it acts while its changes are written down.

    The simulator lets a long piece of work (a snapshot) run on this in one go and then performs the
    changes on the real disk one at a time, with everything else happening in between.
    """

    def __init__(self, disk: SimDisk) -> None:
        super().__init__(disk.copy_seen())
        self.steps: list[tuple[str, tuple[Any, ...]]] = []

    def create(self, name: str) -> None:
        super().create(name)
        self.steps.append(("create", (name,)))

    def append(self, name: str, data: bytes) -> None:
        super().append(name, data)
        self.steps.append(("append", (name, data)))

    def sync(self, name: str) -> None:
        super().sync(name)
        self.steps.append(("sync", (name,)))

    def truncate(self, name: str, size: int) -> None:
        super().truncate(name, size)
        self.steps.append(("truncate", (name, size)))

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.steps.append(("rename", (old, new)))

    def remove(self, name: str) -> None:
        super().remove(name)
        self.steps.append(("remove", (name,)))

    def sync_folder(self) -> None:
        self.steps.append(("sync_folder", ()))
