"""Caches for tests: their files, manifest and packs, and a store that has them."""

# Files are written between turns of a loop that serves nobody else.
# ruff: noqa: ASYNC240

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

from ekiden.errors import EkidenError, UnknownBlob
from ekiden.model.caches import CachedFile, CacheUse, encode_manifest, make_manifest
from ekiden.worker.cache_folder import Build, CacheFolder
from ekiden.worker.store import Stored


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Data:
    """What a client would have put: small files in one pack, the `large` ones as blobs."""

    def __init__(
        self,
        cache: str,
        files: dict[str, bytes],
        *,
        large: tuple[str, ...] = (),
        executable: tuple[str, ...] = (),
    ) -> None:
        self.files = files
        self.blobs: dict[str, bytes] = {}
        pack, placed = b"", []
        for name, data in files.items():
            if name in large:
                self.blobs[sha(data)] = data
                placed.append(CachedFile(name, len(data), sha(data), name in executable))
            else:
                placed.append(
                    CachedFile(name, len(data), sha(data), name in executable, "p", len(pack))
                )
                pack += data
        packs = [(sha(pack), len(pack))] if pack or len(large) < len(files) else []
        if packs:
            self.blobs[sha(pack)] = pack
        self.pack = sha(pack)
        named = [
            CachedFile(f.name, f.size, f.blob, f.executable, self.pack if f.pack else "", f.at)
            for f in placed
        ]
        self.raw = encode_manifest(make_manifest(named, packs))
        self.blobs[sha(self.raw)] = self.raw
        self.use = CacheUse(cache, sha(self.raw), len(self.raw))

    def under(self, cache: str) -> CacheUse:
        """The same content under another id."""
        return CacheUse(cache, self.use.manifest, self.use.size)

    def begin(self, folder: CacheFolder) -> Build:
        return folder.begin(self.use, self.raw)

    def lay(self, folder: CacheFolder, build: Build) -> None:
        """Everything that is missing."""
        for pack in list(build.packs):
            folder.lay_pack(build, pack, self.blobs[pack])
        for blob in list(build.files):
            build.place_for(blob).write_bytes(self.blobs[blob])
            folder.lay_file(build, blob)

    def put(self, folder: CacheFolder) -> list[str]:
        """Lay it down; which blobs had to be brought for it."""
        build = self.begin(folder)
        missing = [*build.packs, *build.files]
        self.lay(folder, build)
        folder.finish(build)
        return missing


def opened(path: Path, bytes_max: int = 1 << 30) -> CacheFolder:
    folder = CacheFolder(path, bytes_max)
    assert folder.claim()
    folder.open()
    return folder


def tree_of(folder: CacheFolder, cache: str) -> dict[str, bytes]:
    """All files of a tree, as anybody sees them."""
    root = Path(folder.trees, cache)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if not path.is_dir()
    }


def spoil(path: Path, data: bytes) -> None:
    """Write to a file in place, as root or its owner can, and leave its times as they were."""
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(data)
    path.chmod(before.st_mode & 0o777)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class DataStore:
    """A store that has these; it fails as often as `faults` says."""

    def __init__(self, *datas: Data) -> None:
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.faults: list[EkidenError] = []
        self.opened = asyncio.Event()
        """Nothing is brought before."""
        self.opened.set()
        for data in datas:
            self.add(data)

    def add(self, data: Data) -> None:
        self.blobs.update(data.blobs)

    async def put(self, source: Path | bytes) -> Stored:
        raise NotImplementedError

    async def read(self, blob: str, size: int) -> bytes:
        await self.opened.wait()
        self.asked.append(blob)
        if self.faults:
            raise self.faults.pop(0)
        if blob not in self.blobs:
            raise UnknownBlob(f"no blob {blob} is kept")
        assert len(self.blobs[blob]) == size
        return self.blobs[blob]

    async def fetch(self, blob: str, size: int, target: Path) -> None:
        target.write_bytes(await self.read(blob, size))
