"""The broker's side of the bulk lane: bounds, turns, and what is left of what fails."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from tests.unit.broker.house import Far, House, Said, quiet

from ekiden import limits
from ekiden.broker.events import (
    BeginBlob,
    BlobExamined,
    BlobRead,
    BlobsRemoved,
    CacheChecked,
    CheckCache,
    DiskSpace,
    DropBlob,
    ExamineBlob,
    FindUnused,
    ReadBlob,
    RemoveBlobs,
    Shutdown,
    UnusedFound,
    UploadMoved,
    WriteBlob,
)
from ekiden.errors import BadRequest, BlobDamaged, StorageFault, UnknownBlob
from ekiden.limits import NS
from ekiden.machine import Congested, Frame, Log, Received, Relieved
from ekiden.model.caches import CacheUse
from ekiden.wire import messages as m

PART = limits.BLOB_PART_BYTES
MOST = limits.BLOB_LOCAL_PART_BYTES
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

    def tell(self, event: Any) -> list[Any]:
        self.machine.receive(event, self.now)
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
    assert shop.moved(begin.upload) == [FindUnused(2 * PART)], "perhaps something can go"
    effects = shop.tell(UnusedFound([]))

    (refusal,) = ann.all(m.Refusal)
    assert refusal.code == "disk_full"
    assert DropBlob(begin.upload, keep=True) in effects
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
        DropBlob(n, keep=True) for n in sorted([upload, *others])
    ]
    store = shop.machine.store
    assert (store._uploads, store._uploads_of, store._pulls, len(store._offers)) == ({}, {}, {}, 0)
    assert store.room.owed == 0
    assert shop.moved(upload, PART) == []


@pytest.mark.parametrize(
    "part", [m.BlobPart("", 1, bytes(PART), 0), m.BlobPart("", 0, bytes(PART - 1), 0)]
)
def test_a_part_that_was_not_asked_for_ends_the_upload(shop: Shop, part: m.BlobPart) -> None:
    ann = shop.client()
    upload, _ = begun(shop, ann, 2 * PART)

    answer(ann, min(shop.machine.store._pulls), part)

    assert DropBlob(upload, keep=True) in quiet(shop.turn())
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

    assert DropBlob(upload, keep=True) in effects
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


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, 0), (0, -1), (0, MOST + 1)])
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


# ------------------------------------------------------------------ going on with an upload


def test_an_upload_goes_on_behind_what_the_disk_has_of_it(shop: Shop) -> None:
    ann = shop.client()
    size = 6 * PART
    ann.say(m.BlobOffer(blob(), size))
    (begin,) = quiet(shop.turn())

    effects = shop.moved(begin.upload, 3 * PART, held=3 * PART)

    assert shop.pulls(effects) == [m.BlobPull(blob(), n * PART, PART) for n in (3, 4, 5)]
    assert shop.machine.store.room.owed == 3 * PART
    for n, number in enumerate(sorted(shop.machine.store._pulls), 3):
        answer(ann, number, m.BlobPart(blob(), n * PART, bytes(PART), size))
    assert quiet(shop.turn()) == [WriteBlob(begin.upload, bytes(PART))] * 3
    shop.moved(begin.upload, stored=True, held=size)
    assert shop.machine.store.room.owed == 0


def test_an_upload_that_was_resumed_in_vain_is_pulled_from_its_beginning(shop: Shop) -> None:
    ann = shop.client()
    ann.say(m.BlobOffer(blob(), 2 * PART))
    (begin,) = quiet(shop.turn())
    shop.moved(begin.upload, PART, held=PART)
    (number,) = shop.machine.store._pulls
    answer(ann, number, m.BlobPart(blob(), PART, bytes(PART), 2 * PART))
    shop.turn()

    effects = shop.moved(begin.upload, 0)

    assert shop.pulls(effects) == [m.BlobPull(blob(), n * PART, PART) for n in (0, 1)]
    assert shop.machine.store.room.owed == 2 * PART


def test_a_program_that_is_back_before_its_old_line_is_known_to_be_dead_goes_on(
    shop: Shop,
) -> None:
    old = shop.client("ann", session="s1")
    upload, _ = begun(shop, old, 6 * PART)
    new, other = shop.client("ann", session="s1"), shop.client("ann", session="s2")

    other.say(m.BlobOffer(blob(), 6 * PART))
    (begin,) = quiet(shop.turn())
    assert isinstance(begin, BeginBlob), "of another program nothing is taken over"
    new.say(m.BlobOffer(blob(), 6 * PART))
    drop, begin = quiet(shop.turn())

    assert drop == DropBlob(upload, keep=True)
    assert begin == BeginBlob(begin.upload, blob(), 6 * PART)


# ------------------------------------------------------------------ room


def full_shop(referenced: str = "") -> tuple[Shop, Far, int]:
    """A store for ten parts that holds eight, and an upload of four that waits for room."""
    shop = Shop(blobs_max=10 * PART)
    shop.machine.store.room._referenced = lambda name: name == referenced
    ann = shop.client()
    ann.say(m.BlobOffer(blob(1), 4 * PART))
    (begin,) = quiet(shop.turn())
    assert shop.moved(begin.upload, held=8 * PART) == [FindUnused(2 * PART)]
    return shop, ann, begin.upload


def test_an_upload_that_does_not_fit_waits_until_room_is_made() -> None:
    shop, ann, _ = full_shop()

    assert shop.tell(UnusedFound([(blob(7), 70)], True, 8 * PART)) == [RemoveBlobs([(blob(7), 70)])]
    effects = shop.tell(BlobsRemoved(1, 3 * PART, 5 * PART))

    assert len(shop.pulls(effects)) == WINDOW
    assert not any(isinstance(effect, FindUnused) for effect in effects), "there is room"
    assert ann.all(m.Refusal) == []


def test_too_little_room_is_looked_for_again_as_long_as_there_may_be_more() -> None:
    shop, ann, upload = full_shop()
    shop.tell(UnusedFound([(blob(7), 70)], True, 8 * PART))

    assert shop.tell(BlobsRemoved(1, PART, 7 * PART)) == [FindUnused(PART, new=False)]
    shop.tell(UnusedFound([(blob(8), 80)], False, 7 * PART))
    effects = shop.tell(BlobsRemoved(0, 0, 7 * PART))

    (refusal,) = ann.all(m.Refusal)
    assert (refusal.code, refusal.retry_after_ms) == ("store_full", 60_000)
    assert "--blobs-max" in refusal.remedy
    assert DropBlob(upload, keep=True) in effects
    assert shop.turn() == []


def test_what_the_book_refers_to_is_never_removed() -> None:
    shop, ann, _ = full_shop(referenced=blob(7))

    assert shop.tell(UnusedFound([(blob(7), 70), (blob(8), 80)], True, 8 * PART)) == [
        RemoveBlobs([(blob(8), 80)])
    ]
    assert shop.tell(BlobsRemoved(0, 0, 8 * PART)) == [FindUnused(2 * PART, new=False)]
    shop.tell(UnusedFound([(blob(7), 70)], False, 8 * PART))

    assert ann.take(m.Refusal).code == "store_full"


def test_what_is_promised_to_uploads_counts_against_the_quota() -> None:
    shop = Shop(blobs_max=10 * PART)
    ann = shop.client()
    begun(shop, ann, 8 * PART, n=1)
    ann.say(m.BlobOffer(blob(2), 4 * PART))
    (begin,) = quiet(shop.turn())

    assert shop.moved(begin.upload) == [FindUnused(2 * PART)]


def test_an_upload_larger_than_the_quota_is_refused_and_nothing_is_removed_for_it() -> None:
    shop = Shop(blobs_max=10 * PART)
    ann = shop.client()
    ann.say(m.BlobOffer(blob(1), 11 * PART))
    (begin,) = quiet(shop.turn())

    effects = shop.moved(begin.upload)

    assert ann.take(m.Refusal).code == "store_full"
    assert DropBlob(begin.upload, keep=True) in effects
    assert not any(isinstance(effect, FindUnused) for effect in effects)


def test_one_that_leaves_while_it_waits_for_room_is_forgotten() -> None:
    shop, ann, upload = full_shop()

    ann.leave()

    assert quiet(shop.turn()) == [DropBlob(upload, keep=True)]
    assert shop.tell(UnusedFound([], True, 8 * PART)) == []


def test_after_a_search_in_vain_the_next_begins_a_little_later() -> None:
    shop, ann, _ = full_shop()
    shop.tell(UnusedFound([], held=8 * PART))
    assert ann.take(m.Refusal).code == "store_full"

    ann.say(m.BlobOffer(blob(2), 4 * PART))
    (begin,) = quiet(shop.turn())
    assert FindUnused(2 * PART) not in shop.moved(begin.upload, held=8 * PART)
    assert ann.take(m.Refusal).code == "store_full"
    shop.later(limits.BLOB_VAIN_NS / NS)
    ann.heard.clear()
    ann.say(m.BlobOffer(blob(2), 4 * PART))
    (begin,) = quiet(shop.turn())

    assert shop.moved(begin.upload, held=8 * PART) == [FindUnused(2 * PART)]
    assert ann.all(m.Refusal) == []


def test_what_nobody_used_for_very_long_is_looked_for_now_and_then(shop: Shop) -> None:
    found = quiet(shop.later(limits.BLOB_FIRST_SWEEP_NS / NS + 1))
    assert found == [FindUnused(0)]

    assert shop.tell(UnusedFound([(blob(1), 10)], False, PART)) == [RemoveBlobs([(blob(1), 10)])]
    shop.machine.receive(BlobsRemoved(1, PART, 0), shop.now)

    (line,) = (effect for effect in shop.turn() if isinstance(effect, Log))
    assert (line.event, line.facts["removed"]) == ("blobs.removed", 1)


def test_nothing_goes_before_all_caches_of_the_book_are_held() -> None:
    shop = Shop(blobs_max=10 * PART)
    caches = [CacheUse(f"c{n}", blob(100 + n), 10) for n in range(2)]
    shop.machine.store.hold_caches(caches)
    shop.turn()
    checks, shop.checking = shop.checking, []
    assert checks == [CheckCache(-n, cache, known=True) for n, cache in enumerate(caches, 1)]
    ann = shop.client()
    ann.say(m.BlobOffer(blob(1), 4 * PART))
    (begin,) = quiet(shop.turn())
    assert shop.moved(begin.upload, held=8 * PART) == []
    assert shop.tell(CacheChecked(-1, 3, 30)) == []

    effects = shop.tell(CacheChecked(-2, 3, 30))

    assert effects == [FindUnused(2 * PART)]


def test_a_cache_of_the_book_that_is_damaged_is_told(shop: Shop) -> None:
    shop.machine.store.hold_caches([CacheUse("c1", blob(100), 10)])
    shop.turn()
    shop.machine.receive(CacheChecked(-1, missing=2), shop.now)
    (line,) = shop.turn()
    assert (line.event, line.facts["cache"], line.facts["missing"]) == ("cache.incomplete", "c1", 2)


# ------------------------------------------------------------------ damage


def test_what_a_peer_found_spoiled_is_examined_one_at_a_time(shop: Shop) -> None:
    worker = shop.worker()
    worker.say(*(m.BlobSpoiled(blob(n), PART) for n in (1, 2, 1)))

    assert quiet(shop.turn()) == [ExamineBlob(blob(1))]
    worker.say(m.BlobSpoiled(blob(1), PART))
    assert quiet(shop.turn()) == []
    assert shop.tell(BlobExamined(blob(1), damaged=False)) == [ExamineBlob(blob(2))]
    shop.machine.receive(BlobExamined(blob(2), True, "there"), shop.now)

    (line,) = shop.turn()
    assert (line.level, line.event, line.facts["blob"]) == ("error", "blob.damaged", blob(2))
    assert line.facts["kept"] == "there"
    assert worker.heard == [], "no answer"


def test_what_was_found_sound_is_not_examined_again_for_a_while(shop: Shop) -> None:
    worker = shop.worker()
    worker.say(m.BlobSpoiled(blob(1), PART))
    shop.turn()
    shop.tell(BlobExamined(blob(1), damaged=False))

    worker.say(m.BlobSpoiled(blob(1), PART))
    assert quiet(shop.turn()) == []
    shop.later(limits.BLOB_SUSPECT_AGAIN_NS / NS)
    worker.say(m.BlobSpoiled(blob(1), PART))

    assert ExamineBlob(blob(1)) in quiet(shop.turn())


def test_few_suspects_wait(shop: Shop) -> None:
    worker = shop.worker()
    worker.say(*(m.BlobSpoiled(blob(n), PART) for n in range(500)))
    shop.turn()
    assert len(shop.machine.store._suspects) < limits.BLOB_SUSPECTS_MAX


@pytest.mark.parametrize("error", [BadRequest("beyond the end"), StorageFault("bad sector")])
def test_a_part_the_disk_cannot_give_is_a_reason_to_look(shop: Shop, error: Any) -> None:
    ann = shop.client()
    ann.say(m.BlobPull(blob(1), 0, 1))
    (read,) = quiet(shop.turn())

    assert ExamineBlob(blob(1)) in shop.tell(BlobRead(read.read, error=error))
