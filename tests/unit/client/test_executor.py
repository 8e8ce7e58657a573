"""`ekiden.Executor` without a worker: the edges of its life. Work is in tests/integration."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest

import ekiden.testing
from ekiden import errors

DEADLINE_S = 30.0


@pytest.fixture
def grid() -> Iterator[ekiden.testing.Grid]:
    with ekiden.testing.grid(slots=1) as grid:
        yield grid


def test_it_is_an_executor_of_the_standard_library(grid: ekiden.testing.Grid) -> None:
    with ekiden.Executor(client=grid.client) as pool:
        assert isinstance(pool, concurrent.futures.Executor)


def test_after_shutdown_nothing_is_taken(grid: ekiden.testing.Grid) -> None:
    pool = ekiden.Executor(client=grid.client)
    pool.shutdown()

    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(len, "x")
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.map(len, ["x"])


def test_a_closed_client_breaks_it(grid: ekiden.testing.Grid) -> None:
    client = grid.connect()
    pool = ekiden.Executor(client=client)
    client.close()

    with pytest.raises(concurrent.futures.BrokenExecutor):
        pool.submit(len, "x")
    with pytest.raises(concurrent.futures.BrokenExecutor):
        pool.map(len, ["x"])


def test_a_client_that_was_given_is_left_open_and_its_own_is_closed(
    grid: ekiden.testing.Grid,
) -> None:
    ekiden.Executor(client=grid.client).shutdown()
    own = ekiden.Executor(grid.address, key=grid.key)
    own.shutdown()

    assert grid.client.stats()
    with pytest.raises(errors.Closed):
        own.client.stats()


def test_shutdown_cancels_what_waits_if_asked_to(grid: ekiden.testing.Grid) -> None:
    pool = ekiden.Executor(client=grid.client)
    future = pool.submit(len, "x")
    future.wait_accepted(DEADLINE_S)

    pool.shutdown(cancel_futures=True)

    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_giving_up_a_map_cancels_what_is_left(grid: ekiden.testing.Grid) -> None:
    pool = ekiden.Executor(client=grid.client)

    with pytest.raises(TimeoutError):
        next(pool.map(len, ["a", "b"], timeout=0.5))

    grid.client.ask("stats")
    pool.shutdown()
    assert [job["state"] for job in grid.client.jobs()["jobs"]] == ["cancelled", "cancelled"]


def test_a_client_and_how_to_make_one_contradict_each_other(grid: ekiden.testing.Grid) -> None:
    with pytest.raises(errors.WrongUsage, match="give one of both"):
        ekiden.Executor("127.0.0.1:1", client=grid.client)


def test_a_chunk_of_nothing_is_refused_like_everywhere(grid: ekiden.testing.Grid) -> None:
    with pytest.raises(ValueError, match="chunksize"):
        ekiden.Executor(client=grid.client).map(len, ["a"], chunksize=0)


def test_a_number_of_processes_is_taken_where_a_pool_of_processes_has_it(
    grid: ekiden.testing.Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in grid.environment.items():
        monkeypatch.setenv(name, value)

    for pool in (ekiden.Executor(4), ekiden.Executor(max_workers=4)):
        assert pool.client.stats()["clients"] >= 1
        pool.shutdown()
