"""Unanswered orders to slaves by their number, and their fanouts. Pure.

What must stay true: a fanout is in the book as long as one of its orders is; answers to forgotten orders are ignored.
The cost of an answer does not depend on the number of open orders.
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
        """Number one order of a fanout and add it as unanswered."""
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
        """Return (fanout, order) of the open order with this number; None if it is not open."""
        return self.orders.get(number)

    def remove_order(self, number: int) -> tuple[Fanout, Order]:
        """Remove an order, so that its answer is ignored; its fanout still waits."""
        fanout, _ = found = self.orders.pop(number)
        fanout.unanswered -= 1
        if not fanout.unanswered:
            del self.fanouts[fanout.kind][fanout.first]
        return found

    def forget_fanouts(self, kinds: frozenset[FanoutKind], subject: Subject | None = None) -> None:
        """Remove all orders of these kinds, about `subject` or about anything."""
        for kind in sorted(kinds):
            for fanout in list(self.fanouts.get(kind, {}).values()):
                if subject is None or fanout.subject == subject:
                    for number in fanout.waiting.values():
                        if number in self.orders:
                            self.remove_order(number)

    def orders_of(self, slave: str, *kinds: FanoutKind) -> Iterator[int]:
        """Iterate over the numbers of the open orders to one slave, of these kinds or of any."""
        for kind in kinds or tuple(self.fanouts):
            for fanout in self.fanouts.get(kind, {}).values():
                number = fanout.waiting.get(slave)
                if number is not None and number in self.orders:
                    yield number
