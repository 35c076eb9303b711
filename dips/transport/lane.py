"""A lane: one ROUTER socket with its own thread and context. It always reads, and it never stages.

Other threads call `post_frame` and `wake`; only its own thread touches the socket. The handler decides what to do with
a frame. Options and reasons: docs/protocol.md#sockets. It does not know pushes, pulls or credits; its queues cannot
overflow because a CHUNK leaves only after a WANT, and WANTs are bounded.

A peer is the connection that a message came by. On a lane with a key its name begins with the connection's key,
KEY_CHARS long, so the name identifies the key's owner.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from typing import Any, Protocol

import zmq

from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.transport.credit import MOST_CHUNKS
from dips.transport.curve import KEY_CHARS, KeyPair
from dips.transport.lane_door import MOST_CONNECTIONS, LaneDoor
from dips.transport.zap import USER_ID, Admit, ZapHandler
from dips.wire.frame import FRAME_LIMIT, Buffer

RCVHWM = MOST_CHUNKS + 16  # frames of one connection: never reached by honest peers
HANDSHAKE_MS = 10_000
_BATCH = 4  # frames read before the handler's turn: with more, the data in flight drains meanwhile
_POLL_MS = 50
LAST, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # flags of a part; as ints, since sums of flags are slow


def receive_parts(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Return the next message's parts, without a copy; raise zmq.Again if there is none.

    Like recv_multipart, which asks the socket after each part whether there is more: 2 µs for three parts instead of
    7.5.
    """
    part = socket.recv(LAST, copy=False)
    parts = [part]
    while part.more:
        part = socket.recv(LAST, copy=False)
        parts.append(part)
    return parts


class Sent(Protocol):
    """Callbacks about a posted frame, on the lane's thread."""

    def still_wanted(self) -> bool:
        """Whether the frame may still leave; called just before it does."""

    def on_sent(self, tracker: zmq.MessageTracker) -> None:
        """Called when the frame was handed to libzmq, which reads the body until the tracker is done."""

    def on_not_sent(self) -> None:
        """Called when the frame did not leave: its peer is gone, or it was no longer wanted."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One frame to one peer; with `watch` the body is sent without a copy."""

    peer: bytes
    header: bytes
    body: Buffer
    watch: Sent | None = None


class Handler(Protocol):
    """Callbacks of a lane's thread; they must return at once and not raise."""

    def on_message(self, lane: int, peer: bytes, parts: list[zmq.Frame]) -> None: ...

    def on_turn(self, lane: int) -> None:
        """Called after each batch, and at least every 50 ms: post what may be asked for now, end what is over."""


class Waker:
    """Wakes a poll from another thread. Idempotent until the poll has returned.

    The polling thread drains first and looks for work afterwards, so it sees what was posted before a wake.
    """

    def __init__(self) -> None:
        self._awake = False  # a byte is on its way: no other is needed
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.theirs.setblocking(False)

    def wake(self) -> None:
        if self._awake:
            return
        self._awake = True
        try:
            self._ours.send(b"\0")
        except BlockingIOError:
            return  # it is full of wakes already
        except OSError as error:
            if error.errno != errno.EBADF:  # closed under a late caller: there is no thread to wake
                raise

    def drain(self) -> None:
        try:
            self.theirs.recv(4096)
        except BlockingIOError:
            pass  # woken by something else
        self._awake = False  # after the read: a byte sent before it is gone

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


