"""The first words of a connection, and the last."""

from __future__ import annotations

import pytest
from tests.unit.broker.house import KEY, House, Said, logs, quiet

from ekiden import limits
from ekiden.broker.events import Shutdown
from ekiden.limits import NS
from ekiden.machine import Close, Frame, Garbled, Trust
from ekiden.wire import messages as m
from ekiden.wire.frames import FrameReader
from ekiden.wire.session import Caller

HELLO = m.HelloClient(1, "ann", "s1", b"n" * 16)


def prove(house: House, key: bytes, hello: m.HelloClient | m.HelloWorker = HELLO):
    """Say hello and answer the challenge with that key."""
    far = house.connect("ann")
    caller = Caller(key, hello)
    far.say(hello)
    (said,) = house.settle()
    (challenge,) = said.messages
    assert challenge == m.Challenge(1, house.conns.to_bytes(16, "big"))
    frame = Frame(m.TYPE_OF[m.Challenge], 0, 0, m.encode_body(challenge))
    (proof,) = FrameReader(4096).feed(caller.receive(frame))
    far.say_raw(proof.type, bytes(proof.body))
    return far, caller


def test_a_peer_that_knows_the_key_is_welcomed_and_the_broker_proves_itself_too() -> None:
    house = House(group="alpha")

    far, caller = prove(house, KEY)
    trust, said = house.settle()

    assert trust == Trust(far.conn)
    (welcome,) = said.messages
    assert (welcome.group, welcome.broker, welcome.epoch) == ("alpha", "b1", 1)
    assert (welcome.heartbeat_ns, welcome.silence_ns) == (2 * NS, 15 * NS)
    assert welcome.frame_bytes_max == limits.FRAME_BYTES_MAX
    caller.receive(Frame(m.TYPE_OF[m.Welcome], 0, 0, m.encode_body(welcome)))
    assert caller.welcome is not None


def test_a_wrong_key_is_refused_in_words_and_the_connection_closed() -> None:
    house = House()

    far, _ = prove(house, b"x" * 32)
    effects = house.settle()

    (said, close) = quiet(effects)
    (refusal,) = said.messages
    assert refusal.code == "unauthenticated"
    assert "--key-file" in refusal.remedy
    assert close == Close(far.conn)
    assert logs(effects) == ["peer.refused"]
    assert house.machine.peers == {}


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (m.HelloClient(2, "ann", "s", b"n" * 16), "version"),
        (m.HelloWorker(0, "w1", "s", b"n" * 16), "version"),
        (m.HelloClient(1, "", "s", b"n" * 16), "bad_id"),
        (m.HelloClient(1, "a b", "s", b"n" * 16), "bad_id"),
        (m.HelloClient(1, "ann", "x" * 129, b"n" * 16), "bad_id"),
        (m.HelloClient(1, "ann", "s", b"short"), "bad_frame"),
        (m.Proof(b"m" * 32), "bad_frame"),
        (m.Submit(m.Raw(b"\xc0"), ["j"], b"d" * 8, [b""]), "bad_frame"),
        (m.Ask("stats"), "bad_frame"),
    ],
)
def test_a_wrong_first_word_is_refused_with_its_reason_and_closed(first, code: str) -> None:
    house = House()
    far = house.connect("ann")

    number = far.say(first, m.Ask("stats"))
    said, close = quiet(house.settle())

    assert [message.code for message in said.messages] == [code]
    assert far.heard[0][0] == number - 1
    assert close == Close(far.conn)


@pytest.mark.parametrize(("number", "body"), [(10, b"\xc1"), (200, b"\xc0"), (1, b"\x91" * 2000)])
def test_bytes_that_are_no_message_close_the_connection_with_a_reason(
    number: int, body: bytes
) -> None:
    house = House()
    stranger, ann = house.connect("x"), house.client("ann")

    for far in (stranger, ann):
        far.say_raw(number, body)
        said, close = quiet(house.settle())
        assert [message.code for message in said.messages] == ["bad_frame"]
        assert close == Close(far.conn)


def test_garbage_on_one_connection_touches_no_other() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    bob.submit("j1")

    house.machine.receive(Garbled(ann.conn, "checksum"), house.now)
    house.machine.receive(Garbled(99, "nobody"), house.now)
    effects = quiet(house.settle())

    assert Close(ann.conn) in effects
    assert ann.take(m.Refusal).text == "checksum"
    assert bob.take(m.Accepted).messages == [bob.sent]


def test_a_stranger_that_says_nothing_is_shown_the_door() -> None:
    house = House()
    far = house.connect("x")
    house.settle()

    assert quiet(house.later(5, beats=False)) == []
    said, close = quiet(house.later(0.5, beats=False))

    assert "no hello in time" in said.messages[0].text
    assert close == Close(far.conn)


def test_what_a_message_is_not_for_a_broker_is_refused_and_closed() -> None:
    house = House()
    ann = house.client()

    ann.say(m.Welcome(b"", "", "", 1, 1, 1, 1))
    said, close = quiet(house.settle())

    assert said.messages[0].code == "bad_frame"
    assert close == Close(ann.conn)


def test_after_a_refused_request_the_conversation_goes_on() -> None:
    house = House()
    ann = house.client()

    first = ann.say(m.Ask("no such verb"))
    second = ann.say(m.Ask("stats"))
    house.settle()

    (one, refusal), (two, answer) = ann.heard
    assert (one, two) == (first, second)
    assert isinstance(refusal, m.Refusal)
    assert refusal.code == "bad_request"
    assert isinstance(answer, m.Answer)


def test_a_silent_peer_is_dropped_and_a_talking_one_is_answered_with_beats() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    for _ in range(9):
        house.later(2, beats=False)
        bob.say(m.Beat())

    assert not ann.open
    assert bob.open
    assert len(bob.all(m.Beat)) >= 7


def test_a_bye_closes_that_connection_only() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")

    ann.say(m.Bye("done"))

    assert quiet(house.settle()) == [Close(ann.conn)]
    assert bob.open
    ann.say(m.Ask("stats"))
    assert house.settle() == []


def test_a_shutdown_finishes_what_is_written_says_goodbye_and_halts_last() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1")
    house.machine.receive(Shutdown(), house.now)
    ann.submit("j2")

    effects = [repr(effect) for effect in quiet(house.settle())]

    assert effects[-1].startswith("Halt")
    assert sum(effect.startswith("Close") for effect in effects) == 2
    answers = ann.all(m.Accepted)
    assert [r.code for answer in answers for r in answer.refused] == ["draining"]
    assert {n for answer in answers for n in answer.messages} == {ann.sent - 1, ann.sent}
    assert w1.all(m.Bye) == [m.Bye("the broker is shutting down")]
    assert w1.assigned() == {}
    assert house.state("j1") == "queued"


def test_an_old_connection_that_ends_late_does_not_take_the_new_one_with_it() -> None:
    house = House()
    old = house.client("ann", "s1")
    new = house.client("ann", "s1")
    w1 = house.worker()
    new.submit("j1")
    house.settle()
    old.leave()
    w1.done(w1.assigned()["j1"])
    house.settle()

    assert new.results() == {"j1": b"out"}


def test_nothing_is_sent_to_a_connection_that_is_gone() -> None:
    house = House()
    ann = house.client()
    ann.submit("j1")
    house.turn()
    ann.leave()
    house.machine.receive(Garbled(ann.conn, "late"), house.now)
    house.persist()

    assert [e for e in house.settle() if isinstance(e, Said)] == []
    assert house.state("j1") == "queued"
