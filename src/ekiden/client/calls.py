"""Calling functions with the blocking client: what `Client` has beside named jobs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from ekiden import errors
from ekiden.client.core import GATHER_MAX, Core
from ekiden.client.functions import CallableJobs, FunctionFuture, Functions
from ekiden.client.futures import JobFuture
from ekiden.client.options import JobOptions
from ekiden.client.results import JobResult

V = TypeVar("V")
P = ParamSpec("P")


class Calls(ABC):
    """Functions as jobs."""

    _core: Core
    _functions: Functions

    @abstractmethod
    def submit(
        self,
        name: str,
        *,
        payload: Any = b"",
        args: Iterable[Any] = (),
        job_id: str | None = None,
        **options: Unpack[JobOptions],
    ) -> JobFuture:
        """Hand over one job."""

    @abstractmethod
    def _hand_over(self, made: list[JobFuture]) -> None:
        """Submit these in order, waiting for room."""

    @abstractmethod
    def _wait_room(self) -> None:
        """Return when there is room for a job."""

    def call(self, fn: Callable[P, V], /, *args: P.args, **kwargs: P.kwargs) -> FunctionFuture:
        """Have `fn(*args, **kwargs)` run by a worker and return at once; the future's result is its
        value. Workers that run functions were started with `--functions`.

        The function travels once, as it is when it is first called; see `ekiden.client.functions`.
        It may run more than once after a crash or a lost connection: make it safe to repeat.

        Raises what is wrong with the call itself (`TooLarge`, `WrongUsage`, `Closed`); what the
        function raises comes from the future.
        """
        return self.call_with({}, fn, *args, **kwargs)

    def call_with(
        self, options: JobOptions, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> FunctionFuture:
        """As `call`, with options for the job: `call_with({"timeout_s": 5}, fn, x)`."""
        function = self._functions.of(fn)
        future: FunctionFuture = function.make(args, kwargs, options)
        if not self._functions.is_ready(function):
            self._call_all(function, [future])
            return future
        core = self._core
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

    def call_many(
        self,
        fn: Callable[..., Any],
        calls: Iterable[tuple[Any, ...]],
        options: JobOptions | None = None,
    ) -> list[FunctionFuture]:
        """A call for each tuple of arguments, in order; the cheapest way for many. See `call`."""
        function = self._functions.of(fn)
        return self._call_all(function, function.make_calls(calls, options or {}))

    @overload
    def run(self, fn: str, /, *args: Any, **kwargs: Any) -> JobResult: ...

    @overload
    def run(self, fn: Callable[P, V], /, *args: P.args, **kwargs: P.kwargs) -> V: ...

    def run(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run something and wait for it: a function with these arguments gives its value; a name
        with a payload, and `submit`'s options, gives a `JobResult`."""
        if not isinstance(fn, str):
            return self.call(fn, *args, **kwargs).result()
        return self.submit(fn, **named_call(fn, args, kwargs)).result()

    def _call_all(self, function: CallableJobs, made: list[Any]) -> list[Any]:
        """Hand calls over, or have them wait until the broker has their function."""
        functions, core = self._functions, self._core
        prepared = function.prepared
        if prepared is not None and len(function.parked) >= core.settings.pending_max:
            core.check_may_wait()
            prepared.result()
        if functions.is_ready(function):
            self._hand_over(made)
        elif made:
            core.check_open()
            functions.park(function, made)
        return made


def named_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What `submit` takes for `run(name, payload, …)`."""
    if len(args) > 1:
        raise errors.WrongUsage(
            f"{name!r} is a name, and a name takes one payload",
            remedy="give a list as the payload, or args=[…]",
        )
    return {**kwargs, "payload": args[0]} if args else kwargs
