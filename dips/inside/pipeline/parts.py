"""The layers of a model, and the parts of it that one rank holds.

A model is given as a function that returns its layers in order: an `nn.Sequential` or `nn.ModuleList`, or an iterable
of modules or of pairs of name and module. A generator makes one layer at a time, so that no rank ever holds the whole
model. All ranks build it under one seed; each keeps its own layers, and of the others shapes only.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dips.errors import ConfigError

Build = Callable[[], Iterable[Any]]
SHARD = "shard"


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _HandOver(torch.autograd.Function):
    """The identity, whose result has memory of its own to give away: that it shares is no view to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class PipelinePart(nn.Module):
    """Consecutive layers of a model, called one after the other, under their names in the model."""

    def __init__(self, layers: Mapping[str, nn.Module], numbers: Sequence[int], seed: int) -> None:
        """Make a part of these layers, whose `numbers` in the model seed their dropout."""
        super().__init__()
        for name, layer in layers.items():
            _register_layer(self, name, layer)
        self._called = tuple(layers.values())  # a tuple: not registered once more
        self._numbers, self._seed = tuple(numbers), seed
        self._now = (0, 0)
        self.taken: list[torch.Tensor] = []
        """What each layer took in the last forward, but for what the part has given; who reads it clears it."""
        self.targets: torch.Tensor | None = None
        """Of the micro-batch that is computed, where the last layer gives the loss of its output instead."""
        self.tied_names: Mapping[str, str] = {}
        """Names in the model of this part's parameters that an earlier layer has, too; `OuterLoop` reads them."""

    @contextmanager
    def seeded(self, step: int, microbatch: int) -> Iterator[None]:
        """Draw random numbers of this micro-batch by step, layer and micro-batch, whichever rank computes it."""
        self._now = step, microbatch
        places = {p.device for p in self.parameters()} - {torch.device("cpu")}
        with torch.random.fork_rng(devices=places):
            yield

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken: list[torch.Tensor] = []
        for number, layer in zip(self._numbers, self._called, strict=True):
            if self.training:
                _seed_generators(_mix_seed(self._seed, *self._now, number), x.device)
            taken.append(x)
            x = layer(x)
        self.taken = [one for one in taken if one.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()]
        return _HandOver.apply(x)


