"""One sync: the layers' collectives, begun between two steps and carried on by the next forward (EDiT §3.1).

A *layer* is a read group (adapter.py), with `fully_shard` a module that it wraps. Three things happen to it in turn:

    measure    its pseudo-gradient, old − new; all ranks begin to gather its squared norms
    reduce     the norms are known, so the weights are; the sync group begins to add up
    land       the sum is there: the outer step is written into the parameters

    forward of …        l − 1            l              l + 1
    lands                l − 1            l              l + 1
    then reduces         l                l + 1          l + 2
    then measures        l + 1            l + 2          l + 3

so while layer l computes, the sum of l + 1 is under way. Layers go in the order in which modules were registered,
whatever order the forward calls them in: all ranks begin the same collectives in the same order, even if their forwards
differ. Where the forward takes another order, less is hidden.

Last synchronised parameters and outer momentum are in host memory, this rank's shard of them. On an accelerator a
layer's are copied there when its turn comes, and of at most two layers at a time.

Must stay true: `anchor` and `momentum` change only after the last layer has landed on this rank. So when a rank dies in
a sync, the others still hold what all had after the sync before, and their parameters are set back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from dips.client.parallel.adapter import ReadGroup, check_sharded, groups_gathered_with, is_fsdp
from dips.client.parallel.devices import FLOAT_BYTES, Device, find_device
from dips.client.parallel.tensors import plain_name
from dips.errors import LocalProtocolError, Unavailable
from dips.inside.mesh.merging import UNKNOWN, Interval, LayerMerge, ReplicaMerges
from dips.outer_step import OuterStep

SYNC, SHARD = 0, 1  # dims of the mesh


class LayerShard:
    """One layer as this rank holds it: its parameters, and in host memory what they were after the last sync."""

    def __init__(self, group: ReadGroup, device: Device, has_momentum: bool) -> None:
        self.group, self._device = group, device
        self.sizes = [_local(p).numel() for p in group.reads.values()]
        self.numel = sum(self.sizes)
        self.anchor = device.allocate_host(self.numel)  # f32[numel], pinned for an accelerator
        self.momentum: torch.Tensor | None = None  # f32[numel]; None: the rules have none
        self._next: torch.Tensor | None = None  # the momentum of the sync that is under way
        if has_momentum:
            self.momentum, self._next = (device.allocate_host(self.numel).zero_() for _ in range(2))

    def take_anchor(self) -> None:
        """Take the present parameters as the last synchronised ones."""
        for view, parameter in self._pairs(self.anchor):
            view.copy_(parameter, non_blocking=True)

    def restore_anchor(self) -> None:
        """Write the last synchronised parameters into the model."""
        for view, parameter in self._pairs(self.anchor):
            parameter.copy_(view)

    def subtract_parameters(self) -> torch.Tensor:
        """Return the pseudo-gradient, old − new, as f32[numel] of its own on the device."""
        difference = torch.empty(self.numel, dtype=torch.float32, device=self._device.where)
        difference.copy_(self.anchor, non_blocking=True)
        for view, parameter in self._pairs(difference):
            view.sub_(parameter)
        return difference

    def write_step(self, acc: torch.Tensor, step: OuterStep) -> None:
        """Write θ′ into the parameters, and m′ beside the momentum, which `keep_momentum` replaces by it.

        acc  f32[numel], the weighted sum of pseudo-gradients; overwritten
        """
        (scale,), anchor = step.scales, self.anchor.to(self._device.where, non_blocking=True)
        if scale == 0.0:  # no replica counts, or a sum of those that do is not finite
            acc.zero_()
        acc.mul_(scale)
        if self.momentum is not None:
            assert self._next is not None
            following = torch.mul(self.momentum.to(self._device.where, non_blocking=True), step.a)
            following.add_(acc, alpha=step.b)
            self._next.copy_(following, non_blocking=True)
            acc.mul_(step.c).add_(following, alpha=step.e)
        else:
            acc.mul_(step.c)
        acc.mul_(-step.lr).add_(anchor)
        for view, parameter in self._pairs(acc):
            parameter.copy_(view)

    def keep_momentum(self) -> None:
        """Replace the momentum by that of the sync that has ended."""
        self.momentum, self._next = self._next, self.momentum

    def split(self, flat: torch.Tensor) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        """Yield name, parameter and its part of f32[numel], in the shape of the parameter's shard."""
        parts = zip(self.group.reads.items(), flat.split(self.sizes), strict=True)
        return ((name, p, part.view(_local(p).shape)) for (name, p), part in parts)

    def _pairs(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((part, _local(p)) for _, p, part in self.split(flat))


class MeshSync:
    """The layers of one rank, and the sync that is under way; single-threaded."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        groups: Sequence[ReadGroup],
        merges: ReplicaMerges,
        collective_s: float,
        on_landed: Callable[[Sequence[LayerMerge]], None],
    ) -> None:
        """Make process groups of their own, so that nothing here queues behind FSDP's collectives. Collective.

        mesh       (sync groups, shard), all ranks of the job
        on_landed  called when the last layer has landed, before the momentum of the sync counts
        """
        self._model, self._merges, self._collective_s, self._on_landed = model, merges, collective_s, on_landed
        self._ranks: list[list[int]] = mesh.mesh.tolist()  # by replica
        self._replica = mesh.get_local_rank(SYNC)
        timeout = timedelta(seconds=collective_s)
        self._everyone = dist.new_group(timeout=timeout)
        columns = list(zip(*self._ranks, strict=True))
        made = [dist.new_group(list(column), timeout=timeout) for column in columns]
        self.sync_group = made[mesh.get_local_rank(SHARD)]
        self._device = find_device([_local(p) for group in groups for p in group.reads.values()])
        self.shards = [LayerShard(group, self._device, merges.has_momentum) for group in groups]
        self._place = {id(group): place for place, group in enumerate(groups)}
        self._by_state = {group.state: group for group in groups}
        self._handles: list[RemovableHandle] = []
        self._under_way: dict[int, _LayerUnderWay] = {}  # measured and not landed, by layer
        self._merged: list[LayerMerge] = []  # of the layers that have landed
        self.failed = ""
        self.most_held_bytes = 0  # the most device memory for what is synchronised and the outer state, at one time

    @property
    def pending(self) -> bool:
        """Whether a sync has begun and not all layers have landed."""
        return bool(self._handles)

    # ---- between syncs -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Take the present parameters as the last synchronised ones; work enqueued later runs after the copies."""
        with self._device.ordered_copies():
            for shard in self.shards:
                shard.take_anchor()

    # ---- a sync ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, intervals: Sequence[Interval]) -> None:
        """Begin a sync with the first layers; forwards carry it on. All ranks call this between two steps."""
        self._reshard()
        self._check_parameters()
        self._intervals, self._merged = intervals, []
        self._register_hooks()
        with self._explained():
            self._start(0)

    def _check_parameters(self) -> None:
        """Raise LocalProtocolError if others than those of the layers are trained now."""
        present = {id(p): (name, p.requires_grad) for name, p in self._model.named_parameters()}
        known = {id(p): name for shard in self.shards for name, p in shard.group.reads.items()}
        if moved := [name for at, name in known.items() if at not in present]:
            raise LocalProtocolError(
                f"{moved[0]}: was replaced after MeshLoop was made (by fully_shard, or load_state_dict(assign=True)?): "
                "make the loop afterwards"
            )
        if unfrozen := [name for at, (name, trained) in present.items() if trained and at not in known]:
            raise LocalProtocolError(
                f"{plain_name(unfrozen[0])}: was unfrozen or added after MeshLoop was made, and replicas train it "
                "apart: go on from a checkpoint, and unfreeze it before the loop is made"
            )

    @torch.no_grad()
    def finish(self) -> None:
        """Land all layers that no forward has asked for."""
        if self.pending:
            self._reshard()
            self.land_until(len(self.shards) - 1)

    @torch.no_grad()
    def land_until(self, place: int) -> None:
        """Land the layers up to this one; begin the collectives of the next two."""
        with self._explained():
            while (at := len(self._merged)) <= place:
                self._land(at)
                self._start(at + 1)
        if len(self._merged) == len(self.shards):
            self._end()

    def _start(self, place: int) -> None:
        """Begin the sum of the layer at `place`, and measure the one after it."""
        self._measure(place)
        self._reduce(place)
        self._measure(place + 1)

    def _measure(self, place: int) -> None:
        if place in self._under_way or place >= len(self.shards):
            return
        with self._device.background_copies():
            acc = self.shards[place].subtract_parameters()
            mine = torch.linalg.vector_norm(acc, dtype=torch.float64).square().reshape(1)
            squares, work = self._gather(mine)
            self._under_way[place] = _LayerUnderWay(acc, squares, work)
        self._count_held()

    def _reduce(self, place: int) -> None:
        if place >= len(self.shards):
            return
        layer = self._under_way[place]
        with self._device.background_copies():
            squares = self._by_replica(layer.squares, layer.work)
            layer.merge = self._merges.weigh_layer(place, squares, self._intervals)
            weight = layer.merge.weights[self._replica]
            layer.acc.mul_(weight) if weight else layer.acc.zero_()  # NaN times 0 is NaN
            layer.work = None
            if layer.acc.numel():  # empty shards are empty in the whole sync group
                layer.work = dist.all_reduce(layer.acc, group=self.sync_group, async_op=True)

    def _land(self, place: int) -> None:
        layer, shard = self._under_way[place], self.shards[place]
        assert layer.merge is not None, "a layer lands after its sum has begun"
        with self._device.background_copies():
            if layer.work is not None:
                layer.work.wait()
            acc_sq = UNKNOWN
            if self._merges.needs_norm(layer.merge):
                mine = torch.linalg.vector_norm(layer.acc, dtype=torch.float64).square().reshape(1)
                acc_sq = self._by_replica(*self._gather(mine))[0]  # the sum is the same on all replicas
            shard.write_step(layer.acc, self._merges.step_layer(layer.merge, acc_sq))
            written = self._device.record_event()
        if written is not None:  # FSDP gathers on a stream of its own, which waits for no event of ours
            self._device.wait_for_event(written, all_streams=True)
        self._merged.append(layer.merge)
        del self._under_way[place]

    def _end(self) -> None:
        self._remove_hooks()
        self._on_landed(self._merged)
        for shard in self.shards:
            shard.keep_momentum()

    def _gather(self, mine: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to gather one number of each rank; the squares are to be read after the work is done."""
        gathered = mine.new_empty(dist.get_world_size())
        return gathered, dist.all_gather(list(gathered.split(1)), mine, group=self._everyone, async_op=True)

    def _by_replica(self, gathered: torch.Tensor, work: Any) -> list[float]:
        """Return each replica's sum over its shards, added in the same order on every rank."""
        work.wait()
        of_rank = gathered.tolist()
        return [sum(of_rank[rank] for rank in shards) for shards in self._ranks]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the failure of a collective into a sentence, the same on every rank."""
        try:
            yield
        except torch.OutOfMemoryError:
            self._fail("this rank's device is full")
            raise
        except RuntimeError as error:
            self._fail(f"a rank is gone, or did not come within {self._collective_s:g} s")
            raise Unavailable(self.failed) from error

    def _fail(self, why: str) -> None:
        self.failed = f"a sync did not end: {why}. The parameters are those of the last sync again; restart the job"
        self._remove_hooks()
        self._under_way = {}
        for shard in self.shards:
            shard.restore_anchor()

    def _reshard(self) -> None:
        """Drop gathered parameters: after a forward without a backward the root keeps its own."""
        for module in self._model.modules():
            if is_fsdp(module):
                cast(Any, module).reshard()

    def _count_held(self) -> None:
        outer = 3 * max(self.shards[place].numel for place in self._under_way)  # anchor, momentum and the next one
        held = sum(layer.acc.numel() for layer in self._under_way.values()) + outer
        self.most_held_bytes = max(self.most_held_bytes, FLOAT_BYTES * held)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        """Register hooks that run before parameters are read or replaced, as those of an install (lazy.py)."""

        def before_forward(group: ReadGroup, module: nn.Module) -> Callable[..., None]:
            return lambda called, *_: self._before_forward(group) if called is module else None

        def land_rest(*_: Any) -> None:
            self.finish()

        for shard in self.shards:
            for module in shard.group.modules:
                # prepend: otherwise fully_shard's own hook would gather the old shards first
                hook = before_forward(shard.group, module)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
                self._handles.append(module.register_state_dict_pre_hook(land_rest))
                self._handles.append(module.register_load_state_dict_pre_hook(land_rest))

    def _before_forward(self, group: ReadGroup) -> None:
        """Land the layer, and those gathered with it, before a module of it is called."""
        for read in groups_gathered_with(group, self._by_state):
            place = self._place[id(read)]
            if place >= len(self._merged):
                check_sharded(read)
                self.land_until(place)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Remove hooks and process groups."""
        self._remove_hooks()
        for group in (self._everyone, self.sync_group):
            dist.destroy_process_group(group)


class _LayerUnderWay:
    """A layer that is measured and has not landed."""

    def __init__(self, acc: torch.Tensor, squares: torch.Tensor, work: Any) -> None:
        self.acc, self.squares = acc, squares
        self.work: Any = work  # of the norms, then of the sum; None: nothing to wait for
        self.merge: LayerMerge | None = None


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local().detach()
