"""What earlier releases wrote about jobs is read by this one: entries, and the state in a snapshot.

`history_v1.hex` holds entries of journal version 1, a line each, then the chunks of a snapshot taken
after them. In it "a" has failed with a note, "b" is done with one, "c" is leased.
"""

from __future__ import annotations

from pathlib import Path

from ekiden.core import commands as c
from ekiden.core import image, invariants
from ekiden.core.book import JobBook
from ekiden.model import jobs as j

HERE = Path(__file__).parent


def history() -> tuple[list[bytes], list[bytes]]:
    entries, chunks = (HERE / "history_v1.hex").read_text().split("--\n")
    return [bytes.fromhex(line) for line in entries.split()], [
        bytes.fromhex(line) for line in chunks.split()
    ]


def check(book: JobBook) -> None:
    invariants.check(book)
    failed, done, leased = (book.find(job_id) for job_id in "abc")
    assert failed is not None
    assert failed.place.state == j.FAILED
    assert failed.history == [
        j.Cause(1, "w1", j.HANDLER_ERROR, "boom", book.wall, True, j.Note(3, 1, 2, 4), b"")
    ]
    assert done is not None
    assert (done.body, done.note) == (b"out", j.Note(0, 5, 6, 7, j.OUT_PLAIN))
    assert leased is not None
    assert leased.origin.spec.shared == b""


def test_entries_of_version_1_are_applied() -> None:
    entries, _ = history()
    book = JobBook()

    for index, payload in enumerate(entries, 1):
        book.apply(c.decode_entry(index, payload))

    check(book)


def test_a_snapshot_of_version_1_is_loaded() -> None:
    _, chunks = history()

    check(image.load(chunks))
