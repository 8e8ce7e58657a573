"""A forked twin of the broker writes the book as it stood at that moment.

Replaying a minute of journal costs nearly half of what carrying it cost. A fork has the book
already: copy-on-write holds it still while the broker goes on. It is a shortcut, never the only
way: where a fork is not to be had, or the twin dies, `ekiden.broker.snapshotter` finds no snapshot
and replays.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from ekiden.core.book import JobBook
from ekiden.core.image import dump
from ekiden.journal.snapshots import write_snapshot
from ekiden.world.disk import FolderStorage

# The loop stands still while the kernel copies the page tables: measured 22 ms per GB.
FORK_RSS_MAX: Final = 3 << 29

# Far above any limit on open files; the kernel stops at the last one that is open.
_FILES: Final = (1 << 31) - 1


def fork_twin(folder: str, book: JobBook, group: bytes, *, rss: int) -> int:
    """Start a twin that writes a snapshot of `book`. Its process id, or 0 if there is none.

    The loop's own thread must call it, between two turns, when all that is applied lies in closed
    segments. Only Linux: other systems' libraries do not all survive a fork of a threaded process.
    """
    if sys.platform != "linux" or rss > FORK_RSS_MAX:
        return 0
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            # Python warns of locks that other threads hold. The twin takes none: it encodes rows,
            # writes one new file, and leaves without running anybody's clean-up.
            warnings.simplefilter("ignore", DeprecationWarning)
            twin = os.fork()
    except OSError:  # no memory or process to be had now
        return 0
    if not twin:
        code = 1
        try:
            _write(folder, book, group, parent)
            code = 0
        finally:
            os._exit(code)
    return twin


def wait_for_twin(twin: int) -> int:
    """Return when it has ended: 0 if nothing is known to have gone wrong."""
    # Whoever started the broker may have left it with SIGCHLD ignored: then the kernel waits for
    # us, and says at the end that there is no such child.
    with suppress(ChildProcessError):
        return os.waitpid(twin, 0)[1]
    return 0


def _write(folder: str, book: JobBook, group: bytes, parent: int) -> None:
    gc.disable()
    signal.set_wakeup_fd(-1)  # it is the broker's, like every other file here
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    # What the broker closes must be closed, and its folder's lock must end with it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    os.closerange(3, _FILES)
    os.nice(5)
    chunks = _while_it_lives(parent, dump(book))
    write_snapshot(FolderStorage(folder), book.applied, group, chunks, tag=str(os.getpid()))


def _while_it_lives(parent: int, chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if os.getppid() != parent:
            os._exit(1)  # the broker is gone, and another may be at work on this folder
        yield chunk
