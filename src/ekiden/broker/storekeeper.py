"""Does for the broker's store what needs a disk.

What changes the folder is done by one thread, in the order it was asked. Parts are read by a
second, beside that, because a sync may take long; and a blob that is said to be damaged by a third,
because reading all of it may take longer still.

Whatever fails is told to whoever it concerns; a blob that could not be written was promised to
nobody, so unlike the journal's failures none of this ends the broker.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from ekiden import limits
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
from ekiden.broker.holds import Holds
from ekiden.errors import BadRequest, BlobDamaged, DiskFull, EkidenError, NoSpace, UnknownBlob
from ekiden.machine import Log
from ekiden.model.caches import CacheUse, decode_manifest
from ekiden.observe.logs import log_effect
from ekiden.world.blobs import BlobFolder
from ekiden.world.codecs import Packer, unpack
from ekiden.world.loop import Driver
from ekiden.world.memory import keep_part_buffers

# How often uploads that were set aside are looked at.
TIDY_S: Final = 60.0

# Files must not keep jobs waiting: after a sync of the journal that took longer than this, the next
# part of a file is written as much later, so that the disk is the journal's about half of the time.
SLOW_SYNC_S: Final = 0.003
PAUSE_S_MAX: Final = 0.05


class Storekeeper:
    """Performs the store's effects on a folder. Registers itself with `driver` for them."""

    def __init__(self, driver: Driver, folder: BlobFolder, *, quota: int = 0) -> None:
        """`quota` is for `facts` alone: the store's machine sees to it."""
        self._driver = driver
        self._folder = folder
        self._quota = quota
        self._closed = False
        self._pause_s = 0.0
        """How long the next write is to wait, for the journal to have the disk."""
        self._holds = Holds()
        self._packer = Packer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blobs")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="blobs-read")
        self._examiner = ThreadPoolExecutor(1, thread_name_prefix="blobs-check")
        keep_part_buffers()
        for kind, work in (
            (BeginBlob, self._begin), (WriteBlob, self._write), (DropBlob, self._drop),
            (CheckCache, self._check_cache), (ReleaseCache, self._release_cache),
            (FindUnused, self._find_unused), (RemoveBlobs, self._remove),
        ):  # fmt: skip
            driver.handle(kind, self._in(self._thread, work))
        self._read_in_thread = self._in(self._reader, self._read)
        driver.handle(ReadBlob, self._read_soon)
        driver.handle(LocateBlob, self._in(self._reader, self._locate))
        driver.handle(ExamineBlob, self._in(self._examiner, self._examine))
        driver.handle(VerifyCache, self._in(self._examiner, self._verify_cache))

    async def keep_house(self) -> None:
        """Tidy up what another life left; then, now and then, what nobody came back for."""
        await self._wait(self._folder.open)
        while True:
            await asyncio.sleep(TIDY_S)
            await self._wait(self._folder.tidy)

    def close(self) -> None:
        """After what is being done now. Unfinished uploads leave nothing."""
        self._closed = True
        self._examiner.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False)
        self._thread.submit(self._folder.close)
        self._thread.shutdown(wait=False)

    def journal_synced(self, took_s: float) -> None:
        """The journal has synced on the same disk, and it took so long."""
        if took_s > SLOW_SYNC_S:
            self._pause_s = min(took_s, PAUSE_S_MAX)

    def facts(self) -> dict[str, int]:
        """For `stats`."""
        folder = self._folder
        return {
            "count": folder.count,
            "bytes": folder.bytes,
            "quota": self._quota,
            "pinned": len(self._holds),
        }

    # -------------------------------------------------------------- on the loop

    async def _wait(self, work: Callable[[], Any]) -> None:
        try:
            await self._driver.loop.run_in_executor(self._thread, work)
        except EkidenError as error:
            _log_trouble(error)

    def _in(self, thread: ThreadPoolExecutor, work: Callable[[Any], Any]) -> Callable[[Any], None]:
        """Have effects done by that thread; the machine hears what came of them."""

        def run(effect: Any) -> None:
            # Not by way of a future of the loop: that costs as much as the work.
            try:
                event = work(effect)
            except Exception as error:  # noqa: BLE001 - a bug: what the disk does is in the event
                self._soon(self._driver.fail, error)
            else:
                if event is not None:
                    self._soon(self._driver.feed, event)

        def do(effect: Any) -> None:
            thread.submit(run, effect)

        return do

    def _soon(self, tell: Callable[[Any], None], what: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._driver.loop.call_soon_threadsafe(tell, what)

    def _read_soon(self, effect: ReadBlob) -> None:
        """At once if the bytes are in memory: to ask a thread for them takes longer."""
        found = None
        if not effect.codecs:
            found = self._folder.read_cached(effect.blob, effect.offset, effect.length)
        if found is not None:
            self._driver.feed(BlobRead(effect.read, *found))
        else:
            self._read_in_thread(effect)

    # -------------------------------------------------------------- in the thread

    def _begin(self, effect: BeginBlob) -> UploadMoved:
        try:
            stored = self._folder.begin(effect.upload, effect.blob, effect.size)
        except EkidenError as error:
            return self._moved(effect.upload, error=_told(error))
        return self._moved(effect.upload, stored=stored)

    def _write(self, effect: WriteBlob) -> UploadMoved | None:
        pause_s, self._pause_s = self._pause_s, 0.0
        if pause_s:
            time.sleep(pause_s)
        if not self._folder.has(effect.upload):
            return None  # it has ended, by an error or because somebody else was quicker
        try:
            data = unpack(effect.data, effect.codec, effect.length)
        except EkidenError as error:
            self._folder.drop(effect.upload)
            return self._moved(effect.upload, error=error)
        try:
            stored = self._folder.write(effect.upload, data)
        except EkidenError as error:
            return self._moved(effect.upload, error=_told(error))
        return self._moved(effect.upload, stored=stored)

    def _moved(
        self, upload: int, *, stored: bool = False, error: EkidenError | None = None
    ) -> UploadMoved:
        folder = self._folder
        return UploadMoved(upload, folder.written(upload), stored, error, folder.held)

    def _drop(self, effect: DropBlob) -> None:
        if effect.keep:
            self._folder.set_aside(effect.upload)
        else:
            self._folder.drop(effect.upload)

    def _check_cache(self, effect: CheckCache) -> CacheChecked:
        return self._holds.check(effect, self._manifest, self._folder.touch)

    def _manifest(self, cache: CacheUse) -> bytes:
        """Verified, for it decides what is kept."""
        folder = self._folder
        if cache.size > limits.MANIFEST_BYTES_MAX:
            raise BadRequest(f"a manifest of {cache.size:,} bytes")
        if not folder.touch(cache.manifest, cache.size):
            raise UnknownBlob(f"no manifest {cache.manifest[:12]}…")
        data, _ = folder.read(cache.manifest, 0, cache.size)
        if hashlib.sha256(data).hexdigest() != cache.manifest:
            if number := folder.examine(cache.manifest):
                kept = folder.withdraw(cache.manifest, number)
                facts = {"blob": cache.manifest, "kept": kept or "not kept"}
                log_effect(Log("error", "blob.damaged", facts))
            raise BlobDamaged(
                f"the manifest of cache {cache.id!r} is damaged on the broker's disk",
                remedy="put the cache again",
            )
        return data

    def _release_cache(self, effect: ReleaseCache) -> None:
        self._holds.release(effect.cache)

    def _find_unused(self, effect: FindUnused) -> UnusedFound:
        folder = self._folder
        try:
            found, more = folder.unused(effect.wanted, new=effect.new, kept=self._holds)
        except EkidenError as error:
            _log_trouble(error)
            return UnusedFound([], held=folder.held)
        return UnusedFound(found, more, folder.held)

    def _remove(self, effect: RemoveBlobs) -> BlobsRemoved:
        folder = self._folder
        before = folder.count, folder.bytes
        try:
            folder.remove(effect.blobs, kept=self._holds)
        except EkidenError as error:
            _log_trouble(error)
        return BlobsRemoved(before[0] - folder.count, before[1] - folder.bytes, folder.held)

    # -------------------------------------------------------------- in the other threads

    def _read(self, effect: ReadBlob) -> BlobRead:
        try:
            data, size = self._folder.read(effect.blob, effect.offset, effect.length)
        except EkidenError as error:
            return BlobRead(effect.read, error=error)
        packed = self._packer.pack(effect.blob, data, effect.codecs)
        return BlobRead(effect.read, packed.data, size, codec=packed.codec)

    def _locate(self, effect: LocateBlob) -> BlobLocated:
        here = self._folder.touch(effect.blob, effect.size)
        return BlobLocated(effect.number, self._folder.path_of(effect.blob) if here else "")

    def _examine(self, effect: ExamineBlob) -> BlobExamined:
        kept: str | None = None
        try:
            kept = self._withdraw_damaged(effect.blob)
        except EkidenError as error:
            _log_trouble(error)
        return BlobExamined(effect.blob, kept is not None, kept or "")

    def _withdraw_damaged(self, blob: str) -> str | None:
        """Read it; if it is damaged, take it out and say where it is kept, or ""."""
        number = self._folder.examine(blob, goes_on=lambda: not self._closed)
        # That changes the folder, so the thread that does this does it.
        return self._in_order(self._folder.withdraw, blob, number) if number else None

    def _in_order(self, work: Callable[..., Any], *args: Any) -> Any:
        """Behind whatever else changes the folder."""
        return self._thread.submit(work, *args).result()

    def _verify_cache(self, effect: VerifyCache) -> CacheChecked:
        missing = 0
        try:
            manifest = decode_manifest(self._in_order(self._manifest, effect.cache))
            for blob, size in manifest.blobs():
                kept = self._withdraw_damaged(blob)
                if kept is not None:
                    facts = {"blob": blob, "kept": kept or "not kept"}
                    log_effect(Log("error", "blob.damaged", facts))
                missing += not self._in_order(self._folder.touch, blob, size)
        except UnknownBlob:
            return CacheChecked(effect.number, missing=1)
        except EkidenError as error:
            return CacheChecked(effect.number, error=error)
        return CacheChecked(effect.number, len(manifest.files), manifest.size, missing)


def _told(error: EkidenError) -> EkidenError:
    """As the offerer shall hear it: a full disk here is a refusal there."""
    if isinstance(error, NoSpace):
        return DiskFull(error.message, remedy=error.remedy, retry_after_s=5)
    return error


def _log_trouble(error: EkidenError) -> None:
    log_effect(Log("error", "blobs.trouble", {"why": str(error)}))
