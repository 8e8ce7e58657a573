"""A program over many inputs, typed in: what comes back, what is said, and how to come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from msgspec import Struct
from tests.acceptance.cli import EKIDEN, WAIT_S, Cli, Outcome, until
from tests.acceptance.schemas import Bytes, JobTrouble

PRICE = """\
#!/bin/sh
echo "pricing $1" >&2
if grep -q bad "$1"; then echo "a strike of -1 makes no sense" >&2; exit 3; fi
wc -c <"$1" >size
echo "price of $1"
"""


class Ended(Struct, kw_only=True):
    """`run` and `attach`: one a line."""

    run: str
    number: int
    id: str
    input: list[str]
    state: Literal["done", "failed", "cancelled", "refused", "unsaved", "missing"]
    exit_code: int | None
    attempt: int
    worker: str
    ran_s: float | None
    folder: str | None
    files: list[str]
    stdout: Bytes | None
    stderr: Bytes | None
    error: JobTrouble | None = None


class Summary(Struct, kw_only=True):
    """The last line of `run` and `attach`."""

    run: str
    total: int
    done: int
    failed: int
    cancelled: int
    refused: int
    unsaved: int
    missing: int
    skipped: int
    open: int
    seconds: float
    out: str | None
    detached: bool


class Run(Struct):
    """`runs list`: one a line; `runs show`."""

    name: str
    client: str
    submitted: int
    total: int
    open: int
    done: int
    failed: int
    cancelled: int


class Place:
    """A person in a folder of their own."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli = cli
        self.folder = folder
        self.out = folder / "out"
        script = folder / "price.sh"
        script.write_text(PRICE)
        script.chmod(0o755)
        (folder / "trades").mkdir()
        for name in ("a", "b", "bad"):
            (folder / "trades" / f"{name}.json").write_text(name)

    def ekiden(self, *words: str, stdin: bytes = b"", **environment: str) -> Outcome:
        done = subprocess.run(
            [*EKIDEN, *words], input=stdin, capture_output=True, cwd=self.folder,
            env={**self.cli.environment, **environment}, timeout=WAIT_S * 2, check=False,
        )  # fmt: skip
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return Outcome(done.returncode, done.stdout, done.stderr.decode())

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*EKIDEN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.folder,
            env=self.cli.environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def typed(self, *words: str, code: int = 0) -> tuple[dict[int, Ended], Summary]:
        """What `--json` prints, if that is what was promised."""
        outcome = self.ekiden(words[0], "--json", *words[1:])
        assert outcome.code == code, outcome
        *jobs, last = outcome.out.splitlines()
        ended = [msgspec.json.decode(line, type=Ended) for line in jobs]
        return {job.number: job for job in ended}, msgspec.json.decode(last, type=Summary)

    def saved(self, out: str = "out") -> dict[str, str]:
        root = self.folder / out
        files = (
            path for path in root.rglob("*") if path.is_file() and path.name != ".ekiden-files"
        )
        return {str(path.relative_to(root)): path.read_text() for path in files}

    def look(self, run: str) -> dict[str, Any]:
        (found,) = self.cli.look("runs", name=run)["runs"]
        assert isinstance(found, dict)
        return found


@pytest.fixture
def place(grid: Cli, tmp_path: Path) -> Place:
    return Place(grid, tmp_path)


# ------------------------------------------------------------------ what comes back


def test_new_files_and_streams_of_every_input_come_back_to_its_folder(place: Place) -> None:
    outcome = place.ekiden("run", "./price.sh", "{}", ":::", "trades/a.json", "trades/b.json")

    assert outcome.code == 0
    assert sorted(outcome.out.splitlines()) == [b"price of a.json", b"price of b.json"]
    assert "2 done in " in outcome.err
    assert place.saved() == {
        "a.json/size": "1\n", "a.json/stdout": "price of a.json\n",
        "a.json/stderr": "pricing a.json\n", "b.json/size": "1\n",
        "b.json/stdout": "price of b.json\n", "b.json/stderr": "pricing b.json\n",
    }  # fmt: skip


def test_what_failed_is_told_with_its_last_words_and_the_exit_code_says_so(place: Place) -> None:
    outcome = place.ekiden("run", "./price.sh", ":::", "trades/a.json", "trades/bad.json")

    assert outcome.code == 1
    assert outcome.out == b"price of a.json\n"
    assert "trades/bad.json: exit_code: it exited with code 3\n" in outcome.err
    assert "    a strike of -1 makes no sense\n" in outcome.err
    assert "a strike of -1 makes no sense" in place.saved()["bad.json/stderr"]


