"""Pushes and pulls of clusters, from the request to their end, and the flip of the slaves to a committed version."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from statistics import median

from dips.codecs import Codec
from dips.dataclass import replace
from dips.errors import ConfigError, Denied, RemoteProtocolError, StalePush, StaleVersion
from dips.ids import GENESIS, PULLER, PullId, PushId, VersionId
from dips.printable import join_some
from dips.protocol import durability, events, transfers
from dips.protocol.admission import SlotAnswer, SlotAsk
from dips.protocol.claims import ToldProgress, find_absurd_seq, why_impossible, why_untold
from dips.protocol.data import BegunRange
from dips.protocol.effects import (
    Acknowledged,
    Commit,
    Committed,
    Dropped,
    DropPush,
    Failed,
    Finished,
    Grant,
    OpenPull,
    OpenPush,
    Outcome,
    Pending,
    RankKeys,
    Refused,
    Result,
)
from dips.protocol.entities import Cluster, Fanout, Pull, Push, Tombstone
from dips.protocol.enums import (
    SEED_ORDERS,
    ClusterCause,
    ClusterState,
    DurabilityState,
    FanoutKind,
    OutcomeKind,
    SlaveCause,
)
from dips.protocol.order import MAX_RANKS, lowest_free
from dips.protocol.rank_keys import MOST_FLIP_KEYS, find_wrong_keys
from dips.protocol.records import ClusterDiverged, OperatorActed
from dips.protocol.run_state import OLD_LEDGER, RunState
from dips.protocol.transfer_book import too_slow
from dips.protocol.transfers import close_pull

# ---- slot requests --------------------------------------------------------------------------------------------------


LEAST_RETRY_S = 0.2  # a complete push is still to be measured and folded before its slot is free
RETRY_SHARE = 0.1  # of a push's time: how often the first in the queue asks while a slot is about to be free


def refuse_slot(run: RunState, cluster: Cluster, event: events.PushRequested) -> Refused | None:
    """Return Refused with the cluster's place in the queue; None if it may take a slot."""
    missing, slots = run.why_missing() or run.why_held(), run.roster.slots
    free = 0 if missing else slots - len(run.transfers.pushes)
    longest = run.options.timing.busy_retry_s
    if run.penalty.penalty_row(cluster.name).quarantined or cluster.name in run.quarantined:
        run.slot_queue.leave_queue(cluster.name)
        if free > run.slot_queue.count_waiting(run.now):
            return None
        return Refused(longest, f"waits for {missing}" if missing else "quarantined: it pushes while no other waits")
    push_s = run.moving_s(cluster, _choose_codec(run, event.base)) + event.idle_s
    ask = SlotAsk(cluster.name, event.tokens, event.step_s, push_s)
    answer = run.slot_queue.request_slot(ask, free, longest, run.options.timing.transfer_s, run.now)
    if answer.admitted:
        return None
    if missing:
        return Refused(longest, f"waits for {missing}", answer.ahead + 1, answer.waiting)
    reason = _explain_wait(run, answer, slots)
    run.set_cluster_state(cluster, cluster.state, ClusterCause.AWAITS_SLOT, reason)
    return Refused(_retry_s(run, answer, slots), reason, answer.ahead + 1, answer.waiting)


def _retry_s(run: RunState, answer: SlotAnswer, slots: int) -> float:
    """Return when to ask again: the first in the queue when an open push is due, and often once one is late."""
    longest = run.options.timing.busy_retry_s
    soonest = min(_free_in_s(run), default=longest) if answer.ahead < slots else longest
    return min(longest, max(LEAST_RETRY_S, soonest))


def _free_in_s(run: RunState) -> list[float]:
    """Return, for each open push with known bandwidth, when its slot should be free or when to look again."""
    found = list[float]()
    for push in run.transfers.pushes.values():
        if push.due:
            late = push.committed or push.due <= run.now
            moving_s = run.moving_s(run.clusters[push.id.cluster], push.codec)
            found.append(RETRY_SHARE * moving_s if late else push.due - run.now)
    return found


