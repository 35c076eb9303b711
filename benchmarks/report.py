"""A report with plots: each figure and table of the four papers beside what was measured here, or why it cannot be.

    python -m benchmarks report --out DIRECTORY [--quick]

FIGURES is the table: what a figure shows, the cell (a benchmark and its words) that measures it, and which of the
cell's rows are its result. A cell is run as a process of its own and its report kept under a cache folder, by commit:
a report that was interrupted goes on where it was, Ctrl-C ends what runs. Cells that take longer than the time that is
left (10 minutes with --quick, else 2 hours), and those that only runs of days give, are taken from benchmarks/results
with their commit and date. Nothing is appended there; `python -m benchmarks NAME --log` does that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import commit, end_in_order, end_process
from benchmarks.record import RESULTS, ROOT, BenchRow, BenchRun, name_machine, read_runs, shown, to_run

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dips-bench" / "report"
FULL_S, QUICK_S = 2 * 3600.0, 600.0
MOST_ROWS = 12  # of a figure; more are counted
OUT = Path("runs") / "report"
REPORT = Path("REPORT").with_suffix(".md")  # below --out; it is no document of the repository

# ---- what is in the papers --------------------------------------------------------------------------------------

PAPERS = {"Di-PS": (17, 2), "EDiT": (10, 7), "SpanTrain": (13, 2), "Zorse": (12, 5)}  # figures and tables of each
DIAGRAM = "a diagram: nothing is measured"
GIVEN = "a description of their setting: nothing is measured"
LOSSES = "losses at 350 M parameters and more: not on CPUs; nearest: {}"
GPUS = "throughput of GPUs: none here; nearest: {}"
NPUS = "their production run on NPUs; nearest: {}"
SIZES = "on links and NPUs that are not here; `dips simulate table2 --plots DIR` draws it, rates fitted to their pushes"


@dataclass(frozen=True, slots=True)
class ReportCell:
    """What one process measures: `python -m benchmarks NAME WORDS`. Seconds are those of two quiet cores.

    quick_s, full_s  how long it takes with --quick and without; None: it is only read from benchmarks/results
    """

    name: str
    words: tuple[str, ...] = ()
    quick_s: float | None = None
    full_s: float | None = None

    @property
    def command(self) -> str:
        return " ".join(("python -m benchmarks", self.name, *self.words))


TRANSPORT = ReportCell("transport", (), 60, 180)
ABLATION = ReportCell("ablation", (), 90, 180)
TRANSFERS = ReportCell("endtoend", ("--part", "transfers"), 90, 1500)
METHODS = ReportCell("endtoend", ("--part", "methods"), None, None)  # 48 cells of 70 s and more, 3 hours by itself
SCALING = ReportCell("endtoend", ("--part", "scaling"), None, 6500)
PAPER_FORMULAS = ReportCell("planning", ("--part", "papers"), 120, 600)
SCHEDULES = ReportCell("planning", ("--part", "schedules"), 60, 600)
SEARCH = ReportCell("planning", ("--part", "search"), None, 600)
MESH = ReportCell("mesh", (), None, 400)
ADAPTER = ReportCell("adapter", ("--part", "cut"), None, 1800)
CONVERGENCE = ReportCell("convergence")
GATES = ReportCell("gates")  # `convergence --part bad`, written down
SIMULATION = ReportCell("simulation")  # `dips simulate month`, written down
GOODPUT = ReportCell("goodput")
PEERS = ReportCell("peers", (), 100, 600)


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure or table of a paper, or a number that the field compares by.

    rows  a pattern of the names of those rows that are its result; theirs: the paper's number; peers: of others
    seed  what is drawn; interval: what stands behind a figure
    why   what of it cannot be had here, and then the rows are the nearest that can
    """

    paper: str
    label: str
    shows: str
    cell: ReportCell | None = None
    rows: str = ""
    theirs: str = ""
    peers: str = ""
    seed: str = "none is drawn"
    interval: str = "one run; medians within"
    why: str = ""


