"""The optimizers that train this rank's model: found by their steps, and checked for copies of the weights of their
own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from dips.client.parallel.adapter import Adapter, is_dtensor
from dips.client.parallel.devices import is_captured
from dips.client.parallel.tensors import plain_name, unwrap_optimizers
from dips.client.rank.agent_client import JobCollectives
from dips.errors import ConfigError, LocalProtocolError

# ---- inner optimizers -----------------------------------------------------------------------------------------------
# The optimizers that train this rank's model, found by their steps, since a training script need not pass them.
#
# Every torch.optim.Optimizer calls a global hook when it steps. An optimizer that holds a parameter of the model, or
# that the script has passed, is ours: its state is dropped after the model has diverged, because moments that are not
# finite would make the next step diverge again.


UNSEEN_STEPS = 16  # steps of another optimizer of this model without one of the followed: then this is an error


FIRST_RATES = ("step_size", "eta")  # state of Rprop and ASGD that starts as the learning rate
FIRST_VALUES = {"mu_product": 1.0, "mu": 1.0}  # initial state of NAdam and of ASGD; all other state starts as 0
CAPTURED = (
    "follow_optimizer: the step of {kind} is captured in a CUDA graph, whose replays call no hook and would not be "
    "counted: call outer.step after each replay"
)


class InnerOptimizers:
    """The optimizers of one rank; watches their steps until `close`."""

    def __init__(self, parts: Sequence[nn.Module], named: Any = None) -> None:
        """Start watching; `named` is the script's `optimizer` argument, of any kind."""
        self._parts = parts
        found = list(unwrap_optimizers(named))
        within = (one for each in found for one in getattr(each, "optim_dict", {}).values())  # torchao's, by parameter
        self._found: WeakSet[Optimizer] = WeakSet([*found, *within])
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # steps of any optimizer
        self.steps = 0
        """The most steps that one optimizer has taken since this was made: parameters may be divided among several.

        Counts any optimizer of this process: one that steps copies of the parameters holds none of ours. It is read at
        every inner step, so it is stored. 0 (unknown) once a step was captured in a CUDA graph.
        """
        self._captured = False
        self._followed: tuple[Optimizer, Callable[[], None]] | None = None
        self._handle = register_optimizer_step_post_hook(self._on_step)

    @property
    def follows(self) -> bool:
        """Whether the steps of some optimizer are reported."""
        return self._followed is not None

    @property
    def stepped(self) -> list[Optimizer]:
        """All optimizers of this process that have stepped: some may step copies of the parameters and hold none of
        ours.
        """
        return list(self._steps)

    def follow_steps(self, optimizer: Any, on_step: Callable[[], None]) -> None:
        """Call `on_step` at the end of each step of this optimizer, or of the one that it wraps.

        Raises ConfigError if the object neither is nor wraps exactly one torch optimizer, or another is followed
        already.
        """
        found = list(unwrap_optimizers(optimizer))
        if len(found) != 1:
            raise ConfigError(
                f"expected one torch optimizer, or one that wraps it, got {type(optimizer).__name__} of {len(found)}: "
                "name the one that steps last, or call OuterLoop.step after all have"
            )
        if self._followed is not None and self._followed[0] is not found[0]:
            raise ConfigError("another optimizer's steps are counted already: name the one that steps last")
        self._followed = (found[0], on_step)
        self._unseen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # steps of others before its first step

    def drop_state(self) -> str:
        """Clear optimizer states and gradients; return why this does not mend the model on this rank, or ""."""
        if not self._found and self._steps:  # if no optimizer has ever stepped, the script writes parameters itself
            return "its optimizer is not known: pass it, OuterLoop(model, optimizer=optimizer)"
        for optimizer in self._found:
            _clear_state(optimizer)
        fixed = {p for o in self._found for group in o.param_groups if group.get("capturable") for p in group["params"]}
        for part in self._parts:
            for parameter in part.parameters():
                if parameter.grad is not None and parameter in fixed:  # a CUDA graph may write there
                    parameter.grad.zero_()
                else:
                    parameter.grad = None  # gradients may be accumulated into
        spoilt = next((name for part in self._parts for name, b in part.named_buffers() if _holds_nan(b)), "")
        return f"{spoilt}, a buffer that no pull replaces, holds NaN" if spoilt else ""

    def close(self) -> None:
        """Stop watching."""
        self._followed = None
        self._handle.remove()

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._captured = self._captured or is_captured(p for group in optimizer.param_groups for p in group["params"])
        if self._captured:
            self._on_captured(optimizer)
            return
        steps = self._steps.get(optimizer, 0) + 1
        if steps == 1:
            if self._is_ours(optimizer):
                self._found.add(optimizer)
            self.steps = max(self._steps.values(), default=0)  # the optimizer that this one replaces may be gone
        self._steps[optimizer] = steps
        self.steps = max(self.steps, steps)
        if self._followed is None:
            return
        if self._followed[0] is optimizer:
            self._followed[1]()  # after the step is counted: an outer step compares its install with the steps taken
        elif optimizer in self._found and self._followed[0] not in self._steps:
            self._count_unseen(optimizer, type(self._followed[0]).__name__)

    def _on_captured(self, optimizer: Optimizer) -> None:
        """Process a step captured in a CUDA graph: further steps are replays, which call no hook."""
        if self._is_ours(optimizer):
            self._found.add(optimizer)
        self.steps = 0
        if self._followed is not None and self._followed[0] is optimizer:
            raise LocalProtocolError(CAPTURED.format(kind=type(optimizer).__name__))

    def _count_unseen(self, optimizer: Optimizer, followed: str) -> None:
        self._unseen[optimizer] = self._unseen.get(optimizer, 0) + 1
        if self._unseen[optimizer] >= UNSEEN_STEPS:
            raise LocalProtocolError(
                f"follow_optimizer: {type(optimizer).__name__} has stepped {UNSEEN_STEPS} times with this model's "
                f"parameters, the {followed} that is followed not once, so no step was counted: give the one that "
                "steps, or call outer.step after each optimizer step"
            )

    def _is_ours(self, optimizer: Optimizer) -> bool:
        ours = {id(parameter) for part in self._parts for parameter in part.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])


