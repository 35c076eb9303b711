"""Di-PS: several training clusters, far apart and unequal, train one large language model together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"


def load(model: torch.nn.Module, file: Path | str) -> str | None:
    """Fill a plain module with a version that `dips export` wrote; return the version's name, if the file has one.

    The file must hold every trainable parameter of the model and nothing else, in fp32, of its shape and finite; of
    tied parameters one is enough. Raise ConfigError or CorruptSnapshot otherwise, and leave the model as it is.

        model = build()
        dips.load(model, "model.safetensors")
    """
    from dips.client.load import load_version

    return load_version(model, file)
