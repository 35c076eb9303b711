"""Keys of simulated lanes and ranks: names that are spelled as keys are. Whoever says one is believed to hold it."""

from __future__ import annotations

from dips.protocol.rank_keys import KEY_CHARS

LANE_KEY = "lane".ljust(KEY_CHARS, ".")  # of all slaves: their lanes are encrypted


def make_keys(attempt: str, ranks: int) -> tuple[str, ...]:
    """Of the ranks of one attempt of a cluster's trainer; another attempt has others."""
    return tuple(f"{rank}.{attempt}".ljust(KEY_CHARS, ".") for rank in range(ranks))
