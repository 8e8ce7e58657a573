"""A run being followed: outcomes saved and shown as they come, until it ends or a person leaves.

One thread hands jobs over (see `feeding`), a few save what came back, and this one does all the
talking. It never waits for the disk or the broker, so Ctrl-C is answered at once: the first
detaches, a second within a moment cancels the run, a third ends the command there and then.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ekiden.cli import jobs, output, saving
from ekiden.cli.feeding import WINDOW, Feeder, Gate
from ekiden.cli.joblog import NO_EXIT, JobLog, Record, command_text
from ekiden.cli.manifest import Manifest, job_id, number_of
from ekiden.cli.saving import Ending, Saver
from ekiden.cli.showing import DRAW_S, Counts, Failures, Printer, Ticker
from ekiden.errors import Closed, DiskFull, EkidenError, JobFailed, QueueFull, ResultGone
from ekiden.limits import NS

if TYPE_CHECKING:
    from ekiden.client.blocking import Client
    from ekiden.client.futures import JobFuture

# Saving waits for the disk; more threads than this only wait for each other.
SAVERS: Final = 4

# After the first Ctrl-C, for a second one; a person who wants both has pressed it by then.
GRACE_S: Final = 2.0

# Silent for this long without a connection: say so, a person is waiting.
LOST_S: Final = 2.0

# For a broker to take what was sent before it is told to cancel it.
ACCEPT_WAIT_S: Final = 10.0

RETRY_S: Final = 1.0


class Wishes(Struct, frozen=True, kw_only=True):
    """How a run is to be followed."""

    out: Path | None = None
    """None: nothing is saved."""
    jobs: int = 0
    """The most in flight; 0: no cap."""
    max_fails: int = 0
    keep_order: bool = False
    as_json: bool = False
    quiet: bool = False
    detach: bool = False


class Follower:
    """Follows one run to its end."""

    def __init__(
        self,
        client: Client,
        run: str,
        manifest: Manifest,
        gate: Gate,
        numbers: Sequence[int],
        wishes: Wishes,
        *,
        joblog: JobLog | None = None,
        skipped: int = 0,
        hands_over: bool = True,
    ) -> None:
        """`hands_over`: the jobs are ours to submit, so none is left behind on leaving."""
        self._client = client
        self._run = run
        self._manifest = manifest
        self._template = manifest.template
        self._wishes = wishes
        self._joblog = joblog
        self._hands_over = hands_over
        shown = not wishes.as_json and not wishes.detach
        self._saver = Saver(wishes.out, show=shown)
        self._news: SimpleQueue[Any] = SimpleQueue()
        window = wishes.jobs or WINDOW
        self._feeder = Feeder(gate, numbers, self._news.put, window=window)
        self._pool = ThreadPoolExecutor(SAVERS, thread_name_prefix="ekiden-save")
        self._counts = Counts(len(numbers), skipped)
        self._ticker = Ticker(self._counts, wanted=shown and not wishes.quiet)
        self._printer = Printer(numbers, in_order=wishes.keep_order, shown=shown)
        self._failures = Failures()
        self._interrupts = 0
        self._left_at = 0.0
        self._gave_up = False
        self._cancelled: dict[str, Any] | None = None
        self._lost_since = 0.0
        self._lost = False

    def follow(self) -> int:
        """Until all jobs have ended or nobody wants to know any more; the exit code."""
        if self._wishes.detach:
            self._feeder.open_wide()
        with self._answering_interrupts():
            self._feeder.start()
            try:
                while not self._over():
                    self._step()
                if self._interrupts > 1:
                    self._cancel()
            finally:
                self._ticker.wipe()
                self._feeder.stop()
                self._pool.shutdown(wait=False, cancel_futures=True)
                if self._joblog is not None:
                    self._joblog.close()
        self._printer.rest()
        self._tell()
        return self._code()

    # -------------------------------------------------------------- until when

    def _over(self) -> bool:
        if self._feeder.ended:
            return True
        if self._interrupts > 1:
            return True
        if self._interrupts:
            patience = monotonic() - self._left_at > GRACE_S
            return patience and (self._handed_over() or not self._client.connected)
        return self._wishes.detach and self._handed_over()

    def _handed_over(self) -> bool:
        """Whether the broker has all that will be handed over."""
        return self._feeder.fed and self._feeder.accepted

    def _step(self) -> None:
        try:
            news = self._news.get(timeout=DRAW_S)
        except Empty:
            pass
        else:
            self._deal(news)
        self._watch_broker()
        if self._gave_up and self._cancelled is None and self._feeder.fed:
            self._cancelled = self._cancel_open()
        self._ticker.tick()

    # -------------------------------------------------------------- outcomes

    def _deal(self, news: Any) -> None:
        match news:
            case None:
                pass  # the feeder is done; nothing to do but look whether all is over
            case Ending():
                self._ended(news)
            case _Call():
                news.what()
            case (int() as number, EkidenError() as error):
                self._refused(number, error)
            case BaseException():
                raise news
            case _:
                self._settled(news)

    def _settled(self, future: JobFuture) -> None:
        number = number_of(future.job_id)
        error = future.exception()
        if isinstance(error, QueueFull | DiskFull):
            self._feeder.retry(number, error.retry_after_s or RETRY_S)
        elif isinstance(error, Closed):
            raise error
        elif self._wishes.detach:
            self._feeder.release(number)
        elif error is None or isinstance(error, JobFailed | ResultGone):
            self._pool.submit(self._save, number, future)
        else:
            self._save(number, future)  # brought nothing: nothing to wait for

    def _save(self, number: int, future: JobFuture) -> None:
        """In a thread of the pool."""
        try:
            entry = self._manifest.entries[number - 1]
            self._news.put(self._saver.settle(number, entry, future))
        except BaseException as bug:  # noqa: BLE001 - a thread has nobody to tell but this queue
            self._news.put(bug)

    def _refused(self, number: int, error: EkidenError) -> None:
        entry = self._manifest.entries[number - 1]
        identity = job_id(self._run, number)
        self._ended(
            Ending(number=number, id=identity, state=saving.REFUSED, entry=entry, error=error)
        )

    def _ended(self, ending: Ending) -> None:
        self._counts.add(ending)
        if self._joblog is not None and ending.state in (saving.DONE, saving.FAILED):
            self._joblog.add(self._record(ending))
        if ending.state in (saving.FAILED, saving.REFUSED, saving.UNSAVED):
            self._failures.add(ending)
        if self._wishes.as_json:
            output.emit(ending.document(self._run))
        else:
            self._ticker.wipe()
        shown = self._printer.add(ending)
        # What is saved may wait for its turn on disk; what is not takes a place in the window.
        for each in [ending] if self._saver.saving else shown:
            self._feeder.release(each.number)
        most = self._wishes.max_fails
        if most and self._counts.failed >= most and not self._gave_up:
            self._gave_up = True
            self._feeder.stop()

    def _record(self, ending: Ending) -> Record:
        entry = ending.entry
        # The inputs as they were given: in their jobs' folders two files of one name look alike.
        argv = [self._manifest.command, *self._template.expand(entry.inputs, ending.number)]
        code = NO_EXIT if ending.exit_code is None and not ending.signal else ending.exit_code
        return Record(
            number=ending.number,
            host=ending.worker,
            started_s=ending.started_ns / NS,
            ran_s=ending.ran_s or 0.0,
            sent=sum(_size(path) for path in entry.files.values()),
            received=ending.received,
            exit_code=0 if ending.state == saving.DONE else code or 0,
            signal=ending.signal,
            command=command_text(argv),
        )

    # -------------------------------------------------------------- a person at the keys

    @contextmanager
    def _answering_interrupts(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupted(self, _number: int, _frame: Any) -> None:
        """Between two steps of the interpreter: nothing here may wait."""
        # The moment first: `_over` may look before `_leave` had its turn, and the grace counts.
        self._left_at = monotonic()
        self._interrupts += 1
        if self._interrupts > 2:
            raise KeyboardInterrupt
        self._news.put(_Call(self._leave if self._interrupts == 1 else lambda: None))

    def _leave(self) -> None:
        """The first Ctrl-C."""
        self._ticker.wipe()
        left = self._counts.total - self._feeder.handed
        what = "detaching"
        if self._hands_over and left and not self._wishes.jobs:
            self._feeder.open_wide()
            what = f"detaching, {output.count(left, 'input')} to hand over first"
        else:
            self._feeder.stop()
        output.say(f"{what}; Ctrl-C again within {GRACE_S:g} s cancels the run")

    def _cancel(self) -> None:
        """The second Ctrl-C."""
        self._ticker.wipe()
        output.say(f"cancelling run {self._run} (Ctrl-C leaves at once)")
        self._feeder.stop()
        deadline = monotonic() + ACCEPT_WAIT_S
        while not self._handed_over() and monotonic() < deadline:
            sleep(DRAW_S)
        self._cancelled = self._cancel_open()

    def _cancel_open(self) -> dict[str, Any]:
        return jobs.change(self._client, "cancel", None, {"run": self._run, "live": True})

    # -------------------------------------------------------------- the broker

    def _watch_broker(self) -> None:
        now = monotonic()
        if self._client.connected:
            if self._lost:
                self._remark("the broker is back")
            self._lost, self._lost_since = False, 0.0
        elif not self._lost_since:
            self._lost_since = now
        elif now - self._lost_since > LOST_S and not self._lost:
            self._lost = True
            self._remark("the broker is gone; waiting for it to come back (Ctrl-C detaches)")

    def _remark(self, text: str) -> None:
        self._ticker.wipe()
        output.say(text)

    # -------------------------------------------------------------- at the end

    @property
    def _detached(self) -> bool:
        return self._wishes.detach or (self._interrupts == 1 and not self._feeder.ended)

    def _tell(self) -> None:
        spent_s = monotonic() - self._counts.begun
        if self._wishes.as_json:
            out = None if self._wishes.out is None else str(self._wishes.out)
            output.emit(
                {
                    "run": self._run,
                    **self._counts.document(),
                    "seconds": round(spent_s, 3),
                    "out": out,
                    "detached": self._detached,
                }
            )
            return
        self._failures.tell(self._run)
        if self._detached:
            self._tell_detached()
        elif not self._wishes.quiet or self._counts.failed:
            self._tell_summary(spent_s)

    def _tell_detached(self) -> None:
        left = self._counts.total - self._feeder.handed
        if self._hands_over and left:
            output.say(
                f"{output.count(left, 'input')} were not handed over; "
                f"the same command with --name {self._run} hands them over"
            )
        output.say(f"the run goes on; come back with: ekiden attach {self._run}")

    def _tell_summary(self, spent_s: float) -> None:
        left = self._counts.total - self._counts.ended
        if self._interrupts and self._cancelled is not None:
            told = " · ".join(
                f"{self._cancelled.get(word, 0):,} {word}" for word in ("cancelled", "cancelling")
            )
            output.say(f"run {self._run} is cancelled: {self._counts.sentence()} here, {told}")
            return
        if self._gave_up:
            rest = f"; {output.count(left, 'input')} were not begun" if left else ""
            output.say(f"stopped because of --max-fails {self._wishes.max_fails}{rest}")
        where = f"; outputs in {self._wishes.out}" if self._wishes.out is not None else ""
        output.say(f"{self._counts.sentence()} in {output.span(spent_s)}{where}")
        if self._interrupts:
            return
        if self._counts.of(saving.FAILED):
            again = f"ekiden dlq replay --run {self._run}; ekiden attach {self._run}"
            output.say(f"run the failed ones again: {again}")
        if self._counts.of(saving.UNSAVED):
            again = f"ekiden attach {self._run} --out DIR"
            output.say(f"try again to save what could not be, here or elsewhere: {again}")
        if self._counts.of(saving.MISSING):
            output.say(
                "not handed over: the machine that began the run did not get that far; the same "
                f"command there with --name {self._run} goes on"
            )

    def _code(self) -> int:
        if self._interrupts and self._counts.ended != self._counts.total:
            return output.INTERRUPTED
        counts = self._counts
        if counts.of(saving.FAILED, saving.CANCELLED, saving.UNSAVED, saving.MISSING):
            return output.JOB_FAILED
        return output.REFUSED if counts.of(saving.REFUSED) else output.DONE


class _Call(Struct, frozen=True):
    """Something to do that a signal has asked for."""

    what: Callable[[], None]


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
