"""Warm services: long-lived programs that read one JSON line and write one JSON line.

For programs whose start costs more than the job: curves, licences, compilers. One child per slot is
started when it is first needed; its stdin and stdout are a socket. docs/SERVICES.md says what a
program has to do; the rules here:

- Lines are answered in order, one for each. What runs is the first line without an answer.
- An object with the key "ekiden" is no answer but a word to us: see `_Word`.
- A line that was written cannot be taken back, so few are written ahead, and only short ones.
- A child that breaks the rules is replaced: what it would say next could be anybody's answer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from ekiden import limits
from ekiden.errors import EkidenError
from ekiden.model.ids import check_name
from ekiden.model.jobs import CANNOT_START, FORM_PLAIN, HANDLER_ERROR, Spec
from ekiden.wire.messages import Failure
from ekiden.worker.chunks import Batch, Chunk, Kind, Outcomes
from ekiden.worker.contract import Abort, Run
from ekiden.worker.handlers import noted
from ekiden.worker.lane import UP, Children, Current, Lane, Talk
from ekiden.worker.lanes import RECYCLE_JOBS, RECYCLE_MB, Emit, LaneExecutor
from ekiden.worker.launch import SERVICE, Ended, Launch

# A line is one job's result, so it is bound like one.
LINE_BYTES_MAX: Final = limits.PAYLOAD_BYTES_MAX

_SHOWN: Final = 100

_KEY: Final = b'"ekiden"'

# A program needs them to find others, and to write numbers and times as its owner reads them.
_ENV_PASSED: Final = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")

_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_json = msgspec.json.Decoder().decode


class ServiceConfig(Struct, frozen=True, kw_only=True):
    """A service, as the worker's owner describes it."""

    name: str
    argv: list[str]
    """The command: found on the PATH, or by path. Words that name a file where the worker was
    started are made absolute, because a service runs in a folder of its own."""
    health: str = ""
    """A line to send when it starts and when it is idle; any answer in time will do."""
    health_every_s: float = 30.0
    health_timeout_s: float = 10.0
    ready: bool = False
    """It says {"ekiden": "ready"} when its start-up is over, and gets no line before."""
    start_timeout_s: float = 60.0
    """To be ready, or to answer the first health line."""
    recycle_jobs: int = RECYCLE_JOBS
    recycle_mb: int = RECYCLE_MB
    env: Mapping[str, str] = {}
    """What it sees beside PATH and the language; HOME and TMPDIR are its own folder."""


class _Word(Struct, frozen=True):
    """A line that is no answer: "ready", "progress" (`value`, `text`) or "error" (`message`)."""

    ekiden: str
    value: Any = None
    text: str = ""
    message: str = ""


_WORDS: Final = ("ready", "progress", "error")

_decode_word = msgspec.json.Decoder(_Word).decode


class ServiceExecutor:
    """Performs `Run` and `Abort` for every service of a worker. To be used from its loop."""

    def __init__(
        self, configs: Sequence[ServiceConfig], slots: int, emit: Emit, children: Children
    ) -> None:
        self._services = {
            check_name(config.name, "service"): _Service(config, slots, emit, children)
            for config in configs
        }

    @property
    def patterns(self) -> list[str]:
        """What a worker with these services announces."""
        return [f"job.assign.{name}" for name in self._services]

    def handles(self, spec: Spec) -> bool:
        """Whether such jobs are for a service."""
        return self._find(spec) is not None

    def run(self, effect: Run) -> None:
        """Begin these attempts as soon as there are slots."""
        service = self._find(effect.spec)
        assert service is not None
        service.run(effect)

    def abort(self, effect: Abort) -> None:
        """End these attempts; a grant may be of several services."""
        for service in self._services.values():
            service.abort(effect)

    def close(self) -> None:
        """End every child."""
        for service in self._services.values():
            service.close()

    def _find(self, spec: Spec) -> _Service | None:
        subject = spec.route.subject.removeprefix("job.assign.")
        return self._services.get(spec.name) or self._services.get(subject)


