"""Programs, functions and handlers that use cached data: by path, by link, whatever others did."""

# Files are looked at between turns of a loop that serves nobody else.
# ruff: noqa: ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.worker.cached_data import Data, DataStore
from tests.unit.worker.nursery import DEADLINE_S, on_a_loop
from tests.unit.worker.small_broker import KEY, SmallBroker

from ekiden import limits
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import FORM_PROGRAM, Route, Spec
from ekiden.model.work import FileRef, Program, ProgramCall, ProgramOutput
from ekiden.wire.frames import encode_frame
from ekiden.wire.messages import (
    AssignRun,
    BlobPart,
    BlobPull,
    CacheAck,
    CacheOffer,
    Failure,
    Message,
)
from ekiden.worker.cache_folder import CacheFolder
from ekiden.worker.cached import ENV_CACHE, cache_folder
from ekiden.worker.caches import Caches
from ekiden.worker.children import Children
from ekiden.worker.gate import Gate
from ekiden.worker.handlers import Job
from ekiden.worker.machine import Run, RunFinished
from ekiden.worker.offers import Offers
from ekiden.worker.programs import ProgramConfig, ProgramExecutor
from ekiden.worker.serve import Worker
from ekiden.worker.store import Stored

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")

DATA = Data("rates-1", {"eu/curve.csv": b"eu 1\n", "us.csv": b"us 2\n", "go": b"#!/bin/sh\necho ran $1\n"},
            large=("us.csv",), executable=("go",))  # fmt: skip
ANY = ProgramConfig(any_program=True)


class Store(DataStore):
    async def put(self, source: Path | bytes) -> Stored:
        data = source if isinstance(source, bytes) else source.read_bytes()
        blob = Data("n", {"n": data}, large=("n",))
        self.add(blob)
        (only,) = [name for name, kept in blob.blobs.items() if kept == data]
        return Stored(only, len(data))


