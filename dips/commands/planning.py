"""The sums of `dips plan`: memory and disk of each slave, host memory of each rank, and what a round moves and costs.

A slave's sum is the one it prints when it starts (dips/outer/pool.py), a rank's sum that of its parts
(dips/client/parallel/shard_buffer.py); nothing is estimated twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from dips.codecs import OWED_BYTES, Codec
from dips.config import ClusterFile, SlaveSection
from dips.master.journal import SEGMENT_BYTES, SEGMENTS_KEPT
from dips.protocol.manifest import BYTES_PER_PARAMETER
from dips.protocol.options import Options
from dips.slave.machine import memory_of
from dips.telemetry.timeline import MOST_BYTES as TIMELINE_BYTES

KEEP_SNAPSHOTS = Options().keep_snapshots
WRITTEN, LAGGING = 1, 2  # snapshots on a slave's disk besides those that are kept; the latter with a mirror
SNAPSHOT_BYTES = 2 * BYTES_PER_PARAMETER  # θ and m
RANK_PROCESS_BYTES = 60_000_000  # as in dips/client/parallel/shard_buffer.py, which needs torch
MASTER_BYTES = 400_000_000  # measured: 89 MB idle, 126 MB with 2,000 connections; the rest is for working clusters
LEDGER_BYTES_ROUND = 2_000  # per round of ten clusters
MASTER_LOG_BYTES = SEGMENTS_KEPT * SEGMENT_BYTES + 2 * TIMELINE_BYTES  # its journal and its timeline
HEADROOM = 1.1  # factor from a sum to a Kubernetes request
MIB = 1 << 20
LEAST_CLAIM_MIB = 1024


@dataclass(frozen=True, slots=True)
class PlannedSlave:
    """The needs of one slave, with the sum of its memory."""

    name: str
    layers: int
    parameters: int
    memory_bytes: int
    disk_bytes: int
    snapshots: int  # that may lie on its disk at once
    said: str


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """The needs of one cluster: host memory of each rank, and bytes on its link per round."""

    ranks: int
    rank_bytes: int
    push_bytes: int
    pull_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """The cost of a round in seconds, by rates in bytes a second: of each slave's disk, and of a cluster's link."""

    disk_rate: float
    link_rate: float
    push_s: float
    persist_s: float  # of the heaviest slave's snapshot; with `durability: commit` the round waits for it
    pull_s: float
    start_s: float  # for the heaviest slave to read its snapshots when it starts

    @property
    def total_s(self) -> float:
        """Seconds of the three that follow one another, without the inner steps and the outer step's arithmetic."""
        return self.push_s + self.persist_s + self.pull_s


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The needs of a whole run; `model` in elements."""

    model: int
    slaves: tuple[PlannedSlave, ...]
    cluster: PlannedCluster
    round: PlannedRound
    master_memory_bytes: int
    master_disk_bytes: int


def share_equally(parameters: int, slaves: int) -> list[int]:
    """Return each slave's share of a model whose layers are not known; shares differ by at most one."""
    return [parameters * (i + 1) // slaves - parameters * i // slaves for i in range(slaves)]


def default_section(name: str) -> SlaveSection:
    """Return the section of a slave of which nothing is known; its paths are neither read nor written."""
    return SlaveSection(name=name, master="127.0.0.1:0", directory=Path("/nonexistent"))


def plan_slave(section: SlaveSection, layers: int, numel: int, pull_codec: Codec, kept: int) -> PlannedSlave:
    """Return a slave's needs: the memory it prints at its start, and all snapshots that may lie on its disk.

    kept  the newest snapshots that stay, with the archives of `keep_every`

    Besides these there is the one that is written; with a mirror also the newest version that all mirrors hold, and the
    one that is being copied to them, which stay while a mirror lags (dips/protocol/durability.py). The first model,
    θ alone, is there for good if `dips seed` brings it.
    """
    memory = memory_of(section, numel, pull_codec)
    snapshots = kept + WRITTEN + (LAGGING if section.mirror else 0)
    seeded = BYTES_PER_PARAMETER if section.initial_model is None else 0
    disk = (SNAPSHOT_BYTES * snapshots + seeded) * numel
    return PlannedSlave(section.name, layers, numel, memory.total_bytes, disk, snapshots, memory.describe_sum())


def plan_cluster(
    numel: int, ranks: int, codec: Codec, pull_codec: Codec, file: ClusterFile | None = None
) -> PlannedCluster:
    """Return the needs of a cluster whose model is sharded evenly; `file` tells whether ranks train on during a
    push.
    """
    share = ceil(numel / ranks)
    keeps = file is not None and file.overlap == "full"
    lossy = codec.lossy or pull_codec.lossy
    rank = (
        BYTES_PER_PARAMETER * share
        + BYTES_PER_PARAMETER * share * keeps
        + OWED_BYTES * share * lossy
        + RANK_PROCESS_BYTES
    )
    push, pull = (ceil(each.element_bytes * numel) for each in (codec, pull_codec))
    return PlannedCluster(ranks, rank, push, pull)


def plan_round(
    slaves: Sequence[PlannedSlave], cluster: PlannedCluster, disk_rate: float, link_rate: float, kept: int
) -> PlannedRound:
    """Return what a round costs with disks and links of these rates, in bytes a second."""
    snapshot = SNAPSHOT_BYTES * max(slave.parameters for slave in slaves)
    return PlannedRound(
        disk_rate,
        link_rate,
        cluster.push_bytes / link_rate,
        snapshot / disk_rate,
        cluster.pull_bytes / link_rate,
        kept * snapshot / disk_rate,
    )


def plan_memory(
    model: int,
    slaves: Sequence[PlannedSlave],
    cluster: PlannedCluster,
    cost: PlannedRound,
    rounds: int,
    exports: int = 0,
) -> MemoryPlan:
    """Return the plan of a run; the master holds no parameters, but a copy of the first model is in its directory, and
    `exports` more at a time (`on_version`). Its ledger is there twice while it is copied for the mirror.
    """
    disk = BYTES_PER_PARAMETER * model * (1 + exports) + 2 * LEDGER_BYTES_ROUND * rounds + MASTER_LOG_BYTES
    return MemoryPlan(model, tuple(slaves), cluster, cost, MASTER_BYTES, disk)


def kubernetes_resources(plan: MemoryPlan, cpus: int) -> dict[str, Any]:
    """Return `resources` of each container, and the claims' sizes.

    The memory limit equals the request, so that a pod is not evicted first. There is no CPU limit: throttling would
    delay heartbeats, too.
    """

    def resources(nbytes: int, cpu: int) -> dict[str, Any]:
        memory = f"{ceil(nbytes * HEADROOM / MIB)}Mi"
        return {"requests": {"cpu": str(cpu), "memory": memory}, "limits": {"memory": memory}}

    def claim(nbytes: int) -> str:
        return f"{max(LEAST_CLAIM_MIB, ceil(nbytes * HEADROOM / MIB))}Mi"

    return {
        "master": {"resources": resources(plan.master_memory_bytes, 1), "storage": claim(plan.master_disk_bytes)},
        **{
            slave.name: {"resources": resources(slave.memory_bytes, cpus), "storage": claim(slave.disk_bytes)}
            for slave in plan.slaves
        },
    }
