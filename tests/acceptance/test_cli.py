"""The command line end to end: real processes, real sockets, a data folder of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

WAIT_S = 30.0
EKIDEN = [sys.executable, "-m", "ekiden.cli.main"]


class Cli:
    """Runs commands against one grid, in a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EKIDEN_")},
            "EKIDEN_STATE": str(folder / "state"),
            "NO_COLOR": "1",
        }
        self.up: subprocess.Popen[str] | None = None
        self.address = ""

    def run(self, *words: str, stdin: bytes = b"", **environment: str) -> Outcome:
        done = subprocess.run(
            [*EKIDEN, *words],
            input=stdin,
            capture_output=True,
            env={**self.environment, **environment},
            timeout=WAIT_S * 2,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr.decode())

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*EKIDEN, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def start_up(self, *words: str, port: str = "0") -> dict[str, Any]:
        """`ekiden up`, until it says that it is ready and its worker has joined."""
        self.up = self.start("up", "--json", "--port", port, "--data", str(self.data), *words)
        ready = read_json(self.up)
        self.address = self.environment["EKIDEN_CONNECT"] = str(ready["address"])
        until(lambda: self.json("stats")["workers"]["connected"] == 1, "a worker to join")
        return ready

    def stop_up(self) -> int:
        assert self.up is not None
        self.up.send_signal(signal.SIGTERM)
        self.up.communicate(timeout=WAIT_S)
        code, self.up = self.up.returncode, None
        return code

    def json(self, *words: str) -> Any:
        outcome = self.run(*words, "--json")
        assert outcome.code == 0, outcome
        return json.loads(outcome.out)

    def json_lines(self, *words: str) -> list[Any]:
        outcome = self.run(*words, "--json")
        assert outcome.code == 0, outcome
        return [json.loads(line) for line in outcome.out.splitlines()]


class Outcome:
    def __init__(self, code: int, out: bytes, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.err.splitlines()[-1])["error"]
        return found

    def __repr__(self) -> str:
        return f"<exit {self.code}\nstdout: {self.out!r}\nstderr: {self.err}>"


def read_json(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The first line on stdout, or why there is none."""
    timer = threading.Timer(WAIT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        raise AssertionError(f"ended with {process.wait()}: {process.communicate()[1]}")
    found: dict[str, Any] = json.loads(line)
    return found


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.02)


def _clean(cli: Cli) -> None:
    if cli.up is not None:
        cli.up.kill()
        cli.up.communicate()


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A grid that the tests of this module share; each uses ids of its own."""
    cli = Cli(tmp_path_factory.mktemp("grid"))
    try:
        cli.start_up("--slots", "2")
        yield cli
    finally:
        _clean(cli)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cli]:
    """For a test that starts and stops its own grid."""
    cli = Cli(tmp_path)
    try:
        yield cli
    finally:
        _clean(cli)


# ------------------------------------------------------------------ submit and wait


def test_submit_and_wait_prints_the_output_and_nothing_else(grid: Cli) -> None:
    outcome = grid.run("submit", "--wait", "echo", "--payload", "hello, grid")

    assert (outcome.code, outcome.out, outcome.err) == (0, b"hello, grid", "")


def test_a_payload_goes_through_unchanged_from_stdin_and_from_a_file(grid: Cli) -> None:
    data = bytes(range(256)) * 100
    file = grid.folder / "input.bin"
    file.write_bytes(data)

    assert grid.run("submit", "--wait", "echo", "--payload", "-", stdin=data).out == data
    assert grid.run("submit", "--wait", "echo", "--payload", f"@{file}").out == data


def test_words_after_the_double_dash_are_the_jobs_arguments(grid: Cli) -> None:
    outcome = grid.run("submit", "--wait", "sleep", "--", "0.01")

    assert outcome.out == b"slept 0.01 s"


def test_a_job_can_be_waited_for_by_its_id_from_another_process(grid: Cli) -> None:
    job_id = grid.run("submit", "sha256", "--payload", "abc").out.decode().strip()
    outcome = grid.run("wait", job_id)

    assert outcome.code == 0
    assert outcome.out.startswith(b"ba7816bf")
    assert grid.json("jobs", "show", job_id)["state"] == "done"


def test_a_result_as_json_says_who_ran_it_and_when(grid: Cli) -> None:
    result = grid.json("submit", "--wait", "echo", "--payload", "x", "--id", "timed")

    assert {name: result[name] for name in ("id", "state", "output", "attempt", "exit_code")} == {
        "id": "timed",
        "state": "done",
        "output": "x",
        "attempt": 1,
        "exit_code": 0,
    }
    assert result["submitted"] <= result["leased"] <= result["finished"]
    assert result["worker"]


