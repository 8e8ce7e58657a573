"""The first words of a conversation: who speaks, and do both know the key?

    peer                         broker
    HelloClient | HelloWorker ─▶
                              ◀─ Challenge
    Proof                     ─▶
                              ◀─ Welcome, or NotLeader and close

Either side may answer with a Refusal instead and close. A `Greeter` plays the broker's part, a
`Caller` the other; both only turn frames into frames, so the machines that own the connections and
the simulator use them alike. Who leads is told only to a peer that has proved itself.
"""

from __future__ import annotations

from ekiden import limits
from ekiden.errors import (
    BadFrame,
    EkidenError,
    NotLeader,
    Refusal,
    Unauthenticated,
    VersionMismatch,
    error_of,
)
from ekiden.machine import Frame
from ekiden.model.ids import check_party
from ekiden.security.identity import (
    BROKER_LABEL,
    NONCE_BYTES_MAX,
    NONCE_BYTES_MIN,
    PEER_LABEL,
    Identity,
    proof,
    proves,
)
from ekiden.wire import messages
from ekiden.wire.frames import encode_frame
from ekiden.wire.messages import (
    ROLE_CLIENT,
    ROLE_WORKER,
    Challenge,
    HelloClient,
    HelloWorker,
    Proof,
    Welcome,
)


def refusal_frame(error: EkidenError, corr_id: int = 0) -> bytes:
    """`error` as the peer shall hear it: a NotLeader or a Refusal, answering `corr_id`."""
    if isinstance(error, NotLeader):
        return encode_frame(messages.NotLeader(error.leader), 0, corr_id)
    later = error.retry_after_s if isinstance(error, Refusal) else 0.0
    told = messages.Refusal(
        error.code, error.message[: limits.ERROR_TEXT_MAX], error.remedy, round(later * 1000)
    )
    return encode_frame(told, 0, corr_id)


def error_from(message: messages.Refusal) -> EkidenError:
    """The exception that a peer's refusal stands for."""
    return error_of(message.code, message.text, message.remedy, message.retry_after_ms / 1000)


class Greeter:
    """The broker's part. `identity` is None until the peer has proved it.

    `leader_hint` is None if this broker leads; else it is the leader's address, or empty if nobody
    knows. `nonce` must be fresh for every connection. `receive` raises the refusal that the caller
    sends (see `refusal_frame`) before it closes.
    """

    __slots__ = ("_claim", "_key", "_leader_hint", "_nonce", "_peer_nonce", "_welcome", "identity")

    def __init__(
        self,
        key: bytes,
        nonce: bytes,
        *,
        group: str,
        broker: str,
        epoch: int,
        heartbeat_ns: int,
        silence_ns: int,
        leader_hint: str | None = None,
        software: str = "",
    ) -> None:
        assert len(nonce) >= NONCE_BYTES_MIN, "a short nonce may come again"
        self.identity: Identity | None = None
        self._key = key
        self._nonce = nonce
        self._leader_hint = leader_hint
        self._claim: Identity | None = None
        self._peer_nonce = b""
        self._welcome = Welcome(
            mac=b"",
            group=group,
            broker=broker,
            epoch=epoch,
            heartbeat_ns=heartbeat_ns,
            silence_ns=silence_ns,
            frame_bytes_max=limits.FRAME_BYTES_MAX,
            software=software,
        )

    def receive(self, frame: Frame) -> bytes:
        """The frame to answer with."""
        match messages.decode(frame.type, frame.body):
            case HelloClient() as hello if self._claim is None:
                return self._challenge(hello, Identity(ROLE_CLIENT, hello.client, hello.session))
            case HelloWorker() as hello if self._claim is None:
                return self._challenge(hello, Identity(ROLE_WORKER, hello.worker, hello.session))
            case Proof() as given if self._claim is not None and self.identity is None:
                return self._judge(given, self._claim)
            case message:
                raise _out_of_place(message, "a hello" if self._claim is None else "a proof")

    def _challenge(self, hello: HelloClient | HelloWorker, claim: Identity) -> bytes:
        _check_version(hello.protocol, "peer", "broker")
        check_party(claim.id, claim.role)
        check_party(claim.session, "session")
        _check_nonce(hello.nonce)
        self._claim = claim
        self._peer_nonce = hello.nonce
        return encode_frame(Challenge(limits.PROTOCOL_VERSION, self._nonce))

    def _judge(self, given: Proof, claim: Identity) -> bytes:
        if not proves(given.mac, self._proof(PEER_LABEL, claim)):
            raise Unauthenticated(
                f"{claim.role} {claim.id!r} does not know the key of this broker",
                remedy="give the broker's key with --key-file or EKIDEN_KEY_FILE; "
                "the broker keeps it in the file `key` of its data folder",
            )
        if self._leader_hint is not None:
            raise NotLeader("this broker does not lead its group", leader=self._leader_hint)
        self.identity = claim
        welcome = self._welcome
        return encode_frame(
            Welcome(
                self._proof(BROKER_LABEL, claim),
                welcome.group,
                welcome.broker,
                welcome.epoch,
                welcome.heartbeat_ns,
                welcome.silence_ns,
                welcome.frame_bytes_max,
                welcome.software,
            )
        )

    def _proof(self, label: bytes, claim: Identity) -> bytes:
        return proof(
            self._key, label, claim.role, claim.id, claim.session, self._peer_nonce, self._nonce
        )


