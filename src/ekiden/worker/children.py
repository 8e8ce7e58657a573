"""The agent's side of the keeper: children are started, ended and heard of through it.

Everything happens on the agent's loop and nothing here waits. What is asked within one turn of the
loop leaves as one frame.

A keeper that dies takes nothing with it but the attempts at hand: what they left running is found
by the marker in its environment and ended, in a thread; then `Ended` with `lost` is told for each,
or `NotStarted` for a program that had not begun, and a new keeper is started. Whatever was asked in
between waits for it, but for what was to run in a folder of the dead one.

`scratch` may be shared by several agents: each keeper works in a folder of its own there and holds
a lock in it for as long as it lives. A folder whose lock can be had is a dead keeper's; whoever
starts next ends what still carries its marker, and wipes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from ekiden.errors import Fault
from ekiden.machine import Log
from ekiden.observe.logs import log_effect
from ekiden.worker import trees
from ekiden.worker.folders import wipe
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
    Setup,
    Slots,
    Spawn,
    decode_reports,
    framed,
)

__all__ = [
    "PROGRAM", "RUNNER", "SERVICE", "Began", "CannotKeep", "Children", "Ended", "Launch", "Limits",
    "NotStarted",
]  # fmt: skip

Told: TypeAlias = Callable[[Began | Ended | NotStarted], None]

# A keeper that dies soon after its start would die again: the next one waits, twice as long every
# time, up to the last number.
RESTART_S: Final = 0.2
RESTART_S_MAX: Final = 30.0
SETTLED_S: Final = 10.0

# After a keeper's death: how long to wait between looks for what it left.
SWEEP_S: Final = 0.005
SWEEP_S_MAX: Final = 0.5

# The agent's end waits this long for a keeper that was told to end: killing takes milliseconds,
# unless a process is held up by a dead disk or network.
CLOSE_S: Final = 5.0

_LOCK: Final = "lock"
_FOLDER_PREFIX: Final = "keeper-"
_RECEIVE_BYTES: Final = 1 << 20


class CannotKeep(Fault):
    """The keeper process cannot be started here."""

    code = "cannot_keep"


class _Open:
    """A child that was asked for and of which the end was not told."""

    __slots__ = ("is_program", "pid", "told")

    def __init__(self, told: Told, *, is_program: bool) -> None:
        self.told = told
        self.is_program = is_program
        self.pid = 0


class Children:
    """All child processes of an agent. To be used from `loop` only."""

    def __init__(
        self,
        scratch: Path,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        slots: int | None = None,
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`slots` programs run at once; every child is held to `limits` and sees `env` beside what
        its `Launch` says."""
        self.scratch = scratch.absolute()
        self._loop = loop or asyncio.get_running_loop()
        self.slots = slots or os.cpu_count() or 1
        self.limits = limits
        self._env = dict(env or {})
        self._next = 1
        self._open: dict[int, _Open] = {}
        self._keeper: _Keeper | None = None
        self._orders: list[Any] = []
        self._flushing = False
        self._sockets: list[socket.socket] = []
        self._ready = asyncio.Event()
        self._restart_s = RESTART_S
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def keeper_pid(self) -> int:
        """The process that keeps the children; 0 while there is none."""
        return self._keeper.process.pid if self._keeper is not None else 0

    @property
    def folder(self) -> str:
        """Where callers may make folders for `Launch.folder`: it is wiped with the keeper."""
        return self._keeper.folder if self._keeper is not None else ""

    def is_current(self) -> bool:
        """Whether everything the keeper has said was told."""
        if self._keeper is None:
            return False
        poll = select.poll()
        poll.register(self._keeper.sock, select.POLLIN)
        return not poll.poll(0)

    async def wait_ready(self) -> None:
        """Until there is a keeper."""
        while self._keeper is None and not self._closed:
            await self._ready.wait()

    # -------------------------------------------------------------- what callers ask

    async def start(self) -> None:
        """Clear up after keepers that died, and start one. Raises CannotKeep."""
        if not sys.platform.startswith("linux"):
            raise CannotKeep(
                f"programs, functions and services cannot run on {sys.platform!r} yet",
                remedy="use a worker on Linux, or handlers",
            )
        await self._loop.run_in_executor(None, _clear_scratch, self.scratch)
        self._start_keeper()

    def set_slots(self, slots: int) -> None:
        """How many programs may run at once from now on."""
        if slots != self.slots:
            self.slots = slots
            self._say(Slots(slots))

    def spawn(self, launch: Launch, told: Told, sock: socket.socket | None = None) -> int:
        """Start `launch`, or have it wait for a slot; returns its number.

        `told` hears `Began` and `Ended`, or `NotStarted`. `sock` goes to the child and is closed
        here.
        """
        if self._env:
            launch = msgspec.structs.replace(launch, env={**launch.env, **self._env})
        number = self._next
        self._next += 1
        self._open[number] = _Open(told, is_program=launch.wiring == PROGRAM)
        if sock is not None:
            self._sockets.append(sock)
        self._say(Spawn(number, launch, sock is not None))
        return number

    def kill(self, number: int) -> None:
        """End it and all it has started. Its `Ended` (or `NotStarted`) comes when that is done."""
        if number in self._open:
            self._say(Kill(number))

    def recall(self, number: int) -> None:
        """If it has not begun, it never will, and `NotStarted` with "recalled" is told; otherwise
        nothing happens."""
        if number in self._open:
            self._say(Recall(number))

    def close(self) -> None:
        """End the keeper and with it everything it keeps. Nothing more is told."""
        if self._closed:
            return
        self._closed = True
        self._open.clear()
        self._ready.set()
        for task in self._tasks:
            task.cancel()
        for sock in self._sockets:
            sock.close()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._loop.remove_reader(keeper.sock)
            self._loop.remove_writer(keeper.sock)
            keeper.close()

    # -------------------------------------------------------------- the keeper's life

    def _start_keeper(self) -> None:
        try:
            keeper = self._keeper = _Keeper(self.scratch, self.slots, self.limits)
        except OSError as error:
            raise CannotKeep(
                f"the keeper of programs cannot be started in {str(self.scratch)!r}: {error}",
                remedy="choose a scratch folder that this account may write to",
            ) from error
        self._loop.add_reader(keeper.sock, self._read, keeper)
        self._ready.set()
        self._flush_soon()

    def _lost(self, keeper: _Keeper) -> None:
        """The keeper's socket closed without our doing."""
        self._loop.remove_reader(keeper.sock)
        self._loop.remove_writer(keeper.sock)
        keeper.hang_up()
        self._keeper = None
        self._ready.clear()
        # What it had been told is lost with it, and so is every folder; the rest is still here, and
        # waits.
        self._orders = [
            order
            for order in self._orders
            if not isinstance(order, Spawn) or not order.launch.folder
        ]
        unsaid = {order.no for order in self._orders if isinstance(order, Spawn)}
        lost = [number for number in self._open if number not in unsaid]
        task = self._loop.create_task(self._recover(keeper, lost), name="keeper-lost")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _recover(self, keeper: _Keeper, lost: list[int]) -> None:
        pids = {self._open[number].pid for number in lost if self._open[number].pid}
        said = await self._loop.run_in_executor(None, _clear_after, keeper, pids)
        facts = {"status": keeper.process.returncode, "attempts": len(lost), "said": said}
        log_effect(Log("warning", "keeper.lost", facts))
        for number in lost:
            entry = self._open.pop(number, None)
            if entry is not None and entry.is_program and number > keeper.last_begun:
                entry.told(NotStarted(number, "lost"))
            elif entry is not None:
                entry.told(Ended(number, clean=True, lost=True))
        if time.monotonic() - keeper.started > SETTLED_S:
            self._restart_s = RESTART_S
        while not self._closed and self._keeper is None:
            await asyncio.sleep(self._restart_s)
            self._restart_s = min(self._restart_s * 2, RESTART_S_MAX)
            try:
                self._start_keeper()
            except CannotKeep as error:
                log_effect(Log("error", "keeper.cannot_start", {"why": str(error)}))

    # -------------------------------------------------------------- the conversation

    def _say(self, order: Any) -> None:
        if self._closed:
            return
        self._orders.append(order)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing and self._orders and self._keeper is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        keeper = self._keeper
        if keeper is None or not self._orders:
            return
        orders, self._orders = self._orders, []
        sockets, self._sockets = self._sockets, []
        keeper.add(orders, sockets)
        self._write(keeper)

    def _write(self, keeper: _Keeper) -> None:
        try:
            more = keeper.send()
        except OSError:
            return  # It is gone: the reader finds out.
        if more:
            self._loop.add_writer(keeper.sock, self._write, keeper)
        elif keeper.writing:
            self._loop.remove_writer(keeper.sock)
        keeper.writing = more

    def _read(self, keeper: _Keeper) -> None:
        try:
            data = keeper.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(keeper)
            return
        for body in keeper.frames.feed(data):
            for report in decode_reports(body):
                self._heard(report)

    def _heard(self, report: Began | Ended | NotStarted) -> None:
        entry = self._open.get(report.no)
        if entry is None:
            return
        if isinstance(report, Began):
            entry.pid = report.pid
        else:
            del self._open[report.no]
        entry.told(report)


