"""Data that is shipped once: real brokers and workers, killed, filled up and tampered with."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.integration.processes import EKIDEN, Child, Site, until, wait_workers

import ekiden
from ekiden.errors import CacheIncomplete, Conflict, UnknownCache, UnknownJob
from ekiden.limits import NS

MB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="programs need the keeper")

BROKER = {"silence_ns": 2 * NS, "heartbeat_ns": NS // 5, "rejoin_grace_ns": NS // 2}


def folder_of(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, data in files.items():
        (path / name.replace("_", ".")).write_bytes(data)
    return path


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def start_worker(
    site: Site, name: str, *flags: str, prefix: tuple[str, ...] = (), cache_max: str = "1"
) -> Child:
    """A worker that runs any program, with a cache folder of its own."""
    words = [*EKIDEN, "worker", "--connect", site.address, "--id", name, "--json", "--slots", "2"]
    places = ["--scratch", str(site.folder / f"scratch-{name}"), "--cache", str(tree(site, name))]
    limit = ["--cache-max", cache_max]
    command = [*prefix, *words, *places, *limit, "--allow-any-program", *flags]
    return site.start(command, f"worker-{name}")


def tree(site: Site, name: str) -> Path:
    return site.folder / f"cache-{name}"


def statuses(client: ekiden.Client, cache_id: str) -> dict[str, str]:
    return {word["id"]: word["status"] for word in client.cache(cache_id)["workers"]}


def cat(client: ekiden.Client, name: str, cache: str) -> bytes:
    """The file of a cache as a job finds it."""
    line = f'cat "$EKIDEN_CACHE/{cache}/{name}" > copy'
    future = client.submit_program("sh", ["-c", line], any_program=True, caches=[cache])
    data: bytes = future.result(60).files["copy"].read()
    return data


def found_in(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(name)
    return path


# ------------------------------------------------------------------ putting


@linux
def test_a_put_reaches_all_but_a_killed_worker_and_a_full_disk_and_is_finished_by_another(
    site: Site,
) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    tiny = ("prlimit", f"--fsize={2 * MB}", "--")
    workers = {name: start_worker(site, name) for name in ("w1", "w2", "w3")}
    workers["full"] = start_worker(site, "full", prefix=tiny)
    wait_workers(client, 4)
    source = folder_of(site.folder / "source", a_bin=noise(96 * MB), b_bin=noise(3 * MB, 2))

    putting = threading.Thread(target=lambda: put_in_part(client, source))
    putting.start()
    until(lambda: knows(client, "day") and statuses(client, "day")["w1"] == "fetching", "a fetch")
    workers["w1"].kill()
    putting.join(60)
    after = statuses(client, "day")
    workers["full"].kill()
    workers |= {name: start_worker(site, name) for name in ("w1", "full")}
    wait_workers(client, 4)
    report = client.put_cache("day", source, timeout_s=60)

    assert {name: after[name] for name in ("w2", "w3", "full")} == {
        "w2": "ok", "w3": "ok", "full": "failed",
    }  # fmt: skip
    assert (report.reached, report.of, report.sent_bytes) == (4, 4, 0)
    for name in workers:
        assert found_in(tree(site, name), "a.bin").read_bytes() == noise(96 * MB)
        assert leftovers(tree(site, name)) == []


def put_in_part(client: ekiden.Client, source: Path) -> None:
    with pytest.raises(CacheIncomplete, match="full"):
        client.put_cache("day", source, timeout_s=30)


def knows(client: ekiden.Client, cache_id: str) -> bool:
    with contextlib.suppress(UnknownCache):
        return bool(client.cache(cache_id))
    return False


def leftovers(folder: Path) -> list[str]:
    incoming = folder / "incoming"
    return [path.name for path in incoming.rglob("*")] if incoming.is_dir() else []


@linux
def test_of_two_clients_that_put_other_content_under_one_id_one_wins_everywhere(
    site: Site,
) -> None:
    site.start_broker(config=BROKER)
    clients = [site.client("ann"), site.client("bob")]
    start_worker(site, "w1")
    wait_workers(clients[0])
    sources = [folder_of(site.folder / f"d{n}", a_bin=noise(5 * MB, n)) for n in (0, 1)]
    outcomes: list[Any] = [None, None]

    def put(n: int) -> None:
        try:
            outcomes[n] = clients[n].put_cache("day", sources[n], timeout_s=60)
        except Conflict as error:
            outcomes[n] = error

    threads = [threading.Thread(target=put, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    lost = [n for n in (0, 1) if isinstance(outcomes[n], Conflict)]
    assert len(lost) == 1, outcomes
    winner = 1 - lost[0]
    assert outcomes[winner].reached == 1
    assert cat(clients[0], "a.bin", "day") == noise(5 * MB, winner)


@linux
def test_two_clients_that_put_the_same_content_at_once_have_put_one_cache(site: Site) -> None:
    site.start_broker(config=BROKER)
    clients = [site.client("ann"), site.client("bob")]
    start_worker(site, "w1")
    wait_workers(clients[0])
    source = folder_of(site.folder / "source", a_bin=noise(5 * MB), b_txt=b"small", c_txt=b"")
    reports: list[Any] = []
    threads = [
        threading.Thread(target=lambda c=client: reports.append(c.put_cache("day", source)))
        for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len({report.manifest for report in reports}) == 1
    assert sorted(report.state for report in reports) == ["new", "same"]


@linux
def test_what_has_not_changed_is_neither_sent_nor_stored_again(site: Site) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "w1")
    wait_workers(client)
    source = folder_of(site.folder / "source", a_bin=noise(20 * MB), b_txt=b"old")
    for n in range(200):
        (source / f"small{n}").write_bytes(noise(1000, n))
    client.put_cache("day1", source)
    before = disk_of(tree(site, "w1"))

    (source / "b.txt").write_bytes(b"new")
    report = client.put_cache("day2", source)

    assert report.reached == 1
    assert report.sent_bytes < 100_000
    assert disk_of(tree(site, "w1")) - before < 200_000
    assert cat(client, "b.txt", "day1") == b"old"
    assert cat(client, "b.txt", "day2") == b"new"
    assert cat(client, "small7", "day2") == noise(1000, 7)


def disk_of(folder: Path) -> int:
    """Bytes of its files, each counted once however many names it has."""
    facts = [path.lstat() for path in folder.rglob("*") if path.is_file()]
    return sum({fact.st_ino: fact.st_size for fact in facts}.values())


# ------------------------------------------------------------------ the life of the grid


@linux
def test_whoever_joins_late_or_comes_back_has_the_data_without_anybody_asking(site: Site) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    source = folder_of(site.folder / "source", a_bin=noise(MB))
    report = client.put_cache("day", source)
    early = start_worker(site, "w1")
    until(lambda: statuses(client, "day") == {"w1": "ok"}, "the late worker")

    assert early.terminate() == 0
    start_worker(site, "w1")

    assert (report.reached, report.of) == (0, 0)
    until(lambda: statuses(client, "day") == {"w1": "skipped"}, "the worker that is back")


@linux
def test_a_broker_that_is_killed_in_mid_upload_leaves_nothing_half_done(site: Site) -> None:
    broker = site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "w1")
    wait_workers(client)
    source = folder_of(site.folder / "source", a_bin=noise(150 * MB))
    reports: list[Any] = []
    putting = threading.Thread(target=lambda: reports.append(client.put_cache("day", source)))

    putting.start()
    incoming = site.data / "blobs" / "incoming"
    until(lambda: size_below(incoming) > 10 * MB, "the upload to be half-way")
    broker.kill()
    site.start_broker(config=BROKER)
    putting.join(90)

    assert [report.reached for report in reports] == [1]
    assert size_below(incoming) == 0
    assert cat(client, "a.bin", "day") == noise(150 * MB)


def size_below(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return 0


@linux
def test_data_that_a_job_reads_is_not_evicted_under_it(site: Site) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "w1", cache_max="0.03")
    wait_workers(client)
    client.put_cache("one", folder_of(site.folder / "one", a_bin=noise(20 * MB)))
    go = site.folder / "go"
    line = f'while [ ! -e {go} ]; do sleep 0.02; done; cat "$EKIDEN_CACHE/one/a.bin" | wc -c'
    reading = client.submit_program("sh", ["-c", line], any_program=True, caches=["one"])
    until(lambda: state_of(client, reading.job_id) == "running", "the job to run")

    with contextlib.suppress(CacheIncomplete):
        client.put_cache("two", folder_of(site.folder / "two", a_bin=noise(20 * MB, 2)),
                         timeout_s=5)  # fmt: skip
    go.touch()
    size = int(reading.result(60).stdout)
    report = client.put_cache("two", site.folder / "two", timeout_s=60)

    assert size == 20 * MB
    assert report.reached == 1
    # What had to go comes back for a job that needs it.
    assert cat(client, "a.bin", "one") == noise(20 * MB)


def test_a_cache_in_use_is_not_removed_and_one_that_is_not_leaves_the_disks(site: Site) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "w1")
    wait_workers(client)
    client.put_cache("day", folder_of(site.folder / "source", a_bin=noise(MB)))
    waiting = client.submit("nobody", subject="no.one", caches=["day"])
    until(lambda: state_of(client, waiting.job_id) == "queued", "the job to wait")

    in_use = client.remove_cache("day", "none")
    waiting.cancel()
    removed = client.remove_cache("day")

    assert in_use == {"removed": [], "in_use": ["day"], "unknown": ["none"]}
    assert removed == {"removed": ["day"], "in_use": [], "unknown": []}
    with pytest.raises(UnknownCache):
        client.cache("day")
    until(lambda: not list(tree(site, "w1").rglob("a.bin")), "the tree to be removed")


def state_of(client: ekiden.Client, job_id: str) -> str:
    with contextlib.suppress(UnknownJob):
        return str(client.job(job_id)["state"])
    return ""


# ------------------------------------------------------------------ damage


@linux
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_on_a_worker_is_found_before_a_job_reads_it(site: Site, how: str) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "w1")
    wait_workers(client)
    client.put_cache("day", folder_of(site.folder / "source", a_bin=noise(MB), b_txt=b"small"))
    path = found_in(tree(site, "w1"), "a.bin")

    damage(path, how)

    assert cat(client, "a.bin", "day") == noise(MB)
    assert cat(client, "b.txt", "day") == b"small"


def damage(path: Path, how: str) -> None:
    os.chmod(path.parent, 0o700)
    os.chmod(path, 0o600)
    match how:
        case "flipped":
            with path.open("r+b") as file:
                file.seek(1000)
                byte = file.read(1)
                file.seek(1000)
                file.write(bytes([byte[0] ^ 1]))
        case "cut":
            os.truncate(path, 10)
        case _:
            path.unlink()


@linux
def test_rot_that_changes_no_time_is_found_by_verify_and_repaired(site: Site) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "w1")
    wait_workers(client)
    client.put_cache("day", folder_of(site.folder / "source", a_bin=noise(MB)))

    client.verify_cache("day")
    until(lambda: statuses(client, "day") == {"w1": "skipped"}, "sound data to be found so")
    damage(found_in(tree(site, "w1"), "a.bin"), "flipped")
    client.verify_cache("day")

    until(lambda: statuses(client, "day") == {"w1": "ok"}, "the repair")
    assert found_in(tree(site, "w1"), "a.bin").read_bytes() == noise(MB)


@linux
def test_damage_in_the_store_is_found_by_who_reads_it_and_mended_by_putting_again(
    site: Site,
) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    source = folder_of(site.folder / "source", a_bin=noise(MB))
    client.put_cache("day", source)
    (blob,) = [
        p for p in (site.data / "blobs").rglob("*") if p.is_file() and p.stat().st_size == MB
    ]
    damage(blob, "flipped")

    start_worker(site, "w1")
    until(lambda: statuses(client, "day").get("w1") == "failed", "the damage to be told", 60)
    report = client.put_cache("day", source, timeout_s=60)

    assert report.reached == 1
    assert report.sent_bytes >= MB
    assert cat(client, "a.bin", "day") == noise(MB)


@linux
def test_a_job_that_writes_to_its_data_does_not_poison_the_next(site: Site) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "w1")
    wait_workers(client)
    client.put_cache("day", folder_of(site.folder / "source", a_txt=b"as it should be"))
    poison = 'cd "$EKIDEN_CACHE/day" && chmod 700 . && chmod 600 a.txt && echo poison > a.txt'

    client.submit_program("sh", ["-c", poison], any_program=True, caches=["day"]).result(60)

    assert cat(client, "a.txt", "day") == b"as it should be"


# ------------------------------------------------------------------ jobs


@linux
def test_a_job_is_placed_where_its_data_is_and_elsewhere_when_that_is_busy(site: Site) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "near", "--subjects", "job.program.>,job.assign.near")
    start_worker(site, "far")
    wait_workers(client, 2)
    client.put_cache(
        "day", folder_of(site.folder / "source", a_txt=b"data"), target="job.assign.near"
    )

    options: dict[str, Any] = {"any_program": True, "caches": ["day"]}
    alone = [client.submit_program("true", [], **options).result(60).worker for _ in range(6)]
    crowd = [client.submit_program("sleep", ["0.3"], **options) for _ in range(30)]

    assert set(alone) == {"near"}
    assert {future.result(60).worker for future in crowd} == {"near", "far"}


@linux
def test_a_file_of_a_cache_lies_in_the_folder_of_the_job_under_the_name_it_asked_for(
    site: Site,
) -> None:
    site.start_broker(config=BROKER)
    client = site.client()
    start_worker(site, "w1")
    wait_workers(client)
    client.put_cache("day", folder_of(site.folder / "source", a_txt=b"of the cache"))
    files: dict[str, Any] = {"in/curve": ekiden.CacheFile("day", "a.txt"), "own": b" and its own"}

    result = client.submit_program(
        "sh", ["-c", "cat in/curve own"], any_program=True, files=files
    ).result(60)

    assert result.stdout == b"of the cache and its own"
    assert result.files == {}
    with pytest.raises(UnknownCache, match="no file"):
        client.submit_program(
            "true", [], any_program=True, files={"x": ekiden.CacheFile("day", "none")}
        ).result(60)
