"""The decisions of a slave's process around its shard: orders from their arrival to their answers, and reports.

Pure: no clock, socket, thread or asyncio. A shell calls `tick` at `next_deadline`, passes in what arrives (an order to
`orders.take_order`, the shard's reports to `reports.add_reports`, the end of work to `on_done`, the master's reply to
`on_reply`), and carries out the returned actions (ports.py); it is runtime.py. Registration and heartbeats are in
registration.py; shard.py decides what an order does to layers and versions, and repeats the answer to a repeated order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf
from random import Random
from typing import Any

from dips.errors import Busy, BusyDisk, Denied, DipsError, Stale, Unavailable, UnreadSnapshot
from dips.protocol.effects import KeepSeed, Order, Persist, Retire
from dips.protocol.events import Answer, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import MOST_WAITS, OrderWait, SlaveHeartbeat, Transfer
from dips.slave.ports import (
    Actions,
    AnswerOrder,
    CallMaster,
    DiskWork,
    EndSlave,
    Meters,
    PushOver,
    ReadSnapshot,
    Report,
    RestoreFromMirror,
    ShardMethod,
    ShardWork,
    SlaveIdentity,
    SlaveTiming,
    SlaveWork,
    Standing,
    Ticket,
    WorkOnDisk,
    WriteLog,
)
from dips.slave.registration import Heartbeats, Registration, RegistrationPhase
from dips.transport.backoff import Backoff

ON_DISK = (Persist, Retire, KeepSeed)
ANSWER_SHARE = 0.8  # of an order's deadline, for trying it; the rest is for the answer's way back


class SlaveCore:
    """One incarnation of a slave."""

    def __init__(
        self,
        identity: SlaveIdentity,
        timing: SlaveTiming,
        standing: Callable[[], Standing],
        transfers: Callable[[], tuple[Transfer, ...]],
        meters: Callable[[], Meters],
        rng: Random,
    ) -> None:
        """The callables are called when a heartbeat is sent; `rng` spreads the pauses between tries to reach the
        master.
        """
        self.registration = Registration(identity, timing, rng, meters)
        self.reports = ReportQueue(identity.slave, timing, lambda: standing().sinc, rng)
        self.orders = OrderDesk(timing)
        self.heartbeats = Heartbeats(
            identity, timing, self.registration, standing, transfers, meters, self.orders.list_waits
        )
        self._parts = (self.registration, self.heartbeats, self.reports, self.orders)

    @property
    def serving(self) -> bool:
        """Whether the last answer to a Register was Hold, and no new registration is due since."""
        return self.registration.phase is RegistrationPhase.SERVING

    def explain_unready(self) -> str:
        """Return why the slave serves nothing; empty if its master has it as READY, at the head."""
        return "" if self.serving else f"it {self.registration.phase.value}"

    def next_deadline(self) -> float:
        """Return when `tick` has something to do; infinite if nothing is planned."""
        return min([part.next_deadline() for part in self._parts])

    def tick(self, now: float) -> Actions:
        """Do what is due; called once at the start, to begin."""
        return [action for part in self._parts for action in part.tick(now)]

    def on_done(self, work: SlaveWork, result: Any, now: float) -> Actions:
        """Continue after work has ended, with its result or the exception that it raised."""
        match work:
            case ShardWork(method, ticket=ticket):
                return self._on_shard_done(method, ticket or 0, result, now)
            case WorkOnDisk(ticket):
                return self.orders.on_disk_worked(ticket, result)
            case ReadSnapshot(order):
                return self.registration.on_read(order, result)
            case RestoreFromMirror():
                return self.registration.on_restored(work, result, now)

    def _on_shard_done(self, method: ShardMethod, ticket: Ticket, result: Any, now: float) -> Actions:
        match method:
            case ShardMethod.EXECUTE:
                return self.orders.on_executed(ticket, result, now)
            case ShardMethod.BEGIN_ON_DISK:
                return self.orders.on_disk_begun(ticket, result, now)
            case ShardMethod.END_ON_DISK:
                return self.orders.on_disk_ended(ticket, result, now)
            case ShardMethod.DROP_UNLISTED:
                return self.heartbeats.on_dropped(result)
            case ShardMethod.DESCRIBE:
                return self.registration.on_described(result, now)
            case ShardMethod.WELCOME:
                return self.registration.on_welcomed(result, now)
            case ShardMethod.FOLLOW | ShardMethod.END_LOAD:
                return self.registration.on_followed(result, now)

    def on_reply(self, call: CallMaster, reply: Any, now: float) -> Actions:
        """Continue after the master has answered a call, or the call failed with an exception."""
        match call.message:
            case SlaveHeartbeat():
                return self.heartbeats.on_answer(reply, now)
            case SlaveRegistered():
                return self.registration.on_registered(reply, now)
            case PushStaged() | PushRefused():
                return self.reports.on_reply(reply if isinstance(reply, Exception) else None, now)


# ---- orders ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenOrder:
    """An order that is not answered yet."""

    order: Order
    came_at: float
    until: float  # last time at which it is tried again when Busy
    again_at: float = inf  # next try; infinite: it is being carried out, or waits for the disk's turn
    needs_disk: bool = False  # it is a disk order, or waits for one
    wanted: bool = True  # its caller waits for the answer


class OrderDesk:
    """All unanswered orders by ticket: those that wait, and those that run beside each other.

    An order that finds no free slot or bank has changed nothing, so it is tried again until shortly before its
    deadline, and does not delay others: it may wait for a reader that is about to finish, or for a DropPush behind it.
    If it waits for the writer of a snapshot there is no limit: heartbeats report the wait, since a disk that is silent
    for minutes in one fsync is not a slave that hangs (docs/protocol.md#timing). Snapshots are written and deleted
    beside other orders, one after another, so that a repeated Persist finds the first one done.
    """

    def __init__(self, timing: SlaveTiming) -> None:
        self._timing = timing
        self._open: dict[Ticket, OpenOrder] = {}
        self._on_disk: deque[Ticket] = deque()  # the first one is being carried out

    def next_deadline(self) -> float:
        return min([found.again_at for found in self._open.values()]) if self._open else inf

    def take_order(self, ticket: Ticket, order: Order, now: float) -> Actions:
        """Accept an order; exactly one AnswerOrder with this ticket follows, unless it is dropped."""
        self._open[ticket] = OpenOrder(order, now, now + ANSWER_SHARE * order.deadline_s)
        return self._begin_order(ticket)

    def drop_order(self, ticket: Ticket) -> None:
        """Stop trying an order whose caller has hung up; one that is being carried out goes on, and is not tried
        again.
        """
        found = self._open.get(ticket)
        if found is None:
            return
        found.wanted = False
        if found.again_at < inf:
            del self._open[ticket]

    def tick(self, now: float) -> Actions:
        """Try due orders again, in the order in which they came."""
        due = [ticket for ticket, found in self._open.items() if found.again_at <= now]
        return [action for ticket in due for action in self._begin_order(ticket)]

    def list_waits(self, now: float) -> tuple[OrderWait, ...]:
        """Return the orders that wait for the disk, for a heartbeat."""
        waiting = (found for found in self._open.values() if found.needs_disk)
        return tuple(
            OrderWait(found.order.number, type(found.order.body).__name__, now - found.came_at)
            for found in islice(waiting, MOST_WAITS)
        )

    def _begin_order(self, ticket: Ticket) -> Actions:
        found = self._open[ticket]
        found.again_at, found.needs_disk = inf, False
        if isinstance(found.order.body, ON_DISK):
            return self._queue_for_disk(ticket)
        return [ShardWork(ShardMethod.EXECUTE, (found.order,), ticket)]

    def _queue_for_disk(self, ticket: Ticket) -> Actions:
        self._open[ticket].needs_disk = True
        self._on_disk.append(ticket)
        return self._begin_on_disk() if len(self._on_disk) == 1 else []

    def on_executed(self, ticket: Ticket, result: Answer | Exception, now: float) -> Actions:
        """Answer an order that the shard has carried out or refused, or plan to try it again; one that needs an archive
        takes its turn at the disk, which reads it.
        """
        if isinstance(result, UnreadSnapshot):
            return self._queue_for_disk(ticket)
        return self._end_order(ticket, result, now)

    def _end_order(self, ticket: Ticket, result: Answer | Exception, now: float) -> Actions:
        found = self._open[ticket]
        again_at = now + self._timing.busy_retry_s
        found.needs_disk = isinstance(result, BusyDisk) and bool(self._on_disk)
        if isinstance(result, Busy) and found.wanted and (again_at <= found.until or found.needs_disk):
            found.again_at = again_at
            return []
        del self._open[ticket]
        actions: Actions = [AnswerOrder(ticket, result)]
        if isinstance(result, DipsError):
            kind, error = type(found.order.body).__name__, type(result).__name__
            fields = {"kind": kind, "number": found.order.number, "error": error, "why": str(result)}
            actions.append(WriteLog("warning", "order_refused", fields))
        return actions

    def _begin_on_disk(self) -> Actions:
        if not self._on_disk:
            return []
        ticket = self._on_disk[0]
        return [ShardWork(ShardMethod.BEGIN_ON_DISK, (self._open[ticket].order,), ticket)]

    def on_disk_begun(self, ticket: Ticket, result: Answer | DiskWork | Exception, now: float) -> Actions:
        """Continue after the shard returned an answer, or the work to do on the disk."""
        if callable(result):
            return [WorkOnDisk(ticket, self._open[ticket].order, result)]
        return self.on_disk_ended(ticket, result, now)

    def on_disk_worked(self, ticket: Ticket, result: Answer | Exception) -> Actions:
        """Pass the result of the work on the disk to the shard."""
        return [ShardWork(ShardMethod.END_ON_DISK, (self._open[ticket].order, result), ticket)]

    def on_disk_ended(self, ticket: Ticket, result: Answer | Exception, now: float) -> Actions:
        """Answer a disk order after the shard has recorded its result, and begin the next one."""
        self._on_disk.popleft()
        return [*self._end_order(ticket, result, now), *self._begin_on_disk()]


# ---- reports ---------------------------------------------------------------------------------------------------------


class ReportQueue:
    """Reports of staged and refused pushes, sent until the master acknowledges them.

    Reports are sent one after another, oldest first; besides, every heartbeat names the staged pushes. A report that
    the master refuses as Stale is dropped: the next Register synchronises both.
    """

    def __init__(self, slave: str, timing: SlaveTiming, sinc: Callable[[], int], rng: Random) -> None:
        self._slave, self._timing, self._sinc = slave, timing, sinc
        self._waiting: deque[Report] = deque()
        self._sent: PushStaged | PushRefused | None = None  # sent and not acknowledged
        self._again_at = inf  # infinite: the call is under way, or there is none
        self._backoff = Backoff(*timing.backoff_s, rng)

    def next_deadline(self) -> float:
        return self._again_at

    def add_reports(self, reports: Iterable[Report]) -> Actions:
        """Queue reports of the shard."""
        self._waiting.extend(reports)
        return self._send_next() if self._sent is None else []

    def tick(self, now: float) -> Actions:
        """Send the report again that was not acknowledged."""
        if now < self._again_at:
            return []
        assert self._sent is not None
        self._again_at = inf
        return [CallMaster(self._sent, self._timing.call_s)]

    def on_reply(self, error: Exception | None, now: float) -> Actions:
        """Send the next report after an acknowledgement, or plan to repeat this one."""
        assert self._sent is not None
        if isinstance(error, Unavailable | Busy | Denied):
            self._again_at = now + self._backoff.next_pause_s()
            return []
        if error is not None and not isinstance(error, Stale):
            return [EndSlave(error)]
        fields = {"push": str(self._sent.push), "why": str(error)}
        actions: Actions = [WriteLog("info", "report_stale", fields)] if error is not None else []
        return actions + self._send_next()

    def _send_next(self) -> Actions:
        self._sent = None
        self._backoff.reset()
        if not self._waiting:
            return []
        report = self._waiting.popleft()
        self._sent = (
            PushRefused(self._slave, self._sinc(), report.push, report.reason)
            if isinstance(report, PushOver)
            else PushStaged(self._slave, self._sinc(), report.push, report.nbytes)
        )
        return [CallMaster(self._sent, self._timing.call_s)]