class _Keeper:
    """One keeper process and the socket to it."""

    def __init__(self, scratch: Path, slots: int, limits: Limits) -> None:
        self.started = time.monotonic()
        self.frames = Frames()
        self.writing = False
        self._outbox: list[tuple[bytes, list[socket.socket]]] = []
        token = secrets.token_hex(12)
        self.marker = b"\0%b=%b:" % (MARKER.encode(), token.encode())
        folder = scratch / f"{_FOLDER_PREFIX}{token}"
        self.folder = str(folder)
        with _locked(scratch / _LOCK):
            folder.mkdir(mode=0o700)
            lock = _take_lock(folder / _LOCK)
        assert lock is not None
        cell = os.memfd_create("ekiden-begun")
        os.ftruncate(cell, CELL_BYTES)
        self._cell = memoryview(mmap.mmap(cell, CELL_BYTES)).cast("Q")
        self.sock, theirs = socket.socketpair()
        fds = (theirs.fileno(), lock, cell)
        try:
            with (folder / "keeper.err").open("wb") as said:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ekiden.worker.keeper", *map(str, fds)],
                    env=_keeper_env(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    pass_fds=fds,
                    start_new_session=True,
                )
        except OSError:
            self.sock.close()
            raise
        finally:
            # From here on the keeper holds the lock, and the socket's other end, alone.
            theirs.close()
            os.close(lock)
            os.close(cell)
        self.sock.setblocking(False)
        self.add([Setup(os.getpid(), token, self.folder, slots, limits)], [])

    @property
    def last_begun(self) -> int:
        """The number of the program that was started last."""
        return self._cell[0]

    def add(self, orders: list[Any], sockets: list[socket.socket]) -> None:
        """Say these, in order. Sockets travel with the frame of their child, one in each."""
        if not sockets:
            self._outbox.append((framed(orders), []))
            return
        waiting = iter(sockets)
        plain: list[Any] = []
        for order in orders:
            if isinstance(order, Spawn) and order.sock:
                if plain:
                    self._outbox.append((framed(plain), []))
                    plain = []
                self._outbox.append((framed([order]), [next(waiting)]))
            else:
                plain.append(order)
        if plain:
            self._outbox.append((framed(plain), []))

    def send(self) -> bool:
        """Send as much as the socket takes; True if something is left."""
        while self._outbox:
            frame, sockets = self._outbox[0]
            try:
                if sockets:
                    sent = socket.send_fds(self.sock, [frame], [s.fileno() for s in sockets])
                    for sock in sockets:
                        sock.close()
                else:
                    sent = self.sock.send(frame)
            except BlockingIOError:
                return True
            if sent < len(frame):
                self._outbox[0] = (frame[sent:], [])
            else:
                del self._outbox[0]
        return False

    def hang_up(self) -> None:
        """Close the socket, and those that were to go through it."""
        self.sock.close()
        for _, sockets in self._outbox:
            for sock in sockets:
                sock.close()

    def close(self) -> None:
        """Close the socket, upon which it ends everything, and wait for that."""
        self.hang_up()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            facts = {"pid": self.process.pid}
            log_effect(Log("warning", "keeper.slow", {**facts, "then": "it is left to itself"}))


