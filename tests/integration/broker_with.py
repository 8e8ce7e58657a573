"""`ekiden broker` with settings that have no flag: `broker_with.py '{"data": …, "port": 0, …}'`.

Beside fields of BrokerConfig, "settings" names some of the book's own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ekiden.broker.serve import serve_broker
from ekiden.config import BrokerConfig
from ekiden.core.commands import Settings
from ekiden.observe.logs import set_up_logs
from ekiden.world.loop import run


def ready(port: int) -> None:
    print(json.dumps({"ready": True, "address": f"127.0.0.1:{port}"}), flush=True)


@dataclass(frozen=True, kw_only=True)
class Config(BrokerConfig):
    changes: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> Settings:
        return msgspec.structs.replace(super().settings(), **self.changes)


if __name__ == "__main__":
    set_up_logs(as_json=True, level="info")
    fields = json.loads(sys.argv[1])
    changes = fields.pop("settings", {})
    sys.exit(run(serve_broker(Config(**fields, changes=changes, on_ready=ready))))
