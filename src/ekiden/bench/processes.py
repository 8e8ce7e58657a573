"""Processes of one bench: started, measured and ended by their ids.

A `Child` knows what it has cost so far; a `Crew` ends every child it started and what those
started, whatever happened (Ctrl-C and SIGTERM too), and removes the folder they worked in. Load
processes take one line of JSON per round on their standard input and answer with one line: so a
client lives through a whole bench, and rounds of different systems can take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

STOP_WAIT_S = 10.0

# Loaded before the fork: a child of a fork should do as little as possible.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class BenchFailed(Exception):
    """A process of the bench died or did not answer; the text says which, and its last words."""


class Child:
    """One process, its log, and what it has cost."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.popen = popen
        self.log = log
        self.pid = popen.pid
        self._unread = b""

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, without its children."""
        try:
            # The process's CPU clock counts nanoseconds; the figures in /proc count ticks of 10 ms.
            return time.clock_gettime_ns((~self.pid << 3) | 2) / 1e9
        except OSError:
            spent = psutil.Process(self.pid).cpu_times()
            return float(spent.user + spent.system)

    def rss_bytes(self) -> int:
        """Resident memory of the process, without its children."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def family_rss_bytes(self) -> int:
        """Resident memory of the process and its children, as far as they are still there."""
        total = 0
        for process in self._family():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        try:
            return self.log.read_text(errors="replace")[-2000:].strip()
        except OSError:
            return ""

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.popen.poll() is None

    def tell(self, message: dict[str, Any]) -> None:
        """Send one line of JSON to its standard input."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(message).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Its next line of JSON on standard output; `BenchFailed` if it dies or says nothing."""
        assert self.popen.stdout is not None
        descriptor = self.popen.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0:
                raise BenchFailed(f"{self.name} said nothing for {timeout_s:.0f} s")
            ready, _, _ = select.select([descriptor], [], [], left)
            if ready:
                more = os.read(descriptor, 65536)
                if not more:
                    raise self._died()
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, message: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
        """Tell and hear."""
        self.tell(message)
        return self.hear(timeout_s)

    def kill(self) -> None:
        """kill -9, and wait until it is gone. What it started may live on, as after a crash."""
        if self.running():
            self.popen.kill()
        self.popen.wait(STOP_WAIT_S)

    def stop(self, wait_s: float = STOP_WAIT_S) -> None:
        """Ask it to end in good order; `BenchFailed` if it does not within `wait_s`."""
        if self.running():
            self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(wait_s)
        except subprocess.TimeoutExpired:
            raise BenchFailed(f"{self.name} did not end within {wait_s:.0f} s") from None

    def end(self) -> None:
        """End it and all it started, at once. What it wrote is about to be removed anyway."""
        family = self._family()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.popen.wait(STOP_WAIT_S)
        psutil.wait_procs(family[1:], STOP_WAIT_S)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _family(self) -> list[psutil.Process]:
        """The process and its descendants; nobody, if it has ended."""
        if not self.running():
            return []
        try:
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _died(self) -> BenchFailed:
        code = self.popen.wait(STOP_WAIT_S)
        return BenchFailed(f"{self.name} ended with {code}: {self.last_words()}")


class Crew:
    """Children and their scratch folder, gone when the `with` block ends."""

    def __init__(self, *, folder: Path | None = None) -> None:
        self._given = folder
        self._children: list[Child] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="ekiden-bench-", dir=self._given))
        # Keys of these brokers belong to this run, not to the user's own state folder.
        self.environment = dict(os.environ, EKIDEN_STATE=str(self.folder / "state"))
        self.environment.pop("EKIDEN_CONNECT", None)
        self.environment.pop("EKIDEN_KEY_FILE", None)
        self._catch(signal.SIGTERM, _interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An impatient second Ctrl-C must not leave processes behind: this takes a moment only.
        self._catch(signal.SIGINT, signal.SIG_IGN)
        self._catch(signal.SIGTERM, signal.SIG_IGN)
        try:
            for child in reversed(self._children):
                child.end()
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _catch(self, number: int, handler: Any) -> None:
        """Only the main thread may; a bench in another one is ended by whoever runs it."""
        if threading.current_thread() is threading.main_thread():
            self._before.setdefault(number, signal.signal(number, handler))

    def start(self, name: str, *command: str | Path, talks: bool = False) -> Child:
        """Start `command`; with `talks`, its standard input and output are ours."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as sink:
            popen = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else sink,
                stderr=sink,
                env=self.environment,
                cwd=self.folder,
                # Ctrl-C of the terminal is for the bench, which ends its children itself.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        child = Child(name, popen, log)
        self._children.append(child)
        return child

    def start_python(self, name: str, *arguments: str | Path, talks: bool = False) -> Child:
        """Start this interpreter with `arguments`."""
        return self.start(name, sys.executable, *arguments, talks=talks)


def _die_with_parent() -> None:
    """A bench that is killed cannot clean up: the kernel ends its children then."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def wait_until(child: Child, what: str, timeout_s: float, check: Any) -> Any:
    """The first true answer of `check()`; `BenchFailed` if `child` dies or time runs out first."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = check()
        if answer:
            return answer
        if not child.running():
            raise BenchFailed(f"{child.name} ended before {what}: {child.last_words()}")
        if time.monotonic() > deadline:
            raise BenchFailed(f"no {what} from {child.name} in {timeout_s:.0f} s")
        time.sleep(0.01)
