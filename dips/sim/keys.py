"""Keys of simulated lanes and ranks: names of a key's length. A party that sends a key is assumed to hold it."""

from __future__ import annotations

from dips.protocol.rank_keys import KEY_CHARS

LANE_KEY = "lane".ljust(KEY_CHARS, ".")  # key of all slaves, whose lanes are encrypted


def make_keys(attempt: str, ranks: int) -> tuple[str, ...]:
    """Return the keys of the ranks of one attempt of a cluster's trainer; each attempt has its own."""
    return tuple(f"{rank}.{attempt}".ljust(KEY_CHARS, ".") for rank in range(ranks))