def _only(paper: str, label: str, shows: str, why: str) -> PaperFigure:
    return PaperFigure(paper, label, shows, why=why)


SEEDS = "1, 2, 3; rows were chosen on others"
FIGURES = (
    _only("Di-PS", "Figure 1", "two-stage optimization", DIAGRAM),
    PaperFigure("Di-PS", "Figure 2a", "an outer step while the fourth link slows", TRANSFERS, r"an outer step of equal",
                "the all-reduce slows more; no number", interval="median of clusters and rounds"),
    PaperFigure("Di-PS", "Figure 2b", "naive asynchronous training fails", CONVERGENCE, r"naive asynchronous",
                "fails to converge", seed=SEEDS, interval="95 % over seeds", why=LOSSES.format("0.1 M parameters")),
    _only("Di-PS", "Figure 3", "overview", DIAGRAM),
    PaperFigure("Di-PS", "Figure 4", "timelines of four architectures", METHODS, r"standstill in a minute",
                "a diagram", why="a diagram; ours are measured: endtoend --part methods --plot DIRECTORY"),
    PaperFigure("Di-PS", "Figure 5", "schedule of transfers", ABLATION, r"planned order", "a diagram",
                interval="median of 5, of 3 if quick", why="a diagram; its gain is measured"),
    PaperFigure("Di-PS", "Figure 6", "ZeroMQ against gRPC", TRANSPORT, r"(push|pull), \d+ KiB, \d lanes?$", "1.74 ×",
                interval="median of 5, of 3 if quick"),
    PaperFigure("Di-PS", "Figure 7", "asynchronous converges as synchronous", CONVERGENCE,
                r"(long: (aligned with share|pace steps|data parallel|the paper)|short: aligned at 50)",
                "comparable", seed=SEEDS, interval="95 % over seeds", why=LOSSES.format("0.1 M parameters")),
    PaperFigure("Di-PS", "Figure 8", "devices over 33 days", SIMULATION, r"33 days: devices trained",
                "up to 10,122 NPUs", seed="of the month, printed", interval="one month",
                why=NPUS.format("Table 1's failures in the simulated world")),
    PaperFigure("Di-PS", "Figure 9", "end to end, two kinds of fleets", METHODS, r"^tokens a second",
                "1.23–1.38 × and 2.87–2.93 × of synchronous DiLoCo; 1.00–1.16 × of asynchronous",
                why="inner steps are slept, links shaped"),
    PaperFigure("Di-PS", "Figure 10", "weak scaling, 1 to 7 clusters", SCALING,
                r"^tokens a second, \d clusters", "98.2–98.6 % of ideal", why="inner steps are slept, links shaped"),
    PaperFigure("Di-PS", "Figure 11", "outer communication overhead", METHODS,
                r"standstill (of all|in a minute)|on the links", "1.06–3.07 × less than asynchronous DiLoCo"),
    PaperFigure("Di-PS", "Figure 12", "inner steps H", CONVERGENCE, r"H (48|64|8)\b", "64 and 128 alike, others worse",
                seed=SEEDS, interval="95 % over seeds", why=LOSSES.format("0.1 M parameters")),
    PaperFigure("Di-PS", "Figure 13", "what optimizations of a slave bring", ABLATION,
                r"pipeline|lanes|planned order|all together",
                "1.41 × communication, 1.49 × serialization, 1.16 × together", interval="median of 5, of 3 if quick"),
    _only("Di-PS", "Figure 14", "loss and throughput of the 100 B run",
          NPUS.format("`dips plot` for losses, `dips simulate month --plots DIR` for throughput")),
    _only("Di-PS", "Figure 15", "operations of a slave in a day", SIZES + "; idle > 95 % in the paper"),
    _only("Di-PS", "Figure 16", "network of a slave in six hours", SIZES + "; 16.4 Gbit/s at the peak in the paper"),
    PaperFigure("Di-PS", "Figure 17", "downtime by cause", SIMULATION, r"33 days(: devices|, 43)", "a figure only",
                seed="of the month, printed", interval="one month", why=NPUS.format("the simulated month")),
    PaperFigure("Di-PS", "Table 1", "failures in 33 days", SIMULATION, r"33 days", "43 failures; 4 of Di-PS itself",
                seed="of the month, printed", interval="one month", why="played in the simulated world"),
    _only("Di-PS", "Table 2", "seconds of push, update, pull", SIZES + "; 60–195, 110, 67–135 s in the paper"),
    _only("EDiT", "Figure 1", "the method", DIAGRAM),
    PaperFigure("EDiT", "Figure 2", "the penalty", GATES, r"one of four bad|two of nine", "a diagram",
                seed="in the notes of results/gates.json", interval="counts",
                why="a diagram; what it catches is measured"),
    _only("EDiT", "Figure 3", "synchronous and asynchronous", DIAGRAM),
    PaperFigure("EDiT", "Figure 4", "loss and perplexity by method", CONVERGENCE,
                r"long: (EDiT|A-EDiT|data parallel|post-local)", "EDiT at or below data parallel", seed=SEEDS,
                interval="95 % over seeds", why=LOSSES.format("0.1 M parameters")),
    PaperFigure("EDiT", "Figure 5", "stragglers and slow links", PAPER_FORMULAS, r"EDiT Table 6",
                "as Table 6", interval="a formula", why=GPUS.format("Table 6's rates predicted from its first row")),
    PaperFigure("EDiT", "Figure 6", "learning rates by workers; elastic", CONVERGENCE, r"long: (EDiT|A-EDiT)$",
                "EDiT's best rate does not move; 4.5 and 2.6 % better when elastic", seed=SEEDS,
                interval="95 % over seeds", why="no rows at other rates or numbers of workers yet; nearest: at four"),
    PaperFigure("EDiT", "Figure 7", "parts of the penalty", GATES, r"bad pushes gated|healthy pushes",
                "each part helps", seed="in the notes of results/gates.json", interval="counts",
                why=LOSSES.format("what each gate catches at 0.1 M")),
    _only("EDiT", "Figure 8", "four sizes", LOSSES.format("none")),
    PaperFigure("EDiT", "Figure 9", "a profile of the synchronization", MESH, r"a sync adds",
                "19 ms of EDiT, 160 ms of post-local SGD", interval="median",
                why=GPUS.format("our mesh's sync on CPUs")),
    _only("EDiT", "Figure 10", "learning rates by workers, losses", LOSSES.format("none; see Figure 6")),
    _only("EDiT", "Table 1", "public benchmarks of 1 B", LOSSES.format("none")),
    _only("EDiT", "Table 2", "speeds by size", GPUS.format("none; 211 TFLOPS of EDiT and 200 of data parallel at 7 B")),
    _only("EDiT", "Table 3", "sizes", GIVEN),
    _only("EDiT", "Table 4", "hyperparameters", GIVEN),
    _only("EDiT", "Table 5", "public benchmarks by size", LOSSES.format("none")),
    PaperFigure("EDiT", "Table 6", "TFLOPS with stragglers and slow links", PAPER_FORMULAS, r"EDiT Table 6",
                "115 to 226 of data parallel, 214 to 237 of A-EDiT", interval="a formula",
                why=GPUS.format("its rates predicted from its first row")),
    _only("EDiT", "Table 7", "constants of the theorem", GIVEN),
    _only("SpanTrain", "Figure 1", "the environment", GIVEN),
    _only("SpanTrain", "Figure 2", "methods in a real environment", GPUS.format("none")),
    _only("SpanTrain", "Figure 3", "challenges", DIAGRAM),
    _only("SpanTrain", "Figure 4", "workflow", DIAGRAM),
    _only("SpanTrain", "Figure 5", "device groups", DIAGRAM),
    PaperFigure("SpanTrain", "Figure 6", "compact zero-bubble pipeline", SCHEDULES, r"compact_zb|zb_h1|gpipe",
                "a diagram", seed="of the instances, fixed", interval="mean and worst of the instances",
                why="a diagram; its makespan is held against proved optima"),
    _only("SpanTrain", "Figure 7", "asymmetric parallelism", DIAGRAM),
    _only("SpanTrain", "Figure 8", "the adapter", DIAGRAM),
    PaperFigure("SpanTrain", "Figure 9", "throughput by method", PAPER_FORMULAS,
                r"SpanTrain (setting \d: over|setting 1: over|batch)", "2.05–2.11 and 1.61–1.76 × of FSDP",
                interval="a prediction", why=GPUS.format("planned and simulated with published rates")),
    _only("SpanTrain", "Figure 10", "time to an accuracy", "accuracies of CV and NLP models on GPUs: not on CPUs"),
    PaperFigure("SpanTrain", "Figure 11", "planners: search time", SEARCH, r"search",
                "1.49–2.85 ×; 43 to 286 s of others' search", "Alpa 286 s, Metis 230 s, Asteroid 197 s (ResNet101)",
                interval="one run", why=GPUS.format("our search's time")),
    PaperFigure("SpanTrain", "Figure 12", "a changing network", ADAPTER, r"rate cut by",
                "1.35 and 1.49 × by adapting micro-batches", interval="median",
                why="slept layers on shaped links of one machine"),
    PaperFigure("SpanTrain", "Figure 13", "numbers of devices", PAPER_FORMULAS, r"SpanTrain Fig\. 13",
                "2.79 × of FSDP on the mean", interval="a prediction",
                why=GPUS.format("planned and simulated with published rates")),
    _only("SpanTrain", "Table 1", "where GPUs are", GIVEN),
    _only("SpanTrain", "Table 2", "what GPUs can do", GIVEN),
    _only("Zorse", "Figure 1", "tensor against data parallelism", GPUS.format("none")),
    _only("Zorse", "Figure 2", "bandwidth on AWS", GIVEN),
    _only("Zorse", "Figure 3", "pipelines with ZeRO-2 and ZeRO-3", GPUS.format("none")),
    _only("Zorse", "Figure 4", "interleaved pipelining", DIAGRAM),
    _only("Zorse", "Figure 5", "interleaved optimizer updates", DIAGRAM),
    _only("Zorse", "Figure 6", "heterogeneous pipelines", DIAGRAM),
    _only("Zorse", "Figure 7", "the planner", DIAGRAM),
    _only("Zorse", "Figure 8", "adding GPUs", GPUS.format("none")),
    _only("Zorse", "Figure 9", "mixed against uniform", GPUS.format("none")),
    _only("Zorse", "Figure 10", "ministages", GPUS.format("none")),
    _only("Zorse", "Figure 11", "parts of it", GPUS.format("none")),
    PaperFigure("Zorse", "Figure 12", "the planner's time", SEARCH, r"zorse-.*search", "under 3 minutes",
                interval="one run"),
    _only("Zorse", "Table 1", "features of systems", GIVEN),
    PaperFigure("Zorse", "Table 2", "memory and communication", PAPER_FORMULAS, r"Zorse Table 2", "formulas",
                interval="a formula"),
    _only("Zorse", "Table 3", "GPUs", GIVEN),
    _only("Zorse", "Table 4", "clusters", GIVEN),
    PaperFigure("Zorse", "Table 5", "throughput and utilization", PAPER_FORMULAS, r"Zorse Table 5", "33.9–63.4 % HFU",
                interval="a prediction", why=GPUS.format("planned and simulated with published rates")),
    PaperFigure("beyond", "goodput", "tokens in θ under faults", GOODPUT, r"goodput|θ is", "–",
                "Decoupled DiLoCo 88 %, ft-diloco 97.7 %, torchft 82.3 %, on traces of their own",
                seed="of the trace, in benchmarks/goodput_trace.json"),
    PaperFigure("beyond", "peers", "an outer round beside peers'", PEERS, r".", "–", "in the rows",
                interval="median of clusters and rounds"),
)  # fmt: skip


