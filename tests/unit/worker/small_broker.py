"""A broker without a journal, on a real socket: enough to see a worker serve."""

from __future__ import annotations

import os
import queue
import socket
import threading
from typing import Any

from ekiden.errors import Refusal
from ekiden.limits import NS
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader, encode_frame
from ekiden.wire.messages import Ack, Acked, Assign, AssignRun, Join, Message
from ekiden.wire.session import Greeter, refusal_frame

KEY = b"k" * 32
DEADLINE_S = 20.0


class SmallBroker:
    """Welcomes one worker at a time, sends it what a test wants and keeps what it says."""

    def __init__(self) -> None:
        self.joins: queue.Queue[Join] = queue.Queue()
        self.acks: queue.Queue[Ack] = queue.Queue()
        self.said: queue.Queue[Message] = queue.Queue()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peer: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def assign(self, *runs: AssignRun) -> None:
        self.send(Assign(list(runs)))

    def send(self, message: Message) -> None:
        assert self._peer is not None
        self._peer.sendall(encode_frame(message))

    def wait_joined(self) -> Join:
        return self.joins.get(timeout=DEADLINE_S)

    def wait_ack(self) -> Ack:
        return self.acks.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self._listener.close()
        if self._peer is not None:
            self._peer.close()

    def __enter__(self) -> SmallBroker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---------------------------------------------------------- in the thread

    def _serve(self) -> None:
        while True:
            try:
                self._peer, _ = self._listener.accept()
                self._talk(self._peer)
            except OSError:
                if self._listener.fileno() < 0:
                    return

    def _talk(self, peer: socket.socket) -> None:
        reader = FrameReader()
        greeter = Greeter(
            KEY, os.urandom(16), group="g", broker="b", epoch=1, heartbeat_ns=NS, silence_ns=15 * NS
        )
        while data := peer.recv(1 << 16):
            for frame in reader.feed(data):
                if greeter.identity is None:
                    try:
                        peer.sendall(greeter.receive(frame))
                    except Refusal as error:
                        peer.sendall(refusal_frame(error))
                        peer.close()
                        return
                    continue
                self._hear(peer, frame.msg_id, messages.decode(frame.type, frame.body))
        peer.close()

    def _hear(self, peer: socket.socket, msg_id: int, message: Message) -> None:
        match message:
            case Join():
                self.joins.put(message)
            case Ack():
                self.acks.put(message)
                peer.sendall(encode_frame(Acked(msg_id)))
            case _:
                self.said.put(message)
