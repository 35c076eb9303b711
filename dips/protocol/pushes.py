"""Pushes up to their commit: request, OpenPush on all slaves, grant, staged, commit or drop (protocol.md rows 4 to 9).

All memory of a push is reserved on every slave before its grant, so nothing is held while something is waited for. A
push that is not committed dies with its cluster; a committed one belongs to its round (round.py).
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from dips.ids import PushId, VersionId
from dips.protocol.deadlines import too_slow
from dips.protocol.effects import (
    Acknowledged,
    Committed,
    Dropped,
    DropPush,
    Failed,
    Finished,
    Grant,
    OpenPush,
    Outcome,
    Pending,
    Refused,
    Result,
)
from dips.protocol.events import PushAborted, PushFinished, PushRefused, PushRequested, PushStaged, RoundAwaited
from dips.protocol.moves import ClusterState
from dips.protocol.order import line
from dips.protocol.world import OLD_LEDGER, Chorus, Cluster, Push, World

TRANSFER_GRACE_S = 5.0  # the slaves' own deadline comes first; this one catches what they could not say
LEAST_RETRY_S = 0.2  # a push that is here is still to be measured and folded before its slot is free
MAX_RANKS = 65_536
MAX_TOKENS = (1 << 53) - 1  # of a run: every sum of tokens stays exact, in the ledger and as a JSON number


def requested(w: World, event: PushRequested) -> None:
    """Legal in TRAINING; effects OpenPush on every slave. A repetition gets Pending, then the same Grant."""
    cluster = w.living(event.req, event.push.cluster, event.push.inc)
    if cluster is not None:
        w.reply(event.req, _request(w, cluster, event))


def _request(w: World, cluster: Cluster, event: PushRequested) -> Result:
    push = cluster.push
    if push and push.id == event.push:
        return _grant(w, push) if push.opened else Pending("the slaves are reserving a slot for it")
    if cluster.dropped_push[0] == event.push.seq:
        return Dropped(cluster.dropped_push[1])
    if event.push.seq <= cluster.seq_high:
        return Failed("StalePush", f"{event.push}: expected a seq above {cluster.seq_high}")
    if w.finished:
        return Finished(w.finished)
    if not 1 <= event.ranks <= MAX_RANKS:
        return Failed("RemoteProtocolError", f"ranks: expected 1 to {MAX_RANKS}, got {event.ranks}")
    if cluster.state is ClusterState.IDLE:
        cluster.become(ClusterState.TRAINING, "asks for a push")
    if push is not None:
        return Refused(w.options.timing.busy_retry_s, f"its push {push.id} still waits for its Outcome")
    if cluster.state is not ClusterState.TRAINING:
        return Refused(w.options.timing.busy_retry_s, f"a push is legal in training, {cluster.name} is {cluster.state}")
    if event.base.round >= w.next_round:
        seen = f"{cluster.name} holds {event.base}, this ledger knows rounds below {w.next_round}"
        return Refused(w.options.timing.busy_retry_s, f"{seen}: {OLD_LEDGER}")
    if w.durability.state == "stopped":
        return Refused(w.options.timing.busy_retry_s, w.durability.reason)
    if reason := too_slow(cluster.bytes_per_s, w.now - cluster.measured_at, w.options.timing):
        return Refused(w.options.timing.busy_retry_s, reason)
    if reason := _no_slot(w):
        return Refused(_retry_s(w), reason)
    _open(w, cluster, event)
    return Pending("the slaves are reserving a slot for it")


def _no_slot(w: World) -> str:
    """Why no push can be admitted now; empty if one can."""
    if missing := w.why_missing():
        return f"waits for {missing}"
    slots, used = min(s.slots for s in w.slaves.values()), len(w.open_pushes())
    return f"all {slots} slots are in use" if used >= slots else ""


def _retry_s(w: World) -> float:
    """When to ask for a slot again: when the first of those that move is due; who is late names no time."""
    longest = w.options.timing.busy_retry_s
    soonest = min((push.due - w.now for push in w.uncommitted() if push.due > w.now), default=longest)
    return min(longest, max(LEAST_RETRY_S, soonest))


def _open(w: World, cluster: Cluster, event: PushRequested) -> None:
    transfer_s = w.transfer_s(cluster)
    cluster.seq_high, cluster.base, cluster.ranks = event.push.seq, event.base, event.ranks
    cluster.outcome = cluster.outcome_version = None
    codec, deadline = _codec(w, event.base), w.now + transfer_s + TRANSFER_GRACE_S
    cluster.push = Push(event.push, event.base, event.ranks, deadline, transfer_s, _due(w, cluster), codec)
    if cluster.requested_at is not None:
        cluster.paces.append(w.now - cluster.requested_at)
    cluster.requested_at = w.now
    cluster.become(ClusterState.PUSHING, "its push is being opened")
    names, base = list(w.slaves), _held_base(cluster.push)
    lines = [line(w.options.order, i, event.ranks, len(names), str(event.push)) for i in range(len(names))]
    orders = {n: OpenPush(event.push, asked, transfer_s, codec, base) for n, asked in zip(names, lines, strict=True)}
    w.order("open_push", event.push, dict(orders), w.options.timing.order_s)


def _codec(w: World, base: VersionId) -> str:
    """Lossy only for differences to what every slave holds now; an older base, an orphan, a flip under way: fp32."""
    return w.options.codec if base == w.head and w.flipping is None else "fp32"


def _held_base(push: Push) -> VersionId | None:
    """What its differences are to; None if it carries parameters."""
    return None if push.codec == "fp32" else push.base


def opened(w: World, chorus: Chorus) -> None:
    """Every slave has reserved its slot: the push may move."""
    cluster = w.cluster_of(chorus.subject)
    if cluster is None or cluster.push is None:
        return
    cluster.push.opened, cluster.push.due = True, _due(w, cluster)
    cluster.reason = "pushing"
    w.note("push_granted", push=cluster.push.id, base=cluster.push.base)


def _due(w: World, cluster: Cluster) -> float:
    return w.now + w.moving_s(cluster) if cluster.bytes_per_s else 0.0


def _grant(w: World, push: Push) -> Grant:
    grant = w.grant(w.head, push.ranks, push.deadline_s)
    return replace(grant, codec=push.codec, base=_held_base(push))


def staged(w: World, event: PushStaged) -> None:
    """All of it lies on one slave. Said again in every beat; once is enough."""
    cluster = _told_by(w, event)
    if cluster is not None and cluster.push is not None:
        cluster.push.staged.add(event.slave)


def refused(w: World, event: PushRefused) -> None:
    """A slave gave up a push: its ranges were wrong or it stalled."""
    cluster = _told_by(w, event)
    if cluster is not None and cluster.push is not None and not cluster.push.committed:
        drop(w, cluster, f"{event.slave}: {event.reason}")


def _told_by(w: World, event: PushStaged | PushRefused) -> Cluster | None:
    """The cluster whose present push a present life of a slave speaks of."""
    slave = w.slaves.get(event.slave)
    return w.cluster_of(event.push) if slave and slave.sinc == event.sinc else None


def finished(w: World, event: PushFinished) -> None:
    """Commit: staged on every slave, so it has a place in a window. A repetition hears Committed again."""
    cluster = w.living(event.req, event.push.cluster, event.push.inc)
    if cluster is not None:
        w.reply(event.req, _finish(w, cluster, event))


def _finish(w: World, cluster: Cluster, event: PushFinished) -> Result:
    push = cluster.push
    if push is None or push.id != event.push:
        if cluster.outcome and cluster.outcome.push == event.push:
            return Committed()
        return Dropped(_why_gone(cluster, event.push))
    if push.committed:
        return Committed()
    if event.tokens < 0 or event.inner_steps < 0:
        return Failed("RemoteProtocolError", "tokens and inner_steps: expected 0 or more")
    foreign = set(event.ranges) - set(w.ranges.held_by(push.id.cluster, push.id.inc))
    if foreign:
        return Failed("RemoteProtocolError", f"data ranges {sorted(foreign)[:5]} are not leased to {cluster.name}")
    missing = [name for name in w.slaves if name not in push.staged]
    if missing:
        return Pending("not yet staged on " + ", ".join(missing))
    if reason := _uncountable(w, cluster, event.tokens):
        return Failed("RemoteProtocolError", reason)
    push.committed = True
    loss = event.loss if isfinite(event.loss) else 0.0  # shown to people only
    push.tokens, push.inner_steps, push.ranges, push.loss = event.tokens, event.inner_steps, event.ranges, loss
    w.waiting.append(push)
    cluster.become(ClusterState.COMMITTED, "its push is committed")
    w.note("push_committed", push=push.id, tokens=push.tokens, inner_steps=push.inner_steps, loss=push.loss)
    return Committed()


def _uncountable(w: World, cluster: Cluster, tokens: int) -> str:
    """Why so many tokens more cannot be counted; empty if they can: with them the run's total, and the cluster's."""
    committed = [*(w.round.pushes if w.round else ()), *w.waiting]
    of_run = w.tokens_accepted + sum(p.tokens for p in committed)
    of_cluster = cluster.counted + sum(p.tokens for p in committed if p.id.cluster == cluster.name)
    if max(of_run, of_cluster) + tokens <= MAX_TOKENS:
        return ""
    return f"tokens: {tokens} more would bring the count above {MAX_TOKENS}, the most that a run can have"


def aborted(w: World, event: PushAborted) -> None:
    """The cluster gives up; a committed push stays committed."""
    cluster = w.living(event.req, event.push.cluster, event.push.inc)
    if cluster is None:
        return
    if cluster.push and cluster.push.id == event.push and not cluster.push.committed:
        drop(w, cluster, event.reason)
    w.reply(event.req, Acknowledged())


def awaited(w: World, event: RoundAwaited) -> None:
    """What the round said of a push; from the ledger, also after a restart."""
    cluster = w.living(event.req, event.push.cluster, event.push.inc)
    if cluster is not None:
        w.reply(event.req, _outcome(w, cluster, event.push))


def _outcome(w: World, cluster: Cluster, push: PushId) -> Result:
    if cluster.push and cluster.push.id == push:
        return Pending(w.round.reason if w.round else "waits for the next window")
    row = cluster.outcome
    if row is None or row.push != push:
        return Dropped(_why_gone(cluster, push))
    if w.flipping is not None and row.kind != "skipped":
        return Pending("the slaves are flipping to the new version")
    pull = cluster.pull if cluster.pull and cluster.pull.id.seq == push.seq and cluster.pull.opened else None
    grant = w.grant(pull.version, cluster.ranks, pull.deadline_s, pull.first) if pull else None
    version = cluster.outcome_version if row.kind == "accepted" else w.head
    reason = row.reason
    if version in w.undone:
        reason = f"{reason}; undone since: the head is {w.head} again, which the next push is measured against"
    skipped = row.kind == "skipped"
    update_s = 0.0 if skipped else w.update_s
    return Outcome(row.kind, None if skipped else version, reason, grant, w.progress(), update_s)


def _why_gone(cluster: Cluster, push: PushId) -> str:
    if cluster.dropped_push[0] == push.seq:
        return cluster.dropped_push[1]
    return "this master does not know it: its round died with the master before"


def drop(w: World, cluster: Cluster, reason: str) -> None:
    """End a push that is not committed, on every slave; its progress stays with the cluster."""
    push = cluster.push
    assert push is not None and not push.committed
    cluster.push = None
    cluster.dropped_push = (push.id.seq, reason)
    w.forget_orders(frozenset({"open_push"}), push.id)
    w.order_all("done", push.id, DropPush(push.id, reason), w.options.timing.order_s)
    if cluster.live:
        resting = ClusterState.TRAINING if cluster.moving else ClusterState.IDLE
        cluster.become(resting, f"its push was dropped: {reason}")
    w.note("push_dropped", push=push.id, reason=reason)


def drop_all(w: World, reason: str) -> None:
    """End every push that is not in a round: a slave that held a part of it is gone, or the run is over."""
    for cluster in w.clusters.values():
        if cluster.push and not cluster.push.committed:
            drop(w, cluster, reason)


def expire(w: World) -> None:
    """End pushes past their deadline."""
    for cluster in w.clusters.values():
        if cluster.push and not cluster.push.committed and w.now >= cluster.push.deadline:
            drop(w, cluster, f"it did not arrive within {cluster.push.deadline_s:.4g} s")
