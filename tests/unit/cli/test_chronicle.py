"""`ekiden log dump`: a journal told job by job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ekiden.cli.chronicle import lines
from ekiden.core import commands as c
from ekiden.core import image
from ekiden.core.book import JobBook
from ekiden.errors import CorruptJournal
from ekiden.journal.records import SEGMENT_MAGIC, encode_header, encode_records
from ekiden.journal.snapshots import write_snapshot
from ekiden.journal.storage import MemoryStorage
from ekiden.limits import NS
from ekiden.model import jobs as j

GROUP = bytes(16)
DAWN = 1_700_000_000 * NS


class Journal:
    """Entries written as a broker writes them, one append each."""

    def __init__(self, first: int = 1) -> None:
        self.storage = MemoryStorage()
        self.book = JobBook()
        self.file = f"segment-{first:020d}.log"
        self.storage.create(self.file)
        self.storage.append(self.file, encode_header(SEGMENT_MAGIC, first, GROUP))
        self.index = first - 1
        self.time = 0

    def add(self, *commands: Any, seconds: float = 1) -> Journal:
        self.index += 1
        self.time += int(seconds * NS)
        payload = c.encode_payload(self.time, DAWN + self.time, list(commands))
        self.storage.append(self.file, encode_records(self.index, [payload], GROUP))
        if self.book.applied == self.index - 1:
            self.book.apply(c.decode_entry(self.index, payload))
        return self

    def told(self, **options: Any) -> list[dict[str, Any]]:
        return list(lines(self.storage, **options))

    def events(self) -> list[tuple[str, str]]:
        return [(line["event"], line.get("job", "")) for line in self.told()]


ROUTE = j.Route("job.assign.echo")


def after(worker: str) -> j.Route:
    """Where a job waits whose last attempt failed there."""
    return msgspec.structs.replace(ROUTE, avoid=worker)


def submit(*ids: str, body: bytes = b"input", **spec: Any) -> c.Submit:
    raw = msgspec.msgpack.encode(j.Spec("echo", ROUTE, **spec))
    digests = b"".join(body[:1] * 8 for _ in ids)
    return c.Submit("ada", "s1", msgspec.Raw(raw), list(ids), digests, [body] * len(ids))


def test_a_plain_life_is_enqueue_assign_ack() -> None:
    journal = Journal().add(submit("j1", "j2"), c.Assign("w1", ROUTE, 2))
    journal.add(c.Finish("w1", 1, None, [b"out", b""]))

    assert journal.events() == [
        ("enqueue", "j1"),
        ("enqueue", "j2"),
        ("assign", "j1"),
        ("assign", "j2"),
        ("ack", "j1"),
        ("ack", "j2"),
    ]
    first, *_, last = journal.told()
    assert first == {
        "index": 1,
        "at": "2023-11-14T22:13:21.000+00:00",
        "event": "enqueue",
        "job": "j1",
        "client": "ada",
        "name": "echo",
        "subject": "job.assign.echo",
        "priority": 0,
        "bytes": 5,
    }
    assert last["index"] == 2
    assert (last["worker"], last["attempt"], last["bytes"]) == ("w1", 1, 0)


def test_a_repeated_submit_is_not_enqueued_twice_and_a_conflict_not_at_all() -> None:
    journal = Journal().add(submit("j1")).add(submit("j1", "j2")).add(submit("j1", body=b"other"))

    assert journal.events() == [("enqueue", "j1"), ("enqueue", "j2")]


def test_the_last_attempt_is_a_dead_letter_and_those_before_are_not() -> None:
    journal = Journal().add(submit("j1", max_attempts=2), c.Assign("w1", ROUTE, 1))
    journal.add(c.Fail("w1", 1, [0], [j.HANDLER_ERROR], ["boom"]))
    journal.add(c.Tick(), c.Assign("w2", after("w1"), 1), seconds=60)
    journal.add(c.Fail("w2", 2, [0], [j.HANDLER_ERROR], ["boom again"]))

    told = journal.told()
    assert [line["event"] for line in told] == [
        *("enqueue", "assign", "assign_failed", "assign", "dlq"),
    ]
    assert told[2]["cause"] == "handler_error"
    assert [cause["message"] for cause in told[4]["causes"]] == ["boom", "boom again"]
    assert told[4]["reason"] == "handler_error"


def test_a_lost_worker_a_timeout_and_a_lease_given_back_have_their_own_names() -> None:
    spec: dict[str, Any] = {"max_attempts": 9, "retry_on": (j.TIMEOUT, j.WORKER_LOST)}
    journal = Journal().add(submit("j1", **spec), c.Assign("w1", ROUTE, 1))
    journal.add(c.Release("w1", 1, [0]), c.Assign("w2", ROUTE, 1))
    journal.add(c.Fail("w2", 2, [0], [j.TIMEOUT], ["too slow"]))
    journal.add(c.Tick(), c.Assign("w3", after("w2"), 1), seconds=60)
    journal.add(c.Forfeit("w3", [(3, 0)]))

    told = journal.told()
    assert [line["event"] for line in told] == [
        *("enqueue", "assign", "assign_failed", "assign"),
        *("timeout_requeue", "assign", "worker_down_requeue"),
    ]
    # Release and the next assign shared an entry: each line tells the attempt it is about.
    assert (told[2]["cause"], told[2]["attempt"], told[3]["attempt"]) == ("released", 1, 2)
    assert told[6]["burned"] is True


def test_cancel_expire_replay_and_purge_are_told_per_job() -> None:
    expiring = msgspec.structs.replace(submit("j3"), expires_at=DAWN + 1)
    journal = Journal().add(submit("j1"), c.Assign("w1", ROUTE, 1), submit("j2"), expiring)
    journal.add(c.Cancel(["j1", "j2", "nobody"]))
    journal.add(c.Fail("w1", 1, [0], [j.CANCEL_CONFIRMED], [""]), c.Clock(DAWN + 10 * NS))
    journal.add(c.Replay(["j2", "nobody"])).add(c.Purge(["j1"]))

    told = journal.told()[4:]
    assert [(line["event"], line["job"], line.get("state")) for line in told] == [
        ("cancel", "j2", "cancelled"),
        ("cancel", "j1", "cancelling"),
        ("cancel", "j1", "cancelled"),
        ("expire", "j3", None),
        ("replay", "j2", None),
        ("purge", "j1", None),
    ]


def test_settings_and_snapshots_stand_in_the_story() -> None:
    journal = Journal().add(c.Configure(c.Settings(max_attempts=7))).add(submit("j1"))
    write_snapshot(journal.storage, 1, GROUP, image.dump(JobBook()))

    assert [(line["event"], line["index"]) for line in journal.told()] == [
        ("configure", 1),
        ("snapshot_marker", 1),
        ("enqueue", 2),
    ]
    assert journal.told()[0]["settings"]["max_attempts"] == 7


def test_without_the_beginning_the_story_starts_at_the_oldest_snapshot() -> None:
    whole = Journal().add(submit("j1")).add(submit("j2"))
    book = whole.book
    late = Journal(first=2)
    late.add(submit("j2"))
    late.index, late.time = 2, whole.time
    late.add(c.Assign("w1", ROUTE, 2))
    write_snapshot(late.storage, 2, GROUP, image.dump(book))

    told = late.told()

    assert [(line["event"], line.get("job"), line.get("folded")) for line in told] == [
        ("enqueue", "j2", False),
        ("snapshot_marker", None, None),
        ("assign", "j1", None),
        ("assign", "j2", None),
    ]


def test_from_an_index_on_the_earlier_entries_are_folded_but_not_told() -> None:
    journal = Journal().add(submit("j1")).add(c.Assign("w1", ROUTE, 1))

    assert [line["job"] for line in journal.told(from_index=2)] == ["j1"]


def test_damage_ends_the_story_with_its_place() -> None:
    journal = Journal().add(submit("j1")).add(submit("j2")).add(submit("j3"))
    data = bytearray(journal.storage.read(journal.file))
    data[data.index(b"j2")] ^= 1
    journal.storage.truncate(journal.file, 0)
    journal.storage.append(journal.file, bytes(data))

    with pytest.raises(CorruptJournal) as caught:
        journal.told()
    assert caught.value.offset > 0
