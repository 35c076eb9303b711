"""An install during which training continues: `install: lazy` (EDiT §3.1).

When all ranks have agreed that a version is complete in host memory, training continues at once. On an accelerator the
copies of all layers are enqueued right away on a stream of their own, one read group (adapter.py) after the other
in the order of the forward, and the pre-forward hook of a group's modules waits for the group's copies: while layer l
computes, l+1 arrives. On the CPU the hook itself copies: a thread would compete with the forward for cores and memory
bandwidth. A merge computes what `HostMemory.merge_shard` does, in the same places.

Hooks are registered only while something is pending. They run before those of `fully_shard`, so what FSDP gathers is
the new shard. Other parameters are installed before an optimizer steps, before a state_dict is made or loaded,
before the next transfer, and at the end of the next inner step.

Must stay true: nothing is computed with the old version once the new one was agreed on. A parameter that was read
although no module of its group was called is detected by its gradient; this is an error before the optimizer steps.

Single-threaded: everything runs on the training's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dips.client.parallel.adapter import (
    INSTEAD,
    Adapter,
    HeldParameter,
    ReadGroup,
    check_sharded,
    groups_gathered_with,
    is_dtensor,
)
from dips.client.parallel.blocks import FiniteCheck, find_not_finite
from dips.client.parallel.host import HostMemory, Layers, ShardCopy, write_merged, write_pulled
from dips.client.parallel.plan import TransferPlan
from dips.client.parallel.shard_buffer import RankExchange
from dips.errors import LocalProtocolError


class LazyMemory(HostMemory):
    """A shard in host memory whose parameters are copied into the model just before a forward reads them."""

    def __init__(
        self, adapter: Adapter, held: Sequence[HeldParameter], plan: TransferPlan, exchange: RankExchange
    ) -> None:
        """Find the read groups. Raises ConfigError if a forward would not read the values written just before it."""
        read_groups = adapter.read_groups()
        super().__init__(adapter, held, plan, exchange)
        self._groups = read_groups
        self._group_by_state = {group.state: group for group in read_groups}
        self._parameters = {name: p for group in read_groups for name, p in group.reads.items()}
        self._pending: dict[str, torch.Event | None] = {}  # not yet installed; event of enqueued copies, or None
        self._write_copy: Callable[[ShardCopy], None] = self._write_pulled_copy
        self._forward_seen = False  # a module of some group was called since the install began
        self._handles: list[RemovableHandle] = []

    def _bind_copies(self) -> None:
        super()._bind_copies()
        assert not any(self._masters), "an adapter with masters has no read groups"
        self._copies_of: dict[str, list[ShardCopy]] = {}
        for copy in chain(*self._params):
            self._copies_of.setdefault(copy.name, []).append(copy)

    @property
    def pending(self) -> Collection[str]:
        """The parameters that no forward has read yet."""
        return self._pending

    def gather_pieces(self, layers: Layers = None) -> None:
        """Freeze the last installed version, completely installed, with the training on it."""
        self.finish_install()
        super().gather_pieces(layers)

    def install_shard(self, layers: Layers = None) -> None:
        """Begin to copy the shard into the model: the next read of a parameter sees the new value.

        Replaces a merge that was begun and is invalid because another rank's values are not finite.
        """
        self._forget_pending()
        copies = self._copies_of_layers(layers)
        self._begin_install(self._write_pulled_copy, copies)
        self._remainders.keep_installed(copies)

    @torch.no_grad()
    def merge_shard(self, layers: Layers = None) -> bool:
        """Begin to add the difference between the shard and the kept copy to the model.

        Returns False, and begins nothing, if a summand is not finite.
        """
        copies = self._copies_of_layers(layers)
        if not self._kept.holds(copies):
            return False
        self._kept.subtract_kept(copies)
        added = [(copy.name, view) for copy in copies for view in (copy.view, self._kept.difference(copy))]
        if find_not_finite(added, self._device):
            return False
        self._begin_install(self._write_merged_copy, copies)
        return True

    def finish_install(self) -> None:
        """Install all pending parameters and remove the hooks; the host memory is free again."""
        if not self._handles:
            return
        self._check_not_torn()
        self._install_parameters(list(self._pending))
        self._device.synchronize()
        self._remove_hooks()

    def free(self) -> None:
        self._forget_pending()  # an install that broke off has left its hooks, which would end the next forward
        super().free()
        del self._copies_of

    def on_inner_step(self) -> None:
        """Install the parameters that the inner step's forward did not read.

        Raises LocalProtocolError if the step called no module: it was taken on parameters that the version replaces.
        """
        if not self._handles:
            return
        if not self._forward_seen:
            raise LocalProtocolError(
                "a version was pulled and no module of the model was called in the step after it (a captured graph? a "
                f".forward()? parameters written by hand?): {INSTEAD}"
            )
        for name in self._pending:
            if _has_gradient(self._parameters[name]):
                raise LocalProtocolError(
                    f"{name}: has a gradient, and no module that holds it was called: it was "
                    f"read before its pulled value was installed: {INSTEAD}"
                )
        self.finish_install()

    # ---- from the begin of an install to its end -------------------------------------------------------------------

    @torch.no_grad()
    def _begin_install(self, write: Callable[[ShardCopy], None], copies: Sequence[ShardCopy]) -> None:
        assert not self._handles, "an install ends before the next transfer"
        self._write_copy, self._forward_seen = write, False
        names = {copy.name for copy in copies}
        self._pending = dict.fromkeys(name for name in self._parameters if name in names)
        self._register_hooks()
        if not self._device.accelerated:
            return
        with self._device.background_copies():
            for group in self._groups:
                reads = [name for name in group.reads if name in self._pending and self._pending[name] is None]
                self._write_parameters(reads)
                self._pending |= dict.fromkeys(reads, self._device.record_event())

    def _before_forward(self, group: ReadGroup) -> None:
        """Install the parameters of a group, and of those gathered with it, before a module of the group is called."""
        self._forward_seen = True
        for read in groups_gathered_with(group, self._group_by_state):
            names = [name for name in read.reads if name in self._pending]
            if names:
                self._check_not_torn()
                check_sharded(read)
                self._install_parameters(names, all_streams=read.state is not None)

    @torch.no_grad()
    def _install_parameters(self, names: list[str], *, all_streams: bool = True) -> None:
        """Install these parameters; if their copies are enqueued, make training wait for the copies."""
        self._write_parameters([name for name in names if self._pending[name] is None])
        for event in {id(event): event for name in names if (event := self._pending[name]) is not None}.values():
            self._device.wait_for_event(event, all_streams=all_streams)
        for name in names:
            del self._pending[name]
        if self.on_installed is not None:
            self.on_installed(names)

    def _write_parameters(self, names: list[str]) -> None:
        self.torn = True  # until the last parameter is written
        for name in names:
            for copy in self._copies_of.get(name, ()):
                self._write_copy(copy)
        self.torn = False

    def _write_pulled_copy(self, copy: ShardCopy) -> None:
        write_pulled(self._device, copy)

    def _write_merged_copy(self, copy: ShardCopy) -> None:
        remainder = self._remainders.room_for(copy)
        write_merged(self._device, copy, self._kept.difference(copy), remainder, FiniteCheck(self._device))
        self._kept.drop_copies([copy])

    def _forget_pending(self) -> None:
        self._device.synchronize()
        self._pending = {}
        self._remove_hooks()

    def _check_not_torn(self) -> None:
        if self.torn:
            raise LocalProtocolError("the model is torn: an install failed half-way; restart the training job")

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        """Register hooks that run before parameters are read or replaced.

        The hooks are plain functions, which a deep copy of the model shares: calls of the copy's modules are ignored.
        """

        def install_rest(*_: Any) -> None:
            self.finish_install()

        def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ours = {id(p) for p in self._parameters.values()}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                # with a closure the forward comes later
                self.finish_install() if any(map(callable, (*args, *kwargs.values()))) else self.on_inner_step()

        def before_forward(group: ReadGroup, module: nn.Module) -> Callable[..., None]:
            return lambda called, *_: self._before_forward(group) if called is module else None

        self._handles.append(register_optimizer_step_pre_hook(before_step))
        for group in self._groups:
            for module in group.modules:
                # prepend: otherwise fully_shard's own hook would gather the old shards first
                hook = before_forward(group, module)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
                self._handles.append(module.register_state_dict_pre_hook(install_rest))
                self._handles.append(module.register_load_state_dict_pre_hook(install_rest))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a backward has written a gradient that is not zero."""
    gradient = parameter.grad
    if is_dtensor(gradient):
        gradient = gradient.to_local()
    return gradient is not None and bool((gradient != 0).any())
