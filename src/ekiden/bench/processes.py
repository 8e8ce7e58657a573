"""Processes of one bench: started, measured and ended by their ids.

A `Child` knows what it has cost so far; a `Crew` ends every child it started, in reverse order and
whatever happened, and removes the folder they worked in. Load processes take one line of JSON per
round on their standard input and answer with one line: so a client lives through a whole bench, and
rounds of different systems can take turns.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

STOP_WAIT_S = 10.0


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
        total = self.rss_bytes()
        for child in psutil.Process(self.pid).children(recursive=True):
            try:
                total += child.memory_info().rss
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
        """kill -9, and wait until it is gone."""
        if self.running():
            self.popen.kill()
        self.popen.wait(STOP_WAIT_S)

    def stop(self) -> None:
        """Ask it to end; insist if it does not."""
        if self.popen.stdin is not None and not self.popen.stdin.closed:
            try:
                self.popen.stdin.close()
            except BrokenPipeError:
                pass
        if self.running():
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(STOP_WAIT_S)
        if self.popen.stdout is not None:
            self.popen.stdout.close()

    def _died(self) -> BenchFailed:
        code = self.popen.wait(STOP_WAIT_S)
        return BenchFailed(f"{self.name} ended with {code}: {self.last_words()}")


class Crew:
    """Children and their scratch folder, gone when the `with` block ends."""

    def __init__(self, *, folder: Path | None = None) -> None:
        self._given = folder
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="ekiden-bench-", dir=self._given))
        # Keys of these brokers belong to this run, not to the user's own state folder.
        self.environment = dict(os.environ, EKIDEN_STATE=str(self.folder / "state"))
        self.environment.pop("EKIDEN_CONNECT", None)
        self.environment.pop("EKIDEN_KEY_FILE", None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in reversed(self._children):
            child.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

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
            )
        child = Child(name, popen, log)
        self._children.append(child)
        return child

    def start_python(self, name: str, *arguments: str | Path, talks: bool = False) -> Child:
        """Start this interpreter with `arguments`."""
        return self.start(name, sys.executable, *arguments, talks=talks)


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
