"""SIGKILL among real work: programs, functions and services, and whoever takes part in them.

Two workers, each with its keeper, runners and service children, work for one client while a seeded
dice picks who dies next. EKIDEN_KILLS sets how often (`make chaos` asks for 50), EKIDEN_DICE the
seed. Every answer follows from its own job, so a mix-up is seen; some go through the store.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.processes import EKIDEN, Child, Site, until, wait_workers

import ekiden
from ekiden.cli.chronicle import lines
from ekiden.client.programs import ProgramArgs
from ekiden.limits import NS
from ekiden.world.disk import FolderStorage

KILLS = max(1, int(os.environ.get("EKIDEN_KILLS", "20")))
SEED = int(os.environ.get("EKIDEN_DICE", "20"))
JOBS = 2_000
BATCH = 30
LARGE = 100_000
WORKERS = ("w1", "w2")

BROKER = {
    "silence_ns": NS, "heartbeat_ns": NS // 5, "rejoin_grace_ns": NS // 2,
    # The deaths here are the dice's doing: no job is to blame for what it was hit by.
    "settings": {"lost_workers_max": 1000, "backoff_first_ns": NS // 10, "backoff_max_ns": NS},
}  # fmt: skip
TERMS: ekiden.JobOptions = {
    "max_attempts": 100, "retry_on": ("worker_lost", "signal", "cannot_start"),
}  # fmt: skip

# `program N SIZE`: SIZE bytes that follow from N to the file "answer", or to stdout if there is an
# argument more; without SIZE, N and all of stdin. It leaves a process behind, too.
PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
    long n = atol(argv[1]), size = atol(argv[2]);
    FILE *to = stdout;
    int c;
    if (n % 5 == 0 && fork() == 0) { setsid(); for (;;) pause(); }
    usleep(4000);
    if (size && argc == 3) to = fopen("answer", "w");
    for (long at = 0; at < size; at++) fputc('a' + (n + at) % 26, to);
    printf("%ld ", n);
    while ((c = getchar()) != EOF) putchar(c);
    return 0;
}
"""

SERVICE = """
import json, sys, time
for line in sys.stdin:
    n = json.loads(line)["n"]
    time.sleep(0.003)
    print(json.dumps({"n": n, "text": str(n) * (40_000 if n % 40 == 0 else 1)}), flush=True)
"""


