"""The bare prototype: what pure Python can carry if it does nothing but carry.

    client --SUBMIT--> leader --ASSIGN--> worker          frames of many jobs, each way
    client <--RESULT-- leader <---DONE--- worker

The leader keeps a dict of jobs and a deque of ready ones, and appends the batches it received to a
log with a checksum. One thread writes and syncs all that gathered while the last sync ran. Strict:
a job goes to the worker only once its submit is synced, a result goes to the client only once it is
synced. There are no leases, retries, queues, fairness, caps, dedup of settled jobs, snapshots,
restart or keys: it is the yardstick for what all these cost, not a thing to use.

`ekiden bench noop` starts it as three processes. By hand:

    python bench/prototype.py leader LOGFILE        prints {"port": N}
    python bench/prototype.py worker PORT
    python bench/prototype.py client PORT           {"jobs": N} per line in, {"seconds": S} out,
                                                    or {"one_by_one": N} in, {"ms": […]} out
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec
import uvloop

PAYLOAD = b"p" * 100
RESULT_BYTES = b"r" * 100
GRANT_MAX = 500
WORKER_CREDIT = 2000
CLIENT_BATCH = 1000
WINDOW = 20_000
REFILL = 5_000

FRAME_HEAD = struct.Struct("<IB")
RECORD_HEAD = struct.Struct("<IIB")
SUBMIT, ACCEPT, HELLO, ASSIGN, DONE, RESULT = range(1, 7)


class Job(msgspec.Struct, array_like=True, gc=False):
    id: bytes
    payload: bytes


class Outcome(msgspec.Struct, array_like=True, gc=False):
    id: bytes
    ok: int
    output: bytes


encode = msgspec.msgpack.Encoder().encode
decode_jobs = msgspec.msgpack.Decoder(list[Job]).decode
decode_outcomes = msgspec.msgpack.Decoder(list[Outcome]).decode


class Link(asyncio.Protocol):
    """Frames of length, kind and body. The body is valid only while `heard` runs."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.opened()

    def opened(self) -> None:
        """Called once, when bytes can be sent."""

    def heard(self, kind: int, body: memoryview) -> None:
        """One whole frame arrived."""

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        position, end = 0, len(data)
        view = memoryview(data)
        while end - position >= 5:
            size, kind = FRAME_HEAD.unpack_from(data, position)
            after = position + 5 + size
            if after > end:
                break
            self.heard(kind, view[position + 5 : after])
            position = after
        self._rest = data[position:]

    def say(self, kind: int, body: bytes) -> None:
        self.transport.writelines((FRAME_HEAD.pack(len(body), kind), body))


# ------------------------------------------------------------------ leader


