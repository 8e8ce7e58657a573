"""The processes that `ekiden bench cache` measures: one that puts caches, and one that only copies.

One line of JSON a round on standard input, one on standard output.

    python -m ekiden.bench.cache_load put ADDRESS      {"cache", "source", "target"}
    python -m ekiden.bench.cache_load copy             {"source", "targets"}
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any, Final

import ekiden
from ekiden.world.threads import stand_back

_BLOCK: Final = 1 << 20


def put(client: ekiden.Client, order: dict[str, Any]) -> dict[str, Any]:
    """Put a folder, and say how long it took until every worker had it."""
    begin = time.perf_counter()
    report = client.put_cache(order["cache"], order["source"], order["target"])
    return {
        "seconds": time.perf_counter() - begin,
        "reached": report.reached,
        "sent_bytes": report.sent_bytes,
    }


def copy(order: dict[str, Any]) -> dict[str, Any]:
    """Read, hash and write every file, once for each target: what nobody can do without."""
    begin = time.perf_counter()
    for target in order["targets"]:
        os.makedirs(target)
        for entry in os.scandir(order["source"]):
            digest = hashlib.sha256()
            with (
                open(entry.path, "rb", buffering=0) as source,
                open(os.path.join(target, entry.name), "wb", buffering=0) as sink,
            ):
                while block := source.read(_BLOCK):
                    digest.update(block)
                    sink.write(block)
    return {"seconds": time.perf_counter() - begin}


def main() -> None:
    """Answer orders until there are no more."""
    mode = sys.argv[1]
    if mode == "put":
        stand_back()  # as `ekiden cache put` does
    client = ekiden.Client(sys.argv[2], client_id="bench-cache") if mode == "put" else None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = copy(order) if client is None else put(client, order)
        print(json.dumps(answer), flush=True)
    if client is not None:
        client.close()


if __name__ == "__main__":
    main()
