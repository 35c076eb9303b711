"""Plays a pipeline's machines on the simulation's heap: seconds, idle shares, bytes and peaks of memory.

Each device has a compute, a network and a copy engine. A transfer
queues at everything that it passes (the sender's card, a shared line, the receiver's card), holds each for its bytes at
that thing's own rate, and arrives a latency after the last of them is done with it; so links are first come, first
served, shared by whoever shares a card, and a busy receiver does not hold up what its sender has for others. A
collective begins when all devices of its stage have come to it. A device waits for a reduction before it computes on,
as torch's runtime does. Nothing is random.

Known limits: rates do not change; compute is not slowed by transfers beside it; a collective is one ring at the rate of
its slowest hop; with `offload` shards of idle ministages come and go in no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache, partial
from math import inf

from dips.errors import ConfigError
from dips.inside.planning.schedules import (
    COMPUTING,
    SCHEDULES,
    CompactZeroBubble,
    Engine,
    FrozenOrder,
    Op,
    ScheduledAction,
    ScheduleMachine,
    ScheduleName,
    Seat,
)
from dips.sim.heap import Heap

# ---- what is played --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a transfer: seconds until the first byte arrives, and seconds per byte of each thing it passes."""

    latency_s: float
    uses: tuple[tuple[Hashable, float], ...]

    @property
    def byte_s(self) -> float:
        """Seconds per byte of the slowest thing on the way."""
        return max((cost for _, cost in self.uses), default=0.0)


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one micro-batch on one ministage: forward, backward of the input, backward of the weights."""

    f: float
    i: float
    w: float

    @property
    def total_s(self) -> float:
        return self.f + self.i + self.w


class MemoryCategory(StrEnum):
    """Uses of a device's memory."""

    PARAMETERS = "parameters"  # this device's share
    GATHERED = "gathered"  # whole parameters of a sharded stage, buffers of all-gathers included
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"  # what any action needs while it runs


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Bytes of one ministage on one device."""

    whole: float = 0.0  # parameters, gathered
    gradients: float = 0.0  # whole gradients, from the first backward until they are reduced
    parameters: float = 0.0  # this device's share of them, if they are sharded
    gradient_share: float = 0.0  # from the reduction to the optimizer's step, if they are sharded
    optimizer: float = 0.0  # this device's share of the optimizer's state
    activations: float = 0.0  # of a micro-batch, from F to W
    boundary: float = 0.0  # of these, what `offload` may take to host memory

    @property
    def states(self) -> float:
        """This device's share of parameters, gradients and the optimizer's state."""
        return self.parameters + self.gradient_share + self.optimizer


@dataclass(frozen=True, slots=True)
class PipelineDevice:
    """One device of a stage: its micro-batches, and seconds and bytes of each ministage."""

    name: str
    microbatches: tuple[int, ...]
    seconds: tuple[PassSeconds, ...]
    step_s: tuple[float, ...] = ()  # of the optimizer; none: nothing
    sizes: tuple[PartBytes, ...] = ()
    copy_byte_s: float = 0.0  # between device and host memory
    workspace_bytes: float = 0.0  # what any action needs while it runs
    order: tuple[ScheduledAction, ...] = ()  # frozen: repeated, whatever the schedule would choose; none: it chooses
    seconds_of: Mapping[int, tuple[PassSeconds, ...]] = field(default_factory=dict)  # by slots, where not as `seconds`


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Devices with the same layers, and the collectives among them."""

    devices: tuple[PipelineDevice, ...]
    gather_s: tuple[float, ...] = ()  # of each ministage; none: parameters are not sharded
    reduce_s: tuple[float, ...] = ()
    collective_uses: tuple[Hashable, ...] = ()  # cards that a collective occupies while it runs
    depth: int = 1 << 30
    most_held: int = 1 << 30


@dataclass(frozen=True, slots=True)
class TiedBytes:
    """Parameters that two parts share: after the last action gradients go to the owner, and values come back."""

    copy: int  # part
    owner: int
    gradients: float
    values: float


