"""What a caller says and hears of caches: files in them, how a put goes on, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from msgspec import Struct

READING: Final = "reading"
SENDING: Final = "sending"
REACHING: Final = "reaching"

# How it stands with a cache at a worker: it has it, or it will not without somebody's doing.
HAS_IT: Final = ("ok", "skipped")
LACKS_IT: Final = ("failed", "gone")


class CacheFile(Struct, frozen=True):
    """A file of a cache, to be given where a program takes files: it is linked into the job's
    folder, and nothing travels for it."""

    cache_id: str
    name: str


class CacheWorker(Struct, frozen=True):
    """How it stands with a cache at one worker."""

    id: str
    status: str
    """`pending`, `fetching`, `ok` (it came), `skipped` (it was there), `failed` or `gone`."""
    text: str = ""
    """Why, if it failed."""
    done: int = 0
    """Bytes that are there, of `total`."""
    total: int = 0

    @property
    def has_it(self) -> bool:
        """Whether it has the whole cache."""
        return self.status in HAS_IT

    @property
    def settled(self) -> bool:
        """Whether it has said what becomes of it."""
        return self.status in HAS_IT or self.status in LACKS_IT


class CacheReport(Struct, frozen=True, kw_only=True):
    """What a put has come to. Workers that join later are served by themselves and not in here."""

    cache_id: str
    manifest: str
    """SHA-256 that stands for the content."""
    files: int
    bytes: int
    """Of all files together."""
    sent_bytes: int
    """Of them and of the manifest, what had to be sent to the broker."""
    state: str
    """`new`, `same` (it was there), or `widened` (it was there, for other workers)."""
    workers: list[CacheWorker]
    """Those that are connected and that it is meant for."""
    seconds: float

    @property
    def reached(self) -> int:
        """How many workers have it."""
        return sum(worker.has_it for worker in self.workers)

    @property
    def of(self) -> int:
        """How many it is meant for."""
        return len(self.workers)

    @property
    def ratio(self) -> float:
        """The share that has it; 1.0 if there is none to have it."""
        return self.reached / self.of if self.workers else 1.0

    @property
    def failed(self) -> list[CacheWorker]:
        """Workers that will not have it without somebody's doing."""
        return [worker for worker in self.workers if worker.settled and not worker.has_it]

    @property
    def remark(self) -> str:
        """What is worth knowing beside the numbers."""
        if self.workers:
            return ""
        return "no worker it is meant for is connected; those that join get it by themselves"


class CacheProgress(Struct, frozen=True):
    """How far a put is."""

    phase: str
    """`reading`, `sending` or `reaching`."""
    done: int
    """Bytes of this phase, of `total`."""
    total: int
    reached: int = 0
    """Workers that have it, `of` those it is meant for."""
    of: int = 0


Progress: TypeAlias = Callable[[CacheProgress], Any]


def workers_of(answer: dict[str, Any]) -> list[CacheWorker]:
    """The workers in the broker's answer about a cache."""
    return [
        CacheWorker(
            worker["id"],
            worker["status"],
            worker.get("text", ""),
            worker.get("done", 0),
            worker.get("total", 0),
        )
        for worker in answer.get("workers", ())
    ]
