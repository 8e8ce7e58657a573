"""The book as bytes and back: what a snapshot holds.

`dump` gives chunks in an order that depends on the state alone, so two equal books give equal
bytes; `fingerprint` compares them. `load` builds a book that behaves the same from there on:
ring order, fences, dedup memory and counters included.

Chunks are columns, because a million rows are to load in about a second.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from ekiden.core.book import SHARED_TAIL, JobBook, Totals
from ekiden.core.caches import Cache
from ekiden.core.commands import Settings
from ekiden.core.queues import park
from ekiden.core.rows import (
    ORDINALS,
    ClientLedger,
    Delay,
    Grant,
    Kept,
    Origin,
    Row,
    Settlement,
    Watch,
    WorkerLedger,
)  # fmt: skip
from ekiden.model.caches import BlobRef
from ekiden.model.jobs import DONE, Cause, Note, Route

# Rows in one chunk, and bytes of their inputs: large enough to be quick, small enough to bound
# memory while reading. Only lanes are split: what else lies together is small, and stays together.
ROWS_PER_CHUNK: Final = 8192
BYTES_PER_CHUNK: Final = 16 << 20


class Columns(Struct, array_like=True):
    """Rows, by field. `origins` are numbers in the order the origins were written."""

    ids: list[str]
    ordinals: list[int]
    origins: list[int]
    bodies: list[bytes | None]
    attempts: list[int]
    kept: dict[int, Kept]
    histories: dict[int, list[Cause]]
    notes: dict[int, Note]
    blobs: dict[int, list[BlobRef]] = {}


class Head(Struct, array_like=True, tag="head"):
    """First of all: what is one of a kind."""

    applied: int
    time: int
    wall: int
    digest: int
    settings: Settings
    totals: Totals
    next_grant: int
    next_seq: int
    cancelling: dict[str, str]
    generations: dict[str, tuple[int, int]]
    caches: list[Cache] = []


class OriginLine(Struct, array_like=True, gc=False):
    """An `Origin`, with names instead of references."""

    client: str
    session: str
    spec: bytes
    time: int
    wall: int
    digests: bytes
    expires_at: int


class Origins(Struct, array_like=True, tag="origins"):
    """Origins that rows of later parts refer to; numbered on from the last such part."""

    lines: list[OriginLine]


class LanePart(Struct, array_like=True, tag="lane"):
    """Rows that are ready; a long lane has several parts."""

    route: Route
    priority: int
    client: str
    seq: int
    rows: Columns


class DelayPart(Struct, array_like=True, tag="delay"):
    """Rows that wait for an entry's time."""

    until: int
    seq: int
    rows: Columns


class WatchPart(Struct, array_like=True, tag="watch"):
    """Rows that wait for the wall clock, or expire by it."""

    until: int
    seq: int
    expires: bool
    rows: Columns
    """Of a waking watch, which owns them."""
    ids: list[str]
    """Of an expiring watch: rows that lie elsewhere."""


class GrantPart(Struct, array_like=True, tag="grant"):
    """A lease: `size` attempts once, those at `offsets` still owned."""

    number: int
    worker: str
    route: Route
    time: int
    wall: int
    size: int
    offsets: list[int]
    rows: Columns


class SettledPart(Struct, array_like=True, tag="settled"):
    """Rows that ended together."""

    state: str
    worker: str
    leased: int
    time: int
    wall: int
    reason: str
    faded: bool
    rows: Columns


class Tail(Struct, array_like=True, tag="tail"):
    """Last of all: without it the image is not whole."""

    parts: int


_Part = Head | Origins | LanePart | DelayPart | WatchPart | GrantPart | SettledPart | Tail
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Part).decode


