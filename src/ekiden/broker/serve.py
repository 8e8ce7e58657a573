"""A broker process: the machine on the loop, with its disk, network, clock and children."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from ekiden import limits
from ekiden.broker.events import (
    AppendFailed,
    DiskSpace,
    Halt,
    Persisted,
    Shutdown,
    SnapshotTaken,
    TakeSnapshot,
    WallClock,
)  # fmt: skip
from ekiden.broker.recovery import Opened, open_broker
from ekiden.broker.storekeeper import Storekeeper
from ekiden.broker.twin import fork_twin, wait_for_twin
from ekiden.config import SYNC_ALWAYS, SYNC_INTERVAL, BrokerConfig
from ekiden.errors import Fault, NoSpace, StorageFault, WrongUsage
from ekiden.journal.journal import Append
from ekiden.journal.local import LocalJournal, perform
from ekiden.limits import NS
from ekiden.machine import Log
from ekiden.observe.logs import log_effect
from ekiden.world.addresses import join_address
from ekiden.world.blobs import BlobFolder
from ekiden.world.codecs import CODECS
from ekiden.world.disk import FolderStorage
from ekiden.world.keys import make_broker_key, publish_key, withdraw
from ekiden.world.loop import Driver
from ekiden.world.network import Network

CLOCK_S = 1.0  # how often the machine is told the wall time and the free space
SYNC_INTERVAL_S = 1.0  # of unsafe-interval
CLOSE_WAIT_S = 3.0


class BrokerWorld:
    """What the broker's machine asks of the process it lives in."""

    def __init__(self, config: BrokerConfig, storage: FolderStorage, folder: Path) -> None:
        self.config = config
        self.storage = storage
        self.folder = folder
        self.halted = asyncio.Event()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._process = psutil.Process()
        self._synced_at = 0.0
        self._busy_until = 0.0
        self._snapshotter: asyncio.Task[None] | None = None

    async def serve(self, key: bytes) -> None:
        """Recover, listen, work until told to stop."""
        began = time.monotonic()
        opened = self.recover(key)
        self.machine = machine = opened.machine
        machine.desk.facts = self._facts
        self.driver = driver = Driver(machine)
        for kind, handler in (
            (Log, log_effect), (Append, self._append), (TakeSnapshot, self._take_snapshot),
            (Halt, lambda _: self.halted.set()),
        ):  # fmt: skip
            driver.handle(kind, handler)
        blobs = BlobFolder(
            self.folder / "blobs",
            sync=self.config.sync == SYNC_ALWAYS,
            # Twice as long as results are kept, for whoever has a hash and no job for it.
            unused_s=2 * self.config.retention_ns / NS,
        )
        self._storekeeper = storekeeper = Storekeeper(driver, blobs, quota=self.config.blobs_max)
        for said in [*opened.torn, *opened.damaged]:
            log_effect(Log("warning", "journal.recovered", {"cut": said}))
        self.network = network = Network(driver)
        port = await network.listen(self.config.bind, self.config.port)
        addresses = {join_address(self.config.bind, port)}
        if self.config.advertise:
            addresses.add(self.config.advertise)
        self.publish(addresses, key)
        log_effect(
            Log(
                "info",
                "broker.serving",
                {
                    "address": join_address(self.config.bind, port),
                    "jobs": machine.book.totals.accepted,
                    "index": machine.book.applied,
                    "recovered_s": round(time.monotonic() - began, 3),
                    "sync": self.config.sync,
                },
            )  # fmt: skip
        )
        ticking = self._task(self._tick(), "clock")
        tidying = self._task(storekeeper.keep_house(), "blobs")
        self._on_signals()
        try:
            if self.config.on_ready is not None:
                self.config.on_ready(port)
            halted = asyncio.ensure_future(self.halted.wait())
            waiting: set[asyncio.Future[Any]] = {halted, driver.failed}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            halted.cancel()
            if driver.failed.done():
                driver.failed.result()
            await self.leave()
        finally:
            ticking.cancel()
            tidying.cancel()
            storekeeper.close()
            if self._snapshotter is not None:
                self._snapshotter.cancel()
            network.stop_listening()
            self._disk.shutdown(wait=False)
            self.withdraw(addresses, key)

    # -------------------------------------------------------------- what a process of its own does

    def recover(self, key: bytes) -> Opened:
        """The machine as its journal left it."""
        gc.disable()  # a replay makes millions of objects and no garbage cycles
        opened = self.open(key)
        gc.freeze()
        # A full collection looks at every row of the book, which has no cycles to be found: 140 ms
        # in one turn with two million of them. The young ones catch what the loop leaves behind.
        gc.set_threshold(700, 10, 1 << 30)
        gc.enable()
        return opened

    def open(self, key: bytes) -> Opened:
        """Recover the folder on behalf of this process."""
        return open_broker(
            self.storage, self.config, key=key, broker_id=f"b{os.getpid()}",
            group_id=os.urandom(16), now=time.monotonic_ns(), wall=time.time_ns(),
            software=_software(), codecs=CODECS,
        )  # fmt: skip

    def publish(self, addresses: set[str], key: bytes) -> None:
        """Let tools of this user find the key by address."""
        for address in addresses:
            publish_key(address, key)

    def withdraw(self, addresses: set[str], key: bytes) -> None:
        """Undo `publish`."""
        for address in addresses:
            withdraw(address, key)

    def fork(self) -> int:
        """A twin that writes down the book as it is now; 0 if none may be had."""
        journal = self.machine.journal
        assert isinstance(journal, LocalJournal)
        rss = self._process.memory_info().rss
        return fork_twin(str(self.folder), self.machine.book, journal.group, rss=rss)

    # -------------------------------------------------------------- disk

    def _append(self, append: Append) -> None:
        """Inline when the batch is small and the disk has been quick; else off the loop."""
        small = len(append.data) <= limits.INLINE_SYNC_BYTES and not append.creates
        if small and time.monotonic() >= self._busy_until:
            began = time.monotonic()
            try:
                perform(self.storage, append, sync=self._sync_now())
            except NoSpace as error:
                self.driver.feed(AppendFailed(str(error)))
                return
            took = time.monotonic() - began
            self._storekeeper.journal_synced(took)
            if took > 0.005:
                # A slow disk would make every peer wait for it: leave the loop free for a while.
                self._busy_until = time.monotonic() + 1.0
            self.driver.feed(Persisted(append.upto))
            return
        began = time.monotonic()
        work = self.driver.loop.run_in_executor(
            self._disk, lambda: perform(self.storage, append, sync=self._sync_now())
        )
        work.add_done_callback(lambda done: self._appended(done, append, began if small else None))

    def _appended(self, done: asyncio.Future[None], append: Append, began: float | None) -> None:
        """`began` is when, of an append that should not take long."""
        error = done.exception()
        if error is None:
            if began is not None:
                self._storekeeper.journal_synced(time.monotonic() - began)
            self.driver.feed(Persisted(append.upto))
        elif isinstance(error, NoSpace):
            self.driver.feed(AppendFailed(str(error)))
        else:
            self.driver.fail(error)

    def _sync_now(self) -> bool:
        if self.config.sync == SYNC_ALWAYS:
            return True
        if self.config.sync != SYNC_INTERVAL:
            return False
        now = time.monotonic()
        due = now - self._synced_at >= SYNC_INTERVAL_S
        if due:
            self._synced_at = now
        return due

    def _take_snapshot(self, effect: TakeSnapshot) -> None:
        self._snapshotter = self._task(self._snapshot(effect.upto, self.fork()), "snapshot")

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """In the background. What it fails with ends the broker: nobody else would hear of it."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.driver.fail(error)

        task = self.driver.loop.create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    async def _snapshot(self, upto: int, twin: int) -> None:
        """Wait for the twin; then a child tidies. It makes the snapshot if the twin has not."""
        if twin and (status := await asyncio.to_thread(wait_for_twin, twin)):
            log_effect(Log("warning", "snapshot.twin_failed", {"status": status}))
        journal = self.machine.journal
        assert isinstance(journal, LocalJournal)
        # Large results lie in the journal alone: it is kept at least as long as they are promised.
        keep_ns = max(int(self.config.keep_log_days * 86400 * NS), self.config.retention_ns)
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "ekiden.broker.snapshotter", str(self.folder), str(upto),
                journal.group.hex(), str(keep_ns), str(limits.KEEP_LOG_BYTES),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # no room for another process now: later there may be
            self.driver.feed(SnapshotTaken(0, str(error)))
            return
        assert child.stdout is not None
        assert child.stderr is not None
        said, trouble = await asyncio.gather(child.stdout.read(), child.stderr.read())
        code = await child.wait()
        index = int(said.split()[0]) if said.strip() else 0
        reason = trouble.decode(errors="replace").strip()[-500:] or f"exit code {code}"
        self.driver.feed(SnapshotTaken(index, "" if index else reason))

    # -------------------------------------------------------------- clock, signals, end

    async def _tick(self) -> None:
        while True:
            self.driver.feed(WallClock(time.time_ns()))
            self.driver.feed(DiskSpace(self.storage.free_bytes()))
            await asyncio.sleep(CLOCK_S)

    def _on_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self.driver.loop.add_signal_handler(number, self.stop)
            except (NotImplementedError, RuntimeError, ValueError):
                return  # not the main thread, or a platform without: the caller stops us

    def stop(self) -> None:
        """Finish what is being written, tell the peers, end."""
        self.driver.feed(Shutdown())

    async def leave(self) -> None:
        """Hang up, and leave a snapshot behind so that the next start is quick."""
        self.network.stop_listening()
        await asyncio.wait_for(self.network.wait_closed(), CLOSE_WAIT_S)
        journal = self.machine.journal
        assert isinstance(journal, LocalJournal)
        journal.trim()
        if self._snapshotter is None or self._snapshotter.done():
            journal.roll()
            closed = journal.closed_segments()
            if closed and closed[-1].last > self.machine.snapshot_index:
                await self._snapshot(closed[-1].last, self.fork())
        log_effect(Log("info", "broker.stopped", {"index": self.machine.book.applied}))

    def _facts(self) -> dict[str, Any]:
        turns = self.driver.stats()
        names = self.storage.names()
        return {
            "loop": {
                "turns": turns.turns,
                "turn_ms_max": round(turns.turn_ms_max, 3),
                "turn_ms_p99": round(turns.turn_ms_p99, 3),
            },
            "memory_mb": round(self._process.memory_info().rss / (1 << 20), 1),
            "journal": {
                "segments": sum(".log" in name for name in names),
                "bytes": sum(map(self._size, names)),
            },
            "blobs": self._storekeeper.facts(),
        }

    def _size(self, name: str) -> int:
        try:
            return self.storage.size(name)
        except StorageFault:  # a child of ours has tidied it away since the folder was listed
            return 0


def _software() -> str:
    from importlib.metadata import version

    return f"ekiden {version('ekiden')}"


def _open_folder(data: str) -> tuple[Path, FolderStorage]:
    """Ours alone from here on, or a refusal that says whose it is."""
    folder = Path(data)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise WrongUsage(
            f"cannot make the data folder {data}: {os.strerror(error.errno or 0).lower()}",
            remedy="name another with --data",
        ) from None
    storage = FolderStorage(folder)
    storage.lock()
    return folder, storage


async def serve_broker(config: BrokerConfig, world_kind: type[BrokerWorld] = BrokerWorld) -> int:
    """Run a broker until it is told to stop. Returns the exit code; refusals are raised early."""
    folder, storage = _open_folder(config.data)
    try:
        world = world_kind(config, storage, folder)
        await world.serve(make_broker_key(folder))
    except Fault as error:
        # A refusal came before anything was served; whoever started us says it.
        log_effect(Log("error", "broker.ended", {"code": error.code, "why": str(error)}))
        raise
    finally:
        storage.close()
    return 0
