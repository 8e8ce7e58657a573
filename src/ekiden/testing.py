"""A whole grid in one process, for tests of your own.

    import ekiden.testing

    def test_doubling():
        with ekiden.testing.grid(slots=2) as grid:

            @grid.worker.handler("job.assign.double")
            def double(job):
                return 2 * job.json()

            assert grid.client.submit("double", payload=21).result(10).json() == 42

It is the real broker, worker and client, on a port of the system's choice and in a temporary
folder; nothing of the user's is read or written. With pytest, make it a fixture:

    @pytest.fixture
    def grid():
        with ekiden.testing.grid(slots=2) as grid:
            grid.worker.include(my_package.handlers)
            yield grid

Code under test that makes its own `ekiden.Client()` finds the grid by `grid.environment`:

    for name, value in grid.environment.items():
        monkeypatch.setenv(name, value)
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from ekiden.broker.recovery import Opened
from ekiden.broker.serve import BrokerWorld
from ekiden.client.aio import AsyncClient
from ekiden.client.blocking import Client
from ekiden.config import SYNC_NEVER, BrokerConfig
from ekiden.core.commands import Settings
from ekiden.errors import Closed, Fault
from ekiden.limits import NS
from ekiden.worker.handlers import Handlers
from ekiden.worker.offers import Offers
from ekiden.worker.serve import Worker
from ekiden.world.disk import FolderStorage
from ekiden.world.keys import ENV_KEY_FILE, KEY_FILE, make_broker_key
from ekiden.world.loop import run

START_S: Final = 20.0
STOP_S: Final = 10.0

# A test should see a retry at once; a grid that serves people waits a second.
BACKOFF_S: Final = 0.01

F = TypeVar("F", bound=Callable[..., Any])


def grid(
    slots: int = 2, *, labels: dict[str, str] | None = None, backoff_s: float = BACKOFF_S,
    **settings: Any,
) -> Grid:  # fmt: skip
    """A grid that lives as long as the `with` block: see the head of this module.

    `slots` and `labels` are those of `grid.worker`; `backoff_s` is the pause before a first retry;
    `settings` are fields of `ekiden.config.BrokerConfig`, such as `waiting_max=10`.

    Leaving the block ends everything at once: jobs that still wait or run are dropped. If the
    broker failed meanwhile, its error is raised there, unless the block raised one itself.
    """
    return Grid(slots, labels or {}, backoff_s, settings)


class Grid:
    """A broker, a worker and clients. Make one with `grid`."""

    def __init__(
        self, slots: int, labels: dict[str, str], backoff_s: float, settings: dict[str, Any]
    ) -> None:
        self._worker_options: dict[str, Any] = {"slots": slots, "labels": labels}
        self._backoff_s = backoff_s
        self._settings = settings
        self._broker: _BrokerThread | None = None
        self._workers: list[GridWorker] = []
        self._clients: list[Client] = []
        self._client: Client | None = None

    def __enter__(self) -> Grid:
        assert self._broker is None, "a grid is used once; make another with ekiden.testing.grid()"
        self._broker = _BrokerThread(self._backoff_s, self._settings)
        self._broker.start()
        self.add_worker(**self._worker_options)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        broker = self._running()
        for client in self._clients:
            client.close(0.0)
        for worker in self._workers:
            worker.end()
        try:
            broker.stop()
        except Exception:
            if kind is None:
                raise

    # -------------------------------------------------------------- use

    @property
    def worker(self) -> GridWorker:
        """The first worker: register handlers with `@grid.worker.handler(…)`."""
        self._running()
        return self._workers[0]

    @property
    def client(self) -> Client:
        """A blocking client, connected; the same one every time."""
        if self._client is None:
            self._client = self.connect()
        return self._client

    def connect(self, **options: Any) -> Client:
        """Another blocking client, connected; `options` are those of `ekiden.Client`."""
        self._start_workers()
        client = Client(self.address, **{"key": self.key, **options})
        self._clients.append(client)
        client.wait_connected(START_S)
        return client

    def connect_async(self, **options: Any) -> AsyncClient:
        """An async client, to be entered with `async with` and closed by the caller."""
        return AsyncClient(self.address, **{"key": self.key, **options})

    def add_worker(self, slots: int = 2, **options: Any) -> GridWorker:
        """Another worker; `options` are those of `ekiden.Worker`."""
        name = f"worker-{len(self._workers) + 1}"
        address = self._running().address
        offers = options.pop("offers", None) or Offers()
        if offers.cache is None:
            offers = msgspec.structs.replace(offers, cache=self.key_file.parent / f"cache-{name}")
        options = {"worker_id": name, "key": self.key, "offers": offers, **options}
        worker = GridWorker(address, slots, **options)
        if any(other.begun for other in self._workers):
            worker.begin()
        self._workers.append(worker)
        return worker

    @property
    def address(self) -> str:
        """Where the broker listens."""
        self._start_workers()
        return self._running().address

    @property
    def key(self) -> bytes:
        """What clients and workers prove that they know."""
        return self._running().key

    @property
    def key_file(self) -> Path:
        """The key in a file, for programs that take one."""
        return self._running().folder / KEY_FILE

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients, workers and the command line find this grid."""
        return {"EKIDEN_CONNECT": self.address, ENV_KEY_FILE: str(self.key_file)}

    # -------------------------------------------------------------- inside

    def _running(self) -> _BrokerThread:
        if self._broker is None or self._broker.stopped:
            raise Closed("the grid does not run", remedy="use it inside its `with` block")
        return self._broker

    def _start_workers(self) -> None:
        """Handlers are registered by now, most likely: those that come later cost a restart."""
        for worker in self._workers:
            worker.begin()


