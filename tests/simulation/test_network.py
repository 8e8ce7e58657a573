"""The simulated network keeps TCP's promises, and breaks everything else on demand."""

from __future__ import annotations

from ekiden.limits import NS
from ekiden.machine import Connected, DialFailed, Disconnected, Garbled, Received
from ekiden.simulation.network import Network
from ekiden.simulation.world import Universe
from ekiden.wire import messages
from ekiden.wire.frames import encode_frame


class Peer:
    """A process that only remembers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 1
        self.up = True
        self.events: list[object] = []

    def post(self, event: object) -> None:
        self.events.append(event)

    @property
    def conn(self) -> int:
        return next(event.conn for event in self.events if isinstance(event, Connected))

    @property
    def numbers(self) -> list[int]:
        return [
            frame.msg_id
            for event in self.events
            if isinstance(event, Received)
            for frame in event.frames
        ]

    def ends(self) -> int:
        return sum(isinstance(event, Disconnected) for event in self.events)


def _pair(seed: int = 1) -> tuple[Universe, Network, Peer, Peer]:
    universe = Universe(seed)
    network = Network(universe)
    client, broker = Peer("client"), Peer("broker")
    network.listen("b:1", broker)
    network.dial(client, "b:1")
    universe.run(universe.now + NS)
    network.trust(broker, broker.conn)
    return universe, network, client, broker


def _frame(number: int) -> bytes:
    return encode_frame(messages.Attach([f"j{number}"] * 20), number)


def test_frames_arrive_whole_once_and_in_order() -> None:
    universe, network, client, broker = _pair()

    for number in range(200):
        network.send(client, client.conn, _frame(number))
    universe.run(universe.now + NS)

    assert broker.numbers == list(range(200))


def test_nobody_listens_and_the_dial_fails() -> None:
    universe, network, client, _ = _pair()
    network.deafen("b:1")
    network.dial(client, "b:1")
    universe.run(universe.now + NS)

    assert isinstance(client.events[-1], DialFailed)


def test_a_severed_connection_delivers_a_prefix_and_tells_both_ends_once() -> None:
    lengths = set()
    for seed in range(30):
        universe, network, client, broker = _pair(seed)
        for number in range(20):
            network.send(client, client.conn, _frame(number))
        network.sever(network.connections()[0])
        network.send(client, client.conn, _frame(99))
        universe.run(universe.now + NS)

        assert broker.numbers == list(range(len(broker.numbers)))
        assert (client.ends(), broker.ends()) == (1, 1)
        lengths.add(len(broker.numbers))
    assert len(lengths) > 1


def test_a_close_is_heard_by_the_closer_at_once_and_by_the_peer_after_what_was_sent() -> None:
    universe, network, client, broker = _pair()
    network.send(client, client.conn, _frame(1))
    network.close(client, client.conn)

    assert client.ends() == 1
    assert broker.ends() == 0
    universe.run(universe.now + NS)
    assert broker.numbers == [1]
    assert broker.ends() == 1


def test_a_cut_holds_bytes_back_in_one_direction_until_it_is_mended() -> None:
    universe, network, client, broker = _pair()
    network.cut("client", "broker")
    network.send(client, client.conn, _frame(1))
    network.send(broker, broker.conn, _frame(2))
    universe.run(universe.now + NS)
    assert (broker.numbers, client.numbers) == ([], [2])

    network.mend("client", "broker")
    universe.run(universe.now + NS)
    assert broker.numbers == [1]


def test_a_silent_death_is_noticed_only_by_speaking_to_a_machine_that_is_back() -> None:
    universe, network, client, broker = _pair()
    broker.up = False
    broker.incarnation += 1
    network.forget(broker, silently=True)
    network.send(client, client.conn, _frame(1))
    universe.run(universe.now + NS)
    assert client.ends() == 0

    broker.up = True
    network.send(client, client.conn, _frame(2))
    universe.run(universe.now + NS)
    assert client.ends() == 1
    assert broker.numbers == []


def test_what_was_on_its_way_to_a_dead_process_does_not_reach_its_successor() -> None:
    universe, network, client, broker = _pair()
    network.send(client, client.conn, _frame(1))
    network.forget(broker, silently=False)
    broker.incarnation += 1
    universe.run(universe.now + NS)

    assert broker.numbers == []
    assert client.ends() == 1


def test_flipped_bytes_are_noticed_and_nothing_after_them_is_handed_over() -> None:
    universe, network, client, broker = _pair()
    network.flip_rate = 1.0
    for number in range(5):
        network.send(client, client.conn, _frame(number))
    universe.run(universe.now + NS)

    assert broker.numbers == []
    assert sum(isinstance(event, Garbled) for event in broker.events) <= 1


def test_a_repeating_proxy_hands_over_whole_frames_again() -> None:
    universe, network, client, broker = _pair()
    network.repeat_rate = 0.5
    for number in range(40):
        network.send(client, client.conn, _frame(number))
    universe.run(universe.now + NS)

    assert sorted(set(broker.numbers)) == list(range(40))
    assert len(broker.numbers) > 40


def test_two_universes_of_one_seed_leave_the_same_trace() -> None:
    traces = set()
    for _ in range(2):
        universe, network, client, _ = _pair(7)
        network.slowness_ns = NS
        for number in range(20):
            network.send(client, client.conn, _frame(number))
        universe.run(universe.now + 5 * NS)
        traces.add(universe.trace)

    assert len(traces) == 1
