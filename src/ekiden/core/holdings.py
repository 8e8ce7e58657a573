"""Which blobs of the store jobs need.

A job holds the blobs that its body refers to for as long as the book keeps that body: those of its
input until it is done, those of its output from then on. What its spec refers to belongs to the
input. So a blob that is not held here, and not part of a cache, is of no use to anybody but its
last user.

Only the lists lie in a snapshot; the counts follow from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ekiden.core.rows import Row
from ekiden.model.caches import BlobRef
from ekiden.model.jobs import Spec


class Holdings:
    """Blobs with the number of jobs that need them. False while there are none."""

    def __init__(self) -> None:
        self.of_job: dict[str, list[BlobRef]] = {}
        """What bodies refer to, of jobs whose body refers to anything."""
        self._count: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._count)

    def __contains__(self, blob: str) -> bool:
        return blob in self._count

    def counts(self) -> dict[str, int]:
        """For comparison."""
        return dict(self._count)

    def submitted(self, spec: Spec, rows: list[Row], blobs: Mapping[int, list[BlobRef]]) -> None:
        """New jobs of one submit; `blobs` are named by the rows' ordinals."""
        self._add(spec.blobs, len(rows))
        if blobs:
            for row in rows:
                if found := blobs.get(row.ordinal):
                    self.hold(row, found)

    def hold(self, row: Row, blobs: list[BlobRef]) -> None:
        """The row's body refers to these."""
        self.of_job[row.id] = blobs
        self._add(blobs, 1)

    def drop_input(self, row: Row) -> None:
        """The book forgets the row's input."""
        self._add(row.origin.spec.blobs, -1)
        self.drop_output(row)

    def drop_output(self, row: Row) -> None:
        """The book forgets the row's output."""
        self._add(self.of_job.pop(row.id, ()), -1)

    def loaded(self, row: Row, *, is_output: bool) -> None:
        """A row of a book that was loaded, whose body is kept."""
        if not is_output:
            self._add(row.origin.spec.blobs, 1)
        self._add(self.of_job.get(row.id, ()), 1)

    def _add(self, blobs: Iterable[BlobRef], by: int) -> None:
        count = self._count
        for blob, _ in blobs:
            left = count.get(blob, 0) + by
            if left:
                count[blob] = left
            else:
                count.pop(blob, None)
