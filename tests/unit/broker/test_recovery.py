"""A broker that dies and comes back: from its journal, from a snapshot, with its workers."""

from __future__ import annotations

import pytest
from tests.unit.broker.house import GROUP, House, logs

from ekiden.broker.recovery import take_snapshot
from ekiden.core import image, invariants
from ekiden.limits import NS
from ekiden.model import jobs as j
from ekiden.wire import messages as m


def a_life() -> tuple:
    """Jobs in many states, and a worker that holds some."""
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("done", "failed", "held", "lost", "waits", "cancelled")
    ann.submit("delayed", delay_ns=60 * NS)
    house.settle()
    held = w1.assigned()
    w1.done(held["done"], output=b"L" * 3000)
    w1.failed(held["failed"], j.EXIT_CODE)
    w1.say(m.Credit(2))
    house.settle()
    ann.ask("cancel", ids=["cancelled"])
    house.settle()
    return house, held


def test_a_restart_from_the_journal_brings_back_the_same_book() -> None:
    house, _ = a_life()

    again = house.restart()

    assert image.fingerprint(again.machine.book) == image.fingerprint(house.machine.book)
    invariants.check(again.machine.book)


def test_a_restart_from_a_snapshot_and_the_rest_of_the_journal_brings_back_the_same_book() -> None:
    house, _ = a_life()
    half = house.machine.book.applied // 2
    assert take_snapshot(house.storage, half, GROUP) == half

    again = house.restart()
    assert again.opened.machine.book.applied == house.machine.book.applied
    assert image.fingerprint(again.machine.book) == image.fingerprint(house.machine.book)
    take_snapshot(again.storage, again.machine.book.applied, GROUP)

    third = again.restart()
    assert image.fingerprint(third.machine.book) == image.fingerprint(house.machine.book)


def test_what_was_not_on_disk_when_it_died_was_promised_to_nobody() -> None:
    house = House()
    ann = house.client()
    ann.submit("kept")
    house.settle()
    ann.heard.clear()
    house.slow = True
    ann.submit("lost")
    house.settle()
    assert ann.heard == []

    again = house.restart()

    assert (again.state("kept"), again.state("lost")) == ("queued", "unknown")
    ann = again.client("ann", "s-ann")
    number = ann.submit("kept", "lost")
    again.settle()
    assert ann.take(m.Accepted) == m.Accepted([number])
    assert (again.state("kept"), again.state("lost")) == ("queued", "queued")


def test_what_reached_the_disk_without_an_answer_is_accepted_when_sent_again() -> None:
    house = House()
    ann, w1 = house.client(), house.worker("w1", "b")
    ann.submit("j1")
    house.turn()
    house.persist()  # and dies before it says so

    again = house.restart()
    ann = again.client("ann", "s-ann")
    number = ann.submit("j1")
    again.settle()

    assert ann.take(m.Accepted).messages == [number]
    assert again.machine.book.totals.accepted == 1
    assert w1.assigned() == {}


def test_workers_that_return_keep_their_leases_and_lost_assigns_are_sent_again() -> None:
    house, held = a_life()
    again = house.restart()
    w1 = again.stranger("w1")

    w1.join(held=[(held["held"][0], [held["held"][1], held["done"][1]])])
    again.settle()

    stops = [message for _, message in w1.heard if isinstance(message, m.Stop)]
    assert stops == [m.Stop(held["done"][0], [held["done"][1]], "stale")]
    assigned = w1.assigned()
    assert assigned.pop("lost") == held["lost"]
    assert "held" not in assigned
    w1.done(held["held"], held["lost"])
    again.settle()
    assert (again.state("held"), again.state("lost")) == ("done", "done")


def test_an_ack_that_was_not_confirmed_before_the_crash_is_taken_after_it() -> None:
    house, held = a_life()
    again = house.restart()
    w1 = again.stranger("w1")
    w1.join(held=[(held["held"][0], [held["held"][1]])])

    number = w1.done(held["held"], held["done"])
    again.settle()

    assert m.Acked(number) in [message for _, message in w1.heard]
    assert again.state("held") == "done"
    assert again.machine.book.totals.stale == house.machine.book.totals.stale + 1


def test_nothing_is_forfeited_before_the_grace_for_returning_workers_has_passed() -> None:
    house, _ = a_life()
    again = house.restart()
    w2 = again.worker("w2")
    again.later(9.5)
    assert again.state("held") == "leased"
    w2.heard.clear()

    again.later(1)

    assert again.state("held") == "leased"
    assert {"held", "lost"} <= set(w2.assigned())
    ann = again.client()
    job = ann.ask("job", id="held")
    assert [(c["cause"], c["burned"]) for c in job["causes"]] == [(j.WORKER_LOST, False)]


def test_a_worker_that_returns_in_time_is_not_forfeited_when_the_grace_ends() -> None:
    house, held = a_life()
    again = house.restart()
    w1 = again.stranger("w1")
    w1.join(held=[held["held"] and (held["held"][0], [held["held"][1], held["lost"][1]])])

    again.later(30)

    assert (again.state("held"), again.state("lost")) == ("leased", "leased")


def test_time_while_no_broker_ran_does_not_count_but_wall_time_does() -> None:
    house = House()
    ann = house.client()
    ann.submit("delayed", delay_ns=60 * NS)
    ann.submit("expires", expires_at=house.wall + 60 * NS)
    house.settle()

    again = House(house.storage, now=5 * NS, wall=house.wall + 3600 * NS)
    again.settle()

    assert (again.state("delayed"), again.state("expires")) == ("delayed", "cancelled")
    again.later(59)
    assert again.state("delayed") == "delayed"
    again.later(1.5)
    assert again.state("delayed") == "queued"


def test_grant_numbers_are_never_used_again_after_a_restart() -> None:
    house, held = a_life()
    again = house.restart()
    w2 = again.worker("w2")

    numbers = {grant for grant, _ in w2.assigned().values()}

    assert numbers
    assert min(numbers) > max(grant for grant, _ in held.values())


def test_changed_settings_are_written_once_and_hold_after_the_next_restart() -> None:
    house = House(client_cap=2)
    house.settle()
    assert house.machine.book.settings.client_inflight_max == 2
    index = house.machine.book.applied

    same = house.restart(client_cap=2)
    same.settle()
    assert same.machine.book.applied == index
    other = same.restart(client_cap=3)
    other.settle()

    assert other.machine.book.settings.client_inflight_max == 3
    assert other.machine.book.applied == index + 1


def test_queued_work_goes_out_to_the_first_worker_after_a_restart() -> None:
    house = House()
    ann = house.client()
    ann.submit("j1", "j2")
    house.settle()
    again = house.restart()

    w1 = again.worker()

    assert list(w1.assigned()) == ["j1", "j2"]


def test_a_client_that_attaches_after_the_restart_hears_the_results() -> None:
    house, held = a_life()
    again = house.restart()
    ann, w1 = again.client("ann", "s-ann"), again.stranger("w1")
    w1.join(held=[(held["held"][0], [held["held"][1], held["lost"][1]])])
    ann.say(m.Attach(["done", "failed", "held", "nobody"]))
    again.settle()
    assert ann.results() == {"done": b"L" * 3000, "failed": "failed"}

    w1.done(held["held"])
    again.settle()

    assert ann.results() == {"held": b"out"}


def test_an_unknown_event_is_a_bug_and_says_so() -> None:
    house = House()

    with pytest.raises(AssertionError):
        house.machine.receive(object(), house.now)
    assert logs(house.settle()) == []