def test_many_jobs_of_one_command_have_numbered_ids_and_ordered_outputs(grid: Cli) -> None:
    ids = grid.run("submit", "echo", "--id", "many", "--count", "3", "--payload", "m").out.split()
    outcome = grid.run("wait", "many-3", "many-1", "many-2")

    assert ids == [b"many-1", b"many-2", b"many-3"]
    assert (outcome.code, outcome.out) == (0, b"m\nm\nm\n")


def test_the_same_id_is_the_same_job_and_other_content_is_refused(grid: Cli) -> None:
    for _ in range(2):
        outcome = grid.run("submit", "--wait", "echo", "--id", "same", "--payload", "one")
        assert (outcome.code, outcome.out) == (0, b"one")
    outcome = grid.run("submit", "--wait", "echo", "--id", "same", "--payload", "two", "--json")

    assert outcome.code == 4
    assert outcome.error["code"] == "conflict"


def test_waiting_ends_when_asked_to_and_the_job_goes_on(grid: Cli) -> None:
    grid.run("submit", "echo", "--id", "later", "--delay", "3600")
    outcome = grid.run("wait", "later", "--timeout", "0.1", "--json")

    assert outcome.code == 3
    assert outcome.error["code"] == "timeout"
    assert grid.json("jobs", "show", "later")["state"] == "delayed"
    assert grid.json("jobs", "cancel", "later")["cancelled"] == 1


# ------------------------------------------------------------------ dead letters


def test_a_failed_job_ends_with_1_and_can_be_inspected_replayed_and_purged(grid: Cli) -> None:
    words = ("--id", "broken", "--max-attempts", "1", "--payload", "boom")
    outcome = grid.run("submit", "--wait", "fail", *words)
    assert (outcome.code, outcome.out) == (1, b"")
    assert "boom" in outcome.err
    assert "ekiden jobs show broken" in outcome.err

    shown = grid.run("dlq", "show", "broken")
    assert b"handler_error" in shown.out
    assert "ekiden dlq replay broken" in shown.err
    assert [job["id"] for job in grid.json_lines("dlq", "list", "--all")] == ["broken"]

    assert grid.json("dlq", "replay", "broken")["replayed"] == 1
    assert grid.run("wait", "broken").code == 1
    job = grid.json("jobs", "show", "broken")
    assert (job["state"], job["generation"], len(job["causes"])) == ("failed", 1, 2)

    assert grid.json("dlq", "purge", "--subject", "job.assign.fail")["purged"] == 1
    assert grid.run("jobs", "show", "broken", "--json").error["code"] == "unknown_job"
    assert "no dead letters" in grid.run("dlq", "list").err


def test_a_change_of_unknown_jobs_is_refused(grid: Cli) -> None:
    for words in (("jobs", "cancel"), ("dlq", "replay"), ("dlq", "purge")):
        outcome = grid.run(*words, "nobody")
        assert outcome.code == 4
        assert "nobody" in outcome.err


# ------------------------------------------------------------------ jobs


def test_jobs_are_listed_in_pages_and_cancelled_by_filter(grid: Cli) -> None:
    words = ("--id", "paged", "--count", "5", "--delay", "3600", "--run", "pages")
    grid.run("submit", "echo", *words)
    listing = ("jobs", "list", "--run", "pages")

    first = [job["id"] for job in grid.json_lines(*listing, "--limit", "2")]
    rest = [job["id"] for job in grid.json_lines(*listing, "--after", first[-1])]
    assert sorted(first + rest) == [f"paged-{number}" for number in range(1, 6)]
    assert [job["id"] for job in grid.json_lines(*listing, "--all")] == first + rest
    assert b"paged-1" in grid.run(*listing).out

    assert grid.json("jobs", "cancel", "--run", "pages")["cancelled"] == 5
    outcome = grid.run("wait", "paged-1", "--json")
    assert (outcome.code, outcome.error["code"]) == (1, "job_cancelled")


def test_a_running_job_is_stopped_by_cancel(grid: Cli) -> None:
    grid.run("submit", "sleep", "--id", "endless", "--payload", "3600")
    until(lambda: bool(grid.json("jobs", "show", "endless")["worker"]), "the job to be leased")

    answer = grid.json("jobs", "cancel", "endless")

    assert answer["cancelling"] + answer["cancelled"] == 1
    assert grid.run("wait", "endless").code == 1


