"""What a job brought, put in its folder: new files, and `stdout` and `stderr` beside them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ekiden import errors
from ekiden.cli import output
from ekiden.cli.inputs import Entry, printable
from ekiden.cli.joblog import NO_EXIT
from ekiden.limits import INLINE_FILE_BYTES, NS
from ekiden.model.names import check_file_name

if TYPE_CHECKING:
    from ekiden.client.futures import JobFuture
    from ekiden.client.results import JobResult

DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
REFUSED: Final = "refused"
"""The broker, or this machine, would not take it."""
UNSAVED: Final = "unsaved"
"""It is done, but what it brought could not be fetched or written."""
MISSING: Final = "missing"
"""Nobody has handed it over."""

INDEX: Final = ".ekiden-files"
"""In a folder with outputs: which of its files were saved by a run."""


class Ending(Struct, frozen=True, kw_only=True):
    """What became of one input."""

    number: int
    id: str
    state: str
    entry: Entry
    folder: Path | None = None
    """Where it was saved."""
    files: list[str] = []
    stdout: bytes | Path = b""
    stderr: bytes = b""
    """Not kept here if it was saved."""
    received: int = 0
    error: BaseException | None = None
    worker: str = ""
    attempt: int = 0
    started_ns: int = 0
    ran_s: float | None = None
    exit_code: int | None = None
    signal: int = 0

    def document(self, run: str) -> dict[str, Any]:
        """As `--json` prints it. With a folder, stdout and stderr are in there."""
        saved = self.folder is not None
        found = {
            "run": run,
            "number": self.number,
            "id": self.id,
            "input": [printable(word) for word in self.entry.inputs],
            "state": self.state,
            "exit_code": self.exit_code,
            "attempt": self.attempt,
            "worker": self.worker,
            "ran_s": self.ran_s,
            "folder": printable(str(self.folder)) if saved else None,
            "files": self.files,
            "stdout": self.stdout if isinstance(self.stdout, bytes) and not saved else None,
            "stderr": None if saved else self.stderr,
        }
        if self.error is not None:
            found |= output.error_document(self.error)
        return found


class Saver:
    """Saves under one folder, or nowhere. Its calls wait for the disk and the broker's store; they
    are made in threads of their own."""

    def __init__(self, out: Path | None, *, show: bool) -> None:
        """With `show`, somebody wants to see what small jobs wrote to stdout."""
        self._out = out
        self._show = show

    @property
    def saving(self) -> bool:
        """Whether anything is written."""
        return self._out is not None

    def settle(self, number: int, entry: Entry, future: JobFuture) -> Ending:
        """Save what a job that has ended brought. Never raises what the job or the disk did."""
        error = future.exception()
        if error is None:
            return self._done(number, entry, future.result())
        if isinstance(error, errors.JobFailed):
            return self._failed(number, entry, error)
        state = REFUSED
        if isinstance(error, errors.Conflict):
            error = errors.Conflict(
                "it was handed over before, with other options or another content of its files",
                remedy="choose another --name",
            )
        elif isinstance(error, errors.JobCancelled):
            state = CANCELLED
        elif isinstance(error, errors.UnknownJob):
            state = MISSING
        elif isinstance(error, errors.ResultGone):
            kept = self._folder(entry)
            if kept is not None and kept.is_dir():  # it was saved when it was there
                return Ending(number=number, id=future.job_id, state=DONE, entry=entry, folder=kept)
            state = UNSAVED
        return Ending(number=number, id=future.job_id, state=state, entry=entry, error=error)

    def _folder(self, entry: Entry) -> Path | None:
        return None if self._out is None else self._out / entry.folder

    # -------------------------------------------------------------- done

    def _done(self, number: int, entry: Entry, result: JobResult) -> Ending:
        known: dict[str, Any] = {
            "number": number,
            "id": result.job_id,
            "entry": entry,
            "worker": result.worker,
            "attempt": result.attempt,
            "started_ns": result.facts.leased,
            "ran_s": result.ran_s,
            "exit_code": result.exit_code,
        }
        try:
            brought = self._save(entry, result)
        except (errors.EkidenError, OSError) as error:
            return Ending(state=UNSAVED, error=error, **known)
        return Ending(state=DONE, **known, **brought)

    def _save(self, entry: Entry, result: JobResult) -> dict[str, Any]:
        stdout, stderr = result.stdout, result.stderr
        files = result.files
        received = len(stdout) + len(stderr) + sum(file.size for file in files.values())
        found: dict[str, Any] = {"files": list(files), "received": received}
        folder = self._folder(entry)
        if folder is None:
            return found | {"stdout": stdout, "stderr": stderr}
        _clear(folder)
        result.save(folder)
        _note_files(folder, list(files))
        path = folder / _free_name("stdout", files)
        path.write_bytes(stdout)
        _write_some(folder / _free_name("stderr", files), stderr)
        small = self._show and len(stdout) <= INLINE_FILE_BYTES
        return found | {"folder": folder, "stdout": stdout if small else path}

    # -------------------------------------------------------------- failed

    def _failed(self, number: int, entry: Entry, error: errors.JobFailed) -> Ending:
        last: Any = error.causes[-1] if error.causes else {}
        note: Any = last.get("note") or {}
        code = int(note.get("exit_code", NO_EXIT))
        ran_s = note.get("ran_ns", 0) / NS
        message = str(last.get("message", ""))
        folder = self._folder(entry)
        try:
            if folder is not None:
                _clear(folder)
                folder.mkdir(parents=True, exist_ok=True)
                _write_some(folder / "stderr", message.encode())
        except OSError:
            folder = None  # What is wrong with the disk shows elsewhere; how it failed is told.
        return Ending(
            number=number, id=error.job_id, state=FAILED, entry=entry, folder=folder,
            stderr=message.encode(), error=error, worker=str(last.get("worker", "")),
            attempt=int(last.get("attempt", 0)), ran_s=ran_s,
            started_ns=max(int(last.get("time", 0)) - int(ran_s * NS), 0),
            exit_code=code if code >= 0 else None, signal=max(-code, 0) if note else 0,
        )  # fmt: skip


def _clear(folder: Path) -> None:
    """Remove what an earlier run saved here, and nothing else: yesterday's price must not stand
    beside today's failure."""
    index = folder / INDEX
    try:
        # Written by us, in whatever locale; or by somebody else, and no reason to end a run.
        names = index.read_text("utf-8", "replace").splitlines()
    except OSError:
        names = []
    for name in [*names, "stdout", "stderr", INDEX]:
        with contextlib.suppress(OSError, errors.BadName):
            (folder / (name if name == INDEX else check_file_name(name))).unlink()


def _note_files(folder: Path, names: list[str]) -> None:
    """So that they can be told from what somebody else put there."""
    if names:
        (folder / INDEX).write_text("".join(f"{name}\n" for name in names), "utf-8")


def _write_some(path: Path, data: bytes) -> None:
    """Write what there is; an earlier run's file would be mistaken for this one's nothing."""
    if data:
        path.write_bytes(data)
    else:
        path.unlink(missing_ok=True)


def _free_name(name: str, files: dict[str, Any]) -> str:
    """`name`, unless the program itself left something of that name."""
    taken = {file.partition("/")[0].casefold() for file in files}
    while name in taken:
        name += ".1"
    return name
