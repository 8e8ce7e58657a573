"""Process trees as /proc shows them: who descends from whom, who carries a marker, who is left.

What is read here may be out of date when it is returned: processes come and go. Callers repeat
until nothing is left, and act only on processes that they own.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable
from typing import NamedTuple


class Stat(NamedTuple):
    """A line of /proc/<pid>/stat, as far as it matters here."""

    state: str
    parent: int
    session: int
    started: int
    """In clock ticks since boot: with the pid it names a process for ever."""


def stat_of(pid: int) -> Stat | None:
    """None if there is no such process (any more)."""
    line = _read(f"/proc/{pid}/stat")
    # The name of the program stands in parentheses and may hold anything, also parentheses.
    fields = line[line.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def children_of(pid: int) -> list[int]:
    """Direct children, of all its threads."""
    if not _HAS_CHILDREN_FILES:
        return [other for other in all_pids() if (stat := stat_of(other)) and stat.parent == pid]
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def tree_of(roots: Iterable[int]) -> list[int]:
    """`roots` and all their descendants, parents first."""
    found = list(roots)
    known = set(found)
    for pid in found:  # It grows while we go.
        for child in children_of(pid):
            if child not in known:
                known.add(child)
                found.append(child)
    return found


def all_pids() -> list[int]:
    """Every process there is."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environ_of(pid: int) -> bytes:
    """Variables as NAME=value, each with a NUL before and after; empty if it may not be read."""
    return b"\0" + _read(f"/proc/{pid}/environ") + b"\0"


def marked(marker: bytes, sessions: Collection[int] = ()) -> list[int]:
    """Everything alive whose environment holds `marker`, or that is of one of these sessions, with
    all their descendants."""
    found: list[int] = []
    for pid in all_pids():
        stat = stat_of(pid)
        if stat is None or pid == os.getpid() or (stat.state in "ZX" and not _has_threads(pid)):
            continue
        if stat.session in sessions or marker in environ_of(pid):
            found.append(pid)
    return tree_of(found)


def _has_threads(pid: int) -> bool:
    """Whether a process whose first thread has ended goes on in others."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def strike(pids: Iterable[int]) -> None:
    """SIGKILL to each that is still there."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def resident_kb(pids: Iterable[int]) -> int:
    """Memory of these processes; pages that several of them share count for each."""
    pages = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/statm").split()
        pages += int(fields[1]) if len(fields) > 1 else 0
    return pages * (os.sysconf("SC_PAGE_SIZE") >> 10)


def proportional_kb(pids: Iterable[int]) -> int:
    """Memory of these processes, shared pages counted once. Dear: the kernel looks at every page.
    Where it cannot be read, a process counts with all that is resident."""
    total = 0
    for pid in pids:
        for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                total += int(line.split()[1])
                break
        else:
            total += resident_kb([pid])
    return total


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        parts: list[bytes] = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)


_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
