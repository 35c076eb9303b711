"""A round: window, measure, gate, fold, close, apply, persist, THE COMMIT, flip (protocol.md rows 9 to 18).

Pushes are measured and folded one after another in the order of their commits, so that every slave adds in the same
order and the ledger's order replays bit for bit. Whatever breaks a round before its row makes it *skipped*: θ stays,
its clusters keep their progress and train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite, sqrt
from statistics import median

from dips.errors import FailedDisk
from dips.ids import PullId, PushId, VersionId
from dips.protocol import durability, pulls, pushes
from dips.protocol.effects import Abort, Apply, Commit, DropPush, Fold, Measure, Persist
from dips.protocol.events import Folded, Measured, OrderFailed, Persisted
from dips.protocol.moves import ROUND_MOVES, ClusterState, RoundState, move
from dips.protocol.penalty import Settled, Verdict
from dips.protocol.records import (
    FoldRow,
    OutcomeRow,
    PenaltyRow,
    RoundEnded,
    RoundReserved,
    RunFinished,
    ScoreHistory,
    VersionCommitted,
    VersionRow,
)
from dips.protocol.world import Chorus, Cluster, Push, Round, Slave, World

WINDOW_SHARE = 0.05  # of the median time between a cluster's pushes
LEAST_WINDOW_S = 1.0
LATE_SHARE = 0.1  # of a push's estimated time: so late it is waited for, a wrong estimate must not cost every round
DELTA_NORMS_KEPT = 50  # accepted ‖δ‖, for a relative clip
ROUND_ORDERS = frozenset({"measure", "fold", "apply", "persist"})


def advance(w: World) -> None:
    """Do what has become possible: open a window, measure the next push, close."""
    if w.durability.state == "stopped":
        _stop(w)
    if w.round is None and w.waiting and w.flipping is None and not w.slaves_missing() and not w.finished:
        _open(w)
    r = w.round
    if r is None or r.state is not RoundState.COLLECTING:
        return
    r.queue += w.waiting
    w.waiting = []
    if r.current is None and r.queue:
        _measure(w, r)
    elif r.current is None:
        _close_if_due(w, r)
    if r.state is RoundState.COLLECTING:
        r.reason = f"collecting: {len(r.pushes)} committed, closes in {max(0.0, r.closes - w.now):.1f} s"
        r.reason += f", not before {w.head} is on every disk" if w.durability.late is not None else ""


def _stop(w: World) -> None:
    """Two snapshots failed and the operator wants no version without: nobody waits for a round that will not be."""
    reason = w.durability.reason
    skip(w, reason)
    drop_waiting(w, reason)
    pushes.drop_all(w, reason)


def window_s(w: World) -> float:
    """How long a window is: as configured, or a share of the clusters' own pace."""
    if w.options.timing.window_s is not None:
        return w.options.timing.window_s
    paces = [pace for c in w.clusters.values() if c.live for pace in c.paces]
    return max(LEAST_WINDOW_S, WINDOW_SHARE * median(paces)) if paces else LEAST_WINDOW_S


def _open(w: World) -> None:
    number = w.next_round
    w.next_round += 1
    w.record(RoundReserved(number, w.now))
    state = move(ROUND_MOVES, RoundState.IDLE, RoundState.COLLECTING, f"round {number}")
    w.round = Round(number, state, "window open", w.now, w.now + window_s(w))
    w.opened_at = w.now
    w.note("round_opened", round=number, head=w.head, window_s=f"{window_s(w):.3f}")


def _measure(w: World, r: Round) -> None:
    r.current = r.queue.pop(0)
    w.order_all("measure", r.current.id, Measure(r.number, r.current.id, w.head), w.options.timing.compute_s)


