"""A round: its window, measure, gate, fold, close, apply, persist, and its outcomes for the clusters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, isfinite, nan, sqrt
from statistics import median
from typing import TypeVar, cast

from dips.dataclass import replace
from dips.errors import FailedDisk
from dips.ids import VersionId
from dips.outer_step import OuterStep, factor_at, join_factors, pick_factors, returned_share
from dips.protocol import durability, push_pull, rules
from dips.protocol.effects import Abort, Apply, DropPush, Fold, Measure, Persist
from dips.protocol.entities import Cluster, Fanout, Push, Round, Slave
from dips.protocol.enums import (
    ROUND_MOVES,
    ClusterCause,
    ClusterState,
    DurabilityState,
    FanoutKind,
    GateName,
    OutcomeKind,
    RoundResult,
    RoundState,
    WindowRule,
    check_move,
)
from dips.protocol.events import Folded, Measured, OrderFailed, Persisted, Prepared
from dips.protocol.gates.direction import is_against
from dips.protocol.options import Targets
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
from dips.protocol.run_state import RunState
from dips.protocol.verdicts import PushEvidence, Settled, Verdict

# ---- window ---------------------------------------------------------------------------------------------------------
# The window in which a round takes commits: its length, the awaited pushes, and its end (docs/rationale.md#24).
#
# A window ends when its time is over, or earlier when no push is expected any more. With `timing.window: adaptive` its
# time may grow to at most MOST_LENGTHS times its length, for clusters that are due soon, as long as the mean wait of
# all pushes in it is no longer than a fixed window's for its first push.


WINDOW_SHARE = 0.05  # of the median time between a cluster's pushes
IDLE_SHARE = 0.2  # of the time in which a push is open without moving: inner steps and fragments end at any time in it
LEAST_WINDOW_S = 1.0
LATE_SHARE = 0.1  # of a push's estimated time: waited for that much longer; a wrong estimate must not cost every round
MOST_LENGTHS = 4.0  # of its length, the most that an adaptive window may last: a round must end
SPREAD_SHARE = 0.5  # of a window: added to the time when a cluster is due by its last pushes


def window_s(run: RunState) -> float:
    """Return the length of a window: as configured, or a share of the clusters' own pace."""
    if run.options.timing.window_s is not None:
        return run.options.timing.window_s
    paces = [pace for c in run.clusters.values() if c.live for pace in c.paces]
    if not paces:
        return LEAST_WINDOW_S
    pace = median(paces)
    idle_s = max((push.idle_s for push in run.transfers.pushes.values()), default=0.0)
    return max(LEAST_WINDOW_S, WINDOW_SHARE * pace + IDLE_SHARE * min(idle_s, pace))


def can_open(run: RunState) -> bool:
    """Whether a push waits for a round, and every slave can take one."""
    return bool(run.waiting) and run.round is None and run.flipping is None and not run.roster.missing


def open_window(run: RunState) -> None:
    """Begin a round; its number is reserved by a row before it is used."""
    number = run.next_round
    run.next_round += 1
    run.emit_record(RoundReserved(number, run.now))
    state = check_move(ROUND_MOVES, RoundState.IDLE, RoundState.COLLECTING, f"round {number}")
    lasts_s = window_s(run)
    run.round = Round(number, state, "window open", run.now, run.now + lasts_s, window_s=lasts_s)
    run.opened_at = run.now
    run.emit_note("round_opened", round=number, head=run.head, window_s=f"{lasts_s:.3f}")


def extend_open_window(run: RunState) -> None:
    """Extend the open window if it should be longer, after a push was granted or committed."""
    if run.round is not None and run.round.state is RoundState.COLLECTING:
        extend_window(run, run.round)


def extend_window(run: RunState, r: Round) -> None:
    """Extend an adaptive window; never to less than before, nor to more than MOST_LENGTHS."""
    if run.options.timing.window is WindowRule.ADAPTIVE:
        r.closes = max(r.closes, min(_adapt(run, r), r.opened + MOST_LENGTHS * r.window_s))


def _adapt(run: RunState, r: Round) -> float:
    """Return the arrival of the last due cluster for which the mean wait of all pushes is at most `window_s`."""
    latest = r.opened + MOST_LENGTHS * r.window_s
    arrivals = [push.committed_at for push in r.pushes]
    total, count, end = sum(arrivals), len(arrivals), r.closes
    for due in sorted(due for due in _predict_arrivals(run) if run.now < due <= latest):
        total, count = total + due, count + 1
        if due - total / count <= r.window_s:
            end = due + SPREAD_SHARE * r.window_s
    return end