class GridWorker(Worker):
    """A worker that takes handlers at any time.

    It begins to serve when the grid is first used. A handler registered after that makes it leave
    and join again, once what it runs is done.
    """

    begun = False

    def handler(self, pattern: str) -> Callable[[F], F]:
        """Let the decorated function handle jobs whose subject `pattern` picks."""

        def register(function: F) -> F:
            registry = Handlers()
            registry.add(pattern, function)
            self.include(registry)
            return function

        return register

    def include(self, source: Handlers | Worker) -> None:
        """Take over the handlers of another worker or registry."""
        if self.begun:
            self.stop()
        super().include(source)
        if self.begun:
            self._join()

    def begin(self) -> None:
        """Serve from now on, as soon as there are handlers."""
        if not self.begun:
            self.begun = True
            self._join()

    def end(self) -> None:
        """Leave at once, whatever runs."""
        if self._engine is not None:
            self.quit()
            self.stop(timeout_s=STOP_S)

    def _join(self) -> None:
        if self.patterns:
            self.start()
            self.wait_joined(START_S)


@dataclass(frozen=True, kw_only=True)
class _Config(BrokerConfig):
    """Settings of a broker whose retries do not wait for long."""

    backoff_ns: int

    def settings(self) -> Settings:
        return msgspec.structs.replace(super().settings(), backoff_first_ns=self.backoff_ns)


class _World(BrokerWorld):
    """A broker that is a guest in somebody's process: it publishes nothing and leaves no trace."""

    def recover(self, key: bytes) -> Opened:
        return self.open(key)

    def publish(self, addresses: set[str], key: bytes) -> None:
        pass

    def withdraw(self, addresses: set[str], key: bytes) -> None:
        pass

    def fork(self) -> int:
        return 0

    async def leave(self) -> None:
        await self.network.wait_closed()


class _BrokerThread:
    """A broker on a loop of its own, in a folder of its own."""

    def __init__(self, backoff_s: float, settings: dict[str, Any]) -> None:
        self.address = ""
        self.stopped = False
        self.folder = Path(tempfile.mkdtemp(prefix="ekiden-grid-"))
        self.key = make_broker_key(self.folder)
        self._world: _World | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="ekiden-broker", daemon=True)
        # The folder goes with the grid: nothing in it has to survive anything.
        defaults = {"sync": SYNC_NEVER, "snapshot_interval_s": 1e9, "disk_headroom": 0}
        self._config = _Config(
            data=self.folder, port=0, on_ready=self._on_ready, backoff_ns=round(backoff_s * NS),
            **{**defaults, **settings},
        )  # fmt: skip

    def start(self) -> None:
        """Return when it serves. Raises why it does not."""
        self._thread.start()
        self._ready.wait(START_S)
        if not self.address:
            self.stop()
            raise Fault(f"the broker of the grid did not start within {START_S:g} s")

    def stop(self) -> None:
        """End it and remove its folder. Raises what it failed with."""
        self.stopped = True
        if self._world is not None:
            loop = self._world.driver.loop
            try:
                loop.call_soon_threadsafe(self._world.stop)
            except RuntimeError:
                pass  # It has ended by itself.
        self._thread.join(STOP_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            run(self._serve())
        except BaseException as error:  # noqa: BLE001
            # Raised again where the grid ends; a thread has nobody to tell.
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        storage = FolderStorage(self.folder)
        storage.lock()
        try:
            self._world = _World(self._config, storage, self.folder)
            await self._world.serve(self.key)
        finally:
            storage.close()

    def _on_ready(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._ready.set()
