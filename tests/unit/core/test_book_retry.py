"""Failed attempts: tried again, with patience, elsewhere, and not for ever."""

from __future__ import annotations

import pytest
from tests.unit.core.group import Group, ids_of, settled, spec

from ekiden import limits
from ekiden.core import book as book_module
from ekiden.core import commands as c
from ekiden.core.rows import Delay
from ekiden.limits import NS
from ekiden.model import jobs as j


@pytest.mark.parametrize("cause", j.RETRY_ON_DEFAULT)
def test_what_may_pass_is_tried_again_after_a_pause(cause: str) -> None:
    group = Group()
    group.submit("j1")
    grant = group.assign()

    changes = group.fail(grant, 0, cause=cause)

    assert settled(changes) == []
    assert [row.id for row in changes.requeued] == ["j1"]
    assert group.state("j1") == j.DELAYED
    assert group.book.totals.retried == 1
    group.later(2)
    assert group.state("j1") == j.QUEUED


@pytest.mark.parametrize("cause", [j.EXIT_CODE, j.TIMEOUT, j.RESULT_TOO_LARGE])
def test_what_would_happen_again_is_not_tried_again(cause: str) -> None:
    group = Group()
    group.submit("j1")

    changes = group.fail(group.assign(), 0, cause=cause)

    assert settled(changes) == [(j.FAILED, ["j1"])]
    assert group.ended("j1") == (j.FAILED, cause, "w1")


def test_retry_on_says_which_causes_are_tried_again() -> None:
    group = Group()
    group.submit("j1", "j2", of=spec(retry_on=(j.EXIT_CODE,)))
    grant = group.assign()

    group.fail(grant, 0, cause=j.EXIT_CODE)
    group.fail(grant, 1, cause=j.HANDLER_ERROR)

    assert group.states("j1", "j2") == [j.DELAYED, j.FAILED]


def test_no_causes_at_all_means_no_retry() -> None:
    group = Group()
    group.submit("j1", of=spec(retry_on=()))

    group.fail(group.assign(), 0, cause=j.WORKER_LOST)

    assert group.state("j1") == j.FAILED


def test_a_job_that_used_up_its_attempts_is_failed_with_the_cause_of_each() -> None:
    group = Group()
    group.submit("j1")

    group.fail(group.assign("w1"), 0, cause=j.OOM)
    group.later(120)
    group.fail(group.again("w2", "j1"), 0, cause=j.SIGNAL)
    group.later(120)
    changes = group.fail(group.again("w3", "j1"), 0, cause=j.HANDLER_ERROR)

    assert settled(changes) == [(j.FAILED, ["j1"])]
    assert group.ended("j1") == (j.FAILED, j.HANDLER_ERROR, "w3")
    assert group.causes("j1") == [
        (1, "w1", j.OOM, True), (2, "w2", j.SIGNAL, True), (3, "w3", j.HANDLER_ERROR, True)
    ]  # fmt: skip
    assert group.job("j1").body == b"j1"
    assert group.book.totals.failed == 1


@pytest.mark.parametrize("most", [1, 2, 5])
def test_max_attempts_of_the_job_counts_before_that_of_the_group(most: int) -> None:
    group = Group()
    group.submit("j1", of=spec(max_attempts=most))

    for _ in range(most):
        assert group.state("j1") == j.QUEUED
        group.fail(group.again("w1", "j1"), 0)
        group.later(120)

    assert group.state("j1") == j.FAILED
    assert len(group.causes("j1")) == most


def test_attempts_that_never_began_do_not_count_against_the_limit() -> None:
    group = Group(max_attempts=2)
    group.submit("j1")

    for n in range(10):
        grant = group.again(f"w{n}", "j1")
        group.release(grant, 0) if n % 2 else group.forfeit(f"w{n}")
    group.fail(group.again("w1", "j1"), 0)
    group.later(120)

    assert group.state("j1") == j.QUEUED
    group.fail(group.again("w2", "j1"), 0)
    assert group.state("j1") == j.FAILED
    assert group.job("j1").attempt == 12


# ------------------------------------------------------------------ backoff


