"""Judges a run once, for all who show it: a word, a severity and a why for each peer, and what asks for a look.

What is decided here depends on states, causes, numbers and times. Sentences are passed on as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dips.errors import RemoteProtocolError
from dips.plain import from_plain, to_plain
from dips.printable import join_some
from dips.protocol.enums import (
    ClusterCause,
    ClusterState,
    DurabilityState,
    OutcomeKind,
    RemarkSubject,
    Severity,
    SlaveCause,
    SlaveState,
    TrainerState,
)
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.view import ClusterView, Concern, LeaseView, RunView, SlaveView

# The newest by (role, name), with the time when it came.
Heard = tuple[ClusterHeartbeat | SlaveHeartbeat, float]
Heartbeats = Mapping[tuple[str, str], Heard]
Judgement = tuple[str, Severity, str]  # the word for its state, how grave that is, and why

SILENT_HEARTBEATS = 2.0  # without one for so many, and a peer is shown as silent; its lease ends after five
LEAST_FREE = 0.05  # of a slave's disk; less asks for a look
# Causes that say no more than the state: what a cluster does when all is well, and who has gone as it should.
PLAIN = frozenset(
    {
        *(ClusterCause.JOINED, ClusterCause.TRAINS, ClusterCause.ASKS_PUSH, ClusterCause.OPENS_PUSH),
        *(ClusterCause.PUSHES, ClusterCause.COMMITTED, ClusterCause.PULLS, ClusterCause.LEFT, ClusterCause.FOLLOWS),
    }
)
QUIET = frozenset({ClusterCause.LEFT, ClusterCause.ENDED})  # gone, and nothing is wrong
_GRAVEST = (Severity.BROKEN, Severity.ATTENTION, Severity.GOOD, Severity.PLAIN)


def judge_run(view: RunView, heartbeats: Heartbeats, now: float, heartbeat_s: float) -> RunView:
    """Add each peer's newest heartbeat and what to think of it, and what asks for a look in all."""
    clusters = {
        name: _judged_cluster(c, heartbeats.get(("cluster", name)), now, view, heartbeat_s)
        for name, c in view.clusters.items()
    }
    slaves = {
        name: _judged_slave(s, heartbeats.get(("slave", name)), now, view, heartbeat_s)
        for name, s in view.slaves.items()
    }
    judged = replace(view, clusters=clusters, slaves=slaves)
    return replace(judged, concerns=tuple(sort_concerns(_find_concerns(judged))))


def narrow_view(view: RunView, cluster: str) -> RunView:
    """Return what a cluster may see: how far the run is, and itself; no other cluster, no slave, no operator's work."""
    return RunView(
        run=view.run, waiting=view.waiting, term=view.term, uptime_s=view.uptime_s, head=view.head,
        progress=view.progress, targets=view.targets, finished=view.finished,
        clusters={name: c for name, c in view.clusters.items() if name == cluster},
    )  # fmt: skip


def sort_concerns(concerns: Iterator[Concern]) -> list[Concern]:
    """The gravest first."""
    return sorted(concerns, key=lambda concern: rank_severity(concern.severity))


def rank_severity(severity: Severity) -> int:
    """0 for the gravest."""
    return _GRAVEST.index(severity)


# ---- peers --------------------------------------------------------------------------------------------------------


def _judged_cluster(c: ClusterView, newest: Heard | None, now: float, run: RunView, heartbeat_s: float) -> ClusterView:
    """The view counts tokens that were lost by incarnations that are over, a heartbeat its own."""
    heartbeat, heard_s, lost = c.heartbeat, c.heard_s, c.tokens_lost
    if newest is not None and isinstance(newest[0], ClusterHeartbeat):
        heartbeat, heard_s, lost = newest[0], now - newest[1], lost + newest[0].tokens_lost
    word, severity, why = judge_cluster(
        c, heartbeat, _silent_s(heard_s, c.since_s, run, heartbeat_s), run.finished is not None
    )
    return replace(c, heartbeat=heartbeat, heard_s=heard_s, tokens_lost=lost, word=word, severity=severity, why=why)


