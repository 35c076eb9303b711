"""What waits and what runs beside what, from an order's arrival to its answer; and reports, sent until acknowledged."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from dips.errors import (
    Busy,
    BusyDisk,
    Denied,
    FailedDisk,
    RemoteProtocolError,
    StaleIncarnation,
    StalePush,
    UnavailableMaster,
    UnreadSnapshot,
)
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import DropPush, OpenPull, OpenPush, Order, OrderBody, Persist, Ping, Retire
from dips.protocol.events import Answer, Done, Persisted, PushRefused, PushStaged
from dips.protocol.heartbeats import MOST_WAITS, OrderWait
from dips.slave.core import OrderDesk, ReportQueue
from dips.slave.ports import (
    AnswerOrder,
    CallMaster,
    EndSlave,
    PushOver,
    ShardMethod,
    ShardWork,
    SlaveAction,
    SlaveTiming,
    Staged,
    Ticket,
    WorkOnDisk,
    WriteLog,
)
from dips.slave.shard import Shard

TIMING = SlaveTiming(2.0, call_s=10.0, backoff_s=(0.2, 5.0), busy_retry_s=0.5)
P1, P2 = PushId("x", 1, 1), PushId("x", 1, 2)
V1 = VersionId(1, 1)
PERSISTED = Persisted(V1, "d1ge57")
FULL = Busy("all slots are in use")


def order(number: int, body: OrderBody, deadline_s: float = 10.0) -> Order:
    return Order("s", 1, 1, number, body, deadline_s)


def work_of(actions: list[SlaveAction]) -> list[SlaveAction]:
    return [action for action in actions if not isinstance(action, WriteLog)]


def execute(ticket: Ticket, given: Order) -> ShardWork:
    return ShardWork(ShardMethod.EXECUTE, (given,), ticket)


def begin_on_disk(ticket: Ticket, given: Order) -> ShardWork:
    return ShardWork(ShardMethod.BEGIN_ON_DISK, (given,), ticket)


def end_on_disk(ticket: Ticket, given: Order, result: Answer | Exception) -> ShardWork:
    return ShardWork(ShardMethod.END_ON_DISK, (given, result), ticket)


def write() -> Persisted:
    return PERSISTED


def test_the_core_asks_for_methods_that_the_shard_has() -> None:
    """`Shard.perform_work` finds each by its name."""
    assert [method for method in ShardMethod if not callable(getattr(Shard, method.value, None))] == []


# ---- orders --------------------------------------------------------------------------------------------------------


def test_a_busy_order_is_tried_again_until_shortly_before_its_deadline_and_holds_up_no_other() -> None:
    """Of 10 s, 8 are for trying; a DropPush behind it, which may free its slot, is carried out meanwhile."""
    desk = OrderDesk(TIMING)
    opening, dropping = order(1, OpenPush(P1, 1, 60.0)), order(2, DropPush(P2, "over"))
    assert desk.take_order(1, opening, 0.0) == [execute(1, opening)]
    assert desk.on_executed(1, FULL, 0.1) == []
    assert desk.take_order(2, dropping, 0.2) == [execute(2, dropping)]
    assert desk.on_executed(2, Done(), 0.3) == [AnswerOrder(2, Done())]
    assert desk.next_deadline() == 0.6
    assert desk.tick(0.5) == []
    assert desk.tick(0.6) == [execute(1, opening)]
    assert desk.tick(0.7) == []
    assert desk.on_executed(1, FULL, 7.5) == []
    assert desk.tick(8.0) == [execute(1, opening)]
    assert work_of(desk.on_executed(1, FULL, 8.0)) == [AnswerOrder(1, FULL)]
    assert desk.next_deadline() == inf


def test_an_error_is_the_answer() -> None:
    """Other errors are not tried again: whoever gave the order learns their class."""
    desk, error = OrderDesk(TIMING), StaleIncarnation("this is 2")
    desk.take_order(1, order(1, OpenPush(P1, 1, 60.0)), 0.0)
    answered, logged = desk.on_executed(1, error, 0.1)
    assert answered == AnswerOrder(1, error)
    assert isinstance(logged, WriteLog)
    assert logged.fields["error"] == "StaleIncarnation"


def test_an_order_whose_giver_hung_up_is_not_tried_again() -> None:
    """Neither while it waits nor after a try that was under way, whose answer nobody reads: it would take a slot that
    another waits for.
    """
    desk = OrderDesk(TIMING)
    desk.take_order(1, order(1, OpenPush(P1, 1, 60.0)), 0.0)
    desk.drop_order(1)
    assert work_of(desk.on_executed(1, FULL, 0.1)) == [AnswerOrder(1, FULL)]
    desk.take_order(2, order(2, OpenPush(P1, 1, 60.0)), 1.0)
    assert desk.on_executed(2, FULL, 1.1) == []
    desk.drop_order(2)
    assert desk.next_deadline() == inf and desk.tick(9.0) == []
    desk.drop_order(2)


def test_snapshots_are_written_one_after_another_beside_other_orders() -> None:
    """A repeated Persist waits for the first one, and then finds it done."""
    desk = OrderDesk(TIMING)
    persist, opening = order(1, Persist(V1)), order(2, OpenPush(P1, 1, 60.0))
    assert desk.take_order(1, persist, 0.0) == [begin_on_disk(1, persist)]
    assert desk.take_order(2, persist, 0.0) == []
    assert desk.on_disk_begun(1, write, 0.1) == [WorkOnDisk(1, persist, write)]
    assert desk.take_order(3, opening, 0.2) == [execute(3, opening)]
    assert desk.on_disk_worked(1, PERSISTED) == [end_on_disk(1, persist, PERSISTED)]
    assert desk.on_disk_ended(1, PERSISTED, 9.0) == [AnswerOrder(1, PERSISTED), begin_on_disk(2, persist)]
    assert desk.on_disk_begun(2, PERSISTED, 9.1) == [AnswerOrder(2, PERSISTED)]


def test_snapshots_are_deleted_beside_other_orders() -> None:
    """A disk that takes long to free a file holds up no order, but the next one to the disk."""
    desk = OrderDesk(TIMING)
    retire, persist, dropping = order(1, Retire((V1,))), order(2, Persist(V1)), order(3, DropPush(P1, "over"))
    assert desk.take_order(1, retire, 0.0) == [begin_on_disk(1, retire)]
    assert desk.on_disk_begun(1, Done, 0.1) == [WorkOnDisk(1, retire, Done)]
    assert desk.take_order(2, persist, 0.2) == []
    assert desk.take_order(3, dropping, 0.3) == [execute(3, dropping)]
    assert desk.on_disk_worked(1, Done()) == [end_on_disk(1, retire, Done())]
    assert desk.on_disk_ended(1, Done(), 9.0) == [AnswerOrder(1, Done()), begin_on_disk(2, persist)]


def test_a_writer_that_fails_is_ended_before_its_error_is_told() -> None:
    """The shard must know that its θ may be taken again; the next snapshot has its turn."""
    desk, full = OrderDesk(TIMING), FailedDisk("no room")
    first, second = order(1, Persist(V1)), order(2, Persist(V1))
    desk.take_order(1, first, 0.0)
    desk.take_order(2, second, 0.0)
    desk.on_disk_begun(1, write, 0.1)
    assert desk.on_disk_worked(1, full) == [end_on_disk(1, first, full)]
    assert work_of(desk.on_disk_ended(1, full, 0.2)) == [AnswerOrder(1, full), begin_on_disk(2, second)]


def test_what_waits_for_a_snapshot_is_tried_for_as_long_as_that_is_written() -> None:
    """An Apply that finds the disk busy is no failure of the Apply; without a writer its deadline holds."""
    desk, busy = OrderDesk(TIMING), BusyDisk("the snapshot of v1@r1 is being written")
    desk.take_order(1, order(1, Persist(V1)), 0.0)
    desk.on_disk_begun(1, write, 0.1)
    desk.take_order(2, order(2, DropPush(P1, "")), 0.2)
    assert desk.on_executed(2, busy, 50.0) == []
    desk.on_disk_worked(1, PERSISTED)
    desk.on_disk_ended(1, PERSISTED, 51.0)
    assert work_of(desk.on_executed(2, busy, 52.0)) == [AnswerOrder(2, busy)]


def test_an_archive_is_read_in_its_turn_before_it_is_pulled() -> None:
    """The shard refuses the pull of a version that nobody has read: the disk reads it behind the snapshot that it
    writes, however long that takes, and other orders do not wait.
    """
    desk, pull = OrderDesk(TIMING), order(2, OpenPull(PullId("x", 1, 1), V1), 10.0)
    persist = order(1, Persist(V1))
    desk.take_order(1, persist, 0.0)
    desk.on_disk_begun(1, write, 0.1)
    assert desk.take_order(2, pull, 0.2) == [execute(2, pull)]
    assert desk.on_executed(2, UnreadSnapshot("v1@r1 must be read first"), 0.3) == []
    assert [wait.kind for wait in desk.list_waits(50.0)] == ["Persist", "OpenPull"]
    assert work_of(desk.on_disk_ended(1, PERSISTED, 50.0)) == [AnswerOrder(1, PERSISTED), begin_on_disk(2, pull)]
    assert desk.on_disk_begun(2, write, 50.1) == [WorkOnDisk(2, pull, write)]
    assert desk.on_disk_worked(2, Done()) == [end_on_disk(2, pull, Done())]
    assert desk.on_disk_ended(2, Done(), 51.0) == [AnswerOrder(2, Done())]


def test_what_waits_for_the_disk_is_told_and_nothing_else() -> None:
    """A snapshot being written, a deletion behind it, an Apply that needs it done: until each of them is answered."""
    desk = OrderDesk(TIMING)
    persist, retire, apply, opening = (
        order(1, Persist(V1)), order(2, Retire((V1,))), order(3, Ping()), order(4, OpenPush(P1, 1, 60.0)),
    )  # fmt: skip
    for ticket, given in enumerate((persist, retire, apply, opening), 1):
        desk.take_order(ticket, given, float(ticket))
    desk.on_executed(3, BusyDisk("the snapshot is being written"), 4.0)
    desk.on_executed(4, FULL, 4.0)
    told = [OrderWait(1, "Persist", 9.0), OrderWait(2, "Retire", 8.0), OrderWait(3, "Ping", 7.0)]
    assert desk.list_waits(10.0) == tuple(told)
    desk.on_disk_begun(1, write, 10.0)
    desk.on_disk_ended(1, PERSISTED, 11.0)
    assert [wait.number for wait in desk.list_waits(11.0)] == [2, 3]
    for number in range(5, 5 + 2 * MOST_WAITS):
        desk.take_order(number, order(number, Persist(V1)), 12.0)
    assert [wait.number for wait in desk.list_waits(13.0)][:2] == [2, 3] and len(desk.list_waits(13.0)) == MOST_WAITS


def test_only_who_waits_for_the_disk_waits_as_long_as_it_works() -> None:
    """A push that finds no slot while a snapshot is written is refused before its deadline: its cluster trains on."""
    desk = OrderDesk(TIMING)
    desk.take_order(1, order(1, Persist(V1), 300.0), 0.0)
    for ticket, found in ((2, FULL), (3, BusyDisk("the snapshot is being written"))):
        desk.take_order(ticket, order(ticket, OpenPush(P1, 1, 60.0)), 0.0)
        desk.on_executed(ticket, found, 7.9)
    assert desk.next_deadline() == 8.4
    assert work_of(desk.tick(8.4)) == [execute(3, order(3, OpenPush(P1, 1, 60.0)))]


# ---- reports -------------------------------------------------------------------------------------------------------


class FullPauses(Random):
    """Every pause has its full length."""

    def uniform(self, a: float, b: float) -> float:
        return b


def queue() -> ReportQueue:
    return ReportQueue("s", TIMING, lambda: 7, FullPauses())


def test_reports_are_told_one_after_another_until_heard() -> None:
    """The first is repeated with backoff while the master is away; the second waits behind it."""
    reports = queue()
    staged, refused = PushStaged("s", 7, P1, 12), PushRefused("s", 7, P2, "it stalled")
    assert reports.add_reports([Staged(P1, 12), PushOver(P2, "it stalled")]) == [CallMaster(staged, 10.0)]
    assert reports.on_reply(UnavailableMaster("away"), 1.0) == []
    assert reports.next_deadline() == 1.2
    assert reports.tick(1.2) == [CallMaster(staged, 10.0)]
    assert reports.tick(1.3) == []
    assert reports.on_reply(Busy("later"), 2.0) == []
    assert reports.next_deadline() == 2.4
    reports.tick(2.4)
    assert reports.on_reply(None, 2.5) == [CallMaster(refused, 10.0)]
    assert reports.on_reply(UnavailableMaster("away"), 3.0) == []
    assert reports.next_deadline() == 3.2, "the master was heard meanwhile: the pause is the first again"
    reports.tick(3.2)
    assert reports.on_reply(None, 3.3) == []
    assert reports.next_deadline() == inf


def test_a_master_that_knows_better_is_not_told_again() -> None:
    """Stale: it learns the truth with the next Register. What no waiting repairs ends the slave."""
    reports, wrong = queue(), RemoteProtocolError("no such push")
    reports.add_reports([Staged(P1, 12)])
    assert work_of(reports.on_reply(StalePush("over"), 0.1)) == []
    assert reports.add_reports([Staged(P2, 12)]) == [CallMaster(PushStaged("s", 7, P2, 12), 10.0)]
    assert reports.on_reply(wrong, 0.2) == [EndSlave(wrong)]


def test_a_report_of_a_certificate_that_has_ended_is_told_again() -> None:
    """It ended the slave, which its renewed certificate did not start again."""
    reports = queue()
    reports.add_reports([Staged(P1, 12)])
    assert work_of(reports.on_reply(Denied("it expired"), 0.1)) == []
    assert work_of(reports.tick(10.0)) == [CallMaster(PushStaged("s", 7, P1, 12), 10.0)]


@pytest.mark.parametrize("busy_s", [0.1, 3.0])
def test_next_deadline_is_the_earliest_of_all_waiting_orders(busy_s: float) -> None:
    """Two orders that wait are tried again each at its time."""
    desk = OrderDesk(SlaveTiming(2.0, busy_retry_s=busy_s))
    for ticket, now in ((1, 0.0), (2, 1.0)):
        desk.take_order(ticket, order(ticket, OpenPush(P1, 1, 60.0)), now)
        desk.on_executed(ticket, FULL, now)
    assert desk.next_deadline() == busy_s
    assert [a.ticket for a in desk.tick(busy_s) if isinstance(a, ShardWork)] == [1]
    assert desk.next_deadline() == 1.0 + busy_s
