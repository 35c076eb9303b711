"""An operator lifts a cluster's quarantine (design.md section 8): it warms up again, and the ledger knows."""

from __future__ import annotations

from dips.protocol.effects import Acknowledged, Failed, Refused
from dips.protocol.events import ReadmissionAsked
from dips.protocol.records import ClusterReadmitted
from dips.protocol.world import World


def asked(w: World, event: ReadmissionAsked) -> None:
    """Legal any time; a cluster that is not quarantined is told so and keeps its statistics."""
    if event.cluster not in w.clusters:
        known = ", ".join(w.clusters) or "none yet"
        w.reply(event.req, Failed("ConfigError", f"cluster {event.cluster!r} was never heard here; known: {known}"))
        return
    if not w.penalty.row(event.cluster).quarantined:
        w.reply(event.req, Refused(0.0, f"{event.cluster} is not quarantined"))
        return
    row = w.penalty.readmit(event.cluster)
    w.record(ClusterReadmitted(row, w.next_round - 1, w.now))
    w.note("cluster_readmitted", cluster=event.cluster, warm_left=row.warm_left)
    w.reply(event.req, Acknowledged())
