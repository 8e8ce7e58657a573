"""Batches of outcomes: cut to size without losing or doubling any."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.worker.conversation import an_assign

from ekiden.model.jobs import Note, Route, Spec
from ekiden.wire.messages import Ack, AckRun, Failure, encode_body
from ekiden.worker.ledger import Ledger, offsets_of, packed, restricted

SPEC = Spec("echo", Route("job.assign.echo"))


@st.composite
def ack_runs(draw: st.DrawFn) -> AckRun:
    count = draw(st.integers(0, 12))
    split = draw(st.lists(st.sampled_from("ofr"), min_size=count, max_size=count))
    outputs = [at for at, kind in enumerate(split) if kind == "o"]
    whole = len(outputs) == count and draw(st.booleans())
    size = draw(st.integers(0, 400))
    return AckRun(
        draw(st.integers(1, 5)),
        None if whole else outputs,
        [b"x" * size for _ in outputs],
        {at: Note(ran_ns=1 << 60) for at in outputs if draw(st.booleans())},
        [Failure(at, "handler_error", "é" * size) for at, kind in enumerate(split) if kind == "f"],
        [at for at, kind in enumerate(split) if kind == "r"],
        {at: [("0" * 64, size)] * draw(st.integers(1, 3)) for at in outputs if draw(st.booleans())},
    )


def said(runs: list[AckRun]) -> list[tuple[object, ...]]:
    """What the runs say, attempt by attempt."""
    found: list[tuple[object, ...]] = []
    for run in runs:
        plain = range(len(run.outputs)) if run.offsets is None else run.offsets
        for at, output in zip(plain, run.outputs, strict=True):
            about = (run.notes.get(at), tuple(run.blobs.get(at, ())))
            found.append((run.grant, at, "output", output, about))
        found += [(run.grant, f.offset, "failure", f.message, None) for f in run.failures]
        found += [(run.grant, at, "released", "", None) for at in run.released]
    return sorted(found, key=repr)


@given(st.lists(ack_runs(), max_size=5), st.integers(2500, 6000))
def test_packed_acks_fit_their_frame_and_say_the_same(runs: list[AckRun], limit: int) -> None:
    groups = list(packed(runs, limit))

    assert said([run for group in groups for run in group]) == said(runs)
    assert all(len(encode_body(Ack(group))) <= limit for group in groups)


@given(ack_runs(), st.integers(0, 12), st.integers(0, 12))
def test_a_restricted_run_says_what_it_said_about_those_offsets(
    run: AckRun, low: int, high: int
) -> None:
    part = restricted(run, range(low, high))

    wanted = [item for item in said([run]) if item[1] in range(low, high)]
    assert said([part] if part else []) == wanted
    assert (offsets_of(part) if part else set()) == offsets_of(run) & set(range(low, high))


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), max_size=8))
def test_every_attempt_is_taken_once_however_assigns_overlap(
    spans: list[tuple[int, int]],
) -> None:
    ledger = Ledger()
    taken: list[int] = []
    for first, count in spans:
        parts, again = ledger.take(an_assign(1, count, first=first), SPEC)
        assert again == []
        for part in parts:
            taken += range(part.first, part.first + len(part.ids))
            assert part.bodies == [f"g1o{part.first + at}".encode() for at in range(len(part.ids))]

    assert len(taken) == len(set(taken)) == ledger.open_count
    assert set(taken) == {at for first, count in spans for at in range(first, first + count)}
