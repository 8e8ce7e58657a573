"""Questions and changes by people and tools."""

from __future__ import annotations

import math

import pytest
from tests.unit.broker.house import WALL, House

from ekiden.broker import desk as desk_module
from ekiden.limits import NS
from ekiden.model import jobs as j
from ekiden.wire import messages as m


def busy() -> tuple:
    """One job in every state; their names are their states."""
    house = House(client_cap=0)
    ann, bob = house.client("ann"), house.client("bob")
    w1 = house.worker("w1", "run.>", slots=4, labels={"zone": "eu"}, host="h1", cpu_milli=2000)
    ann.submit("done", "failed", "running", "cancelling", subject="run.x", run="nightly")
    house.settle()
    held = w1.assigned()
    w1.done(held["done"], output=b"four")
    w1.failed(held["failed"], j.EXIT_CODE, "code 3")
    w1.say(m.Beat([(*held["running"], 1500)], 40))
    house.settle()
    ann.ask("cancel", ids=["cancelling"])
    bob.submit("leased", subject="run.y")
    bob.submit("queued", priority=3)
    bob.submit("delayed", delay_ns=60 * NS)
    bob.submit("cancelled")
    house.settle()
    bob.ask("cancel", ids=["cancelled"])
    ann.heard.clear()
    return house, ann, w1, held


ALL = {"done", "failed", "running", "cancelling", "leased", "queued", "delayed", "cancelled"}


def listed(answer: dict) -> set[str]:
    return {line["id"] for line in answer["jobs"]}


# ------------------------------------------------------------------ jobs


def test_every_job_is_listed_once_with_its_state() -> None:
    _, ann, _, _ = busy()

    answer = ann.ask("jobs")

    assert {line["id"]: line["state"] for line in answer["jobs"]} == {name: name for name in ALL}
    assert len(answer["jobs"]) == len(ALL)
    assert answer["more"] is False


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"state": "queued"}, {"queued"}),
        ({"state": "delayed"}, {"delayed"}),
        ({"state": "running"}, {"running"}),
        ({"state": "leased"}, {"leased", "running", "cancelling"}),
        ({"state": "cancelling"}, {"cancelling"}),
        ({"state": "done"}, {"done"}),
        ({"state": "failed"}, {"failed"}),
        ({"state": "cancelled"}, {"cancelled"}),
        ({"client": "bob"}, {"leased", "queued", "delayed", "cancelled"}),
        ({"run": "nightly"}, {"done", "failed", "running", "cancelling"}),
        ({"subject": "run.*"}, {"done", "failed", "running", "cancelling", "leased"}),
        ({"subject": "run.y", "client": "ann"}, set()),
        ({"client": "nobody"}, set()),
    ],
)
def test_filters_choose_jobs(filters: dict, found: set[str]) -> None:
    _, ann, _, _ = busy()

    assert listed(ann.ask("jobs", **filters)) == found


def test_a_long_list_comes_in_pages() -> None:
    house = House()
    ann = house.client()
    names = [f"j{n:03}" for n in range(250)]
    ann.submit(*names)
    house.settle()

    seen: list[str] = []
    after = None
    while True:
        answer = ann.ask("jobs", limit=100, **({"after": after} if after else {}))
        seen += [line["id"] for line in answer["jobs"]]
        if not answer["more"]:
            break
        after = seen[-1]

    assert seen == names
    assert ann.ask("jobs", limit=0)["more"] is True


def test_a_look_is_bounded_and_says_if_it_did_not_see_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(desk_module, "ROWS_SEEN_MAX", 10)
    house = House()
    ann = house.client()
    ann.submit(*(f"j{n}" for n in range(20)))
    house.settle()

    answer = ann.ask("jobs")

    assert len(answer["jobs"]) == 10
    assert answer["more"] is True


def test_the_longest_list_of_failures_with_long_messages_fits_a_frame() -> None:
    house = House()
    ann, w1 = house.client(), house.worker(slots=1000)
    names = [f"j{n}" for n in range(1000)]
    ann.submit(*names)
    house.settle()
    for name, attempt in w1.assigned().items():
        w1.failed(attempt, j.EXIT_CODE, name + "é" * 1900)
        w1.say(m.Ack([]))
    house.settle()

    answer = ann.ask("jobs", limit=1000, state="failed")

    assert len(answer["jobs"]) == 1000
    assert len(ann.ask("job", id="j7")["causes"][0]["message"]) > 1900


