"""File contents on their way between a client or worker and its broker: the peer's side.

Nothing is sent that was not asked for: the broker pulls the parts of what it is offered, and a
download pulls its own. So whoever receives sets the pace, a part is written before another is
asked for, and a transfer costs a few parts of memory however large the file is.

A transfer outlives connections. After a loss an upload is offered again, and the broker says by its
pulls where to go on; a download goes on after the last part that was written. What cannot be read,
written or verified, and what the broker refuses, ends the transfer with that error. Of bytes that
all came and do not match, the broker is told, so that it looks at its own copy of them.

The layer above knows a transfer by its `token` and does the reading, writing and hashing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from ekiden import limits
from ekiden.errors import BadRequest, BlobDamaged, EkidenError, Refusal
from ekiden.wire import messages
from ekiden.wire.frames import encode_frame
from ekiden.wire.session import error_from, refusal_frame

# The broker is about to go: the transfer is fine, and the next connection will take it.
_ELSEWHERE: Final = frozenset({"draining", "not_leader"})

# A broker asks for a few parts at a time. One that asks for many more is not served: every part
# that is being read takes memory.
_PULLS_MAX: Final = 2 * limits.BLOB_CONNECTION_PARTS

# Answers that are still expected and concern nobody: more than ever are under way.
_VOID_MAX: Final = 256


# ------------------------------------------------------------------ events


class Uploading(Struct, frozen=True):
    """Give the broker `size` bytes whose SHA-256 is `blob`; `ReadPart` asks for them."""

    token: Any
    blob: str
    size: int


class Downloading(Struct, frozen=True):
    """Get those bytes; `WritePart` hands them over, in order."""

    token: Any
    blob: str
    size: int


class GivenUp(Struct, frozen=True):
    """Nobody wants this transfer any more. Nothing is said of it from now on."""

    token: Any


class PartRead(Struct, frozen=True):
    """The answer to `ReadPart`: all of the bytes asked for, or why they cannot be had."""

    token: Any
    offset: int
    data: bytes = b""
    error: EkidenError | None = None
    codec: str = ""
    """How `data` is packed."""


class PartWritten(Struct, frozen=True):
    """The answer to `WritePart`."""

    token: Any
    offset: int
    error: EkidenError | None = None


class Copied(Struct, frozen=True):
    """The answer to `CopyBlob`: all of it is verified and in its place, or nothing came of it."""

    token: Any
    whole: bool


EVENTS: Final = (Uploading, Downloading, GivenUp, PartRead, PartWritten, Copied)


# ------------------------------------------------------------------ effects


class ReadPart(Struct, frozen=True):
    """Read that part of an upload's source. It may be packed by one of `codecs`."""

    token: Any
    offset: int
    length: int
    codecs: str = ""


class WritePart(Struct, frozen=True):
    """Add these bytes to what a download has brought. With the `last` of them, verify the whole
    and put it in its place before saying `PartWritten`."""

    token: Any
    offset: int
    data: bytes
    last: bool
    codec: str = ""
    """How `data` is packed, if it is; it then stands for `length` bytes."""
    length: int = 0


class CopyBlob(Struct, frozen=True):
    """What a download is to bring lies in a file of this machine, `size` bytes of it, if it can be
    read and holds what it should."""

    token: Any
    path: str
    size: int


class Transferred(Struct, frozen=True):
    """An upload is durable at the broker, or a download is whole in its place."""

    token: Any


class TransferFailed(Struct, frozen=True):
    """A transfer has ended without success."""

    token: Any
    error: EkidenError


# ------------------------------------------------------------------ the transfers


class _Upload(Struct, eq=False):
    token: Any
    blob: str
    size: int
    offer: int = 0
    """The number of the offer on this connection, or 0 if it is still to be made."""
    pulls: list[tuple[int, int]] = []
    """(number, offset) of parts asked for and being read."""


