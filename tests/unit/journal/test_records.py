"""Telling a torn tail from damage."""

from __future__ import annotations

import pytest

from ekiden.errors import CorruptJournal, VersionMismatch
from ekiden.journal import records
from ekiden.journal.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    SEGMENT_MAGIC,
    encode_header,
    encode_records,
    scan,
)

GROUP = bytes(range(16))


def segment(*appends: list[bytes], first: int = 1) -> bytes:
    data, index = encode_header(SEGMENT_MAGIC, first, GROUP), first
    for payloads in appends:
        data += encode_records(index, payloads, GROUP)
        index += len(payloads)
    return data


def payloads_of(data: bytes) -> list[bytes]:
    return [record.payload for record in scan(data)]


def test_records_come_back_as_they_were_written() -> None:
    found = scan(segment([b"a", b""], [b"b" * 5000], first=7))

    assert [(record.index, record.payload) for record in found] == [
        (7, b"a"),
        (8, b""),
        (9, b"b" * 5000),
    ]
    assert (found.torn, found.upcoming) == ("", 10)


def test_a_segment_cut_at_any_byte_yields_its_whole_records_and_calls_the_rest_torn() -> None:
    payloads = [b"one", b"two" * 40, b"", b"three" * 9]
    data = segment(payloads[:2], payloads[2:])
    ends, at = [HEADER_BYTES], HEADER_BYTES
    for payload in payloads:
        at += RECORD_BYTES + len(payload)
        ends.append(at)

    for size in range(HEADER_BYTES, len(data) + 1):
        found = scan(data[:size])
        whole = sum(end <= size for end in ends[1:])
        assert [record.payload for record in found] == payloads[:whole]
        assert found.end == ends[whole]
        assert bool(found.torn) == any(data[ends[whole] : size])
        assert found.blank == (0 if found.torn else size - ends[whole])


@pytest.mark.parametrize("zeros", [1, 19, 20, 511, 4096, 100_000])
def test_a_tail_of_zeros_is_blank_and_no_news(zeros: int) -> None:
    data = segment([b"a"], [b"b"])

    found = scan(data + bytes(zeros))

    assert [record.payload for record in found] == [b"a", b"b"]
    assert (found.torn, found.blank, found.end) == ("", zeros, len(data))
    assert found.unsound


