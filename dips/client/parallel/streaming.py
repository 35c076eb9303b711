"""Host memory of one layer, for hosts that cannot hold a shard beside the model (`install: streaming`).

A pull brings one layer, spreads it and installs it, then the next: from the first copied byte on until the last, the
model is torn. A push reads each chunk from the model when it is asked for, which stands still meanwhile; only what must
be handed over inside the cluster first (shards along an inner dim) is gathered into memory, for the time of the push.

Needs the codec fp32: differences to a base need the base. An optimizer's masters are written with their layer, so
there is nothing for it to reload.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dips.client.parallel.host import HostMemory, RankExchange
from dips.client.parallel.plan import End, TransferPlan
from dips.client.parallel.seam import Adapter, Held
from dips.transport.shares import Piece
from dips.wire.chunks import Range
from dips.wire.frame import Buffer


class StreamedMemory(HostMemory):
    """One layer of what this rank holds of θ."""

    ONE_LAYER = True

    def __init__(self, adapter: Adapter, held: Sequence[Held], plan: TransferPlan, exchange: RankExchange) -> None:
        super().__init__(adapter, held, plan, exchange)
        self._live = dict(self._found())
        self._staged: dict[int, torch.Tensor] = {}
        self.encode = self._read_chunk
        # Arrays that nobody writes or reads: a transfer wants one for each piece, and the system gives no page for it.
        self._named = [Piece(*piece, np.empty(piece.length, np.float32)) for piece in plan.pieces]
        self._at: dict[tuple[int, int], list[int]] = {}
        for number, piece in enumerate(plan.pieces):
            self._at.setdefault((piece.layer, piece.param), []).append(number)

    @property
    def pieces(self) -> list[Piece]:
        """What this rank pushes: names and lengths; `encode` has the elements."""
        return self._named

    def pieces_of(self, layer: int) -> list[Piece]:
        """What this rank pulls of one layer, into the memory that all layers share."""
        return [piece for piece in self._pieces if piece.layer == layer]

    def gather(self) -> None:
        """Stage what must be handed over before a push."""
        numbers = [n for n in range(len(self._plan.pieces)) if n not in self._live]
        self._staged = {n: torch.empty(self._plan.pieces[n].length) for n in numbers}
        super().gather()

    def release(self) -> None:
        """The push is over."""
        self._staged = {}

    @torch.no_grad()
    def install_layer(self, layer: int) -> None:
        """Spread and install one layer that was pulled on all ranks; collective."""
        self.spread((layer,))
        self._adapter.reshard()
        self._copy((self._params[layer], self._masters[layer]))

    def _found(self) -> list[tuple[int, torch.Tensor]]:
        """The pieces that lie in one run of the model's own memory, and that memory, flat."""
        pairs = [(l, *pair) for l, hands in enumerate(self._plan.gather) for pair in hands.keeps]
        whole = [(l, s, t) for l, s, t in pairs if t.rect.is_run and t.rect.numel == self._plan.pieces[t.index].length]
        return [(target.index, self._read(layer, source).view(-1)) for layer, source, target in whole]

    def _frozen(self, end: End) -> torch.Tensor | None:
        if end.index in self._live:
            return None
        memory, rect = self._staged[end.index], end.rect
        at = rect.first - self._plan.pieces[end.index].offset
        return memory.as_strided((rect.rows, rect.cols), (rect.width, 1), at)

    def _read_chunk(self, chunk: Range, _: memoryview) -> Buffer:
        """The elements of a chunk, as they are in the model now. On the transfer's own thread."""
        for number in self._at[chunk.layer, chunk.param]:
            piece = self._plan.pieces[number]
            if piece.offset <= chunk.offset and chunk.offset + chunk.length <= piece.offset + piece.length:
                memory = self._live[number] if number in self._live else self._staged[number]
                at = chunk.offset - piece.offset
                elements = memory[at : at + chunk.length].to("cpu", torch.float32)
                return elements.numpy().view(np.uint8).data
        raise AssertionError(f"{chunk} was asked for and is in no piece of this rank")
