"""The data folder on a real disk."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.journal.disks import GROUP, opened, payload, write

from ekiden import limits
from ekiden.errors import FolderInUse, NoSpace, StorageFault
from ekiden.journal.housekeeping import tidy
from ekiden.journal.inspection import dump, verify
from ekiden.journal.local import perform
from ekiden.journal.records import HEADER_BYTES, RECORD_BYTES
from ekiden.journal.snapshots import write_snapshot
from ekiden.journal.storage import Storage
from ekiden.world.disk import FolderStorage

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes, locks and limits")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FolderStorage]:
    storage = FolderStorage(tmp_path / "data")
    yield storage
    storage.close()


def test_it_does_what_a_storage_does(folder: FolderStorage) -> None:
    storage: Storage = folder
    storage.create("b")
    storage.append("b", b"hello ")
    storage.append("b", b"world")
    storage.sync("b")
    storage.create("a")
    storage.sync_folder()

    assert storage.names() == ["a", "b"]
    assert storage.size("b") == 11
    assert (storage.read("b"), storage.read("b", 6), storage.read("b", 2, 3)) == (
        b"hello world",
        b"world",
        b"llo",
    )
    assert storage.read("b", 100) == storage.read("b", 3, 0) == b""
    storage.truncate("b", 5)
    storage.append("b", b"!")
    assert storage.read("b") == b"hello!"
    storage.rename("b", "a")
    storage.append("a", b"?")
    assert storage.read("a") == b"hello!?"
    storage.remove("a")
    assert storage.names() == []
    assert storage.free_bytes() > 0


def test_faults_say_which_file_and_why(folder: FolderStorage) -> None:
    folder.create("x")
    for action in (
        lambda: folder.create("x"),
        lambda: folder.append("missing", b""),
        lambda: folder.read("missing"),
        lambda: folder.size("missing"),
        lambda: folder.sync("missing"),
        lambda: folder.remove("missing"),
        lambda: folder.rename("missing", "y"),
    ):
        with pytest.raises(StorageFault, match=r"'(x|missing)': (File exists|No such file)"):
            action()


@posix
def test_only_the_owner_can_read_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0o000, 0o277):
        path = tmp_path / f"umask-{umask}"
        before = os.umask(umask)
        try:
            storage = FolderStorage(path)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        os.umask(0)
        try:
            storage.create("x")
            storage.lock()
        finally:
            os.umask(before)
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
        storage.close()


@posix
def test_few_descriptors_stay_open_and_none_keeps_a_deleted_file(folder: FolderStorage) -> None:
    def open_files() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return [path for path in found if path.startswith(folder.path)]

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to count descriptors")
    for n in range(20):
        folder.create(f"file-{n}")
        folder.append(f"file-{n}", b"x")
    assert len(open_files()) == 2

    for n in range(20):
        folder.remove(f"file-{n}")
    assert open_files() == []


def test_threads_may_write_different_files_at_the_same_time(folder: FolderStorage) -> None:
    def work(name: str) -> None:
        for n in range(20):
            folder.create(f"{name}-{n}")
            for _ in range(20):
                folder.append(f"{name}-{n}", name.encode() * 50)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcde"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(folder.names()) == 100
    for file in folder.names():
        assert folder.read(file) == file[0].encode() * 1000


# ------------------------------------------------------------------ room behind the end


@posix
def test_appends_go_into_the_room_that_was_reserved_and_the_file_keeps_its_size(
    folder: FolderStorage,
) -> None:
    folder.create("x")
    folder.append("x", b"head")
    folder.reserve("x", 100)
    assert folder.read("x") == b"head" + bytes(100)

    folder.append("x", b"one")
    folder.reserve("x", 50)  # there is more than that
    assert folder.read("x") == b"headone" + bytes(97)

    folder.append("x", b"y" * 98)
    assert folder.read("x") == b"headone" + b"y" * 98
    folder.reserve("x", 10)
    folder.trim("x")
    folder.append("x", b"!")
    assert folder.read("x") == b"headone" + b"y" * 98 + b"!"
    folder.trim("x")
    assert folder.size("x") == 106


@posix
def test_the_end_is_known_even_when_the_file_was_closed_meanwhile(folder: FolderStorage) -> None:
    folder.create("x")
    folder.reserve("x", 100)
    folder.append("x", b"one")
    for other in "abc":
        folder.create(other)

    folder.append("x", b"two")

    assert folder.read("x") == b"onetwo" + bytes(94)
    folder.remove("x")
    folder.create("x")
    folder.append("x", b"new")
    folder.trim("x")
    assert folder.read("x") == b"new"


@posix
def test_a_nearly_full_disk_gives_no_room(
    folder: FolderStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.create("x")
    monkeypatch.setattr(folder, "free_bytes", lambda: limits.DISK_HEADROOM_BYTES + 99)

    folder.reserve("x", 100)
    assert folder.size("x") == 0
    folder.reserve("x", 99)
    assert folder.size("x") == 99


@posix
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP, errno.EIO])
def test_room_that_cannot_be_had_is_no_error_and_leaves_nothing(
    folder: FolderStorage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    folder.create("x")
    folder.append("x", b"kept")
    real = os.pwrite

    def fails(fd: int, data: bytes, at: int) -> int:
        if len(data) > 5:
            return real(fd, data[:5], at)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fails)
    folder.reserve("x", 100)
    monkeypatch.undo()

    assert folder.read("x") == b"kept"
    folder.append("x", b" on")
    assert folder.read("x") == b"kept on"


@posix
def test_an_append_that_outgrows_its_room_and_the_disk_is_taken_back_with_the_room(
    folder: FolderStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.create("x")
    folder.reserve("x", 10)
    folder.append("x", b"kept")
    real = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if at < 10:
            return real(fd, data[: 10 - at], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpace):
        folder.append("x", b"too much")
    monkeypatch.undo()

    assert folder.read("x") == b"kept"
    folder.append("x", b" on")
    assert folder.read("x") == b"kept on"


@posix
def test_a_killed_broker_leaves_room_and_an_orderly_one_none(folder: FolderStorage) -> None:
    journal, _ = opened(folder)
    write(folder, journal, [b"a"])
    (name,) = folder.names()
    assert folder.size(name) == HEADER_BYTES + limits.RESERVE_BYTES

    killed = FolderStorage(folder.path)  # another process, which knows only what it reads
    journal, recovery = opened(killed)
    assert list(recovery.entries()) == [(1, b"a")]
    assert recovery.torn == []
    write(killed, journal, [b"b"])
    assert verify(folder).ok
    journal.trim()

    assert killed.size(name) == HEADER_BYTES + 2 * (RECORD_BYTES + 1)
    assert list(dump(killed)) == [(1, b"a"), (2, b"b")]
    killed.close()


NO_RESERVE = """
import os, sys
del os.pwrite, os.fdatasync
from ekiden.world import disk
disk._sync_data = os.fsync
from ekiden.world.disk import FolderStorage
storage = FolderStorage(sys.argv[1])
storage.create("x")
storage.reserve("x", 100)
storage.append("x", b"one")
storage.append("x", b"two")
storage.sync("x")
storage.trim("x")
print(storage.read("x"))
"""


@posix
def test_where_a_sync_cannot_leave_out_the_size_files_grow(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_RESERVE, str(tmp_path)], capture_output=True, check=True
    )

    assert done.stdout == b"b'onetwo'\n"


# ------------------------------------------------------------------ one holder


def test_a_second_holder_is_told_who_the_first_is(folder: FolderStorage) -> None:
    folder.lock()
    folder.lock()  # the holder may ask again
    second = FolderStorage(folder.path)

    with pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}"):
        second.lock()

    folder.close()
    second.lock()
    second.close()


HOLD = """
import sys
import time
from ekiden.world.disk import FolderStorage
storage = FolderStorage(sys.argv[1])
storage.lock()
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_holds_the_folder_until_it_is_killed(folder: FolderStorage) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(FolderInUse, match=f"process {holder.pid}"):
            folder.lock()
        holder.kill()
        holder.wait()

    folder.lock()