def test_a_job_is_shown_with_all_that_is_known_of_it() -> None:
    _, ann, _, _ = busy()

    job = ann.ask("job", id="failed")

    assert job["causes"] == [
        {"attempt": 1, "worker": "w1", "cause": j.EXIT_CODE, "message": "code 3", "time": WALL,
         "burned": True},
    ]  # fmt: skip
    assert (job["state"], job["worker"], job["attempt"], job["generation"]) == (
        "failed",
        "w1",
        1,
        0,
    )
    assert (job["name"], job["subject"], job["client"], job["run"]) == (
        "n",
        "run.x",
        "ann",
        "nightly",
    )
    assert (job["submitted"], job["finished"], job["last_cause"]) == (WALL, WALL, j.EXIT_CODE)
    assert job["input_bytes"] == len("failed")
    done = ann.ask("job", id="done")
    assert (done["state"], done["output_bytes"], done["causes"]) == ("done", 4, [])


def test_a_failed_job_shows_how_its_last_attempt_went() -> None:
    house = House()
    ann, worker = house.client(), house.worker("w1", "a.>")
    ann.submit("j1", max_attempts=1)
    house.settle()
    ((grant, offset),) = worker.assigned().values()
    note = j.Note(exit_code=4, ran_ns=NS, cpu_ns=NS // 2, peak_kb=2048)
    worker.say(m.Ack([m.AckRun(grant, [], [], {}, [m.Failure(offset, j.EXIT_CODE, "4", note)])]))
    house.settle()

    job = ann.ask("job", id="j1")

    assert (job["state"], job["exit_code"], job["ran_s"]) == ("failed", 4, 1.0)
    assert (job["cpu_s"], job["peak_mb"]) == (0.5, 2.0)


def test_a_job_nobody_knows_is_refused_with_what_to_do() -> None:
    ann = House().client()

    refusal = ann.ask("job", id="j9")

    assert refusal.code == "unknown_job"
    assert "'j9'" in refusal.text
    assert refusal.remedy


@pytest.mark.parametrize(
    ("job_id", "words"),
    [
        ("done", "it is done"),
        ("failed", "it is failed: exit_code"),
        ("cancelled", "it is cancelled: cancelled"),
        ("running", "worker 'w1' holds attempt 1"),
        ("delayed", "its delay ends in 60.0 s"),
        ("queued", "no connected worker takes its subject and has what it needs"),
    ],
)
def test_a_sentence_says_why_a_job_is_where_it_is(job_id: str, words: str) -> None:
    _, ann, _, _ = busy()

    assert ann.ask("job", id=job_id)["why"] == words


def test_the_sentence_knows_caps_busy_workers_retries_and_wall_times() -> None:
    house = House(client_cap=1)
    ann, bob = house.client("ann"), house.client("bob")
    w1 = house.worker(slots=1)
    ann.submit("a1", "a2")
    bob.submit("b1", "b2")
    ann.submit("later", not_before=WALL + 90 * NS)
    house.settle()

    assert (
        ann.ask("job", id="a2")["why"] == "client 'ann' has 1 attempts in flight, which is its cap"
    )
    why = ann.ask("job", id="b1")["why"]
    assert why == "1 worker can run it, busy with 1 job; 1 more in the same queue"
    assert ann.ask("job", id="later")["why"] == ("it may not start before a time that is 90 s away")
    w1.failed((1, 0), j.HANDLER_ERROR)
    house.settle()
    assert ann.ask("job", id="a1")["why"].startswith("its next attempt is due in ")


# ------------------------------------------------------------------ changes


def test_cancel_by_ids_tells_what_became_of_each() -> None:
    house, ann, w1, _ = busy()

    answer = ann.ask("cancel", ids=["queued", "delayed", "running", "done", "nobody"])

    assert answer == {"cancelled": 2, "cancelling": 1, "settled": 1, "unknown": ["nobody"]}
    assert house.state("queued") == "cancelled"
    assert [stop.why for stop in w1.all(m.Stop)][-1] == "cancel"


@pytest.mark.parametrize(
    ("chosen", "cancelled", "cancelling"),
    [
        ({"client": "bob"}, 2, 1),
        ({"run": "nightly"}, 0, None),
        ({"state": "queued"}, 1, 0),
        ({"subject": "a.>"}, 2, 0),
        ({"all": True}, 2, None),
    ],
)
def test_cancel_by_filter_takes_what_is_alive(
    chosen: dict, cancelled: int, cancelling: int | None
) -> None:
    house, ann, _, _ = busy()

    answer = ann.ask("cancel", filter=chosen)

    assert answer["cancelled"] == cancelled
    assert cancelling is None or answer["cancelling"] == cancelling
    assert answer["settled"] == 0
    assert (house.state("done"), house.state("failed")) == ("done", "failed")


def test_replay_and_purge_by_filter_take_failed_jobs_and_cancelled_ones_if_asked() -> None:
    house, ann, _, _ = busy()

    assert ann.ask("replay", filter={"all": True}) == {"replayed": 1, "skipped": 0, "unknown": []}
    assert house.state("failed") in ("leased", "queued")
    assert ann.ask("job", id="failed")["generation"] == 1
    assert ann.ask("replay", filter={"state": "failed"})["replayed"] == 0
    assert ann.ask("purge", filter={"state": "cancelled"})["purged"] == 1
    assert house.state("cancelled") == "unknown"


def test_replay_and_purge_by_ids_skip_what_they_cannot_change() -> None:
    _, ann, _, _ = busy()

    answer = ann.ask("replay", ids=["failed", "done", "queued", "nobody"])
    assert answer == {"replayed": 1, "skipped": 2, "unknown": ["nobody"]}
    answer = ann.ask("purge", ids=["cancelled", "done", "nobody"])
    assert answer == {"purged": 1, "skipped": 1, "unknown": ["nobody"]}


def test_a_replayed_job_runs_again_and_its_session_is_told() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1")
    house.settle()
    w1.failed((1, 0), j.EXIT_CODE)
    house.settle()
    assert ann.results() == {"j1": "failed"}

    ann.ask("replay", ids=["j1"])
    w1.done(w1.assigned()["j1"])
    house.settle()

    (run,) = ann.take(m.Results).runs
    assert (run.ids, run.attempts) == (["j1"], {0: 2})


def test_a_change_is_answered_only_when_it_is_on_disk() -> None:
    house, ann, _, _ = busy()

    number = ann.say(m.Ask("cancel", {"ids": ["queued"]}))
    house.turn()
    assert ann.heard == []
    house.persist()
    house.turn()

    assert ann.heard[0][0] == number


@pytest.mark.parametrize(
    ("verb", "params"),
    [
        ("nonsense", {}),
        ("x" * 500, {}),
        ("jobs", {"state": "flying"}),
        ("jobs", {"state": 5}),
        ("jobs", {"state": ["queued"]}),
        ("jobs", {"subject": "a..b"}),
        ("jobs", {"subject": 7}),
        ("jobs", {"limit": "many"}),
        ("jobs", {"limit": math.inf}),
        ("jobs", {"limit": math.nan}),
        ("jobs", {"limit": None}),
        ("job", {}),
        ("cancel", {}),
        ("cancel", {"ids": "j1"}),
        ("cancel", {"ids": [1]}),
        ("cancel", {"ids": ["j"] * 10_001}),
        ("cancel", {"filter": "all"}),
        ("cancel", {"filter": {"weather": "fine"}}),
        ("cancel", {"filter": {"state": "flying"}}),
        ("drain", {}),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_and_changes_nothing(
    verb: str, params: dict
) -> None:
    house, ann, _, _ = busy()
    before = house.machine.book.applied

    refusal = ann.ask(verb, **params)

    assert isinstance(refusal, m.Refusal)
    assert refusal.code in ("bad_request", "bad_subject", "unknown_job", "unknown_worker")
    assert len(refusal.text) < 500
    assert house.machine.book.applied == before
    assert ann.open


# ------------------------------------------------------------------ workers and stats


def test_workers_are_shown_with_what_they_have_and_hold() -> None:
    _, ann, _, _ = busy()

    (shown,) = ann.ask("workers")["workers"]

    assert (shown["id"], shown["host"], shown["state"]) == ("w1", "h1", "ready")
    assert (shown["slots"], shown["credit"], shown["held"], shown["running"]) == (4, 4, 3, 1)
    assert (shown["patterns"], shown["labels"], shown["load"]) == (["run.>"], {"zone": "eu"}, 40)
    assert shown["cpu_milli"] == 2000


def test_stats_count_everything() -> None:
    house, ann, _, _ = busy()
    house.machine.desk.facts = lambda: {"memory_mb": 7, "journal": {"segments": 1}}

    stats = ann.ask("stats")

    jobs = stats["jobs"]
    assert (jobs["delayed"], jobs["queued"], jobs["leased"], jobs["cancelling"]) == (1, 1, 3, 1)
    assert (jobs["done"], jobs["failed"], jobs["cancelled"]) == (1, 1, 1)
    assert (jobs["accepted_total"], jobs["settled_total"]) == (8, 3)
    assert stats["clients"] == 2
    assert stats["workers"] == {
        "connected": 1, "draining": 0, "quarantined": 0, "slots": 4, "credit": 4,
    }  # fmt: skip
    assert (stats["group"], stats["broker"], stats["sync"]) == ("main", "b1", "always")
    assert stats["memory_mb"] == 7
    assert stats["journal"]["segments"] == 1
    assert {q["subject"]: (q["ready"], q["leased"]) for q in stats["queues"]} == {
        "a.x": (1, 0), "run.x": (0, 2), "run.y": (0, 1),
    }  # fmt: skip


def test_stats_tell_how_long_the_oldest_has_waited() -> None:
    house = House()
    ann = house.client()
    ann.submit("j1")
    house.settle()
    house.later(4)
    ann.submit("j2")
    house.settle()

    (queue,) = ann.ask("stats")["queues"]
    assert queue["oldest_wait_s"] == 4
    ann.ask("cancel", ids=["j1"])
    (queue,) = ann.ask("stats")["queues"]
    assert queue["oldest_wait_s"] == 0


def test_a_very_long_list_of_unknown_ids_is_cut_to_fit_the_answer() -> None:
    house = House()
    ann = house.client()

    answer = ann.ask("cancel", ids=[f"{n:0128}" for n in range(7900)])

    assert answer["cancelled"] == 0
    assert len(answer["unknown"]) == desk_module.UNKNOWN_SHOWN


def test_an_answer_too_long_for_a_frame_is_refused_in_words_and_the_connection_lives() -> None:
    house = House()
    ann = house.client()
    for n in range(60):
        house.worker(f"w{n}", *(f"{'x' * 100}.{n}.{k}" for k in range(250)))

    assert ann.ask("workers").code == "too_large"
    assert ann.open
    assert ann.ask("stats")["workers"]["connected"] == 60


# ------------------------------------------------------------------ cursors


def through(ann, **params) -> list[list[str]]:
    """All pages of a listing by cursor."""
    pages, cursor = [], ""
    while True:
        answer = ann.ask("jobs", cursor=cursor, **params)
        pages.append([line["id"] for line in answer["jobs"]])
        cursor = answer["cursor"]
        assert bool(cursor) == answer["more"]
        if not cursor:
            return pages


@pytest.mark.parametrize("brief", [False, True])
def test_a_cursor_goes_through_all_jobs_however_many_are_looked_at_in_one_turn(
    brief: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "SCAN_ROWS_MAX", 7)
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    names = [f"j{n}" for n in range(60)]
    ann.submit(*names)
    bob.submit("other")
    house.settle()

    pages = through(ann, limit=5, client="ann", brief=brief)

    assert sorted(name for page in pages for name in page) == sorted(names)
    assert max(map(len, pages)) <= 5


def test_a_cursor_leaves_no_job_out_while_jobs_run_end_and_are_forgotten() -> None:
    house = House()
    ann, w1 = house.client(), house.worker(slots=4)
    names = [f"j{n}" for n in range(40)]
    ann.submit(*names)
    ann.submit("x1", "x2", "x3", subject="b")
    house.settle()
    ann.ask("cancel", ids=["x1", "x2", "x3"])
    seen: set[str] = set()
    cursor, turn = "", 0
    while cursor or not turn:
        answer = ann.ask("jobs", cursor=cursor, limit=4)
        seen |= listed(answer)
        cursor = answer["cursor"]
        for attempt in w1.assigned().values():
            w1.done(attempt)
        turn += 1
        if turn <= 3:
            ann.ask("purge", ids=[f"x{turn}"])

    assert set(names) <= seen


def test_a_cursor_of_another_broker_begins_again_and_a_senseless_one_is_refused() -> None:
    house = House()
    ann = house.client()
    ann.submit("j1")
    house.settle()

    assert listed(ann.ask("jobs", cursor="b0/3:1:0")) == {"j1"}
    assert ann.ask("jobs", cursor="b1/no:number").code == "bad_request"
    assert ann.ask("jobs", cursor=5).code == "bad_request"
    assert ann.ask("jobs", cursor="", state="flying").code == "bad_request"


def test_what_is_alive_can_be_asked_for_in_one_word() -> None:
    _, ann, _, _ = busy()

    found = listed(ann.ask("jobs", live=True))

    assert found == {"running", "leased", "queued", "delayed"}


def test_after_a_job_that_is_gone_the_list_is_over() -> None:
    _, ann, _, _ = busy()

    assert ann.ask("jobs", after="nobody")["jobs"] == []


def test_who_asked_for_a_change_and_left_is_not_waited_for() -> None:
    house, ann, _, _ = busy()
    ann.say(m.Ask("cancel", {"ids": ["queued"]}))
    house.turn()
    ann.leave()
    house.persist()
    house.settle()

    assert house.state("queued") == "cancelled"


def test_a_job_cancelled_and_purged_in_one_breath_is_told_as_cancelled_first() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    ann.submit("j1")
    house.settle()
    ann.heard.clear()

    bob.say(m.Ask("cancel", {"ids": ["j1"]}), m.Ask("purge", {"ids": ["j1"]}))
    house.settle()

    assert ann.results() == {"j1": "cancelled"}
    assert [answer.body for answer in bob.all(m.Answer)] == [
        {"cancelled": 1, "cancelling": 0, "settled": 0, "unknown": []},
        {"purged": 0, "skipped": 1, "unknown": []},
    ]
    assert bob.ask("purge", ids=["j1"])["purged"] == 1
