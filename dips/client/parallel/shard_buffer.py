"""The host memory of a rank's shard and pieces, shared within a node, and the exchange of tensors among the ranks."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import msgspec
import numpy as np
import torch

from dips.client.parallel.blocks import shaped_like, split_rows
from dips.client.parallel.devices import FLOAT_BYTES, Device, enqueue_copy, map_pages
from dips.client.parallel.plan import Holding, LocalRect, RankLayout, Redistribution
from dips.client.parallel.rect import Rect
from dips.wire.chunks import Piece
from dips.wire.frame import Range

# ---- exchange -------------------------------------------------------------------------------------------------------
# The parts for one peer form one stream of fp32 elements, in an order known at both ends; it is cut at places that
# depend on shapes alone. Blocks go through memory of the device from which the ranks' process group can send: the
# accelerator's if its backend supports it, else the host's.


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
            enqueue_copy(part, view if self._on_device else view.to(part.dtype))  # cast where it lies
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
            if self._on_device:
                have = torch.empty(numel, dtype=torch.float32, device=self._device.where)
            else:
                have = self._device.allocate_host(numel)
            self._transit[direction, peer] = have
        return have[:numel]


def _numel(batch: Batch) -> int:
    return sum(block[0].numel() for block in batch)


def _unpack_batch(packed: torch.Tensor, batch: Batch) -> None:
    at = 0
    for (view,) in batch:
        enqueue_copy(view, shaped_like(packed[at:], view))
        at += view.numel()


# ---- host sum -------------------------------------------------------------------------------------------------------


BYTES = 4  # per fp32 element
PROCESS_BYTES = 60_000_000  # libzmq, threads and requested chunks that are not yet in place, measured


@dataclass(frozen=True, slots=True)
class HostSum:
    """The bytes that one rank needs, by purpose."""

    shard: int  # the frozen or pulled parameters
    kept: int = 0  # the pushed shard, kept for the merge under overlap: full
    owed: int = 0  # base and error feedback of a lossy codec
    rounded: int = 0  # rounding errors of 16-bit parameters without masters
    transit: int = 0  # blocks in transit to and from other ranks of the cluster
    process: int = PROCESS_BYTES

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def describe_sum(self) -> str:
        """Format the sum with its parts, so that a person can check it."""
        parts = [f"{getattr(self, part.name) / 1e6:.1f} MB {part.name}" for part in fields(self)]
        return f"{' + '.join(part for part in parts if not part.startswith('0.0 '))} = {self.total_bytes / 1e6:.1f} MB"


# ---- memory map -----------------------------------------------------------------------------------------------------
# A piece that is one run of a block shares the block's memory, so no copy is needed between the two. A parameter for
# which that is impossible (shards along an inner dim) has memory that holds either its pieces or its blocks, never both
# at once.


@dataclass(slots=True)
class MemoryMap:
    """The offsets of all blocks and pieces in the buffer, and its size."""

    piece_at: dict[int, int] = field(default_factory=dict)  # offset by number of the piece in the plan
    block_at: dict[tuple[int, int, int], int] = field(default_factory=dict)  # offset by layer, parameter, block
    in_block: set[int] = field(default_factory=set)  # pieces that share the memory of the one block that holds them
    size: int = 0


# One layer: for each parameter the rectangles of its written blocks.
LayerBlocks = Sequence[Sequence[Rect]]


def map_memory(layers: Sequence[LayerBlocks], pieces: Sequence[Range]) -> MemoryMap:
    """Lay out a buffer for all layers, one after the other."""
    found = MemoryMap()
    by_layer: list[dict[int, Range]] = [{} for _ in layers]
    for n, piece in enumerate(pieces):
        by_layer[piece.layer][n] = piece
    for number, (blocks, own) in enumerate(zip(layers, by_layer, strict=True)):
        found.size = _map_layer(found, number, blocks, own, found.size)
    return found


def _map_layer(found: MemoryMap, layer: int, blocks: LayerBlocks, pieces: Mapping[int, Range], begin: int) -> int:
    """Place one layer from offset `begin` on; return its end."""
    shared = {piece.param for piece in pieces.values() if find_block(blocks[piece.param], piece) is None}
    numbered = [((layer, k, b), rect.numel) for k, rects in enumerate(blocks) for b, rect in enumerate(rects)]
    at = begin
    for key, numel in numbered:
        if key[1] not in shared:
            found.block_at[key], at = at, at + numel
    for number, piece in pieces.items():
        if piece.param not in shared:
            block = find_block(blocks[piece.param], piece)
            assert block is not None
            found.piece_at[number] = found.block_at[layer, piece.param, block[0]] + block[1]
            found.in_block.add(number)
    pieces_end = blocks_end = at
    for number, piece in pieces.items():
        if piece.param in shared:
            found.piece_at[number], pieces_end = pieces_end, pieces_end + piece.length
    for key, numel in numbered:
        if key[1] in shared:
            found.block_at[key], blocks_end = blocks_end, blocks_end + numel
    return max(pieces_end, blocks_end)


def find_block(blocks: Sequence[Rect], piece: Range) -> tuple[int, int] | None:
    """Return the block that holds the piece as one run, and the piece's offset in it; None if no block does."""
    for index, rect in enumerate(blocks):
        if rect.is_run and rect.first <= piece.offset and piece.offset + piece.length <= rect.end:
            return index, piece.offset - rect.first
    return None


