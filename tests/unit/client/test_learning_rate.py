"""The inner learning rate follows the run's progress, and rises after a join into a run under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dips.client import cosine, schedule


def test_cosine_ends() -> None:
    """1 at the beginning, the floor at the end and after it."""
    assert [cosine(p, 0.1) for p in (0.0, 1.0, 1.5)] == pytest.approx([1.0, 0.1, 0.1])
    assert cosine(0.5, 0.0) == pytest.approx(0.5)


def test_the_rate_is_curve_times_warm_up() -> None:
    """Two factors, read anew at each step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    outer: Any = SimpleNamespace(progress=0.0, lr_scale=0.25)
    scheduler = schedule(optimizer, cast(Any, outer), curve=lambda p: 1 - p)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)
    outer.progress, outer.lr_scale = 0.5, 1.0
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
