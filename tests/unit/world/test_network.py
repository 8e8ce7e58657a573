"""Real loopback sockets: what a machine hears, and what peers of every kind can do to it."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from ekiden import limits
from ekiden.errors import CannotListen, WrongUsage
from ekiden.machine import (
    Close,
    Connected,
    Dial,
    DialFailed,
    Disconnected,
    Garbled,
    Log,
    Received,
    Send,
    Trust,
)
from ekiden.wire import messages
from ekiden.wire.frames import FrameReader, encode_frame, frame_of
from ekiden.wire.messages import Bye, Publish
from ekiden.wire.session import error_from, refusal_frame
from ekiden.world.loop import Driver
from ekiden.world.network import Network

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=LOOPS)
def go(request: Any) -> Any:
    """Runs a coroutine to its end on either event loop, with a deadline."""

    def run_it(main: Any) -> Any:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(asyncio.wait_for(main, 30))

    return run_it


class Echo:
    """Trusts everybody, sends every frame back, closes on Bye and on garbage with a refusal."""

    def __init__(self, *, trusting: Any = True, closes: Any = True) -> None:
        self.trusting = trusting
        self.closes = closes
        self.events: list[object] = []
        self.effects: list[object] = []
        self.changed = asyncio.Event()

    def receive(self, event: Any, now: Any) -> None:
        self.events.append(event)
        match event:
            case Connected() if self.trusting:
                self.effects.append(Trust(event.conn))
            case Received():
                for frame in event.frames:
                    data = frame_of(frame.type, bytes(frame.body), frame.msg_id, frame.corr_id)
                    self.effects.append(Send(event.conn, data))
                    if frame.type == 7:
                        self.effects.append(Close(event.conn, "bye"))
            case Garbled() if self.closes:
                self.effects.append(Send(event.conn, refusal_frame(WrongUsage(event.reason))))
                self.effects.append(Close(event.conn, "garbled"))

    def advance(self, now: Any) -> Any:
        effects, self.effects = self.effects, []
        self.changed.set()
        return effects

    def next_deadline(self) -> Any:
        return None

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the machine hears to make it true; the test's own deadline ends it."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class World:
    """A machine, its driver and its network."""

    def __init__(self, **bounds: Any) -> None:
        self.machine = Echo(
            trusting=bounds.pop("trusting", True), closes=bounds.pop("closes", True)
        )
        self.logs: list[Log] = []
        self.driver = Driver(self.machine)
        self.driver.handle(Log, self.logs.append)
        self.network = Network(self.driver, **bounds)

    async def __aenter__(self) -> Any:
        self.port = await self.network.listen("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.network.wait_closed()
        assert not self.driver.ended, "a bug ended the driver"
        assert self.network.connections == 0
        self.driver.stop()

    def order(self, effect: Any) -> None:
        self.machine.effects.append(effect)
        self.driver.wake()

    async def connect(self) -> Any:
        return Peer(*await asyncio.open_connection("127.0.0.1", self.port))


class Peer:
    """A plain peer that reads frames."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self.reader, self.writer = reader, writer
        self.frames = FrameReader(limits.FRAME_BYTES_MAX)
        self.waiting: list[Any] = []

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def frame(self) -> Any:
        while not self.waiting:
            data = await self.reader.read(1 << 18)
            if not data:
                return None
            self.waiting += self.frames.feed(data)
        return self.waiting.pop(0)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass


