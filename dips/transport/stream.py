"""A rank's end of one stream: a DEALER socket that is closed when it breaks and opened anew with the next epoch.

Reconnecting sockets replay their queue to whichever process answers, and a refused handshake never recovers
(docs/rationale.md#9, #33). So a socket lives as long as its connection: the monitor, or silence while something is
owed, ends it, and after a pause with jitter a new one says HELLO with epoch + 1. The owner interprets the frames. One
thread owns a stream. Time is an argument.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from dips.dataclass import dataclass
from dips.transport.backoff import Backoff
from dips.transport.lane import HANDSHAKE_MS, LAST, MORE, RCVHWM, receive_parts
from dips.transport.seal import Greeter, KeyPair
from dips.wire.frame import (
    CHECKSUMS,
    FRAME_LIMIT,
    MESSAGE_LIMIT,
    BadFrame,
    Buffer,
    FrameGuard,
    Header,
    Kind,
    Range,
    StreamName,
    encode_hello,
    encode_ready,
    make_message,
    run_id,
    unpack_header,
)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
LOOK_S = 0.01  # interval of checks of the connection's health; a break also ends the owner's poll
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_OPTIONS: dict[int, Any] = {
    zmq.SNDHWM: 0,  # everything queued was asked for
    zmq.RCVHWM: RCVHWM,
    zmq.MAXMSGSIZE: FRAME_LIMIT,
    zmq.LINGER: 0,
    zmq.IMMEDIATE: 1,
    zmq.RECONNECT_IVL: -1,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    zmq.HEARTBEAT_IVL: 10_000,
    zmq.HEARTBEAT_TIMEOUT: 40_000,
    zmq.TCP_MAXRT: 30_000,
    zmq.IPV6: 1,
}


@dataclass(frozen=True, slots=True)
class Arrived:
    """One received frame; its body is not verified yet."""

    header: Header
    body: memoryview
    guard: FrameGuard  # of its connection


class Stream:
    """Frames to and from one lane of one slave, over as many connections as it takes."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        name: StreamName,
        pieces: tuple[Range, ...],
        stall_s: float,
        rng: random.Random,
        keys: tuple[KeyPair, str] | None = None,
        ready: Callable[[], int] | None = None,
    ) -> None:
        """Create the stream without connecting.

        keys   our pair and the lane's public key; None: it is not encrypted
        ready  returns how many of `pieces` the slave may ask for now; None: all
        """
        self._keys, self._ready, self._told_ready = keys, ready, 0
        self.address = address
        self._name_as(name)
        self.why = "it was not tried yet"  # reason of the last broken connection
        self.welcomed = False
        self.waits = True  # something is owed to us: silence counts
        self._context = context
        self._pieces = pieces
        self._stall_s = stall_s
        self._run = run_id(name.run)
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, rng)
        self._again_at = 0.0
        self._moved_at = 0.0
        self._look_at = 0.0
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._greeter: Greeter | None = None  # of an encrypted connection, until the lane's greeting is here
        self.guard: FrameGuard = CHECKSUMS
        self._outbox: deque[tuple[bytes, Buffer]] = deque()
        self._held: deque[zmq.MessageTracker] = deque()

    def post_frame(self, header: bytes, body: Buffer) -> None:
        """Send a frame as soon as the connection takes it; the body is not copied."""
        self._outbox.append((header, body))

    def send_message(self, kind: Kind, body: bytes) -> None:
        """Send a message."""
        self.post_frame(*self.guard.seal_frame(Header(kind, self._run, self.id, len(body), 0), body))

    def chunk_header(self, chunk: Range, stream: int) -> Header:
        """Return the header of a CHUNK of this stream, as it is called in one of its epochs."""
        place = chunk.layer, chunk.param, chunk.offset
        return Header(Kind.CHUNK, self._run, stream, chunk.nbytes, 0, *place, chunk.dtype)

    def register_poll(self, poller: zmq.Poller) -> None:
        """Register the stream's sockets with the owner's poll."""
        if self._socket is not None:
            assert self._monitor is not None, "each socket has its monitor"
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            poller.register(self._monitor, zmq.POLLIN)

    def advance_connection(self, now: float) -> bool:
        """Connect, send, detect breaks; return True if a connection broke, so that chunks must be asked for again."""
        if self._socket is None:
            if now >= self._again_at:
                self._connect(now)
            return False
        self.flush_outbox()
        if self._reap_sent() or not (self.waits or self._held or self._outbox or not self.welcomed):
            self._moved_at = now
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        broken = self._break_reason()
        if broken is None and now - self._moved_at >= self._stall_s:
            broken = f"nothing moved for {self._stall_s:g} s"
        if broken is None and self.guard.worn:
            broken = "its keys have sealed as much as they should"
        if broken is None:
            return False
        self.reconnect_later(broken, now)
        return True

    def reconnect_later(self, why: str, now: float) -> None:
        """Close this connection and open another after a pause, with the next epoch."""
        self.close()
        self.why = why
        self.welcomed = False
        self._name_as(replace(self.name, epoch=self.name.epoch + 1))
        self._again_at = now + self._backoff.next_pause_s()

    def _name_as(self, name: StreamName) -> None:
        self.name = name
        self.id = name.stream_id  # of the present epoch; computed once, since every frame is compared with it

    def read_frames(self, now: float, most: int) -> Iterator[Arrived]:
        """Iterate over at most `most` received frames that are complete and of this epoch; others are skipped."""
        for _ in range(most):
            if self._socket is None:
                return
            try:
                parts = receive_parts(self._socket)
            except zmq.Again:
                return
            frame = self._read_frame(parts)
            if frame is not None:
                self._moved_at = now
                yield frame

    def _read_frame(self, parts: list[zmq.Frame]) -> Arrived | None:
        if len(parts) != 2:
            return None
        body, guard = parts[1].buffer, self.guard
        try:
            header = unpack_header(parts[0].buffer, self._run, len(body), MESSAGE_LIMIT, guard.tag_bytes)
            if header.stream != self.id:
                return None
            if self._greeter is not None:
                self._begin_session(self._greeter, header, body)
                return None
        except BadFrame:
            return None  # it is asked for again when the stream is found to stall
        return Arrived(header, body, guard)

    def _begin_session(self, greeter: Greeter, header: Header, body: memoryview) -> None:
        """Take the lane's greeting: from here on all is sealed."""
        self.guard, self._greeter = greeter.begin_session(header, body), None
        self._say_hello()

    def on_welcome(self) -> None:
        """Reset the backoff after the slave's answer, so that the next pause is short again."""
        self.welcomed = True
        self._backoff.reset()

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection; libzmq may read posted bodies until the context has ended."""
        if self._socket is not None:
            assert self._monitor is not None, "each socket has its monitor"
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
        self._socket = self._monitor = None
        self._outbox.clear()
        self._held.clear()

    def _connect(self, now: float) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        self.guard = CHECKSUMS
        if self._keys is not None:
            pair, server = self._keys
            pair.speak_to(self._socket, server)
            self._greeter = Greeter(pair, server)
        self._monitor = self._socket.get_monitor_socket(_BROKEN)
        self._socket.connect(f"tcp://{self.address}")
        self._moved_at = now
        if self._greeter is None:
            self._say_hello()
        else:
            self.post_frame(*make_message(Kind.GREETING, self._run, self.id, self._greeter.greeting))

    def _say_hello(self) -> None:
        self._told_ready = len(self._pieces) if self._ready is None else self._ready()
        self.send_message(Kind.HELLO, encode_hello(self.name, self._pieces, self._told_ready))

    def tell_ready(self) -> None:
        """Send READY if more may be asked for than before and the slave knows the stream."""
        if self._ready is not None and self.welcomed and (ready := self._ready()) > self._told_ready:
            self._told_ready = ready
            self.send_message(Kind.READY, encode_ready(ready))

    def flush_outbox(self) -> None:
        """Pass frames to the connection as far as it takes them now."""
        while self._outbox and self._socket is not None:
            header, body = self._outbox[0]
            try:
                self._socket.send(header, MORE)
                tracker = self._socket.send(body, LAST, copy=False, track=True)
            except zmq.Again:
                return  # no connection yet, or it broke between the two parts: libzmq has rolled the first back
            self._held.append(tracker)
            self._outbox.popleft()

    def _reap_sent(self) -> bool:
        moved = False
        while self._held and self._held[0].done:
            self._held.popleft()
            moved = True
        return moved

    def _break_reason(self) -> str | None:
        assert self._monitor is not None
        try:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None
        return f"connection lost ({zmq.Event(event['event'])!r})"
