"""The one conversation of a client or a worker: with whichever broker leads, as long as it lives.

A link is always in exactly one state: resting before the next try, dialling, greeting, or ready.
It tries the configured addresses in turn and never any other: a hint "the leader is there" is
followed only to an address the user named, so no broker can send its peer, and the proof of the
key, to a stranger.

The link does not know what a job is. It says which connection may be spoken on (`conn`), hands on
the frames that arrive there, and leaves what the world shall do in `effects`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from ekiden import errors, limits
from ekiden.machine import (
    Close,
    Connected,
    ConnId,
    Dial,
    DialFailed,
    Disconnected,
    Frame,
    Garbled,
    Instant,
    Log,
    Received,
    Send,
)
from ekiden.wire import messages
from ekiden.wire.frames import encode_frame
from ekiden.wire.session import Caller

# A hint may be stale, and so may the next one; three in a row mean that nobody knows the leader.
HOPS_MAX: Final = 3

_NOT_LEADER: Final = messages.TYPE_OF[messages.NotLeader]
_BEAT: Final = encode_frame(messages.Beat())

# The user has to act before another try can help, if every address says so.
_FATAL: Final = (errors.Unauthenticated, errors.VersionMismatch, errors.NotAllowed, errors.BadId)


def is_loopback(address: str) -> bool:
    """Whether bytes to there never leave the machine, as far as its name tells."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


class Left(Struct, frozen=True):
    """No more tries."""


class Resting(Struct, frozen=True):
    """Nothing is open; the next try is due at `until`."""

    until: Instant


class Dialling(Struct, frozen=True):
    """The world was asked for a connection to `address`."""

    address: str
    until: Instant


class Greeting(Struct, frozen=True):
    """Connected; neither side has proved itself yet."""

    conn: ConnId
    address: str
    caller: Caller
    until: Instant


class Ready(Struct):
    """Welcomed. `heard` and `spoke` are when the last bytes came and went."""

    conn: ConnId
    address: str
    welcome: messages.Welcome
    heard: Instant
    spoke: Instant
    proven: bool = False
    """A frame came after the welcome: only then is the trouble before it forgotten."""


