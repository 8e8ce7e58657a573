"""A client's machine and the other end of its wire, turn by turn, without a network."""

from __future__ import annotations

from typing import Any

from ekiden import errors, limits
from ekiden.client.contract import Order, Submitting, Terms
from ekiden.client.machine import ClientMachine
from ekiden.machine import (
    Close,
    Connected,
    Dial,
    DialFailed,
    Disconnected,
    Frame,
    Log,
    Received,
    Send,
)
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader
from ekiden.wire.session import Greeter, refusal_frame

NS = limits.NS
KEY = b"k" * 32
TERMS = Terms(b"\x91\xa4echo")
_WORLD = (Send, Close, Dial, Log)


def order(job_id: str, body: bytes = b"body", terms: Terms = TERMS) -> Order:
    return Order(job_id, body, terms)


def run_of(*ids: str, **fields: Any) -> messages.ResultRun:
    return messages.ResultRun(
        list(ids), [b"out " + i.encode() for i in ids], "w1", 1, 2, 3, **fields
    )


class Rig:
    """Feeds events, keeps what the machine says to the world apart from what it tells above."""

    def __init__(self, *addresses: str, jitter: float = 1.0, **options: Any) -> None:
        self.keys = dict.fromkeys(addresses or ("a:1",), KEY)
        self.machine = ClientMachine(
            list(addresses or ("a:1",)), "me", "s1", self._key_for, lambda: jitter, **options
        )
        self.now = 1000 * NS
        self.conn = 0
        self.news: list[Any] = []
        self.sent: list[tuple[int, messages.Message]] = []
        self.dialled: list[str] = []
        self.closed: list[int] = []
        self._conns = 0
        self._readers: dict[int, FrameReader] = {}
        self.turn()

    def _key_for(self, address: str) -> bytes:
        key = self.keys[address]
        if not key:
            raise errors.Unauthenticated(f"no key is known for {address}")
        return key

    # -------------------------------------------------------------- turns

    def turn(self) -> list[Any]:
        """One turn: returns the news for the layer above; the rest is kept in lists."""
        effects = self.machine.advance(self.now)
        for effect in effects:
            match effect:
                case Send():
                    for frame in self._readers[effect.conn].feed(effect.data):
                        self.sent.append((frame.msg_id, messages.decode(frame.type, frame.body)))
                case Close():
                    self.closed.append(effect.conn)
                case Dial():
                    self.dialled.append(effect.address)
        news = [effect for effect in effects if not isinstance(effect, _WORLD)]
        self.news += news
        return news

    def feed(self, event: Any) -> list[Any]:
        self.machine.receive(event, self.now)
        return self.turn()

    def wait(self, seconds: float) -> list[Any]:
        self.now += round(seconds * NS)
        return self.turn()

    def wait_deadline(self) -> list[Any]:
        deadline = self.machine.next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.turn()

    def take_sent(self, kind: type | None = None) -> list[Any]:
        """What the client said since the last look, without numbers."""
        said = [message for _, message in self.sent if kind is None or isinstance(message, kind)]
        self.sent.clear()
        return said

    # -------------------------------------------------------------- the broker's side

    def submit(self, *orders: Order) -> list[Any]:
        return self.feed(Submitting(list(orders)))

    def tell(self, message: messages.Message, corr_id: int = 0) -> list[Any]:
        body = messages.encode_body(message)
        frame = Frame(messages.TYPE_OF[type(message)], 0, corr_id, body)
        return self.feed(Received(self.conn, [frame]))

    def accept_all(self) -> list[Any]:
        """Commit every Submit seen since the last look."""
        numbers = [number for number, said in self.sent if isinstance(said, messages.Submit)]
        self.sent.clear()
        return self.tell(messages.Accepted(numbers))

    def open_connection(self) -> int:
        """The dial of the last turn comes through."""
        self._conns += 1
        self.conn = self._conns
        self._readers[self.conn] = FrameReader()
        self.feed(Connected(self.conn, "peer", b"n" * 16, self.dialled[-1]))
        return self.conn

    def greet(self, leader_hint: str | None = None) -> list[Any]:
        """Carry the handshake through on the open connection; returns the news of it."""
        greeter = Greeter(
            KEY,
            b"m" * 16,
            group="g",
            broker="b",
            epoch=1,
            heartbeat_ns=2 * NS,
            silence_ns=15 * NS,
            leader_hint=leader_hint,
        )
        news: list[Any] = []
        while greeter.identity is None and self.sent:
            _, hello = self.sent.pop(0)
            frame = Frame(messages.TYPE_OF[type(hello)], 0, 0, messages.encode_body(hello))
            try:
                answer = greeter.receive(frame)
            except errors.Refusal as refusal:
                answer = refusal_frame(refusal)
            news += self.feed(Received(self.conn, FrameReader().feed(answer)))
        return news

    def connect(self) -> list[Any]:
        """From dialling to welcome."""
        self.sent.clear()
        self.open_connection()
        return self.greet()

    def refuse_dial(self) -> None:
        self.feed(DialFailed(self.dialled[-1], "connection refused"))

    def cut(self) -> list[Any]:
        """The connection breaks."""
        return self.feed(Disconnected(self.conn, "reset"))

    def reconnect(self) -> list[Any]:
        """Break, wait, connect again."""
        self.cut()
        self.wait_deadline()
        return self.connect()
