"""The slave's control server: takes each order to the runtime, and its answer or error back.

Errors leave by their class (transport/control.py). It does not know what orders mean.
"""

from __future__ import annotations

from typing import Any

from dips.protocol.effects import Order
from dips.slave.runtime import SlaveRuntime
from dips.wire.generated import slave_pb2, slave_pb2_grpc
from dips.wire.messages import from_proto, wrap_oneof


class OrderServicer(slave_pb2_grpc.OrderServiceServicer):
    """Serves `OrderService`."""

    def __init__(self, runtime: SlaveRuntime) -> None:
        self._runtime = runtime

    async def Execute(self, request: slave_pb2.Order, context: Any) -> slave_pb2.Answer:  # type: ignore[override]  # gate.py
        """Carry out an order; the same (term, number) again gets the remembered answer."""
        answer = await self._runtime.execute_order(from_proto(request, Order))
        reply = wrap_oneof(answer, slave_pb2.Answer)
        assert isinstance(reply, slave_pb2.Answer)
        return reply
