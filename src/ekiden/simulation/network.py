"""A network that keeps TCP's promises and no others.

Per connection and direction bytes arrive in order or not at all. Everything beyond that can happen:
a connection breaks in the middle of a frame, a link is cut in one or both directions while both
ends believe in it, a peer vanishes without a word (half-open), bytes are flipped, delays grow from
microseconds to seconds. Frames repeat and change order because peers reconnect and send again, and
because of a *repeating proxy*: a fault that hands frames of an earlier moment, also of an earlier
connection of the same two processes, to the receiver once more.

The network carries bytes, so the real frame reader sees every cut and every flip. Checkers watch
frames as they leave (`on_send`) and as they are handed over (`on_deliver`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ekiden import limits
from ekiden.errors import BadFrame, TooLarge
from ekiden.machine import (
    Congested,
    Connected,
    DialFailed,
    Disconnected,
    Frame,
    Garbled,
    Received,
    Relieved,
)
from ekiden.simulation.world import MS, US, Event, Universe
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader

_HEADER_BYTES = 28

# Frames that a repeating proxy may hand over again: all of the ledger. Handshakes are bound to
# their nonces, and beats and credit describe a moment: a network that repeats those out of time
# does not exist, and no protocol without a clock could tell.
_REPEATABLE = frozenset(
    messages.TYPE_OF[kind]
    for kind in (
        messages.Submit, messages.Accepted, messages.Results, messages.Attach, messages.Attached,
        messages.Assign, messages.Ack, messages.Acked, messages.Stop,
    )
)  # fmt: skip
_LAST_HELLO_TYPE = messages.TYPE_OF[messages.Bye]
_ATTIC_FRAMES = 24


class Party(Protocol):
    """What the network knows of a process."""

    name: str
    incarnation: int
    """Grows with every start: what was meant for an earlier life is not for this one."""
    up: bool
    """False while the machine it runs on has no power: not even a reset comes back."""

    def post(self, event: object) -> None:
        """Something arrived for it."""


def frames_of(data: bytes) -> list[tuple[int, int, bytes]]:
    """Whole frames as (type, msg_id, all bytes of the frame)."""
    found = []
    at = 0
    while at < len(data):
        size = 8 + int.from_bytes(data[at : at + 4], "little")
        raw = bytes(data[at : at + size])
        found.append((raw[8], int.from_bytes(raw[12:20], "little"), raw))
        at += size
    return found


def body_of(raw: bytes) -> bytes:
    """The body of one whole frame."""
    return raw[_HEADER_BYTES + int.from_bytes(raw[10:12], "little") :]


class End:
    """One end of a connection: the number its process knows it by, and what is on its way here."""

    def __init__(self, party: Party, conn: int, frame_bytes_max: int) -> None:
        self.party = party
        self.incarnation = party.incarnation
        self.conn = conn
        self.open = True
        self.reader = FrameReader(frame_bytes_max)
        self.coming: deque[tuple[int, bytes | None]] = deque()
        """(arrival, bytes), or None for the peer's close."""
        self.delivery: Event | None = None
        self.last_arrival = 0
        self.garbled = False

    def post(self, event: object) -> None:
        """Tell the process, if it is still the one that opened this."""
        if self.open and self.incarnation == self.party.incarnation:
            self.party.post(event)


class Connection:
    """Two ends. `ends[0]` dialled."""

    def __init__(self, dialler: End, listener: End, address: str) -> None:
        self.ends = (dialler, listener)
        self.address = address

    def other(self, end: End) -> End:
        """The end that is not this one."""
        return self.ends[1] if end is self.ends[0] else self.ends[0]


