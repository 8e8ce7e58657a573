"""What happens to history: covered segments are compressed, kept for a while, then deleted.

`tidy` touches only what a snapshot covers, so it may run in a thread or a child process while the
broker writes. Every step leaves a folder that recovers: a compressed file gets its name only when
it is synced and was read back, and the raw one goes after that.

The two newest snapshots stay. Segments are deleted only up to the older of them, so that it can
still stand in if the newest is found damaged.
"""

from __future__ import annotations

from msgspec import Struct, field

from ekiden.errors import CorruptJournal, StorageFault
from ekiden.journal.records import scan
from ekiden.journal.segments import (
    Segment,
    compress,
    list_segments,
    read_table,
    unpack,
)
from ekiden.journal.snapshots import TEMP_SUFFIX, complete_snapshots
from ekiden.journal.storage import Storage
from ekiden.model.jobs import Index

SNAPSHOTS_KEPT = 2


class Tidied(Struct):
    """What `tidy` did. `problems` are sentences: damaged files are left alone and named here."""

    compressed: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def covered(segments: list[Segment], upto: Index) -> list[Segment]:
    """Closed segments, all of whose entries are `upto` or earlier. Never the last one."""
    followers = segments[1:]
    return [
        segment
        for segment, follower in zip(segments, followers, strict=False)
        if follower.first <= upto + 1
    ]


def tidy(
    storage: Storage,
    *,
    snapshot_index: Index,
    now_wall: int,
    keep_ns: int,
    keep_bytes: int,
    tag: str = "",
) -> Tidied:
    """Compress what the snapshot covers; delete what is older than `keep_ns` or over `keep_bytes`.

    `now_wall` is nanoseconds of the wall clock. `tag` tells apart the temporary files of two
    processes. A crash at any point is repaired by running it again, or by the next start.
    """
    done = Tidied()
    snapshots = complete_snapshots(storage)
    if not snapshots:
        return done
    newest = min(snapshot_index, snapshots[0].index)
    for segment in covered(list_segments(storage), newest):
        if not segment.compressed:
            _compress(storage, segment, now_wall, tag, done)
    if len(snapshots) >= SNAPSHOTS_KEPT:
        floor = min(newest, snapshots[SNAPSHOTS_KEPT - 1].index)
        _delete_old(storage, floor, now_wall - keep_ns, keep_bytes, done)
    for snapshot in snapshots[SNAPSHOTS_KEPT:]:
        storage.remove(snapshot.name)
        done.deleted.append(snapshot.name)
    storage.sync_folder()
    return done


def _compress(storage: Storage, segment: Segment, now_wall: int, tag: str, done: Tidied) -> None:
    target = segment.name + ".zst"
    temp = f"{target}{tag and '.'}{tag}{TEMP_SUFFIX}"
    for leftover in {temp, target} & set(storage.names()):
        storage.remove(leftover)
    raw = storage.read(segment.name)
    try:
        packed = compress(raw, scan(raw, file=segment.name), wall_ns=now_wall)
    except CorruptJournal as error:
        done.problems.append(str(error))
        return
    storage.create(temp)
    try:
        storage.append(temp, packed)
    except StorageFault:
        storage.remove(temp)
        raise
    storage.sync(temp)
    storage.rename(temp, target)
    storage.sync_folder()
    if not _reads_back(storage, target, raw):
        done.problems.append(f"{target!r} could not be read back; the raw segment stays")
        return
    storage.remove(segment.name)
    done.compressed.append(target)


def _reads_back(storage: Storage, name: str, raw: bytes) -> bool:
    at = 0
    try:
        for part, data in unpack(storage, name):
            if data != raw[at : at + part.raw]:
                return False
            at += part.raw
    except CorruptJournal:
        return False
    return at == len(raw)


def _delete_old(
    storage: Storage, floor: Index, before_wall: int, keep_bytes: int, done: Tidied
) -> None:
    candidates = covered(list_segments(storage), floor)
    total = sum(storage.size(segment.name) for segment in candidates)
    for segment in candidates:  # oldest first, and no holes: stop at the first that stays
        if not segment.compressed:
            return
        size = storage.size(segment.name)
        try:
            expired = read_table(storage, segment.name).wall_ns <= before_wall
        except CorruptJournal as error:
            done.problems.append(str(error))
            return
        if not expired and total <= keep_bytes:
            return
        storage.remove(segment.name)
        done.deleted.append(segment.name)
        total -= size
