"""Runs, and what a running job has written so far."""

from __future__ import annotations

from tests.unit.broker.house import WALL, Far, House

from ekiden.broker import crew
from ekiden.machine import Frame, Received
from ekiden.model import jobs as j
from ekiden.wire import messages as m


def working() -> tuple[House, Far, Far, tuple[int, int]]:
    """A client and a worker that runs its job `j1`."""
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1")
    house.settle()
    attempt = w1.assigned()["j1"]
    ann.heard.clear()
    return house, ann, w1, attempt


def peeked(w1: Far, question: int, message: m.Peeked) -> None:
    """The worker's answer to that question."""
    frame = Frame(m.TYPE_OF[m.Peeked], 0, question, m.encode_body(message))
    w1.house.machine.receive(Received(w1.conn, [frame]), w1.house.now)


# ------------------------------------------------------------------ what it has written


def test_what_a_running_job_has_written_is_asked_of_its_worker() -> None:
    house, ann, w1, attempt = working()

    number = ann.say(m.Ask("logs", {"id": "j1", "stdout": 7}))
    house.settle()
    assert ann.heard == []
    assert w1.take(m.Peek) == m.Peek(*attempt, 7, 0, crew.PEEK_BYTES)
    peeked(w1, 1, m.Peeked(True, b"more", b"oh"))
    house.settle()

    answer = {"id": "j1", "state": "leased", "attempt": 1, "known": True}
    assert ann.heard == [(number, m.Answer({**answer, "stdout": b"more", "stderr": b"oh"}))]


def test_of_a_job_that_does_not_run_there_is_nothing_to_see() -> None:
    house, ann, w1, attempt = working()
    w1.done(attempt)
    house.settle()

    answer = ann.ask("logs", id="j1")

    assert (answer["state"], answer["known"], answer["stdout"]) == ("done", False, b"")


def test_who_watches_a_job_whose_worker_leaves_is_told() -> None:
    house, ann, w1, _ = working()
    ann.say(m.Ask("logs", {"id": "j1"}))
    house.settle()

    w1.leave()
    house.settle()

    assert ann.take(m.Answer).body["known"] is False
    assert ann.ask("logs", id="j1")["known"] is False, "and so is who asks while it is away"


def test_an_answer_nobody_waits_for_is_dropped() -> None:
    house, ann, w1, _ = working()

    peeked(w1, 99, m.Peeked(True, b"?"))
    house.settle()

    assert (ann.heard, w1.heard) == ([], [])


def test_a_worker_that_says_more_than_was_asked_is_refused() -> None:
    house, ann, w1, _ = working()
    ann.say(m.Ask("logs", {"id": "j1"}))
    house.settle()
    w1.heard.clear()

    peeked(w1, 1, m.Peeked(True, b"x" * (crew.PEEK_BYTES + 1)))
    house.settle()

    assert w1.take(m.Refusal).code == "too_large"


def test_looks_that_wait_are_bounded() -> None:
    house, ann, _, _ = working()
    for _ in range(crew.PEEKS_MAX):
        ann.say(m.Ask("logs", {"id": "j1"}))
    house.settle()

    assert ann.ask("logs", id="j1").code == "queue_full"


# ------------------------------------------------------------------ runs


def test_runs_are_counted_from_submit_to_end() -> None:
    house = House()
    ann, w1 = house.client(), house.worker(slots=3)
    ann.submit("a", "b", "c", "d", run="night")
    ann.submit("lone")
    house.settle()
    held = w1.assigned()
    ann.ask("cancel", ids=["d"])
    w1.done(held["a"])
    w1.failed(held["b"], j.EXIT_CODE)
    house.settle()

    line = {
        "name": "night", "client": "ann", "submitted": WALL, "total": 4, "open": 1, "done": 1,
        "failed": 1, "cancelled": 1,
    }  # fmt: skip
    assert ann.ask("runs") == {"runs": [line], "more": False}
    assert house.restart().client().ask("runs", name="night")["runs"] == [line]


def test_a_replayed_job_is_open_again_and_a_purged_one_is_gone_from_its_run() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("a", "b", run="night")
    house.settle()
    held = w1.assigned()
    for job_id in ("a", "b"):
        w1.failed(held[job_id], j.EXIT_CODE)
    house.settle()

    ann.ask("replay", ids=["a"])
    ann.ask("purge", ids=["b"])

    (line,) = ann.ask("runs", name="night")["runs"]
    assert (line["total"], line["open"], line["failed"]) == (1, 1, 0)


def test_runs_are_listed_newest_first_and_in_bounds() -> None:
    house = House()
    ann = house.client()
    for name in ("first", "second", "third"):
        ann.submit(f"{name}-job", run=name)
        house.later(1)

    answer = ann.ask("runs", limit=2)

    assert [line["name"] for line in answer["runs"]] == ["third", "second"]
    assert answer["more"] is True


def test_a_run_nobody_knows_is_refused_with_what_to_do() -> None:
    refusal = House().client().ask("runs", name="gone")

    assert refusal.code == "unknown_job"
    assert "ekiden runs list" in refusal.remedy


# ------------------------------------------------------------------ progress


def test_the_last_word_of_a_running_job_is_shown_with_it() -> None:
    house, ann, w1, attempt = working()
    assert ann.ask("job", id="j1")["progress"] is None

    w1.say(m.Progress(*attempt, b"0.2"), m.Progress(*attempt, b"0.4"))
    house.settle()
    assert ann.ask("job", id="j1")["progress"] == b"0.4"

    w1.say(m.Beat([(*attempt, 100)]))
    house.settle()
    assert ann.ask("job", id="j1")["progress"] == b"0.4"
    w1.done(attempt)
    w1.say(m.Beat())
    house.settle()
    assert ann.ask("job", id="j1")["progress"] is None
    assert house.machine.roster.workers["w1"].progress == {}


def test_a_page_of_progress_is_passed_on_and_not_kept() -> None:
    house, ann, w1, attempt = working()

    w1.say(m.Progress(*attempt, b"x" * (crew.PROGRESS_KEPT_BYTES + 1)))
    house.settle()

    assert len(ann.take(m.JobProgress).body) > crew.PROGRESS_KEPT_BYTES
    assert ann.ask("job", id="j1")["progress"] is None
