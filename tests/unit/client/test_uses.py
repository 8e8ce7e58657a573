"""Jobs that name caches wait until the broker has said what these are."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.unit.client.rig import Rig, order

from ekiden import errors
from ekiden.client.contract import JobsRefused, Order
from ekiden.client.options import make_terms
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import FORM_PLAIN, FORM_PROGRAM, Spec
from ekiden.wire import messages
from ekiden.wire.messages import Ask, Submit

A = make_terms("x", FORM_PLAIN, {"caches": ["a"]})
AB = make_terms("x", FORM_PLAIN, {"caches": ["a", "b"]})
MANIFEST = "f" * 64


def up() -> Rig:
    rig = Rig()
    rig.connect()
    rig.take_sent()
    return rig


def answer(rig: Rig, cache: str, **body: Any) -> list[Any]:
    """Answer the question about this cache."""
    number = next(n for n, said in rig.sent if isinstance(said, Ask) and said.params["id"] == cache)
    rig.sent.clear()
    return rig.tell(messages.Answer(body or {"manifest": MANIFEST, "size": 9}), number)


def spec_of(submit: Submit) -> Spec:
    return msgspec.msgpack.decode(submit.spec, type=Spec)


def test_a_cache_is_asked_for_once_and_its_jobs_follow_in_order() -> None:
    rig = up()

    rig.submit(order("j1", terms=A), order("j2", terms=A))
    rig.submit(order("j3", terms=A), order("other"))

    assert [type(said) for _, said in rig.sent] == [Ask, Submit]
    assert rig.machine.pending == 4
    answer(rig, "a")
    (submit,) = rig.take_sent()
    assert submit.ids == ["j1", "j2", "j3"]
    assert spec_of(submit).caches == (CacheUse("a", MANIFEST, 9),)
    assert spec_of(submit).route.data == ("a",)
    rig.submit(order("j4", terms=A))
    assert [said.ids for said in rig.take_sent()] == [["j4"]]


def test_jobs_of_several_caches_wait_for_all_of_them() -> None:
    rig = up()
    rig.submit(order("j1", terms=AB))
    asked = list(rig.sent)

    answer(rig, "a")
    assert rig.take_sent() == []
    rig.sent = asked
    answer(rig, "b")

    (submit,) = rig.take_sent()
    assert [use.id for use in spec_of(submit).caches] == ["a", "b"]


def test_an_unknown_cache_refuses_the_jobs_that_name_it_alone() -> None:
    rig = up()
    rig.submit(order("j1", terms=AB), order("j2", terms=A))
    asked = list(rig.sent)
    number = next(n for n, said in asked if said.params["id"] == "b")

    news = rig.tell(messages.Refusal("unknown_cache", "no cache 'b'"), number)

    (refused,) = [each for each in news if isinstance(each, JobsRefused)]
    ((handle, error),) = refused.pairs
    assert handle.job_id == "j1"
    assert isinstance(error, errors.UnknownCache)
    assert error.remedy == "see what there is with: ekiden cache list"
    rig.sent = asked
    answer(rig, "a")
    assert [said.ids for said in rig.take_sent()] == [["j2"]]


def test_an_answer_without_sense_refuses_the_jobs() -> None:
    rig = up()
    rig.submit(order("j1", terms=A))

    news = answer(rig, "a", manifest=MANIFEST)

    (refused,) = [each for each in news if isinstance(each, JobsRefused)]
    assert isinstance(refused.pairs[0][1], errors.Fault)
    assert rig.machine.pending == 0


def test_waiting_jobs_outlive_the_connection_and_ask_again() -> None:
    rig = up()
    rig.submit(order("j1", terms=A), order("j2"))

    rig.reconnect()

    assert rig.machine.pending == 2
    answer(rig, "a")
    (submit,) = rig.take_sent()
    assert submit.ids == ["j1"]


def test_what_a_cache_is_does_not_outlive_the_connection() -> None:
    rig = up()
    rig.submit(order("j1", terms=A))
    answer(rig, "a")
    rig.take_sent()

    rig.reconnect()
    answer(rig, "a", manifest="e" * 64, size=7)

    (submit,) = rig.take_sent()
    assert spec_of(submit).caches == (CacheUse("a", "e" * 64, 7),)


def test_a_broker_about_to_go_leaves_the_jobs_to_the_next() -> None:
    rig = up()
    rig.submit(order("j1", terms=A))
    number = rig.sent[-1][0]

    news = rig.tell(messages.Refusal("draining", "bye"), number)

    assert [each for each in news if isinstance(each, JobsRefused)] == []
    assert rig.machine.pending == 1
    rig.reconnect()
    answer(rig, "a")
    assert [said.ids for said in rig.take_sent()] == [["j1"]]


def test_a_job_refused_for_its_cache_has_the_next_one_ask_again() -> None:
    rig = up()
    rig.submit(order("j1", terms=A))
    answer(rig, "a")
    number = rig.sent[-1][0]
    refused = [messages.Refused(number, -1, "unknown_cache", "gone")]

    rig.tell(messages.Accepted([number], refused))
    rig.take_sent()
    rig.submit(order("j2", terms=A))

    assert [type(said) for said in rig.take_sent()] == [Ask]


def test_blobs_of_jobs_travel_by_offset() -> None:
    rig = up()
    terms = make_terms("p", FORM_PROGRAM, {})

    rig.submit(Order("j1", b"1", terms), Order("j2", b"2", terms, [("d" * 64, 5)]), order("plain"))

    program, plain = rig.take_sent()
    assert program.blobs == {1: [("d" * 64, 5)]}
    assert plain.blobs == {}
