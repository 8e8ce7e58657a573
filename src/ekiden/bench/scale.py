"""What a match and an assign cost as workers and patterns grow.

In one process, without sockets: the trie and the planner by themselves, from ten workers to a
thousand and from ten patterns to ten thousand. Both are to stay flat: the cost follows from the
question and the answer, not from how much else there is.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ekiden.bench import report
from ekiden.core.subjects import SubjectTrie

PATTERNS = (10, 100, 1_000, 10_000)
REPEATS = 7
QUESTIONS = 2_000

# Larger tables miss the processor's caches more often; a scan would be a thousand times dearer.
FLAT_MAX = 2.0


def match_curve() -> list[dict[str, Any]]:
    """Cost of finding the workers of a subject, by the number of patterns there are."""
    curve = []
    for count in PATTERNS:
        trie: SubjectTrie[str] = SubjectTrie()
        for number in range(count):
            trie.add(_pattern(number), f"w{number}")
        subjects = [f"team{number * 7919 % count}.render.4k" for number in range(QUESTIONS)]
        cost = median_us(lambda trie=trie, subjects=subjects: [trie.match(s) for s in subjects])
        answers = statistics.mean(len(trie.match(subject)) for subject in subjects)
        curve.append({"patterns": count, "match_us": round(cost, 3), "answers": round(answers, 2)})
    return curve


def _pattern(number: int) -> str:
    """Four shapes in turn: exact, one token open, the rest open, the middle open."""
    team = f"team{number}"
    return (f"{team}.render.4k", f"{team}.render.*", f"{team}.>", f"{team}.*.4k")[number % 4]


def median_us(work: Callable[[], Any], per: int = QUESTIONS) -> float:
    """Median microseconds of one of the `per` questions that `work` asks."""
    work()
    taken = []
    gc.collect()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) / per * 1e6


def run() -> dict[str, Any]:
    """Both curves."""
    with tempfile.TemporaryDirectory(prefix="ekiden-bench-") as folder:
        facts = report.conditions(Path(folder))
    matches = match_curve()
    goals = [
        report.at_most(
            "match, 10,000 patterns by 10",
            round(matches[-1]["match_us"] / matches[0]["match_us"], 2),
            FLAT_MAX,
            "×",
        ),
    ]
    return report.outline("scale", facts, {"match": matches}, goals)
