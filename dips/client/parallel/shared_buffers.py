"""Buffers that the clusters share beside the parameters, named by `shared.share_buffers` and held like parameters.

Meant for state that no gradient changes and that the model computes with: the bias by which a router balances its
experts (`*expert_bias*`), running means. It should be equal on all ranks that hold it; otherwise one rank's value is
used for each part. The outer step averages it by tokens (outer/averaged_layers.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from dips.errors import ConfigError
from dips.protocol.grouping import is_shared_buffer
from dips.protocol.manifest import Manifest, unmatched_patterns


def choose_buffers(
    named: Iterable[tuple[str, torch.Tensor]], patterns: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a pattern names. Raises ConfigError for a buffer that cannot be averaged."""
    for name, buffer in named if patterns else ():
        if is_shared_buffer(name, patterns):
            if not buffer.dtype.is_floating_point:
                raise ConfigError(
                    f"share_buffers: {name} is a buffer of {buffer.dtype}, of which there is no mean: expected "
                    f"patterns that name buffers of float types alone, got {', '.join(patterns)}"
                )
            yield name, buffer


def check_parameter(name: str, patterns: Collection[str]) -> None:
    """Raise ConfigError for a trainable parameter that a pattern names: it would lose its learning rate and
    momentum.
    """
    if is_shared_buffer(name, patterns):
        raise ConfigError(
            f"share_buffers: {name} is a trainable parameter, which is shared anyway: expected patterns that name "
            f"buffers alone, got {', '.join(patterns)}"
        )


def check_found(manifest: Manifest, patterns: Collection[str]) -> None:
    """Raise ConfigError for a pattern that names no buffer of the whole model."""
    for pattern in unmatched_patterns(manifest, patterns):
        raise ConfigError(
            f"share_buffers: no buffer's name matches {pattern!r}; `model.named_buffers()` lists them, and the names "
            "are those of the whole model, without prefixes of wrappers"
        )