def measured(w: World, chorus: Chorus) -> None:
    """All norms of a push are here: gate it or fold it."""
    r = w.round
    assert r is not None and r.current is not None and r.current.id == chorus.subject
    push = r.current
    layer_sq, finite = _gather_norms(w, chorus)
    exempt = not w.is_ancestor(push.base)
    push.verdict = w.penalty.verdict(push.id.cluster, layer_sq, finite, push.inner_steps, exempt)
    if push.tokens <= 0:
        push.verdict = Verdict(False, 0.0, 0.0, "it brings no tokens", tracked=False)
    if push.verdict.accepted:
        push.weight = push.tokens / r.folded[0].tokens if r.folded else 1.0
        w.order_all("fold", push.id, Fold(r.number, push.id, push.weight), w.options.timing.compute_s)
        return
    r.gated.append(push)
    r.current = None
    w.order_all("done", push.id, DropPush(push.id, f"gated: {push.verdict.reason}"), w.options.timing.order_s)
    w.note("push_gated", push=push.id, reason=push.verdict.reason)


def _gather_norms(w: World, chorus: Chorus) -> tuple[list[float], bool]:
    """Σ(θ − θ_j)² of every layer in manifest order, so that the sum does not depend on the number of slaves."""
    by_layer, finite = dict[int, float](), True
    for slave in w.slaves.values():
        answer = chorus.answers[slave.name]
        assert isinstance(answer, Measured)
        finite = finite and answer.finite and len(answer.layer_sq) == len(slave.layers)
        by_layer.update(zip(slave.layers, answer.layer_sq, strict=False))
    return [by_layer[layer] for layer in sorted(by_layer)], finite


def folded(w: World, chorus: Chorus) -> None:
    """The push is in the running mean on every slave; its slot is free."""
    r = w.round
    assert r is not None and r.current is not None and r.current.id == chorus.subject
    r.acc_sq = 0.0
    for name in w.slaves:
        answer = chorus.answers[name]
        assert isinstance(answer, Folded)
        r.acc_sq += answer.acc_sq
    r.folded.append(r.current)
    r.current = None


def _close_if_due(w: World, r: Round) -> None:
    if w.now < r.closes and any(_expected(w, c, r) for c in w.clusters.values()):
        return
    if not r.folded:
        _end_unchanged(w, r)
        return
    if w.durability.late is not None:
        return  # θ and m, which are being written, would be given away by the next flip (protocol.md section 2)
    r.state = move(ROUND_MOVES, r.state, RoundState.APPLYING, f"round {r.number}")
    if not _scale(w, r):
        skip(w, f"the norm of the averaged pseudo-gradient is {r.delta_norm}")
        return
    r.reason = f"applying {len(r.folded)} contributions"
    w.closed_at = w.now
    version = VersionId(w.head.version + 1, r.number)
    o = w.options.outer
    order = Apply(r.number, version, r.scale, o.lr, o.momentum, durability.reserves(w))
    w.order_all("apply", version, order, w.options.timing.compute_s)
    w.note(
        "round_applying",
        round=r.number,
        contributions=len(r.folded),
        delta_norm=f"{r.delta_norm:.6g}",
        clipped=r.clipped,
    )


def _expected(w: World, cluster: Cluster, r: Round) -> bool:
    """Will this cluster's push come before the window ends? (why.md 24)"""
    if not cluster.live or not cluster.moving or cluster.state not in (ClusterState.TRAINING, ClusterState.PUSHING):
        return False
    if cluster.state is ClusterState.PUSHING and cluster.push is not None:
        return _comes_in_time(w, cluster, cluster.push, r)
    if cluster.pace is None or cluster.requested_at is None:
        return True
    return cluster.requested_at + cluster.pace + w.moving_s(cluster) <= r.closes  # paces are from request to request


def _comes_in_time(w: World, cluster: Cluster, push: Push, r: Round) -> bool:
    """A slow link must keep open neither the windows before its push is due nor, once it is late, all those after."""
    return not push.due or (push.due <= r.closes and w.now < _late_at(w, cluster, push))


def _late_at(w: World, cluster: Cluster, push: Push) -> float:
    return push.due + max(LEAST_WINDOW_S, LATE_SHARE * w.moving_s(cluster))


def due_at(w: World) -> Iterator[float]:
    """When a window ends by itself, and when each push that it waits for will be late."""
    r = w.round
    if r is None or r.state is not RoundState.COLLECTING or r.current is not None:
        return
    if r.folded and w.durability.late is not None:
        return  # it ends when that version is on the disks, not by time
    yield r.closes
    for cluster in w.clusters.values():
        push = cluster.push
        if push is not None and push.due and _expected(w, cluster, r):
            yield _late_at(w, cluster, push)


