"""Detection of an optimizer that writes back the values that a pull has replaced, from masters unknown here.

At each install a sample of some parameters is kept, before and after. At the first call of `OuterLoop.step`
after an optimizer's step it is compared: with `u` the mean inner step between the last two installs, training leads to
after + u, and an optimizer with its own masters to before + u. A sample so near to the second that nothing of
the pull is left was undone. A pull whose change is small compared with inner steps proves nothing.

With `install: lazy` each parameter is sampled after its install. Samples stay on their device until they are
compared, so that sampling waits for no copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from dips.errors import ConfigError

MOST_PARAMETERS = 16  # parameters sampled, spread over the model
MOST_ELEMENTS = 64  # elements sampled per parameter
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
        chosen = full[:: max(1, len(full) // MOST_PARAMETERS)][:MOST_PARAMETERS]
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
    return flat[:: max(1, flat.numel() // MOST_ELEMENTS)][:MOST_ELEMENTS].to(torch.float32, copy=True)


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
