"""Warm services as real processes: lines, words, health, crashes and garbage."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.unit.worker.lane_bench import drive, service

from ekiden import limits
from ekiden.model.jobs import FORM_CALL, Route, Spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children need the keeper")

EXAMPLES = Path(__file__).parents[3] / "examples" / "services"

ECHO = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
"""

PID = """
import os, sys
for line in sys.stdin:
    print(os.getpid(), flush=True)
"""


# ------------------------------------------------------------------ lines


def test_each_line_gets_its_own_answer_in_any_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, ECHO, slots=2) as it:
            for grant in range(1, 9):
                it.send(grant, [b'{"x": %d}' % at for at in range(250)])
            await it.until(lambda: it.settled == 2000)

            assert it.outputs == {
                (grant, at): b'{"x": %d}' % at for grant in range(1, 9) for at in range(250)
            }

    drive(scenario)


def test_a_payload_with_line_breaks_travels_on_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, ECHO) as it:
            it.send(1, [json.dumps({"a": [1, 2], "b": "x\ny"}, indent=2).encode(), b""])
            await it.until(lambda: it.settled == 2)

            assert msgspec.json.decode(it.outputs[1, 0]) == {"a": [1, 2], "b": "x\ny"}
            assert it.outputs[1, 1] == b"null"

    drive(scenario)


def test_a_payload_that_is_no_json_fails_and_the_others_do_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, ECHO) as it:
            it.send(1, [b"1", b"not json", b"2"])
            await it.until(lambda: it.settled == 3)

            assert it.outputs == {(1, 0): b"1", (1, 2): b"2"}
            assert "the payload is not JSON" in it.failures[1, 1].message

    drive(scenario)


def test_a_job_with_arguments_is_not_for_a_service(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, ECHO) as it:
            it.hand(1, [b"x"], Spec("it", Route("job.assign.it"), form=FORM_CALL), [])

            assert it.failures[1, 0].cause == "cannot_start"

    drive(scenario)


def test_an_answer_as_large_as_may_be_comes_back(tmp_path: Path) -> None:
    size = limits.PAYLOAD_BYTES_MAX - 2

    async def scenario() -> None:
        async with service(tmp_path, ECHO) as it:
            it.send(1, [b'"%b"' % (b"x" * size)])
            await it.until(lambda: it.settled)

            assert len(it.outputs[1, 0]) == limits.PAYLOAD_BYTES_MAX

    drive(scenario)


# ------------------------------------------------------------------ words


def test_a_service_tells_progress_and_errors(tmp_path: Path) -> None:
    script = """
import sys
for line in sys.stdin:
    print('{"ekiden": "progress", "value": 0.5, "text": "half"}')
    if "bad" in line:
        print('{"ekiden": "error", "message": "no such curve"}', flush=True)
    else:
        print('{"mentions": "ekiden", "nested": {"ekiden": 1}}', flush=True)
"""

    async def scenario() -> None:
        async with service(tmp_path, script) as it:
            it.send(1, [b'"good"', b'"bad"', b'"good"'])
            await it.until(lambda: it.settled == 3)

            assert sorted(it.outputs) == [(1, 0), (1, 2)]
            assert it.failures[1, 1].cause == "handler_error"
            assert it.failures[1, 1].message == "no such curve"
            assert msgspec.json.decode(it.progress[0]) == {"value": 0.5, "text": "half"}

    drive(scenario)


def test_the_time_to_start_up_is_no_part_of_the_run(tmp_path: Path) -> None:
    script = f"""
import sys, time, pathlib
gate = pathlib.Path({str(tmp_path / "gate")!r})
pathlib.Path({str(tmp_path / "here")!r}).write_text("x")
while not gate.exists():
    time.sleep(0.01)
print('{{"ekiden": "ready"}}', flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""

    async def scenario() -> None:
        async with service(tmp_path / "scratch", script) as it:
            it.send(1, [b"1"])
            for _ in range(100):
                await watch_looks()
            assert it.started == []
            (tmp_path / "gate").write_text("x")
            await it.until(lambda: it.settled)

            assert it.outputs == {(1, 0): b"1"}

    drive(scenario)


async def watch_looks() -> None:
    """Time for the executor to do something of its own accord."""
    await asyncio.sleep(0.002)


def test_a_service_that_says_ready_gets_no_line_before(tmp_path: Path) -> None:
    script = """
