"""Pipeline schedules as pure machines: facts in, next action out; one machine for each device.

A machine is told what has arrived and what has ended (`take_arrival`, `take_done`) and asked what an engine of its
device shall do next (`next_action`): the compute engine runs F, I, W, B and STEP, the network engine the collectives
of the device's stage, the copy engine transfers from and to host memory. It has no clock: the simulator and an
executor play the same machine. The order in which it was played is frozen in `Prediction.orders`; an executor repeats
that order.

A *stage* is a group of devices that hold the same layers and share its micro-batches: each micro-batch is on one
device of each stage. With `ministages` V a stage holds V parts of the model, and part v of stage s is number v·p + s
of all.

Must stay true: a machine never asks for an action whose input has not arrived, and with limits of at least 1 it always
gets to its end if its neighbours do.

SpanTrain §3.3.1 and §4.2: weights there are updated out of order, which costs 6 to 8 % more iterations by its own
account. Here W only fills gaps within a step and updates stay synchronous: gradients are those of 1F1B.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from dips.errors import ConfigError


class Op(StrEnum):
    """The operations of a schedule, by the names of torch's pipelining where it has them."""

    F = "F"  # forward
    I = "I"  # backward of the input
    W = "W"  # backward of the weights
    B = "B"  # both at once
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"
    STEP = "STEP"
    FETCH = "FETCH"
    OFFLOAD = "OFFLOAD"


class Engine(StrEnum):
    """The parts of a device that work at the same time, each doing one action after another."""

    COMPUTE = "compute"
    NETWORK = "network"
    COPY = "copy"


COMPUTING = frozenset({Op.F, Op.I, Op.W, Op.B})
ENGINES = {
    **dict.fromkeys((*COMPUTING, Op.RESHARD, Op.STEP), Engine.COMPUTE),
    **dict.fromkeys((Op.UNSHARD, Op.REDUCE), Engine.NETWORK),
    **dict.fromkeys((Op.FETCH, Op.OFFLOAD), Engine.COPY),
}
"""The engine that each operation takes."""


@dataclass(frozen=True, slots=True)
class ScheduledAction:
    """An operation on one part of the model; F, I, W, B, and FETCH and OFFLOAD of activations, name a micro-batch."""

    op: Op
    part: int
    microbatch: int | None = None

    def __str__(self) -> str:
        """Return the action as torch's CSV spells it: 3F0, 1REDUCE_GRAD."""
        return f"{self.part}{self.op}{'' if self.microbatch is None else self.microbatch}"


_SPELLED = re.compile(rf"(\d+)({'|'.join(Op)})(\d*)")


def parse_order(text: str) -> tuple[ScheduledAction, ...]:
    """Return the order that was spelled as its actions, with spaces between. Raises ValueError."""
    return tuple(map(_parse_action, text.split()))


def _parse_action(text: str) -> ScheduledAction:
    found = _SPELLED.fullmatch(text)
    if found is None:
        raise ValueError(f"{text} is no action")
    part, op, microbatch = found.groups()
    return ScheduledAction(Op(op), int(part), int(microbatch) if microbatch else None)


