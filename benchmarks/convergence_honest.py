"""Healthy clusters whose data is of another kind, under all gates of docs/guides/gates.md: none is shut out.

The promise was written down before the gates were changed, and is held on SHOWN, seeds on which nothing was chosen;
CHOSEN are those that were looked at while the gates were written or mended: 31 and 32 were to be shown, and two of ten
runs did not hold. One of four clusters, the fastest, has data that is 20, 30 or 50 % harder than the others' from the
first step on, or the same text in another alphabet, or C++ headers. How much harder it turned out is printed beside it:
the last usual distance of its losses to the others'.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence_rows import BASE, HALF, Rows, make_fleet
from benchmarks.harness import Bench
from dips.study.report import spell_table
from dips.study.runner import Numbers, StudyResult

FACTORY = "benchmarks.honest_task:build"
MOST_GATED = 0.02  # of the pushes of the cluster with other data, and of all others, over the seeds that are shown
CHOSEN, SHOWN = [1, 2, 31, 32, 41, 42, 43, 61, 71, 72, 73], [91, 92, 93]
STEPS = 3_200  # of all clusters: some 50 pushes of each
EVERY_GATE = ["dips", "direction", "loss", "replay"]
FOREIGN = "a"
DATA: dict[str, dict[str, Any]] = {  # the share of random bytes that makes a text so much harder for this model
    "20 % harder": {"task.kind": "noisy", "task.noise": 0.05},
    "30 % harder": {"task.kind": "noisy", "task.noise": 0.08},
    "50 % harder": {"task.kind": "noisy", "task.noise": 0.17},
    "another alphabet": {"task.kind": "rot"},
    "C++": {"task.kind": "cpp"},
}
HONEST_BASE = {**BASE, "inner_steps": 16, "steps": STEPS, "penalty.gates": EVERY_GATE, "fleet": "four"}
del HONEST_BASE["task.batch"]
HONEST_FLEETS = {"four": make_fleet(*HALF)}
HEADS = ("data of one of four", "seed", "of it gated", "by", "of the others", "its loss to theirs", "loss")


def honest_rows() -> Rows:
    """Each kind of data under every gate."""
    return {name: dict(task) for name, task in DATA.items()}


def report_honest(bench: Bench, result: StudyResult, path: Path) -> None:
    """The table, and for each kind of data the share of its cluster's pushes that was gated."""
    table: list[tuple[str, ...]] = [HEADS]
    for row in DATA:
        runs = result.runs.get(row, {})
        table += [_spell_run(row, seed, numbers) for seed, numbers in sorted(runs.items())]
        if runs:
            _hold_share(bench, f"{row}: of its pushes gated", list(runs.values()), foreign=True)
            _hold_share(bench, f"{row}: of the others' gated", list(runs.values()), foreign=False)
    for text in spell_table(table):
        bench.note(text)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table)


def _hold_share(bench: Bench, name: str, runs: Sequence[Numbers], foreign: bool) -> None:
    gated, pushes = (sum(counts) for counts in zip(*(_count(n, foreign) for n in runs), strict=True))
    share = gated / max(1, pushes)
    bench.note(f"{name}: {gated} of {pushes} pushes gated")
    bench.row(name, 1.0 - share, "×", against="at least", of=1.0 - MOST_GATED, least=1.0)


def _count(numbers: Numbers, foreign: bool) -> tuple[int, int]:
    """(gated, settled) of the cluster with other data, or of those without."""
    mine = [cluster for cluster in numbers["healthy_of"] if (cluster == FOREIGN) is foreign]
    gated = sum(sum(numbers["gated_by"].get(cluster, {}).values()) for cluster in mine)
    return gated, sum(numbers["healthy_of"][cluster] for cluster in mine)


def _spell_run(row: str, seed: int, numbers: Numbers) -> tuple[str, ...]:
    (own, of_own), (others, of_others) = _count(numbers, foreign=True), _count(numbers, foreign=False)
    by = ", ".join(f"{gate} {count}" for gate, count in numbers["gated_by"].get(FOREIGN, {}).items())
    usual = numbers["usual_loss"].get(FOREIGN)
    loss = "diverged" if numbers["loss"] is None else f"{numbers['loss']:.3f}"
    return (row, str(seed), f"{own} of {of_own}", by, f"{others} of {of_others}",
            "" if usual is None else f"{usual:+.0%}", loss)  # fmt: skip
