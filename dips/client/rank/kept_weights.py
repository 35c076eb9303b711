"""Detection of optimizers that keep their own copy of the weights and write the parameters from it, undoing pulls.

    fp32 masters        of 16-bit parameters, in the optimizer's state or as the tensors that it steps: the next step
                        writes back what a pull has replaced, at once
    averaged weights    schedule-free's `z`, Lookahead's slow weights: a pull fades over the next steps, and what is
                        pushed are not the weights that would be evaluated

A sample of each kind of tensor in the state of torch's optimizers is compared before the first push and regularly
later, since much of the state is made in some later step. Copies that an optimizer keeps elsewhere: undo_watch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from dips.client.parallel.seam import Adapter
from dips.client.parallel.tensors import plain_name
from dips.client.parallel.torch_types import is_dtensor
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.inner_optimizers import InnerOptimizers
from dips.errors import ConfigError

EARLY, EVERY = 2, 16  # pushes that are checked: the first two, then every 16th
MOST_PARAMETERS = 16  # parameters sampled per kind of tensor, spread over the model
MOST_ELEMENTS = 64  # elements sampled per tensor
LEAST_VALUES = 4  # distinct values in a sample: a norm's weights of 1 equal many tensors
ALIKE = 0.99  # cosine above which a tensor of any name is taken for a copy of the weights
SCALE = 2.0  # largest ratio of the two norms
AVERAGED = ("z", "x0", "slow", "cached_params")  # parts of the names under which optimizers keep what they step from
ALIKE_BY_NAME = 0.5  # cosine for tensors of such names: after many steps the two have drifted apart
HARMLESS = ("p0", "ax")  # only read: Prodigy's initial parameters, and the mean of torch's ASGD
LEAST_ELEMENTS = 32  # least elements compared: fewer agree by chance, and a step counter agrees with any scalar

MASTERS = (
    "{name}: {kind} keeps an fp32 master of it ({where}), from which its next step would write back what a pull has "
    "replaced. Give it to the outer loop, OuterLoop(model, optimizer=optimizer), or where that is not enough a "
    "function that makes masters from the parameters, OuterLoop(model, optimizer=function)"
)
FADING = (
    "{name}: {kind} makes it from weights of its own (state {where}): each pull would fade within some steps, and what "
    "is pushed would not be what it evaluates. Use an optimizer that keeps none (AdamW, Muon, …); outer.progress "
    "can drive the learning rate"
)
SUSPECT = (
    "{name}: {kind} keeps values like its own in its state ({where}). If steps write the parameter from them, each "
    "pull is undone: then use another optimizer, or OuterLoop(model, optimizer=function) with what makes them anew"
)

PLAIN = (torch.Tensor, nn.Parameter)
Kept = tuple[str, torch.Tensor, torch.Tensor]  # name, parameter, tensor of the optimizer


class KeptWeights:
    """Checks the optimizers of one rank."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        adapter: Adapter,
        optimizers: InnerOptimizers,
        collectives: JobCollectives,
        warn: Callable[[str], object],
    ) -> None:
        """Create the check; `warn` takes a warning for the operator, the same on all ranks."""
        self._parts, self._adapter, self._optimizers = parts, adapter, optimizers
        self._collectives, self._warn = collectives, warn
        self._looks, self._warned = 0, False

    def check_optimizers(self) -> None:
        """Check the optimizers before some pushes: an optimizer that may undo pulls is warned of once. Collective.

        Raises ConfigError, the same on all ranks, for an optimizer that does undo pulls.
        """
        number, self._looks = self._looks, self._looks + 1
        if number >= EARLY and number % EVERY:
            return
        told = self._collectives.all_gather(msgspec.msgpack.encode(self._describe_kept()))
        errors, suspects = zip(*map(msgspec.msgpack.decode, told), strict=True)
        if error := next(filter(None, errors), ""):
            raise ConfigError(error)
        if (suspect := next(filter(None, suspects), "")) and not self._warned:
            self._warned = True
            self._warn(suspect)

    @torch.no_grad()
    def _describe_kept(self) -> tuple[str, str]:
        """Return an error on an optimizer that undoes pulls on this rank, and a warning on one that may; "" if there is
        none.
        """
        ours: dict[torch.Tensor, str] = {
            p: plain_name(name) for part in self._parts for name, p in part.named_parameters()
        }
        known = {id(master) for _, master, _ in self._adapter.local_masters()}
        suspect = ""
        for optimizer in self._optimizers.stepped:
            kind = type(optimizer).__name__
            by_key: dict[str, list[Kept]] = {}
            for key, one in _list_state(optimizer, ours):
                if id(one[2]) not in known:
                    by_key.setdefault(key, []).append(one)
            if not self._adapter.hides_masters:
                by_place = {f"state {key!r}": kept for key, kept in by_key.items()}
                by_place["the copy that it steps"] = list(_pair_copies(optimizer, ours, known))
                for where, kept in by_place.items():
                    if name := _find_master(_spread(kept)):
                        return MASTERS.format(name=name, kind=kind, where=where), ""
            for key, kept in by_key.items():
                alike, averaged = _compare_weights(_spread(kept)), not {key, *key.split("_")}.isdisjoint(AVERAGED)
                if averaged and alike > ALIKE_BY_NAME:
                    return FADING.format(name=kept[0][0], kind=kind, where=repr(key)), ""
                if alike > ALIKE and key not in HARMLESS:
                    suspect = suspect or SUSPECT.format(name=kept[0][0], kind=kind, where=repr(key))
        return "", suspect


