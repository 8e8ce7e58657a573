"""Python functions in real runner processes: values, exceptions, crashes, cancels."""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import signal
import sys
import time
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec
import psutil
import pytest
from tests.unit.worker.lane_bench import FunctionBench, drive, functions

from ekiden import limits
from ekiden.model.jobs import FORM_FUNCTION, OUT_STORED, Route, Spec
from ekiden.model.work import FileRef
from ekiden.worker import lane
from ekiden.worker.contract import Started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children need the keeper")


async def one(tmp_path: Path, function: Any, *args: Any, **options: Any) -> FunctionBench:
    """Run one call to its end."""
    async with functions(tmp_path, 1) as it:
        it.call(1, function, [args], **options)
        await it.until(lambda: it.settled)
        return it


# ------------------------------------------------------------------ values and exceptions


def test_a_function_gets_its_arguments_and_its_value_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        it = await one(tmp_path, lambda a, b: {"sum": a + b}, 2, 3)

        assert it.values == {(1, 0): {"sum": 5}}
        assert it.failures == {}

    drive(scenario)


def test_many_calls_come_back_once_each_and_the_function_is_fetched_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path) as it:
            for grant in range(1, 9):
                it.call(grant, lambda x: x + 1, [(at,) for at in range(250)])
            await it.until(lambda: it.settled == 2000)

            assert it.values == {(g, at): at + 1 for g in range(1, 9) for at in range(250)}
            assert it.store.reads == 1

    drive(scenario)


def test_an_exception_comes_back_as_itself_with_where_it_was_raised(tmp_path: Path) -> None:
    def inner(x: int) -> int:
        return 1 // x

    async def scenario() -> None:
        it = await one(tmp_path, lambda x: inner(x), 0)

        failure = it.failures[1, 0]
        assert failure.cause == "handler_error"
        assert failure.message.startswith("ZeroDivisionError: ")
        assert "in inner" in failure.message
        error, text = pickle.loads(failure.detail)
        assert type(error) is ZeroDivisionError
        assert "Traceback" in text
        assert "in inner" in text
        assert "_run_chunk" not in text

    drive(scenario)


def test_an_exception_of_a_class_of_the_callers_own_comes_back_as_that_very_class(
    tmp_path: Path,
) -> None:
    class Plain(Exception):
        pass

    # As in a script: the runner's __main__ knows nothing of it.
    Plain.__module__, Plain.__qualname__ = "__main__", "Plain"

    def fails() -> None:
        raise Plain("no price", 7)

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, fails, [()])
            await it.until(lambda: it.settled == 1)

            error, text = pickle.loads(it.failures[1, 0].detail)
            assert type(error) is Plain
            assert error.args == ("no price", 7)
            assert "in fails" in text

    drive(scenario)


def test_an_exception_too_large_or_unpicklable_comes_back_as_text(tmp_path: Path) -> None:
    def raise_large() -> None:
        raise ValueError("x" * limits.DETAIL_BYTES_MAX)

    def raise_odd() -> None:
        class Odd(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__("odd")

        raise Odd(1, 2)

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, raise_large, [()])
            it.call(2, raise_odd, [()])
            await it.until(lambda: it.settled == 2)

            assert it.failures[1, 0].message.startswith("ValueError: xxx")
            assert it.failures[2, 0].message.startswith("Odd: odd")
            assert it.failures[1, 0].detail == it.failures[2, 0].detail == b""

    drive(scenario)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_leaving_the_interpreter_is_a_failure_of_that_call_alone(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    def leave(x: int) -> int:
        if x == 1:
            raise kind(3)
        return os.getpid()

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, leave, [(0,), (1,), (2,)])
            await it.until(lambda: it.settled == 3)

            assert it.failures[1, 1].message.startswith(kind.__name__)
            assert it.failures[1, 1].detail == b""
            assert it.values[1, 0] == it.values[1, 2]

    drive(scenario)


def test_what_pickle_refuses_travels_by_value(tmp_path: Path) -> None:
    async def scenario() -> None:
        it = await one(tmp_path, lambda n: lambda x: x * n, 3)

        assert it.values[1, 0](5) == 15

    drive(scenario)


def test_a_result_that_cannot_travel_is_a_failure_that_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        it = await one(tmp_path, lambda: __import__("threading").Lock())

        assert it.failures[1, 0].cause == "handler_error"
        assert "the result is of type lock, which cannot be pickled" in it.failures[1, 0].message

    drive(scenario)


