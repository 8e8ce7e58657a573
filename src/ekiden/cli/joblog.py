"""A log of jobs in the columns of GNU parallel, so that what reads one reads the other.

A line is written when the outputs of its job are safe on disk, and not before: whatever the log
calls done needs no second run. With `--resume` it is read back; a command that ended well there is
not run again. Commands are compared as they are written, so inputs may be added, taken away or
reordered between two runs.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from ekiden.cli.inputs import printable
from ekiden.errors import WrongUsage

COLUMNS: Final = (
    "Seq", "Host", "Starttime", "JobRuntime", "Send", "Receive", "Exitval", "Signal", "Command",
)  # fmt: skip
HEAD: Final = "\t".join(COLUMNS)

# Of a job that has neither an exit code nor a signal: it ran out of time, or never began.
NO_EXIT: Final = -1

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class Record(Struct, frozen=True, kw_only=True):
    """One line of the log."""

    number: int
    host: str = ""
    started_s: float = 0.0
    ran_s: float = 0.0
    sent: int = 0
    received: int = 0
    exit_code: int = 0
    signal: int = 0
    command: str

    @property
    def ended_well(self) -> bool:
        """Whether there is nothing left to do for it."""
        return self.exit_code == 0 and self.signal == 0


def command_text(argv: Sequence[str]) -> str:
    """`argv` as one line that a shell would read as the same words."""
    return " ".join(_quoted(printable(word)) for word in argv)


def _quoted(word: str) -> str:
    if _CONTROL.search(word) is None:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda sign: f"\\x{ord(sign[0]):02x}", escaped) + "'"


def write_line(record: Record) -> str:
    """The record as a line of the log."""
    columns = (
        str(record.number),
        record.host or ":",
        f"{record.started_s:.3f}",
        f"{record.ran_s:.3f}",
        str(record.sent),
        str(record.received),
        str(record.exit_code),
        str(record.signal),
        record.command,
    )
    return "\t".join(columns) + "\n"


def read_line(line: str) -> Record:
    """The record of a line. Raises ValueError if it is none."""
    columns = line.rstrip("\n").split("\t", len(COLUMNS) - 1)
    number, host, started, ran, sent, received, code, signal, command = columns
    return Record(
        number=int(number),
        host=host,
        started_s=float(started),
        ran_s=float(ran),
        sent=int(sent),
        received=int(received),
        exit_code=int(code),
        signal=int(signal),
        command=command,
    )


def read_done(path: Path) -> Counter[str]:
    """The commands that ended well, and how often. No file: none. Raises `WrongUsage`."""
    _check_log(path)
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return Counter()
    except OSError as error:
        raise _unusable(path, error) from None
    rest = text.partition("\n")[2]
    done: Counter[str] = Counter()
    # What follows the last line end was cut off while it was written.
    for line in rest.split("\n")[:-1]:
        try:
            record = read_line(line)
        except ValueError:
            continue
        if record.ended_well:
            done[record.command] += 1
    return done


def _check_log(path: Path) -> None:
    """What is there must be a log of jobs, or nothing: a slip must not cost anybody a file."""
    try:
        with path.open("rb") as file:
            found = file.read(len(HEAD) + 1).decode(errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(path, error) from None
    if found and found.rstrip("\n") != HEAD:
        raise WrongUsage(
            f"{str(path)!r} is no job log", remedy="name one that --joblog wrote, or a new one"
        )


class JobLog:
    """The log being written. Lines are added to what is there, each in one piece."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """With `keep` the lines that are there stay; else the log begins anew."""
        _check_log(path)
        try:
            self._file: Any = path.open("a+b" if keep else "wb", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
            if not size:
                self._file.write(f"{HEAD}\n".encode())
            elif _last_byte(self._file, size) != b"\n":
                self._file.write(b"\n")
        except OSError as error:
            raise _unusable(path, error) from None

    def add(self, record: Record) -> None:
        """Write one line."""
        self._file.write(write_line(record).encode())

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def _last_byte(file: Any, size: int) -> bytes:
    file.seek(size - 1)
    last: bytes = file.read(1)
    file.seek(0, os.SEEK_END)
    return last


def _unusable(path: Path, error: OSError) -> WrongUsage:
    why = (error.strerror or str(error)).lower()
    return WrongUsage(f"cannot use the job log {str(path)!r}: {why}", remedy="name another file")
