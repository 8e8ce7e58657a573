"""How a worker finds its broker, and when it stops looking."""

from __future__ import annotations

from tests.unit.worker.conversation import KEY, NS, Conversation, joined

from ekiden import errors, limits
from ekiden.machine import Close, Connected, Dial, DialFailed, Disconnected, Garbled, Received
from ekiden.wire.frames import FrameReader
from ekiden.wire.messages import Beat, NotLeader
from ekiden.wire.session import refusal_frame
from ekiden.worker.machine import Drain, Exit


def refuse(talk: Conversation, error: errors.EkidenError, address: str) -> list[object]:
    """Let the next dial come through to a broker that answers the hello with `error`."""
    talk.greet(address)
    return talk.turn(Received(talk.conn, FrameReader().feed(refusal_frame(error))))


def test_addresses_are_tried_in_turn_and_then_again_after_a_pause() -> None:
    talk = Conversation(addresses=["a:1", "b:1"])

    assert talk.turn() == [Dial("a:1")]
    assert talk.turn(DialFailed("a:1", "refused")) == [Dial("b:1")]
    assert talk.turn(DialFailed("b:1", "refused")) == []
    assert talk.quiet(limits.RECONNECT_FIRST_NS) == [Dial("a:1")]


def test_pauses_grow_up_to_a_bound() -> None:
    talk = Conversation()
    talk.turn()
    pauses = []
    for _ in range(12):
        talk.turn(DialFailed("a:7000", "refused"))
        deadline = talk.machine.next_deadline()
        assert deadline is not None
        pauses.append(deadline - talk.now)
        talk.now = deadline
        assert talk.turn() == [Dial("a:7000")]

    assert pauses[0] == limits.RECONNECT_FIRST_NS * 3 // 4
    assert pauses[1] == limits.RECONNECT_FIRST_NS * 3 // 2
    assert pauses[-1] == limits.RECONNECT_MAX_NS * 3 // 4


def test_a_dial_without_an_answer_is_given_up_and_its_late_connection_closed() -> None:
    talk = Conversation(addresses=["a:1", "b:1"])
    talk.turn()

    assert talk.turn(after_ns=limits.HELLO_TIMEOUT_NS) == [Dial("b:1")]
    assert talk.turn(Connected(9, "peer", b"n" * 16, "a:1")) == [Close(9, "no longer wanted")]


def test_a_broker_that_does_not_welcome_in_time_is_left() -> None:
    talk = Conversation(addresses=["a:1", "b:1"])
    talk.turn()
    talk.greet("a:1")

    assert talk.turn(after_ns=limits.HELLO_TIMEOUT_NS) == [
        Close(talk.conn, "no welcome in time"),
        Dial("b:1"),
    ]


def test_a_hint_to_a_configured_address_is_followed() -> None:
    talk = Conversation(addresses=["a:1", "b:1", "c:1"])
    talk.turn()

    effects = refuse(talk, errors.NotLeader("not me", leader="c:1"), "a:1")

    assert effects == [Close(talk.conn, "not the leader"), Dial("c:1")]


def test_a_hint_to_a_stranger_is_not_followed() -> None:
    talk = Conversation(addresses=["a:1", "b:1"])
    talk.turn()

    effects = refuse(talk, errors.NotLeader("not me", leader="evil:1"), "a:1")

    assert effects == [Close(talk.conn, "not the leader"), Dial("b:1")]


def test_hints_that_go_round_in_circles_are_followed_three_times() -> None:
    talk = Conversation(addresses=["a:1", "b:1"])
    talk.turn()
    address, dials = "a:1", 0
    for _ in range(4):
        other = "b:1" if address == "a:1" else "a:1"
        effects = refuse(talk, errors.NotLeader("not me", leader=other), address)
        dials += Dial(other) in effects
        address = other

    # The fourth is an ordinary failure: on to the next in the list.
    assert dials == 4
    assert refuse(talk, errors.NotLeader("not me", leader="b:1"), "a:1") == [
        Close(talk.conn, "not the leader"),
    ]


def test_a_leader_that_steps_down_is_left_for_the_one_it_names() -> None:
    talk = Conversation(addresses=["a:1", "b:1"])
    talk.connect(address="a:1")

    effects = talk.hear(NotLeader("b:1"))

    assert effects == [Close(talk.conn, "not the leader"), Dial("b:1")]


def test_a_wrong_key_everywhere_ends_the_worker() -> None:
    talk = Conversation(addresses=["a:1", "b:1"])
    wrong = errors.Unauthenticated("wrong key")
    talk.turn()
    refuse(talk, wrong, "a:1")

    effects = refuse(talk, wrong, "b:1")

    assert effects[0] == Close(talk.conn, "unauthenticated")
    assert isinstance(effects[1], Exit)
    assert isinstance(effects[1].error, errors.Unauthenticated)
    assert talk.machine.next_deadline() is None


def test_a_wrong_key_at_one_address_does_not_end_the_worker() -> None:
    talk = Conversation(addresses=["a:1", "b:1"])
    talk.turn()
    refuse(talk, errors.Unauthenticated("wrong key"), "a:1")

    assert talk.turn(DialFailed("b:1", "refused")) == []
    assert talk.quiet(NS) == [Dial("a:1")]


def test_a_worker_that_was_welcome_once_does_not_give_up() -> None:
    talk = joined()
    talk.hear(Beat())
    talk.turn(Disconnected(talk.conn))
    talk.quiet(NS)

    effects = refuse(talk, errors.Unauthenticated("wrong key"), "a:7000")

    assert effects == [Close(talk.conn, "unauthenticated")]
    assert Dial("a:7000") in talk.quiet(NS)


def test_a_missing_key_ends_the_worker_and_says_what_to_do() -> None:
    def no_key(_: str) -> bytes:
        raise errors.Unauthenticated("no key is known", remedy="copy it")

    talk = Conversation(key_for=no_key)
    talk.turn()

    effects = talk.turn(Connected(1, "peer", b"n" * 16, "a:7000"))

    assert effects[0] == Close(1, "unauthenticated")
    assert str(effects[1].error) == "no key is known; copy it"


def test_an_impostor_that_does_not_know_the_key_is_not_joined() -> None:
    talk = Conversation(key_for=lambda _: KEY[::-1])
    talk.turn()
    hello, greeter = talk.greet()
    effects = talk.turn(Received(talk.conn, FrameReader().feed(greeter.receive(hello))))
    assert len(effects) == 1  # the proof

    assert talk.machine.connected is False


def test_something_that_is_no_broker_is_tried_again_later() -> None:
    talk = Conversation()
    talk.turn()
    talk.greet()

    assert talk.turn(Garbled(talk.conn, "the peer speaks HTTP")) == [
        Close(talk.conn, "the peer speaks HTTP")
    ]
    assert talk.quiet(NS) == [Dial("a:7000")]


def test_a_worker_told_to_leave_while_it_greets_hangs_up() -> None:
    talk = Conversation()
    talk.turn()
    talk.greet()

    assert talk.turn(Drain("stopped")) == [Close(talk.conn, "stopped"), Exit("stopped")]
