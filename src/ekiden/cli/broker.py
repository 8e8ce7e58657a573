"""Starting a broker."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ekiden import limits
from ekiden.cli import options, output
from ekiden.errors import WrongUsage

if TYPE_CHECKING:
    from ekiden.broker.serve import BrokerWorld
    from ekiden.config import BrokerConfig

PORT: Final = 7000
MIB: Final = 1 << 20
GIB: Final = 1 << 30
DAY_NS: Final = 24 * 3600 * limits.NS
POLICIES: Final = ("least-load", "round-robin")


class Sync(StrEnum):
    """When bytes must have reached the disk."""

    ALWAYS = "always"
    UNSAFE_INTERVAL = "unsafe-interval"
    UNSAFE_NEVER = "unsafe-never"


class LogLevel(StrEnum):
    """From which weight on things are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Bind = Annotated[str, typer.Option("--bind", metavar="HOST", help="Address to listen on.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Data folder [one per port, of this user]."),
]
Level = Annotated[
    LogLevel,
    typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, metavar="PORT", help="0 takes a free one.")
]
BlobsMax = Annotated[
    float,
    typer.Option(
        "--blobs-max", min=0, metavar="GB", help="Room for stored files; 0: what the disk has."
    ),
]
Advertise = Annotated[
    str, typer.Option("--advertise", metavar="HOST:PORT", help="How others reach it.")
]


def broker(
    port: Port = PORT,
    bind: Bind = "127.0.0.1",
    data: Data = None,
    advertise: Advertise = "",
    group: Annotated[
        str, typer.Option("--group", metavar="NAME", help="Name of the group.")
    ] = "main",
    sync: Annotated[
        Sync,
        typer.Option("--sync", metavar="MODE", help="always, unsafe-interval or unsafe-never."),
    ] = Sync.ALWAYS,
    snapshot_interval: Annotated[
        float,
        typer.Option("--snapshot-interval", min=1, metavar="SECONDS", help="Between snapshots."),
    ] = limits.SNAPSHOT_INTERVAL_NS / limits.NS,
    segment_mb: Annotated[
        int,
        typer.Option("--segment-mb", min=1, metavar="MB", help="Size of a segment of the journal."),
    ] = limits.SEGMENT_BYTES // MIB,
    keep_log: Annotated[
        float,
        typer.Option("--keep-log", min=0, metavar="DAYS", help="Keep segments after a snapshot."),
    ] = limits.KEEP_LOG_NS / DAY_NS,
    retention: Annotated[
        float,
        typer.Option("--retention", min=0, metavar="DAYS", help="Keep results and ids so long."),
    ] = limits.RETENTION_NS / DAY_NS,
    client_cap: Annotated[
        int,
        typer.Option(
            "--client-cap", min=0, metavar="N", help="Most running jobs of one client; 0: no cap."
        ),
    ] = 0,
    waiting_max: Annotated[
        int,
        typer.Option("--waiting-max", min=1, metavar="N", help="Most jobs waiting on one subject."),
    ] = limits.WAITING_MAX,
    results_max: Annotated[
        int, typer.Option("--results-max", min=0, metavar="N", help="Most results to keep.")
    ] = limits.RESULTS_KEPT_MAX,
    ids_max: Annotated[
        int,
        typer.Option("--ids-max", min=0, metavar="N", help="Most ids of finished jobs to keep."),
    ] = limits.IDS_KEPT_MAX,
    blobs_max: BlobsMax = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="PATTERN=NAME",
            help="least-load (default) or round-robin for these subjects; repeatable.",
        ),
    ] = None,
    log_level: Level = LogLevel.INFO,
    as_json: options.Json = False,
) -> int:
    """Start a broker in the foreground.

    SIGTERM or Ctrl-C ends it in good order. With one of the 'unsafe' sync modes a power loss may
    lose jobs that were accepted.

    \b
    examples:
      $ ekiden broker --port 7000 --data /var/lib/ekiden
      # Reachable from other machines: copy the file 'key' of the data folder there.
      $ ekiden broker --bind 0.0.0.0 --advertise grid1:7000 --data /var/lib/ekiden
    """
    from ekiden.config import BrokerConfig
    from ekiden.model.ids import check_name
    from ekiden.world.addresses import split_address

    if advertise:
        split_address(advertise)
    check_name(group, "group")
    config = BrokerConfig(
        data=data or data_folder(port),
        bind=bind,
        port=port,
        advertise=advertise,
        group=group,
        sync=sync.value,
        snapshot_interval_s=snapshot_interval,
        segment_mb=segment_mb,
        keep_log_days=keep_log,
        retention_ns=int(retention * DAY_NS),
        client_cap=client_cap,
        results_max=results_max,
        ids_max=ids_max,
        waiting_max=waiting_max,
        blobs_max=int(blobs_max * GIB),
        policies=_policies(policy or []),
        on_ready=lambda ready: _announce(bind, ready, as_json=as_json),
    )
    return run_broker(config, log_level=log_level, as_json=as_json)


def _policies(pairs: list[str]) -> dict[str, str]:
    from ekiden.core.subjects import check_pattern

    policies: dict[str, str] = {}
    for pair in pairs:
        pattern, _, name = pair.rpartition("=")
        if name not in POLICIES:
            raise WrongUsage(
                f"--policy {pair!r} names no policy",
                remedy=f"write PATTERN=NAME with one of: {', '.join(POLICIES)}",
            )
        policies[check_pattern(pattern)] = name
    return policies


def leader(
    port: Annotated[
        int, typer.Argument(metavar="PORT", min=0, max=65535, help="0 takes a free one.")
    ] = PORT,
    bind: Bind = "127.0.0.1",
    data: Data = None,
    advertise: Advertise = "",
    log_level: Level = LogLevel.INFO,
    as_json: options.Json = False,
) -> int:
    """Another name for `ekiden broker --port PORT`."""
    return broker(
        port=port,
        bind=bind,
        data=data,
        advertise=advertise,
        log_level=log_level,
        as_json=as_json,
    )


def data_folder(port: int) -> Path:
    """Where a broker keeps its data unless told."""
    from ekiden.world.keys import state_folder

    return state_folder() / "data" / str(port)


def run_broker(
    config: BrokerConfig,
    *,
    log_level: LogLevel,
    as_json: bool,
    world_kind: type[BrokerWorld] | None = None,
) -> int:
    """Serve until told to stop; the exit code."""
    from ekiden.broker.serve import BrokerWorld, serve_broker
    from ekiden.machine import Log
    from ekiden.observe.logs import log_effect, set_up_logs
    from ekiden.world.loop import run

    set_up_logs(as_json=as_json, level=log_level.value)
    if config.bind not in ("127.0.0.1", "::1", "localhost"):
        why = "peers must know the key, but what they say is not encrypted"
        log_effect(Log("warning", "broker.exposed", {"bind": config.bind, "note": why}))
    if config.sync != Sync.ALWAYS:
        why = "a power loss may lose accepted jobs"
        log_effect(Log("warning", "journal.unsafe", {"sync": config.sync, "note": why}))
    return run(serve_broker(config, world_kind or BrokerWorld))


def _announce(bind: str, port: int, *, as_json: bool) -> None:
    from ekiden.world.addresses import join_address

    address = join_address("127.0.0.1" if bind in ("0.0.0.0", "::") else bind, port)
    if as_json:
        output.emit({"ready": True, "address": address})
    else:
        print(f"serving on {address}; connect with: EKIDEN_CONNECT={address}", flush=True)
