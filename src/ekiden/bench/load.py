"""Load processes of a bench: ekiden's own client under orders from standard input.

    python -m ekiden.bench.load batch   ADDRESS    one blocking client, one future per job
    python -m ekiden.bench.load frames  ADDRESS    the same, every job in a frame of its own
    python -m ekiden.bench.load clients ADDRESS    50 clients, each with 20 jobs open, one per frame
    python -m ekiden.bench.load open:8  ADDRESS    one client, so many jobs open, one per frame
    python -m ekiden.bench.load backlog ADDRESS    jobs that nobody runs; answers when accepted
    python -m ekiden.bench.load sequence ADDRESS   one job at a time

One line of JSON in, one line out: `{"jobs": N}` or `{"run_s": S}` → `{"seconds": …, "jobs": …}`,
`{"one_by_one": N}` → `{"ms": […]}`. Every result is looked at before the clock stops.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import ekiden
from ekiden.bench.noop_worker import SUBJECT
from ekiden.bench.peers import PAYLOAD, RESULT
from ekiden.world.loop import run

NAME = "noop"
WINDOW = 20_000
FRAMES_WINDOW = 4_000
CLIENTS = 50
OPEN_PER_CLIENT = 20
NOBODY = "bench.nobody"
"""A subject no worker of a bench listens to."""


# ------------------------------------------------------------------ one blocking client


def push(client: ekiden.Client, window: int, jobs: int, run_s: float) -> int:
    """Carry `jobs` jobs, or for `run_s` seconds, at most `window` open; how many it were."""
    live: deque[ekiden.JobFuture] = deque()
    submit, take = client.submit, live.popleft
    refill = window // 4
    left, deadline, done = jobs, time.monotonic() + run_s, 0
    while left > 0 or (not jobs and time.monotonic() < deadline):
        count = min(refill, left) if jobs else refill
        for _ in range(count):
            live.append(submit(NAME, payload=PAYLOAD, subject=SUBJECT))
        left -= count
        done += count
        while len(live) > window - refill:
            _look(take())
    while live:
        _look(take())
    return done


def _look(future: ekiden.JobFuture) -> None:
    if len(future.result(120.0).output) != len(RESULT):
        raise RuntimeError(f"job {future.job_id} came back with another result")


def serve(work: Callable[[dict[str, Any]], int]) -> None:
    """Take orders until standard input closes."""
    _say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.perf_counter()
        jobs = work(order)
        _say({"seconds": time.perf_counter() - begin, "jobs": jobs})


def one_by_one(client: ekiden.Client, jobs: int) -> list[float]:
    """Milliseconds from each submit to its result; the next waits for the one before."""
    taken = []
    for _ in range(jobs):
        begin = time.perf_counter()
        _look(client.submit(NAME, payload=PAYLOAD, subject=SUBJECT))
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken


def batch(address: str) -> None:
    """The client as users get it."""
    with ekiden.Client(address, client_id="bench") as client:
        client.stats()

        def work(order: dict[str, Any]) -> int:
            return push(client, WINDOW, order.get("jobs", 0), order.get("run_s", 0.0))

        serve(work)


def sequence(address: str) -> None:
    """The same client with one job at a time."""
    with ekiden.Client(address, client_id="bench") as client:
        client.stats()
        _say({"ready": True})
        for line in sys.stdin:
            _say({"ms": one_by_one(client, json.loads(line)["one_by_one"])})


def frames(address: str) -> None:
    """No batching on the way in: what a caller in another language without it would do."""
    with ekiden.Client(address, client_id="bench", batch_jobs=1) as client:
        client.stats()
        serve(lambda order: push(client, FRAMES_WINDOW, order["jobs"], 0.0))


# ------------------------------------------------------------------ callers that wait


async def callers(address: str, clients: int, open_each: int) -> None:
    """Callers that wait for most of what they ask: a web service, not a batch run."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as opening:
        opened = [
            opening.create_task(_open(address, number), name=f"open-{number}")
            for number in range(clients)
        ]
    found = [task.result() for task in opened]
    _say({"ready": True})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        share = -(-order.get("jobs", 0) // (clients * open_each))
        begin = time.perf_counter()
        deadline = begin + order.get("run_s", 0.0)
        async with asyncio.TaskGroup() as calls:
            tasks = [
                calls.create_task(_call(caller, share, deadline))
                for caller in found
                for _ in range(open_each)
            ]
        seconds = time.perf_counter() - begin
        _say({"seconds": seconds, "jobs": sum(task.result() for task in tasks)})
    for caller in found:
        await caller.close()


async def _open(address: str, number: int) -> ekiden.AsyncClient:
    client = ekiden.AsyncClient(address, client_id=f"bench-{number}", batch_jobs=1)
    await client.start()
    await client.stats()
    return client


async def _call(client: ekiden.AsyncClient, jobs: int, deadline: float) -> int:
    """So many jobs one after another, or until the deadline; how many it were."""
    done = 0
    while done < jobs if jobs else time.perf_counter() < deadline:
        future = client.submit(NAME, payload=PAYLOAD, subject=SUBJECT)
        result = await future
        if len(result.output) != len(RESULT):
            raise RuntimeError(f"job {future.job_id} came back with another result")
        done += 1
    return done


# ------------------------------------------------------------------ a backlog


def backlog(address: str) -> None:
    """Jobs nobody runs. The answer comes when the broker has accepted all of them."""
    with ekiden.Client(address, client_id="bench") as client:
        client.stats()
        kept: list[ekiden.JobFuture] = []

        def submit(order: dict[str, Any]) -> int:
            kept[:] = [
                client.submit(NAME, payload=PAYLOAD, subject=NOBODY) for _ in range(order["jobs"])
            ]
            for future in kept:
                future.wait_accepted(120.0)
            return len(kept)

        serve(submit)


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Entry of the load processes."""
    mode, address = sys.argv[1:3]
    if mode == "clients":
        run(callers(address, CLIENTS, OPEN_PER_CLIENT))
    elif mode.startswith("open:"):
        run(callers(address, 1, int(mode.removeprefix("open:"))))
    else:
        {"batch": batch, "frames": frames, "backlog": backlog, "sequence": sequence}[mode](address)


if __name__ == "__main__":
    main()
