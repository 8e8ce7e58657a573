"""`ekiden.testing.grid`: what users write their own tests with."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ekiden
import ekiden.testing
from ekiden import errors
from ekiden.machine import Log


@pytest.fixture(autouse=True)
def no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder that must stay untouched, and no hint of any other grid."""
    for name in ("EKIDEN_CONNECT", "EKIDEN_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    state = tmp_path / "state"
    monkeypatch.setenv("EKIDEN_STATE", str(state))
    return state


def ekiden_threads() -> set[str]:
    prefixes = ("ekiden-", "handler-", "journal")
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(prefixes)}


def test_a_job_goes_through_broker_worker_and_client() -> None:
    with ekiden.testing.grid(slots=2) as grid:

        @grid.worker.handler("job.assign.double")
        def double(job: ekiden.Job) -> Any:
            return 2 * job.json()

        result = grid.client.submit("double", payload=21).result(10)

        assert result.json() == 42
        assert result.worker == "worker-1"
        assert double(type("Fake", (), {"json": lambda _: 4})()) == 8  # still a function


def test_the_module_is_reached_through_the_package() -> None:
    probe = "import ekiden; print(ekiden.testing.grid.__module__)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "ekiden.testing"


def test_a_handler_may_come_after_the_client_and_after_the_job() -> None:
    with ekiden.testing.grid() as grid:
        client = grid.client
        early = client.submit("late", payload=b"1")
        early.wait_accepted(10)
        assert client.job(early.job_id)["state"] == "queued"

        grid.worker.handler("job.assign.late")(lambda job: job.payload + b"!")
        assert early.result(10).output == b"1!"

        grid.worker.handler("job.assign.later")(lambda job: job.payload + b"?")
        assert client.submit("later", payload=b"2").result(10).output == b"2?"
        assert client.submit("late", payload=b"3").result(10).output == b"3!"


def test_nothing_of_the_user_is_touched_and_nothing_is_left(no_state: Path) -> None:
    before = ekiden_threads()
    frozen = gc.get_freeze_count()
    with ekiden.testing.grid() as grid:
        grid.worker.handler("job.assign.echo")(lambda job: job.payload)
        grid.client.submit("echo").result(10)
        folder = grid.key_file.parent
        assert folder.is_dir()

    assert not no_state.exists()
    assert not folder.exists()
    assert ekiden_threads() <= before
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_leaving_does_not_wait_for_what_waits_or_runs() -> None:
    running, release = threading.Event(), threading.Event()
    with ekiden.testing.grid(slots=1) as grid:

        @grid.worker.handler("job.assign.slow")
        def slow(job: ekiden.Job) -> None:
            running.set()
            release.wait(60)

        futures = grid.client.submit_many("slow", [b""] * 50)
        assert running.wait(10)
        began = time.monotonic()

    took = time.monotonic() - began
    release.set()
    assert took < 5
    assert isinstance(futures[-1].exception(0), errors.Closed)


def test_grids_do_not_see_one_another() -> None:
    with ekiden.testing.grid() as one, ekiden.testing.grid() as two:
        one.worker.handler("job.assign.who")(lambda job: "one")
        two.worker.handler("job.assign.who")(lambda job: "two")

        assert one.address != two.address
        assert one.client.submit("who", job_id="same").result(10).output == b"one"
        assert two.client.submit("who", job_id="same").result(10).output == b"two"
        with pytest.raises(errors.Unauthenticated):
            one.connect(key=two.key)


def test_retries_do_not_make_a_test_wait() -> None:
    with ekiden.testing.grid() as grid:

        @grid.worker.handler("job.assign.flaky")
        def flaky(job: ekiden.Job) -> int:
            if job.attempt < 3:
                raise RuntimeError("not yet")
            return job.attempt

        began = time.monotonic()
        result = grid.client.submit("flaky").result(10)

        assert result.json() == 3
        assert time.monotonic() - began < 2.5  # a grid for people would wait 3 s

        grid.worker.handler("job.assign.hopeless")(lambda job: 1 / 0)
        with pytest.raises(errors.JobFailed) as failure:
            grid.client.submit("hopeless", max_attempts=2).result(10)
        assert [cause["cause"] for cause in failure.value.causes] == ["handler_error"] * 2


