"""Handlers for a first look and for tests: what `ekiden up` serves without any code of yours."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from ekiden.worker.handlers import Handlers, Job


def echo(job: Job) -> bytes:
    """The payload, as it came."""
    return job.payload


async def sleep(job: Job) -> str:
    """Wait for the seconds given as the first argument or as the payload."""
    seconds = float(_first(job, "0"))
    await asyncio.sleep(seconds)
    return f"slept {seconds:g} s"


def fail(job: Job) -> bytes:
    """Raise, with the first argument or the payload as the reason."""
    raise RuntimeError(str(_first(job, "asked to fail")))


def sha256(job: Job) -> str:
    """The SHA-256 of the payload, in hex."""
    return hashlib.sha256(job.payload).hexdigest()


def _first(job: Job, default: str) -> Any:
    if job.args:
        return job.args[0]
    return job.payload.decode() or default


def builtin_handlers() -> Handlers:
    """All of the above, each under `job.assign.<name>`."""
    handlers = Handlers()
    for function in (echo, sleep, fail, sha256):
        handlers.add(f"job.assign.{function.__name__}", function)
    return handlers
