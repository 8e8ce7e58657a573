"""The worker of a bench: a handler that does nothing and answers with 100 bytes.

`python -m ekiden.bench.noop_worker ADDRESS [SLOTS]`
"""

from __future__ import annotations

import sys

import ekiden
from ekiden.bench.peers import RESULT

SUBJECT = "bench.noop"


def main() -> None:
    """Run until told to stop."""
    address = sys.argv[1]
    slots = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    worker = ekiden.Worker(address, slots=slots)

    @worker.handler(SUBJECT)
    def noop(job: ekiden.Job) -> bytes:
        return RESULT

    worker.run()


if __name__ == "__main__":
    main()
