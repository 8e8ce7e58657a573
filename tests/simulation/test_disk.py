"""The simulated disk keeps what was synced and nothing it did not have to."""

from __future__ import annotations

from random import Random

import pytest

from ekiden.errors import NoSpace, StorageFault
from ekiden.simulation.disk import SECTOR, Died, Rehearsal, SimDisk

ROUNDS = 200


def _disk_with_synced(name: str, data: bytes, dice: int = 0) -> SimDisk:
    disk = SimDisk(Random(dice))
    disk.create(name)
    disk.append(name, data)
    disk.sync(name)
    disk.sync_folder()
    return disk


def _after_power_loss(disk: SimDisk) -> SimDisk:
    disk.die(power=True)
    disk.revive()
    return disk


def test_synced_bytes_survive_a_power_loss_whatever_else_is_lost() -> None:
    for dice in range(ROUNDS):
        disk = _disk_with_synced("a", b"safe", dice)
        disk.append("a", b"x" * 3000)

        after = _after_power_loss(disk).read("a")

        assert after.startswith(b"safe")
        assert len(after) <= 3004


def test_unsynced_bytes_are_sometimes_lost_kept_cut_and_holed() -> None:
    seen = set()
    for dice in range(ROUNDS):
        disk = _disk_with_synced("a", b"safe", dice)
        disk.append("a", b"x" * 3000)
        tail = _after_power_loss(disk).read("a")[4:]
        if not tail:
            seen.add("lost")
        elif tail == b"x" * 3000:
            seen.add("kept")
        elif b"\0" in tail:
            seen.add("holed")
        else:
            seen.add("cut")

    assert seen == {"lost", "kept", "holed", "cut"}


def test_a_hole_covers_whole_sectors_and_never_synced_bytes() -> None:
    for dice in range(ROUNDS):
        disk = _disk_with_synced("a", b"s" * 700, dice)
        disk.append("a", b"x" * 2000)
        after = _after_power_loss(disk).read("a")
        for at, byte in enumerate(after):
            if byte == 0:
                first = at // SECTOR * SECTOR
                assert not any(after[max(first, 700) : first + SECTOR])


def test_a_name_is_safe_only_after_the_folder_was_synced() -> None:
    found = set()
    for dice in range(ROUNDS):
        disk = SimDisk(Random(dice))
        disk.create("new")
        disk.append("new", b"data")
        disk.sync("new")
        found.add(tuple(_after_power_loss(disk).names()))

    assert found == {(), ("new",)}


def test_an_unsynced_rename_leaves_the_old_or_the_new_name_never_both() -> None:
    found = set()
    for dice in range(ROUNDS):
        disk = _disk_with_synced("s.tmp", b"whole", dice)
        disk.rename("s.tmp", "s")
        after = _after_power_loss(disk)
        found.add(tuple(after.names()))
        assert after.read(after.names()[0]) == b"whole"

    assert found == {("s",), ("s.tmp",)}


def test_a_kill_keeps_the_page_cache() -> None:
    disk = _disk_with_synced("a", b"safe")
    disk.append("a", b"cached")
    disk.create("b")

    disk.die(power=False)
    disk.revive()

    assert disk.read("a") == b"safecached"
    assert disk.names() == ["a", "b"]


def test_an_unsynced_truncate_may_be_undone() -> None:
    found = set()
    for dice in range(ROUNDS):
        disk = _disk_with_synced("a", b"abcdef", dice)
        disk.truncate("a", 2)
        found.add(_after_power_loss(disk).read("a"))

    assert found == {b"ab", b"abcdef"}


def test_room_survives_a_power_loss_or_not_and_what_was_written_in_it_likewise() -> None:
    found = set()
    for dice in range(ROUNDS):
        disk = _disk_with_synced("a", b"safe", dice)
        disk.reserve("a", 3000)
        room = disk.size("a") - 4
        disk.append("a", b"xy")
        tail = _after_power_loss(disk).read("a")[4:]
        assert len(tail) <= max(room, 2)
        assert not tail.strip(b"\0") or tail.startswith(b"x")
        found.add((tail[:2] == b"xy", len(tail) > 2))

    assert found >= {(True, True), (False, True), (False, False)}


def test_synced_room_stays_and_a_lost_write_in_it_leaves_zeros() -> None:
    found = set()
    for dice in range(ROUNDS):
        disk = _disk_with_synced("a", b"safe", dice)
        while disk.size("a") < 100:
            disk.reserve("a", 3000)
        disk.sync("a")
        size = disk.size("a")
        disk.append("a", b"xy")
        after = _after_power_loss(disk).read("a")
        assert after.rstrip(b"\0") in (b"safe", b"safexy")
        assert len(after) == size
        found.add(after[4:6])

    assert found == {b"xy", b"\0\0"}


def test_only_the_process_that_reserved_knows_where_the_file_ends() -> None:
    disk = _disk_with_synced("a", b"safe")
    while disk.size("a") == 4:
        disk.reserve("a", 3000)
    size = disk.size("a")
    disk.die(power=False)
    disk.revive()

    disk.append("a", b"x")

    assert disk.size("a") == size + 1


def test_bytes_whose_sync_failed_are_gone_for_good() -> None:
    disk = _disk_with_synced("a", b"safe")
    disk.append("a", b"doomed")
    disk.fail_sync = True
    with pytest.raises(StorageFault):
        disk.sync("a")
    disk.sync("a")  # Linux says yes now, without having written them.

    disk.die(power=False)
    disk.revive()

    assert disk.read("a") == b"safe"


def test_a_full_disk_refuses_an_append_and_leaves_the_file_as_it_was() -> None:
    disk = _disk_with_synced("a", b"12345678")
    disk.capacity = 10

    with pytest.raises(NoSpace):
        disk.append("a", b"abc")

    assert disk.read("a") == b"12345678"
    assert disk.free_bytes() == 2


def test_a_failpoint_ends_the_process_at_that_operation_before_or_after_it() -> None:
    sizes = set()
    for dice in range(ROUNDS):
        disk = _disk_with_synced("a", b"", dice)
        disk.die_at = disk.operations + 2
        disk.append("a", b"1")
        with pytest.raises(Died):
            disk.append("a", b"2")
        with pytest.raises(Died):
            disk.names() if disk.down else disk.append("a", b"3")
        disk.die(power=False)
        with pytest.raises(Died):
            disk.names()
        disk.revive()
        sizes.add(disk.size("a"))

    assert sizes <= {1, 2, 3}
    assert len(sizes) > 1


def test_a_rehearsal_changes_nothing_and_writes_every_change_down() -> None:
    disk = _disk_with_synced("a", b"x")
    rehearsal = Rehearsal(disk)

    rehearsal.create("b")
    rehearsal.append("b", b"1")
    rehearsal.sync("b")
    rehearsal.rename("b", "c")
    rehearsal.remove("a")
    rehearsal.sync_folder()

    assert disk.names() == ["a"]
    for step, arguments in rehearsal.steps:
        getattr(disk, step)(*arguments)
    assert disk.names() == ["c"]
    assert disk.copy_safe() == {"c": b"1"}
