"""Which executor performs which job."""

from __future__ import annotations

from typing import Any

import pytest

from ekiden.model import jobs as j
from ekiden.wire.messages import AssignRun, Failure
from ekiden.worker.contract import Abort, Dropped, Gone, Look, Run, RunFinished, Seen
from ekiden.worker.dispatch import Dispatch


class Executor:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.closed = False

    def run(self, effect: Run) -> None:
        self.asked.append(effect)

    def abort(self, effect: Abort) -> None:
        self.asked.append(effect)

    def tail(self, grant: int, offset: int, stream: str, position: int, limit: int) -> bytes | None:
        return None if grant == 9 else f"{stream} {grant}.{offset} {position} {limit}".encode()

    def close(self) -> None:
        self.closed = True


class House:
    """A dispatch with an executor of every kind but those named."""

    def __init__(self, *without: str) -> None:
        self.emitted: list[Any] = []
        kinds = ("programs", "functions", "services")
        self.executors = {kind: Executor() for kind in kinds if kind not in without}
        self.handlers = Executor()
        self.dispatch = Dispatch(
            self.emitted.append,
            self.handlers,
            service_names=frozenset({"curves"}),
            **self.executors,  # type: ignore[arg-type]
        )


def spec(form: int = j.FORM_PLAIN, name: str = "n") -> j.Spec:
    return j.Spec(name, j.Route(f"job.assign.{name}"), form=form)


def run(of: j.Spec) -> Run:
    return Run(AssignRun(1, 3, b"", "ann", ["a", "b"], [b"", b""]), of)  # type: ignore[arg-type]


KINDS = [
    ("programs", spec(j.FORM_PROGRAM)),
    ("functions", spec(j.FORM_FUNCTION)),
    ("services", spec(name="curves")),
]


@pytest.mark.parametrize(("kind", "of"), KINDS)
def test_a_job_goes_to_its_kind_and_so_does_its_end(kind: str, of: j.Spec) -> None:
    house = House()
    work, end = run(of), Abort(1, [3], "cancel", of)

    house.dispatch.run(work)
    house.dispatch.abort(end)

    assert house.executors[kind].asked == [work, end]
    assert house.emitted == []


def test_all_else_is_for_handlers() -> None:
    house = House()
    house.dispatch.run(run(spec()))

    assert len(house.handlers.asked) == 1


@pytest.mark.parametrize(("kind", "option"), [("programs", "--exec"), ("functions", "--functions")])
def test_what_is_not_offered_fails_with_how_to_offer_it(kind: str, option: str) -> None:
    house = House(kind)
    house.dispatch.run(run(dict(KINDS)[kind]))

    (told,) = house.emitted
    assert isinstance(told, RunFinished)
    assert [(f.offset, f.cause) for f in told.failures] == [
        (3, j.CANNOT_START), (4, j.CANNOT_START),
    ]  # fmt: skip
    assert isinstance(told.failures[0], Failure)
    assert option in told.failures[0].message


@pytest.mark.parametrize(
    ("why", "told"),
    [("recall", [Dropped(1, [3])]), ("cancel", [Gone(1, [3])]), ("stale", [])],
)
def test_what_nobody_runs_is_gone_as_soon_as_it_is_asked_for(why: str, told: list[Any]) -> None:
    house = House("programs")
    house.dispatch.abort(Abort(1, [3], why, spec(j.FORM_PROGRAM)))

    assert house.emitted == told


def test_what_a_program_has_written_can_be_seen() -> None:
    house = House()
    of = spec(j.FORM_PROGRAM)
    house.dispatch.look(Look(7, 1, 3, 10, 20, 99, of))
    house.dispatch.look(Look(8, 9, 3, 0, 0, 99, of))
    house.dispatch.look(Look(9, 1, 3, 0, 0, 99, spec()))

    assert house.emitted == [
        Seen(7, (b"stdout 1.3 10 99", b"stderr 1.3 20 99")), Seen(8, None), Seen(9, None),
    ]  # fmt: skip


def test_closing_closes_all() -> None:
    house = House("services")
    house.dispatch.close()

    assert house.handlers.closed
    assert all(executor.closed for executor in house.executors.values())
