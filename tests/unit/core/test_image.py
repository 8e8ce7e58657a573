"""Snapshots: a loaded book is the book it was made from, and behaves like it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.unit.core.group import WALL, Group, ids_of, spec

from ekiden import limits
from ekiden.core import commands as c
from ekiden.core import image
from ekiden.limits import NS
from ekiden.model import jobs as j


def full_of_everything() -> Group:
    """Something in every place a book has."""
    group = Group(client_inflight_max=4, results_max=3, ids_max=50)
    for n, of in enumerate((spec(), spec("a.y", priority=3), spec(key="k"), spec(pin="w1"))):
        group.submit(*(f"q{n}.{m}" for m in range(3)), client=f"c{n}", of=of)
    group.submit("delayed", delay_ns=NS)
    group.submit("watched", not_before=WALL + NS, expires_at=WALL + 2 * NS)
    group.submit("expiring", expires_at=WALL + NS, client="c9")
    group.submit(*(f"l{n}" for n in range(12)), client="cap", of=spec("b"))
    grant = group.assign(of=spec("b"))
    group.fail(grant, 1)
    group.cancel(ids_of(grant)[2], reason="asked")
    group.submit(*(f"d{n}" for n in range(8)), client="d", of=spec("c"))
    done = group.assign("w2", of=spec("c"))
    group.now += 1
    group.apply(c.Finish("w2", done.number, [0, 1], [b"o", b"L" * 2000], {0: j.Note(3)}))
    group.now += 1
    group.fail(done, 2, cause=j.EXIT_CODE)
    group.fail(done, 3, cause=j.TIMEOUT)
    group.now += 1
    group.replay(ids_of(done)[2] if done.rows else "d2")
    group.cancel("q0.1")
    group.later(0)
    return group


def test_a_loaded_book_has_the_same_fingerprint_and_the_same_bytes() -> None:
    group = full_of_everything()
    chunks = list(image.dump(group.book))

    loaded = image.load(chunks)

    assert list(image.dump(loaded)) == chunks
    assert image.fingerprint(loaded) == image.fingerprint(group.book)


@pytest.mark.parametrize(
    "then",
    [
        lambda g: [ids_of(g.assign("w3", 1)) for _ in range(2)],
        lambda g: g.later(10).woken.keys().__len__(),
        lambda g: [s.state for s in g.clock(WALL + 3 * NS).settlements],
        lambda g: [s.state for s in g.forfeit("w1").settlements],
        lambda g: g.submit("d0", "d1", "d7", of=spec("c")).submits[0].fresh,
        lambda g: g.replay("d2", "d3").tallies[0].changed,
        lambda g: [len(x.rows) for x in g.apply(c.Configure(c.Settings())).settlements],
    ],
)
def test_a_loaded_book_goes_the_same_way_from_there_on(then: Callable[[Group], object]) -> None:
    group = full_of_everything()
    loaded = group.reload()

    assert then(group) == then(loaded)
    assert image.fingerprint(group.book) == image.fingerprint(loaded.book)
    assert group.book.digest == loaded.book.digest


def test_an_old_grant_is_still_fenced_off_after_a_load() -> None:
    group = Group()
    group.submit("j1", "j2")
    old = group.assign()
    group.fail(old, 0)
    group.later(2)
    group = group.reload()
    new = group.again("w1", "j1")

    assert group.finish(old, 0).stale == 1
    assert group.state("j1") == j.LEASED
    assert group.finish(new, 0).stale == 0
    assert group.finish(old, 1).stale == 0
    assert group.states("j1", "j2") == [j.DONE, j.DONE]


def test_a_long_lane_is_split_into_chunks_and_put_together_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image, "ROWS_PER_CHUNK", 10)
    group = Group()
    names = [f"j{n}" for n in range(35)]
    group.submit(*names)

    assert ids_of(group.reload().assign()) == names


def test_large_inputs_make_more_chunks_rather_than_larger_ones() -> None:
    group = Group()
    body = b"x" * limits.PAYLOAD_BYTES_MAX
    for n in range(100):
        group.submit(f"j{n}", body=body)

    chunks = list(image.dump(group.book))

    assert max(map(len, chunks)) <= 32 << 20
    assert len(image.load(chunks).clients["ann"].lanes) == 1


def test_jobs_cancelled_together_are_forgotten_together_before_and_after_a_load() -> None:
    # A settlement of ten thousand was two after a load, and the two books forgot at different times.
    group = Group(results_max=1500, ids_max=20_000)
    names = [f"j{n}" for n in range(10_000)]
    for start in range(0, 10_000, 4000):
        group.submit(*names[start : start + 4000])
    group.cancel(*names)
    group.now += 1
    loaded = group.reload()

    for _ in range(20):
        group.later(0)
        loaded.later(0)
        assert image.fingerprint(group.book) == image.fingerprint(loaded.book)


def test_an_empty_book_has_an_image_too() -> None:
    assert image.load(image.dump(Group().book)).applied == 0


@pytest.mark.parametrize("missing", [-1, 1, 2])
def test_an_image_with_a_part_missing_is_not_believed(missing: int) -> None:
    chunks = list(image.dump(full_of_everything().book))
    del chunks[missing]

    with pytest.raises((AssertionError, IndexError)):
        image.load(chunks)


@pytest.mark.parametrize("chunk", [b"", b"\xc1", msgspec.msgpack.encode(["none of ours", 1])])
def test_bytes_that_are_no_image_are_refused(chunk: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        image.load([chunk])


@pytest.mark.parametrize("delay_ns", [limits.DELAY_NS_MAX])
def test_the_longest_delay_fits_an_image(delay_ns: int) -> None:
    group = Group()
    group.later(100 * 365 * 24 * 3600)

    group.submit("j1", delay_ns=delay_ns)

    assert group.reload().state("j1") == j.DELAYED
