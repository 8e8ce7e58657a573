"""Sets of files under an id, as the book knows them: what each is, for whom, and who uses it.

The files themselves are listed in a manifest, which lies in the store. How many unfinished jobs use
a cache follows from the rows of the book, so no snapshot carries it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from ekiden.core.commands import PutCache
from ekiden.core.rows import Origin, Row
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import WallTime

NEW: Final = "new"
SAME: Final = "same"
WIDENED: Final = "widened"
CONFLICT: Final = "conflict"


class Cache(Struct, array_like=True):
    """One cache. Only `targets` ever grows."""

    use: CacheUse
    client: str
    targets: list[str]
    """Workers whose patterns overlap any of these are to have it."""
    files: int
    size: int
    wall: WallTime


class Caches:
    """By id, in the order they were put."""

    def __init__(self) -> None:
        self.known: dict[str, Cache] = {}
        self.jobs: dict[str, int] = {}
        """Id → how many jobs that have not ended use it. An id may be here and be unknown: it was
        removed while the submit was on its way."""

    # -------------------------------------------------------------- changes

    def put(self, command: PutCache, wall: WallTime) -> str:
        """What came of it: NEW, SAME, WIDENED or CONFLICT."""
        use = command.cache
        found = self.known.get(use.id)
        if found is None:
            self.known[use.id] = Cache(
                use, command.client, [command.target], command.files, command.size, wall
            )
            return NEW
        if found.use.manifest != use.manifest:
            return CONFLICT
        if command.target in found.targets:
            return SAME
        found.targets.append(command.target)
        return WIDENED

    def remove(self, cache_id: str) -> Cache:
        """Forget it."""
        return self.known.pop(cache_id)

    # -------------------------------------------------------------- who uses them

    def submitted(self, origin: Origin, count: int) -> None:
        """So many jobs that have not ended."""
        for use in origin.spec.caches:
            left = self.jobs.get(use.id, 0) + count
            if left:
                self.jobs[use.id] = left
            else:
                self.jobs.pop(use.id, None)

    def ended(self, rows: Iterable[Row]) -> None:
        """These use nothing any more."""
        for row in rows:
            if row.origin.spec.caches:
                self.submitted(row.origin, -1)
