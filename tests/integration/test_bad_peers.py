"""What strangers and broken peers can say to a real broker over a real socket.

Whatever it is: the one who said it gets a refusal with a code and a sentence, nothing of it is
applied, the broker lives, and a client beside it does not notice.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.integration.processes import Child, Site, wait_workers
from tests.integration.raw import RawPeer, spec_of, submit

import ekiden
from ekiden import errors, limits
from ekiden.errors import EkidenError
from ekiden.model.jobs import FORM_CALL, Needs, Route
from ekiden.wire import messages as m
from ekiden.wire.frames import encode_frame, frame_of
from ekiden.wire.session import error_from
from ekiden.world.keys import find_key

BIG = 2**64 - 1
DEEP = b"\x91" * 100_000 + b"\xc0"  # a list in a list in a list …


class Grid:
    """A broker and a worker that all tests here attack, and a client that must not suffer."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.broker = site.start_broker("--waiting-max", "50")
        self.key = find_key(site.address, key_file=site.data / "key")
        self.bystander = site.client("bystander")
        site.start_worker()
        wait_workers(self.bystander)
        self._checks = 0

    def peer(self, role: str = m.ROLE_CLIENT, name: str = "") -> RawPeer:
        return RawPeer(self.site.address).hello(
            self.key, role=role, name=name or f"raw-{os.urandom(4).hex()}"
        )

    def check_unharmed(self) -> None:
        """The same process serves the same connection as before."""
        self._checks += 1
        payload = b"still here %d" % self._checks
        assert self.bystander.submit("echo", payload=payload).result(20).output == payload
        assert self.broker.alive


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    site = Site(tmp_path_factory.mktemp("bad-peers"))
    try:
        yield Grid(site)
    finally:
        site.close()


@pytest.fixture(autouse=True)
def unharmed(grid: Grid) -> Iterator[None]:
    connected = grid.bystander.connected
    yield
    assert connected
    grid.check_unharmed()


def told(error: Any, code: str) -> EkidenError:
    """A refusal of that code, with a sentence for people."""
    assert isinstance(error, EkidenError), error
    assert (error.code, bool(error.message)) == (code, True), error
    return error


def last_words(peer: RawPeer) -> EkidenError:
    """The refusal before the broker hung up."""
    message = peer.message()
    assert isinstance(message, m.Refusal), message
    assert peer.message() is None, "the connection stayed open"
    return error_from(message)


# ------------------------------------------------------------------ bytes that are no frames


