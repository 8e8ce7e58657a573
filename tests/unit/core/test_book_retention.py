"""What is remembered of settled jobs, and for how long."""

from __future__ import annotations

import pytest
from tests.unit.core.group import Group, settled

from ekiden import limits
from ekiden.core import commands as c
from ekiden.core.rows import Kept
from ekiden.model import jobs as j

DAY = 24 * 3600.0


def run(group: Group, *ids: str, output: bytes = b"out") -> None:
    """Submit and finish, each job in a settlement of its own."""
    for job_id in ids:
        group.submit(job_id)
        group.finish(group.assign(), 0, output=output)
        group.now += 1


def kept(group: Group, *ids: str) -> list[str]:
    """`result`, `id` (the outcome only) or `gone`."""
    rows = [group.book.find(job_id) for job_id in ids]
    return ["gone" if r is None else "id" if r.place.faded else "result" for r in rows]


def test_results_and_ids_are_kept_for_the_time_promised_and_then_forgotten() -> None:
    group = Group()
    run(group, "j1")

    group.later(7 * DAY - 1)
    assert kept(group, "j1") == ["result"]
    group.later(2)

    assert kept(group, "j1") == ["gone"]
    totals = group.book.totals
    assert (totals.faded, totals.evicted) == (0, 0)  # nothing was forgotten early


def test_over_the_bound_the_oldest_results_fade_and_their_ids_are_still_known() -> None:
    group = Group(results_max=2, ids_max=100)

    run(group, "j1", "j2", "j3", "j4", "j5")
    group.later(0)

    assert kept(group, "j1", "j2", "j3", "j4", "j5") == ["id", "id", "id", "result", "result"]
    assert group.state("j1") == j.DONE
    assert group.job("j1").body is None
    assert group.book.totals.faded == 3
    (outcome,) = group.submit("j1").submits
    assert [row.id for _, row in outcome.repeated] == ["j1"]


def test_over_the_bound_of_ids_the_oldest_are_evicted_and_counted() -> None:
    group = Group(results_max=1, ids_max=2)

    run(group, "j1", "j2", "j3", "j4")
    group.later(0)

    assert kept(group, "j1", "j2", "j3", "j4") == ["gone", "gone", "id", "result"]
    assert group.book.totals.evicted == 2
    (outcome,) = group.submit("j1").submits
    assert outcome.fresh == 1


def test_never_fewer_than_promised_are_kept_however_they_settled() -> None:
    group = Group(results_max=3, ids_max=5)
    group.submit(*(f"a{n}" for n in range(4)))
    group.finish(group.assign(), 0, 1, 2, 3)
    group.now += 1

    run(group, "j1", "j2")
    group.later(0)
    assert kept(group, "a0", "j1", "j2") == ["result", "result", "result"]  # 2 would be too few
    run(group, "j3")
    group.later(0)
    assert kept(group, "a0", "a3", "j1", "j2", "j3") == ["id", "id", "result", "result", "result"]


def test_over_the_bound_of_bytes_the_oldest_results_fade() -> None:
    group = Group(result_bytes_max=250)

    run(group, "j1", "j2", "j3", "j4", output=b"x" * 100)
    group.later(0)

    assert kept(group, "j1", "j2", "j3", "j4") == ["id", "result", "result", "result"]
    assert group.book.result_bytes == 300


def test_what_settled_in_this_entry_is_told_before_it_can_be_forgotten() -> None:
    group = Group(results_max=1, ids_max=1)
    group.submit("j1", "j2", "j3")
    group.assign()

    changes = group.apply(*(c.Finish("w1", 1, [n], [b"out"]) for n in range(3)))

    assert settled(changes) == [(j.DONE, [name]) for name in ("j1", "j2", "j3")]
    assert [row.body for s in changes.settlements for row in s.rows] == [b"out"] * 3
    group.now += 1
    group.later(0)
    assert kept(group, "j1", "j2", "j3") == ["gone", "gone", "result"]


def test_causes_and_inputs_of_failed_jobs_are_kept_as_long_as_results() -> None:
    group = Group(results_max=1)
    group.submit("j1")
    group.fail(group.assign(), 0, cause=j.EXIT_CODE)
    group.now += 1
    assert len(group.causes("j1")) == 1
    assert group.book.result_bytes == 2

    run(group, "j2")
    group.later(0)

    assert kept(group, "j1") == ["id"]
    assert group.causes("j1") == []
    (tally,) = group.replay("j1").tallies
    assert tally.settled == ["j1"]  # its input is gone: there is nothing to run
    assert group.purge("j1").tallies[0].changed == ["j1"]
    assert kept(group, "j1") == ["gone"]


def test_large_results_leave_memory_and_say_where_they_lie() -> None:
    group = Group()
    group.submit("small", "large", "other")
    group.assign()
    large = b"L" * (limits.RESULT_BYTES_IN_MEMORY + 1)

    changes = group.apply(
        c.Tick(), c.Finish("w1", 1, [0, 1, 2], [b"s" * limits.RESULT_BYTES_IN_MEMORY, large, b"o"])
    )

    assert changes.large == {"large": large}
    assert group.job("large").body == Kept(group.book.applied, 1, 1, len(large))
    assert group.job("small").body == b"s" * limits.RESULT_BYTES_IN_MEMORY
    assert group.book.result_bytes == limits.RESULT_BYTES_IN_MEMORY + 1


def test_an_entry_forgets_at_least_as_many_as_came_in_but_in_bounded_steps() -> None:
    group = Group(results_max=1, ids_max=1)
    names = [f"j{n}" for n in range(3000)]
    group.submit(*names)
    for _ in range(12):
        group.assign()
    commands = [
        c.Finish("w1", grant.number, None, [b"o"] * len(grant.rows))
        for grant in group.book.grants.values()
    ]
    group.apply(*commands)
    group.now += 1

    group.later(0)
    assert 1500 <= group.book.results_kept <= 2000
    for _ in range(6):
        group.later(0)

    assert group.book.results_kept == group.book.ids_kept == 250


@pytest.mark.parametrize("emptied", [1, 5000])
def test_settlements_that_replay_or_purge_emptied_do_not_slow_forgetting(emptied: int) -> None:
    group = Group(results_max=1, ids_max=1)
    names = [f"e{n}" for n in range(min(emptied, 4000))]
    group.submit(*names)
    for name in names:
        group.book.apply(c.Entry(group.book.applied + 1, group.now, group.wall, [c.Cancel([name])]))
    group.purge(*names)
    group.now += 1
    run(group, "j1", "j2", "j3")
    loaded = group.reload()

    for book in (group, loaded):
        book.later(0)
        assert kept(book, "j1", "j2", "j3") == ["gone", "gone", "result"]
