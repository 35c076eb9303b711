"""A lane: one ROUTER socket with its own thread, the limit of its connections, and stages of work beside it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import queue
import resource
import secrets
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from dips.cgroup import available_cpus
from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.telemetry.refusals import count_refusal
from dips.transport.intake import MOST_CHUNKS
from dips.transport.memory import keep_message_memory
from dips.transport.seal import KEY_CHARS, USER_ID, Admit, KeyPair, Sessions, ZapHandler
from dips.wire.frame import CHECKSUMS, FRAME_LIMIT, Buffer, FrameGuard, Header

# ---- stages ---------------------------------------------------------------------------------------------------------
# A stage of a pipeline: threads that do the heavy part (checksum, copy) of work that other threads queue.
#
# Its queue is as deep as everything that may be outstanding, so `put_item` never blocks and never fails for honest
# work. Without threads the work is done in the caller: on few cores a hop to another thread, with its wake-up and its
# wait for the interpreter, costs more than the work.


MANY_CORES = 4  # with at least this many, a separate thread finds a free core beside the sockets' I/O threads

T = TypeVar("T")


def available_cores() -> int:
    """Return the number of cores that this process may use at once."""
    return available_cpus()


def spare_threads(available: int) -> int:
    """Return the number of threads of a stage that could as well work in the caller."""
    return 0 if available < MANY_CORES else 1


class Stage(Generic[T]):
    """Worker threads with a bounded queue."""

    def __init__(self, name: str, depth: int, work: Callable[[T], None], threads: int = 1) -> None:
        """`work` is called once for each item and must not raise; in order, unless there are several threads."""
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._depth = depth
        self._work = work
        self._threads = [
            threading.Thread(target=self._serve_items, name=f"{name}-{k}", daemon=True) for k in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def in_place(self) -> bool:
        """Whether the caller of `put_item` does the work."""
        return not self._threads

    def put_item(self, item: T) -> bool:
        """Queue an item, or process it now if there is no thread; return False, at once, if the queue is full."""
        if not self._threads:
            self._work(item)
            return True
        if self._queue.qsize() >= self._depth:
            return False
        self._queue.put(item)
        return True

    def close(self) -> None:
        """Drain the queue and stop the threads. No items may be put afterwards. Idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve_items(self) -> None:
        while (item := self._queue.get()) is not None:
            self._work(item)


# ---- lane door ------------------------------------------------------------------------------------------------------
# The limit of a lane's connections: counts them, and accepts no more while there are too many.
#
# libzmq accepts every connection and does not report their number. So the listening socket is ours, libzmq's monitor
# reports connections and disconnections, and at the limit a filter at the listening socket drops packets that would
# begin a connection: an honest rank's TCP tries again after one second, then two, and connects when there is room.
# Connections that fail before they are a ZeroMQ peer, or do not hold the right key, are counted.
#
# libzmq bounds a part, and neither the number of a message's parts nor, before the last one is there, their bytes: it
# keeps them all, empty ones as 64 bytes each, and shows them to nobody. So a connection is ended that has brought more
# than any message of ours has, while the lane has read all that is complete and nothing of it. libzmq serves
# connections in turn, so in a flood of messages all that was complete is read when each has had its turn.