def test_a_compiled_program_and_large_files_travel_both_ways(place: Place) -> None:
    source = place.folder / "twice.c"
    source.write_text(
        '#include <stdio.h>\nint main(int n, char **v) { FILE *in = fopen(v[1], "rb"), '
        '*out = fopen("twice.bin", "wb"); int c; while ((c = getc(in)) != EOF) '
        "{ putc(c, out); putc(c, out); } return fclose(out); }\n"
    )
    subprocess.run(["cc", "-o", "twice", "twice.c"], cwd=place.folder, check=True)
    data = os.urandom(1_000_000)
    (place.folder / "large.bin").write_bytes(data)

    outcome = place.ekiden("run", "./twice", ":::", "large.bin")

    assert outcome.code == 0, outcome
    doubled = bytes(byte for byte in data for _ in range(2))
    assert (place.out / "large.bin" / "twice.bin").read_bytes() == doubled


def test_a_script_for_an_interpreter_is_sent_along(place: Place) -> None:
    (place.folder / "model.py").write_text("import sys; print(sys.argv[1].upper())\n")
    words = (sys.executable, "model.py", "{}", ":::", "a", "b")

    alone = place.ekiden("run", "--no-save", "--retry", "0", *words)
    outcome = place.ekiden("run", "--no-save", "--keep-order", "--with", "model.py", *words)

    assert alone.code == 1
    assert "to send it: --with model.py" in alone.err
    assert (outcome.code, outcome.out) == (0, b"A\nB\n")
    assert not place.out.exists()


def test_inputs_come_from_lists_files_and_stdin(place: Place) -> None:
    (place.folder / "list").write_text("1\n2\n")
    run = ("run", "--no-save", "--quiet", "--keep-order", "echo")

    assert place.ekiden(*run, "{2}-{1}", ":::", "a", "b", "::::", "list").out == (
        b"1-a\n2-a\n1-b\n2-b\n"
    )
    assert place.ekiden(*run, stdin=b"from stdin\nand more\n").out == b"from stdin\nand more\n"
    assert place.ekiden(*run, "-n", "--json", "{#}", ":::", "x").out == b"--json 1"


def test_nothing_is_read_into_by_a_shell(place: Place) -> None:
    nasty = "$(touch /tmp/never); `x` * 'y'"

    outcome = place.ekiden("run", "--no-save", "--quiet", "echo", ":::", nasty)

    assert outcome.out.decode() == nasty + "\n"


def test_a_dry_run_prints_command_lines_and_asks_nobody(place: Place) -> None:
    words = (
        "run",
        "--dry-run",
        "./price.sh",
        "-o",
        "{/.}.csv",
        "{}",
        ":::",
        "trades/a.json",
        "x y",
    )

    outcome = place.ekiden(*words, EKIDEN_CONNECT="127.0.0.1:1")

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.decode() == "./price.sh -o a.csv a.json\n./price.sh -o 'x y.csv' 'x y'\n"


def test_only_the_outputs_that_were_asked_for_come_back(place: Place) -> None:
    script = "echo 1 >a.csv; echo 2 >b.txt; echo $WHO"
    words = ("--outputs", "*.csv", "--env", "WHO=me", "sh", "-c", script, "sh", ":::", "x")

    assert place.ekiden("run", *words).code == 0
    assert place.saved() == {"x/a.csv": "1\n", "x/stdout": "me\n"}


def test_a_retry_is_one_also_for_an_exit_code(place: Place) -> None:
    flag = place.folder / "flag"
    script = f"if [ -e {flag} ]; then echo well; else : >{flag}; exit 9; fi"

    jobs, summary = place.typed("run", "--retry", "1", "--no-save", "sh", "-c", script, ":::", "x")

    assert (jobs[1].state, jobs[1].attempt, jobs[1].stdout) == ("done", 2, "well\n")
    assert (summary.done, summary.out) == (1, None)


def test_every_end_is_a_line_of_json_and_the_last_sums_up(place: Place) -> None:
    words = ("run", "--name", "told", "./price.sh", ":::", "trades/a.json", "trades/bad.json")

    jobs, summary = place.typed(*words, code=1)

    assert (jobs[1].id, jobs[1].state, jobs[1].files) == ("told.1", "done", ["size"])
    assert (jobs[2].state, jobs[2].exit_code) == ("failed", 3)
    assert jobs[2].error is not None
    assert [cause.cause for cause in jobs[2].error.causes] == ["exit_code"]
    assert (summary.run, summary.total, summary.done, summary.failed) == ("told", 2, 1, 1)