def test_an_unknown_job_is_refused_with_what_to_do(grid: Cli) -> None:
    for words in (("jobs", "show", "nobody"), ("wait", "nobody")):
        outcome = grid.run(*words, "--json")
        assert outcome.code == 4
        assert outcome.error["code"] == "unknown_job"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["submit", "echo", "--id", "no spaces"], "bad_id"),
        (["submit", "echo", "--subject", "a..b", "--wait"], "bad_subject"),
        (["submit", "echo", "--subject", "a.*", "--wait"], "bad_subject"),
        (["workers", "drain", "nobody"], "unknown_worker"),
    ],
)
def test_bad_input_is_refused_with_its_code(grid: Cli, words: list[str], code: str) -> None:
    outcome = grid.run(*words, "--json")

    assert outcome.code == 4, outcome
    assert outcome.error["code"] == code
    assert outcome.error["message"]


def test_a_payload_over_the_limit_is_refused(grid: Cli) -> None:
    outcome = grid.run("submit", "echo", "--payload", "-", "--json", stdin=bytes(600 << 10))

    assert (outcome.code, outcome.error["code"]) == (4, "too_large")


# ------------------------------------------------------------------ workers, stats, relay, log


def test_a_drained_worker_gets_nothing_until_it_is_resumed(grid: Cli) -> None:
    (worker,) = grid.json("workers", "list")["workers"]
    assert worker["slots"] == 2
    assert "job.assign.echo" in worker["patterns"]

    assert grid.json("workers", "drain", worker["id"])["state"] == "draining"
    grid.run("submit", "echo", "--id", "patient")
    assert grid.run("wait", "patient", "--timeout", "0.3").code == 3
    assert grid.json("jobs", "show", "patient")["why"]
    assert b"draining" in grid.run("workers", "list").out

    assert grid.json("workers", "resume", worker["id"])["state"] == "ready"
    assert grid.run("wait", "patient").code == 0


def test_stats_are_a_stable_document_and_a_page_for_people(grid: Cli) -> None:
    stats = grid.json("stats")

    assert {"group", "broker", "sync", "jobs", "queues", "workers", "journal"} <= set(stats)
    assert stats["workers"]["connected"] == 1
    shown = grid.run("stats").out.decode()
    assert "jobs" in shown
    assert "always" in shown


def test_a_published_message_reaches_a_subscriber(grid: Cli) -> None:
    listener = grid.start("sub", "prices.>", "--count", "2", "--json")
    assert listener.stderr is not None
    assert "listening" in listener.stderr.readline()

    assert grid.run("pub", "prices.renewed", "today").code == 0
    assert grid.run("pub", "other.subject", "not for them").code == 0
    assert grid.run("pub", "prices.eu.closed", "-", stdin=b"\xff").code == 0

    out, _ = listener.communicate(timeout=WAIT_S)
    assert [json.loads(line) for line in out.splitlines()] == [
        {"subject": "prices.renewed", "payload": "today"},
        {"subject": "prices.eu.closed", "payload": {"base64": "/w=="}},
    ]
    assert listener.returncode == 0


def test_the_journal_of_a_running_broker_can_be_told_and_verified(grid: Cli) -> None:
    grid.run("submit", "--wait", "echo", "--id", "storied", "--payload", "once upon")

    told = grid.json_lines("log", "dump", str(grid.data), "--job", "storied")
    report = grid.json("log", "verify", str(grid.data))

    assert [line["event"] for line in told] == ["enqueue", "assign", "ack"]
    assert report["ok"] is True
    assert report["problems"] == []


# ------------------------------------------------------------------ who may, and who is there


def test_without_the_key_nothing_is_said(grid: Cli, tmp_path: Path) -> None:
    wrong = tmp_path / "key"
    wrong.write_text("00" * 32)
    wrong.chmod(0o600)

    stranger = grid.run("stats", "--json", EKIDEN_STATE=str(tmp_path / "elsewhere"))
    forger = grid.run("stats", "--json", "--key-file", str(wrong))
    copied = grid.run("stats", "--json", "--key-file", str(grid.data / "key"))

    assert (stranger.code, stranger.error["code"]) == (4, "unauthenticated")
    assert (forger.code, forger.error["code"]) == (4, "unauthenticated")
    assert copied.code == 0