MOST_CONNECTIONS = 4_096  # of one lane at once: 64 ranks of 64 clusters; further ones wait in TCP
FEWEST_CONNECTIONS = 64  # of one lane, however few files this process may have open
OWN_FILES = 512  # of the process besides: libraries, logs, snapshots, gRPC's connections
ROOM = 64  # connections that must end before others are accepted again, so that the state does not flap
MOST_EVENTS = 512  # monitor events that are read at a time, so that frames have their turn, too
MOST_UNFINISHED = 4 << 20  # bytes of a connection that belong to no complete message; ours have 1 MiB and a header
LOOK_S = 1.0  # least time between two looks at them
FRAMING_BYTES = 2, 9  # of ZMTP before a part of less than 256 bytes, and before a longer one
_RECEIVED = struct.Struct("@128xQ")  # the kernel's struct tcp_info up to tcpi_bytes_received
BACKLOG = 256  # connections that the kernel has accepted and libzmq has not
_SO_DETACH_FILTER = 27  # Linux; like SO_ATTACH_FILTER, not in every Python's module socket
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0, accept no byte of any packet
_FAILED = int(
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_EVENTS = int(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.ACCEPT_FAILED) | _FAILED


def most_connections(lanes: int) -> int:
    """Return the limit of one of `lanes` lanes: half of the possible open files, for libzmq accepts some before the
    filter is set.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(FEWEST_CONNECTIONS, (limit - OWN_FILES) // (2 * lanes)))


class LaneDoor:
    """Limits the connections of one bound socket; called when `monitor` is readable, and after each batch of frames."""

    def __init__(self, router: zmq.Socket[bytes], host: str, port: int, most: int = MOST_CONNECTIONS) -> None:
        """Bind `router`; raise OSError or ZMQError if the address is not available."""
        self._most, self._shut = most, False
        self._open: dict[int, int] = {}  # connection's descriptor → bytes of it that the lane has read
        self._read_before: dict[int, int] = {}  # as `_open` was at the last look
        self._unfinished: dict[int, int] = {}  # those with too many others at the last look, and what was read of them
        self._look_at = 0.0
        self._turns = 0  # messages that were read since the last look
        self._names: dict[int, bytes] = {}  # connection's descriptor → the peer that a message came from by it
        self._gone: list[bytes] = []  # peers whose connections have ended since `take_gone`
        self._listener = _listen(host, port)
        self.port = int(self._listener.getsockname()[1])
        self.monitor = router.get_monitor_socket(_EVENTS)
        router.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))  # libzmq closes its own
        router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{self.port}")

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def follow_connections(self) -> None:
        """Process events of new and ended connections; set or remove the filter."""
        for _ in range(MOST_EVENTS):
            if not int(self.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            kind = int(event["event"])
            if kind == zmq.Event.ACCEPTED:
                self._open[int(event["value"])] = 0
            elif kind == zmq.Event.DISCONNECTED:
                self._open.pop(int(event["value"]), None)
                if (peer := self._names.pop(int(event["value"]), None)) is not None:
                    self._gone.append(peer)
            elif kind & _FAILED:
                count_refusal("lane_handshake")
        if not self._shut and len(self._open) >= self._most:
            count_refusal("lane_full")
            self._shut_door()
        elif self._shut and len(self._open) <= max(self._most - ROOM, 0):
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self._shut = False

    def count_read(self, peer: bytes, parts: list[zmq.Frame]) -> None:
        """Count a message as read from its connection, which is this peer."""
        try:
            connection = int(parts[-1].get(zmq.SRCFD))
        except zmq.ZMQError:  # libzmq does not say it of peers of ZMTP 1.0 and 2.0, of which none is ours
            return
        if self._names.get(connection) != peer:
            self.follow_connections()  # the end of another one, whose descriptor it has, is no end of this one
            self._names[connection] = peer
        self._turns += 1
        if connection in self._open:
            self._open[connection] += sum(FRAMING_BYTES[len(part) > 255] + len(part) for part in parts)

    def take_gone(self) -> list[bytes]:
        """Return the peers whose connections have ended; called when all that is complete has been read."""
        gone, self._gone = self._gone, []
        return gone

    def end_unfinished(self, more: bool) -> None:
        """End connections with too long a message; called after each batch. `more`: not all that is complete has been
        read.
        """
        if (now := time.monotonic()) < self._look_at or (more and self._turns < 2 * len(self._open)):
            return
        self._look_at, self._turns = now + LOOK_S, 0
        read_before, self._read_before = self._read_before, dict(self._open)
        before, self._unfinished = self._unfinished, {}
        for number, read in self._open.items():
            if read_before.get(number) != read:
                continue  # whose messages end; a look takes calls of the system, and there may be thousands of them
            # A descriptor of our own for what libzmq may close at any time, or has: then the number may be another's.
            with suppress(OSError), socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as connection:
                if connection.getsockname()[1:2] != (self.port,) or _taken_bytes(connection) - read <= MOST_UNFINISHED:
                    continue
                if before.get(number) != read:
                    self._unfinished[number] = read
                    continue
                count_refusal("lane_unfinished")
                connection.shutdown(socket.SHUT_RDWR)

    def stop_watching(self, router: zmq.Socket[bytes]) -> None:
        """Close the monitor, before the router is closed."""
        router.disable_monitor()
        self.monitor.close(linger=0)

    def close(self) -> None:
        """Close the listener, after the router."""
        self._listener.close()

    def _shut_door(self) -> None:
        code = ctypes.create_string_buffer(_DROP)
        program = struct.pack("HL", 1, ctypes.addressof(code))  # struct sock_fprog: the kernel copies it
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        self._shut = True


def _taken_bytes(connection: socket.socket) -> int:
    """Return the bytes that libzmq has taken from a connection; 0 if the kernel does not say."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    if len(info) < _RECEIVED.size:
        return 0
    waiting = fcntl.ioctl(connection, termios.FIONREAD, bytes(4))
    return int(_RECEIVED.unpack(info)[0]) - int.from_bytes(waiting, sys.byteorder)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket like libzmq's: IPv6 ones accept IPv4, too."""
    if host == "*":
        host = "::"
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


# ---- lane -----------------------------------------------------------------------------------------------------------
# A lane: one ROUTER socket with its own thread and context. It always reads, and it never stages.
#
# Other threads call `post_frame` and `wake`; only its own thread touches the socket. The handler decides what to do
# with a frame. Options and reasons: docs/protocol.md#sockets. It does not know pushes, pulls or credits; its queues
# cannot overflow because a CHUNK leaves only after a WANT, and WANTs are bounded.
#
# A peer is the connection that a message came by. On a lane with a key its name begins with the connection's key,
# KEY_CHARS long, so the name identifies the key's owner.


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
    header: bytes | Header  # a Header: of a message, which the lane seals as it leaves
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
        self.theirs.setblocking(False)

    def wake(self) -> None:
        if self._awake:
            return
        self._awake = True
        try:
            self._ours.send(b"\0")  # at most one of each calling thread has yet to be drained
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


class LanePort(Protocol):
    """The part of a lane that the data flow uses; the methods are those of `Lane`."""

    index: int
    address: str
    sessions: Sessions | None

    def start(self, handler: Handler) -> None: ...
    def post_frame(self, frame: Outgoing) -> None: ...
    def find_guard(self, peer: bytes) -> FrameGuard | None: ...
    def wake(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


MakeLane = Callable[[int, str, int, float, KeyPair | None, Admit, int], LanePort]  # with the arguments of `Lane`


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
        """Bind; with a key the lane is encrypted, for keys that `admit` accepts. `most` limits connections."""
        self.index = index
        # Twice the connections: sessions end with them, a moment later.
        self.sessions = None if key is None else Sessions(key, 2 * most)
        self._key_chars = 0 if key is None else KEY_CHARS
        self._zap: ZapHandler | None = None
        self._door: LaneDoor | None = None
        self._context = zmq.Context(io_threads=1)
        # libzmq numbers connections from `rand` on, which nobody else seeds. A peer that takes the next number for its
        # own name ends the process: libzmq asserts that nobody has it.
        ctypes.CDLL(None).srand(secrets.randbits(32))
        self._socket = self._context.socket(zmq.ROUTER)
        self._waker = Waker()
        keep_message_memory()
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
            zmq.TCP_MAXRT: int(stall_s * 1000),  # a peer that reads nothing for this long loses its connection
        }
        try:
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            if key is not None:
                self._zap = ZapHandler(self._context, key, admit)
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

    def find_guard(self, peer: bytes) -> FrameGuard | None:
        """Return the guard of a peer's frames, None if it has not greeted; from any thread."""
        return CHECKSUMS if self.sessions is None else self.sessions.find_session(peer)

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
            if any(fd == waker for fd, _ in poller.poll(0 if more else _POLL_MS)):
                self._waker.drain()
            door.follow_connections()
            if self._zap is not None:
                self._zap.answer_handshakes()
            more = self._read_batch(handler)
            door.end_unfinished(more)
            if not more:
                self._forget_peers(door.take_gone())
            handler.on_turn(self.index)
            self._flush_outbox()

    def _read_batch(self, handler: Handler) -> bool:
        """Pass a batch of frames to the handler; return True if there may be more."""
        for _ in range(_BATCH):
            try:
                peer, *parts = receive_parts(self._socket)
            except zmq.Again:
                return False
            assert self._door is not None
            name = self._name_peer(peer, parts)
            self._door.count_read(name, parts)
            if self.sessions is not None:
                self.sessions.keep_session(name)
            handler.on_message(self.index, name, parts)
        return True

    def _forget_peers(self, gone: list[bytes]) -> None:
        if self.sessions is not None:
            for peer in gone:
                self.sessions.forget_session(peer)

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
        header, body = frame.header, frame.body
        if isinstance(header, Header):
            guard = self.find_guard(frame.peer)
            if guard is None:
                _drop_frame(frame)
                return
            header, body = guard.seal_frame(header, body)
        try:
            self._socket.send(frame.peer[self._key_chars :], MORE)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            _drop_frame(frame)
            return
        self._socket.send(header, MORE)
        if frame.watch is None:
            self._socket.send(body, LAST)
        else:
            frame.watch.on_sent(self._socket.send(body, LAST, copy=False, track=True))


def _drop_frame(frame: Outgoing) -> None:
    if frame.watch is not None:
        frame.watch.on_not_sent()
