"""Jobs that name caches, and what must be known of those before such jobs can be sent.

A user says `caches=["curves"]`; the broker wants to know which content is meant. So the first jobs
that name a cache wait here while the broker is asked, and all later ones of the same connection go
by its answer: what lies under a CacheId does not change while jobs use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ekiden.client.contract import Terms
from ekiden.errors import EkidenError, Fault
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import Spec

# Distinct terms whose specs are kept; a caller with a new deadline for every job must not fill
# memory.
_SPECS_KEPT: Final = 1000

UNKNOWN_REMEDY: Final = "see what there is with: ekiden cache list"

_decode = msgspec.msgpack.Decoder(Spec).decode
_encode = msgspec.msgpack.Encoder().encode


class Uses:
    """Caches as the broker of this connection knows them, and the jobs that wait to hear of one."""

    def __init__(self) -> None:
        self._known: dict[str, CacheUse] = {}
        self._specs: dict[Terms, bytes] = {}
        self._asking: dict[int, str] = {}
        """Number of the question → the cache it is about."""
        self._parked: list[Any] = []
        """Jobs in the order they were submitted."""

    def __len__(self) -> int:
        """How many jobs wait here."""
        return len(self._parked)

    def spec_of(self, terms: Terms) -> bytes:
        """The spec to send for these terms; empty if not all of their caches are known."""
        spec = self._specs.get(terms)
        if spec is None:
            if not all(cache in self._known for cache in terms.caches):
                return b""
            uses = tuple(self._known[cache] for cache in terms.caches)
            spec = _encode(msgspec.structs.replace(_decode(terms.spec), caches=uses))
            if len(self._specs) >= _SPECS_KEPT:
                self._specs.clear()
            self._specs[terms] = spec
        return spec

    # -------------------------------------------------------------- waiting

    def park(self, handles: list[Any]) -> list[str]:
        """Keep these jobs, of the same terms, until their caches are known. Says which the broker
        is still to be asked for; call `asked` for each."""
        self._parked += handles
        asked = set(self._asking.values())
        return [
            cache
            for cache in handles[0].terms.caches
            if cache not in self._known and cache not in asked
        ]

    def asked(self, number: int, cache: str) -> None:
        """The broker was asked for this one, by a message of that number."""
        self._asking[number] = cache

    def answered(self, number: int, body: Any) -> tuple[list[Any], EkidenError | None]:
        """An answer of the broker: the jobs that are freed by it, and why they cannot be sent if
        they cannot."""
        cache = self._asking.pop(number, "")
        if not cache:
            return [], None
        try:
            self._known[cache] = CacheUse(cache, str(body["manifest"]), int(body["size"]))
        except (KeyError, TypeError, ValueError):
            return self._take(cache), Fault(f"the broker does not say what cache {cache!r} is")
        return self._take_ready(), None

    def refused(self, number: int) -> list[Any] | None:
        """The broker does not know the cache, or will not say: the jobs that cannot be sent. None
        if the question was not asked here."""
        cache = self._asking.pop(number, "")
        return self._take(cache) if cache else None

    def forget(self) -> list[Any]:
        """Another broker, or another state of it: nothing is known. The jobs that waited."""
        parked, self._parked = self._parked, []
        self._known.clear()
        self._specs.clear()
        self._asking.clear()
        return parked

    def unlearn(self, caches: Iterable[str]) -> None:
        """These may be something else by now: ask again."""
        for cache in caches:
            self._known.pop(cache, None)
        self._specs.clear()

    def _take(self, cache: str) -> list[Any]:
        found = [handle for handle in self._parked if cache in handle.terms.caches]
        self._parked = [handle for handle in self._parked if cache not in handle.terms.caches]
        return found

    def _take_ready(self) -> list[Any]:
        known = self._known
        ready: list[Any] = []
        waiting: list[Any] = []
        for handle in self._parked:
            whole = all(cache in known for cache in handle.terms.caches)
            (ready if whole else waiting).append(handle)
        self._parked = waiting
        return ready
