"""A run with sizes and rates: its file, its play in virtual time, and what it shows of clusters and slaves.

The master's decisions, ledger, slaves and agents are those of a real run, in the simulation's time (dips/sim);
transfers take what the links and whoever shares them give (dips/sim/sizes.py). What is trained is noise, without gates.

Known limits: at most 16 clusters, one worker in each; equal layers, one a slave; links keep their rates; nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field, model_validator

from dips.codecs import ITEM_BYTES, Codec
from dips.config.reading import load_file
from dips.config.section import PullCodec, Section
from dips.errors import ConfigError
from dips.ids import PullId, PushId
from dips.protocol.clusters import MAX_RANGES_ASKED
from dips.protocol.effects import Apply, Note, Persist
from dips.protocol.options import DataOptions, Options, PenaltyOptions, TimingOptions
from dips.sim.agent import SimAgent
from dips.sim.observer import Observer
from dips.sim.scenario import NAMES, ClusterShape, Scenario
from dips.sim.sizes import SimLinkRate, Sizes, SlaveUse, share_fairly
from dips.sim.world import World

GBIT_BYTES = 1.25e8
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# ---- the file -------------------------------------------------------------------------------------------------------


class SimulatedClusters(Section):
    """One cluster, or several that are alike."""

    name: Annotated[str, Field(min_length=1)]
    number: Annotated[int, Field(gt=0)] = 1
    step_s: Positive  # of an inner step
    up_gbit: Positive | None = None  # of its link to the slaves; null: fitted to push_s
    down_gbit: Positive | None = None  # null: fitted to pull_s, or as up
    push_s: Positive | None = None  # of a push that was measured
    pull_s: Positive | None = None  # of a pull
    expected_pull_s: Positive | None = None  # of a pull that was measured, only to set the simulated one beside it

    @model_validator(mode="after")
    def _check(self) -> SimulatedClusters:
        if (self.up_gbit is None) == (self.push_s is None):
            raise ValueError(f"{self.name}: expected up_gbit, the rate of its link, or push_s, to which it is fitted")
        if self.down_gbit is not None and self.pull_s is not None:
            raise ValueError(f"{self.name}: expected down_gbit or pull_s, to which it would be fitted, got both")
        return self

    def rate(self, parameters: int) -> SimLinkRate:
        """Return the rates of its link in bytes per second; measured transfers were of fp32."""
        nbytes = ITEM_BYTES * parameters
        up = _rate(self.up_gbit, self.push_s, nbytes)
        assert up is not None
        return SimLinkRate(up, _rate(self.down_gbit, self.pull_s, nbytes) or up)


def _rate(gbit: float | None, seconds: float | None, nbytes: int) -> float | None:
    if gbit is not None:
        return gbit * GBIT_BYTES
    return None if seconds is None else nbytes / seconds


class SimulatedRun(Section):
    """A scenario of `dips simulate`."""

    parameters: Annotated[int, Field(gt=0)]
    hours: Positive
    clusters: Annotated[tuple[SimulatedClusters, ...], Field(min_length=1)]
    slaves: Annotated[int, Field(gt=0, le=1000)] = 2
    slave_gbit: Positive = 10.0  # of each slave's link, in each direction
    update_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of a slave's outer step on its shard
    persist_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of a snapshot on its disk
    inner_steps: Annotated[int, Field(gt=0)] = 64
    aligned: bool = True  # all push together, slow ones after fewer steps
    window_s: Positive | None = None
    heartbeat_s: Positive = 10.0
    codec: Codec = Codec.FP32
    pull_codec: PullCodec = Codec.FP32
    seed: int = 1

    @model_validator(mode="after")
    def _check(self) -> SimulatedRun:
        if self.total > len(NAMES):
            raise ValueError(f"clusters: expected at most {len(NAMES)}, got {self.total}")
        return self

    @property
    def total(self) -> int:
        return sum(cluster.number for cluster in self.clusters)

    @property
    def members(self) -> dict[str, SimulatedClusters]:
        """Each cluster by its name in the simulation."""
        kinds = [cluster for cluster in self.clusters for _ in range(cluster.number)]
        return dict(zip(NAMES, kinds, strict=False))


def read_scenario(path: Path) -> SimulatedRun:
    """Return a checked scenario. Raises ConfigError naming file and key."""
    return load_file(path, SimulatedRun)


# ---- the world ------------------------------------------------------------------------------------------------------

LAYER_ELEMENTS, CHUNK_BYTES = 1024, 1024  # of each slave's one layer: four chunks of fp32, each of whole blocks
JITTER = 0.02  # of an inner step
LONG_S = 1e6  # deadlines that no transfer or work of a scenario with sizes reaches
STEPS_MARGIN = 2.0  # data ranges over those that the clusters can take: they do not run out


def make_scenario(run: SimulatedRun) -> Scenario:
    """Return the scenario of the simulated world."""
    members, lasts_s = run.members, 3600.0 * run.hours
    elements = run.slaves * LAYER_ELEMENTS
    sizes = Sizes(
        run.parameters / elements, {name: kind.rate(run.parameters) for name, kind in members.items()},
        run.slave_gbit * GBIT_BYTES, {Apply: run.update_s, Persist: run.persist_s},
    )  # fmt: skip
    aligned = run.inner_steps if run.aligned else 0
    timing = TimingOptions(
        window_s=run.window_s, heartbeat_s=run.heartbeat_s, hang_s=LONG_S, compute_s=LONG_S, transfer_s=LONG_S,
        least_transfer_s=LONG_S, order_s=max(10.0, run.heartbeat_s),
    )  # fmt: skip
    ranges = int(STEPS_MARGIN * sum(lasts_s / kind.step_s + run.inner_steps for kind in members.values()))
    options = Options(
        penalty=PenaltyOptions(gates=()), timing=timing, data=DataOptions(ranges=ranges), codec=run.codec,
        ranges_held=ranges,
    )  # fmt: skip
    return Scenario(
        tuple(ClusterShape(1, kind.step_s, aligned_steps=aligned, jitter=JITTER)
              for kind in members.values()),
        slaves=run.slaves, layers=run.slaves, slots=len(members) + 1, pinned=2, inner_steps=run.inner_steps,
        options=options, lasts_s=lasts_s, parameters=(LAYER_ELEMENTS,),
        ranges_at_once=min(run.inner_steps, MAX_RANGES_ASKED), stall_s=LONG_S,
        chunk_bytes=CHUNK_BYTES, pull_codec=run.pull_codec, sizes=sizes, run="simulated",
    )  # fmt: skip


@dataclass
class PhaseSeconds:
    """The seconds of one cluster's pushes, of its waits for the window and the outer step, and of its pulls."""

    push_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    pull_s: list[float] = field(default_factory=list)  # after a push: not the one with which it joins
    steps: int = 0