@pytest.mark.parametrize("room", [0, 700])
def test_no_flipped_bit_ever_yields_a_wrong_record(room: int) -> None:
    payloads = [bytes([n]) * (n * 37 % 400) for n in range(1, 22)]
    data = segment(*[[payload] for payload in payloads])
    last_append = len(data) - RECORD_BYTES - len(payloads[-1])
    assert 4000 <= len(data) <= 6000

    for bit in range(len(data) * 8):
        flipped = bytearray(data + bytes(room))
        flipped[bit // 8] ^= 1 << bit % 8
        seen: list[bytes] = []
        try:
            found = scan(bytes(flipped))
            seen.extend(record.payload for record in found)
            detected = bool(found.torn)
            # Only what may never have been acknowledged is cut.
            assert bit // 8 >= last_append
            assert seen == payloads[:-1]
        except (CorruptJournal, VersionMismatch):
            detected = True
            assert bit // 8 < last_append
        assert detected
        assert seen == payloads[: len(seen)]


def test_damage_before_a_sound_record_names_file_and_offset() -> None:
    data = bytearray(segment([b"a" * 100], [b"b" * 100], [b"c" * 100]))
    second = HEADER_BYTES + RECORD_BYTES + 100
    data[second + 50] ^= 1

    with pytest.raises(CorruptJournal) as caught:
        list(scan(bytes(data), file="segment-x.log"))

    assert (caught.value.file, caught.value.offset) == ("segment-x.log", second)
    assert "entry 2 is damaged" in str(caught.value)


def test_a_hole_of_zeros_in_the_last_append_is_torn() -> None:
    """Power was lost, and the disk had written later sectors of one append before earlier ones."""
    synced = segment([b"synced" * 50])
    data = bytearray(synced + segment([b"p" * 700] * 5, first=2)[HEADER_BYTES:])
    start = (len(synced) // 512 + 2) * 512
    data[start : start + 512] = bytes(512)

    found = scan(bytes(data))

    assert [record.payload for record in found][:1] == [b"synced" * 50]
    assert found.torn and found.end < start + 512


@pytest.mark.parametrize("room", [0, 5000])
@pytest.mark.parametrize("sector", range(8))
def test_any_lost_sector_of_the_last_append_is_torn_and_of_an_earlier_one_damage(
    sector: int, room: int
) -> None:
    last = segment([b"p" * 90] * 40)
    earlier = segment([b"p" * 90] * 40, [b"q"])
    start = max(HEADER_BYTES, sector * 512)
    end = min((sector + 1) * 512, len(last))

    def holed(data: bytes) -> bytes:
        return data[:start] + bytes(end - start) + data[end:] + bytes(room)

    found = scan(holed(last))
    assert all(record.payload == b"p" * 90 for record in found)
    assert found.torn
    with pytest.raises(CorruptJournal):
        list(scan(holed(earlier)))


def test_a_flipped_bit_in_the_middle_of_the_last_append_is_damage() -> None:
    """Nothing is missing there, so it was written and synced: cutting would lose what was told."""
    data = bytearray(segment([b"a" * 600, b"b" * 600, b"c" * 600]))
    data[HEADER_BYTES + RECORD_BYTES + 600 + 300] ^= 4

    with pytest.raises(CorruptJournal):
        list(scan(bytes(data)))


def test_a_journal_sent_as_a_payload_is_not_taken_for_records() -> None:
    """A torn entry whose payload holds records of another group is torn, not damaged."""
    foreign = encode_header(SEGMENT_MAGIC, 1, bytes(16)) + encode_records(
        1, [b"x", b"y", b"z"], bytes(16)
    )
    data = segment([foreign * 2])

    found = scan(data[:-1])

    assert list(found) == []
    assert found.torn


def test_a_record_out_of_order_is_damage() -> None:
    data = segment([b"a"]) + encode_records(5, [b"b"], GROUP)

    with pytest.raises(CorruptJournal, match="entry 5 stands where 2 should"):
        list(scan(data))


def test_a_search_for_later_records_works_where_the_upper_bytes_of_the_index_change() -> None:
    first = (1 << 24) - 2
    data = bytearray(segment(*[[b"p" * 50] for _ in range(6)], first=first))
    data[HEADER_BYTES + 30] ^= 1
    data[HEADER_BYTES + RECORD_BYTES + 50 + 30] ^= 1

    with pytest.raises(CorruptJournal, match="entry 16,777,216 after it is sound"):
        list(scan(bytes(data)))


def test_a_large_damaged_segment_is_judged_quickly() -> None:
    """64 MB would take minutes if every offset were tried."""
    data = bytearray(segment([b"\x01" + bytes(8 << 20)], *[[b"p" * 100_000] for _ in range(80)]))
    data[HEADER_BYTES + RECORD_BYTES] ^= 1

    with pytest.raises(CorruptJournal):
        list(scan(bytes(data)))


def test_a_newer_version_is_refused_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "JOURNAL_VERSION", records.JOURNAL_VERSION + 1)
    data = segment([b"a"])
    monkeypatch.undo()

    with pytest.raises(
        VersionMismatch,
        match=rf"journal version {records.JOURNAL_VERSION + 1}, this release reads up to {records.JOURNAL_VERSION}",
    ):
        scan(data, file="f")


def test_another_kind_of_file_is_refused() -> None:
    with pytest.raises(CorruptJournal, match="another kind"):
        payloads_of(encode_header(records.SNAPSHOT_MAGIC, 1, GROUP))
