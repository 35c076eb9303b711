"""An install that the training does not stand still for: `install: forward` (EDiT §3.1).

When all ranks have agreed that a version lies whole in host memory, training goes on at once. On an accelerator the
copies of all layers are asked for there and then, home by home (reach.py) in the order of the forward, on a stream of
their own, and the pre-forward hook of a home's modules waits for its own: while layer l computes, l+1 arrives. On the
CPU the hook copies: another thread would only take the cores and the memory's bandwidth from the forward. A `merge`
computes what `HostMemory.merge` does, in the same places.

Hooks are there only while something is left. They come before those of `fully_shard`, so what FSDP gathers is the new
shard. What no forward reaches is installed before an optimizer steps, before a state_dict is made or loaded, before the
next transfer, and at the end of the next inner step.

What must stay true: nothing of the old version is computed with once the new one was agreed on. A parameter that was
read without a call of any module of its home is noticed by its gradient, and said, before the optimizer steps.

One thread: the training's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dips.client.parallel.host import Copy, HostMemory, RankExchange
from dips.client.parallel.plan import TransferPlan
from dips.client.parallel.reach import INSTEAD, Home, check_sharded, gathered_with
from dips.client.parallel.seam import Adapter, Held
from dips.client.parallel.torch_types import is_dtensor
from dips.errors import LocalProtocolError


class LazyMemory(HostMemory):
    """A shard in host memory that goes into the model as the forward comes by."""

    def __init__(self, adapter: Adapter, held: Sequence[Held], plan: TransferPlan, exchange: RankExchange) -> None:
        """Raise ConfigError if a forward would not read what is written just before it."""
        homes = adapter.homes()
        super().__init__(adapter, held, plan, exchange)
        assert not any(self._masters), "an adapter with masters has no homes"
        self._homes, self._by_state = homes, {home.state: home for home in homes if home.state is not None}
        self._parameters = {name: p for home in homes for name, p in home.reads.items()}
        self._copies_of: dict[str, list[Copy]] = {name: [] for name in self._parameters}
        for copies in self._params:
            for copy in copies:
                self._copies_of[copy.name].append(copy)
        self._left: dict[str, torch.Event | None] = {}  # still to be installed; when it will have arrived, if under way
        self._write: Callable[[Copy], None] = _replace
        self._reached = False  # by a forward, since the install began
        self._handles: list[RemovableHandle] = []

    def gather(self) -> None:
        """Freeze the version that was installed last, all of it, and what was trained on it."""
        self.finish()
        super().gather()

    def install(self) -> None:
        """Begin to copy the shard into the model: whoever reads a parameter next reads the new one."""
        self._begin(_replace)

    def merge(self) -> None:
        """Begin to add to the model what the shard differs in from what was kept."""
        self._begin(self._add)

    def finish(self) -> None:
        """Install what is left, and let go of the model and of the host memory."""
        if not self._handles:
            return
        self._check()
        self._land(list(self._left))
        self._device.wait()
        self._unhook()

    def stepped(self) -> None:
        """An inner step was taken: install what it did not reach.

        Raise LocalProtocolError if it reached nothing: it was taken on parameters that the version replaces.
        """
        if not self._handles:
            return
        self._check()
        if not self._reached:
            raise LocalProtocolError(
                "a version was pulled and no module of the model was called in the step after it (a captured graph? a "
                f".forward()? parameters written by hand?): {INSTEAD}"
            )
        for name in self._left:
            if _has_gradient(self._parameters[name]):
                raise LocalProtocolError(
                    f"{name}: has a gradient, and no module that it stands in was called: what was pulled came too "
                    f"late for this step: {INSTEAD}"
                )
        self.finish()

    # ---- begun, reached, landed --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self, write: Callable[[Copy], None]) -> None:
        assert not self._handles, "what was begun is finished before the next transfer"
        self._check()
        self._adapter.reshard()
        self._write, self._reached = write, False
        self._left = dict.fromkeys(self._parameters)
        self._hook()
        if not self._device.accelerated:
            return
        with self._device.aside():
            for home in self._homes:
                names = [name for name in home.reads if self._left[name] is None]
                self._put(names)
                mark = self._device.mark()
                self._left |= dict.fromkeys(names, mark)

    def _reach(self, home: Home) -> None:
        """A module of this home is about to be called."""
        self._reached = True
        for read in gathered_with(home, self._by_state):
            names = [name for name in read.reads if name in self._left]
            if names:
                self._check()
                check_sharded(read)
                self._land(names, everywhere=read.state is not None)

    @torch.no_grad()
    def _land(self, names: list[str], *, everywhere: bool = True) -> None:
        """Install these parameters, or let the training wait for those under way."""
        self._put([name for name in names if self._left[name] is None])
        for mark in {id(mark): mark for name in names if (mark := self._left[name]) is not None}.values():
            self._device.hold(mark, everywhere=everywhere)
        for name in names:
            del self._left[name]

    def _put(self, names: list[str]) -> None:
        self.torn = True  # until the last of them is written
        for name in names:
            for copy in self._copies_of[name]:
                self._write(copy)
        self.torn = False

    def _add(self, copy: Copy) -> None:
        kept, device = self._kept[copy].view(copy.view.shape), copy.view.device
        there = copy.host.to(device, non_blocking=True) - kept.to(device, non_blocking=True)
        copy.view.add_(there)

    def _check(self) -> None:
        if self.torn:
            raise LocalProtocolError("the model is torn: an install was broken off; only a new start can mend it")

    # ---- who calls -------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        """Be called before whoever reads or replaces parameters.

        The hooks are plain functions, which a deep copy of the model shares: calls of the copy's modules are not ours.
        """

        def finish(*_: Any) -> None:
            self.finish()

        def before_step(optimizer: torch.optim.Optimizer, words: tuple[Any, ...], options: dict[str, Any]) -> None:
            mine = {id(p) for p in self._parameters.values()}
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                # a closure has the forward still before it
                self.finish() if any(map(callable, (*words, *options.values()))) else self.stepped()

        def before_forward(home: Home, module: nn.Module) -> Callable[..., None]:
            return lambda called, *_: self._reach(home) if called is module else None

        self._handles.append(register_optimizer_step_pre_hook(before_step))
        for home in self._homes:
            for module in home.modules:
                # prepend: fully_shard's own hook, which gathers the shards, stands first until now
                reach = before_forward(home, module)
                self._handles.append(module.register_forward_pre_hook(reach, prepend=True))
                self._handles.append(module.register_state_dict_pre_hook(finish))
                self._handles.append(module.register_load_state_dict_pre_hook(finish))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _replace(copy: Copy) -> None:
    device, dtype = copy.view.device, copy.view.dtype
    # Another type is made where the parameter lies: made in host memory it would hold this thread up.
    source = copy.host if dtype == copy.host.dtype else copy.host.to(device, non_blocking=True)
    copy.view.copy_(source, non_blocking=True)


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Whether a backward has come to it."""
    gradient = parameter.grad
    if is_dtensor(gradient):
        gradient = gradient.to_local()
    return gradient is not None and bool((gradient != 0).any())