def _scale(w: World, r: Round) -> bool:
    """scale = c·min(1, φ/‖c·acc‖) with c = T_first/ΣT; False if the norm is not finite."""
    c = r.folded[0].tokens / sum(p.tokens for p in r.folded)
    r.delta_norm = c * sqrt(r.acc_sq) if r.acc_sq >= 0 else float("nan")
    limit = _clip_limit(w)
    r.clipped = limit is not None and r.delta_norm > limit
    r.scale = c * (limit / r.delta_norm) if r.clipped and limit is not None else c
    return isfinite(r.delta_norm)


def _clip_limit(w: World) -> float | None:
    clip = w.options.outer.clip
    if clip.relative is not None:
        norms = w.penalty.history.delta_norms
        return clip.relative * median(norms) if norms else None
    return clip.norm


def applied(w: World, chorus: Chorus) -> None:
    """θ′ and m′ stand on every slave: write them down, or write the row first."""
    r, version = w.round, chorus.subject
    assert r is not None and isinstance(version, VersionId)
    r.state = move(ROUND_MOVES, r.state, RoundState.PERSISTING, f"round {r.number}")
    r.reason = f"persisting {version}"
    if not durability.before_the_row(w):
        _commit(w, r, (), durable=False)
        return
    w.order_all("persist", version, Persist(version), w.options.timing.compute_s)
    w.note("round_persisting", round=r.number, version=version)


def persisted(w: World, chorus: Chorus) -> None:
    """The version is on every disk."""
    assert w.round is not None
    durability.succeeded(w)
    digests = tuple((name, a.digest) for name, a in chorus.answers.items() if isinstance(a, Persisted))
    _commit(w, w.round, digests, durable=True)


def disk_failed(w: World, slave: Slave, chorus: Chorus, event: OrderFailed) -> bool:
    """An Apply found no room, or a Persist failed: skip the round, or go on without; False if it was no disk."""
    if chorus.kind not in ("apply", "persist") or not event.reason.startswith(FailedDisk.__name__):
        return False
    assert w.round is not None
    reason = f"{slave.name} refused: {event.reason}"
    durability.failed(w, reason)
    if w.durability.state != "degraded":
        skip(w, reason)
    elif chorus.kind == "persist":
        w.forget_orders(frozenset({"persist"}))
        _commit(w, w.round, (), durable=False)
    else:
        body = w.choruses[event.number][1].body
        assert isinstance(body, Apply)
        w.say_otherwise(event.number, replace(body, reserve=False))
    return True


def _commit(w: World, r: Round, digests: tuple[tuple[str, str], ...], *, durable: bool) -> None:
    """Write the version's row, which makes it exist, and let everybody flip."""
    version = VersionId(w.head.version + 1, r.number)
    r.state = move(ROUND_MOVES, r.state, RoundState.IDLE, f"round {r.number}")
    rows, history = _statistics(w, r)
    row = _version_row(w, r, version, digests, durable, rows, history)
    w.record(row)
    w.penalty.keep(rows, history)
    tokens = sum(f.tokens for f in row.folds)
    shares = tuple((f.push.cluster, f.tokens, f.ranges) for f in row.folds)
    w.versions[version] = VersionRow(version, row.parent, durable, tokens, False, shares)
    w.head, w.round = version, None
    w.durability.again_at = 0.0  # a new version tries the disks anew
    w.offers_changed()
    w.tokens_accepted += tokens
    w.counts["applied"] += 1
    w.note("version_committed", version=version, round=r.number, contributions=len(r.folded), tokens=tokens)
    taking = [c for c in (_settle(w, p, version) for p in r.pushes) if c is not None]
    opening = tuple(_pull_of(c) for c in taking)
    _flip(w, version, opening)
    durability.retire(w)
    _finish_if_due(w)


def _statistics(w: World, r: Round) -> tuple[dict[str, PenaltyRow], ScoreHistory]:
    verdicts = [Settled(p.id.cluster, p.verdict) for p in (*r.folded, *r.gated) if p.verdict is not None]
    live = [c.name for c in w.clusters.values() if c.live]
    rows, history = w.penalty.settled(verdicts, live)
    if r.folded and r.state is not RoundState.COLLECTING:
        history = ScoreHistory(history.scores, (*history.delta_norms, r.delta_norm)[-DELTA_NORMS_KEPT:])
    return rows, history


