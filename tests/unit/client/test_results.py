"""What a job brought back, and how to get at it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import msgspec
import pytest

from ekiden.client.results import Facts, JobResult
from ekiden.errors import BadName, WrongUsage
from ekiden.model.jobs import OUT_PROGRAM, OUT_STORED, Note
from ekiden.model.work import FileRef, ProgramOutput

STORED = {"h1": b"from the store"}


class Store:
    """A store at hand."""

    def read_stored(self, ref: FileRef) -> bytes:
        return STORED[ref.blob]

    def save_stored(self, ref: FileRef, target: Path) -> None:
        target.write_bytes(STORED[ref.blob])


def result(raw: bytes, note: Note | None = None, fetcher: object = None) -> JobResult:
    return JobResult("j1", raw, Facts("w1", 1, 2, 3, 1, note), fetcher or Store())


def of_program(*files: FileRef, stdout: bytes = b"out\n", stderr: bytes = b"") -> JobResult:
    output = ProgramOutput(
        FileRef("stdout", len(stdout), stdout), FileRef("stderr", len(stderr), stderr), list(files)
    )
    note = Note(0, 2_000_000_000, 1_000_000_000, 2048, OUT_PROGRAM)
    return result(msgspec.msgpack.encode(output), note)


def test_a_plain_output_is_what_it_is() -> None:
    plain = result(b'{"a": 1}')

    assert (plain.output, plain.stdout, plain.stderr) == (b'{"a": 1}', b'{"a": 1}', b"")
    assert plain.json() == {"a": 1}
    assert (plain.files, plain.exit_code, plain.ran_s, plain.cpu_s, plain.peak_mb) == (
        {}, 0, None, None, None,
    )  # fmt: skip


def test_the_output_of_a_program_is_its_stdout() -> None:
    done = of_program(FileRef("a.csv", 3, b"1,2"), stderr=b"hm")

    assert (done.output, done.stdout, done.stderr) == (b"out\n", b"out\n", b"hm")
    assert done.files["a.csv"].read() == b"1,2"
    assert (done.ran_s, done.cpu_s, done.peak_mb) == (2.0, 1.0, 2.0)


def test_what_lies_in_the_store_is_fetched_when_it_is_asked_for(tmp_path: Path) -> None:
    ref = FileRef("big", 14, None, "h1", True)
    stored = result(msgspec.msgpack.encode(ref), Note(form=OUT_STORED))
    done = of_program(ref)

    assert stored.output == b"from the store"
    assert done.files["big"].read() == b"from the store"
    saved = done.files["big"].save(tmp_path / "deep" / "big")
    assert saved.read_bytes() == b"from the store"
    assert saved.stat().st_mode & 0o100


def test_a_result_apart_from_its_client_says_where_its_bytes_are() -> None:
    raw = msgspec.msgpack.encode(FileRef("big", 14, None, "h1"))
    stored = JobResult("j1", raw, Facts("w1", 1, 2, 3, 1, Note(form=OUT_STORED)))

    with pytest.raises(WrongUsage, match="store"):
        assert stored.output


def test_files_are_saved_under_a_folder_with_their_names(tmp_path: Path) -> None:
    done = of_program(FileRef("a.csv", 1, b"1"), FileRef("d/b.csv", 1, b"2"))

    assert done.save(tmp_path / "out") == [tmp_path / "out/a.csv", tmp_path / "out/d/b.csv"]
    assert (tmp_path / "out/d/b.csv").read_bytes() == b"2"


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "C:evil", "a\\b", ""])
def test_a_name_that_leads_out_of_the_folder_writes_nothing(tmp_path: Path, name: str) -> None:
    done = of_program(FileRef("good", 1, b"1"), FileRef(name, 1, b"2"))

    with pytest.raises(BadName):
        done.save(tmp_path / "out")
    with pytest.raises(BadName):
        done.save_zip(tmp_path / "out.zip")
    assert list(tmp_path.iterdir()) == []


def test_everything_is_one_zip_if_that_is_wanted(tmp_path: Path) -> None:
    done = of_program(FileRef("a.csv", 1, b"1"), stderr=b"hm")

    with zipfile.ZipFile(done.save_zip(tmp_path / "all.zip")) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}

    assert found == {"a.csv": b"1", "stdout": b"out\n", "stderr": b"hm"}


def test_a_long_output_is_shown_short() -> None:
    assert repr(result(b"x" * 100)) == f"<JobResult j1 {b'x' * 40 + b'...'!r} by w1>"
