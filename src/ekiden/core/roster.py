"""The leader's present view of its workers. Not journaled: a new leader learns it by listening."""

from __future__ import annotations

from msgspec import Struct

from ekiden import limits
from ekiden.core.book import JobBook
from ekiden.core.subjects import SubjectTrie
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import Needs

READY = "ready"
DRAINING = "draining"
QUARANTINED = "quarantined"
SILENT = "silent"

CACHE_HERE = ("ok", "skipped")


class CacheWord(Struct, frozen=True):
    """What a worker has said last of a cache."""

    manifest: str
    status: str
    text: str
    done: int
    total: int


class RosterWorker:
    """One worker that said Join. While silent it stays here until its leases are forfeited."""

    def __init__(self, worker_id: str) -> None:
        self.id = worker_id
        self.conn: int | None = None
        self.session = ""
        self.patterns: list[str] = []
        self.slots = 0
        self.credit = 0
        self.labels: dict[str, str] = {}
        self.cpu_milli = 0
        self.mem_mb = 0
        self.host = ""
        self.load = 0
        self.heard = 0
        self.running: list[tuple[int, int, int]] = []
        self.progress: dict[tuple[int, int], bytes] = {}
        """The last word of attempts that run, by grant and offset, as far as they are short."""
        self.caches: dict[str, CacheWord] = {}
        """Its last word on each, by id."""
        self.draining = False
        self.failed_in_row: dict[str, None] = {}
        self.quarantined_until = 0
        self.planned = 0
        """Attempts planned for it in the entry that is not applied yet, and what they need."""
        self.planned_cpu = 0
        self.planned_mem = 0
        self.last_use = 0
        self.stamp = 0
        """Grows with every change that may move it in a pool's order."""

    @property
    def state(self) -> str:
        """In one word, for people."""
        if self.conn is None:
            return SILENT
        if self.quarantined_until:
            return QUARANTINED
        return DRAINING if self.draining else READY

    def free(self, book: JobBook) -> int:
        """How many more attempts it may be given."""
        if self.conn is None or self.draining or self.quarantined_until:
            return 0
        ledger = book.workers.get(self.id)
        return self.credit - self.planned - (ledger.held if ledger is not None else 0)

    def held(self, book: JobBook) -> int:
        """Attempts leased to it or about to be."""
        ledger = book.workers.get(self.id)
        return self.planned + (ledger.held if ledger is not None else 0)

    def room(self, needs: Needs, book: JobBook) -> int:
        """How many jobs with these needs fit beside what it holds."""
        most = self.free(book)
        ledger = book.workers.get(self.id)
        grants = ledger.grants.values() if ledger is not None else ()
        if needs.cpu_milli:
            used = sum(g.left * g.queue.route.needs.cpu_milli for g in grants)
            most = min(most, (self.cpu_milli - used - self.planned_cpu) // needs.cpu_milli)
        if needs.mem_mb:
            used = sum(g.left * g.queue.route.needs.mem_mb for g in grants)
            most = min(most, (self.mem_mb - used - self.planned_mem) // needs.mem_mb)
        return most

    def plan(self, count: int, needs: Needs) -> None:
        """So many more of these are on their way to it."""
        self.planned += count
        self.planned_cpu += count * needs.cpu_milli
        self.planned_mem += count * needs.mem_mb

    def forget_plans(self) -> None:
        """The entry they were in is applied, or will never be."""
        self.planned = self.planned_cpu = self.planned_mem = 0

    def has(self, use: CacheUse) -> bool:
        """Whether it has said that it has this cache, with this content."""
        word = self.caches.get(use.id)
        return word is not None and word.manifest == use.manifest and word.status in CACHE_HERE

    def lacks(self, data: tuple[str, ...]) -> int:
        """How many of these caches it has not said to have. Ids will do: this is about speed."""
        words = [self.caches.get(cache_id) for cache_id in data]
        return sum(word is None or word.status not in CACHE_HERE for word in words)

    def suits(self, needs: Needs) -> bool:
        """Whether it could ever run such a job."""
        return (
            self.cpu_milli >= needs.cpu_milli
            and self.mem_mb >= needs.mem_mb
            and all(self.labels.get(name) == value for name, value in needs.labels)
        )


class Roster:
    """All workers, and who may take what."""

    def __init__(self) -> None:
        self.workers: dict[str, RosterWorker] = {}
        self.trie: SubjectTrie[str] = SubjectTrie()
        self.version = 0
        """Changes when the answer to "who may take this route?" may."""

    def join(self, worker: RosterWorker, patterns: list[str]) -> None:
        """It is here, with these patterns."""
        self.leave(worker)
        self.workers[worker.id] = worker
        worker.patterns = list(dict.fromkeys(patterns))
        for pattern in worker.patterns:
            self.trie.add(pattern, worker.id)
        self.version += 1

    def leave(self, worker: RosterWorker) -> None:
        """It takes nothing more until it joins again."""
        for pattern in worker.patterns:
            self.trie.remove(pattern, worker.id)
        worker.patterns = []
        self.version += 1

    def drop(self, worker: RosterWorker) -> None:
        """Forget it."""
        self.leave(worker)
        self.workers.pop(worker.id, None)

    def failed(self, worker: RosterWorker, job_id: str, now: int) -> bool:
        """A job failed there. True if that makes the worker itself the suspect."""
        worker.failed_in_row[job_id] = None
        if len(worker.failed_in_row) < limits.QUARANTINE_FAILURES or worker.quarantined_until:
            return False
        worker.quarantined_until = now + limits.QUARANTINE_NS
        worker.failed_in_row.clear()
        return True
