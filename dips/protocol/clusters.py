"""Handlers of clusters' incarnations: join, leave, silence, trainers that stop and go, data ranges."""

from __future__ import annotations

from dips.errors import Busy, ConfigError, RemoteProtocolError
from dips.ids import reads_only
from dips.protocol import events, push_pull, seeding, transfers
from dips.protocol.claims import SILENT_HEARTBEATS, ToldProgress, find_protocol_mismatch, newest_protocol
from dips.protocol.effects import (
    Acknowledged,
    AdmitProbe,
    Failed,
    Finished,
    Joined,
    ManifestWanted,
    Pending,
    Ranges,
    Refused,
)
from dips.protocol.entities import INCARNATION_S, INCARNATIONS, Cluster, ProbeAdmission
from dips.protocol.enums import ClusterCause, ClusterStanding, ClusterState, FanoutKind, Role
from dips.protocol.rank_keys import KEY_CHARS, is_key
from dips.protocol.records import ClusterEnded, IncarnationGiven, RangesLeased
from dips.protocol.run_state import RunState

# ---- probe keys -----------------------------------------------------------------------------------------------------
# Keys of clusters that measure the path to encrypted lanes before they join (`dips check`), sent to every slave.
#
# Such a key gives no access: for a while slaves answer its PROBEs (slave/admission.py), and no other frame.


MOST_PROBES = 64  # clusters whose last probe is remembered; a forgotten one is ordered again


def on_probe_asked(run: RunState, event: events.ProbeAsked) -> None:
    """Legal any time. A repetition with the same key gets Pending until every slave has it."""
    if not is_key(event.key):
        run.reply_to(event.req, Failed(RemoteProtocolError, f"key: expected {KEY_CHARS} characters of Z85"))
        return
    if not run.has_encrypted_lanes():
        run.reply_to(event.req, Acknowledged())
        return
    known = run.probes.get(event.cluster)
    if known is None or known.key != event.key:
        known = run.probes[event.cluster] = _admit_probe(run, event)
    waiting = ", ".join(known.fanout.waiting)
    run.reply_to(event.req, Pending(f"waits for {waiting}") if waiting else Acknowledged())


def _admit_probe(run: RunState, event: events.ProbeAsked) -> ProbeAdmission:
    run.probes.pop(event.cluster, None)
    if len(run.probes) >= MOST_PROBES:
        del run.probes[next(iter(run.probes))]
    order = AdmitProbe(event.cluster, event.key)
    return ProbeAdmission(event.key, run.order_all(FanoutKind.STANDALONE, run.head, order, run.options.timing.order_s))


# ---- clusters -------------------------------------------------------------------------------------------------------
# Handlers of clusters' incarnations: join, leave, silence, trainers that stop and go, data ranges
# (docs/protocol.md#messages rows 2, 3).


MAX_CLUSTERS = 10_000  # names that ever joined; bounds memory and metric labels
MAX_RANGES_ASKED = 1_024
FROZEN_KEPT_IN = 2  # protocol: before, the ledger has no column for the digest, and the next master does not know it
REASON_CHARS = 300  # most characters of the reason for which a cluster left


def on_cluster_joined(run: RunState, event: events.ClusterJoined) -> None:
    """Begin an incarnation; the older one is fenced, its uncommitted push dropped. A repeated nonce changes nothing."""
    problem = _find_mismatch(run, event) or run.find_unproven()
    if problem:
        run.reply_to(event.req, problem)
        return
    cluster = run.clusters.get(event.cluster)
    if cluster is None or not (cluster.live and cluster.nonce == event.nonce):
        if taken := _find_rival(run, cluster, event):
            run.reply_to(event.req, taken)
            return
        if cluster is not None and not cluster.take_join(run.now):  # else one name fills the ledger's disk
            often = f"cluster: {cluster.name} has begun {INCARNATIONS} incarnations, and more than one in"
            run.reply_to(event.req, Failed(Busy, f"{often} {INCARNATION_S:g} s since: ask again"))
            return
        cluster = _begin_incarnation(run, event, cluster)
    ranges = run.ranges.held_by(cluster.name, cluster.inc)
    run.reply_to(
        event.req,
        Joined(
            run.term,
            cluster.inc,
            run.head,
            run.read_progress(),
            ranges,
            cluster.accounted,
            _settled_pushes(cluster),
            run.ranges.begun_of(ranges),
        ),
    )


