"""The end of a round, and its outcomes for clusters (docs/protocol.md#messages rows 14 to 16).

One row settles everything: VersionCommitted is the commit point of an outer step. A round that breaks before its row is
*skipped*: θ stays, its clusters keep their progress and train on. One whose pushes were all gated leaves θ *unchanged*.
"""

from __future__ import annotations

from collections.abc import Mapping

from dips.dataclass import replace
from dips.ids import VersionId
from dips.protocol import durability, flip, held_pushes, pushes
from dips.protocol.effects import Abort, DropPush
from dips.protocol.entities import Cluster, Push, Round
from dips.protocol.enums import ClusterCause, FanoutKind, OutcomeKind, RoundResult
from dips.protocol.moves import ROUND_MOVES, ClusterState, RoundState, check_move
from dips.protocol.options import Targets
from dips.protocol.records import (
    FoldRow,
    OutcomeRow,
    PenaltyRow,
    RoundEnded,
    RunFinished,
    ScoreHistory,
    VersionCommitted,
    VersionRow,
)
from dips.protocol.run_state import RunState
from dips.protocol.verdicts import Settled

DELTA_NORMS_KEPT = 50  # accepted ‖δ‖, for a relative clip
ROUND_ORDERS = frozenset({FanoutKind.MEASURE, FanoutKind.FOLD, FanoutKind.APPLY, FanoutKind.PERSIST})


# ---- a version ------------------------------------------------------------------------------------------------------


def commit_version(run: RunState, r: Round, digests: tuple[tuple[str, str], ...], *, durable: bool) -> None:
    """Write the version's row, which makes it exist, and order the flip."""
    version = VersionId(run.head.version + 1, r.number)
    r.state = check_move(ROUND_MOVES, r.state, RoundState.IDLE, f"round {r.number}")
    rows, history = statistics_after(run, r)
    row = _version_row(run, r, version, digests, durable, rows, history)
    run.emit_record(row)
    run.penalty.keep_statistics(rows, history)
    tokens = sum(f.tokens for f in row.folds)
    shares = tuple((p.id.cluster, p.tokens, p.ranges) for p in r.folded)
    run.versions[version] = VersionRow(version, row.parent, durable, tokens, False, shares)
    run.head, run.round = version, None
    run.committed_at[version] = run.now
    run.step_norms[version] = r.step_norm
    run.met.append((len(row.folds), sum(c.live for c in run.clusters.values())))
    run.durability.again_at = 0.0  # a new version tries the disks anew
    run.offers_changed()
    run.tokens_accepted += tokens
    run.counts[RoundResult.APPLIED] += 1
    run.emit_note("version_committed", version=version, round=r.number, contributions=len(r.folded), tokens=tokens)
    pulling = [c for c in (_settle_push(run, p, _kind_of(p), version) for p in r.pushes) if c is not None]
    flip.flip_slaves(run, version, pulling)
    durability.retire_versions(run)
    finish_if_due(run)


def statistics_after(run: RunState, r: Round) -> tuple[dict[str, PenaltyRow], ScoreHistory]:
    """Return the penalty's statistics after this round."""
    verdicts = [Settled(p.id.cluster, p.verdict, p.counted) for p in (*r.folded, *r.gated) if p.verdict is not None]
    live = [c.name for c in run.clusters.values() if c.live]
    rows, history = run.penalty.compute_statistics(verdicts, live, r.theta_digest)
    if r.folded:
        history = replace(history, delta_norms=(*history.delta_norms, r.delta_norm)[-DELTA_NORMS_KEPT:])
    return rows, history


