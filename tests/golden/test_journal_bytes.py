"""The bytes of every released journal version stay readable, and those of this one do not change.

The files are hexadecimal, 32 bytes a line. They are never written again: a new version gets a
folder of its own beside `journal_v1` (docs/JOURNAL.md, "Changing the format").
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiden.journal.inspection import dump, verify
from ekiden.journal.local import LocalJournal, perform
from ekiden.journal.snapshots import SnapshotReader, write_snapshot
from ekiden.journal.storage import MemoryStorage
from ekiden.limits import JOURNAL_VERSION

HERE = Path(__file__).parent
GROUP = bytes(range(0xA0, 0xB0))
APPENDS = [[b"first"], [b"", b"two in one append"], [b"\x00" * 40]]
CHUNKS = [b"state of the book", b"", b"and its tail"]
RAW = "segment-00000000000000000001.log"
SNAPSHOT = "snapshot-00000000000000000004.snap"


def golden(version: int) -> dict[str, bytes]:
    folder = HERE / f"journal_v{version}"
    return {path.stem: bytes.fromhex(path.read_text()) for path in folder.glob("*.hex")}


def written_now() -> dict[str, bytes]:
    storage = MemoryStorage()
    journal, _ = LocalJournal.open(storage, now=0, group=GROUP)
    for payloads in APPENDS:
        for payload in payloads:
            journal.propose(payload)
        append = journal.advance(0).append
        assert append is not None
        perform(storage, append)
        journal.persisted(append.upto)
    journal.trim()
    write_snapshot(storage, 4, GROUP, CHUNKS)
    return {name: storage.read(name) for name in storage.names()}


def test_this_version_writes_the_golden_bytes() -> None:
    files = golden(JOURNAL_VERSION)

    assert written_now() == {name: files[name] for name in (RAW, SNAPSHOT)}


@pytest.mark.parametrize("version", range(1, JOURNAL_VERSION + 1))
@pytest.mark.parametrize("form", [RAW, RAW + ".zst"])
def test_every_released_version_is_read(version: int, form: str) -> None:
    files = golden(version)
    storage = MemoryStorage({form: files[form], SNAPSHOT: files[SNAPSHOT]})

    assert verify(storage).ok
    payloads = [payload for append in APPENDS for payload in append]
    assert list(dump(storage)) == list(enumerate(payloads, start=1))
    reader = SnapshotReader(storage, SNAPSHOT)
    assert (reader.index, reader.group, list(reader.chunks())) == (4, GROUP, CHUNKS)


def test_the_record_of_the_document_is_the_first_golden_one() -> None:
    """docs/JOURNAL.md shows these bytes; if they change, so must the page."""
    page = (HERE.parent.parent / "docs" / "JOURNAL.md").read_text()
    data = golden(JOURNAL_VERSION)[RAW]

    for start, end in ((0, 40), (40, 65)):
        shown = data[start:end].hex(" ")
        assert shown in " ".join(page.split()), shown
