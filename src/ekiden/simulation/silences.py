"""How long each worker has been silent, as a broker must see it: when may leases be forfeited?

Measured in true time from the frames that reached the broker's machine, so that neither a wall
clock nor a broker's own bookkeeping has a say in it.
"""

from __future__ import annotations

from ekiden.config import BrokerConfig
from ekiden.limits import NS
from ekiden.simulation.world import Universe, Violation

# A forfeit that was decided may take this long to reach the disk (a full one, above all), and the
# worker may be back before it does.
_FORFEIT_UNDER_WAY_NS = 60 * NS


class Silences:
    """How long each worker has been silent, as a broker must see it."""

    def __init__(self, universe: Universe, config: BrokerConfig) -> None:
        self._universe = universe
        self._config = config
        self._listening_since = 0
        self._heard: dict[str, int] = {}
        self._sessions: dict[str, str] = {}
        self._excused: dict[str, int] = {}
        """Worker → when it last gave reason to take its leases away."""

    def listening(self) -> None:
        """A broker begins to listen: it has heard nobody yet."""
        self._listening_since = self._universe.now
        self._heard.clear()
        self._sessions.clear()

    def heard(self, worker: str, *, joins: bool) -> None:
        """The worker spoke. Before it has joined, nothing it says counts."""
        if not joins and worker not in self._heard:
            return
        if self._is_long(worker):
            self.left(worker)
        self._heard[worker] = self._universe.now

    def greeted(self, worker: str, session: str) -> None:
        """The worker introduced itself: another process of that name has lost the leases."""
        if self._sessions.setdefault(worker, session) != session:
            self._sessions[worker] = session
            self.left(worker)

    def left(self, worker: str) -> None:
        """From here on its leases may be taken away."""
        self._excused[worker] = self._universe.now

    def check_forfeit(self, worker: str) -> None:
        """Its leases are taken away."""
        if self._is_long(worker):
            self._universe.count("lease expired")
            return
        excuse = self._excused.get(worker)
        if excuse is None or self._universe.now - excuse > _FORFEIT_UNDER_WAY_NS:
            silent = self._universe.now - self._heard.get(worker, self._listening_since)
            raise Violation(
                "lease", f"{worker} lost its leases after {silent / NS:.1f} s of silence"
            )

    def _is_long(self, worker: str) -> bool:
        config = self._config
        if worker in self._heard:
            return self._universe.now - self._heard[worker] >= config.silence_ns
        return self._universe.now - self._listening_since >= config.rejoin_grace_ns
