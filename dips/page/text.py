"""Words and numbers from outside, bounded before they are shown: what a cluster says may be anything."""

from __future__ import annotations

import unicodedata
from math import isfinite
from typing import Any

MOST_CHARS = 240  # of a reason or note; the heartbeat's own limit
NAME_CHARS = 63  # of a cluster or slave
DIGITS = 6  # significant, of a number that is shown
# Control and format characters: among the latter are those that turn the direction of what follows.
_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})


def clean_text(text: object, most: int = MOST_CHARS) -> str:
    """One line of visible characters, at most `most` of them."""
    line = str(text)[: most + 1]
    shown = line if line.isprintable() else "".join(" " if unicodedata.category(c) in _HIDDEN else c for c in line)
    return shown if len(line) <= most else shown[: most - 1] + "…"


def number_of(value: Any) -> float | int | None:
    """A finite number with few digits, or None: JSON has no NaN, and nobody reads the twelfth digit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if isfinite(value) else None


def seconds_of(value: Any) -> float | None:
    """A number of seconds to the hundredth."""
    return round(float(value), 2) if isinstance(value, int | float) and isfinite(value) else None
