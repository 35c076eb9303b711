"""The master's connections to its slaves: one gRPC channel each; orders arrive in the order in which they were given.

When an order is sent again and what counts as its failure, orders.py decides. What orders mean is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from grpc import ChannelConnectivity, aio

from dips.errors import DipsError, UnavailableSlave
from dips.master.orders import SentOrder
from dips.protocol.effects import Order
from dips.protocol.events import OrderAnswered, OrderFailed
from dips.transport import control
from dips.transport.endpoints import slave_peer
from dips.transport.tls import TlsSource
from dips.wire import messages
from dips.wire.generated.slave_pb2 import Answer
from dips.wire.generated.slave_pb2_grpc import OrderServiceStub

RESEND_PAUSE_S = 0.1  # between two sendings of one order over a link that is down


class _NobodyListens(Exception):
    """The slave's address refuses connections."""


class SlaveLink:
    """One slave at one address."""

    def __init__(self, slave: str, address: str, tls: TlsSource | None = None) -> None:
        self.slave, self.address, self._peer = slave, address, slave_peer(slave, address, tls)
        self._channel: aio.Channel = control.open_channel(self._peer)
        self._execute: Any = OrderServiceStub(self._channel).Execute
        self._gate = asyncio.Lock()  # first come, first begun
        self._timeouts: dict[SentOrder, asyncio.Timeout] = {}

    async def execute_order(self, order: Order) -> OrderAnswered | OrderFailed:
        """Have an order carried out; never raises for what a slave or a link does."""
        clock = asyncio.get_running_loop().time
        sent = SentOrder(order, clock())
        try:
            async with asyncio.timeout_at(sent.until) as timeout:
                self._timeouts[sent] = timeout
                while True:
                    ended = await self._send_once(sent, clock)
                    if ended is not None:
                        return ended
                    await asyncio.sleep(RESEND_PAUSE_S)
        except TimeoutError:
            return sent.on_deadline()
        finally:
            self._timeouts.pop(sent, None)

    def on_progress(self) -> None:
        """The slave has worked: its orders have their whole time again."""
        for sent, timeout in self._timeouts.items():
            sent.on_progress(asyncio.get_running_loop().time())
            if not timeout.expired():
                timeout.reschedule(sent.until)

    async def close(self) -> None:
        await self._channel.close()

    async def _send_once(self, sent: SentOrder, clock: Callable[[], float]) -> OrderAnswered | OrderFailed | None:
        """Send it once; None: send it again."""
        try:
            if sent.needs_listener:
                await self._find_listener()
            reply = await control.call_method(
                partial(self._begin_call, sent.needs_listener),
                messages.to_proto(sent.order),
                deadline_s=sent.order.deadline_s,
                peer=self._peer,
                unavailable=UnavailableSlave,
            )
        except _NobodyListens:
            return sent.on_refusal(UnavailableSlave(f"nobody listens at {self.address}"))
        except DipsError as error:
            return sent.on_error(error, clock())
        return sent.on_answer(messages.unwrap_oneof(reply))

    async def _find_listener(self) -> None:
        """Connect if need be; raise _NobodyListens as soon as that is refused."""
        while (state := self._channel.get_state(try_to_connect=True)) is not ChannelConnectivity.READY:
            if state is ChannelConnectivity.TRANSIENT_FAILURE:
                raise _NobodyListens
            await self._channel.wait_for_state_change(state)

    async def _begin_call(self, needs_listener: bool, request: Any, timeout: float) -> Answer:
        """Begin a call when the slave has received those made before it; their answers may take long.

        An order that needs a listener looks again when it is its turn: a dead link is noticed late. Calls in flight at
        once reach the other end's handlers in any order (of 100, the ninth came as the fifteenth).
        """
        async with self._gate:
            await (self._find_listener() if needs_listener else self._channel.channel_ready())
            call = self._execute(request, timeout=timeout)
            await call.initial_metadata()  # sent by every server of control.py before its handler begins
        reply: Answer = await call
        return reply


class SlaveLinks:
    """All slaves that have registered."""

    def __init__(self, tls: TlsSource | None = None) -> None:
        self._tls = tls
        self._links: dict[str, SlaveLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def learn_address(self, slave: str, address: str) -> None:
        """Open a link to where a slave's control server listens; one to an earlier address is closed."""
        known = self._links.get(slave)
        if known is not None and known.address == address:
            return
        if known is not None:
            task = asyncio.get_running_loop().create_task(known.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._links[slave] = SlaveLink(slave, address, self._tls)

    def on_progress(self, slave: str) -> None:
        """A slave has worked: its orders have their whole time again."""
        link = self._links.get(slave)
        if link is not None:
            link.on_progress()

    async def execute_order(self, order: Order) -> OrderAnswered | OrderFailed:
        """Have an order carried out by the slave that it names."""
        link = self._links.get(order.slave)
        if link is None:
            error = UnavailableSlave(f"{order.slave} has no address yet")
            return SentOrder(order, asyncio.get_running_loop().time()).on_refusal(error)
        return await link.execute_order(order)

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
        if self._closing:
            await asyncio.wait(self._closing)
