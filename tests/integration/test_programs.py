"""Programs through the whole grid: real brokers, workers, keepers and executables."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.processes import EKIDEN, Child, Site, until, wait_workers

import ekiden
from ekiden import errors
from ekiden.client.programs import ProgramArgs
from ekiden.limits import NS

QUICK = {"silence_ns": NS, "heartbeat_ns": NS // 5, "rejoin_grace_ns": NS // 2}

# Doubles every number on stdin; with a word, fails in the way it names.
DOUBLER = r"""
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    double x;
    if (argc > 1 && !strcmp(argv[1], "crash")) raise(SIGSEGV);
    if (argc > 1 && !strcmp(argv[1], "code")) { fprintf(stderr, "no curve\n"); return 7; }
    if (argc > 1 && !strcmp(argv[1], "hang")) for (;;) pause();
    if (argc > 1 && !strcmp(argv[1], "eat")) {
        for (;;) { char *p = malloc(1 << 20); if (p) memset(p, 1, 1 << 20); usleep(1000); }
    }
    while (scanf("%lf", &x) == 1) printf("%g\n", 2 * x);
    return 0;
}
"""


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C program, compiled here."""
    folder = tmp_path_factory.mktemp("c")
    source, program = folder / "doubler.c", folder / "doubler"
    source.write_text(DOUBLER)
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed: apt-get install gcc"
    subprocess.run([compiler, "-O1", "-o", str(program), str(source)], check=True)
    return program


def start_agent(site: Site, worker_id: str, *offers: str, slots: int = 2) -> Child:
    command = ["worker", "--connect", site.address, "--id", worker_id, "--json"]
    scratch = str(site.folder / f"scratch-{worker_id}")
    return site.start(
        [*EKIDEN, *command, "--slots", str(slots), "--scratch", scratch, *offers],
        f"worker-{worker_id}",
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, doubler: Path) -> Iterator[Site]:
    """A broker and a worker for tests that do not disturb one another."""
    site = Site(tmp_path_factory.mktemp("programs"))
    try:
        site.start_broker()
        start_agent(site, "w1", f"--exec=doubler={doubler}", "--allow-any-program")
        wait_workers(site.client("observer"))
        yield site
    finally:
        site.close()


@pytest.fixture
def client(shared: Site, request: pytest.FixtureRequest) -> ekiden.Client:
    return shared.client(re.sub(r"[^a-z0-9_]+", "-", request.node.name)[:60])


def cause_of(future: ekiden.JobFuture) -> tuple[str, str]:
    """Why it failed, and in which words."""
    error = future.exception(60)
    assert isinstance(error, errors.JobFailed), error
    last = error.causes[-1]
    return str(last["cause"]), str(last["message"])


