"""May they, and is it within bounds? Turns what peers ask into commands, or into refusals.

Everything a command relies on is checked here, before the journal: `apply` has no way to say no.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import chain
from typing import Final

import msgspec

from ekiden import limits
from ekiden.config import BrokerConfig
from ekiden.core import commands as c
from ekiden.core.book import JobBook
from ekiden.core.subjects import check_pattern, check_subject
from ekiden.errors import (
    BadRequest,
    DiskFull,
    Draining,
    QueueFull,
    Refusal,
    TooLarge,
    UnknownCache,
)
from ekiden.model import ids
from ekiden.model.caches import BlobRef
from ekiden.model.jobs import CAUSES, FORMS, Route, Spec
from ekiden.wire import messages as m

# All ids of a batch in one go: a tenth of the cost of one match per id.
_IDS: Final = re.compile(r"(?:[A-Za-z0-9._:-]{1,128}\n)+")
_SPECS_CHECKED: Final = 4096
_HASH: Final = re.compile(r"[0-9a-f]{64}")

_decode_spec = msgspec.msgpack.Decoder(Spec).decode


class Intake:
    """Bounds of one broker."""

    def __init__(self, config: BrokerConfig, book: JobBook) -> None:
        self._config = config
        self._book = book
        self._checked: dict[bytes, Spec] = {}
        self.disk_free = 1 << 62
        self.draining = False
        self.incoming: dict[Route, int] = {}
        """Jobs on their way into the book, by route; the planner counts on them."""
        self.incoming_bytes = 0
        self.incoming_later = 0
        self._flying: dict[Route, int] = {}
        """As `incoming`, of the entry that is being written."""

    def submit(self, client: str, session: str, message: m.Submit) -> c.Submit:
        """The command for a batch. Raises a Refusal of the whole batch."""
        self._check_open()
        count = len(message.ids)
        if not 0 < count <= limits.BATCH_JOBS_MAX:
            raise BadRequest(f"a submit of {count:,} jobs", remedy="send 1 to 4,096 in one")
        if len(message.bodies) != count or len(message.digests) != 8 * count:
            raise BadRequest(
                "ids, digests and bodies of a submit differ in number",
                remedy="send 8 bytes of digest and one body for every id",
            )
        if min(message.delay_ns, message.not_before, message.expires_at) < 0:
            raise BadRequest("a negative time", remedy="delays and times are counted forwards")
        if message.delay_ns > limits.DELAY_NS_MAX:
            raise BadRequest("a delay of more than ten years", remedy="use a shorter one")
        spec = self.spec(bytes(message.spec))
        lines = "\n".join(message.ids) + "\n"
        # An id with a line break in it would pass for two.
        if _IDS.fullmatch(lines) is None or lines.count("\n") != count:
            for job_id in message.ids:
                ids.check_job_id(job_id)
        largest = max(map(len, message.bodies))
        if largest > limits.PAYLOAD_BYTES_MAX:
            raise TooLarge(
                f"a payload of {largest:,} bytes is over the limit of {limits.PAYLOAD_BYTES_MAX:,}",
                remedy="put large inputs in files",
            )
        if spec.caches:
            self._check_caches(spec, message.ids)
        if message.blobs:
            check_blobs(message.blobs, range(count))
        size = sum(map(len, message.bodies))
        later = bool(message.delay_ns or message.not_before)
        self._check_waiting(None if later else spec.route, count)
        self._check_bytes(client, size)
        if later:
            self.incoming_later += count
        else:
            self.incoming[spec.route] = self.incoming.get(spec.route, 0) + count
        self.incoming_bytes += size
        return c.Submit(
            client, session, message.spec, message.ids, message.digests, message.bodies,
            message.delay_ns, message.not_before, message.expires_at, message.blobs,
        )  # fmt: skip

    def spec(self, raw: bytes) -> Spec:
        """Decoded and checked, once per distinct content."""
        found = self._checked.get(raw)
        if found is None:
            found = _check_spec(raw)
            if len(self._checked) >= _SPECS_CHECKED:
                self._checked.clear()
            self._checked[raw] = found
        return found

    def _check_caches(self, spec: Spec, job_ids: list[str]) -> None:
        """What was submitted before may be submitted again, also when its data is removed."""
        known = self._book.caches.known
        for use in spec.caches:
            found = known.get(use.id)
            if found is not None and found.use.manifest == use.manifest:
                continue
            if all(self._book.find(job_id) is not None for job_id in job_ids):
                return
            what = "is known" if found is None else "of that content is known"
            raise UnknownCache(
                f"no cache {ids.shown(use.id)} {what}",
                remedy="put it first; list with: ekiden cache list",
            )

    def _check_open(self) -> None:
        if self.draining:
            raise Draining("the broker is shutting down", remedy="submit again in a moment")
        free = max(self.disk_free - self.incoming_bytes, 0)
        if free < self._config.disk_headroom:
            raise DiskFull(
                f"the broker's disk has {free >> 20:,} MB left, all of it kept for "
                "running work to settle",
                remedy="free some space there; submitting again later is safe",
                retry_after_s=5,
            )

    def closed(self) -> None:
        """All that came in is in an entry now, or waits for the next."""
        self._flying, self.incoming = self.incoming, {}
        self.incoming_bytes = self.incoming_later = 0

    def _check_waiting(self, route: Route | None, count: int) -> None:
        """Of a route, with what is on its way to it; without one, of all that is to start later."""
        if route is None:
            waiting = self._book.delayed + self.incoming_later
        else:
            queue = self._book.queues.get(route)
            waiting = queue.ready + queue.parked if queue is not None else 0
            waiting += self.incoming.get(route, 0) + self._flying.get(route, 0)
        if waiting + count > self._config.waiting_max:
            what = "the list of delayed jobs" if route is None else f"subject {route.subject!r}"
            raise QueueFull(
                f"{what} is full ({waiting:,} jobs waiting)",
                remedy="retry later, add workers, or raise waiting_max",
                retry_after_s=1,
            )

    def _check_bytes(self, client: str, size: int) -> None:
        book = self._book
        if book.live_bytes + self.incoming_bytes + size > limits.TOTAL_BYTES_MAX:
            raise QueueFull(
                f"the broker holds {limits.TOTAL_BYTES_MAX >> 30} GB of payloads, all it takes",
                remedy="retry later, or add workers",
                retry_after_s=1,
            )
        ledger = book.clients.get(client)
        if (ledger.bytes if ledger else 0) + self.incoming_bytes + size > limits.CLIENT_BYTES_MAX:
            raise QueueFull(
                f"client {client!r} has {limits.CLIENT_BYTES_MAX >> 30} GB of payloads unfinished",
                remedy="wait for some of its jobs to end",
                retry_after_s=1,
            )

    def settle(self, worker: str, message: m.Ack) -> list[c.Command]:
        """The commands for a worker's outcomes. Raises BadRequest if they make no sense."""
        found: list[c.Command] = []
        for run in message.runs:
            found += _settle_run(worker, run)
        return found


