"""A journal told job by job, with the event names of the design notes.

The journal holds commands for many jobs at once, and what a command did depends on the state it
met: an assign takes whoever is next, a failed attempt is tried again or becomes a dead letter. So
the entries are folded through the same `JobBook` that the broker runs, and every line is what
really happened. Entries older than the oldest state at hand cannot be folded; their lines say what
was asked, carry `"folded": false`, and name grants and offsets where the job is not known.

Events: enqueue · assign · ack · assign_failed (the attempt brought nothing and is tried again) ·
timeout_requeue · worker_down_requeue · dlq · cancel · expire · replay · purge · configure ·
snapshot_marker. Payloads are never printed, only their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ekiden.core import commands as c
from ekiden.core.book import JobBook
from ekiden.core.effects import SubmitOutcome, Tally
from ekiden.core.rows import Grant, Kept, Row, Settlement
from ekiden.journal.inspection import dump
from ekiden.journal.segments import list_segments
from ekiden.journal.snapshots import complete_snapshots
from ekiden.journal.storage import Storage
from ekiden.limits import NS
from ekiden.model import jobs as j

Line = dict[str, Any]

EVENTS: Final = (
    "enqueue", "assign", "ack", "assign_failed", "timeout_requeue", "worker_down_requeue", "dlq",
    "cancel", "expire", "replay", "purge", "configure", "snapshot_marker",
)  # fmt: skip

RELEASED: Final = "released"
"""Why an attempt came to nothing that was given back before it began."""


def lines(storage: Storage, from_index: j.Index = 0) -> Iterator[Line]:
    """Every event of the entries that are kept, from `from_index` on, oldest first.

    Raises `CorruptJournal` where the journal is damaged, after all lines before the damage.
    """
    markers = {reader.index: reader.name for reader in complete_snapshots(storage)}
    book = _oldest_book(storage)
    teller = _Teller(book)
    for index, payload in dump(storage):
        entry = c.decode_entry(index, payload)
        told = teller.fold(entry) if index > book.applied else _unfolded(entry)
        if index >= from_index:
            at = _at(entry.wall)
            for line in told:
                yield {"index": index, "at": at, **line}
            if index in markers:
                yield {"index": index, "at": at, "event": "snapshot_marker", "file": markers[index]}


def _oldest_book(storage: Storage) -> JobBook:
    """The earliest state that is at hand: the beginning of history, or the oldest snapshot."""
    from ekiden.core.image import load

    segments = list_segments(storage)
    snapshots = complete_snapshots(storage)
    if not segments or segments[0].first == 1 or not snapshots:
        return JobBook()
    return load(snapshots[-1].chunks())


def _at(wall: j.WallTime) -> str:
    return datetime.fromtimestamp(wall / NS, UTC).isoformat(timespec="milliseconds")


# ------------------------------------------------------------------ folded


class _Teller:
    """Applies entries to a book and listens between any two commands.

    What a command did shows in what it added to the book's `Changes`; later commands of the same
    entry may move the same job again, so looking only after the entry would be too late.
    """

    def __init__(self, book: JobBook) -> None:
        self._book = book
        self._lines: list[Line] = []
        book._handlers = {
            kind: self._listening(handler) for kind, handler in book._handlers.items()
        }

    def fold(self, entry: c.Entry) -> list[Line]:
        self._lines = []
        self._book.apply(entry)
        return self._lines

    def _listening(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def handle(command: Any) -> None:
            changes = self._book._changes
            parts: list[list[Any]] = [
                changes.submits,
                changes.tallies,
                changes.grants,
                changes.requeued,
                changes.settlements,
            ]
            before = [len(part) for part in parts]
            handler(command)
            new = [part[start:] for part, start in zip(parts, before, strict=True)]
            self._lines += self._tell(command, *new)

        return handle

    def _tell(
        self,
        command: Any,
        submits: list[SubmitOutcome],
        tallies: list[Tally],
        grants: list[Grant],
        requeued: list[Row],
        settlements: list[Settlement],
    ) -> Iterator[Line]:
        for outcome in submits:
            yield from _enqueued(command, outcome, self._book.spec(bytes(command.spec)))
        for grant in grants:
            yield from _assigned(grant)
        for row in requeued:
            yield _requeued(command, row)
        for settlement in settlements:
            for row in settlement.rows:
                yield _settled(settlement, row)
        for tally in tallies:
            yield from self._tallied(command, tally)
        if isinstance(command, c.Configure):
            yield _configured(command)
        elif isinstance(command, c.PutCache):
            yield _cache_put(command)

    def _tallied(self, command: Any, tally: Tally) -> Iterator[Line]:
        match command:
            case c.Cancel():
                # What waited is among the settlements already; what runs is only asked to stop.
                for job_id in tally.stopping:
                    yield {"event": "cancel", "job": job_id, "state": j.CANCELLING}
            case c.Replay():
                for job_id in tally.changed:
                    generation = self._book.generations.get(job_id, (0, 0))[0]
                    yield {"event": "replay", "job": job_id, "generation": generation}
            case c.Purge():
                for job_id in tally.changed:
                    yield {"event": "purge", "job": job_id}
            case c.RemoveCache():
                for cache_id in tally.changed:
                    yield {"event": "cache_remove", "cache": cache_id}


def _enqueued(command: c.Submit, outcome: SubmitOutcome, spec: j.Spec) -> Iterator[Line]:
    known = {offset for offset, _ in (*outcome.repeated, *outcome.conflicts)}
    for offset, (job_id, body) in enumerate(zip(command.ids, command.bodies, strict=False)):
        if offset not in known:
            yield _enqueue(command, spec, job_id, body)


def _enqueue(command: c.Submit, spec: j.Spec, job_id: str, body: bytes) -> Line:
    line: Line = {
        "event": "enqueue",
        "job": job_id,
        "client": command.client,
        "name": spec.name,
        "subject": spec.route.subject,
        "priority": spec.priority,
        "bytes": len(body),
    }
    wishes = {
        "delay_s": command.delay_ns / NS,
        "not_before": command.not_before and _at(command.not_before),
        "expires_at": command.expires_at and _at(command.expires_at),
        "run": spec.run,
    }
    return line | {name: wish for name, wish in wishes.items() if wish}


def _assigned(grant: Grant) -> Iterator[Line]:
    for offset, row in enumerate(grant.rows):
        yield {
            "event": "assign",
            "job": row.id,
            "worker": grant.worker.id,
            "attempt": row.attempt,
            "grant": grant.number,
            "offset": offset,
        }


def _requeued(command: Any, row: Row) -> Line:
    last = row.history[-1] if row.history else None
    if last is not None and last.attempt != row.attempt:
        last = None
    line: Line = {"job": row.id, "worker": command.worker, "attempt": row.attempt}
    if isinstance(command, c.Forfeit):
        return {"event": "worker_down_requeue", **line, "burned": bool(last and last.burned)}
    if last is None:
        return {"event": "assign_failed", **line, "cause": RELEASED}
    event = "timeout_requeue" if last.cause == j.TIMEOUT else "assign_failed"
    return {"event": event, **line, "cause": last.cause, "message": last.message}


def _settled(settlement: Settlement, row: Row) -> Line:
    line: Line = {"job": row.id, "attempt": row.attempt}
    if settlement.worker:
        line["worker"] = settlement.worker
    if settlement.state == j.DONE:
        body = row.body
        size = body.size if isinstance(body, Kept) else len(body or b"")
        return {"event": "ack", **line, "bytes": size}
    if settlement.state == j.FAILED:
        causes = [msgspec.structs.asdict(cause) for cause in row.history or []]
        for cause in causes:
            cause["time"] = _at(cause["time"])
            cause.pop("note")
        return {"event": "dlq", **line, "reason": settlement.reason, "causes": causes}
    if settlement.reason == j.EXPIRED:
        return {"event": "expire", **line}
    return {"event": "cancel", **line, "state": j.CANCELLED, "reason": settlement.reason}


def _configured(command: c.Configure) -> Line:
    return {"event": "configure", "settings": msgspec.structs.asdict(command.settings)}


def _cache_put(command: c.PutCache) -> Line:
    return {
        "event": "cache_put",
        "cache": command.cache.id,
        "client": command.client,
        "target": command.target,
        "manifest": command.cache.manifest,
        "files": command.files,
        "bytes": command.size,
    }


# ------------------------------------------------------------------ not folded


def _unfolded(entry: c.Entry) -> Iterator[Line]:
    """What the commands of an entry asked for, without knowing what they met."""
    for command in entry.commands:
        for line in _asked(command):
            yield line | {"folded": False}


def _asked(command: Any) -> Iterator[Line]:
    match command:
        case c.Submit():
            spec = msgspec.msgpack.decode(command.spec, type=j.Spec)
            for job_id, body in zip(command.ids, command.bodies, strict=False):
                yield _enqueue(command, spec, job_id, body)
        case c.Assign():
            yield {
                "event": "assign",
                "worker": command.worker,
                "subject": command.route.subject,
                "count": command.count,
            }
        case c.Finish():
            offsets = command.offsets or range(len(command.outputs))
            for offset, output in zip(offsets, command.outputs, strict=False):
                yield {"event": "ack", **_lease(command, offset), "bytes": len(output)}
        case c.Fail():
            for offset, cause in zip(command.offsets, command.causes, strict=False):
                event = "timeout_requeue" if cause == j.TIMEOUT else "assign_failed"
                yield {"event": event, **_lease(command, offset), "cause": cause}
        case c.Release():
            for offset in command.offsets:
                yield {"event": "assign_failed", **_lease(command, offset), "cause": RELEASED}
        case c.Forfeit():
            yield {"event": "worker_down_requeue", "worker": command.worker}
        case c.Cancel() | c.Replay() | c.Purge():
            for job_id in command.ids:
                yield {"event": type(command).__name__.lower(), "job": job_id}
        case c.Configure():
            yield _configured(command)
        case c.PutCache():
            yield _cache_put(command)
        case c.RemoveCache():
            for cache_id in command.ids:
                yield {"event": "cache_remove", "cache": cache_id}
        case _:
            return


def _lease(command: Any, offset: int) -> Line:
    return {"worker": command.worker, "grant": command.grant, "offset": offset}
