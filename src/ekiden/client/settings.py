"""How a client was asked to be: what both clients take, with defaults filled in."""

from __future__ import annotations

import getpass
import os
import platform
import re
from pathlib import Path
from typing import Final

from msgspec import Struct

from ekiden import errors, limits
from ekiden.model.ids import check_party
from ekiden.world.addresses import split_addresses

ENV_CONNECT: Final = "EKIDEN_CONNECT"
ADDRESS_DEFAULT: Final = "127.0.0.1:7000"


class Settings(Struct, frozen=True, kw_only=True):
    """How a client was asked to be."""

    addresses: list[str]
    client_id: str
    key: bytes | None
    key_file: Path | str | None
    pending_max: int
    batch_jobs: int
    ask_timeout_s: float
    close_timeout_s: float


def make_settings(
    address: str | None,
    *,
    client_id: str | None,
    key: bytes | None,
    key_file: Path | str | None,
    pending_max: int,
    batch_jobs: int,
    ask_timeout_s: float,
    close_timeout_s: float,
) -> Settings:
    """Settings with defaults filled in. Raises `WrongUsage` or `BadId`."""
    if pending_max < 1 or not 1 <= batch_jobs <= limits.BATCH_JOBS_MAX:
        raise errors.WrongUsage(
            f"pending_max {pending_max} or batch_jobs {batch_jobs} is out of range",
            remedy=f"pending_max is at least 1, batch_jobs 1 to {limits.BATCH_JOBS_MAX}",
        )
    return Settings(
        addresses=addresses_of(address),
        client_id=check_party(client_id or default_client_id(), "client"),
        key=key,
        key_file=key_file,
        pending_max=pending_max,
        batch_jobs=batch_jobs,
        ask_timeout_s=ask_timeout_s,
        close_timeout_s=close_timeout_s,
    )


def addresses_of(address: str | None) -> list[str]:
    """The brokers to try: what was given, else EKIDEN_CONNECT, else this machine."""
    return split_addresses(address or os.environ.get(ENV_CONNECT) or ADDRESS_DEFAULT)


def default_client_id() -> str:
    """`user@host`, with what is not allowed in an id replaced."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = "user"
    return f"{_tame(user)}@{_tame(platform.node() or 'host')}"


def _tame(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._:-]", "-", name)[:60]
