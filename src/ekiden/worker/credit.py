"""How many attempts a worker asks for: enough that a round trip to the broker never idles a slot,
and no more than its slots can do soon."""

from __future__ import annotations

from typing import Final

from ekiden import limits

# Credit: enough work at hand for this long, so that a round trip to the broker never idles a slot.
WORK_AHEAD_NS: Final = 75_000_000

# The most attempts held, however short they are, and about the most bytes of their inputs. Twice as
# many as 4,096 gained a tenth, four times as many nothing more.
CREDIT_MAX: Final = 8192
BYTES_AHEAD: Final = 64 << 20

# Nothing finished for this long while more waits than the slots need: others may do it sooner.
STALL_NS: Final = limits.NS // 2


class Credit:
    """Follows from how long runs take and how large their inputs are."""

    def __init__(self, slots: int, prefetch: int | None, least: int | None) -> None:
        """`prefetch` fixes it; without that, it is no less than `least` [two for each slot]."""
        self._slots = slots
        self.least = prefetch if prefetch is not None else least or 2 * slots
        self._most = prefetch if prefetch is not None else max(CREDIT_MAX, 2 * slots)
        self.now = self.least
        self._mean_ns = 0
        self._mean_bytes = 0
        """Of inputs: as large as lately, forgotten slowly."""

    def weigh(self, size: int) -> None:
        """Inputs of this size have come."""
        self._mean_bytes = max(size, (self._mean_bytes * 7 + size) // 8)

    def sample(self, run_ns: int) -> None:
        """Learn from one batch how long runs take: the last few batches count."""
        self._mean_ns = (self._mean_ns * 7 + run_ns) // 8 if self._mean_ns else run_ns
        wanted = self._slots * WORK_AHEAD_NS // max(self._mean_ns, 1)
        wanted = min(wanted, BYTES_AHEAD // max(self._mean_bytes, 1))
        self.now = min(max(wanted, self.least), self._most)

    def stalled(self) -> None:
        """Long runs hold every slot."""
        self.now = self.least
        self._mean_ns = max(self._mean_ns, STALL_NS)

    def is_news(self, credit: int, told: int) -> bool:
        """Whether it differs enough from what was told to be told."""
        if credit == told:
            return False
        if credit * 2 <= told or credit * 2 >= told * 3:
            return True
        # The extremes are always told: nothing more may follow, so nearly would be for ever.
        return credit in (0, self.least, self._most)
