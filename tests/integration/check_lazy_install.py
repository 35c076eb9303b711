"""`install: lazy` beside `install: whole` on the ranks of one torchrun: the same, bit for bit, in every layout.

torchrun --nproc-per-node N check_lazy_install.py OUT KIND... [--device cuda]     writes OUT.RANK as JSON

Two models of one seed go through the same pulls, forwards and steps of their optimizers; one is installed whole. Each
rank compares logits and its own shards. Nothing here talks to a slave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from typing import Any

import layouts
import numpy as np
import torch
import torch.distributed as dist
from check_layouts import SPREAD_ITEMS, at, on_this_rank, read_words
from layouts import BLOCKS, VOCABULARY, laid, local, seeded
from torch import nn

from dips.client.parallel import HostMemory, LazyMemory, lay_out
from dips.client.rank.agent_client import JobCollectives
from dips.errors import LocalProtocolError

FSDP = ("fsdp", "hsdp", "tp_fsdp")
TOKENS = torch.arange(22).reshape(2, 11) % VOCABULARY
Theta = dict[str, np.ndarray]


class Side:
    """One of the two models, with its optimizer and its host memory."""

    def __init__(
        self, kind: str, collectives: JobCollectives, memory: type[HostMemory], evaluated: bool = False
    ) -> None:
        self.model, _ = laid(kind, seeded(), collectives.world_size)
        if evaluated:  # before it is looked at
            with torch.no_grad():
                self.model(TOKENS.to(layouts.device))
        self.layout = lay_out(self.model, collectives, spread_items=SPREAD_ITEMS)
        self.memory = memory(self.layout.adapter, self.layout.held, self.layout.plan, collectives)
        self.inner = self.model.module if kind == "ddp" else self.model
        one_mesh = kind not in ("tp", "tp_fsdp")  # one call for all spares dispatches of DTensor, as does SGD
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=one_mesh)

    def begin_transfer(self) -> None:
        """As every transfer begins: ranks of one host may still install from memory that they share."""
        self.memory.finish_install()
        dist.barrier()

    def land(self, theta: Theta, *, merge: bool = False) -> None:
        """A version lies whole in host memory, on all ranks."""
        self.begin_transfer()
        for piece in self.memory.pieces:
            piece.array[:] = at(self.layout, piece, theta)
        assert self.memory.find_replaced_parameter() == ""
        self.memory.scatter_pieces()
        self.memory.merge_shard() if merge else self.memory.install_shard()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        logits = self.model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        self.optimizer.step()
        return logits.detach()

    def shards(self) -> list[torch.Tensor]:
        return [local(p).clone() for p in self.inner.parameters()]

    def saved(self) -> list[torch.Tensor]:
        return [local(t).clone() for t in self.inner.state_dict().values()]


def alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)


@cache
def start() -> Theta:
    """What the seed gives."""
    return {name: p.detach().numpy() for name, p in seeded().named_parameters()}


@cache
def version(number: int) -> Theta:
    """Another θ for each number, near the one that the seed gives."""
    rng = np.random.default_rng(number)
    return {name: p + 0.05 * rng.standard_normal(p.shape, np.float32) for name, p in start().items()}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules())


@contextmanager
def hooks_at_the_end() -> Any:
    """As if the hook were registered without prepend: behind that of fully_shard."""
    register = nn.Module.register_forward_pre_hook
    nn.Module.register_forward_pre_hook = lambda self, hook, **_: register(self, hook)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_forward_pre_hook = register  # type: ignore[method-assign]


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except LocalProtocolError as error:
        return str(error)
    return ""


def check(kind: str, collectives: JobCollectives) -> dict[str, Any]:
    """Take both through every way to come from a landed version to the next reader of a parameter."""
    tokens = TOKENS.to(layouts.device)
    whole, lazy = Side(kind, collectives, HostMemory), Side(kind, collectives, LazyMemory)
    both = (whole, lazy)
    is_so: dict[str, bool] = {}
    on_host = layouts.device.type == "cpu"  # a device begins to copy at once, and a layer waits for its own copies

    def same(what: str, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        is_so[what] = alike(ours, theirs)

    for number in (1, 2):  # the first forward of FSDP is special
        old = lazy.shards()
        for side in both:
            side.land(version(number))
        if on_host:
            same(f"{number}: nothing is written before a forward", lazy.shards(), old)
        is_so[f"{number}: and the version is another"] = not alike(whole.shards(), old)
        same(f"{number}: logits", *([side.step(tokens)] for side in both))
        same(f"{number}: a step later", *(side.shards() for side in both))
        is_so[f"{number}: no hook is left"] = hooks(lazy.inner) == hooks(whole.inner)
    for side in both:
        side.land(version(3))
    same("state_dict", *(side.saved() for side in both))
    same("all of it is in the model then", *(side.shards() for side in both))
    for side in both:
        side.land(version(4))
        with torch.no_grad():
            side.model(tokens)
    same("after an evaluation", *(side.shards() for side in both))
    for side in both:  # FSDP keeps what its root gathered for an evaluation
        side.land(version(5))
    fresh = Side(kind, collectives, HostMemory, evaluated=True)
    is_so["an evaluated model is laid out as any other"] = fresh.memory.allocated_numel == whole.memory.allocated_numel
    fresh.land(version(5))
    logits = [side.step(tokens) for side in (fresh, *both)]
    same("what an evaluation gathered is not computed with: whole", logits[:1], logits[1:2])
    same("what an evaluation gathered is not computed with", logits[:1], logits[2:])

    for side in both:  # overlap: full
        side.begin_transfer()
        side.memory.gather_pieces()
        side.memory.keep_pushed_shard()
        side.step(tokens)
    same("trained beside a push", *(side.shards() for side in both))
    old = lazy.shards()
    for side in both:
        side.land(version(5), merge=True)
    if on_host:
        same("a merge waits for the forward too", lazy.shards(), old)
    same("merged: logits", *([side.step(tokens)] for side in both))
    same("merged: a step later", *(side.shards() for side in both))
    for side in both:
        side.land(version(6))
        side.begin_transfer()
        side.memory.gather_pieces()  # frozen before any forward came by
    is_so["pushed before a forward"] = all(
        np.array_equal(a.array, b.array) for a, b in zip(whole.memory.pieces, lazy.memory.pieces, strict=True)
    )

    if kind != "ddp":  # which wants to be told of parameters that get no gradient
        for side in both:
            side.inner.used = BLOCKS - 1
            side.land(version(7))
        same("a block is not used: logits", *([side.step(tokens)] for side in both))
        same("a block is not used: a step later", *(side.shards() for side in both))
        for side in both:
            side.inner.used = BLOCKS
            side.optimizer.zero_grad()
            side.land(version(8))
        x = torch.linspace(-1, 1, 2 * 11 * 24).reshape(2, 11, 24).to(layouts.device)
        with torch.no_grad():
            same("one block by itself", *([side.inner.layers[1](x)] for side in both))
        last = [local(p) for p in lazy.inner.layers[2].parameters()]
        if on_host:
            is_so["and no other"] = not alike(last, [local(p) for p in whole.inner.layers[2].parameters()])
        for side in both:
            side.memory.finish_install()
        same("finished", *(side.shards() for side in both))

    for side in both:
        side.land(version(9))
    is_so["a step without a forward is refused"] = "no module of the model was called" in refused(lazy.optimizer.step)
    reference = copy.deepcopy(lazy.inner) if kind == "plain" else None
    is_so["a copy of the model is a model"] = reference is None or bool(reference(tokens).isfinite().all())
    lazy.memory.finish_install()
    same("at the end", *(side.shards() for side in both))

    if kind in FSDP:
        with hooks_at_the_end():
            lazy.land(version(10))
            is_so["behind fully_shard's hook it is refused"] = "gathered by FSDP" in refused(lambda: lazy.model(tokens))
    return is_so


if __name__ == "__main__":
    out, kinds, device = read_words()
    on_this_rank(check, {kind: kind for kind in kinds}, out, device)
