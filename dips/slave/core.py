"""The deciding part of a slave's process around its shard: registration, heartbeats, reports, orders.

Pure: no clock, socket, thread or asyncio. A shell says what happened (`take_order`, `on_done`, `on_reply`,
`add_reports`), calls `tick` at `next_deadline`, and does what is returned (actions.py). The shells are the daemon's
(runtime.py) and the simulation's (sim/slave.py). What an order does to layers and versions is decided in shard.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from dips.protocol.effects import Order, Registered
from dips.protocol.events import PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeat, Transfer
from dips.slave.actions import (
    Actions,
    BeginDiskOrder,
    CallMaster,
    DescribeShard,
    EndDiskOrder,
    EndLoad,
    ExecuteOrder,
    FollowRegistration,
    HealTransfers,
    ReadSnapshot,
    RestoreFromMirror,
    ShardWork,
    Ticket,
    WelcomeShard,
    WorkBeside,
    WorkOnDisk,
)
from dips.slave.open_transfers import Report
from dips.slave.order_desk import OrderDesk
from dips.slave.registration import Heartbeats, Registration, RegistrationPhase
from dips.slave.reports import ReportQueue
from dips.slave.standing import Meters, SlaveIdentity, SlaveTiming, Standing


class SlaveCore:
    """One incarnation of a slave."""

    def __init__(
        self,
        identity: SlaveIdentity,
        timing: SlaveTiming,
        standing: Callable[[], Standing],
        transfers: Callable[[], tuple[Transfer, ...]],
        meters: Callable[[], Meters],
        prepare: Callable[[Registered], None],
        rng: Random,
    ) -> None:
        """Callables are read when a heartbeat leaves; `prepare` runs on the shard's thread before it is welcomed.

        rng  spreads the pauses between two tries to reach the master
        """
        self.registration = Registration(identity, timing, prepare, rng, meters)
        self.reports = ReportQueue(identity.slave, timing, lambda: standing().sinc, rng)
        self.orders = OrderDesk(timing)
        self.heartbeats = Heartbeats(
            identity, timing, self.registration, standing, transfers, meters, self.orders.list_waits
        )
        self._parts = (self.registration, self.heartbeats, self.reports, self.orders)
        registration, heartbeats, orders = self.registration, self.heartbeats, self.orders
        self._done: dict[type, Callable[[Any, Any, float], Actions]] = {
            DescribeShard: lambda work, result, now: registration.on_described(result, now),
            RestoreFromMirror: registration.on_restored,
            WelcomeShard: lambda work, result, now: registration.on_welcomed(result, now),
            FollowRegistration: lambda work, result, now: registration.on_followed(result, now),
            ReadSnapshot: lambda work, result, now: registration.on_read(work, result),
            EndLoad: lambda work, result, now: registration.on_followed(result, now),
            HealTransfers: lambda work, result, now: heartbeats.on_healed(result),
            ExecuteOrder: lambda work, result, now: orders.on_executed(work.ticket, result, now),
            BeginDiskOrder: lambda work, result, now: orders.on_disk_order_begun(work.ticket, result, now),
            WorkOnDisk: lambda work, result, now: orders.on_disk_worked(work.ticket, result),
            EndDiskOrder: orders.on_disk_order_ended,
        }
        self._replied: dict[type, Callable[[Any, float], Actions]] = {
            SlaveRegistered: registration.on_registered,
            SlaveHeartbeat: heartbeats.on_answer,
            PushStaged: self._on_report_reply,
            PushRefused: self._on_report_reply,
        }

    @property
    def serving(self) -> bool:
        """Whether the last answer to a Register was Hold, and nothing has asked for another since."""
        return self.registration.phase is RegistrationPhase.SERVING

    def explain_unready(self) -> str:
        """Why it does not serve; empty: it does, at the head."""
        return "" if self.serving else f"it {self.registration.phase.value}"

    def next_deadline(self) -> float:
        """When `tick` has something to do; infinite if nothing is planned."""
        due = self.heartbeats.next_deadline()
        for part in (self.registration, self.reports, self.orders):
            other = part.next_deadline()
            due = other if other < due else due
        return due

    def tick(self, now: float) -> Actions:
        """Do what is due; called once at the start, to begin."""
        return [action for part in self._parts for action in part.tick(now)]

    def take_order(self, ticket: Ticket, order: Order, now: float) -> Actions:
        """An order of the master came; it is answered under `ticket`."""
        return self.orders.take_order(ticket, order, now)

    def drop_order(self, ticket: Ticket) -> None:
        """Who gave the order has hung up."""
        self.orders.drop_order(ticket)

    def on_done(self, work: ShardWork | WorkBeside, result: object, now: float) -> Actions:
        """Work has ended, with a result or with the exception that it raised."""
        return self._done[type(work)](work, result, now)

    def on_reply(self, call: CallMaster, reply: object, now: float) -> Actions:
        """The master has answered a call, or the call failed with an exception."""
        return self._replied[type(call.message)](reply, now)

    def add_reports(self, reports: Sequence[Report]) -> Actions:
        """The shard has something to report."""
        return self.reports.add_reports(reports)

    def _on_report_reply(self, reply: object, now: float) -> Actions:
        return self.reports.on_reply(reply if isinstance(reply, Exception) else None, now)
