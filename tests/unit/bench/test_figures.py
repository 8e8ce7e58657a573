"""The arithmetic behind the figures; the figures themselves are never asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiden.bench import report
from ekiden.bench.peers import find_prototype
from ekiden.bench.processes import BenchFailed, Crew
from ekiden.bench.rounds import Round, ratio


def a_round(rate: float) -> Round:
    return Round(jobs=1000, seconds=1000 / rate, cpu_s={"broker": 0.1}, machine_busy_cores=1.0)


def test_a_ratio_is_taken_within_rounds_so_a_drifting_machine_does_not_show() -> None:
    ours = [a_round(600), a_round(300), a_round(900)]
    theirs = [a_round(200), a_round(100), a_round(300)]

    assert ratio(ours, theirs) == pytest.approx(3.0)


def test_one_disturbed_round_does_not_move_the_ratio() -> None:
    ours = [a_round(600), a_round(10), a_round(600)]
    theirs = [a_round(200), a_round(200), a_round(200)]

    assert ratio(ours, theirs) == pytest.approx(3.0)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)])
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    assert report.percentile(list(range(1, 101)), share) == expected


def test_a_goal_knows_its_direction() -> None:
    assert report.at_least("speed", 6.0, 6.0).ok
    assert not report.at_least("speed", 5.9, 6.0).ok
    assert report.at_most("delay", 0.9, 0.9).ok
    assert not report.at_most("delay", 1.0, 0.9).ok


def test_a_report_has_the_same_outline_for_every_bench(tmp_path: Path) -> None:
    facts = report.conditions(tmp_path)

    document = report.outline("noop", facts, {"rows": []}, [report.at_least("a", 1.0, 2.0, "×")])

    assert list(document) == ["bench", "conditions", "rows", "goals"]
    assert document["goals"] == [
        {"figure": "a", "value": 1.0, "bound": 2.0, "sense": "min", "unit": "×", "ok": False}
    ]
    assert facts["fdatasync_ms"] > 0


def test_touching_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    assert report.touch_memory(tmp_path, 3 << 20) == 3 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_crew_ends_its_children_and_removes_its_folder() -> None:
    with Crew() as crew:
        talker = crew.start_python(
            "talker", "-c", "import json\nwhile True: print(json.dumps([input()]), flush=True)",
            talks=True,
        )  # fmt: skip
        assert talker.ask({"jobs": 1}, 20.0) == ['{"jobs": 1}']

    assert not talker.running()
    assert not crew.folder.exists()


def test_a_child_that_dies_is_quoted() -> None:
    with Crew() as crew:
        child = crew.start_python("child", "-c", "raise SystemExit('no disk here')", talks=True)

        with pytest.raises(BenchFailed, match="child ended with 1: no disk here"):
            child.hear(20.0)


def test_the_prototype_carries_every_job() -> None:
    script = find_prototype()
    assert script is not None
    with Crew() as crew:
        leader = crew.start_python("leader", script, "leader", crew.folder / "log", talks=True)
        port = str(leader.hear(20.0)["port"])
        crew.start_python("worker", script, "worker", port)
        client = crew.start_python("client", script, "client", port, talks=True)
        client.hear(20.0)

        assert client.ask({"jobs": 3000}, 30.0)["seconds"] > 0