# ---- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellRun:
    """The reports of a cell, the newest last, or why there is none; `recorded`: of benchmarks/results, not of today."""

    runs: tuple[BenchRun, ...] = ()
    recorded: bool = False
    missing: str = ""


class ReportCells:
    """Runs cells, or reads those that the same commit has run; what no time is left for comes from the record."""

    def __init__(
        self, cache: Path, quick: bool, over: float, say: Callable[[str], None], results: Path = RESULTS
    ) -> None:
        """`over`: when no other cell begins that would not end by then, of time.monotonic()."""
        self._cache, self._quick, self._over, self._say, self._results = cache, quick, over, say, results
        self._seen: dict[ReportCell, CellRun] = {}

    def find(self, cell: ReportCell) -> CellRun:
        """The newest report of a cell that can be had now."""
        if cell not in self._seen:
            self._seen[cell] = self._find(cell)
        return self._seen[cell]

    def _find(self, cell: ReportCell) -> CellRun:
        file, takes_s = self._cache / f"{self._key(cell)}.json", cell.quick_s if self._quick else cell.full_s
        if file.exists():
            return CellRun((to_run(json.loads(file.read_text())),))
        why = "it takes too long for this report"
        if takes_s is not None and time.monotonic() + takes_s <= self._over:
            self._say(f"{cell.command}, about {takes_s:g} s")
            report, why = self._measure(cell)
            if report is not None:
                if not report["commit"].endswith("+"):  # a tree with changes is another one tomorrow
                    self._cache.mkdir(parents=True, exist_ok=True)
                    part = file.with_suffix(".part")
                    part.write_text(json.dumps(report))
                    part.rename(file)
                return CellRun((to_run(report),))
            self._say(f"{cell.command}: {why}")
        return CellRun(tuple(read_runs(self._results / f"{cell.name}.json")), recorded=True, missing=why)

    def _measure(self, cell: ReportCell) -> tuple[dict[str, Any] | None, str]:
        file = self._cache / f"{os.getpid()}.json"
        self._cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", f"benchmarks.{cell.name}", "--json", str(file), *cell.words]
        process = subprocess.Popen(
            [*command, *(["--quick"] if self._quick else [])], cwd=ROOT, stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes to us; we end it in order
        )  # fmt: skip
        try:
            code = process.wait(max(1.0, self._over - time.monotonic()))
            report = json.loads(file.read_text()) if file.exists() else None
        except subprocess.TimeoutExpired:
            return None, "not over in time"
        finally:
            end_process(process)
            file.unlink(missing_ok=True)
        if report is None or not report["rows"]:
            return None, f"ended with {code} and no rows"
        return {"date": time.strftime("%Y-%m-%d"), "kind": "benchmark", **report}, ""

    def _key(self, cell: ReportCell) -> str:
        return sha256(json.dumps([commit(), cell.name, cell.words, self._quick]).encode()).hexdigest()[:20]


