"""The scenario of a simulation: clusters and slaves, their speed, and the options of the run."""

from __future__ import annotations

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.protocol.options import Options
from dips.sim.feed import DataShape

NAMES = "abcdefghijklmnop"  # of clusters


@dataclass(frozen=True)
class ClusterShape:
    """One cluster: its ranks, their speed, and its pace."""

    ranks: int
    step_s: float  # of an inner step
    slowness: float = 1.0  # factor of all delays on its link
    aligned_steps: int = 0  # pace.aligned of its cluster file; 0: it pushes after the scenario's inner steps
    overlap: bool = False  # it trains during push, window and pull
    fragments: int = 1  # number of fragments of an overlapping transfer, one or more inner steps apart
    jitter: float = 0.6  # of step_s, between the shortest and the longest inner step
    straggles: float = 0.0  # share of its inner steps that take ten times as long
    late: bool = False  # it is not started at the beginning, but by the plan
    restarts: int = 0  # torchrun --max-restarts: restarts of its ranks before its agent learns of a crash


@dataclass(frozen=True)
class Scenario:
    """The description of a run before it begins; the seed draws only what is left open."""

    clusters: tuple[ClusterShape, ...]
    slaves: int
    layers: int
    slots: int  # pushes that a slave receives at once
    pinned: int  # versions that a slave keeps for slow readers
    inner_steps: int  # between two pushes of a cluster
    options: Options
    lasts_s: float
    parameters: tuple[int, ...] = (2, 1)  # of each layer, by their elements; each rank's piece of one is a chunk
    ranges_at_once: int = 2  # data ranges that an agent leases together
    quiet_at: float = 0.0  # after this time plans of failures must let nothing fail
    seeded: bool = True  # v0@r0 is where every slave finds it; else an operator sends it to empty disks
    mirrors: bool = False  # every slave's directory has a mirror
    steady: bool = True  # messages are lost, late or doubled only by planned failures
    work_s: float = 0.0  # least time of a slave's work that grows with the model, and of loads
    stall_s: float | None = None  # a transfer that owes a byte for this long is over; None: suitable for short ones
    chunk_s: float | None = None  # time of a chunk, one after the other on a stream; None: requested chunks in parallel
    chunk_bytes: int = 12  # a rank's piece of a parameter is one chunk, so a layer of two parameters may arrive in part
    pull_codec: Codec = Codec.FP32
    samples: DataShape | None = None  # of ranges and inner steps; None: each range is one inner step
    run: str = "simulated"
    config_digest: str = "config"

    @property
    def slowness(self) -> dict[str, float]:
        return {name: cluster.slowness for name, cluster in zip(NAMES, self.clusters, strict=False)}