def test_a_large_result_goes_by_way_of_the_store(tmp_path: Path) -> None:
    size = limits.INLINE_FILE_BYTES + 1

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, lambda n: b"x" * n, [(size,), (2,)])
            await it.until(lambda: it.settled == 2)

            ref = msgspec.msgpack.decode(it.outputs[1, 0], type=FileRef)
            assert it.notes[1, 0].form == OUT_STORED
            assert pickle.loads(it.store.blobs[ref.blob]) == b"x" * size
            assert ref.size == len(it.store.blobs[ref.blob])
            assert it.blobs == {(1, 0): [(ref.blob, ref.size)]}
            assert pickle.loads(it.outputs[1, 1]) == b"xx"

    drive(scenario)


def test_what_has_run_is_not_given_back_while_its_result_is_being_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            asked: list[Any] = []
            go_on = asyncio.Event()
            put = it.store.put

            async def slowly(source: Any) -> Any:
                asked.append(source)
                await go_on.wait()
                return await put(source)

            it.store.put = slowly
            it.call(1, lambda: b"x" * 100_000, [()])
            while not asked:
                await asyncio.sleep(0.01)

            it.abort(1, [0], "recall")
            go_on.set()
            await it.until(lambda: it.settled or it.dropped)

            assert it.dropped == []
            assert it.notes[1, 0].form == OUT_STORED

    drive(scenario)


def test_a_result_stays_where_its_own_keeper_was(tmp_path: Path) -> None:
    room = tmp_path / "of-a-dead-one" / "r1"
    room.mkdir(parents=True)
    (room / "result-1").write_bytes(b"value")

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            put = it.store.put
            sources: list[Path] = []

            async def seeing(source: Any) -> Any:
                sources.append(source)
                return await put(source)

            it.store.put = seeing
            it.executor.keep((1, 0), str(room / "result-1"))
            await it.until(lambda: it.settled)

            assert [source.parent for source in sources] == [room.parent]

    drive(scenario)


def test_a_result_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    def large() -> bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return b"x" * (2 << 20)

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, large, [()])
            await it.until(lambda: it.settled)

            assert it.failures[1, 0].cause == "cannot_start"
            assert "cannot be written" in it.failures[1, 0].message
            assert list(tmp_path.glob("keeper-*/r*/*")) == []  # noqa: ASYNC240

    drive(scenario)


def test_what_functions_print_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "WEIGH_NS", 0)
    monkeypatch.setattr(lane, "OUTPUT_BYTES_MAX", 10_000)

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            for grant in range(1, 102):
                it.call(grant, lambda: print("x" * 2_000, flush=True), [()])
                await it.until(lambda: it.settled == grant)  # noqa: B023

            sizes = [path.stat().st_size for path in tmp_path.glob("keeper-*/r*.out")]  # noqa: ASYNC240
            assert 0 < max(sizes) <= 12_001

    drive(scenario)


def test_what_a_function_prints_is_no_part_of_the_conversation(tmp_path: Path) -> None:
    def loud(x: int) -> int:
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr)
        return x

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, loud, [(at,) for at in range(20)])
            await it.until(lambda: it.settled == 20)

            assert len(it.values) == 20

    drive(scenario)


# ------------------------------------------------------------------ what cannot start


def test_a_function_of_another_python_is_not_opened(tmp_path: Path) -> None:
    async def scenario() -> None:
        it = await one(tmp_path, lambda: 1, python="3.12")

        assert it.failures[1, 0].cause == "cannot_start"
        assert "was made by Python 3.12, this worker runs 3.11" in it.failures[1, 0].message
        assert it.store.reads == 0

    drive(scenario)


def test_a_function_that_the_store_does_not_have_cannot_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            spec = it.spec_of(lambda: 1)
            it.store.blobs.clear()
            it.hand(1, [b"", b""], spec, [])
            await it.until(lambda: it.settled == 2)

            assert {failure.cause for failure in it.failures.values()} == {"cannot_start"}
            assert "cannot be fetched" in it.failures[1, 0].message

    drive(scenario)


