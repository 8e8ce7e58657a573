"""Parts on their way: packed where it helps, never unpacked to more than was asked for."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from pathlib import Path

import pytest

import ekiden
import ekiden.testing
from ekiden.broker import store, storekeeper
from ekiden.client import machine as client_machine
from ekiden.errors import BadRequest
from ekiden.world import porter
from ekiden.world.codecs import CODECS, Packer, unpack

TEXT = b"date,rate\n2026-11-18,0.031\n" * 10_000
NOISE = random.Random(1).randbytes(len(TEXT))
ALL = CODECS.split(",")


def test_the_best_codec_is_named_first() -> None:
    assert ALL == ["zstd", "gzip", "brotli"]


@pytest.mark.parametrize("codec", ALL)
def test_what_was_packed_is_unpacked(codec: str) -> None:
    packed = Packer().pack("file", TEXT, codec)

    assert packed.codec == codec
    assert len(packed.data) < len(TEXT) / 10
    assert unpack(packed.data, codec, len(TEXT)) == TEXT


@pytest.mark.parametrize("codec", ALL)
def test_what_does_not_get_smaller_goes_as_it_is(codec: str) -> None:
    assert Packer().pack("file", NOISE, codec) == (NOISE, "")


def test_the_first_codec_known_here_is_used_and_none_is_not() -> None:
    packer = Packer()

    assert packer.pack("file", TEXT, "lzma,gzip,zstd").codec == "gzip"
    assert packer.pack("file", TEXT, "lzma") == (TEXT, "")
    assert packer.pack("file", TEXT, "") == (TEXT, "")


def test_after_a_part_that_did_not_get_smaller_the_next_ones_are_not_tried() -> None:
    packer = Packer()
    packer.pack("noise", NOISE, "zstd")

    others = [packer.pack("noise", TEXT, "zstd").codec for _ in range(16)]

    assert others == [""] * 15 + ["zstd"]
    assert packer.pack("text", TEXT, "zstd").codec == "zstd"


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("size", [len(TEXT) - 1, len(TEXT) + 1, 1])
def test_a_part_of_another_size_than_it_should_have_is_refused(codec: str, size: int) -> None:
    packed = Packer().pack("file", TEXT, codec)

    with pytest.raises(BadRequest, match="unpacks to other"):
        unpack(packed.data, codec, size)


@pytest.mark.parametrize("codec", ALL)
def test_garbage_is_refused(codec: str) -> None:
    with pytest.raises(BadRequest, match="cannot be unpacked"):
        unpack(b"garbage, surely" * 3, codec, 100)


def test_a_codec_nobody_asked_for_is_refused() -> None:
    with pytest.raises(BadRequest, match="not asked for"):
        unpack(b"", "lzma", 1)


def test_a_bomb_is_not_unpacked() -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()

    with pytest.raises(BadRequest, match="unpacks to other"):
        unpack(bomb, "gzip", 1000)


def test_files_are_packed_on_a_line_that_leaves_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, noise = tmp_path / "text", tmp_path / "noise"
    text.write_bytes(TEXT * 5)
    noise.write_bytes(NOISE * 5)
    came: list[str] = []

    def note(data: bytes, codec: str, size: int) -> bytes:
        came.append(codec)
        return unpack(data, codec, size)

    monkeypatch.setattr(store, "is_loopback", lambda _address: False)
    monkeypatch.setattr(client_machine, "is_loopback", lambda _address: False)
    monkeypatch.setattr(storekeeper, "unpack", note)
    monkeypatch.setattr(porter, "unpack", note)

    with ekiden.testing.grid() as grid:
        report = grid.client.put_cache("c", {"text": text, "noise": noise})
        files = grid.client.cache_files("c")
        up = Counter(came)

    assert up[""] == 6
    assert up["zstd"] > 6, "the list of files is packed, too"
    assert {file.name: file.size for file in files} == {
        "text": 5 * len(TEXT),
        "noise": 5 * len(TEXT),
    }
    assert report.state == "new"
