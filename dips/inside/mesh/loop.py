"""EDiT in a training script: no server and no agent, only the ranks of one job (EDiT, Algorithm 1).

    mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("sync", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])          # on the shard dim only
    fully_shard(model, mesh=mesh["shard"])
    loop = MeshLoop(model, mesh, optimizer, "edit.yaml", steps=128)
    for batch in loader:                                # each rank its own part
        ...                                             # forward, backward, optimizer.step() as before
        loop.step(tokens=batch.numel(), loss=loss)
    loop.sync()                                         # now all replicas hold one model

The ranks of a row of the mesh, a *replica*, shard one copy of the model; the ranks of a column hold the same shard and
are a *sync group*. A sync that is due begins in `step`; the next forward carries it out, one layer after the other
(sync.py). Under Di-PS the job is one cluster: `OuterLoop(model, may_push=loop.is_synced)`, made after the loop.

What the caller must do: the constructor, `step`, `sync`, `is_synced`, `state_dict`, `load_state_dict` and `close` are
collective: all ranks call them, in the same order, outside forward and backward. Between two syncs the replicas differ:
evaluate and save right after `sync`.

Known limits: fp32 parameters (FSDP's mixed precision is fine), one optimizer step per call of `step`, or one that a
GradScaler skips. CO2, which lets a sum arrive a whole interval late, is not built.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isinf
from pathlib import Path
from typing import Any, SupportsInt, cast
from weakref import WeakSet

import structlog
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dips.client.parallel.adapter import ReadGroup, find_read_groups, fsdp_param_groups, is_dtensor
from dips.client.parallel.tensors import plain_name
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.optimizers import InnerOptimizers
from dips.client.rank.outer_loop import find_loop
from dips.client.rank.steps import read_count
from dips.config import Shared
from dips.config.reading import load_file
from dips.errors import ConfigError, LocalProtocolError, Unavailable
from dips.inside.agreement import agree, compare
from dips.inside.mesh.merging import Interval, LayerMerge, ReplicaMerges
from dips.inside.mesh.sync import SHARD, SYNC, MeshSync

LOG = structlog.get_logger()
FORMAT = 1  # of `state_dict`
STEPS = 128  # τ of the paper
MOST_SKIPPED = 16  # steps in a row: a GradScaler halves its scale with each that it skips, and begins with 2**16
ON_SHARD_DIM = 'call fully_shard(module, mesh=mesh["shard"]) on its blocks and on the model before MeshLoop'


@dataclass(frozen=True)
class SyncReport:
    """The findings of a sync; the same on all ranks."""

    number: int  # of the sync, from 1
    inner_steps: tuple[int, ...]  # since the last sync, by replica
    tokens: int  # since the last sync, of all replicas
    loss: float | None  # mean of the losses passed to `step` since then; None: there were none
    left_out: tuple[int, ...]  # layers in which the replica did not count, by replica
    rolled_back: int  # layers in which no replica counted: they are as the last sync left them
    not_finite: tuple[int, ...]  # replicas with a NaN or Inf, which the sync has replaced


class MeshLoop:
    """The outer loop of one rank of a job that synchronises its replicas itself."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        optimizer: Any,
        rules: str | os.PathLike[str] | Shared = "edit.yaml",
        *,
        steps: int | None = None,
        seconds: float | None = None,
        warmup_steps: int = 0,
        collective_s: float = 600.0,
    ) -> None:
        """Check the model and the mesh on all ranks; train nothing yet.

        model         wrapped by `fully_shard` on the mesh's shard dim; the same values on all replicas
        mesh          all ranks of the job, as (replicas, ranks of a replica)
        optimizer     the inner optimizer, or several in a list
        rules         a `shared` section, as in configs/shared: of it the outer step and the penalty count
        steps         inner steps from sync to sync, τ; 128 if neither is given
        seconds       instead: time from sync to sync, τ_time (A-EDiT). Replicas then take unequal numbers of steps,
                      and none waits longer than the slowest one's step
        warmup_steps  first so many inner steps average gradients over all replicas
        collective_s  a rank that misses a sync for this long ends it, with a sentence
        Errors        ConfigError, the same on every rank: a mesh, model or rule that is not supported; ranks that
                      differ in their arguments or in the values of the model.
        """
        self._model, self._mesh = model, mesh
        if not dist.is_initialized():
            raise ConfigError("MeshLoop: call torch.distributed.init_process_group first")
        self._collectives = JobCollectives(collective_s)
        check = partial(_check_arguments, model, mesh, rules, steps, seconds, warmup_steps)
        shared, groups, named = agree(self._collectives, check)
        rows: list[list[int]] = mesh.mesh.tolist()
        columns = [list(column) for column in zip(*rows, strict=True)]
        given = {**shared.model_dump(mode="json"), "steps": steps, "seconds": seconds, "warmup_steps": warmup_steps}
        compare(self._collectives, "the arguments of MeshLoop", given, [[rank for row in rows for rank in row]])
        compare(self._collectives, "the shards of one sync group", _list_places(named), columns)
        compare(self._collectives, "the first values of the model, in one sync group", _sum_values(named), columns)
        self._steps_due, self._seconds_due = STEPS if steps is None else steps, seconds
        self._rows = rows
        merges = ReplicaMerges(shared, mesh.size(SYNC), [min(group.reads) for group in groups])
        self._merges, self._replica = merges, mesh.get_local_rank(SYNC)
        self._sync = MeshSync(model, mesh, groups, merges, collective_s, self._on_landed)
        self._optimizers = [InnerOptimizers([model], one) for one in _as_list(optimizer)]
        self._ours = {id(p) for group in groups for p in group.reads.values()}
        hook = model.register_load_state_dict_pre_hook(self._before_load)
        self._hooks = [register_optimizer_step_pre_hook(self._before_optimizer), hook]
        self._watched = WeakSet[torch.optim.Optimizer]()  # those whose steps take the anchor
        self._warm_left, self._anchored = warmup_steps, False
        self._stepped = False  # whether an optimizer has, since the last call of `step`
        self._unstepped = 0  # twice the calls without a step, less those with one
        if warmup_steps:
            self._average_gradients(groups)
        self._closed = False
        self.inner_steps = 0
        """Inner steps of this rank since the loop was made, plus those of the loaded checkpoint."""
        self.last_sync: SyncReport | None = None
        """The report of the last sync that has begun; None before the first."""
        self._steps, self._tokens, self._losses = 0, 0, 0  # since the last sync
        self._loss: Any = 0.0  # the sum of losses since then
        self._began_s = time.monotonic()

    # ---- training ----------------------------------------------------------------------------------------------------

    def step(self, *, tokens: SupportsInt = 0, loss: Any = None) -> None:
        """Report that one inner step is done; begin a sync if one is due.

        tokens  consumed in this step by this rank; rules with `weights: tokens` weigh replicas by them
        loss    of this step on this rank, a float or a tensor of one element; only reported
        Errors  Unavailable: a rank is gone in a sync. LocalProtocolError: a rank did not come within `collective_s`;
                ranks disagree whether a sync is due; the step was taken on parameters that a sync replaces; no
                optimizer has stepped in many calls. ConfigError: the loop has `seconds`, and an OuterLoop.
        """
        self._check_usable()
        if not self._warm_left:
            self._check_stepped()
        if self._seconds_due is not None and find_loop([self._model]) is not None:
            raise ConfigError(
                "MeshLoop: expected steps under an OuterLoop, got seconds: replicas then take unequal numbers of "
                "steps, and their ranks would not ask for an outer step together"
            )
        self.inner_steps += 1
        if self._warm_left:
            self._warm_left -= 1
            self._began_s = time.monotonic()
            return
        self._steps += 1
        self._tokens += read_count("tokens", tokens)
        if loss is not None:
            self._losses += 1
            self._loss = self._loss + (loss.detach() if hasattr(loss, "detach") else loss)
        if self._is_due():
            self._begin_sync("step")

    def sync(self) -> None:
        """Synchronise all replicas now, completely, if they have trained since the last sync."""
        self._check_usable()
        self._sync.finish()  # by time, a replica may have trained on since this one began
        self._begin_sync("sync")
        self._sync.finish()

    def is_synced(self) -> bool:
        """Return whether all replicas hold one model, completely: right after a sync, before the next inner step.

        For `OuterLoop(model, may_push=loop.is_synced)`, which pushes only then. What the model holds before the next
        step of an optimizer, such as a pulled version, becomes the last synchronised parameters; momentum stays.
        """
        self._check_usable()
        if self._steps:
            return False
        self._sync.finish()
        self._anchored = False
        return True

    def _check_stepped(self) -> None:
        """Raise LocalProtocolError if optimizers of this model step in no more than half of the calls, or in none."""
        self._unstepped = max(0, self._unstepped - 1) if self._stepped else self._unstepped + 2
        self._stepped = False
        if self._unstepped > 2 * MOST_SKIPPED:
            raise LocalProtocolError(
                "MeshLoop.step: called far more often than a torch optimizer with parameters of this model has "
                "stepped: call it once after each optimizer.step()"
            )
        if not self._anchored:  # a GradScaler has skipped the step, before which the other ranks complete a sync
            self._sync.finish()

    def _is_due(self) -> bool:
        if self._seconds_due is None:
            return self._steps >= self._steps_due
        due = time.monotonic() - self._began_s >= self._seconds_due
        told = torch.tensor([float(due)], device=self._mesh.device_type)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._mesh.get_group(SHARD))  # clocks of a replica differ
        return bool(told)

    def _begin_sync(self, call: str) -> None:
        self._collectives.barrier(f"MeshLoop.{call}")
        mine = json.dumps([call, self._steps, self._tokens, float(self._loss), self._losses])
        try:
            told = [json.loads(one) for one in self._collectives.all_gather(mine.encode())]
        except RuntimeError as error:
            raise Unavailable(f"MeshLoop.{call}: a rank is gone: {str(error).splitlines()[0]}") from error
        self._check_agreed(told)
        if not any(of[1] for of in told):
            return
        intervals = [Interval(told[row[0]][1], sum(told[rank][2] for rank in row)) for row in self._rows]
        losses = sum(of[4] for of in told)
        self._reported = (sum(of[3] for of in told) / losses if losses else None, intervals)
        if not self._anchored:  # a replica may have taken no step: it has what the last sync made
            if (outer := find_loop([self._model])) is not None:
                outer.install()  # what `install: lazy` has not written yet
            self._sync.take_anchor()
        self._anchored = False
        self._begin_interval()
        self._sync.begin(intervals)

    def _check_agreed(self, told: Sequence[Sequence[Any]]) -> None:
        """Raise LocalProtocolError, the same on all ranks, if ranks count otherwise."""
        alike = [range(len(told))] if self._seconds_due is None else self._rows
        for ranks in alike:
            first, *others = ranks
            for rank in others:
                if told[rank][1] != told[first][1]:
                    raise LocalProtocolError(
                        f"ranks disagree whether a sync is due: rank {first} has taken {told[first][1]} steps since "
                        f"the last one, rank {rank} {told[rank][1]}: call MeshLoop.step on all ranks after each step"
                    )
        if calls := sorted({of[0] for of in told} - {told[0][0]}):
            raise LocalProtocolError(f"ranks disagree whether a sync is due: some called {told[0][0]}, some {calls[0]}")

    def _begin_interval(self) -> None:
        self._steps, self._tokens, self._losses, self._loss = 0, 0, 0, 0.0
        self._began_s = time.monotonic()

    # ---- what a sync changes -----------------------------------------------------------------------------------------

    def _on_landed(self, merged: Sequence[LayerMerge]) -> None:
        self._merges.keep_statistics(merged)
        loss, intervals = self._reported
        by_replica = [[merge for merge in merged if merge.shares[r] is None] for r in range(len(intervals))]
        broken = tuple(r for r in range(len(intervals)) if any(isinf(merge.scores[r]) for merge in merged))
        self.last_sync = SyncReport(
            self._merges.syncs,
            tuple(of.inner_steps for of in intervals),
            sum(of.tokens for of in intervals),
            loss,
            tuple(map(len, by_replica)),
            sum(all(share is None for share in merge.shares) for merge in merged),
            broken,
        )
        self._tell_sync(self.last_sync)
        if self._replica in broken:  # moments that are not finite would make the next step not finite again
            for optimizers in self._optimizers:
                optimizers.drop_state()

    def _tell_sync(self, report: SyncReport) -> None:
        """Log a sync and what it corrected, and tell the run, if the script has an OuterLoop; on rank 0."""
        if dist.get_rank():
            return
        name, layers = f"sync {report.number}", len(self._sync.shards)
        trained = f"after {max(report.inner_steps)} inner steps and {report.tokens:,} tokens"
        news = {"sync": f"{name} {trained}; left out, by replica, of {layers} layers: {list(report.left_out)}"}
        if report.rolled_back:
            news["rollback"] = f"{name} rolls {report.rolled_back} of {layers} layers back: no replica counts there"
        if report.not_finite:
            news["replaced"] = f"{name} replaces replicas {list(report.not_finite)}, which were not finite"
        loop = find_loop([self._model])
        for what, why in news.items():
            (LOG.info if what == "sync" else LOG.warning)("mesh_changed", what=what, why=why)
            if loop is not None:
                loop.report_change(what, why)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Complete a sync before an optimizer of this model steps; what the model then holds was synchronised."""
        if self._warm_left or not any(id(p) in self._ours for g in optimizer.param_groups for p in g["params"]):
            return
        self._stepped = True
        if optimizer not in self._watched:
            # Behind the hooks of all optimizers: that of `install: lazy` writes what is left of a pull, and is removed.
            self._watched.add(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._take_anchor))

    def _take_anchor(self, *_: Any) -> None:
        if not self._anchored:
            self._sync.finish()
            self._sync.take_anchor()
            self._anchored = True

    def _before_load(self, *_: Any) -> None:
        """Take what is loaded before an interval's first step for what was synchronised: torch steps an optimizer that
        has no state, to say what a checkpoint has of it.
        """
        if not self._steps:
            self._anchored = False

    def _average_gradients(self, groups: Sequence[ReadGroup]) -> None:
        """Average gradients over the sync dim during the warm-up, after FSDP's own reduction over the shard dim."""

        def average(reduced: torch.Tensor) -> None:
            if self._warm_left:
                dist.all_reduce(reduced, group=self._sync.sync_group)
                reduced.div_(self._mesh.size(SYNC))

        for group in groups:
            group.modules[0].set_all_reduce_hook(average)  # type: ignore[operator]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's part of a checkpoint, for `torch.distributed.checkpoint`: outer momentum and statistics.

        Save it with the model and the optimizer, right after `sync`. It can be loaded into another number of replicas,
        and with another number of ranks in each. Load it in place, then call `load_state_dict`.

        Raises LocalProtocolError between two syncs, when the replicas differ.
        """
        if not self.is_synced():
            raise LocalProtocolError("MeshLoop.state_dict: replicas differ between two syncs: call sync before")
        momentum = {
            name: _as_sharded(parameter, part)
            for shard in self._sync.shards
            if shard.momentum is not None
            for name, parameter, part in shard.split(shard.momentum)
        }
        told = {"format": FORMAT, "steps": self.inner_steps, "warmup": self._warm_left, **self._merges.to_json()}
        return {"momentum": momentum, "told": json.dumps(told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint whose model and optimizer have been loaded, before the first inner step."""
        self._check_usable()
        if self.inner_steps:
            raise LocalProtocolError("MeshLoop.load_state_dict: inner steps were taken already: load before the first")
        told = json.loads(state["told"])
        if told["format"] != FORMAT:
            raise LocalProtocolError(f"expected a checkpoint of format {FORMAT}, got {told['format']}")
        parts = {
            name: part
            for shard in self._sync.shards
            if shard.momentum is not None
            for name, _, part in shard.split(shard.momentum)
        }
        if lacking := [name for name in parts if name not in state["momentum"]]:
            raise LocalProtocolError(
                f"MeshLoop.load_state_dict: the checkpoint has no momentum of {lacking[0]}: it was saved under other "
                "rules, or of another model: leave this call out, and momentum and statistics begin anew"
            )
        for name, part in parts.items():
            part.copy_(state["momentum"][name].to_local())
        self._merges.load_json(told)
        self.inner_steps, self._anchored = int(told["steps"]), False
        # only a loop that was made with a warm-up averages gradients
        self._warm_left = min(self._warm_left, int(told["warmup"]))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Complete a sync under way, and give hooks and process groups back. Idempotent."""
        if self._closed:
            return
        if not self._sync.failed:
            self._sync.finish()
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        for optimizers in self._optimizers:
            optimizers.close()
        self._sync.close()
        self._collectives.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise LocalProtocolError("this MeshLoop is closed")
        if self._sync.failed:
            raise Unavailable(self._sync.failed)


# ---- what is refused -------------------------------------------------------------------------------------------------

Checked = tuple[Shared, list[ReadGroup], dict[str, nn.Parameter]]  # rules, layers, trained parameters by name


def _check_arguments(
    model: nn.Module,
    mesh: DeviceMesh,
    rules: str | os.PathLike[str] | Shared,
    steps: int | None,
    seconds: float | None,
    warmup_steps: int,
) -> Checked:
    """Raises ConfigError, on this rank alone, for what a mesh does not support."""
    if mesh.ndim != 2 or mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"mesh: expected two dims over all {dist.get_world_size()} ranks, replicas × ranks of a replica, got "
            f"{' × '.join(map(str, mesh.shape))}"
        )
    if steps is not None and (seconds is not None or steps < 1):
        raise ConfigError(f"expected steps of at least 1, or seconds instead, got steps={steps}, seconds={seconds}")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds: expected a time above 0, got {seconds}")
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps: expected 0 or more, got {warmup_steps}")
    shared = rules if isinstance(rules, Shared) else load_file(Path(rules), Shared)
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigError(f"DistributedDataParallel averages gradients over all ranks in each step: {ON_SHARD_DIM}")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"a sync's hooks would break the compiled graph of a {type(module).__name__}: do not compile"
            )
    named = {plain_name(path): p for path, p in model.named_parameters() if p.requires_grad}
    shard_ranks = mesh.mesh[mesh.get_local_rank(SYNC)].tolist()
    for name, parameter in named.items():
        _check_parameter(name, parameter, shard_ranks)
    groups = find_read_groups(model, {p: name for name, p in named.items()})
    for group in groups:
        if group.state is None or len(fsdp_param_groups(group.state)) != 1:
            raise ConfigError(f"{min(group.reads)}: expected one group of parameters in its module: {ON_SHARD_DIM}")
    return shared, groups, named


def _check_parameter(name: str, parameter: nn.Parameter, shard_ranks: list[int]) -> None:
    if not is_dtensor(parameter):
        raise ConfigError(f"{name}: expected a parameter sharded by FSDP2, got a plain one: {ON_SHARD_DIM}")
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        raise ConfigError(
            f"{name}: lies on {mesh.ndim} dims (HSDP, tensor parallel?), expected the shard dim alone: HSDP averages "
            f"gradients over all replicas in each step: {ON_SHARD_DIM}"
        )
    if mesh.mesh.tolist() != shard_ranks:
        raise ConfigError(f"{name}: sharded over ranks {mesh.mesh.tolist()}, expected {shard_ranks}: {ON_SHARD_DIM}")
    if parameter.dtype is not torch.float32:
        raise ConfigError(f"{name}: expected float32, got {parameter.dtype}: use fully_shard's MixedPrecisionPolicy")


def _list_places(named: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return where each parameter's shard lies in it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    tensors = {name: cast(Any, p) for name, p in named.items()}
    return {
        name: compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements) for name, p in tensors.items()
    }


def _sum_values(named: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return a checksum of the bits of each parameter's shard."""
    shards = {name: cast(Any, p).to_local().detach() for name, p in named.items()}
    return {name: int(shard.contiguous().view(torch.int32).sum(dtype=torch.int64)) for name, shard in shards.items()}


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _as_list(optimizer: Any) -> Sequence[Any]:
    return optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]


def _as_sharded(parameter: Any, part: torch.Tensor) -> Any:
    """Return this rank's part of a tensor that is sharded as the parameter is."""
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
