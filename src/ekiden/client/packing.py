"""From folders and files to what a cache is made of: names, hashes and packs.

Reading has two steps. Small files are read and hashed at once, and kept in memory up to a bound,
for they are packed soon after; of large ones only the hash is made, in several threads. What was
not kept is read again when it is packed, and is refused if it has changed.

Nothing here knows of a broker.
"""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from ekiden import limits
from ekiden.client.hashes import Hashes, now_ns
from ekiden.errors import BadName, EkidenError, Fault, TooLarge, WrongUsage
from ekiden.model.caches import CachedFile, Manifest, make_manifest
from ekiden.model.names import check_file_name
from ekiden.world.threads import stand_back

Files: TypeAlias = "str | os.PathLike[str] | Mapping[str, bytes | str | os.PathLike[str]]"
"""A folder, a file, or names with the bytes or the path of each; a name may stand for a folder."""

# Contents of small files that are kept until they are packed.
KEPT_BYTES: Final = 128 << 20

# Large files that are hashed at a time: the disk and a few cores are busy then.
HASHERS: Final = min(4, os.cpu_count() or 1)

# A pack of an earlier cache is used again if so much of it is of use: a worker that has nothing yet
# must fetch all of it.
WORTH_IT: Final = 0.5

_READ_BYTES: Final = 1 << 20
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_PACKED: Final = limits.PACKED_FILE_BYTES
_sha256 = hashlib.sha256


class Source(NamedTuple):
    """A file that is to be in a cache."""

    name: str
    origin: str | bytes
    """Where it lies, or its bytes."""


class Read(NamedTuple):
    """A file that was read."""

    name: str
    size: int
    blob: str
    executable: bool
    origin: str | bytes

    @property
    def is_small(self) -> bool:
        """Whether it goes into a pack."""
        return self.size <= _PACKED


class Contents(NamedTuple):
    """All files of a cache to be, by name."""

    files: list[Read]
    kept: dict[str, bytes]
    """Bytes of small ones, by hash."""

    @property
    def size(self) -> int:
        """Of all files together."""
        return sum(file.size for file in self.files)


class Place(NamedTuple):
    """Where some bytes lie: in a pack of that size, from `at` on."""

    pack: str
    size: int
    at: int


class Changed(Fault):
    """A file is not what it was when it was read, or when it was remembered."""


class Stop(Exception):
    """The work is not wanted any more."""


class Tally:
    """How many bytes were read, for those who watch. Threads may share it: each adds to its own."""

    def __init__(self) -> None:
        self.total = 0
        self.stopped = False
        self._parts: list[list[int]] = []

    @property
    def done(self) -> int:
        """So many bytes by now."""
        return sum(part[0] for part in self._parts)

    def part(self) -> list[int]:
        """A number for one thread to add to."""
        part = [0]
        self._parts.append(part)
        return part

    def check(self) -> None:
        """Raise `Stop` if nobody wants the rest."""
        if self.stopped:
            raise Stop


# ------------------------------------------------------------------ what there is


def find_sources(files: Any) -> list[Source]:
    """Every file meant, in order of its name. Raises `WrongUsage` or `BadName`."""
    if isinstance(files, Mapping):
        found: list[Source] = []
        for name, origin in files.items():
            if isinstance(origin, str | os.PathLike):
                found += _under(os.fspath(origin), name)
            elif isinstance(origin, bytes | bytearray | memoryview):
                found.append(Source(_checked(name, name), bytes(origin)))
            else:
                raise WrongUsage(
                    f"file {name!r} is a {type(origin).__name__}", remedy="give bytes or a path"
                )
    elif isinstance(files, str | os.PathLike):
        path = os.fspath(files)
        name = "" if _is_folder(path) else os.path.basename(path)
        found = list(_under(path, name))
    else:
        raise WrongUsage(
            f"files are a {type(files).__name__}",
            remedy="give a folder, a file, or names with bytes or paths",
        )
    if not found:
        where = repr(os.fspath(files)) if not isinstance(files, Mapping) else "what was given"
        raise WrongUsage(f"there are no files in {where}", remedy="a cache has at least one file")
    if len(found) > limits.CACHE_FILES_MAX:
        raise WrongUsage(
            f"these are {len(found):,} files, over the limit of {limits.CACHE_FILES_MAX:,}",
            remedy="use several caches, or pack files into archives",
        )
    found.sort(key=lambda source: source.name)
    for one, other in pairwise(found):
        if one.name == other.name:
            raise BadName(f"two files would be called {one.name!r}", remedy="rename one of them")
    return found


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        raise _unreadable(path, error) from None


