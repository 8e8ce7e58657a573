"""Threads that move the bytes of files."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Final

# Half-way down: such a thread has what nobody else wants, and a tenth of what somebody does.
_NICENESS: Final = 10


def stand_back() -> None:
    """From now on, let others have the processor first: hashing and copying gigabytes is nothing
    that anybody waits for by the millisecond, and jobs run on the same machine.

    For threads that hold the interpreter for moments only, in processes where nothing else is
    urgent: who has it and is kept from running keeps the others from it, too.
    """
    if sys.platform == "linux":  # elsewhere it is the priority of the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
