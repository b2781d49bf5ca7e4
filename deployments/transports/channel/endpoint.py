"""Addresses of a replica, and the handshake that proves both sides know the replica's secret.

    HELLO(version, nonce c) -> CHALLENGE(nonce s, mac of the replica) -> PROOF(mac of the client)

The secret reaches the client with the replica's metadata, over Ray's own authenticated calls.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from deployments.transports.channel.frames import WIRE_VERSION, ChannelError

METADATA_KEY = "channel"
HANDSHAKE_TIMEOUT_S = 5.0
NONCE_BYTES = 32

_HELLO = struct.Struct(f"<H{NONCE_BYTES}s")


class Endpoint(NamedTuple):
    """Addresses of one replica. Its Unix socket can be reached only from the same node."""

    wire: int
    node: str
    unix: str  # path of the Unix socket; empty: none
    host: str
    port: int
    secret: str  # hexadecimal

    def to_metadata(self) -> dict[str, Any]:
        return {METADATA_KEY: self._asdict()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self | None:
        """Return the endpoint; None for a replica without a channel or with another version."""
        fields = metadata.get(METADATA_KEY)
        if not isinstance(fields, dict) or fields.get("wire") != WIRE_VERSION:
            return None
        return cls(**{name: fields[name] for name in cls._fields})

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.secret)


def encode_hello(nonce: bytes) -> bytes:
    return _HELLO.pack(WIRE_VERSION, nonce)


def decode_hello(body: bytes) -> bytes:
    """Return the nonce. Raises ChannelError for another length or version."""
    if len(body) != _HELLO.size:
        raise ChannelError(f"a hello of {len(body)} bytes")
    version, nonce = _HELLO.unpack(body)
    if version != WIRE_VERSION:
        raise ChannelError(f"the peer has version {version}; this side has {WIRE_VERSION}")
    return bytes(nonce)


def sign(key: bytes, role: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return a proof that one side knows `key`.

    The proof depends on the role, so that a peer cannot send the proof of the other side back.
    """
    return hmac.digest(key, role.encode() + client_nonce + server_nonce, hashlib.sha256)


def check_signature(actual: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(actual, expected):
        raise ChannelError("the peer does not know the secret of this replica")
