"""What this machine has: asked once at the start, except for its load.

Works on Linux, macOS and Windows; whatever cannot be found out is 0, which promises nothing.
"""

from __future__ import annotations

import os
import platform
import re


def cpu_count() -> int:
    """Processors this process may use; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is not None:
        return max(len(affinity(0)), 1)
    return os.cpu_count() or 1


def memory_mb() -> int:
    """Memory of the machine in MiB."""
    try:
        import psutil

        return int(psutil.virtual_memory().total >> 20)
    except (ImportError, OSError):
        return 0


def load_percent() -> int:
    """How busy all processors were since the last call, 0 to 100."""
    try:
        import psutil

        return round(psutil.cpu_percent(interval=None))
    except (ImportError, OSError):
        return 0


def host_name() -> str:
    """The machine's name, in characters that ids allow."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node())[:64].strip("-") or "host"