@pytest.mark.slow
def test_ten_thousand_inputs_have_ten_thousand_outputs(place: Place) -> None:
    numbers = "".join(f"{number}\n" for number in range(10_000)).encode()

    outcome = place.ekiden("run", "--keep-order", "echo", stdin=numbers)

    assert outcome.code == 0
    assert outcome.out == numbers
    assert len(list(place.out.iterdir())) == 10_000


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["::: a"], "run what?"),
        (["./missing", ":::", "a"], "there is no './missing' here"),
        (["trades/a.json", ":::", "a"], "is not executable"),
        (["echo", ":::", "trades"], "is a folder"),
        (["echo", "::::", "missing"], "cannot read 'missing'"),
        (["wc -l", ":::", "a"], "leave the quotes away"),
        (["--resume", "echo", ":::", "a"], "--resume what?"),
        (["--detach", "--jobs", "2", "echo", ":::", "a"], "nobody is here"),
        (["--env", "NOT_SET_HERE", "echo", ":::", "a"], "not set here"),
        (["--with", "missing", "echo", ":::", "a"], "is not there"),
        (["--nonsense", "echo", ":::", "a"], "no such option"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_run(place: Place, words: list[str], told: str) -> None:
    outcome = place.ekiden("run", *(words if words != ["::: a"] else [":::", "a"]))

    assert (outcome.code, outcome.out) == (2, b"")
    assert told in outcome.err


def test_a_program_that_no_worker_has_is_a_failure_with_a_remedy(place: Place) -> None:
    outcome = place.ekiden("run", "--retry", "0", "no-such-program", ":::", "a")

    assert outcome.code == 1
    assert "a: cannot_start: this worker finds no program 'no-such-program'" in outcome.err


def test_a_name_that_nobody_offers_waits_and_says_for_what(place: Place) -> None:
    words = ("run", "--listed", "--detach", "--name", "waiting", "pricer", ":::", "a")
    outcome = place.ekiden(*words)

    assert outcome.code == 0
    assert "no connected worker runs 'pricer' (they offer: echo, " in outcome.err
    assert "ekiden worker --exec pricer=/path/to/it" in outcome.err
    assert place.look("waiting")["open"] == 1
    assert place.ekiden("runs", "cancel", "waiting").out.startswith(b"1 cancelled")


def test_a_listed_program_is_called_by_its_name(own: Cli, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    place = Place(own, here)
    own.start_up("--slots", "1", "--exec", f"pricer={here / 'price.sh'}")

    jobs, _ = place.typed("run", "--name", "listed", "pricer", ":::", "trades/a.json")

    assert jobs[1].state == "done"
    assert own.look("job", id="listed.1")["subject"] == "job.assign.pricer"


# ------------------------------------------------------------------ leaving and coming back


def test_a_run_detached_here_is_finished_from_elsewhere(
    place: Place, grid: Cli, tmp_path: Path
) -> None:
    flag = place.folder / "flag"
    script = f"until [ -e {flag} ]; do sleep 0.02; done; cat $1 >copy"
    words = ("sh", "-c", script, "sh", ":::", "trades/a.json", "trades/b.json")
    left = place.ekiden("run", "--detach", "--name", "moved", *words)
    assert (left.code, left.out) == (0, b"")
    assert "ekiden attach moved" in left.err
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = Place(grid, elsewhere)
    flag.touch()

    key = ("--key-file", str(grid.data / "key"))
    outcome = other.ekiden("attach", "moved", *key, EKIDEN_STATE=str(elsewhere / "state"))

    assert outcome.code == 0, outcome
    assert other.saved() == {
        "a.json/copy": "a", "a.json/stdout": "", "b.json/copy": "b", "b.json/stdout": "",
    }  # fmt: skip
    assert not place.out.exists()


def test_ctrl_c_detaches_and_says_how_to_come_back(place: Place) -> None:
    flag = place.folder / "flag"
    script = f"until [ -e {flag} ]; do sleep 0.02; done; echo $1"
    words = ("sh", "-c", script, "sh", ":::", *map(str, range(20)))
    running = place.start("run", "--name", "left-alone", *words)
    until(lambda: bool(place.cli.look("jobs", run="left-alone")["jobs"]), "the run to begin")
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=WAIT_S)

    assert (running.returncode, out) == (130, b"")
    assert b"come back with: ekiden attach left-alone" in err
    assert b"Traceback" not in err
    assert (place.look("left-alone")["total"], place.look("left-alone")["open"]) == (20, 20)
    flag.touch()
    back = place.ekiden("attach", "left-alone", "--keep-order")
    assert (back.code, back.out.split()) == (0, [str(n).encode() for n in range(20)])


def test_a_second_ctrl_c_cancels_the_run(place: Place) -> None:
    running = place.start("run", "--name", "twice", "sleep", ":::", "3600", "3601", "3602")
    until(lambda: len(place.cli.look("jobs", run="twice")["jobs"]) == 3, "the run to begin")
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    while b"detaching" not in running.stderr.readline():
        pass
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=WAIT_S)

    assert running.returncode == 130
    assert b"run twice is cancelled: " in err
    until(lambda: place.look("twice")["cancelled"] == 3, "the jobs to be gone")