def _predict_arrivals(run: RunState) -> Iterator[float]:
    """Iterate over the expected arrivals of pushes under way and of those of training clusters; -inf is unknown."""
    for push in run.transfers.uncommitted_pushes():
        if push.due and run.clusters[push.id.cluster].moving:
            yield push.due
    yield from run.next_pushes.at.values()


def is_over(run: RunState, r: Round) -> bool:
    """Whether the window's time is over, or no further push will come before its end."""
    if run.now >= r.closes:
        return True
    return run.next_pushes.first_at() > r.closes and _find_awaited(run, r) is None


def window_deadline(run: RunState, r: Round) -> float:
    """Return when to see whether the window is over: at its end, or once a push that it waits for is late.

    Of all awaited pushes one is enough: the window stays open at least until that one is late.
    """
    if r.state is not RoundState.COLLECTING or r.current is not None:
        return inf
    if r.folded and run.durability.late is not None:
        return inf  # it ends when that version is on the disks, not by time
    awaited = _find_awaited(run, r)
    return min(r.closes, _late_at(run, *awaited)) if awaited is not None and awaited[1].due else r.closes


def _find_awaited(run: RunState, r: Round) -> tuple[Cluster, Push] | None:
    """Return a push under way that will arrive before the window ends; None if there is none."""
    for push in run.transfers.pushes.values():
        cluster = run.clusters[push.id.cluster]
        if not push.committed and cluster.moving and _comes_in_time(run, cluster, push, r):
            return cluster, push
    return None


def _comes_in_time(run: RunState, cluster: Cluster, push: Push, r: Round) -> bool:
    """Whether the window waits for the push: only if it is due in it, and not once it is late, so that a slow link
    delays few.
    """
    return not push.due or (push.due <= r.closes and run.now < _late_at(run, cluster, push))


def _late_at(run: RunState, cluster: Cluster, push: Push) -> float:
    return push.due + max(LEAST_WINDOW_S, LATE_SHARE * run.moving_s(cluster, push.codec), push.idle_s)


# ---- held pushes ----------------------------------------------------------------------------------------------------
# Pushes that keep their slots until the others of their round are folded, so that the gate `direction` compares them
# with the whole sum: those of clusters that have just joined or were out of line, and those that turn out to point away
# from the sum.
#
# They block no other push: when the window is over, or another push needs a slot and none is free, the one that was
# least out of line is measured and judged against the pushes folded so far.


def hold_if_due(run: RunState, r: Round, push: Push) -> bool:
    """Before it is measured: hold a push that should be judged last; return whether it is held."""
    live = [c.name for c in run.clusters.values() if c.trains]
    if push.was_held or not run.penalty.waits_for_others(push.id.cluster, live):
        return False
    _hold(run, r, push, "has joined lately or was out of line")
    return True


def hold_if_against(run: RunState, r: Round, push: Push) -> bool:
    """After it was measured: hold a push that points away from those before it, once; return whether it is held."""
    assert push.verdict is not None
    undecided = push.verdict.accepted or push.verdict.gate is GateName.DIRECTION
    if push.was_held or not run.penalty.gates_direction or not undecided or not is_against(push.verdict.evidence):
        return False
    reason, push.verdict, push.was_against = push.verdict.reason, None, True
    _hold(run, r, push, reason)
    return True


def take_held(run: RunState, r: Round) -> Push | None:
    """Return the held push that is to be judged now; None while all can wait, or if there is none."""
    if not r.held or not (is_over(run, r) or _slot_is_wanted(run)):
        return None
    push = min(r.held, key=lambda p: run.penalty.suspicion_of(p.id.cluster))
    r.held.remove(push)
    push.was_held = True
    return push


def _hold(run: RunState, r: Round, push: Push, reason: str) -> None:
    r.held.append(push)
    run.emit_note("push_held", push=push.id, reason=reason)


def let_go(r: Round) -> list[Push]:
    """Return the held pushes of a skipped round; they wait for the next round, which decides anew."""
    held, r.held = r.held, []
    for push in held:
        push.was_against = False
    return held


def count_against(r: Round) -> int:
    """Return how many pushes of the round wait because they point away from its sum, the one being judged included."""
    current = [r.current] if r.current is not None else []
    return sum(push.was_against for push in (*r.held, *current))


