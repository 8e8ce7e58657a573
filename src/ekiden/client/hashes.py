"""Hashes of files that have not changed since they were read.

A file is known by its path, and by what the system changes with every write to it: inode, size and
the times of change. So a folder that is put again is looked at, not read. The time of the last
change of an inode (ctime) cannot be set back by a program, but clocks tick coarsely: a file that
was written to a moment before it was read is not remembered, as a write in the same tick would not
show.

A memory is a file in the user's state folder, one for each folder that was put, so that the next
put of it reads no more than it needs. It may be lost, and of two that write it the last one wins; a
memory that cannot be read is empty.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ekiden.world.keys import state_folder

NAME: Final = "hashes"

# Memories: those written longest ago go first. Of 200 bytes a file, with as many files as a cache
# may have.
MEMORIES_MAX: Final = 64

# Coarser than any clock of a file system we know of (two seconds on FAT).
SETTLED_NS: Final = 2_100_000_000

_VERSION: Final = 1

_Line = tuple[int, int, int, int, bytes]


class _File(msgspec.Struct, array_like=True):
    version: int
    lines: dict[str, _Line]
    """Path → inode, size, mtime, ctime, SHA-256."""


class Hashes:
    """What is remembered. To be used from one thread at a time."""

    def __init__(self, path: Path, *, trusted: bool = True) -> None:
        """If it is not `trusted` it finds nothing, and learns all the same."""
        self._trusted = trusted
        self._path = path
        self._lines: dict[str, _Line] | None = None
        self._fresh: dict[str, _Line] = {}
        """Used or learned since the memory was read."""
        self._learned = False

    def find(self, path: str, facts: os.stat_result) -> str | None:
        """The SHA-256 in hex of the file, if it is as it was."""
        line = (self._fresh.get(path) or self._read().get(path)) if self._trusted else None
        if line is None or line[:4] != _stamp(facts):
            return None
        self._fresh[path] = line
        return line[4].hex()

    def learn(self, path: str, facts: os.stat_result, blob: str, read_ns: int) -> None:
        """The file was read, beginning at `read_ns` by the wall clock, and was like this before
        and after."""
        if max(facts.st_mtime_ns, facts.st_ctime_ns) < read_ns - SETTLED_NS:
            self._fresh[path] = (*_stamp(facts), bytes.fromhex(blob))
            self._learned = True

    def save(self) -> None:
        """Keep what was learned, if anything was. Failing is no harm: it is read again then."""
        if not self._learned:
            return
        # What was neither found nor learned is not there any more.
        lines = self._fresh
        beside = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.write_bytes(msgspec.msgpack.encode(_File(_VERSION, lines)))
            beside.replace(self._path)
            self._learned = False
            _remove_oldest(self._path.parent)
        except (OSError, UnicodeEncodeError):
            with suppress(OSError):
                beside.unlink()

    def _read(self) -> dict[str, _Line]:
        if self._lines is None:
            try:
                found = msgspec.msgpack.decode(self._path.read_bytes(), type=_File)
                self._lines = found.lines if found.version == _VERSION else {}
            except (OSError, msgspec.DecodeError, UnicodeDecodeError):
                self._lines = {}
        return self._lines


def memory_of(paths: Iterable[str]) -> Path:
    """Where what is known of files at these paths is kept: by the folder that has them all."""
    try:
        root = os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:  # there are none, or they lie on different drives
        root = ""
    name = hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:32]
    return state_folder() / NAME / name


def _remove_oldest(folder: Path) -> None:
    memories = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in memories[MEMORIES_MAX:]:
        path.unlink()


def now_ns() -> int:
    """By the clock that files are stamped with."""
    return time.time_ns()


def _stamp(facts: os.stat_result) -> tuple[int, int, int, int]:
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
