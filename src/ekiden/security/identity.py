"""Who a peer is, and how it proves so without sending the key.

Both sides know one key. Each draws a nonce, and each proves the key by an HMAC over both nonces and
the identity that is claimed. The two directions have different labels, so that a proof cannot be
played back to the side that made it; fresh nonces on both sides stop one from being used again.

This proves who opened the connection. It does not hide or seal what follows: on a network that is
not trusted, TLS does that.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from msgspec import Struct

PEER_LABEL: Final = b"ekiden 1 peer proves"
BROKER_LABEL: Final = b"ekiden 1 broker proves"

KEY_BYTES: Final = 32

# Enough that no two connections of a key ever draw the same one.
NONCE_BYTES_MIN: Final = 16
NONCE_BYTES_MAX: Final = 64


class Identity(Struct, frozen=True):
    """Who speaks on a connection: what they are, their name, and which life of theirs this is."""

    role: str
    id: str
    session: str


def proof(
    key: bytes,
    label: bytes,
    role: str,
    id: str,
    session: str,
    peer_nonce: bytes,
    broker_nonce: bytes,
) -> bytes:
    """32 bytes that only a holder of `key` can make for this conversation."""
    assert key, "an empty key would let everybody in"
    # Every part is preceded by its length: no two different claims give the same text.
    parts = (label, role.encode(), id.encode(), session.encode(), peer_nonce, broker_nonce)
    text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(key, text, hashlib.sha256).digest()


def proves(mac: bytes, expected: bytes) -> bool:
    """Whether `mac` is the expected proof, in a time that tells nothing about where they differ."""
    return hmac.compare_digest(mac, expected)
