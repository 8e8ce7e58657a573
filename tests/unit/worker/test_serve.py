"""A worker on a real socket, in a thread, on a user's loop and as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.worker.conversation import an_assign
from tests.unit.worker.small_broker import DEADLINE_S, KEY, SmallBroker

from ekiden.errors import BadId, BadSubject, Unauthenticated, Unreachable, WrongUsage
from ekiden.wire.messages import AckRun, Credit
from ekiden.worker.handlers import Job
from ekiden.worker.serve import Worker, load_handlers

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture
def broker() -> Iterator[SmallBroker]:
    with SmallBroker() as made:
        yield made


def a_worker(broker: SmallBroker, **options: object) -> Worker:
    worker = Worker(broker.address, 2, worker_id="w1", key=KEY, **options)  # type: ignore[arg-type]
    worker.handler("job.assign.echo")(lambda job: job.payload)
    return worker


# ------------------------------------------------------------------ in the background


def test_a_started_worker_joins_runs_and_leaves(broker: SmallBroker) -> None:
    worker = a_worker(broker, labels={"gpu": "a100"})

    with worker:
        worker.wait_joined()
        join = broker.wait_joined()
        broker.assign(an_assign(1))
        ack = broker.wait_ack()

    assert (join.patterns, join.slots, join.credit) == (["job.assign.echo"], 2, 4)
    assert join.labels == {"gpu": "a100"}
    assert join.cpu_milli > 0
    assert join.mem_mb > 0
    assert ack.runs == [AckRun(1, None, [b"g1o0"])]


def test_a_worker_announces_the_subjects_it_was_given(broker: SmallBroker) -> None:
    with a_worker(broker, subjects=["render.>"]):
        assert broker.wait_joined().patterns == ["render.>"]


def test_a_wrong_key_is_told_to_whoever_waits(broker: SmallBroker) -> None:
    worker = Worker(broker.address, 1, key=b"wrong" * 6 + b"!!")
    worker.handler("a")(lambda _: b"")
    worker.start()

    with pytest.raises(Unauthenticated):
        worker.wait_joined(DEADLINE_S)
    worker.stop()


def test_a_worker_without_a_broker_says_so_and_can_be_stopped() -> None:
    worker = Worker("127.0.0.1:1", 1, key=KEY)
    worker.handler("a")(lambda _: b"")
    worker.start()

    with pytest.raises(Unreachable):
        worker.wait_joined(0.05)
    worker.stop()


def test_stopping_waits_for_what_has_begun(broker: SmallBroker) -> None:
    inside, release = threading.Event(), threading.Event()
    worker = Worker(broker.address, 1, key=KEY)

    @worker.handler("job.assign.echo")
    def handler(_: Job) -> str:
        inside.set()
        assert release.wait(DEADLINE_S)
        return "finished"

    worker.start()
    broker.wait_joined()
    broker.assign(an_assign(1))
    assert inside.wait(DEADLINE_S)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    release.set()
    stopper.join(DEADLINE_S)

    assert broker.wait_ack().runs == [AckRun(1, None, [b"finished"])]


def test_async_handlers_of_serve_run_on_the_users_loop(broker: SmallBroker) -> None:
    async def scenario() -> None:
        mine = asyncio.get_running_loop()
        worker = Worker(broker.address, 1, key=KEY)

        @worker.handler("job.assign.echo")
        async def handler(_: Job) -> str:
            worker.drain("enough")
            return str(asyncio.get_running_loop() is mine)

        serving = asyncio.create_task(worker.serve())
        await asyncio.to_thread(broker.wait_joined)
        broker.assign(an_assign(1))
        async with asyncio.timeout(DEADLINE_S):
            await serving

    asyncio.run(scenario())
    assert broker.wait_ack().runs == [AckRun(1, None, [b"True"])]


def test_cancelling_serve_ends_it_at_once(broker: SmallBroker) -> None:
    async def scenario() -> None:
        worker = a_worker(broker)
        serving = asyncio.create_task(worker.serve())
        await asyncio.to_thread(broker.wait_joined)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        worker.start()  # It can be used again.
        worker.stop()

    asyncio.run(scenario())


# ------------------------------------------------------------------ as a process


SCRIPT = """
import sys, time
from ekiden.worker.serve import Worker

