"""The seal of messages between agent and rank across hosts: both hold the job's token, which is never sent.

Each end sends a nonce and proves the token over both nonces; then every message has a tag made with a key of this
connection alone, its direction and its number, so that messages cannot be altered, dropped, repeated or inserted.
Messages are signed but not encrypted: progress, addresses and public keys. Pure except for the nonces.

    agent → rank   MAGIC, nonce              GREETING bytes
    rank → agent   nonce, proof              ANSWER bytes
    agent → rank   proof                     PROOF bytes
    both           message, tag              TAG bytes after each message
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from dips.errors import Denied, RemoteProtocolError

MAGIC = b"dips-agent/1"
NONCE = 32
PROOF = TAG = hashlib.sha256().digest_size
GREETING, ANSWER = len(MAGIC) + NONCE, NONCE + PROOF


class Seal:
    """Signs the frames that this end sends and checks those that it receives."""

    def __init__(self, key: bytes, sends: bytes, receives: bytes) -> None:
        self._key, self._names = key, (sends, receives)
        self._sent = self._received = 0

    def tag_frame(self, frame: bytes) -> bytes:
        """Return the tag to be sent after the next frame."""
        self._sent += 1
        return _compute_mac(self._key, self._names[0], self._sent.to_bytes(8, "big"), frame)

    def check_frame(self, frame: bytes, tag: bytes) -> None:
        """Raise RemoteProtocolError unless this is the next frame of the other end."""
        self._received += 1
        if not hmac.compare_digest(
            tag, _compute_mac(self._key, self._names[1], self._received.to_bytes(8, "big"), frame)
        ):
            raise RemoteProtocolError("a message on the line between rank and agent bears a wrong tag: it was altered")


class TokenServer:
    """The agent's side of the handshake."""

    def __init__(self, token: bytes) -> None:
        self._token, self._nonce = token, secrets.token_bytes(NONCE)
        self.greeting = MAGIC + self._nonce

    def admit_rank(self, answer: bytes) -> tuple[bytes, Seal]:
        """Return the last message of the handshake, and the seal. Raises Denied if the rank does not know the token."""
        both = self._nonce + answer[:NONCE]
        if not hmac.compare_digest(answer[NONCE:], _compute_mac(self._token, b"rank", both)):
            raise Denied("whoever dialled the agent does not know the job's token")
        return _compute_mac(self._token, b"agent", both), Seal(
            _compute_mac(self._token, b"key", both), b"agent", b"rank"
        )


class TokenClient:
    """The rank's side of the handshake."""

    def __init__(self, token: bytes, greeting: bytes) -> None:
        """Answer the agent's greeting. Raises RemoteProtocolError if it is not an agent's greeting of this version."""
        if not greeting.startswith(MAGIC):
            raise RemoteProtocolError(f"expected a greeting that begins with {MAGIC!r}, got {greeting[:16]!r}")
        nonce = secrets.token_bytes(NONCE)
        self._token, self._both = token, greeting[len(MAGIC) :] + nonce
        self.answer = nonce + _compute_mac(token, b"rank", self._both)

    def accept_proof(self, proof: bytes) -> Seal:
        """Return the seal. Raises Denied if the peer is not our agent."""
        if not hmac.compare_digest(proof, _compute_mac(self._token, b"agent", self._both)):
            raise Denied("whoever answers does not know the job's token: it is not this job's agent")
        return Seal(_compute_mac(self._token, b"key", self._both), b"rank", b"agent")


def _compute_mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC over parts of fixed lengths, except for the last."""
    return hmac.digest(key, b"\0".join(parts), "sha256")


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect within half a minute that the other host is gone, also when nothing is sent."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),  # s
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),  # s
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # ms, of what was sent and not acknowledged
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(level, option, value)
