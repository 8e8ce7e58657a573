"""Which blobs are kept because caches need them.

Many caches share blobs, and one may be checked more than once: holds are counted. They live in
memory only; a broker that starts takes them anew from its book.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ekiden.broker.events import CacheChecked, CheckCache
from ekiden.errors import EkidenError, UnknownBlob
from ekiden.model.caches import CacheUse, decode_manifest


class Holds:
    """Held blobs, by the manifests that name them."""

    def __init__(self) -> None:
        # Hashes as bytes: half the memory of their names, and there may be a million.
        self._blobs: Counter[bytes] = Counter()
        self._manifests: dict[str, tuple[int, list[bytes]]] = {}
        """How often it is held, and what it names, itself included."""

    def __contains__(self, blob: object) -> bool:
        return isinstance(blob, str) and bytes.fromhex(blob) in self._blobs

    def __len__(self) -> int:
        return len(self._blobs)

    def check(
        self, effect: CheckCache, read: Callable[[CacheUse], bytes], has: Callable[[str, int], bool]
    ) -> CacheChecked:
        """Do what `CheckCache` says. `read` brings the manifest, verified, or raises; `has` tells
        whether a blob of that size is there, and counts as its use."""
        cache = effect.cache
        try:
            manifest = decode_manifest(read(cache))
        except UnknownBlob:
            return CacheChecked(effect.number, missing=1)
        except EkidenError as error:
            return CacheChecked(effect.number, error=error)
        named, missing = [bytes.fromhex(cache.manifest)], 0
        for blob, size in manifest.blobs():
            named.append(bytes.fromhex(blob))
            missing += not has(blob, size)
        if not missing or effect.known:
            self._hold(cache.manifest, named)
        return CacheChecked(effect.number, len(manifest.files), manifest.size, missing)

    def release(self, cache: CacheUse) -> None:
        """One hold less; of a manifest that is not held, nothing."""
        count, named = self._manifests.get(cache.manifest, (0, []))
        if count > 1:
            self._manifests[cache.manifest] = (count - 1, named)
        elif count:
            del self._manifests[cache.manifest]
            for blob in named:
                self._blobs[blob] -= 1
                if not self._blobs[blob]:
                    del self._blobs[blob]

    def _hold(self, manifest: str, named: list[bytes]) -> None:
        count, before = self._manifests.get(manifest, (0, named))
        self._manifests[manifest] = (count + 1, before)
        if not count:
            self._blobs.update(named)
