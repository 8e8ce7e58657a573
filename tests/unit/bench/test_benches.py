"""Every bench runs from end to end in small, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ekiden.bench import idle, latency, noop, recovery, scale, soak
from ekiden.bench.peers import find_prototype
from ekiden.bench.processes import BenchFailed, Crew


def test_a_crew_ends_its_children_and_theirs_and_removes_its_folder() -> None:
    parent = (
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print(json.dumps({'child': child.pid}), flush=True)\n"
        "input()"
    )
    with Crew() as crew:
        talker = crew.start_python("talker", "-c", parent, talks=True)
        grandchild = psutil.Process(talker.hear(20.0)["child"])

    assert not talker.running()
    assert psutil.wait_procs([grandchild], timeout=10)[1] == []
    assert not crew.folder.exists()


def test_a_child_that_dies_is_quoted() -> None:
    with Crew() as crew:
        child = crew.start_python("child", "-c", "raise SystemExit('no disk here')", talks=True)

        with pytest.raises(BenchFailed, match="child ended with 1: no disk here"):
            child.hear(20.0)


def test_the_prototype_carries_every_job() -> None:
    script = find_prototype()
    assert script is not None
    with Crew() as crew:
        leader = crew.start_python("leader", script, "leader", crew.folder / "log", talks=True)
        port = str(leader.hear(20.0)["port"])
        crew.start_python("worker", script, "worker", port)
        client = crew.start_python("client", script, "client", port, talks=True)
        client.hear(20.0)

        assert client.ask({"jobs": 3000}, 30.0)["seconds"] > 0
        assert len(client.ask({"one_by_one": 3}, 30.0)["ms"]) == 3


def test_noop_compares_every_mode_with_every_peer_that_is_here(tmp_path: Path) -> None:
    found = noop.run(rounds=1, seconds=0.1, memory_bytes=1 << 20, folder=tmp_path)

    systems = {row["system"]: row for row in found["rows"]}
    assert set(systems) | set(found["absent"]) >= {
        noop.OURS,
        noop.FRAMES,
        noop.CLIENTS,
        "prototype",
    }
    assert all(row["jobs_per_s"] > 0 for row in systems.values())
    assert all(row["lowest"] <= row["ratio"] <= row["highest"] for row in found["ratios"])
    _check_left(found, tmp_path)


def test_latency_is_measured_beside_the_disk(tmp_path: Path) -> None:
    found = latency.run(jobs=40, rounds=2, warm_up_jobs=10, peers=("prototype",), folder=tmp_path)

    assert [row["system"] for row in found["rows"]] == ["ekiden", "prototype"]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in found["rows"])
    assert found["fdatasync_ms"] > 0
    _check_left(found, tmp_path)


def test_recovery_finds_every_job_in_all_three_ways(tmp_path: Path) -> None:
    found = recovery.run(jobs=30_000, restarts=1, memory_bytes=1 << 20, folder=tmp_path)

    assert [row["jobs"] for row in found["restarts"]] == [30_000, 30_001, 33_001]
    assert [row["snapshots"] > 0 for row in found["restarts"]] == [False, True, True]
    _check_left(found, tmp_path)


def test_a_soak_reports_its_windows(tmp_path: Path) -> None:
    found = soak.run(seconds=1.0, every_s=0.5, base_s=0.2, memory_bytes=1 << 20, folder=tmp_path)

    assert len(found["windows"]) == 2
    assert found["jobs"] > 0
    assert all(window["jobs_per_s"] > 0 for window in found["windows"])
    _check_left(found, tmp_path)


def test_scale_has_a_point_for_every_number_of_workers(tmp_path: Path) -> None:
    found = scale.run(seconds=0.2, workers=(2, 20), folder=tmp_path)

    assert [point["workers"] for point in found["assign"]] == [2, 20]
    assert [point["workers"] for point in found["broker"]] == [2, 20]
    assert all(point["jobs_per_s"] > 0 for point in found["broker"])
    _check_left(found, tmp_path)


def test_idle_watches_broker_and_worker(tmp_path: Path) -> None:
    found = idle.run(seconds=0.3, settle_s=0.1, folder=tmp_path)

    assert set(found["cpu_percent"]) == {"broker", "worker"}
    _check_left(found, tmp_path)


def _check_left(report: dict[str, Any], folder: Path) -> None:
    assert json.loads(json.dumps(report)) == report, "a report is plain JSON"
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_no_process_and_no_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "ekiden.cli.main", "bench", "idle", "--seconds", "100"]
    bench = subprocess.Popen([*command, "--folder", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        family = _wait_family(bench.pid, 2)

        bench.send_signal(number)

        # A shell says 130 to either. An interrupt that finds the interpreter in `exec`, as making a
        # dataclass is, is handled like any other, and still has the process end by the signal.
        assert bench.wait(20) in (130, -signal.SIGINT)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
        assert list(tmp_path.iterdir()) == []
    finally:
        bench.kill()


def _wait_family(pid: int, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 30
    while len(found := psutil.Process(pid).children(recursive=True)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} processes have started"
        time.sleep(0.02)
    return found
