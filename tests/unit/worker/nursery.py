"""A real keeper with everything it says, and a look at which processes are left."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from ekiden.worker import trees
from ekiden.worker.children import Began, Children, Ended, Launch, NotStarted
from ekiden.world import loop

DEADLINE_S = 30.0

ENV = {"PATH": os.environ.get("PATH", os.defpath)}


class Nursery:
    """Children, and all that was told of them."""

    def __init__(self, children: Children) -> None:
        self.children = children
        self.heard: list[Any] = []
        self._changed = asyncio.Event()

    def told(self, report: Any) -> None:
        self.heard.append(report)
        self._changed.set()

    def spawn(self, *argv: str, sock: socket.socket | None = None, **launch: Any) -> int:
        """Start a program by its absolute path, or by name from PATH."""
        env = {**ENV, **launch.pop("env", {})}
        return self.children.spawn(
            Launch(argv=list(argv), path=which(argv[0]), env=env, **launch), self.told, sock
        )

    def sh(self, script: str, **launch: Any) -> int:
        return self.spawn("sh", "-c", script, **launch)

    def python(self, script: str, *args: str, **launch: Any) -> int:
        return self.spawn(sys.executable, "-c", script, *args, **launch)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until something was told that makes `condition` true."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def began(self, number: int) -> Began:
        return await self._first(number, Began)

    async def ended(self, number: int) -> Ended:
        return await self._first(number, Ended)

    async def not_started(self, number: int) -> NotStarted:
        return await self._first(number, NotStarted)

    async def _first(self, number: int, kind: type) -> Any:
        def found() -> list[Any]:
            return [r for r in self.heard if isinstance(r, kind) and r.no == number]

        await self.until(found)
        return found()[0]

    def order(self, kind: type) -> list[int]:
        return [report.no for report in self.heard if isinstance(report, kind)]


@contextlib.asynccontextmanager
async def nursery(scratch: Path, **options: Any) -> AsyncIterator[Nursery]:
    children = Children(scratch, loop=asyncio.get_running_loop(), **options)
    await children.start()
    try:
        yield Nursery(children)
    finally:
        children.close()


def on_a_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test that is a coroutine, on the loop that agents use."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        loop.run(test(*args, **kwargs))

    return run


def which(name: str) -> str:
    for folder in ENV["PATH"].split(os.pathsep):
        if os.access(path := os.path.join(folder, name), os.X_OK):
            return path
    return name


def alive(pid: int) -> bool:
    """Whether a process runs: one that only waits to be reaped does not."""
    stat = trees.stat_of(pid)
    return stat is not None and stat.state not in "ZX"


async def until(condition: Callable[[], Any]) -> None:
    """Look again and again, for what nobody tells."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def compiled(source: Path, target: Path) -> Path:
    """A C program, by the machine's own compiler."""
    subprocess.run(["cc", "-O1", "-o", str(target), str(source)], check=True)
    return target


def pids_in(path: Path, count: int) -> list[int]:
    """Process numbers that a script wrote, once there are `count` of them."""
    try:
        lines = path.read_text().split("\n")
    except FileNotFoundError:
        return []
    found = [int(line) for line in lines[:-1] if line]
    return found if len(found) >= count else []


# A program whose tree is three deep, with a grandchild in a session of its own and a daemon that
# was forked twice; each writes its process number to the file it is given.
TREE = """
import os, sys, time
out = sys.argv[1]
def note():
    with open(out, "a") as file:
        file.write(f"{os.getpid()}\\n")
def fork(body):
    if os.fork() == 0:
        body()
        os._exit(0)
def stay():
    note()
    time.sleep(600)
def own_session():
    os.setsid()
    stay()
def middle():
    fork(own_session)
    stay()
def daemon():
    os.setsid()
    fork(stay)
fork(middle)
fork(daemon)
stay()
"""
TREE_SIZE = 4
