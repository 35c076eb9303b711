"""Common parts of pushes and pulls: extended while they move, and asked by the slaves in one order."""

from __future__ import annotations

from dips.protocol.effects import ClosePull, Reorder
from dips.protocol.entities import Cluster, Push, Tombstone
from dips.protocol.enums import ClusterCause, ClusterState, FanoutKind
from dips.protocol.events import TransferAwaited
from dips.protocol.order import MOST_PAIRS, Worker, make_lines
from dips.protocol.run_state import RunState
from dips.protocol.transfer_book import too_slow

# ---- movement -------------------------------------------------------------------------------------------------------
# Extension of open transfers: a push or pull stays open as long as its cluster reports that its ranks prepare or move
# it (docs/rationale.md#19, #31).
#
# Ranks may be in an inner step that lasts longer than any constant, before they move bytes and after all bytes have
# arrived; and a transfer takes as long as its bytes take. So it stays open as long as the cluster's heartbeats name it
# and its trainer is seen to train or to move bytes; a stalled transfer is ended by the slaves and ranks that see it
# stall. A deadline ends a transfer that no heartbeat names. `min_push_bps` is the limit below which a link is too slow.
#
# Closing a pull is here as well, since a later request for a push closes it, too.


def on_transfer_awaited(run: RunState, event: TransferAwaited) -> None:
    """Restart the deadline of a transfer that its cluster awaits; not of one that is over, nor of a push on a too slow
    link.
    """
    cluster = run.clusters.get(event.cluster)
    if cluster is None or cluster.inc != event.inc:
        return
    slow = too_slow(cluster.bytes_per_s, run.now - cluster.measured_at, run.options.timing)
    for transfer in (cluster.pull, None if slow else cluster.push):
        if transfer is not None and transfer.id.seq == event.seq:
            run.transfers.keep_until(transfer, max(transfer.deadline, run.now + transfer.deadline_s))


def close_pull(run: RunState, cluster: Cluster, cause: ClusterCause, reason: str) -> None:
    """Close a pull: unpin its version on every slave; the cluster trains on."""
    pull = cluster.pull
    assert pull is not None
    cluster.pull = None
    if cluster.push is None:
        cluster.keys = ()  # the next request names them again
    run.transfers.close_pull(pull)
    cluster.closed_pull = Tombstone(pull.id.seq, reason)
    run.forget_orders(frozenset({FanoutKind.OPEN_PULL}), pull.id)
    run.order_all(FanoutKind.STANDALONE, pull.id, ClosePull(pull.id), run.options.timing.order_s)
    if cluster.state is ClusterState.PULLING:
        resting = ClusterState.TRAINING if cluster.moving else ClusterState.IDLE
        stalled = not (cluster.moving or cluster.reads)
        run.set_cluster_state(cluster, resting, ClusterCause.STALLED if stalled else cause, reason)


# ---- asking ---------------------------------------------------------------------------------------------------------
# The order in which slaves ask the ranks of all moving pushes, computed anew when a push joins (§3.1, Figure 5;
# order.py).
#
# The remaining bytes of a push are estimated from its cluster's bandwidth and the time since its grant. A wrong
# estimate costs only a turn, since slaves skip ranks that have nothing left. A push that moves alone keeps the order of
# its OpenPush.


LEAST_LEFT = 0.01  # least share that is assumed to be left of a push that is later than estimated


def reorder_pushes(run: RunState) -> None:
    """Order every slave to use new places for all ranks of all moving pushes, after a push has joined."""
    moving = [(run.clusters[p.id.cluster], p) for p in run.transfers.uncommitted_pushes() if p.opened]
    pairs = sum(push.ranks for _, push in moving) * len(run.slaves)
    if len(moving) < 2 or pairs > MOST_PAIRS:
        return  # above MOST_PAIRS each rank keeps the place in the rotation that came with its OpenPush
    slaves = list(run.slaves.values())
    numels = [sum(run.manifest.layers[i].numel for i in slave.layers) for slave in slaves]
    link = _slave_link(moving, len(slaves))
    workers = list[Worker]()
    for cluster, push in moving:
        rate = min(link, (cluster.bytes_per_s or link * push.ranks) / push.ranks)
        left = push.codec.element_bytes * _share_left(run, cluster, push) / push.ranks
        workers += [Worker(tuple(left * n / rate for n in numels), rate / link)] * push.ranks
    for slave, line in zip(slaves, make_lines(workers, len(slaves)), strict=True):
        place_of, first = {worker: place for place, worker in enumerate(line)}, 0
        for _, push in moving:
            places = tuple(place_of[first + rank] for rank in range(push.ranks))
            run.fan_out(
                FanoutKind.STANDALONE, push.id, {slave.name: Reorder(push.id, places)}, run.options.timing.order_s
            )
            first += push.ranks


def _slave_link(moving: list[tuple[Cluster, Push]], slaves: int) -> float:
    """Return the bytes/s assumed of a slave's link: its share of the fastest cluster's bandwidth; 1 while none was
    measured.
    """
    return max((c.bytes_per_s for c, _ in moving if c.bytes_per_s), default=float(slaves)) / slaves


def _share_left(run: RunState, cluster: Cluster, push: Push) -> float:
    """Return the estimated share of a push that is still to come."""
    if not push.due:
        return 1.0
    return min(1.0, max(LEAST_LEFT, (push.due - run.now) / run.moving_s(cluster, push.codec)))
