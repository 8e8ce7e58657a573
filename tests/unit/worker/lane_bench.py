"""An executor of child processes with real children, and everything it has said."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

from ekiden.errors import UnknownBlob
from ekiden.model.caches import BlobRef
from ekiden.model.jobs import FORM_FUNCTION, Route, Spec
from ekiden.model.work import Function
from ekiden.wire.messages import AssignRun, Failure
from ekiden.worker.children import Children
from ekiden.worker.contract import Abort, Dropped, Gone, ProgressMade, Run, RunFinished, Started
from ekiden.worker.functions import FunctionExecutor
from ekiden.worker.runner import PYTHON
from ekiden.worker.services import ServiceConfig, ServiceExecutor
from ekiden.world.porter import Stored

DEADLINE_S = 60.0


class Heap:
    """A store that is a dict."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.reads = 0

    def add(self, data: bytes) -> str:
        blob = hashlib.sha256(data).hexdigest()
        self.blobs[blob] = data
        return blob

    async def put(self, source: Path | bytes) -> Stored:
        data = source if isinstance(source, bytes) else source.read_bytes()  # noqa: ASYNC240
        return Stored(self.add(data), len(data))

    async def fetch(self, blob: str, size: int, target: Path) -> None:
        target.write_bytes(self.blobs[blob])  # noqa: ASYNC240

    async def read(self, blob: str, size: int) -> bytes:
        self.reads += 1
        if blob not in self.blobs:
            raise UnknownBlob(f"no blob {blob[:8]}")
        return self.blobs[blob]


class LaneBench:
    """What any executor of lanes is asked and says."""

    executor: Any

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._changed = asyncio.Event()

    def heard(self, event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` is true: looked at when something was said, and now and then, as
        it may speak of what a child does by itself."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.02)

    def hand(self, grant: int, bodies: list[bytes], spec: Spec, attempts: list[int]) -> None:
        ids = [f"g{grant}o{at}" for at in range(len(bodies))]
        run = AssignRun(grant, 0, msgspec.Raw(), "ci", ids, bodies, attempts)
        self.executor.run(Run(run, spec))

    def abort(self, grant: int, offsets: list[int], why: str) -> None:
        self.executor.abort(Abort(grant, offsets, why))

    def said(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def outputs(self) -> dict[tuple[int, int], bytes]:
        found: dict[tuple[int, int], bytes] = {}
        for event in self.said(RunFinished):
            for at, output in zip(event.offsets, event.outputs, strict=True):
                assert (event.grant, at) not in found, "told twice"
                found[event.grant, at] = output
        return found

    @property
    def blobs(self) -> dict[tuple[int, int], list[BlobRef]]:
        events = self.said(RunFinished)
        return {(event.grant, at): refs for event in events for at, refs in event.blobs.items()}

    @property
    def failures(self) -> dict[tuple[int, int], Failure]:
        return {
            (event.grant, failure.offset): failure
            for event in self.said(RunFinished)
            for failure in event.failures
        }

    @property
    def notes(self) -> dict[tuple[int, int], Any]:
        return {
            (event.grant, at): note
            for event in self.said(RunFinished)
            for at, note in event.notes.items()
        }

    def _attempts(self, kind: type) -> list[tuple[int, int]]:
        return [(event.grant, at) for event in self.said(kind) for at in event.offsets]

    @property
    def dropped(self) -> list[tuple[int, int]]:
        return self._attempts(Dropped)

    @property
    def gone(self) -> list[tuple[int, int]]:
        return self._attempts(Gone)

    @property
    def started(self) -> list[tuple[int, int]]:
        return [(grant, at) for event in self.said(Started) for grant, at, _ in event.attempts]

    @property
    def progress(self) -> list[bytes]:
        return [event.body for event in self.said(ProgressMade)]

    @property
    def settled(self) -> int:
        return len(self.outputs) + len(self.failures)


class FunctionBench(LaneBench):
    """Runs functions."""

    def __init__(self, children: Children, slots: int, **options: Any) -> None:
        super().__init__()
        self.store = Heap()
        self.executor = FunctionExecutor(slots, self.heard, children, self.store, **options)

    def spec_of(self, function: Any, **changes: Any) -> Spec:
        code = cloudpickle.dumps(function)
        name = changes.pop("name", "it")
        shared = Function(self.store.add(code), len(code), changes.pop("python", PYTHON), name)
        body = msgspec.msgpack.encode(shared)
        return Spec(name, Route(f"job.function.py311.{name}"), form=FORM_FUNCTION, shared=body)

    def call(self, grant: int, function: Any, calls: list[tuple], **options: Any) -> None:
        """One attempt for each tuple of arguments."""
        attempts = options.pop("attempts", [])
        bodies = [cloudpickle.dumps((args, {})) for args in calls]
        self.hand(grant, bodies, self.spec_of(function, **options), attempts)

    @property
    def values(self) -> dict[tuple[int, int], Any]:
        return {at: cloudpickle.loads(output) for at, output in self.outputs.items()}


@contextlib.asynccontextmanager
async def children(folder: Path, slots: int = 2) -> AsyncIterator[Children]:
    kept = Children(folder, slots=slots)
    await kept.start()
    try:
        yield kept
    finally:
        kept.close()


@contextlib.asynccontextmanager
async def functions(folder: Path, slots: int = 2, **options: Any) -> AsyncIterator[FunctionBench]:
    async with children(folder, slots) as kept:
        bench = FunctionBench(kept, slots, **options)
        try:
            yield bench
        finally:
            bench.executor.close()


def drive(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


class ServiceBench(LaneBench):
    """Sends lines to one service."""

    def __init__(self, kept: Children, slots: int, config: ServiceConfig) -> None:
        super().__init__()
        self.executor = ServiceExecutor([config], slots, self.heard, kept)
        self.spec = Spec(config.name, Route(f"job.assign.{config.name}"))

    def send(self, grant: int, lines: list[bytes], attempts: list[int] | None = None) -> None:
        self.hand(grant, lines, self.spec, attempts or [])


@contextlib.asynccontextmanager
async def service(
    folder: Path, script: str | list[str], slots: int = 1, **config: Any
) -> AsyncIterator[ServiceBench]:
    """A service that is this Python script, or this command."""
    argv = [sys.executable, "-u", "-c", script] if isinstance(script, str) else script
    async with children(folder, slots) as kept:
        bench = ServiceBench(kept, slots, ServiceConfig(name="it", argv=argv, **config))
        try:
            yield bench
        finally:
            bench.executor.close()
