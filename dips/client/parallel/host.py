"""This rank's host memory of θ: what is frozen for a push and what a pull brings, and the way to and from the model.

    push    gather    the model's blocks → pieces, with what other ranks hand over; then the pieces travel
    pull    (bytes arrive in the pieces)
            spread    pieces → this rank's whole shard, in host memory
            install   shard → the model, a copy on this rank alone

The memory is one buffer of 4 B for each parameter of the rank's shard, and holds either pieces or the shard: a piece of
a shard that is one run lies where the shard's memory has it, so nothing is copied there; where pieces and shard are cut
differently, the same bytes are read both ways, and a layer is rearranged at a time. On an accelerator the copies go
through pinned memory on a stream of their own; beside the model at most one block is needed there. On a tight host
the buffer is that of the largest layer, and each is spread and installed before the next is pulled (streaming.py).
Where the training shall not stand still for it, `install` only begins, and the forward does the rest (lazy.py).

`gather` and `spread` are collective: every rank calls them, outside forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from dips.client.parallel.devices import Device
from dips.client.parallel.plan import End, Hands, TransferPlan
from dips.client.parallel.rect import Rect
from dips.client.parallel.seam import Adapter, Held, TensorBlock
from dips.transport.shares import Piece
from dips.wire.chunks import Range
from dips.wire.frame import Buffer

Encode = Callable[[Range, memoryview], Buffer]


class RankExchange(Protocol):
    """Moves tensors between ranks; the Voice of the job does."""

    def exchange(self, gives: dict[int, torch.Tensor], takes: dict[int, torch.Tensor]) -> None: ...


@dataclass(frozen=True, eq=False)
class Copy:
    """From host memory to a tensor of the framework."""

    name: str  # of the parameter
    view: torch.Tensor
    host: torch.Tensor


class HostMemory:
    """What this rank holds of θ, beside the model."""

    ONE_LAYER = False  # all layers share the memory of the largest
    torn = False  # an install broke off between two tensors
    encode: Encode | None = None  # makes the body of a chunk of a push; None: it is in the pieces

    def __init__(self, adapter: Adapter, held: Sequence[Held], plan: TransferPlan, exchange: RankExchange) -> None:
        """`held` is what `adapter` said when the plan was made."""
        self._adapter, self._plan, self._exchange = adapter, plan, exchange
        by_name = {h.name: h for h in held}
        names = [[p.name for p in layer.parameters] for layer in plan.manifest.layers]
        self._held = [[by_name.get(name) for name in layer] for layer in names]
        self._device = Device([b.view for h in held for b in (*h.reads, *h.writes)])
        self._lie()
        self._params = [list(self._copies(layer)) for layer in range(len(names))]
        self._masters = [list(self._master_copies(layer)) for layer in range(len(names))]
        self._kept: dict[Copy, torch.Tensor] = {}  # the shard as it was pushed
        self._places = {place for place in self._places_now() if place[0] in by_name}

    @property
    def pieces(self) -> list[Piece]:
        """What this rank pulls, and pushes; holds what was frozen from `gather` on, what was pulled until `spread`."""
        return self._pieces

    @property
    def layers(self) -> range:
        """Of the manifest."""
        return range(len(self._held))

    def numel(self, layer: int) -> int:
        """Elements of a layer of the full model."""
        return self._plan.manifest.layers[layer].numel

    @property
    def items(self) -> int:
        """Elements of 4 B that are allocated."""
        return self._host.numel()

    def replaced(self) -> str:
        """The first parameter that is not where it was when this was made: what is read here, nobody trains any more.

        `fully_shard`, `to(device)` and load_state_dict(assign=True) replace a model's memory. "" if all are there.
        """
        return min((name for name, _ in self._places - self._places_now()), default="")

    def _places_now(self) -> set[tuple[str, int]]:
        return {(name, memory.data_ptr()) for name, memory in self._adapter.memory()}

    @torch.no_grad()
    def gather(self) -> None:
        """Freeze what this rank speaks for: afterwards the pieces hold it and the model may change."""
        with self._device.copies():
            for layer, hands in enumerate(self._plan.gather):
                gives = {peer: self._packed([self._read(layer, e) for e in ends]) for peer, ends in hands.gives.items()}
                for source, target in hands.keeps:
                    if (frozen := self._frozen(target)) is not None:
                        frozen.copy_(self._read(layer, source), non_blocking=True)
                self._device.wait()
                self._take(hands, gives, lambda _, end: self._frozen(end), layer)

    @torch.no_grad()
    def spread(self, layers: Iterable[int] | None = None) -> None:
        """Turn the pieces, all of them here, into this rank's whole shard; they are void until the next `gather`."""
        for layer in self.layers if layers is None else layers:
            hands = self._plan.spread[layer]
            gives = {peer: self._packed([self._piece(e) for e in ends]) for peer, ends in hands.gives.items()}
            moved = [(self._piece(s).clone(), t) for s, t in hands.keeps if not self._lies_there(layer, s, t)]
            for values, target in moved:
                self._shard(layer, target).copy_(values)
            self._take(hands, gives, self._shard, layer)

    @torch.no_grad()
    def install(self) -> None:
        """Copy the shard into the model's own memory, and into the optimizer's masters."""
        self._adapter.reshard()
        self._copy(self._params)
        self._adapter.reload()
        self._copy(self._masters)

    def finish(self) -> None:
        """Put into the model what is left of an install, if one goes on beside the training (lazy.py)."""

    def stepped(self) -> None:
        """An inner step was taken."""

    def _copy(self, layers: Iterable[Iterable[Copy]]) -> None:
        with self._device.copies():
            for copies in layers:
                for copy in copies:
                    copy.view.copy_(copy.host, non_blocking=True)
            self._device.wait()

    @torch.no_grad()
    def keep(self) -> None:
        """Remember this rank's whole shard as it is now, for a `merge`; allocates it once, in host memory."""
        if not self._kept:
            copies = chain(*self._params, *self._masters)
            self._kept = {copy: self._device.host(copy.view.numel()) for copy in copies}
        with self._device.copies():
            for copy, kept in self._kept.items():
                kept.view(copy.view.shape).copy_(copy.view, non_blocking=True)
            self._device.wait()

    @torch.no_grad()
    def merge_is_finite(self) -> bool:
        """Whether what was trained since `keep` is worth a `merge`: this rank's θ_local and θ_kept are finite."""
        return all(
            bool(torch.isfinite(copy.view).all()) and bool(torch.isfinite(kept).all())
            for copy, kept in self._kept.items()
        )

    @torch.no_grad()
    def merge(self) -> None:
        """Add to the model what the shard differs in from what was kept: θ_local ← θ_shard + (θ_local − θ_kept)."""
        self._adapter.reshard()
        masters = [(copy, copy.view + self._moved(copy)) for copy in chain(*self._masters)]
        for copy in chain(*self._params):
            copy.view.add_(self._moved(copy))
        self._adapter.reload()
        for copy, master in masters:
            copy.view.copy_(master)

    def _moved(self, copy: Copy) -> torch.Tensor:
        """How far the pulled version is from what was kept, where the model's own tensor lies."""
        kept = self._kept[copy].view(copy.view.shape)
        return (copy.host - kept).to(copy.view.device)

    # ---- where things lie ------------------------------------------------------------------------------------------

    def _lie(self) -> None:
        """Allocate once, and find a place for each block and piece."""
        piece_at: dict[int, int] = {}
        self._block_at: dict[tuple[int, int, int], int] = {}
        at = size = 0
        for l, layer in enumerate(self._held):
            writes = [held.writes if held else () for held in layer]
            mine = [(number, piece) for number, piece in enumerate(self._plan.pieces) if piece.layer == l]
            crooked = {piece.param for _, piece in mine if _home(writes[piece.param], piece) is None}
            blocks = [(k, b, block.rect.numel) for k, of in enumerate(writes) for b, block in enumerate(of)]
            for k, b, items in blocks:
                if k not in crooked:
                    self._block_at[l, k, b], at = at, at + items
            for number, piece in mine:
                home = _home(writes[piece.param], piece)
                if piece.param not in crooked and home is not None:
                    piece_at[number] = self._block_at[l, piece.param, home[0]] + home[1]
            pieces_end = blocks_end = at  # what is cut in two ways shares one memory, read as pieces or as blocks
            for number, piece in mine:
                if piece.param in crooked:
                    piece_at[number], pieces_end = pieces_end, pieces_end + piece.length
            for k, b, items in blocks:
                if k in crooked:
                    self._block_at[l, k, b], blocks_end = blocks_end, blocks_end + items
            at = max(pieces_end, blocks_end)
            size = max(size, at)
            at = 0 if self.ONE_LAYER else at
        self._host = self._device.host(size)
        self._memory = [self._host[piece_at[n] : piece_at[n] + p.length] for n, p in enumerate(self._plan.pieces)]
        self._pieces = [Piece(*p, memory.numpy()) for p, memory in zip(self._plan.pieces, self._memory, strict=True)]

    def _block(self, layer: int, param: int, index: int) -> tuple[TensorBlock, torch.Tensor]:
        """A block that is written, and its host memory of the same shape."""
        held = self._held[layer][param]
        assert held is not None
        block, at = held.writes[index], self._block_at[layer, param, index]
        return block, self._host[at : at + block.rect.numel].view(block.rect.rows, block.rect.cols)

    def _read(self, layer: int, end: End) -> torch.Tensor:
        held = self._held[layer][end.param]
        assert held is not None
        block = held.reads[end.index]
        return _sub(block.view, block.rect, end.rect)

    def _piece(self, end: End) -> torch.Tensor:
        piece, memory, rect = self._plan.pieces[end.index], self._memory[end.index], end.rect
        at = memory.storage_offset() + rect.first - piece.offset
        return memory.as_strided((rect.rows, rect.cols), (rect.width, 1), at)

    def _frozen(self, end: End) -> torch.Tensor | None:
        """Where `gather` brings a rectangle of a piece; None if it stays in the model."""
        return self._piece(end)

    def _shard(self, layer: int, end: End) -> torch.Tensor:
        block, host = self._block(layer, end.param, end.index)
        return _sub(host, block.rect, end.rect)

    def _lies_there(self, layer: int, source: End, target: End) -> bool:
        piece, shard = self._piece(source), self._shard(layer, target)
        return piece.data_ptr() == shard.data_ptr() and piece.is_contiguous() and shard.is_contiguous()

    # ---- what travels inside the cluster -----------------------------------------------------------------------------

    def _packed(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        packed = self._device.host(sum(view.numel() for view in views))
        for part, view in zip(_parts(packed, views), views, strict=True):
            part.copy_(view, non_blocking=True)
        return packed

    def _take(
        self, hands: Hands, gives: dict[int, torch.Tensor], where: Callable[[int, End], torch.Tensor | None], layer: int
    ) -> None:
        found = {peer: [where(layer, end) for end in ends] for peer, ends in hands.takes.items()}
        targets = {peer: [view for view in views if view is not None] for peer, views in found.items()}
        assert all(len(targets[peer]) == len(views) for peer, views in found.items()), "what is taken has a place"
        takes = {peer: torch.empty(sum(v.numel() for v in views)) for peer, views in targets.items()}
        self._exchange.exchange(gives, takes)
        for peer, views in targets.items():
            for part, view in zip(_parts(takes[peer], views), views, strict=True):
                view.copy_(part)

    # ---- into the model ----------------------------------------------------------------------------------------------

    def _copies(self, layer: int) -> Iterable[Copy]:
        for l, k, b in self._block_at:
            if l == layer:
                block, host = self._block(l, k, b)
                yield Copy(self._plan.manifest.layers[l].parameters[k].name, block.view, host)

    def _master_copies(self, layer: int) -> Iterable[Copy]:
        for k, held in enumerate(self._held[layer]):
            for master in held.masters if held else ():
                yield from self._master(layer, k, master)

    def _master(self, layer: int, param: int, master: TensorBlock) -> Iterable[Copy]:
        held = self._held[layer][param]
        assert held is not None
        for b in range(len(held.writes)):
            block, host = self._block(layer, param, b)
            for part in block.rect.within(master.rect.first, master.rect.end):
                for shared in master.rect.within(part.first, part.end):
                    view, from_host = _sub(master.view, master.rect, shared), _sub(host, block.rect, shared)
                    yield Copy(held.name, view, from_host)


def _home(writes: Sequence[TensorBlock], piece: Range) -> tuple[int, int] | None:
    """The block whose memory has the piece as one run, and where in it."""
    for index, block in enumerate(writes):
        if block.rect.is_run and block.rect.first <= piece.offset and piece.offset + piece.length <= block.rect.end:
            return index, piece.offset - block.rect.first
    return None


def _sub(view: torch.Tensor, rect: Rect, part: Rect) -> torch.Tensor:
    """The part of a rectangle's memory, [part.rows, part.cols]."""
    row, col = rect.place(part)
    return view[row : row + part.rows, col : col + part.cols]


def _parts(packed: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = packed.split([view.numel() for view in views])
    return [piece.view(view.shape) for piece, view in zip(pieces, views, strict=True)]