def _explain_wait(run: RunState, answer: SlotAnswer, slots: int) -> str:
    text = f"waits for a slot: {_ordinal(answer.ahead + 1)} of {answer.waiting}"
    times = [s for p in run.transfers.pushes.values() if (s := run.moving_s(run.clusters[p.id.cluster], p.codec))]
    if not times:
        return text
    frees = sorted([0.0] * (slots - len(run.transfers.pushes)) + _free_in_s(run))
    about_s = frees[min(answer.ahead % slots, len(frees) - 1)] if frees else 0.0
    return f"{text}, about {max(1.0, about_s + answer.ahead // slots * median(times)):.0f} s"


def _ordinal(n: int) -> str:
    ending = "th" if n // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


# ---- pushes ---------------------------------------------------------------------------------------------------------
# Pushes up to their commit: request, OpenPush on all slaves, grant, staged, commit or drop (docs/protocol.md#messages
# rows 4 to 9).
#
# All memory of a push is reserved on every slave before its grant, so a push never holds one slave's memory while it
# waits for another's. A push that is not committed ends with its cluster; a committed one belongs to its round
# (round.py).


MAX_TOKENS = (1 << 53) - 1  # of a run: every sum of tokens stays exact, in the ledger and as a JSON number


def on_push_requested(run: RunState, event: events.PushRequested) -> None:
    """Legal in TRAINING; effects OpenPush on every slave. A repetition gets Pending, then the same Grant."""
    cluster = run.live_cluster(event.req, event.push.cluster, event.push.inc)
    if cluster is not None:
        run.reply_to(event.req, _answer_push_request(run, cluster, event))


def refuse_reader(cluster: Cluster) -> Failed | None:
    """Return the answer for one that only pulls and asks for what clusters may; None for a cluster."""
    return Failed(Denied, f"{cluster.name} only pulls, as its name says: it trains nothing") if cluster.reads else None


def _answer_push_request(run: RunState, cluster: Cluster, event: events.PushRequested) -> Result:
    if cannot := refuse_reader(cluster):
        return cannot
    push = cluster.push
    if push and push.id == event.push:
        return _grant_of(run, push) if push.opened else Pending("the slaves are reserving a slot for it")
    if cluster.dropped_push.seq == event.push.seq:
        return Dropped(cluster.dropped_push.reason)
    if event.push.seq <= cluster.seq_high:
        return Failed(StalePush, f"{event.push}: expected a seq above {cluster.seq_high}")
    if absurd := find_absurd_seq(event.push.seq, cluster.seq_high):
        return absurd
    if run.finished:
        return Finished(run.finished)
    if not 1 <= event.ranks <= MAX_RANKS:
        return Failed(RemoteProtocolError, f"ranks: expected 1 to {MAX_RANKS}, got {event.ranks}")
    if wrong := find_wrong_keys(event.keys, event.ranks, run.has_encrypted_lanes()):
        return Failed(RemoteProtocolError, wrong)
    end_superseded(run, cluster, event.push)
    push = cluster.push
    if cluster.state is ClusterState.IDLE:
        run.set_cluster_state(cluster, ClusterState.TRAINING, ClusterCause.ASKS_PUSH, "asks for a push")
    if push is not None:
        return Refused(run.options.timing.busy_retry_s, f"its push {push.id} still waits for its Outcome")
    if cluster.state is not ClusterState.TRAINING:
        return Refused(
            run.options.timing.busy_retry_s, f"a push is legal in training, {cluster.name} is {cluster.state}"
        )
    if event.base.round >= run.next_round:
        seen = f"{cluster.name} holds {event.base}, this ledger knows rounds below {run.next_round}"
        return Refused(run.options.timing.busy_retry_s, f"{seen}: {OLD_LEDGER}")
    if not run.has_row(event.base):
        return Failed(StaleVersion, f"base {event.base} of {event.push} has no row in this ledger: pull the head first")
    if run.durability.state is DurabilityState.STOPPED:
        return Refused(run.options.timing.busy_retry_s, run.durability.reason)
    if reason := too_slow(cluster.bytes_per_s, run.now - cluster.measured_at, run.options.timing):
        return Refused(run.options.timing.busy_retry_s, reason)
    if refused := refuse_slot(run, cluster, event):
        return refused
    _open_push(run, cluster, event)
    return Pending("the slaves are reserving a slot for it")


