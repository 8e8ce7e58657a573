"""Parts of files packed for the way, where that makes them smaller.

Whoever asks for a part names the codecs it can unpack, the best first, or none where the bytes
never leave the machine. Whoever sends it may use one of them. What does not get smaller goes as it
is, and after one such part the next ones of the same bytes are not tried: most files are of one
kind from end to end.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ekiden.errors import BadRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

try:
    import brotli
except ImportError:
    brotli = None

# Quick rather than small: a part is packed while the one before it is on the line.
_ZSTD_LEVEL: Final = 1
_GZIP_LEVEL: Final = 1
_BROTLI_QUALITY: Final = 1
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS

# Worth it if it saves so much: to unpack costs the receiver about as much as a tenth of the line.
_WORTH_IT: Final = 0.9

# After a part that was not worth it, so many are not tried.
_PAUSE_PARTS: Final = 15
_REMEMBERED_MAX: Final = 256


class Packed(NamedTuple):
    """A part as it travels."""

    data: bytes
    codec: str = ""


def _zstd_unpack(data: bytes, size: int) -> bytes:
    unpacker = zstd.ZstdDecompressor()
    found: bytes = unpacker.decompress(data, max_length=size + 1)
    return found


def _gzip_unpack(data: bytes, size: int) -> bytes:
    return zlib.decompressobj(_GZIP_WINDOW).decompress(data, size + 1)


def _gzip_pack(data: bytes) -> bytes:
    packer = zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_WINDOW)
    return packer.compress(data) + packer.flush()


_PACK: Final[dict[str, Callable[[bytes], bytes]]] = {
    "zstd": lambda data: zstd.compress(data, level=_ZSTD_LEVEL),
    "gzip": _gzip_pack,
}
_UNPACK: Final[dict[str, Callable[[bytes, int], bytes]]] = {
    "zstd": _zstd_unpack,
    "gzip": _gzip_unpack,
}
_ERRORS: Final[list[type[Exception]]] = [zstd.ZstdError, zlib.error, EOFError]


def _brotli_unpack(data: bytes, size: int) -> bytes:
    unpacker: Any = brotli.Decompressor()
    found: bytes = unpacker.process(data, output_buffer_limit=size + 1)
    return found


# Only a release that can bound what it makes: others would unpack a bomb.
if brotli is not None and hasattr(brotli.Decompressor, "can_accept_more_data"):
    _PACK["brotli"] = lambda data: bytes(brotli.compress(data, quality=_BROTLI_QUALITY))
    _UNPACK["brotli"] = _brotli_unpack
    _ERRORS.append(brotli.error)

_TROUBLE: Final = tuple(_ERRORS)

CODECS: Final = ",".join(_UNPACK)
"""What can be unpacked here, the best first, as it travels."""


def unpack(data: bytes, codec: str, size: int) -> bytes:
    """The `size` bytes that were packed; what is not packed, as it is. Never makes more. Raises
    BadRequest for what is something else."""
    if not codec:
        return data
    unpacker = _UNPACK.get(codec)
    if unpacker is None:
        raise BadRequest(f"a part is packed by {codec[:20]!r}, which was not asked for")
    try:
        found = unpacker(data, size)
    except _TROUBLE as error:
        raise BadRequest(f"a part cannot be unpacked: {error}") from None
    if len(found) != size:
        raise BadRequest(f"a part unpacks to other than {size:,} bytes")
    return found


class Packer:
    """Packs parts, and remembers what did not get smaller. For one thread."""

    def __init__(self) -> None:
        self._pause: dict[Any, int] = {}
        """Of which bytes → how many parts are not to be tried."""

    def pack(self, what: Any, data: bytes, codecs: str) -> Packed:
        """A part of `what`, for who can unpack these."""
        codec = next((each for each in codecs.split(",") if each in _PACK), "")
        if not codec:
            return Packed(data)
        pause = self._pause.pop(what, 0)
        if pause:
            self._pause[what] = pause - 1
            return Packed(data)
        packed = _PACK[codec](data)
        if len(packed) < _WORTH_IT * len(data):
            return Packed(packed, codec)
        self._pause[what] = _PAUSE_PARTS
        if len(self._pause) > _REMEMBERED_MAX:
            del self._pause[next(iter(self._pause))]
        return Packed(data)
