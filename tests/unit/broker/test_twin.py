"""A forked twin writes down the book while the broker goes on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.unit.broker.house import GROUP
from tests.unit.broker.test_recovery import a_life

from ekiden.broker import twin
from ekiden.broker.recovery import take_snapshot
from ekiden.core import image
from ekiden.core.book import JobBook
from ekiden.errors import NoSpace
from ekiden.journal.snapshots import complete_snapshots
from ekiden.world.disk import FolderStorage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks twins")


def written_by_twin(folder: Path, book: JobBook) -> list[str]:
    pid = twin.fork_twin(str(folder), book, GROUP, rss=1 << 20)
    assert pid
    twin.wait_for_twin(pid)
    return sorted(path.name for path in folder.iterdir())


def test_its_snapshot_is_the_book_of_the_moment_of_the_fork(tmp_path: Path) -> None:
    house, _ = a_life()
    book = house.machine.book
    before, index = image.fingerprint(book), book.applied

    pid = twin.fork_twin(str(tmp_path), book, GROUP, rss=1 << 20)
    house.client().submit("later")
    house.settle()
    twin.wait_for_twin(pid)

    (snapshot,) = complete_snapshots(FolderStorage(tmp_path))
    assert (snapshot.index, snapshot.group) == (index, GROUP)
    assert image.fingerprint(image.load(snapshot.chunks())) == before
    assert image.fingerprint(book) != before


def test_a_sound_snapshot_is_not_made_a_second_time(tmp_path: Path) -> None:
    house, _ = a_life()
    book = house.machine.book
    (name,) = written_by_twin(tmp_path, book)
    stamp = (tmp_path / name).stat().st_mtime_ns

    assert take_snapshot(FolderStorage(tmp_path), book.applied, GROUP) == book.applied

    assert (tmp_path / name).stat().st_mtime_ns == stamp


def test_it_lets_go_of_everything_the_broker_has_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, _ = a_life()
    pipe = os.pipe()

    def dump_and_look(book: JobBook) -> list[bytes]:
        (tmp_path / "open").write_text(" ".join(os.listdir("/proc/self/fd")))
        return list(image.dump(book))

    monkeypatch.setattr(twin, "dump", dump_and_look)
    written_by_twin(tmp_path, house.machine.book)
    for end in pipe:
        os.close(end)

    # Three that lead nowhere, the file it writes to, and what it took to look.
    assert len((tmp_path / "open").read_text().split()) <= 5


def test_it_can_be_waited_for_where_ended_children_are_ignored(tmp_path: Path) -> None:
    house, _ = a_life()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        (name,) = written_by_twin(tmp_path, house.machine.book)
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert name.endswith(".snap")


def test_one_that_fails_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, _ = a_life()

    def no_space(*_: object) -> None:
        raise NoSpace("the disk is full")

    monkeypatch.setattr(FolderStorage, "append", no_space)
    pid = twin.fork_twin(str(tmp_path), house.machine.book, GROUP, rss=1 << 20)

    assert twin.wait_for_twin(pid) != 0
    assert list(tmp_path.iterdir()) == []


def test_one_whose_broker_is_gone_leaves_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, _ = a_life()
    monkeypatch.setattr(os, "getppid", lambda: 1)

    names = written_by_twin(tmp_path, house.machine.book)

    assert [name for name in names if name.endswith(".snap")] == []


@pytest.mark.parametrize("why", ["too large", "no process to be had", "another system"])
def test_where_a_fork_is_not_to_be_had_the_answer_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    house, _ = a_life()
    rss = twin.FORK_RSS_MAX
    match why:
        case "too large":
            rss += 1
        case "no process to be had":
            monkeypatch.setattr(os, "fork", _refuses)
        case "another system":
            monkeypatch.setattr(sys, "platform", "darwin")

    assert twin.fork_twin(str(tmp_path), house.machine.book, GROUP, rss=rss) == 0
    assert list(tmp_path.iterdir()) == []


def _refuses() -> int:
    raise BlockingIOError(11, "Resource temporarily unavailable")
