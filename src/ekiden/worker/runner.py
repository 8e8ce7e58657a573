"""The child that runs Python functions: `python -m ekiden.worker.runner`, started by the agent.

It talks to the agent on one socket, in frames: a length of four bytes and msgpack of one of the
structs below. Functions come once, as pickles under their hash; calls come in chunks. Only here are
pickles of users opened: never in the agent, never in the broker.

Two threads. The main one runs calls, because that is where users' code expects to be. The reader
takes frames in and answers the agent at once, also while a call runs: it sends what has finished
and gives back what has not begun. The calls of a chunk are claimed from one shared iterator, by the
main thread one by one and by the reader all at once; `next` of a range iterator is a single step
under the interpreter's lock, so each call has exactly one taker.

What is at hand is also written into a *cell*, sixteen bytes of memory shared with the agent: the
agent knows which call a runner was in when it crashed, or when it holds the interpreter's lock for
so long that the reader cannot answer.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from ekiden import limits
from ekiden.worker.launch import Frames

# The agent's end is passed in as this descriptor.
CHANNEL: Final = 3

CELL_BYTES: Final = 16

# Finished calls wait at most this long for their neighbours, and are at most this many bytes: what
# was not sent is run again if the runner crashes, and the agent holds a frame in memory.
FLUSH_NS: Final = 2_000_000
FLUSH_BYTES: Final = 1 << 20

# The reader must come through while a call computes in pure Python; five milliseconds, the
# interpreter's habit, would be half of what the agent counts as slow.
_SWITCH_S: Final = 0.001

# Notes of progress leave at most this often: the agent is not to be kept busy by a tight loop.
_PROGRESS_NS: Final = 50_000_000

_PROTOCOL: Final = 5

PYTHON: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"


# ------------------------------------------------------------------ agent to runner


class Teach(Struct, array_like=True, frozen=True, tag=1):
    """A function's pickle. It is opened when a chunk needs it."""

    blob: str
    code: bytes


class Forget(Struct, array_like=True, frozen=True, tag=2):
    """These functions will not be called again before they are taught again."""

    blobs: list[str]


class Work(Struct, array_like=True, frozen=True, tag=3):
    """Calls of one function, in order. `number` names the chunk in all answers."""

    number: int
    blob: str
    name: str
    ids: list[str]
    bodies: list[bytes]
    attempts: list[int] = []


class Recall(Struct, array_like=True, frozen=True, tag=4):
    """Send what has finished, then give back what has not begun (`Rest`)."""


# ------------------------------------------------------------------ runner to agent


class Ready(Struct, array_like=True, frozen=True, tag=10):
    """The runner has started."""

    pid: int


class Trouble(Struct, array_like=True, frozen=True):
    """In place of an output: why there is none."""

    at: int
    cause: str
    message: str
    detail: bytes = b""


class Done(Struct, array_like=True, frozen=True, tag=11):
    """Calls `first` .. of a chunk have ended; `ran_ns` is what they took together. An output is
    empty where `troubles` or `stored` say more: `stored` are (at, file, size)."""

    number: int
    first: int
    outputs: list[bytes]
    ran_ns: int
    troubles: list[Trouble] = []
    stored: list[tuple[int, str, int]] = []


class Rest(Struct, array_like=True, frozen=True, tag=12):
    """The answer to `Recall`: of each chunk named, the calls from this place on never began."""

    places: list[tuple[int, int]]


class Said(Struct, array_like=True, frozen=True, tag=13):
    """A note of progress."""

    number: int
    at: int
    body: bytes


Word: TypeAlias = Teach | Forget | Work | Recall
Answer: TypeAlias = Ready | Done | Rest | Said

_encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
_decode_word = msgspec.msgpack.Decoder(Word).decode


def framed(message: Word | Answer) -> bytes:
    """A message as it travels."""
    body = _encode(message)
    return len(body).to_bytes(4, "big") + body


# ------------------------------------------------------------------ what a function may ask


