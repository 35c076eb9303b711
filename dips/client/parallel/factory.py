"""Finds what MODULE:FUNCTION names, and makes a model by `--factory`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from dips.errors import ConfigError


def make_module(spec: str, *, seed: int = 0, device: str = "cpu") -> torch.nn.Module:
    """Call MODULE:FUNCTION under a seed; raise ConfigError unless it returns a torch.nn.Module.

    device  where its parameters lie; "meta": nowhere, for their names and shapes alone
    """
    function = find_function(spec, "--factory")
    torch.manual_seed(seed)
    with torch.device(device):
        made = function()
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"--factory {spec}: expected a torch.nn.Module, got {type(made).__name__}")
    return made


def find_function(spec: str, option: str) -> Callable[..., Any]:
    """The function that an option's MODULE:FUNCTION names; raise ConfigError if there is none."""
    module_name, colon, function_name = spec.partition(":")
    if not colon:
        raise ConfigError(f"{option}: expected MODULE:FUNCTION, got {spec!r}")
    sys.path.insert(0, "")  # a module beside the run file or the cluster file is the usual case
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} {spec}: {error}") from error
    return found
