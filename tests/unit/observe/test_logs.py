"""Log lines: one line each, event first, nothing secret, nothing that fakes another line."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from ekiden.machine import Log
from ekiden.observe.logs import log_effect, set_up_logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(effect: Log, stream: io.StringIO | None = None, **options: Any) -> str:
    stream = stream or io.StringIO()
    set_up_logs(stream=stream, **options)
    log_effect(effect)
    return stream.getvalue()


def test_a_line_is_time_level_event_and_facts() -> None:
    line = written(
        Log("warning", "worker.lost", {"worker": "w7", "silent_s": 31.0, "then": "forfeit at once"})
    )
    time, rest = line.split(" ", 1)
    assert len(time) == 8
    assert rest == 'warning worker.lost  worker=w7 silent_s=31 then="forfeit at once"\n'


def test_json_has_the_same_facts() -> None:
    line = written(Log("info", "peer.joined", {"worker": "w7", "slots": 4}), as_json=True)
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told == {"event": "peer.joined", "level": "info", "worker": "w7", "slots": 4}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "value", ["a\nb", "\x1b[31mred", "a\r\n12:00:00 info fake.event", 'say "hi"']
)
def test_a_value_cannot_begin_another_line_or_paint_the_terminal(value: Any, as_json: Any) -> None:
    line = written(Log("info", "peer.said", {"text": value}), as_json=as_json)
    assert line.count("\n") == 1
    assert line[:-1].isprintable()


def test_bytes_are_told_by_their_length_only() -> None:
    line = written(Log("info", "x", {"key": b"secret"}))
    assert "secret" not in line
    assert "<6 bytes>" in line


def test_colour_is_for_terminals_only(monkeypatch: Any) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    effect = Log("error", "x", {"a": 1})
    assert "\x1b[31m" in written(effect, Terminal())
    assert "\x1b" not in written(effect)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in written(effect, Terminal())


def test_lines_below_the_level_are_not_written() -> None:
    assert written(Log("debug", "x", {})) == ""
    assert written(Log("debug", "x", {}), level="debug") != ""
    assert written(Log("info", "x", {}), level="error") == ""


def test_facts_may_have_any_name() -> None:
    line = written(Log("info", "x", {"event": 1, "level": 2, "time": 3, "self": 4, "logger": 5}))
    assert line.endswith("event_=1 level_=2 time_=3 self_=4 logger=5\n")


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    stream = io.StringIO()
    set_up_logs(stream=stream)
    stream.close()
    log_effect(Log("info", "x", {}))


def test_a_long_value_is_cut() -> None:
    assert len(written(Log("info", "x", {"text": "y" * 10_000}))) < 700