@dataclass(frozen=True, slots=True)
class SimulatedPipeline:
    """Stages, what goes over their borders, and the ways there.

    With `slots` each stage cuts micro-batches in its own way, as SpanTrain §3.4 does: the batch has so many slots, a
    micro-batch's number is its first, and it ends where the next one of its stage begins. A micro-batch that is large
    beside those of the next stage leaves in their sizes, and one of several small ones begins when all have come.
    Devices then have no `sizes`: memory is not followed.
    """

    schedule: ScheduleName
    stages: tuple[PipelineStage, ...]
    border_bytes: tuple[float, ...]  # of a micro-batch, or slot, after each part but the last
    route: Callable[[str, str], Route]
    ministages: int = 1
    keep: bool = True
    offload: bool = False
    slots: int = 0  # none: micro-batches are the same in all stages
    by_arrival: bool = False  # frozen orders: an action that waits for its input lets those behind it go first
    tied: tuple[TiedBytes, ...] = ()


# ---- what comes of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action of a device, or a transfer, from its begin to its end, in seconds of the step."""

    device: str
    engine: Engine
    action: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Prediction:
    """One step of a pipeline."""

    seconds: float
    idle: dict[str, float]  # share of the step in which a device computes nothing
    bytes_moved: dict[str, float]  # by category: pipeline, gather, reduce, copy, tied
    peak_bytes: dict[str, float]
    category_bytes: dict[str, dict[MemoryCategory, float]]  # by device: the most of each, whenever that was
    orders: dict[str, list[ScheduledAction]]  # all actions in the order of their begin, by device
    spans: list[ActionSpan] = field(default_factory=list)


class StalledPipeline(ConfigError):
    """A schedule in which every device waits for another."""


def simulate(pipeline: SimulatedPipeline, spans: bool = True) -> Prediction:
    """Play one step. Raises StalledPipeline if the schedule does not get to its end, ConfigError for an empty share."""
    return _Play(pipeline, spans).play_step()


class _Memory:
    """Bytes on one device by category, and the most there were."""

    __slots__ = ("held", "most", "now", "peak")

    def __init__(self, start: Mapping[MemoryCategory, float]) -> None:
        self.held = {category: start.get(category, 0.0) for category in MemoryCategory}
        self.most = dict(self.held)
        self.now = self.peak = sum(self.held.values())

    def add(self, category: MemoryCategory, nbytes: float) -> None:
        self.now += nbytes
        self.held[category] += nbytes
        self.peak = max(self.peak, self.now)
        self.most[category] = max(self.most[category], self.held[category])


# What is free when an action has ended: the category, and the bytes by sizes and whether the stage is sharded.
# The gradients of a stage of one device are those that it steps by.
_FREED: dict[Op, tuple[MemoryCategory, Callable[[PartBytes, bool], float]]] = {
    Op.W: (MemoryCategory.ACTIVATIONS, lambda size, _: size.activations),
    Op.B: (MemoryCategory.ACTIVATIONS, lambda size, _: size.activations),
    Op.OFFLOAD: (MemoryCategory.ACTIVATIONS, lambda size, _: size.boundary),
    Op.REDUCE: (MemoryCategory.GRADIENTS, lambda size, sharded: sharded * (size.gradients - size.gradient_share)),
    Op.STEP: (MemoryCategory.GRADIENTS, lambda size, sharded: size.gradient_share if sharded else size.gradients),
}


class _Desk:
    """One device under way."""

    __slots__ = ("busy", "busy_s", "device", "machine", "memory", "order", "reduces", "resident", "stage")

    def __init__(
        self, stage: int, device: PipelineDevice, machine: ScheduleMachine, start: Mapping[MemoryCategory, float]
    ) -> None:
        self.stage, self.device, self.machine = stage, device, machine
        self.busy = dict.fromkeys(Engine, False)
        self.busy_s = 0.0
        self.reduces = False  # torch's runtime waits for a reduction before it goes on
        self.order: list[ScheduledAction] = []
        self.memory = _Memory(start)
        self.resident: dict[int, bool] = defaultdict(bool)  # ministages whose whole gradients are held


