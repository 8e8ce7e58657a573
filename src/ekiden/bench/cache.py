"""Data shipped to workers: large files, many small ones, the same again, and who has to wait.

Large files are compared with the least that any way of doing it must do: read them, hash them and
write them down, once for each worker, in a process that does nothing else. Both take turns.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ekiden
from ekiden.bench import report
from ekiden.bench.grid import Grid
from ekiden.bench.load import NAME
from ekiden.bench.noop_worker import SUBJECT
from ekiden.bench.peers import PAYLOAD
from ekiden.bench.processes import Child, Crew
from ekiden.bench.work import add_agent

ROUND_TIMEOUT_S: Final = 300.0
START_TIMEOUT_S: Final = 60.0
WORKERS: Final = 4

# Goals, as set for two cores.
COPY_SHARE: Final = 1.7
SMALL_PER_S: Final = 5_000.0
AGAIN_SHARE: Final = 0.05
P99_SHARE: Final = 3.0
RSS_MB: Final = 100.0

LARGE_FILES: Final = 8
SMALL_FILES: Final = 10_000
SMALL_BYTES: Final = (200, 8_000)
_FOLDER_FILES: Final = 100
_BLOCK: Final = 1 << 20
_SEED: Final = 20261118
_PROBE_S: Final = 0.05

# Files that were written a moment ago are read again, in case they are written to still.
_AT_REST_S: Final = 3.0

Tell = Callable[[str], None]


def run(
    *,
    rounds: int = 3,
    large_mb: int = 1024,
    small_files: int = SMALL_FILES,
    giant_mb: int = 2048,
    probe_jobs: int = 1000,
    folder: Path | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Put data and measure; see the page beside the figures for what each of them means."""
    with Crew(folder=folder) as crew:
        facts = report.conditions(crew.folder)
        # A source, the broker's copy, the workers' and the plain copies: each is written once.
        report.touch_memory(crew.folder, (2 + 2 * WORKERS) * large_mb << 20)
        bench = _Bench(crew, tell)
        giant = bench.giant(giant_mb)  # first: what grew before would hide what this takes
        small = bench.small(rounds, small_files)
        large = bench.large(rounds, large_mb)
        waiting = bench.waiting(large_mb, probe_jobs)
    figures = {"large": large, "small": small, "waiting": waiting, "giant": giant}
    goals = [
        report.at_most(
            "large files to 4 workers by plain copies", large["by_copy"], COPY_SHARE, "×"
        ),
        report.at_least("small files", small["files_per_s"], SMALL_PER_S, "/s"),
        report.at_most("the same again, large", large["again"], AGAIN_SHARE, "×"),
        report.at_most("the same again, small", small["again"], AGAIN_SHARE, "×"),
        report.at_most("p99 of a job meanwhile by idle", waiting["p99_by_idle"], P99_SHARE, "×"),
        report.at_most("memory a large file costs a process", giant["most_mb"], RSS_MB, "MB"),
    ]
    return report.outline("cache", facts, figures, goals)


