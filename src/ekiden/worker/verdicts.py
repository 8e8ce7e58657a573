"""How the end of a program reads: a cause, and a sentence with the tail of what it said."""

from __future__ import annotations

import os
import signal as signals
from typing import Final

from ekiden import limits
from ekiden.model.jobs import EXIT_CODE, OOM, OUT_PROGRAM, SIGNAL, WORKER_LOST, Note
from ekiden.worker.launch import Ended

# Of the bytes a program said last, these many are looked at for its tail: four for a character.
TAIL_BYTES: Final = 4 * limits.ERROR_TEXT_MAX

# A shell and bwrap say by such an exit code that a signal ended what they ran.
_SIGNAL_BASE: Final = 128


def note_of(ended: Ended) -> Note:
    """What is kept of a run beside its output."""
    code = ended.exit_code if not ended.signal else -ended.signal
    return Note(code, ended.ran_ns, ended.cpu_ns, ended.peak_kb, OUT_PROGRAM)


def trouble_of(
    ended: Ended, ok_codes: tuple[int, ...], mem_mb: int, *, sandboxed: bool
) -> tuple[str, str] | None:
    """Cause and sentence of a run that failed; None for a good one."""
    if ended.lost:
        return WORKER_LOST, "the process that keeps this worker's programs died, and this with it"
    if ended.why == "oom":
        return OOM, f"it used more than its {mem_mb:,} MB of memory and was ended"
    if ended.signal:
        return SIGNAL, _signal_sentence(ended.signal)
    if ended.exit_code in ok_codes:
        return None
    inner = ended.exit_code - _SIGNAL_BASE
    if sandboxed and inner in signals.valid_signals():
        return SIGNAL, _signal_sentence(inner)
    return EXIT_CODE, f"it exited with code {ended.exit_code}"


def told(sentence: str, stderr: bytes, stdout: bytes) -> str:
    """`sentence`, and under it the last lines of stderr, or of stdout if there is no stderr."""
    said = (stderr.strip() or stdout.strip())[-TAIL_BYTES:]
    room = limits.ERROR_TEXT_MAX - len(sentence) - 1
    if not said or room <= 0:
        return sentence[: limits.ERROR_TEXT_MAX]
    # What is cut in the middle of a character, or is no text, shows as replaced.
    text = said.decode(errors="replace").replace("\0", "\ufffd").lstrip("\ufffd")
    return f"{sentence}\n{text[-room:]}"


def tail_of(path: str) -> bytes:
    """The last bytes of a file that may be large; nothing if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        return os.pread(fd, TAIL_BYTES, max(os.fstat(fd).st_size - TAIL_BYTES, 0))
    finally:
        os.close(fd)


def _signal_sentence(number: int) -> str:
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"number {number}"
    sentence = f"it was ended by signal {name}"
    if number == getattr(signals, "SIGKILL", 9):
        sentence += ", not sent by this worker: perhaps its machine ran out of memory"
    elif number == getattr(signals, "SIGXFSZ", 25):
        sentence += ": a file grew over the worker's limit"
    elif number == getattr(signals, "SIGXCPU", 24):
        sentence += ": it used more processor time than the worker allows"
    return sentence