def _keeper_env() -> dict[str, str]:
    """What the interpreter needs to find us. Nothing of it reaches a child."""
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME"):
        if name in os.environ:
            env[name] = os.environ[name]
    return env


# ------------------------------------------------------------------ after a keeper's death


def _clear_after(keeper: _Keeper, pids: set[int]) -> str:
    """End whatever the dead keeper left, and wipe its folder; returns its last words."""
    keeper.process.wait()
    _end_marked(keeper.marker, pids)
    said = b""
    with contextlib.suppress(OSError):
        said = Path(keeper.folder, "keeper.err").read_bytes()[-500:]
    wipe(keeper.folder)
    return said.decode(errors="replace")


def _end_marked(marker: bytes, sessions: set[int]) -> None:
    pause_s = SWEEP_S
    while left := trees.marked(marker, sessions):
        trees.strike(left)
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, SWEEP_S_MAX)


def _clear_scratch(scratch: Path) -> None:
    """End and remove what keepers that died left in `scratch`."""
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(scratch / _LOCK):
        for folder in scratch.glob(f"{_FOLDER_PREFIX}*"):
            lock = _take_lock(folder / _LOCK)
            if lock is None:
                continue  # Its keeper lives.
            try:
                token = folder.name.removeprefix(_FOLDER_PREFIX)
                _end_marked(f"\0{MARKER}={token}:".encode(), set())
                if not wipe(str(folder)):
                    facts = {"folder": str(folder)}
                    log_effect(Log("warning", "scratch.stuck", facts))
            finally:
                os.close(lock)


def _take_lock(path: Path) -> int | None:
    """The lock at `path`, as a descriptor to close; None if somebody has it."""
    import fcntl

    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


@contextlib.contextmanager
def _locked(path: Path) -> Any:
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
