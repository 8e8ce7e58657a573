"""The bytes of protocol version 1, kept for ever: what was once sent must stay readable.

A new message or field adds lines by `EKIDEN_REWRITE_GOLDEN=1 pytest tests/unit/wire/test_golden.py`
and the diff is read by a person. After a release, lines of that version only ever get added.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw, Struct
from tests.unit.wire.examples import EXAMPLES

from ekiden import limits
from ekiden.model.jobs import Spec
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader, encode_frame

GOLDEN = Path(__file__).parents[2] / "golden" / "wire_v1" / "frames.txt"
FIRST = GOLDEN.with_name("first.txt")


def read_golden(path: Path = GOLDEN) -> dict[str, bytes]:
    lines = path.read_text("ascii").splitlines()
    pairs = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: bytes.fromhex(digits) for name, digits in pairs}


def write_golden() -> None:
    lines = ["# One frame of every message, msg_id 17, corr_id 4; see tests/unit/wire/examples.py."]
    lines += [f"{type(one).__name__} {encode_frame(one, 17, 4).hex()}" for one in EXAMPLES]
    GOLDEN.write_text("\n".join(lines) + "\n", "ascii")


if os.environ.get("EKIDEN_REWRITE_GOLDEN"):
    write_golden()


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_version_1_bytes_are_read_and_written_as_ever(message: Any) -> None:
    golden = read_golden()[type(message).__name__]

    (frame,) = FrameReader(limits.FRAME_BYTES_MAX).feed(golden)

    assert (frame.type, frame.msg_id, frame.corr_id) == (messages.TYPE_OF[type(message)], 17, 4)
    assert messages.decode(frame.type, frame.body) == message
    assert encode_frame(message, 17, 4) == golden


def opened(part: Any) -> Any:
    """A message with the specs inside it decoded."""
    if isinstance(part, Raw):
        return msgspec.msgpack.decode(part, type=Spec)
    if isinstance(part, list):
        return [opened(each) for each in part]
    if isinstance(part, Struct):
        return [opened(getattr(part, name)) for name in part.__struct_fields__]
    return part


def test_frames_with_fewer_fields_are_read_and_the_rest_is_default() -> None:
    first = read_golden(FIRST)
    for message in EXAMPLES:
        if type(message).__name__ in first:
            (frame,) = FrameReader(limits.FRAME_BYTES_MAX).feed(first[type(message).__name__])
            assert opened(messages.decode(frame.type, frame.body)) == opened(message)


def test_there_is_no_golden_frame_that_nobody_checks() -> None:
    assert set(read_golden()) == {type(message).__name__ for message in EXAMPLES}


def test_type_numbers_are_used_once() -> None:
    assert len(set(messages.TYPE_OF.values())) == len(messages.TYPE_OF)
