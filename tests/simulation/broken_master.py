"""Rules of the master, broken from outside: each function returns what stands where (sabotage.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dips.ids import GENESIS, PushId, VersionId
from dips.master.ledger import Ledger
from dips.protocol import pushes, rollback, round, slaves
from dips.protocol.data import RangeBook
from dips.protocol.effects import Outcome, Result
from dips.protocol.events import OrderAnswered, SlaveRegistered
from dips.protocol.records import LedgerState, Record
from dips.protocol.world import Chorus, Cluster, Slave
from dips.protocol.world import World as Deciding
from dips.sim.master import MasterProcess

Patch = tuple[Any, str, Any]  # (owner, name, what stands there instead)


def announce_before_record() -> list[Patch]:
    def write(self: MasterProcess, records: Sequence[Record]) -> None:
        self.world.later(0.1, "the ledger writes, unwaited", lambda: self.wrote(records))
        self.core.on_written()
        self._carry_out()

    return [(MasterProcess, "write", write)]


def record_before_all_persisted() -> list[Patch]:
    honest = slaves.answered

    def answered(w: Deciding, event: OrderAnswered) -> Chorus | None:
        found = w.choruses.get(event.number)
        chorus = honest(w, event)
        if chorus is None and found is not None and found[0].kind == "persist" and found[0].answers:
            w.forget_orders(frozenset({"persist"}))
            return found[0]
        return chorus

    return [(slaves, "answered", answered)]


def reuse_round_after_restart() -> list[Patch]:
    honest = Ledger.state

    def start_term(self: Ledger) -> int:
        return 1

    def state(self: Ledger) -> LedgerState:
        found = honest(self)
        return replace(found, term=1, next_round=found.versions[-1].version.round + 1)

    return [(Ledger, "start_term", start_term), (Ledger, "state", state)]


def stats_of_skipped_rounds() -> list[Patch]:
    honest = round.skip

    def skip(w: Deciding, reason: str) -> None:
        if w.round is not None:
            w.penalty.keep(*round._statistics(w, w.round))
        honest(w, reason)

    return [(round, "skip", skip)]


def blind_leases() -> list[Patch]:
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


def tell_gated_as_accepted() -> list[Patch]:
    honest = pushes._outcome

    def outcome(w: Deciding, cluster: Cluster, push: PushId) -> Result:
        found = honest(w, cluster, push)
        return replace(found, kind="accepted") if isinstance(found, Outcome) and found.kind == "gated" else found

    return [(pushes, "_outcome", outcome)]


def believe_fresh_slaves() -> list[Patch]:
    honest_offered, honest_offers = rollback.offered, rollback._offers

    def offered(event: SlaveRegistered) -> frozenset[VersionId]:
        """A process that has just started offers nothing, whatever lies on its disk."""
        return honest_offered(event) if event.memory is not None else frozenset()

    def offers(w: Deciding, slave: Slave, version: VersionId) -> bool:
        return version == GENESIS or honest_offers(w, slave, version)

    return [(rollback, "offered", offered), (rollback, "_offers", offers)]


def lease_twice() -> list[Patch]:
    honest = RangeBook._take

    def take(self: RangeBook) -> int:
        taken = honest(self)
        if taken % 16 == 15:
            self._freed.append(taken)
        return taken

    return [(RangeBook, "_take", take)]
