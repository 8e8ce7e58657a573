"""Who may give and take file contents, and how much at a time: the broker's side of the bulk lane.

Bytes are known by their SHA-256 and size. An offer waits until it is its turn; then its parts are
pulled, a few at a time, and the next is asked for only when one is written. What peers ask to be
sent is read a few parts at a time, by turns between connections, and not for those that read more
slowly than they ask. So a thousand peers with large files cost the memory of a few parts, and the
ledger's messages never wait behind more than that.

An upload belongs to its connection and goes with it. What had come is set aside for a while, and
the next offer of the same blob, by whomever, goes on behind it. Of two at once neither waits for
the other, and the first to be whole wins; only a program that is back on another connection takes
over from itself. An upload that does not fit waits while room is made, and is refused if none can
be.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeAlias, TypeVar

from msgspec import Struct

from ekiden import limits
from ekiden.broker.events import (
    BeginBlob,
    BlobExamined,
    BlobLocated,
    BlobRead,
    BlobsRemoved,
    DropBlob,
    ExamineBlob,
    LocateBlob,
    ReadBlob,
    UnusedFound,
    UploadMoved,
    WriteBlob,
)
from ekiden.broker.intake import Intake
from ekiden.broker.peers import Peer
from ekiden.broker.room import Room
from ekiden.config import BrokerConfig
from ekiden.errors import (
    BadRequest,
    Draining,
    EkidenError,
    Fault,
    QueueFull,
    StorageFault,
    TooLarge,
)
from ekiden.machine import Frame, Instant, Log
from ekiden.model.caches import CacheUse
from ekiden.model.ids import shown
from ekiden.wire import messages as m
from ekiden.wire.frames import encode_frame
from ekiden.wire.link import is_loopback
from ekiden.wire.session import refusal_frame
from ekiden.wire.transfers import may_be

_HASH: Final = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")

StoreEvent: TypeAlias = (
    UploadMoved | BlobRead | BlobLocated | UnusedFound | BlobsRemoved | BlobExamined
)
EVENTS: Final = (UploadMoved, BlobRead, BlobLocated, UnusedFound, BlobsRemoved, BlobExamined)
"""What the store is told of the disk."""

MESSAGES: Final = (
    m.BlobOffer, m.BlobPull, m.BlobPart, m.BlobWhere, m.BlobSpoiled, m.Refusal,
)  # fmt: skip
"""What the store is told by peers. They refuse nothing but pulls."""


class _Upload(Struct, eq=False):
    number: int
    peer: Peer
    offer: int
    """The number of the message that offered it."""
    blob: str
    size: int
    asked: int = 0
    """Up to where parts have been asked for."""
    handed: int = 0
    """Up to where parts went to the disk."""
    written: int = 0
    begun: bool = False
    """Whether the disk has said that the parts are wanted, and there is room for them."""
    arrived: dict[int, tuple[bytes, str, int]] = {}
    """Parts that came before their turn."""
    pulls: dict[int, tuple[int, int]] = {}
    """Number → offset and length of parts the peer owes."""
    heard: Instant = 0


class _Pull(Struct, frozen=True):
    peer: Peer
    msg_id: int
    blob: str
    offset: int
    length: int
    codecs: str


class _ByTurns(Generic[T]):
    """Things that wait, by connection: every connection has its turn."""

    def __init__(self) -> None:
        self._lines: dict[Peer, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, peer: Peer, thing: T) -> None:
        self._lines.setdefault(peer, deque()).append(thing)
        self._count += 1

    def of(self, peer: Peer) -> int:
        """How many wait for this connection."""
        return len(self._lines.get(peer, ()))

    def take(self, may: Callable[[Peer], bool]) -> T | None:
        """The next of a connection that may have a turn; it goes to the end of the line."""
        peer = next(filter(may, self._lines), None)
        if peer is None:
            return None
        line = self._lines.pop(peer)
        thing = line.popleft()
        self._count -= 1
        if line:
            self._lines[peer] = line
        return thing

    def drop(self, peer: Peer) -> None:
        """All that waited for this connection waits no more."""
        self._count -= len(self._lines.pop(peer, ()))


class Store:
    """What is being uploaded and read. The folder itself is the business of the world."""

    def __init__(
        self,
        config: BrokerConfig,
        intake: Intake,
        referenced: Callable[[str], bool] = lambda _blob: False,
        codecs: str = "",
    ) -> None:
        """`referenced` tells of a blob whether the book needs it: such a one is never removed.
        `codecs` can be unpacked here."""
        self._intake = intake
        self._codecs = codecs
        self._numbers = 0
        self._offers: _ByTurns[_Upload] = _ByTurns()
        self._uploads: dict[int, _Upload] = {}
        """Those whose turn it is, by number."""
        self._uploads_of: dict[Peer, dict[_Upload, None]] = {}
        self._pulls: dict[int, _Upload] = {}
        """Number of a pull → the upload it is for."""
        self._asked: _ByTurns[_Pull] = _ByTurns()
        self._reading: dict[int, _Pull] = {}
        self._locating: dict[int, tuple[Peer, int, str]] = {}
        """Who asked where a blob lies, with the number of the question."""
        self._cramped: dict[_Upload, None] = {}
        """Those that wait for room."""
        self._suspects: dict[str, None] = {}
        """Blobs said to be damaged that are still to be examined."""
        self._examining = ""
        self._sound: dict[str, Instant] = {}
        """Blobs that were found sound, and when."""
        self._effects: list[Any] = []
        self.room = Room(config, intake, self._effects, self._wanted, referenced)

    # -------------------------------------------------------------- what the machine calls

    def heard(self, peer: Peer, frame: Frame, message: m.Message, now: Instant) -> None:
        """A peer speaks of blobs. Raises a Refusal of what it said."""
        match message:
            case m.BlobOffer():
                self._offer(peer, frame.msg_id, message)
            case m.BlobWhere():
                self._where(peer, frame.msg_id, message)
            case m.BlobPull():
                self._pull(peer, frame.msg_id, message)
            case m.BlobPart():
                self._part(peer, frame.corr_id, message, now)
            case m.Refusal():
                upload = self._owner(peer, frame.corr_id)
                if upload is not None:
                    self._drop(upload)  # its owner knows why
            case m.BlobSpoiled():
                self._check_may(peer, message.blob)
                self._suspect(message.blob, now)
            case _:
                raise AssertionError(message)

    def receive(self, event: StoreEvent, now: Instant) -> None:
        """The disk has done something."""
        match event:
            case BlobRead():
                self._read(event, now)
            case UploadMoved():
                self.room.held = event.held
                self._moved(event, now)
            case UnusedFound() | BlobsRemoved():
                self.room.receive(event, now)
                self._let_in(now)
            case BlobExamined():
                self._examined(event, now)
            case BlobLocated():
                self._located(event)

    def _where(self, peer: Peer, msg_id: int, message: m.BlobWhere) -> None:
        """To who speaks from this machine: there, if the system lets you read it."""
        self._check_may(peer, message.blob)
        if not is_loopback(peer.address) or len(self._locating) >= limits.BLOB_OFFERS_MAX:
            peer.send(m.BlobAt(message.blob), msg_id)
            return
        number = self._number()
        self._locating[number] = (peer, msg_id, message.blob)
        self._effects.append(LocateBlob(number, message.blob, message.size))

    def _located(self, event: BlobLocated) -> None:
        peer, msg_id, blob = self._locating.pop(event.number)
        peer.send(m.BlobAt(blob, event.path), msg_id)

    def left(self, peer: Peer) -> None:
        """The connection is gone, and its uploads with it."""
        self._asked.drop(peer)
        self._offers.drop(peer)
        for upload in list(self._uploads_of.get(peer, ())):
            self._drop(upload, keep=True)

    def sweep(self, now: Instant) -> None:
        """An offerer that owes a part for long has forgotten it; its place goes to another."""
        for upload in list(self._uploads.values()):
            if upload.pulls and now - upload.heard > limits.BLOB_STALL_NS:
                stalled_s = limits.BLOB_STALL_NS // limits.NS
                self._refuse(upload, Fault(f"no part of the upload came for {stalled_s} s"))
        self.room.sweep(now)

    def advance(self, now: Instant) -> list[Any]:
        """Begin, pull and read as much as there is room for; what the disk shall do."""
        while self._offers and len(self._uploads) < limits.BLOB_UPLOADS_PULLED:
            upload = self._offers.take(self._may_upload)
            if upload is None:
                break
            self._begin(upload, now)
        while self._asked and len(self._reading) < limits.BLOB_READS_MAX:
            pull = self._asked.take(_keeps_up)
            if pull is None:
                break
            number = self._number()
            self._reading[number] = pull
            self._effects.append(ReadBlob(number, pull.blob, pull.offset, pull.length, pull.codecs))
        self.room.make()
        if self._suspects and not self._examining:
            self._examining = next(iter(self._suspects))
            del self._suspects[self._examining]
            self._effects.append(ExamineBlob(self._examining))
        effects = self._effects[:]
        self._effects.clear()  # it is the room's, too
        return effects

    def _log(self, event: str, peer: Peer, blob: str, error: EkidenError) -> None:
        facts = {"id": peer.id, "blob": blob, "code": error.code, "why": error.message}
        self._effects.append(Log("warning", event, facts))

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def hold_caches(self, caches: Iterable[CacheUse]) -> None:
        """At the start: the caches of the book. Nothing is removed before all of them are held."""
        self.room.hold_caches(caches)

    # -------------------------------------------------------------- who may

    def _check_may(self, peer: Peer, blob: str) -> None:
        """Raise if this peer may not give or take this blob. Whoever knows the group's key may, and
        a hash cannot be guessed; finer rules belong here."""
        del peer
        if _HASH.fullmatch(blob) is None:
            raise BadRequest(
                f"{shown(blob)} is no name of a blob",
                remedy="use its SHA-256 in lower-case hex",
            )

    def _may_upload(self, peer: Peer) -> bool:
        return len(self._uploads_of.get(peer, ())) < limits.BLOB_TRANSFERS_MAX

    def _check_offer(self, peer: Peer, size: int) -> None:
        if self._intake.draining:
            raise Draining("the broker is shutting down", remedy="offer it again in a moment")
        if size < 0:
            raise BadRequest("a blob of negative size")
        if size > limits.BLOB_BYTES_MAX:
            raise TooLarge(
                f"a blob of {size:,} bytes is over the limit of {limits.BLOB_BYTES_MAX:,}",
                remedy="split the file",
            )
        unfinished = self._offers.of(peer) + len(self._uploads_of.get(peer, ()))
        if unfinished >= limits.BLOB_OFFERS_PER_CONNECTION or (
            len(self._offers) + len(self._uploads) >= limits.BLOB_OFFERS_MAX
        ):
            raise QueueFull(
                "too many uploads are unfinished", remedy="retry later", retry_after_s=1
            )

    # -------------------------------------------------------------- uploads

    def _offer(self, peer: Peer, msg_id: int, message: m.BlobOffer) -> None:
        self._check_may(peer, message.blob)
        self._check_offer(peer, message.size)
        upload = _Upload(self._number(), peer, msg_id, message.blob, message.size)
        self._offers.add(peer, upload)

    def _begin(self, upload: _Upload, now: Instant) -> None:
        peer = upload.peer
        for other in list(self._uploads.values()):
            # The same program on another connection: the old one is lost, only not yet to us.
            same = (other.peer.id, other.peer.session) == (peer.id, peer.session)
            if same and other.peer is not peer and other.blob == upload.blob:
                self._drop(other, keep=True)
        upload.heard = now
        self._uploads[upload.number] = upload
        self._uploads_of.setdefault(upload.peer, {})[upload] = None
        self._effects.append(BeginBlob(upload.number, upload.blob, upload.size))

    def _pull_parts(self, upload: _Upload, now: Instant) -> None:
        part, codecs = limits.BLOB_PART_BYTES, self._codecs
        if is_loopback(upload.peer.address):
            part, codecs = limits.BLOB_LOCAL_PART_BYTES, ""
        share = limits.BLOB_CONNECTION_PARTS // len(self._uploads_of[upload.peer])
        window = max(1, min(limits.BLOB_WINDOW_PARTS, share)) * part
        while upload.asked < min(upload.size, upload.written + window):
            length = min(part, upload.size - upload.asked)
            number = self._number()
            pull = m.BlobPull(upload.blob, upload.asked, length, codecs)
            upload.peer.send_frame(encode_frame(pull, number, upload.offer))
            if not upload.pulls:
                upload.heard = now
            upload.pulls[number] = (upload.asked, length)
            self._pulls[number] = upload
            upload.asked += length

    def _owner(self, peer: Peer, pull: int) -> _Upload | None:
        """The upload that a peer's answer to a pull belongs to; None if it has ended."""
        upload = self._pulls.get(pull)
        return upload if upload is not None and upload.peer is peer else None

    def _part(self, peer: Peer, corr_id: int, part: m.BlobPart, now: Instant) -> None:
        upload = self._owner(peer, corr_id)
        if upload is None:
            return
        del self._pulls[corr_id]
        offset, length = upload.pulls.pop(corr_id)
        upload.heard = now
        if part.offset != offset or not may_be(part, length):
            self._refuse(upload, BadRequest("another part of the blob than was asked for"))
            return
        upload.arrived[offset] = (part.data, part.codec, length)
        while (arrived := upload.arrived.pop(upload.handed, None)) is not None:
            upload.handed += arrived[2]
            data, codec, size = arrived
            packed = (codec, size) if codec else ()
            self._effects.append(WriteBlob(upload.number, data, *packed))

    def _moved(self, event: UploadMoved, now: Instant) -> None:
        upload = self._uploads.get(event.upload)
        if upload is None:
            return  # it was dropped meanwhile
        if upload.begun:
            self._count(upload, upload.size if event.stored else event.upto)
        if event.error is not None:
            self._refuse(upload, event.error, gone=True)
        elif event.stored:
            upload.peer.send(m.BlobStored(upload.blob), upload.offer)
            self._forget(upload)
        elif upload.begun and event.upto:
            self._pull_parts(upload, now)
        else:
            # It begins, or begins anew, because what was set aside for it was wrong.
            upload.asked = upload.handed = upload.written = event.upto
            if not upload.begun:
                self._cramped[upload] = None
                self._let_in(now)
            else:
                self._pull_parts(upload, now)

    def _count(self, upload: _Upload, upto: int) -> None:
        grown = upto - upload.written
        upload.written += grown
        self.room.owed -= grown
        # Measured now and then only: uploads must not eat what is kept free meanwhile.
        self._intake.disk_free -= grown

    def _wanted(self) -> int:
        """How many bytes must go for all that wait."""
        sizes = [each.size - each.written for each in self._cramped]
        return self.room.short_of(sum(sizes)) if sizes else 0

    def _let_in(self, now: Instant) -> None:
        """Those there is room for; if it is vain to wait for more, the others are refused."""
        for upload in list(self._cramped):
            size = upload.size - upload.written
            if not self.room.short_of(size):
                del self._cramped[upload]
                upload.begun = True
                self.room.owed += size
                self._pull_parts(upload, now)
            elif self.room.is_vain(now) or self.room.never_fits(upload.size):
                self._refuse(upload, self.room.refusal(size))

    def _refuse(self, upload: _Upload, error: EkidenError, *, gone: bool = False) -> None:
        """`gone`: the disk holds nothing of it any more."""
        self._log("upload.refused", upload.peer, upload.blob, error)
        upload.peer.send_frame(refusal_frame(error, upload.offer))
        if gone:
            self._forget(upload)
        else:
            # What came of a blob may be right, whatever is wrong with its bearer.
            self._drop(upload, keep=True)

    def _drop(self, upload: _Upload, *, keep: bool = False) -> None:
        self._effects.append(DropBlob(upload.number, keep))
        self._forget(upload)

    def _forget(self, upload: _Upload) -> None:
        self._cramped.pop(upload, None)
        if upload.begun:
            self.room.owed -= upload.size - upload.written
        del self._uploads[upload.number]
        for number in upload.pulls:
            del self._pulls[number]
        others = self._uploads_of[upload.peer]
        del others[upload]
        if not others:
            del self._uploads_of[upload.peer]

    # -------------------------------------------------------------- downloads

    def _pull(self, peer: Peer, msg_id: int, message: m.BlobPull) -> None:
        self._check_may(peer, message.blob)
        if message.offset < 0 or not 0 < message.length <= limits.BLOB_LOCAL_PART_BYTES:
            raise BadRequest(
                f"a part of {message.length:,} bytes at {message.offset:,}",
                remedy=f"ask for 1 to {limits.BLOB_LOCAL_PART_BYTES:,} bytes",
            )
        if self._asked.of(peer) >= limits.BLOB_PULLS_PER_CONNECTION:
            raise QueueFull("too many parts are asked for", remedy="wait for some to come")
        codecs = "" if is_loopback(peer.address) else message.codecs
        pull = _Pull(peer, msg_id, message.blob, message.offset, message.length, codecs)
        self._asked.add(peer, pull)

    def _read(self, event: BlobRead, now: Instant) -> None:
        pull = self._reading.pop(event.read)
        if event.error is not None:
            if isinstance(event.error, Fault):
                self._log("blob.unreadable", pull.peer, pull.blob, event.error)
            if isinstance(event.error, StorageFault | BadRequest):
                # It cannot be read, or is shorter than somebody thinks.
                self._suspect(pull.blob, now)
            pull.peer.send_frame(refusal_frame(event.error, pull.msg_id))
        else:
            part = m.BlobPart(pull.blob, pull.offset, event.data, event.size, event.codec)
            pull.peer.send(part, pull.msg_id)

    # -------------------------------------------------------------- damage

    def _suspect(self, blob: str, now: Instant) -> None:
        """Have it examined, unless that was just done or too many wait for it."""
        sound = self._sound.get(blob)
        if sound is not None and now - sound < limits.BLOB_SUSPECT_AGAIN_NS:
            return
        if blob != self._examining and len(self._suspects) < limits.BLOB_SUSPECTS_MAX:
            self._suspects[blob] = None

    def _examined(self, event: BlobExamined, now: Instant) -> None:
        self._examining = ""
        self._sound.pop(event.blob, None)
        if event.damaged:
            facts = {"blob": event.blob, "kept": event.kept or "not kept"}
            self._effects.append(Log("error", "blob.damaged", facts))
            return
        self._sound[event.blob] = now
        if len(self._sound) > limits.BLOB_SUSPECTS_MAX:
            del self._sound[next(iter(self._sound))]


def _keeps_up(peer: Peer) -> bool:
    return not peer.congested
