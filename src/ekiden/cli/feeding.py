"""Handing over a run's jobs, a window at a time, in a thread of its own.

Handing over may wait: for files on their way to the store, or for a broker that is away. Whoever
follows the run must not, so that it can answer a person at any time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from ekiden.cli.inputs import Entry
from ekiden.cli.manifest import job_id
from ekiden.errors import Closed, EkidenError

if TYPE_CHECKING:
    from ekiden.cli.inputs import Template
    from ekiden.client.blocking import Client
    from ekiden.client.futures import JobFuture

# Jobs that are handed over and not yet saved: work for a large grid for some seconds, and what this
# process keeps in memory at most.
WINDOW: Final = 20_000
# About as many bytes of inputs in their bodies.
WINDOW_BYTES: Final = 256 << 20

# Handed over in one go. The first are few, so that work begins at once.
CHUNK_FIRST: Final = 100
CHUNK_MAX: Final = 4000
CHUNK_BYTES: Final = 16 << 20

Handed = list[tuple[int, "JobFuture | EkidenError"]]


class Gate(Protocol):
    """The way jobs go in."""

    def weigh(self, number: int) -> int:
        """About how many bytes its job keeps in memory."""

    def hand_over(self, numbers: Sequence[int]) -> Handed:
        """A future for every number, or why there is none. Raises `Closed`."""


class Submitting:
    """Submits jobs of a program."""

    def __init__(
        self,
        client: Client,
        run: str,
        entries: Sequence[Entry],
        template: Template,
        command: str,
        options: dict[str, Any],
    ) -> None:
        self._client = client
        self._run = run
        self._entries = entries
        self._template = template
        self._command = command
        self._options = options
        self._stored = False

    def weigh(self, number: int) -> int:
        """What its files take while they are small enough to travel inside the job."""
        from ekiden.client.programs import INLINE_TOTAL_BYTES

        paths = self._entries[number - 1].files.values()
        return 256 + min(sum(_size(path) for path in paths), INLINE_TOTAL_BYTES)

    def hand_over(self, numbers: Sequence[int]) -> Handed:
        """Submit these; one that cannot be sent does not keep the others from it."""
        from ekiden.client.programs import ProgramArgs

        calls = [
            ProgramArgs(
                self._template.expand(entry.words, number),
                None,
                {name: Path(path) for name, path in entry.files.items()},
            )
            for number, entry in ((number, self._entries[number - 1]) for number in numbers)
        ]
        try:
            self._store_common()
            ids = [job_id(self._run, number) for number in numbers]
            futures = self._client.submit_programs(
                self._command, calls, job_ids=ids, **self._options
            )
        except Closed:
            raise
        except EkidenError as error:
            if len(numbers) == 1:
                return [(numbers[0], error)]
            half = len(numbers) // 2
            return self.hand_over(numbers[:half]) + self.hand_over(numbers[half:])
        return list(zip(numbers, futures, strict=True))

    def _store_common(self) -> None:
        """Once for all: every job of a run gets the same program, whatever becomes of the file."""
        if not self._stored and self._options.get("common"):
            refs = self._client.store_files(self._options["common"])
            self._options = {**self._options, "common": refs}
        self._stored = True


class Attaching:
    """Attaches to jobs that somebody has submitted."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self._run = run

    def weigh(self, number: int) -> int:
        """Nothing is sent."""
        del number
        return 0

    def hand_over(self, numbers: Sequence[int]) -> Handed:
        """Attach to these."""
        return [(number, self._client.attach(job_id(self._run, number))) for number in numbers]


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