def _version_row(
    w: World,
    r: Round,
    version: VersionId,
    digests: tuple[tuple[str, str], ...],
    durable: bool,
    rows: Mapping[str, PenaltyRow],
    history: ScoreHistory,
) -> VersionCommitted:
    folds = tuple(
        FoldRow(p.id, p.base, p.tokens, p.inner_steps, p.weight, p.verdict.norm, p.verdict.score, p.loss, p.ranges)
        for p in r.folded
        if p.verdict is not None
    )
    outcomes = tuple(_outcome_row(p, _kind(p), version) for p in r.pushes)
    o = w.options.outer
    return VersionCommitted(
        version, w.head, durable, folds, outcomes, r.scale, o.lr, o.momentum, r.delta_norm, r.clipped, digests,
        tuple(rows.values()), history, w.now,
    )  # fmt: skip


def _kind(push: Push) -> str:
    return "accepted" if push.verdict is not None and push.verdict.accepted else "gated"


def _outcome_row(push: Push, kind: str, version: VersionId | None, reason: str = "") -> OutcomeRow:
    verdict = push.verdict
    why = reason or (
        f"in {version}: {verdict.reason}" if kind == "accepted" and verdict else verdict.reason if verdict else ""
    )
    norm, score = (verdict.norm, verdict.score) if verdict else (0.0, 0.0)
    return OutcomeRow(push.id, kind, why, push.tokens, push.inner_steps, norm, score, push.ranges)


def _settle(w: World, push: Push, version: VersionId | None, kind: str = "", reason: str = "") -> Cluster | None:
    """Tell the push's cluster its Outcome; return the cluster if it waits for it and so will pull."""
    cluster = w.clusters[push.id.cluster]
    kind = kind or _kind(push)
    same_life = cluster.inc == push.id.inc
    if kind != "skipped":
        w.ranges.settle(push.id.cluster, push.id.inc, push.ranges)
        cluster.tokens[kind] += push.tokens
        cluster.settled += push.tokens if push.id.inc == cluster.inc else 0
    elif not (same_life and cluster.live):
        cluster.tokens["lost"] += push.tokens
    cluster.counts[kind] += 1
    if not (same_life and cluster.live):
        w.ranges.release(push.id.cluster, push.id.inc)
        return None
    if cluster.push is push:
        cluster.push = None
    cluster.outcome = _outcome_row(push, kind, version, reason)
    cluster.outcome_version = version if kind == "accepted" else None
    return cluster if cluster.state is ClusterState.COMMITTED else None


def _pull_of(cluster: Cluster) -> PullId:
    assert cluster.outcome is not None
    push: PushId = cluster.outcome.push
    return PullId(push.cluster, push.inc, push.seq)


def _flip(w: World, version: VersionId, opening: tuple[PullId, ...]) -> None:
    """Order the flip; those who wait are told once every slave has flipped and pinned for them."""
    deadlines = [pulls.pulling(w, w.clusters[pull.cluster], pull, version) for pull in opening]
    # One number for all: the slowest's. The master ends each pull at its own (pulls.expire).
    commit = Commit(version, opening, max(deadlines, default=w.options.timing.transfer_s))
    w.flipping = w.order_all("commit", version, commit, w.options.timing.order_s)
    if not w.flipping.waiting:
        flipped(w, w.flipping)


def flipped(w: World, chorus: Chorus) -> None:
    """Every slave that lives serves the version."""
    w.flipping = None
    w.update_s = w.now - w.closed_at
    complete = not w.slaves_missing()
    for slave in w.ready_slaves():
        slave.memory, slave.reason = w.head, f"serves {w.head}"
    for cluster in w.clusters.values():
        pull = cluster.pull
        if (
            pull
            and not pull.opened
            and pull.version == chorus.subject
            and cluster.outcome
            and _pull_of(cluster) == pull.id
        ):
            if complete:
                pull.opened = True
            else:
                pulls.close(w, cluster, "a slave was lost while it flipped")


