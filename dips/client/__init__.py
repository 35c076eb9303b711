"""The client side of Di-PS: the agent, a separate process beside a training job, and the library inside every rank.

    from dips.client import OuterLoop

Names are resolved when they are first asked for, so that the agent, which shares this package, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dips.distribution import refuse_other_dips

if TYPE_CHECKING:
    from dips.client.learning_rate import cosine, schedule
    from dips.client.rank.outer_loop import OuterLoop

__all__ = ["OuterLoop", "cosine", "schedule"]

_HOMES = {"OuterLoop": "rank.outer_loop", "cosine": "learning_rate", "schedule": "learning_rate"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refuse_other_dips()
    home = import_module(f"dips.client.{_HOMES[name]}")
    return getattr(home, name)
