"""Runs programs: performs `Run` and `Abort` for jobs of FORM_PROGRAM, through the keeper.

A job without files goes straight to the keeper and comes back whole in its report: nothing is
written or read here. One with files is *prepared* in a thread before it is handed over and its
outputs are *gathered* in a thread after it ended; what is large goes to or comes from the store.

Only a window of attempts is handed over or prepared, enough to keep the slots busy without asking;
the rest waits here, where it is easily given back.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from ekiden import limits
from ekiden.errors import BadName, EkidenError, TooLarge
from ekiden.machine import Instant
from ekiden.model.caches import BlobRef
from ekiden.model.jobs import (
    CANNOT_START,
    EXIT_CODE,
    HANDLER_ERROR,
    RESULT_TOO_LARGE,
    WORKER_LOST,
    Note,
    Spec,
)
from ekiden.model.names import shown
from ekiden.model.work import FileRef, Program, ProgramCall, ProgramOutput
from ekiden.wire.messages import Failure
from ekiden.worker import folders
from ekiden.worker.catalogue import (
    CannotStart,
    Catalogue,
    Executable,
    Found,
    ProgramConfig,
    unstartable,
)
from ekiden.worker.children import Began, Children, Ended, Launch, NotStarted
from ekiden.worker.folders import MissingOutput, Stamp
from ekiden.worker.launch import Limits
from ekiden.worker.ledger import Attempt
from ekiden.worker.machine import RECALL, STALE, Abort, Dropped, Gone, Run, RunFinished, Started
from ekiden.worker.outputs import REF_BYTES, Piece, clear, pieces_of, refs_of, told_from_files
from ekiden.worker.shelf import Shelf
from ekiden.worker.store import Store
from ekiden.worker.verdicts import note_of, told, trouble_of

__all__ = ["Executable", "Limits", "ProgramConfig", "ProgramExecutor"]

# Handed to the keeper beyond its slots: covers a round trip at thousands of programs a second.
AHEAD: Final = 16

# Attempts whose outputs are being gathered and stored, for every one that may run: when the store
# is slower than the programs, these must wait before the disk is full of outputs.
GATHERING_PER_SLOT: Final = 4

# Programs that run longer than this are announced.
SLOW_NS: Final = 10_000_000
_WATCH_S: Final = 0.02

# File work of small jobs is many short calls: more threads than this only fight for the
# interpreter, and a large file must not hold up all others.
_THREADS: Final = 2

_PLANS_MAX: Final = 1024
_BLOB: Final = re.compile("[0-9a-f]{64}")

# The folders of a dead keeper are wiped: what was found there need not be all there was.
_OUTPUTS_LOST: Final = (
    WORKER_LOST, "the process that keeps this worker's programs died, and its outputs were lost",
)  # fmt: skip

_decode_program = msgspec.msgpack.Decoder(Program).decode
_decode_call = msgspec.msgpack.Decoder(ProgramCall).decode
_encode = msgspec.msgpack.Encoder().encode

Emit = Callable[[Any], None]


class _Plan(Struct, frozen=True):
    """What the attempts of a spec have in common; or why none of them can start."""

    program: Program
    env: dict[str, str]
    mem_mb: int
    trouble: str = ""


class _Attempt:
    """One attempt on its way through this executor."""

    __slots__ = ("abort", "began", "call", "err", "folder", "grant", "job", "number", "offset",
                 "out", "plan", "ran", "stamps", "storing", "try_no")  # fmt: skip

    def __init__(self, plan: _Plan, grant: int, offset: int, job: str, try_no: int) -> None:
        self.plan = plan
        self.grant = grant
        self.offset = offset
        self.job = job
        self.try_no = try_no
        self.call = ProgramCall()
        self.abort = ""
        """Why nobody wants it any more; it was answered where an answer is due."""
        self.number = 0
        """Of the child, while the keeper has it."""
        self.began: Instant = 0
        self.ran = False
        """Whether it is known to have begun; what ended at once never said when."""
        self.folder = ""
        """Made by us, or left to us; to be wiped."""
        self.out = ""
        self.err = ""
        self.stamps: dict[str, Stamp] = {}
        self.storing: asyncio.Task[Any] | None = None


class ProgramExecutor:
    """Performs `Run` and `Abort` for the machine that `emit` feeds. On the agent's loop only."""

    def __init__(
        self,
        config: ProgramConfig,
        slots: int,
        emit: Emit,
        children: Children,
        store: Store,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        trees: str = "",
    ) -> None:
        """`trees` is the folder of cached data. Raises WrongUsage for a config that cannot work, a
        missing sandbox above all."""
        self._config = config
        self._catalogue = Catalogue(config, str(children.scratch), trees)
        self._emit = emit
        self._children = children
        self._store = store
        self._loop = loop or asyncio.get_running_loop()
        self._limits = config.limits if config.limits != children.limits else None
        if config.limits.cpu_s:
            self._limits = config.limits
        children.set_slots(slots)
        self._window = 2 * slots + AHEAD
        self._gathering_max = GATHERING_PER_SLOT * self._window
        self._plans: dict[tuple[bytes, int], _Plan] = {}
        self._waiting: deque[_Attempt] = deque()
        self._open: dict[Attempt, _Attempt] = {}
        """Everything not answered, waiting or not."""
        self._held = 0
        self._gathering = 0
        self._folder_no = 0
        self._done: dict[int, list[tuple[int, bytes | None, Note | None, Failure | None, int]]] = {}
        self._blobs: dict[int, dict[int, list[BlobRef]]] = {}
        """What those refer to in the store, by offset."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="program-files")
        self._tasks: set[asyncio.Task[None]] = set()
        self._shelf = Shelf(store, self._in_thread)
        self._unannounced: list[_Attempt] = []
        self._watch_timer: asyncio.TimerHandle | None = None
        self._closed = False

    # -------------------------------------------------------------- what the machine asks

    def run(self, effect: Run) -> None:
        """Begin these attempts as soon as there are slots."""
        run = effect.run
        plan = self._plan_of(effect.spec)
        fresh: list[_Attempt] = []
        for at, body in enumerate(run.bodies):
            try_no = run.attempts[at] if run.attempts else 1
            attempt = _Attempt(plan, run.grant, run.first + at, run.ids[at], try_no)
            self._open[run.grant, attempt.offset] = attempt
            try:
                attempt.call = _decode_call(body)
            except (msgspec.DecodeError, RecursionError):
                self._fail(attempt, CANNOT_START, "this worker cannot read what the job asks for")
                continue
            fresh.append(attempt)
        if run.attempts:
            # Announced in this turn; begins in the next one, after the announcement has left.
            self._loop.call_soon(self._wait, fresh)
        else:
            self._wait(fresh)

    def abort(self, effect: Abort) -> None:
        """End these attempts; see `Abort`."""
        answered: list[int] = []
        for offset in effect.offsets:
            attempt = self._open.get((effect.grant, offset))
            if attempt is None or attempt.abort:
                continue
            if attempt.number:
                if effect.why == RECALL:
                    self._children.recall(attempt.number)
                    continue
                attempt.abort = effect.why
                self._children.kill(attempt.number)
            elif effect.why != RECALL or not attempt.ran:
                attempt.abort = effect.why
                self._settled(attempt)
                answered.append(offset)
                if attempt.storing is not None:
                    attempt.storing.cancel()
        if answered and effect.why != STALE:
            kind = Dropped if effect.why == RECALL else Gone
            self._emit(kind(effect.grant, answered))

    def tail(self, grant: int, offset: int, stream: str, position: int, limit: int) -> bytes | None:
        """What an attempt has written to "stdout" or "stderr" from `position` on, as far as it is
        there; None if no such attempt is at hand."""
        attempt = self._open.get((grant, offset))
        if attempt is None:
            return None
        path = attempt.out if stream == "stdout" else attempt.err
        if not path:
            return b""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return b""
        try:
            data = os.pread(fd, limit, position)
        finally:
            os.close(fd)
        # The file may have gone to another attempt, but not before the end of this one was told.
        return data if not attempt.number or self._children.is_current() else b""

    def close(self) -> None:
        """Take no more work and report nothing more. What runs ends with `children`."""
        self._closed = True
        self._waiting.clear()
        self._open.clear()
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._shelf.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -------------------------------------------------------------- starting

    def _plan_of(self, spec: Spec) -> _Plan:
        key = (spec.shared, spec.route.needs.mem_mb)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(*key)
        return plan

    def _new_plan(self, shared: bytes, mem_mb: int) -> _Plan:
        try:
            program = _decode_program(shared)
        except (msgspec.DecodeError, RecursionError):
            text = "this worker cannot read which program to run: its release may be too old"
            return _Plan(Program(""), {}, 0, text)
        try:
            return _Plan(program, self._catalogue.env_of(program), mem_mb)
        except CannotStart as error:
            return _Plan(program, {}, mem_mb, str(error))

    def _wait(self, attempts: list[_Attempt]) -> None:
        self._waiting.extend(attempt for attempt in attempts if not attempt.abort)
        self._feed()

    def _feed(self) -> None:
        """Hand over what waits, as far as the window goes."""
        waiting = self._waiting
        while waiting and self._held < self._window and self._gathering < self._gathering_max:
            attempt = waiting.popleft()
            if not attempt.abort:
                self._begin(attempt)

    def _begin(self, attempt: _Attempt) -> None:
        plan, call = attempt.plan, attempt.call
        if plan.trouble:
            self._fail(attempt, CANNOT_START, plan.trouble)
            return
        files = [*plan.program.files, *call.files]
        try:
            found = self._catalogue.find(plan.program, [file.name for file in files])
        except CannotStart as error:
            self._fail(attempt, CANNOT_START, str(error))
            return
        self._held += 1
        stdin = call.stdin.data if call.stdin is not None else b""
        catalogue = self._catalogue
        if files or stdin is None or catalogue.sandboxed or not catalogue.is_verified(found):
            self._go(self._prepare(attempt, found, files))
        else:
            self._hand_over(attempt, found, stdin, "")

    def _hand_over(self, attempt: _Attempt, found: Found, stdin: bytes, stdin_file: str) -> None:
        path = f"{attempt.folder}/{found.path}" if found.shipped else found.path
        program = attempt.plan.program
        argv = [program.command, *attempt.call.args]
        path, argv = self._catalogue.wrap(path, argv, attempt.folder)
        launch = Launch(
            argv=argv,
            path=path,
            env={
                **attempt.plan.env,
                "EKIDEN_JOB": attempt.job,
                "EKIDEN_TRY": str(attempt.try_no),
            },
            folder=attempt.folder,
            stdin=stdin,
            stdin_file=stdin_file,
            limits=self._limits,
            mem_mb=attempt.plan.mem_mb,
        )
        attempt.number = self._children.spawn(launch, partial(self._told, attempt))

    # -------------------------------------------------------------- preparing

    async def _prepare(self, attempt: _Attempt, found: Found, files: list[FileRef]) -> None:
        """Lay out the folder of an attempt, then hand it over."""
        stdin = attempt.call.stdin
        try:
            await self._children.wait_ready()
            self._folder_no += 1
            folder = attempt.folder = f"{self._children.folder}/a{self._folder_no}"
            await self._in_thread(self._lay_out, attempt, found, files)
            for file in files:
                if file.data is None and not file.cache and not attempt.abort:
                    target = await self._in_thread(folders.place_for, folder, file.name)
                    await self._fetch(attempt, file, target)
                    stamp = partial(folders.finish_file, executable=found.runs(file))
                    attempt.stamps[file.name] = await self._in_thread(stamp, target)
            stdin_file = ""
            if stdin is not None and stdin.cache:
                stdin_file = await self._in_thread(self._catalogue.cached, stdin)
            elif stdin is not None and stdin.data is None and not attempt.abort:
                stdin_file = folder + ".in"
                await self._fetch(attempt, stdin, Path(stdin_file))
        except asyncio.CancelledError:
            if self._closed or not attempt.abort:
                raise
        except (EkidenError, OSError) as error:
            if self._is_home(attempt.folder):
                self._fail(attempt, CANNOT_START, _unprepared(error))
        if attempt.abort or self._open.get((attempt.grant, attempt.offset)) is not attempt:
            await self._in_thread(clear, attempt.folder, None)
            self._release()
        elif not self._is_home(attempt.folder):
            # The keeper died, and what was laid out went with it: once more, for the next one.
            await self._in_thread(clear, attempt.folder, None)
            attempt.folder, attempt.stamps = "", {}
            self._waiting.appendleft(attempt)
            self._release()
        else:
            self._hand_over(attempt, found, (stdin and stdin.data) or b"", stdin_file)

    def _is_home(self, folder: str) -> bool:
        """Whether that folder is of the keeper there is: those of a dead one are wiped, whoever
        looks at them."""
        return bool(folder) and os.path.dirname(folder) == self._children.folder

    def _lay_out(self, attempt: _Attempt, found: Found, files: list[FileRef]) -> None:
        self._catalogue.verify(found)
        for file in files:
            # It becomes part of a path.
            if file.data is None and not file.cache and _BLOB.fullmatch(file.blob) is None:
                raise CannotStart(f"the input file {shown(file.name)} has no content")
        folders.make_folder(attempt.folder)
        for file in files:
            if file.cache:
                folders.link_file(attempt.folder, file.name, self._catalogue.cached(file))
            elif file.data is not None:
                attempt.stamps[file.name] = folders.write_file(
                    attempt.folder, file.name, file.data, executable=found.runs(file)
                )

    async def _fetch(self, attempt: _Attempt, file: FileRef, target: Path) -> None:
        if file in attempt.plan.program.files:
            shelf = os.path.dirname(attempt.folder)
            fetching = self._shelf.copy(shelf, file.blob, file.size, target)
        else:
            fetching = self._store.fetch(file.blob, file.size, target)
        await self._stored(attempt, fetching)

    async def _stored(self, attempt: _Attempt, work: Any) -> Any:
        """Wait for the store, unless nobody wants the attempt any more."""
        attempt.storing = self._loop.create_task(work, name="program-store")
        try:
            return await attempt.storing
        finally:
            attempt.storing = None

    # -------------------------------------------------------------- what the keeper says

    def _told(self, attempt: _Attempt, report: Began | Ended | NotStarted) -> None:
        if isinstance(report, Began):
            attempt.began = report.since_ns
            attempt.out, attempt.err = report.out, report.err
            self._unannounced.append(attempt)
            self._watch()
            return
        attempt.number = 0
        self._release()
        if isinstance(report, NotStarted):
            self._never_began(attempt, report)
        else:
            self._ended(attempt, report)

    def _release(self) -> None:
        self._held -= 1
        if self._waiting:
            self._feed()

    def _never_began(self, attempt: _Attempt, report: NotStarted) -> None:
        if attempt.folder:
            self._go(self._in_thread(clear, attempt.folder, None))
        if attempt.abort:
            self._answer_gone(attempt)
        elif report.why in ("recalled", "lost"):
            self._settled(attempt)
            self._emit(Dropped(attempt.grant, [attempt.offset]))
        else:
            command = attempt.plan.program.command
            self._catalogue.look_again(command)
            text = str(unstartable(command, report.errno)) if report.errno else report.why
            self._fail(attempt, CANNOT_START, text)

    def _ended(self, attempt: _Attempt, ended: Ended) -> None:
        attempt.ran = True
        attempt.out, attempt.err = ended.out, ended.err
        simple = ended.clean and ended.stdout is not None and ended.stderr is not None
        if attempt.abort:
            self._answer_gone(attempt)
            if not simple or attempt.folder:
                self._go(self._in_thread(clear, attempt.folder, ended))
        elif simple and not attempt.folder and not attempt.plan.program.outputs:
            self._judge(attempt, ended)
        else:
            self._gathering += 1
            self._go(self._gather(attempt, ended))

    def _judge(self, attempt: _Attempt, ended: Ended) -> None:
        """A run that left nothing but a little output."""
        stdout, stderr = ended.stdout or b"", ended.stderr or b""
        trouble = self._trouble_of(attempt, ended)
        if trouble is not None:
            self._fail(attempt, trouble[0], told(trouble[1], stderr, stdout), ended)
        elif len(stdout) + len(stderr) > limits.INLINE_FILE_BYTES:
            self._gathering += 1
            self._go(self._gather(attempt, ended))
        else:
            output = ProgramOutput(
                FileRef("stdout", len(stdout), stdout), FileRef("stderr", len(stderr), stderr)
            )
            self._succeed(attempt, output, ended)

    def _trouble_of(self, attempt: _Attempt, ended: Ended) -> tuple[str, str] | None:
        plan = attempt.plan
        sandboxed = self._catalogue.sandboxed
        return trouble_of(ended, plan.program.ok_codes, plan.mem_mb, sandboxed=sandboxed)

    # -------------------------------------------------------------- gathering

    async def _gather(self, attempt: _Attempt, ended: Ended) -> None:
        """Judge a run that left files, bring them in, and wipe what is left."""
        cleared = False
        home = self._children.folder
        try:
            trouble, pieces, cleared = await self._in_thread(self._examine, attempt, ended)
            if self._children.folder != home:
                trouble = _OUTPUTS_LOST
            if trouble is not None:
                self._fail(attempt, trouble[0], trouble[1], ended)
                return
            stdout, stderr, *files = [await self._ref_of(attempt, piece) for piece in pieces]
            self._succeed(attempt, ProgramOutput(stdout, stderr, files), ended)
        except asyncio.CancelledError:
            if self._closed or not attempt.abort:
                raise
        except (EkidenError, OSError) as error:
            cause = RESULT_TOO_LARGE if isinstance(error, TooLarge) else HANDLER_ERROR
            text = f"its outputs could not be brought back: {error}"
            if self._children.folder != home:
                cause, text = _OUTPUTS_LOST
            self._fail(attempt, cause, text, ended)
        finally:
            if not cleared and not self._closed:
                await self._in_thread(clear, attempt.folder, ended)
            self._gathering -= 1
            self._feed()

    def _examine(
        self, attempt: _Attempt, ended: Ended
    ) -> tuple[tuple[str, str] | None, list[Piece], bool]:
        """In a thread: what is wrong with a run, or else what it brings back; and whether all it
        has left is cleared away, as it is when nothing must be stored."""
        trouble = self._trouble_of(attempt, ended)
        pieces: list[Piece] = []
        program = attempt.plan.program
        if trouble is None:
            folder = ended.folder or attempt.folder
            keep = self._config.stdout_max
            try:
                pieces = pieces_of(ended, folder, program.outputs, attempt.stamps, keep)
            except (MissingOutput, BadName) as error:
                trouble = EXIT_CODE, str(error)
            except TooLarge as error:
                trouble = RESULT_TOO_LARGE, str(error)
        if trouble is not None:
            trouble = trouble[0], told_from_files(trouble[1], ended)
        if not all(piece.inline for piece in pieces):
            return trouble, pieces, False
        clear(attempt.folder, ended)
        return trouble, pieces, True

    async def _ref_of(self, attempt: _Attempt, piece: Piece) -> FileRef:
        if piece.inline:
            return FileRef(piece.name, piece.size, piece.data, "", piece.executable)
        source = piece.path if piece.data is None else piece.data
        assert source is not None
        stored = await self._stored(attempt, self._store.put(source))
        return FileRef(piece.name, stored.size, None, stored.blob, piece.executable)

    # -------------------------------------------------------------- outcomes

    def _succeed(self, attempt: _Attempt, output: ProgramOutput, ended: Ended) -> None:
        body = _encode(output)
        refs = refs_of(output)
        size = len(body) + REF_BYTES * len(refs)
        if size > limits.PAYLOAD_BYTES_MAX:
            text = f"the list of its output files takes {size:,} bytes; pack them into one"
            self._fail(attempt, RESULT_TOO_LARGE, text, ended)
            return
        if self._settled(attempt):
            self._report(attempt, body, note_of(ended), None, ended.ran_ns)
            if refs:
                self._blobs.setdefault(attempt.grant, {})[attempt.offset] = refs

    def _fail(
        self, attempt: _Attempt, cause: str, message: str, ended: Ended | None = None
    ) -> None:
        if self._settled(attempt):
            note = note_of(ended) if ended is not None else None
            failure = Failure(attempt.offset, cause, message[: limits.ERROR_TEXT_MAX], note)
            self._report(attempt, None, None, failure, ended.ran_ns if ended is not None else 0)

    def _settled(self, attempt: _Attempt) -> bool:
        """It is about to be answered; False if it was before."""
        return self._open.pop((attempt.grant, attempt.offset), None) is attempt

    def _answer_gone(self, attempt: _Attempt) -> None:
        if self._settled(attempt) and attempt.abort != STALE:
            self._emit(Gone(attempt.grant, [attempt.offset]))

    def _report(
        self,
        attempt: _Attempt,
        output: bytes | None,
        note: Note | None,
        failure: Failure | None,
        ran_ns: int,
    ) -> None:
        """Say so at the end of this turn, with whatever else has finished by then."""
        if not self._done:
            self._loop.call_soon(self._flush)
        outcome = (attempt.offset, output, note, failure, ran_ns)
        self._done.setdefault(attempt.grant, []).append(outcome)

    def _flush(self) -> None:
        done, self._done = self._done, {}
        blobs, self._blobs = self._blobs, {}
        if self._closed:
            return
        for grant, outcomes in done.items():
            good = [outcome for outcome in outcomes if outcome[1] is not None]
            self._emit(
                RunFinished(
                    grant,
                    [outcome[0] for outcome in good],
                    [outcome[1] for outcome in good if outcome[1] is not None],
                    {outcome[0]: outcome[2] for outcome in good if outcome[2] is not None},
                    [outcome[3] for outcome in outcomes if outcome[3] is not None],
                    sum(outcome[4] for outcome in outcomes),
                    blobs.get(grant, {}),
                )
            )

    # -------------------------------------------------------------- watch

    def _watch(self) -> None:
        if self._watch_timer is None and not self._closed:
            self._watch_timer = self._loop.call_later(_WATCH_S, self._look)

    def _look(self) -> None:
        """Announce what runs for a while. Stops when there is nothing to announce."""
        self._watch_timer = None
        now = time.monotonic_ns()
        running = [attempt for attempt in self._unannounced if attempt.number]
        slow = [attempt for attempt in running if now - attempt.began >= SLOW_NS]
        self._unannounced = [attempt for attempt in running if now - attempt.began < SLOW_NS]
        if slow:
            self._emit(Started([(each.grant, each.offset, each.began) for each in slow]))
        if self._unannounced:
            self._watch()

    # -------------------------------------------------------------- threads and tasks

    def _in_thread(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return self._loop.run_in_executor(self._threads, function, *args)

    def _go(self, work: Any) -> None:
        task = asyncio.ensure_future(work, loop=self._loop)
        self._tasks.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def _unprepared(error: Exception) -> str:
    if isinstance(error, CannotStart):
        return str(error)
    if isinstance(error, FileExistsError):
        return "two of its input files have one name, or one is a folder of the other"
    return f"its inputs could not be laid out: {error}"
