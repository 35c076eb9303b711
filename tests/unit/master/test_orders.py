"""An order under way: sent again until its deadline, and every failure has its kind."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from dips.errors import Busy, DipsError, StaleTerm, Unavailable, UnavailableSlave, UnresponsiveSlave
from dips.ids import GENESIS, PushId
from dips.master.core import MISSED_S, SentOrder, SlavePatience, SlaveProgress
from dips.master.runtime import SlaveLink, SlaveLinks
from dips.protocol.effects import OpenPush, Order, OrderBody, Ping
from dips.protocol.events import Done, OrderAnswered
from dips.protocol.heartbeats import OrderWait, SlaveHeartbeat
from dips.wire import messages
from dips.wire.generated.slave_pb2 import Answer


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
    assert failed == order.on_deadline() == order.on_error(nothing, 14.0 + MISSED_S)
    assert failed is not None and (failed.slave, failed.sinc, failed.number, failed.error) == (
        "s",
        2,
        7,
        UnresponsiveSlave,
    )


class StoppedPeer:
    """A slave whose first answer is there only after its master was stopped, when the deadline has passed."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, request: object, *, needs_listener: bool = False) -> object:
        self.asked += 1
        if self.asked == 1:
            asyncio.get_running_loop().call_soon(time.sleep, 0.3)  # SIGSTOP, as far as this loop can tell
            await asyncio.sleep(60.0)
        return Answer(done=messages.to_proto(Done()))

    async def close(self) -> None: ...


def test_a_deadline_that_passes_while_the_master_is_stopped_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read no answer in that time: the slave is asked again, and is not unresponsive."""
    monkeypatch.setattr("dips.master.core.MISSED_S", 0.1)
    peer = StoppedPeer()
    link = SlaveLink("s", "127.0.0.1:1", dial=lambda *_: cast(Any, peer))
    answer = asyncio.run(link.execute_order(Order("s", 2, 3, 7, Ping(), 0.05)))
    assert answer == OrderAnswered("s", 2, 7, Done()) and peer.asked == 2


class BusyPeer:
    """A slave that answers when it is told to."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def ask(self, request: object, *, needs_listener: bool = False) -> object:
        await self.done.wait()
        return Answer(done=messages.to_proto(Done()))

    async def close(self) -> None: ...


async def test_an_order_whose_slave_works_outlives_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for the disk have their time again with each heartbeat, and no other order has."""
    monkeypatch.setattr("dips.master.core.MISSED_S", 0.02)  # a machine that is busy for longer begins a deadline anew
    peer = BusyPeer()
    links = SlaveLinks(dial=lambda *_: cast(Any, peer))
    links.learn_address("s", "h:1")
    waits, other = (asyncio.ensure_future(links.execute_order(Order("s", 2, 3, n, Ping(), 0.1))) for n in (7, 9))
    while not other.done():
        await asyncio.sleep(0.01)
        links.on_progress(SlaveProgress("s", frozenset({7})))
    assert other.result().error is UnresponsiveSlave
    peer.done.set()
    assert await waits == OrderAnswered("s", 2, 7, Done())


class ClosingPeer:
    """The connection to an address, which takes a moment to close where there is another since."""

    def __init__(self, address: str, closed: list[str]) -> None:
        self._address, self._closed = address, closed

    async def close(self) -> None:
        await asyncio.sleep(0.02 if self._address == "h:1" else 0.0)
        self._closed.append(self._address)


async def test_a_slave_that_has_moved_has_one_link_and_none_stays_open() -> None:
    """That to its former address is closed beside the run; the same address again opens no other."""
    opened, closed = list[str](), list[str]()

    def dial(slave: str, address: str, tls: object) -> Any:
        opened.append(address)
        return ClosingPeer(address, closed)

    links = SlaveLinks(dial=dial)
    for address in ("h:1", "h:1", "h:2"):
        links.learn_address("s", address)
    await links.close()
    assert opened == ["h:1", "h:2"] and sorted(closed) == opened


async def test_an_order_to_a_slave_that_has_moved_ends() -> None:
    """It waited for its deadline on the connection that is closed; where the master was stopped meanwhile it was sent
    there once more, and ended the master with 70."""
    links, order = SlaveLinks(), Order("s", 2, 3, 7, Ping(), 60.0)
    links.learn_address("s", "127.0.0.1:1")
    former = links._links["s"]
    waiting = asyncio.ensure_future(links.execute_order(order))
    await asyncio.sleep(0)
    links.learn_address("s", "127.0.0.1:2")
    async with asyncio.timeout(20):
        ended = [await waiting, await former.execute_order(order)]
    await links.close()
    assert [(failed.number, failed.error) for failed in ended] == [(7, Unavailable)] * 2


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


# ---- what heartbeats tell of a disk --------------------------------------------------------------------------------


def heartbeat(worked: int = 0, waits: tuple[int, ...] = (), sinc: int = 1) -> SlaveHeartbeat:
    said = tuple(OrderWait(number, "Persist", 1.0) for number in waits)
    return SlaveHeartbeat("s", sinc, 1, GENESIS, (), (), 0, 0, 0, 0, 0.0, 0.0, worked, waits=said)


def test_a_disk_may_be_silent_for_compute_s_and_no_longer() -> None:
    """While heartbeats say that orders wait for it they have time, those orders alone; then it hangs, and they fail."""
    patience = SlavePatience(lambda: 100.0)
    assert patience.judge_heartbeat(heartbeat(), 0.0) is None
    assert patience.judge_heartbeat(heartbeat(waits=(7, 9)), 50.0) == SlaveProgress("s", frozenset({7, 9}), 100.0)
    assert patience.judge_heartbeat(heartbeat(waits=(7,)), 149.0) == SlaveProgress("s", frozenset({7}), 1.0)
    assert patience.judge_heartbeat(heartbeat(waits=(7,)), 150.0) is None
    assert patience.judge_heartbeat(heartbeat(8, waits=(7,)), 200.0) == SlaveProgress("s")
    assert patience.judge_heartbeat(heartbeat(8, waits=(7,)), 202.0) == SlaveProgress("s", frozenset({7}), 100.0)


def test_a_disk_has_its_time_anew_when_nothing_waited_in_between() -> None:
    """Likewise in a new process, and after a gap in which the master heard nobody."""
    for between in (heartbeat(), heartbeat(sinc=2, waits=(7,))):
        patience = SlavePatience(lambda: 100.0)
        patience.judge_heartbeat(heartbeat(waits=(7,)), 0.0)
        patience.judge_heartbeat(between, 90.0)
        assert patience.judge_heartbeat(heartbeat(sinc=between.sinc, waits=(7,)), 120.0) is not None
    patience = SlavePatience(lambda: 100.0)
    patience.judge_heartbeat(heartbeat(waits=(7,)), 0.0)
    patience.skip_gap(500.0)
    assert patience.judge_heartbeat(heartbeat(waits=(7,)), 550.0) == SlaveProgress("s", frozenset({7}), 50.0)


def test_who_waits_has_no_more_time_than_its_disk() -> None:
    """An order's deadline moves to where the disk counts as hung, and not by its whole length beyond it."""
    order = sent()
    order.on_progress(13.0, most_s=2.0)
    assert order.until == 15.0
    order.on_progress(13.0, most_s=50.0)
    assert order.until == 17.0
