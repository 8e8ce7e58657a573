"""Handlers of the workers in these tests. What a test wants to see from outside is in files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path

import ekiden

worker = ekiden.Worker()


@worker.handler("job.assign.echo")
def echo(job: ekiden.Job) -> bytes:
    return job.payload


@worker.handler("job.assign.sha256")
def sha256(job: ekiden.Job) -> str:
    return hashlib.sha256(job.payload).hexdigest()


@worker.handler("job.assign.fail")
def fail(job: ekiden.Job) -> None:
    raise RuntimeError(f"attempt {job.attempt} of {job.payload.decode()}")


@worker.handler("job.assign.flaky")
def flaky(job: ekiden.Job) -> int:
    """Succeeds at the attempt named by the payload."""
    if job.attempt < int(job.payload):
        raise RuntimeError("not yet")
    return job.attempt


@worker.handler("job.assign.gate")
async def gate(job: ekiden.Job) -> str:
    """Says that it runs by making the file `<payload>.began`; ends when `<payload>.open` exists."""
    path = Path(job.payload.decode())
    with path.with_suffix(".began").open("a") as file:
        file.write(f"{job.id} {job.attempt} {os.getpid()}\n")
    job.progress({"waiting": path.name})
    while not path.with_suffix(".open").exists():
        await asyncio.sleep(0.01)
    return path.name


@worker.handler("job.assign.stubborn")
def stubborn(job: ekiden.Job) -> str:
    """Like `gate`, in a thread: nobody can interrupt it."""
    path = Path(job.payload.decode())
    path.with_suffix(".began").touch()
    while not path.with_suffix(".open").exists():
        time.sleep(0.01)
    return path.name


@worker.handler("job.assign.note")
def note(job: ekiden.Job) -> None:
    """Appends the job's id to the file named by the payload: the order in which jobs ran."""
    with Path(job.payload.decode()).open("a") as file:
        file.write(f"{job.id}\n")


@worker.handler("job.assign.die")
def die(job: ekiden.Job) -> None:
    os._exit(9)
