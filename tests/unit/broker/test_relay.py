"""Publish and subscribe: to everyone who listens, in bounds, and never in the way of the ledger."""

from __future__ import annotations

import pytest
from tests.unit.broker.house import House, Said

from ekiden import limits
from ekiden.broker import relay as relay_module
from ekiden.machine import Close, Congested, Disconnected, Relieved
from ekiden.model import jobs as j
from ekiden.wire import messages as m


def test_every_subscription_that_matches_gets_a_copy_and_nothing_is_journaled() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    w1 = house.worker()
    ann.say(m.Subscribe(1, "news.*"), m.Subscribe(2, "news.sport"), m.Subscribe(3, "other"))
    w1.say(m.Subscribe(9, ">"))
    before = house.machine.book.applied

    bob.say(m.Publish("news.sport", b"1:0"))
    effects = house.settle()

    assert sorted(effects, key=lambda said: said.to) == [
        Said("ann", [m.Delivery(1, "news.sport", b"1:0"), m.Delivery(2, "news.sport", b"1:0")]),
        Said("w1", [m.Delivery(9, "news.sport", b"1:0")]),
    ]
    assert house.machine.book.applied == before
    stats = bob.ask("stats")["relay"]
    assert stats == {"published": 1, "delivered": 3, "dropped": 0}


def test_a_subscription_ends_when_it_is_taken_back_replaced_or_its_connection_ends() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    ann.say(m.Subscribe(1, "a"), m.Subscribe(2, "b"), m.Subscribe(1, "c"))
    ann.say(m.Unsubscribe(2), m.Unsubscribe(77))

    bob.say(m.Publish("a", b""), m.Publish("b", b""), m.Publish("c", b""))
    house.settle()
    assert ann.all(m.Delivery) == [m.Delivery(1, "c", b"")]
    ann.leave()
    bob.say(m.Publish("c", b""))

    assert house.settle() == []
    assert len(house.machine.relay._trie) == 0


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (m.Publish("a.*", b""), "bad_subject"),
        (m.Publish("", b""), "bad_subject"),
        (m.Publish("a", b"x" * (limits.PAYLOAD_BYTES_MAX + 1)), "too_large"),
        (m.Subscribe(1, "a..b"), "bad_subject"),
    ],
)
def test_what_breaks_the_rules_is_refused(message: m.Message, code: str) -> None:
    house = House()
    ann = house.client()

    number = ann.say(message)
    house.settle()

    ((corr, refusal),) = ann.heard
    assert (corr, refusal.code) == (number, code)  # type: ignore[attr-defined]
    assert ann.open


def test_subscriptions_of_one_connection_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUBSCRIPTIONS_PER_CONNECTION", 3)
    house = House()
    ann = house.client()

    for sid in range(5):
        ann.say(m.Subscribe(sid, f"a.{sid}"))
    house.settle()

    assert [refusal.code for refusal in ann.all(m.Refusal)] == ["bad_request"] * 2


def test_a_flood_is_passed_on_in_shares_and_does_not_hold_up_the_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RELAY_MESSAGES_PER_TURN", 10)
    house = House()
    ann, bob, w1 = house.client("ann"), house.client("bob"), house.worker()
    ann.say(m.Subscribe(1, "a"))
    bob.say(*(m.Publish("a", b"%d" % n) for n in range(50)))
    bob.submit("j1")

    house.turn()
    assert len(ann.heard) == 5
    assert (house.machine.next_deadline() or 0) <= house.now  # more to do at once
    house.persist()
    house.turn()
    assert list(w1.assigned()) == ["j1"]
    house.settle()

    assert [d.payload for d in ann.all(m.Delivery)] == [b"%d" % n for n in range(50)]


def test_beyond_the_backlog_the_oldest_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "BACKLOG_MAX", 10)
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    ann.say(m.Subscribe(1, "a"))

    bob.say(*(m.Publish("a", b"%d" % n) for n in range(15)))
    house.settle()

    assert [d.payload for d in ann.all(m.Delivery)] == [b"%d" % n for n in range(5, 15)]
    assert bob.ask("stats")["relay"]["dropped"] == 5


# ------------------------------------------------------------------ slow readers


