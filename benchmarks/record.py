"""The record of what was measured: benchmarks/results/NAME.json, and benchmarks/README.md, a table made from it.

A file has one list of runs, the newest last. A run says when, at which commit and on what machine it was measured, its
rows, and notes for the reader. `kind` is "benchmark" where `python -m benchmarks NAME --log` wrote it, and "by-hand"
where a person did: figures of simulations, chaos tests, studies and whole sessions. Rows that do not hold stay.

`python -m benchmarks --table` writes the table anew; `tests/unit/benchmarks/test_record.py` fails while it is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = ROOT / "benchmarks" / "README.md"
Machine = Mapping[str, Any]  # `cpu`, `cores`, versions of packages …; no name of a host and no path

HEAD = """\
# What was measured

`python -m benchmarks --table` writes this file from [results](results): change it there. For each claim and machine it
has the newest row. [results](results) has the older ones, those without a bound, and the notes of each run: how bytes
are counted, what the limit was where a bound is missed. Figures of different machines are not to be compared; ratios
are.

* **ratio**: the figure over that of what it is compared with. **bound**: what was asked of the ratio or, where there is
  none, of the figure.
* **by hand**: a person ran it and wrote it down, mostly beside other work. Others were written by
  `python -m benchmarks NAME --log`.
* A commit with + had changes that were not committed; no commit: none was written down.

`python -m benchmarks.NAME --help` says what a benchmark measures. All runs of `convergence` are in results as CSV.

* `python -m benchmarks report --out DIRECTORY [--quick]` writes a report with plots: each figure and table of the four
  papers beside what was measured here, with command, commit, machine, seed and interval; or why it cannot be had. A
  report that was interrupted goes on where it was, as long as the commit is the same.
* `python -m benchmarks goodput` plays [goodput_trace.json](goodput_trace.json), 62 faults in 30 minutes, against eight
  clusters of ours, of plain gloo with restart and of torchft: tokens in θ over those of the undisturbed run, and
  whether θ is the reference's. Other systems can play the same faults: a line says when, what, who and for how long.
* `python -m benchmarks peers` measures an outer round of torchft, hivemind and Flower beside ours, and what a killed
  worker costs. Both need root (network namespaces, tmpfs), and pip installs each peer into an environment of its own
  below `~/.cache/dips-bench` (`--environments DIRECTORY`). A peer that cannot be had is a row that says why.
"""
COLUMNS = ("in", "claim", "figure", "compared with", "ratio", "bound", "holds", "machine", "measured")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One figure. Its name and `against` say which claim it is of, so nothing that was measured stands in them.

    against what it is compared with, a name; of: that one's figure, in the same unit, if it was measured
    ratio   of what it is compared with, so turned that more is better: value/of, or of/value if `less`
    least   it holds if ratio >= least; None where nothing is promised of the ratio
    bound   what is promised, in words, where it is not promised of a ratio
    """

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    least: float | None = None
    holds: bool = True
    less: bool = False
    bound: str = ""
    of: float | None = None

    @property
    def promised(self) -> str:
        """The bound as the table shows it; empty where nothing is promised."""
        if self.bound or self.least is None:
            return self.bound
        return f"≤ {1 / self.least:.3g}" if self.less else f"≥ {self.least:.3g}"

    @property
    def compared(self) -> str:
        """What it is compared with, with its figure."""
        return self.against if self.of is None else f"{self.against}: {shown(self.of, self.unit)}"

    @property
    def times(self) -> float | None:
        """The figure over that of what it is compared with."""
        if self.of:
            return self.value / self.of
        return 1 / self.ratio if self.ratio and self.less else self.ratio


@dataclass(frozen=True, slots=True)
class BenchRun:
    """What one benchmark, or one person, found at one time on one machine."""

    date: str
    commit: str
    kind: Literal["benchmark", "by-hand"]
    machine: Machine
    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...] = ()
    quick: bool = False
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Newest:
    """A row of the table, with the run that it is of."""

    benchmark: str
    run: BenchRun
    row: BenchRow = field(repr=False)


def read_runs(path: Path) -> list[BenchRun]:
    """Return the runs of a file, the newest last; KeyError or TypeError for a field that is missing or not known."""
    if not path.exists():
        return []
    return [to_run(made) for made in json.loads(path.read_text())]


