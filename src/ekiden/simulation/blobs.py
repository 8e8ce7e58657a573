"""The broker's store of blobs in memory: it does what the folder does, and loses nothing.

What is stored outlives the process that stored it; what was on its way does not, nor what was held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from ekiden import limits
from ekiden.broker.events import (
    BeginBlob,
    BlobExamined,
    BlobLocated,
    BlobRead,
    BlobsRemoved,
    CheckCache,
    DropBlob,
    ExamineBlob,
    FindUnused,
    LocateBlob,
    ReadBlob,
    ReleaseCache,
    RemoveBlobs,
    UnusedFound,
    UploadMoved,
    WriteBlob,
)
from ekiden.broker.holds import Holds
from ekiden.errors import BadRequest, BlobDamaged, UnknownBlob
from ekiden.model.caches import CacheUse

EFFECTS = (
    BeginBlob, WriteBlob, DropBlob, ReadBlob, CheckCache, ReleaseCache, FindUnused, RemoveBlobs,
    ExamineBlob, LocateBlob,
)  # fmt: skip


class MemoryBlobs:
    """Blobs by hash, and uploads under way by number."""

    def __init__(
        self,
        wall: Callable[[], int] = lambda: 0,
        *,
        grace_ns: int = limits.BLOB_GRACE_NS,
        unused_ns: int = 2 * limits.RETENTION_NS,
    ) -> None:
        self.stored: dict[str, bytes] = {}
        self.used: dict[str, int] = {}
        """When each was last used, by the `wall` clock."""
        self.incoming: dict[int, tuple[BeginBlob, bytearray, bool]] = {}
        """What was asked for, what has come, and whether some of it was set aside before."""
        self.aside: dict[str, bytearray] = {}
        self.holds = Holds()
        self.damaged: list[str] = []
        self.written = 0
        """Bytes that ever came in."""
        self._wall = wall
        self._grace_ns = grace_ns
        self._unused_ns = unused_ns
        self._after: tuple[int, str] | None = None
        """The last that was named in this search."""

    @property
    def held(self) -> int:
        """Bytes of everything."""
        unfinished = [data for _, data, _ in self.incoming.values()]
        return sum(map(len, (*self.stored.values(), *unfinished, *self.aside.values())))

    def perform(self, effect: Any) -> Any:
        """Do it; what the machine is to hear of it."""
        match effect:
            case BeginBlob():
                came = self.aside.pop(effect.blob, bytearray())
                self.incoming[effect.upload] = (effect, came, bool(came))
                return self._moved(effect.upload)
            case WriteBlob():
                if effect.upload not in self.incoming:
                    return None
                self.incoming[effect.upload][1].extend(effect.data)
                self.written += len(effect.data)
                return self._moved(effect.upload)
            case DropBlob():
                begun, data, _ = self.incoming.pop(effect.upload, (None, bytearray(), False))
                if begun is not None and data and effect.keep:
                    self.aside[begun.blob] = max(data, self.aside.get(begun.blob, data), key=len)
                return None
            case ReadBlob():
                return self._read(effect)
            case CheckCache():
                return self.holds.check(effect, self._manifest, self._touch)
            case ReleaseCache():
                return self.holds.release(effect.cache)
            case FindUnused():
                return self._unused(effect)
            case RemoveBlobs():
                return self._remove(effect)
            case ExamineBlob():
                return self._examine(effect)
            case LocateBlob():
                return BlobLocated(effect.number, "")  # no file of this disk can be opened
            case _:
                raise AssertionError(effect)

    def lose_power(self) -> None:
        """The process is gone."""
        self.incoming.clear()
        self.aside.clear()
        self.holds = Holds()

    # -------------------------------------------------------------- in and out

    def _moved(self, upload: int) -> UploadMoved:
        begun, data, resumed = self.incoming[upload]
        if not self._touch(begun.blob, begun.size):
            if len(data) < begun.size:
                return UploadMoved(upload, len(data), held=self.held)
            if hashlib.sha256(data).hexdigest() != begun.blob:
                if resumed:
                    self.incoming[upload] = (begun, bytearray(), False)
                    return UploadMoved(upload, 0, held=self.held)
                del self.incoming[upload]
                error = BlobDamaged("the bytes have another hash")
                return UploadMoved(upload, error=error, held=self.held)
            self.stored[begun.blob] = bytes(data)
            self.used[begun.blob] = self._wall()
        del self.incoming[upload]
        return UploadMoved(upload, len(data), True, held=self.held)

    def _touch(self, blob: str, size: int) -> bool:
        if len(self.stored.get(blob, b"")) != size or blob not in self.stored:
            return False
        self.used[blob] = self._wall()
        return True

    def _read(self, effect: ReadBlob) -> BlobRead:
        data = self.stored.get(effect.blob)
        if data is None:
            return BlobRead(effect.read, error=UnknownBlob(f"no blob {effect.blob[:12]}…"))
        self.used[effect.blob] = self._wall()
        part = data[effect.offset : effect.offset + effect.length]
        if len(part) != effect.length:
            return BlobRead(effect.read, error=BadRequest("beyond the end of the blob"))
        return BlobRead(effect.read, part, len(data))

    # -------------------------------------------------------------- room and damage

    def _manifest(self, cache: CacheUse) -> bytes:
        data = self.stored.get(cache.manifest)
        if data is None or len(data) != cache.size:
            raise UnknownBlob(f"no manifest {cache.manifest[:12]}…")
        if hashlib.sha256(data).hexdigest() != cache.manifest:
            raise BlobDamaged("the manifest is damaged")
        return data

    def _unused(self, effect: FindUnused) -> UnusedFound:
        if effect.wanted:
            self.aside.clear()
        if effect.new:
            self._after = None
        now = self._wall()
        found: list[tuple[str, int]] = []
        size = 0
        for used, blob in sorted((self.used.get(blob, 0), blob) for blob in self.stored):
            begun = self._after is not None and (used, blob) <= self._after
            if begun or blob in self.holds or used > now - self._grace_ns:
                continue
            if size >= effect.wanted and used > now - self._unused_ns:
                break
            if len(found) == limits.BLOB_UNUSED_TOLD or (effect.wanted and size >= effect.wanted):
                return UnusedFound(found, True, self.held)
            found.append((blob, used))
            self._after = (used, blob)
            size += len(self.stored[blob])
        return UnusedFound(found, bool(effect.wanted and found), self.held)

    def _remove(self, effect: RemoveBlobs) -> BlobsRemoved:
        count = size = 0
        for blob, used in effect.blobs:
            if blob in self.stored and self.used.get(blob, 0) == used and blob not in self.holds:
                count += 1
                size += len(self.stored.pop(blob))
                self.used.pop(blob, None)
        return BlobsRemoved(count, size, self.held)

    def _examine(self, effect: ExamineBlob) -> BlobExamined:
        data = self.stored.get(effect.blob)
        if data is None or hashlib.sha256(data).hexdigest() == effect.blob:
            return BlobExamined(effect.blob, False)
        del self.stored[effect.blob]
        self.damaged.append(effect.blob)
        return BlobExamined(effect.blob, True)