def _open_push(run: RunState, cluster: Cluster, event: events.PushRequested) -> None:
    transfer_s = run.transfer_s(cluster)
    cluster.seq_high, cluster.base = event.push.seq, event.base
    cluster.ranks, cluster.keys = event.ranks, event.keys
    cluster.outcome = cluster.outcome_version = None
    codec, deadline = _choose_codec(run, event.base), run.now + transfer_s
    due = _due_at(run, cluster, codec, event.idle_s)
    push = Push(event.push, event.base, event.ranks, deadline, transfer_s, due, event.idle_s, codec, opened_at=run.now)
    push.first = lowest_free(((p.first, p.ranks) for p in run.transfers.uncommitted_pushes()), event.ranks)
    push.unstaged = dict.fromkeys(run.slaves)
    cluster.push = push
    run.transfers.open_push(push)
    if cluster.requested_at is not None:
        cluster.paces.append(run.now - cluster.requested_at)
    cluster.requested_at = run.now
    run.set_cluster_state(cluster, ClusterState.PUSHING, ClusterCause.OPENS_PUSH, "its push is being opened")
    order = OpenPush(event.push, event.ranks, transfer_s, codec, _held_base(push), push.first, event.keys)
    run.order_all(FanoutKind.OPEN_PUSH, event.push, order, run.options.timing.order_s)


def _choose_codec(run: RunState, base: VersionId) -> Codec:
    """Return the run's codec if every slave serves the base; fp32 for an older base, an orphan or during a flip."""
    return run.options.codec if base == run.head and run.flipping is None else Codec.FP32


def _held_base(push: Push) -> VersionId | None:
    """Return the base of its differences; None if it carries parameters."""
    return None if push.codec is Codec.FP32 else push.base


def on_push_opened(run: RunState, fanout: Fanout) -> bool:
    """Grant a push: every slave has reserved its slot. Return whether it is still wanted."""
    cluster = run.cluster_of(fanout.subject)
    if cluster is None:
        return False
    assert cluster.push is not None
    cluster.push.opened, cluster.push.due = True, _due_at(run, cluster, cluster.push.codec, cluster.push.idle_s)
    run.set_cluster_state(cluster, cluster.state, ClusterCause.PUSHES, "pushing")
    run.emit_note("push_granted", push=cluster.push.id, base=cluster.push.base)
    return True


def _due_at(run: RunState, cluster: Cluster, codec: Codec, idle_s: float) -> float:
    return run.now + run.moving_s(cluster, codec) + idle_s if cluster.bytes_per_s else 0.0


def _grant_of(run: RunState, push: Push) -> Grant:
    grant = run.make_grant(run.head, push.deadline_s, push.first)
    return replace(grant, codec=push.codec, base=_held_base(push))


def on_push_staged(run: RunState, event: events.PushStaged) -> None:
    """Record that one slave has all of a push. Idempotent, since every heartbeat repeats it."""
    cluster = _cluster_of_report(run, event)
    if cluster is not None:
        assert cluster.push is not None
        cluster.push.unstaged.pop(event.slave, None)


def on_push_refused(run: RunState, event: events.PushRefused) -> None:
    """Drop a push that a slave gave up: its ranges were wrong or it stalled."""
    cluster = _cluster_of_report(run, event)
    if cluster is None:
        return
    assert cluster.push is not None
    if not cluster.push.committed:
        drop_push(run, cluster, f"{event.slave}: {event.reason}")


