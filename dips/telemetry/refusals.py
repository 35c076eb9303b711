"""What this process has refused since its start, by reason: `dips_refusals_total`. All doors share one count.

Reasons are words of the code, never of a peer: their number is bounded by what is written in it.
"""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_refused: Counter[str] = Counter()


def count_refusal(reason: str) -> None:
    """Something from outside was refused; from any thread."""
    with _lock:
        _refused[reason] += 1


def refusals_by_reason() -> dict[str, int]:
    with _lock:
        return dict(_refused)
