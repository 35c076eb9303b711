"""The backoff: pauses double up to a limit, are shortened by chance, and begin anew after a success."""

from __future__ import annotations

from random import Random

from dips.transport.backoff import Backoff


class LongestPauses(Random):
    """Draws the longest pause that is allowed."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_pauses_double_up_to_the_longest() -> None:
    """Without jitter: 0.5, 1, 2, 3, 3 seconds, and after a success 0.5 again."""
    backoff = Backoff(0.5, 3.0, LongestPauses())
    assert [backoff.next_pause_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_pause_s() == 0.5


def test_jitter_takes_at_most_half() -> None:
    """Each pause lies between half of its full length and all of it, and they are spread over that interval."""
    pauses = [Backoff(1.0, 1.0, Random(seed)).next_pause_s() for seed in range(200)]
    assert all(0.5 <= pause <= 1.0 for pause in pauses)
    assert min(pauses) < 0.55 and max(pauses) > 0.95


def test_equal_generators_give_equal_pauses() -> None:
    """Chance comes from the generator alone, so a simulation can repeat itself."""
    one, other = Backoff(0.1, 5.0, Random(7)), Backoff(0.1, 5.0, Random(7))
    assert [one.next_pause_s() for _ in range(10)] == [other.next_pause_s() for _ in range(10)]