def _cluster_of_report(run: RunState, event: events.PushStaged | events.PushRefused) -> Cluster | None:
    """Return the cluster if a slave's present incarnation reports on its present push; else None."""
    slave = run.slaves.get(event.slave)
    return run.cluster_of(event.push) if slave and slave.sinc == event.sinc else None


def on_push_finished(run: RunState, event: events.PushFinished) -> None:
    """Commit a push that is staged on every slave: give it a place in a window. A repetition gets Committed again."""
    cluster = run.live_cluster(event.req, event.push.cluster, event.push.inc)
    if cluster is not None:
        run.reply_to(event.req, _commit_push(run, cluster, event))


def _commit_push(run: RunState, cluster: Cluster, event: events.PushFinished) -> Result:
    push = cluster.push
    if push is None or push.id != event.push:
        if cluster.outcome and cluster.outcome.push == event.push:
            return Committed()
        return Dropped(_why_gone(cluster, event.push))
    if push.committed:
        return Committed()
    if reason := _why_refused(run, cluster, event):
        cluster.claims_refused += 1
        run.emit_note("claim_refused", push=push.id, reason=reason)
        return Failed(RemoteProtocolError, reason)
    if not push.opened:
        return Pending("the slaves are reserving a slot for it")
    if push.unstaged:
        return Pending(f"not yet staged on {join_some(list(push.unstaged))}")
    if reason := _why_untold(cluster, event):
        return Pending(reason)
    push.committed, push.committed_at = True, run.now
    loss = event.loss if isfinite(event.loss) else None  # shown to people only
    push.tokens, push.inner_steps, push.loss = event.tokens, event.inner_steps, loss
    push.ranges, push.begun = event.ranges, event.begun
    run.waiting.append(push)
    run.transfers.commit_push(push)
    run.count_tokens_in_window(cluster, push, 1)
    cluster.in_window += 1
    run.set_cluster_state(cluster, ClusterState.COMMITTED, ClusterCause.COMMITTED, "its push is committed")
    run.emit_note("push_committed", push=push.id, tokens=push.tokens, inner_steps=push.inner_steps, loss=push.loss)
    return Committed()


def _why_refused(run: RunState, cluster: Cluster, event: events.PushFinished) -> str:
    """Return why the claims of a push cannot be true, whatever heartbeats say; empty if they can."""
    if event.tokens < 0 or event.inner_steps < 0:
        return "tokens and inner_steps: expected 0 or more"
    named = set(event.ranges)
    if len(named) < len(event.ranges):  # their number is what the cluster may hold from then on
        return f"data ranges: expected each once, got {len(event.ranges)} numbers of {len(named)} ranges"
    if foreign := named - set(run.ranges.held_by(event.push.cluster, event.push.inc)):
        return f"data ranges {sorted(foreign)[:5]} are not leased to {cluster.name}"
    if event.begun and (reason := _why_not_begun(run, event, event.begun)):
        return reason
    passed_s = inf if cluster.works_since is None else run.now - cluster.works_since
    if reason := why_impossible(event.tokens, event.inner_steps, passed_s):
        return reason
    return _why_uncountable(run, cluster, event.tokens)


def _why_not_begun(run: RunState, event: events.PushFinished, begun: BegunRange) -> str:
    held = run.ranges.held_by(event.push.cluster, event.push.inc)
    if begun.number in event.ranges or begun.number not in held:
        return f"data range {begun.number} is not leased to {event.push.cluster}, or used up by this push"
    if not 0 < begun.done < begun.of:
        return f"begun: expected 1 to {begun.of - 1} of {begun.of} samples, got {begun.done}"
    return ""


