"""Accepting jobs: once per id, in order, now or later or not after."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.core.group import WALL, Group, ids_of, settled, spec, submit_of

from ekiden.core import book as book_module
from ekiden.core import commands as c
from ekiden.limits import NS
from ekiden.model import jobs as j


def test_an_accepted_job_is_queued_and_counted() -> None:
    group = Group()

    changes = group.submit("j1", "j2")

    (outcome,) = changes.submits
    assert (outcome.fresh, outcome.repeated, outcome.conflicts) == (2, [], [])
    assert [queue.route.subject for queue in changes.woken] == ["a.x"]
    assert group.states("j1", "j2") == [j.QUEUED, j.QUEUED]
    assert group.book.totals.accepted == 2
    assert group.book.clients["ann"].live == 2
    assert group.book.clients["ann"].bytes == group.book.live_bytes == 4


def test_the_same_job_again_is_the_same_job_in_whatever_state() -> None:
    group = Group()
    group.submit("q", "l", "d", "f", "c")
    group.cancel("c")
    grant = group.assign(count=3)
    group.fail(grant, 2, cause=j.EXIT_CODE)
    group.finish(grant, 1)
    assert ids_of(grant) == ["q", "l", "d"]

    (outcome,) = group.submit("q", "l", "d", "f", "c").submits

    assert outcome.fresh == 0
    assert [(n, row.id) for n, row in outcome.repeated] == list(
        enumerate(["q", "l", "d", "f", "c"])
    )
    assert group.states("q", "l", "d", "f", "c") == [
        j.LEASED, j.DONE, j.FAILED, j.QUEUED, j.CANCELLED,
    ]  # fmt: skip
    assert group.book.totals.accepted == 5
    assert group.book.totals.repeated == 5


@pytest.mark.parametrize(
    "other",
    [
        {"body": b"other"},
        {"of": spec("a.y")},
        {"of": spec(priority=3)},
        {"of": spec(max_attempts=7)},
        {"of": spec(timeout_ns=5)},
        {"of": spec(needs=j.Needs(cpu_milli=1))},
        {"of": spec(key="k")},
        {"of": spec(run="nightly")},
    ],
)
def test_the_same_id_with_other_content_is_a_conflict_and_changes_nothing(other: dict) -> None:
    group = Group()
    group.submit("j1")

    (outcome,) = group.submit("j1", "j2", **other).submits

    assert [(n, row.id) for n, row in outcome.conflicts] == [(0, "j1")]
    assert outcome.fresh == 1
    assert group.job("j1").body == b"j1"
    assert group.job("j1").origin.spec == spec()


def test_who_submits_again_and_when_does_not_matter_to_the_digest() -> None:
    group = Group()
    group.submit("j1", client="ann", delay_ns=5)

    (outcome,) = group.submit("j1", client="bob", expires_at=WALL + 9).submits

    assert [row.id for _, row in outcome.repeated] == ["j1"]
    assert group.job("j1").origin.client.id == "ann"


def test_an_id_twice_in_one_submit_is_accepted_once() -> None:
    group = Group()

    (outcome,) = group.submit("j1", "j1").submits

    assert outcome.fresh == 1
    assert [n for n, _ in outcome.repeated] == [1]
    assert ids_of(group.assign()) == ["j1"]


def test_a_repeated_submit_leaves_no_empty_lane_behind() -> None:
    group = Group()
    group.submit("j1")
    group.assign()

    group.submit("j1")

    assert all(not queue.lanes for queue in group.book.queues.values())


# ------------------------------------------------------------------ later


def test_a_delayed_job_wakes_when_its_delay_has_passed_and_not_before() -> None:
    group = Group()
    group.submit("j1", delay_ns=10 * NS)
    assert group.state("j1") == j.DELAYED
    assert group.book.delayed == 1

    assert not group.later(9.999).woken
    assert group.state("j1") == j.DELAYED

    assert group.later(0.001).woken
    assert group.state("j1") == j.QUEUED
    assert group.book.delayed == 0


def test_delays_that_end_together_wake_in_the_order_they_were_accepted() -> None:
    group = Group()
    group.submit("late", delay_ns=20 * NS)
    group.submit("b", delay_ns=10 * NS)
    group.submit("a", delay_ns=10 * NS)

    group.later(30)

    assert ids_of(group.assign()) == ["b", "a", "late"]


def test_a_wall_time_start_follows_the_leaders_wall_clock_and_not_the_entry_time() -> None:
    group = Group()
    group.submit("j1", not_before=WALL + 10 * NS)
    group.later(3600)
    assert group.state("j1") == j.DELAYED

    group.clock(WALL + 10 * NS - 1)
    assert group.state("j1") == j.DELAYED

    changes = group.clock(WALL + 10 * NS)
    assert changes.woken
    assert group.state("j1") == j.QUEUED


def test_a_wall_time_start_that_has_passed_is_no_delay() -> None:
    group = Group()

    group.submit("j1", not_before=WALL)

    assert group.state("j1") == j.QUEUED


def test_a_job_that_has_not_begun_by_its_expiry_is_cancelled_as_expired() -> None:
    group = Group()
    group.submit("queued", "held", expires_at=WALL + 10)
    group.submit("delayed", expires_at=WALL + 10, delay_ns=NS)
    group.submit("watched", expires_at=WALL + 10, not_before=WALL + 20)
    group.submit("longer", expires_at=WALL + 11)
    group.submit("free")
    group.cancel("held")

    assert settled(group.clock(WALL + 9)) == []
    assert settled(group.clock(WALL + 10)) == [
        (j.CANCELLED, ["queued"]), (j.CANCELLED, ["delayed"]), (j.CANCELLED, ["watched"])
    ]  # fmt: skip

    assert group.ended("queued") == (j.CANCELLED, j.EXPIRED, "")
    assert group.ended("held") == (j.CANCELLED, "cancelled", "")
    assert group.states("longer", "free") == [j.QUEUED, j.QUEUED]
    group.later(2)
    group.clock(WALL + 30)
    assert group.states("longer", "delayed", "watched") == [j.CANCELLED] * 3


def test_a_job_that_runs_when_it_expires_runs_on() -> None:
    group = Group()
    group.submit("j1", expires_at=WALL + 10)
    grant = group.assign()

    group.clock(WALL + 10)

    assert group.state("j1") == j.LEASED
    group.finish(grant, 0)
    assert group.state("j1") == j.DONE


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("way_back", ["retry", "released", "lost"])
def test_a_job_that_comes_back_after_its_expiry_ends_at_the_next_look(
    way_back: str, reload: bool
) -> None:
    group = Group()
    group.submit("j1", expires_at=WALL + 10)
    grant = group.assign()
    group.clock(WALL + 10)

    match way_back:
        case "retry":
            group.fail(grant, 0)
        case "released":
            group.release(grant, 0)
        case "lost":
            group.forfeit("w1")
    if reload:
        group = group.reload()
    group.clock(WALL + 11)

    assert group.ended("j1")[:2] == (j.CANCELLED, j.EXPIRED)


def test_an_expiry_before_the_start_survives_a_snapshot() -> None:
    group = Group()
    group.submit("j1", not_before=WALL + 20, expires_at=WALL + 10)

    group = group.reload()
    group.clock(WALL + 10)

    assert group.ended("j1") == (j.CANCELLED, j.EXPIRED, "")


# ------------------------------------------------------------------ bounds of what is kept idle


def test_idle_clients_and_queues_are_swept_and_busy_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book_module, "IDLE_KEPT", 3)
    group = Group()
    group.submit("busy", client="busy", of=spec("busy"))
    for n in range(10):
        of = spec(f"idle.{n}")
        group.submit(f"j{n}", client=f"c{n}", of=of)
        group.finish(group.assign(of=of), 0)

    assert "busy" in group.book.clients
    assert spec("busy").route in group.book.queues
    assert len(group.book.clients) <= 4
    assert len(group.book.queues) <= 4
    group.submit("j0", client="c0", of=spec("idle.0"))
    assert group.book.totals.repeated == 1


def test_more_clients_than_are_kept_idle_survive_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book_module, "IDLE_KEPT", 3)
    group = Group(client_inflight_max=1)
    for n in range(12):
        group.submit(f"a{n}", f"b{n}", client=f"c{n}")

    group = group.reload()
    grant = group.assign(count=24)

    assert len(grant.rows) == 12
    assert len(group.book.clients) == 12


def test_distinct_specs_are_cached_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "SPECS_CACHED", 4)
    group = Group()

    for n in range(20):
        group.submit(f"j{n}", of=spec(f"s.{n}"))

    assert len(group.book._specs) <= 4
    assert group.job("j0").origin.spec == spec("s.0")


# ------------------------------------------------------------------ entries


def test_entries_are_applied_once_in_order_and_time_never_goes_back() -> None:
    group = Group()
    group.later(5)
    book = group.book

    for index, time in ((1, group.now), (3, group.now), (2, group.now - 1)):
        with pytest.raises(AssertionError):
            book.apply(c.Entry(index, time, WALL, [c.Tick()]))


def test_the_digest_tells_books_apart_that_went_different_ways() -> None:
    same, other, third = Group(), Group(), Group()
    same.submit("j1")
    other.submit("j1")
    third.submit("j1", "j2")

    assert same.book.digest == other.book.digest != third.book.digest


def test_an_entry_read_back_is_what_was_written() -> None:
    commands = [
        submit_of("j1", delay_ns=1), c.Assign("w", j.Route("a"), 3),
        c.Finish("w", 1, None, [b"x"], {0: j.Note(1)}), c.Fail("w", 1, [1], ["oom"], ["m"]),
        c.Release("w", 1, [2]), c.Forfeit("w", [(1, 2)]), c.Cancel(["j1"]), c.Clock(7),
        c.Replay(["j1"]), c.Purge(["j1"]), c.Configure(c.Settings()), c.Tick(),
    ]  # fmt: skip

    entry = c.decode_entry(7, c.encode_payload(5, 6, commands))

    assert (entry.index, entry.time, entry.wall) == (7, 5, 6)
    assert [type(command) for command in entry.commands] == [type(made) for made in commands]
    assert entry.commands[1:] == commands[1:]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode([1, 2, [[99]]]),
        msgspec.msgpack.encode([1, 2, [[13, "a field from the future"]]]),
        msgspec.msgpack.encode([1, 2, [[8, "no number"]]]),
    ],
)
def test_history_that_cannot_be_read_is_refused_rather_than_guessed_at(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        c.decode_entry(1, payload)
