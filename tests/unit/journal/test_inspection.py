"""`verify` and `dump` read a journal from outside."""

from __future__ import annotations

import pytest
from tests.unit.journal.disks import GROUP, files_of, opened, payload, write

from ekiden.errors import CorruptJournal, StorageFault
from ekiden.journal.housekeeping import tidy
from ekiden.journal.inspection import dump, verify
from ekiden.journal.local import perform
from ekiden.journal.records import HEADER_BYTES, RECORD_BYTES
from ekiden.journal.segments import list_segments
from ekiden.journal.snapshots import snapshot_name, write_snapshot
from ekiden.journal.storage import MemoryStorage


def history(entries: int = 30) -> MemoryStorage:
    storage = MemoryStorage()
    journal, _ = opened(storage, 300)
    for n in range(1, entries + 1):
        write(storage, journal, [payload(n)])
    journal.trim()
    write_snapshot(storage, 20, GROUP, [b"state", b"more"])
    tidy(storage, snapshot_index=20, now_wall=5, keep_ns=5, keep_bytes=1 << 30)
    return storage


def broken(storage: MemoryStorage, name: str, offset: int) -> MemoryStorage:
    data = bytearray(storage.read(name))
    data[offset] ^= 1
    return MemoryStorage({**files_of(storage), name: bytes(data)})


def test_a_sound_folder_is_ok_and_every_entry_is_counted() -> None:
    storage = history()
    before = files_of(storage)

    report = verify(storage)

    assert report.ok and report.problems == []
    segments = [file for file in report.files if file.kind == "segment"]
    snapshots = [file for file in report.files if file.kind == "snapshot"]
    assert sum(file.records for file in segments) == 30
    assert (segments[0].first, segments[-1].last) == (1, 30)
    assert [(s.name, s.records, s.last) for s in snapshots] == [(snapshot_name(20), 2, 20)]
    assert all(file.bytes == storage.size(file.name) for file in report.files)
    assert files_of(storage) == before


def test_damage_is_reported_with_file_and_offset() -> None:
    storage = history()
    raw = next(segment for segment in list_segments(storage) if not segment.compressed)
    second = HEADER_BYTES + RECORD_BYTES + len(payload(raw.first))

    report = verify(broken(storage, raw.name, second + RECORD_BYTES))

    assert [(problem.file, problem.offset) for problem in report.problems] == [(raw.name, second)]
    assert not report.ok


def test_damage_to_snapshots_and_compressed_segments_is_reported() -> None:
    storage = history()
    packed = next(segment for segment in list_segments(storage) if segment.compressed)

    for name in (snapshot_name(20), packed.name):
        report = verify(broken(storage, name, 60))
        assert [problem.file for problem in report.problems] == [name]


def test_a_missing_segment_is_reported() -> None:
    storage = history()
    storage.remove(list_segments(storage)[-2].name)

    assert ["are in no file" in problem.message for problem in verify(storage).problems] == [True]


def test_an_unfinished_append_of_a_live_broker_is_a_note() -> None:
    storage = history()
    storage.append(list_segments(storage)[-1].name, b"\x10\x00")

    report = verify(storage)

    assert report.ok
    assert any("unfinished" in note for file in report.files for note in file.notes)
    assert len(list(dump(storage))) == 30


def test_a_segment_that_is_being_made_is_a_note() -> None:
    storage = history()
    storage.create("segment-00000000000000000031.log")
    storage.append("segment-00000000000000000031.log", b"ekid")

    assert verify(storage).ok
    assert len(list(dump(storage))) == 30


def test_what_an_earlier_recovery_set_aside_is_noted() -> None:
    storage = history()
    storage.create("snapshot-00000000000000000009.snap.damaged")
    storage.create("snapshot-00000000000000000031.snap.77.tmp")

    assert verify(storage).ok
    assert len(verify(storage).notes) == 2


