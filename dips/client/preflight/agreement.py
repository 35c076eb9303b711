"""The manifest of our model, to be compared with the run's: from a safetensors file or from a factory function."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from dips.errors import ConfigError
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest


def manifest_of_file(path: Path, grouping: Grouping) -> Manifest:
    """Return the manifest of a safetensors file; reads names and shapes only."""
    try:
        with safe_open(path, framework="np") as file:
            shapes = ((n, tuple(file.get_slice(n).get_shape())) for n in file.offset_keys())
            return Manifest.from_shapes(shapes, grouping)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--model {path}: expected a safetensors file: {error}") from error


def manifest_of_factory(spec: str, grouping: Grouping) -> Manifest:
    """Return the manifest of the model that MODULE:FUNCTION makes, without memory for its parameters (torch's meta
    device).
    """
    from dips.client.parallel import full_parameters
    from dips.client.parallel.factory import make_module

    parameters, _ = full_parameters(make_module(spec, device="meta"), grouping.share_buffers)
    return Manifest.from_shapes(((name, tuple(tensor.shape)) for name, tensor in parameters.items()), grouping)
