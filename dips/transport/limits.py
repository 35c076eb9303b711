"""The limits of one server: connections, streams, bytes of a message, calls per second; of one peer, and in all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from dips.dataclass import dataclass
from dips.errors import Busy, RemoteProtocolError
from dips.telemetry.refusals import count_refusal

# ---- handshakes -----------------------------------------------------------------------------------------------------
# Counts connections that ended before their first call, which gRPC does not report.
#
# gRPC requests our certificate once for each connection, before its handshake; a connection whose handshake succeeds
# makes a call at once (ours connect for a call). So one that began and made none was plain text, garbage, half-open, or
# had a certificate that is not of this run.


PATIENCE_S = 10.0  # from a handshake's begin to the first call; twice what a handshake may take
MOST_REMEMBERED = 8_192  # connections that have made a call and are remembered
# A silent connection is forgotten: another one may have its port by then, which its kernel keeps for a minute.
REMEMBERED_S = 60.0
MOST_BEGUN = 65_536  # handshakes that are waited for


class HandshakeWatch:
    """The handshakes of one server; from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._begun: deque[float] = deque(maxlen=MOST_BEGUN)
        self._peers: OrderedDict[str, float] = OrderedDict()  # connection → its last call, the longest silent first

    def on_handshake(self) -> None:
        """Record that a connection came in."""
        with self._lock:
            self._count_overdue()
            self._begun.append(self._clock())

    def on_call(self, peer: str) -> None:
        """Record a call over the connection with this name."""
        with self._lock:
            self._count_overdue()
            now, called = self._clock(), self._peers.pop(peer, float("-inf"))
            self._peers[peer] = now
            if len(self._peers) > MOST_REMEMBERED:
                self._peers.popitem(last=False)
            if self._begun and now - called >= REMEMBERED_S:
                self._begun.pop()  # the newest: honest ones do not wait

    def _count_overdue(self) -> None:
        while self._begun and self._clock() - self._begun[0] >= PATIENCE_S:
            self._begun.popleft()
            count_refusal("handshake")


# ---- limits ---------------------------------------------------------------------------------------------------------
# The limits of one server: connections, streams, bytes of a message, calls per second; of one peer, and in all.
#
# The load of an honest run on its master, at 1,000 clusters and 100 slaves with the default timing:
#
#     heartbeats     1,000 / 2 s + 100 / 2 s                                       550 calls/s
#     open questions 1,000 × one in 10 s (a long poll; core.py)                    100 calls/s
#     rounds         1,000 × 7 calls (ranges, push, finish, await, pull, finish,
#                    and one asked again) in at least 10 s of training             700 calls/s
#     reports        100 slaves × 1,000 pushes in 10 s, at most                  10,000 calls/s, if all push at once
#
# so CALLS_PER_S and CALLS_AT_ONCE leave room for all clusters to push within the same seconds, and for the burst of two
# calls of each peer that follows a stall. One cluster makes below ten calls a second, also when all that it asks is
# refused and asked again; one slave reports 1,000 pushes in 10 s. A peer is its certificate's name, or in plain text
# (on loopback, where all have one address) its connection. A master is not limited at its slaves: each order is needed,
# and rounds bound their number. Pure: `now` is an argument.


PEER_CALLS_PER_S = 200.0  # calls/s of one peer
PEER_CALLS_AT_ONCE = 1_000.0  # calls in a burst: all that a slave has staged
CALLS_PER_S = 12_000.0  # calls/s of all
CALLS_AT_ONCE = 24_000.0  # calls in a burst
MOST_PEERS = 8_192  # whose calls are counted; the longest silent is forgotten: its bucket is full again anyway
MIB = 1 << 20

