"""The folder of blobs on a real disk: nothing half-done ever has a name."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ekiden import limits
from ekiden.errors import BadRequest, BlobDamaged, NoSpace, StorageFault, UnknownBlob
from ekiden.world import arrivals
from ekiden.world.blobs import BlobFolder


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


DATA = b"some bytes worth keeping"
BLOB = hash_of(DATA)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def put(store: BlobFolder, data: bytes, upload: int = 1) -> str:
    if not store.begin(upload, hash_of(data), len(data)):
        assert store.write(upload, data)
    return hash_of(data)


@pytest.fixture
def store(tmp_path: Path) -> BlobFolder:
    found = BlobFolder(tmp_path / "blobs")
    found.open()
    return found


def test_a_folder_that_was_never_used_is_not_made(store: BlobFolder) -> None:
    assert not os.path.exists(store.folder)
    with pytest.raises(UnknownBlob):
        store.read(BLOB, 0, 1)


def test_parts_become_a_blob_when_the_last_one_came(store: BlobFolder) -> None:
    assert not store.begin(1, BLOB, len(DATA))
    assert not store.write(1, DATA[:10])
    assert store.written(1) == 10
    assert files(Path(store.folder)) == ["incoming/1"]

    assert store.write(1, DATA[10:])

    assert files(Path(store.folder)) == [f"{BLOB[:2]}/{BLOB}"]
    assert store.read(BLOB, 5, 5) == (DATA[5:10], len(DATA))
    assert (store.count, store.bytes) == (1, len(DATA))


def test_nothing_of_it_is_for_others_to_read(store: BlobFolder) -> None:
    put(store, DATA)
    for path in [Path(store.folder), *Path(store.folder).rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_an_empty_blob_is_stored_at_once(store: BlobFolder) -> None:
    assert store.begin(1, hash_of(b""), 0)
    assert files(Path(store.folder)) == [f"{hash_of(b'')[:2]}/{hash_of(b'')}"]


def test_what_is_there_is_not_taken_in_again(store: BlobFolder) -> None:
    put(store, DATA)
    assert store.begin(2, BLOB, len(DATA))
    assert not store.has(2)
    assert (store.count, store.bytes) == (1, len(DATA))


def test_of_two_uploads_of_one_blob_the_first_wins_and_the_other_is_told(store: BlobFolder) -> None:
    store.begin(1, BLOB, len(DATA))
    store.begin(2, BLOB, len(DATA))
    store.write(1, DATA[:10])
    store.write(2, DATA[:5])

    assert store.write(2, DATA[5:])
    assert store.write(1, DATA[10:12]), "no more parts are wanted"

    assert files(Path(store.folder)) == [f"{BLOB[:2]}/{BLOB}"]
    assert (store.count, store.bytes) == (1, len(DATA))


@pytest.mark.parametrize("sent", [DATA[::-1], DATA[:-1] + b"!"])
def test_a_wrong_hash_is_refused_and_leaves_nothing(store: BlobFolder, sent: bytes) -> None:
    store.begin(1, BLOB, len(DATA))

    with pytest.raises(BlobDamaged):
        store.write(1, sent)

    assert files(Path(store.folder)) == []
    assert not store.has(1)
    assert store.count == 0


def test_an_empty_blob_of_another_hash_is_refused(store: BlobFolder) -> None:
    with pytest.raises(BlobDamaged):
        store.begin(1, BLOB, 0)
    assert files(Path(store.folder)) == []


def test_the_name_comes_after_the_sync_and_its_folder_is_synced_after(
    store: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **rest: Any) -> Any:
            what = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[-1]
            calls.append(f"{name} {os.path.relpath(what, os.path.dirname(store.folder))}")
            return real(*args, **rest)

        monkeypatch.setattr(os, name, call)

    spy("fsync")
    spy("replace")
    put(store, DATA)

    shelf = f"blobs/{BLOB[:2]}"
    assert calls == [
        "fsync blobs/incoming/1",
        f"replace {shelf}/{BLOB}",
        f"fsync {shelf}",
        "fsync blobs",
        "fsync .",
    ]


def test_a_full_disk_is_a_refusal_that_leaves_nothing(
    store: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, b"old")
    real, room = os.write, [10]

    def write(fd: int, data: Any) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(fd, bytes(data)[: room[0]])
        room[0] -= done
        return done

    store.begin(1, BLOB, len(DATA))
    monkeypatch.setattr(os, "write", write)

    with pytest.raises(NoSpace):
        store.write(1, DATA)

    assert files(Path(store.folder)) == [f"{hash_of(b'old')[:2]}/{hash_of(b'old')}"]
    room[0] = 1 << 30
    assert put(store, DATA, 2) == BLOB, "it goes on when there is room"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end_leaves_no_name(
    store: BlobFolder, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.begin(1, BLOB, len(DATA))

    def fail(*_args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageFault):
        store.write(1, DATA)

    assert files(Path(store.folder)) == []
    assert store.count == 0


def test_a_dropped_upload_leaves_nothing(store: BlobFolder) -> None:
    store.begin(1, BLOB, len(DATA))
    store.write(1, DATA[:10])

    store.drop(1)
    store.drop(1)

    assert files(Path(store.folder)) == []


def test_what_a_killed_process_left_half_done_is_removed_at_the_next_start(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from ekiden.world.blobs import BlobFolder\n"
        "store = BlobFolder(sys.argv[1]); store.open()\n"
        "store.begin(1, sys.argv[2], 24); store.write(1, b'half')\n"
        "store.begin(2, sys.argv[3], 3); store.write(2, b'old')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folder = tmp_path / "blobs"
    done = subprocess.run([sys.executable, "-c", script, str(folder), BLOB, hash_of(b"old")])
    assert done.returncode == -9
    assert "incoming/1" in files(folder)

    store = BlobFolder(folder)
    store.open()

    assert files(folder) == [f"{hash_of(b'old')[:2]}/{hash_of(b'old')}"]
    assert (store.count, store.bytes) == (1, 3)
    assert store.read(hash_of(b"old"), 0, 3) == (b"old", 3)


@pytest.mark.parametrize(("offset", "length"), [(len(DATA), 1), (0, len(DATA) + 1), (1 << 40, 1)])
def test_a_part_beyond_the_end_is_refused(store: BlobFolder, offset: int, length: int) -> None:
    put(store, DATA)
    with pytest.raises(BadRequest):
        store.read(BLOB, offset, length)


# ------------------------------------------------------------------ what may go


NOTHING: frozenset[str] = frozenset()


def aged(store: BlobFolder, data: bytes, age_s: float) -> str:
    """A blob that was last used so long ago."""
    name = put(store, data, 99)
    then = time.time() - age_s
    os.utime(store.path_of(name), (then, then))
    return name


def named(store: BlobFolder, wanted: int, *, new: bool = True, kept: Any = NOTHING) -> list[str]:
    return [blob for blob, _ in store.unused(wanted, new=new, kept=kept)[0]]


@pytest.fixture
def aging(tmp_path: Path) -> BlobFolder:
    """What was not used for 10,000 s goes, what was used within 1,000 s stays."""
    return BlobFolder(tmp_path / "blobs", unused_s=10_000, grace_s=1_000)


def test_what_was_not_used_for_very_long_is_named_and_what_was_used_is_not(
    aging: BlobFolder,
) -> None:
    names = [aged(aging, b"%d" % n, 20_000 - n) for n in range(4)]
    aging.read(names[0], 0, 1)
    assert aging.begin(9, names[1], 1)

    found, more = aging.unused(0, new=True, kept={names[2]})

    assert ([blob for blob, _ in found], more) == ([names[3]], False)


def test_the_longest_unused_are_named_first_and_none_that_were_used_of_late(
    aging: BlobFolder,
) -> None:
    names = [aged(aging, b"%d" % n, age) for n, age in enumerate((5000, 7000, 999, 3000))]

    assert named(aging, 2) == [names[1], names[0]]
    assert named(aging, 2, new=False) == [names[3]]
    assert named(aging, 100) == [names[1], names[0], names[3]]


def test_pages_of_a_search_name_everything_once(
    aging: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BLOB_UNUSED_TOLD", 3)
    monkeypatch.setattr(limits, "BLOB_UNUSED_LISTED", 5)
    names = [aged(aging, b"%d" % n, 5000 - n) for n in range(17)]

    found, more = aging.unused(1000, new=True, kept=NOTHING)
    told = [blob for blob, _ in found]
    while more:
        assert len(found) <= 3
        found, more = aging.unused(1000, new=False, kept=NOTHING)
        told += [blob for blob, _ in found]

    assert told == names


def test_a_search_ends_also_if_everything_is_kept(aging: BlobFolder) -> None:
    names = {aged(aging, b"%d" % n, 5000) for n in range(5)}
    assert aging.unused(100, new=True, kept=names) == ([], False)


def test_what_was_used_or_held_after_it_was_named_is_not_removed(aging: BlobFolder) -> None:
    names = [aged(aging, b"%d" % n, 5000 - n) for n in range(3)]
    found, _ = aging.unused(3, new=True, kept=NOTHING)
    aging.touch(names[0], 1)

    assert aging.remove(found, kept={names[1]}) == (1, 1)

    assert files(Path(aging.folder)) == sorted(f"{name[:2]}/{name}" for name in names[:2])
    assert (aging.count, aging.bytes, aging.held) == (2, 2, 2)


def test_a_removed_file_takes_no_room_though_it_was_just_read(aging: BlobFolder) -> None:
    name = aged(aging, b"x", 5000)
    aging.read(name, 0, 1)
    os.utime(aging.path_of(name), (1, 1))
    opened = aging._files._open[aging.path_of(name)].fd

    assert aging.remove([(name, 10**9)], kept=NOTHING) == (1, 1)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened)
    with pytest.raises(UnknownBlob):
        aging.read(name, 0, 1)


def test_bytes_in_memory_are_had_at_once_from_a_file_that_is_open(store: BlobFolder) -> None:
    put(store, DATA)
    assert store.read_cached(BLOB, 0, 4) is None, "to open it may take long"
    store.read(BLOB, 0, 1)

    if (found := store.read_cached(BLOB, 5, 5)) is None:
        pytest.skip("this kind of disk cannot tell what is in memory")

    assert found == (DATA[5:10], len(DATA))
    assert store.read_cached(BLOB, len(DATA), 1) is None, "`read` says what is wrong"
    os.unlink(store.path_of(BLOB))
    assert store.read_cached(BLOB, 5, 5) is None


def test_a_read_at_once_counts_as_a_use(aging: BlobFolder) -> None:
    name = aged(aging, b"x", 5000)
    aging.read(name, 0, 1)
    os.utime(aging.path_of(name), (1, 1))
    aging._files._open[aging.path_of(name)].used = 1
    assert aging.read_cached(name, 0, 1) is None, "`read` notes it"
    aging.read(name, 0, 1)
    assert named(aging, 1) == []


def test_a_file_that_somebody_removed_is_not_read_any_more(store: BlobFolder) -> None:
    put(store, DATA)
    store.read(BLOB, 0, 1)
    os.unlink(store.path_of(BLOB))
    with pytest.raises(UnknownBlob):
        store.read(BLOB, 0, 1)


def test_few_files_stay_open(store: BlobFolder) -> None:
    names = [put(store, b"%d" % n, n) for n in range(3 * limits.BLOB_FILES_OPEN)]
    for name in names:
        store.read(name, 0, 1)
    assert len(store._files._open) == limits.BLOB_FILES_OPEN
    store.close()
    assert store._files._open == {}


# ------------------------------------------------------------------ going on with an upload


def test_what_was_set_aside_is_where_the_next_upload_goes_on(store: BlobFolder) -> None:
    store.begin(1, BLOB, len(DATA))
    store.write(1, DATA[:10])
    store.set_aside(1)
    assert (store.has(1), store.held) == (False, 10)

    assert not store.begin(2, BLOB, len(DATA))
    assert store.written(2) == 10
    assert store.write(2, DATA[10:])

    assert files(Path(store.folder)) == [f"{BLOB[:2]}/{BLOB}"]
    assert store.read(BLOB, 0, len(DATA))[0] == DATA
    assert store.held == len(DATA)


def test_an_upload_under_way_is_not_taken_over(store: BlobFolder) -> None:
    store.begin(1, BLOB, len(DATA))
    store.write(1, DATA[:10])

    store.begin(2, BLOB, len(DATA))

    assert (store.written(1), store.written(2)) == (10, 0)
    store.write(2, DATA[:4])
    store.set_aside(1)
    store.set_aside(2)
    store.begin(3, BLOB, len(DATA))
    assert store.written(3) == 10, "the longer one was kept"
    assert files(Path(store.folder)) == ["incoming/1"]


def test_wrong_bytes_set_aside_by_another_do_not_spoil_an_upload(store: BlobFolder) -> None:
    store.begin(1, BLOB, len(DATA))
    store.write(1, b"wrong from" + DATA[10:20])
    store.set_aside(1)
    store.begin(2, BLOB, len(DATA))

    assert not store.write(2, DATA[20:])
    assert (store.has(2), store.written(2)) == (True, 0)
    assert store.write(2, DATA)

    assert store.read(BLOB, 0, len(DATA))[0] == DATA
    assert files(Path(store.folder)) == [f"{BLOB[:2]}/{BLOB}"]


def test_a_file_set_aside_that_was_changed_is_not_gone_on_with(store: BlobFolder) -> None:
    store.begin(1, BLOB, len(DATA))
    store.write(1, DATA[:10])
    store.set_aside(1)
    os.truncate(os.path.join(store.folder, "incoming", "1"), 5)

    store.begin(2, BLOB, len(DATA))

    assert store.written(2) == 0
    assert files(Path(store.folder)) == ["incoming/2"]


def test_what_is_set_aside_is_bounded_by_number_bytes_and_time(
    store: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BLOB_SET_ASIDE_MAX", 3)
    monkeypatch.setattr(limits, "BLOB_SET_ASIDE_BYTES", 25)

    def set_aside(n: int) -> None:
        data = b"%d" % n * 10
        store.begin(n, hash_of(data), 10)
        store.write(n, data[:9] if n < 9 else data[:1])
        store.set_aside(n)

    set_aside(1)
    set_aside(2)
    set_aside(3)
    assert files(Path(store.folder)) == ["incoming/2", "incoming/3"]
    set_aside(9)
    monkeypatch.setattr(limits, "BLOB_SET_ASIDE_MAX", 2)
    store.tidy()
    assert files(Path(store.folder)) == ["incoming/3", "incoming/9"]
    monkeypatch.setattr(limits, "BLOB_SET_ASIDE_NS", 0)
    store.tidy()
    assert (files(Path(store.folder)), store.held) == ([], 0)


def test_what_is_set_aside_goes_before_anything_is_named(aging: BlobFolder) -> None:
    kept = aged(aging, b"x", 5000)
    aging.begin(1, BLOB, len(DATA))
    aging.write(1, DATA[:10])
    aging.set_aside(1)

    aging.unused(5, new=True, kept=NOTHING)

    assert files(Path(aging.folder)) == [f"{kept[:2]}/{kept}"]


def test_nothing_is_set_aside_of_an_upload_of_which_nothing_came(store: BlobFolder) -> None:
    store.begin(1, BLOB, len(DATA))
    store.set_aside(1)
    store.set_aside(1)
    assert files(Path(store.folder)) == []


# ------------------------------------------------------------------ damage


def damage(store: BlobFolder, name: str, data: bytes) -> None:
    Path(store.path_of(name)).write_bytes(data)


@pytest.mark.parametrize("found", [DATA[::-1], DATA[:5], b""])
def test_damage_is_found_kept_as_evidence_and_can_be_put_again(
    store: BlobFolder, found: bytes
) -> None:
    put(store, DATA)
    damage(store, BLOB, found)

    number = store.examine(BLOB)
    kept = store.withdraw(BLOB, number)

    assert number
    assert kept is not None
    assert Path(kept).read_bytes() == found
    assert Path(kept).name.startswith(BLOB)
    assert store.count == 0
    put(store, DATA, 2)
    assert store.read(BLOB, 0, len(DATA))[0] == DATA
    assert store.examine(BLOB) == 0


def test_a_sound_blob_and_one_that_is_not_there_are_no_damage(store: BlobFolder) -> None:
    put(store, DATA)
    assert store.examine(BLOB) == 0
    assert store.examine(hash_of(b"other")) == 0


def test_a_blob_put_again_while_its_old_copy_was_examined_stays(store: BlobFolder) -> None:
    put(store, DATA)
    damage(store, BLOB, DATA[:3])
    number = store.examine(BLOB)
    put(store, DATA, 2)

    assert store.withdraw(BLOB, number) is None

    assert store.read(BLOB, 0, len(DATA))[0] == DATA
    assert store.count == 1


def test_little_evidence_is_kept(store: BlobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOB_DAMAGED_BYTES", 1000)
    kept = []
    for n in range(limits.BLOB_DAMAGED_KEPT + 2):
        name = put(store, b"%d" % n, n)
        damage(store, name, b"?")
        kept.append(store.withdraw(name, store.examine(name)))
    assert files(Path(store.folder)) == sorted(
        os.path.relpath(path or "", store.folder) for path in kept[2:]
    )

    name = put(store, b"large", 99)
    damage(store, name, bytes(2000))
    assert store.withdraw(name, store.examine(name)) == "", "too large to keep"


def test_a_file_that_was_cut_short_while_it_was_read_is_a_fault(store: BlobFolder) -> None:
    put(store, DATA)
    store.read(BLOB, 0, 1)
    os.truncate(store.path_of(BLOB), 3)
    with pytest.raises(StorageFault, match="cannot read"):
        store.read(BLOB, 0, 10)


def test_a_time_in_the_future_is_put_right_by_use(store: BlobFolder) -> None:
    put(store, DATA)
    later = os.path.getmtime(store.path_of(BLOB)) + 10 * 365 * 86400
    os.utime(store.path_of(BLOB), (later, later))

    store.read(BLOB, 0, 1)

    assert os.path.getmtime(store.path_of(BLOB)) < later - 86400


def test_foreign_files_in_the_folder_are_left_alone(store: BlobFolder) -> None:
    put(store, DATA)
    note = Path(store.folder) / BLOB[:2] / "README"
    note.write_text("mine")

    store = BlobFolder(store.folder, unused_s=0, grace_s=0)
    found, _ = store.unused(0, new=True, kept=NOTHING)
    assert store.remove(found, kept=NOTHING) == (1, len(DATA))

    assert files(Path(store.folder)) == [f"{BLOB[:2]}/README"]


def test_a_large_upload_is_synced_as_it_grows(
    store: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "_sync_file_range", None)
    monkeypatch.setattr(arrivals, "_SYNC_BYTES", 10)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    store.begin(1, BLOB, len(DATA))
    for at in range(0, 20, 5):
        store.write(1, DATA[at : at + 5])

    assert len(synced) == 2


def test_where_the_disk_can_be_told_to_begin_an_upload_does_not_wait_for_it(
    store: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        arrivals, "_sync_file_range", lambda _fd, at, size, how: begun.append((at, size, how))
    )
    monkeypatch.setattr(arrivals, "_PIECE_BYTES", 10)
    monkeypatch.setattr(os, "fsync", lambda _fd: pytest.fail("waited"))

    store.begin(1, BLOB, len(DATA))
    for at in range(0, 20, 5):
        store.write(1, DATA[at : at + 5])

    begin, finish = arrivals._BEGIN, arrivals._FINISH
    assert begun == [(0, 0, finish), (0, 10, begin), (0, 10, finish), (10, 10, begin)]


@pytest.mark.skipif(sys.platform != "linux", reason="a system call of Linux")
def test_the_disk_of_this_system_can_be_told_to_begin(tmp_path: Path) -> None:
    assert arrivals._sync_file_range is not None
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 5000)
        file.flush()

        for how in (arrivals._BEGIN, arrivals._FINISH):
            assert arrivals._sync_file_range(file.fileno(), 0, 5000, how) == 0


def test_without_sync_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobFolder(tmp_path / "blobs", sync=False)
    monkeypatch.setattr(os, "fsync", lambda _fd: pytest.fail("synced"))
    put(store, DATA)
    assert store.read(BLOB, 0, 4)[0] == DATA[:4]
