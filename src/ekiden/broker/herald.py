"""Tells clients what became of their jobs.

The session that submitted a job hears of its end at once; so does whoever attached to it. A client
that reads slowly is owed the news instead: the book keeps the results, and the client gets them as
fast as it reads. So nobody is cut off for having much to fetch, and nobody's bytes pile up here.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter
from typing import Any

from ekiden import limits
from ekiden.broker import peers as p
from ekiden.broker.intake import refused
from ekiden.broker.peers import Peer
from ekiden.core import commands as c
from ekiden.core.effects import Changes, SubmitOutcome
from ekiden.core.rows import Kept, Row, Settlement
from ekiden.errors import Conflict
from ekiden.journal.journal import Journal
from ekiden.machine import Congested, Relieved
from ekiden.model.jobs import DONE
from ekiden.wire.messages import Refused

# What one piece of news costs beside its output, roughly.
_NEWS_BYTES = 200


class Herald:
    """Sessions, watchers, and who is owed what."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sessions: dict[str, Peer] = {}
        self._watchers: dict[str, dict[Peer, None]] = {}
        """Job id → who wants to know, beside the session that submitted it."""
        self._owing: dict[Peer, None] = {}
        """Peers with something owed that could take it now."""
        self._read_back: tuple[int, list[Any]] = (0, [])
        """Index and commands of the last entry read back for a large result."""

    @property
    def waiting(self) -> bool:
        """Whether somebody could be told more at once."""
        return bool(self._owing)

    def session(self, name: str) -> Peer | None:
        """The connection of that session, if it has one."""
        return self._sessions.get(name)

    def came(self, peer: Peer) -> None:
        """A client said hello; the newest connection of a session is the one that counts."""
        self._sessions[peer.session] = peer

    def left(self, peer: Peer) -> None:
        """The connection is gone."""
        self._owing.pop(peer, None)
        if self._sessions.get(peer.session) is peer:
            del self._sessions[peer.session]
        for job_id in peer.watching:
            watching = self._watchers[job_id]
            del watching[peer]
            if not watching:
                del self._watchers[job_id]
        peer.watching = {}

    def congestion(self, peer: Peer, event: Congested | Relieved) -> None:
        """The peer fell behind, or caught up."""
        peer.congested = isinstance(event, Congested)
        peer.relayed = 0
        if peer.congested:
            self._owing.pop(peer, None)
        elif peer.owed:
            self._owing[peer] = None

    def submitted(self, peer: Peer, msg_id: int, outcome: SubmitOutcome, jobs: range) -> None:
        """A submit was applied: accepted, with the exceptions named. Its jobs are these of the
        outcome: small submits are applied together."""
        conflicts = _within(outcome.conflicts, jobs)
        peer.accept(msg_id, [_conflict(msg_id, at - jobs.start, row) for at, row in conflicts])
        for _, row in _within(outcome.repeated, jobs):
            self.attach(peer, row)

    def attach(self, peer: Peer, row: Row) -> None:
        """Tell the peer what became of the row: soon, or when it is known."""
        if isinstance(row.place, Settlement):
            self._owe(peer, [row])
        elif peer.session != row.origin.session:
            self._watchers.setdefault(row.id, {})[peer] = None
            peer.watching[row.id] = None

    def settled(self, settlement: Settlement, changes: Changes) -> None:
        """Jobs ended together: tell each run of neighbours to the session it came from."""
        rows, start = settlement.rows, 0
        while start < len(rows):
            stop = _run_end(rows, start)
            peer = self._sessions.get(rows[start].origin.session)
            if peer is not None:
                whole = start == 0 and stop == len(rows)
                self._push(peer, settlement, rows if whole else rows[start:stop], changes)
            start = stop
        if self._watchers:
            for row in rows:
                for peer in self._watchers.pop(row.id, ()):
                    del peer.watching[row.id]
                    self._push(peer, settlement, [row], changes)

    def pay(self) -> None:
        """This turn's share of what is owed."""
        for peer in list(self._owing):
            self._pay(peer)

    def output(self, row: Row) -> bytes | None:
        """The result bytes of a done job, from memory or from the journal; None if gone."""
        kept = row.body
        if not isinstance(kept, Kept):
            return kept
        if self._read_back[0] != kept.index:  # neighbours are mostly asked for together
            try:
                payload = self._journal.read(kept.index)
            except KeyError:
                return None
            self._read_back = (kept.index, c.decode_entry(kept.index, payload).commands)
        output: bytes = self._read_back[1][kept.command].outputs[kept.slot]
        return output

    # -------------------------------------------------------------- inside

    def _push(self, peer: Peer, settlement: Settlement, rows: list[Row], changes: Changes) -> None:
        if peer.congested or peer.owed:
            self._owe(peer, rows)
        elif settlement.state != DONE:
            for row in rows:
                peer.end(p.ended(row))
        elif changes.large:
            outputs = [changes.large.get(row.id, row.body) for row in rows]
            peer.result(p.result_run(settlement, rows, outputs))  # type: ignore[arg-type]
        else:
            peer.result(p.result_run(settlement, rows, [row.body for row in rows]))  # type: ignore[misc]

    def _owe(self, peer: Peer, rows: list[Row]) -> None:
        peer.owed.extend(rows)
        if not peer.congested:
            self._owing[peer] = None

    def _pay(self, peer: Peer) -> None:
        owed, left = peer.owed, limits.OWED_BYTES_PER_TURN
        while owed and left > 0:
            place, wall = owed[0].place, owed[0].origin.wall
            rows: list[Row] = []
            outputs: list[bytes] = []
            while owed and left > 0 and owed[0].place is place and owed[0].origin.wall == wall:
                row = owed.popleft()
                left -= _NEWS_BYTES
                output = self._final_output(row)
                if output is None:
                    self._tell_without_output(peer, row)
                    continue
                rows.append(row)
                outputs.append(output)
                left -= len(output)
            if rows:
                peer.result(p.result_run(place, rows, outputs))
        if not owed:
            del self._owing[peer]

    def _final_output(self, row: Row) -> bytes | None:
        settled = isinstance(row.place, Settlement) and row.place.state == DONE
        return self.output(row) if settled else None

    def _tell_without_output(self, peer: Peer, row: Row) -> None:
        if isinstance(row.place, Settlement):
            peer.end(p.ended(row))
        else:  # replayed meanwhile
            self.attach(peer, row)


def _within(found: list[tuple[int, Row]], jobs: range) -> list[tuple[int, Row]]:
    """Those of these jobs; `found` is in order."""
    if not found:
        return found
    first = bisect_left(found, jobs.start, key=itemgetter(0))
    return found[first : bisect_left(found, jobs.stop, first, key=itemgetter(0))]


def _conflict(msg_id: int, offset: int, row: Row) -> Refused:
    error = Conflict(
        f"job id {row.id!r} is taken by a job with other content",
        remedy="use another id or the same content",
    )
    return refused(msg_id, error, offset)


def _run_end(rows: list[Row], start: int) -> int:
    """Where the run of rows ends that go to one session and were accepted at one time."""
    origin = rows[start].origin
    for n in range(start + 1, len(rows)):
        other = rows[n].origin
        if other is not origin and (other.session != origin.session or other.wall != origin.wall):
            return n
    return len(rows)