def damaged(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


def with_flags(frame: bytes, flags: int) -> bytes:
    """The frame with these flags and a checksum that fits."""
    import google_crc32c

    rest = frame[8:9] + bytes([flags]) + frame[10:]
    return frame[:4] + struct.pack("<I", google_crc32c.value(rest)) + rest


PUBLISH = encode_frame(m.Publish("news", b"x" * 50), 1)

GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("16030100f8010000f40303") + bytes(240),
    "noise": bytes(range(256)) * 4,
    "zeros": bytes(1000),
    "damaged": damaged(PUBLISH),
    "huge": struct.pack("<I", 1 << 31) + bytes(100),
    "flags": with_flags(PUBLISH, 0x80),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_from_a_stranger_is_told_so_and_hung_up_on(grid: Grid, what: str) -> None:
    with RawPeer(grid.site.address) as peer:
        peer.send(GARBAGE[what])
        told(last_words(peer), "bad_frame")


# The first bytes of TLS make a length that a member may send; the rest never comes.
@pytest.mark.parametrize("what", [what for what in GARBAGE if what != "tls"])
def test_garbage_from_a_member_is_told_so_and_hung_up_on(grid: Grid, what: str) -> None:
    with grid.peer() as peer:
        peer.send(GARBAGE[what])
        told(last_words(peer), "bad_frame")


def test_a_frame_over_the_limit_is_refused_before_it_is_read(grid: Grid) -> None:
    with grid.peer() as peer:
        peer.send(frame_of(54, bytes(limits.FRAME_BYTES_MAX + 1), 1))
        error = told(last_words(peer), "bad_frame")
        assert f"{limits.FRAME_BYTES_MAX:,}" in str(error)


def test_a_stranger_may_send_no_more_than_a_hello(grid: Grid) -> None:
    with RawPeer(grid.site.address) as peer:
        peer.send(frame_of(1, bytes(5000), 1))
        error = told(last_words(peer), "bad_frame")
        assert f"{limits.FRAME_BYTES_MAX_BEFORE_HELLO:,}" in str(error)


@pytest.mark.parametrize("number", [0, 8, 29, 99, 255])
def test_an_unknown_type_is_refused(grid: Grid, number: int) -> None:
    with grid.peer() as peer:
        peer.say_bytes(number, b"\x90")
        assert str(number) in str(told(last_words(peer), "bad_frame"))


@pytest.mark.parametrize("number", sorted(m.NAME_OF))
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xa1x", b"\x91" * 9 + b"\xc0", DEEP, b"\x81\x01"])
def test_a_malformed_body_of_any_type_is_refused(grid: Grid, number: int, body: bytes) -> None:
    with grid.peer() as peer:
        peer.say_bytes(number, body)
        assert m.NAME_OF[number] in str(told(last_words(peer), "bad_frame"))


def test_a_conversation_cut_short_leaves_nothing_behind(grid: Grid) -> None:
    frame = encode_frame(submit(["half"], [b"x" * 1000]), 1)
    for cut in (1, 4, 27, 28, 500, len(frame) - 1):
        with grid.peer() as peer:
            peer.send(frame[:cut])
    with pytest.raises(errors.UnknownJob):
        grid.bystander.job("half")


# ------------------------------------------------------------------ hellos


def hello(**changes: Any) -> m.HelloClient:
    fields: dict[str, Any] = {
        "protocol": limits.PROTOCOL_VERSION,
        "client": "stranger",
        "session": "s1",
        "nonce": bytes(16),
    }
    return m.HelloClient(**{**fields, **changes})


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (hello(protocol=99), "version"),
        (hello(protocol=0), "version"),
        (hello(client=""), "bad_id"),
        (hello(client="a b"), "bad_id"),
        (hello(client="x" * 200), "bad_id"),
        (hello(session="\n"), "bad_id"),
        (hello(nonce=b""), "bad_frame"),
        (hello(nonce=bytes(65)), "bad_frame"),
        (m.Proof(bytes(32)), "bad_frame"),
        (m.Ask("stats"), "bad_frame"),
        (submit(["before-hello"]), "bad_frame"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, m.Message) else value,
)
def test_a_hello_that_is_none_is_refused(grid: Grid, message: m.Message, code: str) -> None:
    with RawPeer(grid.site.address) as peer:
        peer.say(message)
        assert told(last_words(peer), code).remedy


@pytest.mark.parametrize("mac", [b"", bytes(32), bytes(1000)])
def test_a_wrong_proof_is_refused(grid: Grid, mac: bytes) -> None:
    with RawPeer(grid.site.address) as peer:
        peer.say(hello())
        assert isinstance(peer.message(), m.Challenge)
        peer.say(m.Proof(mac))
        assert "key" in told(last_words(peer), "unauthenticated").remedy


def test_a_silent_stranger_is_hung_up_on(grid: Grid) -> None:
    with RawPeer(grid.site.address) as silent, RawPeer(grid.site.address) as slow:
        slow.send(encode_frame(hello())[:10])
        for peer in (silent, slow):
            assert "in time" in str(told(last_words(peer), "bad_frame"))


# ------------------------------------------------------------------ submits

