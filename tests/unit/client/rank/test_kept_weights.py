"""Optimizers that keep weights beside the parameters are named before the first push; no other is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from dips.client.parallel import lay_out
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.optimizers import EVERY, InnerOptimizers, KeptWeights
from dips.errors import ConfigError

Parameters = Iterable[nn.Parameter]


class StatefulSgd(torch.optim.Optimizer):
    """SGD that steps from what `begin` puts into its state under `key`, or only keeps it there."""

    key, written, late = "master", True, 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-3)
            if self.steps > self.late:
                kept = self.state[p].setdefault(self.key, p.detach().float().clone()).sub_(p.grad, alpha=1e-3)
                if self.written:
                    p.copy_(kept)


class ScheduleFreeSgd(torch.optim.Optimizer):
    """Defazio et al. 2024, as the package schedulefree writes it: the parameter is y, z in the state, x implied."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            z = self.state[p].setdefault("z", p.detach().clone())
            p.lerp_(z, weight=1 / self.steps).add_(p.grad, alpha=-1e-2 * 0.1)
            z.sub_(p.grad, alpha=1e-2)


class Lookahead(torch.optim.Optimizer):
    """Zhang et al. 2019: every fifth step the parameter is set to slow weights that have come half of the way."""

    def __init__(self, params: Any) -> None:
        held = list(params)
        super().__init__(held, {})
        self.inner, self.steps = torch.optim.SGD(held, 1e-2), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow_buffer", p.detach().clone())
            if self.steps % 5 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class PartlyCopiedAdam:
    """A loop by hand: one optimizer of copies in fp32 where the parameter is coarse, and of the parameter elsewhere."""

    def __init__(self, params: Parameters) -> None:
        self.pairs = [(p, p if p.dtype is torch.float32 else nn.Parameter(p.detach().float())) for p in params]
        self.optimizer = torch.optim.AdamW([copy for _, copy in self.pairs], 1e-4)

    @torch.no_grad()
    def step(self) -> None:
        for p, copy in self.pairs:
            copy.grad = p.grad.float()
        self.optimizer.step()
        for p, copy in self.pairs:
            p.copy_(copy)


def keeps(key: str, written: bool = True, late: int = 0) -> Callable[[Parameters], StatefulSgd]:
    return type("KeepingSgd", (StatefulSgd,), {"key": key, "written": written, "late": late})


class TrainedLayers:
    """A model of matrices and norms, of which the first may be coarse, and an optimizer."""

    def __init__(self, make: Callable[[Parameters], Any], coarse: bool = False, given: Any = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(5)])
        for name, p in self.model.named_parameters():
            if coarse and p.ndim == 2:
                p.data = p.data.bfloat16()
            assert name
        self.optimizer, self.told = make(self.model.parameters()), []
        give = {None: None, "optimizer": self.optimizer, "function": lambda: None}[given]
        collectives = JobCollectives()
        self.optimizers = InnerOptimizers([self.model], give)
        adapter = lay_out(self.model, collectives, give).adapter
        self.kept = KeptWeights([self.model], adapter, self.optimizers, collectives, self.told.append)

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            for p in self.model.parameters():
                p.grad = torch.randn(p.shape).to(p.dtype)
            self.optimizer.step()

    def look(self, times: int = 1) -> str:
        """The error of the last look, or what was warned of."""
        try:
            for _ in range(times):
                self.kept.check_optimizers()
        except ConfigError as error:
            return f"ConfigError: {error}"
        finally:
            self.optimizers.close()
        return "; ".join(self.told)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (keeps("master"), "state 'master'"),
        (keeps("whatever"), "state 'whatever'"),
        (PartlyCopiedAdam, "the copy that it steps"),
    ],
)
def test_masters_of_a_part_of_the_model_are_named(make: Any, where: str) -> None:
    """Of the matrices alone, which are a third of the parameters: before anything was pulled over."""
    trained = TrainedLayers(make, coarse=True)
    trained.train()
    told = trained.look()
    assert told.startswith("ConfigError: 0.1.weight: ") and f"keeps an fp32 master of it ({where})" in told
    assert "OuterLoop(model, optimizer=optimizer)" in told


@pytest.mark.parametrize(
    ("make", "given"),
    [(keeps("master_param"), "optimizer"), (keeps("whatever"), "function"), (PartlyCopiedAdam, "function")],
)
def test_masters_that_the_loop_knows_are_none_of_them(make: Any, given: str) -> None:
    """What it writes itself, or has the script's function make."""
    trained = TrainedLayers(make, coarse=True, given=given)
    trained.train()
    assert not trained.look().startswith("ConfigError")


def test_copies_that_the_adapter_knows_are_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's optimizer steps its own masters, which its adapter reads from the parameters."""
    trained = TrainedLayers(PartlyCopiedAdam, coarse=True)
    masters = [("", copy, copy.detach()) for _, copy in trained.optimizer.pairs]
    monkeypatch.setattr(trained.kept._adapter, "local_masters", lambda: iter(masters))
    trained.train()
    assert trained.look() == ""


@pytest.mark.parametrize(
    ("make", "where"),
    [(ScheduleFreeSgd, "'z'"), (Lookahead, "'slow_buffer'"), (keeps("lookahead_slow_buff"), "'lookahead_slow_buff'")],
)
@pytest.mark.parametrize("steps", [3, 60])
def test_weights_that_are_averaged_are_named(make: Any, where: str, steps: int) -> None:
    """Also after many steps, when the parameters are far from them."""
    trained = TrainedLayers(make)
    trained.train(steps)
    told = trained.look()
    assert told.startswith("ConfigError: 0.0.weight: ") and f"makes it from weights of its own (state {where})" in told


