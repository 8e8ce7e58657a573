"""Room in the store of blobs: how much there is, and what goes when more is needed.

A blob that the book refers to or a cache holds never goes, nor one that was used of late. Of the
others, those that were not used for very long go now and then, and the longest unused first when
an upload needs their room. The disk names candidates, a few hundred at a time; the book is asked
about them here, and those it does not know go. One search goes on at a time; it ends when there is
room or nothing more to be named, so a need that cannot be met is refused, not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ekiden import limits
from ekiden.broker.events import (
    BlobsRemoved,
    CacheChecked,
    CheckCache,
    FindUnused,
    RemoveBlobs,
    UnusedFound,
)
from ekiden.broker.intake import Intake
from ekiden.config import BrokerConfig
from ekiden.errors import DiskFull, EkidenError, StoreFull
from ekiden.machine import Instant, Log
from ekiden.model.caches import CacheUse


class Room:
    """What is held, what is promised, and the search for what may go."""

    def __init__(
        self,
        config: BrokerConfig,
        intake: Intake,
        effects: list[Any],
        wanted: Callable[[], int],
        referenced: Callable[[str], bool],
    ) -> None:
        """`wanted` tells how many bytes uploads wait for, `referenced` whether the book needs a
        blob. `effects` is shared with the store."""
        self.held = 0
        """Bytes in the store, as the disk last said."""
        self.owed = 0
        """Bytes still to come of uploads that were let in."""
        self.searching = False
        self._quota = config.blobs_max
        self._headroom = config.disk_headroom
        self._intake = intake
        self._effects = effects
        self._wanted = wanted
        self._referenced = referenced
        self._for_uploads = False
        """Whether the search is for as much as there is, not only for what is very old."""
        self._more = False
        self._count = self._size = 0
        self._unchecked: dict[int, CacheUse] = {}
        """Caches of the book that are still to be held: nothing goes before all are."""
        self._next_sweep: Instant | None = None
        self._vain_until: Instant = -(1 << 63)

    # -------------------------------------------------------------- how much there is

    def short_of(self, size: int) -> int:
        """How many bytes must go before so many more can be let in."""
        short = 0
        if self._quota:
            short = self.held + self.owed + size - self._quota
        return max(short, self._headroom + self.owed + size - self._intake.disk_free, 0)

    def never_fits(self, size: int) -> bool:
        """Whether so many bytes are too much even for an empty store."""
        return 0 < self._quota < size

    def refusal(self, size: int) -> EkidenError:
        """Why so many bytes are not let in."""
        if self._quota and (self.held + self.owed + size > self._quota or self.never_fits(size)):
            return StoreFull(
                f"the broker's store may take {self._quota >> 20:,} MB and holds "
                f"{self.held + self.owed >> 20:,} that are in use: no room for a blob of "
                f"{size:,} bytes",
                remedy="remove caches that are not needed any more, or raise its --blobs-max",
                retry_after_s=60,
            )
        free = max(self._intake.disk_free - self.owed, 0)
        return DiskFull(
            f"the broker's disk has {free >> 20:,} MB left, too little for a blob of {size:,} "
            f"bytes",
            remedy="free some space there; offering it again later is safe",
            retry_after_s=5,
        )

    # -------------------------------------------------------------- caches of the book

    def hold_caches(self, caches: Iterable[CacheUse]) -> None:
        """At the start: take a hold on each cache of the book; nothing goes before all are held."""
        for number, cache in enumerate(caches, len(self._unchecked) + 1):
            self._unchecked[-number] = cache
            self._effects.append(CheckCache(-number, cache, known=True))

    def cache_checked(self, event: CacheChecked) -> CacheUse:
        """The answer for one of them, and which it is."""
        return self._unchecked.pop(event.number)

    # -------------------------------------------------------------- searches

    def sweep(self, now: Instant) -> None:
        """Now and then, look for what was not used for very long."""
        if self._next_sweep is None:
            self._next_sweep = now + limits.BLOB_FIRST_SWEEP_NS
        if now >= self._next_sweep and not self.searching and not self._unchecked:
            self._next_sweep = now + limits.BLOB_SWEEP_NS
            self._find(0)

    def make(self) -> None:
        """Look for what may go, if uploads wait for room and nobody looks yet."""
        if not self.searching and not self._unchecked and self._wanted() > 0:
            self._find(self._wanted())

    def is_vain(self, now: Instant) -> bool:
        """Whether a search for uploads has just ended without enough: it is vain to wait for more,
        and for a while it need not be tried again."""
        return not self.searching and now < self._vain_until

    def receive(self, event: UnusedFound | BlobsRemoved, now: Instant) -> None:
        """The disk has named some, or removed them."""
        self.held = event.held
        if isinstance(event, UnusedFound):
            self._more = event.more
            gone = [each for each in event.blobs if not self._referenced(each[0])]
            if gone:
                self._effects.append(RemoveBlobs(gone))
                return
        else:
            self._count += event.count
            self._size += event.size
            # Measured now and then only: who waits for this room need not wait for that, too.
            self._intake.disk_free += event.size
        wanted = self._wanted()
        if self._more and (wanted or not self._for_uploads):
            self._for_uploads = self._for_uploads or wanted > 0
            self._effects.append(FindUnused(wanted, new=False))
            return
        self.searching = False
        if wanted and self._for_uploads:
            self._vain_until = now + limits.BLOB_VAIN_NS
        if self._count:
            facts = {"removed": self._count, "bytes": self._size, "left": self.held}
            self._effects.append(Log("info", "blobs.removed", facts))

    def _find(self, wanted: int) -> None:
        self.searching = self._more = True
        self._for_uploads = wanted > 0
        self._count = self._size = 0
        self._effects.append(FindUnused(wanted))
