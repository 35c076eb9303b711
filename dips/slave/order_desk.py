"""A slave's handling of orders, from their arrival to their answers: what waits, and what runs beside what.

Pure. An order that finds no free slot or bank has changed nothing, so it is tried again until shortly before its
deadline, and holds up no other: what it waits for may be a reader that is about to finish, or a DropPush behind it; or
a snapshot's writer, and that takes as long as it takes: heartbeats say so, since a disk that is silent for minutes in
one fsync is no slave that hangs (docs/protocol.md#timing). Snapshots are written and deleted beside other orders, one
after another, so that a repeated Persist finds the first one done. What an order means, and that a repetition gets the
same answer, the shard decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from math import inf

from dips.errors import Busy, BusyDisk, DipsError
from dips.protocol.effects import KeepSeed, Order, Persist, Retire
from dips.protocol.events import Answer
from dips.protocol.heartbeats import MOST_WAITS, OrderWait
from dips.slave.actions import (
    Actions,
    AnswerOrder,
    BeginDiskOrder,
    EndDiskOrder,
    ExecuteOrder,
    Ticket,
    WorkOnDisk,
    WriteLog,
)
from dips.slave.shard_snapshots import DiskWork
from dips.slave.standing import SlaveTiming

ON_DISK = (Persist, Retire, KeepSeed)
ANSWER_SHARE = 0.8  # of an order's deadline is ours to try; the rest brings the answer home


@dataclass(slots=True)
class OpenOrder:
    """An order that came and is not answered."""

    order: Order
    came_at: float
    until: float  # it is tried again when Busy
    needs_disk: bool = False  # it is carried out there, or waits for what is


class OrderDesk:
    """All orders that are not answered, by ticket."""

    def __init__(self, timing: SlaveTiming) -> None:
        self._timing = timing
        self._open: dict[Ticket, OpenOrder] = {}
        self._again_at: dict[Ticket, float] = {}  # when those that were Busy are tried again
        self._on_disk: deque[Ticket] = deque()  # the first is being carried out

    def next_deadline(self) -> float:
        return min(self._again_at.values()) if self._again_at else inf

    def take_order(self, ticket: Ticket, order: Order, now: float) -> Actions:
        """An order came; exactly one AnswerOrder with this ticket will follow, unless it is dropped."""
        self._open[ticket] = OpenOrder(order, now, now + ANSWER_SHARE * order.deadline_s)
        return self._begin_order(ticket)

    def drop_order(self, ticket: Ticket) -> None:
        """Nobody waits for the answer any more: do not try again. What is being carried out goes on."""
        if self._again_at.pop(ticket, None) is not None:
            del self._open[ticket]

    def tick(self, now: float) -> Actions:
        """Try the orders again whose time has come, in the order in which they came."""
        if not self._again_at:
            return []
        due = [ticket for ticket in self._open if self._again_at.get(ticket, inf) <= now]
        return [action for ticket in due for action in self._begin_order(ticket)]

    def list_waits(self, now: float) -> tuple[OrderWait, ...]:
        """Which orders wait for the disk, for a heartbeat."""
        waiting = (found for found in self._open.values() if found.needs_disk)
        return tuple(
            OrderWait(found.order.number, type(found.order.body).__name__, now - found.came_at)
            for found in islice(waiting, MOST_WAITS)
        )

    def _begin_order(self, ticket: Ticket) -> Actions:
        found = self._open[ticket]
        self._again_at.pop(ticket, None)
        found.needs_disk = isinstance(found.order.body, ON_DISK)
        if not found.needs_disk:
            return [ExecuteOrder(ticket, found.order)]
        self._on_disk.append(ticket)
        return self._begin_on_disk() if len(self._on_disk) == 1 else []

    def on_executed(self, ticket: Ticket, result: Answer | Exception, now: float) -> Actions:
        """The shard has carried out an order, or refuses it."""
        found = self._open[ticket]
        again_at = now + self._timing.busy_retry_s
        found.needs_disk = isinstance(result, BusyDisk) and bool(self._on_disk)
        if isinstance(result, Busy) and (again_at <= found.until or found.needs_disk):
            self._again_at[ticket] = again_at
            return []
        return self._answer_order(ticket, result)

    def _answer_order(self, ticket: Ticket, result: Answer | Exception) -> Actions:
        order = self._open.pop(ticket).order
        actions: Actions = [AnswerOrder(ticket, result)]
        if isinstance(result, DipsError):
            kind, error = type(order.body).__name__, type(result).__name__
            fields = {"kind": kind, "number": order.number, "error": error, "why": str(result)}
            actions.append(WriteLog("warning", "order_refused", fields))
        return actions

    # ---- orders to the disk ------------------------------------------------------------------------------------------

    def _begin_on_disk(self) -> Actions:
        if not self._on_disk:
            return []
        ticket = self._on_disk[0]
        return [BeginDiskOrder(ticket, self._open[ticket].order)]

    def on_disk_order_begun(self, ticket: Ticket, result: Answer | DiskWork | Exception, now: float) -> Actions:
        """The shard has an answer already, or says what is to be done on the disk."""
        if callable(result):
            return [WorkOnDisk(ticket, self._open[ticket].order, result)]
        return self._end_on_disk(ticket, result, now)

    def on_disk_worked(self, ticket: Ticket, result: Answer | Exception) -> Actions:
        """It is done, or it failed."""
        return [EndDiskOrder(ticket, self._open[ticket].order, result)]

    def on_disk_order_ended(self, work: EndDiskOrder, error: Exception | None, now: float) -> Actions:
        """The shard knows of it."""
        return self._end_on_disk(work.ticket, error or work.result, now)

    def _end_on_disk(self, ticket: Ticket, result: Answer | Exception, now: float) -> Actions:
        self._on_disk.popleft()
        return [*self.on_executed(ticket, result, now), *self._begin_on_disk()]
