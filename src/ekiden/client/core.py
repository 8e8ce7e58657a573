"""What the blocking and the async client share: the machine on a loop, and what resolves futures.

Callers hand over futures and requests through plain lists and wake the loop once for all that
gathers until it runs; there is no hop per job. Appending to a list and cutting off its head are
single steps of the interpreter, so callers in several threads need no lock.

Everything that begins with `_on_` or `_do_` runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import Struct

from ekiden import errors, limits
from ekiden.client import contract, futures
from ekiden.client.bulk import Bulk
from ekiden.client.contract import Asking, Attaching, Leaving, Submitting
from ekiden.client.futures import JobFuture
from ekiden.client.ids import IdMaker
from ekiden.client.machine import ClientMachine
from ekiden.client.options import (
    JobOptions,
    TermsBook,
    check_params,
    make_body,
    to_bytes,
    too_large,
)
from ekiden.client.programs import ProgramWork
from ekiden.client.settings import Settings
from ekiden.core.subjects import check_pattern
from ekiden.machine import Log
from ekiden.model.ids import check_job_id
from ekiden.model.jobs import FORM_PLAIN, FORM_PROGRAM
from ekiden.model.work import FileRef
from ekiden.world.codecs import CODECS
from ekiden.world.keys import find_key
from ekiden.world.loop import Driver
from ekiden.world.network import Network
from ekiden.world.porter import Porter

# A caller looks at how many jobs are pending once per so many submits: looking costs more than one.
_BUDGET: Final = 1000

# Gathered before the caller gives way to the loop's thread, which otherwise has to wait for the
# interpreter to switch (5 ms) while a busy caller fills memory.
GATHER_MAX: Final = 1000

# A connection lingers at most LINGER_NS; whoever closes a client is not kept much longer.
_CLOSE_S_MAX: Final = limits.LINGER_NS / limits.NS + 1

_PAYLOAD_BYTES_MAX: Final = limits.PAYLOAD_BYTES_MAX

_log = logging.getLogger("ekiden.client")
_log.addHandler(logging.NullHandler())
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Message(Struct, frozen=True):
    """Something published."""

    subject: str
    payload: bytes


class Reply(Protocol):
    """What an answer is put into: a future of threads or of a loop."""

    def done(self) -> bool: ...
    def set_result(self, value: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...


class Subscription:
    """One pattern. What nobody looked at is kept up to a bound; then the oldest is dropped."""

    def __init__(self, core: Core, pattern: str, callback: Callable[[Message], Any] | None) -> None:
        self.pattern = check_pattern(pattern)
        self.dropped = 0
        """How many messages were dropped because nobody looked at them in time."""
        self._core = core
        self._callback = callback
        self._backlog: deque[Message] = deque()
        self._error: errors.EkidenError | None = None
        self._sid = core.subscribe(self)

    def take_nowait(self) -> Message | None:
        """The oldest message, or None if there is none now."""
        try:
            return self._backlog.popleft()
        except IndexError:
            return None

    def deliver(self, message: Message) -> None:
        """Called on the loop for each message."""
        if self._callback is not None:
            try:
                self._callback(message)
            except Exception:  # noqa: BLE001 - a user's mistake must not end the client
                _log.exception("the callback of subscription %s failed", self.pattern)
            return
        if len(self._backlog) >= limits.SUBSCRIPTION_BACKLOG:
            self._backlog.popleft()
            self.dropped += 1
        self._backlog.append(message)
        self._notify()

    def end(self, error: errors.EkidenError | None) -> None:
        """No more messages will come."""
        self._error = error or errors.Closed("the subscription was closed")
        self._notify()

    def _notify(self) -> None:
        """Tell whoever waits in an iteration."""

    def _stop(self) -> None:
        if self._error is None:
            self._core.unsubscribe(self._sid)
            self.end(None)


class Core:
    """A client without a way to wait. `new_reply` makes what answers are put into."""

    def __init__(
        self,
        settings: Settings,
        future_type: type[JobFuture],
        new_reply: Callable[[], Any],
        *,
        threaded: bool,
    ) -> None:
        self.settings = settings
        self.condition = threading.Condition()
        self.inbox: list[JobFuture] = []
        self.budget = 0
        self.poked = False
        self.connected = False
        self.closing = False
        self.new_reply = new_reply
        self.machine = ClientMachine(
            settings.addresses,
            settings.client_id,
            secrets.token_hex(8),
            self._key_for,
            random.random,
            batch_jobs=settings.batch_jobs,
            software=_software(),
            codecs=CODECS,
        )
        self._future_type = future_type
        self._threaded = threaded
        self._terms = TermsBook()
        self._requests: list[Any] = []
        self._subscriptions: dict[int, Subscription] = {}
        self._sids = itertools.count(1)
        self._ids = IdMaker()
        self._up_waiters: list[Reply] = []
        self._room_waiters: list[Reply] = []
        self._stopped: errors.EkidenError | None = None
        self._refusal: errors.EkidenError | None = None
        self._thread_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: Driver | None = None
        self._network: Network | None = None
        self._bulk: Bulk | None = None

    # -------------------------------------------------------------- from any thread

    def make(
        self, name: str, payload: Any, args: Iterable[Any], job_id: str | None, options: JobOptions
    ) -> JobFuture:
        """A future for a job that is not handed over yet. Raises what is wrong with the call."""
        if type(payload) is bytes and not args and len(payload) <= _PAYLOAD_BYTES_MAX:
            terms = self._terms.terms(name, FORM_PLAIN, options)
        else:
            form, payload = make_body(payload, args)
            terms = self._terms.terms(name, form, options)
        if job_id is None:
            job_id = self._ids.one()
        else:
            check_job_id(job_id)
        return self._future_type(self, job_id, payload, terms)

    def make_many(
        self,
        name: str,
        payloads: Iterable[Any],
        job_ids: Iterable[str] | None,
        options: JobOptions,
    ) -> list[JobFuture]:
        """Futures for jobs that share everything but payload and id; all are checked first."""
        terms = self._terms.terms(name, FORM_PLAIN, options)
        bodies = [each if type(each) is bytes else to_bytes(each) for each in payloads]
        largest = max(map(len, bodies), default=0)
        if largest > _PAYLOAD_BYTES_MAX:
            raise too_large(largest)
        make = self._future_type
        ids = self._ids_for(bodies, job_ids)
        return [make(self, job_id, body, terms) for job_id, body in zip(ids, bodies, strict=True)]

    def make_programs(self, work: ProgramWork, job_ids: Iterable[str] | None) -> list[JobFuture]:
        """Futures for jobs of a program; all are checked first."""
        largest = max(map(len, work.bodies), default=0)
        if largest > _PAYLOAD_BYTES_MAX:
            raise too_large(largest)
        terms = self._terms.terms(
            work.name, FORM_PROGRAM, work.options, work.shared, work.shared_blobs
        )
        ids = self._ids_for(work.bodies, job_ids)
        make = self._future_type
        made = [make(self, one, body, terms) for one, body in zip(ids, work.bodies, strict=True)]
        for at, blobs in work.blobs.items():
            made[at].blobs = blobs
        return made

    def _ids_for(self, bodies: list[bytes], job_ids: Iterable[str] | None) -> list[str]:
        if job_ids is None:
            return self._ids.many(len(bodies))
        ids = [check_job_id(job_id) for job_id in job_ids]
        if len(ids) != len(bodies):
            raise errors.WrongUsage(
                f"{len(ids)} job ids for {len(bodies)} payloads", remedy="give one id per payload"
            )
        return ids

    def read_stored(self, ref: FileRef) -> bytes:
        """Bytes that lie in the broker's store, waited for."""
        self._check_may_fetch()
        data: bytes = self.fetch_blob(ref.blob, ref.size, None).result()
        return data

    def save_stored(self, ref: FileRef, target: Path) -> None:
        """Write such bytes to a file, waited for."""
        self._check_may_fetch()
        self.fetch_blob(ref.blob, ref.size, target).result()

    def _check_may_fetch(self) -> None:
        self.check_may_wait()
        if not self._threaded:
            raise errors.WrongUsage(
                "this lies in the broker's store and must be waited for",
                remedy="await client.read(file) or client.save(result, folder)",
            )

    def poke(self) -> None:
        """Have the loop look at what was handed over. One wake serves all until it runs."""
        if self._stopped is not None:
            self._refuse_inbox(self._stopped)
            return
        if self._loop is None:
            raise _not_started()
        if not self.poked:
            self.poked = True
            try:
                if self._threaded:
                    self._loop.call_soon_threadsafe(self._do_drain)
                else:
                    self._loop.call_soon(self._do_drain)
            except RuntimeError:
                self._refuse_inbox(_closed())

    def request(self, event: Any) -> None:
        """Hand over anything but a submit."""
        self.check_open()
        self._requests.append(event)
        self.poke()

    def check_open(self) -> None:
        """Raise if the client takes nothing new."""
        if self._loop is None:
            raise _not_started()
        if self._stopped is not None:
            raise self._stopped
        if self.closing:
            raise _closed()

    @property
    def pending(self) -> int:
        """Jobs that are not accepted yet."""
        return len(self.inbox) + self.machine.pending

    def has_room(self) -> bool:
        """Whether a job may be handed over; if so, `budget` says how many before asking again."""
        self.check_open()
        self.budget = min(self.settings.pending_max - self.pending, _BUDGET)
        return self.budget > 0

    def wait_room(self) -> Any:
        """A reply that is set when jobs may be handed over again."""
        reply = self.new_reply()
        self._call(self._do_wait_room, reply)
        return reply

    def attach(self, job_id: str) -> JobFuture:
        """A future for a job that exists already."""
        future = self._future_type(self, check_job_id(job_id), b"", None)
        self.request(Attaching([future]))
        return future

    def ask(self, verb: str, params: dict[str, Any]) -> Any:
        """A reply that gets the answer of the broker."""
        reply = self.new_reply()
        self.request(Asking(reply, verb, check_params(params)))
        return reply

    def put_blob(self, source: bytes | Path) -> Any:
        """A reply that gets the hash and size of these bytes once the broker has them durably."""
        return self.carry_out(lambda porter: porter.put(source))

    def fetch_blob(self, blob: str, size: int, target: Path | None) -> Any:
        """A reply that gets the bytes, or None once they are whole in the file `target`."""
        if target is None:
            return self.carry_out(lambda porter: porter.read(blob, size))
        return self.carry_out(lambda porter: porter.fetch(blob, size, target))

    def carry_out(self, work: Callable[[Porter], Coroutine[Any, Any, Any]]) -> Any:
        """A reply that gets the outcome of `work`, which is done on the loop; giving the reply up
        ends it."""
        self.check_open()
        assert self._bulk is not None
        bulk, reply = self._bulk, self.new_reply()
        self._call(lambda reply: bulk.start(work, reply), reply)
        return reply

    async def ask_here(self, verb: str, **params: Any) -> Any:
        """The broker's answer, for those who are on the loop. Raises its refusal, `TimeoutError`,
        or why there is no broker."""
        reply = asyncio.get_running_loop().create_future()
        self.request(Asking(reply, verb, check_params(params)))
        timeout_s = self.settings.ask_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            if not self.connected:
                raise self.trouble() from None
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None

    def wait_up(self) -> Any:
        """A reply that is set when a broker has welcomed us."""
        self.check_open()
        reply = self.new_reply()
        self._call(self._do_wait_up, reply)
        return reply

    def trouble(self) -> errors.EkidenError:
        """Why there is no connection, in the words of the last try."""
        where = ", ".join(self.settings.addresses)
        return self.machine.link.last_error or errors.Unreachable(
            f"no broker has answered at {where} yet", remedy="start one with: ekiden up"
        )

    def subscribe(self, subscription: Subscription) -> int:
        """Deliver to `subscription` from now on."""
        self.check_open()
        sid = next(self._sids)
        self._subscriptions[sid] = subscription
        self.request(contract.Subscribing(sid, subscription.pattern))
        return sid

    def unsubscribe(self, sid: int) -> None:
        """Deliver no more."""
        if self._subscriptions.pop(sid, None) is not None and self._stopped is None:
            self._requests.append(contract.Unsubscribing(sid))
            self.poke()

    def cancel_job(self, future: JobFuture, timeout: float | None) -> bool:
        """Have a job cancelled, waiting for it: for the blocking client."""
        self.check_may_wait()
        future.wait_accepted(timeout)
        return was_cancelled(self.ask("cancel", {"ids": [future.job_id]}).result(timeout))

    def check_may_wait(self) -> None:
        """Raise if this thread is the one that would have to end the wait."""
        if threading.get_ident() == self._thread_id:
            raise errors.WrongUsage(
                "waiting here would wait for itself: this is the client's own thread",
                remedy="do not wait inside a callback; await the future in async code",
            )

    # -------------------------------------------------------------- life, on the loop

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._driver is not None

    def start(self) -> None:
        """Begin. Called on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._driver = Driver(self.machine, perform=self._table())
        self._bulk = Bulk(self._driver)
        self._driver.failed.add_done_callback(self._on_ended)
        self._network = Network(self._driver)
        self._driver.wake()

    async def stop(self, flush_timeout_s: float) -> None:
        """Wait until what was submitted is accepted, at most so long; then end what is open."""
        self.closing = True
        self.budget = 0
        assert self._driver is not None
        assert self._network is not None
        if self.pending and self._refusal is None:
            self._do_drain()
            try:
                async with asyncio.timeout(flush_timeout_s):
                    while self.pending and self._refusal is None:
                        reply = asyncio.get_running_loop().create_future()
                        self._room_waiters.append(reply)
                        await reply
            except TimeoutError:
                _log.warning("closed with %d jobs not accepted", self.pending)
        self._stopped = _closed()
        self._do_drain()
        self._driver.feed(Leaving())
        self._driver.turn()
        if self._bulk is not None:
            await self._bulk.close(self._stopped)
        await _wait_closed(self._network)
        self._driver.stop()
        self._refuse_inbox(self._stopped)

    def _table(self) -> dict[type, Callable[[Any], None]]:
        return {
            Log: _write_log,
            contract.LinkUp: self._on_up,
            contract.LinkDown: self._on_down,
            contract.RefusedByAll: self._on_refused_by_all,
            contract.JobsAccepted: self._on_accepted,
            contract.JobsDone: self._on_done,
            contract.JobsEnded: self._on_job_ends,
            contract.JobsRefused: self._on_refused,
            contract.Answered: self._on_answered,
            contract.AskRefused: self._on_ask_refused,
            contract.Deliveries: self._on_deliveries,
            contract.SubscribeRefused: self._on_subscribe_refused,
            contract.ProgressMade: self._on_progress,
        }

    def _do_drain(self) -> None:
        self.poked = False
        assert self._driver is not None
        if self._driver.ended:
            self._refuse_inbox(self._stopped or _closed())
            return
        if count := len(self.inbox):
            handles = self.inbox[:count]
            del self.inbox[:count]
            self._driver.feed(Submitting(handles))
        if count := len(self._requests):
            events = self._requests[:count]
            del self._requests[:count]
            for event in events:
                self._driver.feed(event)

    def _call(self, work: Callable[[Any], None], reply: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(work, reply)
        except RuntimeError:
            reply.set_exception(_closed())

    def _do_wait_room(self, reply: Reply) -> None:
        if self.pending < self.settings.pending_max:
            reply.set_result(None)
        elif self._stopped is not None:
            reply.set_exception(self._stopped)
        else:
            self._room_waiters.append(reply)

    def _do_wait_up(self, reply: Reply) -> None:
        if self.connected:
            reply.set_result(None)
        elif self._refusal is not None:
            reply.set_exception(self._refusal)
        else:
            self._up_waiters.append(reply)

    def _refuse_inbox(self, error: errors.EkidenError) -> None:
        count = len(self.inbox)
        handles = self.inbox[:count]
        del self.inbox[:count]
        futures.fail(self.condition, [(handle, error) for handle in handles])

    def _key_for(self, address: str) -> bytes:
        if self.settings.key is not None:
            return self.settings.key
        return find_key(address, key_file=self.settings.key_file)

    # -------------------------------------------------------------- effects of the machine

    def _on_up(self, effect: contract.LinkUp) -> None:
        self.connected = True
        self._refusal = None
        _log.debug("connected to %s", effect.address)
        self._answer_all(self._up_waiters, None)

    def _on_down(self, _effect: contract.LinkDown) -> None:
        self.connected = False

    def _on_refused_by_all(self, effect: contract.RefusedByAll) -> None:
        self._refusal = effect.error
        self._answer_all(self._up_waiters, effect.error)

    def _on_accepted(self, effect: contract.JobsAccepted) -> None:
        futures.accept(self.condition, effect.handles)
        if self._room_waiters:
            self._make_room()

    def _on_done(self, effect: contract.JobsDone) -> None:
        futures.finish_run(self.condition, effect.run, effect.handles)

    def _on_job_ends(self, effect: contract.JobsEnded) -> None:
        pairs = [(handle, futures.error_of_end(ended)) for handle, ended in effect.pairs]
        futures.fail(self.condition, pairs)

    def _on_refused(self, effect: contract.JobsRefused) -> None:
        futures.fail(self.condition, effect.pairs)
        if self._room_waiters:
            self._make_room()

    def _make_room(self) -> None:
        """Let callers go on once there is room for a good many: one by one would be a crawl."""
        if self.pending <= (0 if self.closing else self.settings.pending_max * 3 // 4):
            self._answer_all(self._room_waiters, None)

    def _on_answered(self, effect: contract.Answered) -> None:
        if not effect.handle.done():
            effect.handle.set_result(effect.body)

    def _on_ask_refused(self, effect: contract.AskRefused) -> None:
        if not effect.handle.done():
            effect.handle.set_exception(effect.error)

    def _on_deliveries(self, effect: contract.Deliveries) -> None:
        for message in effect.messages:
            subscription = self._subscriptions.get(message.sid)
            if subscription is not None:
                subscription.deliver(Message(message.subject, message.payload))

    def _on_subscribe_refused(self, effect: contract.SubscribeRefused) -> None:
        subscription = self._subscriptions.pop(effect.sid, None)
        if subscription is not None:
            subscription.end(effect.error)

    def _on_progress(self, effect: contract.ProgressMade) -> None:
        for handle in effect.handles:
            handle.note_progress(effect.attempt, effect.body)

    def _on_ended(self, failed: asyncio.Future[None]) -> None:
        """The driver has ended: on purpose, or because of a bug, which callers must hear of."""
        bug = failed.exception()
        if bug is not None:
            self._stopped = errors.Fault(
                f"the client failed: {bug!r}", remedy="this is a bug in ekiden; please report it"
            )
            _log.error("the client failed", exc_info=bug)
            everyone = [(handle, self._stopped) for handle in self.machine.everyone()]
            futures.fail(self.condition, everyone)
            self._refuse_inbox(self._stopped)
        error: errors.EkidenError = self._stopped or _closed()
        self.connected = False
        if self._bulk is not None:
            self._bulk.porter.close(error)
        self._answer_all(self._up_waiters, error)
        self._answer_all(self._room_waiters, error)
        for reply in self.machine.questions():
            if not reply.done():
                reply.set_exception(error)
        for subscription in list(self._subscriptions.values()):
            subscription.end(error)
        self._subscriptions.clear()

    def _answer_all(self, waiters: list[Reply], error: errors.EkidenError | None) -> None:
        told = waiters[:]
        waiters.clear()
        for reply in told:
            if reply.done():
                continue
            if error is None:
                reply.set_result(None)
            else:
                reply.set_exception(error)


async def _wait_closed(network: Network) -> None:
    """Close the network, but never wait for it longer than a connection may linger."""
    # A dial that has just come through ends by itself in the next two turns of the loop; cut off
    # in between, its connection would never report its end.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(_CLOSE_S_MAX):
            await network.wait_closed()
    except TimeoutError:
        _log.warning("a connection did not end in time; left behind")


def id_batches(job_ids: str | Iterable[str]) -> list[list[str]]:
    """Ids in parts that fit a question each."""
    ids = [job_ids] if isinstance(job_ids, str) else [check_job_id(each) for each in job_ids]
    size = limits.BATCH_JOBS_MAX
    return [ids[at : at + size] for at in range(0, len(ids), size)] or [[]]


def sum_up(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One answer out of those to the parts: counts are added, lists joined."""
    total: dict[str, Any] = {}
    for answer in answers:
        for name, value in answer.items():
            total[name] = total[name] + value if name in total else value
    return total


def was_cancelled(answer: Any) -> bool:
    """Whether the answer to `cancel` of one job says that it will not go on."""
    return bool(answer.get("cancelled") or answer.get("cancelling"))


def thread_reply() -> Future[Any]:
    """A reply for callers in threads."""
    return Future()


def _not_started() -> errors.WrongUsage:
    return errors.WrongUsage(
        "the client has not begun", remedy="use it with: async with AsyncClient(...) as client"
    )


def _closed() -> errors.Closed:
    return errors.Closed("the client is closed", remedy="attach to the job with a new client")


def _write_log(effect: Log) -> None:
    facts = " ".join(f"{name}={value!r}" for name, value in effect.facts.items())
    _log.log(_LEVELS.get(effect.level, 20), "%s %s", effect.event, facts)


def _software() -> str:
    try:
        return f"ekiden/{version('ekiden')}"
    except PackageNotFoundError:
        return "ekiden"