def _why_untold(cluster: Cluster, event: events.PushFinished) -> str:
    """Return why a push waits for heartbeats to report its progress; empty if they have, or if none report."""
    if cluster.told is None:
        return ""
    settled = ToldProgress(cluster.settled, cluster.settled_steps)
    reason = why_untold(cluster.told, settled, event.tokens, event.inner_steps)
    return f"waits for a heartbeat: {reason}" if reason else ""


def _why_uncountable(run: RunState, cluster: Cluster, tokens: int) -> str:
    """Return why so many more tokens cannot be counted for the run and the cluster; empty if they can."""
    of_run = run.tokens_accepted + run.tokens_in_window
    of_cluster = cluster.settled_tokens + cluster.tokens_in_window
    if max(of_run, of_cluster) + tokens <= MAX_TOKENS:
        return ""
    return f"tokens: {tokens} more would bring the count above {MAX_TOKENS}, the most that a run can have"


def on_push_aborted(run: RunState, event: events.PushAborted) -> None:
    """Drop a push that its cluster gave up; a committed push stays committed."""
    cluster = run.live_cluster(event.req, event.push.cluster, event.push.inc)
    if cluster is None:
        return
    run.slot_queue.leave_queue(cluster.name)
    if cluster.push and cluster.push.id == event.push and not cluster.push.committed:
        drop_push(run, cluster, event.reason)
        if event.diverged:
            _count_divergence(run, cluster.name)
    run.reply_to(event.req, Acknowledged())


def _count_divergence(run: RunState, cluster: str) -> None:
    """Count a push that the cluster's ranks held back because it was not finite as gated for that."""
    row = run.penalty.count_divergence(cluster)
    run.emit_record(ClusterDiverged(row, run.next_round - 1, run.now))
    run.emit_note("cluster_diverged", cluster=cluster, in_a_row=row.gated_in_a_row, quarantined=row.quarantined)


def on_round_awaited(run: RunState, event: events.RoundAwaited) -> None:
    """Legal until the next push; answered from the ledger, also after a restart."""
    cluster = run.live_cluster(event.req, event.push.cluster, event.push.inc)
    if cluster is not None:
        run.reply_to(event.req, _answer_awaited(run, cluster, event.push))


def _answer_awaited(run: RunState, cluster: Cluster, push: PushId) -> Result:
    if cluster.push and cluster.push.id == push:
        return Pending(run.explain_round(run.round) if run.round else "waits for the next window")
    row = cluster.outcome
    if row is None or row.push != push:
        return Dropped(_why_gone(cluster, push))
    if run.flipping is not None and row.kind is not OutcomeKind.SKIPPED:
        return Pending("the slaves are flipping to the new version")
    pull = cluster.pull if cluster.pull and cluster.pull.id.seq == push.seq and cluster.pull.opened else None
    grant = run.make_grant(pull.version, pull.deadline_s, pull.first) if pull else None
    version = cluster.outcome_version if row.kind is OutcomeKind.ACCEPTED else run.head
    reason = row.reason
    if version in run.undone:
        reason = f"{reason}; undone since: the head is {run.head} again, which the next push is measured against"
    skipped = row.kind is OutcomeKind.SKIPPED
    update_s = 0.0 if skipped else run.update_s
    return Outcome(row.kind, None if skipped else version, reason, grant, run.read_progress(), update_s)


def _why_gone(cluster: Cluster, push: PushId) -> str:
    if cluster.dropped_push.seq == push.seq:
        return cluster.dropped_push.reason
    return "this master does not know it: its round died with the master before"


def end_superseded(run: RunState, cluster: Cluster, later: PushId | PullId) -> None:
    """End an uncommitted push or a pull when its cluster asks for a later one, since its abort or finish was lost.

    Otherwise a push whose ranks never came would stay open as long as the cluster is alive (transfers.py).
    """
    if cluster.push is not None and not cluster.push.committed:
        drop_push(run, cluster, f"superseded by {later}")
    if cluster.pull is not None:
        close_pull(run, cluster, ClusterCause.PULL_ENDED, f"superseded by {later}")


