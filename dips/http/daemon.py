"""The HTTP port of a daemon: what it reads on which thread, and whether its loop answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.routing import BaseRoute

from dips import __version__
from dips.config import host_port, is_loopback
from dips.errors import ConfigError
from dips.http import HttpSubject
from dips.http.answers import CachedView, Door, ReaderToken, RequestGate, make_app
from dips.http.server import HttpServer, bind_socket
from dips.identity.certificates import utc_now
from dips.telemetry import metrics
from dips.telemetry.logs import Log
from dips.telemetry.metrics import LAG_S, Histogram
from dips.telemetry.refusals import refusals_by_reason
from dips.transport.tls import TlsSource

# ---- loop watch -----------------------------------------------------------------------------------------------------


WAKE_S = 0.25  # interval of wake-ups
T = TypeVar("T")


class LoopWatch:
    """Watches the loop on which it is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lag = Histogram(LAG_S)
        self._task = self._loop.create_task(self._watch(), name="loop watch")

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + WAKE_S
            await asyncio.sleep(WAKE_S)
            self.lag.observe_value(max(0.0, time.monotonic() - due))

    def call_on_loop(self, ask: Callable[[], T]) -> Future[T]:
        """Have the loop call `ask`; from another thread. It is not called if the future was cancelled before."""
        answer: Future[T] = Future()

        def call() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(ask())
                except Exception as error:  # noqa: BLE001 (any exception is returned to the caller)
                    answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            answer.set_exception(TimeoutError("the event loop has ended"))
        return answer

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
            await wait_for_answer(self._watch.call_on_loop(lambda: None), PROBE_S)
        except TimeoutError:
            return False, {"healthy": False, "reason": f"the event loop has not answered for {PROBE_S:g} s"}
        return True, {"healthy": True}

    async def check_readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the daemon can do its work, or why not."""
        try:
            reason = await wait_for_answer(self._watch.call_on_loop(self._subject.explain_unready), PROBE_S)
        except TimeoutError:
            reason = f"the event loop has not answered for {PROBE_S:g} s"
        return not reason, {"ready": not reason, "reason": reason}

    def _look_at_disks(self) -> dict[str, Any]:
        return {"disks": metrics.measure_disks(self._subject.directories), **self._subject.look()}

    def _make_text(self) -> bytes:
        reading = self._watch.call_on_loop(lambda: (self._subject.read(), self._subject.explain_unready()))
        looked = self._disks.read_newest()
        status, unready = reading.result(READ_S)
        ours = {
            "role": self._subject.role,
            "version": __version__,
            "ready": not unready,
            "resident": metrics.resident_bytes(),
            "lag": self._watch.lag,
            "expiry_s": None if self._tls is None else self._expiry_s(self._tls),
            "connections": self.count_connections(),
            "refusals": refusals_by_reason(),
            **looked,
        }
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Found(chain(self._subject.collect({**status, **looked}), metrics.collect(ours))))
        return generate_latest(registry)

    @staticmethod
    def _expiry_s(tls: TlsSource) -> float:
        return (tls.read_current().until - utc_now()).total_seconds()

    async def close(self) -> None:
        self._disks.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        await self._watch.stop_watching()


class _Found(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