class _Service(LaneExecutor):
    """One service: its children, and the lines that wait for them."""

    behind_ns = 2_000_000
    """A line behind a slow one cannot be taken back, so only quick ones lie behind."""

    def __init__(self, config: ServiceConfig, slots: int, emit: Emit, children: Children) -> None:
        super().__init__(
            slots,
            emit,
            children,
            recycle_jobs=config.recycle_jobs,
            recycle_mb=config.recycle_mb,
            start_timeout_s=config.start_timeout_s,
        )
        self.what = f"the service {config.name!r}"
        self.config = config
        self.says_ready = config.ready
        """Learned: a child that has said so once will say so again."""
        self._argv = resolved(config.argv)
        self._env = {name: os.environ[name] for name in _ENV_PASSED if name in os.environ}
        self._env |= config.env
        self._kind = Kind()
        self._health_timer: asyncio.TimerHandle | None = None
        if config.health:
            self._time_health()

    def run(self, effect: Run) -> None:
        """Begin these attempts, less those whose payload is no line."""
        run, spec = effect.run, effect.spec
        if spec.form != FORM_PLAIN:
            text = f"{self.what} takes a payload of JSON, and nothing beside it"
            failures = [Failure(run.first + at, CANNOT_START, text) for at in range(len(run.ids))]
            self.fail(run.grant, failures)
            return
        lines: list[bytes] = []
        failures = []
        for at, body in enumerate(run.bodies):
            try:
                lines.append(_line_of(body))
            except msgspec.DecodeError as error:
                lines.append(b"")
                text = f"the payload is not JSON, which is what {self.what} reads: {error}"
                failures.append(Failure(run.first + at, HANDLER_ERROR, text))
        batch = Batch(run, spec, self._kind, lines)
        batch.ended = {failure.offset - run.first for failure in failures}
        self.fail(run.grant, failures)
        if len(failures) < len(lines):
            self.begin(batch)

    def close(self) -> None:
        """End every child."""
        super().close()
        if self._health_timer is not None:
            self._health_timer.cancel()

    def launch(self) -> Launch:
        """A child."""
        return Launch(argv=self._argv, env=self._env, wiring=SERVICE)

    def new_talk(self, lane: Lane) -> Talk:
        """The conversation with a child."""
        return _LineTalk(lane, self)

    def verdict(self, ended: Ended | None, fault: str, *, fresh: bool) -> tuple[str, str]:
        """A child that ends before it has answered anything could not start, most likely."""
        cause, text = super().verdict(ended, fault, fresh=fresh)
        return (CANNOT_START if fresh and not fault else cause), text

    # -------------------------------------------------------------- health

    def _time_health(self) -> None:
        every_s = self.config.health_every_s
        self._health_timer = self._loop.call_later(every_s / 2, self._check_health)

    def _check_health(self) -> None:
        long_ago = self._loop.time() - self.config.health_every_s
        for lane in self.lanes:
            talk = lane.talk
            assert isinstance(talk, _LineTalk | None)
            if talk is None or lane.state != UP or lane.chunks:
                continue
            if talk.free and talk.heard_at <= long_ago:
                talk.ask_health()
        self._time_health()


