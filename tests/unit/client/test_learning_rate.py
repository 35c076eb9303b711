"""The inner learning rate follows the run's progress, and rises after a join into a run under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dips.client import cosine, schedule
from dips.client.learning_rate import NO_TARGET
from dips.protocol.options import StopOptions


def test_cosine_ends() -> None:
    """1 at the beginning, the floor at the end and after it."""
    assert [cosine(p, 0.1) for p in (0.0, 1.0, 1.5)] == pytest.approx([1.0, 0.1, 0.1])
    assert cosine(0.5, 0.0) == pytest.approx(0.5)


def test_the_rate_is_curve_times_warm_up() -> None:
    """Two factors, read anew at each step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    outer: Any = SimpleNamespace(progress=0.0, lr_scale=0.25, shared=SimpleNamespace(stop=StopOptions(tokens=9)))
    scheduler = schedule(optimizer, cast(Any, outer), curve=lambda p: 1 - p)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)
    outer.progress, outer.lr_scale = 0.5, 1.0
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)


def test_a_schedule_without_an_end_is_told() -> None:
    """Without `stop.tokens` the run's progress stays 0 and the rate never falls: a warning, and a remark for status."""
    told: list[str] = []
    shared = SimpleNamespace(stop=StopOptions(versions=9))
    outer: Any = SimpleNamespace(progress=0.0, lr_scale=1.0, shared=shared, remark=told.append)
    with pytest.warns(UserWarning, match="stop.tokens"):
        schedule(torch.optim.SGD([torch.zeros(1)], lr=2.0), cast(Any, outer))
    assert told == [NO_TARGET]


def test_a_target_that_the_file_does_not_know() -> None:
    """`dips set` gave the run one: its progress shows it, and nothing is said."""
    outer: Any = SimpleNamespace(progress=0.1, lr_scale=1.0, shared=SimpleNamespace(stop=StopOptions()))
    schedule(torch.optim.SGD([torch.zeros(1)], lr=2.0), cast(Any, outer))
