"""Who gets what: policies, needs, labels, pins and keys; and that nothing is ever forgotten."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from tests.unit.core.group import Group, spec

from ekiden import limits
from ekiden.core import commands as c
from ekiden.core import scheduler as scheduler_module
from ekiden.core.roster import DRAINING, QUARANTINED, READY, SILENT, Roster, RosterWorker
from ekiden.core.scheduler import ROUND_ROBIN, Scheduler
from ekiden.model import jobs as j


class Shop(Group):
    """A book with a roster and a scheduler, and a leader that applies what is planned."""

    def __init__(self, policies: dict[str, str] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.roster = Roster()
        self.scheduler = Scheduler(self.roster, policies)
        self.conns = 0

    def join(self, name: str, credit: int = 4, *patterns: str, **has: Any) -> RosterWorker:
        worker = self.roster.workers.get(name) or RosterWorker(name)
        self.conns += 1
        worker.conn, worker.slots, worker.credit = self.conns, credit, credit
        for field, value in has.items():
            setattr(worker, field, value)
        self.roster.join(worker, list(patterns or ("a.>",)))
        self.scheduler.freed(worker, self.book)
        return worker

    def queue(self, *ids: str, **options: Any) -> None:
        for queue in self.submit(*ids, **options).woken:
            self.scheduler.wake(queue.route)

    def plan(self, incoming: dict[j.Route, int] | None = None) -> list[tuple[str, int]]:
        plans = self.scheduler.plan(self.book, incoming or {})
        self.planned: list[c.Command] = [*plans]
        return [(plan.worker, plan.count) for plan in plans]

    def commit(self, *first: c.Command) -> None:
        changes = self.apply(*first, *self.planned)
        self.scheduler.forget_plans(self.book)
        for queue in changes.woken:
            self.scheduler.wake(queue.route)
        self.planned = []

    def go(self) -> list[tuple[str, int]]:
        said = self.plan()
        self.commit()
        return said

    def held(self) -> dict[str, int]:
        return {name: ledger.held for name, ledger in sorted(self.book.workers.items())}

    def done(self, name: str, count: int = 1) -> None:
        """The worker finishes its oldest attempts."""
        for _ in range(count):
            grant = next(iter(self.book.workers[name].grants.values()))
            self.finish(grant, grant.owned()[0][0])
        self.scheduler.freed(self.roster.workers[name], self.book)


def names(count: int, letter: str = "j") -> list[str]:
    return [f"{letter}{n}" for n in range(count)]


# ------------------------------------------------------------------ policies


def test_jobs_go_to_the_worker_that_holds_least() -> None:
    shop = Shop()
    shop.join("w1"), shop.join("w2")
    shop.queue("j1")
    shop.go()
    shop.queue("j2")
    shop.go()
    shop.queue("j3", "j4")
    shop.go()

    assert shop.held() == {"w1": 2, "w2": 2}


def test_among_equals_the_one_with_most_credit_then_the_one_used_longest_ago() -> None:
    shop = Shop()
    shop.join("small", 2), shop.join("large", 8), shop.join("other", 8)

    order = []
    for n in range(4):
        shop.queue(f"j{n}")
        ((name, _),) = shop.go()
        order.append(name)
        shop.done(name)

    assert order == ["large", "other", "large", "other"]


def test_a_flood_is_spread_over_all_and_nobody_gets_more_than_its_credit() -> None:
    shop = Shop()
    shop.join("w1", 10), shop.join("w2", 30), shop.join("w3", 5)
    shop.queue(*names(1000))

    shop.go()

    assert shop.held() == {"w1": 10, "w2": 30, "w3": 5}
    assert shop.go() == []


def test_a_grant_is_never_larger_than_its_bound() -> None:
    shop = Shop()
    shop.join("w1", 10_000)
    shop.queue(*names(1000))

    said = shop.go()

    assert max(count for _, count in said) == limits.GRANT_JOBS_MAX
    assert shop.held() == {"w1": 1000}


def test_round_robin_takes_turns_whatever_each_holds() -> None:
    shop = Shop({"a.>": ROUND_ROBIN})
    shop.join("w1", 100), shop.join("w2", 50)
    order = []
    for n in range(6):
        shop.queue(f"j{n}")
        order += [name for name, _ in shop.go()]
        if order[-1] == "w1":
            shop.done("w1")

    assert order == ["w1", "w2"] * 3


def test_the_first_policy_whose_pattern_matches_counts() -> None:
    shop = Shop({"a.y": ROUND_ROBIN, "b.>": ROUND_ROBIN})
    shop.join("w1", 100), shop.join("w2", 50)

    shop.queue("j1")
    shop.go()
    shop.done("w1")
    shop.queue("j2")
    assert [name for name, _ in shop.go()] == ["w1"]


def test_routes_take_turns_so_none_starves_another() -> None:
    shop = Shop()
    shop.join("w1", 4)
    shop.queue(*names(100, "x"), of=spec("a.x"))
    shop.queue("y0", of=spec("a.y"))
    seen: Counter[str] = Counter()
    for _ in range(3):
        shop.go()
        for grant in list(shop.book.grants.values()):
            seen.update(row.id[0] for _, row in grant.owned())
        shop.done("w1", 4)

    assert seen["y"] >= 1


# ------------------------------------------------------------------ who may


def test_only_workers_whose_patterns_match_are_asked() -> None:
    shop = Shop()
    shop.join("w1", 4, "b.*"), shop.join("w2", 4, "a.x", "b.y")
    shop.queue("j1", of=spec("a.x"))
    shop.queue("j2", of=spec("b.x"))

    assert sorted(shop.go()) == [("w1", 1), ("w2", 1)]


@pytest.mark.parametrize(
    "needs",
    [
        j.Needs(cpu_milli=4000),
        j.Needs(mem_mb=900),
        j.Needs(labels=(("gpu", "a100"),)),
        j.Needs(labels=(("gpu", "a100"), ("zone", "eu"))),
    ],
)
def test_needs_and_labels_choose_the_worker_that_has_them(needs: j.Needs) -> None:
    shop = Shop()
    shop.join("poor", 4, cpu_milli=2000, mem_mb=500, labels={"gpu": "t4"})
    shop.join("rich", 4, cpu_milli=8000, mem_mb=1000, labels={"gpu": "a100", "zone": "eu"})
    shop.queue("j1", of=spec(needs=needs))

    assert shop.go() == [("rich", 1)]


def test_what_nobody_has_waits_until_somebody_has_it() -> None:
    of = spec(needs=j.Needs(labels=(("gpu", "a100"),)))
    shop = Shop()
    shop.join("w1")
    shop.queue("j1", of=of)
    assert shop.go() == []
    assert shop.scheduler.waiting_on(of.route, shop.book) == []

    shop.join("w2", labels={"gpu": "a100"})

    assert [w.id for w in shop.scheduler.waiting_on(of.route, shop.book)] == ["w2"]
    assert shop.go() == [("w2", 1)]


def test_cpu_and_memory_bound_what_runs_at_a_time_also_within_one_plan() -> None:
    shop = Shop()
    shop.join("w1", 100, cpu_milli=4000, mem_mb=1000)
    shop.queue(*names(10, "c"), of=spec(needs=j.Needs(cpu_milli=1000)))
    shop.queue(*names(10, "m"), of=spec(needs=j.Needs(cpu_milli=100, mem_mb=600)))

    shop.go()

    used_cpu = used_mem = 0
    for grant in shop.book.grants.values():
        used_cpu += grant.left * grant.queue.route.needs.cpu_milli
        used_mem += grant.left * grant.queue.route.needs.mem_mb
    assert used_cpu <= 4000
    assert used_mem <= 1000
    assert shop.held()["w1"] == 4


def test_needs_are_met_by_the_least_loaded_that_has_room() -> None:
    of = spec(needs=j.Needs(cpu_milli=1000))
    shop = Shop()
    shop.join("w1", 9, cpu_milli=1000), shop.join("w2", 9, cpu_milli=8000)
    order = []
    for n in range(3):
        shop.queue(f"j{n}", of=of)
        order += [name for name, _ in shop.go()]

    assert order == ["w1", "w2", "w2"]


def test_a_pinned_job_goes_to_its_worker_or_waits_for_it() -> None:
    of = spec("b.other", pin="w2")
    shop = Shop()
    shop.join("w1", 4, ">")
    shop.queue("j1", of=of)
    assert shop.go() == []

    shop.join("w2", 4)

    assert shop.go() == [("w2", 1)]


def test_a_pin_on_a_worker_that_left_waits() -> None:
    shop = Shop()
    shop.roster.leave(shop.join("w2"))
    shop.queue("j1", of=spec(pin="w2"))

    assert shop.go() == []


def test_a_key_sticks_to_one_worker_and_most_keys_stay_when_another_comes() -> None:
    shop = Shop()
    for n in range(4):
        shop.join(f"w{n}", 1000)

    def owners() -> dict[str, str]:
        found = {}
        for n in range(60):
            key = f"k{n}"
            shop.queue(*(f"{key}.{shop.book.applied}.{m}" for m in range(3)), of=spec(key=key))
            said = shop.go()
            assert len({name for name, _ in said}) == 1
            found[key] = said[0][0]
        return found

    before = owners()
    assert owners() == before
    assert len(set(before.values())) == 4
    shop.join("w9", 1000)
    after = owners()

    moved = [key for key in before if after[key] != before[key]]
    assert 0 < len(moved) < 30
    assert {after[key] for key in moved} == {"w9"}


def test_a_key_waits_for_its_busy_worker_and_moves_when_that_is_gone_or_draining() -> None:
    of = spec(key="k")
    shop = Shop()
    shop.join("w1", 1), shop.join("w2", 1)
    shop.queue("j1", "j2", of=of)
    ((owner, _),) = shop.go()
    assert shop.go() == []

    worker = shop.roster.workers[owner]
    worker.draining = True
    shop.scheduler.freed(worker, shop.book)
    shop.scheduler.freed(shop.roster.workers["w1" if owner == "w2" else "w2"], shop.book)

    ((other, _),) = shop.go()
    assert other != owner
    for each in shop.roster.workers.values():
        each.draining = True
    shop.queue("j3", of=of)
    assert shop.go() == []


def test_a_retry_goes_to_another_worker_if_one_has_room_and_else_to_the_same() -> None:
    shop = Shop()
    shop.join("w1", 1), shop.join("w2", 1)

    def fail_once(job_id: str, worker: str) -> None:
        shop.queue(job_id)
        shop.roster.workers["w2" if worker == "w1" else "w1"].draining = True
        assert shop.go() == [(worker, 1)]
        shop.fail(next(iter(shop.book.grants.values())), 0)
        for each in shop.roster.workers.values():
            each.draining = False
            shop.scheduler.freed(each, shop.book)
        for queue in shop.later(5).woken:
            shop.scheduler.wake(queue.route)

    fail_once("j1", "w1")
    assert shop.go() == [("w2", 1)]
    shop.done("w2")
    fail_once("j2", "w1")
    shop.roster.workers["w2"].draining = True
    assert shop.go() == [("w1", 1)]


# ------------------------------------------------------------------ who may not now


@pytest.mark.parametrize("state", [DRAINING, QUARANTINED, SILENT])
def test_a_worker_that_is_not_ready_gets_nothing(state: str) -> None:
    shop = Shop()
    worker = shop.join("w1")
    assert worker.state == READY
    if state == DRAINING:
        worker.draining = True
    elif state == QUARANTINED:
        worker.quarantined_until = 5
    else:
        worker.conn = None
    shop.queue("j1")
    shop.queue("j2", of=spec(needs=j.Needs(cpu_milli=0, mem_mb=0), key="k"))

    assert worker.state == state
    assert shop.go() == []


def test_ten_different_failures_in_a_row_make_the_worker_the_suspect() -> None:
    roster, worker = Roster(), RosterWorker("w1")
    worker.conn = 1

    said = [roster.failed(worker, f"j{n // 2}", 5) for n in range(2 * limits.QUARANTINE_FAILURES)]

    assert said.index(True) == 2 * (limits.QUARANTINE_FAILURES - 1)
    assert said.count(True) == 1
    assert worker.quarantined_until == 5 + limits.QUARANTINE_NS
    assert worker.state == QUARANTINED


def test_a_worker_that_leaves_is_not_asked_and_one_that_returns_is() -> None:
    shop = Shop()
    worker = shop.join("w1")
    shop.roster.leave(worker)
    shop.queue("j1")
    assert shop.go() == []

    shop.join("w1", 4, "a.x", "a.x")
    assert worker.patterns == ["a.x"]
    assert shop.go() == [("w1", 1)]
    shop.roster.drop(worker)
    shop.roster.drop(worker)
    assert len(shop.roster.trie) == 0
    assert shop.roster.workers == {}


# ------------------------------------------------------------------ nothing is forgotten


def test_a_submit_and_its_assign_share_one_entry() -> None:
    shop = Shop()
    shop.join("w1")
    shop.scheduler.wake(spec().route)

    assert shop.plan({spec().route: 3}) == [("w1", 3)]


def test_room_planned_for_jobs_that_turned_out_to_be_repeats_is_used_for_others() -> None:
    # A client that comes back sends again what was accepted: the plan counts on it, gets nothing,
    # and the worker must not be taken for busy ever after.
    shop = Shop()
    shop.join("w1", 1)
    route = spec().route
    shop.scheduler.wake(route)
    assert shop.plan({route: 2}) == [("w1", 1)]
    shop.commit(c.Tick())

    shop.queue("j1")

    assert shop.go() == [("w1", 1)]


def test_a_capped_clients_jobs_cause_no_empty_assigns() -> None:
    shop = Shop(client_inflight_max=1)
    shop.join("w1", 10)
    shop.queue("j1", "j2")
    shop.go()

    assert [shop.plan() for _ in range(3)] == [[], [], []]


def test_a_route_that_found_nobody_is_planned_as_soon_as_somebody_has_room() -> None:
    shop = Shop()
    shop.join("w1", 1)
    shop.queue("j1", "j2")
    shop.go()
    shop.scheduler.wake(spec().route)
    assert shop.go() == []

    shop.done("w1")

    assert shop.go() == [("w1", 1)]


def test_credit_that_grows_is_used_and_credit_that_shrinks_is_kept_to() -> None:
    shop = Shop()
    worker = shop.join("w1", 1)
    shop.queue(*names(10))
    shop.go()

    worker.credit = 3
    shop.scheduler.freed(worker, shop.book)
    assert shop.go() == [("w1", 2)]
    worker.credit = 1
    shop.scheduler.freed(worker, shop.book)
    shop.done("w1", 2)
    assert shop.go() == []


def test_more_waiting_routes_than_the_planner_remembers_do_not_keep_it_busy_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "POOLS_MAX", 5)
    shop = Shop()
    for n in range(20):
        shop.queue(f"j{n}", of=spec(f"a.{n}"))
    assert shop.go() == []

    shop.join("w1", 100)
    shop.go()

    assert shop.held() == {"w1": 20}


def test_many_distinct_pools_stay_within_bounds_and_are_all_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "POOLS_MAX", 4)
    shop = Shop()
    for n in range(12):
        shop.join(f"w{n}", 1, f"a.{n}")
    for n in range(12):
        shop.queue(f"j{n}", f"k{n}", of=spec(f"a.{n}"))
    shop.go()
    assert len(shop.held()) == 12

    for n in range(12):
        shop.done(f"w{n}")
    shop.go()

    assert len(shop.held()) == 12


def test_a_random_shop_never_leaves_a_job_waiting_beside_a_worker_with_room() -> None:
    rng = random.Random(7)
    shop = Shop()
    for n in range(5):
        shop.join(f"w{n}", rng.randint(1, 4), *rng.sample(["a.x", "a.y", "b.>", "a.*"], 2))
    specs = [spec("a.x"), spec("a.y"), spec("b.z"), spec("a.x", needs=j.Needs(labels=()))]
    for n in range(600):
        match rng.randint(0, 4):
            case 0:
                shop.queue(*(f"j{n}.{m}" for m in range(rng.randint(1, 4))), of=rng.choice(specs))
            case 1:
                shop.queue("j0.0", of=specs[0])
                shop.scheduler.wake(specs[0].route)
                shop.plan({specs[0].route: rng.randint(1, 9)})
                shop.commit()
            case 2 if shop.book.workers:
                shop.done(rng.choice(list(shop.book.workers)))
            case 3:
                name = f"w{rng.randint(0, 4)}"
                worker = shop.roster.workers[name]
                worker.credit = rng.randint(0, 4)
                shop.scheduler.freed(worker, shop.book)
        shop.go()
        for route, queue in shop.book.queues.items():
            if queue.ready:
                able = shop.scheduler.waiting_on(route, shop.book)
                assert all(worker.free(shop.book) <= 0 for worker in able), (n, route)


def test_a_worker_that_stopped_being_ready_without_a_word_is_passed_over() -> None:
    shop = Shop()
    w1, w2 = shop.join("w1"), shop.join("w2")
    shop.queue("j0", "j1")
    shop.go()
    shop.done("w1")
    shop.done("w2")

    w1.quarantined_until = 5
    shop.queue("j2")
    assert shop.go() == [("w2", 1)]
    w2.conn = None
    shop.queue("j3")
    assert shop.go() == []


def test_a_worker_whose_load_grew_is_not_chosen_by_what_it_was() -> None:
    shop = Shop()
    w1 = shop.join("w1", 8)
    shop.queue("j0")
    shop.go()
    shop.scheduler.freed(w1, shop.book)
    shop.join("w2", 4)
    shop.queue("j1")
    shop.go()
    for _ in range(3):
        for worker in shop.roster.workers.values():
            shop.scheduler.freed(worker, shop.book)
    shop.queue("j2")

    assert shop.go() == [("w1", 1)]
    assert shop.held() == {"w1": 2, "w2": 1}


def test_a_worker_the_roster_dropped_is_not_chosen_by_an_old_note() -> None:
    shop = Shop()
    w1 = shop.join("w1", 8)
    shop.queue("j0")
    shop.go()
    del shop.roster.workers["w1"]
    shop.scheduler.freed(w1, shop.book)
    shop.queue("j1")

    assert shop.go() == []


# ------------------------------------------------------------------ flat cost


class Counted(RosterWorker):
    """Counts how often the planner looks at it."""

    looks = 0

    def free(self, book: Any) -> int:
        Counted.looks += 1
        return super().free(book)


class Watched(Scheduler):
    """Counts the routes it looks at."""

    looks = 0

    def _choose(self, *args: Any) -> Any:
        self.looks += 1
        return super()._choose(*args)


@pytest.mark.parametrize("routes", [10, 400])
@pytest.mark.parametrize("key", ["", "k"])
def test_a_slot_that_becomes_free_is_offered_to_a_few_however_many_wait(
    routes: int, key: str
) -> None:
    shop = Shop()
    shop.scheduler = watched = Watched(shop.roster)
    shop.join("w1", 2)
    for n in range(routes):
        shop.queue(f"j{n}", of=spec(f"a.{n}", key=key and f"{key}{n}"))
    shop.go()

    watched.looks = 0
    served = []
    for _ in range(8):
        shop.done("w1")
        shop.go()
        served += [row.id for grant in shop.book.grants.values() for _, row in grant.owned()]

    assert watched.looks <= 8 * 4
    assert {"j2", "j3", "j9"} <= set(served)  # each in its turn


@pytest.mark.parametrize("workers", [10, 1000])
def test_an_assign_looks_at_a_few_workers_however_many_there_are(workers: int) -> None:
    shop = Shop()
    for n in range(workers):
        worker = Counted(f"w{n}")
        worker.conn, worker.credit = n + 1, 2
        shop.roster.join(worker, [f"only.{n}.{m}" for m in range(10)] + ["a.>"])
        shop.scheduler.freed(worker, shop.book)
    shop.queue("warm")
    shop.go()

    Counted.looks = 0
    for n in range(100):
        shop.queue(f"j{n}")
        ((name, _),) = shop.go()
        shop.done(name)

    assert Counted.looks < 100 * 20