def _settle_run(worker: str, run: m.AckRun) -> list[c.Command]:
    found: list[c.Command] = []
    if run.outputs:
        if run.offsets is not None and len(run.offsets) != len(run.outputs):
            raise BadRequest("offsets and outputs of an ack differ in number")
        if max(map(len, run.outputs)) > limits.PAYLOAD_BYTES_MAX:
            raise TooLarge("a result over the limit", remedy="put large outputs in files")
        if run.blobs:
            known = range(len(run.outputs)) if run.offsets is None else run.offsets
            check_blobs(run.blobs, known)
        found.append(c.Finish(worker, run.grant, run.offsets, run.outputs, run.notes, run.blobs))
    if run.failures:
        bad = [f.cause for f in run.failures if f.cause not in CAUSES]
        if bad:
            raise BadRequest(f"unknown cause {ids.shown(bad[0])} of a failure")
        if max(len(f.detail) for f in run.failures) > limits.DETAIL_BYTES_MAX:
            raise TooLarge("a failure with more detail than is kept", remedy="send its words only")
        found.append(
            c.Fail(
                worker,
                run.grant,
                [f.offset for f in run.failures],
                [f.cause for f in run.failures],
                [f.message[: limits.ERROR_TEXT_MAX] for f in run.failures],
                {f.offset: f.note for f in run.failures if f.note is not None},
                {f.offset: f.detail for f in run.failures if f.detail},
            )
        )
    if run.released:
        found.append(c.Release(worker, run.grant, run.released))
    return found