def drop_push(run: RunState, cluster: Cluster, reason: str) -> None:
    """Drop a push that is not committed, on every slave; its progress stays with the cluster."""
    push = cluster.push
    assert push is not None and not push.committed
    cluster.push = None
    run.transfers.close_push(push)
    cluster.dropped_push = Tombstone(push.id.seq, reason)
    run.forget_orders(frozenset({FanoutKind.OPEN_PUSH}), push.id)
    run.order_all(FanoutKind.STANDALONE, push.id, DropPush(push.id, reason), run.options.timing.order_s)
    if cluster.live:
        resting = ClusterState.TRAINING if cluster.moving else ClusterState.IDLE
        run.set_cluster_state(cluster, resting, ClusterCause.PUSH_DROPPED, f"its push was dropped: {reason}")
    run.emit_note("push_dropped", push=push.id, reason=reason)


def drop_all_pushes(run: RunState, reason: str) -> None:
    """Drop every push that is not in a round: a slave that held a part of it is lost, or the run is over."""
    for push in run.transfers.uncommitted_pushes():
        drop_push(run, run.clusters[push.id.cluster], reason)


def expire_pushes(run: RunState) -> None:
    """Drop pushes past their deadline."""
    for name in run.transfers.push_deadlines.take_due(run.now):
        cluster = run.clusters[name]
        assert cluster.push is not None
        drop_push(run, cluster, f"it was not named for {cluster.push.deadline_s:.4g} s")


# ---- flip -----------------------------------------------------------------------------------------------------------
# The flip: all slaves begin to serve a committed version, pinned for the clusters that pull it
# (docs/protocol.md#messages rows 16, 17).


def flip_slaves(run: RunState, version: VersionId, pulling: Sequence[Cluster]) -> None:
    """Order the flip; the clusters that will pull are answered once every slave has flipped and pinned for them."""
    served = _choose_served(run, pulling)
    opening = tuple(_pull_after_outcome(c) for c in served)
    for cluster, pull in zip(served, opening, strict=True):
        begin_pull(run, cluster, pull, version)
    keys = tuple(RankKeys(c.keys) for c in served) if run.has_encrypted_lanes() else ()
    order = Commit(version, opening, keys)
    run.flipping = run.order_all(FanoutKind.COMMIT, version, order, run.options.timing.order_s)
    assert run.flipping.waiting, f"no slave serves that could flip to {version}"


def _choose_served(run: RunState, pulling: Sequence[Cluster]) -> list[Cluster]:
    """Return the clusters whose pulls this order opens, as many as have room for their ranks' keys; the others must
    ask.
    """
    served, keys = list[Cluster](), 0
    for cluster in pulling:
        keys += len(cluster.keys)
        if keys <= MOST_FLIP_KEYS:
            served.append(cluster)
        else:
            why = "its push is settled: it asks for its pull"
            run.set_cluster_state(cluster, ClusterState.TRAINING, ClusterCause.AWAITS_PULL, why)
    return served


def on_slaves_flipped(run: RunState, fanout: Fanout) -> None:
    """Record that every slave that is not lost serves the version, and open the pulls that wait for it."""
    run.flipping = None
    run.update_s = run.now - run.closed_at
    complete = not run.roster.missing
    for slave in run.ready_slaves():
        slave.memory = run.head
        run.set_slave_state(slave, slave.state, SlaveCause.SERVES, f"serves {run.head}")
    for cluster in [run.clusters[name] for name in run.transfers.pulls]:
        assert cluster.pull is not None
        if cluster.outcome is None or cluster.pull.id != _pull_after_outcome(cluster):
            continue  # it asked for its pull
        if complete:
            cluster.pull.opened = True
        else:
            transfers.close_pull(run, cluster, ClusterCause.PULL_ENDED, "a slave was lost while it flipped")


