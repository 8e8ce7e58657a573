"""File contents through a real broker: bounded memory, killed brokers, and jobs that go on."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from tests.integration.processes import Site, until, wait_workers

import ekiden
from ekiden import limits
from ekiden.errors import BlobDamaged, Closed, DiskFull, StoreFull, UnknownBlob
from ekiden.machine import Log
from ekiden.worker.machine import Exit
from ekiden.worker.store import BrokerStore
from ekiden.world.loop import Driver
from ekiden.world.network import Network
from ekiden.world.porter import Stored

MB = 1 << 20
SIZE = 200 * MB

# What a transfer may add to a process: buffers of the socket and the interpreter, not the file.
GROWTH = 80 * MB


def make_file(path: Path, size: int = SIZE) -> Path:
    dice = random.Random(path.name)
    with path.open("wb") as file:
        for _ in range(0, size, MB):
            file.write(dice.randbytes(min(MB, size)))
    return path


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def blobs_of(site: Site) -> list[str]:
    return sorted(path.name for path in (site.data / "blobs").rglob("*") if path.is_file())


class Peak:
    """The most memory a process took while this was open."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before = self.most = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, self._process.memory_info().rss)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.before


# Up and down in a process of its own, whose memory is its own.
CARRIER = """
import sys
from pathlib import Path
import ekiden, psutil, threading
address, key_file, source, target = sys.argv[1:]
with ekiden.Client(address, client_id="carrier", key_file=key_file) as client:
    client.wait_connected(30)
    client.fetch_blob(*client.put_blob(b"warm"), target=Path(target))
    process = psutil.Process()
    before = most = process.memory_info().rss
    over = threading.Event()
    def watch():
        global most
        while not over.wait(0.005):
            most = max(most, process.memory_info().rss)
    threading.Thread(target=watch, daemon=True).start()
    stored = client.put_blob(Path(source))
    client.fetch_blob(*stored, target=Path(target))
    over.set()
    print(most - before, *stored)
"""


def test_a_large_file_goes_up_and_down_with_little_memory_at_both_ends(
    site: Site, tmp_path: Path
) -> None:
    broker = site.start_broker()
    client = site.client()
    client.wait_connected(30)
    client.fetch_blob(*client.put_blob(b"warm"))
    source, target = make_file(tmp_path / "source"), tmp_path / "target"

    with Peak(broker.pid) as peak:
        places = [site.address, str(site.data / "key"), str(source), str(target)]
        child = site.start([sys.executable, "-c", CARRIER, *places], "carrier")
        assert child.wait(100) == 0, child.logged()
    assert child.process.stdout is not None
    growth, blob, size = child.process.stdout.read().split()

    assert (blob.decode(), int(size)) == (hash_of(source), SIZE)
    assert hash_of(target) == blob.decode()
    assert peak.growth < GROWTH, f"the broker grew by {peak.growth / MB:.0f} MB"
    assert int(growth) < GROWTH, f"the client grew by {int(growth) / MB:.0f} MB"
    facts = client.stats()["blobs"]
    assert facts == {"count": 2, "bytes": SIZE + 4, "quota": 0, "pinned": 0}


def test_what_is_stored_survives_a_killed_broker_and_half_an_upload_leaves_nothing(
    site: Site, tmp_path: Path
) -> None:
    site.start_broker()
    client = site.client()
    stored = client.put_blob(b"kept" * 100_000)
    source = make_file(tmp_path / "source")
    reply = client._core.put_blob(source)
    incoming = site.data / "blobs" / "incoming"
    until(lambda: any(path.stat().st_size > MB for path in incoming.iterdir()), "half an upload")

    site.broker.kill()
    left = [path.open("rb") for path in incoming.iterdir()]  # so that no number is used again
    site.start_broker()

    assert left, "the upload was under way"
    assert reply.result(60) == Stored(hash_of(source), SIZE), "it goes on by itself"
    assert list(incoming.iterdir()) == []
    written = site.data / "blobs" / hash_of(source)[:2] / hash_of(source)
    numbers = [os.fstat(file.fileno()).st_ino for file in left]
    assert written.stat().st_ino not in numbers, "what a dead process left is no part of it"
    assert client.fetch_blob(*stored, timeout=60) == b"kept" * 100_000
    assert blobs_of(site) == sorted([stored.blob, hash_of(source)])


def test_a_download_goes_on_after_the_broker_was_killed(site: Site, tmp_path: Path) -> None:
    site.start_broker()
    client = site.client()
    source, target = make_file(tmp_path / "source"), tmp_path / "target"
    stored = client.put_blob(source, timeout=60)
    reply = client._core.fetch_blob(stored.blob, stored.size, target)

    def part() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob(".ekiden-*.part"))

    had = until(lambda: (size := part()) > 4 * MB and size, "half a download")
    site.broker.kill()
    assert not target.exists()
    kept = part()
    site.start_broker()

    assert reply.result(60) is None
    assert kept >= had
    assert hash_of(target) == stored.blob
    assert list(tmp_path.glob(".ekiden-*")) == []


