"""Nouns of cached data: a set of files under a CacheId, shipped once and used by many jobs.

A cache is described by its *manifest*: every file with its hash, and where in the store its bytes
lie. The manifest is itself a blob, so its hash stands for the whole content: the same id with the
same manifest is the same cache, and one that is complete never changes.

Small files do not travel one by one: the bytes of many lie one after the other in a *pack*. A pack
need not be used up: a manifest may name a few files of a pack that an earlier cache brought.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from ekiden import limits
from ekiden.errors import BadId, BadName, BadRequest
from ekiden.model.ids import shown
from ekiden.model.names import check_file_name

BlobRef: TypeAlias = tuple[str, int]
"""SHA-256 of some bytes, in lower-case hex, and how many they are."""

_BLOB: Final = re.compile(r"[0-9a-f]{64}")
_CACHE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


class CachedFile(Struct, array_like=True, frozen=True):
    """A file of a cache."""

    name: str
    size: int
    blob: str
    """SHA-256 of its bytes, in hex. They are a blob of the store unless `pack` says otherwise."""
    executable: bool = False
    pack: str = ""
    """The blob its bytes lie in, from `at` on, if they are no blob of their own."""
    at: int = 0


class Manifest(Struct, array_like=True, frozen=True):
    """What is in a cache. Files are sorted by name."""

    files: list[CachedFile]
    packs: list[BlobRef] = []
    """All packs that files name, sorted."""

    @property
    def size(self) -> int:
        """Of all files together, each counted."""
        return sum(file.size for file in self.files)

    def blobs(self) -> Iterator[BlobRef]:
        """What must be in the store for the cache to be whole, each once."""
        yield from self.packs
        yield from {
            file.blob: (file.blob, file.size) for file in self.files if not file.pack
        }.values()


class CacheUse(Struct, array_like=True, frozen=True):
    """A cache as jobs and workers are told of it."""

    id: str
    manifest: str
    """SHA-256 of the encoded manifest, under which it lies in the store."""
    size: int
    """Of the encoded manifest, in bytes."""


_decode: Final = msgspec.msgpack.Decoder(Manifest).decode
encode_manifest: Final = msgspec.msgpack.Encoder().encode


def make_manifest(files: Iterable[CachedFile], packs: Iterable[BlobRef]) -> Manifest:
    """In the one order that equal contents share. Raises what `check_manifest` does."""
    found = Manifest(sorted(files, key=lambda file: file.name), sorted(set(packs)))
    check_manifest(found)
    return found


def decode_manifest(data: bytes) -> Manifest:
    """Read back and checked: it comes from a stranger and becomes files. Raises a Refusal."""
    if len(data) > limits.MANIFEST_BYTES_MAX:
        raise BadRequest(f"a manifest of {len(data):,} bytes", remedy="put fewer files in a cache")
    try:
        found: Manifest = _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"malformed manifest of a cache: {error}") from None
    check_manifest(found)
    return found


def check_manifest(manifest: Manifest) -> None:
    """Raise a Refusal if it does not describe files that can lie beside each other."""
    if len(manifest.files) > limits.CACHE_FILES_MAX:
        raise BadRequest(
            f"a cache of {len(manifest.files):,} files is over the limit of "
            f"{limits.CACHE_FILES_MAX:,}",
            remedy="use several, or pack files into archives",
        )
    packs = dict(manifest.packs)
    for blob, size in manifest.packs:
        _check_bytes("a pack", blob, size)
    before, folders = "", set[str]()
    seen: set[str] = set()
    for file in manifest.files:
        check_file_name(file.name)
        _check_bytes(f"file {shown(file.name)}", file.blob, file.size)
        if file.name <= before:
            raise BadRequest(f"file {shown(file.name)} of a cache is not in its place")
        before = file.name
        seen.add(file.name)
        folders.update(_folders_of(file.name))
        if file.pack and not 0 <= file.at <= packs.get(file.pack, -1) - file.size:
            raise BadRequest(f"file {shown(file.name)} of a cache lies outside its pack")
    if both := next(iter(sorted(folders & seen)), None):
        raise BadName(f"{shown(both)} is both a file and a folder of the cache")


def _folders_of(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _check_bytes(what: str, blob: str, size: int) -> None:
    if _BLOB.fullmatch(blob) is None:
        raise BadRequest(f"{what} of a cache has no SHA-256")
    if not 0 <= size <= limits.BLOB_BYTES_MAX:
        raise BadRequest(f"{what} of a cache has {size:,} bytes")


def check_cache_id(text: str) -> str:
    """`text`, if it may name a cache: it becomes the name of a folder on every worker."""
    if _CACHE_ID.fullmatch(text) is None:
        raise BadId(
            f"cache id {shown(text)} is not usable", remedy="use 1 to 128 of A-Z a-z 0-9 . _ -"
        )
    return check_file_name(text)
