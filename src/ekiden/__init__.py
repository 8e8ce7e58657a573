"""ekiden: a durable job broker and compute grid.

Names are loaded when they are first used: a worker does not pay for the client, nor a command line
for either.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ekiden import errors

if TYPE_CHECKING:
    from ekiden.client.aio import AsyncClient, AsyncJobFuture, AsyncSubscription
    from ekiden.client.blocking import BlockingSubscription, Client
    from ekiden.client.caches import CacheFile, CacheProgress, CacheReport, CacheWorker
    from ekiden.client.core import Message
    from ekiden.client.executor import Executor
    from ekiden.client.functions import FunctionFuture, RemoteTraceback
    from ekiden.client.futures import JobFuture
    from ekiden.client.options import JobOptions
    from ekiden.client.results import JobResult
    from ekiden.worker.cached import cache_folder
    from ekiden.worker.handlers import Job
    from ekiden.worker.runner import CurrentJob, current_job
    from ekiden.worker.serve import Worker

_HOMES = {
    "AsyncClient": "ekiden.client.aio",
    "AsyncJobFuture": "ekiden.client.aio",
    "AsyncSubscription": "ekiden.client.aio",
    "BlockingSubscription": "ekiden.client.blocking",
    "CacheFile": "ekiden.client.caches",
    "CacheProgress": "ekiden.client.caches",
    "CacheReport": "ekiden.client.caches",
    "CacheWorker": "ekiden.client.caches",
    "Client": "ekiden.client.blocking",
    "CurrentJob": "ekiden.worker.runner",
    "Executor": "ekiden.client.executor",
    "FunctionFuture": "ekiden.client.functions",
    "Job": "ekiden.worker.handlers",
    "JobFuture": "ekiden.client.futures",
    "JobOptions": "ekiden.client.options",
    "JobResult": "ekiden.client.results",
    "Message": "ekiden.client.core",
    "RemoteTraceback": "ekiden.client.functions",
    "Worker": "ekiden.worker.serve",
    "cache_folder": "ekiden.worker.cached",
    "current_job": "ekiden.worker.runner",
}

__all__ = [
    "AsyncClient",
    "AsyncJobFuture",
    "AsyncSubscription",
    "BlockingSubscription",
    "CacheFile",
    "CacheProgress",
    "CacheReport",
    "CacheWorker",
    "Client",
    "CurrentJob",
    "Executor",
    "FunctionFuture",
    "Job",
    "JobFuture",
    "JobOptions",
    "JobResult",
    "Message",
    "RemoteTraceback",
    "Worker",
    "cache_folder",
    "current_job",
    "errors",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is not None:
        found = getattr(import_module(home), name)
    elif name == "testing":
        found = import_module("ekiden.testing")
    elif isinstance(kind := getattr(errors, name, None), type) and issubclass(kind, Exception):
        found = kind
    else:
        raise AttributeError(f"module 'ekiden' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
