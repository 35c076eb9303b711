"""Makes a model by `--factory MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import sys

import torch

from dips.errors import ConfigError


def make_module(spec: str, *, seed: int = 0, device: str = "cpu") -> torch.nn.Module:
    """Call MODULE:FUNCTION under a seed; raise ConfigError unless it returns a torch.nn.Module.

    device  where its parameters lie; "meta": nowhere, for their names and shapes alone
    """
    module_name, colon, function_name = spec.partition(":")
    if not colon:
        raise ConfigError(f"--factory: expected MODULE:FUNCTION, got {spec!r}")
    sys.path.insert(0, "")  # a factory beside the run file or the cluster file is the usual case
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--factory {spec}: {error}") from error
    torch.manual_seed(seed)
    with torch.device(device):
        made = function()
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"--factory {spec}: expected a torch.nn.Module, got {type(made).__name__}")
    return made
