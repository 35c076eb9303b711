"""Di-PS: several training clusters, far apart and unequal, train one large language model together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dips.client.load import ModelFollower

__version__ = "0.2.0.dev0"


def load(model: torch.nn.Module, file: Path | str) -> str | None:
    """Load a version that `dips export` wrote into a plain module; return the version's name, None if it is not there.

    The file must hold every trainable parameter of the model, and nothing that the model has not, in fp32, of its shape
    and finite; one name of a tied parameter is enough. Of a model that is frozen as a whole, for inference, what the
    file holds is filled, and what it lacks is warned of. Otherwise raises ConfigError or CorruptSnapshot, and leaves
    the model unchanged.

        model = build()
        dips.load(model, "model.safetensors")
    """
    from dips.client.load import load_version

    return load_version(model, file)


def follow(
    model: torch.nn.Module | Callable[[Mapping[str, torch.Tensor]], object],
    master: str,
    credentials: Path | str | None = None,
    name: str = "follow",
) -> ModelFollower:
    """Install the newest version of a running run in a plain module, and each later one when `update` is called.

    model        its trainable parameters are the run's; or a function that takes tensors by name, fp32 and on the host,
                 and copies them before it returns, as inference engines do to load weights
    master       host:port
    credentials  a certificate NAME.puller.crt, with its key and ca.crt beside it; None: plain text, on loopback
    name         without a certificate: two followers at once need two names
    Errors       UnavailableMaster, UnavailableSlave; ConfigError: the run's model is another one; Denied: the
                 certificate may not pull, or its name is in use

        with dips.follow(model, "10.0.0.1:7800", "certs/serve.puller.crt") as follower:
            for prompt in prompts:
                version = follower.update()  # v12@r17: of the pass that follows, whatever arrives meanwhile
                model.generate(prompt)
    """
    from dips.client.load import follow_model

    return follow_model(model, master, credentials, name)
