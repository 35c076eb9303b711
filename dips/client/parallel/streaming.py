"""Host memory of one layer, for hosts that cannot hold a shard beside the model (`install: streaming`).

A pull receives one layer, scatters and installs it, then the next: from the first copied byte to the last, the model
is torn. A push reads each chunk from the model when a slave asks for it, while training is paused; only what must be
exchanged inside the cluster first (shards along an inner dim) is gathered into memory, for the time of the push.

Needs the codec fp32: differences to a base need the base. An optimizer's masters are written with their layer, so
none have to be made from the parameters. What 16 bits round away is kept for all layers (remainders.py): 4 B of host
memory for each such parameter of the shard, as much as `whole` has for its pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dips.client.parallel.exchange import RankExchange
from dips.client.parallel.host import HostMemory, Layers
from dips.client.parallel.plan import LocalRect, TransferPlan
from dips.client.parallel.seam import Adapter, HeldParameter
from dips.transport.shares import Piece
from dips.wire.chunks import Range
from dips.wire.frame import Buffer


class StreamedMemory(HostMemory):
    """One layer of what this rank holds of θ."""

    ONE_LAYER = True

    def __init__(
        self, adapter: Adapter, held: Sequence[HeldParameter], plan: TransferPlan, exchange: RankExchange
    ) -> None:
        super().__init__(adapter, held, plan, exchange)
        self._staged: dict[int, torch.Tensor] = {}
        self.encode_chunk = self._read_chunk
        # Never written nor read: a transfer needs an array for each piece, and untouched ones take no physical memory.
        self._unbacked = [Piece(*piece, np.empty(piece.length, np.float32)) for piece in plan.pieces]
        self._at: dict[tuple[int, int], list[int]] = {}
        for number, piece in enumerate(plan.pieces):
            self._at.setdefault((piece.layer, piece.param), []).append(number)

    @property
    def pieces(self) -> list[Piece]:
        """What this rank pushes: names and lengths; `encode_chunk` has the elements."""
        return self._unbacked

    def pieces_of_layer(self, layer: int) -> list[Piece]:
        """What this rank pulls of one layer, into the memory that all layers share."""
        return [piece for piece in self._buffer.pieces if piece.layer == layer]

    def gather_pieces(self, layers: Layers = None) -> None:
        """Stage what must be exchanged before a push: of all layers, since only `install: whole` has fragments."""
        assert layers is None
        numbers = [n for n in range(len(self._plan.pieces)) if n not in self._in_model]
        self._staged = {n: torch.empty(self._plan.pieces[n].length) for n in numbers}
        super().gather_pieces(layers)

    def release_staged(self) -> None:
        """Free what was staged: the push is over."""
        self._staged = {}

    @torch.no_grad()
    def install_layer(self, layer: int) -> None:
        """Scatter and install one layer that was pulled on all ranks; collective."""
        self.scatter_pieces((layer,))
        self._adapter.reshard()
        self._write_pulled((*self._params[layer], *self._masters[layer]))
        self._remainders.keep_installed(self._params[layer])

    def _bind_copies(self) -> None:
        super()._bind_copies()
        found = list(self._find_in_model())
        self._in_model = {target.index: self._read_rect(layer, source).view(-1) for layer, source, target in found}
        self._read_at = {target.index: (layer, source) for layer, source, target in found}

    def _find_in_model(self) -> Iterator[tuple[int, LocalRect, LocalRect]]:
        """Layer, source and target of the pieces that lie in one run of the model's own memory."""
        for layer, moves in enumerate(self._plan.gather):
            for source, target in moves.local:
                if target.rect.is_run and target.rect.numel == self._plan.pieces[target.index].length:
                    yield layer, source, target

    def _frozen_tensor(self, rect: LocalRect) -> torch.Tensor | None:
        if rect.index in self._in_model:
            return None
        memory, part = self._staged[rect.index], rect.rect
        at = part.first - self._plan.pieces[rect.index].offset
        return memory.as_strided((part.rows, part.cols), (part.width, 1), at)

    def _read_chunk(self, chunk: Range, _: memoryview) -> Buffer:
        """Read the elements of a chunk as they are in the model now. Runs on the transfer's thread."""
        for number in self._at[chunk.layer, chunk.param]:
            piece = self._plan.pieces[number]
            if piece.offset <= chunk.offset and chunk.offset + chunk.length <= piece.offset + piece.length:
                at = chunk.offset - piece.offset
                return self._copy_elements(number, slice(at, at + chunk.length)).numpy().view(np.uint8).data
        raise AssertionError(f"{chunk} was asked for and is in no piece of this rank")

    def _copy_elements(self, number: int, cut: slice) -> torch.Tensor:
        if number not in self._in_model:
            return self._staged[number][cut]  # with its remainders: `gather_pieces`
        elements = self._in_model[number][cut].to("cpu", torch.float32)
        remainder = self._remainders.part_for(*self._read_at[number], self._blocks)
        return elements if remainder is None else elements + remainder.reshape(-1)[cut]
