"""The HTTP port of a daemon: who may read it, its routes, and what it reads on which thread."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from cryptography import x509
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from dips import __version__
from dips.config import host_port, is_loopback
from dips.errors import ConfigError, Denied
from dips.http import HttpSubject
from dips.http.server import CERTIFICATE, MAX_HEADER_BYTES, HttpServer, bind_socket
from dips.identity import certificates
from dips.identity.certificates import identity_of, utc_now
from dips.identity.names import PeerRole
from dips.tasks import SpacedLooks
from dips.telemetry import metrics
from dips.telemetry.logs import Log
from dips.telemetry.metrics import LAG_S, Histogram
from dips.telemetry.refusals import count_refusal, refusals_by_reason
from dips.transport.tls import TlsSource

# ---- access ---------------------------------------------------------------------------------------------------------
# Access to the HTTP port. Probes are open to all; the rest needs a certificate of the run, or the token.
#
# On loopback the port uses plain text, and every user of the machine may read, unless a token is set. A web page whose
# own name resolves to 127.0.0.1 (DNS rebinding) is recognised by the Host header.


PROBES = frozenset({"/healthz", "/readyz"})  # the kubelet has no certificate; they reveal little
READERS = frozenset({PeerRole.OPERATOR, PeerRole.VIEWER})  # besides the daemon's own name
LEAST_TOKEN, MOST_TOKEN = 16, 4096  # characters
LOOK_S = 1.0  # least time between two checks of the token's file
SILENT_S = 1.0  # for its disk to answer; then the loaded one stays in use until it does
SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """The status and reason of a refused request."""

    status: int
    reason: str


class ReaderToken:
    """The token of readers without a certificate; replaced when its file is, without a restart."""

    def __init__(self, path: Path, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Read the token; raise ConfigError if it is not usable. `report` is called if a later one is not."""
        self._path, self._report, self._lock = path, report, threading.Lock()
        self._looks = SpacedLooks(self._look_again, "http token", LOOK_S, SILENT_S, clock)
        self._digest, self._told = self._read_digest(), ""

    def matches(self, token: str) -> bool:
        """Whether it is the token, compared in constant time."""
        return hmac.compare_digest(self._current_digest(), _digest_of(token))

    def _current_digest(self) -> bytes:
        with self._lock:
            self._looks.look_if_due()
            return self._digest

    def _look_again(self) -> None:
        try:
            self._digest, self._told = self._read_digest(), ""
        except (ConfigError, OSError) as error:
            if str(error) != self._told:
                self._told = str(error)
                self._report(f"the new token is not used: {error}")

    def _read_digest(self) -> bytes:
        token = certificates.read_key_pem(self._path, "http_token").decode("ascii", "replace").strip()
        if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not token.isprintable() or " " in token:
            raise ConfigError(
                f"http_token: {self._path}: expected one word of {LEAST_TOKEN} to {MOST_TOKEN} characters "
                f"(`openssl rand -hex 32`), got {len(token)} characters"
            )
        return _digest_of(token)


class Door:
    """Decides on each request. `tls` is the certificate of the port; None: plain text, on loopback."""

    def __init__(
        self, tls: TlsSource | None, token: ReaderToken | None, wall: Callable[[], datetime] = utc_now
    ) -> None:
        self._tls, self._token, self._wall = tls, token, wall

    def check_request(self, path: str, headers: Mapping[str, str], certificate: bytes | None) -> HttpRefusal | None:
        """Return the refusal, or None. `certificate` is the DER that the handshake has verified, if any."""
        if path in PROBES:
            return None
        refusal = self._find_refusal(headers, certificate)
        if refusal is not None:
            count_refusal("http_denied")
        return refusal

    def _find_refusal(self, headers: Mapping[str, str], certificate: bytes | None) -> HttpRefusal | None:
        shown = headers.get("authorization", "")
        if self._token is not None and shown:
            if shown[: len(SCHEME)].lower() == SCHEME and self._token.matches(shown[len(SCHEME) :].strip()):
                return None
            return HttpRefusal(401, "the token is not the one of http_token")
        if self._tls is not None and certificate is not None:
            try:
                self._check_certificate(certificate, self._tls)
            except Denied as error:
                return HttpRefusal(403, str(error))
            return None
        if self._tls is None and self._token is None:
            return None if is_local_name(headers.get("host", "")) else HttpRefusal(403, "ask for it by its address")
        wanted = [
            *(["a certificate of this run"] if self._tls is not None else []),
            *(["the token of http_token (Authorization: Bearer)"] if self._token is not None else []),
        ]
        return HttpRefusal(
            401, f"expected {' or '.join(wanted)}, got neither" if wanted[1:] else f"expected {wanted[0]}"
        )

    def _check_certificate(self, der: bytes, tls: TlsSource) -> None:
        """Raise Denied if a certificate, whose signature the handshake has verified, is revoked, expired or of another
        run.
        """
        certificate = x509.load_der_x509_certificate(der)
        identity = identity_of(certificate)
        if identity.run != tls.run:
            raise Denied(f"this is run {tls.run!r}, the certificate is of {identity}")
        if identity.role not in READERS and identity != tls.read_current().identity:
            raise Denied(f"{identity} may not read here")
        if certificate.serial_number in tls.read_current().revoked:
            raise Denied(f"the certificate of {identity} is revoked")
        if self._wall() > certificate.not_valid_after_utc:
            raise Denied(f"the certificate of {identity} is expired")