def _slot_is_wanted(run: RunState) -> bool:
    free = run.roster.slots - len(run.transfers.pushes)
    return free <= 0 and run.slot_queue.count_waiting(run.now) > 0


# ---- stepping -------------------------------------------------------------------------------------------------------
# What must stay true: a push's weights depend on it and on those folded before it, never on later ones, since slaves
# fold each as it comes. In the common case, the mean of whole pushes, all layers share one number.


# ---- weights of a push ----------------------------------------------------------------------------------------------


def weigh_push(run: RunState, r: Round, push: Push) -> None:
    """Compute the weights of an accepted push, relative to the first that is folded."""
    assert push.verdict is not None
    o, most = run.options.outer, run.penalty.most_tokens()
    push.counted = push.tokens if most is None else min(push.tokens, most)
    if push.counted < push.tokens:
        run.emit_note("push_capped", push=push.id, tokens=push.tokens, counted=push.counted)
    push.merge_weight = rules.WEIGHTS[o.weights](push.counted)
    push.weight = push.counted / r.folded[0].counted if r.folded else 1.0
    r.flagged |= bool(push.verdict.flagged)
    layers = _layers_that_differ(run, r)
    weights = [rules.weigh_last(_merge_of(run, i), _layer_shares(r.folded, i), _share_in(push, i)) for i in layers]
    push.layer_weights = () if set(weights) == {push.weight} else join_factors(tuple(weights))


def fold_order(r: Round, push: Push, layers: Sequence[int]) -> Fold:
    """Return the order for a slave that holds these layers."""
    weights = push.layer_weights
    return Fold(r.number, push.id, push.weight, pick_factors(weights, layers) if weights else ())


def _layers_that_differ(run: RunState, r: Round) -> Sequence[int]:
    """Return the layers whose weights and scales may differ; the first layer stands for all that are not returned."""
    by_layer = rules.find_merge(run.options.outer.merge).by_layer or r.flagged
    return range(len(run.manifest.layers)) if by_layer else (0,)


def _merge_of(run: RunState, layer: int) -> rules.Merge:
    merge = rules.find_merge(run.options.outer.merge)
    return rules.MEAN if merge.blocks_only and layer not in run.manifest.blocks else merge


def _layer_shares(pushes: Sequence[Push], layer: int) -> Iterator[rules.LayerShare | None]:
    """Iterate over the pushes' shares in one layer, lazily, since a caller may stop at the first that counts."""
    return (_share_in(push, layer) for push in pushes)


def _share_in(push: Push, layer: int) -> rules.LayerShare | None:
    assert push.verdict is not None
    if layer in push.verdict.flagged:
        return None
    return rules.LayerShare(push.merge_weight, sqrt(push.layer_sq[layer]), push.inner_steps)


# ---- coefficients of a round ----------------------------------------------------------------------------------------


def make_step(run: RunState, r: Round) -> rules.Clipped:
    """Compute the coefficients of the round's outer step; its norm may turn out not to be finite."""
    o = run.options.outer
    cut = _clip(run, r, _scale_layers(run, r))
    live = {cluster.name: cluster.last_tokens for cluster in run.clusters.values() if cluster.trains}
    clusters = len(live.keys() | {push.id.cluster for push in r.folded})
    lr = rules.rate_of_clusters(clusters) if isinstance(o.lr, str) else o.lr
    numbers = rules.find_step(o.step)(_describe_round(run, r, live))
    r.step = OuterStep(cut.scales, lr, *numbers, returned_share(lr, numbers))
    return cut


def _scale_layers(run: RunState, r: Round) -> tuple[float, ...]:
    scales = []
    for layer in _layers_that_differ(run, r):
        weights = [factor_at(push.layer_weights or (push.weight,), layer) for push in r.folded]
        shares, acc_sq = _layer_shares(r.folded, layer), r.acc_sq[layer]
        scales.append(
            rules.scale_layer(_merge_of(run, layer), shares, weights, sqrt(acc_sq) if acc_sq >= 0 else acc_sq)
        )
    return join_factors(tuple(scales))


def _clip(run: RunState, r: Round, scales: tuple[float, ...]) -> rules.Clipped:
    clip, norms = run.options.outer.clip, run.penalty.history.delta_norms
    if clip.per_layer:
        return rules.clip_layers(scales, r.acc_sq, clip.norm)
    relative = clip.relative * median(norms) if clip.relative is not None and norms else None
    return rules.clip_whole(scales, r.acc_sq, clip.norm if clip.relative is None else relative)


