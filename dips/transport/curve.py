"""CURVE on the data flow: a lane has a key pair of its own, a rank makes one for each transfer.

The lanes' public key travels in Register and Grant, so a rank knows whom it speaks to and nobody between them can read
or alter a frame. Who the rank is, is not asked by a key: that needs a list of keys that may
(docs/architecture.md#security). A lane with a key refuses plain peers in the handshake. Keys here are Z85, 40
characters; without one all is plain.
"""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.auth

from dips.dataclass import dataclass
from dips.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Public and secret half, Z85."""

    public: str
    secret: str

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Take only peers that know our public key; before bind."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._set_own_keys(socket)

    def speak_to(self, socket: zmq.Socket[bytes], server: str) -> None:
        """Speak to the lane whose public key this is, and to no other; before connect."""
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
        self._set_own_keys(socket)

    def _set_own_keys(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)


def new_keys() -> KeyPair:
    """A pair that nobody had before."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def load_keys(path: Path) -> KeyPair:
    """Read a ZeroMQ certificate with both halves (`zmq.auth.create_certificates`); ConfigError if it is none."""
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"curve_key: {path}: expected a ZeroMQ certificate: {error}") from error
    if secret is None:
        raise ConfigError(f"curve_key: {path}: it holds no secret key; name the file that ends in .key_secret")
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"curve_key: {path}: its public key does not belong to its secret key")
    return KeyPair(public.decode(), secret.decode())
