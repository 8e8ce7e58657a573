"""Caches on a disk: what is the same lies there once, and nothing wrong stays unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.worker.cached_data import Data, opened, sha, spoil, tree_of

import ekiden.worker.cache_folder as module
from ekiden.errors import BadName, BadRequest, BlobDamaged, NoSpace, Refusal
from ekiden.model.caches import CachedFile, CacheUse, Manifest, encode_manifest
from ekiden.worker import cache_tree
from ekiden.worker.cache_folder import CacheFolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="links, locks and times of Linux")

SOURCE = Path(__file__).parents[3] / "src"
FILES = {"a/x.csv": b"one", "a/b/y.csv": b"two" * 100, "run.sh": b"#!/bin/sh\n", "z": b""}


def inode(folder: CacheFolder, cache: str, name: str) -> int:
    return Path(folder.trees, cache, name).stat().st_ino


def prove(folder: CacheFolder, cache: str) -> list[str]:
    spoiled: list[str] = []
    upto, whole = 0, False
    while not whole:
        proof, some = folder.prove(cache, upto)
        spoiled += some
        upto, whole = proof.upto, proof.whole
    folder.trust(cache)
    return spoiled


# ------------------------------------------------------------------ laying down


def test_a_cache_becomes_a_tree_of_read_only_files(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    data = Data("d1", FILES, large=("a/b/y.csv",), executable=("run.sh",))

    data.put(folder)

    assert tree_of(folder, "d1") == FILES
    assert folder.held() == {"d1": data.use}
    assert folder.check("d1") == []
    root = Path(folder.trees, "d1")
    modes = {str(p.relative_to(root)): p.stat().st_mode & 0o777 for p in root.rglob("*")}
    assert modes == {
        "a": 0o555, "a/b": 0o555, "a/x.csv": 0o444, "a/b/y.csv": 0o444, "run.sh": 0o555, "z": 0o444,
    }  # fmt: skip
    assert root.stat().st_mode & 0o777 == 0o555
    assert os.listdir(folder.folder + "/incoming") == []


def test_what_two_caches_have_in_common_lies_there_once(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    Data("d1", FILES).put(folder)
    before = folder.used

    missing = Data("d2", {"moved/x.csv": b"one", "new": b"three"}, large=("new",)).put(folder)

    assert missing == [sha(b"three")]
    assert inode(folder, "d1", "a/x.csv") == inode(folder, "d2", "moved/x.csv")
    assert folder.used == before + 4096
    assert folder.check("d1") == folder.check("d2") == []


def test_the_same_content_twice_in_a_cache_is_one_file_but_not_with_another_mode(
    tmp_path: Path,
) -> None:
    folder = opened(tmp_path / "c")
    same = {"one": b"#!x", "two": b"#!x", "go": b"#!x", "sub/go": b"#!x"}
    for cache, large in (("packed", ()), ("large", tuple(same))):
        data = Data(cache, same, large=large, executable=("go", "sub/go"))
        data.put(folder)

        assert inode(folder, cache, "one") == inode(folder, cache, "two")
        assert inode(folder, cache, "go") == inode(folder, cache, "sub/go")
        assert inode(folder, cache, "one") != inode(folder, cache, "go")
        assert os.access(Path(folder.trees, cache, "go"), os.X_OK)
        assert folder.check(cache) == []


def test_another_manifest_under_an_id_takes_the_place_of_the_old_tree(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    Data("d1", FILES).put(folder)
    newer = Data("d1", {"a/x.csv": b"one", "only": b"this"})

    newer.put(folder)

    assert tree_of(folder, "d1") == newer.files
    assert folder.held() == {"d1": newer.use}
    assert folder.check("d1") == []
    assert folder.used == 2 * 4096


def test_where_the_system_cannot_exchange_folders_they_are_moved_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_tree, "_exchange", lambda one, other: False)
    folder = opened(tmp_path / "c")
    Data("d1", FILES).put(folder)
    newer = Data("d1", {"only": b"this"})

    newer.put(folder)

    assert tree_of(folder, "d1") == newer.files
    assert os.listdir(folder.trees) == ["d1"]
    assert os.listdir(folder.folder + "/incoming") == []


def test_a_pack_that_has_other_bytes_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    data = Data("d1", FILES)
    build = data.begin(folder)

    with pytest.raises(BlobDamaged):
        folder.lay_pack(build, data.pack, bytes(len(data.blobs[data.pack])))

    assert (folder.held(), folder.used) == ({}, 0)
    assert os.listdir(folder.folder + "/incoming") == []
    folder.abandon(build)  # once more, as whoever is told of the fault does
    data.put(folder)
    assert folder.check("d1") == []


@pytest.mark.parametrize(
    ("cache", "name"),
    [("d", "../x"), ("d", "/etc/x"), ("d", "a/../../x"), ("..", "x"), ("a/b", "x"), ("d", "con")],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, cache: str, name: str) -> None:
    folder = opened(tmp_path / "c")
    pack = sha(b"x")
    raw = encode_manifest(Manifest([CachedFile(name, 1, pack, False, pack, 0)], [(pack, 1)]))

    with pytest.raises(Refusal):
        folder.begin(CacheUse(cache, sha(raw), len(raw)), raw)

    assert folder.held() == {}
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "c", "incoming", "lock", "notes", "trees",
    ]  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_a_manifest_of_any_bytes_is_refused(tmp_path: Path, raw: bytes) -> None:
    folder = CacheFolder(tmp_path / "c", 1 << 30)
    if folder.claim():
        folder.open()
    try:
        build = folder.begin(CacheUse("d", sha(raw), len(raw)), raw)
        folder.abandon(build)
    except (BadRequest, BadName):
        pass
    finally:
        folder.close()
    assert os.listdir(folder.folder + "/incoming") == []


# ------------------------------------------------------------------ spoiled


def test_a_file_that_was_written_to_is_found_in_every_cache_that_has_it(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    one, two = Data("d1", FILES), Data("d2", {"copy": b"one", "own": b"own"})
    one.put(folder)
    two.put(folder)

    spoil(Path(folder.trees, "d1", "a/x.csv"), b"bad")

    assert folder.check("d1") == ["a/x.csv"]
    assert folder.check("d2") == ["copy"]
    assert one.put(folder) == [one.pack]  # repaired: only what was spoiled is brought
    assert (folder.check("d1"), tree_of(folder, "d1")) == ([], FILES)
    assert folder.check("d2") == ["copy"]  # still the spoiled one
    assert two.put(folder) == []  # and now the sound one is linked
    assert tree_of(folder, "d2") == two.files
    assert folder.check("d1") == folder.check("d2") == []
    assert inode(folder, "d1", "a/x.csv") == inode(folder, "d2", "copy")


def test_a_write_right_after_a_file_was_laid_down_or_looked_at_is_found(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    data = Data("d1", FILES)
    path = Path(folder.trees, "d1", "a/x.csv")
    for word in (b"bad", b"BAD") * 10:
        data.put(folder)
        spoil(path, word)
        assert folder.check("d1") == ["a/x.csv"]
        spoil(path, b"one")
        assert folder.check("d1") == []  # it is what it was, and taken at its new stamp
        spoil(path, word)
        assert folder.check("d1") == ["a/x.csv"]


def test_whatever_is_done_to_a_tree_is_found(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    data = Data("d1", FILES)

    def replaced(root: Path) -> None:
        (root / "a/x.csv").unlink()
        (root / "a/x.csv").write_bytes(b"two")

    def linked(root: Path) -> None:
        (root / "a/x.csv").unlink()
        (root / "a/x.csv").symlink_to("/etc/passwd")

    def added(root: Path) -> None:
        (root / "a/more").write_bytes(b"")

    def folder_gone(root: Path) -> None:
        (root / "a").rename(tmp_path / "elsewhere")

    def folder_linked(root: Path) -> None:
        (root / "a").rename(tmp_path / "elsewhere2")
        (root / "a").symlink_to(tmp_path / "elsewhere2")

    for harm in (replaced, linked, added, folder_gone, folder_linked):
        data.put(folder)
        root = Path(folder.trees, "d1")
        for path in (root, root / "a"):
            path.chmod(0o755)
        harm(root)

        assert folder.check("d1") != [], harm.__name__

        data.put(folder)
        assert folder.check("d1") == [], harm.__name__
        assert tree_of(folder, "d1") == FILES


def test_a_change_that_leaves_the_bytes_as_they_were_is_taken_back(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    Data("d1", FILES).put(folder)
    path = Path(folder.trees, "d1", "a/x.csv")
    path.chmod(0o777)
    os.utime(path)

    assert folder.check("d1") == []
    assert path.stat().st_mode & 0o777 == 0o444


def test_a_disk_that_returns_other_bytes_is_found_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path / "c")
    data = Data("d1", FILES)
    data.put(folder)
    spoil(Path(folder.trees, "d1", "a/x.csv"), b"bad")
    # As if the time of the change had not been kept: the stamp still fits.
    held = folder._held["d1"]
    at = [file.name for file in held.manifest.files].index("a/x.csv")
    file = held.inodes[at]
    assert file is not None
    file.changed_ns = Path(folder.trees, "d1", "a/x.csv").stat().st_ctime_ns
    assert folder.check("d1") == []
    monkeypatch.setattr(module, "PROVE_BYTES", 10)  # in several steps

    assert prove(folder, "d1") == ["a/x.csv"]

    assert data.put(folder) == [data.pack]
    assert prove(folder, "d1") == []


# ------------------------------------------------------------------ another process


def test_what_lay_there_before_is_known_again(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    one, two = Data("d1", FILES), Data("d2", {"copy": b"one"})
    one.put(folder)
    two.put(folder)
    folder.remove("d1")  # takes a name away from what d2 has, too
    one.put(folder)
    folder.close()

    again = opened(tmp_path / "c")

    assert again.held() == {"d1": one.use, "d2": two.use}
    assert again.is_proven("d1")
    assert again.check("d1") == again.check("d2") == []
    assert again.used == folder.used


def test_what_an_earlier_process_left_half_done_is_removed(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    Data("d1", FILES).put(folder)
    Data("d2", {"other": b"x"}).put(folder)
    Data("d3", {"other": b"y"}).put(folder)
    Data("d4", {"large": b"q"}, large=("large",)).begin(folder)
    Path(folder.folder, "notes", "d2").unlink()
    Path(folder.folder, "notes", "d3").write_bytes(b"\x00")
    Path(folder.folder, "notes", "d9").write_bytes(b"")
    folder.close()

    again = opened(tmp_path / "c")

    assert list(again.held()) == ["d1"]
    assert os.listdir(again.trees) == ["d1"]
    assert os.listdir(again.folder + "/notes") == ["d1"]
    assert os.listdir(again.folder + "/incoming") == []


def test_after_another_start_of_the_system_nothing_counts_before_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path / "c")
    data = Data("d1", FILES)
    data.put(folder)
    folder.close()
    monkeypatch.setattr(module, "boot_id", lambda: "another")

    again = opened(tmp_path / "c")

    assert not again.is_proven("d1")
    assert not again.is_sound(data.use)
    assert Data("d2", {"n": b"one"}).put(again) != []  # nor is anything linked
    assert prove(again, "d1") == []
    assert again.is_sound(data.use)
    again.close()
    assert opened(tmp_path / "c").is_proven("d1")


def test_a_folder_is_of_one_process(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")

    assert not CacheFolder(tmp_path / "c").claim()

    folder.close()
    assert CacheFolder(tmp_path / "c").claim()


# ------------------------------------------------------------------ room


def test_the_least_lately_used_go_first_and_what_is_used_stays(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c", bytes_max=4 * 4096)
    datas = [Data(f"d{at}", {"own": b"%d" % at}) for at in range(4)]
    for data in datas:
        data.put(folder)
    folder.touch("d0")

    gone = folder.make_room(2 * 4096, {"d1"})

    assert gone == ["d2", "d3"]
    assert list(folder.held()) == ["d1", "d0"]
    assert folder.used == 2 * 4096
    with pytest.raises(NoSpace, match="--cache-max"):
        folder.make_room(3 * 4096, {"d1", "d0"})
    assert list(folder.held()) == ["d1", "d0"]


def test_what_a_build_has_linked_stays_when_its_source_goes(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c", bytes_max=2 * 4096)
    Data("d1", {"same": b"one", "old": b"old"}).put(folder)
    data = Data("d2", {"same": b"one", "new": b"new"}, large=("same", "new"))
    build = data.begin(folder)

    assert folder.make_room(build.wanted, ()) == ["d1"]

    data.lay(folder, build)
    folder.finish(build)
    assert list(build.tree.differing(module.Walk(folder.trees + "/d2"))) == []
    assert tree_of(folder, "d2") == data.files


def test_a_full_disk_is_told_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import os, resource, sys
        from pathlib import Path
        from tests.unit.worker.cached_data import Data, opened
        from ekiden.errors import NoSpace
        folder = opened(Path({str(tmp_path / "c")!r}))
        small = Data("d1", {{"x": b"x"}})
        small.put(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        for files in ({{"big": bytes(9999)}}, {{f"n{{at:03}}": b"" for at in range(200)}}):
            try:
                Data("d2", files).put(folder)
            except NoSpace as error:
                print(error)
        assert list(folder.held()) == ["d1"], folder.held()
        assert folder.check("d1") == []
        assert os.listdir(folder.folder + "/incoming") == []
        assert os.listdir(folder.trees) == os.listdir(folder.folder + "/notes") == ["d1"]
        assert folder.used == 4096
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=SOURCE.parent,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"},
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2  # of the file, and of the note
    assert "make room on the disk" in done.stdout


def test_thousands_of_files_in_many_folders_are_laid_down_and_found_sound(tmp_path: Path) -> None:
    folder = opened(tmp_path / "c")
    data = Data("d1", {f"d{at // 100}/f{at}": b"%d" % at for at in range(3_000)})
    build = data.begin(folder)

    data.lay(folder, build)
    folder.finish(build)

    assert folder.check("d1") == []
    assert Path(folder.trees, "d1", "d29", "f2999").read_bytes() == b"2999"
