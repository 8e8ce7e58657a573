"""What a worker offers, from its command line and its file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ekiden.errors import BadId, WrongUsage
from ekiden.worker.catalogue import Executable
from ekiden.worker.launch import Limits
from ekiden.worker.offers import Offers, WorkerFile, make_offers, read_file

PY = f"py{sys.version_info.major}{sys.version_info.minor}"


def test_a_worker_offers_nothing_by_itself() -> None:
    offers = make_offers(WorkerFile())

    assert not offers
    assert offers.patterns == []


def test_what_is_offered_is_announced() -> None:
    offers = make_offers(
        WorkerFile(),
        execs=["pricer=/bin/sh"],
        services=["curves=/bin/echo --warm"],
        functions=True,
        any_program=True,
    )

    assert offers.patterns == [
        "job.assign.pricer", "job.program.>", f"job.function.{PY}.>", "job.assign.curves",
    ]  # fmt: skip
    assert offers.services[0].argv == ["/bin/echo", "--warm"]


def test_the_file_and_the_command_line_count_together(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text("""
        connect = "grid1:7000"
        slots = 3
        env_allow = ["DAY"]
        stdout_max_mb = 1
        sandbox = "bwrap"
        cache = "/data/c"
        cache_max_gb = 0.5
        exec.pricer = "/bin/sh"
        exec.solver = { path = "/bin/ls", sha256 = "AB12" }
        limits.file_mb = 5
        [labels]
        site = "tokyo"
        [service.curves]
        command = ["/bin/echo", "a b"]
        health = '{"ping": 1}'
        recycle_jobs = 7
    """)
    file = read_file(path)

    offers = make_offers(file, execs=["pricer=/bin/cat"], env_allow=["NIGHT"])

    assert (file.connect, file.slots, file.labels) == ("grid1:7000", 3, {"site": "tokyo"})
    assert offers.programs is not None
    assert offers.programs.executables == {
        "pricer": Executable("/bin/cat"),
        "solver": Executable("/bin/ls", "ab12"),
    }
    assert offers.programs.env_allow == ("DAY", "NIGHT")
    assert (offers.programs.stdout_max, offers.programs.sandbox) == (1 << 20, "bwrap")
    assert offers.programs.limits == Limits(file_bytes=5 << 20)
    assert (offers.cache, offers.cache_bytes) == (Path("/data/c"), 1 << 29)
    given = make_offers(file, cache=Path("/mine"), cache_max_gb=2)
    assert (given.cache, given.cache_bytes) == (Path("/mine"), 2 << 30)
    (service,) = offers.services
    assert (service.argv, service.health, service.recycle_jobs) == (
        ["/bin/echo", "a b"], '{"ping": 1}', 7,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exec = 3", "exec"),
        ("unknown = 1", "unknown"),
        ("not toml", "makes no sense"),
        ("exec.p = { sha256 = 'x' }", "path"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_place(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(text)

    with pytest.raises(WrongUsage, match=words):
        read_file(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="no such file"):
        read_file(tmp_path / "gone.toml")


@pytest.mark.parametrize("text", ["pricer", "=x", "pricer="])
def test_an_option_without_a_name_or_a_path_is_refused(text: str) -> None:
    with pytest.raises(WrongUsage, match="NAME=PATH"):
        make_offers(WorkerFile(), execs=[text])


@pytest.mark.parametrize(
    ("path", "words"),
    [("/no/such", "there is no"), ("no-such", "there is no"), ("{file}", "chmod")],
)
def test_what_cannot_be_started_is_refused_at_once(tmp_path: Path, path: str, words: str) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    path = path.format(file=plain)

    with pytest.raises(WrongUsage, match=words):
        make_offers(WorkerFile(), execs=[f"pricer={path}"])
    with pytest.raises(WrongUsage, match=words):
        make_offers(WorkerFile(), services=[f"curves={path} --warm"])


def test_names_are_checked_and_used_once() -> None:
    with pytest.raises(BadId):
        make_offers(WorkerFile(), execs=["a b=/bin/sh"])
    with pytest.raises(WrongUsage, match="both"):
        make_offers(WorkerFile(), execs=["a=/bin/sh"], services=["a=/bin/sh"])
    with pytest.raises(WrongUsage, match="no command"):
        make_offers(WorkerFile(), services=["a= "])


def test_the_scratch_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = Offers(scratch=tmp_path / "deep" / "scratch").scratch_folder()

    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_scratch_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)

    with pytest.raises(WrongUsage, match="others"):
        Offers(scratch=loose).scratch_folder()


def test_a_scratch_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")

    with pytest.raises(WrongUsage, match="cannot make"):
        Offers(scratch=blocker / "x").scratch_folder()


def test_without_a_word_the_scratch_folder_is_a_temporary_one_of_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert Offers().scratch_folder() == tmp_path / f"ekiden-{os.getuid()}"
