"""The flip: all slaves begin to serve a committed version, pinned for the clusters that pull it
(docs/protocol.md#messages rows 16, 17).
"""

from __future__ import annotations

from collections.abc import Sequence

from dips.ids import PullId, VersionId
from dips.protocol import durability, movement, pulls
from dips.protocol.effects import Commit, RankKeys
from dips.protocol.entities import Cluster, Fanout
from dips.protocol.enums import ClusterCause, FanoutKind, SlaveCause
from dips.protocol.moves import ClusterState
from dips.protocol.rank_keys import MOST_FLIP_KEYS
from dips.protocol.run_state import RunState


def flip_slaves(run: RunState, version: VersionId, pulling: Sequence[Cluster]) -> None:
    """Order the flip; the clusters that will pull are answered once every slave has flipped and pinned for them."""
    served = _choose_served(run, pulling)
    opening = tuple(_pull_after_outcome(c) for c in served)
    for cluster, pull in zip(served, opening, strict=True):
        pulls.begin_pull(run, cluster, pull, version)
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
            movement.close_pull(run, cluster, ClusterCause.PULL_ENDED, "a slave was lost while it flipped")


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
