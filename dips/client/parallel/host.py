"""This rank's host memory of θ: what is frozen for a push, what a pull brings, and the copies to and from the model.

    push    gather_pieces     the model's blocks → pieces, some of them from or to other ranks; then the pieces travel
    pull    (bytes arrive in the pieces)
            scatter_pieces    pieces → this rank's whole shard, in host memory
            install_shard     shard → the model, on this rank alone

The memory is one buffer of 4 B for each parameter of the rank's shard, and holds either pieces or the shard
(memory_map.py); a layer is rearranged at a time. On an accelerator the copies go through pinned memory on a stream of
their own; beside the model at most one block is needed there. Where training should not wait
for it, `install_shard` only begins, and the next forward does the rest (lazy.py).

`gather_pieces` and `scatter_pieces` are collective: every rank calls them, outside forward and backward. Ranks of one
host that hold the same share the buffer (replicas.py): before anything is written into it, after an install, all ranks
must have met once in a collective, so that none of them still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

import torch

from dips.client.parallel.arrangement import Replicas
from dips.client.parallel.checksum import sum_bits
from dips.client.parallel.copies import read_tensor, write_merged, write_pulled
from dips.client.parallel.devices import find_device
from dips.client.parallel.exchange import PartExchange, RankExchange, SentPart
from dips.client.parallel.finiteness import FiniteCheck, find_not_finite
from dips.client.parallel.host_sum import BYTES, HostSum
from dips.client.parallel.kept_shard import KeptShard
from dips.client.parallel.model_memory import ModelMemory
from dips.client.parallel.plan import LocalRect, TransferPlan
from dips.client.parallel.remainders import Remainders
from dips.client.parallel.seam import Adapter, HeldParameter
from dips.client.parallel.shard_buffer import ShardBuffer
from dips.client.parallel.shard_copies import ShardBlocks, ShardCopy, part_of
from dips.transport.shares import Piece

Layers = Sequence[int] | None  # of the manifest, by number; None: all


class HostMemory:
    """What this rank holds of θ, beside the model."""

    PINNED = True  # copies to and from a device go through memory that is locked
    torn = False  # an install failed between two tensors
    on_installed: Callable[[Collection[str]], None] | None = None  # told what of `pending` has been installed since

    def __init__(
        self, adapter: Adapter, held: Sequence[HeldParameter], plan: TransferPlan, exchange: RankExchange
    ) -> None:
        """`held` is what `adapter` described when the plan was made."""
        self._adapter, self._plan = adapter, plan
        self._model_memory, self._remainders = ModelMemory(adapter, held), Remainders()
        self._device = find_device([b.view for h in held for b in (*h.reads, *h.writes)])
        self._kept = KeptShard(self._device)
        self._held = self._sort_by_layer(held)
        written = [[[b.rect for b in h.writes] if h else [] for h in layer] for layer in self._held]
        self._buffer = ShardBuffer(self._device, exchange, written, plan.pieces, plan.replicas, pinned=self.PINNED)
        shards, me = self._buffer.shards, exchange.rank
        self._spread = [shards.filter_spread(me, layer, moves) for layer, moves in enumerate(plan.spread)]
        self._complete = [shards.is_complete(me, layer, moves) for layer, moves in enumerate(plan.spread)]
        wanted = any(moves.sends or moves.receives for moves in (*plan.gather, *self._spread))
        self._ranks, self._exchange = exchange, PartExchange(exchange, self._device, wanted)
        self._bind_copies()

    @property
    def pieces(self) -> list[Piece]:
        """What this rank pulls and pushes; valid from `gather_pieces` on, or from a pull to `scatter_pieces`."""
        return self._buffer.pieces

    @property
    def layers(self) -> range:
        """Of the manifest."""
        return range(len(self._held))

    def layer_numel(self, layer: int) -> int:
        """Elements of a layer of the full model."""
        return self._plan.manifest.layers[layer].numel

    @property
    def allocated_numel(self) -> int:
        """Elements of 4 B that are allocated for pieces and shard."""
        return self._buffer.allocated_numel

    def sum_host_bytes(self, keeps: bool) -> HostSum:
        """All that this rank needs beside the model; `keeps`: merges will follow."""
        copies = self._copies_of_layers(None)
        return HostSum(
            shard=BYTES * self.allocated_numel,
            kept=BYTES * sum(copy.view.numel() for copy in copies) if keeps else 0,
            rounded=BYTES * sum(copy.view.numel() for copy in copies if copy.rounds),
            transit=BYTES * self._exchange.most_numel((*self._plan.gather, *self._spread)),
        )

    def find_replaced_parameter(self) -> str:
        """The first parameter that is another than was laid out, or lies here in other parts; "" if there is none.

        Parameters whose memory was moved, and masters that an optimizer has made since, are found anew by this: it
        comes before whatever reads or writes the model.
        """
        replaced, moved = self._model_memory.compare_memory()
        if not moved:
            return replaced
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
        self._blocks = ShardBlocks(self._held, self._buffer)
        self._params = self._blocks.parameter_copies()
        self._masters = [list(self._blocks.master_copies(layer)) for layer in self.layers]
        self._kept.move_copies(chain(*self._params, *self._masters))

    @torch.no_grad()
    def find_not_finite(self, layers: Layers = None) -> str:
        """The first parameter of which this rank holds a NaN or an infinity, as it trains or pushes it; "" if none."""
        held = [h for layer in self._chosen(layers) for h in self._held[layer] if h is not None]
        views = [(h.name, b.view) for h in held for b in {id(b): b for b in (*h.reads, *h.writes)}.values()]
        return find_not_finite(views, self._device)

    @property
    def remainders(self) -> Remainders:
        """What the last install rounded away."""
        return self._remainders

    @torch.no_grad()
    def sum_bits(self) -> int:
        """This rank's share of the checksum of θ: of what it would push or hand over, each element on one rank.

        The sum over the ranks is the same in every layout.
        """
        gathered = (
            (layer, rect)
            for layer, moves in enumerate(self._plan.gather)
            for rect in chain((source for source, _ in moves.local), *moves.sends.values())
        )
        weighed = ((1 + layer + (rect.param << 16), self._read_rect(layer, rect)) for layer, rect in gathered)
        return sum_bits(weighed, self._device)

    @property
    def has_replicas(self) -> bool:
        """Some ranks hold the same part of a parameter; the same on all ranks."""
        return self._plan.has_replicas

    def replicated_views(self) -> dict[Replicas, list[tuple[str, torch.Tensor]]]:
        """By ranks that hold the same: names and memory of what each would push, in one order on all of them."""
        return {ranks: [self._read_block(*at) for at in blocks] for ranks, blocks in self._plan.replicated.items()}

    def sum_bits_of(self, views: Sequence[torch.Tensor]) -> int:
        """A checksum of these, in their order."""
        return sum_bits(enumerate(views, 1), self._device)

    @property
    def pending(self) -> Collection[str]:
        """Parameters that an install which goes on beside training has not come to yet (lazy.py)."""
        return ()

    def named_views(self, layers: Layers = None) -> list[tuple[str, torch.Tensor]]:
        """The model's own memory that installs write."""
        return [(copy.name, copy.view) for layer in self._chosen(layers) for copy in self._params[layer]]

    def find_pieces(self, layers: Layers) -> list[int]:
        """The numbers of the pieces of these layers."""
        chosen = set(self._chosen(layers))
        return [number for number, piece in enumerate(self._buffer.pieces) if piece.layer in chosen]

    @property
    def merge_alpha(self) -> float:
        """How far a merge follows what was pulled: 1 is all the way."""
        return self._kept.alpha

    @merge_alpha.setter
    def merge_alpha(self, alpha: float) -> None:
        self._kept.alpha = alpha

    def _chosen(self, layers: Layers) -> Sequence[int]:
        return self.layers if layers is None else layers

    # ---- push --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_pieces(self, layers: Layers = None) -> None:
        """Freeze what this rank moves: afterwards the pieces hold it and the model may change."""
        chosen = self._chosen(layers)
        with self._device.ordered_copies():
            for layer in chosen:
                for source, target in self._plan.gather[layer].local:
                    read_tensor(self._device, self._read_rect(layer, source), self._buffer.piece_part(target))
            self._device.synchronize()
            for layer in chosen:
                self._add_remainders(layer)
                moves = self._plan.gather[layer]
                sends = {
                    peer: [SentPart(self._read_rect(layer, r), self._remainder_of(layer, r)) for r in rects]
                    for peer, rects in moves.sends.items()
                }
                receives = {peer: [self._buffer.piece_part(r) for r in rects] for peer, rects in moves.receives.items()}
                self._exchange.move_parts(sends, receives)

    @torch.no_grad()
    def keep_pushed_shard(self, layers: Layers = None) -> None:
        """Keep this rank's whole shard as it is now, for a `merge_shard`; allocated once, in host memory."""
        self._kept.keep_copies(self._copies_of_layers(layers), self._copies_of_layers(None))

    # ---- pull --------------------------------------------------------------------------------------------------------

    def subtract_in_place(self, layers: Layers = None) -> None:
        """Begin the merge of what all ranks have pulled, as far as it needs no other rank and not the model.

        Reads and writes host memory only, so a thread may do it beside training.
        """
        for layer in self._chosen(layers):
            if self._arrives_in_place(layer):
                self._kept.subtract_kept(self._copies_of_layers([layer]))

    @torch.no_grad()
    def scatter_pieces(self, layers: Layers = None) -> None:
        """Turn the pieces, all of which were pulled, into this rank's whole shard; afterwards they are not valid."""
        with self._device.ordered_copies():  # the stream for whose end the exchange waits
            for layer in self._chosen(layers):
                moves = self._spread[layer]
                # A copy where the shard takes the piece's own memory.
                sends = {
                    peer: [SentPart(self._read_piece(layer, rect)) for rect in rects]
                    for peer, rects in moves.sends.items()
                }
                moved = [(self._read_piece(layer, s), t) for s, t in moves.local if not self._is_in_place(layer, s, t)]
                for values, target in moved:
                    self._shard_tensor(layer, target).copy_(values)
                self._exchange.move_parts(
                    sends,
                    {peer: [self._shard_tensor(layer, r) for r in rects] for peer, rects in moves.receives.items()},
                )
        if self._buffer.shards.group_of:
            self._ranks.all_min([0])  # what another rank receives into memory that is shared is there, too

    @torch.no_grad()
    def install_shard(self, layers: Layers = None) -> None:
        """Copy the shard into the model's own memory, and into the optimizer's masters."""
        chosen = self._chosen(layers)
        self._adapter.reshard()
        self._write_pulled(chain(*(self._params[layer] for layer in chosen)))
        self._adapter.reload_masters()
        self._write_pulled(chain(*(self._masters[layer] for layer in chosen)))
        self._remainders.keep_installed(chain(*(self._params[layer] for layer in chosen)))

    @torch.no_grad()
    def merge_shard(self, layers: Layers = None) -> bool:
        """Add to the model what the shard differs in from what was kept: θ_local ← θ_local + (θ_shard − θ_kept).

        Returns False if nothing was kept, or if something here is not finite now: then the shard, which is as it was,
        must be installed on all ranks.
        """
        chosen = self._chosen(layers)
        copies = self._copies_of_layers(chosen)
        if not self._kept.holds(copies):
            return False
        self._adapter.reshard()
        self._kept.subtract_kept(copies)
        check = FiniteCheck(self._device)
        with self._device.ordered_copies():
            for copy in copies:
                self._merge_copy(copy, check)
            self._device.synchronize()
        if not any(self._masters):  # known masters were merged, exactly; others are made from the parameters
            self._adapter.reload_masters()
        self._kept.drop_copies(copies)
        return check.is_finite

    def _merge_copy(self, copy: ShardCopy, check: FiniteCheck) -> None:
        remainder = self._remainders.room_for(copy)
        write_merged(self._device, copy, self._kept.difference(copy), remainder, check)

    def finish_install(self) -> None:
        """Copy into the model what an install that goes on beside training has left (lazy.py)."""

    def on_inner_step(self) -> None:
        """An inner step was taken."""

    def _write_pulled(self, copies: Iterable[ShardCopy]) -> None:
        with self._device.ordered_copies():
            for copy in copies:
                write_pulled(self._device, copy)
            self._device.synchronize()

    def _copies_of_layers(self, layers: Layers) -> list[ShardCopy]:
        """All copies of some layers, or of all of them: masters first."""
        chosen = self._chosen(layers)
        return [*chain(*(self._masters[layer] for layer in chosen)), *chain(*(self._params[layer] for layer in chosen))]

    # ---- blocks and pieces in memory ---------------------------------------------------------------------------------

    def _read_rect(self, layer: int, rect: LocalRect) -> torch.Tensor:
        held = self._held[layer][rect.param]
        assert held is not None
        block = held.reads[rect.index]
        return part_of(block.view, block.rect, rect.rect)

    def _read_block(self, layer: int, param: int, block: int) -> tuple[str, torch.Tensor]:
        held = self._held[layer][param]
        assert held is not None
        return held.name, held.reads[block].view

    def _shard_tensor(self, layer: int, rect: LocalRect) -> torch.Tensor:
        block, host = self._blocks.host_block(layer, rect.param, rect.index)
        return part_of(host, block.rect, rect.rect)

    def _is_in_place(self, layer: int, source: LocalRect, target: LocalRect) -> bool:
        piece, shard = self._buffer.piece_part(source), self._shard_tensor(layer, target)
        return piece.data_ptr() == shard.data_ptr() and piece.is_contiguous() and shard.is_contiguous()

    def _arrives_in_place(self, layer: int) -> bool:
        """What this rank pulls of a layer is all of its shard, and lies where the shard does."""
        return self._complete[layer] and all(self._is_in_place(layer, *pair) for pair in self._spread[layer].local)

    def _read_piece(self, layer: int, part: LocalRect) -> torch.Tensor:
        """What was pulled; a copy of it if the shard takes its memory."""
        piece = self._buffer.piece_part(part)
        return piece if self._buffer.is_in_block(part.index) else piece.clone()

    def _remainder_of(self, layer: int, rect: LocalRect) -> torch.Tensor | None:
        return self._remainders.part_for(layer, rect, self._blocks)

    def _add_remainders(self, layer: int) -> None:
        """To what was read from the model: what the last install had to round away (remainders.py)."""
        if not self._remainders.any:
            return
        for source, target in self._plan.gather[layer].local:
            remainder = self._remainder_of(layer, source)
            if remainder is not None:
                self._buffer.piece_part(target).add_(remainder)


class UntouchedMemory(HostMemory):
    """That of a script that trains alone: nothing is moved, so its pages are never touched and take no memory."""

    PINNED = False
