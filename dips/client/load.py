"""Loading of an exported version into a model: all tensors that the run shares and nothing else, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from dips.client.parallel.tensors import plain_name
from dips.client.parallel.unshared_buffers import warn_of_missing
from dips.errors import ConfigError, CorruptSnapshot

MOST_NAMES = 5  # parameter names that a message lists


def load_version(model: nn.Module, file: Path | str) -> str | None:
    """Copy the trainable parameters and shared buffers from a file of `dips export` into a plain module; see
    dips.load.
    """
    path = Path(file)
    try:
        with safe_open(path, framework="pt") as opened:
            names = _match_names(path, model, set(opened.keys()))
            _check_tensors(path, opened, names)
            with torch.no_grad():
                for name, parameter in names.items():
                    parameter.copy_(opened.get_tensor(name))
            warn_of_missing(model, set(opened.keys()), str(path))
            metadata: Mapping[str, str] = opened.metadata() or {}
            return metadata.get("version")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file; `dips export` writes one") from error
    except SafetensorError as error:
        raise CorruptSnapshot(f"{path}: is no whole safetensors file: {error}") from error


def _match_names(path: Path, model: nn.Module, there: set[str]) -> dict[str, torch.Tensor]:
    """Map each name in the file to its parameter (a tied parameter may have any of its names) or its buffer."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(parameter, []).append(plain_name(name))
    found: dict[str, torch.Tensor] = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    found = {name: buffer for name, buffer in found.items() if name in there and buffer.dtype.is_floating_point}
    found |= {name: parameter for parameter, names in aliases.items() for name in names if name in there}
    missing = [names[0] for names in aliases.values() if not there & set(names)]
    unknown = sorted(there - found.keys())
    if missing or unknown:
        parts = [f"{what}: {_shorten(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ConfigError(f"{path}: is not of this model; {'; '.join(parts)}; frozen parameters are not in such a file")
    return found


def _check_tensors(path: Path, opened: Any, names: Mapping[str, torch.Tensor]) -> None:
    """Check all tensors before the first is copied, so that a model is filled completely or not at all."""
    for name, parameter in names.items():
        if isinstance(parameter, DTensor) or parameter.is_meta:
            raise ConfigError(
                f"{name}: expected a whole parameter on this process; load before fully_shard, not on meta"
            )
        told = opened.get_slice(name)
        if told.get_dtype() != "F32" or tuple(told.get_shape()) != tuple(parameter.shape):
            seen = f"{told.get_dtype()} of shape {tuple(told.get_shape())}"
            raise ConfigError(f"{path}: {name}: expected F32 of shape {tuple(parameter.shape)}, got {seen}")
        if not torch.isfinite(opened.get_tensor(name)).all():
            raise CorruptSnapshot(f"{path}: {name}: not all numbers are finite")


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
