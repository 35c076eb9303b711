"""Tests for torch's types without importing the modules that define them.

`torch.distributed.tensor` and `torch.distributed.fsdp` add seconds to a rank's start, and a plain model needs neither:
as long as no other code has imported them, no object is of their types.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    return _is_instance(tensor, "torch.distributed.tensor", "DTensor")


def is_fsdp(module: object) -> bool:
    """Return whether `fully_shard` wraps a module."""
    return _is_instance(module, "torch.distributed.fsdp", "FSDPModule")


def _is_instance(thing: object, module: str, name: str) -> bool:
    defined: Any = getattr(sys.modules.get(module), name, None)
    return defined is not None and isinstance(thing, defined)
