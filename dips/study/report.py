"""What a study says at its end: a table, results.csv, and which row to take."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from dips.study.execute import Numbers
from dips.study.runner import StudyResult
from dips.study.statistics import Comparison, compare_paired

BLIND = 0.1  # of the bad pushes: a gate that stops no more has not seen the fault
COLUMNS = (
    "loss", "first_loss", "diverged", "finished", "tokens", "fastest_steps", "effective_clusters", "versions",
    "clipped", "gated", "staleness", "cosine", "lasted_s", "of_ideal", "bad", "bad_gated", "healthy", "healthy_gated",
    "recovered_after", "readmitted", "took_s", "unit",
)  # fmt: skip
SHOWN: Mapping[str, tuple[str, Callable[[Numbers], str]]] = {
    "steps": ("of the fastest cluster's optimizer", lambda n: str(n["fastest_steps"])),
    "1/Σs²": ("effective clusters, by their shares of tokens", lambda n: f"{n['effective_clusters']:.2f}"),
    "clipped": ("share of rounds", lambda n: f"{n['clipped']:.0%}"),
    "stale": ("mean staleness of accepted pushes, in versions", lambda n: _number(n["staleness"], ".2f")),
    "cos": ("mean cosine of an outer gradient to the momentum", lambda n: _number(n["cosine"], ".2f")),
    "ideal": (
        "tokens a second of virtual time, as a share of what all clusters make alone",
        lambda n: f"{n['of_ideal']:.2f}",
    ),
}


def write_csv(result: StudyResult, path: Path) -> None:
    """Every run that counted, and every tuned value with the first seed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("row", "tuned", "best", "seed", *COLUMNS))
        for row, seed, tuned, best, numbers in list_runs(result):
            spelt = " ".join(f"{key}={value}" for key, value in tuned)
            writer.writerow((row, spelt, best, seed, *(numbers.get(column, "") for column in COLUMNS)))


def list_runs(result: StudyResult) -> list[tuple[str, int, tuple[tuple[str, Any], ...], bool, Numbers]]:
    found = []
    for row, tunings in result.tuned.items():
        best, first = result.best[row], result.study.row(row).seeds[0]
        found += [(row, first, tuned, tuned == best, numbers) for tuned, numbers in tunings.items()]
        found += [(row, seed, best, True, n) for seed, n in sorted(result.runs[row].items()) if seed != first]
    return found


def losses_of(result: StudyResult, row: str) -> dict[int, float]:
    """By seed, of the runs that ended at a number below where they began."""
    runs = result.runs.get(row, {})
    return {seed: n["loss"] for seed, n in runs.items() if n["loss"] is not None and not n["diverged"]}


def compare_row(result: StudyResult, row: str, against: str | None = None) -> Comparison | None:
    """With another row; by default with its own `compare`, else the study's. None if it is that row itself."""
    against = against or result.study.row(row).compare or result.study.compare
    return compare_paired(losses_of(result, row), losses_of(result, against)) if row != against else None


def list_lines(result: StudyResult) -> list[tuple[str, ...]]:
    """The table: a row's name, what was tuned, its mean loss, the comparison, and the shown columns."""
    lines = []
    for row in result.study.rows:
        runs, losses = result.runs.get(row.name, {}), losses_of(result, row.name)
        if row.name in result.failed and not runs:
            lines.append((row.name, "", "failed", result.failed[row.name], *[""] * len(SHOWN)))
            continue
        lost = len(runs) - len(losses)
        late = sum(not n["finished"] for n in runs.values())
        loss = f"{mean(losses.values()):.4f}" if losses else "diverged"
        loss += f" ({lost} of {len(runs)} diverged)" if lost and losses else ""
        loss += f" ({late} not finished)" if late else ""
        held = compare_row(result, row.name)
        best = " ".join(f"{key} {value}" for key, value in result.best.get(row.name, ()))
        some = next(iter(runs.values()))
        lines.append((row.name, best, loss, str(held or ""), *(show(some) for _, show in SHOWN.values())))
    return lines


def spell_table(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns under each other, for a terminal or a file; a column that is empty is left out."""
    kept = [i for i in range(len(lines[0])) if any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in kept}
    return ["  ".join(line[i].ljust(widths[i]) for i in kept).rstrip() for line in lines]


def recommend(result: StudyResult) -> list[str]:
    """Sentences: which asynchronous row to take, how sure that is, and what cannot be told from it."""
    study = result.study
    methods = {plan.row: plan.settings.method for plan in study.plan_first()}
    elsewhere = {row.name for row in study.rows if row.compare is not None}  # its losses are of another setting
    fair = {row: losses_of(result, row) for row, method in methods.items() if method == "dips" and row not in elsewhere}
    whole = {row: losses for row, losses in fair.items() if len(losses) == len(result.runs.get(row, ())) and losses}
    if not whole:
        return ["No row of method dips ended well: nothing to recommend."]
    best = min(whole, key=lambda row: mean(whole[row].values()))
    unit = next(iter(result.runs[best].values()))["unit"]
    seeds = len(whole[best])
    spelt = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    said = [f"Take {best!r}: {mean(whole[best].values()):.4f} {unit}, {spelt}."]
    said += [f"{key}: {value} was the best of its values." for key, value in result.best[best]]
    if (held := compare_row(result, best)) is not None:
        said.append(f"Against {study.compare!r}: {held}.")
    alike = [row for row in whole if row != best and _cannot_be_told(compare_paired(whole[row], whole[best]))]
    if alike:
        said.append(f"With these seeds it cannot be told from {', '.join(map(repr, alike))}.")
    if seeds < 3:
        said.append("Fewer than three seeds say little: name more before you rely on this.")
    return said


def _cannot_be_told(held: Comparison | None) -> bool:
    return held is not None and held.seeds > 1 and held.low <= 0 <= held.high


def describe_gating(numbers: Numbers) -> str:
    """What the gates made of a fault: shares of bad and healthy pushes, or that they are blind for it."""
    if not numbers.get("bad"):
        return "no bad push"
    seen = numbers["bad_gated"] / numbers["bad"]
    wrong = numbers["healthy_gated"] / max(numbers["healthy"], 1)
    after = numbers["recovered_after"]
    back = "never accepted again" if after is None else f"accepted again after {after} pushes"
    told = "blind" if seen <= BLIND else f"{seen:.0%} of {numbers['bad']} bad pushes gated"
    return f"{told}; {wrong:.1%} of {numbers['healthy']} healthy ones gated; {back}"


def list_gating(result: StudyResult) -> list[str]:
    """A line for each row with bad data."""
    runs = {row.name: next(iter(result.runs.get(row.name, {}).values()), None) for row in result.study.rows}
    return [f"{row}: {describe_gating(numbers)}" for row, numbers in runs.items() if numbers and numbers.get("bad")]


def _number(value: float | None, spelling: str) -> str:
    return "" if value is None else format(value, spelling)
