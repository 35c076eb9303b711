"""Which of torch's types a thing has, without importing what defines them.

`torch.distributed.tensor` and `torch.distributed.fsdp` cost seconds at a rank's start, and a plain model needs neither:
as long as nothing else has imported them, nothing is of their types.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed: it knows where its local part lies."""
    return _is_instance(tensor, "torch.distributed.tensor", "DTensor")


def is_fsdp(module: object) -> bool:
    """Whether `fully_shard` wraps a module."""
    return _is_instance(module, "torch.distributed.fsdp", "FSDPModule")


def _is_instance(thing: object, module: str, name: str) -> bool:
    defined: Any = getattr(sys.modules.get(module), name, None)
    return defined is not None and isinstance(thing, defined)
