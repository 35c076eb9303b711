"""The pause before the next try: it doubles up to a limit, with jitter that separates peers that failed together.

Pure: the caller sleeps, and passes the random generator.
"""

from __future__ import annotations

from random import Random

LEAST_SHARE = 0.5  # of the full pause: jitter takes away at most the rest


class Backoff:
    """Pauses in seconds, from `first_s` to `longest_s`, each between half of its full length and all of it."""

    def __init__(self, first_s: float, longest_s: float, rng: Random) -> None:
        self._first_s, self._longest_s, self._rng = first_s, longest_s, rng
        self._full_s = first_s

    def next_pause_s(self) -> float:
        """Return how long to wait before the next try; the following pause is twice as long."""
        pause_s = self._full_s * self._rng.uniform(LEAST_SHARE, 1.0)
        self._full_s = min(2 * self._full_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the shortest pause again, after a success."""
        self._full_s = self._first_s
