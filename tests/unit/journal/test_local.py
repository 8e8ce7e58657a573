"""The journal on one disk: order, group commit, rotation, recovery."""

from __future__ import annotations

import time

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

from ekiden import limits
from ekiden.errors import CorruptJournal, NoSpace, VersionMismatch
from ekiden.journal import records
from ekiden.journal.journal import Append, Journal
from ekiden.journal.local import LocalJournal, newest_snapshot, perform, recover_upto
from ekiden.journal.records import HEADER_BYTES, RECORD_BYTES, scan
from ekiden.journal.segments import list_segments
from ekiden.journal.snapshots import snapshot_name, write_snapshot
from ekiden.journal.storage import MemoryStorage


def filled(entries: int, *, segment_bytes: int = 400) -> MemoryStorage:
    """Entries 1.. in appends of three, over several segments."""
    storage = MemoryStorage()
    journal, _ = opened(storage, segment_bytes)
    for start in range(1, entries + 1, 3):
        write(storage, journal, map(payload, range(start, min(start + 3, entries + 1))))
    journal.trim()
    return storage


def test_nothing_is_committed_before_it_is_persisted() -> None:
    journal: Journal = opened(MemoryStorage())[0]
    assert (journal.propose(b"a"), journal.propose(b"b")) == (1, 2)

    step = journal.advance(0)

    assert step.append is not None and step.append.upto == 2
    assert (step.committed, step.epoch, step.leads) == (0, 1, True)
    assert journal.in_flight
    journal.persisted(2)
    assert (journal.advance(0).committed, journal.in_flight) == (2, False)


def test_one_append_is_out_at_a_time_and_the_next_gathers_what_came_meanwhile() -> None:
    journal, _ = opened(MemoryStorage())
    journal.propose(b"a")
    first = journal.advance(0).append
    assert journal.propose(b"b") == 2
    assert journal.propose(b"c") == 3

    assert journal.advance(0).append is None
    assert first is not None
    journal.persisted(first.upto)
    second = journal.advance(0).append

    assert second is not None
    assert (second.upto, second.file, second.creates) == (3, first.file, False)


def test_what_was_written_is_read_back_after_a_restart() -> None:
    storage = filled(20)

    journal, recovery = opened(storage)

    assert list(recovery.entries()) == [(n, payload(n)) for n in range(1, 21)]
    assert (recovery.snapshot, recovery.torn, recovery.damaged) == (None, [], [])
    assert journal.committed == 20
    assert journal.propose(b"next") == 21
    assert [journal.read(n) for n in range(1, 21)] == [payload(n) for n in range(1, 21)]


def test_a_folder_keeps_the_group_it_was_made_for() -> None:
    storage = filled(3)

    journal, _ = LocalJournal.open(storage, now=0, group=b"\xff" * 16)

    assert journal.group == GROUP


def test_reading_what_is_not_committed_is_a_key_error() -> None:
    storage = filled(3)
    journal, _ = opened(storage)
    journal.propose(b"x")

    for index in (0, 4, 99):
        with pytest.raises(KeyError):
            journal.read(index)


def test_a_large_segment_is_read_at_any_entry() -> None:
    storage = MemoryStorage()
    journal, _ = opened(storage, 100 << 20)
    sizes = [10, 300_000, 0, 70_000, 1_000_000] * 6
    for n, size in enumerate(sizes):
        write(storage, journal, [bytes([n]) * size])

    for reader in (journal, opened(storage)[0]):
        for n in (29, 0, 13, 14, 7, 28, 2):
            assert reader.read(n + 1) == bytes([n]) * sizes[n]


def test_a_segment_that_is_full_is_followed_by_another() -> None:
    storage = filled(30)

    segments = list_segments(storage)

    assert len(segments) == 3
    assert all(400 <= storage.size(segment.name) < 700 for segment in segments[:-1])
    journal, recovery = opened(storage)
    assert len(list(recovery.entries())) == 30
    closed = journal.closed_segments()
    assert [c.first for c in closed[1:]] == [c.last + 1 for c in closed[:-1]]
    assert len(closed) == len(segments) - 1