def _judged_slave(s: SlaveView, newest: Heard | None, now: float, run: RunView, heartbeat_s: float) -> SlaveView:
    heartbeat, heard_s = s.heartbeat, s.heard_s
    if newest is not None and isinstance(newest[0], SlaveHeartbeat):
        heartbeat, heard_s = newest[0], now - newest[1]
    word, severity, why = judge_slave(s, heartbeat, _silent_s(heard_s, s.since_s, run, heartbeat_s))
    return replace(s, heartbeat=heartbeat, heard_s=heard_s, word=word, severity=severity, why=why)


def judge_cluster(
    c: ClusterView, heartbeat: ClusterHeartbeat | None, silent_s: float | None, finished: bool
) -> Judgement:
    """`silent_s`: since when nothing was heard of it, if that is too long."""
    trainer = heartbeat.trainer if heartbeat is not None else None
    why, held = "" if c.cause in PLAIN else c.reason, _explain_quarantine(c)
    if c.state is ClusterState.GONE:
        why = f"quarantined {held}; {c.reason}" if held else why
        quiet = c.cause in QUIET or finished or c.reads  # nothing waits for who only pulls
        return ("left", Severity.PLAIN, why) if quiet else ("gone", Severity.ATTENTION, why)
    if held:
        return "quarantined", Severity.ATTENTION, f"{held}; {c.reason}"
    if silent_s is not None:
        return "silent", Severity.ATTENTION, _explain_silence(silent_s, c.state)
    if heartbeat is not None and trainer is TrainerState.DEAD:
        crashing = any(remark.subject is RemarkSubject.CRASH for remark in heartbeat.remarks)  # which says how
        return ("crashing", Severity.ATTENTION, "") if crashing else ("stopped", Severity.ATTENTION, c.reason)
    if c.last is not None and c.last.kind is OutcomeKind.GATED:
        return c.state.value, Severity.ATTENTION, f"its last push was gated: {c.last.reason}"
    if c.cause is ClusterCause.FOLLOWS:
        return "following", Severity.GOOD, ""
    if c.state is ClusterState.IDLE and trainer is TrainerState.STARTING:
        return "starting", Severity.PLAIN, ""
    if c.state is ClusterState.IDLE:
        return "idle", Severity.PLAIN if finished else Severity.ATTENTION, c.reason
    return c.state.value, Severity.GOOD, why


def _explain_quarantine(c: ClusterView) -> str:
    """By whom it is quarantined; empty if it is not."""
    if c.quarantine:
        return f"by an operator: {c.quarantine}"
    return "by the gate until `dips cluster readmit`" if c.quarantined else ""


def judge_slave(s: SlaveView, heartbeat: SlaveHeartbeat | None, silent_s: float | None) -> Judgement:
    """Likewise."""
    word = s.state.value
    if s.state is SlaveState.LOST:
        return word, Severity.BROKEN, s.reason
    if s.state is not SlaveState.READY:
        work = heartbeat.work if heartbeat is not None else None
        return word, Severity.ATTENTION, s.reason if work is None else f"{s.reason}; {work.describe_progress()}"
    if silent_s is not None:
        return "silent", Severity.ATTENTION, _explain_silence(silent_s, s.state)
    if heartbeat is not None and heartbeat.disk_free < LEAST_FREE * heartbeat.disk_total:
        share = heartbeat.disk_free / heartbeat.disk_total
        return word, Severity.ATTENTION, f"its disk is nearly full: {share:.1%} are free"
    if s.mirror is not None and s.mirror.failing:
        return word, Severity.ATTENTION, f"its mirror fails: {s.mirror.reason}"
    return word, Severity.GOOD, "" if s.cause is SlaveCause.SERVES else s.reason


def _silent_s(heard_s: float | None, since_s: float, run: RunView, heartbeat_s: float) -> float | None:
    """Since when nothing was heard, if that is too long; of one that was never heard, since it came or this master."""
    silent_s = min(since_s, run.uptime_s) if heard_s is None else heard_s
    return silent_s if silent_s > SILENT_HEARTBEATS * heartbeat_s else None


def _explain_silence(silent_s: float, state: str) -> str:
    return f"no heartbeat for {silent_s:.0f} s; it was {state}"


