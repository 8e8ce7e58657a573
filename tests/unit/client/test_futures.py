"""Job futures: light, and to `concurrent.futures` like any other."""

from __future__ import annotations

import concurrent.futures
import threading
from datetime import UTC, datetime

import pytest
from tests.unit.client.rig import run_of

from ekiden import errors
from ekiden.client import futures
from ekiden.client.contract import Terms
from ekiden.client.futures import JobFuture
from ekiden.model.jobs import Cause, Note
from ekiden.wire.messages import Ended

TERMS = Terms(b"")


class Desk:
    """The little that a future asks of its client."""

    def __init__(self):
        self.condition = threading.Condition()
        self.cancelled = []
        self.may_wait = True

    def cancel_job(self, future, timeout):
        self.cancelled.append((future.job_id, timeout))
        return True

    def check_may_wait(self):
        if not self.may_wait:
            raise errors.WrongUsage("not here")


@pytest.fixture
def desk():
    return Desk()


def made(desk, *ids):
    return [JobFuture(desk, job_id, b"body", TERMS) for job_id in ids]


def done(desk, *given, **fields):
    futures.finish_run(desk.condition, run_of(*[f.job_id for f in given], **fields), list(given))


def in_thread(work):
    """Start `work`, return what waits for its outcome."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    outcome = pool.submit(work)
    pool.shutdown(wait=False)
    return outcome


def wait_watched(*given):
    """Until somebody waits for these."""
    deadline = threading.Event()
    for _ in range(2000):
        if all(future._watched for future in given):
            return
        deadline.wait(0.005)
    raise AssertionError("nobody waits")


def test_a_run_sets_output_worker_times_and_attempt(desk):
    a, b = made(desk, "a", "b")

    done(desk, a, b, attempts={1: 3}, notes={1: Note(exit_code=7)})

    assert a.done() and a.accepted and not a.cancelled()
    first, second = a.result(), b.result()
    assert (first.job_id, first.output, first.worker) == ("a", b"out a", "w1")
    assert (first.attempt, first.exit_code) == (1, 0)
    assert (second.attempt, second.exit_code) == (3, 7)
    assert first.finished_at == datetime.fromtimestamp(3e-9, UTC)
    assert first.submitted_at <= first.started_at <= first.finished_at


def test_the_payload_is_let_go_once_the_outcome_is_known(desk):
    a, b = made(desk, "a", "b")

    done(desk, a)
    futures.fail(desk.condition, [(b, errors.Conflict("taken"))])

    assert a.body == b.body == b""


def test_holes_in_a_run_are_skipped(desk):
    [a] = made(desk, "a")

    futures.finish_run(desk.condition, run_of("x", "a"), [None, a])

    assert a.result().output == b"out a"


def test_output_as_text_and_json(desk):
    [a] = made(desk, "a")
    run = run_of("a")
    run.outputs[0] = b'{"x": [1, 2]}'
    futures.finish_run(desk.condition, run, [a])

    assert a.result().json() == {"x": [1, 2]}
    assert a.result().text() == '{"x": [1, 2]}'


def test_output_that_is_no_json_says_whose(desk):
    [a] = made(desk, "a")
    done(desk, a)

    with pytest.raises(ValueError, match="output of job 'a' is not JSON"):
        a.result().json()


def test_result_waits_for_the_outcome(desk):
    [a] = made(desk, "a")
    waiting = in_thread(lambda: a.result(10))
    wait_watched(a)

    done(desk, a)

    assert waiting.result(10).output == b"out a"


def test_result_gives_up_in_time_and_can_be_asked_again(desk):
    [a] = made(desk, "a")

    with pytest.raises(TimeoutError, match="'a'"):
        a.result(0.01)
    with pytest.raises(TimeoutError):
        a.exception(0)
    done(desk, a)

    assert a.result(0).output == b"out a"


def test_waiting_in_the_clients_own_thread_is_refused(desk):
    [a] = made(desk, "a")
    desk.may_wait = False

    for call in (a.result, a.exception, a.wait_accepted):
        with pytest.raises(errors.WrongUsage):
            call()
    done(desk, a)
    assert a.result().output == b"out a"


def test_wait_and_as_completed_take_job_futures(desk):
    given = made(desk, *[f"j{n}" for n in range(50)])
    seen = in_thread(lambda: [f.job_id for f in concurrent.futures.as_completed(given, 10)])
    all_done = in_thread(lambda: concurrent.futures.wait(given, 10))
    wait_watched(*given)

    done(desk, *given[25:])
    futures.fail(desk.condition, [(f, errors.JobCancelled(f.job_id)) for f in given[:25]])

    assert sorted(seen.result(10)) == sorted(f.job_id for f in given)
    outcome = all_done.result(10)
    assert outcome.done == set(given) and outcome.not_done == set()


def test_wait_for_the_first_exception_returns_at_the_first(desk):
    given = made(desk, "a", "b", "c")
    first = in_thread(
        lambda: concurrent.futures.wait(given, 10, concurrent.futures.FIRST_EXCEPTION)
    )
    wait_watched(*given)

    futures.fail(desk.condition, [(given[1], errors.Conflict("taken"))])

    assert first.result(10).done == {given[1]}


def test_wait_for_the_first_to_complete(desk):
    given = made(desk, "a", "b")
    first = in_thread(
        lambda: concurrent.futures.wait(given, 10, concurrent.futures.FIRST_COMPLETED)
    )
    wait_watched(*given)

    done(desk, given[0])

    assert first.result(10).done == {given[0]}


def test_wait_on_finished_futures_returns_at_once(desk):
    given = made(desk, "a", "b")
    done(desk, *given)

    assert concurrent.futures.wait(given, 0).done == set(given)
    assert len(list(concurrent.futures.as_completed(given, 0))) == 2


def test_wait_gives_up_in_time(desk):
    given = made(desk, "a", "b")
    done(desk, given[0])

    outcome = concurrent.futures.wait(given, 0.01)

    assert outcome.done == {given[0]} and outcome.not_done == {given[1]}
    with pytest.raises(TimeoutError):
        list(concurrent.futures.as_completed(given, 0.01))


def test_callbacks_run_once_in_order_and_at_once_if_late(desk):
    [a] = made(desk, "a")
    calls = []
    a.add_done_callback(lambda f: calls.append(f.result().output))
    a.add_done_callback(lambda _: 1 / 0)
    a.add_done_callback(lambda _: calls.append(2))

    done(desk, a)
    a.add_done_callback(lambda _: calls.append(3))

    assert calls == [b"out a", 2, 3]


def test_accepted_is_told_before_the_result(desk):
    a, b = made(desk, "a", "b")
    assert not a.accepted
    waiting = in_thread(lambda: a.wait_accepted(10))
    wait_watched(a)

    futures.accept(desk.condition, [a, b])

    waiting.result(10)
    assert a.accepted and b.accepted and not a.done()
    b.wait_accepted(0)


def test_wait_accepted_raises_the_refusal_or_gives_up(desk):
    [a] = made(desk, "a")
    with pytest.raises(TimeoutError):
        a.wait_accepted(0.01)
    waiting = in_thread(lambda: a.wait_accepted(10))
    wait_watched(a)

    futures.fail(desk.condition, [(a, errors.QueueFull("full"))])

    assert isinstance(waiting.exception(10), errors.QueueFull)
    assert not a.accepted


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (Ended("a", "failed"), errors.JobFailed),
        (Ended("a", "cancelled", [], "expired"), errors.JobCancelled),
        (Ended("a", "done"), errors.ResultGone),
    ],
)
def test_every_end_without_a_result_has_its_error(desk, ended, kind):
    [a] = made(desk, "a")

    futures.fail(desk.condition, [(a, futures.error_of_end(ended))])

    with pytest.raises(kind):
        a.result()
    assert isinstance(a.exception(), kind)
    assert a.cancelled() == (kind is errors.JobCancelled)


def test_a_failed_job_carries_the_cause_of_every_attempt(desk):
    causes = [
        Cause(1, "w1", "worker_lost", "", 5),
        Cause(2, "w2", "exit_code", "exit 3", 6, True, Note(exit_code=3)),
    ]

    error = futures.error_of_end(Ended("a", "failed", causes))

    assert isinstance(error, errors.JobFailed)
    assert [(c["attempt"], c["worker"], c["cause"]) for c in error.causes] == [
        (1, "w1", "worker_lost"),
        (2, "w2", "exit_code"),
    ]
    assert "failed after 2 attempts (exit_code: exit 3)" in str(error)


def test_the_first_outcome_stays(desk):
    [a] = made(desk, "a")
    done(desk, a)

    futures.fail(desk.condition, [(a, errors.Closed("closed"))])

    assert a.exception() is None


def test_cancel_asks_the_client_unless_the_outcome_is_known(desk):
    a, b, c = made(desk, "a", "b", "c")
    done(desk, b)
    futures.fail(desk.condition, [(c, errors.JobCancelled("c"))])

    assert a.cancel(3) is True
    assert b.cancel() is False
    assert c.cancel() is True
    assert desk.cancelled == [("a", 3)]


def test_progress_is_the_latest_of_the_newest_attempt(desk):
    [a] = made(desk, "a")
    assert a.progress is None and not a.running()

    a.note_progress(2, b'{"share": 0.5}')
    a.note_progress(1, b"late word of an old attempt")

    assert a.progress == {"share": 0.5} and a.running()
    a.note_progress(2, b"almost there")
    assert a.progress == "almost there"
    a.note_progress(2, b"\xff")
    assert a.progress == b"\xff"


def test_a_future_shows_its_job_and_state(desk):
    a, b, c, d = made(desk, "a", "b", "c", "d")
    futures.accept(desk.condition, [b])
    done(desk, c)
    futures.fail(desk.condition, [(d, errors.Conflict("taken"))])

    assert [repr(each) for each in (a, b, c, d)] == [
        "<JobFuture a pending>",
        "<JobFuture b accepted>",
        "<JobFuture c done>",
        "<JobFuture d Conflict>",
    ]
    assert repr(c.result()) == "<JobResult c b'out c' by w1>"
