"""Caches at the broker: put once, told to whom they concern, kept while they are needed."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.unit.broker.house import Far, House, logs, submit_of

from ekiden import limits
from ekiden.broker.events import CacheChecked
from ekiden.errors import BlobDamaged
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import Route, Spec
from ekiden.wire import messages as m

DAY = CacheUse("day", "aa" * 32, 300)
NEXT = CacheUse("next", "bb" * 32, 300)


def put(far: Far, use: CacheUse = DAY, target: str = "a.>") -> Any:
    return far.ask("cache_put", id=use.id, manifest=use.manifest, size=use.size, target=target)


def said(far: Far, status: str, use: CacheUse = DAY, text: str = "", **rest: int) -> None:
    far.say(m.CacheAck(use.id, use.manifest, status, text, **rest))
    far.house.settle()


def job_reading(*uses: CacheUse, name: str = "j1") -> m.Submit:
    route = Route("a.x", data=tuple(sorted(use.id for use in uses)))
    spec = msgspec.Raw(msgspec.msgpack.encode(Spec("n", route, caches=uses)))
    return msgspec.structs.replace(submit_of(name), spec=spec)


# ------------------------------------------------------------------ putting


def test_a_cache_is_put_when_the_store_has_all_of_it_and_the_entry_is_on_disk() -> None:
    house = House()
    ann, worker = house.client(), house.worker("w1", "a.>")
    house.slow = True
    number = ann.say(m.Ask("cache_put", {"id": "day", "manifest": "aa" * 32, "size": 300,
                                         "target": "a.>"}))  # fmt: skip
    house.settle()
    waiting = list(ann.heard)

    house.look()
    house.settle()
    unwritten = (list(ann.heard), list(worker.heard))
    house.slow = False
    house.persist()
    house.settle()

    assert (waiting, unwritten) == ([], ([], []))
    assert ann.heard == [(number, m.Answer({"id": "day", "manifest": "aa" * 32, "state": "new"}))]
    assert worker.take(m.CacheOffer) == m.CacheOffer([DAY])
    assert house.pins == {"aa" * 32: 1}


def test_only_workers_whose_patterns_overlap_the_target_are_told() -> None:
    house = House()
    ann, near, far = house.client(), house.worker("w1", "a.x"), house.worker("w2", "b.>")

    put(ann, target="a.*")

    assert near.take(m.CacheOffer).caches == [DAY]
    assert far.all(m.CacheOffer) == []


def test_a_put_whose_bytes_are_not_in_the_store_is_refused_and_nothing_is_kept() -> None:
    house = House()
    ann = house.client()
    house.shelf["aa" * 32] = CacheChecked(0, 3, 1000, missing=2)
    house.shelf["bb" * 32] = CacheChecked(0, error=BlobDamaged("the manifest is damaged"))

    answers = [put(ann), put(ann, NEXT)]

    assert [answer.code for answer in answers] == ["unknown_blob", "blob_damaged"]
    assert "lacks 2 of the blobs" in answers[0].text
    assert house.machine.book.caches.known == {}
    assert +house.pins == {}


def test_other_content_under_a_known_id_is_refused_before_the_disk_is_asked() -> None:
    house = House()
    ann = house.client()
    put(ann)

    answer = put(ann, CacheUse("day", "bb" * 32, 300))

    assert answer.code == "conflict"
    assert house.pins == {"aa" * 32: 1}


def test_of_two_clients_that_put_one_id_at_once_one_is_told_of_the_conflict() -> None:
    house = House()
    ann, bob = house.client("ann"), house.client("bob")
    params = {"id": "day", "size": 300, "target": "a.>"}
    ann.say(m.Ask("cache_put", {**params, "manifest": "aa" * 32}))
    bob.say(m.Ask("cache_put", {**params, "manifest": "bb" * 32}))

    house.settle()

    assert ann.take(m.Answer).body["state"] == "new"
    assert bob.take(m.Refusal).code == "conflict"
    assert +house.pins == {"aa" * 32: 1}


def test_putting_again_tells_only_those_that_lack_it() -> None:
    house = House()
    ann, w1, w2 = house.client(), house.worker("w1", "a.>"), house.worker("w2", "a.>")
    put(ann)
    said(w1, "ok")
    said(w2, "failed", text="its disk is full")
    w1.heard.clear()
    w2.heard.clear()

    answer = put(ann)

    assert answer["state"] == "same"
    assert w1.heard == []
    assert w2.take(m.CacheOffer).caches == [DAY]
    assert house.pins == {"aa" * 32: 1}


def test_a_put_that_makes_no_sense_is_refused() -> None:
    house = House()
    ann = house.client()

    answers = [
        put(ann, CacheUse("..", "aa" * 32, 300)),
        put(ann, CacheUse("a/b", "aa" * 32, 300)),
        put(ann, CacheUse("day", "aa", 300)),
        put(ann, CacheUse("day", "aa" * 32, 0)),
        put(ann, target="a..b"),
    ]

    codes = ["bad_name", "bad_id", "bad_request", "bad_request", "bad_subject"]
    assert [answer.code for answer in answers] == codes
    assert house.pins == {}


def test_a_group_takes_so_many_caches_and_no_more(monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "CACHES_MAX", 1)
    house = House()
    ann = house.client()
    put(ann)

    assert put(ann, NEXT).code == "queue_full"
    assert put(ann)["state"] == "same"


# ------------------------------------------------------------------ workers


def test_whoever_joins_later_is_told_of_all_that_is_meant_for_it() -> None:
    house = House()
    ann = house.client()
    put(ann)
    put(ann, NEXT, target="b.>")

    late = house.worker("w1", "a.>", "c.>")

    assert late.take(m.CacheOffer) == m.CacheOffer([DAY], whole=True)


def test_after_a_restart_of_the_broker_caches_are_known_kept_and_offered() -> None:
    house = House()
    put(house.client())

    house = house.restart()
    house.settle()
    worker = house.worker("w1", "a.>")

    assert house.pins == {"aa" * 32: 1}
    assert worker.take(m.CacheOffer).caches == [DAY]
    assert house.client().ask("cache", id="day")["missing"] == 0


def test_a_cache_whose_bytes_are_gone_after_a_restart_is_reported() -> None:
    house = House()
    put(house.client())
    house = house.restart()
    house.shelf["aa" * 32] = CacheChecked(0, missing=2)

    effects = house.settle()

    assert logs(effects) == ["cache.incomplete"]
    assert house.client().ask("cache", id="day")["missing"] == 2
    house.shelf.clear()
    put(house.client())
    assert house.client().ask("cache", id="day")["missing"] == 0


def test_the_words_of_workers_are_what_people_are_told() -> None:
    house = House()
    ann = house.client()
    w1, w2, _ = house.worker("w1", "a.>"), house.worker("w2", "a.>"), house.worker("w3", "a.>")
    put(ann)

    said(w1, "fetching", done=10, total=1000)
    said(w2, "failed", text="its disk is full")
    facts = ann.ask("cache", id="day")

    assert facts["workers"] == [
        {"id": "w1", "status": "fetching", "text": "", "done": 10, "total": 1000},
        {"id": "w2", "status": "failed", "text": "its disk is full", "done": 0, "total": 0},
        {"id": "w3", "status": "pending", "text": "", "done": 0, "total": 0},
    ]
    assert (facts["files"], facts["bytes"], facts["client"]) == (3, 1000, "ann")
    said(w1, "ok")
    (line,) = ann.ask("caches")["caches"]
    assert (line["id"], line["ok"], line["of"]) == ("day", 1, 3)


def test_words_on_what_is_not_known_or_not_sensible_change_nothing() -> None:
    house = House()
    ann, worker = house.client(), house.worker("w1", "a.>")
    put(ann)

    said(worker, "ok", NEXT)
    said(worker, "ok", CacheUse("day", "bb" * 32, 300))
    worker.heard.clear()
    said(worker, "splendid")

    assert worker.take(m.Refusal).code == "bad_request"
    assert ann.ask("cache", id="day")["workers"][0]["status"] == "pending"


def test_caches_are_listed_page_by_page_the_newest_first() -> None:
    house = House()
    ann = house.client()
    uses = [CacheUse(f"d{n}", f"{n:02}" * 32, 300) for n in range(5)]
    for use in uses:
        put(ann, use)

    first = ann.ask("caches", limit=2)
    second = ann.ask("caches", limit=3, after=first["caches"][-1]["id"])

    assert [line["id"] for line in first["caches"]] == ["d4", "d3"]
    assert [line["id"] for line in second["caches"]] == ["d2", "d1", "d0"]
    assert (first["more"], second["more"]) == (True, False)


def test_verifying_asks_every_worker_and_looks_at_the_store_as_well() -> None:
    house = House()
    ann, worker = house.client(), house.worker("w1", "a.>")
    put(ann)
    said(worker, "ok")
    worker.heard.clear()
    house.shelf["aa" * 32] = CacheChecked(0, missing=1)

    answer = ann.ask("cache_verify", id="day")

    assert answer == {"id": "day", "workers": 1}
    assert worker.take(m.CacheOffer) == m.CacheOffer([DAY], verify=True)
    assert ann.ask("cache", id="day")["workers"][0]["status"] == "pending"
    assert ann.ask("cache", id="day")["missing"] == 1
    assert house.pins == {"aa" * 32: 1}


# ------------------------------------------------------------------ removing


def test_a_removed_cache_is_let_go_by_the_store_and_by_the_workers() -> None:
    house = House()
    ann, worker = house.client(), house.worker("w1", "a.>")
    put(ann)
    put(ann, NEXT)
    said(worker, "ok")
    worker.heard.clear()

    answer = ann.ask("cache_remove", ids=["day", "none"])

    assert answer == {"removed": ["day"], "in_use": [], "unknown": ["none"]}
    assert worker.take(m.CacheOffer) == m.CacheOffer([NEXT], whole=True)
    assert +house.pins == {"bb" * 32: 1}
    assert ann.ask("cache", id="day").code == "unknown_cache"


def test_a_cache_that_jobs_use_stays() -> None:
    house = House()
    ann = house.client()
    put(ann)
    ann.say(job_reading(DAY))
    house.settle()

    answer = ann.ask("cache_remove", ids=["day"])

    assert answer == {"removed": [], "in_use": ["day"], "unknown": []}
    assert ann.ask("cache", id="day")["jobs"] == 1


# ------------------------------------------------------------------ jobs


def test_a_job_that_needs_an_unknown_cache_is_refused_unless_it_was_submitted_before() -> None:
    house = House()
    ann, worker = house.client(), house.worker("w1", "a.>")
    put(ann)
    ann.say(job_reading(DAY))
    house.settle()
    worker.done(*worker.assigned().values())
    house.settle()
    ann.ask("cache_remove", ids=["day"])

    again = ann.say(job_reading(DAY))
    house.settle()
    accepted = ann.take(m.Accepted)
    ann.say(job_reading(DAY, name="j2"))
    house.settle()
    fresh = ann.take(m.Accepted)

    assert (accepted.messages, accepted.refused) == ([again], [])
    assert [refused.code for refused in fresh.refused] == ["unknown_cache"]


def test_a_job_is_given_to_a_worker_that_has_its_data_until_that_one_is_busy() -> None:
    house = House()
    ann = house.client()
    house.worker("w1", "a.>", slots=1, credit=100)
    has = house.worker("w2", "a.>", slots=1, credit=100)
    put(ann)
    said(has, "ok")

    got: list[int] = []
    for n in range(6):
        ann.say(job_reading(DAY, name=f"j{n}"))
        house.settle()
        got.append(len(has.assigned()))

    # With two waiting there it is as quick to fetch the data elsewhere; from then on by turns.
    assert got == [1, 1, 0, 1, 0, 1]
