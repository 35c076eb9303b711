"""The metrics that the master exports: each names where in a RunView its number stands, and what it means.

A number that a peer reports is a field of its heartbeat (protocol/heartbeats.py): with the row here it is a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from prometheus_client.core import Metric

from dips.protocol.enums import ClusterState, SlaveState, TrainerState
from dips.protocol.view import ClusterView, LeaseView, RunView, SlaveView
from dips.telemetry.metrics import MetricRow, Samples, Table, make_families

RUN = (
    MetricRow("dips_term", "term", "Incarnations of the master so far."),
    MetricRow("dips_head_version", "head_version.version", "Outer steps of the head."),
    MetricRow("dips_head_round", "head_version.round", "The round that made the head."),
    MetricRow("dips_tokens_accepted", "progress.tokens", "Tokens in the head's lineage."),
    MetricRow("dips_tokens_target", "progress.tokens_target", "Tokens after which the run ends; 0 for none."),
    MetricRow(
        "dips_journal_writing", "journal.writing", "1 while the master writes its journal; 0: its disk fails it."
    ),
    MetricRow("dips_journal_written_bytes", "journal.bytes", "Written to the journal since the start.", counter=True),
    MetricRow("dips_journal_waiting", "journal.waiting", "Events that wait for the journal's disk."),
    MetricRow("dips_rounds_applied", "rounds.applied", "Rounds that made a version.", counter=True),
    MetricRow("dips_rounds_skipped", "rounds.skipped", "Rounds that broke.", counter=True),
    MetricRow("dips_rounds_unchanged", "rounds.unchanged", "Rounds whose contributions were all gated.", counter=True),
    MetricRow("dips_ranges_free", "ranges.free", "Data ranges that nobody holds."),
    MetricRow("dips_ranges_leased", "ranges.leased", "Data ranges leased to clusters."),
    MetricRow("dips_ranges_settled", "ranges.settled", "Data ranges trained or gated."),
    MetricRow(
        "dips_ranges_undone", "ranges.undone", "Data ranges trained by undone versions only, and not leased again."
    ),
    MetricRow("dips_head_durable", "durability.head", "1 if the head lies complete on every slave's disk."),
    MetricRow(
        "dips_durability_red", "durability.red", "1 if snapshots fail: versions are not durable, or the run stopped."
    ),
    MetricRow(
        "dips_ledger_mirror_red", "ledger_mirror.red", "1 if the ledger's mirror lags or fails; 0 if it keeps up."
    ),
    MetricRow(
        "dips_ledger_mirror_behind_transactions", "ledger_mirror.behind_transactions", "Lost with the master's disk."
    ),
    MetricRow("dips_ledger_mirror_behind_seconds", "ledger_mirror.behind_s", "Since the mirror kept up."),
    MetricRow("dips_lease_claimable", "lease.claimable", "1 while a standby may take over: it would lose nothing."),
    MetricRow("dips_standbys", "lease.present", "Standbys that are there."),
    MetricRow("dips_standbys_ready", "lease.ready", "Standbys that would take over now."),
    MetricRow(
        "dips_rollback_waiting_steps",
        "rollback.steps",
        "Outer steps that a rollback would undo which waits for `dips rollback`; 0: none waits.",
    ),
    MetricRow("dips_versions_undone", "undone_total", "Versions that were rolled back."),
    MetricRow(
        "dips_head_timestamp_seconds", "newest.committed", "Unix time at which the newest version was committed."
    ),
    MetricRow("dips_durable_timestamp_seconds", "newest.durable", "The same of the newest durable version."),
    MetricRow("dips_run_loss", "newest.loss", "Loss of the newest version: its contributions' mean, by tokens."),
    MetricRow("dips_run_finished", "is_finished", "1 once the run has reached its target."),
    MetricRow("dips_push_seconds", "meters.push", "From a push's grant to its commit.", histogram=True),
)
CLUSTER = (
    MetricRow("dips_cluster_incarnation", "inc", "Incarnations of the cluster so far."),
    MetricRow(
        "dips_cluster_accepted", "accepted_ever", "Contributions accepted, also those undone since.", counter=True
    ),
    MetricRow("dips_cluster_gated", "gated", "Contributions gated.", counter=True),
    MetricRow("dips_cluster_skipped", "skipped", "Contributions whose round broke.", counter=True),
    MetricRow("dips_cluster_claims_refused", "claims_refused", "Pushes that claimed what cannot be.", counter=True),
    MetricRow(
        "dips_cluster_tokens_accepted",
        "tokens_accepted_ever",
        "Tokens accepted, also those undone since.",
        counter=True,
    ),
    MetricRow("dips_cluster_tokens_gated", "tokens_gated", "Tokens gated.", counter=True),
    MetricRow(
        "dips_cluster_tokens_undone", "tokens_undone", "Tokens accepted once, by versions that were rolled back."
    ),
    MetricRow("dips_cluster_tokens_lost", "tokens_lost", "Tokens lost with trainers and incarnations."),
    MetricRow("dips_cluster_tokens_carried", "heartbeat.tokens_carried", "Tokens consumed and not yet settled."),
    MetricRow("dips_cluster_staleness", "staleness", "Outer steps of the head since the cluster's base."),
    MetricRow("dips_cluster_norm", "norm", "Norm of its last accepted pseudo-gradient."),
    MetricRow("dips_cluster_score", "score", "The penalty's score of its last contribution."),
    MetricRow("dips_cluster_quarantined", "quarantined", "1 if it was gated too often in a row."),
    MetricRow("dips_cluster_inner_steps", "heartbeat.inner_steps", "Inner steps since its agent started."),
    MetricRow("dips_cluster_loss", "loss", "Loss of its last inner step."),
    MetricRow("dips_cluster_transfer_bytes", "heartbeat.bytes_moved", "Moved by the present or last push or pull."),
    MetricRow("dips_cluster_transfer_size_bytes", "heartbeat.bytes_total", "Size of the present or last push or pull."),
)
SLAVE = (
    MetricRow("dips_slave_incarnation", "sinc", "Incarnations of the slave so far."),
    MetricRow("dips_slave_slots", "slots", "Pushes that may move at once."),
    MetricRow("dips_slave_slots_used", "slots_used", "Slots in use."),
    MetricRow("dips_slave_pool_bytes", "heartbeat.pool_used", "Memory pool in use."),
    MetricRow("dips_slave_pool_limit_bytes", "heartbeat.pool_limit", "The pool's written sum."),
    MetricRow(
        "dips_slave_received_bytes", "heartbeat.bytes_in", "Received by the data flow since its start.", counter=True
    ),
    MetricRow("dips_slave_sent_bytes", "heartbeat.bytes_out", "Sent by the data flow since its start.", counter=True),
    MetricRow("dips_slave_persist_seconds", "heartbeat.persist_s", "Its last snapshot took."),
    MetricRow("dips_slave_apply_seconds", "heartbeat.apply_s", "Its last outer step took."),
    MetricRow("dips_slave_restored_bytes", "heartbeat.work.nbytes", "Of a snapshot that it reads or restores, done."),
    MetricRow("dips_slave_restored_size_bytes", "heartbeat.work.total", "Of a snapshot that it reads or restores."),
    MetricRow("dips_slave_mirror_behind_versions", "mirror.behind_versions", "Outer steps that its mirror lacks."),
    MetricRow("dips_slave_mirror_behind_seconds", "mirror.behind_s", "Since its mirror held the head."),
    MetricRow("dips_slave_mirror_failing", "mirror.failing", "1 while its mirror is full, gone or failing."),
)
TRANSFER = (
    MetricRow("dips_transfer_bytes", "nbytes", "Of a push or pull at a slave, arrived so far."),
    MetricRow("dips_transfer_size_bytes", "total", "Of a push or pull at a slave, in all."),
)
LEASE = MetricRow(
    "dips_lease_timestamp_seconds", "at", "Unix time of the last write of the master's lease to its mirror."
)
HEARD = MetricRow("dips_cluster_heard_timestamp_seconds", "at", "Unix time of its last heartbeat.")
SLAVE_HEARD = MetricRow("dips_slave_heard_timestamp_seconds", "at", "Unix time of its last heartbeat.")
STATE = MetricRow("dips_cluster_state", "is", "1 for the present state, 0 for every other one.")
SLAVE_STATE = MetricRow("dips_slave_state", "is", "1 for the present state, 0 for every other one.")
STANDING = MetricRow("dips_clusters", "count", "Clusters that are live, train, and are in the newest version.")
PHASE = MetricRow("dips_round_phase_seconds", "phase", "Of rounds that made a version, by phase.", histogram=True)

TABLES: tuple[Table, ...] = (
    (RUN, ()),
    ((LEASE,), ()),
    (CLUSTER, ("cluster",)),
    ((HEARD,), ("cluster",)),
    ((STATE,), ("cluster", "state")),
    (SLAVE, ("slave",)),
    ((SLAVE_HEARD,), ("slave",)),
    ((SLAVE_STATE,), ("slave", "state")),
    (TRANSFER, ("slave", "cluster", "direction")),
    ((STANDING,), ("standing",)),
    ((PHASE,), ("phase",)),
)


def collect(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Turn what the master exports into metric families: its `view` of the run, and the `meters` of its rounds.

    Numbers that are not known yet are left out. `wall` is the Unix time of the view.
    """
    view: RunView = status["view"]
    moving: Samples = [
        ((slave, t.cluster, "push" if t.push else "pull"), t)
        for slave, peer in view.slaves.items()
        for t in peer.transfers
    ]
    samples: tuple[Samples, ...] = (
        [((), view), ((), status)],
        _list_lease(view.lease, status["wall"]),
        [((name,), peer) for name, peer in view.clusters.items()],
        _list_heard(view.clusters, status["wall"]),
        _list_states(view.clusters, ClusterState),
        [((name,), peer) for name, peer in view.slaves.items()],
        _list_heard(view.slaves, status["wall"]),
        _list_states(view.slaves, SlaveState),
        moving,
        [((standing,), {"count": count}) for standing, count in count_standings(view).items()],
        [((phase,), {"phase": histogram}) for phase, histogram in status["meters"].phases.items()],
    )
    for (rows, labels), found in zip(TABLES, samples, strict=True):
        yield from make_families(rows, found, labels)


def _list_lease(lease: LeaseView | None, wall: float) -> Samples:
    return [] if lease is None or lease.age_s is None else [((), {"at": wall - lease.age_s})]


def _list_heard(peers: Mapping[str, ClusterView | SlaveView], wall: float) -> Samples:
    return [((name,), {"at": wall - peer.heard_s}) for name, peer in peers.items() if peer.heard_s is not None]


def _list_states(peers: Mapping[str, ClusterView | SlaveView], states: Iterable[StrEnum]) -> Samples:
    kinds = list(states)
    return [((name, kind.value), {"is": int(peer.state is kind)}) for name, peer in peers.items() for kind in kinds]


def count_standings(view: RunView) -> dict[str, int]:
    """How many clusters have a lease; of these, how many can contribute; and how many did to the newest version."""
    live = [c for c in view.clusters.values() if c.trains]
    able = [c for c in live if c.heartbeat and c.heartbeat.trainer is TrainerState.TRAINING and not c.quarantined]
    return {"live": len(live), "participating": len(able), "contributing": view.newest.clusters}
