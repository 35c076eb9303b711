"""What must always be true of names and memory: what is old changes nothing (invariants 5 and 11)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, get_args

from dips.ids import PushId
from dips.plain import to_plain
from dips.protocol.effects import Order
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import Event, MirrorReported, OrderAnswered, OrderFailed, PushRefused, PushStaged
from dips.protocol.records import (
    IncarnationGiven,
    LedgerRestored,
    LedgerState,
    Record,
    RoundReserved,
)
from dips.sim.master import MasterProcess
from dips.sim.slave import SlaveProcess
from dips.sim.world import World
from tests.simulation.checks import Invariant

OF_SLAVES = frozenset({MirrorReported, PushStaged, PushRefused, OrderAnswered, OrderFailed})


class FencingInvariant(Invariant):
    """What bears an old term, incarnation, seq or round changes nothing: the state before is the state after."""

    number = 5

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.before: Any = None
        self.sinc: dict[str, int] = {}

    def record_written(self, record: Record) -> None:
        if isinstance(record, IncarnationGiven) and record.role == "slave":
            self.sinc[record.name] = max(record.inc, self.sinc.get(record.name, 0))

    def before_order(self, process: SlaveProcess, order: Order) -> None:
        shard = process.shard
        old = order.term != shard.term or order.sinc != shard.sinc
        self.before = _of_slave(process) if old else None

    def after_order(self, process: SlaveProcess, order: Order) -> None:
        if self.before is not None:
            same = self.before == _of_slave(process)
            self.require(
                same, f"{process.name} changed by {type(order.body).__name__} of term {order.term}, sinc {order.sinc}"
            )

    def before_step(self, master: MasterProcess, event: Event) -> None:
        self.before = _of_master(master) if self._old(master, event) else None

    def after_step(self, master: MasterProcess, event: Event) -> None:
        if self.before is not None and self.before != _of_master(master):
            self.fail(f"the master changed by the old {event}")

    def _old(self, master: MasterProcess, event: Event) -> bool:
        kind = type(event)
        read_name = _READERS[kind]
        if read_name is None:
            return False
        name, inc = read_name(event)
        if kind in OF_SLAVES:
            old = inc < self.sinc.get(name, 0)
        else:
            newest = master.coordinator._run.clusters.get(name)  # no look at all for who is not older than that
            old = newest is not None and inc < newest.inc
            old = old and master.coordinator.cluster_standing(name, inc)[0] is ClusterStanding.FENCED
        # What a master that does not preside changes is in itself only: nothing that leaves it changes anybody. And
        # when something is due, a master does it whatever it hears.
        return old and master.presides and master.coordinator.next_deadline() > self.world.heap.now


def _name_reader(kind: type[Event]) -> Callable[[Event], Any] | None:
    """What reads whose event of this class it is, and of which incarnation; None if it names none."""
    fields = kind.__dataclass_fields__
    if kind in OF_SLAVES:
        return attrgetter("slave", "sinc")
    for transfer in ("push", "pull"):
        if transfer in fields:
            return attrgetter(f"{transfer}.cluster", f"{transfer}.inc")
    return attrgetter("cluster", "inc") if "cluster" in fields and "inc" in fields else None


_READERS = {kind: _name_reader(kind) for kind in get_args(Event)}


def _of_slave(process: SlaveProcess) -> Any:
    versions, shard = process.versions, process.shard
    return (
        versions.served_version,
        versions.prepared,
        versions.open_pushes,
        versions.bank_holders(),
        sorted(versions.held.pins),
        shard.rounds.number,
        shard.rounds.poison,
    )


def _of_master(master: MasterProcess) -> str:
    view = master.coordinator.build_view(0.0)
    return json.dumps(to_plain(replace(view, round=replace(view.round, reason=""))), sort_keys=True)


class MonotoneInvariant(Invariant):
    """Term, round and incarnation never go back, not over a crash of anybody: what the fences compare."""

    number = 5

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.term = 0
        self.round = 0
        self.lives: dict[tuple[str, str], int] = {}
        self.above = 0  # of a restored ledger: incarnations up to here may have been given
        self.numbers: dict[tuple[int, int], Order] = {}

    def master_restored(self, state: LedgerState) -> None:
        self.require(state.term > self.term, f"a new master has term {state.term}, an earlier one had {self.term}")
        self.require(
            state.next_round > self.round, f"round {state.next_round} would be reserved again after {self.round}"
        )
        self.term = state.term

    def record_written(self, record: Record) -> None:
        if isinstance(record, RoundReserved):
            self.require(record.round > self.round, f"round {record.round} is reserved after round {self.round}")
            self.round = record.round
        elif isinstance(record, LedgerRestored):
            self.above = record.incarnations_above
        elif isinstance(record, IncarnationGiven):
            key = (record.role, record.name)
            before = max(self.lives.get(key, 0), self.above)
            self.require(record.inc == before + 1, f"{record.name} is given incarnation {record.inc} after {before}")
            self.lives[key] = record.inc

    def order_leaves(self, order: Order) -> None:
        said = self.numbers.setdefault((order.term, order.number), order)
        if said != order:
            self.fail(f"number {order.number} of term {order.term} stood for {said} and for {order}")


class MemoryInvariant(Invariant):
    """Banks in use stay within the written sum, each has one holder, and no slot outlives its push."""

    number = 11
    LEAK_S, LEAK_HEARTBEATS = 15.0, 8  # what the master does not know of is dropped by a heartbeat's answer long before

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.unknown_since: dict[tuple[str, PushId], float] = {}
        self._looked_at: dict[str, tuple[SlaveProcess, list[str]]] = {}  # the last holders whose sum was taken

        self.leak_s = max(self.LEAK_S, self.LEAK_HEARTBEATS * world.options.timing.heartbeat_s)

    def after_event(self) -> None:
        for machine in self.world.looked_at:
            if machine.process is None:
                continue
            versions = machine.process.versions
            slots = versions.open_pushes
            if len(slots) > versions.slots:
                self.fail(f"{machine.name} has {len(slots)} slots open of {versions.slots}")
            looked_at = (machine.process, versions.bank_holders())
            if self._looked_at.get(machine.name) != looked_at:
                self._looked_at[machine.name] = looked_at
                self._sum_is_kept(*looked_at)
            if slots:
                self._leaks(machine.process, slots)

    def _sum_is_kept(self, process: SlaveProcess, holders: list[str]) -> None:
        if process.versions.used_bytes > process.versions.limit_bytes:
            self.fail(f"{process.name} uses more than its sum")
        if len(holders) != len(set(holders)):
            self.fail(f"{process.name}: two banks for one holder in {holders}")

    def _leaks(self, process: SlaveProcess, slots: tuple[PushId, ...]) -> None:
        now = self.world.heap.now
        if now <= self.world.scenario.quiet_at:
            return  # nobody need listen yet
        master = self.world.master.process
        listening = master is not None and not master.stopped and process.holds
        live = master.coordinator.live_transfers().pushes if master and listening else ()
        for push in slots:
            key = (process.nonce, push)
            if not listening or push in live:
                self.unknown_since.pop(key, None)
            else:
                since = self.unknown_since.setdefault(key, now)
                if now - since >= self.leak_s:
                    self.fail(f"{process.name} keeps a slot for {push}, which is live nowhere")
