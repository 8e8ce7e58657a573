"""What a command says, and how it ends.

Two voices: tables and sentences for people, which may change with any release, and `--json`, which
is stable: one document, or one per line where there is a stream. Results go to stdout, everything
about them to stderr, so that a pipe carries results only.

Exit codes: 0 done · 1 job failed · 2 wrong usage · 3 nothing reachable · 4 refused; 130 for Ctrl-C,
as everywhere; 70 for a bug of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from ekiden import errors
from ekiden.limits import NS

DONE: Final = 0
JOB_FAILED: Final = 1
WRONG_USAGE: Final = 2
UNREACHABLE: Final = 3
REFUSED: Final = 4

INTERRUPTED: Final = 130
BUG: Final = 70

EXIT_CODES: Final = (
    "\b\nexit codes: 0 done · 1 job failed · 2 wrong usage ·\n"
    "            3 nothing reachable · 4 refused"
)

# A terminal is never asked to draw more than a person can read, nor to obey what a job wrote.
_CELL_MAX: Final = 120


def exit_code_of(error: BaseException) -> int:
    """How a command ends because of `error`."""
    match error:
        case errors.JobFailed() | errors.JobCancelled():
            return JOB_FAILED
        case errors.WrongUsage():
            return WRONG_USAGE
        case errors.Unreachable() | errors.ConnectionLost() | errors.Closed() | TimeoutError():
            return UNREACHABLE
        case _:
            return REFUSED


def error_document(error: BaseException) -> dict[str, Any]:
    """`error` as `--json` prints it."""
    kind = "timeout" if isinstance(error, TimeoutError) else "io"
    document: dict[str, Any] = {
        "code": getattr(error, "code", kind),
        "message": getattr(error, "message", None) or sentence(error),
        "remedy": getattr(error, "remedy", ""),
    }
    if isinstance(error, errors.Refusal) and error.retry_after_s:
        document["retry_after_s"] = error.retry_after_s
    if isinstance(error, errors.JobFailed | errors.JobCancelled):
        document["job"] = error.job_id
    if isinstance(error, errors.JobFailed):
        document["causes"] = error.causes
    return {"error": document}


def print_error(error: BaseException, *, as_json: bool) -> None:
    """One sentence and what to do about it, on stderr."""
    text = to_json(error_document(error)) if as_json else f"ekiden: {sentence(error)}"
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # Nobody listens any more; the exit code still tells.


def sentence(error: BaseException) -> str:
    """`error` in one line. Where a handler failed is many: `jobs show` has them."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror.lower() + (f": {error.filename}" if error.filename else "")
    if isinstance(error, errors.JobFailed):
        last = error.causes[-1] if error.causes else {}
        message = str(last.get("message", ""))
        text = text.replace(message, first_line(message))
    return plain(text, limit=2000)


def first_line(text: str) -> str:
    """What a message says before it goes into details."""
    return text.partition("\n")[0]


def to_json(document: Any) -> str:
    """One line of JSON. Bytes that are text become text; others `{"base64": …}`."""
    import msgspec

    return msgspec.json.encode(_jsonable(document)).decode()


def _jsonable(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [_jsonable(item) for item in value]
        case bytes() | bytearray() | memoryview():
            return text_or_base64(bytes(value))
        case _:
            return value


def text_or_base64(data: bytes) -> str | dict[str, str]:
    """Bytes for a JSON document: text if they are UTF-8, else tagged, so that nobody guesses."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        from base64 import b64encode

        return {"base64": b64encode(data).decode()}


def emit(document: Any) -> None:
    """Print a JSON document, or the next line of a stream of them."""
    print(to_json(document), flush=True)


def say(text: str) -> None:
    """A line about the result, for people: stderr, so that stdout stays a result."""
    print(text, file=sys.stderr, flush=True)


def write_output(data: bytes) -> None:
    """A job's output as it is; ended with a newline if a person is looking."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    if data and not data.endswith(b"\n") and sys.stdout.isatty():
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str = "") -> None:
    """Rows under headings. Columns whose heading starts with `#` are numbers, set to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(
            column.removeprefix("#"),
            justify="right" if column.startswith("#") else "left",
            no_wrap=place == 0,  # an id is for copying
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    if not table.rows and empty:
        say(empty)
        return
    console = _console()
    with console.capture() as drawn:
        console.print(table)
    # Printed by us: the library ends the process by itself when a pipe is closed.
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def print_lines(text: str, *, indent: str = "") -> None:
    """Text of several lines as it is, but for control characters."""
    for line in text.splitlines():
        print(indent + plain(line, limit=2000))


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """One fact per line, names aligned; facts without a value are left out."""
    shown = [(name, value) for name, value in facts if value not in (None, "", [], {})]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name:<{width}}  {plain(_word(value), limit=2000)}")


def _console() -> Any:
    from rich.console import Console

    # Not a terminal: as wide as the content, so that no script ever sees a cut id.
    return Console(width=None if sys.stdout.isatty() else 10_000, soft_wrap=False, highlight=False)


def _cell(value: Any) -> Any:
    from rich.text import Text

    return Text(plain(_word(value)))


def _word(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.2f}"
        case dict():
            return " ".join(f"{name}={_word(item)}" for name, item in sorted(value.items()))
        case list() | tuple():
            return " ".join(_word(item) for item in value)
        case _:
            return str(value)


def plain(text: str, *, limit: int = _CELL_MAX) -> str:
    """`text` with control characters escaped, and cut: a hostile name cannot drive a terminal."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clock(wall_ns: int | None, *, exact: bool = False) -> str:
    """A wall time for people, in their own zone; `exact` to the millisecond."""
    if not wall_ns:
        return ""
    moment = datetime.fromtimestamp(wall_ns / NS, UTC).astimezone()
    rest = f".{moment.microsecond // 1000:03d}" if exact else ""
    return moment.strftime("%Y-%m-%d %H:%M:%S") + rest


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 job`, `2,000 jobs`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def span(seconds: float) -> str:
    """A length of time in the two units that matter."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def size(number: int) -> str:
    """Bytes in the unit that leaves few digits."""
    amount = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
