"""What is gathered for the next entry, and how much of it fits.

Nothing here changes what is asked for, only how it is written: small submits of one client that are
alike become one command. A caller that sends a frame for each job then pays for its frames, and not
for a command in the journal and in the book for each.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from ekiden import limits
from ekiden.broker.peers import Peer
from ekiden.core import commands as c
from ekiden.model.caches import BlobRef

Batch: TypeAlias = list[tuple[c.Command, Peer | None, int]]
"""What is asked for, by whom, and the number of the message."""

# Submits of at most so many jobs are merged, and at most so many of them: one by a client that
# gathers by itself gains nothing, and what comes out must be a batch the book takes.
_SMALL_JOBS: Final = 16
_MERGED_MAX: Final = limits.BATCH_JOBS_MAX // _SMALL_JOBS

# What carries bytes of jobs.
_CARRIERS: Final = (c.Submit, c.Finish)


def first_entry(queue: Batch) -> Batch:
    """As much of the queue as fits one entry. What came in one message stays together: an ack is
    confirmed by the entry that holds all of it."""
    size = start = 0
    for n, (command, peer, msg_id) in enumerate(queue):
        if peer is None or n == 0 or queue[n - 1][1:] != (peer, msg_id):
            start = n
        size += _size(command)
        if size > limits.ENTRY_BYTES_MAX and start:
            return queue[:start]
    return queue[:]


def merged(batch: Batch) -> tuple[list[Any], list[int]]:
    """The commands of a batch, in order, with small submits of one client that are alike made one;
    and how many submits each `Submit` stands for."""
    commands: list[Any] = []
    shares: list[int] = []
    run: list[c.Submit] = []
    owner: Peer | None = None
    for command, peer, _ in batch:
        if not isinstance(command, c.Submit):
            _close_run(run, commands, shares)
            commands.append(command)
            continue
        if run and (peer is not owner or len(run) >= _MERGED_MAX or not _merge(run[0], command)):
            _close_run(run, commands, shares)
        run.append(command)
        owner = peer
    _close_run(run, commands, shares)
    return commands, shares


def _merge(one: c.Submit, other: c.Submit) -> bool:
    return (
        max(len(one.ids), len(other.ids)) <= _SMALL_JOBS
        and one.spec == other.spec
        and one.delay_ns == other.delay_ns
        and one.not_before == other.not_before
        and one.expires_at == other.expires_at
        and one.session == other.session
    )


def _close_run(run: list[c.Submit], commands: list[Any], shares: list[int]) -> None:
    """Add what the run comes to, and begin a new one."""
    if not run:
        return
    shares.append(len(run))
    one = run[0]
    if len(run) > 1:
        one = msgspec.structs.replace(
            one,
            ids=[job_id for part in run for job_id in part.ids],
            digests=b"".join([part.digests for part in run]),
            bodies=[body for part in run for body in part.bodies],
            blobs=_blobs(run),
        )
    commands.append(one)
    run.clear()


def _blobs(run: list[c.Submit]) -> dict[int, list[BlobRef]]:
    """By offset in all of them together."""
    found: dict[int, list[BlobRef]] = {}
    first = 0
    for part in run:
        if part.blobs:
            found |= {first + offset: blobs for offset, blobs in part.blobs.items()}
        first += len(part.ids)
    return found


def _size(command: c.Command) -> int:
    if not isinstance(command, _CARRIERS):
        return 256
    size = 80 * sum(map(len, command.blobs.values())) if command.blobs else 0
    if isinstance(command, c.Submit):
        return size + sum(map(len, command.bodies)) + 64 * len(command.ids)
    return size + sum(map(len, command.outputs)) + 16 * len(command.outputs)