def _pull_after_outcome(cluster: Cluster) -> PullId:
    """Return the name of the pull after a push's Outcome: it has the same seq as the push."""
    assert cluster.outcome is not None
    push = cluster.outcome.push
    return PullId(push.cluster, push.inc, push.seq)


def stop_waiting_for(run: RunState, slave: str) -> None:
    """Remove a lost slave's orders; a fanout that needs all answers is ended by the handler that ends its subject.

    Those of a seed stay: it goes on where the same process registers again, and is dropped where it is another one.
    """
    for number in list(run.orders.orders_of(slave)):
        found = run.orders.find_order(number)
        if found is None or found[0].kind in SEED_ORDERS:
            continue  # None: the late snapshot was forgotten, on every slave
        fanout, _ = run.orders.remove_order(number)
        if fanout.kind in (FanoutKind.COMMIT, FanoutKind.STANDALONE):
            fanout.waiting.pop(slave)
        elif fanout is run.durability.late:
            durability.forget_late_snapshot(run)
    if run.flipping is not None and not run.flipping.waiting:
        on_slaves_flipped(run, run.flipping)


# ---- pulls ----------------------------------------------------------------------------------------------------------


def on_pull_requested(run: RunState, event: events.PullRequested) -> None:
    """Legal in any state but the middle of a push; pins the head on every slave, or an older version that disks keep.

    A repetition gets the same Grant.
    """
    cluster = run.live_cluster(event.req, event.pull.cluster, event.pull.inc)
    if cluster is not None:
        run.reply_to(event.req, _answer_pull_request(run, cluster, event))


def _answer_pull_request(run: RunState, cluster: Cluster, event: events.PullRequested) -> Result:
    pull = cluster.pull
    if pull and pull.id == event.pull:
        if not pull.opened:
            return Pending("the slaves are pinning the version")
        grant = run.make_grant(pull.version, pull.deadline_s, pull.first)
        if not pull.momentum:
            return grant
        digests = dict(pull.digests)
        return replace(grant, slaves=tuple(replace(a, digests=digests[a.name]) for a in grant.slaves))
    if cluster.closed_pull.seq == event.pull.seq:
        return Dropped(cluster.closed_pull.reason)
    if event.pull.seq <= cluster.seq_high:
        return Failed(StalePush, f"{event.pull}: expected a seq above {cluster.seq_high}")
    if absurd := find_absurd_seq(event.pull.seq, cluster.seq_high):
        return absurd
    if not 1 <= event.ranks <= MAX_RANKS:
        return Failed(RemoteProtocolError, f"ranks: expected 1 to {MAX_RANKS}, got {event.ranks}")
    if wrong := find_wrong_keys(event.keys, event.ranks, run.has_encrypted_lanes()):
        return Failed(RemoteProtocolError, wrong)
    version = event.version or run.head
    if event.momentum and not cluster.reads:
        return Failed(ConfigError, f"momentum: only who does not push pulls it, and {cluster.name} does")
    if missing := _why_not_kept(run, version):
        return Failed(ConfigError, missing)
    end_superseded(run, cluster, event.pull)
    waits = run.why_missing() or ("the slaves to flip" if run.flipping is not None else "")
    if waits:
        return Refused(run.options.timing.busy_retry_s, f"waits for {waits}")
    cluster.seq_high, cluster.ranks, cluster.keys = event.pull.seq, event.ranks, event.keys
    if cluster.reads and not cluster.read_before:
        _audit_reader(run, cluster, version, event.wall)
    begin_pull(run, cluster, event.pull, version)
    assert cluster.pull is not None
    cluster.pull.momentum = event.momentum
    order = OpenPull(event.pull, version, event.keys, event.momentum)
    run.order_all(FanoutKind.OPEN_PULL, event.pull, order, run.options.timing.order_s)
    return Pending("the slaves are pinning the version")


