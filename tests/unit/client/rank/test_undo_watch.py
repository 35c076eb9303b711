"""An optimizer that writes back what a pull replaced is noticed at its next step; training is not mistaken for it."""

from __future__ import annotations

import pytest
import torch

from dips.client.rank.undo_watch import LEAST_STEPS, UndoWatch
from dips.errors import ConfigError

STEPS = 10


def after_a_pull(old: torch.Tensor, pulled: torch.Tensor, new: torch.Tensor, steps: int = STEPS, seen: int = 1) -> None:
    """A parameter of one value, pulled to another, stands at a third after `seen` optimizer steps more."""
    watch, parameter = UndoWatch(), old.clone()
    views = [("w", parameter)]
    for _ in range(steps):
        watch.on_inner_step(0)
    watch.take_before(views)
    parameter.copy_(pulled)
    watch.take_after(optimizer_steps=3)
    parameter.copy_(new)
    watch.on_inner_step(3 + seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_old_values_after_the_next_step_end_the_job(dtype: torch.dtype) -> None:
    """The step began from masters of its own: named, with what to write."""
    old = torch.randn(100, 30).to(dtype)
    with pytest.raises(ConfigError, match=r"w: the first optimizer step.*OuterLoop\(model, optimizer=optimizer\)"):
        after_a_pull(old, old + 0.05, old + 1e-3)


def test_training_is_no_undoing() -> None:
    """A step from what was pulled, in whatever direction; a pull that changed nothing; no step seen; too few steps."""
    old = torch.randn(100, 30)
    pulled = old + 0.05 * torch.randn(100, 30)
    after_a_pull(old, pulled, pulled + 1e-3)
    after_a_pull(old, pulled, pulled + (old - pulled) / LEAST_STEPS)
    after_a_pull(old, old, old)
    after_a_pull(old, pulled, old, seen=0)
    after_a_pull(old, pulled, old, steps=LEAST_STEPS - 1)
    after_a_pull(torch.randn(0, 3), torch.randn(0, 3), torch.randn(0, 3))