class _Play:
    """A pipeline under way."""

    def __init__(self, pipeline: SimulatedPipeline, spans: bool) -> None:
        self._pipeline = pipeline
        self._heap = Heap()
        self._free: dict[Hashable, float] = defaultdict(float)  # when a card or line is free
        self._spans: list[ActionSpan] | None = [] if spans else None
        self._moved: dict[str, float] = defaultdict(float)
        self._came: dict[ScheduledAction, list[_Desk]] = defaultdict(list)  # to a collective
        self._routes: dict[tuple[str, str], Route] = {}
        self._desks = [
            [self._seat_device(s, stage, device) for device in stage.devices] for s, stage in enumerate(pipeline.stages)
        ]
        self._owners = [
            {m: desk for desk in desks for m in desk.device.microbatches} for desks in self._desks
        ]  # by stage and micro-batch
        self._lengths = [_measure_slots(sorted(owners), pipeline.slots) for owners in self._owners]
        self._arrived: dict[tuple[int, Op, int, int], int] = defaultdict(int)  # slots, of what is not whole yet
        self._last_s = 0.0

    def _seat_device(self, s: int, stage: PipelineStage, device: PipelineDevice) -> _Desk:
        p = self._pipeline
        seat = Seat(
            s, len(p.stages), device.microbatches, p.ministages, stage.depth, stage.most_held,
            bool(stage.gather_s), p.keep, p.offload,
        )  # fmt: skip
        start = {
            MemoryCategory.PARAMETERS: [s.parameters if stage.gather_s else s.whole for s in device.sizes],
            MemoryCategory.OPTIMIZER: [s.optimizer for s in device.sizes],
            MemoryCategory.WORKSPACE: [device.workspace_bytes],
        }
        if p.offload and p.ministages > 2:  # parameters of two ministages, the state of one; the rest is in host memory
            for category, count in ((MemoryCategory.PARAMETERS, 2), (MemoryCategory.OPTIMIZER, 1)):
                start[category] = sorted(start[category], reverse=True)[:count]
        machine = FrozenOrder(seat, device.order, p.by_arrival) if device.order else SCHEDULES[p.schedule](seat)
        return _Desk(s, device, machine, {category: sum(held) for category, held in start.items()})

    def play_step(self) -> Prediction:
        desks = [desk for row in self._desks for desk in row]
        for desk in desks:
            self._wake(desk)
        while (timer := self._heap.next_event()) is not None:
            timer.action()
        stuck = [desk.device.name for desk in desks if desk.machine.steps_left]
        if stuck:
            raise StalledPipeline(
                f"schedule {self._pipeline.schedule}: {', '.join(stuck[:3])} wait for each other: give stages equal "
                "shares of the micro-batches, or take breadth_first or compact_zb"
            )
        total = self._exchange_tied(self._exchange_tied(self._last_s, to_owner=True), to_owner=False)
        return Prediction(
            seconds=total,
            idle={d.device.name: 1 - d.busy_s / total if total else 0.0 for d in desks},
            bytes_moved=dict(self._moved),
            peak_bytes={d.device.name: d.memory.peak for d in desks},
            category_bytes={d.device.name: d.memory.most for d in desks},
            orders={d.device.name: d.order for d in desks},
            spans=self._spans or [],
        )

    # ---- engines -----------------------------------------------------------------------------------------------------

    def _wake(self, desk: _Desk) -> None:
        for engine in Engine:
            while not desk.busy[engine] and not (desk.reduces and engine is Engine.COMPUTE):
                action = desk.machine.next_action(engine)
                if action is None:
                    break
                self._begin(desk, engine, action)

    def _begin(self, desk: _Desk, engine: Engine, action: ScheduledAction) -> None:
        v = desk.machine.ministage_of(action)
        size = desk.device.sizes[v] if desk.device.sizes else PartBytes()
        desk.busy[engine] = True
        desk.order.append(action)
        if engine is Engine.NETWORK:
            desk.reduces = action.op is Op.REDUCE
            self._come_to(desk, action, v)
            return
        if action.op in COMPUTING or action.op is Op.FETCH:
            self._hold(desk, action, v, size)
        elif action.op is Op.RESHARD:
            desk.memory.add(
                MemoryCategory.GATHERED, -size.whole
            )  # at once: a collective of the same moment finds the room
        seconds = self._seconds_of(desk, action, v, size)
        if engine is Engine.COMPUTE:
            desk.busy_s += seconds
        else:
            self._moved["copy"] += size.boundary
        self._end_after(desk, engine, action, seconds)

    def _seconds_of(self, desk: _Desk, action: ScheduledAction, v: int, size: PartBytes) -> float:
        device, op = desk.device, action.op
        if op in COMPUTING:
            took = self._computation_seconds(desk, action)[v]
            return {Op.F: took.f, Op.I: took.i, Op.W: took.w, Op.B: took.i + took.w}[op]
        if op is Op.STEP:
            return device.step_s[v] if device.step_s else 0.0
        return size.boundary * device.copy_byte_s if op in (Op.FETCH, Op.OFFLOAD) else 0.0

    def _computation_seconds(self, desk: _Desk, action: ScheduledAction) -> tuple[PassSeconds, ...]:
        device, m = desk.device, action.microbatch
        if not device.seconds_of or m is None:
            return device.seconds
        return device.seconds_of.get(self._lengths[desk.stage][m], device.seconds)

    def _hold(self, desk: _Desk, action: ScheduledAction, v: int, size: PartBytes) -> None:
        if action.op is Op.FETCH:
            desk.memory.add(MemoryCategory.ACTIVATIONS, size.boundary)
        elif action.op is Op.F:
            desk.memory.add(MemoryCategory.ACTIVATIONS, size.activations)
        elif not desk.resident[v]:
            desk.resident[v] = True
            desk.memory.add(MemoryCategory.GRADIENTS, size.gradients)

    def _end_after(self, desk: _Desk, engine: Engine, action: ScheduledAction, seconds: float) -> None:
        begin = self._heap.now
        self._heap.call_later(seconds, str(action.op), partial(self._end, desk, engine, action, begin))

    def _end(self, desk: _Desk, engine: Engine, action: ScheduledAction, begin_s: float) -> None:
        now, v = self._heap.now, desk.machine.ministage_of(action)
        size = desk.device.sizes[v] if desk.device.sizes else PartBytes()
        desk.busy[engine] = False
        desk.reduces = desk.reduces and action.op is not Op.REDUCE
        self._last_s = now
        if self._spans is not None and now > begin_s:
            self._spans.append(ActionSpan(desk.device.name, engine, str(action), begin_s, now))
        if action.op in _FREED:
            category, freed = _FREED[action.op]
            desk.memory.add(category, -freed(size, bool(self._pipeline.stages[desk.stage].gather_s)))
        desk.machine.take_done(action)
        if action.op in (Op.F, Op.I, Op.B):
            self._send(desk, action)
        self._wake(desk)

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def _send(self, desk: _Desk, action: ScheduledAction) -> None:
        """Send what the next part of the model needs, and tell its machine when it is there."""
        forward = action.op is Op.F
        part, last = action.part + (1 if forward else -1), len(self._pipeline.stages) * self._pipeline.ministages - 1
        m = action.microbatch
        assert m is not None
        if not 0 <= part <= last:
            return
        v, s = divmod(part, len(self._pipeline.stages))
        op, border_bytes = Op.F if forward else Op.I, self._pipeline.border_bytes[min(part, action.part)]
        for received, slots in self._list_receivers(desk.stage, s, m):
            to, nbytes = self._owners[s][received], slots * border_bytes
            if to is desk:
                desk.machine.take_arrival(op, v, received)
                continue
            delay_s = self._occupy(self._route(desk.device.name, to.device.name), nbytes, self._heap.now)
            self._moved["pipeline"] += nbytes
            self._heap.call_later(delay_s, "arrival", partial(self._arrive, to, op, v, received, slots))

    def _list_receivers(self, sender: int, receiver: int, m: int) -> list[tuple[int, int]]:
        """Return the micro-batches of stage `receiver` that micro-batch m of stage `sender` is in, and their common
        slots.
        """
        if not self._pipeline.slots:
            return [(m, 1)]
        end, lengths = m + self._lengths[sender][m], self._lengths[receiver]
        common = ((n, min(end, n + length) - max(m, n)) for n, length in lengths.items())
        return [(n, slots) for n, slots in common if slots > 0]

    def _route(self, sender: str, receiver: str) -> Route:
        made = self._routes.get((sender, receiver))
        if made is None:
            made = self._routes[sender, receiver] = self._pipeline.route(sender, receiver)
        return made

    def _exchange_tied(self, begin_s: float, *, to_owner: bool) -> float:
        """Move the bytes of shared parameters one way, each device what it holds; return when all have arrived."""
        ends = [begin_s]
        for tied in self._pipeline.tied:
            copies, owners = (self._desks[part % len(self._desks)] for part in (tied.copy, tied.owner))
            for i, a in enumerate(copies):
                for j, b in enumerate(owners):
                    held = min((i + 1) / len(copies), (j + 1) / len(owners)) - max(i / len(copies), j / len(owners))
                    nbytes = held * (tied.gradients if to_owner else tied.values)
                    if a is b or nbytes <= 0:
                        continue
                    sender, receiver = (a, b) if to_owner else (b, a)
                    route = self._route(sender.device.name, receiver.device.name)
                    ends.append(begin_s + self._occupy(route, nbytes, begin_s))
                    self._moved["tied"] += nbytes
        return max(ends)

    def _occupy(self, route: Route, nbytes: float, now: float) -> float:
        """Reserve everything on the way for these bytes; return the seconds until they have arrived."""
        there = now
        for thing, byte_s in route.uses:
            free = self._free[thing]
            self._free[thing] = free = max(free, now) + nbytes * byte_s
            there = max(there, free)
        return there - now + route.latency_s

    def _arrive(self, desk: _Desk, op: Op, v: int, m: int, slots: int) -> None:
        key = desk.stage, op, v, m
        self._arrived[key] += slots
        if self._arrived[key] < self._lengths[desk.stage][m]:
            return
        desk.machine.take_arrival(op, v, m)
        self._wake(desk)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _come_to(self, desk: _Desk, action: ScheduledAction, v: int) -> None:
        """Begin a collective when the last device of the stage has come to it."""
        stage = self._pipeline.stages[desk.stage]
        came = self._came[action]
        came.append(desk)
        if len(came) < len(stage.devices):
            return
        del self._came[action]
        size = desk.device.sizes[v] if desk.device.sizes else PartBytes()
        seconds, category, nbytes = (
            (stage.gather_s[v] if stage.gather_s else 0.0, "gather", size.whole)
            if action.op is Op.UNSHARD
            else (stage.reduce_s[v] if stage.reduce_s else 0.0, "reduce", size.gradients)
        )
        begin = max(self._heap.now, max((self._free[thing] for thing in stage.collective_uses), default=0.0))
        for thing in stage.collective_uses:
            self._free[thing] = begin + seconds
        n = len(stage.devices)
        self._moved[category] += nbytes * (n - 1)
        for one in came:
            if action.op is Op.UNSHARD:
                one.memory.add(MemoryCategory.GATHERED, one.device.sizes[v].whole if one.device.sizes else 0.0)
            self._end_after(one, Engine.NETWORK, action, begin - self._heap.now + seconds)