def _describe_round(run: RunState, r: Round, live: dict[str, int]) -> rules.StepRound:
    """Return the round's momentum and share of a cycle, the input of a step rule."""
    tokens = dict[str, int]()
    for push in r.folded:
        tokens[push.id.cluster] = tokens.get(push.id.cluster, 0) + push.counted
    return rules.StepRound(run.options.outer.momentum, rules.measure_share(tokens, live))


# ---- round ----------------------------------------------------------------------------------------------------------
# A round: collect, measure, gate, fold, close, apply, persist (docs/protocol.md#messages rows 9 to 14).
#
# Pushes are measured and folded one after another in the order of their commits, so that every slave adds in the same
# order and the ledger's order replays bit for bit. The settlement ends the round for its clusters: with a commit, or
# with a skip if anything breaks the round before its row.


PUSH_DIGESTS = 1 << 53  # a push's digest is the sum of its slaves' digests modulo this
A = TypeVar("A", Measured, Folded, Prepared)


def advance_round(run: RunState) -> None:
    """Do what has become possible: open a window, measure the next push, or close the window."""
    if run.durability.state is DurabilityState.STOPPED:
        _give_up_pushes(run)
    if can_open(run):
        open_window(run)
    r = run.round
    if r is None or r.state is not RoundState.COLLECTING:
        return
    if run.waiting:
        r.queue += run.waiting
        run.waiting = []
        extend_window(run, r)
    while r.current is None and r.queue:
        _measure_unless_held(run, r, r.queue.popleft())
    if r.current is None and (held := take_held(run, r)) is not None:
        _measure_push(run, r, held)
    elif r.current is None and is_over(run, r):
        _close_window(run, r)


def _give_up_pushes(run: RunState) -> None:
    """Skip and drop all pushes: no round is opened until the disks work again, and no cluster should wait for one."""
    reason = run.durability.reason
    skip_round(run, reason)
    skip_waiting_pushes(run, reason)
    push_pull.drop_all_pushes(run, reason)


def _measure_unless_held(run: RunState, r: Round, push: Push) -> None:
    if not hold_if_due(run, r, push):
        _measure_push(run, r, push)


def _measure_push(run: RunState, r: Round, push: Push) -> None:
    r.current = push
    order = Measure(r.number, push.id, run.head)
    run.order_all(FanoutKind.MEASURE, push.id, order, run.options.timing.compute_s)


def on_push_measured(run: RunState, fanout: Fanout) -> None:
    """Judge a push that all slaves have measured: gate it, fold it, or hold it for the others."""
    r = run.round
    assert r is not None and r.current is not None and r.current.id == fanout.subject
    push = r.current
    evidence = _gather_evidence(run, r, push, fanout)
    verdict = run.penalty.judge_push(evidence)
    if push.tokens <= 0:
        verdict = Verdict(False, 0.0, 0.0, "it brings no tokens", evidence, tracked=False)
    push.verdict = _judge_quarantined(run, push.id.cluster, verdict)
    if hold_if_against(run, r, push):
        r.current = None
        return
    if push.verdict.accepted:
        for flag in push.verdict.flags:
            run.emit_note("push_flagged", push=push.id, reason=flag)
        weigh_push(run, r, push)
        orders = {slave.name: fold_order(r, push, slave.layers) for slave in run.ready_slaves()}
        run.fan_out(FanoutKind.FOLD, push.id, dict(orders), run.options.timing.compute_s)
        return
    r.gated.append(push)
    r.current = None
    run.transfers.close_push(push)
    order = DropPush(push.id, f"gated: {push.verdict.reason}")
    run.order_all(FanoutKind.STANDALONE, push.id, order, run.options.timing.order_s)
    run.emit_note("push_gated", push=push.id, gate=push.verdict.gate or "", reason=push.verdict.reason)


def _judge_quarantined(run: RunState, cluster: str, verdict: Verdict) -> Verdict:
    """Return the verdict after an operator's quarantine, which overrides the gates."""
    if (reason := run.quarantined.get(cluster)) is None:
        return verdict
    said = f"quarantined by an operator: {reason}"
    return Verdict(False, verdict.norm, verdict.score, said, verdict.evidence, tracked=False, held=True)


