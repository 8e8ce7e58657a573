"""The keeper process by itself, spoken to over its socket, and what both ends share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.worker.nursery import ENV, TREE, TREE_SIZE, alive, pids_in, which

from ekiden.worker import trees
from ekiden.worker.launch import (
    CELL_BYTES,
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
    decode_orders,
    decode_reports,
    framed,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")

DEADLINE_S = 30.0


class Talk:
    """A keeper of our own, started as an agent does."""

    def __init__(self, folder: Path, *, agent: int | None = None, slots: int = 1) -> None:
        self.folder = folder
        folder.mkdir()
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(DEADLINE_S)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        cell = os.memfd_create("begun")
        os.ftruncate(cell, CELL_BYTES)
        fds = (theirs.fileno(), lock, cell)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ekiden.worker.keeper", *map(str, fds)],
            pass_fds=fds,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()
        os.close(lock)
        os.close(cell)
        self._frames = Frames()
        self.heard: list[Any] = []
        self.say(Setup(agent or os.getpid(), "token", str(folder), slots, Limits()))

    def say(self, *orders: Any) -> None:
        self.socket.sendall(framed(list(orders)))

    def hear(self, kind: type, no: int) -> Any:
        """Wait for this report."""
        while True:
            for report in self.heard:
                if isinstance(report, kind) and report.no == no:
                    return report
            data = self.socket.recv(1 << 16)
            assert data, "the keeper is gone"
            for body in self._frames.feed(data):
                self.heard += decode_reports(body)

    def spawn(self, no: int, *argv: str, **launch: Any) -> None:
        self.say(Spawn(no, Launch(argv=list(argv), path=which(argv[0]), env=ENV, **launch)))

    def close(self) -> None:
        self.socket.close()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Talk]:
    talk = Talk(tmp_path / "keeper")
    yield talk
    talk.close()


def wait_for(pids: Path) -> list[int]:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := pids_in(pids, TREE_SIZE)):
        assert time.monotonic() < deadline
    return found


def test_a_keeper_ends_everything_when_its_socket_closes(keeper: Talk, tmp_path: Path) -> None:
    keeper.spawn(1, sys.executable, "-c", TREE, str(tmp_path / "pids"))
    pids = wait_for(tmp_path / "pids")

    keeper.close()

    assert [pid for pid in pids if alive(pid)] == []
    assert not keeper.folder.exists()
    assert keeper.process.returncode == 0


def test_a_keeper_ends_everything_when_it_is_asked_to_by_signal(
    keeper: Talk, tmp_path: Path
) -> None:
    keeper.spawn(1, sys.executable, "-c", TREE, str(tmp_path / "pids"))
    pids = wait_for(tmp_path / "pids")

    keeper.process.send_signal(signal.SIGTERM)
    keeper.process.wait(DEADLINE_S)

    assert [pid for pid in pids if alive(pid)] == []
    assert not keeper.folder.exists()


def test_a_keeper_is_not_disturbed_by_the_keyboard(keeper: Talk) -> None:
    keeper.spawn(1, "true")
    keeper.hear(Ended, 1)

    keeper.process.send_signal(signal.SIGINT)
    keeper.process.send_signal(signal.SIGHUP)
    keeper.spawn(2, "true")

    assert keeper.hear(Ended, 2).exit_code == 0


def test_a_keeper_whose_agent_is_gone_at_the_start_ends(tmp_path: Path) -> None:
    talk = Talk(tmp_path / "keeper", agent=1 << 30)

    assert talk.process.wait(DEADLINE_S) == 0
    talk.socket.close()


def test_a_keeper_keeps_no_descriptor_open_for_each_child(keeper: Talk) -> None:
    keeper.spawn(1, "true", stdin=b"x")
    keeper.hear(Ended, 1)
    before = len(os.listdir(f"/proc/{keeper.process.pid}/fd"))
    for no in range(2, 30):
        keeper.spawn(no, "sh", "-c", "echo x > file", stdin=b"x")
    keeper.spawn(30, "/no/such/thing")
    keeper.hear(Ended, 29)
    keeper.hear(NotStarted, 30)

    assert len(os.listdir(f"/proc/{keeper.process.pid}/fd")) <= before


def test_a_keeper_leaves_no_zombie(keeper: Talk) -> None:
    keeper.spawn(1, "sh", "-c", "sleep 600 & sleep 600 & exit 0")
    keeper.hear(Ended, 1)

    assert trees.children_of(keeper.process.pid) == []


THREAD = """
import ctypes, os, sys, threading, time
def stay():
    with open(sys.argv[1], "w") as file:
        file.write("x")
    time.sleep(600)
if os.fork() == 0:
    threading.Thread(target=stay).start()
    ctypes.CDLL(None).pthread_exit(None)
while not os.path.exists(sys.argv[1]):
    pass
"""


def test_a_process_that_goes_on_in_a_second_thread_is_ended_too(
    keeper: Talk, tmp_path: Path
) -> None:
    keeper.spawn(1, sys.executable, "-c", THREAD, str(tmp_path / "stays"))

    keeper.hear(Ended, 1)

    assert trees.children_of(keeper.process.pid) == []


def test_a_killed_child_that_waits_says_that_it_never_began(keeper: Talk) -> None:
    keeper.spawn(1, "sleep", "600")
    keeper.hear(Began, 1)
    keeper.spawn(2, "true")
    keeper.spawn(3, "true")

    keeper.say(Kill(2), Recall(3), Kill(99), Recall(99), Recall(1), Kill(1))

    assert keeper.hear(NotStarted, 2).why == "killed"
    assert keeper.hear(NotStarted, 3).why == "recalled"
    assert keeper.hear(Ended, 1).why == "killed"


def test_slots_can_be_changed_while_programs_wait(keeper: Talk) -> None:
    for no in (1, 2, 3):
        keeper.spawn(no, "sleep", "600")
    keeper.hear(Began, 1)

    keeper.say(Slots(3))

    keeper.hear(Began, 2)
    keeper.hear(Began, 3)
    keeper.say(Kill(1), Kill(2), Kill(3))
    for no in (1, 2, 3):
        keeper.hear(Ended, no)


def test_a_fork_bomb_ends_with_its_attempt(keeper: Talk, tmp_path: Path) -> None:
    bomb = (
        "import os, sys\n"
        "out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "for _ in range(6):\n"
        "    os.fork()\n"
        "    os.setsid() if os.getpid() != os.getsid(0) else None\n"
        "os.write(out, b'%d\\n' % os.getpid())\n"
        "import time; time.sleep(600)\n"
    )
    keeper.spawn(1, sys.executable, "-c", bomb, str(tmp_path / "pids"))
    deadline = time.monotonic() + DEADLINE_S
    while not (pids := pids_in(tmp_path / "pids", 64)):
        assert time.monotonic() < deadline

    keeper.say(Kill(1))
    keeper.hear(Ended, 1)

    assert [pid for pid in pids if alive(pid)] == []


def test_frames_are_put_together_from_any_pieces() -> None:
    orders: list[list[Any]] = [[Kill(1), Recall(2)], [], [Spawn(3, Launch(argv=["x" * 300]))]]
    data = b"".join(framed(each) for each in orders)
    frames = Frames()

    heard = [body for at in range(len(data)) for body in frames.feed(data[at : at + 1])]

    assert [decode_orders(body) for body in heard] == orders
    assert [decode_orders(body) for body in Frames().feed(data)] == orders
