"""A run with sizes and rates: its file, its play in virtual time, and what it shows of clusters and slaves.

The master's decisions, ledger, slaves and agents are those of a real run, in the simulation's time (dips/sim);
transfers take what the links and whoever shares them give (dips/sim/sizes.py). What is trained is noise, without gates.

Known limits: one worker in each cluster; equal layers, one a slave; links keep their rates; what a slave that fails was
working on counts as worked to its end.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from dips.codecs import ITEM_BYTES, Codec
from dips.config.reading import load_file
from dips.config.section import PullCodec, Section
from dips.errors import ConfigError
from dips.ids import PullId, PushId
from dips.protocol.clusters import MAX_RANGES_ASKED
from dips.protocol.effects import Apply, Note, Outcome, Persist
from dips.protocol.options import DataOptions, Options, PenaltyOptions, TimingOptions
from dips.sim.agent import SimAgent
from dips.sim.master import MasterProcess
from dips.sim.network import CLEAR
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, Scenario, name_clusters
from dips.sim.sizes import SAMPLE_S, LinkUse, SimLinkRate, Sizes, SlaveUse, share_fairly
from dips.sim.streams import STEADY
from dips.sim.work import Frozen
from dips.sim.world import World

GBIT_BYTES = 1.25e8
HOUR_S = 3600.0
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]

# ---- the file -------------------------------------------------------------------------------------------------------


class SimulatedClusters(Section):
    """One cluster, or several that are alike."""

    name: Annotated[str, Field(min_length=1)]
    number: Annotated[int, Field(gt=0, le=10_000)] = 1
    devices: Annotated[int, Field(gt=0)] = 1  # of each: a cluster's hours count by its devices
    step_s: Positive  # of an inner step
    joins: Share = 0.0  # share of the run at which they join
    leaves: Share = 1.0
    failures: Count = 0  # of all of them together, while they take part
    repair_h: Positive = 1.0  # mean hours until a cluster that failed as a whole is started again
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
        if self.joins >= self.leaves:
            raise ValueError(f"{self.name}: expected joins before leaves, got {self.joins:g} and {self.leaves:g}")
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
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.02  # of a message; short work scales with it
    slave_failures: Count = 0
    master_failures: Count = 0
    restart_s: Positive = 120.0  # mean time until a slave or master that failed is started again
    codec: Codec = Codec.FP32
    pull_codec: PullCodec = Codec.FP32
    seed: Count = 1

    @model_validator(mode="after")
    def _check(self) -> SimulatedRun:
        for name, times in Counter(cluster.name for cluster in self.clusters).items():
            if times > 1:  # tables and figures have one row of each name
                raise ValueError(f"clusters: {times} are called {name}: rename one, or give `number` of those alike")
        return self

    @property
    def members(self) -> dict[str, SimulatedClusters]:
        """Each cluster by its name in the simulation."""
        kinds = [cluster for cluster in self.clusters for _ in range(cluster.number)]
        return dict(zip(name_clusters(len(kinds)), kinds, strict=True))


def read_scenario(path: Path) -> SimulatedRun:
    """Return a checked scenario. Raises ConfigError naming file and key."""
    return load_file(path, SimulatedRun)


# ---- the world ------------------------------------------------------------------------------------------------------

USUAL_LATENCY_S = CLEAR.delay_s + CLEAR.spread_s / 2
LAYER_ELEMENTS, CHUNK_BYTES = 512, 1024  # of each slave's one layer: four chunks of fp32, each of whole blocks
JITTER = 0.02  # of an inner step
SETTLES = 1e-3  # of the fastest transfer: until links are shared anew
LONG_S = 1e6  # deadlines that no transfer or work of a scenario with sizes reaches
LEAST_STALL_S = 30.0
STEPS_MARGIN = 2.0  # data ranges over those that the clusters can take: they do not run out


def make_scenario(run: SimulatedRun) -> Scenario:
    """Return the scenario of the simulated world."""
    members, lasts_s = run.members, 3600.0 * run.hours
    elements = run.slaves * LAYER_ELEMENTS
    rates = {name: kind.rate(run.parameters) for name, kind in members.items()}
    fastest_s = ITEM_BYTES * run.parameters / max(max(rate.up, rate.down) for rate in rates.values())
    sizes = Sizes(
        run.parameters / elements, rates, run.slave_gbit * GBIT_BYTES, {Apply: run.update_s, Persist: run.persist_s},
        settles_s=SETTLES * fastest_s, short=run.latency_s / USUAL_LATENCY_S,
    )  # fmt: skip
    aligned, stall_s = run.inner_steps if run.aligned else 0, _stall_s(run)
    timing = TimingOptions(
        window_s=run.window_s, heartbeat_s=run.heartbeat_s, hang_s=max(120.0, stall_s), compute_s=LONG_S,
        transfer_s=LONG_S, least_transfer_s=stall_s, order_s=max(10.0, 2.0 * run.heartbeat_s),
    )  # fmt: skip
    ranges = int(STEPS_MARGIN * sum(lasts_s / kind.step_s + run.inner_steps for kind in members.values()))
    options = Options(
        penalty=PenaltyOptions(gates=()), timing=timing, data=DataOptions(ranges=ranges), codec=run.codec,
        ranges_held=ranges,
    )  # fmt: skip
    return Scenario(
        tuple(ClusterShape(1, kind.step_s, aligned_steps=aligned, jitter=JITTER, late=kind.joins > 0)
              for kind in members.values()),
        slaves=run.slaves, layers=run.slaves, slots=len(members) + 1, pinned=2, inner_steps=run.inner_steps,
        options=options, lasts_s=lasts_s, parameters=(LAYER_ELEMENTS,),
        ranges_at_once=min(run.inner_steps, MAX_RANGES_ASKED), stall_s=stall_s,
        chunk_bytes=CHUNK_BYTES, pull_codec=run.pull_codec, sizes=sizes, run="simulated",
    )  # fmt: skip


def _stall_s(run: SimulatedRun) -> float:
    """Return the silence after which a stream has stalled: beyond that of a chunk at the least share of the links, and
    of a slave in its outer step.
    """
    rates = [kind.rate(run.parameters) for kind in run.clusters]
    slowest = min(min(rate.up, rate.down) for rate in rates) / run.slaves
    share = min(slowest, run.slave_gbit * GBIT_BYTES / len(run.members))
    chunk_bytes = ITEM_BYTES * run.parameters / run.slaves * CHUNK_BYTES / (ITEM_BYTES * LAYER_ELEMENTS)
    return min(LONG_S, max(LEAST_STALL_S, 2.0 * chunk_bytes / share + run.update_s + run.persist_s))


@dataclass
class PhaseSeconds:
    """The seconds of one cluster's pushes, of its waits for the window and the outer step, and of its pulls."""

    push_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    pull_s: list[float] = field(default_factory=list)  # after a push: not the one with which it joins
    steps: int = 0
    down_s: float = 0.0  # from a failure to the first inner step after it


