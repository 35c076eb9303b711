"""Tokens of one rank instead of the cluster's are told, where they can be told apart."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from dips.client.rank.step_checks import StepChecks


class CountingRanks:
    """Three ranks, of which this is rank 0; the others have passed `others` tokens."""

    rank = 0

    def __init__(self, *others: int) -> None:
        self._others, self.gathers = others, 0

    def all_gather(self, message: bytes) -> list[bytes]:
        self.gathers += 1
        return [message, *(json.dumps(n).encode() for n in self._others)]


def checked(*others: int) -> CountingRanks:
    ranks: Any = CountingRanks(*others)
    checks = StepChecks(ranks)
    checks.on_step(100, 0)
    for _ in range(3):
        checks.compare_ranks()
    return ranks


def lone() -> Any:
    return CountingRanks()


def test_ranks_that_count_for_themselves_are_told() -> None:
    """Once, with all numbers and what to pass."""
    with pytest.warns(UserWarning, match=r"passed 100, 90, 100 tokens.*the same number on each"):
        assert checked(90, 100).gathers == 1


def test_ranks_that_agree_or_leave_it_to_rank_0_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked(100, 100)
        checked(0, 0)


def test_a_call_for_each_micro_batch_is_told() -> None:
    """Four micro-batches in an optimizer step, each of them reported: once, with the numbers and the remedy."""
    checks = StepChecks(lone())

    def take_steps() -> None:
        for call in range(1, 65):
            checks.on_step(8, call // 4)

    with pytest.warns(UserWarning, match=r"called 16 times in 4 optimizer steps.*once after each") as told:
        take_steps()
    assert len(told) == 1


@pytest.mark.parametrize("seen", [lambda call: call, lambda call: 0, lambda call: 2 * call])
def test_a_call_for_each_step_is_not(seen: Callable[[int], int]) -> None:
    """Nor where no torch optimizer steps, or two of them for each call."""
    checks = StepChecks(lone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in range(1, 65):
            checks.on_step(8, seen(call))
