"""From a submit to its result: what is said to whom, and never before it is on disk."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.broker.house import WALL, House, Said, spec_of, submit_of

from ekiden import limits
from ekiden.broker import intake as intake_module
from ekiden.journal.journal import Append
from ekiden.limits import NS
from ekiden.model import jobs as j
from ekiden.wire import messages as m


def test_a_submit_is_appended_and_accepted_only_when_it_is_on_disk() -> None:
    house = House()
    ann = house.client()

    number = ann.submit("j1", "j2")
    (append,) = house.turn()
    assert isinstance(append, Append)
    assert house.turn() == []
    assert house.state("j1") == "unknown"

    house.persist()
    assert house.turn() == [Said("ann", [m.Accepted([number])])]
    assert house.state("j1") == "queued"


def test_an_assign_shares_the_commit_of_the_submit_and_leaves_only_after_it() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()

    number = ann.submit("j1", "j2")
    (append,) = house.turn()
    assert isinstance(append, Append)
    assert w1.heard == []

    house.persist()
    # The worker first: it has something to get on with, the client only a receipt.
    assigned, accepted = house.turn()
    assert accepted == Said("ann", [m.Accepted([number])])
    run = m.AssignRun(1, 0, spec_of(), "ann", ["j1", "j2"], [b"j1", b"j2"])
    assert assigned.to == "w1"
    assert m.encode_body(assigned.messages[0]) == m.encode_body(m.Assign([run]))
    assert house.turn() == []


def test_an_ack_settles_when_it_is_on_disk_and_only_then_is_the_client_told() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", "j2")
    house.settle()
    ann.heard.clear()
    w1.heard.clear()

    note = j.Note(ran_ns=7)
    number = w1.say(m.Ack([m.AckRun(1, None, [b"r1", b"r2"], {1: note})]))
    (append,) = house.turn()
    assert isinstance(append, Append)
    house.persist()
    effects = house.turn()

    run = m.ResultRun(["j1", "j2"], [b"r1", b"r2"], "w1", WALL, WALL, WALL, {}, {1: note})
    assert sorted(effects, key=lambda said: said.to) == [
        Said("ann", [m.Results([run])]), Said("w1", [m.Acked(number)]),
    ]  # fmt: skip
    assert house.state("j1") == "done"


def test_while_one_entry_is_written_what_arrives_fills_the_next() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    ann.submit("j1")
    house.turn()

    bob.submit("j2")
    ann.submit("j3")
    assert house.turn() == []
    house.persist()
    said, append = house.turn()[::-1]

    assert said == Said("ann", [m.Accepted([ann.sent - 1])])
    assert isinstance(append, Append)
    house.settle()
    (entry,) = house.entries()[-1:]
    assert [command.ids for command in entry.commands] == [["j2"], ["j3"]]
    assert [house.state(name) for name in ("j1", "j2", "j3")] == ["queued"] * 3


def test_the_same_submit_again_is_accepted_again_and_runs_once() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1")
    house.settle()
    ann.submit("j1")
    house.settle()
    assert [a.messages for a in ann.all(m.Accepted)] == [[ann.sent - 1], [ann.sent]]
    assert list(w1.assigned()) == ["j1"]

    w1.done((1, 0))
    house.settle()
    ann.heard.clear()
    ann.submit("j1")
    house.settle()

    assert ann.results() == {"j1": b"out"}
    assert w1.assigned() == {}
    assert house.machine.book.totals.accepted == 1


def test_another_client_that_submits_the_same_job_is_told_the_same_result() -> None:
    house = House()
    ann, bob, w1 = house.client("ann"), house.client("bob"), house.worker()
    ann.submit("j1")
    bob.submit("j1")
    house.settle()

    w1.done((1, 0))
    house.settle()

    assert ann.results() == {"j1": b"out"}
    assert bob.results() == {"j1": b"out"}


def test_an_id_taken_by_other_content_is_a_conflict_and_the_rest_is_accepted() -> None:
    house = House()
    ann = house.client()
    ann.submit("j1")
    house.settle()
    ann.heard.clear()

    number = ann.submit("j0", "j1", body=b"other")
    house.settle()

    accepted = ann.take(m.Accepted)
    assert accepted.messages == [number]
    (refused,) = accepted.refused
    assert (refused.message, refused.offset, refused.code) == (number, 1, "conflict")
    assert "'j1'" in refused.text
    assert refused.remedy
    assert house.state("j0") == "queued"


BAD = {
    "no jobs at all": (submit_of(), "bad_request"),
    "too many jobs": (
        m.Submit(spec_of(), ["j"] * 4097, b"d" * 8 * 4097, [b""] * 4097), "bad_request",
    ),
    "columns of different length": (m.Submit(spec_of(), ["j"], b"d" * 8, [b"", b""]), "bad_request"),
    "digests of different length": (m.Submit(spec_of(), ["j"], b"d" * 7, [b""]), "bad_request"),
    "a negative delay": (submit_of("j", delay_ns=-1), "bad_request"),
    "a negative time": (submit_of("j", expires_at=-1), "bad_request"),
    "a delay beyond all bounds": (submit_of("j", delay_ns=(1 << 63) - 1), "bad_request"),
    "an id outside its grammar": (submit_of("j 1"), "bad_id"),
    "an empty id": (submit_of(""), "bad_id"),
    "an id with a line break": (submit_of("j1", "a\nb"), "bad_id"),
    "a long id": (submit_of("x" * 129), "bad_id"),
    "a subject with a wildcard": (submit_of("j", subject="a.*"), "bad_subject"),
    "a subject with an empty token": (submit_of("j", subject="a..b"), "bad_subject"),
    "a bad name": (submit_of("j", name="../x"), "bad_id"),
    "a priority beyond its bounds": (submit_of("j", priority=10), "bad_request"),
    "a negative number of attempts": (submit_of("j", max_attempts=-1), "bad_request"),
    "too many attempts": (submit_of("j", max_attempts=1001), "bad_request"),
    "a negative time limit": (submit_of("j", timeout_ns=-1), "bad_request"),
    "an unknown form": (submit_of("j", form=7), "bad_request"),
    "an unknown cause": (submit_of("j", retry_on=("weather",)), "bad_request"),
    "negative needs": (submit_of("j", needs=(-1,)), "bad_request"),
    "too many labels": (
        submit_of("j", needs=(0, 0, tuple((f"n{n:02}", "v") for n in range(33)))), "bad_request",
    ),
    "labels out of order": (submit_of("j", needs=(0, 0, (("b", ""), ("a", "")))), "bad_request"),
    "a long run name": (submit_of("j", run="r" * 129), "bad_request"),
    "a long key": (submit_of("j", key="k" * 129), "bad_request"),
    "a worker to avoid": (
        m.Submit(
            msgspec.Raw(msgspec.msgpack.encode(j.Spec("n", j.Route("a", avoid="w1")))),
            ["j"], b"d" * 8, [b""],
        ), "bad_request",
    ),
    "a spec that is none": (m.Submit(msgspec.Raw(b"\x01"), ["j"], b"d" * 8, [b""]), "bad_request"),
    "a spec over the limit": (submit_of("j", retry_on=("oom",) * 50_000), "too_large"),
    "a payload over the limit": (
        submit_of("j", body=b"x" * (limits.PAYLOAD_BYTES_MAX + 1)), "too_large",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_submit_is_refused_as_a_whole_with_a_reason_and_nothing_changes(what: str) -> None:
    message, code = BAD[what]
    house = House()
    ann = house.client()

    number = ann.say(message)
    house.settle()

    accepted = ann.take(m.Accepted)
    (refused,) = accepted.refused
    assert (refused.message, refused.offset, refused.code) == (number, -1, code)
    assert refused.text
    assert house.machine.book.totals.accepted == 0
    assert ann.open
    ann.submit("fine")
    house.settle()
    assert house.state("fine") == "queued"


def test_the_largest_payload_goes_all_the_way() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    body = b"x" * limits.PAYLOAD_BYTES_MAX

    ann.submit("j1", "j2", body=body)
    house.settle()
    w1.done(*w1.assigned().values(), output=body)
    house.settle()

    assert ann.results() == {"j1": body, "j2": body}


# ------------------------------------------------------------------ bounds


def test_a_full_subject_refuses_with_retry_after_and_takes_jobs_again_later() -> None:
    house = House(waiting_max=3)
    ann = house.client()
    ann.submit("j1", "j2")
    ann.submit("j3", "j4")
    ann.submit("o1", subject="b")
    house.settle()

    answers = ann.all(m.Accepted)
    (refused,) = [r for answer in answers for r in answer.refused]
    assert (refused.message, refused.code) == (ann.sent - 1, "queue_full")
    assert refused.retry_after_ms > 0
    assert [house.state(name) for name in ("j1", "j3", "o1")] == ["queued", "unknown", "queued"]

    ann.ask("cancel", ids=["j1", "j2"])
    ann.submit("j3", "j4")
    house.settle()
    assert house.state("j3") == "queued"


def test_jobs_in_flight_to_the_disk_and_of_capped_clients_count_as_waiting() -> None:
    house = House(waiting_max=4, client_cap=1)
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", "j2")
    house.turn()
    ann.submit("j3", "j4")
    ann.submit("j5")
    house.settle()
    assert len(w1.assigned()) == 1
    ann.heard.clear()

    ann.submit("j6", "j7", "j8")
    house.settle()

    assert [r.code for r in ann.take(m.Accepted).refused] == ["queue_full"]


def test_delayed_jobs_are_bounded_too() -> None:
    house = House(waiting_max=2)
    ann = house.client()
    ann.submit("j1", delay_ns=NS)
    ann.submit("j2", not_before=WALL + NS)
    ann.submit("j3", delay_ns=NS)
    house.settle()
    ann.submit("j4", delay_ns=NS)
    house.settle()

    refused = [r.message for answer in ann.all(m.Accepted) for r in answer.refused]
    assert refused == [ann.sent - 1, ann.sent]
    assert house.machine.book.delayed == 2


@pytest.mark.parametrize(
    ("bound", "word"), [("CLIENT_BYTES_MAX", "client"), ("TOTAL_BYTES_MAX", "")]
)
def test_too_many_bytes_are_refused_until_some_job_ends(
    bound: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, bound, 1000)
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", body=b"x" * 600)
    ann.submit("j2", body=b"y" * 600)
    house.settle()
    (refused,) = [r for answer in ann.all(m.Accepted) for r in answer.refused]
    assert (refused.message, refused.code) == (ann.sent, "queue_full")
    assert word in refused.text

    w1.done((1, 0))
    house.settle()
    ann.submit("j2", body=b"y" * 600)
    house.settle()

    assert house.state("j2") == "leased"


def test_many_conflicts_at_once_fit_the_frames_that_tell_of_them() -> None:
    house = House()
    ann = house.client()
    names = ["x" * 110 + f"{n:018}" for n in range(4096)]
    for start in (0, 2048):
        ann.submit(*names[start : start + 2048], body=b"")
    house.settle()
    ann.heard.clear()

    for _ in range(3):
        ann.submit(*names, body=b"other")
    house.settle()

    answers = ann.all(m.Accepted)
    for answer in answers:
        assert {r.message for r in answer.refused} <= set(answer.messages)
    assert sum(len(answer.refused) for answer in answers) == 3 * 4096


# ------------------------------------------------------------------ times


def test_a_delayed_job_is_assigned_when_its_delay_ends_without_any_event() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", delay_ns=3 * NS)
    house.settle()
    assert house.state("j1") == "delayed"

    house.later(2.75)
    assert w1.assigned() == {}
    deadline = house.machine.next_deadline()
    assert deadline is not None
    assert deadline <= house.now + NS // 4
    house.later(0.25)
    house.settle()

    assert list(w1.assigned()) == ["j1"]


def test_wall_times_follow_the_wall_clock_even_if_it_jumps() -> None:
    house = House()
    ann, w1 = house.client(), house.worker("w1", "b.>")
    ann.submit("at", not_before=WALL + 3600 * NS, subject="b.x")
    ann.submit("until", expires_at=WALL + 3600 * NS)
    house.later(5)
    assert (house.state("at"), house.state("until")) == ("delayed", "queued")

    house.wall += 3600 * NS
    house.later(1.25)

    assert list(w1.assigned()) == ["at"]
    assert ann.results() == {"until": "cancelled"}


def test_a_job_that_has_expired_when_it_is_submitted_never_runs() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()

    ann.submit("j1", expires_at=WALL - 1)
    house.settle()

    assert w1.assigned() == {}
    assert ann.results() == {"j1": "cancelled"}


def test_a_backward_wall_clock_disturbs_nothing() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", delay_ns=2 * NS)
    house.settle()

    house.wall -= 86_400 * NS
    house.later(3)

    assert list(w1.assigned()) == ["j1"]


# ------------------------------------------------------------------ results


def test_results_too_large_for_one_frame_travel_in_several() -> None:
    house = House()
    ann, w1 = house.client(), house.worker(slots=8)
    names = [f"j{n}" for n in range(8)]
    ann.submit(*names)
    house.settle()
    outputs = [b"%d" % n * 120_000 for n in range(8)]
    note = j.Note(ran_ns=3)

    w1.say(m.Ack([m.AckRun(1, None, outputs, {6: note})]))
    house.settle()

    runs = [run for message in ann.all(m.Results) for run in message.runs]
    assert dict(zip((i for r in runs for i in r.ids), (o for r in runs for o in r.outputs),
                    strict=True)) == dict(zip(names, outputs, strict=True))  # fmt: skip
    assert [run.ids[n] for run in runs for n in run.notes] == ["j6"]


def test_one_settlement_is_told_to_each_session_it_belongs_to() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    ann.submit("a1", "a2")
    bob.submit("b1")
    house.settle()
    house.now += NS
    ann.submit("a3")
    house.settle()
    w1 = house.worker(slots=8)
    names = list(w1.assigned())

    w1.say(m.Ack([m.AckRun(1, None, [name.encode() for name in names])]))
    house.settle()

    assert ann.results() == {"a1": b"a1", "a2": b"a2", "a3": b"a3"}
    assert bob.results() == {"b1": b"b1"}


def test_distinct_specs_are_checked_once_each_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake_module, "_SPECS_CHECKED", 3)
    house = House()
    ann = house.client()
    for n in range(10):
        ann.submit(f"j{n}", subject=f"a.{n}")
    house.settle()

    assert len(house.machine.intake._checked) <= 3
    assert house.machine.book.totals.accepted == 10


# ------------------------------------------------------------------ deadlines


def test_the_next_deadline_is_the_soonest_thing_to_do() -> None:
    house = House()
    ann = house.client()
    house.settle()
    sweep = house.machine.next_deadline()
    assert sweep is not None
    assert house.now < sweep <= house.now + NS // 4

    ann.submit("wall", not_before=WALL + NS // 100)
    house.settle()
    assert house.machine.next_deadline() == house.now + NS // 100
    ann.submit("delay", delay_ns=NS // 1000)
    house.settle()
    assert house.machine.next_deadline() == house.now + NS // 1000
    house.slow = True
    ann.submit("j1")
    house.turn()
    assert house.machine.next_deadline() == sweep  # the disk will say when it is done
