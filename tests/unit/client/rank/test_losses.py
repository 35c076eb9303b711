"""Whose loss a job shows: rank 0's by itself, else the first rank's that says one."""

from __future__ import annotations

import json

import pytest

from dips.client.rank.losses import LossChannel, finite


class Ranks:
    """What the collective gives each rank: the words of all."""

    def __init__(self, *others: tuple[float, int, bool]) -> None:
        self._others = [json.dumps(said).encode() for said in others]

    def gather(self, words: bytes) -> list[bytes]:
        return [words, *self._others]


NONE = (0.0, 0, True)


@pytest.mark.parametrize(
    ("own", "others", "heard"),
    [
        ([None], [NONE, (6.0, 3, True), (8.0, 4, True)], (6.0, 3, True)),
        ([None], [NONE, (2.0, 1, False)], (2.0, 1, False)),
        ([2.0], [NONE, (6.0, 3, True)], None),
        ([None], [NONE], None),
    ],
)
def test_the_first_rank_that_says_a_loss_is_heard(
    own: list[float | None], others: list[tuple[float, int, bool]], heard: tuple[float, int, bool] | None
) -> None:
    """None if that is rank 0, which told its own with each step, or if nobody says one."""
    losses = LossChannel(Ranks(*others))  # type: ignore[arg-type]
    for loss in own:
        losses.add(loss, finite=True)
    assert losses.heard() == heard


def test_a_look_begins_anew() -> None:
    """What was heard is not heard again."""
    losses = LossChannel(Ranks())  # type: ignore[arg-type]
    losses.add(None, finite=False)
    assert losses.heard() is None  # it is rank 0's own
    losses = LossChannel(Ranks((0.0, 0, True)))  # type: ignore[arg-type]
    losses.add(3.0, finite=True)
    losses.heard()
    assert (losses._sum, losses._count) == (0.0, 0)


def test_what_is_not_finite_is_not_averaged() -> None:
    assert finite(2) == 2.0
    assert finite(None) is finite(float("nan")) is finite(float("inf")) is None