def _measure_slots(numbers: Sequence[int], slots: int) -> dict[int, int]:
    """Return the slots of each of a stage's micro-batches, whose numbers ascend."""
    if not slots:
        return dict.fromkeys(numbers, 1)
    return {m: end - m for m, end in zip(numbers, [*numbers[1:], slots], strict=True)}


# ---- bounds ----------------------------------------------------------------------------------------------------------


def bound_step(pipeline: SimulatedPipeline) -> float:
    """Return seconds that no order of this pipeline can beat; what is above the best so far need not be simulated.

    SpanTrain eq. 1, mended: `B` there is the number of micro-batches, not their size, and the sum that fills a stage
    counts once. Each device's own work comes after its first input (the forwards and transfers before it) and ahead
    of what its last backward still causes below it. Zorse eq. 1 is the same bound summed over ministages, with the
    first gather as its start-up.
    """
    stages, p = pipeline.stages, len(pipeline.stages)
    head = [0.0]
    for s in range(p - 1):
        head.append(
            head[-1] + min(d.seconds[0].f for d in stages[s].devices) + _least_transfer(pipeline, s, forward=True)
        )
    tail = [0.0]
    for s in range(1, p):
        tail.append(
            tail[-1]
            + min(d.seconds[0].i for d in stages[s - 1].devices)
            + _least_transfer(pipeline, s - 1, forward=False)
        )
    best = 0.0
    for s, stage in enumerate(stages):
        start = stage.gather_s[0] if stage.gather_s else 0.0
        for d in stage.devices:
            work = len(d.microbatches) * sum(took.total_s for took in d.seconds) + sum(d.step_s)
            # After the last W nothing below waits; after the last I the stages below still have theirs, and a W.
            after = max(0.0, tail[s] + (min(e.seconds[0].w for e in stages[0].devices) if s else 0.0) - _own_w(d))
            best = max(best, max(head[s], start) + work + after)
        best = max(best, sum(stage.gather_s) + sum(stage.reduce_s))
    return max([best, *_load_things(pipeline).values()])


