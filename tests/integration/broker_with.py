"""`ekiden broker` with settings that have no flag: `broker_with.py '{"data": …, "port": 0, …}'`."""

from __future__ import annotations

import json
import sys

from ekiden.broker.serve import serve_broker
from ekiden.config import BrokerConfig
from ekiden.observe.logs import set_up_logs
from ekiden.world.loop import run


def ready(port: int) -> None:
    print(json.dumps({"ready": True, "address": f"127.0.0.1:{port}"}), flush=True)


if __name__ == "__main__":
    set_up_logs(as_json=True, level="info")
    sys.exit(run(serve_broker(BrokerConfig(**json.loads(sys.argv[1]), on_ready=ready))))
