"""An install that training does not wait for: `install: lazy` (EDiT §3.1).

When all ranks have agreed that a version lies whole in host memory, training goes on at once. On an accelerator the
copies of all layers are enqueued right away on a stream of their own, one read group (read_groups.py) after the other
in the order of the forward, and the pre-forward hook of a group's modules waits for the group's own: while layer l
computes, l+1 arrives. On the CPU the hook copies: another thread would compete with the forward for cores and memory
bandwidth. A merge computes what `HostMemory.merge_shard` does, in the same places.

Hooks are registered only while something is pending. They run before those of `fully_shard`, so what FSDP gathers is
the new shard. What no forward reads is installed before an optimizer steps, before a state_dict is made or loaded,
before the next transfer, and at the end of the next inner step.

What must stay true: nothing is computed with the old version once the new one was agreed on. A parameter that was read
although no module of its group was called is detected by its gradient, and refused before the optimizer steps.

Single-threaded: everything runs on the training's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dips.client.parallel.host import HostMemory, Layers, RankExchange
from dips.client.parallel.kept_shard import ShardCopy
from dips.client.parallel.plan import TransferPlan
from dips.client.parallel.read_groups import INSTEAD, ReadGroup, check_sharded, groups_gathered_with
from dips.client.parallel.seam import Adapter, HeldParameter
from dips.client.parallel.torch_types import is_dtensor
from dips.errors import LocalProtocolError


class LazyMemory(HostMemory):
    """A shard in host memory whose parameters are copied into the model just before a forward reads them."""

    def __init__(
        self, adapter: Adapter, held: Sequence[HeldParameter], plan: TransferPlan, exchange: RankExchange
    ) -> None:
        """Raise ConfigError if a forward would not read what is written just before it."""
        read_groups = adapter.read_groups()
        super().__init__(adapter, held, plan, exchange)
        self._groups = read_groups
        self._group_by_state = {group.state: group for group in read_groups if group.state is not None}
        self._parameters = {name: p for group in read_groups for name, p in group.reads.items()}
        self._pending: dict[str, torch.Event | None] = {}  # to be installed; the event of its copies if enqueued
        self._write_copy: Callable[[ShardCopy], None] = _write_pulled
        self._forward_seen = False  # of any group, since the install began
        self._handles: list[RemovableHandle] = []

    def _bind_copies(self) -> None:
        super()._bind_copies()
        assert not any(self._masters), "an adapter with masters has no read groups"
        self._copies_of: dict[str, list[ShardCopy]] = {}
        for copy in chain(*self._params):
            self._copies_of.setdefault(copy.name, []).append(copy)

    def gather_pieces(self, layers: Layers = None) -> None:
        """Freeze the version that was installed last, all of it, and what was trained on it."""
        self.finish_install()
        super().gather_pieces(layers)

    def install_shard(self) -> None:
        """Begin to copy the shard into the model: the next read of a parameter sees the new value."""
        self._begin_install(_write_pulled)
        self._remainders.keep_installed(chain(*self._params))

    def merge_shard(self, layers: Layers = None) -> None:
        """Begin to add to the model what the shard differs in from what was kept: all of it, as in streaming.py."""
        assert layers is None
        self._begin_install(self._write_merged)

    def finish_install(self) -> None:
        """Install what is pending, remove the hooks; the host memory is free again."""
        if not self._handles:
            return
        self._check_not_torn()
        self._install_parameters(list(self._pending))
        self._device.synchronize()
        self._remove_hooks()

    def on_inner_step(self) -> None:
        """An inner step was taken: install what its forward did not read.

        Raise LocalProtocolError if it called no module: it was taken on parameters that the version replaces.
        """
        if not self._handles:
            return
        self._check_not_torn()
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
    def _begin_install(self, write: Callable[[ShardCopy], None]) -> None:
        assert not self._handles, "an install ends before the next transfer"
        self._check_not_torn()
        self._adapter.reshard()
        self._write_copy, self._forward_seen = write, False
        self._pending = dict.fromkeys(self._parameters)
        self._register_hooks()
        if not self._device.accelerated:
            return
        with self._device.background_copies():
            for group in self._groups:
                names = [name for name in group.reads if self._pending[name] is None]
                self._write_parameters(names)
                event = self._device.record_event()
                self._pending |= dict.fromkeys(names, event)

    def _before_forward(self, group: ReadGroup) -> None:
        """A module of this group is about to be called."""
        self._forward_seen = True
        for read in groups_gathered_with(group, self._group_by_state):
            names = [name for name in read.reads if name in self._pending]
            if names:
                self._check_not_torn()
                check_sharded(read)
                self._install_parameters(names, all_streams=read.state is not None)

    @torch.no_grad()
    def _install_parameters(self, names: list[str], *, all_streams: bool = True) -> None:
        """Install these parameters; for those whose copies are enqueued, have training wait for the copies."""
        self._write_parameters([name for name in names if self._pending[name] is None])
        for event in {id(event): event for name in names if (event := self._pending[name]) is not None}.values():
            self._device.wait_for_event(event, all_streams=all_streams)
        for name in names:
            del self._pending[name]

    def _write_parameters(self, names: list[str]) -> None:
        self.torn = True  # until the last of them is written
        for name in names:
            for copy in self._copies_of.get(name, ()):
                self._write_copy(copy)
        self.torn = False

    def _write_merged(self, copy: ShardCopy) -> None:
        self._remainders.write_merged(copy, copy.view + self._kept.difference_on_device(copy))

    def _check_not_torn(self) -> None:
        if self.torn:
            raise LocalProtocolError("the model is torn: an install failed half-way; restart the training job")

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        """Run before anything reads or replaces parameters.

        The hooks are plain functions, which a deep copy of the model shares: calls of the copy's modules are ignored.
        """

        def install_rest(*_: Any) -> None:
            self.finish_install()

        def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ours = {id(p) for p in self._parameters.values()}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                # with a closure the forward is still to come
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


def _write_pulled(copy: ShardCopy) -> None:
    device, dtype = copy.view.device, copy.view.dtype
    # Cast on the device: a cast in host memory would block this thread.
    source = copy.host if dtype == copy.host.dtype else copy.host.to(device, non_blocking=True)
    copy.view.copy_(source, non_blocking=True)


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Whether a backward has written its gradient."""
    gradient = parameter.grad
    if is_dtensor(gradient):
        gradient = gradient.to_local()
    return gradient is not None and bool((gradient != 0).any())
