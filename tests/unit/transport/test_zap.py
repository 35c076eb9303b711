"""What a lane answers to libzmq's question about a key, and what it does with a question that is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85

from dips.transport.curve import ENDPOINT, KEY_BYTES, ZapHandler, new_keys

OURS = new_keys().public
RAW: bytes = z85.decode(OURS.encode())
ASKED = [b"1.0", b"7", b"", b"10.0.0.9", b"", b"CURVE", RAW]


class HandshakeAsker:
    """libzmq's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.seen: list[str] = []
        self.handler = ZapHandler(context, self._admit)
        self.socket = context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(ENDPOINT)

    def _admit(self, key: str) -> bool:
        self.seen.append(key)
        return key == OURS

    def ask(self, parts: list[bytes]) -> list[bytes]:
        self.socket.send_multipart(parts)
        while not self.socket.poll(1):
            self.handler.answer_handshakes()
        return self.socket.recv_multipart()


@pytest.fixture(name="asker")
def made_asker() -> Iterator[HandshakeAsker]:
    with zmq.Context() as context:
        asker = HandshakeAsker(context)
        yield asker
        asker.socket.close()
        asker.handler.close()


def test_an_open_key_becomes_the_connections_user(asker: HandshakeAsker) -> None:
    """The User-Id is the key as the orders spell it; what is asked later has the same answer."""
    for _ in range(2):
        assert asker.ask(ASKED) == [b"1.0", b"7", b"200", b"OK", OURS.encode(), b""]
    assert asker.seen == [OURS, OURS]


@pytest.mark.parametrize(
    "parts",
    [
        [*ASKED[:-1], bytes(KEY_BYTES)],
        [*ASKED[:-1], RAW[:-1]],
        [*ASKED[:-1], b""],
        [*ASKED[:-2], b"NULL", RAW],
        [*ASKED[:-2], b"PLAIN", b"user", b"password"],
        [b"2.0", *ASKED[1:]],
        [*ASKED, b"more"],
        [b"1.0"],
    ],
    ids=["stranger", "short", "empty", "null", "plain", "version", "more", "less"],
)
def test_all_else_is_refused(asker: HandshakeAsker, parts: list[bytes]) -> None:
    """Another key, another mechanism, or no question at all: 400 without a user, and the next one is answered."""
    version, _, status, text, user, metadata = asker.ask(parts)
    assert (version, status, user, metadata) == (b"1.0", b"400", b"", b"") and text
    assert asker.ask(ASKED)[2] == b"200"
