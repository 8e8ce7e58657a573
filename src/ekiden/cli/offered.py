"""What PROGRAM means: a name that workers offer, a command of theirs, or a file that travels."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from ekiden.cli import output
from ekiden.cli.inputs import file_name
from ekiden.client.programs import safe_name, subject_token
from ekiden.core.subjects import match
from ekiden.errors import WrongUsage

LISTED: Final = "job.assign."
ANY: Final = "job.program."

# What lies there belongs to a system, with libraries beside it: the worker has its own.
SYSTEM_FOLDERS: Final = ("/bin", "/sbin", "/usr", "/opt", "/lib", "/lib64", "/nix", "/snap")

_SHOWN: Final = 8


class Runnable(Struct, frozen=True):
    """What to submit."""

    command: str
    any_program: bool
    files: dict[str, Path] = {}
    """The program itself, by name, if it travels with the jobs."""

    @property
    def subject(self) -> str:
        """Where its jobs wait."""
        if not self.any_program:
            return LISTED + self.command
        return ANY + subject_token(safe_name(self.command.rpartition("/")[2]))

    @property
    def name(self) -> str:
        """For the name of a run."""
        return safe_name(self.command.rpartition("/")[2])


class Offers:
    """What the connected workers take."""

    def __init__(self, workers: Iterable[dict[str, Any]]) -> None:
        self.patterns = sorted({p for worker in workers for p in worker["patterns"]})

    @property
    def any_program(self) -> bool:
        """Whether one of them runs whatever it is given."""
        return any(match(pattern, f"{ANY}x") for pattern in self.patterns)

    def takes(self, subject: str) -> bool:
        """Whether one of them takes jobs sent there."""
        return any(match(pattern, subject) for pattern in self.patterns)

    def lists(self, name: str) -> bool:
        """Whether a program of that name is offered, as far as can be told: handlers look alike, so
        the built-in ones count only where nothing else could run the program."""
        if LISTED + name not in self.patterns:
            return False
        return not (self.any_program and name in _builtin_names())


def _builtin_names() -> set[str]:
    from ekiden.worker.builtin import builtin_handlers

    return {pattern.removeprefix(LISTED) for pattern in builtin_handlers().patterns}


def resolve(program: str, offers: Offers, *, wish: bool | None, shipping: bool) -> Runnable:
    """What `program` means. `wish`: any program, or an allow-list name, if the user has said so."""
    if "/" in program:
        if wish is False:
            raise WrongUsage(
                f"{program!r} is a path, and allow-lists have names", remedy="leave --listed away"
            )
        return _by_path(program, shipping=shipping)
    if wish is not None:
        return Runnable(program, wish)
    if offers.lists(program):
        return Runnable(program, False)
    # With workers that run what is listed and nothing else, it can only wait to be listed.
    return Runnable(program, offers.any_program or not offers.patterns)


def _by_path(program: str, *, shipping: bool) -> Runnable:
    path = Path(program)
    installed = any(path.is_relative_to(folder) for folder in SYSTEM_FOLDERS)
    if path.is_dir():
        raise WrongUsage(f"{program!r} is a folder", remedy="name the program in it")
    if installed or not shipping:
        return Runnable(program, True)
    if not path.is_file():
        if path.is_absolute():
            return Runnable(program, True)  # perhaps workers have it
        raise WrongUsage(
            f"there is no {program!r} here",
            remedy="name a file that can travel, or a command that workers have, without '/'",
        )
    if not os.access(path, os.X_OK):
        raise WrongUsage(f"{program!r} is not executable", remedy=f"chmod +x {program}")
    name = file_name(program)
    return Runnable(f"./{name}", True, {name: path})


def warn_if_nobody(runnable: Runnable, offers: Offers) -> None:
    """Say so if no connected worker could run it, and what would help."""
    if offers.takes(runnable.subject):
        return
    names = [p.removeprefix(LISTED) for p in offers.patterns if p.startswith(LISTED)]
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    have = f"they offer: {shown}" if names else "they offer no programs"
    who = f"no connected worker runs {runnable.name!r} ({have})"
    output.say(who if offers.patterns else "no worker is connected")
    help_ = (
        "ekiden worker --allow-any-program"
        if runnable.any_program
        else f"ekiden worker --exec {runnable.name}=/path/to/it"
    )
    output.say(f"  the jobs wait for one; start it with: {help_}")
