"""Which modules' forwards read which parameters: what `install: forward` must have installed before each of them.

A *home* is what is read together: a module that `fully_shard` wraps (with others, if it wraps several as one), which
gathers all its parameters in its own pre-forward; otherwise a module that stands in a ModuleList, Sequential or
ModuleDict, the outermost one, with all that it holds; and the model itself, with all the rest. A parameter is installed
before the first call of any module of its home, so a module may read what is inside it and what lies beside it in the
same home, called or not. A parameter that stands in two homes is installed before either.

Looks at modules only: no copy, no stream, no rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dips.client.parallel.torch_types import is_fsdp
from dips.errors import ConfigError, LocalProtocolError

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
INSTEAD = "use install: whole"


@dataclass(eq=False)
class Home:
    """Modules that read their parameters together."""

    modules: list[nn.Module] = field(default_factory=list)  # the first call of any of them reads
    reads: dict[str, nn.Parameter] = field(default_factory=dict)
    state: Any = None  # of fully_shard, if that is what makes it one


def homes(model: nn.Module, names: Mapping[nn.Parameter, str]) -> list[Home]:
    """The homes that hold any of the parameters in `names`, in the order in which modules were registered.

    Raise ConfigError if a module reads its parameters where no hook of it can come before.
    """
    found: dict[Any, Home] = {}
    for module, key in _walk(model, model, listed=False):
        _check(module)
        home = found.setdefault(key, Home())
        if is_fsdp(module):
            home.state = _state(module)
        home.modules.append(module)
        home.reads |= {names[p]: p for p in module.parameters(recurse=False) if p in names}
    return [home for home in found.values() if home.reads]


def gathered_with(home: Home, among: Mapping[Any, Home]) -> Iterator[Home]:
    """The homes whose shards are gathered when this one's forward begins: its own, and those that it prefetches.

    among  homes by their state
    """
    yield home
    if home.state is not None:
        ahead = (among.get(state) for state in home.state._states_to_forward_prefetch)
        yield from (other for other in ahead if other is not None)


def check_sharded(home: Home) -> None:
    """Raise LocalProtocolError if the home's shards were gathered already: what is installed now would not be read."""
    if home.state is None:
        return
    for group in _groups(home.state):
        if group._all_gather_result is not None or not group.is_sharded:
            raise LocalProtocolError(
                f"{sorted(home.reads)[0]}: gathered by FSDP before the forward of its module (unshard()?), and before "
                f"what was pulled is installed: {INSTEAD}"
            )


def _walk(module: nn.Module, key: Any, *, listed: bool) -> Iterator[tuple[nn.Module, Any]]:
    """Every module with its home's key."""
    if is_fsdp(module):
        key, listed = _state(module), True
    yield module, key
    for child in module.children():
        own = not listed and isinstance(module, LISTS)
        yield from _walk(child, child if own else key, listed=listed or own)


def _check(module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"install: forward cannot hook into a {kind}: {INSTEAD}")
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise ConfigError(f"install: forward would break the compiled graph of a {kind} at its hooks: {INSTEAD}")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ConfigError(f"install: forward knows DistributedDataParallel around the whole model only: {INSTEAD}")
    if is_fsdp(module) and not _known(_state(module)):
        raise ConfigError(f"install: forward does not know the {kind} of torch {torch.__version__}: {INSTEAD}")


def _state(module: Any) -> Any:
    """What fully_shard keeps of a module; one and the same for modules that it wraps as one."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


def _known(state: Any) -> bool:
    """Whether this torch says what is read here of a wrapped module's state; none of it is public."""
    return hasattr(state, "_states_to_forward_prefetch") and all(
        hasattr(group, "_all_gather_result") and hasattr(group, "is_sharded") for group in _groups(state)
    )


def _groups(state: Any) -> list[Any]:
    """Parameters that are gathered together: older torch has one group of them in a state, or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
