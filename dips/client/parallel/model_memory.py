"""Detection of tensors that the framework or the script has moved or replaced after the model was laid out.

A parameter that is the same object with other memory (`to()`, `bfloat16()`, masters that an optimizer made at its first
step) is described again. Another object under its name (`fully_shard`, load_state_dict(assign=True), a swapped module)
is an error, since it is unknown which of the two is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from itertools import chain
from weakref import ref

import torch

from dips.client.parallel.adapter import Adapter, HeldParameter
from dips.errors import ConfigError


class ModelMemory:
    """The adapter's description of a model, and the addresses of its tensors at that time."""

    def __init__(self, adapter: Adapter, held: Sequence[HeldParameter]) -> None:
        self._adapter, self._held = adapter, list(held)
        self._names = {h.name for h in held}
        self._owners = [(name, ref(owner)) for name, owner, _ in adapter.local_tensors() if name in self._names]
        self._lies_at = self._list_places(adapter.local_tensors())

    @torch.no_grad()
    def compare_memory(self) -> tuple[str, bool]:
        """Return the first parameter that is another object now, or "", and whether tensors or masters have moved.

        Walks over the model once: mixtures of experts have tens of thousands of parameters, and this is called several
        times per round.
        """
        tensors = list(self._adapter.local_tensors())
        present = {(name, id(owner)) for name, owner, _ in tensors}
        gone = min((name for name, owner in self._owners if (name, id(owner())) not in present), default="")
        return gone, not gone and self._list_places(tensors) != self._lies_at

    def describe_again(self) -> tuple[list[HeldParameter], str]:
        """Return the adapter's present description, and the first parameter whose parts here have changed, or ""."""
        try:
            described = merge_tied(self._adapter.held_parameters())
        except ConfigError as error:
            return [], str(error)
        before, now = {h.name: _extent(h) for h in self._held}, {h.name: _extent(h) for h in described}
        other = min((name for name in before.keys() | now.keys() if before.get(name) != now.get(name)), default="")
        if not other:
            self._held, self._lies_at = described, self._list_places(self._adapter.local_tensors())
        return described, other

    def _list_places(
        self, tensors: Iterable[tuple[str, torch.Tensor, torch.Tensor]]
    ) -> set[tuple[str, int, torch.dtype]]:
        return {
            (name, memory.data_ptr(), memory.dtype)
            for name, _, memory in chain(tensors, self._adapter.local_masters())
            if name in self._names
        }


def merge_tied(held: list[HeldParameter]) -> list[HeldParameter]:
    """Merge the two copies of a tied parameter in two chunks: the first is read and both are written."""
    found: dict[str, HeldParameter] = {}
    for h in held:
        first = found.get(h.name)
        if first is not None and first.shape != h.shape:
            raise ConfigError(f"{h.name}: shape {first.shape} in one chunk of the model, {h.shape} in another")
        found[h.name] = (
            replace(first, writes=first.writes + h.writes, masters=first.masters + h.masters) if first else h
        )
    return list(found.values())


def _extent(held: HeldParameter) -> object:
    """Return a value that identifies the parts of the full parameter that are here."""
    return held.shape, *([astuple(block.rect) for block in blocks] for blocks in (held.reads, held.writes))