class Network:
    """All connections of one universe."""

    def __init__(self, universe: Universe) -> None:
        self.universe = universe
        self.on_send: Callable[[End, End, int, int, bytes], None] | None = None
        self.on_deliver: Callable[[Party, Party, Frame], None] | None = None
        self.repeat_rate = 0.0
        self.flip_rate = 0.0
        self.slowness_ns = 0
        self._dice = universe.chance("network")
        self._listeners: dict[str, Party] = {}
        self._ends: dict[tuple[str, int], tuple[Connection, End]] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._stalled: list[tuple[Connection, End]] = []
        self._conns = 0
        self._attic: dict[tuple[str, int, str, int], deque[bytes]] = {}

    # -------------------------------------------------------------- what processes do

    def listen(self, address: str, party: Party) -> None:
        """Accept connections at `address` for `party`."""
        self._listeners[address] = party

    def deafen(self, address: str) -> None:
        """Nobody listens there any more."""
        self._listeners.pop(address, None)

    def dial(self, party: Party, address: str) -> None:
        """Connect, or fail to, a moment later."""
        born = party.incarnation
        self.universe.after(
            self._latency(), f"dial {party.name}", lambda: self._dialled(party, born, address)
        )

    def send(self, party: Party, conn: int, data: bytes) -> None:
        """Put whole frames on the way. Silently nothing if the connection is gone."""
        found = self._ends.get((party.name, conn))
        if found is None or not data:
            return
        connection, end = found
        to = connection.other(end)
        data = bytes(data)
        self.universe.seen(data)
        frames = frames_of(data)
        for kind, msg_id, raw in frames:
            if self.on_send is not None:
                self.on_send(end, to, kind, msg_id, raw)
            if kind > _LAST_HELLO_TYPE and self.repeat_rate:
                data = self._maybe_repeat(end, to, kind, raw, data)
        self._transmit(connection, to, data)

    def trust(self, party: Party, conn: int) -> None:
        """The peer proved itself: it may send frames of full size."""
        found = self._ends.get((party.name, conn))
        if found is not None:
            found[1].reader.limit = limits.FRAME_BYTES_MAX

    def close(self, party: Party, conn: int, reason: str = "") -> None:
        """Close this end: the process hears no more of it than that it ended, the peer is told
        after what was sent."""
        found = self._ends.get((party.name, conn))
        if found is None:
            return
        connection, end = found
        self._drop_coming(end)
        self._hang_up(end, reason)
        to = connection.other(end)
        if to.open:
            self._queue(connection, to, None)

    # -------------------------------------------------------------- what faults do

    def forget(self, party: Party, *, silently: bool) -> None:
        """The process died. Its kernel tells the peers, or (power loss) nobody does."""
        for (name, conn), (_, end) in list(self._ends.items()):
            if name != party.name:
                continue
            if silently:
                del self._ends[name, conn]
                end.open = False
                self._drop_coming(end)
            else:
                self.close(party, conn)

    def connections(self) -> list[Connection]:
        """Those with at least one open end, in order of their making."""
        seen: dict[int, Connection] = {}
        for connection, _ in self._ends.values():
            seen[id(connection)] = connection
        return list(seen.values())

    def latest(self, party: Party) -> int | None:
        """The newest connection of a process, if it has one."""
        return max((conn for name, conn in self._ends if name == party.name), default=None)

    def sever(self, connection: Connection) -> None:
        """Break it now: of what was on its way, some leading bytes still arrive, the rest never."""
        self.universe.count("connection severed")
        for end in connection.ends:
            if not end.open:
                continue
            kept: deque[tuple[int, bytes | None]] = deque()
            for arrival, data in end.coming:
                if data is None or self._dice.random() < 0.5:
                    if data:
                        kept.append((arrival, data[: self._dice.randrange(len(data) + 1)]))
                    break
                kept.append((arrival, data))
            end.coming = kept
            self._queue(connection, end, None)
        for end in connection.ends:
            # What a process sends from here on goes nowhere, though it has not heard of it yet.
            self._ends.pop((end.party.name, end.conn), None)

    def half_open(self, connection: Connection) -> None:
        """One end is gone without a word; the other goes on believing until it speaks or waits."""
        self.universe.count("half-open")
        gone = connection.ends[self._dice.randrange(2)]
        if gone.open:
            self._ends.pop((gone.party.name, gone.conn), None)
            self._drop_coming(gone)
            self._hang_up(gone, "connection reset")

    def congest(self, connection: Connection) -> Callable[[], None]:
        """Who dialled reads slowly, and the kernel of the other lets it know; the way to end it."""
        listener = connection.ends[1]
        listener.post(Congested(listener.conn))
        return lambda: listener.post(Relieved(listener.conn))

    def cut(self, sender: str, receiver: str) -> None:
        """Nothing travels from the one to the other until `mend`."""
        self._cuts[sender, receiver] = self._cuts.get((sender, receiver), 0) + 1

    def mend(self, sender: str, receiver: str) -> None:
        """Undo one `cut`; what waited goes on its way, as TCP sends again."""
        left = self._cuts.get((sender, receiver), 0) - 1
        if left > 0:
            self._cuts[sender, receiver] = left
            return
        self._cuts.pop((sender, receiver), None)
        for connection, end in self._stalled:
            if end.coming and end.delivery is None and end.open:
                self._schedule(connection, end)
        self._stalled.clear()

    def heal(self) -> None:
        """No faults from here on."""
        self.repeat_rate = 0.0
        self.flip_rate = 0.0
        self.slowness_ns = 0
        for sender, receiver in list(self._cuts):
            self._cuts[sender, receiver] = 1
            self.mend(sender, receiver)

    # -------------------------------------------------------------- on the way

    def _latency(self) -> int:
        delay = self._dice.randrange(40 * US, 400 * US)
        if self.slowness_ns:
            delay += self._dice.randrange(self.slowness_ns)
        return delay

    def _is_cut(self, sender: str, receiver: str) -> bool:
        return bool(self._cuts) and (sender, receiver) in self._cuts

    def _dialled(self, party: Party, born: int, address: str) -> None:
        if party.incarnation != born:
            return
        listener = self._listeners.get(address)
        if listener is None:
            party.post(DialFailed(address, "connection refused"))
            return
        if self._is_cut(party.name, listener.name) or self._is_cut(listener.name, party.name):
            self.universe.after(
                1000 * MS, f"dial {party.name}", lambda: self._timed_out(party, born, address)
            )
            return
        self._conns += 1
        near = End(party, self._conns, limits.FRAME_BYTES_MAX)
        self._conns += 1
        far = End(listener, self._conns, limits.FRAME_BYTES_MAX_BEFORE_HELLO)
        connection = Connection(near, far, address)
        self._ends[party.name, near.conn] = (connection, near)
        self._ends[listener.name, far.conn] = (connection, far)
        nonces = self._dice.randbytes(32), self._dice.randbytes(32)
        party.post(Connected(near.conn, address, nonces[0], address))
        listener.post(Connected(far.conn, party.name, nonces[1]))

    def _timed_out(self, party: Party, born: int, address: str) -> None:
        if party.incarnation == born:
            party.post(DialFailed(address, "timed out"))

    def _maybe_repeat(self, end: End, to: End, kind: int, raw: bytes, data: bytes) -> bytes:
        """`data`, perhaps with a frame of the past after it; `raw` becomes part of the past."""
        key = (end.party.name, end.incarnation, to.party.name, to.incarnation)
        attic = self._attic.setdefault(key, deque(maxlen=_ATTIC_FRAMES))
        if kind in _REPEATABLE:
            attic.append(raw)
        if attic and self._dice.random() < self.repeat_rate:
            self.universe.count("frame repeated")
            data += attic[self._dice.randrange(len(attic))]
        return data

    def _transmit(self, connection: Connection, to: End, data: bytes) -> None:
        if not to.open:
            self._reset(connection, connection.other(to))
            return
        if self.flip_rate and self._dice.random() < self.flip_rate:
            self.universe.count("bytes flipped")
            at = self._dice.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << self._dice.randrange(8))]) + data[at + 1 :]
        if len(data) > 1 and self._dice.random() < 0.05:
            at = self._dice.randrange(1, len(data))
            self._queue(connection, to, data[:at])
            data = data[at:]
        self._queue(connection, to, data)

    def _queue(self, connection: Connection, to: End, data: bytes | None) -> None:
        arrival = max(to.last_arrival + 1, self.universe.now + self._latency())
        to.last_arrival = arrival
        to.coming.append((arrival, data))
        if to.delivery is None:
            self._schedule(connection, to)

    def _schedule(self, connection: Connection, to: End) -> None:
        delay = to.coming[0][0] - self.universe.now
        if delay < 0:
            delay = self._latency()  # it waited behind a cut and is sent again
        to.delivery = self.universe.after(
            delay, f"deliver {to.party.name}", lambda: self._deliver(connection, to)
        )

    def _deliver(self, connection: Connection, to: End) -> None:
        to.delivery = None
        sender = connection.other(to)
        if self._is_cut(sender.party.name, to.party.name):
            self._stalled.append((connection, to))
            return
        frames: list[Frame] = []
        while to.coming and to.coming[0][0] <= self.universe.now:
            _, data = to.coming.popleft()
            if data is None:
                self._hand_over(sender, to, frames)
                self._hang_up(to, "closed by peer")
                return
            if to.garbled:
                continue
            try:
                frames += to.reader.feed(data)
            except (BadFrame, TooLarge) as error:
                self._hand_over(sender, to, frames)
                frames = []
                to.garbled = True
                to.post(Garbled(to.conn, str(error)))
        self._hand_over(sender, to, frames)
        if to.coming and to.open:
            self._schedule(connection, to)

    def _hand_over(self, sender: End, to: End, frames: list[Frame]) -> None:
        if not frames:
            return
        if self.on_deliver is not None:
            for frame in frames:
                self.on_deliver(sender.party, to.party, frame)
        to.post(Received(to.conn, frames))

    def _hang_up(self, end: End, reason: str) -> None:
        end.post(Disconnected(end.conn, reason))
        end.open = False
        self._ends.pop((end.party.name, end.conn), None)

    def _drop_coming(self, end: End) -> None:
        end.coming.clear()
        if end.delivery is not None:
            end.delivery.call_off()
            end.delivery = None

    def _reset(self, connection: Connection, speaker: End) -> None:
        """The other end knows nothing of this connection and says so, if its word gets through."""
        if connection.other(speaker).party.up and speaker.open and not speaker.coming:
            self._queue(connection, speaker, None)
