"""What a worker offers beside handlers: programs, Python functions, warm services.

All of it is off unless it was asked for, on the command line or in a file:

    # worker.toml
    functions = true
    exec.pricer = "/opt/pricer/bin/pricer"
    exec.solver = { path = "/opt/solver", sha256 = "9f86d0…" }
    service.curves = { command = ["/opt/curves", "--warm"], health = '{"ping": 1}' }

"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ekiden.errors import WrongUsage
from ekiden.model.ids import check_name
from ekiden.worker import functions
from ekiden.worker.catalogue import Executable, ProgramConfig
from ekiden.worker.launch import Limits
from ekiden.worker.services import ServiceConfig
from ekiden.world.keys import state_folder

ANY_PROGRAM_PATTERN = "job.program.>"


class Offers(Struct, frozen=True, kw_only=True):
    """What one worker offers. `scratch` is where its children have their folders, `cache` where
    cached data lies [see `caches.claim_folder`], up to `cache_bytes` of it [half of what is free
    on that disk]."""

    programs: ProgramConfig | None = None
    functions: bool = False
    services: tuple[ServiceConfig, ...] = ()
    scratch: Path | None = None
    cache: Path | None = None
    cache_bytes: int | None = None

    def __bool__(self) -> bool:
        return bool(self.programs or self.functions or self.services)

    @property
    def patterns(self) -> list[str]:
        """What is announced for it."""
        found: list[str] = []
        if self.programs is not None:
            found += [f"job.assign.{name}" for name in self.programs.executables]
            found += [ANY_PROGRAM_PATTERN] if self.programs.any_program else []
        found += [functions.pattern()] if self.functions else []
        found += [f"job.assign.{service.name}" for service in self.services]
        return found

    def scratch_folder(self) -> Path:
        """Made if need be, and nobody else's."""
        uid = os.getuid() if hasattr(os, "getuid") else 0
        folder = self.scratch or Path(tempfile.gettempdir()) / f"ekiden-{uid}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.lstat()
        except OSError as error:
            raise WrongUsage(
                f"cannot make the scratch folder {folder}: {os.strerror(error.errno or 0).lower()}",
                remedy="name another with --scratch",
            ) from None
        if hasattr(os, "getuid") and (facts.st_uid != uid or facts.st_mode & 0o022):
            raise WrongUsage(
                f"the scratch folder {folder} belongs to somebody else, or others may write to it",
                remedy="name one of your own with --scratch",
            )
        return folder


# ------------------------------------------------------------------ the file


class _ExecFile(Struct, forbid_unknown_fields=True):
    path: str
    sha256: str = ""


class _ServiceFile(Struct, forbid_unknown_fields=True):
    command: str | list[str]
    health: str = ""
    health_every_s: float = 30.0
    health_timeout_s: float = 10.0
    ready: bool = False
    start_timeout_s: float = 60.0
    recycle_jobs: int = 0
    recycle_mb: int = 0
    env: dict[str, str] = {}


class _LimitsFile(Struct, forbid_unknown_fields=True):
    open_files: int = Limits().open_files
    processes: int = Limits().processes
    file_mb: int = Limits().file_bytes >> 20
    cpu_s: int = Limits().cpu_s


class WorkerFile(Struct, forbid_unknown_fields=True):
    """A worker.toml. What is also given on the command line counts there."""

    connect: str = ""
    slots: int | None = None
    id: str = ""
    subjects: list[str] = []
    labels: dict[str, str] = {}
    handlers: str = ""
    key_file: str = ""
    functions: bool = False
    allow_any_program: bool = False
    sandbox: str = ""
    scratch: str = ""
    cache: str = ""
    cache_max_gb: float = 0
    env_pass: list[str] = []
    env_allow: list[str] = []
    stdout_max_mb: int = ProgramConfig().stdout_max >> 20
    exec: dict[str, str | _ExecFile] = {}
    service: dict[str, str | _ServiceFile] = {}
    limits: _LimitsFile = msgspec.field(default_factory=_LimitsFile)


