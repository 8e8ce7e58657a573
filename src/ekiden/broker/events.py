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
    """Effect: an upload of `size` bytes begins, unless the blob is there; what an earlier one was
    dropped with to `keep` is not wanted again. `UploadMoved` says how far it has come."""

    upload: int
    blob: str
    size: int


class WriteBlob(Struct, frozen=True):
    """Effect: the next bytes of an upload. After the last of them the whole is verified, made
    durable and given its name. `UploadMoved` answers."""

    upload: int
    data: bytes
    codec: str = ""
    """How `data` is packed, if it is; it then stands for `length` bytes."""
    length: int = 0


class DropBlob(Struct, frozen=True):
    """Effect: nothing more will come of this upload. Leave nothing of it, or, to `keep`, set aside
    for a while what has come, for the next offer of the same blob. No answer."""

    upload: int
    keep: bool = False


class ReadBlob(Struct, frozen=True):
    """Effect: `BlobRead` answers with these bytes."""

    read: int
    blob: str
    offset: int
    length: int
    codecs: str = ""
    """How the bytes may be packed."""


class LocateBlob(Struct, frozen=True):
    """Effect: `BlobLocated` says where that blob lies, and its time of use is now."""

    number: int
    blob: str
    size: int


class BlobLocated(Struct, frozen=True):
    """The path of its file, or "" if it is not here."""

    number: int
    path: str


class UploadMoved(Struct, frozen=True):
    """`upto` bytes of an upload are written; `stored`: all of it is durable under its name. After
    an `error` nothing is left of it. `held` bytes lie in the store by now, unfinished ones too."""

    upload: int
    upto: int = 0
    stored: bool = False
    error: EkidenError | None = None
    held: int = 0


class BlobRead(Struct, frozen=True):
    """Bytes of a blob of `size` bytes in all, or why there are none."""

    read: int
    data: bytes = b""
    size: int = 0
    error: EkidenError | None = None
    codec: str = ""
    """How `data` is packed."""


# ------------------------------------------------------------------ caches and room


class CheckCache(Struct, frozen=True):
    """Effect: read that manifest, and see that all it names is in the store. `CacheChecked`
    answers. If nothing is missing its blobs are held from then on, manifest included. Holds are
    counted by manifest: each takes one `ReleaseCache`.

    A `known` cache is one the book has already: what is there of it is held even if some is
    missing."""

    number: int
    cache: CacheUse
    known: bool = False


class CacheChecked(Struct, frozen=True):
    """`files` of together `size` bytes, all here; or how many blobs are missing, or why that is not
    known."""

    number: int
    files: int = 0
    size: int = 0
    missing: int = 0
    error: EkidenError | None = None


class VerifyCache(Struct, frozen=True):
    """Effect: read every blob of that cache and compare; set aside what is damaged, so that it can
    be put again. `CacheChecked` answers; holds are as they were."""

    number: int
    cache: CacheUse


class ReleaseCache(Struct, frozen=True):
    """Effect: one hold on this cache's manifest is given up. No answer."""

    cache: CacheUse


class FindUnused(Struct, frozen=True):
    """Effect: name blobs that no cache holds and nobody used of late, the longest unused first:
    about `wanted` bytes of them, and of the others whatever was not used for so long that it goes
    anyway. `UnusedFound` answers, with a bounded number; unless it is `new`, with the next ones.

    To make room, uploads that were set aside are given up before anything is named."""

    wanted: int
    new: bool = True


class UnusedFound(Struct, frozen=True):
    """Blobs and when each was last used, in nanoseconds by the disk's clock. `more`: there may be
    others. `held` bytes lie in the store."""

    blobs: list[tuple[str, int]]
    more: bool = False
    held: int = 0


class RemoveBlobs(Struct, frozen=True):
    """Effect: remove these, unless they were used or taken into a cache since. `BlobsRemoved`."""

    blobs: list[tuple[str, int]]


class BlobsRemoved(Struct, frozen=True):
    """So many, of so many bytes; `held` are left."""

    count: int
    size: int
    held: int = 0


class ExamineBlob(Struct, frozen=True):
    """Effect: somebody got other bytes than this hash promises. Read it; set it aside if it is
    damaged, so that it can be put again. `BlobExamined` answers."""

    blob: str


class BlobExamined(Struct, frozen=True):
    """`damaged`: it was, and is no longer in the store. `kept`: where the evidence lies, or ""."""

    blob: str
    damaged: bool
    kept: str = ""
