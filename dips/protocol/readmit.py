"""An operator lifts a cluster's quarantine (docs/architecture.md#penalty): it warms up again, and the ledger knows."""

from __future__ import annotations

from dips.errors import ConfigError
from dips.protocol.effects import Acknowledged, Failed, Refused
from dips.protocol.events import ReadmissionAsked
from dips.protocol.records import ClusterReadmitted
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
