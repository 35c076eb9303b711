"""Finds what to run on the devices of a profile: the pipeline that takes the least time, and what else could be run.

Every grouping × schedule × micro-batch × ministages makes a pipeline: layers by speed, groups by falling inner rate
(Zorse §4.3.3), micro-batches to the device with most work left (Zorse §4.2). The bound of each (`bound_step`) orders
and prunes them; the best are simulated, then a beam improves them by exchanging groups and moving cuts (SpanTrain
Algorithm 1).

Mended, of Algorithm 1: its text keeps the top-1, its line 9 the first l; the best l are kept. Of Zorse Table 2: `S`
is the number of ministages, not of stages, and ZeRO-2 that keeps its parameters from forward to backward gathers them
once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from heapq import heappop, heappush
from math import inf

from dips.errors import ConfigError
from dips.inside.planning.group import DeviceGroups, list_groupings
from dips.inside.planning.profile import (
    GB,
    GBIT_BYTES,
    ClusterProfile,
    LayerNeed,
    ModelProfile,
    layer_seconds,
    ring_seconds,
)
from dips.inside.planning.schedules import READY_DRIVEN, SPLITTING, ScheduleName
from dips.inside.planning.simulate import (
    PartBytes,
    PassSeconds,
    PipelineDevice,
    PipelineStage,
    Prediction,
    SimulatedPipeline,
    StalledPipeline,
    TiedBytes,
    bound_step,
    simulate,
    tune_depths,
)

USABLE = 0.92  # of a device's memory: the rest is the driver's, NCCL's and lost between blocks
MOST_MINISTAGES = 8
BEAM, ROUNDS = 4, 6
MOST_EVENTS = 600_000  # of all simulations of a search: about 10 s on one core
MOST_TUNING_EVENTS = 200_000
Cuts = tuple[int, ...]  # where each part begins, and the number of layers at the end


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """All that is chosen of a pipeline; `Planner.make_pipeline` makes the rest of it."""

    schedule: ScheduleName
    groups: tuple[tuple[str, ...], ...]
    cuts: Cuts
    samples: int  # of a micro-batch
    ministages: int = 1
    offload: bool = False
    depths: tuple[int, ...] = ()
    found_by: str = ""

    def list_parts(self, stage: int) -> list[tuple[int, int]]:
        """The layers of each of a stage's ministages: the first, and one past the last."""
        ends = range(stage, len(self.cuts) - 1, len(self.groups))
        return [(self.cuts[part], self.cuts[part + 1]) for part in ends]


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """Something that could be run, on one scale: samples a second."""

    name: str
    step_s: float  # seconds of a step over `samples` samples
    samples: float
    choice: PipelineChoice | None = None  # null: no pipeline
    why: str = ""
    missing: str = ""  # why it cannot run; its figures then do not count
    exact: bool = True  # the steps are those of one device; False: it learns otherwise, and seconds are half the truth
    shares: tuple[tuple[int, int], ...] = ()  # of FSDP2: each device's samples of a step, and its micro-batches

    @property
    def rate(self) -> float:
        """Samples a second."""
        return 0.0 if self.missing else self.samples / self.step_s


@dataclass(slots=True)
class SearchResult:
    """The plans, best first, and what was looked at."""

    ranked: list[RankedPlan]
    refused: list[RankedPlan]
    groupings: int
    bounded: int  # pipelines of which the bound was computed
    simulated: int


class DoesNotFit(ConfigError):
    """A device has too little memory for its part of a pipeline."""

    def __init__(self, text: str, missing_bytes: float) -> None:
        super().__init__(text)
        self.missing_bytes = missing_bytes