def _gather_evidence(run: RunState, r: Round, push: Push, fanout: Fanout) -> PushEvidence:
    """Return the evidence on a push: the slaves' measurements, and the round's state before it."""
    answers = _read_answers(run, fanout, Measured)
    before = [p.verdict.evidence for p in r.folded if p.verdict is not None]
    live = [cluster.name for cluster in run.clusters.values() if cluster.trains]
    compared = [evidence for evidence in before if evidence.witnesses >= evidence.strangers]
    cosines = [cosine for evidence in compared if (cosine := evidence.cosine) is not None]
    return PushEvidence(
        push.id.cluster,
        _order_by_layer(run, ((slave, answer.layer_sq) for slave, answer in answers), nan),
        push.inner_steps,
        all(answer.finite and len(answer.layer_sq) == len(slave.layers) for slave, answer in answers),
        exempt=not run.is_ancestor(push.base),
        dot=sum(_order_by_layer(run, ((slave, answer.layer_dot) for slave, answer in answers), 0.0)),
        acc_sq=sum(r.acc_sq),
        others=len(r.folded),
        strangers=sum(not p.base == push.base == run.head for p in r.folded),
        split=any(map(is_against, before)),
        usual=sum(cosines) / len(cosines) if cosines else 0.0,
        own=run.penalty.own_cosine(push.id.cluster),
        against=count_against(r),
        clusters=len(live),
        trusted=run.penalty.count_trusted(push.id.cluster, live),
        moved=run.moved_since(push.base),
        digest=_sum_digests(answers),
        loss=push.loss,
    )


def on_push_folded(run: RunState, fanout: Fanout) -> None:
    """Record that a push is in the running sum on every slave; its slot is free."""
    r = run.round
    assert r is not None and r.current is not None and r.current.id == fanout.subject
    answers = _read_answers(run, fanout, Folded)
    r.acc_sq = _order_by_layer(run, ((slave, answer.acc_sq) for slave, answer in answers), nan)
    r.folded.append(r.current)
    run.transfers.close_push(r.current)
    r.current = None


# ---- the outer step -------------------------------------------------------------------------------------------------


def _close_window(run: RunState, r: Round) -> None:
    if not r.folded:
        end_unchanged(run, r)
        return
    if run.durability.late is not None:
        return  # the next flip would overwrite θ and m, which are being written (docs/protocol.md#memory)
    r.state = check_move(ROUND_MOVES, r.state, RoundState.APPLYING, f"round {r.number}")
    made = make_step(run, r)
    if not made.finite:
        skip_round(run, f"the norm of the averaged pseudo-gradient is {made.norm}")
        return
    r.delta_norm, r.clipped = made.norm, made.clipped
    r.reason = f"{len(r.folded)} contributions"
    run.closed_at = run.now
    version = VersionId(run.head.version + 1, r.number)
    reserve = durability.reserves_disk(run)
    orders = {s.name: Apply(r.number, version, r.step.of_layers(s.layers), reserve) for s in run.ready_slaves()}
    run.fan_out(FanoutKind.APPLY, version, dict(orders), run.options.timing.compute_s)
    run.emit_note(
        "round_applying",
        round=r.number,
        contributions=len(r.folded),
        delta_norm=f"{r.delta_norm:.6g}",
        clipped=r.clipped,
    )


def on_version_applied(run: RunState, fanout: Fanout) -> None:
    """Continue when θ′ and m′ are complete on every slave: order the snapshots, or write the row first."""
    r, version = run.round, fanout.subject
    assert r is not None and isinstance(version, VersionId)
    r.state = check_move(ROUND_MOVES, r.state, RoundState.PERSISTING, f"round {r.number}")
    r.theta_digest, r.step_norm = _read_step(run, fanout)
    r.reason = str(version)
    if not durability.row_waits_for_disks(run):
        commit_version(run, r, (), durable=False)
        return
    run.order_all(FanoutKind.PERSIST, version, Persist(version), run.options.timing.compute_s)
    run.emit_note("round_persisting", round=r.number, version=version)


def _read_step(run: RunState, fanout: Fanout) -> tuple[int, float]:
    """Return (digest of θ′, ‖θ′ − θ‖ summed over layers); 0 for what is unknown."""
    answers = _read_answers(run, fanout, Prepared)
    squares = _order_by_layer(run, ((slave, answer.layer_sq) for slave, answer in answers), nan)
    norm = sum(map(sqrt, squares))
    return _sum_digests(answers), norm if isfinite(norm) else 0.0


