"""Many short lives of one journal on a disk that dies, tears and punches holes."""

from __future__ import annotations

from random import Random

import pytest
from tests.unit.journal.disks import GROUP

from ekiden.journal.housekeeping import tidy
from ekiden.journal.inspection import verify
from ekiden.journal.local import LocalJournal, perform
from ekiden.journal.snapshots import write_snapshot
from ekiden.simulation.disk import Died, SimDisk


class Lives:
    """A journal, what was proposed to it, and how much of that it acknowledged."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.disk = SimDisk(self.dice)
        self.proposed: list[bytes] = []
        self.acknowledged = 0
        self.wall = 0

    def live(self) -> None:
        """Recover, write and tidy until the disk dies, or for a while."""
        self.disk.revive()
        self.disk.die_at = self.disk.operations + self.dice.randint(1, 60)
        try:
            journal = self._recover()
            for _ in range(self.dice.randint(1, 25)):
                self._write(journal)
                if self.dice.random() < 0.15:
                    self._snapshot(journal)
        except Died:
            pass
        self.disk.die(power=self.dice.random() < 0.7)

    def _recover(self) -> LocalJournal:
        segment_bytes = self.dice.choice([200, 3000, 20_000])
        journal, recovery = LocalJournal.open(
            self.disk, now=0, segment_bytes=segment_bytes, group=GROUP
        )
        covered = recovery.snapshot.index if recovery.snapshot else 0
        entries = list(recovery.entries())
        reached = covered + len(entries)
        assert reached >= self.acknowledged
        assert entries == list(enumerate(self.proposed, start=1))[covered:reached]
        del self.proposed[reached:]
        self.acknowledged = reached
        return journal

    def _write(self, journal: LocalJournal) -> None:
        for _ in range(self.dice.randint(1, 8)):
            payload = self.dice.randbytes(self.dice.choice([0, 10, 300, 1500, 5000]))
            self.proposed.append(payload)
            assert journal.propose(payload) == len(self.proposed)
        append = journal.advance(0).append
        assert append is not None
        perform(self.disk, append)
        journal.persisted(append.upto)
        self.acknowledged = append.upto

    def _snapshot(self, journal: LocalJournal) -> None:
        journal.roll()
        index = journal.closed_segments()[-1].last
        write_snapshot(self.disk, index, GROUP, [b"x" * self.dice.randint(0, 3000)])
        self.wall += 1
        tidy(
            self.disk,
            snapshot_index=index,
            now_wall=self.wall,
            keep_ns=self.dice.choice([0, 3]),
            keep_bytes=self.dice.choice([1000, 10**9]),
        )


@pytest.mark.parametrize("block", range(4))
def test_nothing_acknowledged_is_lost_and_nothing_sound_is_refused(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        lives = Lives(seed)
        for _ in range(6):
            lives.live()
        lives.disk.revive()
        assert verify(lives.disk).ok, seed
