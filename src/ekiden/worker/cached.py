"""Where a job finds its cached data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ekiden.errors import UnknownCache
from ekiden.model.caches import check_cache_id

ENV_CACHE: Final = "EKIDEN_CACHE"
"""Tells programs, services and functions of the folder that has a folder for each cache."""

_folders: Final[list[str]] = []
"""The same, of the workers in this process: handlers run in it, and it has no such variable."""


def cache_folder(cache_id: str) -> Path:
    """The read-only folder with the files of a cache, inside a job that was submitted with it.

    Raises UnknownCache if there is none: outside of a job, or for a cache the job did not name.
    """
    check_cache_id(cache_id)
    for folder in [os.environ.get(ENV_CACHE, ""), *reversed(_folders)]:
        if folder and os.path.isdir(found := os.path.join(folder, cache_id)):
            return Path(found)
    raise UnknownCache(
        f"there is no cache {cache_id!r} here",
        remedy="name it when the job is submitted; outside of a job there are none",
    )


def add_folder(folder: str) -> None:
    """A worker of this process has its caches there."""
    _folders.append(folder)


def drop_folder(folder: str) -> None:
    """That worker has ended."""
    if folder in _folders:
        _folders.remove(folder)