def test_roll_closes_the_segment_so_that_a_child_can_replay_it() -> None:
    storage = filled(5, segment_bytes=1 << 20)
    journal, _ = opened(storage)
    assert journal.closed_segments() == []

    journal.roll()

    assert [(c.first, c.last) for c in journal.closed_segments()] == [(1, 5)]
    write(storage, journal, [b"new"])
    assert [(c.first, c.last) for c in journal.closed_segments()] == [(1, 5)]
    assert [s.first for s in list_segments(storage)] == [1, 6]
    assert list(recover_upto(storage, 5).entries()) == [(n, payload(n)) for n in range(1, 6)]


def test_roll_does_nothing_to_an_empty_journal() -> None:
    storage = MemoryStorage()
    journal, _ = opened(storage)
    journal.roll()
    write(storage, journal, [b"a"])
    assert journal.closed_segments() == []


# ------------------------------------------------------------------ torn and damaged


@pytest.mark.parametrize("room", [0, 1, 700])
def test_a_journal_cut_at_every_byte_of_its_last_records_recovers(room: int) -> None:
    storage = filled(30)
    whole = files_of(storage)
    last = list_segments(storage)[-1]
    for size in range(0 if not room else HEADER_BYTES, len(whole[last.name])):
        cut = MemoryStorage({**whole, last.name: whole[last.name][:size] + bytes(room)})

        journal, recovery = opened(cut)
        entries = list(recovery.entries())

        assert entries == [(n, payload(n)) for n in range(1, len(entries) + 1)]
        assert len(entries) >= last.first - 1
        write(cut, journal, [b"after"])
        _, again = opened(cut)
        assert list(again.entries()) == [*entries, (len(entries) + 1, b"after")]
        assert again.torn == []


def test_a_torn_tail_is_reported() -> None:
    storage = filled(3)
    name = list_segments(storage)[-1].name
    storage.append(name, b"garbage")

    _, recovery = opened(storage)

    assert len(recovery.torn) == 1 and name in recovery.torn[0]


def test_damage_in_a_closed_segment_is_refused_and_nothing_is_changed() -> None:
    storage = filled(30)
    first = list_segments(storage)[0].name
    data = bytearray(storage.read(first))
    data[-1] ^= 1
    broken = MemoryStorage({**files_of(storage), first: bytes(data)})
    before = files_of(broken)

    _, recovery = opened(broken)
    with pytest.raises(CorruptJournal) as caught:
        list(recovery.entries())

    assert caught.value.file == first
    assert files_of(broken) == before


def test_damage_inside_the_last_segment_is_refused_and_nothing_is_changed() -> None:
    storage = filled(9, segment_bytes=1 << 20)
    name = list_segments(storage)[0].name
    data = bytearray(storage.read(name))
    data[60] ^= 1
    broken = MemoryStorage({name: bytes(data), "snapshot-x.tmp": b"left"})

    with pytest.raises(CorruptJournal):
        opened(broken)

    assert broken.names() == [name, "snapshot-x.tmp"]
    assert broken.read(name) == bytes(data)


def test_a_missing_segment_is_a_gap_and_refused() -> None:
    files = files_of(filled(30))
    names = sorted(files)
    del files[names[1]]

    _, recovery = opened(MemoryStorage(files))
    with pytest.raises(CorruptJournal, match="are missing before this segment"):
        list(recovery.entries())

    del files[names[0]]
    with pytest.raises(CorruptJournal, match="are in no file"):
        opened(MemoryStorage(files))


def test_a_file_of_another_group_is_refused() -> None:
    files = files_of(filled(30))
    other = MemoryStorage()
    stranger, _ = LocalJournal.open(other, now=0, group=b"\xee" * 16)
    write(other, stranger, [b"x"])
    name = sorted(files)[2]
    files[name] = files_of(other)[other.names()[0]]

    with pytest.raises(CorruptJournal, match="another group"):
        opened(MemoryStorage(files))


def test_a_folder_of_a_newer_version_is_refused_and_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "JOURNAL_VERSION", records.JOURNAL_VERSION + 1)
    storage = filled(3)
    snapshot = MemoryStorage()
    write_snapshot(snapshot, 3, GROUP, [b"state"])
    monkeypatch.undo()

    for newer in (storage, snapshot):
        before = files_of(newer)
        with pytest.raises(VersionMismatch):
            opened(newer)
        assert files_of(newer) == before


