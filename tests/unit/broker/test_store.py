"""The broker's side of the bulk lane: bounds, turns, and what is left of what fails."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from tests.unit.broker.house import Far, House, Said, quiet

from ekiden import limits
from ekiden.broker.events import (
    BeginBlob,
    BlobRead,
    DiskSpace,
    DropBlob,
    ReadBlob,
    Shutdown,
    UploadMoved,
    WriteBlob,
)
from ekiden.errors import BlobDamaged, UnknownBlob
from ekiden.limits import NS
from ekiden.machine import Congested, Frame, Received, Relieved
from ekiden.wire import messages as m

PART = limits.BLOB_PART_BYTES
WINDOW = limits.BLOB_WINDOW_PARTS


def blob(n: int = 0) -> str:
    return hashlib.sha256(b"%d" % n).hexdigest()


def answer(far: Far, pull: int, message: m.Message) -> None:
    """What a peer says to a pull of that number."""
    frame = Frame(m.TYPE_OF[type(message)], 0, pull, m.encode_body(message))
    far.house.machine.receive(Received(far.conn, [frame]), far.house.now)


class Shop(House):
    """A house whose blob folder does nothing by itself."""

    def moved(self, upload: int, upto: int = 0, **rest: Any) -> list[Any]:
        self.machine.receive(UploadMoved(upload, upto, **rest), self.now)
        return quiet(self.turn())

    def pulls(self, effects: list[Any]) -> list[m.BlobPull]:
        said = [
            message for effect in effects if isinstance(effect, Said) for message in effect.messages
        ]
        return [message for message in said if isinstance(message, m.BlobPull)]


@pytest.fixture
def shop() -> Shop:
    return Shop()


def begun(shop: Shop, far: Far, size: int, n: int = 0) -> tuple[int, list[m.BlobPull]]:
    """An offer whose turn it is and which is not stored: its number and the first pulls."""
    far.say(m.BlobOffer(blob(n), size))
    (begin,) = quiet(shop.turn())
    assert isinstance(begin, BeginBlob)
    return begin.upload, shop.pulls(shop.moved(begin.upload))


# ------------------------------------------------------------------ uploads


def test_what_is_there_is_answered_at_once(shop: Shop) -> None:
    ann = shop.client()
    number = ann.say(m.BlobOffer(blob(), 10))
    (begin,) = quiet(shop.turn())
    assert begin == BeginBlob(begin.upload, blob(), 10)

    shop.moved(begin.upload, stored=True)

    assert ann.heard == [(number, m.BlobStored(blob()))]


def test_parts_are_pulled_a_few_at_a_time_and_told_stored_only_by_the_disk(shop: Shop) -> None:
    ann = shop.client()
    size = 6 * PART + 7
    upload, pulls = begun(shop, ann, size)
    assert pulls == [m.BlobPull(blob(), n * PART, PART) for n in range(WINDOW)]

    numbers = sorted(shop.machine.store._pulls)
    for n, number in enumerate(numbers):
        answer(ann, number, m.BlobPart(blob(), n * PART, bytes(PART), size))
    writes = quiet(shop.turn())
    assert writes == [WriteBlob(upload, bytes(PART))] * WINDOW, "no pull before one is written"

    effects = shop.moved(upload, PART)
    assert shop.pulls(effects) == [m.BlobPull(blob(), WINDOW * PART, PART)]
    effects = shop.moved(upload, 3 * PART)
    assert shop.pulls(effects)[-1] == m.BlobPull(blob(), 6 * PART, 7)
    assert ann.all(m.BlobStored) == []
    shop.moved(upload, size, stored=True)
    assert ann.all(m.BlobStored) == [m.BlobStored(blob())]


def test_parts_that_come_out_of_order_reach_the_disk_in_order(shop: Shop) -> None:
    ann = shop.client()
    upload, _ = begun(shop, ann, 2 * PART)
    first, second = sorted(shop.machine.store._pulls)

    answer(ann, second, m.BlobPart(blob(), PART, b"b" * PART, 2 * PART))
    assert quiet(shop.turn()) == []
    answer(ann, first, m.BlobPart(blob(), 0, b"a" * PART, 2 * PART))

    assert quiet(shop.turn()) == [WriteBlob(upload, b"a" * PART), WriteBlob(upload, b"b" * PART)]


@pytest.mark.parametrize(
    "name", ["", "abc", "A" * 64, "../" + "a" * 61, "g" * 64, "a" * 65, "a" * 64 + "\n"]
)
def test_a_name_that_is_no_hash_is_refused_and_nothing_touches_the_disk(
    shop: Shop, name: str
) -> None:
    ann = shop.client()

    ann.say(m.BlobOffer(name, 10), m.BlobPull(name, 0, 10))

    (said,) = quiet(shop.turn())
    assert [refusal.code for refusal in said.messages] == ["bad_request"] * 2


def test_sizes_out_of_bounds_are_refused(shop: Shop) -> None:
    ann = shop.client()
    ann.say(m.BlobOffer(blob(), -1), m.BlobOffer(blob(), limits.BLOB_BYTES_MAX + 1))
    shop.turn()
    assert [refusal.code for refusal in ann.all(m.Refusal)] == ["bad_request", "too_large"]


def test_one_connection_has_few_uploads_pulled_and_the_next_ones_wait(shop: Shop) -> None:
    ann, bob = shop.client("ann"), shop.client("bob")
    ann.say(*(m.BlobOffer(blob(n), PART) for n in range(20)))
    bob.say(m.BlobOffer(blob(99), PART))

    begins = [effect for effect in quiet(shop.turn()) if isinstance(effect, BeginBlob)]

    assert len(begins) == limits.BLOB_TRANSFERS_MAX + 1
    assert begins[1].blob == blob(99), "connections take turns"
    effects = shop.moved(begins[0].upload, stored=True)
    assert [effect.blob for effect in effects if isinstance(effect, BeginBlob)] == [blob(8)]


def test_all_uploads_together_are_bounded(shop: Shop) -> None:
    for far in [shop.client(name) for name in "abcd"]:
        far.say(*(m.BlobOffer(blob(n), PART) for n in range(8)))

    begins = [effect for effect in quiet(shop.turn()) if isinstance(effect, BeginBlob)]

    assert len(begins) == limits.BLOB_UPLOADS_PULLED


def test_too_many_offers_of_one_connection_are_refused(shop: Shop) -> None:
    ann = shop.client()
    ann.say(*(m.BlobOffer(blob(n), PART) for n in range(limits.BLOB_OFFERS_PER_CONNECTION + 1)))
    shop.turn()
    (refusal,) = ann.all(m.Refusal)
    assert (refusal.code, refusal.retry_after_ms) == ("queue_full", 1000)


def test_what_is_on_its_way_counts_against_the_room_on_the_disk(shop: Shop) -> None:
    ann = shop.client()
    headroom = shop.config.disk_headroom
    shop.machine.receive(DiskSpace(headroom + 10 * PART), shop.now)
    upload, pulls = begun(shop, ann, 8 * PART, n=1)
    assert pulls

    ann.heard.clear()
    ann.say(m.BlobOffer(blob(2), 4 * PART))
    (begin,) = quiet(shop.turn())
    effects = shop.moved(begin.upload)

    (refusal,) = ann.all(m.Refusal)
    assert refusal.code == "disk_full"
    assert DropBlob(begin.upload) in effects + quiet(shop.turn())
    shop.moved(upload, 8 * PART, stored=True)
    assert shop.machine.intake.disk_free == headroom + 2 * PART, "before it is measured again"
    shop.machine.receive(DiskSpace(headroom + 20 * PART), shop.now)
    assert begun(shop, ann, 4 * PART, n=2)[1]


def test_a_connection_that_goes_takes_its_uploads_with_it(shop: Shop) -> None:
    ann = shop.client()
    upload, _ = begun(shop, ann, 10 * PART)
    ann.say(*(m.BlobOffer(blob(n), PART) for n in range(1, 30)))
    others = [effect.upload for effect in quiet(shop.turn())]

    ann.leave()

    assert sorted(quiet(shop.turn()), key=lambda e: e.upload) == [
        DropBlob(n) for n in sorted([upload, *others])
    ]
    store = shop.machine.store
    assert (store._uploads, store._uploads_of, store._pulls, len(store._offers)) == ({}, {}, {}, 0)
    assert store._owed_bytes == 0
    assert shop.moved(upload, PART) == []


@pytest.mark.parametrize(
    "part", [m.BlobPart("", 1, bytes(PART), 0), m.BlobPart("", 0, bytes(PART - 1), 0)]
)
def test_a_part_that_was_not_asked_for_ends_the_upload(shop: Shop, part: m.BlobPart) -> None:
    ann = shop.client()
    upload, _ = begun(shop, ann, 2 * PART)

    answer(ann, min(shop.machine.store._pulls), part)

    assert DropBlob(upload) in quiet(shop.turn())
    (refusal,) = ann.all(m.Refusal)
    assert refusal.code == "bad_request"


def test_parts_nobody_waits_for_are_ignored(shop: Shop) -> None:
    ann, eve = shop.client("ann"), shop.client("eve")
    begun(shop, ann, PART)
    (pull,) = shop.machine.store._pulls

    answer(eve, pull, m.BlobPart(blob(), 0, b"x" * PART, PART))
    answer(eve, pull, m.Refusal("refused", "no"))
    answer(ann, pull + 100, m.BlobPart(blob(), 0, b"x" * PART, PART))

    assert quiet(shop.turn()) == []
    assert pull in shop.machine.store._pulls


def test_an_offerer_that_cannot_go_on_ends_its_upload(shop: Shop) -> None:
    ann = shop.client()
    upload, _ = begun(shop, ann, 2 * PART)

    answer(ann, min(shop.machine.store._pulls), m.Refusal("fault", "cannot read"))

    assert quiet(shop.turn()) == [DropBlob(upload)]


def test_an_upload_that_stalls_makes_room_for_others(shop: Shop) -> None:
    ann = shop.client()
    upload, _ = begun(shop, ann, 2 * PART)

    effects = quiet(shop.later(limits.BLOB_STALL_NS / NS + 1))

    assert DropBlob(upload) in effects
    (refusal,) = ann.all(m.Refusal)
    assert "no part of the upload came" in refusal.text


def test_what_the_disk_refuses_is_told_and_forgotten(shop: Shop) -> None:
    ann = shop.client()
    upload, _ = begun(shop, ann, PART)
    ann.heard.clear()

    effects = shop.moved(upload, error=BlobDamaged("another hash"))

    (refusal,) = ann.all(m.Refusal)
    assert refusal.code == "blob_damaged"
    assert not any(isinstance(effect, DropBlob) for effect in effects)
    assert shop.machine.store._uploads == {}


def test_a_broker_that_shuts_down_takes_no_offers(shop: Shop) -> None:
    ann = shop.client()
    shop.machine.receive(Shutdown(), shop.now)
    ann.say(m.BlobOffer(blob(), 10))
    shop.turn()
    assert ann.take(m.Refusal).code == "draining"


# ------------------------------------------------------------------ downloads


def test_a_part_is_read_and_sent_to_whoever_asked(shop: Shop) -> None:
    worker = shop.worker()
    number = worker.say(m.BlobPull(blob(), 5, 10))
    (read,) = quiet(shop.turn())
    assert read == ReadBlob(read.read, blob(), 5, 10)

    shop.machine.receive(BlobRead(read.read, b"0123456789", 99), shop.now)
    shop.turn()

    assert worker.heard == [(number, m.BlobPart(blob(), 5, b"0123456789", 99))]


def test_a_part_that_cannot_be_had_is_refused(shop: Shop) -> None:
    ann = shop.client()
    number = ann.say(m.BlobPull(blob(), 5, 10))
    (read,) = quiet(shop.turn())

    shop.machine.receive(BlobRead(read.read, error=UnknownBlob("no such blob")), shop.now)
    shop.turn()

    ((corr, refusal),) = ann.heard
    assert (corr, refusal.code) == (number, "unknown_blob")


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, 0), (0, -1), (0, PART + 1)])
def test_a_pull_out_of_bounds_is_refused(shop: Shop, offset: int, length: int) -> None:
    ann = shop.client()
    ann.say(m.BlobPull(blob(), offset, length))
    shop.turn()
    assert ann.take(m.Refusal).code == "bad_request"


def test_reads_are_bounded_and_connections_take_turns(shop: Shop) -> None:
    ann, bob = shop.client("ann"), shop.client("bob")
    ann.say(*(m.BlobPull(blob(1), n, 1) for n in range(60)))
    bob.say(m.BlobPull(blob(2), 0, 1))

    reads = quiet(shop.turn())

    assert len(reads) == limits.BLOB_READS_MAX
    assert reads[1].blob == blob(2)
    shop.machine.receive(BlobRead(reads[0].read, b"x", 60), shop.now)
    (read,) = (e for e in quiet(shop.turn()) if isinstance(e, ReadBlob))
    assert read.offset == limits.BLOB_READS_MAX - 1


def test_one_connection_may_not_ask_for_any_number_of_parts(shop: Shop) -> None:
    ann = shop.client()
    ann.say(*(m.BlobPull(blob(), n, 1) for n in range(limits.BLOB_PULLS_PER_CONNECTION + 1)))
    shop.turn()
    assert ann.take(m.Refusal).code == "queue_full"


def test_nothing_is_read_for_a_peer_that_does_not_keep_up(shop: Shop) -> None:
    ann, bob = shop.client("ann"), shop.client("bob")
    shop.machine.receive(Congested(ann.conn), shop.now)
    ann.say(m.BlobPull(blob(1), 0, 1))
    bob.say(m.BlobPull(blob(2), 0, 1))
    assert [effect.blob for effect in quiet(shop.turn())] == [blob(2)]

    shop.machine.receive(Relieved(ann.conn), shop.now)

    assert [effect.blob for effect in quiet(shop.turn())] == [blob(1)]


def test_a_part_read_for_a_peer_that_left_goes_nowhere(shop: Shop) -> None:
    ann = shop.client()
    ann.say(m.BlobPull(blob(1), 0, 1))
    (read,) = quiet(shop.turn())
    ann.leave()

    shop.machine.receive(BlobRead(read.read, b"x", 1), shop.now)

    assert quiet(shop.turn()) == []
