"""The async client: the core on the caller's own event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar, Unpack, overload

from ekiden import errors, limits
from ekiden.client.cachebook import CacheBook
from ekiden.client.calls import named_call
from ekiden.client.core import Core, Message, Subscription, id_batches, sum_up, was_cancelled
from ekiden.client.functions import CallableJobs, Functions, Opening
from ekiden.client.futures import JobFuture
from ekiden.client.options import JobOptions, make_message
from ekiden.client.programs import (
    FileSource,
    ProgramArgs,
    ProgramOptions,
    draft,
    program_terms,
)
from ekiden.client.results import JobResult, ResultFile
from ekiden.client.settings import make_settings
from ekiden.client.stock import AsyncStock
from ekiden.model.names import check_file_name

MAP_WINDOW: Final = 10_000
"""Jobs `map` has open at once: enough to keep a grid busy, little enough to hold in memory."""


T = TypeVar("T")
V = TypeVar("V")
P = ParamSpec("P")


class _LoopLatch:
    """What a coroutine waits on; told by the client on the same loop."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add_result(self, _future: Any) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)

    add_exception = add_cancelled = add_result

    def __await__(self) -> Generator[Any, None, None]:
        return self._waiter.__await__()


class AsyncJobFuture(JobFuture):
    """A job future to be awaited: `result = await future`. Giving up the wait leaves the job be."""

    def __await__(self) -> Generator[Any, None, JobResult]:
        if not self.done():
            latch = _LoopLatch()
            self.watch(latch)
            yield from latch.__await__()
        return super().result()

    def result(self, timeout: float | None = None) -> JobResult:
        """The result, if the job is done. It does not wait: await the future for that."""
        self._check_done()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """How the job ended without a result, if it is done. It does not wait."""
        self._check_done()
        return super().exception(timeout)

    async def wait_accepted(self, timeout: float | None = None) -> None:  # type: ignore[override]
        """Return once the job is committed. Raises what refused it, or TimeoutError."""
        async with asyncio.timeout(timeout):
            if not self.accepted and not self.done():
                latch = _LoopLatch()
                self.watch_accepted(latch)
                await latch
        if not self.accepted and (error := self.exception()) is not None:
            raise error

    async def cancel(self, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Have the job cancelled. True once that is committed, False if it was settled before."""
        if self.done():
            return self.cancelled()
        async with asyncio.timeout(timeout):
            await self.wait_accepted()
            assert isinstance(self.desk, Core)
            return was_cancelled(await self.desk.ask("cancel", {"ids": [self.job_id]}))

    def _check_done(self) -> None:
        if not self.done():
            raise asyncio.InvalidStateError(f"job {self.job_id!r} is not done; await the future")


class AsyncFunctionFuture(Opening, AsyncJobFuture):
    """A call of a function, to be awaited: `value = await future`. See `FunctionFuture`."""

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            latch = _LoopLatch()
            self.watch(latch)
            yield from latch.__await__()
        ref = self._stored
        if ref is not None:
            self.fetched((yield from self._fetch(ref).__await__()))
        return self.result()

    def result(self, timeout: float | None = None) -> Any:
        """The value, if it is here. It does not wait: await the future for that."""
        error = self.exception()
        if error is not None:
            raise error
        if self._stored is not None:
            raise asyncio.InvalidStateError(
                f"the value of job {self.job_id!r} lies at the broker; await the future"
            )
        return self._open_value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the function raised, if it is done. It does not wait."""
        self._check_done()
        return self._open_error()


class AsyncClient(AsyncStock):
    """A caller of the grid on the running event loop: `async with AsyncClient(...) as client`.

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
        """See `Client`: the arguments mean the same."""
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
        self._core = Core(settings, AsyncJobFuture, _loop_reply, threaded=False)
        self._book = CacheBook(self._core)
        self._functions = Functions(self._core, AsyncFunctionFuture)

    # -------------------------------------------------------------- life

    @property
    def client_id(self) -> str:
        """Under whose name jobs are submitted."""
        return self._core.settings.client_id

    @property
    def connected(self) -> bool:
        """Whether a broker has welcomed us and is there now, as far as we know."""
        return self._core.connected

    async def start(self) -> None:
        """Begin to connect; `async with` does it for you."""
        if not self._core.started:
            self._core.start()

    async def wait_connected(self, timeout: float | None = None) -> None:
        """Return when a broker has welcomed us.

        Raises `Unreachable` with the last reason when time is up, and at once `Unauthenticated` or
        `VersionMismatch` if that is what all brokers say.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._core.wait_up()
        except TimeoutError:
            raise self._core.trouble() from None

    async def close(self, timeout: float | None = None) -> None:
        """Wait until what was submitted is accepted, at most `timeout` seconds; then leave.

        Accepted jobs go on without us. Futures still open end with `Closed`.
        """
        if self._core.started and not self._core.closing:
            now = asyncio.get_running_loop().time
            wait_s = self._core.settings.close_timeout_s if timeout is None else timeout
            deadline = now() + wait_s
            if preparing := self._functions.preparing():
                # Calls are submitted once the broker has their function.
                await asyncio.wait(preparing, timeout=wait_s)
            await self._core.stop(max(deadline - now(), 0))

    async def __aenter__(self) -> AsyncClient:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        await self.close(0.0 if kind is not None else None)

    # -------------------------------------------------------------- jobs

    def submit(
        self,
        name: str,
        *,
        payload: Any = b"",
        args: Iterable[Any] = (),
        job_id: str | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncJobFuture:
        """Hand over one job and return at once; await the future for its result.

        As `Client.submit`, but with `pending_max` jobs not accepted it raises `QueueFull`: await
        `ready_to_submit` before, or use `submit_many` or `map`, which wait.
        """
        core = self._core
        if core.budget <= 0 and not core.has_room():
            raise errors.QueueFull(
                f"{core.settings.pending_max:,} jobs are not accepted yet",
                remedy="await client.ready_to_submit(), or use submit_many or map",
            )
        future = core.make(name, payload, args, job_id, options)
        core.budget -= 1
        core.inbox.append(future)
        if not core.poked:
            core.poke()
        assert isinstance(future, AsyncJobFuture)
        return future

    async def ready_to_submit(self) -> None:
        """Return when `submit` has room."""
        while not self._core.has_room():
            await self._core.wait_room()

    async def submit_many(
        self,
        name: str,
        payloads: Iterable[Any],
        *,
        job_ids: Iterable[str] | None = None,
        **options: Unpack[JobOptions],
    ) -> list[AsyncJobFuture]:
        """Hand over one job per payload, in order, waiting for room; the cheapest way for many.

        All payloads are checked before the first is handed over.
        """
        made: list[Any] = self._core.make_many(name, payloads, job_ids, options)
        await self._hand_over(made)
        return made

    async def submit_program(
        self,
        command: str,
        args: Sequence[Any] = (),
        *,
        stdin: Any = None,
        files: Mapping[str, FileSource] | None = None,
        job_id: str | None = None,
        **options: Unpack[ProgramOptions],
    ) -> AsyncJobFuture:
        """Run a program; see `Client.submit_program`. Returns when the job is handed over."""
        call = ProgramArgs(args, stdin, files)
        job_ids = None if job_id is None else [job_id]
        return (await self.submit_programs(command, [call], job_ids=job_ids, **options))[0]

    async def submit_programs(
        self,
        command: str,
        calls: Iterable[ProgramArgs],
        *,
        job_ids: Iterable[str] | None = None,
        manifest: str = "",
        **options: Unpack[ProgramOptions],
    ) -> list[AsyncJobFuture]:
        """One job per call, in order; see `Client.submit_programs`."""
        calls, options = await self._look_up(calls, options)
        terms = program_terms(command, options, manifest)
        drafts = [draft(call) for call in calls]
        stored = await self._store(terms.common.to_store)
        apart = await self._store([source for each in drafts for source in each.to_store])
        made: list[Any] = self._core.make_programs(terms.work(stored, drafts, apart), job_ids)
        await self._hand_over(made)
        return made

    async def _hand_over(self, made: list[Any]) -> None:
        """Submit these in order, waiting for room."""
        core = self._core
        done = 0
        while done < len(made):
            await self.ready_to_submit()
            batch = made[done : done + core.budget]
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
    ) -> AsyncIterator[JobResult]: ...

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
    ) -> AsyncIterator[JobResult | errors.EkidenError]: ...

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
    ) -> AsyncIterator[V]: ...

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
    ) -> AsyncIterator[V | Exception]: ...

    async def map(
        self,
        name: Any,
        payloads: Iterable[Any],
        *,
        in_order: bool = True,
        window: int = MAP_WINDOW,
        return_errors: bool = False,
        **options: Unpack[JobOptions],
    ) -> AsyncIterator[Any]:
        """Results of one job per payload, or values of a function; see `Client.map`."""
        if window < 1:
            raise errors.WrongUsage(f"window is {window}", remedy="give at least 1")
        source = iter(payloads)
        live: deque[Any] = deque()
        done: asyncio.Queue[Any] = asyncio.Queue()
        open_jobs = 0
        while True:
            # Refilled by halves: a job at a time would be a frame at a time.
            if open_jobs <= window // 2:
                batch = await self._submit_some(name, islice(source, window - open_jobs), options)
                open_jobs += len(batch)
                if in_order:
                    live += batch
                else:
                    for future in batch:
                        future.add_done_callback(done.put_nowait)
            if not open_jobs:
                return
            future = live.popleft() if in_order else await done.get()
            open_jobs -= 1
            try:
                result = await future
            except Exception as error:
                if not return_errors:
                    raise
                yield error
            else:
                yield result

    async def _submit_some(
        self, name: Any, payloads: Iterable[Any], options: JobOptions
    ) -> list[Any]:
        if isinstance(name, str):
            return list(await self.submit_many(name, payloads, **options))
        function = self._functions.of(name)
        made = function.make_many(payloads, options)
        if self._functions.is_ready(function):
            await self._hand_over(made)
        elif made:
            self._core.check_open()
            self._functions.park(function, made)
        return made

    # -------------------------------------------------------------- functions

    def call(self, fn: Callable[P, V], /, *args: P.args, **kwargs: P.kwargs) -> AsyncFunctionFuture:
        """Have `fn(*args, **kwargs)` run by a worker; await the future for its value. As
        `Client.call`, and it raises `QueueFull` when `submit` does."""
        return self.call_with({}, fn, *args, **kwargs)

    def call_with(
        self, options: JobOptions, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> AsyncFunctionFuture:
        """As `call`, with options for the job: `call_with({"timeout_s": 5}, fn, x)`."""
        core = self._core
        function = self._functions.of(fn)
        if self._is_full(function):
            raise errors.QueueFull(
                f"{core.settings.pending_max:,} jobs are not accepted yet",
                remedy="await client.ready_to_submit(), or use map",
            )
        future: AsyncFunctionFuture = function.make(args, kwargs, options)
        if not self._functions.is_ready(function):
            core.check_open()
            self._functions.park(function, [future])
            return future
        core.budget -= 1
        core.inbox.append(future)
        if not core.poked:
            core.poke()
        return future

    async def run(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function or a name and wait for it; see `Client.run`."""
        if not isinstance(fn, str):
            return await self.call(fn, *args, **kwargs)
        return await self.submit(fn, **named_call(fn, args, kwargs))

    def _is_full(self, function: CallableJobs) -> bool:
        core = self._core
        if len(function.parked) >= core.settings.pending_max:
            return True
        return core.budget <= 0 and not core.has_room()

    def attach(self, job_id: str) -> AsyncJobFuture:
        """A future for a job submitted earlier, also by another process."""
        future = self._core.attach(job_id)
        assert isinstance(future, AsyncJobFuture)
        return future

    # -------------------------------------------------------------- questions

    async def ask(self, verb: str, **params: Any) -> Any:
        """Put a question or a change to the broker and return its answer. Raises its refusal."""
        timeout_s = self._core.settings.ask_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._core.ask(verb, params)
        except TimeoutError:
            if not self._core.connected:
                raise self._core.trouble() from None
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None

    async def job(self, job_id: str) -> dict[str, Any]:
        """All that is known of a job: state, attempts and their causes, why it waits."""
        return dict(await self.ask("job", id=job_id))

    async def jobs(self, **filters: Any) -> dict[str, Any]:
        """A page of jobs: `state`, `subject` (a pattern), `client`, `run`, `limit`, `after`."""
        return dict(await self.ask("jobs", **filters))

    async def cancel(self, job_ids: str | Iterable[str]) -> dict[str, Any]:
        """Cancel jobs by id; says how many were cancelled, are being, or were settled already."""
        return sum_up([await self.ask("cancel", ids=ids) for ids in id_batches(job_ids)])

    async def stats(self) -> dict[str, Any]:
        """Counters of the broker."""
        return dict(await self.ask("stats"))

    async def workers(self) -> list[dict[str, Any]]:
        """The workers the broker knows."""
        return list((await self.ask("workers"))["workers"])

    # -------------------------------------------------------------- blobs

    async def read(self, file: ResultFile) -> bytes:
        """The bytes of a file that a program left."""
        ref = file.ref
        if ref.data is not None:
            return ref.data
        data: bytes = await self._core.fetch_blob(ref.blob, ref.size, None)
        return data

    async def save(self, result: JobResult, folder: Path | str) -> list[Path]:
        """Write the files a program left under `folder`; says where they are."""
        root = Path(folder)
        targets = {check_file_name(name): file for name, file in result.files.items()}
        for name, file in targets.items():
            target = root / name
            if file.ref.data is not None:
                file.save(target)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            await self._core.fetch_blob(file.ref.blob, file.ref.size, target)
            file.mark(target)
        return [root / name for name in targets]

    # -------------------------------------------------------------- publish and subscribe

    async def publish(self, subject: str, payload: Any = b"") -> None:
        """To every subscriber whose pattern matches, at once and never stored: it may be lost."""
        self._core.request(make_message(subject, payload))

    def subscribe(
        self, pattern: str, callback: Callable[[Message], Any] | None = None
    ) -> AsyncSubscription:
        """What is published on `pattern`: iterate over it, or have `callback` called."""
        return AsyncSubscription(self._core, pattern, callback)


class AsyncSubscription(Subscription):
    """`async for message in subscription`; `close` ends the iteration."""

    def __init__(self, core: Core, pattern: str, callback: Callable[[Message], Any] | None) -> None:
        self._news = asyncio.Event()
        super().__init__(core, pattern, callback)

    async def take(self) -> Message:
        """The next message. Raises what ended the subscription."""
        while True:
            message = self.take_nowait()
            if message is not None:
                return message
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()

    async def wait_active(self) -> None:
        """Return when the broker has the subscription: what is published after this is delivered.

        Raises its refusal.
        """
        # The broker answers in order, so any answer will do.
        try:
            async with asyncio.timeout(self._core.settings.ask_timeout_s):
                await self._core.ask("jobs", {"limit": 1})
        except TimeoutError:
            raise self._core.trouble() from None
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """No more messages."""
        self._stop()

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.take()
            except errors.Closed:
                return

    async def __aenter__(self) -> AsyncSubscription:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    def _notify(self) -> None:
        self._news.set()


def _loop_reply() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()
