"""`ekiden.Executor`: the grid behind the interface of `concurrent.futures`.

    with ekiden.Executor("127.0.0.1:7000") as pool:
        for price in pool.map(price_trade, trades):
            ...

Where a `ProcessPoolExecutor` was, this can be: the function and its arguments are pickled, values
and exceptions come back. What is different: processes are those of all workers of the grid, jobs
survive the loss of any of them, and calls that were accepted go on if this process ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, ParamSpec, TypeVar

from ekiden import errors
from ekiden.client.blocking import Client
from ekiden.client.functions import FunctionFuture
from ekiden.client.options import JobOptions

T = TypeVar("T")
P = ParamSpec("P")

# Calls of one `map` that are made and handed over together.
_BATCH: Final = 1000

# Futures that are kept for `shutdown` are looked through when so many have gathered.
_SWEEP: Final = 10_000


class Executor(concurrent.futures.Executor):
    """Runs functions on the grid. Threads may share it.

    It connects like `Client`, whose options it takes, or uses a `client` that is there already and
    then leaves it open. `caches` are ids of data that all calls need. `max_workers` is taken for
    the sake of those who pass it, also in the first place, and not looked at: the grid has the
    workers it has. `submit` and `map` raise `BrokenExecutor` when the client is closed or was
    refused for good.
    """

    def __init__(
        self,
        address: str | int | None = None,
        *,
        client: Client | None = None,
        caches: Iterable[str] = (),
        max_workers: int | None = None,
        **client_options: Any,
    ) -> None:
        if isinstance(address, int):
            address = None  # a number of processes, where a `ProcessPoolExecutor` has it
        if client is not None and (address is not None or client_options):
            raise errors.WrongUsage(
                "a client was given, and how to make one too", remedy="give one of both"
            )
        self._owned = client is None
        self._client = client if client is not None else Client(address, **client_options)
        self._options: JobOptions = {"caches": tuple(caches)} if caches else {}
        self._lock = threading.Lock()
        self._open: list[FunctionFuture] = []
        self._sweep_at = _SWEEP
        self._ended = False

    @property
    def client(self) -> Client:
        """The client behind it."""
        return self._client

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> FunctionFuture:
        """Have `fn(*args, **kwargs)` run somewhere; a future for its value."""
        with self._unbroken():
            future = self._client.call_with(self._options, fn, *args, **kwargs)
        self._remember([future])
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Values of `fn` for the items of all iterables, in order, like the builtin `map`.

        All calls are made at once. `timeout` is for all values together; `chunksize` is taken for
        the sake of those who pass it, and not looked at: calls travel in batches by themselves.
        Giving up the iterator cancels what is left.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        deadline = None if timeout is None else time.monotonic() + timeout
        calls = zip(*iterables, strict=False)
        made: list[FunctionFuture] = []
        with self._unbroken():
            while batch := self._client.call_many(fn, islice(calls, _BATCH), self._options):
                made += batch
        self._remember(made)
        return self._values(made, deadline)

    def _values(self, made: list[FunctionFuture], deadline: float | None) -> Iterator[Any]:
        made.reverse()
        try:
            while made:
                left_s = None if deadline is None else deadline - time.monotonic()
                value = made[-1].result(left_s)
                made.pop()
                yield value
        finally:
            self._cancel(made)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; with `wait`, return when all have ended.

        `cancel_futures` cancels those that have not ended. The client is closed if it is ours.
        """
        with self._lock:
            self._ended = True
            left, self._open = self._open, []
        if cancel_futures:
            self._cancel([future for future in left if not future.done()])
        if wait:
            self._finish(left)
        else:
            threading.Thread(target=self._finish, args=(left,), daemon=True).start()

    # -------------------------------------------------------------- inside

    def _finish(self, left: list[FunctionFuture]) -> None:
        concurrent.futures.wait(left)
        if self._owned:
            self._client.close()

    def _cancel(self, left: list[FunctionFuture]) -> None:
        """As far as it can be said now: who is not connected cannot cancel."""
        ids = [future.job_id for future in left if not future.done()]
        if ids and self._client.connected:
            with contextlib.suppress(errors.EkidenError, TimeoutError):
                self._client.cancel(ids)

    def _remember(self, made: list[FunctionFuture]) -> None:
        """For `shutdown`; those that are done are forgotten now and then."""
        self._open += made
        if len(self._open) >= self._sweep_at:
            with self._lock:
                self._open = [future for future in self._open if not future.done()]
                self._sweep_at = 2 * len(self._open) + _SWEEP

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        if self._ended:
            raise RuntimeError("cannot schedule new futures after shutdown")
        try:
            yield
        except (errors.Closed, errors.Unauthenticated, errors.VersionMismatch) as error:
            raise concurrent.futures.BrokenExecutor(str(error)) from error