class _Download(Struct, eq=False):
    token: Any
    blob: str
    size: int
    written: int = 0
    writing: int = -1
    """How many bytes are being written, or -1."""
    asked: int = 0
    """Up to where parts have been asked for."""
    arrived: dict[int, tuple[bytes, str, int]] = {}
    """By offset: bytes as they came, how they are packed, how many they stand for."""
    pulling: dict[int, tuple[int, int]] = {}
    """Number → offset and length of parts asked for."""
    held: bool = False
    """Whether it waits for another connection."""
    asked_where: bool = False
    """Whether the broker was asked where it lies, which is done once."""
    copying: bool = False
    """Whether it is copied from there, or that is still to be said."""


class Transfers:
    """All transfers of one client or worker. `number` gives each message its number."""

    def __init__(self, number: Callable[[], int], codecs: str = "") -> None:
        """`codecs` can be unpacked here."""
        self._number = number
        self._codecs = codecs
        self._local = False
        self._conn: int | None = None
        self._open: dict[Any, _Upload | _Download] = {}
        """Under way, by token; the others wait in order."""
        self._waiting: deque[_Upload | _Download] = deque()
        self._offers: dict[int, _Upload] = {}
        self._pulls: dict[int, _Download] = {}
        self._where: dict[int, _Download] = {}
        self._void: dict[int, None] = {}
        """Numbers of what was said for transfers that have ended: answers may still come."""
        self._frames: list[bytes] = []
        self._effects: list[Any] = []

    @property
    def tokens(self) -> list[Any]:
        """Of every transfer that has not ended."""
        return [*self._open, *(each.token for each in self._waiting)]

    # -------------------------------------------------------------- what the machine calls

    def receive(self, event: Any) -> None:
        """Take note of a request, or of what became of a part."""
        match event:
            case PartRead():
                self._part_read(event)
            case PartWritten():
                self._part_written(event)
            case Copied():
                self._copied(event)
            case Uploading():
                self._begin(_Upload(event.token, event.blob, event.size))
            case Downloading():
                self._begin(_Download(event.token, event.blob, event.size))
            case GivenUp():
                self._forget(event.token)
            case _:
                raise AssertionError(event)

    def heard(self, message: messages.Message, msg_id: int, corr_id: int) -> bool:
        """Take a message of the broker; False if it concerns no transfer of ours."""
        match message:
            case messages.BlobPart():
                self._part(message, corr_id)
            case messages.BlobPull():
                self._pulled(message, msg_id, corr_id)
            case messages.BlobAt():
                self._at(message, corr_id)
            case messages.BlobStored():
                if (upload := self._offers.get(corr_id)) is not None:
                    self._end(upload)
            case messages.Refusal():
                return self._refused(message, corr_id)
            case _:
                return False
        return True

    def advance(self, conn: int | None, *, local: bool = False) -> list[bytes]:
        """The frames to send on `conn`, the connection that may be spoken on, if there is one. If
        it is `local`, bytes never leave the machine, and nothing is packed."""
        self._local = local
        if conn != self._conn:
            self._conn = conn
            self._start_over()
        if conn is None:
            return []
        self._ask()
        frames, self._frames = self._frames, []
        return frames

    def take_effects(self) -> list[Any]:
        """What the layer above shall do and know."""
        effects, self._effects = self._effects, []
        return effects

    def fail_all(self, error: EkidenError) -> None:
        """There will be no broker for any of them."""
        for token in self.tokens:
            self._effects.append(TransferFailed(token, error))
        self._open.clear()
        self._waiting.clear()
        self._offers.clear()
        self._pulls.clear()
        self._where.clear()
        self._void.clear()
        self._frames.clear()

    # -------------------------------------------------------------- begin and end

    def _begin(self, transfer: _Upload | _Download) -> None:
        if len(self._open) >= limits.BLOB_TRANSFERS_MAX:
            self._waiting.append(transfer)
            return
        self._open[transfer.token] = transfer
        if isinstance(transfer, _Download) and transfer.size == 0:
            # There is nothing to pull, and something to verify and to put in its place.
            transfer.writing = 0
            self._effects.append(WritePart(transfer.token, 0, b"", last=True))

    def _end(self, transfer: _Upload | _Download, error: EkidenError | None = None) -> None:
        self._forget(transfer.token)
        if error is None:
            self._effects.append(Transferred(transfer.token))
        else:
            self._effects.append(TransferFailed(transfer.token, error))

    def _forget(self, token: Any) -> None:
        transfer = self._open.pop(token, None)
        if transfer is None:
            self._waiting = deque(each for each in self._waiting if each.token != token)
            return
        if isinstance(transfer, _Upload):
            self._ignore(self._offers, transfer.offer)
            for number, _ in transfer.pulls:
                self._say_no(number, "the upload was given up")
        else:
            for number in transfer.pulling:
                self._ignore(self._pulls, number)
            for number, other in list(self._where.items()):
                if other is transfer:
                    self._ignore(self._where, number)
        if self._waiting:
            self._begin(self._waiting.popleft())

    def _ignore(self, said: dict[int, Any], number: int) -> None:
        """Whatever answers that concerns nobody any more."""
        if said.pop(number, None) is not None:
            self._void[number] = None
            if len(self._void) > _VOID_MAX:
                del self._void[next(iter(self._void))]

    def _start_over(self) -> None:
        """Another connection, or none: what was said on the old one is void."""
        self._frames.clear()
        self._void.clear()
        self._offers.clear()
        self._pulls.clear()
        for download in self._where.values():
            download.copying = False
        self._where.clear()
        for transfer in self._open.values():
            if isinstance(transfer, _Upload):
                transfer.offer = 0
                transfer.pulls.clear()
            else:
                transfer.pulling.clear()
                transfer.arrived.clear()
                transfer.asked = transfer.written + max(transfer.writing, 0)
                transfer.held = False

    # -------------------------------------------------------------- what is said

    def _ask(self) -> None:
        """Offer what was not offered on this connection, and pull what there is room for."""
        downloads = 0
        for transfer in self._open.values():
            if isinstance(transfer, _Download):
                downloads += 1
            elif not transfer.offer:
                transfer.offer = self._say(messages.BlobOffer(transfer.blob, transfer.size))
                self._offers[transfer.offer] = transfer
        if not downloads:
            return
        window = max(1, min(limits.BLOB_WINDOW_PARTS, limits.BLOB_CONNECTION_PARTS // downloads))
        for transfer in self._open.values():
            if isinstance(transfer, _Download):
                self._pull(transfer, window)

    def _pull(self, download: _Download, window: int) -> None:
        if self._local and not download.asked_where and download.size > limits.BLOB_PART_BYTES:
            # The bytes need not pass through two processes and a socket.
            download.asked_where = download.copying = True
            number = self._say(messages.BlobWhere(download.blob, download.size))
            self._where[number] = download
        if download.copying:
            return
        room = window - len(download.pulling) - len(download.arrived) - (download.writing >= 0)
        while room > 0 and download.asked < download.size and not download.held:
            room -= 1
            length = min(limits.BLOB_PART_BYTES, download.size - download.asked)
            codecs = "" if self._local else self._codecs
            number = self._say(messages.BlobPull(download.blob, download.asked, length, codecs))
            download.pulling[number] = (download.asked, length)
            self._pulls[number] = download
            download.asked += length

    def _say(self, message: messages.Message, corr_id: int = 0) -> int:
        number = self._number()
        self._frames.append(encode_frame(message, number, corr_id))
        return number

    def _say_no(self, pull: int, why: str) -> None:
        self._frames.append(refusal_frame(BadRequest(why), pull))

    # -------------------------------------------------------------- uploads

    def _pulled(self, pull: messages.BlobPull, msg_id: int, corr_id: int) -> None:
        upload = self._offers.get(corr_id)
        if upload is None:
            self._say_no(msg_id, "nothing of that name is on offer")
            return
        inside = 0 <= pull.offset < pull.offset + pull.length <= upload.size
        most = limits.BLOB_LOCAL_PART_BYTES
        if not inside or pull.length > most or len(upload.pulls) >= _PULLS_MAX:
            self._say_no(msg_id, f"{pull.length:,} bytes at {pull.offset:,} cannot be had")
            return
        upload.pulls.append((msg_id, pull.offset))
        codecs = "" if self._local else pull.codecs
        self._effects.append(ReadPart(upload.token, pull.offset, pull.length, codecs))

    def _part_read(self, event: PartRead) -> None:
        upload = self._open.get(event.token)
        if not isinstance(upload, _Upload):
            return
        pull = next((each for each in upload.pulls if each[1] == event.offset), None)
        if pull is None:
            return  # asked for on a connection that is gone
        if event.error is not None:
            self._end(upload, event.error)
            return
        upload.pulls.remove(pull)
        part = messages.BlobPart(upload.blob, pull[1], event.data, upload.size, event.codec)
        self._say(part, pull[0])

    # -------------------------------------------------------------- downloads

    def _part(self, part: messages.BlobPart, corr_id: int) -> None:
        download = self._pulls.pop(corr_id, None)
        if download is None:
            return  # of a transfer that has ended
        offset, length = download.pulling.pop(corr_id)
        if part.size != download.size or part.offset != offset or not may_be(part, length):
            self._end(download, _not_as_described(download, part))
            return
        download.arrived[offset] = (part.data, part.codec, length)
        self._write_next(download)

    def _write_next(self, download: _Download) -> None:
        """One at a time and in order: whoever writes keeps a running hash."""
        part = download.arrived.pop(download.written, None) if download.writing < 0 else None
        if part is not None:
            data, codec, length = part
            download.writing = length
            last = download.written + length == download.size
            at = download.written
            packed = (codec, length) if codec else ()
            self._effects.append(WritePart(download.token, at, data, last, *packed))

    def _part_written(self, event: PartWritten) -> None:
        download = self._open.get(event.token)
        if not isinstance(download, _Download):
            return
        if event.error is not None:
            if isinstance(event.error, BlobDamaged):
                self._say(messages.BlobSpoiled(download.blob, download.size))
            self._end(download, event.error)
            return
        download.written += download.writing
        download.writing = -1
        if download.written == download.size:
            self._end(download)
        else:
            self._write_next(download)

    def _at(self, answer: messages.BlobAt, corr_id: int) -> None:
        download = self._where.pop(corr_id, None)
        if download is None:
            self._void.pop(corr_id, None)
        elif answer.path and not download.written and download.writing < 0:
            self._effects.append(CopyBlob(download.token, answer.path, download.size))
        else:
            download.copying = False

    def _copied(self, event: Copied) -> None:
        download = self._open.get(event.token)
        if isinstance(download, _Download):
            download.copying = False
            if event.whole:
                self._end(download)

    # -------------------------------------------------------------- refusals

    def _refused(self, refusal: messages.Refusal, corr_id: int) -> bool:
        transfer: _Upload | _Download | None = self._offers.pop(corr_id, None)
        if transfer is None:
            if (asker := self._where.pop(corr_id, None)) is not None:
                asker.copying = False
                return True
            transfer = self._pulls.pop(corr_id, None)
            if transfer is None:
                return self._void.pop(corr_id, 0) is None
            transfer.pulling.pop(corr_id)
        if refusal.code not in _ELSEWHERE:
            self._end(transfer, error_from(refusal))
        elif isinstance(transfer, _Download):
            transfer.held = True
        return True


def may_be(part: messages.BlobPart, length: int) -> bool:
    """Whether the data of a part may stand for so many bytes. Packed it is smaller, or it would
    have been sent as it is; whoever unpacks it sees whether it keeps its word."""
    size = len(part.data)
    return size < length if part.codec else size == length


def _not_as_described(download: _Download, part: messages.BlobPart) -> EkidenError:
    if part.size != download.size:
        return Refusal(
            f"blob {download.blob[:12]}… has {part.size:,} bytes, not {download.size:,}",
            remedy="ask for it with the size it was stored with",
        )
    return BlobDamaged(f"the broker sent another part of blob {download.blob[:12]}… than asked for")
