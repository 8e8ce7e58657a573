"""Who is next, who holds what, and who may settle it."""

from __future__ import annotations

import pytest
from tests.unit.core.group import Group, ids_of, settled, spec

from ekiden.core import commands as c
from ekiden.core.queues import Lane
from ekiden.model import jobs as j

# ------------------------------------------------------------------ order


def test_jobs_of_a_client_are_leased_in_the_order_they_were_accepted() -> None:
    group = Group()
    group.submit("c", "a")
    group.submit("b")

    assert ids_of(group.assign(count=2)) == ["c", "a"]
    assert ids_of(group.assign(count=2)) == ["b"]


def test_higher_priority_goes_first_and_order_holds_within_it() -> None:
    group = Group()
    for name, priority in (("low1", -9), ("mid1", 0), ("top1", 9), ("mid2", 0), ("top2", 9)):
        group.submit(name, of=spec(priority=priority))

    assert ids_of(group.assign()) == ["top1", "top2", "mid1", "mid2", "low1"]


def test_the_ring_goes_round_clients_however_much_each_has_waiting() -> None:
    group = Group()
    group.submit(*(f"a{n}" for n in range(1000)), client="ann")
    group.submit("b0", "b1", client="bob")
    group.submit("c0", client="cid")

    taken = [name for _ in range(6) for name in ids_of(group.assign(count=1))]

    assert taken == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_a_large_grant_is_shared_among_the_clients_that_wait() -> None:
    group = Group()
    group.submit(*(f"a{n}" for n in range(500)), client="ann")
    group.submit(*(f"b{n}" for n in range(500)), client="bob")
    group.submit("c0", client="cid")

    taken = ids_of(group.assign(count=90))

    shares = {letter: sum(name[0] == letter for name in taken) for letter in "abc"}
    assert shares["c"] == 1
    assert abs(shares["a"] - shares["b"]) <= 1
    assert len(taken) == 90


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 64, 250])
def test_no_size_of_grant_favours_the_client_that_stands_first(count: int) -> None:
    group = Group()
    for client in ("ann", "bob"):
        group.submit(*(f"{client}{n}" for n in range(1600)), client=client)

    taken = [name for _ in range(6) for name in ids_of(group.assign(count=count))]

    assert abs(sum(name[0] == "a" for name in taken) - len(taken) / 2) <= 1


def test_routes_do_not_hold_one_another_up() -> None:
    group = Group()
    group.submit("x", of=spec("a.x"))
    group.submit("y", of=spec("a.y"))

    assert ids_of(group.assign(of=spec("a.y"))) == ["y"]


# ------------------------------------------------------------------ leases


def test_a_lease_names_worker_attempt_and_a_number_never_used_before() -> None:
    group = Group()
    group.submit("j1", "j2")

    first, second = group.assign("w1", count=1), group.assign("w2", count=1)

    assert (first.number, second.number) == (1, 2)
    assert [row.attempt for row in first.rows] == [1]
    assert group.book.workers["w1"].held == 1
    assert group.book.leased == 2
    assert group.book.totals.leased == 2


@pytest.mark.parametrize("route", [j.Route("a.x"), j.Route("nobody.ever.sent")])
def test_an_assign_that_finds_nothing_ready_changes_nothing(route: j.Route) -> None:
    group = Group()
    group.submit("j1")
    group.assign()

    changes = group.apply(c.Assign("w2", route, 5))

    assert changes.grants == []
    assert group.book.next_grant == 2
    assert "w2" not in group.book.workers


def test_a_finished_job_is_done_with_its_output_and_the_lease_is_gone() -> None:
    group = Group()
    group.submit("j1", "j2")
    grant = group.assign()

    changes = group.apply(c.Finish("w1", 1, None, [b"r1", b"r2"], {1: j.Note(ran_ns=5)}))

    assert settled(changes) == [(j.DONE, ["j1", "j2"])]
    assert changes.stale == 0
    assert [group.job(name).body for name in ("j1", "j2")] == [b"r1", b"r2"]
    assert [group.job(name).note for name in ("j1", "j2")] == [None, j.Note(ran_ns=5)]
    assert group.ended("j1") == (j.DONE, "", "w1")
    assert group.book.grants == {}
    assert group.book.workers == {}
    assert grant.rows == []
    ann = group.book.clients["ann"]
    assert (ann.live, ann.bytes, ann.inflight) == (0, 0, 0)


def test_a_grant_lives_until_its_last_attempt_has_another_place() -> None:
    group = Group()
    group.submit("j1", "j2", "j3")
    grant = group.assign()

    group.finish(grant, 1)
    assert (grant.left, [offset for offset, _ in grant.owned()]) == (2, [0, 2])
    group.fail(grant, 0)
    group.release(grant, 2)

    assert group.book.grants == {}


