"""The plan that `dips plan cluster` writes: what to run, what it will take, what else could run; and what frameworks
read.

plan.yaml holds what was chosen, and of a pipeline each device's order of actions as it was simulated, which
dips/inside/pipeline plays. `hand_over` writes what frameworks run themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dips.errors import ConfigError
from dips.inside.planning.adapt import PIECES, Gears, keep_useful, spell_gears
from dips.inside.planning.profile import GB, ClusterProfile, ModelProfile, is_estimated
from dips.inside.planning.schedules import COMPUTING, ScheduledAction, ScheduleName
from dips.inside.planning.search import PipelineChoice, Planner, RankedPlan
from dips.inside.planning.simulate import Prediction, SimulatedPipeline, freeze_orders, simulate
from dips.inside.planning.timeline import spell_timeline

NEXT = 3  # plans that are shown after the first
HALF = 0.5
SHARDED_MEMORY = (
    "It fits if FSDP2 reshards after the forward: parameters, gradients and the optimizer's state in equal shards, "
    "three layers gathered at once, and the activations of one micro-batch."
)


class Framework(StrEnum):
    """The frameworks that a plan can be handed to, and `Pipeline`, which runs here."""

    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    FSDP2 = "fsdp2"  # torch's own, with the shares of configs/examples/unequal_gpus.py
    PIPELINE = "pipeline"  # dips/inside/pipeline: a script that runs one gets one, whatever is fastest


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A row of the plan's table. Figures of devices are those of the one that is worst off."""

    devices: tuple[str, ...]
    layers: tuple[tuple[int, int], ...]  # first and one past the last, of each ministage
    microbatches: tuple[int, ...]  # how many each device has
    seconds: float  # of a micro-batch, forward and backward, on the slowest device
    idle: float
    peak_gb: float
    memory_gb: float
    depth: int | None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The best plan, its figures, and the others on the same scale."""

    model: str
    samples: float
    sequence: int
    best: RankedPlan
    stages: tuple[PlannedStage, ...]
    others: tuple[RankedPlan, ...]  # after the best, best first
    refused: tuple[RankedPlan, ...]
    bytes_moved: Mapping[str, float]
    half_links_s: float | None  # seconds of a step when every line between nodes has half its rate
    estimated: tuple[str, ...]  # kinds whose seconds are scaled by FLOP/s
    looked_at: str
    flops: float
    prediction: Prediction | None
    decoder: bool  # the model is a `transformer`, whose layers frameworks know by name
    shares: Mapping[str, tuple[int, int]]  # of data parallelism: a device's samples of a step, and its micro-batches
    recompute: bool
    bf16_borders: bool
    gears: Gears  # of a pipeline: its own, and those to change to when links sag

    @property
    def tokens_s(self) -> float:
        return self.best.rate * self.sequence


def make_plan(profile: ClusterProfile, model: ModelProfile, target: Framework | None = None) -> ClusterPlan:
    """Search, and put the best plan's figures together.

    target   restricts the plan to what this framework can run
    Errors   ConfigError if the model fits nowhere, or the framework can run none of the plans
    """
    planner = Planner(profile, model)

    def accept(choice: PipelineChoice) -> bool:
        if target is None:
            return True
        return _RUNS[target](choice) and (target not in _EQUAL_SHARES or planner.has_equal_shares(choice))

    result = planner.search(accept)
    ranked = [plan for plan in result.ranked if target is None or _can_run(target, plan)]
    if target is not None and not ranked:
        raise ConfigError(
            f"--for {target}: it can run none of the plans: it takes {_TAKES[target]}; "
            f"without --for the best plan is {result.ranked[0].name}"
        )
    # What averages parameters instead of gradients learns otherwise: shown beside, and taken only if nothing else fits.
    best = next((plan for plan in ranked if plan.exact), ranked[0])
    prediction: Prediction | None = None
    stages: tuple[PlannedStage, ...] = ()
    half: float | None = None
    shares = dict(zip(planner.devices, best.shares, strict=False))
    gears: Gears = {}
    if best.choice is not None:
        choice, prediction = planner.finish(best.choice)
        best = RankedPlan(best.name, prediction.seconds, best.samples, choice, best.why)
        stages = _list_stages(planner, choice, prediction)
        shares = _list_shares(choice, stages)
        gears = _make_gears(planner, choice, prediction)
        half = Planner(profile.scale_links(HALF), model).finish(choice)[1].seconds
    else:
        slow = Planner(profile.scale_links(HALF), model).list_others()
        half = next((plan.step_s for plan in slow if plan.name == best.name), None)
    kinds = sorted({node.kind for node in profile.nodes})
    return ClusterPlan(
        model=model.name,
        samples=best.samples,
        sequence=model.sequence,
        best=best,
        stages=stages,
        others=tuple(plan for plan in result.ranked if plan.name != best.name),
        refused=tuple(result.refused),
        bytes_moved=prediction.bytes_moved if prediction else {},
        half_links_s=half,
        estimated=tuple(kind for kind in kinds if is_estimated(profile, model, kind)),
        looked_at=f"{result.groupings} groupings, bounds of {result.bounded} pipelines, {result.simulated} simulated",
        flops=model.flops,
        prediction=prediction,
        decoder=model.transformer is not None,
        shares=shares,
        recompute=model.recompute,
        bf16_borders=model.bf16_borders,
        gears=gears,
    )


def _make_gears(planner: Planner, choice: PipelineChoice, prediction: Prediction) -> dict[int, SimulatedPipeline]:
    """The plan with its micro-batches in pieces, where that helps if links sag; without what shared parameters take at
    the end of a step, which is the same in all gears.
    """
    if len(choice.groups) == 1 or choice.offload:
        return {}
    gears = {1: freeze_orders(replace(planner.make_pipeline(choice), tied=()), prediction.orders)}
    for pieces in PIECES[1:]:
        if choice.samples % pieces == 0:
            depths = tuple(pieces * depth for depth in choice.depths)  # as much memory as before
            try:
                cut = planner.make_pipeline(replace(choice, samples=choice.samples // pieces, depths=depths))
                cut = replace(cut, tied=())
                gears[pieces] = freeze_orders(cut, simulate(cut, spans=False).orders)
            except ConfigError:  # pieces are dealt anew: a device may get more than it has room for
                continue
    return keep_useful(gears)


def _list_shares(choice: PipelineChoice, stages: Sequence[PlannedStage]) -> dict[str, tuple[int, int]]:
    """A pipeline of one stage is data parallelism; with ministages or offload it needs an executor of its own."""
    if not _is_data_parallel(choice):
        return {}
    only = stages[0]
    return {d: (n * choice.samples, n) for d, n in zip(only.devices, only.microbatches, strict=True)}


def _list_stages(planner: Planner, choice: PipelineChoice, prediction: Prediction) -> tuple[PlannedStage, ...]:
    pipeline = planner.make_pipeline(choice)
    rows = []
    for s, stage in enumerate(pipeline.stages):
        parts = tuple(choice.list_parts(s))
        tightest = max(stage.devices, key=lambda d: prediction.peak_bytes[d.name] / planner.capacity(d.name))
        rows.append(
            PlannedStage(
                devices=tuple(d.name for d in stage.devices),
                layers=parts,
                microbatches=tuple(len(d.microbatches) for d in stage.devices),
                seconds=max(sum(t.total_s for t in d.seconds) for d in stage.devices),
                idle=max(prediction.idle[d.name] for d in stage.devices),
                peak_gb=prediction.peak_bytes[tightest.name] / GB,
                memory_gb=planner.profile.kind_of(tightest.name).memory_gb,
                depth=stage.depth if choice.depths else None,
            )
        )
    return tuple(rows)


def plan_data(plan: ClusterPlan) -> dict[str, Any]:
    """Return the plan as plain values: plan.yaml and `--json`. Seconds, bytes, counts, and orders of actions."""
    choice = plan.best.choice
    return {
        "model": plan.model,
        "plan": plan.best.name,
        "step_s": round(plan.best.step_s, 6),
        "samples": plan.samples,
        "tokens_per_s": round(plan.tokens_s, 1),
        "estimated": list(plan.estimated),
        "half_links_step_s": None if plan.half_links_s is None else round(plan.half_links_s, 6),
        "pipeline": None
        if choice is None
        else {
            "schedule": str(choice.schedule),
            "ministages": choice.ministages,
            "samples": choice.samples,
            "offload": choice.offload,
            "recompute": plan.recompute,
            "bf16_borders": plan.bf16_borders,
            "stages": [
                {
                    "devices": list(stage.devices),
                    "layers": [list(part) for part in stage.layers],
                    "microbatches": list(stage.microbatches),
                    "depth": stage.depth,
                    "idle": round(stage.idle, 4),
                    "peak_gb": round(stage.peak_gb, 3),
                }
                for stage in plan.stages
            ],
            "bytes": {key: round(value) for key, value in plan.bytes_moved.items()},
            **(spell_memory(plan.prediction) if plan.prediction else {}),
            **(spell_timeline(plan.prediction.spans) if plan.prediction else {}),
            "orders": {
                device: " ".join(map(str, order))
                for device, order in (plan.prediction.orders.items() if plan.prediction else ())
            },
            **(spell_gears(plan.gears) if plan.gears else {}),
        },
        "shares": {d: {"samples": n, "microbatches": m} for d, (n, m) in plan.shares.items()} or None,
        "others": [
            {
                "plan": o.name,
                "step_s": round(o.step_s, 6),
                "slower": round(plan.best.rate / o.rate - 1, 4),
                "same_learning": o.exact,
            }
            for o in plan.others
        ],
        "refused": [{"plan": r.name, "why": r.missing} for r in plan.refused],
    }


def spell_memory(prediction: Prediction) -> dict[str, Any]:
    """Return a key of a plan's `pipeline`: bytes of each device by category, and at the moment that needs the most."""
    return {
        "memory": {
            device: {str(category): round(nbytes) for category, nbytes in held.items()}
            | {"peak": round(prediction.peak_bytes[device])}
            for device, held in prediction.category_bytes.items()
        }
    }


