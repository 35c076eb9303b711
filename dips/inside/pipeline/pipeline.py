"""A planned pipeline in a training script: no server and no agent, only the ranks of one job.

    def build():                                         # the layers in order; a generator makes one at a time
        yield nn.Embedding(...)
        for _ in range(32):
            yield Block(...)
        yield Head(...)

    pipe = Pipeline(build, "plan.yaml", loss=summed_loss, optimizer=lambda part: AdamW(part.parameters(), lr=3e-4))
    for batch in loader:                                 # (inputs, targets) of the whole batch, the same on all ranks
        loss = pipe.step(batch)

A step's gradients are those of one device: the loss is the sum over all tokens of the batch, divided by their number.
The gradients of a part are reduced over its stage right after its last backward, and its optimizer steps at once, while
other parts still compute (Zorse §4.1.2); with `max_grad_norm`, which needs the whole model's norm, all step at the end.
Under Di-PS the job is one cluster: `OuterLoop(pipe.parts)`, then `outer.step(tokens=pipe.tokens, loss=loss)`.

With `adapt` the micro-batches are cut into more or fewer pieces when links sag, between two steps: the same gradients
from other orders of the plan; and where that does not help, a new plan is made (dips/inside/planning/adapt.py). An
OuterLoop over the parts, if the script has one, is told of it, and how each step was played.

What the caller must do: the constructor, `step`, `evaluate`, `state_dict`, `load_state_dict` and `close` are
collective: all ranks call them, in the same order.

Parameters that layers share are trained as one (tied.py): the first layer's optimizer steps them, after all backwards.

Known limits: layers take and give one tensor. Mixed precision by FSDP's policy is not built. Where a stage is sharded,
both of its ministages at work are whole.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dips.client.parallel.adapter import is_dtensor
from dips.client.parallel.devices import find_device
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.outer_loop import find_loop
from dips.errors import ConfigError, DipsError, Diverged, LocalProtocolError, Unavailable
from dips.files import write_output
from dips.inside.agreement import agree, compare
from dips.inside.pipeline.memory import EmulatedDevice, MemoryAccount, OutOfDeviceMemory
from dips.inside.pipeline.offload import RankDevice
from dips.inside.pipeline.orders import (
    BorderTransfer,
    DeviceWork,
    IdleCause,
    PipelinePlan,
    RankAction,
    TimedSpan,
    average_seconds,
    describe_stage,
    lower_forward,
    lower_order,
    match_transfers,
    read_gears,
    read_pipeline,
    settle_seconds,
)
from dips.inside.pipeline.parts import Build, LayerShapes, PipelinePart, build_layers, make_part
from dips.inside.pipeline.replan import PlanReplaced, PlanReplacement
from dips.inside.pipeline.tied import TiedParameters
from dips.inside.pipeline.torch_runtime import Loss, PartBorders, RankRuntime, RankStage, StepTimes
from dips.inside.planning.adapt import Adapting, GearAdapter, GearChange, Gears, PlanChange
from dips.inside.planning.profile import GB
from dips.inside.planning.schedules import Engine, Op
from dips.inside.planning.simulate import ActionSpan, simulate
from dips.inside.planning.timeline import MEASURED, PLANNED, chrome_trace

STEP = "step"  # of the seconds of a step, all
WORK = {Op.F: DeviceWork.FORWARD, Op.I: DeviceWork.BACKWARD, Op.B: DeviceWork.BACKWARD, Op.W: DeviceWork.WEIGHT}
REPORT_S = 5.0  # between two reports to the run of how a step was played
IGNORED = -100  # a target that does not count, as torch's cross_entropy has it by default
LOG = structlog.get_logger()
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by names of parameters, as other plans have them


@dataclass(slots=True)
class RankGear:
    """Orders, runtime and micro-batches of a rank in one gear of the plan (dips/inside/planning/adapt.py)."""

    pieces: int  # of a micro-batch of the plan
    plan: PipelinePlan
    own: tuple[int, ...]  # micro-batches of this rank
    runtime: RankRuntime
    borders: Mapping[int, PartBorders]  # by part
    train_order: list[RankAction] = field(init=False)
    forward_order: list[RankAction] = field(init=False)
    traced: tuple[Any, ...] | None = None  # inputs for which the shapes of the borders are known
    targets: Sequence[torch.Tensor] = ()  # of this rank's micro-batches

    def set_orders(self, device: str) -> None:
        """Take this device's orders from the plan, with its micro-batches numbered from 0, as torch's runtime does."""
        number = {m: i for i, m in enumerate(self.own)}
        self.train_order, self.forward_order = (
            [a if a.microbatch is None else a._replace(microbatch=number[a.microbatch]) for a in order]
            for order in (lower_order(self.plan, device), lower_forward(self.plan, device))
        )


class Pipeline:
    """One rank's parts of a model, and the step of all ranks."""

    def __init__(
        self,
        build: Build,
        plan: str | os.PathLike[str] | Mapping[str, Any],
        *,
        loss: Loss,
        optimizer: MakeOptimizer | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        device_name: str | None = None,
        collective_s: float = 600.0,
        adapt: str = Adapting.OFF,
        emulate: EmulatedDevice | None = None,
    ) -> None:
        """Build this rank's layers, and shard them over its stage.

        build          returns the model's layers in order; called under `seed`, so that all ranks have one model
        plan           plan.yaml of `dips plan cluster`, or its contents
        loss           loss(output, targets) of a micro-batch: the sum over its tokens
        optimizer      makes the optimizer of one part; None: gradients stay on the parameters, and the caller steps
        max_grad_norm  clips the norm of the whole model's gradient; parts then step at the end of a step, not at once
        seed           of the model's first values, and of dropout: it depends on step, layer and micro-batch alone
        device         of this rank
        device_name    this rank's device in the plan; by default rank i is the i-th, stage by stage
        collective_s   a rank that misses a transfer or a collective for this long ends the job, with a sentence
        adapt          what is changed when links sag. "gears": micro-batches are cut into more or fewer pieces between
                       steps, and gradients stay as they are; a plan without gears is played as it is. "ask": it also
                       says when another plan would be faster, and writes it beside `plan`, which is a file then.
                       "auto": it takes that plan, and raises PlanReplaced after the next accepted push
        emulate        a slower device with less memory that this rank's stands for, to try a plan without it
        Errors         ConfigError, the same on every rank: a plan for another model, other devices or another number of
                       ranks, or for more memory than a device has; no sequence of layers, a layer that a pipeline
                       cannot run; ranks that differ
        """
        if not dist.is_initialized():
            raise ConfigError("Pipeline: call torch.distributed.init_process_group first")
        self._collectives = JobCollectives(collective_s)
        self._collective_s, self._rank = collective_s, dist.get_rank()
        data, self._plan, (plans, gears) = agree(self._collectives, lambda: _read_plan(plan, max_grad_norm, adapt))
        everyone = [list(range(dist.get_world_size()))]
        given = {"plan": data, "seed": seed, "max_grad_norm": max_grad_norm, "optimizer": optimizer is not None}
        given["adapt"], adapting = str(adapt), Adapting(adapt)
        compare(self._collectives, "the arguments of Pipeline", given, everyone)
        self._ranks = self._place_ranks(device_name)
        self._name = next(name for name, rank in self._ranks.items() if rank == self._rank)
        self._numbers = list(self._plan.parts_of(self._name))
        self._device, emulated = torch.device(device), emulate or EmulatedDevice()
        agree(self._collectives, lambda: self._check_device(emulated, optimizer is not None))
        wanted = [range(*self._plan.layers[number]) for number in self._numbers]
        kept, self._shapes = agree(
            self._collectives, lambda: _build(build, seed, wanted, self._plan, optimizer is not None)
        )
        compare(self._collectives, "the parameters that layers of `build` share", self._shapes.ties, everyone)
        self._seed, self._max_grad_norm = seed, max_grad_norm
        self._timeout = timedelta(seconds=collective_s)
        self._stage_group = self._make_groups()
        self.parts: list[PipelinePart] = [
            make_part(layers, numbers[0], seed, self._plan.recompute, self._device, self._stage_group, loss_of_part)
            for layers, numbers, loss_of_part in zip(kept, wanted, self._list_losses(), strict=True)
        ]
        """This rank's parts of the model, whose parameters have the names of the whole model; for `OuterLoop`."""
        self._by_number = dict(zip(self._numbers, self.parts, strict=True))
        self._make_optimizer = optimizer
        trained = {n: part for n, part in self._by_number.items() if any(p.requires_grad for p in part.parameters())}
        tags = max(one.tag(BorderTransfer.SEND_F, len(one.layers), 0) for one in plans.values())  # of borders
        self._tied = TiedParameters(self._shapes.ties, self.parts, self._collectives, self._between, tags)
        made = {n: self._tied.leave_out_copies(optimizer(part)) for n, part in trained.items()} if optimizer else {}
        self._optimizers = {n: left for n, left in made.items() if left is not None}
        self._frozen = [part for n, part in self._by_number.items() if optimizer and n not in trained]
        late = [n for n in made if max_grad_norm is not None or self._tied.owned_by(self._by_number[n])]
        self._late = frozenset(late) & self._optimizers.keys()  # what they step by is whole when all is computed
        self._memory = RankDevice(self._plan, self._name, self._device, emulated, self._by_number, self._optimizers)
        self._loss, self._batch_tokens = loss, 1
        self._simulated = gears
        self._played: tuple[RankGear, float, tuple[TimedSpan, ...]] | None = None  # the last step, and when it began
        self._times = StepTimes()
        self._gears = {n: self._make_gear(n, one) for n, one in plans.items() if n == 1 or adapting is not Adapting.OFF}
        self._gear = self._gears[1]
        self._adapter = GearAdapter(gears) if len(self._gears) > 1 and not self._rank else None
        self._replacement: PlanReplacement | None = None
        if adapting in (Adapting.ASK, Adapting.AUTO):
            self._replacement = agree(
                self._collectives, lambda: PlanReplacement(plan, data, gears, adapting, self._rank)
            )
        looks = len(self._gears) > 1 or (gears and self._replacement is not None)
        self._border_bytes = gears[1].border_bytes if looks else ()  # none: transfers are not looked at
        self._decided: GearChange | None = None
        self._reported_s, self._failed, self._closed = 0.0, "", False
        self.last_change: GearChange | None = None
        """The last change of gear, with its reason; None before the first."""
        self.last_seconds: dict[str, float] = {}
        """Seconds of the last step: of the whole `step`, and what they went to, mean of all ranks."""
        self.steps = 0
        """Steps since the pipeline was made, plus those of the loaded checkpoint."""
        self.tokens = 0
        """Tokens of the last step, of all ranks together: targets that are not -100."""
        self.grad_norm: float | None = None
        """Norm of the last step's gradient before it was clipped; None without `max_grad_norm`."""

    @property
    def gear(self) -> int:
        """The pieces that each micro-batch of the plan is cut into, now; 1 without `adapt`."""
        return self._gear.pieces

    @property
    def new_plan(self) -> PlanChange | None:
        """The last plan that was found to be better, and why; None before the first. Only with "ask" and "auto"."""
        return None if self._replacement is None else self._replacement.change

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this rank's parts, for a scheduler of the learning rate."""
        return list(self._optimizers.values())

    @property
    def memory(self) -> MemoryAccount:
        """Bytes that this rank's device holds, by category, and the most of each in the last step."""
        return self._memory.account

    # ---- training ----------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[torch.Tensor]) -> float:
        """Train on a batch; return its loss, the mean over its tokens, on all ranks.

        batch   inputs and targets of the whole batch, [samples, …] each, the same on all ranks; a rank reads the
                inputs of its micro-batches if it holds the first layer, the targets if it holds the last
        Errors  Unavailable: a rank is gone, or did not come within `collective_s`. Diverged: the loss or the norm is
                not finite. ConfigError: a batch of another size. The same on every rank. What a layer, the loss or an
                optimizer raises is raised on its rank.
        """
        inputs, targets = self._take_batch("step", batch)
        with self._explained():
            self._leave_for_plan()
            begin_s = time.monotonic()  # the same moment on all ranks, within the seconds of a small message
            losses = self._play(inputs, targets, trains=True)
            self._exchange_tied(self._tied.sum_gradients)
            if self._max_grad_norm is not None:
                with self._times.spending(IdleCause.NORM):
                    self._clip_gradients()
            for number in self._late:
                self._step_optimizer(number)
            self._memory.end_step()
            self._exchange_tied(self._tied.spread_values)
            loss = self._end_step(losses, begin_s)
        self.steps, self.tokens = self.steps + 1, self._batch_tokens
        if not isfinite(loss):
            self._failed = f"the loss of step {self.steps} is {loss}: load a checkpoint from before, in a new job"
            raise Diverged(self._failed)
        return loss

    def evaluate(self, batch: Sequence[torch.Tensor]) -> float:
        """Return the loss of a batch as `step` takes it, without dropout; parameters stay as they are."""
        inputs, targets = self._take_batch("evaluate", batch)
        training = {module: module.training for part in self.parts for module in part.modules()}
        try:
            with self._explained(), torch.no_grad():
                for part in self.parts:
                    part.eval()
                losses = self._play(inputs, targets, trains=False)
                self._memory.end_step()
                return self._sum_over_ranks(losses)
        finally:
            for module, was in training.items():
                module.training = was

    def _play(
        self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], trains: bool
    ) -> list[torch.Tensor]:
        self._memory.begin_step((*inputs, *targets), trains, (self.gear, self._gear.traced))
        self._times.clear()
        self._gear.targets = targets
        order = self._gear.train_order if trains else self._gear.forward_order
        return self._gear.runtime.play(order, inputs, targets, trains)

    def _take_batch(self, call: str, batch: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return inputs and targets of this rank's micro-batches; refuse a batch that is not as the others'."""
        self._check_usable()
        inputs, targets = batch
        with self._explained():
            self._batch_tokens = agree(self._collectives, lambda: self._check_batch(inputs, targets))
            shapes = {"inputs": list(inputs.shape), "targets": list(targets.shape)}
            here = {"method": call, "tokens": self._batch_tokens, "step": self.steps, "gear": self.gear, **shapes}
            compare(self._collectives, "their calls", here, [list(range(dist.get_world_size()))])
            agree(self._collectives, lambda: self._trace_borders(inputs))
        samples = self._gear.plan.samples
        rows = [slice(m * samples, (m + 1) * samples) for m in self._gear.own]
        first, last = 0 in self._by_number, len(self._plan.layers) - 1 in self._by_number
        return (
            [inputs[row].to(self._device) if first else inputs[row] for row in rows],
            [targets[row].to(self._device) if last else targets[row] for row in rows],
        )

    def _check_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        shared = (named for part in self.parts for named in part.named_parameters() if named[0] in self._shapes.apart)
        for name, p in shared:
            if p.requires_grad:
                raise ConfigError(
                    f"{name}: was unfrozen after Pipeline was made, and several layers share it, which would train it "
                    "apart: unfreeze it before"
                )
        for name, p in (named for part in self._frozen for named in part.named_parameters()):
            if p.requires_grad:
                raise ConfigError(
                    f"{name}: was unfrozen after Pipeline was made, and no optimizer has it, as all of its part was "
                    "frozen: unfreeze it before"
                )
        wanted = self._plan.samples * self._plan.microbatches
        for what, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.ndim < 1 or len(tensor) != wanted:
                raise ConfigError(
                    f"batch: expected {what} of {wanted} samples, {self._plan.microbatches} micro-batches of "
                    f"{self._plan.samples}, got the shape {list(tensor.shape)}"
                )
        tokens = targets.numel() if targets.is_floating_point() else int((targets != IGNORED).sum())
        if not tokens:
            raise ConfigError("batch: expected targets, got none but -100")
        return tokens

    def _trace_borders(self, inputs: torch.Tensor) -> None:
        """Find the shapes of what goes over borders, if the inputs have another shape than before."""
        key = (inputs.shape, inputs.dtype)
        if self._gear.traced != key:
            outputs = self._shapes.trace(inputs[: self._gear.plan.samples])
            for number, borders in self._gear.borders.items():
                first, end = self._plan.layers[number]
                borders.taken, borders.given = outputs[first - 1] if first else None, outputs[end - 1]
            self._gear.traced = key

    def _on_reduced(self, number: int) -> None:
        """Step the optimizer of a part whose gradients are whole, unless others are waited for."""
        if number in self._optimizers and number not in self._late:
            self._step_optimizer(number)

    def _exchange_tied(self, exchange: Callable[[], None]) -> None:
        if self._shapes.ties:
            with self._times.spending(IdleCause.TIED):
                exchange()

    def _prepare(self, action: RankAction) -> None:
        if self._plan.offload:
            with self._times.spending(IdleCause.COPY):
                self._memory.prepare(action)

    def _step_optimizer(self, number: int) -> None:
        if self._plan.moves_shards:
            with self._times.spending(IdleCause.COPY):
                self._memory.await_shards(number)
        with self._times.spending(DeviceWork.OPTIMIZER, f"{number}{Op.STEP}"):
            self._memory.step_optimizer(number, late=number in self._late)

    def _clip_gradients(self) -> None:
        assert self._max_grad_norm is not None
        held = [p.grad.to_local() if is_dtensor(p.grad) else p.grad for p in self._trained() if p.grad is not None]
        mine = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in held)
        self.grad_norm = sqrt(sum(json.loads(one) for one in self._collectives.all_gather(json.dumps(mine).encode())))
        if not isfinite(self.grad_norm):
            self._failed = f"the norm of the gradient is {self.grad_norm} in step {self.steps + 1}, which was not taken"
            raise Diverged(self._failed)
        scale = self._max_grad_norm / (self.grad_norm + 1e-6)  # as torch's clip_grad_norm_
        if scale < 1:
            for gradient in held:
                gradient.mul_(scale)

    def _trained(self) -> Iterator[nn.Parameter]:
        return (p for part in self.parts for p in part.parameters() if p.requires_grad)

    def _sum_over_ranks(self, losses: Sequence[torch.Tensor]) -> float:
        mine = _sum_losses(losses)
        return float(sum(json.loads(one) for one in self._collectives.all_gather(json.dumps(mine).encode())))

    # ---- links that sag ----------------------------------------------------------------------------------------------
    # Rank 0 decides. What it decided after a step goes to all with the losses of the next.

    def _end_step(self, losses: Sequence[torch.Tensor], begin_s: float) -> float:
        """Return the loss of all ranks; tell rank 0 seconds and transfers, and follow what it decided."""
        self._played = self._gear, begin_s, tuple(self._times.spans)
        told: dict[str, Any] = {
            "loss": _sum_losses(losses),
            "spent": (self._times.spent, time.monotonic() - begin_s),
            "peaks": {**self.memory.peaks, "peak": self.memory.peak_bytes},
            "gear": None if self._decided is None else asdict(self._decided),
        }
        if self._border_bytes:
            told["sent"] = {tag: round(at - begin_s, 5) for tag, at in self._times.sent.items()}
            told["came"] = {tag: [round(at - begin_s, 5) for at in each] for tag, each in self._times.came.items()}
        if self._replacement is not None:
            told |= self._replacement.tell()
        ranks = [json.loads(one) for one in self._collectives.all_gather(json.dumps(told).encode())]
        if self._border_bytes and not self._rank:
            self._decide(ranks)
        seconds = settle_seconds([of["spent"] for of in ranks])
        self.last_seconds = {STEP: max(own_s for _, own_s in (of["spent"] for of in ranks)), **average_seconds(seconds)}
        self._tell_run(self._follow(ranks), seconds, [of["peaks"] for of in ranks])
        return float(sum(told["loss"] for told in ranks))

    def _decide(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Decide what to change, by the transfers of a step; on rank 0."""
        measured = match_transfers(self._gear.plan, ranks, self._border_bytes, self._gear.pieces)
        self._decided = None if self._adapter is None else self._adapter.take_transfers(measured)
        if self._replacement is not None:
            self._replacement.take_transfers(measured, time.monotonic())

    def _follow(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Change what rank 0 decided after the step before; return why, by what is changed."""
        news = {}
        if (gear := ranks[0]["gear"]) is not None:
            self.last_change = GearChange(**{**gear, "way": tuple(gear["way"])})
            self._gear = self._gears[self.last_change.new]
            news["gear"] = str(self.last_change)
            if not self._rank:
                LOG.info("gear_changed", old=self.last_change.old, new=self.last_change.new, why=news["gear"])
        if self._replacement is not None:
            loop = find_loop(self.parts)
            if why := self._replacement.follow(ranks, 0 if loop is None else loop.accepted_pushes):
                news["plan"] = why
        return news

    def _tell_run(
        self, news: Mapping[str, str], seconds: Sequence[Mapping[str, float]], peaks: Sequence[Mapping[str, int]]
    ) -> None:
        """Tell the run, if there is one, how the step was played, and what changed after it; on rank 0.

        seconds, peaks  of each rank
        """
        now = time.monotonic()
        if self._rank or (not news and now - self._reported_s < REPORT_S) or (loop := find_loop(self.parts)) is None:
            return
        self._reported_s = now
        step_s, stages = self.last_seconds[STEP], []
        for stage in self._plan.stages:
            of = [self._ranks[device] for device in stage]
            stages.append(describe_stage([seconds[rank] for rank in of], [peaks[rank] for rank in of]))
        idle = sum(self.last_seconds.get(cause, 0.0) for cause in IdleCause) / step_s
        loop.report_pipeline(gear=self.gear, step_s=step_s, idle=idle, stages=stages)
        for what, why in news.items():
            loop.report_change(what, why)

    def _leave_for_plan(self) -> None:
        """Raise PlanReplaced on all ranks, if a push was accepted since all had the new plan."""
        if self._replacement is None or (loop := find_loop(self.parts)) is None:
            return
        if not (why := self._replacement.say_why_over(loop.accepted_pushes)):
            return
        loop.report_change("plan", why, restarts=True)
        self._collectives.all_gather(b"")  # rank 0 has told the agent before a rank ends
        raise PlanReplaced(why)

    # ---- timelines ---------------------------------------------------------------------------------------------------

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write how the last step was played, and beside it how it was predicted, as a trace for ui.perfetto.dev.
        Collective; rank 0 writes the file.

        Each device has a process "planned" and one "measured", which begin at the same moment, and in these a thread
        for each engine. Measured are a rank's work and its waits, by its processor; a plan of before may have no
        prediction.

        Errors  ConfigError, on all ranks: there was no step yet, or the file cannot be written
        """
        self._check_usable()
        if self._played is None:
            raise ConfigError("write_timeline: expected a step before it, of which it is written")
        gear, begin_s, spans = self._played
        mine = [(span.kind, span.action, span.begin_s - begin_s, span.end_s - begin_s) for span in spans]
        with self._explained():
            ranks = [json.loads(one) for one in self._collectives.all_gather(json.dumps(mine).encode())]
            agree(self._collectives, lambda: None if self._rank else self._write_trace(Path(path), gear, ranks))

    def _write_trace(self, path: Path, gear: RankGear, ranks: Sequence[Any]) -> None:
        planned = gear.plan.timeline
        if not planned and gear.pieces in self._simulated:
            planned = tuple(simulate(self._simulated[gear.pieces]).spans)
        measured = [
            ActionSpan(device, _engine_of(kind), action, begin_s, end_s)
            for device, rank in self._ranks.items()
            for kind, action, begin_s, end_s in ranks[rank]
        ]
        write_output(path, json.dumps(chrome_trace({PLANNED: planned, MEASURED: measured}), allow_nan=False))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, for `torch.distributed.checkpoint`; it fits any other plan.

        Load it in place, `dcp.load(state := pipe.state_dict(), …)`, then call `load_state_dict(state)`.
        """
        self._check_usable()
        model: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        for number, part in self._by_number.items():
            model |= _state_of(part)
            if number in self._optimizers:
                optimizer |= _moments_of(part, self._optimizers[number])
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds of this rank's parts, as `state_dict` names it.

        Raises ConfigError, the same on every rank, if it lacks something for one; then nothing of it is loaded.
        """
        self._check_usable()
        models, optimizers, steps = agree(self._collectives, lambda: self._read_checkpoint(state))
        for number, part in self._by_number.items():
            if models[number]:
                set_model_state_dict(part, models[number])
            if number in optimizers:
                set_optimizer_state_dict(part, self._optimizers[number], optimizers[number], options=FLAT)
        self.steps = steps

    def _read_checkpoint(self, state: Mapping[str, Any]) -> tuple[dict[int, Any], dict[int, Any], int]:
        """Return the values for each part and for each optimizer of this rank, and the steps taken."""
        names = {n: list(_state_of(part)) for n, part in self._by_number.items()}
        keys = {n: list(_moments_of(self._by_number[n], optimizer)) for n, optimizer in self._optimizers.items()}
        try:
            models = {n: {name: state["model"][name] for name in of} for n, of in names.items()}
            optimizers = {n: {key: state["optimizer"][key] for key in of} for n, of in keys.items()}
            return models, optimizers, int(state["steps"])
        except KeyError as error:
            raise ConfigError(
                f"Pipeline.load_state_dict: the checkpoint has no {error}: it is of another model or optimizer; load "
                "it in place: dcp.load(state := pipe.state_dict(), …)"
            ) from error

    def close(self) -> None:
        """Give the process groups back, but for the stage's, over which the parameters stay sharded. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._replacement is not None:
                self._replacement.close()
            for group in (self._alone, self._between):
                dist.destroy_process_group(group)
            self._collectives.close()

    def _check_device(self, emulated: EmulatedDevice, steps: bool) -> None:
        """Raise ConfigError if the plan cannot run on this rank's device."""
        emulated.check()
        own = find_device([torch.empty(0, device=self._device)])
        needed, there = self._plan.memory.get(self._name, 0.0), min(emulated.memory_bytes, own.count_memory())
        if needed > there:
            raise ConfigError(
                f"plan: {self._name} needs {needed / GB:.3g} GB of memory, and has {there / GB:.3g}: plan again, with "
                "its memory_gb in profile.yaml"
            )
        if self._plan.moves_shards and not steps:
            raise ConfigError("plan: its ministages wait in host memory: expected `optimizer`, to step them in turn")

    # ---- making ------------------------------------------------------------------------------------------------------

    def _list_losses(self) -> list[Loss | None]:
        """Return the loss for the last part of the model, if it is this rank's, and none for its others."""
        last = len(self._plan.layers) - 1
        return [self._part_of_loss if number == last else None for number in self._numbers]

    def _place_ranks(self, device_name: str | None) -> dict[str, int]:
        """Return the rank of each device. Collective; raises ConfigError unless each has one."""
        devices = self._plan.devices
        own = devices[self._rank] if device_name is None and self._rank < len(devices) else str(device_name)
        names = [one.decode() for one in self._collectives.all_gather(own.encode())]
        if len(names) != len(devices):
            raise ConfigError(f"plan: expected {len(devices)} ranks, one for each device, got {len(names)}")
        if unknown := sorted(set(names) - set(devices)):
            raise ConfigError(f"plan: expected a device of {', '.join(devices)}, got {unknown[0]}")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"plan: expected one rank for each device, got two for {twice}")
        return {name: rank for rank, name in enumerate(names)}

    def _make_groups(self) -> dist.ProcessGroup | None:
        """Make the groups of all ranks for borders, of this rank alone, and of each stage; return this rank's stage's,
        None if it has the stage alone. Collective.
        """
        self._between = dist.new_group(backend="gloo", timeout=self._timeout)
        self._alone = dist.new_group([self._rank], backend="gloo", use_local_synchronization=True)
        mine: dist.ProcessGroup | None = None
        for stage in self._plan.stages:
            if len(stage) > 1:
                group = dist.new_group([self._ranks[device] for device in stage], timeout=self._timeout)
                mine = group if self._name in stage else mine
        return mine

    def _make_gear(self, pieces: int, plan: PipelinePlan) -> RankGear:
        own = plan.shares[self._name]

        def rank_of(part: int, microbatch: int) -> int:
            return self._ranks[plan.owner(part, microbatch)] if 0 <= part < len(plan.layers) else -1

        def tag(transfer: BorderTransfer, part: int, number: int) -> int:
            return plan.tag(transfer, part, own[number])

        @contextmanager
        def computing(part: int, op: Op, number: int) -> Iterator[None]:
            of = self._by_number[part]
            of.targets = self._gear.targets[number]
            drawing = of.seeded(self.steps, own[number]) if op is Op.F else nullcontext()
            spending = self._times.spending(WORK[op], f"{part}{op}{own[number]}")
            with spending, self._memory.computing(part, op, number), drawing:
                yield

        borders = {}
        for number in self._by_number:
            before, after = ([rank_of(at, m) for m in own] for at in (number - 1, number + 1))
            narrow = torch.bfloat16 if plan.bf16_borders else None
            borders[number] = PartBorders(self._between, before, after, tag, self._times, narrow)
        stages = [
            RankStage(
                part, number, len(plan.layers), self._device, self._alone, borders[number], partial(computing, number)
            )
            for number, part in self._by_number.items()
        ]
        # With `recompute` the last layer gives its loss.
        loss = _take_loss if plan.recompute else self._count_loss
        runtime = RankRuntime(
            stages, len(own), loss, self._times, self._on_reduced, self._prepare, self._memory.on_played
        )
        gear = RankGear(pieces, plan, own, runtime, borders)
        gear.set_orders(self._name)
        return gear

    def _part_of_loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(output, targets) / self._batch_tokens

    def _count_loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self._times.spending(DeviceWork.FORWARD, "loss"), self._memory.counting(output):
            return self._part_of_loss(output, targets)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the failure of a transfer or collective into a sentence, the same on every rank."""
        try:
            yield
        except OutOfDeviceMemory as error:
            self._failed = str(error)
            raise
        except DipsError:
            raise
        except RuntimeError as error:
            self._failed = (
                f"a step did not end: a rank is gone, or did not come within {self._collective_s:g} s. Restart the job "
                "from a checkpoint"
            )
            if self._times.failed_here or isinstance(error, torch.OutOfMemoryError):
                raise
            raise Unavailable(self._failed) from error

    def _check_usable(self) -> None:
        if self._closed:
            raise LocalProtocolError("this Pipeline is closed")
        if self._failed:
            raise Unavailable(self._failed)


def _sum_losses(losses: Sequence[torch.Tensor]) -> float:
    return float(sum(float(one.detach()) for one in losses))


def _read_plan(
    plan: str | os.PathLike[str] | Mapping[str, Any], max_grad_norm: float | None, adapt: str
) -> tuple[Mapping[str, Any], PipelinePlan, tuple[dict[int, PipelinePlan], Gears]]:
    """Return the plan's contents, its pipeline, and its gears to play and to simulate."""
    if max_grad_norm is not None and not 0 < max_grad_norm < float("inf"):
        raise ConfigError(f"max_grad_norm: expected a number above 0, got {max_grad_norm}")
    if adapt not in list(Adapting):
        raise ConfigError(f"adapt: expected one of {', '.join(Adapting)}, got {adapt!r}")
    data, name = plan, "plan"
    if not isinstance(plan, Mapping):
        name = str(plan)
        try:
            data = yaml.safe_load(Path(plan).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{plan}: expected a plan of `dips plan cluster`: {error}") from error
    pipeline = read_pipeline(data, name)
    assert isinstance(data, Mapping)
    return data, pipeline, read_gears(data, pipeline, name)


def _build(
    build: Build, seed: int, wanted: Sequence[range], plan: PipelinePlan, steps: bool
) -> tuple[list[dict[str, nn.Module]], LayerShapes]:
    kept, shapes = build_layers(build, seed, wanted)
    if len(shapes.names) != plan.layers[-1][1]:
        raise ConfigError(
            f"plan: it is for {plan.model}, of {plan.layers[-1][1]} layers; `build` has {len(shapes.names)}: plan for "
            "this model, with its layers one by one"
        )
    for name, first in {} if steps else shapes.ties.items():
        raise ConfigError(f"build: {name} and {first} are one parameter: expected `optimizer`, which steps it once")
    return kept, shapes


def _state_of(part: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint has of a part; torch refuses one of layers that hold nothing."""
    return get_model_state_dict(part) if part.state_dict() else {}


def _moments_of(part: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a checkpoint has of an optimizer, by names of parameters; before its first step, what that begins
    with.
    """
    began = bool(optimizer.state)
    found: dict[str, Any] = get_optimizer_state_dict(part, optimizer, options=FLAT)
    if not began:  # torch has taken a step without gradients, to have something to return, and has counted it
        optimizer.state.clear()
        for name, value in found.items():
            if name.endswith(".step") and isinstance(value, torch.Tensor):
                value.zero_()
    return found


def _engine_of(kind: str) -> Engine:
    if kind in list(DeviceWork):
        return Engine.COMPUTE
    return Engine.COPY if kind == IdleCause.COPY else Engine.NETWORK


def _take_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return output
