"""A run being followed: real programs on a grid in this process, and what is left of them."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ekiden.testing
from ekiden.cli import following, jobs, output, saving, showing
from ekiden.cli.feeding import Attaching, Submitting
from ekiden.cli.following import Follower, Wishes
from ekiden.cli.inputs import Entry, make_entries
from ekiden.cli.joblog import JobLog, read_done
from ekiden.cli.manifest import FORMAT, Manifest, fetch, put
from ekiden.cli.offered import Offers as Offered
from ekiden.cli.offered import resolve
from ekiden.cli.saving import INDEX, Ending
from ekiden.client.blocking import Client
from ekiden.errors import UnknownJob, WrongUsage
from ekiden.testing import Grid
from ekiden.worker.catalogue import ProgramConfig
from ekiden.worker.offers import Offers

SLOTS = 3


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """Of few places to wait in, so that a run of some size meets a full broker."""
    scratch = tmp_path_factory.mktemp("scratch")
    scratch.chmod(0o700)
    with ekiden.testing.grid(waiting_max=150) as grid:
        programs = ProgramConfig(any_program=True)
        grid.add_worker(SLOTS, offers=Offers(programs=programs, scratch=scratch))
        yield grid


class Runs:
    """Follows runs of shell scripts, each under a name of its own."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.out = folder / "out"
        self.name = folder.name
        self.count = 0

    def run(self, script: str, inputs: list[str], log: Path | None = None, **wishes: Any) -> int:
        self.count += 1
        run = f"{self.name}-{self.count}"
        manifest = Manifest(
            FORMAT, "sh", ("-c", script, "sh"), list(make_entries((word,) for word in inputs))
        )
        options = {"any_program": True, "run": run, "manifest": put(self.client, manifest)}
        gate = Submitting(
            self.client, run, manifest.entries, manifest.template, manifest.command, options
        )
        follower = Follower(
            self.client, run, manifest, gate, range(1, len(inputs) + 1),
            Wishes(**{"out": self.out, **wishes}),
            joblog=JobLog(log, keep=True) if log else None,
        )  # fmt: skip
        return follower.follow()

    def attach(self, run: str, **wishes: Any) -> int:
        manifest = fetch(self.client, run)
        numbers = range(1, len(manifest.entries) + 1)
        gate = Attaching(self.client, run)
        return Follower(
            self.client, run, manifest, gate, numbers, Wishes(**{"out": self.out, **wishes}),
            hands_over=False,
        ).follow()  # fmt: skip

    def saved(self) -> dict[str, str]:
        files = (path for path in self.out.rglob("*") if path.is_file() and path.name != INDEX)
        return {str(path.relative_to(self.out)): path.read_text() for path in files}


@pytest.fixture
def runs(grid: Grid, tmp_path: Path) -> Runs:
    return Runs(grid.client, tmp_path)


def lines(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]