def _version_row(
    run: RunState,
    r: Round,
    version: VersionId,
    digests: tuple[tuple[str, str], ...],
    durable: bool,
    rows: Mapping[str, PenaltyRow],
    history: ScoreHistory,
) -> VersionCommitted:
    folds = tuple(
        FoldRow(
            p.id, p.base, p.counted, p.inner_steps, p.weight, p.verdict.norm, p.verdict.score, p.loss, p.ranges,
            p.layer_weights,
        )
        for p in r.folded
        if p.verdict is not None
    )  # fmt: skip
    outcomes = tuple(_outcome_row(p, _kind_of(p), version) for p in r.pushes)
    return VersionCommitted(
        version, run.head, durable, folds, outcomes, r.step, r.delta_norm, r.clipped, digests, tuple(rows.values()),
        history, run.now,
    )  # fmt: skip


# ---- no version -----------------------------------------------------------------------------------------------------


def end_unchanged(run: RunState, r: Round) -> None:
    """End a round in which all pushes were gated: θ stays, and their clusters pull it."""
    rows, history = statistics_after(run, r)
    outcomes = tuple(_outcome_row(p, OutcomeKind.GATED, None) for p in r.gated)
    reason = "all contributions were gated"
    run.emit_record(RoundEnded(r.number, RoundResult.UNCHANGED, reason, outcomes, tuple(rows.values()), run.now))
    run.penalty.keep_statistics(rows, history)
    run.counts[RoundResult.UNCHANGED] += 1
    run.update_s = 0.0
    run.round = None
    run.emit_note("round_unchanged", round=r.number, gated=len(r.gated))
    _abort_on_slaves(run, r, f"unchanged: {reason}")
    for push in r.gated:
        cluster = _settle_push(run, push, OutcomeKind.GATED, None)
        if cluster is not None:
            run.set_cluster_state(cluster, ClusterState.TRAINING, ClusterCause.GATED, "gated")
    finish_if_due(run)


def skip_round(run: RunState, reason: str) -> None:
    """Skip a round that broke before its row: folded pushes are lost, the others wait for the next window."""
    r = run.round
    if r is None:
        return
    check_move(ROUND_MOVES, r.state, RoundState.IDLE, f"round {r.number}")
    run.forget_orders(ROUND_ORDERS)
    over = [*r.folded, *r.gated]
    if r.current is not None:  # some slave may have measured or folded it already
        over.append(r.current)
    outcomes = tuple(_outcome_row(p, OutcomeKind.SKIPPED, None, reason) for p in over)
    run.emit_record(RoundEnded(r.number, RoundResult.SKIPPED, reason, outcomes, (), run.now))
    run.counts[RoundResult.SKIPPED] += 1
    run.round = None
    run.waiting = [*r.queue, *held_pushes.let_go(r), *run.waiting]
    _abort_on_slaves(run, r, reason)
    run.emit_note("round_skipped", round=r.number, reason=reason)
    _give_back(run, over, reason)
    if r.current is not None:
        _drop_on_slaves(run, r.current, reason)
    finish_if_due(run)


def skip_waiting_pushes(run: RunState, reason: str) -> None:
    """Skip committed pushes without a round: a slave that held a part of them is lost, or the run is over."""
    over, run.waiting = run.waiting, []
    for push in over:
        _drop_on_slaves(run, push, reason)
    _give_back(run, over, reason)


def _abort_on_slaves(run: RunState, r: Round, reason: str) -> None:
    run.order_all(FanoutKind.STANDALONE, r.number, Abort(r.number, reason), run.options.timing.order_s)


def _drop_on_slaves(run: RunState, push: Push, reason: str) -> None:
    run.order_all(FanoutKind.STANDALONE, push.id, DropPush(push.id, reason), run.options.timing.order_s)


def _give_back(run: RunState, over: list[Push], reason: str) -> None:
    for push in over:
        cluster = _settle_push(run, push, OutcomeKind.SKIPPED, None, reason)
        if cluster is not None:
            why = f"its round was skipped: {reason}"
            run.set_cluster_state(cluster, ClusterState.TRAINING, ClusterCause.SKIPPED, why)


# ---- one push -------------------------------------------------------------------------------------------------------


