"""The caches of a worker: fetched when they are offered or needed, looked after, made room for.

What a broker offers is brought here two caches at a time; what a job waits for does not stand in
that line. Files and packs come over several transfers at once. What fails is tried again a few
times, then told; the next offer, or the next job that needs it, tries anew.

Whoever uses a cache pins it: what is pinned is neither removed nor replaced by other content.
Everything here belongs to the agent's loop; the folder has a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeAlias

from ekiden import limits
from ekiden.errors import BadRequest, CacheInUse, EkidenError, Fault, NoSpace, Refusal
from ekiden.machine import Log
from ekiden.model.caches import CacheUse
from ekiden.observe.logs import log_effect
from ekiden.worker.cache_folder import Build, CacheFolder
from ekiden.worker.contract import CacheSaid, CachesOffered
from ekiden.worker.store import Store
from ekiden.world.keys import ENV_STATE, state_folder

FETCHING: Final = "fetching"
OK: Final = "ok"
SKIPPED: Final = "skipped"
FAILED: Final = "failed"
GONE: Final = "gone"

# Offered caches on their way at a time: the second one's transfers fill the gaps of the first.
AT_ONCE: Final = 2

# Transfers at a time, of all caches: a pack is held in memory, and one transfer waits a round trip
# for every window of parts.
TRANSFERS: Final = 4

# How often it is told how far a fetch has come.
PROGRESS_S: Final = 0.5

# Between tries after a fault: a disk or a broker that is busy has time to recover.
PAUSES_S: Final = (0.5, 2.0, 8.0)

# For jobs that have ended to be told as such, when the content they used is to be replaced.
UNUSED_S: Final = 10.0

# A pack is held in memory whole; who makes them makes them of about `PACK_BYTES`.
_PACK_BYTES_MAX: Final = 4 * limits.PACK_BYTES

# Looked at again this often, if a cache is not sound right after it was laid down.
_LOOKS: Final = 3

Emit: TypeAlias = Callable[[Any], None]


def claim_folder(folder: Path | None, bytes_max: int | None) -> CacheFolder:
    """The folder for this process's caches: the one named, or else the first of those of this
    account that nobody uses. Raises a Fault. Blocks."""
    try:
        if folder is not None:
            found = CacheFolder(folder, bytes_max)
            if found.claim():
                return found
            raise Fault(
                f"the folder {str(folder)!r} for caches is used by another worker",
                remedy="give each worker its own with --cache",
            )
        base = _default_base()
        for number in itertools.count(1):
            found = CacheFolder(base / str(number), bytes_max)
            if found.claim():
                return found
    except ImportError:
        pass
    raise Fault("caches need a POSIX system")


def _default_base() -> Path:
    if os.environ.get(ENV_STATE):
        return state_folder() / "caches"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ekiden"


class _Want:
    """A cache that is to lie here."""

    __slots__ = ("admitted", "after", "done", "go", "trouble", "use", "verify")

    def __init__(self, use: CacheUse, after: _Want | None) -> None:
        self.use = use
        self.after = after
        """Another content under the same id, which came first."""
        self.verify = False
        self.go = asyncio.Event()
        self.admitted = False
        """Whether it takes one of the places for what was offered."""
        self.done = asyncio.Event()
        self.trouble = ""


class Caches:
    """Performs `CachesOffered` for the machine that `emit` feeds."""

    def __init__(
        self,
        store: Store,
        emit: Emit,
        claim: Callable[[], CacheFolder],
        *,
        pauses_s: Iterable[float] = PAUSES_S,
    ) -> None:
        self._store = store
        self._emit = emit
        self._claim = claim
        self._pauses_s = tuple(pauses_s)
        self._loop = asyncio.get_running_loop()
        self._folder: CacheFolder | None = None
        self._why = "the folder for caches was not looked for"
        """Why there is no folder."""
        self._opening = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ekiden-caches")
        self._transfers = asyncio.Semaphore(TRANSFERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._wants: dict[str, _Want] = {}
        """By id: the last one."""
        self._line: deque[_Want] = deque()
        self._admitted = 0
        self._pins: Counter[CacheUse] = Counter()
        self._unpinned = asyncio.Event()
        self._doomed: set[str] = set()
        """Of no use any more, except to jobs that have them."""
        self._closed = False

    @property
    def trees(self) -> str:
        """The folder with a folder for each cache; empty if there can be none."""
        return self._folder.trees if self._folder is not None else ""

    async def start(self) -> None:
        """Claim the folder. What is in it is looked through when the first cache is wanted."""
        try:
            self._folder = await self._loop.run_in_executor(self._thread, self._claim)
        except (EkidenError, OSError, RuntimeError) as error:  # RuntimeError: no home folder
            self._why = str(error)
            log_effect(Log("info", "caches.unavailable", {"why": self._why}))

    def close(self) -> None:
        """Fetch nothing more, and let others have the folder."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._folder is not None:
            self._thread.submit(self._folder.close)
        self._thread.shutdown(wait=False)

    # -------------------------------------------------------------- what is asked

    def offered(self, effect: CachesOffered) -> None:
        """See to it that they are here; told by `CacheSaid`."""
        self._go(self._take_offer(effect))

    async def ensure(self, uses: Iterable[CacheUse]) -> str:
        """Return when all of them lie here and are sound; else the reason why that cannot be."""
        found = await asyncio.gather(*(self._ensure(use) for use in uses))
        return next(filter(None, found), "")

    def pin(self, uses: Iterable[CacheUse], count: int = 1) -> None:
        """So many more use these."""
        for use in uses:
            self._pins[use] += count

    def unpin(self, uses: Iterable[CacheUse]) -> None:
        """One user less."""
        for use in uses:
            self._pins[use] -= 1
            if self._pins[use] <= 0:
                del self._pins[use]
                self._unpinned.set()
                self._unpinned = asyncio.Event()
                if use.id in self._doomed and not self._closed:
                    self._go(self._remove_doomed())

    # -------------------------------------------------------------- offers

    async def _take_offer(self, effect: CachesOffered) -> None:
        if not effect.caches and not (self._folder is not None and self._folder.is_used()):
            return  # Nothing is wanted, and nothing is here that could be too much.
        try:
            folder = await self._open()
            held = await self._do(folder.held)
        except (EkidenError, OSError) as error:
            for use in effect.caches:
                self._say(use, FAILED, str(error))
            return
        if effect.whole:
            self._doomed = held.keys() - {use.id for use in effect.caches}
            await self._remove_doomed()
        # What is here comes first: what others have in common with it is then known to be sound.
        for use in sorted(effect.caches, key=lambda use: held.get(use.id) != use):
            want = self._want(use)
            want.verify = want.verify or effect.verify
            self._line.append(want)
        self._admit()

    async def _remove_doomed(self) -> None:
        try:
            folder = await self._open()
            for cache in list(self._doomed):
                # Whoever pins it from here on looks at it behind us, and has it brought again.
                if cache not in self._in_use():
                    self._doomed.discard(cache)
                    await self._do(folder.discard, cache)
        except (EkidenError, OSError) as error:
            log_effect(Log("warning", "cache.stuck", {"why": str(error)}))

    def _in_use(self) -> set[str]:
        return {use.id for use in self._pins} | self._wants.keys()

    # -------------------------------------------------------------- wants

    def _want(self, use: CacheUse) -> _Want:
        """The want of this cache; a new one has not been let go."""
        self._doomed.discard(use.id)
        before = self._wants.get(use.id)
        if before is not None and before.use == use:
            return before
        want = self._wants[use.id] = _Want(use, before)
        self._go(self._bring(want))
        return want

    def _admit(self) -> None:
        while self._line and self._admitted < AT_ONCE:
            want = self._line.popleft()
            if not want.go.is_set():
                want.admitted = True
                self._admitted += 1
                want.go.set()

    async def _ensure(self, use: CacheUse) -> str:
        for _ in range(_LOOKS):
            try:
                folder = await self._open()
                if await self._do(folder.is_sound, use):
                    self._doomed.discard(use.id)
                    return ""
            except (EkidenError, OSError) as error:
                return f"the cache {use.id!r} cannot be had here: {error}"
            want = self._want(use)
            want.go.set()
            await want.done.wait()
            if want.trouble:
                return f"the cache {use.id!r} cannot be had here: {want.trouble}"
        return f"files of the cache {use.id!r} are changed as soon as they are laid down here"

    async def _bring(self, want: _Want) -> None:
        use = want.use
        try:
            await want.go.wait()
            if want.after is not None:
                await want.after.done.wait()
                want.after = None
            status = await self._have(want)
            self._say(use, status)
        except (EkidenError, OSError) as error:
            want.trouble = str(error)
            self._say(use, FAILED, want.trouble[: limits.ERROR_TEXT_MAX])
        finally:
            if self._wants.get(use.id) is want:
                del self._wants[use.id]
            if want.admitted:
                self._admitted -= 1
            want.done.set()
            if not self._closed:
                self._admit()

    async def _have(self, want: _Want) -> str:
        """See to it that it lies here and is sound: whether something had to be done for it."""
        use, folder = want.use, await self._open()
        held = (await self._do(folder.held)).get(use.id)
        if held == use:
            if want.verify or not await self._do(folder.is_proven, use.id):
                spoiled = await self._prove(want, folder)
            else:
                spoiled = await self._do(folder.check, use.id)
            if not spoiled:
                return SKIPPED
            facts = {"cache": use.id, "files": len(spoiled), "first": spoiled[0]}
            log_effect(Log("warning", "cache.spoiled", facts))
        await self._fetch(want, folder)
        return OK

    async def _wait_unused(self, use: CacheUse) -> None:
        """Until no job has this content, which is to be replaced."""
        try:
            async with asyncio.timeout(UNUSED_S):
                while self._pins.get(use):
                    await self._unpinned.wait()
        except TimeoutError:
            raise CacheInUse(
                f"jobs that run here use other files under the id {use.id!r}",
                remedy="give new content an id of its own",
            ) from None

    async def _prove(self, want: _Want, folder: CacheFolder) -> list[str]:
        spoiled: list[str] = []
        cache, upto, done = want.use.id, 0, 0
        while True:
            proof, some = await self._do(folder.prove, cache, upto)
            spoiled += some
            upto, done = proof.upto, done + proof.size
            if proof.whole:
                break
            self._say(want.use, FETCHING, "reading what is there", done)
        await self._do(folder.trust, cache)
        return spoiled

    # -------------------------------------------------------------- fetching

    async def _fetch(self, want: _Want, folder: CacheFolder) -> None:
        pauses = iter(self._pauses_s)
        while True:
            try:
                await self._lay(want.use, folder)
                return
            except (Refusal, NoSpace):
                raise  # It will be no different the next time.
            except (Fault, OSError) as error:
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise
                facts = {"cache": want.use.id, "why": str(error), "pause_s": pause_s}
                log_effect(Log("warning", "cache.failed", facts))
                await asyncio.sleep(pause_s)

    async def _lay(self, use: CacheUse, folder: CacheFolder) -> None:
        """One try to lay it down; if it fails, nothing is left of it."""
        if not 0 < use.size <= limits.MANIFEST_BYTES_MAX:
            raise BadRequest(f"the manifest of cache {use.id!r} has {use.size:,} bytes")
        raw = await self._store.read(use.manifest, use.size)
        build: Build = await self._do(folder.begin, use, raw)
        try:
            await self._make_room(build, folder)
            self._say(use, FETCHING, "", build.done, build.total)
            ticker = self._loop.create_task(self._tell_progress(build))
            try:
                await self._bring_missing(build, folder)
            finally:
                ticker.cancel()
            held = (await self._do(folder.held)).get(use.id)
            if held is not None and held != use:
                await self._wait_unused(held)
            await self._do(folder.finish, build)
        except (EkidenError, OSError):
            await self._do(folder.abandon, build)
            raise

    async def _make_room(self, build: Build, folder: CacheFolder) -> None:
        held = await self._do(folder.held)
        pinned = self._in_use()
        for cache in await self._do(folder.make_room, build.wanted, pinned):
            self._say(held[cache], GONE, "removed for want of room")

    async def _bring_missing(self, build: Build, folder: CacheFolder) -> None:
        sizes = dict(build.manifest.packs)
        files = build.manifest.files
        missing = [(pack, sizes[pack], True) for pack in build.packs]
        missing += [(blob, files[places[0]].size, False) for blob, places in build.files.items()]
        if any(size > _PACK_BYTES_MAX for _, size, packed in missing if packed):
            raise BadRequest(f"a pack of cache {build.tree.use.id!r} is too large")
        left = iter(missing)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(TRANSFERS, len(missing))):
                    tasks.create_task(self._carry(build, folder, left), name="cache-fetch")
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # The others were cancelled, or say the same.

    async def _carry(
        self, build: Build, folder: CacheFolder, left: Iterator[tuple[str, int, bool]]
    ) -> None:
        for blob, size, packed in left:
            if packed:
                async with self._transfers:
                    data = await self._store.read(blob, size)
                await self._do(folder.lay_pack, build, blob, data)
            else:
                async with self._transfers:
                    await self._store.fetch(blob, size, build.place_for(blob))
                await self._do(folder.lay_file, build, blob)

    async def _tell_progress(self, build: Build) -> None:
        """Also of files that are under way: theirs is what lies beside their place."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            partly = await self._loop.run_in_executor(None, _bytes_in, f"{build.folder}/files")
            done = min(build.done + partly, build.total)
            self._say(build.tree.use, FETCHING, "", done, build.total)

    # -------------------------------------------------------------- small things

    async def _open(self) -> CacheFolder:
        if self._folder is None:
            raise Fault(self._why)
        async with self._opening:
            await self._do(self._folder.open)
        return self._folder

    async def _do(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._loop.run_in_executor(self._thread, function, *args)

    def _say(
        self, use: CacheUse, status: str, text: str = "", done: int = 0, total: int = 0
    ) -> None:
        if not self._closed:
            self._emit(CacheSaid(use.id, use.manifest, status, text, done, total))

    def _go(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def _bytes_in(folder: str) -> int:
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
