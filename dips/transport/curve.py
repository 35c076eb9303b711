"""CURVE on the data flow: the key pairs of slaves' lanes and of ranks, and which keys a lane admits (ZAP)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import zmq
from zmq.utils import z85

from dips.dataclass import dataclass

# ---- curve ----------------------------------------------------------------------------------------------------------
# CURVE on the data flow: a slave creates a key pair for its lanes when it starts, a rank one for each attempt.
#
# They are in memory only. The lanes' public key is sent in Register and Grant, so a rank knows its server, and frames
# can be neither read nor altered on the way; the ranks' keys are sent in RequestPush and RequestPull and on to the
# slaves, so a lane knows its clients. All of these messages use mutual TLS. A lane with a key refuses peers
# without encryption. Keys here are in Z85, 40 characters; without a key a lane is not encrypted.


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


# ---- zap ------------------------------------------------------------------------------------------------------------
# Decides for each connection to an encrypted lane whether its key is admitted (ZAP, ZeroMQ RFC 27).
#
# libzmq sends the request through its context to one known endpoint and holds the handshake open until it is answered.
# The answer's User-Id is the key: every later frame of that connection has it, and no other's does. A property of that
# name that a peer sends itself has no effect: libzmq sets ZAP's first and replaces none. Used by one thread, the
# lane's.


ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
USER_ID = "User-Id"  # libzmq's name of it in a frame's metadata
PARTS = 7  # version, request, domain, address, identity, mechanism, key
KEY_BYTES = 32

Admit = Callable[[str], bool]


class ZapHandler:
    """The answering side, in one context; must be made before the lane is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admit: Admit) -> None:
        """`admit` decides on a public key, in Z85, and counts its refusals."""
        self._admit = admit
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def answer_handshakes(self) -> None:
        """Answer all waiting requests; returns at once."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._decide(parts))

    def _decide(self, parts: list[bytes]) -> list[bytes]:
        request = parts[1] if len(parts) > 1 else b""
        if len(parts) == PARTS and parts[0] == VERSION and parts[5] == b"CURVE" and len(parts[6]) == KEY_BYTES:
            key: bytes = z85.encode(parts[6])
            if self._admit(key.decode()):
                return [VERSION, request, b"200", b"OK", key, b""]
        return [VERSION, request, b"400", b"no open push or pull has this key", b"", b""]

    def close(self) -> None:
        self.socket.close(linger=0)
