"""The master's way to its slaves: one channel each, orders heard there in the order in which they were given.

An order whose connection breaks is sent again until its deadline: its number is the same, so the slave repeats its
answer and never the work. But OpenPush to a slave that nobody listens for is refused at once: a trainer stands still
for its slot, and can as well ask again. What else orders mean this file does not know.
"""

from __future__ import annotations

import asyncio
from typing import Any

from grpc import ChannelConnectivity, aio

from dips.errors import DipsError, UnavailableSlave, UnresponsiveSlave
from dips.protocol.effects import OpenPush, Order
from dips.protocol.events import OrderAnswered, OrderFailed
from dips.transport import control
from dips.wire import messages
from dips.wire.generated.slave_pb2 import Answer
from dips.wire.generated.slave_pb2_grpc import OrderServiceStub

RETRY_S = 0.1  # between two tries of one order over a link that is down


class Link:
    """One slave at one address."""

    def __init__(self, slave: str, address: str) -> None:
        self.slave, self.address = slave, address
        self._channel: aio.Channel = control.channel(address)
        self._execute: Any = OrderServiceStub(self._channel).Execute
        self._gate = asyncio.Lock()  # first come, first begun

    async def execute(self, order: Order) -> OrderAnswered | OrderFailed:
        """Have an order carried out; never raises for what a slave or a link does."""
        try:
            async with asyncio.timeout(order.deadline_s):
                answer = await self._until_heard(order)
        except TimeoutError:
            error = UnresponsiveSlave(f"no answer within {order.deadline_s:g} s from {self.address}")
            return order_failed(order, error)
        except DipsError as error:
            return order_failed(order, error)
        return OrderAnswered(order.slave, order.sinc, order.number, answer)

    async def close(self) -> None:
        await self._channel.close()

    async def _until_heard(self, order: Order) -> Any:
        """Ask until the slave has answered; the caller's timeout ends it."""
        while True:
            if isinstance(order.body, OpenPush) and not await self._listens():
                raise UnavailableSlave(f"nobody listens at {self.address}")
            try:
                reply = await control.call(
                    self._begin,
                    messages.to_proto(order),
                    deadline_s=order.deadline_s,
                    peer=f"slave {self.slave} at {self.address}",
                    unavailable=UnavailableSlave,
                )
                return messages.unwrap(reply)
            except UnavailableSlave:
                await asyncio.sleep(RETRY_S)

    async def _listens(self) -> bool:
        """Connect if need be; False as soon as that is refused."""
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state in (ChannelConnectivity.READY, ChannelConnectivity.TRANSIENT_FAILURE):
                return state is ChannelConnectivity.READY
            await self._channel.wait_for_state_change(state)

    async def _begin(self, request: Any, timeout: float) -> Answer:
        """Begin a call when the slave has heard those that were given before it; their answers may take long.

        Calls in flight at once reach the other end's handlers in any order (of 100, the ninth came as the fifteenth).
        """
        async with self._gate:
            await self._channel.channel_ready()
            call = self._execute(request, timeout=timeout)
            await call.initial_metadata()  # sent by every server of control.py before its handler begins
        reply: Answer = await call
        return reply


def order_failed(order: Order, error: DipsError) -> OrderFailed:
    return OrderFailed(order.slave, order.sinc, order.number, type(error), str(error))


class Links:
    """All slaves that have registered."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def learn(self, slave: str, address: str) -> None:
        """A slave says where its control server is; a link to another address is given up."""
        known = self._links.get(slave)
        if known is not None and known.address == address:
            return
        if known is not None:
            task = asyncio.get_running_loop().create_task(known.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._links[slave] = Link(slave, address)

    async def execute(self, order: Order) -> OrderAnswered | OrderFailed:
        """Have an order carried out by the slave that it names."""
        link = self._links.get(order.slave)
        if link is None:
            return order_failed(order, UnavailableSlave(f"{order.slave} has no address yet"))
        return await link.execute(order)

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
        if self._closing:
            await asyncio.wait(self._closing)
