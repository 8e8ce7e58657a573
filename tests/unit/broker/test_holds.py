"""Blobs that caches hold: counted, and let go one by one."""

from __future__ import annotations

import hashlib

import pytest

from ekiden.broker.events import CacheChecked, CheckCache
from ekiden.broker.holds import Holds
from ekiden.errors import BlobDamaged, UnknownBlob
from ekiden.model.caches import CachedFile, CacheUse, encode_manifest, make_manifest
from ekiden.simulation.blobs import MemoryBlobs


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Shelf:
    """A store with the blobs of caches."""

    def __init__(self) -> None:
        self.blobs = MemoryBlobs()

    @property
    def holds(self) -> Holds:
        return self.blobs.holds

    def put(self, data: bytes) -> str:
        self.blobs.stored[hash_of(data)] = data
        return hash_of(data)

    def cache(self, name: str, *contents: bytes, pack: bytes = b"") -> CacheUse:
        files = [CachedFile(f"f{n}", len(data), self.put(data)) for n, data in enumerate(contents)]
        packs = []
        if pack:
            packs = [(self.put(pack), len(pack))]
            files.append(CachedFile("packed", 2, hash_of(pack[:2]), pack=packs[0][0]))
        manifest = encode_manifest(make_manifest(files, packs))
        return CacheUse(name, self.put(manifest), len(manifest))

    def check(self, cache: CacheUse, *, known: bool = False) -> CacheChecked:
        answer = self.blobs.perform(CheckCache(7, cache, known))
        assert isinstance(answer, CacheChecked)
        return answer


def test_a_whole_cache_is_held_with_its_packs_and_its_manifest() -> None:
    shelf = Shelf()
    cache = shelf.cache("c", b"one", b"two", pack=b"packed bytes")

    assert shelf.check(cache) == CacheChecked(7, files=3, size=8)

    held = (cache.manifest, hash_of(b"one"), hash_of(b"two"), hash_of(b"packed bytes"))
    assert [blob in shelf.holds for blob in held] == [True] * 4
    assert len(shelf.holds) == 4


def test_shared_blobs_are_held_as_long_as_one_cache_needs_them() -> None:
    shelf = Shelf()
    one, two = shelf.cache("1", b"a", b"shared"), shelf.cache("2", b"b", b"shared")
    shelf.check(one)
    shelf.check(two)

    shelf.holds.release(one)

    held = [hash_of(data) in shelf.holds for data in (b"a", b"b", b"shared")]
    assert held == [False, True, True]
    shelf.holds.release(two)
    assert len(shelf.holds) == 0


def test_every_check_takes_a_release_and_one_too_many_does_nothing() -> None:
    shelf = Shelf()
    cache = shelf.cache("c", b"a")
    shelf.check(cache)
    shelf.check(cache)

    shelf.holds.release(cache)
    assert hash_of(b"a") in shelf.holds
    shelf.holds.release(cache)
    shelf.holds.release(cache)

    assert len(shelf.holds) == 0


@pytest.mark.parametrize("known", [False, True])
def test_a_cache_that_misses_blobs_is_held_only_if_the_book_has_it(known: bool) -> None:
    shelf = Shelf()
    cache = shelf.cache("c", b"a", b"b")
    del shelf.blobs.stored[hash_of(b"a")]
    shelf.blobs.stored[hash_of(b"b")] = b"shorter"

    assert shelf.check(cache, known=known).missing == 2

    assert (hash_of(b"b") in shelf.holds) is known


def test_a_manifest_that_is_missing_or_damaged_is_told_and_nothing_held() -> None:
    shelf = Shelf()
    cache = shelf.cache("c", b"a")
    shelf.blobs.stored[cache.manifest] = bytes(cache.size)
    assert isinstance(shelf.check(cache, known=True).error, BlobDamaged)
    del shelf.blobs.stored[cache.manifest]
    assert shelf.check(cache, known=True) == CacheChecked(7, missing=1)
    assert len(shelf.holds) == 0
    with pytest.raises(UnknownBlob):
        shelf.blobs._manifest(cache)


def test_what_is_no_manifest_is_refused() -> None:
    shelf = Shelf()
    garbage = shelf.put(b"garbage")
    error = shelf.check(CacheUse("c", garbage, 7)).error
    assert error is not None
    assert error.code == "bad_request"
