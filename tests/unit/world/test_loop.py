"""The driver: one turn per batch, a timer that follows the deadline, and bugs that end it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import uvloop

from ekiden.machine import Log
from ekiden.world.loop import Driver, Durations, run

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=LOOPS)
def go(request: Any) -> Any:
    """Runs a coroutine to its end on either event loop, with a deadline."""

    def run_it(main: Any) -> Any:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(asyncio.wait_for(main, 20))

    return run_it


class Recorder:
    """Notes what it is fed and answers with what it was told to."""

    def __init__(self) -> None:
        self.turns: list[list[object]] = []
        self.fed: list[object] = []
        self.deadline: int | None = None
        self.effects: list[object] = []
        self.on_turn = asyncio.Event()

    def receive(self, event: Any, now: Any) -> None:
        if event == "explode in receive":
            raise ZeroDivisionError(event)
        self.fed.append(event)

    def advance(self, now: Any) -> Any:
        gathered, self.fed = self.fed, []
        self.turns.append(gathered)
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
        if "explode in advance" in gathered:
            raise ZeroDivisionError("explode in advance")
        self.on_turn.set()
        effects, self.effects = self.effects, []
        return effects

    def next_deadline(self) -> Any:
        return self.deadline

    async def wait_turn(self) -> None:
        await self.on_turn.wait()
        self.on_turn.clear()


def test_all_that_arrives_in_one_iteration_is_one_turn(go: Any) -> None:
    async def main() -> None:
        machine = Recorder()
        driver = Driver(machine, perform={})
        for event in ("a", "b", "c"):
            driver.feed(event)
        await machine.wait_turn()
        driver.feed("d")
        await machine.wait_turn()
        assert machine.turns == [["a", "b", "c"], ["d"]]
        assert driver.stats().turns == 2

    go(main())


def test_effects_go_to_the_handler_of_their_type_in_order(go: Any) -> None:
    async def main() -> None:
        machine = Recorder()
        done: list[object] = []
        driver = Driver(machine, perform={str: done.append})
        driver.handle(Log, done.append)
        machine.effects = ["one", Log("info", "two", {}), "three"]
        driver.wake()
        await machine.wait_turn()
        assert done == ["one", Log("info", "two", {}), "three"]

    go(main())


def test_effects_may_go_to_one_function(go: Any) -> None:
    async def main() -> None:
        machine = Recorder()
        done: list[object] = []
        driver = Driver(machine, perform=done.extend)
        machine.effects = ["one", 2]
        driver.wake()
        await machine.wait_turn()
        assert done == ["one", 2]

    go(main())


def test_an_answer_that_comes_at_once_is_decided_on_at_once_but_only_once(go: Any) -> None:
    async def main() -> None:
        machine = Recorder()
        driver = Driver(machine)

        def echo(effect: str) -> None:
            if len(effect) < 3:
                machine.effects = [effect + "!"]
            driver.feed(f"echo of {effect}")

        driver.handle(str, echo)
        machine.effects = ["x"]

        driver.turn()
        assert machine.turns == [[], ["echo of x"]]

        while len(machine.turns) < 4:
            await machine.wait_turn()
        assert machine.turns[2:] == [["echo of x!"], ["echo of x!!"]]

    go(main())


@pytest.mark.parametrize("where", ["receive", "advance"])
def test_a_bug_in_the_machine_ends_the_driver(go: Any, where: Any) -> None:
    async def main() -> None:
        machine = Recorder()
        driver = Driver(machine, perform={})
        driver.feed(f"explode in {where}")
        with pytest.raises(ZeroDivisionError, match=where):
            await driver.wait_ended()
        turns = len(machine.turns)
        driver.feed("after the end")
        driver.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert driver.ended
        assert len(machine.turns) == turns
        assert "after the end" not in machine.fed

    go(main())


def test_a_bug_in_a_handler_or_a_missing_handler_ends_the_driver(go: Any) -> None:
    async def main() -> None:
        def explode(_: Any) -> None:
            raise ZeroDivisionError

        broken: dict[type, Any] = {str: explode}
        for perform, kind in ((broken, ZeroDivisionError), ({}, KeyError)):
            machine = Recorder()
            machine.effects = ["x"]
            driver = Driver(machine, perform=perform)
            driver.wake()
            with pytest.raises(kind):
                await driver.failed

    go(main())


def test_the_timer_follows_the_deadline_as_it_moves(go: Any) -> None:
    async def main() -> None:
        machine = Recorder()
        driver = Driver(machine, perform={})
        started = time.monotonic_ns()
        machine.deadline = started + 3600 * 10**9
        driver.wake()
        await machine.wait_turn()
        machine.deadline = started + 30_000_000
        driver.feed("sooner")
        await machine.wait_turn()
        await machine.wait_turn()
        assert time.monotonic_ns() >= started + 30_000_000
        assert machine.turns == [[], ["sooner"], []]
        assert machine.deadline is None

    go(main())


def test_a_deadline_that_moved_away_costs_no_turn(go: Any) -> None:
    async def main() -> None:
        machine = Recorder()
        driver = Driver(machine, perform={})
        machine.deadline = time.monotonic_ns() + 10_000_000
        driver.wake()
        await machine.wait_turn()
        machine.deadline = later = time.monotonic_ns() + 60_000_000
        await machine.wait_turn()
        assert time.monotonic_ns() >= later
        assert len(machine.turns) == 2

    go(main())


def test_a_stopped_driver_has_no_timer_and_no_error(go: Any) -> None:
    async def main() -> None:
        machine = Recorder()
        driver = Driver(machine, perform={})
        machine.deadline = time.monotonic_ns() + 10**9
        driver.wake()
        await machine.wait_turn()
        driver.stop()
        await driver.wait_ended()
        driver.stop()
        driver.fail(ValueError("too late"))
        await driver.wait_ended()

    go(main())


def test_run_uses_uvloop_where_it_can_be_had() -> None:
    async def main() -> Any:
        return type(asyncio.get_running_loop()).__module__

    assert run(main()).startswith("uvloop")


def test_the_histogram_is_exact_to_an_eighth_and_fixed_in_size() -> None:
    durations = Durations()
    for _ in range(990):
        durations.add(1_000_000)
    for _ in range(10):
        durations.add(50_000_000)
    assert 1_000_000 <= durations.quantile_ns(0.98) <= 1_130_000
    assert durations.quantile_ns(0.999) == 50_000_000
    assert durations.max_ns == 50_000_000
    for exponent in range(63):
        durations.add(1 << exponent)
    assert durations.count == 1063


@pytest.mark.parametrize("value_ns", [0, 1000, 20_000, 123_456, 7_654_321, 3_600 * 10**9])
def test_a_quantile_is_never_below_what_was_counted(value_ns: Any) -> None:
    durations = Durations()
    durations.add(value_ns)
    durations.add(value_ns)
    durations.max_ns *= 2  # Otherwise the largest value caps the answer.
    assert value_ns <= durations.quantile_ns(0.5) <= max(value_ns * 1.13, 1024)
