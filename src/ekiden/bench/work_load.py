"""Load processes for real work: programs, functions, services, and what people use instead.

    python -m ekiden.bench.work_load program  ADDRESS    /bin/true, and dates and sleeps
    python -m ekiden.bench.work_load function ADDRESS    a function that does nothing
    python -m ekiden.bench.work_load service  ADDRESS    a line to a warm service and back
    python -m ekiden.bench.work_load xargs               xargs -P2 -n1 /bin/true
    python -m ekiden.bench.work_load pool                ProcessPoolExecutor(2), chunksize=1

One line of JSON in, one line out: `{"jobs": N}` → `{"seconds": …, "jobs": …}`; `{"one_by_one": N}`
→ `{"ms": […]}`, from submit to the program's own word on what time it is; `{"sleeps_ms": […]}` →
`{"seconds": …}`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ekiden
from ekiden.client.programs import ProgramArgs

PROCESSES = 2
WINDOW = 2_000
SERVICE = "bench-echo"
LINE = b'{"spot":101.25,"strike":100,"rate":0.02}'


def nothing(value: int) -> int:
    """The function of the bench."""
    return value


# ------------------------------------------------------------------ ekiden


def programs(client: ekiden.Client, jobs: int) -> int:
    """`jobs` programs that do nothing, some thousands open at a time."""
    left = jobs
    open_: list[ekiden.JobFuture] = []
    while left or open_:
        count = min(left, WINDOW - len(open_))
        open_ += client.submit_programs("true", [ProgramArgs()] * count)
        left -= count
        half = len(open_) if not left else len(open_) // 2
        for future in open_[:half]:
            if future.result(120.0).exit_code != 0:
                raise RuntimeError(f"{future.job_id} came back with another exit code")
        del open_[:half]
    return jobs


def started_ms(client: ekiden.Client, jobs: int) -> list[float]:
    """Milliseconds from each submit to the program's own word on what time it is."""
    taken = []
    for _ in range(jobs):
        begin = time.time_ns()
        result = client.submit_program("date", ["+%s%N"]).result(60.0)
        taken.append((int(result.output) - begin) / 1e6)
    return taken


def uneven_s(client: ekiden.Client, sleeps_ms: list[float]) -> float:
    """Seconds until programs that take these milliseconds are all done."""
    calls = [ProgramArgs([f"{ms / 1000:.4f}"]) for ms in sleeps_ms]
    begin = time.perf_counter()
    for future in client.submit_programs("sleep", calls):
        future.result(120.0)
    return time.perf_counter() - begin


def functions(client: ekiden.Client, jobs: int) -> int:
    """`jobs` calls of a function, results in order."""
    if sum(client.map(nothing, range(jobs))) != jobs * (jobs - 1) // 2:
        raise RuntimeError("the results are not those of the function")
    return jobs


def services(client: ekiden.Client, jobs: int) -> int:
    """`jobs` lines to a service."""
    for result in client.map(SERVICE, (LINE for _ in range(jobs))):
        if result.output != LINE:
            raise RuntimeError("another line came back")
    return jobs


def serve_grid(address: str, work: Callable[[ekiden.Client, int], int]) -> None:
    """Take orders until standard input closes."""
    with ekiden.Client(address, client_id="bench") as client:
        client.stats()
        _say({"ready": True})
        for line in sys.stdin:
            order = json.loads(line)
            if "one_by_one" in order:
                _say({"ms": started_ms(client, order["one_by_one"])})
            elif "sleeps_ms" in order:
                _say({"seconds": uneven_s(client, order["sleeps_ms"])})
            else:
                _timed(lambda jobs: work(client, jobs), order["jobs"])


# ------------------------------------------------------------------ what people use instead


def xargs(jobs: int) -> int:
    """The plainest way to run a program many times."""
    lines = b"x\n" * jobs
    command = ["xargs", "-P", str(PROCESSES), "-n", "1", "/bin/true"]
    subprocess.run(command, input=lines, check=True)
    return jobs


def serve_peer(work: Callable[[int], int]) -> None:
    """Take orders until standard input closes."""
    _say({"ready": True})
    for line in sys.stdin:
        _timed(work, json.loads(line)["jobs"])


def serve_pool() -> None:
    """The standard library's way to run a function many times."""
    with ProcessPoolExecutor(PROCESSES) as pool:
        list(pool.map(nothing, range(100)))

        def work(jobs: int) -> int:
            return len(list(pool.map(nothing, range(jobs), chunksize=1)))

        serve_peer(work)


def _timed(work: Callable[[int], int], jobs: int) -> None:
    begin = time.perf_counter()
    done = work(jobs)
    _say({"seconds": time.perf_counter() - begin, "jobs": done})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Entry of the load processes."""
    mode = sys.argv[1]
    if mode == "xargs":
        serve_peer(xargs)
    elif mode == "pool":
        serve_pool()
    else:
        work = {"program": programs, "function": functions, "service": services}[mode]
        serve_grid(sys.argv[2], work)


if __name__ == "__main__":
    main()
