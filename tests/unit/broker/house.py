"""A broker machine, a disk and a clock, and the far ends of its connections."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, TypeVar

import msgspec

from ekiden import limits
from ekiden.broker.events import (
    AppendFailed,
    CacheChecked,
    CheckCache,
    Persisted,
    ReleaseCache,
    VerifyCache,
    WallClock,
)
from ekiden.broker.machine import BrokerMachine
from ekiden.broker.recovery import open_broker
from ekiden.config import BrokerConfig
from ekiden.core import invariants
from ekiden.core.commands import Entry, decode_entry
from ekiden.errors import NoSpace
from ekiden.journal.journal import Append
from ekiden.journal.local import perform
from ekiden.journal.storage import MemoryStorage, Storage
from ekiden.limits import NS
from ekiden.machine import Close, Connected, Disconnected, Frame, Log, Received, Send
from ekiden.model.jobs import Needs, Route, Spec
from ekiden.wire import messages as m
from ekiden.wire.frames import FrameReader
from ekiden.wire.session import Caller

KEY = b"k" * 32
GROUP = bytes(range(16))
WALL = 1_700_000_000 * NS

T = TypeVar("T", bound=m.Message)


class Said(msgspec.Struct, frozen=True):
    """All that one connection was sent in one turn."""

    to: str
    messages: list[Any]


class Far:
    """The far end of one connection. `heard` holds what came and was not looked at yet."""

    def __init__(self, house: House, name: str, conn: int) -> None:
        self.house = house
        self.name = name
        self.conn = conn
        self.sent = 0
        self.open = True
        self.heard: list[tuple[int, m.Message]] = []
        self._reader = FrameReader(limits.FRAME_BYTES_MAX)

    def say(self, *messages: m.Message) -> int:
        """In one go; the number of the last."""
        frames = []
        for message in messages:
            self.sent += 1
            body = m.encode_body(message)
            frames.append(Frame(m.TYPE_OF[type(message)], self.sent, 0, body))
        self.house.machine.receive(Received(self.conn, frames), self.house.now)
        return self.sent

    def say_raw(self, type_number: int, body: bytes) -> None:
        self.sent += 1
        frame = Frame(type_number, self.sent, 0, body)
        self.house.machine.receive(Received(self.conn, [frame]), self.house.now)

    def read(self, data: bytes) -> list[m.Message]:
        # A reader with the promised limit: a frame beyond it would end the connection.
        new = [(f.corr_id, m.decode(f.type, f.body)) for f in self._reader.feed(data)]
        self.heard += new
        return [message for _, message in new]

    def take(self, kind: type[T]) -> T:
        """The only message of that kind so far; everything heard is looked at then."""
        found = [message for _, message in self.heard if isinstance(message, kind)]
        assert len(found) == 1, (kind, self.heard)
        self.heard.clear()
        return found[0]

    def all(self, kind: type[T]) -> list[T]:
        found = [message for _, message in self.heard if isinstance(message, kind)]
        self.heard.clear()
        return found

    def leave(self) -> None:
        self.open = False
        self.house.machine.receive(Disconnected(self.conn), self.house.now)

    # -------------------------------------------------------------- clients

    def submit(self, *ids: str, **options: Any) -> int:
        return self.say(submit_of(*ids, **options))

    def ask(self, verb: str, **params: Any) -> Any:
        """The answer, or the refusal."""
        self.heard.clear()
        number = self.say(m.Ask(verb, params))
        self.house.settle()
        (answer,) = (message for corr, message in self.heard if corr == number)
        self.heard.clear()
        return answer.body if isinstance(answer, m.Answer) else answer

    def results(self) -> dict[str, bytes | str]:
        """Outputs, or states of what ended without one."""
        found: dict[str, bytes | str] = {}
        for message in self.all(m.Results):
            for run in message.runs:
                found |= dict(zip(run.ids, run.outputs, strict=True))
            found |= {ended.id: ended.state for ended in message.ended}
        return found

    # -------------------------------------------------------------- workers

    def join(self, *patterns: str, slots: int = 4, **rest: Any) -> None:
        rest.setdefault("credit", slots)
        self.say(m.Join(list(patterns or ("a.>",)), slots, **rest))

    def assigned(self) -> dict[str, tuple[int, int]]:
        """Job → its grant and offset, of all that was assigned since the last look."""
        found = {}
        for message in self.all(m.Assign):
            for run in message.runs:
                for n, job_id in enumerate(run.ids):
                    found[job_id] = (run.grant, run.first + n)
        return found

    def done(self, *attempts: tuple[int, int], output: bytes = b"out") -> int:
        runs = [m.AckRun(grant, [offset], [output]) for grant, offset in attempts]
        return self.say(m.Ack(runs))

    def failed(self, attempt: tuple[int, int], cause: str, message: str = "no") -> int:
        return self.say(
            m.Ack([m.AckRun(attempt[0], [], [], {}, [m.Failure(attempt[1], cause, message)])])
        )


class House:
    """Nothing is written, and no time passes, unless a test says so."""

    def __init__(
        self, storage: Storage | None = None, *, now: int = 1000 * NS, wall: int = WALL,
        **config: Any,
    ) -> None:  # fmt: skip
        self.storage = storage if storage is not None else MemoryStorage()
        self.now = now
        self.wall = wall
        self.conns = 0
        self.fars: dict[int, Far] = {}
        self.append: Append | None = None
        self.slow = False
        """The disk takes its time: nothing is written unless a test says `persist`."""
        self.shelf: dict[str, CacheChecked] = {}
        """What the disk says of a cache, by manifest; else that all is there."""
        self.checking: list[CheckCache | VerifyCache] = []
        self.pins: Counter[str] = Counter()
        """How often the disk was told to keep the bytes of a cache, less how often to let go."""
        self.config = BrokerConfig(**config)
        self.opened = open_broker(
            self.storage, self.config, key=KEY, broker_id="b1", group_id=GROUP, now=now, wall=wall
        )
        self.machine: BrokerMachine = self.opened.machine

    def restart(self, **config: Any) -> House:
        """The process dies as it is and another opens the folder."""
        return House(self.storage, now=self.now + NS, wall=self.wall + NS, **config)

    # -------------------------------------------------------------- turns

    def turn(self) -> list[Any]:
        """One turn and all its effects."""
        effects: list[Any] = []
        for effect in self.machine.advance(self.now):
            match effect:
                case Send():
                    far = self.fars[effect.conn]
                    effects.append(Said(far.name, far.read(effect.data)))
                case Append():
                    assert self.append is None, "two appends at a time"
                    self.append = effect
                    effects.append(effect)
                case Close():
                    self.fars[effect.conn].open = False
                    effects.append(effect)
                case CheckCache() | VerifyCache():
                    self.checking.append(effect)
                case ReleaseCache():
                    self.pins[effect.cache.manifest] -= 1
                case _:
                    effects.append(effect)
        return effects

    def persist(self) -> None:
        """The append that is out reaches the disk, or finds it full."""
        append, self.append = self.append, None
        assert append is not None, "nothing is being written"
        try:
            perform(self.storage, append)
        except NoSpace as error:
            self.machine.receive(AppendFailed(str(error)), self.now)
        else:
            self.machine.receive(Persisted(append.upto), self.now)

    def look(self) -> None:
        """The disk looks for the bytes of the caches it was asked about."""
        checking, self.checking = self.checking, []
        for check in checking:
            answer = self.shelf.get(check.cache.manifest, CacheChecked(0, files=3, size=1000))
            whole = not answer.missing and answer.error is None
            if isinstance(check, CheckCache) and (whole or check.known):
                self.pins[check.cache.manifest] += 1
            self.machine.receive(msgspec.structs.replace(answer, number=check.number), self.now)

    def settle(self) -> list[Any]:
        """Turns, with a quick disk, until nothing more happens. Effects but appends."""
        effects: list[Any] = []
        for _ in range(100):
            new = self.turn()
            if self.checking and not self.slow:
                self.look()
                new.append(None)
            effects += [effect for effect in new if effect and not isinstance(effect, Append)]
            if self.append is not None and not self.slow:
                self.persist()
            elif not new:
                invariants.check(self.machine.book)
                return effects
        raise AssertionError("the broker does not come to rest")

    def later(self, seconds: float, *, beats: bool = True) -> list[Any]:
        """Time passes in quarter seconds; everybody who is connected says so now and then."""
        effects: list[Any] = []
        for _ in range(round(seconds * 4)):
            self.now += NS // 4
            self.wall += NS // 4
            if beats and self.now % (2 * NS) == 0:
                for far in self.fars.values():
                    if far.open:
                        far.say(m.Beat())
            if self.now % NS == 0:
                self.machine.receive(WallClock(self.wall), self.now)
            effects += self.settle()
        return effects

    # -------------------------------------------------------------- peers

    def connect(self, name: str) -> Far:
        self.conns += 1
        far = self.fars[self.conns] = Far(self, name, self.conns)
        nonce = self.conns.to_bytes(16, "big")
        self.machine.receive(Connected(self.conns, f"{name}:1", nonce), self.now)
        return far

    def greet(self, far: Far, hello: m.HelloClient | m.HelloWorker, key: bytes = KEY) -> Far:
        """Both know the key; the greeting is over and forgotten."""
        caller = Caller(key, hello)
        far.say(hello)
        self.turn()
        (challenge,) = far.heard
        frame = Frame(m.TYPE_OF[m.Challenge], 0, 0, m.encode_body(challenge[1]))
        (proof,) = FrameReader(4096).feed(caller.receive(frame))
        far.say_raw(proof.type, bytes(proof.body))
        self.settle()
        assert isinstance(far.heard[-1][1], m.Welcome)
        far.heard.clear()
        return far

    def client(self, name: str = "ann", session: str = "") -> Far:
        hello = m.HelloClient(1, name, session or f"s-{name}", b"n" * 16)
        return self.greet(self.connect(name), hello)

    def worker(self, name: str = "w1", *patterns: str, session: str = "p1", **rest: Any) -> Far:
        hello = m.HelloWorker(1, name, session, b"n" * 16)
        far = self.greet(self.connect(name), hello)
        far.join(*patterns, **rest)
        self.settle()
        return far

    def stranger(self, name: str = "w1", session: str = "p1") -> Far:
        """A worker that was greeted and has not joined."""
        return self.greet(self.connect(name), m.HelloWorker(1, name, session, b"n" * 16))

    def entries(self) -> list[Entry]:
        """All that is on disk."""
        journal = self.machine.journal
        return [decode_entry(n, journal.read(n)) for n in range(1, journal.committed + 1)]

    def state(self, job_id: str) -> str:
        """As a person would be told."""
        row = self.machine.book.find(job_id)
        return self.machine.desk._state(row) if row is not None else "unknown"


def spec_of(subject: str = "a.x", **options: Any) -> msgspec.Raw:
    needs = Needs(*options.pop("needs", ()))
    route = Route(subject, needs, options.pop("key", ""), options.pop("pin", ""))
    return msgspec.Raw(msgspec.msgpack.encode(Spec(options.pop("name", "n"), route, **options)))


def submit_of(
    *ids: str, body: bytes | None = None, delay_ns: int = 0, not_before: int = 0,
    expires_at: int = 0, **options: Any,
) -> m.Submit:  # fmt: skip
    bodies = [job_id.encode() if body is None else body for job_id in ids]
    digests = b"".join(hashlib.sha256(text).digest()[:8] for text in bodies)
    return m.Submit(
        spec_of(**options), list(ids), digests, bodies, delay_ns, not_before, expires_at
    )


def logs(effects: list[Any]) -> list[str]:
    return [effect.event for effect in effects if isinstance(effect, Log)]


def quiet(effects: list[Any]) -> list[Any]:
    """Without the lines for the log."""
    return [effect for effect in effects if not isinstance(effect, Log)]
