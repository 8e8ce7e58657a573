"""The worker's decisions: what to take, what to run, what to say about it, and when.

Assigns become `Run` effects in batches; the executor answers with batches of outcomes, which leave
in one Ack per turn. Nothing here is done per attempt on the common path.

Its rules:

- An attempt runs at most once here, however often its Assign arrives; its outcome is told again
  instead (see `ledger`).
- An attempt that is not a job's first may have killed a worker before. It waits until a slot is
  free and is announced in a Beat before it runs, so that whoever it kills is known.
- Only the executor knows what has begun, so giving back goes through it: `Abort` with `recall`,
  then `Dropped`.
- Every outcome is kept until the broker confirms it, across any number of connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final

import msgspec

from ekiden import errors, limits
from ekiden.machine import Frame, Instant, Log, Send
from ekiden.model.jobs import CANCEL_CONFIRMED, CANNOT_START, TIMEOUT, GrantNo, Spec
from ekiden.wire import messages
from ekiden.wire.frames import encode_frame
from ekiden.wire.link import Link, is_loopback
from ekiden.wire.messages import AckRun, AssignRun
from ekiden.wire.transfers import EVENTS as TRANSFER_EVENTS
from ekiden.wire.transfers import Transfers
from ekiden.worker.contract import (
    CANCEL,
    RECALL,
    STALE,
    Abort,
    CacheSaid,
    CachesOffered,
    Drain,
    Dropped,
    Exit,
    Gone,
    LoadMeasured,
    Look,
    ProgressMade,
    Run,
    RunFinished,
    Seen,
    Started,
)
from ekiden.worker.credit import STALL_NS, Credit
from ekiden.worker.ledger import Attempt, Ledger, cut, packed

# The machine and what it is spoken to with, in one import.
__all__ = [
    "CANCEL",
    "RECALL",
    "STALE",
    "Abort",
    "CacheSaid",
    "CachesOffered",
    "Drain",
    "Dropped",
    "Exit",
    "Gone",
    "LoadMeasured",
    "Look",
    "ProgressMade",
    "Run",
    "RunFinished",
    "Seen",
    "Started",
    "WorkerMachine",
]

# Distinct specs whose decoded form is kept.
_SPECS_MAX: Final = 1024


class WorkerMachine:
    """One worker. Feed it events, drain its effects; see `ekiden.machine`."""

    def __init__(
        self,
        addresses: list[str],
        worker_id: str,
        session: str,
        key_for: Callable[[str], bytes],
        jitter: Callable[[], float],
        *,
        patterns: list[str],
        slots: int,
        labels: dict[str, str] | None = None,
        cpu_milli: int = 0,
        mem_mb: int = 0,
        host: str = "",
        prefetch: int | None = None,
        credit_least: int | None = None,
        software: str = "",
        codecs: str = "",
    ) -> None:
        """`prefetch` fixes the credit; without it, it follows from how long runs take, and is no
        less than `credit_least` [two for each slot]."""
        assert slots > 0
        self._hello = (worker_id, session, software)
        self._link = Link(addresses, self._hello_for, key_for, jitter, beats=False)
        self._patterns = patterns
        self._slots = slots
        self._facts = (labels or {}, cpu_milli, mem_mb, host)
        self._ledger = Ledger()
        self._specs: dict[bytes, Spec] = {}
        self._decode_spec = msgspec.msgpack.Decoder(Spec).decode

        self._waiting: deque[tuple[AssignRun, Spec]] = deque()
        """Accepted and not handed to the executor: a later attempt, and what came after it."""
        self._waiting_count = 0
        self._running: dict[Attempt, Instant] = {}
        """Begun as far as we were told; entries of settled attempts are swept at every beat."""
        self._timeouts: list[tuple[Instant, GrantNo, int]] = []
        self._ending: dict[Attempt, tuple[str, str]] = {}
        """Asked to end, with the cause and its words, and not known to be gone: a broker is told
        that an attempt was cancelled when its processes are no more."""

        self._credit = Credit(slots, prefetch, credit_least)
        self._credit_told = 0
        self._moved_at: Instant = 0
        """When something last finished or was handed over."""

        self._joined_conn = 0
        self._watched = 0
        """The connection on which somebody asked what an attempt has written."""
        self._welcomed = False
        self._next_id = 1
        self._beat_at: Instant = 0
        self._load = 0
        self._draining = ""
        self._exited = False

        self._acks: list[AckRun] = []
        self._again: list[AckRun] = []
        self._relay: list[bytes] = []
        self._transfers = Transfers(self._number, codecs)
        self._effects: list[Any] = []

    def _hello_for(self, nonce: bytes) -> messages.HelloWorker:
        worker_id, session, software = self._hello
        return messages.HelloWorker(limits.PROTOCOL_VERSION, worker_id, session, nonce, software)

    # -------------------------------------------------------------- what others may ask

    @property
    def connected(self) -> bool:
        """Whether a broker has welcomed this worker and the conversation goes on."""
        return self._link.conn is not None

    @property
    def held(self) -> list[tuple[GrantNo, list[int]]]:
        """Attempts this worker has not yet been told are settled."""
        return self._ledger.held()

    @property
    def credit(self) -> int:
        """The most attempts this worker will hold."""
        return 0 if self._draining else self._credit.now

    # -------------------------------------------------------------- events

    def receive(self, event: Any, now: Instant) -> None:
        """Take note of what happened."""
        match event:
            case RunFinished():
                self._run_finished(event, now)
            case Started():
                self._started(event, now)
            case Dropped():
                self._give_back(event.grant, event.offsets)
            case Gone():
                self._gone(event)
            case Seen():
                self._seen(event)
            case ProgressMade():
                self._progress(event)
            case CacheSaid():
                self._of_cache(event)
            case LoadMeasured():
                self._load = event.percent
            case Drain():
                self._drain(event.reason or "drained", now)
            case _ if isinstance(event, TRANSFER_EVENTS):
                self._transfers.receive(event)
            case _:
                for frame in self._link.receive(event, now):
                    if self._link.conn is None:
                        break  # an earlier frame of this batch made no sense
                    self._heard(frame, now)

    def _heard(self, frame: Frame, now: Instant) -> None:
        try:
            message = messages.decode(frame.type, frame.body)
            match message:
                case messages.Assign():
                    for run in message.runs:
                        self._assigned(run, now)
                case messages.Acked():
                    self._ledger.confirmed(message.upto)
                case messages.Stop():
                    self._stop(message)
                case messages.CacheOffer():
                    offer = CachesOffered(message.caches, message.whole, message.verify)
                    self._effects.append(offer)
                case messages.Peek():
                    self._peek(frame.msg_id, message)
                case messages.Refusal():
                    if not self._transfers.heard(message, 0, frame.corr_id):
                        facts = {"code": message.code, "text": message.text}
                        self._effects.append(Log("warning", "worker.refused", facts))
                case _:
                    # Of a transfer; or a beat, or for someone else: the link took note of the time.
                    self._transfers.heard(message, frame.msg_id, frame.corr_id)
        except errors.BadFrame as error:
            self._link.drop(str(error), now)

    # -------------------------------------------------------------- work comes

    def _assigned(self, run: AssignRun, now: Instant) -> None:
        count = len(run.ids)
        if run.first < 0 or len(run.bodies) != count or len(run.attempts) not in (0, count):
            raise errors.BadFrame("malformed Assign: its columns differ in length")
        spec = self._spec_of(bytes(run.spec))
        if spec is None:
            offsets = list(range(run.first, run.first + count))
            text = "this worker cannot read the job's spec: its release may be too old for it"
            self._acks.append(self._ledger.fail(run.grant, offsets, CANNOT_START, text))
            return
        self._credit.weigh(sum(map(len, run.bodies)) // max(count, 1))
        parts, again = self._ledger.take(run, spec, self._acks)
        self._again += again
        self._moved_at = now
        for part in parts:
            if self._draining:
                self._give_back(part.grant, range(part.first, part.first + len(part.ids)))
            elif not self._waiting and not part.attempts:
                self._effects.append(Run(part, spec))
            else:
                self._wait(part, spec)

    def _spec_of(self, encoded: bytes) -> Spec | None:
        spec = self._specs.get(encoded)
        if spec is None:
            try:
                spec = self._decode_spec(encoded)
            except (msgspec.DecodeError, RecursionError):
                return None
            if len(self._specs) >= _SPECS_MAX:
                self._specs.clear()
            self._specs[encoded] = spec
        return spec

    def _wait(self, run: AssignRun, spec: Spec) -> None:
        """Queue `run` behind the later attempts before it; its own stand alone."""
        start = 0
        count = len(run.ids)
        for at in [*(at for at, number in enumerate(run.attempts) if number > 1), count]:
            if at > start:
                plain = cut(run, range(run.first + start, run.first + at))
                self._push(msgspec.structs.replace(plain, attempts=[]), spec)
            if at < count:
                self._push(cut(run, range(run.first + at, run.first + at + 1)), spec)
            start = at + 1

    def _push(self, run: AssignRun, spec: Spec) -> None:
        self._waiting.append((run, spec))
        self._waiting_count += len(run.ids)

    def _admit(self, now: Instant) -> bool:
        """Hand over what waits, as far as it may begin; True if a beat must go out before it."""
        announced = False
        while self._waiting:
            run, spec = self._waiting[0]
            if run.attempts:
                handed = self._ledger.open_count - self._waiting_count
                if handed >= self._slots or self._link.conn is None:
                    break
                announced = True
                self._running[run.grant, run.first] = now
            self._waiting.popleft()
            self._waiting_count -= len(run.ids)
            self._moved_at = now
            self._effects.append(Run(run, spec))
        return announced

    # -------------------------------------------------------------- work ends

    def _run_finished(self, event: RunFinished, now: Instant) -> None:
        count = len(event.outputs) + len(event.failures)
        if count and event.ran_ns > 0:
            self._credit.sample(event.ran_ns // count)
        self._moved_at = now
        run = self._ledger.finish(
            event.grant, event.offsets, event.outputs, event.failures, event.notes, event.blobs
        )
        if run is not None:
            self._acks.append(run)
        if self._ending:
            for offset in (*event.offsets, *(failure.offset for failure in event.failures)):
                self._ending.pop((event.grant, offset), None)

    def _end(self, number: GrantNo, offsets: list[int], why: str, cause: str, text: str) -> None:
        """Have these ended; they are settled with this cause when they are gone."""
        fresh = [offset for offset in offsets if (number, offset) not in self._ending]
        for offset in fresh:
            self._ending[number, offset] = (cause, text)
        if fresh:
            self._effects += self._aborts(number, fresh, why)

    def _aborts(self, number: GrantNo, offsets: list[int], why: str) -> list[Abort]:
        """One for each spec: what performs it follows from that."""
        if not offsets:
            return []
        parts = self._ledger.grants[number].by_spec(offsets)
        return [Abort(number, some, why, spec) for spec, some in parts]

    def _gone(self, event: Gone) -> None:
        ends: dict[tuple[str, str], list[int]] = {}
        for offset in event.offsets:
            told = self._ending.pop((event.grant, offset), None)
            if told is not None and self._ledger.is_open(event.grant, offset):
                ends.setdefault(told, []).append(offset)
        for (cause, text), offsets in ends.items():
            self._acks.append(self._ledger.fail(event.grant, offsets, cause, text))

    def _started(self, event: Started, now: Instant) -> None:
        for number, offset, began in event.attempts:
            grant = self._ledger.grants.get(number)
            if grant is None or offset not in grant.open:
                continue
            self._running[number, offset] = began
            self._credit.sample(now - began)
            spec = grant.spec_of(offset)
            if spec is not None and spec.timeout_ns:
                heappush(self._timeouts, (began + spec.timeout_ns, number, offset))

    def _time_out(self, now: Instant) -> None:
        while self._timeouts and self._timeouts[0][0] <= now:
            _, number, offset = heappop(self._timeouts)
            grant = self._ledger.grants.get(number)
            if grant is None or offset not in grant.open:
                continue
            spec = grant.spec_of(offset)
            assert spec is not None
            text = f"ran longer than its time limit of {spec.timeout_ns / limits.NS:g} s"
            self._end(number, [offset], TIMEOUT, TIMEOUT, text)

    def _progress(self, event: ProgressMade) -> None:
        if self._link.conn is not None and self._ledger.is_open(event.grant, event.offset):
            self._relay.append(
                encode_frame(messages.Progress(event.grant, event.offset, event.body))
            )

    def _of_cache(self, event: CacheSaid) -> None:
        # Nothing is kept for later: after each join the broker offers all, and is told of all.
        if self._link.conn is not None:
            ack = messages.CacheAck(
                event.cache, event.manifest, event.status, event.text, event.done, event.total
            )
            self._relay.append(encode_frame(ack))

    def _peek(self, number: int, peek: messages.Peek) -> None:
        assert self._link.conn is not None
        self._watched = self._link.conn
        grant = self._ledger.grants.get(peek.grant)
        spec = grant.spec_of(peek.offset) if grant is not None else None
        if spec is None:
            self._seen(Seen(number, None))
            return
        stdout, stderr = max(peek.stdout, 0), max(peek.stderr, 0)
        limit = min(max(peek.limit, 0), limits.INLINE_FILE_BYTES)
        look = Look(number, peek.grant, peek.offset, stdout, stderr, limit, spec)
        self._effects.append(look)

    def _seen(self, event: Seen) -> None:
        # The number is the broker's, of one connection: on another it means nothing.
        if self._link.conn is not None and self._watched == self._link.conn:
            known, written = event.written is not None, event.written or (b"", b"")
            answer = messages.Peeked(known, *written)
            self._relay.append(encode_frame(answer, 0, event.number))

    def _give_back(self, number: GrantNo, offsets: Sequence[int]) -> None:
        run = self._ledger.release(number, offsets)
        if run is not None:
            self._acks.append(run)

    # -------------------------------------------------------------- the broker's wishes

    def _stop(self, stop: messages.Stop) -> None:
        number, why = stop.grant, stop.why
        if why == RECALL:
            self._recall(number, self._ledger.open_of(number, stop.offsets))
            return
        held = self._ledger.open_of(number, stop.offsets)
        unbegun = self._unwait(number, held)
        begun = [offset for offset in held if offset not in unbegun]
        if why == CANCEL:
            self._confirm_unbegun(number, stop.offsets, held, unbegun)
            self._end(number, begun, why, CANCEL_CONFIRMED, "")
        elif why == TIMEOUT:
            if unbegun:
                self._give_back(number, sorted(unbegun))
            self._end(number, begun, why, TIMEOUT, "the broker ended it: over its time limit")
        else:
            self._effects += self._aborts(number, begun, why)
            self._ledger.forget(number, stop.offsets)
            for offset in begun:
                self._ending.pop((number, offset), None)

    def _confirm_unbegun(
        self, number: GrantNo, asked: list[int] | None, held: list[int], unbegun: set[int]
    ) -> None:
        """Confirm the end of what was not handed over, also of what we never heard of: it does not
        run here."""
        known = set(held)
        unheard = [
            offset
            for offset in asked or []
            if offset not in known and not self._ledger.is_settled(number, offset)
        ]
        if unbegun or unheard:
            ends = sorted(unbegun) + unheard
            self._acks.append(self._ledger.fail(number, ends, CANCEL_CONFIRMED, ""))

    def _recall(self, number: GrantNo, offsets: list[int]) -> None:
        unbegun = self._unwait(number, offsets)
        if unbegun:
            self._give_back(number, sorted(unbegun))
        asked = [
            offset
            for offset in offsets
            if offset not in unbegun and (number, offset) not in self._running
        ]
        if asked:
            self._effects += self._aborts(number, asked, RECALL)

    def _unwait(self, number: GrantNo, offsets: list[int]) -> set[int]:
        """Take these out of the waiting line; says which were in it."""
        found: set[int] = set()
        if not self._waiting:
            return found
        asked = set(offsets)
        left: deque[tuple[AssignRun, Spec]] = deque()
        for run, spec in self._waiting:
            span = range(run.first, run.first + len(run.ids))
            hit = asked.intersection(span) if run.grant == number else set()
            if not hit:
                left.append((run, spec))
                continue
            found |= hit
            left.extend((cut(run, range(o, o + 1)), spec) for o in span if o not in hit)
        self._waiting = left
        self._waiting_count -= len(found)
        return found

    def _drain(self, reason: str, now: Instant) -> None:
        if not self._draining:
            self._draining = reason
            for number in list(self._ledger.grants):
                self._recall(number, self._ledger.open_of(number, None))
            self._moved_at = now

    # -------------------------------------------------------------- credit

    def _relieve(self, now: Instant) -> None:
        """Long runs hold every slot and short ones wait behind them: give the surplus back."""
        surplus = self._ledger.open_count - self._credit.least
        if surplus <= 0 or now - self._moved_at < STALL_NS:
            return
        self._moved_at = now
        self._credit.stalled()
        for number in reversed(list(self._ledger.grants)):
            offsets = self._ledger.open_of(number, None)[-surplus:]
            surplus -= len(offsets)
            self._recall(number, offsets)
            if surplus <= 0:
                break

    # -------------------------------------------------------------- turns

    def advance(self, now: Instant) -> list[Any]:
        """Decide, once per turn, and say what the world shall do."""
        if self._exited:
            return []
        link = self._link
        link.advance(now)
        self._time_out(now)
        self._relieve(now)
        announced = self._admit(now)
        out = self._speak(announced, now)
        out += self._transfers.advance(link.conn, local=is_loopback(link.address))
        effects, self._effects = self._effects + self._transfers.take_effects(), []
        talk, link.effects = link.effects, []
        if out and link.conn is not None:
            talk.append(Send(link.conn, b"".join(out)))
        effects = talk + effects
        self._leave_if_done(effects)
        return effects

    def _speak(self, announced: bool, now: Instant) -> list[bytes]:
        """All frames of this turn, in order. Acks are kept whether or not anybody listens."""
        limit = limits.FRAME_BYTES_MAX
        welcome = self._link.welcome
        if welcome is not None:
            limit = min(limit, max(welcome.frame_bytes_max, limits.FRAME_BYTES_MAX_BEFORE_HELLO))
        fresh: list[bytes] = []
        if self._acks:
            for runs in packed(self._acks, limit):
                self._ledger.sent(self._next_id, runs, now)
                fresh.append(encode_frame(messages.Ack(runs), self._next_id))
                self._next_id += 1
            self._acks = []
        again, self._again = self._again, []
        relay, self._relay = self._relay, []
        if welcome is None or self._link.conn is None:
            return []
        if self._link.conn != self._joined_conn:
            return self._join(self._link.conn, welcome, now)
        out = fresh + relay
        for runs in packed(again, limit):
            out.append(encode_frame(messages.Ack(runs), self._next_id))
            self._next_id += 1
        credit = self.credit
        if self._credit.is_news(credit, self._credit_told):
            self._credit_told = credit
            out.append(encode_frame(messages.Credit(credit)))
        if announced or now >= self._beat_at:
            out.append(self._beat(welcome, now))
        return out

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _join(self, conn: int, welcome: messages.Welcome, now: Instant) -> list[bytes]:
        """Introduce ourselves with all we hold, and say again what was not confirmed."""
        self._joined_conn = conn
        self._welcomed = True
        self._credit_told = self.credit
        labels, cpu_milli, mem_mb, host = self._facts
        join = messages.Join(
            self._patterns,
            self._slots,
            self.credit,
            labels,
            cpu_milli,
            mem_mb,
            host,
            self._ledger.held(),
        )
        self._next_id = self._ledger.renumbered(self._next_id)
        facts = {"broker": welcome.broker, "group": welcome.group, "address": self._link.address}
        self._effects.insert(0, Log("info", "worker.joined", facts))
        return [
            encode_frame(join),
            *(encode_frame(messages.Ack(runs), number) for number, runs in self._ledger.unacked),
            self._beat(welcome, now),
        ]

    def _beat(self, welcome: messages.Welcome, now: Instant) -> bytes:
        self._beat_at = now + welcome.heartbeat_ns
        self._ledger.fade(now)
        is_open = self._ledger.is_open
        self._running = {at: began for at, began in self._running.items() if is_open(*at)}
        running = [
            (number, offset, max(now - began, 0) // 1_000_000)
            for (number, offset), began in self._running.items()
        ]
        return encode_frame(messages.Beat(running, self._load))

    def _leave_if_done(self, effects: list[Any]) -> None:
        refused, self._link.refused_by_all = self._link.refused_by_all, None
        if refused is not None and not self._welcomed:
            self._link.leave(refused.code)
            effects += [*self._link.effects, Exit(refused.code, refused)]
            self._exited = True
        elif self._draining and not self._ledger.open_count and not self._ledger.unacked:
            self._link.leave(self._draining)
            effects += [*self._link.effects, Exit(self._draining)]
            self._exited = True

    def next_deadline(self) -> Instant | None:
        """When to call `advance` even if nothing happens."""
        if self._exited:
            return None
        deadline = self._link.next_deadline()
        assert deadline is not None  # it leaves only when the worker exits
        if self._link.conn is not None:
            deadline = min(deadline, self._beat_at)
        if self._timeouts:
            deadline = min(deadline, self._timeouts[0][0])
        if self._ledger.open_count > self._credit.least:
            deadline = min(deadline, self._moved_at + STALL_NS)
        return deadline
