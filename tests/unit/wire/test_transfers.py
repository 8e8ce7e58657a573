"""File contents between a peer and its broker, whatever becomes of the line."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.wire.line import Cut, Line, hash_of

from ekiden import limits
from ekiden.errors import BlobDamaged, Closed, DiskFull, Fault, Refusal, StoreFull, UnknownBlob
from ekiden.simulation.blobs import MemoryBlobs
from ekiden.wire import messages as m
from ekiden.wire.frames import FrameReader
from ekiden.wire.session import refusal_frame
from ekiden.wire.transfers import (
    Copied,
    CopyBlob,
    Downloading,
    GivenUp,
    PartRead,
    PartWritten,
    ReadPart,
    TransferFailed,
    Transferred,
    Transfers,
    Uploading,
    WritePart,
)

DATA = bytes(range(256))
BLOB = hash_of(DATA)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOB_PART_BYTES", 24)
    monkeypatch.setattr(limits, "BLOB_LOCAL_PART_BYTES", 96)


def stored(*contents: bytes) -> MemoryBlobs:
    blobs = MemoryBlobs()
    blobs.stored = {hash_of(data): data for data in contents}
    return blobs


# ------------------------------------------------------------------ both ends together


def test_what_is_uploaded_can_be_downloaded() -> None:
    line = Line()

    line.upload("up", DATA)
    line.run()
    line.download("down", BLOB, len(DATA))
    line.run()

    assert line.ended == {"up": None, "down": None}
    assert line.blobs.stored == {BLOB: DATA}
    assert line.sinks["down"] == DATA


@pytest.mark.parametrize("size", [0, 1, 23, 24, 25, 48])
def test_every_size_travels_whole(size: int) -> None:
    data, line = DATA[:size], Line()

    line.upload("up", data)
    line.run()
    line.download("down", hash_of(data), size)
    line.run()

    assert line.ended == {"up": None, "down": None}
    assert line.blobs.stored == {hash_of(data): data}
    assert bytes(line.sinks["down"]) == data


def test_what_the_broker_has_is_not_sent_again() -> None:
    line = Line(blobs=stored(DATA))

    line.upload("up", DATA)
    line.run()

    assert line.ended == {"up": None}
    assert line.seen == [m.BlobOffer(BLOB, len(DATA)), m.BlobStored(BLOB)]


def test_two_uploads_of_the_same_bytes_both_end_well() -> None:
    line = Line()

    line.upload("one", DATA)
    line.upload("two", DATA)
    line.run()

    assert line.ended == {"one": None, "two": None}
    assert line.blobs.stored == {BLOB: DATA}
    assert line.blobs.incoming == {}


@pytest.mark.parametrize("killed", [False, True], ids=["cut", "broker killed"])
def test_a_line_that_breaks_at_any_step_loses_nothing(killed: bool) -> None:
    cut_at = 1
    while True:
        line = Line(cut_at=cut_at, blobs=stored(DATA[::-1]))
        line.upload("up", DATA)
        line.download("down", hash_of(DATA[::-1]), len(DATA))
        line.run(killed=killed)

        assert line.ended == {"up": None, "down": None}, f"cut at step {cut_at}"
        assert line.blobs.stored[BLOB] == DATA
        assert line.sinks["down"] == DATA[::-1]
        assert line.blobs.incoming == {}, f"cut at step {cut_at}"
        if not line.cuts:
            break
        cut_at += 1
    assert cut_at > 50


def test_a_download_goes_on_where_it_was() -> None:
    line = Line(blobs=stored(DATA), cut_at=24)
    line.download("down", BLOB, len(DATA))
    line.run()

    pulls = [message.offset for message in line.seen if isinstance(message, m.BlobPull)]
    again = pulls.index(max(pulls[: len(pulls) // 2])) + 1

    assert line.cuts == 1
    assert pulls[again] > 0, "what was written before the cut is not asked for again"
    assert line.sinks["down"] == DATA


def test_many_transfers_share_the_line_and_all_arrive() -> None:
    contents = [bytes([n]) * 200 for n in range(20)]
    line = Line(blobs=stored(*contents[:10]))

    for n, data in enumerate(contents):
        if n < 10:
            line.download(n, hash_of(data), len(data))
        else:
            line.upload(n, data)
    line.run()

    assert line.ended == dict.fromkeys(range(20))
    assert [bytes(line.sinks[n]) for n in range(10)] == contents[:10]
    assert set(line.blobs.stored) == set(map(hash_of, contents))


def test_bytes_that_do_not_match_their_hash_are_refused_and_leave_nothing() -> None:
    line = Line()

    line.upload("up", DATA, blob=hash_of(b"others"))
    line.run()

    assert isinstance(line.ended["up"], BlobDamaged)
    assert (line.blobs.stored, line.blobs.incoming) == ({}, {})


def test_a_download_of_damaged_bytes_ends_with_that() -> None:
    line = Line(blobs=MemoryBlobs())
    line.blobs.stored[BLOB] = DATA[::-1]

    line.download("down", BLOB, len(DATA))
    line.run()

    assert isinstance(line.ended["down"], BlobDamaged)


def test_a_broker_that_sent_damaged_bytes_sets_them_aside_and_takes_sound_ones() -> None:
    line = Line(blobs=MemoryBlobs())
    line.blobs.stored[BLOB] = DATA[::-1]
    line.download("down", BLOB, len(DATA))
    line.run()
    assert [each for each in line.seen if isinstance(each, m.BlobSpoiled)] == [
        m.BlobSpoiled(BLOB, len(DATA))
    ]
    assert (line.blobs.damaged, line.blobs.stored) == ([BLOB], {})

    line.upload("up", DATA)
    line.run()
    line.download("again", BLOB, len(DATA))
    line.run()

    assert line.ended["again"] is None
    assert line.sinks["again"] == DATA


def test_a_peer_that_spoils_good_bytes_itself_does_no_harm() -> None:
    line = Line(blobs=stored(DATA))
    line.download("down", BLOB, len(DATA))
    line.blob_of["down"] = "another"

    line.run()

    assert isinstance(line.ended["down"], BlobDamaged)
    assert line.blobs.stored == {BLOB: DATA}


def test_an_upload_goes_on_where_it_was_after_a_lost_connection() -> None:
    sent = []
    for cut_at in range(1, 60):
        line = Line(cut_at=cut_at)
        line.upload("up", DATA)
        line.run()

        assert line.ended == {"up": None}
        assert line.blobs.stored == {BLOB: DATA}
        assert line.blobs.aside == {}
        sent.append(line.blobs.written)
        if not line.cuts:
            break

    assert set(sent) == {len(DATA)}, "no byte was written twice, wherever the line broke"


def test_another_connection_goes_on_with_what_the_first_one_left() -> None:
    line = Line(cut_at=24)
    line.upload("up", DATA)
    try:
        while True:
            line._round()
    except Cut:
        line.lose_connection()
    line.transfers.receive(GivenUp("up"))
    line.run()
    (left,) = line.blobs.aside.values()
    assert left

    line.upload("other", DATA)
    line.run()

    assert line.ended == {"other": None}
    assert line.blobs.written == len(DATA)


def test_a_full_store_makes_room_for_an_upload_and_keeps_what_the_book_needs() -> None:
    others = [bytes([n]) * 100 for n in range(5)]
    line = Line(blobs=stored(*others), blobs_max=600)
    line.blobs.used = {hash_of(data): -(10**18) - n for n, data in enumerate(others)}
    needed = hash_of(others[-1])
    line.house.machine.store.room._referenced = lambda blob: blob == needed

    line.upload("up", DATA)
    line.run()

    assert line.ended == {"up": None}
    assert set(line.blobs.stored) == {BLOB, needed, hash_of(others[0]), hash_of(others[1])}


def test_a_store_that_is_full_of_what_is_needed_refuses() -> None:
    line = Line(blobs=stored(b"x" * 400), blobs_max=600)
    line.blobs.used = dict.fromkeys(line.blobs.stored, -(10**18))
    line.house.machine.store.room._referenced = lambda _blob: True

    line.upload("up", DATA)
    line.run()

    assert isinstance(line.ended["up"], StoreFull)
    assert set(line.blobs.stored) == {hash_of(b"x" * 400)}


def test_a_download_of_what_nobody_stored_is_refused() -> None:
    line = Line()

    line.download("down", BLOB, len(DATA))
    line.run()

    assert isinstance(line.ended["down"], UnknownBlob)


def test_a_download_with_another_size_is_refused() -> None:
    line = Line(blobs=stored(DATA))

    line.download("down", BLOB, 24)
    line.run()

    assert isinstance(line.ended["down"], Refusal)
    assert "has 256 bytes, not 24" in str(line.ended["down"])


def test_a_source_that_cannot_be_read_ends_the_upload_at_both_ends() -> None:
    line = Line()
    line.broken_files.add("up")

    line.upload("up", DATA)
    line.upload("other", b"other")
    line.run()

    assert isinstance(line.ended["up"], Fault)
    assert line.ended["other"] is None
    assert line.blobs.incoming == {}


def test_an_upload_that_is_given_up_leaves_nothing_at_the_broker() -> None:
    line = Line(cut_at=12)
    line.upload("up", DATA)
    try:
        while True:
            line._round()
    except Exception:
        assert line.blobs.incoming

    line.transfers.receive(GivenUp("up"))
    line.run()

    assert line.ended == {}
    assert (line.blobs.stored, line.blobs.incoming) == ({}, {})


def test_a_full_disk_refuses_what_is_new_and_not_what_is_there() -> None:
    line = Line(blobs=stored(DATA))
    line.house.machine.intake.disk_free = 0

    line.upload("known", DATA)
    line.upload("new", b"new")
    line.run()

    assert line.ended["known"] is None
    assert isinstance(line.ended["new"], DiskFull)


# ------------------------------------------------------------------ the peer's end alone


class Peer:
    """Transfers without a broker: what is said, and what is asked of the files."""

    def __init__(self) -> None:
        self.numbers = 0
        self.transfers = Transfers(self._number)
        self.local = False

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def said(self, conn: int | None = 1) -> list[tuple[int, int, m.Message]]:
        frames = FrameReader().feed(b"".join(self.transfers.advance(conn, local=self.local)))
        return [(f.msg_id, f.corr_id, m.decode(f.type, f.body)) for f in frames]

    def feed(self, event: Any) -> list[Any]:
        self.transfers.receive(event)
        return self.transfers.take_effects()

    def hear(self, message: m.Message, corr_id: int = 0, msg_id: int = 0) -> list[Any]:
        self.transfers.heard(message, msg_id, corr_id)
        return self.transfers.take_effects()

    def part(self, number: int, offset: int, data: bytes, size: int = 256) -> list[Any]:
        return self.hear(m.BlobPart(BLOB, offset, data, size), number)


def test_a_download_asks_for_a_few_parts_and_for_more_only_when_one_is_written() -> None:
    peer = Peer()
    peer.feed(Downloading("t", BLOB, 256))

    pulls = peer.said()
    assert [said.offset for _, _, said in pulls] == [0, 24, 48, 72]
    effects = [
        peer.part(number, said.offset, DATA[said.offset :][:24]) for number, _, said in pulls
    ]

    assert effects == [[WritePart("t", 0, DATA[:24], False)], [], [], []]
    assert peer.said() == []
    assert peer.feed(PartWritten("t", 0)) == [WritePart("t", 24, DATA[24:48], False)]
    assert [said.offset for _, _, said in peer.said()] == [96]


def test_parts_that_come_out_of_order_are_written_in_order() -> None:
    peer = Peer()
    peer.feed(Downloading("t", hash_of(DATA[:48]), 48))
    (first, _, _), (second, _, _) = peer.said()

    assert peer.part(second, 24, DATA[24:48], 48) == []
    assert peer.part(first, 0, DATA[:24], 48) == [WritePart("t", 0, DATA[:24], False)]
    assert peer.feed(PartWritten("t", 0)) == [WritePart("t", 24, DATA[24:48], True)]
    assert peer.feed(PartWritten("t", 24)) == [Transferred("t")]


def test_many_downloads_have_as_many_parts_on_the_way_as_a_few() -> None:
    peer = Peer()
    for n in range(20):
        peer.feed(Downloading(n, BLOB, 10_000))

    pulls = peer.said()

    assert len(pulls) == limits.BLOB_CONNECTION_PARTS
    assert [said.offset for _, _, said in pulls] == [0] * limits.BLOB_TRANSFERS_MAX


def test_transfers_beyond_the_bound_wait_for_one_to_end() -> None:
    peer = Peer()
    for n in range(limits.BLOB_TRANSFERS_MAX + 2):
        peer.feed(Uploading(n, hash_of(b"%d" % n), 1))

    offers = peer.said()
    assert len(offers) == limits.BLOB_TRANSFERS_MAX
    assert peer.hear(m.BlobStored(""), offers[3][0]) == [Transferred(3)]

    ((_, _, offer),) = peer.said()
    assert offer == m.BlobOffer(hash_of(b"%d" % limits.BLOB_TRANSFERS_MAX), 1)


def test_a_part_of_another_length_or_place_ends_the_download() -> None:
    for offset, data in [(24, DATA[:24]), (0, DATA[:23]), (0, DATA[:25])]:
        peer = Peer()
        peer.feed(Downloading("t", BLOB, 256))
        number = peer.said()[0][0]

        (failed,) = peer.part(number, offset, data)

        assert isinstance(failed, TransferFailed)
        assert isinstance(failed.error, BlobDamaged)
        assert peer.said() == []


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 10), (0, 0), (0, -5), (0, 97), (250, 10), (1 << 62, 24)]
)
def test_a_pull_outside_of_what_is_offered_is_refused_and_the_upload_goes_on(
    offset: int, length: int
) -> None:
    peer = Peer()
    peer.feed(Uploading("t", BLOB, 256))
    ((offer, _, _),) = peer.said()

    assert peer.hear(m.BlobPull(BLOB, offset, length), offer, 7) == []
    ((_, answers, refusal),) = peer.said()
    assert (answers, refusal.code) == (7, "bad_request")

    assert peer.hear(m.BlobPull(BLOB, 0, 24), offer, 8) == [ReadPart("t", 0, 24)]
    peer.feed(PartRead("t", 0, DATA[:24]))
    assert [(corr, said) for _, corr, said in peer.said()] == [
        (8, m.BlobPart(BLOB, 0, DATA[:24], 256))
    ]


def test_a_broker_that_pulls_without_end_is_not_served_without_end() -> None:
    peer = Peer()
    peer.feed(Uploading("t", BLOB, 256))
    ((offer, _, _),) = peer.said()

    reads = [peer.hear(m.BlobPull(BLOB, 0, 24), offer, n + 1) for n in range(1000)]

    assert sum(map(len, reads)) == 2 * limits.BLOB_CONNECTION_PARTS


def test_a_part_read_for_a_connection_that_is_gone_is_not_sent_on_the_next() -> None:
    peer = Peer()
    peer.feed(Uploading("t", BLOB, 256))
    ((offer, _, _),) = peer.said()
    peer.hear(m.BlobPull(BLOB, 0, 24), offer, 7)

    assert peer.said(None) == []
    peer.feed(PartRead("t", 0, DATA[:24]))

    ((again, _, said),) = peer.said(2)
    assert said == m.BlobOffer(BLOB, 256)
    assert again > offer, "an answer to the old offer must not fit the new one"
    assert peer.hear(m.BlobStored(BLOB), offer) == []


def test_a_broker_that_shuts_down_keeps_a_transfer_waiting_for_the_next() -> None:
    peer = Peer()
    peer.feed(Uploading("up", BLOB, 256))
    peer.feed(Downloading("down", BLOB, 256))
    for number, _, _ in peer.said():
        assert peer.hear(m.Refusal("draining", "shutting down"), number) == []
    assert peer.said() == []

    again = [said for _, _, said in peer.said(2)]

    assert again[0] == m.BlobOffer(BLOB, 256)
    assert [said.offset for said in again[1:]] == [0, 24, 48, 72]


def test_a_refusal_of_something_else_is_not_taken() -> None:
    peer = Peer()
    peer.feed(Uploading("t", BLOB, 256))
    peer.said()

    assert not peer.transfers.heard(m.Refusal("refused", "no"), 0, 99)
    assert not peer.transfers.heard(m.Beat(), 0, 0)
    assert peer.transfers.take_effects() == []


def test_without_a_broker_for_good_everything_ends_with_the_reason() -> None:
    peer = Peer()
    for n in range(limits.BLOB_TRANSFERS_MAX + 1):
        peer.feed(Uploading(n, BLOB, 256))
    error = Closed("closed")

    peer.transfers.fail_all(error)

    ended = peer.transfers.take_effects()
    assert ended == [TransferFailed(n, error) for n in range(limits.BLOB_TRANSFERS_MAX + 1)]
    assert peer.said() == []


def test_a_transfer_that_is_given_up_while_it_waits_never_begins() -> None:
    peer = Peer()
    for n in range(limits.BLOB_TRANSFERS_MAX + 1):
        peer.feed(Uploading(n, BLOB, 256))
    peer.feed(GivenUp(limits.BLOB_TRANSFERS_MAX))
    for number, _, _ in peer.said():
        peer.hear(m.BlobStored(BLOB), number)

    assert peer.said() == []
    assert peer.transfers.tokens == []


def test_a_part_of_the_largest_size_fits_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    part = m.BlobPart(BLOB, 1 << 62, bytes(limits.BLOB_PART_BYTES), 1 << 62)

    assert len(msgspec.msgpack.encode(part)) < limits.FRAME_BYTES_MAX
    assert refusal_frame(BlobDamaged("x"), 1)


# ------------------------------------------------------------------ on one machine


def asked_where(peer: Peer) -> int:
    """A download on a line that does not leave the machine; the number of the question."""
    peer.local = True
    peer.feed(Downloading("t", BLOB, 48))
    ((number, _, question),) = peer.said()
    assert question == m.BlobWhere(BLOB, 48)
    return number


PULLS = [m.BlobPull(BLOB, 0, 24), m.BlobPull(BLOB, 24, 24)]


def test_a_large_file_on_the_same_machine_is_copied_from_where_it_lies() -> None:
    peer = Peer()
    number = asked_where(peer)

    copy = peer.hear(m.BlobAt(BLOB, "/store/it"), number)
    ended = peer.feed(Copied("t", whole=True))

    assert copy == [CopyBlob("t", "/store/it", 48)]
    assert ended == [Transferred("t")]
    assert peer.said() == []


@pytest.mark.parametrize("how", ["nowhere", "unreadable", "refused"])
def test_what_cannot_be_copied_is_pulled(how: str) -> None:
    peer = Peer()
    number = asked_where(peer)

    if how == "nowhere":
        assert peer.hear(m.BlobAt(BLOB), number) == []
    elif how == "refused":
        assert peer.hear(m.Refusal("draining", "later"), number) == []
    else:
        peer.hear(m.BlobAt(BLOB, "/store/it"), number)
        assert peer.feed(Copied("t", whole=False)) == []

    assert [said for _, _, said in peer.said()] == PULLS


def test_small_ones_and_those_of_other_machines_are_pulled_at_once() -> None:
    near, far = Peer(), Peer()
    near.local = True
    near.feed(Downloading("t", BLOB, 24))
    far.feed(Downloading("t", BLOB, 48))

    assert [said for _, _, said in near.said()] == PULLS[:1]
    assert [said for _, _, said in far.said()] == PULLS


def test_a_question_that_was_lost_with_its_connection_is_not_waited_for() -> None:
    peer = Peer()
    asked_where(peer)

    assert [said for _, _, said in peer.said(2)] == PULLS


def test_an_answer_for_a_download_that_was_given_up_changes_nothing() -> None:
    peer = Peer()
    number = asked_where(peer)

    peer.feed(GivenUp("t"))

    assert peer.hear(m.BlobAt(BLOB, "/store/it"), number) == []
    assert peer.feed(Copied("t", whole=True)) == []
