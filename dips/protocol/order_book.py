"""Orders to slaves that are not answered, by their number, and the fanouts that they belong to. Pure.

What must stay true: a fanout stands here as long as one of its orders does; an order that was forgotten is answered in
vain. An answer costs the same however many orders are open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dips.protocol.effects import Order, OrderBody
from dips.protocol.entities import Fanout, Subject
from dips.protocol.enums import FanoutKind


@dataclass
class OrderBook:
    """All open orders of one term."""

    orders: dict[int, tuple[Fanout, Order]] = field(default_factory=dict)
    fanouts: dict[FanoutKind, dict[int, Fanout]] = field(default_factory=dict)  # by the number of their first order
    last_number: int = 0

    def give_order(self, fanout: Fanout, slave: str, sinc: int, term: int, body: OrderBody, deadline_s: float) -> Order:
        """Number one order of a fanout, which waits for its answer from now on."""
        self.last_number = number = self.last_number + 1
        order = Order(slave, sinc, term, number, body, deadline_s)
        self.orders[number] = (fanout, order)
        fanout.waiting[slave] = number
        fanout.unanswered += 1
        if not fanout.first:
            fanout.first = number
        if fanout.unanswered == 1:
            self.fanouts.setdefault(fanout.kind, {})[fanout.first] = fanout
        return order

    def find_order(self, number: int) -> tuple[Fanout, Order] | None:
        """The open order with this number."""
        return self.orders.get(number)

    def remove_order(self, number: int) -> tuple[Fanout, Order]:
        """Whatever is answered to this order from now on no longer matters; its fanout waits on."""
        fanout, _ = found = self.orders.pop(number)
        fanout.unanswered -= 1
        if not fanout.unanswered:
            del self.fanouts[fanout.kind][fanout.first]
        return found

    def forget_fanouts(self, kinds: frozenset[FanoutKind], subject: Subject | None = None) -> None:
        """Likewise for all orders of these kinds, about `subject` or about anything."""
        for kind in sorted(kinds):
            for fanout in list(self.fanouts.get(kind, {}).values()):
                if subject is None or fanout.subject == subject:
                    for number in fanout.waiting.values():
                        if number in self.orders:
                            self.remove_order(number)

    def orders_of(self, slave: str, *kinds: FanoutKind) -> Iterator[int]:
        """Numbers of the open orders to one slave, of these kinds or of any."""
        for kind in kinds or tuple(self.fanouts):
            for fanout in self.fanouts.get(kind, {}).values():
                number = fanout.waiting.get(slave)
                if number is not None and number in self.orders:
                    yield number
