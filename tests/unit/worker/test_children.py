"""Real processes through a real keeper: started, told, ended to the last one."""

# Files and processes are looked at between turns of a loop that serves nobody else.
# ruff: noqa: ASYNC220, ASYNC240

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.worker.nursery import (
    TREE,
    TREE_SIZE,
    alive,
    nursery,
    on_a_loop,
    pids_in,
    until,
)

from ekiden.worker import trees
from ekiden.worker.children import RUNNER, SERVICE, Began, Children, Ended, Limits
from ekiden.worker.launch import CAPTURE_BYTES_MAX

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")


@on_a_loop
async def test_a_program_is_told_with_its_output_and_leaves_no_file(tmp_path: Path) -> None:
    async with nursery(tmp_path) as it:
        number = it.sh("cat; echo said >&2; exit 3", stdin=b"heard\n")

        ended = await it.ended(number)

        assert (ended.exit_code, ended.signal, ended.why) == (3, 0, "")
        assert (ended.stdout, ended.stderr, ended.clean) == (b"heard\n", b"said\n", True)
        assert ended.ran_ns > 0
        assert ended.cpu_ns > 0
        assert ended.peak_kb > 100


@on_a_loop
async def test_what_all_children_shall_know_is_in_their_environment(tmp_path: Path) -> None:
    async with nursery(tmp_path, env={"EKIDEN_CACHE": "/c"}) as it:
        number = it.sh("echo $EKIDEN_CACHE $OTHER", env={"OTHER": "o", "EKIDEN_CACHE": "mine"})

        assert (await it.ended(number)).stdout == b"/c o\n"


@on_a_loop
async def test_a_signal_is_told_apart_from_an_exit_code(tmp_path: Path) -> None:
    async with nursery(tmp_path) as it:
        number = it.sh("kill -SEGV $$")

        ended = await it.ended(number)

        assert (ended.signal, ended.why) == (signal.SIGSEGV, "")


@pytest.mark.parametrize(
    ("mode", "content", "word"),
    [(None, "", "No such file"), (0o644, "#!/bin/sh\n", "Permission"), (0o755, "\1\2", "format")],
)
@on_a_loop
async def test_what_cannot_be_started_is_told_with_its_reason(
    tmp_path: Path, mode: int | None, content: str, word: str
) -> None:
    path = tmp_path / "it"
    if mode is not None:
        path.write_text(content)
        path.chmod(mode)
    async with nursery(tmp_path / "scratch") as it:
        number = it.spawn(str(path))

        report = await it.not_started(number)

        assert word in report.why
        assert report.errno
        assert (await it.ended(it.sh("echo on"))).stdout == b"on\n"


@on_a_loop
async def test_200_programs_run_in_order_in_one_slot(tmp_path: Path) -> None:
    async with nursery(tmp_path, slots=1) as it:
        numbers = [it.spawn("true") for _ in range(200)]

        await it.until(lambda: len(it.order(Ended)) == 200)

        assert it.order(Ended) == numbers
        # What ends at once need not be told to have begun; what is told is told in order.
        assert it.order(Began) == sorted(it.order(Began))


