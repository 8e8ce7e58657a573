"""A run as a person sees it: a line that moves, outputs as they come, and what failed at the end.

Results go to stdout, everything about them to stderr. The moving line is drawn only where stderr is
a terminal, and wiped before anything else is written.
"""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final

from ekiden import errors
from ekiden.cli import output, saving
from ekiden.cli.saving import Ending
from ekiden.limits import INLINE_FILE_BYTES

DRAW_S: Final = 0.1
RATE_S: Final = 10.0
"""The rate is that of so many last seconds: long enough to be calm, short enough to be true."""

FAILURES_SHOWN: Final = 20
TAIL_LINES: Final = 3
COPY_BYTES: Final = 1 << 16

_BAR: Final = 24


class Counts:
    """How far a run is."""

    def __init__(self, total: int, skipped: int = 0) -> None:
        self.total = total
        self.skipped = skipped
        self.by_state: dict[str, int] = {}
        self.begun = monotonic()

    def add(self, ending: Ending) -> None:
        """One more has ended."""
        self.by_state[ending.state] = self.by_state.get(ending.state, 0) + 1

    def of(self, *states: str) -> int:
        """How many have ended like this."""
        return sum(self.by_state.get(state, 0) for state in states)

    @property
    def ended(self) -> int:
        """How many have ended, however."""
        return sum(self.by_state.values())

    @property
    def failed(self) -> int:
        """How many have no result where there should be one."""
        return self.of(saving.FAILED, saving.REFUSED, saving.UNSAVED)

    def document(self) -> dict[str, int]:
        """As `--json` prints them."""
        return {
            "total": self.total,
            "done": self.of(saving.DONE),
            "failed": self.of(saving.FAILED),
            "cancelled": self.of(saving.CANCELLED),
            "refused": self.of(saving.REFUSED),
            "unsaved": self.of(saving.UNSAVED),
            "missing": self.of(saving.MISSING),
            "skipped": self.skipped,
            "open": self.total - self.ended,
        }

    def sentence(self) -> str:
        """As a person reads them: what there is none of is left out, but for what is done."""
        counts = self.document()
        del counts["total"], counts["open"]
        return " · ".join(
            f"{count:,} {'not handed over' if word == 'missing' else word}"
            for word, count in counts.items()
            if count or word == "done"
        )


# ------------------------------------------------------------------ the moving line


class Ticker:
    """Draws how far it is."""

    def __init__(self, counts: Counts, *, wanted: bool) -> None:
        self._counts = counts
        self._wanted = wanted and sys.stderr.isatty()
        self._drawn = False
        self._next = 0.0
        self._past: deque[tuple[float, int]] = deque()

    def tick(self) -> None:
        """Draw, if it is time to."""
        now = monotonic()
        if not self._wanted or now < self._next:
            return
        self._next = now + DRAW_S
        ended = self._counts.ended
        self._past.append((now, ended))
        while len(self._past) > 2 and now - self._past[0][0] > RATE_S:
            self._past.popleft()
        began, before = self._past[0]
        rate = (ended - before) / (now - began) if now > began else 0.0
        width = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r{line(self._counts, rate)[: width - 1]}\x1b[K")
        sys.stderr.flush()
        self._drawn = True

    def wipe(self) -> None:
        """Leave the line to somebody else; it is drawn again with the next tick."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False
            self._next = 0.0


def line(counts: Counts, rate: float) -> str:
    """The moving line."""
    share = counts.ended / counts.total if counts.total else 1.0
    full = int(share * _BAR)
    parts = [f"{counts.ended:,} of {counts.total:,}"]
    if counts.failed:
        parts.append(f"{counts.failed:,} failed")
    if rate:
        parts.append(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s")
        left_s = (counts.total - counts.ended) / rate
        parts.append(f"{output.span(left_s)} left" if left_s >= 1 else "a moment left")
    return f"{'━' * full}{'╌' * (_BAR - full)} {share:4.0%}  {' · '.join(parts)}"


# ------------------------------------------------------------------ outputs


class Printer:
    """Prints what jobs wrote to stdout, each job's in one piece: as they end, or in order."""

    def __init__(self, numbers: Sequence[int], *, in_order: bool, shown: bool) -> None:
        self._waiting: dict[int, Ending] = {}
        self._order: Iterator[int] | None = iter(numbers) if in_order else None
        self._turn = next(self._order, None) if self._order is not None else None
        self._shown = shown
        self._person = sys.stdout.isatty()

    def add(self, ending: Ending) -> list[Ending]:
        """One has ended; those whose turn it is, which are printed."""
        if self._order is None:
            self._print(ending)
            return [ending]
        self._waiting[ending.number] = ending
        return list(self._in_turn())

    def rest(self) -> None:
        """Print what still waits for its turn: the run is not followed any further."""
        for number in sorted(self._waiting):
            self._print(self._waiting.pop(number))

    def _in_turn(self) -> Iterator[Ending]:
        assert self._order is not None
        while self._turn is not None and (ready := self._waiting.pop(self._turn, None)):
            self._print(ready)
            yield ready
            self._turn = next(self._order, None)

    def _print(self, ending: Ending) -> None:
        if not self._shown or not ending.stdout:
            return
        if isinstance(ending.stdout, bytes):
            output.write_output(ending.stdout)
        elif not self._person or ending.stdout.stat().st_size <= INLINE_FILE_BYTES:
            _copy_out(ending.stdout)
        else:
            size = output.size(ending.stdout.stat().st_size)
            output.say(f"stdout of {output.plain(ending.entry.label)} is {size}: {ending.stdout}")


def _copy_out(path: Path) -> None:
    sys.stdout.flush()
    with path.open("rb") as file:
        while part := file.read(COPY_BYTES):
            sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


# ------------------------------------------------------------------ what failed


class Failures:
    """What did not go well: the first few with their last words, and how many more."""

    def __init__(self) -> None:
        self._first: list[Ending] = []
        self._count = 0

    def add(self, ending: Ending) -> None:
        """One more."""
        self._count += 1
        if len(self._first) < FAILURES_SHOWN:
            self._first.append(ending)

    def tell(self, run: str) -> None:
        """List them."""
        for ending in sorted(self._first, key=lambda each: each.number):
            what, tail = last_words(ending)
            output.say(f"{output.plain(ending.entry.label)}: {what}")
            for each in tail:
                output.say(f"    {output.plain(each)}")
        if self._count > len(self._first):
            more = self._count - len(self._first)
            output.say(f"and {more:,} more; all of them: ekiden runs show {run} --all")


def last_words(ending: Ending) -> tuple[str, list[str]]:
    """Why it failed, and the last lines it said."""
    error = ending.error
    if not isinstance(error, errors.JobFailed):
        return output.sentence(error or errors.Fault(ending.state)), []
    last: Any = error.causes[-1] if error.causes else {}
    first, *said = str(last.get("message", "")).rstrip().splitlines() or [""]
    tries = f" ({len(error.causes)} attempts)" if len(error.causes) > 1 else ""
    return output.plain(f"{error.reason}: {first}{tries}", limit=500), said[-TAIL_LINES:]