def on_version_persisted(run: RunState, fanout: Fanout) -> None:
    """Commit the version, which is on every disk."""
    assert run.round is not None
    durability.on_snapshot_written(run)
    digests = tuple((name, a.digest) for name, a in fanout.answers.items() if isinstance(a, Persisted))
    commit_version(run, run.round, digests, durable=True)


def on_disk_failed(run: RunState, slave: Slave, fanout: Fanout, event: OrderFailed) -> bool:
    """Handle a failed disk at Apply or Persist: skip the round, or go on without a snapshot; return False for other
    failures.
    """
    if fanout.kind not in (FanoutKind.APPLY, FanoutKind.PERSIST) or not issubclass(event.error, FailedDisk):
        return False
    body = run.orders.orders[event.number][1].body
    if isinstance(body, Apply) and not body.reserve:
        return False  # nothing was asked of its disk
    assert run.round is not None
    reason = f"{slave.name} refused: {event.refusal}"
    durability.on_snapshot_failed(run, reason)
    if run.durability.state is not DurabilityState.DEGRADED:
        skip_round(run, reason)
    elif fanout.kind is FanoutKind.PERSIST:
        run.forget_orders(frozenset({FanoutKind.PERSIST}))
        commit_version(run, run.round, (), durable=False)
    else:
        assert isinstance(body, Apply)
        run.replace_order(event.number, replace(body, reserve=False))
    return True


# ---- what slaves answer ----------------------------------------------------------------------------------------------


def _read_answers(run: RunState, fanout: Fanout, kind: type[A]) -> list[tuple[Slave, A]]:
    answers = [(slave, fanout.answers[slave.name]) for slave in run.slaves.values()]
    assert all(isinstance(answer, kind) for _, answer in answers)
    return cast(list[tuple[Slave, A]], answers)


def _order_by_layer(
    run: RunState, numbers: Iterable[tuple[Slave, Sequence[float]]], missing: float
) -> tuple[float, ...]:
    """Return one number for each layer, in manifest order, so that sums do not depend on the number of slaves."""
    found = dict[int, float]()
    for slave, of_layers in numbers:
        found.update(zip(slave.layers, of_layers, strict=False))
    return tuple(found.get(layer, missing) for layer in range(len(run.manifest.layers)))


def _sum_digests(answers: Sequence[tuple[Slave, Measured | Prepared]]) -> int:
    return sum(answer.digest for _, answer in answers) % PUSH_DIGESTS


# ---- settlement -----------------------------------------------------------------------------------------------------
# The end of a round, and its outcomes for clusters (docs/protocol.md#messages rows 14 to 16).
#
# One row settles everything: VersionCommitted is the commit point of an outer step. A round that breaks before its row
# is *skipped*: θ stays, its clusters keep their progress and train on. One whose pushes were all gated leaves θ
# *unchanged*.


DELTA_NORMS_KEPT = 50  # accepted ‖δ‖, for a relative clip
ROUND_ORDERS = frozenset({FanoutKind.MEASURE, FanoutKind.FOLD, FanoutKind.APPLY, FanoutKind.PERSIST})


# ---- settlement with a version --------------------------------------------------------------------------------------


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
    run.met.append((len(row.folds), sum(c.trains for c in run.clusters.values())))
    run.durability.again_at = 0.0  # a new version tries the disks anew
    is_lost = bool(run.roster.lacking)  # on a disk, since it was written there: older ones may be all that is left
    run.offers_changed()
    run.tokens_accepted += tokens
    run.counts[RoundResult.APPLIED] += 1
    run.emit_note("version_committed", version=version, round=r.number, contributions=len(r.folded), tokens=tokens)
    pulling = [c for c in (_settle_push(run, p, _kind_of(p), version) for p in r.pushes) if c is not None]
    push_pull.flip_slaves(run, version, pulling)
    if not is_lost:
        durability.retire_versions(run)
    finish_if_due(run)


def statistics_after(run: RunState, r: Round) -> tuple[dict[str, PenaltyRow], ScoreHistory]:
    """Return the penalty's statistics after this round."""
    verdicts = [Settled(p.id.cluster, p.verdict, p.counted) for p in (*r.folded, *r.gated) if p.verdict is not None]
    live = [c.name for c in run.clusters.values() if c.trains]
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


