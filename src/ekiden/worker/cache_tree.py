"""One tree of files of a cache: its stamps, and the steps within it that follow no link.

A stamp is what a file was when it was written: inode, size, and two times. The second of them, of
the last change of anything about the file, cannot be set by any program. It has a grain of some
milliseconds, so a stamp counts only when the clock has gone on since it was taken (`wait_tick`).

Files with several names share an `Inode`: giving or taking a name changes that time, too, and the
new one must be known wherever the file is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from msgspec import Struct

from ekiden.errors import NoSpace, StorageFault
from ekiden.model.caches import CacheUse, Manifest
from ekiden.worker.folders import wipe

Content: TypeAlias = tuple[str, int, bool]
"""Hash, size, and whether it is executable: what makes files the same."""

_FOLDER_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_DIRECTORY", 0)
_READ_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

# A quota and a limit on the size of files are full disks too.
_FULL: Final = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

# What a file system gives out at least.
_BLOCK_BYTES: Final = 4096

# The grain of times where the system does not tell of it, and the longest wait for it: a clock that
# was set back must not hold anybody up.
_TICK_NS: Final = 20_000_000
_TICK_MAX_NS: Final = 50_000_000

_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100


class Inode(Struct, gc=False):
    """A file, as it was when it was known to be sound."""

    number: int
    size: int
    written_ns: int
    changed_ns: int
    """-1: it is not sound, or nobody knows."""
    names: int = 0
    """In all trees together."""

    @staticmethod
    def of(status: os.stat_result) -> Inode:
        """As it is now."""
        return Inode(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def stamp(self) -> tuple[int, int, int, int]:
        """What is noted of it."""
        return (self.number, self.size, self.written_ns, self.changed_ns)

    def is_same(self, status: os.stat_result) -> bool:
        """Whether nothing about it has changed."""
        return (
            status.st_ctime_ns == self.changed_ns
            and status.st_ino == self.number
            and status.st_size == self.size
            and status.st_mtime_ns == self.written_ns
        )

    def renew(self, status: os.stat_result) -> None:
        """We have given or taken a name ourselves, and all else must be as it was."""
        unchanged = status.st_ino == self.number and status.st_size == self.size
        unchanged = unchanged and status.st_mtime_ns == self.written_ns
        self.changed_ns = status.st_ctime_ns if unchanged else -1


class Note(Struct, array_like=True, frozen=True):
    """What is written down of a tree."""

    use: CacheUse
    boot: str
    """The boot of the system in which all of it was known to be sound; empty: none."""
    raw: bytes
    """The encoded manifest."""
    stamps: list[tuple[int, int, int, int]]
    """Of its files, in their order."""
    folders: list[tuple[int, int]]
    """Of its folders, in theirs: inode, and the time of the last change."""


class Walk:
    """Steps below one folder, each on its own, so that no link is followed."""

    def __init__(self, root: str, *, make: bool = False) -> None:
        """With `make`, folders that are missing are made."""
        self._root = root
        self._make = make
        self._folder = ""
        self._fd = -1

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hold no folder open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def at(self, folder: str) -> int:
        """That folder, open until another one is asked for. Raises OSError."""
        if self._fd >= 0 and folder == self._folder:
            return self._fd
        self.close()
        fd = os.open(self._root, _FOLDER_FLAGS)
        try:
            for part in folder.split("/") if folder else ():
                above = fd
                try:
                    if self._make:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(part, 0o755, dir_fd=above)
                    fd = os.open(part, _FOLDER_FLAGS, dir_fd=above)
                finally:
                    os.close(above)
        except BaseException:
            self._fd = -1
            raise
        self._folder, self._fd = folder, fd
        return fd

    def place(self, name: str) -> tuple[int, str]:
        """The folder of a file, and what it is called there."""
        folder, _, last = name.rpartition("/")
        return self.at(folder), last

    def stat(self, name: str) -> os.stat_result | None:
        """None if there is nothing of that name."""
        try:
            folder, last = self.place(name)
            return os.stat(last, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None

    def is_as(self, name: str, inode: Inode | None) -> bool:
        """Whether that name is of a file that has not changed."""
        status = self.stat(name) if inode is not None else None
        return inode is not None and status is not None and inode.is_same(status)

    def link(self, source: tuple[Walk, str], name: str, inode: Inode) -> Inode | None:
        """Another name, here, for a sound file of this or another tree; None if it has as many as
        a file can have."""
        walk, other = source
        folder, last = self.place(name)
        from_folder, from_last = walk.place(other) if walk is not self else (folder, "")
        try:
            if walk is self:
                # Both may lie in different folders, and only one is held open.
                os.link(
                    f"{self._root}/{other}", last, dst_dir_fd=folder, follow_symlinks=False
                )  # fmt: skip
            else:
                os.link(
                    from_last, last,
                    src_dir_fd=from_folder, dst_dir_fd=folder, follow_symlinks=False,
                )  # fmt: skip
        except OSError as error:
            if error.errno == errno.EMLINK:
                return None
            raise
        inode.renew(os.stat(last, dir_fd=folder, follow_symlinks=False))
        return inode

    def read(self, name: str) -> bytes:
        """All of a file."""
        folder, last = self.place(name)
        with open(os.open(last, _READ_FLAGS, dir_fd=folder), "rb") as file:
            return file.read()

    def seal(self, folders: Iterable[str]) -> None:
        """Close these to writers; the root is left open, for it must be moved."""
        for folder in folders:
            if folder:
                os.fchmod(self.at(folder), 0o555)


class Tree:
    """What a cache is, and what its files were when they were laid down."""

    def __init__(self, use: CacheUse, raw: bytes, manifest: Manifest) -> None:
        self.use = use
        self.raw = raw
        self.manifest = manifest
        self.inodes: list[Inode | None] = [None] * len(manifest.files)
        self.proven = False
        self.used_ns = 0
        self._entries: dict[str, list[tuple[int, str]]] = {"": []}
        """By folder: its files, as their place in the manifest and what they are called there."""
        self._below: dict[str, list[str]] = {"": []}
        """By folder: the folders in it."""
        for at, file in enumerate(manifest.files):
            folder, _, last = file.name.rpartition("/")
            if folder not in self._entries:
                self._add_folder(folder)
            self._entries[folder].append((at, last))
        self._stamps: dict[str, tuple[int, int]] = {}

    def _add_folder(self, folder: str) -> None:
        while folder not in self._entries:
            self._entries[folder] = []
            self._below[folder] = []
            above, _, last = folder.rpartition("/")
            self._add_folder(above)
            self._below[above].append(last)

    @property
    def folders(self) -> list[str]:
        """All of them, the root ("") too."""
        return sorted(self._entries)

    # -------------------------------------------------------------- notes

    def note(self, boot: str) -> Note:
        """To be written down."""
        stamps = [inode.stamp() for inode in self.inodes if inode is not None]
        return Note(self.use, boot, self.raw, stamps, [self._stamps[f] for f in self.folders])

    def take(self, note: Note, intern: Callable[[tuple[int, int, int, int]], Inode]) -> None:
        """Take over what was written down. Raises ValueError if it does not fit."""
        names = self.folders
        if len(note.stamps) != len(self.inodes) or len(note.folders) != len(names):
            raise ValueError("the note is of another tree")
        self.inodes = [intern(stamp) for stamp in note.stamps]
        self._stamps = dict(zip(names, note.folders, strict=True))

    def stamp_folders(self, root: str) -> None:
        """They are as they shall be."""
        with Walk(root) as walk:
            for folder in self._entries:
                self._stamps[folder] = _folder_stamp(walk.at(folder))

    def newest_ns(self) -> int:
        """When anything in it last changed, as far as we know."""
        files = max((inode.changed_ns for inode in self.inodes if inode is not None), default=0)
        return max([files, *(changed for _, changed in self._stamps.values())])

    # -------------------------------------------------------------- looking

    def differing(self, walk: Walk) -> list[int]:
        """Files whose stamp is another, or that are gone."""
        found: list[int] = []
        look = os.stat
        inodes = self.inodes
        for folder, entries in self._entries.items():
            try:
                fd = walk.at(folder)
            except OSError:
                found += [at for at, _ in entries]
                continue
            for at, name in entries:
                try:
                    status = look(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    found.append(at)
                    continue
                inode = inodes[at]
                # Inlined, because there may be very many.
                if (
                    inode is None
                    or status.st_ctime_ns != inode.changed_ns
                    or status.st_ino != inode.number
                    or status.st_size != inode.size
                ):
                    found.append(at)
        return found

    def strange(self, walk: Walk) -> list[str]:
        """Names of folders that are gone, and of whatever lies there and is not ours."""
        found: list[str] = []
        for folder, entries in self._entries.items():
            try:
                fd = walk.at(folder)
                stamp = _folder_stamp(fd)
                if stamp == self._stamps.get(folder):
                    continue
                os.fchmod(fd, 0o555)
                stamp = _folder_stamp(fd)
                _wait_past(stamp[1])
                ours = {name for _, name in entries} | set(self._below[folder])
                extra = set(os.listdir(fd)) - ours
            except OSError:
                found.append(folder or "the folder itself")
                continue
            found += [f"{folder}/{name}" if folder else name for name in sorted(extra)]
            if not extra:
                self._stamps[folder] = stamp
        return found

    def adopt(self, walk: Walk, at: int) -> bool:
        """Read a file and compare; if it is what it should be, its stamp is what it has now."""
        inode, file = self.inodes[at], self.manifest.files[at]
        if inode is None:
            return False
        try:
            folder, last = walk.place(file.name)
            fd = os.open(last, _READ_FLAGS, dir_fd=folder)
        except OSError:
            return False
        with open(fd, "rb", buffering=0) as opened:
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_ino != inode.number:
                    return False
                if status.st_size != file.size:
                    return False
                if status.st_mode & 0o222 or bool(status.st_mode & 0o100) != file.executable:
                    os.fchmod(fd, 0o555 if file.executable else 0o444)
                    status = os.fstat(fd)
                # Whoever writes from here on leaves another time than this.
                _wait_past(status.st_ctime_ns)
                if hashlib.file_digest(opened, "sha256").hexdigest() != file.blob:
                    return False
                after = os.fstat(fd)
            except OSError:
                return False
        if after.st_ctime_ns != status.st_ctime_ns:
            return False
        inode.size, inode.written_ns = after.st_size, after.st_mtime_ns
        inode.changed_ns = after.st_ctime_ns
        return True

    # -------------------------------------------------------------- names given and taken

    def sound_of(self, root: str, numbers: set[int]) -> list[int]:
        """Which of its files are among these inodes, and as they should be."""
        places = [at for at, inode in enumerate(self.inodes) if inode and inode.number in numbers]
        with Walk(root) as walk:
            return [
                at for at in places if walk.is_as(self.manifest.files[at].name, self.inodes[at])
            ]

    def restamp(self, root: str, places: list[int]) -> None:
        """Others have lost their names for these."""
        with Walk(root) as walk:
            for at in places:
                inode, status = self.inodes[at], walk.stat(self.manifest.files[at].name)
                assert inode is not None
                if status is not None:
                    inode.renew(status)


def _folder_stamp(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_ino, status.st_ctime_ns


# ------------------------------------------------------------------ the system


def boot_id() -> str:
    """What differs after every start of the system; empty if it does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def wait_tick(tree: Tree) -> None:
    """Return when whatever changes a file of the tree from here on changes its stamp."""
    _wait_past(tree.newest_ns())


