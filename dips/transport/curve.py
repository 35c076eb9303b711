"""CURVE on the data flow: a slave makes a key pair for its lanes when it starts, a rank one for each attempt.

They are in memory only. The lanes' public key travels in Register and Grant, so a rank knows whom it speaks to and
nobody between them can read or alter a frame; the ranks' travel in RequestPush and RequestPull and on to the slaves,
so a lane knows who speaks (zap.py). All of that goes by mutual TLS. A lane with a key refuses plain peers. Keys here
are Z85, 40 characters; without one all is plain.
"""

from __future__ import annotations

from dataclasses import field

import zmq

from dips.dataclass import dataclass

KEY_CHARS = 40  # of a key


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Public and secret half, Z85."""

    public: str
    secret: str = field(repr=False)

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
