"""Brokers, workers and commands as real processes, in folders and on ports of their own.

Whatever is started here is ended here, by its own process id. Waiting is always for a condition
with a deadline.
"""

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
from typing import Any

import ekiden

WAIT_S = 30.0
EKIDEN = [sys.executable, "-m", "ekiden.cli.main"]
BROKER_WITH = [sys.executable, str(Path(__file__).with_name("broker_with.py"))]
HANDLERS = str(Path(__file__).with_name("handlers.py"))


def until(holds: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """What `holds` returns as soon as that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.005)
    return found


class Outcome:
    """How a command ended."""

    def __init__(self, code: int, out: bytes, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def error(self) -> dict[str, Any]:
        """The error document that `--json` printed last."""
        for line in reversed(self.err.splitlines()):
            if line.startswith('{"error"'):
                found: dict[str, Any] = json.loads(line)["error"]
                return found
        raise AssertionError(f"no error was printed: {self}")

    @property
    def json(self) -> Any:
        assert self.code == 0, self
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"<exit {self.code}\nstdout: {self.out!r}\nstderr: {self.err}>"


class Child:
    """A process of ours. What it logs goes to a file, so that it never waits for a reader."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def first_line(self) -> dict[str, Any]:
        """The JSON it prints when it is ready."""
        timer = threading.Timer(WAIT_S, self.process.kill)
        timer.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise AssertionError(f"ended with {self.process.wait()}: {self.logged()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and return when it is gone."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = WAIT_S) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.alive:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Site:
    """A folder with a broker's data, a state folder, logs, and all processes started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.address = ""
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EKIDEN_")},
            "EKIDEN_STATE": str(folder / "state"),
            "NO_COLOR": "1",
        }
        self._broker: Child | None = None
        self._children: list[Child] = []
        self._clients: list[ekiden.Client] = []

    def close(self) -> None:
        for client in self._clients:
            client.close(0.0)
        for child in self._children:
            child.close()

    # -------------------------------------------------------------- processes

    @property
    def broker(self) -> Child:
        """The one that was started last."""
        assert self._broker is not None, "no broker was started"
        return self._broker

    def start(self, command: list[str], log: str) -> Child:
        child = Child(command, self.environment, self.folder / f"{log}.log")
        self._children.append(child)
        return child

    def start_broker(
        self, *flags: str, prefix: tuple[str, ...] = (), config: dict[str, Any] | None = None
    ) -> Child:
        """`ekiden broker` on the address it had before, or a new one; returns when it serves.

        With `config`, fields of BrokerConfig that have no flag are set.
        """
        port = self.address.rpartition(":")[2] or "0"
        place = ["--port", port, "--data", str(self.data), "--json"]
        if config:
            fields = {"data": str(self.data), "port": int(port), **config}
            command = [*BROKER_WITH, json.dumps(fields)]
        else:
            command = [*EKIDEN, "broker", *place, *flags]
        self._broker = broker = self.start([*prefix, *command], "broker")
        self.address = broker.first_line()["address"]
        self.environment["EKIDEN_CONNECT"] = self.address
        return broker

    def start_worker(
        self, worker_id: str = "w1", *flags: str, slots: int = 2, handlers: str = HANDLERS
    ) -> Child:
        return self.start(
            [
                *EKIDEN,
                *("worker", "--connect", self.address, "--id", worker_id, "--json"),
                *("--slots", str(slots), "--handlers", handlers, *flags),
            ],
            f"worker-{worker_id}",
        )

    # -------------------------------------------------------------- callers

    def client(self, client_id: str = "tester", **options: Any) -> ekiden.Client:
        """A client in this process; closed with the site."""
        key_file = options.pop("key_file", self.data / "key")
        client = ekiden.Client(self.address, client_id=client_id, key_file=key_file, **options)
        self._clients.append(client)
        return client

    def run(self, *words: str, **environment: str) -> Outcome:
        """One command line, to its end."""
        done = subprocess.run(
            [*EKIDEN, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**self.environment, **environment},
            timeout=WAIT_S * 2,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr.decode())


def wait_workers(client: ekiden.Client, count: int = 1) -> None:
    until(
        lambda: client.connected and client.stats()["workers"]["connected"] == count,
        f"{count} workers to join",
    )