def list_share(order: Sequence[ScheduledAction]) -> tuple[int, ...]:
    """Return the micro-batches of a device, in the order of the forwards of its last part."""
    last = max((a.part for a in order), default=0)
    return tuple(a.microbatch for a in order if a.op is Op.F and a.part == last and a.microbatch is not None)


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one device in a pipeline, and its limits."""

    stage: int
    stages: int
    microbatches: tuple[int, ...]  # those that are this device's, in the order in which it starts them
    ministages: int = 1
    depth: int = 1 << 30  # compact_zb: most micro-batches between F and I; paper's letter: no limit
    most_held: int = 1 << 30  # most micro-batches whose activations are held, F to W
    sharded: bool = False  # parameters and gradients are sharded over the devices of the stage
    keep: bool = True  # parameters stay gathered from forward to backward (ZeRO-2); with False ministages are resharded
    offload: bool = False  # activations between layers, and shards of ministages, wait in host memory


class ScheduleMachine:
    """The part that all schedules share: what has arrived, which part is gathered, what is reduced and stepped.

    A subclass says which computation is next, in `choose_computation`.
    """

    def __init__(self, seat: Seat) -> None:
        """Create the machine of one device. Raises ConfigError for a seat that no device can have."""
        if not seat.microbatches:
            raise ConfigError(f"stage {seat.stage}: expected a micro-batch for each device, got fewer than devices")
        if seat.depth < 1 or seat.most_held < 1:
            raise ConfigError(f"stage {seat.stage}: expected limits of at least 1, got {seat.depth}, {seat.most_held}")
        self.seat = seat
        self.held = 0  # micro-batches whose activations are held
        parts = range(seat.ministages)
        self._total = len(seat.microbatches)
        self._ready: dict[Op, list[set[int]]] = {Op.F: [set() for _ in parts], Op.I: [set() for _ in parts]}
        if seat.stage == 0:
            self._ready[Op.F][0] = set(seat.microbatches)
        self._count = {op: [0] * seat.ministages for op in COMPUTING}
        self._owed: list[list[int]] = [[] for _ in parts]  # micro-batches whose W waits
        self._gathered = [not seat.sharded] * seat.ministages
        self._asked_gather = [not seat.sharded] * seat.ministages  # or under way
        self._reduce: list[int] = []  # ministages whose gradients are whole
        self._step: list[int] = []
        self._reshard: list[int] = []
        self._to_offload: list[tuple[int, int]] = []
        self._fetched: set[tuple[int, int]] = set()
        self._asked_fetch: set[tuple[int, int]] = set()
        self._wanted: list[int] | None = None  # by _wanted_parts; it changes when a pass over a ministage ends
        self.steps_left = seat.ministages

    # ---- facts -------------------------------------------------------------------------------------------------------

    def take_arrival(self, op: Op, ministage: int, microbatch: int) -> None:
        """Record that the input of F, or the gradient for I, is on this device."""
        self._ready[op][ministage].add(microbatch)

    def take_done(self, action: ScheduledAction) -> None:
        """Record that an action that `next_action` returned has ended."""
        v, m, op = self.ministage_of(action), action.microbatch, action.op
        if op in COMPUTING and m is not None:
            self._count[op][v] += 1
            if op is Op.F and self._is_last(v):
                self._ready[Op.I][v].add(m)
            if op is Op.F and self.seat.offload and not self._stays(v, m):
                self._to_offload.append((v, m))
            if op is Op.I:
                self._owed[v].append(m)
            if op in (Op.W, Op.B):
                self.held -= 1
            self._end_passes(v, op)
        elif op is Op.UNSHARD:
            self._gathered[v] = True
        elif op is Op.RESHARD:
            self._gathered[v] = self._asked_gather[v] = False
        elif op is Op.REDUCE:
            self._step.append(v)
        elif op is Op.STEP:
            self.steps_left -= 1
        elif op is Op.FETCH and m is not None:
            self._fetched.add((v, m))

    def _end_passes(self, v: int, op: Op) -> None:
        """After the last computation of a pass over ministage v: reshard, reduce, step."""
        if self._count[op][v] < self._total:
            return
        self._wanted = None
        last = op in (Op.W, Op.B)
        if last:
            self._reduce.append(v)
        # The last ministage's backward follows its forward at once.
        if self.seat.sharded and not self.seat.keep and (last or (op is Op.F and v < self.seat.ministages - 1)):
            self._reshard.append(v)

    # ---- actions -----------------------------------------------------------------------------------------------------

    def next_action(self, engine: Engine) -> ScheduledAction | None:
        """Return what this idle engine shall begin now; None to wait for another fact. What is returned has begun."""
        if engine is Engine.COMPUTE:
            return self._next_computation()
        return self._next_collective() if engine is Engine.NETWORK else self._next_copy()

    def _next_computation(self) -> ScheduledAction | None:
        if self._reshard:
            return self._name(Op.RESHARD, self._reshard.pop(0))
        if self._step:
            return self._name(Op.STEP, self._step.pop(0))
        chosen = self.choose_computation()
        if chosen is None:
            return None
        op, v, m = chosen
        if op is Op.F:
            self._ready[Op.F][v].discard(m)
            self.held += 1
        elif op in (Op.I, Op.B):
            self._ready[Op.I][v].discard(m)
        else:
            self._owed[v].remove(m)
        return self._name(op, v, m)

    def _next_collective(self) -> ScheduledAction | None:
        wanted = self._wanted_parts() if self.seat.sharded else []
        if wanted and not self._asked_gather[wanted[0]]:
            self._asked_gather[wanted[0]] = True
            return self._name(Op.UNSHARD, wanted[0])
        if self._reduce:
            return self._name(Op.REDUCE, self._reduce.pop(0))
        for v in wanted:
            if not self._asked_gather[v]:
                self._asked_gather[v] = True
                return self._name(Op.UNSHARD, v)
        return None

    def _next_copy(self) -> ScheduledAction | None:
        if not self.seat.offload:
            return None
        if self._to_offload:
            v, m = self._to_offload.pop(0)
            return self._name(Op.OFFLOAD, v, m)
        for v, m in self._wanted_activations():
            if (v, m) not in self._asked_fetch:
                self._asked_fetch.add((v, m))
                return self._name(Op.FETCH, v, m)
        return None

    def choose_computation(self) -> tuple[Op, int, int] | None:
        """Return (operation, ministage, micro-batch) of what is next, or None if that has not arrived."""
        raise NotImplementedError

    # ---- for subclasses ----------------------------------------------------------------------------------------------

    def done_count(self, op: Op, v: int = 0) -> int:
        """Return how many micro-batches of ministage v have ended `op`."""
        return self._count[op][v]

    def first_ready(self, op: Op, v: int = 0) -> int | None:
        """Return the first of this device's micro-batches whose F, or I, could begin now; None if there is none."""
        if not self._gathered[v] or not (ready := self._ready[op][v]):
            return None
        usable = ready if op is Op.F or not self.seat.offload else {m for m in ready if self._is_resident(v, m)}
        return min(usable, default=None)

    def first_owed(self, v: int = 0) -> int | None:
        """Return the first micro-batch whose I has ended and whose W has not begun."""
        return self._owed[v][0] if self._owed[v] else None

    def ministage_of(self, action: ScheduledAction) -> int:
        return action.part // self.seat.stages

    def _name(self, op: Op, v: int, m: int | None = None) -> ScheduledAction:
        return ScheduledAction(op, v * self.seat.stages + self.seat.stage, m)

    def _is_last(self, v: int) -> bool:
        return v == self.seat.ministages - 1 and self.seat.stage == self.seat.stages - 1

    def _wanted_parts(self) -> list[int]:
        """Return the ministages that must be gathered, in order: the present one and the next."""
        if self._wanted is None:
            self._wanted = self._list_wanted()
        return self._wanted

    def _list_wanted(self) -> list[int]:
        forward = [v for v in range(self.seat.ministages) if self._count[Op.F][v] < self._total]
        done = [self._count[Op.W][v] + self._count[Op.B][v] for v in range(self.seat.ministages)]
        backward = [v for v in reversed(range(self.seat.ministages)) if done[v] < self._total]
        return list(dict.fromkeys(forward + backward))[: 2 if not self.seat.keep else None]

    # ---- activations in host memory ----------------------------------------------------------------------------------

    def _stays(self, v: int, m: int) -> bool:
        """The last two of the last ministage are needed at once."""
        return v == self.seat.ministages - 1 and m in self.seat.microbatches[-2:]

    def _is_resident(self, v: int, m: int) -> bool:
        return self._stays(v, m) or (v, m) in self._fetched

    def _wanted_activations(self) -> Iterator[tuple[int, int]]:
        """Yield what the next two backwards of breadth_first need, once its forwards are done; of two ministages where
        one ends, so that the next does not wait for the copies of its first.
        """
        if self._count[Op.F][-1] < self._total:
            return
        ministages = reversed(range(self.seat.ministages))
        left = ((v, m) for v in ministages for m in self.seat.microbatches[self._count[Op.B][v] :])
        yield from (one for one in islice(left, 2) if not self._stays(*one))


