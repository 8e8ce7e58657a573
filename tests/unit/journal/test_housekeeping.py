"""History is compressed, kept and deleted, and a crash in between costs nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.unit.journal.disks import (
    DEATHS,
    GROUP,
    Crash,
    CrashingDisk,
    SmallDisk,
    files_of,
    opened,
    payload,
    write,
)

from ekiden.errors import NoSpace
from ekiden.journal.housekeeping import Tidied, tidy
from ekiden.journal.inspection import dump, verify
from ekiden.journal.records import scan
from ekiden.journal.segments import (
    STRIDE_BYTES,
    Finder,
    compress,
    list_segments,
    read_table,
)
from ekiden.journal.snapshots import snapshot_name, snapshot_names, write_snapshot
from ekiden.journal.storage import MemoryStorage, Storage

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HOUR = 3600 * 10**9


def history(*snapshots: int, entries: int = 60) -> MemoryStorage:
    storage = MemoryStorage()
    journal, _ = opened(storage, 300)
    for start in range(1, entries + 1, 3):
        write(storage, journal, map(payload, range(start, start + 3)))
    for index in snapshots:
        write_snapshot(storage, index, GROUP, [b"state %d" % index])
    return storage


def tidied(storage: Storage, **changes: Any) -> Tidied:
    given: dict[str, Any] = {
        "snapshot_index": 10**9,
        "now_wall": 100 * HOUR,
        "keep_ns": HOUR,
        "keep_bytes": 1 << 30,
    }
    return tidy(storage, **(given | changes))


def test_covered_segments_are_compressed_and_others_are_not_touched() -> None:
    storage = history(40)
    before = list_segments(storage)

    done = tidied(storage)

    after = list_segments(storage)
    assert [segment.first for segment in after] == [segment.first for segment in before]
    followers = [*after[1:], None]
    for segment, follower in zip(after, followers, strict=True):
        covered = follower is not None and follower.first <= 41
        assert segment.compressed == covered
    assert done.compressed == [segment.name for segment in after if segment.compressed] != []
    assert done.problems == []


def test_entries_are_the_same_before_and_after_and_in_a_journal_that_was_open_meanwhile() -> None:
    storage = history(40)
    journal, _ = opened(storage, 300)
    assert journal.read(1) == payload(1)

    tidied(storage)

    expected = [(n, payload(n)) for n in range(1, 61)]
    assert [(n, journal.read(n)) for n in range(1, 61)] == expected
    assert list(dump(storage)) == expected
    assert list(dump(storage, 55)) == expected[54:]
    assert verify(storage).ok


def test_the_plain_zstd_tool_would_give_back_the_raw_segment() -> None:
    storage = history(40)
    first = list_segments(storage)[0]
    raw = storage.read(first.name)

    tidied(storage)

    # `decompress` unpacks all frames in turn and skips the table, as the tool does.
    assert zstd.decompress(storage.read(first.name + ".zst")) == raw


def test_one_entry_of_a_compressed_segment_is_read_by_unpacking_one_part() -> None:
    storage = MemoryStorage()
    journal, _ = opened(storage, 100 << 20)
    for n in range(1, 41):
        write(storage, journal, [b"%d" % n * 30_000, b"small %d" % n])
    journal.roll()
    write(storage, journal, [b"last"])
    write_snapshot(storage, 80, GROUP, [b"state"])
    expected = [journal.read(n) for n in range(1, 82)]

    tidied(storage)

    segment = list_segments(storage)[0]
    assert segment.compressed
    parts = read_table(storage, segment.name).parts
    assert len(parts) > 4
    assert max(part.raw for part in parts) < 2 * STRIDE_BYTES
    finder = Finder(storage)
    assert [finder.read(segment, n) for n in range(1, 81)] == expected[:80]
    assert [journal.read(n) for n in range(1, 82)] == expected


def test_a_compressed_segment_is_deleted_when_it_was_kept_long_enough() -> None:
    storage = history(20, 40)
    tidied(storage, now_wall=100 * HOUR)
    assert tidied(storage, now_wall=101 * HOUR - 1).deleted == []

    deleted = tidied(storage, now_wall=101 * HOUR).deleted

    assert deleted
    kept = list_segments(storage)
    assert kept[0].first <= 21, "the older snapshot must still be able to stand in"
    journal, _ = opened(storage, 300)
    with pytest.raises(KeyError):
        journal.read(1)
    assert journal.read(21) == payload(21)


def test_the_oldest_are_deleted_first_when_history_is_too_large() -> None:
    storage = history(40, 60)
    tidied(storage)
    sizes = [storage.size(segment.name) for segment in list_segments(storage)]
    names = [segment.name for segment in list_segments(storage)]
    covered_by_older = [
        size
        for size, follower in zip(sizes, list_segments(storage)[1:], strict=False)
        if follower.first <= 41
    ]

    done = tidied(storage, keep_bytes=sum(covered_by_older) - sizes[0] - 1)

    assert done.deleted == names[:2]


def test_nothing_is_deleted_while_there_is_one_snapshot_only() -> None:
    storage = history(40)
    tidied(storage)

    assert tidied(storage, now_wall=10**6 * HOUR, keep_bytes=0).deleted == []


def test_without_a_snapshot_on_disk_nothing_happens() -> None:
    storage = history()
    before = files_of(storage)

    assert tidied(storage, keep_bytes=0) == Tidied()
    assert files_of(storage) == before


def test_the_last_two_snapshots_are_kept() -> None:
    storage = history(10, 20, 30, 40)

    tidied(storage)

    assert snapshot_names(storage) == [snapshot_name(40), snapshot_name(30)]


def test_a_snapshot_without_footer_does_not_count_and_is_not_deleted() -> None:
    storage = history(10, 20, 30)
    storage.truncate(snapshot_name(30), storage.size(snapshot_name(30)) - 1)

    tidied(storage)

    assert snapshot_names(storage) == [snapshot_name(n) for n in (30, 20, 10)]


def test_recovery_reads_compressed_segments_when_the_newest_snapshot_is_damaged() -> None:
    storage = history(15, 40)
    tidied(storage, now_wall=1)
    storage.truncate(snapshot_name(40), 60)

    _, recovery = opened(storage, 300)

    assert recovery.snapshot is not None and recovery.snapshot.index == 15
    assert list(recovery.entries()) == [(n, payload(n)) for n in range(16, 61)]


def test_a_damaged_segment_is_reported_and_neither_compressed_nor_deleted() -> None:
    storage = history(20, 40)
    name = list_segments(storage)[0].name
    data = bytearray(storage.read(name))
    data[80] ^= 1
    broken = MemoryStorage({**files_of(storage), name: bytes(data)})

    done = tidied(broken)
    again = tidied(broken, now_wall=10**6 * HOUR, keep_bytes=0)

    assert len(done.problems) == 1 and name in done.problems[0]
    assert done.compressed
    assert again.deleted == []
    assert broken.read(name) == bytes(data)


def test_every_flipped_bit_of_a_compressed_segment_is_detected_or_harmless() -> None:
    """zstd leaves a few bits unused; whatever is read must be right all the same."""
    storage = history(40)
    tidied(storage)
    segment = list_segments(storage)[0]
    data = storage.read(segment.name)
    raw = zstd.decompress(data)
    expected = [record.payload for record in scan(raw)]

    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        report = verify(MemoryStorage({segment.name: bytes(flipped)}))
        if report.ok:
            found = dump(MemoryStorage({segment.name: bytes(flipped)}))
            assert [entry for _, entry in found] == expected


def test_if_raw_and_compressed_are_both_there_the_raw_one_counts() -> None:
    storage = history(40)
    first = list_segments(storage)[0].name
    storage.create(first + ".zst")
    storage.append(first + ".zst", b"half written, or of an earlier attempt")
    other = MemoryStorage(files_of(storage))

    opened(other, 300)
    assert first + ".zst" not in other.names()

    tidied(storage)
    assert first not in storage.names()
    assert [index for index, _ in dump(storage)] == list(range(1, 61))


def test_a_full_disk_leaves_history_as_it_was() -> None:
    full = SmallDisk(1 << 20)
    for name, data in files_of(history(40)).items():
        full.create(name)
        full.append(name, data)
    full.capacity -= full.free_bytes() - 10
    before = files_of(full)

    with pytest.raises(NoSpace):
        tidied(full)

    assert files_of(full) == before


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("after", [False, True])
def test_dying_at_any_operation_loses_no_entry_that_is_to_be_kept(death: str, after: bool) -> None:
    begin = history(10, 20, 40)
    tidied(begin, snapshot_index=20, now_wall=1)
    write_snapshot(begin, 50, GROUP, [b"state 50"])
    files = files_of(begin)
    healthy = CrashingDisk(files)
    tidied(healthy)
    assert healthy.done > 20

    for at in range(healthy.done):
        disk = CrashingDisk(files)
        disk.die_at, disk.after = at, after
        with pytest.raises(Crash):
            tidied(disk)

        left = MemoryStorage(disk.left_by(death))
        _, recovery = opened(left, 300)
        assert recovery.snapshot is not None and recovery.snapshot.index == 50
        assert list(recovery.entries()) == [(n, payload(n)) for n in range(51, 61)]
        tidied(left)
        assert left.names() == healthy.names()
        assert verify(left).ok
        assert [index for index, _ in dump(left, 41)] == list(range(41, 61))


def test_compressing_is_the_same_every_time() -> None:
    storage = history(40)
    raw = storage.read(list_segments(storage)[0].name)

    assert compress(raw, scan(raw), wall_ns=5) == compress(raw, scan(raw), wall_ns=5)