# ---- why -------------------------------------------------------------------------------------------------------------


def explain_plan(plan: ClusterPlan) -> list[str]:
    """Return sentences: what bounds the step, what the others lose, what did not fit."""
    lines = [f"Looked at {plan.looked_at}."]
    if plan.stages:
        busiest = min(plan.stages, key=lambda stage: stage.idle)
        idlest = max(plan.stages, key=lambda stage: stage.idle)
        lines.append(
            f"The stage of {busiest.devices[0]} computes {1 - busiest.idle:.0%} of the step and bounds it; "
            f"the stage of {idlest.devices[0]} is idle for {idlest.idle:.0%}."
        )
        tightest = max(plan.stages, key=lambda stage: stage.peak_gb / stage.memory_gb)
        lines.append(
            f"Memory is tightest on {tightest.devices[0]}: {tightest.peak_gb:.1f} of {tightest.memory_gb:g} GB."
        )
        moved = ", ".join(f"{key} {value / GB:.2f} GB" for key, value in plan.bytes_moved.items())
        lines.append(f"Moved in a step: {moved or 'nothing'}.")
    elif plan.best.why:
        lines.append(f"No pipeline is faster here than {plan.best.name}; {plan.best.why}.")
    if not plan.stages and plan.shares:
        lines.append(SHARDED_MEMORY)
    if len({samples for samples, _ in plan.shares.values()}) > 1:
        least, most = (pick(plan.shares.items(), key=lambda item: item[1]) for pick in (min, max))
        lines.append(f"{most[0]} takes {most[1][0]} samples of a step, {least[0]} {least[1][0]}: `shares` of the plan.")
    if plan.half_links_s is not None:
        lines.append(
            f"With half the rate between nodes a step takes {plan.half_links_s:.3g} s, "
            f"{plan.half_links_s / plan.best.step_s - 1:+.0%}."
        )
    lines += [f"{o.name}: {compare_plans(plan, o)}; {o.why}." for o in show_others(plan) if o.why]
    lines += [f"Refused: {r.name}: {r.missing}." for r in plan.refused]
    if plan.estimated:
        lines.append(f"Estimated by FLOP/s, not measured: {', '.join(plan.estimated)}. `dips profile` measures them.")
    return lines