def test_a_module_that_is_not_here_is_named(tmp_path: Path) -> None:
    code = b"cno_such_module_of_ours\nwork\n."

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            spec = it.spec_of(lambda: 1)
            function = msgspec.msgpack.decode(spec.shared)
            function[0] = it.store.add(code)
            spec = Spec(
                "it",
                Route("job.function.py311.it"),
                form=FORM_FUNCTION,
                shared=msgspec.msgpack.encode(function),
            )
            it.hand(1, [pickle.dumps(((), {}))], spec, [])
            await it.until(lambda: it.settled)

            assert it.failures[1, 0].cause == "cannot_start"
            assert "No module named 'no_such_module_of_ours'" in it.failures[1, 0].message

    drive(scenario)


def test_a_spec_that_names_no_function_cannot_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.hand(1, [b""], Spec("it", Route("job.function.py311.it"), form=FORM_FUNCTION), [])

            assert it.failures[1, 0].cause == "cannot_start"

    drive(scenario)


def test_arguments_that_cannot_be_opened_are_told_and_harm_no_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            bodies = [b"garbage", pickle.dumps(((4,), {}))]
            it.hand(1, bodies, it.spec_of(lambda x: x), [])
            await it.until(lambda: it.settled == 2)

            assert it.failures[1, 0].cause == "cannot_start"
            assert "the arguments cannot be opened" in it.failures[1, 0].message
            assert it.values == {(1, 1): 4}

    drive(scenario)


# ------------------------------------------------------------------ crashes


@pytest.mark.parametrize(
    ("crash", "cause", "said"),
    [
        (lambda: os._exit(3), "exit_code", "code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "signal", "SIGSEGV"),
    ],
    ids=["exit", "segfault"],
)
def test_a_crash_is_the_failure_of_the_call_that_ran_and_of_no_other(
    tmp_path: Path, crash: Any, cause: str, said: str
) -> None:
    def sometimes(x: int) -> int:
        if x % 100 == 50:
            crash()
        return x

    async def scenario() -> None:
        async with functions(tmp_path) as it:
            # Chunks are large by then: those beside a crash were sent together with it.
            it.call(1, sometimes, [(0,)] * 250)
            await it.until(lambda: it.settled == 250)
            it.call(2, sometimes, [(at,) for at in range(250)])
            await it.until(lambda: it.settled == 500)

            assert sorted(it.failures) == [(2, 50), (2, 150)]
            assert {failure.cause for failure in it.failures.values()} == {cause}
            assert said in it.failures[2, 50].message
            assert it.values[2, 249] == 249

    drive(scenario)


def test_calls_that_all_crash_fail_one_by_one_and_the_next_function_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, lambda: os._exit(1), [()] * 5)
            it.call(2, lambda: "fine", [()])
            await it.until(lambda: it.settled == 6)

            assert {failure.cause for failure in it.failures.values()} == {"exit_code"}
            assert it.values == {(2, 0): "fine"}

    drive(scenario)


def test_the_last_words_on_stderr_are_in_the_message_of_a_crash(tmp_path: Path) -> None:
    def crash() -> None:
        print("the licence server is gone", file=sys.stderr)
        os._exit(4)

    async def scenario() -> None:
        it = await one(tmp_path, crash)

        assert "the licence server is gone" in it.failures[1, 0].message

    drive(scenario)


# ------------------------------------------------------------------ cancel, timeout, recall


def alive(path: Path) -> bool:
    return psutil.pid_exists(int(path.read_text()))


def written(path: Path) -> bool:
    """Whether its one write has happened."""
    return path.exists() and bool(path.read_text())


def sleep_with_child(path: str, seconds: float) -> None:
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(child.pid))
    time.sleep(seconds)


@pytest.mark.parametrize("why", ["cancel", "timeout"])
def test_ending_a_call_ends_all_it_started_and_says_so_afterwards(tmp_path: Path, why: str) -> None:
    pid_file = tmp_path / "pid"

    async def scenario() -> None:
        async with functions(tmp_path / "scratch", 1) as it:
            it.call(1, sleep_with_child_by_value(), [(str(pid_file), 600.0)])
            it.call(2, lambda: "next", [()])
            await it.until(lambda: it.started == [(1, 0)] and written(pid_file))
            assert alive(pid_file)

            it.abort(1, [0], why)
            await it.until(lambda: it.gone)

            assert it.gone == [(1, 0)]
            assert not alive(pid_file)
            await it.until(lambda: it.settled)
            assert it.values == {(2, 0): "next"}

    drive(scenario)


def sleep_with_child_by_value() -> Any:
    """The module of this test is not where a runner looks for modules."""
    known = {"Path": Path, "time": time, "__builtins__": __builtins__}
    return FunctionType(sleep_with_child.__code__, known)


