"""Remarks on buffers that may train but are not shared: running means, moving averages, routers' biases.

A run shares the buffers that `shared.share_buffers` names. All others stay in each cluster and are in no export, so a
model with BatchNorm that is loaded from an export has its initial running means, without any error. Integers
(num_batches_tracked) have no mean and cannot be shared; buffers that are not persistent are made again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from dips.client.parallel.tensors import plain_name
from dips.printable import join_some
from dips.protocol.grouping import is_shared_buffer


class BufferWatch:
    """Finds buffers on one rank that train though they are not shared: the first steps change them."""

    def __init__(self, parts: Sequence[nn.Module], patterns: Collection[str]) -> None:
        self._parts, self._patterns = parts, patterns
        self._sums: dict[str, float] | None = self._present_sums()

    def describe_changed(self) -> str:
        """Return a remark on the changed buffers at the first call; "" if there are none, and at later calls."""
        if self._sums is None:
            return ""
        before, self._sums = self._sums, None
        changed = [name for name, total in self._present_sums().items() if before.get(name, total) != total]
        if not changed:
            return ""
        return (
            f"{join_some(changed)}: buffers that train and are not shared: each cluster keeps its own, and exports "
            f"lack them. To share them make the run with {_line(changed, self._patterns)}"
        )

    def _present_sums(self) -> dict[str, float]:
        with torch.no_grad():
            return {
                name: float(buffer.double().sum())
                for name, buffer in find_unshared(self._parts, self._patterns)
                if not buffer.is_meta
            }


def find_unshared(parts: Sequence[nn.Module], patterns: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers of float types that no pattern names, with their names in the model."""
    for part in parts:
        for path, module in part.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = plain_name(f"{path}.{name}" if path else name)
                kept = name not in module._non_persistent_buffers_set and type(buffer) is torch.Tensor
                if kept and buffer.is_floating_point() and not is_shared_buffer(full, patterns):
                    yield full, buffer


def advise_run(model: nn.Module, patterns: Collection[str]) -> str:
    """Return advice on buffers for a new run of this model; "" if it has no such buffers."""
    names = [name for name, _ in find_unshared([model], patterns)]
    if not names:
        return ""
    return (
        f"not shared: the buffers {join_some(names)}. If they train (running means, say), share them: under `shared` "
        f"write {_line(names, patterns)}"
    )


def warn_of_missing(model: nn.Module, names: Collection[str], file: str) -> None:
    """Warn of the model's buffers that a loaded file lacks."""
    missing = [name for name, _ in find_unshared([model], ()) if name not in names]
    if missing:
        warnings.warn(
            f"{file} does not hold the buffers {join_some(missing)}, which stay as the model has them: right for "
            "constants, wrong for what trains, as running means do: measure those anew, or share them "
            f"({_line(missing, ())} in the run)",
            stacklevel=3,
        )


def _line(names: Sequence[str], patterns: Collection[str]) -> str:
    """Return the line for the run file, with a pattern for each kind of buffer."""
    kinds = dict.fromkeys(f"*{name.rpartition('.')[2]}" for name in names)
    return f"share_buffers: {json.dumps([*patterns, *kinds])}"