def _load_things(pipeline: SimulatedPipeline) -> dict[Hashable, float]:
    """Seconds for which each card or line is busy at least: what passes it whoever of the next stage it is for."""
    loads: dict[Hashable, float] = defaultdict(float)
    stages, p = pipeline.stages, len(pipeline.stages)
    for stage in stages:
        for thing in stage.collective_uses:
            loads[thing] += sum(stage.gather_s) + sum(stage.reduce_s)
    for part, nbytes in enumerate(pipeline.border_bytes):
        near, far = stages[part % p].devices, stages[(part + 1) % p].devices
        for senders, receivers in ((near, far), (far, near)):  # activations one way, gradients the other
            for a in senders:
                for thing, byte_s in _common_uses(pipeline.route, a.name, tuple(b.name for b in receivers)):
                    loads[thing] += len(a.microbatches) * nbytes * byte_s
            for b in receivers:
                for thing, byte_s in _common_uses(pipeline.route, b.name, tuple(a.name for a in senders), True):
                    loads[thing] += len(b.microbatches) * nbytes * byte_s
    return loads


@lru_cache(maxsize=65536)
def _common_uses(
    route: Callable[[str, str], Route], device: str, others: tuple[str, ...], towards: bool = False
) -> tuple[tuple[Hashable, float], ...]:
    """Return what all ways from a device to some others pass, or with `towards` all ways from them to it."""
    if device in others:
        return ()
    ways = (route(other, device) if towards else route(device, other) for other in others)
    found = set.intersection(*(set(way.uses) for way in ways))
    wanted = "in" if towards else "out"
    return tuple(use for use in found if isinstance(use[0], tuple) and use[0][0] == wanted)


