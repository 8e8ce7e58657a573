"""From a folder to a broker: recover the book, take snapshots of it."""

from __future__ import annotations

from msgspec import Struct

from ekiden import limits
from ekiden.broker.machine import BrokerMachine
from ekiden.config import SYNC_ALWAYS, BrokerConfig
from ekiden.core.book import JobBook
from ekiden.core.commands import decode_entry
from ekiden.core.image import dump, load
from ekiden.journal.local import LocalJournal, Recovery, recover_upto
from ekiden.journal.snapshots import write_snapshot
from ekiden.journal.storage import Storage
from ekiden.machine import Instant
from ekiden.model.jobs import Index


class Opened(Struct, frozen=True):
    """A broker ready to listen, and what was cut off the journal's torn tail on the way."""

    machine: BrokerMachine
    torn: list[str]
    damaged: list[str]


def replay(recovery: Recovery) -> JobBook:
    """The book of the newest snapshot, and every entry after it, through the same `apply`."""
    book = load(recovery.snapshot.chunks()) if recovery.snapshot is not None else JobBook()
    for index, payload in recovery.entries():
        book.apply(decode_entry(index, payload))
    return book


def open_broker(
    storage: Storage, config: BrokerConfig, *, key: bytes, broker_id: str, group_id: bytes,
    now: Instant, wall: int, software: str = "", codecs: str = "",
) -> Opened:  # fmt: skip
    """Recover everything, then make the machine. Nothing listens before this returns."""
    journal, recovery = LocalJournal.open(
        storage, now=now, segment_bytes=int(config.segment_mb * (1 << 20)), group=group_id,
        reserve_bytes=limits.RESERVE_BYTES if config.sync == SYNC_ALWAYS else 0,
    )  # fmt: skip
    book = replay(recovery)
    machine = BrokerMachine(
        config,
        journal,
        book,
        key=key,
        broker_id=broker_id,
        now=now,
        wall=wall,
        software=software,
        codecs=codecs,
    )
    # Without one, or with one far behind, the next sweep is to take a snapshot: an idle broker that
    # was killed must not read the same long journal at every start.
    machine.snapshot_index = recovery.snapshot.index if recovery.snapshot is not None else 0
    return Opened(machine, recovery.torn, recovery.damaged)


def take_snapshot(storage: Storage, upto: Index, group_id: bytes, *, tag: str = "") -> Index:
    """Replay the previous snapshot and the closed segments after it; write what comes out.

    Nothing is to be done if a sound snapshot reaches `upto` already.
    """
    recovery = recover_upto(storage, upto)
    if recovery.snapshot is not None and recovery.snapshot.index >= upto:
        return recovery.snapshot.index
    book = replay(recovery)
    write_snapshot(storage, book.applied, group_id, dump(book), tag=tag)
    return book.applied
