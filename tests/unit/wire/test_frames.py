"""The frame reader against whole, cut, damaged, oversized and foreign streams."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from typing import Any

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.wire.examples import EXAMPLES

from ekiden import limits
from ekiden.errors import BadFrame, TooLarge
from ekiden.machine import Frame
from ekiden.wire import messages
from ekiden.wire.frames import HEADER_BYTES, FrameReader, encode_frame, frame_of


def raw_frame(
    *,
    body: bytes = b"",
    head: bytes = b"",
    flags: int = 0,
    kind: int = 35,
    head_length: int | None = None,
) -> bytes:
    claimed = len(head) if head_length is None else head_length
    rest = struct.pack("<BBHQQ", kind, flags, claimed, 1, 2) + head + body
    checksum: int = google_crc32c.value(rest)
    return struct.pack("<II", len(rest), checksum) + rest


def read_in_pieces(stream: bytes, cuts: list[int], limit: int = limits.FRAME_BYTES_MAX) -> Any:
    reader = FrameReader(limit)
    frames: list[Frame] = []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        frames += reader.feed(stream[start:end])
    return frames, reader


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_as_it_went(message: Any) -> None:
    (frame,) = FrameReader(limits.FRAME_BYTES_MAX).feed(encode_frame(message, 2**64 - 1, 7))

    assert (frame.msg_id, frame.corr_id) == (2**64 - 1, 7)
    assert messages.decode(frame.type, frame.body) == message


def test_every_type_of_the_table_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(messages.TYPE_OF)


@given(
    bodies=st.lists(st.binary(max_size=300), max_size=8),
    cuts=st.lists(st.integers(min_value=0, max_value=4000), max_size=12),
)
def test_frames_do_not_depend_on_how_the_stream_is_cut(bodies: Any, cuts: Any) -> None:
    stream = b"".join(frame_of(54, body, number) for number, body in enumerate(bodies))

    frames, reader = read_in_pieces(stream, cuts)

    assert frames == [Frame(54, number, 0, body) for number, body in enumerate(bodies)]
    assert all(type(frame) is Frame and type(frame.body) is bytes for frame in frames)
    assert reader.held == 0


@given(bodies=st.lists(st.binary(max_size=60), min_size=1, max_size=4), data=st.data())
@settings(max_examples=50)
def test_frames_come_one_byte_at_a_time(bodies: Any, data: Any) -> None:
    stream = b"".join(frame_of(54, body, number) for number, body in enumerate(bodies))
    frames, _ = read_in_pieces(stream, list(range(len(stream))))
    assert [frame.body for frame in frames] == bodies


def test_a_flip_of_any_bit_is_refused_or_left_unfinished() -> None:
    frame = encode_frame(messages.Publish("news.today", b"payload"), 3, 4)
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << (bit % 8)
        reader = FrameReader(limits.FRAME_BYTES_MAX)
        try:
            # Only a length that grew may wait for more, and what follows then fails its checksum.
            assert reader.feed(bytes(damaged)) == []
            assert bit < 32
            with pytest.raises((BadFrame, TooLarge)):
                reader.feed(bytes(1 << 20))
        except (BadFrame, TooLarge):
            pass


@given(garbage=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=300)
def test_garbage_never_becomes_a_frame_or_another_error(garbage: Any, cuts: Any) -> None:
    try:
        frames, _ = read_in_pieces(garbage, cuts, limit=100)
    except (BadFrame, TooLarge):
        return
    assert frames == []


@given(st.binary(min_size=1, max_size=300), st.integers(0, 400), st.integers(1, 255))
def test_damage_after_good_frames_is_found_however_it_is_cut(
    body: Any, place: Any, change: Any
) -> None:
    stream = bytearray(frame_of(54, body, 1) + frame_of(54, body, 2))
    at = HEADER_BYTES + place % (len(stream) - HEADER_BYTES)
    stream[at] ^= change
    # What follows completes a frame whose length grew; it cannot match its checksum either.
    more = bytes(limits.FRAME_BYTES_MAX + 100)
    with pytest.raises((BadFrame, TooLarge)):
        read_in_pieces(bytes(stream) + more, [place])


@pytest.mark.parametrize("claimed", [limits.FRAME_BYTES_MAX + 21, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_oversized_length_is_refused_after_four_bytes_and_nothing_is_allocated(
    claimed: Any,
) -> None:
    reader = FrameReader(limits.FRAME_BYTES_MAX)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="over the limit of 1,048,576"):
            reader.feed(struct.pack("<I", claimed))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert reader.held == 0


def test_the_largest_frame_is_read_and_one_byte_more_is_not() -> None:
    largest = frame_of(54, bytes(4096))
    assert len(FrameReader(4096).feed(largest)) == 1
    with pytest.raises(TooLarge):
        FrameReader(4096).feed(frame_of(54, bytes(4097)))


def test_the_limit_can_be_raised_between_frames() -> None:
    reader = FrameReader(limits.FRAME_BYTES_MAX_BEFORE_HELLO)
    assert len(reader.feed(frame_of(4, b"x"))) == 1
    reader.limit = limits.FRAME_BYTES_MAX
    assert len(reader.feed(frame_of(10, bytes(100_000)))) == 1


def test_a_header_area_is_skipped_whatever_it_says() -> None:
    head = b"\x82\xa5trace\xa3abc\xa6future\x01"
    (frame,) = FrameReader(1000).feed(raw_frame(head=head, body=b"\x90"))
    assert frame == Frame(35, 1, 2, b"\x90")


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (raw_frame(flags=1), "unknown flags 0x01"),
        (raw_frame(flags=0x80), "unknown flags 0x80"),
        (raw_frame(body=b"abc", head_length=4), "does not fit"),
        (struct.pack("<I", 0), "claims 0 bytes"),
        (struct.pack("<I", 19) + bytes(23), "claims 19 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "speaks HTTP"),
        (b"POST /submit HTTP/1.1\r\nHost: x\r\n\r\n", "speaks HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "speaks HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "speaks TLS"),
        (b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03", "speaks TLS"),
        (b"\x15\x03\x03\x00\x02\x02\x28", "speaks TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "began with 'SSH-'"),
    ],
)
@pytest.mark.parametrize("limit", [limits.FRAME_BYTES_MAX, limits.FRAME_BYTES_MAX_BEFORE_HELLO])
@pytest.mark.parametrize("trickle", [False, True])
def test_what_is_no_frame_is_refused_with_a_sentence_that_says_why(
    stream: Any, sentence: Any, limit: Any, trickle: Any
) -> None:
    cuts = list(range(len(stream))) if trickle else []
    with pytest.raises(BadFrame, match=sentence):
        read_in_pieces(stream, cuts, limit)


def test_a_reader_that_met_damage_stays_closed() -> None:
    reader = FrameReader(1000)
    with pytest.raises(BadFrame):
        reader.feed(raw_frame(flags=1))
    with pytest.raises(BadFrame, match="damaged earlier"):
        reader.feed(raw_frame())


def test_bodies_stay_valid_while_the_reader_goes_on() -> None:
    reader = FrameReader(1000)
    (first,) = reader.feed(frame_of(54, b"first"))
    reader.feed(frame_of(54, b"other") * 50)
    assert first.body == b"first"


def test_a_big_frame_in_small_pieces_is_joined_once() -> None:
    # Counts copies instead of timing them: pieces are kept as they came until the frame is whole.
    stream = frame_of(54, bytes(1 << 20))
    reader = FrameReader(limits.FRAME_BYTES_MAX)
    for at in range(0, len(stream) - 64, 64):
        assert reader.feed(stream[at : at + 64]) == []
    assert len(reader._parts) > 16_000
    frames = reader.feed(
        stream[len(stream) - len(stream) % 64 - 64 :][-(len(stream) - reader.held) :]
    )
    assert [len(frame.body) for frame in frames] == [1 << 20]