class Caller:
    """The part of a client or worker. `welcome` is None until the broker has proved itself too."""

    __slots__ = ("_broker_nonce", "_hello", "_identity", "_key", "welcome")

    def __init__(self, key: bytes, hello: HelloClient | HelloWorker) -> None:
        assert NONCE_BYTES_MIN <= len(hello.nonce) <= NONCE_BYTES_MAX, "a nonce of 16 to 64 bytes"
        self.welcome: Welcome | None = None
        self._key = key
        self._hello = hello
        self._broker_nonce: bytes | None = None
        if isinstance(hello, HelloClient):
            self._identity = Identity(ROLE_CLIENT, hello.client, hello.session)
        else:
            self._identity = Identity(ROLE_WORKER, hello.worker, hello.session)

    def opening(self) -> bytes:
        """What to send first."""
        return encode_frame(self._hello)

    def receive(self, frame: Frame) -> bytes:
        """The frame to answer with; empty once the broker is known, and then `welcome` is set.

        Raises what the broker refused with, `NotLeader` with the leader it named, or our own
        judgement of it. The caller closes the connection.
        """
        match messages.decode(frame.type, frame.body):
            case Challenge() as challenge if self._broker_nonce is None:
                _check_version(challenge.protocol, "broker", "side")
                _check_nonce(challenge.nonce)
                self._broker_nonce = challenge.nonce
                return encode_frame(Proof(self._proof(PEER_LABEL, challenge.nonce)))
            case Welcome() as welcome if self._broker_nonce is not None and self.welcome is None:
                self._believe(welcome, self._broker_nonce)
                return b""
            case messages.NotLeader(leader):
                raise NotLeader("this broker does not lead its group", leader=leader)
            case messages.Refusal() as refusal:
                raise error_from(refusal)
            case message:
                raise _out_of_place(
                    message, "a challenge" if self._broker_nonce is None else "a welcome"
                )

    def _believe(self, welcome: Welcome, broker_nonce: bytes) -> None:
        if not proves(welcome.mac, self._proof(BROKER_LABEL, broker_nonce)):
            raise Unauthenticated(
                "the broker does not know the key that was given for it",
                remedy="check the address: something else may listen there",
            )
        self.welcome = welcome

    def _proof(self, label: bytes, broker_nonce: bytes) -> bytes:
        who = self._identity
        return proof(
            self._key, label, who.role, who.id, who.session, self._hello.nonce, broker_nonce
        )


def _check_version(theirs: int, who: str, us: str) -> None:
    if theirs != limits.PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the {who} speaks protocol {theirs}, this {us} speaks {limits.PROTOCOL_VERSION}",
            remedy="run releases of ekiden on both sides that share a protocol version",
        )


def _check_nonce(nonce: bytes) -> None:
    if not NONCE_BYTES_MIN <= len(nonce) <= NONCE_BYTES_MAX:
        raise BadFrame(
            f"a nonce of {len(nonce)} bytes",
            remedy=f"draw {NONCE_BYTES_MIN} to {NONCE_BYTES_MAX} random bytes per connection",
        )


def _out_of_place(message: messages.Message, expected: str) -> BadFrame:
    return BadFrame(
        f"{type(message).__name__} came where {expected} was expected",
        remedy="begin every connection with the hello of docs/PROTOCOL.md",
    )