class _Bench:
    """A broker, four workers, somebody who puts and somebody who copies."""

    def __init__(self, crew: Crew, tell: Tell) -> None:
        self._crew = crew
        self._tell = tell
        self._grid = Grid(crew)
        self._workers: list[Child] = []
        for number in range(1, WORKERS + 1):
            # The first takes part in all of it, and alone in some of it.
            subjects = "job.assign.all,job.assign.one" if number == 1 else "job.assign.all"
            cache = str(crew.folder / f"cache{number}")
            self._workers.append(
                add_agent(crew, self._grid, 1, "--subjects", subjects, "--cache", cache)
            )
        self._putter = self._start("put", self._grid.address)
        self._copier = self._start("copy")
        self._dice = random.Random(_SEED)

    def _start(self, *words: str) -> Child:
        module = ("-m", "ekiden.bench.cache_load")
        child = self._crew.start_python(f"load-{words[0]}", *module, *words, talks=True)
        child.hear(START_TIMEOUT_S)
        return child

    # -------------------------------------------------------------- what is put

    def _put(self, cache: str, source: Path, target: str = "job.assign.all") -> dict[str, Any]:
        order = {"cache": cache, "source": str(source), "target": target}
        return self._putter.ask(order, ROUND_TIMEOUT_S)

    def _remove(self, *caches: str) -> None:
        with ekiden.Client(self._grid.address, client_id="bench-probe") as client:
            client.remove_cache(*caches)

    def _large_files(self, name: str, count: int, each_mb: int) -> Path:
        """Files of bytes that no other file has."""
        folder = self._crew.folder / name
        folder.mkdir()
        block = self._dice.randbytes(_BLOCK - 16)
        for number in range(count):
            with (folder / f"large{number}").open("wb", buffering=0) as file:
                for _ in range(each_mb):
                    file.write(self._dice.randbytes(16) + block)
        _settle()
        return folder

    def _small_files(self, name: str, count: int) -> Path:
        folder = self._crew.folder / name
        for number in range(count):
            if number % _FOLDER_FILES == 0:
                below = folder / f"part{number // _FOLDER_FILES:04}"
                below.mkdir(parents=True)
            size = self._dice.randint(*SMALL_BYTES)
            (below / f"file{number}").write_bytes(self._dice.randbytes(size))
        _settle()
        return folder

    # -------------------------------------------------------------- figures

    def large(self, rounds: int, mb: int) -> dict[str, Any]:
        """Large files to four workers, in turns with four plain copies."""
        puts, copies, again = [], [], []
        for number in range(1, rounds + 1):
            source = self._large_files(f"large{number}", LARGE_FILES, mb // LARGE_FILES)
            targets = [str(self._crew.folder / f"copy{n}") for n in range(WORKERS)]
            order = {"source": str(source), "targets": targets}
            copies.append(self._copier.ask(order, ROUND_TIMEOUT_S)["seconds"])
            for target in targets:
                shutil.rmtree(target)
            _settle()
            done = self._put(f"large{number}", source)
            assert done["reached"] == WORKERS, done
            puts.append(done["seconds"])
            again.append(self._put(f"large{number}", source)["seconds"] / done["seconds"])
            self._remove(f"large{number}")
            shutil.rmtree(source)
            self._tell(f"round {number}/{rounds}: put {puts[-1]:.2f} s, copies {copies[-1]:.2f} s")
        shares = [mine / other for mine, other in zip(puts, copies, strict=True)]
        return {
            "mb": mb,
            "put_s": [round(each, 2) for each in puts],
            "copy_s": [round(each, 2) for each in copies],
            "by_copy": round(statistics.median(shares), 2),
            "again": round(statistics.median(again), 3),
        }

    def small(self, rounds: int, count: int) -> dict[str, Any]:
        """Many small files in one put, to one worker and to four; then one of them changed.

        Nothing is removed before all is measured: a file system that has just removed very many
        files makes new ones at a fraction of its speed, for a while.
        """
        rates: dict[str, list[float]] = {"one": [], "all": []}
        again, changed = [], []
        sources = {
            (number, whom): self._small_files(f"small-{whom}{number}", count)
            for number in range(1, rounds + 1)
            for whom in rates
        }
        time.sleep(_AT_REST_S)
        for (number, whom), source in sources.items():
            done = self._put(source.name, source, f"job.assign.{whom}")
            rates[whom].append(count / done["seconds"])
            if whom == "all":
                repeat = self._put(source.name, source)
                again.append(repeat["seconds"] / done["seconds"])
                next(source.glob("*/*")).write_bytes(b"another")
                changed.append(self._put(f"{source.name}-next", source)["sent_bytes"])
                shown = ", ".join(f"to {to} {found[-1]:,.0f}/s" for to, found in rates.items())
                self._tell(f"round {number}/{rounds}: {count:,} small files {shown}")
        for source in sources.values():
            self._remove(source.name, f"{source.name}-next")
            shutil.rmtree(source)
        return {
            "files": count,
            "files_per_s": round(statistics.median(rates["all"])),
            "files_per_s_to_one": round(statistics.median(rates["one"])),
            "again": round(statistics.median(again), 3),
            "sent_bytes_when_one_changed": int(statistics.median(changed)),
        }

    def waiting(self, mb: int, jobs: int) -> dict[str, Any]:
        """How long a job takes while large files go up, and down to one worker."""
        self._grid.add_worker()
        source = self._large_files("waiting", LARGE_FILES, mb // LARGE_FILES)
        with ekiden.Client(self._grid.address, client_id="bench-probe") as client:
            _latencies(client, 300)
            idle = _latencies(client, jobs)
            busy: list[float] = []
            putting = threading.Thread(
                target=lambda: self._put("waiting", source, "job.assign.one")
            )
            putting.start()
            while putting.is_alive():
                busy += _latencies(client, 10)
            putting.join()
        self._remove("waiting")
        shutil.rmtree(source)
        p99 = {name: report.percentile(found, 0.99) for name, found in
               (("idle", idle), ("busy", busy))}  # fmt: skip
        self._tell(f"a job meanwhile: p99 {p99['busy']:.2f} ms, idle {p99['idle']:.2f} ms")
        return {
            "jobs": len(busy),
            "p50_idle_ms": round(report.percentile(idle, 0.5), 3),
            "p50_ms": round(report.percentile(busy, 0.5), 3),
            "p99_idle_ms": round(p99["idle"], 3),
            "p99_ms": round(p99["busy"], 3),
            "p99_by_idle": round(p99["busy"] / p99["idle"], 2),
        }

    def giant(self, mb: int) -> dict[str, Any]:
        """One file, and how much memory it takes on its way."""
        source = self._large_files("giant", 1, mb)
        hops = {"client": self._putter, "broker": self._grid.broker, "worker": self._workers[0]}
        before = {name: child.rss_bytes() for name, child in hops.items()}
        most = dict(before)
        putting = threading.Thread(
            target=lambda: self._put("giant", source, "job.assign.one"), daemon=True
        )
        putting.start()
        while putting.is_alive():
            time.sleep(_PROBE_S)
            for name, child in hops.items():
                most[name] = max(most[name], child.rss_bytes())
        self._remove("giant")
        grown = {name: round((most[name] - before[name]) / (1 << 20), 1) for name in hops}
        return {"mb": mb, "grown_mb": grown, "most_mb": max(grown.values())}


def _latencies(client: ekiden.Client, count: int) -> list[float]:
    """Milliseconds of jobs, one after another."""
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        client.submit(NAME, payload=PAYLOAD, subject=SUBJECT).result(60.0)
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken


def _settle() -> None:
    """What was written for the bench must not be written back during what is measured."""
    os.sync()
