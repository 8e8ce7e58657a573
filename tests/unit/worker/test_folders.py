"""An attempt's folder: what is written into it, what is found in it, and that it goes."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from ekiden.errors import BadName, TooLarge
from ekiden.model.names import DEPTH_MAX
from ekiden.worker import folders
from ekiden.worker.folders import MissingOutput

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="programs run on POSIX")


def names(found: list[folders.Found]) -> list[str]:
    return [file.name for file in found]


# ------------------------------------------------------------------ inputs


def test_an_input_is_written_with_its_folders_closed_to_others(tmp_path: Path) -> None:
    folders.make_folder(str(tmp_path / "a1"))

    folders.write_file(str(tmp_path / "a1"), "in/deep/a", b"content")
    folders.write_file(str(tmp_path / "a1"), "in/tool", b"", executable=True)

    assert (tmp_path / "a1/in/deep/a").read_bytes() == b"content"
    modes = [
        (tmp_path / name).stat().st_mode & 0o777
        for name in ("a1", "a1/in", "a1/in/deep", "a1/in/deep/a", "a1/in/tool")
    ]
    assert modes == [0o700, 0o700, 0o700, 0o600, 0o700]


def test_an_input_does_not_leave_the_folder_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "file").symlink_to(tmp_path / "outside" / "x")

    for name in ("link/x", "file"):
        with pytest.raises(OSError):
            folders.write_file(str(tmp_path / "root"), name, b"evil")

    assert list((tmp_path / "outside").iterdir()) == []


def test_an_input_replaces_nothing(tmp_path: Path) -> None:
    folders.write_file(str(tmp_path), "a", b"1")

    with pytest.raises(FileExistsError):
        folders.write_file(str(tmp_path), "a", b"2")
    with pytest.raises(FileExistsError):
        folders.place_for(str(tmp_path), "a")

    assert (tmp_path / "a").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "a\\b", "a:b", "."])
def test_an_input_with_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()

    with pytest.raises(BadName):
        folders.write_file(str(root), name, b"evil")
    with pytest.raises(BadName):
        folders.place_for(str(root), name)

    assert [path.name for path in tmp_path.rglob("*")] == ["root"]


# ------------------------------------------------------------------ outputs


def test_new_and_changed_files_are_found_and_others_are_not(tmp_path: Path) -> None:
    before = {name: folders.write_file(str(tmp_path), name, b"1234") for name in ("same", "longer")}
    (tmp_path / "rewritten").write_text("1234")
    before["rewritten"] = folders.finish_file(tmp_path / "rewritten", executable=False)
    (tmp_path / "longer").write_text("12345")
    os.utime(tmp_path / "rewritten", ns=(1, 1))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "new").write_text("")

    found = folders.find_outputs(str(tmp_path), None, before)

    assert names(found) == ["deep/new", "longer", "rewritten"]


def test_what_is_no_regular_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "folder").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))

    assert names(folders.find_outputs(str(tmp_path), None, {})) == ["real"]
    assert names(folders.find_outputs(str(tmp_path), ("*",), {})) == ["real"]
    for name in ("link", "folder/passwd", "pipe", "../x", "/etc/passwd"):
        with pytest.raises(MissingOutput):
            folders.find_outputs(str(tmp_path), (name,), {})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.csv", ["a.csv", "b.csv"]),
        ("./a.csv", ["a.csv"]),
        ("?.csv", ["a.csv", "b.csv"]),
        ("[a]*", ["a.csv"]),
        ("*/*.csv", ["x/c.csv"]),
        ("**/*.csv", ["a.csv", "b.csv", "x/c.csv", "x/y/d.csv"]),
        ("x/**", ["x/c.csv", "x/y/d.csv"]),
        ("none*", []),
        ("odd[1]", ["odd[1]"]),
    ],
)
def test_patterns_read_as_in_a_shell(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    (tmp_path / "x/y").mkdir(parents=True)
    for name in ("a.csv", "b.csv", "x/c.csv", "x/y/d.csv", "e.txt", "odd[1]"):
        (tmp_path / name).write_text("")

    assert names(folders.find_outputs(str(tmp_path), (pattern,), {})) == expected


def test_a_decomposed_name_comes_back_composed(tmp_path: Path) -> None:
    (tmp_path / "u\u0308ber").write_text("x")

    (found,) = folders.find_outputs(str(tmp_path), None, {})

    assert found.name == "\u00fcber"
    assert folders.read_file(found.path) == b"x"


def test_a_name_no_system_should_see_is_refused(tmp_path: Path) -> None:
    for name in (b"a\nb", b"a\xff", b"a\\b", b"aux.txt"):
        root = os.fsencode(tmp_path) + b"/" + name.hex().encode()
        os.mkdir(root)
        with open(root + b"/" + name, "wb"):
            pass
        with pytest.raises(BadName):
            folders.find_outputs(os.fsdecode(root), None, {})


def test_an_output_of_a_bad_name_is_said_to_be_an_output(tmp_path: Path) -> None:
    (tmp_path / "12:30.csv").touch()

    with pytest.raises(BadName, match=r"an output .*'12:30.csv' has a colon.*; rename it, or "):
        folders.find_outputs(str(tmp_path), None, {})


def test_too_many_and_too_deep_outputs_are_refused(tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for at in range(folders.OUTPUT_FILES_MAX + 1):
        (many / str(at)).touch()
    deep = tmp_path / "deep"
    (deep / "/".join("d" * (DEPTH_MAX + 2))).mkdir(parents=True)

    for root in (many, deep):
        with pytest.raises(TooLarge):
            folders.find_outputs(str(root), None, {})


def test_a_locked_folder_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "a").write_text("x")
    (tmp_path / "locked").chmod(0)

    assert names(folders.find_outputs(str(tmp_path), None, {})) == ["locked/a"]


def test_of_a_long_file_both_ends_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"a" * 50 + b"b" * 900 + b"c" * 50)

    cut = folders.head_and_tail(str(path), 101)

    assert cut == b"a" * 50 + b"\n[... 899 bytes left out ...]\n" + b"b" + b"c" * 50
    assert cut == folders.ends_of(path.read_bytes(), 101)
    assert folders.head_and_tail(str(path), 1000) == path.read_bytes()


def test_an_output_that_may_not_be_read_is_the_jobs_own_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").write_bytes(b"1")
    (tmp_path / "closed").write_bytes(b"2")
    (tmp_path / "closed").chmod(0)
    monkeypatch.setattr(os, "access", lambda path, _: path.name == "open")  # As root may read it.

    with pytest.raises(MissingOutput, match="'closed' closed to its own account"):
        folders.find_outputs(str(tmp_path), None, {})

    assert names(folders.find_outputs(str(tmp_path), ["open"], {})) == ["open"]


# ------------------------------------------------------------------ wiping


def test_a_folder_is_wiped_with_all_a_job_can_make_of_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    root = tmp_path / "root"
    (root / "locked/inner/deeper").mkdir(parents=True)
    (root / "locked/inner/file").write_text("x")
    (root / "locked/inner").chmod(0o500)
    (root / "locked").chmod(0)
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to("nowhere")
    (root / ".ekiden-wipe-1").mkdir()
    os.mkfifo(root / "pipe")
    root.chmod(0o500)

    assert folders.wipe(str(root))

    assert not root.exists()
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert outside.stat().st_mode & 0o777 == 0o755 & ~_umask()


def test_a_folder_nested_deeper_than_a_path_is_long_is_wiped(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d" * 100, dir_fd=here)
        above, here = here, os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(above)
    os.close(here)

    assert folders.wipe(str(root))
    assert not root.exists()


def test_wiping_a_link_leaves_what_it_points_at(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root").symlink_to(outside)

    assert folders.wipe(str(tmp_path / "root"))
    assert outside.exists()
    assert not (tmp_path / "root").is_symlink()
    assert folders.wipe(str(tmp_path / "root")), "what is not there is wiped"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
