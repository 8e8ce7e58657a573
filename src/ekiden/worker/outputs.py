"""What a program brings back: stdout, stderr and files, with its result or through the store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ekiden import limits
from ekiden.machine import Log
from ekiden.model.caches import BlobRef
from ekiden.model.work import ProgramOutput
from ekiden.observe.logs import log_effect
from ekiden.worker import folders
from ekiden.worker.launch import Ended
from ekiden.worker.verdicts import tail_of, told

# What naming a blob beside a result takes: it shares the frame with the result.
REF_BYTES: Final = 80


class Piece:
    """A file that is to travel back."""

    __slots__ = ("data", "executable", "inline", "name", "path", "size")

    def __init__(
        self,
        name: str,
        path: Path | None = None,
        size: int = 0,
        *,
        data: bytes | None = None,
        executable: bool = False,
    ) -> None:
        self.name = name
        self.path = path
        self.data = data
        self.size = size if data is None else len(data)
        self.executable = executable
        self.inline = False
        """Whether it travels with the result; otherwise the store gets it first."""


def pieces_of(
    ended: Ended,
    folder: str,
    wanted: Sequence[str] | None,
    stamps: Mapping[str, folders.Stamp],
    stdout_max: int,
) -> list[Piece]:
    """stdout, stderr and the files of `folder` that are `wanted`, in this order.

    Those that together are small enough travel with the result; the first ones have the first
    choice. Raises what `folders.find_outputs` does. Blocks.
    """
    pieces = [
        Piece("stdout", data=_kept(ended.stdout, ended.out, stdout_max)),
        Piece("stderr", data=_kept(ended.stderr, ended.err, stdout_max)),
    ]
    if not folder:
        folders.nothing_there(wanted or ())
    elif wanted is None or wanted:
        pieces += [
            Piece(file.name, file.path, file.size, executable=file.executable)
            for file in folders.find_outputs(folder, wanted, stamps)
        ]
    room = limits.INLINE_FILE_BYTES
    for piece in pieces:
        piece.inline = piece.size <= room
        if piece.inline:
            room -= piece.size
            if piece.path is not None:
                piece.data = folders.read_file(piece.path)
    return pieces


def _kept(captured: bytes | None, path: str, limit: int) -> bytes:
    if captured is None:
        return folders.head_and_tail(path, limit)
    return folders.ends_of(captured, limit)


def refs_of(output: ProgramOutput) -> list[BlobRef]:
    """What of it lies in the store."""
    files = (output.stdout, output.stderr, *output.files)
    return [(file.blob, file.size) for file in files if file.data is None]


def told_from_files(sentence: str, ended: Ended) -> str:
    """`sentence` with the tail of what the program said, which may lie in its files. Blocks."""
    stdout = ended.stdout if ended.stdout is not None else tail_of(ended.out)
    stderr = ended.stderr if ended.stderr is not None else tail_of(ended.err)
    return told(sentence, stderr, stdout)


def clear(folder: str, ended: Ended | None) -> None:
    """Remove everything an attempt has left on the disk: in `folder`, which we have made, if we
    have, and where it ended. Blocks."""
    for left in {folder, ended.folder if ended is not None else ""} - {""}:
        if not folders.wipe(left):
            log_effect(Log("warning", "scratch.stuck", {"folder": left}))
    paths = [folder + ".in"] if folder else []
    paths += [ended.out, ended.err] if ended is not None else []
    for path in paths:
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)
