"""The local key: drawn once, found by address, refused when others could have read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ekiden.errors import StorageFault, Unauthenticated, WrongUsage
from ekiden.world import keys
from ekiden.world.keys import find_key, make_broker_key, publish_key, withdraw

posix_only = pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX matter")
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("EKIDEN_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("EKIDEN_KEY_FILE", raising=False)
    return tmp_path / "state"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_broker_draws_its_key_once_and_keeps_it(tmp_path: Any) -> None:
    first = make_broker_key(tmp_path / "data")
    assert len(first) == 32
    assert make_broker_key(tmp_path / "data") == first
    assert make_broker_key(tmp_path / "other") != first


@posix_only
def test_keys_and_their_folder_are_closed_to_others(tmp_path: Any, state: Any) -> None:
    before = os.umask(0)
    try:
        make_broker_key(tmp_path / "data")
        place = publish_key("127.0.0.1:7000", KEY)
    finally:
        os.umask(before)
    assert mode(tmp_path / "data" / "key") == 0o600
    assert mode(place) == 0o600
    assert mode(place.parent) == 0o700
    assert place == state / "keys" / "127.0.0.1_7000"


def test_nothing_but_the_key_is_left_behind(tmp_path: Any) -> None:
    make_broker_key(tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["key"]


@pytest.mark.parametrize("asked", ["127.0.0.1:7000", "localhost:7000", "[::1]:7000"])
@pytest.mark.parametrize("bound", ["127.0.0.1:7000", "0.0.0.0:7000", "[::]:7000"])
def test_a_published_key_is_found_under_every_name_of_this_machine(bound: Any, asked: Any) -> None:
    publish_key(bound, KEY)
    assert find_key(asked) == KEY


def test_a_key_is_found_for_the_first_known_of_several_addresses() -> None:
    publish_key("b.example:7000", KEY)
    assert find_key("a.example:7000, b.example:7000") == KEY


def test_a_later_broker_on_the_address_replaces_the_key_and_the_first_cannot_withdraw_it() -> None:
    publish_key("127.0.0.1:7000", bytes(32))
    publish_key("127.0.0.1:7000", KEY)
    withdraw("127.0.0.1:7000", bytes(32))
    assert find_key("127.0.0.1:7000") == KEY
    withdraw("127.0.0.1:7000", KEY)
    withdraw("127.0.0.1:7000", KEY)
    with pytest.raises(Unauthenticated):
        find_key("127.0.0.1:7000")


def test_an_unknown_broker_is_refused_with_what_to_do() -> None:
    with pytest.raises(Unauthenticated, match=r"no key is known for the broker at h:7.*--key-file"):
        find_key("h:7")


def test_a_named_file_comes_before_the_environment_and_both_before_the_address(
    tmp_path: Any, monkeypatch: Any
) -> None:
    publish_key("127.0.0.1:7000", bytes([0]) * 32)
    for number, name in ((1, "named"), (2, "environment")):
        keys._write(tmp_path / name, bytes([number]) * 32)
    monkeypatch.setenv("EKIDEN_KEY_FILE", str(tmp_path / "environment"))
    assert find_key("127.0.0.1:7000", key_file=tmp_path / "named") == bytes([1]) * 32
    assert find_key("127.0.0.1:7000") == bytes([2]) * 32
    monkeypatch.delenv("EKIDEN_KEY_FILE")
    assert find_key("127.0.0.1:7000") == bytes(32)


def test_a_named_file_that_is_missing_is_not_replaced_by_another_key(tmp_path: Any) -> None:
    publish_key("127.0.0.1:7000", KEY)
    with pytest.raises(Unauthenticated, match="there is no key file"):
        find_key("127.0.0.1:7000", key_file=tmp_path / "absent")


@posix_only
@pytest.mark.parametrize("loose", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_that_others_can_read_is_refused(tmp_path: Any, loose: Any) -> None:
    make_broker_key(tmp_path)
    (tmp_path / "key").chmod(loose)
    with pytest.raises(Unauthenticated, match=rf"open to others \(mode {loose:04o}\).*chmod 600"):
        make_broker_key(tmp_path)
    with pytest.raises(Unauthenticated, match="open to others"):
        find_key("127.0.0.1:7000", key_file=tmp_path / "key")


@posix_only
def test_a_folder_that_others_can_write_is_not_used(state: Any) -> None:
    publish_key("127.0.0.1:7000", KEY).parent.chmod(0o777)
    with pytest.raises(Unauthenticated, match="others can write"):
        publish_key("127.0.0.1:7001", KEY)
    with pytest.raises(Unauthenticated, match="others can write"):
        find_key("127.0.0.1:7000")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"secret", b"00" * 31, b"00" * 33, b"zz" * 32, b"\xff" * 64]
)
def test_a_file_that_holds_no_key_is_refused(tmp_path: Any, content: Any) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(Unauthenticated, match="does not hold a key"):
        make_broker_key(tmp_path)


@pytest.mark.parametrize("content", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\r\n"])
def test_a_key_is_read_as_hex_or_as_bytes(tmp_path: Any, content: Any) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    assert make_broker_key(tmp_path) == KEY


def test_a_folder_that_cannot_be_written_is_a_fault_with_a_remedy(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageFault, match="cannot write"):
        keys._write(tmp_path / "file" / "key", KEY)


@pytest.mark.parametrize("host", ["../../etc", "a/b", "a\\b", "..", "a b"])
def test_an_address_cannot_lead_out_of_the_folder(state: Any, host: Any) -> None:
    assert keys._place(f"{host}:7000").parent == state / "keys"


@pytest.mark.parametrize("address", ["", "h", "h:", ":7", "h:x", "h:70000", "::1:7000", "h:7,,:"])
def test_what_is_no_address_is_wrong_usage(address: Any) -> None:
    with pytest.raises(WrongUsage):
        find_key(address)


def test_the_state_folder_follows_the_xdg_rule(monkeypatch: Any, tmp_path: Any) -> None:
    assert keys.state_folder() == tmp_path / "state"
    monkeypatch.delenv("EKIDEN_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert keys.state_folder() == tmp_path / "xdg" / "ekiden"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert keys.state_folder() == Path.home() / ".local" / "state" / "ekiden"
