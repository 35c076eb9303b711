"""The Trainer's learning rate over the run's progress: its own curve and warm-up, without its max_steps.

Clusters have no common step count, and the run ends by tokens. So the curve of `lr_scheduler_type` spans the tokens
that the run has accepted plus those that this cluster has trained on since. The warm-up counts the Trainer's steps
(`warmup_steps`), or is a share of the run (a number below 1). `outer.lr_scale` slows a cluster that joins late.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from dips.client.learning_rate import NO_TARGET
from dips.client.rank.outer_loop import OuterLoop

# Curves with a beginning and an end; all others are defined by step counts, which mean nothing to the run.
CURVES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr", "constant", "constant_with_warmup",
)  # fmt: skip
CURVE_STEPS = 1_000_000  # steps of the curve from the run's beginning to its end
OWN_STEPS = (
    "the learning rate follows the Trainer's own steps, not the run's progress: {why}; take one of the "
    "lr_scheduler_types " + ", ".join(CURVES)
)


class RunRate:
    """The run's progress, and the learning-rate factor at this progress."""

    def __init__(self, outer: OuterLoop, args: TrainingArguments) -> None:
        self._outer, self._args, self._tokens = outer, args, 0
        self._target = outer.shared.stop.tokens
        self._curve: Callable[[float], float] = lambda share: 1.0
        self._here = (outer.version, outer.progress)

    @property
    def share(self) -> float:
        """The share of the run's token target that is trained: accepted tokens and this cluster's tokens since; 0
        to 1.
        """
        return min(1.0, self._outer.progress + (self._tokens / self._target if self._target else 0.0))

    @property
    def pending(self) -> bool:
        """Whether this cluster has trained since it pulled its version."""
        return self._tokens > 0 and self._here == (self._outer.version, self._outer.progress)

    def record_step(self, tokens: int) -> None:
        """Count the tokens of one optimizer step; call it after the outer step that may follow."""
        here = (self._outer.version, self._outer.progress)
        self._tokens = self._tokens + tokens if here == self._here else 0
        self._here = here

    def take_over(self, scheduler: Any, optimizer: Any) -> str:
        """Make the scheduler follow the run from its next step on, and set the current step's rate.

        Returns the reason why the scheduler cannot follow the run, to be shown as a warning, or "".
        """
        kind = str(getattr(self._args.lr_scheduler_type, "value", self._args.lr_scheduler_type))
        if not isinstance(scheduler, LambdaLR):
            return OWN_STEPS.format(why=f"{type(scheduler).__name__} has no curve")
        if not all(_is_of_transformers(curve) for curve in scheduler.lr_lambdas):
            return OWN_STEPS.format(why="its scheduler is the script's own")
        if kind in CURVES and self._target:
            self._curve = _read_curve(kind, self._args)
            curves: list[Callable[[int], float]] = [self._rate_at for _ in scheduler.lr_lambdas]
        else:
            curves = [partial(self._slow_down, curve) for curve in scheduler.lr_lambdas]
        scheduler.lr_lambdas = [_as_function(curve) for curve in curves]  # schedulers save objects, not functions
        rates = [base * curve(scheduler.last_epoch) for base, curve in zip(scheduler.base_lrs, curves, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate if not isinstance(group["lr"], torch.Tensor) else group["lr"].fill_(rate)
        scheduler._last_lr = rates  # what the Trainer logs for this step
        if not self._target:
            return NO_TARGET.replace("schedule()", "the Trainer's learning rate")
        return "" if kind in CURVES else OWN_STEPS.format(why=f"{kind} counts steps")

    def _rate_at(self, step: int) -> float:
        return min(self._warmup_at(step), self._outer.lr_scale) * self._curve(self.share)

    def _slow_down(self, curve: Callable[[int], float], step: int) -> float:
        return curve(step) * self._outer.lr_scale

    def _warmup_at(self, step: int) -> float:
        """Return the warm-up factor: as in the Trainer, 0 at the first step if there is a warm-up."""
        steps = float(self._args.warmup_steps)
        if steps >= 1:
            return min(1.0, step / steps)
        share = steps or float(getattr(self._args, "warmup_ratio", 0.0) or 0.0)  # transformers below 5 has this key
        return min(1.0, self.share / share) if share else 1.0


def _read_curve(kind: str, args: TrainingArguments) -> Callable[[float], float]:
    """Return the Trainer's curve, without its warm-up, as a function of the share of the run."""
    none = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)  # some curves read the optimizer's rate
    kwargs: Any = args.lr_scheduler_kwargs or None
    made = get_scheduler(
        kind, none, num_warmup_steps=0, num_training_steps=CURVE_STEPS, scheduler_specific_kwargs=kwargs
    )
    (curve,) = made.lr_lambdas
    return lambda share: curve(round(share * CURVE_STEPS))


def _is_of_transformers(curve: Any) -> bool:
    return str(getattr(getattr(curve, "func", curve), "__module__", "")).startswith("transformers.")


def _as_function(curve: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: curve(step)
