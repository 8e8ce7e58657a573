"""Ids for jobs that were given none: UUIDs of version 7, made in blocks.

A block shares all but the last three digits, which count. That is four times as quick as a UUID for
each, and ids that were made together lie together in the broker's table (`ekiden.core.book`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from itertools import islice
from time import monotonic
from typing import Final

from uuid_utils import uuid7

_COUNTS: Final = tuple(f"{n:03x}" for n in range(1 << 12))

# The time in an id is that of its block: no older than this, for whoever sorts by it.
BLOCK_S: Final = 1.0


class IdMaker:
    """Never gives an id twice. Threads may share it: each step of its iterator is one."""

    def __init__(self) -> None:
        self._ids: Iterator[str] = iter(())
        self._until = 0.0

    def one(self) -> str:
        """A new id."""
        made = next(self._ids, None) if monotonic() < self._until else None
        return made or next(self._begin())

    def many(self, count: int) -> list[str]:
        """That many new ids."""
        made = list(islice(self._ids, count)) if monotonic() < self._until else []
        while len(made) < count:
            made += islice(self._begin(), count - len(made))
        return made

    def _begin(self) -> Iterator[str]:
        # Time, version, 12 bits and the variant as they come; the rest is random but for the count.
        block = uuid7().hex[:17] + secrets.token_hex(6)
        ids = map(block.__add__, _COUNTS)
        self._ids, self._until = ids, monotonic() + BLOCK_S
        return ids
