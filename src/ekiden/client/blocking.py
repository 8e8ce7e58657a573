"""The blocking client: a portal into the core, which runs on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_all
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Literal, TypeAlias, TypeVar, Unpack, overload

from ekiden import errors, limits
from ekiden.client.cachebook import CacheBook
from ekiden.client.calls import Calls
from ekiden.client.core import (
    GATHER_MAX,
    Core,
    Message,
    Subscription,
    id_batches,
    sum_up,
    thread_reply,
)
from ekiden.client.functions import FunctionFuture, Functions
from ekiden.client.futures import JobFuture
from ekiden.client.options import JobOptions, make_message
from ekiden.client.programs import (
    FileSource,
    ProgramArgs,
    ProgramOptions,
    draft,
    program_terms,
)
from ekiden.client.results import JobResult
from ekiden.client.settings import make_settings
from ekiden.client.stock import Stock
from ekiden.world import loop

MAP_WINDOW: Final = 10_000
"""Jobs `map` has open at once: enough to keep a grid busy, little enough to hold in memory."""


T = TypeVar("T")
V = TypeVar("V")

Submit: TypeAlias = Callable[[Iterable[Any]], list[Any]]
"""Hands over a job for each item."""


class Client(Calls, Stock):
    """A caller of the grid. Use it as a context manager, from as many threads as you like.

    It connects in the background and for as long as it lives: making one never fails because no
    broker is there; `wait_connected` does. Jobs submitted meanwhile wait, up to `pending_max`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        client_id: str | None = None,
        key: bytes | None = None,
        key_file: Path | str | None = None,
        pending_max: int = limits.PENDING_MAX,
        batch_jobs: int = limits.CLIENT_BATCH_JOBS,
        ask_timeout_s: float = 30.0,
        close_timeout_s: float = 5.0,
    ) -> None:
        """`address` is `host:port`, or several with commas; else EKIDEN_CONNECT, else this machine.

        The key is looked up by address unless given. `ask_timeout_s` bounds questions such as
        `stats`; `close_timeout_s` how long `close` waits for what is not accepted yet.
        """
        settings = make_settings(
            address,
            client_id=client_id,
            key=key,
            key_file=key_file,
            pending_max=pending_max,
            batch_jobs=batch_jobs,
            ask_timeout_s=ask_timeout_s,
            close_timeout_s=close_timeout_s,
        )
        self._core = Core(settings, JobFuture, thread_reply, threaded=True)
        self._book = CacheBook(self._core)
        self._functions = Functions(self._core, FunctionFuture)
        self._thread = _LoopThread(self._core)
        self._closing = threading.Lock()
        self._exit_hook = _close_at_exit(self)

    # -------------------------------------------------------------- life

    @property
    def client_id(self) -> str:
        """Under whose name jobs are submitted."""
        return self._core.settings.client_id

    @property
    def connected(self) -> bool:
        """Whether a broker has welcomed us and is there now, as far as we know."""
        return self._core.connected

    def wait_connected(self, timeout: float | None = None) -> None:
        """Return when a broker has welcomed us.

        Raises `Unreachable` with the last reason when time is up, and at once `Unauthenticated` or
        `VersionMismatch` if that is what all brokers say.
        """
        self._core.check_may_wait()
        try:
            self._core.wait_up().result(timeout)
        except TimeoutError:
            raise self._core.trouble() from None

    def close(self, timeout: float | None = None) -> None:
        """Wait until what was submitted is accepted, at most `timeout` seconds; then leave.

        Accepted jobs go on without us. Futures still open end with `Closed`.
        """
        self._core.check_may_wait()
        with self._closing:
            atexit.unregister(self._exit_hook)
            wait_s = self._core.settings.close_timeout_s if timeout is None else timeout
            deadline = time.monotonic() + wait_s
            # Calls are submitted once the broker has their function.
            wait_all(self._functions.preparing(), wait_s)
            self._thread.end(max(deadline - time.monotonic(), 0))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self.close(0.0 if kind is not None else None)

    # -------------------------------------------------------------- jobs

    def submit(
        self,
        name: str,
        *,
        payload: Any = b"",
        args: Iterable[Any] = (),
        job_id: str | None = None,
        **options: Unpack[JobOptions],
    ) -> JobFuture:
        """Hand over one job and return at once; it runs where a worker has a handler `name`.

        `payload` is bytes, text or what JSON can hold. The job is durable when the future's
        `accepted` is set; until then the client submits it again after every reconnect under the
        same id, so it is one job. With `pending_max` jobs not accepted, the call waits.

        Raises only what is wrong with the call itself (`WrongUsage`, `BadId`, `TooLarge`,
        `Closed`); what the broker refuses comes from the future. For options see `JobOptions`.
        """
        core = self._core
        future = core.make(name, payload, args, job_id, options)
        if core.budget <= 0:
            self._wait_room()
        core.budget -= 1
        core.inbox.append(future)
        if not core.poked:
            core.poke()
        elif len(core.inbox) >= GATHER_MAX:
            # Give way: the loop's thread has a batch to take.
            time.sleep(0)
        return future

    def submit_many(
        self,
        name: str,
        payloads: Iterable[Any],
        *,
        job_ids: Iterable[str] | None = None,
        **options: Unpack[JobOptions],
    ) -> list[JobFuture]:
        """Hand over one job per payload, in order; the cheapest way for many. See `submit`.

        All payloads are checked before the first is handed over.
        """
        made = self._core.make_many(name, payloads, job_ids, options)
        self._hand_over(made)
        return made

    def _hand_over(self, made: list[JobFuture]) -> None:
        """Submit these in order, waiting for room."""
        core = self._core
        done = 0
        while done < len(made):
            if core.budget <= 0:
                self._wait_room()
            # Other threads draw on the same budget: it may be gone by now.
            batch = made[done : done + max(core.budget, 1)]
            core.budget -= len(batch)
            core.inbox.extend(batch)
            done += len(batch)
            core.poke()

    @overload
    def map(
        self,
        name: str,
        payloads: Iterable[Any],
        *,
        in_order: bool = True,
        window: int = MAP_WINDOW,
        return_errors: Literal[False] = False,
        **options: Unpack[JobOptions],
    ) -> Iterator[JobResult]: ...

    @overload
    def map(
        self,
        name: str,
        payloads: Iterable[Any],
        *,
        in_order: bool = True,
        window: int = MAP_WINDOW,
        return_errors: bool,
        **options: Unpack[JobOptions],
    ) -> Iterator[JobResult | errors.EkidenError]: ...

    @overload
    def map(
        self,
        name: Callable[[T], V],
        payloads: Iterable[T],
        *,
        in_order: bool = True,
        window: int = MAP_WINDOW,
        return_errors: Literal[False] = False,
        **options: Unpack[JobOptions],
    ) -> Iterator[V]: ...

    @overload
    def map(
        self,
        name: Callable[[T], V],
        payloads: Iterable[T],
        *,
        in_order: bool = True,
        window: int = MAP_WINDOW,
        return_errors: bool,
        **options: Unpack[JobOptions],
    ) -> Iterator[V | Exception]: ...

    def map(
        self,
        name: Any,
        payloads: Iterable[Any],
        *,
        in_order: bool = True,
        window: int = MAP_WINDOW,
        return_errors: bool = False,
        **options: Unpack[JobOptions],
    ) -> Iterator[Any]:
        """Results of one job per payload, as an iterator that reads payloads as it goes; with a
        function instead of a name, its value for each.

        At most `window` jobs are open at once. Not `in_order`: as they come. A job that failed
        raises, or with `return_errors` its error takes the place of the result.
        """
        if window < 1:
            raise errors.WrongUsage(f"window is {window}", remedy="give at least 1")
        take = self._in_order if in_order else self._as_done
        for future in take(self._submitter(name, options), iter(payloads), window):
            error = future.exception()
            if error is None:
                yield future.result()
            elif return_errors and isinstance(error, Exception):
                yield error
            else:
                raise error

    def submit_program(
        self,
        command: str,
        args: Sequence[Any] = (),
        *,
        stdin: Any = None,
        files: Mapping[str, FileSource] | None = None,
        job_id: str | None = None,
        **options: Unpack[ProgramOptions],
    ) -> JobFuture:
        """Run a program: `command` is a name on a worker's allow-list, or with `any_program=True`
        what a shell would find there. It gets `args` as they are, no shell in between, and runs in
        a fresh folder with `files` in it.

        The result has its `stdout`, `stderr` and the `files` it left. A file that is too large to
        travel with the job is put in the broker's store first, which the call waits for.
        """
        call = ProgramArgs(args, stdin, files)
        job_ids = None if job_id is None else [job_id]
        return self.submit_programs(command, [call], job_ids=job_ids, **options)[0]

    def submit_programs(
        self,
        command: str,
        calls: Iterable[ProgramArgs],
        *,
        job_ids: Iterable[str] | None = None,
        manifest: str = "",
        **options: Unpack[ProgramOptions],
    ) -> list[JobFuture]:
        """One job per call, in order; see `submit_program`. `manifest` is a hash to find the list
        of inputs by that belongs to a run."""
        calls, options = self._look_up(calls, options)
        terms = program_terms(command, options, manifest)
        drafts = [draft(call) for call in calls]
        stored = self._store(terms.common.to_store)
        apart = self._store([source for each in drafts for source in each.to_store])
        made = self._core.make_programs(terms.work(stored, drafts, apart), job_ids)
        self._hand_over(made)
        return made

    def attach(self, job_id: str) -> JobFuture:
        """A future for a job submitted earlier, also by another process.

        It ends with `UnknownJob` if there is none.
        """
        return self._core.attach(job_id)

    # -------------------------------------------------------------- questions

    def ask(self, verb: str, **params: Any) -> Any:
        """Put a question or a change to the broker and return its answer. Raises its refusal."""
        return self._answer(self._core.ask(verb, params))

    def job(self, job_id: str) -> dict[str, Any]:
        """All that is known of a job: state, attempts and their causes, why it waits."""
        return dict(self.ask("job", id=job_id))

    def jobs(self, **filters: Any) -> dict[str, Any]:
        """A page of jobs: `state`, `subject` (a pattern), `client`, `run`, `limit`, `after`."""
        return dict(self.ask("jobs", **filters))

    def cancel(self, job_ids: str | Iterable[str]) -> dict[str, Any]:
        """Cancel jobs by id; says how many were cancelled, are being, or were settled already."""
        return sum_up(self.ask("cancel", ids=ids) for ids in id_batches(job_ids))

    def stats(self) -> dict[str, Any]:
        """Counters of the broker."""
        return dict(self.ask("stats"))

    def workers(self) -> list[dict[str, Any]]:
        """The workers the broker knows."""
        return list(self.ask("workers")["workers"])

    # -------------------------------------------------------------- publish and subscribe

    def publish(self, subject: str, payload: Any = b"") -> None:
        """To every subscriber whose pattern matches, at once and never stored: it may be lost."""
        self._core.request(make_message(subject, payload))

    def subscribe(
        self, pattern: str, callback: Callable[[Message], Any] | None = None
    ) -> BlockingSubscription:
        """What is published on `pattern`: iterate over it, or have `callback` called.

        The callback runs in the client's own thread: keep it short, and do not wait in it.
        """
        return BlockingSubscription(self._core, pattern, callback)

    # -------------------------------------------------------------- inside

    def _answer(self, reply: Future[Any]) -> Any:
        self._core.check_may_wait()
        timeout_s = self._core.settings.ask_timeout_s
        try:
            return reply.result(timeout_s)
        except TimeoutError:
            if not self._core.connected:
                raise self._core.trouble() from None
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None

    def _wait_room(self) -> None:
        core = self._core
        while not core.has_room():
            core.check_may_wait()
            core.poke()
            core.wait_room().result()

    def _submitter(self, name: Any, options: JobOptions) -> Submit:
        if isinstance(name, str):
            return lambda some: self.submit_many(name, some, **options)
        function = self._functions.of(name)
        return lambda some: self._call_all(function, function.make_many(some, options))

    def _in_order(self, submit: Submit, source: Iterator[Any], window: int) -> Iterator[JobFuture]:
        live: deque[JobFuture] = deque()
        while True:
            # Refilled by halves: a job at a time would be a frame at a time.
            if len(live) <= window // 2:
                live += submit(islice(source, window - len(live)))
            if not live:
                return
            yield live.popleft()

    def _as_done(self, submit: Submit, source: Iterator[Any], window: int) -> Iterator[JobFuture]:
        done: SimpleQueue[JobFuture] = SimpleQueue()
        live = 0
        while True:
            if live <= window // 2:
                batch = submit(islice(source, window - live))
                for future in batch:
                    future.add_done_callback(done.put)
                live += len(batch)
            if not live:
                return
            yield done.get()
            live -= 1


