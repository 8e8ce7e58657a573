"""What callers keep at the broker: files in its store, and caches. A part of both clients.

The work itself is done on the client's loop by the same code for both; they differ in how they
wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ekiden.client.bulk import outcome
from ekiden.client.cachebook import CacheBook
from ekiden.client.caches import CacheFile, CacheReport, Progress
from ekiden.client.core import Core
from ekiden.client.packing import Files
from ekiden.client.programs import (
    COMMON_TOTAL_BYTES,
    PUTS_AT_ONCE,
    FileSource,
    ProgramArgs,
    ProgramOptions,
    cache_files,
    looked_up,
    parcel,
)
from ekiden.client.putting import TARGET, TIMEOUT_S, Order, Putting, check_order
from ekiden.model.caches import CachedFile, check_cache_id
from ekiden.model.work import FileRef
from ekiden.world.porter import Porter, Stored

T = TypeVar("T")
Work = Callable[[Porter], Coroutine[Any, Any, T]]

# Caches told in one answer of the broker.
_PAGE = 500


class _Jobs:
    """What is done on the loop, for either client."""

    _core: Core
    _book: CacheBook

    def _putting(self, order: Order, progress: Progress | None) -> Work[CacheReport]:
        check_order(order)
        return lambda porter: Putting(self._core, porter, self._book, order, progress).run()

    def _list(self, _porter: Porter) -> Coroutine[Any, Any, list[dict[str, Any]]]:
        async def work() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            more = True
            while more:
                after = {"after": found[-1]["id"]} if found else {}
                answer = await self._core.ask_here("caches", limit=_PAGE, **after)
                found += answer["caches"]
                more = bool(answer["more"]) and bool(answer["caches"])
            return found

        return work()

    def _asking(self, verb: str, cache_id: str) -> Work[dict[str, Any]]:
        check_cache_id(cache_id)
        return lambda _porter: self._book.ask(verb, cache_id)

    def _files(self, cache_id: str) -> Work[list[CachedFile]]:
        check_cache_id(cache_id)

        async def work(porter: Porter) -> list[CachedFile]:
            use = await self._book.ask_use(cache_id)
            return list((await self._book.manifest(porter, use)).files)

        return work

    def _removing(self, cache_ids: tuple[str, ...]) -> Work[dict[str, Any]]:
        ids = list(dict.fromkeys(check_cache_id(each) for each in cache_ids))

        async def work(_porter: Porter) -> dict[str, Any]:
            self._book.forget(ids)
            return dict(await self._core.ask_here("cache_remove", ids=ids))

        return work

    def _finding(self, files: set[CacheFile]) -> Work[dict[CacheFile, FileRef]]:
        return lambda porter: self._book.find(porter, files)


def _in_place(
    calls: list[ProgramArgs], options: ProgramOptions, found: Mapping[CacheFile, FileRef]
) -> tuple[list[ProgramArgs], ProgramOptions]:
    """The calls and options with the files of caches as they were found."""
    made = [ProgramArgs(call.args, call.stdin, looked_up(call.files, found)) for call in calls]
    return made, {**options, "common": looked_up(options.get("common"), found)}


class Stock(_Jobs):
    """Files and caches, waited for."""

    def put_blob(self, source: bytes | Path, timeout: float | None = None) -> Stored:
        """Put bytes, or those of a file, in the broker's store, and return their hash and size when
        it has them durably. It goes on across reconnects; what the broker has is not sent again.

        A tool for building on: the store forgets what was not used for two weeks or so.
        """
        stored: Stored = self._wait_for(lambda porter: porter.put(source), timeout)
        return stored

    def fetch_blob(
        self, blob: str, size: int, target: Path | None = None, timeout: float | None = None
    ) -> bytes | None:
        """The bytes under that hash, verified; with `target`, in that file instead, which appears
        in one step when all have come. Raises `UnknownBlob`, `BlobDamaged`, TimeoutError."""
        self._core.check_may_wait()
        data: bytes | None = outcome(self._core.fetch_blob(blob, size, target), timeout)
        return data

    def store_files(self, files: Mapping[str, FileSource]) -> dict[str, FileRef]:
        """Put files in the broker's store that many jobs will get, once; what comes back may be
        given as `files` or `common` of a program in their place. Small ones need no store."""
        if wanted := cache_files([], files):
            files = looked_up(files, self._wait_for(self._finding(wanted)))
        found = parcel(files, COMMON_TOTAL_BYTES)
        refs = found.refs(self._store(found.to_store))
        return {ref.name: ref for ref in refs}

    def put_cache(
        self,
        cache_id: str,
        files: Files,
        target: str = TARGET,
        *,
        timeout_s: float = TIMEOUT_S,
        success_ratio: float = 1.0,
        reread: bool = False,
        progress: Progress | None = None,
        wait: bool = True,
    ) -> CacheReport:
        """Bring a set of files to all workers that listen to `target`, once, under an id that jobs
        can name: `caches=["curves-0517"]`, or `CacheFile` for one file of it.

        `files` is a folder (all plain files in it; folders without files are no part of it), one
        file, or names with bytes or paths. Files that the broker has from earlier caches are not
        sent again. The id stands for this very content: other content is refused as `Conflict`, the
        same once more is safe and brings it to workers that lack it. Workers that join later get it
        by themselves.

        Returns when the workers have it, and raises `CacheIncomplete` if after `timeout_s` it is
        fewer than `success_ratio` of them. With `wait=False` it returns when the broker has it.
        Files that have not changed since an earlier put, by inode, size and times, are not read
        again unless `reread` is set.
        `progress` is called in the client's own thread: keep it short, and do not wait in it.
        """
        order = Order(
            cache_id=cache_id, files=files, target=target, timeout_s=timeout_s,
            success_ratio=success_ratio, wait=wait, reread=reread,
        )  # fmt: skip
        return self._wait_for(self._putting(order, progress))

    def caches(self) -> list[dict[str, Any]]:
        """All caches, the newest first: id, files, bytes, and how many workers have it."""
        return self._wait_for(self._list)

    def cache(self, cache_id: str) -> dict[str, Any]:
        """All that is known of a cache, with every worker it is meant for."""
        return self._wait_for(self._asking("cache", cache_id))

    def cache_files(self, cache_id: str) -> list[CachedFile]:
        """The files of a cache: name, size, hash."""
        return self._wait_for(self._files(cache_id))

    def verify_cache(self, cache_id: str) -> dict[str, Any]:
        """Have every worker read and compare what it has of a cache, and mend what is damaged.
        Says how many do; how it went is told by `cache`."""
        return self._wait_for(self._asking("cache_verify", cache_id))

    def remove_cache(self, *cache_ids: str) -> dict[str, Any]:
        """Forget caches, but for those that jobs still use: `removed`, `in_use` and `unknown`."""
        return self._wait_for(self._removing(cache_ids))

    # -------------------------------------------------------------- inside

    def _wait_for(self, work: Work[T], timeout: float | None = None) -> T:
        self._core.check_may_wait()
        found: T = outcome(self._core.carry_out(work), timeout)
        return found

    def _store(self, sources: list[Any]) -> list[str]:
        """Put these in the broker's store, a few at a time; their hashes."""
        self._core.check_may_wait()
        hashes: list[str] = []
        for at in range(0, len(sources), PUTS_AT_ONCE):
            replies = [self._core.put_blob(each) for each in sources[at : at + PUTS_AT_ONCE]]
            hashes += [reply.result()[0] for reply in replies]
        return hashes

    def _look_up(
        self, calls: Iterable[ProgramArgs], options: ProgramOptions
    ) -> tuple[list[ProgramArgs], ProgramOptions]:
        """Find the files of caches among those of these calls."""
        given = list(calls)
        if not (wanted := cache_files(given, options.get("common"))):
            return given, options
        return _in_place(given, options, self._wait_for(self._finding(wanted)))


