"""What a job brought back, and how to get at it.

Most outputs are bytes that came with the news. A program brings more: what it wrote to stdout and
stderr, and files. What was too large to travel with the job lies in the broker's store under its
hash and is fetched when it is asked for.
"""

from __future__ import annotations

import zipfile
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from ekiden.errors import WrongUsage
from ekiden.limits import NS
from ekiden.model.jobs import OUT_PLAIN, OUT_PROGRAM, Note
from ekiden.model.names import check_file_name
from ekiden.model.work import FileRef, ProgramOutput

_decode_program = msgspec.msgpack.Decoder(ProgramOutput).decode
_decode_ref = msgspec.msgpack.Decoder(FileRef).decode

# Programs' outputs that were opened lately: stdout, stderr and files are mostly asked for together.
_OPENED_KEPT: Final = 64


class Facts(Struct, frozen=True):
    """What the jobs of a run have in common beside their outputs. Times are wall nanoseconds."""

    worker: str
    submitted: int
    leased: int
    finished: int
    attempt: int = 1
    note: Note | None = None


class Fetcher(Protocol):
    """Who can get what lies in the broker's store."""

    def read_stored(self, ref: FileRef) -> bytes:
        """Its bytes, verified. Raises `WrongUsage` where waiting is not possible."""

    def save_stored(self, ref: FileRef, target: Path) -> None:
        """Write them to `target`, verified, without holding them in memory."""


class ResultFile:
    """A file that a program left."""

    __slots__ = ("_fetcher", "ref")

    def __init__(self, ref: FileRef, fetcher: Fetcher | None) -> None:
        self.ref = ref
        self._fetcher = fetcher

    @property
    def name(self) -> str:
        """Its path in the job's folder, with `/` between parts."""
        return self.ref.name

    @property
    def size(self) -> int:
        """In bytes."""
        return self.ref.size

    def read(self) -> bytes:
        """Its bytes; fetched from the broker if they did not come with the result."""
        if self.ref.data is not None:
            return self.ref.data
        return _reachable(self._fetcher, self.ref).read_stored(self.ref)

    def save(self, target: Path | str) -> Path:
        """Write it to `target`, replacing what is there; folders on the way are made."""
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.ref.data is not None:
            path.write_bytes(self.ref.data)
        else:
            _reachable(self._fetcher, self.ref).save_stored(self.ref, path)
        self.mark(path)
        return path

    def mark(self, path: Path) -> None:
        """Let what was saved there be run if it could be run where it came from."""
        if self.ref.executable:
            path.chmod(path.stat().st_mode | 0o100)

    def __repr__(self) -> str:
        return f"<ResultFile {self.name} {self.size:,} bytes>"


