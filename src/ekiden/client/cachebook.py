"""What a client knows of caches: their manifests, and the files in them.

The id of a cache is looked up once per connection, for it may mean something else after a broker
was away; a manifest is known by its own hash and stays true.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from ekiden.client.caches import CacheFile
from ekiden.client.uses import UNKNOWN_REMEDY
from ekiden.errors import Fault, UnknownCache
from ekiden.model.caches import (
    CachedFile,
    CacheUse,
    Manifest,
    check_cache_id,
    decode_manifest,
)
from ekiden.model.work import FileRef
from ekiden.world.porter import Porter

if TYPE_CHECKING:
    from ekiden.client.core import Core

# Files of manifests that are remembered: about 100 MB. The newest manifest is, however large.
FILES_KEPT: Final = 200_000

# Ids that are remembered.
_IDS_KEPT: Final = 1000


class CacheBook:
    """Asks and remembers. Used on the client's loop."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._uses: dict[str, CacheUse] = {}
        self._welcome: object = None
        """Of the broker that the ids were looked up at."""
        self._manifests: OrderedDict[str, tuple[Manifest, dict[str, CachedFile]]] = OrderedDict()

    async def use(self, cache_id: str) -> CacheUse:
        """What lies under the id. Raises `UnknownCache`."""
        welcome = self._core.machine.link.welcome
        if welcome is None or welcome is not self._welcome or len(self._uses) >= _IDS_KEPT:
            self._uses.clear()
            self._welcome = welcome
        found = self._uses.get(cache_id)
        if found is None:
            found = self._uses[cache_id] = await self.ask_use(cache_id)
        return found

    async def ask_use(self, cache_id: str) -> CacheUse:
        """The same, asked now."""
        return use_of(await self.ask("cache", cache_id))

    async def ask(self, verb: str, cache_id: str) -> dict[str, Any]:
        """The broker's answer to a question about one cache. Raises `UnknownCache`."""
        try:
            return dict(await self._core.ask_here(verb, id=check_cache_id(cache_id)))
        except UnknownCache as error:
            error.remedy = error.remedy or UNKNOWN_REMEDY
            raise

    def forget(self, cache_ids: Iterable[str]) -> None:
        """These may be something else from now on."""
        for cache_id in cache_ids:
            self._uses.pop(cache_id, None)

    async def manifest(self, porter: Porter, use: CacheUse) -> Manifest:
        """What is in a cache. Raises what keeps it from being fetched or read."""
        return (await self._entry(porter, use))[0]

    async def find(self, porter: Porter, files: Iterable[CacheFile]) -> dict[CacheFile, FileRef]:
        """Each of these files as a job refers to it; names are to be filled in. Raises
        `UnknownCache` for one that is not there."""
        found: dict[CacheFile, FileRef] = {}
        for file in files:
            use = await self.use(file.cache_id)
            entry = (await self._entry(porter, use))[1].get(file.name)
            if entry is None:
                raise UnknownCache(
                    f"cache {file.cache_id!r} has no file {file.name!r}",
                    remedy=f"see its files with: ekiden cache show {file.cache_id} --files",
                )
            found[file] = FileRef(
                file.name, entry.size, None, entry.blob, entry.executable, file.cache_id, entry.name
            )
        return found

    async def _entry(self, porter: Porter, use: CacheUse) -> tuple[Manifest, dict[str, CachedFile]]:
        entry = self._manifests.get(use.manifest)
        if entry is None:
            data = await porter.read(use.manifest, use.size)
            # Of many files it takes a second or so to read and check.
            entry = await asyncio.to_thread(_opened, data)
            self._manifests[use.manifest] = entry
            while len(self._manifests) > 1 and self._files_kept() > FILES_KEPT:
                self._manifests.popitem(last=False)
        self._manifests.move_to_end(use.manifest)
        return entry

    def _files_kept(self) -> int:
        return sum(len(names) for _, names in self._manifests.values())


def use_of(answer: dict[str, Any]) -> CacheUse:
    """The cache in an answer of the broker."""
    try:
        return CacheUse(str(answer["id"]), str(answer["manifest"]), int(answer["size"]))
    except (KeyError, TypeError, ValueError):
        raise Fault("the broker does not say what the cache is") from None


def _opened(data: bytes) -> tuple[Manifest, dict[str, CachedFile]]:
    manifest = decode_manifest(data)
    return manifest, {file.name: file for file in manifest.files}
