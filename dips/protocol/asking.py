"""The order in which slaves ask the ranks of all moving pushes, computed anew when a push joins (§3.1, Figure 5;
order.py).

The remaining bytes of a push are estimated from its cluster's bandwidth and the time since its grant. A wrong estimate
costs only a turn, since slaves skip ranks that have nothing left. A push that moves alone keeps the order of its
OpenPush.
"""

from __future__ import annotations

from dips.protocol.effects import Reorder
from dips.protocol.entities import Cluster, Push
from dips.protocol.enums import FanoutKind
from dips.protocol.manifest import BYTES_PER_PARAMETER
from dips.protocol.order import MOST_PAIRS, Worker, make_lines
from dips.protocol.run_state import RunState

LEAST_LEFT = 0.01  # least share that is assumed to be left of a push that is later than estimated


def reorder_pushes(run: RunState) -> None:
    """Order every slave to use new places for all ranks of all moving pushes, after a push has joined."""
    moving = [(run.clusters[p.id.cluster], p) for p in run.transfers.uncommitted_pushes() if p.opened]
    pairs = sum(push.ranks for _, push in moving) * len(run.slaves)
    if len(moving) < 2 or pairs > MOST_PAIRS:
        return  # above MOST_PAIRS each rank keeps the place in the rotation that came with its OpenPush
    slaves = list(run.slaves.values())
    nbytes = [BYTES_PER_PARAMETER * sum(run.manifest.layers[i].numel for i in slave.layers) for slave in slaves]
    link = _slave_link(moving, len(slaves))
    workers = list[Worker]()
    for cluster, push in moving:
        rate = min(link, (cluster.bytes_per_s or link * push.ranks) / push.ranks)
        left = _share_left(run, cluster, push) / push.ranks
        workers += [Worker(tuple(left * n / rate for n in nbytes), rate / link)] * push.ranks
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
    if not push.due or not cluster.bytes_per_s:
        return 1.0
    return min(1.0, max(LEAST_LEFT, (push.due - run.now) * cluster.bytes_per_s / run.model_bytes))
