"""Who gets what: reads the book and the roster, proposes assigns, changes neither.

Routes with something ready stand in a ring; each visit gives one grant, so no route starves
another. The workers that may take a route form a *pool*; routes with the same workers share one. A
pool keeps its workers in a heap by load, with stale entries thrown out when they surface, so the
cost of an assign does not grow with the number of workers. A route for which no worker has room is
parked in its pool and costs nothing until one has.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from typing import Final

from ekiden import limits
from ekiden.core.book import JobBook
from ekiden.core.commands import Assign
from ekiden.core.roster import Roster, RosterWorker
from ekiden.core.subjects import match
from ekiden.model.jobs import Route

LEAST_LOAD: Final = "least-load"
ROUND_ROBIN: Final = "round-robin"

# Pools are a cache of "who may take this route"; it is dropped whole when it gets this large.
POOLS_MAX: Final = 20_000

# To fetch a cache is taken to last as long as two jobs in every slot: a worker that has it is
# preferred until so much more waits there, and one that has not is never left idle for long.
FETCH_ROUNDS: Final = 2


class Pool:
    """Workers that may take the same routes, in the order they are to be chosen."""

    __slots__ = ("heap", "order", "parked", "policy", "pushed", "workers")

    def __init__(self, policy: str, workers: list[RosterWorker]) -> None:
        self.policy = policy
        self.workers = workers
        self.heap: list[tuple[int, int, int, str, int]] = []
        self.pushed: dict[str, int] = {}
        self.parked: OrderedDict[Route, None] = OrderedDict()

    def push(self, worker: RosterWorker, book: JobBook) -> None:
        """Enter the worker with its present load; an older entry is superseded."""
        free = worker.free(book)
        if free <= 0:
            return
        load = worker.held(book) if self.policy == LEAST_LOAD else 0
        spare = -free if self.policy == LEAST_LOAD else 0
        self.pushed[worker.id] = worker.stamp
        heapq.heappush(self.heap, (load, spare, worker.last_use, worker.id, worker.stamp))

    def best(self, book: JobBook, roster: Roster) -> RosterWorker | None:
        """The worker to be given the next grant, or None if none has room."""
        heap, pushed = self.heap, self.pushed
        while heap:
            _, _, _, worker_id, stamp = heap[0]
            worker = roster.workers.get(worker_id)
            if worker is not None and pushed.get(worker_id) == stamp == worker.stamp:
                if worker.free(book) > 0:
                    return worker
                del pushed[worker_id]
                heapq.heappop(heap)
                continue
            heapq.heappop(heap)
            if pushed.get(worker_id) == stamp:
                del pushed[worker_id]
                if worker is not None:
                    self.push(worker, book)
        return None


class Scheduler:
    """Plans on a book with everything committed applied; `incoming` counts what the same entry is
    about to make ready, so that a submit and its assign share one commit."""

    def __init__(self, roster: Roster, policies: dict[str, str] | None = None) -> None:
        self.roster = roster
        self.policies = policies or {}
        self._ring: OrderedDict[Route, None] = OrderedDict()
        self._pools: dict[Route, Pool] = {}
        self._by_workers: dict[tuple[str, ...], Pool] = {}
        self._of_worker: dict[str, list[Pool]] = {}
        self._roomy: dict[Pool, None] = {}
        """Pools with parked routes in which some worker has room again."""
        self._planned: dict[RosterWorker, int] = {}
        """Workers in the last plan → what they held before it."""
        self._version = -1
        self._uses = 0

    def wake(self, route: Route) -> None:
        """Something may have become ready there."""
        if route not in self._ring:
            pool = self._pools.get(route)
            if pool is None or route not in pool.parked:
                self._ring[route] = None

    def freed(self, worker: RosterWorker, book: JobBook) -> None:
        """The worker may have room, or its load changed."""
        worker.stamp += 1
        for pool in self._of_worker.get(worker.id, ()):
            pool.push(worker, book)
            if pool.parked and worker.free(book) > 0:
                self._roomy[pool] = None

    def plan(self, book: JobBook, incoming: dict[Route, int]) -> list[Assign]:
        """Grants for this entry, and `planned` counted on the workers that get them."""
        if self._version != self.roster.version or len(self._by_workers) >= POOLS_MAX:
            self._rebuild()
        plans: list[Assign] = []
        taken: dict[Route, int] = {}
        ring = self._ring
        looks = {pool: len(pool.parked) for pool in self._roomy}
        self._roomy.clear()
        while ring or self._draw(looks, book):
            route, _ = ring.popitem(last=False)
            queue = book.queues.get(route)
            ready = queue.ready if queue is not None else 0
            available = ready + incoming.get(route, 0) - taken.get(route, 0)
            if available <= 0:
                continue
            pool = self._pool(route, book)
            worker, room = self._choose(pool, route, book)
            if worker is None:
                pool.parked[route] = None
                continue
            fair = -(-available // max(1, len(pool.pushed)))
            count = min(limits.GRANT_JOBS_MAX, room, available, max(1, fair))
            plans.append(Assign(worker.id, route, count))
            taken[route] = taken.get(route, 0) + count
            self._uses += 1
            if not worker.planned:
                self._planned[worker] = worker.held(book)
            worker.plan(count, route.needs)
            worker.last_use = self._uses
            worker.stamp += 1
            if available > count:
                ring[route] = None
        return plans

    def _draw(self, looks: dict[Pool, int], book: JobBook) -> bool:
        """Let as many parked routes back into the ring as there are workers with room: not all of
        them, because ten thousand may wait for the one slot that became free. Each is looked at
        once in a plan, since room may be there and still not be for it."""
        for pool in list(looks):
            if looks[pool] and pool.best(book, self.roster) is not None:
                count = min(looks[pool], len(pool.pushed))
                looks[pool] -= count
                for _ in range(count):
                    self._ring[pool.parked.popitem(last=False)[0]] = None
                return True
            del looks[pool]
        return False

    def forget_plans(self, book: JobBook) -> None:
        """The last plan is in the book now, or was withdrawn."""
        for worker, held in self._planned.items():
            expected = held + worker.planned
            worker.forget_plans()
            if worker.held(book) < expected:
                # A repeated submit or a client's cap left it with less, so routes may be parked
                # for want of the room it has after all, and nothing else will tell.
                self.freed(worker, book)
        self._planned.clear()

    def waiting_on(self, route: Route, book: JobBook) -> list[RosterWorker]:
        """Workers that may take the route, busy or not: why a job waits."""
        if self._version != self.roster.version:
            self._rebuild()
        return self._pool(route, book).workers

    # -------------------------------------------------------------- inside

    def _rebuild(self) -> None:
        self._version = self.roster.version
        for pool in self._by_workers.values():
            self._ring.update(pool.parked)
        self._pools.clear()
        self._by_workers.clear()
        self._of_worker.clear()
        self._roomy.clear()

    def _pool(self, route: Route, book: JobBook) -> Pool:
        pool = self._pools.get(route)
        if pool is not None:
            return pool
        if len(self._pools) >= POOLS_MAX:
            # Who waits in which pool is not forgotten: a plan that looked at them all again
            # would never end.
            self._pools.clear()
        known = self.roster.workers
        names = [route.pin] if route.pin else self.roster.trie.match(route.subject)
        workers = [known[name] for name in names if name in known and known[name].patterns]
        workers = [worker for worker in workers if worker.suits(route.needs)]
        policy = self._policy(route.subject)
        key = (policy, *(worker.id for worker in workers))
        pool = self._by_workers.get(key)
        if pool is None:
            pool = self._by_workers[key] = Pool(policy, workers)
            for worker in workers:
                self._of_worker.setdefault(worker.id, []).append(pool)
                pool.push(worker, book)
        self._pools[route] = pool
        return pool

    def _policy(self, subject: str) -> str:
        for pattern, policy in self.policies.items():
            if match(pattern, subject):
                return policy
        return LEAST_LOAD

    def _choose(self, pool: Pool, route: Route, book: JobBook) -> tuple[RosterWorker | None, int]:
        needs = route.needs
        if route.key:
            return self._sticky(pool, route, book)
        if not (needs.cpu_milli or needs.mem_mb or route.avoid):
            worker = pool.best(book, self.roster)
            if worker is None or not route.data or not worker.lacks(route.data):
                return worker, worker.free(book) if worker is not None else 0
        roomy = [
            (w.id == route.avoid, _load(w, route.data, book), w.last_use, w.id, w)
            for w in pool.workers
            if w.room(needs, book) > 0
        ]
        if not roomy:
            return None, 0
        worker = min(roomy)[-1]
        return worker, worker.room(needs, book)

    def _sticky(self, pool: Pool, route: Route, book: JobBook) -> tuple[RosterWorker | None, int]:
        """Rendezvous hashing: one key, one worker, and few keys move when workers change."""
        key = route.key.encode() + b"\0"
        able = [w for w in pool.workers if w.conn is not None and not w.draining]
        if not able:
            return None, 0
        # A checksum will not do: it is linear, and most keys fell to the same few workers.
        worker = max(able, key=lambda w: (hashlib.sha256(key + w.id.encode()).digest(), w.id))
        room = worker.room(route.needs, book)
        return (worker, room) if room > 0 else (None, 0)


def _load(worker: RosterWorker, data: tuple[str, ...], book: JobBook) -> int:
    """What the worker holds; data it would have to fetch first counts like that many jobs."""
    return worker.held(book) + FETCH_ROUNDS * worker.slots * worker.lacks(data)
