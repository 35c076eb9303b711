"""This rank's host memory of θ: what is frozen for a push, what a pull brings, and the copies to and from the model.

    push    gather_pieces     the model's blocks → pieces, some of them from or to other ranks; then the pieces travel
    pull    (bytes arrive in the pieces)
            scatter_pieces    pieces → this rank's whole shard, in host memory
            install_shard     shard → the model, on this rank alone

The memory is one buffer of 4 B for each parameter of the rank's shard, and holds either pieces or the shard
(memory_map.py); a layer is rearranged at a time. On an accelerator the copies go through pinned memory on a stream of
their own; beside the model at most one block is needed there. On a host that is short of memory the buffer is that of
the largest layer, and each layer is installed before the next is pulled (streaming.py). Where training should not wait
for it, `install_shard` only begins, and the next forward does the rest (lazy.py).

`gather_pieces` and `scatter_pieces` are collective: every rank calls them, outside forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Protocol

import torch

from dips.client.parallel.checksum import sum_bits
from dips.client.parallel.devices import Device
from dips.client.parallel.finiteness import find_not_finite
from dips.client.parallel.kept_shard import KeptShard, ShardCopy
from dips.client.parallel.memory_map import map_memory
from dips.client.parallel.model_memory import ModelMemory
from dips.client.parallel.plan import LocalRect, Redistribution, TransferPlan
from dips.client.parallel.remainders import Remainders
from dips.client.parallel.seam import Adapter, HeldParameter
from dips.client.parallel.shard_copies import ShardBlocks, part_of
from dips.transport.shares import Piece
from dips.wire.chunks import Range
from dips.wire.frame import Buffer

EncodeChunk = Callable[[Range, memoryview], Buffer]
Layers = Sequence[int] | None  # of the manifest, by number; None: all


class RankExchange(Protocol):
    """Moves tensors between ranks; JobCollectives does."""

    def exchange_tensors(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None: ...


class HostMemory:
    """What this rank holds of θ, beside the model."""

    ONE_LAYER = False  # all layers share the memory of the largest
    torn = False  # an install failed between two tensors
    encode_chunk: EncodeChunk | None = None  # makes the body of a chunk of a push; None: it is in the pieces

    def __init__(
        self, adapter: Adapter, held: Sequence[HeldParameter], plan: TransferPlan, exchange: RankExchange
    ) -> None:
        """`held` is what `adapter` described when the plan was made."""
        self._adapter, self._plan, self._exchange = adapter, plan, exchange
        self._model_memory, self._remainders = ModelMemory(adapter, held), Remainders()
        self._device = Device([b.view for h in held for b in (*h.reads, *h.writes)])
        self._kept = KeptShard(self._device)
        self._held = self._sort_by_layer(held)
        self._allocate_layers()
        self._bind_copies()

    @property
    def pieces(self) -> list[Piece]:
        """What this rank pulls and pushes; valid from `gather_pieces` on, or from a pull to `scatter_pieces`."""
        return self._pieces

    @property
    def layers(self) -> range:
        """Of the manifest."""
        return range(len(self._held))

    def layer_numel(self, layer: int) -> int:
        """Elements of a layer of the full model."""
        return self._plan.manifest.layers[layer].numel

    @property
    def allocated_numel(self) -> int:
        """Elements of 4 B that are allocated."""
        return self._host.numel()

    def find_replaced_parameter(self) -> str:
        """The first parameter that is another than was laid out, or lies here in other parts; "" if there is none.

        Parameters whose memory was moved, and masters that an optimizer has made since, are found anew by this: it
        comes before whatever reads or writes the model.
        """
        if replaced := self._model_memory.find_replaced():
            return replaced
        if not self._model_memory.has_moved():
            return ""
        held, other = self._model_memory.describe_again()
        if not other:
            self._held = self._sort_by_layer(held)
            self._bind_copies()
        return other

    def _sort_by_layer(self, held: Sequence[HeldParameter]) -> list[list[HeldParameter | None]]:
        by_name = {h.name: h for h in held}
        return [[by_name.get(p.name) for p in layer.parameters] for layer in self._plan.manifest.layers]

    def _bind_copies(self) -> None:
        """Find what an install copies to; the model's tensors are where `_held` says."""
        self._blocks = ShardBlocks(self._held, self._block_at, self._host)
        self._params = [list(self._blocks.parameter_copies(layer)) for layer in self.layers]
        self._masters = [list(self._blocks.master_copies(layer)) for layer in self.layers]
        self._kept.move_copies(chain(*self._params, *self._masters))

    @torch.no_grad()
    def find_not_finite(self, layers: Layers = None) -> str:
        """The first parameter of which this rank holds a NaN or an infinity, as it trains or pushes it; "" if none."""
        held = [h for layer in self._chosen(layers) for h in self._held[layer] if h is not None]
        views = [(h.name, b.view) for h in held for b in {id(b): b for b in (*h.reads, *h.writes)}.values()]
        return find_not_finite(views)

    @property
    def remainders(self) -> Remainders:
        """What the last install rounded away."""
        return self._remainders

    @torch.no_grad()
    def sum_bits(self) -> int:
        """This rank's share of the checksum of θ: of what it would push or hand over, each element on one rank."""
        gathered = (
            (layer, rect)
            for layer, moves in enumerate(self._plan.gather)
            for rect in chain((source for source, _ in moves.local), *moves.sends.values())
        )
        return sum_bits((1 + layer + (rect.param << 16), self._read_rect(layer, rect)) for layer, rect in gathered)

    def named_views(self, layers: Layers = None) -> list[tuple[str, torch.Tensor]]:
        """The model's own memory that installs write."""
        return [(copy.name, copy.view) for copy in self._copies_to(self._params, layers)]

    def find_pieces(self, layers: Layers) -> list[int]:
        """The numbers of the pieces of these layers."""
        chosen = set(self._chosen(layers))
        return [number for number, piece in enumerate(self._pieces) if piece.layer in chosen]

    @property
    def merge_alpha(self) -> float:
        """How far a merge follows what was pulled: 1 is all the way."""
        return self._kept.alpha

    @merge_alpha.setter
    def merge_alpha(self, alpha: float) -> None:
        self._kept.alpha = alpha

    def _chosen(self, layers: Layers) -> Sequence[int]:
        return self.layers if layers is None else layers

    def _copies_to(self, copies: Sequence[Sequence[ShardCopy]], layers: Layers) -> list[ShardCopy]:
        return [copy for layer in self._chosen(layers) for copy in copies[layer]]

    # ---- push --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_pieces(self, layers: Layers = None) -> None:
        """Freeze what this rank moves: afterwards the pieces hold it and the model may change."""
        with self._device.ordered_copies():
            for layer in self._chosen(layers):
                moves = self._plan.gather[layer]
                sends = {
                    p: self._pack_views([self._read_rect(layer, r) for r in rects]) for p, rects in moves.sends.items()
                }
                for source, target in moves.local:
                    if (frozen := self._frozen_tensor(target)) is not None:
                        frozen.copy_(self._read_rect(layer, source), non_blocking=True)
                self._device.synchronize()
                self._add_remainders(layer, moves, sends)
                self._exchange_layer(moves, sends, lambda _, rect: self._frozen_tensor(rect), layer)

    @torch.no_grad()
    def keep_pushed_shard(self, layers: Layers = None) -> None:
        """Keep this rank's shard of `layers` as it is now, for a `merge_shard`; allocated once, in host memory."""
        self._kept.allocate_copies(chain(*self._params, *self._masters))
        self._kept.keep_copies([*self._copies_to(self._params, layers), *self._copies_to(self._masters, layers)])

    # ---- pull --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scatter_pieces(self, layers: Layers = None) -> None:
        """Turn the pieces, all of which were pulled, into this rank's whole shard; afterwards they are not valid."""
        for layer in self._chosen(layers):
            moves = self._plan.spread[layer]
            sends = {
                peer: self._pack_views([self._piece_tensor(rect) for rect in rects])
                for peer, rects in moves.sends.items()
            }
            moved = [(self._piece_tensor(s).clone(), t) for s, t in moves.local if not self._is_in_place(layer, s, t)]
            for values, target in moved:
                self._shard_tensor(layer, target).copy_(values)
            self._exchange_layer(moves, sends, self._shard_tensor, layer)

    @torch.no_grad()
    def install_shard(self) -> None:
        """Copy the shard into the model's own memory, and into the optimizer's masters."""
        self._adapter.reshard()
        self._copy_shards(self._params)
        self._adapter.reload_masters()
        self._copy_shards(self._masters)
        self._remainders.keep_installed(chain(*self._params))

    @torch.no_grad()
    def is_merge_finite(self, layers: Layers = None) -> bool:
        """Whether `merge_shard` would leave finite parameters: this rank's θ_local and θ_kept are finite."""
        return self._kept.is_finite([*self._copies_to(self._params, layers), *self._copies_to(self._masters, layers)])

    @torch.no_grad()
    def merge_shard(self, layers: Layers = None) -> None:
        """Add to the model what the shard differs in from what was kept: θ_local ← θ_shard + (θ_local − θ_kept)."""
        self._adapter.reshard()
        masters = [
            (copy, copy.view + self._kept.pulled_difference(copy)) for copy in self._copies_to(self._masters, layers)
        ]
        if self._adapter.remakes_masters:  # of other layers, too: they are what they were
            others = set(self.layers).difference(self._chosen(layers))
            masters += [(copy, copy.view.clone()) for copy in self._copies_to(self._masters, sorted(others))]
        for copy in self._copies_to(self._params, layers):
            self._remainders.write_merged(copy, copy.view + self._kept.pulled_difference(copy))
        self._adapter.reload_masters()
        for copy, master in masters:
            copy.view.copy_(master)

    def sync_masters(self) -> None:
        """All layers were installed, one after the other."""
        self._adapter.sync_masters()

    def finish_install(self) -> None:
        """Copy into the model what an install that goes on beside training has left (lazy.py)."""

    def on_inner_step(self) -> None:
        """An inner step was taken."""

    def _copy_shards(self, layers: Iterable[Iterable[ShardCopy]]) -> None:
        with self._device.ordered_copies():
            for copies in layers:
                for copy in copies:
                    copy.view.copy_(copy.host, non_blocking=True)
            self._device.synchronize()

    # ---- blocks and pieces in memory ---------------------------------------------------------------------------------

    def _allocate_layers(self) -> None:
        written = [[[b.rect for b in held.writes] if held else [] for held in layer] for layer in self._held]
        places = map_memory(written, self._plan.pieces, one_layer=self.ONE_LAYER)
        self._block_at = places.block_at
        self._host = self._device.allocate_host(places.size)
        self._memory = [
            self._host[places.piece_at[n] : places.piece_at[n] + p.length] for n, p in enumerate(self._plan.pieces)
        ]
        self._pieces = [Piece(*p, memory.numpy()) for p, memory in zip(self._plan.pieces, self._memory, strict=True)]

    def _read_rect(self, layer: int, rect: LocalRect) -> torch.Tensor:
        held = self._held[layer][rect.param]
        assert held is not None
        block = held.reads[rect.index]
        return part_of(block.view, block.rect, rect.rect)

    def _piece_tensor(self, rect: LocalRect) -> torch.Tensor:
        piece, memory, part = self._plan.pieces[rect.index], self._memory[rect.index], rect.rect
        at = memory.storage_offset() + part.first - piece.offset
        return memory.as_strided((part.rows, part.cols), (part.width, 1), at)

    def _frozen_tensor(self, rect: LocalRect) -> torch.Tensor | None:
        """Where `gather_pieces` copies a rectangle of a piece to; None if it is read from the model as it travels."""
        return self._piece_tensor(rect)

    def _shard_tensor(self, layer: int, rect: LocalRect) -> torch.Tensor:
        block, host = self._blocks.host_block(layer, rect.param, rect.index)
        return part_of(host, block.rect, rect.rect)

    def _is_in_place(self, layer: int, source: LocalRect, target: LocalRect) -> bool:
        piece, shard = self._piece_tensor(source), self._shard_tensor(layer, target)
        return piece.data_ptr() == shard.data_ptr() and piece.is_contiguous() and shard.is_contiguous()

    def _add_remainders(self, layer: int, moves: Redistribution, sends: dict[int, torch.Tensor]) -> None:
        """To what was read from the model: what the last install had to round away (remainders.py)."""
        for peer, rects in moves.sends.items():
            parts = _split_packed(sends[peer], [self._read_rect(layer, rect) for rect in rects])
            for part, rect in zip(parts, rects, strict=True):
                self._remainders.add_to(part, layer, rect, self._blocks)
        for source, target in moves.local:
            if (frozen := self._frozen_tensor(target)) is not None:
                self._remainders.add_to(frozen, layer, source, self._blocks)

    # ---- between the ranks of the cluster ----------------------------------------------------------------------------

    def _pack_views(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        packed = self._device.allocate_host(sum(view.numel() for view in views))
        for part, view in zip(_split_packed(packed, views), views, strict=True):
            part.copy_(view, non_blocking=True)
        return packed

    def _exchange_layer(
        self,
        moves: Redistribution,
        sends: dict[int, torch.Tensor],
        place: Callable[[int, LocalRect], torch.Tensor | None],
        layer: int,
    ) -> None:
        """Exchange one layer with the other ranks; `place` names the memory of each rectangle that arrives."""
        found = {peer: [place(layer, rect) for rect in rects] for peer, rects in moves.receives.items()}
        targets = {peer: [view for view in views if view is not None] for peer, views in found.items()}
        assert all(len(targets[peer]) == len(views) for peer, views in found.items()), "what is received has a place"
        receives = {peer: torch.empty(sum(v.numel() for v in views)) for peer, views in targets.items()}
        self._exchange.exchange_tensors(sends, receives)
        for peer, views in targets.items():
            for part, view in zip(_split_packed(receives[peer], views), views, strict=True):
                view.copy_(part)


def _split_packed(packed: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = packed.split([view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]