def test_damage_to_entries_a_snapshot_says_were_synced_is_not_cut() -> None:
    storage = filled(6, segment_bytes=1 << 20)
    write_snapshot(storage, 6, GROUP, [b"state"])
    name = list_segments(storage)[0].name
    files = files_of(storage)
    files[name] = files[name][:-1]

    with pytest.raises(CorruptJournal, match="synced entries are damaged"):
        opened(MemoryStorage(files))


# ------------------------------------------------------------------ room behind the end


def appended(journal: LocalJournal, data: bytes) -> Append:
    journal.propose(data)
    append = journal.advance(0).append
    assert append is not None
    return append


def test_room_is_asked_for_once_for_many_appends_and_never_beyond_the_segment() -> None:
    storage = MemoryStorage()
    journal, _ = LocalJournal.open(
        storage, now=0, segment_bytes=2500, reserve_bytes=1000, group=GROUP
    )
    asked, sizes = [], []
    for _ in range(30):
        append = appended(journal, b"x" * 80)
        perform(storage, append)
        journal.persisted(append.upto)
        asked.append(append.reserve)
        sizes.append(storage.size(append.file))

    assert [size for size in asked if size] == [1000, 1000, 460, 1000]
    # The last append of a segment goes beyond its size, as it always did.
    assert sizes == [1040] * 10 + [2040] * 10 + [2500] * 4 + [2540] + [1040] * 5


def test_a_large_append_asks_for_no_room() -> None:
    journal, _ = opened(MemoryStorage())

    assert appended(journal, bytes(limits.INLINE_SYNC_BYTES)).reserve == 0


def test_room_that_went_with_an_append_that_found_no_space_is_asked_for_again() -> None:
    disk = SmallDisk(1 << 20)
    journal, _ = opened(disk)
    write(disk, journal, [b"a"])
    assert appended(journal, b"b").reserve == 0
    journal.withdraw()

    assert appended(journal, b"b").reserve > 0


def test_a_closed_segment_has_no_room() -> None:
    storage = MemoryStorage()
    journal, _ = opened(storage)
    write(storage, journal, [b"a"])
    journal.roll()
    write(storage, journal, [b"b"])
    journal.trim()

    assert [storage.size(name) for name in storage.names()] == [HEADER_BYTES + RECORD_BYTES + 1] * 2
    write(storage, journal, [b"c"])
    assert [data for _, data in opened(storage)[1].entries()] == [b"a", b"b", b"c"]


def test_room_that_a_kill_left_is_cut_without_a_word_and_appended_to_where_it_began() -> None:
    storage = MemoryStorage()
    journal, _ = opened(storage)
    write(storage, journal, [b"a", b""])
    killed = MemoryStorage(files_of(storage))

    journal, recovery = opened(killed)

    assert recovery.torn == []
    assert killed.size(killed.names()[0]) == HEADER_BYTES + 2 * RECORD_BYTES + 1
    write(killed, journal, [b"b"])
    _, again = opened(MemoryStorage(files_of(killed)))
    assert [data for _, data in again.entries()] == [b"a", b"", b"b"]
    assert again.torn == []


def test_room_in_a_closed_segment_is_damage() -> None:
    files = files_of(filled(30))
    first, before_last = min(files), sorted(files)[-2]

    for name in (first, before_last):
        broken = MemoryStorage({**files, name: files[name] + bytes(500)})
        with pytest.raises(CorruptJournal, match="500 zeros follow its last record"):
            list(opened(broken)[1].entries())


def test_room_before_a_segment_that_was_being_made_is_damage() -> None:
    files = files_of(filled(3))
    name = min(files)
    broken = MemoryStorage({name: files[name] + bytes(9), "segment-00000000000000000004.log": b""})

    with pytest.raises(CorruptJournal, match="9 zeros follow its last record"):
        opened(broken)


def test_zeros_where_entries_of_a_snapshot_should_be_are_damage() -> None:
    storage = filled(6, segment_bytes=1 << 20)
    write_snapshot(storage, 6, GROUP, [b"state"])
    name = list_segments(storage)[0].name
    files = files_of(storage)
    *_, last = scan(files[name])
    files[name] = files[name][: last.offset].ljust(len(files[name]), b"\0")

    with pytest.raises(CorruptJournal, match="synced entries are damaged"):
        opened(MemoryStorage(files))


