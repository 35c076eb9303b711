"""Limits how many messages of one server arrive at once, of one peer and of all, and over how many connections a peer
calls.

A call is checked when its headers have arrived. Its message is read only with a place here, so unread data stays in the
callers' own memory except for a stream's window. A peer's calls wait for its own places, not for those of others. A
peer is its certificate's name, or in plain text its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from dips.errors import Busy, RemoteProtocolError
from dips.transport.limits import ServerLimits


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
