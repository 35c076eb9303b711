"""A simulated master's connection to its slaves: sends each order until it is answered, refused, or past its
deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dips.errors import UnavailableSlave
from dips.master.orders import SentOrder
from dips.master.outbox import SlaveProgress
from dips.protocol.effects import Failed, Order
from dips.protocol.events import Event
from dips.sim.heap import Heap
from dips.sim.network import Network

RESEND_S = 1.5  # after which an order without an answer is sent again under its number


class SimSlaveClient:
    """Sends orders; `pass_on` reads arrivals when the master runs, `take_event` receives the end of each order."""

    def __init__(
        self,
        heap: Heap,
        network: Network,
        pass_on: Callable[[Callable[[], None]], None],
        take_event: Callable[[Event], None],
    ) -> None:
        self._heap, self._network, self._pass_on, self._take_event = heap, network, pass_on, take_event
        self._open: dict[int, SentOrder] = {}  # orders without an answer, by number

    def send_order(self, order: Order) -> None:
        self._open[order.number] = SentOrder(order, self._heap.now)
        self._send_sent(self._open[order.number])

    def on_progress(self, progress: SlaveProgress) -> None:
        """Extend the deadlines of a slave's orders, since it has worked or waits for its disk."""
        for sent in self._open.values():
            order = sent.order
            if order.slave == progress.slave and (progress.waiting is None or order.number in progress.waiting):
                sent.on_progress(self._heap.now, progress.most_s)

    def _send_sent(self, sent: SentOrder) -> None:
        left_s = min(sent.left_s(self._heap.now), RESEND_S)

        def on_answer(answer: Any) -> None:
            self._pass_on(partial(self._on_answer, sent, answer))

        self._network.call_host("master", sent.order.slave, sent.order, left_s, on_answer)

    def _on_answer(self, sent: SentOrder, answer: Any) -> None:
        """Turn a slave's answer, refusal or silence into an event, or send the order again."""
        event: Event | None
        if answer is None:
            event = sent.on_error(UnavailableSlave("no answer"), self._heap.now)
        elif isinstance(answer, Failed):
            event = sent.on_error(answer.error(answer.message), self._heap.now)
        else:
            event = sent.on_answer(answer)
        if event is None:
            self._send_sent(sent)
        else:
            self._open.pop(sent.order.number, None)
            self._take_event(event)
