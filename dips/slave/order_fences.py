"""What keeps yesterday's orders out and makes a repeated order harmless.

Three fences: the master's term (highest seen), this slave's incarnation, and the order's number, under which the
answer is remembered. One that is Busy or at work has none yet, however many others get theirs meanwhile. A term rises
only by the answer to this slave's own Register, since it knows whom it asked; an order of a later one is sent again
until then. It does not know what an order does.
"""

from __future__ import annotations

from collections import OrderedDict

from dips.errors import LocalProtocolError, RemoteProtocolError, Stale, StaleIncarnation, StaleTerm, UnavailableSlave
from dips.protocol.claims import MOST_TERMS_AHEAD
from dips.protocol.effects import Order, OrderBody
from dips.protocol.events import Answer

REMEMBERED = 4096  # answers of a term, and orders without one; more than a master ever has under way at one slave


class OrderFences:
    """The term and incarnation of one slave, and the answers that it gave in this term."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.term = 0
        self.sinc = 0  # 0: not yet registered
        self._answers: OrderedDict[int, tuple[OrderBody, Answer]] = OrderedDict()
        self._forgotten = -1  # the highest number whose answer is no longer remembered
        self._begun: OrderedDict[int, None] = OrderedDict()  # numbers that were let pass and have no answer

    def see_term(self, term: int, whose: str) -> None:
        """Take note of a master's term; raise StaleTerm if it has a successor, RemoteProtocolError if it is absurd."""
        if term < self.term:
            raise StaleTerm(f"{whose} bears term {term}; {self._name} has seen term {self.term}")
        if term > self.term + MOST_TERMS_AHEAD:
            most = self.term + MOST_TERMS_AHEAD  # believed, it would lock out every true master for ever
            raise RemoteProtocolError(f"{whose} bears term {term}; {self._name} expected at most {most}")
        if term > self.term:
            self.term = term
            self._answers.clear()
            self._begun.clear()
            self._forgotten = -1

    def admit_order(self, order: Order) -> Answer | None:
        """Let a new order pass (None) or return the answer that it already got; raise if it is not for this
        incarnation.
        """
        what = f"order {order.number} ({type(order.body).__name__})"
        if order.slave != self._name:
            raise RemoteProtocolError(f"{what} is for {order.slave}, and came to {self._name}")
        if order.term > self.term:  # whoever reaches our port could lock out the true master by it
            raise UnavailableSlave(f"{what} bears term {order.term}; {self._name} follows it as soon as it registers")
        self.see_term(order.term, what)
        if order.sinc != self.sinc:
            raise StaleIncarnation(f"{what} is for incarnation {order.sinc} of {self._name}, this is {self.sinc}")
        if order.number in self._answers:
            body, answer = self._answers[order.number]
            if body != order.body:
                raise LocalProtocolError(f"{what} was {body} before and is {order.body} now")
            return answer
        if order.number <= self._forgotten and order.number not in self._begun:
            raise Stale(f"{what} is older than the last {REMEMBERED} answers of term {self.term}")
        self._begun[order.number] = None
        if len(self._begun) > REMEMBERED:
            self._begun.popitem(last=False)
        return None

    def has_answered(self, number: int) -> bool:
        """Whether the answer of an order of this term is remembered."""
        return number in self._answers

    def remember_answer(self, order: Order, answer: Answer) -> None:
        """Keep the answer for repetitions."""
        self._begun.pop(order.number, None)
        self._answers[order.number] = (order.body, answer)
        if len(self._answers) > REMEMBERED:
            number, _ = self._answers.popitem(last=False)
            self._forgotten = max(self._forgotten, number)
