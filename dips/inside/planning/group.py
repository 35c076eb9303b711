"""Which devices make a stage together: every grouping that is worth a search.

Two papers, two ways: average linkage by the network and then by speed within (SpanTrain §3.2.2), at every threshold,
and greedy min-k-cut for every k (Zorse §4.3.2, SPLIT of Saran and Vazirani). With vendors' rates both cut single
devices or nodes off Zorse's clusters B and C, and never meet the groups of its §6.2; so a grouping by site and kind
is tried too, and with some kinds in halves and quarters.

Mended, of SpanTrain §3.2.2: its max-heap of network metrics merges the slowest pair first. Here the nearest pair merges
first, as linkage does, and a threshold is a height of the tree and no number that somebody must choose.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from dips.inside.planning.profile import ClusterProfile

F64 = NDArray[np.float64]
PROBE_BYTES = 4 << 20  # a pair's distance is the seconds of so many bytes: a border of a small micro-batch
MOST_CUTS = 16  # stages of a cut that is tried: more make bubbles only
MOST_KINDS = 4  # kinds that are split into pieces in all combinations, 3 to the power of these
PIECES = (1, 2, 4)
SAME = 1 + 1e-6  # heights that differ by less are one threshold


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """A partition of the devices, and how it was found."""

    groups: tuple[tuple[str, ...], ...]
    found_by: str


def list_groupings(profile: ClusterProfile, speed_of: Callable[[str], float]) -> list[DeviceGroups]:
    """Return every grouping once, with the groups' devices in the profile's order."""
    devices = tuple(profile.places)
    found: dict[frozenset[frozenset[str]], DeviceGroups] = {}

    def add(groups: Iterable[Iterable[str]], found_by: str) -> None:
        ordered = tuple(
            sorted((tuple(sorted(g, key=devices.index)) for g in groups), key=lambda g: devices.index(g[0]))
        )
        found.setdefault(frozenset(map(frozenset, ordered)), DeviceGroups(ordered, found_by))

    add([devices], "all devices")
    for groups, by in _by_site_and_kind(profile):
        add(groups, by)
    distances = network_distances(profile)
    for network in link_on_average(distances):
        inner = [link_by_speed([devices[i] for i in g], speed_of) for g in network]
        for depth in range(max(map(len, inner))):
            split = [level[min(depth, len(level) - 1)] for level in inner]
            add(
                (g for level in split for g in level),
                "linkage by network, then by speed" if depth else "linkage by network",
            )
    for cut in cut_greedily(1 / np.where(distances > 0, distances, np.inf), min(len(devices), MOST_CUTS)):
        add(([devices[i] for i in g] for g in cut), "greedy min-k-cut")
    return list(found.values())


def network_distances(profile: ClusterProfile) -> F64:
    """Seconds of a transfer between each two devices, the slower way; f64[n, n], zero on the diagonal."""
    devices = list(profile.places)
    made = np.zeros((len(devices), len(devices)))
    seen: dict[tuple[str, str], float] = {}
    for i, a in enumerate(devices):
        for j, b in enumerate(devices):
            if i != j:
                key = (profile.places[a].name, profile.places[b].name)
                if key not in seen:
                    route = profile.route(a, b)
                    seen[key] = route.latency_s + PROBE_BYTES * route.byte_s
                made[i, j] = seen[key]
    return np.maximum(made, made.T)


# ---- by site and kind ------------------------------------------------------------------------------------------------


def _by_site_and_kind(profile: ClusterProfile) -> Iterable[tuple[list[list[str]], str]]:
    keys: dict[str, Callable[[str], Hashable]] = {
        "by site": lambda d: profile.places[d].site,
        "by kind": lambda d: profile.places[d].kind,
        "by site and kind": lambda d: (profile.places[d].site, profile.places[d].kind),
        "by node": lambda d: profile.places[d].name,
    }
    for by, key in keys.items():
        yield _classify(profile.places, key), by
    whole = _classify(profile.places, keys["by site and kind"])
    kinds = sorted({profile.places[g[0]].kind for g in whole})
    plans = product(PIECES, repeat=len(kinds)) if len(kinds) <= MOST_KINDS else ((n,) * len(kinds) for n in PIECES)
    for pieces in plans:
        count = dict(zip(kinds, pieces, strict=True))
        groups = [part for g in whole for part in cut_evenly(g, count[profile.places[g[0]].kind])]
        yield groups, "by site and kind, some in pieces"


def _classify(devices: Iterable[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    found: dict[Hashable, list[str]] = {}
    for device in devices:
        found.setdefault(key(device), []).append(device)
    return list(found.values())


def cut_evenly(group: Sequence[str], pieces: int) -> list[list[str]]:
    """Cut a group into so many runs of nearly equal length; fewer where it has fewer devices."""
    pieces = min(pieces, len(group))
    edges = [round(len(group) * i / pieces) for i in range(pieces + 1)]
    return [list(group[a:b]) for a, b in pairwise(edges)]


# ---- linkage ---------------------------------------------------------------------------------------------------------


def link_on_average(distances: F64) -> list[list[list[int]]]:
    """Merge the nearest two groups again and again; return the partition at each threshold, from finest to coarsest."""
    n = len(distances)
    between = distances.astype(float).copy()
    np.fill_diagonal(between, np.inf)
    groups: list[list[int] | None] = [[i] for i in range(n)]
    levels = [[[i] for i in range(n)]]
    height = -np.inf
    for _ in range(n - 1):
        i, j = sorted(divmod(int(np.argmin(between)), n))
        nearest = float(between[i, j])
        if nearest > height * SAME and height >= 0:
            levels.append([list(g) for g in groups if g is not None])
        height = max(height, nearest)
        a, b = groups[i], groups[j]
        assert a is not None and b is not None
        between[i] = (between[i] * len(a) + between[j] * len(b)) / (len(a) + len(b))
        between[:, i] = between[i]
        between[i, i] = between[j, :] = between[:, j] = np.inf
        groups[i], groups[j] = a + b, None
    levels.append([list(g) for g in groups if g is not None])
    return levels


def link_by_speed(group: Sequence[str], speed_of: Callable[[str], float]) -> list[list[list[str]]]:
    """Partition one group by the ratios of its devices' speeds, at each threshold, from coarsest to finest."""
    logs = np.log([speed_of(d) for d in group])
    levels = link_on_average(np.abs(logs[:, None] - logs[None, :]))
    named = [[[group[i] for i in part] for part in level] for level in levels]
    speeds = {speed_of(d) for d in group}
    return [level for level in reversed(named) if len(level) <= len(speeds)]  # no finer than equal devices together


