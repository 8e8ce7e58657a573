"""The broker of a simulated grid: the real machine and journal on a disk that forgets.

It does what `broker.serve` does. Recovery comes before listening; an append is written inline or,
as if by the disk's thread, a little later; a snapshot is made by the same code, run as a child
would run it: on what the disk shows when it begins, its changes reaching the disk one by one while
the broker goes on.

The process can die at any operation of its disk. When it is killed while something is being
written, any part of that may have happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ekiden.broker.events import (
    AppendFailed,
    DiskSpace,
    Halt,
    Persisted,
    Shutdown,
    SnapshotTaken,
    TakeSnapshot,
    WallClock,
)
from ekiden.broker.machine import BrokerMachine
from ekiden.broker.recovery import Opened, open_broker, take_snapshot
from ekiden.config import BrokerConfig
from ekiden.core.book import JobBook
from ekiden.errors import CorruptJournal, NoSpace, StorageFault
from ekiden.journal.housekeeping import tidy
from ekiden.journal.journal import Append
from ekiden.journal.local import LocalJournal, perform
from ekiden.limits import NS
from ekiden.simulation.blobs import EFFECTS, MemoryBlobs
from ekiden.simulation.disk import Died, Rehearsal, SimDisk
from ekiden.simulation.network import Network
from ekiden.simulation.processes import ADDRESS, KEY, Process
from ekiden.simulation.world import MS, US, Universe, Violation

CLOCK_NS = 1 * NS


class BrokerWatcher(Protocol):
    """Who wants to know about the broker's lives."""

    def recovering(self) -> None:
        """A new life began; it may not speak yet."""

    def recovered(self, book: JobBook) -> None:
        """It has its book and is about to listen."""


