"""A cluster at 1/30 of the others' bandwidth, with real processes: it takes part, and the others hardly notice.

A real master, two slaves and three clusters on a switch of network namespaces; each cluster's link is shaped by
`tc tbf`, the third one's to 1/30. Against it the same run without the third. Options are the defaults (two slots, a
window of 5 % of the clusters' pace and at least 1 s). Training is sleep: what counts is who waits for whom.
Source: docs/architecture.md#speed, docs/rationale.md#19, #24, #31.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import Bench, main
from benchmarks.lone_slave import equal_layers
from benchmarks.namespaces import missing, network
from benchmarks.whole_run import SITE, WholeRun
from dips.telemetry import timeline

FAST_MBIT, SLOWNESS = 240.0, 30.0
NUMEL, LAYERS, SLAVES, SLOTS = 2_250_000, 6, 2, 2  # 9 MB: 0.3 s on a fast link, 9 s on the slow one
INNER_S = 3.0
VERSIONS_ALONE, VERSIONS = 12, 30
SLOW = "c2"
MOST_ATTEMPTS, MOST_TRANSFERS, LEAST = 2, 3.0, 1 / 1.1
WARM = 2  # steps of a cluster that do not count: links are unmeasured, kernels compile
WITHIN_S = 300.0
Mark = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SlowClusterRun:
    """What was seen of one run: each cluster's steps and its timeline."""

    steps: dict[str, list[Mark]]
    marks: dict[str, list[Mark]]

    def round_s(self, clusters: Sequence[str]) -> float:
        """Mean seconds from one outer step to the next."""
        return mean(float(b["ended"] - a["ended"]) for name in clusters for a, b in pairwise(self.steps[name][WARM:]))


def measure(bench: Bench) -> None:
    """Without the slow cluster, then with it."""
    bench.skip_if(missing())
    others = [f"c{i}" for i in range(2)]
    cut = 2 if bench.quick else 1
    bench.say(f"two clusters of {FAST_MBIT:g} Mbit/s")
    alone = lived(others, VERSIONS_ALONE // cut)
    bench.say(f"and a third of {FAST_MBIT / SLOWNESS:g} Mbit/s")
    both = lived([*others, SLOW], VERSIONS // cut)
    pulls, moves = attempts(both.marks[SLOW]), transfers(both.marks[SLOW])
    commits = [mark["at"] for mark in both.marks[SLOW] if mark["kind"] == "push_end" and mark["ok"]]
    if len(commits) < 2 or not pulls:
        raise RuntimeError(f"the slow cluster pushed {len(commits)} times and pulled {len(pulls)} times: too few")
    bench.row(
        "attempts of a pull at most, slow", max(pulls), "", against="allowed", of=MOST_ATTEMPTS, least=1.0, less=True
    )
    bench.row(
        "from commit to commit, slow", mean(b - a for a, b in pairwise(commits)), "s",
        against="3 of its transfers", of=MOST_TRANSFERS * mean(moves), least=1.0, less=True,
    )  # fmt: skip
    bench.row(
        "round, the others", both.round_s(others), "s",
        against="without it", of=alone.round_s(others), least=LEAST, less=True,
    )  # fmt: skip
    bench.row("transfer, slow", mean(moves), "s")
    bench.row("transfer, the others", mean(s for name in others for s in transfers(both.marks[name])), "s")
    bench.note(f"the slow cluster pulled {len(pulls)} times, {sum(n - 1 for n in pulls)} attempts failed")
    bench.note(f"it committed {len(commits)} pushes while the others took {VERSIONS // cut} outer steps")


def lived(clusters: Sequence[str], versions: int) -> SlowClusterRun:
    """Let the clusters train until so many versions are made."""
    links = {name: FAST_MBIT / (SLOWNESS if name == SLOW else 1) for name in clusters}
    with (
        tempfile.TemporaryDirectory(prefix="dips-bench-") as made,
        network({SITE: None, **links}) as hosts,
        WholeRun(
            Path(made) / "run", equal_layers(NUMEL, LAYERS), clusters=len(clusters), slaves=SLAVES, versions=versions,
            slots=SLOTS, window_s=None, inner_s=INNER_S, hosts=hosts,
        ) as run,
    ):  # fmt: skip
        run.finish(WITHIN_S)
        steps: dict[str, list[Mark]] = {name: run.lines(name) for name in clusters}
        marks: dict[str, list[Mark]] = {name: list(timeline.read_marks(run.timeline(name))) for name in clusters}
    return SlowClusterRun(steps, marks)


def attempts(marks: Sequence[Mark]) -> list[int]:
    """For each pull that was installed, how often it was begun; those that never ended count as one too many."""
    counts, failed = list[int](), 0
    for mark in marks:
        if mark["kind"] == "pull_end" and mark["installed"]:
            counts.append(failed + 1)
            failed = 0
        elif mark["kind"] == "pull_end":
            failed += 1
    return [*counts, failed + 1] if failed else counts


def transfers(marks: Sequence[Mark]) -> list[float]:
    """Seconds of each push and pull that succeeded."""
    began, took = 0.0, list[float]()
    for mark in marks:
        if mark["kind"] in ("push_begin", "pull_begin"):
            began = mark["at"]
        elif mark["kind"] in ("push_end", "pull_end") and mark.get("ok", mark.get("installed")):
            took.append(mark["at"] - began)
    return took


if __name__ == "__main__":
    main("slow_cluster", __doc__, measure)
