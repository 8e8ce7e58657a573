"""What a worker holds: leases not finished, outcomes not confirmed, outcomes remembered.

An attempt is named by (grant, offset). It is *open* from the first Assign that names it until it
is settled here; its outcome is *unconfirmed* until the broker says it is committed; after that it
is *remembered* for a while, because an Assign may arrive twice and must not run twice.

Sets and runs, no object per attempt: a grant of 250 costs a few microseconds in all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from ekiden import limits
from ekiden.machine import Instant
from ekiden.model.caches import BlobRef
from ekiden.model.jobs import GrantNo, Note, Spec
from ekiden.wire.messages import AckRun, AssignRun, Failure

# How long, how many and how large: an outcome is told again instead of run again. Ten minutes cover
# any reconnect; the other two bound memory at full speed, where repeats come within milliseconds.
MEMORY_NS: Final = 600 * limits.NS
MEMORY_ATTEMPTS: Final = 100_000
MEMORY_BYTES: Final = 32 << 20

# What an AckRun, an output and a failure cost on the wire beside their own bytes, rounded up.
_RUN_BYTES: Final = 64
_OUTPUT_BYTES: Final = 16
_NOTE_BYTES: Final = 48
_FAILURE_BYTES: Final = 96
_BLOB_BYTES: Final = 80

Attempt: TypeAlias = tuple[GrantNo, int]


class Grant:
    """Attempts leased together. `parts` are [first, end) with the spec they share."""

    __slots__ = ("open", "parts")

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.parts: list[tuple[int, int, Spec]] = []

    def spec_of(self, offset: int) -> Spec | None:
        """The spec of one attempt."""
        for first, end, spec in self.parts:
            if first <= offset < end:
                return spec
        return None

    def by_spec(self, offsets: Iterable[int]) -> list[tuple[Spec, list[int]]]:
        """These attempts, those of one spec together."""
        found: list[tuple[Spec, list[int]]] = []
        for offset in offsets:
            spec = self.spec_of(offset)
            assert spec is not None, offset
            if not found or found[-1][0] is not spec:
                found.append((spec, []))
            found[-1][1].append(offset)
        return found


class _Settled:
    """Outcomes of one grant, newest last."""

    __slots__ = ("at", "attempts", "bytes", "runs", "unconfirmed")

    def __init__(self) -> None:
        self.at: Instant = 0
        self.attempts = 0
        self.bytes = 0
        self.unconfirmed = 0
        self.runs: list[AckRun] = []


class Ledger:
    """All that the worker knows of its attempts."""

    def __init__(self) -> None:
        self.grants: dict[GrantNo, Grant] = {}
        """Grants with open attempts, oldest first."""
        self.open_count = 0
        self.unacked: deque[tuple[int, list[AckRun]]] = deque()
        """Acks that are not confirmed, by msg_id, oldest first."""
        self._settled: dict[GrantNo, _Settled] = {}
        self._attempts = 0
        self._bytes = 0

    # -------------------------------------------------------------- leases

    def take(
        self, run: AssignRun, spec: Spec, unsent: Iterable[AckRun] = ()
    ) -> tuple[list[AssignRun], list[AckRun]]:
        """Lease what is new of `run`: the parts to run, and outcomes to tell again. What `unsent`
        speaks of is settled too, and about to be told anyway."""
        grant = self.grants.get(run.grant)
        settled = self._settled.get(run.grant)
        unsent = [ack for ack in unsent if ack.grant == run.grant]
        offsets = range(run.first, run.first + len(run.ids))
        if grant is None and settled is None and not unsent:
            self._open(run.grant, offsets, spec)
            return [run], []
        known = set() if grant is None else grant.open.intersection(offsets)
        for ack in unsent:
            known.update(offsets_of(ack))
        again: list[AckRun] = []
        if settled is not None:
            for told in settled.runs:
                part = restricted(told, offsets)
                if part is not None:
                    again.append(part)
                    known.update(offsets_of(part))
        parts = [cut(run, span) for span in spans(o for o in offsets if o not in known)]
        for part_run in parts:
            first = part_run.first
            self._open(run.grant, range(first, first + len(part_run.ids)), spec)
        return parts, again

    def _open(self, number: GrantNo, offsets: range, spec: Spec) -> None:
        grant = self.grants.get(number)
        if grant is None:
            grant = self.grants[number] = Grant()
        grant.open.update(offsets)
        grant.parts.append((offsets.start, offsets.stop, spec))
        self.open_count += len(offsets)

    def is_open(self, number: GrantNo, offset: int) -> bool:
        """Whether that attempt is leased and not settled."""
        grant = self.grants.get(number)
        return grant is not None and offset in grant.open

    def open_of(self, number: GrantNo, offsets: Iterable[int] | None) -> list[int]:
        """Which of these (None: of all) are open, in order."""
        grant = self.grants.get(number)
        if grant is None:
            return []
        return sorted(grant.open if offsets is None else grant.open.intersection(offsets))

    def is_settled(self, number: GrantNo, offset: int) -> bool:
        """Whether an outcome of that attempt is remembered."""
        settled = self._settled.get(number)
        return settled is not None and any(offset in offsets_of(run) for run in settled.runs)

    def held(self) -> list[tuple[GrantNo, list[int]]]:
        """What the worker has and has not yet been told is committed."""
        found = {number: set(grant.open) for number, grant in self.grants.items()}
        for _, runs in self.unacked:
            for run in runs:
                found.setdefault(run.grant, set()).update(offsets_of(run))
        return [(number, sorted(found[number])) for number in sorted(found)]

    # -------------------------------------------------------------- outcomes

    def finish(
        self,
        number: GrantNo,
        offsets: Sequence[int],
        outputs: list[bytes],
        failures: list[Failure],
        notes: dict[int, Note],
        blobs: dict[int, list[BlobRef]] | None = None,
    ) -> AckRun | None:
        """The executor's word on attempts. What is no longer open is nobody's business."""
        grant = self.grants.get(number)
        if grant is None:
            return None
        still = grant.open
        if not still.issuperset(offsets):
            kept = [(at, out) for at, out in zip(offsets, outputs, strict=True) if at in still]
            offsets = [at for at, _ in kept]
            outputs = [out for _, out in kept]
            blobs = {at: some for at, some in (blobs or {}).items() if at in still}
        if failures:
            failures = [failure for failure in failures if failure.offset in still]
        if not offsets and not failures:
            return None
        # The common case says least: everything that came as one run went well, in one go and in
        # its order. Without the last, outputs would be taken for those of other jobs.
        whole = (
            not failures
            and len(grant.parts) == 1
            and grant.parts[0][0] == 0
            and len(offsets) == grant.parts[0][1]
            and (offsets == (plain := range(len(offsets))) or list(offsets) == list(plain))
        )
        run = AckRun(
            number, None if whole else list(offsets), outputs, notes, failures, [], blobs or {}
        )
        self._close(number, grant, offsets)
        if failures:
            self._close(number, grant, [failure.offset for failure in failures])
        return run

    def fail(self, number: GrantNo, offsets: list[int], cause: str, text: str) -> AckRun:
        """Attempts that the machine itself ends. They need not be open."""
        self._close_open(number, offsets)
        return AckRun(number, [], [], {}, [Failure(at, cause, text) for at in offsets])

    def release(self, number: GrantNo, offsets: Iterable[int]) -> AckRun | None:
        """Give back what never began."""
        given = self.open_of(number, offsets)
        if not given:
            return None
        self._close_open(number, given)
        return AckRun(number, [], [], {}, [], given)

    def forget(self, number: GrantNo, offsets: Iterable[int] | None) -> list[int]:
        """Nobody waits for these any more; says which were open."""
        gone = self.open_of(number, offsets)
        self._close_open(number, gone)
        return gone

    def _close_open(self, number: GrantNo, offsets: Iterable[int]) -> None:
        grant = self.grants.get(number)
        if grant is not None:
            self._close(number, grant, grant.open.intersection(offsets))

    def _close(self, number: GrantNo, grant: Grant, offsets: Iterable[int]) -> None:
        before = len(grant.open)
        grant.open.difference_update(offsets)
        self.open_count -= before - len(grant.open)
        if not grant.open:
            self.grants.pop(number, None)

    # -------------------------------------------------------------- acks

    def sent(self, msg_id: int, runs: list[AckRun], now: Instant) -> None:
        """This ack is on its way, or will be; keep it until it is confirmed."""
        self.unacked.append((msg_id, runs))
        for run in runs:
            self._remember(run, now)

    def confirmed(self, upto: int) -> None:
        """The broker has committed all acks up to this msg_id."""
        while self.unacked and self.unacked[0][0] <= upto:
            for run in self.unacked.popleft()[1]:
                settled = self._settled.get(run.grant)
                if settled is not None:
                    settled.unconfirmed -= 1

    def renumbered(self, next_id: int) -> int:
        """Number every unconfirmed ack anew, for another connection; the next free number."""
        # An `Acked` of the old connection must not confirm what only the new one will carry.
        renewed = [(next_id + at, runs) for at, (_, runs) in enumerate(self.unacked)]
        self.unacked = deque(renewed)
        return next_id + len(renewed)

    def _remember(self, run: AckRun, now: Instant) -> None:
        settled = self._settled.pop(run.grant, None)
        if settled is None:
            settled = _Settled()
        self._settled[run.grant] = settled  # at the end: the order is that of the last outcome
        size = sum(map(len, run.outputs))
        count = len(run.outputs) + len(run.failures) + len(run.released)
        settled.at = now
        settled.runs.append(run)
        settled.unconfirmed += 1
        settled.bytes += size
        settled.attempts += count
        self._bytes += size
        self._attempts += count
        self.fade(now)

    def fade(self, now: Instant) -> None:
        """Forget the oldest outcomes that are confirmed and past their time, or too many."""
        while self._settled:
            number, oldest = next(iter(self._settled.items()))
            crowded = self._attempts > MEMORY_ATTEMPTS or self._bytes > MEMORY_BYTES
            if oldest.unconfirmed > 0 or not (crowded or now - oldest.at > MEMORY_NS):
                return
            del self._settled[number]
            self._attempts -= oldest.attempts
            self._bytes -= oldest.bytes


# ------------------------------------------------------------------ runs


def offsets_of(run: AckRun) -> set[int]:
    """Every attempt that `run` says something about."""
    plain = range(len(run.outputs)) if run.offsets is None else run.offsets
    return {*plain, *(failure.offset for failure in run.failures), *run.released}


def restricted(run: AckRun, offsets: range) -> AckRun | None:
    """What `run` says about `offsets`, if anything."""
    plain = range(len(run.outputs)) if run.offsets is None else run.offsets
    kept = [(at, out) for at, out in zip(plain, run.outputs, strict=True) if at in offsets]
    part = AckRun(
        run.grant,
        [at for at, _ in kept],
        [out for _, out in kept],
        {at: note for at, note in run.notes.items() if at in offsets},
        [failure for failure in run.failures if failure.offset in offsets],
        [at for at in run.released if at in offsets],
        {at: some for at, some in run.blobs.items() if at in offsets},
    )
    return part if kept or part.failures or part.released else None


def cut(run: AssignRun, span: range) -> AssignRun:
    """The part of `run` with these offsets."""
    low, high = span.start - run.first, span.stop - run.first
    return AssignRun(
        run.grant,
        span.start,
        run.spec,
        run.client,
        run.ids[low:high],
        run.bodies[low:high],
        run.attempts[low:high],
    )


def spans(offsets: Iterable[int]) -> Iterator[range]:
    """Ascending offsets as unbroken ranges."""
    start = end = -1
    for offset in offsets:
        if offset != end:
            if start >= 0:
                yield range(start, end)
            start = offset
        end = offset + 1
    if start >= 0:
        yield range(start, end)


def packed(runs: list[AckRun], limit: int) -> Iterator[list[AckRun]]:
    """`runs` in groups that each fit a frame of `limit` bytes."""
    group: list[AckRun] = []
    size = 0
    for run in runs:
        for part in _slices(run, limit):
            cost = _cost(part)
            if group and size + cost > limit:
                yield group
                group, size = [], 0
            group.append(part)
            size += cost
    if group:
        yield group


def _cost(run: AckRun) -> int:
    """At least the bytes `run` takes on the wire."""
    size = _RUN_BYTES + sum(map(len, run.outputs)) + _OUTPUT_BYTES * len(run.outputs)
    if run.failures or run.released or run.notes:
        size += _OUTPUT_BYTES * len(run.released) + _NOTE_BYTES * len(run.notes)
    if run.blobs:
        size += sum(_BLOB_BYTES * len(some) + _OUTPUT_BYTES for some in run.blobs.values())
    if run.failures:
        # A character is at most four bytes.
        size += sum(
            _FAILURE_BYTES + 4 * len(failure.message) + len(failure.detail)
            for failure in run.failures
        )
    return size


def _slices(run: AckRun, limit: int) -> Iterator[AckRun]:
    """`run` whole if it fits, else halved until every piece does or is a single attempt."""
    count = len(run.outputs)
    if _cost(run) <= limit or count + len(run.failures) <= 1:
        yield run
        return
    offsets = list(range(count)) if run.offsets is None else run.offsets
    outs, fails = count // 2, len(run.failures) // 2
    if count == 1:
        outs = 1
    for some_out, some_fail, released in (
        (slice(0, outs), slice(0, fails), run.released),
        (slice(outs, None), slice(fails, None), []),
    ):
        at = offsets[some_out]
        notes = {offset: run.notes[offset] for offset in at if offset in run.notes}
        blobs = {offset: run.blobs[offset] for offset in at if offset in run.blobs}
        half = AckRun(
            run.grant, at, run.outputs[some_out], notes, run.failures[some_fail], released, blobs
        )
        yield from _slices(half, limit)
