"""The local key: who may speak to a broker before anybody has set up anything.

A broker draws 32 random bytes at its first start and keeps them, as hex, in the file `key` of its
data folder. It also publishes them under the user's state folder by address, where clients and
workers of the same user find them: `keys/<host>_<port>`. On other machines the file is copied and
named with --key-file.

A key that others can read is no key: on POSIX, files open to group or others are refused. Windows
has no such modes; there the user's profile folder guards them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from ekiden.errors import StorageFault, Unauthenticated
from ekiden.security.identity import KEY_BYTES
from ekiden.world.addresses import join_address, split_address, split_addresses

KEY_FILE: Final = "key"
"""Name of the key within a data folder."""

ENV_KEY_FILE: Final = "EKIDEN_KEY_FILE"
ENV_STATE: Final = "EKIDEN_STATE"

# A broker that listens on any of these is reached by the others too.
_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::")

_FILE_BYTES_MAX: Final = 4096


def state_folder() -> Path:
    """Where this user's tools keep what they share: $EKIDEN_STATE or the XDG place."""
    if chosen := os.environ.get(ENV_STATE):
        return Path(chosen)
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "ekiden"
    return Path.home() / ".local" / "state" / "ekiden"


def make_broker_key(data_folder: Path | str) -> bytes:
    """The key of this data folder; drawn and kept there at the first call.

    Raises `Unauthenticated` if the file is open to others or is no key, `StorageFault` if the
    folder cannot be written.
    """
    path = Path(data_folder) / KEY_FILE
    key = _read(path)
    if key is None:
        key = secrets.token_bytes(KEY_BYTES)
        _write(path, key)
    return key


def publish_key(address: str, key: bytes) -> Path:
    """Let clients and workers of this user find the key of the broker at `address`."""
    path = _place(address)
    _make_private(path.parent)
    _write(path, key)
    return path


def withdraw(address: str, key: bytes) -> None:
    """Undo `publish_key`, unless another broker has taken the address since."""
    path = _place(address)
    with contextlib.suppress(OSError, Unauthenticated):
        if _read(path) == key:
            path.unlink()


def find_key(address: str, *, key_file: Path | str | None = None) -> bytes:
    """The key for the broker at `address` (or the first known of several, `a:7000,b:7000`).

    Looks at `key_file`, then $EKIDEN_KEY_FILE, then at what brokers of this user have published.
    Raises `Unauthenticated` with what to do about it.
    """
    named = key_file or os.environ.get(ENV_KEY_FILE)
    if named:
        key = _read(Path(named))
        if key is None:
            raise Unauthenticated(
                f"there is no key file {str(named)!r}",
                remedy="copy the file `key` from the broker's data folder, mode 0600",
            )
        return key
    for one in split_addresses(address):
        place = _place(one)
        _check_closed(place.parent)
        key = _read(place)
        if key is not None:
            return key
    raise Unauthenticated(
        f"no key is known for the broker at {address}",
        remedy="start a broker there as this user, or copy the file `key` of its data folder and "
        f"name it with --key-file or {ENV_KEY_FILE}",
    )


def _place(address: str) -> Path:
    host, port = split_address(address)
    if host in _LOCAL_HOSTS:
        host = _LOCAL_HOSTS[0]
    name = join_address(host.lower(), port)
    # A colon is no character of a Windows file name, and a slash would leave the folder.
    safe = "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "_" for c in name)
    return state_folder() / "keys" / safe


def _read(path: Path) -> bytes | None:
    """The key in this file, or None if there is no file."""
    try:
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            content = file.read(_FILE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unauthenticated(
            f"cannot read the key file {str(path)!r}: {error.strerror}",
            remedy="run as the user that owns it",
        ) from None
    return _parse(path, content)


def _parse(path: Path, content: bytes) -> bytes:
    if len(content) == KEY_BYTES:
        return content
    try:
        key = bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise Unauthenticated(
            f"{str(path)!r} does not hold a key of {KEY_BYTES} bytes",
            remedy="copy the file `key` from the broker's data folder",
        )
    return key


def _check_private(path: Path, status: os.stat_result) -> None:
    if os.name != "posix":
        return
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise Unauthenticated(
            f"the key file {str(path)!r} is open to others (mode {status.st_mode & 0o777:04o})",
            remedy=f"chmod 600 {path}; if others may have read it, delete it on the broker's side "
            "so that the next start draws a new one",
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise Unauthenticated(
            f"the key file {str(path)!r} belongs to another user", remedy="own the key you use"
        )


def _make_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    _check_closed(folder)


def _check_closed(folder: Path) -> None:
    """Whoever can write where keys are published can make us trust another broker."""
    if os.name == "posix" and folder.is_dir() and folder.stat().st_mode & 0o022:
        raise Unauthenticated(
            f"others can write to the folder {str(folder)!r}", remedy=f"chmod 700 {folder}"
        )


def _write(path: Path, key: bytes) -> None:
    """Put the whole key in place, or nothing: readers never see a part of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(key.hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _unwritable(path, error) from None


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _unwritable(path: Path, error: OSError) -> StorageFault:
    return StorageFault(
        f"cannot write {str(path)!r}: {error.strerror}",
        remedy=f"make the folder writable, or choose another (--data, {ENV_STATE})",
    )