def pause(group: Group, job_id: str) -> int:
    place = group.job(job_id).place
    assert isinstance(place, Delay)
    return place.until - group.now


def test_the_pause_doubles_up_to_its_bound_give_or_take_a_fifth() -> None:
    group = Group()
    group.submit("j1", of=spec(max_attempts=12))
    seen = []

    for _ in range(11):
        group.fail(group.again("w1", "j1"), 0)
        seen.append(pause(group, "j1"))
        group.later(120)

    for n, waited in enumerate(seen):
        base = min(limits.BACKOFF_FIRST_NS * 2**n, limits.BACKOFF_MAX_NS)
        assert 0.8 * base <= waited <= 1.2 * base
    assert group.state("j1") == j.QUEUED


def test_a_thousandth_pause_is_still_within_bounds() -> None:
    group = Group(max_attempts=100, backoff_max_ns=10 * NS)
    group.submit("j1")

    for _ in range(99):
        group.fail(group.again("w1", "j1"), 0)
        assert pause(group, "j1") <= 12 * NS
        group.later(12)


def test_the_pause_comes_from_the_entry_so_every_member_waits_alike_and_a_herd_spreads() -> None:
    first, second = Group(), Group()
    names = [f"j{n}" for n in range(50)]
    for group in (first, second):
        group.submit(*names)
        group.fail(group.assign(), *range(50))

    assert [pause(first, name) for name in names] == [pause(second, name) for name in names]
    assert len({pause(first, name) for name in names}) > 25


# ------------------------------------------------------------------ elsewhere


def test_a_retry_waits_apart_and_names_the_worker_to_avoid() -> None:
    group = Group()
    group.submit("j1", "j2")
    grant = group.assign("w1")
    group.fail(grant, 0)
    group.release(grant, 1)
    group.later(2)

    assert ids_of(group.assign("w1")) == ["j2"]
    assert ids_of(group.retry("w2", avoid="w1")) == ["j1"]


def test_a_pinned_job_is_retried_where_it_must_run() -> None:
    of = spec(pin="w1")
    group = Group()
    group.submit("j1", of=of)
    group.fail(group.assign(of=of), 0)
    group.later(2)

    assert ids_of(group.assign("w1", of=of)) == ["j1"]


# ------------------------------------------------------------------ poison


def test_a_job_that_loses_three_workers_is_poison_whatever_its_attempts() -> None:
    group = Group()
    group.submit("j1", of=spec(max_attempts=50))

    group.lose("j1", worker="w1")
    group.lose("j1", worker="w2")
    assert group.state("j1") == j.QUEUED
    group.lose("j1", worker="w3")

    assert group.ended("j1") == (j.FAILED, j.POISON, "w3")
    assert [cause for _, _, cause, _ in group.causes("j1")] == [j.WORKER_LOST] * 3


def test_losses_before_the_start_make_no_poison() -> None:
    group = Group()
    group.submit("j1")

    for n in range(7):
        group.again(f"w{n}", "j1")
        group.forfeit(f"w{n}")

    assert group.state("j1") == j.QUEUED


def test_other_failures_between_the_losses_do_not_hide_the_poison() -> None:
    group = Group()
    group.submit("j1", of=spec(max_attempts=50))

    for n in range(2):
        group.lose("j1", worker=f"w{n}")
        group.fail(group.again("w9", "j1"), 0)
        group.later(120)
    group.lose("j1", worker="w3")

    assert group.ended("j1")[:2] == (j.FAILED, j.POISON)


# ------------------------------------------------------------------ replay


def test_replay_keeps_the_id_raises_the_generation_and_attempts_grow_on() -> None:
    group = Group(max_attempts=1)
    group.submit("j1")
    group.fail(group.assign(), 0)

    (tally,) = group.replay("j1").tallies

    assert tally.changed == ["j1"]
    assert group.state("j1") == j.QUEUED
    assert group.book.generations["j1"][0] == 1
    grant = group.again("w2", "j1")
    assert [row.attempt for row in grant.rows] == [2]
    group.finish(grant, 0)
    assert group.state("j1") == j.DONE
    assert len(group.causes("j1")) == 1