def marked(words: str) -> list[psutil.Process]:
    """Processes with these words on their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(words in part for part in process.info["cmdline"] or ())
    ]


# ------------------------------------------------------------------ what comes back


def test_a_program_reads_stdin_and_its_stdout_is_the_output(client: ekiden.Client) -> None:
    result = client.submit_program("doubler", stdin="1 2.5\n").result(30)

    assert result.output == b"2\n5\n"
    assert (result.exit_code, result.worker) == (0, "w1")
    assert result.ran_s is not None


def test_new_files_come_back_with_stdout_and_stderr(client: ekiden.Client, tmp_path: Path) -> None:
    script = "cat in/a.txt > copy.txt; mkdir d; echo deep > d/e; echo said; echo hm >&2"
    result = client.submit_program(
        "sh", ["-c", script], files={"in/a.txt": b"input"}, any_program=True
    ).result(30)

    assert (result.stdout, result.stderr) == (b"said\n", b"hm\n")
    assert {name: file.read() for name, file in result.files.items()} == {
        "copy.txt": b"input", "d/e": b"deep\n",
    }  # fmt: skip
    result.save(tmp_path)
    assert (tmp_path / "d/e").read_bytes() == b"deep\n"


def test_large_files_go_in_and_out_by_hash(client: ekiden.Client, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(os.urandom(3 << 20))
    result = client.submit_program(
        "sh",
        ["-c", "cat large - > both; sha256sum < large"],
        stdin=source,
        files={"large": source},
        outputs=["both"],
        any_program=True,
    ).result(60)

    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert result.text().split()[0] == digest
    assert result.files["both"].ref.data is None
    assert result.files["both"].read() == source.read_bytes() * 2
    assert result.save_zip(tmp_path / "all.zip").exists()


def test_a_script_of_the_client_travels_with_the_jobs(client: ekiden.Client) -> None:
    common = {"greet.sh": b"#!/bin/sh\necho hello $1\n"}
    futures = client.submit_programs(
        "./greet.sh", [ProgramArgs([n]) for n in range(20)], common=common, any_program=True
    )

    assert [future.result(30).text() for future in futures] == [f"hello {n}\n" for n in range(20)]


def test_a_thousand_programs_each_bring_their_own_answer(client: ekiden.Client) -> None:
    futures = client.submit_programs("doubler", [ProgramArgs(stdin=str(n)) for n in range(1000)])

    assert [future.result(60).text() for future in futures] == [f"{2 * n}\n" for n in range(1000)]


# ------------------------------------------------------------------ causes told apart


@pytest.mark.parametrize(
    ("words", "options", "cause", "said"),
    [
        (["code"], {}, "exit_code", "code 7"),
        (["crash"], {}, "signal", "SIGSEGV"),
        (["hang"], {"timeout_s": 0.3}, "timeout", "0.3 s"),
        (["eat"], {"needs": {"mem_mb": 60}}, "oom", "60 MB"),
    ],
)
def test_every_end_has_its_cause(
    client: ekiden.Client, words: list[str], options: dict, cause: str, said: str
) -> None:
    future = client.submit_program("doubler", words, max_attempts=1, **options)

    found, message = cause_of(future)

    assert found == cause
    assert said in message
    if cause == "exit_code":
        assert "no curve" in message, "what it wrote to stderr"


def test_a_program_that_is_not_there_cannot_start(client: ekiden.Client) -> None:
    future = client.submit_program("no-such-program", any_program=True, max_attempts=1)

    cause, message = cause_of(future)

    assert cause == "cannot_start"
    assert "no-such-program" in message


def test_an_exit_code_may_be_tried_again_or_count_as_success(client: ekiden.Client) -> None:
    fails = client.submit_program("doubler", ["code"], retry_on=["exit_code"], max_attempts=2)
    fine = client.submit_program("doubler", ["code"], ok_codes=[0, 7])

    assert fine.result(30).exit_code == 7
    error = fails.exception(60)
    assert isinstance(error, errors.JobFailed)
    assert [cause["attempt"] for cause in error.causes] == [1, 2]


# ------------------------------------------------------------------ ends


def test_cancel_ends_the_whole_tree_and_is_told_when_it_is_gone(client: ekiden.Client) -> None:
    mark = "sleep 7654.1"
    script = f"({mark} & setsid sh -c '{mark} & {mark}' & wait) & {mark}"
    future = client.submit_program("sh", ["-c", script], any_program=True)
    until(lambda: len(marked("7654.1")) >= 6, "the tree to grow")

    assert future.cancel(30)
    with pytest.raises(errors.JobCancelled):
        future.result(30)

    assert marked("7654.1") == []


def test_what_a_running_program_writes_can_be_followed(client: ekiden.Client) -> None:
    future = client.submit_program(
        "sh", ["-c", "echo one; echo two >&2; sleep 60"], any_program=True
    )

    def seen() -> dict:
        return client.ask("logs", id=future.job_id)

    until(lambda: future.accepted, "the job to be accepted")
    written = until(lambda: (s := seen())["stdout"] and s["stderr"] and s, "its output")
    assert (written["stdout"], written["stderr"]) == (b"one\n", b"two\n")
    assert client.ask("logs", id=future.job_id, stdout=2)["stdout"] == b"e\n"
    future.cancel(30)


def test_a_worker_killed_with_9_leaves_no_process_and_its_job_runs_again(
    site: Site, doubler: Path
) -> None:
    site.start_broker(config=QUICK)
    client = site.client()
    agent = start_agent(site, "w1", "--allow-any-program")
    wait_workers(client)
    future = client.submit_program("sh", ["-c", "echo $$; sleep 7655.2"], any_program=True)
    until(lambda: len(marked("sleep 7655.2")) + len(marked("7655.2")), "it to run")
    until(lambda: client.job(future.job_id)["state"] == "running", "it to be known to run")

    agent.kill()
    until(lambda: marked("7655.2") == [], "its processes to end with the worker")

    start_agent(site, "w2", "--allow-any-program")
    until(lambda: marked("7655.2"), "it to run again")
    assert client.job(future.job_id)["causes"][0]["cause"] == "worker_lost"
    future.cancel(30)


def test_a_keeper_killed_with_9_loses_the_attempt_and_not_the_worker(site: Site) -> None:
    site.start_broker(config=QUICK)
    client = site.client()
    agent = start_agent(site, "w1", "--allow-any-program")
    wait_workers(client)
    future = client.submit_program("sleep", ["7656.3"], any_program=True)
    (before,) = until(lambda: marked("7656.3"), "it to run")

    keeper = before.parent()
    assert keeper is not None
    assert keeper.pid != agent.pid
    keeper.kill()

    (after,) = until(
        lambda: [p for p in marked("7656.3") if p.pid != before.pid], "it to run again"
    )
    assert agent.alive
    assert [process.pid for process in marked("7656.3")] == [after.pid]
    assert client.job(future.job_id)["causes"][0]["cause"] == "worker_lost"
    future.cancel(30)


def test_a_broker_killed_with_9_costs_no_program_that_runs(site: Site, tmp_path: Path) -> None:
    site.start_broker()
    client = site.client()
    start_agent(site, "w1", "--allow-any-program")
    wait_workers(client)
    gate = tmp_path / "gate"
    script = f"echo run >> {tmp_path}/runs; while ! test -e {gate}; do sleep 0.05; done; echo done"
    future = client.submit_program("sh", ["-c", script], any_program=True)
    until((tmp_path / "runs").exists, "it to run")

    site.broker.kill()
    site.start_broker()
    until(lambda: client.connected, "the client to be back")
    gate.touch()

    assert future.result(60).output == b"done\n"
    assert (tmp_path / "runs").read_text() == "run\n"


# ------------------------------------------------------------------ who may


def test_a_worker_runs_nothing_that_was_not_offered(site: Site, doubler: Path) -> None:
    site.start_broker()
    client = site.client()
    start_agent(site, "w1", f"--exec=doubler={doubler}", "--subjects=job.>")
    wait_workers(client)

    refused = client.submit_program("/bin/sh", ["-c", "id"], any_program=True, max_attempts=1)
    unnamed = client.submit_program("sh", ["-c", "id"], max_attempts=1)

    for future in (refused, unnamed):
        cause, message = cause_of(future)
        assert cause == "cannot_start"
        assert "allow" in message
