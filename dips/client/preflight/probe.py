"""Measurement of one lane of a slave by PROBEs: round trip, and rate in both directions, within bounds.

Encrypted lanes answer a key that the master has announced to them. Each measurement uses one temporary DEALER socket,
moves at most `most_bytes` and takes at most `seconds` in each direction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import zmq

from dips.errors import UnavailableSlave
from dips.transport.lane import HANDSHAKE_MS
from dips.transport.seal import Greeter, KeyPair
from dips.wire.frame import (
    CHECKSUMS,
    FRAME_LIMIT,
    MESSAGE_LIMIT,
    BadFrame,
    Buffer,
    Header,
    Kind,
    encode_probe,
    make_message,
    run_id,
    unpack_header,
)

ANSWER_S = 5.0  # timeout of one probe's answer
ROUND_TRIPS = 5  # probes of which the shortest counts
IN_FLIGHT = 16  # unanswered probes of a measured transfer: 16 MiB, enough for 1 Gbit/s at 130 ms
PADDING = MESSAGE_LIMIT - 64  # room for what msgpack adds
STREAM = 0x50524F42  # stream number of all probes; no transfer is looked up for it


T = TypeVar("T")
Keys = tuple[KeyPair, str]  # our key pair and the lane's public key


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The measured round trip to one lane, and the rates in bytes per second."""

    round_trip_s: float
    up: float
    down: float


class Prober:
    """A connection to one lane for probes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, run: str, keys: Keys | None) -> None:
        self._address, self._run = address, run_id(run)
        self._socket = context.socket(zmq.DEALER)
        for option, value in {
            zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 0, zmq.IMMEDIATE: 1, zmq.IPV6: 1, zmq.RECONNECT_IVL: -1,
            zmq.MAXMSGSIZE: FRAME_LIMIT, zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        }.items():  # fmt: skip
            self._socket.setsockopt(option, value)
        self._keys, self._guard = keys, CHECKSUMS
        if keys is not None:
            keys[0].speak_to(self._socket, keys[1])
        self._socket.connect(f"tcp://{address}")

    def greet(self) -> None:
        """Begin the connection, before all probes. Raises UnavailableSlave if a lane does not answer as it should."""
        if self._keys is not None:
            greeter = Greeter(*self._keys)
            self._send_parts(make_message(Kind.GREETING, self._run, STREAM, greeter.greeting))
            self._guard = self._await_frame(greeter.begin_session)

    def round_trip(self) -> float:
        """Return the shortest round trip of several probes in seconds. Raises UnavailableSlave if one is not
        answered.
        """
        times = []
        for _ in range(ROUND_TRIPS):
            begun = time.monotonic()
            self._send_probe(0)
            times.append(self._await_answer(0) - begun)
        return min(times)

    def measure_rate(self, answer: int, padding: int, most_bytes: int, seconds: float) -> float:
        """Return the bytes per second when each probe carries `padding` bytes and asks for `answer` bytes back."""
        each = max(answer, padding)
        begun, flying, moved, asked = time.monotonic(), 0, 0, 0
        while True:
            while flying < IN_FLIGHT and asked < most_bytes and time.monotonic() - begun < seconds:
                self._send_probe(answer, padding)
                flying, asked = flying + 1, asked + each
            if flying == 0:
                return moved / max(time.monotonic() - begun, 1e-9)
            self._await_answer(answer)
            flying, moved = flying - 1, moved + each

    def close(self) -> None:
        self._socket.close(linger=0)

    def _send_probe(self, answer: int, padding: int = 0) -> None:
        body = encode_probe(answer, padding)
        self._send_parts(self._guard.seal_frame(Header(Kind.PROBE, self._run, STREAM, len(body), 0), body))

    def _send_parts(self, parts: tuple[bytes, Buffer]) -> None:
        if not self._socket.poll(int(ANSWER_S * 1000), zmq.POLLOUT):
            raise UnavailableSlave(f"{self._address}: no connection within {ANSWER_S:g} s")
        self._socket.send_multipart(parts, zmq.NOBLOCK)

    def _await_answer(self, expected: int) -> float:
        """Return when an answer of so many bytes came, by the monotonic clock."""
        header = self._await_frame(self._open_answer)
        if (header.kind, header.length) != (Kind.PROBE, expected):
            raise UnavailableSlave(f"{self._address}: expected {expected} bytes, got {header.length}")
        return time.monotonic()

    def _open_answer(self, header: Header, body: Buffer) -> Header:
        self._guard.open_frame(header, body)
        return header

    def _await_frame(self, use: Callable[[Header, Buffer], T]) -> T:
        """Return what `use` makes of the next frame; UnavailableSlave if none comes, or a wrong one."""
        if not self._socket.poll(int(ANSWER_S * 1000), zmq.POLLIN):
            raise UnavailableSlave(
                f"{self._address}: a probe was not answered within {ANSWER_S:g} s: another run's slave, an older "
                "release, or no Di-PS at all"
            )
        parts = self._socket.recv_multipart(copy=False)
        try:
            if len(parts) != 2:
                raise BadFrame("parts", f"{len(parts)} parts came")
            body, tag_bytes = parts[1].buffer, self._guard.tag_bytes
            return use(unpack_header(parts[0].buffer, self._run, len(body), MESSAGE_LIMIT, tag_bytes), body)
        except BadFrame as bad:
            raise UnavailableSlave(f"{self._address}: what answers is no slave of this run: {bad}") from bad


@contextmanager
def _connect(address: str, run: str, keys: Keys | None) -> Iterator[Prober]:
    with zmq.Context(io_threads=1) as context:
        prober = Prober(context, address, run, keys)
        try:
            prober.greet()
            yield prober
        finally:
            prober.close()


def measure_lane(address: str, run: str, keys: Keys | None, most_bytes: int, seconds: float) -> ProbeResult:
    """Measure the lane at `address`; `keys` None: it is plain. Raises UnavailableSlave with the step that failed."""
    with _connect(address, run, keys) as prober:
        trip = prober.round_trip()
        up = prober.measure_rate(0, PADDING, most_bytes, seconds)
        return ProbeResult(trip, up, prober.measure_rate(PADDING, 0, most_bytes, seconds))


def measure_round_trip(address: str, run: str, keys: Keys | None) -> float:
    """Return the round trip to a lane without measuring rates; raises as `measure_lane` does."""
    with _connect(address, run, keys) as prober:
        return prober.round_trip()
