"""`make demo`: a grid of real processes, from its first job to a broker that is killed and returns.

Everything lives in a temporary folder, on a free port of this machine, and is gone afterwards.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

JOBS: Final = 20_000
SURVIVORS: Final = 5_000
START_WAIT_S: Final = 30.0
STOP_WAIT_S: Final = 30.0


class Grid:
    """A broker and a worker as processes of their own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self.folder = folder
        self._environment = {
            **os.environ,
            "EKIDEN_STATE": str(folder / "state"),
            "EKIDEN_CONNECT": self.address,
        }
        # The Python part of the demo speaks to the same grid.
        os.environ.update(self._environment)

    def run(self, command: str) -> int:
        """Show a command line and run it."""
        print(f"\n$ {command}", flush=True)
        return subprocess.call(_argv(command), env=self._environment)

    def start(self, command: str, log: str) -> subprocess.Popen[bytes]:
        """Show a command line and start it in the background."""
        print(f"\n$ {command} &", flush=True)
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(_argv(command), env=self._environment, stdout=file, stderr=file)

    def start_broker(self) -> subprocess.Popen[bytes]:
        """Start the broker on its data folder."""
        return self.start(f"ekiden broker --port {self.port} --data {self.folder}/data", "broker")


def _argv(command: str) -> list[str]:
    _, *words = shlex.split(command)
    return [sys.executable, "-m", "ekiden.cli.main", *words]


def main() -> int:
    """Run the demo; 0 if every job had its result."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ekiden-demo-")))
        grid = Grid(folder)
        running: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, running)

        _headline("a grid on this machine: a broker and a worker")
        broker = grid.start_broker()
        running.append(broker)
        running.append(grid.start("ekiden worker --slots 2", "worker"))
        _wait_for_worker()

        _headline("a first job, from the command line")
        failures = grid.run('ekiden submit --wait echo --payload "hello, grid"')

        _headline(f"{JOBS:,} jobs from Python, every result checked")
        failures += _map()

        _headline("a job that fails: the cause of every attempt is kept")
        grid.run("ekiden submit fail --id broken --max-attempts 2 --payload boom")
        failed = grid.run("ekiden wait broken")
        failures += failed != 1
        failures += grid.run("ekiden dlq show broken")

        _headline(f"kill -9 of the broker while {SURVIVORS:,} jobs are open")
        failures += _kill_and_return(grid, broker, running)

        _headline("how the grid is doing")
        failures += grid.run("ekiden stats")

        _headline("stop in good order")
        failures += _stop(running)
        failures += grid.run(f"ekiden log verify {folder}/data")
        print("\ndemo: all jobs have their results" if not failures else "\ndemo: FAILED")
        return 1 if failures else 0


def _headline(text: str) -> None:
    print(f"\n── {text}", flush=True)


def _wait_for_worker() -> None:
    import ekiden

    deadline = time.monotonic() + START_WAIT_S
    # The key appears with the broker, so until then there is nothing to connect with.
    while True:
        try:
            with ekiden.Client() as client:
                client.wait_connected(1.0)
                while not client.stats()["workers"]["connected"]:
                    if time.monotonic() > deadline:
                        raise ekiden.errors.Unreachable("the worker did not join")
                    time.sleep(0.05)
            return
        except ekiden.errors.EkidenError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _map() -> int:
    import ekiden

    inputs = [f"input {number}".encode() for number in range(JOBS)]
    print('>>> with ekiden.Client() as client:\n...     results = client.map("sha256", inputs)')
    begun = time.perf_counter()
    with ekiden.Client() as client:
        outputs = [result.output.decode() for result in client.map("sha256", inputs)]
    spent = time.perf_counter() - begun
    right = sum(
        output == hashlib.sha256(data).hexdigest()
        for output, data in zip(outputs, inputs, strict=True)
    )
    print(f"{right:,} of {JOBS:,} digests are right, in {spent:.1f} s, each job fsynced twice")
    return int(right != JOBS)


def _kill_and_return(
    grid: Grid, broker: subprocess.Popen[bytes], running: list[subprocess.Popen[bytes]]
) -> int:
    import ekiden

    with ekiden.Client() as client:
        payloads = [str(number).encode() for number in range(SURVIVORS)]
        futures = client.submit_many("echo", payloads, run="survivors")
        futures[0].result(START_WAIT_S)
        done = sum(future.done() for future in futures)
        print(f"\n$ kill -9 {broker.pid}      # {done:,} of {SURVIVORS:,} results are here")
        broker.send_signal(signal.SIGKILL)
        broker.wait()
        running.remove(broker)
        running.insert(0, grid.start_broker())
        right = sum(
            future.result(60).output == payload
            for future, payload in zip(futures, payloads, strict=True)
        )
    print(f"{right:,} of {SURVIVORS:,} jobs have their result; client and worker reconnected alone")
    return int(right != SURVIVORS)


def _stop(running: list[subprocess.Popen[bytes]]) -> int:
    """End worker and broker as a person would, the worker first."""
    failures = 0
    for process in reversed(running):
        process.terminate()
        code = process.wait(STOP_WAIT_S)
        print(f"process {process.pid} ended with code {code}")
        failures += code != 0
    running.clear()
    return failures


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
