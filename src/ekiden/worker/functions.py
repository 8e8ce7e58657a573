"""Runs Python functions in `runner` processes, one per slot.

A function comes by the hash of its pickle. Its bytes are fetched from the broker's store once, kept
here while they are used, and taught to each runner that needs them. The agent never opens them.

Results up to `INLINE_FILE_BYTES` travel with the attempt; a larger one is written to a file by the
runner, streamed from there into the broker's store, and settled when the broker has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ekiden.errors import EkidenError
from ekiden.model.jobs import CANNOT_START, FORM_FUNCTION, OUT_STORED, Note, Spec
from ekiden.model.work import FileRef, Function
from ekiden.wire.messages import Failure
from ekiden.worker.chunks import Batch, Chunk, Kind, Outcomes
from ekiden.worker.contract import RECALL, Abort, Run
from ekiden.worker.lane import Children, Current, Lane, Talk
from ekiden.worker.lanes import RECYCLE_JOBS, RECYCLE_MB, Emit, LaneExecutor
from ekiden.worker.launch import RUNNER, Frames, Launch
from ekiden.worker.ledger import Attempt
from ekiden.worker.runner import (
    CELL_BYTES,
    PYTHON,
    Done,
    Forget,
    Ready,
    Recall,
    Rest,
    Said,
    Teach,
    Work,
    decode_answer,
    framed,
)
from ekiden.worker.store import Store

# What a runner sends without a stop: more is a function that writes to the wrong descriptor.
_FRAME_BYTES_MAX: Final = 64 << 20

# Functions that one runner keeps open, and pickles that the agent keeps for teaching them.
TAUGHT_MAX: Final = 200
CODE_BYTES_MAX: Final = 64 << 20

# A function's pickle: with data in its globals or its closure it may be large, but every runner
# holds it. More should come as an argument or a file.
FUNCTION_BYTES_MAX: Final = 16 << 20

# Results on their way into the store, for each slot: more would only fill the disk.
_STORING_PER_SLOT: Final = 4

# What a runner's interpreter needs; the rest of the agent's environment may hold secrets.
_ENV_PASSED: Final = (
    "PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME",
    "PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
)  # fmt: skip

_decode_function = msgspec.msgpack.Decoder(Function).decode
_encode = msgspec.msgpack.Encoder().encode


def pattern() -> str:
    """What a worker that runs functions announces: those of its own Python minor version."""
    return f"job.function.py{PYTHON.replace('.', '')}.>"


class _Known(Kind):
    """A function: what was learned about it and, once fetched, its pickle."""

    __slots__ = ("blob", "code", "name", "waiting")

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.blob = function.blob
        self.name = function.name
        self.code: bytes | None = None
        self.waiting: list[Batch] = []
        """Until the pickle is here."""


class FunctionExecutor(LaneExecutor):
    """Performs `Run` and `Abort` of functions. To be used from the agent's loop."""

    what = "the runner"

    def __init__(
        self,
        slots: int,
        emit: Emit,
        children: Children,
        store: Store,
        *,
        recycle_jobs: int = RECYCLE_JOBS,
        recycle_mb: int = RECYCLE_MB,
        env: Mapping[str, str] | None = None,
        path: list[str] | None = None,
    ) -> None:
        """`env` is added to what a runner sees; `path` is where it looks for modules first
        [the agent's working folder]."""
        super().__init__(slots, emit, children, recycle_jobs=recycle_jobs, recycle_mb=recycle_mb)
        self._store = store
        self._path = [os.getcwd()] if path is None else path
        self._env = {**_runner_env(), **(env or {})}
        self._slots = slots
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._storing: dict[Attempt, asyncio.Task[None]] = {}

    def handles(self, spec: Spec) -> bool:
        """Whether such jobs are for this executor."""
        return spec.form == FORM_FUNCTION

    # -------------------------------------------------------------- what the machine asks

    def run(self, effect: Run) -> None:
        """Begin these attempts as soon as their function is here and there are slots."""
        run = effect.run
        found = self._find(effect.spec)
        if isinstance(found, str):
            failures = [Failure(run.first + at, CANNOT_START, found) for at in range(len(run.ids))]
            self.fail(run.grant, failures)
            return
        batch = Batch(run, effect.spec, found)
        if found.code is not None:
            self.begin(batch)
            return
        self.hold(batch)
        found.waiting.append(batch)
        if len(found.waiting) == 1:
            size = _decode_function(effect.spec.shared).size
            self._spawn(self._fetch(found, size))

    def abort(self, effect: Abort) -> None:
        """End these attempts; see `Abort`."""
        super().abort(effect)
        if effect.why == RECALL:
            return  # What is being stored has run.
        for offset in effect.offsets:
            task = self._storing.pop((effect.grant, offset), None)
            if task is not None:
                task.cancel()
                self.settle(effect.grant, [offset], effect.why)
        self.pump()

    def close(self) -> None:
        """End every runner. Nothing is told any more."""
        super().close()
        for task in [*self._tasks, *self._storing.values()]:
            task.cancel()

    # -------------------------------------------------------------- functions

    def _find(self, spec: Spec) -> _Known | str:
        """The function of a spec, or why it cannot run here."""
        try:
            function = _decode_function(spec.shared)
        except (msgspec.DecodeError, RecursionError) as error:
            return f"what function to run cannot be read: {error}"
        if function.python != PYTHON:
            return (
                f"the function {function.name!r} was made by Python {function.python}, this "
                f"worker runs {PYTHON}: pickles of code fit no other version"
            )
        if function.size > FUNCTION_BYTES_MAX:
            return f"the function {function.name!r} has {function.size:,} bytes, which is too many"
        known = self._known.get(function.blob)
        if known is None:
            known = self._known[function.blob] = _Known(function)
            self._drop_unused(known)
        self._known.move_to_end(function.blob)
        return known

    def _drop_unused(self, keep: _Known) -> None:
        """Forget functions that were not called for long; who still runs one holds it."""
        held = sum(len(known.code or b"") for known in self._known.values())
        for known in list(self._known.values()):
            if held <= CODE_BYTES_MAX and len(self._known) <= 5 * TAUGHT_MAX:
                return
            if known is not keep and not known.waiting:
                held -= len(known.code or b"")
                del self._known[known.blob]

    async def _fetch(self, known: _Known, size: int) -> None:
        why = ""
        try:
            known.code = await self._store.read(known.blob, size)
        except EkidenError as error:
            why = f"the function {known.name!r} cannot be fetched: {error}"
        waiting, known.waiting = known.waiting, []
        for batch in waiting:
            if why:
                self.fail_held(batch, CANNOT_START, why)
            else:
                self.release(batch)

    # -------------------------------------------------------------- large results

    def may_begin(self) -> bool:
        """Results must leave before more are made."""
        return len(self._storing) < self._slots * _STORING_PER_SLOT

    def keep(self, attempt: Attempt, path: str) -> None:
        """A result lies in a file: bring it to the store and settle the attempt then."""
        grant, offset = attempt
        # Out of the runner's folder, which is wiped when the runner ends; but not further, so that
        # it goes with the keeper at the latest.
        ours = Path(path).parent.with_name(f"result-{grant}-{offset}")
        try:
            os.rename(path, ours)
        except OSError as error:
            self._not_stored(attempt, error)
        else:
            self._storing[attempt] = self._loop.create_task(self._put(attempt, ours))

    def _not_stored(self, attempt: Attempt, error: Exception) -> None:
        text = f"its result cannot be stored: {error}"
        self.fail(attempt[0], [Failure(attempt[1], CANNOT_START, text)])

    async def _put(self, attempt: Attempt, path: Path) -> None:
        grant, offset = attempt
        try:
            stored = await self._store.put(path)
        except (EkidenError, OSError) as error:
            self._storing.pop(attempt, None)
            self._not_stored(attempt, error)
        else:
            self._storing.pop(attempt, None)
            ref = FileRef("", stored.size, None, stored.blob)
            refs = [(stored.blob, stored.size)]
            self.finish(grant, offset, _encode(ref), Note(form=OUT_STORED), refs)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.pump()

    # -------------------------------------------------------------- runners

    def launch(self) -> Launch:
        """A runner."""
        return Launch(
            argv=[sys.executable, "-P", "-m", "ekiden.worker.runner", *self._path],
            env=self._env,
            wiring=RUNNER,
        )

    def new_talk(self, lane: Lane) -> Talk:
        """The conversation with a runner."""
        return _RunnerTalk(lane, self)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _runner_env() -> dict[str, str]:
    env = {name: os.environ[name] for name in _ENV_PASSED if name in os.environ}
    home = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))
    return env