def _why_not_kept(run: RunState, version: VersionId) -> str:
    """Return why a version cannot be pulled; empty if it can: slaves serve the head and versions on their disks."""
    row = run.versions.get(version)
    if version == run.head or (row is not None and not row.retired and row.durable):
        return ""
    rows = [v for v in reversed(run.versions.values()) if v.version != GENESIS]
    kept = [str(v.version) for v in rows if v.durable and not v.retired]
    has = f"the slaves keep {join_some(kept)}" if kept else "the slaves keep no version yet"
    return f"{version} is no version of this run, or no longer on its disks; {has}"


def begin_pull(run: RunState, cluster: Cluster, pull: PullId, version: VersionId) -> None:
    """Record that the cluster is about to pull `version`."""
    deadline_s = run.transfer_s(cluster)
    first = run.transfers.pull_ranks
    cluster.pull = Pull(pull, version, cluster.ranks, run.now + deadline_s, deadline_s, first=first)
    run.transfers.open_pull(cluster.pull)
    run.set_cluster_state(cluster, ClusterState.PULLING, ClusterCause.PULLS, f"pulling {version}")


def on_pull_opened(run: RunState, fanout: Fanout) -> None:
    """Mark a pull as open: every slave has pinned its version."""
    cluster = run.cluster_of(fanout.subject)
    if cluster is not None:
        assert cluster.pull is not None
        cluster.pull.opened = True
        pinned = ((name, a) for name, a in fanout.answers.items() if isinstance(a, events.Pinned))
        cluster.pull.digests = tuple((name, answer.digests) for name, answer in pinned)


def on_pull_finished(run: RunState, event: events.PullFinished) -> None:
    """Close a pull that all ranks installed, or none. A repetition is acknowledged again."""
    cluster = run.live_cluster(event.req, event.pull.cluster, event.pull.inc)
    if cluster is None:
        return
    if cluster.pull and cluster.pull.id == event.pull:
        version = cluster.pull.version
        transfers.close_pull(run, cluster, *_explain_end(cluster, event.installed, version))
        if event.installed:
            cluster.base = version
    run.reply_to(event.req, Acknowledged())


def _explain_end(cluster: Cluster, installed: bool, version: VersionId) -> tuple[ClusterCause, str]:
    if not installed:
        return ClusterCause.PULL_ENDED, f"its pull failed: it {'keeps' if cluster.reads else 'trains on'} what it has"
    if cluster.reads:
        return ClusterCause.FOLLOWS, f"has {version}"
    return ClusterCause.TRAINS, f"trains on {version}"


def _audit_reader(run: RunState, cluster: Cluster, version: VersionId, wall: float) -> None:
    """Record who takes the parameters out of the run: once for an incarnation, since a follower takes each version.

    An operator's export always has its row; those of pullers share a budget.
    """
    cluster.read_before = True
    if cluster.name.endswith(PULLER) and not run.read_rows.take_row(run.now):
        return
    outcome = f"{run.model_bytes} bytes of parameters, as incarnation {cluster.inc}"
    passed_over = run.read_rows.take_passed_over()
    run.emit_record(OperatorActed(cluster.name, "pull", str(version), outcome, False, wall, passed_over))


def close_all_pulls(run: RunState, reason: str) -> None:
    """Close all pulls after a slave with pins was lost, since the others do not hold a whole version."""
    for name in list(run.transfers.pulls):
        transfers.close_pull(run, run.clusters[name], ClusterCause.PULL_ENDED, reason)


def expire_pulls(run: RunState) -> None:
    """Close pulls past their deadline."""
    for name in run.transfers.pull_deadlines.take_due(run.now):
        cluster = run.clusters[name]
        assert cluster.pull is not None
        reason = f"it was not named for {cluster.pull.deadline_s:.4g} s"
        transfers.close_pull(run, cluster, ClusterCause.PULL_ENDED, reason)
