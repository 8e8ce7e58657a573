"""Caches on a worker's disk: one read-only tree of files for each, and notes of what they were.

    lock              held while a worker uses the folder
    trees/<CacheId>/  the files, read-only
    notes/<CacheId>   what the tree is, and a stamp of every file and folder in it
    incoming/         what is being laid down; an earlier process's is removed

The trees are the store: what two caches have in common is one file with two names. A file is linked
only while its stamp (inode, size, times) is as it was when it was written; so is a job's doing
found: whoever writes to a file, as root too, changes a time that nobody can set. What has another
stamp is read and compared by its hash: it is either taken at its new stamp or named as spoiled.

Nothing is synced. What a process wrote, the next one sees; what a crash of the machine may lose is
not trusted after it: a note is of one boot of the system, and a tree whose note is of another one
is *unproven* until all of it was read and compared.

All calls but `trees` block and belong to one thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from ekiden.errors import BlobDamaged, EkidenError, Fault, NoSpace, StorageFault
from ekiden.model.caches import CacheUse, Manifest, check_cache_id, decode_manifest
from ekiden.model.ids import shown
from ekiden.worker import folders
from ekiden.worker.cache_tree import (
    Content,
    Inode,
    Note,
    Tree,
    Walk,
    boot_id,
    disk_fault,
    exchange,
    room_of,
    wait_tick,
)

_NOTES: Final = "notes"
_INCOMING: Final = "incoming"

# Read and compared before whoever else waits for the folder has a turn.
PROVE_BYTES: Final = 128 << 20

_NEW_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)

_decode_note: Final = msgspec.msgpack.Decoder(Note).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class Build:
    """A tree that is being laid down beside those that are there."""

    def __init__(self, use: CacheUse, raw: bytes, folder: str) -> None:
        self.tree = Tree(use, raw, decode_manifest(raw))
        self.folder = folder
        self.root = os.path.join(folder, "tree")
        self.walk = Walk(self.root, make=True)
        self.packs: dict[str, list[int]] = {}
        """By pack: the files of it that are missing, by their place in the manifest."""
        self.files: dict[str, list[int]] = {}
        """The same, by blob, of files that are in no pack."""
        self.open = True
        self.done = 0
        """Bytes of the manifest's files that lie there, of `total`."""
        self.wanted = 0
        """What is missing takes so much room on the disk."""

    @property
    def manifest(self) -> Manifest:
        """What it becomes."""
        return self.tree.manifest

    @property
    def total(self) -> int:
        """Of all its files."""
        return self.tree.manifest.size

    def place_for(self, blob: str) -> Path:
        """Where to write a missing file; see `CacheFolder.lay_file`."""
        return Path(self.folder, "files", blob)


class Proof(Struct, frozen=True):
    """How far the reading of a tree has come."""

    upto: int
    """Files read and compared."""
    size: int
    """Bytes of these."""
    whole: bool


