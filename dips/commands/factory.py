"""Makes a model by `--factory MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from dips.errors import ConfigError

if TYPE_CHECKING:
    import torch


def make_module(spec: str, seed: int = 0) -> torch.nn.Module:
    """Call MODULE:FUNCTION under a seed; raise ConfigError unless it returns a torch.nn.Module."""
    module_name, colon, function_name = spec.partition(":")
    if not colon:
        raise ConfigError(f"--factory: expected MODULE:FUNCTION, got {spec!r}")
    sys.path.insert(0, "")  # a factory beside the run file is the usual case
    try:
        import torch

        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--factory {spec}: {error}") from error
    torch.manual_seed(seed)
    made = function()
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"--factory {spec}: expected a torch.nn.Module, got {type(made).__name__}")
    return made
