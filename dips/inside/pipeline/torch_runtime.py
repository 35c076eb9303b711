"""All that the pipeline uses of torch's pipelining under private names; the one file to look at for another torch.

`RankRuntime` plays a rank's order on torch's `_PipelineScheduleRuntime`. torch's own stage has a process group with one
rank for each stage. `RankStage` has this rank alone: it numbers the rank's own micro-batches from 0, and finds each
one's peer by part and micro-batch, with a tag; so stages may have any number of ranks, and ranks any share. Borders go
over gloo, through host memory where the device is another.

`FETCH` and `OFFLOAD`, which torch does not know, are played in between.

Must stay true: one tensor goes over a border, and each other action of `RankAction` is torch's of the same name. What
was handed on is held no longer: of an output its graph alone is kept for the backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from dips.client.parallel.adapter import is_dtensor, is_fsdp
from dips.errors import ConfigError
from dips.inside.pipeline.orders import BorderTransfer, DeviceWork, IdleCause, RankAction, TimedSpan
from dips.inside.planning.schedules import Op

TESTED = "2.13"
if not torch.__version__.startswith(f"{TESTED}."):
    raise ConfigError(
        f"dips.inside.pipeline: expected torch {TESTED}, got {torch.__version__}: it stands on private names of its "
        "pipelining, which another version may have changed. Install the one that it was tested with"
    )

from torch.distributed.pipelining.schedules import (  # noqa: E402
    REDUCE_GRAD,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase  # noqa: E402

Spec = tuple[torch.Size, torch.dtype]  # of the tensor that goes over a border
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COPIES = frozenset({Op.FETCH, Op.OFFLOAD})  # actions that torch's runtime does not know


# ---- memory of a part ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A rank's share of a parameter or of its optimizer's state, which may lie elsewhere than it did."""

    local: torch.Tensor
    sharded: Any = None  # FSDP2's parameter, whose share has a length that is the same on all ranks

    @property
    def data(self) -> torch.Tensor:
        return self.local.data if self.sharded is None else self.sharded._sharded_param_data

    def put(self, data: torch.Tensor) -> None:
        """Let the share lie in this memory, of the shape and type of `data`."""
        if self.sharded is None:
            self.local.data = data
            return
        self.sharded._sharded_param_data = data
        self.local.data = data.view(-1)[: self.local.numel()].view(self.local.shape)  # FSDP2 shards the first dim


def list_shards(part: nn.Module) -> Iterator[tuple[str, LocalShard]]:
    """Yield this rank's shares of a part's parameters, each under a name of its own."""
    groups = _list_groups(part)
    for number, one in enumerate(one for group in groups for one in group.fsdp_params):
        yield str(number), LocalShard(one.sharded_param._local_tensor, one)
    for name, parameter in part.named_parameters() if not groups else ():
        yield name, LocalShard(parameter)


def count_gathered(part: nn.Module) -> int:
    """Return the bytes of whole parameters that FSDP2 holds of a part, buffers of its all-gathers included."""
    groups = _list_groups(part)
    kept = [t for group in groups for p in group.fsdp_params for t in p.all_gather_outputs]
    waiting = [group._all_gather_result.all_gather_output for group in groups if group._all_gather_result is not None]
    return sum(t.untyped_storage().nbytes() for t in (*kept, *waiting))


def count_gradients(part: nn.Module) -> int:
    """Return the bytes of a part's gradients, of this rank's shares and of whole parameters."""
    held = [p.grad for p in part.parameters()]
    for one in (one for group in _list_groups(part) for one in group.fsdp_params):
        whole = getattr(one, "_unsharded_param", None)
        held += [one.sharded_param.grad, whole.grad if whole is not None else None, one.unsharded_accumulated_grad]
    local = [g._local_tensor if is_dtensor(g) else g for g in held if g is not None]
    return sum({(s := g.untyped_storage()).data_ptr(): s.nbytes() for g in local}.values())


def _list_groups(part: nn.Module) -> list[Any]:
    states = (fully_shard.state(module) for module in part.modules() if is_fsdp(module))  # type: ignore[attr-defined]
    return [group for state in states for group in state._fsdp_param_groups]


