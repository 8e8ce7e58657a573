"""A whole grid on this machine, in the foreground: a broker here, a worker beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from ekiden.cli import options, output
from ekiden.cli.broker import (
    GIB,
    PORT,
    BlobsMax,
    Data,
    Level,
    LogLevel,
    Port,
    data_folder,
    run_broker,
)
from ekiden.cli.worker import Config, Execs, HandlersReference, Services, Slots

RESTART_FIRST_S: Final = 1.0
RESTART_MAX_S: Final = 30.0
STOP_WAIT_S: Final = 25.0  # longer than the worker takes to insist


def up(
    slots: Slots = None,
    port: Port = PORT,
    data: Data = None,
    blobs_max: BlobsMax = 0,
    handlers: HandlersReference = "",
    execs: Execs = None,
    services: Services = None,
    worker_config: Config = None,
    log_level: Level = LogLevel.WARNING,
    as_json: options.Json = False,
) -> int:
    """Start a broker and a worker on this machine.

    It says how to connect and stays in the foreground; Ctrl-C lets running jobs finish and ends
    both. What was accepted is there again when it is started the next time.

    Its worker runs any program and any Python function: only this account can submit, because the
    broker listens on this machine alone and asks for a key that only this account can read.

    \b
    examples:
      $ ekiden up
      # With the handlers of the `worker = ekiden.Worker()` in a file of yours.
      $ ekiden up --slots 8 --handlers price.py
    """
    from ekiden.broker.serve import BrokerWorld
    from ekiden.config import BrokerConfig

    folder = data or data_folder(port)
    offers = [f"--handlers={handlers}"] if handlers else ["--builtin"]
    offers += ["--functions", "--allow-any-program"]
    offers += [f"--exec={each}" for each in execs or ()]
    offers += [f"--service={each}" for each in services or ()]
    offers += [f"--config={worker_config}"] if worker_config is not None else []
    crew = _Sidecar(slots or os.cpu_count() or 1, offers, log_level, as_json)

    class World(BrokerWorld):
        """Stops the worker first, while there is still a broker to take its last results."""

        def stop(self) -> None:
            again = crew.stopping
            if not as_json:
                when = "at once" if again else "when running jobs are done; Ctrl-C again: at once"
                output.say(f"stopping {when}")
            if again:
                crew.kill()
                super().stop()
                return
            end_broker, loop = super().stop, self.driver.loop
            crew.stop(then=lambda: loop.call_soon_threadsafe(end_broker))

    def on_ready(ready: int) -> None:
        crew.start(f"127.0.0.1:{ready}")
        _announce(ready, crew.slots, str(folder), as_json=as_json)

    config = BrokerConfig(data=folder, port=port, blobs_max=int(blobs_max * GIB), on_ready=on_ready)
    try:
        code = run_broker(config, log_level=log_level, as_json=as_json, world_kind=World)
    finally:
        crew.end()
    return crew.usage_error or code


def _announce(port: int, slots: int, folder: str, *, as_json: bool) -> None:
    address = f"127.0.0.1:{port}"
    if as_json:
        output.emit({"ready": True, "address": address, "slots": slots, "data": folder})
        return
    lines = [f"ekiden is up on {address}: {output.count(slots, 'slot')}, data in {folder}"]
    if port != PORT:
        lines.append(f"  first    export EKIDEN_CONNECT={address}")
    lines += [
        "  run      ekiden run wc -c ::: *.txt",
        "  python   ekiden.Executor().map(math.factorial, range(100))",
        "  watch    ekiden stats --watch",
        "  stop     Ctrl-C",
    ]
    print("\n".join(lines), flush=True)


class _Sidecar:
    """The worker process beside the broker: started again if it dies, gone when we are.

    It watches its standard input, a pipe of ours: when this process ends, however it ends, the pipe
    closes and the worker stops.
    """

    def __init__(self, slots: int, offers: list[str], log_level: LogLevel, as_json: bool) -> None:
        self.slots = slots
        self.usage_error = 0
        self._options = ["--slots", str(slots), "--log-level", log_level.value]
        self._options += offers
        self._options += ["--json"] if as_json else []
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None

    @property
    def stopping(self) -> bool:
        """Whether the worker was asked to stop."""
        return self._stopping.is_set()

    def start(self, address: str) -> None:
        """Start the worker and keep it running."""
        self._keeper = threading.Thread(target=self._keep, args=(address,), daemon=True)
        self._keeper.start()

    def stop(self, then: Callable[[], object]) -> None:
        """Let the worker finish what it has begun, in the background, and call `then`."""
        self._stopping.set()

        def finish() -> None:
            self.end()
            then()

        threading.Thread(target=finish, daemon=True).start()

    def kill(self) -> None:
        """End the worker at once; what it was running runs again after the next start."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Return when the worker is gone; one that takes too long is killed."""
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._keeper is not None:
            self._keeper.join(STOP_WAIT_S)

    def _keep(self, address: str) -> None:
        pause_s = RESTART_FIRST_S
        while not self._stopping.is_set():
            self._process = process = self._spawn(address)
            code = process.wait()
            if self._stopping.is_set():
                return
            if code == output.WRONG_USAGE:
                # It has said why; nothing will be different the next time.
                self.usage_error = code
                os.kill(os.getpid(), signal.SIGTERM)
                return
            output.say(f"the worker ended with code {code}; starting it again in {pause_s:g} s")
            self._stopping.wait(pause_s)
            pause_s = min(pause_s * 2, RESTART_MAX_S)

    def _spawn(self, address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ekiden.cli.main", "worker", "--connect", address]
        apart: dict[str, Any] = {"start_new_session": True}  # Ctrl-C is for us to pass on
        return subprocess.Popen(
            [*command, *self._options, "--until-stdin-closes"], stdin=subprocess.PIPE, **apart
        )
