"""What the guides claim of learning, each with a bound that is printed before a run and held after it.

The guides are docs/guides/choosing.md and docs/guides/what-to-expect.md. Rows are of 6,000 inner steps at H 32, four
clusters 50 % apart, if their name does not say otherwise. A claim is held on the seeds of SHOWN, on which rows and
bounds were looked at, or with --fresh on seeds above all that any run on record has used; what does not hold there
leaves the guides.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np

from benchmarks.convergence_honest import CHOSEN
from benchmarks.convergence_rows import MUON, RDA, SHARE, THIRD_S, Rows, spell_clusters
from benchmarks.harness import Bench
from benchmarks.record import RESULTS
from dips.study.report import Comparison, compare_paired, losses_of
from dips.study.runner import StudyResult

SHOWN = (1, 2, 3, 4, 5)
FEW = 3  # seeds of a row that is no headline
FIVE_TIMES = {"fleet": "fivefold", "inner_steps": 64}
OURS = "aligned with share"  # the defaults
AS_MANY = "synchronous, as many effective clusters"  # between those of 1, 2 and 4, along their number's logarithm
COUNTS = {"synchronous, 1 cluster": 1, "synchronous, 2 clusters": 2, "synchronous": 4}
HEADLINES = ("synchronous", "aligned", OURS, "5.23 ×, H 64", "rda, 5.23 ×, H 64")
ROWS: Rows = {
    "synchronous": {"method": "synchronous"},
    **{row: {"method": "synchronous", "fleet": spell_clusters(count)} for row, count in COUNTS.items() if count < 4},
    "aligned": {},
    OURS: {"outer.step": "share"},
    "steps": {"pace": "steps"},
    "steps with share, windows of 60 s": {**SHARE, "timing.window_s": THIRD_S},
    "naive, outer lr 0.35": {"method": "naive", "outer.lr": 0.35, "outer.momentum": 0.0},
    "5.23 ×": {"fleet": "fivefold"},
    "5.23 ×, H 64": FIVE_TIMES,
    "rda, 5.23 ×, H 64": {**FIVE_TIMES, **RDA},
    "H 8": {"inner_steps": 8},
    "rda, H 8": {"inner_steps": 8, **RDA},
    "Muon": MUON,
    "int8 both ways": {"codec": "int8", "pull_codec": "int8"},
    "int4 pushes": {"codec": "int4"},
    "overlap": {"overlap": True},
}


@dataclass(frozen=True, slots=True)
class Claim:
    """That a row's loss is at most, or at least, a share above another's (below 0: below it)."""

    row: str
    against: str
    above: float
    least: bool = False  # at least so much above, not at most
    surely: bool = False  # by the end of the paired 95 % interval, not by the mean

    def __str__(self) -> str:
        side, end = "at least" if self.least else "at most", "end of the interval" if self.surely else "mean"
        return f"{self.row}: loss {side} {self.above:+.1%} from that of {self.against}, {end}"

    def figure(self, held: Comparison) -> float:
        """The share above that is held against the bound."""
        if not self.surely:
            return held.mean
        return held.low if self.least else held.high


CLAIMS = (
    Claim("aligned", "synchronous", 0.01, surely=True),
    Claim(OURS, "synchronous", 0.01, surely=True),
    Claim("steps", "aligned", 0.02, least=True),
    Claim("steps with share, windows of 60 s", "synchronous", 0.025),
    Claim("naive, outer lr 0.35", "synchronous", 0.03, least=True),
    Claim("aligned", AS_MANY, 0.01),
    Claim("5.23 ×", AS_MANY, 0.02),
    Claim("rda, 5.23 ×, H 64", "5.23 ×, H 64", -0.002),
    Claim("rda, H 8", "H 8", 0.02, least=True),
    Claim("Muon", "aligned", -0.02),
    Claim("int8 both ways", "aligned", 0.01),
    Claim("int4 pushes", "aligned", 0.01),
    Claim("overlap", "aligned", 0.03),
    Claim("synchronous, 2 clusters", "synchronous, 1 cluster", 0.005, least=True),
    Claim("synchronous", "synchronous, 2 clusters", 0.02, least=True),
)
IDEAL: Mapping[str, float] = {"aligned": 0.97, OURS: 0.97}  # least tokens a second, of what all clusters make alone


def claim_rows(seeds: Iterable[int]) -> Rows:
    """The rows, with all of these seeds for a headline and the first of them for others."""
    all_seeds = list(seeds)
    return {name: {**keys, "seeds": all_seeds[: None if name in HEADLINES else FEW]} for name, keys in ROWS.items()}


def list_claims() -> list[str]:
    """A sentence for each claim, to be printed before the run."""
    ideal = [f"{row}: at least {least} of the tokens a second of all clusters alone" for row, least in IDEAL.items()]
    return [*map(str, CLAIMS), *ideal]


def report_claims(bench: Bench, result: StudyResult) -> None:
    """A row for each claim whose rows were run; it does not hold where no seed of both ended below its first loss."""
    for claim in CLAIMS:
        against = COUNTS if claim.against == AS_MANY else {claim.against}
        if not {claim.row, *against} <= result.runs.keys():
            continue
        held = compare_paired(losses_of(result, claim.row), _losses_against(result, claim))
        if held is None:
            bench.note(f"{claim}: no seed of both ended well")
            bench.row(str(claim), 0.0, "×", against="the bound", least=1.0, less=not claim.least)
            continue
        bench.note(f"{claim.row} against {claim.against}: {held}")
        bench.row(
            str(claim), 1.0 + claim.figure(held), "×", against="the bound", of=1.0 + claim.above, least=1.0,
            less=not claim.least,
        )  # fmt: skip
    for row, least in IDEAL.items():
        reached = [numbers["of_ideal"] for numbers in result.runs.get(row, {}).values()]
        if reached:
            bench.row(
                f"{row}: tokens a second of all alone", min(reached), "×", against="the bound", of=least, least=1.0
            )


def _losses_against(result: StudyResult, claim: Claim) -> dict[int, float]:
    if claim.against != AS_MANY:
        return losses_of(result, claim.against)
    counts, known = [log(count) for count in COUNTS.values()], [losses_of(result, row) for row in COUNTS]
    effective = {seed: numbers["effective_clusters"] for seed, numbers in result.runs.get(claim.row, {}).items()}
    return {
        seed: float(np.interp(log(number), counts, [losses[seed] for losses in known]))
        for seed, number in effective.items()
        if all(seed in losses for losses in known)
    }


def find_fresh_seeds(folder: Path = RESULTS) -> list[int]:
    """As many seeds as SHOWN, above all that a run on record has used, or that are known as looked at."""
    used = {*SHOWN, *CHOSEN}
    for path in folder.glob("convergence-*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            used |= {int(row["seed"]) for row in csv.DictReader(file) if row.get("seed")}
    return [max(used) + 1 + number for number in range(len(SHOWN))]
