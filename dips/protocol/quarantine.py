"""Quarantine outside of rounds (docs/architecture.md#penalty): imposed and lifted by an operator, or caused by
divergence.

A cluster that an operator has quarantined goes on training and pulling; all its pushes are gated and do not change the
penalty's statistics, so it continues where it was when it is readmitted. The gates' own quarantine is part of these
statistics. Each change has its own record in the ledger.
"""

from __future__ import annotations

from dips.errors import ConfigError
from dips.protocol.bounded_text import cut_text
from dips.protocol.effects import Acknowledged, Failed, Refused
from dips.protocol.events import QuarantineAsked, ReadmissionAsked
from dips.protocol.records import ClusterDiverged, ClusterQuarantined, ClusterReadmitted
from dips.protocol.run_state import RunState
from dips.protocol.verdicts import Verdict

MOST_REASON = 200  # characters of an operator's reason, which is in the status and in each gated push's outcome


def on_quarantine_asked(run: RunState, event: QuarantineAsked) -> None:
    """Legal any time, for a cluster that has joined once; a repetition changes the reason at most."""
    if run.refuse_unproven(event.req) or _refuse_stranger(run, event.req, event.cluster):
        return
    reason = cut_text(event.reason, MOST_REASON) or "no reason was given"
    if reason != run.quarantined.get(event.cluster):
        run.quarantined.pop(event.cluster, None)
        run.quarantined[event.cluster] = reason
        run.emit_record(ClusterQuarantined(event.cluster, reason, run.now))
        run.emit_note("cluster_quarantined", cluster=event.cluster, reason=reason)
    run.reply_to(event.req, Acknowledged())


def on_readmission_asked(run: RunState, event: ReadmissionAsked) -> None:
    """Legal any time; refused for a cluster that is not quarantined, which keeps its statistics."""
    if run.refuse_unproven(event.req) or _refuse_stranger(run, event.req, event.cluster):
        return
    by_operator = run.quarantined.pop(event.cluster, None) is not None
    by_gate = run.penalty.penalty_row(event.cluster).quarantined
    if by_operator:
        run.emit_record(ClusterQuarantined(event.cluster, "", run.now))
        run.emit_note("cluster_released", cluster=event.cluster)
    if by_gate:
        row = run.penalty.readmit_cluster(event.cluster)
        run.emit_record(ClusterReadmitted(row, run.next_round - 1, run.now))
        run.emit_note("cluster_readmitted", cluster=event.cluster, warm_left=row.warm_left)
    done = by_operator or by_gate
    run.reply_to(event.req, Acknowledged() if done else Refused(0.0, f"{event.cluster} is not quarantined"))


def _refuse_stranger(run: RunState, req: int, cluster: str) -> bool:
    if cluster in run.clusters:
        return False
    known = ", ".join(run.clusters) or "none yet"
    run.reply_to(req, Failed(ConfigError, f"cluster {cluster!r} has never joined; known: {known}"))
    return True


def count_divergence(run: RunState, cluster: str) -> None:
    """Count a push that the cluster's ranks held back because it was not finite as gated for that."""
    row = run.penalty.count_divergence(cluster)
    run.emit_record(ClusterDiverged(row, run.next_round - 1, run.now))
    run.emit_note("cluster_diverged", cluster=cluster, in_a_row=row.gated_in_a_row, quarantined=row.quarantined)


def judge_quarantined(run: RunState, cluster: str, verdict: Verdict) -> Verdict:
    """Return the verdict after an operator's quarantine, which overrides the gates."""
    if (reason := run.quarantined.get(cluster)) is None:
        return verdict
    said = f"quarantined by an operator: {reason}"
    return Verdict(False, verdict.norm, verdict.score, said, verdict.evidence, tracked=False, held=True)
