"""Transfers of a peer and a broker's machine, back to back, one step at a time."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

from tests.unit.broker.house import House

from ekiden.errors import BlobDamaged, EkidenError, Fault
from ekiden.journal.journal import Append
from ekiden.machine import Disconnected, Received, Send
from ekiden.simulation.blobs import EFFECTS, MemoryBlobs
from ekiden.wire import messages as m
from ekiden.wire.frames import FrameReader
from ekiden.wire.transfers import (
    Downloading,
    PartRead,
    PartWritten,
    ReadPart,
    TransferFailed,
    Transferred,
    Transfers,
    Uploading,
    WritePart,
)


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Cut(Exception):
    """The step at which the line was to break."""


class Line:
    """Every frame, every read and every write is a step; the line can break at any of them."""

    def __init__(self, *, cut_at: int = 0, blobs: MemoryBlobs | None = None, **config: Any) -> None:
        self.blobs = blobs or MemoryBlobs()
        self.house = House(**config)
        self.numbers = 0
        self.transfers = Transfers(self._number)
        self.cut_at = cut_at
        self.steps = 0
        self.cuts = 0
        self.sources: dict[Any, bytes] = {}
        self.sinks: dict[Any, bytearray] = {}
        self.blob_of: dict[Any, str] = {}
        self.ended: dict[Any, EkidenError | None] = {}
        self.broken_files: set[Any] = set()
        self.seen: list[m.Message] = []
        """All messages, in the order they arrived at either end."""
        self.todo: deque[Any] = deque()
        """What the peer's files were asked for: no loss of a line keeps them from it."""
        self.connect()

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def connect(self) -> None:
        self.conn = self.house.client(session=f"s{self.house.conns}").conn

    def restart_broker(self) -> None:
        """It is killed, and another one opens its folder."""
        self.blobs.lose_power()
        self.house = self.house.restart()
        self.transfers.advance(None)
        self.connect()

    def lose_connection(self) -> None:
        self.house.machine.receive(Disconnected(self.conn), self.house.now)
        self._broker_turn(deliver=False)
        self.transfers.advance(None)
        self.connect()

    # -------------------------------------------------------------- requests

    def upload(self, token: Any, data: bytes, blob: str = "") -> None:
        self.sources[token] = data
        self.transfers.receive(Uploading(token, blob or hash_of(data), len(data)))

    def download(self, token: Any, blob: str, size: int) -> None:
        self.sinks[token] = bytearray()
        self.blob_of[token] = blob
        self.transfers.receive(Downloading(token, blob, size))

    # -------------------------------------------------------------- steps

    def run(self, *, killed: bool = False) -> None:
        """Until nothing more happens. A cut loses all that was on its way, at both ends."""
        for _ in range(10_000):
            before = self.steps
            try:
                self._round()
            except Cut:
                self.cuts += 1
                if killed:
                    self.restart_broker()
                else:
                    self.lose_connection()
            if self.steps == before:
                return
        raise AssertionError("the line does not come to rest")

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.cut_at:
            raise Cut

    def _round(self) -> None:
        for frame in FrameReader().feed(b"".join(self.transfers.advance(self.conn))):
            self._step()
            self.seen.append(m.decode(frame.type, frame.body))
            self.house.machine.receive(Received(self.conn, [frame]), self.house.now)
        self.todo += self.transfers.take_effects()
        while self.todo:
            self._perform(self.todo.popleft())
            self._step()
        self._broker_turn(deliver=True)

    def _broker_turn(self, *, deliver: bool) -> None:
        machine, now = self.house.machine, self.house.now
        told: list[Any] = []
        for effect in machine.advance(now):
            if isinstance(effect, Send):
                if deliver and effect.conn == self.conn:
                    self._deliver(effect.data)
            elif isinstance(effect, EFFECTS):
                if deliver:
                    self._step()
                told.append(self.blobs.perform(effect))
            elif isinstance(effect, Append):
                self.house.append = effect
                self.house.persist()
        for event in told:
            if event is not None:
                machine.receive(event, now)

    def _deliver(self, data: bytes) -> None:
        for frame in FrameReader().feed(data):
            message = m.decode(frame.type, frame.body)
            if isinstance(message, m.Beat):
                continue
            self._step()
            self.seen.append(message)
            assert self.transfers.heard(message, frame.msg_id, frame.corr_id), message

    # -------------------------------------------------------------- the files of the peer

    def _perform(self, effect: Any) -> None:
        match effect:
            case ReadPart(token, offset, length):
                if token in self.broken_files:
                    self.transfers.receive(PartRead(token, offset, error=Fault("cannot read")))
                    return
                data = self.sources[token][offset : offset + length]
                self.transfers.receive(PartRead(token, offset, data))
            case WritePart(token, offset, data, last):
                sink = self.sinks[token]
                assert offset == len(sink), "parts are written in order, each once"
                sink += data
                damaged = last and hash_of(bytes(sink)) != self.blob_of[token]
                error = BlobDamaged("another hash") if damaged else None
                self.transfers.receive(PartWritten(token, offset, error))
            case Transferred(token):
                assert token not in self.ended
                self.ended[token] = None
            case TransferFailed(token, error):
                assert token not in self.ended
                self.ended[token] = error
            case _:
                raise AssertionError(effect)
