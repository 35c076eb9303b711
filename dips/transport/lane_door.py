"""The limit of a lane's connections: counts them, and accepts no more while there are too many.

libzmq accepts every connection and does not report their number. So the listening socket is ours, libzmq's monitor
reports connections and disconnections, and at the limit a filter at the listening socket drops packets that would begin
a connection: an honest rank's TCP tries again after one second, then two, and connects when there is room. Connections
that fail before they are a ZeroMQ peer, or do not hold the right key, are counted.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct

import zmq
from zmq.utils.monitor import parse_monitor_message

from dips.telemetry.refusals import count_refusal

MOST_CONNECTIONS = 4_096  # of one lane at once: 64 ranks of 64 clusters; further ones wait in TCP
FEWEST_CONNECTIONS = 64  # of one lane, however few files this process may have open
OWN_FILES = 512  # of the process besides: libraries, logs, snapshots, gRPC's connections
ROOM = 64  # connections that must end before others are accepted again, so that the state does not flap
MOST_EVENTS = 512  # monitor events that are read at a time, so that frames have their turn, too
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
        self._most, self._open, self._shut = most, set[int](), False
        self._listener = _listen(host, port)
        try:
            self.monitor = router.get_monitor_socket(_EVENTS)
            router.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))  # libzmq closes its own
            name = f"[{host}]" if ":" in host else host
            self.port = int(self._listener.getsockname()[1])
            router.bind(f"tcp://{name}:{self.port}")
        except BaseException:
            self._listener.close()
            raise

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
                self._open.add(int(event["value"]))
            elif kind == zmq.Event.DISCONNECTED:
                self._open.discard(int(event["value"]))
            elif kind & _FAILED:
                count_refusal("lane_handshake")
        if not self._shut and len(self._open) >= self._most:
            count_refusal("lane_full")
            self._shut_door()
        elif self._shut and len(self._open) <= max(self._most - ROOM, 0):
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self._shut = False

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
