"""The interceptor before every handler of a server: certificate, rate, size and rights of the caller."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from cryptography import x509
from google.protobuf.message import DecodeError
from grpc import aio

from dips import errors
from dips.errors import (
    Busy,
    ConfigError,
    Corrupt,
    Denied,
    DipsError,
    LocalProtocolError,
    RemoteProtocolError,
    Unavailable,
)
from dips.identity.certificates import identity_of, utc_now
from dips.identity.names import PeerIdentity, PeerRole
from dips.identity.rights import check_enrolled, check_right
from dips.telemetry.refusals import count_refusal
from dips.transport.limits import CallLimits, HandshakeWatch, Reception, ServerLimits
from dips.transport.ordered_calls import answer_in_order
from dips.transport.tls import TlsSource

# ---- guard ----------------------------------------------------------------------------------------------------------
# The check before every handler of a server with certificates: who calls, whether the certificate is still valid, and
# whether its holder may make this call.
#
# The handshake has proven that the caller holds the key of a certificate of our authority. With each call it is checked
# again, so that a certificate that was revoked or has expired is refused within a heartbeat, also on existing
# connections.


KEPT_CALLERS = 4096  # parsed certificates; 1,000 clusters and 1,000 slaves, each renewed once
PEM_KEY = "x509_pem_cert"


@dataclass(frozen=True, slots=True)
class Caller:
    """A certificate that a peer presented in its handshake."""

    identity: PeerIdentity
    serial: int
    until: datetime


class Guard:
    """The checks of one server."""

    def __init__(
        self,
        source: TlsSource,
        clusters: Collection[str] | None = None,
        wall: Callable[[], datetime] = utc_now,
    ) -> None:
        """`clusters` lists those that may join; None: all with a certificate for it."""
        self._trusted = b""  # the authorities at the time when callers were parsed
        self.source, self._clusters, self._wall = source, clusters, wall
        self._callers: dict[bytes, Caller] = {}
        self._admitted: dict[str, Caller] = {}  # clusters → the certificate of their last admitted call
        self.refused: Counter[str] = Counter()  # by method
        self.handshakes = HandshakeWatch()
        # called with each refusal: caller (empty: unknown), method, request, reason
        self.on_refused: Callable[[str, str, Any, str], None] = lambda *_: None

    def check_call(self, method: str, request: Any, context: Mapping[str, Iterable[bytes]]) -> PeerIdentity:
        """Return the caller's identity; raise Denied with the reason if it may not make this call."""
        who = ""
        try:
            caller = self.read_caller(context)
            who = caller.identity.label
            self._check_standing(caller)
            check_right(caller.identity, method, request)
        except Denied as error:
            self.refused[method] += 1
            self.on_refused(who, method, request, str(error))
            raise
        if caller.identity.role is PeerRole.CLUSTER:
            self._admitted[caller.identity.name] = caller
        return caller.identity

    def identify_caller(self, context: Mapping[str, Iterable[bytes]]) -> PeerIdentity | None:
        """Return the identity in a connection's certificate, without checking rights; None if there is none."""
        try:
            return self.read_caller(context).identity
        except Denied:
            return None

    def name_caller(self, context: Mapping[str, Iterable[bytes]]) -> str:
        """Return the caller for the ledger: name and role in the certificate."""
        return self.read_caller(context).identity.label

    def change_clusters(self, clusters: Collection[str] | None) -> None:
        """Replace the list of clusters that may join; None: all with a certificate for it."""
        self._clusters = clusters

    def take_expelled(self) -> list[tuple[str, str]]:
        """Return the admitted clusters that may no longer take part, each once, with the reason; to be called now and
        then.

        The caller ends the cluster's transfers and open questions; its further calls are refused here.
        """
        expelled = list[tuple[str, str]]()
        for name, caller in list(self._admitted.items()):
            try:
                self._check_standing(caller)
            except Denied as error:
                del self._admitted[name]
                expelled.append((name, str(error)))
        return expelled

    def _check_standing(self, caller: Caller) -> None:
        """Raise Denied unless the caller's certificate is valid here and now."""
        if caller.identity.run != self.source.run:
            raise Denied(f"this is run {self.source.run!r}, the certificate is of {caller.identity}")
        if caller.serial in self.source.read_current().revoked:
            raise Denied(f"the certificate of {caller.identity} is revoked")
        if self._wall() > caller.until:
            raise Denied(f"the certificate of {caller.identity} expired at {caller.until:%Y-%m-%d %H:%M} UTC")
        check_enrolled(caller.identity, self._clusters)

    def read_caller(self, context: Mapping[str, Iterable[bytes]]) -> Caller:
        """Return what a connection's certificate says; raise Denied if there is none of a trusted authority."""
        pem = next(iter(context.get(PEM_KEY, ())), None)
        if pem is None:
            raise Denied("no certificate was shown")
        loaded = self.source.read_current()
        if loaded.ca != self._trusted:  # an authority was added or removed: connections outlive it
            self._callers.clear()
            self._trusted = loaded.ca
        if (known := self._callers.get(pem)) is not None:
            return known
        certificate = x509.load_pem_x509_certificate(pem)
        if not loaded.trusts(certificate):
            raise Denied(f"the certificate of {identity_of(certificate)} is of an authority that is trusted no longer")
        caller = Caller(identity_of(certificate), certificate.serial_number, certificate.not_valid_after_utc)
        if len(self._callers) >= KEPT_CALLERS:
            self._callers.pop(next(iter(self._callers)))
        self._callers[pem] = caller
        return caller


