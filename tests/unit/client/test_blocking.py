"""The blocking client, over sockets, against the least broker there can be."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.unit.client.loopback import KEY, Loopback

import ekiden
from ekiden import errors
from ekiden.wire import messages
from ekiden.wire.messages import Ended


@contextmanager
def pair(answer=None, **options):
    """A broker and a client of it."""
    with Loopback(*([answer] if answer else [])) as broker, client_of(broker, **options) as client:
        yield broker, client


def client_of(broker, **options):
    return ekiden.Client(broker.address, **{"key": KEY, "client_id": "me", **options})


def hold(_job_id, _body):
    """Accept, and do not answer."""
    return


def wait_until(holds, *, timeout_s=10.0):
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if holds():
            return
        pause.wait(0.005)
    raise AssertionError("it did not come about in time")


def test_a_job_comes_back_with_its_result():
    with pair() as (_, client):
        future = client.submit("echo", payload="hello")

        result = future.result(10)

    assert (result.output, result.job_id, result.worker) == (b"hello", future.job_id, "w1")
    assert len(future.job_id) == 32
    assert future.accepted


def test_many_jobs_come_back_in_the_order_they_were_given():
    payloads = [b"%d" % n for n in range(5000)]
    with pair() as (broker, client):
        futures = client.submit_many("echo", payloads)
        outputs = [future.result(10).output for future in futures]

    assert outputs == payloads
    assert broker.machine.submitted == [future.job_id for future in futures]


def test_jobs_of_several_threads_all_come_back():
    with pair() as (_, client), concurrent.futures.ThreadPoolExecutor(8) as pool:

        def work(part):
            futures = [client.submit("echo", payload=b"%d.%d" % (part, n)) for n in range(500)]
            return [future.result(10).output for future in futures]

        parts = list(pool.map(work, range(8)))

    assert parts == [[b"%d.%d" % (part, n) for n in range(500)] for part in range(8)]


def test_as_completed_and_wait_work_on_real_jobs():
    with pair() as (_, client):
        futures = client.submit_many("echo", [b"x"] * 2000)
        seen = list(concurrent.futures.as_completed(futures, 10))
        outcome = concurrent.futures.wait(client.submit_many("echo", [b"x"] * 2000), 10)

    assert set(seen) == set(futures)
    assert len(outcome.done) == 2000


def test_map_reads_payloads_as_it_goes_and_keeps_to_its_window():
    read = []

    def payloads():
        for n in range(1000):
            read.append(n)
            yield b"%d" % n

    with pair() as (_, client):
        results = client.map("echo", payloads(), window=100)
        first = next(results)
        assert len(read) <= 200
        outputs = [first.output, *(result.output for result in results)]

    assert outputs == [b"%d" % n for n in range(1000)]


def test_map_out_of_order_brings_everything_once():
    with pair() as (_, client):
        results = client.map("echo", map(str, range(3000)), in_order=False, window=100)

        assert sorted(int(result.output) for result in results) == list(range(3000))


def test_map_raises_or_returns_what_failed():
    def answer(job_id, body):
        return Ended(job_id, "failed") if body == b"1" else body

    with pair(answer) as (_, client):
        results = client.map("echo", [b"0", b"1", b"2"])
        assert next(results).output == b"0"
        with pytest.raises(errors.JobFailed):
            next(results)

        both = list(client.map("echo", [b"0", b"1", b"2"], return_errors=True))

    assert [type(each).__name__ for each in both] == ["JobResult", "JobFailed", "JobResult"]


def test_a_refusal_comes_from_the_future_never_from_submit():
    with pair() as (_, client):
        client.submit("echo", payload=b"one", job_id="same").result(10)
        again = client.submit("echo", payload=b"two", job_id="same")

        with pytest.raises(errors.Conflict):
            again.result(10)

        assert client.submit("echo", payload=b"one", job_id="same").result(10).output == b"one"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"job_id": "no spaces"}, errors.BadId),
        ({"payload": b"x" * 600_000}, errors.TooLarge),
        ({"payload": object()}, errors.WrongUsage),
        ({"priority": 99}, errors.WrongUsage),
    ],
)
def test_what_is_wrong_with_the_call_is_raised_by_the_call(arguments, kind):
    with pair() as (broker, client):
        with pytest.raises(kind):
            client.submit("echo", **arguments)
        client.submit("echo").result(10)

    assert len(broker.machine.submitted) == 1


def test_submit_many_hands_over_nothing_if_one_payload_is_wrong():
    with pair() as (broker, client):
        with pytest.raises(errors.TooLarge):
            client.submit_many("echo", [b"fine", b"x" * 600_000])
        with pytest.raises(errors.WrongUsage):
            client.submit_many("echo", [b"fine"], job_ids=["a", "b"])
        client.stats()

    assert broker.machine.submitted == []


def test_cancel_is_true_once_committed_and_the_future_says_so():
    with pair(hold) as (broker, client):
        future = client.submit("echo", job_id="j1")

        assert future.cancel() is True

        with pytest.raises(errors.JobCancelled):
            future.result(10)
        assert future.cancelled()
        assert broker.machine.asked == [("cancel", {"ids": ["j1"]})]


def test_cancel_of_a_finished_job_is_false():
    with pair() as (_, client):
        future = client.submit("echo")
        future.result(10)

        assert future.cancel() is False


def test_many_cancels_are_asked_in_parts_and_summed_up():
    ids = [f"j{n}" for n in range(5000)]
    with pair(hold) as (broker, client):
        futures = client.submit_many("echo", [b""] * 5000, job_ids=ids)
        for future in futures:
            future.wait_accepted(10)

        answer = client.cancel(ids)

    assert answer["cancelled"] == 5000 and answer["unknown"] == []
    assert [len(params["ids"]) for _, params in broker.machine.asked] == [4096, 904]


def test_attach_finds_a_job_of_another_client():
    with pair(hold) as (broker, client):
        client.submit("echo", job_id="j1").wait_accepted(10)
        with client_of(broker, client_id="other") as other:
            future = other.attach("j1")
            future.wait_accepted(10)
            broker.do(lambda machine: machine.settle("j1", b"late"))

            assert future.result(10).output == b"late"
            with pytest.raises(errors.UnknownJob):
                other.attach("nobody").result(10)


def test_progress_shows_on_the_future():
    with pair(hold) as (broker, client):
        future = client.submit("echo", job_id="j1")
        future.wait_accepted(10)

        broker.do(lambda m: m.say(m.open["j1"], messages.JobProgress("j1", 1, b'{"at":3}')))

        wait_until(lambda: future.progress == {"at": 3})


# ------------------------------------------------------------------ connections


def test_making_a_client_and_submitting_never_fails_for_want_of_a_broker():
    with Loopback() as broker:
        pass  # Its port is free again.
    with client_of(broker) as client:
        future = client.submit("echo", payload=b"patience")
        assert not client.connected

        with Loopback(port=broker.port):
            assert future.result(10).output == b"patience"
            assert client.connected


def test_jobs_survive_a_broker_that_restarts_and_knows_nothing():
    with Loopback(hold) as broker:
        client = client_of(broker)
        future = client.submit("echo", payload=b"again", job_id="j1")
        future.wait_accepted(10)
    with client, Loopback(port=broker.port) as second:
        assert future.result(10).output == b"again"

    assert second.machine.submitted == ["j1"]


def test_jobs_survive_a_connection_that_breaks():
    with pair(hold) as (broker, client):
        future = client.submit("echo", payload=b"x", job_id="j1")
        future.wait_accepted(10)
        broker.do(lambda machine: machine.hang_up())
        broker.do(lambda machine: machine.open.clear())

        wait_until(lambda: broker.do(lambda machine: "j1" in machine.open))
        broker.do(lambda machine: machine.settle("j1", b"done"))

        assert future.result(10).output == b"done"
    assert broker.machine.submitted == ["j1"]


def test_wait_connected_says_why_nothing_answers():
    with Loopback() as broker:
        pass
    with (
        client_of(broker) as client,
        pytest.raises(errors.Unreachable, match=rf"no broker at {broker.address} \(.*refused"),
    ):
        client.wait_connected(0.3)


def test_a_wrong_key_is_told_at_once_to_whoever_waits():
    with Loopback() as broker, client_of(broker, key=b"x" * 32) as client:
        future = client.submit("echo")
        with pytest.raises(errors.Unauthenticated):
            client.wait_connected(10)
        with pytest.raises(errors.Unauthenticated):
            future.result(10)


def test_a_missing_key_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("EKIDEN_STATE", str(tmp_path))
    monkeypatch.delenv("EKIDEN_KEY_FILE", raising=False)
    with (
        Loopback() as broker,
        client_of(broker, key=None) as client,
        pytest.raises(errors.Unauthenticated, match="--key-file"),
    ):
        client.wait_connected(10)


def test_the_key_is_read_from_a_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY.hex().encode())
    path.chmod(0o600)
    with Loopback() as broker, client_of(broker, key=None, key_file=path) as client:
        client.wait_connected(10)


def test_the_second_address_is_used_when_the_first_is_dead():
    with Loopback() as dead:
        pass
    with Loopback() as broker, ekiden.Client(f"{dead.address},{broker.address}", key=KEY) as client:
        client.wait_connected(10)


# ------------------------------------------------------------------ bounds and closing


def test_submit_waits_while_too_much_is_not_accepted():
    with Loopback() as broker:
        broker.machine.mute = True
        with client_of(broker, pending_max=50) as client:
            client.wait_connected(10)
            submitted = []

            def work():
                submitted.extend(client.submit("echo", job_id=f"j{n}") for n in range(60))

            thread = threading.Thread(target=work)
            thread.start()
            wait_until(lambda: len(submitted) == 50)
            assert not client.submit_many("echo", [])
            broker.do(lambda machine: setattr(machine, "mute", False))
            broker.do(lambda machine: machine.hang_up())
            thread.join(10)

            assert [future.result(10).job_id for future in submitted] == [
                f"j{n}" for n in range(60)
            ]


def test_submit_many_past_the_bound_comes_through_in_parts():
    with pair(pending_max=100) as (_, client):
        futures = client.submit_many("echo", [b"x"] * 5000)

        assert concurrent.futures.wait(futures, 10).not_done == set()


def test_closing_waits_until_what_was_submitted_is_accepted():
    with Loopback(hold) as broker:
        with client_of(broker) as client:
            futures = [client.submit("echo", job_id=f"j{n}") for n in range(3000)]

        assert broker.machine.submitted == [f"j{n}" for n in range(3000)]
        assert all(future.accepted for future in futures)
        assert isinstance(futures[0].exception(0), errors.Closed)


def test_closing_gives_up_in_time_when_nobody_answers():
    with Loopback() as broker:
        pass
    client = client_of(broker)
    future = client.submit("echo")

    client.close(0.05)

    assert isinstance(future.exception(0), errors.Closed)


def test_a_closed_client_says_so():
    with pair() as (_, client):
        client.close()
        client.close()

        for call in (
            lambda: client.submit("echo"),
            lambda: client.submit_many("echo", [b""]),
            lambda: client.attach("j1"),
            client.stats,
            client.wait_connected,
            lambda: client.publish("a", b""),
            lambda: client.subscribe("a"),
        ):
            with pytest.raises(errors.Closed):
                call()


def test_a_caller_that_waits_for_room_is_let_go_when_the_client_closes():
    with Loopback() as broker:
        broker.machine.mute = True
        client = client_of(broker, pending_max=1)
        client.submit("echo")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(client.submit, "echo")
            wait_until(lambda: client._core._room_waiters)
            client.close(0)

            assert isinstance(blocked.exception(10), errors.Closed)


def test_waiting_inside_a_callback_is_refused_instead_of_hanging():
    caught = []
    with pair(hold) as (broker, client):
        other = client.submit("echo")

        def wait_for_the_other(_future):
            try:
                other.result()
            except errors.WrongUsage as error:
                caught.append(error)

        future = client.submit("echo", job_id="j1")
        future.add_done_callback(wait_for_the_other)
        future.wait_accepted(10)
        broker.do(lambda machine: machine.settle("j1", b""))
        wait_until(lambda: caught)


def test_a_program_that_forgets_to_close_still_hands_over_its_jobs():
    program = (
        "import sys, ekiden\n"
        "client = ekiden.Client(sys.argv[1], key=bytes(range(32)))\n"
        "for n in range(100): client.submit('echo', job_id=f'j{n}')\n"
    )
    with Loopback(hold) as broker:
        ended = subprocess.run(
            [sys.executable, "-c", program, broker.address],
            cwd=Path(__file__).parents[3] / "src",
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

        assert (ended.returncode, ended.stderr) == (0, "")
        assert broker.machine.submitted == [f"j{n}" for n in range(100)]


# ------------------------------------------------------------------ questions and the relay


def test_questions_get_their_answers():
    with pair() as (_, client):
        assert client.stats() == {"verb": "stats"}
        assert client.job("j1") == {"verb": "job", "id": "j1"}
        assert client.jobs(state="failed", limit=5) == {
            "verb": "jobs",
            "state": "failed",
            "limit": 5,
        }
        assert client.workers() == []
        with pytest.raises(errors.BadRequest, match="no such verb"):
            client.ask("nonsense")
        with pytest.raises(errors.WrongUsage):
            client.ask("stats", what=object())


def test_a_question_nobody_answers_is_given_up_with_the_reason():
    with Loopback() as broker:
        pass
    with client_of(broker, ask_timeout_s=0.2) as client, pytest.raises(errors.Unreachable):
        client.stats()


def test_a_question_too_long_for_a_frame_is_refused_and_the_client_goes_on():
    with pair() as (_, client):
        with pytest.raises(errors.TooLarge):
            client.ask("stats", filler="x" * 2_000_000)

        assert client.stats() == {"verb": "stats"}


def test_what_is_published_reaches_the_subscriber():
    with pair() as (broker, client), client_of(broker, client_id="reader") as reader:
        with reader.subscribe("news") as subscription:
            subscription.wait_active()
            client.publish("news", "one")
            client.publish("other", "not for us")
            client.publish("news", {"two": 2})

            assert [subscription.take(10).payload for _ in range(2)] == [b"one", b'{"two":2}']
            with pytest.raises(TimeoutError):
                subscription.take(0.01)
        assert list(subscription) == []


def test_a_callback_gets_messages_and_may_fail():
    got = []

    def take(message):
        got.append(message)
        raise RuntimeError("a user's mistake")

    with pair() as (_, client):
        client.subscribe("news", take).wait_active()
        client.publish("news", b"1")
        client.publish("news", b"2")
        wait_until(lambda: len(got) == 2)

        assert client.stats() == {"verb": "stats"}
    assert [message.payload for message in got] == [b"1", b"2"]


def test_a_subscriber_that_does_not_look_loses_the_oldest(monkeypatch):
    monkeypatch.setattr("ekiden.limits.SUBSCRIPTION_BACKLOG", 10)
    with pair() as (_, client):
        subscription = client.subscribe("news")
        subscription.wait_active()
        for n in range(15):
            client.publish("news", str(n))
        wait_until(lambda: subscription.dropped == 5)

        assert subscription.take(10).payload == b"5"


def test_closing_the_client_ends_the_iteration_of_subscriptions():
    with pair() as (_, client), concurrent.futures.ThreadPoolExecutor(1) as pool:
        subscription = client.subscribe("news")
        reading = pool.submit(list, subscription)
        client.close()

        assert reading.result(10) == []


def test_bad_subjects_are_refused_by_the_call():
    with pair() as (_, client):
        for call in (
            lambda: client.subscribe("a..b"),
            lambda: client.publish("a.*", b""),
        ):
            with pytest.raises(errors.BadSubject):
                call()
        with pytest.raises(errors.TooLarge):
            client.publish("a", b"x" * 600_000)


def test_the_package_offers_its_names_when_they_are_asked_for():
    assert ekiden.QueueFull is errors.QueueFull
    assert "Client" in dir(ekiden)
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        _ = ekiden.Cleint
