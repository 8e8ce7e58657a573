"""Functions as the client keeps them: pickles, futures, and what happens before a first submit."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import math
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.unit.client.test_futures import Desk

import ekiden.testing
from ekiden import errors, limits
from ekiden.client import futures
from ekiden.client.contract import Terms
from ekiden.client.functions import PYTHON, CallCancelled, FunctionFuture, RemoteTraceback, packed
from ekiden.model.jobs import Cause, Spec
from ekiden.model.work import Function
from ekiden.wire.messages import Ended, ResultRun

DEADLINE_S = 30.0


def made(desk: Desk) -> FunctionFuture:
    return FunctionFuture(desk, "j1", b"body", Terms(b""))  # type: ignore[arg-type]


def finish(desk: Desk, future: FunctionFuture, output: bytes) -> None:
    futures.finish_run(desk.condition, ResultRun(["j1"], [output], "w1", 1, 2, 3), [future])


def end(desk: Desk, future: FunctionFuture, ended: Ended) -> None:
    futures.fail(desk.condition, [(future, futures.error_of_end(ended))])


def failed(detail: bytes) -> Ended:
    cause = Cause(1, "w1", "handler_error", "KeyError: 'x'", 0, detail=detail)
    return Ended("j1", "failed", [cause], "handler_error")


# ------------------------------------------------------------------ futures


def test_the_result_is_the_value_and_the_same_object_every_time() -> None:
    desk = Desk()
    future = made(desk)
    finish(desk, future, pickle.dumps([1, 2]))

    assert future.result() == [1, 2]
    assert future.result() is future.result()
    assert future.exception() is None


def test_a_value_is_not_opened_before_it_is_looked_at() -> None:
    desk = Desk()
    future = made(desk)
    finish(desk, future, b"cno_such_module\nvalue\n.")

    assert future.done()
    assert future.exception() is None
    with pytest.raises(errors.WrongUsage, match=r"cannot be opened here.*no_such_module"):
        future.result()


def test_an_exception_is_the_functions_own_with_its_remote_traceback() -> None:
    desk = Desk()
    future = made(desk)
    end(desk, future, failed(pickle.dumps((KeyError("x"), "Traceback: there"))))

    with pytest.raises(KeyError) as raised:
        future.result()

    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert "Traceback: there" in str(raised.value.__cause__)
    assert future.exception() is raised.value


@pytest.mark.parametrize("detail", [b"", b"cno_such_module\nOdd\n."], ids=["none", "unknown"])
def test_an_exception_that_cannot_be_had_here_is_a_failed_job(detail: bytes) -> None:
    desk = Desk()
    future = made(desk)
    end(desk, future, failed(detail))

    with pytest.raises(errors.JobFailed, match="KeyError: 'x'"):
        future.result()


def test_a_cancelled_call_is_cancelled_to_both_worlds() -> None:
    desk = Desk()
    future = made(desk)
    end(desk, future, Ended("j1", "cancelled"))

    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    with pytest.raises(errors.JobCancelled):
        future.result()
    assert isinstance(future.exception(), CallCancelled)


def test_as_completed_takes_a_call() -> None:
    desk = Desk()
    future = made(desk)
    threading.Timer(0.01, finish, (desk, future, pickle.dumps(7))).start()

    [found] = concurrent.futures.as_completed([future], DEADLINE_S)  # type: ignore[arg-type]

    assert found.result() == 7


# ------------------------------------------------------------------ pickles


def test_what_a_main_module_defines_travels_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        pass

    Point.__module__ = "__main__"
    Point.__qualname__ = "Point"
    monkeypatch.setattr(__import__("__main__"), "Point", Point, raising=False)

    assert len(packed(Point())) > 2 * len(pickle.dumps(Point()))
    assert isinstance(pickle.loads(packed(Point())), Point)


def test_arguments_that_cannot_travel_are_refused_with_a_remedy() -> None:
    with pytest.raises(errors.WrongUsage, match=r"cannot be pickled.*plain data"):
        packed(threading.Lock())


# ------------------------------------------------------------------ with a broker


@pytest.fixture
def grid() -> Iterator[ekiden.testing.Grid]:
    """A broker whose only worker runs no functions."""
    with ekiden.testing.grid(slots=1) as grid:
        grid.worker.handler("job.assign.echo")(lambda job: job.payload)
        yield grid


def spec_of(future: FunctionFuture) -> Spec:
    assert future.terms is not None
    return msgspec.msgpack.decode(future.terms.spec, type=Spec)


def function_of(future: FunctionFuture) -> Function:
    return msgspec.msgpack.decode(spec_of(future).shared, type=Function)


def test_without_workers_for_functions_a_call_is_accepted_and_waits(
    grid: ekiden.testing.Grid,
) -> None:
    future = grid.client.call(lambda x: x, 1)
    future.wait_accepted(DEADLINE_S)

    assert not future.done()
    job = grid.client.job(future.job_id)
    assert job["state"] == "queued"
    assert spec_of(future).route.subject == f"job.function.py{PYTHON.replace('.', '')}.lambda"
    assert spec_of(future).retry_on == ("worker_lost", "cannot_start", "oom", "signal")


def test_the_broker_has_the_function_when_the_job_is_accepted(grid: ekiden.testing.Grid) -> None:
    future = grid.client.call(lambda x: x + 1, 1)
    future.wait_accepted(DEADLINE_S)
    function = function_of(future)

    code = grid.client.fetch_blob(function.blob, function.size)

    assert code is not None
    assert pickle.loads(code)(2) == 3
    assert function.python == PYTHON


def test_a_function_is_pickled_once_and_calls_of_it_share_their_terms(
    grid: ekiden.testing.Grid,
) -> None:
    pickled = []

    class Counted:
        def __call__(self, x: int) -> int:
            return x

        def __reduce__(self) -> Any:
            pickled.append(1)
            return (int, ())

    function = Counted()
    first, second = grid.client.call(function, 1), grid.client.call(function, 2)
    second.wait_accepted(DEADLINE_S)

    assert pickled == [1]
    assert first.terms is second.terms


def test_a_function_that_is_gone_is_forgotten(grid: ekiden.testing.Grid) -> None:
    functions = grid.client._functions
    functions.of(lambda: 1)
    gc.collect()

    assert functions._by_id == {}


def test_functions_of_other_pythons_only_are_refused(grid: ekiden.testing.Grid) -> None:
    grid.worker.handler("job.function.py27.>")(lambda job: b"")

    with pytest.raises(errors.PythonMismatch, match=r"functions of Python 2\.7 only"):
        grid.client.run(lambda: 1)


def test_options_of_a_call_are_those_of_a_job(grid: ekiden.testing.Grid) -> None:
    future = grid.client.call_with({"priority": 3, "retry_on": ()}, math.sqrt, 2)

    assert spec_of(future).priority == 3
    assert spec_of(future).retry_on == ()
    assert spec_of(future).name == "sqrt"


@pytest.mark.parametrize(
    ("function", "name"),
    [(functools.partial(pow, 2), "pow"), (math.sqrt, "sqrt"), (str.upper, "upper")],
)
def test_whatever_is_callable_has_a_name(
    grid: ekiden.testing.Grid, function: Any, name: str
) -> None:
    assert spec_of(grid.client.call(function, 3)).name == name


def test_arguments_over_the_limit_are_refused_before_anything_is_sent(
    grid: ekiden.testing.Grid,
) -> None:
    with pytest.raises(errors.TooLarge, match="the arguments of 'len'"):
        grid.client.call(len, b"x" * limits.PAYLOAD_BYTES_MAX)
    with pytest.raises(errors.TooLarge, match="the arguments of 'len'"):
        next(iter(grid.client.map(len, [b"", b"x" * limits.PAYLOAD_BYTES_MAX])))


def test_a_function_that_cannot_be_pickled_is_refused(grid: ekiden.testing.Grid) -> None:
    lock = threading.Lock()

    with pytest.raises(errors.WrongUsage, match="the function 'lambda' cannot be pickled"):
        grid.client.call(lambda: lock)


def test_a_name_runs_with_its_payload(grid: ekiden.testing.Grid) -> None:
    assert grid.client.run("echo", {"x": 1}).json() == {"x": 1}
    with pytest.raises(errors.WrongUsage, match="takes one payload"):
        grid.client.run("echo", 1, 2)


def test_a_closed_client_takes_no_calls(grid: ekiden.testing.Grid) -> None:
    client = grid.connect()
    client.close()

    with pytest.raises(errors.Closed):
        client.call(len, "x")


def test_closing_submits_calls_whose_function_is_on_its_way(grid: ekiden.testing.Grid) -> None:
    client = grid.connect()
    future = client.call(lambda: 1)

    client.close()

    assert future.accepted
    assert isinstance(future.exception(), errors.Closed)


def test_a_call_without_a_broker_waits_and_ends_with_the_client() -> None:
    client = ekiden.Client("127.0.0.1:1", key=b"k" * 32)
    future = client.call(lambda: 1)
    more = client.call_many(pow, [(1, 2), (3, 4)])

    client.close(0.01)

    for each in [future, *more]:
        assert isinstance(each.exception(DEADLINE_S), errors.Closed)