class ClusterPhase(StrEnum):
    """Phases of a cluster besides inner steps."""

    PUSH = "push"
    WAIT = "wait"  # for the window and the outer step
    PULL = "pull"
    DOWN = "down"  # from a failure to the first inner step after it
    RETURN = "return"  # the pull in that time with which it goes on


@dataclass(frozen=True, slots=True)
class ClusterSpan:
    """A phase of a cluster on the timeline, in seconds since the run's begin."""

    cluster: str
    phase: ClusterPhase
    begin_s: float
    end_s: float


class PhaseClock(Observer):
    """Takes the times of every cluster's phases, and counts versions."""

    def __init__(self, world: World, names: Iterable[str]) -> None:
        self._world = world
        self.phases = {name: PhaseSeconds() for name in names}
        self.steps = {name: Counter[int]() for name in self.phases}  # by the hour in which they ended
        self._began: dict[tuple[str, ClusterPhase], float] = {}  # when it began
        self.spans: list[ClusterSpan] = []  # in the order of their ends
        self.versions: list[float] = []  # when each was made
        self.master_s = 0.0  # real time in which the masters ran

    def note_logged(self, note: Note) -> None:
        if note.kind == "version_committed":
            self.versions.append(self._world.heap.now)

    def outcome_received(self, agent: SimAgent, frozen: Frozen, outcome: Outcome) -> None:
        frozen.content.clear()  # what a push contained is compared by nobody here, and a month has thousands

    def master_died(self, process: MasterProcess, rows: bool, written: bool) -> None:
        self.master_s += process.loop.ran_s

    def at_rest(self) -> None:
        if self._world.master.process is not None:
            self.master_s += self._world.master.process.loop.ran_s

    def on_failure(self, cluster: str) -> None:
        """Begin the time in which a cluster is down; what it was doing has no end."""
        for phase in (phase for phase in ClusterPhase if phase is not ClusterPhase.DOWN):
            self._began.pop((cluster, phase), None)
        self._began.setdefault((cluster, ClusterPhase.DOWN), self._world.heap.now)

    def end_downtime(self, cluster: str, at: float) -> None:
        """End the time in which a cluster is down, if it is."""
        began = self._began.pop((cluster, ClusterPhase.DOWN), None)
        if began is not None:
            self.phases[cluster].down_s += max(0.0, at - began)
            self.spans.append(ClusterSpan(cluster, ClusterPhase.DOWN, began, at))

    def push_begun(self, agent: SimAgent, push: PushId) -> None:
        self._begin(agent, ClusterPhase.PUSH)

    def push_moved(self, agent: SimAgent, push: PushId, moved: bool) -> None:
        push_s = self._end(agent, ClusterPhase.PUSH)
        if moved and push_s is not None:
            self.phases[agent.name].push_s.append(push_s)
            self._begin(agent, ClusterPhase.WAIT)

    def pull_begun(self, agent: SimAgent, pull: PullId) -> None:
        wait_s = self._end(agent, ClusterPhase.WAIT)
        if wait_s is not None:
            self.phases[agent.name].wait_s.append(wait_s)
            self._begin(agent, ClusterPhase.PULL)
        elif (agent.name, ClusterPhase.DOWN) in self._began:
            self._begin(agent, ClusterPhase.RETURN)

    def pull_installed(self, agent: SimAgent) -> None:
        pull_s = self._end(agent, ClusterPhase.PULL)
        if pull_s is not None:
            self.phases[agent.name].pull_s.append(pull_s)
        self._end(agent, ClusterPhase.RETURN)

    def trainer_stepped(self, agent: SimAgent) -> None:
        self.phases[agent.name].steps += 1
        self.steps[agent.name][int(self._world.heap.now // HOUR_S)] += 1
        if (agent.name, ClusterPhase.DOWN) in self._began:
            self.end_downtime(agent.name, self._world.heap.now - agent.site.step_s)

    def _begin(self, agent: SimAgent, phase: ClusterPhase) -> None:
        self._began[agent.name, phase] = self._world.heap.now

    def _end(self, agent: SimAgent, phase: ClusterPhase) -> float | None:
        began, now = self._began.pop((agent.name, phase), None), self._world.heap.now
        if began is None:
            return None
        self.spans.append(ClusterSpan(agent.name, phase, began, now))
        return now - began


# ---- failures -------------------------------------------------------------------------------------------------------

TRAINER_SHARE = 0.4  # share of a cluster's failures that its agent survives: an assumption, as the paper does not say


class Failures(Observer):
    """Plans who joins, leaves and fails when, at times drawn uniformly: Poisson processes, given their counts."""

    def __init__(self, world: World, run: SimulatedRun, clock: PhaseClock) -> None:
        self._world, self._run, self._clock = world, run, clock
        self._rng, self._lasts_s = world.chance.generator_for("failures"), 3600.0 * run.hours
        self.kinds: Counter[str] = Counter()
        self._ends_s = {name: kind.leaves * self._lasts_s for name, kind in run.members.items()}
        self.unserved_s = 0.0  # in which a slave or the master was missing
        self._unserved_since: float | None = None

    def plan(self, world: World) -> None:
        """Plan everything with `call_later`."""
        lasts_s, draw = self._lasts_s, self._rng.random
        for kind in self._run.clusters:
            names = [name for name, each in self._run.members.items() if each is kind]
            for name in names:
                cluster = world.clusters[name]
                if kind.joins > 0:
                    world.call_later(kind.joins * lasts_s, f"{name} joins the run", cluster.start)
                if kind.leaves < 1:
                    world.call_later(kind.leaves * lasts_s, f"{name} leaves the run", cluster.leave_run)
            for _ in range(kind.failures):
                name, share = self._rng.choice(names), kind.joins + (kind.leaves - kind.joins) * draw()
                world.call_later(share * lasts_s, f"{name} fails", partial(self._fail_cluster, name, kind))
        servers = [self._fail_slave] * self._run.slave_failures + [self._fail_master] * self._run.master_failures
        for fail in servers:
            world.call_later(lasts_s * draw(), "a server fails", fail)

    def after_event(self) -> None:
        if self._unserved_since is not None and self._all_serve():
            self.unserved_s += self._world.heap.now - self._unserved_since
            self._unserved_since = None

    def at_rest(self) -> None:
        now = min(self._world.heap.now, self._lasts_s)  # the clock stands at the first event after the end
        if self._unserved_since is not None:
            self.unserved_s += now - self._unserved_since
        for name, ends_s in self._ends_s.items():
            self._clock.end_downtime(name, min(now, ends_s))

    def _all_serve(self) -> bool:
        machines = self._world.machines.values()
        return self._world.master.process is not None and all(m.process and m.process.holds for m in machines)

    def _fail_cluster(self, name: str, kind: SimulatedClusters) -> None:
        cluster, now = self._world.clusters[name], self._world.heap.now
        if cluster.agent is None:
            self.kinds["a cluster that was down already"] += 1
            return
        self._clock.on_failure(name)
        if self._rng.random() < TRAINER_SHARE:
            self.kinds["a rank of a cluster"] += 1
            cluster.crash_rank(0, 1.0)
            return
        self.kinds["a whole cluster"] += 1
        cluster.crash()
        repair_s = 3600.0 * kind.repair_h * self._rng.expovariate(1.0)
        if now + repair_s < self._ends_s[name]:
            self._world.call_later(repair_s, f"{name} is repaired", cluster.start)

    def _fail_slave(self) -> None:
        self.kinds["a slave"] += 1
        machine = self._rng.choice(list(self._world.machines.values()))
        machine.crash()
        self._begin_restart(f"{machine.name} starts again", machine.start)

    def _fail_master(self) -> None:
        self.kinds["the master"] += 1
        self._world.crash_master()
        self._begin_restart("the master starts again", self._world.start_master)

    def _begin_restart(self, what: str, start: Callable[[], None]) -> None:
        if self._unserved_since is None:
            self._unserved_since = self._world.heap.now
        self._world.call_later(self._run.restart_s * self._rng.expovariate(1.0), what, start)


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
    standstill: float  # share of the time without inner steps, of that in which it takes part and is not down
    down: float  # share of the time in which it takes part
    lost: float  # share of its inner steps that are in no version
    two_rates: bool  # one for pushes, another for pulls

    @property
    def pull_off(self) -> float | None:
        """How far the expected pull is from the simulated one, as a share of the latter."""
        return None if self.expected_pull_s is None else self.expected_pull_s / self.pull_s - 1.0


@dataclass(frozen=True, slots=True)
class SlaveReport:
    """Shares of the time in which one slave did each thing; peaks in Gbit/s, means over 10 s."""

    slave: str
    orders: dict[str, float]  # its work, by the order's class
    received: float  # its bytes at the rate of its link
    sent: float
    busy: float  # time with work or a transfer, however slow, under way
    peak_received_gbit: float
    peak_sent_gbit: float

    @property
    def worked(self) -> float:
        """The share of all orders."""
        return sum(self.orders.values())

    @property
    def idle(self) -> float:
        """The share left of work and of transfers at the link's rate: what more clusters could use."""
        return 1.0 - self.worked - self.received - self.sent


@dataclass(frozen=True, slots=True)
class ClusterTimeline:
    """When a cluster took part, and its inner steps in each hour of the run that has some."""

    cluster: str
    kind: str  # its name in the file, which others may share
    devices: int
    step_s: float
    begin_s: float
    end_s: float
    steps: dict[int, int]


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """When each cluster pushed, waited for the round, pulled and was down, and when each version was made.

    received_gbit, sent_gbit   of the first slave: seconds since the run's begin, and the mean over the `sample_s` that
                               begin there, where something moved
    """

    hours: int  # begun ones
    clusters: tuple[ClusterTimeline, ...]
    spans: tuple[ClusterSpan, ...]
    versions_s: tuple[float, ...]
    sample_s: float
    received_gbit: tuple[tuple[float, float], ...]
    sent_gbit: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class SizedReport:
    """The results of a scenario; `at_once`: Gbit/s at a slave while all clusters pull, by rates and as expected."""

    hours: float
    versions: int
    clusters: tuple[ClusterReport, ...]
    slaves: tuple[SlaveReport, ...]
    at_once_gbit: float
    expected_at_once_gbit: float | None
    failures: dict[str, int]  # by what failed
    devices_up: float  # share of the devices' time with their clusters' that was not down
    servers_up: float  # share of the time in which the master and all slaves served
    master_s: float  # seconds of a core here that the master took for the whole run
    timeline: RunTimeline = field(repr=False)


def make_world(run: SimulatedRun) -> tuple[World, PhaseClock, Failures]:
    """Return a scenario's world with what plans its failures and what watches it, to be run by `World.run`."""
    world = World(run.seed, make_scenario(run))
    world.network.weather = replace(CLEAR, delay_s=run.latency_s / 2, spread_s=run.latency_s)
    world.data.links = replace(STEADY, chunk_s=run.latency_s / 2, spread_s=run.latency_s)
    watch = PhaseClock(world, run.members)
    return world, watch, Failures(world, run, watch)


def simulate_sizes(run: SimulatedRun) -> SizedReport:
    """Play a scenario. Raises ConfigError if it is too short for a round of each cluster."""
    world, watch, failures = make_world(run)
    with _rare_collections():
        world.run([watch, failures], failures.plan)
    for name, phases in watch.phases.items():
        if not phases.pull_s:
            said = f", and was down for {phases.down_s / HOUR_S:.2g} of them" if phases.down_s else ""
            short = f"{run.members[name].name} has not pulled what it pushed{said}"
            raise ConfigError(f"hours: {run.hours:g} are too short: {short}")
    shared, lasted_s, rate = world.data.shared, 3600.0 * run.hours, run.slave_gbit * GBIT_BYTES
    assert shared is not None
    shared.end_run()
    slaves = tuple(_report_slave(name, use, rate, lasted_s) for name, use in shared.use.items())
    lost, members = count_lost(world), run.members
    clusters = tuple(
        _report_cluster(members[name], phases, lost[name], lasted_s) for name, phases in watch.phases.items()
    )
    active = sum(kind.devices * (kind.leaves - kind.joins) * lasted_s for kind in members.values())
    down = sum(members[name].devices * phases.down_s for name, phases in watch.phases.items())
    return SizedReport(
        run.hours, len(watch.versions), clusters, slaves, *pull_at_once(run), dict(failures.kinds), 1.0 - down / active,
        1.0 - failures.unserved_s / lasted_s, watch.master_s, _make_timeline(run, watch, shared.use),
    )  # fmt: skip


def _make_timeline(run: SimulatedRun, watch: PhaseClock, use: Mapping[str, SlaveUse]) -> RunTimeline:
    lasted_s, first = HOUR_S * run.hours, next(iter(use.values()))
    clusters = tuple(
        ClusterTimeline(
            name, kind.name, kind.devices, kind.step_s, kind.joins * lasted_s, kind.leaves * lasted_s,
            dict(watch.steps[name]),
        )
        for name, kind in run.members.items()
    )  # fmt: skip
    received, sent = (_list_rates(first.links[up]) for up in (True, False))
    return RunTimeline(
        ceil(run.hours), clusters, tuple(watch.spans), tuple(watch.versions), SAMPLE_S, received, sent
    )  # fmt: skip


def _list_rates(link: LinkUse) -> tuple[tuple[float, float], ...]:
    assert link.samples is not None
    return tuple((n * SAMPLE_S, nbytes / SAMPLE_S / GBIT_BYTES) for n, nbytes in sorted(link.samples.items()))


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage rarely meanwhile: a world has little of it, and looking takes a fifth of the time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def count_lost(world: World) -> Counter[str]:
    """Return how many inner steps of each cluster will never be in a version."""
    books = world.books
    return Counter(work.cluster for work in books.work if work.lost and id(work) not in books.settled)


def _report_cluster(kind: SimulatedClusters, phases: PhaseSeconds, lost: int, lasted_s: float) -> ClusterReport:
    seconds = (median(phases.push_s), median(phases.wait_s), median(phases.pull_s))
    active_s = lasted_s * (kind.leaves - kind.joins)
    standstill = max(0.0, 1.0 - phases.steps * kind.step_s / (active_s - phases.down_s))
    two = kind.pull_s is not None or kind.down_gbit is not None
    return ClusterReport(
        kind.name, len(phases.push_s), *seconds, kind.expected_pull_s or kind.pull_s, standstill,
        phases.down_s / active_s, lost / max(1, phases.steps), two,
    )  # fmt: skip


def _report_slave(name: str, use: SlaveUse, rate: float, lasted_s: float) -> SlaveReport:
    received, sent = use.links[True], use.links[False]
    orders = {order: seconds / lasted_s for order, seconds in use.work_s.items()}
    return SlaveReport(
        name, orders, received.nbytes / rate / lasted_s, sent.nbytes / rate / lasted_s, use.busy_s(lasted_s) / lasted_s,
        received.peak / GBIT_BYTES, sent.peak / GBIT_BYTES,
    )  # fmt: skip


def pull_at_once(run: SimulatedRun) -> tuple[float, float | None]:
    """Return Gbit/s at each slave while all clusters pull, by their rates, and by pulls that were measured."""
    members, slaves = run.members.values(), run.slaves
    rates = [run.slave_gbit * GBIT_BYTES] * slaves + [kind.rate(run.parameters).down for kind in members]
    ends = [(slaves + cluster, slave) for cluster in range(len(members)) for slave in range(slaves)]
    ours = share_fairly(np.array(ends), np.array(rates))[::slaves].sum() / GBIT_BYTES
    measured = [kind.expected_pull_s or kind.pull_s for kind in members]
    if None in measured:
        return ours, None
    nbytes = ITEM_BYTES * run.parameters / run.slaves
    return ours, sum(nbytes / seconds for seconds in measured if seconds) / GBIT_BYTES
