"""Di-PS: several training clusters, far apart and unequal, train one large language model together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"


def load(model: torch.nn.Module, file: Path | str) -> str | None:
    """Load a version that `dips export` wrote into a plain module; return the version's name, None if it is not there.

    The file must hold every trainable parameter of the model and nothing else, in fp32, of its shape and finite; one
    name of a tied parameter is enough. Otherwise raises ConfigError or CorruptSnapshot, and leaves the model unchanged.

        model = build()
        dips.load(model, "model.safetensors")
    """
    from dips.client.load import load_version

    return load_version(model, file)
