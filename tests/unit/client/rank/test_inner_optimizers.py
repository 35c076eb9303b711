"""Which optimizers train the model, and what dropping their state leaves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dips.client.rank import optimizers
from dips.client.rank.optimizers import UNSEEN_STEPS, InnerOptimizers
from dips.errors import ConfigError, LocalProtocolError


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, 0.9),
        lambda p: torch.optim.Adagrad(p, 1.0),
    ],
)
def test_a_dropped_state_is_that_of_a_new_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """After moments that are not finite: the next step is bit for bit a new optimizer's first."""
    model = nn.Linear(3, 2)
    watched, optimizer = InnerOptimizers([model]), make(model.parameters())
    step(model, optimizer)
    assert watched.steps == 1
    for state in optimizer.state.values():
        for value in state.values():
            value.fill_(float("nan"))
    assert watched.drop_state() == "" and all(p.grad is None for p in model.parameters())
    watched.close()
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    step(model, optimizer)
    step(twin, make(twin.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
        lambda p: torch.optim.NAdam(p, 0.1),
        lambda p: torch.optim.RAdam(p, 0.1),
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
        lambda p: torch.optim.Rprop(p, 0.1),
        lambda p: torch.optim.Adadelta(p, 0.1),
        lambda p: torch.optim.Adamax(p, 0.1),
        lambda p: torch.optim.ASGD(p, 0.1),
    ],
)
def test_a_state_that_a_cuda_graph_writes_is_cleared_in_its_place(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    """`capturable`: the graph goes on with the memory that it captured, gradients too; and a step is a first one."""
    model = nn.Linear(3, 2)
    watched, optimizer = InnerOptimizers([model]), make(model.parameters())
    for _ in range(3):
        step(model, optimizer)
    optimizer.param_groups[0]["capturable"] = True
    held = [value for state in optimizer.state.values() for value in state.values()]
    grads = [p.grad for p in model.parameters()]
    for value in (*held, *grads):
        value.fill_(float("nan"))
    assert watched.drop_state() == ""
    now = [value for state in optimizer.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(now, held, strict=True))
    assert all(p.grad is grad and not grad.any() for p, grad in zip(model.parameters(), grads, strict=True))
    watched.close()
    optimizer.param_groups[0]["capturable"] = False
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    step(model, optimizer)
    step(twin, make(twin.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_step_that_is_captured_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay calls no hook: steps are not known from then on, and who follows them is told what to call."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    watched = InnerOptimizers([model])
    for _ in range(3):  # as torch has one warm up
        step(model, optimizer)
    assert watched.steps == 3
    monkeypatch.setattr(optimizers, "is_captured", lambda tensors: True)
    step(model, optimizer)
    assert watched.steps == 0
    other = torch.optim.AdamW(model.parameters(), 0.1)
    step(model, other)
    assert watched.drop_state() == "" and not other.state, "its moments would make the next replay diverge as well"
    watched.follow_steps(optimizer, lambda: None)
    with pytest.raises(LocalProtocolError, match=r"AdamW is captured in a CUDA graph.*call outer\.step after each"):
        step(model, optimizer)
    watched.close()


def test_what_a_reset_does_not_mend_is_named() -> None:
    """Only an optimizer of others was seen, or of copies; or a buffer holds NaN. A mask of infinities is no reason."""
    model, other = nn.BatchNorm1d(3), nn.Linear(3, 3)
    watched = InnerOptimizers([model])
    assert watched.drop_state() == "", "nothing has stepped, nothing is to be dropped"
    anothers = torch.optim.SGD(other.parameters(), 0.1)
    step(other, anothers)
    assert "OuterLoop(model, optimizer=optimizer)" in watched.drop_state() and watched.steps == 1
    watched.close()
    watched, both = InnerOptimizers([model]), torch.optim.SGD([*other.parameters(), *model.parameters()], 0.1)
    step(other, both)
    assert watched.drop_state() == "", "it trains others' parameters, too"
    watched.close()
    wrapped = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), 0.1))
    watched = InnerOptimizers([model], wrapped)
    model.register_buffer("mask", torch.tensor([float("-inf")]))
    assert watched.drop_state() == ""
    model.running_mean[0] = float("nan")
    assert watched.drop_state().startswith("running_mean, a buffer")
    watched.close()


