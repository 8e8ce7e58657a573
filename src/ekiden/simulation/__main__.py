"""`python -m ekiden.simulation`: run seeds, replay one, or show that mutants are caught."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

from ekiden.simulation.mutants import MUTANTS, hunt
from ekiden.simulation.trial import Outcome, simulate

COMMAND = "python -m ekiden.simulation"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if every promise held (or every mutant was caught), 1 if not, 2 for bad usage."""
    options = _parse(arguments)
    if options.mutants:
        return _run_mutants(options)
    if options.seed is not None:
        return _run_one(options.seed, story=options.story)
    return _run_many(*options.seeds, jobs=options.jobs, traces=options.traces)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Run the real broker, worker and client in small worlds full of faults.",
        epilog=f"examples:  {COMMAND} --seeds 1..2000    {COMMAND} --seed 14 --story",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, metavar="N", help="run one world")
    what.add_argument("--seeds", type=_span, metavar="A..B", help="run all worlds from A to B")
    what.add_argument(
        "--mutants", action="store_true", help="plant known mistakes and find each of them"
    )
    parser.add_argument("--story", action="store_true", help="with --seed: print all that happens")
    parser.add_argument("--traces", action="store_true", help="with --seeds: a line for each")
    parser.add_argument("--only", metavar="NAME", help="with --mutants: this one alone")
    parser.add_argument(
        "--tries", type=int, default=1000, metavar="N", help="with --mutants: seeds for each [1000]"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes [all cores]"
    )
    return parser.parse_args(arguments)


def _span(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not dots or not first.isdigit() or not last.isdigit() or int(first) > int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is no span of seeds; write 1..2000")
    return int(first), int(last)


def _run_one(seed: int, *, story: bool) -> int:
    outcome = simulate(seed, keep_trace=story)
    for line in outcome.story:
        print(line)
    if outcome.violation:
        _report(outcome)
        return 1
    print(f"seed {seed} ok trace {outcome.trace}")
    return 0


def _run_many(first: int, last: int, *, jobs: int, traces: bool) -> int:
    began = time.monotonic()
    counts: dict[str, int] = {}
    done = virtual_ns = 0
    for outcome in outcomes(range(first, last + 1), jobs):
        done += 1
        virtual_ns += outcome.virtual_ns
        for what, count in outcome.counts.items():
            counts[what] = counts.get(what, 0) + count
        if outcome.violation:
            _report(outcome)
            return 1
        if traces:
            print(f"seed {outcome.seed} ok trace {outcome.trace}")
    for what in sorted(counts):
        print(f"{counts[what]:>9,}  {what}")
    took = time.monotonic() - began
    print(f"{virtual_ns / 3.6e12:.1f} simulated hours in {took:.0f} s")
    print(f"{done} seeds ok")
    return 0


def outcomes(seeds: range, jobs: int) -> Iterator[Outcome]:
    """Run every seed, in order of the seeds, on as many processes."""
    if jobs <= 1 or len(seeds) < 4:
        yield from map(simulate, seeds)
        return
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "fork")
    gc.freeze()
    with context.Pool(min(jobs, len(seeds))) as pool:
        yield from pool.imap(simulate, seeds, chunksize=4)


def _report(outcome: Outcome) -> None:
    print(f"seed {outcome.seed} VIOLATION {outcome.violation}")
    print(f"replay with: {COMMAND} --seed {outcome.seed} --story")


def _run_mutants(options: argparse.Namespace) -> int:
    names = [options.only] if options.only else list(MUTANTS)
    if unknown := [name for name in names if name not in MUTANTS]:
        print(f"no mutant {unknown[0]!r}; there are: {', '.join(MUTANTS)}", file=sys.stderr)
        return 2
    escaped = 0
    for name in names:
        seed, violation = hunt(name, options.tries)
        if seed is None:
            escaped += 1
            print(f"{name} ESCAPED {options.tries} seeds")
        else:
            print(f"{name} caught at seed {seed}")
            print(f"    {violation}")
    print(f"{len(names) - escaped} of {len(names)} mutants caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