def _under(path: str, name: str) -> Iterator[Source]:
    """The file, or all files in the folder. What is named may be a link; what is found may not."""
    if _is_folder(path):
        yield from _walk(path, f"{name}/" if name else "")
    else:
        yield Source(_checked(name, path), os.path.realpath(path))


def _walk(top: str, prefix: str) -> Iterator[Source]:
    folders = [(top, prefix)]
    while folders:
        folder, inside = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        yield Source(_checked(inside + entry.name, entry.path), entry.path)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, f"{inside}{entry.name}/"))
                    else:
                        raise _strange(entry.path, link=entry.is_symlink())
        except OSError as error:
            raise _unreadable(folder, error) from None


def _checked(name: str, path: str) -> str:
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
    try:
        return check_file_name(name)
    except BadName as error:
        error.remedy = f"rename {path!r}: no cache can have it under this name"
        raise


# ------------------------------------------------------------------ reading


def read_all(sources: list[Source], tally: Tally, memory: Hashes | None = None) -> Contents:
    """Read and hash every file, but for those whose hash `memory` has. Raises a Fault for one that
    cannot be read, or `Stop`."""
    files: list[Read] = []
    large: list[tuple[int, Source, bool]] = []
    kept: dict[str, bytes] = {}
    room = KEPT_BYTES
    part = tally.part()
    for source in sources:
        tally.check()
        known = _remembered(source, memory)
        if known is not None:
            files.append(known)
            tally.total += known.size
            part[0] += known.size
            continue
        data, executable, size = _read_small(source.origin, memory)
        tally.total += size
        if data is None:
            large.append((len(files), source, executable))
            files.append(Read(source.name, size, "", executable, source.origin))
            continue
        part[0] += size
        blob = _sha256(data).hexdigest()
        if room > 0 and blob not in kept and size <= _PACKED:
            kept[blob] = data
            room -= size
        files.append(Read(source.name, size, blob, executable, source.origin))
    if large:
        _hash_large(files, large, tally, memory)
    return Contents(files, kept)


def _remembered(source: Source, memory: Hashes | None) -> Read | None:
    """The file, if it need not be read."""
    if memory is None or isinstance(source.origin, bytes):
        return None
    try:
        facts = os.lstat(source.origin)
    except OSError:
        return None  # whoever reads it will say
    blob = memory.find(source.origin, facts) if stat.S_ISREG(facts.st_mode) else None
    if blob is None:
        return None
    executable = bool(facts.st_mode & 0o111)
    return Read(source.name, facts.st_size, blob, executable, source.origin)


