"""Caches as a worker keeps them: brought when offered or needed, told of, made room for."""

# Files are looked at between turns of a loop that serves nobody else.

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.worker.cached_data import Data, DataStore, opened, sha, spoil, tree_of
from tests.unit.worker.nursery import DEADLINE_S, on_a_loop

import ekiden.worker.cache_folder as module
from ekiden.errors import Fault, UnknownCache
from ekiden.model.caches import CachedFile, CacheUse, encode_manifest, make_manifest
from ekiden.worker import cached
from ekiden.worker.cache_folder import CacheFolder
from ekiden.worker.caches import Caches, claim_folder
from ekiden.worker.contract import CacheSaid, CachesOffered

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="links, locks and times of Linux")

FILES = {"a/x.csv": b"one", "a/b/y.csv": b"two" * 100, "big": b"b" * 1000}


class Shop:
    """Caches over a store, and all they have said."""

    def __init__(self, folder: Path, store: DataStore, bytes_max: int) -> None:
        self.store = store
        self.said: list[CacheSaid] = []
        self._changed = asyncio.Event()
        self.folder = CacheFolder(folder, bytes_max)

        def claim() -> CacheFolder:
            assert self.folder.claim()
            return self.folder

        self.caches = Caches(store, self._heard, claim, pauses_s=(0.0, 0.0))

    def _heard(self, said: CacheSaid) -> None:
        self.said.append(said)
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self._changed.wait()

    def outcomes(self) -> list[tuple[str, str]]:
        return [(said.cache, said.status) for said in self.said if said.status != "fetching"]

    async def offer(self, *uses: CacheUse, **how: bool) -> list[tuple[str, str]]:
        """What is said at last of each, in whatever order."""
        self.said.clear()
        self.caches.offered(CachesOffered(list(uses), **how))
        names = {use.id for use in uses}
        await self.until(lambda: names <= {cache for cache, _ in self.outcomes()})
        return sorted(self.outcomes())


@contextlib.asynccontextmanager
async def a_shop(folder: Path, *datas: Data, bytes_max: int = 1 << 30) -> AsyncIterator[Shop]:
    shop = Shop(folder / "c", DataStore(*datas), bytes_max)
    await shop.caches.start()
    try:
        yield shop
    finally:
        shop.caches.close()


@on_a_loop
async def test_what_is_offered_is_brought_once_and_then_it_is_there(tmp_path: Path) -> None:
    data = Data("d1", FILES, large=("big",))
    async with a_shop(tmp_path, data) as shop:
        assert await shop.offer(data.use) == [("d1", "ok")]
        assert tree_of(shop.folder, "d1") == FILES
        assert sorted(shop.store.asked) == sorted(data.blobs)
        assert CacheSaid("d1", data.use.manifest, "fetching", "", 0, data_size(data)) in shop.said

        assert await shop.offer(data.use, whole=True) == [("d1", "skipped")]
        assert await shop.offer(data.use, verify=True) == [("d1", "skipped")]
        assert len(shop.store.asked) == len(data.blobs)


def data_size(data: Data) -> int:
    return sum(map(len, data.files.values()))


