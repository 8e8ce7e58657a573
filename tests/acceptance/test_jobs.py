"""Looking at jobs, cancelling them, and what becomes of dead letters."""

from __future__ import annotations

import msgspec
import pytest
from tests.acceptance import schemas as s
from tests.acceptance.cli import Cli, until


def test_a_failed_job_ends_with_1_and_can_be_inspected_replayed_and_purged(grid: Cli) -> None:
    words = ("--id", "broken", "--max-attempts", "1", "--payload", "boom")
    outcome = grid.run("submit", "--wait", "fail", *words)
    assert (outcome.code, outcome.out) == (1, b"")
    assert "boom" in outcome.err
    assert "ekiden jobs show broken" in outcome.err

    shown = grid.run("dlq", "show", "broken")
    assert b"handler_error" in shown.out
    assert "ekiden dlq replay broken" in shown.err
    assert [job["id"] for job in grid.json_lines("dlq", "list", "--all")] == ["broken"]

    assert grid.json("dlq", "replay", "broken")["replayed"] == 1
    assert grid.run("wait", "broken").code == 1
    job = grid.json("jobs", "show", "broken")
    assert (job["state"], job["generation"], len(job["causes"])) == ("failed", 1, 2)

    assert grid.json("dlq", "purge", "--subject", "job.assign.fail")["purged"] == 1
    assert grid.refused("jobs", "show", "broken") == "unknown_job"
    assert "no dead letters" in grid.run("dlq", "list").err


def test_dead_letters_are_replayed_and_purged_by_filter_and_all_at_once(grid: Cli) -> None:
    words = ("--max-attempts", "1", "--payload", "no", "--count", "3")
    assert grid.run("submit", "--wait", "fail", "--id", "x", "--run", "rx", *words).code == 1
    assert grid.run("submit", "--wait", "fail", "--id", "y", "--run", "ry", *words).code == 1

    assert grid.typed(s.Replayed, "dlq", "replay", "--run", "rx").replayed == 3
    assert grid.run("wait", "x-1", "x-2", "x-3").code == 1
    assert grid.typed(s.Shown, "dlq", "show", "x-2").generation == 1
    assert grid.typed(s.Shown, "dlq", "show", "y-2").generation == 0
    assert grid.typed(s.Purged, "dlq", "purge", "--run", "rx").purged == 3
    assert grid.typed(s.Replayed, "dlq", "replay", "--all", "--yes").replayed == 3
    assert grid.run("wait", "y-1", "y-2", "y-3").code == 1
    assert grid.typed(s.Purged, "dlq", "purge", "--all", "--yes").purged == 3


def test_a_change_of_unknown_jobs_is_refused(grid: Cli) -> None:
    for words in (("jobs", "cancel"), ("dlq", "replay"), ("dlq", "purge")):
        outcome = grid.run(*words, "nobody")
        assert outcome.code == 4
        assert "nobody" in outcome.err


def test_jobs_are_listed_and_cancelled_by_filter(grid: Cli) -> None:
    words = ("--id", "paged", "--count", "5", "--delay", "3600", "--run", "pages")
    grid.run("submit", "echo", *words)
    listing = ("jobs", "list", "--run", "pages")

    lines = grid.run(*listing, "--limit", "2", "--json").out.splitlines()
    first = {msgspec.json.decode(line, type=s.Listed).id for line in lines}
    every = {job["id"] for job in grid.json_lines(*listing, "--all")}
    assert every == {f"paged-{number}" for number in range(1, 6)}
    assert len(first) == 2
    assert first < every
    shown = grid.run(*listing, "--limit", "2")
    assert shown.out.count(b"paged-") == 2
    assert "--all" in shown.err

    assert grid.json("jobs", "cancel", "--run", "pages")["cancelled"] == 5
    assert grid.typed(s.NotDone, "wait", "paged-1", code=1).error.code == "job_cancelled"


def test_a_running_job_is_stopped_by_cancel(grid: Cli) -> None:
    grid.run("submit", "sleep", "--id", "endless", "--payload", "3600")
    until(lambda: bool(grid.look("job", id="endless")["worker"]), "the job to be leased")

    answer = grid.json("jobs", "cancel", "endless")

    assert answer["cancelling"] + answer["cancelled"] == 1
    assert grid.run("wait", "endless").code == 1


def test_an_unknown_job_is_refused_with_what_to_do(grid: Cli) -> None:
    for words in (("jobs", "show", "nobody"), ("wait", "nobody")):
        assert grid.refused(*words) == "unknown_job"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["submit", "echo", "--id", "no spaces"], "bad_id"),
        (["submit", "echo", "--subject", "a..b", "--wait"], "bad_subject"),
        (["submit", "echo", "--subject", "a.*", "--wait"], "bad_subject"),
        (["jobs", "list", "--subject", "a..b"], "bad_subject"),
        (["jobs", "list", "--state", "sleepy"], "bad_request"),
        (["jobs", "cancel", "--state", "sleepy"], "bad_request"),
        (["workers", "drain", "nobody"], "unknown_worker"),
        (["workers", "resume", "nobody"], "unknown_worker"),
        (["pub", "a.*", "x"], "bad_subject"),
        (["sub", "a.>.b"], "bad_subject"),
    ],
)
def test_bad_input_is_refused_with_its_code(grid: Cli, words: list[str], code: str) -> None:
    assert grid.refused(*words) == code


def test_a_payload_over_the_limit_is_refused(grid: Cli) -> None:
    outcome = grid.run("submit", "echo", "--payload", "-", "--json", stdin=bytes(600 << 10))

    assert (outcome.code, outcome.error["code"]) == (4, "too_large")


def test_a_job_is_found_among_more_than_the_broker_looks_at_in_one_go(own: Cli) -> None:
    own.start_up("--slots", "1")
    own.run("submit", "nobody", "--count", "51000", "--run", "crowd")
    own.run("submit", "nobody", "--count", "2", "--id", "rare", "--run", "rare")

    found = own.json_lines("jobs", "list", "--run", "rare")
    assert sorted(job["id"] for job in found) == ["rare-1", "rare-2"]
    assert own.typed(s.Cancelled, "jobs", "cancel", "--run", "rare").cancelled == 2
    assert own.typed(s.Cancelled, "jobs", "cancel", "--all", "--yes").cancelled == 51_000
    assert own.typed(s.Stats, "stats").jobs.queued == 0


def test_what_concerns_all_jobs_is_done_only_if_meant(grid: Cli) -> None:
    for words in (("jobs", "cancel"), ("dlq", "replay"), ("dlq", "purge")):
        assert grid.refused(*words, "--all", code=2) == "usage"
        assert grid.run(*words, "--all", "--yes").code == 0
