"""Orders to one slave beside a snapshot that is not answered: how long each takes, over gRPC on loopback.

Both ends are ours (master/runtime.py, transport/gate.py), in one process and one event loop, so each time is that of
two. The slave answers all but Persist at once. ORDERS orders are given, AT_ONCE of them under way: a round opens a
push of each cluster at each slave, and pulls."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from benchmarks.harness import Bench, main
from dips.ids import VersionId
from dips.master.runtime import SlaveLink
from dips.protocol.effects import Order, Persist, Ping
from dips.protocol.events import Done, OrderAnswered
from dips.transport import control
from dips.transport.limits import SLAVE_LIMITS
from dips.wire.generated import slave_pb2, slave_pb2_grpc
from dips.wire.messages import wrap_oneof

ORDERS = 1_000
AT_ONCE = 32
MOST_P99_S = 0.05  # an opening keeps a trainer waiting: far below an inner step


class HungDisk(slave_pb2_grpc.OrderServiceServicer):
    """A slave whose Persist is never answered."""

    def __init__(self) -> None:
        self.persists = asyncio.Event()

    async def Execute(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802  # one: gate.py
        if request.WhichOneof("body") == "persist":
            self.persists.set()
            await asyncio.Event().wait()
        return wrap_oneof(Done(), slave_pb2.Answer)


def measure(bench: Bench) -> None:
    """All orders, one row for each quantile."""
    took = sorted(asyncio.run(give_orders(ORDERS, AT_ONCE)))
    p50, p99 = statistics.median(took), took[int(0.99 * len(took))]
    bench.row("p50", p50, "s")
    bench.row("p99", p99, "s", against="bound", of=MOST_P99_S, least=1.0, less=True)
    bench.row("slowest", took[-1], "s")


async def give_orders(orders: int, at_once: int) -> list[float]:
    """Seconds from giving each order to its answer."""
    slave = HungDisk()
    server = control.make_server(lambda method, error: print(method, error), None, SLAVE_LIMITS)
    slave_pb2_grpc.add_OrderServiceServicer_to_server(slave, server)
    port = control.bind_server(server, "127.0.0.1:0", "slaves.listen")
    await server.start()
    link, numbers, took = SlaveLink("s", f"127.0.0.1:{port}"), iter(range(2, 2 + orders)), list[float]()

    async def give() -> None:
        for number in numbers:
            begun = time.perf_counter()
            answer = await link.execute_order(Order("s", 1, 1, number, Ping(), 10.0))
            took.append(time.perf_counter() - begun)
            assert isinstance(answer, OrderAnswered), answer

    snapshot = asyncio.create_task(link.execute_order(Order("s", 1, 1, 1, Persist(VersionId(1, 1)), 300.0)))
    await slave.persists.wait()
    await asyncio.gather(*[give() for _ in range(at_once)])
    assert not snapshot.done()
    snapshot.cancel()
    await link.close()
    await server.stop(None)
    return took


if __name__ == "__main__":
    main("orders", __doc__, measure)