def _list_state(optimizer: Optimizer, ours: dict[torch.Tensor, str]) -> Iterator[tuple[str, Kept]]:
    """Yield the tensors in an optimizer's state that have the shape of their parameter, by key."""
    for parameter, state in optimizer.state.items():
        if parameter in ours and isinstance(state, dict):
            for key, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and _may_be_weights(tensor, parameter):
                    yield str(key), (ours[parameter], parameter, tensor)


def _pair_copies(optimizer: Optimizer, ours: dict[torch.Tensor, str], known: set[int]) -> Iterator[Kept]:
    """Yield pairs of a parameter and an fp32 tensor that the optimizer steps, is no parameter, and equals it when
    rounded.
    """
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    copies = [p for p in stepped if p not in ours and id(p) not in known and p.dtype is torch.float32]
    own = set(stepped)
    for parameter, name in ours.items() if copies else ():
        if parameter not in own and parameter.dtype is not torch.float32 and parameter.requires_grad:
            alike = (copy for copy in copies if copy.shape == parameter.shape)
            yield from ((name, parameter, c) for c in alike if _is_rounded(_sample(parameter), _sample(c)))


def _may_be_weights(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a state tensor could be a copy of the weights; tensors of other classes, as quantized ones, cannot
    be read.
    """
    alike = tensor.shape == parameter.shape and is_dtensor(tensor) == is_dtensor(parameter)
    return alike and tensor.is_floating_point() and type(_find_local(tensor)) in PLAIN


def _find_master(kept: Sequence[Kept]) -> str:
    """Return the first 16-bit parameter that equals its state tensor rounded; "" if there is none."""
    pairs = ((name, p, t) for name, p, t in kept if p.dtype is not torch.float32 and t.dtype is torch.float32)
    return next((name for name, p, t in pairs if _is_rounded(_sample(p), _sample(t))), "")


def _is_rounded(coarse: torch.Tensor, exact: torch.Tensor) -> bool:
    return coarse.unique().numel() >= LEAST_VALUES and coarse.equal(exact.to(coarse.dtype))


def _compare_weights(kept: Sequence[Kept]) -> float:
    """Return the cosine between parameters and state tensors; 0 if their norms differ too much."""
    own = other = both = 0.0
    elements = 0
    for _, parameter, tensor in kept:
        p, t = _sample(parameter).double(), _sample(tensor).double()
        own, other, both = own + float(p @ p), other + float(t @ t), both + float(p @ t)
        elements += p.numel()
    of_one_scale = own < SCALE**2 * other and other < SCALE**2 * own
    return both / sqrt(own * other) if of_one_scale and elements >= LEAST_ELEMENTS else 0.0


def _spread(kept: Sequence[Any]) -> Sequence[Any]:
    return kept[:: max(1, len(kept) // MOST_PARAMETERS)][:MOST_PARAMETERS]


def _sample(tensor: Any) -> torch.Tensor:
    """Return some elements of a tensor's local part, on the host."""
    flat = _find_local(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // MOST_ELEMENTS)][:MOST_ELEMENTS].cpu()


def _find_local(tensor: Any) -> Any:
    return tensor.to_local() if is_dtensor(tensor) else tensor
