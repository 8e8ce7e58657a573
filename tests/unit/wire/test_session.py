"""The handshake: good, wrong key, replayed, out of order, wrong version, not the leader."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden import limits
from ekiden.errors import (
    BadFrame,
    BadId,
    NotLeader,
    QueueFull,
    Refusal,
    StorageFault,
    Unauthenticated,
    VersionMismatch,
)
from ekiden.machine import Frame
from ekiden.security.identity import BROKER_LABEL, PEER_LABEL, Identity, proof, proves
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader, encode_frame
from ekiden.wire.messages import Challenge, HelloClient, HelloWorker, Proof, Welcome
from ekiden.wire.session import Caller, Greeter, error_from, refusal_frame

KEY = bytes(range(32))
OTHER_KEY = bytes(32)
PEER_NONCE = b"p" * 16
BROKER_NONCE = b"b" * 16


def frame(data: bytes) -> Frame:
    (only,) = FrameReader(limits.FRAME_BYTES_MAX_BEFORE_HELLO).feed(data)
    return only


def greeter(key: Any = KEY, nonce: Any = BROKER_NONCE, **changes: Any) -> Greeter:
    given = {"group": "alpha", "broker": "b1", "epoch": 3, "heartbeat_ns": 2, "silence_ns": 15}
    return Greeter(key, nonce, **{**given, **changes})


def client(
    key: Any = KEY, protocol: Any = 1, name: Any = "ann@desk", nonce: Any = PEER_NONCE
) -> Caller:
    return Caller(key, HelloClient(protocol, name, "s1", nonce))


def converse(caller: Caller, broker: Greeter) -> None:
    challenge = broker.receive(frame(caller.opening()))
    welcome = broker.receive(frame(caller.receive(frame(challenge))))
    assert caller.receive(frame(welcome)) == b""


def test_both_sides_know_each_other_after_the_hello() -> None:
    caller, broker = client(), greeter(software="ekiden/1")

    converse(caller, broker)

    assert broker.identity == Identity("client", "ann@desk", "s1")
    welcome = caller.welcome
    assert welcome is not None
    assert (welcome.group, welcome.broker, welcome.epoch) == ("alpha", "b1", 3)
    assert (welcome.heartbeat_ns, welcome.silence_ns) == (2, 15)
    assert welcome.frame_bytes_max == limits.FRAME_BYTES_MAX
    assert welcome.software == "ekiden/1"


def test_a_worker_is_known_as_a_worker() -> None:
    broker = greeter()
    converse(Caller(KEY, HelloWorker(1, "w1", "s9", PEER_NONCE)), broker)
    assert broker.identity == Identity("worker", "w1", "s9")


def test_nobody_is_known_before_the_proof() -> None:
    caller, broker = client(), greeter()
    broker.receive(frame(caller.opening()))
    assert broker.identity is None
    assert caller.welcome is None


def test_a_wrong_key_is_refused_with_a_remedy() -> None:
    caller, broker = client(key=OTHER_KEY), greeter()
    answer = caller.receive(frame(broker.receive(frame(caller.opening()))))

    with pytest.raises(Unauthenticated, match=r"ann@desk.*does not know the key.*--key-file"):
        broker.receive(frame(answer))

    assert broker.identity is None


def test_a_broker_that_does_not_know_the_key_is_not_believed() -> None:
    caller = client()
    caller.receive(frame(encode_frame(Challenge(1, BROKER_NONCE))))
    for mac in (
        b"",
        bytes(32),
        proof(KEY, PEER_LABEL, "client", "ann@desk", "s1", PEER_NONCE, BROKER_NONCE),
    ):
        with pytest.raises(Unauthenticated, match="the broker does not know the key"):
            caller.receive(frame(encode_frame(Welcome(mac, "alpha", "b1", 1, 2, 15, 1 << 20))))
    assert caller.welcome is None


def test_a_proof_heard_earlier_does_not_open_another_connection() -> None:
    caller, first = client(), greeter()
    heard = caller.receive(frame(first.receive(frame(caller.opening()))))
    second = greeter(nonce=b"c" * 16)
    second.receive(frame(caller.opening()))

    with pytest.raises(Unauthenticated):
        second.receive(frame(heard))


def test_the_proof_of_a_client_does_not_serve_a_worker_of_the_same_name() -> None:
    caller, broker = client(name="x"), greeter()
    heard = caller.receive(frame(encode_frame(Challenge(1, BROKER_NONCE))))
    broker.receive(frame(encode_frame(HelloWorker(1, "x", "s1", PEER_NONCE))))

    with pytest.raises(Unauthenticated):
        broker.receive(frame(heard))


def test_a_peer_cannot_answer_with_the_brokers_own_kind_of_proof() -> None:
    broker = greeter()
    broker.receive(frame(client().opening()))
    mac = proof(KEY, BROKER_LABEL, "client", "ann@desk", "s1", PEER_NONCE, BROKER_NONCE)
    with pytest.raises(Unauthenticated):
        broker.receive(frame(encode_frame(Proof(mac))))


@pytest.mark.parametrize("cut", [0, 1, 16, 31])
def test_a_truncated_proof_is_refused(cut: Any) -> None:
    caller, broker = client(), greeter()
    broker.receive(frame(caller.opening()))
    mac = proof(KEY, PEER_LABEL, "client", "ann@desk", "s1", PEER_NONCE, BROKER_NONCE)
    with pytest.raises(Unauthenticated):
        broker.receive(frame(encode_frame(Proof(mac[:cut]))))


@pytest.mark.parametrize("protocol", [0, 2, 99])
def test_another_protocol_version_is_refused_by_either_side(protocol: Any) -> None:
    with pytest.raises(
        VersionMismatch, match=f"peer speaks protocol {protocol}, this broker speaks 1"
    ):
        greeter().receive(frame(client(protocol=protocol).opening()))
    with pytest.raises(VersionMismatch, match=f"broker speaks protocol {protocol}"):
        client().receive(frame(encode_frame(Challenge(protocol, BROKER_NONCE))))


@pytest.mark.parametrize("hint", ["10.0.0.2:7000", ""])
def test_a_follower_names_the_leader_to_those_it_knows(hint: Any) -> None:
    caller, broker = client(), greeter(leader_hint=hint)
    answer = caller.receive(frame(broker.receive(frame(caller.opening()))))
    with pytest.raises(NotLeader) as refused:
        broker.receive(frame(answer))
    assert broker.identity is None

    with pytest.raises(NotLeader) as heard:
        caller.receive(frame(refusal_frame(refused.value)))
    assert heard.value.leader == hint


def test_a_follower_tells_a_stranger_nothing() -> None:
    caller, broker = client(key=OTHER_KEY), greeter(leader_hint="10.0.0.2:7000")
    answer = caller.receive(frame(broker.receive(frame(caller.opening()))))
    with pytest.raises(Unauthenticated):
        broker.receive(frame(answer))


def test_a_refusal_of_the_broker_is_raised_at_the_caller() -> None:
    told = Unauthenticated("no", remedy="yes")
    with pytest.raises(Unauthenticated, match="no; yes"):
        client().receive(frame(refusal_frame(told)))


@pytest.mark.parametrize(
    "message", [messages.Attach(["j1"]), Proof(bytes(32)), Challenge(1, bytes(16))]
)
def test_nothing_but_a_hello_may_come_first(message: Any) -> None:
    with pytest.raises(BadFrame, match="where a hello was expected"):
        greeter().receive(frame(encode_frame(message)))


def test_a_second_hello_is_refused() -> None:
    broker = greeter()
    broker.receive(frame(client().opening()))
    with pytest.raises(BadFrame, match="where a proof was expected"):
        broker.receive(frame(client().opening()))


def test_a_second_challenge_is_not_answered() -> None:
    # A broker that may ask twice could have any nonce of its choice signed.
    caller = client()
    caller.receive(frame(encode_frame(Challenge(1, BROKER_NONCE))))
    with pytest.raises(BadFrame, match="where a welcome was expected"):
        caller.receive(frame(encode_frame(Challenge(1, b"x" * 16))))


def test_a_welcome_before_the_challenge_is_refused() -> None:
    with pytest.raises(BadFrame, match="where a challenge was expected"):
        client().receive(frame(encode_frame(Welcome(bytes(32), "a", "b", 1, 2, 15, 9))))


@pytest.mark.parametrize("nonce", [b"", b"x" * 15, b"x" * 65])
def test_a_nonce_of_a_wrong_size_is_refused(nonce: Any) -> None:
    with pytest.raises(BadFrame, match="a nonce of"):
        greeter().receive(frame(encode_frame(HelloClient(1, "ann", "s1", nonce))))
    with pytest.raises(BadFrame, match="a nonce of"):
        client().receive(frame(encode_frame(Challenge(1, nonce))))


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\nb", "../x", "ann\x00"])
def test_a_name_outside_the_grammar_is_refused(name: Any) -> None:
    with pytest.raises(BadId):
        greeter().receive(frame(encode_frame(HelloClient(1, name, "s1", PEER_NONCE))))
    with pytest.raises(BadId):
        greeter().receive(frame(encode_frame(HelloClient(1, "ann", name, PEER_NONCE))))


def test_the_longest_hello_fits_the_limit_for_strangers() -> None:
    longest = HelloClient(1, "x" * 128, "y" * 128, b"n" * 64, "software " * 30)
    assert frame(encode_frame(longest)).type == 1


@pytest.mark.parametrize(
    "error",
    [
        QueueFull("full", remedy="wait", retry_after_s=1.5),
        BadId("bad"),
        StorageFault("disk"),
        Refusal("no"),
    ],
)
def test_errors_keep_type_text_remedy_and_pause_over_the_wire(error: Any) -> None:
    sent = frame(refusal_frame(error, corr_id=9))
    message = messages.decode(sent.type, sent.body)
    assert isinstance(message, messages.Refusal)
    heard = error_from(message)

    assert sent.corr_id == 9
    assert type(heard) is type(error)
    assert (heard.message, heard.remedy) == (error.message, error.remedy)
    assert getattr(heard, "retry_after_s", 0) == getattr(error, "retry_after_s", 0)


def test_a_code_of_a_newer_peer_is_still_a_refusal() -> None:
    assert type(error_from(messages.Refusal("of_tomorrow", "no"))) is Refusal


@given(
    *[st.text(max_size=5) for _ in range(3)], *[st.binary(max_size=5) for _ in range(2)], st.data()
)
def test_two_different_claims_never_have_the_same_proof(
    role: Any, name: Any, session: Any, peer: Any, broker: Any, data: Any
) -> None:
    one = (role, name, session, peer, broker)
    other = data.draw(
        st.one_of(
            st.just((role + name, "", session, peer, broker)),
            st.just((role, name + session, "", peer, broker)),
            st.just((role, name, session, peer + broker, b"")),
            st.just((role, name, session, broker, peer)),
        )
    )
    same = proves(proof(KEY, PEER_LABEL, *one), proof(KEY, PEER_LABEL, *other))
    assert same == (one == other)
    assert not proves(proof(KEY, PEER_LABEL, *one), proof(KEY, BROKER_LABEL, *one))
    assert not proves(proof(KEY, PEER_LABEL, *one), proof(OTHER_KEY, PEER_LABEL, *one))
