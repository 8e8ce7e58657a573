"""Caches in the book, and the blobs that jobs hold."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.group import Group, spec

from ekiden.core import commands as c
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import Spec

DAY = CacheUse("day", "aa" * 32, 300)
BIG = ("b" * 64, 100_000)
OTHER = ("c" * 64, 100_000)
CODE = ("d" * 64, 70_000)


def put(use: CacheUse = DAY, target: str = "a.>") -> c.PutCache:
    return c.PutCache(use, "ann", target, 3, 1000)


def reading(*uses: CacheUse) -> Spec:
    return spec(caches=uses)


def held(group: Group) -> set[str]:
    return set(group.book.blobs.counts())


# ------------------------------------------------------------------ caches


def test_a_cache_that_is_put_again_is_the_same_and_can_be_meant_for_more_workers() -> None:
    group = Group()

    states = [group.apply(put()).puts, group.apply(put()).puts, group.apply(put(target="b.>")).puts]

    assert states == [["new"], ["same"], ["widened"]]
    (cache,) = group.reload().book.caches.known.values()
    assert (cache.use, cache.client, cache.targets) == (DAY, "ann", ["a.>", "b.>"])
    assert (cache.files, cache.size, cache.wall) == (3, 1000, group.wall)


def test_other_content_under_the_same_id_changes_nothing() -> None:
    group = Group()
    group.apply(put())

    changes = group.apply(put(CacheUse("day", "bb" * 32, 300), target="b.>"))

    assert changes.puts == ["conflict"]
    assert group.book.caches.known["day"].use == DAY
    assert group.book.caches.known["day"].targets == ["a.>"]


def test_of_two_that_put_one_id_in_one_entry_the_first_wins() -> None:
    group = Group()

    changes = group.apply(put(), put(CacheUse("day", "bb" * 32, 300)))

    assert changes.puts == ["new", "conflict"]
    assert group.book.caches.known["day"].use == DAY


def test_a_cache_is_not_removed_while_a_job_that_uses_it_has_not_ended() -> None:
    group = Group()
    group.apply(put())
    group.submit("j1", of=reading(DAY))
    grant = group.assign(of=reading(DAY))

    waiting = group.apply(c.RemoveCache(["day", "none"])).tallies[0]
    group.finish(grant, 0)
    changes = group.apply(c.RemoveCache(["day", "day"]))

    assert (waiting.changed, waiting.settled, waiting.unknown) == ([], ["day"], ["none"])
    assert changes.tallies[0].changed == ["day"]
    assert [cache.use for cache in changes.removed] == [DAY]
    assert group.book.caches.known == {}


def test_a_job_that_is_replayed_uses_its_cache_again() -> None:
    group = Group(max_attempts=1)
    group.apply(put())
    group.submit("j1", of=reading(DAY))
    group.fail(group.assign(of=reading(DAY)), 0)

    group.replay("j1")

    assert group.reload().book.caches.jobs == {"day": 1}
    group.cancel("j1")
    assert group.book.caches.jobs == {}


def test_what_was_removed_may_be_put_with_other_content() -> None:
    group = Group()
    group.apply(put())

    changes = group.apply(c.RemoveCache(["day"]), put(CacheUse("day", "bb" * 32, 300)))

    assert changes.puts == ["new"]


# ------------------------------------------------------------------ blobs


def done_with(group: Group, blobs: dict[int, list[Any]]) -> None:
    grant = group.assign()
    group.apply(c.Finish("w1", grant.number, None, [b"out"] * len(grant.rows), {}, blobs))


def test_a_job_holds_the_blobs_of_its_input_until_it_is_done_and_then_those_of_its_output() -> None:
    group = Group()
    group.submit("j1", blobs={0: [BIG]}, of=spec(blobs=(CODE,)))
    before = held(group)

    grant = group.assign(of=spec(blobs=(CODE,)))
    group.apply(c.Finish("w1", grant.number, [0], [b"out"], {}, {0: [OTHER]}))

    assert before == {BIG[0], CODE[0]}
    assert held(group) == held(group.reload()) == {OTHER[0]}


def test_a_blob_is_held_as_long_as_any_job_needs_it() -> None:
    group = Group()
    group.submit("j1", "j2", blobs={0: [BIG], 1: [BIG]})
    grant = group.assign()

    group.finish(grant, 0)
    one_left = held(group)
    group.finish(grant, 1)

    assert one_left == {BIG[0]}
    assert held(group) == set()


def test_a_failed_job_keeps_its_input_until_it_is_purged() -> None:
    group = Group(max_attempts=1)
    group.submit("j1", blobs={0: [BIG]})
    group.fail(group.assign(), 0)
    failed = held(group.reload())

    group.purge("j1")

    assert failed == {BIG[0]}
    assert held(group) == set()


@pytest.mark.parametrize("ends", ["done", "failed"])
def test_what_is_past_its_retention_holds_nothing(ends: str) -> None:
    group = Group(max_attempts=1, retention_ns=10)
    group.submit("j1", blobs={0: [BIG]}, of=spec(blobs=(CODE,)))
    grant = group.assign(of=spec(blobs=(CODE,)))
    if ends == "done":
        group.apply(c.Finish("w1", grant.number, [0], [b"out"], {}, {0: [OTHER]}))
    else:
        group.fail(grant, 0)
    assert held(group)

    group.later(60)

    assert held(group) == held(group.reload()) == set()


def test_a_repeated_submit_holds_nothing_more() -> None:
    group = Group()
    group.submit("j1", blobs={0: [BIG]})

    group.submit("j1", blobs={0: [BIG]})
    done_with(group, {})

    assert held(group) == set()


def test_a_late_result_leaves_no_blob_behind() -> None:
    group = Group()
    group.submit("j1", blobs={0: [BIG]})
    grant = group.assign()
    group.forfeit("w1", (grant, 0))

    changes = group.apply(c.Finish("w1", grant.number, [0], [b"late"], {}, {0: [OTHER]}))

    assert changes.stale == 1
    assert held(group) == {BIG[0]}
