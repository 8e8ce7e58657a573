"""The folder of an attempt: inputs written into it, outputs found in it, and wiped.

While an attempt runs, its folder is hostile ground; before and after, nothing else touches it.
Inputs are written before anything was started there and outputs are looked for after everything is
gone, so nothing moves under our feet. Still no link is ever followed: what a job may bring back is
what it wrote into its folder, not what it pointed at.

All of this blocks and belongs in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import stat
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from ekiden.errors import BadName, TooLarge
from ekiden.model.names import DEPTH_MAX, check_file_name, shown

# Output files of one job: each costs about a hundred bytes in its result, which must fit a frame.
OUTPUT_FILES_MAX: Final = 4096

# Everything in the folder, wanted or not: what a walk looks at before it gives up.
ENTRIES_MAX: Final = 100_000

_READ_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FOLDER_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_DIRECTORY", 0)
_NEW_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


class MissingOutput(Exception):
    """What the job was to bring back is not there, or cannot be read."""


class Stamp(Struct, frozen=True):
    """What tells a file that was written to from one that was not."""

    inode: int
    size: int
    changed_ns: int


class Found(Struct, frozen=True):
    """A file that an attempt left."""

    name: str
    """As it travels: checked, and in the composed form of Unicode."""
    path: Path
    size: int
    executable: bool


# ------------------------------------------------------------------ before


def make_folder(path: str) -> None:
    """A new folder that is nobody else's."""
    os.mkdir(path, 0o700)


def place_for(root: str, name: str) -> Path:
    """Where to put a new file `name` in `root`; the folders between them are made."""
    *parents, last = check_file_name(name).split("/")
    folder = Path(root)
    for parent in parents:
        folder /= parent
        folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / last
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    return path