class SimBroker(Process):
    """The broker, its disk, and the children that make its snapshots."""

    def __init__(
        self,
        universe: Universe,
        network: Network,
        disk: SimDisk,
        config: BrokerConfig,
        watcher: BrokerWatcher,
    ) -> None:
        super().__init__(universe, network, "broker")
        self.disk = disk
        self.config = config
        self.slowness_ns = 0
        """How much longer than usual every sync takes."""
        self.on_crash: Callable[[bool], None] = lambda power: self.kill(power=power)
        """Called with `power` when the process must end here."""
        self.on_stopped: Callable[[], None] = lambda: self.kill()
        """Called when it has ended as it was told to."""
        self.doomed = False
        """Whether it dies in the middle of its next write."""
        self._watcher = watcher
        self._writing: Append | None = None
        self._snapshotting = False
        self.handlers[Append] = self._append
        self.handlers[TakeSnapshot] = self._take_snapshot
        self.handlers[Halt] = self._halt
        self.blobs = MemoryBlobs(lambda: universe.wall)
        for kind in EFFECTS:
            self.handlers[kind] = self._perform_blob

    # -------------------------------------------------------------- life and death

    @property
    def broker(self) -> BrokerMachine | None:
        """The machine, typed; None while the process is down or recovers."""
        machine = self.machine
        assert machine is None or isinstance(machine, BrokerMachine)
        return machine

    def start(self) -> None:
        """A new life: recover, then listen."""
        self.new_life()
        self.disk.revive()
        self.doomed = False
        self._writing = None
        self._snapshotting = False
        self.blobs.lose_power()
        self._watcher.recovering()
        delay = self._dice.choice((1, 5, 50, 400)) * MS
        self.later_in_this_life(delay, "recover", self.recover)

    def recover(self) -> None:
        """Read the disk; whatever ordinary faults did to it, it must make sense."""
        with self.mortal():
            opened = self.open()
            for cut in opened.torn:
                self.universe.count("torn tail cut")
                self.universe.tell(f"recovered: {cut}")
            self.announce(opened.machine)
            self.listen(opened.machine)

    def open(self) -> Opened:
        """Everything that happens before a broker listens."""
        if any(name.endswith(".snap") for name in self.disk.names()):
            self.universe.count("recovered from a snapshot")
        return open_broker(
            self.disk, self.config, key=KEY, broker_id=f"b{self.incarnation}",
            group_id=self._dice.randbytes(16), now=self.clock(), wall=self.universe.wall,
        )  # fmt: skip

    def announce(self, machine: BrokerMachine) -> None:
        """The machine has everything that was on disk."""
        self._watcher.recovered(machine.book)

    def listen(self, machine: BrokerMachine) -> None:
        """Be there for others."""
        self.begin(machine)
        self.network.listen(ADDRESS, self)
        self._tick()

    def stop(self) -> None:
        """Tell it to end in good order."""
        if self.alive:
            self.universe.note("broker is told to stop")
            self.post(Shutdown())

    def kill(self, *, power: bool = False) -> None:
        """The end of this life, whether it serves or still recovers."""
        if self.disk.down:
            return
        if self._writing is not None and (self.doomed or self._dice.random() < 0.7):
            self._write_partly(self._writing)
        self.disk.die(power=power)
        self.network.deafen(ADDRESS)
        if self.alive:
            super().kill(power=power)
        else:
            self.incarnation += 1

    def _write_partly(self, append: Append) -> None:
        """The disk's thread was at work: some of its operations came through."""
        self.disk.die_at = self.disk.operations + self._dice.randint(1, 9 if append.creates else 3)
        try:
            perform(self.disk, append)
        except (Died, StorageFault):
            self.universe.count("killed while writing")

    @contextmanager
    def mortal(self) -> Iterator[None]:
        """What happens in here may end the process, as a fault of a real disk would."""
        try:
            yield
        except Died:
            self.universe.count("died at a failpoint")
            self.on_crash(self._dice.random() < 0.6)
        except Violation:
            raise
        except CorruptJournal as error:
            raise Violation("I9", f"refused after ordinary faults: {error}") from error
        except StorageFault as error:
            self.universe.count("ended by a disk error")
            self.universe.tell(f"broker ends: {error}")
            self.on_crash(False)
        except Exception as error:
            raise Violation("bug", f"the broker raised {error!r}") from error

    def later_in_this_life(self, delay_ns: int, what: str, action: Callable[[], None]) -> None:
        """Let something happen if this life lasts that long."""
        life = self.incarnation

        def happen() -> None:
            if self.incarnation == life:
                action()

        self.universe.after(delay_ns, f"{what} {self.name}", happen)

    # -------------------------------------------------------------- the loop

    def turn(self) -> None:
        """A turn during which the disk may end it all."""
        with self.mortal():
            super().turn()

    def _tick(self) -> None:
        if not self.paused:
            self.tell_clocks()
        self.later_in_this_life(CLOCK_NS, "clock", self._tick)

    def tell_clocks(self) -> None:
        """The wall time and the room on the disk, as they are looked at every second."""
        if self.alive:
            self.post(WallClock(self.universe.wall))
            self.post(DiskSpace(self.disk.free_bytes()))

    # -------------------------------------------------------------- appends

    def _append(self, append: Append) -> None:
        if self.doomed:
            self._writing = append
            self.on_crash(self._dice.random() < 0.6)
            return
        if not append.creates and not self.slowness_ns and self._dice.random() < 0.5:
            self._write(append)
            return
        self._writing = append
        self.later_in_this_life(self._disk_ns(), "write", lambda: self._write_off_loop(append))

    def _write_off_loop(self, append: Append) -> None:
        with self.mortal():
            self._write(append)

    def _write(self, append: Append) -> None:
        self._writing = None
        try:
            self.write(append)
        except NoSpace as error:
            self.universe.count("append found no space")
            self.post(AppendFailed(str(error)))

    def write(self, append: Append) -> None:
        """Write, then say so."""
        perform(self.disk, append)
        self.post(Persisted(append.upto))

    def _disk_ns(self) -> int:
        delay = self._dice.randrange(80 * US, 600 * US)
        return delay + (self._dice.randrange(self.slowness_ns) if self.slowness_ns else 0)

    # -------------------------------------------------------------- snapshots

    def _take_snapshot(self, effect: TakeSnapshot) -> None:
        self._snapshot(effect.upto, self.post)

    def _snapshot(self, upto: int, done: Callable[[SnapshotTaken], None]) -> None:
        """Let the child work on a copy, then let its changes reach the disk one at a time."""
        machine = self.broker
        assert machine is not None
        assert isinstance(machine.journal, LocalJournal)
        self._snapshotting = True
        rehearsal = Rehearsal(self.disk)
        try:
            index = take_snapshot(rehearsal, upto, machine.journal.group, tag="child")
            taken_after = len(rehearsal.steps)
            tidy(
                rehearsal, snapshot_index=index, now_wall=self.universe.wall,
                keep_ns=self._dice.choice((0, 3600 * NS)), keep_bytes=1 << 20, tag="child",
            )  # fmt: skip
        except CorruptJournal as error:
            raise Violation("I9", f"a snapshot could not be made: {error}") from None
        self._step(_Child(index, taken_after, rehearsal.steps, done), 0)

    def _step(self, child: _Child, at: int) -> None:
        with self.mortal():
            if at == len(child.steps):
                self._snapshotting = False
                self.universe.count("snapshot taken")
                child.done(SnapshotTaken(child.index))
                return
            kind, arguments = child.steps[at]
            try:
                getattr(self.disk, kind)(*arguments)
            except StorageFault as error:
                self._child_failed(child, at, error)
                return
            self.later_in_this_life(
                self._disk_ns() if kind.startswith("sync") else 20 * US,
                "snapshot",
                lambda: self._step(child, at + 1),
            )

    def _child_failed(self, child: _Child, at: int, error: StorageFault) -> None:
        """As in the real child: what was half written is removed, the broker hears of it."""
        self._snapshotting = False
        self.universe.count("snapshot failed")
        kind, arguments = child.steps[at]
        if kind == "append" and arguments[0] in self.disk.names():
            self.disk.remove(arguments[0])
        if at >= child.taken_after:
            child.done(SnapshotTaken(child.index))
        else:
            child.done(SnapshotTaken(0, str(error)))

    # -------------------------------------------------------------- blobs

    def _perform_blob(self, effect: object) -> None:
        told = self.blobs.perform(effect)
        if told is not None:
            self.later(self._disk_ns(), "blob", told)

    # -------------------------------------------------------------- an end in good order

    def _halt(self, _effect: Halt) -> None:
        self.universe.count("broker stopped in good order")
        self.network.deafen(ADDRESS)
        self.later_in_this_life(5 * MS, "leave", self._leave)

    def _leave(self) -> None:
        machine = self.broker
        assert machine is not None
        assert isinstance(machine.journal, LocalJournal)
        with self.mortal():
            machine.journal.trim()
            if not self._snapshotting:
                machine.journal.roll()
                closed = machine.journal.closed_segments()
                if closed and closed[-1].last > machine.snapshot_index:
                    self._snapshot(closed[-1].last, lambda _taken: self.on_stopped())
                    return
            self.on_stopped()


class _Child:
    """A snapshot on its way to the disk."""

    def __init__(
        self,
        index: int,
        taken_after: int,
        steps: list[tuple[str, tuple[object, ...]]],
        done: Callable[[SnapshotTaken], None],
    ) -> None:
        self.index = index
        self.taken_after = taken_after
        """After this many steps the snapshot counts; the rest is housekeeping."""
        self.steps = steps
        self.done = done
