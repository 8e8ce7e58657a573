"""Many workers in one process: their machines and connections are real, their runs are not.

`python -m ekiden.bench.fleet ADDRESS COUNT PATTERNS` joins COUNT workers of one slot each. All take
the bench's subject, and each has PATTERNS - 1 patterns of its own. A run is finished where it would
begin, so that the fleet costs as little as it can: the broker is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys

import ekiden
from ekiden.bench.noop_worker import SUBJECT
from ekiden.bench.peers import RESULT
from ekiden.machine import Log
from ekiden.worker.machine import Abort, CachesOffered, Exit, Run, RunFinished
from ekiden.world.loop import Driver, run
from ekiden.world.network import Network


def enlist(address: str, number: int, patterns: int) -> Driver:
    """Start one worker on the running loop."""
    own = [f"own{number}.{n}.>" for n in range(patterns - 1)]
    worker = ekiden.Worker(address, slots=1, worker_id=f"fleet-{number}", subjects=[SUBJECT, *own])
    driver = Driver(worker.machine())
    Network(driver)

    def finish(effect: Run) -> None:
        run, count = effect.run, len(effect.run.ids)
        offsets = range(run.first, run.first + count)
        driver.feed(RunFinished(run.grant, offsets, [RESULT] * count))

    driver.handle(Run, finish)
    driver.handle(Abort, lambda _: None)
    driver.handle(CachesOffered, lambda _: None)
    driver.handle(Log, lambda _: None)
    driver.handle(Exit, lambda effect: driver.fail(effect.error or RuntimeError(effect.reason)))
    driver.wake()
    return driver


async def serve(address: str, count: int, patterns: int) -> None:
    """Until the first of them fails."""
    drivers = [enlist(address, number, patterns) for number in range(count)]
    print(json.dumps({"ready": True}), flush=True)
    waiting = [asyncio.ensure_future(driver.wait_ended()) for driver in drivers]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for ended in done:
        ended.result()


if __name__ == "__main__":
    run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
