"""Callers that meet nobody, somebody else, or a broker that does not know them."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.integration.processes import EKIDEN, HANDLERS, Site, until, wait_workers

import ekiden
from ekiden import errors


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address where nothing listens, and nothing else can begin to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def web_server() -> Iterator[str]:
    """A peer that answers, in another language."""

    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def some_key(tmp_path: Path) -> Path:
    return key_file(tmp_path / "some.key", secrets.token_bytes(32))


def key_file(path: Path, key: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_text(key.hex())
    return path


# A command that asks, one that submits (and may be told how long to try), one that waits.
COMMANDS = [
    ("stats",),
    ("submit", "echo", "--connect-timeout", "0.5"),
    ("wait", "some-job"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_that_meets_nobody_ends_with_3(
    site: Site, closed_port: str, some_key: Path, words: tuple[str, ...]
) -> None:
    outcome = site.run(*words, "--connect", closed_port, "--key-file", str(some_key), "--json")

    assert (outcome.code, outcome.error["code"]) == (3, "unreachable")
    assert closed_port in outcome.error["message"]
    assert "ekiden up" in outcome.error["remedy"]


@pytest.mark.parametrize("words", COMMANDS[:2], ids=" ".join)
def test_a_command_that_meets_a_web_server_ends_with_3(
    site: Site, web_server: str, some_key: Path, words: tuple[str, ...]
) -> None:
    outcome = site.run(*words, "--connect", web_server, "--key-file", str(some_key), "--json")

    assert (outcome.code, outcome.error["code"]) == (3, "unreachable")
    assert web_server in outcome.error["message"]
    assert "check host and port" in outcome.error["remedy"]


def test_a_client_holds_its_jobs_until_there_is_a_broker(site: Site, some_key: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        site.address = f"127.0.0.1:{taken.getsockname()[1]}"
        site.data.mkdir(mode=0o700)
        (site.data / "key").write_bytes(some_key.read_bytes())
        (site.data / "key").chmod(0o600)
        client = site.client()
        futures = client.submit_many("echo", [b"%d" % n for n in range(100)])
        with pytest.raises(errors.Unreachable) as nobody:
            client.wait_connected(0.3)
        assert site.address in str(nobody.value)
        assert not any(future.accepted for future in futures)

    site.start_broker()
    site.start_worker()

    assert [future.result(30).output for future in futures] == [b"%d" % n for n in range(100)]


def test_a_worker_waits_for_its_broker_and_says_so(site: Site, some_key: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        site.address = f"127.0.0.1:{taken.getsockname()[1]}"
        site.data.mkdir(mode=0o700)
        (site.data / "key").write_bytes(some_key.read_bytes())
        (site.data / "key").chmod(0o600)
        worker = site.start_worker("w1", "--key-file", str(some_key))
        until(lambda: site.address in worker.logged(), "the worker to say what it misses")
        assert worker.alive

    site.start_broker()
    wait_workers(site.client())


def test_a_worker_that_meets_a_web_server_goes_on_looking(
    site: Site, web_server: str, some_key: Path
) -> None:
    site.address = web_server
    worker = site.start_worker("w1", "--key-file", str(some_key))
    until(lambda: web_server in worker.logged(), "the worker to say what it met")
    assert worker.alive
    assert worker.terminate() == 0


# ------------------------------------------------------------------ keys


def test_without_a_key_callers_are_refused_with_4_and_told_where_it_is(
    site: Site, tmp_path: Path
) -> None:
    site.start_broker()
    elsewhere = {"EKIDEN_STATE": str(tmp_path / "another-user")}

    outcome = site.run("submit", "echo", "--json", **elsewhere)
    assert (outcome.code, outcome.error["code"]) == (4, "unauthenticated")
    assert "--key-file" in outcome.error["remedy"]

    missing = site.run("stats", "--json", "--key-file", str(tmp_path / "no.key"), **elsewhere)
    assert (missing.code, missing.error["code"]) == (4, "unauthenticated")
    assert "no.key" in missing.error["message"]


def test_with_a_wrong_key_callers_are_refused_with_4(site: Site, some_key: Path) -> None:
    site.start_broker()

    outcome = site.run("submit", "echo", "--json", "--key-file", str(some_key))
    assert (outcome.code, outcome.error["code"]) == (4, "unauthenticated")
    assert outcome.error["remedy"]

    worker = site.start(
        [
            *EKIDEN,
            *("worker", "--connect", site.address, "--key-file", str(some_key)),
            *("--handlers", HANDLERS),
        ],
        "wrong-key",
    )
    assert worker.wait() == 4
    assert "key" in worker.logged()

    client = site.client("other", key_file=some_key)
    with pytest.raises(errors.Unauthenticated):
        client.wait_connected(20)
    with pytest.raises(errors.Unauthenticated):
        client.submit("echo").result(20)

    assert site.client().stats()["clients"] >= 1, "who knows the key is served"


def test_a_key_that_others_can_read_is_not_used(site: Site) -> None:
    site.start_broker()
    open_key = site.folder / "open.key"
    open_key.write_bytes((site.data / "key").read_bytes())
    open_key.chmod(0o644)

    outcome = site.run("stats", "--json", "--key-file", str(open_key))

    assert (outcome.code, outcome.error["code"]) == (4, "unauthenticated")
    assert "chmod 600" in outcome.error["remedy"]


def test_a_broker_that_does_not_know_the_key_is_not_believed(site: Site, some_key: Path) -> None:
    """Whoever takes over the address of a broker learns nothing and is given no job."""
    other = Site(site.folder / "other")
    other.folder.mkdir()
    try:
        other.start_broker()
        site.address = other.address
        client = ekiden.Client(other.address, client_id="careful", key_file=some_key)
        try:
            future = client.submit("echo", payload=b"secret", job_id="careful-1")
            with pytest.raises(errors.Unauthenticated):
                future.result(20)
        finally:
            client.close(0)
        with pytest.raises(errors.UnknownJob):
            other.client().job("careful-1")
    finally:
        other.close()
