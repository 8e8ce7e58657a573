"""The arithmetic behind the figures; the figures themselves are never asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ekiden.bench import everything, recovery, report, soak
from ekiden.bench.rounds import Round, ratio
from ekiden.errors import WrongUsage


def a_round(rate: float) -> Round:
    return Round(jobs=1000, seconds=1000 / rate, cpu_s={"broker": 0.1}, machine_busy_cores=1.0)


def test_a_ratio_is_taken_within_rounds_so_a_drifting_machine_does_not_show() -> None:
    ours = [a_round(600), a_round(300), a_round(900)]
    theirs = [a_round(200), a_round(100), a_round(300)]

    found = ratio(ours, theirs)

    assert (found.median, found.low, found.high) == pytest.approx((3.0, 3.0, 3.0))


def test_one_disturbed_round_shows_in_the_spread_and_not_in_the_ratio() -> None:
    ours = [a_round(600), a_round(10), a_round(600)]
    theirs = [a_round(200), a_round(200), a_round(200)]

    found = ratio(ours, theirs)

    assert (found.median, found.low, found.high) == pytest.approx((3.0, 0.05, 3.0))
    assert found.of_medians == pytest.approx(3.0)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)])
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    assert report.percentile(list(range(1, 101)), share) == expected


def test_a_goal_knows_its_direction() -> None:
    assert report.at_least("speed", 6.0, 6.0).ok
    assert not report.at_least("speed", 5.9, 6.0).ok
    assert report.at_most("delay", 0.9, 0.9).ok
    assert not report.at_most("delay", 1.0, 0.9).ok


def test_the_cost_of_the_first_submits_does_not_count_as_that_at_10_k() -> None:
    curve = [{"broker_us_per_submit": cost} for cost in (9.0, 1.0, 1.1, 1.2, 5.0, 1.2)]

    assert recovery.cost_at_start(curve) == 1.0
    assert recovery.cost_at_end(curve) == 1.2


def test_growth_compares_the_last_third_with_the_one_before() -> None:
    def windows(*values: float) -> list[dict[str, Any]]:
        return [{"rss_mb": value} for value in values]

    assert soak.growth(windows(10, 500, 500, 400, 500, 450), "rss_mb") == 1.0
    assert soak.growth(windows(10, 20, 100, 110, 150, 120), "rss_mb") == pytest.approx(
        150 / 110, 1e-3
    )
    assert soak.growth(windows(7), "rss_mb") == 1.0


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


def test_figures_are_written_between_their_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{everything.BEGIN}\nold\n{everything.END}\nafter\n")
    goal = report.at_most("p50", 0.7, 0.9, "ms")
    rows = {"rows": [{"system": "ekiden", "jobs_per_s": 1234567}]}

    everything.write(page, [report.outline("latency", {}, rows, [goal])])

    text = page.read_text()
    assert text.startswith(f"before\n{everything.BEGIN}\n")
    assert text.endswith(f"{everything.END}\nafter\n")
    assert "old" not in text
    assert "| latency | p50 | 0.7 ms | ≤ 0.9 ms | yes |" in text
    assert "| ekiden | 1,234,567 |" in text


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("mine")

    with pytest.raises(WrongUsage):
        everything.write(page, [])

    assert page.read_text() == "mine"
