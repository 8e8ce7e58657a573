"""Stored files that all jobs of a program have: fetched once, copied into each job's folder.

A copy and not a link: what one job does to its file must not reach the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ekiden.worker.store import Store

# Bytes kept for jobs to come. Beyond it the files that were used longest ago go, and are fetched
# again if they are wanted again.
SHELF_BYTES_MAX: Final = 4 << 30


class _Kept:
    """A file on the shelf, or on its way there."""

    __slots__ = ("fetching", "path", "size", "users")

    def __init__(self, path: Path, size: int, fetching: asyncio.Task[None]) -> None:
        self.path = path
        self.size = size
        self.fetching = fetching
        self.users = 0


class Shelf:
    """Used on the agent's loop; `in_thread` runs what blocks."""

    def __init__(self, store: Store, in_thread: Callable[..., asyncio.Future[Any]]) -> None:
        self._store = store
        self._in_thread = in_thread
        self._folder = ""
        self._kept: dict[str, _Kept] = {}
        """By blob, least lately used first."""

    async def copy(self, folder: str, blob: str, size: int, target: Path) -> None:
        """Have the stored file in `target`. `folder` is where the shelf stands: a new one, after
        the keeper of the old one died, is empty."""
        if folder != self._folder:
            self._folder, self._kept = folder, {}
        kept = self._kept.pop(blob, None) or self._fetch(folder, blob, size)
        self._kept[blob] = kept
        kept.users += 1
        try:
            # Others may wait for it too: it is fetched even if this one is given up.
            await asyncio.shield(kept.fetching)
            await self._in_thread(shutil.copyfile, kept.path, target)
        except Exception:
            if self._kept.get(blob) is kept:
                del self._kept[blob]
            raise
        finally:
            kept.users -= 1
        await self._make_room()

    def close(self) -> None:
        """Fetch nothing more."""
        for kept in self._kept.values():
            kept.fetching.cancel()

    def _fetch(self, folder: str, blob: str, size: int) -> _Kept:
        path = Path(folder, f"shelf-{blob}")
        fetching = asyncio.create_task(self._store.fetch(blob, size, path), name="shelf")
        # Somebody who waits is told; if nobody does any more, nobody needs to be.
        fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
        return _Kept(path, size, fetching)

    async def _make_room(self) -> None:
        size = sum(kept.size for kept in self._kept.values())
        for blob, kept in list(self._kept.items()):
            if size <= SHELF_BYTES_MAX:
                return
            if not kept.users:
                del self._kept[blob]
                size -= kept.size
                await self._in_thread(_remove, kept.path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
