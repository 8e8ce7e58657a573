"""A check that cannot fail checks nothing: every invariant is broken once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.core.group import Group, spec

from ekiden.core import invariants
from ekiden.core.book import JobBook
from ekiden.limits import NS


def a_book() -> Group:
    group = Group(client_inflight_max=3, results_max=1)
    group.submit("q1", "q2", "l1", "d1", client="ann")
    group.submit("later", delay_ns=NS)
    group.submit("b1", client="bob", of=spec("b"))
    group.submit("old", client="cid", of=spec("c"))
    group.finish(group.assign(of=spec("c")), 0)
    group.now += 1
    grant = group.assign(count=2)
    group.finish(grant, 1)
    group.now += 1
    group.cancel(grant.rows[0].id)
    group.later(0)
    return group


def _swap(book: JobBook) -> None:
    shard = next(s for s in book.known if s)
    row = shard.popitem()[1]
    shard["another name"] = row


def _lane(book: JobBook):
    return next(lane for queue in book.queues.values() for lane in queue.lanes.values())


BREAKS: dict[str, Callable[[Group], object]] = {
    "a job under a wrong name": lambda g: _swap(g.book),
    "a waiting job without its input": lambda g: setattr(g.job("l1"), "body", None),
    "a lease of a grant that is gone": lambda g: g.book.grants.clear(),
    "a job nowhere": lambda g: setattr(g.job("later"), "place", None),
    "delayed miscounted": lambda g: setattr(g.book, "delayed", 7),
    "ids miscounted": lambda g: setattr(g.book, "ids_kept", 7),
    "results miscounted": lambda g: setattr(g.book, "results_kept", 7),
    "result bytes miscounted": lambda g: setattr(g.book, "result_bytes", 7),
    "live bytes miscounted": lambda g: setattr(g.book, "live_bytes", 7),
    "a client's jobs miscounted": lambda g: setattr(g.book.clients["ann"], "live", 7),
    "a client's bytes miscounted": lambda g: setattr(g.book.clients["ann"], "bytes", 7),
    "a client's leases miscounted": lambda g: setattr(g.book.clients["ann"], "inflight", 2),
    "parked below the cap": lambda g: setattr(g.book.clients["ann"], "parked", True),
    "a client the book forgot": lambda g: g.book.clients.pop("ann"),
    "a lane in no ring": lambda g: setattr(_lane(g.book), "in_ring", False),
    "a lane twice in its ring": lambda g: next(iter(_lane(g.book).queue.rings.values())).append(
        _lane(g.book)
    ),
    "a lane miscounted": lambda g: setattr(_lane(g.book), "ready", 7),
    "a queue miscounted": lambda g: setattr(_lane(g.book).queue, "ready", 7),
    "a queue's leases miscounted": lambda g: setattr(_lane(g.book).queue, "leased", 7),
    "a queue the book forgot": lambda g: g.book.queues.pop(spec("b").route),
    "a grant miscounted": lambda g: setattr(next(iter(g.book.grants.values())), "left", 7),
    "a grant number from the future": lambda g: setattr(g.book, "next_grant", 1),
    "a worker miscounted": lambda g: setattr(g.book.workers["w1"], "held", 7),
    "cancelling what does not run": lambda g: g.book.cancelling.update({"l1": "why"}),
    "cancelling what is not known": lambda g: g.book.cancelling.update({"nobody": "why"}),
    "a settled job that lies elsewhere": lambda g: g.book.settled[0].rows.append(g.job("l1")),
    "a faded job that is not known": lambda g: g.book.faded[0].rows.__setitem__(
        0, g.book.settled[0].rows[0]
    ),
}


def test_a_sound_book_passes() -> None:
    invariants.check(a_book().book)


@pytest.mark.parametrize("what", BREAKS)
def test_it_is_noticed(what: str) -> None:
    group = a_book()

    BREAKS[what](group)

    with pytest.raises((AssertionError, KeyError)):
        invariants.check(group.book)
