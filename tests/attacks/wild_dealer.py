"""ZeroMQ peers of a lane that send what they like."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from dips.ids import GENESIS
from dips.transport.seal import Greeter, KeyPair, Session, new_keys
from dips.wire.frame import (
    Header,
    Kind,
    Range,
    StreamName,
    encode_hello,
    make_message,
    run_id,
    unpack_header,
)
from tests.attacks.deployment import RUN

WITHIN_MS = 20_000  # what is to happen at once, on a loaded machine


class WildDealer:
    """Ended by `with`."""

    def __init__(self, address: tuple[str, int], keys: bool = False) -> None:
        """`keys`: some of its own; it does not know the lane's."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if keys:
            new_keys().speak_to(self.socket, new_keys().public)
        self.socket.connect(f"tcp://{address[0]}:{address[1]}")

    def __enter__(self) -> WildDealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()

    def answers_to(self, *parts: bytes) -> list[bytes]:
        """What comes back within half a second; empty for silence, and if the lane has hung up before."""
        if not self.socket.poll(500, zmq.POLLOUT):
            return []
        self.socket.send_multipart(parts)
        return self.socket.recv_multipart() if self.socket.poll(500) else []


class SealedDealer:
    """A peer with the secret of a key that a lane may admit; it seals what it likes. Ended by `with`."""

    def __init__(self, address: str, run: str, keys: KeyPair, server: str, route: bytes = b"") -> None:
        self._run, self._keys, self._server = run_id(run), keys, server
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in {zmq.LINGER: 0, zmq.SNDTIMEO: WITHIN_MS, zmq.RCVTIMEO: WITHIN_MS}.items():
            self.socket.setsockopt(option, value)
        if route:
            self.socket.setsockopt(zmq.ROUTING_ID, route)
        keys.speak_to(self.socket, server)
        self.socket.connect(f"tcp://{address}")
        self.greeter = Greeter(keys, server)
        self.session: Session | None = None

    def __enter__(self) -> SealedDealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()

    def greet(self) -> SealedDealer:
        """Begin the session."""
        self.send(make_message(Kind.GREETING, self._run, 7, self.greeter.greeting))
        header, body = self.socket.recv_multipart()
        self.session = self.greeter.begin_session(unpack_header(header, self._run, len(body), 1 << 20), body)
        return self

    def send(self, parts: Sequence[bytes]) -> None:
        self.socket.send_multipart(parts)

    def seal_message(self, kind: Kind, stream: int, body: bytes) -> tuple[bytes, bytes]:
        """Both parts of the next message."""
        return self.seal(Header(kind, self._run, stream, len(body), 0), body)

    def seal(self, header: Header, body: bytes) -> tuple[bytes, bytes]:
        assert self.session is not None
        spelled, sealed = self.session.seal_frame(header, body)
        return spelled, bytes(sealed)

    def receive(self) -> tuple[Header, bytes]:
        """The next frame, opened; BadFrame if it is not sealed for this connection."""
        header, body = self.socket.recv_multipart()
        return self.open(header, body)

    def open(self, part: bytes, body: bytes) -> tuple[Header, bytes]:
        assert self.session is not None
        header = unpack_header(part, self._run, len(body), 1 << 20, self.session.tag_bytes)
        return header, bytes(self.session.open_frame(header, body))


def hello(slave: str = "ps0", run: str = RUN, stream: int | None = None, wire_run: str = RUN) -> tuple[bytes, bytes]:
    name = StreamName(run, "pull", "west", 1, 9999, 0, slave, 1, 1, str(GENESIS))
    body = encode_hello(name, (Range(0, 0, 0, 1),))
    return make_message(Kind.HELLO, run_id(wire_run), name.stream_id if stream is None else stream, body)
