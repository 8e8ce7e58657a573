"""What a broker hears from its disk and clock, and asks of them, beside the network's events."""

from __future__ import annotations

from msgspec import Struct

from ekiden.errors import EkidenError
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import Index, WallTime


class Persisted(Struct, frozen=True):
    """The append that ends at `upto` is on disk."""

    upto: Index


class AppendFailed(Struct, frozen=True):
    """The append found no space; nothing of it is on disk. (Any other failure ends the process.)"""

    reason: str


class DiskSpace(Struct, frozen=True):
    """Bytes free where the journal lies; told every second or so."""

    free: int


class WallClock(Struct, frozen=True):
    """What the wall clock says now. It may jump; only users' wall-time wishes follow it."""

    wall: WallTime


class SnapshotTaken(Struct, frozen=True):
    """A snapshot of everything up to `index` is durable; 0 if it failed, and `reason` says why."""

    index: Index
    reason: str = ""


class Shutdown(Struct, frozen=True):
    """Finish what is being written, tell the peers, then `Halt`."""


class TakeSnapshot(Struct, frozen=True):
    """Effect: make a snapshot of everything up to `upto`, which lies in closed segments."""

    upto: Index


class Halt(Struct, frozen=True):
    """Effect: all is written and told; the process may end with code 0."""


# ------------------------------------------------------------------ blobs


class BeginBlob(Struct, frozen=True):
    """Effect: an upload of `size` bytes begins, unless the blob is there. `UploadMoved` answers."""

    upload: int
    blob: str
    size: int


class WriteBlob(Struct, frozen=True):
    """Effect: the next bytes of an upload. After the last of them the whole is verified, made
    durable and given its name. `UploadMoved` answers."""

    upload: int
    data: bytes


class DropBlob(Struct, frozen=True):
    """Effect: nothing more will come of this upload; leave nothing of it. No answer."""

    upload: int


class ReadBlob(Struct, frozen=True):
    """Effect: `BlobRead` answers with these bytes."""

    read: int
    blob: str
    offset: int
    length: int


class UploadMoved(Struct, frozen=True):
    """`upto` bytes of an upload are written; `stored`: all of it is durable under its name. After
    an `error` nothing is left of it."""

    upload: int
    upto: int = 0
    stored: bool = False
    error: EkidenError | None = None


class BlobRead(Struct, frozen=True):
    """Bytes of a blob of `size` bytes in all, or why there are none."""

    read: int
    data: bytes = b""
    size: int = 0
    error: EkidenError | None = None


# ------------------------------------------------------------------ caches and room


class CheckCache(Struct, frozen=True):
    """Effect: read that manifest, and see that all it names is in the store. `CacheChecked`
    answers; from then on its blobs are kept, until `ReleaseCache`."""

    number: int
    cache: CacheUse


class CacheChecked(Struct, frozen=True):
    """`files` of together `size` bytes, all here; or what is missing, or why that is not known."""

    number: int
    files: int = 0
    size: int = 0
    missing: int = 0
    error: EkidenError | None = None


class ReleaseCache(Struct, frozen=True):
    """Effect: nobody needs this cache any more. No answer."""

    cache: CacheUse


class FindUnused(Struct, frozen=True):
    """Effect: name blobs that no cache needs, the longest unused first: about `wanted` bytes of
    them, and of these whatever was not used for so long that it goes anyway. `UnusedFound`."""

    wanted: int


class UnusedFound(Struct, frozen=True):
    """Blobs and when each was last used, in nanoseconds by the disk's clock."""

    blobs: list[tuple[str, int]]


class RemoveBlobs(Struct, frozen=True):
    """Effect: remove these, unless they were used since. `BlobsRemoved` answers."""

    blobs: list[tuple[str, int]]


class BlobsRemoved(Struct, frozen=True):
    """So many, of so many bytes."""

    count: int
    size: int


class ExamineBlob(Struct, frozen=True):
    """Effect: somebody got other bytes than this hash promises. Read it; set it aside if it is
    damaged, so that it can be put again. No answer."""

    blob: str