@on_a_loop
async def test_no_more_programs_run_at_once_than_there_are_slots(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    script = f"mkdir {tmp_path}/here/$$; ls {tmp_path}/here | wc -l; rmdir {tmp_path}/here/$$"
    async with nursery(tmp_path / "scratch", slots=3) as it:
        for _ in range(100):
            it.sh(script)

        await it.until(lambda: len(it.order(Ended)) == 100)

        counts = [int(report.stdout or 0) for report in it.heard if isinstance(report, Ended)]
        assert max(counts) <= 3
        it.children.set_slots(1)
        after = [it.sh(script) for _ in range(20)]
        await it.until(lambda: len(it.order(Ended)) == 120)
        ends = {report.no: report for report in it.heard if isinstance(report, Ended)}
        assert {int(ends[number].stdout or 0) for number in after} == {1}


@on_a_loop
async def test_a_program_waits_for_a_slot_and_a_service_does_not(tmp_path: Path) -> None:
    async with nursery(tmp_path, slots=1) as it:
        first = it.sh("read line", stdin_file=_fifo(tmp_path))
        second = it.spawn("true")
        ours, theirs = socket.socketpair()
        service = it.spawn("cat", wiring=SERVICE, sock=theirs)
        with ours:
            await it.began(service)

            await it.began(first)
            assert sorted(it.order(Began)) == [first, service]
            it.children.kill(first)
            await it.ended(second)
            await it.ended(first)
        assert (await it.ended(service)).exit_code == 0


@on_a_loop
async def test_a_recalled_program_never_runs_and_one_that_has_begun_goes_on(
    tmp_path: Path,
) -> None:
    async with nursery(tmp_path, slots=1) as it:
        first = it.sh("read line", stdin_file=_fifo(tmp_path))
        second = it.sh(f"touch {tmp_path}/ran")
        await it.began(first)

        it.children.recall(first)
        it.children.recall(second)

        assert (await it.not_started(second)).why == "recalled"
        it.children.kill(first)
        assert (await it.ended(first)).why == "killed"
        assert not (tmp_path / "ran").exists()


@on_a_loop
async def test_a_killed_tree_is_gone_to_the_last_process_before_it_is_told(tmp_path: Path) -> None:
    async with nursery(tmp_path / "scratch") as it:
        number = it.python(TREE, str(tmp_path / "pids"))
        await until(lambda: pids_in(tmp_path / "pids", TREE_SIZE))

        it.children.kill(number)
        ended = await it.ended(number)

        left = [pid for pid in pids_in(tmp_path / "pids", TREE_SIZE) if alive(pid)]
        assert left == []
        assert (ended.why, ended.signal) == ("killed", signal.SIGKILL)


@on_a_loop
async def test_what_a_program_leaves_running_ends_with_it(tmp_path: Path) -> None:
    async with nursery(tmp_path / "scratch") as it:
        script = TREE.replace("fork(daemon)\nstay()", "fork(daemon)\nnote()\nwhile "
                              f"open(out).read().count(chr(10)) < {TREE_SIZE}: pass")  # fmt: skip
        number = it.python(script, str(tmp_path / "pids"))

        ended = await it.ended(number)

        assert (ended.exit_code, ended.signal) == (0, 0)
        left = [pid for pid in pids_in(tmp_path / "pids", TREE_SIZE) if alive(pid)]
        assert left == []


@on_a_loop
async def test_a_daemon_that_hides_whose_it_is_ends_with_the_programs_it_can_be_of(
    tmp_path: Path,
) -> None:
    hidden = (
        "import os, sys\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "os.execve('/bin/sh', ['sh', '-c', 'echo $$ >> ' + sys.argv[1] + '; sleep 600'], {})\n"
    )
    async with nursery(tmp_path / "scratch", slots=2) as it:
        other = it.sh("read line", stdin_file=_fifo(tmp_path))
        await it.began(other)
        script = f'{sys.executable} -c "$0" {tmp_path}/pid; until [ -s {tmp_path}/pid ]; do :; done'
        hiding = it.spawn("sh", "-c", script, hidden)
        await it.ended(hiding)

        it.children.kill(other)
        await it.ended(other)

        (pid,) = pids_in(tmp_path / "pid", 1)
        await until(lambda: not alive(pid))


@on_a_loop
async def test_a_program_over_its_memory_is_ended_as_oom(tmp_path: Path) -> None:
    async with nursery(tmp_path) as it:
        number = it.python("x = bytearray(200 << 20)\nimport time\ntime.sleep(600)", mem_mb=100)
        small = it.python("print(1)", mem_mb=100)

        ended = await it.ended(number)

        assert ended.why == "oom"
        assert ended.peak_kb > 100 << 10
        assert (await it.ended(small)).why == ""


@on_a_loop
async def test_the_memory_of_a_whole_tree_counts(tmp_path: Path) -> None:
    async with nursery(tmp_path) as it:
        script = (
            "import os,time\nfor _ in range(3): os.fork()\nx = bytearray(20 << 20)\ntime.sleep(600)"
        )
        number = it.python(script, mem_mb=120)

        assert (await it.ended(number)).why == "oom"


@on_a_loop
async def test_pages_that_forked_processes_share_count_once(tmp_path: Path) -> None:
    async with nursery(tmp_path) as it:
        script = (
            "import os, time\n"
            "x = bytearray(60 << 20)\n"
            "if os.fork() and os.fork() and os.fork(): time.sleep(0.5)\n"
            "else: time.sleep(600)\n"
        )
        number = it.python(script, mem_mb=100)

        assert (await it.ended(number)).why == ""


@on_a_loop
async def test_much_output_stays_in_its_file_for_the_agent(tmp_path: Path) -> None:
    async with nursery(tmp_path) as it:
        number = it.sh(f"head -c {CAPTURE_BYTES_MAX + 1} /dev/zero; echo e >&2")

        ended = await it.ended(number)

        assert ended.stdout is None
        assert Path(ended.out).stat().st_size == CAPTURE_BYTES_MAX + 1
        assert ended.stderr == b"e\n"
        assert ended.clean


@on_a_loop
async def test_what_a_program_wrote_is_left_and_the_next_one_finds_nothing_of_it(
    tmp_path: Path,
) -> None:
    async with nursery(tmp_path, slots=1) as it:
        writer = await it.ended(it.sh("echo secret > note; mkdir deep"))
        reader = await it.ended(it.sh("ls -A; pwd; stat -c %a ."))

        assert not writer.clean
        assert sorted(os.listdir(writer.folder)) == ["deep", "note"]
        assert reader.stdout is not None
        path, mode = reader.stdout.decode().split()
        assert (path != writer.folder, mode) == (True, "700")


@on_a_loop
async def test_a_folder_that_was_opened_to_others_is_not_used_again(tmp_path: Path) -> None:
    async with nursery(tmp_path, slots=1) as it:
        opened = await it.ended(it.sh("chmod 777 .; pwd"))
        after = await it.ended(it.sh("pwd; stat -c %a ."))

        assert not opened.clean
        assert after.stdout is not None
        assert after.stdout.split()[1] == b"700"
        assert after.stdout.split()[0] != opened.folder.encode()


@on_a_loop
async def test_a_runner_has_its_socket_as_fd_3(tmp_path: Path) -> None:
    async with nursery(tmp_path) as it:
        ours, theirs = socket.socketpair()
        script = "import socket; s = socket.socket(fileno=3); s.sendall(s.recv(9).upper())"
        number = it.python(script, wiring=RUNNER, sock=theirs)
        with ours:
            ours.sendall(b"hello")
            await it.ended(number)

            assert ours.recv(9) == b"HELLO"


@on_a_loop
async def test_a_child_inherits_nothing_but_what_it_was_given(tmp_path: Path) -> None:
    async with nursery(tmp_path) as it:
        script = (
            "import json, os, signal\n"
            "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
            "print(json.dumps([sorted(os.environ), sorted(map(int, os.listdir('/proc/self/fd')))[:-1],"
            " os.getsid(0) == os.getpid(), os.umask(0), os.environ['HOME'] == os.getcwd(),"
            " status['NoNewPrivs'].strip(), status['SigBlk'].strip(), "
            "signal.getsignal(signal.SIGINT) is signal.default_int_handler]))"
        )
        ended = await it.ended(it.python(script, env={"EKIDEN_JOB": "j1"}))

        assert ended.stdout is not None, ended
        env, fds, leads, umask, at_home, no_privs, blocked, interruptible = json.loads(ended.stdout)
        assert {"EKIDEN_ATTEMPT", "EKIDEN_JOB", "HOME", "PATH", "TMPDIR"} >= set(env) - {"LC_CTYPE"}
        assert fds == [0, 1, 2]
        assert (leads, umask, at_home, no_privs) == (True, 0o077, True, "1")
        assert (int(blocked, 16), interruptible) == (0, True)


@on_a_loop
async def test_limits_hold_from_the_start_and_a_launch_can_lower_them(tmp_path: Path) -> None:
    # Whoever runs already when it is told a limit needs a moment to see it.
    until_told = "until [ $(ulimit -Hn) = {} ]; do :; done; ulimit -n; ulimit -c; ulimit -f"
    async with nursery(tmp_path, limits=Limits(open_files=200, file_bytes=1 << 20)) as it:
        own = await it.ended(it.sh(until_told.format(200)))
        lower = await it.ended(it.sh(until_told.format(50), limits=Limits(open_files=50)))
        written = await it.ended(it.sh("head -c 2000000 /dev/zero > big"))

        assert own.stdout == b"200\n0\n2048\n"
        assert lower.stdout == b"50\n0\n2048\n"
        assert written.exit_code != 0
        assert os.stat(f"{written.folder}/big").st_size == 1 << 20


@on_a_loop
async def test_a_killed_keeper_loses_its_attempts_and_not_the_agent(tmp_path: Path) -> None:
    async with nursery(tmp_path / "scratch", slots=1) as it:
        number = it.python(TREE, str(tmp_path / "pids"))
        waiting = it.sh("echo never")
        await until(lambda: pids_in(tmp_path / "pids", TREE_SIZE))

        os.kill(it.children.keeper_pid, signal.SIGKILL)
        ended = await it.ended(number)

        assert ended.lost
        assert (await it.not_started(waiting)).why == "lost"
        assert [pid for pid in pids_in(tmp_path / "pids", TREE_SIZE) if alive(pid)] == []
        assert (await it.ended(it.sh("echo again"))).stdout == b"again\n"
        assert len(list((tmp_path / "scratch").glob("keeper-*"))) == 1


AGENT = """
import asyncio, sys
from pathlib import Path
from ekiden.worker.children import Children, Launch
async def main():
    children = Children(Path(sys.argv[1]), loop=asyncio.get_running_loop())
    await children.start()
    launch = Launch(argv=[sys.executable, "-c", sys.argv[3], sys.argv[2]])
    children.spawn(launch, lambda report: print(children.keeper_pid, flush=True))
    await asyncio.sleep(600)
asyncio.run(main())
"""


@on_a_loop
async def test_a_killed_agent_leaves_no_orphan(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    scratch = tmp_path / "scratch"
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(scratch), str(pids), TREE], stdout=subprocess.PIPE
    )
    assert agent.stdout is not None
    keeper = int(agent.stdout.readline())
    await until(lambda: pids_in(pids, TREE_SIZE))

    agent.kill()
    agent.wait()
    agent.stdout.close()

    await until(lambda: not alive(keeper))
    assert [pid for pid in pids_in(pids, TREE_SIZE) if alive(pid)] == []
    assert list(scratch.glob("keeper-*")) == []


