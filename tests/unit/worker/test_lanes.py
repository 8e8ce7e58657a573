"""What every kind of child has in common: chunks, the line, starting, replacing, giving up."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.unit.worker.lane_bench import drive, functions

from ekiden.model.jobs import Route, Spec
from ekiden.wire.messages import AssignRun
from ekiden.worker.chunks import CHUNK_BYTES, Batch, Kind, Pipe
from ekiden.worker.pieces import parted

linux = pytest.mark.skipif(sys.platform != "linux", reason="children need the keeper")


def batch(count: int, size: int = 10, mean_ns: int = 0) -> Batch:
    kind = Kind()
    kind.mean_ns = mean_ns
    ids = [str(at) for at in range(count)]
    run = AssignRun(1, 100, msgspec.Raw(), "ci", ids, [b"x" * size] * count)
    return Batch(run, Spec("it", Route("job.assign.it")), kind)


# ------------------------------------------------------------------ chunks


@pytest.mark.parametrize(
    ("mean_ns", "size", "count"),
    [
        (0, 10, 1),
        (1_000, 10, 2000),
        (2_000_000, 10, 1),
        (60 * 10**9, 10, 1),
        (1_000, CHUNK_BYTES // 4, 3),
        (1_000, 2 * CHUNK_BYTES, 1),
    ],
    ids=["unknown", "short", "2 ms", "a minute", "large", "very large"],
)
def test_a_chunk_is_two_milliseconds_of_work_and_not_too_large(
    mean_ns: int, size: int, count: int
) -> None:
    assert batch(5, size, mean_ns).chunk_size() == count


def test_a_kind_believes_its_first_run_and_then_the_last_few() -> None:
    kind = Kind()

    kind.learn(1_000_000, 1)
    assert kind.mean_ns == 1_000_000
    for _ in range(20):
        kind.learn(1000, 1)
    assert kind.mean_ns < 1010


def test_pieces_are_cut_where_something_was_asked_for() -> None:
    whole = batch(6)

    kept, gone = parted(whole, range(6), {100, 103})

    assert [(low, end) for _, low, end in kept] == [(1, 3), (4, 6)]
    assert gone == [100, 103]
    assert parted(whole, range(2, 2), {100}) == ([], [])


# ------------------------------------------------------------------ pipes


def test_a_pipe_takes_more_than_its_socket_does_and_loses_nothing() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        heard: list[bytes] = []
        closed = asyncio.Event()
        pipe = Pipe(ours, heard.append, closed.set)
        data = os.urandom(3_000_000)

        pipe.write(data[:2_000_000])
        pipe.write(data[2_000_000:])
        got = b""
        while len(got) < len(data):
            got += await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
        theirs.send(b"bye")
        theirs.close()
        await asyncio.wait_for(closed.wait(), 10)
        pipe.close()

        assert got == data
        assert b"".join(heard) == b"bye"

    drive(scenario)


def test_what_a_child_left_behind_is_heard_before_its_end() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        heard: list[Any] = []
        pipe = Pipe(ours, heard.append, lambda: heard.append("closed"))

        theirs.send(b"x" * 100_000)
        theirs.close()
        pipe.drain()
        pipe.close()

        assert b"".join(heard[:-1]) == b"x" * 100_000
        assert heard[-1] == "closed"

    drive(scenario)


# ------------------------------------------------------------------ children


@linux
def test_children_are_started_when_they_are_needed_and_no_more_than_slots(tmp_path: Path) -> None:
    def slow_pid() -> int:
        time.sleep(0.05)
        return os.getpid()

    async def scenario() -> None:
        async with functions(tmp_path, 2) as it:
            assert [lane.state for lane in it.executor.lanes] == ["down", "down"]

            it.call(1, os.getpid, [()])
            await it.until(lambda: it.settled == 1)
            assert sorted(lane.state for lane in it.executor.lanes) == ["down", "up"]

            it.call(2, slow_pid, [()] * 20)
            await it.until(lambda: it.settled == 21)
            assert len(set(it.values.values())) == 2

    drive(scenario)


@linux
def test_a_child_is_replaced_after_so_many_attempts_and_none_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1, recycle_jobs=100) as it:
            for grant in range(1, 5):
                it.call(grant, os.getpid, [()] * 100)
            await it.until(lambda: it.settled == 400)

            assert 2 <= len(set(it.values.values())) <= 5
            assert it.failures == {}

    drive(scenario)


@linux
def test_a_child_that_grows_too_large_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ekiden.worker.lane.WEIGH_NS", 0)

    def grow(size: int) -> int:
        import builtins

        kept = builtins.__dict__.setdefault("kept", [])
        kept.append(b"x" * size)
        return os.getpid()

    async def scenario() -> None:
        async with functions(tmp_path, 1, recycle_mb=30) as it:
            it.call(1, grow, [(0,)])
            await it.until(lambda: it.settled == 1)
            it.call(2, grow, [(60 << 20,)])
            await it.until(lambda: it.settled == 2)
            it.call(3, grow, [(0,)])
            await it.until(lambda: it.settled == 3)

            assert it.values[1, 0] == it.values[2, 0] != it.values[3, 0]
            assert not psutil.pid_exists(it.values[1, 0])

    drive(scenario)


@linux
def test_a_child_that_is_killed_while_idle_costs_no_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, os.getpid, [()])
            await it.until(lambda: it.settled == 1)
            psutil.Process(it.values[1, 0]).kill()
            while it.executor.lanes[0].state != "down":
                await asyncio.sleep(0.001)

            it.call(2, os.getpid, [()])
            await it.until(lambda: it.settled == 2)

            assert it.failures == {}

    drive(scenario)


@linux
def test_the_loss_of_the_keeper_costs_what_ran_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, lambda: time.sleep(600), [()])
            it.call(2, lambda: "next", [()])
            await it.until(lambda: it.started)
            psutil.Process(it.executor.children.keeper_pid).kill()
            await it.until(lambda: it.settled == 2)

            assert it.failures[1, 0].cause == "worker_lost"
            assert it.values == {(2, 0): "next"}

    drive(scenario)


def has_another(children: Any, keeper: int) -> bool:
    return children.is_current() and children.keeper_pid != keeper


@linux
def test_children_that_die_with_their_keeper_do_not_count_as_unable_to_start(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 2) as it:
            lanes, children = it.executor.lanes, it.executor.children
            it.call(1, os.getpid, [()] * 20)
            for _ in range(3):
                keeper = psutil.Process(children.keeper_pid)
                await it.until(lambda: all(lane.state == "starting" for lane in lanes))
                keeper.kill()
                await it.until(partial(has_another, children, keeper.pid))
            await it.until(lambda: it.settled == 20)

            assert it.failures == {}

    drive(scenario)


@linux
def test_an_interpreter_that_cannot_start_fails_what_waits_instead_of_keeping_it(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1, env={"PYTHONHOME": "/nowhere"}) as it:
            it.call(1, os.getpid, [()] * 3)
            await it.until(lambda: it.settled == 3)

            assert {failure.cause for failure in it.failures.values()} == {"cannot_start"}
            assert "the runner cannot be kept running" in it.failures[1, 0].message

    drive(scenario)


@linux
def test_closing_tells_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 2) as it:
            it.call(1, os.getpid, [()])
            await it.until(lambda: it.settled == 1)
            it.call(2, lambda: time.sleep(600), [()] * 2)
            await it.until(lambda: len(it.started) == 2)
            pid = it.values[1, 0]
            said = len(it.events)

        assert len(it.events) == said
        assert not psutil.pid_exists(pid)

    drive(scenario)


@linux
def test_long_calls_of_uneven_length_keep_every_slot_busy(tmp_path: Path) -> None:
    """None waits behind another while a slot is free."""

    async def scenario() -> None:
        async with functions(tmp_path, 4) as it:
            it.call(1, lambda x: x, [(0,)] * 8)
            await it.until(lambda: it.settled == 8)
            it.call(2, lambda s: time.sleep(s), [(600.0,)] * 3 + [(0.001,)] * 100)
            await it.until(lambda: it.settled == 108)

            assert {offset for grant, offset in it.outputs if grant == 2} == set(range(3, 103))

    drive(scenario)


@linux
@pytest.mark.parametrize("seed", range(4))
def test_every_attempt_is_settled_once_whatever_is_asked_in_between(
    tmp_path: Path, seed: int
) -> None:
    """Calls that are quick, slow, or crash, with recalls, cancels and time limits at random."""
    dice = random.Random(seed)

    def work(what: str) -> str:
        if what == "crash":
            os._exit(1)
        time.sleep({"quick": 0, "slow": 0.03}[what])
        return what

    def plan() -> list[tuple[str]]:
        kinds = dice.choices(["quick", "slow", "crash"], [60, 3, 1], k=dice.randint(1, 250))
        return [(kind,) for kind in kinds]

    async def scenario() -> None:
        async with functions(tmp_path, 2) as it:
            given: set[tuple[int, int]] = set()
            stale: set[tuple[int, int]] = set()
            for grant in range(1, 13):
                calls = plan()
                it.call(grant, work, calls)
                given |= {(grant, at) for at in range(len(calls))}
                for _ in range(dice.randint(0, 3)):
                    await asyncio.sleep(dice.choice([0, 0.001, 0.02]))
                    target = dice.randint(1, grant)
                    mine = sorted(at for number, at in given if number == target)
                    asked = dice.sample(mine, dice.randint(1, len(mine)))
                    why = dice.choice(["recall", "cancel", "timeout", "stale"])
                    settled = told_once(it)
                    asked = [at for at in asked if (target, at) not in settled | stale]
                    if why == "stale":
                        stale |= {(target, at) for at in asked}
                    it.abort(target, asked, why)

            await it.until(lambda: told_once(it) | stale == given)
            # Nothing is left over, and what is idle is ready for more.
            it.call(99, work, [("quick",)])
            await it.until(lambda: (99, 0) in it.outputs)
            assert all(not lane.marks for lane in it.executor.lanes)

    drive(scenario)


def told_once(it: Any) -> set[tuple[int, int]]:
    told = [*it.outputs, *it.failures, *it.dropped, *it.gone]
    assert len(told) == len(set(told)), "told twice"
    return set(told)
