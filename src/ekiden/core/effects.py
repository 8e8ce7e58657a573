"""What applying an entry changed, in runs: hints for the leader, ignored by everyone else.

A hint may die with its leader. Whatever matters is derived again from the book when a peer speaks
again, so nothing here is a promise by itself.
"""

from __future__ import annotations

from ekiden.core.caches import Cache
from ekiden.core.queues import Queue
from ekiden.core.rows import Grant, Row, Settlement


class SubmitOutcome:
    """What became of one Submit command; by offset where it is not plain acceptance."""

    __slots__ = ("conflicts", "fresh", "repeated")

    def __init__(self) -> None:
        self.fresh = 0
        self.repeated: list[tuple[int, Row]] = []
        self.conflicts: list[tuple[int, Row]] = []


class Tally:
    """What became of one Cancel, Replay or Purge, by id."""

    __slots__ = ("changed", "settled", "stopping", "unknown")

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.stopping: list[str] = []
        self.settled: list[str] = []
        self.unknown: list[str] = []


class Changes:
    """All hints of one entry."""

    __slots__ = (
        "forfeited",
        "grants",
        "large",
        "puts",
        "removed",
        "requeued",
        "settlements",
        "stale",
        "stops",
        "submits",
        "tallies",
        "woken",
    )

    def __init__(self) -> None:
        self.submits: list[SubmitOutcome] = []
        """One for every Submit command, in order."""
        self.tallies: list[Tally] = []
        """One for every Cancel, Replay, Purge and RemoveCache command, in order."""
        self.puts: list[str] = []
        """One for every PutCache command, in order: what came of it."""
        self.removed: list[Cache] = []
        self.grants: list[Grant] = []
        self.forfeited: list[Grant] = []
        """Grants that ended because their worker was given up."""
        self.settlements: list[Settlement] = []
        self.large: dict[str, bytes] = {}
        """Outputs too large for memory, by job id: to be handed on now or read back later."""
        self.stops: list[tuple[Grant, int]] = []
        self.requeued: list[Row] = []
        """Rows that wait again after an attempt: retried, released or forfeited."""
        self.woken: dict[Queue, None] = {}
        """Queues in which something became ready."""
        self.stale = 0
        """Outcomes that owned nothing: late words of ghosts."""
