"""What happens to jobs between submit and result, with real brokers, workers and clocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.integration.processes import EKIDEN, Child, Site, until, wait_workers

import ekiden
from ekiden import errors
from ekiden.limits import NS

# Seconds become parts of one, so that losing a worker does not take a test long.
QUICK = {"silence_ns": NS, "heartbeat_ns": NS // 5, "rejoin_grace_ns": NS // 2}


class Gate:
    """Jobs that say when they run and wait to be let through."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def runs(self) -> list[str]:
        began = self.path.with_suffix(".began")
        return began.read_text().splitlines() if began.exists() else []

    def wait_runs(self, count: int = 1) -> None:
        until(lambda: len(self.runs) >= count, f"{count} runs")

    def open(self) -> None:
        self.path.with_suffix(".open").touch()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker and a worker with their defaults, for tests that do not disturb one another."""
    site = Site(tmp_path_factory.mktemp("lives"))
    try:
        site.start_broker()
        site.start_worker(slots=4)
        wait_workers(site.client("observer"))
        yield site
    finally:
        site.close()


@pytest.fixture
def client(shared: Site, request: pytest.FixtureRequest) -> ekiden.Client:
    return shared.client(request.node.name[:60].replace("[", "-").replace("]", ""))


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


# ------------------------------------------------------------------ retry and time


def test_a_failing_job_is_tried_again_later_and_later_and_then_fails_with_every_cause(
    client: ekiden.Client,
) -> None:
    future = client.submit("fail", payload=b"this", max_attempts=3)

    with pytest.raises(errors.JobFailed) as failure:
        future.result(30)

    causes: list[Any] = failure.value.causes
    assert [cause["attempt"] for cause in causes] == [1, 2, 3]
    assert {cause["cause"] for cause in causes} == {"handler_error"}
    assert {cause["worker"] for cause in causes} == {"w1"}
    for number, cause in enumerate(causes, 1):
        assert f"attempt {number} of this" in cause["message"]
    first, second = ((later["time"] - earlier["time"]) / NS for earlier, later in pairwise(causes))
    assert 0.5 <= first <= 5
    assert 1 <= second <= 10
    assert client.job(future.job_id)["state"] == "failed"


def test_a_job_that_succeeds_at_last_says_at_which_attempt(client: ekiden.Client) -> None:
    result = client.submit("flaky", payload=b"2").result(30)

    assert (result.json(), result.attempt) == (2, 2)


@pytest.mark.parametrize("name", ["gate", "stubborn"])
def test_an_attempt_over_its_time_limit_ends_and_the_worker_goes_on(
    client: ekiden.Client, gate: Gate, name: str
) -> None:
    began = time.monotonic()
    future = client.submit(name, payload=str(gate.path), timeout_s=0.3)
    with pytest.raises(errors.JobFailed) as failure:
        future.result(30)

    assert time.monotonic() - began < 5
    assert [cause["cause"] for cause in failure.value.causes] == ["timeout"]
    assert client.submit("echo", payload=b"next").result(20).output == b"next"
    gate.open()


def test_a_time_limit_is_per_attempt_and_retried_if_asked(
    client: ekiden.Client, gate: Gate
) -> None:
    future = client.submit(
        "gate", payload=str(gate.path), timeout_s=0.2, max_attempts=2, retry_on=["timeout"]
    )
    with pytest.raises(errors.JobFailed) as failure:
        future.result(30)

    assert [cause["cause"] for cause in failure.value.causes] == ["timeout"] * 2
    assert [run.split()[1] for run in gate.runs] == ["1", "2"]


def test_a_delayed_job_starts_no_sooner(client: ekiden.Client) -> None:
    began = time.monotonic()
    future = client.submit("echo", payload=b"x", delay_s=1.0)
    future.wait_accepted(20)
    assert client.job(future.job_id)["state"] == "delayed"

    result = future.result(30)

    assert time.monotonic() - began >= 1.0
    assert (result.started_at - result.submitted_at).total_seconds() >= 0.99


def test_a_job_that_is_not_begun_in_time_is_cancelled(client: ekiden.Client) -> None:
    future = client.submit("nobody", expires_at=time.time() + 1)

    with pytest.raises(errors.JobCancelled, match="expired"):
        future.result(30)


# ------------------------------------------------------------------ cancel


def test_a_queued_job_is_cancelled_at_once(client: ekiden.Client) -> None:
    future = client.submit("nobody")

    assert future.cancel(20)

    with pytest.raises(errors.JobCancelled):
        future.result(20)
    assert client.job(future.job_id)["state"] == "cancelled"
    assert not client.submit("echo", job_id="too-late").result(20).output
    assert client.cancel("too-late")["settled"] == 1


@pytest.mark.parametrize("name", ["gate", "stubborn"])
def test_a_running_job_is_cancelled_and_its_slot_is_free_again(
    client: ekiden.Client, tmp_path: Path, name: str
) -> None:
    gates = [Gate(tmp_path / f"gate-{n}") for n in range(4)]
    futures = [client.submit(name, payload=str(gate.path)) for gate in gates]
    marks = [gate.path.with_suffix(".began") for gate in gates]
    until(lambda: all(mark.exists() for mark in marks), "all slots to be busy")

    assert all(future.cancel(20) for future in futures)

    for future in futures:
        with pytest.raises(errors.JobCancelled):
            future.result(20)
    assert client.submit("echo", payload=b"free").result(20).output == b"free"
    for gate in gates:
        gate.open()


def test_jobs_are_cancelled_by_the_name_of_their_run(shared: Site, client: ekiden.Client) -> None:
    futures = client.submit_many("nobody", [b""] * 20, run="night")
    other = client.submit("nobody", run="day")
    for future in [*futures, other]:
        future.wait_accepted(20)

    assert shared.run("jobs", "cancel", "--run", "night", "--json").json["cancelled"] == 20

    assert all(isinstance(f.exception(20), errors.JobCancelled) for f in futures)
    assert not other.done()
    other.cancel(20)


# ------------------------------------------------------------------ order and choice


def order_of_runs(site: Site, path: Path, count: int) -> list[str]:
    until(lambda: path.exists() and path.read_text().count("\n") == count, f"{count} runs")
    return path.read_text().split()


def test_higher_priorities_run_first_and_equal_ones_in_order(site: Site, tmp_path: Path) -> None:
    site.start_broker()
    client = site.client()
    path = tmp_path / "order"
    for priority in (0, -5, 9, 0, 9, 3):
        number = client.stats()["jobs"]["queued"]
        client.submit(
            "note", payload=str(path), priority=priority, job_id=f"{priority}:{number}"
        ).wait_accepted(20)

    site.start_worker(slots=1)

    assert order_of_runs(site, path, 6) == ["9:2", "9:4", "3:5", "0:0", "0:3", "-5:1"]


def test_a_client_with_few_jobs_does_not_wait_for_one_with_many(site: Site) -> None:
    """Two clients on two subjects share the worker, whoever came first with however many."""
    site.start_broker()
    big, small = site.client("big"), site.client("small")
    many = big.submit_many("sha256", [b"%d" % n for n in range(30_000)])
    many[-1].wait_accepted(30)
    few = small.submit_many("echo", [b"x"] * 20)
    few[-1].wait_accepted(30)

    site.start_worker(slots=1)
    for future in few:
        future.result(30)

    assert sum(future.done() for future in many) < len(many) // 2
    many[-1].result(60)


def test_a_client_at_its_cap_leaves_room_for_others_on_the_same_subject(
    site: Site, gate: Gate
) -> None:
    site.start_broker("--client-cap", "2")
    greedy, modest = site.client("greedy"), site.client("modest")
    many = greedy.submit_many("gate", [str(gate.path)] * 10)
    many[-1].wait_accepted(20)
    one = modest.submit("gate", payload=str(gate.path))
    one.wait_accepted(20)

    site.start_worker(slots=8)
    gate.wait_runs(3)

    until(lambda: one.job_id in {run.split()[0] for run in gate.runs}, "the modest one to run")
    assert len(gate.runs) == 3
    gate.open()
    assert {future.result(30).output for future in [*many, one]} == {b"gate"}


# ------------------------------------------------------------------ several processes


def test_a_job_is_found_again_from_another_process(shared: Site, client: ekiden.Client) -> None:
    future = client.submit("sha256", payload=b"abc", job_id="found-again")
    future.wait_accepted(20)

    waited = shared.run("wait", "found-again")
    program = (
        "import ekiden\n"
        "with ekiden.Client(client_id='someone-else') as client:\n"
        "    print(client.attach('found-again').result(20).text())\n"
    )
    attached = subprocess.run(
        [sys.executable, "-c", program], env=shared.environment, capture_output=True, check=True
    )

    assert waited.out == attached.stdout.strip() == future.result(20).output


def test_the_same_id_from_two_processes_is_one_job(shared: Site, client: ekiden.Client) -> None:
    mine = client.submit("echo", payload=b"same", job_id="one-job")
    theirs = shared.run(
        "submit", "--wait", "echo", "--id", "one-job", "--payload", "same", "--json"
    )
    conflict = shared.run("submit", "echo", "--id", "one-job", "--payload", "other", "--json")

    assert mine.result(20).output == b"same"
    assert theirs.json["output"] == "same"
    assert (conflict.code, conflict.error["code"]) == (4, "conflict")


def test_progress_of_a_running_job_reaches_its_client(client: ekiden.Client, gate: Gate) -> None:
    future = client.submit("gate", payload=str(gate.path))

    until(lambda: future.progress == {"waiting": "gate"}, "news of the job")
    assert future.running()

    gate.open()
    assert future.result(20).output == b"gate"


def test_what_is_published_reaches_every_subscriber_and_nobody_else(
    shared: Site, client: ekiden.Client
) -> None:
    other = shared.client("listener")
    everything, weather, sports = (
        other.subscribe("news.>"),
        client.subscribe("news.weather.*"),
        client.subscribe("news.sports"),
    )
    for subscription in (everything, weather, sports):
        subscription.wait_active()
    process = shared.start([*EKIDEN, "sub", "news.weather.tokyo", "--count", "1", "--json"], "sub")

    def heard_in_a_process() -> bool:
        client.publish("news.weather.tokyo", b"rain")
        return not process.alive

    until(heard_in_a_process, "the subscriber in another process")

    assert process.wait() == 0
    assert everything.take(20).payload == weather.take(20).payload == b"rain"
    assert sports.take_nowait() is None
    for subscription in (everything, weather, sports):
        subscription.close()


# ------------------------------------------------------------------ workers that come and go


def test_a_drained_worker_gets_nothing_until_it_is_resumed(site: Site, gate: Gate) -> None:
    site.start_broker()
    client = site.client()
    site.start_worker(slots=2)
    wait_workers(client)
    running = client.submit("gate", payload=str(gate.path))
    gate.wait_runs()

    assert site.run("workers", "drain", "w1", "--json").json["state"] == "draining"
    waiting = client.submit("echo", payload=b"later")
    waiting.wait_accepted(20)
    gate.open()
    assert running.result(20).output == b"gate", "what had begun is finished"
    assert client.job(waiting.job_id)["state"] == "queued"

    assert site.run("workers", "resume", "w1", "--json").json["state"] == "ready"
    assert waiting.result(20).output == b"later"


def test_a_worker_told_to_stop_finishes_what_has_begun_and_gives_back_the_rest(
    site: Site, gate: Gate
) -> None:
    site.start_broker()
    client = site.client()
    first = site.start_worker("w1", slots=1)
    wait_workers(client)
    futures = client.submit_many("gate", [str(gate.path)] * 5)
    gate.wait_runs()

    first.process.send_signal(signal.SIGTERM)
    site.start_worker("w2", slots=4)
    gate.wait_runs(5)
    assert first.alive, "it left a job behind"
    gate.open()

    results = [future.result(20) for future in futures]
    assert first.wait() == 0
    assert sorted(result.worker for result in results) == ["w1", "w2", "w2", "w2", "w2"]
    for future in futures:
        causes = client.job(future.job_id)["causes"]
        assert not any(cause["burned"] for cause in causes), "what never began burned an attempt"


def test_the_jobs_of_a_lost_worker_are_run_by_another(site: Site, gate: Gate) -> None:
    site.start_broker(config=QUICK)
    client = site.client()
    first = site.start_worker("w1")
    wait_workers(client)
    future = client.submit("gate", payload=str(gate.path))
    gate.wait_runs()
    until(lambda: client.job(future.job_id)["state"] == "running", "the start to be announced")

    first.kill()
    site.start_worker("w2")
    gate.wait_runs(2)
    gate.open()

    result = future.result(20)
    assert (result.worker, result.attempt) == ("w2", 2)
    (cause,) = client.job(future.job_id)["causes"]
    assert (cause["cause"], cause["worker"]) == ("worker_lost", "w1")


def test_a_worker_that_was_asleep_past_its_lease_settles_nothing(site: Site, gate: Gate) -> None:
    site.start_broker(config=QUICK)
    client = site.client()
    sleeper = site.start_worker("sleeper")
    wait_workers(client)
    future = client.submit("gate", payload=str(gate.path))
    gate.wait_runs()
    until(lambda: client.job(future.job_id)["state"] == "running", "the start to be announced")

    os.kill(sleeper.pid, signal.SIGSTOP)
    try:
        site.start_worker("w2")
        gate.wait_runs(2)
        gate.open()
        result = future.result(20)
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)

    wait_workers(client, 2)  # it wakes, has its say, and serves again
    assert result.worker == "w2"
    assert client.attach(future.job_id).result(20).worker == "w2"
    assert client.job(future.job_id)["state"] == "done"
    pinned = client.submit("echo", payload=b"awake", pin="sleeper")
    assert pinned.result(20).output == b"awake"


def one_died(worker: Child, job: ekiden.JobFuture) -> bool:
    return not worker.alive or job.done()


def test_a_job_that_kills_its_workers_is_found_out_and_harms_no_other(site: Site) -> None:
    site.start_broker(config=QUICK)
    client = site.client()
    poison = client.submit("die", max_attempts=100)

    deaths = 0
    while not poison.done() and deaths < 10:
        victim = site.start_worker(f"victim-{deaths}")
        until(partial(one_died, victim, poison), "the worker to die, or the job to fail")
        deaths += not victim.alive

    with pytest.raises(errors.JobFailed) as failure:
        poison.result(20)
    assert failure.value.reason == "poison"
    assert [cause["cause"] for cause in failure.value.causes if cause["burned"]] == (
        ["worker_lost"] * 3
    )
    assert 3 <= deaths <= 5
    site.start_worker("survivor")
    assert client.submit("echo", payload=b"well").result(20).output == b"well"


# ------------------------------------------------------------------ restarts


def test_results_of_any_size_are_there_after_a_restart(site: Site) -> None:
    site.start_broker()
    client = site.client()
    site.start_worker()
    payloads = [os.urandom(size) for size in (0, 1, 1024, 1025, 60_000, 500_000)]
    ids = [f"sized-{len(payload)}" for payload in payloads]
    for future in client.submit_many("echo", payloads, job_ids=ids):
        future.result(30)

    for stop in (site.broker.kill, lambda: site.broker.terminate()):
        stop()
        site.start_broker()
        other = site.client(f"reader-{id(stop)}")
        assert [other.attach(i).result(30).output for i in ids] == payloads


def test_delays_and_failures_survive_a_kill(site: Site) -> None:
    site.start_broker()
    client = site.client()
    site.start_worker()
    failed = client.submit("fail", payload=b"x", max_attempts=1, job_id="failed")
    assert isinstance(failed.exception(20), errors.JobFailed)
    client.submit("echo", payload=b"later", delay_s=2, job_id="delayed").wait_accepted(20)
    client.submit("nobody", job_id="queued").wait_accepted(20)

    site.broker.kill()
    site.start_broker()
    until(lambda: client.connected, "the client to come back")

    assert client.job("failed")["causes"][0]["cause"] == "handler_error"
    assert client.job("queued")["state"] == "queued"
    assert client.attach("delayed").result(30).output == b"later"
    assert site.run("dlq", "replay", "failed", "--json").json["replayed"] == 1
    with pytest.raises(errors.JobFailed):
        client.attach("failed").result(20)
    assert client.job("failed")["generation"] == 1