def append_runs(results: Iterable[tuple[str, Mapping[str, Any]]], folder: Path = RESULTS) -> None:
    """Append the reports of benchmarks, as `harness.report` makes them, to their files; a report has no date yet."""
    for name, report in results:
        path = folder / f"{name}.json"
        runs = [*read_runs(path), to_run({"date": date.today().isoformat(), "kind": "benchmark", **report})]
        path.write_text(spell_runs(runs))


def spell_runs(runs: Sequence[BenchRun]) -> str:
    """The text of a file: a line for each row and note, so that a change shows what has changed."""
    return "[\n" + ",\n".join(map(_spell_run, runs)) + "\n]\n"


def make_table(folder: Path = RESULTS) -> str:
    """The text of benchmarks/README.md."""
    lines = [HEAD, f"| {' | '.join(COLUMNS)} |", "|---|---|--:|---|--:|---|---|---|---|"]
    for path in sorted(folder.glob("*.json")):
        lines += [f"| {' | '.join(_cells(newest))} |" for newest in _pick_newest(path.stem, read_runs(path))]
    return "\n".join(lines) + "\n"


def name_machine(machine: Machine) -> str:
    """A machine as the table names it. Runs whose machine has one name are rows of one claim."""
    parts = (str(machine.get("cpu", "CPU not noted")), f"{machine['cores']} cores", machine.get("accelerator"))
    return ", ".join(part for part in parts if part)


def shown(value: float, unit: str) -> str:
    """A number as a person reads it: bytes and seconds with a prefix, others with four digits."""
    if unit in ("B/s", "B"):
        scale, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= s), (1.0, ""))
        return f"{value / scale:.3g} {prefix}{unit}"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
    return f"{value:.4g} {unit}".strip() if abs(value) < 1e4 else f"{value:,.0f} {unit}".strip()


def _pick_newest(name: str, runs: Sequence[BenchRun]) -> list[_Newest]:
    """For each claim and machine the newest row of a full run, or of a quick one where there is no other.

    A claim is a row that promises something, or one that a person wrote down.
    """
    found: dict[tuple[str, str, str], _Newest] = {}
    for run in sorted(runs, key=lambda run: not run.quick):  # stable: quick ones first, and by age within
        for row in run.rows:
            if row.promised or run.kind == "by-hand":
                found[row.name, row.against, name_machine(run.machine)] = _Newest(name, run, row)
    return list(found.values())


def _cells(newest: _Newest) -> tuple[str, ...]:
    run, row = newest.run, newest.row
    ratio = "" if row.times is None else f"{row.times:.3g}"
    holds = "" if not row.promised else ("yes" if row.holds else "**no**")
    notes = [run.date, f"`{run.commit}`" if run.commit else "", "by hand" if run.kind == "by-hand" else ""]
    measured = ", ".join(note for note in (*notes, "quick" if run.quick else "") if note)
    link = f"[{newest.benchmark}](results/{newest.benchmark}.json)"
    cells = (link, row.name.strip(), shown(row.value, row.unit), row.compared, ratio, row.promised, holds)
    return tuple(cell.replace("|", "\\|") for cell in (*cells, name_machine(run.machine), measured))


def to_run(made: Mapping[str, Any]) -> BenchRun:
    """Read a run as a file has it; KeyError or TypeError for a field that is missing or not known."""
    rows = tuple(BenchRow(**row) for row in made["rows"])
    return BenchRun(**{**made, "rows": rows, "notes": tuple(made.get("notes", ()))})


def _spell_run(run: BenchRun) -> str:
    def spell(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    head = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in ("rows", "notes")}
    lines = [f'  "{key}": {spell(value)},' for key, value in head.items()]
    lines += ['  "rows": [', ",\n".join(f"   {spell(_without_defaults(row))}" for row in run.rows), "  ],"]
    lines += ['  "notes": [', ",\n".join(f"   {spell(note)}" for note in run.notes), "  ]"]
    return "\n".join([" {", *(line for line in lines if line), " }"])


def _without_defaults(row: BenchRow) -> dict[str, Any]:
    defaults = {f.name: f.default for f in fields(BenchRow)}
    return {key: _round(value) for key, value in asdict(row).items() if value != defaults[key]}


def _round(value: object) -> object:
    """Six digits: no measurement has more."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
