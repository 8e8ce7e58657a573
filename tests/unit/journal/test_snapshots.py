"""A snapshot is whole, or it is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.journal.disks import DEATHS, GROUP, Crash, CrashingDisk, SmallDisk, files_of

from ekiden.errors import CorruptJournal, NoSpace, VersionMismatch
from ekiden.journal.snapshots import (
    SYNC_BYTES,
    SnapshotReader,
    complete_snapshots,
    snapshot_name,
    write_snapshot,
)
from ekiden.journal.storage import MemoryStorage


def test_chunks_come_back_as_they_were_written() -> None:
    storage = MemoryStorage()
    chunks = [b"a", b"", b"b" * 3_000_000, b"c" * 10]

    name = write_snapshot(storage, 42, GROUP, iter(chunks))

    reader = SnapshotReader(storage, name)
    assert (reader.index, reader.group, list(reader.chunks())) == (42, GROUP, chunks)
    assert reader.check() == 4
    assert storage.names() == [snapshot_name(42)]


def test_a_snapshot_of_nothing_is_a_snapshot() -> None:
    storage = MemoryStorage()
    write_snapshot(storage, 1, GROUP, [])
    assert list(SnapshotReader(storage, snapshot_name(1)).chunks()) == []


def _is_detected(data: bytes) -> bool:
    storage = MemoryStorage({snapshot_name(7): data})
    try:
        SnapshotReader(storage, snapshot_name(7)).check()
    except (CorruptJournal, VersionMismatch):
        return True
    return False


def test_every_flipped_bit_cut_and_extra_byte_is_detected() -> None:
    storage = MemoryStorage()
    write_snapshot(storage, 7, GROUP, [b"state", b"", b"more of it" * 20])
    data = storage.read(snapshot_name(7))
    assert not _is_detected(data)

    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert _is_detected(bytes(flipped)), bit
    assert all(_is_detected(data[:size]) for size in range(len(data)))
    assert _is_detected(data + b"\0")


def test_chunks_that_are_missing_or_in_another_order_are_detected() -> None:
    storage = MemoryStorage()
    write_snapshot(storage, 7, GROUP, [b"aaaa", b"bbbb"])
    data = storage.read(snapshot_name(7))
    first, second = data[40:52], data[52:64]

    assert _is_detected(data[:40] + second + first + data[64:])
    assert _is_detected(data[:40] + first + data[64:])


def test_a_snapshot_under_another_name_is_refused() -> None:
    storage = MemoryStorage()
    storage.rename(write_snapshot(storage, 7, GROUP, [b"x"]), snapshot_name(9))

    with pytest.raises(CorruptJournal, match="unlike the name"):
        SnapshotReader(storage, snapshot_name(9))
    assert complete_snapshots(storage) == []


def test_a_large_snapshot_is_synced_in_steps() -> None:
    pieces: list[int] = []

    class Watched(MemoryStorage):
        def append(self, name: str, data: bytes) -> None:
            pieces.append(len(data))
            super().append(name, data)

        def sync(self, name: str) -> None:
            pieces.append(0)

    write_snapshot(Watched(), 1, GROUP, [b"x" * 5_000_000])

    assert max(pieces) == SYNC_BYTES
    assert pieces[1::2] == [0] * (len(pieces) // 2)


def test_a_full_disk_leaves_the_older_snapshot_and_nothing_else() -> None:
    disk = SmallDisk(1000)
    write_snapshot(disk, 1, GROUP, [b"old"])
    before = files_of(disk)

    with pytest.raises(NoSpace):
        write_snapshot(disk, 2, GROUP, [b"x" * 2000])

    assert files_of(disk) == before


def test_a_failing_source_leaves_nothing() -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise ValueError("the book could not be encoded")

    storage = MemoryStorage()
    with pytest.raises(ValueError):
        write_snapshot(storage, 1, GROUP, chunks())
    assert storage.names() == []


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("after", [False, True])
def test_dying_at_any_operation_leaves_the_old_or_the_new_snapshot(death: str, after: bool) -> None:
    def attempt(disk: CrashingDisk) -> bool:
        try:
            write_snapshot(disk, 2, GROUP, [b"new" * 100, b"x" * (2 * SYNC_BYTES)])
        except Crash:
            return False
        return True

    old = MemoryStorage()
    write_snapshot(old, 1, GROUP, [b"old"])
    healthy = CrashingDisk(files_of(old))
    assert attempt(healthy)

    for at in range(healthy.done):
        disk = CrashingDisk(files_of(old))
        disk.die_at, disk.after = at, after
        written = attempt(disk)
        left = MemoryStorage(disk.left_by(death))
        sound = complete_snapshots(left)
        assert [reader.index for reader in sound] in ([2, 1], [1])
        assert all(reader.check() for reader in sound)
        assert not written or sound[0].index == 2
