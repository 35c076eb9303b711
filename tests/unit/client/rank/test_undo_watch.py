"""An optimizer that writes back what a pull replaced is noticed at its next step; training is not mistaken for it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from dips.client.rank.optimizers import UndoWatch
from dips.errors import ConfigError

H = 5
STEP = -0.01


class Trained:
    """A parameter under a watch, whose first install was at zero; each of H inner steps then moved it by STEP."""

    def __init__(self, dtype: torch.dtype = torch.float32, numel: int = 300) -> None:
        self.watch, self.parameter = UndoWatch(), torch.zeros(numel // 3, 3, dtype=dtype)
        self.optimizer_steps = 0
        self.install(self.parameter.clone())
        for _ in range(H):
            self.step(self.parameter + STEP)

    def install(self, pulled: torch.Tensor) -> None:
        self.watch.take_before([("w", self.parameter)])
        self.parameter.copy_(pulled)
        self.watch.take_after(self.optimizer_steps)

    def step(self, value: torch.Tensor, seen: int = 1) -> None:
        self.parameter.copy_(value)
        self.optimizer_steps += seen
        self.watch.on_inner_step(self.optimizer_steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moved", [0.004, 0.05, -0.2])
def test_old_values_after_the_next_step_end_the_job(dtype: torch.dtype, moved: float) -> None:
    """The step began from masters of its own, also where the pull moved less than a step: told what to write."""
    trained = Trained(dtype)
    old = trained.parameter.clone()
    trained.install(old + moved)
    with pytest.raises(ConfigError, match=r"w: the first optimizer step.*OuterLoop\(model, optimizer=optimizer\)"):
        trained.step(old + STEP)


@pytest.mark.parametrize("moved", [0.0, 1e-6, -STEP, STEP, H * STEP, 0.7 * H * STEP, -H * STEP, 0.3])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_training_is_no_undoing(moved: float, noise: float) -> None:
    """A step from what was pulled, wherever that lies, and however much steps differ from each other."""
    trained = Trained()
    trained.install(trained.parameter + moved)
    drawn = torch.randn(trained.parameter.shape, generator=torch.Generator().manual_seed(0))
    trained.step(trained.parameter + STEP * (1 + noise * drawn))


def test_only_the_first_step_is_looked_at() -> None:
    """Later ones may well lead through the values from before the pull."""
    trained = Trained()
    trained.install(trained.parameter - 4 * STEP)
    for _ in range(2 * H):
        trained.step(trained.parameter + STEP)


def train_and_install(
    watch: UndoWatch, weights: dict[str, torch.Tensor], trained: list[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], int]:
    """Of `weights` those that are trained move by H steps and a pull; return what it replaced, and the steps."""
    steps = 0

    def install(moved: float) -> dict[str, torch.Tensor]:
        watch.take_before(list(weights.items()))
        before = {name: w.clone() for name, w in weights.items()}
        for w in trained:
            w += moved
        watch.take_after(steps)
        return before

    install(0.0)
    for _ in range(H):
        steps += 1
        for w in trained:
            w += STEP
        watch.on_inner_step(steps)
    return install(0.5), steps


@pytest.mark.parametrize("undone", [2, 3])
def test_most_of_what_was_moved_must_be_undone(undone: int) -> None:
    """Of five parameters two may be where they were by chance; a sixth, which no pull moves, is no evidence."""
    watch, weights = UndoWatch(), {f"w{i}": torch.zeros(8) for i in range(6)}
    before, steps = train_and_install(watch, weights, list(weights.values())[:5])
    for name in list(weights)[:undone]:
        weights[name].copy_(before[name] + STEP)
    with pytest.raises(ConfigError, match="in 3 of 5 parameters") if undone == 3 else nullcontext():
        watch.on_inner_step(steps + 1)


@pytest.mark.parametrize(("undone", "found"), [("matrices", True), ("norms", False)])
def test_a_parameter_counts_by_its_elements(undone: str, found: bool) -> None:
    """Masters of the matrices alone, a third of the parameters and most of the model, end the job."""
    watch = UndoWatch()
    weights = {
        f"{kind}{i}": torch.zeros(n) for i in range(3) for kind, n in (("norms", 8), ("bias", 8), ("matrices", 64))
    }
    before, steps = train_and_install(watch, weights, list(weights.values()))
    for name, w in weights.items():
        if name.startswith(undone):
            w.copy_(before[name] + STEP)
    with pytest.raises(ConfigError, match=r"matrices0: .* in 3 of 9 parameters") if found else nullcontext():
        watch.on_inner_step(steps + 1)


def test_a_lazy_install_is_sampled_where_it_has_come_to() -> None:
    """Before that the parameter holds what the pull replaces: a sample of it would tell nothing."""
    trained = Trained()
    old = trained.parameter.clone()
    trained.watch.take_before([("w", trained.parameter)])
    trained.watch.take_after(trained.optimizer_steps, pending={"w"})
    trained.parameter.copy_(old + 0.05)
    trained.watch.on_installed({"w", "another"})
    with pytest.raises(ConfigError, match="in 1 of 1 parameters looked at"):
        trained.step(old + STEP)


def test_a_parameter_that_no_install_came_to_is_no_evidence() -> None:
    """Nor is the step that follows the next pull known then."""
    trained = Trained()
    old = trained.parameter.clone()
    trained.watch.take_before([("w", trained.parameter)])
    trained.watch.take_after(trained.optimizer_steps, pending={"w"})
    trained.step(old + STEP)
    trained.install(old + 0.05)
    trained.step(old + STEP)


def test_what_proves_nothing_is_passed_over() -> None:
    """No optimizer step was seen, as where a script writes parameters itself; a rank that holds nothing."""
    trained = Trained()
    old = trained.parameter.clone()
    trained.install(old + 0.05)
    trained.step(old + STEP, seen=0)
    Trained(numel=0).install(torch.zeros(0, 3))
