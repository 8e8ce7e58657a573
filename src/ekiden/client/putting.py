"""Putting a cache: from files here to files at every worker it is meant for.

Read and hash, find what the broker has, pack the rest, send, name it, and wait until the workers
have it. Every step may be repeated: what the broker or a worker has is not sent again, so a put
that was cut off is finished by the same put once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ekiden import limits
from ekiden.client import packing
from ekiden.client.caches import (
    REACHING,
    READING,
    SENDING,
    CacheProgress,
    CacheReport,
    CacheWorker,
    Progress,
    workers_of,
)
from ekiden.client.hashes import Hashes, memory_of
from ekiden.client.packing import Contents, Place, Read, Tally
from ekiden.core.subjects import check_pattern
from ekiden.errors import (
    BadRequest,
    BlobDamaged,
    CacheIncomplete,
    Conflict,
    UnknownBlob,
    UnknownCache,
    WrongUsage,
)
from ekiden.model.caches import (
    CacheUse,
    Manifest,
    check_cache_id,
    encode_manifest,
)
from ekiden.world.porter import Porter, Stored

if TYPE_CHECKING:
    from ekiden.client.cachebook import CacheBook
    from ekiden.client.core import Core

TARGET: Final = "job.>"
TIMEOUT_S: Final = 600.0

# Blobs on their way at a time: as many as a connection carries. Each holds a file open or a pack in
# memory.
_PUTS: Final = limits.BLOB_TRANSFERS_MAX

# Earlier caches whose packs are looked through: who puts a changed folder has put the one before
# lately.
_LOOKED_AT: Final = 4

# Between two looks at how far the workers are.
_LOOK_FIRST_S: Final = 0.05
_LOOK_MAX_S: Final = 0.5

# A worker that failed before says within so long that it tries again.
_STALE_S: Final = 2.0

_SHOW_S: Final = 0.1
_FAILED_NAMED: Final = 5


_log = logging.getLogger("ekiden.client")


class Order(Struct, frozen=True, kw_only=True):
    """What is to be put, and when that is done."""

    cache_id: str
    files: Any
    target: str = TARGET
    timeout_s: float = TIMEOUT_S
    """For the workers, once the broker has all."""
    success_ratio: float = 1.0
    wait: bool = True
    reread: bool = False
    """Read also what has not changed since it was read last."""


def check_order(order: Order) -> Order:
    """`order`, if it can be meant. Raises `BadId`, `BadSubject` or `WrongUsage`."""
    check_cache_id(order.cache_id)
    check_pattern(order.target)
    if not 0 <= order.success_ratio <= 1:
        raise WrongUsage(
            f"success_ratio is {order.success_ratio!r}", remedy="give a share from 0 to 1"
        )
    if not order.timeout_s >= 0:
        raise WrongUsage(f"timeout_s is {order.timeout_s!r}", remedy="give seconds")
    return order


class Putting:
    """One put, on the client's loop."""

    def __init__(
        self, core: Core, porter: Porter, book: CacheBook, order: Order, progress: Progress | None
    ) -> None:
        self._core = core
        self._porter = porter
        self._book = book
        self._order = order
        self._progress = progress
        self._began = monotonic()
        self._phase = READING
        self._tally = Tally()
        self._to_send = 0
        self._arrived = 0
        """Bytes the broker has, of those to send."""
        self._sent_bytes = 0
        self._reread = order.reread
        self._workers: list[CacheWorker] = []

    async def run(self) -> CacheReport:
        """All of it. Raises `Conflict`, `CacheIncomplete`, what is wrong with the files, or what
        the broker says."""
        shown = asyncio.create_task(self._show(), name="cache progress")
        try:
            try:
                use, contents, state = await self._put()
            except packing.Changed:
                if self._reread:
                    raise
                # Or it was remembered wrongly: then reading it again helps.
                self._reread, self._phase, self._tally = True, READING, Tally()
                use, contents, state = await self._put()
            contents.kept.clear()
            self._phase = REACHING
            await self._reach(_STALE_S if state != "new" else 0.0)
            self._tell()
        finally:
            self._tally.stopped = True
            shown.cancel()
        report = CacheReport(
            cache_id=self._order.cache_id,
            manifest=use.manifest,
            files=len(contents.files),
            bytes=contents.size,
            sent_bytes=self._sent_bytes,
            state=state,
            workers=self._workers,
            seconds=monotonic() - self._began,
        )
        if self._order.wait and report.ratio < self._order.success_ratio:
            raise incomplete(report)
        return report

    # -------------------------------------------------------------- to the broker

    async def _put(self) -> tuple[CacheUse, Contents, str]:
        before = await self._before()
        contents = await asyncio.to_thread(self._read)
        self._phase = SENDING
        if before is not None and packing.is_same(contents.files, before[1]):
            return before[0], contents, await self._put_again(before[0], contents)
        if before is not None:
            raise self._taken()
        try:
            use = await self._store(contents, await self._places(contents))
            return use, contents, await self._name(use)
        except UnknownBlob:
            # A pack of an earlier cache has gone with it meanwhile: bring everything ourselves.
            use = await self._store(contents, {})
            return use, contents, await self._name(use)
        except Conflict:
            # Somebody may have put the very same files at the same time, packed in another way.
            before = await self._before()
            if before is None or not packing.is_same(contents.files, before[1]):
                raise self._taken() from None
            return before[0], contents, await self._name(before[0])

    def _read(self) -> Contents:
        sources = packing.find_sources(self._order.files)
        origins = [each.origin for each in sources if isinstance(each.origin, str)]
        memory = Hashes(memory_of(origins), trusted=not self._reread)
        contents = packing.read_all(sources, self._tally, memory)
        memory.save()
        return contents

    async def _before(self) -> tuple[CacheUse, Manifest] | None:
        """What lies under the id already, as far as it can be read."""
        try:
            use = await self._book.ask_use(self._order.cache_id)
        except UnknownCache:
            return None
        manifest = await self._manifest(use)
        return None if manifest is None else (use, manifest)

    async def _manifest(self, use: CacheUse) -> Manifest | None:
        try:
            return await self._book.manifest(self._porter, use)
        except (UnknownBlob, BlobDamaged, BadRequest):
            return None

    async def _put_again(self, use: CacheUse, contents: Contents) -> str:
        """The files are those that the id stands for: its own manifest is the one to name."""
        try:
            return await self._name(use)
        except UnknownBlob:
            await self._store(contents, {})
            return await self._name(use)

    async def _places(self, contents: Contents) -> dict[str, Place]:
        """What small files need not travel, because packs of earlier caches have them."""
        wanted = {file.blob: file.size for file in contents.files if file.is_small}
        places: dict[str, Place] = {}
        if not wanted:
            return places
        answer = await self._core.ask_here("caches", limit=_LOOKED_AT)
        for each in answer.get("caches", ()):
            manifest = await self._manifest(CacheUse(each["id"], each["manifest"], each["size"]))
            if manifest is not None:
                found = await asyncio.to_thread(packing.find_places, wanted, manifest)
                places |= found
                wanted = {blob: size for blob, size in wanted.items() if blob not in found}
            if not wanted:
                break
        return places

    async def _store(self, contents: Contents, reused: dict[str, Place]) -> CacheUse:
        """Bring the broker what it lacks, and the manifest."""
        places = dict(reused)
        packs = packing.plan_packs(contents.files, places)
        large = packing.large_files(contents.files)
        self._arrived = 0
        self._to_send = sum(file.size for pack in packs for file in pack)
        self._to_send += sum(file.size for file in large)

        async def put_pack(files: list[Read]) -> None:
            data, blob = await asyncio.to_thread(packing.make_pack, files, contents.kept)
            await self._put_blob(data, Stored(blob, len(data)))
            places.update(packing.places_in(files, blob))

        async def put_large(file: Read) -> None:
            source = file.origin if isinstance(file.origin, bytes) else Path(file.origin)
            try:
                await self._put_blob(source, Stored(file.blob, file.size))
            except BlobDamaged:
                raise packing.changed(file.name) from None

        await _several([
            *((put_pack, pack) for pack in packs), *((put_large, file) for file in large)
        ])  # fmt: skip
        manifest = await asyncio.to_thread(packing.describe, contents.files, places)
        data = encode_manifest(manifest)
        if len(data) > limits.MANIFEST_BYTES_MAX:
            raise BadRequest(
                f"the list of files takes {len(data):,} bytes, over the limit of "
                f"{limits.MANIFEST_BYTES_MAX:,}",
                remedy="put fewer files in a cache",
            )
        stored = await self._porter.put(data, sent=self._note_sent)
        return CacheUse(self._order.cache_id, stored.blob, stored.size)

    async def _put_blob(self, source: bytes | Path, known: Stored) -> None:
        sent = 0

        def note(size: int) -> None:
            nonlocal sent
            sent += size
            self._arrived += size
            self._note_sent(size)

        await self._porter.put(source, known, note)
        self._arrived += known.size - sent  # what was there already has arrived, too

    def _note_sent(self, size: int) -> None:
        self._sent_bytes += size

    async def _name(self, use: CacheUse) -> str:
        """Give the content its id; what the broker says of that."""
        answer = await self._core.ask_here(
            "cache_put", id=use.id, manifest=use.manifest, size=use.size, target=self._order.target
        )
        self._book.forget([use.id])
        return str(answer["state"])

    def _taken(self) -> Conflict:
        cache_id = self._order.cache_id
        return Conflict(
            f"cache {cache_id!r} is there already, with other content",
            remedy=f"choose another id, or remove it first: ekiden cache rm {cache_id}",
        )

    # -------------------------------------------------------------- to the workers

    async def _reach(self, stale_s: float) -> None:
        """Until every worker has it or will not have it, or time is up. For `stale_s`, what failed
        may be news of an earlier try."""
        begun = monotonic()
        deadline = begun + self._order.timeout_s
        pause_s = _LOOK_FIRST_S
        while True:
            with suppress(TimeoutError):  # the broker is busy or away: there is time yet
                answer = await self._core.ask_here("cache", id=self._order.cache_id)
                self._workers = workers_of(answer)
            now = monotonic()
            left_s = deadline - now
            fresh = now - begun >= stale_s
            over = all(each.has_it or (fresh and each.settled) for each in self._workers)
            if not self._order.wait or left_s <= 0 or over:
                return
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.3, _LOOK_MAX_S)

    # -------------------------------------------------------------- for those who watch

    async def _show(self) -> None:
        while self._progress is not None:
            self._tell()
            await asyncio.sleep(_SHOW_S)

    def _tell(self) -> None:
        if self._progress is None:
            return
        if self._phase == READING:
            said = CacheProgress(READING, self._tally.done, self._tally.total)
        elif self._phase == SENDING:
            said = CacheProgress(SENDING, self._arrived, self._to_send)
        else:
            done = sum(each.total if each.has_it else each.done for each in self._workers)
            said = CacheProgress(
                REACHING,
                done,
                sum(each.total for each in self._workers),
                sum(each.has_it for each in self._workers),
                len(self._workers),
            )
        try:
            self._progress(said)
        except Exception:  # noqa: BLE001 - a user's mistake must not end the put
            _log.exception("the progress callback of cache %s failed", self._order.cache_id)


async def _several(works: list[tuple[Callable[[Any], Awaitable[None]], Any]]) -> None:
    """Do these, a few at a time and in order. The first that fails ends the others."""
    left: Iterator[Any] = iter(works)

    async def work_off() -> None:
        for work, what in left:
            await work(what)

    tasks = [asyncio.create_task(work_off()) for _ in range(min(_PUTS, len(works)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def incomplete(report: CacheReport) -> CacheIncomplete:
    """The error for a put that reached too few, with the report on it."""
    failed = [
        f"{worker.id} ({worker.text})" if worker.text else worker.id for worker in report.failed
    ]
    more = f" and {len(failed) - _FAILED_NAMED:,} more" if len(failed) > _FAILED_NAMED else ""
    told = f"; failed: {', '.join(failed[:_FAILED_NAMED])}{more}" if failed else ""
    waiting = report.of - report.reached - len(failed)
    late = f"; {waiting:,} not there yet" if waiting else ""
    error = CacheIncomplete(
        f"cache {report.cache_id!r} has reached {report.reached:,} of {report.of:,} workers after "
        f"{report.seconds:.0f} s{told}{late}",
        remedy="put it again to bring it to those that lack it",
    )
    error.report = report
    return error
