"""What this worker runs: the programs its owner has listed, or anything if the owner says so.

A job never chooses a path on an allow-list-only worker: it says a name, and the owner's file is
started. Which environment a job's program sees is built from nothing, from what the owner lets
through; no variable of the agent that could hold a key reaches it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from ekiden.errors import BadName, EkidenError, WrongUsage
from ekiden.model.caches import check_cache_id
from ekiden.model.names import check_file_name, shown
from ekiden.model.work import FileRef, Program
from ekiden.worker.launch import Limits

BWRAP: Final = "bwrap"

# What a program needs to find others, and to write numbers and times as its owner reads them.
_ENV_ALWAYS: Final = ("PATH", "LANG", "LC_ALL", "TZ")

# Ours: told by the worker, never by a job.
_ENV_OURS: Final = ("HOME", "TMPDIR")
_ENV_PREFIX: Final = "EKIDEN_"

_HASH_BYTES: Final = 1 << 20


class Executable(Struct, frozen=True):
    """A program of the allow-list."""

    path: str
    sha256: str = ""
    """If given, only a file of this content is started."""


class ProgramConfig(Struct, frozen=True, kw_only=True):
    """What a worker's owner has said about programs."""

    executables: dict[str, Executable] = {}
    any_program: bool = False
    """Jobs may run whatever this account can, and bring their own programs."""
    env_pass: tuple[str, ...] = ()
    """Variables of the agent that programs see too."""
    env_allow: tuple[str, ...] = ()
    """Variables a job may set; with `any_program`, all."""
    limits: Limits = Limits()
    stdout_max: int = 16 << 20
    """Of stdout and of stderr, each: beyond it the two ends are kept. A program that has more to
    say writes a file, which is not cut."""
    sandbox: str = ""
    """"bwrap": programs see a read-only system, no network, and no folder but their own."""
    hidden: tuple[str, ...] = ()
    """Folders that a sandboxed program finds empty: keys and the like."""


class CannotStart(EkidenError):
    """Why an attempt cannot run on this worker."""

    code = "cannot_start"


class Found(Struct, frozen=True):
    """What to start for a program."""

    path: str
    """Absolute; or, of a file that comes with the job, relative to its folder."""
    shipped: bool = False
    sha256: str = ""

    def runs(self, file: FileRef) -> bool:
        """Whether an input file is to be executable."""
        return file.executable or (self.shipped and file.name == self.path)