class _Writer:
    """Numbers origins as rows refer to them."""

    def __init__(self, held: dict[str, list[BlobRef]]) -> None:
        self.held = held
        self.numbers: dict[int, int] = {}
        self.fresh: list[OriginLine] = []

    def number(self, origin: Origin) -> int:
        found = self.numbers.get(id(origin))
        if found is None:
            found = self.numbers[id(origin)] = len(self.numbers)
            self.fresh.append(
                OriginLine(
                    origin.client.id,
                    origin.session,
                    origin.spec_bytes,
                    origin.time,
                    origin.wall,
                    origin.digests,
                    origin.expires_at,
                )  # fmt: skip
            )
        return found

    def columns(self, rows: list[Row]) -> Columns:
        number, held = self.number, self.held
        return Columns(
            [row.id for row in rows],
            [row.ordinal for row in rows],
            [number(row.origin) for row in rows],
            [row.body if isinstance(row.body, bytes) else None for row in rows],
            [row.attempt for row in rows],
            {n: row.body for n, row in enumerate(rows) if isinstance(row.body, Kept)},
            {n: row.history for n, row in enumerate(rows) if row.history is not None},
            {n: row.note for n, row in enumerate(rows) if row.note is not None},
            {n: held[row.id] for n, row in enumerate(rows) if row.id in held} if held else {},
        )

    def chunks(self, rows: list[Row], part: Callable[[Columns], Any]) -> Iterator[bytes]:
        for start in range(0, len(rows), ROWS_PER_CHUNK):
            body = part(self.columns(rows[start : start + ROWS_PER_CHUNK]))
            if self.fresh:
                yield _encode(Origins(self.fresh))
                self.fresh = []
            yield _encode(body)


def _portions(rows: list[Row]) -> Iterator[list[Row]]:
    start = size = 0
    for n, row in enumerate(rows):
        size += len(row.body)  # type: ignore[arg-type]
        if size > BYTES_PER_CHUNK and n > start:
            yield rows[start:n]
            start, size = n, len(row.body)  # type: ignore[arg-type]
    yield rows[start:]


def _route_key(route: Route) -> tuple[Any, ...]:
    return (route.subject, route.needs, route.key, route.pin, route.avoid, route.data)


def dump(book: JobBook) -> Iterator[bytes]:
    """The book as chunks of msgpack. The book must not change meanwhile."""
    yield _encode(
        Head(
            book.applied,
            book.time,
            book.wall,
            book.digest,
            book.settings,
            book.totals,
            book.next_grant,
            book.next_seq,
            dict(sorted(book.cancelling.items())),
            dict(sorted(book.generations.items())),
            list(book.caches.known.values()),
        )  # fmt: skip
    )
    write, parts = _Writer(book.blobs.of_job), 0
    for chunk in _dump_parts(book, write):
        parts += 1
        yield chunk
    yield _encode(Tail(parts))


def _dump_parts(book: JobBook, write: _Writer) -> Iterator[bytes]:
    for queue in sorted(book.queues.values(), key=lambda q: _route_key(q.route)):
        rings = [lane for priority in sorted(queue.rings) for lane in queue.rings[priority]]
        parked = [lane for lane in queue.lanes.values() if not lane.in_ring]
        for lane in rings + sorted(parked, key=lambda lane: lane.seq):
            rows = [row for row in lane.rows if row.place is lane]
            for portion in _portions(rows):
                yield from write.chunks(
                    portion,
                    lambda c, lane=lane: LanePart(  # type: ignore[misc]
                        lane.queue.route, lane.priority, lane.client.id, lane.seq, c
                    ),
                )
    for delay in sorted(book.delays):
        rows = [row for row in delay.rows if row.place is delay]
        yield from write.chunks(rows, lambda c, d=delay: DelayPart(d.until, d.seq, c))  # type: ignore[misc]
    for number in sorted(book.grants):
        grant = book.grants[number]
        owned = grant.owned()
        part = GrantPart(
            number, grant.worker.id, grant.queue.route, grant.time, grant.wall, len(grant.rows),
            [offset for offset, _ in owned], Columns([], [], [], [], [], {}, {}, {}),
        )  # fmt: skip
        rows = [row for _, row in owned]
        yield from write.chunks(rows, lambda c, p=part: msgspec.structs.replace(p, rows=c))  # type: ignore[misc]
    # Those that own their rows come first: an expiring one may name rows of a later one.
    for watch in sorted(book.watches, key=lambda w: (w.expires, w)):
        rows = [row for row in watch.rows if row.place is watch]
        if watch.expires:
            ids = [row.id for row in watch.rows if _may_expire(book, row, watch)]
            if ids:
                yield _encode(WatchPart(watch.until, watch.seq, True, write.columns([]), ids))
        else:
            yield from write.chunks(
                rows,
                lambda c, w=watch: WatchPart(w.until, w.seq, False, c, []),  # type: ignore[misc]
            )
    for settlement in [*book.faded, *book.settled]:
        yield from write.chunks(
            settlement.rows,
            lambda c, s=settlement: SettledPart(  # type: ignore[misc]
                s.state, s.worker, s.leased, s.time, s.wall, s.reason, s.faded, c
            ),
        )


