"""The results of a study: paired comparisons, a chart, a table, results.csv, and the recommended row."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from dips.study.fleet import Fault
from dips.study.runner import Numbers, StudyResult
from dips.study.study_file import Settings, Tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- statistics -----------------------------------------------------------------------------------------------------
# Paired comparisons: the same seed in two rows starts from the same θ and draws the same batches.
#
# "No worse by x" means the upper end of the paired 95 % interval of the relative difference (Student's t).


# Quantile 0.975 of Student's t by degrees of freedom; others use the next smaller entry, which is conservative.
STUDENT = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179,
    15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """The relative difference of a row's losses to another's: the mean and its 95 % interval, as shares of the
    other's.
    """

    seeds: int
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.seeds < 2:
            return "one seed: no interval"
        if self.high < 0:
            return "better"
        return "worse" if self.low > 0 else f"no worse by {self.high:.1%}"

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{self.mean:+.1%}, {self.verdict}"
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%}, {self.seeds} paired seeds): {self.verdict}"


def compare_paired(losses: Mapping[int, float], others: Mapping[int, float]) -> Comparison | None:
    """Compare losses by seed; None if there is no common seed."""
    shares = [losses[seed] / others[seed] - 1.0 for seed in sorted(losses.keys() & others.keys())]
    if not shares:
        return None
    if len(shares) == 1:
        return Comparison(1, shares[0], -inf, inf)
    half = student_quantile(len(shares) - 1) * stdev(shares) / sqrt(len(shares))
    return Comparison(len(shares), mean(shares), mean(shares) - half, mean(shares) + half)


def student_quantile(freedom: int) -> float:
    return STUDENT[max(n for n in STUDENT if n <= freedom)]


# ---- drawing --------------------------------------------------------------------------------------------------------


ROW_INCHES, LEAST_INCHES, WIDTH_INCHES = 0.32, 2.5, 9.0
SEED, MEAN, COMPARED = "#88aadd", "#1f3f77", "#d62728"


def draw_study(result: StudyResult) -> Figure:
    """Draw a line for each row, the best at the top; raise ImportError without matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")  # writes files only, without a screen
    found = {row.name: losses_of(result, row.name) for row in result.study.rows}
    rows = sorted((row for row in found if found[row]), key=lambda row: -mean(found[row].values()))
    figure = Figure(figsize=(WIDTH_INCHES, max(LEAST_INCHES, 1.0 + ROW_INCHES * len(rows))), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows):
        losses = list(found[row].values())
        axes.plot(losses, [at] * len(losses), "o", color=SEED, ms=5, label="seeds" if at == 0 else None)
        axes.plot([mean(losses)], [at], "D", color=MEAN, ms=6, label="mean" if at == 0 else None)
    compared = found.get(result.study.compare)
    if compared:
        axes.axvline(mean(compared.values()), color=COMPARED, lw=1.0, ls="--", label=result.study.compare)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    units = [n["unit"] for runs in result.runs.values() for n in runs.values()]
    axes.set_xlabel(f"validation loss, {units[0]}" if units else "validation loss")
    axes.grid(alpha=0.25)
    if rows:
        axes.legend(fontsize=8)
    return figure


# ---- report ---------------------------------------------------------------------------------------------------------


BLIND = 0.1  # a gate that stops at most this share of the bad pushes does not detect the fault
COLUMNS = (
    "loss", "first_loss", "diverged", "finished", "tokens", "fastest_steps", "effective_clusters", "versions",
    "clipped", "gated", "staleness", "cosine", "lasted_s", "of_ideal", "bad", "bad_gated", "healthy", "healthy_gated",
    "recovered_after", "readmitted", "took_s", "unit",
)  # fmt: skip
Runs = Sequence[Numbers]  # runs of one row, by seed
SHOWN: Mapping[str, tuple[str, Callable[[Runs, Runs], str]]] = {  # of the runs of a row, and of the compared one
    "steps": ("of the fastest cluster's optimizer", lambda runs, _: _mean_of(runs, "fastest_steps", ".0f")),
    "1/Σs²": (
        "effective clusters, by their shares of tokens; fewer of them end lower at equal tokens, whatever the method",
        lambda runs, _: _mean_of(runs, "effective_clusters", ".2f"),
    ),
    "clipped": ("share of rounds", lambda runs, _: _mean_of(runs, "clipped", ".0%")),
    "stale": ("mean staleness of accepted pushes, in versions", lambda runs, _: _mean_of(runs, "staleness", ".2f")),
    "cos": ("mean cosine of an outer gradient to the momentum", lambda runs, _: _mean_of(runs, "cosine", ".2f")),
    "gated": ("healthy pushes that a gate kept out, of all seeds", lambda runs, _: _spell_gated(runs)),
    "ideal": (
        "tokens a second of virtual time, as a share of what all clusters make alone",
        lambda runs, _: _mean_of(runs, "of_ideal", ".2f"),
    ),
    "time": ("virtual seconds for as many tokens, as a share of the compared row's", lambda *both: _spell_time(*both)),
}