# ---- the run ------------------------------------------------------------------------------------------------------


def _find_concerns(run: RunView) -> Iterator[Concern]:
    if run.finished is None:
        for name, s in run.slaves.items():
            if s.severity in (Severity.ATTENTION, Severity.BROKEN):
                # Every slave holds layers of its own: without one there is no round.
                grave = s.state is not SlaveState.READY
                yield Concern(Severity.BROKEN if grave else Severity.ATTENTION, name, f"{s.word}: {s.why}")
        for name, c in run.clusters.items():
            if c.severity is Severity.ATTENTION:
                yield Concern(Severity.ATTENTION, name, f"{c.word}: {c.why or '; '.join(c.remarks)}")
    yield from find_run_concerns(run)


def find_run_concerns(run: RunView) -> Iterator[Concern]:
    """Find concerns about the run itself, not about one of its peers."""
    if run.pace_warning:
        yield Concern(Severity.ATTENTION, "pace", run.pace_warning)
    for reason in run.untuned:
        yield Concern(Severity.ATTENTION, "not tuned, though the ledger has it", reason)
    durability = run.durability
    if durability.red:
        stopped = durability.state is DurabilityState.STOPPED
        severity = Severity.BROKEN if stopped else Severity.ATTENTION
        yield Concern(severity, "snapshots", f"{durability.state}: {durability.reason}")
    if run.rollback.red:
        yield Concern(Severity.BROKEN, "rollback", run.rollback.reason)
    if (mirror := run.ledger_mirror) is not None and mirror.red:
        lag = f"{mirror.behind_transactions} transactions, {mirror.behind_s:.0f} s behind"
        yield Concern(Severity.ATTENTION, "mirror of the ledger", f"{lag}: {mirror.reason}")
    if (lease := run.lease) is not None and lease.claimable and lease.failing:
        yield Concern(Severity.ATTENTION, "lease", f"not renewed; this master ends when it cannot be: {lease.reason}")
    for standby in () if lease is None else lease.standbys:
        if not standby.ready:
            yield Concern(Severity.ATTENTION, f"standby {standby.name}", f"not ready: {standby.reason}")
    if (done := run.on_version) is not None and done.red:
        yield Concern(Severity.ATTENTION, "on_version", f"{done.version or 'none yet'}: {done.reason}")
    if run.track is not None and run.track.red:
        yield Concern(Severity.ATTENTION, "track", run.track.reason)
    if run.journal is not None and not run.journal.writing:
        yield Concern(Severity.ATTENTION, "journal", "its disk fails it: the run goes on without evidence")


# ---- said in a line -------------------------------------------------------------------------------------------------


def lease_line(lease: LeaseView | None) -> str:
    """Say which master serves, how old its lease is, and which standbys would take over; empty: there is none."""
    if lease is None or not lease.standbys:
        return ""
    age = "no lease" if lease.age_s is None else f"lease {lease.age_s:.0f} s old"
    standbys = (f"{s.name} {'ready' if s.ready and lease.claimable else 'not ready'}" for s in lease.standbys)
    return f"{lease.holder}, {age}; standby: {', '.join(standbys)}"


def protocol_line(view: RunView) -> str:
    """Say that the run could speak a newer protocol, or who is not known to speak it; empty: it speaks the newest."""
    spoken, newest = view.protocol, view.protocol_newest
    if newest <= spoken:
        return ""
    away = join_some(view.holdouts)
    return f"speaks {spoken}, can speak {newest}: " + (f"waits for {away}" if away else "dips finalise")


# ---- on its way -----------------------------------------------------------------------------------------------------


def spell_view(view: RunView) -> str:
    """As JSON: what travels to `dips status`, and what its --json prints."""
    return json.dumps(to_plain(view), separators=(",", ":"))


def read_view(spelled: Mapping[str, object]) -> RunView:
    """Read what a master spelled; raise RemoteProtocolError if that is of no use to this version."""
    try:
        view: RunView = from_plain(RunView, spelled)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RemoteProtocolError(
            f"the master's status is not that of this version of Di-PS ({error}): see it with --json, or upgrade"
        ) from error
    return view
