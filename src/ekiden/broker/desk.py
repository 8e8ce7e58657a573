"""Questions and changes by people and tools: what `Ask` is answered with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Protocol

from ekiden import limits
from ekiden.broker.crew import Crew
from ekiden.broker.intake import Intake
from ekiden.broker.library import Library
from ekiden.broker.peers import Peer
from ekiden.broker.relay import Relay
from ekiden.config import BrokerConfig
from ekiden.core import commands as c
from ekiden.core.book import JobBook
from ekiden.core.effects import Tally
from ekiden.core.queues import Lane
from ekiden.core.roster import Roster, RosterWorker
from ekiden.core.rows import Delay, Grant, Kept, Row, Settlement, Watch
from ekiden.core.runs import RunTally
from ekiden.core.scheduler import Scheduler
from ekiden.core.subjects import check_pattern, match
from ekiden.errors import BadRequest, TooLarge, UnknownJob, UnknownWorker
from ekiden.limits import NS
from ekiden.machine import Instant
from ekiden.model import jobs as j
from ekiden.wire import messages as m
from ekiden.wire.frames import encode_frame

# Rows looked at for one listing: bounds the turn it takes, whatever the filter leaves over.
ROWS_SEEN_MAX = 50_000
SCAN_ROWS_MAX = 20_000
LIST_MAX = 1000
CHANGE_MAX = 10_000
BRIEF_MAX = 5000  # ids of the longest kind that fit one frame
QUEUES_SHOWN = 100
MESSAGE_SHOWN = 200  # of the last failure, in a line of a list; `job` shows all of it
UNKNOWN_SHOWN = 5000  # ids of the greatest length still fit a frame

_FILTERS = ("state", "subject", "client", "run")


class Broker(Protocol):
    """What the desk sees of the machine it belongs to."""

    config: BrokerConfig
    book: JobBook
    roster: Roster
    scheduler: Scheduler
    intake: Intake
    relay: Relay
    crew: Crew
    library: Library
    peers: dict[int, Peer]
    broker_id: str
    software: str
    started: Instant
    snapshot_index: int

    def time(self, now: Instant) -> int: ...
    def wall(self, now: Instant) -> int: ...
    def propose(self, command: c.Command, peer: Peer | None = None, msg_id: int = 0) -> None: ...


class Desk:
    """Reads the machine it belongs to; changes only by proposing commands."""

    def __init__(self, machine: Broker) -> None:
        self._machine = machine
        self.facts: Callable[[], dict[str, Any]] = dict
        """What only the process knows: memory, turns, disk. Set by the world."""
        self._verbs: dict[str, Callable[[Peer, int, dict[str, Any], Instant], Any]] = {
            "stats": self._stats,
            "jobs": self._jobs,
            "job": self._job,
            "runs": self._runs,
            "logs": self._logs,
            "workers": self._workers,
            "cancel": self._change,
            "replay": self._change,
            "purge": self._change,
            "drain": self._drain,
            "resume": self._drain,
            **machine.library.verbs,
        }
        self._verb = ""
        self._partial = False

    def asked(self, peer: Peer, msg_id: int, ask: m.Ask, now: Instant) -> None:
        """Answer now, or when the change is applied. Raises a Refusal."""
        verb = self._verbs.get(ask.verb)
        if verb is None:
            raise BadRequest(
                f"unknown verb {ask.verb[:40]!r}", remedy=f"use {', '.join(self._verbs)}"
            )
        self._verb = ask.verb
        try:
            answer = verb(peer, msg_id, ask.params, now)
        except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
            raise BadRequest(f"parameters of {ask.verb!r} make no sense: {error}") from None
        if answer is not None:
            frame = encode_frame(m.Answer(answer), 0, msg_id)
            if len(frame) > limits.FRAME_BYTES_MAX:
                raise TooLarge(
                    f"the answer to {ask.verb!r} would be {len(frame):,} bytes long",
                    remedy="ask for less: a lower limit, a narrower filter",
                )
            peer.send_frame(frame)

    def changed(self, peer: Peer, msg_id: int, command: Any, tally: Tally) -> None:
        """A change was applied: tell who asked."""
        if isinstance(command, c.RemoveCache):
            body = self._machine.library.told(tally)
        elif isinstance(command, c.Cancel):
            body = {
                "cancelled": len(tally.changed),
                "cancelling": len(tally.stopping),
                "settled": len(tally.settled),
                "unknown": tally.unknown[:UNKNOWN_SHOWN],
            }
        else:
            done = "replayed" if isinstance(command, c.Replay) else "purged"
            body = {
                done: len(tally.changed),
                "skipped": len(tally.settled),
                "unknown": tally.unknown[:UNKNOWN_SHOWN],
            }
        peer.send(m.Answer(body), msg_id)

    # -------------------------------------------------------------- jobs

    def _rows(self, state: str | None) -> Iterator[Row]:
        book = self._machine.book
        waiting = (row for q in book.queues.values() for la in q.lanes.values() for row in la.rows)
        later = (row for d in chain(book.delays, book.watches) for row in d.rows)
        leased = (row for grant in book.grants.values() for row in grant.rows)
        ended = (
            row
            for settlement in chain(reversed(book.settled), reversed(book.faded))
            if state is None or settlement.state == state
            for row in settlement.rows
        )
        by_state = {
            j.QUEUED: waiting, j.DELAYED: later, j.LEASED: leased, j.RUNNING: leased,
            j.CANCELLING: leased, j.DONE: ended, j.FAILED: ended, j.CANCELLED: ended,
        }  # fmt: skip
        if state is not None and state not in by_state:
            raise BadRequest(f"unknown state {state[:40]!r}", remedy=f"use {', '.join(by_state)}")
        return by_state[state] if state else chain(leased, waiting, later, ended)

    def _fits(self, params: dict[str, Any]) -> Callable[[Row], bool]:
        """Whether a row passes the filters."""
        state, subject = params.get("state"), params.get("subject")
        client, run, live = params.get("client"), params.get("run"), params.get("live")
        if subject:
            check_pattern(subject)

        def fits(row: Row) -> bool:
            spec = row.origin.spec
            if client and row.origin.client.id != client:
                return False
            if run and spec.run != run:
                return False
            if subject and not match(subject, spec.route.subject):
                return False
            if live and self._state(row) in (*j.TERMINAL, j.CANCELLING):
                return False
            return not state or self._in_state(row, state)

        return fits

    def _in_state(self, row: Row, state: str) -> bool:
        # What runs is leased, too; heartbeats say which of the leased ones run.
        present = self._state(row)
        return present == state or (state == j.LEASED and isinstance(row.place, Grant))

    def _select(self, params: dict[str, Any]) -> Iterator[Row]:
        """Rows that pass the filters, each once, after a bounded look; `_partial` if that was not
        enough to see them all."""
        fits = self._fits(params)
        seen: set[str] = set()
        self._partial = False
        for number, row in enumerate(self._rows(params.get("state"))):
            if number == ROWS_SEEN_MAX:
                self._partial = True
                return
            if row.id in seen or self._machine.book.find(row.id) is not row:
                continue
            seen.add(row.id)
            if fits(row):
                yield row

    def _scan(self, params: dict[str, Any], cursor: str, limit: int) -> tuple[list[Row], str]:
        """Rows that pass the filters, in the order of the book, and the cursor to go on with.

        Rows keep that order while their jobs are leased and settled; only ids that are forgotten
        leave it. So a look goes back by as many as were forgotten since the cursor was given: it
        may show a row again, but never leaves one out.
        """
        machine, shards = self._machine, self._machine.book.known
        self._rows(params.get("state"))  # refuses a state that does not exist
        forgotten = machine.book.totals.accepted - sum(map(len, shards))
        broker, _, place = cursor.rpartition("/")
        shard, position, before = (
            map(int, place.split(":")) if broker == machine.broker_id else (0, 0, forgotten)
        )
        position = max(0, position - max(0, forgotten - before))
        fits, found, looked = self._fits(params), list[Row](), 0
        for number in range(max(shard, 0), len(shards)):
            for row in islice(shards[number].values(), position, None):
                if looked == SCAN_ROWS_MAX or len(found) == limit:
                    return found, f"{machine.broker_id}/{number}:{position}:{forgotten}"
                position += 1
                looked += 1
                if fits(row):
                    found.append(row)
            position = 0
        return found, ""

    def _jobs(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        brief = bool(params.get("brief"))
        limit = max(1, min(int(params.get("limit", 100)), BRIEF_MAX if brief else LIST_MAX))
        show = _brief if brief else self._line
        if (cursor := params.get("cursor")) is not None:
            page, cursor = self._scan(params, cursor, limit)
            return {"jobs": [show(row) for row in page], "more": bool(cursor), "cursor": cursor}
        rows = self._select(params)
        after = params.get("after")
        if after:
            for row in rows:
                if row.id == after:
                    break
        found = list(islice(rows, limit + 1))
        return {
            "jobs": [show(row) for row in found[:limit]],
            "more": len(found) > limit or self._partial,
            "partial": self._partial,
        }

    def _state(self, row: Row) -> str:
        place = row.place
        if isinstance(place, Settlement):
            return place.state
        if isinstance(place, Grant):
            if row.id in self._machine.book.cancelling:
                return j.CANCELLING
            worker = self._machine.roster.workers.get(place.worker.id)
            for number, offset, _ in worker.running if worker is not None else ():
                if number == place.number and place.rows[offset : offset + 1] == [row]:
                    return j.RUNNING
            return j.LEASED
        return j.DELAYED if isinstance(place, Delay) else j.QUEUED

    def _line(self, row: Row) -> dict[str, Any]:
        origin, place = row.origin, row.place
        line: dict[str, Any] = {
            "id": row.id,
            "state": self._state(row),
            "name": origin.spec.name,
            "subject": origin.spec.route.subject,
            "client": origin.client.id,
            "run": origin.spec.run,
            "priority": origin.spec.priority,
            "attempt": row.attempt,
            "generation": self._machine.book.generations.get(row.id, (0, 0))[0],
            "submitted": origin.wall,
            "worker": "",
            "leased": 0,
            "finished": 0,
        }
        if isinstance(place, Grant):
            line |= {"worker": place.worker.id, "leased": place.wall}
        elif isinstance(place, Settlement):
            line |= {
                "worker": place.worker, "leased": place.leased, "finished": place.wall,
                "reason": place.reason,
            }  # fmt: skip
        if row.history:
            last = row.history[-1]
            line |= {"last_cause": last.cause, "last_message": last.message[:MESSAGE_SHOWN]}
        return line

    def _job(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        row = self._known(str(params.get("id", "")))
        line = self._line(row)
        line["form"] = row.origin.spec.form
        line["shared"] = row.origin.spec.shared
        line["causes"] = [
            {
                "attempt": past.attempt,
                "worker": past.worker,
                "cause": past.cause,
                "message": past.message,
                "time": past.time,
                "burned": past.burned,
                **_usage(past.note),
            }  # fmt: skip
            for past in row.history or ()
        ]
        note = row.note
        if note is None and line["state"] == j.FAILED and row.history:
            note = row.history[-1].note  # how its last attempt went is how it went
        line |= {"exit_code": 0, "ran_s": None, "cpu_s": None, "peak_mb": None} | _usage(note)
        size = row.body.size if isinstance(row.body, Kept) else len(row.body or b"")
        done = line["state"] == j.DONE
        line["output_bytes" if done else "input_bytes"] = size
        line["progress"] = self._progress(row)
        line["why"] = self._why(row, now)
        return line

    def _progress(self, row: Row) -> bytes | None:
        """The last that a running job said of itself."""
        grant = row.place
        if not isinstance(grant, Grant):
            return None
        worker = self._machine.roster.workers.get(grant.worker.id)
        if worker is None or not worker.progress:
            return None
        return worker.progress.get((grant.number, grant.rows.index(row)))

    def _logs(self, peer: Peer, msg_id: int, params: dict[str, Any], now: Instant) -> Any:
        """What a job that runs has written since the positions given. Of a job that does not run
        there is nothing here: its result or its causes have it."""
        row = self._known(str(params.get("id", "")))
        state = {"id": row.id, "state": self._state(row), "attempt": row.attempt}
        nothing = {**state, "known": False, "stdout": b"", "stderr": b""}
        grant = row.place
        if not isinstance(grant, Grant):
            return nothing
        stdout, stderr = (max(0, int(params.get(name, 0))) for name in ("stdout", "stderr"))

        def answer(seen: m.Peeked) -> None:
            body = {**state, "known": seen.known, "stdout": seen.stdout, "stderr": seen.stderr}
            peer.send(m.Answer(body), msg_id)

        asked = self._machine.crew.peek(grant, grant.rows.index(row), stdout, stderr, answer)
        return None if asked else nothing

    def _known(self, job_id: str) -> Row:
        row = self._machine.book.find(job_id)
        if row is None:
            raise UnknownJob(
                f"no job {job_id[:128]!r} in group {self._machine.config.group!r} "
                "(finished jobs are kept 7 days)",
                remedy="list with: ekiden jobs list",
            )
        return row

    def _runs(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        """Runs, the newest first; or the one that is named."""
        tallies = self._machine.book.runs.tallies
        name = params.get("name")
        if name is not None:
            found = tallies.get(name)
            if found is None:
                raise UnknownJob(
                    f"no run {str(name)[:128]!r} is known", remedy="list with: ekiden runs list"
                )
            return {"runs": [_run_line(name, found)], "more": False}
        limit = max(1, min(int(params.get("limit", 100)), LIST_MAX))
        newest = sorted(tallies.items(), key=lambda item: (-item[1].first, item[0]))
        lines = [_run_line(*item) for item in newest[:limit]]
        return {"runs": lines, "more": len(newest) > limit}

    def _why(self, row: Row, now: Instant) -> str:
        """Why the job is where it is, in one sentence."""
        machine, place = self._machine, row.place
        if isinstance(place, Settlement):
            return f"it is {place.state}" + (f": {place.reason}" if place.reason else "")
        if isinstance(place, Grant):
            return f"worker {place.worker.id!r} holds attempt {row.attempt}"
        if isinstance(place, Watch):
            wait = (place.until - machine.wall(now)) / NS
            return f"it may not start before a time that is {wait:.0f} s away"
        if isinstance(place, Delay):
            wait = (place.until - machine.time(now)) / NS
            what = "its next attempt is due" if row.history else "its delay ends"
            return f"{what} in {max(wait, 0):.1f} s"
        assert isinstance(place, Lane)
        if place.client.parked:
            cap = machine.book.settings.client_inflight_max
            return f"client {place.client.id!r} has {cap} attempts in flight, which is its cap"
        able = machine.scheduler.waiting_on(place.queue.route, machine.book)
        if not able:
            return "no connected worker takes its subject and has what it needs"
        ahead = place.queue.ready - 1
        paused = [worker for worker in able if worker.quarantined_until or worker.draining]
        if len(paused) == len(able):
            return self._why_paused(paused[0], now)
        busy = sum(worker.held(machine.book) for worker in able)
        return (
            f"{_counted(len(able), 'worker')} can run it, busy with {_counted(busy, 'job')}; "
            f"{ahead:,} more in the same queue"
        )

    def _why_paused(self, worker: RosterWorker, now: Instant) -> str:
        resume = f"ekiden workers resume {worker.id}"
        if worker.draining:
            return f"worker {worker.id!r} could run it but was told to take no more ({resume})"
        left = (worker.quarantined_until - now) / NS
        return (
            f"worker {worker.id!r} could run it but is paused for {max(left, 0):.0f} s, after "
            f"{limits.QUARANTINE_FAILURES} failures in a row ({resume})"
        )

    # -------------------------------------------------------------- changes

    def _change(self, peer: Peer, msg_id: int, params: dict[str, Any], now: Instant) -> Any:
        ids = params.get("ids")
        if ids is None:
            chosen = params.get("filter")
            if not isinstance(chosen, dict) or set(chosen) - set(_FILTERS) - {"all"}:
                raise BadRequest(
                    "neither ids nor a filter was given",
                    remedy=f"name ids, or a filter of {', '.join(_FILTERS)}",
                )
            ids = list(islice(self._changeable(chosen), CHANGE_MAX))
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise BadRequest("ids is not a list of names")
        if len(ids) > CHANGE_MAX:
            raise BadRequest(f"{len(ids):,} ids", remedy=f"at most {CHANGE_MAX:,} in one change")
        kind = {"cancel": c.Cancel, "replay": c.Replay, "purge": c.Purge}[self._verb]
        self._machine.propose(kind(ids), peer, msg_id)
        return None

    def _changeable(self, chosen: dict[str, Any]) -> Iterator[str]:
        """Ids that pass the filter and that the verb can change: live jobs are cancelled; failed
        ones, or cancelled ones if asked for, are replayed and purged."""
        if self._verb == "cancel":
            return (r.id for r in self._select(chosen) if self._state(r) not in j.TERMINAL)
        chosen = {**chosen, "state": chosen.get("state") or j.FAILED}
        return (r.id for r in self._select(chosen) if self._state(r) in (j.FAILED, j.CANCELLED))

    # -------------------------------------------------------------- workers

    def _workers(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        book = self._machine.book
        return {
            "workers": [
                {
                    "id": w.id,
                    "host": w.host,
                    "state": w.state,
                    "slots": w.slots,
                    "credit": w.credit,
                    "held": w.held(book),
                    "running": len(w.running),
                    "patterns": w.patterns,
                    "labels": w.labels,
                    "cpu_milli": w.cpu_milli,
                    "mem_mb": w.mem_mb,
                    "load": w.load,
                    "heard_s": (now - w.heard) / NS,
                }  # fmt: skip
                for w in self._machine.roster.workers.values()
            ]
        }

    def _drain(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        name = str(params.get("worker", ""))
        worker = self._machine.roster.workers.get(name)
        if worker is None:
            raise UnknownWorker(
                f"no worker {name[:128]!r} is connected", remedy="list with: ekiden workers list"
            )
        worker.draining = self._verb == "drain"
        if not worker.draining:
            worker.quarantined_until = 0
        else:
            self._machine.crew.recall(worker)
        self._machine.scheduler.freed(worker, self._machine.book)
        return {"worker": name, "state": worker.state}

    # -------------------------------------------------------------- stats

    def _stats(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        machine = self._machine
        book, totals = machine.book, machine.book.totals
        facts = self.facts()
        busiest = sorted(
            (q for q in book.queues.values() if q.lanes or q.leased),
            key=lambda q: (-q.ready, q.route.subject),
        )
        workers = list(machine.roster.workers.values())
        return {
            "group": machine.config.group,
            "broker": machine.broker_id,
            "epoch": 1,
            "software": machine.software,
            "uptime_s": (now - machine.started) / NS,
            "index": book.applied,
            "sync": machine.config.sync,
            "jobs": {
                "delayed": book.delayed,
                "queued": sum(la.ready for q in book.queues.values() for la in q.lanes.values()),
                "leased": book.leased,
                "cancelling": len(book.cancelling),
                "done": totals.done,
                "failed": totals.failed,
                "cancelled": totals.cancelled,
                "accepted_total": totals.accepted,
                "settled_total": totals.done + totals.failed + totals.cancelled,
                "retried_total": totals.retried,
                "stale_total": totals.stale,
                "evicted_total": totals.evicted,
                "results_kept": book.results_kept,
                "ids_kept": book.ids_kept,
            },
            "queues": [
                {
                    "subject": q.route.subject,
                    "ready": sum(lane.ready for lane in q.lanes.values()),
                    "leased": q.leased,
                    "oldest_wait_s": self._oldest(q, now),
                }
                for q in busiest[:QUEUES_SHOWN]
            ],
            "workers": {
                "connected": sum(w.conn is not None for w in workers),
                "draining": sum(w.draining for w in workers),
                "quarantined": sum(bool(w.quarantined_until) for w in workers),
                "slots": sum(w.slots for w in workers),
                "credit": sum(w.credit for w in workers),
            },
            "clients": sum(p.role == m.ROLE_CLIENT for p in machine.peers.values()),
            "relay": {
                "published": machine.relay.published,
                "delivered": machine.relay.delivered,
                "dropped": machine.relay.dropped,
            },
            "journal": {
                "snapshot_index": machine.snapshot_index,
                "disk_free": machine.intake.disk_free,
                **facts.pop("journal", {}),
            },
            **facts,
        }

    def _oldest(self, queue: Any, now: Instant) -> float:
        times = [
            next((r.origin.time for r in lane.rows if r.place is lane), None)
            for lane in queue.lanes.values()
        ]
        known = [time for time in times if time is not None]
        return (self._machine.time(now) - min(known)) / NS if known else 0.0


def _usage(note: j.Note | None) -> dict[str, Any]:
    """What the run took, as far as the worker measured it."""
    if note is None:
        return {}
    return {
        "exit_code": note.exit_code,
        "ran_s": note.ran_ns / NS,
        "cpu_s": note.cpu_ns / NS,
        "peak_mb": note.peak_kb / 1024,
    }


def _run_line(name: str, tally: RunTally) -> dict[str, Any]:
    return {
        "name": name,
        "client": tally.client,
        "submitted": tally.first,
        "total": tally.total,
        "open": tally.open,
        "done": tally.done,
        "failed": tally.failed,
        "cancelled": tally.cancelled,
    }


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _brief(row: Row) -> dict[str, Any]:
    return {"id": row.id}