class BlockingSubscription(Subscription):
    """Iterate over it to get messages as they come; `close` ends the iteration."""

    def __init__(self, core: Core, pattern: str, callback: Callable[[Message], Any] | None) -> None:
        self._news = threading.Condition()
        super().__init__(core, pattern, callback)

    def take(self, timeout: float | None = None) -> Message:
        """The next message. Raises TimeoutError, or what ended the subscription."""
        self._core.check_may_wait()
        with self._news:
            self._news.wait_for(lambda: self._backlog or self._error, timeout)
        message = self.take_nowait()
        if message is not None:
            return message
        if self._error is not None:
            raise self._error
        raise TimeoutError(f"nothing was published on {self.pattern!r} within {timeout} s")

    def wait_active(self) -> None:
        """Return when the broker has the subscription: what is published after this is delivered.

        Raises its refusal.
        """
        # The broker answers in order, so any answer will do.
        reply = self._core.ask("jobs", {"limit": 1})
        try:
            reply.result(self._core.settings.ask_timeout_s)
        except TimeoutError:
            raise self._core.trouble() from None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """No more messages."""
        self._stop()

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                yield self.take()
            except errors.Closed:
                return

    def __enter__(self) -> BlockingSubscription:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()


class _LoopThread:
    """Runs a core on a loop of its own until told to end."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._started = threading.Event()
        self._end: asyncio.Future[float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="ekiden-client", daemon=True)
        self._thread.start()
        self._started.wait()
        assert self._core.started, "the client's thread could not begin"

    def end(self, flush_timeout_s: float) -> None:
        """Stop the core and wait for the thread."""
        if not self._thread.is_alive():
            return
        assert self._loop is not None
        self._core.closing = True
        try:
            self._loop.call_soon_threadsafe(self._ask_end, flush_timeout_s)
        except RuntimeError:
            pass  # The loop has ended meanwhile.
        self._thread.join()

    def _ask_end(self, flush_timeout_s: float) -> None:
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(flush_timeout_s)

    def _run(self) -> None:
        try:
            loop.run(self._live())
        finally:
            self._started.set()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self._core.start()
        self._started.set()
        await self._core.stop(await self._end)


def _close_at_exit(client: Client) -> Callable[[], None]:
    """A program that forgets to close still hands over what it submitted."""
    found = weakref.ref(client)

    def close() -> None:
        if (alive := found()) is not None:
            alive.close()

    atexit.register(close)
    return close
