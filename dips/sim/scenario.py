"""What is simulated: clusters and slaves, how fast they are, and the options of the run."""

from __future__ import annotations

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.protocol.options import Options
from dips.sim.feed import DataShape

NAMES = "abcdefghijklmnop"  # of clusters


@dataclass(frozen=True)
class ClusterShape:
    """One cluster: its ranks and their speed, and when it pushes."""

    ranks: int
    step_s: float  # of an inner step
    slowness: float = 1.0  # times that everything takes longer on its link
    aligned_steps: int = 0  # pace.aligned of its cluster file; 0: it pushes after the scenario's inner steps
    overlap: bool = False  # it trains on while its push, window and pull go on
    fragments: int = 1  # in which it moves what overlaps, an inner step or more apart
    jitter: float = 0.6  # of step_s, between the shortest and the longest inner step
    straggles: float = 0.0  # share of its inner steps that take ten times as long
    late: bool = False  # it is not there at the start: whoever plans starts it
    restarts: int = 0  # torchrun --max-restarts: so often are its ranks started again before its agent learns of it


@dataclass(frozen=True)
class Scenario:
    """A run before it begins; the seed draws only what is left to chance."""

    clusters: tuple[ClusterShape, ...]
    slaves: int
    layers: int
    slots: int  # pushes that a slave takes in at once
    pinned: int  # versions that a slave keeps for slow readers
    inner_steps: int  # between two pushes of a cluster
    options: Options
    lasts_s: float
    parameters: tuple[int, ...] = (2, 1)  # of each layer, by their elements; each rank's piece of one is a chunk
    ranges_at_once: int = 2  # data ranges that an agent leases together
    quiet_at: float = 0.0  # from then on nothing fails; who plans failures keeps to it
    seeded: bool = True  # v0@r0 lies where every slave finds it; else an operator brings it to empty disks
    mirrors: bool = False  # every slave's directory has one
    steady: bool = True  # no message is lost, late or doubled but by a planned failure
    work_s: float = 0.0  # at least, of each piece of a slave's work that grows with the model, and of each load
    stall_s: float | None = None  # a transfer that owes a byte for so long is over; None: what suits short ones
    chunk_s: float | None = None  # on a stream, one chunk behind the other; None: all that were asked at once travel so
    chunk_bytes: int = 12  # a rank's piece of a parameter is one chunk: with two parameters a layer may be here half
    pull_codec: Codec = Codec.FP32
    samples: DataShape | None = None  # of ranges and inner steps; None: each range is one inner step
    run: str = "simulated"
    config_digest: str = "config"

    @property
    def slowness(self) -> dict[str, float]:
        return {name: cluster.slowness for name, cluster in zip(NAMES, self.clusters, strict=False)}
