"""Caches: who puts them, who is to have them, how far they are.

What a cache is lies in the book; what is in it, in its manifest in the store; who has it, in the
words of the workers (`CacheAck`). A worker that joins is told of every cache that is meant for it
and says how it stands with each, so nothing here has to survive the broker.

A put is journaled after the disk has said that all its bytes are there. From then on they are kept:
the disk pins what it has checked, once for each check, until it is told to release it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, Protocol

from msgspec import Struct

from ekiden import limits
from ekiden.broker.events import CacheChecked, CheckCache, ReleaseCache, VerifyCache
from ekiden.broker.peers import Peer
from ekiden.core import caches as states
from ekiden.core import commands as c
from ekiden.core.book import JobBook
from ekiden.core.caches import Cache
from ekiden.core.effects import Tally
from ekiden.core.roster import CacheWord, Roster, RosterWorker
from ekiden.core.subjects import check_pattern, overlap
from ekiden.errors import (
    BadRequest,
    Conflict,
    EkidenError,
    QueueFull,
    UnknownBlob,
    UnknownCache,
)
from ekiden.machine import Instant
from ekiden.model.caches import CacheUse, check_cache_id
from ekiden.model.ids import shown
from ekiden.wire import messages as m
from ekiden.wire.session import refusal_frame

STATUSES: Final = ("fetching", "ok", "skipped", "failed", "gone")
_PENDING: Final = "pending"

# Puts whose bytes are being looked for. Each is a person or a nightly script.
CHECKS_MAX: Final = 100

# Lines of one answer: with long names and all their targets they still fit a frame.
LIST_MAX: Final = 500
TARGETS_MAX: Final = 64

WORDS_MAX: Final = 300  # of what a worker says of a failure, as far as it is kept


class Broker(Protocol):
    """What the library sees of the machine it belongs to."""

    book: JobBook
    roster: Roster
    peers: dict[int, Peer]

    def propose(self, command: c.Command, peer: Peer | None = None, msg_id: int = 0) -> None: ...
    def perform(self, effect: Any) -> None: ...
    def log(self, level: str, event: str, **facts: Any) -> None: ...


class _Check(Struct, frozen=True):
    use: CacheUse
    target: str
    peer: Peer
    msg_id: int


class Library:
    """The caches of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._checks: dict[int, _Check | CacheUse] = {}
        """Under way, by number: for a put, or to verify a cache of the book."""
        self._last_check = 0
        self._missing: dict[str, int] = {}
        """Caches of the book that the store has not all blobs of → how many it lacks."""
        self.verbs: dict[str, Callable[[Peer, int, dict[str, Any], Instant], Any]] = {
            "cache_put": self._put,
            "cache": self._cache,
            "caches": self._caches,
            "cache_remove": self._remove,
            "cache_verify": self._verify,
        }

    # -------------------------------------------------------------- puts

    def _put(self, peer: Peer, msg_id: int, params: dict[str, Any], now: Instant) -> Any:
        use = CacheUse(
            check_cache_id(str(params.get("id", ""))),
            str(params.get("manifest", "")),
            int(params.get("size", -1)),
        )
        target = str(params.get("target", ""))
        check_pattern(target)
        if len(use.manifest) != 64 or not 0 < use.size <= limits.MANIFEST_BYTES_MAX:
            raise BadRequest(f"no usable manifest of cache {shown(use.id)} was named")
        self._check_known(use, target)
        if len(self._checks) >= CHECKS_MAX:
            raise QueueFull("too many caches are being put", remedy="retry", retry_after_s=1)
        number = self._numbered(_Check(use, target, peer, msg_id))
        self._broker.perform(CheckCache(number, use))

    def _check_known(self, use: CacheUse, target: str) -> None:
        caches = self._broker.book.caches.known
        known = caches.get(use.id)
        if known is not None and known.use.manifest != use.manifest:
            raise _taken(use.id)
        if known is None and len(caches) >= limits.CACHES_MAX:
            raise QueueFull(
                f"the group has {len(caches):,} caches, all it takes",
                remedy="remove old ones with: ekiden cache rm",
            )
        if known is not None and len(known.targets) >= TARGETS_MAX and target not in known.targets:
            raise QueueFull(
                f"cache {use.id!r} has {TARGETS_MAX} targets, all it takes",
                remedy="put it once for a wider one",
            )

    def _numbered(self, check: _Check | CacheUse) -> int:
        self._last_check += 1
        self._checks[self._last_check] = check
        return self._last_check

    def checked(self, event: CacheChecked) -> None:
        """The disk has looked for the bytes of a cache."""
        check = self._checks.pop(event.number)
        if isinstance(check, CacheUse):
            self.checked_own(check, event)
            return
        error = event.error
        if error is None and event.missing:
            error = UnknownBlob(
                f"the store lacks {event.missing:,} of the blobs of cache {check.use.id!r}",
                remedy="put them first",
            )
        if error is not None:
            self._refuse(check.peer, check.msg_id, error)
            return
        put = c.PutCache(check.use, check.peer.id, check.target, event.files, event.size)
        self._broker.propose(put, check.peer, check.msg_id)

    def checked_own(self, use: CacheUse, event: CacheChecked) -> None:
        """The disk has looked for the bytes of a cache that is in the book."""
        self._missing.pop(use.id, None)
        if event.error is not None or event.missing:
            self._missing[use.id] = max(event.missing, 1)
            why = str(event.error) if event.error is not None else "blobs are missing"
            self._broker.log(
                "error", "cache.incomplete", cache=use.id, missing=event.missing, why=why
            )

    def _refuse(self, peer: Peer, msg_id: int, error: EkidenError) -> None:
        if peer.conn in self._broker.peers:
            peer.send_frame(refusal_frame(error, msg_id))

    def put(self, peer: Peer | None, msg_id: int, command: c.PutCache, state: str) -> None:
        """A put was applied: tell who asked, and the workers."""
        use = command.cache
        if state == states.NEW:
            self._broker.log("info", "cache.put", cache=use.id, files=command.files,
                             bytes=command.size, client=command.client)  # fmt: skip
        else:
            self._broker.perform(ReleaseCache(use))  # it was pinned before
        here = peer is not None and peer.conn in self._broker.peers
        if state == states.CONFLICT:
            if peer is not None and here:
                self._refuse(peer, msg_id, _taken(use.id))
            return
        self._missing.pop(use.id, None)
        for worker in self._meant(self._broker.book.caches.known[use.id]):
            if not worker.has(use):
                self._offer(worker, [use])
        if peer is not None and here:
            peer.send(m.Answer({"id": use.id, "manifest": use.manifest, "state": state}), msg_id)

    # -------------------------------------------------------------- removal

    def _remove(self, peer: Peer, msg_id: int, params: dict[str, Any], now: Instant) -> Any:
        ids = params.get("ids")
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise BadRequest("ids is not a list of names")
        if not 0 < len(ids) <= limits.CACHES_MAX:
            raise BadRequest(f"{len(ids):,} ids", remedy=f"give 1 to {limits.CACHES_MAX:,}")
        self._broker.propose(c.RemoveCache(ids), peer, msg_id)

    def removed(self, caches: list[Cache]) -> None:
        """Nobody needs these any more: the workers drop them, and the store may."""
        for cache in caches:
            self._missing.pop(cache.use.id, None)
            self._broker.perform(ReleaseCache(cache.use))
            self._broker.log("info", "cache.removed", cache=cache.use.id)
        holders = [
            worker
            for worker in self._broker.roster.workers.values()
            if any(cache.use.id in worker.caches for cache in caches)
        ]
        for worker in holders:
            for cache in caches:
                worker.caches.pop(cache.use.id, None)
            self.welcome(worker)

    @staticmethod
    def told(tally: Tally) -> dict[str, Any]:
        """What became of a `cache_remove`."""
        return {"removed": tally.changed, "in_use": tally.settled, "unknown": tally.unknown}

    # -------------------------------------------------------------- workers

    def welcome(self, worker: RosterWorker) -> None:
        """Tell a worker of all the caches that are meant for it."""
        known = self._broker.book.caches.known.values()
        # Thousands of caches have few targets: each is held against the patterns once.
        targets = dict.fromkeys(target for cache in known for target in cache.targets)
        reach = {t for t in targets if any(overlap(t, each) for each in worker.patterns)}
        mine = [cache.use for cache in known if not reach.isdisjoint(cache.targets)]
        self._offer(worker, mine, whole=True)

    def said(self, worker: RosterWorker, message: m.CacheAck) -> None:
        """How a worker stands with a cache."""
        if message.status not in STATUSES:
            raise BadRequest(f"unknown status {shown(message.status)} of a cache")
        known = self._broker.book.caches.known.get(message.cache)
        if known is None or known.use.manifest != message.manifest:
            return  # it was removed, or replaced, meanwhile
        before = worker.caches.get(message.cache)
        worker.caches[message.cache] = CacheWord(
            message.manifest, message.status, message.text[:WORDS_MAX], message.done, message.total
        )
        if message.status in ("failed", "gone") and (
            before is None or before.status != message.status
        ):
            self._broker.log(
                "warning", f"cache.{message.status}", cache=message.cache, worker=worker.id,
                why=message.text[:WORDS_MAX],
            )  # fmt: skip

    def _offer(
        self, worker: RosterWorker, uses: list[CacheUse], *, whole: bool = False,
        verify: bool = False,
    ) -> None:  # fmt: skip
        peer = self._broker.peers.get(worker.conn) if worker.conn is not None else None
        if peer is not None:
            peer.send(m.CacheOffer(uses, whole, verify))

    def _meant(self, cache: Cache) -> list[RosterWorker]:
        """Connected workers that are to have it."""
        roster = self._broker.roster
        ids: dict[str, None] = {}
        for target in cache.targets:
            ids |= dict.fromkeys(roster.trie.overlapping(target))
        found = [roster.workers[each] for each in ids if each in roster.workers]
        return [worker for worker in found if worker.conn is not None]

    # -------------------------------------------------------------- questions

    def _known(self, params: dict[str, Any]) -> Cache:
        cache_id = str(params.get("id", ""))
        found = self._broker.book.caches.known.get(cache_id)
        if found is None:
            raise UnknownCache(
                f"no cache {shown(cache_id)} is known", remedy="list with: ekiden cache list"
            )
        return found

    def _line(self, cache: Cache) -> dict[str, Any]:
        use = cache.use
        return {
            "id": use.id,
            "manifest": use.manifest,
            "size": use.size,
            "files": cache.files,
            "bytes": cache.size,
            "client": cache.client,
            "targets": cache.targets,
            "put": cache.wall,
            "jobs": self._broker.book.caches.jobs.get(use.id, 0),
            "missing": self._missing.get(use.id, 0),
        }

    def _cache(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        cache = self._known(params)
        return {**self._line(cache), "workers": [_word(w, cache.use) for w in self._meant(cache)]}

    def _caches(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        limit = max(1, min(int(params.get("limit", 100)), LIST_MAX))
        after = params.get("after")
        newest = reversed(self._broker.book.caches.known.values())
        if after:
            for cache in newest:
                if cache.use.id == after:
                    break
        found = list(islice(newest, limit + 1))
        lines = []
        for cache in found[:limit]:
            meant = self._meant(cache)
            there = sum(worker.has(cache.use) for worker in meant)
            lines.append({**self._line(cache), "ok": there, "of": len(meant)})
        return {"caches": lines, "more": len(found) > limit}

    def _verify(self, _: Peer, __: int, params: dict[str, Any], now: Instant) -> Any:
        cache = self._known(params)
        meant = self._meant(cache)
        for worker in meant:
            worker.caches.pop(cache.use.id, None)
            self._offer(worker, [cache.use], verify=True)
        self._broker.perform(VerifyCache(self._numbered(cache.use), cache.use))
        return {"id": cache.use.id, "workers": len(meant)}


def _word(worker: RosterWorker, use: CacheUse) -> dict[str, Any]:
    word = worker.caches.get(use.id)
    if word is None or word.manifest != use.manifest:
        return {"id": worker.id, "status": _PENDING, "text": "", "done": 0, "total": 0}
    return {
        "id": worker.id, "status": word.status, "text": word.text, "done": word.done,
        "total": word.total,
    }  # fmt: skip


def _taken(cache_id: str) -> Conflict:
    return Conflict(
        f"cache id {cache_id!r} is taken by other content",
        remedy="caches never change: put the new content under a new id",
    )