def lock_soon(storage: FolderStorage) -> None:
    """A child that becomes another program lets go a moment after its parent hears of it."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return storage.lock()
        except FolderInUse:
            assert time.monotonic() < deadline, "the lock was inherited"
            time.sleep(0.001)


@posix
def test_children_do_not_inherit_the_lock(folder: FolderStorage) -> None:
    folder.lock()
    gate, opener = os.pipe()
    alive, life = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.close(opener)
        os.write(life, b"!")  # it lets go of the lock when it first runs, not before
        os.read(gate, 1)
        os._exit(0)
    try:
        assert os.read(alive, 1) == b"!"
        with subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            close_fds=False,
        ):
            folder.close()  # as the end of the process would do
            other = FolderStorage(folder.path)
            lock_soon(other)
            other.close()
    finally:
        for end in (opener, gate, alive, life):
            os.close(end)
        os.waitpid(forked, 0)


# ------------------------------------------------------------------ a full disk


@posix
def test_what_does_not_fit_is_taken_back(
    folder: FolderStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.create("x")
    folder.append("x", b"kept")
    real = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        """Takes some, then says that the disk is full, as the kernel does."""
        if len(data) > 3:
            return real(fd, data[:3], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpace, match="No space left"):
        folder.append("x", b"too much")
    monkeypatch.undo()

    assert folder.read("x") == b"kept"
    folder.append("x", b" on")
    assert folder.read("x") == b"kept on"


LIMITED = """
import resource, sys
from ekiden.errors import NoSpace
from ekiden.journal.local import LocalJournal, perform
from ekiden.world.disk import FolderStorage

