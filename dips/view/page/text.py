"""Words and numbers from outside, bounded before they are shown: what a cluster says may be anything."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from math import isfinite
from typing import Any

MOST_CHARS = 240  # of a reason or remark; the heartbeat's own limit
NAME_CHARS = 63  # of a cluster or slave
DIGITS = 6  # significant, of a number that is shown
# Control and format characters: among the latter are those that turn the direction of what follows.
_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})


def clean_text(text: object, most: int = MOST_CHARS) -> str:
    """One line of visible characters, at most `most` of them."""
    line = str(text)[: most + 1]
    shown = line if line.isprintable() else "".join(" " if unicodedata.category(c) in _HIDDEN else c for c in line)
    return shown if len(line) <= most else shown[: most - 1] + "…"


def clean_plain(value: Any) -> Any:
    """The same for what `to_plain` made: texts bounded, numbers with few digits; JSON has no NaN."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(key): clean_plain(item) for key, item in value.items()}
    return [clean_plain(item) for item in value] if isinstance(value, list) else value


def seconds_of(value: float | None) -> float | None:
    """A number of seconds to the hundredth."""
    return None if value is None or not isfinite(value) else round(value, 2)
