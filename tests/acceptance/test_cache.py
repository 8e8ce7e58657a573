"""Data shipped once, by the command line."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.acceptance import schemas as s
from tests.acceptance.cli import Cli


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    folder = tmp_path / "curves"
    folder.mkdir()
    (folder / "eur").write_text("0.031\n")
    (folder / "usd").write_text("0.042\n")
    return folder


def caches(grid: Cli) -> dict[str, s.Cache]:
    lines = grid.json_lines("cache", "list")
    return {line["id"]: msgspec.convert(line, s.Cache) for line in lines}


def test_a_cache_is_put_used_listed_verified_and_removed(
    grid: Cli, curves: Path, tmp_path: Path
) -> None:
    put = grid.typed(s.CachePut, "cache", "put", "day", str(curves))
    again = grid.typed(s.CachePut, "cache", "put", "day", str(curves))
    line = caches(grid)["day"]
    ran = grid.run(
        *("run", "--quiet", "--keep-order", "--cache", "day", "--out", str(tmp_path / "out")),
        *("sh", "-c", "cat $EKIDEN_CACHE/day/{}", ":::", "eur", "usd"),
    )
    verified = grid.run("cache", "verify", "day")
    shown = grid.run("cache", "show", "day", "--files")
    removed = grid.typed(s.CachesRemoved, "cache", "rm", "day")

    assert (put.state, put.files, put.reached, put.of) == ("new", 2, 1, 1)
    assert (again.state, again.sent_bytes) == ("same", 0)
    assert (line.id, line.ok, line.of, line.jobs, line.missing) == ("day", 1, 1, 0, 0)
    assert (ran.code, ran.out) == (0, b"0.031\n0.042\n"), ran
    assert verified.code == 0, verified
    assert (shown.code, b"eur" in shown.out, b"usd" in shown.out) == (0, True, True)
    assert removed == s.CachesRemoved(["day"], [], [])


def test_a_changed_folder_needs_another_id(grid: Cli, curves: Path) -> None:
    grid.run("cache", "put", "first", str(curves))
    (curves / "eur").write_text("0.05\n")

    refused = grid.run("cache", "put", "first", str(curves), "--json")
    fresh = grid.run("cache", "put", "second", str(curves))

    assert (refused.code, refused.error["code"]) == (4, "conflict")
    assert "another id" in refused.error["remedy"]
    assert fresh.code == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["cache", "put", "..", "."], 4),
        (["cache", "put", "day", "/nowhere"], 2),
        (["cache", "show", "none"], 4),
        (["cache", "rm", "none"], 4),
        (["cache", "verify", "none"], 4),
        (["run", "--cache", "none", "true", ":::", "1"], 4),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_remedy(
    grid: Cli, words: list[str], code: int
) -> None:
    outcome = grid.run(*words)

    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err
    assert outcome.err.strip()


def test_a_folder_with_a_link_in_it_is_refused_by_name(grid: Cli, curves: Path) -> None:
    os.symlink("/etc/passwd", curves / "link")

    outcome = grid.run("cache", "put", "linked", str(curves))

    assert outcome.code == 2
    assert "link" in outcome.err
    assert "linked" not in caches(grid)
