"""An operator keeps a cluster out of the outer step, and lets it in again (`dips quarantine`).

It goes on training and pulling; its pushes are gated, whatever they bring, and leave the penalty's statistics alone,
so it continues where it was when it is released. The gate's own quarantine is lifted by `dips readmit`.
"""

from __future__ import annotations

from dips.errors import ConfigError
from dips.protocol.bounded_text import cut_text
from dips.protocol.effects import Acknowledged, Failed, Refused
from dips.protocol.events import QuarantineAsked
from dips.protocol.records import ClusterQuarantined
from dips.protocol.run_state import RunState
from dips.protocol.verdicts import Verdict

MOST_REASON = 200  # characters of an operator's reason: it stands in the status and in each gated push's outcome


def on_quarantine_asked(run: RunState, event: QuarantineAsked) -> None:
    """Legal any time, for a cluster that has joined once; a repetition changes the reason at most."""
    if run.refuse_unproven(event.req):
        return
    if event.cluster not in run.clusters:
        known = ", ".join(run.clusters) or "none yet"
        run.reply_to(event.req, Failed(ConfigError, f"cluster {event.cluster!r} has never joined; known: {known}"))
        return
    reason = "" if event.release else cut_text(event.reason, MOST_REASON) or "no reason was given"
    before = run.quarantined.get(event.cluster, "")
    if event.release and not before:
        run.reply_to(event.req, Refused(0.0, f"{event.cluster} is not quarantined by an operator"))
        return
    if reason != before:
        run.quarantined.pop(event.cluster, None)
        if reason:
            run.quarantined[event.cluster] = reason
        run.emit_record(ClusterQuarantined(event.cluster, reason, run.now))
        run.emit_note("cluster_quarantined" if reason else "cluster_released", cluster=event.cluster, reason=reason)
    run.reply_to(event.req, Acknowledged())


def describe_request(event: QuarantineAsked) -> str:
    """As the command line spells it."""
    return f"{event.cluster} --release" if event.release else f"{event.cluster} --reason {event.reason!r}"


def judge_quarantined(run: RunState, cluster: str, verdict: Verdict) -> Verdict:
    """What the operator said comes before what the gate says."""
    if (reason := run.quarantined.get(cluster)) is None:
        return verdict
    said = f"quarantined by an operator: {reason}"
    return Verdict(False, verdict.norm, verdict.score, said, verdict.evidence, tracked=False, held=True)
