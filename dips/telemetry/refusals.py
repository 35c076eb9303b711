"""Counts of what this process has refused since its start, by reason: `dips_refusals_total`.

Reasons are constants in the code, never text of a peer, so their number is bounded.
"""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_refused: Counter[str] = Counter()


def count_refusal(reason: str) -> None:
    """Count a refused request, message or connection; from any thread."""
    with _lock:
        _refused[reason] += 1


def refusals_by_reason() -> dict[str, int]:
    with _lock:
        return dict(_refused)
