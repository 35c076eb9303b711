"""The decision of `dips rebalance`: from which version, onto which slaves, and which records it writes.

Master and slaves are stopped meanwhile, so the ledger and the disks are the whole state. The row `Rebalanced` is the
commit point. What must stay true: no durable version is lost; older versions, whose snapshots have the former
placement, are retired in the same transaction; the rebalance is an incarnation of every slave, so messages of former
processes are fenced (docs/architecture.md#invariant-5).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId
from dips.protocol.enums import Role
from dips.protocol.manifest import Manifest
from dips.protocol.placement import LayerMove, Placement, moves_between, rebalance_layers
from dips.protocol.records import IncarnationGiven, LedgerState, Rebalanced, Record, RolledBack, VersionsRetired


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """Layers to move, and versions that are given up."""

    version: VersionId  # version whose layers are copied: the head afterwards
    before: Placement
    after: Placement
    incarnations: tuple[tuple[str, int], ...]  # of present and former slaves: the rebalance itself
    undone: tuple[VersionId, ...]  # newer than `version`, committed and not durable
    retired: tuple[VersionId, ...]  # versions whose snapshots may be deleted

    @property
    def moves(self) -> tuple[LayerMove, ...]:
        return moves_between(self.before, self.after)

    def records(self, digests: Mapping[str, str]) -> list[Record]:
        """Return the records of the transaction; `digests` are those of the manifests of the new slaves' snapshots."""
        why = f"rebalanced at {self.version}"
        records: list[Record] = []
        if self.undone:
            records.append(RolledBack(self.version, self.undone, f"{why}: not on every disk", 0.0))
        if self.retired:
            records.append(VersionsRetired(self.retired))
        records += [IncarnationGiven(Role.SLAVE, name, inc, why) for name, inc in self.incarnations]
        return [*records, Rebalanced(self.version, self.after, tuple(sorted(digests.items())))]


def plan_rebalance(
    state: LedgerState, manifest: Manifest, held: Mapping[str, Collection[VersionId]], slaves: Sequence[str]
) -> RebalancePlan:
    """Plan a rebalance; `held` names the versions with complete snapshots in the directory of each present slave.

    Raise ConfigError if a slave lacks the newest durable version, or there are more `slaves` than layers.
    """
    before = state.row.placement
    version = _newest_held(state, held)
    lineage = [v for v in state.versions if v.version != GENESIS]
    undone = tuple(v.version for v in lineage if v.version.version > version.version)
    retired = tuple(v.version for v in lineage if not v.retired and v.version != version)
    known = {peer.name: peer.inc for peer in state.slaves}
    names = sorted({*known, *slaves})
    incarnations = tuple((name, known.get(name, 0) + 1) for name in names)
    return RebalancePlan(version, before, rebalance_layers(manifest, before, slaves), incarnations, undone, retired)


def _newest_held(state: LedgerState, held: Mapping[str, Collection[VersionId]]) -> VersionId:
    """Return the newest version of the lineage that every slave holds; at least the newest durable one."""
    durable = next(v.version for v in reversed(state.versions) if v.durable)  # v0@r0 is
    for row in reversed(state.versions):
        if row.version.version > durable.version and all(row.version in versions for versions in held.values()):
            return row.version
    lacking = [name for name, versions in held.items() if durable not in versions]
    if lacking and durable != GENESIS:
        told = "; ".join(f"{n} holds {', '.join(map(str, sorted(held[n]))) or 'nothing'}" for n in lacking)
        raise ConfigError(
            f"{durable}, the newest durable version, is not in the directory of every slave: {told}; restore it, or "
            "start the run once, so that it is rolled back, and stop it again"
        )
    return durable