worker = Worker(sys.argv[1], 1, key=b"k" * 32)

@worker.handler("job.assign.echo")
def nap(job):
    time.sleep(float(sys.argv[2]))
    return b"awake"

sys.exit(worker.run())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def spawn(script: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, str(script), *arguments], env=environment, stderr=subprocess.PIPE
    )


def wait_begun(broker: SmallBroker) -> None:
    """Until a beat names something as running: a later attempt is announced as it begins."""
    while not getattr(broker.said.get(timeout=DEADLINE_S), "running", []):
        pass


posix_only = pytest.mark.skipif(os.name != "posix", reason="signals")


@posix_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_worker_finish(
    broker: SmallBroker, script: Path, number: signal.Signals
) -> None:
    with spawn(script, broker.address, "0.2") as process:
        broker.wait_joined()
        broker.assign(an_assign(1, attempts=[2]))
        wait_begun(broker)
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
    assert broker.wait_ack().runs == [AckRun(1, None, [b"awake"])]


@posix_only
def test_a_second_signal_ends_the_worker_at_once(broker: SmallBroker, script: Path) -> None:
    with spawn(script, broker.address, "3600") as process:
        broker.wait_joined()
        broker.assign(an_assign(1, attempts=[2]))
        wait_begun(broker)
        process.send_signal(signal.SIGTERM)
        while broker.said.get(timeout=DEADLINE_S) != Credit(0):
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_a_refused_worker_exits_with_4_and_a_sentence(broker: SmallBroker, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace('b"k" * 32', 'b"z" * 32'))
    with spawn(path, broker.address, "0") as process:
        assert process.wait(DEADLINE_S) == 4
        assert process.stderr is not None
        assert b"does not know the key" in process.stderr.read()


def test_the_worker_imports_where_posix_modules_do_not_exist() -> None:
    program = textwrap.dedent(
        """
        import sys
        for name in ("fcntl", "resource", "pwd", "grp", "termios"):
            sys.modules[name] = None
        import ekiden.worker.serve, ekiden.worker.builtin, ekiden.worker.hardware
        """
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


# ------------------------------------------------------------------ usage


def test_a_worker_without_handlers_does_not_start() -> None:
    with pytest.raises(WrongUsage):
        Worker("a:1").start()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"address": "nonsense"}, WrongUsage),
        ({"slots": 0}, WrongUsage),
        ({"worker_id": "a b"}, BadId),
        ({"subjects": ["a..b"]}, BadSubject),
        ({"labels": {"": "x"}}, WrongUsage),
        ({"labels": {str(n): "x" for n in range(33)}}, WrongUsage),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, object], error: type) -> None:
    with pytest.raises(error):
        Worker(**options)  # type: ignore[arg-type]


def test_handlers_cannot_be_added_while_serving(broker: SmallBroker) -> None:
    with a_worker(broker) as worker, pytest.raises(WrongUsage):
        worker.handler("more")


HANDLERS = """
import ekiden.worker.serve as serve

mine = serve.Worker()

@mine.handler("job.assign.mine")
def work(job):
    return b""

empty = serve.Worker()
"""


@pytest.mark.parametrize("reference", ["{file}:mine", "{module}:mine"])
def test_handlers_are_loaded_from_files_and_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    name = f"handlers_{'file' if 'file' in reference else 'module'}"
    (tmp_path / f"{name}.py").write_text(HANDLERS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)

    found = load_handlers(reference.format(file=tmp_path / f"{name}.py", module=name))

    assert found.patterns == ["job.assign.mine"]
    worker = Worker()
    worker.include(found)
    assert worker.patterns == ["job.assign.mine"]


@pytest.mark.parametrize(
    "reference", ["no.such.module:worker", "no_such_file.py", "{file}:nothing", "{file}:empty"]
)
def test_what_cannot_be_loaded_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    path = tmp_path / "handlers_bad.py"
    path.write_text(HANDLERS)
    monkeypatch.setattr(sys, "path", list(sys.path))

    with pytest.raises(WrongUsage):
        load_handlers(reference.format(file=path))
