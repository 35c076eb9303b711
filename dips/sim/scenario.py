"""The scenario of a simulation: clusters, their machines and data, slaves, and the options of the run."""

from __future__ import annotations

from functools import cached_property
from random import Random

from dips.client.agent.account import Pace
from dips.client.ipc.messages import RangeGiven
from dips.codecs import Codec
from dips.data.steps import Part, StepCutter
from dips.dataclass import dataclass
from dips.master.core import PollOptions
from dips.protocol.data import BegunRange
from dips.protocol.options import Options
from dips.sim.sizes import Sizes
from dips.slave.ports import SlaveTiming

LETTERS = "abcdefghijklmnop"


def name_clusters(count: int) -> tuple[str, ...]:
    """Return the names of a scenario's clusters: letters, then numbers."""
    return tuple(LETTERS[i] if i < len(LETTERS) else f"c{i}" for i in range(count))


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
class CallTimes:
    """How long the callers of a run wait, in seconds."""

    polls: PollOptions  # of the master
    slave: SlaveTiming
    rank_s: float  # after which rank 0 asks its agent again, and reports how far a transfer is
    resend_s: float  # after which an order without an answer is sent again, under its number
    look_s: float  # between two looks of the master at certificates
    question_s: float | None = None  # deadline of an agent's question; None: as shipped, by its kind


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
    sizes: Sizes | None = None  # what its bytes stand for, and rates; None: delays are drawn, whatever the bytes
    run: str = "simulated"
    config_digest: str = "config"

    @property
    def short(self) -> float:
        """The share of their usual time that short orders and transactions take."""
        return 1.0 if self.sizes is None else self.sizes.short

    def least_work_s(self, order: type) -> float:
        """Return the least time of a slave's order of this class, or of a load as of Persist."""
        return self.work_s if self.sizes is None else self.sizes.work_s.get(order, 0.0)

    @cached_property
    def calls(self) -> CallTimes:
        """The waits of its callers: in a run with sizes those that are shipped, else shorter ones, as rounds are."""
        heartbeat_s = self.options.timing.heartbeat_s
        if self.sizes is not None:
            return CallTimes(PollOptions(), SlaveTiming(heartbeat_s), heartbeat_s, heartbeat_s, heartbeat_s)
        polls = PollOptions(patience_s=1.4, pause_s=0.12, longest_pause_s=0.12)
        slave = SlaveTiming(heartbeat_s, call_s=2.0, backoff_s=(0.2, 1.6), busy_retry_s=0.3)
        return CallTimes(polls, slave, rank_s=1.0, resend_s=1.5, look_s=1.0, question_s=2.0)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return name_clusters(len(self.clusters))

    @property
    def slowness(self) -> dict[str, float]:
        return {name: cluster.slowness for name, cluster in zip(self.names, self.clusters, strict=True)}


# ---- feed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataShape:
    """The number of samples in ranges and inner steps."""

    range_samples: int
    step_samples: int


class SimFeed:
    """The remaining samples of the ranges given to one trainer."""

    def __init__(self, shape: DataShape) -> None:
        self._shape, self._cutter, self._recalls = shape, StepCutter(shape.step_samples), 0

    @property
    def left(self) -> tuple[int, ...]:
        """The ranges with samples to train."""
        return self._cutter.numbers_left

    @property
    def begun(self) -> BegunRange | None:
        """The first of them, if a part of it is trained, else None."""
        part = self._cutter.parts[0] if self._cutter.parts else None
        return BegunRange(part.number, part.begin, part.of) if part and part.begin else None

    def add_range(self, given: RangeGiven) -> None:
        """Append the samples of a given range."""
        self.note_recalls(given.recalls)
        self._cutter.add_range(given.range, self._shape.range_samples, given.begun.done if given.begun else 0)

    def note_recalls(self, recalls: int) -> None:
        """Drop the remaining samples if ranges were recalled since the last call."""
        if recalls != self._recalls:
            self._recalls = recalls
            self._cutter.parts.clear()

    def take_step(self, *, whole: bool) -> tuple[Part, ...]:
        """Return the samples of the next inner step; empty if none is left, or, with `whole`, too few."""
        return tuple(self._cutter.take_step(whole=whole))


# ---- site ------------------------------------------------------------------------------------------------------------

STRAGGLING = 10.0  # factor of a straggling step's time


@dataclass
class Site:
    """The machines of one cluster: their name, their ranks and their speed."""

    name: str
    ranks: int
    step_s: float
    rng: Random
    aligned_steps: int = 0  # pace.aligned of its cluster file; 0: it pushes after the scenario's inner steps
    overlap: bool = False  # it trains during push, window and pull
    restarts: int = 0  # torchrun --max-restarts
    fragments: int = 1  # number of fragments of an overlapping transfer
    jitter: float = 0.6  # of step_s, between the shortest and the longest inner step
    straggles: float = 0.0  # share of inner steps that take STRAGGLING times as long
    diverged: int = 0  # number of coming pushes with bad content

    def make_pace(self, inner_steps: int) -> Pace:
        """Return the pace of an agent started here; `inner_steps` is the scenario's."""
        return Pace(aligned=self.aligned_steps) if self.aligned_steps else Pace(steps=inner_steps)

    def draw_step_s(self) -> float:
        """Return the duration of the next inner step."""
        step_s = self.step_s * (1.0 - self.jitter / 2 + self.jitter * self.rng.random())
        return step_s * STRAGGLING if self.straggles and self.rng.random() < self.straggles else step_s
