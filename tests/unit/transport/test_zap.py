"""What a lane answers to libzmq's question about a key, and what it does with a question that is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from dips.transport.seal import ENDPOINT, KEY_BYTES, ZapHandler, new_keys

LANE, OURS, THEIRS = new_keys(), new_keys(), new_keys()
USER, PROOF = OURS.public.encode(), OURS.prove_to(LANE.public)
ASKED = [b"1.0", b"7", b"", b"10.0.0.9", b"", b"PLAIN", USER, PROOF]


class HandshakeAsker:
    """libzmq's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.seen: list[str] = []
        self.handler = ZapHandler(context, LANE, self._admit)
        self.socket = context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(ENDPOINT)

    def _admit(self, key: str) -> bool:
        self.seen.append(key)
        return key in (OURS.public, "0" * len(OURS.public))  # of low order, so everybody has its secret

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
        assert asker.ask(ASKED) == [b"1.0", b"7", b"200", b"OK", USER, b""]
    assert asker.seen == [OURS.public, OURS.public]


@pytest.mark.parametrize(
    "parts",
    [
        [*ASKED[:-2], THEIRS.public.encode(), THEIRS.prove_to(LANE.public)],
        [*ASKED[:-1], THEIRS.prove_to(LANE.public)],
        [*ASKED[:-1], OURS.prove_to(THEIRS.public)],
        [*ASKED[:-1], PROOF[:-1]],
        [*ASKED[:-1], b""],
        [*ASKED[:-2], USER[:-1], PROOF],
        [*ASKED[:-2], b"\xff" * 40, PROOF],
        [*ASKED[:-2], b"0" * 40, bytes(KEY_BYTES)],
        [*ASKED[:-3], b"NULL"],
        [*ASKED[:-3], b"CURVE", USER, PROOF],
        [b"2.0", *ASKED[1:]],
        [*ASKED, b"more"],
        [b"1.0"],
    ],
    ids=["stranger", "no secret", "another lane", "short", "empty", "short key", "no text", "low order", "null",
         "mechanism", "version", "more", "less"],
)  # fmt: skip
def test_all_else_is_refused(asker: HandshakeAsker, parts: list[bytes]) -> None:
    """Another key, no proof, another mechanism, or no question: 400 without a user, and the next one is answered."""
    version, _, status, text, user, metadata = asker.ask(parts)
    assert (version, status, user, metadata) == (b"1.0", b"400", b"", b"") and text
    assert asker.ask(ASKED)[2] == b"200"
