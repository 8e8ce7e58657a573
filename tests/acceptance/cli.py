"""The command line as real processes, each family of tests in a state folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.acceptance.schemas import Ready, Refused

import ekiden

WAIT_S = 30.0
EKIDEN = [sys.executable, "-m", "ekiden.cli.main"]

T = TypeVar("T")


class Cli:
    """Runs commands against one grid, in a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EKIDEN_")},
            "EKIDEN_STATE": str(folder / "state"),
            "NO_COLOR": "1",
        }
        self.up: subprocess.Popen[str] | None = None
        self.address = ""

    def run(self, *words: str, stdin: bytes = b"", **environment: str) -> Outcome:
        done = subprocess.run(
            [*EKIDEN, *words],
            input=stdin,
            capture_output=True,
            env={**self.environment, **environment},
            timeout=WAIT_S * 2,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr.decode())

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*EKIDEN, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def start_up(self, *words: str, port: str = "0") -> dict[str, Any]:
        """`ekiden up`, until it says that it is ready and its worker has joined."""
        self.up = self.start("up", "--json", "--port", port, "--data", str(self.data), *words)
        ready = read_json(self.up)
        msgspec.convert(ready, Ready)
        self.address = self.environment["EKIDEN_CONNECT"] = str(ready["address"])
        until(lambda: self.look("stats")["workers"]["connected"] == 1, "a worker to join")
        return ready

    def look(self, verb: str, **params: str) -> Any:
        """Ask the broker without a process of its own: for what is asked again and again."""
        address = self.environment["EKIDEN_CONNECT"]
        with ekiden.Client(address, key_file=self.data / "key") as client:
            return client.ask(verb, **params)

    def stop_up(self) -> int:
        assert self.up is not None
        self.up.send_signal(signal.SIGTERM)
        self.up.communicate(timeout=WAIT_S)
        code, self.up = self.up.returncode, None
        return code

    def json(self, *words: str) -> Any:
        outcome = self.run(*words, "--json")
        assert outcome.code == 0, outcome
        return json.loads(outcome.out)

    def typed(self, kind: type[T], *words: str, code: int = 0, stdin: bytes = b"") -> T:
        """What a command prints with --json, if that is what was promised."""
        outcome = self.run(*words, "--json", stdin=stdin)
        assert outcome.code == code, outcome
        return msgspec.json.decode(outcome.out, type=kind)

    def refused(self, *words: str, code: int = 4, stdin: bytes = b"") -> str:
        """The code of the error that a command ends with."""
        outcome = self.run(*words, "--json", stdin=stdin)
        assert outcome.code == code, outcome
        assert "Traceback" not in outcome.err
        return msgspec.json.decode(outcome.err.splitlines()[-1], type=Refused).error.code

    def json_lines(self, *words: str) -> list[Any]:
        outcome = self.run(*words, "--json")
        assert outcome.code == 0, outcome
        return [json.loads(line) for line in outcome.out.splitlines()]


class Outcome:
    def __init__(self, code: int, out: bytes, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.err.splitlines()[-1])["error"]
        return found

    def __repr__(self) -> str:
        return f"<exit {self.code}\nstdout: {self.out!r}\nstderr: {self.err}>"


def read_json(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The first line on stdout, or why there is none."""
    timer = threading.Timer(WAIT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        raise AssertionError(f"ended with {process.wait()}: {process.communicate()[1]}")
    found: dict[str, Any] = json.loads(line)
    return found


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.02)


def clean(cli: Cli) -> None:
    """Leave nothing behind, however the test ended."""
    if cli.up is not None:
        cli.up.kill()
        cli.up.communicate()
