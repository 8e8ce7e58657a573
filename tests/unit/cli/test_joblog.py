"""The log of jobs: GNU parallel's columns, and what a resumed run learns from them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.cli.joblog import JobLog, Record, command_text, read_done, read_line, write_line
from ekiden.errors import WrongUsage

# As GNU parallel 20231122 writes it.
GNU = (
    "Seq\tHost\tStarttime\tJobRuntime\tSend\tReceive\tExitval\tSignal\tCommand\n"
    "1\t:\t1700000000.123\t     0.002\t0\t2\t0\t0\techo a\n"
    "2\t:\t1700000000.125\t     0.002\t0\t2\t3\t0\texit 3\n"
    "3\t:\t1700000000.127\t     0.002\t0\t2\t0\t9\tkill -9 $$\n"
)


def record(number: int, command: str, *, code: int = 0, signal: int = 0) -> Record:
    return Record(number=number, command=command, exit_code=code, signal=signal)


def test_a_log_of_gnu_parallel_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(GNU)

    assert read_done(log) == {"echo a": 1}


def test_what_is_written_is_read_back() -> None:
    whole = Record(
        number=3, host="w1", started_s=1.5, ran_s=0.25, sent=7, received=9, exit_code=2, signal=0,
        command="a\tb 'c'",
    )  # fmt: skip

    assert read_line(write_line(whole)) == whole
    assert write_line(whole) == "3\tw1\t1.500\t0.250\t7\t9\t2\t0\ta\tb 'c'\n"


def test_a_resumed_log_goes_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = JobLog(log, keep=True)
    first.add(record(1, "x a"))
    first.add(record(2, "x b", code=1))
    first.close()
    with log.open("a") as file:
        file.write("3\tw1\t1.0\t1.0\t0\t0\t0\t0\tx c")

    assert read_done(log) == {"x a": 1}
    again = JobLog(log, keep=True)
    again.add(record(2, "x b"))
    again.close()

    assert log.read_text().count("Seq\t") == 1
    assert read_done(log) == {"x a": 1, "x b": 1, "x c": 1}


def test_without_resume_a_log_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(GNU)
    JobLog(log, keep=False).close()

    assert read_done(log) == {}


def test_a_file_that_is_no_log_is_refused_and_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("buy milk\n")

    with pytest.raises(WrongUsage, match="is no job log"):
        read_done(notes)
    with pytest.raises(WrongUsage, match="is no job log"):
        JobLog(notes, keep=False)
    assert notes.read_text() == "buy milk\n"
    assert read_done(tmp_path / "missing") == {}
    with pytest.raises(WrongUsage, match="cannot use the job log"):
        JobLog(tmp_path / "no" / "folder", keep=False)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_a_command_is_one_line_of_words(argv: list[str]) -> None:
    text = command_text(argv)

    assert "\n" not in text and "\t" not in text
    if all(word.isprintable() for word in argv):
        assert shlex.split(text) == argv


def test_a_shell_reads_the_same_words() -> None:
    argv = ["a b", "it's", "tab\there", "new\nline", "back\\slash\n", "{}", "$HOME", "日本"]
    script = f"printf '%s\\0' {command_text(argv)}"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout

    assert shown.decode().split("\0")[:-1] == argv