class AsyncStock(_Jobs):
    """Files and caches, awaited."""

    async def put_blob(self, source: bytes | Path) -> Stored:
        """Put bytes, or those of a file, in the broker's store; see `Client.put_blob`."""
        stored: Stored = await self._core.put_blob(source)
        return stored

    async def fetch_blob(self, blob: str, size: int, target: Path | None = None) -> bytes | None:
        """The bytes under that hash, verified, or in `target`; see `Client.fetch_blob`."""
        data: bytes | None = await self._core.fetch_blob(blob, size, target)
        return data

    async def store_files(self, files: Mapping[str, FileSource]) -> dict[str, FileRef]:
        """Put files in the broker's store once that many jobs will get; see `Client`."""
        if wanted := cache_files([], files):
            files = looked_up(files, await self._core.carry_out(self._finding(wanted)))
        found = parcel(files, COMMON_TOTAL_BYTES)
        refs = found.refs(await self._store(found.to_store))
        return {ref.name: ref for ref in refs}

    async def put_cache(
        self,
        cache_id: str,
        files: Files,
        target: str = TARGET,
        *,
        timeout_s: float = TIMEOUT_S,
        success_ratio: float = 1.0,
        reread: bool = False,
        progress: Progress | None = None,
        wait: bool = True,
    ) -> CacheReport:
        """Bring a set of files to all workers that listen to `target`; see `Client.put_cache`."""
        order = Order(
            cache_id=cache_id, files=files, target=target, timeout_s=timeout_s,
            success_ratio=success_ratio, wait=wait, reread=reread,
        )  # fmt: skip
        report: CacheReport = await self._core.carry_out(self._putting(order, progress))
        return report

    async def caches(self) -> list[dict[str, Any]]:
        """All caches, the newest first; see `Client.caches`."""
        found: list[dict[str, Any]] = await self._core.carry_out(self._list)
        return found

    async def cache(self, cache_id: str) -> dict[str, Any]:
        """All that is known of a cache, with every worker it is meant for."""
        found: dict[str, Any] = await self._core.carry_out(self._asking("cache", cache_id))
        return found

    async def cache_files(self, cache_id: str) -> list[CachedFile]:
        """The files of a cache: name, size, hash."""
        found: list[CachedFile] = await self._core.carry_out(self._files(cache_id))
        return found

    async def verify_cache(self, cache_id: str) -> dict[str, Any]:
        """Have every worker read and compare what it has of a cache; see `Client`."""
        found: dict[str, Any] = await self._core.carry_out(self._asking("cache_verify", cache_id))
        return found

    async def remove_cache(self, *cache_ids: str) -> dict[str, Any]:
        """Forget caches, but for those that jobs still use; see `Client.remove_cache`."""
        found: dict[str, Any] = await self._core.carry_out(self._removing(cache_ids))
        return found

    # -------------------------------------------------------------- inside

    async def _store(self, sources: list[Any]) -> list[str]:
        """Put these in the broker's store, a few at a time; their hashes."""
        hashes: list[str] = []
        for at in range(0, len(sources), PUTS_AT_ONCE):
            replies = [self._core.put_blob(each) for each in sources[at : at + PUTS_AT_ONCE]]
            hashes += [(await reply)[0] for reply in replies]
        return hashes

    async def _look_up(
        self, calls: Iterable[ProgramArgs], options: ProgramOptions
    ) -> tuple[list[ProgramArgs], ProgramOptions]:
        """Find the files of caches among those of these calls."""
        given = list(calls)
        if not (wanted := cache_files(given, options.get("common"))):
            return given, options
        return _in_place(given, options, await self._core.carry_out(self._finding(wanted)))
