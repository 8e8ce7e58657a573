"""Log lines: event first, then facts as key=value; JSON for machines.

    05:12:40 warning worker.lost  worker=w7 silent_s=31 leases=4

The loop writes them, machines do not: a machine returns a `Log` effect and `log_effect` performs
it. One line per thing that happened to a connection, a worker or the journal; never one per job.
Bytes are shown by their length only: payloads and keys do not belong in logs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO

import structlog

from ekiden.machine import Log

LEVELS: Final = ("debug", "info", "warning", "error")

_LEVEL_NUMBERS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_OWN_KEYS: Final = ("event", "level", "time", "self")
_COLOURS: Final = {"debug": "2", "info": "32", "warning": "33", "error": "31"}
_VALUE_LENGTH_MAX: Final = 500

Event = MutableMapping[str, Any]


def set_up_logs(
    *, as_json: bool = False, level: str = "info", stream: TextIO | None = None
) -> None:
    """Send log lines to `stream` (standard error unless told), from `level` up.

    There is colour on a terminal, unless NO_COLOR is set.
    """
    target = stream or sys.stderr
    colour = target.isatty() and not os.environ.get("NO_COLOR")
    render: Any = structlog.processors.JSONRenderer() if as_json else LineRenderer(colour)
    stamp = structlog.processors.TimeStamper(
        fmt="iso" if as_json else "%H:%M:%S", utc=as_json, key="time"
    )
    structlog.configure(
        processors=[structlog.processors.add_log_level, _without_bytes, stamp, render],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVEL_NUMBERS[level]),
        logger_factory=structlog.WriteLoggerFactory(target),
        cache_logger_on_first_use=False,
    )


def log_effect(effect: Log) -> None:
    """Write what a machine wants to be known. A log that cannot be written ends nothing.

    In a program that has not set up our logs it goes through `logging`, which shows warnings only.
    """
    if not structlog.is_configured():
        said = " ".join(f"{name}={shown(value)}" for name, value in effect.facts.items())
        level = _LEVEL_NUMBERS.get(effect.level, 20)
        logging.getLogger("ekiden").log(level, "%s  %s", effect.event, said)
        return
    facts = {f"{k}_" if k in _OWN_KEYS else k: value for k, value in effect.facts.items()}
    try:
        structlog.get_logger().log(_LEVEL_NUMBERS.get(effect.level, 20), effect.event, **facts)
    except (OSError, ValueError):
        pass  # The stream is full or closed; the work goes on.


class LineRenderer:
    """One line for a person: time, level, event, facts."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, _logger: Any, _method: str, event: Event) -> str:
        time = event.pop("time", "")
        level = str(event.pop("level", "info"))
        name = str(event.pop("event", ""))
        facts = " ".join(f"{self._dim(key)}={shown(value)}" for key, value in event.items())
        head = f"{time} {self._paint(f'{level:<7}', _COLOURS.get(level, '0'))} {name}"
        return f"{head}  {facts}" if facts else head

    def _dim(self, text: str) -> str:
        return self._paint(text, "36")

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


def shown(value: object) -> str:
    """`value` as one word of a log line: quoted if it is not one, no control characters."""
    text = value if isinstance(value, str) else f"{value:g}" if type(value) is float else str(value)
    if len(text) > _VALUE_LENGTH_MAX:
        text = text[:_VALUE_LENGTH_MAX] + "…"
    plain = text.isprintable() and not any(c in " \"'=" for c in text)
    return text if plain and text else '"' + _escaped(text) + '"'


def _escaped(text: str) -> str:
    return "".join(
        f"\\{c}" if c in '"\\' else c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text
    )


def _without_bytes(_logger: Any, _method: str, event: Event) -> Event:
    for key, value in event.items():
        if isinstance(value, (bytes, bytearray, memoryview)):
            event[key] = f"<{len(value)} bytes>"
    return event
