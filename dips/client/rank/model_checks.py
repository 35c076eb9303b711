"""Checks of the model across ranks and clusters: what is trained, what is frozen, and that replicas are equal."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import msgspec
import torch
import xxhash
from torch import nn

from dips.client.parallel import HostMemory
from dips.client.parallel.adapter import is_dtensor
from dips.client.parallel.plan import Replicas
from dips.client.parallel.tensors import plain_name
from dips.client.rank.agent_client import JobCollectives
from dips.errors import ConfigError

# ---- trained names --------------------------------------------------------------------------------------------------
# The names of the parameters that the script trains: those with requires_grad when the loop was created, and no others.
#
# A parameter that is unfrozen or added later is not in the run's manifest: each cluster would train its own, without an
# error. A parameter that is frozen later is still pushed and pulled.


class TrainedNames:
    """The names of one rank's trained parameters."""

    def __init__(self, parts: Sequence[nn.Module], collectives: JobCollectives) -> None:
        self._parts, self._collectives = parts, collectives
        self._known = self._list_names()

    def check_names(self) -> None:
        """Raise ConfigError, the same on all ranks, for a parameter that trains and is not shared. Collective."""
        added = min(self._list_names() - self._known, default="")
        (none,) = self._collectives.all_min([int(not added)])
        if none:
            return
        by_rank = [name.decode() for name in self._collectives.all_gather(added.encode())]
        raise ConfigError(
            f"{next(filter(None, by_rank))}: a parameter that was unfrozen or added after OuterLoop was made: it is "
            "trained here and not shared. Make the run (`dips init`) and the loop with requires_grad=True for all that "
            "will ever be trained, and freeze it afterwards until then"
        )

    def _list_names(self) -> set[str]:
        return {plain_name(name) for part in self._parts for name, p in part.named_parameters() if p.requires_grad}


# ---- frozen base ----------------------------------------------------------------------------------------------------
# A digest of a model's frozen parameters, equal in every layout: adapters belong to one base model.
#
# Covers the first element of each parameter, as rank 0 holds it, rounded to bf16 as bases are often loaded. Unknown,
# and then not compared, if ranks hold different parameters (a pipeline) or the base has other types (quantized).


COMPARED = (torch.float32, torch.bfloat16)  # a base stored in bf16 has equal values in both
UNKNOWN = ""