class JobResult(Struct, frozen=True):
    """What a job brought back."""

    job_id: str
    raw: bytes
    """The output as it travelled; `output` is what you want."""
    facts: Facts
    fetcher: Any = None

    # -------------------------------------------------------------- what it is

    @property
    def output(self) -> bytes:
        """What the handler or service returned; of a program, its stdout."""
        form = self._form
        if form == OUT_PLAIN:
            return self.raw
        return self.stdout if form == OUT_PROGRAM else self._stored().read()

    def json(self) -> Any:
        """The output as JSON. Raises ValueError if it is none."""
        try:
            return msgspec.json.decode(self.output)
        except msgspec.DecodeError as error:
            raise ValueError(f"the output of job {self.job_id!r} is not JSON: {error}") from None

    def text(self) -> str:
        """The output as UTF-8; what is not is replaced."""
        return self.output.decode("utf-8", "replace")

    @property
    def stdout(self) -> bytes:
        """What the program wrote to stdout; of anything else, its output."""
        if self._form != OUT_PROGRAM:
            return self.output
        return ResultFile(self._program.stdout, self.fetcher).read()

    @property
    def stderr(self) -> bytes:
        """What the program wrote to stderr."""
        if self._form != OUT_PROGRAM:
            return b""
        return ResultFile(self._program.stderr, self.fetcher).read()

    @property
    def files(self) -> dict[str, ResultFile]:
        """The files a program left, by name."""
        refs = self._program.files if self._form == OUT_PROGRAM else []
        return {ref.name: ResultFile(ref, self.fetcher) for ref in refs}

    # -------------------------------------------------------------- to keep

    def save(self, folder: Path | str) -> list[Path]:
        """Write the files under `folder`; says where they are. Raises `BadName` before anything is
        written if a name would lead out of it."""
        files = self.files
        root = Path(folder)
        for name in files:
            check_file_name(name)
        root.mkdir(parents=True, exist_ok=True)
        return [file.save(root / name) for name, file in files.items()]

    def save_zip(self, target: Path | str) -> Path:
        """Write all files, and stdout and stderr if there was any, as one ZIP. It appears in one
        step, and nothing is held in memory that lies in the store."""
        path = Path(target)
        entries = self._entries()
        with TemporaryDirectory(dir=path.parent, prefix=".ekiden-") as folder:
            made, part = Path(folder, "zip"), Path(folder, "part")
            with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, file in entries.items():
                    archive.write(file.save(part), name)
            made.replace(path)
        return path

    def _entries(self) -> dict[str, ResultFile]:
        files = {check_file_name(name): file for name, file in self.files.items()}
        if self._form == OUT_PROGRAM:
            for ref in (self._program.stdout, self._program.stderr):
                if ref.size and ref.name not in files:
                    files[ref.name] = ResultFile(ref, self.fetcher)
        return files

    # -------------------------------------------------------------- how it went

    @property
    def exit_code(self) -> int:
        """How the program ended; 0 for a handler."""
        return self.facts.note.exit_code if self.facts.note else 0

    @property
    def attempt(self) -> int:
        """Which try brought the result."""
        return self.facts.attempt

    @property
    def worker(self) -> str:
        """Who ran it."""
        return self.facts.worker

    @property
    def submitted_at(self) -> datetime:
        """When it was accepted, by the broker's clock."""
        return _instant(self.facts.submitted)

    @property
    def started_at(self) -> datetime:
        """When the worker got it, by the broker's clock."""
        return _instant(self.facts.leased)

    @property
    def finished_at(self) -> datetime:
        """When its result was recorded, by the broker's clock."""
        return _instant(self.facts.finished)

    @property
    def ran_s(self) -> float | None:
        """Wall time of the run, if the worker measured it."""
        return self.facts.note.ran_ns / NS if self.facts.note else None

    @property
    def cpu_s(self) -> float | None:
        """CPU time of the run, if the worker measured it."""
        return self.facts.note.cpu_ns / NS if self.facts.note else None

    @property
    def peak_mb(self) -> float | None:
        """The most memory a process of the run had, if the worker measured it."""
        return self.facts.note.peak_kb / 1024 if self.facts.note else None

    # -------------------------------------------------------------- inside

    @property
    def _form(self) -> int:
        note = self.facts.note
        return OUT_PLAIN if note is None else note.form

    @property
    def _program(self) -> ProgramOutput:
        return _opened(self.raw)

    def _stored(self) -> ResultFile:
        return ResultFile(_decode_ref(self.raw), self.fetcher)

    def __repr__(self) -> str:
        shown = self.raw if len(self.raw) <= 40 else self.raw[:40] + b"..."
        return f"<JobResult {self.job_id} {shown!r} by {self.worker}>"


@lru_cache(_OPENED_KEPT)
def _opened(raw: bytes) -> ProgramOutput:
    return _decode_program(raw)


def _reachable(fetcher: Fetcher | None, ref: FileRef) -> Fetcher:
    if fetcher is None:
        raise WrongUsage(
            f"{ref.name or 'the output'} lies in the broker's store",
            remedy="ask for it through the client the result came from",
        )
    return fetcher


def _instant(wall_ns: int) -> datetime:
    return datetime.fromtimestamp(wall_ns / NS, UTC)
