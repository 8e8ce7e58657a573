"""Carries bytes between files and the transfers of a client or worker, off the loop.

A source is hashed before it is offered and read through one open file, so a file that is replaced
meanwhile does not matter; one that is changed in place is refused by its hash. A target is written
beside its place, hashed on the way, and renamed when all of it has come and matches.

The porter and its futures belong to the loop; only plain file work runs in its threads.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import itertools
import os
import secrets
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from ekiden.errors import BlobDamaged, Closed, EkidenError, Fault
from ekiden.wire.transfers import (
    Copied,
    CopyBlob,
    Downloading,
    GivenUp,
    PartRead,
    PartWritten,
    ReadPart,
    TransferFailed,
    Transferred,
    Uploading,
    WritePart,
)
from ekiden.world.codecs import Packer, unpack
from ekiden.world.loop import Driver
from ekiden.world.memory import keep_part_buffers
from ekiden.world.threads import stand_back

_HASH_BYTES: Final = 1 << 20
_COPY_BYTES: Final = 1 << 20

# What is hashed on the spot: as quick as asking a thread to do it.
_INLINE_BYTES: Final = 64 << 10


class Stored(NamedTuple):
    """Bytes in the broker's store."""

    blob: str
    """Their SHA-256, in hex."""
    size: int


class _Source(Protocol):
    def read(self, offset: int, length: int) -> bytes: ...
    def close(self) -> None: ...


class _Sink(Protocol):
    def write(self, data: bytes, *, last: bool) -> None: ...
    def start_over(self) -> None: ...
    def close(self) -> None: ...


