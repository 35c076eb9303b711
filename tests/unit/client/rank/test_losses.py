"""Whose loss a job shows: rank 0's by itself, else the first rank's that says one."""

from __future__ import annotations

import json

import pytest
import torch

from dips.client.rank.steps import LossChannel, finite_or_none


class Ranks:
    """The collective's result on each rank: the messages of all."""

    def __init__(self, *others: tuple[float, int, bool]) -> None:
        self._others = [json.dumps(said).encode() for said in others]

    def all_gather(self, message: bytes) -> list[bytes]:
        return [message, *self._others]


NONE = (0.0, 0, True)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ([None], [NONE, (6.0, 3, True), (8.0, 4, True)], (6.0, 3, True)),
        ([None], [NONE, (2.0, 1, False)], (2.0, 1, False)),
        ([None], [NONE, (0.0, 0, False)], (0.0, 0, False)),  # none of its losses was finite
        ([2.0], [NONE, (6.0, 3, True)], None),
        ([None], [NONE], None),
    ],
)
def test_the_first_rank_with_a_loss_is_reported(
    own: list[float | None], others: list[tuple[float, int, bool]], expected: tuple[float, int, bool] | None
) -> None:
    """None if that is rank 0, which reports its own with each step, or if no rank has one."""
    losses = LossChannel(Ranks(*others))  # type: ignore[arg-type]
    for loss in own:
        losses.add_loss(loss, finite=True)
    assert losses.gather_losses() == expected


def test_a_poll_starts_over() -> None:
    """What was reported is not reported again."""
    losses = LossChannel(Ranks())  # type: ignore[arg-type]
    losses.add_loss(None, finite=False)
    assert losses.gather_losses() is None  # it is rank 0's own
    losses = LossChannel(Ranks((0.0, 0, True)))  # type: ignore[arg-type]
    losses.add_loss(3.0, finite=True)
    losses.gather_losses()
    assert (losses._sum, losses._count) == (0.0, 0)


def test_what_is_not_finite_is_not_averaged() -> None:
    assert finite_or_none(2) == 2.0
    assert finite_or_none(None) is finite_or_none(float("nan")) is finite_or_none(float("inf")) is None


@pytest.mark.filterwarnings("error")
def test_a_loss_that_requires_a_gradient() -> None:
    """The README's `loss=loss`: torch has nothing to warn of."""
    assert finite_or_none(torch.tensor(2.5, requires_grad=True)) == 2.5
    assert finite_or_none(torch.tensor(float("inf"))) is None and finite_or_none(None) is None