def stop_waiting(w: World, slave: str) -> None:
    """Nobody waits for its answers any more; a chorus that needs them all is ended by whoever ends its subject."""
    for number, (chorus, order) in list(w.choruses.items()):
        if order.slave == slave:
            w.choruses.pop(number, None)
            if chorus.kind in ("commit", "done"):
                chorus.waiting.discard(slave)
            elif chorus is w.durability.late:
                durability.interrupt(w)
    if w.flipping is not None and not w.flipping.waiting:
        flipped(w, w.flipping)


def _end_unchanged(w: World, r: Round) -> None:
    """All were gated: θ stays, and the gated pull it."""
    rows, history = _statistics(w, r)
    outcomes = tuple(_outcome_row(p, "gated", None) for p in r.gated)
    w.record(RoundEnded(r.number, "unchanged", "all contributions were gated", outcomes, tuple(rows.values()), w.now))
    w.penalty.keep(rows, history)
    w.counts["unchanged"] += 1
    w.update_s = 0.0
    w.round = None
    w.note("round_unchanged", round=r.number, gated=len(r.gated))
    w.order_all("done", r.number, Abort(r.number, "unchanged: all contributions were gated"), w.options.timing.order_s)
    for push in r.gated:
        cluster = _settle(w, push, None)
        if cluster is not None:
            cluster.become(ClusterState.TRAINING, "gated")
    _finish_if_due(w)


def skip(w: World, reason: str) -> None:
    """The round broke before its row: presumed abort. Folded pushes are gone, the others wait for the next window."""
    r = w.round
    if r is None:
        return
    move(ROUND_MOVES, r.state, RoundState.IDLE, f"round {r.number}")
    w.forget_orders(ROUND_ORDERS)
    over = [*r.folded, *r.gated]
    if r.current is not None:  # its measure or fold may have been half-way on some slave
        over.append(r.current)
    w.record(
        RoundEnded(
            r.number, "skipped", reason, tuple(_outcome_row(p, "skipped", None, reason) for p in over), (), w.now
        )
    )
    w.counts["skipped"] += 1
    w.round = None
    w.waiting = [*r.queue, *w.waiting]
    w.order_all("done", r.number, Abort(r.number, reason), w.options.timing.order_s)
    w.note("round_skipped", round=r.number, reason=reason)
    _give_back(w, over, reason)
    if r.current is not None:
        w.order_all("done", r.current.id, DropPush(r.current.id, reason), w.options.timing.order_s)
    _finish_if_due(w)


def _give_back(w: World, over: list[Push], reason: str) -> None:
    for push in over:
        cluster = _settle(w, push, None, "skipped", reason)
        if cluster is not None:
            cluster.become(ClusterState.TRAINING, f"its round was skipped: {reason}")


def drop_waiting(w: World, reason: str) -> None:
    """A slave that held a part of them is gone, or the run is over: committed pushes without a round are skipped."""
    over, w.waiting = w.waiting, []
    for push in over:
        w.order_all("done", push.id, DropPush(push.id, reason), w.options.timing.order_s)
    _give_back(w, over, reason)


def _finish_if_due(w: World) -> None:
    """End the run when what `stop` names is reached, or its data, and no round is open (Algorithm 1, line 7)."""
    stop = w.options.stop
    reasons = (
        (stop.tokens and w.tokens_accepted >= stop.tokens, f"{stop.tokens} tokens are accepted"),
        (stop.versions and w.head.version >= stop.versions, f"{stop.versions} outer steps are made"),
        (stop.wall_s and w.now - w.started >= stop.wall_s, f"{stop.wall_s:g} s are over"),
        (w.ranges.used_up, f"all {w.ranges.total} data ranges are settled"),
    )
    reason = next((why for due, why in reasons if due), "")
    if not reason or w.finished or w.round is not None:
        return
    w.finished = w.head
    w.record(RunFinished(w.head, reason, w.now))
    w.note("run_finished", version=w.head, reason=reason)
    pushes.drop_all(w, f"the run is finished: {reason}")
    drop_waiting(w, f"the run is finished: {reason}")


def finish_if_due(w: World) -> None:
    """Called when time has passed: `stop.wall_s` needs no push to end a run."""
    if w.options.stop.wall_s:
        _finish_if_due(w)