# ---- borders ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StepTimes:
    """When a rank's transfers went and came in a step, by tag, in seconds of this machine's clock; and what it worked
    at and waited for when, as its processor saw it: an accelerator's work counts where it is waited for.
    """

    sent: dict[int, float] = field(default_factory=dict)  # offered to the receiver
    came: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # asked for, waited for, here
    spans: list[TimedSpan] = field(default_factory=list)  # one after another
    failed_here: bool = False  # an exception came from this rank's own work, as from a layer, the loss or an optimizer

    def clear(self) -> None:
        """Forget them, before a step."""
        for held in (self.sent, self.came, self.spans):
            held.clear()

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by what they went to."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.kind] = found.get(span.kind, 0.0) + span.end_s - span.begin_s
        return found

    @contextmanager
    def spending(self, kind: DeviceWork | IdleCause, action: str = "") -> Iterator[None]:
        """Record this block, in which there is no other; `action` as the plan names it, if it does."""
        begin_s = time.monotonic()
        try:
            yield
        except Exception:
            self.failed_here = self.failed_here or isinstance(kind, DeviceWork)
            raise
        finally:
            self.spans.append(TimedSpan(kind, action or str(kind), begin_s, time.monotonic()))


@dataclass(slots=True)
class TimedReceive:
    """A receive under way; its `wait` tells when it was asked for, waited for, and here."""

    work: Any
    tag: int
    times: StepTimes
    asked_s: float

    def wait(self) -> None:
        """Wait for the transfer, as torch's runtime does right before its use."""
        waited_s = time.monotonic()
        with self.times.spending(IdleCause.BORDER):
            self.work.wait()
        self.times.came[self.tag] = (self.asked_s, waited_s, time.monotonic())


@dataclass(slots=True)
class PartBorders:
    """The ends of a part on one rank: who is beyond each, by the rank's own number of the micro-batch."""

    group: dist.ProcessGroup
    before: Sequence[int]  # rank that computes the part before, for each of this rank's micro-batches
    after: Sequence[int]
    tag: Callable[[BorderTransfer, int, int], int]  # of a send, its part and micro-batch
    times: StepTimes
    dtype: torch.dtype | None = None  # of what is on its way; None: as it is computed
    taken: Spec | None = field(default=None)  # of what the part before gives; the pipeline tells them before each step
    given: Spec | None = field(default=None)

    def narrow(self, computed: torch.dtype) -> torch.dtype:
        """Return in which format a tensor of this one crosses the border."""
        return self.dtype if self.dtype is not None and self.dtype.itemsize < computed.itemsize else computed