@torch.no_grad()
def digest_frozen(parts: Sequence[nn.Module], collectives: JobCollectives) -> str:
    """Return the SHA-256 of names and first elements; UNKNOWN if there are none or they cannot be compared.
    Collective.
    """
    frozen = {plain_name(name): p for part in parts for name, p in part.named_parameters() if not p.requires_grad}
    by_rank = collectives.all_gather(hashlib.sha256("\n".join(sorted(frozen)).encode()).digest())
    if len(set(by_rank)) > 1:
        return UNKNOWN
    firsts = {name: _first_element(p) for name, p in frozen.items() if p.numel()}
    known = [first for first in firsts.values() if first is not None]
    if not known or len(known) < len(firsts):
        return UNKNOWN
    values = [float(first.to(torch.bfloat16)) for first in known]
    lines = sorted(f"{name} {value.hex()}" for name, value in zip(firsts, values, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _first_element(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the first element; None if it is not on this rank, or of a type that is not compared."""
    if is_dtensor(parameter):
        if sum(parameter.device_mesh.get_coordinate() or [1]):  # another rank of the mesh has it
            return None
        parameter = parameter.to_local()
    if parameter.dtype not in COMPARED or not parameter.numel() or parameter.is_meta:
        return None
    return parameter.detach().reshape(-1)[0]


# ---- replica check --------------------------------------------------------------------------------------------------
# Each rank pushes a part of a replica, so ranks with different values would push a mixture of their models, and the
# next pull would make them equal again without an error. A forgotten DistributedDataParallel has this effect, and so
# have local experts that are plain tensors of one name on all ranks.
#
# Before the first push, and every EVERY pushes, the ranks exchange one checksum per set of ranks with equal parts.
# Single parameters are compared only if these differ, and then the difference is measured: replicas that are trained
# alike are equal bit for bit, except for kernels that sum in a different order on another rank. Buffers of
# `share_buffers` are not compared: DDP lets each rank change its own between two forwards.


EVERY = 16  # pushes between two checks: a check reads the replicas once more, as the check for finite values does
MEASURED = 16  # most differing parameters measured per set of ranks: their sums are sent
SUMS = 64  # sums over equal parts of a parameter, by which the distance of two replicas is measured
ROUNDING = 1e-3  # share of the norm; 16 AdamW steps at 1e-4 on other data exceed it, another order of sums does not
COARSE_ROUNDING = 1e-2  # for 16-bit parameters: an element rounded the other way is 0.4 % off (bf16)

ADVICE = (
    "Each rank pushes a part of what it shares with others, so these would push a mixture. Is DistributedDataParallel "
    "or fully_shard forgotten? Experts of each rank's own must be DTensors that are cut along a mesh, or have names of "
    "their own. Replicas that are averaged now and then must be averaged before a push"
)
PAIR = struct.Struct("<Qq")  # key of the set of ranks, checksum


@dataclass(frozen=True, slots=True)
class UnlikeReplicas:
    """A parameter of which two ranks hold different replicas."""

    name: str
    ranks: tuple[int, int]
    share: float  # distance over norm
    limit: float

    def __str__(self) -> str:
        return f"{self.name} (ranks {self.ranks[0]} and {self.ranks[1]}: {self.share:.2g} of its norm apart)"


class ReplicaCheck:
    """Checks one rank's replicas."""

    def __init__(self, memory: HostMemory, collectives: JobCollectives, warn: Callable[[str], object]) -> None:
        self._memory, self._collectives, self._warn = memory, collectives, warn
        self._pushes = 0

    def check_push(self) -> None:
        """Check the replicas before some pushes; differences within rounding are warned of, on all ranks. Collective.

        Raises ConfigError, the same on all ranks, if replicas differ by more than rounding.
        """
        due = self._pushes % EVERY == 0
        self._pushes += 1
        if not due or not self._memory.has_replicas:
            return
        mine = {_key(ranks): views for ranks, views in self._memory.replicated_views().items()}
        unlike = self._compare_sets(mine)
        if not unlike:
            return
        found, count = self._measure_differences({key: views for key, views in mine.items() if key in unlike})
        worst = sorted(found, key=lambda one: -one.share / one.limit)
        more = f" and {count - 1} more" if count > 1 else ""
        text = f"ranks hold different values as replicas of {worst[0]}{more}. {ADVICE}"
        if worst[0].share > worst[0].limit:
            raise ConfigError(text)
        self._warn(text)

    def _compare_sets(self, mine: Mapping[int, Sequence[tuple[str, torch.Tensor]]]) -> set[int]:
        """Return the keys of the sets of ranks whose values differ."""
        sums = ((key, self._memory.sum_bits_of([view for _, view in views])) for key, views in mine.items())
        told = self._collectives.all_gather(b"".join(PAIR.pack(key, total) for key, total in sums))
        first: dict[int, int] = {}
        pairs = (pair for message in told for pair in PAIR.iter_unpack(message))
        return {key for key, total in pairs if first.setdefault(key, total) != total}

    def _measure_differences(
        self, mine: Mapping[int, Sequence[tuple[str, torch.Tensor]]]
    ) -> tuple[list[UnlikeReplicas], int]:
        """Return the first differing parameters of each set of ranks, and the number of differing blocks."""
        sums = {key: [self._memory.sum_bits_of([view]) for _, view in views] for key, views in mine.items()}
        by_set: dict[int, list[list[int]]] = {}  # one list per rank
        for told in self._gather(list(sums.items())):
            for key, totals in told:
                by_set.setdefault(key, []).append(totals)
        unlike = {key: _list_unlike(of) for key, of in by_set.items()}
        measured = [
            (key, i, views[i][0], _limit(views[i][1]), *_measure_view(views[i][1]))
            for key, views in mine.items()
            for i in unlike[key][:MEASURED]
        ]
        by_block: dict[tuple[int, int], list[tuple[int, list[Any]]]] = {}
        for rank, told in enumerate(self._gather(measured)):
            for key, i, *of in told:
                by_block.setdefault((key, i), []).append((rank, of))
        return [_find_farthest(held) for held in by_block.values()], sum(map(len, unlike.values()))

    def _gather(self, told: Any) -> Iterator[Any]:
        return map(msgspec.msgpack.decode, self._collectives.all_gather(msgspec.msgpack.encode(told)))


def _list_unlike(by_rank: Sequence[Sequence[int]]) -> list[int]:
    return [i for i, totals in enumerate(zip(*by_rank, strict=True)) if len(set(totals)) > 1]


def _key(ranks: Replicas) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(ranks))


def _limit(view: torch.Tensor) -> float:
    return ROUNDING if view.dtype is torch.float32 else COARSE_ROUNDING


def _measure_view(view: torch.Tensor) -> tuple[float, list[float]]:
    """Return the norm, and sums over parts of the tensor: their distance is at most that of two replicas, up to
    scale.
    """
    flat = view.detach().reshape(-1)
    parts = flat.split(-(-flat.numel() // SUMS))
    sums = torch.stack([part.sum(dtype=torch.float32) for part in parts])
    return float(torch.linalg.vector_norm(flat, dtype=torch.float32)), sums.tolist()


def _find_farthest(held: Sequence[tuple[int, list[Any]]]) -> UnlikeReplicas:
    """Compare a block on all ranks that hold it: return the first rank and the one farthest from it."""
    (first, (name, limit, norm, sums)), *others = held
    apart = [
        (sqrt(sum((a - b) ** 2 for a, b in zip(sums, theirs, strict=True))) / (max(norm, other) or 1.0), rank)
        for rank, (_, _, other, theirs) in others
    ]
    share, rank = max(apart, key=lambda one: one[0])
    return UnlikeReplicas(name, (first, rank), share, limit)
