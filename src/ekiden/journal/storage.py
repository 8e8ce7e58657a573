"""The few things the journal asks of a disk.

A storage is one flat folder of files that only grow at their end. Room may be reserved behind the
end: it belongs to the file, reads as zeros, and spares the syncs of what is appended a new size. A
storage is synchronous on purpose: who waits, and in which thread, is decided by the caller.
`world.disk.FolderStorage` is the real one, `MemoryStorage` holds everything in memory, and the
simulator has one that forgets what was not synced.

Errors are `NoSpace` for a full disk during `create` and `append`, which then changed nothing, and
`StorageFault` for all else. After such a fault of a write or a sync the content of the file is
unknown: stop, and recover from disk.
"""

from __future__ import annotations

from typing import Protocol

from ekiden.errors import StorageFault


class Storage(Protocol):
    """A folder. Nothing is durable before `sync` (bytes) and `sync_folder` (names) returned."""

    def names(self) -> list[str]:
        """All files, sorted."""

    def size(self, name: str) -> int:
        """Bytes in the file, reserved ones included."""

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        """`size` bytes from `offset`, fewer where the file ends; all of the rest if negative."""

    def create(self, name: str) -> None:
        """Make an empty file that only its owner can read. It must not exist."""

    def append(self, name: str, data: bytes) -> None:
        """Add all of `data` at the end, or raise. On `NoSpace` the file ends where it did before,
        and what was reserved may be gone."""

    def reserve(self, name: str, size: int) -> None:
        """Have room for the next `size` bytes, if that is to be had cheaply: a wish, which may be
        granted in part or not at all. Only who reserved knows the end from the zeros behind it."""

    def trim(self, name: str) -> None:
        """Cut the file to its end: give back what was reserved. Durable after `sync`."""

    def sync(self, name: str) -> None:
        """Return when the bytes of the file, and its size, survive a power loss."""

    def truncate(self, name: str, size: int) -> None:
        """Cut the file to `size` bytes, which is its end then. Durable after `sync`."""

    def rename(self, old: str, new: str) -> None:
        """Give the file a new name in one step, in place of any file that has it."""

    def remove(self, name: str) -> None:
        """Take the name away."""

    def sync_folder(self) -> None:
        """Return when names made, changed and removed so far survive a power loss."""

    def free_bytes(self) -> int:
        """Bytes that can still be written."""


class MemoryStorage:
    """A storage without a disk: for tests and for grids that end with their process."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self._files = {name: bytearray(data) for name, data in (files or {}).items()}
        self._ends: dict[str, int] = {}
        """Where a file ends, if room was reserved behind it."""

    def _file(self, name: str) -> bytearray:
        try:
            return self._files[name]
        except KeyError:
            raise StorageFault(f"no file {name!r}") from None

    def names(self) -> list[str]:
        return sorted(self._files)

    def size(self, name: str) -> int:
        return len(self._file(name))

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        end = None if size < 0 else offset + size
        return bytes(self._file(name)[offset:end])

    def create(self, name: str) -> None:
        if name in self._files:
            raise StorageFault(f"file {name!r} exists")
        self._files[name] = bytearray()

    def append(self, name: str, data: bytes) -> None:
        end = self._end(name)
        self._file(name)[end : end + len(data)] = data
        if name in self._ends:
            self._ends[name] += len(data)

    def reserve(self, name: str, size: int) -> None:
        end = self._ends.setdefault(name, self._end(name))
        self._file(name).extend(bytes(max(0, end + size - self.size(name))))

    def trim(self, name: str) -> None:
        self.truncate(name, self._end(name))

    def _end(self, name: str) -> int:
        return self._ends.get(name, self.size(name))

    def sync(self, name: str) -> None:
        self._file(name)

    def truncate(self, name: str, size: int) -> None:
        del self._file(name)[size:]
        self._ends.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        self._files[new] = self._file(old)
        del self._files[old]
        self._ends.pop(old, None)
        self._ends.pop(new, None)

    def remove(self, name: str) -> None:
        self._file(name)
        del self._files[name]
        self._ends.pop(name, None)

    def sync_folder(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 40