class _RunnerTalk(Talk):
    """The conversation with one runner."""

    def __init__(self, lane: Lane, owner: FunctionExecutor) -> None:
        self._lane = lane
        self._owner = owner
        self._frames = Frames()
        self._unread = 0
        """Bytes of a frame that is not complete."""
        self._taught: OrderedDict[str, None] = OrderedDict()
        self._cell: memoryview | None = None

    def begin(self) -> None:
        """Share the cell with the runner, before anything is said."""
        with tempfile.TemporaryFile() as file:
            file.write(bytes(CELL_BYTES))
            file.flush()
            self._lane.send_fd(file.fileno())
            self._cell = memoryview(mmap.mmap(file.fileno(), CELL_BYTES)).cast("Q")

    def close(self) -> None:
        """Let go of the cell."""
        self._cell = None

    def give(self, chunk: Chunk) -> None:
        """Teach the function if need be, then send the calls."""
        batch, run = chunk.batch, chunk.batch.run
        known = batch.kind
        assert isinstance(known, _Known)
        frames = []
        if known.blob not in self._taught:
            assert known.code is not None
            frames.append(framed(Teach(known.blob, known.code)))
            if len(self._taught) >= TAUGHT_MAX:
                oldest, _ = self._taught.popitem(last=False)
                frames.append(framed(Forget([oldest])))
        self._taught[known.blob] = None
        self._taught.move_to_end(known.blob)
        span = slice(chunk.low, chunk.end)
        attempts = run.attempts[span]
        name = batch.spec.name
        work = Work(chunk.number, known.blob, name, run.ids[span], batch.bodies[span], attempts)
        frames.append(framed(work))
        self._lane.send(b"".join(frames))

    def recall(self) -> bool:
        """Ask for what has finished and for what has not begun."""
        self._lane.send(framed(Recall()))
        return True

    def current(self) -> Current | None:
        """What the runner has noted in the cell, unless it has finished that."""
        if self._cell is None:
            return None
        since, place = self._cell[1], self._cell[0]
        chunk = self._lane.chunk_of(place >> 32)
        if chunk is None:
            return None
        at = chunk.low + (place & 0xFFFF_FFFF)
        return (chunk, at, since) if chunk.done <= at < chunk.end else None

    def heard(self, data: bytes) -> None:
        """Frames of the runner, or of a function that found its descriptor."""
        bodies = self._frames.feed(data)
        self._unread += len(data) - sum(len(body) + 4 for body in bodies)
        try:
            for body in bodies:
                self._take(decode_answer(body))
        except msgspec.DecodeError as error:
            self._lane.condemn(f"it sent what cannot be read: {error}")
        if self._unread > _FRAME_BYTES_MAX:
            self._lane.condemn("it sent more than any result may have")

    def _take(self, answer: Ready | Done | Rest | Said) -> None:
        lane = self._lane
        match answer:
            case Done():
                chunk = lane.chunk_of(answer.number)
                if chunk is None or chunk.low + answer.first != chunk.done:
                    lane.condemn("it told of calls that it was not given")
                else:
                    self._done(chunk, answer)
            case Rest():
                lane.rest(
                    [
                        (number, chunk.low + at)
                        for number, at in answer.places
                        if (chunk := lane.chunk_of(number)) is not None
                    ]
                )
            case Said():
                chunk = lane.chunk_of(answer.number)
                if chunk is not None and chunk.low + answer.at < chunk.end:
                    self._owner.note(chunk, chunk.low + answer.at, answer.body)
            case Ready():
                self.warm = True
                lane.ready()

    def _done(self, chunk: Chunk, done: Done) -> None:
        some = Outcomes(done.outputs, done.ran_ns)
        base = chunk.batch.first + chunk.low
        if done.troubles:
            some.failures = [
                Failure(base + each.at, each.cause, each.message, None, each.detail)
                for each in done.troubles
            ]
        for at, path, _size in done.stored:
            if os.path.dirname(path) != self._lane.folder:
                self._lane.condemn("it named a result that is not in its folder")
                return
            some.later.add(base + at)
            self._owner.keep((chunk.batch.grant, base + at), path)
        self._lane.outcomes(chunk, some)
