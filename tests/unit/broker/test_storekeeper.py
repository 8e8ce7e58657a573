"""The store's effects on a real folder, in real threads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ekiden.broker import storekeeper
from ekiden.broker.events import (
    BeginBlob,
    BlobExamined,
    BlobLocated,
    BlobRead,
    BlobsRemoved,
    CacheChecked,
    CheckCache,
    DropBlob,
    ExamineBlob,
    FindUnused,
    LocateBlob,
    ReadBlob,
    ReleaseCache,
    RemoveBlobs,
    UnusedFound,
    UploadMoved,
    VerifyCache,
    WriteBlob,
)
from ekiden.broker.storekeeper import Storekeeper
from ekiden.errors import BadRequest, BlobDamaged, UnknownBlob
from ekiden.model.caches import CachedFile, CacheUse, encode_manifest, make_manifest
from ekiden.world.blobs import BlobFolder
from ekiden.world.loop import Driver


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def content_of(path: str) -> bytes:
    return Path(path).read_bytes()


class Ear:
    """A machine that only listens."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()

    def receive(self, event: Any, now: int) -> None:
        self.heard.put_nowait(event)

    def advance(self, now: int) -> list[Any]:
        return []

    def next_deadline(self) -> int | None:
        return None


class Keeper:
    """A storekeeper, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.ear = Ear()
        self.driver = Driver(self.ear)
        self.folder = BlobFolder(folder, sync=False, grace_s=0, unused_s=1000)
        self.keeper = Storekeeper(self.driver, self.folder, quota=12)

    def do(self, effect: Any) -> None:
        self.driver.perform_one(effect)

    async def ask(self, effect: Any) -> Any:
        self.do(effect)
        async with asyncio.timeout(10):
            return await self.ear.heard.get()

    async def put(self, data: bytes, upload: int = 1) -> str:
        await self.ask(BeginBlob(upload, hash_of(data), len(data)))
        assert (await self.ask(WriteBlob(upload, data))).stored
        return hash_of(data)

    def spoil(self, blob: str) -> bytes:
        """Other bytes lie under its name from now on; what lay there."""
        path = Path(self.folder.path_of(blob))
        sound = path.read_bytes()
        path.write_bytes(bytes(len(sound)))
        return sound

    async def cache(self, *contents: bytes) -> CacheUse:
        files = [
            CachedFile(f"f{n}", len(data), await self.put(data, n))
            for n, data in enumerate(contents)
        ]
        manifest = encode_manifest(make_manifest(files, []))
        return CacheUse("c", await self.put(manifest, 99), len(manifest))


Story = Callable[[Keeper], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        async def run() -> None:
            keeper = Keeper(tmp_path / "blobs")
            try:
                await story(keeper)
                assert not keeper.driver.failed.done()
            finally:
                keeper.keeper.close()

        asyncio.run(run())

    return play


def test_an_upload_that_was_set_aside_goes_on_and_says_how_much_is_held(play: Any) -> None:
    async def story(keeper: Keeper) -> None:
        data = b"0123456789"
        blob = hash_of(data)
        assert await keeper.ask(BeginBlob(1, blob, 10)) == UploadMoved(1)
        assert await keeper.ask(WriteBlob(1, data[:6])) == UploadMoved(1, 6, held=6)
        keeper.do(DropBlob(1, keep=True))
        assert await keeper.ask(BeginBlob(2, blob, 10)) == UploadMoved(2, 6, held=6)
        moved = await keeper.ask(WriteBlob(2, data[6:]))
        assert (moved.stored, moved.held) == (True, 10)
        assert await keeper.ask(ReadBlob(5, blob, 2, 3)) == BlobRead(5, b"234", 10)

    play(story)


def test_blobs_of_a_cache_are_held_until_it_is_released(play: Any) -> None:
    async def story(keeper: Keeper) -> None:
        cache = await keeper.cache(b"one", b"three")
        loose = await keeper.put(b"loose")
        assert await keeper.ask(CheckCache(3, cache)) == CacheChecked(3, files=2, size=8)
        assert keeper.keeper.facts()["pinned"] == 3
        found: UnusedFound = await keeper.ask(FindUnused(1000))
        assert [blob for blob, _ in found.blobs] == [loose]

        keeper.do(ReleaseCache(cache))
        found = await keeper.ask(FindUnused(1000))
        assert len(found.blobs) == 4
        await keeper.ask(CheckCache(4, cache))
        removed: BlobsRemoved = await keeper.ask(RemoveBlobs(found.blobs))

        assert (removed.count, removed.size) == (1, 5), "it was taken into a cache since"
        assert removed.held == keeper.folder.bytes

    play(story)


def test_a_damaged_manifest_is_told_and_can_be_put_again(play: Any) -> None:
    async def story(keeper: Keeper) -> None:
        cache = await keeper.cache(b"one")
        sound = keeper.spoil(cache.manifest)
        checked: CacheChecked = await keeper.ask(CheckCache(3, cache))
        assert isinstance(checked.error, BlobDamaged)

        await keeper.put(sound, 200)

        assert (await keeper.ask(CheckCache(3, cache))).files == 1

    play(story)


def test_damage_is_told_and_soundness_too(play: Any) -> None:
    async def story(keeper: Keeper) -> None:
        blob = await keeper.put(b"some bytes")
        assert await keeper.ask(ExamineBlob(blob)) == BlobExamined(blob, damaged=False)
        keeper.spoil(blob)
        examined: BlobExamined = await keeper.ask(ExamineBlob(blob))
        assert examined.damaged
        assert content_of(examined.kept) == bytes(10)
        read: BlobRead = await keeper.ask(ReadBlob(1, blob, 0, 4))
        assert isinstance(read.error, UnknownBlob)
        facts = keeper.keeper.facts()
        assert facts == {"count": 0, "bytes": 0, "quota": 12, "pinned": 0}

    play(story)


def test_after_a_slow_sync_of_the_journal_the_next_part_of_a_file_waits_as_long_once(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(storekeeper.time, "sleep", waits.append)

    async def story(keeper: Keeper) -> None:
        data = b"0123456789"
        await keeper.ask(BeginBlob(1, hash_of(data), 10))
        keeper.keeper.journal_synced(storekeeper.SLOW_SYNC_S)
        await keeper.ask(WriteBlob(1, data[:2]))
        keeper.keeper.journal_synced(0.02)
        await keeper.ask(WriteBlob(1, data[2:4]))
        await keeper.ask(WriteBlob(1, data[4:6]))
        keeper.keeper.journal_synced(5.0)
        await keeper.ask(WriteBlob(1, data[6:]))

    play(story)

    assert waits == [0.02, storekeeper.PAUSE_S_MAX]


def test_verifying_a_cache_reads_every_blob_and_sets_aside_what_is_damaged(play: Any) -> None:
    async def story(keeper: Keeper) -> None:
        cache = await keeper.cache(b"sound", b"spoilt")
        whole = await keeper.ask(VerifyCache(7, cache))
        keeper.spoil(hash_of(b"spoilt"))
        damaged = await keeper.ask(VerifyCache(8, cache))
        unknown = await keeper.ask(VerifyCache(9, CacheUse("c", "ab" * 32, 10)))

        assert whole == CacheChecked(7, files=2, size=11)
        assert damaged == CacheChecked(8, files=2, size=11, missing=1)
        assert unknown == CacheChecked(9, missing=1)
        assert not keeper.folder.touch(hash_of(b"spoilt"), 6)

    play(story)


def test_where_a_blob_lies_is_told_if_it_is_there(play: Any) -> None:
    async def story(keeper: Keeper) -> None:
        blob = await keeper.put(b"0123456789")

        there = await keeper.ask(LocateBlob(1, blob, 10))
        another = await keeper.ask(LocateBlob(2, blob, 11))

        assert content_of(there.path) == b"0123456789"
        assert another == BlobLocated(2, "")

    play(story)


def test_a_part_that_is_not_what_it_was_packed_as_leaves_nothing_of_its_upload(play: Any) -> None:
    async def story(keeper: Keeper) -> None:
        await keeper.ask(BeginBlob(1, "ab" * 32, 10))
        moved = await keeper.ask(WriteBlob(1, b"garbage", "zstd", 10))

        assert isinstance(moved.error, BadRequest)
        assert not keeper.folder.has(1)

    play(story)
