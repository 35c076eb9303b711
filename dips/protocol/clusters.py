"""Lives of clusters: join, leave, silence, trainers that stop and go, data ranges (protocol.md rows 2, 3)."""

from __future__ import annotations

from dips.errors import CorruptManifest
from dips.protocol import pulls, pushes
from dips.protocol.effects import Acknowledged, Failed, Finished, Joined, Ranges
from dips.protocol.events import BandwidthMeasured, ClusterJoined, RangesRequested, TrainerChanged
from dips.protocol.manifest import Manifest
from dips.protocol.moves import ClusterState
from dips.protocol.records import ClusterEnded, IncarnationGiven, RangesLeased
from dips.protocol.world import Cluster, World

MAX_CLUSTERS = 10_000  # names ever heard; bounds memory and metric labels
MAX_RANGES_ASKED = 1_024


def joined(w: World, event: ClusterJoined) -> None:
    """Begin a life; the older one is fenced and its uncommitted push dropped. A repeated nonce gets the same life."""
    problem = _mismatch(w, event)
    if problem:
        w.reply(event.req, problem)
        return
    if w.unproven(event.req):
        return
    cluster = w.clusters.get(event.cluster)
    if cluster is None or not (cluster.live and cluster.nonce == event.nonce):
        cluster = _begin(w, event, cluster)
    ranges = w.ranges.held_by(cluster.name, cluster.inc)
    w.reply(
        event.req, Joined(w.term, cluster.inc, w.head, w.progress(), ranges, cluster.accounted, _settled(w, cluster))
    )


def _settled(w: World, cluster: Cluster) -> int:
    """Pushes of this cluster whose work is in the run or refused for good; one in a window is about to be."""
    in_window = [p for p in (*(w.round.pushes if w.round else ()), *w.waiting) if p.id.cluster == cluster.name]
    return cluster.counts["accepted"] + cluster.counts["gated"] + len(in_window)


def _mismatch(w: World, event: ClusterJoined) -> Failed | None:
    if event.run != w.row.run:
        return Failed(
            "ConfigError", f"shared.run: this master serves {w.row.run!r}, the cluster belongs to {event.run!r}"
        )
    if event.config_digest != w.row.config_digest:
        return Failed(
            "ConfigError",
            f"shared: digest {event.config_digest[:12]} differs from the run's {w.row.config_digest[:12]}; "
            "copy the section `shared` of the run file",
        )
    try:
        differences = w.manifest.differences(Manifest.from_json(event.manifest))
    except CorruptManifest as error:
        return Failed("CorruptManifest", str(error))
    if differences:
        return Failed("CorruptManifest", "this model is not the run's: " + "; ".join(differences))
    if event.cluster not in w.clusters and len(w.clusters) >= MAX_CLUSTERS:
        return Failed("Busy", f"this run has heard {MAX_CLUSTERS} cluster names, its limit")
    return None


def _begin(w: World, event: ClusterJoined, old: Cluster | None) -> Cluster:
    inc = 1
    if old is not None:
        inc = old.inc + 1
        if old.live:
            end(w, old, f"fenced by its next life {old.name}/{inc}", old.consumed, old.lost)
        old.reborn(inc, event.nonce)
    cluster = old or Cluster(event.cluster, inc, event.nonce)
    w.clusters[event.cluster] = cluster
    w.record(IncarnationGiven("cluster", cluster.name, inc, event.nonce))
    w.note("cluster_joined", cluster=cluster.name, inc=inc, head=w.head)
    return cluster


def end(w: World, cluster: Cluster, reason: str, consumed: int, told_lost: int = 0) -> None:
    """A life is over. Its committed push counts; everything else of it is freed.

    Of the tokens that it is known to have consumed, those are lost that are not settled: a push may have been settled
    after the beat that told them (why.md 37). What it told as lost with its dead trainers stays lost, also if what was
    settled since that beat is more than all that it told.
    """
    committed = cluster.push if cluster.push and cluster.push.committed else None
    if cluster.push and not committed:
        pushes.drop(w, cluster, reason)
    if cluster.pull:
        pulls.close(w, cluster, reason)
    w.ranges.release(cluster.name, cluster.inc, keep=committed.ranges if committed else ())
    # Tokens of a committed push are not lost with the cluster: its round settles them.
    open_seq, open_tokens = (committed.id.seq, committed.tokens) if committed else (0, 0)
    brought = cluster.settled + open_tokens
    lost = _countable(cluster, brought, max(told_lost, consumed - brought))
    cluster.accounted = brought + lost
    cluster.tokens["lost"] += lost
    cluster.become(ClusterState.GONE, reason)
    w.record(ClusterEnded(cluster.name, cluster.inc, reason, lost, w.now, open_seq, open_tokens))
    w.note("cluster_gone", cluster=cluster.name, inc=cluster.inc, reason=reason)


def _countable(cluster: Cluster, brought: int, lost: int) -> int:
    """Of what an incarnation says it lost, what its cluster's sums have room for: an absurd heartbeat is cut."""
    return max(0, min(lost, pushes.MAX_TOKENS - brought, pushes.MAX_TOKENS - cluster.tokens["lost"]))


def trainer_changed(w: World, event: TrainerChanged) -> None:
    """A trainer that hangs or is dead keeps its lease, and no window waits for it."""
    cluster = w.clusters.get(event.cluster)
    if cluster is None or cluster.inc != event.inc or not cluster.live:
        return
    cluster.moving = event.moving
    if cluster.state is ClusterState.TRAINING and not event.moving:
        cluster.become(ClusterState.IDLE, event.reason)
    elif cluster.state is ClusterState.IDLE and event.moving:
        cluster.become(ClusterState.TRAINING, event.reason)


def bandwidth_measured(w: World, event: BandwidthMeasured) -> None:
    """What its next transfers are given; those that move keep their deadline."""
    cluster = w.clusters.get(event.cluster)
    if cluster is not None and cluster.inc == event.inc:
        cluster.bytes_per_s, cluster.measured_at = event.bytes_per_s, w.now


def ranges_requested(w: World, event: RangesRequested) -> None:
    """Lease data ranges; a repeated question gets the same ones."""
    cluster = w.living(event.req, event.cluster, event.inc)
    if cluster is None:
        return
    if not 1 <= event.count <= MAX_RANGES_ASKED:
        w.reply(event.req, Failed("RemoteProtocolError", f"count: expected 1 to {MAX_RANGES_ASKED}, got {event.count}"))
        return
    if len(event.claims) > MAX_RANGES_ASKED:
        w.reply(
            event.req, Failed("RemoteProtocolError", f"claims: at most {MAX_RANGES_ASKED}, got {len(event.claims)}")
        )
        return
    if w.finished:
        w.reply(event.req, Finished(w.finished))
        return
    taken, new = w.ranges.lease(cluster.name, cluster.inc, event.seq, event.count, event.claims)
    if new and taken:
        w.record(RangesLeased(cluster.name, cluster.inc, event.seq, taken))
    w.reply(event.req, Ranges(taken, not taken))


def left(w: World, req: int, name: str, inc: int, consumed: int) -> None:
    """Goes gracefully; saying it twice is fine."""
    if w.standing(name, inc) == "live":
        end(w, w.clusters[name], "left", consumed)
    w.reply(req, Acknowledged())
