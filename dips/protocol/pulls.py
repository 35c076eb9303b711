"""Pulls: a version is pinned on every slave before a cluster gets its Grant; the flip to a committed version."""

from __future__ import annotations

from collections.abc import Sequence

from dips.errors import ConfigError, RemoteProtocolError, StalePush
from dips.ids import GENESIS, PullId, VersionId
from dips.protocol import durability, pushes, transfers
from dips.protocol.claims import find_absurd_seq
from dips.protocol.effects import Acknowledged, Commit, Dropped, Failed, OpenPull, Pending, RankKeys, Refused, Result
from dips.protocol.entities import Cluster, Fanout, Pull
from dips.protocol.enums import ClusterCause, ClusterState, FanoutKind, SlaveCause
from dips.protocol.events import PullFinished, PullRequested
from dips.protocol.order import MAX_RANKS
from dips.protocol.rank_keys import MOST_FLIP_KEYS, find_wrong_keys
from dips.protocol.run_state import RunState, name_some

# ---- flip -----------------------------------------------------------------------------------------------------------
# The flip: all slaves begin to serve a committed version, pinned for the clusters that pull it
# (docs/protocol.md#messages rows 16, 17).


def flip_slaves(run: RunState, version: VersionId, pulling: Sequence[Cluster]) -> None:
    """Order the flip; the clusters that will pull are answered once every slave has flipped and pinned for them."""
    served = _choose_served(run, pulling)
    opening = tuple(_pull_after_outcome(c) for c in served)
    for cluster, pull in zip(served, opening, strict=True):
        begin_pull(run, cluster, pull, version)
    keys = tuple(RankKeys(c.keys) for c in served) if any(c.keys for c in served) else ()
    order = Commit(version, opening, keys)
    run.flipping = run.order_all(FanoutKind.COMMIT, version, order, run.options.timing.order_s)
    if not run.flipping.waiting:
        on_slaves_flipped(run, run.flipping)


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
        if not _waits_for_flip(cluster, fanout):
            continue
        if complete:
            assert cluster.pull is not None
            cluster.pull.opened = True
        else:
            transfers.close_pull(run, cluster, ClusterCause.PULL_ENDED, "a slave was lost while it flipped")


def _waits_for_flip(cluster: Cluster, fanout: Fanout) -> bool:
    """Whether the cluster's pull is opened by this flip."""
    pull = cluster.pull
    if pull is None or pull.opened or pull.version != fanout.subject or not cluster.outcome:
        return False
    return _pull_after_outcome(cluster) == pull.id


def _pull_after_outcome(cluster: Cluster) -> PullId:
    """Return the name of the pull after a push's Outcome: it has the same seq as the push."""
    assert cluster.outcome is not None
    push = cluster.outcome.push
    return PullId(push.cluster, push.inc, push.seq)


def stop_waiting_for(run: RunState, slave: str) -> None:
    """Remove a lost slave's orders; a fanout that needs all answers is ended by the handler that ends its subject."""
    for number in list(run.orders.orders_of(slave)):
        if run.orders.find_order(number) is None:
            continue  # the late snapshot was forgotten, on every slave
        fanout, _ = run.orders.remove_order(number)
        if fanout.kind in (FanoutKind.COMMIT, FanoutKind.STANDALONE):
            fanout.waiting.pop(slave)
        elif fanout is run.durability.late:
            durability.forget_late_snapshot(run)
    if run.flipping is not None and not run.flipping.waiting:
        on_slaves_flipped(run, run.flipping)


# ---- pulls ----------------------------------------------------------------------------------------------------------
# Pulls: a version is pinned on every slave before the cluster gets its Grant (docs/protocol.md#messages row 17,
# docs/rationale.md#19, #20).


def on_pull_requested(run: RunState, event: PullRequested) -> None:
    """Legal in any state but the middle of a push; pins the head on every slave, or an older version that disks keep.

    A repetition gets the same Grant.
    """
    cluster = run.live_cluster(event.req, event.pull.cluster, event.pull.inc)
    if cluster is not None:
        run.reply_to(event.req, _answer_request(run, cluster, event))


def _answer_request(run: RunState, cluster: Cluster, event: PullRequested) -> Result:
    pull = cluster.pull
    if pull and pull.id == event.pull:
        if not pull.opened:
            return Pending("the slaves are pinning the version")
        return run.make_grant(pull.version, pull.deadline_s, pull.first)
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
    if missing := _why_not_kept(run, version):
        return Failed(ConfigError, missing)
    pushes.end_superseded(run, cluster, event.pull)
    waits = run.why_missing() or ("the slaves to flip" if run.flipping is not None else "")
    if waits:
        return Refused(run.options.timing.busy_retry_s, f"waits for {waits}")
    cluster.seq_high, cluster.ranks, cluster.keys = event.pull.seq, event.ranks, event.keys
    begin_pull(run, cluster, event.pull, version)
    order = OpenPull(event.pull, version, event.keys)
    run.order_all(FanoutKind.OPEN_PULL, event.pull, order, run.options.timing.order_s)
    return Pending("the slaves are pinning the version")


def _why_not_kept(run: RunState, version: VersionId) -> str:
    """Return why a version cannot be pulled; empty if it can: slaves serve the head and versions on their disks."""
    row = run.versions.get(version)
    if version == run.head or (row is not None and not row.retired and (row.durable or version == GENESIS)):
        return ""
    rows = [v for v in reversed(run.versions.values()) if v.version != GENESIS]
    kept = [str(v.version) for v in rows if v.durable and not v.retired]
    has = f"the slaves keep {name_some(kept)}" if kept else "the slaves keep no version yet"
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
    if cluster is not None and cluster.pull is not None:
        cluster.pull.opened = True


def on_pull_finished(run: RunState, event: PullFinished) -> None:
    """Close a pull that all ranks installed, or none. A repetition is acknowledged again."""
    cluster = run.live_cluster(event.req, event.pull.cluster, event.pull.inc)
    if cluster is None:
        return
    if cluster.pull and cluster.pull.id == event.pull:
        version = cluster.pull.version
        failed = "its pull failed: it trains on what it has"
        cause, reason = (
            (ClusterCause.TRAINS, f"trains on {version}") if event.installed else (ClusterCause.PULL_ENDED, failed)
        )
        transfers.close_pull(run, cluster, cause, reason)
        if event.installed:
            cluster.base = version
    run.reply_to(event.req, Acknowledged())


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
