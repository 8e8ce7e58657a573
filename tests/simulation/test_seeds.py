"""Small worlds full of faults: every promise holds, the faults are real, a seed is a replay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ekiden.simulation.__main__ import main
from ekiden.simulation.mutants import MUTANTS, hunt, planted
from ekiden.simulation.trial import simulate

SEEDS = range(1, 151)
TRIES = 300

ONCE_FAILING = [
    tuple(line.split(None, 1))
    for line in (Path(__file__).parent / "once_failing.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

# What a run of this many seeds must have met, or the clean result says nothing.
MET = (
    "append found no space",
    "broker killed",
    "broker lost power",
    "broker pauses",
    "broker stopped in good order",
    "bytes flipped",
    "conflicting content",
    "connection severed",
    "died at a failpoint",
    "ended by a disk error",
    "frame repeated",
    "half-open",
    "job forgotten",
    "job submitted again",
    "killed while writing",
    "late result of a failed run",
    "lease expired",
    "newest snapshot damaged",
    "outcome of a ghost",
    "partition",
    "recovered from a snapshot",
    "refused for want of room",
    "slow disk",
    "slow reader",
    "snapshot failed",
    "snapshot taken",
    "torn tail cut",
    "wall clock jumps",
    "worker drained",
    "worker killed by its job",
    "worker pauses",
)


def test_every_promise_holds_in_many_worlds_and_the_faults_are_real() -> None:
    counts: dict[str, int] = {}
    broken = []
    for seed in SEEDS:
        outcome = simulate(seed)
        if outcome.violation:
            broken.append((seed, outcome.violation))
        for what, count in outcome.counts.items():
            counts[what] = counts.get(what, 0) + count

    assert broken == []
    assert [what for what in MET if not counts.get(what)] == []


@pytest.mark.parametrize(("seed", "because"), ONCE_FAILING)
def test_a_seed_that_once_failed_stays_clean(seed: str, because: str) -> None:
    assert simulate(int(seed)).violation == "", because


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_caught(name: str) -> None:
    seed, violation = hunt(name, TRIES)

    assert seed is not None
    assert violation


def test_a_mutant_is_gone_after_its_hunt() -> None:
    with planted("answer-before-fsync"):
        assert simulate(1).violation

    assert not simulate(1).violation


def test_a_seed_leaves_the_same_trace_whatever_the_hash_seed() -> None:
    answers = set()
    for hash_seed in ("0", "4711"):
        ran = subprocess.run(
            [sys.executable, "-m", "ekiden.simulation", "--seeds", "7..12", "--traces"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        answers.add(tuple(line for line in ran.stdout.splitlines() if " trace " in line))

    (traces,) = answers
    assert len(traces) == 6


def test_one_seed_ends_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--seed", "5"])

    assert code == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"seed 5 ok trace {simulate(5).trace}"


def test_many_seeds_end_with_their_count(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--seeds", "5..7", "--jobs", "1"])

    assert code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 seeds ok"


@pytest.mark.parametrize("arguments", [["--seed", "1"], ["--seeds", "1..3", "--jobs", "1"]])
def test_a_violation_is_reported_with_one_command_to_replay_it(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with planted("answer-before-fsync"):
        code = main(arguments)

    said = capsys.readouterr().out.splitlines()
    assert code == 1
    assert re.match(r"seed 1 VIOLATION I[15]: ", said[-2])
    assert said[-1] == "replay with: python -m ekiden.simulation --seed 1 --story"


def test_mutants_are_named_with_the_seed_that_caught_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--mutants", "--only", "served-while-recovering"]) == 0
    assert "served-while-recovering caught at seed 1" in capsys.readouterr().out

    assert main(["--mutants", "--only", "wall-clock-for-leases", "--tries", "1"]) == 1
    assert "wall-clock-for-leases ESCAPED" in capsys.readouterr().out

    assert main(["--mutants", "--only", "no-such"]) == 2


@pytest.mark.parametrize("span", ["7", "9..3", "a..b", "..4"])
def test_a_span_that_is_none_is_refused(span: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--seeds", span])

    assert ended.value.code == 2
