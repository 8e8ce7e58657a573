"""Handlers in real threads and on a real loop: nothing is lost, run twice or held back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from ekiden import limits
from ekiden.model.jobs import FORM_CALL, Call, Route, Spec
from ekiden.wire.messages import AssignRun, Failure
from ekiden.worker.executors import HandlerExecutor
from ekiden.worker.handlers import Handlers, Job
from ekiden.worker.machine import Abort, Dropped, ProgressMade, Run, RunFinished, Started

DEADLINE_S = 20.0


class Bench:
    """An executor and everything it has said."""

    def __init__(self, handlers: Handlers, slots: int) -> None:
        self.events: list[Any] = []
        self._changed = asyncio.Event()
        self.executor = HandlerExecutor(handlers, slots, self._heard)

    def _heard(self, event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until something was said that makes `condition` true."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def run(self, grant: int, bodies: list[bytes], name: str = "it", **spec: Any) -> None:
        ids = [f"g{grant}o{at}" for at in range(len(bodies))]
        attempts = spec.pop("attempts", [])
        first = spec.pop("first", 0)
        whole = Spec(name, Route(f"job.assign.{name}"), **spec)
        run = AssignRun(grant, first, msgspec.Raw(), "ci", ids, bodies, attempts)
        self.executor.run(Run(run, whole))

    @property
    def outputs(self) -> dict[tuple[int, int], bytes]:
        found: dict[tuple[int, int], bytes] = {}
        for event in self.events:
            if isinstance(event, RunFinished):
                for at, output in zip(event.offsets, event.outputs, strict=True):
                    assert (event.grant, at) not in found, "told twice"
                    found[event.grant, at] = output
        return found

    @property
    def failures(self) -> dict[tuple[int, int], Failure]:
        return {
            (event.grant, failure.offset): failure
            for event in self.events
            if isinstance(event, RunFinished)
            for failure in event.failures
        }

    @property
    def started(self) -> list[tuple[int, int]]:
        return [
            (grant, offset)
            for event in self.events
            if isinstance(event, Started)
            for grant, offset, _ in event.attempts
        ]


@contextlib.asynccontextmanager
async def bench(function: Callable[[Job], Any], slots: int = 2) -> AsyncIterator[Bench]:
    handlers = Handlers()
    handlers.add("job.assign.it", function)
    made = Bench(handlers, slots)
    try:
        yield made
    finally:
        made.executor.close()


def drive(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


async def one(function: Callable[[Job], Any], body: bytes = b"", **spec: Any) -> Bench:
    """Run one attempt to its end."""
    async with bench(function) as it:
        it.run(1, [body], **spec)
        await it.until(lambda: it.outputs or it.failures)
        return it


def async_version(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
    async def handler(job: Job) -> Any:
        return function(job)

    return handler


both_kinds = pytest.mark.parametrize("kind", [lambda f: f, async_version], ids=["plain", "async"])


# ------------------------------------------------------------------ results


@both_kinds
@pytest.mark.parametrize(
    ("value", "output"),
    [
        (b"raw", b"raw"),
        (bytearray(b"raw"), b"raw"),
        ("žluť", "žluť".encode()),
        (None, b""),
        ({"a": [1, 2.5, None]}, b'{"a":[1,2.5,null]}'),
        (7, b"7"),
    ],
)
def test_what_a_handler_returns_becomes_bytes(kind: Any, value: Any, output: bytes) -> None:
    async def scenario() -> None:
        it = await one(kind(lambda _: value))
        assert it.outputs == {(1, 0): output}

    drive(scenario)


@both_kinds
def test_every_attempt_of_many_batches_is_told_exactly_once(kind: Any) -> None:
    async def scenario() -> None:
        async with bench(kind(lambda job: job.payload), slots=4) as it:
            for grant in range(40):
                it.run(grant, [f"{grant}.{at}".encode() for at in range(250)])
            await it.until(lambda: len(it.outputs) == 10_000)
            assert all(out == f"{g}.{o}".encode() for (g, o), out in it.outputs.items())

    drive(scenario)


def test_short_runs_come_back_in_batches_not_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock on which every look takes a microsecond: how long runs take is not left to luck.
    looks = itertools.count(0, 1000)
    monkeypatch.setattr("ekiden.worker.executors.time.monotonic_ns", lambda: next(looks))

    async def scenario() -> None:
        async with bench(lambda job: job.payload) as it:
            for grant in range(40):
                it.run(grant, [b""] * 250)
            await it.until(lambda: len(it.outputs) == 10_000)
            assert len(it.events) < 2000

    drive(scenario)


def test_a_job_knows_what_it_is() -> None:
    seen: list[Job] = []

    async def scenario() -> None:
        body = msgspec.msgpack.encode(Call(b"data", [1, "two"]))
        await one(seen.append, body, form=FORM_CALL, attempts=[3])

    drive(scenario)

    (job,) = seen
    assert (job.id, job.payload, job.args, job.attempt) == ("g1o0", b"data", [1, "two"], 3)
    assert (job.name, job.subject, job.client) == ("it", "job.assign.it", "ci")
    assert not job.cancelled


# ------------------------------------------------------------------ failures


@both_kinds
@pytest.mark.parametrize("error", [ValueError("bad input"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_handler_raises_is_its_own_failure(kind: Any, error: BaseException) -> None:
    def handler(job: Job) -> bytes:
        if job.payload == b"bad":
            raise error
        return b"fine"

    async def scenario() -> None:
        async with bench(kind(handler)) as it:
            it.run(1, [b"good", b"bad", b"good"])
            await it.until(lambda: len(it.outputs) == 2 and len(it.failures) == 1)
            assert set(it.outputs) == {(1, 0), (1, 2)}
            failure = it.failures[1, 1]
            assert failure.cause == "handler_error"
            assert failure.message.startswith(type(error).__name__)
            assert "in handler" in failure.message
            it.run(2, [b"good"])
            await it.until(lambda: (2, 0) in it.outputs)

    drive(scenario)


def test_a_long_error_is_cut() -> None:
    def handler(_: Job) -> bytes:
        raise ValueError("x" * 100_000 + "\ud800")

    async def scenario() -> None:
        it = await one(handler)
        message = it.failures[1, 0].message
        assert len(message) <= limits.ERROR_TEXT_MAX
        assert "in handler" in message

    drive(scenario)


@both_kinds
def test_a_result_over_the_limit_is_a_failure_that_says_so(kind: Any) -> None:
    async def scenario() -> None:
        it = await one(kind(lambda _: b"x" * (limits.PAYLOAD_BYTES_MAX + 1)))
        assert it.failures[1, 0].cause == "result_too_large"

    drive(scenario)


def test_a_result_that_json_cannot_hold_is_a_failure() -> None:
    async def scenario() -> None:
        it = await one(lambda _: object())
        assert it.failures[1, 0].cause == "handler_error"
        assert "object" in it.failures[1, 0].message

    drive(scenario)


def test_a_body_that_is_no_call_cannot_start() -> None:
    async def scenario() -> None:
        it = await one(lambda _: b"", b"\xc1", form=FORM_CALL)
        assert it.failures[1, 0].cause == "cannot_start"

    drive(scenario)


def test_a_job_nobody_handles_cannot_start_and_says_what_is_handled() -> None:
    async def scenario() -> None:
        async with bench(lambda _: b"") as it:
            it.run(1, [b"", b""], name="other")
            assert [f.cause for f in it.failures.values()] == ["cannot_start"] * 2
            assert "job.assign.it" in it.failures[1, 0].message

    drive(scenario)


# ------------------------------------------------------------------ slow ones


def test_a_slow_run_is_announced_and_holds_no_neighbour_back() -> None:
    release = threading.Event()

    def handler(job: Job) -> bytes:
        if job.payload == b"slow":
            assert release.wait(DEADLINE_S)
        return job.payload

    async def scenario() -> None:
        async with bench(handler, slots=2) as it:
            # Teach it that runs are short, so that the slow one sits in the middle of a chunk.
            for grant in range(20):
                it.run(grant, [b""] * 250)
            await it.until(lambda: len(it.outputs) == 5000)

            it.run(99, [b"a"] * 100 + [b"slow"] + [b"b"] * 100)
            await it.until(lambda: len(it.outputs) == 5200)

            await it.until(lambda: it.started == [(99, 100)])
            release.set()
            await it.until(lambda: it.outputs.get((99, 100)) == b"slow")

    drive(scenario)


def test_slow_async_runs_are_announced_and_bounded_by_the_slots() -> None:
    most = running = 0

    async def handler(_: Job) -> bytes:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.03)
        running -= 1
        return b""

    async def scenario() -> None:
        async with bench(handler, slots=3) as it:
            it.run(1, [b""] * 9)
            await it.until(lambda: len(it.outputs) == 9)
            assert it.started

    drive(scenario)
    assert most == 3


def test_an_async_handler_that_blocks_does_not_block_the_machine() -> None:
    release = threading.Event()

    async def handler(_: Job) -> bytes:
        release.wait(DEADLINE_S)
        return b""

    async def scenario() -> None:
        async with bench(handler) as it:
            it.run(1, [b""])
            await it.until(lambda: it.started == [(1, 0)])
            release.set()
            await it.until(lambda: it.outputs)

    drive(scenario)


def test_the_watch_rests_when_nothing_runs() -> None:
    async def scenario() -> None:
        async with bench(lambda _: b"") as it:
            it.run(1, [b""])
            await it.until(lambda: it.outputs)
            async with asyncio.timeout(DEADLINE_S):
                while it.executor._watch_timer is not None:
                    await asyncio.sleep(0.005)

    drive(scenario)


# ------------------------------------------------------------------ ending


@pytest.mark.parametrize("why", ["cancel", "timeout", "stale"])
def test_an_ended_plain_run_gives_its_slot_back_and_its_return_is_ignored(why: str) -> None:
    inside, release = threading.Event(), threading.Event()
    noticed: list[bool] = []

    def handler(job: Job) -> bytes:
        if job.payload == b"stuck":
            inside.set()
            assert release.wait(DEADLINE_S)
            noticed.append(job.cancelled)
        return job.payload

    async def scenario() -> None:
        async with bench(handler, slots=1) as it:
            it.run(1, [b"stuck", b"next"])
            await it.until(lambda: it.started == [(1, 0)])

            it.executor.abort(Abort(1, [0], why))
            await it.until(lambda: it.outputs == {(1, 1): b"next"})

            release.set()
            it.run(2, [b"more"])
            await it.until(lambda: len(it.outputs) == 2)
            async with asyncio.timeout(DEADLINE_S):
                while it.executor._abandoned or not noticed:
                    await asyncio.sleep(0.005)
            assert (1, 0) not in it.outputs
            assert not it.failures

    drive(scenario)
    assert inside.is_set()
    assert noticed == [True]


def test_an_ended_async_run_is_cancelled_and_gives_its_slot_back() -> None:
    ended = threading.Event()

    async def handler(job: Job) -> bytes:
        if job.payload == b"stuck":
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()
        return job.payload

    async def scenario() -> None:
        async with bench(handler, slots=1) as it:
            it.run(1, [b"stuck", b"next"])
            await it.until(lambda: it.started == [(1, 0)])

            it.executor.abort(Abort(1, [0], "cancel"))

            await it.until(lambda: it.outputs == {(1, 1): b"next"})
            assert not it.failures

    drive(scenario)
    assert ended.wait(DEADLINE_S)


@both_kinds
def test_what_has_not_begun_is_given_back_on_recall_and_what_runs_goes_on(kind: Any) -> None:
    release = threading.Event()

    def handler(_: Job) -> bytes:
        assert release.wait(DEADLINE_S)
        return b"done"

    async def scenario() -> None:
        async with bench(kind(handler), slots=1) as it:
            it.run(1, [b""] * 5)
            await it.until(lambda: it.started == [(1, 0)])

            it.executor.abort(Abort(1, [0, 1, 2, 4], "recall"))
            assert it.events[-1] == Dropped(1, [1, 2, 4])

            release.set()
            await it.until(lambda: set(it.outputs) == {(1, 0), (1, 3)})

    drive(scenario)


def test_a_later_attempt_that_is_ended_before_it_begins_never_runs() -> None:
    ran: list[str] = []

    def handler(job: Job) -> None:
        ran.append(job.id)

    async def scenario() -> None:
        async with bench(handler) as it:
            it.run(1, [b""], attempts=[2])
            it.executor.abort(Abort(1, [0], "recall"))
            assert it.events == [Dropped(1, [0])]
            it.run(2, [b""])
            await it.until(lambda: it.outputs)

    drive(scenario)
    assert ran == ["g2o0"]


def test_runs_and_recalls_at_random_moments_lose_and_double_nothing() -> None:
    ran: list[str] = []

    def handler(job: Job) -> bytes:
        ran.append(job.id)
        if job.payload:
            time.sleep(0.0002)
        return b""

    async def scenario() -> None:
        async with bench(handler, slots=4) as it:
            dropped: set[tuple[int, int]] = set()

            def settled() -> int:
                for event in it.events:
                    if isinstance(event, Dropped):
                        dropped.update((event.grant, at) for at in event.offsets)
                return len(it.outputs) + len(dropped)

            for grant in range(60):
                it.run(grant, [b"x" * (at % 7 == 0) for at in range(100)])
                await asyncio.sleep(0)
                it.executor.abort(Abort(grant, list(range(0, 100, 3)), "recall"))
            await it.until(lambda: settled() == 6000)
            assert dropped.isdisjoint(it.outputs)
            assert len(ran) == len(set(ran)) == len(it.outputs)

    drive(scenario)


# ------------------------------------------------------------------ progress


@both_kinds
def test_the_last_progress_arrives_and_before_the_outcome(kind: Any) -> None:
    def handler(job: Job) -> bytes:
        for percent in range(1000):
            job.progress({"percent": percent})
        return b"done"

    async def scenario() -> None:
        it = await one(kind(handler))
        notes = [event for event in it.events if isinstance(event, ProgressMade)]
        assert notes[-1] == ProgressMade(1, 0, b'{"percent":999}')
        assert len(notes) < 20
        assert isinstance(it.events[-1], RunFinished)

    drive(scenario)


def test_too_much_progress_is_the_handlers_failure() -> None:
    async def scenario() -> None:
        it = await one(lambda job: job.progress(b"x" * (1 << 20)))
        assert it.failures[1, 0].message.startswith("TooLarge")

    drive(scenario)
