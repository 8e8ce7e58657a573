"""Where the client connects to, how often it tries, and when it gives a conversation up."""

from __future__ import annotations

import pytest
from tests.unit.client.rig import NS, Rig, order, run_of

from ekiden import errors
from ekiden.client.contract import JobsRefused, LinkDown, LinkUp, RefusedByAll
from ekiden.machine import Connected, Frame, Garbled, Received
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader


def test_it_dials_at_once_and_is_welcomed():
    rig = Rig("a:1")

    news = rig.connect()

    assert rig.dialled == ["a:1"]
    assert [type(each) for each in news] == [LinkUp]
    assert news[0].address == "a:1" and news[0].welcome.broker == "b"


def test_addresses_are_tried_in_turn_and_then_it_rests():
    rig = Rig("a:1", "b:1", "c:1")

    for _ in range(3):
        rig.refuse_dial()

    assert rig.dialled == ["a:1", "b:1", "c:1"]
    rig.wait(0.049)
    assert len(rig.dialled) == 3
    rig.wait(0.001)
    assert rig.dialled[3:] == ["a:1"]


def test_rests_double_up_to_five_seconds_and_vary_by_half():
    rests = {}
    for jitter in (0.0, 1.0):
        rig = Rig("a:1", jitter=jitter)
        rests[jitter] = []
        for _ in range(10):
            rig.refuse_dial()
            before = rig.now
            rig.wait_deadline()
            rests[jitter].append((rig.now - before) / NS)

    assert rests[1.0] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert rests[0.0] == [each / 2 for each in rests[1.0]]


def test_a_dial_without_an_answer_is_given_up_and_its_late_connection_closed():
    rig = Rig("a:1", "b:1")

    rig.wait(5)
    assert rig.dialled == ["a:1", "b:1"]
    rig.feed(Connected(77, "peer", b"n" * 16, "a:1"))

    assert rig.closed == [77]
    assert rig.sent == []


def test_a_peer_that_never_welcomes_is_left():
    rig = Rig("a:1", "b:1")
    conn = rig.open_connection()

    rig.wait(5)

    assert rig.closed == [conn]
    assert rig.dialled == ["a:1", "b:1"]


def test_a_silent_broker_is_dropped_and_dialled_again():
    rig = Rig("a:1")
    rig.connect()
    conn = rig.conn
    rig.tell(messages.Beat())

    rig.wait(14.9)
    assert rig.closed == []
    news = rig.wait(0.1)

    assert rig.closed == [conn]
    assert [type(each) for each in news] == [LinkDown]
    rig.wait_deadline()
    assert rig.dialled == ["a:1", "a:1"]


def test_any_frame_of_the_broker_breaks_the_silence():
    rig = Rig("a:1")
    rig.connect()

    for _ in range(5):
        rig.wait(10)
        rig.tell(messages.Beat())

    assert rig.closed == []


def test_a_client_with_nothing_to_say_sends_beats():
    rig = Rig("a:1")
    rig.connect()
    rig.take_sent()

    rig.wait(1.9)
    assert rig.take_sent() == []
    rig.wait(0.1)

    assert rig.take_sent() == [messages.Beat()]


def test_a_client_that_just_spoke_needs_no_beat():
    rig = Rig("a:1")
    rig.connect()
    rig.wait(1.5)
    rig.submit(order("j1"))
    rig.take_sent()

    rig.wait(1.5)

    assert rig.take_sent() == []


def test_a_hint_is_followed_at_once_to_a_configured_address():
    rig = Rig("a:1", "b:1", "c:1")

    rig.open_connection()
    rig.greet(leader_hint="c:1")

    assert rig.dialled == ["a:1", "c:1"]


def test_a_hint_to_a_stranger_is_not_followed():
    rig = Rig("a:1", "b:1")

    rig.open_connection()
    rig.greet(leader_hint="evil:666")

    assert rig.dialled == ["a:1", "b:1"]


def test_brokers_that_point_at_each_other_are_left_alone_for_a_while():
    rig = Rig("a:1", "b:1")
    hints = {"a:1": "b:1", "b:1": "a:1"}

    visits = 0
    while rig.dialled[-1] and visits < 20:
        before = len(rig.dialled)
        rig.open_connection()
        rig.greet(leader_hint=hints[rig.dialled[before - 1]])
        visits += 1
        if len(rig.dialled) == before:
            break

    assert visits <= 6
    deadline = rig.machine.next_deadline()
    assert deadline is not None and deadline > rig.now