def test_every_input_has_a_folder_with_what_its_job_brought(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    code = runs.run(
        "echo $1 >new; mkdir in; echo deep >in/x; echo out $1; echo err >&2", ["a", "b"]
    )

    told = capsys.readouterr()
    assert code == 0
    assert sorted(told.out.splitlines()) == ["out a", "out b"]
    assert "2 done in " in told.err
    for name in ("a", "b"):
        files = {path.name: path for path in (runs.out / name).iterdir()}
        assert files.keys() == {"new", "in", "stdout", "stderr", INDEX}
        assert (files["in"] / "x").read_text() == "deep\n"
        assert files["stdout"].read_text() == f"out {name}\n"


def test_an_empty_stderr_leaves_no_file_and_no_earlier_one(runs: Runs) -> None:
    runs.run("echo trouble >&2; exit 3", ["a"])
    assert "trouble" in runs.saved()["a/stderr"]

    runs.run("echo well", ["a"])

    assert runs.saved() == {"a/stdout": "well\n"}


def test_what_failed_is_listed_with_its_last_words(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "for n in 1 2 3 4 5; do echo line $n >&2; done; exit $1"

    code = runs.run(script, ["0", "7"])

    told = capsys.readouterr().err
    assert code == 1
    assert "7: exit_code: it exited with code 7\n    line 3\n    line 4\n    line 5\n" in told
    assert "line 2" not in told
    assert "1 done · 1 failed in " in told
    assert f"ekiden attach {runs.name}-1" in told


def test_of_many_failures_the_first_are_shown_and_the_rest_counted(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.run("exit 1", [str(number) for number in range(25)])

    told = capsys.readouterr().err
    assert told.count("it exited with code 1") == showing.FAILURES_SHOWN
    assert f"and 5 more; all of them: ekiden runs show {runs.name}-1 --all" in told


def test_outputs_can_be_printed_in_the_order_of_the_inputs(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first cannot end before the last has.
    flag = tmp_path / "flag"
    script = (
        f"case $1 in a) until [ -e {flag} ]; do sleep 0.01; done;; d) : >{flag};; esac; echo $1"
    )

    runs.run(script, ["a", "b", "c", "d"], keep_order=True)
    flag.unlink()
    runs.run(script, ["a", "b", "c", "d"], keep_order=True, out=None)

    assert capsys.readouterr().out == "a\nb\nc\nd\n" * 2


def test_no_more_jobs_are_in_flight_than_asked_for(runs: Runs, tmp_path: Path) -> None:
    alone = tmp_path / "alone"

    code = runs.run(f"mkdir {alone} && rmdir {alone}", list("abcdefgh"), jobs=1, out=None)

    assert code == 0


def test_a_broker_that_is_full_is_asked_again_until_all_is_done(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [str(number) for number in range(400)]

    code = runs.run("echo $1", numbers, out=None)

    assert code == 0
    assert sorted(capsys.readouterr().out.split(), key=int) == numbers


def test_after_so_many_failures_the_rest_is_not_run(
    runs: Runs, grid: Grid, capsys: pytest.CaptureFixture[str]
) -> None:
    code = runs.run("exit 1", [str(n) for n in range(30)], jobs=1, max_fails=2)

    (run,) = grid.client.ask("runs", name=f"{runs.name}-1")["runs"]
    assert code == 1
    assert run["failed"] >= 2 and run["total"] < 30 and run["open"] == 0
    assert "stopped because of --max-fails 2" in capsys.readouterr().err


def test_giving_up_cancels_what_runs(runs: Runs, grid: Grid, tmp_path: Path) -> None:
    code = runs.run(
        "case $1 in bad) exit 1;; *) exec sleep 3600;; esac", ["a", "b", "bad"], max_fails=1
    )

    (run,) = grid.client.ask("runs", name=f"{runs.name}-1")["runs"]
    assert code == 1
    assert (run["failed"], run["cancelled"], run["open"]) == (1, 2, 0)


def test_an_input_that_cannot_be_sent_does_not_keep_the_others_from_it(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = runs.run("echo $1", ["a", "\udcff", "b"], as_json=True, out=None)

    told = {line["number"]: line for line in lines(capsys) if "number" in line}
    assert code == 4
    assert [told[number]["state"] for number in (1, 2, 3)] == ["done", "refused", "done"]
    assert "not valid Unicode" in told[2]["error"]["message"]


def test_a_file_that_the_program_calls_stdout_stays_its_own(runs: Runs) -> None:
    runs.run("echo mine >stdout; echo said", ["a"])

    assert runs.saved() == {"a/stdout": "mine\n", "a/stdout.1": "said\n"}


def test_outputs_that_find_no_room_are_said_to_be_had_again(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.out.write_text("a file where a folder should be")

    code = runs.run("echo $1", ["a"])

    assert code == 1
    assert f"ekiden attach {runs.name}-1 --out DIR" in capsys.readouterr().err
    assert runs.attach(f"{runs.name}-1", out=runs.out.with_name("elsewhere")) == 0


def test_a_list_of_files_that_is_no_text_ends_no_run(runs: Runs) -> None:
    (runs.out / "a").mkdir(parents=True)
    (runs.out / "a" / INDEX).write_bytes(b"\xff\xfe\n")

    assert runs.run("echo x >\u65e5\u672c", ["a"]) == 0
    assert (runs.out / "a" / INDEX).read_bytes() == "\u65e5\u672c\n".encode()


def test_ctrl_c_while_an_output_is_printed_leaves_time_for_a_second_one(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_interrupted(_data: bytes) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(output, "write_output", write_interrupted)
    monkeypatch.setattr(following, "GRACE_S", 0.2)

    code = runs.run("[ $1 = first ] && echo $1 || exec sleep 3600", ["first", "second"])

    told = capsys.readouterr().err
    assert code == 130
    assert "Ctrl-C again within" in told
    assert f"come back with: ekiden attach {runs.name}-1" in told
    jobs.change(runs.client, "cancel", None, {"run": f"{runs.name}-1", "live": True})


def test_what_a_short_run_took_is_told_in_plain_numbers(
    runs: Runs, grid: Grid, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.run("exit 0", ["a"])
    capsys.readouterr()

    jobs.show_command(f"{runs.name}-1.1", grid.address, grid.key_file)

    assert re.search(r"usage +ran \d+\.\d m?s, CPU \d+\.\d m?s, memory ", capsys.readouterr().out)


def test_every_end_is_a_line_of_json_and_the_last_sums_up(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.run("echo $1; exit $1", ["0", "3"], as_json=True)

    *jobs, summary = lines(capsys)
    done, failed = sorted(jobs, key=lambda job: job["number"])
    assert (done["state"], done["exit_code"], done["input"]) == ("done", 0, ["0"])
    assert done["folder"] == str(runs.out / "0")
    assert (failed["state"], failed["exit_code"]) == ("failed", 3)
    assert failed["error"]["causes"][0]["cause"] == "exit_code"
    assert (summary["total"], summary["done"], summary["failed"]) == (2, 1, 1)
    assert summary["detached"] is False


def test_what_is_not_saved_is_in_the_json(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.run("echo out; echo err >&2", ["a"], as_json=True, out=None)

    job, _ = lines(capsys)
    assert (job["folder"], job["stdout"], job["stderr"]) == (None, "out\n", "err\n")


def test_the_log_has_a_line_for_every_job_that_ran(runs: Runs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    runs.run("kill -$1 $$", ["0", "9"], log=log)

    _, *records = (line.split("\t") for line in log.read_text().splitlines())
    by_number = {record[0]: record for record in records}
    assert by_number["1"][6:] == ["0", "0", "sh -c 'kill -$1 $$' sh 0"]
    assert by_number["2"][6:8] == ["0", "9"]
    assert read_done(log) == {"sh -c 'kill -$1 $$' sh 0": 1}


def test_a_run_can_be_taken_up_by_its_name_alone(
    runs: Runs, grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.run("echo $1 >new", ["a", "b"], detach=True)
    assert "ekiden attach" in capsys.readouterr().err
    elsewhere = Runs(grid.connect(), tmp_path / "elsewhere")

    code = elsewhere.attach(f"{runs.name}-1")

    assert code == 0
    assert elsewhere.saved() == {
        "a/new": "a\n", "a/stdout": "", "b/new": "b\n", "b/stdout": "",
    }  # fmt: skip
    with pytest.raises(UnknownJob):
        elsewhere.attach("nobody")


def test_inputs_that_nobody_has_handed_over_are_told(
    runs: Runs, grid: Grid, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"{runs.name}-partly"
    entries = [Entry(name, (name,)) for name in ("a", "b")]
    manifest = Manifest(FORMAT, "true", (), entries)
    options = {"any_program": True, "run": run, "manifest": put(grid.client, manifest)}
    gate = Submitting(grid.client, run, entries, manifest.template, "true", options)
    gate.hand_over([1])[0][1].result(30)

    code = runs.attach(run)

    assert code == 1
    assert "1 done · 1 not handed over in " in capsys.readouterr().err


def test_a_program_that_changes_during_a_run_is_the_same_for_all_its_jobs(
    grid: Grid, tmp_path: Path
) -> None:
    script = tmp_path / "tool"
    script.write_text("#!/bin/sh\necho first\n")
    script.chmod(0o755)
    options = {"any_program": True, "common": {"tool": script}}
    entries = [Entry("a", ("a",)), Entry("b", ("b",))]
    manifest = Manifest(FORMAT, "./tool", (), entries)
    gate = Submitting(grid.client, "changed", entries, manifest.template, "./tool", options)

    ((_, first),) = gate.hand_over([1])
    script.write_text("#!/bin/sh\necho another\n")
    ((_, second),) = gate.hand_over([2])

    assert [future.result(30).output for future in (first, second)] == [b"first\n"] * 2


# ------------------------------------------------------------------ what is shown


def ending(number: int, text: bytes) -> Ending:
    entry = Entry(str(number), (str(number),))
    return Ending(number=number, id=f"r.{number}", state=saving.DONE, entry=entry, stdout=text)


def test_the_moving_line_says_how_far_how_fast_and_how_long() -> None:
    counts = showing.Counts(2000)
    for number in range(1, 501):
        counts.add(ending(number, b""))
    counts.by_state[saving.FAILED] = 3

    assert showing.line(counts, 50) == (
        "━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌  25%  503 of 2,000 · 3 failed · 50/s · 29.9 s left"
    )
    assert showing.line(showing.Counts(2), 0).endswith("   0%  0 of 2")


def test_what_waits_for_its_turn_is_printed_when_nobody_follows_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("sys.stdout", written)
    printer = showing.Printer([1, 2, 3], in_order=True, shown=True)

    assert printer.add(ending(3, b"three\n")) == []
    assert [each.number for each in printer.add(ending(1, b"one\n"))] == [1]
    printer.rest()

    assert written.buffer.getvalue() == b"one\nthree\n"  # type: ignore[attr-defined]


# ------------------------------------------------------------------ what PROGRAM means


def offered(*patterns: str) -> Offered:
    return Offered([{"patterns": list(patterns)}] if patterns else [])


def test_a_name_that_a_worker_offers_is_that() -> None:
    found = resolve("pricer", offered("job.assign.pricer"), wish=None, shipping=True)

    assert (found.command, found.any_program) == ("pricer", False)
    assert found.subject == "job.assign.pricer"


def test_another_name_is_a_command_where_any_program_may_run() -> None:
    for offers in (offered("job.assign.pricer", "job.program.>"), offered()):
        found = resolve("wc", offers, wish=None, shipping=True)
        assert (found.command, found.any_program) == ("wc", True)
    found = resolve("wc", offered("job.assign.pricer"), wish=None, shipping=True)
    assert not found.any_program


def test_a_built_in_handler_does_not_hide_the_command_of_its_name() -> None:
    found = resolve("echo", offered("job.assign.echo", "job.program.>"), wish=None, shipping=True)

    assert found.any_program


def test_a_file_given_by_path_travels_but_not_what_belongs_to_a_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "price:it.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(WrongUsage, match=r"chmod \+x"):
        resolve("./price:it.sh", offered(), wish=None, shipping=True)
    script.chmod(0o755)

    found = resolve("./price:it.sh", offered(), wish=None, shipping=True)
    assert (found.command, found.files) == (
        "./price_it.sh", {"price_it.sh": Path("price:it.sh")},
    )  # fmt: skip
    assert found.subject == "job.program.price_it-sh"
    assert resolve("/bin/sh", offered(), wish=None, shipping=True).command == "/bin/sh"
    assert resolve("./price:it.sh", offered(), wish=None, shipping=False).files == {}
    with pytest.raises(WrongUsage, match="there is no"):
        resolve("./missing", offered(), wish=None, shipping=True)
    with pytest.raises(WrongUsage, match="is a folder"):
        resolve(f"{os.curdir}/", offered(), wish=None, shipping=True)
