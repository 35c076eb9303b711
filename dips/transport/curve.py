"""CURVE on the data flow: a slave creates a key pair for its lanes when it starts, a rank one for each attempt.

They are in memory only. The lanes' public key is sent in Register and Grant, so a rank knows its server, and frames can
be neither read nor altered on the way; the ranks' keys are sent in RequestPush and RequestPull and on to the slaves, so
a lane knows its clients (zap.py). All of these messages use mutual TLS. A lane with a key refuses peers without
encryption. Keys here are in Z85, 40 characters; without a key a lane is not encrypted.
"""

from __future__ import annotations

from dataclasses import field

import zmq

from dips.dataclass import dataclass

KEY_CHARS = 40  # characters of a key


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public and a secret key, in Z85."""

    public: str
    secret: str = field(repr=False)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Accept only peers that know our public key; call before bind."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._set_own_keys(socket)

    def speak_to(self, socket: zmq.Socket[bytes], server: str) -> None:
        """Connect only to the lane with this public key; call before connect."""
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
        self._set_own_keys(socket)

    def _set_own_keys(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)


def new_keys() -> KeyPair:
    """Return a new key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())
