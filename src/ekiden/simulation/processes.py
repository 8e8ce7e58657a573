"""Processes: a machine with a life. They are started, paused, killed and lose their power.

A process does for its machine exactly what `world.loop.Driver` does: every event is received at
once, a turn follows when everything that has arrived is in, effects are performed in order, and a
timer stands for `next_deadline`. Each life has a monotonic clock of its own, so that a moment of
one process compared with a moment of another shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ekiden.machine import Close, Dial, Log, Machine, Send, Trust
from ekiden.simulation.network import Network
from ekiden.simulation.world import MS, US, Event, Universe, Violation

KEY = b"the key of a simulated grid, 32 b"
ADDRESS = "broker:7000"


class Process:
    """One process on a machine of its own."""

    def __init__(self, universe: Universe, network: Network, name: str) -> None:
        self.universe = universe
        self.network = network
        self.name = name
        self.incarnation = 0
        self.up = True
        self.alive = False
        self.paused = False
        self.machine: Machine | None = None
        self.handlers: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            Close: lambda effect: network.close(self, effect.conn, effect.reason),
            Dial: lambda effect: network.dial(self, effect.address),
            Trust: lambda effect: network.trust(self, effect.conn),
            Log: self._log,
        }
        self._dice = universe.chance(f"process {name}")
        self._clock = 0
        self._inbox: list[Any] = []
        self._turn: Event | None = None
        self._timer: Event | None = None
        self._timer_at = 0

    # -------------------------------------------------------------- life and death

    def start(self) -> None:
        """A new life, from whatever the last one left behind."""
        raise NotImplementedError

    def begin(self, machine: Machine) -> None:
        """A new life with a new machine."""
        assert not self.alive
        self.alive = True
        self.machine = machine
        self.universe.note(f"{self.name} starts (life {self.incarnation})")
        self._wake()

    def new_life(self) -> None:
        """Everything meant for the life before is void; the clock begins anew."""
        self.incarnation += 1
        self.up = True
        self._clock = self._dice.randrange(1 << 50) - self.universe.now
        self._inbox.clear()

    def kill(self, *, power: bool = False) -> None:
        """The end, without a word to itself; with `power`, without a word to anybody."""
        if not self.alive:
            return
        self.universe.note(f"{self.name} {'loses power' if power else 'is killed'}")
        self.alive = self.paused = False
        self.up = not power
        self.machine = None
        self.network.forget(self, silently=power)
        self.incarnation += 1
        for event in (self._turn, self._timer):
            if event is not None:
                event.call_off()
        self._turn = self._timer = None
        self._inbox.clear()

    def pause(self, duration_ns: int) -> None:
        """Stop in the middle of everything (SIGSTOP); the kernel goes on taking its mail."""
        if not self.alive or self.paused:
            return
        self.paused = True
        life = self.incarnation
        self.universe.note(f"{self.name} pauses for {duration_ns / 1e9:.1f} s")
        self.universe.after(duration_ns, f"resume {self.name}", lambda: self._resume(life))

    def resume_now(self) -> None:
        """End a pause early."""
        self._resume(self.incarnation)

    def _resume(self, life: int) -> None:
        if self.incarnation != life or not self.paused:
            return
        self.paused = False
        self.universe.note(f"{self.name} goes on")
        mail, self._inbox = self._inbox, []
        for event in mail:
            self.post(event)
        self._wake()

    # -------------------------------------------------------------- the loop

    def clock(self) -> int:
        """What this life's monotonic clock shows."""
        return self.universe.now + self._clock

    def post(self, event: object) -> None:
        """Something happened to it."""
        if not self.alive:
            return
        if self.paused:
            self._inbox.append(event)
            return
        assert self.machine is not None
        self._guard(lambda machine: machine.receive(event, self.clock()))
        self._wake()

    def later(self, delay_ns: int, what: str, event: object) -> Event:
        """Post something to this life, if it lives that long."""
        life = self.incarnation

        def arrive() -> None:
            if self.incarnation == life:
                self.post(event)

        return self.universe.after(delay_ns, f"{what} {self.name}", arrive)

    def _wake(self) -> None:
        if self._turn is None and self.alive and not self.paused:
            delay = self._dice.randrange(5 * US, 60 * US)
            self._turn = self.universe.after(delay, f"turn {self.name}", self.turn)

    def turn(self) -> None:
        """Drain the machine once and do what it says."""
        self._turn = None
        if not self.alive or self.paused:
            return  # `_resume` sees to the turn that is due
        life = self.incarnation
        effects = self._guard(lambda machine: machine.advance(self.clock()))
        for effect in effects or ():
            if self.incarnation != life:
                return
            handler = self.handlers.get(type(effect))
            if handler is None:
                raise Violation("bug", f"{self.name} asks for a {type(effect).__name__}")
            handler(effect)
        if self.incarnation == life:
            self._arm()

    def _guard(self, action: Callable[[Machine], Any]) -> Any:
        """A machine that raises has a bug: here it is a violation, whatever it would survive."""
        assert self.machine is not None
        try:
            return action(self.machine)
        except Exception as error:
            raise Violation("bug", f"{self.name} raised {error!r}") from error

    def _arm(self) -> None:
        assert self.machine is not None
        deadline = self._guard(lambda machine: machine.next_deadline())
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.call_off()
            self._timer = None
        delay = deadline - self.clock()
        if delay <= 0:
            self._wake()
            return
        # Rounded up to milliseconds, as the loop does.
        self._timer_at = deadline
        self._timer = self.universe.after(-(-delay // MS) * MS, f"timer {self.name}", self._ring)

    def _ring(self) -> None:
        self._timer = None
        if not self.alive or self.paused:
            return
        assert self.machine is not None
        deadline = self._guard(lambda machine: machine.next_deadline())
        if deadline is None:
            return
        if deadline > self.clock():
            self._arm()
        elif self._turn is None:
            self.turn()

    # -------------------------------------------------------------- effects all have in common

    def _send(self, effect: Send) -> None:
        self.network.send(self, effect.conn, effect.data)

    def _log(self, effect: Log) -> None:
        if self.universe.story is not None:
            facts = " ".join(f"{name}={value!r}" for name, value in effect.facts.items())
            self.universe.tell(f"{self.name}: {effect.event} {facts}")