class RankStage(_PipelineStageBase):
    """One part of the model on one rank."""

    def __init__(
        self,
        part: nn.Module,
        number: int,
        parts: int,
        device: torch.device,
        alone: dist.ProcessGroup,
        borders: PartBorders,
        around: Callable[[Op, int], AbstractContextManager[None]],
    ) -> None:
        """Make the stage of one part.

        part    its module
        number  of it, among `parts`
        alone   a process group of this rank alone
        around  called with F, I, W or B and the micro-batch's number on this rank; a context manager around it
        """
        super().__init__(part, number, parts, device, alone)
        self._runtime_validate = False  # it would compare with metadata that torch's own stage exchanges
        self._stage_meta.inputs = (None,)  # type: ignore[assignment]  # read for its length
        self._borders, self._around = borders, around
        self._activations: dict[int, torch.Tensor] = {}  # that came from the part before, by micro-batch
        self._gradients: dict[int, torch.Tensor] = {}  # from the part after
        self.sent_bytes = 0  # in host memory until the step ends: gloo tells only who waits that a send is over

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        tag = self._borders.tag(BorderTransfer.SEND_F, self.stage_index - 1, fwd_chunk_id)
        self._activations[fwd_chunk_id] = self._make_receiver(self._borders.taken)
        return [self._receive(self._activations[fwd_chunk_id], self._borders.before[fwd_chunk_id], tag)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        tag = self._borders.tag(BorderTransfer.SEND_B, self.stage_index + 1, bwd_chunk_id)
        self._gradients[bwd_chunk_id] = self._make_receiver(self._borders.given)
        return [self._receive(self._gradients[bwd_chunk_id], self._borders.after[bwd_chunk_id], tag)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        (output,), _ = self.fwd_cache[fwd_chunk_id]
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        tag = self._borders.tag(BorderTransfer.SEND_F, self.stage_index, fwd_chunk_id)
        sent = [self._send(output, self._borders.given, self._borders.after[fwd_chunk_id], tag)]
        _hollow(output)
        return sent

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        if gradient is None:
            gradient = _make_buffer(self._borders.taken).zero_()
        tag = self._borders.tag(BorderTransfer.SEND_B, self.stage_index, bwd_chunk_id)
        return [self._send(gradient, self._borders.taken, self._borders.before[bwd_chunk_id], tag)]

    def _make_receiver(self, spec: Spec | None) -> torch.Tensor:
        assert spec is not None
        return _make_buffer((spec[0], self._borders.narrow(spec[1])))

    def _receive(self, buffer: torch.Tensor, rank: int, tag: int) -> dist.P2POp:
        made = dist.P2POp(dist.irecv, buffer, rank, self._borders.group, tag)
        made.op = self._begin_receive  # torch refuses another operation in the constructor
        return made

    def _begin_receive(self, buffer: torch.Tensor, tag: int, **source: Any) -> TimedReceive:
        return TimedReceive(dist.irecv(buffer, tag=tag, **source), tag, self._borders.times, time.monotonic())

    def _send(self, tensor: torch.Tensor, spec: Spec | None, rank: int, tag: int) -> dist.P2POp:
        """Send what the receiver expects: under autocast a layer may give another format than on the meta device."""
        assert spec is not None
        ready = tensor.detach().to("cpu", self._borders.narrow(spec[1])).contiguous()
        self.sent_bytes += ready.nbytes
        self._borders.times.sent[tag] = time.monotonic()
        return dist.P2POp(dist.isend, ready, rank, self._borders.group, tag)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._activations[mb_index] = prev_stage_outputs.detach()
        _hollow(prev_stage_outputs)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        (gradient,) = next_stage_bwd_outputs
        self._gradients[mb_index] = _make_buffer(self._borders.given).zero_() if gradient is None else gradient

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor]:
        taken = self._take(self._activations.pop(fwd_chunk_id), self._borders.taken)
        return (taken.requires_grad_(self.has_backward and taken.is_floating_point()),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor]:
        return (self._take(self._gradients.pop(bwd_chunk_id), self._borders.given),)

    def _take(self, came: torch.Tensor, spec: Spec | None) -> torch.Tensor:
        """Return what came over a border as this part computes with it."""
        assert spec is not None
        return came.to(self.device).to(spec[1])

    # ---- computation -------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        with self._around(Op.F, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if self.is_last and not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._around(Op.B if full_backward else Op.I, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._around(Op.W, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def clear_runtime_states(self) -> None:
        for held in (self.fwd_cache, self.bwd_cache, self.output_chunks, self._activations, self._gradients):
            held.clear()
        self.sent_bytes = 0

    @property
    def border_bytes(self) -> int:
        """Bytes of tensors in host memory that were sent in this step, or received and not yet used."""
        waiting = (*self._activations.values(), *self._gradients.values())
        return self.sent_bytes + sum(tensor.nbytes for tensor in waiting if tensor.device.type == "cpu")

    # ---- what torch's own stage prepares -----------------------------------------------------------------------------

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        raise AssertionError("RankRuntime tells shapes by PartBorders")

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        raise AssertionError("RankRuntime tells shapes by PartBorders")

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[Any, ...]:
        raise AssertionError("RankRuntime tells shapes by PartBorders")


class _TimedSchedule(_PipelineScheduleRuntime):
    """torch's runtime, which records how long it waits for parameters to be gathered."""

    times: StepTimes

    def _assert_unsharded(self, stage: _PipelineStageBase) -> None:
        with self.times.spending(IdleCause.GATHER) if stage.stage_index in self.unshard_ops else nullcontext():
            super()._assert_unsharded(stage)


class RankRuntime:
    """torch's runtime over the parts of one rank."""

    def __init__(
        self,
        stages: Sequence[RankStage],
        microbatches: int,
        loss: Loss,
        times: StepTimes,
        on_reduced: Callable[[int], None],
        prepare: Callable[[RankAction], None],
        on_played: Callable[[RankAction, int], None],
    ) -> None:
        """Make the runtime.

        microbatches  how many this rank has
        loss          of an output of the last part and its targets, a scalar; gradients are those of the sum of all
        times         where this is recorded: waits for gathers, reductions, and at the end for sends
        on_reduced    called with a part's number when the gradients of its parameters are whole on this rank
        prepare       called before each action; plays a FETCH or OFFLOAD
        on_played     called after each action with the bytes of its part that are on their way, in host memory
        """
        self._stages, self._on_reduced, self._prepare, self._on_played = list(stages), on_reduced, prepare, on_played
        self._schedule = _TimedSchedule(self._stages, microbatches, loss_fn=loss, scale_grads=False)
        self._schedule.times = self._times = times
        self._schedule.register_custom_function(REDUCE_GRAD, self._reduce)
        for stage in self._stages:
            stage.chunks = microbatches

    def play(
        self,
        order: Sequence[RankAction],
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        backward: bool = True,
    ) -> list[torch.Tensor]:
        """Play an order; return the losses of the rank's micro-batches, if it holds the last part.

        order    its micro-batches numbered from 0, in the order of the forwards of the rank's last part
        inputs   of each, read by the first part
        targets  of each, read by the last
        Raises   RuntimeError if a transfer or collective does not end; what a layer or the loss raises, with
                 `failed_here` of the times set
        """
        losses: list[torch.Tensor] = []
        schedule = self._schedule
        for stage in self._stages:
            stage.has_backward = backward
            stage.clear_runtime_states()
        schedule._has_backward = backward
        # What is prepared there is told by PartBorders.
        schedule._stages_forward_initialized, schedule._stages_backward_initialized = True, backward
        with ExitStack() as rest:  # when all is played torch waits for the sends
            ended = partial(rest.enter_context, self._times.spending(IdleCause.BORDER))
            played = _PlayedOrder(order, self._times, self._prepare, self._tell_played, ended)
            schedule.pipeline_order_with_comms = {schedule.rank: played}
            schedule._step_microbatches([(one,) for one in inputs], None, list(targets), losses, return_outputs=False)
        return losses

    def _tell_played(self, action: RankAction) -> None:
        self._on_played(action, self._stage_of(action.part).border_bytes)

    def _stage_of(self, part: int) -> RankStage:
        return next(stage for stage in self._stages if stage.stage_index == part)

    def _reduce(self, action: _Action, ctx: Any) -> None:
        stage = self._stage_of(action.stage_index)
        with self._times.spending(IdleCause.REDUCE, f"{action.stage_index}{Op.REDUCE}"):
            stage.perform_reduce_grad(1)
        self._on_reduced(action.stage_index)


class _PlayedOrder(list[_Action]):
    """An order as torch's runtime walks through it. What it does not know is played in between."""

    def __init__(
        self,
        order: Sequence[RankAction],
        times: StepTimes,
        prepare: Callable[[RankAction], None],
        on_played: Callable[[RankAction], None],
        on_ended: Callable[[], None],
    ) -> None:
        super().__init__(_torch_action(action) for action in order if action.op not in COPIES)
        self._order, self._times = order, times
        self._prepare, self._on_played, self._on_ended = prepare, on_played, on_ended

    def __iter__(self) -> Iterator[_Action]:
        for action in self._order:
            self._prepare(action)
            gathers = action.op is Op.UNSHARD
            with self._times.spending(IdleCause.GATHER, f"{action.part}{action.op}") if gathers else nullcontext():
                if action.op not in COPIES:
                    yield _torch_action(action)
            self._on_played(action)
        self._on_ended()

    def __deepcopy__(self, memo: Any) -> list[_Action]:
        return self[:]  # torch prints it when an action fails


def _torch_action(action: RankAction) -> _Action:
    return _Action(action.part, _ComputationType(str(action.op)), action.microbatch)


def _hollow(output: torch.Tensor) -> None:
    """Free the memory of a part's output that was handed on: its graph is what the backward needs of it."""
    output.data = output.new_empty(1).expand(output.shape)


def _make_buffer(spec: Spec | None) -> torch.Tensor:
    assert spec is not None
    shape, dtype = spec
    return torch.empty(shape, dtype=dtype, device="cpu")  # the script's default may be another
