"""Parameters that two or more layers share, as embedding and head of many decoders do.

The layer that comes first *owns* such a parameter; each later one has a *copy*, on whichever part of the model it is.
After the last backward of a step the copies' gradients are added to the owner's, the owner's optimizer steps, and the
copies take the new values. No optimizer steps a copy: devices of two kinds, or shards of two lengths, round the same
step differently, and copies that step for themselves drift apart.

Each rank sends what it holds of a copy, or of an owner, straight to the ranks that hold the same elements of the other,
however many ranks their stages have. Gradients go one way and values the other, over gloo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from dips.client.parallel.adapter import is_dtensor
from dips.inside.agreement import Gathers
from dips.inside.pipeline.parts import PipelinePart

Ties = Mapping[str, str]  # by the name of a copy: that of its owner
Extent = tuple[int, int]  # first element of the flat parameter that a rank holds, and one past the last


class RankGathers(Gathers, Protocol):
    """The collective that this needs, and the number of this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class TiedOverlap:
    """Elements of a parameter that one rank holds of the copy, and one of the owner."""

    copy: str
    owner: str
    copy_rank: int
    owner_rank: int
    begin: int
    end: int


def list_overlaps(ties: Ties, extents: Sequence[Mapping[str, Extent]]) -> list[TiedOverlap]:
    """Return all overlaps, in the order in which gradients are added.

    extents  of each rank, by the name of an owner or a copy
    """
    found = []
    for copy, owner in ties.items():
        for copy_rank, owner_rank in product(range(len(extents)), repeat=2):
            if copy in extents[copy_rank] and owner in extents[owner_rank]:
                (a, b), (c, d) = extents[copy_rank][copy], extents[owner_rank][owner]
                if max(a, c) < min(b, d):
                    found.append(TiedOverlap(copy, owner, copy_rank, owner_rank, max(a, c), min(b, d)))
    return found


class TiedParameters:
    """One rank's owners and copies."""

    def __init__(
        self,
        ties: Ties,
        parts: Sequence[PipelinePart],
        collectives: RankGathers,
        group: dist.ProcessGroup,
        first_tag: int,
    ) -> None:
        """Find who holds which elements. Collective.

        parts      of this rank, sharded; each is told the names of the parameters that its copies are of
        group      all ranks
        first_tag  of this group that no other transfer uses, nor any after it
        """
        self._group, self._first_tag, self._rank, self._ties = group, first_tag, collectives.rank, dict(ties)
        self._here: dict[str, nn.Parameter] = {}
        for part in parts:
            named = {name: p for name, p in part.named_parameters() if name in {*ties, *ties.values()}}
            part.tied_names = {name: ties[name] for name in named if name in ties}
            self._here |= named
        told = collectives.all_gather(json.dumps({name: _extent(p) for name, p in self._here.items()}).encode())
        self._overlaps = list_overlaps(ties, [json.loads(one) for one in told])

    def owned_by(self, part: nn.Module) -> list[str]:
        """Return the parameters of a part to which gradients of copies are added."""
        return [name for name, _ in part.named_parameters() if name in self._ties.values()]

    def leave_out_copies(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """Take the copies out of an optimizer's groups; return it, or None if nothing is left in it."""
        copies = {id(p) for name, p in self._here.items() if name in self._ties}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in copies]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        for parameter in [p for p in optimizer.state if id(p) in copies]:  # Adagrad's state is made with it
            del optimizer.state[parameter]
        return optimizer if optimizer.param_groups else None

    def sum_gradients(self) -> None:
        """Add the copies' gradients to their owners', and clear them, as those of parameters that were frozen since:
        an optimizer would decay these. Collective among those who hold either.

        Raises RuntimeError if a transfer does not end.
        """
        for parameter in self._here.values():
            if parameter.grad is None:
                # A DTensor's device stays the rank's while its shard is in host memory: its gradient's must be that.
                parameter.grad = torch.zeros_like(parameter, device=parameter.device)
        held = {name: _flat(p.grad) for name, p in self._here.items() if p.grad is not None}
        self._exchange(held, torch.Tensor.add_, to_owner=True)
        for name, parameter in self._here.items():
            if name in self._ties or not parameter.requires_grad:
                parameter.grad = None

    def spread_values(self) -> None:
        """Give the copies the values of their owners. Collective, and raises as `sum_gradients`."""
        self._exchange({name: _flat(p) for name, p in self._here.items()}, torch.Tensor.copy_, to_owner=False)

    def _exchange(
        self,
        held: Mapping[str, torch.Tensor],
        put: Callable[[torch.Tensor, torch.Tensor], object],
        *,
        to_owner: bool,
    ) -> None:
        """Move the elements of all overlaps that this rank has part in, one way, and put them in their places."""
        works: list[dist.Work | None] = []
        kept: list[torch.Tensor] = []  # until they are sent
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []  # place, and what comes there
        for tag, each in enumerate(self._overlaps, self._first_tag):
            ends = (each.copy, each.copy_rank), (each.owner, each.owner_rank)
            (source, sender), (target, receiver) = ends if to_owner else ends[::-1]
            if sender == self._rank:
                kept.append(self._slice(held, source, each).cpu())
            if receiver == self._rank:
                place = self._slice(held, target, each)
                arriving.append((place, kept[-1] if sender == receiver else torch.empty_like(place, device="cpu")))
            if sender == self._rank != receiver:
                works.append(dist.isend(kept[-1], receiver, self._group, tag))
            if receiver == self._rank != sender:
                works.append(dist.irecv(arriving[-1][1], sender, self._group, tag))
        for work in filter(None, works):
            work.wait()
        for place, came in arriving:
            put(place, came.to(place.device))

    def _slice(self, held: Mapping[str, torch.Tensor], name: str, overlap: TiedOverlap) -> torch.Tensor:
        first, _ = _extent(self._here[name])
        return held[name][overlap.begin - first : overlap.end - first]


def _extent(parameter: nn.Parameter) -> Extent:
    if not is_dtensor(parameter):
        return 0, parameter.numel()
    mesh, (rows, *rest) = parameter.device_mesh, parameter.shape  # FSDP cuts rows as torch.chunk does
    begin = min(mesh.get_local_rank() * ceil(rows / mesh.size()), rows) * prod(rest)
    return begin, begin + parameter.to_local().numel()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach().view(-1)