import select, sys
early = bool(select.select([0], [], [], 0.2)[0])
print('{"ekiden": "ready"}', flush=True)
for line in sys.stdin:
    print("true" if early else "false", flush=True)
"""

    async def scenario() -> None:
        async with service(tmp_path, script, ready=True) as it:
            it.send(1, [b"1"])
            await it.until(lambda: it.settled)

            assert it.outputs == {(1, 0): b"false"}

    drive(scenario)


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("print('Loading curves', flush=True)", "b'Loading curves', which is not a line of JSON"),
        ("os.write(1, b'1\\n2\\n')", "which nobody had asked for"),
        ('print(\'{"ekiden": "sing"}\', flush=True)', "'sing', which is no word"),
        ("print('x' * 600_000, flush=True)", "a line of more than"),
    ],
    ids=["not JSON", "too many", "unknown word", "too long"],
)
def test_garbage_fails_the_job_and_the_service_is_replaced(
    tmp_path: Path, answer: str, said: str
) -> None:
    script = f"""
import os, sys
for line in sys.stdin:
    if "bad" in line:
        {answer}
    else:
        print(line, end="", flush=True)
"""

    async def scenario() -> None:
        async with service(tmp_path, script) as it:
            it.send(1, [b'"good"'])
            await it.until(lambda: it.settled == 1)
            it.send(2, [b'"bad"'])
            await it.until(lambda: it.settled == 2)
            it.send(3, [b'"fine"'])
            await it.until(lambda: it.settled == 3)

            assert it.outputs == {(1, 0): b'"good"', (3, 0): b'"fine"'}
            assert it.failures[2, 0].cause == "handler_error"
            assert said in it.failures[2, 0].message

    drive(scenario)


def test_a_crash_fails_the_line_at_hand_with_the_tail_of_stderr(tmp_path: Path) -> None:
    script = """
import os, sys
for line in sys.stdin:
    if "bad" in line:
        print("the licence expired", file=sys.stderr, flush=True)
        os.abort()
    print(line, end="", flush=True)
"""

    async def scenario() -> None:
        async with service(tmp_path, script) as it:
            it.send(1, [b'"good"'] * 100 + [b'"bad"'] + [b'"fine"'] * 100)
            await it.until(lambda: it.settled == 201)

            assert list(it.failures) == [(1, 100)]
            assert it.failures[1, 100].cause == "signal"
            assert "SIGABRT" in it.failures[1, 100].message
            assert "the licence expired" in it.failures[1, 100].message

    drive(scenario)


def test_a_service_that_stops_listening_fails_the_line_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ekiden.worker.lane.LEAVE_S", 0.05)
    script = """
import os, sys, time
for line in sys.stdin:
    if "bad" in line:
        os.close(0)
        os.close(1)
        time.sleep(600)
    print(line, end="", flush=True)
"""

    async def scenario() -> None:
        async with service(tmp_path, script) as it:
            it.send(1, [b'"good"', b'"bad"'])
            await it.until(lambda: it.settled == 2)

            assert "it closed its end of the conversation" in it.failures[1, 1].message

    drive(scenario)


def test_a_program_that_is_not_there_fails_what_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, ["/no/such/program"]) as it:
            it.send(1, [b"1", b"2"])
            await it.until(lambda: it.settled == 2)

            assert {failure.cause for failure in it.failures.values()} == {"cannot_start"}
            assert "it could not be started" in it.failures[1, 0].message

    drive(scenario)


def test_a_service_that_ends_at_once_could_not_start(tmp_path: Path) -> None:
    script = "import sys; print('no licence', file=sys.stderr); sys.exit(7)"

    async def scenario() -> None:
        async with service(tmp_path, script) as it:
            it.send(1, [b"1"])
            await it.until(lambda: it.settled)

            assert it.failures[1, 0].cause == "cannot_start"
            assert "it exited with code 7" in it.failures[1, 0].message
            assert "no licence" in it.failures[1, 0].message

    drive(scenario)


def test_a_service_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    script = "import time; time.sleep(600)"

    async def scenario() -> None:
        async with service(tmp_path, script, ready=True, start_timeout_s=0.1) as it:
            it.send(1, [b"1"])
            await it.until(lambda: it.settled)

            assert it.failures[1, 0].cause == "cannot_start"
            assert "it was not ready within 0.1 s" in it.failures[1, 0].message

    drive(scenario)


# ------------------------------------------------------------------ ending, replacing, health


def test_a_cancelled_line_ends_the_service_and_the_next_gets_a_fresh_one(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, sys, time
print('{{"ekiden": "ready"}}', flush=True)
for line in sys.stdin:
    if "slow" in line:
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
        time.sleep(600)
    print(line, end="", flush=True)
"""

    async def scenario() -> None:
        async with service(tmp_path / "scratch", script) as it:
            it.send(1, [b'"slow"', b'"next"'])
            await it.until(lambda: it.started == [(1, 0)])

            it.abort(1, [0], "cancel")
            await it.until(lambda: it.settled)

            assert it.gone == [(1, 0)]
            assert it.outputs == {(1, 1): b'"next"'}
            assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))

    drive(scenario)


