"""Processes that a keeper did not start and has all the same: the orphans of its children's trees.

Whatever loses its parent becomes a child of the keeper. Whose it was is told by what it inherited:
the session of the child's first process, or the marker in its environment; or it was seen in that
child's tree before. A process that left all of these behind, on purpose, cannot be told: it may be
of any child that was there when it was found, lives as long as one of those does, and not longer.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final, TypeAlias

from ekiden.worker import trees
from ekiden.worker.launch import MARKER

Key: TypeAlias = tuple[int, int]
"""A process for ever: its number, and when it started."""

_READ_BYTES: Final = 1 << 16


class Strays:
    """Finds strays, and says whose they are."""

    def __init__(self, token: str) -> None:
        self._marker = f"\0{MARKER}={token}:".encode()
        self._sessions: dict[int, int] = {}
        """Numbers of children by their first process, which leads a session."""
        self._children: set[int] = set()
        self._owners: dict[Key, int] = {}
        self.unclaimed: dict[Key, set[int]] = {}
        """Strays that hide whose they are, with the children they can be of."""
        self._own_children = _open_own_children()

    def add(self, no: int, pid: int) -> None:
        """A child was started."""
        self._sessions[pid] = no
        self._children.add(no)

    def forget(self, no: int, pid: int) -> None:
        """Nothing is left of a child."""
        del self._sessions[pid]
        self._children.discard(no)
        for candidates in self.unclaimed.values():
            candidates.discard(no)
        if self._owners:
            self._owners = {key: owner for key, owner in self._owners.items() if owner != no}

    def claim(self, no: int, pids: list[int]) -> None:
        """These were found in the tree of a child, and stay its own when the tree falls apart."""
        for pid in pids:
            if (stat := trees.stat_of(pid)) is not None:
                self._owners[pid, stat.started] = no

    def find(self, known: Collection[int]) -> dict[int, int | None]:
        """Strays by process, with the child they are of if that is known. `known` are the first
        processes of children; there is nothing to look at, nearly always, beyond their count."""
        pids = self._read_own_children()
        if len(pids) == len(known):
            return {}
        return {pid: self._owner(pid) for pid in map(int, pids) if pid not in known}

    def nobodys(self) -> list[int]:
        """Strays whose every possible child is gone."""
        found: list[int] = []
        for key in [key for key, candidates in self.unclaimed.items() if not candidates]:
            pid, started = key
            stat = trees.stat_of(pid)
            if stat is None or stat.started != started:
                del self.unclaimed[key]
            else:
                found.append(pid)
        return found

    def _owner(self, pid: int) -> int | None:
        # One that has ended counts until it was reaped: its first thread may be over while others
        # go on.
        stat = trees.stat_of(pid)
        if stat is None:
            return None
        key = (pid, stat.started)
        no = self._owners.get(key)
        if no is None:
            no = self._sessions.get(stat.session)
            if no is None:
                no = self._marked_as(pid)
            if no is not None:
                self._owners[key] = no
        if no is not None:
            self.unclaimed.pop(key, None)
            return no
        candidates = self.unclaimed.setdefault(key, set(self._children))
        return next(iter(candidates)) if len(candidates) == 1 else None

    def _marked_as(self, pid: int) -> int | None:
        _, found, rest = trees.environ_of(pid).partition(self._marker)
        number = rest.partition(b"\0")[0]
        if not found or not number.isdigit():
            return None
        return int(number) if int(number) in self._children else None

    def _read_own_children(self) -> list[bytes] | list[int]:
        if self._own_children < 0:
            return trees.children_of(os.getpid())
        # Held open and read from the start: the kernel makes the list anew each time.
        at = 0
        parts: list[bytes] = []
        while part := os.pread(self._own_children, _READ_BYTES, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts).split()


def _open_own_children() -> int:
    try:
        return os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    except OSError:
        return -1  # A kernel without them: all of /proc is read instead.
