"""A disk that is full, slow or gone: nothing accepted is lost, and nothing is promised early."""

from __future__ import annotations

import pytest
from tests.unit.broker.house import WALL, House, logs

from ekiden import limits
from ekiden.broker.events import DiskSpace, Shutdown, SnapshotTaken, TakeSnapshot
from ekiden.core import commands as c
from ekiden.errors import NoSpace
from ekiden.journal.records import scan
from ekiden.journal.storage import MemoryStorage
from ekiden.limits import NS
from ekiden.machine import Disconnected
from ekiden.model import jobs as j
from ekiden.wire import messages as m


class Disk(MemoryStorage):
    """Full when a test says so."""

    full = False

    def append(self, name: str, data: bytes) -> None:
        if self.full:
            raise NoSpace(f"no room for {name!r}")
        super().append(name, data)


def refused(far) -> list[str]:
    return [r.code for answer in far.all(m.Accepted) for r in answer.refused]


# ------------------------------------------------------------------ little space left


def test_below_the_headroom_submits_are_refused_running_work_settles_and_all_resumes() -> None:
    house = House(disk_headroom=1000)
    ann, w1 = house.client(), house.worker()
    ann.submit("j1")
    house.settle()
    ann.heard.clear()

    house.machine.receive(DiskSpace(999), house.now)
    ann.submit("j2")
    w1.done((1, 0))
    house.settle()
    answers = [message for _, message in ann.heard]
    (refusal,) = [r for a in answers if isinstance(a, m.Accepted) for r in a.refused]
    assert refusal.code == "disk_full"
    assert refusal.retry_after_ms > 0
    assert ann.results() == {"j1": b"out"}
    assert ann.ask("stats")["journal"]["disk_free"] <= 999

    house.machine.receive(DiskSpace(1000), house.now)
    ann.submit("j2")
    house.settle()
    assert house.state("j2") == "leased"


# ------------------------------------------------------------------ no space at all


def test_on_a_full_disk_submits_are_refused_and_settles_are_kept_and_tried_again() -> None:
    disk = Disk()
    house = House(disk)
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", "j2")
    house.settle()
    ann.heard.clear()
    w1.heard.clear()

    disk.full = True
    ann.submit("j3")
    number = w1.done((1, 0))
    effects = house.settle()
    assert "journal.no_space" in logs(effects)
    assert refused(ann) == ["disk_full"]
    assert w1.heard == []
    assert house.state("j1") == "leased"

    house.later(3)
    assert house.state("j1") == "leased"
    assert w1.all(m.Acked) == []
    disk.full = False
    house.later(1.25)
    assert ann.results() == {"j1": b"out"}
    assert w1.all(m.Acked) == [m.Acked(number)]

    ann.submit("j4")
    house.settle()
    assert refused(ann) == ["disk_full"]  # until the world says there is space
    house.machine.receive(DiskSpace(1 << 40), house.now)
    ann.submit("j4")
    house.settle()
    assert house.state("j4") == "leased"


def test_a_withdrawn_plan_is_made_again_when_there_is_space() -> None:
    disk = Disk()
    house = House(disk)
    ann = house.client()
    ann.submit("j1", "j2")
    house.settle()
    disk.full = True
    w1 = house.worker(slots=2)
    assert w1.assigned() == {}

    disk.full = False
    house.later(1.25)

    assert set(w1.assigned()) == {"j1", "j2"}


def test_a_submit_refused_for_want_of_space_was_not_kept() -> None:
    disk = Disk()
    house = House(disk)
    ann = house.client()
    house.settle()
    disk.full = True
    ann.submit("j1")
    house.settle()
    assert refused(ann) == ["disk_full"]
    disk.full = False

    assert house.restart().state("j1") == "unknown"


def test_the_wall_clock_does_not_pile_up_while_the_disk_is_full() -> None:
    disk = Disk()
    house = House(disk)
    ann = house.client()
    ann.submit("j1", expires_at=WALL + NS)
    house.settle()
    disk.full = True

    house.later(20)
    assert len(house.machine._queue) <= 1
    disk.full = False
    house.later(2)

    clocks = [x for e in house.entries() for x in e.commands if isinstance(x, c.Clock)]
    assert len(clocks) == 1
    assert ann.results() == {"j1": "cancelled"}


def test_a_shutdown_does_not_wait_for_space_that_may_never_come() -> None:
    disk = Disk()
    house = House(disk)
    ann, w1 = house.client(), house.worker()
    ann.submit("j1")
    house.settle()
    disk.full = True
    w1.done((1, 0))
    house.settle()

    house.machine.receive(Shutdown(), house.now)
    effects = house.settle() + house.later(2)

    assert any(type(effect).__name__ == "Halt" for effect in effects)
    assert w1.all(m.Acked) == []


def test_a_client_that_left_before_its_submit_failed_is_not_told() -> None:
    disk = Disk()
    house = House(disk)
    ann = house.client()
    house.settle()
    disk.full = True
    ann.submit("j1")
    house.turn()
    house.machine.receive(Disconnected(ann.conn), house.now)
    house.persist()

    assert logs(house.settle()) == ["journal.no_space"]


