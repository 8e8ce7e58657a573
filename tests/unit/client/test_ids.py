"""Ids for jobs that were given none."""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from ekiden.client import ids as ids_module
from ekiden.client.ids import IdMaker


def test_every_id_is_a_uuid7_of_this_moment_and_they_are_in_order() -> None:
    began = time.time()
    maker = IdMaker()

    made = [maker.one() for _ in range(3)] + maker.many(9000) + [maker.one()]

    assert len(set(made)) == len(made) == 9004
    for job_id in (made[0], made[4095], made[4096], made[-1]):
        parsed = uuid.UUID(job_id)
        assert (parsed.version, parsed.variant, parsed.hex) == (7, uuid.RFC_4122, job_id)
        assert abs((parsed.int >> 80) / 1000 - began) < 60


def test_ids_of_a_block_differ_only_at_their_end_and_blocks_do_not() -> None:
    made = IdMaker().many(8192)

    assert [len({job_id[:-3] for job_id in part}) for part in (made[:4096], made[4096:])] == [1, 1]
    assert made[0][:-3] != made[4096][:-3]


def test_none_at_all_is_none() -> None:
    assert IdMaker().many(0) == []


@pytest.mark.parametrize("many", [False, True])
def test_a_block_ends_with_its_second(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    now = 100.0
    monkeypatch.setattr(ids_module, "monotonic", lambda: now)
    maker = IdMaker()
    first = maker.one()

    now += ids_module.BLOCK_S / 2
    assert maker.one()[:-3] == first[:-3]
    now += ids_module.BLOCK_S / 2
    later = maker.many(1)[0] if many else maker.one()

    assert later[:-3] != first[:-3]


def test_threads_that_share_a_maker_never_get_the_same_id() -> None:
    maker, made = IdMaker(), list[list[str]]()

    def take() -> None:
        mine = [maker.one() for _ in range(20_000)] + maker.many(5_000)
        made.append(mine)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    everything = [job_id for mine in made for job_id in mine]
    assert len(set(everything)) == len(everything) == 100_000