class PhaseClock(Observer):
    """Takes the times of every cluster's phases, and counts versions."""

    def __init__(self, world: World, names: Iterable[str]) -> None:
        self._world = world
        self.phases = {name: PhaseSeconds() for name in names}
        self._began: dict[tuple[str, str], float] = {}  # (cluster, phase) → when it began
        self.versions = 0

    def note_logged(self, note: Note) -> None:
        self.versions += note.kind == "version_committed"

    def push_begun(self, agent: SimAgent, push: PushId) -> None:
        self._begin(agent, "push")

    def push_moved(self, agent: SimAgent, push: PushId, moved: bool) -> None:
        push_s = self._end(agent, "push")
        if moved and push_s is not None:
            self.phases[agent.name].push_s.append(push_s)
            self._begin(agent, "wait")

    def pull_begun(self, agent: SimAgent, pull: PullId) -> None:
        wait_s = self._end(agent, "wait")
        if wait_s is not None:
            self.phases[agent.name].wait_s.append(wait_s)
            self._begin(agent, "pull")

    def pull_installed(self, agent: SimAgent) -> None:
        pull_s = self._end(agent, "pull")
        if pull_s is not None:
            self.phases[agent.name].pull_s.append(pull_s)

    def trainer_stepped(self, agent: SimAgent) -> None:
        self.phases[agent.name].steps += 1

    def _begin(self, agent: SimAgent, phase: str) -> None:
        self._began[agent.name, phase] = self._world.heap.now

    def _end(self, agent: SimAgent, phase: str) -> float | None:
        began = self._began.pop((agent.name, phase), None)
        return None if began is None else self._world.heap.now - began


