"""Snapshots: the state after an entry, as chunks whose content the journal does not know.

The file is a header, then `u32 length, u32 crc` and data for each chunk, then a footer: a length no
chunk can have, the number of chunks, a crc over the heads of all chunks in order, and its own crc.
A file without its footer, or with a byte too many, is no snapshot. It gets its name only when it is
whole and synced, so a crash leaves a `.tmp` file, which the next start removes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from struct import Struct as Layout
from typing import Final

import google_crc32c

from ekiden.errors import CorruptJournal, StorageFault
from ekiden.journal.records import (
    HEADER_BYTES,
    SNAPSHOT_MAGIC,
    crc_seed,
    damage,
    decode_header,
    encode_header,
)
from ekiden.journal.storage import Storage
from ekiden.model.jobs import Index

# Syncing this often keeps the disk free for the broker's own syncs: at once stalled them 41 ms.
SYNC_BYTES: Final = 1 << 20

CHUNK_BYTES_MAX: Final = 1 << 30

TEMP_SUFFIX: Final = ".tmp"
DAMAGED_SUFFIX: Final = ".damaged"

_CHUNK: Final = Layout("<II")
_FOOTER: Final = Layout("<IQI")
_FOOTER_MARK: Final = 0xFFFFFFFF
_FOOTER_BYTES: Final = _FOOTER.size + 4
_NAME: Final = re.compile(r"snapshot-(\d{20})\.snap")


def snapshot_name(index: Index) -> str:
    """The file of the snapshot that covers everything up to `index`."""
    return f"snapshot-{index:020d}.snap"


def snapshot_names(storage: Storage) -> list[str]:
    """Files that claim to be snapshots, newest first."""
    return [name for name in reversed(storage.names()) if _NAME.fullmatch(name)]


def index_of_snapshot(name: str) -> Index:
    """The index that the name claims."""
    match = _NAME.fullmatch(name)
    assert match, f"{name!r} is not a snapshot's name"
    return int(match[1])


def write_snapshot(
    storage: Storage, index: Index, group: bytes, chunks: Iterable[bytes], *, tag: str = ""
) -> str:
    """Write the state after `index` and return the file's name once it is durable.

    A failure leaves no trace, or a `.tmp` file. `tag` (a process id, say) tells apart the temporary
    files of two writers.
    """
    name = snapshot_name(index)
    temp = f"{name}{tag and '.'}{tag}{TEMP_SUFFIX}"
    if temp in storage.names():
        storage.remove(temp)
    storage.create(temp)
    try:
        _append_in_steps(storage, temp, _encoded(index, group, chunks))
        storage.rename(temp, name)
    except Exception:
        with suppress(StorageFault):
            storage.remove(temp)
        raise
    storage.sync_folder()
    return name


def _encoded(index: Index, group: bytes, chunks: Iterable[bytes]) -> Iterator[bytes]:
    yield encode_header(SNAPSHOT_MAGIC, index, group)
    count, total = 0, crc_seed(group)
    for chunk in chunks:
        assert len(chunk) <= CHUNK_BYTES_MAX, "a chunk must be smaller than the footer's mark"
        head = _CHUNK.pack(len(chunk), google_crc32c.value(chunk))
        count, total = count + 1, google_crc32c.extend(total, head)
        yield head
        yield chunk
    footer = _FOOTER.pack(_FOOTER_MARK, count, total)
    yield footer + google_crc32c.value(footer).to_bytes(4, "little")


def _append_in_steps(storage: Storage, name: str, parts: Iterable[bytes]) -> None:
    pending = bytearray()
    for part in parts:
        pending += part
        while len(pending) >= SYNC_BYTES:
            storage.append(name, bytes(pending[:SYNC_BYTES]))
            storage.sync(name)
            del pending[:SYNC_BYTES]
    storage.append(name, bytes(pending))
    storage.sync(name)


class SnapshotReader:
    """One snapshot file. Opening it checks the header; `check` and `chunks` check everything."""

    def __init__(self, storage: Storage, name: str) -> None:
        header = decode_header(storage.read(name, 0, HEADER_BYTES), SNAPSHOT_MAGIC, name)
        if header.index != index_of_snapshot(name):
            raise damage(f"the header says index {header.index:,}, unlike the name", name, 0)
        self.name = name
        self.index = header.index
        self.group = header.group
        self.version = header.version
        self.bytes = storage.size(name)
        self._storage = storage

    def is_complete(self) -> bool:
        """Whether the footer is in place: a cheap check, which does not read the chunks."""
        start = self.bytes - _FOOTER_BYTES
        if start < HEADER_BYTES:
            return False
        return _decode_footer(self._storage.read(self.name, start)) is not None

    def chunks(self) -> Iterator[bytes]:
        """The chunks as they were written. Raises CorruptJournal at the first sign of damage."""
        at, count, total = HEADER_BYTES, 0, crc_seed(self.group)
        source = _Window(self._storage, self.name)
        while at < self.bytes - _FOOTER_BYTES:
            head = source.read(at, _CHUNK.size)
            length, crc = _CHUNK.unpack(head)
            start = at + _CHUNK.size
            if start + length > self.bytes - _FOOTER_BYTES:
                raise damage("a chunk of the snapshot reaches beyond its end", self.name, at)
            chunk = source.read(start, length)
            if google_crc32c.value(chunk) != crc:
                raise damage("a chunk of the snapshot is damaged", self.name, at)
            yield chunk
            at, count = start + length, count + 1
            total = google_crc32c.extend(total, head)
        footer = _decode_footer(source.read(at, self.bytes - at))
        if footer != (count, total):
            raise damage("the snapshot does not end with its footer", self.name, at)

    def check(self) -> int:
        """Read it all and return the number of chunks. Raises CorruptJournal."""
        return sum(1 for _ in self.chunks())


class _Window:
    """Reads ahead, because chunks may be small."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name = storage, name
        self._start, self._data = 0, b""

    def read(self, at: int, size: int) -> bytes:
        begin = at - self._start
        if begin < 0 or begin + size > len(self._data):
            self._start, begin = at, 0
            self._data = self._storage.read(self._name, at, max(size, SYNC_BYTES))
            if len(self._data) < size:
                raise damage("the file ends too early", self._name, at)
        return self._data[begin : begin + size]


def _decode_footer(data: bytes) -> tuple[int, int] | None:
    if len(data) != _FOOTER_BYTES:
        return None
    mark, count, total = _FOOTER.unpack_from(data)
    crc = int.from_bytes(data[_FOOTER.size :], "little")
    if mark != _FOOTER_MARK or google_crc32c.value(data[: _FOOTER.size]) != crc:
        return None
    return count, total


def complete_snapshots(storage: Storage) -> list[SnapshotReader]:
    """Snapshots with a sound header and footer, newest first."""
    found = []
    for name in snapshot_names(storage):
        with suppress(CorruptJournal, StorageFault):
            reader = SnapshotReader(storage, name)
            if reader.is_complete():
                found.append(reader)
    return found
