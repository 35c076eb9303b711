"""Sabotages: each breaks one rule from outside, to show that the invariants bite.

Production code has no switch for any of this: a sabotage wraps a function for as long as its context is open. Each must
be found within 200 seeds by one of the invariants named beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from dips.client.agent import heartbeats, membership
from dips.client.agent.account import Account, Portion
from dips.client.agent.state import AgentState
from dips.errors import ConfigError
from dips.ids import PullId, PushId, VersionId
from dips.master.ledger import Ledger
from dips.protocol import clusters, round, slaves
from dips.protocol.beats import ClusterBeat
from dips.protocol.effects import Apply, Fold, Order, Registered
from dips.protocol.events import Answer, ClusterLeft, Folded, OrderAnswered
from dips.protocol.records import LedgerState, Record
from dips.protocol.world import Chorus, Cluster
from dips.protocol.world import World as Deciding
from dips.sim.disk import SimDisk
from dips.sim.flow import OpenedPush, SimFlow
from dips.sim.master import MasterProcess
from dips.sim.trainer import Trainer
from dips.sim.transfer import Pulled
from dips.slave import moving
from dips.slave.fences import Fences
from dips.slave.ports import Arrays
from dips.slave.shard import Shard

Patch = tuple[Any, str, Any]  # (owner, name, what stands there instead)


@dataclass(frozen=True)
class Sabotage:
    """`rule` is what is broken, `found_by` the invariants that must find it."""

    rule: str
    found_by: tuple[int, ...]
    patches: Callable[[], list[Patch]]


def _announce_before_record() -> list[Patch]:
    def write(self: MasterProcess, records: Sequence[Record]) -> None:
        self.world.later(0.1, "the ledger writes, unwaited", lambda: self.wrote(records))
        self.core.on_written()
        self._carry_out()

    return [(MasterProcess, "write", write)]


def _record_before_all_persisted() -> list[Patch]:
    honest = slaves.answered

    def answered(w: Deciding, event: OrderAnswered) -> Chorus | None:
        found = w.choruses.get(event.number)
        chorus = honest(w, event)
        if chorus is None and found is not None and found[0].kind == "persist" and found[0].answers:
            w.forget_orders(frozenset({"persist"}))
            return found[0]
        return chorus

    return [(slaves, "answered", answered)]


def _flip_on_prepared() -> list[Patch]:
    honest = Shard._apply

    def apply(self: Shard, order: Apply, opened: tuple[int, int]) -> Answer:
        answer = honest(self, order, opened)
        self._flip(order.version)
        return answer

    return [(Shard, "_apply", apply)]


def _refold_on_retry() -> list[Patch]:
    honest_admit, honest_fold = Fences.admit, Shard._fold
    kept: dict[tuple[int, PushId], Any] = {}

    def admit(self: Fences, order: Order) -> Answer | None:
        remembered = honest_admit(self, order)
        return None if isinstance(order.body, Fold) else remembered

    def fold(self: Shard, order: Fold, opened: tuple[int, int]) -> Answer:
        key = (id(self), order.push)
        if key not in kept:
            arrays = self.versions._open[order.push].arrays if order.push in self.versions._open else {}
            kept[key] = {layer: a.copy() for layer, a in arrays.items()}
            return honest_fold(self, order, opened)
        acc, memory = self.versions._acc, self.versions.memory
        if acc is None or memory is None:
            return honest_fold(self, order, opened)
        theta = self.versions.theta(memory)
        for layer, theta_j in kept[key].items():
            acc.arrays[layer] += order.weight * (theta[layer] - theta_j)
        return Folded(1.0)

    return [(Fences, "admit", admit), (Shard, "_fold", fold)]


def _reuse_round_after_restart() -> list[Patch]:
    honest = Ledger.state

    def start_term(self: Ledger) -> int:
        return 1

    def state(self: Ledger) -> LedgerState:
        found = honest(self)
        return replace(found, term=1, next_round=found.versions[-1].version.round + 1)

    return [(Ledger, "start_term", start_term), (Ledger, "state", state)]


def _unpin_at_send() -> list[Patch]:
    honest = SimFlow.open_pull

    def open_pull(self: SimFlow, pull: PullId, version: VersionId, source: Arrays, deadline_s: float) -> None:
        honest(self, pull, version, source, deadline_s)
        self._later(0.0, f"{pull} is sent", lambda: self._said().released(pull, "sent"))

    return [(SimFlow, "open_pull", open_pull)]


def _free_at_move() -> list[Patch]:
    honest = SimFlow.move_pull

    def move_pull(self: SimFlow, pull: PullId, source: Arrays) -> None:
        honest(self, pull, source)
        self._later(0.0, f"{pull} moves", lambda: self._said().moved(pull))

    return [(SimFlow, "move_pull", move_pull)]


def _keep_local() -> list[Patch]:
    honest = SimDisk.write

    def write(self: SimDisk, version: VersionId, theta: Arrays, momentum: Arrays) -> str:
        self.delete(self.complete())
        return honest(self, version, theta, momentum)

    return [(SimDisk, "write", write)]


def _stats_of_skipped_rounds() -> list[Patch]:
    honest = round.skip

    def skip(w: Deciding, reason: str) -> None:
        if w.round is not None:
            w.penalty.keep(*round._statistics(w, w.round))
        honest(w, reason)

    return [(round, "skip", skip)]


def _accept_old_stream() -> list[Patch]:
    def drop_push(self: SimFlow, push: PushId) -> None:
        """What was opened stays open to late chunks."""

    def admits(self: SimFlow, opened: OpenedPush, rank: int, sinc: int, epoch: int, number: int) -> bool:
        return True

    return [(SimFlow, "drop_push", drop_push), (SimFlow, "admits", admits)]


def _install_alone() -> list[Patch]:
    def agreed(self: Trainer, landed: list[Pulled]) -> list[Pulled]:
        return [pulled for pulled in landed if pulled.whole]

    return [(Trainer, "agreed", agreed)]


def _blind_leases() -> list[Patch]:
    def wake(self: MasterProcess) -> None:
        if self.inbox is None or not self.alive:
            return
        came, self.inbox = self.inbox, None
        self.core._expected_at = self.world.heap.now  # no gap is seen
        self._look()
        for read in came:
            read()
        self._carry_out()

    return [(MasterProcess, "wake", wake)]


def _leak_slot() -> list[Patch]:
    def refuse_closed(closed: moving.Closed, transfer: PushId | PullId) -> None:
        """No tombstone."""

    def heal(self: moving.Moving, live_pushes: Any, live_pulls: Any, as_of: moving.Opened) -> list[str]:
        return []

    return [(moving, "_refuse_closed", refuse_closed), (moving.Moving, "heal", heal)]


def _tokens_cut_at_pull() -> list[Patch]:
    def settle(self: Account, kind: str) -> None:
        """What was settled is carried on until a pull succeeds."""
        self.accepted += self.frozen.tokens
        self.carried = replace(self.frozen, ranges=()) + self.carried
        self.frozen = Portion()

    return [(Account, "settle", settle)]


def _lose_what_was_settled() -> list[Patch]:
    honest_end, honest_beat, honest_leave = clusters.end, heartbeats.build_heartbeat, membership.leave

    def end(w: Deciding, cluster: Cluster, reason: str, consumed: int, told_lost: int = 0) -> None:
        # what a beat told as unsettled counts as lost
        honest_end(w, cluster, reason, consumed + cluster.settled, told_lost)

    def beat(s: AgentState) -> ClusterBeat | None:
        told = honest_beat(s)
        return told and replace(told, tokens_consumed=told.tokens_carried + told.tokens_lost)

    def leave(s: AgentState) -> ClusterLeft | None:
        left = honest_leave(s)
        return left and replace(left, tokens_consumed=s.account.unsettled + s.account.lost)

    return [(clusters, "end", end), (heartbeats, "build_heartbeat", beat), (membership, "leave", leave)]


def _offers_without_ledger() -> list[Patch]:
    honest = Shard.welcome

    def welcome(self: Shard, registered: Registered) -> None:
        honest(self, registered)
        complete = self._disk.complete()
        if self.versions.memory is None and complete:
            newest = max(complete)
            self.versions.load(newest, lambda theta, momentum: self._disk.read(newest, theta, momentum))

    return [(Shard, "welcome", welcome)]


SABOTAGES: dict[str, Sabotage] = {
    "announce-before-record": Sabotage("effects wait for the record before them", (2,), _announce_before_record),
    "record-before-all-persisted": Sabotage("the row waits for every slave's disk", (3,), _record_before_all_persisted),
    "flip-on-prepared": Sabotage("a slave serves a version after its Commit only", (2,), _flip_on_prepared),
    "refold-on-retry": Sabotage("a repeated order repeats its answer, not its work", (1, 4), _refold_on_retry),
    "reuse-round-after-restart": Sabotage("terms and rounds come from the ledger", (1, 5), _reuse_round_after_restart),
    "unpin-at-send": Sabotage("a pin ends when its last byte is gone", (1, 11), _unpin_at_send),
    "free-at-move": Sabotage("a bank is free when nothing of it is in flight", (1, 11), _free_at_move),
    "keep-local": Sabotage("the master names what is deleted", (3,), _keep_local),
    "stats-of-skipped-rounds": Sabotage("statistics move with a committed version", (8,), _stats_of_skipped_rounds),
    "accept-old-stream": Sabotage("a chunk of a closed stream changes nothing", (1, 5), _accept_old_stream),
    "install-alone": Sabotage("all ranks install, or none", (6,), _install_alone),
    "blind-leases": Sabotage("silence counts while somebody listens", (12,), _blind_leases),
    "tokens-cut-at-pull": Sabotage("progress is cut at the freeze, not at the pull", (9,), _tokens_cut_at_pull),
    "lose-what-was-settled": Sabotage("what was settled since a beat is not lost", (9,), _lose_what_was_settled),
    "offers-without-ledger": Sabotage("only a row makes a snapshot a version", (2, 4), _offers_without_ledger),
    "leak-slot": Sabotage("what was dropped is never opened again", (11, 12), _leak_slot),
}


@contextmanager
def sabotaged(name: str | None) -> Iterator[None]:
    """Break the named rule for as long as the context is open; None breaks nothing."""
    if name is not None and name not in SABOTAGES:
        raise ConfigError(f"no sabotage {name!r}; there are {', '.join(SABOTAGES)}")
    with ExitStack() as stack:
        for owner, attribute, instead in SABOTAGES[name].patches() if name else []:
            stack.enter_context(mock.patch.object(owner, attribute, instead))
        yield
