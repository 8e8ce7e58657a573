"""What options mean."""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from ekiden.cli import options
from ekiden.errors import WrongUsage


def test_a_payload_is_text_a_file_or_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "in.bin"
    file.write_bytes(b"\x00\xff")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"piped")))

    assert options.read_payload("grüße") == "grüße".encode()
    assert options.read_payload(f"@{file}") == b"\x00\xff"
    assert options.read_payload("-") == b"piped"


def test_a_payload_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="cannot read"):
        options.read_payload(f"@{tmp_path}/none")


def test_needs_by_example() -> None:
    assert options.parse_needs("cpu=2,mem_mb=4000,label.gpu=a100") == {
        "cpu": 2,
        "mem_mb": 4000,
        "label": {"gpu": "a100"},
    }
    assert options.parse_needs("cpu=0.5, label.os=linux") == {"cpu": 0.5, "label": {"os": "linux"}}
    assert options.parse_needs("") == {}


@pytest.mark.parametrize("text", ["cpu", "cpu=", "cpu=two", "gpu=1", "label.=x", "mem_mb=1.5"])
def test_needs_that_mean_nothing_are_wrong_usage(text: str) -> None:
    with pytest.raises(WrongUsage, match="--needs"):
        options.parse_needs(text)


def test_labels_are_pairs() -> None:
    assert options.parse_labels(["gpu=a100", "rack=7=b"]) == {"gpu": "a100", "rack": "7=b"}
    for pair in ("gpu", "=x", "gpu="):
        with pytest.raises(WrongUsage):
            options.parse_labels([pair])


def test_a_list_may_be_given_with_commas_and_by_repeating() -> None:
    assert options.split_list(["a,b", " c ,", ""]) == ["a", "b", "c"]
    assert options.split_list(None) == []


def test_a_time_without_a_zone_is_of_this_machine() -> None:
    moment = options.parse_time("2026-05-17T06:00", "--not-before")
    abroad = options.parse_time("2026-05-17T06:00+09:00", "--not-before")

    assert moment == datetime(2026, 5, 17, 6).astimezone()
    assert abroad == datetime(2026, 5, 16, 21, tzinfo=UTC)
    assert options.parse_time("", "--not-before") is None
    with pytest.raises(WrongUsage, match="--not-before does not understand 'tomorrow'"):
        options.parse_time("tomorrow", "--not-before")


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_person_is_asked_before_much_is_changed(
    answer: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", lambda _: terminal.readline().rstrip("\n"))

    if goes_on:
        options.confirm("Really?")
    else:
        with pytest.raises(typer.Abort):
            options.confirm("Really?")


def test_where_nobody_can_be_asked_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))

    with pytest.raises(WrongUsage, match="--yes"):
        options.confirm("Really?")
