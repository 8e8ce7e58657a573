"""What the client's machine says to a broker and tells above: jobs, questions, the relay."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from tests.unit.client.rig import TERMS, Rig, order, run_of

from ekiden import errors, limits
from ekiden.client.contract import (
    Answered,
    Asking,
    AskRefused,
    Attaching,
    Deliveries,
    JobsAccepted,
    JobsDone,
    JobsEnded,
    JobsRefused,
    Leaving,
    LinkDown,
    LinkUp,
    Order,
    ProgressMade,
    Publishing,
    Submitting,
    SubscribeRefused,
    Subscribing,
    Terms,
    Unsubscribing,
)
from ekiden.wire import messages
from ekiden.wire.messages import Ended, Refused


@pytest.fixture
def rig():
    made = Rig("a:1")
    made.connect()
    made.sent.clear()
    return made


def ids_of(submits):
    return [submit.ids for submit in submits]


# ------------------------------------------------------------------ submit


def test_jobs_of_a_turn_travel_in_one_frame(rig):
    orders = [order(f"j{n}", b"body %d" % n) for n in range(3)]
    for each in orders:
        rig.machine.receive(Submitting([each]), rig.now)

    rig.turn()

    [submit] = rig.take_sent()
    assert submit.ids == ["j0", "j1", "j2"]
    assert submit.bodies == [b"body 0", b"body 1", b"body 2"]
    assert submit.digests == b"".join(hashlib.sha256(b).digest()[:8] for b in submit.bodies)
    assert bytes(submit.spec) == TERMS.spec


def test_jobs_of_other_terms_travel_apart_and_in_order(rig):
    later = Terms(TERMS.spec, delay_ns=5)
    alike = Terms(bytes(bytearray(TERMS.spec)))

    rig.submit(order("a"), order("b", terms=alike), order("c", terms=later), order("d"))

    submits = rig.take_sent()
    assert ids_of(submits) == [["a", "b"], ["c"], ["d"]]
    assert [submit.delay_ns for submit in submits] == [0, 5, 0]


def test_wall_times_travel_with_their_jobs(rig):
    rig.submit(order("a", terms=Terms(TERMS.spec, 0, 7, 9)))

    [submit] = rig.take_sent()
    assert (submit.not_before, submit.expires_at) == (7, 9)


def test_a_frame_holds_at_most_a_thousand_jobs(rig):
    rig.submit(*[order(f"j{n}") for n in range(2500)])

    assert [len(submit.ids) for submit in rig.take_sent()] == [1000, 1000, 500]


def test_a_frame_holds_at_most_its_bytes_and_one_large_job_travels_alone(rig):
    large = limits.PAYLOAD_BYTES_MAX
    sizes = [100_000, 100_000, 100_000, large, 10]

    rig.submit(*[order(f"j{n}", b"x" * size) for n, size in enumerate(sizes)])

    submits = rig.take_sent()
    assert ids_of(submits) == [["j0", "j1"], ["j2"], ["j3"], ["j4"]]
    assert max(len(msgspec.msgpack.encode(s)) for s in submits) <= limits.FRAME_BYTES_MAX


def test_one_job_per_frame_if_asked_for():
    rig = Rig("a:1", batch_jobs=1)
    rig.connect()
    rig.sent.clear()

    rig.submit(order("a"), order("b"))

    assert ids_of(rig.take_sent()) == [["a"], ["b"]]


def test_jobs_on_the_wire_without_an_answer_are_bounded(rig):
    many = limits.CLIENT_WINDOW_JOBS + 1500
    rig.submit(*[order(f"j{n}") for n in range(many)])

    first = [number for number, _ in rig.sent]
    assert sum(len(s.ids) for s in rig.take_sent()) == limits.CLIENT_WINDOW_JOBS
    assert rig.machine.pending == many
    rig.tell(messages.Accepted(first[:2]))

    assert [len(submit.ids) for submit in rig.take_sent()] == [1000, 500]


def test_bytes_on_the_wire_without_an_answer_are_bounded(rig):
    rig.submit(*[order(f"j{n}", b"x" * 500_000) for n in range(100)])

    sent = sum(len(body) for submit in rig.take_sent() for body in submit.bodies)

    assert sent <= limits.CLIENT_WINDOW_BYTES + limits.PAYLOAD_BYTES_MAX


def test_acceptance_is_told_once_for_all_frames_of_a_turn(rig):
    orders = [order(f"j{n}") for n in range(1500)]
    rig.submit(*orders)

    news = rig.accept_all()

    assert news == [JobsAccepted(orders)]
    assert rig.machine.pending == 0
    assert rig.machine.open_jobs == 1500


def test_a_refused_job_does_not_take_the_others_with_it(rig):
    a, b, c = order("a"), order("b"), order("c")
    rig.submit(a, b, c)
    [(number, _)] = rig.sent

    news = rig.tell(
        messages.Accepted([number], [Refused(number, 1, "conflict", "taken", "choose", 1500)])
    )

    assert news[0] == JobsAccepted([a, c])
    [(handle, error)] = news[1].pairs
    assert handle is b
    assert isinstance(error, errors.Conflict)
    assert (error.message, error.remedy, error.retry_after_s) == ("taken", "choose", 1.5)
    assert rig.machine.open_jobs == 2


def test_a_whole_frame_can_be_refused_in_every_way(rig):
    rig.submit(order("a"), order("b"))
    [(number, _)] = rig.sent
    news = rig.tell(messages.Accepted([number], [Refused(number, -1, "queue_full", "full")]))
    assert [(h.job_id, e.code) for h, e in news[0].pairs] == [
        ("a", "queue_full"),
        ("b", "queue_full"),
    ]

    rig.sent.clear()
    rig.submit(order("c"))
    [(number, _)] = rig.sent
    news = rig.tell(messages.Refusal("bad_subject", "no"), corr_id=number)
    assert [(h.job_id, e.code) for h, e in news[0].pairs] == [("c", "bad_subject")]

    rig.sent.clear()
    rig.submit(order("d"))
    [(number, _)] = rig.sent
    news = rig.tell(messages.Accepted([], [Refused(number, -1, "disk_full", "full")]))
    assert [(h.job_id, e.code) for h, e in news[0].pairs] == [("d", "disk_full")]

    assert rig.machine.pending == rig.machine.open_jobs == 0


def test_a_broker_that_drains_gets_no_more_and_the_next_gets_all_in_order(rig):
    rig.submit(order("a"), order("b"))
    rig.submit(order("c"))
    numbers = [number for number, _ in rig.sent]

    for number in numbers:
        news = rig.tell(messages.Refusal("draining", "going down"), corr_id=number)
        assert news == []
    rig.sent.clear()
    rig.submit(order("d"))

    assert rig.take_sent() == []
    assert rig.machine.pending == 4
    rig.reconnect()
    assert ids_of(rig.take_sent()) == [["a", "b", "c", "d"]]


# ------------------------------------------------------------------ reconnect


def test_submits_before_the_first_connection_wait_for_it():
    rig = Rig("a:1")
    rig.submit(order("a"))
    rig.submit(order("b"))

    rig.connect()

    assert ids_of(rig.take_sent(messages.Submit)) == [["a", "b"]]


def test_a_reconnect_submits_again_exactly_what_was_not_accepted(rig):
    rig.submit(order("accepted"))
    rig.accept_all()
    rig.submit(order("in flight 1"))
    rig.submit(order("in flight 2"))
    rig.sent.clear()
    rig.cut()
    rig.submit(order("new"))

    rig.wait_deadline()
    rig.connect()

    said = rig.take_sent()
    assert [s.ids for s in said if isinstance(s, messages.Submit)] == [
        ["in flight 1", "in flight 2", "new"]
    ]
    assert [s.ids for s in said if isinstance(s, messages.Attach)] == [["accepted"]]


def test_numbers_are_never_used_again_on_another_connection(rig):
    rig.submit(order("a"))
    before = [number for number, _ in rig.sent]

    rig.reconnect()

    assert min(number for number, _ in rig.sent) > max(before)


def test_a_late_answer_to_an_old_number_is_not_taken_for_a_new_one(rig):
    rig.submit(order("a"))
    [(old, _)] = rig.sent
    rig.reconnect()

    news = rig.tell(messages.Accepted([old]))

    assert news == []
    assert rig.machine.pending == 1


def test_what_is_settled_is_neither_submitted_nor_attached_again(rig):
    rig.submit(order("a"), order("b"))
    rig.tell(messages.Results([run_of("a")]))
    rig.accept_all()
    rig.tell(messages.Results([run_of("b")]))

    rig.reconnect()

    assert rig.take_sent() == []


def test_a_job_whose_result_came_before_its_acceptance_is_not_submitted_again(rig):
    rig.submit(order("a"), order("b"))
    rig.tell(messages.Results([run_of("a")]))

    rig.reconnect()

    assert ids_of(rig.take_sent(messages.Submit)) == [["b"]]


def test_an_accepted_job_the_broker_no_longer_knows_is_submitted_again(rig):
    rig.submit(order("a"), order("b"))
    rig.accept_all()
    rig.reconnect()
    [(number, _)] = rig.sent
    rig.sent.clear()

    rig.tell(messages.Attached(["b"]), corr_id=number)

    assert ids_of(rig.take_sent()) == [["b"]]
    assert rig.machine.open_jobs == 2


def test_many_accepted_jobs_are_attached_in_frames_of_bounded_size(rig):
    rig.submit(*[order(f"j{n}") for n in range(2500)])
    rig.accept_all()

    rig.reconnect()

    assert [len(attach.ids) for attach in rig.take_sent()] == [1000, 1000, 500]


def test_the_layer_above_hears_of_the_link_in_order(rig):
    rig.reconnect()

    assert [type(each) for each in rig.news] == [LinkUp, LinkDown, LinkUp]


# ------------------------------------------------------------------ results


def test_results_are_told_as_the_run_they_came_in(rig):
    a, b, c = order("a"), order("b"), order("c")
    rig.submit(a, b, c)
    rig.accept_all()

    news = rig.tell(messages.Results([run_of("b", "a"), run_of("c")]))

    assert news == [JobsDone(run_of("b", "a"), [b, a]), JobsDone(run_of("c"), [c])]
    assert rig.machine.open_jobs == 0


def test_a_duplicate_result_is_ignored(rig):
    a, b = order("a"), order("b")
    rig.submit(a, b)
    rig.accept_all()
    rig.tell(messages.Results([run_of("a")], [Ended("b", "failed")]))

    news = rig.tell(messages.Results([run_of("a")], [Ended("b", "failed")]))

    assert news == []


def test_a_result_nobody_waits_for_leaves_a_hole_in_the_run(rig):
    a = order("a")
    rig.submit(a)

    news = rig.tell(messages.Results([run_of("stranger", "a")]))

    assert news == [JobsDone(run_of("stranger", "a"), [None, a])]


def test_ends_without_a_result_are_told_together(rig):
    a, b = order("a"), order("b")
    rig.submit(a, b)
    ends = [Ended("a", "failed"), Ended("b", "cancelled", [], "expired")]

    news = rig.tell(messages.Results([], ends))

    assert news == [JobsEnded([(a, ends[0]), (b, ends[1])])]


def test_progress_reaches_every_handle_of_the_job(rig):
    a, twin = order("a"), Order("a")
    rig.submit(a)
    rig.accept_all()
    rig.feed(Attaching([twin]))

    news = rig.tell(messages.JobProgress("a", 2, b"50"))

    assert news == [ProgressMade([a, twin], 2, b"50")]
    assert rig.tell(messages.JobProgress("unknown", 1, b"")) == []


# ------------------------------------------------------------------ attach


def test_attach_is_acknowledged_and_then_told(rig):
    handle = Order("old")
    rig.feed(Attaching([handle]))
    [(number, attach)] = rig.sent
    assert attach == messages.Attach(["old"])

    assert rig.tell(messages.Attached([]), corr_id=number) == [JobsAccepted([handle])]
    assert rig.tell(messages.Results([run_of("old")])) == [JobsDone(run_of("old"), [handle])]


def test_attach_to_an_unknown_job_is_refused(rig):
    handle = Order("old")
    rig.feed(Attaching([handle]))
    [(number, _)] = rig.sent

    [refused] = rig.tell(messages.Attached(["old"]), corr_id=number)

    [(told, error)] = refused.pairs
    assert told is handle and isinstance(error, errors.UnknownJob)
    assert rig.machine.open_jobs == 0


def test_attach_before_a_connection_waits_for_it():
    rig = Rig("a:1")
    rig.feed(Attaching([Order("old")]))

    rig.connect()

    assert rig.take_sent() == [messages.Attach(["old"])]


# ------------------------------------------------------------------ several handles of one job


def test_a_job_submitted_twice_is_told_to_both(rig):
    first, second = order("a"), order("a")
    rig.submit(first)
    rig.submit(second)
    rig.accept_all()

    news = rig.tell(messages.Results([run_of("a")]))

    assert news == [JobsDone(run_of("a"), [first]), JobsDone(run_of("a"), [second])]


def test_a_conflicting_twin_never_gets_the_result_of_the_other(rig):
    first, other = order("a", b"one"), order("a", b"two")
    rig.submit(first)
    rig.accept_all()
    rig.submit(other)
    [(number, _)] = rig.sent

    # The result overtakes the refusal, and comes twice.
    assert rig.tell(messages.Results([run_of("a")])) == [JobsDone(run_of("a"), [first])]
    assert rig.tell(messages.Results([run_of("a")])) == []
    news = rig.tell(messages.Accepted([number], [Refused(number, 0, "conflict", "taken")]))

    assert [(h is other, e.code) for h, e in news[0].pairs] == [(True, "conflict")]
    assert rig.machine.open_jobs == 0


def test_a_twin_accepted_after_the_result_asks_for_it_again(rig):
    first, twin = order("a"), order("a")
    rig.submit(first)
    rig.accept_all()
    rig.submit(twin)
    [(number, _)] = rig.sent
    rig.sent.clear()
    rig.tell(messages.Results([run_of("a")]))

    rig.tell(messages.Accepted([number]))

    assert rig.take_sent() == [messages.Attach(["a"])]
    assert rig.tell(messages.Results([run_of("a")])) == [JobsDone(run_of("a"), [twin])]


def test_a_refused_elder_leaves_its_twin_waiting(rig):
    first, twin = order("a"), order("a")
    rig.submit(first)
    rig.submit(twin)
    numbers = [number for number, _ in rig.sent]

    rig.tell(messages.Accepted([numbers[0]], [Refused(numbers[0], 0, "queue_full", "full")]))
    rig.tell(messages.Accepted([numbers[1]]))

    assert rig.tell(messages.Results([run_of("a")])) == [JobsDone(run_of("a"), [twin])]


def test_twins_survive_a_reconnect(rig):
    first, twin, watcher = order("a"), order("a"), Order("a")
    rig.submit(first)
    rig.accept_all()
    rig.submit(twin)
    rig.feed(Attaching([watcher]))

    rig.reconnect()

    said = rig.take_sent()
    assert [s.ids for s in said if isinstance(s, messages.Attach)] == [["a"]]
    assert [s.ids for s in said if isinstance(s, messages.Submit)] == [["a"]]


# ------------------------------------------------------------------ questions


def test_a_question_is_answered_by_its_number(rig):
    rig.feed(Asking("q1", "stats", {}))
    rig.feed(Asking("q2", "job", {"id": "a"}))
    numbers = [number for number, _ in rig.sent]
    assert rig.take_sent() == [messages.Ask("stats", {}), messages.Ask("job", {"id": "a"})]

    assert rig.tell(messages.Answer({"x": 1}), corr_id=numbers[1]) == [Answered("q2", {"x": 1})]
    [refused] = rig.tell(messages.Refusal("not_allowed", "no"), corr_id=numbers[0])
    assert refused.handle == "q1" and isinstance(refused.error, errors.NotAllowed)
    assert rig.tell(messages.Answer({}), corr_id=numbers[1]) == []


def test_harmless_questions_are_asked_again_after_a_reconnect_and_others_are_not(rig):
    rig.feed(Asking("q1", "stats", {}))
    rig.feed(Asking("q2", "replay", {"ids": ["a"]}))
    rig.feed(Asking("q3", "cancel", {"ids": ["a"]}))

    news = rig.cut()
    lost = [each for each in news if isinstance(each, AskRefused)]
    assert [(each.handle, each.error.code) for each in lost] == [("q2", "connection_lost")]
    rig.wait_deadline()
    rig.connect()

    assert [ask.verb for ask in rig.take_sent()] == ["stats", "cancel"]


def test_questions_without_an_answer_are_bounded():
    rig = Rig("a:1")
    for n in range(limits.CLIENT_ASKS_MAX):
        rig.machine.receive(Asking(n, "stats", {}), rig.now)

    [refused] = rig.feed(Asking("one more", "stats", {}))

    assert refused.handle == "one more" and isinstance(refused.error, errors.QueueFull)


# ------------------------------------------------------------------ relay


def test_subscriptions_are_made_again_after_a_reconnect(rig):
    rig.feed(Subscribing(1, "news.>"))
    rig.feed(Subscribing(2, "gone"))
    rig.feed(Unsubscribing(2))
    assert rig.take_sent() == [
        messages.Subscribe(1, "news.>"),
        messages.Subscribe(2, "gone"),
        messages.Unsubscribe(2),
    ]

    rig.reconnect()

    assert rig.take_sent() == [messages.Subscribe(1, "news.>")]


def test_deliveries_of_a_turn_are_told_together(rig):
    rig.feed(Subscribing(1, "a"))
    first, second = messages.Delivery(1, "a", b"1"), messages.Delivery(1, "a", b"2")

    assert rig.tell(first) == [Deliveries([first])]
    assert rig.tell(second) == [Deliveries([second])]


def test_a_refused_subscription_is_told_and_forgotten(rig):
    rig.feed(Subscribing(1, "a..b"))
    [(number, _)] = rig.sent

    [refused] = rig.tell(messages.Refusal("bad_subject", "empty token"), corr_id=number)

    assert isinstance(refused, SubscribeRefused) and refused.sid == 1
    rig.reconnect()
    assert rig.take_sent() == []


def test_what_is_published_while_disconnected_is_kept_up_to_a_bound():
    rig = Rig("a:1")
    for n in range(20):
        rig.feed(Publishing(f"s{n}", b"x" * (1 << 19)))

    rig.connect()

    kept = [publish.subject for publish in rig.take_sent()]
    assert kept == [f"s{n}" for n in range(4, 20)]


def test_publishing_a_lot_while_connected_loses_nothing_between_turns(rig):
    for n in range(20):
        rig.feed(Publishing(f"s{n}", b"x" * (1 << 19)))

    assert len(rig.take_sent()) == 20


# ------------------------------------------------------------------ leaving


def test_leaving_says_goodbye_after_what_was_published_and_ends_what_is_open(rig):
    a = order("a")
    rig.submit(a)
    rig.accept_all()
    rig.machine.receive(Asking("q", "stats", {}), rig.now)
    rig.machine.receive(Publishing("s", b"last"), rig.now)

    news = rig.feed(Leaving())

    assert [type(each) for each in rig.take_sent()] == [messages.Publish, messages.Bye]
    assert rig.closed == [rig.conn]
    assert [each.error.code for each in news if isinstance(each, AskRefused)] == ["closed"]
    [refused] = [each for each in news if isinstance(each, JobsRefused)]
    assert [(h is a, e.code) for h, e in refused.pairs] == [(True, "closed")]
    assert rig.machine.next_deadline() is None


def test_after_leaving_everything_is_refused(rig):
    rig.feed(Leaving())

    news = (
        rig.submit(order("a")) + rig.feed(Attaching([Order("b")])) + rig.feed(Asking("q", "x", {}))
    )

    assert [type(each) for each in news] == [JobsRefused, JobsRefused, AskRefused]
    rig.wait(100)
    assert rig.dialled == ["a:1"]
