"""A peer that says whatever a test wants it to say, over a real socket."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from ekiden import limits
from ekiden.errors import EkidenError
from ekiden.machine import Frame
from ekiden.model.jobs import Route, Spec
from ekiden.wire import messages as m
from ekiden.wire.frames import FrameReader, encode_frame, frame_of
from ekiden.wire.session import Caller, error_from

WAIT_S = 20.0


class RawPeer:
    """One connection. `hello` makes it a client or a worker."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), WAIT_S)
        self._reader = FrameReader(limits.FRAME_BYTES_MAX)
        self._frames: list[Frame] = []
        self._numbers = 0

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # -------------------------------------------------------------- saying

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # It was hung up on; what was said to it before is still there to read.

    def say(self, message: m.Message) -> int:
        self._numbers += 1
        self.send(encode_frame(message, self._numbers))
        return self._numbers

    def say_bytes(self, type_number: int, body: bytes) -> int:
        self._numbers += 1
        self.send(frame_of(type_number, body, self._numbers))
        return self._numbers

    def ask(self, verb: str, **params: Any) -> Any:
        """The answer, or the error that the broker refused with."""
        return self.answer_to(self.say(m.Ask(verb, params)))

    # -------------------------------------------------------------- hearing

    def frame(self) -> Frame | None:
        """The next one; None when the broker has hung up."""
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def message(self) -> Any:
        """The next message that is no heartbeat; None when the broker has hung up."""
        while (frame := self.frame()) is not None:
            message = m.decode(frame.type, bytes(frame.body))
            if not isinstance(message, m.Beat):
                return message
        return None

    def answer_to(self, number: int) -> Any:
        """What the message of that number is answered with: a body, or an error."""
        while (frame := self.frame()) is not None:
            message = m.decode(frame.type, bytes(frame.body))
            match message:
                case m.Accepted() if number in message.messages:
                    return [_error(each) for each in message.refused if each.message == number]
                case m.Answer() if frame.corr_id == number:
                    return message.body
                case m.Refusal() if frame.corr_id == number:
                    return error_from(message)
                case m.Refusal() if frame.corr_id == 0:
                    return error_from(message)
        return None

    # -------------------------------------------------------------- belonging

    def hello(self, key: bytes, *, name: str = "raw", role: str = m.ROLE_CLIENT) -> RawPeer:
        kind = m.HelloClient if role == m.ROLE_CLIENT else m.HelloWorker
        session = os.urandom(8).hex()
        caller = Caller(key, kind(limits.PROTOCOL_VERSION, name, session, os.urandom(16)))
        self.send(caller.opening())
        while caller.welcome is None:
            frame = self.frame()
            assert frame is not None, "hung up on during the hello"
            self.send(caller.receive(frame))
        return self


def _error(refused: m.Refused) -> EkidenError:
    return error_from(m.Refusal(refused.code, refused.text, refused.remedy, refused.retry_after_ms))


def spec_of(subject: str = "job.assign.nobody", **fields: Any) -> msgspec.Raw:
    route = fields.pop("route", None) or Route(subject)
    name = fields.pop("name", "nobody")
    return msgspec.Raw(msgspec.msgpack.encode(Spec(name=name, route=route, **fields)))


def submit(
    ids: Sequence[str], bodies: Sequence[bytes] | None = None, spec: msgspec.Raw | None = None,
    **fields: Any,
) -> m.Submit:  # fmt: skip
    bodies = [b""] * len(ids) if bodies is None else list(bodies)
    digests = b"".join(hashlib.sha256(body).digest()[:8] for body in bodies)
    columns: dict[str, Any] = {"digests": digests, "bodies": bodies, **fields}
    return m.Submit(spec or spec_of(), list(ids), **columns)