def write_file(root: str, name: str, data: bytes, *, executable: bool = False) -> Stamp:
    """Write `data` as `name`, which must be new, in `root`."""
    *parents, last = check_file_name(name).split("/")
    folder = os.open(root, _FOLDER_FLAGS)
    try:
        for parent in parents:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o700, dir_fd=folder)
            above, folder = folder, os.open(parent, _FOLDER_FLAGS, dir_fd=folder)
            os.close(above)
        fd = os.open(last, _NEW_FLAGS, 0o700 if executable else 0o600, dir_fd=folder)
        with open(fd, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            return _stamp(os.fstat(fd))
    finally:
        os.close(folder)


def link_file(root: str, name: str, target: str) -> None:
    """Let `name`, which must be new, in `root` lead to a file elsewhere."""
    place = place_for(root, name)
    os.symlink(target, place)


def finish_file(path: Path, *, executable: bool) -> Stamp:
    """Of a file that somebody else has put there for us."""
    path.chmod(0o700 if executable else 0o600)
    return _stamp(path.stat())


# ------------------------------------------------------------------ after


def find_outputs(
    root: str, wanted: Sequence[str] | None, before: Mapping[str, Stamp]
) -> list[Found]:
    """Files to bring back: those `wanted` by name or pattern, or all that are new or changed.

    A name that is not there raises MissingOutput, and so does a file that may not be read; a
    pattern may find nothing. Only regular files count: links, sockets and the like are left out
    when everything is taken.
    """
    if wanted is None:
        files = [entry for entry in _walk(root) if before.get(entry[0]) != _stamp(entry[1])]
    else:
        files = _chosen(root, wanted)
    if len(files) > OUTPUT_FILES_MAX:
        raise TooLarge(
            f"it left {len(files):,} output files, more than the limit of {OUTPUT_FILES_MAX:,}",
            remedy="pack them into one archive, or declare the outputs that matter",
        )
    found: dict[str, Found] = {}
    for name, status in files:
        shared = _shared_name(name)
        if shared in found:
            raise BadName(f"two output files have the name {shown(shared)}")
        if not status.st_mode & stat.S_IRUSR and not os.access(Path(root, name), os.R_OK):
            raise MissingOutput(f"it left the output {shown(shared)} closed to its own account")
        runs = bool(status.st_mode & stat.S_IXUSR)
        found[shared] = Found(shared, Path(root, name), status.st_size, runs)
    return [found[name] for name in sorted(found)]


def nothing_there(wanted: Sequence[str]) -> None:
    """What `find_outputs` says of an empty folder."""
    for pattern in wanted:
        if not _is_pattern(pattern):
            raise MissingOutput(f"it did not write the output {shown(pattern)} it should")


def _chosen(root: str, wanted: Sequence[str]) -> list[tuple[str, os.stat_result]]:
    there = dict(_walk(root))
    chosen: dict[str, os.stat_result] = {}
    for pattern in wanted:
        name = pattern.removeprefix("./")
        if name in there:
            chosen[name] = there[name]
        elif not _is_pattern(name):
            raise MissingOutput(f"it did not write the output {shown(pattern)} it should")
        else:
            chosen.update((file, there[file]) for file in there if _matches(file, name))
    return list(chosen.items())


def _is_pattern(text: str) -> bool:
    return any(sign in text for sign in "*?[")


def _matches(name: str, pattern: str) -> bool:
    """As in a shell: `*` stays within a folder, `**` is any number of them."""
    return _matches_parts(name.split("/"), pattern.split("/"))


def _matches_parts(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches_parts(names[at:], patterns[1:]) for at in range(len(names) + 1))
    return (
        bool(names)
        and fnmatch.fnmatchcase(names[0], patterns[0])
        and _matches_parts(names[1:], patterns[1:])
    )


def read_file(path: Path) -> bytes:
    """All of a file that was found."""
    fd = os.open(path, _READ_FLAGS)
    with open(fd, "rb") as file:
        return file.read()


def head_and_tail(path: str, limit: int) -> bytes:
    """The file if it is no longer than `limit`; else its two ends, and between them a line that
    says how much is missing."""
    fd = os.open(path, _READ_FLAGS)
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size <= limit:
            return file.read(limit)
        head = file.read(limit // 2)
        file.seek(size - (limit - len(head)))
        tail = file.read(limit - len(head))
    return _joined(head, size - len(head) - len(tail), tail)


def shorten(path: str, limit: int) -> None:
    """Empty a file that others append to, if it has grown over `limit`."""
    with contextlib.suppress(OSError):
        if os.stat(path, follow_symlinks=False).st_size > limit:
            fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)


def ends_of(data: bytes, limit: int) -> bytes:
    """As `head_and_tail`, of bytes at hand."""
    if len(data) <= limit:
        return data
    head = data[: limit // 2]
    tail = data[len(data) - (limit - len(head)) :]
    return _joined(head, len(data) - limit, tail)


def _joined(head: bytes, left_out: int, tail: bytes) -> bytes:
    return b"%b\n[... %d bytes left out ...]\n%b" % (head, left_out, tail)


def _shared_name(name: str) -> str:
    """What a file is called outside of the folder. Who wrote it sees its name but not our grammar,
    so what to do about it is said in their words."""
    try:
        return check_file_name(unicodedata.normalize("NFC", name))
    except BadName as error:
        raise BadName(
            f"it left an output that cannot be brought back: {error.message}",
            remedy="rename it, or declare outputs without it",
        ) from None


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def _walk(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every regular file below `root`, by name relative to it. No link is followed."""
    seen = 0
    waiting = [""]
    while waiting:
        below = waiting.pop()
        folder = os.open(os.path.join(root, below), _FOLDER_FLAGS) if below else _open_root(root)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    seen += 1
                    if seen > ENTRIES_MAX:
                        raise TooLarge(f"it left more than {ENTRIES_MAX:,} files in its folder")
                    name = f"{below}/{entry.name}" if below else entry.name
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        if name.count("/") >= DEPTH_MAX:
                            raise TooLarge(
                                f"it left folders more than {DEPTH_MAX} deep", remedy="flatten them"
                            )
                        _open_up(entry.name, folder)
                        waiting.append(name)
                    elif stat.S_ISREG(status.st_mode):
                        yield name, status
        finally:
            os.close(folder)


def _open_root(root: str) -> int:
    _open_up(root, None)
    try:
        return os.open(root, _FOLDER_FLAGS)
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise MissingOutput(f"the folder for its outputs is no more: {why}") from None


# ------------------------------------------------------------------ wiping


def wipe(path: str) -> bool:
    """Remove a folder and all in it, whatever was made of it; False if something would not go.

    A job can nest folders deeper than a path or a stack is long. So every folder is first moved up
    to the top, where it is emptied in its turn: nothing is ever more than two steps away.
    """
    try:
        root = os.open(path, _FOLDER_FLAGS)
    except NotADirectoryError:
        return _unlink(path, None)
    except FileNotFoundError:
        return True
    except OSError:
        _open_up(path, None)
        try:
            root = os.open(path, _FOLDER_FLAGS)
        except OSError:
            return _unlink(path, None)
    try:
        with contextlib.suppress(OSError):
            os.fchmod(root, 0o700)
        done = _empty(root)
    finally:
        os.close(root)
    try:
        os.rmdir(path)
    except OSError:
        return False
    return done


def _empty(root: int) -> bool:
    moved = 0
    done = True
    while done and (names := os.listdir(root)):
        done = False
        for name in names:
            if _unlink(name, root):
                done = True
                continue
            _open_up(name, root)
            with contextlib.suppress(OSError):
                moved = _raise_folders(name, root, moved)
                os.rmdir(name, dir_fd=root)
                done = True
    return done


def _raise_folders(name: str, root: int, moved: int) -> int:
    """Empty the folder `name` of `root`: its files go, its folders move up to `root`."""
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=root)
    try:
        for inner in os.listdir(folder):
            if _unlink(inner, folder):
                continue
            _open_up(inner, folder)
            moved += 1
            os.rename(inner, f".ekiden-wipe-{moved}", src_dir_fd=folder, dst_dir_fd=root)
    finally:
        os.close(folder)
    return moved


def _unlink(name: str, folder: int | None) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # A folder, or one that must be opened up first.
    return True


def _open_up(name: str, folder: int | None) -> None:
    """Let ourselves into a folder that a job has locked."""
    with contextlib.suppress(OSError):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        # `chmod` follows links: it must not reach what one points at.
        if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
            os.chmod(name, 0o700, dir_fd=folder)