class LayerShapes:
    """All layers of the model without memory, to find the shapes of what goes over borders."""

    def __init__(self, named: Mapping[str, nn.Module], ties: Mapping[str, str], apart: Collection[str]) -> None:
        self._named = dict(named)
        self.names = list(named)
        self.ties = dict(ties)
        """Trainable parameters that an earlier layer has, too: by their name, that of the earlier one."""
        self.apart = frozenset(apart)
        """Frozen parameters that several layers have: each holds its own copy."""

    def trace(self, inputs: torch.Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        """Return shape and dtype of each layer's output for inputs of a micro-batch.

        Raises ConfigError for a layer whose output is no single tensor of floats, or that needs values to compute.
        """
        found, x = [], inputs.to("meta")
        for number, (name, layer) in enumerate(self._named.items()):
            try:
                with torch.no_grad():
                    x = layer(x)
            except Exception as error:
                raise ConfigError(
                    f"layer {name}: its output's shape cannot be found on torch's meta device: {error!r}"
                ) from error
            last = number == len(self._named) - 1
            if not isinstance(x, torch.Tensor) or not (last or x.is_floating_point()):
                raise ConfigError(f"layer {name}: expected one tensor of floats as its output, got {type(x).__name__}")
            found.append((x.shape, x.dtype))
        return found


def build_layers(build: Build, seed: int, wanted: Sequence[range]) -> tuple[list[dict[str, nn.Module]], LayerShapes]:
    """Build the model layer by layer under a seed; return the wanted ranges of its layers, by name, and all shapes.

    A layer that shares parameters with an earlier one gets copies of its own (tied.py).

    Raises ConfigError for what is no sequence of layers, and for layers that a pipeline cannot run.
    """
    kept: list[dict[str, nn.Module]] = [{} for _ in wanted]
    shapes: dict[str, nn.Module] = {}
    ties: dict[str, str] = {}
    apart: set[str] = set()
    owners: dict[int, tuple[weakref.ref[Any], str]] = {}  # of parameters and layers seen so far
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for number, (name, layer) in enumerate(_list_layers(build())):
            if name in shapes:
                raise ConfigError(f"build: expected layers of different names, got {name} twice")
            shared = _check_layer(name, layer, owners)
            ties |= {path: first for path, (first, trained) in shared.items() if trained}
            apart |= {each for path, (first, trained) in shared.items() if not trained for each in (path, first)}
            # Parameters and buffers are not copied: the memo has their counterparts already.
            tensors = [*layer.parameters(), *layer.buffers()]
            memo: dict[int, Any] = {id(t): _as_meta(t) for t in tensors}
            shapes[name] = copy.deepcopy(layer, memo)
            for layers, numbers in zip(kept, wanted, strict=True):
                if number in numbers:
                    layers[name] = copy.deepcopy(layer) if shared else layer
    return kept, LayerShapes(shapes, ties, apart)


def _list_layers(made: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(made, nn.Sequential | nn.ModuleList):
        yield from made._modules.items()
        return
    if isinstance(made, nn.Module) or not isinstance(made, Iterable):
        raise ConfigError(
            f"build: expected the model's layers in order, as nn.Sequential or a generator, got {type(made).__name__}"
        )
    for number, one in enumerate(made):
        name, layer = one if isinstance(one, tuple) and len(one) == 2 else (str(number), one)
        if not isinstance(layer, nn.Module):
            raise ConfigError(f"build: expected layer {name} to be a torch.nn.Module, got {type(layer).__name__}")
        yield str(name), layer


def _check_layer(
    name: str, layer: nn.Module, owners: dict[int, tuple[weakref.ref[Any], str]]
) -> dict[str, tuple[str, bool]]:
    """Return its parameters that an earlier layer has: by their names, the earlier name and whether it is trained."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"layer {'.'.join(filter(None, (name, path)))}: {type(module).__name__} has statistics of the batch, "
                "which a pipeline never has in one place: use LayerNorm, GroupNorm or RMSNorm"
            )
    shared: dict[str, tuple[str, bool]] = {}
    for path, held in (("", layer), *layer.named_parameters()):
        known = owners.get(id(held))
        if known is None or known[0]() is not held:
            owners[id(held)] = weakref.ref(held), ".".join(filter(None, (name, path)))
        elif isinstance(held, nn.Parameter):
            shared[f"{name}.{path}"] = known[1], held.requires_grad
        else:
            raise ConfigError(
                f"layers {known[1]} and {name} are one module: make one for each, which may share parameters"
            )
    return shared


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().to("meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def make_part(
    layers: Mapping[str, nn.Module],
    first: int,
    seed: int,
    recompute: bool,
    device: torch.device,
    group: dist.ProcessGroup | None,
    loss: Loss | None = None,
) -> PipelinePart:
    """Make a part on this rank's device, from layer number `first` on.

    recompute  each layer's activations are dropped after its forward, and computed again in its backward
    group      ranks of the stage, over which parameters are sharded; None: one rank holds them whole
    loss       of the model's output and `targets`, computed again with the last layer; None: the output is given
    """
    part = PipelinePart(layers, range(first, first + len(layers)), seed).to(device)
    for layer in layers.values() if recompute else ():  # not around the call: FSDP's own hooks run once
        forward = layer.forward
        layer.forward = partial(checkpoint, forward, use_reentrant=False)
    if recompute and loss is not None:
        layer.forward = partial(_give_loss, part, forward, loss)
    if group is None:
        return part
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(SHARD,))
    for module in (*(layer for layer in layers.values() if _has_parameters(layer)), part):
        made: Any = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        made.set_gradient_divide_factor(1.0)  # a step's loss is a sum: gradients are added, not averaged
        made.set_force_sum_reduction_for_comms(True)
    return part


def _give_loss(part: PipelinePart, forward: Callable[..., torch.Tensor], loss: Loss, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of the last layer's output; neither that nor what its loss needs of it is kept."""

    def compute(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(forward(x), targets)

    return checkpoint(compute, x, part.targets, use_reentrant=False)


def _has_parameters(layer: nn.Module) -> bool:
    return next(layer.parameters(), None) is not None


def _register_layer(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Register a layer under a dotted name."""
    *path, last = name.split(".")
    for each in path:
        if each not in root._modules:
            root.add_module(each, nn.Module())
        root = getattr(root, each)
    root.add_module(last, layer)


def _seed_generators(seed: int, device: torch.device) -> None:
    """As torch.manual_seed for one kind of device: for every other kind, that takes half a millisecond."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(seed)


def _mix_seed(*numbers: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()) >> 1
