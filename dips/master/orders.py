"""One order to a slave, from its first sending to the event that ends it: when to send it again, what is a failure.

Pure: the daemon's links and the simulated master send, and report here what came back. An order keeps its number when
it is sent again, so the slave repeats its answer and never the work.
"""

from __future__ import annotations

from dips.errors import DipsError, UnavailableSlave, UnresponsiveSlave
from dips.protocol.effects import OpenPush, Order
from dips.protocol.events import Answer, OrderAnswered, OrderFailed


class SentOrder:
    """An order that was first sent at `now`, on the sender's clock in seconds."""

    def __init__(self, order: Order, now: float) -> None:
        self.order, self.until = order, now + order.deadline_s

    def left_s(self, now: float) -> float:
        """How long the slave still has to answer."""
        return max(0.0, self.until - now)

    def on_progress(self, now: float) -> None:
        """Its slave works on what it was given: a deadline is for silence, and what a model's size takes is none."""
        self.until = max(self.until, now + self.order.deadline_s)

    @property
    def needs_listener(self) -> bool:
        """Should it fail at once if nobody listens at the slave's address, instead of being sent until its deadline?

        OpenPush should: a trainer stands still for its slot, and can just as well ask again.
        """
        return isinstance(self.order.body, OpenPush)

    def on_answer(self, answer: Answer) -> OrderAnswered:
        """The slave answered."""
        return OrderAnswered(self.order.slave, self.order.sinc, self.order.number, answer)

    def on_error(self, error: DipsError, now: float) -> OrderFailed | None:
        """The slave refused, or nothing came back; None: send the order again."""
        if isinstance(error, UnavailableSlave):
            return None if now < self.until else self.on_deadline()
        return self.on_refusal(error)

    def on_refusal(self, error: DipsError) -> OrderFailed:
        """It will not be carried out."""
        return OrderFailed(self.order.slave, self.order.sinc, self.order.number, type(error), str(error))

    def on_deadline(self) -> OrderFailed:
        """No answer came in time."""
        return self.on_refusal(UnresponsiveSlave(f"no answer within {self.order.deadline_s:g} s"))
