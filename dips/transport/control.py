"""The control flow's sockets: gRPC servers and channels, with a deadline on every call and one mapping of errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast
from weakref import WeakSet

import grpc
from google.protobuf.message import Message
from grpc import ChannelConnectivity, aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dips.errors import Busy, ConfigError, DipsError, RemoteProtocolError, Unavailable, class_named
from dips.identity.tls_files import LoadedTls
from dips.printable import make_printable
from dips.transport.endpoints import Endpoint
from dips.transport.gate import ERROR_KEY, CallGate, Guard, Report
from dips.transport.limits import MASTER_LIMITS, ServerLimits
from dips.transport.tls import TlsSource, make_channel_credentials, make_server_credentials
from dips.wire.messages import MAX_MESSAGE_BYTES

# ---- renewing -------------------------------------------------------------------------------------------------------
# A channel with the current certificate: when ours is renewed, new calls get a new connection.
#
# gRPC fixes a channel's certificate when it is made, and a connection outlives its certificate. Open calls end on the
# connection on which they began. A channel that finds nobody is made anew, too: the name of a pod that starts again is
# not there for a while, and gRPC looks it up ever more seldom, in two minutes at last.


GRACE_S = 60.0  # for calls on the former connection; above the longest deadline of a call
REDIAL_S = 10.0  # from the first failure to connect

OpenChannel = Callable[[LoadedTls], aio.Channel]


class RenewingChannel:
    """The part of `aio.Channel` that stubs and links use."""

    def __init__(
        self, source: TlsSource, open_channel: OpenChannel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source, self._open, self._clock = source, open_channel, clock
        self._loaded = source.read_current()
        self._channel = open_channel(self._loaded)
        self._found_at = clock()  # the last time at which connecting had not failed
        self._closing: set[asyncio.Task[None]] = set()
        self._calls = WeakSet[Any]()  # on any connection

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """Return a method of a stub; each call uses the connection of its time."""
        return self._follow_channel(lambda channel: channel.unary_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """Return a streaming method of a stub; a stream stays on its connection until that is closed."""
        return self._follow_channel(lambda channel: channel.stream_stream(*method, **options))

    def _follow_channel(self, make: Callable[[aio.Channel], Callable[..., Any]]) -> Callable[..., Any]:
        made: tuple[aio.Channel | None, Any] = None, None

        def call_method(*request: Any, **more: Any) -> Any:
            nonlocal made
            channel = self._current_channel()
            if made[0] is not channel:
                made = channel, make(channel)
            self._calls.add(call := made[1](*request, **more))
            return call

        return call_method

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        return self._current_channel().get_state(try_to_connect)

    async def wait_for_state_change(self, last: ChannelConnectivity) -> None:
        """Return when the state is another one, or after REDIAL_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REDIAL_S):
                await self._current_channel().wait_for_state_change(last)

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all calls and close all connections, also former ones: a `close` that is cancelled destroys none."""
        for call in tuple(self._calls):
            call.cancel()
        await self._channel.close()
        await asyncio.gather(*self._closing)

    def _current_channel(self) -> aio.Channel:
        loaded, now = self._source.read_current(), self._clock()
        if self._channel.get_state() is not ChannelConnectivity.TRANSIENT_FAILURE:
            self._found_at = now
        if loaded is not self._loaded or now - self._found_at >= REDIAL_S:
            former, self._loaded, self._channel = self._channel, loaded, self._open(loaded)
            self._found_at = now
            task = asyncio.get_running_loop().create_task(former.close(GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._channel


# ---- control --------------------------------------------------------------------------------------------------------
# An error raised by a handler leaves as the gRPC status of its row in errors.TREATMENTS, with its class in the trailing
# metadata `dips-error`; `call_method` raises that class again at the other end. A peer that does not answer is
# Unavailable…, whether the link, the process or the deadline ended the wait. The meaning of messages is not known here.


KEEPALIVE_MS = 10_000  # interval of a client's pings, also without calls: a NAT forgets a silent link
# A connection is given up when a ping is unanswered for this long. gRPC waits for the answer as long as its option for
# every ping says, a minute by default; its option for keepalives alone is the kernel's, for bytes not acknowledged: a
# machine that is stopped, or whose processes hang, acknowledges them.
KEEPALIVE_TIMEOUT_MS = 5_000
# servers permit pings twice as often as clients send them; else GOAWAY after 5 s (docs/rationale.md#35)
MIN_PING_INTERVAL_MS = 5_000
MAX_RECONNECT_BACKOFF_MS = 2_000  # a master that is back is found within two seconds
MAX_CONCURRENT_CALLS = 10_000  # of a server; room for a long poll and a heartbeat of 1,000 clusters, several times

Reply = TypeVar("Reply", bound=Message)

_KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
]
_SERVER_OPTIONS = [
    *_KEEPALIVE_OPTIONS,
    # Calls come in bursts (every cluster heartbeats after a stall): above gRPC's own limit of 1,000 they would be
    # cancelled.
    ("grpc.server.max_pending_requests", MAX_CONCURRENT_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_CONCURRENT_CALLS),
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not take half of the calls
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
]
_CHANNEL_OPTIONS = [
    *_KEEPALIVE_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
    # gRPC's own 30 s are three leases: a pod that starts again has another address behind its name.
    ("grpc.dns_min_time_between_resolutions_ms", MAX_RECONNECT_BACKOFF_MS),
    ("grpc.enable_http_proxy", 0),
    (
        "grpc.use_local_subchannel_pool",
        1,
    ),  # a channel is a connection of its own, so heartbeats never queue behind a poll
]


def make_server(
    report: Report,
    guard: Guard | None = None,
    limits: ServerLimits = MASTER_LIMITS,
) -> aio.Server:
    """Create a gRPC server whose handlers may raise DipsError.

    report(method, error)  called for every other exception, which the caller gets as LocalProtocolError
    guard    checks the caller before each handler; None: plain text, which the configuration allows on loopback only
    limits   what the server accepts at once and each second (limits.py); refusals are counted by reason
    """
    return aio.server(
        options=[*_SERVER_OPTIONS, *limits.to_options()],
        interceptors=[CallGate(report, guard, limits)],
        maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
    )


def bind_server(grpc_server: aio.Server, address: str, key: str, guard: Guard | None = None) -> int:
    """Listen on host:port and return the port (0 takes a free one); raise ConfigError naming `key` if it is taken."""
    try:
        if guard is None:
            port = grpc_server.add_insecure_port(address)
        else:
            credentials = make_server_credentials(guard.source, guard.handshakes.on_handshake)
            port = grpc_server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(_cannot_listen(key, address)) from error
    if port == 0:
        raise ConfigError(_cannot_listen(key, address))
    return port


async def serve_health(grpc_server: aio.Server, services: Sequence[str]) -> health.aio.HealthServicer:
    """Answer `grpc.health.v1.Health` for these services with SERVING from now on; call before the server starts."""
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, grpc_server)
    for service in services:
        await checker.set(service, health_pb2.HealthCheckResponse.SERVING)
    return checker


def open_channel(peer: Endpoint) -> aio.Channel:
    """Return a channel with its own connection; it connects at the first call and again after each loss."""
    if peer.tls is None or peer.identity is None:
        return aio.insecure_channel(peer.address, options=_CHANNEL_OPTIONS)
    options = [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer.identity.san)]

    def open_as(ours: LoadedTls) -> aio.Channel:
        return aio.secure_channel(peer.address, make_channel_credentials(ours), options=options)

    return cast(aio.Channel, RenewingChannel(peer.tls, open_as))


async def call_method(
    method: Callable[..., Awaitable[Reply]],
    request: Message,
    *,
    deadline_s: float,
    peer: Endpoint,
    unavailable: type[Unavailable],
    explain: bool = False,
) -> Reply:
    """Call `method` of a stub; raise the class of dips.errors that the peer raised.

    deadline_s   how long to wait, in seconds
    peer         the called server
    unavailable  UnavailableMaster or UnavailableSlave: raised without an answer in time
    explain      without an answer, make a handshake and add its result to the message (up to 3 s more)
    """
    try:
        return await method(request, timeout=deadline_s)
    except aio.AioRpcError as error:
        failed = to_error(error, deadline_s, peer, unavailable)
        why = await asyncio.to_thread(peer.explain_silence) if explain and isinstance(failed, Unavailable) else ""
        raise (type(failed)(f"{failed}; {why}") if why else failed) from error


# ---- errors in ----------------------------------------------------------------------------------------------------

TOO_LARGE = "message larger than max"  # wart: only the text shows which of gRPC's refusals a retry mends
_NOBODY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


def to_error(error: aio.AioRpcError, deadline_s: float, peer: Endpoint, unavailable: type[Unavailable]) -> DipsError:
    """Convert the status of a failed call to a DipsError."""
    cls, said = _class_named(error), make_printable(error.details() or "")
    if cls is not None:
        return cls(said or cls.__name__)
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return unavailable(f"{peer} did not answer within {deadline_s:g} s")
    if error.code() in _NOBODY:
        return unavailable(f"{peer} cannot be reached: {said}")
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own: too many calls at once, or a message too large
        return (RemoteProtocolError if TOO_LARGE in said else Busy)(f"{peer}: {said}")
    return RemoteProtocolError(f"{peer} answered {error.code().name}, which no Di-PS does: {said}")


def _class_named(error: aio.AioRpcError) -> type[DipsError] | None:
    """Return the class that the peer raised; None if its name is unknown."""
    named = (str(value) for key, value in error.trailing_metadata() or () if key == ERROR_KEY)
    return next((found for name in named if (found := class_named(name)) is not None), None)


def _cannot_listen(key: str, address: str) -> str:
    return f"{key}: cannot listen on {address}: the port is in use or the address is not of this machine"