def test_a_leader_that_steps_down_sends_the_client_on():
    rig = Rig("a:1", "b:1")
    rig.connect()
    rig.submit(order("j1"))

    rig.tell(messages.NotLeader("b:1"))

    assert rig.dialled == ["a:1", "b:1"]
    rig.connect()
    assert [submit.ids for submit in rig.take_sent(messages.Submit)] == [["j1"]]


@pytest.mark.parametrize("code", ["unauthenticated", "version"])
def test_a_refusal_by_every_address_ends_what_is_open(code):
    rig = Rig("a:1", "b:1")
    rig.submit(order("j1"))

    for _ in range(2):
        rig.open_connection()
        rig.tell(messages.Refusal(code, "no"))

    told = [each for each in rig.news if isinstance(each, RefusedByAll | JobsRefused)]
    assert [type(each) for each in told] == [RefusedByAll, JobsRefused]
    assert [(h.job_id, error.code) for h, error in told[1].pairs] == [("j1", code)]
    assert rig.machine.pending == rig.machine.open_jobs == 0


def test_a_wrong_key_at_one_address_of_two_is_not_the_end():
    rig = Rig("a:1", "b:1")
    rig.submit(order("j1"))

    for _ in range(5):
        rig.open_connection()
        rig.tell(messages.Refusal("unauthenticated", "no"))
        rig.refuse_dial()
        rig.wait_deadline()

    assert rig.news == []
    assert rig.machine.pending == 1


def test_other_refusals_are_tried_again():
    rig = Rig("a:1")
    rig.submit(order("j1"))

    for _ in range(5):
        rig.open_connection()
        rig.tell(messages.Refusal("refused", "this broker has 10,000 connections"))
        rig.wait_deadline()

    assert rig.news == []
    assert len(rig.dialled) == 6


def test_a_missing_key_is_told_like_a_refusal():
    rig = Rig("a:1")
    rig.keys["a:1"] = b""
    rig.submit(order("j1"))

    rig.open_connection()

    assert isinstance(rig.news[0], RefusedByAll)
    assert isinstance(rig.news[0].error, errors.Unauthenticated)


def test_a_key_that_appears_later_is_used():
    rig = Rig("a:1")
    rig.keys["a:1"] = b""
    rig.open_connection()
    rig.keys["a:1"] = b"k" * 32

    rig.wait_deadline()
    news = rig.connect()

    assert [type(each) for each in news] == [LinkUp]


def test_a_broker_with_another_key_is_not_believed():
    rig = Rig("a:1")
    rig.keys["a:1"] = b"x" * 32

    rig.open_connection()
    rig.greet()

    assert rig.closed == [rig.conn]
    assert isinstance(rig.machine.link.last_error, errors.Unauthenticated)


def test_a_peer_that_speaks_something_else_is_named():
    rig = Rig("a:1")
    rig.open_connection()

    rig.feed(Garbled(rig.conn, "the peer speaks HTTP"))

    assert rig.closed == [rig.conn]
    assert "does not speak ekiden" in str(rig.machine.link.last_error)


def test_a_frame_that_cannot_be_read_ends_the_conversation_and_nothing_else():
    rig = Rig("a:1")
    rig.connect()
    rig.submit(order("j1"))

    rig.feed(Received(rig.conn, [Frame(messages.TYPE_OF[messages.Accepted], 0, 0, b"\xc1")]))

    assert rig.closed == [rig.conn]
    assert rig.machine.pending == 1
    rig.wait_deadline()
    rig.connect()
    assert [submit.ids for submit in rig.take_sent(messages.Submit)] == [["j1"]]


def test_frames_of_an_old_connection_are_not_heard():
    rig = Rig("a:1")
    rig.connect()
    old = rig.conn
    rig.submit(order("j1"))
    rig.reconnect()

    body = messages.encode_body(messages.Results([run_of("j1")]))
    news = rig.feed(Received(old, [Frame(messages.TYPE_OF[messages.Results], 0, 0, body)]))

    assert news == []
    assert rig.machine.open_jobs == 1


def test_frames_that_come_with_the_welcome_are_read():
    rig = Rig("a:1")
    rig.connect()
    rig.submit(order("j1"))
    rig.cut()
    rig.wait_deadline()
    rig.sent.clear()
    rig.open_connection()

    # The broker pushes what it knows in the same write as the welcome.
    original = rig.feed

    def feed(event):
        if (
            isinstance(event, Received)
            and event.frames[-1].type == messages.TYPE_OF[messages.Welcome]
        ):
            body = messages.encode_body(messages.Results([run_of("j1")]))
            event.frames.append(Frame(messages.TYPE_OF[messages.Results], 0, 0, body))
        return original(event)

    rig.feed = feed
    rig.greet()

    assert rig.machine.open_jobs == 0
    assert FrameReader().held == 0