def text_of(number: int, size: int) -> bytes:
    alphabet = bytes(range(97, 123)) * 2
    start = number % 26
    return (alphabet[start : start + 26] * (size // 26 + 1))[:size]


# ------------------------------------------------------------------ jobs and their answers


class Load:
    """Jobs of three kinds, JOBS at least and more until `finish`; never more than JOBS open."""

    def __init__(self, client: ekiden.Client, large: Path) -> None:
        self.futures: list[tuple[int, str, Any]] = []
        self._client = client
        self._large = large
        self._large_digest = hashlib.sha256(large.read_bytes()).hexdigest()
        self._settled = 0
        self._finishing = threading.Event()
        self._trouble: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def settled(self) -> int:
        """How many, without a gap, have their outcome."""
        while self._settled < len(self.futures) and self.futures[self._settled][2].done():
            self._settled += 1
        return self._settled

    def has_settled(self, count: int) -> bool:
        return self.settled >= count

    def _run(self) -> None:
        try:
            while len(self.futures) < JOBS or not self._finishing.is_set():
                if len(self.futures) - self.settled >= JOBS:
                    time.sleep(0.005)
                else:
                    self._submit(len(self.futures))
        except BaseException as error:
            self._trouble = error

    def _submit(self, first: int) -> None:
        numbers = range(first, first + BATCH)
        programs, functions, services = (list(numbers[at::3]) for at in range(3))
        made: dict[int, tuple[str, Any]] = {}
        calls = [self._program(n) for n in programs]
        some = self._client.submit_programs("work", calls, **TERMS)
        made |= {n: ("program", each) for n, each in zip(programs, some, strict=True)}
        for n in functions:
            made[n] = "function", self._client.call_with(TERMS, call, n)
        some = self._client.submit_many("echo", [{"n": n} for n in services], **TERMS)
        made |= {n: ("service", each) for n, each in zip(services, some, strict=True)}
        self.futures += [(n, *made[n]) for n in numbers]

    def _program(self, n: int) -> ProgramArgs:
        match n % 10:
            case 1:
                return ProgramArgs([n, LARGE])
            case 2:
                return ProgramArgs([n, LARGE, "stdout"])
            case 3:
                return ProgramArgs([n, 300], stdin="small", files={"in/put": b"input"})
            case 4 if n % 40 == 4:
                return ProgramArgs([n, 0], stdin=self._large)
            case _:
                return ProgramArgs([n, 0], stdin=f"job {n}")

    def finish(self, timeout_s: float = 60.0) -> list[str]:
        """Wait for every job to end with the answer to its own input; their ids."""
        self._finishing.set()
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"only {len(self.futures)} jobs were handed over"
        if self._trouble is not None:
            raise self._trouble
        _, missing = wait([each[2] for each in self.futures], timeout_s)
        assert not missing, f"{len(missing)} jobs have no outcome, as {next(iter(missing))!r}"
        for n, kind, future in self.futures:
            check = {"program": self._check_program, "function": check_call, "service": check_echo}
            check[kind](n, future.result(30))
        return [future.job_id for _, _, future in self.futures]

    def _check_program(self, n: int, result: Any) -> None:
        files = {name: file.read() for name, file in result.files.items()}
        match n % 10:
            case 1:
                assert (result.stdout, files) == (b"%d " % n, {"answer": text_of(n, LARGE)})
            case 2:
                assert result.stdout == text_of(n, LARGE) + b"%d " % n
                assert files == {}
            case 3:
                assert (result.stdout, files) == (b"%d small" % n, {"answer": text_of(n, 300)})
            case 4 if n % 40 == 4:
                said, _, rest = result.stdout.partition(b" ")
                assert (said, files) == (b"%d" % n, {})
                assert hashlib.sha256(rest).hexdigest() == self._large_digest
            case _:
                assert (result.stdout, files) == (b"%d job %d" % (n, n), {})


def call(n: int) -> tuple[int, bytes]:
    time.sleep(0.003)
    return n * n, b"%d," % n * (20_000 if n % 25 == 0 else 1)


# By value: no worker can import this module.
call.__module__ = "__main__"


def check_call(n: int, value: Any) -> None:
    assert value == (n * n, b"%d," % n * (20_000 if n % 25 == 0 else 1))


def check_echo(n: int, result: Any) -> None:
    assert result.json() == {"n": n, "text": str(n) * (40_000 if n % 40 == 0 else 1)}


# ------------------------------------------------------------------ who may die


class Fleet:
    """A broker and two workers, and the dice."""

    def __init__(self, site: Site, program: Path, service: Path) -> None:
        self.site = site
        self._offers = [
            f"--exec=work={program}", "--functions", f"--service=echo={sys.executable} {service}",
        ]  # fmt: skip
        self._service = str(service)
        self._agents: dict[str, Child] = {}
        site.start_broker(config=BROKER)
        for name in WORKERS:
            self._start(name)

    def _start(self, name: str) -> None:
        command = [*EKIDEN, "worker", "--connect", self.site.address, "--id", name, "--json"]
        folder = self.scratch_of(name)
        words = ["--slots", "2", "--scratch", str(folder), *self._offers]
        self._agents[name] = self.site.start([*command, *words], f"worker-{name}")

    def scratch_of(self, name: str) -> Path:
        return self.site.folder / f"scratch-{name}"

    def kill(self, kind: str, name: str) -> None:
        """Kill one of a kind, as soon as there is one, and start again what nobody else does."""
        match kind:
            case "broker":
                self.site.broker.kill()
                self.site.start_broker(config=BROKER)
            case "agent":
                self._agents[name].kill()
                self._start(name)
            case _:
                words = {"keeper": "ekiden.worker.keeper", "runner": "ekiden.worker.runner"}
                word = words.get(kind, self._service)
                until(lambda: self._kill_below(name, word), f"a {kind} to kill at {name}")

    def _kill_below(self, name: str, word: str) -> bool:
        try:
            agent = psutil.Process(self._agents[name].pid)
            found = [p for p in agent.children(recursive=True) if word in p.cmdline()]
            if found:
                found[0].kill()
            return bool(found)
        except psutil.Error:
            return False  # Somebody ended meanwhile.

    def stop(self) -> None:
        for agent in self._agents.values():
            assert agent.alive, agent.logged()
        for agent in self._agents.values():
            assert agent.terminate() == 0
        assert self.site.broker.terminate() == 0

    def logged(self) -> str:
        return "".join(path.read_text() for path in sorted(self.site.folder.glob("*.log")))


def touching(folder: Path) -> Iterator[tuple[int, str]]:
    """Processes, but for this one, that run in a folder, hold a file of it open, or name it."""
    for process in psutil.process_iter():
        where = f"/proc/{process.pid}"
        try:
            links = [f"{where}/cwd", *(f"{where}/fd/{fd}" for fd in os.listdir(f"{where}/fd"))]
            held = [os.readlink(link) for link in links]
            named = str(folder).encode() in Path(where, "environ").read_bytes()
        except OSError:
            continue  # It has ended, or is a zombie.
        if process.pid != os.getpid() and (named or any(str(folder) in at for at in held)):
            yield process.pid, " ".join(process.cmdline())


def throws(kills: int) -> Iterator[tuple[str, str]]:
    """Who dies, and of which worker: everybody in turn, in an order that the dice makes."""
    dice = random.Random(SEED)
    kinds: list[str] = []
    for _ in range(kills):
        if not kinds:
            kinds = ["broker", "agent", "keeper", "runner", "service"]
            dice.shuffle(kinds)
        yield kinds.pop(), dice.choice(WORKERS)


def check_history(site: Site, ids: list[str]) -> None:
    """Every job has exactly one end, and that is a result."""
    assert site.run("log", "verify", str(site.data), "--json").json["ok"]
    ends: Counter[tuple[str, str]] = Counter()
    for line in lines(FolderStorage(site.data)):
        if line["event"] in ("ack", "dlq", "cancel", "expire"):
            ends[line["event"], line["job"]] += 1
    assert ends == Counter(("ack", job_id) for job_id in ids)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    (folder / "work.c").write_text(PROGRAM)
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed: apt-get install gcc"
    subprocess.run(
        [compiler, "-O1", "-o", str(folder / "work"), str(folder / "work.c")], check=True
    )
    return folder / "work"


@pytest.mark.slow
@pytest.mark.timeout(120 + KILLS * 15)
def test_no_kill_among_real_work_loses_mixes_up_or_leaves_behind_anything(
    site: Site, program: Path
) -> None:
    service, large = site.folder / "echo.py", site.folder / "large"
    service.write_text(SERVICE)
    large.write_bytes(random.Random(1).randbytes(300_000))
    fleet = Fleet(site, program, service)
    client = site.client()
    wait_workers(client, 2)
    load = Load(client, large)

    for kind, name in throws(KILLS):
        point = load.settled + JOBS // 20
        until(partial(load.has_settled, point), f"{point} results before the {kind} dies", 60)
        fleet.kill(kind, name)
    ids = load.finish()
    fleet.stop()

    assert list(touching(site.folder)) == []
    for name in WORKERS:
        assert [path.name for path in fleet.scratch_of(name).iterdir()] == ["lock"]
    check_history(site, ids)
    assert "Traceback" not in fleet.logged()
    # A worker that was paused was blamed for what the dice did.
    assert "worker.quarantined" not in fleet.logged()