def test_much_room_is_passed_over_quickly() -> None:
    """Eight MiB of zeros, looked at one by one in Python, would take seconds."""
    files = files_of(filled(3))
    name = min(files)
    for torn in (b"", b"\x90\x01half a record"):
        storage = MemoryStorage({name: files[name] + torn + bytes(8 << 20)})
        began = time.perf_counter()
        _, recovery = opened(storage)

        assert time.perf_counter() - began < 1
        assert len(list(recovery.entries())) == 3
        assert len(recovery.torn) == bool(torn)


# ------------------------------------------------------------------ snapshots


def test_recovery_begins_after_the_newest_snapshot() -> None:
    storage = filled(30)
    write_snapshot(storage, 5, GROUP, [b"five"])
    write_snapshot(storage, 17, GROUP, [b"seven", b"teen"])

    journal, recovery = opened(storage)

    assert recovery.snapshot is not None
    assert (recovery.snapshot.index, list(recovery.snapshot.chunks())) == (17, [b"seven", b"teen"])
    assert list(recovery.entries()) == [(n, payload(n)) for n in range(18, 31)]
    assert journal.read(3) == payload(3)


def test_a_damaged_snapshot_is_set_aside_and_the_one_before_stands_in() -> None:
    storage = filled(30)
    write_snapshot(storage, 5, GROUP, [b"five"])
    write_snapshot(storage, 17, GROUP, [b"seventeen"])
    storage.truncate(snapshot_name(17), storage.size(snapshot_name(17)) - 1)

    _, recovery = opened(storage)

    assert recovery.snapshot is not None and recovery.snapshot.index == 5
    assert recovery.damaged == [snapshot_name(17)]
    assert list(recovery.entries()) == [(n, payload(n)) for n in range(6, 31)]
    assert snapshot_name(17) + ".damaged" in storage.names()


def test_with_no_sound_snapshot_the_whole_journal_is_replayed() -> None:
    storage = filled(9)
    write_snapshot(storage, 5, GROUP, [b"five"])
    storage.truncate(snapshot_name(5), 60)

    _, recovery = opened(storage)

    assert recovery.snapshot is None
    assert [index for index, _ in recovery.entries()] == list(range(1, 10))


def test_a_damaged_snapshot_that_cannot_be_bridged_is_refused_and_left_alone() -> None:
    storage = filled(30)
    write_snapshot(storage, 5, GROUP, [b"five"])
    write_snapshot(storage, 17, GROUP, [b"seventeen"])
    storage.truncate(snapshot_name(17), 70)
    for segment in list_segments(storage):
        if segment.first < 17:
            storage.remove(segment.name)
    before = files_of(storage)

    with pytest.raises(CorruptJournal):
        opened(storage)

    assert files_of(storage) == before


def test_only_a_snapshot_is_enough_to_go_on_from() -> None:
    storage = MemoryStorage()
    write_snapshot(storage, 17, GROUP, [b"state"])

    journal, recovery = opened(storage)
    assert list(recovery.entries()) == []
    assert journal.propose(b"a") == 18
    write(storage, journal, [b"b"])

    _, again = opened(storage)
    assert list(again.entries()) == [(18, b"a"), (19, b"b")]


def test_a_damaged_snapshot_with_nothing_else_is_refused() -> None:
    storage = MemoryStorage()
    write_snapshot(storage, 17, GROUP, [b"state"])
    storage.truncate(snapshot_name(17), 50)

    with pytest.raises(CorruptJournal, match="entries 1 to 17 are gone"):
        opened(storage)


def test_newest_snapshot_only_reads() -> None:
    storage = filled(9)
    write_snapshot(storage, 5, GROUP, [b"five"])
    write_snapshot(storage, 8, GROUP, [b"eight"])
    storage.truncate(snapshot_name(8), 60)
    before = files_of(storage)

    found = newest_snapshot(storage)

    assert found is not None and found.index == 5
    assert files_of(storage) == before


# ------------------------------------------------------------------ a full disk


