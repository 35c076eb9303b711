"""A TCP relay for ranks on nodes without a route to the slaves: ranks connect to this host, which connects to the
lanes.

Bytes are forwarded unchanged, so traffic between ranks and slaves, encrypted or not, stays between them. The relay
connects only to granted lanes: each has its own port here, the grant is rewritten to name it, and the port is closed
when grants no longer name the lane. The relay has its own thread and event loop, so that a transfer delays no
heartbeat.

Limits: MOST_LANES ports, MOST_CONNECTIONS at once, BUFFER_BYTES in each direction of each; a slow reader slows its
sender. A connection beyond the limit is closed at once, and its rank retries after a pause.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from dips.client.ipc.address import keep_alive
from dips.config import host_port, is_loopback
from dips.dataclass import replace
from dips.errors import Busy, ConfigError
from dips.protocol.effects import Grant
from dips.tasks import start_task
from dips.telemetry.logs import Log, SeldomWarnings
from dips.telemetry.refusals import count_refusal

MOST_LANES = 1024  # ports of one relay: the lanes of all slaves of a run
MOST_CONNECTIONS = 512  # ranks × lanes that transfer at once
BUFFER_BYTES = 128 << 10  # read and not yet forwarded, for each direction of a connection
CONNECT_S = 10.0  # timeout for connecting to a lane
BACKLOG = 128
ACCEPT_PAUSE_S = 0.2  # pause after a connection could not be accepted


@dataclass(eq=False)
class Port:
    """A granted lane and the listening socket that represents it here."""

    target: str
    listener: socket.socket
    address: str  # host:port given to ranks
    task: asyncio.Task[None] | None = None
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class Relay:
    """Forwards connections; `rewrite_grant` is called from the agent's loop, the rest runs on the relay's thread."""

    def __init__(self, host: str, log: Log, most_connections: int = MOST_CONNECTIONS) -> None:
        """Start the relay's thread with ports on `host`. Raises ConfigError if it is not an address of this machine."""
        self._host, self._log, self._most = host, log, most_connections
        self._failures = SeldomWarnings(log)  # of connections, on the relay's thread
        self._ports: dict[str, Port] = {}  # by target; used on the agent's side
        self._connections = 0  # this and the counters below are written by the relay's thread only
        self.passed_bytes = 0
        self.refused = 0  # connections beyond the limit
        self._open_listener().close()  # so that a wrong host is an error now, not during the first push
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()

    @property
    def open_connections(self) -> int:
        """The number of connections that are open now."""
        return self._connections

    def rewrite_grant(self, grant: Grant) -> Grant:
        """Return the grant with every lane's address replaced by one of ours.

        Raises Busy if it names too many lanes, ConfigError if a lane's plain text would leave this machine.
        """
        plain = [slave.name for slave in grant.slaves if not slave.key]
        if plain and not is_loopback(self._host):
            raise ConfigError(
                f"relay: the lanes of {', '.join(plain)} are plain, and plain text is allowed on loopback only, not at "
                f"{self._host}: give the run certificates (`tls`)"
            )
        wanted = {lane for slave in grant.slaves for lane in slave.lanes}
        if len(wanted) > MOST_LANES:
            raise Busy(f"the grant names {len(wanted)} lanes, the relay has at most {MOST_LANES} ports")
        self._forget_targets(target for target in list(self._ports) if target not in wanted)
        slaves = tuple(replace(s, lanes=tuple(self._stands_for(lane) for lane in s.lanes)) for s in grant.slaves)
        return replace(grant, slaves=slaves)

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._forget_targets(list(self._ports))
        asyncio.run_coroutine_threadsafe(self._is_drained(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- on the agent's side ---------------------------------------------------------------------------------------

    def _stands_for(self, target: str) -> str:
        port = self._ports.get(target)
        if port is None:
            listener = self._open_listener()
            number = listener.getsockname()[1]
            host = f"[{self._host}]" if ":" in self._host else self._host
            port = self._ports[target] = Port(target, listener, f"{host}:{number}")
            self._loop.call_soon_threadsafe(self._begin_accepting, port)
            self._log.info("relay_port", address=port.address, target=target)
        return port.address

    def _forget_targets(self, targets: Iterable[str]) -> None:
        for target in targets:
            port = self._ports.pop(target)
            self._loop.call_soon_threadsafe(self._end_port, port)

    def _open_listener(self) -> socket.socket:
        try:
            family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind((self._host, 0))
                listener.listen(BACKLOG)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise ConfigError(f"relay: cannot listen on {self._host}: {error.strerror or error}") from error
        listener.setblocking(False)
        return listener

    # ---- on the relay's thread -------------------------------------------------------------------------------------

    def _begin_accepting(self, port: Port) -> None:
        port.task = start_task(
            self._accept_ranks(port), lambda error: self._log.error("relay_failed", target=port.target, exc_info=error)
        )

    def _end_port(self, port: Port) -> None:
        """Close the port of a lane that is no longer granted, with its connections."""
        for task in (port.task, *port.connections):
            if task is not None:
                task.cancel()
        port.listener.close()

    async def _is_drained(self) -> None:
        while len(left := asyncio.all_tasks()) > 1:
            await asyncio.wait(left - {asyncio.current_task()})

    async def _accept_ranks(self, port: Port) -> None:
        while True:
            try:
                inner, _ = await self._loop.sock_accept(port.listener)
            except OSError as error:  # no descriptor is left, or the rank has gone already
                self._log.warning("relay_cannot_accept", target=port.target, error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if self._connections >= self._most:
                self.refused += 1
                count_refusal("relay_full")
                inner.close()
                self._failures.warning("relay_full", connections=self._connections, target=port.target)
                continue
            self._begin_connection(port, inner)

    def _begin_connection(self, port: Port, inner: socket.socket) -> None:
        """Count one rank's connection, and forward it until it ends, or the port is closed before that has begun."""

        def end_connection(task: asyncio.Task[None]) -> None:
            port.connections.discard(task)
            self._connections -= 1
            inner.close()

        self._connections += 1
        task = self._loop.create_task(self._serve_connection(port, inner))
        port.connections.add(task)
        task.add_done_callback(end_connection)

    async def _serve_connection(self, port: Port, inner: socket.socket) -> None:
        """Forward one rank's connection until either side ends it."""
        outer: socket.socket | None = None
        try:
            keep_alive(inner)
            outer = await self._connect_slave(port.target)
            ways = [self._loop.create_task(self._copy_bytes(a, b)) for a, b in ((inner, outer), (outer, inner))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, TimeoutError) as error:
            self._failures.warning("relay_cannot_reach", target=port.target, error=str(error) or type(error).__name__)
        finally:
            if outer is not None:
                outer.close()

    async def _connect_slave(self, target: str) -> socket.socket:
        host, number = host_port(target)
        found = await self._loop.getaddrinfo(host, number, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        outer = socket.socket(family, kind, protocol)
        try:
            outer.setblocking(False)
            keep_alive(outer)
            async with asyncio.timeout(CONNECT_S):
                await self._loop.sock_connect(outer, address)
        except BaseException:
            outer.close()
            raise
        return outer

    async def _copy_bytes(self, source: socket.socket, sink: socket.socket) -> None:
        """Forward bytes in one direction until it ends; reading waits until the other side has taken them."""
        buffer = bytearray(BUFFER_BYTES)
        view = memoryview(buffer)
        with suppress(OSError):  # either side has closed the connection
            while count := await self._loop.sock_recv_into(source, buffer):
                await self._loop.sock_sendall(sink, view[:count])
                self.passed_bytes += count