def test_a_call_that_holds_the_interpreters_lock_can_be_ended(tmp_path: Path) -> None:
    def hold() -> None:
        import re

        re.match(r"(a+)+$", "a" * 64 + "b")

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, hold, [()])
            await it.until(lambda: it.started)

            it.abort(1, [0], "cancel")
            await it.until(lambda: it.gone)

            assert it.settled == 0

    drive(scenario)


def test_calls_beside_one_that_is_ended_run_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def slow_at_ten(x: int) -> int:
        if x == 10:
            time.sleep(600)
        return x

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, slow_at_ten, [(0,)] * 250)
            await it.until(lambda: it.settled == 250)
            it.call(2, slow_at_ten, [(at,) for at in range(250)])
            await it.until(lambda: (2, 10) in it.started)

            it.abort(2, [10, 200], "cancel")
            await it.until(lambda: it.settled == 250 + 248 and len(it.gone) == 2)

            assert sorted(it.gone) == [(2, 10), (2, 200)]
            assert it.failures == {}

    drive(scenario)


def test_what_has_not_begun_is_given_back_from_behind_a_slow_call(tmp_path: Path) -> None:
    def slow_at_zero(x: int) -> int:
        if x == 0:
            time.sleep(600)
        return x

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, slow_at_zero, [(1,)] * 250)
            await it.until(lambda: it.settled == 250)
            it.call(2, slow_at_zero, [(at,) for at in range(250)])

            it.abort(2, list(range(250)), "recall")
            await it.until(lambda: len(it.dropped) >= 249)

            assert sorted(it.dropped)[-249:] == [(2, at) for at in range(1, 250)]

    drive(scenario)


def test_a_slow_call_does_not_hold_back_its_neighbours(tmp_path: Path) -> None:
    def slow_at_zero(x: int) -> int:
        if x == 0:
            time.sleep(600)
        return x

    async def scenario() -> None:
        async with functions(tmp_path, 2) as it:
            it.call(1, slow_at_zero, [(1,)] * 500)
            await it.until(lambda: it.settled == 500)
            it.call(2, slow_at_zero, [(at,) for at in range(250)])
            await it.until(lambda: it.settled == 500 + 249 and (2, 0) in it.started)

            assert (2, 0) not in it.outputs

    drive(scenario)


def test_a_stale_attempt_is_ended_without_a_word(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, lambda: time.sleep(600), [()])
            await it.until(lambda: it.started)

            it.abort(1, [0], "stale")
            it.call(2, lambda: "next", [()])
            await it.until(lambda: it.settled)

            assert it.values == {(2, 0): "next"}
            assert it.gone == it.dropped == []

    drive(scenario)


def test_a_call_that_waits_for_its_function_can_be_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, lambda x: x, [(0,), (1,)])
            it.abort(1, [0], "cancel")
            await it.until(lambda: it.settled)

            assert it.gone == [(1, 0)]
            assert it.values == {(1, 1): 1}

    drive(scenario)


# ------------------------------------------------------------------ what a function may ask


def test_a_function_knows_its_job_and_tells_how_far_it_is(tmp_path: Path) -> None:
    def work(x: int) -> tuple[str, int, str]:
        import ekiden

        job = ekiden.current_job()
        job.progress(0.4, "step 3")
        return job.id, job.attempt, job.name

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(7, work, [(0,)], attempts=[2], name="pricer")
            await it.until(lambda: it.settled)

            assert it.values == {(7, 0): ("g7o0", 2, "pricer")}
            assert [msgspec.json.decode(body) for body in it.progress] == [
                {"value": 0.4, "text": "step 3"}
            ]

    drive(scenario)


def test_a_flood_of_notes_ends_with_the_last(tmp_path: Path) -> None:
    def work() -> None:
        import ekiden

        for at in range(20_000):
            ekiden.current_job().progress(at)

    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            it.call(1, work, [()])
            await it.until(lambda: it.settled)

            assert it.progress[-1] == b"19999"
            assert len(it.progress) < 1000

    drive(scenario)


def test_the_start_of_a_slow_call_is_told_with_its_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with functions(tmp_path, 1) as it:
            before = time.monotonic_ns()
            it.call(1, lambda: time.sleep(0.1), [()])
            await it.until(lambda: it.settled)

            [(grant, offset, since)] = it.said(Started)[0].attempts
            assert (grant, offset) == (1, 0)
            assert before < since < time.monotonic_ns()

    drive(scenario)
