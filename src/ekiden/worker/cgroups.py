"""Memory limits by the kernel's own count, where a control group may be made.

Without one the keeper looks at its children ten times a second and ends what has grown too large,
which a program that fills memory quickly can outrun. With one the kernel never lets it. Both kinds
of control groups are understood; whatever does not work here is done without.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final, NamedTuple

_PREFIX: Final = "ekiden-"


class _Kind(NamedTuple):
    """The files of one version."""

    limit: str
    swap: str
    swap_value: str
    """What to write there, so that memory is not traded for swap; empty: the limit itself."""
    events: str
    peak: str


_V1: Final = _Kind(
    "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "", "memory.oom_control",
    "memory.max_usage_in_bytes",
)  # fmt: skip
_V2: Final = _Kind("memory.max", "memory.swap.max", "0", "memory.events", "memory.peak")


class MemoryGroup:
    """One child and its descendants."""

    __slots__ = ("_kind", "_path")

    def __init__(self, path: str, kind: _Kind) -> None:
        self._path = path
        self._kind = kind

    def add(self, pid: int) -> None:
        """It counts here from now on, and so does what it starts."""
        with contextlib.suppress(OSError):
            _write(f"{self._path}/cgroup.procs", str(pid))

    def was_oom(self) -> bool:
        """Whether the kernel had to end a process of it."""
        for line in _read(f"{self._path}/{self._kind.events}").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return number.strip() not in ("", "0")
        return False

    def peak_kb(self) -> int:
        """The most it ever used, files it wrote and that were still in memory included."""
        text = _read(f"{self._path}/{self._kind.peak}").strip()
        return int(text) >> 10 if text.isdigit() else 0

    def remove(self) -> None:
        """Nothing of it runs any more."""
        with contextlib.suppress(OSError):
            os.rmdir(self._path)


class MemoryGroups:
    """Where groups are made for the children of one keeper."""

    def __init__(self, path: str, kind: _Kind) -> None:
        self._path = path
        self._kind = kind

    def make(self, no: int, mem_mb: int) -> MemoryGroup | None:
        """A group for child `no` that may use so much; None if there cannot be one."""
        path = f"{self._path}/{no}"
        limit = str(mem_mb << 20)
        try:
            os.mkdir(path)
            _write(f"{path}/{self._kind.limit}", limit)
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            return None
        with contextlib.suppress(OSError):
            _write(f"{path}/{self._kind.swap}", self._kind.swap_value or limit)
        return MemoryGroup(path, self._kind)

    def close(self) -> None:
        """Remove what was made, as far as nothing runs in it."""
        _remove(self._path)


def find_memory_groups(
    token: str, cgroup_file: str = "/proc/self/cgroup", mounts_file: str = "/proc/self/mounts"
) -> MemoryGroups | None:
    """Where this process may make groups under its own; None if it may not."""
    for base, kind in _candidates(_read(cgroup_file), _read(mounts_file)):
        _clear_leftovers(base)
        path = f"{base}/{_PREFIX}{os.getpid()}-{token}"
        try:
            if kind is _V2 and "memory" not in _read(f"{base}/cgroup.subtree_control").split():
                _write(f"{base}/cgroup.subtree_control", "+memory")
            os.mkdir(path)
            if kind is _V2:
                _write(f"{path}/cgroup.subtree_control", "+memory")
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            continue
        groups = MemoryGroups(path, kind)
        trial = groups.make(0, 1 << 20)
        if trial is not None:
            trial.remove()
            return groups
        groups.close()
    return None


def _candidates(cgroups: str, mounts: str) -> list[tuple[str, _Kind]]:
    """Our own group in each hierarchy that counts memory."""
    found: list[tuple[str, _Kind]] = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        unified = controllers == ""
        if not unified and "memory" not in controllers.split(","):
            continue
        mount = _mount_of(mounts, unified)
        if mount:
            found.append(((mount + path).rstrip("/"), _V2 if unified else _V1))
    return found


def _mount_of(mounts: str, unified: bool) -> str:
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        _, place, kind, options = fields[:4]
        if unified and kind == "cgroup2":
            return place
        if not unified and kind == "cgroup" and "memory" in options.split(","):
            return place
    return ""


def _clear_leftovers(base: str) -> None:
    """Of keepers that were killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(base):
            pid = name.removeprefix(_PREFIX).partition("-")[0]
            if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{pid}"):
                _remove(f"{base}/{name}")


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    os.rmdir(f"{path}/{name}")
        os.rmdir(path)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: str, text: str) -> None:
    # Not through a buffer: the kernel's answer is that of this very write.
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
