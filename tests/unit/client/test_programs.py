"""What a user says of a program becomes what its jobs share and a body for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ekiden import limits
from ekiden.client.programs import (
    ARGS_MAX,
    COMMON_TOTAL_BYTES,
    INLINE_TOTAL_BYTES,
    ProgramArgs,
    draft,
    parcel,
    program_terms,
)
from ekiden.errors import BadId, BadName, WrongUsage
from ekiden.model.work import FileRef, Program, ProgramCall

LARGE = b"x" * (limits.INLINE_FILE_BYTES + 1)


def program(command: str = "pricer", **options: Any) -> Program:
    terms = program_terms(command, options)  # type: ignore[arg-type]
    return msgspec.msgpack.decode(terms.shared([]), type=Program)


def call(**parts: Any) -> ProgramCall:
    return msgspec.msgpack.decode(draft(ProgramArgs(**parts)).body([]), type=ProgramCall)


# ------------------------------------------------------------------ the program


def test_a_named_program_waits_where_its_workers_listen() -> None:
    terms = program_terms("pricer", {"priority": 3})

    assert (terms.name, terms.options) == ("pricer", {"priority": 3})
    assert terms.program == Program("pricer")


@pytest.mark.parametrize(
    ("command", "name", "subject"),
    [
        ("wc", "wc", "job.program.wc"),
        ("/opt/a b/solve.sh", "solve.sh", "job.program.solve-sh"),
        ("./größe", "gr-e", "job.program.gr-e"),
        ("...", "program", "job.program.program"),
    ],
)
def test_any_other_program_waits_under_its_own_name(command: str, name: str, subject: str) -> None:
    terms = program_terms(command, {"any_program": True})

    assert (terms.name, terms.options) == (name, {"subject": subject})
    assert (terms.program.command, terms.program.any) == (command, True)


def test_a_subject_that_was_asked_for_is_kept() -> None:
    terms = program_terms("wc", {"any_program": True, "subject": "site.a"})

    assert terms.options == {"subject": "site.a"}


def test_what_is_said_of_the_program_travels_with_it() -> None:
    found = program(env={"B": "2", "A": "1"}, outputs=["*.csv"], ok_codes=[0, 1])

    assert found.env == (("A", "1"), ("B", "2"))
    assert (found.outputs, found.ok_codes) == (("*.csv",), (0, 1))


@pytest.mark.parametrize(
    ("command", "options", "error"),
    [
        ("", {}, WrongUsage),
        ("a/b", {}, BadId),
        ("x\0y", {"any_program": True}, WrongUsage),
        ("p", {"env": {"": "x"}}, WrongUsage),
        ("p", {"env": {"A=B": "x"}}, WrongUsage),
        ("p", {"outputs": ["../*.csv"]}, BadName),
        ("p", {"outputs": ["/etc/*"]}, BadName),
        ("p", {"common": {"../x": b""}}, BadName),
        ("p", {"common": {"x": "/nonexistent"}}, WrongUsage),
    ],
)
def test_a_program_that_cannot_be_meant_is_refused(
    command: str, options: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        program_terms(command, options)


# ------------------------------------------------------------------ calls


def test_a_call_is_its_words_and_small_files(tmp_path: Path) -> None:
    script = tmp_path / "s.sh"
    script.write_bytes(b"#!/bin/sh\n")
    script.chmod(0o755)

    found = call(args=["-x", 3, tmp_path], stdin="text", files={"a/b": b"1", "s.sh": script})

    assert found.args == ["-x", "3", str(tmp_path)]
    assert found.stdin == FileRef("stdin", 4, b"text")
    assert found.files == [FileRef("a/b", 1, b"1"), FileRef("s.sh", 10, b"#!/bin/sh\n", "", True)]


def test_what_is_large_is_put_in_the_store_first(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(LARGE)
    made = draft(ProgramArgs([], path, {"small": b"1", "big": LARGE}))

    assert made.to_store == [path, LARGE]
    found = msgspec.msgpack.decode(made.body(["aa", "bb"]), type=ProgramCall)
    assert found.stdin == FileRef("stdin", len(LARGE), None, "aa")
    assert found.files == [
        FileRef("small", 1, b"1"), FileRef("big", len(LARGE), None, "bb"),
    ]  # fmt: skip


def test_many_small_files_together_are_no_longer_small() -> None:
    size = limits.INLINE_FILE_BYTES
    files = {f"f{n}": bytes(size) for n in range(INLINE_TOTAL_BYTES // size + 1)}

    assert [piece.data is None for piece in parcel(files).pieces] == [False] * 4 + [True]


def test_what_all_jobs_get_is_small_or_stored() -> None:
    common: Any = {
        "small": b"1",
        "large": bytes(COMMON_TOTAL_BYTES),
        "known": FileRef("x", 9, None, "h"),
    }
    terms = program_terms("p", {"common": common})

    assert terms.common.to_store == [bytes(COMMON_TOTAL_BYTES)]
    found = msgspec.msgpack.decode(terms.shared(["aa"]), type=Program)
    assert [(file.name, file.data, file.blob) for file in found.files] == [
        ("small", b"1", ""), ("large", None, "aa"), ("known", None, "h"),
    ]  # fmt: skip


def test_an_empty_stdin_is_none() -> None:
    assert call(stdin=b"").stdin is None


@pytest.mark.parametrize(
    "parts",
    [
        {"args": ["a\0b"]},
        {"args": ["\udcff"]},
        {"args": ["x"] * (ARGS_MAX + 1)},
        {"files": {"f": "."}},
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(parts: Any) -> None:
    with pytest.raises(WrongUsage):
        call(**parts)