storage = FolderStorage(sys.argv[1])
storage.lock()
journal, _ = LocalJournal.open(storage, now=0, group=bytes(16))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
refused = 0
for n in range(100):
    journal.propose(b"%d " % n * (1000 if n % 2 else 10))
    append = journal.advance(0).append
    try:
        perform(storage, append)
    except NoSpace:
        refused += 1
        journal.withdraw()
    else:
        journal.persisted(append.upto)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.propose(b"room again")
append = journal.advance(0).append
perform(storage, append)
journal.persisted(append.upto)
print(refused, journal.committed)
"""


@posix
def test_a_limit_of_the_system_refuses_large_entries_and_keeps_small_ones(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    refused, committed = map(int, done.stdout.split())

    assert refused > 10
    assert committed == 100 - refused + 1
    storage = FolderStorage(tmp_path)
    entries = list(dump(storage))
    storage.close()
    assert [index for index, _ in entries] == list(range(1, committed + 1))
    assert entries[-1][1] == b"room again"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where we are allowed to mount one."""
    path = tmp_path / "tiny"
    path.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True
        )
    except OSError:
        pytest.skip("no mount command")
    if mounted.returncode != 0:
        pytest.skip("not allowed to mount a tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@posix
def test_a_real_full_disk_refuses_loses_nothing_and_resumes(tiny_disk: Path) -> None:
    storage = FolderStorage(tiny_disk / "data")
    journal, _ = opened(storage, 20_000)
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(100_000))
    accepted: list[bytes] = []
    refused = 0

    def attempt(data: bytes) -> None:
        nonlocal refused
        journal.propose(data)
        append = journal.advance(0).append
        assert append is not None
        try:
            perform(storage, append)
        except NoSpace:
            refused += 1
            assert journal.withdraw() == [data]
        else:
            journal.persisted(append.upto)
            accepted.append(data)

    for n in range(60):
        attempt(b"%d " % n * 2000)
    assert refused > 10
    ballast.unlink()
    before = len(accepted)
    attempt(b"resumed" * 1000)

    assert len(accepted) == before + 1
    assert [entry for _, entry in dump(storage)] == accepted
    assert verify(storage).ok
    storage.close()


# ------------------------------------------------------------------ the whole journal on it


def test_a_journal_lives_snapshots_and_recovers_on_a_real_disk(folder: FolderStorage) -> None:
    folder.lock()
    journal, _ = opened(folder, 2000)
    for start in range(1, 301, 3):
        write(folder, journal, map(payload, range(start, start + 3)))
    write_snapshot(folder, 100, GROUP, [b"state 100"])
    write_snapshot(folder, 200, GROUP, [b"state 200" * 300_000])
    done = tidy(folder, snapshot_index=200, now_wall=1, keep_ns=1, keep_bytes=1 << 30)
    assert done.compressed

    assert [journal.read(n) for n in range(1, 301)] == [payload(n) for n in range(1, 301)]
    _, recovery = opened(folder, 2000)
    assert recovery.snapshot is not None and recovery.snapshot.index == 200
    assert list(recovery.entries()) == [(n, payload(n)) for n in range(201, 301)]
    outsider = FolderStorage(folder.path)
    assert verify(outsider).ok
    outsider.close()


NO_FCNTL = """
import sys
import time
sys.modules["fcntl"] = None
import ekiden.world.disk
"""


def test_it_can_be_imported_where_there_is_no_fcntl() -> None:
    subprocess.run([sys.executable, "-c", NO_FCNTL], check=True)
