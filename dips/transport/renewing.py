"""A channel with the current certificate: when ours is renewed, new calls get a new connection.

gRPC fixes a channel's certificate when it is made, and a connection outlives its certificate. Open calls end on the
connection on which they began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpc import ChannelConnectivity, aio

from dips.identity.tls_files import LoadedTls
from dips.transport.tls import TlsSource

GRACE_S = 60.0  # for calls on the former connection; above the longest deadline of a call

OpenChannel = Callable[[LoadedTls], aio.Channel]


class RenewingChannel:
    """The part of `aio.Channel` that stubs and links use."""

    def __init__(self, source: TlsSource, open_channel: OpenChannel) -> None:
        self._source, self._open = source, open_channel
        self._loaded = source.read_current()
        self._channel = open_channel(self._loaded)
        self._closing: set[asyncio.Task[None]] = set()

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
            return made[1](*request, **more)

        return call_method

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        return self._current_channel().get_state(try_to_connect)

    async def wait_for_state_change(self, last: ChannelConnectivity) -> None:
        await self._current_channel().wait_for_state_change(last)

    async def channel_ready(self) -> None:
        await self._current_channel().channel_ready()

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await self._channel.close()

    def _current_channel(self) -> aio.Channel:
        loaded = self._source.read_current()
        if loaded is not self._loaded:
            former, self._loaded, self._channel = self._channel, loaded, self._open(loaded)
            task = asyncio.get_running_loop().create_task(former.close(GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._channel
