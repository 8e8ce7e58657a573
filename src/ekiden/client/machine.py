"""What a client knows of its jobs: which wait, which are on the wire, which are accepted.

A job goes `waiting → in flight → accepted → settled`. When the connection breaks, what was in
flight waits again, in the order it was submitted; what was accepted is attached to again; so a job
submitted once runs under one id, however often the client has to say so.

Costs are per batch where they can be: one frame for a run of jobs with equal terms, one effect for
a run of results. Nothing here raises because of what a peer or the world does.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, Final

from msgspec import Raw, Struct

from ekiden import errors, limits
from ekiden.client.contract import (
    Answered,
    Asking,
    AskRefused,
    Attaching,
    Deliveries,
    Handle,
    JobsAccepted,
    JobsDone,
    JobsEnded,
    JobsRefused,
    Leaving,
    LinkDown,
    LinkUp,
    Order,
    ProgressMade,
    Publishing,
    RefusedByAll,
    Submitting,
    SubscribeRefused,
    Subscribing,
    Terms,
    Unsubscribing,
)
from ekiden.client.family import Family
from ekiden.client.uses import UNKNOWN_REMEDY, Uses
from ekiden.machine import Frame, Instant, Log
from ekiden.wire import messages
from ekiden.wire.frames import encode_frame
from ekiden.wire.link import Link, is_loopback
from ekiden.wire.messages import Delivery, ResultRun
from ekiden.wire.session import error_from
from ekiden.wire.transfers import EVENTS, Transfers

# The machine and what it is spoken to with, in one import.
__all__ = [
    "Answered",
    "AskRefused",
    "Asking",
    "Attaching",
    "ClientMachine",
    "Deliveries",
    "Handle",
    "JobsAccepted",
    "JobsDone",
    "JobsEnded",
    "JobsRefused",
    "Leaving",
    "LinkDown",
    "LinkUp",
    "Order",
    "ProgressMade",
    "Publishing",
    "RefusedByAll",
    "Submitting",
    "SubscribeRefused",
    "Subscribing",
    "Terms",
    "Unsubscribing",
]

# Asking these twice does no harm, so an answer lost with the connection is asked for again.
_REPEATABLE: Final = frozenset(
    {
        "stats", "jobs", "job", "workers", "runs", "logs", "cancel", "purge", "drain", "resume",
        "cache", "caches", "cache_put", "cache_verify",
    }
)  # fmt: skip

# The broker is about to go or has stepped down: the job is fine, this is not the one to take it.
_ELSEWHERE: Final = frozenset({"draining", "not_leader"})

# msgpack headers of one id and one body, and the digest: what a job adds to a frame beside them.
_JOB_OVERHEAD_BYTES: Final = 16

_sha256 = hashlib.sha256


class _Batch(Struct):
    """A Submit on the wire."""

    handles: list[Any]
    size: int


class ClientMachine:
    """One client: feed it the events above and those of the network, drain the effects.

    `pending` is how many jobs are not yet accepted; keeping it under `pending_max` is the business
    of the layer above, which can wait.
    """

    def __init__(
        self,
        addresses: list[str],
        client_id: str,
        session: str,
        key_for: Callable[[str], bytes],
        jitter: Callable[[], float],
        *,
        batch_jobs: int = limits.CLIENT_BATCH_JOBS,
        software: str = "",
        codecs: str = "",
    ) -> None:
        assert 0 < batch_jobs <= limits.BATCH_JOBS_MAX

        def hello(nonce: bytes) -> messages.HelloClient:
            return messages.HelloClient(
                limits.PROTOCOL_VERSION, client_id, session, nonce, software
            )

        self.link = Link(addresses, hello, key_for, jitter, beats=True)
        self._conn: int | None = None
        self._batch_jobs = batch_jobs
        # Numbers go on across connections: an answer that comes late must not fit a new question.
        self._last_msg = 0
        self._open: dict[str, Any] = {}
        self._family = Family(self._open)
        self._waiting: deque[Any] = deque()
        self._in_flight: dict[int, _Batch] = {}
        self._in_flight_jobs = 0
        self._in_flight_bytes = 0
        self._returned: list[Any] = []
        self._uses = Uses()
        self._to_attach: list[Any] = []
        self._attaching: dict[int, list[Any]] = {}
        self._to_ask: deque[Asking] = deque()
        self._asking: dict[int, Asking] = {}
        self._patterns: dict[int, str] = {}
        self._subscribing: dict[int, int] = {}
        self._to_publish: deque[Publishing] = deque()
        self._publish_bytes = 0
        self._outbox: list[bytes] = []
        self._effects: list[Any] = []
        self._accepted: list[Any] = []
        self._refused: list[tuple[Any, errors.EkidenError]] = []
        self._delivered: list[Delivery] = []
        self._left = False
        self.transfers = Transfers(self._number, codecs)
        self._dispatch: dict[type, Callable[[Any], None]] = {
            Submitting: self._submit,
            Attaching: self._attach,
            Asking: self._ask,
            Subscribing: self._subscribe,
            Unsubscribing: self._unsubscribe,
            Publishing: self._publish,
            Leaving: self._leave,
            **dict.fromkeys(EVENTS, self._transfer),
        }
        self._read: dict[type, Callable[[Any, int], None]] = {
            messages.Accepted: self._on_accepted,
            messages.Results: self._on_results,
            messages.Attached: self._on_attached,
            messages.Answer: self._on_answer,
            messages.Refusal: self._on_refusal,
            messages.Delivery: self._on_delivery,
            messages.JobProgress: self._on_progress,
        }

    @property
    def pending(self) -> int:
        """Jobs that no broker has accepted yet."""
        parked = len(self._returned) + len(self._uses)
        return len(self._waiting) + self._in_flight_jobs + parked

    @property
    def open_jobs(self) -> int:
        """Distinct jobs that are not settled as far as we know."""
        return len(self._open)

    def everyone(self) -> list[Any]:
        """Every open handle of a job, for a layer above that must end them itself."""
        return self._family.everyone()

    def questions(self) -> list[Any]:
        """The handles of every question without an answer."""
        return [asking.handle for asking in (*self._asking.values(), *self._to_ask)]

    # -------------------------------------------------------------- the contract of a machine

    def receive(self, event: Any, now: Instant) -> None:
        """Take note of a request or of what the network did."""
        request = self._dispatch.get(type(event))
        if request is not None:
            request(event)
            return
        frames = self.link.receive(event, now)
        self._follow()
        if frames:
            self._read_frames(frames, now)

    def advance(self, now: Instant) -> list[Any]:
        """Send what there is to send, in one write, and tell what became known."""
        self.link.advance(now)
        self._follow()
        parts = self.transfers.advance(self._conn, local=is_loopback(self.link.address))
        if self.link.refused_by_all is not None:
            self._give_up(self.link.refused_by_all)
            self.link.refused_by_all = None
        if self._conn is not None:
            self._fill_outbox()
            self._outbox += parts
            if self._outbox:
                self.link.send(b"".join(self._outbox), now)
                self._outbox.clear()
        if self._left:
            self.link.leave("client closed")
            self._conn = None
        effects = self.link.effects
        self.link.effects = []
        return effects + self._take_news()

    def next_deadline(self) -> Instant | None:
        """When the link wants to be looked at."""
        return self.link.next_deadline()

    # -------------------------------------------------------------- requests

    def _submit(self, event: Submitting) -> None:
        if self._left:
            self._refuse(event.handles, _closed())
            return
        self._note(event.handles)
        self._waiting.extend(event.handles)

    def _attach(self, event: Attaching) -> None:
        if self._left:
            self._refuse(event.handles, _closed())
            return
        self._note(event.handles)
        self._to_attach.extend(event.handles)

    def _note(self, handles: list[Any]) -> None:
        remember = self._open.setdefault
        for handle in handles:
            if remember(handle.job_id, handle) is not handle:
                self._family.add(handle)

    def _ask(self, event: Asking) -> None:
        if self._left:
            self._effects.append(AskRefused(event.handle, _closed()))
        elif len(self._to_ask) + len(self._asking) >= limits.CLIENT_ASKS_MAX:
            full = errors.QueueFull(
                f"{limits.CLIENT_ASKS_MAX:,} questions wait for an answer", remedy="ask fewer"
            )
            self._effects.append(AskRefused(event.handle, full))
        else:
            self._to_ask.append(event)

    def _subscribe(self, event: Subscribing) -> None:
        self._patterns[event.sid] = event.pattern
        if self._conn is not None:
            self._say_subscribe(event.sid, event.pattern)

    def _unsubscribe(self, event: Unsubscribing) -> None:
        if self._patterns.pop(event.sid, None) is not None and self._conn is not None:
            self._say(messages.Unsubscribe(event.sid))

    def _publish(self, event: Publishing) -> None:
        self._to_publish.append(event)
        self._publish_bytes += len(event.payload)
        while self._publish_bytes > limits.RELAY_OUTBOX_BYTES_MAX and self._to_publish:
            # The relay may lose, and what is newest is worth most.
            self._publish_bytes -= len(self._to_publish.popleft().payload)

    def _transfer(self, event: Any) -> None:
        self.transfers.receive(event)
        if self._left:
            self.transfers.fail_all(_closed())

    def _leave(self, _event: Leaving) -> None:
        self._left = True
        self._fail_everything(_closed())

    # -------------------------------------------------------------- the link comes and goes

    def _follow(self) -> None:
        """Notice that the link has changed. Seen after every event, so no frame is misread."""
        if self.link.conn == self._conn:
            return
        if self._conn is not None:
            self._went_down()
        self._conn = self.link.conn
        if self._conn is not None:
            self._came_up()

    def _went_down(self) -> None:
        again = [
            *self._returned,
            *(handle for batch in self._in_flight.values() for handle in batch.handles),
            *self._uses.forget(),
        ]
        self._waiting.extendleft(h for h in reversed(again) if self._family.is_open(h))
        self._forget_in_flight()
        self._outbox.clear()
        self._subscribing.clear()
        self._to_attach.clear()
        self._attaching.clear()
        for question in reversed(self._asking.values()):
            if question.verb in _REPEATABLE:
                self._to_ask.appendleft(question)
            else:
                lost = errors.ConnectionLost(
                    f"the connection broke before {question.verb!r} was answered",
                    remedy="look whether it took effect before you ask again",
                )
                self._effects.append(AskRefused(question.handle, lost))
        self._asking.clear()
        error = self.link.last_error or errors.ConnectionLost("the connection broke")
        self._effects.append(LinkDown(error))

    def _came_up(self) -> None:
        assert self.link.welcome is not None
        self._effects.append(LinkUp(self.link.address, self.link.welcome))
        unaccepted = set(self._waiting)
        self._to_attach = [h for h in self._open.values() if h not in unaccepted]
        self._to_attach += self._family.attached_only()
        for sid, pattern in self._patterns.items():
            self._say_subscribe(sid, pattern)

    def _give_up(self, error: errors.EkidenError) -> None:
        self._fail_everything(error)
        self._effects.append(RefusedByAll(error))

    def _fail_everything(self, error: errors.EkidenError) -> None:
        self._refuse(self._family.everyone(), error)
        self._family.clear()
        self._waiting.clear()
        self._uses.forget()
        self._forget_in_flight()
        self._to_attach.clear()
        self._attaching.clear()
        for question in [*self._asking.values(), *self._to_ask]:
            self._effects.append(AskRefused(question.handle, error))
        self._asking.clear()
        self._to_ask.clear()
        self.transfers.fail_all(error)

    def _forget_in_flight(self) -> None:
        self._in_flight.clear()
        self._in_flight_jobs = self._in_flight_bytes = 0
        self._returned.clear()

    # -------------------------------------------------------------- what is sent

    def _number(self) -> int:
        self._last_msg += 1
        return self._last_msg

    def _say(self, message: messages.Message) -> int:
        number = self._number()
        self._outbox.append(encode_frame(message, number))
        return number

    def _say_subscribe(self, sid: int, pattern: str) -> None:
        self._subscribing[self._say(messages.Subscribe(sid, pattern))] = sid

    def _fill_outbox(self) -> None:
        while self._to_attach:
            handles = self._to_attach[: limits.CLIENT_BATCH_JOBS]
            del self._to_attach[: limits.CLIENT_BATCH_JOBS]
            ids = list(dict.fromkeys(handle.job_id for handle in handles))
            self._attaching[self._say(messages.Attach(ids))] = handles
        while (
            self._waiting
            and not self._returned
            and self._in_flight_jobs < limits.CLIENT_WINDOW_JOBS
            and self._in_flight_bytes < limits.CLIENT_WINDOW_BYTES
        ):
            handles, size = self._next_batch()
            terms = handles[0].terms
            spec = self._uses.spec_of(terms) if terms.caches else terms.spec
            if spec:
                self._say_submit(handles, size, spec)
            else:
                for cache in self._uses.park(handles):
                    number = self._say(messages.Ask("cache", {"id": cache}))
                    self._uses.asked(number, cache)
        while self._to_ask:
            self._say_ask(self._to_ask.popleft())
        while self._to_publish:
            news = self._to_publish.popleft()
            self._say(messages.Publish(news.subject, news.payload))
        self._publish_bytes = 0

    def _say_ask(self, question: Asking) -> None:
        number = self._number()
        frame = encode_frame(messages.Ask(question.verb, question.params), number)
        if len(frame) > limits.FRAME_BYTES_MAX:
            error = errors.TooLarge(
                f"the question {question.verb!r} takes {len(frame):,} bytes, over the limit of "
                f"{limits.FRAME_BYTES_MAX:,}",
                remedy="ask in parts",
            )
            self._effects.append(AskRefused(question.handle, error))
            return
        self._outbox.append(frame)
        self._asking[number] = question

    def _next_batch(self) -> tuple[list[Any], int]:
        """The longest run of equal terms at the head that fits one frame."""
        waiting = self._waiting
        take = waiting.popleft
        first = take()
        terms = first.terms
        handles = [first]
        size = len(first.body) + len(first.job_id) + _JOB_OVERHEAD_BYTES
        for _ in range(min(self._batch_jobs - 1, len(waiting))):
            handle = waiting[0]
            if handle.terms is not terms and handle.terms != terms:
                break
            grown = size + len(handle.body) + len(handle.job_id) + _JOB_OVERHEAD_BYTES
            if grown > limits.CLIENT_BATCH_BYTES:
                break
            size = grown
            handles.append(take())
        return handles, size

    def _say_submit(self, handles: list[Any], size: int, spec: bytes) -> None:
        terms = handles[0].terms
        bodies = [handle.body for handle in handles]
        blobs: dict[int, Any] = {}
        if terms.stored:
            blobs = {at: handle.blobs for at, handle in enumerate(handles) if handle.blobs}
        number = self._say(
            messages.Submit(
                Raw(spec),
                [handle.job_id for handle in handles],
                b"".join([_sha256(body).digest()[:8] for body in bodies]),
                bodies,
                terms.delay_ns,
                terms.not_before,
                terms.expires_at,
                blobs,
            )
        )
        self._in_flight[number] = _Batch(handles, size)
        self._in_flight_jobs += len(handles)
        self._in_flight_bytes += size

    # -------------------------------------------------------------- what is read

    def _read_frames(self, frames: list[Frame], now: Instant) -> None:
        for frame in frames:
            try:
                message = messages.decode(frame.type, frame.body)
            except errors.BadFrame as error:
                self.link.drop(str(error), now)
                self._follow()
                return
            read = self._read.get(type(message))
            if read is not None:
                read(message, frame.corr_id)
            else:
                self.transfers.heard(message, frame.msg_id, frame.corr_id)

    def _on_accepted(self, message: messages.Accepted, _corr_id: int) -> None:
        refused: dict[int, list[messages.Refused]] = {}
        for refusal in message.refused:
            refused.setdefault(refusal.message, []).append(refusal)
        # A submit that was refused as a whole may be named among the refusals only.
        for number in dict.fromkeys([*message.messages, *refused]):
            batch = self._landed(number)
            if batch is None:
                continue
            if number in refused:
                self._sort_out(batch, refused[number])
            else:
                self._take_accepted(batch.handles)

    def _take_accepted(self, handles: list[Any]) -> None:
        self._accepted += handles
        if self._family:
            # Its result may have been told to an elder before the broker knew of this one.
            self._to_attach += [handle for handle in handles if self._family.accept(handle)]

    def _landed(self, number: int) -> _Batch | None:
        batch = self._in_flight.pop(number, None)
        if batch is not None:
            self._in_flight_jobs -= len(batch.handles)
            self._in_flight_bytes -= batch.size
        return batch

    def _sort_out(self, batch: _Batch, refusals: list[messages.Refused]) -> None:
        """Part of a batch was not taken; an offset of -1 means all of it."""
        told: dict[int, messages.Refused] = {}
        for refusal in refusals:
            offsets = range(len(batch.handles)) if refusal.offset < 0 else (refusal.offset,)
            for offset in offsets:
                told.setdefault(offset, refusal)
        for offset, handle in enumerate(batch.handles):
            answer = told.get(offset)
            if answer is None:
                self._take_accepted([handle])
            elif answer.code in _ELSEWHERE:
                self._returned.append(handle)
            else:
                later_s = answer.retry_after_ms / 1000
                error = errors.error_of(answer.code, answer.text, answer.remedy, later_s)
                self._refuse_all([handle], error)

    def _on_results(self, message: messages.Results, _corr_id: int) -> None:
        for run in message.runs:
            if self._family:
                self._tell_families(run)
                continue
            before = len(self._open)
            handles = list(map(self._open.pop, run.ids, repeat(None)))
            if len(self._open) != before:
                self._effects.append(JobsDone(run, handles))
        pairs = [
            (handle, ended) for ended in message.ended for handle in self._family.settle(ended.id)
        ]
        if pairs:
            self._effects.append(JobsEnded(pairs))

    def _tell_families(self, run: ResultRun) -> None:
        """Some ids may have several handles: the first of each is told in one go, then the rest."""
        rounds: list[list[Any]] = []
        for offset, job_id in enumerate(run.ids):
            for place, handle in enumerate(self._family.settle(job_id)):
                if place == len(rounds):
                    rounds.append([None] * len(run.ids))
                rounds[place][offset] = handle
        self._effects += [JobsDone(run, handles) for handles in rounds]

    def _on_attached(self, message: messages.Attached, corr_id: int) -> None:
        handles = self._attaching.pop(corr_id, None)
        if handles is None:
            return
        unknown = set(message.unknown)
        for handle in handles:
            if not self._family.is_open(handle):
                continue
            if handle.job_id not in unknown:
                self._family.accept(handle)
                self._accepted.append(handle)
            elif handle.terms is None:
                error = errors.UnknownJob(
                    f"no job {handle.job_id!r} is known",
                    remedy="finished jobs are forgotten after their retention",
                )
                self._refuse_open(handle, error)
            else:
                # Accepted once, and the broker has no memory of it: its history was replaced.
                self._waiting.append(handle)

    def _on_answer(self, message: messages.Answer, corr_id: int) -> None:
        question = self._asking.pop(corr_id, None)
        if question is not None:
            self._effects.append(Answered(question.handle, message.body))
            return
        handles, error = self._uses.answered(corr_id, message.body)
        if error is None:
            self._waiting.extendleft(reversed(handles))
        else:
            self._refuse_all(handles, error)

    def _on_refusal(self, message: messages.Refusal, corr_id: int) -> None:
        error = error_from(message)
        if (batch := self._landed(corr_id)) is not None:
            if message.code in _ELSEWHERE:
                # Nothing more goes out on this connection, or the order would break.
                self._returned += batch.handles
                return
            self._refuse_all(batch.handles, error)
        elif (question := self._asking.pop(corr_id, None)) is not None:
            self._effects.append(AskRefused(question.handle, error))
        elif (handles := self._attaching.pop(corr_id, None)) is not None:
            self._refuse_all(handles, error)
        elif (unsent := self._uses.refused(corr_id)) is not None:
            if message.code in _ELSEWHERE:
                self._returned += unsent
            else:
                self._refuse_all(unsent, error)
        elif (sid := self._subscribing.pop(corr_id, None)) is not None:
            self._patterns.pop(sid, None)
            self._effects.append(SubscribeRefused(sid, error))
        elif not self.transfers.heard(message, 0, corr_id):
            self._effects.append(
                Log("warning", "broker.refused", {"code": message.code, "reason": message.text})
            )

    def _on_delivery(self, message: Delivery, _corr_id: int) -> None:
        self._delivered.append(message)

    def _on_progress(self, message: messages.JobProgress, _corr_id: int) -> None:
        first = self._open.get(message.id)
        if first is not None:
            handles = [first, *self._family.accepted(message.id)]
            self._effects.append(ProgressMade(handles, message.attempt, message.body))

    # -------------------------------------------------------------- bookkeeping

    def _refuse_open(self, handle: Any, error: errors.EkidenError) -> None:
        """This handle ends with `error`; others of the same id have answers of their own."""
        if self._family.is_open(handle):
            self._family.remove(handle)
            self._refused.append((handle, error))

    def _refuse_all(self, handles: list[Any], error: errors.EkidenError) -> None:
        if isinstance(error, errors.UnknownCache) and handles:
            self._uses.unlearn(handles[0].terms.caches)
            error.remedy = error.remedy or UNKNOWN_REMEDY
        for handle in handles:
            self._refuse_open(handle, error)

    def _refuse(self, handles: Iterable[Any], error: errors.EkidenError) -> None:
        self._refused += [(handle, error) for handle in handles]

    def _take_news(self) -> list[Any]:
        """What the layer above shall know: accepted before settled, and what was published before
        the answers that came after it."""
        news: list[Any] = []
        if self._accepted:
            news.append(JobsAccepted(self._accepted))
            self._accepted = []
        if self._delivered:
            news.append(Deliveries(self._delivered))
            self._delivered = []
        news += self._effects
        self._effects = []
        news += self.transfers.take_effects()
        if self._refused:
            news.append(JobsRefused(self._refused))
            self._refused = []
        return news


def _closed() -> errors.Closed:
    return errors.Closed("the client was closed", remedy="attach to the job with a new client")
