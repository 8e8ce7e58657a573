"""What options mean."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def test_a_change_of_many_jobs_must_say_which() -> None:
    assert options.chosen(["j1"], {}, False, "cancel") == {"ids": ["j1"]}
    assert options.chosen(None, {"run": "r"}, False, "cancel") == {"filter": {"run": "r"}}
    assert options.chosen([], {}, True, "cancel") == {"filter": {}}
    with pytest.raises(WrongUsage, match="cancel what"):
        options.chosen(None, {}, False, "cancel")
    with pytest.raises(WrongUsage):
        options.chosen(["j1"], {"run": "r"}, False, "cancel")