class CurrentJob:
    """The job that the calling function is. Outside of one: an empty id, and notes go nowhere, so
    that a function runs as well where it was written."""

    __slots__ = ("_at", "_chunk", "_runner")

    def __init__(self, runner: Runner | None, chunk: _Chunk | None, at: int) -> None:
        self._runner = runner
        self._chunk = chunk
        self._at = at

    @property
    def id(self) -> str:
        """The job's id."""
        return self._chunk.work.ids[self._at] if self._chunk else ""

    @property
    def attempt(self) -> int:
        """1 for the first try; grows with every further one."""
        attempts = self._chunk.work.attempts if self._chunk else []
        return attempts[self._at] if attempts else 1

    @property
    def name(self) -> str:
        """The function's name, as it was submitted."""
        return self._chunk.work.name if self._chunk else ""

    def progress(self, value: Any, text: str = "") -> None:
        """Tell whoever submitted the job how far it is: `progress(0.4, "step 3")`.

        Cheap; of frequent notes the latest is sent. It may be lost, and never fails because nobody
        listens.
        """
        if self._runner is not None and self._chunk is not None:
            from ekiden.worker.handlers import noted  # Only functions that say something pay.

            self._runner.say(Said(self._chunk.work.number, self._at, noted(value, text)))

    def __repr__(self) -> str:
        return f"<CurrentJob {self.id or 'none'} attempt={self.attempt}>"


_runner: Runner | None = None


def current_job() -> CurrentJob:
    """The job that is being run by this process."""
    if _runner is None or _runner.current is None:
        return CurrentJob(None, None, 0)
    chunk = _runner.current
    return CurrentJob(_runner, chunk, chunk.at)


# ------------------------------------------------------------------ the runner


