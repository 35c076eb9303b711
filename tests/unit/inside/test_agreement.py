"""What one rank cannot accept, no rank goes on with: the same refusal on all, and no rank that waits for another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dips.errors import ConfigError, FailedDisk
from dips.inside.agreement import agree
from tests.unit.client.parallel.late_device import Meeting, ThreadRanks, run_ranks


def end_of_agree(check: Callable[[int], object]) -> list[object]:
    """What `agree` returns or raises on each of three ranks."""

    def play(rank: int, meeting: Meeting) -> object:
        try:
            return agree(ThreadRanks(rank, meeting), lambda: check(rank))
        except Exception as error:  # noqa: BLE001 (it is what is asked for)
            return error

    return run_ranks(3, play)


def raise_on(rank: int, error: Exception) -> Callable[[int], int]:
    def check(here: int) -> int:
        if here == rank:
            raise error
        return here

    return check


def test_each_rank_has_its_own_result() -> None:
    assert end_of_agree(lambda rank: rank) == [0, 1, 2]


@pytest.mark.parametrize("error", [ConfigError("its plan is of another model"), FailedDisk("no room")])
def test_what_one_rank_refuses_is_refused_on_all(error: Exception) -> None:
    """In the words of the first rank that refuses."""
    ends = end_of_agree(raise_on(1, error))
    assert [(type(end), str(end)) for end in ends] == [(ConfigError, str(error))] * 3


@pytest.mark.parametrize("error", [ValueError("of the script's `build`"), AssertionError()])
def test_what_fails_on_one_rank_is_raised_there_and_told_on_all(error: Exception) -> None:
    """A function of the script, as `build`, may raise anything: the other ranks waited until `collective_s`."""
    ends = end_of_agree(raise_on(1, error))
    assert ends[1] is error
    told = f"rank 1 failed: {error!r}"
    assert [(type(end).__name__, str(end)) for end in (ends[0], ends[2])] == [("Unavailable", told)] * 2