def test_only_done_never_changes_again() -> None:
    group = Group()
    group.submit("j1")
    grant = group.assign()
    group.finish(grant, 0, output=b"first")

    group.finish(grant, 0, output=b"second")
    group.fail(grant, 0)
    group.forfeit("w1")
    group.cancel("j1")
    group.replay("j1")
    group.purge("j1")

    assert group.job("j1").body == b"first"
    assert group.state("j1") == j.DONE
    assert group.book.totals.done == 1


# ------------------------------------------------------------------ fencing


def test_an_outcome_is_taken_once_however_often_it_is_told() -> None:
    group = Group()
    group.submit("j1", "j2")
    grant = group.assign()
    group.finish(grant, 0)

    changes = group.finish(grant, 0, 1)

    assert settled(changes) == [(j.DONE, ["j2"])]
    assert changes.stale == 1
    assert group.book.totals.stale == 1


def test_a_worker_cannot_settle_what_another_holds() -> None:
    group = Group()
    group.submit("j1")
    grant = group.assign("w1")

    for changes in (
        group.finish(grant, 0, by="w2"),
        group.fail(grant, 0, by="w2"),
        group.apply(c.Release("w2", grant.number, [0])),
    ):
        assert (settled(changes), changes.stale) == ([], 1)

    assert group.state("j1") == j.LEASED


@pytest.mark.parametrize("offset", [-1, 2, 1000])
def test_offsets_outside_the_grant_settle_nothing(offset: int) -> None:
    group = Group()
    group.submit("j1", "j2")
    grant = group.assign()

    assert group.finish(grant, offset).stale == 1
    assert group.fail(grant, offset).stale == 1
    assert group.release(grant, offset).stale == 1
    assert group.states("j1", "j2") == [j.LEASED, j.LEASED]


def test_one_bad_offset_spoils_the_whole_finish_because_the_rest_may_be_shifted_too() -> None:
    group = Group()
    group.submit("j1", "j2")
    grant = group.assign()

    changes = group.finish(grant, 0, 7)

    assert changes.stale == 2
    assert group.states("j1", "j2") == [j.LEASED, j.LEASED]


@pytest.mark.parametrize("offset", [-1, -99, 1, 50])
def test_notes_for_offsets_the_grant_never_had_are_ignored(offset: int) -> None:
    group = Group()
    group.submit("j1")
    group.assign()

    group.apply(c.Finish("w1", 1, [0], [b"r"], {offset: j.Note(ran_ns=5)}))

    assert group.state("j1") == j.DONE
    assert group.job("j1").note is None


def test_more_outputs_than_attempts_are_counted_as_stale() -> None:
    group = Group()
    group.submit("j1")
    group.assign()

    changes = group.apply(c.Finish("w1", 1, None, [b"r", b"x", b"y"]))

    assert group.job("j1").body == b"r"
    assert changes.stale == 2


def test_fewer_outputs_than_attempts_settle_only_the_first() -> None:
    group = Group()
    group.submit("j1", "j2", "j3")
    group.assign()
    group.cancel("j3")

    group.apply(c.Finish("w1", 1, None, [b"r"]))

    assert group.states("j1", "j2", "j3") == [j.DONE, j.LEASED, j.CANCELLING]


# ------------------------------------------------------------------ given back


def test_a_released_attempt_burns_nothing_and_returns_to_the_front_in_order() -> None:
    group = Group()
    group.submit("j1", "j2", "j3", "j4")
    grant = group.assign(count=3)

    changes = group.release(grant, 2, 0, 1, 1)

    assert [row.id for row in changes.requeued] == ["j3", "j2", "j1"]
    assert changes.stale == 0
    assert group.causes("j1") == []
    again = group.assign()
    assert ids_of(again) == ["j1", "j2", "j3", "j4"]
    assert [row.attempt for row in again.rows] == [2, 2, 2, 1]


def test_attempts_not_known_to_have_begun_burn_nothing_when_the_worker_is_lost() -> None:
    group = Group(max_attempts=1)
    group.submit("ran", "waited")
    grant = group.assign()

    changes = group.forfeit("w1", (grant, 0))

    assert settled(changes) == [(j.FAILED, ["ran"])]
    assert group.state("waited") == j.QUEUED
    assert group.causes("waited") == [(1, "w1", j.WORKER_LOST, False)]
    assert group.causes("ran") == [(1, "w1", j.WORKER_LOST, True)]
    assert group.book.workers == {}


def test_forfeited_grants_return_to_the_front_in_their_old_order() -> None:
    group = Group()
    group.submit("j1", "j2", "j3", "j4", "j5")
    group.assign(count=2)
    group.assign(count=2)

    group.forfeit("w1")

    assert ids_of(group.assign("w2")) == ["j1", "j2", "j3", "j4", "j5"]


