"""`ekiden cache`, and jobs that name caches, as a person or a script meets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.client.cachebroker import CacheMachine, cache_broker, worker
from tests.unit.client.loopback import KEY

from ekiden.cli import cache
from ekiden.cli.main import main
from ekiden.client.caches import CacheProgress

Said = Callable[[], tuple[list[str], str]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheMachine]:
    key = tmp_path / "key"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    monkeypatch.setenv("EKIDEN_KEY_FILE", str(key))
    with cache_broker() as (machine, broker):
        monkeypatch.setenv("EKIDEN_CONNECT", broker.address)
        yield machine


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def read() -> tuple[list[str], str]:
        found = capsys.readouterr()
        return found.out.splitlines(), found.err

    return read


def files(**contents: str) -> None:
    for name, text in contents.items():
        path = Path(name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def document(said: Said) -> Any:
    (line,) = said()[0]
    return json.loads(line)


@pytest.mark.parametrize("verb", ["put", "list", "show", "verify", "rm"])
def test_every_verb_explains_itself_and_speaks_json(verb: str, said: Said) -> None:
    assert main(["cache", verb, "--help"]) == 0
    assert "--json" in "\n".join(said()[0])


# ------------------------------------------------------------------ put


def test_a_folder_stands_for_the_files_in_it(machine: CacheMachine, said: Said) -> None:
    files(d__a="1", d__b__c="22")

    assert main(["cache", "put", "ds1", "d"]) == 0

    out, err = said()
    assert machine.content("ds1") == {"a": b"1", "b/c": b"22"}
    assert out[0].startswith("ds1: 2 files, 3 B (")
    assert "at 1 of 1 worker in" in out[0]
    assert err == ""


def test_of_several_paths_each_goes_by_its_own_name(machine: CacheMachine) -> None:
    files(d__a="1", x="2")

    assert main(["cache", "put", "ds1", "d/", "x"]) == 0

    assert machine.content("ds1") == {"d/a": b"1", "x": b"2"}


def test_two_paths_of_one_name_are_refused(machine: CacheMachine, said: Said) -> None:
    files(d__x="1", x="2")

    assert main(["cache", "put", "ds1", "d/x", "x"]) == 2
    assert "would both be called 'x'" in said()[1]


def test_a_script_gets_one_document(machine: CacheMachine, said: Said) -> None:
    files(x="1")

    assert main(["cache", "put", "ds1", "x", "--target", "job.assign.p", "--json"]) == 0

    found = document(said)
    assert {name: found[name] for name in found if name not in ("seconds", "sent_bytes")} == {
        "id": "ds1", "manifest": machine.caches["ds1"]["manifest"], "state": "new", "files": 1,
        "bytes": 1, "reached": 1, "of": 1, "ratio": 1.0, "workers": [worker("w1", "ok")],
    }  # fmt: skip
    assert machine.caches["ds1"]["targets"] == ["job.assign.p"]


def test_too_few_workers_end_it_with_1_and_say_who_and_what_next(
    machine: CacheMachine, said: Said
) -> None:
    files(x="1")
    machine.workers = lambda _look: [
        worker("w1", "ok"), worker("w2", "failed", "the disk is full"), worker("w3", "pending"),
    ]  # fmt: skip

    assert main(["cache", "put", "ds1", "x", "--timeout", "0"]) == 1

    out, err = said()
    assert "at 1 of 3 workers" in out[0]
    assert "  w2: failed: the disk is full\n" in err
    assert "1 worker not there yet" in err
    assert "ekiden cache show ds1" in err
    assert main(["cache", "put", "ds1", "x", "--timeout", "0", "--json"]) == 1
    found = document(said)
    assert (found["reached"], found["of"], found["state"]) == (1, 3, "same")
    assert found["error"]["code"] == "cache_incomplete"


def test_a_part_of_the_workers_may_do(machine: CacheMachine, said: Said) -> None:
    files(x="1")
    machine.workers = lambda _look: [worker("w1", "ok"), worker("w2", "failed", "no room")]

    assert main(["cache", "put", "ds1", "x", "--success-ratio", "0.5"]) == 0
    assert "  w2: failed: no room\n" in said()[1]


def test_nobody_is_waited_for_if_not_wanted(machine: CacheMachine, said: Said) -> None:
    files(x="1")
    machine.workers = lambda _look: [worker("w1", "pending")]

    assert main(["cache", "put", "ds1", "x", "--no-wait"]) == 0
    assert "on its way to 1 worker" in said()[0][0]


def test_without_workers_it_is_said_that_they_get_it_later(
    machine: CacheMachine, said: Said
) -> None:
    files(x="1")
    machine.workers = lambda _look: []

    assert main(["cache", "put", "ds1", "x"]) == 0
    assert "by themselves" in said()[1]


def test_other_content_under_an_id_is_refused(machine: CacheMachine, said: Said) -> None:
    files(x="1")
    assert main(["cache", "put", "ds1", "x"]) == 0
    files(x="2")

    assert main(["cache", "put", "ds1", "x"]) == 4
    assert "ekiden cache rm ds1" in said()[1]


def test_an_empty_folder_is_wrong_usage(machine: CacheMachine, said: Said) -> None:
    Path("d").mkdir()

    assert main(["cache", "put", "ds1", "d"]) == 2
    assert "there are no files" in said()[1]


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (CacheProgress("reading", 5, 10), "━" * 12 + "╌" * 12 + "  50%  reading · 5 B of 10 B"),
        (CacheProgress("sending", 0, 0), "╌" * 24 + "   0%  sending · 0 B of 0 B"),
        (
            CacheProgress("reaching", 10, 10, 1, 1),
            "━" * 24 + " 100%  at the workers · 1 of 1 worker · 10 B of 10 B",
        ),
    ],
)
def test_the_moving_line(progress: CacheProgress, shown: str) -> None:
    assert cache.line(progress) == shown


# ------------------------------------------------------------------ look and remove


def test_caches_are_listed_shown_verified_and_removed(machine: CacheMachine, said: Said) -> None:
    files(x="1", y="22")
    main(["cache", "put", "a", "x"])
    main(["cache", "put", "b", "x", "y"])
    said()

    assert main(["cache", "list"]) == 0
    rows = said()[0]
    assert [row.split()[0] for row in rows] == ["id", "b", "a"]
    assert "1 of 1" in rows[1]

    assert main(["cache", "show", "b", "--files"]) == 0
    shown = "\n".join(said()[0])
    assert "content" in shown
    assert "w1" in shown
    assert shown.endswith("  y")

    assert main(["cache", "show", "b", "--files", "--json"]) == 0
    assert [(f["name"], f["size"]) for f in document(said)["content"]] == [("x", 1), ("y", 2)]

    assert main(["cache", "rm", "a", "q"]) == 4
    out, err = said()
    assert out == ["1 removed · 0 in use · 1 unknown"]
    assert "unknown: q" in err
    assert main(["cache", "rm", "b", "--json"]) == 0
    assert document(said) == {"removed": ["b"], "in_use": [], "unknown": []}

    assert main(["cache", "list"]) == 0
    assert "ekiden cache put" in said()[1]


def test_verify_waits_for_the_workers_and_names_those_that_failed(
    machine: CacheMachine, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOOK_S", 0.001)
    files(x="1")
    main(["cache", "put", "a", "x"])
    said()
    looks = machine.looks
    machine.workers = lambda look: [
        worker("w1", "skipped"),
        worker("w2", "pending" if look < looks + 3 else "ok"),
    ]

    assert main(["cache", "verify", "a"]) == 0
    assert said()[0] == ["1 sound · 1 mended · 0 failed · 0 open"]

    machine.workers = lambda _look: [worker("w1", "failed", "no room"), worker("w2", "pending")]
    assert main(["cache", "verify", "a", "--timeout", "0"]) == 1
    out, err = said()
    assert out == ["0 sound · 0 mended · 1 failed · 1 open"]
    assert "  w1: failed no room\n" in err
    assert main(["cache", "verify", "a", "--timeout", "0", "--json"]) == 1
    assert document(said)["failed"] == 1


def test_an_unknown_cache_is_refused_with_the_next_step(machine: CacheMachine, said: Said) -> None:
    assert main(["cache", "show", "nope"]) == 4
    assert "ekiden cache list" in said()[1]


# ------------------------------------------------------------------ jobs


def test_submit_names_caches(machine: CacheMachine, said: Said) -> None:
    files(x="1")
    main(["cache", "put", "a", "x"])
    main(["cache", "put", "b", "x"])
    said()

    assert main(["submit", "--wait", "echo", "-p", "hi", "--cache", "b,a"]) == 0

    assert said()[0] == ["hi"]
    assert [use.id for use in machine.spec().caches] == ["a", "b"]


def test_a_run_with_an_unknown_cache_is_refused_before_any_job(
    machine: CacheMachine, said: Said
) -> None:
    assert main(["run", "--cache", "nope", "--any-program", "cat", ":::", "a"]) == 4

    assert machine.submits == []
    assert "ekiden cache list" in said()[1]