def test_a_peer_that_is_no_broker_counts_as_nobody(grid: Cli) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        def babble() -> None:
            try:
                while True:
                    peer, _ = listener.accept()
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    peer.close()
            except OSError:
                return  # The test is over.

        threading.Thread(target=babble, daemon=True).start()
        outcome = grid.run(
            *("submit", "echo", "--json", "--connect-timeout", "1"),
            *("--connect", f"127.0.0.1:{port}", "--key-file", str(grid.data / "key")),
        )
        listener.shutdown(socket.SHUT_RDWR)

    assert (outcome.code, outcome.error["code"]) == (3, "unreachable")


def test_a_data_folder_in_use_is_refused(grid: Cli) -> None:
    outcome = grid.run("broker", "--port", "0", "--data", str(grid.data), "--json")

    assert outcome.code == 4
    assert outcome.error["code"] == "folder_in_use"


def test_a_port_in_use_is_refused(grid: Cli, tmp_path: Path) -> None:
    port = grid.address.rpartition(":")[2]
    outcome = grid.run("broker", "--port", port, "--data", str(tmp_path / "d"), "--json")

    assert outcome.code == 4
    assert port in outcome.error["message"]


# ------------------------------------------------------------------ starting and stopping


def test_a_grid_stops_in_good_order_and_finds_its_jobs_again(own: Cli) -> None:
    own.start_up("--slots", "1")
    own.run("submit", "echo", "--id", "kept", "--payload", "kept", "--delay", "3600")
    own.run("submit", "--wait", "echo", "--id", "settled", "--payload", "done before")
    assert own.up is not None
    (worker,) = psutil.Process(own.up.pid).children()

    assert own.stop_up() == 0
    assert not worker.is_running()

    own.start_up("--slots", "1")
    assert own.json("jobs", "show", "kept")["state"] == "delayed"
    assert own.run("wait", "settled").out == b"done before"
    assert own.stop_up() == 0


def test_a_killed_grid_leaves_no_worker_behind(own: Cli) -> None:
    own.start_up("--slots", "1")
    assert own.up is not None
    (worker,) = psutil.Process(own.up.pid).children()

    own.up.kill()

    until(lambda: not _lives(worker), "the worker to notice")


def _lives(process: psutil.Process) -> bool:
    # Nobody waits for it any more, so it may stay as a zombie where process 1 does not reap.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_handlers_of_a_file_are_served(own: Cli) -> None:
    file = own.folder / "pricing.py"
    file.write_text(
        "import ekiden\n"
        "worker = ekiden.Worker()\n"
        "@worker.handler('job.assign.price')\n"
        "def price(job):\n"
        "    return {'price': 2 * job.json()['spot'], 'attempt': job.attempt}\n"
    )
    own.start_up("--slots", "1", "--handlers", str(file))

    result = own.json("submit", "--wait", "price", "--payload", '{"spot": 21}')

    assert json.loads(result["output"]) == {"price": 42, "attempt": 1}
    assert own.stop_up() == 0


def test_handlers_that_cannot_be_loaded_end_the_grid_with_2(own: Cli) -> None:
    file = own.folder / "broken.py"
    file.write_text("def oops(:")
    process = own.start(
        *("up", "--port", "0", "--data", str(own.data), "--handlers", str(file)),
    )
    _, err = process.communicate(timeout=WAIT_S)

    assert process.returncode == 2
    assert "cannot load handlers" in err


def test_broker_and_worker_apart_and_the_alias_leader(own: Cli) -> None:
    broker = own.start("leader", "0", "--data", str(own.data), "--json")
    try:
        address = read_json(broker)["address"]
        own.environment["EKIDEN_CONNECT"] = str(address)
        worker = own.start("worker", "--id", "w1", "--slots", "1", "--label", "gpu=a100", "--json")
        try:
            fits = ("submit", "--wait", "echo", "--payload", "x", "--needs", "label.gpu=a100")
            assert own.json(*fits)["worker"] == "w1"
            own.run("submit", "echo", "--id", "picky", "--needs", "label.gpu=none")
            assert own.run("wait", "picky", "--timeout", "0.2").code == 3
            assert own.json("jobs", "show", "picky")["state"] == "queued"
        finally:
            worker.terminate()
            worker.communicate(timeout=WAIT_S)
        assert worker.returncode == 0
        until(lambda: not own.json("stats")["workers"]["connected"], "the worker to leave")
    finally:
        broker.terminate()
        broker.communicate(timeout=WAIT_S)
    assert broker.returncode == 0
