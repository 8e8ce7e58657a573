"""Data folders that cannot be served, and disks that run full while they are.

Disks that are small or read-only are mounts in a namespace of the broker's own (Linux, where the
user may make one); a limit on the size of files does the same without.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.processes import EKIDEN, Child, Outcome, Site, until, wait_workers

import ekiden
from ekiden import errors
from ekiden.journal import records
from ekiden.journal.records import HEADER_BYTES, SEGMENT_MAGIC
from ekiden.journal.segments import segment_name

MB = 1 << 20

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def can_mount() -> bool:
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs a mount namespace of its own")


def start_refused(site: Site, *prefix: str) -> Outcome:
    """A broker that does not come to serve."""
    process = site.start(
        [*prefix, *EKIDEN, "broker", "--port", "0", "--data", str(site.data), "--json"],
        "refused",
    )
    code = process.wait()
    assert process.process.stdout is not None
    assert process.process.stdout.read() == b"", "it claimed to be ready"
    return Outcome(code, b"", process.logged())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


# ------------------------------------------------------------------ refused at the start


def test_a_folder_in_use_is_refused_and_its_broker_goes_on(site: Site) -> None:
    broker = site.start_broker()
    client = site.client()
    client.submit("nobody", job_id="there").wait_accepted(20)

    outcome = start_refused(site)

    assert (outcome.code, outcome.error["code"]) == (4, "folder_in_use")
    assert str(broker.pid) in outcome.error["message"]
    assert "--data" in outcome.error["remedy"]
    assert client.job("there")["state"] == "queued"
    broker.kill()
    site.start_broker()  # a dead process holds nothing
    until(lambda: client.connected, "the client to find the new broker")
    assert client.job("there")["state"] == "queued"


def test_a_folder_of_a_newer_version_is_refused_and_not_touched(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.start_broker()
    site.client().submit("nobody", job_id="there").wait_accepted(20)
    site.broker.kill()
    segment = site.data / segment_name(1)
    monkeypatch.setattr(records, "JOURNAL_VERSION", records.JOURNAL_VERSION + 1)
    head = records.encode_header(SEGMENT_MAGIC, 1, bytes(16))
    segment.write_bytes(head + segment.read_bytes()[HEADER_BYTES:])
    before = content(site.data)

    outcome = start_refused(site)

    assert (outcome.code, outcome.error["code"]) == (4, "version")
    assert outcome.error["remedy"]
    assert content(site.data) == before


def test_a_folder_with_half_a_header_only_is_begun_anew(site: Site) -> None:
    """All that a crash in the very first moment can leave: no job was ever accepted."""
    site.data.mkdir(mode=0o700)
    for size in (0, HEADER_BYTES - 1):
        (site.data / segment_name(1)).write_bytes(SEGMENT_MAGIC.ljust(HEADER_BYTES, b"\0")[:size])
        broker = site.start_broker()
        site.client().submit("nobody").wait_accepted(20)
        broker.kill()
        (site.data / segment_name(1)).unlink()


def test_a_folder_that_is_a_file_is_refused(site: Site) -> None:
    site.data.write_text("not a folder")

    outcome = start_refused(site)

    assert (outcome.code, outcome.error["code"]) == (2, "usage")
    assert str(site.data) in outcome.error["message"]
    assert site.data.read_text() == "not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_refused(site: Site) -> None:
    site.data.mkdir(mode=0o500)

    outcome = start_refused(site)

    assert (outcome.code, outcome.error["code"]) == (4, "storage")


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


@needs_mounts
@pytest.mark.parametrize("used", [False, True], ids=["empty", "used"])
def test_a_read_only_folder_is_refused(site: Site, used: bool) -> None:
    site.data.mkdir(mode=0o700)
    if used:
        site.start_broker()
        site.client().submit("nobody", job_id="there").wait_accepted(20)
        site.broker.kill()
    before = content(site.data)

    outcome = start_refused(site, "unshare", "-rm", "sh", "-c", READ_ONLY, str(site.data))

    assert (outcome.code, outcome.error["code"]) == (4, "storage")
    assert "read-only" in outcome.error["message"].lower()
    assert content(site.data) == before


# ------------------------------------------------------------------ full disks


def fill(client: ekiden.Client, piece: int = 200_000) -> int:
    """Submit until the broker refuses for want of room; how many it took."""
    taken = 0
    while True:
        futures = client.submit_many("nobody", [os.urandom(piece) for _ in range(5)])
        for future in futures:
            try:
                future.wait_accepted(30)
            except errors.DiskFull as full:
                assert full.retry_after_s > 0
                assert full.remedy
                return taken
            taken += 1
        assert taken < 1000, "the disk never ran full"


def start_gates(site: Site, client: ekiden.Client, count: int) -> list[ekiden.JobFuture]:
    """Jobs that run until `open_gate`."""
    gate = site.folder / "gate"
    futures = client.submit_many("gate", [str(gate)] * count)
    began = gate.with_suffix(".began")
    until(lambda: began.exists() and began.read_text().count("\n") == count, "the jobs to run")
    return futures


def open_gate(site: Site) -> None:
    (site.folder / "gate.open").touch()


def check_refused(site: Site, client: ekiden.Client) -> None:
    """New jobs are refused; questions are answered."""
    with pytest.raises(errors.DiskFull):
        client.submit("nobody", payload=bytes(10_000)).result(20)
    refused = site.run("submit", "nobody", "--json")
    assert (refused.code, refused.error["code"]) == (4, "disk_full")
    assert client.stats()["jobs"]["queued"] > 0


def check_served(client: ekiden.Client) -> None:
    """Jobs are taken and run again."""

    def again() -> bool:
        try:
            return client.submit("echo", payload=b"again").result(20).output == b"again"
        except errors.DiskFull:
            return False

    until(again, "new jobs to be taken again")


SMALL_DISK = 'mount -t tmpfs -o size=16m,mode=700 none "$0" && exec "$@"'


@contextmanager
def ballast(broker: Child, folder: Path) -> Iterator[None]:
    """Take every byte that is left on the broker's own disk."""
    # Its mounts are seen through its root.
    inside = Path(f"/proc/{broker.pid}/root") / str(folder).lstrip("/")
    path = inside / "ballast"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    try:
        yield
    finally:
        path.unlink()