def read_file(path: str | Path) -> WorkerFile:
    """The settings in a worker.toml. Raises WrongUsage with what is wrong in it."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise WrongUsage(
            f"cannot read {path}: {os.strerror(error.errno or 0).lower()}",
            remedy="name a file you may read with --config",
        ) from None
    try:
        return msgspec.convert(tomllib.loads(text), WorkerFile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise WrongUsage(
            f"{path} makes no sense: {error}", remedy="see worker.toml in docs/WORKERS.md"
        ) from None


# ------------------------------------------------------------------ putting it together


def make_offers(
    file: WorkerFile,
    *,
    execs: Iterable[str] = (),
    services: Iterable[str] = (),
    functions: bool = False,
    any_program: bool = False,
    env_pass: Iterable[str] = (),
    env_allow: Iterable[str] = (),
    sandbox: str = "",
    scratch: Path | None = None,
    cache: Path | None = None,
    cache_max_gb: float | None = None,
) -> Offers:
    """What the file and the command line say together."""
    executables = {name: _executable(name, each) for name, each in file.exec.items()}
    for text in execs:
        name, path = _pair(text, "--exec")
        executables[name] = _executable(name, path)
    offered = {name: _service(name, each) for name, each in file.service.items()}
    for text in services:
        name, command = _pair(text, "--service")
        offered[name] = _service(name, command)
    if both := sorted(executables.keys() & offered.keys()):
        raise WrongUsage(
            f"{both[0]!r} is both a program and a service", remedy="give them different names"
        )
    any_program = any_program or file.allow_any_program
    programs = ProgramConfig(
        executables=executables,
        any_program=any_program,
        env_pass=(*file.env_pass, *env_pass),
        env_allow=(*file.env_allow, *env_allow),
        limits=_limits(file.limits),
        stdout_max=file.stdout_max_mb << 20,
        sandbox=sandbox or file.sandbox,
        # Only a sandbox can keep a program of this account from the keys of this account.
        hidden=(str(state_folder()),),
    )
    return Offers(
        programs=programs if executables or any_program else None,
        functions=functions or file.functions,
        services=tuple(offered.values()),
        scratch=scratch or (Path(file.scratch) if file.scratch else None),
        cache=cache or (Path(file.cache) if file.cache else None),
        cache_bytes=int((cache_max_gb or file.cache_max_gb) * (1 << 30)) or None,
    )


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not equals or not name or not rest:
        raise WrongUsage(f"{option} {text!r} is not usable", remedy=f"write {option} NAME=PATH")
    return name, rest


def _executable(name: str, each: str | _ExecFile) -> Executable:
    check_name(name, "program")
    path, sha256 = (each, "") if isinstance(each, str) else (each.path, each.sha256)
    return Executable(_startable(path, f"program {name!r}"), sha256.lower())


def _startable(path: str, what: str) -> str:
    """Its absolute path, if there is something to start; better told now than to every job."""
    found = shutil.which(path) if "/" not in path else str(Path(path).absolute())
    if found is None or not os.path.isfile(found):
        raise WrongUsage(f"{what}: there is no {path!r} here", remedy="name a file by its path")
    if not os.access(found, os.X_OK):
        raise WrongUsage(f"{what}: {path!r} is not executable", remedy=f"chmod +x {path}")
    return found


def _service(name: str, each: str | _ServiceFile) -> ServiceConfig:
    check_name(name, "service")
    given = _ServiceFile(each) if isinstance(each, str) else each
    argv = shlex.split(given.command) if isinstance(given.command, str) else list(given.command)
    if not argv:
        raise WrongUsage(f"service {name!r} has no command")
    argv[0] = _startable(argv[0], f"service {name!r}")
    bounds = {"recycle_jobs": given.recycle_jobs, "recycle_mb": given.recycle_mb}
    more: dict[str, Any] = {which: value for which, value in bounds.items() if value}
    return ServiceConfig(
        name=name,
        argv=argv,
        health=given.health,
        health_every_s=given.health_every_s,
        health_timeout_s=given.health_timeout_s,
        ready=given.ready,
        start_timeout_s=given.start_timeout_s,
        env=given.env,
        **more,
    )


def _limits(file: _LimitsFile) -> Limits:
    return Limits(
        open_files=file.open_files,
        processes=file.processes,
        file_bytes=file.file_mb << 20,
        cpu_s=file.cpu_s,
    )