@on_a_loop
async def test_what_agent_and_keeper_left_when_both_were_killed_ends_at_the_next_start(
    tmp_path: Path,
) -> None:
    pids = tmp_path / "pids"
    scratch = tmp_path / "scratch"
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(scratch), str(pids), TREE], stdout=subprocess.PIPE
    )
    assert agent.stdout is not None
    keeper = int(agent.stdout.readline())
    await until(lambda: pids_in(pids, TREE_SIZE))
    os.kill(agent.pid, signal.SIGSTOP)
    os.kill(keeper, signal.SIGKILL)
    agent.kill()
    agent.wait()
    agent.stdout.close()
    await until(lambda: not alive(keeper))
    assert [pid for pid in pids_in(pids, TREE_SIZE) if alive(pid)]

    async with nursery(scratch):
        assert [pid for pid in pids_in(pids, TREE_SIZE) if alive(pid)] == []
        assert len(list(scratch.glob("keeper-*"))) == 1


@on_a_loop
async def test_two_agents_can_share_a_scratch_folder(tmp_path: Path) -> None:
    async with nursery(tmp_path) as one:
        number = one.sh("read line", stdin_file=_fifo(tmp_path))
        await one.began(number)
        async with nursery(tmp_path) as two:
            await two.ended(two.spawn("true"))

            assert Ended not in {type(report) for report in one.heard}
        assert alive(next(r.pid for r in one.heard if isinstance(r, Began)))


@on_a_loop
async def test_closing_ends_everything_and_leaves_nothing(tmp_path: Path) -> None:
    async with nursery(tmp_path / "scratch") as it:
        it.python(TREE, str(tmp_path / "pids"))
        await until(lambda: pids_in(tmp_path / "pids", TREE_SIZE))
        keeper = it.children.keeper_pid

    assert [pid for pid in pids_in(tmp_path / "pids", TREE_SIZE) if alive(pid)] == []
    assert trees.stat_of(keeper) is None
    assert list((tmp_path / "scratch").glob("keeper-*")) == []


@on_a_loop
async def test_a_scratch_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    children = Children(tmp_path / "file" / "scratch", loop=asyncio.get_running_loop())

    with pytest.raises(Exception, match="scratch"):
        await children.start()


def _fifo(folder: Path) -> str:
    """A file that a program waits on for ever: opened here for writing too, so it never ends."""
    path = folder / "never"
    os.mkfifo(path)
    os.open(path, os.O_RDWR)
    return str(path)
