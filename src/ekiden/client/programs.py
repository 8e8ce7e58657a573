"""From what a user says about a program to what travels: what its jobs share, and a body for each.

Small files travel inside the job. Larger ones are put in the broker's store first, so making a job
has two steps: `parcel` says what must be put there, and whoever can wait does that; then the job is
made with what was put. The blocking and the async client differ in the waiting alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from ekiden import limits
from ekiden.client.caches import CacheFile
from ekiden.client.options import JobOptions, to_bytes
from ekiden.errors import WrongUsage
from ekiden.model.caches import BlobRef
from ekiden.model.ids import check_name
from ekiden.model.names import check_file_name
from ekiden.model.work import FileRef, Program, ProgramCall

FileSource: TypeAlias = bytes | str | os.PathLike[str] | FileRef | CacheFile
"""The bytes of a file, or where it lies: text is a path, not content. What was put in the store
already (`store_files`) is named by its reference, and what lies in a cache as `CacheFile`."""

# Inline files of one job together; args and names must fit beside them in half a frame.
INLINE_TOTAL_BYTES: Final = 4 * limits.INLINE_FILE_BYTES

# Of the files that all jobs get: they are repeated in every batch that is sent to a worker.
COMMON_TOTAL_BYTES: Final = 8 << 10

ARGS_MAX: Final = 10_000

# Files under way to the store for one call: enough to keep the line busy.
PUTS_AT_ONCE: Final = 64

_encode = msgspec.msgpack.Encoder().encode


class ProgramOptions(JobOptions, total=False):
    """How a program is to be run, beside what `JobOptions` says. All may be left out.

    `any_program`: the command is no name of an allow-list but what a shell would find on a worker,
    or a file sent along as "./name" · `env`: variables the worker must allow · `outputs`: names or
    globs of files to bring back [everything new in the job's folder] · `common`: files that all
    jobs get, by name · `ok_codes`: exit codes that count as success [0].
    """

    any_program: bool
    env: Mapping[str, str] | None
    outputs: Iterable[str] | None
    common: Mapping[str, FileSource] | None
    ok_codes: Iterable[int]


_OWN: Final = frozenset(ProgramOptions.__annotations__) - frozenset(JobOptions.__annotations__)


class Piece(Struct, frozen=True):
    """One file on its way: in here if it is small, else where to get it."""

    name: str
    size: int
    data: bytes | None
    source: Any
    executable: bool = False
    blob: str = ""
    """Where its bytes lie in the store, if they do."""
    cache: str = ""
    path: str = ""
    """In that cache, if it is a file of one."""

    @property
    def must_be_stored(self) -> bool:
        """Whether it can only be named once it was put in the store."""
        return self.data is None and not self.blob

    def ref(self, blob: str = "") -> FileRef:
        """As it travels, once its bytes lie under `blob`."""
        return FileRef(
            self.name, self.size, self.data, self.blob or blob, self.executable, self.cache,
            self.path,
        )  # fmt: skip


class Parcel(Struct, frozen=True):
    """The files of one job, or of all."""

    pieces: list[Piece]

    @property
    def to_store(self) -> list[Any]:
        """What must be put in the store before the job can be made, in order."""
        return [piece.source for piece in self.pieces if piece.must_be_stored]

    def refs(self, blobs: Iterable[str]) -> list[FileRef]:
        """The files as they travel; `blobs` are the hashes of `to_store`."""
        stored = iter(blobs)
        return [piece.ref(next(stored) if piece.must_be_stored else "") for piece in self.pieces]


def parcel(files: Mapping[str, FileSource] | None, room: int = INLINE_TOTAL_BYTES) -> Parcel:
    """Look at the files and decide how each travels: inside the job while there is `room`. Raises
    `BadName` or `WrongUsage`."""
    left = room
    pieces: list[Piece] = []
    for name, source in (files or {}).items():
        check_file_name(name)
        if isinstance(source, FileRef):
            piece = Piece(
                name, source.size, source.data, None, source.executable, source.blob, source.cache,
                source.path,
            )  # fmt: skip
        elif isinstance(source, CacheFile):
            raise AssertionError("a file of a cache is looked up before it is sent along")
        elif isinstance(source, str | os.PathLike):
            piece = _path_piece(name, Path(source), left)
        else:
            piece = _bytes_piece(name, source, left)
        left -= len(piece.data or b"")
        pieces.append(piece)
    return Parcel(pieces)


def _bytes_piece(name: str, source: Any, room: int) -> Piece:
    data = bytes(source)
    fits = len(data) <= min(limits.INLINE_FILE_BYTES, room)
    return Piece(name, len(data), data if fits else None, data)


def _path_piece(name: str, path: Path, room: int) -> Piece:
    try:
        facts = path.stat()
        if not path.is_file():
            raise WrongUsage(f"{str(path)!r} is not a file", remedy="name files, not folders")
        fits = facts.st_size <= min(limits.INLINE_FILE_BYTES, room)
        data = path.read_bytes() if fits else None
    except OSError as error:
        raise WrongUsage(
            f"cannot read {str(path)!r}: {os.strerror(error.errno or 0).lower()}",
            remedy="see that it is there and yours to read",
        ) from None
    size = facts.st_size if data is None else len(data)
    return Piece(name, size, data, path, bool(facts.st_mode & 0o111))


# ------------------------------------------------------------------ the program


class ProgramTerms(Struct, frozen=True):
    """What all jobs of one call share."""

    name: str
    options: JobOptions
    program: Program
    common: Parcel

    def shared(self, blobs: Iterable[str]) -> bytes:
        """The bytes of `Spec.shared`."""
        return _encode(msgspec.structs.replace(self.program, files=tuple(self.common.refs(blobs))))

    def work(
        self, stored: Sequence[str], drafts: Sequence[Draft], stored_apart: Iterable[str]
    ) -> ProgramWork:
        """The jobs, given the hashes of what `common` and the drafts had to store."""
        common = self.common.refs(stored)
        hashes = iter(stored_apart)
        calls = [each.call(list(islice(hashes, len(each.to_store)))) for each in drafts]
        refs = [[*([call.stdin] if call.stdin else []), *call.files] for call in calls]
        caches = {ref.cache for ref in (*common, *chain.from_iterable(refs)) if ref.cache}
        options = self.options
        if caches:
            options = {**options, "caches": tuple(sorted(caches | set(named_caches(options))))}
        return ProgramWork(
            self.name,
            options,
            self.shared(stored),
            [*stored_blobs(common), *_reference(self.program.manifest)],
            [_encode(call) for call in calls],
            {at: blobs for at, each in enumerate(refs) if (blobs := stored_blobs(each))},
        )


class ProgramWork(Struct, frozen=True):
    """Jobs of a program, ready to be made."""

    name: str
    options: JobOptions
    shared: bytes
    shared_blobs: list[BlobRef]
    """What of the store `shared` refers to."""
    bodies: list[bytes]
    blobs: dict[int, list[BlobRef]]
    """What of the store the bodies refer to, by place."""


def stored_blobs(refs: Iterable[FileRef]) -> list[BlobRef]:
    """The blobs that must be kept for these files, each once. Those of a cache are kept for it."""
    return list(dict.fromkeys((ref.blob, ref.size) for ref in refs if ref.blob and not ref.cache))


def named_caches(options: JobOptions) -> list[str]:
    """The ids given as `caches`."""
    given = options.get("caches") or ()
    return [given] if isinstance(given, str) else list(given)


def _reference(manifest: str) -> list[BlobRef]:
    """The blob that "<hash>:<size>" means."""
    blob, _, size = manifest.partition(":")
    return [(blob, int(size))] if len(blob) == 64 and size.isdecimal() else []


def program_terms(command: str, options: ProgramOptions, manifest: str = "") -> ProgramTerms:
    """Check what was said of the program and part it from what was said of its jobs."""
    plain: Any = {key: value for key, value in options.items() if key not in _OWN}
    any_program = bool(options.get("any_program"))
    if not command or "\0" in command:
        raise WrongUsage(f"{command!r} names no program")
    name = safe_name(PurePosixPath(command).name) if any_program else check_name(command, "program")
    if any_program:
        plain.setdefault("subject", f"job.program.{subject_token(name)}")
    outputs = options.get("outputs")
    program = Program(
        command,
        any_program,
        tuple(sorted(_env(options.get("env")).items())),
        None if outputs is None else tuple(_pattern(each) for each in outputs),
        (),
        tuple(int(code) for code in options.get("ok_codes", (0,))),
        manifest,
    )
    common = parcel(options.get("common"), COMMON_TOTAL_BYTES)
    return ProgramTerms(name, plain, program, common)


def program_call(
    args: Sequence[Any], stdin: Piece | None, files: list[FileRef], blob: str
) -> ProgramCall:
    """What one job is called with."""
    if len(args) > ARGS_MAX:
        raise WrongUsage(f"{len(args):,} arguments", remedy=f"give at most {ARGS_MAX:,}")
    words = [_argument(each) for each in args]
    return ProgramCall(words, None if stdin is None else stdin.ref(blob), files)


def stdin_piece(stdin: Any) -> Piece | None:
    """What the program reads from stdin: bytes, text, or a path object."""
    if stdin is None or stdin == b"":
        return None
    if isinstance(stdin, os.PathLike):
        return _path_piece("stdin", Path(stdin), limits.INLINE_FILE_BYTES)
    return _bytes_piece("stdin", to_bytes(stdin), limits.INLINE_FILE_BYTES)


def safe_name(text: str) -> str:
    """`text` as a job name: what may not be in one becomes `-`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")
    return name[: limits.NAME_LENGTH_MAX] or "program"


def subject_token(name: str) -> str:
    """`name` as one token of a subject: a dot would make it two."""
    return name.replace(".", "-")


def _argument(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if "\0" in text:
        raise WrongUsage(f"argument {text!r} has a NUL in it", remedy="no program can be given one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WrongUsage(
            f"argument {text!r} is not valid Unicode",
            remedy="rename the file, or send it by content",
        ) from None
    return text


def _env(wish: Mapping[str, str] | None) -> dict[str, str]:
    found = {str(name): str(value) for name, value in (wish or {}).items()}
    for name, value in found.items():
        if not name or "=" in name or "\0" in name + value:
            raise WrongUsage(f"environment variable {name!r} is not usable")
    return found


def _pattern(text: str) -> str:
    """A glob of outputs obeys the rules of names, but for its wildcards."""
    check_file_name(re.sub(r"[*?\[\]!]", "x", text))
    return text


# ------------------------------------------------------------------ jobs of it


class ProgramArgs(Struct, frozen=True):
    """One call of a program: what differs from job to job."""

    args: Sequence[Any] = ()
    stdin: Any = None
    """Bytes, text, or a path object."""
    files: Mapping[str, FileSource] | None = None
    """Input files, by the name they have in the job's folder."""


class Draft(Struct, frozen=True):
    """One call, looked at: what of it must lie in the store before it can be submitted."""

    args: Sequence[Any]
    stdin: Piece | None
    files: Parcel

    @property
    def to_store(self) -> list[Any]:
        """Sources that must be put in the store, in order."""
        first = [self.stdin.source] if self.stdin is not None and self.stdin.data is None else []
        return first + self.files.to_store

    def call(self, blobs: Sequence[str]) -> ProgramCall:
        """What the job is called with, given the hashes of `to_store`."""
        apart = len(blobs) > len(self.files.to_store)
        blob = blobs[0] if apart else ""
        return program_call(self.args, self.stdin, self.files.refs(blobs[apart:]), blob)

    def body(self, blobs: Sequence[str]) -> bytes:
        """The same as it travels."""
        return _encode(self.call(blobs))


def cache_files(
    calls: Iterable[ProgramArgs], common: Mapping[str, FileSource] | None
) -> set[CacheFile]:
    """The files of caches among these: they must be looked up."""
    mappings = (files for files in (common, *(call.files for call in calls)) if files)
    return {
        source for files in mappings for source in files.values() if isinstance(source, CacheFile)
    }


def looked_up(
    files: Mapping[str, FileSource] | None, found: Mapping[CacheFile, FileRef]
) -> dict[str, FileSource]:
    """`files` with what was `found` in place of the names of files in caches."""
    return {
        name: msgspec.structs.replace(found[source], name=name)
        if isinstance(source, CacheFile)
        else source
        for name, source in (files or {}).items()
    }


def draft(call: ProgramArgs) -> Draft:
    """Look at a call. Raises what is wrong with it."""
    return Draft(call.args, stdin_piece(call.stdin), parcel(call.files))