LABELS = tuple((f"l{n:03}", "v") for n in range(limits.LABELS_MAX + 1))


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (submit([]), "bad_request"),
        (submit([f"n{n}" for n in range(limits.BATCH_JOBS_MAX + 1)]), "bad_request"),
        (submit(["x"], digests=b""), "bad_request"),
        (submit(["x"], bodies=[]), "bad_request"),
        (submit(["a b"]), "bad_id"),
        (submit([""]), "bad_id"),
        (submit(["x" * 129]), "bad_id"),
        (submit(["a\nb"]), "bad_id"),
        (submit(["x"], [bytes(limits.PAYLOAD_BYTES_MAX + 1)]), "too_large"),
        (submit(["x"], delay_ns=-1), "bad_request"),
        (submit(["x"], delay_ns=BIG), "bad_request"),
        (submit(["x"], not_before=-1), "bad_request"),
        (submit(["x"], spec=msgspec.Raw(b"\xc0")), "bad_request"),
        (submit(["x"], spec=msgspec.Raw(b"\x91" * 500 + b"\xc0")), "bad_request"),
        (submit(["x"], spec=spec_of("a..b")), "bad_subject"),
        (submit(["x"], spec=spec_of("")), "bad_subject"),
        (submit(["x"], spec=spec_of("jobs.*")), "bad_subject"),
        (submit(["x"], spec=spec_of("jobs.>")), "bad_subject"),
        (submit(["x"], spec=spec_of("a\x00b")), "bad_subject"),
        (submit(["x"], spec=spec_of("a b")), "bad_subject"),
        (submit(["x"], spec=spec_of("a." * 16 + "b")), "bad_subject"),
        (submit(["x"], spec=spec_of("a" * 257)), "bad_subject"),
        (submit(["x"], spec=spec_of(name="")), "bad_id"),
        (submit(["x"], spec=spec_of(name="n" * 129)), "bad_id"),
        (submit(["x"], spec=spec_of(priority=10)), "bad_request"),
        (submit(["x"], spec=spec_of(timeout_ns=-1)), "bad_request"),
        (submit(["x"], spec=spec_of(max_attempts=1001)), "bad_request"),
        (submit(["x"], spec=spec_of(form=7)), "bad_request"),
        (submit(["x"], spec=spec_of(retry_on=("bad luck",))), "bad_request"),
        (submit(["x"], spec=spec_of(run="a\nb")), "bad_request"),
        (submit(["x"], spec=spec_of(route=Route("s", key="k" * 200))), "bad_request"),
        (submit(["x"], spec=spec_of(route=Route("s", pin="\x1b[2J"))), "bad_request"),
        (submit(["x"], spec=spec_of(route=Route("s", Needs(cpu_milli=-1)))), "bad_request"),
        (submit(["x"], spec=spec_of(route=Route("s", Needs(labels=LABELS)))), "bad_request"),
        (submit(["x"], spec=spec_of(route=Route("s", Needs(labels=(("z" * 500, "v"),))))), "bad_request"),
    ],
)  # fmt: skip
def test_a_submit_that_cannot_be_meant_is_refused_as_a_whole(
    grid: Grid, message: m.Submit, code: str
) -> None:
    with grid.peer() as peer:
        (error,) = peer.answer_to(peer.say(message))
        assert told(error, code).remedy
        assert peer.answer_to(peer.say(submit(["fine-after-all"]))) == []
    for job_id in message.ids[:1]:
        with pytest.raises(errors.EkidenError):
            grid.bystander.job(job_id)


def test_one_bad_job_of_a_submit_takes_no_other_with_it(grid: Grid) -> None:
    with grid.peer() as peer:
        assert peer.answer_to(peer.say(submit(["one", "two"], [b"1", b"2"]))) == []
        again = submit(["zero", "one", "two", "three"], [b"0", b"1", b"other", b"3"])
        (error,) = peer.answer_to(peer.say(again))
        told(error, "conflict")
        assert "'two'" in error.message
    for job_id in ("zero", "one", "two", "three"):
        assert grid.bystander.job(job_id)["state"] == "queued"
    grid.bystander.cancel(["zero", "one", "two", "three"])


def test_a_full_queue_refuses_until_there_is_room(grid: Grid) -> None:
    spec = spec_of("job.assign.full")
    ids = [f"full-{n}" for n in range(50)]
    with grid.peer() as peer:
        assert peer.answer_to(peer.say(submit(ids, spec=spec))) == []
        (error,) = peer.answer_to(peer.say(submit(["one-more"], spec=spec)))
        told(error, "queue_full")
        assert error.retry_after_s > 0
        assert "job.assign.full" in error.message

        with pytest.raises(errors.QueueFull):
            grid.bystander.submit("full").result(20)
        command = ("submit", "full", "--json")
        refused = grid.site.run(*command)
        assert (refused.code, refused.error["code"]) == (4, "queue_full")

        grid.bystander.cancel(ids[:1])
        assert peer.answer_to(peer.say(submit(["one-more"], spec=spec))) == []
    grid.bystander.cancel([*ids[1:], "one-more"])