class Feeder:
    """Keeps a window of jobs open until there are no more."""

    def __init__(
        self,
        gate: Gate,
        numbers: Sequence[int],
        told: Callable[[Any], None],
        *,
        window: int = WINDOW,
    ) -> None:
        """`told` hears of every future that has an outcome, of `(number, error)` for a job that
        could not be handed over, and of an exception that ended the feeding."""
        self._gate = gate
        self._left: Iterator[int] = iter(numbers)
        self._told = told
        self._window = window
        self._limit = window
        """Less than the window while the broker has no room for more."""
        self._again: deque[int] = deque()
        self._pause_until = 0.0
        self._chunk = CHUNK_FIRST
        self._open: dict[int, tuple[JobFuture | None, int]] = {}
        self._open_bytes = 0
        self._bytes_max = WINDOW_BYTES
        self._stop = False
        self._exhausted = False
        self._busy = False
        self.handed = 0
        """How many jobs were handed over."""
        self._news = threading.Condition()
        # A daemon: one that waits for a broker must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="ekiden-feeder", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def fed(self) -> bool:
        """Whether all is handed over that ever will be."""
        with self._news:
            return not self._thread.is_alive() or not (self._busy or self._more)

    @property
    def ended(self) -> bool:
        """Whether all is handed over and has its outcome."""
        return self.fed and not self._open

    @property
    def _more(self) -> bool:
        return bool(self._again) or not self._exhausted

    def open_numbers(self) -> list[int]:
        """Jobs without an outcome that was dealt with."""
        with self._news:
            return list(self._open)

    @property
    def accepted(self) -> bool:
        """Whether the broker has all that was handed over."""
        with self._news:
            return all(f is None or f.accepted or f.done() for f, _ in self._open.values())

    def release(self, number: int) -> None:
        """This job's outcome was dealt with: another one may come."""
        with self._news:
            _, size = self._open.pop(number, (None, 0))
            self._open_bytes -= size
            self._limit = min(self._limit + 1, self._window)
            if self._more and self._room():
                self._news.notify_all()

    def retry(self, number: int, after_s: float) -> None:
        """The broker was full: hand this one over again, a while later."""
        with self._news:
            if self._pause_until < monotonic():
                # All that was sent at once may have been refused at once: half as many next time,
                # until they fit; then one more for every one that is done.
                self._limit = max(1, min(self._limit, len(self._open)) // 2)
                self._pause_until = monotonic() + after_s
            _, size = self._open.pop(number, (None, 0))
            self._open_bytes -= size
            self._again.append(number)
            self._news.notify_all()

    def open_wide(self) -> None:
        """Hand over all that is left without waiting for outcomes."""
        with self._news:
            # The broker bounds what it holds; nothing is left to wait for here.
            self._window = self._limit = self._bytes_max = 1 << 62
            self._news.notify_all()

    def stop(self) -> None:
        """Hand over no more."""
        with self._news:
            self._stop = True
            self._news.notify_all()

    # -------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            while (numbers := self._next()) is not None:
                self._hand_over(numbers)
        except Exception as error:  # noqa: BLE001 - whoever follows decides what it means
            self._told(error)
        else:
            self._told(None)

    def _next(self) -> list[int] | None:
        """The next to hand over, once there is room; None when told to stop."""
        with self._news:
            self._busy = False
            while not self._stop:
                pause_s = self._pause_until - monotonic()
                if self._more and pause_s <= 0 and (room := self._room()):
                    numbers = self._take(room)
                    if numbers:
                        self._busy = True
                        self._chunk = min(self._chunk * 2, CHUNK_MAX)
                        return numbers
                    self._told(None)  # there were no more: that may have been all
                    continue
                self._news.wait(pause_s if self._more and pause_s > 0 else None)
            return None

    def _room(self) -> int:
        """How many may be handed over now. Not for the sake of one job if it could be many: one at
        a time would be a frame at a time."""
        room = self._limit - len(self._open)
        if self._open_bytes >= self._bytes_max or room < max(1, min(self._limit // 8, CHUNK_MAX)):
            return 0
        return min(room, self._chunk)

    def _take(self, room: int) -> list[int]:
        numbers = [self._again.popleft() for _ in range(min(room, len(self._again)))]
        total = sum(map(self._keep, numbers))
        while len(numbers) < room and total <= CHUNK_BYTES:
            number = next(self._left, None)
            if number is None:
                self._exhausted = True
                break
            numbers.append(number)
            total += self._keep(number)
        return numbers

    def _keep(self, number: int) -> int:
        size = self._gate.weigh(number)
        self._open[number] = (None, size)
        self._open_bytes += size
        return size

    def _hand_over(self, numbers: list[int]) -> None:
        for number, outcome in self._gate.hand_over(numbers):
            if isinstance(outcome, EkidenError):
                self._told((number, outcome))
                continue
            with self._news:
                size = self._open[number][1]
                self._open[number] = (outcome, size)
                self.handed += 1
            outcome.add_done_callback(self._told)