class Porter:
    """Puts and fetches by way of the transfers of a machine. Registers itself with `driver`."""

    def __init__(self, driver: Driver) -> None:
        self._feed = driver.feed
        self._loop = driver.loop
        self._tokens = itertools.count(1)
        self._sources: dict[int, _Source] = {}
        self._sinks: dict[int, _Sink] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._listeners: dict[int, Callable[[int], None]] = {}
        self._files = ThreadPoolExecutor(1, "ekiden-files", initializer=stand_back)
        """One thread, so that a file is closed after the last thing that was done with it."""
        self._hashing = ThreadPoolExecutor(1, "ekiden-hash", initializer=stand_back)
        """Another, because a large file takes seconds and the parts of others must not wait."""
        self._packer = Packer()
        self._closed: EkidenError | None = None
        keep_part_buffers()
        driver.handle(ReadPart, self._read_part)
        driver.handle(WritePart, self._write_part)
        driver.handle(CopyBlob, self._copy_blob)
        driver.handle(Transferred, self._transferred)
        driver.handle(TransferFailed, self._transfer_failed)

    # -------------------------------------------------------------- use

    async def put(
        self,
        source: Path | bytes,
        known: Stored | None = None,
        sent: Callable[[int], None] | None = None,
    ) -> Stored:
        """Give the bytes to the broker; returns when it has them durably. Bytes whose hash is
        `known` are not hashed again; `sent` hears of the size of each part that the broker takes.

        Raises what the broker refuses them with, or a Fault if the file cannot be read.
        """
        opened: _Source
        if isinstance(source, bytes):
            opened = _Bytes(source)
            stored = known or Stored(await self._hash(source), len(source))
        elif known is not None:
            opened, stored = await self._hash_in_thread(lambda: _open(source)), known
        else:
            opened, digest, size = await self._hash_in_thread(lambda: _open_and_hash(source))
            stored = Stored(digest, size)
        token = next(self._tokens)
        self._sources[token] = opened
        if sent is not None:
            self._listeners[token] = sent
        try:
            await self._carry(Uploading(token, stored.blob, stored.size))
        finally:
            self._listeners.pop(token, None)
        return stored

    async def fetch(self, blob: str, size: int, target: Path) -> None:
        """Write the bytes to `target`, in place of what is there, in one step when all have come
        and match. Otherwise nothing is left."""
        await self._bring(_File(blob, target), blob, size)

    async def read(self, blob: str, size: int) -> bytes:
        """The bytes themselves, verified."""
        sink = _Buffer(blob)
        await self._bring(sink, blob, size)
        return sink.data()

    def close(self, error: EkidenError | None = None) -> None:
        """End what is open with `error` and take no more."""
        self._closed = error or Closed("the transfer was ended: its owner closes")
        for end in self._ends.values():
            if not end.done():
                end.set_exception(self._closed)
        self._hashing.shutdown(wait=False)
        if not self._ends:
            self._files.shutdown(wait=False)

    # -------------------------------------------------------------- one transfer

    async def _bring(self, sink: _Sink, blob: str, size: int) -> None:
        token = next(self._tokens)
        self._sinks[token] = sink
        await self._carry(Downloading(token, blob, size))

    async def _carry(self, request: Uploading | Downloading) -> None:
        """Until the machine says how it ended; whoever stops waiting ends it."""
        token = request.token
        end = self._ends[token] = self._loop.create_future()
        try:
            if self._closed is not None:
                raise self._closed
            self._feed(request)
            await end
        except BaseException:
            self._feed(GivenUp(token))
            raise
        finally:
            del self._ends[token]
            self._put_away(token)

    def _put_away(self, token: int) -> None:
        """Close its file, behind whatever the thread is doing with it."""
        used = self._sources.pop(token, None) or self._sinks.pop(token, None)
        assert used is not None
        if not isinstance(used, _Bytes | _Buffer):
            self._files.submit(used.close)
        if self._closed is not None and not self._ends:
            self._files.shutdown(wait=False)

    async def _hash(self, data: bytes) -> str:
        if len(data) <= _INLINE_BYTES:
            return hashlib.sha256(data).hexdigest()
        digest: str = await self._hash_in_thread(lambda: hashlib.sha256(data).hexdigest())
        return digest

    async def _hash_in_thread(self, work: Callable[[], Any]) -> Any:
        if self._closed is not None:
            raise self._closed
        return await self._loop.run_in_executor(self._hashing, work)

    def _start(self, work: Callable[[], PartRead | PartWritten | Copied]) -> None:
        """In the thread; the machine hears of it on the loop."""

        def run() -> None:
            # Not by way of a future of the loop: that costs as much as the work.
            event = work()
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self._loop.call_soon_threadsafe(self._feed, event)

        self._files.submit(run)

    # -------------------------------------------------------------- effects

    def _read_part(self, effect: ReadPart) -> None:
        source = self._sources.get(effect.token)
        if source is None:
            return
        if (sent := self._listeners.get(effect.token)) is not None:
            sent(effect.length)

        def read() -> PartRead:
            try:
                data = source.read(effect.offset, effect.length)
            except Exception as error:  # noqa: BLE001 - whoever waits shall hear of any
                return PartRead(effect.token, effect.offset, error=_told(error))
            packed = self._packer.pack(effect.token, data, effect.codecs)
            return PartRead(effect.token, effect.offset, packed.data, codec=packed.codec)

        if isinstance(source, _Bytes) and not effect.codecs:
            self._feed(read())
        else:
            self._start(read)

    def _write_part(self, effect: WritePart) -> None:
        sink = self._sinks.get(effect.token)
        if sink is None:
            return

        def write() -> PartWritten:
            try:
                data = unpack(effect.data, effect.codec, effect.length)
                sink.write(data, last=effect.last)
            except Exception as error:  # noqa: BLE001 - whoever waits shall hear of any
                return PartWritten(effect.token, effect.offset, _told(error))
            return PartWritten(effect.token, effect.offset)

        self._start(write)

    def _copy_blob(self, effect: CopyBlob) -> None:
        sink = self._sinks.get(effect.token)
        if sink is None:
            return

        def copy() -> Copied:
            try:
                with _open_plain(effect.path, effect.size) as source:
                    left = effect.size
                    while left:
                        data = _read_fully(source, min(_COPY_BYTES, left))
                        if not data or effect.token not in self._sinks:
                            break
                        left -= len(data)
                        sink.write(data, last=not left)
            except (EkidenError, OSError):
                left = -1
            if left:
                sink.start_over()  # the broker will be asked for the bytes instead
            return Copied(effect.token, whole=not left)

        self._start(copy)

    def _transferred(self, effect: Transferred) -> None:
        end = self._ends.get(effect.token)
        if end is not None and not end.done():
            end.set_result(None)

    def _transfer_failed(self, effect: TransferFailed) -> None:
        end = self._ends.get(effect.token)
        if end is not None and not end.done():
            end.set_exception(effect.error)