class CacheFolder:
    """The caches of one worker process."""

    def __init__(self, folder: str | os.PathLike[str], bytes_max: int | None = None) -> None:
        """`bytes_max` is what all trees together may take [half of what is free on that disk]."""
        self.folder = os.path.abspath(os.fspath(folder))
        self.trees = os.path.join(self.folder, "trees")
        self.bytes_max = bytes_max or 0
        self._lock_fd = -1
        self._held: dict[str, Tree] = {}
        """Least lately used first."""
        self._inodes: dict[int, Inode] = {}
        self._builds = 0
        self._building: list[Build] = []
        self._boot = boot_id()
        self._ready = False

    # -------------------------------------------------------------- life

    def claim(self) -> bool:
        """Make the folder ours; False if another process has it. Raises a Fault for a folder that
        others may write to."""
        import fcntl

        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            facts = os.lstat(self.folder)
            if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
                raise Fault(
                    f"the folder {self.folder} for caches belongs to somebody else, or others may "
                    "write to it",
                    remedy="name one of your own with --cache",
                )
            fd = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise disk_fault(f"use the folder {self.folder} for caches", error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

    def is_used(self) -> bool:
        """Whether caches were ever laid down here."""
        return os.path.isdir(self.trees)

    def open(self) -> None:
        """Find out what is there, and remove what is not whole. Once is enough."""
        if self._ready:
            return
        assert self._lock_fd >= 0, "claim it first"
        try:
            for name in (self.trees, self._path(_NOTES), self._path(_INCOMING)):
                os.makedirs(name, mode=0o700, exist_ok=True)
            for name in os.listdir(self._path(_INCOMING)):
                folders.wipe(self._path(_INCOMING, name))
            found = [tree for name in os.listdir(self._path(_NOTES)) if (tree := self._read(name))]
            for tree in sorted(found, key=lambda tree: tree.used_ns):
                self._held[tree.use.id] = tree
            for name in os.listdir(self.trees):
                if name not in self._held:
                    folders.wipe(os.path.join(self.trees, name))
            if not self.bytes_max:
                self.bytes_max = (shutil.disk_usage(self.folder).free + self.used) // 2
        except OSError as error:
            raise disk_fault("look through the folder of caches", error) from error
        self._ready = True

    def close(self) -> None:
        """Let others have it."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _read(self, name: str) -> Tree | None:
        """The tree that a note is of, if it fits; otherwise the note goes."""
        path = self._path(_NOTES, name)
        try:
            check_cache_id(name)
            note = _decode_note(Path(path).read_bytes())
            if note.use.id != name or hashlib.sha256(note.raw).hexdigest() != note.use.manifest:
                raise Fault(f"the note of cache {name!r} is damaged")
            tree = Tree(note.use, note.raw, decode_manifest(note.raw))
            tree.take(note, self._inode)
            tree.proven = bool(note.boot) and note.boot == self._boot
            tree.used_ns = os.stat(path).st_mtime_ns
        except (OSError, EkidenError, msgspec.DecodeError, ValueError):
            folders.wipe(path)
            return None
        return tree

    def _inode(self, stamp: tuple[int, int, int, int]) -> Inode:
        known = self._inodes.get(stamp[0])
        if known is None:
            known = self._inodes[stamp[0]] = Inode(*stamp)
        elif known.stamp() != stamp:
            known.changed_ns = -1  # Two notes differ: reading the file will tell.
        known.names += 1
        return known

    # -------------------------------------------------------------- what is there

    def held(self) -> dict[str, CacheUse]:
        """The caches that lie here, proven or not, least lately used first."""
        return {name: tree.use for name, tree in self._held.items()}

    def is_proven(self, cache: str) -> bool:
        """Whether nothing but the stamps of its files needs to be looked at."""
        return cache in self._held and self._held[cache].proven

    @property
    def used(self) -> int:
        """What all trees take on the disk: a file with several names once, in whole blocks."""
        return sum(room_of(inode.size) for inode in self._inodes.values())

    def is_sound(self, use: CacheUse) -> bool:
        """Whether it lies here and none of its files has changed; then it is used now."""
        tree = self._held.get(use.id)
        if tree is None or tree.use != use or not tree.proven or self.check(use.id):
            return False
        self.touch(use.id)
        return True

    def touch(self, cache: str) -> None:
        """It is used now."""
        tree = self._held.pop(cache, None)
        if tree is not None:
            self._held[cache] = tree
            with contextlib.suppress(OSError):  # The order of use is a matter of taste.
                os.utime(self._path(_NOTES, cache))

    # -------------------------------------------------------------- laying down

    def begin(self, use: CacheUse, raw: bytes) -> Build:
        """Lay down the cache that the manifest in `raw` describes, as far as its contents lie here
        in other trees, or in an older one under its id; the rest is missing.

        Raises a Refusal for a manifest that makes no sense, a Fault for a disk that does not work.
        """
        check_cache_id(use.id)
        if hashlib.sha256(raw).hexdigest() != use.manifest:
            raise BlobDamaged(f"the manifest of cache {shown(use.id)} has another hash")
        self._builds += 1
        folder = self._path(_INCOMING, str(self._builds))
        try:
            os.mkdir(folder, 0o700)
            os.mkdir(os.path.join(folder, "files"), 0o700)
            os.mkdir(os.path.join(folder, "tree"), 0o700)
            build = Build(use, raw, folder)
        except OSError as error:
            folders.wipe(folder)
            raise disk_fault("begin a cache", error) from error
        except EkidenError:
            folders.wipe(folder)
            raise
        self._building.append(build)
        with self._guarded(build, "lay down a cache"):
            self._link_known(build)
        return build

    def _link_known(self, build: Build) -> None:
        wanted: dict[Content, list[int]] = {}
        for at, file in enumerate(build.manifest.files):
            wanted.setdefault((file.blob, file.size, file.executable), []).append(at)
        with contextlib.ExitStack() as closing:
            for tree in self._held.values():
                if tree.proven and wanted:
                    walk = closing.enter_context(Walk(os.path.join(self.trees, tree.use.id)))
                    self._link_from(tree, walk, build, wanted)
        for places in wanted.values():
            file = build.manifest.files[places[0]]
            missing = build.packs if file.pack else build.files
            missing.setdefault(file.pack or file.blob, []).extend(places)
            build.wanted += room_of(file.size)

    def _link_from(
        self, tree: Tree, walk: Walk, build: Build, wanted: dict[Content, list[int]]
    ) -> None:
        """Link what `tree` has of `wanted`, and take it out of there."""
        for at, file in enumerate(tree.manifest.files):
            content = (file.blob, file.size, file.executable)
            places = wanted.get(content)
            if places is None or not walk.is_as(file.name, tree.inodes[at]):
                continue
            inode = tree.inodes[at]
            assert inode is not None
            del wanted[content]
            self._name_all(build, places, (walk, file.name), inode)

    def _name_all(
        self, build: Build, places: list[int], source: tuple[Walk, str], inode: Inode
    ) -> None:
        """Give a file that is sound the names of all these places."""
        for at in places:
            file = build.manifest.files[at]
            name = file.name
            linked = build.walk.link(source, name, inode)
            if linked is None:
                # As many names as a file can have: another file of the same content.
                linked = self._copy(build, source, name, executable=file.executable)
            self._laid(build, at, linked)
            source = (build.walk, name)
            inode = linked

    def _copy(
        self, build: Build, source: tuple[Walk, str], name: str, *, executable: bool
    ) -> Inode:
        walk, other = source
        return self._write(build, name, walk.read(other), executable=executable)

    def _laid(self, build: Build, at: int, inode: Inode) -> None:
        build.tree.inodes[at] = inode
        inode.names += 1
        self._inodes[inode.number] = inode
        build.done += inode.size

    def lay_pack(self, build: Build, pack: str, data: bytes) -> None:
        """These are the bytes of a pack: lay down what is missing and lies in it."""
        if not build.open:
            return
        places = build.packs.pop(pack)
        with self._guarded(build, "lay down a cache"):
            view = memoryview(data)
            laid: dict[Content, int] = {}
            files = build.manifest.files
            for at in places:
                file = files[at]
                content = (file.blob, file.size, file.executable)
                first = laid.setdefault(content, at)
                if first != at:
                    source = (build.walk, files[first].name)
                    inode = build.tree.inodes[first]
                    assert inode is not None
                    self._name_all(build, [at], source, inode)
                    laid[content] = at
                    continue
                part = view[file.at : file.at + file.size]
                if hashlib.sha256(part).hexdigest() != file.blob:
                    raise BlobDamaged(
                        f"{shown(file.name)} of cache {shown(build.tree.use.id)} is not in its "
                        "pack",
                        remedy="put the cache again, under another id",
                    )
                inode = self._write(build, file.name, part, executable=file.executable)
                self._laid(build, at, inode)

    def _write(
        self, build: Build, name: str, data: bytes | memoryview, *, executable: bool
    ) -> Inode:
        folder, last = build.walk.place(name)
        fd = os.open(last, _NEW_FLAGS, 0o555 if executable else 0o444, dir_fd=folder)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            return Inode.of(os.fstat(fd))
        finally:
            os.close(fd)

    def lay_file(self, build: Build, blob: str) -> None:
        """What was missing lies at `build.place_for(blob)`, and matches its hash: name it."""
        if not build.open:
            return
        places = build.files.pop(blob)
        with self._guarded(build, "lay down a cache"):
            by_mode: dict[bool, list[int]] = {}
            for at in places:
                by_mode.setdefault(build.manifest.files[at].executable, []).append(at)
            path = build.place_for(blob)
            for executable, some in by_mode.items():
                name = build.manifest.files[some[0]].name
                folder, last = build.walk.place(name)
                if len(by_mode) > 1 and not executable:
                    # Both a program and not: two files, for a mode is the file's and no name's.
                    shutil.copyfile(path, path.with_suffix(".copy"))
                    os.rename(path.with_suffix(".copy"), last, dst_dir_fd=folder)
                else:
                    os.rename(path, last, dst_dir_fd=folder)
                os.chmod(last, 0o555 if executable else 0o444, dir_fd=folder)
                inode = Inode.of(os.stat(last, dir_fd=folder, follow_symlinks=False))
                if any(build.manifest.files[at].size != inode.size for at in some):
                    raise BlobDamaged(f"{shown(name)} of a cache came with another size")
                self._laid(build, some[0], inode)
                if some[1:]:
                    self._name_all(build, some[1:], (build.walk, name), inode)

    def finish(self, build: Build) -> None:
        """All is there: put the tree in place of one that may be there, in one step."""
        assert not build.packs, "something is missing"
        assert not build.files, "something is missing"
        tree = build.tree
        cache = tree.use.id
        place = os.path.join(self.trees, cache)
        old = self._held.get(cache)
        try:
            build.walk.seal(tree.folders)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(_NOTES, cache))
            self._held.pop(cache, None)
            exchange(build.root, place)
            os.chmod(place, 0o555)
            self._held[cache] = tree
            self._put_away(build)
            tree.proven = True
            touched = {inode.number for inode in tree.inodes if inode and inode.names > 1}
            if old is not None:
                touched |= self._forget(old, build.root)
            tree.stamp_folders(place)
            self._note(cache, touched)
        except (OSError, EkidenError) as error:
            if self._held.get(cache) is tree:
                self.remove(cache)
                folders.wipe(build.folder)
            else:
                if old is not None and cache not in self._held:
                    self._held[cache] = old  # Its note is gone, but it is what it was.
                self.abandon(build)
            if isinstance(error, OSError):
                raise disk_fault("finish a cache", error) from error
            raise
        folders.wipe(build.folder)
        wait_tick(tree)

    def abandon(self, build: Build) -> None:
        """It will not be finished: leave nothing of it. Once is enough."""
        if not build.open:
            return
        self._put_away(build)
        touched = self._forget(build.tree, build.root)
        folders.wipe(build.folder)
        with contextlib.suppress(StorageFault):  # Then stamps differ, and files are read once more.
            self._note("", touched)

    def _put_away(self, build: Build) -> None:
        build.walk.close()
        build.open = False
        self._building.remove(build)

    @contextlib.contextmanager
    def _guarded(self, build: Build, what: str) -> Iterator[None]:
        """A build that fails leaves nothing."""
        try:
            yield
        except OSError as error:
            self.abandon(build)
            raise disk_fault(what, error) from error
        except EkidenError:
            self.abandon(build)
            raise

    # -------------------------------------------------------------- looking after them

    def check(self, cache: str) -> list[str]:
        """Names in a tree that are not as they were laid down, or that nobody laid down. Looks at
        stamps, and reads only what has another one."""
        tree = self._held[cache]
        with Walk(os.path.join(self.trees, cache)) as walk:
            suspects = tree.differing(walk)
            spoiled = [tree.manifest.files[at].name for at in suspects if not tree.adopt(walk, at)]
            return spoiled + tree.strange(walk)

    def prove(self, cache: str, upto: int = 0) -> tuple[Proof, list[str]]:
        """Read and compare the next files of a tree, about `PROVE_BYTES` of them, from `upto` on;
        and which of these are not what they should be. When all were read in turn and are sound,
        call `trust`."""
        tree = self._held[cache]
        spoiled: list[str] = []
        size = 0
        files = tree.manifest.files
        with Walk(os.path.join(self.trees, cache)) as walk:
            while upto < len(files) and size < PROVE_BYTES:
                if not tree.adopt(walk, upto):
                    spoiled.append(files[upto].name)
                    inode = tree.inodes[upto]
                    assert inode is not None
                    inode.changed_ns = -1  # Nobody links it any more, and who has it finds out.
                size += files[upto].size
                upto += 1
            if upto == len(files):
                spoiled += tree.strange(walk)
        return Proof(upto, size, upto == len(files)), spoiled

    def trust(self, cache: str) -> None:
        """All of it was read. What was spoiled has no stamp that fits, so it is not linked."""
        tree = self._held[cache]
        if not tree.proven:
            tree.proven = True
            self._note(cache, set())

    def remove(self, cache: str) -> None:
        """The tree and its note."""
        tree = self._held.pop(cache)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(_NOTES, cache))
        touched = self._forget(tree, os.path.join(self.trees, cache))
        with contextlib.suppress(StorageFault):  # Then stamps differ, and files are read once more.
            self._note("", touched)

    def discard(self, cache: str) -> None:
        """Remove it if it is here."""
        if cache in self._held:
            self.remove(cache)

    def make_room(self, wanted: int, pinned: Collection[str]) -> list[str]:
        """Remove trees, least lately used first, but none that are `pinned`, until so many more
        bytes fit under `bytes_max`; says which. Raises NoSpace, and removes nothing, if they cannot
        fit."""
        in_use = {
            inode.number: inode.size
            for cache in pinned
            if cache in self._held
            for inode in self._held[cache].inodes
            if inode is not None
        }
        for build in self._building:
            in_use |= {inode.number: inode.size for inode in build.tree.inodes if inode}
        least = sum(room_of(size) for size in in_use.values())
        if least + wanted > self.bytes_max:
            raise NoSpace(
                f"the cache needs {wanted:,} bytes, and {least:,} of the {self.bytes_max:,} for "
                "caches on this worker are in use",
                remedy="raise --cache-max there",
            )
        gone: list[str] = []
        for cache in list(self._held):
            if self.used + wanted <= self.bytes_max:
                break
            if cache not in pinned:
                self.remove(cache)
                gone.append(cache)
        return gone

    # -------------------------------------------------------------- inside

    def _forget(self, tree: Tree, root: str) -> set[int]:
        """Wipe a tree that is no longer held; the inodes that others have and that lost a name.

        Taking a name away changes the time that tells a changed file: those that were sound before
        are taken at their new stamp after it.
        """
        shared: set[int] = set()
        for inode in tree.inodes:
            if inode is not None:
                inode.names -= 1
                if inode.names:
                    shared.add(inode.number)
                elif self._inodes.get(inode.number) is inode:
                    # If it was replaced by somebody, its number may be another file's by now.
                    del self._inodes[inode.number]
        others = [(it, os.path.join(self.trees, it.use.id)) for it in self._held.values()]
        others += [(build.tree, build.root) for build in self._building]
        sound = [(other, at, other.sound_of(at, shared)) for other, at in others] if shared else []
        folders.wipe(root)
        for other, at, places in sound:
            other.restamp(at, places)
        return shared

    def _note(self, cache: str, touched: set[int]) -> None:
        """Write down `cache`, and those whose files have other stamps than they had."""
        for tree in list(self._held.values()):
            if tree.use.id != cache and touched.isdisjoint(
                inode.number for inode in tree.inodes if inode
            ):
                continue
            note = tree.note(self._boot if tree.proven else "")
            path = self._path(_NOTES, tree.use.id)
            beside = self._path(_INCOMING, f"note-{tree.use.id}"[:200])
            try:
                used = os.stat(path).st_mtime_ns if os.path.exists(path) else None
                with open(beside, "wb", buffering=0) as file:
                    rest = memoryview(_encode(note))
                    while rest:
                        rest = rest[file.write(rest) :]
                if used is not None and tree.use.id != cache:
                    os.utime(beside, ns=(used, used))
                os.replace(beside, path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                raise disk_fault("note what a cache is", error) from error

    def _path(self, *parts: str) -> str:
        return os.path.join(self.folder, *parts)