def test_a_full_disk_takes_the_append_back_and_gives_its_indices_again() -> None:
    disk = SmallDisk(200)
    journal, _ = opened(disk)
    write(disk, journal, [b"a"])
    before = files_of(disk)
    journal.propose(b"b" * 500)
    append = journal.advance(0).append
    journal.propose(b"c")
    assert append is not None
    with pytest.raises(NoSpace):
        perform(disk, append)

    assert journal.withdraw() == [b"b" * 500, b"c"]
    assert files_of(disk) == before
    assert not journal.in_flight
    assert journal.propose(b"small") == 2
    write(disk, journal, [])
    assert list(opened(disk)[1].entries()) == [(1, b"a"), (2, b"small")]


@pytest.mark.parametrize("room", [0, 20, 40, 60])
def test_a_disk_that_is_full_at_a_new_segment_leaves_no_file_behind(room: int) -> None:
    disk = SmallDisk(1 << 20)
    journal, _ = opened(disk, 100)
    write(disk, journal, [b"a" * 100])
    disk.capacity = 1 << 20
    disk.capacity -= disk.free_bytes() - room
    names = disk.names()
    journal.propose(b"b" * 100)
    append = journal.advance(0).append
    assert append is not None and append.creates
    with pytest.raises(NoSpace):
        perform(disk, append)
    assert journal.withdraw() == [b"b" * 100]
    assert disk.names() == names

    disk.capacity += 1000
    write(disk, journal, [b"c"])

    assert [entry[1] for entry in opened(disk)[1].entries()] == [b"a" * 100, b"c"]


# ------------------------------------------------------------------ dying anywhere


def _write_until_death(disk: CrashingDisk) -> tuple[int, list[bytes]]:
    """(entries acknowledged, payloads proposed) until the disk dies under it."""
    proposed: list[bytes] = []
    acknowledged = 0
    try:
        journal, recovery = opened(disk, 150)
        proposed = [data for _, data in recovery.entries()]
        acknowledged = len(proposed)
        for turn in range(6):
            batch = [payload(len(proposed) + n) for n in range(1, 1 + turn % 3 + 1)]
            proposed += batch
            write(disk, journal, batch)
            acknowledged = journal.committed
    except Crash:
        pass
    return acknowledged, proposed


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("after", [False, True])
def test_dying_at_any_operation_loses_nothing_acknowledged(death: str, after: bool) -> None:
    healthy = CrashingDisk()
    _write_until_death(healthy)
    assert healthy.done > 20

    for at in range(healthy.done):
        disk = CrashingDisk()
        disk.die_at, disk.after = at, after
        acknowledged, proposed = _write_until_death(disk)

        revived = CrashingDisk(disk.left_by(death))
        _, recovery = opened(revived, 150)
        entries = [data for _, data in recovery.entries()]

        assert len(entries) >= acknowledged
        assert entries == proposed[: len(entries)]


@pytest.mark.parametrize("after", [False, True])
def test_dying_during_recovery_and_losing_power_loses_nothing(after: bool) -> None:
    files = files_of(filled(7, segment_bytes=1 << 20))
    name = min(files)
    files[name] += b"torn"
    files["snapshot-00000000000000000003.snap.tmp"] = b"half"
    healthy = CrashingDisk(files)
    opened(healthy)

    for at in range(healthy.done):
        disk = CrashingDisk(files)
        disk.die_at, disk.after = at, after
        with pytest.raises(Crash):
            opened(disk)
        for death in DEATHS:
            _, recovery = opened(CrashingDisk(disk.left_by(death)))
            assert len(list(recovery.entries())) == 7


def test_what_a_kill_left_in_the_page_cache_is_synced_before_it_is_believed() -> None:
    disk = CrashingDisk()
    journal, _ = opened(disk)
    write(disk, journal, [b"a"])
    journal.propose(b"b")
    append = journal.advance(0).append
    assert append is not None
    disk.append(append.file, append.data)  # killed before the sync; the machine lives on

    _, recovery = opened(disk)
    assert list(recovery.entries()) == [(1, b"a"), (2, b"b")]

    _, after_power_loss = opened(CrashingDisk(disk.left_by("loss")))
    assert list(after_power_loss.entries()) == [(1, b"a"), (2, b"b")]
