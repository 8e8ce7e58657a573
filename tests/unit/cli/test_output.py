"""What commands say and how they end."""

from __future__ import annotations

import json
import sys

import pytest

from ekiden import errors
from ekiden.cli import output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.JobFailed("j1", []), 1),
        (errors.JobCancelled("j1"), 1),
        (errors.WrongUsage("what?"), 2),
        (errors.Unreachable("nobody there"), 3),
        (errors.ConnectionLost("gone"), 3),
        (TimeoutError("too long"), 3),
        (errors.QueueFull("full"), 4),
        (errors.Unauthenticated("who are you"), 4),
        (errors.FolderInUse("taken"), 4),
        (errors.CorruptJournal("damaged"), 4),
        (errors.BadSubject("no"), 4),
    ],
)
def test_the_exit_code_says_whose_doing_it_was(error: BaseException, code: int) -> None:
    assert output.exit_code_of(error) == code


def test_an_error_is_one_sentence_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_error(errors.QueueFull("subject 'a' is full", remedy="retry later"), as_json=False)

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "ekiden: subject 'a' is full; retry later\n"


def test_an_error_as_json_keeps_code_message_and_remedy_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = errors.QueueFull("full", remedy="retry later", retry_after_s=2.5)
    output.print_error(error, as_json=True)

    assert json.loads(capsys.readouterr().err) == {
        "error": {
            "code": "queue_full",
            "message": "full",
            "remedy": "retry later",
            "retry_after_s": 2.5,
        }
    }


def test_a_failed_job_carries_its_causes_into_json() -> None:
    causes: list[dict[str, object]] = [{"attempt": 1, "cause": "handler_error", "message": "no"}]
    document = output.error_document(errors.JobFailed("j1", causes))

    assert document["error"]["job"] == "j1"
    assert document["error"]["causes"] == causes


def test_bytes_become_text_or_are_tagged() -> None:
    assert json.loads(output.to_json({"a": b"hi", "b": [b"\xff"]})) == {
        "a": "hi",
        "b": [{"base64": "/w=="}],
    }


def test_a_hostile_name_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("id",), [("\x1b[2Jgone\n",), ("[bold]x[/bold]",)])

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2Jgone\\n" in shown
    assert "[bold]x[/bold]" in shown


def test_a_table_outside_a_terminal_never_cuts_an_id(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "x" * 119
    output.print_table(("id", "name", "worker"), [(wide, wide, wide)])

    assert capsys.readouterr().out.count(wide) == 3


def test_an_empty_table_says_so_beside_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("id",), [], empty="no dead letters")

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no dead letters\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (5, "5.0 s"),
        (65, "1 min 05 s"),
        (7260, "2 h 01 min"),
        (200_000, "2 d 07 h"),
    ],
)
def test_spans_in_two_units(seconds: float, text: str) -> None:
    assert output.span(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (1500, "1.5 kB"), (3 * 10**12, "3.0 TB")]
)
def test_sizes_in_few_digits(count: int, text: str) -> None:
    assert output.size(count) == text


def test_facts_without_a_value_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_facts([("id", "j1"), ("worker", ""), ("attempt", 1200)])

    assert capsys.readouterr().out == "id       j1\nattempt  1,200\n"


def test_a_job_output_goes_out_unchanged(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    output.write_output(b"\xff\x00 raw")
    sys.stdout.flush()

    assert capfdbinary.readouterr().out == b"\xff\x00 raw"
