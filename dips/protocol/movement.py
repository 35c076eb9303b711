"""Extension of open transfers: a push or pull stays open as long as its cluster reports that its ranks prepare or move
it (docs/rationale.md#19, #31).

Ranks may be in an inner step that lasts longer than any constant, before they move bytes and after all bytes have
arrived; and a transfer takes as long as its bytes take. So it stays open as long as the cluster's heartbeats name it
and its trainer is seen to train or to move bytes; a stalled transfer is ended by the slaves and ranks that see it
stall. A deadline ends a transfer that no heartbeat names. `min_push_bps` is the limit below which a link is too slow.

Closing a pull is here as well, since a later request for a push closes it, too.
"""

from __future__ import annotations

from dips.protocol.deadlines import too_slow
from dips.protocol.effects import ClosePull
from dips.protocol.entities import Cluster, Tombstone
from dips.protocol.enums import ClusterCause, FanoutKind
from dips.protocol.events import TransferAwaited
from dips.protocol.moves import ClusterState
from dips.protocol.run_state import RunState


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
        run.set_cluster_state(cluster, resting, cause if cluster.moving else ClusterCause.STALLED, reason)
