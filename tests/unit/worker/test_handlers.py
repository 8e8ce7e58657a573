"""Which function gets a job."""

from __future__ import annotations

import pytest

from ekiden.errors import BadSubject, WrongUsage
from ekiden.model.jobs import Route, Spec
from ekiden.worker.builtin import builtin_handlers
from ekiden.worker.handlers import Handlers


def chosen(patterns: list[str], subject: str, name: str = "none") -> str | None:
    handlers = Handlers()
    for pattern in patterns:
        handlers.add(pattern, lambda _: None)
    found = handlers.find(Spec(name, Route(subject)))
    return found.pattern if found else None


def test_the_most_exact_pattern_wins_whatever_the_order() -> None:
    patterns = ["job.>", "job.*.echo", "job.assign.>", "job.assign.echo", ">"]

    assert chosen(patterns, "job.assign.echo") == "job.assign.echo"
    assert chosen(patterns, "job.other.echo") == "job.*.echo"
    assert chosen(patterns, "job.assign.a.b") == "job.assign.>"
    assert chosen(patterns, "x") == ">"


def test_a_job_on_another_subject_is_found_by_its_name() -> None:
    assert chosen(["job.assign.echo"], "render.4k", name="echo") == "job.assign.echo"
    assert chosen(["job.assign.echo"], "render.4k", name="other") is None


def test_a_pattern_has_one_handler() -> None:
    handlers = Handlers()
    handlers.add("a", lambda _: None)

    with pytest.raises(WrongUsage):
        handlers.add("a", lambda _: None)


@pytest.mark.parametrize("pattern", ["", "a..b", "a.>.b", "a b"])
def test_a_bad_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(BadSubject):
        Handlers().add(pattern, lambda _: None)


def test_an_object_with_an_async_call_is_an_async_handler() -> None:
    class Scorer:
        async def __call__(self, _: object) -> None: ...

    handlers = Handlers()
    handlers.add("a", Scorer())

    found = handlers.find(Spec("x", Route("a")))
    assert found is not None
    assert found.is_async


def test_the_built_in_handlers_are_named_by_their_subject() -> None:
    assert builtin_handlers().patterns == [
        "job.assign.echo",
        "job.assign.sleep",
        "job.assign.fail",
        "job.assign.sha256",
    ]
