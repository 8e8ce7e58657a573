"""`ekiden.Worker`: handlers, and the process that serves them.

The machine and its connection live in a thread with a loop of their own. So `serve` can run inside
a user's loop, `async` handlers run on that loop beside whatever else the user does there, and
nothing that a handler does can hold a heartbeat back.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from ekiden import limits
from ekiden.core.subjects import check_pattern
from ekiden.errors import Closed, EkidenError, Fault, Unreachable, WrongUsage
from ekiden.machine import Log
from ekiden.model.ids import check_party
from ekiden.observe.logs import log_effect, shown
from ekiden.worker import hardware
from ekiden.worker.executors import HandlerExecutor
from ekiden.worker.handlers import Handlers, Job
from ekiden.worker.household import Household
from ekiden.worker.machine import (
    Abort,
    CachesOffered,
    Drain,
    Exit,
    LoadMeasured,
    Look,
    Run,
    WorkerMachine,
)
from ekiden.worker.offers import Offers
from ekiden.world.addresses import split_addresses
from ekiden.world.codecs import CODECS
from ekiden.world.keys import find_key
from ekiden.world.loop import Driver, run, seconds
from ekiden.world.network import Network

ENV_CONNECT: Final = "EKIDEN_CONNECT"
DEFAULT_ADDRESS: Final = "127.0.0.1:7000"

# A handler that computes in pure Python gives the interpreter up this often, so that it costs the
# machine's loop half a millisecond of latency and not five. Set in a worker's own process only.
_SWITCH_S: Final = 0.0005

F = TypeVar("F", bound=Callable[..., Any])


class Worker:
    """Serves jobs with functions.

        worker = ekiden.Worker("127.0.0.1:7000", slots=8)

        @worker.handler("job.assign.echo")
        def echo(job: ekiden.Job) -> bytes:
            return job.payload

        worker.run()

    A handler returns bytes, text, None or anything JSON can hold. Plain functions run in `slots`
    threads, `async` ones on a loop, `slots` at a time. A job may run again after a crash or a lost
    connection: make handlers safe to repeat.

    `slots` defaults to the number of processors, `subjects` to the patterns of the handlers,
    `address` to $EKIDEN_CONNECT or 127.0.0.1:7000; it may list several brokers. The key is looked
    up by address unless `key` or `key_file` is given.
    """

    def __init__(
        self,
        address: str | None = None,
        slots: int | None = None,
        *,
        worker_id: str | None = None,
        subjects: list[str] | None = None,
        labels: dict[str, str] | None = None,
        key_file: str | Path | None = None,
        key: bytes | None = None,
        offers: Offers | None = None,
    ) -> None:
        self.addresses = split_addresses(address or os.environ.get(ENV_CONNECT) or DEFAULT_ADDRESS)
        self.slots = hardware.cpu_count() if slots is None else slots
        if self.slots < 1:
            raise WrongUsage(f"a worker needs at least one slot, not {slots}")
        random_part = f"{random.SystemRandom().getrandbits(24):06x}"
        self.worker_id = worker_id or f"{hardware.host_name()}-{random_part}"
        check_party(self.worker_id, "worker")
        self.labels = _checked_labels(labels or {})
        self.handlers = Handlers()
        self.offers = Offers() if offers is None else offers  # one with nothing in it is false
        self._subjects = [check_pattern(subject) for subject in subjects or []]
        self._key = key
        self._key_file = key_file
        self._engine: _Engine | None = None

    # -------------------------------------------------------------- handlers

    def handler(self, pattern: str) -> Callable[[F], F]:
        """Let the decorated function handle jobs whose subject `pattern` picks."""
        self._check_idle()
        return lambda function: self.handlers.add(pattern, function)

    def include(self, source: Handlers | Worker) -> None:
        """Take over the handlers of another worker or registry."""
        self._check_idle()
        handlers = source.handlers if isinstance(source, Worker) else source
        for pattern, function in handlers.items():
            self.handlers.add(pattern, function)

    @property
    def patterns(self) -> list[str]:
        """What this worker announces to the broker."""
        return self._subjects or [*self.handlers.patterns, *self.offers.patterns]

    # -------------------------------------------------------------- serving

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM, then finish what has begun; a second signal ends at once.

        Returns an exit code: 0 drained, 3 nothing reachable, 4 refused, 128 + n ended by signal n.
        """
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            return run(self._run())
        except EkidenError as error:
            sys.stderr.write(f"ekiden worker: {error}\n")
            return 3 if isinstance(error, Fault) else 4
        finally:
            sys.setswitchinterval(before)

    async def _run(self) -> int:
        seen: list[int] = []

        def told(number: int) -> None:
            seen.append(number)
            if len(seen) == 1:
                facts = {"signal": number, "then": "once more to end at once"}
                _log(Log("info", "worker.draining", facts))
                self.drain(f"signal {number}")
            else:
                self.quit()

        with _signals(told):
            await self.serve()
        return 128 + seen[-1] if len(seen) > 1 else 0

    async def serve(self) -> None:
        """Serve on the running loop until drained. Cancelling it ends at once.

        Raises the refusal if every broker refuses this worker for good.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        engine = self._begin(loop, lambda: loop.call_soon_threadsafe(ended.set))
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                engine.quit()
            self._engine = None
        engine.join(None)
        engine.raise_error()

    def start(self) -> Worker:
        """Serve in the background. See `wait_joined` and `stop`."""
        self._begin(None, lambda: None)
        return self

    def wait_joined(self, timeout_s: float = 10.0) -> None:
        """Return once a broker has taken this worker in.

        Raises `Unreachable` after `timeout_s`, or the refusal if there will be no welcome.
        """
        engine = self._running()
        if not engine.joined.wait(timeout_s):
            raise Unreachable(
                f"worker {self.worker_id!r} was not welcomed within {timeout_s:g} s",
                remedy=f"check that a broker runs at {', '.join(self.addresses)}",
            )
        engine.raise_error()

    def drain(self, reason: str = "") -> None:
        """Take no more jobs; `serve` or `run` return when those that have begun are settled."""
        self._running().feed(Drain(reason))

    def quit(self) -> None:
        """End at once. What was not finished is run elsewhere when the broker misses us."""
        self._running().quit()

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """End what `start` began: drain, but for no longer than `timeout_s`."""
        engine = self._engine
        if engine is None:
            return
        engine.feed(Drain("stopped"))
        if not engine.join(timeout_s):
            engine.quit()
            engine.join(timeout_s)
        self._engine = None

    def __enter__(self) -> Worker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -------------------------------------------------------------- inside

    def _begin(
        self, handler_loop: asyncio.AbstractEventLoop | None, on_end: Callable[[], object]
    ) -> _Engine:
        self._check_idle()
        if not self.patterns:
            raise WrongUsage(
                "this worker has no handlers and offers nothing else",
                remedy='register one with @worker.handler("job.assign.<name>")',
            )
        self._engine = _Engine(self, handler_loop, on_end)
        self._engine.start()
        return self._engine

    def _running(self) -> _Engine:
        if self._engine is None:
            raise Closed(f"worker {self.worker_id!r} does not serve", remedy="start it first")
        return self._engine

    def _check_idle(self) -> None:
        if self._engine is not None:
            raise WrongUsage(f"worker {self.worker_id!r} is serving already")

    def machine(self) -> WorkerMachine:
        """A fresh machine for this worker: the decisions without the world."""
        return WorkerMachine(
            self.addresses,
            self.worker_id,
            f"{random.SystemRandom().getrandbits(64):016x}",
            self._key_for,
            random.random,
            patterns=self.patterns,
            slots=self.slots,
            labels=self.labels,
            cpu_milli=hardware.cpu_count() * 1000,
            mem_mb=hardware.memory_mb(),
            host=hardware.host_name(),
            # A program may take hours: none shall wait here for a slot that is free elsewhere.
            credit_least=self.slots if self.offers.programs is not None else None,
            codecs=CODECS,
        )

    def _key_for(self, address: str) -> bytes:
        return self._key if self._key is not None else find_key(address, key_file=self._key_file)


class _Engine:
    """The thread in which a worker's machine, connection and executor live."""

    def __init__(
        self,
        worker: Worker,
        handler_loop: asyncio.AbstractEventLoop | None,
        on_end: Callable[[], object],
    ) -> None:
        self.joined = threading.Event()
        """Set when a broker has welcomed us, or when that will not happen any more."""
        self._worker = worker
        self._handler_loop = handler_loop
        self._on_end = on_end
        self._error: BaseException | None = None
        self._driver: Driver | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="ekiden-worker", daemon=True)

    # -------------------------------------------------------------- from other threads

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def join(self, timeout_s: float | None) -> bool:
        """Whether the thread has ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def feed(self, event: object) -> None:
        self._call(lambda driver: driver.feed(event))

    def quit(self) -> None:
        self._call(Driver.stop)

    def _call(self, function: Callable[[Driver], None]) -> None:
        driver = self._driver
        if driver is not None:
            with contextlib.suppress(RuntimeError):  # It has ended by itself.
                driver.loop.call_soon_threadsafe(function, driver)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -------------------------------------------------------------- in the thread

    def _main(self) -> None:
        try:
            run(self._serve())
        except BaseException as error:  # noqa: BLE001
            # Raised again where somebody waits; a thread has nobody to tell.
            self._error = error
            if not isinstance(error, EkidenError):
                _log(Log("error", "worker.failed", {"why": repr(error)}))
        finally:
            self._started.set()
            self.joined.set()
            with contextlib.suppress(RuntimeError):  # The loop that waited is gone.
                self._on_end()

    async def _serve(self) -> None:
        worker = self._worker
        driver = Driver(worker.machine())
        network = Network(driver)
        household = Household(worker.offers, worker.slots, driver)
        gate = household.gate
        handlers = HandlerExecutor(
            worker.handlers, worker.slots, gate.heard, handler_loop=self._handler_loop
        )
        await household.open(handlers)
        driver.handle(Run, gate.run)
        driver.handle(Abort, gate.abort)
        driver.handle(Look, gate.look)
        driver.handle(CachesOffered, household.caches.offered)
        driver.handle(Log, self._note)
        driver.handle(Exit, lambda effect: self._exit(driver, effect))
        self._driver = driver
        self._measure(driver)
        driver.wake()
        self._started.set()
        try:
            await driver.wait_ended()
        finally:
            household.close()
            await network.wait_closed()

    def _measure(self, driver: Driver) -> None:
        if not driver.ended:
            driver.feed(LoadMeasured(hardware.load_percent()))
            driver.loop.call_later(seconds(limits.HEARTBEAT_NS), self._measure, driver)

    def _note(self, line: Log) -> None:
        if line.event == "worker.joined":
            self.joined.set()
        _log(line)

    def _exit(self, driver: Driver, effect: Exit) -> None:
        if effect.error is not None:
            driver.fail(effect.error)
        else:
            driver.stop()


# ------------------------------------------------------------------ loading


def load_handlers(reference: str) -> Handlers:
    """The handlers named by `package.module:worker` or `path/to/file.py[:worker]`.

    What is named is a `Worker` or a `Handlers`; without a name, `worker` or `handlers` of that
    module, or the only one it has.
    """
    target, name = _split_reference(reference)
    if target.endswith(".py"):
        module = _import_file(Path(target))
    else:
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            module = importlib.import_module(target)
        except ModuleNotFoundError as error:
            raise WrongUsage(
                f"cannot import {target!r} for --handlers: {error}",
                remedy="name a module as pkg.module:worker, or a file as path/to/file.py",
            ) from error
    return _handlers_of(module, name, reference)


def _split_reference(reference: str) -> tuple[str, str]:
    target, colon, name = reference.rpartition(":")
    # The colon of a Windows drive is no separator, and what follows it is no name.
    return (target, name) if colon and name.isidentifier() else (reference, "")


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise WrongUsage(f"there is no file {str(path)!r} to load handlers from")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise WrongUsage(f"{str(path)!r} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _handlers_of(module: Any, name: str, reference: str) -> Handlers:
    if name:
        found = getattr(module, name, None)
    else:
        kinds = (Worker, Handlers)
        all_found = [value for value in vars(module).values() if isinstance(value, kinds)]
        only = all_found[0] if len(all_found) == 1 else None
        found = getattr(module, "worker", None) or getattr(module, "handlers", None) or only
    if isinstance(found, Worker):
        found = found.handlers
    if not isinstance(found, Handlers):
        raise WrongUsage(
            f"{reference!r} names no worker",
            remedy="let the module have `worker = ekiden.Worker()` with its handlers, or name it "
            "after a colon",
        )
    if not found.patterns:
        raise WrongUsage(f"{reference!r} has no handlers")
    return found


# ------------------------------------------------------------------ small things


def _checked_labels(labels: dict[str, str]) -> dict[str, str]:
    if len(labels) > limits.LABELS_MAX:
        raise WrongUsage(f"a worker has at most {limits.LABELS_MAX} labels, not {len(labels)}")
    for name, value in labels.items():
        if not name or max(len(name), len(value)) > limits.NAME_LENGTH_MAX:
            raise WrongUsage(
                f"label {name!r}={value!r} is not usable",
                remedy=f"labels are text of at most {limits.NAME_LENGTH_MAX} characters",
            )
    return dict(labels)


def _log(line: Log) -> None:
    """To the log the program has set up; else through `logging`, which shows warnings only."""
    if structlog.is_configured():
        log_effect(line)
        return
    level = logging.getLevelNamesMapping()[line.level.upper()]
    facts = " ".join(f"{name}={shown(value)}" for name, value in line.facts.items())
    logging.getLogger("ekiden.worker").log(level, "%s %s", line.event, facts)


@contextlib.contextmanager
def _signals(told: Callable[[int], None]) -> Iterator[None]:
    """Call `told` on the running loop for SIGINT and SIGTERM, as far as this thread may ask."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    for number in numbers:
        try:
            loop.add_signal_handler(number, told, int(number))
        except NotImplementedError:  # Windows
            before[number] = signal.signal(
                number, lambda number, _: loop.call_soon_threadsafe(told, number)
            )
    try:
        yield
    finally:
        for number in numbers:
            if number in before:
                signal.signal(number, before[number])
            else:
                loop.remove_signal_handler(number)


__all__ = ["Handlers", "Job", "Worker", "load_handlers"]
