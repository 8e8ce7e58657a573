"""The child process after a snapshot: `python -m ekiden.broker.snapshotter`.

It checks the one that the broker's twin has just written, or makes it itself by replaying closed
files. Then it compresses and deletes what the snapshot covers. It needs no word with the broker and
cannot stall it, has its own niceness, does not hold the lock of the folder, and ends when its
parent does: its standard input is a pipe of the broker's.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

from ekiden.broker.recovery import take_snapshot
from ekiden.errors import EkidenError
from ekiden.journal.housekeeping import tidy
from ekiden.world.disk import FolderStorage


def main(folder: str, upto: int, group_id: bytes, keep_ns: int, keep_bytes: int) -> int:
    """See to the snapshot, then compress and delete what it covers. Prints its index."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        # Behind the broker for a core, but not far: a snapshot that starves under a load that never
        # pauses falls behind it for ever, and the journal grows.
        os.nice(5)
    gc.disable()  # a replay makes millions of objects and no garbage cycles
    storage = FolderStorage(folder)
    try:
        index = take_snapshot(storage, upto, group_id, tag=str(os.getpid()))
        sys.stdout.write(f"{index}\n")
        sys.stdout.flush()
        tidied = tidy(
            storage, snapshot_index=index, now_wall=time.time_ns(), keep_ns=keep_ns,
            keep_bytes=keep_bytes, tag=str(os.getpid()),
        )  # fmt: skip
        for problem in tidied.problems:
            sys.stderr.write(f"{problem}\n")
    except EkidenError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    where, last, group, keep_for, keep_most = sys.argv[1:]
    # The interpreter is not torn down object by object: freeing a million rows takes seconds.
    code = main(where, int(last), bytes.fromhex(group), int(keep_for), int(keep_most))
    sys.stdout.flush()
    os._exit(code)
