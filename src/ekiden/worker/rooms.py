"""Where the keeper lets a child work: a folder, and a file each for stdout and stderr.

Making and removing these three costs more on a disk than starting a small program. So a room that
was left as it was found, empty and with little output, is used again: everything that ever worked
in it is gone by then, so nothing can tell it from a new one. What was left in any other way is
handed to the agent, which collects and wipes it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from ekiden.worker.launch import CAPTURE_BYTES_MAX

_FOLDER_MODE: Final = 0o40700
_FILE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND


class Room:
    """A folder `path` with `path`.out and `path`.err beside it."""

    __slots__ = ("_inode", "err", "err_path", "out", "out_path", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.out_path = path + ".out"
        self.err_path = path + ".err"
        os.mkdir(path, 0o700)
        self._inode = os.stat(path).st_ino
        # Appending: whoever else empties the file, to bound it, leaves no hole in front.
        self.out = os.open(self.out_path, _FILE_FLAGS, 0o600)
        try:
            self.err = os.open(self.err_path, _FILE_FLAGS, 0o600)
        except OSError:
            os.close(self.out)
            raise

    def is_empty(self) -> bool:
        """Whether the folder is as it was made: the same, closed to others, nothing in it."""
        try:
            stat = os.stat(self.path, follow_symlinks=False)
            if stat.st_mode != _FOLDER_MODE or stat.st_ino != self._inode:
                return False
            # An access list would let others into what is made here. Labels of the system's own
            # are on every file where it uses them.
            labels = os.listxattr(self.path, follow_symlinks=False)
            if not all(label.startswith("security.") for label in labels):
                return False
            with os.scandir(self.path) as entries:
                return next(entries, None) is None
        except OSError:
            return False

    def close(self, *, keep_out: bool, keep_err: bool) -> None:
        """Give it up. Files that are not kept are removed; the folder only if it is empty."""
        os.close(self.out)
        os.close(self.err)
        for path, keep in ((self.out_path, keep_out), (self.err_path, keep_err)):
            if not keep:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


def take_output(fd: int) -> bytes | None:
    """What was written, and the file is empty again; None if it is too much and stays there."""
    size = os.fstat(fd).st_size
    if size == 0:
        return b""
    if size > CAPTURE_BYTES_MAX:
        return None
    data = os.pread(fd, size, 0)
    os.ftruncate(fd, 0)
    # A child may have taken "append" off the file, which it shared with us; then this matters.
    os.lseek(fd, 0, os.SEEK_SET)
    return data