@pytest.mark.slow
def test_a_run_goes_on_when_its_broker_was_killed_and_is_back(own: Cli, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    place = Place(own, here)
    own.start_up("--slots", "2")
    flag = here / "flag"
    script = f"until [ -e {flag} ]; do sleep 0.02; done; echo $1"
    numbers = [str(number) for number in range(100)]
    running = place.start(
        "run", "-k", "--name", "survivor", "sh", "-c", script, "sh", ":::", *numbers
    )
    until(lambda: place.cli.look("stats")["jobs"]["leased"] > 0, "the run to begin")
    assert own.up is not None
    own.up.kill()
    own.up.communicate()
    flag.touch()
    own.start_up("--slots", "2", port=own.address.rpartition(":")[2])
    out, err = running.communicate(timeout=WAIT_S * 2)

    assert (running.returncode, out.decode().split()) == (0, numbers), err


def test_the_same_name_joins_the_run_and_other_inputs_are_refused(place: Place) -> None:
    script = 'printf . >>"$1"'
    count = place.folder / "count"
    words = ("run", "--no-save", "--no-ship", "--name", "joined", "sh", "-c", script, "sh", ":::")

    assert place.ekiden(*words, str(count)).code == 0
    assert place.ekiden(*words, str(count)).code == 0
    assert count.read_text() == "."
    refused = place.ekiden(*words, str(count), "another")
    assert refused.code == 4
    assert "run 'joined' is there already, with another program" in refused.err


def test_resumed_by_name_what_failed_runs_again_and_what_is_done_does_not(place: Place) -> None:
    flag, count = place.folder / "flag", place.folder / "count"
    script = f"printf $1 >>{count}; [ $1 = a ] || [ -e {flag} ]"
    words = ("--no-save", "--name", "resumed", "sh", "-c", script, "sh", ":::", "a", "b")

    assert place.ekiden("run", *words).code == 1
    flag.touch()
    assert place.ekiden("run", "--resume", *words).code == 0

    assert sorted(count.read_text()) == ["a", "b", "b"]


def test_resumed_by_log_what_is_done_is_left_out(place: Place) -> None:
    flag = place.folder / "flag"
    script = f"[ $1 = a ] || [ -e {flag} ]"
    words = ("--no-save", "--joblog", "log", "--resume", "sh", "-c", script, "sh", ":::", "a", "b")

    assert place.ekiden("run", *words).code == 1
    flag.touch()
    jobs, summary = place.typed("run", *words)
    everything = place.ekiden("run", *words)

    assert (list(jobs), summary.total, summary.skipped) == ([2], 1, 1)
    assert everything.code == 0
    assert "nothing to run: by log all inputs are done" in everything.err
    head, *lines = (place.folder / "log").read_text().splitlines()
    assert head.split("\t")[0::8] == ["Seq", "Command"]
    assert sorted((line.split("\t")[0], line.split("\t")[6]) for line in lines) == [
        ("1", "0"), ("2", "0"), ("2", "1"),
    ]  # fmt: skip


def test_a_code_that_counts_as_done_brings_everything_back(place: Place) -> None:
    script = "echo said; echo part > partial; exit 3"

    done = place.ekiden("run", "--ok-codes", "0,3", "sh", "-c", script, ":::", "1")

    assert done.code == 0
    assert (place.out / "1" / "partial").read_text() == "part\n"
    assert (place.out / "1" / "stdout").read_text() == "said\n"
    assert place.ekiden("run", "--ok-codes", "x", "true", ":::", "1").code == 2


def test_a_log_tells_two_files_of_one_name_apart(place: Place) -> None:
    for folder, text in (("a", "good"), ("b", "bad")):
        (place.folder / folder).mkdir()
        (place.folder / folder / "x.txt").write_text(text)
    words = ("--no-save", "--joblog", "log", "--resume", "grep", "good")
    assert place.ekiden("run", *words, ":::", "a/x.txt", "b/x.txt").code == 1
    (place.folder / "b" / "x.txt").write_text("good by now")

    jobs, summary = place.typed("run", *words, ":::", "b/x.txt", "a/x.txt")

    assert [job.input for job in jobs.values()] == [["b/x.txt"]]
    assert (summary.done, summary.skipped) == (1, 1)


def test_what_an_earlier_run_saved_does_not_stand_beside_a_failure(place: Place) -> None:
    script = 'echo said; cp "$1" copy; grep -q good "$1"'
    words = ("run", "sh", "-c", script, "sh", ":::", "x.txt")
    (place.folder / "x.txt").write_text("good")
    assert place.ekiden(*words).code == 0
    (place.out / "x.txt" / "mine").write_text("not of a run")
    (place.folder / "x.txt").write_text("bad")

    assert place.ekiden(*words).code == 1

    kept = {path.name for path in (place.out / "x.txt").iterdir()}
    assert kept == {"mine", "stderr"}


# ------------------------------------------------------------------ looking at runs and jobs


def test_runs_are_listed_shown_and_cancelled(place: Place) -> None:
    place.ekiden("run", "--name", "seen", "./price.sh", ":::", "trades/a.json", "trades/bad.json")

    listed = place.ekiden("runs", "list", "--json").out.splitlines()
    found = {run.name: run for run in (msgspec.json.decode(line, type=Run) for line in listed)}
    assert (found["seen"].total, found["seen"].done, found["seen"].failed) == (2, 1, 1)
    shown = place.ekiden("runs", "show", "seen")
    assert "1 done · 1 failed · 0 cancelled · 0 open" in shown.out.decode()
    assert "seen.2  trades/bad.json" in shown.out.decode()
    (failed,) = msgspec.json.decode(place.ekiden("runs", "show", "--json", "seen").out)[
        "failed_jobs"
    ]
    assert (failed["id"], failed["input"]) == ("seen.2", ["trades/bad.json"])
    assert b"seen" in place.ekiden("runs", "list").out
    for verb in ("show", "cancel"):
        assert place.ekiden("runs", verb, "unseen").code == 4
    assert place.ekiden("attach", "unseen").code == 4


def test_logs_follow_a_job_while_it_runs(place: Place) -> None:
    flag = place.folder / "flag"
    script = f"echo first; echo trouble >&2; until [ -e {flag} ]; do sleep 0.02; done; echo last"
    place.ekiden("run", "--detach", "--name", "followed", "sh", "-c", script, ":::", "x")
    following = place.start("logs", "-f", "followed.1")
    assert following.stdout is not None
    assert following.stdout.readline() == b"first\n"
    sofar = place.ekiden("logs", "followed.1")
    assert (sofar.code, sofar.out, sofar.err) == (0, b"first\n", "trouble\n")
    flag.touch()
    out, err = following.communicate(timeout=WAIT_S)

    assert (following.returncode, out, err) == (0, b"last\n", b"trouble\n")
    after = place.ekiden("logs", "followed.1", "--stdout")
    assert (after.code, after.out, after.err) == (0, b"first\nlast\n", "")


def test_logs_of_a_job_that_failed_say_how(place: Place) -> None:
    place.ekiden("run", "--name", "failing", "./price.sh", ":::", "trades/bad.json")

    outcome = place.ekiden("logs", "-f", "failing.1")

    assert (outcome.code, outcome.out) == (1, b"")
    assert "attempt 1: exit_code on " in outcome.err
    assert "  a strike of -1 makes no sense\n" in outcome.err
    assert place.ekiden("logs", "failing.1").code == 0
    assert place.ekiden("logs", "nobody").code == 4


@pytest.mark.parametrize(
    "words",
    [["run"], ["attach"], ["logs"], ["runs", "list"], ["runs", "show"], ["runs", "cancel"]],
)
def test_every_command_explains_itself_and_speaks_json(place: Place, words: list[str]) -> None:
    outcome = place.ekiden(*words, "--help")

    assert outcome.code == 0
    assert b"--json" in outcome.out and b"$ ekiden" in outcome.out
