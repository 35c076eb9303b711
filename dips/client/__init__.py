"""LIVES, beside a training job: the agent (a process of its own) and the library inside every rank.

    from dips.client import OuterLoop

The name is resolved when it is first asked for, so that the agent, which shares this package, does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dips.client.outer_loop import OuterLoop

__all__ = ["OuterLoop"]


def __getattr__(name: str) -> Any:
    if name == "OuterLoop":
        from dips.client.outer_loop import OuterLoop

        return OuterLoop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