class BreadthFirst(ScheduleMachine):
    """All micro-batches of a ministage, then the next ministage; backward in reverse (Zorse §4.1.1, Figure 4)."""

    def choose_computation(self) -> tuple[Op, int, int] | None:
        for v in range(self.seat.ministages):
            if self._count[Op.F][v] < self._total:
                m = self.first_ready(Op.F, v)
                return None if m is None else (Op.F, v, m)
        for v in reversed(range(self.seat.ministages)):
            if self._count[Op.B][v] < self._total:
                # In the fixed order where activations are fetched, so that the two that are fetched are the two next.
                m = self.first_ready(Op.I, v)
                if self.seat.offload and m != self.seat.microbatches[self._count[Op.B][v]]:
                    m = None
                return None if m is None else (Op.B, v, m)
        return None


class GPipe(BreadthFirst):
    """All forwards, then all backwards."""


class CompactZeroBubble(ScheduleMachine):
    """F before I before W, whatever has arrived (SpanTrain §3.3.1).

    `Seat.depth` bounds the micro-batches between F and I. The paper's letter has no bound: F always comes first. With
    links slower than a forward that fills the pipeline; tuned per stage it is nearer to the optimum (`tune_depths`).
    """

    def choose_computation(self) -> tuple[Op, int, int] | None:
        forwards, inputs = self.done_count(Op.F), self.done_count(Op.I)
        room = forwards - inputs < self.seat.depth and self.held < self.seat.most_held
        if room and (m := self.first_ready(Op.F)) is not None:
            return Op.F, 0, m
        if (m := self.first_ready(Op.I)) is not None:
            return Op.I, 0, m
        return None if (m := self.first_owed()) is None else (Op.W, 0, m)


