"""What a reader makes of bodies that are older, newer or wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.wire.examples import EXAMPLES

from ekiden.errors import BadFrame
from ekiden.wire import messages


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_fields_of_a_newer_peer_are_ignored(message: Any) -> None:
    fields = msgspec.msgpack.decode(messages.encode_body(message))
    newer = msgspec.msgpack.encode([*fields, {"of": "tomorrow"}])
    assert messages.decode(messages.TYPE_OF[type(message)], newer) == message


def test_fields_that_an_older_peer_does_not_send_get_their_default() -> None:
    body = msgspec.msgpack.encode([1, "ann", "s1", bytes(16)])
    assert messages.decode(1, body) == messages.HelloClient(1, "ann", "s1", bytes(16), "")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (0, b"\x90"),
        (255, b"\x90"),
        (10, b""),
        (10, b"\x90"),
        (10, b"\xc1"),
        (15, msgspec.msgpack.encode(["verb", [1]])),
        (15, b"\x92\xa1v\x81\xa1k" + b"\x91" * 100_000 + b"\x90"),
        (54, msgspec.msgpack.encode([b"\xff", b""])),
        (54, b"\x92\xa2\xff\xfe\xc4\x00"),
    ],
)
def test_a_body_that_is_no_message_is_a_bad_frame_and_nothing_worse(kind: Any, body: Any) -> None:
    with pytest.raises(BadFrame):
        messages.decode(kind, body)