def test_a_replayed_job_has_all_its_attempts_and_losses_before_it_again() -> None:
    group = Group()
    group.submit("j1")
    for worker in ("w1", "w2", "w3"):
        group.lose("j1", worker=worker)
    assert group.state("j1") == j.FAILED

    group.replay("j1")
    group.lose("j1", worker="w1")
    group.lose("j1", worker="w2")

    assert group.state("j1") == j.QUEUED
    group.lose("j1", worker="w3")
    assert group.ended("j1")[:2] == (j.FAILED, j.POISON)
    assert len(group.causes("j1")) == 6
    group.replay("j1")
    assert group.book.generations["j1"][0] == 2


def test_cancelled_and_expired_jobs_may_be_replayed_and_expire_no_more() -> None:
    group = Group()
    group.submit("j1")
    group.submit("j2", expires_at=group.wall + 5)
    group.submit("j3", expires_at=group.wall + 50)
    group.cancel("j1", "j3")
    group.clock(group.wall + 5)

    group.replay("j1", "j2", "j3")
    group.clock(group.wall + 100)

    assert group.states("j1", "j2", "j3") == [j.QUEUED] * 3


def test_replay_tells_apart_what_it_did_not_replay() -> None:
    group = Group()
    group.submit("queued", "leased", "done", "failed")
    grant = group.assign()
    group.release(grant, 0)
    group.finish(grant, 2)
    group.fail(grant, 3, cause=j.TIMEOUT)

    (tally,) = group.replay("queued", "leased", "done", "failed", "failed", "nobody").tallies

    assert tally.changed == ["failed"]
    assert tally.settled == ["queued", "leased", "done", "failed"]
    assert tally.unknown == ["nobody"]


def test_a_replayed_job_counts_for_its_client_again() -> None:
    group = Group(client_inflight_max=1)
    group.submit("j1", "j2")
    group.fail(group.assign(), 0, cause=j.TIMEOUT)

    group.replay("j1")

    ann = group.book.clients["ann"]
    assert (ann.live, ann.bytes) == (2, 4)


# ------------------------------------------------------------------ long histories


def test_a_job_with_very_many_attempts_still_ends_and_keeps_the_cause_of_each() -> None:
    most = book_module.HISTORY_MAX + 20
    group = Group()
    group.submit("j1", of=spec(max_attempts=most))

    for n in range(most):
        assert group.state("j1") == j.QUEUED, n
        group.fail(group.again("w1", "j1"), 0)
        group.later(120)

    assert group.state("j1") == j.FAILED
    causes = group.job("j1").history or []
    assert [past.attempt for past in causes] == list(range(1, most + 1))
    # Words are kept for the latest only; a thousand stack traces of one job are too many.
    assert sum(past.message != "" for past in causes) == book_module.HISTORY_MAX


def test_a_job_replayed_many_times_still_ends_after_its_attempts() -> None:
    group = Group()
    group.submit("j1")

    for generation in range(30):
        for _ in range(limits.MAX_ATTEMPTS):
            assert group.state("j1") == j.QUEUED, generation
            group.fail(group.again("w1", "j1"), 0)
            group.later(120)
        assert group.state("j1") == j.FAILED, generation
        group.replay("j1")

    assert len(group.causes("j1")) <= book_module.HISTORY_MAX


def test_attempts_that_never_began_are_the_first_to_be_forgotten() -> None:
    group = Group()
    group.submit("j1")
    group.fail(group.again("w0", "j1"), 0)
    group.later(120)

    for n in range(2 * book_module.HISTORY_MAX):
        group.again(f"w{n}", "j1")
        group.forfeit(f"w{n}")

    causes = group.causes("j1")
    assert len(causes) <= book_module.HISTORY_MAX
    assert causes[0] == (1, "w0", j.HANDLER_ERROR, True)


def test_the_words_of_a_failure_are_cut_to_their_bound() -> None:
    group = Group()
    group.submit("j1")
    grant = group.assign()

    group.apply(c.Fail("w1", grant.number, [0], [j.OOM], ["x" * 9999], {0: j.Note(exit_code=9)}))

    (cause,) = group.job("j1").history or []
    assert len(cause.message) == limits.ERROR_TEXT_MAX
    assert cause.note == j.Note(exit_code=9)