def test_losing_a_worker_without_leases_changes_nothing() -> None:
    group = Group()

    changes = group.forfeit("w9")

    assert changes.settlements == []
    assert changes.requeued == []


def test_a_cancel_nobody_asked_for_gives_the_attempt_back() -> None:
    group = Group()
    group.submit("j1")
    grant = group.assign()

    group.fail(grant, 0, cause=j.CANCEL_CONFIRMED)

    assert group.state("j1") == j.QUEUED
    assert group.causes("j1") == []


# ------------------------------------------------------------------ caps


def test_a_client_at_its_cap_waits_and_does_not_look_ready() -> None:
    group = Group(client_inflight_max=2)
    group.submit("a1", "a2", "a3", client="ann")
    group.submit("b1", client="bob")
    (queue,) = group.book.queues.values()

    grant = group.assign(count=10)

    assert sorted(ids_of(grant)) == ["a1", "a2", "b1"]
    assert queue.ready == 0
    assert group.apply(c.Assign("w1", spec().route, 5)).grants == []


def test_a_capped_client_is_served_again_as_soon_as_it_has_room() -> None:
    group = Group(client_inflight_max=1)
    group.submit("a1", "a2", client="ann")
    grant = group.assign()
    (queue,) = group.book.queues.values()

    changes = group.finish(grant, 0)

    assert list(changes.woken) == [queue]
    assert queue.ready == 1
    assert ids_of(group.assign()) == ["a2"]


@pytest.mark.parametrize("way", ["fail", "release", "forfeit", "cancel"])
def test_every_way_out_of_a_lease_gives_room_back(way: str) -> None:
    group = Group(client_inflight_max=1)
    group.submit("a1", "a2")
    grant = group.assign()

    if way == "fail":
        group.fail(grant, 0, cause=j.EXIT_CODE)
    elif way == "release":
        group.release(grant, 0)
    elif way == "forfeit":
        group.forfeit("w1", (grant, 0))
    else:
        group.cancel("a1")
        group.finish(grant, 0)

    assert group.book.clients["ann"].inflight == 0
    assert len(group.assign().rows) == 1


def test_the_cap_counts_all_routes_and_priorities_of_a_client_together() -> None:
    group = Group(client_inflight_max=2)
    group.submit("x1", of=spec("a.x"))
    group.submit("x2", of=spec("a.x", priority=5))
    group.submit("y1", of=spec("a.y"))

    assert ids_of(group.assign(of=spec("a.x"))) == ["x2", "x1"]
    assert group.apply(c.Assign("w1", spec("a.y").route, 5)).grants == []


def test_a_cap_that_changes_holds_at_once() -> None:
    group = Group()
    group.submit("a1", "a2", "a3", "a4")
    group.assign(count=2)

    group.apply(c.Configure(c.Settings(client_inflight_max=2)))
    assert group.apply(c.Assign("w1", spec().route, 5)).grants == []
    group.apply(c.Configure(c.Settings(client_inflight_max=3)))
    assert ids_of(group.assign()) == ["a3"]
    group.apply(c.Configure(c.Settings()))
    assert ids_of(group.assign()) == ["a4"]


def test_a_parked_client_still_takes_new_jobs_and_loses_cancelled_ones() -> None:
    group = Group(client_inflight_max=1)
    group.submit("a1", "a2")
    grant = group.assign()

    group.submit("a3")
    group.submit("a4", of=spec(priority=9))
    group.cancel("a2")

    (queue,) = group.book.queues.values()
    assert queue.ready == 0
    group.finish(grant, 0)
    assert queue.ready == 2
    assert ids_of(group.assign()) == ["a4"]


# ------------------------------------------------------------------ the dead in a lane


def test_many_cancelled_jobs_do_not_keep_memory_while_they_wait_for_their_turn() -> None:
    group = Group()
    names = [f"j{n}" for n in range(400)]
    group.submit(*names)

    group.cancel(*names[10:-1])

    lane = group.job("j0").place
    assert isinstance(lane, Lane)
    assert len(lane.rows) < 100
    assert ids_of(group.assign()) == [*names[:10], names[-1]]


def test_dead_rows_are_passed_over_whatever_is_taken() -> None:
    group = Group()
    group.submit("j1", "j2", "j3", "j4", "j5")
    group.cancel("j1", "j3")

    assert ids_of(group.assign(count=1)) == ["j2"]
    assert ids_of(group.assign(count=5)) == ["j4", "j5"]


def test_a_cancelled_job_that_is_replayed_lies_in_its_queue_once_and_last() -> None:
    group = Group()
    group.submit("j1", "j2", "j3")
    group.cancel("j1")

    group.replay("j1")

    assert ids_of(group.assign()) == ["j2", "j3", "j1"]
    assert group.apply(c.Assign("w1", spec().route, 5)).grants == []