# ---- the report -----------------------------------------------------------------------------------------------------


def read_result(figure: PaperFigure, runs: Sequence[BenchRun]) -> tuple[BenchRun, list[BenchRow]] | None:
    """The newest run that has rows which are a figure's result, with these."""
    for run in reversed(runs):
        rows = [row for row in run.rows if re.search(figure.rows, row.name.strip())]
        if rows:
            return run, rows
    return None


def write_report(figures: Iterable[PaperFigure], found: Mapping[ReportCell, CellRun], quick: bool) -> str:
    """The report's text."""
    lines = [
        "# The papers' figures and tables, and ours",
        "",
        f"`python -m benchmarks report{' --quick' if quick else ''}` wrote this at `{commit()}`.",
        "Figures of different machines are not to be compared; ratios are. **recorded**: not run for this report, but",
        "read from benchmarks/results.",
        "",
    ]
    paper = ""
    for figure in figures:
        if figure.paper != paper:
            paper = figure.paper
            lines += [f"## {paper}", ""]
        lines += [f"### {figure.label}: {figure.shows}", "", *_describe(figure, found), ""]
    return "\n".join(lines)


def _describe(figure: PaperFigure, found: Mapping[ReportCell, CellRun]) -> list[str]:
    lines = [f"* {word}: {text}" for word, text in (("paper", figure.theirs), ("peers", figure.peers)) if text]
    lines += [f"* not as in the paper: {figure.why}"] if figure.why else []
    if figure.cell is None:
        return lines
    cell = found[figure.cell]
    lines.append(f"* command: `{figure.cell.command}`")
    result = read_result(figure, cell.runs)
    if result is None:
        return [*lines, f"* **not measured**: {cell.missing or 'the run has no such rows'}; nothing is recorded"]
    run, rows = result
    when = f"{'**recorded** ' if cell.recorded else ''}{run.date}, commit `{run.commit or 'not noted'}`"
    lines += [
        f"* {when}{', quick' if run.quick else ''}; machine: {name_machine(run.machine)}",
        f"* seed: {figure.seed}; interval: {figure.interval}",
        "", "| ours | figure | compared with | ratio | bound | holds |", "|---|--:|---|--:|---|---|",
    ]  # fmt: skip
    lines += [_row(row) for row in rows[:MOST_ROWS]]
    more = len(rows) - MOST_ROWS
    return [*lines, *(["", f"… and {more} more rows."] if more > 0 else [])]