def test_the_brokers_bounds_can_be_set() -> None:
    with ekiden.testing.grid(waiting_max=3) as grid:
        futures = [grid.client.submit("nobody") for _ in range(3)]
        for future in futures:
            future.wait_accepted(10)
        with pytest.raises(errors.QueueFull):
            grid.client.submit("nobody").result(10)


def test_an_async_client_and_async_handlers_work_too() -> None:
    async def main(grid: ekiden.testing.Grid) -> list[bytes]:
        async with grid.connect_async() as client:
            futures = [client.submit("wait", payload=str(n)) for n in range(20)]
            return [(await future).output for future in futures]

    with ekiden.testing.grid(slots=8) as grid:

        @grid.worker.handler("job.assign.wait")
        async def wait(job: ekiden.Job) -> bytes:
            await asyncio.sleep(0.001)
            return job.payload

        assert asyncio.run(main(grid)) == [str(n).encode() for n in range(20)]


def test_several_workers_are_told_apart_by_labels() -> None:
    with ekiden.testing.grid(slots=1, labels={"zone": "a"}) as grid:
        other = grid.add_worker(1, labels={"zone": "b"})
        for worker in (grid.worker, other):
            worker.handler("job.assign.where")(
                lambda _, name=worker.worker_id: name,
            )

        def where(zone: str) -> str:
            job = grid.client.submit("where", needs={"label": {"zone": zone}})
            return job.result(10).output.decode()

        assert (where("a"), where("b")) == ("worker-1", "worker-2")
        late = grid.add_worker(1, labels={"zone": "c"})
        late.handler("job.assign.where")(lambda _: "late")
        assert where("c") == "late"


def test_other_code_finds_the_grid_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ekiden.testing.grid() as grid:
        grid.worker.handler("job.assign.echo")(lambda job: job.payload)
        for name, value in grid.environment.items():
            monkeypatch.setenv(name, value)

        with ekiden.Client() as client:
            assert client.submit("echo", payload=b"here").result(10).output == b"here"
        done = subprocess.run(
            [sys.executable, "-m", "ekiden.cli.main", "submit", "--wait", "echo", "--payload", "x"],
            capture_output=True,
            env={**os.environ, **grid.environment},
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, b"x")


def test_a_grid_is_of_no_use_outside_its_block() -> None:
    grid = ekiden.testing.grid()
    with pytest.raises(errors.Closed):
        _ = grid.client
    with grid:
        assert grid.client.connected
    with pytest.raises(errors.Closed):
        _ = grid.address


def test_a_wrong_setting_is_an_error_of_the_call() -> None:
    with pytest.raises(TypeError, match="no_such"), ekiden.testing.grid(no_such=1):
        pass


def test_a_broker_that_fails_is_not_kept_secret() -> None:
    def bug(*_: Any) -> None:
        raise AssertionError("a bug")

    def use_a_broken_grid() -> None:
        with ekiden.testing.grid() as grid:
            assert grid.client.connected
            broker = grid._running()
            broker._world.machine.receive = bug
            grid.client.publish("news", b"x")
            broker._thread.join(10)

    with pytest.raises(AssertionError, match="a bug"):
        use_a_broken_grid()


def test_an_error_of_the_test_itself_is_the_one_that_is_seen() -> None:
    def use_a_grid_wrongly() -> None:
        with ekiden.testing.grid() as grid:
            assert grid.client.connected
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use_a_grid_wrongly()


def test_a_snapshot_that_cannot_be_begun_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[Log] = []
    monkeypatch.setattr("ekiden.broker.serve.log_effect", logged.append)
    with ekiden.testing.grid(snapshot_interval_s=0.05) as grid:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no/such/python")
            grid.client.submit("nobody").wait_accepted(10)
            until(lambda: "snapshot.failed" in {line.event for line in logged})

        until(lambda: grid.client.stats()["journal"]["snapshot_index"] > 0)


def until(holds: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