def write_csv(result: StudyResult, path: Path) -> None:
    """Write every run, those by which values were chosen too."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("row", "tuned", "best", "seed", *COLUMNS))
        for row, seed, tuned, best, numbers in list_runs(result):
            spelt = " ".join(f"{key}={value}" for key, value in tuned)
            writer.writerow((row, spelt, best, seed, *(numbers.get(column, "") for column in COLUMNS)))


def list_runs(result: StudyResult) -> list[tuple[str, int, Tuned, bool, Numbers]]:
    """Return the row, the seed, the tuned values and the numbers of every run, and whether the values are the best."""
    found = []
    for row in result.study.rows:
        best, tried = result.best.get(row.name), result.tuned.get(row.name, {})
        found += [(row.name, row.tuning_seed, tuned, tuned == best, numbers) for tuned, numbers in tried.items()]
        found += [(row.name, seed, best or (), True, n) for seed, n in sorted(result.runs.get(row.name, {}).items())]
    return found


def losses_of(result: StudyResult, row: str) -> dict[int, float]:
    """Return the losses by seed, of the runs that ended with a number below their first loss."""
    runs = result.runs.get(row, {})
    return {seed: n["loss"] for seed, n in runs.items() if n["loss"] is not None and not n["diverged"]}


def compare_row(result: StudyResult, row: str, against: str | None = None) -> Comparison | None:
    """Compare a row with another: by default with its own `compare`, else the study's. None if it is the same row."""
    against = against or result.study.row(row).compare or result.study.compare
    return compare_paired(losses_of(result, row), losses_of(result, against)) if row != against else None


def list_lines(result: StudyResult) -> list[tuple[str, ...]]:
    """Return the table: a row's name, its tuned values, its mean loss, the comparison, and the shown columns."""
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
        held = str(compare_row(result, row.name) or "")
        held += f", against {row.compare}" if held and row.compare else ""  # the column's head names the study's
        edges = result.edges.get(row.name, ())
        best = " ".join(f"{k} {v}{' (edge)' if k in edges else ''}" for k, v in result.best.get(row.name, ()))
        made = list(runs.values())
        compared = list(result.runs.get(row.compare or result.study.compare, {}).values())
        lines.append((row.name, best, loss, held, *(show(made, compared) for _, show in SHOWN.values())))
    return lines