def test_frames_go_in_and_out_and_every_connection_begins_and_ends_once(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            peer = await world.connect()
            peer.send(encode_frame(Publish("a", b"1"), 1) + encode_frame(Publish("a", b"2"), 2))
            assert [(await peer.frame()).msg_id for _ in range(2)] == [1, 2]
            await peer.close()
            await world.machine.until(lambda: bool(world.machine.of(Disconnected)))

            (connected,) = world.machine.of(Connected)
            (gone,) = world.machine.of(Disconnected)
            assert connected.dialled == ""
            assert connected.peer.startswith("127.0.0.1:")
            assert len(connected.nonce) == 16
            assert gone == Disconnected(connected.conn, "closed by the peer")

    go(main())


def test_numbers_and_nonces_are_never_used_again(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            for turn in range(3):
                await (await world.connect()).close()
                await world.machine.until(
                    lambda n=turn: len(world.machine.of(Disconnected)) == n + 1
                )
            seen = world.machine.of(Connected)
            assert len({event.conn for event in seen}) == 3
            assert len({event.nonce for event in seen}) == 3

    go(main())


def test_a_dialled_connection_carries_its_address_and_full_frames(go: Any) -> None:
    async def main() -> None:
        async with World() as server, World(trusting=False) as caller:
            address = f"127.0.0.1:{server.port}"
            caller.order(Dial(address))
            await caller.machine.until(lambda: bool(caller.machine.of(Connected)))
            (connected,) = caller.machine.of(Connected)
            assert connected.dialled == address

            big = encode_frame(Publish("a", bytes(500_000)), 5)
            server.order(Send(server.machine.of(Connected)[0].conn, big))
            await caller.machine.until(lambda: bool(caller.machine.of(Received)))
            assert caller.machine.of(Received)[0].frames[0].msg_id == 5
            caller.order(Close(connected.conn))
            await caller.machine.until(lambda: bool(caller.machine.of(Disconnected)))

    go(main())


def test_ipv6_addresses_are_dialled_in_brackets(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            try:
                port = await world.network.listen("::1", 0)
            except WrongUsage:
                pytest.skip("no IPv6 loopback here")
            world.order(Dial(f"[::1]:{port}"))
            await world.machine.until(lambda: len(world.machine.of(Connected)) == 2)
            assert {e.dialled for e in world.machine.of(Connected)} == {"", f"[::1]:{port}"}

    go(main())


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:0", "127.0.0.1:99999", "a\x00b:7", "."])
def test_an_address_that_is_none_fails_the_dial_and_nothing_else(go: Any, address: Any) -> None:
    async def main() -> None:
        async with World() as world:
            world.order(Dial(address))
            await world.machine.until(lambda: bool(world.machine.of(DialFailed)))
            assert world.machine.of(DialFailed)[0].address == address
            assert world.machine.of(DialFailed)[0].reason

    go(main())


def test_a_closed_port_fails_the_dial_with_a_reason(go: Any) -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            async with World() as world:
                world.order(Dial(f"127.0.0.1:{port}"))
                await world.machine.until(lambda: bool(world.machine.of(DialFailed)))
                assert "refused" in world.machine.of(DialFailed)[0].reason

    go(main())


def test_listening_twice_on_a_port_is_refused_with_a_remedy(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            with pytest.raises(CannotListen, match=r"cannot listen on 127.0.0.1.*--port"):
                await world.network.listen("127.0.0.1", world.port)

    go(main())


def test_a_close_comes_after_all_that_was_sent(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            peer = await world.connect()
            await world.machine.until(lambda: bool(world.machine.of(Connected)))
            conn = world.machine.of(Connected)[0].conn
            for number in range(20):
                world.machine.effects.append(
                    Send(conn, encode_frame(Publish("a", bytes(400_000)), number))
                )
            world.order(Close(conn, "enough"))
            await world.machine.until(lambda: bool(world.machine.of(Disconnected)))
            assert world.machine.of(Disconnected) == [Disconnected(conn, "enough")]
            assert [(await peer.frame()).msg_id for _ in range(20)] == list(range(20))
            assert await peer.frame() is None
            await peer.close()

    go(main())


def test_nothing_of_a_closed_connection_is_heard_or_sent(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            peer = await world.connect()
            peer.send(encode_frame(Bye()))
            await world.machine.until(lambda: bool(world.machine.of(Disconnected)))
            heard = len(world.machine.events)
            conn = world.machine.of(Connected)[0].conn
            peer.send(encode_frame(Publish("a", b"late")))
            world.order(Send(conn, encode_frame(Publish("a", b"later"))))
            world.order(Close(conn))
            world.order(Trust(conn))
            assert (await peer.frame()).type == 7
            assert await peer.frame() is None
            await peer.close()
            await world.network.wait_closed()
            assert len(world.machine.events) == heard

    go(main())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        encode_frame(Publish("a", b"x"))[:-1] + b"!",
        struct.pack("<I", 1 << 31),
        b"\x07" + b"\xff" * 50,
    ],
    ids=["http", "damaged", "huge", "noise"],
)
def test_garbage_closes_that_connection_with_a_reason_and_touches_no_other(
    go: Any, garbage: Any
) -> None:
    async def main() -> None:
        async with World() as world:
            good, bad = await world.connect(), await world.connect()
            bad.send(garbage)
            answer = await bad.frame()
            refusal = messages.decode(answer.type, answer.body)
            assert isinstance(refusal, messages.Refusal)
            assert isinstance(error_from(refusal), WrongUsage)
            assert await bad.frame() is None

            good.send(encode_frame(Publish("a", b"x"), 8))
            assert (await good.frame()).msg_id == 8
            (garbled,) = world.machine.of(Garbled)
            assert garbled.reason in refusal.text
            await bad.close()
            await good.close()

    go(main())


def test_a_refusal_reaches_a_peer_that_is_still_sending(go: Any) -> None:
    # Closing a socket with bytes unread resets it, and a reset destroys what the peer has not read.
    async def main() -> None:
        async with World() as world:
            peer = await world.connect()
            peer.send(struct.pack("<I", 1 << 24) + bytes(3 << 20))
            answer = await peer.frame()
            assert answer is not None
            assert answer.type == messages.TYPE_OF[messages.Refusal]
            await peer.close()

    go(main())


def test_a_machine_that_ignores_garbage_loses_the_connection_all_the_same(
    go: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(limits, "LINGER_NS", 50_000_000)

    async def main() -> None:
        async with World(closes=False) as world:
            peer = await world.connect()
            peer.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
            await world.machine.until(lambda: bool(world.machine.of(Disconnected)))
            assert len(world.machine.of(Garbled)) == 1
            await peer.close()

    go(main())


def test_a_stranger_may_send_small_frames_only_until_it_is_trusted(go: Any) -> None:
    async def main() -> None:
        async with World(trusting=False) as world:
            stranger, known = await world.connect(), await world.connect()
            await world.machine.until(lambda: len(world.machine.of(Connected)) == 2)
            ports = {e.peer: e.conn for e in world.machine.of(Connected)}
            own = "127.0.0.1:{}".format(known.writer.get_extra_info("sockname")[1])
            world.order(Trust(ports[own]))
            await asyncio.sleep(0)
            large = encode_frame(Publish("a", bytes(5000)), 3)
            known.send(large)
            assert (await known.frame()).msg_id == 3
            stranger.send(large)
            answer = await stranger.frame()
            assert b"over the limit of 4,096" in answer.body
            await known.close()
            await stranger.close()

    go(main())


def test_a_slow_reader_is_dropped_while_others_go_on(go: Any) -> None:
    async def main() -> None:
        async with World(outbox_bytes_max=1 << 20) as world:
            lazy = socket.socket()
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            lazy.setblocking(False)
            await asyncio.get_running_loop().sock_connect(lazy, ("127.0.0.1", world.port))
            await world.machine.until(lambda: bool(world.machine.of(Connected)))
            conn = world.machine.of(Connected)[0].conn
            eager = await world.connect()

            piece = encode_frame(Publish("a", bytes(200_000)))
            for number in range(200):
                world.order(Send(conn, piece))
                eager.send(encode_frame(Publish("a", b"x"), number))
                assert (await eager.frame()).msg_id == number
                if world.machine.of(Disconnected):
                    break

            (gone,) = world.machine.of(Disconnected)
            assert gone.conn == conn
            assert gone.reason == "slow reader: more than 1,024 KiB waited to be read"
            eager.send(encode_frame(Publish("a", b"x"), 999))
            assert (await eager.frame()).msg_id == 999
            lazy.close()
            await eager.close()

    go(main())


def test_a_peer_that_never_reads_cannot_hold_a_closed_connection_open(
    go: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(limits, "LINGER_NS", 100_000_000)

    async def main() -> None:
        async with World() as world:
            lazy = socket.socket()
            lazy.setblocking(False)
            await asyncio.get_running_loop().sock_connect(lazy, ("127.0.0.1", world.port))
            await world.machine.until(lambda: bool(world.machine.of(Connected)))
            conn = world.machine.of(Connected)[0].conn
            world.machine.effects.append(Send(conn, bytes(30 << 20)))
            world.order(Close(conn))
            await world.machine.until(lambda: bool(world.machine.of(Disconnected)))
            await world.network.wait_closed()
            assert world.network.connections == 0
            lazy.close()

    go(main())


def test_one_connection_too_many_is_told_so_and_a_freed_place_is_given_again(go: Any) -> None:
    async def main() -> None:
        async with World(connections_max=2) as world:
            first, second = await world.connect(), await world.connect()
            await world.machine.until(lambda: len(world.machine.of(Connected)) == 2)
            third = await world.connect()
            answer = await third.frame()
            refusal = messages.decode(answer.type, answer.body)
            assert isinstance(refusal, messages.Refusal)
            assert "has 2 connections, the most it takes" in refusal.text
            assert await third.frame() is None

            await first.close()
            await world.machine.until(lambda: bool(world.machine.of(Disconnected)))
            fourth = await world.connect()
            fourth.send(encode_frame(Publish("a", b"x"), 4))
            assert (await fourth.frame()).msg_id == 4
            for peer in (second, third, fourth):
                await peer.close()

    go(main())


def take_all_descriptors() -> list[int]:
    taken = []
    while True:
        try:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
            return taken


def test_being_out_of_file_descriptors_neither_spins_nor_ends_the_listener(
    go: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(limits, "ACCEPT_PAUSE_NS", 50_000_000)

    async def main() -> None:
        async with World() as world:
            loop = asyncio.get_running_loop()
            served = await world.connect()
            waiting = [socket.socket() for _ in range(3)]
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(int(name) for name in os.listdir("/dev/fd"))
            hoard: list[int] = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
            try:
                hoard += take_all_descriptors()
                for one in waiting:
                    one.setblocking(False)
                    await loop.sock_connect(one, ("127.0.0.1", world.port))

                cpu = time.process_time()
                deadline = loop.time() + 0.5
                number = 0
                while loop.time() < deadline:
                    served.send(encode_frame(Publish("a", b"x"), number))
                    assert (await served.frame()).msg_id == number
                    number += 1
                    await asyncio.sleep(0.05)
                # A loop that spun would have burned all of the half second.
                assert time.process_time() - cpu < 0.3
                failures = [log for log in world.logs if log.event == "network.accept_failed"]
                assert 1 <= len(failures) <= 12
                assert failures[0].facts["why"] == "too many open files"
            finally:
                for number in hoard:
                    os.close(number)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

            await world.machine.until(lambda: len(world.machine.of(Connected)) == 4)
            for one in waiting:
                one.close()
            await served.close()

    go(main())


def test_stop_listening_keeps_the_connections_there_are(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            peer = await world.connect()
            await world.machine.until(lambda: bool(world.machine.of(Connected)))
            world.network.stop_listening()
            with pytest.raises(OSError):
                await world.connect()
            peer.send(encode_frame(Publish("a", b"x"), 1))
            assert (await peer.frame()).msg_id == 1
            await peer.close()

    go(main())


def test_small_writes_are_not_held_back(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            peer = await world.connect()
            await world.machine.until(lambda: bool(world.machine.of(Connected)))
            (link,) = world.network._links.values()
            raw = link.transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            await peer.close()

    go(main())


def test_a_bug_behind_a_socket_ends_the_driver(go: Any) -> None:
    class Broken(Echo):
        def receive(self, event: Any, now: Any) -> None:
            if isinstance(event, Received):
                raise AssertionError("a bug")
            super().receive(event, now)

    async def main() -> None:
        driver = Driver(Broken())
        network = Network(driver)
        port = await network.listen("127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(encode_frame(Publish("a", b"x")))
        with pytest.raises(AssertionError, match="a bug"):
            await driver.wait_ended()
        writer.close()
        await network.wait_closed()

    go(main())


def test_many_peers_at_once_each_get_their_own_answers(go: Any) -> None:
    async def main() -> None:
        async with World() as world:
            peers = [await world.connect() for _ in range(50)]
            for round_ in range(5):
                for number, peer in enumerate(peers):
                    peer.send(encode_frame(Publish("a", b"x" * number), number * 10 + round_))
                for number, peer in enumerate(peers):
                    assert (await peer.frame()).msg_id == number * 10 + round_
            for peer in peers:
                await peer.close()

    go(main())


# ------------------------------------------------------------------ cut off while being made
# A loop may never tell a protocol that it is gone if whoever made the connection was cancelled in
# the moment after it was made (uvloop closes the handle and says nothing). The network must not
# wait for such a word.


class Hasty(Echo):
    """Does something the very moment a connection is made."""

    def __init__(self, act: Callable[[Connected], object]) -> None:
        super().__init__()
        self.act = act

    def receive(self, event: Any, now: Any) -> None:
        super().receive(event, now)
        if isinstance(event, Connected):
            self.act(event)


@pytest.mark.parametrize("side", ["dialled", "accepted"])
def test_closing_in_the_moment_a_connection_is_made_comes_to_an_end(go: Any, side: str) -> None:
    async def main() -> None:
        async with World() as other:
            closing: list[asyncio.Task[None]] = []

            def close(_event: Connected) -> None:
                closing.append(asyncio.ensure_future(network.wait_closed()))

            driver = Driver(Hasty(close))
            driver.handle(Log, lambda _: None)
            network = Network(driver)
            port = await network.listen("127.0.0.1", 0)
            if side == "dialled":
                network.dial(Dial(f"127.0.0.1:{other.port}"))
            else:
                other.order(Dial(f"127.0.0.1:{port}"))

            while not closing:
                await asyncio.sleep(0)
            await asyncio.wait_for(closing[0], 5)

            assert network.connections == 0
            assert not driver.ended

    go(main())


def test_a_connection_that_is_made_as_its_time_is_up_is_told_to_be_gone(
    go: Any, monkeypatch: Any
) -> None:
    async def main() -> None:
        async with World() as other:

            def give_up(_event: Connected) -> None:
                # What the timeout of a dial does, in the same moment.
                for task in network._tasks:
                    task.cancel()

            machine = Hasty(give_up)
            driver = Driver(machine)
            network = Network(driver)
            network.dial(Dial(f"127.0.0.1:{other.port}"))
            await machine.until(lambda: bool(machine.of(Disconnected)))

            (connected,) = machine.of(Connected)
            (gone,) = machine.of(Disconnected)
            assert gone.conn == connected.conn
            await network.wait_closed()
            assert network.connections == 0

    go(main())


def test_a_connection_accepted_as_listening_stops_begins_and_ends(go: Any) -> None:
    async def main() -> None:
        async with World() as other:
            machine = Hasty(lambda _: network.stop_listening())
            driver = Driver(machine)
            network = Network(driver)
            port = await network.listen("127.0.0.1", 0)
            other.order(Dial(f"127.0.0.1:{port}"))
            await machine.until(lambda: bool(machine.of(Disconnected)))

            assert machine.of(Disconnected)[0].conn == machine.of(Connected)[0].conn
            await network.wait_closed()

    go(main())


@pytest.mark.parametrize("callback", ["send", "connection_lost", "data_received"])
def test_a_bug_in_what_a_link_reports_ends_the_driver(
    go: Any, monkeypatch: Any, callback: str
) -> None:
    """Event loops only log what a protocol raises: a process would go on, half deaf."""
    broken = {"send": "too_slow", "connection_lost": "left", "data_received": "garbled"}

    def bug(*_: Any) -> None:
        raise AssertionError("a bug")

    async def main() -> None:
        world = World(outbox_bytes_max=1 << 16)
        async with asyncio.timeout(10):
            world.port = await world.network.listen("127.0.0.1", 0)
            peer = await world.connect()
            await world.machine.until(lambda: bool(world.machine.of(Connected)))
            monkeypatch.setattr(world.network, broken[callback], bug)
            match callback:
                case "send":
                    world.order(Send(world.machine.of(Connected)[0].conn, bytes(32 << 20)))
                case "connection_lost":
                    await peer.close()
                case _:
                    peer.send(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises(AssertionError, match="a bug"):
                await world.driver.wait_ended()
            monkeypatch.undo()
            world.network.stop_listening()
            await peer.close()

    go(main())


def test_a_bug_in_a_timer_of_the_network_ends_the_driver(go: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "LINGER_NS", 10_000_000)

    async def main() -> None:
        world = World()
        world.port = await world.network.listen("127.0.0.1", 0)
        peer = await world.connect()
        await world.machine.until(lambda: bool(world.machine.of(Connected)))

        class Stuck:
            def __init__(self, transport: Any) -> None:
                self.transport = transport

            def abort(self) -> None:
                raise AssertionError("a bug")

            def __getattr__(self, name: str) -> Any:
                return getattr(self.transport, name)

        (link,) = world.network._links.values()
        stuck: Any = Stuck(link.transport)
        link.transport = stuck
        world.order(Close(link.conn))
        with pytest.raises(AssertionError, match="a bug"):
            await asyncio.wait_for(world.driver.wait_ended(), 10)
        await peer.close()
        await world.network.wait_closed()

    go(main())