def test_one_optimizer_is_followed() -> None:
    """Itself or wrapped, after its step is counted; a second one, or none, is refused with what to do."""
    model, seen = nn.Linear(3, 2), list[int]()
    first, second = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    watched = InnerOptimizers([model])
    watched.follow_steps(SimpleNamespace(optimizer=first), lambda: seen.append(watched.steps))
    for optimizer in (first, second, first):
        step(model, optimizer)
    assert seen == [1, 2] and watched.follows
    with pytest.raises(ConfigError, match="name the one that steps last"):
        watched.follow_steps(second, lambda: None)
    circle = SimpleNamespace()
    circle.optimizer = circle
    for wrong in (SimpleNamespace(), circle, SimpleNamespace(chained_optimizers=[first, second])):
        with pytest.raises(ConfigError, match="expected one torch optimizer"):
            watched.follow_steps(wrong, lambda: None)
    watched.close()
    step(model, first)
    assert seen == [1, 2]


class Accelerated(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: an Optimizer by inheritance, which forwards `step` to the one it wraps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_the_steps_are_those_of_the_optimizer_that_has_taken_most() -> None:
    """Parameters may be divided among several, and one may be made late."""
    model, seen = nn.Linear(3, 2), list[int]()
    watched, optimizers = InnerOptimizers([model]), [torch.optim.SGD(model.parameters(), 0.1) for _ in range(3)]
    for optimizer, times in zip(optimizers, (3, 1, 1), strict=True):
        for _ in range(times):
            step(model, optimizer)
            seen.append(watched.steps)
    watched.close()
    step(model, optimizers[0])
    seen.append(watched.steps)
    assert seen == [1, 2, 3, 3, 3, 3]


def test_a_wrapper_that_is_an_optimizer_itself_is_followed() -> None:
    """accelerator.prepare(optimizer): torch's hooks are called with what it wraps."""
    model, seen = nn.Linear(3, 2), list[int]()
    prepared = Accelerated(torch.optim.SGD(model.parameters(), 0.1))
    watched = InnerOptimizers([model])
    watched.follow_steps(prepared, lambda: seen.append(watched.steps))
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        prepared.step()
    watched.close()
    assert seen == [1, 2, 3]


def test_following_an_optimizer_that_never_steps_ends() -> None:
    """Another trains the model meanwhile, so the cluster would train alone; one of other parameters is no sign."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    idle, busy, others = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, model, other))
    watched = InnerOptimizers([model])
    watched.follow_steps(idle, lambda: None)
    for _ in range(UNSEEN_STEPS + 1):
        step(other, others)
    for _ in range(UNSEEN_STEPS - 1):
        step(model, busy)
    with pytest.raises(LocalProtocolError, match=r"SGD has stepped 16 times.*not once"):
        step(model, busy)
    watched.close()
    watched = InnerOptimizers([model])
    watched.follow_steps(idle, lambda: None)
    step(model, idle)
    for _ in range(UNSEEN_STEPS + 1):
        step(model, busy)
    watched.close()


def test_a_reset_reaches_the_optimizers_of_copies_on_the_host() -> None:
    """torchao's CPUOffloadOptimizer has one for each: moments of NaN stayed, and each step diverged again."""
    model = nn.Linear(2, 2)
    copy = nn.Parameter(model.weight.detach().clone())
    copy.grad = torch.full_like(copy, float("nan"))
    offloading: Any = torch.optim.SGD([model.weight], 0.1)
    offloading.optim_dict = {model.weight: torch.optim.Adam([copy])}
    optimizers = InnerOptimizers([model], offloading)
    offloading.optim_dict[model.weight].step()
    assert optimizers.drop_state() == "" and not offloading.optim_dict[model.weight].state
    optimizers.close()