def test_a_slow_reader_of_published_messages_is_dropped_and_the_others_are_not() -> None:
    house = House()
    ann, bob, cid = house.client("ann"), house.client("bob"), house.client("cid")
    for far in (ann, bob):
        far.say(m.Subscribe(1, "a"))
    house.machine.receive(Congested(ann.conn), house.now)
    size = limits.PAYLOAD_BYTES_MAX

    effects = []
    for _ in range(limits.RELAY_OUTBOX_BYTES_MAX // size + 2):
        cid.say(m.Publish("a", b"x" * size))
        effects += house.settle()

    assert Close(ann.conn) in effects
    assert bob.open
    assert len(bob.all(m.Delivery)) == limits.RELAY_OUTBOX_BYTES_MAX // size + 2


def test_a_reader_that_catches_up_now_and_then_is_not_dropped() -> None:
    house = House()
    ann, cid = house.client("ann"), house.client("cid")
    ann.say(m.Subscribe(1, "a"))
    size = limits.PAYLOAD_BYTES_MAX

    for _ in range(2 * limits.RELAY_OUTBOX_BYTES_MAX // size):
        house.machine.receive(Congested(ann.conn), house.now)
        cid.say(m.Publish("a", b"x" * size))
        house.settle()
        house.machine.receive(Relieved(ann.conn), house.now)

    assert ann.open


def test_results_wait_for_a_client_that_reads_slowly_and_come_when_it_reads() -> None:
    house = House()
    ann, bob, w1 = house.client("ann"), house.client("bob"), house.worker(slots=10)
    ann.submit("j1", "j2", "j3")
    bob.submit("b1")
    house.settle()
    ann.heard.clear()
    house.machine.receive(Congested(ann.conn), house.now)

    held = w1.assigned()
    w1.done(held["j1"], output=b"small")
    w1.done(held["j2"], output=b"L" * 5000)
    w1.failed(held["j3"], j.EXIT_CODE)
    w1.done(held["b1"])
    house.settle()
    assert ann.heard == []
    assert bob.results() == {"b1": b"out"}

    house.machine.receive(Relieved(ann.conn), house.now)
    house.settle()
    assert ann.results() == {"j1": b"small", "j2": b"L" * 5000, "j3": "failed"}


def test_what_is_owed_is_paid_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OWED_BYTES_PER_TURN", 10_000)
    house = House()
    ann, w1 = house.client(), house.worker(slots=20)
    names = [f"j{n}" for n in range(20)]
    ann.submit(*names)
    house.settle()
    house.machine.receive(Congested(ann.conn), house.now)
    for attempt in w1.assigned().values():
        w1.done(attempt, output=b"L" * 4000)
    house.settle()
    ann.heard.clear()

    house.machine.receive(Relieved(ann.conn), house.now)
    house.turn()
    assert 0 < len(ann.results()) < 10
    assert (house.machine.next_deadline() or 0) <= house.now
    house.settle()
    assert not house.machine.herald.waiting


def test_a_job_replayed_or_purged_before_its_end_was_told_is_told_as_it_is_then() -> None:
    house = House()
    ann, bob, w1 = house.client("ann"), house.client("bob"), house.worker()
    ann.submit("again", "purged")
    house.settle()
    held = w1.assigned()
    bob.say(m.Attach(["again", "purged"]))
    house.settle()
    house.machine.receive(Congested(bob.conn), house.now)
    w1.failed(held["again"], j.EXIT_CODE)
    w1.failed(held["purged"], j.EXIT_CODE)
    house.settle()
    ann.ask("purge", ids=["purged"])
    ann.ask("replay", ids=["again"])
    house.machine.receive(Relieved(bob.conn), house.now)
    house.settle()
    bob.heard.clear()

    w1.done(w1.assigned()["again"])
    house.settle()

    assert bob.results() == {"again": b"out"}


def test_a_slow_reader_cut_off_by_the_network_costs_nobody_else_anything() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1")
    house.settle()
    house.machine.receive(Congested(ann.conn), house.now)
    w1.done((1, 0))
    house.settle()

    house.machine.receive(Disconnected(ann.conn, "slow reader"), house.now)
    house.machine.receive(Relieved(ann.conn), house.now)
    house.settle()

    assert not house.machine.herald.waiting
    ann = house.client()
    ann.say(m.Attach(["j1"]))
    house.settle()
    assert ann.results() == {"j1": b"out"}


def test_a_subscriber_that_is_leaving_gets_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELAY_MESSAGES_PER_TURN", 2)
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    ann.say(m.Subscribe(1, "a"))
    bob.say(*(m.Publish("a", b"%d" % n) for n in range(6)))
    ann.say(m.Bye())

    house.settle()

    assert ann.heard == []


def test_a_result_forgotten_before_a_slow_client_could_read_it_is_told_as_gone() -> None:
    house = House(results_max=1, ids_max=1)
    ann, bob, w1 = house.client("ann"), house.client("bob"), house.worker()
    ann.submit("j1")
    house.settle()
    ann.heard.clear()
    house.machine.receive(Congested(ann.conn), house.now)
    w1.done(w1.assigned()["j1"])
    house.settle()
    for n in range(5):
        house.now += 1
        bob.submit(f"b{n}")
        house.settle()
        w1.done(w1.assigned()[f"b{n}"])
        house.settle()
    assert house.state("j1") == "unknown"

    house.machine.receive(Relieved(ann.conn), house.now)
    house.settle()

    (ended,) = ann.take(m.Results).ended
    assert (ended.id, ended.state, ended.reason) == ("j1", "done", "result_gone")