# ---- the report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Medians of one cluster's rounds, in seconds."""

    cluster: str
    pushes: int
    push_s: float
    wait_s: float  # for the window and the outer step
    pull_s: float
    expected_pull_s: float | None
    standstill: float  # share of the time without inner steps
    two_rates: bool  # one for pushes, another for pulls

    @property
    def pull_off(self) -> float | None:
        """How far the expected pull is from the simulated one, as a share of the latter."""
        return None if self.expected_pull_s is None else self.expected_pull_s / self.pull_s - 1.0


@dataclass(frozen=True, slots=True)
class SlaveReport:
    """Shares of the time in which one slave did each thing; peaks in Gbit/s, means over 10 s."""

    slave: str
    worked: float  # its orders
    received: float  # its bytes at the rate of its link
    sent: float
    busy: float  # time with work or a transfer, however slow, under way
    peak_received_gbit: float
    peak_sent_gbit: float

    @property
    def idle(self) -> float:
        """The share left of work and of transfers at the link's rate: what more clusters could use."""
        return 1.0 - self.worked - self.received - self.sent


@dataclass(frozen=True, slots=True)
class SizedReport:
    """The results of a scenario; `at_once`: Gbit/s at a slave while all clusters pull, by rates and as expected."""

    hours: float
    versions: int
    clusters: tuple[ClusterReport, ...]
    slaves: tuple[SlaveReport, ...]
    at_once_gbit: float
    expected_at_once_gbit: float | None


def simulate_sizes(run: SimulatedRun) -> SizedReport:
    """Play a scenario. Raises ConfigError if it is too short for a round of each cluster."""
    world = World(run.seed, make_scenario(run))
    watch = PhaseClock(world, run.members)
    world.run([watch])
    short = next((run.members[name].name for name, phases in watch.phases.items() if not phases.pull_s), None)
    if short is not None:
        raise ConfigError(f"hours: {run.hours:g} are too short: {short} has not pulled what it pushed")
    shared, lasted_s, rate = world.data.shared, 3600.0 * run.hours, run.slave_gbit * GBIT_BYTES
    assert shared is not None
    slaves = tuple(_report_slave(name, use, rate, lasted_s) for name, use in shared.use.items())
    clusters = tuple(_report_cluster(run.members[name], phases, lasted_s) for name, phases in watch.phases.items())
    return SizedReport(run.hours, watch.versions, clusters, slaves, *pull_at_once(run))


def _report_cluster(kind: SimulatedClusters, phases: PhaseSeconds, lasted_s: float) -> ClusterReport:
    seconds = (median(phases.push_s), median(phases.wait_s), median(phases.pull_s))
    standstill = max(0.0, 1.0 - phases.steps * kind.step_s / lasted_s)
    two = kind.pull_s is not None or kind.down_gbit is not None
    return ClusterReport(kind.name, len(phases.push_s), *seconds, kind.expected_pull_s or kind.pull_s, standstill, two)


def _report_slave(name: str, use: SlaveUse, rate: float, lasted_s: float) -> SlaveReport:
    received, sent = use.links[True], use.links[False]
    return SlaveReport(
        name, sum(use.work_s.values()) / lasted_s, received.nbytes / rate / lasted_s, sent.nbytes / rate / lasted_s,
        use.busy_s(lasted_s) / lasted_s, received.peak / GBIT_BYTES, sent.peak / GBIT_BYTES,
    )  # fmt: skip


def pull_at_once(run: SimulatedRun) -> tuple[float, float | None]:
    """Return Gbit/s at each slave while all clusters pull, by their rates, and by pulls that were measured."""
    members, slaves = run.members, [f"slave-{i}" for i in range(run.slaves)]
    rates = {(slave, False): run.slave_gbit * GBIT_BYTES for slave in slaves}
    rates |= {(name, False): kind.rate(run.parameters).down for name, kind in members.items()}
    shares = share_fairly([(name, slave, False) for name in members for slave in slaves], rates)
    ours = sum(share for (_, slave, _), share in shares.items() if slave == slaves[0]) / GBIT_BYTES
    measured = [kind.expected_pull_s or kind.pull_s for kind in members.values()]
    if None in measured:
        return ours, None
    nbytes = ITEM_BYTES * run.parameters / run.slaves
    return ours, sum(nbytes / seconds for seconds in measured if seconds) / GBIT_BYTES
