"""Exchange of tensors among the ranks of a cluster, in blocks of bounded size.

The parts for one peer form one stream of fp32 elements, in an order known at both ends; it is cut at places that depend
on shapes alone. Blocks go through memory of the device from which the ranks' process group can send: the accelerator's
if its backend supports it, else the host's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dips.client.parallel.blocks import shaped_like, split_rows
from dips.client.parallel.devices import Device
from dips.client.parallel.plan import Redistribution

TRANSIT_ITEMS = 1 << 23  # 32 MiB for all peers and one direction
LEAST_BLOCK_ITEMS = 1 << 14  # 64 KiB per peer, in a job of any size


class RankExchange(Protocol):
    """Collectives that move tensors between ranks, as JobCollectives does."""

    rank: int
    world_size: int

    def exchange_tensors(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None: ...

    def can_exchange(self, device: torch.device, wanted: bool) -> bool: ...

    def all_gather(self, message: bytes) -> list[bytes]: ...

    def all_min(self, numbers: Sequence[int]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part of the model or of host memory that is sent, [rows, cols]."""

    view: torch.Tensor
    addend: torch.Tensor | None = None  # on the host: the rounding error of 16 bits, to be added; None: none


Batch = list[tuple[torch.Tensor, ...]]


class PartExchange:
    """One rank's side of all exchanges."""

    def __init__(
        self,
        ranks: RankExchange,
        device: Device,
        wanted: bool,
        transit_items: int = TRANSIT_ITEMS,
        least_block_items: int = LEAST_BLOCK_ITEMS,
    ) -> None:
        """Choose the memory for blocks; `wanted`: this rank has something to exchange. Collective."""
        self._ranks, self._device = ranks, device
        self._block_items = max(least_block_items, transit_items // ranks.world_size)
        self._on_device = ranks.can_exchange(device.where, wanted)
        self._transit: dict[tuple[str, int], torch.Tensor] = {}  # block buffers by direction and peer

    def most_numel(self, exchanges: Iterable[Redistribution]) -> int:
        """Return how many elements of 4 B in host memory these exchanges may take in all."""
        largest: dict[tuple[str, int], int] = {}
        for moves in exchanges:
            for direction, parts in (("out", moves.sends), ("in", moves.receives)):
                for peer, rects in parts.items():
                    numel = min(self._block_items, sum(rect.rect.numel for rect in rects))
                    largest[direction, peer] = max(largest.get((direction, peer), 0), numel)
        return 0 if self._on_device else sum(largest.values())

    def move_parts(
        self, sends: Mapping[int, Sequence[SentPart]], receives: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Send parts to peers and fill the parts received from them, on the copy stream; complete on return."""
        outgoing = {
            peer: self._batches([(p.view,) if p.addend is None else (p.view, p.addend) for p in parts])
            for peer, parts in sends.items()
        }
        incoming = {peer: self._batches([(view,) for view in views]) for peer, views in receives.items()}
        while True:
            sent = {peer: batch for peer, batches in outgoing.items() if (batch := next(batches, None))}
            filled = {peer: batch for peer, batches in incoming.items() if (batch := next(batches, None))}
            if not sent and not filled:
                return
            packed = {peer: self._pack_batch(peer, batch) for peer, batch in sent.items()}
            arrived = {peer: self._room("in", peer, _numel(batch)) for peer, batch in filled.items()}
            self._device.synchronize()
            self._ranks.exchange_tensors(packed, arrived)
            for peer, batch in filled.items():
                _unpack_batch(arrived[peer], batch)
            self._device.synchronize()

    def _batches(self, parts: Sequence[tuple[torch.Tensor, ...]]) -> Iterator[Batch]:
        batch: Batch = []
        for part in parts:
            for block in split_rows(self._block_items, *part):
                if _numel(batch) + block[0].numel() > self._block_items:
                    yield batch
                    batch = []
                batch.append(block)
        if batch:
            yield batch

    def _pack_batch(self, peer: int, batch: Batch) -> torch.Tensor:
        packed, at = self._room("out", peer, _numel(batch)), 0
        for view, *addends in batch:
            part = shaped_like(packed[at:], view)
            part.copy_(view, non_blocking=True)
            for addend in addends:
                if not self._on_device:
                    self._device.synchronize()  # the copy may not be complete
                part.add_(addend.to(part.device))
            at += view.numel()
        return packed

    def _room(self, direction: str, peer: int, numel: int) -> torch.Tensor:
        """Return memory for a batch, reused for the following batches."""
        have = self._transit.get((direction, peer))
        if have is None or have.numel() < numel:
            where = self._device.where
            have = torch.empty(numel, device=where) if self._on_device else self._device.allocate_host(numel)
            self._transit[direction, peer] = have
        return have[:numel]


def _numel(batch: Batch) -> int:
    return sum(block[0].numel() for block in batch)


def _unpack_batch(packed: torch.Tensor, batch: Batch) -> None:
    at = 0
    for (view,) in batch:
        view.copy_(shaped_like(packed[at:], view), non_blocking=True)
        at += view.numel()