def _wait_past(moment_ns: int) -> None:
    clock = getattr(time, "CLOCK_REALTIME_COARSE", None)
    end = time.monotonic_ns() + _TICK_MAX_NS
    while time.monotonic_ns() < end:
        now = time.clock_gettime_ns(clock) if clock is not None else time.time_ns() - _TICK_NS
        if now > moment_ns:
            return
        time.sleep(0.001)


def room_of(size: int) -> int:
    """What a file takes on a disk, about."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def exchange(new: str, place: str) -> None:
    """Have the folder `new` at `place`, and at `new` what may have been there, in one step where
    the system can."""
    if not _is_folder(place):
        wipe(place)
        os.rename(new, place)
        return
    # A folder can be moved elsewhere only by who may write to it.
    fd = os.open(place, _FOLDER_FLAGS)
    try:
        os.fchmod(fd, 0o755)
    finally:
        os.close(fd)
    if not _exchange(new, place):
        os.rename(place, new + ".old")
        os.rename(new, place)
        os.rename(new + ".old", new)


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _exchange(one: str, other: str) -> bool:
    try:
        function: Any = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    names = (os.fsencode(one), os.fsencode(other))
    done: int = function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    return done == 0


def disk_fault(what: str, error: OSError) -> StorageFault:
    """What the disk's refusal means to people."""
    why = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno in _FULL:
        return NoSpace(
            f"cannot {what}: {why}", remedy="make room on the disk, or lower --cache-max"
        )
    return StorageFault(f"cannot {what}: {why}")