# ---- gate -----------------------------------------------------------------------------------------------------------
# The interceptor before every handler of a server: checks rate, size and rights, and converts errors to answers.
#
# A message is read only when its caller is within its rate and has a place for it (limits.py).
#
# A method whose requests and replies are streams takes a sequence of calls (ordered_calls.py): its handler gets one
# request at a time, like any other, and each is checked here separately.
#
# Refusals are counted by reason (telemetry/refusals.py). Messages above gRPC's own limit, and those whose caller leaves
# before they have arrived, reach no handler: they are counted as `unheard`.


ERROR_KEY = "dips-error"  # trailing metadata: the class of dips.errors that was raised
MAX_DETAIL = 4000  # bytes of a message in a status: HTTP/2 peers refuse headers above 8 KiB
COUNTED = (Denied, ConfigError, RemoteProtocolError, Corrupt, Busy, Unavailable)  # if raised by handlers

Report = Callable[[str, BaseException], None]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CallGate(aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Wraps every handler, so that none can forget to ask the guard or to convert errors."""

    def __init__(
        self,
        report: Report,
        guard: Guard | None,
        limits: ServerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._guard, self._limits, self._clock = report, guard, limits, clock
        self._calls = CallLimits(limits, clock())
        self._reception = Reception(limits)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            count_refusal("unknown_method")
            return handler
        method, waiting = handler_call_details.method, _UnheardCall()
        if handler.stream_stream is not None:
            return self._gate_stream(method, handler, waiting)
        if handler.unary_unary is None:
            return None  # none of ours is of this kind: unknown to all
        inner = cast(Callable[..., Awaitable[Any]], handler.unary_unary)
        read = cast(Callable[[bytes], Any], handler.request_deserializer)

        async def answer_errors(_: object, context: aio.ServicerContext[Any, Any]) -> Any:
            try:
                peer = self._check_rate(context)
                with self._reception.admit_call(peer, context.peer()):
                    request = await self._read_request(method, peer, context, read)
                    waiting.heard = True
                    self._check_right(method, request, context)
                    return await inner(request, context)
            except DipsError as error:
                waiting.heard, request = True, None  # a refused message is freed before its sender is answered
                await _abort_call(context, error.with_traceback(None))
            except aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 (whatever a handler raised: the caller must get an answer)
                self._report(method, error)
                await _abort_call(context, LocalProtocolError(f"{method}: {type(error).__name__}: {error}"))

        # A stream of one message is the same on the wire; here its headers can be checked before the message is read.
        return grpc.stream_unary_rpc_method_handler(cast(Any, answer_errors), None, handler.response_serializer)

    def _gate_stream(self, method: str, handler: Handler, waiting: _UnheardCall) -> Handler:
        inner = cast(Callable[..., Awaitable[Any]], handler.stream_stream)

        async def answer_request(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            waiting.heard = True
            try:
                self._check_rate(context)
                self._check_right(method, request, context)
                return await inner(request, context)
            except Denied:
                raise  # the stream ends, since this peer gets no answer on it
            except DipsError as error:
                _count_error(error)
                return error
            except Exception as error:  # noqa: BLE001 (as above)
                self._report(method, error)
                return LocalProtocolError(f"{method}: {type(error).__name__}: {error}")

        async def answer_stream(requests: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> None:
            try:
                await answer_in_order(requests, context, lambda request: answer_request(request, context))
            except Denied as error:
                await _abort_call(context, error)

        return grpc.stream_stream_rpc_method_handler(
            cast(Any, answer_stream), handler.request_deserializer, handler.response_serializer
        )

    async def _read_request(
        self, method: str, peer: str, context: aio.ServicerContext[Any, Any], read: Callable[[bytes], Any]
    ) -> Any:
        raw = await self._reception.read_message(peer, partial(_read_message, context))
        nbytes = len(raw)
        try:
            return read(raw)
        except DecodeError as error:
            raise RemoteProtocolError(f"{method}: {nbytes} bytes came that are no message of it") from error
        finally:
            del raw  # a traceback would keep it alive

    def _check_rate(self, context: aio.ServicerContext[Any, Any]) -> str:
        """Return the caller's name for rates; raise Busy if it calls too often."""
        connection = context.peer()
        caller: PeerIdentity | None = None
        if self._guard is not None:
            self._guard.handshakes.on_call(connection)
            caller = self._guard.identify_caller(context.auth_context())
        peer = connection if caller is None else str(caller)
        bounded = caller is None or caller.role is not PeerRole.MASTER
        if bounded and (excess := self._calls.find_excess(peer, self._clock())):
            count_refusal("rate")
            raise _TooManyCalls(excess)
        return peer

    def _check_right(self, method: str, request: Any, context: aio.ServicerContext[Any, Any]) -> None:
        if self._guard is not None:
            self._guard.check_call(method, request, context.auth_context())


async def _read_message(context: aio.ServicerContext[Any, Any]) -> bytes:
    """Return the message of a call, as it came. Further messages of the caller are not read."""
    raw = await context.read()
    if not isinstance(raw, bytes):
        raise asyncio.CancelledError  # it was too large for gRPC, or its caller has gone: no answer is expected
    return raw


class _UnheardCall:
    """A call whose request has not arrived; if it ends so, it was too large for gRPC or its caller left."""

    __slots__ = ("heard",)

    def __init__(self) -> None:
        self.heard = False

    def __del__(self) -> None:
        if not self.heard:
            count_refusal("unheard")


class _TooManyCalls(Busy):
    """Busy that is already counted as `rate`."""


def _count_error(error: DipsError) -> None:
    if isinstance(error, COUNTED) and not isinstance(error, _TooManyCalls):
        count_refusal(errors.treatment_of(error).label)


async def _abort_call(context: aio.ServicerContext[Any, Any], error: DipsError) -> None:
    treatment, cls = errors.treatment_of(error), Busy if isinstance(error, _TooManyCalls) else type(error)
    _count_error(error)
    detail = str(error).encode()[:MAX_DETAIL].decode(errors="ignore")
    await context.abort(grpc.StatusCode[treatment.status], detail, ((ERROR_KEY, cls.__name__),))
