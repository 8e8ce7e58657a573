"""Uploads on their way into the store: each a file under `incoming/`, with a running hash.

One that is dropped can be set aside: for a while the next upload of the same blob goes on with it.
The hash is in memory only, so what an earlier process left is of no use and is removed.

An upload that is under way is never taken over: a second one of the same blob begins anew, and
whoever is whole first wins. To wait for the other would let one slow peer hold up all.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from contextlib import suppress
from typing import Any, Final

from ekiden import limits

# Written down as it grows: the sync at the end, for which others wait, has little left to do.
# No more than two pieces lie in front of the disk at a time: what else syncs there, the journal
# above all, waits behind them.
_SYNC_BYTES: Final = 32 << 20
_PIECE_BYTES: Final = 1 << 20
_BEGIN: Final = 2  # SYNC_FILE_RANGE_WRITE
_FINISH: Final = 7  # …WAIT_BEFORE, …WRITE and …WAIT_AFTER

_FLAGS: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def _find_sync_file_range() -> Any:
    """The system call of that name, where there is one."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except AttributeError:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range: Final = _find_sync_file_range()


class Incoming:
    """An upload on its way to a name."""

    __slots__ = (
        "_piece",
        "_synced",
        "blob",
        "digest",
        "fd",
        "path",
        "resumed",
        "since",
        "size",
        "written",
    )

    def __init__(self, path: str, blob: str, size: int) -> None:
        self.path = path
        self.blob = blob
        self.size = size
        self.digest: Any = hashlib.sha256()
        self.written = 0
        self.resumed = False
        """Whether some of it came with an earlier upload."""
        self.since = 0.0
        """When it was set aside."""
        self._synced = 0
        """Up to where the disk has it, or was told to begin."""
        self._piece = (0, 0)
        """What it was last told to begin with: from where, how many bytes."""
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)

    def add(self, data: bytes, *, sync: bool) -> None:
        """The next bytes."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.fd, rest) :]
        self.digest.update(data)
        self.written += len(data)
        if not sync:
            return
        if _sync_file_range is None:
            if self.written - self._synced >= _SYNC_BYTES:
                self.sync()
        elif self.written - self._synced >= _PIECE_BYTES:
            # The disk begins with this piece while the next one comes, and is done with the last.
            _sync_file_range(self.fd, *self._piece, _FINISH)
            self._piece = (self._synced, self.written - self._synced)
            _sync_file_range(self.fd, *self._piece, _BEGIN)
            self._synced = self.written

    def sync(self) -> None:
        """All that came is on the disk."""
        os.fsync(self.fd)
        self._synced = self.written

    def resume(self) -> bool:
        """Go on with it; False if its file is not what it was."""
        self.resumed = True
        try:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | _FLAGS)
            return os.fstat(self.fd).st_size == self.written
        except OSError:
            return False

    def begin_anew(self) -> None:
        """Nothing of it has come."""
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self.digest = hashlib.sha256()
        self.written = self._synced = 0
        self._piece = (0, 0)
        self.resumed = False

    def remove(self) -> None:
        """Leave nothing, whatever state it is in."""
        self.close()
        with suppress(OSError):
            os.unlink(self.path)

    def close(self) -> None:
        """It may be opened again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Arrivals:
    """Uploads under way by number, and those set aside by blob and size."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._coming: dict[int, Incoming] = {}
        self._aside: dict[tuple[str, int], Incoming] = {}
        """The one that has waited longest first."""

    def __contains__(self, upload: int) -> bool:
        return upload in self._coming

    def __getitem__(self, upload: int) -> Incoming:
        return self._coming[upload]

    @property
    def bytes(self) -> int:
        """Of all that came so far and has no name."""
        return sum(each.written for each in (*self._coming.values(), *self._aside.values()))

    def open(self) -> None:
        """Remove what an earlier process left. Raises OSError."""
        for name in os.listdir(self._folder) if os.path.isdir(self._folder) else ():
            os.unlink(os.path.join(self._folder, name))

    def close(self) -> None:
        """Leave nothing."""
        for incoming in (*self._coming.values(), *self._aside.values()):
            incoming.remove()
        self._coming.clear()
        self._aside.clear()

    def begin(self, upload: int, blob: str, size: int) -> Incoming:
        """A file for it, with what was set aside for it. Raises OSError."""
        incoming = self._aside.pop((blob, size), None)
        if incoming is not None and not incoming.resume():
            incoming.remove()
            incoming = None
        if incoming is None:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            incoming = Incoming(os.path.join(self._folder, str(upload)), blob, size)
        self._coming[upload] = incoming
        return incoming

    def named(self, upload: int) -> None:
        """It is no longer here: its file has its name."""
        self._coming.pop(upload).close()

    def drop(self, upload: int) -> None:
        """Leave nothing of it."""
        incoming = self._coming.pop(upload, None)
        if incoming is not None:
            incoming.remove()

    def set_aside(self, upload: int) -> None:
        """Keep what came of it for the next upload of the same blob; of two, the longer."""
        incoming = self._coming.pop(upload, None)
        if incoming is None:
            return
        incoming.close()
        key = incoming.blob, incoming.size
        other = self._aside.pop(key, incoming)
        kept, spare = (incoming, other) if incoming.written >= other.written else (other, incoming)
        if spare is not kept:
            spare.remove()
        if not kept.written:
            kept.remove()
            return
        kept.since = time.monotonic()
        self._aside[key] = kept
        self.tidy()

    def tidy(self) -> None:
        """Give up what was set aside for too long, or is too much."""
        oldest = time.monotonic() - limits.BLOB_SET_ASIDE_NS / limits.NS
        size = sum(each.written for each in self._aside.values())
        for incoming in list(self._aside.values()):
            few = len(self._aside) <= limits.BLOB_SET_ASIDE_MAX
            if few and size <= limits.BLOB_SET_ASIDE_BYTES and incoming.since > oldest:
                return
            size -= self._give_up(incoming)

    def make_room(self, wanted: int) -> None:
        """Give up what was set aside, until so many bytes are freed or nothing of it is left."""
        for incoming in list(self._aside.values()):
            if wanted <= 0:
                return
            wanted -= self._give_up(incoming)

    def _give_up(self, incoming: Incoming) -> int:
        del self._aside[incoming.blob, incoming.size]
        incoming.remove()
        return incoming.written
