"""Workers: credit, acks, ghosts, silence, return; and jobs that kill them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.broker.house import House, logs, submit_of

from ekiden import limits
from ekiden.limits import NS
from ekiden.machine import Close
from ekiden.model import jobs as j
from ekiden.wire import messages as m

# ------------------------------------------------------------------ acks


def running(house: House, *ids: str, **options):
    """A client and a worker that holds these jobs."""
    ann, w1 = house.client(), house.worker(slots=max(4, len(ids)))
    ann.submit(*ids, **options)
    house.settle()
    attempts = w1.assigned()
    assert list(attempts) == list(ids)
    ann.heard.clear()
    return ann, w1, attempts


def test_a_duplicate_ack_is_confirmed_and_changes_nothing() -> None:
    house = House()
    ann, w1, held = running(house, "j1")
    w1.done(held["j1"], output=b"first")
    house.settle()
    assert ann.results() == {"j1": b"first"}

    number = w1.done(held["j1"], output=b"second")
    house.settle()

    assert w1.all(m.Acked)[-1] == m.Acked(number)
    assert ann.results() == {}
    assert ann.ask("stats")["jobs"]["stale_total"] == 1
    assert house.machine.book.totals.done == 1


def test_a_ghost_of_an_older_grant_cannot_settle_the_new_attempt() -> None:
    house = House()
    ann, w1, held = running(house, "j1", "j2")
    w1.failed(held["j1"], j.HANDLER_ERROR)
    house.later(3)
    again = w1.assigned()
    assert list(again) == ["j1"]

    w1.done(held["j1"], output=b"ghost")
    house.settle()
    assert ann.results() == {}
    w1.done(again["j1"], output=b"true")
    house.settle()

    assert ann.results() == {"j1": b"true"}


def test_another_worker_cannot_settle_it() -> None:
    house = House()
    ann, _, held = running(house, "j1")
    w2 = house.worker("w2")

    number = w2.done(held["j1"])
    house.settle()

    assert w2.take(m.Acked).upto == number
    assert ann.results() == {}
    assert house.state("j1") == "leased"


def test_failures_releases_and_results_of_one_ack_each_count() -> None:
    house = House()
    ann, w1, held = running(house, "done", "failed", "given-back")
    grant = held["done"][0]

    number = w1.say(
        m.Ack(
            [
                m.AckRun(
                    grant, [0], [b"out"], {0: j.Note(1)},
                    [m.Failure(1, j.EXIT_CODE, "code 3", j.Note(exit_code=3))], [2],
                )
            ]
        )
    )  # fmt: skip
    house.settle()

    assert ann.results() == {"done": b"out", "failed": "failed"}
    assert house.state("given-back") == "leased"  # assigned again at once
    assert w1.all(m.Acked) == [m.Acked(number)]
    job = ann.ask("job", id="failed")
    assert [(c["cause"], c["message"]) for c in job["causes"]] == [(j.EXIT_CODE, "code 3")]


def test_the_end_of_a_failed_job_carries_the_cause_of_every_attempt() -> None:
    house = House()
    ann, w1, held = running(house, "j1", max_attempts=2)
    w1.failed(held["j1"], j.HANDLER_ERROR, "first")
    house.later(3)
    w1.failed(w1.assigned()["j1"], j.OOM, "second")
    house.settle()

    (ended,) = ann.take(m.Results).ended
    assert (ended.id, ended.state, ended.reason) == ("j1", "failed", j.OOM)
    assert [(c.attempt, c.cause, c.message) for c in ended.causes] == [
        (1, j.HANDLER_ERROR, "first"), (2, j.OOM, "second"),
    ]  # fmt: skip


def test_acks_are_confirmed_in_order_and_none_before_all_of_it_is_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "ENTRY_BYTES_MAX", 1000)
    house = House()
    _, w1, held = running(house, "j1", "j2", "j3", "j4")
    house.turn()
    first = w1.done(*list(held.values())[:3], output=b"x" * 400)
    second = w1.say(m.Ack([]))
    third = w1.done(held["j4"], output=b"x" * 700)
    house.turn()
    assert w1.heard == []  # nothing is on disk, so not even the empty one is confirmed

    confirmed = []
    while house.append is not None:
        house.persist()
        house.turn()
        done = sum(house.state(name) == "done" for name in held)
        confirmed += [(acked.upto, done) for acked in w1.all(m.Acked)]

    assert confirmed[-1] == (third, 4)
    assert all(done >= 3 for upto, done in confirmed if upto in (first, second))


@pytest.mark.parametrize(
    "run",
    [
        m.AckRun(1, [0, 1], [b"one output"]),
        m.AckRun(1, [0], [b"x" * (limits.PAYLOAD_BYTES_MAX + 1)]),
        m.AckRun(1, [], [], {}, [m.Failure(0, "weather")]),
    ],
)
def test_an_ack_that_makes_no_sense_is_refused_and_settles_nothing(run: m.AckRun) -> None:
    house = House()
    ann, w1, _ = running(house, "j1", "j2")

    number = w1.say(m.Ack([run]))
    house.settle()

    ((corr, refusal),) = w1.heard
    assert corr == number
    assert isinstance(refusal, m.Refusal)
    assert house.state("j1") == "leased"
    assert ann.results() == {}


def test_notes_for_attempts_that_never_were_do_not_end_the_broker() -> None:
    house = House()
    ann, w1, _ = running(house, "j1")

    w1.say(m.Ack([m.AckRun(1, None, [b"r"], {-99: j.Note(1), -1: j.Note(2), 7: j.Note(3)})]))
    house.settle()

    assert ann.results() == {"j1": b"r"}


@pytest.mark.parametrize(
    "message", [m.Ack([]), m.Credit(3), m.Progress(1, 0, b""), m.Join(["a"], 1, 1)]
)
def test_a_client_cannot_speak_as_a_worker(message: m.Message) -> None:
    house = House()
    ann = house.client()

    ann.say(message)
    house.settle()

    assert ann.take(m.Refusal).code == "bad_request"
    assert ann.open


@pytest.mark.parametrize("message", [m.Ack([]), m.Credit(3), m.Beat(), m.Progress(1, 0, b"")])
def test_a_worker_must_join_before_it_says_anything_else(message: m.Message) -> None:
    house = House()
    w1 = house.stranger()

    w1.say(message)
    house.settle()

    assert "Join" in w1.take(m.Refusal).remedy


@pytest.mark.parametrize(
    "join",
    [
        m.Join([], 1, 1),
        m.Join(["a"] * (limits.PATTERNS_PER_WORKER + 1), 1, 1),
        m.Join(["a..b"], 1, 1),
        m.Join(["a"], 0, 1),
        m.Join(["a"], 1, -1),
        m.Join(["a"], 1, 1 << 63),
        m.Join(["a"], 1 << 63, 1),
        m.Join(["a"], 1, 1, {f"n{n}": "" for n in range(33)}),
        m.Join(["a"], 1, 1, {"n": "x" * 5000}),
        m.Join(["a"], 1, 1, {}, -1),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(join: m.Join) -> None:
    house = House()
    w1 = house.stranger()

    w1.say(join)
    house.settle()

    assert w1.take(m.Refusal).code in ("bad_request", "bad_subject")
    assert house.machine.roster.workers == {}


# ------------------------------------------------------------------ credit


def test_a_worker_is_never_given_more_than_its_credit() -> None:
    house = House()
    ann, w1 = house.client(), house.worker(slots=2, credit=3)
    ann.submit(*(f"j{n}" for n in range(10)))
    house.settle()
    held = w1.assigned()
    assert len(held) == 3

    w1.say(m.Credit(5))
    house.settle()
    assert len(w1.assigned()) == 2
    w1.say(m.Credit(0))
    w1.done(*held.values())
    house.settle()
    assert w1.assigned() == {}
    w1.say(m.Credit(-1))
    house.settle()
    assert w1.take(m.Refusal).code == "bad_request"


def test_repeated_submits_that_were_counted_on_do_not_idle_a_worker() -> None:
    house = House()
    ann, w1 = house.client(), house.worker(slots=1)
    ann.submit("j1", "j2")
    house.settle()
    w1.done((1, 0))
    house.settle()
    w1.done((2, 0))
    house.settle()
    w1.heard.clear()

    ann.submit("j1", "j2")
    house.settle()
    ann.submit("j3")
    house.settle()

    assert list(w1.assigned()) == ["j3"]


def test_draining_gives_nothing_more_and_asks_back_what_has_not_begun() -> None:
    house = House()
    ann, w1, held = running(house, "j1", "j2")

    assert ann.ask("drain", worker="w1") == {"worker": "w1", "state": "draining"}
    assert w1.take(m.Stop) == m.Stop(1, None, "recall")
    w1.say(m.Ack([m.AckRun(1, [], [], {}, [], [held["j2"][1]])]))
    ann.submit("j3")
    house.settle()
    assert w1.assigned() == {}
    assert [house.state(name) for name in ("j1", "j2", "j3")] == ["leased", "queued", "queued"]

    assert ann.ask("resume", worker="w1") == {"worker": "w1", "state": "ready"}
    assert list(w1.assigned()) == ["j2", "j3"]


def test_draining_a_worker_nobody_knows_is_refused() -> None:
    ann = House().client()

    assert ann.ask("drain", worker="w9").code == "unknown_worker"


# ------------------------------------------------------------------ silence and return


def test_a_silent_worker_is_given_up_and_its_jobs_go_to_another() -> None:
    house = House()
    ann, w1, held = running(house, "ran", "waited")
    w1.say(m.Beat([(*held["ran"], 10)]))
    w2 = house.worker("w2")

    effects = []
    for _ in range(17):
        effects += house.later(1, beats=False)
        ann.say(m.Beat())
        w2.say(m.Beat())

    assert "worker.lost" in logs(effects)
    assert not w1.open
    assert set(w2.assigned()) == {"ran", "waited"}
    job = ann.ask("job", id="ran")
    assert [(c["cause"], c["burned"]) for c in job["causes"]] == [(j.WORKER_LOST, True)]
    job = ann.ask("job", id="waited")
    assert [(c["cause"], c["burned"]) for c in job["causes"]] == [(j.WORKER_LOST, False)]


def test_any_word_of_a_worker_is_a_sign_of_life() -> None:
    house = House()
    _, w1, _ = running(house, "j1")

    for _ in range(20):
        house.later(1, beats=False)
        w1.say(m.Ack([]))

    assert w1.open
    assert house.state("j1") == "leased"


def test_a_worker_that_loses_its_connection_keeps_its_leases_while_it_is_expected_back() -> None:
    house = House()
    ann, w1, held = running(house, "j1")
    w1.leave()
    house.later(14)
    ann.submit("j2")
    house.settle()
    assert house.state("j1") == "leased"
    assert [w["state"] for w in ann.ask("workers")["workers"]] == ["silent"]

    w1 = house.stranger("w1")
    w1.join(held=[(held["j1"][0], [held["j1"][1]])])
    house.settle()

    assert list(w1.assigned()) == ["j2"]  # j1 is known to it and not sent again
    w1.done(held["j1"])
    house.settle()
    assert house.state("j1") == "done"


def test_a_worker_that_stays_away_is_given_up() -> None:
    house = House()
    _, w1, _ = running(house, "j1")
    w1.leave()

    house.later(15.5)

    assert house.state("j1") == "queued"
    assert house.machine.roster.workers == {}


def test_on_return_lost_assigns_are_sent_again_and_what_the_book_dropped_is_stopped() -> None:
    house = House()
    ann, w1, held = running(house, "known", "lost", "cancelled")
    ann.ask("cancel", ids=["cancelled"])
    w1.leave()
    w1 = house.stranger("w1")
    w1.heard.clear()

    w1.join(held=[(1, [held["known"][1], held["cancelled"][1], 7]), (99, [0, 1])])
    house.settle()

    stops = [message for _, message in w1.heard if isinstance(message, m.Stop)]
    assert stops == [
        m.Stop(1, [7], "stale"), m.Stop(1, [held["cancelled"][1]], "cancel"),
        m.Stop(99, None, "stale"),
    ]  # fmt: skip
    assert w1.assigned() == {"lost": held["lost"]}


def test_the_newest_connection_of_a_worker_is_the_one_that_counts() -> None:
    house = House()
    old = house.worker("w1")
    new = house.worker("w1")
    ann = house.client()

    assert not old.open
    assert "elsewhere" in old.all(m.Refusal)[0].text
    ann.submit("j1")
    house.settle()
    assert list(new.assigned()) == ["j1"]


def test_a_restarted_worker_has_lost_its_runs_and_they_are_not_sent_again_as_if_nothing_were() -> (
    None
):
    house = House()
    ann, w1, held = running(house, "j1", "j2")
    w1.say(m.Beat([(*held["j1"], 5)]))
    w1.leave()

    w1 = house.worker("w1", session="p2")

    again = w1.assigned()
    assert list(again) == ["j2"]
    assert again["j2"] != held["j2"]
    assert house.state("j1") == "delayed"
    job = ann.ask("job", id="j1")
    assert [(c["cause"], c["burned"]) for c in job["causes"]] == [(j.WORKER_LOST, True)]


def test_a_job_that_kills_whoever_runs_it_is_poison_even_if_the_worker_always_returns() -> None:
    house = House()
    ann, w1, held = running(house, "j1", max_attempts=50)
    lives = 0
    while house.state("j1") not in j.TERMINAL:
        lives += 1
        assert lives < 8
        attempt = held["j1"]
        if lives > 1:  # a later attempt is announced before it runs
            w1.say(m.Beat([(*attempt, 0)]))
        w1.leave()
        w1 = house.worker("w1", session=f"p{lives + 1}")
        house.later(6)
        held = w1.assigned()

    (ended,) = [e for r in ann.all(m.Results) for e in r.ended]
    assert (ended.state, ended.reason) == ("failed", j.POISON)
    assert sum(cause.burned for cause in ended.causes) == limits.LOST_WORKERS_MAX


def test_what_was_assigned_on_the_eve_of_a_forfeit_is_stopped() -> None:
    # The assign was being written when the worker's next life joined: it gets the attempts, and at
    # once they are given up with all that its former life held.
    house = House()
    ann, w1, _ = running(house, "j1")
    house.slow = True
    ann.submit("j2")
    house.turn()
    w1.leave()
    w1 = house.stranger("w1", session="p2")
    w1.join()
    house.settle()
    house.slow = False
    house.settle()

    stops = [message for _, message in w1.heard if isinstance(message, m.Stop)]
    sent = {}
    for _, message in w1.heard:
        if isinstance(message, m.Assign):
            sent |= {run.grant: run.ids for run in message.runs}
    live = set(house.machine.book.grants)
    assert set(sent) - live  # it was sent what it may not keep
    assert set(sent) - live <= {stop.grant for stop in stops if stop.why == "stale"}
    assert sorted(name for grant in live for name in sent[grant]) == ["j1", "j2"]


def test_a_worker_that_says_goodbye_gives_its_jobs_back_at_once() -> None:
    house = House()
    ann, w1, held = running(house, "j1", "j2")
    w2 = house.worker("w2")
    w1.say(m.Beat([(*held["j1"], 5)]))

    w1.say(m.Bye())
    effects = house.settle()

    assert Close(w1.conn) in effects
    assert list(w2.assigned()) == ["j2"]
    assert house.state("j1") == "delayed"
    assert [w["id"] for w in ann.ask("workers")["workers"]] == ["w2"]


# ------------------------------------------------------------------ time limits


def test_a_run_far_over_its_time_is_failed_by_the_broker_if_the_worker_does_not() -> None:
    house = House()
    ann, w1, held = running(house, "j1", timeout_ns=5 * NS)
    margin_ms = limits.TIMEOUT_MARGIN_NS // 1_000_000

    w1.say(m.Beat([(*held["j1"], 5000 + margin_ms)]))
    house.settle()
    assert house.state("j1") == "running"
    w1.say(m.Beat([(*held["j1"], 5001 + margin_ms)]))
    house.settle()

    assert w1.all(m.Stop) == [m.Stop(1, [0], "timeout")]
    assert ann.results() == {"j1": "failed"}
    w1.say(m.Beat([(*held["j1"], 9_000_000), (1, 7, 1), (99, 0, 1)]))
    house.settle()
    assert w1.all(m.Stop) == []


def test_a_job_without_a_time_limit_may_run_as_long_as_it_likes() -> None:
    house = House()
    _, w1, held = running(house, "j1")

    w1.say(m.Beat([(*held["j1"], 10**12)], 55))
    house.settle()

    assert house.state("j1") == "running"
    assert house.machine.roster.workers["w1"].load == 55


# ------------------------------------------------------------------ quarantine


def test_a_worker_that_fails_many_different_jobs_is_paused_and_reported() -> None:
    house = House()
    ids = [f"j{n}" for n in range(limits.QUARANTINE_FAILURES)]
    ann, w1, held = running(house, *ids)
    for name in ids:
        w1.failed(held[name], j.SIGNAL)
    effects = house.settle()
    ann.submit("next")
    effects += house.settle()

    assert logs(effects).count("worker.quarantined") == 1
    assert [w["state"] for w in ann.ask("workers")["workers"]] == ["quarantined"]
    assert ann.ask("stats")["workers"]["quarantined"] == 1
    assert w1.assigned() == {}
    assert ann.ask("job", id="next")["why"] == (
        "worker 'w1' could run it but is paused for 60 s, after 10 failures in a row "
        "(ekiden workers resume w1)"
    )
    house.later(limits.QUARANTINE_NS / NS + 1)
    assert "next" in w1.assigned()


@pytest.mark.parametrize("retry_on", [None, ("exit_code",)])
def test_jobs_that_say_no_by_themselves_are_not_held_against_their_worker(retry_on: Any) -> None:
    house = House()
    ids = [f"j{n}" for n in range(limits.QUARANTINE_FAILURES)]
    ann, w1, held = running(house, *ids, retry_on=retry_on)
    for name in ids:
        w1.failed(held[name], j.EXIT_CODE)
    effects = house.settle()

    assert logs(effects).count("worker.quarantined") == 0
    ann.submit("next")
    house.settle()
    assert list(w1.assigned()) == ["next"]


def test_a_keeper_that_died_under_many_jobs_makes_no_suspect_of_its_worker() -> None:
    house = House()
    ids = [f"j{n}" for n in range(limits.QUARANTINE_FAILURES)]
    ann, w1, held = running(house, *ids)
    for name in ids:
        w1.failed(held[name], j.WORKER_LOST)
    effects = house.settle()

    assert logs(effects).count("worker.quarantined") == 0
    ann.submit("next")
    house.settle()
    assert list(w1.assigned()) == ["next"]


def test_a_success_in_between_and_cancelled_jobs_make_no_suspect() -> None:
    house = House()
    ids = [f"j{n}" for n in range(2 * limits.QUARANTINE_FAILURES)]
    _, w1, held = running(house, *ids)
    half = limits.QUARANTINE_FAILURES

    for name in ids[: half - 1]:
        w1.failed(held[name], j.EXIT_CODE)
    w1.done(held[ids[half - 1]])
    for name in ids[half:]:
        w1.failed(held[name], j.CANCEL_CONFIRMED)
    w1.failed((1, 999), j.EXIT_CODE)
    w1.failed((77, 0), j.EXIT_CODE)
    effects = house.settle()

    assert "worker.quarantined" not in logs(effects)


def test_resuming_a_quarantined_worker_puts_it_to_work_at_once() -> None:
    house = House()
    ids = [f"j{n}" for n in range(limits.QUARANTINE_FAILURES)]
    ann, w1, held = running(house, *ids)
    for name in ids:
        w1.failed(held[name], j.EXIT_CODE)
    ann.submit("next")
    house.settle()

    assert ann.ask("resume", worker="w1")["state"] == "ready"

    assert list(w1.assigned()) == ["next"]


# ------------------------------------------------------------------ cancel


def test_cancelling_what_runs_stops_it_and_ends_when_the_worker_confirms() -> None:
    house = House()
    ann, w1, held = running(house, "j0", "j1")

    answer = ann.ask("cancel", ids=["j1", "nobody"])
    assert answer == {"cancelled": 0, "cancelling": 1, "settled": 0, "unknown": ["nobody"]}
    assert w1.take(m.Stop) == m.Stop(held["j1"][0], [held["j1"][1]], "cancel")
    assert house.state("j1") == "cancelling"

    w1.failed(held["j1"], j.CANCEL_CONFIRMED)
    house.settle()
    assert ann.results() == {"j1": "cancelled"}


def test_a_cancelling_job_whose_worker_is_lost_is_cancelled() -> None:
    house = House()
    ann, w1, _ = running(house, "j1")
    ann.ask("cancel", ids=["j1"])
    w1.leave()

    house.later(16)

    assert ann.results() == {"j1": "cancelled"}


# ------------------------------------------------------------------ attach, progress


def test_who_attaches_is_told_now_or_when_it_ends_and_of_the_unknown() -> None:
    house = House()
    ann, w1, held = running(house, "done", "open")
    w1.done(held["done"])
    house.settle()
    bob = house.client("bob")

    number = bob.say(m.Attach(["done", "open", "nobody"]))
    house.settle()
    assert (number, m.Attached(["nobody"])) in bob.heard
    assert bob.results() == {"done": b"out"}
    w1.done(held["open"])
    house.settle()

    assert bob.results() == {"open": b"out"}
    assert ann.results() == {"done": b"out", "open": b"out"}


def test_a_client_that_comes_back_and_attaches_hears_what_it_missed() -> None:
    house = House()
    ann, w1, held = running(house, "j1", "j2")
    ann.leave()
    w1.done(held["j1"])
    house.settle()

    ann = house.client("ann", "s-ann")
    ann.say(m.Attach(["j1", "j2"]))
    house.settle()
    assert ann.results() == {"j1": b"out"}
    w1.done(held["j2"])
    house.settle()

    assert ann.results() == {"j2": b"out"}  # once, though it attached and is the session, too


def test_attached_and_gone_again_leaves_nothing_behind() -> None:
    house = House()
    _, w1, held = running(house, "j1")
    for _ in range(5):
        bob = house.client("bob")
        bob.say(m.Attach(["j1"]))
        house.settle()
        bob.leave()

    assert house.machine.herald._watchers == {}
    w1.done(held["j1"])
    house.settle()


def progress(attempt: tuple[int, int], body: bytes) -> m.Progress:
    return m.Progress(attempt[0], attempt[1], body)


def test_progress_is_passed_on_to_the_session_that_submitted_the_job() -> None:
    house = House()
    ann, w1, held = running(house, "j1")
    bob = house.client("bob")

    w1.say(progress(held["j1"], b"50 %"))
    w1.say(m.Progress(99, 0, b"of nothing"), m.Progress(held["j1"][0], 7, b"of nothing"))
    house.settle()

    assert ann.all(m.JobProgress) == [m.JobProgress("j1", 1, b"50 %")]
    assert bob.heard == []
    w1.done(held["j1"])
    house.settle()
    w1.say(progress(held["j1"], b"late"))
    house.settle()
    assert ann.all(m.JobProgress) == []


def test_progress_too_large_to_be_passed_on_is_refused() -> None:
    house = House()
    ann, w1, held = running(house, "j1")

    w1.say(progress(held["j1"], b"x" * (limits.FRAME_BYTES_MAX - 40)))
    house.settle()

    assert w1.all(m.Refusal)[0].code == "too_large"
    assert ann.heard == []


def test_progress_of_a_client_that_is_away_is_dropped() -> None:
    house = House()
    ann, w1, held = running(house, "j1")
    ann.leave()

    w1.say(progress(held["j1"], b"50 %"))

    assert logs(house.settle()) == []


# ------------------------------------------------------------------ frames


def test_a_large_grant_travels_in_frames_within_the_limit() -> None:
    house = House()
    ann, w1 = house.client(), house.worker(slots=100)
    body = b"x" * 100_000

    for n in range(0, 40, 8):
        ann.say(submit_of(*(f"j{m}" for m in range(n, n + 8)), body=body))
    house.settle()

    assert len(w1.assigned()) == 40


def test_jobs_of_one_grant_with_different_specs_travel_in_runs_that_share_one() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    ann.submit("a1", "a2")
    ann.submit("a3", timeout_ns=5)
    bob.submit("b1")
    house.settle()

    w1 = house.worker(slots=10)

    (message,) = (message for _, message in w1.heard if isinstance(message, m.Assign))
    seen = {tuple(run.ids): (run.client, run.grant) for run in message.runs}
    assert set(seen) == {("a1", "a2"), ("a3",), ("b1",)}
    assert len({grant for _, grant in seen.values()}) == 1
    assert sorted(w1.assigned().values()) == [(1, n) for n in range(4)]


def test_many_small_runs_of_results_travel_in_frames_within_the_limit() -> None:
    house = House()
    ann = house.client()
    name = "w" * 120
    w1 = house.worker(name, slots=5000)
    ids = ["x" * 100 + f"{n:05}" for n in range(5000)]
    for n, job_id in enumerate(ids):
        ann.submit(job_id)
        house.wall += 1
        if n % 100 == 0:
            house.settle()
    house.settle()
    attempts = w1.assigned()
    assert len(attempts) == 5000
    ann.heard.clear()

    for job_id in ids:
        w1.done(attempts[job_id])
    house.settle()

    assert len(ann.results()) == 5000


def test_long_causes_of_many_jobs_travel_in_frames_within_the_limit() -> None:
    house = House()
    ids = [f"j{n}" for n in range(200)]
    ann, w1, held = running(house, *ids)
    failures = [m.Failure(held[name][1], j.EXIT_CODE, "é😀" * 1000) for name in ids]

    for start in range(0, 200, 50):
        w1.say(m.Ack([m.AckRun(1, [], [], {}, failures[start : start + 50])]))
    house.settle()

    assert list(ann.results().values()) == ["failed"] * 200


def test_a_worker_without_leases_comes_and_goes_without_a_trace_in_the_journal() -> None:
    house = House()
    ann = house.client()
    polite, silent = house.worker("w1"), house.worker("w2")
    before = house.machine.journal.committed

    polite.say(m.Bye())
    silent.leave()
    for _ in range(4):
        house.later(4)

    assert ann.ask("workers") == {"workers": []}
    assert house.machine.journal.committed == before


def test_of_two_that_attached_to_a_job_the_one_that_stays_is_told() -> None:
    house = House()
    _, w1, held = running(house, "j1")
    bob, cid = house.client("bob"), house.client("cid")
    bob.say(m.Attach(["j1"]))
    cid.say(m.Attach(["j1"]))
    house.settle()

    bob.leave()
    w1.done(held["j1"])
    house.settle()

    assert cid.results() == {"j1": b"out"}


def test_a_heartbeat_that_names_a_settled_attempt_is_no_reason_to_do_anything() -> None:
    house = House()
    _, w1, held = running(house, "j1", "j2", timeout_ns=1)
    w1.done(held["j1"])
    house.settle()
    w1.heard.clear()
    before = house.machine.journal.committed

    w1.say(m.Beat([(*held["j1"], 10**9)]))
    house.settle()

    assert w1.heard == []
    assert house.machine.journal.committed == before


def test_failures_reported_late_do_not_make_a_suspect() -> None:
    house = House()
    ids = [f"j{n}" for n in range(limits.QUARANTINE_FAILURES + 1)]
    ann, w1, held = running(house, *ids)
    for name in ids[:-1]:
        w1.done(held[name])
    house.settle()

    for name in ids[:-1]:
        w1.failed(held[name], j.EXIT_CODE)
    effects = house.settle()

    assert "worker.quarantined" not in logs(effects)
    assert house.state(ids[-1]) == "leased"
    assert ann.ask("stats")["jobs"]["stale_total"] == limits.QUARANTINE_FAILURES


def test_what_a_peer_says_after_goodbye_is_not_heard() -> None:
    house = House()
    ann = house.client()

    ann.say(m.Bye(), submit_of("j1"))
    house.settle()

    assert house.state("j1") == "unknown"


def test_words_from_a_connection_nobody_knows_are_dropped() -> None:
    house = House()
    ann = house.client()
    ann.leave()
    ann.leave()
    ann.submit("j1")

    assert house.settle() == []