def _find_rival(run: RunState, cluster: Cluster | None, event: events.ClusterJoined) -> Refused | Pending | None:
    """Return an answer if another agent uses the name: Refused while it is heard, Pending once it is silent; else None.

    An agent that starts again in its directory, or joins again, names its former incarnation and is not a rival.
    """
    if cluster is None or not cluster.live or event.former == cluster.inc or event.take_over:
        return None
    heartbeat_s, name = run.options.timing.heartbeat_s, f"{cluster.name}/{cluster.inc}"
    if event.rival_heard_s < SILENT_HEARTBEATS * heartbeat_s:
        taken = f"got {cluster.name}, which a live agent has as {name}"
        return Refused(heartbeat_s, f"cluster: expected a name that is free, {taken}; stop it, or rename this one")
    return Pending(f"waits until the lease of {name} ends, which has the name {cluster.name} and is silent")


def _settled_pushes(cluster: Cluster) -> int:
    """Return the number of this cluster's pushes that are accepted, gated, or in a window and about to be settled.

    It never falls, since the agent counts on from here and does not know of rollbacks and former incarnations: a push
    that a rollback has undone counts twice, and one that was lost in a window after its incarnation counts once. So no
    checkpoint that it saves has the number of a later time.
    """
    counts = cluster.counts
    return counts["accepted"] + counts["gated"] + 2 * counts["undone"] + cluster.in_window


def _find_mismatch(run: RunState, event: events.ClusterJoined) -> Failed | ManifestWanted | None:
    if mismatch := find_protocol_mismatch(run.protocol, event):
        return mismatch
    if event.cluster == seeding.SEEDER:
        return Failed(ConfigError, f"cluster: expected a name, got {seeding.SEEDER}, that of `dips seed`; rename it")
    if event.run != run.row.run:
        return Failed(ConfigError, f"shared.run: expected {run.row.run!r}, got {event.run!r}; name that run's master")
    if event.config_digest != run.row.config_digest:
        return Failed(
            ConfigError,
            f"shared: expected digest {run.row.config_digest[:12]}, got {event.config_digest[:12]}; copy the section "
            "`shared` of the run file",
        )
    if event.manifest_digest != run.manifest.digest:
        return ManifestWanted(run.manifest.digest)  # compared outside the Coordinator: master/runtime.py
    if differs := _find_other_base(run, event):
        return differs
    if event.cluster not in run.clusters and len(run.clusters) >= MAX_CLUSTERS:
        return Failed(Busy, f"cluster: expected at most {MAX_CLUSTERS} names, got one more; take one of before")
    return None


def _find_other_base(run: RunState, event: events.ClusterJoined) -> Failed | None:
    """Return an error if a live cluster has other frozen parameters: adapters trained on two bases cannot be merged."""
    if not event.frozen_digest or reads_only(event.cluster):
        return None
    known = (c for c in run.clusters.values() if c.trains and c.frozen_digest and c.name != event.cluster)
    other = next((c for c in known if c.frozen_digest != event.frozen_digest), None)
    if other is None:
        return None
    return Failed(
        ConfigError,
        f"frozen parameters of {event.cluster}: expected digest {other.frozen_digest[:12]}, as {other.name} has, got "
        f"{event.frozen_digest[:12]}; load the same base everywhere",
    )