# ---- replicas -------------------------------------------------------------------------------------------------------
# Ranks of one host that write the same parts of the model: replicas of DDP, HSDP and Megatron's data parallelism.
#
# They share one copy of the shard in host memory: each pulls its pieces into it, and all install from it. Parts from
# ranks of other groups are received by the group's first rank only. Pure.


Group = tuple[int, ...]  # ranks in order
Place = tuple[int, int]  # layer, parameter


def find_replicas(ranks: Sequence[RankLayout]) -> tuple[Group, ...]:
    """Return the group of each rank, often only the rank itself; the same on all ranks."""
    ways: dict[object, int] = {}
    columns: dict[object, tuple[int, ...]] = {}
    found: dict[object, list[int]] = {}
    keys = []
    for rank, layout in enumerate(ranks):
        numbers = tuple(ways.setdefault(_written(holding), len(ways)) for holding in layout.holdings)
        column = columns.setdefault((layout.column, numbers), tuple(numbers[way] for way in layout.column))
        keys.append((layout.host, layout.names, column))
        found.setdefault(keys[-1], []).append(rank)
    return tuple(tuple(found[key]) for key in keys)


@dataclass(frozen=True)
class SharedShards:
    """The groups of ranks that share parts of their shards; the same on all ranks."""

    group_of: Mapping[int, Group] = field(default_factory=dict)  # only for ranks that share
    private: Mapping[Group, Collection[Place]] = field(default_factory=dict)  # parameters not shared in the group

    def shares(self, rank: int, place: Place) -> bool:
        """Return whether a rank's memory of this parameter is shared in its group."""
        group = self.group_of.get(rank)
        return group is not None and place not in self.private[group]

    def is_sent(self, mover: int, target: int, place: Place) -> bool:
        """Return whether a part that `mover` has pulled is sent to `target`: not within a group, and once per shared
        memory.
        """
        if not self.shares(target, place):
            return True
        group = self.group_of[target]
        return mover not in group and target == group[0]

    def is_complete(self, me: int, layer: int, moves: Redistribution) -> bool:
        """Return whether this rank's whole part of a layer is in its memory once all ranks have pulled."""
        return all(
            self.shares(me, (layer, rect.param)) and peer in self.group_of[me]
            for peer, rects in moves.receives.items()
            for rect in rects
        )

    def filter_spread(self, me: int, layer: int, moves: Redistribution) -> Redistribution:
        """Return the exchanges after a pull that remain with shared memory."""
        sends = {
            peer: [rect for rect in rects if self.is_sent(me, peer, (layer, rect.param))]
            for peer, rects in moves.sends.items()
        }
        receives = {
            peer: [rect for rect in rects if self.is_sent(peer, me, (layer, rect.param))]
            for peer, rects in moves.receives.items()
        }
        return Redistribution(
            {peer: rects for peer, rects in sends.items() if rects},
            {peer: rects for peer, rects in receives.items() if rects},
            moves.local,
        )


