"""A folder of file contents, each under its SHA-256: `ab/ab12…`.

A name appears only after the bytes under it were hashed, synced and found to match, so whatever has
one is whole, whenever the process died. Until then an upload is a file under `incoming/`, which
belongs to one process: what an earlier one left there is removed.

A blob that was neither offered nor read for a while is removed by `sweep`; its modification time is
the record of its last use. All calls but `count` and `bytes` belong to one thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from contextlib import suppress
from typing import Any, Final

from ekiden.errors import BadRequest, BlobDamaged, NoSpace, StorageFault, UnknownBlob

_INCOMING: Final = "incoming"
_NAME: Final = re.compile(r"[0-9a-f]{64}")

# A quota and a limit on the size of files are full disks too.
_FULL: Final = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

# Synced as it grows: the sync at the end, for which others wait, has little left to do.
_SYNC_BYTES: Final = 32 << 20

# The time of last use need not be exact: at most one change of a file's metadata in so long.
_TOUCH_S: Final = 60.0

_FLAGS: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class _Incoming:
    """An upload on its way to a name."""

    __slots__ = ("blob", "digest", "fd", "path", "size", "synced", "written")

    def __init__(self, path: str, blob: str, size: int) -> None:
        self.path = path
        self.blob = blob
        self.size = size
        self.digest: Any = hashlib.sha256()
        self.written = 0
        self.synced = 0
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)

    def add(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.fd, rest) :]
        self.digest.update(data)
        self.written += len(data)

    def sync(self) -> None:
        os.fsync(self.fd)
        self.synced = self.written
        if self.written >= _SYNC_BYTES and hasattr(os, "posix_fadvise"):
            # A small result is fetched soon and stays in memory until then; a large file would push
            # out everything else.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self) -> None:
        """Leave nothing, whatever state it is in."""
        self.close()
        with suppress(OSError):
            os.unlink(self.path)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BlobFolder:
    """The blobs of one broker. The folder is made when the first one comes."""

    def __init__(self, folder: str | os.PathLike[str], *, sync: bool = True) -> None:
        """Without `sync` nothing is promised to survive a power loss."""
        self.folder = os.path.abspath(os.fspath(folder))
        self.count = 0
        self.bytes = 0
        self._sync = sync
        self._incoming: dict[int, _Incoming] = {}

    # -------------------------------------------------------------- life

    def open(self) -> None:
        """Remove what was left half-done, and count what is there."""
        incoming = os.path.join(self.folder, _INCOMING)
        try:
            for name in os.listdir(incoming) if os.path.isdir(incoming) else ():
                os.unlink(os.path.join(incoming, name))
            self._look_through(oldest=float("-inf"))
        except OSError as error:
            raise _fault("open the store of blobs", error) from error

    def close(self) -> None:
        """Give up all uploads."""
        for number in list(self._incoming):
            self.drop(number)

    # -------------------------------------------------------------- coming in

    def begin(self, upload: int, blob: str, size: int) -> bool:
        """Take in `size` bytes from here on; True if they are here already and none are wanted."""
        if self._touch(blob, size):
            return True
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            os.makedirs(os.path.join(self.folder, _INCOMING), mode=0o700, exist_ok=True)
            self._incoming[upload] = _Incoming(self._incoming_path(upload), blob, size)
            return self._finish_if_whole(upload)
        except OSError as error:
            self.drop(upload)
            raise _fault("begin an upload", error) from error
        except BlobDamaged:
            self.drop(upload)
            raise

    def write(self, upload: int, data: bytes) -> bool:
        """The next bytes; True when all are durable under their name.

        Raises what went wrong; then nothing of the upload is left.
        """
        incoming = self._incoming[upload]
        try:
            if self._touch(incoming.blob, incoming.size):
                self.drop(upload)  # somebody else was quicker with the same bytes
                return True
            incoming.add(data)
            if self._sync and incoming.written - incoming.synced >= _SYNC_BYTES:
                incoming.sync()
            return self._finish_if_whole(upload)
        except OSError as error:
            self.drop(upload)
            raise _fault("write an upload", error) from error
        except BlobDamaged:
            self.drop(upload)
            raise

    def has(self, upload: int) -> bool:
        """Whether it is under way."""
        return upload in self._incoming

    def written(self, upload: int) -> int:
        """How many bytes of it have come; 0 if it is not under way."""
        incoming = self._incoming.get(upload)
        return incoming.written if incoming is not None else 0

    def drop(self, upload: int) -> None:
        """Leave nothing of it."""
        incoming = self._incoming.pop(upload, None)
        if incoming is not None:
            incoming.remove()

    def _finish_if_whole(self, upload: int) -> bool:
        incoming = self._incoming[upload]
        if incoming.written < incoming.size:
            return False
        if incoming.digest.hexdigest() != incoming.blob or incoming.written > incoming.size:
            raise BlobDamaged(
                f"the bytes sent as blob {incoming.blob[:12]}… have another hash",
                remedy="send it again; the file may have changed while it was read",
            )
        if self._sync:
            incoming.sync()
        incoming.close()
        self._name(incoming)
        del self._incoming[upload]
        self.count += 1
        self.bytes += incoming.size
        return True

    def _name(self, incoming: _Incoming) -> None:
        """After this it is there for everybody, and stays."""
        path = self._path(incoming.blob)
        shelf = os.path.dirname(path)
        made = not os.path.isdir(shelf)
        os.makedirs(shelf, mode=0o700, exist_ok=True)
        os.replace(incoming.path, path)
        if self._sync:
            _sync_folder(shelf)
            if made:
                _sync_folder(self.folder)
                _sync_folder(os.path.dirname(self.folder))

    # -------------------------------------------------------------- going out

    def read(self, blob: str, offset: int, length: int) -> tuple[bytes, int]:
        """That part, whole, and the size of the blob. `UnknownBlob` if it is not here.

        The bytes are not verified again here: whoever fetches all of them does it.
        """
        try:
            fd = os.open(self._path(blob), os.O_RDONLY | _FLAGS)
        except FileNotFoundError:
            raise UnknownBlob(
                f"the broker has no blob {blob[:12]}…",
                remedy="blobs are removed some time after they were last used; make it again",
            ) from None
        except OSError as error:
            raise _fault(f"read blob {blob[:12]}…", error) from error
        try:
            found = os.fstat(fd)
            if offset + length > found.st_size:
                raise BadRequest(
                    f"blob {blob[:12]}… has {found.st_size:,} bytes, not {offset + length:,}"
                )
            self._renew(self._path(blob), found)
            return _read_at(fd, offset, length), found.st_size
        except OSError as error:
            raise _fault(f"read blob {blob[:12]}…", error) from error
        finally:
            os.close(fd)

    def _touch(self, blob: str, size: int) -> bool:
        """Whether it is here; if so it was just used."""
        path = self._path(blob)
        try:
            found = os.stat(path)
        except OSError:
            return False
        if found.st_size != size:
            return False  # damage, or another size for the same hash: the upload will tell
        self._renew(path, found)
        return True

    def _renew(self, path: str, found: os.stat_result) -> None:
        # Also if it lies in the future: the clock was wrong, and it would be kept for too long.
        if abs(time.time() - found.st_mtime) > _TOUCH_S:
            with suppress(OSError):
                os.utime(path)

    # -------------------------------------------------------------- keeping house

    def sweep(self, unused_s: float) -> int:
        """Remove what was not used for so long; how many blobs that were."""
        try:
            return self._look_through(time.time() - unused_s)
        except OSError as error:
            raise _fault("sweep the store of blobs", error) from error

    def _look_through(self, oldest: float) -> int:
        """Remove what was last used before then, and count the rest."""
        removed = count = size = 0
        for entry in self._entries():
            found = entry.stat(follow_symlinks=False)
            if found.st_mtime < oldest:
                os.unlink(entry.path)
                removed += 1
            else:
                count += 1
                size += found.st_size
        self.count, self.bytes = count, size
        return removed

    def _entries(self) -> list[os.DirEntry[str]]:
        if not os.path.isdir(self.folder):
            return []
        found: list[os.DirEntry[str]] = []
        with os.scandir(self.folder) as shelves:
            for shelf in shelves:
                if len(shelf.name) == 2 and shelf.is_dir(follow_symlinks=False):
                    with os.scandir(shelf.path) as blobs:
                        found += [entry for entry in blobs if _NAME.fullmatch(entry.name)]
        return found

    def _path(self, blob: str) -> str:
        assert _NAME.fullmatch(blob), blob
        return os.path.join(self.folder, blob[:2], blob)

    def _incoming_path(self, upload: int) -> str:
        return os.path.join(self.folder, _INCOMING, str(upload))


def _read_at(fd: int, offset: int, length: int) -> bytes:
    os.lseek(fd, offset, os.SEEK_SET)
    parts: list[bytes] = []
    while length:
        part = os.read(fd, length)
        if not part:
            raise OSError(errno.EIO, "the file is shorter than it was")
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sync_folder(path: str) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened, and names are journaled
        fd = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _fault(what: str, error: OSError) -> StorageFault:
    if error.errno in _FULL:
        return NoSpace(f"the broker's disk is full: cannot {what}", remedy="free some space there")
    return StorageFault(f"cannot {what}: {os.strerror(error.errno or 0).lower()}")