# ------------------------------------------------------------------ where bytes come from


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def close(self) -> None:
        """Nothing is open."""


class _OpenFile:
    def __init__(self, file: io.FileIO, path: Path) -> None:
        self._file = file
        self._path = path

    def read(self, offset: int, length: int) -> bytes:
        try:
            self._file.seek(offset)
            data = _read_fully(self._file, length)
        except OSError as error:
            raise _fault("read", self._path, error) from None
        if len(data) != length:
            raise Fault(f"{str(self._path)!r} has become shorter while it was sent")
        return data

    def close(self) -> None:
        self._file.close()


def _open(path: Path) -> _OpenFile:
    try:
        return _OpenFile(io.FileIO(path), path)
    except OSError as error:
        raise _fault("read", path, error) from None


def _open_and_hash(path: Path) -> tuple[_OpenFile, str, int]:
    """The file, its hash and its size as far as it was hashed."""
    try:
        file = io.FileIO(path)
        digest, size = hashlib.sha256(), 0
        while block := file.read(_HASH_BYTES):
            digest.update(block)
            size += len(block)
    except OSError as error:
        raise _fault("read", path, error) from None
    return _OpenFile(file, path), digest.hexdigest(), size


def _open_plain(path: str, size: int) -> io.FileIO:
    """A file that somebody else has named: a plain one of that size, or OSError."""
    flags = os.O_RDONLY
    for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, flag, 0)
    file = io.FileIO(os.open(path, flags))
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != size:
        file.close()
        raise OSError(errno.EINVAL, "it is another file")
    return file


def _read_fully(file: io.FileIO, length: int) -> bytes:
    """A read may bring less than was asked for before the end of the file."""
    data = file.read(length) or b""
    while len(data) < length and (more := file.read(length - len(data))):
        data += more
    return data


# ------------------------------------------------------------------ where bytes go


class _Buffer:
    def __init__(self, blob: str) -> None:
        self._blob = blob
        self._parts: list[bytes] = []

    def write(self, data: bytes, *, last: bool) -> None:
        self._parts.append(data)
        if last:
            self._parts = [b"".join(self._parts)]
            _verify(hashlib.sha256(self._parts[0]).hexdigest(), self._blob)

    def start_over(self) -> None:
        """Forget what was written."""
        self._parts.clear()

    def data(self) -> bytes:
        """All of it, after the last part."""
        return self._parts[0]

    def close(self) -> None:
        """Nothing is open."""


class _File:
    """Nothing is made before the first part comes."""

    def __init__(self, blob: str, target: Path) -> None:
        self._blob = blob
        self._target = target
        self._beside = target.with_name(f".ekiden-{secrets.token_hex(8)}.part")
        self._digest = hashlib.sha256()
        self._file: io.FileIO | None = None

    def write(self, data: bytes, *, last: bool) -> None:
        try:
            if self._file is None:
                self._file = io.FileIO(self._beside, "x")
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
            self._digest.update(data)
            if last:
                _verify(self._digest.hexdigest(), self._blob)
                self._file.close()
                os.replace(self._beside, self._target)
                self._file = None
        except OSError as error:
            raise _fault("write", self._target, error) from None

    def start_over(self) -> None:
        """Forget what was written."""
        self.close()
        self._digest = hashlib.sha256()

    def close(self) -> None:
        """Leave nothing that is not whole."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):
                os.unlink(self._beside)


def _verify(found: str, blob: str) -> None:
    if found != blob:
        raise BlobDamaged(
            f"what came as blob {blob[:12]}… has another hash",
            remedy="fetch it again; if that does not help, it is damaged where it is stored",
        )


def _told(error: Exception) -> EkidenError:
    return error if isinstance(error, EkidenError) else Fault(f"the transfer failed: {error!r}")


def _fault(verb: str, path: Path, error: OSError) -> Fault:
    why = os.strerror(error.errno).lower() if error.errno else str(error)
    return Fault(f"cannot {verb} {str(path)!r}: {why}")
