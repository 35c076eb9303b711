"""A call for each micro-batch is told, and nothing else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dips.client.rank.steps import StepChecks


def lone() -> Any:
    return SimpleNamespace(rank=0)


def test_a_call_for_each_micro_batch_is_told() -> None:
    """Four micro-batches in an optimizer step, each of them reported: once, with the numbers and the remedy."""
    checks = StepChecks(lone())

    def take_steps() -> None:
        for call in range(1, 65):
            checks.on_step(call // 4)

    with pytest.warns(UserWarning, match=r"called 16 times in 4 optimizer steps.*once after each") as told:
        take_steps()
    assert len(told) == 1


@pytest.mark.parametrize(("steps", "told"), [(8, True), (9, False)])
def test_two_micro_batches_in_a_step_are_told(steps: int, told: bool) -> None:
    """Half as many optimizer steps as calls; more of them, as where a GradScaler skips some, are as they should be."""
    checks = StepChecks(lone())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(16):
            checks.on_step(steps)
    assert bool(warned) is told


@pytest.mark.parametrize("seen", [lambda call: call, lambda call: 0, lambda call: 2 * call])
def test_a_call_for_each_step_is_not(seen: Callable[[int], int]) -> None:
    """Nor where no torch optimizer steps, or two of them for each call."""
    checks = StepChecks(lone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in range(1, 65):
            checks.on_step(seen(call))
