"""The link of each cluster: what it moves now or moved last, and how fast, by its own count and by the slaves'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dips.page.rates import SeenTransfer
from dips.page.text import clean_text, number_of

MOST_LINKS = 48  # clusters; those that move now come first if there are more
MOST_ENDS = 16  # slaves of one link
_WAYS = {"pushing": "push", "pulling": "pull"}


def list_links(status: Mapping[str, Any], seen: Mapping[tuple[str, str], SeenTransfer]) -> dict[str, Any]:
    """A row for each cluster that is here; `seen`: the last transfers by (cluster, slave)."""
    here = {name: c for name, c in status.get("clusters", {}).items() if c.get("state") != "gone"}
    moving = sorted(here, key=lambda name: (here[name].get("state") not in _WAYS, name))
    listed = sorted(moving[:MOST_LINKS])
    ends: dict[str, list[tuple[str, SeenTransfer]]] = {name: [] for name in listed}
    for (cluster, slave), transfer in seen.items():
        if cluster in ends:
            ends[cluster].append((slave, transfer))
    rows = [_link_row(name, here[name], sorted(ends[name])) for name in listed]
    return {"rows": rows, "more": max(0, len(here) - MOST_LINKS)}


def _link_row(name: str, c: Mapping[str, Any], ends: list[tuple[str, SeenTransfer]]) -> dict[str, Any]:
    return {
        "cluster": clean_text(name),
        "way": _WAYS.get(str(c.get("state"))),
        "bytes": number_of(c.get("bytes_moved")),
        "total": number_of(c.get("bytes_total")),
        "rate": number_of(c.get("bytes_per_s") or c.get("bandwidth_bytes_per_s")),
        "usual": number_of(c.get("bandwidth_bytes_per_s")),
        "ends": [
            {"slave": clean_text(slave), "way": "push" if t.push else "pull", "rate": number_of(t.rate)}
            for slave, t in ends[:MOST_ENDS]
        ],
        "more": max(0, len(ends) - MOST_ENDS),
    }