def test_dump_stops_at_damage_after_what_was_sound() -> None:
    storage = history()
    last = list_segments(storage)[-1]
    seen: list[int] = []
    entries = dump(broken(storage, last.name, HEADER_BYTES + RECORD_BYTES))

    with pytest.raises(CorruptJournal):
        seen.extend(index for index, _ in entries)

    assert seen == list(range(1, last.first))


def test_dump_of_an_empty_folder_is_empty() -> None:
    assert list(dump(MemoryStorage())) == []
    assert verify(MemoryStorage()).ok


class TidiedMeanwhile(MemoryStorage):
    """Somebody else replaces or deletes files between our listing and our reading."""

    def __init__(self, files: dict[str, bytes], then: dict[str, bytes]) -> None:
        super().__init__(files)
        self._then: dict[str, bytes] | None = then

    def names(self) -> list[str]:
        seen = super().names()
        if self._then is not None:
            self.__init__(self._then, {})  # type: ignore[misc]
            self._then = None
        return seen


def test_files_that_are_compressed_while_we_read_are_found_under_their_new_name() -> None:
    storage = history()
    write_snapshot(storage, 28, GROUP, [b"state"])
    before = files_of(storage)
    tidy(storage, snapshot_index=28, now_wall=5, keep_ns=5, keep_bytes=1 << 30)
    after = files_of(storage)
    assert before.keys() != after.keys()

    assert len(list(dump(TidiedMeanwhile(before, after)))) == 30


def test_reading_a_live_journal_sees_whole_entries_only() -> None:
    storage = MemoryStorage()
    journal, _ = opened(storage)
    write(storage, journal, [b"a"])
    journal.propose(b"b" * 100)
    append = journal.advance(0).append
    assert append is not None
    perform(storage, append)
    journal.persisted(append.upto)
    journal.trim()
    storage.truncate(append.file, storage.size(append.file) - 10)

    assert list(dump(storage)) == [(1, b"a")]


def test_a_file_that_cannot_be_read_is_a_problem() -> None:
    class Unreadable(MemoryStorage):
        def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
            raise StorageFault(f"cannot read {name!r}: input/output error")

    report = verify(Unreadable(files_of(history())))

    assert not report.ok
    assert {problem.file for problem in report.problems} == set(history().names())


class ReadInParts(MemoryStorage):
    """A broker appends while somebody reads: the first look has an old page before a newer one."""

    def __init__(self, files: dict[str, bytes], name: str, stale: slice) -> None:
        super().__init__(files)
        self._name, self._stale = name, stale

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        data = bytearray(super().read(name, offset, size))
        if name == self._name and size < 0 and self._stale.start < len(data):
            data[self._stale] = bytes(len(data[self._stale]))
            self._stale = slice(1 << 30, 1 << 30)
        return bytes(data)


def test_a_page_read_before_it_was_written_is_not_taken_for_damage() -> None:
    storage = MemoryStorage()
    journal, _ = opened(storage)
    for n in range(1, 100):
        write(storage, journal, [payload(n)])
    name = storage.names()[0]

    def in_parts() -> MemoryStorage:
        return ReadInParts(files_of(storage), name, slice(1024, 2048))

    assert verify(in_parts()).ok
    assert len(list(dump(in_parts()))) == 99


def test_the_room_of_the_open_segment_is_nothing_and_of_a_closed_one_a_problem() -> None:
    storage = MemoryStorage()
    journal, _ = opened(storage)
    write(storage, journal, [b"a"])
    report = verify(storage)
    assert storage.size(storage.names()[0]) > 1000
    assert report.ok
    assert report.files[0].notes == []
    assert list(dump(storage)) == [(1, b"a")]

    closed = storage.names()[0]
    room = files_of(storage)[closed]
    journal.roll()
    write(storage, journal, [b"b"])
    broken = MemoryStorage({**files_of(storage), closed: room})

    assert [problem.file for problem in verify(broken).problems] == [closed]
    with pytest.raises(CorruptJournal, match="zeros follow its last record"):
        list(dump(broken))