def test_jobs_go_on_while_files_travel(site: Site, tmp_path: Path) -> None:
    site.start_broker()
    site.start_worker()
    client = site.client()
    wait_workers(client)
    source, target = make_file(tmp_path / "source"), tmp_path / "target"

    upload = client._core.put_blob(source)
    during_upload = 0
    while not upload.done():
        client.submit("sha256", payload=b"x").result(30)
        during_upload += 1
    stored: Stored = upload.result()
    download = client._core.fetch_blob(stored.blob, stored.size, target)
    during_download = 0
    while not download.done():
        client.submit("sha256", payload=b"x").result(30)
        during_download += 1

    assert download.result() is None
    assert min(during_upload, during_download) >= 10
    assert hash_of(target) == hash_of(source)


def test_many_at_once_from_many_clients_all_arrive(site: Site, tmp_path: Path) -> None:
    site.start_broker()
    contents = [os.urandom(random.Random(n).randrange(1, 3 * MB)) for n in range(40)]
    clients = [site.client(f"c{n}") for n in range(4)]

    puts = [clients[n % 4]._core.put_blob(data) for n, data in enumerate(contents * 2)]
    stored = [put.result(60) for put in puts]
    gets = [
        clients[n % 3]._core.fetch_blob(each[0], each[1], None) for n, each in enumerate(stored)
    ]

    assert [get.result(60) for get in gets] == contents * 2
    assert len(blobs_of(site)) == len(contents)