def _written(holding: Holding) -> object:
    return holding.shape, holding.writes


# ---- node memory ----------------------------------------------------------------------------------------------------
# Host memory mapped by several processes of one host: a file without a name, opened through its creator's /proc.
#
# The first rank of a group creates it and sends its process id and descriptor; the others open it in /proc and compare
# a random token at its end, so that neither another process with that id nor another host of that name is mistaken for
# it. The kernel frees it with the last process. If one rank of a group cannot open it (separate containers), each rank
# of the group uses its own memory.


TOKEN_BYTES = 16
NAME = "dips-shard"


@dataclass(frozen=True)
class NodeMemory:
    """The agreement of all ranks on shared memory, and this rank's mapping; `pages` None: this rank shares none."""

    shards: SharedShards
    pages: mmap.mmap | None


def share_memory(
    ranks: RankExchange,
    groups: Sequence[Group],
    private: Collection[Place],
    count_bytes: Callable[[Collection[Place]], int],
) -> NodeMemory:
    """Map one memory in each group of several ranks. Collective.

    private      parameters that this rank cannot have in shared memory
    count_bytes  returns the size of the group's shard without all its ranks' private parameters
    """
    if all(len(group) == 1 for group in groups):
        return NodeMemory(SharedShards(), None)
    told = [msgspec.msgpack.decode(words) for words in ranks.all_gather(msgspec.msgpack.encode(sorted(private)))]
    excluded = {group: {(l, k) for rank in group for l, k in told[rank]} for group in groups if len(group) > 1}
    mine = groups[ranks.rank]
    nbytes = count_bytes(excluded[mine]) if mine in excluded else 0
    made = _make_pages(nbytes) if nbytes and ranks.rank == mine[0] else None
    offers = ranks.all_gather(b"" if made is None else msgspec.msgpack.encode(made[1:]))
    pages = made[0] if made is not None else _open_pages(offers[mine[0]], nbytes)
    mapped = [bool(answer) for answer in ranks.all_gather(b"\1" if pages is not None else b"")]
    if made is not None:
        os.close(made[2])  # every rank that can open it has mapped it
    shared = {group: places for group, places in excluded.items() if all(mapped[rank] for rank in group)}
    group_of = {rank: group for group in shared for rank in group}
    return NodeMemory(SharedShards(group_of, shared), pages if ranks.rank in group_of else None)


def _make_pages(nbytes: int) -> tuple[mmap.mmap, int, int, bytes]:
    """Create shared memory; return the mapping, this process's id, the descriptor and the token."""
    descriptor, token = os.memfd_create(NAME), secrets.token_bytes(TOKEN_BYTES)
    os.pwrite(descriptor, token, nbytes)  # at its end: so the file has its size
    return mmap.mmap(descriptor, nbytes), os.getpid(), descriptor, token


def _open_pages(offer: bytes, nbytes: int) -> mmap.mmap | None:
    """Map the offered memory; None if it cannot be opened here, or the token differs."""
    if not offer or not nbytes:
        return None
    pid, number, token = msgspec.msgpack.decode(offer)
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    except OSError:
        return None
    try:
        same = os.fstat(descriptor).st_size == nbytes + TOKEN_BYTES
        if same and os.pread(descriptor, TOKEN_BYTES, nbytes) == token:
            return mmap.mmap(descriptor, nbytes)
        return None
    finally:
        os.close(descriptor)


# ---- shard buffer ---------------------------------------------------------------------------------------------------
# Two buffers: one for this rank alone, and one shared by the ranks of its host that hold the same parts.


