"""The keys of `shared` that differ between two processes; their digests only tell that some do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST = 5  # differences listed


def differing_options(ours: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    """Return one line for each differing key of `shared`, at most MOST and a count of the others."""
    lines = list(_find_differing("shared", ours, runs))
    left = len(lines[MOST:])
    return [*lines[:MOST], f"and {left} more"] if left else lines


def _find_differing(key: str, ours: Any, runs: Any) -> Iterator[str]:
    if isinstance(ours, Mapping) and isinstance(runs, Mapping):
        for name in sorted({*ours, *runs}):
            yield from _find_differing(f"{key}.{name}", ours.get(name), runs.get(name))
    elif ours != runs:
        yield f"{key}: the run has {runs!r}, this file {ours!r}"
