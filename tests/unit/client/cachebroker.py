"""A loopback broker with a store and caches, for tests of the caller's side of caches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from tests.unit.client.loopback import KEY, Loopback, LoopbackMachine, echo

import ekiden
from ekiden import limits
from ekiden.model.caches import Manifest, decode_manifest
from ekiden.model.jobs import Spec
from ekiden.wire import messages

Workers = Callable[[int], list[dict[str, Any]]]
"""What the workers say when a cache is looked at for the n-th time."""


def worker(name: str, status: str, text: str = "", done: int = 10) -> dict[str, Any]:
    return {"id": name, "status": status, "text": text, "done": done, "total": 10}


class CacheMachine(LoopbackMachine):
    """Keeps blobs and caches as a broker does; its workers say what a test wants."""

    def __init__(self) -> None:
        super().__init__(echo, KEY)
        self.blobs: dict[str, bytes] = {}
        self.received = 0
        self.offered: list[str] = []
        self.caches: dict[str, dict[str, Any]] = {}
        self.looks = 0
        self.workers: Workers = lambda _look: [worker("w1", "ok")]
        self.submits: list[messages.Submit] = []
        self.fetched: list[str] = []
        self.before_put: Callable[[], None] = lambda: None
        self._coming: dict[str, tuple[int, bytearray, int]] = {}

    def manifest(self, cache_id: str) -> Manifest:
        return decode_manifest(self.blobs[self.caches[cache_id]["manifest"]])

    def content(self, cache_id: str) -> dict[str, bytes]:
        """The files as a worker would lay them out."""
        return {
            file.name: self.blobs[file.pack][file.at : file.at + file.size]
            if file.pack
            else self.blobs[file.blob]
            for file in self.manifest(cache_id).files
        }

    def spec(self, at: int = -1) -> Spec:
        return msgspec.msgpack.decode(self.submits[at].spec, type=Spec)

    def _frame(self, conn: int, frame: Any) -> None:
        if self._greeters[conn].identity is None:
            super()._frame(conn, frame)
            return
        match messages.decode(frame.type, frame.body):
            case messages.BlobOffer() as offer:
                self._offer(conn, offer, frame.msg_id)
            case messages.BlobPart() as part:
                self._part(conn, part)
            case messages.BlobPull() as pull:
                self._pull(conn, pull, frame.msg_id)
            case messages.Submit() as submit:
                self.submits.append(submit)
                super()._frame(conn, frame)
            case _:
                super()._frame(conn, frame)

    def _offer(self, conn: int, offer: messages.BlobOffer, number: int) -> None:
        self.offered.append(offer.blob)
        if offer.blob in self.blobs or offer.size == 0:
            self.blobs.setdefault(offer.blob, b"")
            self.say(conn, messages.BlobStored(offer.blob), number)
            return
        self._coming[offer.blob] = (number, bytearray(), offer.size)
        self._ask_part(conn, offer.blob)

    def _ask_part(self, conn: int, blob: str) -> None:
        number, data, size = self._coming[blob]
        length = min(limits.BLOB_PART_BYTES, size - len(data))
        self.say(conn, messages.BlobPull(blob, len(data), length), number)

    def _part(self, conn: int, part: messages.BlobPart) -> None:
        number, data, size = self._coming[part.blob]
        data += part.data
        self.received += len(part.data)
        if len(data) < size:
            self._ask_part(conn, part.blob)
            return
        del self._coming[part.blob]
        if hashlib.sha256(data).hexdigest() != part.blob:
            self.say(conn, messages.Refusal("blob_damaged", "another hash"), number)
            return
        self.blobs[part.blob] = bytes(data)
        self.say(conn, messages.BlobStored(part.blob), number)

    def _pull(self, conn: int, pull: messages.BlobPull, number: int) -> None:
        if pull.offset == 0:
            self.fetched.append(pull.blob)
        data = self.blobs.get(pull.blob)
        if data is None:
            self.say(conn, messages.Refusal("unknown_blob", "no such blob"), number)
            return
        part = data[pull.offset : pull.offset + pull.length]
        self.say(conn, messages.BlobPart(pull.blob, pull.offset, part, len(data)), number)

    # -------------------------------------------------------------- questions

    def _ask(self, conn: int, ask: messages.Ask, number: int) -> None:
        answer = getattr(self, f"_ask_{ask.verb}", None)
        if answer is None:
            super()._ask(conn, ask, number)
            return
        self.asked.append((ask.verb, ask.params))
        body = answer(**ask.params)
        said = body if isinstance(body, messages.Refusal) else messages.Answer(body)
        self.say(conn, said, number)

    def _ask_cache_put(self, id: str, manifest: str, size: int, target: str) -> Any:
        self.before_put()
        there = self.caches.get(id)
        if there is not None and there["manifest"] != manifest:
            return messages.Refusal("conflict", f"{id} is taken")
        named = decode_manifest(self.blobs[manifest])
        if any(blob not in self.blobs for blob, _ in named.blobs()):
            return messages.Refusal("unknown_blob", "bytes are missing")
        if there is not None:
            return {"id": id, "manifest": manifest, "state": "same"}
        self.caches[id] = {
            "id": id, "manifest": manifest, "size": size, "files": len(named.files),
            "bytes": named.size, "client": "me", "targets": [target], "put": 1, "jobs": 0,
        }  # fmt: skip
        return {"id": id, "manifest": manifest, "state": "new"}

    def _ask_cache(self, id: str) -> Any:
        if id not in self.caches:
            return messages.Refusal("unknown_cache", f"no cache {id!r} is known")
        self.looks += 1
        return {**self.caches[id], "workers": self.workers(self.looks)}

    def _ask_caches(self, limit: int, after: str = "") -> Any:
        ids = list(reversed(self.caches))
        ids = ids[ids.index(after) + 1 :] if after else ids
        rows = [{**self.caches[each], "ok": 1, "of": 1} for each in ids[:limit]]
        return {"caches": rows, "more": len(ids) > limit}

    def _ask_cache_remove(self, ids: list[str]) -> Any:
        removed = [each for each in ids if self.caches.pop(each, None)]
        return {"removed": removed, "in_use": [], "unknown": [e for e in ids if e not in removed]}

    def _ask_cache_verify(self, id: str) -> Any:
        return {"id": id, "workers": len(self.workers(0))}


@contextmanager
def cache_broker() -> Iterator[tuple[CacheMachine, Loopback]]:
    """Such a broker, on a port."""
    broker = Loopback()
    machine = CacheMachine()
    broker.machine = machine
    with broker:
        yield machine, broker


def client_of(broker: Loopback) -> ekiden.Client:
    return ekiden.Client(broker.address, key=KEY, client_id="me")


__all__ = ["CacheMachine", "cache_broker", "client_of", "worker"]
