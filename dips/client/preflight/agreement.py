"""Our model, to be compared with the run's: from a safetensors file or from the function that makes it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dips.errors import ConfigError
from dips.protocol.manifest import Manifest


def manifest_of_file(path: Path) -> Manifest:
    """Read names and shapes of a safetensors file; its bytes are not read."""
    try:
        with safe_open(path, framework="np") as file:
            return Manifest.from_shapes((n, tuple(file.get_slice(n).get_shape())) for n in file.offset_keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--model {path}: expected a safetensors file: {error}") from error


def manifest_of_factory(spec: str) -> Manifest:
    """Call MODULE:FUNCTION without memory for its parameters (torch's meta device) and lay its model out."""
    module, colon, function = spec.partition(":")
    if not colon:
        raise ConfigError(f"--factory: expected MODULE:FUNCTION, got {spec!r}")
    sys.path.insert(0, "")  # a factory beside the cluster file is the usual case
    try:
        import torch

        from dips.client.parallel import full_parameters

        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--factory {spec}: {error}") from error
    with torch.device("meta"):
        made = make()
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"--factory {spec}: expected a torch.nn.Module, got {type(made).__name__}")
    parameters, _ = full_parameters(made)
    return Manifest.from_shapes((name, tuple(tensor.shape)) for name, tensor in parameters.items())