class _LineTalk(Talk):
    """The conversation with one child."""

    def __init__(self, lane: Lane, service: _Service) -> None:
        self.heard_at = 0.0
        self._lane = lane
        self._service = service
        self._tail = b""
        self._asked_health = False
        self._health_timer: asyncio.TimerHandle | None = None

    def began(self) -> None:
        """Ready at once, unless there is a way to know better."""
        if self._service.says_ready:
            return
        if self._service.config.health:
            self._send_health()
        else:
            self._lane.ready()

    def close(self) -> None:
        """No more health."""
        self._stop_health_timer()

    def give(self, chunk: Chunk) -> None:
        """Write the lines."""
        lines = chunk.batch.bodies[chunk.low : chunk.end]
        self._lane.send(b"\n".join([*lines, b""]))

    def recall(self) -> bool:
        """What was written has gone."""
        return False

    def current(self) -> Current | None:
        """The first line without an answer."""
        if not self._lane.chunks:
            return None
        chunk = self._lane.chunks[0]
        return chunk, chunk.done, chunk.mark

    # -------------------------------------------------------------- health

    def ask_health(self) -> None:
        """See whether an idle child still answers; until it has, it gets nothing else."""
        self._send_health()
        loop = asyncio.get_running_loop()
        timeout_s = self._service.config.health_timeout_s
        fault = f"it did not answer the health line within {timeout_s:g} s"
        self._health_timer = loop.call_later(timeout_s, self._lane.condemn, fault)

    def _send_health(self) -> None:
        self.free = False
        self._asked_health = True
        self._lane.send(self._service.config.health.encode() + b"\n")

    def _is_healthy(self) -> None:
        self._asked_health = False
        self.free = True
        self._stop_health_timer()
        self._lane.ready()

    def _stop_health_timer(self) -> None:
        if self._health_timer is not None:
            self._health_timer.cancel()
            self._health_timer = None

    # -------------------------------------------------------------- what the child says

    def heard(self, data: bytes) -> None:
        """Lines, whole and in part."""
        self.heard_at = asyncio.get_running_loop().time()
        if not self.warm:
            # Its start-up does not count as the time of the line that it was given first.
            self.warm = True
            for chunk in self._lane.chunks:
                chunk.mark = time.monotonic_ns()
        if self._tail:
            data = self._tail + data
        lines = data.split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > LINE_BYTES_MAX or max(map(len, lines), default=0) > LINE_BYTES_MAX:
            self._lane.condemn(f"it wrote a line of more than {LINE_BYTES_MAX:,} bytes")
        elif lines:
            words, fault = _examined(lines, data)
            self._take(lines, words)
            if fault:
                self._lane.condemn(fault)

    def _take(self, lines: list[bytes], words: dict[int, _Word]) -> None:
        """Lines that keep the rules, each by itself. If they are too many, none counts: whose
        answer is whose cannot be said."""
        if self._asked_health:
            self._take_health(lines, words)
        owed = sum(chunk.end - chunk.done for chunk in self._lane.chunks)
        quiet = sum(word.ekiden != "error" for word in words.values())
        if len(lines) - quiet > owed:
            self._lane.condemn(f"it wrote {lines[-1][:_SHOWN]!r}, which nobody had asked for")
        elif words:
            self._take_mixed(lines, words)
        else:
            self._answered(lines, {})

    def _take_health(self, lines: list[bytes], words: dict[int, _Word]) -> None:
        """The first line that is no word answers the health line."""
        for at, _ in enumerate(lines):
            if at not in words:
                self._is_healthy()
                lines[at] = b'{"ekiden": "healthy"}'
                words[at] = _Word("healthy")
                return

    def _take_mixed(self, lines: list[bytes], words: dict[int, _Word]) -> None:
        """Answers with words between them, in order."""
        answers: list[bytes] = []
        errors: dict[int, str] = {}
        for at, line in enumerate(lines):
            word = words.get(at)
            if word is None:
                answers.append(line)
            elif word.ekiden == "error":
                errors[len(answers)] = word.message or "the service says no more than that"
                answers.append(b"")
            else:
                self._answered(answers, errors)
                answers, errors = [], {}
                self._word(word)
        self._answered(answers, errors)

    def _word(self, word: _Word) -> None:
        match word.ekiden:
            case "ready":
                self._service.says_ready = True
                self._lane.ready()
            case "progress":
                found = self.current()
                if found is not None:
                    self._note(found, word)
            case _:
                pass  # It was healthy.

    def _note(self, found: Current, word: _Word) -> None:
        try:
            self._service.note(found[0], found[1], noted(word.value, word.text))
        except EkidenError as error:
            self._lane.condemn(str(error))

    def _answered(self, lines: list[bytes], errors: dict[int, str]) -> None:
        """These are the next answers; at the places of `errors` there is none."""
        chunks = self._lane.chunks
        if not lines or not chunks:
            return
        each_ns = max((time.monotonic_ns() - chunks[0].mark) // len(lines), 1)
        start = 0
        while start < len(lines) and chunks:
            chunk = chunks[0]
            part = lines[start : start + chunk.end - chunk.done]
            some = Outcomes(part, each_ns * len(part))
            if errors:
                first = chunk.batch.first + chunk.done - start
                some.failures = [
                    Failure(first + at, HANDLER_ERROR, _cut(text))
                    for at, text in errors.items()
                    if start <= at < start + len(part)
                ]
            start += len(part)
            self._lane.outcomes(chunk, some)


def resolved(argv: Sequence[str]) -> list[str]:
    """A command that means the same in another folder."""
    program = shutil.which(argv[0]) or argv[0]
    words = [os.path.abspath(word) if _is_file_here(word) else word for word in argv[1:]]
    return [os.path.abspath(program), *words]


def _is_file_here(word: str) -> bool:
    """A bare word is a word, also if a file has the same name."""
    return ("/" in word or "." in word) and os.path.isfile(word)


def _line_of(body: bytes) -> bytes:
    """A payload on one line. Raises DecodeError if it is no JSON."""
    if not body:
        return b"null"
    _check_json(body)
    # Between tokens a line break means nothing, and inside of text JSON has none.
    return body if b"\n" not in body else msgspec.json.format(body, indent=-1)


def _examined(lines: list[bytes], data: bytes) -> tuple[dict[int, _Word], str]:
    """The words among the lines of `data`, by place, and what is wrong with the first bad line. It
    and all behind it are dropped: those before it are answers as they should be."""
    words: dict[int, _Word] = {}
    at = 0
    fault = ""
    try:
        if _KEY not in data:
            for at, line in enumerate(lines):  # noqa: B007
                _check_json(line)
            return words, ""
        for at, line in enumerate(lines):
            word = _word_of(line)
            if word is not None:
                words[at] = word
                if word.ekiden not in _WORDS:
                    fault = f"it said {word.ekiden!r}, which is no word that ekiden knows"
                    break
        else:
            return words, ""
    except msgspec.DecodeError as error:
        fault = f"it wrote {lines[at][:_SHOWN]!r}, which is not a line of JSON: {error}"
    words.pop(at, None)
    del lines[at:]
    return words, fault


def _word_of(line: bytes) -> _Word | None:
    """The word that a line is, if it is one. Raises DecodeError if it is no JSON."""
    if _KEY not in line:
        _check_json(line)
        return None
    found = _decode_json(line)
    return _decode_word(line) if isinstance(found, dict) and "ekiden" in found else None


def _cut(text: str) -> str:
    return text[: limits.ERROR_TEXT_MAX].encode("utf-8", "replace").decode()
