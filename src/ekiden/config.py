"""Settings of the roles, with the defaults of `limits`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ekiden import limits
from ekiden.core.commands import Settings
from ekiden.limits import NS

SYNC_ALWAYS = "always"
SYNC_INTERVAL = "unsafe-interval"
SYNC_NEVER = "unsafe-never"


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """What a broker may be told. `on_ready` is called with the port once recovery is complete."""

    data: Any = "ekiden-data"
    bind: str = "127.0.0.1"
    port: int = 7000
    advertise: str = ""
    group: str = "main"
    sync: str = SYNC_ALWAYS
    snapshot_interval_s: float = limits.SNAPSHOT_INTERVAL_NS / NS
    segment_mb: float = limits.SEGMENT_BYTES / (1 << 20)
    keep_log_days: float = limits.KEEP_LOG_NS / (86400 * NS)
    retention_ns: int = limits.RETENTION_NS
    client_cap: int = 0
    results_max: int = limits.RESULTS_KEPT_MAX
    ids_max: int = limits.IDS_KEPT_MAX
    disk_headroom: int = limits.DISK_HEADROOM_BYTES
    blobs_max: int = 0
    """Bytes the store of blobs may take; 0: what the disk has beside its headroom."""
    heartbeat_ns: int = limits.HEARTBEAT_NS
    silence_ns: int = limits.SILENCE_NS
    rejoin_grace_ns: int = limits.REJOIN_GRACE_NS
    waiting_max: int = limits.WAITING_MAX
    policies: dict[str, str] = field(default_factory=dict)
    """Pattern → `least-load` or `round-robin`; the first that matches a subject counts."""
    on_ready: Callable[[int], None] | None = None

    def settings(self) -> Settings:
        """What of it the book has to know."""
        return Settings(
            client_inflight_max=self.client_cap,
            retention_ns=self.retention_ns,
            results_max=self.results_max,
            ids_max=max(self.ids_max, self.results_max),
        )
