"""What must always be true of names, memory and waiting (protocol.md section 4: 5, 11, 12)."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Any

from dips.ids import PushId
from dips.protocol.effects import Order, Outcome
from dips.protocol.events import ClusterSilent, Event, OrderAnswered, OrderFailed, PushRefused, PushStaged, SlaveSilent
from dips.protocol.records import (
    IncarnationGiven,
    LedgerState,
    Record,
    RoundEnded,
    RoundReserved,
    RunFinished,
    VersionCommitted,
)
from dips.sim.watch import Invariant
from dips.sim.work import Frozen

if TYPE_CHECKING:
    from dips.sim.cluster import Agent
    from dips.sim.master import MasterProcess
    from dips.sim.slave import Process
    from dips.sim.world import World


class Fences(Invariant):
    """What bears an old term, incarnation, seq or round changes nothing: the state before is the state after."""

    number = 5

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.before: Any = None
        self.sinc: dict[str, int] = {}

    def recorded(self, record: Record) -> None:
        if isinstance(record, IncarnationGiven) and record.role == "slave":
            self.sinc[record.name] = max(record.inc, self.sinc.get(record.name, 0))

    def before_order(self, process: Process, order: Order) -> None:
        shard = process.shard
        old = order.term < shard.term or order.sinc != shard.sinc
        self.before = _of_slave(process) if old else None

    def after_order(self, process: Process, order: Order) -> None:
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
        if not master.presides:
            return False  # what it changes is in itself only: nothing that leaves it changes anybody
        if master.coordinator.next_deadline() <= self.world.heap.now:
            return False  # with it the master does what is due, whatever it hears
        if isinstance(event, PushStaged | PushRefused | OrderAnswered | OrderFailed):
            return event.sinc < self.sinc.get(event.slave, 0)
        life = getattr(event, "push", None) or getattr(event, "pull", None) or event
        cluster, inc = getattr(life, "cluster", None), getattr(life, "inc", None)
        return (
            cluster is not None and inc is not None and master.coordinator.cluster_standing(cluster, inc)[0] == "fenced"
        )


def _of_slave(process: Process) -> Any:
    versions, shard = process.versions, process.shard
    return (
        versions.memory,
        versions.prepared,
        versions.open_pushes,
        versions.holders(),
        sorted(versions.pins),
        shard.round,
        shard.poison,
    )


def _of_master(master: MasterProcess) -> str:
    view = master.coordinator.view(0.0)
    view["round"].pop("reason")
    return json.dumps(view, sort_keys=True)


class Monotone(Invariant):
    """Term, round and incarnation never go back, not over a crash of anybody: what the fences compare."""

    number = 5

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.term = 0
        self.round = 0
        self.lives: dict[tuple[str, str], int] = {}
        self.numbers: dict[tuple[int, int], Order] = {}

    def restored(self, state: LedgerState) -> None:
        self.require(state.term > self.term, f"a new master has term {state.term}, an earlier one had {self.term}")
        self.require(
            state.next_round > self.round, f"round {state.next_round} would be reserved again after {self.round}"
        )
        self.term = state.term

    def recorded(self, record: Record) -> None:
        if isinstance(record, RoundReserved):
            self.require(record.round > self.round, f"round {record.round} is reserved after round {self.round}")
            self.round = record.round
        elif isinstance(record, IncarnationGiven):
            key = (record.role, record.name)
            before = self.lives.get(key, 0)
            self.require(record.inc == before + 1, f"{record.name} is given life {record.inc} after {before}")
            self.lives[key] = record.inc

    def order_leaves(self, order: Order) -> None:
        said = self.numbers.setdefault((order.term, order.number), order)
        if said != order:
            self.fail(f"number {order.number} of term {order.term} stood for {said} and for {order}")


class Memory(Invariant):
    """Banks in use stay within the written sum, each has one holder, and no slot outlives its push."""

    number = 11
    LEAK_S = 15.0  # a slot that the master does not know of is dropped by a beat's answer long before

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.unknown_since: dict[tuple[str, PushId], float] = {}

    def after_event(self) -> None:
        for machine in self.world.looked_at:
            if machine.process is None:
                continue
            versions = machine.process.versions
            if versions.used_bytes > versions.limit_bytes:
                self.fail(f"{machine.name} uses more than its sum")
            slots = versions.open_pushes
            if len(slots) > versions.slots:
                self.fail(f"{machine.name} has {len(slots)} slots open of {versions.slots}")
            holders = versions.holders()
            if len(holders) != len(set(holders)):
                self.fail(f"{machine.name}: two banks for one holder in {holders}")
            self._leaks(machine.process, slots)

    def _leaks(self, process: Process, slots: tuple[PushId, ...]) -> None:
        master = self.world.master.process
        now = self.world.heap.now
        listening = master is not None and master.inbox is None and process.holds and now > self.world.quiet_at
        live = (
            master.coordinator.slave_live(process.name, process.shard.sinc)[2] if master and slots and listening else ()
        )
        for push in slots:
            key = (process.nonce, push)
            if not listening or push in live:
                self.unknown_since.pop(key, None)
            else:
                since = self.unknown_since.setdefault(key, now)
                self.require(
                    now - since < self.LEAK_S, f"{process.name} keeps a slot for {push}, which is live nowhere"
                )


class Liveness(Invariant):
    """Once the faults have stopped, every live trainer hears an Outcome in time, the head advances, pulls succeed.

    B1 and B2 hold for the deadlines of a seed: a lease of 7.6 s, orders 4 s, Apply and Persist 8 s, transfers 12 s.
    """

    number = 12
    OUTCOME_S = 45.0  # B1: for a trainer, from when faults stop or from its last Outcome
    HEAD_S = 40.0  # B2: for the head
    HEALED_S = 22.0  # after the faults: what their last transfers and leases left is over
    PULLS = 2
    OUTCOMES = 3  # of each cluster without faults: it has healed

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.advanced_at = 0.0
        self.finished_at: float | None = None
        self.heard: dict[str, int] = {}  # cluster → Outcomes since the faults stopped

    def outcome(self, agent: Agent, frozen: Frozen, outcome: Outcome) -> None:
        if self.world.heap.now > self.world.quiet_at and agent is agent.site.agent:
            self.heard[agent.name] = self.heard.get(agent.name, 0) + 1

    def healed(self) -> bool:
        """Has every cluster heard of several pushes since the faults stopped?"""
        return all(self.heard.get(name, 0) >= self.OUTCOMES for name in self.world.sites)

    def recorded(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self.advanced_at = self.world.heap.now
        elif isinstance(record, RunFinished):
            self.finished_at = self.world.heap.now

    def time_passed(self) -> None:
        now, quiet = self.world.heap.now, self.world.quiet_at
        outcome_s, head_s = self.OUTCOME_S * self.world.patience, self.HEAD_S * self.world.patience
        if now < quiet + min(outcome_s, head_s):
            return
        if self.finished_at is not None:
            self._all_finish(now - max(self.finished_at, quiet))
            return
        stood = now - max(self.advanced_at, quiet)
        self.require(stood < head_s, f"the head has not advanced for {stood:.1f} s without any fault")
        for site in self.world.sites.values():
            agent = site.agent
            waited = now - max(agent.outcome_at, quiet) if agent else 0.0
            self.require(waited < outcome_s, f"{site.name} has heard no Outcome for {waited:.1f} s without any fault")

    def _all_finish(self, since_s: float) -> None:
        for site in self.world.sites.values() if since_s > self.OUTCOME_S else ():
            done = site.agent is not None and site.agent.finished is not None
            self.require(done, f"{site.name} has not ended {since_s:.1f} s after the run, without any fault")

    def pulled(self, agent: Agent, installed: bool, attempt: int) -> None:
        if not installed and self.world.heap.now > self.world.quiet_at + self.HEALED_S * self.world.patience:
            self.require(attempt < self.PULLS, f"{agent.name} has failed to pull {attempt} times without any fault")


UNSEEN_BEATS = 2  # a master that sleeps for a beat at most cannot see where a gap began, and ignores one of a beat


class Patience(Invariant):
    """Silence counts only while somebody listens: nobody is judged silent whose beat was read within its lease.

    Less what a master cannot know of its own absence.
    """

    number = 12

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.read: dict[tuple[str, str, int], float] = {}
        self.asleep_s = 0.0

    def beat_read(self, role: str, name: str, life: int) -> None:
        self.read[role, name, life] = self.world.heap.now - self.world.master_asleep_s

    def restored(self, state: LedgerState) -> None:
        for key in self.read:
            self.read[key] = self.world.heap.now - self.world.master_asleep_s

    def judged(self, verdict: Event) -> None:
        if isinstance(verdict, ClusterSilent):
            self._lease("cluster", verdict.cluster, verdict.inc)
        elif isinstance(verdict, SlaveSilent):
            self._lease("slave", verdict.slave, verdict.sinc)

    def _lease(self, role: str, name: str, life: int) -> None:
        read = self.read.get((role, name, life))
        if read is not None:
            listened = self.world.heap.now - self.world.master_asleep_s - read
            timing = self.world.options.timing
            lease = timing.lease_s - UNSEEN_BEATS * timing.beat_s
            self.require(
                listened >= lease - 1e-6,
                f"{name}/{life} is judged silent after {listened:.1f} s of listening, least {lease:g} s",
            )


class Patient(Invariant):
    """A cluster that is gated `gate_patience` times in a row at a usual norm warms up again: nobody is out for good."""

    number = 12

    def recorded(self, record: Record) -> None:
        if not isinstance(record, VersionCommitted | RoundEnded):
            return
        patience = self.world.options.penalty.gate_patience
        rows = {row.cluster: row for row in record.penalty}
        for outcome in record.outcomes:
            cluster = outcome.push.cluster
            if outcome.kind != "gated" or outcome.norm == 0.0 or rows[cluster].gated_in_a_row < patience:
                continue
            others = [
                r.last_norm for r in record.penalty if r.cluster != cluster and r.accepted > 0 and r.last_norm > 0
            ]
            unusual = bool(others) and outcome.norm >= 2 * median(others)
            self.require(
                unusual, f"{cluster} was gated {rows[cluster].gated_in_a_row} times in a row at norm {outcome.norm:.4g}"
            )
