"""Runs: jobs that were submitted under one name, counted.

Everything here follows from the rows of the book, so no snapshot carries it: it is counted again
when one is loaded. A run is forgotten with the last of its jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

from ekiden.core.rows import Origin, Row, Settlement
from ekiden.model import jobs as j


class RunTally:
    """How far one run is. What has not ended is `total` less the three that have."""

    __slots__ = ("cancelled", "client", "done", "failed", "first", "last", "total")

    def __init__(self, origin: Origin) -> None:
        self.client = origin.client.id
        self.first = origin.wall
        self.last = origin.wall
        self.total = 0
        self.done = 0
        self.failed = 0
        self.cancelled = 0

    @property
    def open(self) -> int:
        """Jobs that have not ended."""
        return self.total - self.done - self.failed - self.cancelled

    def count(self, state: str, by: int) -> None:
        """`by` more of its jobs have ended like this."""
        if state == j.DONE:
            self.done += by
        elif state == j.FAILED:
            self.failed += by
        else:
            self.cancelled += by

    def counts(self) -> tuple[int, int, int, int]:
        """For comparison."""
        return (self.total, self.done, self.failed, self.cancelled)


class Runs:
    """The tallies by name. False while there are none, so that others need not ask."""

    def __init__(self) -> None:
        self.tallies: dict[str, RunTally] = {}

    def __bool__(self) -> bool:
        return bool(self.tallies)

    def submitted(self, origin: Origin, count: int) -> None:
        """New jobs of one submit."""
        name = origin.spec.run
        if not name or not count:
            return
        tally = self.tallies.get(name)
        if tally is None:
            tally = self.tallies[name] = RunTally(origin)
        tally.total += count
        tally.first = min(tally.first, origin.wall)
        tally.last = max(tally.last, origin.wall)

    def ended(self, rows: Iterable[Row], state: str, by: int = 1) -> None:
        """These have ended like this; with `by` -1 they no longer have."""
        for row in rows:
            name = row.origin.spec.run
            if name:
                self.tallies[name].count(state, by)

    def dropped(self, row: Row) -> None:
        """Its id is forgotten."""
        name = row.origin.spec.run
        if name:
            tally = self.tallies[name]
            tally.total -= 1
            if not tally.total:
                del self.tallies[name]

    def recount(self, rows: Iterable[Row]) -> None:
        """From the rows of a book that was loaded."""
        for row in rows:
            if row.origin.spec.run:
                self.submitted(row.origin, 1)
                if isinstance(row.place, Settlement):
                    self.ended((row,), row.place.state)