# ---- settlement without one -----------------------------------------------------------------------------------------


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
    run.forget_orders(ROUND_ORDERS)
    over = [*r.folded, *r.gated]
    if r.current is not None:  # some slave may have measured or folded it already
        over.append(r.current)
    outcomes = tuple(_outcome_row(p, OutcomeKind.SKIPPED, None, reason) for p in over)
    run.emit_record(RoundEnded(r.number, RoundResult.SKIPPED, reason, outcomes, (), run.now))
    run.counts[RoundResult.SKIPPED] += 1
    run.round = None
    run.waiting = [*r.queue, *let_go(r), *run.waiting]
    _abort_on_slaves(run, r, reason)
    run.emit_note("round_skipped", round=r.number, reason=reason)
    _give_back(run, over, reason)
    if r.current is not None:
        _drop_on_slaves(run, r.current, reason)


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


# ---- outcome of a push ----------------------------------------------------------------------------------------------


def _kind_of(push: Push) -> OutcomeKind:
    """Return the outcome of a push in a round that made a version."""
    return OutcomeKind.ACCEPTED if push.verdict is not None and push.verdict.accepted else OutcomeKind.GATED


def _outcome_row(push: Push, kind: OutcomeKind, version: VersionId | None, reason: str = "") -> OutcomeRow:
    verdict = push.verdict
    measured = verdict.reason if verdict else ""
    if 0 < push.counted < push.tokens:
        measured = f"{measured}; of its {push.tokens} tokens {push.counted} count: more than is usual here"
    why = reason or (f"in {version}: {measured}" if kind is OutcomeKind.ACCEPTED else measured)
    norm, score = (verdict.norm, verdict.score) if verdict else (0.0, 0.0)
    return OutcomeRow(push.id, kind, why, push.tokens, push.inner_steps, norm, score, push.ranges, push.begun)


def _settle_push(
    run: RunState, push: Push, kind: OutcomeKind, version: VersionId | None, reason: str = ""
) -> Cluster | None:
    """Give the push's cluster its Outcome; return the cluster if it waits for it and will pull."""
    cluster = run.clusters[push.id.cluster]
    same_incarnation = cluster.inc == push.id.inc
    run.transfers.close_push(push)
    run.count_tokens_in_window(cluster, push, -1)
    if kind is not OutcomeKind.SKIPPED or (same_incarnation and cluster.live):
        cluster.in_window -= 1
    if kind is not OutcomeKind.SKIPPED:
        number = version.round if version is not None and kind is OutcomeKind.ACCEPTED else 0
        run.ranges.settle_ranges(push.id.cluster, push.id.inc, push.ranges, push.begun, number)
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
    assert cluster.push is push  # it asks for no other before its outcome
    cluster.push = None
    cluster.outcome = cluster.last_outcome
    cluster.outcome_version = version if kind is OutcomeKind.ACCEPTED else None
    return cluster if cluster.state is ClusterState.COMMITTED else None


# ---- the end of the run ---------------------------------------------------------------------------------------------


def find_end(run: RunState, stop: Targets) -> str:
    """Return which of these targets is reached, or that all data is settled; empty if the run goes on."""
    return find_reached(run, stop)[1]


def find_reached(run: RunState, stop: Targets) -> tuple[str, str]:
    """Return the key of the first target that is reached, as `dips set` calls it, and why the run ends; both empty if
    it goes on.
    """
    settled = run.ranges.total > 0 and run.ranges.is_settled(stop.epochs)
    reasons = (
        ("stop.tokens", stop.tokens and run.tokens_accepted >= stop.tokens, f"{stop.tokens} tokens are accepted"),
        ("stop.versions", stop.versions and run.head.version >= stop.versions, f"{stop.versions} outer steps are made"),
        ("stop.wall_s", stop.wall_s and run.now - run.started >= stop.wall_s, f"{stop.wall_s:g} s are over"),
        ("data.epochs", settled, f"all {run.ranges.total} data ranges are settled"),
    )
    return next(((key, why) for key, due, why in reasons if due), ("", ""))


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
    push_pull.drop_all_pushes(run, f"the run is finished: {reason}")
    skip_waiting_pushes(run, f"the run is finished: {reason}")


def finish_if_time_is_over(run: RunState) -> None:
    """End the run if `stop.wall_s` is over; called when time has passed, since no push may come."""
    if run.targets.wall_s:
        finish_if_due(run)
