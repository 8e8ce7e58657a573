"""The journal of a real broker, cut at every byte of its last records.

A cut is what a power loss leaves of an append that was under way. The broker that opens it must
stand where the last whole record left it: nothing more, nothing less, and able to go on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.processes import Site, until, wait_workers

from ekiden.broker.recovery import open_broker
from ekiden.config import BrokerConfig
from ekiden.core.book import JobBook
from ekiden.core.commands import Tick, decode_entry, encode_payload
from ekiden.core.image import fingerprint
from ekiden.core.invariants import check
from ekiden.journal.inspection import verify
from ekiden.journal.local import perform
from ekiden.journal.records import HEADER_BYTES, scan
from ekiden.journal.storage import MemoryStorage

BYTES_CUT = 20_000  # more than there are: every byte of all records
CONFIG = BrokerConfig()


def a_busy_life(site: Site) -> None:
    """Every kind of command enters the journal; then the broker is killed."""
    site.start_broker()
    client = site.client()
    worker = site.start_worker()
    wait_workers(client)
    client.submit_many("echo", [b"x" * n for n in range(40)], run="sizes")[-1].result(20)
    client.submit("fail", payload=b"once", max_attempts=1, job_id="dead").exception(20)
    retried = client.submit("fail", payload=b"again", max_attempts=2, job_id="tried")
    client.submit("echo", delay_s=3600, job_id="later").wait_accepted(20)
    client.submit("echo", not_before=4e9, expires_at=4.1e9, job_id="much-later").wait_accepted(20)
    client.submit("nobody", job_id="waits", priority=3).wait_accepted(20)
    client.submit("nobody", job_id="given-up").wait_accepted(20)
    assert client.cancel(["given-up"])["cancelled"] == 1
    assert client.submit("nobody", payload=b"other", job_id="waits").exception(20) is not None
    assert client.ask("replay", ids=["dead"])["replayed"] == 1
    until(lambda: client.job("dead")["state"] == "failed", "the replayed job to fail again")
    assert client.ask("purge", ids=["given-up"])["purged"] == 1
    gate = site.folder / "gate"
    client.submit("gate", payload=str(gate), job_id="runs")
    until(lambda: gate.with_suffix(".began").exists(), "a job to run")
    retried.exception(20)
    worker.kill()
    for number in range(12):
        client.submit("echo", payload=b"%d" % number, job_id=f"last-{number}").wait_accepted(20)
    site.broker.kill()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a killed broker left: names, and content without the room behind it."""
    site = Site(tmp_path_factory.mktemp("torn"))
    try:
        a_busy_life(site)
        found = {p.name: p.read_bytes() for p in site.data.iterdir() if p.suffix == ".log"}
        return {name: data[: end_of(data)] for name, data in found.items()}
    finally:
        site.close()


def end_of(data: bytes) -> int:
    """Where the last record ends. Only zeros may follow."""
    found = scan(data)
    assert len(list(found)) > 0
    assert found.torn == ""
    return found.end


def prints_of(data: bytes) -> dict[int, tuple[int, str]]:
    """End of each record → the index it has, and the print of the book after it."""
    book = JobBook()
    found = {HEADER_BYTES: (0, fingerprint(book))}
    ends = [record.offset for record in scan(data)][1:]
    for record, end in zip(scan(data), [*ends, len(data)], strict=True):
        book.apply(decode_entry(record.index, record.payload))
        found[end] = (record.index, fingerprint(book))
    return found


def open_cut(name: str, data: bytes) -> tuple[MemoryStorage, JobBook, list[str]]:
    storage = MemoryStorage({name: data})
    opened = open_broker(
        storage, CONFIG, key=bytes(32), broker_id="b", group_id=bytes(16), now=0, wall=0
    )
    return storage, opened.machine.book, opened.torn


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 700])
def test_a_cut_at_any_byte_leaves_the_book_of_the_last_whole_record(
    files: dict[str, bytes], room: int
) -> None:
    ((name, data),) = files.items()
    prints = prints_of(data)
    ends = sorted(prints)
    assert ends[-1] == len(data)

    for cut in range(max(HEADER_BYTES, len(data) - BYTES_CUT), len(data) + 1):
        # Zeros at the end of a record are there, whether they were written or are room.
        whole = max(end for end in ends if end <= cut or (room and not any(data[cut:end])))
        _, book, torn = open_cut(name, data[:cut] + bytes(room))

        assert (book.applied, fingerprint(book)) == prints[whole], f"cut at byte {cut}"
        assert bool(torn) == any(data[whole:cut]), f"cut at byte {cut} was reported as {torn}"


def test_the_book_of_every_prefix_is_consistent(files: dict[str, bytes]) -> None:
    ((name, data),) = files.items()
    for end in prints_of(data):
        _, book, _ = open_cut(name, data[:end])
        check(book)


@pytest.mark.parametrize("short", [1, 7, 40, 200])
def test_a_cut_journal_goes_on_where_it_was_cut(files: dict[str, bytes], short: int) -> None:
    ((name, data),) = files.items()
    storage = MemoryStorage({name: data[:-short]})
    opened = open_broker(
        storage, CONFIG, key=bytes(32), broker_id="b", group_id=bytes(16), now=0, wall=0
    )
    journal = opened.machine.journal
    before = journal.committed
    journal.propose(encode_payload(opened.machine.book.time, 0, [Tick()]))
    append = journal.advance(0).append
    assert append is not None
    perform(storage, append)
    journal.persisted(append.upto)

    assert verify(storage).ok
    _, book, torn = open_cut(name, bytes(storage.read(name)))
    assert (book.applied, torn) == (before + 1, [])


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_broker_process_serves_a_cut_journal_and_says_what_it_cut(
    site: Site, files: dict[str, bytes], share: float
) -> None:
    ((name, data),) = files.items()
    cut = int(len(data) * share)
    # Ids differ from run to run, and so does where records end; a record is longer than a byte.
    cut += cut in prints_of(data)
    index, _ = prints_of(data)[max(end for end in prints_of(data) if end <= cut)]
    site.data.mkdir(mode=0o700)
    (site.data / name).write_bytes(data[:cut])

    broker = site.start_broker()
    client = site.client()

    assert client.stats()["index"] >= index
    assert "journal.recovered" in broker.logged()
    client.submit("nobody", job_id="after-the-cut").wait_accepted(20)
    assert broker.terminate() == 0
    assert site.run("log", "verify", str(site.data), "--json").json["ok"]
    for path in site.data.glob("segment-*.log"):
        assert end_of(path.read_bytes()) == path.stat().st_size, "a broker in good order left room"


def test_damage_in_the_middle_is_refused_with_its_place_and_nothing_is_changed(
    site: Site, files: dict[str, bytes]
) -> None:
    ((name, data),) = files.items()
    at = len(data) // 2
    damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
    site.data.mkdir(mode=0o700)
    path: Path = site.data / name
    path.write_bytes(damaged)

    outcome = site.run("broker", "--port", "0", "--data", str(site.data), "--json")

    assert outcome.code == 4
    assert outcome.error["code"] == "corrupt"
    assert name in outcome.error["message"]
    assert outcome.error["remedy"]
    assert path.read_bytes() == damaged