def _begin_incarnation(run: RunState, event: events.ClusterJoined, old: Cluster | None) -> Cluster:
    inc = run.next_incarnation(old.inc if old is not None else 0)
    if old is not None:
        if old.live:
            reason = f"fenced by its next incarnation {old.name}/{inc}"
            end_incarnation(run, old, ClusterCause.FENCED, reason, old.consumed, old.lost)
        old.begin_incarnation(inc, event.nonce, run.now)
    cluster = old or Cluster(event.cluster, inc, event.nonce, since=run.now, moving=not reads_only(event.cluster))
    cluster.works_since, cluster.frozen_digest = run.now, event.frozen_digest
    cluster.newest_protocol = newest_protocol(event)
    run.clusters[event.cluster] = cluster
    kept = event.frozen_digest if run.protocol >= FROZEN_KEPT_IN else ""
    run.emit_record(IncarnationGiven(Role.CLUSTER, cluster.name, inc, event.nonce, kept))
    run.emit_note("cluster_joined", cluster=cluster.name, inc=inc, head=run.head)
    return cluster


def end_incarnation(
    run: RunState, cluster: Cluster, cause: ClusterCause, reason: str, consumed: int, reported_lost: int = 0
) -> None:
    """End an incarnation: a committed push stays in its round, everything else is freed.

    Tokens that it is known to have consumed and that are not settled are lost; a push may have been settled after the
    last heartbeat (docs/rationale.md#37). Tokens that it reported as lost with dead trainers stay lost, even if more
    was settled since that heartbeat than it had reported in all.
    """
    if cluster.reads:
        consumed = reported_lost = 0  # whatever its heartbeats say
    committed = cluster.push if cluster.push and cluster.push.committed else None
    if cluster.push and not committed:
        push_pull.drop_push(run, cluster, reason)
    if cluster.pull:
        transfers.close_pull(run, cluster, cause, reason)
    cluster.keys = ()
    run.slot_queue.leave_queue(cluster.name)
    run.ranges.release_lease(cluster.name, cluster.inc, keep=committed.held_ranges if committed else ())
    # Tokens of a committed push are not lost with the cluster: its round settles them.
    open_seq, open_tokens = (committed.id.seq, committed.tokens) if committed else (0, 0)
    brought = cluster.settled + open_tokens
    lost = _countable_loss(cluster, brought, max(reported_lost, consumed - brought))
    cluster.accounted = brought + lost
    cluster.tokens["lost"] += lost
    run.set_cluster_state(cluster, ClusterState.GONE, cause, reason)
    run.emit_record(ClusterEnded(cluster.name, cluster.inc, reason, lost, run.now, open_seq, open_tokens))
    run.emit_note("cluster_gone", cluster=cluster.name, inc=cluster.inc, cause=cause, reason=reason)


def _countable_loss(cluster: Cluster, brought: int, lost: int) -> int:
    """Limit a reported loss to what the cluster's sums can hold, so that an absurd heartbeat cannot overflow them."""
    return max(0, min(lost, push_pull.MAX_TOKENS - brought, push_pull.MAX_TOKENS - cluster.tokens["lost"]))


def on_trainer_changed(run: RunState, event: events.TrainerChanged) -> None:
    """Record that a trainer hangs, died or goes on: it keeps its lease, and no window waits for it while it stands
    still.
    """
    cluster = run.clusters.get(event.cluster)
    if cluster is None or cluster.inc != event.inc or not cluster.trains:
        return
    cluster.moving = event.moving
    if cluster.state is ClusterState.TRAINING and not event.moving:
        run.set_cluster_state(cluster, ClusterState.IDLE, ClusterCause.STALLED, event.reason)
    elif cluster.state is ClusterState.IDLE and event.moving:
        run.set_cluster_state(cluster, ClusterState.TRAINING, ClusterCause.TRAINS, event.reason)
    run.follow_cluster(cluster)


def on_bandwidth_measured(run: RunState, event: events.BandwidthMeasured) -> None:
    """Record a cluster's bandwidth for its next transfers; open transfers keep their deadline."""
    cluster = run.clusters.get(event.cluster)
    if cluster is not None and cluster.inc == event.inc:
        cluster.bytes_per_s, cluster.measured_at = event.bytes_per_s, run.now
        run.follow_cluster(cluster)