def show_others(plan: ClusterPlan) -> list[RankedPlan]:
    """Return the next three that learn the same, and whatever is faster and learns otherwise."""
    same = [other for other in plan.others if other.exact][:NEXT]
    return same + [other for other in plan.others if not other.exact and other.rate > plan.best.rate]


def compare_plans(plan: ClusterPlan, other: RankedPlan) -> str:
    """Say what another plan loses, or that it is faster but learns otherwise."""
    slower = plan.best.rate / other.rate - 1
    return f"{slower:.0%} slower" if other.exact or slower >= 0 else f"{-slower:.0%} less time, but it learns otherwise"


# ---- frameworks ------------------------------------------------------------------------------------------------------


def _is_mesh(choice: PipelineChoice) -> bool:
    return len(choice.groups) > 1 and len({len(g) for g in choice.groups}) == 1 and not choice.offload


def _is_data_parallel(choice: PipelineChoice) -> bool:
    return len(choice.groups) == choice.ministages == 1 and not choice.offload


_RUNS: dict[Framework, Callable[[PipelineChoice], bool]] = {
    Framework.TORCHTITAN: _is_mesh,
    Framework.MEGATRON: lambda choice: _is_mesh(choice) and choice.schedule is ScheduleName.ONE_F_ONE_B,
    Framework.FSDP2: _is_data_parallel,
    Framework.PIPELINE: lambda _: True,
}
_EQUAL_SHARES = frozenset({Framework.TORCHTITAN, Framework.MEGATRON})  # of the devices of a stage
_ALIKE = "stages of equally many devices with equal shares, the faster ones at the same places of each stage"
_TAKES = {
    Framework.TORCHTITAN: _ALIKE,
    Framework.MEGATRON: _ALIKE,
    Framework.FSDP2: "one stage without ministages",
    Framework.PIPELINE: "pipelines of one stage or more",
}


