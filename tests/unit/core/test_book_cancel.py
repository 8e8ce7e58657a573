"""Cancel and purge: what waits ends at once, what runs when the worker says so."""

from __future__ import annotations

import pytest
from tests.unit.core.group import WALL, Group, ids_of, settled

from ekiden import limits
from ekiden.limits import NS
from ekiden.model import jobs as j


def test_what_waits_is_cancelled_at_once_wherever_it_waits() -> None:
    group = Group()
    group.submit("queued", "retrying")
    group.submit("delayed", delay_ns=NS)
    group.submit("watched", not_before=WALL + NS)
    group.fail(group.assign(count=2), 1)
    group.forfeit("w1")

    changes = group.cancel("queued", "retrying", "delayed", "watched", reason="not needed")

    (tally,) = changes.tallies
    assert tally.changed == ["queued", "retrying", "delayed", "watched"]
    assert settled(changes) == [(j.CANCELLED, tally.changed)]
    assert changes.stops == []
    assert group.ended("queued") == (j.CANCELLED, "not needed", "")
    assert group.book.delayed == 0
    assert group.book.totals.cancelled == 4
    group.later(120)
    group.clock(WALL + NS)
    assert group.states("delayed", "watched") == [j.CANCELLED, j.CANCELLED]


def test_what_runs_is_cancelling_until_the_worker_confirms() -> None:
    group = Group()
    group.submit("j0", "j1")
    grant = group.assign()

    changes = group.cancel("j1", reason="not needed")

    assert changes.tallies[0].stopping == ["j1"]
    assert changes.stops == [(grant, 1)]
    assert settled(changes) == []
    assert group.states("j0", "j1") == [j.LEASED, j.CANCELLING]

    changes = group.fail(grant, 1, cause=j.CANCEL_CONFIRMED)
    assert settled(changes) == [(j.CANCELLED, ["j1"])]
    assert group.ended("j1") == (j.CANCELLED, "not needed", "w1")
    assert group.causes("j1") == []


@pytest.mark.parametrize("way", ["finish", "fail", "release", "forfeit", "forfeit_started"])
def test_a_cancel_committed_first_wins_over_whatever_comes_of_the_attempt(way: str) -> None:
    group = Group()
    group.submit("j1")
    grant = group.assign()
    group.cancel("j1")

    if way == "finish":
        changes = group.finish(grant, 0)
        assert changes.stale == 1
    elif way == "fail":
        changes = group.fail(grant, 0)
    elif way == "release":
        changes = group.release(grant, 0)
    elif way == "forfeit":
        changes = group.forfeit("w1")
    else:
        changes = group.forfeit("w1", (grant, 0))

    assert settled(changes) == [(j.CANCELLED, ["j1"])]
    assert group.job("j1").body == b"j1"
    assert group.book.cancelling == {}
    assert group.book.grants == {}


def test_a_finish_committed_first_wins_over_the_cancel() -> None:
    group = Group()
    group.submit("j1")
    group.finish(group.assign(), 0)

    (tally,) = group.cancel("j1").tallies

    assert tally.settled == ["j1"]
    assert group.state("j1") == j.DONE


def test_others_of_the_grant_finish_while_one_is_cancelling() -> None:
    group = Group()
    group.submit("j0", "j1", "j2")
    grant = group.assign()
    group.cancel("j1")

    changes = group.finish(grant, 0, 1, 2)

    assert settled(changes) == [(j.CANCELLED, ["j1"]), (j.DONE, ["j0", "j2"])]
    assert group.book.grants == {}


def test_the_first_reason_given_for_a_cancel_is_the_one_that_is_kept() -> None:
    group = Group()
    group.submit("j1")
    grant = group.assign()

    group.cancel("j1", reason="first")
    assert group.cancel("j1", reason="second").stops == [(grant, 0)]
    group.forfeit("w1")

    assert group.ended("j1")[1] == "first"


def test_a_job_named_twice_or_unknown_is_told_once() -> None:
    group = Group()
    group.submit("j1")

    (tally,) = group.cancel("j1", "j1", "nobody", "nobody").tallies

    assert (tally.changed, tally.settled, tally.unknown) == (["j1"], [], ["nobody"])


def test_a_cancel_of_very_many_settles_them_in_handy_portions() -> None:
    group = Group()
    names = [f"j{n}" for n in range(3 * limits.GRANT_JOBS_MAX + 1)]
    group.submit(*names)

    changes = group.cancel(*names)

    assert [len(s.rows) for s in changes.settlements] == [limits.GRANT_JOBS_MAX] * 3 + [1]
    assert [row.id for s in changes.settlements for row in s.rows] == names


# ------------------------------------------------------------------ purge


def test_purged_jobs_are_forgotten_and_their_ids_are_free_again() -> None:
    group = Group(max_attempts=1)
    group.submit("f", "c")
    group.cancel("c")
    group.fail(group.assign(), 0)
    group.replay("f")
    group.fail(group.again("w2", "f"), 0)

    (tally,) = group.purge("f", "c", "nobody").tallies

    assert (tally.changed, tally.unknown) == (["f", "c"], ["nobody"])
    assert group.states("f", "c") == ["unknown", "unknown"]
    assert group.book.generations == {}
    assert (group.book.results_kept, group.book.ids_kept, group.book.result_bytes) == (0, 0, 0)
    (outcome,) = group.submit("f", body=b"other").submits
    assert outcome.fresh == 1
    assert ids_of(group.assign()) == ["f"]
    assert group.job("f").attempt == 1


def test_only_what_ended_without_a_result_is_purged() -> None:
    group = Group()
    group.submit("queued", "done")
    group.submit("delayed", delay_ns=NS)
    grant = group.assign()
    group.release(grant, 0)
    group.finish(grant, 1)

    (tally,) = group.purge("queued", "done", "delayed").tallies

    assert (tally.changed, tally.settled) == ([], ["queued", "done", "delayed"])
    assert group.states("queued", "done", "delayed") == [j.QUEUED, j.DONE, j.DELAYED]