def test_args_nested_too_deep_fail_the_job_and_not_the_worker(grid: Grid) -> None:
    body = b"\x92\xc4\x00\x91" + DEEP
    spec = spec_of("job.assign.echo", name="echo", form=FORM_CALL, max_attempts=1)
    with grid.peer() as peer:
        assert peer.answer_to(peer.say(submit(["too-deep"], [body], spec=spec))) == []
    with pytest.raises(errors.JobFailed):
        grid.bystander.attach("too-deep").result(20)


# ------------------------------------------------------------------ questions, relay

STRANGE = [
    None, 0, -1, BIG, -(2**63), 1.5, float("inf"), float("nan"), "", "\x00", "a..b", b"\xff", [],
    [1], [None], [["x"]], {}, {"state": 1}, {"state": "odd"}, {"subject": 5}, {"client": []}, True,
]  # fmt: skip
VERBS = ["jobs", "job", "cancel", "replay", "purge", "drain", "resume"]
PARAMS = ["id", "ids", "filter", "state", "subject", "client", "run", "limit", "after", "worker"]


@pytest.mark.parametrize("verb", VERBS)
def test_strange_parameters_are_answered_or_refused(grid: Grid, verb: str) -> None:
    with grid.peer() as peer:
        for name in PARAMS:
            for value in STRANGE:
                if verb == "cancel" and name == "filter" and value == {}:
                    continue  # that means everything, and it is meant
                answer = peer.ask(verb, **{name: value})
                assert answer is not None, f"hung up on after {verb} {name}={value!r}"
                if isinstance(answer, EkidenError):
                    assert isinstance(answer, errors.Refusal)
                    assert answer.message


@pytest.mark.parametrize("verb", ["", "nope", "stats; drop", "x" * 5000])
def test_an_unknown_verb_is_refused(grid: Grid, verb: str) -> None:
    with grid.peer() as peer:
        assert "stats" in told(peer.ask(verb), "bad_request").remedy


@pytest.mark.parametrize("verb", ["job"])
def test_an_unknown_job_is_refused(grid: Grid, verb: str) -> None:
    with grid.peer() as peer:
        told(peer.ask(verb, id="never-heard-of"), "unknown_job")
    with pytest.raises(errors.UnknownJob):
        grid.bystander.attach("never-heard-of").result(20)
    for words in (("jobs", "show"), ("wait",)):
        refused = grid.site.run(*words, "never-heard-of", "--json")
        assert (refused.code, refused.error["code"]) == (4, "unknown_job")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (m.Subscribe(1, "a..b"), "bad_subject"),
        (m.Subscribe(1, "a.>.b"), "bad_subject"),
        (m.Publish("a.*", b""), "bad_subject"),
        (m.Publish("news", bytes(limits.PAYLOAD_BYTES_MAX + 1)), "too_large"),
        (m.Join([">"], 1, 1), "bad_request"),
        (m.Ack([]), "bad_request"),
        (m.Credit(5), "bad_request"),
        (m.Progress(1, 1, b"x"), "bad_request"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, m.Message) else value,
)
def test_what_a_client_may_not_say_is_refused_and_it_may_go_on(
    grid: Grid, message: m.Message, code: str
) -> None:
    with grid.peer() as peer:
        assert told(peer.answer_to(peer.say(message)), code).remedy
        assert isinstance(peer.ask("stats"), dict)


@pytest.mark.parametrize(
    "message", [hello(), m.Accepted([1]), m.Assign([]), m.Welcome(b"", "", "", 1, 1, 1, 1)]
)
def test_what_only_a_broker_says_ends_the_conversation(grid: Grid, message: m.Message) -> None:
    with grid.peer() as peer:
        peer.say(message)
        assert told(last_words(peer), "bad_frame").remedy


# ------------------------------------------------------------------ workers