def _can_run(target: Framework, plan: RankedPlan) -> bool:
    if plan.choice is None:
        return target is Framework.FSDP2 and bool(plan.shares)
    return _RUNS[target](plan.choice)


@dataclass(frozen=True, slots=True)
class Handover:
    """The flags that a framework is started with, and the schedule that it reads, if any.

    FSDP2 has no flags: a line for each device with its share. Neither has `Pipeline`: its ranks in order.
    """

    flags: tuple[str, ...]
    csv: str = ""


def hand_over(plan: ClusterPlan, target: Framework, csv_name: str = "schedule.csv") -> Handover:
    """Return flags and files of a framework for this plan. Raises ConfigError if it cannot run it."""
    choice = plan.best.choice
    if not _can_run(target, plan.best):
        raise ConfigError(f"{target} cannot run {plan.best.name}: it takes {_TAKES[target]}")
    if target is Framework.FSDP2:
        shares = plan.shares.items()
        return Handover(tuple(f"{d}: {n} samples of a step, micro-batches: {count}" for d, (n, count) in shares))
    assert choice is not None
    if target is Framework.PIPELINE:
        return Handover(tuple(f"rank {i}: {d}" for i, d in enumerate(d for s in plan.stages for d in s.devices)))
    if not plan.decoder:
        raise ConfigError(
            f"{target}: expected a model with `transformer`: {plan.model} names layers that it does not know"
        )
    if any(len(set(stage.microbatches)) > 1 for stage in plan.stages):
        raise ConfigError(
            f"{target} cannot run {plan.best.name}: it gives every rank of a stage equally many micro-batches"
        )
    parts = [stage.layers[v] for v in range(choice.ministages) for stage in plan.stages]
    return (
        _for_torchtitan(plan, choice, parts, csv_name)
        if target is Framework.TORCHTITAN
        else _for_megatron(plan, choice, parts)
    )


def schedule_csv(orders: Sequence[Sequence[ScheduledAction]]) -> str:
    """Return the computations of each rank as a line, as torch's pipelining runtime reads them."""
    lines = []
    for order in orders:
        computed = [(a.op, a.part, a.microbatch) for a in order if a.op in COMPUTING]
        own = sorted({m for *_, m in computed if m is not None})
        number = {m: i for i, m in enumerate(own)}  # a rank counts its own from 0
        lines.append(",".join(str(ScheduledAction(op, part, number[m])) for op, part, m in computed if m is not None))
    return "\n".join(lines) + "\n"


def _for_torchtitan(plan: ClusterPlan, choice: PipelineChoice, parts: list[tuple[int, int]], csv_name: str) -> Handover:
    """A list of module names for each part of the model, and the first rank of each stage's order as a CSV.

    The order is played with the columns of ranks in step: each rank of a stage repeats that of the first.
    """
    assert plan.prediction is not None
    names = _module_names(parts[-1][1])
    modules = [[names[i] for i in range(a, b)] for a, b in parts]
    modules[-1][-1:] = ["norm", "output"]
    orders = [plan.prediction.orders[group[0]] for group in choice.groups]
    flags = (
        f"--parallelism.pipeline_parallel_degree={len(choice.groups)}",
        f"--parallelism.data_parallel_shard_degree={len(choice.groups[0])}",
        "--parallelism.pipeline_parallel_schedule=_PipelineScheduleRuntime",
        f"--parallelism.pipeline_parallel_schedule_csv={csv_name}",
        f"--parallelism.pipeline_parallel_microbatch_size={choice.samples}",
        f"--parallelism.module_fqns_per_model_part={modules}",
    )
    return Handover(flags, schedule_csv(orders))


def _module_names(layers: int) -> list[str]:
    """Names of a decoder's modules in torchtitan: embedding, blocks, and norm with output as the last layer."""
    return ["tok_embeddings", *(f"layers.{i}" for i in range(layers - 2)), "output"]


def _for_megatron(plan: ClusterPlan, choice: PipelineChoice, parts: list[tuple[int, int]]) -> Handover:
    """Megatron's layout: E the embedding, t a block, L the loss; a bar between parts. Its schedule is its own 1F1B."""
    last = parts[-1][1] - 1
    letters = ["".join("E" if i == 0 else "L" if i == last else "t" for i in range(a, b)) for a, b in parts]
    return Handover(
        (
            f"--pipeline-model-parallel-size={len(choice.groups)}",
            f"--pipeline-model-parallel-layout={'|'.join(letters)}",
            f"--micro-batch-size={choice.samples}",
            f"--global-batch-size={int(plan.samples)}",
        )
    )
