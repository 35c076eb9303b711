"""The decision of `dips rebalance`: from which version, onto which slaves, and which records it writes.

What must stay true: the row `Rebalanced` is the commit point, and is written when every layer of the new placement is
durable at its new owner; no durable version is lost; older versions, whose snapshots have the former placement, are
retired in the same transaction; the rebalance is an incarnation of every slave, so messages of former processes are
fenced (docs/architecture.md#invariant-5).

The run is up, and the new owners' hosts pull their layers from the former owners:

    asked → no push begins, open ones end → planned: version and layers → each host pulls and stages → the row, Exit

The head stays what it is meanwhile. Until the row the former placement is in force, and whatever fails, or a master
that restarts, costs the pause alone: it ends when no host has asked during a lease. The master ends with the row, since
slaves are bound to their layers as long as they run.
"""

from __future__ import annotations

from collections.abc import Mapping

from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId, check_name
from dips.printable import join_some
from dips.protocol import effects
from dips.protocol.entities import Rebalance
from dips.protocol.enums import Role
from dips.protocol.events import RebalanceAsked
from dips.protocol.placement import Placement, rebalance_layers
from dips.protocol.records import IncarnationGiven, Rebalanced, Record, VersionsRetired
from dips.protocol.run_state import RunState

ADDED_IN = 2  # protocol: the release before knows neither the question nor a pull of m
EXIT_REBALANCED = 78  # a restart with the same run file could not serve: its slaves are not those of the ledger


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """The new placement of the head's layers, and versions that are given up."""

    version: VersionId  # the head, whose layers are copied
    before: Placement
    after: Placement
    incarnations: tuple[tuple[str, int], ...]  # of present and former slaves: the rebalance itself
    undone: tuple[VersionId, ...]  # wart: none; journals of the release before list this class with its fields
    retired: tuple[VersionId, ...]  # versions whose snapshots may be deleted

    def records(self, digests: Mapping[str, str]) -> list[Record]:
        """Return the records of the transaction; `digests` are those of the manifests of the new slaves' snapshots."""
        why = f"rebalanced at {self.version}"
        records: list[Record] = [VersionsRetired(self.retired)] if self.retired else []
        records += [IncarnationGiven(Role.SLAVE, name, inc, why) for name, inc in self.incarnations]
        return [*records, Rebalanced(self.version, self.after, tuple(sorted(digests.items())))]


def answer_asked(run: RunState, event: RebalanceAsked) -> effects.Result:
    """Legal any time. A repetition renews the lease; one with a digest says what its host has staged, and is
    answered with a new plan if that is not the head.
    """
    slaves = tuple(sorted({check_name(name, "slave") for name in event.slaves}))
    if event.slave not in slaves:
        raise ConfigError(f"expected one of the new slaves, {', '.join(slaves)}, got {event.slave!r}")
    if run.protocol < ADDED_IN:
        why = f"layers move over the lanes from protocol {ADDED_IN} on, this run speaks {run.protocol}"
        return effects.Refused(0.0, f"{why}: run `dips finalise` before")
    held = run.rebalance
    if held is None and set(slaves) == set(run.slaves):
        return effects.Acknowledged()
    if held is not None and held.slaves != slaves:
        return effects.Refused(
            0.0, f"the rebalance to {', '.join(held.slaves)} is under way; it ends when no host has asked for a lease"
        )
    if held is not None and held.valid:
        return effects.Acknowledged()
    plan = _plan_of_head(run, slaves)
    if held is None:
        held = run.rebalance = Rebalance(slaves, run.head, 0.0)
        run.emit_note("rebalance_begun", version=run.head, slaves=",".join(slaves))
    if held.version != run.head:  # rolled back meanwhile: what is staged is of no use
        held.version, held.staged = run.head, {}
    held.deadline = run.now + run.options.timing.lease_s
    digest = event.digest if event.version == run.head else ""  # else a master has gone on that had forgotten it
    if not digest:
        held.staged.pop(event.slave, None)  # its host copies anew, perhaps into another directory
    if busy := _open_work(run):
        return effects.Pending(busy)
    if digest and held.staged.get(event.slave) != digest:
        held.staged[event.slave] = digest
        run.emit_note("layers_staged", version=run.head, slave=event.slave)
    away = [name for name in slaves if name not in held.staged]
    if not away or run.head == GENESIS:  # v0@r0 comes from the first model, wherever its layers lie
        _commit(run, held, plan)
        return effects.Acknowledged()
    if digest:
        return effects.Pending(f"the hosts of {join_some(away)} are still to copy their layers")
    sinc = dict(plan.incarnations)[event.slave]
    return effects.RebalancePlanned(run.head, dict(plan.after)[event.slave], sinc)


def _plan_of_head(run: RunState, slaves: tuple[str, ...]) -> RebalancePlan:
    before = tuple((slave.name, slave.layers) for slave in run.slaves.values())
    known = {**run.former_slaves, **{slave.name: slave.sinc for slave in run.slaves.values()}}
    given = tuple((name, run.next_incarnation(known.get(name, 0))) for name in sorted({*known, *slaves}))
    after = rebalance_layers(run.manifest, before, slaves)
    retired = (v.version for v in run.versions.values() if not v.retired and v.version not in (GENESIS, run.head))
    return RebalancePlan(run.head, before, after, given, (), tuple(retired))


def _open_work(run: RunState) -> str:
    """Return what may still change the head, or is not on the disks; empty if nothing is."""
    if run.round is not None:
        return f"waits for round {run.round.number} ({run.explain_round(run.round)})"
    if run.rollback_asked is not None:  # by an operator, to a version that the row would retire
        return f"waits for the rollback to {run.rollback_asked}"
    if run.waiting or run.flipping is not None or run.transfers.pushes:
        return "waits for the pushes that are open"
    return "" if run.versions[run.head].durable else f"waits until {run.head} is on every disk"


def _commit(run: RunState, held: Rebalance, plan: RebalancePlan) -> None:
    """Emit the row; the present processes are fenced with it."""
    for record in plan.records(held.staged):
        run.emit_record(record)
    for name, inc in plan.incarnations:
        if name in run.slaves:
            run.slaves[name].sinc = inc
    held.valid = True
    run.emit_note("rebalanced", version=run.head, slaves=",".join(held.slaves))


def settle_rebalance(run: RunState) -> None:
    """End this process behind the answer to the request that made the row, or a rebalance that nobody asks for."""
    held = run.rebalance
    assert held is not None
    if held.valid and held.deadline < float("inf"):
        held.deadline = float("inf")
        where = f"the layers are those of {', '.join(held.slaves)} now"
        run.out.append(
            effects.Exit(EXIT_REBALANCED, f"{where}: stop the former slaves, and start all with the new run file")
        )
    elif run.now >= held.deadline:
        run.rebalance = None
        run.emit_note("rebalance_dropped", version=held.version, reason="no host has asked for a lease")