class Bench:
    """Programs behind a gate, with caches beside them."""

    def __init__(self, children: Children, caches: Caches, store: Store) -> None:
        self.events: list[Any] = []
        self.caches = caches
        self.store = store
        self.children = children
        self.gate = Gate(self._heard, caches)
        self._changed = asyncio.Event()
        self._grants = itertools.count(1)

    def _heard(self, event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def sh(
        self,
        script: str,
        *files: FileRef,
        stdin: FileRef | None = None,
        caches: tuple[CacheUse, ...] = (DATA.use,),
        command: str = "sh",
        **program: Any,
    ) -> ProgramOutput | Failure:
        grant = next(self._grants)
        made = Program(command, True, **program)
        args = ["-c", script] if command == "sh" else [script]
        call = ProgramCall(args, stdin, list(files))
        shared = msgspec.msgpack.encode(made)
        spec = Spec("it", Route("job.program.it"), form=FORM_PROGRAM, shared=shared, caches=caches)
        body = msgspec.msgpack.encode(call)
        self.gate.run(Run(AssignRun(grant, 0, msgspec.Raw(), "ci", [f"g{grant}"], [body]), spec))
        async with asyncio.timeout(DEADLINE_S):
            while not (event := self.finished(grant)):
                self._changed.clear()
                await self._changed.wait()
        if event.failures:
            return event.failures[0]
        return msgspec.msgpack.decode(event.outputs[0], type=ProgramOutput)

    def finished(self, grant: int) -> RunFinished | None:
        found = [e for e in self.events if isinstance(e, RunFinished) and e.grant == grant]
        return found[0] if found else None


@contextlib.asynccontextmanager
async def bench(folder: Path, config: ProgramConfig = ANY) -> AsyncIterator[Bench]:
    store = Store(DATA)

    def claim() -> CacheFolder:
        found = CacheFolder(folder / "state" / "caches", 1 << 30)
        assert found.claim()
        return found

    caches = Caches(store, lambda said: None, claim, pauses_s=())
    await caches.start()
    env = {ENV_CACHE: caches.trees}
    children = Children(folder / "scratch", loop=asyncio.get_running_loop(), env=env)
    await children.start()
    it = Bench(children, caches, store)
    it.gate.open(
        ProgramExecutor(config, 2, it.gate.heard, children, store, trees=caches.trees)  # type: ignore[arg-type]
    )
    try:
        yield it
    finally:
        it.gate.close()
        caches.close()
        children.close()


def from_cache(name: str, path: str, **more: Any) -> FileRef:
    return FileRef(name, len(DATA.files.get(path, b"")), None, cache="rates-1", path=path, **more)


SANDBOXED = pytest.param(
    "bwrap",
    marks=pytest.mark.skipif(
        shutil.which("bwrap") is None and "CI" not in os.environ, reason="no bubblewrap here"
    ),
)


@pytest.mark.parametrize("sandbox", ["", SANDBOXED])
@on_a_loop
async def test_a_program_reads_cached_data_by_path_by_link_and_on_stdin(
    tmp_path: Path, sandbox: str
) -> None:
    config = ProgramConfig(any_program=True, sandbox=sandbox, hidden=(str(tmp_path / "state"),))
    async with bench(tmp_path, config) as it:
        output = await it.sh(
            "cat $EKIDEN_CACHE/rates-1/eu/curve.csv in/us.csv -; test -L in/us.csv && echo a link",
            from_cache("in/us.csv", "us.csv"),
            stdin=from_cache("stdin", "us.csv"),
        )

        assert isinstance(output, ProgramOutput), output
        assert output.stdout.data == b"eu 1\nus 2\nus 2\na link\n"
        assert output.stderr.data == b""
        assert output.files == []  # what was linked is not brought back


@on_a_loop
async def test_a_program_may_itself_come_from_a_cache(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        output = await it.sh("now", command="./go", files=(from_cache("go", "go"),))

        assert isinstance(output, ProgramOutput), output
        assert output.stdout.data == b"ran now\n"


@on_a_loop
async def test_what_one_job_does_to_cached_data_does_not_reach_the_next(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.sh(
            "cd $EKIDEN_CACHE/rates-1; chmod u+w us.csv eu; echo XX > us.csv; touch eu/more"
        )
        await it.sh("chmod u+w us.csv; printf 'XX 2\\n' 1<> us.csv", from_cache("us.csv", "us.csv"))

        output = await it.sh("cd $EKIDEN_CACHE/rates-1; cat us.csv; ls eu")

        assert isinstance(output, ProgramOutput), output
        assert output.stdout.data == b"us 2\ncurve.csv\n"


@pytest.mark.parametrize(
    ("file", "caches", "words"),
    [
        (from_cache("x", "not.csv"), (DATA.use,), "the cache 'rates-1' with a file 'not.csv'"),
        (from_cache("x", "us.csv"), (), "name that cache among those of the job"),
        (FileRef("x", 1, None, cache="../..", path="x"), (), "'../..'"),
        (from_cache("x", "../../x"), (DATA.use,), "'../../x'"),
        (from_cache("x", "us.csv"), (CacheUse("rates-1", "0" * 64, 9),), "cannot be had here"),
    ],
)
@on_a_loop
async def test_what_is_in_no_cache_cannot_start_the_job(
    tmp_path: Path, file: FileRef, caches: tuple[CacheUse, ...], words: str
) -> None:
    async with bench(tmp_path) as it:
        failure = await it.sh("cat x", file, caches=caches)

        assert isinstance(failure, Failure)
        assert failure.cause == "cannot_start"
        assert words in failure.message


@on_a_loop
async def test_a_result_names_the_blobs_it_refers_to(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        size = limits.INLINE_FILE_BYTES + 1
        output = await it.sh(f"head -c {size} /dev/zero > out; echo small > more", caches=())

        assert isinstance(output, ProgramOutput), output
        (large,) = [file for file in output.files if file.data is None]
        event = it.finished(1)
        assert event is not None
        assert event.blobs == {0: [(large.blob, size)]}


# ------------------------------------------------------------------ a whole worker


class BlobBroker(SmallBroker):
    """Gives out the blobs of a cache."""

    def _hear(self, peer: Any, msg_id: int, message: Message) -> None:
        if isinstance(message, BlobPull):
            data = DATA.blobs[message.blob]
            part = data[message.offset : message.offset + message.length]
            answer = BlobPart(message.blob, message.offset, part, len(data))
            peer.sendall(encode_frame(answer, 0, msg_id))
        else:
            super()._hear(peer, msg_id, message)

    def wait_said(self, wanted: Callable[[Message], bool]) -> Message:
        while not wanted(message := self.said.get(timeout=DEADLINE_S)):
            pass
        return message


def test_a_worker_with_handlers_alone_uses_caches_and_forgets_them_when_told(
    tmp_path: Path,
) -> None:
    offers = Offers(cache=tmp_path / "c", cache_bytes=1 << 20)
    with BlobBroker() as broker:
        worker = Worker(broker.address, 1, worker_id="w1", key=KEY, offers=offers)

        @worker.handler("job.assign.read")
        def read(job: Job) -> bytes:
            return cache_folder("rates-1").joinpath("us.csv").read_bytes()

        with worker:
            broker.wait_joined()
            broker.send(CacheOffer([DATA.use], True))
            ok = broker.wait_said(lambda m: isinstance(m, CacheAck) and m.status != "fetching")
            assert ok == CacheAck("rates-1", DATA.use.manifest, "ok")

            spec = Spec("read", Route("job.assign.read"), caches=(DATA.use,))
            encoded = msgspec.Raw(msgspec.msgpack.encode(spec))
            broker.assign(AssignRun(1, 0, encoded, "ci", ["a"], [b""]))
            assert broker.wait_ack().runs[0].outputs == [b"us 2\n"]

            broker.send(CacheOffer([], True))
            end = time.monotonic() + DEADLINE_S
            while any((tmp_path / "c/trees").iterdir()):
                assert time.monotonic() < end
                time.sleep(0.005)
            broker.assign(AssignRun(2, 0, encoded, "ci", ["c"], [b""]))
            assert broker.wait_ack().runs[0].outputs == [b"us 2\n"]  # brought once more
