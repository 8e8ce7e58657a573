"""The data folder on a real disk.

`FolderStorage` is the journal's `Storage` with system calls and nothing else: no buffering, no
retries. An error of a sync is final, because the kernel forgets the pages that failed and the next
sync would claim success.

One process at a time may write: `lock` takes the folder for as long as the process lives. The lock
is not handed down to children, or an orphan would keep a restarted broker out.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ekiden import limits
from ekiden.errors import FolderInUse, NoSpace, StorageFault

LOCK_NAME: Final = "lock"

# Files kept open for appending. The journal writes one, and a snapshot or a compression another;
# a descriptor more would keep the room of a deleted segment.
_OPEN_MAX: Final = 2

# A quota and a limit on the size of files are full disks too: room can be made for both.
_FULL: Final = (
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    if hasattr(errno, "EDQUOT")
    else {
        errno.ENOSPC,
        errno.EFBIG,
    }
)
# Room helps only where a sync may leave out what nobody needs to read the bytes again: elsewhere
# every sync writes the attributes of the file, too.
_CAN_RESERVE: Final = hasattr(os, "fdatasync") and hasattr(os, "pwrite")

# How much of a file may lie in the page cache before it is let go: one call for many small appends.
_SPARE_BYTES: Final = 4 << 20

_BINARY: Final = getattr(os, "O_BINARY", 0)
_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)


class FolderStorage:
    """A folder, made with mode 0700 if it is not there. Threads may share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._handles: dict[str, _Handle] = {}
        self._reserved: dict[str, _Extent] = {}
        """Files with room behind their end: nobody else knows where that is, so it is kept even
        when their handle is not."""
        self._guard = threading.Lock()
        self._lock_fd = -1
        with _faults(f"cannot make the data folder {self.path!r}"):
            # Mode 0700 whatever the umask: chmod only what we made, an owner may know better.
            if not os.path.isdir(self.path):
                os.makedirs(self.path, mode=0o700)
                os.chmod(self.path, 0o700)

    # -------------------------------------------------------------- one holder

    def lock(self) -> None:
        """Take the folder until `close` or the end of the process. FolderInUse if it is taken."""
        if self._lock_fd >= 0:
            return
        with _faults(f"cannot lock the data folder {self.path!r}"):
            fd = os.open(self._path(LOCK_NAME), os.O_RDWR | os.O_CREAT | _CLOEXEC | _BINARY, 0o600)
        try:
            if not _try_lock(fd):
                raise FolderInUse(
                    f"data folder {self.path!r} is in use by process {_holder(fd)}",
                    remedy="stop that process, or choose another folder with --data",
                )
            with _faults(f"cannot lock the data folder {self.path!r}"):
                os.ftruncate(fd, 0)
                os.write(fd, f"{os.getpid()}\n".encode())
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd
        _LOCKED.add(self)

    def close(self) -> None:
        """Close all files and give up the lock."""
        with self._guard:
            for name in list(self._handles):
                self._forget(name)
        self._drop_lock()

    def _drop_lock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -------------------------------------------------------------- reading

    def names(self) -> list[str]:
        """All files, sorted."""
        with _faults(f"cannot list {self.path!r}"), os.scandir(self.path) as found:
            return sorted(entry.name for entry in found if entry.is_file(follow_symlinks=False))

    def size(self, name: str) -> int:
        """Bytes in the file, reserved ones included."""
        with _faults(f"cannot read {name!r}"):
            return os.stat(self._path(name)).st_size

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        """`size` bytes from `offset`, fewer where the file ends; all of the rest if negative."""
        with _faults(f"cannot read {name!r}"), open(self._path(name), "rb", buffering=0) as file:
            if size < 0:
                size = max(0, os.fstat(file.fileno()).st_size - offset)
            file.seek(offset)
            return _read_fully(file.fileno(), size)

    def free_bytes(self) -> int:
        """Bytes that can still be written by this user."""
        with _faults(f"cannot examine {self.path!r}"):
            return shutil.disk_usage(self.path).free

    # -------------------------------------------------------------- writing

    def create(self, name: str) -> None:
        """Make an empty file that only its owner can read. It must not exist."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _CLOEXEC | _BINARY
        with self._guard:
            try:
                fd = os.open(self._path(name), flags, 0o600)
            except OSError as error:
                if error.errno in _FULL:
                    raise _no_space(name, error) from error
                raise _fault(f"cannot create {name!r}", error) from error
            self._keep(name, fd)

    def append(self, name: str, data: bytes) -> None:
        """Add all of `data` at the end. On `NoSpace` the file ends where it did before, and what
        was reserved is gone."""
        with self._opened(name) as handle:
            extent = handle.extent
            try:
                _write_at(handle.fd, extent.end, data)
            except OSError as error:
                if error.errno not in _FULL:
                    raise _fault(f"cannot append to {name!r}", error) from error
                with _faults(f"cannot take back what was appended to {name!r}"):
                    os.ftruncate(handle.fd, extent.end)
                extent.size = extent.end
                raise _no_space(name, error) from error
            extent.end += len(data)
            extent.size = max(extent.size, extent.end)

    def reserve(self, name: str, size: int) -> None:
        """Fill the file with zeros for the next `size` bytes, unless that has no use here or the
        disk is nearly full: what is left is for running work."""
        if not _CAN_RESERVE or self.free_bytes() < limits.DISK_HEADROOM_BYTES + size:
            return
        with self._opened(name) as handle:
            extent = handle.extent
            room = extent.end + size - extent.size
            if room <= 0:
                return
            try:
                _write_at(handle.fd, extent.size, bytes(room))
            except OSError:
                # Nobody promised room. If the disk has more to say, the append will hear it.
                with _faults(f"cannot take back what was reserved in {name!r}"):
                    os.ftruncate(handle.fd, extent.size)
                return
            extent.size += room
            self._reserved[name] = extent

    def trim(self, name: str) -> None:
        """Cut the file to its end, if room is left behind it. Durable after `sync`."""
        extent = self._reserved.get(name)
        if extent is not None:
            self.truncate(name, extent.end)

    def sync(self, name: str) -> None:
        """Return when the bytes of the file, and its size, survive a power loss."""
        with self._opened(name) as handle, _faults(f"cannot sync {name!r}"):
            _sync_data(handle.fd)
            handle.spare_the_cache()

    def truncate(self, name: str, size: int) -> None:
        """Cut the file to `size` bytes, which is its end then. Durable after `sync`."""
        with self._opened(name) as handle, _faults(f"cannot truncate {name!r}"):
            os.ftruncate(handle.fd, size)
            handle.extent.end = handle.extent.size = size
            self._reserved.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        """Give the file a new name in one step, in place of any file that has it."""
        with self._guard, _faults(f"cannot rename {old!r}"):
            self._forget(old)
            self._forget(new)
            self._reserved.pop(old, None)
            self._reserved.pop(new, None)
            os.replace(self._path(old), self._path(new))

    def remove(self, name: str) -> None:
        """Take the name away."""
        with self._guard, _faults(f"cannot remove {name!r}"):
            self._forget(name)
            self._reserved.pop(name, None)
            os.unlink(self._path(name))

    def sync_folder(self) -> None:
        """Return when names made, changed and removed so far survive a power loss."""
        # Windows cannot open a folder; its file system keeps names in a journal of its own.
        if sys.platform != "win32":
            with _faults(f"cannot sync the folder {self.path!r}"):
                fd = os.open(self.path, os.O_RDONLY | _CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    # -------------------------------------------------------------- descriptors

    def _path(self, name: str) -> str:
        assert name == os.path.basename(name) != "", "the folder is flat"
        return os.path.join(self.path, name)

    @contextmanager
    def _opened(self, name: str) -> Iterator[_Handle]:
        """A file for writing that no other thread closes meanwhile."""
        with self._guard:
            handle = self._handles.get(name)
            if handle is None:
                with _faults(f"cannot open {name!r}"):
                    fd = os.open(self._path(name), os.O_WRONLY | _CLOEXEC | _BINARY)
                handle = self._keep(name, fd)
            handle.users += 1
        try:
            yield handle
        finally:
            with self._guard:
                handle.users -= 1
                handle.close_if_unused()

    def _keep(self, name: str, fd: int) -> _Handle:
        size = os.fstat(fd).st_size
        handle = self._handles[name] = _Handle(fd, self._reserved.get(name) or _Extent(size, size))
        while len(self._handles) > _OPEN_MAX:
            self._forget(next(iter(self._handles)))
        return handle

    def _forget(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.forgotten = True
            handle.close_if_unused()


class _Extent:
    """Where a file ends, and how large it is: more, where room is reserved behind the end."""

    __slots__ = ("end", "size")

    def __init__(self, end: int, size: int) -> None:
        self.end = end
        self.size = size


class _Handle:
    """An open file, closed when it is forgotten and nobody uses it."""

    def __init__(self, fd: int, extent: _Extent) -> None:
        self.fd = fd
        self.extent = extent
        self.users = 0
        self.forgotten = False
        self._spared = 0
        """Up to where the kernel was told that it need not keep the bytes in memory."""

    def spare_the_cache(self) -> None:
        """What is synced is hardly read again: its memory is worth more to others, and to the next
        write. (On a virtual machine whose page cache had to grow for every write, the same disk
        took 350 MB/s instead of 1,600.) A hint: where there is no such call, nothing is lost."""
        if not hasattr(os, "posix_fadvise"):
            return
        end = self.extent.end
        if end - self._spared >= _SPARE_BYTES:
            os.posix_fadvise(self.fd, 0, end, os.POSIX_FADV_DONTNEED)
            self._spared = end

    def close_if_unused(self) -> None:
        if self.forgotten and self.users == 0 and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _read_fully(fd: int, size: int) -> bytes:
    """A read may return less than asked for before the end: signals, and 2 GiB at most."""
    first = os.read(fd, size)
    if len(first) == size or not first:
        return first
    parts, missing = [first], size - len(first)
    while missing and (part := os.read(fd, missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _write_at(fd: int, at: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        if hasattr(os, "pwrite"):
            done = os.pwrite(fd, rest, at)
        else:
            os.lseek(fd, at, os.SEEK_SET)
            done = os.write(fd, rest)
        rest, at = rest[done:], at + done


def _sync_data(fd: int) -> None:
    if sys.platform == "darwin":
        # fsync there leaves the data in the drive's own cache.
        import fcntl

        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    elif sys.platform == "win32":
        os.fsync(fd)
    else:
        os.fdatasync(fd)


# ------------------------------------------------------------------ the lock


def _try_lock(fd: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            # Far behind the process id, which others must be able to read.
            os.lseek(fd, 1 << 20, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
            os.lseek(fd, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        raise _fault("cannot lock the data folder", error) from error
    return True


def _holder(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)
    return os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"


_LOCKED: weakref.WeakSet[FolderStorage] = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    for storage in list(_LOCKED):
        storage._drop_lock()


# Closing on exec does not help a child that only forks: it shares the lock with its parent and
# would hold it after the parent's death.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_parent)


# ------------------------------------------------------------------ errors


def _fault(what: str, error: OSError) -> StorageFault:
    return StorageFault(f"{what}: {error.strerror or error}")


def _no_space(name: str, error: OSError) -> NoSpace:
    return NoSpace(
        f"no room for {name!r}: {error.strerror or error}",
        remedy="free some space on the disk of the data folder",
    )


@contextmanager
def _faults(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _fault(what, error) from error