class ShardBuffer:
    """The host buffers of a rank: 4 B for each parameter of the shard."""

    def __init__(
        self,
        device: Device,
        ranks: RankExchange,
        layers: Sequence[LayerBlocks],
        pieces: Sequence[Range],
        groups: Sequence[Group],
        *,
        pinned: bool,
    ) -> None:
        """Allocate the buffers. Collective.

        groups  the replica group of each rank
        pinned  lock the memory, for fast copies to and from the device
        """
        alone = [(rank,) for rank in range(ranks.world_size)]
        node = share_memory(
            ranks,
            groups or alone,
            _private_places(layers, pieces),
            lambda private: FLOAT_BYTES * _count_items(layers, private),
        )
        self.shards: SharedShards = node.shards
        self._sharers = len(self.shards.group_of.get(ranks.rank, (ranks.rank,)))
        self._block_at: dict[tuple[int, int, int], tuple[torch.Tensor, int]] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._in_block: set[int] = set()
        shared = {p for p in _all_places(layers) if self.shards.shares(ranks.rank, p)}
        self._own_numel = self._place(device, layers, pieces, lambda place: place not in shared, pinned)
        self._shared_numel = 0
        if node.pages is not None:
            array = np.frombuffer(node.pages, np.float32)
            if pinned:
                device.pin_pages(array)
            self._shared_numel = self._place(
                device, layers, pieces, lambda place: place in shared, pinned, torch.from_numpy(array)
            )
        self.pieces = [Piece(*piece, self._memory[number].numpy()) for number, piece in enumerate(pieces)]

    @property
    def blocks(self) -> Sequence[tuple[int, int, int]]:
        """Layer, parameter and number of each block, in a fixed order."""
        return list(self._block_at)

    @property
    def allocated_numel(self) -> int:
        """The elements of 4 B that are allocated; of shared memory only this rank's share."""
        return self._own_numel + -(-self._shared_numel // self._sharers)

    def block_memory(self, key: tuple[int, int, int], numel: int) -> torch.Tensor:
        """Return the memory of a block, flat."""
        buffer, at = self._block_at[key]
        return buffer[at : at + numel]

    def is_in_block(self, piece: int) -> bool:
        """Return whether a piece is part of a block of the shard, rather than sharing memory with blocks in turn."""
        return piece in self._in_block

    def piece_part(self, part: LocalRect) -> torch.Tensor:
        """Return a rectangle of a piece, [rows, cols]."""
        piece, memory, rect = self.pieces[part.index], self._memory[part.index], part.rect
        at = memory.storage_offset() + rect.first - piece.offset
        return memory.as_strided((rect.rows, rect.cols), (rect.width, 1), at)

    def _place(
        self,
        device: Device,
        layers: Sequence[LayerBlocks],
        pieces: Sequence[Range],
        belongs: Callable[[Place], bool],
        pinned: bool,
        buffer: torch.Tensor | None = None,
    ) -> int:
        """Lay out the parameters selected by `belongs` in a buffer, allocated if None; return its size."""
        some = [[rects if belongs((l, k)) else [] for k, rects in enumerate(blocks)] for l, blocks in enumerate(layers)]
        numbers = [number for number, piece in enumerate(pieces) if belongs((piece.layer, piece.param))]
        places = map_memory(some, [pieces[number] for number in numbers])
        if buffer is None:
            buffer = device.allocate_host(places.size) if pinned else torch.from_numpy(map_pages(places.size))
        self._block_at |= {key: (buffer, at) for key, at in places.block_at.items()}
        self._in_block |= {numbers[n] for n in places.in_block}
        for n, at in places.piece_at.items():
            self._memory[numbers[n]] = buffer[at : at + pieces[numbers[n]].length]
        return places.size


def _all_places(layers: Sequence[LayerBlocks]) -> list[Place]:
    return [(l, k) for l, blocks in enumerate(layers) for k in range(len(blocks))]


def _private_places(layers: Sequence[LayerBlocks], pieces: Sequence[Range]) -> set[Place]:
    """Return the parameters with a piece that is no part of a block here: pieces and blocks use the same memory in
    turn.
    """
    return {(p.layer, p.param) for p in pieces if find_block(layers[p.layer][p.param], p) is None}


def _count_items(layers: Sequence[LayerBlocks], without: Collection[Place]) -> int:
    return sum(
        rect.numel
        for l, blocks in enumerate(layers)
        for k, rects in enumerate(blocks)
        if (l, k) not in without
        for rect in rects
    )