class OneForwardOneBackward(ScheduleMachine):
    """1F1B: as many forwards ahead as there are stages from here to the last (PipeDream-Flush)."""

    split = False

    def choose_computation(self) -> tuple[Op, int, int] | None:
        back = Op.I if self.split else Op.B
        forwards, backwards = self.done_count(Op.F), self.done_count(back)
        warm = min(self._total, self.seat.stages - self.seat.stage)
        owed = self.first_owed()
        if forwards < warm or (forwards < self._total and forwards - backwards < warm):
            if self.split and owed is not None and self.held >= max(warm, self.seat.stages):
                return Op.W, 0, owed  # memory first: nowhere more than the first stage of 1F1B holds
            op, m = Op.F, self._in_order(Op.F, forwards)
        else:
            op, m = back, self._in_order(Op.I, backwards)
        if m is not None:
            return op, 0, m
        return None if owed is None else (Op.W, 0, owed)

    def _in_order(self, op: Op, count: int) -> int | None:
        """Return the next micro-batch of the fixed order if it has arrived."""
        if count >= self._total or self.first_ready(op) is None:
            return None
        wanted = self.seat.microbatches[count]
        return wanted if wanted in self._ready[op][0] else None


class ZeroBubbleH1(OneForwardOneBackward):
    """The order of 1F1B with I instead of B; W where the next of these has not arrived (Qi et al. 2023, ZB-H1)."""

    split = True


class FrozenOrder(ScheduleMachine):
    """Repeats the computations of an order, as an executor does: the next one waits for its input, and others behind
    it. With `by_arrival` those behind it do not wait: the first one whose input is here is next (SpanTrain §3.4).
    """

    def __init__(self, seat: Seat, order: Sequence[ScheduledAction], by_arrival: bool = False) -> None:
        super().__init__(seat)
        self._left = deque(action for action in order if action.op in COMPUTING)
        self._by_arrival = by_arrival

    def choose_computation(self) -> tuple[Op, int, int] | None:
        for number, action in enumerate(self._left):
            if self._can_begin(action):
                del self._left[number]
                assert action.microbatch is not None
                return action.op, self.ministage_of(action), action.microbatch
            if not self._by_arrival:
                break
        return None

    def _can_begin(self, action: ScheduledAction) -> bool:
        op, v = action.op, self.ministage_of(action)
        waiting = self._owed[v] if op is Op.W else self._ready[Op.F if op is Op.F else Op.I][v]
        return action.microbatch in waiting and self._gathered[v]


class ScheduleName(StrEnum):
    """The schedules that a plan may name."""

    BREADTH_FIRST = "breadth_first"
    COMPACT_ZB = "compact_zb"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    ZB_H1 = "zb_h1"


SCHEDULES: dict[ScheduleName, Callable[[Seat], ScheduleMachine]] = {
    ScheduleName.BREADTH_FIRST: BreadthFirst,
    ScheduleName.COMPACT_ZB: CompactZeroBubble,
    ScheduleName.GPIPE: GPipe,
    ScheduleName.ONE_F_ONE_B: OneForwardOneBackward,
    ScheduleName.ZB_H1: ZeroBubbleH1,
}
# 1F1B and ZB-H1 wait for the next micro-batch of a fixed order: where stages share micro-batches unequally each could
# wait for the other. These take what has arrived.
READY_DRIVEN = frozenset({ScheduleName.BREADTH_FIRST, ScheduleName.COMPACT_ZB, ScheduleName.GPIPE})
SPLITTING = frozenset({ScheduleName.COMPACT_ZB, ScheduleName.ZB_H1})  # I and W apart