def is_local_name(host: str) -> bool:
    """Whether a Host header is an address or `localhost`, with or without a port, and not a domain name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    name = name.strip("[]")
    try:
        return name in ("", "localhost") or bool(ip_address(name))
    except ValueError:
        return False


def _digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


# ---- cached view ----------------------------------------------------------------------------------------------------


MOST_AGE_S = 1.0

T = TypeVar("T")


class CachedView(Generic[T]):
    """A value that is built by the first reader who finds it old; concurrent readers wait for it. Failures are cached,
    too.
    """

    def __init__(
        self, build: Callable[[], T], most_age_s: float = MOST_AGE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._build, self._most_age_s, self._clock = build, most_age_s, clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._built: list[T] = []
        self._failure: Exception | None = None

    def read(self) -> T:
        """Return the value; raise the exception of its build. Blocks while it is built, so not for event loops."""
        with self._lock:
            if self._clock() >= self._until:
                self._build_anew()
            if self._failure is not None:
                raise self._failure
            return self._built[0]

    def _build_anew(self) -> None:
        try:
            self._built, self._failure = [self._build()], None
        except Exception as error:  # noqa: BLE001 (any exception is raised to every reader)
            self._failure = error
        self._until = self._clock() + self._most_age_s


# ---- answers --------------------------------------------------------------------------------------------------------


METHODS = ("GET", "HEAD")
Answered = tuple[bool, dict[str, Any]]
Probe = Callable[[], Awaitable[Answered]]  # (whether all is well, what to answer)
NEVER_STORED = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class SharedProbe:
    """One probe shared by all concurrent requests, so that a flood makes one call on the daemon's loop."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._asking: asyncio.Future[Answered] | None = None

    async def ask_daemon(self) -> Answered:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._probe())
        return await asyncio.shield(self._asking)