@needs_mounts
@pytest.mark.slow
def test_on_a_full_disk_new_jobs_are_refused_and_running_ones_settle(site: Site) -> None:
    site.data.mkdir(mode=0o700)
    prefix = ("unshare", "-rm", "sh", "-c", SMALL_DISK, str(site.data))
    broker = site.start_broker(prefix=prefix, config={"disk_headroom": 6 * MB})
    inside = Path(f"/proc/{broker.pid}/root") / str(site.data).lstrip("/")
    client = site.client(key_file=inside / "key")
    site.environment["EKIDEN_KEY_FILE"] = str(inside / "key")
    site.start_worker(slots=4)
    wait_workers(client)
    gates = start_gates(site, client, 4)

    taken = fill(client)

    # Full for new jobs: what is kept free is for the running ones.
    assert taken >= 20
    left = os.statvfs(inside)
    assert left.f_bavail * left.f_bsize >= 4 * MB, "new jobs took what is kept for running ones"
    check_refused(site, client)
    open_gate(site)
    assert [future.result(20).output for future in gates] == [b"gate"] * 4

    # Really full: what cannot be written waits, and comes when there is room.
    for mark in ("gate.open", "gate.began"):
        (site.folder / mark).unlink()
    queued = [job["id"] for job in client.jobs(state="queued", limit=1000)["jobs"]]
    assert len(queued) >= taken
    with ballast(broker, site.data):
        check_refused(site, client)
        # Longer than what a last, half-filled page of the journal could still take.
        ids = [*queued[:1], *(f"unknown-{n:0100}" for n in range(200))]
        cancelled = client._core.ask("cancel", {"ids": ids})
        until(lambda: "journal.no_space" in broker.logged(), "the broker to meet the end")
        assert broker.alive
        assert not cancelled.done(), "it answered before it could write"
    assert cancelled.result(20)["cancelled"] == 1

    # Room again: a snapshot forgets what was cancelled, or somebody cleans up.
    assert client.cancel(queued)["cancelled"] == len(queued) - 1
    with pytest.raises(errors.JobCancelled):
        client.attach(queued[0]).result(20)
    assert broker.terminate() == 0


@linux_only
def test_when_a_file_may_not_grow_jobs_wait_and_everything_resumes(site: Site) -> None:
    broker = site.start_broker()
    client = site.client()
    site.start_worker(slots=4)
    wait_workers(client)
    # The limit holds for all files: the journal must be the largest.
    done = [f.result(20) for f in client.submit_many("echo", [os.urandom(100_000)] * 10)]
    assert len(done) == 10
    gates = start_gates(site, client, 4)
    # Up to the last record: behind it the file has room in reserve, which no limit takes away.
    size = len((site.data / segment_name(1)).read_bytes().rstrip(b"\0"))
    _, hard = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)

    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (size, hard))
    with pytest.raises(errors.DiskFull) as full:
        client.submit("nobody", payload=bytes(1000), job_id="refused").result(20)
    assert full.value.remedy
    failures = broker.logged().count("journal.no_space")
    open_gate(site)
    until(
        lambda: broker.logged().count("journal.no_space") > failures, "the results to find no room"
    )
    assert isinstance(client.stats(), dict)
    assert not any(future.done() for future in gates), "a result was told that is not written"
    assert broker.alive

    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert [future.result(20).output for future in gates] == [b"gate"] * 4
    check_served(client)
    with pytest.raises(errors.UnknownJob):
        client.job("refused")
    assert client.stats()["jobs"]["done"] >= 15
    assert broker.terminate() == 0
    assert site.run("log", "verify", str(site.data), "--json").json["ok"]


@linux_only
def test_a_broker_killed_on_a_full_disk_recovers_with_all_that_was_accepted(site: Site) -> None:
    broker = site.start_broker()
    client = site.client()
    client.submit("nobody", payload=bytes(300_000), job_id="first").wait_accepted(20)
    size = (site.data / segment_name(1)).stat().st_size
    _, hard = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (size + 5_000, hard))
    accepted = ["first"]
    for number in range(100):
        job = client.submit("nobody", payload=bytes(1000), job_id=f"job-{number}")
        try:
            job.wait_accepted(20)
        except errors.DiskFull:
            break
        accepted.append(job.job_id)
    assert 1 < len(accepted) < 100

    broker.kill()
    site.start_broker()
    until(lambda: client.connected, "the client to come back")

    assert {client.job(job_id)["state"] for job_id in accepted} == {"queued"}
    with pytest.raises(errors.UnknownJob):
        client.job(f"job-{len(accepted) - 1}")


def test_a_broker_whose_folder_is_taken_away_stops_instead_of_writing_into_nothing(
    site: Site,
) -> None:
    broker = site.start_broker()
    site.client().submit("nobody").wait_accepted(20)

    site.data.rename(site.folder / "elsewhere")

    assert broker.wait() == 4
    assert '"code":"storage"' in broker.logged()