def _own_w(device: PipelineDevice) -> float:
    """The W and steps that a device may still have to do after its last I."""
    return len(device.microbatches) * sum(took.w for took in device.seconds) + sum(device.step_s)


def _least_transfer(pipeline: SimulatedPipeline, s: int, forward: bool) -> float:
    """Seconds of the fastest way over the border after stage s, from whichever device to whichever."""
    near, far = (tuple(d.name for d in pipeline.stages[side].devices) for side in (s, s + 1))
    ways = _list_ways(pipeline.route, near, far) if forward else _list_ways(pipeline.route, far, near)
    return min(latency_s + pipeline.border_bytes[s] * byte_s for latency_s, byte_s in ways)


@lru_cache(maxsize=65536)
def _list_ways(
    route: Callable[[str, str], Route], senders: tuple[str, ...], receivers: tuple[str, ...]
) -> frozenset[tuple[float, float]]:
    """Return (latency, seconds per byte) of the ways between any two devices of two groups."""
    ways = (route(a, b) for a in senders for b in receivers)
    return frozenset((way.latency_s, way.byte_s) for way in ways)


# ---- tuning ----------------------------------------------------------------------------------------------------------


def tune_depths(pipeline: SimulatedPipeline, most_plays: int = 400) -> tuple[SimulatedPipeline, Prediction]:
    """Find the depth of warm-up of each stage of a `compact_zb` pipeline: a grid of base and slope, then one by one.

    Returns the pipeline with its depths, and its prediction; at most about `most_plays` simulations.
    """
    p, total = len(pipeline.stages), max(len(d.microbatches) for s in pipeline.stages for d in s.devices)
    assert SCHEDULES[pipeline.schedule] is CompactZeroBubble
    tried: dict[tuple[int, ...], float] = {}

    def seconds_of(depths: tuple[int, ...]) -> float:
        if depths not in tried:
            tried[depths] = inf if len(tried) >= most_plays else simulate(with_depths(pipeline, depths), False).seconds
        return tried[depths]

    limits = [min(total, stage.most_held) for stage in pipeline.stages]
    bases = sorted({*range(1, min(total, 12) + 1), total})
    grid = [
        tuple(max(1, min(limits[s], base + slope * (p - 1 - s))) for s in range(p))
        for base in bases
        for slope in range(4)
    ]
    best = min(dict.fromkeys([tuple(limits), *grid]), key=seconds_of)
    improved = True
    while improved:
        improved = False
        for s in range(p):
            for change in (-2, -1, 1, 2):
                moved = (*best[:s], max(1, min(limits[s], best[s] + change)), *best[s + 1 :])
                if seconds_of(moved) < tried[best] - 1e-12:
                    best, improved = moved, True
    made = with_depths(pipeline, best)
    return made, simulate(made)