def _clear_state(optimizer: Optimizer) -> None:
    known = type(optimizer).__module__.startswith("torch.optim.")  # others' state may hold masters, too
    if known and optimizer.param_groups[0].get("capturable"):  # in a CUDA graph all groups are
        for group in optimizer.param_groups:  # a graph with the step keeps using this memory
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    value.fill_(float(group["lr"]) if key in FIRST_RATES else FIRST_VALUES.get(key, 0.0))
        return
    if isinstance(optimizer, torch.optim.Adagrad):  # the only one in torch that makes its state before the first step
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["step"].zero_()
                optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])
        return
    optimizer.state = defaultdict(dict)


def _holds_nan(buffer: torch.Tensor) -> bool:
    """Return whether a buffer holds a NaN; infinities are allowed, since attention masks contain them."""
    return buffer.is_floating_point() and bool(buffer.isnan().any())


# ---- kept weights ---------------------------------------------------------------------------------------------------
# Detection of optimizers that keep their own copy of the weights and write the parameters from it, undoing pulls.
#
#     fp32 masters        of 16-bit parameters, in the optimizer's state or as the tensors that it steps: the next step
#                         writes back what a pull has replaced, at once
#     averaged weights    schedule-free's `z`, Lookahead's slow weights: a pull fades over the next steps, and what is
#                         pushed are not the weights that would be evaluated
#
# A sample of each kind of tensor in the state of torch's optimizers is compared before the first push and regularly
# later, since much of the state is made in some later step. Copies kept elsewhere are seen by what
# they undo (UndoWatch).


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
                    if name := _find_master(_spread(kept, MOST_PARAMETERS)):
                        return MASTERS.format(name=name, kind=kind, where=where), ""
            for key, kept in by_key.items():
                alike, averaged = (
                    _compare_weights(_spread(kept, MOST_PARAMETERS)),
                    not {key, *key.split("_")}.isdisjoint(AVERAGED),
                )
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
        if parameter not in own and parameter.requires_grad:
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
    of_one_scale = own / SCALE**2 < other < own * SCALE**2
    return both / sqrt(own * other) if of_one_scale and elements >= LEAST_ELEMENTS else 0.0


