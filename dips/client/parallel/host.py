"""This rank's host memory of θ, frozen for a push or filled by a pull, and the copies to and from the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain

import msgspec
import numpy as np
import torch
import xxhash

from dips.client.parallel.adapter import Adapter, HeldParameter, TensorBlock
from dips.client.parallel.blocks import FiniteCheck, find_not_finite, shaped_like, split_together, sum_bits
from dips.client.parallel.devices import HOST_BLOCK_ITEMS, Device, ModelMemory, enqueue_copy, find_device
from dips.client.parallel.plan import LocalRect, Replicas, TransferPlan
from dips.client.parallel.rect import Rect
from dips.client.parallel.shard_buffer import BYTES, HostSum, PartExchange, RankExchange, SentPart, ShardBuffer
from dips.wire.chunks import Piece

# ---- shard copies ---------------------------------------------------------------------------------------------------


LayerHeld = Sequence[HeldParameter | None]  # parameters of one layer in the manifest's order; None: not on this rank


@dataclass(frozen=True, eq=False)
class ShardCopy:
    """One copy from host memory to a tensor of the framework."""

    name: str  # of the parameter
    view: torch.Tensor  # the framework's tensor
    host: torch.Tensor
    rounds: bool = False  # the tensor has fewer bits than the pulled values and is itself pushed
    key: tuple[int, int, int] = (-1, -1, -1)  # layer, parameter, block; unset for masters


@dataclass(frozen=True)
class ShardBlocks:
    """The blocks of a rank's shard and their host memory."""

    held: Sequence[LayerHeld]
    buffer: ShardBuffer

    def parameter(self, layer: int, param: int) -> HeldParameter:
        """Return a parameter of which this rank holds a part."""
        held = self.held[layer][param]
        assert held is not None
        return held

    def host_block(self, layer: int, param: int, index: int) -> tuple[TensorBlock, torch.Tensor]:
        """Return a written block and its host memory, of the same shape."""
        block = self.parameter(layer, param).writes[index]
        memory = self.buffer.block_memory((layer, param, index), block.rect.numel)
        return block, memory.view(block.rect.rows, block.rect.cols)

    def parameter_copies(self) -> list[list[ShardCopy]]:
        """Return the copies to the parameters of each layer, in a fixed order."""
        found: list[list[ShardCopy]] = [[] for _ in self.held]
        for l, k, b in self.buffer.blocks:
            held, (block, host) = self.parameter(l, k), self.host_block(l, k, b)
            found[l].append(ShardCopy(held.name, block.view, host, rounds=_rounds(held, block), key=(l, k, b)))
        return found

    def master_copies(self, layer: int) -> Iterator[ShardCopy]:
        """Yield the copies to the optimizer's masters of one layer."""
        for k, held in enumerate(self.held[layer]):
            for master in held.masters if held else ():
                yield from self._copies_of_master(layer, k, master)

    def _copies_of_master(self, layer: int, param: int, master: TensorBlock) -> Iterator[ShardCopy]:
        held = self.parameter(layer, param)
        # The copies of a tied parameter are blocks of one rectangle: from each a merge would add the difference again.
        for b in {block.rect: b for b, block in enumerate(held.writes)}.values():
            block, host = self.host_block(layer, param, b)
            for part in block.rect.cut_between(master.rect.first, master.rect.end):
                for shared in master.rect.cut_between(part.first, part.end):
                    view, source = part_of(master.view, master.rect, shared), part_of(host, block.rect, shared)
                    yield ShardCopy(held.name, view, source)


def part_of(view: torch.Tensor, rect: Rect, part: Rect) -> torch.Tensor:
    """Return the part of a rectangle's memory, [part.rows, part.cols]."""
    row, col = rect.place_of(part)
    return view[row : row + part.rows, col : col + part.cols]


def _rounds(held: HeldParameter, block: TensorBlock) -> bool:
    """Return whether the block has fewer bits than the pulled values and is itself pushed."""
    return block.view.dtype is not torch.float32 and any(block is read for read in held.reads)


# ---- copies ---------------------------------------------------------------------------------------------------------


