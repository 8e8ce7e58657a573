"""The least broker there can be, for tests of what runs on top of the client's machine.

It greets with the real `Greeter`, accepts every job, and answers each at once with `answer(id,
body)`: bytes are a result, an `Ended` is an end, None leaves the job open. Nothing is stored.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from ekiden import errors, limits
from ekiden.machine import (
    Close,
    Connected,
    Disconnected,
    Garbled,
    Log,
    Received,
    Send,
    Trust,
)
from ekiden.wire import messages
from ekiden.wire.frames import encode_frame
from ekiden.wire.messages import Ended, Refused, ResultRun
from ekiden.wire.session import Greeter, refusal_frame
from ekiden.world import loop
from ekiden.world.loop import Driver
from ekiden.world.network import Network

KEY = bytes(range(32))

Answer = Callable[[str, bytes], Any]


def echo(_job_id: str, body: bytes) -> bytes:
    return body


class LoopbackMachine:
    """Greets, accepts, answers."""

    def __init__(self, answer: Answer, key: bytes = KEY) -> None:
        self.answer = answer
        self.key = key
        self.submitted: list[str] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.known: dict[str, bytes] = {}
        self.open: dict[str, int] = {}
        self.patterns: dict[tuple[int, int], str] = {}
        self.mute = False
        """Accept nothing and answer nothing: what is submitted stays unanswered."""
        self._greeters: dict[int, Greeter] = {}
        self._effects: list[Any] = []

    def receive(self, event: Any, now: int) -> None:
        match event:
            case Connected():
                self._greeters[event.conn] = Greeter(
                    self.key,
                    event.nonce,
                    group="g",
                    broker="b",
                    epoch=1,
                    heartbeat_ns=limits.HEARTBEAT_NS,
                    silence_ns=limits.SILENCE_NS,
                )
            case Received():
                for frame in event.frames:
                    self._frame(event.conn, frame)
            case Garbled():
                self._effects.append(Close(event.conn, event.reason))
            case Disconnected():
                self._greeters.pop(event.conn, None)

    def advance(self, now: int) -> list[Any]:
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> int | None:
        return None

    def settle(self, job_id: str, outcome: Any) -> None:
        """Tell the client of an open job, now."""
        self._tell(self.open.pop(job_id), [job_id], [outcome])

    def say(self, conn: int, message: messages.Message, corr_id: int = 0) -> None:
        self._effects.append(Send(conn, encode_frame(message, 0, corr_id)))

    def hang_up(self) -> None:
        self._effects += [Close(conn, "restart") for conn in list(self._greeters)]

    def _frame(self, conn: int, frame: Any) -> None:
        greeter = self._greeters[conn]
        if greeter.identity is None:
            try:
                self._effects.append(Send(conn, greeter.receive(frame)))
            except errors.Refusal as refusal:
                self._effects += [Send(conn, refusal_frame(refusal)), Close(conn, refusal.code)]
                return
            if greeter.identity is not None:
                self._effects.append(Trust(conn))
            return
        match messages.decode(frame.type, frame.body):
            case messages.Submit() as submit if not self.mute:
                self._submit(conn, submit, frame.msg_id)
            case messages.Attach() as attach:
                unknown = [job_id for job_id in attach.ids if job_id not in self.known]
                self.open.update((job_id, conn) for job_id in attach.ids if job_id in self.known)
                self.say(conn, messages.Attached(unknown), frame.msg_id)
            case messages.Ask() as ask:
                self._ask(conn, ask, frame.msg_id)
            case messages.Subscribe() as subscribe:
                self.patterns[conn, subscribe.sid] = subscribe.pattern
            case messages.Unsubscribe() as leave:
                self.patterns.pop((conn, leave.sid), None)
            case messages.Publish() as news:
                for (reader, sid), pattern in self.patterns.items():
                    if pattern == news.subject:
                        self.say(reader, messages.Delivery(sid, news.subject, news.payload))

    def _submit(self, conn: int, submit: messages.Submit, number: int) -> None:
        outcomes = []
        refused = []
        for offset, (job_id, body) in enumerate(zip(submit.ids, submit.bodies, strict=True)):
            if self.known.setdefault(job_id, body) != body:
                refused.append(Refused(number, offset, "conflict", f"{job_id} is taken"))
            outcomes.append(self.answer(job_id, body))
        self.submitted += submit.ids
        self.say(conn, messages.Accepted([number], refused))
        self._tell(conn, submit.ids, outcomes)

    def _tell(self, conn: int, ids: list[str], outcomes: list[Any]) -> None:
        pairs = list(zip(ids, outcomes, strict=True))
        done = [(job_id, out) for job_id, out in pairs if isinstance(out, bytes)]
        self.open.update((job_id, conn) for job_id, out in pairs if out is None)
        runs = []
        if done:
            columns = [job_id for job_id, _ in done], [out for _, out in done]
            runs = [ResultRun(*columns, "w1", 1_000_000_000, 2_000_000_000, 3_000_000_000)]
        ended = [out for out in outcomes if isinstance(out, Ended)]
        if runs or ended:
            self.say(conn, messages.Results(runs, ended))

    def _ask(self, conn: int, ask: messages.Ask, number: int) -> None:
        self.asked.append((ask.verb, ask.params))
        body: Any = {"verb": ask.verb, **ask.params}
        if ask.verb == "cancel":
            open_ids = [job_id for job_id in ask.params["ids"] if job_id in self.open]
            body = {"cancelled": len(open_ids), "cancelling": 0, "settled": 0, "unknown": []}
            for job_id in open_ids:
                self.settle(job_id, Ended(job_id, "cancelled", [], "cancelled"))
        elif ask.verb == "workers":
            body = {"workers": []}
        elif ask.verb == "nonsense":
            refusal = messages.Refusal("bad_request", "no such verb", "ask something else")
            self.say(conn, refusal, number)
            return
        self.say(conn, messages.Answer(body), number)


class Loopback:
    """A `LoopbackMachine` on a port of 127.0.0.1, in a thread. Use it as a context manager."""

    def __init__(self, answer: Answer = echo, *, key: bytes = KEY, port: int = 0) -> None:
        self.machine = LoopbackMachine(answer, key)
        self.port = port
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: loop.run(self._serve()), daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def do(self, work: Callable[[LoopbackMachine], Any]) -> Any:
        """Have the machine do something between two turns, and wait for it."""
        done: list[Any] = []
        happened = threading.Event()

        def run() -> None:
            done.append(work(self.machine))
            self._driver.wake()
            happened.set()

        self._loop.call_soon_threadsafe(run)
        assert happened.wait(10)
        return done[0]

    def __enter__(self) -> Loopback:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._driver = Driver(self.machine, perform={Log: lambda _effect: None})
        network = Network(self._driver)
        self.port = await network.listen("127.0.0.1", self.port)
        self._ready.set()
        await self._end.wait()
        await network.wait_closed()
        self._driver.stop()
