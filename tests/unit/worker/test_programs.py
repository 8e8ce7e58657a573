"""Programs as jobs: real executables, their files, their failures told apart, their ends."""

# Files and processes are looked at between turns of a loop that serves nobody else.
# ruff: noqa: ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.worker.nursery import (
    DEADLINE_S,
    TREE,
    TREE_SIZE,
    alive,
    compiled,
    on_a_loop,
    pids_in,
    until,
    which,
)

from ekiden import limits
from ekiden.errors import UnknownJob, WrongUsage
from ekiden.model.jobs import FORM_PROGRAM, OUT_PROGRAM, Needs, Note, Route, Spec
from ekiden.model.work import FileRef, Program, ProgramCall, ProgramOutput
from ekiden.wire.messages import AssignRun, Failure
from ekiden.worker.children import Children
from ekiden.worker.machine import Abort, Dropped, Gone, Run, RunFinished, Started
from ekiden.worker.programs import Executable, Limits, ProgramConfig, ProgramExecutor
from ekiden.worker.store import Stored

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")

ANY = ProgramConfig(any_program=True)


@pytest.fixture(scope="session")
def hog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(Path(__file__).with_name("hog.c"), tmp_path_factory.mktemp("c") / "hog")


class FolderStore:
    """A store in a folder: files by their hash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        folder.mkdir()

    async def put(self, source: Path | bytes) -> Stored:
        data = source if isinstance(source, bytes) else source.read_bytes()
        blob = hashlib.sha256(data).hexdigest()
        (self.folder / blob).write_bytes(data)
        return Stored(blob, len(data))

    async def fetch(self, blob: str, size: int, target: Path) -> None:
        self.fetched.append(blob)
        try:
            shutil.copyfile(self.folder / blob, target)
        except FileNotFoundError:
            raise UnknownJob(f"no blob {blob} is kept") from None
        assert target.stat().st_size == size

    async def read(self, blob: str, size: int) -> bytes:
        return (self.folder / blob).read_bytes()

    def bytes_of(self, file: FileRef) -> bytes:
        return file.data if file.data is not None else (self.folder / file.blob).read_bytes()


class Bench:
    """An executor with a keeper, and everything it has said."""

    def __init__(self, folder: Path, config: ProgramConfig, slots: int) -> None:
        self.scratch = folder / "scratch"
        self.slots = slots
        self.config = config
        self.children = Children(
            self.scratch, loop=asyncio.get_running_loop(), limits=config.limits
        )
        self.store = FolderStore(folder / "store")
        self.events: list[Any] = []
        self._changed = asyncio.Event()
        self._grants = 0

    async def start(self) -> None:
        await self.children.start()
        self.executor = ProgramExecutor(
            self.config,
            self.slots,
            self._heard,
            self.children,
            self.store,
            asyncio.get_running_loop(),
        )

    def _heard(self, event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def run(
        self,
        program: Program | bytes,
        *calls: ProgramCall | bytes,
        mem_mb: int = 0,
        attempts: list[int] | None = None,
    ) -> int:
        """Ask for these; returns the grant."""
        self._grants += 1
        shared = program if isinstance(program, bytes) else msgspec.msgpack.encode(program)
        route = Route("job.assign.it", Needs(mem_mb=mem_mb))
        spec = Spec("it", route, form=FORM_PROGRAM, shared=shared)
        bodies = [c if isinstance(c, bytes) else msgspec.msgpack.encode(c) for c in calls]
        ids = [f"g{self._grants}o{at}" for at in range(len(calls))]
        run = AssignRun(self._grants, 0, msgspec.Raw(), "ci", ids, bodies, attempts or [])
        self.executor.run(Run(run, spec))
        return self._grants

    async def one(self, program: Program, call: ProgramCall | None = None, **how: Any) -> Any:
        """Run one attempt to its end: its `ProgramOutput`, or its `Failure`."""
        grant = self.run(program, call or ProgramCall(), **how)
        await self.until(lambda: (grant, 0) in self.outputs or (grant, 0) in self.failures)
        return self.outputs.get((grant, 0)) or self.failures[grant, 0]

    def any(self, *argv: str, **program: Any) -> tuple[Program, ProgramCall]:
        return Program(argv[0], True, **program), ProgramCall(list(argv[1:]))

    async def sh(self, script: str, *, stdin: Any = None, files: Any = (), **program: Any) -> Any:
        call = ProgramCall(["-c", script], stdin, list(files))
        mem_mb = program.pop("mem_mb", 0)
        return await self.one(Program("sh", True, **program), call, mem_mb=mem_mb)

    @property
    def outputs(self) -> dict[tuple[int, int], ProgramOutput]:
        found: dict[tuple[int, int], ProgramOutput] = {}
        for event in self._finished():
            for at, output in zip(event.offsets, event.outputs, strict=True):
                assert (event.grant, at) not in found, "told twice"
                found[event.grant, at] = msgspec.msgpack.decode(output, type=ProgramOutput)
        return found

    @property
    def notes(self) -> dict[tuple[int, int], Note]:
        return {(e.grant, at): note for e in self._finished() for at, note in e.notes.items()}

    @property
    def failures(self) -> dict[tuple[int, int], Failure]:
        return {(e.grant, f.offset): f for e in self._finished() for f in e.failures}

    def _finished(self) -> list[RunFinished]:
        return [event for event in self.events if isinstance(event, RunFinished)]

    def said(self, kind: type) -> list[tuple[int, int]]:
        return [(e.grant, at) for e in self.events if isinstance(e, kind) for at in e.offsets]

    @property
    def running(self) -> list[tuple[int, int]]:
        started = [event for event in self.events if isinstance(event, Started)]
        return [(grant, at) for event in started for grant, at, _ in event.attempts]

    def left(self) -> list[str]:
        """Folders of attempts that were made for them, or in which something lies."""
        folder = Path(self.children.folder)
        made = [path.name for path in folder.glob("a*")]
        return made + [path.name for path in folder.glob("r*/") if any(path.iterdir())]


@contextlib.asynccontextmanager
async def bench(folder: Path, config: ProgramConfig = ANY, slots: int = 2) -> AsyncIterator[Bench]:
    made = Bench(folder, config, slots)
    await made.start()
    try:
        yield made
    finally:
        made.executor.close()
        made.children.close()


def inline(name: str, data: bytes, **more: Any) -> FileRef:
    return FileRef(name, len(data), data, **more)


# ------------------------------------------------------------------ what comes back


@on_a_loop
async def test_an_allow_listed_program_runs_with_its_arguments(tmp_path: Path, hog: Path) -> None:
    config = ProgramConfig(executables={"echo": Executable(str(hog))})
    async with bench(tmp_path, config) as it:
        output = await it.one(Program("echo"), ProgramCall(["a b", "$HOME", "*", "日本"]))

        assert output.stdout == inline("stdout", "a b\n$HOME\n*\n日本\n".encode())
        assert output.stderr == inline("stderr", b"")
        assert output.files == []
        note = it.notes[1, 0]
        assert (note.exit_code, note.form) == (0, OUT_PROGRAM)
        assert note.ran_ns > 0
        assert note.cpu_ns > 0
        assert note.peak_kb > 0


@on_a_loop
async def test_stdin_and_input_files_arrive_and_new_files_come_back(
    tmp_path: Path, hog: Path
) -> None:
    files = [inline("in/a.txt", b"hello"), inline("tool", hog.read_bytes(), executable=True)]
    async with bench(tmp_path) as it:
        output = await it.sh(
            "./tool copy in/a.txt up.txt; cat > deep; mkdir -p x/y; cp deep x/y/z; chmod +x deep",
            stdin=inline("stdin", b"from stdin"),
            files=files,
        )

        assert output.files == [
            inline("deep", b"from stdin", executable=True),
            inline("up.txt", b"HELLO"),
            inline("x/y/z", b"from stdin", executable=False),
        ]
        await until(lambda: not it.left())


@on_a_loop
async def test_an_input_that_was_changed_comes_back(tmp_path: Path) -> None:
    files = [inline("a", b"1"), inline("b", b"2")]
    async with bench(tmp_path) as it:
        output = await it.sh("echo more >> a", files=files)

        assert output.files == [inline("a", b"1more\n")]


@on_a_loop
async def test_declared_outputs_come_back_and_nothing_else(tmp_path: Path) -> None:
    script = "mkdir -p out/deep; touch a.csv b.csv c.txt out/d.csv out/deep/e.csv result"
    async with bench(tmp_path) as it:
        plain = await it.sh(script, outputs=("result", "*.csv"))
        deep = await it.sh(script, outputs=("out/**/*.csv",))
        none = await it.sh(script + "; echo said", outputs=())
        nothing = await it.sh("true", outputs=("*.csv",))

        assert [file.name for file in plain.files] == ["a.csv", "b.csv", "result"]
        assert [file.name for file in deep.files] == ["out/d.csv", "out/deep/e.csv"]
        assert (none.files, none.stdout.data) == ([], b"said\n")
        assert nothing.files == []


@on_a_loop
async def test_a_declared_output_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        empty = await it.sh("echo why >&2", outputs=("result.csv",))
        other = await it.sh("touch other", outputs=("result.csv",))

        assert (empty.cause, other.cause) == ("exit_code", "exit_code")
        assert "'result.csv'" in empty.message.splitlines()[0]
        assert empty.message.splitlines()[1] == "why"
        assert empty.note.exit_code == 0


@on_a_loop
@pytest.mark.parametrize(
    "script",
    ["rm -rf $PWD", "mv $PWD ../away", "rm -rf $PWD; ln -s /etc $PWD", "rm -rf $PWD; >$PWD"],
)
async def test_a_program_that_does_away_with_its_folder_fails_by_its_own_doing(
    tmp_path: Path, script: str
) -> None:
    async with bench(tmp_path) as it:
        failure = await it.sh(script)

        assert failure.cause == "exit_code"
        assert "is no more" in failure.message


@on_a_loop
async def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("key")
    script = f"ln -s {secret}/key out; ln -s {secret} folder; mkfifo pipe; echo mine > real"
    async with bench(tmp_path) as it:
        everything = await it.sh(script)
        by_name = await it.sh(script, outputs=("out",))
        by_path = await it.sh(script, outputs=("folder/key",))

        assert everything.files == [inline("real", b"mine\n")]
        assert (by_name.cause, by_path.cause) == ("exit_code", "exit_code")
        await until(lambda: not it.left())
        assert (secret / "key").read_text() == "key"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "C:\\x", "a\\b", "con", ""])
@on_a_loop
async def test_an_input_file_with_a_bad_name_is_not_written(tmp_path: Path, name: str) -> None:
    async with bench(tmp_path) as it:
        failure = await it.sh("true", files=[inline(name, b"evil")])
        stored = await it.store.put(b"evil")
        far = await it.sh("true", files=[FileRef(name, 4, None, stored.blob)])

        assert (failure.cause, far.cause) == ("cannot_start", "cannot_start")
        assert "file name" in failure.message


@on_a_loop
async def test_an_output_file_with_a_bad_name_is_told(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        failure = await it.sh("touch 'a:b'")

        assert failure.cause == "exit_code"
        assert "'a:b'" in failure.message


@on_a_loop
async def test_two_inputs_of_one_name_are_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        failure = await it.sh("true", files=[inline("a", b"1"), inline("a", b"2")])

        assert (failure.cause, "one name" in failure.message) == ("cannot_start", True)


@on_a_loop
async def test_large_files_go_by_way_of_the_store(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    async with bench(tmp_path) as it:
        stored = await it.store.put(data)
        given = FileRef("big", len(data), None, stored.blob)
        output = await it.sh("cp big copy; cat; echo small > small", stdin=given, files=[given])

        copy, small = output.files
        assert (copy.name, copy.size, copy.data, copy.blob) == ("copy", 300_000, None, stored.blob)
        assert small == inline("small", b"small\n")
        assert output.stdout.data is None
        assert it.store.bytes_of(output.stdout) == data


@on_a_loop
async def test_a_stored_file_of_all_jobs_is_fetched_once_and_each_has_its_own(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as it:
        stored = await it.store.put(b"x" * 100_000)
        shared = FileRef("shared", 100_000, None, stored.blob, True)
        program = Program("sh", True, files=(shared,), outputs=())
        call = ProgramCall(["-c", "wc -c < shared; echo more >> shared; test -x shared"])
        grant = it.run(program, *[call] * 10)

        await it.until(lambda: len(it.outputs) == 10)

        said = {it.outputs[grant, at].stdout.data for at in range(10)}
        assert said == {b"100000\n"}
        assert it.store.fetched == [stored.blob]


@on_a_loop
async def test_a_stored_file_of_all_jobs_that_could_not_be_had_is_asked_for_again(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as it:
        blob = hashlib.sha256(b"late").hexdigest()
        program = Program("cat", True, files=(FileRef("late", 4, None, blob),))
        call = ProgramCall(["late"])
        first = await it.one(program, call)
        await it.store.put(b"late")

        assert first.cause == "cannot_start"
        assert (await it.one(program, call)).stdout.data == b"late"


@on_a_loop
async def test_what_travels_inline_is_bounded_as_a_whole(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        output = await it.sh("for i in 1 2 3 4 5; do head -c 20000 /dev/zero > $i; done")

        here = sum(len(file.data) for file in output.files if file.data is not None)
        assert here == 60_000
        assert [it.store.bytes_of(file) for file in output.files] == [bytes(20_000)] * 5


@on_a_loop
async def test_of_much_stdout_the_two_ends_are_kept(tmp_path: Path) -> None:
    config = ProgramConfig(any_program=True, stdout_max=1000)
    async with bench(tmp_path, config) as it:
        long = await it.sh("seq 100000; seq 300 >&2")

        said = it.store.bytes_of(long.stdout).decode()
        assert said.startswith("1\n2\n3\n")
        assert said.endswith("99999\n100000\n")
        assert "\n[... 587895 bytes left out ...]\n" in said
        assert long.stdout.size == len(said) < 1100
        assert "bytes left out" in it.store.bytes_of(long.stderr).decode()


@on_a_loop
async def test_200_jobs_all_come_back_each_with_its_own_output(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=3) as it:
        calls = [ProgramCall(["-c", f"echo {at}"]) for at in range(200)]
        grant = it.run(Program("sh", True), *calls)

        await it.until(lambda: len(it.outputs) == 200)

        said = [it.outputs[grant, at].stdout.data for at in range(200)]
        assert said == [b"%d\n" % at for at in range(200)]
        await until(lambda: not it.left())


@on_a_loop
async def test_200_jobs_with_files_come_back_and_leave_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=3) as it:
        calls = [
            ProgramCall(["-c", "cat in > out"], None, [inline("in", b"%d" % at)])
            for at in range(200)
        ]
        grant = it.run(Program("sh", True), *calls)

        await it.until(lambda: len(it.outputs) == 200)

        for at in range(200):
            assert it.outputs[grant, at].files == [inline("out", b"%d" % at)]
        await until(lambda: not it.left())


# ------------------------------------------------------------------ failures told apart


@on_a_loop
async def test_an_exit_code_is_told_with_the_tail_of_stderr(tmp_path: Path, hog: Path) -> None:
    async with bench(tmp_path) as it:
        failure = await it.one(*it.any(str(hog), "exit", "3"))

        assert failure.cause == "exit_code"
        assert failure.message == "it exited with code 3\nline one\nlast words"
        assert failure.note.exit_code == 3


@on_a_loop
async def test_exit_codes_can_be_declared_good(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        output = await it.sh("echo none; exit 1", ok_codes=(0, 1))

        assert output.stdout.data == b"none\n"
        assert it.notes[1, 0].exit_code == 1


@on_a_loop
async def test_a_signal_is_named(tmp_path: Path, hog: Path) -> None:
    async with bench(tmp_path) as it:
        failure = await it.one(*it.any(str(hog), "segv"))

        assert (failure.cause, failure.note.exit_code) == ("signal", -signal.SIGSEGV)
        assert "SIGSEGV" in failure.message


@on_a_loop
async def test_memory_over_the_limit_is_oom(tmp_path: Path, hog: Path) -> None:
    async with bench(tmp_path) as it:
        failure = await it.one(*it.any(str(hog), "eat"), mem_mb=100)

        assert failure.cause == "oom"
        assert "100 MB" in failure.message
        assert failure.note.peak_kb > 100 << 10


@on_a_loop
async def test_a_long_tail_is_cut_to_valid_text_of_the_right_length(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        failure = await it.sh("for i in $(seq 9000); do printf '日\\377\\000x' >&2; done; exit 1")

        assert len(failure.message) <= limits.ERROR_TEXT_MAX
        assert failure.message.startswith("it exited with code 1\n")
        failure.message.encode()
        assert failure.message.endswith("x")


@on_a_loop
async def test_without_stderr_the_tail_of_stdout_is_told(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        failure = await it.sh("seq 100000; echo the end; exit 2")

        assert failure.message.endswith("100000\nthe end")


@on_a_loop
async def test_what_cannot_start_says_whose_doing_it_is(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    nothing = tmp_path / "nothing"
    nothing.write_text("\1\2")
    nothing.chmod(0o755)
    lost = tmp_path / "lost"
    lost.write_text("#!/no/such/interpreter\n")
    lost.chmod(0o755)
    async with bench(tmp_path) as it:
        for command, words in [
            ("no-such-program-here", "finds no program 'no-such-program-here' on its PATH"),
            ("/no/such/file", "there is no '/no/such/file'"),
            (str(plain), "not executable"),
            (str(nothing), "no program this system can run"),
            (str(lost), "interpreter"),
            ("./not-sent", "not among the files"),
        ]:
            failure = await it.one(*it.any(command))
            assert (failure.cause, words in failure.message) == ("cannot_start", True), failure


@on_a_loop
async def test_arguments_with_a_nul_or_too_long_are_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        nul = await it.one(*it.any("echo", "a\0b"))
        long = await it.one(*it.any("echo", "x" * 200_000))

        assert (nul.cause, long.cause) == ("cannot_start", "cannot_start")
        assert "too long" in long.message


@on_a_loop
async def test_what_cannot_be_read_cannot_start(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.run(b"\xc1", ProgramCall())
        it.run(Program("true", True), b"\xc1")

        await it.until(lambda: len(it.failures) == 2)

        assert {failure.cause for failure in it.failures.values()} == {"cannot_start"}


@on_a_loop
async def test_an_input_the_store_does_not_have_is_told(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        failure = await it.sh("true", files=[FileRef("a", 1, None, "0" * 64)])

        assert (failure.cause, "no blob" in failure.message) == ("cannot_start", True)


@pytest.mark.parametrize("blob", ["", "../../x", "0" * 63, "/etc/passwd", "A" * 64])
@on_a_loop
async def test_what_is_no_hash_is_never_asked_of_the_store(tmp_path: Path, blob: str) -> None:
    async with bench(tmp_path) as it:
        file = FileRef("a", 1, None, blob)
        own = await it.sh("true", files=[file])
        shared = await it.one(Program("true", True, files=(file,)))

        assert (own.cause, shared.cause) == ("cannot_start", "cannot_start")
        assert it.store.fetched == []


# ------------------------------------------------------------------ what may run


@on_a_loop
async def test_a_worker_with_an_allow_list_runs_nothing_else(tmp_path: Path, hog: Path) -> None:
    config = ProgramConfig(executables={"hog": Executable(str(hog))})
    async with bench(tmp_path, config) as it:
        for program in (Program("sh"), Program(str(hog)), Program("sh", True), Program("", True)):
            failure = await it.one(program)
            assert (failure.cause, "allow-list" in failure.message) == ("cannot_start", True)
        path = await it.one(
            Program("./hog", True), ProgramCall([], None, [inline("hog", hog.read_bytes())])
        )
        assert path.cause == "cannot_start"


@on_a_loop
async def test_only_a_file_of_the_listed_content_is_started(tmp_path: Path) -> None:
    script = tmp_path / "it"
    script.write_text("#!/bin/sh\necho good\n")
    script.chmod(0o755)
    good = hashlib.sha256(script.read_bytes()).hexdigest()
    config = ProgramConfig(executables={"it": Executable(str(script), good.upper())})
    async with bench(tmp_path, config) as it:
        first = await it.one(Program("it"))
        again = await it.one(Program("it"))
        script.write_text("#!/bin/sh\necho evil\n")
        changed = await it.one(Program("it"))

        assert (first.stdout.data, again.stdout.data) == (b"good\n", b"good\n")
        assert changed.cause == "cannot_start"
        assert "SHA-256" in changed.message


@on_a_loop
async def test_a_file_that_one_name_has_verified_is_verified_anew_for_another(
    tmp_path: Path,
) -> None:
    script = tmp_path / "it"
    script.write_text("#!/bin/sh\necho good\n")
    script.chmod(0o755)
    good = hashlib.sha256(script.read_bytes()).hexdigest()
    config = ProgramConfig(
        executables={
            "right": Executable(str(script), good),
            "wrong": Executable(str(script), "0" * 64),
        }
    )
    async with bench(tmp_path, config) as it:
        right = await it.one(Program("right"))
        wrong = await it.one(Program("wrong"))

        assert right.stdout.data == b"good\n"
        assert wrong.cause == "cannot_start"
        assert "SHA-256" in wrong.message


@on_a_loop
async def test_a_shipped_program_runs_where_any_may(tmp_path: Path) -> None:
    script = inline("bin/go.sh", b'#!/bin/sh\necho "$0" went\n')
    async with bench(tmp_path) as it:
        output = await it.one(Program("./bin/go.sh", True, files=(script,)))

        assert output.stdout.data.endswith(b"bin/go.sh went\n")
        assert output.files == []


@on_a_loop
async def test_the_environment_holds_nothing_of_the_agents_that_was_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EKIDEN_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET", "secret")
    monkeypatch.setenv("LICENCE", "here")
    config = ProgramConfig(
        executables={"env": Executable(which("env"))},
        env_pass=("LICENCE", "NOT_SET"),
        env_allow=("MODE",),
    )
    async with bench(tmp_path, config) as it:
        output = await it.one(Program("env", env=(("MODE", "fast"),)))
        refused = await it.one(Program("env", env=(("LD_PRELOAD", "x.so"),)))
        ours = await it.one(Program("env", env=(("EKIDEN_ATTEMPT", "x"),)))

        env = dict(line.split("=", 1) for line in output.stdout.data.decode().splitlines())
        assert (env["LICENCE"], env["MODE"], env["EKIDEN_JOB"]) == ("here", "fast", "g1o0")
        assert env["EKIDEN_TRY"] == "1"
        assert env["HOME"] == env["TMPDIR"]
        assert "secret" not in output.stdout.data.decode()
        allowed = {"PATH", "LANG", "LC_ALL", "TZ", "HOME", "TMPDIR", "MODE", "LICENCE", "PWD"}
        assert {name for name in env if not name.startswith("EKIDEN_")} <= allowed
        assert (refused.cause, ours.cause) == ("cannot_start", "cannot_start")
        assert "'LD_PRELOAD'" in refused.message


@on_a_loop
async def test_an_own_variable_cannot_be_passed(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="EKIDEN_KEY"):
        async with bench(tmp_path, ProgramConfig(env_pass=("EKIDEN_KEY",))):
            pass


@on_a_loop
async def test_limits_apply_to_programs(tmp_path: Path) -> None:
    limit = Limits(open_files=64, file_bytes=100_000, cpu_s=1)
    async with bench(tmp_path, ProgramConfig(any_program=True, limits=limit)) as it:
        files = await it.sh("until [ $(ulimit -Hn) = 64 ]; do :; done; ulimit -n")
        writer = await it.one(*it.any("head", "-c", "200000", "/dev/zero"))
        spinner = await it.one(*it.any(sys.executable, "-c", "while True: pass"))

        assert files.stdout.data == b"64\n"
        assert (writer.cause, "SIGXFSZ" in writer.message) == ("signal", True)
        assert spinner.cause == "signal"


@on_a_loop
async def test_a_sandbox_that_is_not_there_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WrongUsage, match="bwrap"):
        async with bench(tmp_path, ProgramConfig(any_program=True, sandbox="bwrap")):
            pass


@pytest.mark.skipif(
    shutil.which("bwrap") is None and "CI" not in os.environ, reason="bubblewrap is not installed"
)
@on_a_loop
async def test_a_sandboxed_program_writes_its_own_folder_and_reaches_no_network(
    tmp_path: Path,
) -> None:
    hidden = (str(tmp_path / "keys"), "/usr/not-there")
    config = ProgramConfig(any_program=True, sandbox="bwrap", hidden=hidden)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "key").write_text("secret")
    async with bench(tmp_path, config) as it:
        script = (
            f"echo mine > out; touch /usr/x; ls {tmp_path}/keys; ls -A /tmp/x; "
            "cut -d: -f1 /proc/net/dev | tail -n +3; kill -SEGV $$"
        )
        failure = await it.sh(script)
        output = await it.sh("echo mine > out; cat /proc/net/dev | tail -n +3 | cut -d: -f1")

        assert failure.cause == "signal"
        assert output.files == [inline("out", b"mine\n")]
        assert output.stdout.data.split() == [b"lo"]


# ------------------------------------------------------------------ ends


@on_a_loop
async def test_a_cancelled_program_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with bench(tmp_path) as it:
        call = ProgramCall(["-c", TREE, str(pids)], None, [inline("a", b"1")])
        grant = it.run(Program(sys.executable, True), call)
        await until(lambda: pids_in(pids, TREE_SIZE))

        it.executor.abort(Abort(grant, [0], "cancel"))
        await it.until(lambda: it.said(Gone))

        assert it.said(Gone) == [(grant, 0)]
        assert [pid for pid in pids_in(pids, TREE_SIZE) if alive(pid)] == []
        assert not it.outputs
        assert not it.failures
        await until(lambda: not it.left())


@on_a_loop
async def test_a_time_limit_is_answered_like_a_cancel_and_what_is_stale_not_at_all(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as it:
        slow = it.run(*it.any("sleep", "600"))
        stale = it.run(*it.any("sleep", "600"))
        await it.until(lambda: len(it.running) == 2)

        it.executor.abort(Abort(stale, [0], "stale"))
        it.executor.abort(Abort(slow, [0], "timeout"))
        await it.until(lambda: it.said(Gone))
        last = await it.sh("echo after")

        assert last.stdout.data == b"after\n"
        assert it.said(Gone) == [(slow, 0)]
        assert list(it.outputs) == [(3, 0)]


@on_a_loop
async def test_a_recall_gives_back_what_has_not_begun_and_no_more(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=1) as it:
        count = 60
        grant = it.run(Program("sleep", True), *[ProgramCall(["600"])] * count)
        await it.until(lambda: it.running)

        it.executor.abort(Abort(grant, list(range(count)), "recall"))
        await it.until(lambda: len(it.said(Dropped)) == count - 1)
        it.executor.abort(Abort(grant, [0], "cancel"))
        await it.until(lambda: it.said(Gone))

        assert sorted(it.said(Dropped)) == [(grant, at) for at in range(1, count)]
        assert it.said(Gone) == [(grant, 0)]


@on_a_loop
async def test_what_waits_is_cancelled_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=1) as it:
        grant = it.run(Program("sleep", True), *[ProgramCall(["600"])] * 60)

        it.executor.abort(Abort(grant, list(range(60)), "cancel"))
        await it.until(lambda: len(it.said(Gone)) == 60)

        assert sorted(it.said(Gone)) == [(grant, at) for at in range(60)]
        assert (await it.sh("echo on")).stdout.data == b"on\n"


@on_a_loop
async def test_an_attempt_whose_inputs_are_on_their_way_can_be_cancelled(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        asked = asyncio.Event()

        async def never(blob: str, size: int, target: Path) -> None:
            asked.set()
            await asyncio.Event().wait()

        it.store.fetch = never
        call = ProgramCall([], None, [FileRef("a", 1, None, "0" * 64)])
        grant = it.run(Program("true", True), call)
        await asked.wait()

        it.executor.abort(Abort(grant, [0], "cancel"))

        assert it.said(Gone) == [(grant, 0)]
        await until(lambda: not it.left())
        assert (await it.sh("echo on")).stdout.data == b"on\n"


@on_a_loop
async def test_an_attempt_whose_outputs_are_on_their_way_can_be_cancelled(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        asked = asyncio.Event()

        async def never(source: Path | bytes) -> Stored:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        it.store.put = never
        grant = it.run(*it.any("sh", "-c", "head -c 100000 /dev/zero > big"))
        await asked.wait()

        it.executor.abort(Abort(grant, [0], "recall"))
        it.executor.abort(Abort(grant, [0], "cancel"))

        assert (it.said(Gone), it.said(Dropped)) == ([(grant, 0)], [])
        assert (await it.sh("echo on")).stdout.data == b"on\n"
        await until(lambda: not it.left())


@on_a_loop
async def test_what_has_run_is_not_given_back_while_its_outputs_are_on_their_way(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, slots=1) as it:
        asked: list[Path | bytes] = []
        go_on = asyncio.Event()
        put = it.store.put

        async def slowly(source: Path | bytes) -> Stored:
            asked.append(source)
            await go_on.wait()
            return await put(source)

        it.store.put = slowly
        call = ProgramCall(["-c", "head -c 100000 /dev/zero > big"])
        grant = it.run(Program("sh", True), *[call] * 8)
        await until(lambda: len(asked) == 8)

        it.executor.abort(Abort(grant, list(range(8)), "recall"))
        go_on.set()
        await it.until(lambda: len(it.outputs) == 8)

        assert it.said(Dropped) == []


@on_a_loop
async def test_a_killed_keeper_fails_the_attempt_as_lost(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        grant = it.run(*it.any("sleep", "600"))
        await it.until(lambda: it.running)

        os.kill(it.children.keeper_pid, signal.SIGKILL)
        await it.until(lambda: it.failures)

        assert it.failures[grant, 0].cause == "worker_lost"
        files = [inline("in", b"1")]
        assert (await it.sh("cat in > out", files=files)).files == [inline("out", b"1")]


@on_a_loop
async def test_a_killed_keeper_gives_back_what_had_not_begun(tmp_path: Path) -> None:
    async with bench(tmp_path, slots=1) as it:
        plain = it.run(Program("sleep", True), *[ProgramCall(["600"])] * 4)
        laid_out = it.run(Program("sleep", True), ProgramCall(["600"], None, [inline("in", b"1")]))
        await it.until(lambda: it.running)
        await until(lambda: len(list(it.scratch.glob("keeper-*/a1/in"))) == 1)

        os.kill(it.children.keeper_pid, signal.SIGKILL)
        await it.until(lambda: len(it.said(Dropped)) == 4)

        assert sorted(it.said(Dropped)) == [*((plain, at) for at in range(1, 4)), (laid_out, 0)]
        assert {at: failure.cause for at, failure in it.failures.items()} == {
            (plain, 0): "worker_lost"
        }


@on_a_loop
async def test_inputs_that_went_with_a_killed_keeper_are_laid_out_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        puts = [await it.store.put(bytes([n]) * 100_000) for n in range(2)]
        large = [FileRef(f"large{n}", 100_000, None, put.blob) for n, put in enumerate(puts)]
        fetch = it.store.fetch
        killed: list[int] = []

        async def deadly(blob: str, size: int, target: Path) -> None:
            await fetch(blob, size, target)
            if not killed:
                killed.append(it.children.keeper_pid)
                os.kill(killed[0], signal.SIGKILL)
                await until(lambda: it.children.keeper_pid not in (0, killed[0]))

        it.store.fetch = deadly

        output = await it.sh("cat small large* | wc -c", files=[inline("small", b"12345"), *large])

        assert output.stdout.data == b"200005\n"
        assert killed
        assert it.failures == {}
        await until(lambda: len(list(it.scratch.glob("keeper-*"))) == 1)


@on_a_loop
async def test_outputs_that_went_with_a_killed_keeper_are_lost_and_not_left_out(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as it:
        hold = threading.Event()
        busy = [it.executor._in_thread(hold.wait) for _ in range(2)]
        grant = it.run(*it.any("sh", "-c", "echo 1 > a; echo 2 > b; touch " + str(tmp_path / "it")))
        await until((tmp_path / "it").exists)
        await until(lambda: it.executor._gathering == 1)

        before = it.children.keeper_pid
        os.kill(before, signal.SIGKILL)
        await until(lambda: it.children.keeper_pid not in (0, before))
        hold.set()
        await asyncio.gather(*busy)
        await it.until(lambda: it.failures)

        assert it.failures[grant, 0].cause == "worker_lost"


@on_a_loop
async def test_a_later_attempt_begins_after_it_could_be_announced(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        grant = it.run(*it.any("printenv", "EKIDEN_TRY"), attempts=[3])

        await it.until(lambda: it.outputs)

        assert it.outputs[grant, 0].stdout.data == b"3\n"


@on_a_loop
async def test_what_a_running_program_has_written_can_be_followed(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        script = "echo one; echo err >&2; while [ ! -e go ]; do sleep 0.01; done; echo two"
        grant = it.run(*it.any("sh", "-c", script))
        await it.until(lambda: it.running)

        def tail(position: int, stream: str = "stdout") -> bytes | None:
            return it.executor.tail(grant, 0, stream, position, 100)

        await until(lambda: tail(0) == b"one\n")
        await until(lambda: tail(0, "stderr") == b"err\n")
        assert tail(2) == b"e\n"
        assert it.executor.tail(grant, 0, "stdout", 0, 2) == b"on"
        assert it.executor.tail(99, 0, "stdout", 0, 2) is None
        folder = next(Path(it.children.folder).glob("r[0-9]"))
        (folder / "go").touch()
        await it.until(lambda: it.outputs)
        assert it.outputs[grant, 0].stdout.data == b"one\ntwo\n"
        await until(lambda: tail(0) is None)