def _kind_of(push: Push) -> OutcomeKind:
    """Return the outcome of a push in a round that made a version."""
    return OutcomeKind.ACCEPTED if push.verdict is not None and push.verdict.accepted else OutcomeKind.GATED


def _outcome_row(push: Push, kind: OutcomeKind, version: VersionId | None, reason: str = "") -> OutcomeRow:
    verdict = push.verdict
    measured = verdict.reason if verdict else ""
    if 0 < push.counted < push.tokens:
        measured = f"{measured}; of its {push.tokens} tokens {push.counted} count: more than is usual here"
    why = reason or (f"in {version}: {measured}" if kind is OutcomeKind.ACCEPTED and verdict else measured)
    norm, score = (verdict.norm, verdict.score) if verdict else (0.0, 0.0)
    return OutcomeRow(push.id, kind, why, push.tokens, push.inner_steps, norm, score, push.ranges, push.begun)


def _settle_push(
    run: RunState, push: Push, kind: OutcomeKind, version: VersionId | None, reason: str = ""
) -> Cluster | None:
    """Give the push's cluster its Outcome; return the cluster if it waits for it and will pull."""
    cluster = run.clusters[push.id.cluster]
    same_incarnation = cluster.inc == push.id.inc
    run.transfers.close_push(push)
    run.count_in_window(cluster, push, -1)
    if kind is not OutcomeKind.SKIPPED:
        run.ranges.settle_ranges(push.id.cluster, push.id.inc, push.ranges, push.begun)
        cluster.tokens[kind] += push.tokens
        if kind is OutcomeKind.ACCEPTED:
            cluster.last_tokens = push.counted
            run.ranges.note_used(push.id.cluster, len(push.ranges))
        if same_incarnation:
            cluster.settled += push.tokens
            cluster.settled_steps += push.inner_steps
            cluster.works_since = push.opened_at
    elif not (same_incarnation and cluster.live):
        cluster.tokens["lost"] += push.tokens
    cluster.counts[kind] += 1
    cluster.last_outcome = _outcome_row(push, kind, version, reason)
    if not (same_incarnation and cluster.live):
        run.ranges.release_lease(push.id.cluster, push.id.inc)
        return None
    if cluster.push is push:
        cluster.push = None
    cluster.outcome = cluster.last_outcome
    cluster.outcome_version = version if kind is OutcomeKind.ACCEPTED else None
    return cluster if cluster.state is ClusterState.COMMITTED else None


# ---- the end of the run ---------------------------------------------------------------------------------------------


def find_end(run: RunState, stop: Targets) -> str:
    """Return which of these targets is reached, or that all data is settled; empty if the run goes on."""
    settled = run.ranges.total > 0 and run.ranges.is_settled(stop.epochs)
    reasons = (
        (stop.tokens and run.tokens_accepted >= stop.tokens, f"{stop.tokens} tokens are accepted"),
        (stop.versions and run.head.version >= stop.versions, f"{stop.versions} outer steps are made"),
        (stop.wall_s and run.now - run.started >= stop.wall_s, f"{stop.wall_s:g} s are over"),
        (settled, f"all {run.ranges.total} data ranges are settled"),
    )
    return next((why for due, why in reasons if due), "")


def finish_if_due(run: RunState) -> None:
    """End the run when one of its targets is reached or its data is settled, and no round is open (Algorithm 1, line
    7).
    """
    reason = find_end(run, run.targets)
    if not reason or run.finished or run.round is not None:
        return
    run.finished = run.head
    run.emit_record(RunFinished(run.head, reason, run.now))
    run.emit_note("run_finished", version=run.head, reason=reason)
    run.slot_queue.clear_queue()
    pushes.drop_all_pushes(run, f"the run is finished: {reason}")
    skip_waiting_pushes(run, f"the run is finished: {reason}")


def finish_if_time_is_over(run: RunState) -> None:
    """End the run if `stop.wall_s` is over; called when time has passed, since no push may come."""
    if run.targets.wall_s:
        finish_if_due(run)
