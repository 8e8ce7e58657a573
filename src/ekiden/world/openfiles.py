"""Files that are read in many parts, kept open between them.

Opening a file, asking for its size and closing it costs as much as reading a part. The files used
longest ago are closed when there are too many. May be used from several threads.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_NO_WAIT: Final = getattr(os, "RWF_NOWAIT", 0) if hasattr(os, "preadv") else 0

_FLAGS: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class OpenFile:
    """A file as it was when it was opened."""

    __slots__ = ("fd", "path", "size", "used", "users", "wanted")

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | _FLAGS)
        found = os.fstat(self.fd)
        self.size = found.st_size
        self.used = found.st_mtime
        """When its use was last noted, by the clock of the disk."""
        self.users = 0
        self.wanted = True
        """Whether it stays open when nobody reads it."""

    def read(self, offset: int, length: int) -> bytes:
        """All of these bytes, or OSError."""
        data = _pread(self.fd, length, offset)
        while len(data) < length:
            more = _pread(self.fd, length - len(data), offset + len(data))
            if not more:
                raise OSError(errno.EIO, "the file is shorter than it was")
            data += more
        return data

    def read_cached(self, offset: int, length: int) -> bytes | None:
        """All of these bytes, if they are in memory."""
        if not _NO_WAIT:
            return None
        data = bytearray(length)
        try:
            whole = os.preadv(self.fd, [data], offset, _NO_WAIT) == length
            return bytes(data) if whole else None
        except OSError:  # it would wait, or this kind of disk cannot tell
            return None

    def renew(self, every_s: float) -> None:
        """Let its time of modification say that it is in use, at most so often."""
        if self.stale(every_s):
            self.used = time.time()
            with suppress(OSError):
                os.utime(self.fd if os.utime in os.supports_fd else self.path)

    def gone(self) -> bool:
        """Whether somebody has removed it by hand."""
        return os.fstat(self.fd).st_nlink == 0

    def stale(self, every_s: float) -> bool:
        """Whether its use is to be noted again."""
        # Also if it lies in the future: the clock was wrong, and it would be kept for too long.
        return abs(time.time() - self.used) > every_s


class OpenFiles:
    """At most about `most` open files, by path."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[str, OpenFile] = {}
        """The one used longest ago first."""

    @contextmanager
    def use(self, path: str) -> Iterator[OpenFile]:
        """The file, which stays open as long as this lasts. Raises OSError."""
        with self._lock:
            if path in self._open and self._open[path].gone():
                self._let_go(path)
            file = self._open.pop(path, None) or OpenFile(path)
            self._open[path] = file
            file.users += 1
            if len(self._open) > self._most:
                self._let_go(next(iter(self._open)))
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                if not file.users and not file.wanted:
                    os.close(file.fd)

    def read_cached(
        self, path: str, offset: int, length: int, renew_s: float
    ) -> tuple[bytes, int] | None:
        """These bytes and the size of the file, if it is open and they are in memory."""
        if not self._lock.acquire(blocking=False):
            return None  # somebody is opening a file, which may take long
        try:
            file = self._open.get(path)
            if file is None or offset + length > file.size or file.stale(renew_s) or file.gone():
                return None
            data = file.read_cached(offset, length)
            return None if data is None else (data, file.size)
        finally:
            self._lock.release()

    def forget(self, path: str) -> None:
        """The file of that name is gone or another: its room is freed when nobody reads it."""
        with self._lock:
            if path in self._open:
                self._let_go(path)

    def close(self) -> None:
        """Keep none open."""
        with self._lock:
            for path in list(self._open):
                self._let_go(path)

    def _let_go(self, path: str) -> None:
        file = self._open.pop(path)
        file.wanted = False
        if not file.users:
            os.close(file.fd)


def _pread(fd: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, length, offset)
    os.lseek(fd, offset, os.SEEK_SET)  # there, one thread reads
    return os.read(fd, length)
