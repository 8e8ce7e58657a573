"""Python functions and services through the whole grid: client, broker, worker, runners."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ekiden.testing
from ekiden import errors
from ekiden.worker.offers import Offers
from ekiden.worker.services import ServiceConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children need the keeper")

DEADLINE_S = 60.0
ECHO = Path(__file__).parents[2] / "examples" / "services" / "echo_service.py"


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ekiden.testing.Grid]:
    """A broker, and a worker with functions and a service."""
    service = ServiceConfig(name="echo", argv=[sys.executable, str(ECHO)])
    scratch = tmp_path_factory.mktemp("scratch")
    with ekiden.testing.grid(slots=1) as grid:
        offers = Offers(functions=True, services=(service,), scratch=scratch)
        grid.add_worker(slots=2, worker_id="runner", offers=offers)
        yield grid


# ------------------------------------------------------------------ calls


def test_a_function_runs_in_another_process_and_its_value_comes_back(
    grid: ekiden.testing.Grid,
) -> None:
    def add(a: int, b: int = 0) -> tuple[int, int]:
        return os.getpid(), a + b

    pid, total = grid.client.run(add, 2, b=3)

    assert total == 5
    assert pid != os.getpid()


def test_ten_thousand_values_come_back_in_order(grid: ekiden.testing.Grid) -> None:
    assert list(grid.client.map(lambda x: x * x, range(10_000))) == [x * x for x in range(10_000)]


def test_values_come_as_they_are_done_if_order_does_not_matter(grid: ekiden.testing.Grid) -> None:
    found = grid.client.map(lambda x: -x, range(1000), in_order=False, window=100)

    assert sorted(found) == list(range(-999, 1))


def test_an_exception_is_raised_as_itself_and_not_tried_again(
    grid: ekiden.testing.Grid, tmp_path: Path
) -> None:
    def fail(path: str) -> None:
        with open(path, "a") as file:
            file.write("x")
        raise LookupError("no such curve")

    with pytest.raises(LookupError, match="no such curve") as raised:
        grid.client.run(fail, str(tmp_path / "tries"))

    assert "in fail" in str(raised.value.__cause__)
    assert (tmp_path / "tries").read_text() == "x"


def test_errors_take_the_place_of_values_in_a_map_if_asked_for(grid: ekiden.testing.Grid) -> None:
    found = list(grid.client.map(lambda x: 6 // x, [1, 0, 2], return_errors=True))

    assert found[0] == 6
    assert isinstance(found[1], ZeroDivisionError)
    assert found[2] == 3


def test_a_crash_is_tried_again_and_then_told(grid: ekiden.testing.Grid) -> None:
    with pytest.raises(errors.JobFailed, match="SIGKILL") as raised:
        grid.client.run(lambda: os.kill(os.getpid(), signal.SIGKILL))

    assert len(raised.value.causes) == 3
    assert raised.value.reason == "signal"


def test_a_large_value_comes_back_and_may_be_looked_at_in_a_callback(
    grid: ekiden.testing.Grid,
) -> None:
    sizes: concurrent.futures.Future[int] = concurrent.futures.Future()
    future = grid.client.call(lambda: b"x" * 3_000_000)
    future.add_done_callback(lambda done: sizes.set_result(len(done.result())))

    assert len(future.result(DEADLINE_S)) == 3_000_000
    assert sizes.result(DEADLINE_S) == 3_000_000


def test_a_running_call_is_cancelled_with_its_process(
    grid: ekiden.testing.Grid, tmp_path: Path
) -> None:
    here = tmp_path / "pid"

    def sleep(path: str) -> None:
        Path(path).write_text(str(os.getpid()))
        time.sleep(600)

    future = grid.client.call(sleep, str(here))
    wait_for(lambda: here.exists() and here.read_text())

    assert future.cancel(DEADLINE_S)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(DEADLINE_S)
    wait_for(lambda: not alive(int(here.read_text())))


def test_a_call_over_its_time_limit_fails(grid: ekiden.testing.Grid) -> None:
    future = grid.client.call_with({"timeout_s": 0.2}, time.sleep, 600)

    with pytest.raises(errors.JobFailed, match="time limit"):
        future.result(DEADLINE_S)


def test_progress_of_a_function_reaches_the_caller(
    grid: ekiden.testing.Grid, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def work(path: str) -> str:
        job = ekiden.current_job()
        job.progress(0.4, "step 3")
        while not os.path.exists(path):
            time.sleep(0.01)
        return job.id

    future = grid.client.call(work, str(gate))
    wait_for(lambda: future.progress)
    assert future.progress == {"value": 0.4, "text": "step 3"}
    gate.write_text("x")

    assert future.result(DEADLINE_S) == future.job_id


def test_a_class_of_the_callers_comes_back_as_that_class(grid: ekiden.testing.Grid) -> None:
    class Price:
        def __init__(self, value: float) -> None:
            self.value = value

    found = grid.client.run(lambda price: type(price)(price.value * 2), Price(2.0))

    assert isinstance(found, Price)
    assert found.value == 4.0


# ------------------------------------------------------------------ async


def test_the_async_client_awaits_calls_and_iterates_over_maps(grid: ekiden.testing.Grid) -> None:
    async def scenario() -> list[Any]:
        async with grid.connect_async() as client:
            value = await client.run(lambda x: x + 1, 1)
            large = await client.call(lambda: b"y" * 200_000)
            with pytest.raises(ZeroDivisionError):
                await client.call(lambda: 1 // 0)
            mapped = [v async for v in client.map(lambda x: x * 3, range(2000), window=500)]
            unordered = [v async for v in client.map(abs, [-1, -2], in_order=False)]
            named = await client.run("echo", 5)
            return [value, len(large), mapped, sorted(unordered), named.json()["echo"]]

    assert asyncio.run(scenario()) == [2, 200_000, [x * 3 for x in range(2000)], [1, 2], 5]


# ------------------------------------------------------------------ executor


def test_the_executor_does_what_a_process_pool_does(grid: ekiden.testing.Grid) -> None:
    with ekiden.Executor(grid.address, key=grid.key) as pool:
        futures = [pool.submit(pow, x, 2) for x in range(100)]
        done, left = concurrent.futures.wait(futures, DEADLINE_S)  # type: ignore[arg-type,type-var]

        assert not left
        assert sorted(future.result() for future in done) == [x * x for x in range(100)]
        assert list(pool.map(lambda a, b: a - b, range(5), range(5, 0, -1), chunksize=2)) == [
            -5, -3, -1, 1, 3
        ]  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            list(pool.map(lambda x: 1 // x, [1, 0]))


def test_an_event_loop_takes_the_executor(grid: ekiden.testing.Grid) -> None:
    async def scenario() -> Any:
        with ekiden.Executor(client=grid.client) as pool:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, len, "four")

    assert asyncio.run(scenario()) == 4


# ------------------------------------------------------------------ services


def test_a_service_answers_named_jobs(grid: ekiden.testing.Grid) -> None:
    results = list(grid.client.map("echo", [{"x": x} for x in range(1000)]))

    assert [result.json()["echo"]["x"] for result in results] == list(range(1000))


def test_an_error_of_a_service_is_the_failure_of_its_job(grid: ekiden.testing.Grid) -> None:
    future = grid.client.submit("echo", payload={"fail": "no such trade"}, retry_on=())

    with pytest.raises(errors.JobFailed, match="no such trade"):
        future.result(DEADLINE_S)


def test_a_worker_that_is_stopped_leaves_no_runner(tmp_path: Path) -> None:
    with ekiden.testing.grid(slots=1) as grid:
        offers = Offers(functions=True, scratch=tmp_path)
        grid.add_worker(slots=2, worker_id="runner", offers=offers)

        def work(_: int) -> int:
            time.sleep(0.05)
            return os.getpid()

        pids = set(grid.client.map(work, range(4)))

    assert not any(alive(pid) for pid in pids)


# ------------------------------------------------------------------ waiting


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
