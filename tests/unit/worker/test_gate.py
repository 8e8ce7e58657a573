"""What waits for its data: held back, let through, given back; settled once, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from tests.unit.worker.nursery import on_a_loop

from ekiden.model.caches import CacheUse
from ekiden.model.jobs import CANNOT_START, Route, Spec
from ekiden.wire.messages import AssignRun, Failure
from ekiden.worker.contract import Abort, Dropped, Gone, Look, Run, RunFinished
from ekiden.worker.gate import Gate

ONE, TWO = CacheUse("one", "1" * 64, 10), CacheUse("two", "2" * 64, 10)
PLAIN = Spec("n", Route("job.assign.n"))
NEEDS_ONE = Spec("n", Route("job.assign.n"), caches=(ONE,))
NEEDS_BOTH = Spec("n", Route("job.assign.n"), caches=(ONE, TWO))


class Keeper:
    """Has the data when a test says so."""

    def __init__(self) -> None:
        self.pins: Counter[CacheUse] = Counter()
        self.asked: list[asyncio.Future[str]] = []

    async def ensure(self, uses: Iterable[CacheUse]) -> str:
        self.asked.append(asyncio.get_running_loop().create_future())
        assert all(self.pins[use] > 0 for use in uses)
        return await self.asked[-1]

    def answer(self, why: str = "") -> None:
        self.asked.pop(0).set_result(why)

    def pin(self, uses: Iterable[CacheUse], count: int = 1) -> None:
        for use in uses:
            self.pins[use] += count

    def unpin(self, uses: Iterable[CacheUse]) -> None:
        for use in uses:
            self.pins[use] -= 1
            assert self.pins[use] >= 0


class Performer:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def run(self, effect: Run) -> None:
        self.asked.append(effect)

    def abort(self, effect: Abort) -> None:
        self.asked.append(effect)

    def look(self, effect: Look) -> None:
        self.asked.append(effect)

    def close(self) -> None:
        """Nothing is open."""


class House:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.keeper = Keeper()
        self.performer = Performer()
        self.gate = Gate(self.told.append, self.keeper)
        self.gate.open(self.performer)

    def run(self, grant: int, count: int, spec: Spec, first: int = 0) -> Run:
        ids = [f"{grant}.{first + at}" for at in range(count)]
        bodies = [name.encode() for name in ids]
        effect = Run(AssignRun(grant, first, msgspec.Raw(), "ann", ids, bodies), spec)
        self.gate.run(effect)
        return effect

    @property
    def pinned(self) -> dict[str, int]:
        return {use.id: count for use, count in self.keeper.pins.items() if count}


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@on_a_loop
async def test_a_job_without_caches_passes_at_once() -> None:
    house = House()
    effect = house.run(1, 3, PLAIN)
    abort = Abort(1, [0], "cancel", PLAIN)
    house.gate.abort(abort)

    assert house.performer.asked == [effect, abort]
    assert house.keeper.asked == []


@on_a_loop
async def test_a_job_waits_for_its_data_and_holds_on_to_it_until_it_is_settled() -> None:
    house = House()
    effect = house.run(1, 4, NEEDS_BOTH)
    await settle()
    assert (house.performer.asked, house.pinned) == ([], {"one": 4, "two": 4})

    house.keeper.answer()
    await settle()
    assert house.performer.asked == [effect]

    news = [
        RunFinished(1, [0], [b""], {}, [Failure(1, "exit_code", "")]),
        Dropped(1, [2]), Gone(1, [3]),
    ]  # fmt: skip
    for event, left in zip(news, (2, 1, 0), strict=True):
        house.gate.heard(event)
        assert house.keeper.pins == Counter({ONE: left, TWO: left})
    assert house.told == news


@on_a_loop
async def test_what_cannot_be_had_fails_with_the_reason() -> None:
    house = House()
    house.run(1, 2, NEEDS_ONE, first=3)
    await settle()
    house.keeper.answer("the disk is full")
    await settle()

    failures = [Failure(at, CANNOT_START, "the disk is full") for at in (3, 4)]
    assert house.told == [RunFinished(1, (), [], {}, failures)]
    assert (house.performer.asked, house.pinned) == ([], {})


@on_a_loop
async def test_what_came_during_a_look_shares_the_next_one() -> None:
    house = House()
    first = house.run(1, 1, NEEDS_ONE)
    await settle()
    later = [house.run(2, 1, NEEDS_ONE), house.run(3, 1, NEEDS_ONE)]
    house.keeper.answer()
    await settle()
    assert house.performer.asked == [first]

    async with asyncio.timeout(10):
        while not house.keeper.asked:
            await asyncio.sleep(0.001)
    house.keeper.answer()
    await settle()

    assert house.performer.asked == [first, *later]


@pytest.mark.parametrize(
    ("why", "told"),
    [("recall", [Dropped(1, [1])]), ("cancel", [Gone(1, [1])]), ("timeout", [Gone(1, [1])]),
     ("stale", [])],
)  # fmt: skip
@on_a_loop
async def test_what_waits_is_given_up_on_the_spot_and_the_rest_goes_on(
    why: str, told: list[Any]
) -> None:
    house = House()
    house.run(1, 3, NEEDS_ONE)
    await settle()

    house.gate.abort(Abort(1, [1, 7], why, NEEDS_ONE))

    assert house.told == told
    assert house.pinned == {"one": 2}
    house.keeper.answer()
    await settle()
    aborted, *runs = house.performer.asked
    assert aborted == Abort(1, [7], why, NEEDS_ONE)
    assert [(run.run.first, run.run.ids) for run in runs] == [(0, ["1.0"]), (2, ["1.2"])]


@pytest.mark.parametrize("seed", range(30))
@on_a_loop
async def test_every_attempt_is_settled_once_in_whatever_order_things_happen(seed: int) -> None:
    house = House()
    chance = random.Random(seed)
    open_: dict[tuple[int, int], Spec] = {}
    stale: set[tuple[int, int]] = set()
    given: Counter[tuple[int, int]] = Counter()
    settled: Counter[tuple[int, int]] = Counter()
    running: set[tuple[int, int]] = set()

    def note() -> None:
        for effect in house.performer.asked:
            if isinstance(effect, Run):
                span = [
                    (effect.run.grant, effect.run.first + at) for at in range(len(effect.run.ids))
                ]
                given.update(span)
                running.update(span)
            elif effect.why == "stale":
                running.difference_update((effect.grant, at) for at in effect.offsets)
            elif effect.why != "recall" or chance.random() < 0.5:
                gone = [at for at in effect.offsets if (effect.grant, at) in running]
                running.difference_update((effect.grant, at) for at in gone)
                kind = Dropped if effect.why == "recall" else Gone
                house.gate.heard(kind(effect.grant, gone))
        house.performer.asked.clear()
        for event in house.told:
            offsets = list(event.offsets) + [f.offset for f in getattr(event, "failures", [])]
            settled.update((event.grant, at) for at in offsets)
            for at in offsets:
                open_.pop((event.grant, at), None)
        house.told.clear()

    for step in range(300):
        match chance.randrange(6):
            case 0 | 1:
                spec = chance.choice([PLAIN, NEEDS_ONE, NEEDS_BOTH])
                count = chance.randrange(1, 4)
                open_.update({(step, at): spec for at in range(count)})
                house.run(step, count, spec)
            case 2 if open_:
                (grant, _), spec = chance.choice(list(open_.items()))
                offsets = [at for number, at in open_ if number == grant]
                some = chance.sample(offsets, chance.randrange(1, len(offsets) + 1))
                why = chance.choice(["recall", "cancel", "timeout", "stale"])
                if why == "stale":
                    for at in some:
                        stale.add((grant, at))
                        open_.pop((grant, at))
                house.gate.abort(Abort(grant, some, why, spec))
            case 3 if house.keeper.asked:
                house.keeper.answer(chance.choice(["", "", "no room"]))
            case 4 if running:
                grant, at = chance.choice(sorted(running))
                running.discard((grant, at))
                house.gate.heard(RunFinished(grant, [at], [b""]))
            case _:
                await settle()
        note()
    async with asyncio.timeout(20):
        while open_:
            while house.keeper.asked:
                house.keeper.answer()
            await asyncio.sleep(0.001)
            note()
            for grant, at in sorted(running):
                running.discard((grant, at))
                house.gate.heard(RunFinished(grant, [at], [b""]))
            note()

    assert all(count == 1 for count in given.values())
    assert all(count == 1 for count in settled.values())
    assert not stale & settled.keys()
    assert house.pinned == {}