@on_a_loop
async def test_nothing_is_made_before_there_is_a_cache(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        shop.caches.offered(CachesOffered([], whole=True))
        await asyncio.sleep(0)
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["lock"]


@on_a_loop
async def test_unchanged_files_of_another_cache_are_not_brought_again(tmp_path: Path) -> None:
    old, new = Data("d1", FILES), Data("d2", {**FILES, "c": b"new"}, large=("c",))
    async with a_shop(tmp_path, old, new) as shop:
        await shop.offer(old.use)
        shop.store.asked.clear()

        assert await shop.offer(new.use) == [("d2", "ok")]
        assert sorted(shop.store.asked) == sorted([new.use.manifest, sha(b"new")])


@on_a_loop
async def test_faults_are_tried_again_and_refusals_are_told(tmp_path: Path) -> None:
    data, lost = Data("d1", FILES), Data("d2", {"x": b"x"})
    del lost.blobs[lost.pack]
    async with a_shop(tmp_path, data, lost) as shop:
        shop.store.faults = [Fault("the line is noisy"), Fault("the line is noisy")]
        assert await shop.offer(data.use) == [("d1", "ok")]

        assert await shop.offer(lost.use) == [("d2", "failed")]
        assert "is kept" in shop.said[-1].text

        shop.store.add(Data("d2", {"x": b"x"}))
        assert await shop.offer(lost.use) == [("d2", "ok")]

        shop.folder.remove("d1")
        shop.store.faults = [Fault("the line is dead")] * 3
        assert await shop.offer(data.use) == [("d1", "failed")]
        assert shop.said[-1].text == "the line is dead"


@on_a_loop
async def test_what_a_whole_offer_does_not_name_goes_when_nobody_uses_it(tmp_path: Path) -> None:
    datas = [Data(f"d{at}", {"x": b"%d" % at}) for at in range(3)]
    async with a_shop(tmp_path, *datas) as shop:
        await shop.offer(*(data.use for data in datas))
        shop.caches.pin([datas[1].use])

        await shop.offer(datas[0].use, whole=True)
        assert sorted(shop.folder.held()) == ["d0", "d1"]

        shop.caches.unpin([datas[1].use])
        await shop.until(lambda: list(shop.folder.held()) == ["d0"])
        assert tree_of(shop.folder, "d0") == datas[0].files


@on_a_loop
async def test_other_content_under_an_id_replaces_what_was_there_when_nobody_uses_it(
    tmp_path: Path,
) -> None:
    old, new = Data("d1", FILES), Data("d1", {"a/x.csv": b"other"})
    async with a_shop(tmp_path, old, new) as shop:
        await shop.offer(old.use)
        shop.caches.pin([old.use])
        offering = asyncio.ensure_future(shop.offer(new.use))
        await asyncio.sleep(0.05)
        assert tree_of(shop.folder, "d1") == FILES

        shop.caches.unpin([old.use])
        assert await offering == [("d1", "ok")]
        assert tree_of(shop.folder, "d1") == new.files


@on_a_loop
async def test_room_is_made_of_what_nobody_uses_and_told(tmp_path: Path) -> None:
    datas = [Data(f"d{at}", {"x": b"%d" % at}) for at in range(4)]
    async with a_shop(tmp_path, *datas, bytes_max=2 * 4096) as shop:
        await shop.offer(datas[0].use)
        await shop.offer(datas[1].use)
        shop.caches.pin([datas[0].use])

        assert await shop.offer(datas[2].use) == [("d1", "gone"), ("d2", "ok")]

        shop.caches.pin([datas[2].use])
        assert await shop.offer(datas[3].use) == [("d3", "failed")]
        assert "--cache-max" in shop.said[-1].text
        assert "cannot be had here" in await shop.caches.ensure([datas[3].use])


@on_a_loop
async def test_what_a_job_needs_is_brought_before_what_is_only_offered(tmp_path: Path) -> None:
    datas = [Data(f"d{at}", {"x": b"%d" % at}) for at in range(6)]
    needed = datas[-1]
    async with a_shop(tmp_path, *datas) as shop:
        shop.store.opened.clear()
        shop.caches.offered(CachesOffered([data.use for data in datas]))
        await shop.until(lambda: shop.folder.is_used())
        ensuring = asyncio.ensure_future(shop.caches.ensure([needed.use, datas[0].use]))
        await asyncio.sleep(0.05)
        shop.store.opened.set()

        assert await ensuring == ""
        assert tree_of(shop.folder, needed.use.id) == needed.files
        await shop.until(lambda: len(shop.outcomes()) == 6)
        assert {status for _, status in shop.outcomes()} == {"ok"}


@on_a_loop
async def test_what_was_written_to_is_repaired_before_the_next_job(tmp_path: Path) -> None:
    data = Data("d1", FILES, large=("big",))
    async with a_shop(tmp_path, data) as shop:
        assert await shop.caches.ensure([data.use]) == ""
        spoil(Path(shop.folder.trees, "d1", "big"), b"bad")
        shop.store.asked.clear()

        assert await shop.caches.ensure([data.use]) == ""

        assert tree_of(shop.folder, "d1") == FILES
        assert shop.store.asked == [data.use.manifest, sha(FILES["big"])]


@on_a_loop
async def test_after_another_start_of_the_system_it_is_read_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, more = Data("d1", FILES), Data("d2", {**FILES, "c": b"c"}, large=("c",))
    folder = opened(tmp_path / "c")
    data.put(folder)
    folder.close()
    monkeypatch.setattr(module, "boot_id", lambda: "another")
    async with a_shop(tmp_path, data, more) as shop:
        outcomes = await shop.offer(more.use, data.use, whole=True)

        assert outcomes == [("d1", "skipped"), ("d2", "ok")]


@on_a_loop
async def test_a_manifest_that_makes_no_sense_is_told_as_such(tmp_path: Path) -> None:
    data = Data("d1", FILES)
    raw = encode_manifest(make_manifest([CachedFile("x", 1, "0" * 64)], []))[:-1]
    use = CacheUse("bad", sha(raw), len(raw))
    async with a_shop(tmp_path, data) as shop:
        shop.store.blobs[use.manifest] = raw
        assert await shop.offer(use, CacheUse("huge", "0" * 64, 1 << 40), data.use) == [
            ("bad", "failed"), ("d1", "ok"), ("huge", "failed"),
        ]  # fmt: skip


@on_a_loop
async def test_a_worker_without_a_folder_says_why_it_has_no_caches(tmp_path: Path) -> None:
    data = Data("d1", FILES)
    (tmp_path / "c").write_text("a file")
    store, said = DataStore(data), list[CacheSaid]()
    caches = Caches(store, said.append, lambda: claim_folder(tmp_path / "c", None))
    await caches.start()

    assert caches.trees == ""
    assert "cannot use the folder" in await caches.ensure([data.use])
    caches.offered(CachesOffered([data.use]))
    await asyncio.sleep(0.01)
    assert [(s.cache, s.status) for s in said] == [("d1", "failed")]
    caches.close()


# ------------------------------------------------------------------ folders


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Fault, match="others may write"):
        claim_folder(tmp_path / "open", None)