def on_protocol_told(run: RunState, event: events.ProtocolTold) -> None:
    """Record the newest protocol that a cluster speaks, of which `dips finalise` depends."""
    cluster = run.clusters.get(event.cluster)
    if cluster is not None and cluster.inc == event.inc:
        cluster.newest_protocol = max(cluster.newest_protocol, event.newest_protocol)


def on_ranges_requested(run: RunState, event: events.RangesRequested) -> None:
    """Lease data ranges; a repeated request gets the same ones.

    An empty answer means none before the cluster has settled its own, or, if `exhausted`, none ever. Pending: ranges
    that others hold may become free.
    """
    cluster = run.live_cluster(event.req, event.cluster, event.inc)
    if cluster is None:
        return
    if refused := push_pull.refuse_reader(cluster):
        run.reply_to(event.req, refused)
        return
    if not 1 <= event.count <= MAX_RANGES_ASKED:
        run.reply_to(
            event.req, Failed(RemoteProtocolError, f"count: expected 1 to {MAX_RANGES_ASKED}, got {event.count}")
        )
        return
    if len(event.claims) > MAX_RANGES_ASKED:
        run.reply_to(
            event.req, Failed(RemoteProtocolError, f"claims: at most {MAX_RANGES_ASKED}, got {len(event.claims)}")
        )
        return
    if run.finished:
        run.reply_to(event.req, Finished(run.finished))
        return
    book = run.ranges
    if not event.claims and (waits := book.why_wait(cluster.name, cluster.inc, event.seq)):
        run.reply_to(event.req, Pending(waits))
        return
    taken, new = book.lease_ranges(cluster.name, cluster.inc, event.seq, event.count, event.claims)
    if new and taken:
        run.emit_record(RangesLeased(cluster.name, cluster.inc, event.seq, taken))
    exhausted = not taken and book.is_exhausted(cluster.name, cluster.inc)
    run.reply_to(event.req, Ranges(taken, exhausted, book.begun_of(taken)))


def on_cluster_left(run: RunState, event: events.ClusterLeft) -> None:
    """End an incarnation at its own request; a repetition is acknowledged again."""
    if run.cluster_standing(event.cluster, event.inc) is ClusterStanding.LIVE:
        cause = ClusterCause.GAVE_UP if event.reason else ClusterCause.LEFT
        reason = event.reason[:REASON_CHARS] or "left"
        end_incarnation(run, run.clusters[event.cluster], cause, reason, event.tokens_consumed)
    run.reply_to(event.req, Acknowledged())


def on_cluster_silent(run: RunState, event: events.ClusterSilent) -> None:
    """End an incarnation whose lease has run out."""
    if run.cluster_standing(event.cluster, event.inc) is ClusterStanding.LIVE:
        reason = f"silent for {event.silent_s:.1f} s"
        cluster = run.clusters[event.cluster]
        end_incarnation(run, cluster, ClusterCause.SILENT, reason, event.tokens_consumed, event.tokens_lost)


def on_cluster_expelled(run: RunState, event: events.ClusterExpelled) -> None:
    """End the incarnation of a cluster that may no longer take part; its transfers are dropped and its open questions
    answered.
    """
    cluster = run.clusters.get(event.cluster)
    if cluster is not None and cluster.live:
        reason = event.reason[:REASON_CHARS]
        end_incarnation(run, cluster, ClusterCause.EXPELLED, reason, cluster.consumed, cluster.lost)


def on_tokens_reported(run: RunState, event: events.TokensReported) -> None:
    """Record the progress of the present incarnation, for its next push and in case it is fenced."""
    cluster = run.clusters.get(event.cluster)
    if cluster is not None and cluster.inc == event.inc:
        cluster.consumed, cluster.lost = event.tokens_consumed, event.tokens_lost
        cluster.told = (cluster.told or ToldProgress()).raised(event.tokens_consumed, event.inner_steps)
