"""The slave's control server: takes one order at a time to the shard's owner, and its answer back.

An order that finds no free slot or bank changed nothing, so it is tried again until shortly before its deadline: what
holds the bank may be a reader that is about to finish, or a DropPush behind it. Errors leave by their class
(transport/control.py). It does not know what orders mean.
"""

from __future__ import annotations

import asyncio
from typing import Any

from dips.errors import Busy, DipsError
from dips.protocol.effects import Order
from dips.protocol.events import Answer
from dips.slave.owner import Owner
from dips.telemetry.logs import Log
from dips.wire.generated import slave_pb2, slave_pb2_grpc
from dips.wire.messages import from_proto, wrap

BUSY_RETRY_S = 0.05  # how soon a busy pool is looked at again
ANSWER_SHARE = 0.8  # of an order's deadline is ours to try; the rest brings the answer home


class OrderServicer(slave_pb2_grpc.OrderServiceServicer):
    """Serves `OrderService`."""

    def __init__(self, owner: Owner, log: Log) -> None:
        self._owner = owner
        self._log = log

    async def Execute(self, request: slave_pb2.Order, context: Any) -> slave_pb2.Answer:
        """Carry out an order; the same (term, number) again gets the remembered answer."""
        order = from_proto(request, Order)
        try:
            answer = await self._execute(order)
        except DipsError as error:
            kind = type(order.body).__name__
            self._log.warning(
                "order_refused", kind=kind, number=order.number, error=type(error).__name__, why=str(error)
            )
            raise
        reply = wrap(answer, slave_pb2.Answer)
        assert isinstance(reply, slave_pb2.Answer)
        return reply

    async def _execute(self, order: Order) -> Answer:
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWER_SHARE * order.deadline_s
        while True:
            try:
                return await self._owner.execute(order)
            except Busy:
                if loop.time() + BUSY_RETRY_S > until:
                    raise
            await asyncio.sleep(BUSY_RETRY_S)