MOST_CONNECTIONS = 4_096  # of a master: two of each of 1,000 clusters, three of 100 slaves, and those of operators
MOST_SLAVE_CONNECTIONS = 256  # of a slave: its master, the one before, probes
HANDSHAKE_MS = 5_000  # from TCP's accept to HTTP/2's settings; a round trip over a satellite is below a second
CONNECTION_AGE_MS = 3_600_000  # after that a connection is closed, so that no certificate is believed for longer
AGE_GRACE_MS = 600_000  # for calls under way: above the longest deadline of an order
MOST_STREAMS = 32  # calls of one connection at once; an agent has at most ten open
METADATA_BYTES = 8_192  # of one call's headers; ours are below 1 KiB
WINDOW_BYTES = 16_384  # of a call's message that may arrive before it is read; most are smaller
READ_BYTES = 65_536  # at once from a connection: gRPC's own 4 MiB would be 16 GiB for all connections of a master
PEER_CONNECTIONS = 16  # of one certificate with calls at once: an agent has two, a slave three, `check` and a pull one
PEER_MESSAGES = 4  # of one peer that arrive at once
MESSAGES = 32  # of all peers; a heartbeat has its place for a turn of the loop
MESSAGE_S = 10.0  # longest time in which a message arrives: 1 MiB at 1 Mbit/s


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of one gRPC server."""

    connections: int = MOST_CONNECTIONS  # at once, half-open ones too
    streams: int = MOST_STREAMS  # calls of a connection at once
    request_bytes: int = MIB  # of one message: the largest is a packed manifest
    peer_connections: int = PEER_CONNECTIONS
    peer_messages: int = PEER_MESSAGES
    messages: int = MESSAGES
    message_s: float = MESSAGE_S
    reply_bytes: int = 16 * MIB
    peer_calls_per_s: float = PEER_CALLS_PER_S
    peer_calls_at_once: float = PEER_CALLS_AT_ONCE

    def to_options(self) -> list[tuple[str, int]]:
        """Return the limits as gRPC options."""
        return [
            ("grpc.max_receive_message_length", self.request_bytes),
            ("grpc.max_send_message_length", self.reply_bytes),
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ("grpc.experimental.tcp_max_read_chunk_size", READ_BYTES),
            ("grpc.http2.bdp_probe", 0),  # it would widen the window of a fast link to some MiB a call
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.http2.settings_timeout", HANDSHAKE_MS),
            ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
            ("grpc.max_connection_age_grace_ms", AGE_GRACE_MS),
        ]


MASTER_LIMITS = ServerLimits()
SLAVE_LIMITS = ServerLimits(
    connections=MOST_SLAVE_CONNECTIONS,
    peer_calls_per_s=CALLS_PER_S,  # in plain text a master is not known by its name
    peer_calls_at_once=CALLS_AT_ONCE,
)


class TokenBucket:
    """A token bucket: `burst` calls at once, `per_s` in the long run."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._per_s, self._burst, self._left, self._at = per_s, burst, burst, now

    def take_token(self, now: float) -> bool:
        """Take a token; return whether there was one."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class CallLimits:
    """The rates of one server: a bucket for each peer and one for all; a flooding peer empties its own first."""

    def __init__(self, limits: ServerLimits, now: float) -> None:
        self._peer_rate = limits.peer_calls_per_s, limits.peer_calls_at_once
        self._all = TokenBucket(CALLS_PER_S, CALLS_AT_ONCE, now)
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()

    def find_excess(self, peer: str, now: float) -> str:
        """Return why this call of `peer` comes too early; empty if it may pass."""
        bucket = self._peers.get(peer)
        if bucket is None:
            if len(self._peers) >= MOST_PEERS:
                self._peers.popitem(last=False)
            bucket = TokenBucket(*self._peer_rate, now)
            self._peers[peer] = bucket
        else:
            self._peers.move_to_end(peer)
        if not bucket.take_token(now):
            return f"{peer} makes more than {self._peer_rate[0]:g} calls a second: wait and ask again"
        if not self._all.take_token(now):
            return f"more than {CALLS_PER_S:g} calls a second come in: wait and ask again"
        return ""


# ---- reception ------------------------------------------------------------------------------------------------------
# Limits how many messages of one server arrive at once, of one peer and of all, and over how many connections a peer
# calls.
#
# A call is checked when its headers have arrived. Its message is read only with a place here, so unread data stays in
# the callers' own memory except for a stream's window. A peer's calls wait for its own places, not for those of others.
# A peer is its certificate's name, or in plain text its connection.


class _PeerCalls:
    """The open calls of one peer."""

    def __init__(self, messages: int) -> None:
        self.places = asyncio.Semaphore(messages)
        self.connections: dict[str, int] = {}  # connection → its open calls


class Reception:
    """The places of one server; on its event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits, self._all = limits, asyncio.Semaphore(limits.messages)
        self._peers: dict[str, _PeerCalls] = {}  # peers with open calls

    @contextmanager
    def admit_call(self, peer: str, connection: str) -> Iterator[None]:
        """Count a call as open; raise Busy if the peer calls over too many connections at once."""
        calls = self._peers.setdefault(peer, _PeerCalls(self._limits.peer_messages))
        most = self._limits.peer_connections
        if connection not in calls.connections and len(calls.connections) >= most:
            raise Busy(f"{peer} calls over more than {most} connections at once: close some, and ask again")
        calls.connections[connection] = calls.connections.get(connection, 0) + 1
        try:
            yield
        finally:
            calls.connections[connection] -= 1
            if not calls.connections[connection]:
                del calls.connections[connection]
            if not calls.connections:
                del self._peers[peer]

    async def read_message(self, peer: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Read the message of an admitted call when there is a place; raise RemoteProtocolError if it does not come."""
        within_s = self._limits.message_s
        async with self._peers[peer].places, self._all:
            try:
                async with asyncio.timeout(within_s):
                    return await read()
            except TimeoutError as error:
                raise RemoteProtocolError(f"expected the message of a call within {within_s:g} s") from error
