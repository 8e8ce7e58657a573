"""What users say about a job, and what travels."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from ekiden import errors, limits
from ekiden.client import options, settings
from ekiden.client.options import TermsBook, make_body, make_needs, make_terms, to_bytes
from ekiden.model.jobs import FORM_CALL, FORM_PLAIN, Call, Needs, Route, Spec


def spec_of(terms):
    return msgspec.msgpack.decode(terms.spec, type=Spec)


def test_a_job_without_options_goes_to_the_subject_of_its_name():
    terms = make_terms("echo", FORM_PLAIN, {})

    assert spec_of(terms) == Spec("echo", Route("job.assign.echo"))
    assert (terms.delay_ns, terms.not_before, terms.expires_at) == (0, 0, 0)


def test_every_option_has_its_place():
    terms = make_terms(
        "render",
        FORM_PLAIN,
        {
            "subject": "farm.4k",
            "priority": -3,
            "delay_s": 1.5,
            "not_before": datetime(2030, 1, 1, tzinfo=UTC),
            "expires_at": 2e9,
            "timeout_s": 60,
            "max_attempts": 5,
            "retry_on": ["timeout", "oom"],
            "needs": {"cpu": 0.5, "mem_mb": 4000, "label": {"gpu": "a100"}},
            "key": "customer 7",
            "run": "nightly",
            "pin": "w1",
        },
    )

    assert spec_of(terms) == Spec(
        "render",
        Route("farm.4k", Needs(500, 4000, (("gpu", "a100"),)), "customer 7", "w1"),
        -3,
        60 * limits.NS,
        5,
        ("timeout", "oom"),
        FORM_PLAIN,
        "nightly",
    )
    assert terms.delay_ns == 1_500_000_000
    assert terms.not_before == 1_893_456_000 * limits.NS
    assert terms.expires_at == 2_000_000_000 * limits.NS


@pytest.mark.parametrize(
    "label",
    [{"gpu": "a100", "os": "linux"}, ["os=linux", "gpu=a100"], ("gpu=a100", "os=linux")],
)
def test_labels_come_in_several_shapes_and_leave_sorted(label):
    assert make_needs({"label": label}).labels == (("gpu", "a100"), ("os", "linux"))


def test_one_label_may_be_text():
    assert make_needs({"cpu": 2, "label": "gpu=a100=x"}) == Needs(2000, 0, (("gpu", "a100=x"),))


@pytest.mark.parametrize(
    ("name", "given", "kind"),
    [
        ("no spaces", {}, errors.BadId),
        ("", {}, errors.BadId),
        ("a..b", {}, errors.BadSubject),
        ("echo", {"subject": "a.*"}, errors.BadSubject),
        ("echo", {"subject": "a" * 1000}, errors.BadSubject),
        ("echo", {"priority": 10}, errors.WrongUsage),
        ("echo", {"priority": 1.5}, errors.WrongUsage),
        ("echo", {"priority": True}, errors.WrongUsage),
        ("echo", {"delay_s": -1}, errors.WrongUsage),
        ("echo", {"delay_s": float("nan")}, errors.WrongUsage),
        ("echo", {"delay_s": float("inf")}, errors.WrongUsage),
        ("echo", {"timeout_s": "10"}, errors.WrongUsage),
        ("echo", {"timeout_s": 1e12}, errors.WrongUsage),
        ("echo", {"max_attempts": -1}, errors.WrongUsage),
        ("echo", {"max_attempts": 1001}, errors.WrongUsage),
        ("echo", {"retry_on": ["bad luck"]}, errors.WrongUsage),
        ("echo", {"needs": {"gpus": 1}}, errors.WrongUsage),
        ("echo", {"needs": {"cpu": -1}}, errors.WrongUsage),
        ("echo", {"needs": {"mem_mb": 1.5}}, errors.WrongUsage),
        ("echo", {"needs": {"label": "gpu"}}, errors.WrongUsage),
        ("echo", {"needs": {"label": {f"l{n}": "x" for n in range(33)}}}, errors.WrongUsage),
        ("echo", {"needs": {"label": {"a": "\ud800"}}}, errors.BadId),
        ("echo", {"key": "x" * 129}, errors.BadId),
        ("echo", {"run": "a\nb"}, errors.BadId),
        ("echo", {"pin": "a b"}, errors.BadId),
        ("echo", {"prio": 1}, errors.WrongUsage),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_call(name, given, kind):
    with pytest.raises(kind) as refused:
        make_terms(name, FORM_PLAIN, given)

    assert refused.value.remedy


def test_terms_are_made_once_per_set_of_options():
    book = TermsBook()

    first = book.terms("echo", FORM_PLAIN, {"priority": 1})
    other = book.terms("echo", FORM_PLAIN, {"priority": 2})

    assert book.terms("echo", FORM_PLAIN, {"priority": 1}) is first
    assert book.terms("echo", FORM_PLAIN, {"priority": 2}) is other
    assert book.terms("echo", FORM_PLAIN, {}) is book.terms("echo", FORM_PLAIN, {})
    assert book.terms("echo", FORM_CALL, {}) is not book.terms("echo", FORM_PLAIN, {})


def test_an_option_changed_in_place_is_noticed():
    book = TermsBook()
    needs = {"cpu": 1}
    first = book.terms("echo", FORM_PLAIN, {"needs": needs})

    needs["cpu"] = 2

    assert spec_of(book.terms("echo", FORM_PLAIN, {"needs": needs})).route.needs.cpu_milli == 2000
    assert spec_of(first).route.needs.cpu_milli == 1000


def test_a_new_deadline_for_every_job_does_not_fill_memory():
    book = TermsBook()

    for n in range(options._TERMS_KEPT + 10):
        book.terms("echo", FORM_PLAIN, {"expires_at": float(n)})

    assert len(book._known) <= options._TERMS_KEPT


@pytest.mark.parametrize(
    ("payload", "sent"),
    [
        (b"raw", b"raw"),
        (bytearray(b"raw"), b"raw"),
        (memoryview(b"raw"), b"raw"),
        ("Grüße", "Grüße".encode()),
        ({"a": [1, None]}, b'{"a":[1,null]}'),
        (7, b"7"),
        (None, b"null"),
    ],
)
def test_payloads_are_bytes_text_or_json(payload, sent):
    assert to_bytes(payload) == sent


@pytest.mark.parametrize("payload", [object(), "\ud800", {1j: 2}])
def test_a_payload_that_cannot_be_sent_says_so(payload):
    with pytest.raises(errors.WrongUsage, match="cannot be sent"):
        to_bytes(payload)


def test_args_make_the_body_a_call():
    form, body = make_body(b"data", ("--mode", 3))

    assert form == FORM_CALL
    assert msgspec.msgpack.decode(body, type=Call) == Call(b"data", ["--mode", 3])


@pytest.mark.parametrize("args", [(object(),), (1 << 70,), ("\ud800",)])
def test_args_that_cannot_be_sent_say_so(args):
    with pytest.raises(errors.WrongUsage, match="args cannot be sent"):
        make_body(b"", args)


def test_a_payload_over_the_limit_is_refused():
    make_body(b"x" * limits.PAYLOAD_BYTES_MAX, ())

    with pytest.raises(errors.TooLarge, match="524,289 bytes"):
        make_body(b"x" * (limits.PAYLOAD_BYTES_MAX + 1), ())


def test_the_default_client_id_is_usable_whoever_and_wherever_we_are(monkeypatch):
    monkeypatch.setattr(settings.getpass, "getuser", lambda: "Jörg van Dÿk")
    monkeypatch.setattr(settings.platform, "node", lambda: "host name.local")

    assert settings.default_client_id() == "J-rg-van-D-k@host-name.local"


@pytest.mark.parametrize("year", [1969, 2117, 9999])
def test_a_wall_time_that_no_broker_can_store_is_refused(year):
    when = datetime(year, 1, 1, tzinfo=UTC)

    with pytest.raises(errors.WrongUsage, match="not_before"):
        make_terms("echo", FORM_PLAIN, {"not_before": when})
    with pytest.raises(errors.WrongUsage, match="expires_at"):
        make_terms("echo", FORM_PLAIN, {"expires_at": when})


def test_a_user_without_a_name_has_an_id_too(monkeypatch):
    def nobody():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(settings.getpass, "getuser", nobody)

    assert settings.default_client_id().startswith("user@")


def test_addresses_are_given_or_in_the_environment_or_local(monkeypatch):
    monkeypatch.delenv("EKIDEN_CONNECT", raising=False)
    assert settings.addresses_of(None) == ["127.0.0.1:7000"]
    monkeypatch.setenv("EKIDEN_CONNECT", "a:1, b:2")
    assert settings.addresses_of(None) == ["a:1", "b:2"]
    assert settings.addresses_of("c:3") == ["c:3"]
    with pytest.raises(errors.WrongUsage):
        settings.addresses_of("nonsense")
