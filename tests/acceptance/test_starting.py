"""Starting and stopping, and who is let in."""

from __future__ import annotations

import json
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest
from tests.acceptance import schemas as s
from tests.acceptance.cli import WAIT_S, Cli, read_json, until


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
    words = ("--port", "0", "--data", str(grid.data))

    assert grid.refused("broker", *words) == "folder_in_use"
    assert grid.refused("up", *words) == "folder_in_use"


def test_a_port_in_use_is_refused(grid: Cli, tmp_path: Path) -> None:
    port = grid.address.rpartition(":")[2]
    words = ("--port", port, "--data", str(tmp_path / "d"))

    assert grid.refused("broker", *words) == "cannot_listen"
    assert grid.refused("up", *words) == "cannot_listen"
    assert grid.refused("leader", port, *words[2:]) == "cannot_listen"


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "/dev/null"],
        ["--data", "/proc/none"],
        ["--advertise", "nowhere"],
        ["--policy", "a.b=random"],
        ["--policy", "a..b=least-load"],
        ["--group", "two words"],
        ["--bind", "256.1.1.1"],
    ],
)
def test_a_broker_that_cannot_be_meant_says_why_once(own: Cli, words: list[str]) -> None:
    outcome = own.run("broker", "--port", "0", "--data", str(own.data), *words)

    assert outcome.code in (2, 4)
    assert outcome.out == b""
    *before, last = outcome.err.splitlines()
    assert last.startswith("ekiden: ")
    # A warning may come first, such as that of listening for others; not the reason itself.
    assert not [line for line in before if " warning " not in line]


def test_a_worker_without_the_right_key_ends_with_4(grid: Cli, tmp_path: Path) -> None:
    wrong = tmp_path / "key"
    wrong.write_text("00" * 32)
    wrong.chmod(0o600)

    outcome = grid.run("worker", "--key-file", str(wrong))

    assert outcome.code == 4
    assert "Traceback" not in outcome.err


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
        until(lambda: not own.look("stats")["workers"]["connected"], "the worker to leave")
    finally:
        broker.terminate()
        broker.communicate(timeout=WAIT_S)
    assert broker.returncode == 0


def test_up_says_how_to_connect(own: Cli) -> None:
    process = own.start("up", "--port", "0", "--data", str(own.data), "--slots", "1")
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert "ekiden is up on 127.0.0.1:" in first
        address = first.split()[4].rstrip(":")
        assert f"export EKIDEN_CONNECT={address}" in process.stdout.readline()
        outcome = own.run("submit", "--wait", "echo", "-p", "hi", "--connect", address)
        assert outcome.out == b"hi"
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "Ctrl-C again" in err


def test_a_second_ctrl_c_does_not_wait_for_running_jobs(own: Cli) -> None:
    own.up = own.start("up", "--port", "0", "--data", str(own.data), "--slots", "1")
    assert own.up.stdout is not None
    assert own.up.stderr is not None
    own.environment["EKIDEN_CONNECT"] = own.up.stdout.readline().split()[4].rstrip(":")
    own.run("submit", "sleep", "--id", "long", "--payload", "3600")
    until(
        lambda: any(worker["running"] for worker in own.look("workers")["workers"]),
        "the job to run",
    )

    own.up.send_signal(signal.SIGINT)
    assert "Ctrl-C again" in own.up.stderr.readline()
    own.up.send_signal(signal.SIGINT)
    assert own.up.stderr.readline() == "stopping at once\n"
    own.up.communicate(timeout=WAIT_S)

    assert own.up.returncode == 0
    own.start_up("--slots", "1")
    assert own.typed(s.Shown, "jobs", "show", "long").state in ("leased", "queued", "running")


def test_a_waiting_command_outlives_a_restart_of_the_broker(own: Cli) -> None:
    own.start_up("--slots", "1")
    port = own.address.rpartition(":")[2]
    own.run("submit", "nobody", "--id", "survivor")
    waiting = own.start("wait", "survivor", "--json")
    until(lambda: own.look("stats")["clients"] == 2, "the waiting client to connect")
    assert own.up is not None
    own.up.kill()
    own.up.communicate()

    own.start_up("--slots", "1", port=port)
    own.run("jobs", "cancel", "survivor")
    out, _ = waiting.communicate(timeout=WAIT_S)

    assert json.loads(out)["state"] == "cancelled"
    assert waiting.returncode == 1


def test_a_worker_waits_for_a_broker_that_is_not_there_yet(own: Cli) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    own.environment["EKIDEN_CONNECT"] = f"127.0.0.1:{port}"
    worker = own.start("worker", "--id", "early", "--slots", "1")
    assert worker.stderr is not None
    assert "broker.unavailable" in worker.stderr.readline()
    broker = own.start("broker", "--port", port, "--data", str(own.data), "--json")
    try:
        read_json(broker)
        assert own.typed(s.Done, "submit", "--wait", "echo").worker == "early"
    finally:
        worker.send_signal(signal.SIGINT)
        worker.communicate(timeout=WAIT_S)
        broker.send_signal(signal.SIGINT)
        broker.communicate(timeout=WAIT_S)
    assert (worker.returncode, broker.returncode) == (0, 0)