def make_app(
    health: Probe, readiness: Probe, metrics: Callable[[], bytes], threads: Executor, routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the ASGI application. `metrics` may block: it is called on `threads`."""

    def answer_probe(probe: Probe) -> Callable[[Request], Awaitable[Response]]:
        shared = SharedProbe(probe)

        async def answer(request: Request) -> Response:
            well, said = await shared.ask_daemon()
            return JSONResponse(said, 200 if well else 503, NEVER_STORED)

        return answer

    async def answer_metrics(request: Request) -> Response:
        try:
            text = await asyncio.get_running_loop().run_in_executor(threads, metrics)
        except TimeoutError:
            return JSONResponse({"error": "the daemon's loop does not answer"}, 503, NEVER_STORED)
        return Response(text, headers={**NEVER_STORED, "content-type": CONTENT_TYPE_LATEST})

    probes = {"/healthz": health, "/readyz": readiness}
    assert set(probes) == PROBES
    return Starlette(
        routes=[
            *(Route(path, answer_probe(probe), methods=METHODS) for path, probe in probes.items()),
            Route("/metrics", answer_metrics, methods=METHODS),
            *routes,
        ]
    )


class RequestGate:
    """The check before the application, which refused requests do not reach."""

    def __init__(self, app: Any, door: Door, report: Callable[[BaseException], None]) -> None:
        """`report` is called with exceptions of the application; the client only learns that there was one."""
        self._app, self._door, self._report = app, door, report

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self._refuse_request(scope)
        try:
            await (answer or self._app)(scope, receive, send)
        except Exception as error:  # logged by `report`
            self._report(error)
            raise

    def _refuse_request(self, scope: Any) -> Response | None:
        if sum(len(key) + len(value) for key, value in scope["headers"]) > MAX_HEADER_BYTES:
            # Headers that arrived at once; h11 limits those that arrive in pieces.
            return _refuse_malformed(431, f"more than {MAX_HEADER_BYTES} bytes of headers")
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        if scope["method"] not in METHODS:
            return _refuse_malformed(405, "this port is read-only: GET or HEAD", {"allow": "GET, HEAD"})
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            return _refuse_malformed(413, "no request here has a body")
        refusal = self._door.check_request(scope["path"], headers, scope[CERTIFICATE])
        if refusal is None:
            return None
        challenge = {"www-authenticate": 'Bearer realm="dips"'} if refusal.status == 401 else {}
        return _refuse(refusal.status, refusal.reason, challenge)


def _refuse_malformed(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    count_refusal("http_request")
    return _refuse(status, reason, headers)


def _refuse(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, {**NEVER_STORED, "connection": "close", **(headers or {})})


# ---- loop watch -----------------------------------------------------------------------------------------------------


WAKE_S = 0.25  # interval of wake-ups


def call_on_loop(loop: asyncio.AbstractEventLoop, ask: Callable[[], T]) -> Future[T]:
    """Have a loop call `ask`; from another thread. It is not called if the future was cancelled before."""
    answer: Future[T] = Future()

    def call() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(ask())
            except Exception as error:  # noqa: BLE001 (any exception is returned to the caller)
                answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        answer.set_exception(TimeoutError("the event loop has ended"))
    return answer


class LoopWatch:
    """Watches the loop on which it is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lag = Histogram(LAG_S)
        self._task = self.loop.create_task(self._watch(), name="loop watch")

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + WAKE_S
            await asyncio.sleep(WAKE_S)
            self.lag.observe_value(max(0.0, time.monotonic() - due))

    async def stop_watching(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def wait_for_answer(answer: Future[T], within_s: float) -> T:
    """Await, on any loop, the answer of another loop; raise TimeoutError if it does not come in time."""
    waiting: Awaitable[Any] = asyncio.wrap_future(answer)
    async with asyncio.timeout(within_s):
        result: T = await waiting
    return result


# ---- daemon ---------------------------------------------------------------------------------------------------------
# The daemon's loop builds a view at most once a second, however many clients scrape; disks are measured on a separate
# thread; text is formatted on a thread of the port. /healthz asks the loop itself each time.


PROBE_S = 2.0  # a loop that does not answer within this time is not healthy
READ_S = 5.0  # deadline for a view; Prometheus waits for 10 s
THREADS = 2  # for formatting


async def serve_http(
    address: str,
    token: Path | None,
    tls: TlsSource | None,
    subject: HttpSubject,
    log: Log,
    extra_routes: Sequence[BaseRoute] = (),
) -> Callable[[], Any]:
    """Serve at host:port from now on; return the coroutine function that stops it. Call it on the daemon's loop.

    `extra_routes` are served too, on the port's own thread, to clients that may read the metrics.

    Raise ConfigError if the port or the token is not usable.
    """
    host, port = host_port(address)
    if tls is None and not is_loopback(host):
        raise ConfigError(f"http: {address} is not loopback and needs certificates (`tls`)")
    secured = None if is_loopback(host) else tls
    report = lambda problem: log.warning("http", problem=problem)  # noqa: E731
    door = Door(secured, None if token is None else ReaderToken(token, report))
    listener = bind_socket(host, port)
    opened = _HttpPort(subject, tls)
    app = make_app(opened.check_health, opened.check_readiness, opened.text.read, opened.threads, extra_routes)
    server = HttpServer(
        RequestGate(app, door, lambda error: log.error("http_failed", exc_info=error)), listener, secured
    )
    opened.count_connections = lambda: server.connections
    server.start()
    log.info("http", address=f"{host}:{server.port}", tls=secured is not None)

    async def close() -> None:
        await asyncio.to_thread(server.close)
        await opened.close()

    return close


class _HttpPort:
    """The state of one open port, and what its routes read."""

    def __init__(self, subject: HttpSubject, tls: TlsSource | None) -> None:
        self._subject, self._tls = subject, tls
        self._watch = LoopWatch()
        self._disks = metrics.DiskLooks(self._look_at_disks)
        self.threads = ThreadPoolExecutor(THREADS, "http text")
        self.text = CachedView(self._make_text)
        self.count_connections: Callable[[], int] = lambda: 0

    async def check_health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the daemon's loop answers."""
        try:
            await wait_for_answer(call_on_loop(self._watch.loop, lambda: None), PROBE_S)
        except TimeoutError:
            return False, {"healthy": False, "reason": f"the event loop has not answered for {PROBE_S:g} s"}
        return True, {"healthy": True}

    async def check_readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the daemon can do its work, or why not."""
        try:
            reason = await wait_for_answer(call_on_loop(self._watch.loop, self._subject.explain_unready), PROBE_S)
        except TimeoutError:
            reason = f"the event loop has not answered for {PROBE_S:g} s"
        return not reason, {"ready": not reason, "reason": reason}

    def _look_at_disks(self) -> dict[str, Any]:
        return {"disks": metrics.measure_disks(self._subject.directories), **self._subject.look()}

    def _make_text(self) -> bytes:
        reading = call_on_loop(self._watch.loop, lambda: (self._subject.read(), self._subject.explain_unready()))
        looked = self._disks.read_newest()
        status, unready = reading.result(READ_S)
        loaded = None if self._tls is None else self._tls.read_current()
        ours = {
            "role": self._subject.role,
            "version": __version__,
            "ready": not unready,
            **metrics.read_process(),
            "lag": self._watch.lag,
            "expires": None if loaded is None else loaded.until.timestamp(),
            "issued": None if loaded is None else loaded.since.timestamp(),
            "connections": self.count_connections(),
            "refusals": refusals_by_reason(),
            **looked,
        }
        registry = CollectorRegistry(auto_describe=False)
        families = chain(self._subject.collect({**status, **looked}), metrics.collect(ours))
        registry.register(_Found(metrics.add_run(families, self._subject.run)))
        return generate_latest(registry)

    async def close(self) -> None:
        self._disks.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        await self._watch.stop_watching()


class _Found(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
