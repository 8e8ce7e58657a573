"""A folder of file contents, each under its SHA-256: `ab/ab12…`.

A name appears only after the bytes under it were hashed, synced and found to match, so whatever has
one is whole, whenever the process died. Until then an upload is a file under `incoming/`, which
belongs to one process: what an earlier one left there is removed. A blob that is found damaged
later is moved to `damaged/`, where the last few are kept for whoever wants to know what happened.

The modification time of a blob is the record of its last use. What nobody used of late is named by
`unused`, and removed by `remove` if it was still not used then.

`read`, `read_cached`, `examine`, `count`, `bytes` and `held` may be called from any thread; all
else belongs to one.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import os
import re
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Final

from ekiden import limits
from ekiden.errors import BadRequest, BlobDamaged, NoSpace, StorageFault, UnknownBlob
from ekiden.world.arrivals import Arrivals
from ekiden.world.openfiles import OpenFiles

_INCOMING: Final = "incoming"
_DAMAGED: Final = "damaged"
_NAME: Final = re.compile(r"[0-9a-f]{64}")

# A quota and a limit on the size of files are full disks too.
_FULL: Final = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

# The time of last use need not be exact: at most one change of a file's metadata in so long.
_TOUCH_S: Final = 60.0

_HASH_BYTES: Final = 1 << 20
_FLAGS: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)

Used = tuple[str, int]
"""A blob, and when it was last used: nanoseconds by the clock of the disk."""


class BlobFolder:
    """The blobs of one broker. The folder is made when the first one comes."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sync: bool = True,
        unused_s: float = float("inf"),
        grace_s: float = limits.BLOB_GRACE_NS / limits.NS,
    ) -> None:
        """Without `sync` nothing is promised to survive a power loss. What was not used for
        `unused_s` shall go; what was used within `grace_s` stays, whatever the need."""
        self.folder = os.path.abspath(os.fspath(folder))
        self.count = 0
        self.bytes = 0
        self._sync = sync
        self._unused_s = unused_s
        self._grace_s = grace_s
        # A use has to show before the grace it gives is over.
        self._touch_s = min(_TOUCH_S, grace_s / 2)
        self._arrivals = Arrivals(os.path.join(self.folder, _INCOMING))
        self._files = OpenFiles(limits.BLOB_FILES_OPEN)
        self._oldest = _Oldest()

    @property
    def held(self) -> int:
        """Bytes of all blobs, and of what came of those that are not whole."""
        return self.bytes + self._arrivals.bytes

    # -------------------------------------------------------------- life

    def open(self) -> None:
        """Remove what was left half-done, and count what is there."""
        try:
            self._arrivals.open()
            self._count(self._look_through())
        except OSError as error:
            raise _fault("open the store of blobs", error) from error

    def close(self) -> None:
        """Give up all uploads."""
        self._arrivals.close()
        self._files.close()

    # -------------------------------------------------------------- coming in

    def begin(self, upload: int, blob: str, size: int) -> bool:
        """Take in the bytes from `written` on; True if all are here already and none are wanted."""
        if self.touch(blob, size):
            return True
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            self._arrivals.begin(upload, blob, size)
            return self._finish_if_whole(upload)
        except OSError as error:
            self.drop(upload)
            raise _fault("begin an upload", error) from error
        except BlobDamaged:
            self.drop(upload)
            raise

    def write(self, upload: int, data: bytes) -> bool:
        """The next bytes; True when all are durable under their name.

        If they do not match their hash together with what was set aside, all are wanted again:
        `written` is 0. Raises what went wrong otherwise; then nothing of the upload is left.
        """
        incoming = self._arrivals[upload]
        try:
            if self.touch(incoming.blob, incoming.size):
                self.drop(upload)  # somebody else was quicker with the same bytes
                return True
            incoming.add(data, sync=self._sync)
            return self._finish_if_whole(upload)
        except OSError as error:
            self.drop(upload)
            raise _fault("write an upload", error) from error
        except BlobDamaged:
            self.drop(upload)
            raise

    def has(self, upload: int) -> bool:
        """Whether it is under way."""
        return upload in self._arrivals

    def written(self, upload: int) -> int:
        """How many bytes of it have come; 0 if it is not under way."""
        return self._arrivals[upload].written if upload in self._arrivals else 0

    def drop(self, upload: int) -> None:
        """Leave nothing of it."""
        self._arrivals.drop(upload)

    def set_aside(self, upload: int) -> None:
        """Nothing more will come, but the next upload of the same blob may go on with it."""
        self._arrivals.set_aside(upload)

    def tidy(self) -> None:
        """Give up what was set aside for too long."""
        self._arrivals.tidy()

    def touch(self, blob: str, size: int) -> bool:
        """Whether it is here, of that size; if so it was just used."""
        path = self.path_of(blob)
        try:
            found = os.stat(path)
        except OSError:
            return False
        if found.st_size != size:
            return False  # damage, or another size for the same hash: the upload will tell
        # Also if it lies in the future: the clock was wrong, and it would be kept for too long.
        if abs(time.time() - found.st_mtime) > self._touch_s:
            with suppress(OSError):
                os.utime(path)
        return True

    def _finish_if_whole(self, upload: int) -> bool:
        incoming = self._arrivals[upload]
        if incoming.written < incoming.size:
            return False
        if incoming.digest.hexdigest() != incoming.blob or incoming.written > incoming.size:
            if incoming.resumed:
                # Perhaps it was the other one that sent wrong bytes.
                incoming.begin_anew()
                return False
            raise BlobDamaged(
                f"the bytes sent as blob {incoming.blob[:12]}… have another hash",
                remedy="send it again; the file may have changed while it was read",
            )
        if self._sync:
            incoming.sync()
        incoming.close()
        self._name(incoming.path, incoming.blob)
        self._arrivals.named(upload)
        self.count += 1
        self.bytes += incoming.size
        return True

    def _name(self, found: str, blob: str) -> None:
        """After this it is there for everybody, and stays."""
        path = self.path_of(blob)
        shelf = os.path.dirname(path)
        made = not os.path.isdir(shelf)
        os.makedirs(shelf, mode=0o700, exist_ok=True)
        self._uncount(path)  # of another size, or there would have been no upload
        os.replace(found, path)
        self._files.forget(path)
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
            with self._files.use(self.path_of(blob)) as file:
                if offset + length > file.size:
                    raise BadRequest(
                        f"blob {blob[:12]}… has {file.size:,} bytes, not {offset + length:,}"
                    )
                file.renew(self._touch_s)
                return file.read(offset, length), file.size
        except FileNotFoundError:
            raise UnknownBlob(
                f"the broker has no blob {blob[:12]}…",
                remedy="blobs are removed some time after they were last used; make it again",
            ) from None
        except OSError as error:
            raise _fault(f"read blob {blob[:12]}…", error) from error

    def read_cached(self, blob: str, offset: int, length: int) -> tuple[bytes, int] | None:
        """What `read` would say, if that is known without waiting for a disk or another thread."""
        return self._files.read_cached(self.path_of(blob), offset, length, self._touch_s)

    # -------------------------------------------------------------- making room

    def unused(self, wanted: int, *, new: bool, kept: Container[str]) -> tuple[list[Used], bool]:
        """What is not `kept` and may go, the longest unused first; whether there may be more.

        These are about `wanted` bytes that were not used within the grace time, and beyond them
        what was not used for very long; a bounded number. The next call names the next ones,
        until one is `new`.
        """
        now = time.time_ns()
        long_ago = now - self._unused_s * limits.NS
        graced = now - int(self._grace_s * limits.NS)
        oldest, found, size = self._oldest, list[Used](), 0
        self._arrivals.tidy()
        self._arrivals.make_room(wanted)
        if new:
            oldest.begin(keep=wanted > 0)
        try:
            while len(found) < limits.BLOB_UNUSED_TOLD:
                if not oldest.listed and not oldest.fill(self, graced):
                    break
                used, blob, length = oldest.listed[-1]
                if size >= wanted and used >= long_ago:
                    return found, wanted > 0
                oldest.listed.pop()
                if blob not in kept:
                    found.append((blob, used))
                    size += length
        except OSError as error:
            raise _fault("look through the store of blobs", error) from error
        return found, oldest.more

    def remove(self, blobs: list[Used], *, kept: Container[str]) -> tuple[int, int]:
        """Remove those that were not used since and are not `kept`; how many, of how many bytes."""
        count, size = self.count, self.bytes
        for blob, used in blobs:
            path = self.path_of(blob)
            try:
                if os.stat(path).st_mtime_ns == used and blob not in kept:
                    self._uncount(path)
                    os.unlink(path)
                    self._files.forget(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _fault(f"remove blob {blob[:12]}…", error) from error
        return count - self.count, size - self.bytes

    def _uncount(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.bytes -= os.stat(path).st_size
            self.count -= 1

    def look_through(self, before: int) -> Iterator[tuple[int, str, int]]:
        """When each was last used if that was before, its name and its size; all are counted."""
        found = self._look_through()
        self._count(found)
        return (each for each in found if each[0] < before)

    def _count(self, found: list[tuple[int, str, int]]) -> None:
        self.count, self.bytes = len(found), sum(size for _, _, size in found)

    def _look_through(self) -> list[tuple[int, str, int]]:
        found: list[tuple[int, str, int]] = []
        if not os.path.isdir(self.folder):
            return found
        with os.scandir(self.folder) as shelves:
            for shelf in shelves:
                if len(shelf.name) == 2 and shelf.is_dir(follow_symlinks=False):
                    with os.scandir(shelf.path) as blobs:
                        for entry in blobs:
                            if _NAME.fullmatch(entry.name):
                                what = entry.stat(follow_symlinks=False)
                                found.append((what.st_mtime_ns, entry.name, what.st_size))
        return found

    # -------------------------------------------------------------- damage

    def examine(self, blob: str, *, goes_on: Callable[[], bool] = lambda: True) -> int:
        """Read all of it, as long as that `goes_on`. If it cannot be read or does not match its
        hash: the number of its file, for `withdraw`. 0 if it is sound, or not here."""
        digest, number = hashlib.sha256(), 0
        try:
            fd = os.open(self.path_of(blob), os.O_RDONLY | _FLAGS)
            try:
                number = os.fstat(fd).st_ino
                while block := os.read(fd, _HASH_BYTES):
                    if not goes_on():
                        return 0
                    digest.update(block)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return 0
        except OSError as error:
            if error.errno == errno.EIO:
                return number
            raise _fault(f"examine blob {blob[:12]}…", error) from error
        return 0 if digest.hexdigest() == blob else number

    def withdraw(self, blob: str, number: int) -> str | None:
        """Take a damaged blob out of the store, unless another file has its name by now (None).
        Where it is kept, or "" if that takes too much room."""
        path = self.path_of(blob)
        damaged = os.path.join(self.folder, _DAMAGED)
        name = f"{blob}.{time.time_ns()}"
        try:
            if os.stat(path).st_ino != number:
                return None
            os.makedirs(damaged, mode=0o700, exist_ok=True)
            self._uncount(path)
            os.replace(path, os.path.join(damaged, name))
            self._files.forget(path)
            return os.path.join(damaged, name) if name in _keep_newest(damaged) else ""
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _fault(f"set aside blob {blob[:12]}…", error) from error

    def path_of(self, blob: str) -> str:
        """Where a blob lies if it is here."""
        assert _NAME.fullmatch(blob), blob
        return os.path.join(self.folder, blob[:2], blob)


class _Oldest:
    """Blobs by their last use, as it was when the folder was last looked through.

    What is left of one search is good for the next: `remove` looks at the time of use again. So a
    full store looks through its folder once for many uploads, not once for each.
    """

    def __init__(self) -> None:
        self.listed: list[tuple[int, str, int]] = []
        """Last use, name and size; the oldest last."""
        self._after: tuple[int, str, int] | None = None
        """The newest that was listed, if there are others behind it."""
        self._again = False
        """Whether this search may begin once more from the oldest."""

    @property
    def more(self) -> bool:
        """Whether there may be others."""
        return bool(self.listed) or self._after is not None or self._again

    def begin(self, *, keep: bool) -> None:
        """A new search, to `keep` with what is listed already."""
        self._again = True
        if not keep:
            self.listed, self._after = [], None

    def fill(self, folder: BlobFolder, before: int) -> bool:
        """List the next ones that were last used before then; False if there are none."""
        while self._after is not None or self._again:
            after, self._after = self._after, None
            if after is None:
                self._again = False
            found = folder.look_through(before)
            beyond = found if after is None else (each for each in found if each > after)
            self.listed = heapq.nsmallest(limits.BLOB_UNUSED_LISTED, beyond)
            if len(self.listed) == limits.BLOB_UNUSED_LISTED:
                self._after = self.listed[-1]
            self.listed.reverse()
            if self.listed:
                return True
        return False


def _keep_newest(folder: str) -> set[str]:
    """Remove all but the last few files, as far as they are not too large; what is left."""
    kept: set[str] = set()
    size = 0
    for name in sorted(os.listdir(folder), key=lambda name: name.rpartition(".")[2], reverse=True):
        path = os.path.join(folder, name)
        size += os.stat(path).st_size
        if len(kept) < limits.BLOB_DAMAGED_KEPT and size <= limits.BLOB_DAMAGED_BYTES:
            kept.add(name)
        else:
            os.unlink(path)
    return kept


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