def _check_spec(raw: bytes) -> Spec:
    if len(raw) > limits.SPEC_BYTES_MAX:
        raise TooLarge(
            f"a spec of {len(raw):,} bytes is over the limit of {limits.SPEC_BYTES_MAX:,}",
            remedy="put what differs from job to job in the payload",
        )
    try:
        spec: Spec = _decode_spec(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(
            f"malformed spec: {error}", remedy="see its fields in docs/PROTOCOL.md"
        ) from None
    ids.check_name(spec.name, "name")
    check_subject(spec.route.subject)
    if not -limits.PRIORITY_MAX <= spec.priority <= limits.PRIORITY_MAX:
        raise BadRequest(
            f"priority {spec.priority}",
            remedy=f"use -{limits.PRIORITY_MAX} … {limits.PRIORITY_MAX}",
        )
    if not 0 <= spec.max_attempts <= limits.MAX_ATTEMPTS_BOUND or spec.timeout_ns < 0:
        raise BadRequest(
            "max_attempts or timeout out of range",
            remedy=f"use up to {limits.MAX_ATTEMPTS_BOUND:,} attempts, and times counted forwards",
        )
    if spec.form not in FORMS:
        raise BadRequest(
            f"unknown form {spec.form} of a body",
            remedy="the peer may be newer: upgrade the broker",
        )
    unknown = [cause for cause in spec.retry_on or () if cause not in CAUSES]
    if unknown:
        raise BadRequest(
            f"unknown cause {ids.shown(unknown[0])} in retry_on", remedy=f"use {', '.join(CAUSES)}"
        )
    if spec.route.avoid:
        raise BadRequest("a route that avoids a worker", remedy="leave that to the broker")
    needs = spec.route.needs
    if min(needs.cpu_milli, needs.mem_mb) < 0 or len(needs.labels) > limits.LABELS_MAX:
        raise BadRequest(
            "needs out of range",
            remedy=f"need nothing negative, and up to {limits.LABELS_MAX} labels",
        )
    if len(spec.caches) > limits.CACHES_PER_JOB:
        raise BadRequest(
            f"{len(spec.caches)} caches of a job", remedy=f"use up to {limits.CACHES_PER_JOB}"
        )
    if spec.route.data != tuple(sorted({use.id for use in spec.caches})) or (
        len(spec.route.data) != len(spec.caches)
    ):
        raise BadRequest("caches and data of a spec differ", remedy="name each once, sorted")
    check_blobs({0: list(spec.blobs)}, range(1))
    if tuple(sorted(needs.labels)) != needs.labels:
        raise BadRequest("labels of needs are not sorted", remedy="sort them by name")
    _check_texts("a label of needs", *chain.from_iterable(needs.labels))
    _check_texts("the run, key or pin", spec.run, spec.route.key, spec.route.pin)
    return spec


def check_blobs(blobs: dict[int, list[BlobRef]], offsets: Collection[int]) -> None:
    """Raise a Refusal if these cannot be the blobs that jobs at such offsets refer to."""
    for offset, refs in blobs.items():
        if offset not in offsets:
            raise BadRequest("blobs are named for a job that is not there")
        if len(refs) > limits.BLOBS_PER_JOB:
            raise TooLarge(
                f"a job with {len(refs):,} large files is over the limit of "
                f"{limits.BLOBS_PER_JOB:,}",
                remedy="pack them into an archive",
            )
        for blob, size in refs:
            if _HASH.fullmatch(blob) is None or not 0 <= size <= limits.BLOB_BYTES_MAX:
                raise BadRequest(f"{ids.shown(blob)} is no name of a blob")


def check_join(message: m.Join) -> None:
    """Raise a Refusal if what a worker says of itself is out of bounds."""
    if not 0 < len(message.patterns) <= limits.PATTERNS_PER_WORKER:
        raise BadRequest(
            f"{len(message.patterns):,} patterns",
            remedy=f"give 1 to {limits.PATTERNS_PER_WORKER:,}",
        )
    for pattern in message.patterns:
        check_pattern(pattern)
    if not 0 < message.slots <= limits.SLOTS_MAX:
        raise BadRequest(f"{message.slots:,} slots", remedy=f"give 1 to {limits.SLOTS_MAX:,}")
    check_credit(message.credit)
    if min(message.cpu_milli, message.mem_mb) < 0 or max(message.cpu_milli, message.mem_mb) >> 50:
        raise BadRequest("cpu or memory out of range", remedy="say what the machine has")
    if len(message.labels) > limits.LABELS_MAX:
        raise BadRequest(f"{len(message.labels)} labels", remedy=f"give up to {limits.LABELS_MAX}")
    _check_texts("a label or the host", *message.labels, *message.labels.values(), message.host)


def check_credit(credit: int) -> None:
    """Raise a Refusal if no worker can mean it."""
    if not 0 <= credit <= limits.SLOTS_MAX:
        raise BadRequest(f"a credit of {credit:,}", remedy=f"give 0 to {limits.SLOTS_MAX:,}")


def _check_texts(what: str, *texts: str) -> None:
    for text in texts:
        if len(text) > limits.NAME_LENGTH_MAX or not text.isprintable():
            raise BadRequest(
                f"{what} is not usable: {ids.shown(text)}",
                remedy=f"use up to {limits.NAME_LENGTH_MAX} printable characters",
            )


def refused(message: int, error: Refusal, offset: int = -1) -> m.Refused:
    """The refusal of one job, or of a whole submit, as it travels."""
    return m.Refused(
        message, offset, error.code, error.message, error.remedy, int(error.retry_after_s * 1000)
    )