def test_each_process_takes_the_first_folder_that_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EKIDEN_STATE", str(tmp_path))
    one, two = claim_folder(None, None), claim_folder(None, None)
    assert [one.folder, two.folder] == [f"{tmp_path}/caches/1", f"{tmp_path}/caches/2"]
    one.close()
    assert claim_folder(None, None).folder == f"{tmp_path}/caches/1"

    monkeypatch.delenv("EKIDEN_STATE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert claim_folder(None, None).folder == f"{tmp_path}/xdg/ekiden/1"

    first = claim_folder(tmp_path / "own", None)
    with pytest.raises(Fault, match="--cache"):
        claim_folder(tmp_path / "own", None)
    first.close()


def test_a_job_finds_its_caches_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env/d1").mkdir(parents=True)
    (tmp_path / "here/d2").mkdir(parents=True)
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "env"))
    cached.add_folder(str(tmp_path / "here"))
    try:
        assert cached.cache_folder("d1") == tmp_path / "env/d1"
        assert cached.cache_folder("d2") == tmp_path / "here/d2"
        with pytest.raises(UnknownCache):
            cached.cache_folder("d3")
    finally:
        cached.drop_folder(str(tmp_path / "here"))
    with pytest.raises(UnknownCache):
        cached.cache_folder("d2")
