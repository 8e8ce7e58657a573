"""The command line: what it does before anything is reached."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ekiden.cli.main import main


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EKIDEN_STATE", str(tmp_path))
    monkeypatch.delenv("EKIDEN_CONNECT", raising=False)
    monkeypatch.delenv("EKIDEN_KEY_FILE", raising=False)


def test_help_lists_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    shown = capsys.readouterr().out
    for verb in (
        *("up", "broker", "leader", "worker", "submit", "wait", "jobs", "dlq", "workers"),
        *("stats", "pub", "sub", "log", "bench", "version"),
    ):
        assert f"\n  {verb} " in shown
    assert "0 done · 1 job failed · 2 wrong usage · 3 nothing reachable · 4 refused" in " ".join(
        shown.split()
    )


@pytest.mark.parametrize(
    "words",
    [
        ["up"], ["broker"], ["leader"], ["worker"], ["submit"], ["wait"], ["stats"], ["pub"],
        ["sub"], ["version"], ["jobs", "list"], ["jobs", "show"], ["jobs", "cancel"],
        ["dlq", "list"], ["dlq", "show"], ["dlq", "replay"], ["dlq", "purge"],
        ["workers", "list"], ["workers", "drain"], ["workers", "resume"],
        ["log", "dump"], ["log", "verify"],
        ["bench", "noop"], ["bench", "latency"], ["bench", "recovery"], ["bench", "soak"],
    ],
)  # fmt: skip
def test_every_command_explains_itself_and_speaks_json(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["submit"],
        ["submit", "echo", "--priority", "10"],
        ["submit", "echo", "--nonsense"],
        ["submit", "echo", "--needs", "gpu=1"],
        ["submit", "echo", "--payload", "@/no/such/file"],
        ["jobs", "cancel"],
        ["jobs", "cancel", "j1", "--all"],
        ["jobs", "cancel", "--all"],
        ["dlq", "purge", "--all"],
        ["submit", "echo", "--lines", "/no/such/file"],
        ["submit", "echo", "--lines", "-", "--payload", "x"],
        ["submit", "echo", "--lines", "-", "--count", "2"],
        ["submit", "echo", "--delay", "-1"],
        ["submit", "echo", "--not-before", "tomorrow"],
        ["log", "dump", "--event", "birthday", "."],
        ["broker", "--advertise", "nowhere"],
        ["dlq", "replay"],
        ["log", "dump", "/no/such/folder"],
        ["log", "verify", "/no/such/folder"],
        ["worker", "--label", "gpu"],
        ["worker", "--handlers", "/no/such/file.py"],
        ["worker", "--handlers", "no.such.module"],
        ["stats", "--connect", "not an address"],
        ["broker", "--sync", "sometimes"],
    ],
)
def test_wrong_usage_ends_with_2_and_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ekiden: ")
    assert captured.err.count("\n") == 1


def test_wrong_usage_as_json_is_an_error_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--json"]) == 2

    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "usage"
    assert "ekiden submit --help" in error["remedy"]


def test_json_after_the_double_dash_belongs_to_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--nonsense", "--", "--json"]) == 2

    assert capsys.readouterr().err.startswith("ekiden: ")


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_there_ends_with_3_and_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    address = f"127.0.0.1:{_closed_port()}"

    assert main(["submit", "echo", "--connect", address, "--connect-timeout", "0.2"]) == 3
    assert "ekiden up" in capsys.readouterr().err


def test_version_names_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0

    assert set(json.loads(capsys.readouterr().out)) == {"version", "protocol", "journal", "python"}


def test_help_does_not_load_what_it_does_not_need() -> None:
    """Stands for the time `ekiden --help` takes, which a test must not measure."""
    script = (
        "import sys; from ekiden.cli.main import main; main(['--help']);"
        "heavy = {'asyncio', 'rich', 'uvloop', 'msgspec', 'structlog', 'psutil', 'ekiden.client',"
        " 'ekiden.worker', 'ekiden.broker', 'ekiden.core', 'ekiden.journal', 'nats'};"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_without_a_verb_the_help_is_shown_and_the_usage_was_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in ([], ["jobs"], ["dlq"], ["workers"], ["log"]):
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out.startswith(" ".join(["Usage: ekiden", *words]))
        assert captured.err == ""


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ekiden ")


def test_no_line_of_help_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["jobs"], ["dlq"], ["workers"], ["log"]):
        main([*words, "--help"])
        listed = capsys.readouterr().out
        assert "..." not in listed.partition("COMMAND [ARGS]...")[2]


def test_a_bug_is_one_sentence_and_the_rest_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("ekiden.cli.output.emit", broken)

    assert main(["version", "--json"]) == 70
    assert "ZeroDivisionError: oops" in json.loads(capsys.readouterr().err)["error"]["message"]

    monkeypatch.setenv("EKIDEN_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["version", "--json"])


@pytest.mark.parametrize(
    ("words", "offered"), [("ekiden jo", ["jobs"]), ("ekiden dlq re", ["replay"])]
)
def test_a_shell_can_ask_what_may_come_next(words: str, offered: list[str]) -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "ekiden.cli.main"],
        env={
            **os.environ,
            "_EKIDEN_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert outcome.stdout.split() == offered