# ---- min-k-cut -------------------------------------------------------------------------------------------------------


def cut_greedily(weights: F64, most: int) -> list[list[list[int]]]:
    """Cut the component with the lightest cut, again and again (SPLIT); return the partitions with 2 … most parts.

    At most 2 − 2/k times the weight of the best cut into k.
    """
    parts = [list(range(len(weights)))]
    lightest = [cut_lightest(weights)] if len(weights) > 1 else [(np.inf, [])]
    found = []
    while len(parts) < most:
        at = min(range(len(parts)), key=lambda i: lightest[i][0])
        whole, side = parts[at], set(lightest[at][1])
        halves = [[whole[i] for i in side], [whole[i] for i in range(len(whole)) if i not in side]]
        parts[at : at + 1] = halves
        lightest[at : at + 1] = [
            cut_lightest(weights[np.ix_(h, h)]) if len(h) > 1 else (float("inf"), []) for h in halves
        ]
        found.append([list(part) for part in parts])
    return found


def cut_lightest(weights: F64) -> tuple[float, list[int]]:
    """Return the weight of the lightest cut of a graph into two, and one side of it (Stoer and Wagner 1997).

    weights  f64[n, n]  symmetric, zero on the diagonal; n > 1
    """
    w = weights.astype(float).copy()
    merged = [[i] for i in range(len(w))]
    alive = np.ones(len(w), bool)
    best: tuple[float, list[int]] = (float("inf"), [])
    for _ in range(len(w) - 1):
        left = alive.copy()
        pull = np.zeros(len(w))
        order = []
        for _ in range(int(alive.sum())):
            tightest = int(np.argmax(np.where(left, pull, -1.0)))
            left[tightest] = False
            order.append((tightest, float(pull[tightest])))
            pull += w[tightest]
        last, cut = order[-1]
        before = order[-2][0]
        if cut < best[0]:
            best = cut, list(merged[last])
        merged[before] += merged[last]
        w[before] += w[last]
        w[:, before] += w[:, last]
        w[before, before] = 0.0
        alive[last] = False
        w[last] = w[:, last] = 0.0
    return best
