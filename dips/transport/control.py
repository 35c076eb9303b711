"""The control flow's sockets: gRPC servers and channels, with a deadline on every call and one mapping of errors.

An error raised by a handler leaves as the gRPC status of its row in errors.TREATMENTS, its class named in the trailing
metadata `dips-error`; `call_method` raises that class again at the other end. A peer that does not answer is
Unavailable…, whether the link, the process or the deadline ended the wait. What the messages mean this file does not
know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dips import errors
from dips.errors import ConfigError, DipsError, LocalProtocolError, RemoteProtocolError, Unavailable, class_named
from dips.identity.tls_files import LoadedTls
from dips.transport.endpoints import Endpoint
from dips.transport.guard import Guard
from dips.transport.renewing import RenewingChannel
from dips.transport.tls import make_channel_credentials, make_server_credentials
from dips.wire.messages import MAX_MESSAGE_BYTES

ERROR_KEY = "dips-error"  # trailing metadata: the class of dips.errors that was raised
MAX_DETAIL = 4000  # bytes of a message in a status: HTTP/2 peers refuse headers above 8 KiB
KEEPALIVE_MS = 10_000  # clients ping so often, also without calls: a NAT forgets a silent link
KEEPALIVE_TIMEOUT_MS = 5_000  # and give up when a ping is unanswered for so long
# servers permit pings twice as often as we send them; else GOAWAY after 5 s (docs/rationale.md#35)
MIN_PING_INTERVAL_MS = 5_000
MAX_RECONNECT_BACKOFF_MS = 2_000  # a master that is back is found within two seconds
MAX_CONCURRENT_CALLS = 10_000  # a server's bound; room for a long poll and a heartbeat of 1,000 clusters, several times

Reply = TypeVar("Reply", bound=Message)
Report = Callable[[str, BaseException], None]

_SIZES = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
_SERVER_OPTIONS = [
    *_SIZES,
    # calls come in bursts (every cluster heartbeats after a stall): above gRPC's own 1,000 they would be cancelled
    # unheard
    ("grpc.server.max_pending_requests", MAX_CONCURRENT_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_CONCURRENT_CALLS),
    ("grpc.so_reuseport", 0),  # a second server on our port must fail, not take half of our calls
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
]
_CHANNEL_OPTIONS = [
    *_SIZES,
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
    ("grpc.enable_http_proxy", 0),
    (
        "grpc.use_local_subchannel_pool",
        1,
    ),  # a channel is a connection of its own, so heartbeats never queue behind a poll
]


def make_server(report: Report, guard: Guard | None = None) -> aio.Server:
    """Make a gRPC server whose handlers may raise DipsError.

    `report(method, error)` is called for every other exception, which the caller sees as LocalProtocolError of ours.
    `guard` stands before each handler; None: plain text, which the configuration allows on loopback only.
    """
    return aio.server(
        options=_SERVER_OPTIONS,
        interceptors=[_Interceptor(report, guard)],
        maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
    )


def bind_server(grpc_server: aio.Server, address: str, key: str, guard: Guard | None = None) -> int:
    """Listen on host:port and return the port (0 takes a free one); raise ConfigError naming `key` if it is taken."""
    try:
        if guard is None:
            port = grpc_server.add_insecure_port(address)
        else:
            port = grpc_server.add_secure_port(address, make_server_credentials(guard.source))
    except RuntimeError as error:
        raise ConfigError(_cannot_listen(key, address)) from error
    if port == 0:
        raise ConfigError(_cannot_listen(key, address))
    return port


async def serve_health(grpc_server: aio.Server, services: Sequence[str]) -> health.aio.HealthServicer:
    """Answer `grpc.health.v1.Health` for these services: SERVING from now on; call before the server starts."""
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, grpc_server)
    for service in services:
        await checker.set(service, health_pb2.HealthCheckResponse.SERVING)
    return checker


def open_channel(peer: Endpoint) -> aio.Channel:
    """Make a channel with a connection of its own; it connects at the first call and again after each loss."""
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
    """Ask `method` of a stub; raise the class of dips.errors that the peer raised.

    deadline_s   how long to wait, in seconds
    peer         who is asked
    unavailable  UnavailableMaster or UnavailableSlave: raised when nobody answers in time
    explain      if nobody answers, make a handshake and say what it says (up to 3 s more)
    """
    try:
        return await method(request, timeout=deadline_s)
    except aio.AioRpcError as error:
        failed = _to_error(error, deadline_s, peer, unavailable)
        why = await asyncio.to_thread(peer.explain_silence) if explain and isinstance(failed, Unavailable) else ""
        raise (type(failed)(f"{failed}; {why}") if why else failed) from error


# ---- errors out ---------------------------------------------------------------------------------------------------


class _Interceptor(aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Wraps every handler, so that none can forget to ask the guard or to translate."""

    def __init__(self, report: Report, guard: Guard | None) -> None:
        self._report, self._guard = report, guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if handler.unary_unary is None:
            return handler if self._guard is None else None  # nothing of ours streams: unknown to those outside
        method, inner = handler_call_details.method, handler.unary_unary

        async def answer_errors(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            try:
                if self._guard is not None:
                    self._guard.check_call(method, request, context.auth_context())
                await context.send_initial_metadata(
                    ()
                )  # "received": a caller that keeps an order of calls waits for it
                return await cast(Callable[..., Awaitable[Any]], inner)(request, context)
            except DipsError as error:
                await _abort_call(context, error)
            except aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 (whatever a handler raised: the caller must get an answer)
                self._report(method, error)
                await _abort_call(context, LocalProtocolError(f"{method}: {type(error).__name__}: {error}"))

        return grpc.unary_unary_rpc_method_handler(
            cast(Any, answer_errors), handler.request_deserializer, handler.response_serializer
        )


async def _abort_call(context: aio.ServicerContext[Any, Any], error: DipsError) -> None:
    status = grpc.StatusCode[errors.treatment_of(error).status]
    detail = str(error).encode()[:MAX_DETAIL].decode(errors="ignore")
    await context.abort(status, detail, ((ERROR_KEY, type(error).__name__),))


# ---- errors in ----------------------------------------------------------------------------------------------------

_NOBODY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


def _to_error(error: aio.AioRpcError, deadline_s: float, peer: Endpoint, unavailable: type[Unavailable]) -> DipsError:
    cls = _class_named(error)
    if cls is not None:
        return cls(error.details() or cls.__name__)
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return unavailable(f"{peer} did not answer within {deadline_s:g} s")
    if error.code() in _NOBODY:
        return unavailable(f"{peer} cannot be reached: {error.details()}")
    if (
        error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    ):  # gRPC's own: a message above MAX_MESSAGE_BYTES, or too many calls
        return RemoteProtocolError(f"{peer}: {error.details()}")
    return RemoteProtocolError(f"{peer} answered {error.code().name}, which no Di-PS does: {error.details()}")


def _class_named(error: aio.AioRpcError) -> type[DipsError] | None:
    """Find the class that the peer raised; a name that we do not know says nothing."""
    named = (str(value) for key, value in error.trailing_metadata() or () if key == ERROR_KEY)
    return next((found for name in named if (found := class_named(name)) is not None), None)


def _cannot_listen(key: str, address: str) -> str:
    return f"{key}: cannot listen on {address}: the port is in use or the address is not of this machine"
