"""What a client does on its loop for callers, whatever they wait with: blobs above all.

The transfers themselves are part of the client's machine; the porter reads and writes files for
them. Here a caller's reply is tied to the task that does the work: it gets the outcome, and giving
up the reply ends the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from ekiden.errors import Closed, EkidenError
from ekiden.world.loop import Driver
from ekiden.world.porter import Porter


def outcome(reply: Future[Any], timeout: float | None = None) -> Any:
    """What a reply gets, waited for in a thread: whoever stops waiting for it ends the work."""
    try:
        return reply.result(timeout)
    except BaseException:
        reply.cancel()
        raise


class Bulk:
    """Puts and fetches of one client. Made on its loop and used there."""

    def __init__(self, driver: Driver) -> None:
        self.porter = Porter(driver)
        self._loop = driver.loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: EkidenError | None = None

    def start(self, work: Callable[[Porter], Coroutine[Any, Any, Any]], reply: Any) -> None:
        """`reply` gets the outcome of `work`."""
        task = self._loop.create_task(self._answer(work, reply), name="blob")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, reply))
        reply.add_done_callback(lambda reply: self._reply_done(task, reply))

    async def close(self, error: EkidenError) -> None:
        """End what is open with `error`; return when nobody works on it."""
        self._error = error
        self.porter.close(error)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, work: Callable[[Porter], Coroutine[Any, Any, Any]], reply: Any) -> None:
        # A caller in a thread may give up at any moment, also between a look and a word.
        with suppress(InvalidStateError, asyncio.InvalidStateError):
            try:
                outcome = await work(self.porter)
            except Exception as error:  # noqa: BLE001 - whoever waits shall have it
                reply.set_exception(error)
            else:
                reply.set_result(outcome)

    def _ended(self, task: asyncio.Task[None], reply: Any) -> None:
        """One that was cancelled was given up by its caller, or by us, who then owe it a word."""
        self._tasks.discard(task)
        if task.cancelled() and not reply.done():
            with suppress(InvalidStateError, asyncio.InvalidStateError):
                reply.set_exception(self._error or Closed("the client is closed"))

    def _reply_done(self, task: asyncio.Task[None], reply: Any) -> None:
        """Perhaps in a caller's thread: a reply that was given up."""
        if reply.cancelled():
            try:
                self._loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:
                pass  # the loop has ended, and the task with it