def _may_expire(book: JobBook, row: Row, watch: Watch) -> bool:
    """Live, and still under this watch: one that ended or was replayed is not."""
    return (
        book.find(row.id) is row
        and not isinstance(row.place, Settlement)
        and row.origin.expires_at == watch.until
    )


def fingerprint(book: JobBook) -> str:
    """Equal for equal books, whatever way they came about."""
    seen = hashlib.sha256()
    for chunk in dump(book):
        seen.update(chunk)
    return seen.hexdigest()


# ------------------------------------------------------------------ back


class _Reader:
    def __init__(self) -> None:
        self.book = JobBook()
        self.origins: list[Origin] = []
        self.parts = 0
        self.complete = False

    def client(self, client_id: str) -> ClientLedger:
        """Never swept away while loading: its jobs are counted only once they are read."""
        return self.book.clients.setdefault(client_id, ClientLedger(client_id))

    def rows(self, columns: Columns, place: Any) -> list[Row]:
        origins, known = self.origins, self.book.known
        mask = len(known) - 1
        rows: list[Row] = []
        append = rows.append
        for job_id, ordinal, origin, body, attempt in zip(
            columns.ids, columns.ordinals, columns.origins, columns.bodies, columns.attempts,
            strict=True,
        ):  # fmt: skip
            row = Row(job_id, ORDINALS[ordinal], body, origins[origin], place, attempt)
            known[hash(job_id[:SHARED_TAIL]) & mask][job_id] = row
            append(row)
        for n, kept in columns.kept.items():
            rows[n].body = kept
        for n, history in columns.histories.items():
            rows[n].history = history
        for n, note in columns.notes.items():
            rows[n].note = note
        for n, blobs in columns.blobs.items():
            self.book.blobs.of_job[rows[n].id] = blobs
        return rows

    def live(self, rows: list[Row], *, leased: bool = False) -> None:
        for row in rows:
            client = row.origin.client
            client.live += 1
            client.bytes += len(row.body)  # type: ignore[arg-type]
            self.book.live_bytes += len(row.body)  # type: ignore[arg-type]
            client.inflight += leased

    def read(self, part: Any) -> None:
        book = self.book
        match part:
            case Head():
                book.applied, book.time, book.wall = part.applied, part.time, part.wall
                book.digest, book.settings, book.totals = part.digest, part.settings, part.totals
                book.next_grant, book.next_seq = part.next_grant, part.next_seq
                book.cancelling, book.generations = part.cancelling, part.generations
                book.caches.known = {cache.use.id: cache for cache in part.caches}
                return
            case Tail():
                assert part.parts == self.parts, (part.parts, self.parts)
                self.complete = True
                return
            case Origins():
                self.origins += [
                    Origin(
                        self.client(o.client),
                        o.session,
                        book.spec(o.spec),
                        o.spec,
                        o.time,
                        o.wall,
                        o.digests,
                        o.expires_at,
                    )  # fmt: skip
                    for o in part.lines
                ]
            case LanePart():
                self._lane(part)
            case DelayPart():
                delay = Delay(part.until, part.seq, [])
                delay.rows = self.rows(part.rows, delay)
                self._later(delay, book.delays)
            case WatchPart(expires=True):
                rows = [row for row in map(book.find, part.ids) if row is not None]
                heapq.heappush(book.watches, Watch(part.until, part.seq, rows, expires=True))
            case WatchPart():
                watch = Watch(part.until, part.seq, [], expires=False)
                watch.rows = self.rows(part.rows, watch)
                self._later(watch, book.watches)
            case GrantPart():
                self._grant(part)
            case _:
                self._settled(part)
        self.parts += 1

    def _lane(self, part: LanePart) -> None:
        book = self.book
        queue = book._queue(part.route)
        client = self.client(part.client)
        lane = queue.lanes.get((part.priority, client.id))
        if lane is None:
            lane = book._lane(queue, part.priority, client)
            lane.seq = part.seq
            book.next_seq -= 1
        rows = self.rows(part.rows, lane)
        self.live(rows)
        queue.add(lane, rows)

    def _later(self, delay: Any, heap: list[Any]) -> None:
        self.live(delay.rows)
        self.book.delayed += len(delay.rows)
        heapq.heappush(heap, delay)

    def _grant(self, part: GrantPart) -> None:
        book = self.book
        worker = book.workers.setdefault(part.worker, WorkerLedger(part.worker))
        queue = book._queue(part.route)
        grant = Grant(part.number, worker, queue, [], part.time, part.wall)
        rows = self.rows(part.rows, grant)
        self.live(rows, leased=True)
        # Offsets the grant no longer owns are filled with a row whose place is elsewhere.
        gone = Row("", 0, None, rows[0].origin, None)
        grant.rows = [gone] * part.size
        for offset, row in zip(part.offsets, rows, strict=True):
            grant.rows[offset] = row
        grant.left = len(rows)
        queue.leased += len(rows)
        worker.held += len(rows)
        worker.grants[part.number] = book.grants[part.number] = grant

    def _settled(self, part: SettledPart) -> None:
        book = self.book
        settlement = Settlement(
            part.state, part.worker, part.leased, part.time, part.wall, part.reason
        )
        settlement.faded = part.faded
        settlement.rows = self.rows(part.rows, settlement)
        book.ids_kept += len(settlement.rows)
        if part.faded:
            book.faded.append(settlement)
            return
        settlement.bytes = sum(len(r.body) for r in settlement.rows if isinstance(r.body, bytes))
        book.results_kept += len(settlement.rows)
        book.result_bytes += settlement.bytes
        book.settled.append(settlement)


def load(chunks: Iterable[bytes]) -> JobBook:
    """The book that `dump` wrote. Raises `msgspec.DecodeError` or AssertionError on other bytes."""
    reader = _Reader()
    for chunk in chunks:
        reader.read(_decode(chunk))
    assert reader.complete, "the snapshot has no tail"
    book = reader.book
    _count_again(book)
    cap = book.settings.client_inflight_max
    for client in book.clients.values():
        if cap and client.inflight >= cap:
            park(client)
    return book


def _count_again(book: JobBook) -> None:
    """What follows from the rows and is not written down."""
    for shard in book.known:
        book.runs.recount(shard.values())
        for row in shard.values():
            spec = row.origin.spec
            if not (spec.caches or spec.blobs or book.blobs.of_job):
                continue
            ended = isinstance(row.place, Settlement)
            if not ended:
                book.caches.submitted(row.origin, 1)
            if not (ended and row.place.faded):
                book.blobs.loaded(row, is_output=ended and row.place.state == DONE)
