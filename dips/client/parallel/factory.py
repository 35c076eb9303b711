"""Lookup of functions given as MODULE:FUNCTION, and creation of a model by `--factory`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from dips.errors import ConfigError


def make_module(spec: str, *, seed: int = 0, device: str = "cpu") -> torch.nn.Module:
    """Call MODULE:FUNCTION under a seed and return its model. Raises ConfigError unless it is a torch.nn.Module.

    device  of its parameters; "meta": names and shapes only, without memory
    """
    function = find_function(spec, "--factory")
    _require_no_arguments(spec, function)
    torch.manual_seed(seed)
    with torch.device(device):
        made = function()
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"--factory {spec}: expected a torch.nn.Module, got {type(made).__name__}")
    return made


def find_function(spec: str, option: str) -> Callable[..., Any]:
    """Return the function that an option gives as MODULE:FUNCTION. Raises ConfigError if there is none."""
    module_name, _, function_name = spec.partition(":")
    if not function_name or not module_name or module_name.startswith("."):
        raise ConfigError(f"{option}: expected MODULE:FUNCTION, got {spec!r}")
    sys.path.insert(0, "")  # the module usually is beside the run file or the cluster file
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} {spec}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{option} {spec}: expected a function, got a {type(found).__name__}")
    return found


def _require_no_arguments(spec: str, function: Callable[..., Any]) -> None:
    """Raise ConfigError if a factory is a model itself, or cannot be called as it will be."""
    if isinstance(function, torch.nn.Module):
        raise ConfigError(f"--factory {spec}: expected a function that returns the model, got the model: write one")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"--factory {spec}: is called without arguments: {error}") from error
