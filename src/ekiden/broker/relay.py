"""Publish and subscribe: never journaled, may be lost, bounded so as not to starve the ledger."""

from __future__ import annotations

from collections import deque

from ekiden import limits
from ekiden.broker.peers import Peer
from ekiden.core.subjects import SubjectTrie, check_pattern, check_subject
from ekiden.errors import BadRequest, TooLarge
from ekiden.wire import messages as m

# Published messages waiting for their share of a turn. Beyond it the oldest are dropped: a relay
# message may be lost, a settlement may not wait for it.
BACKLOG_MAX = 20_000


class Relay:
    """Who listens to what, and what still has to be passed on."""

    def __init__(self) -> None:
        self._trie: SubjectTrie[tuple[int, int]] = SubjectTrie()
        self._backlog: deque[m.Publish] = deque()
        self.published = 0
        self.delivered = 0
        self.dropped = 0

    @property
    def waiting(self) -> bool:
        """Whether there is more to pass on in another turn."""
        return bool(self._backlog)

    def subscribe(self, peer: Peer, message: m.Subscribe) -> None:
        """From now on. The same sid again replaces the pattern."""
        check_pattern(message.pattern)
        self.unsubscribe(peer, message.sid)
        if len(peer.subscriptions) >= limits.SUBSCRIPTIONS_PER_CONNECTION:
            raise BadRequest(
                f"over {limits.SUBSCRIPTIONS_PER_CONNECTION:,} subscriptions on one connection",
                remedy="use a pattern with wildcards",
            )
        peer.subscriptions[message.sid] = message.pattern
        self._trie.add(message.pattern, (peer.conn, message.sid))

    def unsubscribe(self, peer: Peer, sid: int) -> None:
        """No more for this sid; unknown ones are no error."""
        pattern = peer.subscriptions.pop(sid, None)
        if pattern is not None:
            self._trie.remove(pattern, (peer.conn, sid))

    def leave(self, peer: Peer) -> None:
        """The connection is gone."""
        for sid in list(peer.subscriptions):
            self.unsubscribe(peer, sid)

    def publish(self, message: m.Publish) -> None:
        """Take it in; `pass_on` delivers it."""
        check_subject(message.subject)
        if len(message.payload) > limits.PAYLOAD_BYTES_MAX:
            raise TooLarge(
                f"a message of {len(message.payload):,} bytes",
                remedy=f"publish up to {limits.PAYLOAD_BYTES_MAX:,} bytes at a time",
            )
        self.published += 1
        self._backlog.append(message)
        if len(self._backlog) > BACKLOG_MAX:
            self._backlog.popleft()
            self.dropped += 1

    def pass_on(self, peers: dict[int, Peer]) -> None:
        """This turn's share, to every subscriber that is still there."""
        budget = limits.RELAY_MESSAGES_PER_TURN
        while self._backlog and budget > 0:
            message = self._backlog.popleft()
            budget -= 1
            for conn, sid in self._trie.match(message.subject):
                peer = peers.get(conn)
                budget -= 1
                if peer is None or peer.closing:
                    continue
                self.delivered += 1
                peer.send(m.Delivery(sid, message.subject, message.payload))
                if peer.congested:
                    # Slow readers are dropped, so that they cost neither memory nor the others.
                    peer.relayed += len(message.payload) + 64
                    if peer.relayed > limits.RELAY_OUTBOX_BYTES_MAX:
                        peer.close()
