"""Notices an optimizer that writes back what a pull has replaced: it keeps masters that nobody here was told of.

Of some parameters a sample is kept at each install, as it was before and after. At the first call of `OuterLoop.step`
after an optimizer's step it is compared: one inner step cannot lead back over the distance of several, so a sample that
is at its old values again was written back. Pulls that moved little, or came after few inner steps, prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dips.errors import ConfigError

MOST_PARAMETERS = 16  # sampled, spread over the model
MOST_ELEMENTS = 64  # of each
LEAST_STEPS = 4  # inner steps between two installs: one step back to the start of fewer may be training
LEFT_OVER = 0.05  # of the squared distance: a sample that is so near its old values was written back


@dataclass(frozen=True)
class Sample:
    """Some elements of one parameter on this rank."""

    name: str
    view: torch.Tensor
    before: torch.Tensor  # f32, on the host
    after: torch.Tensor


class UndoWatch:
    """One rank's samples from an install to the next optimizer step."""

    def __init__(self) -> None:
        self._before: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._samples: list[Sample] = []
        self._optimizer_steps = 0  # when the samples were taken
        self._since_install = 0  # inner steps

    def take_before(self, views: Sequence[tuple[str, torch.Tensor]]) -> None:
        """A version is about to be installed in these tensors."""
        steps, self._since_install, self._samples, self._before = self._since_install, 0, [], []
        if steps >= LEAST_STEPS:
            full = [(name, view) for name, view in views if view.numel()]
            chosen = full[:: max(1, len(full) // MOST_PARAMETERS)][:MOST_PARAMETERS]
            self._before = [(name, view, _read_sample(view)) for name, view in chosen]

    def take_after(self, optimizer_steps: int) -> None:
        """It was installed."""
        self._samples = [Sample(name, view, before, _read_sample(view)) for name, view, before in self._before]
        self._before, self._optimizer_steps = [], optimizer_steps

    def on_inner_step(self, optimizer_steps: int) -> None:
        """Raise ConfigError if the optimizer has stepped since, and has undone the install."""
        self._since_install += 1
        if not self._samples or optimizer_steps == self._optimizer_steps:
            return
        samples, self._samples = self._samples, []
        undone, moved = zip(*(_was_undone(sample) for sample in samples), strict=True)
        if sum(undone) * 2 > sum(moved):
            raise ConfigError(
                f"{samples[undone.index(True)].name}: the first optimizer step after a pull wrote back the values from "
                f"before it, in {sum(undone)} of {sum(moved)} parameters that were looked at: the optimizer keeps fp32 "
                "masters of its own. Give it to the outer loop, OuterLoop(model, optimizer=optimizer), or a function "
                "that makes its masters from the parameters, OuterLoop(model, optimizer=function)"
            )


@torch.no_grad()
def _read_sample(view: torch.Tensor) -> torch.Tensor:
    flat = view.reshape(-1) if view.is_contiguous() else view[0]
    return flat[:: max(1, flat.numel() // MOST_ELEMENTS)][:MOST_ELEMENTS].to("cpu", torch.float32, copy=True)


def _was_undone(sample: Sample) -> tuple[bool, bool]:
    """Whether it is at its old values again, and whether the install had moved it at all."""
    distance = float((sample.before - sample.after).square().sum())
    if distance == 0.0:
        return False, False
    left = float((_read_sample(sample.view) - sample.before).square().sum())
    return left < LEFT_OVER * distance, True
