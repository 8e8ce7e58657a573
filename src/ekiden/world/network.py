"""Sockets for a machine: listens, dials, cuts bytes into frames, writes what is sent.

Every connection has a number. It begins with one `Connected` and ends with one `Disconnected`,
which follows a `Close` at once: nothing of that connection is heard after it, while the socket
lingers in the background until the peer has taken what was sent.

What a peer can cost is bounded: one unfinished frame of the limit it is trusted with, an outbox of
`OUTBOX_BYTES_MAX` beyond which it is dropped as a slow reader, and one of `CONNECTIONS_MAX` places.
The machine is told early, at `CONGESTED_BYTES`, so that it can hold back what may wait.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from ekiden import limits
from ekiden.errors import BadFrame, CannotListen, EkidenError, Refusal, TooLarge
from ekiden.machine import (
    Close,
    Congested,
    Connected,
    ConnId,
    Dial,
    DialFailed,
    Disconnected,
    Garbled,
    Log,
    Received,
    Relieved,
    Send,
    Trust,
)
from ekiden.wire.frames import FrameReader
from ekiden.wire.session import refusal_frame
from ekiden.world.addresses import join_address, split_address
from ekiden.world.loop import Driver, seconds

# The peer was gone before we looked: the next one may be fine. Anything else, above all being out
# of file descriptors, will be the same at once, and accepting again at once would only spin.
_PEER_GONE: Final = (errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO, errno.EPERM, errno.EINTR)

_BACKLOG: Final = 1024


class _Link(asyncio.Protocol):
    """One connection."""

    __slots__ = ("_discarded", "conn", "dialled", "network", "reader", "told", "transport")

    def __init__(self, network: Network, conn: ConnId, dialled: str) -> None:
        self.network = network
        self.conn = conn
        self.dialled = dialled
        self.reader = FrameReader(
            limits.FRAME_BYTES_MAX if dialled else limits.FRAME_BYTES_MAX_BEFORE_HELLO
        )
        self.transport: asyncio.Transport | None = None
        self.told = False
        """Whether the machine was told that this ended, or that it is garbage."""
        self._discarded = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not every loop derives its transports from asyncio's: a cast, not a check.
        self.transport = cast("asyncio.Transport", transport)
        self.network.guard(self.network.joined, self)

    def data_received(self, data: bytes) -> None:
        if self.told:
            self._discard(len(data))
            return
        try:
            frames = self.reader.feed(data)
        except (BadFrame, TooLarge) as error:
            self.told = True
            self.network.guard(self.network.garbled, self, str(error))
            return
        except Exception as error:  # noqa: BLE001 - the event loop would only log it
            self.network.driver.fail(error)
            return
        if frames:
            self.network.driver.feed(Received(self.conn, frames))

    def _discard(self, count: int) -> None:
        self._discarded += count
        if self._discarded > limits.LINGER_BYTES_MAX and self.transport is not None:
            self.transport.abort()

    def pause_writing(self) -> None:
        # Called by the transport when its buffer passes the high mark.
        if not self.told:
            self.network.driver.feed(Congested(self.conn))

    def resume_writing(self) -> None:
        if not self.told:
            self.network.driver.feed(Relieved(self.conn))

    def connection_lost(self, exc: Exception | None) -> None:
        reason = _why(exc) if exc else "closed by the peer"
        self.network.guard(self.network.left, self, reason)


class Network:
    """The connections of one machine. Registers itself with `driver` for its effects."""

    def __init__(
        self,
        driver: Driver,
        *,
        connections_max: int = limits.CONNECTIONS_MAX,
        outbox_bytes_max: int = limits.OUTBOX_BYTES_MAX,
    ) -> None:
        self.driver = driver
        self.connections_max = connections_max
        self.outbox_bytes_max = outbox_bytes_max
        self._links: dict[ConnId, _Link] = {}
        self._lingering: set[_Link] = set()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: dict[socket.socket, asyncio.Task[None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = False
        driver.handle(Send, self.send)
        driver.handle(Close, self.close)
        driver.handle(Dial, self.dial)
        driver.handle(Trust, self.trust)

    @property
    def connections(self) -> int:
        """Open sockets, lingering ones included."""
        return len(self._links) + len(self._lingering)

    # -------------------------------------------------------------- listening

    async def listen(self, host: str, port: int) -> int:
        """Accept connections on this address from now on; port 0 lets the system choose.

        Returns the port. Raises `CannotListen` if the address cannot be had.
        """
        try:
            found = await self.driver.loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            listener = _bound(*found[0])
        except (OSError, ValueError) as error:
            where = join_address(host, port)
            raise CannotListen(
                f"cannot listen on {where}: {_why(error)}",
                remedy="stop what listens there or choose another --port or --bind",
            ) from None
        task = self._spawn(self._accept_all(listener), f"accept {listener.getsockname()}")
        self._listeners[listener] = task
        bound: int = listener.getsockname()[1]
        return bound

    def stop_listening(self) -> None:
        """Take no more connections; those there are go on."""
        for listener, task in self._listeners.items():
            task.cancel()
            listener.close()
        self._listeners.clear()

    async def _accept_all(self, listener: socket.socket) -> None:
        loop = self.driver.loop
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                await self._survive(error)
                continue
            if self.connections >= self.connections_max:
                _turn_away(accepted, self.connections_max)
                continue
            await self._take(accepted)

    async def _take(self, accepted: socket.socket) -> None:
        link = _Link(self, next(self._numbers), dialled="")
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.driver.loop.connect_accepted_socket(lambda: link, accepted)
        except OSError:
            accepted.close()  # It was gone before we looked.
        except asyncio.CancelledError:
            self._abandon(link)
            raise

    async def _survive(self, error: OSError) -> None:
        """Go on after a failed accept: at once if the peer had gone, else after a pause."""
        if error.errno in _PEER_GONE:
            return
        pause_s = seconds(limits.ACCEPT_PAUSE_NS)
        facts = {"why": _why(error), "open": self.connections, "again_in_s": pause_s}
        self.driver.perform_one(Log("warning", "network.accept_failed", facts))
        await asyncio.sleep(pause_s)

    # -------------------------------------------------------------- effects

    def send(self, effect: Send) -> None:
        """Write, if the connection is still there. Never waits: who does not read is dropped."""
        link = self._links.get(effect.conn)
        if link is None:
            return
        transport = link.transport
        assert transport is not None
        if not transport.is_closing():
            transport.write(effect.data)
            if transport.get_write_buffer_size() > self.outbox_bytes_max:
                self.too_slow(link)

    def trust(self, effect: Trust) -> None:
        """Accept frames of full size from now on."""
        link = self._links.get(effect.conn)
        if link is not None:
            link.reader.limit = limits.FRAME_BYTES_MAX

    def close(self, effect: Close) -> None:
        """End the connection after what was sent on it, but do not wait for a peer that stalls."""
        link = self._links.pop(effect.conn, None)
        if link is None:
            return
        self._linger(link)
        self.driver.feed(Disconnected(link.conn, effect.reason or "closed by us"))

    def dial(self, effect: Dial) -> None:
        """Connect in the background: `Connected` or `DialFailed` follows."""
        self._spawn(self._dial(effect.address), f"dial {effect.address}")

    async def _dial(self, address: str) -> None:
        link = _Link(self, next(self._numbers), dialled=address)
        try:
            host, port = split_address(address)
            async with asyncio.timeout(seconds(limits.DIAL_TIMEOUT_NS)):
                await self.driver.loop.create_connection(lambda: link, host, port)
        except TimeoutError:
            self._dial_failed(link, "no answer in time")
        except EkidenError as error:
            self._dial_failed(link, error.message)
        except (OSError, ValueError) as error:
            self._dial_failed(link, _why(error))
        except asyncio.CancelledError:
            self._abandon(link)
            raise

    def _dial_failed(self, link: _Link, reason: str) -> None:
        if not self._abandon(link):
            self.driver.feed(DialFailed(link.dialled, reason))

    def _abandon(self, link: _Link) -> bool:
        """End a connection whose making was cut short; whether the machine had heard of it.

        Not every loop says `connection_lost` in that moment (uvloop does not): waiting for it would
        be waiting for ever. Where the loop does say it, `left` finds nothing to do.
        """
        heard_of = link.conn in self._links or link in self._lingering
        link.told = True
        if link.transport is not None:
            link.transport.abort()
            self.left(link, "given up while it was being made")
        return heard_of

    # -------------------------------------------------------------- what links report

    def guard(self, report: Callable[..., None], *facts: Any) -> None:
        """Run a callback of the event loop, which would only log a bug in it and go on."""
        try:
            report(*facts)
        except Exception as error:  # noqa: BLE001 - any bug ends the driver
            self.driver.fail(error)

    def joined(self, link: _Link) -> None:
        """A connection is open."""
        transport = link.transport
        assert transport is not None
        transport.set_write_buffer_limits(min(limits.CONGESTED_BYTES, self.outbox_bytes_max))
        if self._closed or link.told:
            transport.abort()
            return
        link_socket = transport.get_extra_info("socket")
        if link.dialled and link_socket is not None:
            link_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[link.conn] = link
        self._empty.clear()
        peer = transport.get_extra_info("peername")
        shown = join_address(peer[0], peer[1]) if peer else "unknown"
        self.driver.feed(Connected(link.conn, shown, os.urandom(16), link.dialled))

    def garbled(self, link: _Link, reason: str) -> None:
        """The peer sent no frame. The machine is to close; if it does not, the linger does."""
        self.driver.feed(Garbled(link.conn, reason))
        self._cut_off_later(link)

    def too_slow(self, link: _Link) -> None:
        """More waits for the peer than it may keep us holding: drop it, and what waits with it."""
        assert link.transport is not None
        link.transport.abort()
        if self._links.pop(link.conn, None) is not None:
            link.told = True
            self._lingering.add(link)
            most = f"{self.outbox_bytes_max >> 10:,} KiB"
            reason = f"slow reader: more than {most} waited to be read"
            self.driver.feed(Disconnected(link.conn, reason))

    def left(self, link: _Link, reason: str) -> None:
        """A socket is gone, lingering or not."""
        self._lingering.discard(link)
        known = self._links.pop(link.conn, None) is not None
        if not self.connections:
            self._empty.set()
        if known:
            self.driver.feed(Disconnected(link.conn, reason))

    # -------------------------------------------------------------- end

    async def wait_closed(self) -> None:
        """Close everything: listeners at once, connections after what was sent or a short while."""
        self._closed = True
        self.stop_listening()
        for task in self._tasks:
            task.cancel()
        for conn in list(self._links):
            self._linger(self._links.pop(conn))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._empty.wait()

    def _linger(self, link: _Link) -> None:
        """Say no more, hear nothing, and cut the line when the peer hangs up or time is over."""
        transport = link.transport
        assert transport is not None
        link.told = True
        self._lingering.add(link)
        if transport.is_closing() or not transport.can_write_eof():
            transport.close()
        else:
            transport.write_eof()
        self._cut_off_later(link)

    def _cut_off_later(self, link: _Link) -> None:
        delay_s = seconds(limits.LINGER_NS)
        self.driver.loop.call_later(delay_s, self.guard, self._cut_off, link)

    def _cut_off(self, link: _Link) -> None:
        if link.transport is not None and (link in self._lingering or link.conn in self._links):
            link.transport.abort()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.driver.loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.driver.fail(error)


def _bound(
    family: int, kind: int, protocol: int, _name: str, address: tuple[Any, ...]
) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # Elsewhere this option would let two brokers share a port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _turn_away(accepted: socket.socket, most: int) -> None:
    """Tell one peer too many why it is not served, if it listens, and hang up."""
    full = Refusal(
        f"this broker has {most:,} connections, the most it takes",
        remedy="close some, or share connections between threads",
        retry_after_s=5,
    )
    try:
        accepted.setblocking(False)
        accepted.send(refusal_frame(full))
    except OSError:
        pass  # It is being hung up on anyway.
    finally:
        accepted.close()


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    said = error.strerror if isinstance(error, OSError) else ""
    return said or str(error) or type(error).__name__
