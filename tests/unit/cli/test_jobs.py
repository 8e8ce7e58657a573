"""Finding and changing jobs among more than the broker looks at in one go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ekiden import testing
from ekiden.broker import desk
from ekiden.cli import jobs
from ekiden.errors import WrongUsage


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Iterator[testing.Grid]:
    """A grid whose broker looks at very few rows at a time."""
    monkeypatch.setattr(desk, "ROWS_SEEN_MAX", 10)
    monkeypatch.setattr(desk, "SCAN_ROWS_MAX", 7)
    monkeypatch.setattr(desk, "LIST_MAX", 5)
    monkeypatch.setattr(desk, "CHANGE_MAX", 6)
    monkeypatch.setattr(desk, "BRIEF_MAX", 6)
    monkeypatch.setattr(jobs, "PAGE", 5)
    monkeypatch.setattr(jobs, "IDS_PER_CHANGE", 6)
    with testing.grid() as grid:
        yield grid


def wait(grid: testing.Grid, count: int, **options: str) -> None:
    for future in grid.client.submit_many("nobody", [b""] * count, **options):  # type: ignore[arg-type]
        future.wait_accepted(10)


def ids(grid: testing.Grid, limit: int = 0, **wishes: str) -> list[str]:
    return [job["id"] for job in jobs.found_jobs(grid.client, wishes, limit=limit)]


def test_every_job_is_listed_once(grid: testing.Grid) -> None:
    wait(grid, 100)

    found = ids(grid)

    assert len(found) == len(set(found)) == 100
    assert len(ids(grid, limit=3)) == 3
    assert len(ids(grid, limit=37)) == 37


def test_a_few_are_found_among_many(grid: testing.Grid) -> None:
    wait(grid, 60)
    wait(grid, 4, run="rare")
    wait(grid, 30)

    assert len(ids(grid, limit=5, run="rare")) == 4
    assert len(ids(grid, run="rare")) == 4
    assert ids(grid, run="none") == []


def test_a_small_list_comes_with_what_is_most_interesting_first(grid: testing.Grid) -> None:
    grid.client.submit("nobody", job_id="ended").cancel(10)
    wait(grid, 2)

    assert ids(grid, limit=5)[-1] == "ended"


def test_a_filter_changes_all_that_fit_and_nothing_else(grid: testing.Grid) -> None:
    wait(grid, 40, run="mine")
    wait(grid, 20, run="theirs")

    answer = jobs.change(grid.client, "cancel", None, {"run": "mine", "live": True})

    assert answer == {"cancelled": 40, "cancelling": 0, "settled": 0, "unknown": []}
    assert grid.client.stats()["jobs"]["queued"] == 20


def test_a_purge_leaves_none_out_although_the_book_shrinks_under_it(grid: testing.Grid) -> None:
    def fail(job: object) -> None:
        raise RuntimeError("no")

    grid.worker.handler("job.assign.fail")(fail)
    futures = grid.client.submit_many("fail", [b""] * 50, max_attempts=1)
    assert all(future.exception(20) for future in futures)

    answer = jobs.change(grid.client, "purge", None, {"state": "failed"})

    assert answer == {"purged": 50, "skipped": 0, "unknown": []}
    assert ids(grid, state="failed") == []


def test_many_ids_are_changed_in_several_steps_and_unknown_ones_named(grid: testing.Grid) -> None:
    names = [f"j{number}" for number in range(20)]
    for future in grid.client.submit_many("nobody", [b""] * 20, job_ids=names):
        future.wait_accepted(10)

    answer = jobs.change(grid.client, "cancel", [*names, "nobody", "j0"], {})

    assert (answer["cancelled"], answer["unknown"]) == (20, ["nobody"])


def test_a_change_must_say_which_jobs() -> None:
    jobs.check_chosen(["j1"], {}, False, "cancel")
    jobs.check_chosen(None, {"run": "r"}, False, "cancel")
    jobs.check_chosen([], {}, True, "cancel")
    with pytest.raises(WrongUsage, match="cancel what"):
        jobs.check_chosen(None, {}, False, "cancel")
    with pytest.raises(WrongUsage):
        jobs.check_chosen(["j1"], {"run": "r"}, False, "cancel")
    with pytest.raises(WrongUsage):
        jobs.check_chosen(["j1"], {}, True, "cancel")


def test_the_longest_ids_fit_the_frames() -> None:
    with testing.grid() as grid:
        names = [f"{number:0>128}" for number in range(jobs.IDS_PER_CHANGE + 1)]
        futures = grid.client.submit_many("nobody", [b""] * len(names), job_ids=names)
        futures[-1].wait_accepted(30)

        answer = jobs.change(grid.client, "cancel", None, {"live": True})
        again = jobs.change(grid.client, "cancel", names, {})

    assert (answer["cancelled"], again["settled"]) == (len(names), len(names))