def _spread(kept: Any, most: int) -> Any:
    """Return at most so many items of a sequence, or elements of a flat tensor, spread over it."""
    return kept[:: max(1, len(kept) // most)][:most]


def _sample(tensor: Any) -> torch.Tensor:
    """Return some elements of a tensor's local part, on the host."""
    flat = _find_local(tensor).detach().reshape(-1)
    return _spread(flat, MOST_ELEMENTS).cpu()


def _find_local(tensor: Any) -> Any:
    return tensor.to_local() if is_dtensor(tensor) else tensor


# ---- undo watch -----------------------------------------------------------------------------------------------------
# Detection of an optimizer that writes back the values that a pull has replaced, from masters unknown here.
#
# At each install a sample of some parameters is kept, before and after. At the first call of `OuterLoop.step` after an
# optimizer's step it is compared: with `u` the mean inner step between the last two installs, training leads to after +
# u, and an optimizer with its own masters to before + u. A sample so near to the second that nothing of the pull is
# left was undone. A pull whose change is small compared with inner steps proves nothing.
#
# With `install: lazy` each parameter is sampled after its install. Samples stay on their device until they are
# compared, so that sampling waits for no copy.


LEFT_OVER = 0.05  # share of the pull's squared distance within which a sample counts as undone, not near by chance


@dataclass
class Sample:
    """Some elements of one parameter on this rank, in fp32."""

    name: str
    view: torch.Tensor
    after: torch.Tensor | None = None  # after the last install; None: it has not reached this parameter yet
    before: torch.Tensor | None = None  # before the last install
    step: torch.Tensor | None = None  # mean inner step between the last two installs; None: unknown


class UndoWatch:
    """The samples of one rank."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._compares = False  # a version was installed, and no optimizer step was compared since
        self._optimizer_steps = 0  # optimizer steps at the last install
        self._steps = 0  # inner steps since the last install

    def take_before(self, views: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Sample these tensors before a version is installed in them."""
        full = [(name, view) for name, view in views if view.numel()]
        chosen = _spread(full, MOST_PARAMETERS)
        same = [(s.name, s.view.data_ptr()) for s in self._samples] == [(name, v.data_ptr()) for name, v in chosen]
        former = [sample.after for sample in self._samples] if same and self._steps else [None] * len(chosen)
        self._samples = []
        for (name, view), after in zip(chosen, former, strict=True):
            before = _read_sample(view)
            step = (before - after) / self._steps if after is not None else None
            self._samples.append(Sample(name, view, None, before, step))

    def take_after(self, optimizer_steps: int, pending: Collection[str] = ()) -> None:
        """Sample after an install, except for the parameters in `pending`, which are passed to `on_installed` later."""
        self.on_installed({sample.name for sample in self._samples}.difference(pending))
        self._compares, self._optimizer_steps, self._steps = True, optimizer_steps, 0

    def on_installed(self, names: Collection[str]) -> None:
        """Sample these parameters directly after their install."""
        for sample in self._samples:
            if sample.name in names:
                sample.after = _read_sample(sample.view)

    def on_inner_step(self, optimizer_steps: int) -> None:
        """Raise ConfigError if the optimizer has stepped since the install and has undone it."""
        self._steps += 1
        if not self._compares or optimizer_steps == self._optimizer_steps:
            return
        self._compares = False
        moved = [sample for sample in self._samples if _was_moved(sample)]
        undone = [sample for sample in moved if _was_undone(sample)]
        if 2 * _sum_elements(undone) > _sum_elements(moved):
            raise ConfigError(
                f"{undone[0].name}: the first optimizer step after a pull wrote back the values from before it, in "
                f"{len(undone)} of {len(moved)} parameters looked at: it keeps fp32 masters of its own. Give it to "
                "the outer loop, OuterLoop(model, optimizer=optimizer), or a function that makes masters from the "
                "parameters, OuterLoop(model, optimizer=function)"
            )


@torch.no_grad()
def _read_sample(view: torch.Tensor) -> torch.Tensor:
    flat = view.reshape(-1) if view.is_contiguous() else view[0]
    return _spread(flat, MOST_ELEMENTS).to(torch.float32, copy=True)


def _sum_elements(samples: Sequence[Sample]) -> int:
    """Return the elements of the parameters, not the samples: masters may exist only for matrices, most of a model."""
    return sum(sample.view.numel() for sample in samples)


def _was_moved(sample: Sample) -> bool:
    """Return whether the install changed the sample."""
    return sample.before is not None and sample.after is not None and not sample.before.equal(sample.after)


def _was_undone(sample: Sample) -> bool:
    """Return whether the sample is where a step from its values before the install leads."""
    if sample.before is None or sample.after is None or sample.step is None:
        return False
    distance = float((sample.before - sample.after).square().sum())
    left = float((_read_sample(sample.view) - sample.before - sample.step).square().sum())
    return left < LEFT_OVER * distance
