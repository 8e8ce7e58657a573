"""The broker's store of blobs in memory: it does what the folder does, and loses nothing.

What is stored outlives the process that stored it; what was on its way does not.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ekiden.broker.events import BeginBlob, BlobRead, DropBlob, ReadBlob, UploadMoved, WriteBlob
from ekiden.errors import BadRequest, BlobDamaged, UnknownBlob

EFFECTS = (BeginBlob, WriteBlob, DropBlob, ReadBlob)


class MemoryBlobs:
    """Blobs by hash, and uploads under way by number."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.incoming: dict[int, tuple[BeginBlob, bytearray]] = {}

    def perform(self, effect: Any) -> UploadMoved | BlobRead | None:
        """Do it; what the machine is to hear of it."""
        match effect:
            case BeginBlob():
                self.incoming[effect.upload] = (effect, bytearray())
                return self._moved(effect.upload)
            case WriteBlob():
                if effect.upload not in self.incoming:
                    return None
                self.incoming[effect.upload][1].extend(effect.data)
                return self._moved(effect.upload)
            case DropBlob():
                self.incoming.pop(effect.upload, None)
                return None
            case ReadBlob():
                return self._read(effect)
            case _:
                raise AssertionError(effect)

    def lose_power(self) -> None:
        """The process is gone."""
        self.incoming.clear()

    def _moved(self, upload: int) -> UploadMoved:
        begun, data = self.incoming[upload]
        if begun.blob not in self.stored:
            if len(data) < begun.size:
                return UploadMoved(upload, len(data))
            if hashlib.sha256(data).hexdigest() != begun.blob:
                del self.incoming[upload]
                return UploadMoved(upload, error=BlobDamaged("the bytes have another hash"))
            self.stored[begun.blob] = bytes(data)
        del self.incoming[upload]
        return UploadMoved(upload, len(data), True)

    def _read(self, effect: ReadBlob) -> BlobRead:
        data = self.stored.get(effect.blob)
        if data is None:
            return BlobRead(effect.read, error=UnknownBlob(f"no blob {effect.blob[:12]}…"))
        part = data[effect.offset : effect.offset + effect.length]
        if len(part) != effect.length:
            return BlobRead(effect.read, error=BadRequest("beyond the end of the blob"))
        return BlobRead(effect.read, part, len(data))
