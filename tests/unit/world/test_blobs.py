"""The folder of blobs on a real disk: nothing half-done ever has a name."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ekiden.errors import BadRequest, BlobDamaged, NoSpace, StorageFault, UnknownBlob
from ekiden.world import blobs
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


def test_what_nobody_used_for_long_is_swept_and_what_was_used_stays(store: BlobFolder) -> None:
    names = [put(store, b"%d" % n, n) for n in range(4)]
    old = os.path.getmtime(store._path(names[0])) - 1000
    for name in names:
        os.utime(store._path(name), (old, old))

    store.read(names[0], 0, 1)
    assert store.begin(9, names[1], 1)
    assert store.sweep(500) == 2

    assert files(Path(store.folder)) == sorted(f"{name[:2]}/{name}" for name in names[:2])
    assert (store.count, store.bytes) == (2, 2)


def test_a_time_in_the_future_is_put_right_by_use(store: BlobFolder) -> None:
    put(store, DATA)
    later = os.path.getmtime(store._path(BLOB)) + 10 * 365 * 86400
    os.utime(store._path(BLOB), (later, later))

    store.read(BLOB, 0, 1)

    assert os.path.getmtime(store._path(BLOB)) < later - 86400


def test_foreign_files_in_the_folder_are_left_alone(store: BlobFolder) -> None:
    put(store, DATA)
    note = Path(store.folder) / BLOB[:2] / "README"
    note.write_text("mine")

    assert store.sweep(-1000) == 1

    assert files(Path(store.folder)) == [f"{BLOB[:2]}/README"]


def test_a_large_upload_is_synced_as_it_grows(
    store: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "_SYNC_BYTES", 10)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    store.begin(1, BLOB, len(DATA))
    for at in range(0, 20, 5):
        store.write(1, DATA[at : at + 5])

    assert len(synced) == 2


def test_without_sync_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobFolder(tmp_path / "blobs", sync=False)
    monkeypatch.setattr(os, "fsync", lambda _fd: pytest.fail("synced"))
    put(store, DATA)
    assert store.read(BLOB, 0, 4)[0] == DATA[:4]