def _read_small(
    origin: str | bytes, memory: Hashes | None = None
) -> tuple[bytes | None, bool, int]:
    """Its bytes if it is small, whether it may be executed, and its size."""
    if isinstance(origin, bytes):
        return origin, False, len(origin)
    began = now_ns()
    try:
        fd = os.open(origin, _FLAGS)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise _strange(origin)
            executable, size = bool(facts.st_mode & 0o111), facts.st_size
            if size > limits.BLOB_BYTES_MAX:
                raise TooLarge(
                    f"{origin!r} has {size:,} bytes, over the limit of {limits.BLOB_BYTES_MAX:,}",
                    remedy="split it",
                )
            if size > _PACKED:
                return None, executable, size
            data = os.read(fd, _PACKED + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(origin, error) from None
    if len(data) != size:
        raise changed(origin)
    if memory is not None:
        memory.learn(origin, facts, _sha256(data).hexdigest(), began)
    return data, executable, len(data)


def _hash_large(
    files: list[Read], large: list[tuple[int, Source, bool]], tally: Tally, memory: Hashes | None
) -> None:
    began = now_ns()
    with ThreadPoolExecutor(HASHERS, "ekiden-hash", initializer=stand_back) as pool:
        hashed = pool.map(lambda each: _hash(each[1].origin, tally), large)
        for (at, source, _), (blob, size, facts) in zip(large, hashed, strict=True):
            files[at] = files[at]._replace(blob=blob, size=size)
            if memory is not None and facts.st_size == size:
                memory.learn(str(source.origin), facts, blob, began)


def _hash(origin: str | bytes, tally: Tally) -> tuple[str, int, os.stat_result]:
    """Hash, size, and what the file was like when all of it had been read."""
    if tally.stopped:  # the others end by themselves
        raise Stop
    part, digest, size = tally.part(), _sha256(), 0
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    try:
        with open(origin, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(view[:count])
                part[0] += count
                size += count
                tally.check()
            facts = os.fstat(file.fileno())
    except OSError as error:
        tally.stopped = True
        raise _unreadable(str(origin), error) from None
    return digest.hexdigest(), size, facts


# ------------------------------------------------------------------ packing


def find_places(wanted: dict[str, int], manifest: Manifest) -> dict[str, Place]:
    """Where in the packs of an earlier cache contents that are `wanted` (size by hash) lie, as far
    as using these packs again is worth it."""
    inside: dict[str, dict[str, int]] = {}
    for file in manifest.files:
        if file.pack and wanted.get(file.blob) == file.size:
            inside.setdefault(file.pack, {})[file.blob] = file.at
    sizes = dict(manifest.packs)
    return {
        blob: Place(pack, sizes[pack], at)
        for pack, blobs in inside.items()
        if sum(wanted[blob] for blob in blobs) >= WORTH_IT * sizes[pack]
        for blob, at in blobs.items()
    }


def plan_packs(files: Iterable[Read], placed: Mapping[str, Any]) -> list[list[Read]]:
    """The small contents that have no place yet, each once, in groups that make a pack each. The
    same files make the same packs every time."""
    packs: list[list[Read]] = []
    seen = set(placed)
    room = 0
    for file in files:
        if not file.is_small or file.blob in seen:
            continue
        seen.add(file.blob)
        if file.size > room or not packs:
            packs.append([])
            room = limits.PACK_BYTES
        packs[-1].append(file)
        room -= file.size
    return packs


def make_pack(files: list[Read], kept: Mapping[str, bytes]) -> tuple[bytes, str]:
    """The bytes of a pack and their hash. Raises a Fault if a file is not what was read."""
    parts = []
    for file in files:
        data = kept.get(file.blob)
        if data is None:
            data, _, _ = _read_small(file.origin)
            if data is None or _sha256(data).hexdigest() != file.blob:
                raise changed(file.name)
        parts.append(data)
    whole = b"".join(parts)
    return whole, _sha256(whole).hexdigest()


def places_in(files: list[Read], pack: str) -> dict[str, Place]:
    """Where in their pack these contents lie."""
    found: dict[str, Place] = {}
    whole = sum(file.size for file in files)
    at = 0
    for file in files:
        found[file.blob] = Place(pack, whole, at)
        at += file.size
    return found


def describe(files: Iterable[Read], places: Mapping[str, Place]) -> Manifest:
    """The files and the packs they lie in. Raises what is wrong with them together."""
    found: list[CachedFile] = []
    packs: dict[str, int] = {}
    for file in files:
        where = places[file.blob] if file.is_small else Place("", 0, 0)
        found.append(
            CachedFile(file.name, file.size, file.blob, file.executable, where.pack, where.at)
        )
        if where.pack:
            packs[where.pack] = where.size
    return make_manifest(found, packs.items())


def is_same(files: list[Read], manifest: Manifest) -> bool:
    """Whether the manifest describes these very files, wherever their bytes lie."""
    return len(files) == len(manifest.files) and all(
        (one.name, one.blob, one.size, one.executable)
        == (other.name, other.blob, other.size, other.executable)
        for one, other in zip(files, manifest.files, strict=True)
    )


def large_files(files: Iterable[Read]) -> list[Read]:
    """Those that are blobs of their own, each content once."""
    return list({file.blob: file for file in files if not file.is_small}.values())


# ------------------------------------------------------------------ what can be wrong


def changed(what: str) -> Changed:
    """A file is not what it was when it was read."""
    return Changed(
        f"{what!r} has changed while it was put", remedy="put it again when it is at rest"
    )


def _strange(path: str, *, link: bool = False) -> WrongUsage:
    if link:
        return WrongUsage(
            f"{path!r} is a symbolic link, and a cache has plain files only",
            remedy="put what it points to in its place, or leave it out",
        )
    return WrongUsage(
        f"{path!r} is no plain file but a socket, pipe or device", remedy="leave it out"
    )


def _unreadable(path: str, error: OSError) -> EkidenError:
    why = os.strerror(error.errno).lower() if error.errno else str(error)
    remedy = "see that it is there and yours to read"
    return WrongUsage(f"cannot read {path!r}: {why}", remedy=remedy)