def test_a_bit_that_flipped_in_the_store_is_found_by_whoever_fetches(
    site: Site, tmp_path: Path
) -> None:
    site.start_broker()
    client = site.client()
    stored = client.put_blob(b"x" * MB)
    path = site.data / "blobs" / stored.blob[:2] / stored.blob
    with path.open("r+b") as file:
        file.seek(MB // 2)
        file.write(b"y")

    with pytest.raises(BlobDamaged):
        client.fetch_blob(*stored, target=tmp_path / "target", timeout=30)
    with pytest.raises((BlobDamaged, UnknownBlob)):  # it may be set aside by now
        client.fetch_blob(*stored, timeout=30)

    assert list(tmp_path.glob("*target*")) == []
    assert list(tmp_path.glob(".ekiden-*")) == []


def test_what_was_found_damaged_is_set_aside_and_can_be_put_again(site: Site) -> None:
    site.start_broker()
    client = site.client()
    stored = client.put_blob(b"x" * MB)
    path = site.data / "blobs" / stored.blob[:2] / stored.blob
    with path.open("r+b") as file:
        file.write(b"y")
    with pytest.raises(BlobDamaged):
        client.fetch_blob(*stored, timeout=30)
    until(lambda: not path.exists(), "the damaged blob to be set aside")

    assert client.put_blob(b"x" * MB, timeout=30) == stored

    assert client.fetch_blob(*stored, timeout=30) == b"x" * MB
    (evidence,) = (site.data / "blobs" / "damaged").iterdir()
    assert evidence.name.startswith(stored.blob)
    assert evidence.read_bytes()[:2] == b"yx"


def test_a_store_at_its_quota_removes_what_nobody_used_of_late_and_nothing_else(
    site: Site,
) -> None:
    site.start_broker("--blobs-max", str(3 / 1024))
    client = site.client()
    old, recent = client.put_blob(b"o" * MB), client.put_blob(b"r" * MB)
    then = time.time() - 2 * 3600
    os.utime(site.data / "blobs" / old.blob[:2] / old.blob, (then, then))

    new = client.put_blob(b"n" * 2 * MB, timeout=30)

    assert blobs_of(site) == sorted([recent.blob, new.blob])
    with pytest.raises(StoreFull, match="in use"):
        client.put_blob(b"x", timeout=30)
    assert client.stats()["blobs"]["quota"] == 3 * MB


def test_a_disk_that_fills_up_during_an_upload_refuses_it_and_the_broker_goes_on(
    site: Site, tmp_path: Path
) -> None:
    # No file of the broker may grow beyond this: what a full disk does, for large files only.
    site.start_broker(prefix=("prlimit", f"--fsize={8 * MB}"))
    client = site.client()

    with pytest.raises(DiskFull, match="full"):
        client.put_blob(make_file(tmp_path / "source", 10 * MB), timeout=30)

    assert blobs_of(site) == []
    stored = client.put_blob(b"x" * 7 * MB, timeout=30)
    assert client.fetch_blob(*stored, timeout=30) == b"x" * 7 * MB


def test_an_unknown_blob_and_a_missing_file_are_told_in_words(site: Site, tmp_path: Path) -> None:
    site.start_broker()
    client = site.client()

    with pytest.raises(UnknownBlob, match="no blob 000000000000"):
        client.fetch_blob("0" * 64, 10, timeout=30)
    with pytest.raises(ekiden.EkidenError, match="no such file"):
        client.put_blob(tmp_path / "missing", timeout=30)
    with pytest.raises(ekiden.EkidenError, match="no such file"):
        client.fetch_blob(*client.put_blob(b"x"), target=tmp_path / "no" / "where", timeout=30)


def test_a_transfer_that_is_given_up_leaves_nothing_at_the_broker(
    site: Site, tmp_path: Path
) -> None:
    site.start_broker()
    client = site.client()
    source = make_file(tmp_path / "source")
    reply = client._core.put_blob(source)
    incoming = site.data / "blobs" / "incoming"
    until(lambda: incoming.exists() and list(incoming.iterdir()), "the upload")

    assert reply.cancel()

    until(lambda: not list(incoming.iterdir()), "the upload to be dropped")
    client.put_blob(b"another", timeout=30)
    assert blobs_of(site) == [hashlib.sha256(b"another").hexdigest()]


def test_what_a_client_that_closes_had_sent_is_where_the_next_one_goes_on(
    site: Site, tmp_path: Path
) -> None:
    site.start_broker()
    client = site.client()
    source = make_file(tmp_path / "source")
    reply = client._core.put_blob(source)
    incoming = site.data / "blobs" / "incoming"
    until(lambda: any(path.stat().st_size > 4 * MB for path in incoming.glob("*")), "some of it")

    client.close()

    assert isinstance(reply.exception(0), ekiden.EkidenError)
    (left,) = incoming.iterdir()
    number = left.stat().st_ino
    stored = site.client("next").put_blob(source, timeout=60)
    path = site.data / "blobs" / stored.blob[:2] / stored.blob
    assert path.stat().st_ino == number, "it is the same file"
    assert hash_of(path) == stored.blob
    assert not list(incoming.iterdir())


def test_an_async_client_puts_and_fetches_too(site: Site, tmp_path: Path) -> None:
    site.start_broker()
    source = make_file(tmp_path / "source", 3 * MB)

    async def carry() -> tuple[Stored, bytes | None, bytes | None]:
        key_file = site.data / "key"
        async with ekiden.AsyncClient(site.address, client_id="a", key_file=key_file) as client:
            stored = await client.put_blob(source)
            data = await client.fetch_blob(*stored)
            return stored, data, await client.fetch_blob(*stored, target=tmp_path / "target")

    stored, data, nothing = asyncio.run(carry())

    assert stored == Stored(hash_of(source), 3 * MB)
    assert (data, nothing) == (source.read_bytes(), None)
    assert hash_of(tmp_path / "target") == stored.blob


# ------------------------------------------------------------------ workers


@asynccontextmanager
async def worker_store(site: Site) -> AsyncIterator[BrokerStore]:
    """The store of a worker that has nothing else to do."""
    worker = ekiden.Worker(
        site.address, worker_id="w1", slots=1, subjects=["a.b"], key_file=site.data / "key"
    )
    driver = Driver(worker.machine())
    driver.handle(Log, lambda _line: None)
    driver.handle(Exit, lambda _exit: driver.stop())
    network = Network(driver)
    store = BrokerStore(driver)
    driver.wake()
    try:
        yield store
    finally:
        store.close()
        driver.stop()
        await network.wait_closed()


def test_a_worker_puts_fetches_and_reads(site: Site, tmp_path: Path) -> None:
    site.start_broker()
    source, target = make_file(tmp_path / "source", 5 * MB), tmp_path / "target"

    async def use() -> None:
        async with worker_store(site) as store:
            stored = await store.put(source)
            assert stored == Stored(hash_of(source), 5 * MB)
            await store.fetch(*stored, target)
            assert hash_of(target) == stored.blob
            assert await store.read(*await store.put(b"small")) == b"small"

    asyncio.run(use())


def test_small_blobs_are_remembered_by_a_worker_and_large_ones_are_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.start_broker()
    monkeypatch.setattr(limits, "BLOB_CACHED_BYTES", 100)
    monkeypatch.setattr(limits, "BLOB_CACHE_BYTES", 250)
    small = [bytes([n]) * 100 for n in range(3)]

    async def use() -> list[bool]:
        """Which are still to be had when the broker has lost them all."""
        async with worker_store(site) as store:
            stored = [await store.put(data) for data in [*small, b"x" * 101]]
            for each in (*stored, stored[1]):
                await store.read(*each)
            for path in (site.data / "blobs").rglob("?" * 64):
                path.unlink()
            found = []
            for each in stored:
                try:
                    found.append(len(await store.read(*each)) == each.size)
                except UnknownBlob:
                    found.append(False)
            return found

    assert asyncio.run(use()) == [False, True, True, False]


def test_a_worker_waits_for_a_broker_and_ends_with_its_store(site: Site) -> None:
    site.start_broker()
    site.broker.kill()

    async def use() -> None:
        async with worker_store(site) as store:
            waiting = asyncio.create_task(store.put(b"early"))
            given_up = asyncio.create_task(store.put(b"never mind"))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.to_thread(site.start_broker)
            assert (await waiting).size == 5
            with pytest.raises(asyncio.CancelledError):
                await given_up
            site.broker.kill()
            late = asyncio.create_task(store.put(b"late"))
            await asyncio.sleep(0)
        with pytest.raises(Closed):
            await late

    asyncio.run(use())
    assert blobs_of(site) == [hashlib.sha256(b"early").hexdigest()]
