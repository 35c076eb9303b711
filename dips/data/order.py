"""Permutations that depend only on seeds: the same on every machine and with every version of numpy.

Numpy does not promise stable streams of its generators, so a mixing function of three lines is used.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def shuffle_numbers(count: int, *seeds: int) -> I64:
    """Return a permutation of the numbers 0 … count − 1 that depends on the seeds: int64[count]."""
    state = 0
    for seed in seeds:
        state = int(_mix_bits(np.array([(state ^ (seed & _MASK)) & _MASK], np.uint64))[0])
    keys = _mix_bits(np.arange(count, dtype=np.uint64) ^ np.uint64(state))
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _mix_bits(x: U64) -> U64:
    """Apply splitmix64's step (Steele, Lea and Flood 2014): a bijective, random-looking map of 64 bits."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