def spell_table(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns for a terminal or a file; an empty column is omitted."""
    kept = [i for i in range(len(lines[0])) if any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in kept}
    return ["  ".join(line[i].ljust(widths[i]) for i in kept).rstrip() for line in lines]


def recommend(result: StudyResult) -> list[str]:
    """Return sentences on which asynchronous row to take, how certain that is, and what the study cannot tell.

    Only rows that differ in method from the compared row are considered: with another fleet, task, H or number of
    steps, or with a fault, a loss answers another question, and may be lower for that reason alone.
    """
    study = result.study
    asked = _question_of(_settings_of(result, study.compare))
    ours = {row.name: of for row in study.rows if (of := _settings_of(result, row.name)).method == "dips"}
    fair = [row for row, of in ours.items() if _question_of(of) == asked and not _faults_of(of)]
    whole = {row: losses for row in fair if (losses := losses_of(result, row)) and _ended_well(result, row)}
    if not whole:
        setting = f"with the fleet, task, steps and inner_steps of {study.compare!r}, which others are compared with"
        return [f"Nothing to recommend: no row of method dips without a fault ended well {setting}."]
    best = min(whole, key=lambda row: mean(whole[row].values()))
    unit = next(iter(result.runs[best].values()))["unit"]
    seeds = len(whole[best])
    spelt = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    said = [f"Take {best!r}: {mean(whole[best].values()):.4f} {unit}, {spelt}."]
    said += [f"{key}: {value} was the best of its values." for key, value in result.best[best]]
    if (held := compare_row(result, best)) is not None:
        said.append(f"Against {study.row(best).compare or study.compare!r}: {held}.")
    alike = [row for row in whole if row != best and _cannot_be_told(compare_paired(whole[row], whole[best]))]
    if alike:
        said.append(f"With these seeds it cannot be told from {', '.join(map(repr, alike))}.")
    if left := [row for row in ours if row not in fair]:
        said.append(
            f"Of another fleet, fault, task, steps or inner_steps, so not compared: {', '.join(map(repr, left))}."
        )
    if seeds < 3:
        said.append("Fewer than three seeds say little: name more before you rely on this.")
    return said


def _settings_of(result: StudyResult, name: str) -> Settings:
    """Return the settings of a row at its best values; at those of before if no run has ended."""
    row = result.study.row(name)
    return result.study.plan_run(row, row.seeds[0], result.best.get(name) or row.untuned).settings


def _faults_of(settings: Settings) -> list[Fault]:
    return [member.fault for member in settings.fleet.members if member.fault is not None]


def _question_of(settings: Settings) -> tuple[Any, ...]:
    """Return the settings that must be equal in two rows for comparing their methods by loss."""
    return settings.fleet.members, settings.task, settings.steps, settings.fleet.inner_steps


def _ended_well(result: StudyResult, row: str) -> bool:
    """Return whether every seed of the row ended with all its tokens; one whose run raised has no numbers."""
    ended = losses_of(result, row)
    return all(seed in ended and result.runs[row][seed]["finished"] for seed in result.study.row(row).seeds)


def _cannot_be_told(held: Comparison | None) -> bool:
    return held is not None and held.seeds > 1 and held.low <= 0 <= held.high


def describe_gating(runs: Runs, endless: bool = False) -> str:
    """Describe the gates' decisions on a fault over all seeds: shares of bad and healthy pushes gated, or "blind".

    endless  the fault lasts to the run's end, so that no cluster could be accepted again
    """
    bad = _sum_of(runs, "bad")
    if not bad:
        return "no bad push"
    seen, wrong = _sum_of(runs, "bad_gated") / bad, _sum_of(runs, "healthy_gated") / max(_sum_of(runs, "healthy"), 1)
    told = "blind" if seen <= BLIND else f"{seen:.0%} of {bad} bad pushes gated"
    after = [numbers["recovered_after"] for numbers in runs if numbers.get("bad")]
    back = "never accepted again" if None in after else f"accepted again after {max(after)} pushes"
    back = "its fault lasted to the end" if endless else back
    return f"{told}; {wrong:.1%} of {_sum_of(runs, 'healthy')} healthy ones gated; {back}"


def list_gating(result: StudyResult) -> list[str]:
    """Return a line for each row with bad data, and one for each cluster with gated healthy pushes."""
    lines = list[str]()
    for row in result.study.rows:
        runs = list(result.runs.get(row.name, {}).values())
        if any(numbers.get("bad") for numbers in runs):
            endless = any(fault.end >= 1.0 for fault in _faults_of(_settings_of(result, row.name)))
            lines.append(f"{row.name}: {describe_gating(runs, endless)}")
        clusters = sorted({cluster for numbers in runs for cluster in numbers.get("gated_by", ())})
        lines += [f"{row.name}: {_describe_cluster(runs, cluster)}" for cluster in clusters]
    return lines


def _describe_cluster(runs: Runs, cluster: str) -> str:
    """Describe which gates rejected a cluster's healthy pushes, with the first reason."""
    by = Counter[str]()
    for numbers in runs:
        by.update(numbers.get("gated_by", {}).get(cluster, {}))
    of = sum(numbers.get("healthy_of", {}).get(cluster, 0) for numbers in runs)
    first = next(n["gated_because"][cluster] for n in runs if cluster in n.get("gated_because", {}))
    gates = ", ".join(f"{gate} {count}" for gate, count in sorted(by.items()))
    return f"{by.total()} of {of} healthy pushes of {cluster} gated ({gates}), the first: {first}"


def _spell_gated(runs: Runs) -> str:
    healthy = _sum_of(runs, "healthy")
    return f"{_sum_of(runs, 'healthy_gated')} of {healthy}" if healthy else ""


def _spell_time(runs: Runs, compared: Runs) -> str:
    mine, theirs = (_sum_of(each, "lasted_s") / max(1, _sum_of(each, "tokens")) for each in (runs, compared))
    return f"{mine / theirs:.2f}" if theirs else ""


def _sum_of(runs: Runs, key: str) -> float:
    return sum(numbers.get(key) or 0 for numbers in runs)


def _mean_of(runs: Runs, key: str, spelling: str) -> str:
    """Return the mean over the runs that have this number."""
    known = [numbers[key] for numbers in runs if numbers[key] is not None]
    return format(mean(known), spelling) if known else ""