@pytest.mark.parametrize(("sync", "room"), [("always", True), ("unsafe-never", False)])
def test_a_broker_makes_room_only_for_appends_that_are_synced(sync: str, room: bool) -> None:
    house = House(sync=sync)
    house.client().submit("j1")
    house.settle()

    (name,) = house.storage.names()
    found = scan(house.storage.read(name))

    assert len(list(found)) > 0
    assert bool(found.blank) == room


# ------------------------------------------------------------------ entries and ticks


def test_an_idle_broker_writes_nothing_however_long_it_runs() -> None:
    house = House(snapshot_interval_s=60)
    ann, w1 = house.client(), house.worker()
    ann.submit("j1")
    house.settle()
    w1.done((1, 0))
    house.settle()
    index = house.machine.journal.committed

    for _ in range(10):
        for effect in house.later(61):
            if isinstance(effect, TakeSnapshot):
                house.machine.receive(SnapshotTaken(effect.upto), house.now)

    assert house.machine.journal.committed == index


def test_livelock_a_due_delay_is_written_once_and_not_for_ever() -> None:
    house = House()
    ann = house.client()
    ann.submit("j1", delay_ns=NS)
    ann.submit("j2", delay_ns=3 * NS)
    house.settle()
    before = house.machine.journal.committed

    house.later(10)

    assert house.machine.journal.committed == before + 2


def test_livelock_nothing_is_planned_before_what_is_committed_is_applied() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", delay_ns=NS)
    house.settle()
    before = house.machine.journal.committed
    house.slow = True
    house.later(2)  # the tick is out, and its time has come again and again
    house.persist()
    house.slow = False
    house.settle()

    assert list(w1.assigned()) == ["j1"]
    assert house.machine.journal.committed == before + 2  # the tick, and the assign


def test_a_capped_client_makes_nobody_write_empty_assigns() -> None:
    house = House(client_cap=1)
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", "j2", "j3")
    house.settle()
    before = house.machine.journal.committed

    house.later(5)

    assert house.machine.journal.committed == before
    assert len(w1.assigned()) == 1


def test_a_flood_is_cut_into_entries_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENTRY_BYTES_MAX", 10_000)
    house = House()
    ann = house.client()
    for n in range(20):
        ann.submit(f"j{n}", body=b"x" * 3000)
    house.settle()

    assert [house.state(f"j{n}") for n in range(20)] == ["queued"] * 20
    sizes = [len(house.machine.journal.read(n)) for n in range(1, house.machine.journal.committed)]
    assert max(sizes) < 14_000


# ------------------------------------------------------------------ snapshots


def snapshots(effects: list) -> list[TakeSnapshot]:
    return [effect for effect in effects if isinstance(effect, TakeSnapshot)]


def test_a_snapshot_is_asked_for_when_due_one_at_a_time_and_again_after_a_failure() -> None:
    house = House(snapshot_interval_s=10)
    ann = house.client()
    ann.submit("j1")
    house.settle()
    assert snapshots(house.later(9.5)) == []

    (asked,) = snapshots(house.later(2))
    assert asked.upto == house.machine.book.applied
    ann.submit("j2")
    assert snapshots(house.later(30)) == []

    house.machine.receive(SnapshotTaken(0, "no memory"), house.now)
    assert logs(house.settle()) == ["snapshot.failed"]
    (asked,) = snapshots(house.later(11))
    house.machine.receive(SnapshotTaken(asked.upto), house.now)
    house.settle()

    assert ann.ask("stats")["journal"]["snapshot_index"] == asked.upto
    assert snapshots(house.later(30)) == []


def test_a_large_result_is_read_back_from_the_journal_and_gone_when_that_is() -> None:
    house = House()
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", "j2")
    house.settle()
    w1.say(m.Ack([m.AckRun(1, None, [b"A" * 5000, b"B" * 5000])]))
    house.settle()
    assert ann.results() == {"j1": b"A" * 5000, "j2": b"B" * 5000}

    ann.submit("j1", "j2")
    house.settle()
    assert ann.results() == {"j1": b"A" * 5000, "j2": b"B" * 5000}

    again = house.restart()
    for name in list(again.storage.names()):
        if ".log" in name:
            again.storage.remove(name)
    again.machine.journal._refresh()
    ann = again.client()
    ann.say(m.Attach(["j2"]))
    again.settle()
    (ended,) = ann.take(m.Results).ended
    assert (ended.state, ended.reason) == (j.DONE, "result_gone")


def test_a_result_past_its_retention_is_done_but_gone() -> None:
    house = House(results_max=1)
    ann, w1 = house.client(), house.worker()
    for name in ("j1", "j2", "j3"):
        ann.submit(name)
        house.settle()
        house.now += 1
        w1.done(w1.assigned()[name], output=name.encode())
        house.settle()
        house.now += 1
    assert ann.results() == {"j1": b"j1", "j2": b"j2", "j3": b"j3"}

    ann.submit("j1")
    house.settle()

    (ended,) = ann.take(m.Results).ended
    assert (ended.id, ended.state, ended.reason) == ("j1", j.DONE, "result_gone")


def test_results_over_the_bound_of_one_entry_are_all_told() -> None:
    house = House(results_max=1, ids_max=1)
    ann, w1 = house.client(), house.worker()
    ann.submit("j1", "j2", "j3")
    house.settle()
    held = w1.assigned()

    w1.done(*held.values())
    house.settle()

    assert ann.results() == {"j1": b"out", "j2": b"out", "j3": b"out"}