class Catalogue:
    """The programs of one worker. Raises WrongUsage for a config that cannot work."""

    def __init__(self, config: ProgramConfig, scratch: str, trees: str = "") -> None:
        """`trees` is where cached data lies: a sandboxed program may read it, wherever that is."""
        self._config = config
        self._scratch = scratch
        self._trees = trees
        self._verified: dict[tuple[str, str], tuple[int, ...]] = {}
        """What a file was like when it was found to have that hash."""
        self._on_path: dict[str, str] = {}
        self._bwrap = _bwrap_path() if config.sandbox else ""
        self._env = _own_env(config.env_pass)
        if config.sandbox not in ("", BWRAP):
            raise WrongUsage(f"no sandbox {config.sandbox!r} is known", remedy=f"use {BWRAP!r}")

    @property
    def sandboxed(self) -> bool:
        """Whether programs run in a sandbox."""
        return bool(self._bwrap)

    # -------------------------------------------------------------- what to start

    def find(self, program: Program, files: Collection[str]) -> Found:
        """What to start for `program`, of a job with these input files. Raises CannotStart."""
        if program.any:
            return self._find_any(program.command, files)
        listed = self._config.executables.get(program.command)
        if listed is None:
            raise CannotStart(
                f"this worker has no program {shown(program.command)} on its allow-list",
                remedy=f"start it with: ekiden worker --exec {_word(program.command)}=/path/to/it",
            )
        return Found(listed.path, sha256=listed.sha256.lower())

    def _find_any(self, command: str, files: Collection[str]) -> Found:
        if not self._config.any_program:
            raise CannotStart(
                f"this worker runs only programs of its allow-list, and {shown(command)} was "
                "asked for as any program",
                remedy="ask for a listed name, or start the worker with --allow-any-program",
            )
        if command.startswith("/"):
            return Found(command)
        if "/" in command:
            name = command.removeprefix("./")
            if name not in files:
                raise CannotStart(
                    f"{shown(command)} is not among the files of the job",
                    remedy="send it with the job, or give an absolute path",
                )
            return Found(_checked(name), shipped=True)
        path = self._on_path.get(command) or shutil.which(command, path=self._env["PATH"])
        if path is None:
            raise CannotStart(
                f"this worker finds no program {shown(command)} on its PATH",
                remedy="install it there, give an absolute path, or send it with the job",
            )
        self._on_path[command] = path
        return Found(path)

    def look_again(self, command: str) -> None:
        """It could not be started: it may lie elsewhere by now."""
        self._on_path.pop(command, None)

    # -------------------------------------------------------------- content

    def is_verified(self, found: Found) -> bool:
        """Whether the content of the file is known to be as the owner said. Cheap."""
        return not found.sha256 or self._verified.get((found.path, found.sha256)) == _state(
            found.path
        )

    def verify(self, found: Found) -> None:
        """Read the file and compare. Raises CannotStart. Blocks."""
        if self.is_verified(found):
            return
        state = _state(found.path)
        try:
            with open(found.path, "rb", buffering=0) as file:
                digest = hashlib.sha256()
                while part := file.read(_HASH_BYTES):
                    digest.update(part)
        except OSError as error:
            raise unstartable(found.path, error.errno or 0) from error
        if digest.hexdigest() != found.sha256:
            raise CannotStart(
                f"the file {shown(found.path)} on this worker is not the one its owner listed: "
                f"its SHA-256 is {digest.hexdigest()}",
                remedy="restore it, or list its new SHA-256",
            )
        self._verified[found.path, found.sha256] = state

    # -------------------------------------------------------------- surroundings

    def cached(self, file: FileRef) -> str:
        """Where an input file lies that is one of a cache. Raises CannotStart. Blocks."""
        try:
            path = os.path.join(self._trees, check_cache_id(file.cache), check_file_name(file.path))
        except EkidenError as error:
            raise CannotStart(str(error)) from error
        if not self._trees or not os.path.isfile(path):
            raise CannotStart(
                f"the input file {shown(file.name)} is not here: the cache {shown(file.cache)} "
                f"with a file {shown(file.path)} would have it",
                remedy="name that cache among those of the job",
            )
        return path

    def env_of(self, program: Program) -> dict[str, str]:
        """The environment of a program, without what differs from job to job."""
        env = dict(self._env)
        for name, value in program.env:
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise CannotStart(f"{shown(name)} cannot be an environment variable")
            if name in _ENV_OURS or name.startswith(_ENV_PREFIX):
                raise CannotStart(f"the worker itself sets the variable {shown(name)}")
            if not self._config.any_program and name not in self._config.env_allow:
                raise CannotStart(
                    f"this worker does not let jobs set the variable {shown(name)}",
                    remedy="leave it out, or have the worker's owner allow it",
                )
            env[name] = value
        return env

    def wrap(self, path: str, argv: list[str], folder: str) -> tuple[str, list[str]]:
        """`argv` of `path`, in the sandbox if there is one."""
        if not self._bwrap:
            return path, argv
        # What is not there cannot be covered, nor looked into.
        covered = [each for each in (self._scratch, *self._config.hidden) if os.path.isdir(each)]
        wrapped = [
            BWRAP, "--unshare-all", "--die-with-parent",
            *("--ro-bind", "/", "/"),
            *("--dev", "/dev"),
            *("--proc", "/proc"),
            *("--tmpfs", "/tmp"),
            *(word for hidden in covered for word in ("--tmpfs", hidden)),
            *(("--ro-bind-try", self._trees, self._trees) if self._trees else ()),
            *("--bind", folder, folder),
            *("--chdir", folder),
            *("--", path, *argv[1:]),
        ]  # fmt: skip
        return self._bwrap, wrapped


def unstartable(path: str, number: int) -> CannotStart:
    """What the system's refusal to start `path` means to people."""
    name = shown(path)
    match number:
        case errno.ENOENT:
            text, remedy = f"there is no {name}, or not the interpreter its first line names", ""
        case errno.EACCES:
            text, remedy = f"{name} is not executable for the worker", f"chmod +x {_word(path)}"
        case errno.ENOEXEC:
            text = f"{name} is no program this system can run"
            remedy = "a script needs a first line like #!/bin/sh"
        case errno.E2BIG:
            text, remedy = f"the arguments of {name} are too long", "pass them by a file or stdin"
        case errno.EAGAIN | errno.ENOMEM:
            text = f"the worker's machine had no room for another process ({os.strerror(number)})"
            remedy = "run fewer at once there"
        case _:
            text, remedy = f"{name} could not be started: {os.strerror(number)}", ""
    return CannotStart(text, remedy=remedy)


def _own_env(passed: tuple[str, ...]) -> dict[str, str]:
    for name in passed:
        if name.startswith(_ENV_PREFIX):
            raise WrongUsage(
                f"the variable {name!r} is the worker's own and cannot be passed to programs"
            )
    env = {"PATH": os.defpath}
    env |= _readable(os.environ, (*_ENV_ALWAYS, *passed))
    return env


def _readable(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Of `names`, what is set, and valid Unicode: a message to the keeper holds nothing else."""
    found: dict[str, str] = {}
    for name in names:
        value = environ.get(name)
        if value is not None and value == value.encode(errors="ignore").decode():
            found[name] = value
    return found


def _bwrap_path() -> str:
    path = shutil.which(BWRAP)
    if path is None:
        raise WrongUsage(
            "the sandbox 'bwrap' was asked for, and bwrap is not on PATH",
            remedy="install bubblewrap, or leave the sandbox out",
        )
    return path


def _state(path: str) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    try:
        it = os.stat(path)
    except OSError:
        return ()
    return (it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns)


def _checked(name: str) -> str:
    try:
        return check_file_name(name)
    except BadName as error:
        raise CannotStart(str(error)) from error


def _word(text: str) -> str:
    """`text` as an example in a remedy: what cannot stand in a command is left out."""
    return text if text.isprintable() and " " not in text and len(text) <= 64 else "NAME"