def read_tensor(device: Device, view: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a tensor into host memory; on an asynchronous device the copy is only enqueued."""
    if not device.accelerated or view.dtype is torch.float32:
        enqueue_copy(host, view)
        return
    for part, target in split_together(device.block_items, view, host):
        block = shaped_like(device.scratch, part)
        block.copy_(part)
        enqueue_copy(target, block)


def write_pulled(device: Device, copy: ShardCopy) -> None:
    """Write pulled values into the tensor; on an asynchronous device the copy is only enqueued."""
    if not device.accelerated or copy.view.dtype is torch.float32:
        enqueue_copy(copy.view, copy.host)
        return
    for view, host in split_together(device.block_items, copy.view, copy.host):  # a cast on the host would block
        block = shaped_like(device.scratch, view)
        enqueue_copy(block, host)
        view.copy_(block)


def write_merged(
    device: Device, copy: ShardCopy, difference: torch.Tensor, remainder: torch.Tensor | None, check: FiniteCheck
) -> None:
    """Add a difference to the tensor in fp32, and store the rounding error in `remainder`."""
    if copy.view.device.type != device.where.type:  # an optimizer's copy on the host of a parameter on an accelerator
        device = Device()
    parts = (copy.view, difference) if remainder is None else (copy.view, difference, remainder)
    in_place = copy.view.dtype is torch.float32 and not device.accelerated
    for view, added, *rest in split_together(device.block_items, *parts):
        if in_place:
            view.add_(added)
        else:
            _add_by_scratch(device, view, added, rest)
        check.add_block(view)


def _add_by_scratch(device: Device, view: torch.Tensor, added: torch.Tensor, rest: Sequence[torch.Tensor]) -> None:
    block = shaped_like(device.scratch, view)
    enqueue_copy(block, added)
    if view.dtype is torch.float32:
        view.add_(block)
    else:
        block.add_(view)
        view.copy_(block)
    for rounded in rest:
        block.sub_(view)
        enqueue_copy(rounded, block)


# ---- kept shard -----------------------------------------------------------------------------------------------------
# A copy of this rank's shard as it was pushed, kept for the merge that follows under `overlap: full`.
#
#     keep_copies       at the push: copies the tensors
#     subtract_kept     when a version has arrived on all ranks: pulled − kept, in the memory of the kept copy. Where a
#                       version lies in place in the shard, a thread does it beside training
#     difference        in the merge: the values to be added to the tensor
#
# So a merge reads one array of host memory beside the tensor, as an install does, and sends as many bytes to a device.


class KeptShard:
    """Copies of the framework's tensors in host memory, allocated at the first `keep_copies` and reused."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[ShardCopy, torch.Tensor] = {}
        self._subtracted: dict[ShardCopy, bool] = {}  # of those kept: whether the memory holds the difference by now

    @property
    def allocated_numel(self) -> int:
        """The elements of 4 B that are allocated."""
        return sum(memory.numel() for memory in self._memory.values())

    def keep_copies(self, copies: Iterable[ShardCopy], all_copies: Iterable[ShardCopy]) -> None:
        """Copy the present values of the tensors in `copies`; `all_copies` are all that may ever be kept."""
        if not self._memory:
            self._memory = _allocate_copies(self._device, list(all_copies))
        with self._device.ordered_copies():
            for copy in copies:
                read_tensor(self._device, copy.view, self._memory[copy])
                self._subtracted[copy] = False
            self._device.synchronize()

    def move_copies(self, copies: Iterable[ShardCopy]) -> None:
        """Rebind to `copies` after the framework's tensors have moved: the same in the same order, or all are
        dropped.
        """
        moved = list(copies)
        if len(moved) != len(self._memory):
            self._memory, self._subtracted = {}, {}
            return
        new = dict(zip(self._memory, moved, strict=True))
        self._memory = {new[copy]: memory for copy, memory in self._memory.items()}
        self._subtracted = {new[copy]: subtracted for copy, subtracted in self._subtracted.items()}

    def holds(self, copies: Iterable[ShardCopy]) -> bool:
        """Return whether all of these copies were kept, and none of them was merged since."""
        return all(copy in self._subtracted for copy in copies)

    def subtract_kept(self, copies: Iterable[ShardCopy]) -> None:
        """Turn each kept copy once into pulled − kept; may be called in any thread."""
        for copy in copies:
            if not self._subtracted.get(copy, True):
                memory = self._memory[copy].numpy()
                np.subtract(copy.host.numpy(), memory, out=memory)  # not torch, which would start threads
                self._subtracted[copy] = True

    def difference(self, copy: ShardCopy) -> torch.Tensor:
        """Return pulled − kept of a copy, in host memory."""
        assert self._subtracted[copy], copy.name
        return self._memory[copy]

    def drop_copies(self, copies: Iterable[ShardCopy]) -> None:
        """Forget copies that were merged: another merge needs another push."""
        for copy in copies:
            del self._subtracted[copy]


def _allocate_copies(device: Device, copies: list[ShardCopy]) -> dict[ShardCopy, torch.Tensor]:
    sizes = [copy.view.numel() for copy in copies]
    parts = device.allocate_host(sum(sizes)).split(sizes)
    return {copy: part.view(copy.view.shape) for copy, part in zip(copies, parts, strict=True)}


# ---- remainders -----------------------------------------------------------------------------------------------------
# Rounding errors of 16-bit parameters without fp32 masters, kept and added to the next push.
#
# A pull of θ writes round(θ); the next push sends p + (θ − round(θ)), where p is the parameter at that time. So a
# cluster that trains nothing pushes θ bit for bit, since the difference is exact in fp32, and other clusters' changes
# below half a unit in the last place are not undone. Costs 4 B of host memory per such parameter of a rank's shard.


class Remainders:
    """The rounding errors of one rank; empty as long as no parameter rounds."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int, int], torch.Tensor] = {}

    def keep_installed(self, copies: Iterable[ShardCopy]) -> None:
        """Store the rounding errors of an install that has written `host` of each copy into its tensor."""
        for copy in copies:
            if copy.rounds:
                for host, rounded in split_together(HOST_BLOCK_ITEMS, copy.host, self._allocate(copy)):
                    torch.sub(host, host.to(copy.view.dtype).float(), out=rounded)
            else:
                self._of.pop(copy.key, None)  # masters made since the last install hold the exact value

    def room_for(self, copy: ShardCopy) -> torch.Tensor | None:
        """Return the memory for the rounding errors of a merge; None if the copy does not round."""
        if copy.rounds:
            return self._allocate(copy)
        self._of.pop(copy.key, None)
        return None

    @property
    def any(self) -> bool:
        """Whether any rounding error is stored."""
        return bool(self._of)

    @property
    def allocated_numel(self) -> int:
        """The elements of 4 B that are allocated."""
        return sum(remainder.numel() for remainder in self._of.values())

    def part_for(self, layer: int, source: LocalRect, blocks: ShardBlocks) -> torch.Tensor | None:
        """Return the rounding errors of a part of the model; None if it does not round."""
        key = layer, source.param, source.index
        if (remainder := self._of.get(key)) is None:
            return None
        return part_of(remainder, blocks.host_block(*key)[0].rect, source.rect)

    def take_state(self) -> torch.Tensor | None:
        """Return all rounding errors concatenated, for a checkpoint; None if no parameter rounds."""
        return torch.cat([r.reshape(-1) for _, r in sorted(self._of.items())]) if self._of else None

    def restore_state(self, saved: torch.Tensor | None) -> bool:
        """Restore the value of `take_state`, or zeros for None; return False if it is of another layout."""
        mine = [r for _, r in sorted(self._of.items())]
        if saved is None or saved.numel() != sum(r.numel() for r in mine):
            for remainder in mine:
                remainder.zero_()
            return saved is None
        for remainder, part in zip(mine, saved.split([r.numel() for r in mine]), strict=True):
            remainder.copy_(part.view(remainder.shape))
        return True

    def drop_exact(self, copies: Iterable[ShardCopy]) -> None:
        """Forget the rounding errors of copies that no longer round, since masters were made for them."""
        for copy in copies:
            if not copy.rounds:
                self._of.pop(copy.key, None)

    def _allocate(self, copy: ShardCopy) -> torch.Tensor:
        if copy.key not in self._of:
            self._of[copy.key] = torch.zeros_like(copy.host)
        return self._of[copy.key]


# ---- host -----------------------------------------------------------------------------------------------------------
#     push    gather_pieces     the model's blocks → pieces, some from or to other ranks; then the pieces are sent
#     pull    (bytes arrive in the pieces)
#             scatter_pieces    pieces → this rank's whole shard, in host memory
#             install_shard     shard → the model, on this rank alone
#
# The memory is one buffer of 4 B for each parameter of the rank's shard, and holds either pieces or the shard
# (shard_buffer.py); one layer is rearranged at a time. On an accelerator the copies go through pinned memory on a
# stream of their own; beside the model at most one block is needed there. Where training should not wait for it,
# `install_shard` only begins, and the next forward does the rest (lazy.py).
#
# `gather_pieces` and `scatter_pieces` are collective: every rank calls them, outside forward and backward. Ranks of one
# host that hold the same share the buffer (shard_buffer.py): before anything is written into it, after an install, all
# ranks must have met once in a collective, so that none of them still reads.


Layers = Sequence[int] | None  # numbers of layers in the manifest; None: all


class HostMemory:
    """This rank's part of θ in host memory, beside the model."""

    PINNED = True  # copies to and from a device go through memory that is locked
    torn = False  # an install failed between two tensors
    on_installed: Callable[[Collection[str]], None] | None = None  # called with the names of `pending` just installed

    def __init__(
        self, adapter: Adapter, held: Sequence[HeldParameter], plan: TransferPlan, exchange: RankExchange
    ) -> None:
        """Allocate the memory for a plan; `held` is the adapter's description from which the plan was made."""
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
        wanted = any({**moves.sends, **moves.receives} for moves in (*plan.gather, *self._spread))
        self._ranks, self._exchange = exchange, PartExchange(exchange, self._device, wanted)
        self._bind_copies()

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that this rank pulls and pushes; valid after `gather_pieces`, or from a pull to
        `scatter_pieces`.
        """
        return self._buffer.pieces

    @property
    def layers(self) -> range:
        """The numbers of the manifest's layers."""
        return range(len(self._held))

    def layer_numel(self, layer: int) -> int:
        """Return the elements of a layer of the full model."""
        return self._plan.manifest.layers[layer].numel

    @property
    def allocated_numel(self) -> int:
        """The elements of 4 B that are allocated for pieces and shard."""
        return self._buffer.allocated_numel

    def sum_host_bytes(self, keeps: bool) -> HostSum:
        """Return the bytes that this rank needs beside the model; `keeps`: merges will follow."""
        copies = self._copies_of_layers(None)
        return HostSum(
            shard=BYTES * self.allocated_numel,
            kept=BYTES * sum(copy.view.numel() for copy in copies) if keeps else 0,
            rounded=BYTES * sum(copy.view.numel() for copy in copies if copy.rounds),
            transit=BYTES * self._exchange.most_numel((*self._plan.gather, *self._spread)),
        )

    def find_replaced_parameter(self) -> str:
        """Return the first parameter that was replaced by another object, or whose parts here have changed; "" if there
        is none.

        Parameters whose memory has moved, and masters that an optimizer has made since, are looked up again; what the
        framework has gathered is dropped. Call it before any method that reads or writes the model.
        """
        replaced, moved = self._model_memory.compare_memory()
        if not moved:
            return replaced
        held, other = self._model_memory.describe_again()
        if not other:
            self._held = self._sort_by_layer(held)
            self._bind_copies()
            device = find_device([copy.view for copy in self._copies_of_layers(None)])
            if device.where != self._device.where:  # a model that was moved to its accelerator is merged there
                self._device = device
        return other

    def _sort_by_layer(self, held: Sequence[HeldParameter]) -> list[list[HeldParameter | None]]:
        by_name = {h.name: h for h in held}
        return [[by_name.get(p.name) for p in layer.parameters] for layer in self._plan.manifest.layers]

    def _bind_copies(self) -> None:
        """Build the copies of an install from `_held`."""
        self._blocks = ShardBlocks(self._held, self._buffer)
        self._params = self._blocks.parameter_copies()
        self._masters = [list(self._blocks.master_copies(layer)) for layer in self.layers]
        self._kept.move_copies(self._copies_of_layers(None))

    @torch.no_grad()
    def find_not_finite(self, layers: Layers = None) -> str:
        """Return the first parameter of which this rank trains or pushes a NaN or an infinity; "" if there is none."""
        held = [h for layer in self._chosen(layers) for h in self._held[layer] if h is not None]
        views = [(h.name, b.view) for h in held for b in {id(b): b for b in (*h.reads, *h.writes)}.values()]
        return find_not_finite(views, self._device)

    @property
    def remainders(self) -> Remainders:
        """The rounding errors of the last install."""
        return self._remainders

    def digest_layout(self) -> int:
        """Return a digest of the parts of the model that this rank moves and installs, in the order of its memory."""
        blocks = [(key, astuple(self._blocks.host_block(*key)[0].rect)) for key in self._buffer.blocks]
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(([piece.range for piece in self.pieces], blocks)))

    def fits_remainders(self, numel: int) -> bool:
        """Return whether a checkpoint with so many rounding errors is of this layout: it has those of an install, or,
        of an install after masters were made, only those of the parameters without masters.
        """
        installed = self._remainders.allocated_numel
        coarse = sum(copy.view.numel() for copy in chain(*self._params) if copy.rounds)
        return not installed or numel in (installed, coarse)

    def restore_remainders(self, saved: torch.Tensor | None) -> None:
        """Restore the rounding errors of a checkpoint, None: it has none; legal if `fits_remainders`."""
        if saved is None or saved.numel() != self._remainders.allocated_numel:
            self._remainders.drop_exact(chain(*self._params))
        self._remainders.restore_state(saved)

    @torch.no_grad()
    def sum_bits(self, *, buffers: bool = False) -> int:
        """Return this rank's share of the checksum of θ, over the elements that it would push or hand over, each on one
        rank.

        The sum over the ranks is the same in every layout. Shared buffers count only with `buffers`: ranks may hold
        different values of them.
        """
        counted = [buffers or not layer.averaged for layer in self._plan.manifest.layers]
        gathered = (
            (layer, rect)
            for layer, moves in enumerate(self._plan.gather)
            if counted[layer]
            for rect in chain((source for source, _ in moves.local), *moves.sends.values())
        )
        weighed = ((1 + layer + (rect.param << 16), self._read_rect(layer, rect)) for layer, rect in gathered)
        return sum_bits(weighed, self._device)

    @property
    def has_replicas(self) -> bool:
        """Whether some ranks hold the same part of a parameter; the same on all ranks."""
        return self._plan.has_replicas

    def replicated_views(self) -> dict[Replicas, list[tuple[str, torch.Tensor]]]:
        """Return the names and memory of equal parts by the ranks that hold them, in the same order on all of these."""
        return {ranks: [self._read_block(*at) for at in blocks] for ranks, blocks in self._plan.replicated.items()}

    def sum_bits_of(self, views: Sequence[torch.Tensor]) -> int:
        """Return a checksum of these tensors that depends on their order."""
        return sum_bits(enumerate(views, 1), self._device)

    @property
    def pending(self) -> Collection[str]:
        """The parameters that an install beside training has not written yet (lazy.py)."""
        return ()

    def named_views(self, layers: Layers = None) -> list[tuple[str, torch.Tensor]]:
        """Return the model's own memory that installs write, with parameter names."""
        return [(copy.name, copy.view) for layer in self._chosen(layers) for copy in self._params[layer]]

    def find_pieces(self, layers: Layers) -> list[int]:
        """Return the numbers of the pieces of these layers."""
        chosen = set(self._chosen(layers))
        return [number for number, piece in enumerate(self._buffer.pieces) if piece.layer in chosen]

    def _chosen(self, layers: Layers) -> Sequence[int]:
        return self.layers if layers is None else layers

    # ---- push --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_pieces(self, layers: Layers = None) -> None:
        """Freeze this rank's pieces: afterwards the model may change. Collective."""
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
        """Keep a copy of this rank's whole shard for `merge_shard`, in host memory that is allocated once."""
        self._kept.keep_copies(self._copies_of_layers(layers), self._copies_of_layers(None))

    # ---- pull --------------------------------------------------------------------------------------------------------

    def subtract_in_place(self, layers: Layers = None) -> None:
        """Begin the merge of pulled values, as far as it needs neither another rank nor the model.

        Reads and writes host memory only, so a thread may do it beside training.
        """
        for layer in self._chosen(layers):
            if self._arrives_in_place(layer):
                self._kept.subtract_kept(self._copies_of_layers([layer]))

    @torch.no_grad()
    def scatter_pieces(self, layers: Layers = None) -> None:
        """Turn the pulled pieces into this rank's whole shard; the pieces are invalid afterwards. Collective."""
        with self._device.ordered_copies():  # on the stream that the exchange synchronizes with
            for layer in self._chosen(layers):
                moves = self._spread[layer]
                # A clone if the shard uses the piece's own memory.
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
            self._ranks.all_min([0])  # barrier: other ranks have received their parts into shared memory, too

    @torch.no_grad()
    def install_shard(self, layers: Layers = None) -> None:
        """Copy the shard into the model's own memory and into the optimizer's masters."""
        chosen = self._chosen(layers)
        self.torn = True  # until the last tensor is written
        self._write_pulled(chain(*(self._params[layer] for layer in chosen)))
        self._adapter.reload_masters()
        self._write_pulled(chain(*(self._masters[layer] for layer in chosen)))
        self.torn = False
        self._remainders.keep_installed(chain(*(self._params[layer] for layer in chosen)))

    @torch.no_grad()
    def merge_shard(self, layers: Layers = None) -> bool:
        """Add the difference between the shard and the kept copy to the model: θ_local ← θ_local + (θ_shard − θ_kept).

        Returns False if there is no kept copy, or if a tensor here is not finite now: then the shard, which is
        unchanged, must be installed on all ranks.
        """
        chosen = self._chosen(layers)
        copies = self._copies_of_layers(chosen)
        if not self._kept.holds(copies):
            return False
        self._kept.subtract_kept(copies)
        check = FiniteCheck(self._device)
        self.torn = True
        with self._device.ordered_copies():
            for copy in copies:
                self._merge_copy(copy, check)
        if not any(self._masters):  # known masters were merged exactly; others are made from the parameters
            self._adapter.reload_masters()
        self.torn = False
        self._kept.drop_copies(copies)
        return check.is_finite  # waits for the device, so that the host memory is free

    def _merge_copy(self, copy: ShardCopy, check: FiniteCheck) -> None:
        remainder = self._remainders.room_for(copy)
        write_merged(self._device, copy, self._kept.difference(copy), remainder, check)

    def finish_install(self) -> None:
        """Write the parameters that an install beside training has left (lazy.py)."""

    def await_readers(self) -> None:
        """Wait until no rank installs from shared memory any more, before it is written. Collective."""
        if self._buffer.shards.group_of:
            self._ranks.all_min([0])

    def on_inner_step(self) -> None:
        """Finish an install beside training after an inner step (lazy.py)."""

    def free(self) -> None:
        """Free the host memory; nothing else may be called afterwards. No transfer may use it any more."""
        self._device.synchronize()  # an install that broke off may have left copies
        del self._buffer, self._blocks, self._params, self._masters, self._kept, self._remainders, self._exchange

    def _write_pulled(self, copies: Iterable[ShardCopy]) -> None:
        with self._device.ordered_copies():
            for copy in copies:
                write_pulled(self._device, copy)
            self._device.synchronize()

    def _copies_of_layers(self, layers: Layers) -> list[ShardCopy]:
        """Return the copies of some layers, or of all: masters first."""
        chosen = self._chosen(layers)
        return [*chain(*(self._masters[layer] for layer in chosen)), *chain(*(self._params[layer] for layer in chosen))]

    # ---- blocks and pieces in memory ---------------------------------------------------------------------------------

    def _read_rect(self, layer: int, rect: LocalRect) -> torch.Tensor:
        block = self._blocks.parameter(layer, rect.param).reads[rect.index]
        return part_of(block.view, block.rect, rect.rect)

    def _read_block(self, layer: int, param: int, block: int) -> tuple[str, torch.Tensor]:
        held = self._blocks.parameter(layer, param)
        return held.name, held.reads[block].view

    def _shard_tensor(self, layer: int, rect: LocalRect) -> torch.Tensor:
        block, host = self._blocks.host_block(layer, rect.param, rect.index)
        return part_of(host, block.rect, rect.rect)

    def _is_in_place(self, layer: int, source: LocalRect, target: LocalRect) -> bool:
        piece, shard = self._buffer.piece_part(source), self._shard_tensor(layer, target)
        return piece.data_ptr() == shard.data_ptr() and piece.is_contiguous() and shard.is_contiguous()

    def _arrives_in_place(self, layer: int) -> bool:
        """Return whether this rank pulls all of its shard of a layer, into the shard's own memory."""
        return self._complete[layer] and all(self._is_in_place(layer, *pair) for pair in self._spread[layer].local)

    def _read_piece(self, layer: int, part: LocalRect) -> torch.Tensor:
        """Return a pulled part, cloned if the shard uses its memory."""
        piece = self._buffer.piece_part(part)
        return piece if self._buffer.is_in_block(part.index) else piece.clone()

    def _remainder_of(self, layer: int, rect: LocalRect) -> torch.Tensor | None:
        return self._remainders.part_for(layer, rect, self._blocks)

    def _add_remainders(self, layer: int) -> None:
        """Add the rounding errors of the last install to the pieces read from the model."""
        if not self._remainders.any:
            return
        for source, target in self._plan.gather[layer].local:
            remainder = self._remainder_of(layer, source)
            if remainder is not None:
                self._buffer.piece_part(target).add_(remainder)


class UntouchedMemory(HostMemory):
    """Host memory of a script that trains alone: no bytes move, so its pages are never touched and use no memory."""

    PINNED = False
