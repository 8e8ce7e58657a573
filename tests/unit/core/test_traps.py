"""Traps an earlier trial fell into, each with a test that names it."""

from __future__ import annotations

from tests.unit.core.group import Group, ids_of, settled, spec

from ekiden.core import commands as c
from ekiden.core import image
from ekiden.model import jobs as j


def test_fence_hole_an_open_grant_does_not_own_an_attempt_it_lost() -> None:
    # j1 fails inside grant 1, which stays open because of j2, and is leased again. "The grant lives
    # and the job is leased" is true of grant 1, and still the new attempt is not its to settle.
    group = Group()
    group.submit("j1", "j2")
    old = group.assign("w1")
    group.fail(old, 0)
    group.later(5)
    new = group.again("w1", "j1")
    assert old.number in group.book.grants

    for changes in (group.finish(old, 0), group.fail(old, 0), group.release(old, 0)):
        assert (settled(changes), changes.stale) == ([], 1)

    assert group.job("j1").place is new
    assert group.job("j1").attempt == 2
    assert settled(group.finish(new, 0)) == [(j.DONE, ["j1"])]


def test_fence_hole_a_forfeit_ends_only_what_the_worker_still_holds() -> None:
    group = Group()
    group.submit("j1", "j2")
    old = group.assign("w1")
    group.release(old, 0)
    group.assign("w2")

    group.forfeit("w1", (old, 0), (old, 1))

    assert group.states("j1", "j2") == [j.LEASED, j.DELAYED]
    assert group.book.workers["w2"].held == 1


def test_snapshot_drift_an_id_evicted_and_submitted_again_keeps_its_dedup() -> None:
    group = Group(results_max=1, ids_max=1)
    for name in ("j1", "j2", "j3"):
        group.submit(name)
        group.finish(group.assign(), 0)
        group.now += 1
    group.later(0)
    assert group.state("j1") == "unknown"
    group.submit("j1")

    for each in (group, group.reload()):
        (outcome,) = each.submit("j1").submits
        assert [row.id for _, row in outcome.repeated] == ["j1"]
        assert each.states("j1") == [j.QUEUED]


def test_snapshot_drift_an_id_that_outlived_its_result_is_still_known_after_a_load() -> None:
    group = Group(results_max=1)
    for name in ("j1", "j2", "j3"):
        group.submit(name)
        group.finish(group.assign(), 0)
        group.now += 1
    group.later(0)
    assert group.job("j1").place.faded

    loaded = group.reload()

    (outcome,) = loaded.submit("j1").submits
    assert [row.id for _, row in outcome.repeated] == ["j1"]
    assert loaded.state("j1") == j.DONE


def test_snapshot_drift_eviction_of_an_old_job_does_not_forget_its_namesake() -> None:
    group = Group(max_attempts=1, results_max=1, ids_max=1)
    group.submit("j1")
    group.fail(group.assign(), 0)
    group.purge("j1")
    group.submit("j1")
    loaded = group.reload()

    for each in (group, loaded):
        each.now += 1
        for n in range(3):
            each.submit(f"x{n}", of=spec("b"))
            each.finish(each.assign(of=spec("b")), 0)
            each.now += 1
        each.later(0)
        assert each.state("j1") == j.QUEUED
    assert image.fingerprint(group.book) == image.fingerprint(loaded.book)


def test_number_reuse_grant_numbers_grow_on_after_a_restart() -> None:
    group = Group()
    group.submit("j1", "j2")
    first = group.assign(count=1)
    group.finish(first, 0)

    second = group.reload().assign()

    assert second.number == first.number + 1


def test_a_capped_client_does_not_look_ready_before_or_after_a_restart() -> None:
    group = Group(client_inflight_max=1)
    group.submit("j1", "j2", "j3")
    group.assign()

    for each in (group, group.reload()):
        assert [queue.ready for queue in each.book.queues.values()] == [0]


def test_an_attempt_number_grows_even_if_the_start_was_lost_on_the_way() -> None:
    group = Group()
    group.submit("j1")

    attempts = []
    for worker in ("w1", "w2", "w3"):
        attempts.append(group.again(worker, "j1").rows[0].attempt)
        group.forfeit(worker)

    assert attempts == [1, 2, 3]


def test_the_dead_a_cancelled_and_replayed_job_is_not_leased_twice() -> None:
    # A cancelled job lies dead in its lane until it surfaces. Replayed, it was alive in two places
    # of the same lane and went out twice, in one grant.
    group = Group()
    group.submit("j1", "j2")
    group.cancel("j1")
    group.replay("j1")
    group.cancel("j1")
    group.replay("j1")

    grant = group.assign()

    assert ids_of(grant) == ["j2", "j1"]
    assert group.book.clients["ann"].inflight == 2


def test_a_note_for_an_attempt_that_never_was_does_not_end_the_broker() -> None:
    group = Group()
    group.submit("j1")
    group.assign()

    group.apply(c.Finish("w1", 1, None, [b"r"], {-99: j.Note(1)}))

    assert group.state("j1") == j.DONE
