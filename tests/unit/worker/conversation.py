"""The other side of a worker machine, for tests: greets it for real and reads what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ekiden.limits import NS
from ekiden.machine import Connected, Dial, Frame, Log, Received, Send
from ekiden.model.jobs import Route, Spec
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader, encode_frame
from ekiden.wire.messages import AssignRun, Message
from ekiden.wire.session import Greeter
from ekiden.worker.machine import WorkerMachine

KEY = b"k" * 32
MS = NS // 1000
ADDRESS = "a:7000"


def spec_bytes(spec: Spec) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(spec))


def an_assign(
    grant: int,
    count: int = 1,
    *,
    first: int = 0,
    attempts: list[int] | None = None,
    timeout_ns: int = 0,
) -> AssignRun:
    spec = Spec("echo", Route("job.assign.echo"), timeout_ns=timeout_ns)
    names = [f"g{grant}o{offset}" for offset in range(first, first + count)]
    bodies = [name.encode() for name in names]
    return AssignRun(grant, first, spec_bytes(spec), "ci", names, bodies, attempts or [])


class Said(msgspec.Struct, frozen=True):
    """What one Send carried, as (msg_id, message)."""

    conn: int
    frames: list[tuple[int, Message]]


class Conversation:
    """A worker machine, a clock, and a broker's end of its connections."""

    def __init__(
        self,
        *,
        slots: int = 2,
        addresses: list[str] | None = None,
        key_for: Callable[[str], bytes] = lambda _: KEY,
        prefetch: int | None = None,
    ) -> None:
        self.now = 1000 * NS
        self.conn = 0
        self.machine = WorkerMachine(
            addresses or [ADDRESS],
            "w1",
            "s1",
            key_for,
            lambda: 0.5,
            patterns=["job.assign.>"],
            slots=slots,
            labels={"zone": "b"},
            cpu_milli=2000,
            mem_mb=4000,
            host="h1",
            prefetch=prefetch,
        )

    # ---------------------------------------------------------- steps

    def turn(self, *events: Any, after_ns: int = 0) -> list[Any]:
        """All effects of one turn, with what is sent decoded and log lines left out."""
        return [effect for effect in self.turn_with_logs(*events, after_ns=after_ns)
                if not isinstance(effect, Log)]  # fmt: skip

    def turn_with_logs(self, *events: Any, after_ns: int = 0) -> list[Any]:
        self.now += after_ns
        for event in events:
            self.machine.receive(event, self.now)
        return [_read(effect) for effect in self.machine.advance(self.now)]

    def hear(self, *told: Message, msg_id: int = 0) -> list[Any]:
        """One turn in which the broker says these."""
        return self.turn(self.frames(*told, msg_id=msg_id))

    def frames(self, *told: Message, msg_id: int = 0) -> Received:
        data = b"".join(encode_frame(message, msg_id) for message in told)
        return Received(self.conn, FrameReader().feed(data))

    def said(self, *frames: Message | tuple[int, Message]) -> Said:
        """What the machine is expected to send: messages, with their number if they have one."""
        return Said(self.conn, [f if isinstance(f, tuple) else (0, f) for f in frames])

    def quiet(self, upto_ns: int) -> list[Any]:
        """Let time pass deadline by deadline, with a beat of the broker when one is due."""
        effects: list[Any] = []
        end = self.now + upto_ns
        while (deadline := self.machine.next_deadline()) is not None and deadline <= end:
            self.now = max(deadline, self.now)
            effects += self.turn()
        self.now = end
        return effects

    # ---------------------------------------------------------- a whole handshake

    def connect(self, *, address: str = ADDRESS, expect_dial: bool = True) -> list[Any]:
        """Dial, greet and welcome the worker; the effects of the turn after the welcome."""
        if expect_dial:
            assert self.turn(after_ns=0) == [Dial(address)]
        hello, greeter = self.greet(address)
        challenge = greeter.receive(hello)
        proof = self._answer(challenge)
        return self._hear_bytes(greeter.receive(proof))

    def greet(self, address: str = ADDRESS) -> tuple[Frame, Greeter]:
        """Let the connection open; the worker's hello and someone to answer it."""
        self.conn += 1
        self.machine.receive(Connected(self.conn, "peer", b"n" * 16, address), self.now)
        effects = self.machine.advance(self.now)
        greeter = Greeter(
            KEY,
            b"m" * 16,
            group="g",
            broker="b1",
            epoch=1,
            heartbeat_ns=2 * NS,
            silence_ns=15 * NS,
        )
        return _only_frame(effects), greeter

    def _answer(self, data: bytes) -> Frame:
        event = Received(self.conn, FrameReader().feed(data))
        self.machine.receive(event, self.now)
        return _only_frame(self.machine.advance(self.now))

    def _hear_bytes(self, data: bytes) -> list[Any]:
        return self.turn(Received(self.conn, FrameReader().feed(data)))


def joined(**options: Any) -> Conversation:
    """A conversation after the handshake, with nothing held."""
    talk = Conversation(**options)
    talk.connect()
    return talk


def _only_frame(effects: list[Any]) -> Frame:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    assert len(sends) == 1, effects
    frames = FrameReader().feed(sends[0].data)
    assert len(frames) == 1
    return frames[0]


def _read(effect: Any) -> Any:
    if not isinstance(effect, Send):
        return effect
    frames = FrameReader().feed(effect.data)
    return Said(
        effect.conn, [(frame.msg_id, messages.decode(frame.type, frame.body)) for frame in frames]
    )