class Lane:
    """One ROUTER socket; bound when it is made, served from `start` to `close`."""

    def __init__(
        self,
        index: int,
        host: str,
        port: int,
        stall_s: float,
        key: KeyPair | None = None,
        admit: Admit = lambda key: True,
        most: int = MOST_CONNECTIONS,
    ) -> None:
        """Bind; with a key the lane uses CURVE only, for keys that `admit` accepts. `most` limits connections."""
        self.index = index
        self._key_chars = 0 if key is None else KEY_CHARS
        self._zap: ZapHandler | None = None
        self._door: LaneDoor | None = None
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._waker = Waker()
        self._outbox: deque[Outgoing] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        options: dict[int, Any] = {
            zmq.ROUTER_MANDATORY: 1,  # sending to a vanished peer fails with EHOSTUNREACH, not silently
            zmq.SNDHWM: 0,  # any other value causes loss or a stalled lane
            zmq.RCVHWM: RCVHWM,
            zmq.MAXMSGSIZE: FRAME_LIMIT,
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.IPV6: 1,
            zmq.TCP_MAXRT: max(1, int(stall_s * 1000)),  # a peer that reads nothing for this long loses its connection
        }
        try:
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            if key is not None:
                self._zap = ZapHandler(self._context, admit)
                key.secure_server(self._socket)
            self._door = LaneDoor(self._socket, host, port, most)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ConfigError(
                f"lane {index}: cannot listen on {host}:{port}: {error.strerror}; name a free port, or 0 for any"
            ) from error
        host = f"[{host}]" if ":" in host else host
        self.address = (
            f"{host}:{self._door.port}"  # as the configuration spells the host: libzmq maps IPv4 into IPv6 here
        )

    def start(self, handler: Handler) -> None:
        """Start the lane's thread."""
        self._thread = threading.Thread(
            target=self._serve_frames, args=(handler,), name=f"lane-{self.index}", daemon=True
        )
        self._thread.start()

    def post_frame(self, frame: Outgoing) -> None:
        """Send a frame soon; from any thread, without blocking. From the lane's own thread it leaves now: a body that
        was just read for its checksum is still in the cache, and the next one is read while libzmq sends it.
        """
        self._outbox.append(frame)
        if threading.current_thread() is self._thread:
            self._flush_outbox()
        else:
            self._waker.wake()

    def wake(self) -> None:
        """Give the handler its turn now; from any thread."""
        self._waker.wake()

    def stop(self) -> None:
        """Stop the thread: nothing is received any more."""
        self._stop.set()
        if self._thread is not None:
            self._waker.wake()
            self._thread.join()

    def close(self) -> None:
        """Stop the thread and close the socket; on return libzmq holds no body any more."""
        self.stop()
        if self._door is not None:
            self._door.stop_watching(self._socket)
        self._socket.close(linger=0)
        if self._door is not None:
            self._door.close()
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        self._waker.close()
        while self._outbox:
            _drop_frame(self._outbox.popleft())

    def _serve_frames(self, handler: Handler) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.theirs, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap.socket, zmq.POLLIN)
        waker, door = self._waker.theirs.fileno(), self._door
        assert door is not None
        poller.register(door.monitor, zmq.POLLIN)
        more = False
        while not self._stop.is_set():
            if not more and any(fd == waker for fd, _ in poller.poll(_POLL_MS)):
                self._waker.drain()
            door.follow_connections()
            if self._zap is not None:
                self._zap.answer_handshakes()
            more = self._read_batch(handler)
            handler.on_turn(self.index)
            self._flush_outbox()

    def _read_batch(self, handler: Handler) -> bool:
        """Pass a batch of frames to the handler; return True if there may be more."""
        for _ in range(_BATCH):
            try:
                peer, *parts = receive_parts(self._socket)
            except zmq.Again:
                return False
            handler.on_message(self.index, self._name_peer(peer, parts), parts)
        return True

    def _name_peer(self, route: zmq.Frame, parts: list[zmq.Frame]) -> bytes:
        if not self._key_chars:
            return route.bytes
        return str(parts[0].get(USER_ID)).encode() + route.bytes

    def _flush_outbox(self) -> None:
        while self._outbox:
            self._send_frame(self._outbox.popleft())

    def _send_frame(self, frame: Outgoing) -> None:
        if frame.watch is not None and not frame.watch.still_wanted():
            frame.watch.on_not_sent()
            return
        try:
            self._socket.send(frame.peer[self._key_chars :], MORE)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            _drop_frame(frame)
            return
        self._socket.send(frame.header, MORE)
        if frame.watch is None:
            self._socket.send(frame.body, LAST)
        else:
            frame.watch.on_sent(self._socket.send(frame.body, LAST, copy=False, track=True))


def _drop_frame(frame: Outgoing) -> None:
    if frame.watch is not None:
        frame.watch.on_not_sent()
