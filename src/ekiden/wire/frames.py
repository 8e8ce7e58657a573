"""Frames: where one message ends and the next begins, and whether it arrived whole.

A frame is a 28-byte header, a header area and a body, all little endian:

    u32 length      bytes after the checksum: 20 + header area + body
    u32 checksum    CRC-32C of those bytes
    u8  type        what the body is; see messages.TYPE_OF
    u8  flags       0 in version 1; an unknown bit is refused
    u16 head        length of the header area
    u64 msg_id      the sender's number for this message
    u64 corr_id     the msg_id this one answers, or 0

The header area is a msgpack map of what a reader may ignore; version 1 defines no key and skips it.
Anything that changes how the body is read must set a flag, so that an older reader refuses the
frame instead of misreading it.

The length is the only thing believed before the checksum is, so it is checked against the limit
before a byte is kept. Nothing here decodes bodies or knows who speaks.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import google_crc32c

from ekiden import limits
from ekiden.errors import BadFrame, TooLarge
from ekiden.machine import Frame
from ekiden.wire.messages import TYPE_OF, Message, encode_body

PREFIX_BYTES: Final = 8
"""Length and checksum: not counted by the length field."""

REST_BYTES: Final = 20
"""The header after the checksum: the least a length may say."""

HEADER_BYTES: Final = PREFIX_BYTES + REST_BYTES

_LENGTH_BYTES: Final = 4

_HEADER: Final = Struct("<IIBBHQQ")
_PREFIX: Final = Struct("<II")
_REST: Final = Struct("<BBHQQ")

_unpack_header = _HEADER.unpack_from
_pack_prefix = _PREFIX.pack
_pack_rest = _REST.pack
_checksum = google_crc32c.value
_extend_checksum = google_crc32c.extend
_new_tuple = tuple.__new__

_HTTP_STARTS: Final = frozenset(
    b"GET |POST|PUT |HEAD|OPTI|DELE|PATC|CONN|TRAC|HTTP|PRI ".split(b"|")
)


def encode_frame(message: Message, msg_id: int = 0, corr_id: int = 0) -> bytes:
    """The bytes of one message. Keeping it under the peer's limit is the caller's business."""
    return frame_of(TYPE_OF[type(message)], encode_body(message), msg_id, corr_id)


def frame_of(type_number: int, body: bytes, msg_id: int = 0, corr_id: int = 0) -> bytes:
    """The bytes of a frame whose body is encoded already."""
    rest = _pack_rest(type_number, 0, 0, msg_id, corr_id)
    checksum = _extend_checksum(_checksum(rest), body)
    return _pack_prefix(REST_BYTES + len(body), checksum) + rest + body


class FrameReader:
    """Cuts a stream of bytes, in whatever pieces it comes, into frames.

    `limit` bounds header area plus body; it may be raised once the peer is known. After an error
    the reader is of no more use: what follows damage cannot be told from more damage.
    """

    __slots__ = ("_broken", "_first", "_held", "_need", "_parts", "limit")

    def __init__(self, limit: int = limits.FRAME_BYTES_MAX) -> None:
        self.limit = limit
        self._parts: list[bytes] = []
        self._held = 0
        self._need = _LENGTH_BYTES
        self._first = True
        self._broken = False

    @property
    def held(self) -> int:
        """Bytes of an unfinished frame."""
        return self._held

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises `BadFrame` or `TooLarge`, once and for all."""
        if self._broken:
            raise BadFrame("the stream was damaged earlier")
        if self._parts:
            # Pieces are joined once, when the frame is whole: a big frame that trickles in costs
            # its own size and no more.
            self._parts.append(data)
            self._held += len(data)
            if self._held < self._need:
                return []
            data = b"".join(self._parts)
            self._parts.clear()
            self._held = 0
        try:
            return self._cut(data)
        except (BadFrame, TooLarge):
            self._broken = True
            self._parts.clear()
            self._held = 0
            raise

    def _cut(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        longest = self.limit + REST_BYTES
        at = 0
        size = len(data)
        while size - at >= HEADER_BYTES:
            length, checksum, type_number, flags, head, msg_id, corr_id = _unpack_header(data, at)
            if length > longest or length < REST_BYTES or self._first:
                self._check_length(data, at, length)
            end = at + PREFIX_BYTES + length
            if end > size:
                break
            rest = data[at + PREFIX_BYTES : end]
            if _checksum(rest) != checksum:
                raise BadFrame("a frame does not match its checksum: it was damaged on its way")
            if flags or head > length - REST_BYTES:
                _refuse_header(flags, head, length)
            # `tuple.__new__` is what Frame() does, at a third of the cost.
            body = rest[REST_BYTES + head :]
            frames.append(_new_tuple(Frame, (type_number, msg_id, corr_id, body)))
            at = end
        self._keep(data, at, size)
        return frames

    def _keep(self, data: bytes, at: int, size: int) -> None:
        """Hold back the start of a frame, if its length is one we would accept."""
        left = size - at
        if left == 0:
            return
        self._need = _LENGTH_BYTES
        if left >= _LENGTH_BYTES:
            length = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
            self._check_length(data, at, length)
            self._need = PREFIX_BYTES + length
        self._parts.append(data[at:])
        self._held = left

    def _check_length(self, data: bytes, at: int, length: int) -> None:
        start = data[at : at + _LENGTH_BYTES]
        if self._first:
            _refuse_strangers(start)
            self._first = False
        if length < REST_BYTES:
            raise BadFrame(f"a frame claims {length} bytes; the header alone is {REST_BYTES}")
        if length > self.limit + REST_BYTES:
            raise TooLarge(
                f"a frame of {length - REST_BYTES:,} bytes is over the limit of {self.limit:,}",
                remedy="split the batch, or check that the peer speaks ekiden's protocol",
            )


def _refuse_strangers(start: bytes) -> None:
    """Say so if the first bytes of a stream are those of a protocol that people often mix up."""
    if start in _HTTP_STARTS:
        raise BadFrame(
            "the peer speaks HTTP, but this port speaks ekiden's own protocol",
            remedy="use `ekiden` or its Python client, or the port of the HTTP door",
        )
    # A TLS record: handshake or alert, version 3.1 to 3.4. As a length it would be over 64 KiB,
    # which no first frame of ours is.
    if start[0] in (0x15, 0x16) and start[1] == 3 and 1 <= start[2] <= 4:
        raise BadFrame(
            "the peer speaks TLS, but this port speaks ekiden's protocol without it",
            remedy="turn TLS off for this address, or connect to a TLS port",
        )
    if all(0x20 <= byte < 0x7F for byte in start):
        raise BadFrame(
            f"the peer does not speak ekiden's protocol: it began with {start.decode()!r}",
            remedy="check the address and the port",
        )


def _refuse_header(flags: int, head: int, length: int) -> None:
    if flags:
        raise BadFrame(
            f"a frame has the unknown flags {flags:#04x}",
            remedy="the peer may be newer than this release: upgrade it",
        )
    raise BadFrame(f"a header area of {head} bytes does not fit a frame of {length}")
