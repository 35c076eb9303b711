"""A round: collect, measure, gate, fold, close, apply, persist (docs/protocol.md#messages rows 9 to 14).

Pushes are measured and folded one after another in the order of their commits, so that every slave adds in the same
order and the ledger's order replays bit for bit. window.py decides when the window opens and closes, settlement.py ends
the round for its clusters: with a commit, or with a skip if anything breaks the round before its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, nan, sqrt
from typing import TypeVar, cast

from dips.dataclass import replace
from dips.errors import FailedDisk
from dips.ids import VersionId
from dips.protocol import durability, held_pushes, pushes, settlement, stepping, window
from dips.protocol.effects import Apply, DropPush, Measure, Persist
from dips.protocol.entities import Fanout, Push, Round, Slave
from dips.protocol.enums import DurabilityState, FanoutKind
from dips.protocol.events import Folded, Measured, OrderFailed, Persisted, Prepared
from dips.protocol.gates.direction import is_against
from dips.protocol.moves import ROUND_MOVES, RoundState, check_move
from dips.protocol.run_state import RunState
from dips.protocol.verdicts import PushEvidence, Verdict

PUSH_DIGESTS = 1 << 53  # a push's digest is the sum of its slaves' digests modulo this
A = TypeVar("A", Measured, Folded, Prepared)


def advance_round(run: RunState) -> None:
    """Do what has become possible: open a window, measure the next push, or close the window."""
    if run.durability.state is DurabilityState.STOPPED:
        _give_up_pushes(run)
    if window.can_open(run):
        window.open_window(run)
    r = run.round
    if r is None or r.state is not RoundState.COLLECTING:
        return
    if run.waiting:
        r.queue += run.waiting
        run.waiting = []
        window.extend_window(run, r)
    while r.current is None and r.queue:
        _measure_unless_held(run, r, r.queue.popleft())
    if r.current is None and (held := held_pushes.take_held(run, r)) is not None:
        _measure_push(run, r, held)
    elif r.current is None and window.is_over(run, r):
        _close_window(run, r)


def _give_up_pushes(run: RunState) -> None:
    """Skip and drop all pushes: no round is opened until the disks work again, and no cluster should wait for one."""
    reason = run.durability.reason
    settlement.skip_round(run, reason)
    settlement.skip_waiting_pushes(run, reason)
    pushes.drop_all_pushes(run, reason)


def _measure_unless_held(run: RunState, r: Round, push: Push) -> None:
    if not held_pushes.hold_if_due(run, r, push):
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
    push.verdict = _judge_quarantined(run, push.id.cluster, run.penalty.judge_push(evidence))
    if push.tokens <= 0:
        push.verdict = Verdict(False, 0.0, 0.0, "it brings no tokens", evidence, tracked=False)
    if held_pushes.hold_if_against(run, r, push):
        r.current = None
        return
    if push.verdict.accepted:
        for flag in push.verdict.flags:
            run.emit_note("push_flagged", push=push.id, reason=flag)
        stepping.weigh_push(run, r, push)
        orders = {slave.name: stepping.fold_order(r, push, slave.layers) for slave in run.ready_slaves()}
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
    live = [cluster.name for cluster in run.clusters.values() if cluster.live]
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
        against=held_pushes.count_against(r),
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
        settlement.end_unchanged(run, r)
        return
    if run.durability.late is not None:
        return  # the next flip would overwrite θ and m, which are being written (docs/protocol.md#memory)
    r.state = check_move(ROUND_MOVES, r.state, RoundState.APPLYING, f"round {r.number}")
    made = stepping.make_step(run, r)
    if not made.finite:
        settlement.skip_round(run, f"the norm of the averaged pseudo-gradient is {made.norm}")
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
        settlement.commit_version(run, r, (), durable=False)
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
    settlement.commit_version(run, run.round, digests, durable=True)


def on_disk_failed(run: RunState, slave: Slave, fanout: Fanout, event: OrderFailed) -> bool:
    """Handle a failed disk at Apply or Persist: skip the round, or go on without a snapshot; return False for other
    failures.
    """
    if fanout.kind not in (FanoutKind.APPLY, FanoutKind.PERSIST) or not issubclass(event.error, FailedDisk):
        return False
    assert run.round is not None
    reason = f"{slave.name} refused: {event.refusal}"
    durability.on_snapshot_failed(run, reason)
    if run.durability.state is not DurabilityState.DEGRADED:
        settlement.skip_round(run, reason)
    elif fanout.kind is FanoutKind.PERSIST:
        run.forget_orders(frozenset({FanoutKind.PERSIST}))
        settlement.commit_version(run, run.round, (), durable=False)
    else:
        body = run.orders.orders[event.number][1].body
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
