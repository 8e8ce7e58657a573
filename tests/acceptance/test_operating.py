"""Workers, stats, published messages, the journal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.acceptance import schemas as s
from tests.acceptance.cli import EKIDEN, WAIT_S, Cli, read_json


def test_a_drained_worker_gets_nothing_until_it_is_resumed(grid: Cli) -> None:
    (worker,) = grid.typed(s.Workers, "workers", "list").workers
    assert worker.slots == 2
    assert "job.assign.echo" in worker.patterns

    assert grid.typed(s.WorkerState, "workers", "drain", worker.id).state == "draining"
    grid.run("submit", "echo", "--id", "patient")
    assert grid.run("wait", "patient", "--timeout", "0.3").code == 3
    assert grid.json("jobs", "show", "patient")["why"]
    assert b"draining" in grid.run("workers", "list").out

    assert grid.typed(s.WorkerState, "workers", "resume", worker.id).state == "ready"
    assert grid.run("wait", "patient").code == 0


def test_stats_are_a_stable_document_and_a_page_for_people(grid: Cli) -> None:
    stats = grid.typed(s.Stats, "stats")

    assert (stats.workers.connected, stats.sync) == (1, "always")
    shown = grid.run("stats").out.decode()
    assert "jobs" in shown
    assert "always" in shown


def test_a_published_message_reaches_a_subscriber(grid: Cli) -> None:
    listener = grid.start("sub", "prices.>", "--count", "2", "--json")
    assert listener.stderr is not None
    assert "listening" in listener.stderr.readline()

    assert grid.typed(s.Published, "pub", "prices.renewed", "today").bytes == 5
    assert grid.run("pub", "other.subject", "not for them").code == 0
    assert grid.run("pub", "prices.eu.closed", "-", stdin=b"\xff").code == 0

    out, _ = listener.communicate(timeout=WAIT_S)
    assert [msgspec.json.decode(line, type=s.Message) for line in out.splitlines()] == [
        s.Message("prices.renewed", "today"),
        s.Message("prices.eu.closed", {"base64": "/w=="}),
    ]
    assert listener.returncode == 0


def test_the_journal_of_a_running_broker_can_be_told_and_verified(grid: Cli) -> None:
    grid.run("submit", "--wait", "echo", "--id", "storied", "--payload", "once upon")

    told = grid.json_lines("log", "dump", str(grid.data), "--job", "storied")
    report = grid.typed(s.Report, "log", "verify", str(grid.data))

    assert [line["event"] for line in told] == ["enqueue", "assign", "ack"]
    assert report.ok
    assert report.problems == []
    assert b"all sound" in grid.run("log", "verify", str(grid.data)).out


def test_the_version_names_the_formats(grid: Cli) -> None:
    assert grid.typed(s.Version, "version").protocol >= 1


def test_stats_can_be_watched_until_interrupted(grid: Cli) -> None:
    watching = grid.start("stats", "--watch", "--interval", "0.1", "--json")
    assert watching.stdout is not None
    indexes = [json.loads(watching.stdout.readline())["index"] for _ in range(3)]
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=WAIT_S)

    assert indexes == sorted(indexes)
    assert (watching.returncode, err) == (130, "")


def test_a_damaged_journal_is_reported_with_its_place_and_not_served(own: Cli) -> None:
    own.start_up("--slots", "1")
    own.run("submit", "echo", "--count", "50", "--payload", "x" * 100)
    own.run("submit", "--wait", "echo")
    assert own.up is not None
    own.up.kill()  # so that no snapshot is taken on leaving
    own.up.communicate()
    (segment,) = own.data.glob("segment-*.log")
    bytes_ = bytearray(segment.read_bytes())
    bytes_[1000] ^= 1
    segment.write_bytes(bytes_)

    report = own.typed(s.Report, "log", "verify", str(own.data), code=4)
    assert not report.ok
    assert report.problems[0].file == segment.name
    assert own.refused("log", "dump", str(own.data)) == "corrupt"
    assert own.refused("broker", "--port", "0", "--data", str(own.data)) == "corrupt"
    assert segment.read_bytes() == bytes(bytes_)


def test_a_sync_that_fails_ends_the_broker_and_nothing_unsynced_is_promised(own: Cli) -> None:
    broken = own.folder / "broken"
    script = (
        "import errno, os, sys; from ekiden.cli.main import main; sync = os.fdatasync\n"
        "def failing(fd):\n"
        f"    if os.path.exists({str(broken)!r}): raise OSError(errno.EIO, 'input/output error')\n"
        "    sync(fd)\n"
        "os.fdatasync = failing\n"
        f"sys.exit(main(['broker', '--port', '0', '--data', {str(own.data)!r}, '--json']))"
    )
    broker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=own.environment,
    )  # fmt: skip
    own.environment["EKIDEN_CONNECT"] = str(read_json(broker)["address"])
    own.typed(s.Accepted, "submit", "echo", "--id", "before")
    broken.touch()
    submitting = own.start("submit", "echo", "--id", "after")
    _, err = broker.communicate(timeout=WAIT_S)
    submitting.kill()
    out, _ = submitting.communicate()

    assert (broker.returncode, out) == (4, "")
    assert json.loads(err.splitlines()[-1])["error"]["code"] == "storage"
    own.start_up("--slots", "1")
    assert own.run("wait", "before").code == 0


def test_events_can_be_picked_from_the_journal(grid: Cli) -> None:
    grid.run("submit", "--wait", "fail", "--id", "sad", "--max-attempts", "2")
    grid.run("submit", "nobody", "--id", "unwanted")
    grid.run("jobs", "cancel", "unwanted")

    def events(*words: str) -> list[s.Event]:
        out = grid.run("log", "dump", str(grid.data), *words).out
        return [msgspec.json.decode(line, type=s.Event) for line in out.splitlines()]

    told = [line.event for line in events("--job", "sad")]
    assert told == ["enqueue", "assign", "assign_failed", "assign", "dlq"]
    assert [line.job for line in events("--event", "cancel")] == ["unwanted"]
    last = events("--job", "sad")[-1].index
    assert {line.event for line in events("--from", str(last), "--job", "sad")} == {"dlq"}


@pytest.mark.parametrize("words", [["jobs", "list"], ["jobs", "list", "--json"], ["log", "dump"]])
def test_a_reader_that_leaves_ends_the_command_quietly(grid: Cli, words: list[str]) -> None:
    folder = [str(grid.data)] if words[0] == "log" else []
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = subprocess.run(
            [*EKIDEN, *words, *folder], stdout=gone, stderr=subprocess.PIPE, env=grid.environment,
            timeout=WAIT_S, check=False,
        )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, b"")


def test_output_that_cannot_be_written_is_an_error_and_no_traceback(grid: Cli) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*EKIDEN, "stats"], stdout=full, stderr=subprocess.PIPE, env=grid.environment,
            timeout=WAIT_S, check=False,
        )  # fmt: skip

    assert done.returncode == 4
    assert done.stderr == b"ekiden: no space left on device\n"
