"""A pipeline's plan as its ranks play it: who holds what, and each rank's order of actions with its transfers.

`read_pipeline` reads what `dips plan cluster` wrote, and checks that its orders can be played to their end as they
stand: an order that was edited cannot hang a job. `lower_order` and `lower_forward` add to one device's order what the
simulator does by itself: receives ahead of their use, sends, and the RESHARD after a gradient's reduction. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from dips.errors import ConfigError
from dips.inside.planning.adapt import Gears, TimedTransfer, parse_gears
from dips.inside.planning.schedules import COMPUTING, Op, ScheduledAction, list_share, parse_order
from dips.inside.planning.simulate import ActionSpan
from dips.inside.planning.timeline import parse_timeline

AHEAD = 8  # computations before its use at which a receive begins; gloo sends nothing before, and pieces are small
RESIDENT = 2  # ministages of a device at work: with more of them `offload` takes the others' shards to host memory


class BorderTransfer(StrEnum):
    """Sends and receives of one micro-batch, by torch's names: F the activations, B the gradients."""

    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


class RankAction(NamedTuple):
    """An action of a rank on a part of the model; without a micro-batch it concerns the part as a whole."""

    op: Op | BorderTransfer
    part: int
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The part of plan.yaml that a pipeline runs. A *part* is a ministage: part v·p + s is ministage v of stage s."""

    model: str
    samples: int  # of a micro-batch
    stages: tuple[tuple[str, ...], ...]  # devices of each
    layers: tuple[tuple[int, int], ...]  # of each part: first, and one past the last
    recompute: bool
    bf16_borders: bool  # what goes over a border goes in bf16, whatever is computed in
    orders: Mapping[str, tuple[ScheduledAction, ...]]
    shares: Mapping[str, tuple[int, ...]]  # the micro-batches of each device, in the order of its last forwards
    offload: bool = False  # activations between layers, and shards of idle ministages, wait in host memory
    memory: Mapping[str, float] = field(default_factory=dict)  # bytes that a device needs; none: the plan has no sizes
    timeline: tuple[ActionSpan, ...] = ()  # as it was predicted

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, stage by stage: by default rank i is the i-th."""
        return tuple(device for stage in self.stages for device in stage)

    @property
    def moves_shards(self) -> bool:
        """Whether shards are on a device only while their ministage is at work, or the next."""
        return self.offload and len(self.layers) > RESIDENT * len(self.stages)

    @property
    def microbatches(self) -> int:
        """How many a step has."""
        return sum(len(self.shares[device]) for device in self.stages[0])

    def stage_of(self, device: str) -> int:
        return next(s for s, stage in enumerate(self.stages) if device in stage)

    def parts_of(self, device: str) -> range:
        """The parts that a device holds."""
        return range(self.stage_of(device), len(self.layers), len(self.stages))

    def owner(self, part: int, microbatch: int) -> str:
        """Return the device that computes a micro-batch on a part."""
        return next(d for d in self.stages[part % len(self.stages)] if microbatch in self.shares[d])

    def cut(self, pieces: int, orders: Mapping[str, tuple[ScheduledAction, ...]]) -> PipelinePlan:
        """Return the plan whose micro-batches are cut into pieces, with the orders for them."""
        shares = {device: list_share(order) for device, order in orders.items()}
        return replace(self, samples=self.samples // pieces, orders=orders, shares=shares, timeline=())

    def tag(self, transfer: BorderTransfer, part: int, microbatch: int) -> int:
        """Return the number of a SEND_F or SEND_B of a part, which its receiver knows it by."""
        way = (BorderTransfer.SEND_F, BorderTransfer.SEND_B).index(transfer)
        return (2 * part + way) * self.microbatches + microbatch

    def crosses(self, device: str, part: int, microbatch: int) -> bool:
        """Return whether a micro-batch's neighbour on this part exists, and is another device."""
        return 0 <= part < len(self.layers) and self.owner(part, microbatch) != device


def read_pipeline(data: Any, name: str) -> PipelinePlan:
    """Return the pipeline of a plan.yaml. Raises ConfigError if it has none, or one that cannot be played."""
    found = data.get("pipeline") if isinstance(data, Mapping) else None
    if not isinstance(found, Mapping):
        plan = data.get("plan") if isinstance(data, Mapping) else data
        raise ConfigError(f"{name}: pipeline: expected a pipeline, got {plan!r}, which has no stages")
    try:
        stages = tuple(tuple(map(str, stage["devices"])) for stage in found["stages"])
        count = int(found["ministages"])
        layers = tuple((int(a), int(b)) for v in range(count) for a, b in (s["layers"][v] for s in found["stages"]))
        orders = {str(d): parse_order(str(text)) for d, text in found["orders"].items()}
        plan = PipelinePlan(
            model=str(data["model"]),
            samples=int(found["samples"]),
            stages=stages,
            layers=layers,
            recompute=bool(found["recompute"]),
            bf16_borders=bool(found.get("bf16_borders", False)),
            orders=orders,
            shares={device: list_share(order) for device, order in orders.items()},
            offload=bool(found["offload"]),
            memory={str(d): float(of["peak"]) for d, of in found.get("memory", {}).items()},
            timeline=parse_timeline(found.get("timeline", {})),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{name}: pipeline: expected what `dips plan cluster` writes, got {error!r}") from error
    _check_plan(plan, f"{name}: pipeline")
    return plan


def read_gears(data: Mapping[str, Any], plan: PipelinePlan, name: str) -> tuple[dict[int, PipelinePlan], Gears]:
    """Return the gears of a plan.yaml by pieces of a micro-batch, to play and to simulate; the plan's own, of one
    piece, is always there. Raises ConfigError for gears that cannot be played.
    """
    gears = parse_gears(data["pipeline"], name)
    plans = {1: plan}
    for pieces, gear in gears.items():
        orders = {d.name: d.order for stage in gear.stages for d in stage.devices}
        plans[pieces] = plan.cut(pieces, orders)
        if plan.samples % pieces or plans[pieces].microbatches != pieces * plan.microbatches:
            raise ConfigError(
                f"{name}: pipeline.gears: expected {pieces * plan.microbatches} pieces of micro-batches of "
                f"{plan.samples} samples, cut into {pieces}, got {plans[pieces].microbatches}"
            )
        _check_plan(plans[pieces], f"{name}: pipeline.gears of {pieces} pieces")
    return plans, gears


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_plan(plan: PipelinePlan, name: str) -> None:
    def refuse(text: str) -> None:
        raise ConfigError(f"{name}: {text}")

    edges = [edge for part in plan.layers for edge in part]
    if edges[:1] != [0] or any(a >= b for a, b in plan.layers) or edges[1:-1:2] != edges[2::2]:
        refuse(f"expected parts that follow each other from layer 0 on, got {list(map(list, plan.layers))}")
    if len(set(plan.devices)) != len(plan.devices) or set(plan.devices) != set(plan.orders):
        refuse("expected an order for each device, and each device in one stage")
    if not all(plan.stages):
        refuse(f"stage {plan.stages.index(())}: expected at least one device")
    numbers = set(plan.shares[plan.stages[0][0]]).union(*(plan.shares[d] for d in plan.stages[0]))
    if plan.samples < 1 or numbers != set(range(len(numbers))):
        refuse(f"expected micro-batches numbered from 0, of at least one sample, got {sorted(numbers)}")
    for s, stage in enumerate(plan.stages):
        dealt = sorted(m for device in stage for m in plan.shares[device])
        if dealt != sorted(numbers) or not all(plan.shares[device] for device in stage):
            refuse(f"stage {s}: expected each micro-batch on one of its devices, and one for each, got {dealt}")
    for device, order in plan.orders.items():
        _check_order(plan, device, order, refuse)
    _check_end(plan, refuse)
    for s, stage in enumerate(plan.stages):
        met = [[(a.op, a.part) for a in plan.orders[device] if a.op in (Op.UNSHARD, Op.REDUCE)] for device in stage]
        if any(of != met[0] for of in met):
            refuse(f"stage {s}: expected UNSHARD and REDUCE_GRAD of its parts in one order on {', '.join(stage)}")


def _check_order(plan: PipelinePlan, device: str, order: Sequence[ScheduledAction], refuse: Any) -> None:
    """Each pass of each micro-batch on each part once, and a reduction of each part after its last."""
    parts, share = set(plan.parts_of(device)), set(plan.shares[device])
    if (odd_one := next((action for action in order if action.part not in parts), None)) is not None:
        refuse(f"orders.{device}: expected actions of its parts, {sorted(parts)}, got {odd_one}")
    computed = [(a.op, a.part, a.microbatch) for a in order if a.op in COMPUTING]
    split = any(op is Op.I for op, _, _ in computed)
    passes = (Op.F, Op.I, Op.W) if split else (Op.F, Op.B)
    wanted = {(op, part, m) for op in passes for part in parts for m in share}
    if len(computed) != len(wanted) or set(computed) != wanted:
        odd = sorted(set(computed) ^ wanted, key=str)
        refuse(f"orders.{device}: expected {', '.join(passes)} of each of its micro-batches once, see {odd[:1]}")
    for part in parts:
        at = [i for i, a in enumerate(order) if a.part == part and a.op is Op.REDUCE]
        last = max(i for i, a in enumerate(order) if a.part == part and a.op in COMPUTING)
        if len(at) != 1 or at[0] < last:
            refuse(f"orders.{device}: expected one {part}REDUCE_GRAD, after all other actions of part {part}")
    at_most_once = {action: i for i, action in enumerate(order)}
    for i, (op, part, m) in enumerate((a.op, a.part, a.microbatch) for a in order):
        if op not in (Op.OFFLOAD, Op.FETCH):
            continue
        before, after = Op.F if op is Op.OFFLOAD else Op.OFFLOAD, Op.I if split else Op.B
        begin, end = (at_most_once.get(ScheduledAction(one, part, m), -1) for one in (before, after))
        if not plan.offload or not 0 <= begin < i < end:
            refuse(f"orders.{device}: expected {order[i]} after {part}{before}{m}, before {part}{after}{m}")


def _check_end(plan: PipelinePlan, refuse: Any) -> None:
    """Play all orders in turn, as ranks that wait for each other do; refuse those in which all wait."""
    left = {device: list(lower_order(plan, device)) for device in plan.devices}
    sent: set[tuple[Op | BorderTransfer, int, int | None]] = set()
    gathered: dict[tuple[int, int], set[str]] = {}  # part and how often: who has asked for it
    reduced: dict[int, set[str]] = {}
    asked = {device: dict.fromkeys(plan.parts_of(device), 0) for device in plan.devices}

    def can_play(device: str, action: RankAction) -> bool:
        stage, (op, part, m) = plan.stages[plan.stage_of(device)], action
        if op is Op.UNSHARD:
            asked[device][part] += 1
            gathered.setdefault((part, asked[device][part]), set()).add(device)
        elif op is Op.REDUCE:
            came = reduced.setdefault(part, set())
            came.add(device)
            return len(came) == len(stage)
        elif isinstance(op, BorderTransfer):
            if op in (BorderTransfer.SEND_F, BorderTransfer.SEND_B):
                sent.add((op, part, m))
        elif op in COMPUTING and m is not None:
            if len(stage) > 1 and len(gathered.get((part, asked[device][part]), ())) < len(stage):
                return False
            if op is Op.F and plan.crosses(device, part - 1, m):
                return (BorderTransfer.SEND_F, part - 1, m) in sent
            if op in (Op.I, Op.B) and plan.crosses(device, part + 1, m):
                return (BorderTransfer.SEND_B, part + 1, m) in sent
        return True

    moved = True
    while moved:
        moved = False
        for device, actions in left.items():
            while actions and can_play(device, actions[0]):
                actions.pop(0)
                moved = True
    if waiting := [device for device, actions in left.items() if actions]:
        refuse(f"orders: {', '.join(waiting[:3])} would wait for each other for ever; plan again")


# ---- transfers -------------------------------------------------------------------------------------------------------


def lower_order(plan: PipelinePlan, device: str) -> list[RankAction]:
    """Return a device's order of a training step, with its transfers."""
    sharded = len(plan.stages[plan.stage_of(device)]) > 1
    made: list[RankAction] = []
    over: set[int] = set()  # parts of which all is computed: their RESHARD comes after the reduction
    ends = {a.part: i for i, a in enumerate(plan.orders[device]) if a.op in COMPUTING}
    for i, action in enumerate(plan.orders[device]):
        # A step follows its REDUCE_GRAD at once.
        if action.op is Op.STEP or (action.op is Op.RESHARD and action.part in over):
            continue
        # A FETCH begins beside the computation before it in the order, so it is asked for first.
        beside = action.op is Op.FETCH and made and made[-1].op in COMPUTING
        made.insert(len(made) - 1 if beside else len(made), RankAction(action.op, action.part, action.microbatch))
        if ends[action.part] == i:
            over.add(action.part)
        if action.op is Op.REDUCE and sharded:
            made.append(RankAction(Op.RESHARD, action.part))
    return _add_transfers(plan, device, _add_shards(plan, made, sharded))


def lower_forward(plan: PipelinePlan, device: str) -> list[RankAction]:
    """Return a device's order of an evaluation: its forwards alone, each part gathered while it computes."""
    sharded = len(plan.stages[plan.stage_of(device)]) > 1
    forwards = [RankAction(a.op, a.part, a.microbatch) for a in plan.orders[device] if a.op is Op.F]
    ends, begun, made = {action.part: i for i, action in enumerate(forwards)}, set(), []
    for i, action in enumerate(forwards):
        if sharded and action.part not in begun:
            begun.add(action.part)
            made.append(RankAction(Op.UNSHARD, action.part))
        made.append(action)
        if sharded and ends[action.part] == i:
            made.append(RankAction(Op.RESHARD, action.part))
    return _add_transfers(plan, device, _add_shards(plan, made, sharded))


def _add_shards(plan: PipelinePlan, actions: Sequence[RankAction], sharded: bool) -> list[RankAction]:
    """Add FETCH and OFFLOAD of whole parts, if their shards wait in host memory: `RESIDENT` are on the device at most.

    A sharded part is fetched where its UNSHARD was, which comes later, and offloaded after its RESHARD. A part that one
    device holds is fetched when the part before the last one is offloaded.
    """
    if not plan.moves_shards:
        return list(actions)
    made: list[RankAction] = []
    if sharded:
        late = {i: _delay_gather(actions, i) for i, action in enumerate(actions) if action.op is Op.UNSHARD}
        for i, action in enumerate(actions):
            made += [RankAction(Op.FETCH, action.part)] if action.op is Op.UNSHARD else [action]
            made += [RankAction(Op.OFFLOAD, action.part)] if action.op is Op.RESHARD else []
            made += [actions[of] for of, at in late.items() if at == i]
        return made
    passes: list[list[int]] = []  # part, and the number of its last action
    for i, (op, part, _) in enumerate(actions):
        if op in COMPUTING and (not passes or passes[-1][0] != part):
            passes.append([part, i])
        if op in COMPUTING or op is Op.REDUCE:
            next(of for of in reversed(passes) if of[0] == part)[1] = i
    ends = {last: number for number, (_, last) in enumerate(passes)}
    made += [RankAction(Op.FETCH, part) for part, _ in passes[:RESIDENT]]
    for i, action in enumerate(actions):
        made.append(action)
        if i in ends:
            made.append(RankAction(Op.OFFLOAD, action.part))
            made += [RankAction(Op.FETCH, part) for part, _ in passes[ends[i] + RESIDENT : ends[i] + RESIDENT + 1]]
    return made


def _add_transfers(plan: PipelinePlan, device: str, actions: Sequence[RankAction]) -> list[RankAction]:
    """Add a send after each computation whose result another device needs, and a receive `AHEAD` of each use."""
    receives: list[list[RankAction]] = []  # by computation
    for op, part, m in actions:
        if op in COMPUTING and m is not None:
            needed = []
            if op is Op.F and plan.crosses(device, part - 1, m):
                needed.append(RankAction(BorderTransfer.RECV_F, part, m))
            if op in (Op.I, Op.B) and plan.crosses(device, part + 1, m):
                needed.append(RankAction(BorderTransfer.RECV_B, part, m))
            receives.append(needed)
    made: list[RankAction] = [receive for needed in receives[:AHEAD] for receive in needed]
    number = 0
    for action in actions:
        op, part, m = action
        if op in COMPUTING:
            made += receives[number + AHEAD] if number + AHEAD < len(receives) else []
            number += 1
        made.append(action)
        if m is not None and op is Op.F and plan.crosses(device, part + 1, m):
            made.append(RankAction(BorderTransfer.SEND_F, part, m))
        if m is not None and op in (Op.I, Op.B) and plan.crosses(device, part - 1, m):
            made.append(RankAction(BorderTransfer.SEND_B, part, m))
    return made


def _delay_gather(actions: Sequence[RankAction], at: int) -> int:
    """Return the number of the action after which a part is gathered whose UNSHARD was at `at`: halfway to its use, so
    that its FETCH has time, and before the next collective, so that all ranks of the stage come to them in one order.
    """
    between = []
    for i, (op, part, _) in enumerate(actions[at + 1 :], at + 1):
        if op in (Op.UNSHARD, Op.REDUCE) or (op in COMPUTING and part == actions[at].part):
            break
        between += [i] if op in COMPUTING else []
    return between[(len(between) - 1) // 2] if between else at


# ---- seconds of a step -----------------------------------------------------------------------------------------------


class DeviceWork(StrEnum):
    """Computations of a rank's device."""

    FORWARD = "forward"
    BACKWARD = "backward"  # that of the input, where it is split
    WEIGHT = "weight"
    OPTIMIZER = "optimizer"


class IdleCause(StrEnum):
    """Reasons for which a rank's device computes nothing: what is waited for."""

    BORDER = "border"  # a tensor of another stage, or another stage that takes one
    GATHER = "gather"  # parameters of its stage
    REDUCE = "reduce"  # gradients of its stage
    COPY = "copy"  # what was in host memory
    TIED = "tied"  # gradients and values of shared parameters
    NORM = "norm"  # of the whole model's gradient
    END = "end"  # ranks whose step takes longer
    RUNTIME = "runtime"  # nothing: what happens between two actions


class TimedSpan(NamedTuple):
    """Something that a rank did, or waited for, in seconds of its machine's clock."""

    kind: DeviceWork | IdleCause
    action: str
    begin_s: float
    end_s: float


RankSeconds = Mapping[str, float]  # by DeviceWork and IdleCause


def settle_seconds(ranks: Sequence[tuple[RankSeconds, float]]) -> list[dict[str, float]]:
    """Return each rank's seconds by work and cause, which add up to the step: to that of the slowest rank.

    ranks   of each what it has recorded, and how long its step took
    """
    step_s = max(own_s for _, own_s in ranks)
    return [
        {**spent, IdleCause.RUNTIME: max(0.0, own_s - sum(spent.values())), IdleCause.END: step_s - own_s}
        for spent, own_s in ranks
    ]


def average_seconds(ranks: Sequence[RankSeconds]) -> dict[str, float]:
    """Return the mean of some ranks' seconds, by work and cause."""
    kinds = sorted({kind for of in ranks for kind in of})
    return {kind: sum(of.get(kind, 0.0) for of in ranks) / len(ranks) for kind in kinds}


def describe_stage(ranks: Sequence[RankSeconds], peaks: Sequence[Mapping[str, int]]) -> dict[str, dict[str, Any]]:
    """Return how a stage's ranks played a step, by the fields of PlayedStage: mean seconds, and the highest peaks."""
    mean = average_seconds(ranks)
    return {
        "seconds": {str(kind): mean[kind] for kind in DeviceWork if kind in mean},
        "idle": {str(kind): mean[kind] for kind in IdleCause if kind in mean},
        "peak_bytes": {category: max(of[category] for of in peaks) for category in peaks[0]},
    }


# ---- seconds of transfers --------------------------------------------------------------------------------------------

WAITED_S = 0.002  # a receiver that waits for less has not waited: so long takes a look at what is there


def match_transfers(
    plan: PipelinePlan, ranks: Sequence[Mapping[str, Any]], border_bytes: Sequence[float], pieces: int
) -> list[TimedTransfer]:
    """Return the transfers of a step, in the order of their arrival, with the seconds that each took.

    ranks         of each rank `sent` and `came` as `StepTimes` has them, by tags as text, in seconds of the step
    border_bytes  of a micro-batch that is not cut, after each part

    Gloo moves a tensor when both ends have named it, one after the other between two ranks: a transfer takes from the
    last of these until it is here. If it, or the one before it, came before it was waited for, that is only a bound.
    """
    sent = {int(tag): at for of in ranks for tag, at in of["sent"].items()}
    came = {int(tag): times for of in ranks for tag, times in of["came"].items()}
    found = []
    before = dict[tuple[str, str], tuple[float, bool]]()  # the last transfer of two devices: when it was here, exactly
    for tag, (asked, waited, here) in sorted(came.items(), key=lambda row: row[1][2]):
        (part, back), m = divmod(tag // plan.microbatches, 2), tag % plan.microbatches
        sender, receiver = plan.owner(part, m), plan.owner(part + (-1 if back else 1), m)
        begin, exact = max(sent[tag], asked), here - waited > WAITED_S
        last, was_exact = before.get((sender, receiver), (0.0, True))
        before[sender, receiver] = here, exact
        if last > begin and was_exact:
            begin = last
        nbytes = border_bytes[part - back] / pieces
        found.append(TimedTransfer(sender, receiver, nbytes, here - begin, exact and (was_exact or last <= begin)))
    return found
