"""Bad data in the middle third of a run, under every list of gates: one of four clusters, two of nine, and all at once.

A run is held against one in which the bad clusters were *away* for that third, and beside it against the run that never
had them. Neither is clean: at equal accepted tokens fewer clusters end lower by themselves, so a gate that keeps out
early is flattered by the one, and the other is flattered itself. A run of `all` is held against the same clusters in
health.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.convergence_rows import HALF, Rows, make_fleet, spread
from benchmarks.harness import Bench
from dips.study.report import BLIND, losses_of, spell_table
from dips.study.runner import Numbers, StudyResult

KINDS = ("nan", "inf", "zeros", "lr_x100", "frozen", "shuffled", "sign")
ALL = "all"
BAD_ONES = {"one of four": 1, "two of nine": 2}  # of the fleet: the fastest ones
GATES: dict[str, dict[str, Any]] = {  # what is to see bad data; first those that promise something (SEEN)
    "all of ours": {"penalty.gates": ["dips", "direction", "loss", "replay"]},
    "dips": {"penalty.gates": ["dips"]},
    "none": {"penalty.gates": []},
    "edit": {"penalty.gates": ["edit"]},
    "dips-paper": {"penalty.gates": ["dips-paper"]},
}
SEEN = {"dips": ("nan", "inf", "zeros", "lr_x100"), "all of ours": KINDS}  # what a list promises to see
GATED, PASSED, LOSS = 0.9, 0.99, 1.01  # of bad pushes after the first; of healthy ones; against the run without
HEADS = ("bad", "kind", "gates", "bad gated", "healthy gated", "loss", "to away", "to without", "back after")


def bad_fleets() -> dict[str, list[Any]]:
    """Each kind in each fleet; the same clusters without the bad ones, with these away for a while, and in health."""
    four, nine = make_fleet(*HALF), spread(9, 0.5)
    fleets: dict[str, list[Any]] = {f"{ALL}, healthy": four}
    for where, whole in (("one of four", four), ("two of nine", nine)):
        count = BAD_ONES[where]
        bad, others = whole[:count], whole[count:]
        away = {"leaves": 1 / 3, "returns": 1 / 3 + _share_of(others, whole) / 3}
        fleets[f"{where}, without"] = others
        fleets[f"{where}, away"] = [*({**m, **away} for m in bad), *others]
        fleets |= {f"{where}, {kind}": [*({**m, "fault": kind} for m in bad), *others] for kind in KINDS}
    return fleets | {f"{ALL}, {kind}": [{**m, "fault": kind} for m in four] for kind in KINDS}


def _share_of(others: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]]) -> float:
    """Of the tokens of a third of the run's time: what is accepted in it without the bad ones."""
    return float(sum(1 / m["step_s"] for m in others) / sum(1 / m["step_s"] for m in whole))


def bad_rows(seed: int = 1, lists: Iterable[str] = tuple(GATES)) -> Rows:
    """Every kind of bad data under these lists of gates, and what they are held against under `dips`."""
    return {
        f"{gates}: {fleet}": {"fleet": fleet, "inner_steps": 16, **GATES[gates], "seeds": [seed]}
        for gates in lists
        for fleet in bad_fleets()
        if fleet.partition(", ")[2] in KINDS or gates == "dips"
        if gates != "none" or fleet.startswith("one of four")
    }


@dataclass(frozen=True, slots=True)
class BadLine:
    """What a list of gates made of a kind of bad data in a fleet."""

    where: str
    kind: str
    gates: str
    numbers: Numbers
    loss: float | None  # None: diverged
    to_away: float | None  # that loss over the one of the run in which the bad ones were away; of `all`, in health
    to_without: float | None

    @property
    def gated(self) -> float:
        """Of the bad pushes after each cluster's first."""
        return float(self.numbers["bad_gated"] / max(self.numbers["bad"], 1))

    @property
    def healthy_gated(self) -> float:
        return float(self.numbers["healthy_gated"] / max(self.numbers["healthy"], 1))

    def spell(self) -> tuple[str, ...]:
        """A line of the table."""
        seen = "blind" if self.gated <= BLIND else f"{self.gated:.0%} of {self.numbers['bad']}"
        healthy = f"{self.healthy_gated:.1%} of {self.numbers['healthy']}"
        late = "" if self.numbers["finished"] else ", not finished"
        loss = "diverged" if self.loss is None else f"{self.loss:.3f}"
        after = self.numbers["recovered_after"]
        back = ("never" if after is None else str(after)) + ", readmitted" * bool(self.numbers["readmitted"])
        shares = ("" if share is None else f"{share - 1:+.1%}" for share in (self.to_away, self.to_without))
        return (self.where, self.kind, self.gates, seen, healthy, loss + late, *shares, back)


def list_bad(result: StudyResult) -> list[BadLine]:
    """By fleet and kind, so that lists of gates stand under each other."""
    names = [(where, kind, gates) for where in (*BAD_ONES, ALL) for kind in KINDS for gates in GATES]
    return [_make_line(result, *name) for name in names if result.runs.get("{2}: {0}, {1}".format(*name))]


def _make_line(result: StudyResult, where: str, kind: str, gates: str) -> BadLine:
    row = f"{gates}: {where}, {kind}"
    seed, numbers = next(iter(result.runs[row].items()))
    loss = losses_of(result, row).get(seed)

    def hold(other: str) -> float | None:
        held = losses_of(result, f"dips: {where}, {other}").get(seed)
        return loss / held if loss is not None and held is not None else None

    return BadLine(where, kind, gates, numbers, loss, hold("healthy" if where == ALL else "away"), hold("without"))


def report_gates(bench: Bench, result: StudyResult, path: Path) -> None:
    """The table, as notes and as a file, and the rows that hold or do not: of each the worst kind."""
    lines = list_bad(result)
    table = [HEADS, *(line.spell() for line in lines)]
    for text in spell_table(table) if lines else ["no run with bad data has ended"]:
        bench.note(text)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table)
    for gates, kinds in SEEN.items():
        for where in BAD_ONES:
            _hold_list(bench, f"{gates}, {where}", [x for x in lines if _is_held(x, gates, where, kinds)])
    _hold_survival(bench, [line for line in lines if line.where == ALL and line.gates in SEEN])


def _is_held(line: BadLine, gates: str, where: str, kinds: Iterable[str]) -> bool:
    return line.gates == gates and line.where == where and line.kind in kinds


def _hold_list(bench: Bench, name: str, lines: Sequence[BadLine]) -> None:
    if not lines:
        return
    gated, passed = min(x.gated for x in lines), 1.0 - max(x.healthy_gated for x in lines)
    bench.row(f"{name}: bad pushes gated after the first", gated, "×", against="at least", of=GATED, least=1.0)
    bench.row(f"{name}: healthy pushes that pass", passed, "×", against="at least", of=PASSED, least=1.0)
    costs = [line.to_away for line in lines if line.to_away is not None]
    if costs:
        text = f"{name}: of the loss with the bad ones away"
        bench.row(text, max(costs), "×", against="at most", of=LOSS, least=1.0, less=True)


def _hold_survival(bench: Bench, lines: Sequence[BadLine]) -> None:
    """All at once: θ is a number below where it began, and what is healthy again is accepted again."""
    if lines:
        survived = [x for x in lines if x.loss is not None and x.numbers["recovered_after"] is not None]
        share = len(survived) / len(lines)
        bench.row("all clusters at once: runs that come back", share, "×", against="at least", of=1.0, least=1.0)
