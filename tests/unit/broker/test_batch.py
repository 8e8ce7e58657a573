"""Small submits share a command, and nobody can tell but by the speed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.broker.house import House, submit_of

from ekiden import limits
from ekiden.broker.events import TakeSnapshot
from ekiden.core import commands as c
from ekiden.wire import messages as m


def submits(house: House) -> list[list[str]]:
    """The ids of every Submit command on disk."""
    return [
        command.ids
        for entry in house.entries()
        for command in entry.commands
        if isinstance(command, c.Submit)
    ]


def test_small_submits_that_are_alike_become_one_command_and_are_answered_one_by_one() -> None:
    house = House()
    ann = house.client()

    ann.say(submit_of("j1"), submit_of("j2", "j3"), submit_of("j4"))
    house.settle()

    assert submits(house) == [["j1", "j2", "j3", "j4"]]
    assert ann.take(m.Accepted) == m.Accepted([ann.sent - 2, ann.sent - 1, ann.sent])
    assert [house.state(job_id) for job_id in ("j1", "j2", "j3", "j4")] == ["queued"] * 4


def test_conflicts_and_repeats_are_told_to_the_submit_they_were_in() -> None:
    house = House()
    ann, w1 = house.client(), house.worker(slots=8)
    ann.submit("done", "taken")
    house.settle()
    w1.done(*w1.assigned().values(), output=b"before")
    house.settle()
    ann.heard.clear()

    ann.say(submit_of("j1"), submit_of("j2", "done"), submit_of("j3"))
    last = ann.say(submit_of("j4", "taken", body=b"other"), submit_of("j5", "j1"))
    house.settle()

    (accepted,) = (each for _, each in ann.heard if isinstance(each, m.Accepted))
    assert accepted.messages == [last - 4, last - 3, last - 2, last - 1, last]
    assert [(r.message, r.offset, r.code) for r in accepted.refused] == [(last - 1, 1, "conflict")]
    assert ann.results() == {"done": b"before"}
    assert sorted(w1.assigned()) == ["j1", "j2", "j3", "j4", "j5"]


@pytest.mark.parametrize(
    "other",
    [
        submit_of("j2", priority=1),
        submit_of("j2", subject="a.y"),
        submit_of("j2", delay_ns=5),
        submit_of("j2", not_before=5),
        submit_of("j2", expires_at=1 << 61),
        submit_of(*(f"j2-{n}" for n in range(17))),
    ],
    ids=["priority", "subject", "delay", "not_before", "expires_at", "large"],
)
def test_submits_that_differ_or_are_large_stay_by_themselves(other: m.Submit) -> None:
    house = House()
    ann = house.client()

    ann.say(submit_of("j1"), other, submit_of("j3"))
    house.settle()

    assert submits(house) == [["j1"], other.ids, ["j3"]]


def test_submits_of_two_clients_are_not_mixed() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")

    ann.submit("j1")
    bob.submit("j2")
    ann.submit("j3")
    house.settle()

    assert submits(house) == [["j1"], ["j2"], ["j3"]]


def test_the_order_of_a_submit_and_its_cancel_is_kept() -> None:
    house = House()
    ann = house.client()

    ann.say(submit_of("j1"), m.Ask("cancel", {"ids": ["j1", "j2"]}), submit_of("j2"))
    house.settle()

    assert (house.state("j1"), house.state("j2")) == ("cancelled", "queued")


def test_what_is_merged_is_never_more_than_one_submit_may_have() -> None:
    house = House()
    ann = house.client()

    ids = [[f"j{n}-{k}" for k in range(16)] for n in range(300)]
    ann.say(*(submit_of(*some) for some in ids))
    house.settle()

    found = submits(house)
    assert [job_id for some in found for job_id in some] == [i for some in ids for i in some]
    assert max(map(len, found)) == limits.BATCH_JOBS_MAX


def test_a_broker_that_read_a_long_journal_writes_a_snapshot_even_if_nothing_happens() -> None:
    house = House()
    house.client().submit("j1")
    house.settle()

    effects: list[Any] = house.restart().later(61)

    assert [type(effect) for effect in effects if isinstance(effect, TakeSnapshot)] == [
        TakeSnapshot
    ]
