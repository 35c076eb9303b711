"""An order under way: sent again until its deadline, and every failure has its kind."""

from __future__ import annotations

import pytest

from dips.errors import Busy, DipsError, StaleTerm, UnavailableSlave, UnresponsiveSlave
from dips.ids import PushId
from dips.master.orders import SentOrder
from dips.protocol.effects import OpenPush, Order, OrderBody, Ping
from dips.protocol.events import Done, OrderAnswered


def sent(body: OrderBody | None = None) -> SentOrder:
    """An order with a deadline of 4 s, sent at 10."""
    return SentOrder(Order("s", 2, 3, 7, body or Ping(), 4.0), 10.0)


def test_an_answer_bears_the_number_of_its_order() -> None:
    """The event names the slave, its incarnation and the order, so that a late one can be recognised."""
    assert sent().on_answer(Done()) == OrderAnswered("s", 2, 7, Done())


def test_a_broken_link_is_tried_again_until_the_deadline() -> None:
    """Nothing came back: send again; at the deadline the slave counts as unresponsive to this order."""
    order, nothing = sent(), UnavailableSlave("reset")
    assert order.on_error(nothing, 10.5) is None
    assert order.on_error(nothing, 13.9) is None
    assert (order.left_s(13.0), order.left_s(20.0)) == (1.0, 0.0)
    failed = order.on_error(nothing, 14.0)
    assert failed == order.on_deadline()
    assert failed is not None and (failed.slave, failed.sinc, failed.number, failed.error) == (
        "s",
        2,
        7,
        UnresponsiveSlave,
    )


@pytest.mark.parametrize("error", [StaleTerm("has seen 4"), Busy("no slot")])
def test_a_refusal_ends_the_order_at_once(error: DipsError) -> None:
    """A later master exists, or the slave will not: neither gets better by sending again."""
    failed = sent().on_error(error, 10.1)
    assert failed is not None and (failed.error, failed.reason) == (type(error), str(error))


def test_only_open_push_needs_a_listener() -> None:
    """A trainer stands still for its slot: it is refused at once where nobody listens; everything else can wait."""
    assert sent(OpenPush(PushId("a", 1, 1), 1, 60.0)).needs_listener
    assert not sent().needs_listener


def test_work_that_goes_on_gives_an_order_its_whole_time_again() -> None:
    """A deadline is for silence: a snapshot of an hour passes none, and a slave that has stopped does."""
    order, nothing = sent(), UnavailableSlave("reset")
    order.on_progress(13.0)
    assert order.on_error(nothing, 16.9) is None
    order.on_progress(16.9)
    order.on_progress(5.0)
    assert order.left_s(16.9) == 4.0
    assert order.on_error(nothing, 20.9) == order.on_deadline()
