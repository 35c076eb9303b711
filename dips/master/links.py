"""The master's connections to its slaves: one gRPC channel each; orders arrive in the order in which they were given.

No order waits for the answer of another (transport/ordered_calls.py), since a snapshot takes minutes. orders.py decides
when an order is sent again and what counts as its failure. The meaning of orders is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from grpc import aio

from dips.errors import DipsError, UnavailableSlave
from dips.master.orders import SentOrder
from dips.master.outbox import SlaveProgress
from dips.protocol.effects import Order
from dips.protocol.events import OrderAnswered, OrderFailed
from dips.transport import control
from dips.transport.endpoints import slave_peer
from dips.transport.ordered_calls import NobodyListens, OrderedCalls
from dips.transport.tls import TlsSource
from dips.wire import messages
from dips.wire.generated.slave_pb2_grpc import OrderServiceStub

RESEND_PAUSE_S = 0.1  # before an order is sent again to a slave that cannot take it yet


class SlaveLink:
    """The connection to one slave at one address."""

    def __init__(self, slave: str, address: str, tls: TlsSource | None = None) -> None:
        self.slave, self.address, peer = slave, address, slave_peer(slave, address, tls)
        self._channel: aio.Channel = control.open_channel(peer)
        self._calls = OrderedCalls(
            self._channel,
            OrderServiceStub(self._channel).Execute,
            peer,
            lambda error: control.to_error(error, 0.0, peer, UnavailableSlave),
        )
        self._timeouts: dict[SentOrder, asyncio.Timeout] = {}

    async def execute_order(self, order: Order) -> OrderAnswered | OrderFailed:
        """Have an order carried out; failures of the slave or the link are returned, not raised."""
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

    def on_progress(self, progress: SlaveProgress) -> None:
        """Restart the deadlines of orders whose slave has worked, or waits for its disk."""
        for sent, timeout in self._timeouts.items():
            if progress.waiting is not None and sent.order.number not in progress.waiting:
                continue
            sent.on_progress(asyncio.get_running_loop().time(), progress.most_s)
            if not timeout.expired():
                timeout.reschedule(sent.until)

    async def close(self) -> None:
        await self._calls.close()
        await self._channel.close()

    async def _send_once(self, sent: SentOrder, clock: Callable[[], float]) -> OrderAnswered | OrderFailed | None:
        """Send the order once; return None to send it again."""
        try:
            reply = await self._calls.ask(messages.to_proto(sent.order), needs_listener=sent.needs_listener)
        except NobodyListens:
            return sent.on_refusal(UnavailableSlave(f"nobody listens at {self.address}"))
        except DipsError as error:
            return sent.on_error(error, clock())
        return sent.on_answer(messages.unwrap_oneof(reply))


class SlaveLinks:
    """The connections to all slaves that have registered."""

    def __init__(self, tls: TlsSource | None = None) -> None:
        self._tls = tls
        self._links: dict[str, SlaveLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def learn_address(self, slave: str, address: str) -> None:
        """Open a link to the address of a slave's control server; a link to an earlier address is closed."""
        known = self._links.get(slave)
        if known is not None and known.address == address:
            return
        if known is not None:
            task = asyncio.get_running_loop().create_task(known.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._links[slave] = SlaveLink(slave, address, self._tls)

    def on_progress(self, progress: SlaveProgress) -> None:
        """Restart the deadlines of a slave's orders, since it has worked or waits for its disk."""
        link = self._links.get(progress.slave)
        if link is not None:
            link.on_progress(progress)

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
