"""Files that were put before are not read again, unless they may have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ekiden.client import hashes, packing
from ekiden.client.hashes import SETTLED_NS, Hashes, memory_of, now_ns
from ekiden.client.packing import Tally

BLOB = "ab" * 32


def learnt(tmp_path: Path, file: Path, *, later_ns: int = SETTLED_NS + 1) -> Path:
    """A memory on disk of a file that was read so long after its last change."""
    memory = Hashes(tmp_path / "state" / "hashes")
    facts = file.stat()
    memory.learn(str(file), facts, BLOB, facts.st_ctime_ns + later_ns)
    memory.save()
    return tmp_path / "state" / "hashes"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


def test_a_file_that_has_not_changed_is_known_to_the_next_process(
    tmp_path: Path, file: Path
) -> None:
    path = learnt(tmp_path, file)

    assert Hashes(path).find(str(file), file.stat()) == BLOB
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_file_that_was_written_to_is_not_known_even_with_its_old_time(
    tmp_path: Path, file: Path
) -> None:
    path = learnt(tmp_path, file)
    before = file.stat()

    file.write_bytes(b"another")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert Hashes(path).find(str(file), file.stat()) is None


def test_a_file_that_was_read_too_soon_after_a_change_is_not_remembered(
    tmp_path: Path, file: Path
) -> None:
    path = learnt(tmp_path, file, later_ns=SETTLED_NS)

    assert not path.exists()


def test_a_memory_that_is_damaged_or_of_another_version_is_empty(
    tmp_path: Path, file: Path
) -> None:
    path = learnt(tmp_path, file)

    path.write_bytes(b"\x92\x02\x80")
    newer = Hashes(path).find(str(file), file.stat())
    path.write_bytes(b"garbage")
    garbage = Hashes(path).find(str(file), file.stat())

    assert (newer, garbage) == (None, None)


def test_a_memory_keeps_what_was_there_last_and_no_more(tmp_path: Path, file: Path) -> None:
    path = learnt(tmp_path, file)
    other = tmp_path / "other"
    other.write_bytes(b"x")
    facts = other.stat()
    memory = Hashes(path)
    memory.learn(str(other), facts, BLOB, facts.st_ctime_ns + SETTLED_NS + 1)

    memory.save()

    assert [Hashes(path).find(str(each), each.stat()) for each in (file, other)] == [None, BLOB]


def test_each_folder_has_a_memory_and_the_oldest_are_forgotten(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EKIDEN_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(hashes, "MEMORIES_MAX", 2)
    places = [memory_of([f"/data/{day}/a", f"/data/{day}/x/b"]) for day in ("mon", "tue", "wed")]
    facts = file.stat()
    for number, place in enumerate(places):
        memory = Hashes(place)
        memory.learn(str(file), facts, BLOB, facts.st_ctime_ns + SETTLED_NS + 1)
        memory.save()
        os.utime(place, ns=(number, number))

    assert len(set(places)) == 3
    assert [place.exists() for place in places] == [False, True, True]
    assert memory_of([]).parent == memory_of(["/data/mon/a"]).parent


def test_a_memory_that_cannot_be_written_does_no_harm(tmp_path: Path, file: Path) -> None:
    (tmp_path / "state").write_bytes(b"in the way")

    path = learnt(tmp_path, file)

    assert Hashes(path).find(str(file), file.stat()) is None


def test_what_is_remembered_is_not_read(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(200_000))
    sources = packing.find_sources({"a": file, "b": large})
    memory = Hashes(tmp_path / "hashes")
    # As if all of it had lain there for a while.
    monkeypatch.setattr(packing, "now_ns", lambda: now_ns() + 2 * SETTLED_NS)
    first = packing.read_all(sources, Tally(), memory)
    memory.save()

    tally = Tally()
    unread = Hashes(tmp_path / "hashes")
    monkeypatch.setattr(packing, "_read_small", lambda *_: pytest.fail("it was read"))
    second = packing.read_all(sources, tally, unread)

    assert second.files == first.files
    assert second.kept == {}
    assert tally.done == tally.total == first.size


def test_a_memory_that_is_not_trusted_finds_nothing_and_learns(tmp_path: Path, file: Path) -> None:
    path = learnt(tmp_path, file)

    assert Hashes(path, trusted=False).find(str(file), file.stat()) is None