def _row(row: BenchRow) -> str:
    ratio = "" if row.times is None else f"{row.times:.3g}"
    holds = "" if not row.promised else ("yes" if row.holds else "**no**")
    cells = (row.name.strip(), shown(row.value, row.unit), row.compared, ratio, row.promised, holds)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def draw_figures(figures: Iterable[PaperFigure], found: Mapping[ReportCell, CellRun], directory: Path) -> list[Path]:
    """Draw each figure whose rows have ratios, as bars; return the files. Without matplotlib none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    files = []
    for figure in figures:
        result = None if figure.cell is None else read_result(figure, found[figure.cell].runs)
        rows = [] if result is None else [row for row in result[1] if row.times][:MOST_ROWS]
        if not rows:
            continue
        drawing = Figure(figsize=(9, 1 + 0.35 * len(rows)), layout="constrained")
        axes = drawing.add_subplot()
        axes.barh([row.name.strip()[:60] for row in reversed(rows)], [row.times or 0.0 for row in reversed(rows)])
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel("of what it is compared with")
        axes.set_title(f"{figure.paper}, {figure.label}: {figure.shows}", fontsize=10)
        file = directory / f"{figure.paper}-{figure.label}.png".lower().replace(" ", "-")
        drawing.savefig(file, dpi=110)
        files.append(file)
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="cells with --quick, under ten minutes")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIRECTORY", help=f"default: {OUT}")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIRECTORY", help=f"of cells, by commit: {CACHE}")
    parser.add_argument("--minutes", type=float, help="in which cells may run; 0: all are read from the record")
    args = parser.parse_args(argv)
    end_in_order()
    console = Console(stderr=True)
    limit_s = (QUICK_S if args.quick else FULL_S) if args.minutes is None else 60 * args.minutes
    over = time.monotonic() + 0.95 * limit_s
    cells = ReportCells(args.cache, args.quick, over, lambda text: console.print(f"[dim]{text}[/dim]"))
    try:
        found = {figure.cell: cells.find(figure.cell) for figure in FIGURES if figure.cell is not None}
    except KeyboardInterrupt:
        console.print(f"interrupted: what was measured is in {args.cache}, and the next report goes on from there")
        return 130
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / REPORT).write_text(write_report(FIGURES, found, args.quick))
    drawn = draw_figures(FIGURES, found, args.out)
    fresh = sum(1 for cell in found.values() if cell.runs and not cell.recorded)
    console.print(f"{args.out / REPORT} and {len(drawn)} plots; {fresh} of {len(found)} cells are of this commit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