def freeze_orders(pipeline: SimulatedPipeline, orders: Mapping[str, Sequence[ScheduledAction]]) -> SimulatedPipeline:
    """Return the pipeline whose devices repeat these orders."""
    return replace(
        pipeline,
        stages=tuple(
            replace(stage, devices=tuple(replace(d, order=tuple(orders[d.name])) for d in stage.devices))
            for stage in pipeline.stages
        ),
    )


def with_depths(pipeline: SimulatedPipeline, depths: Sequence[int]) -> SimulatedPipeline:
    """Return the pipeline with these depths of warm-up, one for each stage."""
    return replace(pipeline, stages=tuple(replace(s, depth=d) for s, d in zip(pipeline.stages, depths, strict=True)))


def make_chain(
    schedule: ScheduleName,
    seconds: Sequence[PassSeconds],
    link_s: Sequence[float],
    microbatches: int,
    latency_s: float = 0.0,
    most_held: Sequence[int] | None = None,
) -> SimulatedPipeline:
    """Return a pipeline of one device a stage, with this time of a micro-batch on each link, the same both ways."""
    names = [f"g{s}" for s in range(len(seconds))]
    costs: Mapping[tuple[str, str], float] = {
        way: cost for s, cost in enumerate(link_s) for way in ((names[s], names[s + 1]), (names[s + 1], names[s]))
    }
    held = most_held or [1 << 30] * len(seconds)
    return SimulatedPipeline(
        schedule=schedule,
        stages=tuple(
            PipelineStage((PipelineDevice(name, tuple(range(microbatches)), (took,)),), most_held=most)
            for name, took, most in zip(names, seconds, held, strict=True)
        ),
        border_bytes=(1.0,) * (len(seconds) - 1),
        route=lambda a, b: Route(latency_s, (((a, b), costs[a, b]),)),
    )
