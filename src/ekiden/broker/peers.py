"""Those who are connected, and what this turn has for each: one write per connection and turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Raw

from ekiden import limits
from ekiden.core.rows import Grant, Row, Settlement
from ekiden.model.jobs import DONE, Cause
from ekiden.wire import messages as m
from ekiden.wire.frames import encode_frame
from ekiden.wire.session import Greeter

# A frame is closed when it has grown to this; what is added at once stays below the other half.
_FRAME_TARGET = limits.FRAME_BYTES_MAX // 2
_NAME_BYTES = 128  # of a job in a run beside its bytes: id, attempt, note
_RUN_BYTES = 320  # of what a run says once: worker or client, times


class Peer:
    """One connection. It enters itself in `dirty` when it has something to send or is to close."""

    def __init__(
        self, conn: int, address: str, greeter: Greeter, now: int, dirty: dict[Peer, None]
    ) -> None:
        self._dirty = dirty
        self.conn = conn
        self.address = address
        self.greeter: Greeter | None = greeter
        self.role = ""
        self.id = ""
        self.session = ""
        self.heard = now
        self.spoke = now
        self.since = now
        self.closing = False
        self.subscriptions: dict[int, str] = {}
        self.watching: dict[str, None] = {}
        """Jobs of other sessions it wants to hear the end of."""
        self.congested = False
        self.relayed = 0
        """Bytes of published messages sent to it since it fell behind."""
        self.owed: deque[Row] = deque()
        """Jobs whose end it is still to be told of, held back because it reads slowly."""
        self.frames: list[bytes] = []
        self.accepted: list[int] = []
        self.refused: list[m.Refused] = []
        self.runs: list[m.ResultRun] = []
        self.ended: list[m.Ended] = []
        self.assigns: list[m.AssignRun] = []
        self.size = 0
        self.acked = 0

    def send(self, message: m.Message, corr_id: int = 0) -> None:
        """After all that was gathered before it."""
        self.send_frame(encode_frame(message, 0, corr_id))

    def send_frame(self, frame: bytes) -> None:
        """A frame ready made, after all that was gathered before it."""
        self.flush()
        self.frames.append(frame)
        self._dirty[self] = None

    def close(self) -> None:
        """At the end of this turn, after what was sent."""
        self.closing = True
        self._dirty[self] = None

    def accept(self, msg_id: int, refused: Sequence[m.Refused] = ()) -> None:
        """The submit of that number is durable, but for the jobs named: all of it in one frame."""
        if refused:
            self._grow(sum(len(r.text) + len(r.remedy) + 64 for r in refused))
            self.refused += refused
        self.accepted.append(msg_id)
        self._dirty[self] = None

    def refuse(self, refused: m.Refused) -> None:
        """A whole submit is not taken."""
        self.accept(refused.message, [refused])  # the frame names every submit it answers

    def ack(self, msg_id: int) -> None:
        """All acks up to that number are durable."""
        self.acked = max(self.acked, msg_id)
        self._dirty[self] = None

    def _grow(self, size: int) -> None:
        self._dirty[self] = None
        if self.size + size > _FRAME_TARGET:
            self.flush()
        self.size += size

    def result(self, run: m.ResultRun) -> None:
        """Jobs done; a run that would not fit one frame is split."""
        size = sum(map(len, run.outputs)) + _NAME_BYTES * len(run.ids) + _RUN_BYTES
        if size > _FRAME_TARGET and len(run.ids) > 1:
            half = len(run.ids) // 2
            self.result(_part(run, 0, half))
            self.result(_part(run, half, len(run.ids)))
            return
        self._grow(size)
        self.runs.append(run)

    def end(self, ended: m.Ended) -> None:
        """A job that ended without a result."""
        # A character may take four bytes.
        self._grow(
            sum(4 * len(c.message) + len(c.detail) + 250 for c in ended.causes) + _NAME_BYTES
        )
        self.ended.append(ended)

    def assign(self, run: m.AssignRun) -> None:
        """Attempts to run."""
        size = sum(map(len, run.bodies)) + _NAME_BYTES * len(run.ids)
        self._grow(size + len(run.spec) + _RUN_BYTES)
        self.assigns.append(run)

    def has_receipts_only(self) -> bool:
        """Whether it is told nothing this turn but that what it sent is durable."""
        return not (self.assigns or self.runs or self.ended)

    def flush(self) -> None:
        """Close what was gathered into frames."""
        out = self.frames.append
        if self.accepted or self.refused:
            out(encode_frame(m.Accepted(self.accepted, self.refused)))
            self.accepted, self.refused = [], []
        if self.assigns:
            out(encode_frame(m.Assign(self.assigns)))
            self.assigns = []
        if self.runs or self.ended:
            out(encode_frame(m.Results(self.runs, self.ended)))
            self.runs, self.ended = [], []
        if self.acked:
            out(encode_frame(m.Acked(self.acked)))
            self.acked = 0
        self.size = 0

    def drain(self) -> bytes:
        """All bytes for this peer; empty if there are none."""
        self.flush()
        data = b"".join(self.frames) if len(self.frames) != 1 else self.frames[0]
        self.frames = []
        return data


def _part(run: m.ResultRun, start: int, stop: int) -> m.ResultRun:
    def shift(found: dict[int, object]) -> dict[int, object]:
        return {n - start: value for n, value in found.items() if start <= n < stop}

    return m.ResultRun(
        run.ids[start:stop], run.outputs[start:stop], run.worker, run.submitted, run.leased,
        run.finished, shift(run.attempts), shift(run.notes),  # type: ignore[arg-type]
    )  # fmt: skip


def assign_runs(grant: Grant, owned: list[tuple[int, Row]]) -> list[m.AssignRun]:
    """The attempts in runs of neighbours that share a spec and a client, each below a frame."""
    if _are_one_run(owned):
        return [_assign_run(grant, owned)]
    runs: list[m.AssignRun] = []
    start, size = 0, 0
    for n, (offset, row) in enumerate(owned):
        head = owned[start][1].origin
        size += len(row.body) + _NAME_BYTES  # type: ignore[arg-type]
        breaks = n > start and (
            offset != owned[n - 1][0] + 1
            or size > _FRAME_TARGET
            or (
                row.origin is not head
                and (
                    row.origin.spec_bytes != head.spec_bytes or row.origin.client is not head.client
                )
            )
        )
        if breaks:
            runs.append(_assign_run(grant, owned[start:n]))
            start, size = n, len(row.body) + _NAME_BYTES  # type: ignore[arg-type]
    runs.append(_assign_run(grant, owned[start:]))
    return runs


def _are_one_run(owned: list[tuple[int, Row]]) -> bool:
    """Whether that is plain at first sight: the usual case, seen without a step for each."""
    bodies: list[bytes] = [row.body for _, row in owned]  # type: ignore[misc]
    return (
        owned[-1][0] - owned[0][0] == len(owned) - 1
        and len({id(row.origin) for _, row in owned}) == 1
        and sum(map(len, bodies)) + _NAME_BYTES * len(owned) <= _FRAME_TARGET
    )


def _assign_run(grant: Grant, owned: list[tuple[int, Row]]) -> m.AssignRun:
    rows = [row for _, row in owned]
    attempts = [row.attempt for row in rows]
    origin = rows[0].origin
    return m.AssignRun(
        grant.number,
        owned[0][0],
        Raw(origin.spec_bytes),
        origin.client.id,
        [row.id for row in rows],
        [row.body for row in rows],  # type: ignore[misc]
        attempts if max(attempts) > 1 else [],
    )


def result_run(settlement: Settlement, rows: list[Row], outputs: list[bytes]) -> m.ResultRun:
    """Rows done in one settlement."""
    return m.ResultRun(
        [row.id for row in rows],
        outputs,
        settlement.worker,
        rows[0].origin.wall,
        settlement.leased,
        settlement.wall,
        {n: row.attempt for n, row in enumerate(rows) if row.attempt != 1},
        {n: row.note for n, row in enumerate(rows) if row.note is not None},
    )


def ended(row: Row) -> m.Ended:
    """A row that ended without a result, or whose result is gone."""
    settlement: Settlement = row.place
    causes: list[Cause] = list(row.history or ())
    reason = settlement.reason if settlement.state != DONE else "result_gone"
    return m.Ended(row.id, settlement.state, causes, reason)
