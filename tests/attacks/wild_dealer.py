"""A ZeroMQ peer of a lane that sends what it likes."""

from __future__ import annotations

import zmq

from dips.ids import GENESIS
from dips.transport.curve import new_keys
from dips.wire.frame import Kind, Range, StreamName, encode_hello, make_message, run_id
from tests.attacks.deployment import RUN


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


def hello(slave: str = "ps0", run: str = RUN, stream: int | None = None, wire_run: str = RUN) -> tuple[bytes, bytes]:
    name = StreamName(run, "pull", "west", 1, 9999, 0, slave, 1, 1, str(GENESIS))
    body = encode_hello(name, (Range(0, 0, 0, 1),))
    return make_message(Kind.HELLO, run_id(wire_run), name.stream_id if stream is None else stream, body)
