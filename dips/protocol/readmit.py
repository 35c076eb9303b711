"""Quarantine outside of rounds (docs/architecture.md#penalty): an operator lifts it, a diverged cluster earns it.

Both change a cluster's statistics by a record of their own, so the ledger knows.
"""

from __future__ import annotations

from dips.errors import ConfigError
from dips.protocol.effects import Acknowledged, Failed, Refused
from dips.protocol.events import ReadmissionAsked
from dips.protocol.records import ClusterDiverged, ClusterReadmitted
from dips.protocol.run_state import RunState


def on_readmission_asked(run: RunState, event: ReadmissionAsked) -> None:
    """Legal any time; refused for a cluster that is not quarantined, which keeps its statistics."""
    if event.cluster not in run.clusters:
        known = ", ".join(run.clusters) or "none yet"
        run.reply_to(event.req, Failed(ConfigError, f"cluster {event.cluster!r} has never joined; known: {known}"))
        return
    if not run.penalty.penalty_row(event.cluster).quarantined:
        run.reply_to(event.req, Refused(0.0, f"{event.cluster} is not quarantined"))
        return
    row = run.penalty.readmit_cluster(event.cluster)
    run.emit_record(ClusterReadmitted(row, run.next_round - 1, run.now))
    run.emit_note("cluster_readmitted", cluster=event.cluster, warm_left=row.warm_left)
    run.reply_to(event.req, Acknowledged())


def count_divergence(run: RunState, cluster: str) -> None:
    """Its ranks kept back a push that was not finite: it counts as one that was gated for that."""
    row = run.penalty.count_divergence(cluster)
    run.emit_record(ClusterDiverged(row, run.next_round - 1, run.now))
    run.emit_note("cluster_diverged", cluster=cluster, in_a_row=row.gated_in_a_row, quarantined=row.quarantined)
