"""SIGKILL in the middle of the work: no accepted job is lost, none has two results.

Kills are triggered by the number of jobs accepted so far, while more are on the wire; each test
proves that they were. EKIDEN_KILLS sets how many (`make chaos` asks for 50).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import pytest
from tests.integration.processes import Child, Site, until, wait_workers

import ekiden
from ekiden.cli.chronicle import lines
from ekiden.world.disk import FolderStorage

KILLS = max(1, int(os.environ.get("EKIDEN_KILLS", "12")))
JOBS = max(50_000, KILLS * 2_000)

# Jobs handed over and not accepted yet, in frames of BATCH.
WINDOW = 1_200
BATCH = 100


def payload_of(number: int) -> bytes:
    return b"input %d" % number


def output_of(number: int) -> bytes:
    return hashlib.sha256(payload_of(number)).hexdigest().encode()


class Load:
    """Submits jobs from a thread of its own, `least` at least, and more until `finish` is called.

    It is never further ahead than WINDOW jobs that are not accepted, or `backlog` not settled.
    """

    def __init__(self, client: ekiden.Client, least: int, *, backlog: int = 0) -> None:
        self.client = client
        self.least = least
        self.futures: list[ekiden.JobFuture] = []
        self._backlog = backlog
        self._accepted = self._settled = 0
        self._counting = threading.Lock()
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._submit_all, daemon=True)
        self._thread.start()

    @property
    def handed_over(self) -> int:
        return len(self.futures)

    @property
    def accepted(self) -> int:
        """How many, without a gap, are known to be accepted."""
        futures = self.futures
        with self._counting:
            while self._accepted < len(futures) and futures[self._accepted].accepted:
                self._accepted += 1
            return self._accepted

    @property
    def settled(self) -> int:
        """How many, without a gap, have their outcome."""
        futures = self.futures
        with self._counting:
            while self._settled < len(futures) and futures[self._settled].done():
                self._settled += 1
            return self._settled

    def _is_ahead(self) -> bool:
        if self._backlog:
            return self.handed_over - self.settled >= self._backlog
        return self.handed_over - self.accepted >= WINDOW

    def _submit_all(self) -> None:
        while self.handed_over < self.least or not self._finishing.is_set():
            if self._is_ahead():
                time.sleep(0.0005)
                continue
            first = self.handed_over
            numbers = range(first, first + BATCH)
            self.futures += self.client.submit_many(
                "sha256", map(payload_of, numbers), job_ids=(f"job-{n}" for n in numbers)
            )

    def finish(self, timeout_s: float = 90.0) -> int:
        """Wait for every job to end with the result of its own input; how many there were."""
        self._finishing.set()
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"only {self.accepted} jobs were accepted"
        _, missing = wait(self.futures, timeout_s)
        assert not missing, f"{len(missing)} jobs have no outcome, as {next(iter(missing))!r}"
        for number, future in enumerate(self.futures):
            assert future.accepted
            assert future.result(0).output == output_of(number), future
        return self.handed_over


@dataclass
class Kill:
    """What was under way when a process was killed."""

    at: int
    """Jobs accepted when the kill was triggered."""
    in_flight: int
    """Jobs handed over before the kill and not accepted when the process was dead."""


def kill_again_and_again(
    load: Load, victims: Callable[[], list[Child]], restart: Callable[[], object]
) -> list[Kill]:
    """Kill and restart until KILLS of them met submits in flight, spread over the load."""
    kills: list[Kill] = []
    while sum(kill.in_flight > 0 for kill in kills) < KILLS:
        assert len(kills) < 3 * KILLS, f"most kills met no submit in flight: {kills}"
        distance = max(load.least // (KILLS + 1), BATCH)
        kills.append(kill_at(load, load.accepted + distance, victims()))
        restart()
    return kills


def kill_at(load: Load, point: int, victims: list[Child]) -> Kill:
    until(lambda: load.accepted >= point, f"{point} accepted jobs", 60)
    handed_over, at = load.handed_over, load.accepted
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    for victim in victims:
        assert victim.wait() == -signal.SIGKILL
    # What the broker said before it died has been read once the client knows of its death.
    until(lambda: not load.client.connected or load.accepted >= handed_over, "the loss to be seen")
    return Kill(at, handed_over - load.accepted)


def check_history(site: Site, count: int) -> None:
    """The journal is sound, and every job entered and settled exactly once in it."""
    assert site.run("log", "verify", str(site.data), "--json").json["ok"]
    entered: Counter[str] = Counter()
    settled: Counter[str] = Counter()
    for line in lines(FolderStorage(site.data)):
        if line["event"] == "enqueue":
            entered[line["job"]] += 1
        elif line["event"] in ("ack", "dlq", "cancel", "expire"):
            settled[line["job"]] += 1
    ids = {f"job-{n}" for n in range(count)}
    assert entered.keys() == settled.keys() == ids
    assert set(entered.values()) == set(settled.values()) == {1}


def check_counters(client: ekiden.Client, count: int) -> None:
    jobs = client.stats()["jobs"]
    expected = {"queued": 0, "leased": 0, "delayed": 0, "cancelling": 0, "failed": 0, "done": count}
    assert {name: jobs[name] for name in expected} == expected
    assert jobs["accepted_total"] == jobs["settled_total"] == count


def check_end(site: Site, client: ekiden.Client, count: int) -> None:
    check_counters(client, count)
    assert site.broker.terminate() == 0
    check_history(site, count)


@pytest.mark.slow
@pytest.mark.timeout(120 + KILLS * 10)
def test_no_accepted_job_is_lost_when_the_broker_is_killed_again_and_again(site: Site) -> None:
    # Snapshots, rotation and compression go on meanwhile, and are killed too.
    flags = ("--snapshot-interval", "3", "--segment-mb", "1")
    site.start_broker(*flags)
    client = site.client(batch_jobs=BATCH)
    site.start_worker()
    wait_workers(client)
    load = Load(client, JOBS)

    kills = kill_again_and_again(load, lambda: [site.broker], lambda: site.start_broker(*flags))
    count = load.finish()

    assert count >= JOBS
    assert sum(kill.in_flight > 0 for kill in kills) == KILLS
    check_end(site, client, count)


def is_busy(load: Load, settled: int) -> bool:
    """Whether so many jobs are settled and a worker is at work on others."""
    return load.settled >= settled and load.client.stats()["jobs"]["leased"] > 0


@pytest.mark.slow
@pytest.mark.timeout(120 + KILLS * 10)
def test_no_accepted_job_is_lost_when_the_worker_is_killed_again_and_again(site: Site) -> None:
    site.start_broker()
    client = site.client()
    worker = site.start_worker()
    # More than a worker holds, so that there is always work, and no more than that.
    load = Load(client, JOBS // 2, backlog=6_000)

    leased: list[int] = []
    while sum(leases > 0 for leases in leased) < KILLS:
        assert len(leased) < 4 * KILLS, f"most kills met no lease: {leased}"
        # Each worker gets to bring some results, and is killed while it holds more jobs.
        point = load.settled + load.least // (4 * KILLS)
        until(partial(is_busy, load, point), f"{point} results and some leases", 60)
        worker.kill()
        leased.append(client.stats()["jobs"]["leased"])
        worker = site.start_worker()
    count = load.finish()

    check_end(site, client, count)


@pytest.mark.slow
@pytest.mark.timeout(120 + KILLS * 10)
def test_no_accepted_job_is_lost_when_broker_and_worker_are_killed_together(site: Site) -> None:
    site.start_broker()
    client = site.client(batch_jobs=BATCH)
    workers = [site.start_worker()]
    wait_workers(client)
    load = Load(client, JOBS // 2)

    def restart() -> None:
        site.start_broker()
        workers.append(site.start_worker())

    kills = kill_again_and_again(load, lambda: [site.broker, workers[-1]], restart)
    count = load.finish()

    assert sum(kill.in_flight > 0 for kill in kills) == KILLS
    check_end(site, client, count)


def test_a_killed_client_leaves_its_jobs_and_another_finds_them(site: Site) -> None:
    """Not only the broker may die: accepted is accepted, whoever is left to see it."""
    site.start_broker()
    program = (
        "import ekiden, sys, time\n"
        f"client = ekiden.Client({site.address!r}, client_id='doomed')\n"
        "ids = [f'orphan-{n}' for n in range(500)]\n"
        "futures = client.submit_many('sha256', [i.encode() for i in ids], job_ids=ids)\n"
        "for future in futures: future.wait_accepted(20)\n"
        "print('{}', flush=True)\n"
        "time.sleep(60)\n"
    )
    doomed = site.start([sys.executable, "-c", program], "doomed")
    doomed.first_line()
    doomed.kill()

    site.start_worker()
    client = site.client()
    for number in range(500):
        name = f"orphan-{number}"
        output = client.attach(name).result(30).output
        assert output == hashlib.sha256(name.encode()).hexdigest().encode()


def test_a_terminated_broker_leaves_a_snapshot_and_loses_nothing(site: Site) -> None:
    site.start_broker()
    client = site.client(batch_jobs=BATCH)
    worker = site.start_worker()
    wait_workers(client)
    load = Load(client, 20_000)
    until(lambda: load.accepted >= 5_000, "some accepted jobs")

    assert site.broker.terminate() == 0

    verified = site.run("log", "verify", str(site.data), "--json").json
    (snapshot,) = [file for file in verified["files"] if file["kind"] == "snapshot"]
    segments = [file for file in verified["files"] if file["kind"] != "snapshot"]
    assert snapshot["last"] == max(file["last"] for file in segments)

    began = time.monotonic()
    site.start_broker()
    assert time.monotonic() - began < 10
    assert worker.alive
    check_end(site, client, load.finish())