class Link:
    """Keeps one conversation open. Feed it the network's events, then call `advance`."""

    def __init__(
        self,
        addresses: list[str],
        hello_for: Callable[[bytes], messages.HelloClient | messages.HelloWorker],
        key_for: Callable[[str], bytes],
        jitter: Callable[[], float],
        *,
        beats: bool,
    ) -> None:
        """`hello_for` makes the hello for a nonce. With `beats` the link shows by itself that its
        owner lives; an owner whose beats say more sends them itself."""
        assert addresses
        self.addresses = addresses
        self.effects: list[Any] = []
        self.last_error: errors.EkidenError | None = None
        self.refused_by_all: errors.EkidenError | None = None
        """Set when every address refused for good; the owner takes note and clears it."""
        self._hello_for = hello_for
        self._key_for = key_for
        self._jitter = jitter
        self._beats = beats
        self._state: Resting | Dialling | Greeting | Ready | Left = Resting(0)
        self._turn = 0
        self._tries = 0
        self._hops = 0
        self._verdicts: dict[str, errors.EkidenError] = {}

    # -------------------------------------------------------------- what the owner asks

    @property
    def conn(self) -> ConnId | None:
        """The connection that may be spoken on."""
        return self._state.conn if isinstance(self._state, Ready) else None

    @property
    def welcome(self) -> messages.Welcome | None:
        """What the broker said of itself."""
        return self._state.welcome if isinstance(self._state, Ready) else None

    @property
    def address(self) -> str:
        """Where the present conversation goes, or the next try will."""
        return self.addresses[self._turn]

    def send(self, data: bytes, now: Instant) -> None:
        """Whole frames for the present connection."""
        assert isinstance(self._state, Ready)
        self._state.spoke = now
        self.effects.append(Send(self._state.conn, data))

    def drop(self, reason: str, now: Instant) -> None:
        """End the present conversation and begin another: the broker made no sense."""
        assert isinstance(self._state, Ready)
        self.effects.append(Close(self._state.conn, reason))
        self._lost(self._state, reason, now)

    def leave(self, reason: str) -> None:
        """Say goodbye; no more tries."""
        if isinstance(self._state, Ready):
            self.effects.append(Send(self._state.conn, encode_frame(messages.Bye(reason))))
        if isinstance(self._state, Ready | Greeting):
            self.effects.append(Close(self._state.conn, reason))
        self._state = Left()

    # -------------------------------------------------------------- events

    def receive(self, event: Any, now: Instant) -> list[Frame]:
        """Take note; the frames returned are for the owner."""
        match event:
            case Received():
                return self._received(event, now)
            case Connected():
                self._connected(event, now)
            case DialFailed():
                self._dial_failed(event, now)
            case Garbled():
                self._garbled(event, now)
            case Disconnected():
                self._disconnected(event, now)
        return []

    def advance(self, now: Instant) -> None:
        """Do what is due: dial, give up on what takes too long, show that we live."""
        state = self._state
        if isinstance(state, Ready):
            if now - state.heard >= state.welcome.silence_ns:
                self.drop(f"silent for {(now - state.heard) / limits.NS:.0f} s", now)
            elif self._beats and now - state.spoke >= state.welcome.heartbeat_ns:
                self.send(_BEAT, now)
        elif isinstance(state, Dialling | Greeting) and now >= state.until:
            error = _unreachable(state.address, "no answer in time")
            if isinstance(state, Greeting):
                self.effects.append(Close(state.conn, "no welcome in time"))
                error = _speechless(state.address)
            self._failed(state.address, error, now)
        if isinstance(self._state, Resting) and now >= self._state.until:
            self._state = Dialling(self.address, now + limits.HELLO_TIMEOUT_NS)
            self.effects.append(Dial(self.address))

    def next_deadline(self) -> Instant | None:
        """When `advance` has something to do even if nothing happens."""
        state = self._state
        if isinstance(state, Ready):
            silent = state.heard + state.welcome.silence_ns
            return min(silent, state.spoke + state.welcome.heartbeat_ns) if self._beats else silent
        return None if isinstance(state, Left) else state.until

    # -------------------------------------------------------------- one handler per event

    def _connected(self, event: Connected, now: Instant) -> None:
        state = self._state
        if not isinstance(state, Dialling) or event.dialled != state.address:
            # A dial we had given up on came through after all.
            self.effects.append(Close(event.conn, "no longer wanted"))
            return
        try:
            caller = Caller(self._key_for(state.address), self._hello_for(event.nonce))
        except errors.EkidenError as error:
            self.effects.append(Close(event.conn, error.code))
            self._failed(state.address, error, now)
            return
        self._state = Greeting(event.conn, state.address, caller, now + limits.HELLO_TIMEOUT_NS)
        self.last_error = _speechless(state.address)  # until it says something
        self.effects.append(Send(event.conn, caller.opening()))

    def _received(self, event: Received, now: Instant) -> list[Frame]:
        state = self._state
        frames = event.frames
        if isinstance(state, Greeting) and event.conn == state.conn:
            frames = self._greet(state, frames, now)
            state = self._state
        if not frames or not isinstance(state, Ready) or event.conn != state.conn:
            return []
        state.heard = now
        for place, frame in enumerate(frames):
            if frame.type == _NOT_LEADER:
                self._stepped_down(state, frame, now)
                return frames[:place]
        if not state.proven:
            state.proven = True
            self._tries = self._hops = 0
        return frames

    def _greet(self, state: Greeting, frames: list[Frame], now: Instant) -> list[Frame]:
        """Carry the handshake on; what is left over came after the welcome."""
        for place, frame in enumerate(frames):
            try:
                answer = state.caller.receive(frame)
            except errors.NotLeader as hint:
                self.effects.append(Close(state.conn, "not the leader"))
                self._redirected(state.address, hint, now)
                return []
            except errors.EkidenError as error:
                self.effects.append(Close(state.conn, error.code))
                self._failed(state.address, error, now)
                return []
            if answer:
                self.effects.append(Send(state.conn, answer))
            if state.caller.welcome is not None:
                self._state = Ready(state.conn, state.address, state.caller.welcome, now, now)
                self._verdicts.clear()
                self.last_error = None
                return frames[place + 1 :]
        return []

    def _stepped_down(self, state: Ready, frame: Frame, now: Instant) -> None:
        self.effects.append(Close(state.conn, "not the leader"))
        try:
            message = messages.decode(frame.type, frame.body)
        except errors.BadFrame as error:
            self._failed(state.address, error, now)
            return
        assert isinstance(message, messages.NotLeader)
        hint = errors.NotLeader(
            f"broker {state.address} no longer leads its group", leader=message.leader
        )
        self._redirected(state.address, hint, now)

    def _dial_failed(self, event: DialFailed, now: Instant) -> None:
        if isinstance(self._state, Dialling) and event.address == self._state.address:
            self._failed(event.address, _unreachable(event.address, event.reason), now)

    def _garbled(self, event: Garbled, now: Instant) -> None:
        state = self._state
        if isinstance(state, Greeting | Ready) and event.conn == state.conn:
            self.effects.append(Close(state.conn, event.reason))
            error = errors.Unreachable(
                f"what listens on {state.address} does not speak ekiden ({event.reason})",
                remedy="check host and port",
            )
            self._failed(state.address, error, now)

    def _disconnected(self, event: Disconnected, now: Instant) -> None:
        state = self._state
        if isinstance(state, Ready) and event.conn == state.conn:
            self._lost(state, event.reason, now)
        elif isinstance(state, Greeting) and event.conn == state.conn:
            why = f"closed before the welcome ({event.reason})" if event.reason else "closed early"
            self._failed(state.address, _unreachable(state.address, why), now)

    # -------------------------------------------------------------- where to next

    def _lost(self, state: Ready, reason: str, now: Instant) -> None:
        self.effects.append(
            Log("warning", "broker.lost", {"address": state.address, "reason": reason})
        )
        self.last_error = errors.Unreachable(f"broker {state.address} went away ({reason})")
        if state.proven:
            # The same address first: a broker that restarts is back at once.
            self._rest(0, now)
        else:
            self._failed(state.address, self.last_error, now)

    def _failed(self, address: str, error: errors.EkidenError, now: Instant) -> None:
        self.last_error = self._verdicts[address] = error
        # The first failure is news, the hundredth is not.
        level = "warning" if self._tries < len(self.addresses) else "debug"
        self.effects.append(
            Log(level, "broker.unavailable", {"address": address, "reason": str(error)})
        )
        self._tries += 1
        self._turn = (self._turn + 1) % len(self.addresses)
        rounds, inside = divmod(self._tries, len(self.addresses))
        if inside:
            self._state = Resting(now)
            return
        self._hops = 0
        self._rest(rounds - 1, now)
        if all(isinstance(self._verdicts.get(each), _FATAL) for each in self.addresses):
            self.refused_by_all = error
            self._verdicts.clear()

    def _redirected(self, address: str, hint: errors.NotLeader, now: Instant) -> None:
        self._hops += 1
        known = hint.leader in self.addresses and hint.leader != address
        if not known or self._hops > HOPS_MAX:
            self._failed(address, hint, now)
            return
        self.last_error = hint
        self._turn = self.addresses.index(hint.leader)
        self._state = Resting(now)

    def _rest(self, rounds: int, now: Instant) -> None:
        """Twice as long after every round, and never in step with others."""
        longest = min(limits.RECONNECT_FIRST_NS << min(rounds, 20), limits.RECONNECT_MAX_NS)
        self._state = Resting(now + longest // 2 + int(longest / 2 * self._jitter()))


def _speechless(address: str) -> errors.Unreachable:
    return errors.Unreachable(
        f"what listens on {address} does not answer as a broker would",
        remedy="check host and port: something else may listen there",
    )


def _unreachable(address: str, reason: str) -> errors.Unreachable:
    return errors.Unreachable(
        f"no broker at {address} ({reason})",
        remedy="start one with: ekiden up, or name another with --connect or EKIDEN_CONNECT",
    )
