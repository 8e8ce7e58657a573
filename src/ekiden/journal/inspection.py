"""Reading a journal from outside: `ekiden log verify` and `ekiden log dump`.

Both only read, need no lock, and may look at a folder that a broker is writing to: a last record
that is not whole yet is a note there, not a problem; the room behind it is not worth a word; and a
file that was tidied away meanwhile is looked for under its new name, or passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from msgspec import Struct, field

from ekiden.errors import CorruptJournal, StorageFault, VersionMismatch
from ekiden.journal.segments import (
    Segment,
    is_stillborn,
    list_segments,
    replay,
    scan_segment,
)
from ekiden.journal.snapshots import (
    DAMAGED_SUFFIX,
    TEMP_SUFFIX,
    SnapshotReader,
    index_of_snapshot,
    snapshot_names,
)
from ekiden.journal.storage import Storage
from ekiden.model.jobs import Index


class Problem(Struct, frozen=True):
    """Something wrong, and where."""

    file: str
    offset: int
    message: str


class FileReport(Struct):
    """One file. For a snapshot `records` counts chunks, and `last` is the index it covers."""

    name: str
    kind: str  # "segment" or "snapshot"
    bytes: int = 0
    records: int = 0
    first: Index = 0
    last: Index = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    vanished: bool = False


class Report(Struct):
    """All files, oldest entries first, and what is wrong between them."""

    files: list[FileReport] = field(default_factory=list)
    gaps: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[Problem]:
        """Everything wrong, in the order of the files."""
        return [problem for file in self.files for problem in file.problems] + self.gaps

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(storage: Storage) -> Report:
    """Check every byte of every segment and snapshot. Raises nothing for damage: it reports it."""
    report = Report()
    for name in storage.names():
        if name.endswith(DAMAGED_SUFFIX):
            report.notes.append(f"{name!r} was set aside by an earlier recovery")
        elif name.endswith(TEMP_SUFFIX):
            report.notes.append(f"{name!r} is being written, or was when a crash came")
    snapshots = [_verify_snapshot(storage, name) for name in reversed(snapshot_names(storage))]
    segments = list_segments(storage)
    for segment in segments:
        report.files.append(_verify_segment(storage, segment, last=segment is segments[-1]))
    report.files = [file for file in report.files if not file.vanished]
    _check_gaps(report, max((s.last for s in snapshots if not s.problems), default=0))
    report.files += [file for file in snapshots if not file.vanished]
    return report


def _verify_segment(storage: Storage, segment: Segment, *, last: bool) -> FileReport:
    report = FileReport(segment.name, "segment", first=segment.first, last=segment.first - 1)
    try:
        report.bytes = storage.size(segment.name)
        if last and is_stillborn(storage, segment):
            report.notes.append("being made, and empty yet")
            return report
        scan = scan_segment(storage, segment)
        for record in scan:
            report.records += 1
            report.last = record.index
    except CorruptJournal as error:
        report.problems.append(Problem(segment.name, error.offset, error.message))
        return report
    except VersionMismatch as error:
        report.problems.append(Problem(segment.name, 0, error.message))
        return report
    except StorageFault as error:
        return _vanished(storage, report, error)
    if scan.torn and last:
        report.notes.append(f"unfinished tail: {scan.torn}")
    elif scan.unsound and not last:
        message = f"a closed segment ends badly: {scan.unsound}"
        report.problems.append(Problem(segment.name, scan.end, message))
    return report


def _verify_snapshot(storage: Storage, name: str) -> FileReport:
    index = index_of_snapshot(name)
    report = FileReport(name, "snapshot", first=0, last=index)
    try:
        reader = SnapshotReader(storage, name)
        report.bytes = reader.bytes
        report.records = reader.check()
    except CorruptJournal as error:
        report.problems.append(Problem(name, error.offset, error.message))
    except VersionMismatch as error:
        report.problems.append(Problem(name, 0, error.message))
    except StorageFault as error:
        return _vanished(storage, report, error)
    return report


def _vanished(storage: Storage, report: FileReport, error: StorageFault) -> FileReport:
    """A file that is gone was tidied away while we looked; any other fault is a problem."""
    if report.name in storage.names():
        report.problems.append(Problem(report.name, 0, error.message))
    else:
        report.vanished = True
    return report


def _check_gaps(report: Report, covered: Index) -> None:
    """Entries must follow one another from the newest sound snapshot on."""
    files = report.files
    if files and files[0].first > covered + 1:
        message = f"entries {covered + 1:,} to {files[0].first - 1:,} are in no file"
        report.gaps.append(Problem(files[0].name, 0, message))
    for before, after in pairwise(files):
        if not before.problems and before.last + 1 != after.first and after.first > covered + 1:
            message = f"entries {before.last + 1:,} to {after.first - 1:,} are in no file"
            report.gaps.append(Problem(after.name, 0, message))


def dump(storage: Storage, from_index: Index = 0) -> Iterator[tuple[Index, bytes]]:
    """All entries that are still kept, from `from_index` on. Raises CorruptJournal at damage."""
    segments = list_segments(storage)
    if not segments:
        return
    after = max(from_index, segments[0].first) - 1
    yield from replay(storage, segments, after=after)
