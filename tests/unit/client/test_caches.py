"""Putting caches, and jobs that use them, from the caller's side."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.client.cachebroker import CacheMachine, cache_broker, client_of, worker
from tests.unit.client.loopback import KEY, Loopback

import ekiden
from ekiden import errors, limits
from ekiden.client import packing, putting, stock
from ekiden.client.caches import CacheProgress
from ekiden.client.packing import Tally
from ekiden.client.programs import ProgramArgs
from ekiden.model.caches import CacheUse, check_manifest
from ekiden.model.work import FileRef, Function, Program, ProgramCall
from ekiden.world import porter

LARGE = os.urandom(limits.PACKED_FILE_BYTES + 1)


@pytest.fixture
def pair() -> Iterator[tuple[CacheMachine, ekiden.Client]]:
    with cache_broker() as (machine, broker), client_of(broker) as client:
        yield machine, client


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def folder(root: Path, **files: bytes) -> Path:
    for name, data in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def read(files: Any) -> packing.Contents:
    return packing.read_all(packing.find_sources(files), Tally())


# ------------------------------------------------------------------ what is in a folder


def test_a_folder_is_all_its_plain_files_hidden_ones_too(tmp_path: Path) -> None:
    folder(tmp_path, b=b"2", a__c=b"1")
    (tmp_path / ".hidden").write_bytes(b"3")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a" / "run").write_bytes(b"#!")
    (tmp_path / "a" / "run").chmod(0o755)

    found = read(tmp_path)

    assert [(f.name, f.size, f.executable) for f in found.files] == [
        (".hidden", 1, False), ("a/c", 1, False), ("a/run", 2, True), ("b", 1, False),
    ]  # fmt: skip


def test_one_file_goes_by_its_own_name(tmp_path: Path) -> None:
    folder(tmp_path, a=b"1")

    assert [file.name for file in read(str(tmp_path / "a")).files] == ["a"]


def test_names_may_stand_for_bytes_files_and_folders(tmp_path: Path) -> None:
    folder(tmp_path, x=b"1", y__z=b"2")

    found = read({"data": b"0", "one": tmp_path / "x", "all": tmp_path})

    assert [file.name for file in found.files] == ["all/x", "all/y/z", "data", "one"]


def test_names_are_brought_into_the_composed_form(tmp_path: Path) -> None:
    folder(tmp_path, ü=b"1")

    assert [file.name for file in read(tmp_path).files] == ["ü"]


def test_a_link_is_refused_by_name(tmp_path: Path) -> None:
    folder(tmp_path, a=b"1")
    (tmp_path / "l").symlink_to("a")

    with pytest.raises(errors.WrongUsage, match=r"/l' is a symbolic link"):
        read(tmp_path)


def test_a_pipe_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")

    with pytest.raises(errors.WrongUsage, match=r"/p' is no plain file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, errors.WrongUsage),
        ({"a": 3}, errors.WrongUsage),
        (7, errors.WrongUsage),
        ("/nonexistent", errors.WrongUsage),
        ({"../a": b""}, errors.BadName),
        ({"ü": b"1", "u\u0308": b"2"}, errors.BadName),
    ],
)
def test_what_can_be_no_cache_is_refused(files: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(files)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.WrongUsage, match="no files"):
        read(tmp_path)


# ------------------------------------------------------------------ packs


def test_small_contents_are_packed_once_and_large_ones_are_not() -> None:
    files = {"a": b"x" * 100, "b": b"x" * 100, "c": b"", "large": LARGE}
    found = read(files)

    packs = packing.plan_packs(found.files, {})
    data, blob = packing.make_pack(packs[0], found.kept)
    manifest = packing.describe(found.files, packing.places_in(packs[0], blob))

    assert len(packs) == 1
    assert data == b"x" * 100
    assert manifest.packs == [(hash_of(data), 100)]
    assert list(manifest.blobs()) == [(hash_of(data), 100), (hash_of(LARGE), len(LARGE))]
    check_manifest(manifest)


def test_a_pack_is_not_larger_than_a_pack_may_be() -> None:
    size = limits.PACKED_FILE_BYTES
    files = {f"{n}": os.urandom(size) for n in range(limits.PACK_BYTES // size + 1)}

    packs = packing.plan_packs(read(files).files, {})

    assert [sum(file.size for file in pack) for pack in packs] == [limits.PACK_BYTES, size]


def test_files_that_memory_has_no_room_for_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "KEPT_BYTES", 0)
    found = read(folder(tmp_path, a=b"one", b=b"two"))

    data, _ = packing.make_pack(found.files, found.kept)

    assert found.kept == {}
    assert data == b"onetwo"
    folder(tmp_path, a=b"six")
    with pytest.raises(errors.Fault, match="'a' has changed"):
        packing.make_pack(found.files, found.kept)


def test_a_pack_is_used_again_only_if_enough_of_it_is_of_use() -> None:
    old = read({"a": b"a" * 40, "b": b"b" * 60})
    manifest = packing.describe(old.files, packing.places_in(old.files, "f" * 64))
    hash_a, hash_b = hash_of(b"a" * 40), hash_of(b"b" * 60)

    assert packing.find_places({hash_a: 40}, manifest) == {}
    assert packing.find_places({hash_b: 60, "0" * 64: 5}, manifest) == {
        hash_b: packing.Place("f" * 64, 100, 40)
    }


def test_reading_ends_when_nobody_wants_it() -> None:
    tally = Tally()
    tally.stopped = True

    with pytest.raises(packing.Stop):
        packing.read_all(packing.find_sources({"a": b""}), tally)


# ------------------------------------------------------------------ putting


def test_a_folder_arrives_as_it_is(
    pair: tuple[CacheMachine, ekiden.Client], tmp_path: Path
) -> None:
    machine, client = pair
    folder(tmp_path, a=b"1", b__c=b"2", large=LARGE)

    report = client.put_cache("ds1", tmp_path)

    assert machine.content("ds1") == {"a": b"1", "b/c": b"2", "large": LARGE}
    assert (report.cache_id, report.state, report.files) == ("ds1", "new", 3)
    assert report.bytes == len(LARGE) + 2
    assert report.sent_bytes == machine.received
    assert (report.reached, report.of, report.ratio, report.remark) == (1, 1, 1.0, "")
    assert machine.caches["ds1"]["targets"] == ["job.>"]


def test_the_same_once_more_sends_nothing(pair: tuple[CacheMachine, ekiden.Client]) -> None:
    machine, client = pair
    client.put_cache("ds1", {"a": b"1", "large": LARGE})
    offered = list(machine.offered)

    report = client.put_cache("ds1", {"a": b"1", "large": LARGE})

    assert (report.state, report.sent_bytes) == ("same", 0)
    assert machine.offered == offered


def test_the_same_files_are_the_same_cache_also_if_newer_caches_have_them_elsewhere(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    _, client = pair
    client.put_cache("ds1", {"a": b"1" * 10, "b": b"2" * 90})
    client.put_cache("ds2", {"a": b"1" * 10, "c": b"3" * 5})

    assert client.put_cache("ds1", {"a": b"1" * 10, "b": b"2" * 90}).state == "same"


def test_other_content_under_an_id_is_refused_before_anything_is_sent(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    client.put_cache("ds1", {"a": b"1"})
    offered = list(machine.offered)

    with pytest.raises(errors.Conflict, match="cache rm ds1"):
        client.put_cache("ds1", {"a": b"2"})

    assert machine.offered == offered


def test_of_a_changed_folder_only_what_changed_is_sent(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    files = {f"{n:03}": os.urandom(1000) for n in range(100)}
    client.put_cache("day1", {**files, "large": LARGE})
    before = machine.received
    files["007"] = os.urandom(1000)

    report = client.put_cache("day2", {**files, "large": LARGE})

    manifest_bytes = machine.caches["day2"]["size"]
    assert report.sent_bytes == machine.received - before == 1000 + manifest_bytes
    assert machine.content("day2") == {**files, "large": LARGE}


def test_packs_that_are_gone_are_brought_again(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    client.put_cache("day1", {"a": b"1" * 100})

    def lose() -> None:
        machine.blobs.pop(hash_of(b"1" * 100), None)
        machine.before_put = lambda: None

    machine.before_put = lose

    client.put_cache("day2", {"a": b"1" * 100, "b": b"2"})

    assert machine.content("day2") == {"a": b"1" * 100, "b": b"2"}


def test_a_manifest_that_is_gone_is_not_used(pair: tuple[CacheMachine, ekiden.Client]) -> None:
    machine, client = pair
    machine.caches["old"] = {"id": "old", "manifest": "0" * 64, "size": 9}

    client.put_cache("ds1", {"a": b"1"})

    assert machine.content("ds1") == {"a": b"1"}


def test_who_puts_the_same_at_the_same_time_is_no_conflict(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    files = {"a": b"1" * 10, "b": b"2" * 90}
    read_files = read(files).files
    places = packing.places_in(read_files[:1], hash_of(files["a"]))
    places |= packing.places_in(read_files[1:], hash_of(files["b"]))
    other = msgspec.msgpack.encode(packing.describe(read_files, places))  # a pack for each file
    machine.blobs |= {hash_of(data): data for data in (*files.values(), other)}

    def overtake() -> None:
        machine.caches["ds1"] = {"id": "ds1", "manifest": hash_of(other), "size": len(other)}

    machine.before_put = overtake

    assert client.put_cache("ds1", files).state == "same"


@pytest.mark.parametrize("changes", [1, 2])
def test_a_file_that_changes_while_it_is_put_is_read_once_more_and_then_refused(
    pair: tuple[CacheMachine, ekiden.Client],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: int,
) -> None:
    machine, client = pair
    folder(tmp_path, large=LARGE)
    read_all = packing.read_all
    left = [LARGE[::-1], LARGE[1:] + b"!"][:changes]

    def read_and_change(*args: Any) -> Any:
        found = read_all(*args)
        if left:
            folder(tmp_path, large=left.pop(0))
        return found

    monkeypatch.setattr(packing, "read_all", read_and_change)

    if changes == 1:
        client.put_cache("ds1", tmp_path)
        assert machine.content("ds1") == {"large": LARGE[::-1]}
        return
    with pytest.raises(errors.Fault, match="'large' has changed"):
        client.put_cache("ds1", tmp_path)
    assert machine.caches == {}


def test_a_large_file_is_hashed_once(
    pair: tuple[CacheMachine, ekiden.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(porter, "_open_and_hash")
    machine, client = pair

    client.put_cache("ds1", folder(tmp_path, large=LARGE))

    assert machine.content("ds1") == {"large": LARGE}


def test_what_cannot_be_meant_is_refused_without_a_broker() -> None:
    with ekiden.Client("127.0.0.1:1", key=KEY) as client:
        for bad in (
            lambda: client.put_cache("a b", {"a": b""}),
            lambda: client.put_cache("a", {"a": b""}, "no good"),
            lambda: client.put_cache("a", {"a": b""}, success_ratio=2),
            lambda: client.submit("x", caches=["a/b"]),
            lambda: client.submit("x", caches=[f"{n}" for n in range(17)]),
        ):
            with pytest.raises(errors.Refusal):
                bad()


# ------------------------------------------------------------------ reaching workers


def test_a_put_ends_when_the_last_worker_has_it(
    pair: tuple[CacheMachine, ekiden.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "_LOOK_FIRST_S", 0.001)
    machine, client = pair
    seen: list[CacheProgress] = []
    machine.workers = lambda look: [
        worker("w1", "skipped"),
        worker("w2", "pending", done=0) if look < 3 else worker("w2", "ok"),
    ]

    report = client.put_cache("ds1", {"a": b"1"}, progress=seen.append)

    assert [each.status for each in report.workers] == ["skipped", "ok"]
    assert machine.looks == 3
    assert seen[-1] == CacheProgress("reaching", 20, 20, 2, 2)


def test_too_few_workers_are_an_error_with_the_report_on_it(
    pair: tuple[CacheMachine, ekiden.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "_STALE_S", 0.0)
    machine, client = pair
    machine.workers = lambda _look: [worker("w1", "ok"), worker("w2", "failed", "the disk is full")]

    with pytest.raises(
        errors.CacheIncomplete, match=r"1 of 2 .*failed: w2 \(the disk is full\)"
    ) as e:
        client.put_cache("ds1", {"a": b"1"})

    assert isinstance(e.value.report, ekiden.CacheReport)
    assert e.value.report.ratio == 0.5
    assert client.put_cache("ds1", {"a": b"1"}, success_ratio=0.5).reached == 1


def test_time_is_up_for_workers_that_say_nothing(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    machine.workers = lambda _look: [worker("w1", "fetching", done=3)]

    with pytest.raises(errors.CacheIncomplete, match="1 not there yet"):
        client.put_cache("ds1", {"a": b"1"}, timeout_s=0)

    assert client.put_cache("ds1", {"a": b"1"}, wait=False).reached == 0


def test_a_failure_of_an_earlier_try_does_not_end_the_next(
    pair: tuple[CacheMachine, ekiden.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "_LOOK_FIRST_S", 0.001)
    machine, client = pair
    client.put_cache("ds1", {"a": b"1"})
    looks = machine.looks
    machine.workers = lambda look: [worker("w1", "failed" if look < looks + 4 else "ok")]

    assert client.put_cache("ds1", {"a": b"1"}).reached == 1


def test_a_callback_that_fails_does_not_end_the_put(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    def fail(_progress: CacheProgress) -> None:
        raise RuntimeError("mine")

    assert pair[1].put_cache("ds1", {"a": b"1"}, progress=fail).reached == 1


def test_without_workers_it_is_put_and_said(pair: tuple[CacheMachine, ekiden.Client]) -> None:
    machine, client = pair
    machine.workers = lambda _look: []

    report = client.put_cache("ds1", {"a": b"1"})

    assert (report.of, report.ratio) == (0, 1.0)
    assert "by themselves" in report.remark


def test_closing_the_client_ends_a_put(pair: tuple[CacheMachine, ekiden.Client]) -> None:
    machine, client = pair
    machine.workers = lambda look: [worker("w1", "pending")]
    put = client._core.carry_out(
        client._putting(putting.Order(cache_id="ds1", files={"a": b"1"}), None)
    )
    while not machine.looks:
        client.stats()

    client.close()

    assert isinstance(put.exception(5), errors.Closed)


# ------------------------------------------------------------------ looking at caches


def test_caches_are_listed_shown_and_removed(pair: tuple[CacheMachine, ekiden.Client]) -> None:
    _, client = pair
    client.put_cache("a", {"x": b"1"})
    client.put_cache("b", {"y": b"2", "z": LARGE})

    assert [each["id"] for each in client.caches()] == ["b", "a"]
    assert client.cache("a")["workers"] == [worker("w1", "ok")]
    assert [(f.name, f.size) for f in client.cache_files("b")] == [("y", 1), ("z", len(LARGE))]
    assert client.verify_cache("a") == {"id": "a", "workers": 1}
    assert client.remove_cache("a", "q") == {"removed": ["a"], "in_use": [], "unknown": ["q"]}


def test_all_pages_of_the_list_are_read(
    pair: tuple[CacheMachine, ekiden.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "_PAGE", 2)
    _, client = pair
    for n in range(5):
        client.put_cache(f"c{n}", {"x": b"%d" % n})

    assert [each["id"] for each in client.caches()] == ["c4", "c3", "c2", "c1", "c0"]


# ------------------------------------------------------------------ jobs that use caches


def use_of(machine: CacheMachine, cache_id: str) -> CacheUse:
    facts = machine.caches[cache_id]
    return CacheUse(cache_id, facts["manifest"], facts["size"])


def test_jobs_name_their_caches_by_content(pair: tuple[CacheMachine, ekiden.Client]) -> None:
    machine, client = pair
    client.put_cache("b", {"x": b"1"})
    client.put_cache("a", {"x": b"2"})
    looks = machine.looks

    futures = [client.submit("echo", payload=b"%d" % n, caches=["b", "a", "b"]) for n in range(3)]
    assert [future.result(10).output for future in futures] == [b"0", b"1", b"2"]
    client.submit_many("echo", [b"4"], caches=("a",))[0].result(10)

    assert machine.spec(0).caches == (use_of(machine, "a"), use_of(machine, "b"))
    assert machine.spec(0).route.data == ("a", "b")
    assert machine.spec().caches == (use_of(machine, "a"),)
    assert machine.looks == looks + 2


def test_jobs_without_caches_ask_nothing(pair: tuple[CacheMachine, ekiden.Client]) -> None:
    machine, client = pair

    client.submit("echo", payload=b"1").result(10)

    assert machine.asked == []
    assert (machine.spec().caches, machine.spec().route.data) == ((), ())
    assert machine.submits[-1].blobs == {}


def test_an_unknown_cache_fails_its_jobs_alone_and_can_be_put_later(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    _, client = pair
    client.put_cache("a", {"x": b"1"})

    lost = client.submit("echo", caches=["nope", "a"])
    well = client.submit("echo", payload=b"1", caches=["a"])

    with pytest.raises(errors.UnknownCache, match="ekiden cache list"):
        lost.result(10)
    assert well.result(10).output == b"1"
    client.put_cache("nope", {"x": b"1"})
    assert client.submit("echo", caches=["nope"]).result(10).output == b""


def test_map_and_functions_take_caches_too(pair: tuple[CacheMachine, ekiden.Client]) -> None:
    machine, client = pair
    client.put_cache("a", {"x": b"1"})

    list(client.map("echo", [b"1"], caches=["a"]))
    client.call_with({"caches": ["a"]}, len, b"123").wait_accepted(10)

    function = msgspec.msgpack.decode(machine.spec().shared, type=Function)
    assert machine.spec(0).caches == machine.spec().caches == (use_of(machine, "a"),)
    assert machine.spec().blobs == ((function.blob, function.size),)


def test_all_calls_of_an_executor_may_need_a_cache(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    client.put_cache("a", {"x": b"1"})

    ekiden.Executor(client=client, caches=["a"]).submit(len, b"123").wait_accepted(10)

    assert machine.spec().caches == (use_of(machine, "a"),)


def test_a_program_gets_files_of_caches_by_reference(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    client.put_cache("a", {"d/x": b"1", "large": LARGE})
    client.put_cache("b", {"y": b"22"})
    calls = [
        ProgramArgs(files={"in.csv": ekiden.CacheFile("a", "d/x"), "own": LARGE}),
        ProgramArgs(files={"in.csv": b"33"}),
    ]

    futures = client.submit_programs(
        "p", calls, common={"c": ekiden.CacheFile("b", "y")}, manifest=f"{'e' * 64}:7"
    )
    for future in futures:
        future.wait_accepted(10)

    own = hash_of(LARGE)
    (submit,) = machine.submits
    bodies = [msgspec.msgpack.decode(body, type=ProgramCall) for body in submit.bodies]
    program = msgspec.msgpack.decode(machine.spec().shared, type=Program)
    assert bodies[0].files == [
        FileRef("in.csv", 1, None, hash_of(b"1"), False, "a", "d/x"),
        FileRef("own", len(LARGE), None, own),
    ]
    assert program.files == (FileRef("c", 2, None, hash_of(b"22"), False, "b", "y"),)
    assert machine.spec().caches == (use_of(machine, "a"), use_of(machine, "b"))
    assert machine.spec().route.data == ("a", "b")
    assert submit.blobs == {0: [(own, len(LARGE))]}
    assert machine.spec().blobs == (("e" * 64, 7),)


def test_a_manifest_is_fetched_once_for_many_files(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    client.put_cache("a", {f"{n}": b"%d" % n for n in range(5)})

    for n in range(5):
        client.submit_program("p", files={"x": ekiden.CacheFile("a", f"{n}")}).wait_accepted(10)

    assert machine.fetched == [machine.caches["a"]["manifest"]]


def test_a_file_that_is_not_in_the_cache_is_refused_at_once(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    _, client = pair
    client.put_cache("a", {"x": b"1"})

    with pytest.raises(errors.UnknownCache, match="cache show a --files"):
        client.submit_program("p", files={"x": ekiden.CacheFile("a", "y")})
    with pytest.raises(errors.UnknownCache, match="cache list"):
        client.submit_program("p", files={"x": ekiden.CacheFile("q", "y")})


def test_common_files_in_the_store_are_kept_for_the_jobs(
    pair: tuple[CacheMachine, ekiden.Client],
) -> None:
    machine, client = pair
    client.put_cache("a", {"x": b"1"})
    refs = client.store_files({"big": LARGE, "x": ekiden.CacheFile("a", "x")})

    client.submit_program("p", common=refs).wait_accepted(10)

    assert machine.spec().blobs == ((hash_of(LARGE), len(LARGE)),)
    assert machine.spec().caches == (use_of(machine, "a"),)


def test_after_a_reconnect_caches_are_asked_for_again() -> None:
    with cache_broker() as (machine, broker), client_of(broker) as client:
        client.put_cache("a", {"x": b"1"})
        client.submit("echo", caches=["a"]).result(10)
        looks = machine.looks
        broker.do(lambda machine: machine.hang_up())
        client.submit("echo", caches=["a"]).result(10)

    assert machine.looks == looks + 1


def test_the_async_client_does_the_same() -> None:
    async def work(broker: Loopback) -> None:
        async with ekiden.AsyncClient(broker.address, key=KEY) as client:
            report = await client.put_cache("a", {"x": b"1"})
            assert (report.state, report.reached) == ("new", 1)
            assert [each["id"] for each in await client.caches()] == ["a"]
            assert (await client.cache("a"))["files"] == 1
            assert [file.name for file in await client.cache_files("a")] == ["x"]
            assert (await client.submit("echo", payload=b"1", caches=["a"])).output == b"1"
            future = await client.submit_program("p", files={"x": ekiden.CacheFile("a", "x")})
            await future.wait_accepted(10)
            assert (await client.verify_cache("a"))["workers"] == 1
            assert (await client.remove_cache("a"))["removed"] == ["a"]
            with pytest.raises(errors.UnknownCache):
                await client.cache_files("a")

    with cache_broker() as (_, broker):
        asyncio.run(work(broker))