def test_a_service_is_replaced_after_so_many_lines(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, PID, recycle_jobs=10) as it:
            for grant in range(1, 4):
                it.send(grant, [b"1"] * 10)
                wanted = 10 * grant
                await it.until(lambda wanted=wanted: it.settled == wanted)  # type: ignore[misc]

            assert len(set(it.outputs.values())) >= 2
            assert it.failures == {}

    drive(scenario)


def test_an_idle_service_that_does_not_answer_is_replaced(tmp_path: Path) -> None:
    script = """
import os, sys, time
for line in sys.stdin:
    if "health" in line:
        if os.path.exists("sick"):
            time.sleep(600)
        print('"well"', flush=True)
    else:
        open("sick", "w").close()
        print(os.getpid(), flush=True)
"""

    async def scenario() -> None:
        often = {"health_every_s": 0.02, "health_timeout_s": 0.1}
        async with service(tmp_path, script, 1, health='"health"', **often) as it:
            it.send(1, [b"1"])
            await it.until(lambda: it.settled == 1)
            first = int(it.outputs[1, 0])
            while psutil.pid_exists(first):
                await watch_looks()
            it.send(2, [b"1"])
            await it.until(lambda: it.settled == 2)

            assert int(it.outputs[2, 0]) != first

    drive(scenario)


def test_an_idle_service_that_answers_is_kept(tmp_path: Path) -> None:
    script = """
import os, sys
seen = 0
for line in sys.stdin:
    if "health" in line:
        seen += 1
        print('"well"', flush=True)
    else:
        print(f'[{os.getpid()}, {seen}]', flush=True)
"""

    async def scenario() -> None:
        async with service(tmp_path, script, health='"health"', health_every_s=0.01) as it:
            found: list[list[int]] = []
            while not found or found[-1][1] < 5:
                it.send(len(found) + 1, [b"1"])
                await it.until(lambda: len(it.outputs) > len(found))
                found.append(json.loads(it.outputs[len(found) + 1, 0]))
                for _ in range(20):
                    await watch_looks()

            assert len({pid for pid, _ in found}) == 1

    drive(scenario)


def test_closing_leaves_no_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, PID) as it:
            it.send(1, [b"1"])
            await it.until(lambda: it.settled)
            pid = int(it.outputs[1, 0])

        assert not psutil.pid_exists(pid)

    drive(scenario)


# ------------------------------------------------------------------ the examples


def test_the_example_in_python_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        command = [sys.executable, str(EXAMPLES / "echo_service.py")]
        async with service(tmp_path, command) as it:
            it.send(1, [b'{"x": 2}', b'{"fail": "too bad"}'])
            await it.until(lambda: it.settled == 2)

            assert json.loads(it.outputs[1, 0]) == {"echo": {"x": 2}, "answered": 1}
            assert it.failures[1, 1].message == "too bad"

    drive(scenario)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_example_in_c_serves(tmp_path: Path) -> None:
    program = tmp_path / "echo_service"
    source = EXAMPLES / "echo_service.c"
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True)

    async def scenario() -> None:
        async with service(tmp_path / "scratch", [str(program)], slots=2) as it:
            it.send(1, [b'{"x": %d}' % at for at in range(250)])
            await it.until(lambda: it.settled == 250)

            assert it.outputs[1, 249] == b'{"echo": {"x": 249}}'

    drive(scenario)


def test_a_command_by_relative_path_means_the_same_in_the_services_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        command = [os.path.basename(sys.executable), "echo.py"]
        async with service(tmp_path / "scratch", command) as it:
            it.send(1, [b"1"])
            await it.until(lambda: it.settled)

            assert it.outputs == {(1, 0): b"1"}

    drive(scenario)
