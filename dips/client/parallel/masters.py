"""fp32 masters that an optimizer keeps for parameters of fewer bits, in the places where frameworks keep them.

    state[p]["master_param"] and the like      Transformer Engine's and other FusedAdam, torch-style foreach optimizers
    param_groups_master                        apex's FusedAdam(master_weights=True)
    param_d2h_map                              torchao's CPUOffloadOptimizer
    param_groups of fp32 copies                loops that keep them by hand, in the order of the model's parameters

They are looked up again whenever the model is read or written: most are made at the first step. For any other optimizer
the script passes a function instead, which is called after every install and makes masters from parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from dips.errors import ConfigError

STATE_KEYS = ("master_param", "master_params", "master_weight", "master_weights", "main_param", "fp32_param")


class OptimizerMasters:
    """The masters of one optimizer for the parameters of one model."""

    def __init__(self, given: Any) -> None:
        """Accept an optimizer, a wrapper of one, a function to be called after installs, or None."""
        self._sync: Callable[[], Any] | None = given if callable(given) and not hasattr(given, "step") else None
        self._optimizers = () if self._sync is not None else tuple(unwrap_optimizers(given))
        if given is not None and self._sync is None and not self._optimizers:
            raise ConfigError(
                f"optimizer: expected a torch optimizer, one that wraps it, or a function that makes masters from "
                f"parameters, got {type(given).__name__}"
            )

    @property
    def has_function(self) -> bool:
        """Whether the script's function makes the masters, which are unknown here."""
        return self._sync is not None

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer was given, in which masters may be found."""
        return bool(self._optimizers)

    @property
    def known(self) -> bool:
        """Whether pulls reach the masters: an optimizer or a function was given."""
        return self._sync is not None or bool(self._optimizers)

    def find_masters(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Return the masters of those parameters that have one."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        wanted = {id(p): p for p in parameters if p.dtype is not torch.float32 or self._by_map(p) is not None}
        for optimizer in self._optimizers:
            for parameter, master in (*_from_state(optimizer), *_from_groups(optimizer)):
                if id(parameter) in wanted:
                    found[parameter] = master
        for parameter in wanted.values():
            if (copy := self._by_map(parameter)) is not None:
                found[parameter] = copy
        if self._optimizers and wanted and not found:
            found |= self._by_order(list(parameters))
        return found

    def call_sync(self) -> None:
        """Call the script's function after parameters were written."""
        if self._sync is not None:
            self._sync()

    def _by_map(self, parameter: nn.Parameter) -> torch.Tensor | None:
        maps = (getattr(optimizer, "param_d2h_map", {}) for optimizer in self._optimizers)
        return next((found[parameter] for found in maps if parameter in found), None)

    def _by_order(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Match the parameters with the tensors of an optimizer that steps copies of them, in their order."""
        stepped = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        ours = {id(p) for p in parameters}
        if any(id(p) in ours for p in stepped):
            return {}
        alike = len(stepped) == len(parameters) and all(
            p.shape == q.shape and q.dtype is torch.float32 for p, q in zip(parameters, stepped, strict=True)
        )
        if not alike:
            raise ConfigError(
                f"the optimizer steps {len(stepped)} tensors that are neither the model's {len(parameters)} parameters "
                "nor their fp32 copies in the same order: give a function instead that makes them from the "
                "parameters, OuterLoop(model, optimizer=function)"
            )
        return dict(zip(parameters, stepped, strict=True))


def unwrap_optimizers(given: Any) -> Iterator[Optimizer]:
    """Yield the torch optimizers that step inside a wrapper of accelerate, Megatron-core, DeepSpeed or apex.

    accelerate's wrapper inherits from Optimizer, and torch's hooks are called with the wrapped optimizer.
    """
    for one in getattr(given, "chained_optimizers", None) or [given]:
        seen = set[int]()
        while (inner := getattr(one, "optimizer", None)) is not None and id(one) not in seen:
            if isinstance(one, Optimizer) and not isinstance(inner, Optimizer):
                break  # the attribute means something else in this class
            seen.add(id(one))
            one = inner
        if isinstance(one, Optimizer):
            yield one


def _from_state(optimizer: Optimizer) -> Iterator[tuple[Any, torch.Tensor]]:
    for parameter, state in optimizer.state.items():
        if isinstance(state, dict):
            masters = (state.get(key) for key in STATE_KEYS)
            yield from ((parameter, m) for m in masters if isinstance(m, torch.Tensor) and m.shape == parameter.shape)


def _from_groups(optimizer: Optimizer) -> Iterator[tuple[Any, torch.Tensor]]:
    held = getattr(optimizer, "param_groups_master", None) or ()
    for group, masters in zip(optimizer.param_groups, held, strict=False):
        yield from zip(group["params"], masters["params"], strict=True)
