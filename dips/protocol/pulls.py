"""Pulls: a version is pinned on every slave before the cluster is told (protocol.md row 17, why.md 19, 20)."""

from __future__ import annotations

from dips.ids import PullId, VersionId
from dips.protocol.effects import Acknowledged, ClosePull, Dropped, Failed, OpenPull, Pending, Refused, Result
from dips.protocol.events import PullFinished, PullRequested
from dips.protocol.moves import ClusterState
from dips.protocol.pushes import MAX_RANKS, TRANSFER_GRACE_S
from dips.protocol.world import Chorus, Cluster, Pull, World


def requested(w: World, event: PullRequested) -> None:
    """Legal in any life but the middle of a push; pins the head everywhere. A repetition gets the same Grant."""
    cluster = w.living(event.req, event.pull.cluster, event.pull.inc)
    if cluster is not None:
        w.reply(event.req, _request(w, cluster, event))


def _request(w: World, cluster: Cluster, event: PullRequested) -> Result:
    pull = cluster.pull
    if pull and pull.id == event.pull:
        if not pull.opened:
            return Pending("the slaves are pinning the version")
        return w.grant(pull.version, pull.ranks, pull.deadline_s, pull.first)
    if cluster.closed_pull[0] == event.pull.seq:
        return Dropped(cluster.closed_pull[1])
    if event.pull.seq <= cluster.seq_high:
        return Failed("StalePush", f"{event.pull}: expected a seq above {cluster.seq_high}")
    if not 1 <= event.ranks <= MAX_RANKS:
        return Failed("RemoteProtocolError", f"ranks: expected 1 to {MAX_RANKS}, got {event.ranks}")
    if cluster.state is ClusterState.PUSHING:
        return Refused(w.options.timing.busy_retry_s, "a push is moving: finish or abort it first")
    waits = w.why_missing() or ("the slaves to flip" if w.flipping is not None else "")
    if waits:
        return Refused(w.options.timing.busy_retry_s, f"waits for {waits}")
    if pull:
        close(w, cluster, f"superseded by {event.pull}")
    cluster.seq_high, cluster.ranks = event.pull.seq, event.ranks
    deadline_s = pulling(w, cluster, event.pull, w.head)
    w.order_all("open_pull", event.pull, OpenPull(event.pull, w.head, deadline_s), w.options.timing.order_s)
    return Pending("the slaves are pinning the version")


def pulling(w: World, cluster: Cluster, pull: PullId, version: VersionId) -> float:
    """The cluster is about to pull `version`; return how long it may, in seconds."""
    deadline_s = w.transfer_s(cluster)
    first = sum(p.ranks for p in w.open_pulls())
    deadline = w.now + deadline_s + TRANSFER_GRACE_S
    cluster.pull = Pull(pull, version, cluster.ranks, deadline, deadline_s, first=first)
    cluster.become(ClusterState.PULLING, f"pulling {version}")
    return deadline_s


def opened(w: World, chorus: Chorus) -> None:
    """Every slave has pinned the version."""
    cluster = w.cluster_of(chorus.subject)
    if cluster is not None and cluster.pull is not None:
        cluster.pull.opened = True


def finished(w: World, event: PullFinished) -> None:
    """All ranks installed it, or none did. A repetition is acknowledged again."""
    cluster = w.living(event.req, event.pull.cluster, event.pull.inc)
    if cluster is None:
        return
    if cluster.pull and cluster.pull.id == event.pull:
        version = cluster.pull.version
        close(w, cluster, f"trains on {version}" if event.installed else "its pull failed: it trains on what it has")
        if event.installed:
            cluster.base = version
    w.reply(event.req, Acknowledged())


def close(w: World, cluster: Cluster, reason: str) -> None:
    """Unpin on every slave; the cluster trains on."""
    pull = cluster.pull
    assert pull is not None
    cluster.pull = None
    cluster.closed_pull = (pull.id.seq, reason)
    w.forget_orders(frozenset({"open_pull"}), pull.id)
    w.order_all("done", pull.id, ClosePull(pull.id), w.options.timing.order_s)
    if cluster.state is ClusterState.PULLING:
        cluster.become(ClusterState.TRAINING if cluster.moving else ClusterState.IDLE, reason)


def close_all(w: World, reason: str) -> None:
    """A slave that held a pin is gone: nobody can pull a whole version from the rest."""
    for cluster in w.clusters.values():
        if cluster.pull:
            close(w, cluster, reason)


def expire(w: World) -> None:
    """End pulls past their deadline."""
    for cluster in w.clusters.values():
        if cluster.pull and w.now >= cluster.pull.deadline:
            close(w, cluster, f"it did not end within {cluster.pull.deadline_s:.4g} s")
