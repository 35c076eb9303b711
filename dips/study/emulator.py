"""One run of real models in virtual time, with the real Coordinator, ledger and agent cores, and its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean
from types import MappingProxyType

import numpy as np
import torch

from dips.codecs import Codec
from dips.ids import GENESIS, PushId, VersionId
from dips.outer import kernels
from dips.protocol.effects import Note
from dips.protocol.enums import LayerUnit, OutcomeKind
from dips.protocol.events import ReadmissionAsked
from dips.protocol.options import DataOptions, Options, StopOptions
from dips.protocol.records import (
    ClusterDiverged,
    ClusterReadmitted,
    OutcomeRow,
    PenaltyRow,
    Record,
    RoundEnded,
    VersionCommitted,
)
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, Scenario
from dips.sim.world import World
from dips.slave.ports import F32
from dips.study.baselines import begin_workers, train_together
from dips.study.fleet import LINK_S, Fleet, FleetCluster
from dips.study.learner import LastRounds, LearnedModel, Recipe
from dips.study.task import Task

# ---- account --------------------------------------------------------------------------------------------------------


NO_GATE = "none"  # rejected by no gate: not finite, without tokens, or quarantined by an operator


@dataclass(slots=True)
class Emulated:
    """The results of a run."""

    loss: float = float("nan")  # of the mean of θ at the ends of the last rounds, on validation data
    first_loss: float = float("nan")  # of the first version
    finished: bool = False  # all tokens were accepted within the time
    tokens: int = 0  # accepted
    lasted_s: float = 0.0  # duration in virtual time
    versions: int = 0
    clipped: int = 0
    gated: int = 0
    readmitted: int = 0  # quarantines that the operator lifted
    head: VersionId = GENESIS
    staleness: list[int] = field(default_factory=list)  # of each accepted push
    shares: dict[str, int] = field(default_factory=dict)  # accepted tokens by cluster
    steps: dict[str, int] = field(default_factory=dict)  # inner steps by cluster
    cosines: list[float] = field(default_factory=list)  # of each outer step's gradient to the momentum before it
    outcomes: list[tuple[PushId, bool]] = field(default_factory=list)  # of each settled push, whether it was accepted
    gates: dict[str, tuple[str, str]] = field(default_factory=dict)  # (gate, reason) of each rejected push
    usual_loss: dict[str, float] = field(
        default_factory=dict
    )  # share by which a cluster's loss is usually above the others'

    def add_parallel(self, fleet: Fleet, steps: int, tokens: int) -> None:
        """Count a data-parallel beginning of so many steps of each cluster, of so many tokens each."""
        self.tokens += steps * tokens * len(fleet.members)
        self.lasted_s += steps * max(member.step_s for member in fleet.members)
        self.shares = {name: self.shares.get(name, 0) + steps * tokens for name in fleet.names}

    @property
    def diverged(self) -> bool:
        """Whether the last loss is not below the first, or not a number."""
        return not self.loss < self.first_loss

    @property
    def effective_clusters(self) -> float:
        """The effective number of clusters, 1/Σshare²."""
        total = sum(self.shares.values())
        return 1.0 / sum((tokens / total) ** 2 for tokens in self.shares.values()) if total else 0.0

    @property
    def mean_staleness(self) -> float:
        return mean(self.staleness) if self.staleness else 0.0

    @property
    def mean_cosine(self) -> float:
        return mean(self.cosines) if self.cosines else 0.0


@dataclass(frozen=True, slots=True)
class GateCount:
    """Counts of the gates' decisions on bad and on healthy pushes."""

    bad: int  # bad pushes after the first of each cluster
    bad_gated: int
    healthy: int  # pushes of clusters that have no fault, or have not had one yet
    healthy_gated: int
    recovered_after: int | None  # gated pushes of the slowest cluster before one was accepted again; None: none was
    healthy_of: Mapping[str, int] = field(default_factory=dict)  # of `healthy`, by cluster
    gated_by: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of `healthy_gated`, by cluster and gate
    first_reasons: Mapping[str, str] = field(default_factory=dict)  # reason of each cluster's first gated healthy push

    @classmethod
    def of_run(
        cls,
        outcomes: Iterable[tuple[PushId, bool]],
        bad_pushes: Mapping[str, list[PushId]],
        gates: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> GateCount:
        settled = list(outcomes)
        firsts = {pushes[0] for pushes in bad_pushes.values() if pushes}
        bad = {push for pushes in bad_pushes.values() for push in pushes}
        fates = [accepted for push, accepted in settled if push in bad - firsts]
        healthy = list(_until_first_bad(settled, bad))
        wrong = [push for push, accepted in healthy if not accepted]
        gated_by: dict[str, Counter[str]] = {}
        reasons: dict[str, str] = {}
        for push in wrong:
            gate, reason = gates.get(str(push), (NO_GATE, ""))
            gated_by.setdefault(push.cluster, Counter())[gate] += 1
            reasons.setdefault(push.cluster, reason)
        return cls(
            len(fates), fates.count(False), len(healthy), len(wrong),
            _recovery(settled, {cluster: set(pushes) for cluster, pushes in bad_pushes.items() if pushes}),
            Counter(push.cluster for push, _ in healthy), gated_by, reasons,
        )  # fmt: skip


def _until_first_bad(settled: list[tuple[PushId, bool]], bad: set[PushId]) -> Iterator[tuple[PushId, bool]]:
    seen: set[str] = set()
    for push, accepted in settled:
        if push in bad:
            seen.add(push.cluster)
        if push.cluster not in seen:
            yield push, accepted


def _recovery(settled: list[tuple[PushId, bool]], bad: Mapping[str, set[PushId]]) -> int | None:
    """Return the most pushes gated after a cluster's last bad push; None if one was not accepted again."""
    slowest = 0
    for cluster, pushes in bad.items():
        own = [(push, accepted) for push, accepted in settled if push.cluster == cluster]
        last = max((i for i, (push, _) in enumerate(own) if push in pushes), default=-1)
        after = next((i for i, (_, accepted) in enumerate(own[last + 1 :]) if accepted), None)
        if after is None:
            return None
        slowest = max(slowest, after)
    return slowest


class RunAccount(Observer):
    """An observer that fills an Emulated from a world, and ends the world with the run."""

    def __init__(self, world: World, result: Emulated, last: LastRounds, tokens: int) -> None:
        """`tokens`: of an inner step."""
        self._world, self._result, self._last, self._tokens = world, result, last, tokens
        self._finished = False

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self._result.versions += 1
            self._result.clipped += record.clipped
            for fold in record.folds:
                self._result.staleness.append(record.parent.version - fold.base.version)
                shares = self._result.shares
                shares[fold.push.cluster] = shares.get(fold.push.cluster, 0) + fold.tokens
                self._result.tokens += fold.tokens
            self._result.head = record.version
            self._note_cosine(record)
        if isinstance(record, VersionCommitted | RoundEnded):
            shifts = ((row.cluster, row.loss_shift) for row in record.penalty if row.loss is not None)
            self._result.usual_loss |= dict(shifts)
            self._note_outcomes(record.outcomes)

    def note_logged(self, note: Note) -> None:
        if note.kind == "push_gated":
            fields = dict(note.fields)
            self._result.gates[fields["push"]] = (fields["gate"] or NO_GATE, fields["reason"])
        self._finished = self._finished or note.kind == "run_finished"

    def time_passed(self) -> None:
        steps = self._result.tokens // self._tokens
        if (self._finished or self._last.is_due(steps)) and self._is_served():
            self._last.note(steps, _read_head(self._world, self._result.head))
            if self._finished:
                self._result.finished = True
                self._world.stop()

    def _is_served(self) -> bool:
        """Whether all slaves serve the last version."""
        return all(
            m.process is not None and m.process.versions.served_version == self._result.head
            for m in self._world.machines.values()
        )

    def _note_outcomes(self, outcomes: tuple[OutcomeRow, ...]) -> None:
        for outcome in outcomes:
            if outcome.kind in (OutcomeKind.ACCEPTED, OutcomeKind.GATED):
                accepted = outcome.kind is OutcomeKind.ACCEPTED
                self._result.outcomes.append((outcome.push, accepted))
                self._result.gated += not accepted

    def _note_cosine(self, record: VersionCommitted) -> None:
        """Record the cosine of b·g = m′ − a·m to m, over all slaves; both exist until the flip, which follows
        the row.
        """
        dot = g_sq = m_sq = 0.0
        for machine in self._world.machines.values():
            if machine.process is None or machine.process.versions.prepared != record.version:
                return
            before = machine.process.versions.momentum(record.parent)
            after = machine.process.versions.momentum(record.version)
            for layer, m in before.items():
                g = after[layer] - np.float32(record.step.of_layer(layer).a) * m
                dot, g_sq, m_sq = dot + float(g @ m), g_sq + float(g @ g), m_sq + float(m @ m)
        if g_sq > 0 and m_sq > 0:  # before the first step the momentum is 0
            self._result.cosines.append(dot / (g_sq * m_sq) ** 0.5)


# ---- operator -------------------------------------------------------------------------------------------------------
# The operator of an emulated run: readmits clusters that pushed values that are not finite, once their fault is over.
#
# Real operators do the same by `dips cluster readmit` after the repair.


LOOKS_S = 60.0  # virtual time between two checks


class MendingOperator(Observer):
    """Readmits each broken cluster whose fault is over; other quarantines end with the first good push."""

    def __init__(self, world: World, is_mended: Callable[[str], bool]) -> None:
        self._world, self._is_mended = world, is_mended
        self._broken: set[str] = set()
        self.readmitted = 0
        self._plan_look()

    def record_written(self, record: Record) -> None:
        if isinstance(record, ClusterReadmitted):
            self.readmitted += 1
        for row in _rows_of(record):
            (self._broken.add if row.broken else self._broken.discard)(row.cluster)

    def _plan_look(self) -> None:
        self._world.call_later(LOOKS_S, "the operator looks", self._look)

    def _look(self) -> None:
        process = self._world.master.process
        for cluster in sorted(self._broken):
            if process is not None and self._is_mended(cluster):
                process.on_message(ReadmissionAsked(0, cluster), lambda _: None)
        self._plan_look()


def _rows_of(record: Record) -> tuple[PenaltyRow, ...]:
    """Return the statistics that a record changes."""
    if isinstance(record, VersionCommitted | RoundEnded):
        return record.penalty
    return (record.penalty,) if isinstance(record, ClusterDiverged | ClusterReadmitted) else ()


# ---- emulator -------------------------------------------------------------------------------------------------------
# One run of real models in virtual time: the real Coordinator, ledger, agent cores, data flow and outer step.
#
# Events are planned by the run's tokens: clusters join, leave and are killed when a share of the tokens is accepted.


CHUNK_BYTES = 1 << 16
HEARTBEAT_S = 4.0  # in virtual time, in which an inner step takes about one second
HANG_S = 10_000.0
SLOTS_MORE = 1  # more slots than clusters, so that no cluster waits for a slot
PATIENCE = 4.0  # the run ends after this many times its duration without gated pushes, finished or not
LEAST_S = 300.0  # least time of a run, for joining, pulling and ending
PINNED = 2  # older versions kept by slaves
RANGES = 1 << 20  # more than any study's inner steps, each of which takes one


def emulate(
    task: Task,
    fleet: Fleet,
    recipe: Recipe,
    steps: int,
    seed: int,
    options: Options | None = None,
    pull_codec: Codec = Codec.FP32,
    layers: LayerUnit = LayerUnit.BLOCK,
    parallel: float = 0.0,
) -> tuple[Emulated, GateCount]:
    """Train until the tokens of `steps` inner steps are accepted, in virtual time; equal arguments give equal bits.

    parallel  share of the run that is first data parallel (EDiT, Algorithm 1: its warm-up)
    """
    torch.set_num_threads(1)
    kernels.warm_up()  # as a slave does, which finds a cache that a power cut has cut short
    workers, first_loss = begin_workers(task, fleet, recipe, seed)
    together = train_together(workers, steps, parallel)
    begun_share, steps = together * len(workers) / steps, steps - together * len(workers)
    faults = {n: m.fault for n, m in zip(fleet.names, fleet.members, strict=True) if m.fault is not None}
    begun = workers if together else ()
    model = LearnedModel(task, recipe, seed, fleet.names, faults, fleet.due_steps(steps), layers, begun, begun_share)
    result, tokens = Emulated(first_loss=first_loss), steps * task.tokens
    options = replace(options or Options(), stop=StopOptions(tokens=tokens), data=DataOptions(ranges=RANGES))
    scenario = make_scenario(fleet, options, LEAST_S + PATIENCE * steps / fleet.step_rate, pull_codec)
    scenario = replace(scenario, slaves=min(scenario.slaves, len(model.manifest.layers)))  # each has a layer
    world = World(seed, scenario, model, kernels)
    operator = MendingOperator(world, model.is_mended)
    last = LastRounds(steps, fleet)
    world.run([RunAccount(world, result, last, task.tokens), _Comings(world, fleet, result, tokens), operator])
    result.add_parallel(fleet, together, task.tokens)
    result.lasted_s += world.heap.now
    result.steps = {name: together + taken for name, taken in model.steps.items()}
    result.readmitted = operator.readmitted
    result.loss = model.evaluate(last.mean(_read_head(world, result.head)))
    return result, GateCount.of_run(result.outcomes, model.bad_pushes, result.gates)


class _Comings(Observer):
    """An observer that lets clusters join, leave and fail at planned shares of the run."""

    def __init__(self, world: World, fleet: Fleet, result: Emulated, tokens: int) -> None:
        self._world, self._result, self._tokens = world, result, tokens
        self._plan: list[tuple[float, str, Callable[[], None]]] = []  # shares of the run, descending
        for name, member in zip(fleet.names, fleet.members, strict=True):
            self._plan += self._plan_member(name, member)
        self._plan.sort(key=lambda planned: -planned[0])

    def time_passed(self) -> None:
        while self._plan and self._result.tokens >= self._plan[-1][0] * self._tokens:
            _, what, action = self._plan.pop()
            self._world.call_later(0.0, what, action)

    def _plan_member(self, name: str, member: FleetCluster) -> list[tuple[float, str, Callable[[], None]]]:
        cluster, there = self._world.clusters[name], member.joins == 0

        def come() -> None:
            nonlocal there
            there = True
            cluster.start()

        def leave() -> None:
            nonlocal there
            there = False
            cluster.leave_run()

        def start_again() -> None:
            if there:  # it may have left while it was down
                cluster.start()

        def fail() -> None:
            cluster.crash()
            self._world.call_later(member.down_s, f"{name} starts again", start_again)

        planned = [
            (member.joins, f"{name} joins", come, member.joins > 0),
            (member.leaves, f"{name} leaves", leave, member.leaves < 1),
            (member.returns, f"{name} comes back", come, member.returns < 1),
            (member.fails, f"{name} is killed", fail, member.fails < 1),
        ]
        return [(share, what, action) for share, what, action, wanted in planned if wanted]


def make_scenario(fleet: Fleet, options: Options, lasts_s: float, pull_codec: Codec) -> Scenario:
    """Return the scenario of a fleet, in which only planned failures happen."""
    timing = replace(options.timing, heartbeat_s=HEARTBEAT_S, hang_s=HANG_S)
    held = max(1, options.data.ranges * options.data.epochs)  # no limit: each inner step takes a range
    return Scenario(
        tuple(_make_shape(fleet, member) for member in fleet.members),
        slaves=2, layers=4, slots=len(fleet.members) + SLOTS_MORE, pinned=PINNED, inner_steps=fleet.inner_steps,
        options=replace(options, timing=timing, ranges_held=held), lasts_s=lasts_s, ranges_at_once=fleet.inner_steps,
        chunk_bytes=CHUNK_BYTES, pull_codec=pull_codec, run="study",
    )  # fmt: skip


def _make_shape(fleet: Fleet, member: FleetCluster) -> ClusterShape:
    return ClusterShape(
        1, member.step_s, member.link_s / LINK_S, fleet.inner_steps if fleet.pace == "aligned" else 0, fleet.overlap,
        fleet.fragments, member.jitter, member.straggles, late=member.joins > 0,
    )  # fmt: skip


def _read_head(world: World, head: VersionId) -> dict[int, F32]:
    """Return θ of the last version; in a run that ran out of time a slave may still serve the one before."""
    found: dict[int, F32] = {}
    for machine in world.machines.values():
        assert machine.process is not None
        versions = machine.process.versions
        held = head if head in (versions.served_version, versions.prepared) else versions.served_version
        assert held is not None
        found |= dict(versions.theta(held))
    return found
