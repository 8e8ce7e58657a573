"""Where jobs of one route wait, and who is next.

A *lane* is (route, priority, client): a FIFO. A *queue* holds the lanes of a route; within a
priority a ring goes round the lanes that have something ready, so one client's million jobs do not
hold up another's ten. A queue never decides whether a job may run; it keeps order and answers
"who is next?".

Cancelled rows are not searched for: they lie dead in the deque (their place is no longer the lane)
and are skipped when they surface. `ready` counts the living, and nothing here depends on the dead,
so a book loaded from a snapshot, which has none, takes the same jobs in the same order.
"""

from __future__ import annotations

from collections import deque

from ekiden.core.rows import ClientLedger, Row
from ekiden.model.jobs import Route


class Lane:
    """Jobs of one client, route and priority, in the order they were accepted."""

    __slots__ = ("client", "in_ring", "priority", "queue", "ready", "rows", "seq")

    def __init__(self, queue: Queue, priority: int, client: ClientLedger, seq: int) -> None:
        self.queue = queue
        self.priority = priority
        self.client = client
        self.seq = seq
        self.rows: deque[Row] = deque()
        self.ready = 0
        self.in_ring = False

    def bury(self) -> None:
        """Forget the dead: one of them is about to return, and must not lie here twice."""
        if self.ready != len(self.rows):
            self.rows = deque(row for row in self.rows if row.place is self)

    def pop(self, count: int) -> list[Row]:
        """The next `count` living rows; the caller made sure there are as many."""
        rows = self.rows
        if self.ready == len(rows):
            if count == self.ready:
                taken = list(rows)
                rows.clear()
            else:
                take = rows.popleft
                taken = [take() for _ in range(count)]
        else:
            taken = []
            while len(taken) < count:
                row = rows.popleft()
                if row.place is self:
                    taken.append(row)
        self.ready -= count
        return taken


class Queue:
    """All that waits on one route."""

    __slots__ = ("lanes", "leased", "parked", "ready", "rings", "route")

    def __init__(self, route: Route) -> None:
        self.route = route
        self.lanes: dict[tuple[int, str], Lane] = {}
        self.rings: dict[int, deque[Lane]] = {}
        self.ready = 0
        self.parked = 0
        """What waits here of clients at their cap: not ready, but there."""
        self.leased = 0

    def add(self, lane: Lane, rows: list[Row], *, front: bool = False) -> None:
        """Rows become ready in their lane. The lane joins its ring unless its client is parked."""
        if front:
            lane.rows.extendleft(reversed(rows))
        else:
            lane.rows.extend(rows)
        if not lane.ready:
            lane.client.lanes[lane] = None
        lane.ready += len(rows)
        if lane.client.parked:
            self.parked += len(rows)
            return
        self.ready += len(rows)
        if not lane.in_ring:
            self._enter(lane)

    def discard(self, lane: Lane) -> None:
        """One row of the lane died where it lay."""
        lane.ready -= 1
        if lane.in_ring:
            self.ready -= 1
        else:
            self.parked -= 1
        if not lane.ready:
            self._retire(lane)
        elif len(lane.rows) > 2 * lane.ready + 64:
            # More dead than alive: the memory of cancelled jobs is not to wait for its turn.
            lane.bury()

    def take(self, count: int, cap: int) -> list[tuple[Lane, list[Row]]]:
        """Up to `count` jobs: highest priority first, round the ring, never past a client's cap."""
        taken: list[tuple[Lane, list[Row]]] = []
        for priority in sorted(self.rings, reverse=True):
            ring = self.rings.get(priority)
            turns = equal = 0
            while ring and count:
                if not turns:
                    # Once round the ring with the same share for everyone in it.
                    turns, equal = len(ring), max(1, count // len(ring))
                turns -= 1
                lane = ring[0]
                share = min(lane.ready, equal)
                if cap:
                    share = min(share, cap - lane.client.inflight)
                rows = lane.pop(share)
                taken.append((lane, rows))
                count -= share
                self.ready -= share
                lane.client.inflight += share
                ring.rotate(-1)
                if not lane.ready:
                    self._retire(lane)
                if cap and lane.client.inflight >= cap:
                    park(lane.client)
            if not count:
                break
        return taken

    def _enter(self, lane: Lane) -> None:
        ring = self.rings.get(lane.priority)
        if ring is None:
            ring = self.rings[lane.priority] = deque()
        ring.append(lane)
        lane.in_ring = True

    def _leave(self, lane: Lane) -> None:
        ring = self.rings[lane.priority]
        if ring[-1] is lane:  # just rotated there: the usual case
            ring.pop()
        else:
            ring.remove(lane)
        lane.in_ring = False
        if not ring:
            del self.rings[lane.priority]

    def _retire(self, lane: Lane) -> None:
        """Nothing ready is left in the lane."""
        if lane.in_ring:
            self._leave(lane)
        lane.rows.clear()
        del lane.client.lanes[lane]
        del self.lanes[lane.priority, lane.client.id]


def park(client: ClientLedger) -> None:
    """The client is at its cap: nothing of it looks ready any more, so nobody plans for it."""
    client.parked = True
    for lane in client.lanes:
        lane.queue.ready -= lane.ready
        lane.queue.parked += lane.ready
        lane.queue._leave(lane)


def unpark(client: ClientLedger) -> list[Queue]:
    """There is room again: its lanes return to their rings in the order they first filled."""
    client.parked = False
    lanes = sorted(client.lanes, key=lambda lane: lane.seq)
    for lane in lanes:
        lane.queue.ready += lane.ready
        lane.queue.parked -= lane.ready
        lane.queue._enter(lane)
    return [lane.queue for lane in lanes]
