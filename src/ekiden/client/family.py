"""Several handles for one job: a client may submit an id again, or attach to what it submitted.

The eldest open handle of an id lies in the machine's `open` table, where results find it; that is
all there is for nearly every job. Its younger relatives lie here, in two groups. Those *accepted*
share the eldest's result. Those *unsure* do not: the broker has not compared their content yet, and
may refuse them as a conflict.
"""

from __future__ import annotations

from typing import Any


class Family:
    """The younger handles of ids that have several. False while there are none."""

    __slots__ = ("_accepted", "_open", "_orphans", "_unsure")

    def __init__(self, open_jobs: dict[str, Any]) -> None:
        self._open = open_jobs
        self._unsure: dict[str, list[Any]] = {}
        self._accepted: dict[str, list[Any]] = {}
        self._orphans: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._unsure or self._accepted or self._orphans)

    def add(self, handle: Any) -> None:
        """A further handle of an open job. One that only attaches has no content to conflict."""
        group = self._accepted if handle.terms is None else self._unsure
        group.setdefault(handle.job_id, []).append(handle)

    def is_open(self, handle: Any) -> bool:
        """Whether this very handle waits for its job."""
        job_id = handle.job_id
        return self._open.get(job_id) is handle or any(
            handle is each
            for each in (*self._unsure.get(job_id, ()), *self._accepted.get(job_id, ()))
        )

    def accepted(self, job_id: str) -> list[Any]:
        """Those that share what the eldest is told."""
        return self._accepted.get(job_id, [])

    def accept(self, handle: Any) -> bool:
        """The broker knows this handle's job. True if its result may have passed it by."""
        job_id = handle.job_id
        if handle in self._unsure.get(job_id, ()):
            _take(self._unsure, handle)
            self._accepted.setdefault(job_id, []).append(handle)
        elif job_id in self._orphans and self._open.get(job_id) is handle:
            self._orphans.discard(job_id)
            return True
        return False

    def settle(self, job_id: str) -> list[Any]:
        """The job has an outcome: the handles it is for. Who is unsure goes on without them, and
        a second copy of the outcome is not for them either."""
        if job_id not in self._open or job_id in self._orphans:
            return []
        told = [self._open.pop(job_id), *self._accepted.pop(job_id, ())]
        if job_id in self._unsure:
            self._inherit(job_id)
            self._orphans.add(job_id)
        return told

    def remove(self, handle: Any) -> None:
        """This handle was refused; the others stay."""
        job_id = handle.job_id
        if self._open.get(job_id) is not handle:
            _take(self._unsure, handle)
            _take(self._accepted, handle)
            return
        del self._open[job_id]
        self._orphans.discard(job_id)
        if job_id in self._accepted or job_id in self._unsure:
            self._inherit(job_id)

    def attached_only(self) -> list[Any]:
        """Those that nobody will submit: after a reconnect they have to be attached again."""
        return [h for handles in self._accepted.values() for h in handles if h.terms is None]

    def everyone(self) -> list[Any]:
        """Every open handle, the eldest included."""
        found = list(self._open.values())
        for group in (self._accepted, self._unsure):
            for handles in group.values():
                found += handles
        return found

    def clear(self) -> None:
        """No job is open any more."""
        self._open.clear()
        self._unsure.clear()
        self._accepted.clear()
        self._orphans.clear()

    def _inherit(self, job_id: str) -> None:
        group = self._accepted if job_id in self._accepted else self._unsure
        heir = group[job_id][0]
        _take(group, heir)
        self._open[job_id] = heir


def _take(group: dict[str, list[Any]], handle: Any) -> None:
    handles = group.get(handle.job_id, [])
    if handle in handles:
        handles.remove(handle)
        if not handles:
            del group[handle.job_id]
