"""Blobs for callers of a client, whatever they wait with.

The transfers themselves are part of the client's machine; the porter reads and writes files for
them. Here a caller's reply is tied to the task that does the work: it gets the outcome, and giving
up the reply ends the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from ekiden.errors import EkidenError
from ekiden.world.loop import Driver
from ekiden.world.porter import Porter


class Bulk:
    """Puts and fetches of one client. Made on its loop and used there."""

    def __init__(self, driver: Driver) -> None:
        self.porter = Porter(driver)
        self._loop = driver.loop
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, source: bytes | Path, reply: Any) -> None:
        """`reply` gets the hash and the size."""
        self._start(self.porter.put(source), reply)

    def fetch(self, blob: str, size: int, target: Path | None, reply: Any) -> None:
        """`reply` gets the bytes, or None if they went to `target`."""
        if target is None:
            self._start(self.porter.read(blob, size), reply)
        else:
            self._start(self.porter.fetch(blob, size, target), reply)

    async def close(self, error: EkidenError) -> None:
        """End what is open with `error`; return when nobody works on it."""
        self.porter.close(error)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, Any], reply: Any) -> None:
        task = self._loop.create_task(_answer(work, reply), name="blob")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        reply.add_done_callback(lambda reply: self._reply_done(task, reply))

    def _reply_done(self, task: asyncio.Task[None], reply: Any) -> None:
        """Perhaps in a caller's thread: a reply that was given up."""
        if reply.cancelled():
            try:
                self._loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:
                pass  # the loop has ended, and the task with it


async def _answer(work: Coroutine[Any, Any, Any], reply: Any) -> None:
    # A caller in a thread may give up at any moment, also between a look and a word.
    with suppress(InvalidStateError, asyncio.InvalidStateError):
        try:
            outcome = await work
        except Exception as error:  # noqa: BLE001 - whoever waits shall have it
            reply.set_exception(error)
        else:
            reply.set_result(outcome)