@pytest.mark.parametrize(
    "message",
    [
        m.Join([], 1, 1),
        m.Join(["x"] * 1001, 1, 1),
        m.Join([">"], 0, 1),
        m.Join([">"], BIG, 1),
        m.Join([">"], 1, -1),
        m.Join([">"], 1, BIG),
        m.Join([">"], 1, 1, dict(LABELS)),
        m.Join([">"], 1, 1, {"a": "v" * 1000}),
        m.Join([">"], 1, 1, {}, -5, 0),
        m.Join([">"], 1, 1, {}, BIG, BIG),
    ],
)
def test_a_worker_that_cannot_be_is_not_taken_in(grid: Grid, message: m.Join) -> None:
    with grid.peer(m.ROLE_WORKER) as peer:
        assert told(peer.answer_to(peer.say(message)), "bad_request").remedy
        answer = peer.ask("workers")
        assert [worker["id"] for worker in answer["workers"]] == ["w1"]


def test_a_lying_worker_settles_nothing_it_does_not_hold(grid: Grid) -> None:
    subject = "job.assign.precious"
    ids = [f"precious-{n}" for n in range(4)]
    run, failure = m.AckRun, m.Failure
    with grid.peer() as owner, grid.peer(m.ROLE_WORKER) as honest, grid.peer(m.ROLE_WORKER) as liar:
        assert owner.answer_to(owner.say(submit(ids, spec=spec_of(subject, max_attempts=1)))) == []
        liar.say(m.Join(["elsewhere"], 1, 1))
        honest.say(m.Join([subject], 4, 4))
        assign = honest.message()
        assert isinstance(assign, m.Assign)
        grant = assign.runs[0].grant

        for ack in (
            run(grant, None, [b"stolen"] * 4),
            run(grant, [0], [b"stolen"]),
            run(grant, None, [], failures=[failure(1, "timeout")]),
            run(grant, None, [], released=[2]),
            run(BIG, [0], [b"nobody's"]),
        ):
            liar.say(m.Ack([ack]))
        liar.say(m.Beat([(grant, 0, BIG), (grant, -1, 5), (BIG, BIG, BIG)], -5))
        liar.say(m.Progress(grant, 0, b"lies"))
        assert isinstance(liar.ask("stats"), dict)
        assert {owner.ask("job", id=i)["state"] for i in ids} <= {"leased", "running"}

        # An ack with offsets that cannot be is dropped as a whole; the good one counts.
        honest.say(m.Ack([run(grant, [-1, 99, BIG, 0, 0], [b"a", b"b", b"c", b"d", b"e"])]))
        honest.say(m.Ack([run(grant, None, [], failures=[failure(-1, "oom"), failure(99, "oom")])]))
        honest.say(m.Ack([run(grant, None, [], released=[-1, 99])]))
        honest.say(m.Ack([run(grant, [0, 1, 2, 3, 3], [b"true"] * 4 + [b"late"])]))
        assert isinstance(honest.ask("stats"), dict)
    for job_id in ids:
        assert grid.bystander.attach(job_id).result(20).output == b"true"


@pytest.mark.parametrize(
    ("ack", "code"),
    [
        (m.AckRun(1, [0], [b"a", b"b"]), "bad_request"),
        (m.AckRun(1, [0], [bytes(limits.PAYLOAD_BYTES_MAX + 1)]), "too_large"),
        (m.AckRun(1, None, [], failures=[m.Failure(0, "bad luck")]), "bad_request"),
    ],
)
def test_an_ack_that_makes_no_sense_is_refused(grid: Grid, ack: m.AckRun, code: str) -> None:
    with grid.peer(m.ROLE_WORKER) as peer:
        peer.say(m.Join(["elsewhere"], 1, 1))
        told(peer.answer_to(peer.say(m.Ack([ack]))), code)
        assert isinstance(peer.ask("stats"), dict)


def test_at_the_end_the_broker_is_the_one_that_was_started_and_its_journal_is_sound(
    grid: Grid,
) -> None:
    broker: Child = grid.broker
    warnings = [json.loads(line) for line in broker.logged().splitlines()]
    assert {line["level"] for line in warnings} <= {"info", "warning"}
    assert grid.site.run("log", "verify", str(grid.site.data), "--json").json["ok"]
    assert isinstance(grid.bystander, ekiden.Client)
