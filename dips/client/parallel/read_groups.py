"""Read groups: which modules' forwards read which parameters, so that `install: lazy` installs these before.

A *read group* is read together: a module that `fully_shard` wraps (with others, if it wraps several as one),
which gathers all its parameters in its own pre-forward; otherwise an entry of a ModuleList, Sequential or ModuleDict,
the outermost one, with everything inside it; and the model itself, with the rest. A parameter is installed before the
first call of any module of its group, so a module may read any parameter of its own group, whether or not the module
that holds it is called. A parameter in two groups is installed before either.

Inspects modules only: no copies, streams or ranks.
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
class ReadGroup:
    """Modules that read their parameters together."""

    modules: list[nn.Module] = field(default_factory=list)  # the first call of any of them reads the parameters
    reads: dict[str, nn.Parameter] = field(default_factory=dict)
    state: Any = None  # fully_shard's state; None: it does not wrap these modules


def find_read_groups(model: nn.Module, names: Mapping[nn.Parameter, str]) -> list[ReadGroup]:
    """Return the groups that hold any of the parameters in `names`, in the order in which modules were registered.

    Raises ConfigError if a module reads its parameters where no hook can run before it.
    """
    found: dict[Any, ReadGroup] = {}
    for module, key in _walk_modules(model, model, listed=False):
        _check_module(module)
        group = found.setdefault(key, ReadGroup())
        if is_fsdp(module):
            group.state = _fsdp_state(module)
        group.modules.append(module)
        group.reads |= {names[p]: p for p in module.parameters(recurse=False) if p in names}
    return [group for group in found.values() if group.reads]


def groups_gathered_with(group: ReadGroup, among: Mapping[Any, ReadGroup]) -> Iterator[ReadGroup]:
    """Yield the groups whose shards are gathered when this group's forward begins: itself, and those that it
    prefetches.

    among  groups by their state
    """
    yield group
    if group.state is not None:
        ahead = (among.get(state) for state in group.state._states_to_forward_prefetch)
        yield from (other for other in ahead if other is not None)


def check_sharded(group: ReadGroup) -> None:
    """Raise LocalProtocolError if the group's shards are already gathered: values installed now would not be read."""
    if group.state is None:
        return
    for sharded in _fsdp_param_groups(group.state):
        if sharded._all_gather_result is not None or not sharded.is_sharded:
            raise LocalProtocolError(
                f"{sorted(group.reads)[0]}: gathered by FSDP before the forward of its module (by `unshard`?), and "
                f"before what was pulled is installed: {INSTEAD}"
            )


def _walk_modules(module: nn.Module, key: Any, *, listed: bool) -> Iterator[tuple[nn.Module, Any]]:
    """Yield every module with its group's key."""
    if is_fsdp(module):
        key, listed = _fsdp_state(module), True
    yield module, key
    for child in module.children():
        own = not listed and isinstance(module, LISTS)
        yield from _walk_modules(child, child if own else key, listed=listed or own)


def _check_module(module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"install: lazy cannot hook into a {kind}: {INSTEAD}")
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise ConfigError(f"install: lazy would break the compiled graph of a {kind} at its hooks: {INSTEAD}")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ConfigError(f"install: lazy supports DistributedDataParallel around the whole model only: {INSTEAD}")
    if is_fsdp(module) and not _is_known_state(_fsdp_state(module)):
        raise ConfigError(f"install: lazy does not support the {kind} of torch {torch.__version__}: {INSTEAD}")


def _fsdp_state(module: Any) -> Any:
    """Return the state that fully_shard keeps for a module; modules that it wraps as one share it."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


def _is_known_state(state: Any) -> bool:
    """Return whether this version of torch has the private attributes of a wrapped module's state that are read
    here.
    """
    return hasattr(state, "_states_to_forward_prefetch") and all(
        hasattr(group, "_all_gather_result") and hasattr(group, "is_sharded") for group in _fsdp_param_groups(state)
    )


def _fsdp_param_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that are gathered together; in older torch a state has one group or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