class _Chunk:
    """Calls that came together, and how far they are."""

    __slots__ = ("at", "bytes", "items", "mark", "outputs", "sent", "stored", "troubles", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.items: Iterator[int] = iter(range(len(work.bodies)))
        self.outputs: list[bytes] = []
        self.troubles: list[Trouble] = []
        self.stored: list[tuple[int, str, int]] = []
        self.at = 0
        self.sent = 0
        """How many outputs have left."""
        self.bytes = 0
        """In outputs that have not left, about."""
        self.mark = 0
        """Up to when the time of its calls is accounted for."""


class Runner:
    """One child's life."""

    def __init__(self, channel: socket.socket, cell: memoryview) -> None:
        self.current: _Chunk | None = None
        self._channel = channel
        self._cell = cell
        self._folder = os.getcwd()  # A call may go elsewhere.
        self._codes: dict[str, bytes] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._chunks: SimpleQueue[_Chunk | None] = SimpleQueue()
        self._open: deque[_Chunk] = deque()
        """Chunks whose end was not told, the one at hand first."""
        self._lock = threading.Lock()
        """Held while something is sent, and while it is decided what that is."""
        self._note: Said | None = None
        self._noted_at = 0

    # -------------------------------------------------------------- reader

    def read(self) -> None:
        """The reader's life: until the agent closes its end."""
        frames = Frames()
        while True:
            try:
                data = self._channel.recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                self._chunks.put(None)
                return
            for body in frames.feed(data):
                self._heard(_decode_word(body))

    def _heard(self, word: Word) -> None:
        match word:
            case Work():
                chunk = _Chunk(word)
                self._open.append(chunk)
                self._chunks.put(chunk)
            case Teach():
                self._codes[word.blob] = word.code
            case Forget():
                for blob in word.blobs:
                    self._codes.pop(blob, None)
                    self._functions.pop(blob, None)
            case Recall():
                self._give_back()

    def _give_back(self) -> None:
        with self._lock:
            places: list[tuple[int, int]] = []
            for chunk in self._open:
                rest = list(chunk.items)
                if rest:
                    places.append((chunk.work.number, rest[0]))
            if self._open:
                self._flush(self._open[0])
            self._channel.sendall(framed(Rest(places)))

    # -------------------------------------------------------------- sending

    def _flush(self, chunk: _Chunk) -> None:
        """Send what has ended of a chunk. The lock is held."""
        count = len(chunk.outputs)
        if count == chunk.sent:
            return
        self._flush_note()
        now = time.monotonic_ns()
        troubles = [each for each in chunk.troubles if each.at < count]
        stored = [each for each in chunk.stored if each[0] < count]
        # The main thread may add to them meanwhile, never before `count`.
        del chunk.troubles[: len(troubles)]
        del chunk.stored[: len(stored)]
        fresh = chunk.outputs[chunk.sent : count]
        took_ns = max(now - chunk.mark, 1)
        done = Done(chunk.work.number, chunk.sent, fresh, took_ns, troubles, stored)
        chunk.mark = now
        chunk.sent = count
        chunk.bytes = 0
        self._channel.sendall(framed(done))

    def say(self, note: Said) -> None:
        """Send a note of progress now, or soon if one has just left."""
        with self._lock:
            waiting, self._note = self._note, note
            wait_ns = self._noted_at + _PROGRESS_NS - time.monotonic_ns()
            if wait_ns <= 0:
                self._flush_note()
            elif waiting is None:
                later = threading.Timer(wait_ns / limits.NS, self._say_later)
                later.daemon = True
                later.start()

    def _say_later(self) -> None:
        with self._lock:
            self._flush_note()

    def _flush_note(self) -> None:
        note, self._note = self._note, None
        if note is not None:
            self._noted_at = time.monotonic_ns()
            self._channel.sendall(framed(note))

    # -------------------------------------------------------------- main thread

    def run(self) -> None:
        """The main thread's life: chunk after chunk, until the agent closes its end."""
        with self._lock:
            self._channel.sendall(framed(Ready(os.getpid())))
        while (chunk := self._chunks.get()) is not None:
            chunk.mark = time.monotonic_ns()
            self.current = chunk
            function = self._function(chunk)
            if function is not None:
                self._run_chunk(chunk, function)
            self.current = None
            with self._lock:
                self._flush(chunk)
                self._open.remove(chunk)

    def _function(self, chunk: _Chunk) -> Callable[..., Any] | None:
        """The function of a chunk; None if it cannot be had, and every call has been told so."""
        blob = chunk.work.blob
        function = self._functions.get(blob)
        if function is None:
            self._at_hand(chunk, 0)  # Opening it runs users' code: whoever crashes here is known.
            try:
                function = pickle.loads(self._codes[blob])
            except BaseException as error:  # noqa: BLE001  (whatever a user's module may raise)
                text = f"the function {chunk.work.name!r} cannot be opened here: {_unopened(error)}"
                for at in chunk.items:
                    self._fail(chunk, at, "cannot_start", text)
                return None
            assert function is not None
            self._functions[blob] = function
            self._codes.pop(blob, None)
        return function

    def _at_hand(self, chunk: _Chunk, at: int) -> None:
        chunk.at = at
        self._cell[1] = time.monotonic_ns()
        self._cell[0] = chunk.work.number << 32 | at

    def _run_chunk(self, chunk: _Chunk, function: Callable[..., Any]) -> None:
        """Run what the chunk's iterator yields. Whatever a call raises is its own failure."""
        bodies = chunk.work.bodies
        append = chunk.outputs.append
        cell, clock, loads, dumps = self._cell, time.monotonic_ns, pickle.loads, pickle.dumps
        tag = chunk.work.number << 32
        for at in chunk.items:
            chunk.at = at
            cell[1] = now = clock()
            cell[0] = tag | at
            if now - chunk.mark > FLUSH_NS or chunk.bytes > FLUSH_BYTES:
                with self._lock:
                    self._flush(chunk)
            try:
                args, kwargs = loads(bodies[at])
            except BaseException as error:  # noqa: BLE001
                text = f"the arguments cannot be opened here: {_unopened(error)}"
                self._fail(chunk, at, "cannot_start", text)
                continue
            try:
                value = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  (SystemExit included)
                self._raised(chunk, at, error)
                continue
            try:
                output = dumps(value, _PROTOCOL)
                if b"__main__" in output:
                    output = _by_value(value)
            except Exception:  # noqa: BLE001
                # What pickle refuses, cloudpickle may take: lambdas, classes of a `__main__`.
                found = self._again(chunk, at, value)
                if found is None:
                    continue
                output = found
            if len(output) > limits.INLINE_FILE_BYTES:
                self._keep(chunk, at, output)
                continue
            chunk.bytes += len(output)
            append(output)

    def _again(self, chunk: _Chunk, at: int, value: Any) -> bytes | None:
        try:
            return _by_value(value)
        except Exception as error:  # noqa: BLE001
            kind = type(value).__name__
            text = f"the result is of type {kind}, which cannot be pickled: {error}"
            self._raised(chunk, at, pickle.PicklingError(text))
            return None

    def _keep(self, chunk: _Chunk, at: int, output: bytes) -> None:
        """A large result goes to a file; the agent takes it from there."""
        path = ""
        try:
            fd, path = tempfile.mkstemp(dir=self._folder, prefix="result-")
            with open(fd, "wb") as file:
                file.write(output)
        except OSError as error:
            if path:
                os.unlink(path)  # The disk may be full of it.
            text = f"the result has {len(output):,} bytes and cannot be written: {error}"
            self._fail(chunk, at, "cannot_start", text)
            return
        chunk.stored.append((at, path, len(output)))
        chunk.outputs.append(b"")

    def _fail(self, chunk: _Chunk, at: int, cause: str, message: str, detail: bytes = b"") -> None:
        message = message[: limits.ERROR_TEXT_MAX]
        chunk.troubles.append(Trouble(at, cause, message, detail))
        # Last: a flush in between sends the trouble with its place, or neither.
        chunk.outputs.append(b"")

    def _raised(self, chunk: _Chunk, at: int, error: BaseException) -> None:
        from ekiden.worker.handlers import trouble_of  # Only functions that fail pay.

        why = trouble_of(error)
        detail = _detail_of(error) if isinstance(error, Exception) else b""
        self._fail(chunk, at, why.cause, why.message, detail)


def _by_value(value: Any) -> bytes:
    """What a plain pickle can only name here, in full: the other side has another `__main__`."""
    import cloudpickle  # Half as long to import as all the rest.

    data: bytes = cloudpickle.dumps(value, _PROTOCOL)
    return data


def _detail_of(error: Exception) -> bytes:
    """A pickle of (exception, traceback as text), if the caller can have it back and it fits."""
    import traceback

    frames = error.__traceback__.tb_next if error.__traceback__ else None  # The first is ours.
    text = "".join(traceback.format_exception(type(error), error, frames))
    # Half the room is for the exception; of a long trace the end says most.
    text = text[-limits.DETAIL_BYTES_MAX // 2 :].encode("utf-8", "replace").decode()
    try:
        data = _named_or_whole((_copy_of(error), text))
    except Exception:  # noqa: BLE001  (an exception with something in it that does not travel)
        return b""
    return data if len(data) <= limits.DETAIL_BYTES_MAX else b""


def _named_or_whole(value: Any) -> bytes:
    """Pickled by name where the other side knows the name: a class that came with the function, or
    was made by it, is known by that name nowhere."""
    try:
        data = pickle.dumps(value, _PROTOCOL)
    except Exception:  # noqa: BLE001  (as a class does that cannot be found under its name)
        return _by_value(value)
    return _by_value(value) if b"__main__" in data else data


def _copy_of(error: Exception) -> Exception:
    """The exception after a round trip: some can be pickled and not be opened again."""
    try:
        data = pickle.dumps(error, _PROTOCOL)
    except Exception:  # noqa: BLE001
        data = _by_value(error)
    copy = pickle.loads(data)
    if type(copy) is not type(error):
        raise TypeError("it came back as something else")
    return error


def _unopened(error: BaseException) -> str:
    """Why a pickle cannot be opened, and what may help."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; install that module on the workers, or start them where it is found"
    return text


def main() -> None:
    """Serve on the inherited socket until the agent closes it."""
    global _runner
    channel = socket.socket(fileno=CHANNEL)
    channel.setblocking(True)
    os.set_inheritable(CHANNEL, False)
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    shared = mmap.mmap(fds[0], CELL_BYTES)
    os.close(fds[0])
    sys.path[:0] = sys.argv[1:]
    sys.argv[1:] = []
    sys.setswitchinterval(_SWITCH_S)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _runner = Runner(channel, memoryview(shared).cast("Q"))
    threading.Thread(target=_runner.read, name="ekiden-reader", daemon=True).start()
    _runner.run()


if __name__ == "__main__":
    # Under its own name: what functions import is then the very module that runs.
    from ekiden.worker.runner import main as named_main

    named_main()
