"""The keeper: one process per agent that starts, watches, ends and reaps every child.

It is a process of its own because the agent cannot be one: an agent has threads, a loop that must
not wait for `exec`, secrets in its memory, and it may be killed. The keeper has none of these. It
is the reaper of whatever its children leave behind, so nothing they start can slip away from it,
and it ends all of that when the agent's socket closes, however that came about.

Its rules:

- One thread. The working folder is set before a child is started, which is safe only because
  nobody else can look in between.
- `Ended` is said when nothing of a child's tree is left, not when its first process is gone.
- Programs wait here for a slot, so that the next one starts without asking the agent.
- Per job a handful of system calls: what can be set once is set once and inherited.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any, Final

from ekiden.worker import trees
from ekiden.worker.cgroups import MemoryGroup, MemoryGroups, find_memory_groups
from ekiden.worker.launch import (
    CELL_BYTES,
    MARKER,
    PROGRAM,
    RUNNER,
    SERVICE,
    Began,
    Ended,
    Frames,
    Kill,
    Launch,
    Limits,
    NotStarted,
    Recall,
    Report,
    Setup,
    Slots,
    Spawn,
    decode_orders,
    framed,
)
from ekiden.worker.rooms import Room, take_output
from ekiden.worker.strays import Strays

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_CHILD_SUBREAPER: Final = 36

# How often memory is looked at. A program fills about a gigabyte in this time at worst.
WATCH_NS: Final = 100_000_000

# How long to wait for killed processes before looking again: most are gone at once, and those of
# our own children wake us. Doubled up to the second number for what does not want to die.
PATIENCE_MS: Final = 1
PATIENCE_MS_MAX: Final = 50

# How long reports wait for others while the agent has nothing to do with them anyway.
HOLD_NS: Final = 2_000_000

# Descriptors of the keeper itself, two for every child it may have at once.
OPEN_FILES: Final = 8192

# If memory runs out all the same, the kernel shall choose a job, not the agent: it adds this many
# thousandths of the machine's memory to what our children use.
_OOM_SCORE: Final = "300"

_RECEIVE_BYTES: Final = 256 << 10
_SOCKETS_MAX: Final = 64


class _Child:
    """Something that was started and of which something may still run."""

    __slots__ = ("began", "doomed", "ended", "group", "launch", "no", "peak_kb", "pid", "room",
                 "status", "usage")  # fmt: skip

    def __init__(self, no: int, launch: Launch, pid: int, room: Room) -> None:
        self.no = no
        self.launch = launch
        self.pid = pid
        self.room = room
        self.began = time.monotonic_ns()
        self.ended = 0
        self.status: int | None = None
        """How its first process ended; None while that runs."""
        self.usage: resource.struct_rusage | None = None
        self.peak_kb = 0
        self.group: MemoryGroup | None = None
        self.doomed = ""
        """Why it is being ended: "killed" or "oom"."""


class Keeper:
    """The keeper's state and its loop."""

    def __init__(self, control: socket.socket, setup: Setup, wake: int, cell: memoryview) -> None:
        self._control = control
        self._cell = cell
        self._frames = Frames()
        self._sockets: deque[int] = deque()
        self._begun: dict[int, Report] = {}
        self._reports: list[Report] = []
        self._reports_since = 0
        """Since when something is to be said."""
        self._urgent = False
        self._outbox = bytearray()
        self._wake = wake
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(wake, select.POLLIN)
        self.closing = False

        self._folder = setup.folder
        self._marker = f"{setup.token}:"
        self._slots = setup.slots
        few = setup.limits.open_files < OPEN_FILES
        self._own_limits = Limits(setup.limits.open_files, 0, 0, 0) if few else None
        """What every child must be told because it does not inherit it."""
        self._queue: deque[Spawn] = deque()
        self._queued: set[int] = set()
        self._programs = 0
        self._rooms: list[Room] = []
        self._used_rooms: list[Room] = []
        """As good as new, once the end of their last child was said."""
        self._room_no = 0

        self._children: dict[int, _Child] = {}
        self._by_pid: dict[int, _Child] = {}
        """By first process, until that has been reaped."""
        self._ending: dict[int, _Child] = {}
        """Whose first process has ended, or that are being killed."""
        self._strays = Strays(setup.token)
        self._watched: dict[int, _Child] = {}
        self._watch_at = 0
        self._groups: list[MemoryGroups | None] = []
        """Where control groups are made, if they can be; empty until a child needs one."""
        self._patience = PATIENCE_MS
        self._null = os.open(os.devnull, os.O_RDWR)
        self._ignored = [
            number
            for number in signal.valid_signals()
            if signal.getsignal(number) is signal.SIG_IGN
        ]

    # -------------------------------------------------------------- the loop

    def run(self) -> None:
        """Until the agent is gone."""
        while not self.closing:
            for fd, _ in self._poll.poll(self._wait_ms()):
                if fd == self._wake:
                    _drain(fd)
                else:
                    self._receive()
            self._turn()

    def _turn(self) -> None:
        self._reap()
        finished = self._settle() if self._ending or self._strays.unclaimed else []
        # The next ones first: a free slot is worth more than the news of an old one.
        self._start_waiting()
        for child in finished:
            self._report_end(child)
        if self._watched:
            self._watch()
        self._flush()

    def _wait_ms(self) -> int | None:
        waits: list[int] = []
        if self._ending or self._strays.nobodys():
            waits.append(self._patience)
            self._patience = min(self._patience * 2, PATIENCE_MS_MAX)
        if self._reports_since:
            waits.append(HOLD_NS // 1_000_000)
        if self._watched:
            waits.append(max((self._watch_at - time.monotonic_ns()) // 1_000_000, 0) + 1)
        return min(waits) if waits else None

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _RECEIVE_BYTES, _SOCKETS_MAX)
        except BlockingIOError:
            return  # It was about room to send.
        except OSError:
            self.closing = True
            return
        for fd in fds:
            os.set_inheritable(fd, False)
        self._sockets += fds
        if not data:
            self.closing = True
        for body in self._frames.feed(data):
            for order in decode_orders(body):
                self._obey(order)

    def _obey(self, order: Any) -> None:
        match order:
            case Spawn():
                if order.launch.wiring == PROGRAM:
                    self._queue.append(order)
                    self._queued.add(order.no)
                else:
                    self._start(order)
            case Kill():
                self._kill(order.no)
            case Recall():
                if order.no in self._queued:
                    self._unqueue(order.no, "recalled")
            case Slots():
                self._slots = order.slots
            case _:
                raise AssertionError(f"not an order for a keeper at work: {order!r}")

    def _may_hold(self) -> bool:
        """While programs wait for a slot the agent is in no hurry: every time it is woken, it takes
        a processor away from them."""
        if not self._queue or self._urgent:
            return False
        now = time.monotonic_ns()
        self._reports_since = self._reports_since or now
        return now - self._reports_since < HOLD_NS

    def _flush(self) -> None:
        if self._reports or self._begun:
            if self._may_hold():
                return
            self._outbox += framed([*self._begun.values(), *self._reports])
            self._begun = {}
            self._reports = []
            self._reports_since = 0
            self._urgent = False
            # Not before: whoever reads a room's files for a child must hear of its end before
            # another one writes to them.
            self._rooms += self._used_rooms
            self._used_rooms = []
        elif not self._outbox:
            return
        try:
            sent = self._control.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.closing = True
            return
        del self._outbox[:sent]
        wanted = select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN
        self._poll.modify(self._control, wanted)

    # -------------------------------------------------------------- starting

    def _unqueue(self, no: int, why: str) -> None:
        self._queued.discard(no)
        self._reports.append(NotStarted(no, why))
        self._urgent = True
        self._queue = deque(spawn for spawn in self._queue if spawn.no != no)

    def _start_waiting(self) -> None:
        queue = self._queue
        while queue and self._programs < self._slots:
            spawn = queue.popleft()
            self._queued.discard(spawn.no)
            self._cell[0] = spawn.no  # They come and go in order: none beyond it has begun.
            self._start(spawn)

    def _start(self, spawn: Spawn) -> None:
        launch = spawn.launch
        sock = self._sockets.popleft() if spawn.sock else -1
        room: Room | None = None
        try:
            room = self._take_room()
            pid = self._exec(spawn.no, launch, room, sock)
        except (OSError, ValueError) as error:
            self._reports.append(_refusal(spawn.no, error))
            self._urgent = True
            if room is not None:
                self._rooms.append(room)
            return
        finally:
            if sock >= 0:
                os.close(sock)
        child = _Child(spawn.no, launch, pid, room)
        self._children[spawn.no] = self._by_pid[pid] = child
        self._strays.add(spawn.no, pid)
        if launch.wiring == PROGRAM:
            self._programs += 1
        else:
            self._urgent = True
        if launch.mem_mb:
            child.group = self._group_of(child)
            self._watched[spawn.no] = child
            self._watch_at = self._watch_at or child.began + WATCH_NS
        folder = launch.folder or room.path
        began = Began(spawn.no, pid, child.began, folder, room.out_path, room.err_path)
        self._begun[spawn.no] = began

    def _exec(self, no: int, launch: Launch, room: Room, sock: int) -> int:
        folder = launch.folder or room.path
        # The marker comes first, so that no length of the others can hide it.
        env = {MARKER: f"{self._marker}{no}", **launch.env, "HOME": folder, "TMPDIR": folder}
        stdin = self._stdin_of(launch)
        source, out = stdin, room.out
        if launch.wiring == SERVICE:
            source = out = sock
        actions: list[Any] = [
            (os.POSIX_SPAWN_DUP2, source, 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, room.err, 2),
        ]
        if launch.wiring == RUNNER:
            actions.append((os.POSIX_SPAWN_DUP2, sock, 3))
        try:
            try:
                os.chdir(folder)
            except OSError as error:
                raise ValueError(f"its folder cannot be entered: {error.strerror}") from error
            pid = os.posix_spawn(
                launch.path or launch.argv[0],
                launch.argv,
                env,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=self._ignored,
            )
        finally:
            if stdin != self._null:
                os.close(stdin)
        if launch.limits is not None:
            _limit(pid, launch.limits)
        elif self._own_limits is not None:
            _limit(pid, self._own_limits)
        return pid

    def _stdin_of(self, launch: Launch) -> int:
        if launch.stdin_file:
            return os.open(launch.stdin_file, os.O_RDONLY | os.O_NOFOLLOW)
        if not launch.stdin:
            return self._null
        fd = os.memfd_create("stdin")
        os.write(fd, launch.stdin)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def _take_room(self) -> Room:
        if self._rooms:
            return self._rooms.pop()
        self._room_no += 1
        return Room(f"{self._folder}/r{self._room_no}")

    # -------------------------------------------------------------- ending

    def _kill(self, no: int) -> None:
        if no in self._queued:
            self._unqueue(no, "killed")
        elif (child := self._children.get(no)) is not None:
            self._doom(child, "killed")

    def _doom(self, child: _Child, why: str) -> None:
        if child.status is None and not child.doomed:
            child.doomed = why
        self._ending[child.no] = child
        self._patience = PATIENCE_MS

    def _reap(self) -> None:
        """Take note of everything that has ended, ours and what was left to us."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._by_pid.pop(pid, None)
            if child is not None:
                child.ended = time.monotonic_ns()
                child.status = status
                child.usage = usage
                self._ending[child.no] = child
                self._patience = PATIENCE_MS

    def _settle(self) -> list[_Child]:
        """Strike what is left of those that are ending; returns those of which nothing is."""
        strays = self._strays.find(self._by_pid)
        finished: list[_Child] = []
        for child in list(self._ending.values()):
            left = self._left_of(child, strays)
            if left:
                trees.strike(left)
            else:
                self._forget(child)
                finished.append(child)
        for pid in self._strays.nobodys():
            trees.strike(trees.tree_of([pid]))
        return finished

    def _left_of(self, child: _Child, strays: dict[int, int | None]) -> list[int]:
        roots = [pid for pid, no in strays.items() if no == child.no]
        if child.status is None:
            roots.append(child.pid)
            with contextlib.suppress(OSError):
                found = trees.tree_of(roots)
                self._strays.claim(child.no, found)
                # All of a group at once: no fork can slip through.
                os.killpg(child.pid, signal.SIGKILL)
                return found
        if not roots:
            return []
        found = trees.tree_of(roots)
        self._strays.claim(child.no, found)
        return found

    def _forget(self, child: _Child) -> None:
        del self._ending[child.no]
        del self._children[child.no]
        self._strays.forget(child.no, child.pid)
        self._watched.pop(child.no, None)
        if child.launch.wiring == PROGRAM:
            self._programs -= 1

    # -------------------------------------------------------------- memory

    def _group_of(self, child: _Child) -> MemoryGroup | None:
        """The kernel's own limit, where that can be had; we look ourselves all the same."""
        if not self._groups:
            self._groups.append(find_memory_groups(self._marker.rstrip(":")))
        groups = self._groups[0]
        group = groups.make(child.no, child.launch.mem_mb) if groups is not None else None
        if group is not None:
            group.add(child.pid)
        return group

    def _watch(self) -> None:
        now = time.monotonic_ns()
        if now < self._watch_at:
            return
        self._watch_at = now + WATCH_NS
        strays = self._strays.find(self._by_pid)
        for child in self._watched.values():
            if child.doomed or child.status is not None:
                continue
            roots = [child.pid, *(pid for pid, no in strays.items() if no == child.no)]
            tree = trees.tree_of(roots)
            used = trees.resident_kb(tree)
            if used > child.launch.mem_mb << 10 and len(tree) > 1:
                # Processes that were forked share most of their pages.
                used = trees.proportional_kb(tree)
            child.peak_kb = max(child.peak_kb, used)
            if used > child.launch.mem_mb << 10:
                self._doom(child, "oom")

    # -------------------------------------------------------------- reports

    def _report_end(self, child: _Child) -> None:
        assert child.status is not None
        assert child.usage is not None
        code = os.waitstatus_to_exitcode(child.status)
        room = child.room
        stdout = take_output(room.out)
        stderr = take_output(room.err)
        own = not child.launch.folder
        clean = own and room.is_empty()
        if stdout is not None and stderr is not None and (clean or not own):
            self._used_rooms.append(room)
        else:
            room.close(keep_out=stdout is None, keep_err=stderr is None)
        usage = child.usage
        why = child.doomed if code == -signal.SIGKILL else ""
        if child.group is not None:
            # The kernel may have ended another process of the tree than the first.
            why = "oom" if code and child.group.was_oom() else why
            child.group.remove()
        if child.launch.wiring == PROGRAM:
            self._begun.pop(child.no, None)  # It is over: nobody needs to hear that it began.
        else:
            self._urgent = True
        self._reports.append(
            Ended(
                child.no,
                max(code, 0),
                max(-code, 0),
                why,
                int((usage.ru_utime + usage.ru_stime) * 1e9),
                max(usage.ru_maxrss, child.peak_kb),
                child.ended - child.began,
                stdout,
                stderr,
                clean,
                "" if clean else child.launch.folder or room.path,
                "" if stdout is not None else room.out_path,
                "" if stderr is not None else room.err_path,
            )
        )

    def end_everything(self) -> None:
        """SIGKILL to all that descends from us, until nothing is left."""
        while True:
            self._reap_quietly()
            left = trees.tree_of(trees.children_of(os.getpid()))
            if not left:
                break
            trees.strike(left)
            self._poll.poll(PATIENCE_MS)
        for child in self._children.values():
            if child.group is not None:
                child.group.remove()
        for groups in self._groups:
            if groups is not None:
                groups.close()

    def _reap_quietly(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.wait4(-1, os.WNOHANG)[0]:
                pass


def _refusal(no: int, error: OSError | ValueError) -> NotStarted:
    """What the system said; or, with no number, what is wrong with what it was to be asked."""
    if isinstance(error, OSError) and error.errno:
        return NotStarted(no, os.strerror(error.errno), error.errno)
    return NotStarted(no, f"it could not be started: {error}")


def _limit(pid: int, limits: Limits) -> None:
    """These limits for a process that may already run, as far as they are lower than its own."""
    for which, value in _resources(limits):
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.prlimit(pid, which)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(pid, which, (value, value))


def _resources(limits: Limits) -> list[tuple[int, int]]:
    wanted = [
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
    ]
    return [(which, value) for which, value in wanted if value]


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)


def _confine(setup: Setup) -> None:
    """What every child shall inherit, and that this process ends with its agent."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The socket tells as much, unless something the agent forked still holds its other end.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != setup.agent:
        raise SystemExit(0)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of processor time and descriptors this process needs more than a child may have.
    files = max(setup.limits.open_files, OPEN_FILES)
    _limit(0, Limits(files, setup.limits.processes, setup.limits.file_bytes, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)


def _setup_of(control: socket.socket) -> Setup:
    """The first frame holds nothing else."""
    size = int.from_bytes(_exactly(control, 4), "big")
    (setup,) = decode_orders(_exactly(control, size))
    assert isinstance(setup, Setup)
    return setup


def _exactly(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = control.recv(size - len(data))
        if not part:
            raise SystemExit(0)
        data += part
    return data


def main() -> None:
    """Run as `python -m ekiden.worker.keeper` with descriptors: of the socket, of the folder's lock
    and of the cell."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for fd in sys.argv[1:4]:
        os.set_inheritable(int(fd), False)
    cell = memoryview(mmap.mmap(int(sys.argv[3]), CELL_BYTES)).cast("Q")
    os.close(int(sys.argv[3]))
    setup = _setup_of(control)
    _confine(setup)
    control.setblocking(False)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    keeper = Keeper(control, setup, wake, cell)

    def stop(_number: int, _frame: Any) -> None:
        keeper.closing = True

    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.signal(signal.SIGTERM, stop)
    try:
        keeper.run()
    finally:
        keeper.end_everything()
        os.chdir("/")
        from ekiden.worker.folders import wipe

        wipe(setup.folder)


if __name__ == "__main__":
    main()