def test_weights_of_an_unknown_name_are_warned_of_once() -> None:
    """They may be there for another reason, as an average that nobody steps from is."""
    trained = TrainedLayers(keeps("ema", written=False))
    trained.train()
    (told,) = trained.look(times=2).split("; ")
    assert told.startswith("0.0.weight: KeepingSgd keeps values like its own in its state ('ema')")


def test_what_is_made_later_is_found_later() -> None:
    """Lookahead keeps its first slow weights at its first fifth step: each sixteenth look sees them."""
    trained = TrainedLayers(keeps("slow", late=3))
    trained.train(3)
    assert trained.look(times=2) == ""
    trained.train(3)
    assert trained.look(times=EVERY - 2) == ""
    assert trained.look().startswith("ConfigError")


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, 1e-3, amsgrad=True),
        lambda params: torch.optim.SGD(params, 1e-3, momentum=0.9),
        lambda params: torch.optim.Adagrad(params, 1e-3),
        lambda params: torch.optim.RMSprop(params, 1e-3, momentum=0.9, centered=True),
        lambda params: torch.optim.Rprop(params, 1e-3),
        lambda params: torch.optim.Adadelta(params, 1e-3),
        lambda params: torch.optim.ASGD(params, 1e-3),
        lambda params: torch.optim.NAdam(params, 1e-3),
    ],
)
def test_moments_are_no_weights(make: Any, coarse: bool) -> None:
    """Of none of torch's optimizers anything is said, whatever the types."""
    trained = TrainedLayers(make, coarse=coarse)
    trained.train()
    assert trained.look() == ""


@pytest.mark.parametrize("frozen", [False, True])
def test_a_twin_in_fp32_is_no_copy(frozen: bool) -> None:
    """A teacher that begins as the model does and is trained with it, or instead of it: no step writes it back."""
    twin = TrainedLayers(lambda params: torch.optim.SGD(params, 0.0)).model

    def make(params: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD([*([] if frozen else params), *twin.parameters()], 0.0)

    trained = TrainedLayers(make, coarse=True)
    for p in trained.model.parameters():
        p.requires_grad_(not frozen or p.ndim == 1)
    for p in (*trained.model.parameters(), *twin.parameters()):
        p.grad = torch.zeros_like(p)
    trained.optimizer.step()
    assert trained.look() == ""


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_what_has_another_scale_is_no_weight(factor: float) -> None:
    """A mean of gradients may point where the weights do."""
    trained = TrainedLayers(lambda params: torch.optim.SGD(params, 0.0))
    trained.train(1)
    for p in trained.model.parameters():
        trained.optimizer.state[p]["mean"] = factor * p.detach()
    assert trained.look() == ""


@pytest.mark.parametrize(("elements", "told"), [(31, False), (32, True)])
def test_few_numbers_are_no_evidence(elements: int, told: bool) -> None:
    """They agree by chance."""
    model, heard = nn.Module(), list[str]()
    model.weight = nn.Parameter(torch.randn(elements))
    optimizers, optimizer = InnerOptimizers([model]), torch.optim.SGD(model.parameters(), 0.0)
    model.weight.grad = torch.zeros(elements)
    optimizer.step()
    optimizer.state[model.weight]["ema"] = model.weight.detach().clone()
    adapter = lay_out(model, JobCollectives()).adapter
    KeptWeights([model], adapter, optimizers, JobCollectives(), heard.append).check_optimizers()
    optimizers.close()
    assert bool(heard) is told


class Quantized(torch.Tensor):
    """As torchao's states of 8 bits: few operations are defined, and none that samples it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.reshape, torch.Tensor.detach, torch.Tensor.__getitem__):
            raise NotImplementedError(f"{func} of a quantized tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_moments_that_are_quantized_are_left_alone() -> None:
    """Some hold what cannot be read like a tensor: they end no job."""
    trained = TrainedLayers(lambda params: torch.optim.SGD(params, 1e-3))
    trained.train(1)
    for p in trained.model.parameters():
        trained.optimizer.state[p]["exp_avg"] = torch.zeros_like(p.detach()).as_subclass(Quantized)
    assert trained.look() == ""


@pytest.mark.parametrize(("values", "told"), [(1, False), (3, False), (4, True)])
def test_ones_beside_ones_are_no_master(values: int, told: bool) -> None:
    """A norm's weights in bf16, and a scale in fp32 that nobody has changed yet: few numbers equal many tensors."""
    trained = TrainedLayers(lambda params: torch.optim.SGD(params, 0.0))
    norm, held = trained.model[0][0], torch.arange(12.0) % values
    norm.weight.data = held.bfloat16()
    trained.train(1)
    trained.optimizer.state[norm.weight]["scale"] = held
    assert trained.look().startswith("ConfigError: 0.0.weight: SGD keeps an fp32 master of it") is told


def test_a_counter_beside_a_scalar_is_no_weight() -> None:
    """`step` of a parameter of no dimensions has its shape, and the cosine of two numbers is 1."""
    trained = TrainedLayers(lambda params: torch.optim.AdamW(params, 1e-3))
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.5))
    optimizers = InnerOptimizers([model])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        model.scale.grad = torch.tensor(1.0)
        optimizer.step()
    assert optimizer.state[model.scale]["step"].shape == ()
    adapter = lay_out(model, JobCollectives()).adapter
    told: list[str] = []
    KeptWeights([model], adapter, optimizers, JobCollectives(), told.append).check_optimizers()
    optimizers.close()
    trained.optimizers.close()
    assert not told
