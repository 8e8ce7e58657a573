"""Does for the broker's store what needs a disk: one thread, in the order it was asked.

Whatever fails is told to whoever it concerns; a blob that could not be written was promised to
nobody, so unlike the journal's failures none of this ends the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from ekiden.broker.events import BeginBlob, BlobRead, DropBlob, ReadBlob, UploadMoved, WriteBlob
from ekiden.errors import DiskFull, EkidenError, NoSpace
from ekiden.machine import Log
from ekiden.observe.logs import log_effect
from ekiden.world.blobs import BlobFolder
from ekiden.world.loop import Driver

SWEEP_S: Final = 3600.0

# Not at once: after a boot the clock may be wrong until it was set, and age is told by it.
FIRST_SWEEP_S: Final = 600.0


class Storekeeper:
    """Performs the store's effects on a folder. Registers itself with `driver` for them."""

    def __init__(self, driver: Driver, folder: BlobFolder, *, unused_s: float) -> None:
        """What was not used for `unused_s` seconds is removed, within an hour or so."""
        self._driver = driver
        self._folder = folder
        self._unused_s = unused_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blobs")
        driver.handle(BeginBlob, lambda effect: self._do(self._begin, effect))
        driver.handle(WriteBlob, lambda effect: self._do(self._write, effect))
        driver.handle(ReadBlob, lambda effect: self._do(self._read, effect))
        driver.handle(DropBlob, lambda effect: self._do(self._drop, effect))

    async def keep_house(self) -> None:
        """Tidy up what another life left; then, now and then, remove what nobody uses."""
        await self._wait(self._folder.open)
        pause_s = FIRST_SWEEP_S
        while True:
            await asyncio.sleep(pause_s)
            removed = await self._wait(lambda: self._folder.sweep(self._unused_s))
            if removed:
                log_effect(Log("info", "blobs.swept", {"removed": removed}))
            pause_s = SWEEP_S

    def close(self) -> None:
        """After what is being done now. Unfinished uploads leave nothing."""
        self._thread.submit(self._folder.close)
        self._thread.shutdown(wait=False)

    def facts(self) -> dict[str, int]:
        """For `stats`."""
        return {"count": self._folder.count, "bytes": self._folder.bytes}

    # -------------------------------------------------------------- on the loop

    async def _wait(self, work: Callable[[], Any]) -> Any:
        try:
            return await self._driver.loop.run_in_executor(self._thread, work)
        except EkidenError as error:
            log_effect(Log("error", "blobs.trouble", {"why": str(error)}))
            return 0

    def _do(self, work: Callable[[Any], Any], effect: Any) -> None:
        done = self._driver.loop.run_in_executor(self._thread, work, effect)
        done.add_done_callback(self._tell)

    def _tell(self, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._driver.fail(error)  # a bug: what the disk does is in the event
        elif (event := done.result()) is not None:
            self._driver.feed(event)

    # -------------------------------------------------------------- in the thread

    def _begin(self, effect: BeginBlob) -> UploadMoved:
        try:
            stored = self._folder.begin(effect.upload, effect.blob, effect.size)
        except EkidenError as error:
            return UploadMoved(effect.upload, error=_told(error))
        return UploadMoved(effect.upload, stored=stored)

    def _write(self, effect: WriteBlob) -> UploadMoved | None:
        folder = self._folder
        if not folder.has(effect.upload):
            return None  # it has ended, by an error or because somebody else was quicker
        try:
            stored = folder.write(effect.upload, effect.data)
        except EkidenError as error:
            return UploadMoved(effect.upload, error=_told(error))
        return UploadMoved(effect.upload, folder.written(effect.upload), stored)

    def _read(self, effect: ReadBlob) -> BlobRead:
        try:
            data, size = self._folder.read(effect.blob, effect.offset, effect.length)
        except EkidenError as error:
            return BlobRead(effect.read, error=error)
        return BlobRead(effect.read, data, size)

    def _drop(self, effect: DropBlob) -> None:
        self._folder.drop(effect.upload)


def _told(error: EkidenError) -> EkidenError:
    """As the offerer shall hear it: a full disk here is a refusal there."""
    if isinstance(error, NoSpace):
        return DiskFull(error.message, remedy=error.remedy, retry_after_s=5)
    return error