class Log:
    """Records in order; a commit is one write and one sync of all that has gathered."""

    def __init__(self, path: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._thread = ThreadPoolExecutor(1)
        self._gathered: list[bytes] = []
        self._then: list[Callable[[], None]] = []
        self._syncing = False
        self._woken = False

    def append(self, kind: int, body: memoryview, then: Callable[[], None]) -> None:
        """Add a record; `then` is called once it is synced."""
        copy = bytes(body)
        self._gathered.append(RECORD_HEAD.pack(len(copy), zlib.crc32(copy), kind))
        self._gathered.append(copy)
        self._then.append(then)
        if not self._woken and not self._syncing:
            self._woken = True
            self._loop.call_soon(self._commit)

    def _commit(self) -> None:
        self._woken = False
        if not self._gathered or self._syncing:
            return
        data, self._gathered = b"".join(self._gathered), []
        then, self._then = self._then, []
        self._syncing = True
        done = self._loop.run_in_executor(self._thread, self._write, data)
        done.add_done_callback(lambda future: self._committed(future, then))

    def _write(self, data: bytes) -> None:
        os.write(self._file, data)
        os.fdatasync(self._file)

    def _committed(self, future: asyncio.Future[None], then: list[Callable[[], None]]) -> None:
        future.result()
        self._syncing = False
        for call in then:
            call()
        self._commit()


class Leader:
    """Who waits for what. Whatever one turn of the loop made for a peer leaves as one frame."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._owner: dict[bytes, LeaderLink] = {}
        self._ready: deque[Job] = deque()
        self._workers: list[LeaderLink] = []
        self._dirty: set[LeaderLink] = set()
        self._turn_due = False

    def join(self, worker: LeaderLink, credit: int) -> None:
        worker.credit = credit
        self._workers.append(worker)
        self._soon()

    def submit(self, client: LeaderLink, body: memoryview) -> None:
        owner = self._owner
        fresh = []
        for job in decode_jobs(body):
            if job.id not in owner:
                owner[job.id] = client
                fresh.append(job)

        def durable() -> None:
            client.accepted += len(fresh)
            self._dirty.add(client)
            self._ready.extend(fresh)
            self._soon()

        self._log.append(SUBMIT, body, durable)

    def done(self, worker: LeaderLink, body: memoryview) -> None:
        outcomes = decode_outcomes(body)
        by_client: dict[LeaderLink, list[Outcome]] = {}
        for outcome in outcomes:
            worker.running.discard(outcome.id)
            client = self._owner.pop(outcome.id, None)
            if client is None:
                continue
            if client in by_client:
                by_client[client].append(outcome)
            else:
                by_client[client] = [outcome]
        worker.credit += len(outcomes)

        def durable() -> None:
            for client, gathered in by_client.items():
                client.outcomes.extend(gathered)
                self._dirty.add(client)
            self._soon()

        self._log.append(DONE, body, durable)
        self._soon()

    def _soon(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        dirty, self._dirty = self._dirty, set()
        for client in dirty:
            if client.accepted:
                client.say(ACCEPT, client.accepted.to_bytes(4, "little"))
                client.accepted = 0
            if client.outcomes:
                client.say(RESULT, encode(client.outcomes))
                client.outcomes = []
        self._assign()

    def _assign(self) -> None:
        ready = self._ready
        while ready and self._workers:
            worker = max(self._workers, key=lambda one: one.credit)
            count = min(worker.credit, len(ready), GRANT_MAX)
            if count <= 0:
                return
            batch = [ready.popleft() for _ in range(count)]
            worker.credit -= count
            worker.running.update([job.id for job in batch])
            worker.say(ASSIGN, encode(batch))


class LeaderLink(Link):
    """A client or a worker, as the leader sees it."""

    def __init__(self, leader: Leader) -> None:
        super().__init__()
        self._leader = leader
        self.credit = 0
        self.running: set[bytes] = set()
        self.accepted = 0
        self.outcomes: list[Outcome] = []

    def heard(self, kind: int, body: memoryview) -> None:
        if kind == SUBMIT:
            self._leader.submit(self, body)
        elif kind == DONE:
            self._leader.done(self, body)
        elif kind == HELLO:
            self._leader.join(self, int.from_bytes(body, "little"))


async def lead(path: str) -> None:
    gc.disable()
    leader = Leader(Log(path))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: LeaderLink(leader), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.Event().wait()


# ------------------------------------------------------------------ worker


def noop(payload: bytes) -> bytes:
    return RESULT_BYTES


class WorkerLink(Link):
    """Runs what it is assigned, at once, and answers batch for batch."""

    def opened(self) -> None:
        self.say(HELLO, WORKER_CREDIT.to_bytes(4, "little"))

    def heard(self, kind: int, body: memoryview) -> None:
        self.say(DONE, encode([Outcome(job.id, 1, noop(job.payload)) for job in decode_jobs(body)]))

    def connection_lost(self, error: Exception | None) -> None:
        asyncio.get_running_loop().stop()


async def work(port: int) -> None:
    gc.disable()
    await asyncio.get_running_loop().create_connection(WorkerLink, "127.0.0.1", port)
    await asyncio.Event().wait()


# ------------------------------------------------------------------ client


class ClientLink(Link):
    """One call and one future per job; what one loop turn submitted leaves as one frame."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._open: dict[bytes, asyncio.Future[bytes]] = {}
        self._waiting: list[Job] = []
        self._ids = self._make_ids()
        self.accepted = 0

    def _make_ids(self) -> Iterator[bytes]:
        prefix, number = os.urandom(8), 0
        while True:
            number += 1
            yield prefix + number.to_bytes(8, "little")

    def submit(self, payload: bytes) -> asyncio.Future[bytes]:
        job = Job(next(self._ids), payload)
        future = self._loop.create_future()
        self._open[job.id] = future
        waiting = self._waiting
        waiting.append(job)
        if len(waiting) == 1:
            self._loop.call_soon(self._flush)
        elif len(waiting) == CLIENT_BATCH:
            self._flush()
        return future

    def _flush(self) -> None:
        if self._waiting:
            batch, self._waiting = self._waiting, []
            self.say(SUBMIT, encode(batch))

    def heard(self, kind: int, body: memoryview) -> None:
        if kind == RESULT:
            take = self._open.pop
            for outcome in decode_outcomes(body):
                take(outcome.id).set_result(outcome.output)
        elif kind == ACCEPT:
            self.accepted += int.from_bytes(body, "little")


async def push(client: ClientLink, jobs: int) -> float:
    """Seconds for `jobs` jobs, at most WINDOW of them open, every result awaited and looked at."""
    live: deque[asyncio.Future[bytes]] = deque()
    begin = time.perf_counter()
    for _ in range(jobs):
        if len(live) >= WINDOW:
            for _ in range(REFILL):
                assert len(await live.popleft()) == 100
        live.append(client.submit(PAYLOAD))
    for future in live:
        assert len(await future) == 100
    return time.perf_counter() - begin


async def call(port: int) -> None:
    gc.disable()
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(ClientLink, "127.0.0.1", port)
    total = 0
    print(json.dumps({"ready": True}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if "one_by_one" in order:
            jobs = order["one_by_one"]
            answer: dict[str, object] = {"ms": [await push(client, 1) * 1e3 for _ in range(jobs)]}
        else:
            jobs = order["jobs"]
            answer = {"seconds": await asyncio.wait_for(push(client, jobs), 120)}
        total += jobs
        assert client.accepted == total, f"{client.accepted} of {total} jobs were accepted"
        print(json.dumps(answer), flush=True)


def main() -> None:
    role, argument = sys.argv[1:3]
    if role == "leader":
        uvloop.run(lead(argument))
    elif role == "worker":
        uvloop.run(work(int(argument)))
    else:
        uvloop.run(call(int(argument)))


if __name__ == "__main__":
    main()
