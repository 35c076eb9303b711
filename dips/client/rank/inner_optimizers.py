"""The optimizers that train this rank's model, found by their steps, since a training script need not pass them.

Every torch.optim.Optimizer calls a global hook when it steps. An optimizer that holds a parameter of the model, or that
the script has passed, is ours: its state is dropped after the model has diverged, because moments that are not finite
would make the next step diverge again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from dips.client.parallel.devices import is_captured
from dips.client.parallel.masters import unwrap_optimizers
from dips.errors import ConfigError, LocalProtocolError

UNSEEN_STEPS = 16  # steps of another optimizer of this model without one of the followed: then this is an error


FIRST_RATES = ("step_size", "eta")  # state of Rprop and ASGD that starts as the learning rate
FIRST_VALUES = {"mu_product": 1.0, "mu": 1.0}  # initial state of NAdam and of ASGD; all other state starts as 0
CAPTURED = (
    "follow_optimizer: the step of {kind} is captured in a CUDA graph, whose replays call no hook and would not be "
    "counted: call outer.step after each replay"
)


class InnerOptimizers:
    """The optimizers of one rank; watches their steps until `close`."""

    def __init__(self, parts: Sequence[nn.Module], named: Any = None) -> None:
        """Start watching; `named` is the script's `optimizer` argument, of any kind."""
        self._parts = parts
        self._found: WeakSet[Optimizer] = WeakSet(unwrap_optimizers(named))
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # steps of any optimizer
        self.steps = 0
        """The most steps that one optimizer has taken since this was made: parameters may be divided among several.

        Counts any optimizer of this process: one that steps copies of the parameters holds none of ours. It is read at
        every inner step, so it is stored. 0 (unknown) once a step was captured in a CUDA graph.
        """
        self._captured = False
        self._followed: tuple[Optimizer, Callable[[], None]] | None = None
        self._handle = register_optimizer_step_post_hook(self._on_step)

    @property
    def follows(self) -> bool:
        """Whether the steps of some optimizer are reported."""
        return self._followed is not None

    @property
    def stepped(self) -> list[Optimizer]:
        """All optimizers of this process that have stepped: some may step copies of the parameters and hold none of
        ours.
        """
        return list(self._steps)

    def follow_steps(self, optimizer: Any, on_step: Callable[[], None]) -> None:
        """Call `on_step` at the end of each step of this optimizer, or of the one that it wraps.

        Raises ConfigError if that is not one torch optimizer, or another is followed already.
        """
        found = list(unwrap_optimizers(optimizer))
        if len(found) != 1:
            raise ConfigError(
                f"expected one torch optimizer, or one that wraps it, got {type(optimizer).__name__} of {len(found)}: "
                "name the one that steps last, or call OuterLoop.step after all have"
            )
        if self._followed is not None and self._followed[0] is not found[0]:
            raise ConfigError("another optimizer's steps are counted already: name the one that steps last")
        self._followed = (found[0], on_step)
        self._unseen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # steps of others before its first step

    def drop_state(self) -> str:
        """Clear optimizer states and gradients; return why this does not mend the model on this rank, or ""."""
        if not self._found and self._steps:  # if no optimizer has ever stepped, the script writes parameters itself
            return "its optimizer is not known: pass it, OuterLoop(model, optimizer=optimizer)"
        for optimizer in self._found:
            _clear_state(optimizer)
        fixed = {p for o in self._found for group in o.param_groups if group.get("capturable") for p in group["params"]}
        for part in self._parts:
            for parameter in part.parameters():
                if parameter.grad is not None and parameter in fixed:  # a CUDA graph may write there
                    parameter.grad.zero_()
                else:
                    parameter.grad = None  # gradients may be accumulated into
        spoilt = next((name for part in self._parts for name, b in part.named_buffers() if _holds_nan(b)), "")
        return f"{spoilt}, a buffer that no pull replaces, holds NaN" if spoilt else ""

    def close(self) -> None:
        """Stop watching."""
        self._followed = None
        self._handle.remove()

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._captured = self._captured or is_captured(p for group in optimizer.param_groups for p in group["params"])
        if self._captured:
            self._on_captured(optimizer)
            return
        steps = self._steps.get(optimizer, 0) + 1
        if steps == 1:
            if self._is_ours(optimizer):
                self._found.add(optimizer)
            self.steps = max(self._steps.values(), default=0)  # the optimizer that this one replaces may be gone
        self._steps[optimizer] = steps
        self.steps = max(self.steps, steps)
        if self._followed is None:
            return
        if self._followed[0] is optimizer:
            self._followed[1]()  # after the step is counted: an outer step compares its install with the steps taken
        elif optimizer in self._found and self._followed[0] not in self._steps:
            self._count_unseen(optimizer, type(self._followed[0]).__name__)

    def _on_captured(self, optimizer: Optimizer) -> None:
        """Process a step captured in a CUDA graph: further steps are replays, which call no hook."""
        if self._is_ours(optimizer):
            self._found.add(optimizer)
        self.steps = 0
        if self._followed is not None and self._followed[0] is optimizer:
            raise LocalProtocolError(CAPTURED.format(kind=type(optimizer).__name__))

    def _count_unseen(self, optimizer: Optimizer, followed: str) -> None:
        self._unseen[optimizer] = self._unseen.get(optimizer, 0) + 1
        if self._unseen[optimizer] >= UNSEEN_STEPS:
            raise LocalProtocolError(
                f"follow_optimizer: {type(optimizer).__name__} has stepped {UNSEEN_STEPS} times with this model's "
                f"parameters, the {followed} that is followed not once, so no step was counted: give the one that "
                "steps, or call outer.step after each optimizer step"
            )

    def _is_ours(self, optimizer: Optimizer) -> bool:
        ours = {id(parameter) for part in self._parts for parameter in part.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])


def _clear_state(optimizer: Optimizer) -> None:
    known = type(optimizer).__module__.startswith("torch.optim.")  # others' state may hold masters, too
    if known and any(group.get("capturable") for group in optimizer.param_groups):
        for group in optimizer.param_groups:  # a CUDA graph with the step keeps using this memory
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    value.fill_(float(group["lr"]) if key in FIRST_RATES else FIRST_VALUES.get(key, 0.0))
        return
    if isinstance(optimizer, torch.optim.Adagrad):  # the only one in torch that makes its state before the first step
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["step"].zero_()
                optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])
        return
    optimizer.state = defaultdict(dict)


def _holds_nan(buffer: torch.Tensor) -> bool:
    """Return whether a buffer holds a NaN; infinities are allowed, since attention masks contain them."""
    return buffer.is_floating_point() and buffer.numel() > 0 and bool(torch.isnan(torch.aminmax(buffer).max))
