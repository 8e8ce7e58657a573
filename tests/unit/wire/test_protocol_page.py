"""docs/PROTOCOL.md says what the code does: fields, codes, limits and the worked example.

`EKIDEN_REWRITE_GOLDEN=1 pytest tests/unit/wire/test_protocol_page.py` writes the example anew.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ekiden import errors, limits
from ekiden.core.subjects import check_pattern, match
from ekiden.errors import BadSubject
from ekiden.machine import Frame
from ekiden.model import caches, jobs
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader, encode_frame
from ekiden.wire.session import Caller, Greeter

PAGE = Path(__file__).parents[3] / "docs" / "PROTOCOL.md"
PARTS = [
    jobs.Spec, caches.CacheUse, jobs.Route, jobs.Needs, messages.Refused, messages.ResultRun, messages.Ended,
    messages.AssignRun, messages.AckRun, messages.Failure, jobs.Cause, jobs.Note,
]  # fmt: skip


def section(title: str) -> str:
    found = re.search(
        rf"^### {re.escape(title)}\n(.*?)(?=^##)",
        PAGE.read_text() + "\n##",
        re.MULTILINE | re.DOTALL,
    )
    assert found, f"docs/PROTOCOL.md has no section {title!r}"
    return found[1]


def fields_on_page(title: str) -> list[tuple[str, bool]]:
    rows = re.findall(r"^\| (\w+) \| [^|]+ \|([^|]*)\|", section(title), re.MULTILINE)
    return [(name, not default.strip()) for name, default in rows if name != "field"]


def fields_in_code(kind: type) -> list[tuple[str, bool]]:
    return [(field.name, field.required) for field in msgspec.structs.fields(kind)]


@pytest.mark.parametrize(
    ("kind", "number"), messages.TYPE_OF.items(), ids=lambda x: getattr(x, "__name__", x)
)
def test_every_message_is_described_field_by_field(kind: Any, number: Any) -> None:
    assert fields_on_page(f"{number} {kind.__name__}") == fields_in_code(kind)


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_every_part_of_a_message_is_described_field_by_field(kind: Any) -> None:
    assert fields_on_page(kind.__name__) == fields_in_code(kind)


def test_no_message_is_described_that_does_not_exist() -> None:
    described = {
        (int(n), name)
        for n, name in re.findall(r"^### (\d+) (\w+)$", PAGE.read_text(), re.MULTILINE)
    }
    assert described == {(number, kind.__name__) for kind, number in messages.TYPE_OF.items()}


def test_every_code_and_every_cause_is_listed() -> None:
    page = PAGE.read_text()
    codes = page.split("## Codes")[1].split("## Verbs")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", codes, re.MULTILINE)) == set(errors._BY_CODE)
    causes = page.split("## Causes")[1].split("## Codes")[0]
    assert set(re.findall(r"`(\w+)`", causes)) == set(jobs.CAUSES)


def test_the_limits_are_the_ones_in_force() -> None:
    table = section("Limits")
    for value in (
        limits.FRAME_BYTES_MAX_BEFORE_HELLO, limits.FRAME_BYTES_MAX, limits.BATCH_JOBS_MAX,
        limits.PAYLOAD_BYTES_MAX, limits.OUTBOX_BYTES_MAX, limits.SUBSCRIPTIONS_PER_CONNECTION,
        limits.PATTERNS_PER_WORKER, limits.CONNECTIONS_MAX, limits.BLOB_LOCAL_PART_BYTES,
        limits.BLOB_OFFERS_PER_CONNECTION, limits.BLOB_PULLS_PER_CONNECTION, limits.BLOB_BYTES_MAX,
    ):  # fmt: skip
        assert f"| {value:,} |" in table
    assert f"| {limits.HELLO_TIMEOUT_NS // limits.NS} s |" in table
    page = PAGE.read_text()
    assert f"at most {limits.SUBJECT_TOKENS_MAX} tokens, {limits.SUBJECT_LENGTH_MAX} bytes" in page
    assert f"up to {limits.GRANT_JOBS_MAX} jobs at a time" in page


def test_the_subject_examples_are_true() -> None:
    picked = ["render", "render.4k", "render.4k.fast"]
    assert [match("render.*", one) for one in picked] == [False, True, False]
    assert [match("render.>", one) for one in picked] == [False, True, True]
    with pytest.raises(BadSubject):
        check_pattern("a.b*")


# ------------------------------------------------------------------ the worked example


def example() -> list[tuple[str, bytes]]:
    key = bytes(range(32))
    caller = Caller(key, messages.HelloClient(1, "ann@desk", "s1", b"\x70" * 16))
    broker = Greeter(
        key, b"\x62" * 16, group="alpha", broker="b1", epoch=1,
        heartbeat_ns=limits.HEARTBEAT_NS, silence_ns=limits.SILENCE_NS,
    )  # fmt: skip

    def only(data: bytes) -> Frame:
        (frame,) = FrameReader().feed(data)
        return frame

    hello = caller.opening()
    challenge = broker.receive(only(hello))
    proof = caller.receive(only(challenge))
    welcome = broker.receive(only(proof))
    caller.receive(only(welcome))
    assert caller.welcome is not None

    spec = msgspec.Raw(msgspec.msgpack.encode(jobs.Spec("echo", jobs.Route("demo.echo"))))
    digest = bytes.fromhex("8f434346648f6b96")  # of b"hi", by sha256sum
    submit = messages.Submit(spec, ["j1"], digest, [b"hi"])
    done = messages.ResultRun(["j1"], [b"hi"], "w1", 1000, 2000, 3000)
    return [
        ("client: HelloClient", hello),
        ("broker: Challenge", challenge),
        ("client: Proof", proof),
        ("broker: Welcome", welcome),
        ("client: Submit, msg_id 1", encode_frame(submit, 1)),
        ("broker: Accepted", encode_frame(messages.Accepted([1]))),
        ("broker: Results", encode_frame(messages.Results([done]))),
    ]


def example_text() -> str:
    blocks = []
    for title, data in example():
        digits = data.hex(" ")
        lines = [digits[at : at + 96].rstrip() for at in range(0, len(digits), 96)]
        blocks.append(f"{title}\n\n```hex\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(blocks)


def rewrite() -> None:
    before, rest = PAGE.read_text().split("compares them with this page.\n")
    after = rest[rest.index("\nThe first frame, byte by byte:") :]
    PAGE.write_text(f"{before}compares them with this page.\n\n{example_text()}\n{after}")


if os.environ.get("EKIDEN_REWRITE_GOLDEN"):
    rewrite()


def test_the_worked_example_is_what_the_code_makes() -> None:
    assert example_text() in PAGE.read_text()


def test_the_digest_of_the_example_is_the_one_described() -> None:
    assert hashlib.sha256(b"hi").digest()[:8].hex() == "8f434346648f6b96"


def test_the_anatomy_of_the_first_frame_adds_up_to_it() -> None:
    table = PAGE.read_text().split("The first frame, byte by byte:")[1]
    rows = re.findall(r"^\| `([0-9a-f ]+)` \|", table, re.MULTILINE)
    assert bytes.fromhex("".join(rows)) == example()[0][1]


# ------------------------------------------------------------------ written from the page alone


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def page_mac(label: bytes) -> bytes:
    parts = (label, b"client", b"ann@desk", b"s1", b"\x70" * 16, b"\x62" * 16)
    text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(bytes(range(32)), text, "sha256")


def test_whoever_follows_the_page_computes_the_same_checksums_and_macs() -> None:
    frames = dict(example())
    for data in frames.values():
        assert int.from_bytes(data[:4], "little") == len(data) - 8
        assert int.from_bytes(data[4:8], "little") == crc32c(data[8:])
    (mac,) = msgspec.msgpack.decode(frames["client: Proof"][28:])
    assert mac == page_mac(b"ekiden 1 peer proves")
    mac, *_ = msgspec.msgpack.decode(frames["broker: Welcome"][28:])
    assert mac == page_mac(b"ekiden 1 broker proves")