class Planner:
    """One model on one profile."""

    def __init__(self, profile: ClusterProfile, model: ModelProfile) -> None:
        self.profile, self.model = profile, model
        self.layers = model.chain
        self.devices = tuple(profile.places)
        self._seconds = cache(self._add_seconds)
        self._kind_seconds: dict[tuple[str, int], list[PassSeconds]] = {}
        self._rings = cache(profile.ring)
        self._route = cache(profile.route)
        self._cuts: dict[tuple[object, ...], Cuts | None] = {}

    # ---- seconds and bytes -------------------------------------------------------------------------------------------

    def layer_times(self, kind: str, samples: int) -> list[PassSeconds]:
        """Seconds of each layer on a kind of device, for a micro-batch of so many samples."""
        key = kind, samples
        if key not in self._kind_seconds:
            by_layer: dict[LayerNeed, PassSeconds] = {}
            for layer in self.layers:
                if layer not in by_layer:
                    by_layer[layer] = layer_seconds(self.profile, self.model, kind, layer, samples)
            self._kind_seconds[key] = [by_layer[layer] for layer in self.layers]
        return self._kind_seconds[key]

    def _add_seconds(self, kind: str, samples: int, begin: int, end: int) -> PassSeconds:
        times = self.layer_times(kind, samples)[begin:end]
        return PassSeconds(sum(t.f for t in times), sum(t.i for t in times), sum(t.w for t in times))

    def device_seconds(self, device: str, samples: int, begin: int, end: int) -> PassSeconds:
        """Seconds of layers begin … end on a device."""
        return self._seconds(self.profile.places[device].kind, samples, begin, end)

    def speed_of(self, device: str) -> float:
        """Samples a second through the whole model."""
        return 1 / max(self.device_seconds(device, 1, 0, len(self.layers)).total_s, 1e-12)

    @cached_property
    def parameters_before(self) -> list[float]:
        """Parameters of all layers before each."""
        sums = [0.0]
        for layer in self.layers:
            sums.append(sums[-1] + layer.parameters)
        return sums

    def part_bytes(self, begin: int, end: int, devices: int, samples: int) -> PartBytes:
        """Bytes of layers begin … end on each of so many devices."""
        m, parameters = self.model, self.parameters_before[end] - self.parameters_before[begin]
        layers = self.layers[begin:end]
        inputs = self.layers[max(0, begin - 1) : end - 1]  # layers keep what they take; the model's own input is small
        boundary = samples * sum(layer.border_bytes for layer in inputs)
        whole = samples * sum(layer.activation_bytes for layer in layers)
        own = parameters - sum(shared for copy, _, shared in m.ties if begin <= copy < end)  # that an optimizer steps
        share = parameters / devices if devices > 1 else 0.0
        return PartBytes(
            whole=parameters * m.parameter_bytes,
            gradients=parameters * m.gradient_bytes,
            parameters=share * m.parameter_bytes,
            gradient_share=share * m.gradient_bytes,
            optimizer=own * m.state_bytes / devices,
            activations=boundary if m.recompute else whole,
            boundary=boundary,
        )

    def capacity(self, device: str) -> float:
        """Bytes that may be used of a device."""
        return self.profile.kind_of(device).memory_gb * GB * USABLE

    # ---- a pipeline --------------------------------------------------------------------------------------------------

    def make_pipeline(self, choice: PipelineChoice) -> SimulatedPipeline:
        """Return the pipeline. Raises ConfigError if it cannot run: shares, memory with device and missing bytes."""
        p, v = len(choice.groups), choice.ministages
        if any(b <= a for a, b in zip(choice.cuts, choice.cuts[1:], strict=False)):
            raise ConfigError(f"{p * v} parts: expected a layer for each, the model has {len(self.layers)}")
        return SimulatedPipeline(
            schedule=choice.schedule,
            stages=tuple(self._make_stage(choice, s) for s in range(p)),
            border_bytes=tuple(
                choice.samples * self.layers[c - 1].border_bytes * self.model.border_share for c in choice.cuts[1:-1]
            ),
            route=self._route,
            ministages=v,
            keep=v == 1,
            offload=choice.offload,
            tied=tuple(
                TiedBytes(
                    bisect_right(choice.cuts, copy) - 1,
                    bisect_right(choice.cuts, owner) - 1,
                    shared * self.model.gradient_bytes,
                    shared * self.model.parameter_bytes,
                )
                for copy, owner, shared in self.model.ties
            ),
        )

    def has_equal_shares(self, choice: PipelineChoice) -> bool:
        """Whether each device of a stage has as many micro-batches as the others, and the same ones as its column: the
        first devices of all stages send to each other alone where a framework plays it, the second ones, and so on.
        """
        shares = {self._deal_stage(choice, s)[1] for s in range(len(choice.groups))}
        return len(shares) == 1 and all(len({len(share) for share in of}) == 1 for of in shares)

    def _deal_stage(
        self, choice: PipelineChoice, s: int
    ) -> tuple[list[tuple[PassSeconds, ...]], tuple[tuple[int, ...], ...]]:
        """Seconds of each part on each device of a stage, and the micro-batches of each device."""
        parts, total = choice.list_parts(s), self.model.batch // choice.samples
        seconds = [tuple(self.device_seconds(d, choice.samples, a, b) for a, b in parts) for d in choice.groups[s]]
        return seconds, share_microbatches([sum(t.total_s for t in row) for row in seconds], total)

    def _make_stage(self, choice: PipelineChoice, s: int) -> PipelineStage:
        group, parts, samples = choice.groups[s], choice.list_parts(s), choice.samples
        n, total = len(group), self.model.batch // samples
        if total < n:
            raise ConfigError(
                f"stage {s}: expected a micro-batch for each of {n} devices, got {total}: a batch of "
                f"{self.model.batch} in micro-batches of {samples}"
            )
        sizes = tuple(self.part_bytes(a, b, n, samples) for a, b in parts)
        seconds, shares = self._deal_stage(choice, s)
        workspace = self._workspace(parts, samples)
        held = 1 << 30
        devices = []
        for device, row, share in zip(group, seconds, shares, strict=True):
            held = min(held, self._most_held(choice, s, device, sizes, workspace, len(share)))
            kind = self.profile.kind_of(device)
            devices.append(PipelineDevice(device, share, row, (), sizes, 1 / (kind.copy_gbit * GBIT_BYTES), workspace))
        gather: tuple[float, ...] = ()
        reduce: tuple[float, ...] = ()
        ring = self._rings(group)
        if n > 1:
            gather = tuple(ring_seconds(ring, n, size.whole) for size in sizes)
            reduce = tuple(ring_seconds(ring, n, size.gradients) for size in sizes)
        uses = tuple(thing for thing, _ in ring.uses if thing != "ring")
        depth = choice.depths[s] if choice.depths else 1 << 30
        return PipelineStage(tuple(devices), gather, reduce, uses, depth, held)

    def _workspace(self, parts: list[tuple[int, int]], samples: int) -> float:
        """With `recompute` a backward holds one layer's activations."""
        if not self.model.recompute:
            return 0.0
        return samples * max(self.layers[i].activation_bytes for a, b in parts for i in range(a, b))

    def _most_held(
        self, choice: PipelineChoice, s: int, device: str, sizes: tuple[PartBytes, ...], workspace: float, share: int
    ) -> int:
        """How many micro-batches' activations fit. Raises ConfigError that names device and missing bytes."""
        states = sum(size.states for size in sizes)
        idle = 0.0  # whole parameters of ministages that do not compute: a stage of one device has no shards
        if choice.offload and choice.ministages > 2:
            states = sum(sorted((size.parameters + size.gradient_share for size in sizes), reverse=True)[:2])
            states += max(size.optimizer for size in sizes)
        elif len(choice.groups[s]) == 1:
            idle = sum(sorted((z.whole for z in sizes), reverse=True)[2:])
        fixed = states + idle + workspace + sum(sorted((z.whole + z.gradients for z in sizes), reverse=True)[:2])
        room = self.capacity(device) - fixed
        each = sum(size.activations for size in sizes)
        if choice.offload:
            needed = share * sum(size.activations - size.boundary for size in sizes)  # without recompute
            needed += 4 * max(size.boundary for size in sizes)  # two that are fetched, one computed, one on its way
        elif choice.schedule is ScheduleName.COMPACT_ZB:
            needed = each * min(share, len(choice.groups) - s)  # as 1F1B: fewer would serialise the stages
        elif choice.schedule in SPLITTING:
            needed = each * min(share, len(choice.groups))
        elif choice.schedule in READY_DRIVEN:
            needed = each * share
        else:
            needed = each * min(share, len(choice.groups) - s)
        if needed > room:
            raise DoesNotFit(
                f"{device} of stage {s}: {(needed - room) / GB:.1f} GB missing: expected at "
                f"most {self.capacity(device) / GB:.1f} GB, {USABLE:.0%} of its memory; needs "
                f"{(fixed + needed) / GB:.1f} GB",
                needed - room,
            )
        if choice.schedule is not ScheduleName.COMPACT_ZB or not each:
            return 1 << 30
        return max(1, int(room / each))

    # ---- candidates --------------------------------------------------------------------------------------------------

    def order_groups(self, groups: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
        """Fast inner links first: the first gather overlaps nothing (Zorse §4.3.3)."""
        return tuple(sorted(groups, key=lambda g: self._rings(g).byte_s if len(g) > 1 else 0.0))

    def cut_layers(self, groups: Sequence[tuple[str, ...]], ministages: int, samples: int) -> Cuts | None:
        """Cut the model by the groups' speeds, so that the slowest stage is fast; None if there are too few layers."""
        if len(groups) * ministages > len(self.layers):
            return None
        key = (tuple(groups), ministages, samples)
        if key not in self._cuts:
            self._cuts[key] = self._balance_layers(groups, ministages, samples)
        return self._cuts[key]

    def _balance_layers(self, groups: Sequence[tuple[str, ...]], ministages: int, samples: int) -> Cuts:
        costs = [self._group_costs(g, samples) for g in groups]
        if ministages == 1:
            return balance_chain(costs)
        # Each part gets layers of its group's share of a round, where the sums cross.
        speeds = [1 / c[-1] for c in costs]
        total, at, edges = sum(speeds) * ministages, 0.0, [0]
        work = costs[0]
        for number, s in enumerate([s for _ in range(ministages) for s in range(len(groups))][:-1], 1):
            at += speeds[s] / total * work[-1]
            nearest = min(range(len(work)), key=lambda i: abs(work[i] - at))
            edges.append(min(max(nearest, edges[-1] + 1), len(self.layers) - (len(groups) * ministages - number)))
        return (*edges, len(self.layers))

    def _group_costs(self, group: tuple[str, ...], samples: int) -> list[float]:
        """Seconds per micro-batch of all layers before each, by a group as a whole."""
        counts: dict[str, int] = {}
        for device in group:
            kind = self.profile.places[device].kind
            counts[kind] = counts.get(kind, 0) + 1
        rows = [(count, self.layer_times(kind, samples)) for kind, count in counts.items()]
        sums = [0.0]
        for i in range(len(self.layers)):
            rate = sum(count / max(times[i].total_s, 1e-12) for count, times in rows)
            sums.append(sums[-1] + 1 / rate)
        return sums

    def list_choices(self, groupings: Sequence[DeviceGroups]) -> Iterator[PipelineChoice]:
        """Yield every grouping × schedule × micro-batch × ministages that has enough layers and micro-batches."""
        for grouping in groupings:
            groups = self.order_groups(grouping.groups)
            most = max(map(len, groups))
            for samples in (
                n for n in (1, 2, 4, 8, 16, 32) if n * most <= self.model.batch and self.model.batch % n == 0
            ):
                for schedule, ministages, offload in self._ways(groups, self.model.batch // samples):
                    cuts = self.cut_layers(groups, ministages, samples)
                    if cuts is not None:
                        yield PipelineChoice(
                            schedule, groups, cuts, samples, ministages, offload, found_by=grouping.found_by
                        )

    def _ways(self, groups: Sequence[tuple[str, ...]], total: int) -> Iterator[tuple[ScheduleName, int, bool]]:
        yield ScheduleName.COMPACT_ZB, 1, False
        for ministages in range(1, min(MOST_MINISTAGES, len(self.layers) // len(groups)) + 1):
            yield ScheduleName.BREADTH_FIRST, ministages, False
            yield ScheduleName.BREADTH_FIRST, ministages, True
        if all(len(g) == len(groups[0]) for g in groups) and total % len(groups[0]) == 0:
            yield ScheduleName.ONE_F_ONE_B, 1, False
            yield ScheduleName.ZB_H1, 1, False

    # ---- the search --------------------------------------------------------------------------------------------------

    def search(self, accept: Callable[[PipelineChoice], bool] = lambda _: True, keep: int = 4) -> SearchResult:
        """Return the best pipelines, best first, and everything else that could be run, on one scale.

        accept   restricts the pipelines, as to those that a framework can run
        Errors   ConfigError if nothing fits: what is nearest to fitting, with device and missing bytes; or if the model
                 takes no time
        """
        for kind in sorted({node.kind for node in self.profile.nodes}):
            if not self._seconds(kind, 1, 0, len(self.layers)).total_s:
                raise ConfigError(
                    f"{self.model.name}: takes no time on {kind}: expected `flops` of its layers, or seconds in "
                    "`measured`"
                )
        groupings = list_groupings(self.profile, self.speed_of)
        bounds: list[tuple[float, PipelineChoice, SimulatedPipeline]] = []
        refusals: list[ConfigError] = []
        for choice in self.list_choices(groupings):
            if not accept(choice):
                continue
            try:
                pipeline = self.make_pipeline(choice)
            except ConfigError as error:
                refusals.append(error)
                continue
            bounds.append((bound_step(pipeline), choice, pipeline))
        bounds.sort(key=lambda row: row[0])
        beam = _Beam(self, keep)
        for bound, choice, pipeline in bounds:
            if bound >= beam.worst_s or not beam.score(choice, pipeline):
                break
        beam.improve(accept)
        ranked = [
            RankedPlan(describe_choice(c), s, self.model.batch, c, f"found {c.found_by}") for s, c in beam.best(keep)
        ]
        others = self.list_others()
        ranked += [plan for plan in others if not plan.missing]
        if not ranked:
            nearest = _find_nearest(refusals) or "no grouping has a layer and a micro-batch for each device"
            raise ConfigError(f"the model fits nowhere on these devices; nearest: {nearest}")
        ranked.sort(key=lambda plan: -plan.rate)
        refused = [plan for plan in others if plan.missing]
        if refusals:
            missing = f"nearest: {_find_nearest(refusals)}"
            refused.append(RankedPlan(f"{len(refusals)} pipelines", inf, 0, missing=missing))
        return SearchResult(ranked, refused, len(groupings), len(bounds), beam.simulated)

    def finish(self, choice: PipelineChoice) -> tuple[PipelineChoice, Prediction]:
        """Tune the depths of a `compact_zb` pipeline; return what was chosen and its prediction, with its spans."""
        pipeline = self.make_pipeline(choice)
        if choice.schedule is not ScheduleName.COMPACT_ZB or choice.depths:
            return choice, simulate(pipeline)
        tuned, prediction = tune_depths(pipeline, max(8, MOST_TUNING_EVENTS // count_events(pipeline)))
        return replace(choice, depths=tuple(s.depth for s in tuned.stages)), prediction

    # ---- what is no pipeline -----------------------------------------------------------------------------------------

    def list_others(self, inner_steps: int = 64) -> list[RankedPlan]:
        """Return what else could run: FSDP2, HSDP, unequal shares, EDiT, and clusters under the outer loop."""
        every = self.devices
        made = [self.shard_fully(every, equal=True), self.shard_fully(every, equal=False)]
        nodes = _by_node(self.profile)
        if len(nodes) > 1 and len({len(g) for g in nodes}) == 1:
            made += [self.shard_in_nodes(nodes), *self.average_nodes(nodes)]
        sites = _by_site(self.profile)
        if len(sites) > 1:
            made += self.train_apart(sites, inner_steps)
        return made

    def shard_fully(self, devices: Sequence[str], equal: bool, batch: int | None = None) -> RankedPlan:
        """FSDP2 over these devices: each layer is gathered in forward and backward, its gradients are scattered."""
        batch = batch or self.model.batch
        name = f"FSDP2 over {len(devices)} devices" + ("" if equal else ", unequal shares")
        n = len(devices)
        if few := _lacks_samples(batch, n):
            return RankedPlan(name, inf, batch, missing=few)
        speeds = [1.0 if equal else self.speed_of(d) for d in devices]
        shares = [len(s) for s in share_microbatches([1 / v for v in speeds], batch)]
        ring = self._rings(tuple(devices))
        best, missing, rounds = inf, "", 1
        for accumulate in (1, 2, 4, 8, 16, 32, 64):
            samples = [-(-share // accumulate) for share in shares]
            missing = self._missing_sharded(devices, samples, n)
            if missing:
                continue
            gathers = [ring_seconds(ring, n, l.parameters * self.model.parameter_bytes) for l in self.layers]
            reduces = [ring_seconds(ring, n, l.parameters * self.model.gradient_bytes) for l in self.layers]
            best, rounds = accumulate * self.overlap_layers(devices, samples, gathers, reduces), accumulate
            break
        why = "every layer is gathered over the slowest link"
        return RankedPlan(name, best, batch, missing=missing, why=why, shares=tuple((n, rounds) for n in shares))

    def _missing_sharded(self, devices: Sequence[str], samples: Sequence[int], shards: int) -> str:
        """Say which device lacks how much for FSDP2; empty if all have enough."""
        m = self.model
        states = m.parameters * (m.parameter_bytes + m.gradient_bytes + m.state_bytes) / shards
        gathered = 3 * max(l.parameters for l in self.layers) * (m.parameter_bytes + m.gradient_bytes)
        one = sum(l.border_bytes for l in self.layers) if m.recompute else sum(l.activation_bytes for l in self.layers)
        working = max(l.activation_bytes for l in self.layers) if m.recompute else 0.0
        for device, count in zip(devices, samples, strict=True):
            short = states + gathered + count * (one + working) - self.capacity(device)
            if short > 0:
                return f"{device}: {short / GB:.1f} GB missing"
        return ""

    def overlap_layers(
        self, devices: Sequence[str], samples: Sequence[int], gathers: Sequence[float], reduces: Sequence[float]
    ) -> float:
        """Seconds of a forward and a backward whose collectives run beside the layer before."""
        pairs = sorted({(self.profile.places[d].kind, n) for d, n in zip(devices, samples, strict=True) if n})
        rows = [self.layer_times(kind, n) for kind, n in pairs]
        forward = [max(row[i].f for row in rows) for i in range(len(self.layers))]
        backward = [max(row[i].i + row[i].w for row in rows) for i in range(len(self.layers))]
        ahead = [*gathers[1:], 0.0]
        total = gathers[0] + sum(max(f, g) for f, g in zip(forward, ahead, strict=True))
        before, behind = [0.0, *gathers[:-1]], [*reduces[1:], 0.0]
        total += sum(max(b, g + r) for b, g, r in zip(backward, before, behind, strict=True))
        return total + reduces[0]

    def shard_in_nodes(self, nodes: Sequence[Sequence[str]], average: bool = True) -> RankedPlan:
        """HSDP: sharded in each node, gradients averaged between nodes after the backward of each layer."""
        n, r = len(nodes[0]), len(nodes)
        name = f"HSDP {r} × {n}"
        shares = [-(-self.model.batch // (n * r))] * n
        missing = _lacks_samples(self.model.batch, n * r)
        missing = missing or next((t for g in nodes if (t := self._missing_sharded(g, shares, n))), "")
        if missing:
            return RankedPlan(name, inf, self.model.batch, missing=missing)
        between = self._rings(tuple(g[0] for g in nodes))
        seconds = []
        for group in nodes:
            ring = self._rings(tuple(group))
            gathers = [ring_seconds(ring, n, l.parameters * self.model.parameter_bytes) for l in self.layers]
            reduces = [
                ring_seconds(ring, n, l.parameters * self.model.gradient_bytes)
                + (2 * ring_seconds(between, r, l.parameters * self.model.gradient_bytes) if average else 0.0)
                for l in self.layers
            ]
            seconds.append(self.overlap_layers(group, shares, gathers, reduces))
        return RankedPlan(name, max(seconds), self.model.batch, why="gradients cross between nodes in every step")

    def average_nodes(self, nodes: Sequence[Sequence[str]], tau: int = 128) -> list[RankedPlan]:
        """EDiT and A-EDiT: HSDP whose nodes average parameters every `tau` steps, hidden under a forward (E§3.1)."""
        share = self.model.batch / len(nodes)
        own = replace_batch(self, -(-self.model.batch // len(nodes)))  # a node may have one more than its share
        alone = [own.shard_in_nodes([g], average=False) for g in nodes]
        few = _lacks_samples(self.model.batch, len(nodes) * len(nodes[0]))  # in a node that has less than its share
        if missing := few or next((p.missing for p in alone if p.missing), ""):
            return [RankedPlan("EDiT", inf, self.model.batch, missing=missing)]
        steps = [plan.step_s for plan in alone]
        sync = 2 * ring_seconds(
            self._rings(tuple(g[0] for g in nodes)), len(nodes), self.model.parameters * self.model.parameter_bytes
        )
        exposed = hide_sync(sync, max(steps) / (4 if self.model.recompute else 3)) / tau
        rate = sum(share / (s + exposed) for s in steps)
        why = f"parameters cross between nodes every {tau} steps"
        return [
            RankedPlan(f"EDiT, τ {tau}", max(steps) + exposed, self.model.batch, why=why, exact=False),
            RankedPlan(
                f"A-EDiT, τ {tau}", self.model.batch / rate, self.model.batch, why=why + "; nobody waits", exact=False
            ),
        ]

    def train_apart(self, sites: Sequence[tuple[str, ...]], inner_steps: int) -> list[RankedPlan]:
        """Clusters of a Di-PS run, one a site by FSDP2: each trains its share of the batch and pushes every H steps."""
        speeds = [sum(map(self.speed_of, site)) for site in sites]
        shares = [len(s) for s in share_microbatches([1 / v for v in speeds], self.model.batch)]
        link = min((1 / self.profile.route(a[0], b[0]).byte_s for a in sites for b in sites if a is not b), default=inf)
        moved_s = 4.0 * self.model.parameters / link  # fp32, as codecs are by default
        rates = {"none": 0.0, "full": 0.0}
        for site, share in zip(sites, shares, strict=True):
            own = Planner(self.profile.only(site), replace(self.model, batch=share))
            best = min((own.shard_fully(own.devices, equal=e) for e in (True, False)), key=lambda p: p.step_s)
            if best.missing:
                return [RankedPlan(f"{len(sites)} clusters", inf, self.model.batch, missing=best.missing)]
            cycle = inner_steps * best.step_s
            rates["none"] += inner_steps * share / (cycle + 2 * moved_s)
            rates["full"] += inner_steps * share / max(cycle, 2 * moved_s)
        why = "tokens only: docs/guides/choosing.md has the loss"
        return [
            RankedPlan(
                f"{len(sites)} clusters, H {inner_steps}, overlap {o}",
                self.model.batch / r,
                self.model.batch,
                why=why,
                exact=False,
            )
            for o, r in rates.items()
        ]


class _Beam:
    """The best choices so far, with the seconds that were simulated."""

    def __init__(self, planner: Planner, keep: int) -> None:
        self._planner, self._keep = planner, keep
        self._scores: dict[PipelineChoice, float] = {}
        self._events = 0
        self.simulated = 0

    @property
    def worst_s(self) -> float:
        """Seconds of the last of those that would be kept."""
        ranked = self.best(self._keep)
        return ranked[-1][0] if len(ranked) >= self._keep else inf

    def best(self, count: int) -> list[tuple[float, PipelineChoice]]:
        """Return the best of each schedule on each grouping: plans that differ by a layer are one to a reader."""
        found: dict[tuple[object, ...], tuple[float, PipelineChoice]] = {}
        for choice, seconds in self._scores.items():
            key = choice.schedule, frozenset(choice.groups)
            if seconds < found.get(key, (inf, choice))[0]:
                found[key] = seconds, choice
        return sorted(found.values(), key=lambda row: row[0])[:count]

    def score(self, choice: PipelineChoice, pipeline: SimulatedPipeline) -> bool:
        """Simulate a pipeline; False if the search has used its events up."""
        if choice in self._scores:
            return True
        cost = count_events(pipeline)
        if self._scores and self._events + cost > MOST_EVENTS:
            return False
        self._events += cost
        self.simulated += 1
        try:
            self._scores[choice] = simulate(pipeline, spans=False).seconds
        except StalledPipeline:
            self._scores[choice] = inf
        return True

    def improve(self, accept: Callable[[PipelineChoice], bool]) -> None:
        """Exchange groups and move cuts of the best l, until nothing gets better (Algorithm 1, lines 4 to 9)."""
        for _ in range(ROUNDS):
            before = self._beam()
            for choice in before:
                for near in self._neighbours(choice):
                    if not accept(near):
                        continue
                    try:
                        pipeline = self._planner.make_pipeline(near)
                    except ConfigError:
                        continue
                    if bound_step(pipeline) < self.worst_s and not self.score(near, pipeline):
                        return
            if self._beam() == before:
                return

    def _beam(self) -> list[PipelineChoice]:
        """Return the best l of all, and the best l that differ in more than cuts and order."""
        ranked = sorted(self._scores, key=self._scores.__getitem__)[:BEAM]
        return list(dict.fromkeys([*ranked, *(choice for _, choice in self.best(BEAM))]))

    def _neighbours(self, choice: PipelineChoice) -> Iterator[PipelineChoice]:
        inner = range(1, len(choice.cuts) - 1)
        for first in inner:  # a layer from a stage to the next, or past some stages
            for last in inner[first - 1 : first + 2]:
                for change in (-1, 1):
                    moved = (c + change if first <= at <= last else c for at, c in enumerate(choice.cuts))
                    yield replace(choice, cuts=tuple(moved))
        for a in range(len(choice.groups)):
            for b in range(a + 1, len(choice.groups)):
                groups = list(choice.groups)
                groups[a], groups[b] = groups[b], groups[a]
                cuts = self._planner.cut_layers(groups, choice.ministages, choice.samples)
                yield replace(choice, groups=tuple(groups))
                if cuts is not None:
                    yield replace(choice, groups=tuple(groups), cuts=cuts)
        for samples in (choice.samples * 2, choice.samples // 2):
            if samples and self._planner.model.batch % samples == 0:
                yield replace(choice, samples=samples)


# ---- small rules -----------------------------------------------------------------------------------------------------


def share_microbatches(seconds: Sequence[float], total: int) -> tuple[tuple[int, ...], ...]:
    """Deal micro-batches by `deal_microbatches`, and remember how."""
    return deal_microbatches(tuple(seconds), total)


@lru_cache(maxsize=4096)
def deal_microbatches(seconds: tuple[float, ...], total: int) -> tuple[tuple[int, ...], ...]:
    """Deal micro-batches to devices, each to the one that would be done with it first (Zorse §4.2).

    seconds  of one micro-batch on each device
    Returns  the micro-batches of each device, in order; a device may get none if there are fewer than devices
    """
    made: list[list[int]] = [[] for _ in seconds]
    queue: list[tuple[float, int]] = []
    for number, took in enumerate(seconds):
        heappush(queue, (took, number))
    for m in range(total):
        done, number = heappop(queue)
        made[number].append(m)
        heappush(queue, (done + seconds[number], number))
    for number, own in enumerate(made):  # a very slow device still gets one
        if not own and total >= len(seconds):
            own.append(made[max(range(len(made)), key=lambda i: len(made[i]))].pop())
            made[number] = own
    return tuple(tuple(sorted(own)) for own in made)


def balance_chain(costs: Sequence[Sequence[float]]) -> Cuts:
    """Cut a chain of layers into runs, one for each stage in order, so that the slowest run is as fast as can be.

    costs  for each stage: sums of its seconds of all layers before each, f64[layers + 1]
    """
    p, n = len(costs), len(costs[0]) - 1
    best = [[inf] * (n + 1) for _ in range(p + 1)]
    cut = [[0] * (n + 1) for _ in range(p + 1)]
    best[0][0] = 0.0
    for s in range(1, p + 1):
        row = costs[s - 1]
        for end in range(s, n - (p - s) + 1):
            for begin in range(s - 1, end):
                slowest = max(best[s - 1][begin], row[end] - row[begin])
                if slowest < best[s][end]:
                    best[s][end], cut[s][end] = slowest, begin
    edges = [n]
    for s in range(p, 0, -1):
        edges.append(cut[s][edges[-1]])
    return tuple(reversed(edges))


def hide_sync(sync_s: float, forward_s: float) -> float:
    """Seconds of a layer-by-layer synchronisation that a forward does not hide: the first group's has nothing to hide
    under.
    """
    return max(0.0, sync_s - 0.8 * forward_s)


def count_events(pipeline: SimulatedPipeline) -> int:
    """About how many events a simulation has."""
    total = sum(len(d.microbatches) for d in pipeline.stages[0].devices)
    return max(1, 4 * total * len(pipeline.stages) * pipeline.ministages)


def describe_choice(choice: PipelineChoice) -> str:
    sizes = "+".join(str(len(g)) for g in choice.groups)
    parts = f", {choice.ministages} ministages" if choice.ministages > 1 else ""
    offload = ", offload" if choice.offload else ""
    return f"{choice.schedule} {sizes}{parts}, micro-batch {choice.samples}{offload}"


def replace_batch(planner: Planner, batch: int) -> Planner:
    """Return a planner of the same model with another batch."""
    return Planner(planner.profile, replace(planner.model, batch=batch))


def _lacks_samples(batch: int, devices: int) -> str:
    return f"{batch} samples for {devices} devices" if batch < devices else ""


def _find_nearest(refusals: Sequence[ConfigError]) -> ConfigError | None:
    """Return the refusal for which the fewest bytes are missing; one for another reason if there is no such."""
    return min(refusals, key=lambda e: e.missing_bytes if isinstance(e, DoesNotFit) else inf, default=None)


def _by_node(profile: ClusterProfile) -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for device, node in profile.places.items():
        found.setdefault(node.name, []).append(device)
    return [tuple(g) for g in found.values()]


def _by_site(profile: ClusterProfile) -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for device, node in profile.places.items():
        found.setdefault(node.site, []).append(device)
    return [tuple(g) for g in found.values()]


# ---- Zorse Table 2 ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """A row of Zorse Table 2, with its errata mended: L layers of P parameters on D devices, S ministages, M
    micro-batches.
    """

    materialised: float
    sharded: float
    gathers: float
    corrections: tuple[str, ...] = field(default=())


def parameter_costs(
    layers: int, parameters: float, ministages: int, devices: int, microbatches: int
) -> dict[str, ParameterCost]:
    """Return the rows of Zorse Table 2."""
    return {
        "Zorse": ParameterCost(2 * layers / ministages * parameters, 0.0, 2 * layers),
        "PP + ZeRO-2": ParameterCost(
            layers * parameters,
            0.0,
            2 * layers,
            ("gathers L, not 2 L, where parameters stay from forward to backward",),
        ),
        "PP + ZeRO-3": ParameterCost(2 * parameters, (layers - 2) * parameters / devices, 2 * layers * microbatches),
    }
