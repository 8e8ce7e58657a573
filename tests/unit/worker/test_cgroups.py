"""Memory limits by control groups, where they can be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiden.worker import cgroups
from ekiden.worker.cgroups import MemoryGroup, MemoryGroups, find_memory_groups


@pytest.fixture
def here() -> Iterator[MemoryGroups]:
    groups = find_memory_groups("test")
    if groups is None:
        pytest.skip("no control group may be made here")
    yield groups
    groups.close()


def test_what_outgrows_its_group_is_ended_by_the_kernel_and_that_is_known(
    here: MemoryGroups,
) -> None:
    group = here.make(1, 40)
    assert group is not None
    script = "import sys; sys.stdin.read(); x = bytearray(300 << 20)"
    eater = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    group.add(eater.pid)
    eater.communicate(b"go")

    assert eater.returncode == -9
    assert group.was_oom()
    assert 0 < group.peak_kb() <= 40 << 10
    group.remove()
    assert here.make(1, 40) is not None, "nothing was left that is in the way"


def test_what_stays_within_its_group_is_left_alone(here: MemoryGroups) -> None:
    group = here.make(1, 400)
    assert group is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        group.add(process.pid)
        process.communicate(b"\n")

    assert (process.returncode, group.was_oom()) == (0, False)


def test_of_a_keeper_that_was_killed_nothing_stays_in_the_way(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"ekiden-{dead.pid}-t" / "7").mkdir(parents=True)
    (tmp_path / f"ekiden-{os.getpid()}-t" / "8").mkdir(parents=True)
    (tmp_path / "other").mkdir()

    cgroups._clear_leftovers(str(tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == [f"ekiden-{os.getpid()}-t", "other"]


@pytest.mark.parametrize(
    ("own", "mounts", "base"),
    [
        ("0::/grid\n", "cgroup2 {root} cgroup2 rw 0 0\n", "grid"),
        ("4:cpu,memory:/a\n0::/\n", "cgroup {root} cgroup rw,memory 0 0\n", "a"),
    ],
)
def test_our_own_group_is_found_in_both_versions(
    tmp_path: Path, own: str, mounts: str, base: str
) -> None:
    found = cgroups._candidates(own, mounts.format(root=tmp_path))

    assert [path for path, _ in found] == [f"{tmp_path}/{base}"]


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path) -> None:
    own, mounts = tmp_path / "cgroup", tmp_path / "mounts"
    own.write_text("0::/gone\n1:memory:/gone\n")
    mounts.write_text(
        f"a {tmp_path}/none cgroup2 rw 0 0\nshort\nb {tmp_path}/none cgroup rw,memory 0 0\n"
    )

    assert find_memory_groups("t", str(own), str(mounts)) is None
    assert find_memory_groups("t", "/nonexistent", str(mounts)) is None


def test_a_group_whose_files_cannot_be_read_is_taken_for_a_quiet_one(tmp_path: Path) -> None:
    group = MemoryGroup(str(tmp_path), cgroups._V2)
    group.add(1)

    assert (group.was_oom(), group.peak_kb()) == (False, 0)
    (tmp_path / "memory.events").write_text("low 0\noom_kill 0\n")
    (tmp_path / "memory.peak").write_text("2048\n")
    assert (group.was_oom(), group.peak_kb()) == (False, 2)
    (tmp_path / "memory.events").write_text("oom_kill 3\n")
    assert group.was_oom()
    assert MemoryGroups(str(tmp_path), cgroups._V2).make(1, 10) is None
