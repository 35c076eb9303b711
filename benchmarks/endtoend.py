"""Four clusters end to end: Di-PS beside what a user would take instead, while the fourth link gets slower.

Each cluster is a process on a host of its own behind a shaped link (`tc tbf`); inner steps are slept (timed_rank.py),
so that two cores carry four clusters. A round of outer steps takes 10 s, of which push and pull take 4 % on a full
link; the fourth cluster, the slowest, has 1, 0.5, 0.2 or 0.1 of it. Steps take 1, 1.16, 1.33 and 1.5 times as long
("emulated"), or clusters have throughputs of 5.23 : 3.8 : 2.4 : 1 ("real"): the paper's two settings (di-ps §5.1).

    dp, sync, async       data parallel; DiLoCo; DiLoCo whose outer steps are all-reduces of whoever has arrived
    steps, aligned, full  Di-PS: a push each H inner steps; pushes that meet in a window; these with `overlap: full`

Counted are tokens a second (Figure 9), and the outer loop's standstill in seconds of all clusters and the bytes on
their links, both in a minute of training (Figure 11); with --plot also when each cluster trained (Figure 4). Of a cell
in which the machine made steps late by more than 1 % another try is made, at most two; then its row says so.

Source: docs/architecture.md#speed; papers: di-ps Figures 2a, 4, 9, 10, 11.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

from benchmarks.harness import Bench, commit, main
from benchmarks.lone_slave import equal_layers
from benchmarks.namespaces import LINK, End, missing, network
from benchmarks.serverless_rank import METHODS, ServerlessPlan
from benchmarks.timed_rank import Stretch, TimedPlan
from benchmarks.timed_run import TimedRun
from benchmarks.whole_run import SITE, Processes, free_port
from dips.protocol.manifest import BYTES_PER_PARAMETER
from dips.telemetry import timeline

SPEEDS = {"emulated": (1.0, 1 / 1.16, 1 / 1.33, 1 / 1.5), "real": (5.23, 3.8, 2.4, 1.0)}
SCALING_SPEEDS = (5.23, 4.5, 3.8, 3.1, 2.4, 1.7, 1.0)  # fastest first
DIPS = {
    "steps": {"pace": "steps", "overlap": "none"},
    "aligned": {"pace": "aligned", "overlap": "none"},
    "full": {"pace": "aligned", "overlap": "full"},
}
FOURTH = (1.0, 0.5, 0.2, 0.1)  # of the others' rate
TEN_RATES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
SLOWEST_STEP_S = 0.2
PARAMETERS, LAYERS, SLAVES = 1_000_000, 4, 2
SETTLING_ROUNDS, ROUNDS = 3, 4
MOST_LATE, MOST_TRIES = 0.01, 3
MINUTE_S = 60.0
T = TypeVar("T")
WITHIN_S = 240.0  # beyond its training, for a cell to end


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured at once."""

    method: str
    speeds: tuple[float, ...]  # throughputs, in any unit, of the clusters
    fourth: float = 1.0  # the last cluster's link, of the others' rate
    round_s: float = 10.0
    wire_share: float = 0.04  # of a round: a push and a pull on a full link
    rounds: int = ROUNDS
    settling: int = SETTLING_ROUNDS
    slowest_step_s: float = SLOWEST_STEP_S

    @property
    def clusters(self) -> tuple[str, ...]:
        return tuple(f"c{i}" for i in range(len(self.speeds)))

    @property
    def steps_s(self) -> dict[str, float]:
        """Seconds of an inner step of each cluster."""
        unit_s = self.slowest_step_s * min(self.speeds)
        return {name: unit_s / speed for name, speed in zip(self.clusters, self.speeds, strict=True)}

    @property
    def inner_steps(self) -> int:
        """H: an outer step of all together comes each `round_s`; of the slowest, where all wait for it."""
        steps_s = self.steps_s.values()
        rate = 1 / max(steps_s) if self.method in ("dp", "sync") else mean(1 / s for s in steps_s)
        return max(1, round(self.round_s * rate))

    @property
    def links(self) -> dict[str, float | None]:
        """Mbit/s of each host's link."""
        mbit = 2 * BYTES_PER_PARAMETER * PARAMETERS * 8 / (self.wire_share * self.round_s) / 1e6
        rates = {name: round(mbit, 3) for name in self.clusters}
        return {SITE: None, **rates, self.clusters[-1]: round(mbit * self.fourth, 3)}

    @property
    def settling_s(self) -> float:
        return self.settling * self.round_s

    @property
    def train_s(self) -> float:
        return self.settling_s + self.rounds * max(self.round_s, self.slowest_s)

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest cluster's inner steps between two outer steps."""
        return self.inner_steps * max(self.steps_s.values()) if self.method in ("async", "steps") else self.round_s

    def plan(self, name: str) -> TimedPlan:
        """What a cluster's rank is told."""
        return TimedPlan(len(self.clusters), LAYERS, PARAMETERS // LAYERS, self.steps_s[name], train_s=self.train_s)


@dataclass(frozen=True, slots=True)
class CellSeen:
    """What a cell showed after its first rounds, of each cluster."""

    stretches: dict[str, list[Stretch]]

    @property
    def tokens(self) -> float:
        """Inner steps a second of all clusters."""
        return sum(sum(s.steps for s in each) / _took(each) for each in self.stretches.values())

    @property
    def alone(self) -> float:
        """The same without an outer loop."""
        return sum(sum(s.steps for s in e) / sum(s.alone_s for s in e) for e in self.stretches.values())

    @property
    def late(self) -> float:
        """The share by which the machine made steps longer, at the worst cluster."""
        return max(sum(s.late_s for s in e) / sum(s.planned_s for s in e) for e in self.stretches.values())

    @property
    def standstill_s(self) -> float:
        """Of all clusters, in a minute."""
        return sum(MINUTE_S * sum(s.standstill_s for s in e) / _took(e) for e in self.stretches.values())

    @property
    def moved(self) -> float:
        """Bytes on the clusters' links, in a minute."""
        return sum(MINUTE_S * sum(s.moved for s in e) / _took(e) for e in self.stretches.values())

    @property
    def round_standstill_s(self) -> float:
        """Median over clusters and outer steps."""
        return median(s.standstill_s for each in self.stretches.values() for s in each)


def _took(stretches: Sequence[Stretch]) -> float:
    return sum(s.alone_s + s.standstill_s for s in stretches)


# ---- one cell ----------------------------------------------------------------------------------------------------


def _run_serverless(directory: Path, cell: Cell, hosts: Mapping[str, End], within_s: float) -> dict[str, list[Stretch]]:
    meeting = directory / "meeting"
    meeting.mkdir(parents=True)
    address = f"{hosts[cell.clusters[0]].ip}:{free_port()}"
    processes, begun = Processes(directory), []
    try:
        for rank, name in enumerate(cell.clusters):
            plan = ServerlessPlan(cell.plan(name), cell.method, rank, address, cell.inner_steps)
            words = [sys.executable, "-m", "benchmarks.serverless_rank", name, str(meeting), json.dumps(asdict(plan))]
            command = hosts[name].command("env", f"GLOO_SOCKET_IFNAME={LINK}", *words)
            begun.append((name, processes.start(name, command)))
        for name, process in begun:
            processes.wait(name, process, within_s)
    finally:
        processes.end()
    files = {name: meeting / f"{name}.jsonl" for name in cell.clusters}
    return {name: [Stretch(**line) for line in timeline.read_marks(file)] for name, file in files.items()}


def _run_dips(directory: Path, cell: Cell, hosts: Mapping[str, End], within_s: float) -> dict[str, list[Stretch]]:
    with make_run(directory, cell, hosts) as run:
        run.finish(within_s)
        return {name: run.stretches(name) for name in cell.clusters}


def make_run(directory: Path, cell: Cell, hosts: Mapping[str, End]) -> TimedRun:
    """The run of a cell by Di-PS."""
    way, plans = DIPS[cell.method], {name: cell.plan(name) for name in cell.clusters}
    keys = {"pace": {way["pace"]: cell.inner_steps}, "overlap": way["overlap"]}
    return TimedRun(directory, equal_layers(PARAMETERS, LAYERS), plans, keys, slaves=SLAVES, hosts=hosts)


def live(cell: Cell) -> CellSeen:
    """Run a cell once; return what came after its first rounds and before its time was over."""
    within_s = cell.train_s + WITHIN_S
    with tempfile.TemporaryDirectory(prefix="dips-bench-") as made, network(cell.links) as hosts:
        run = _run_serverless if cell.method in METHODS else _run_dips
        found = run(Path(made) / "run", cell, hosts, within_s)
    return CellSeen({name: counted(cell, stretches) for name, stretches in found.items()})


def counted(cell: Cell, stretches: list[Stretch]) -> list[Stretch]:
    """The stretches that began after the settling rounds and ended within the time."""
    counted, at_s = [], 0.0
    for stretch in stretches:
        if at_s >= cell.settling_s and at_s + stretch.alone_s + stretch.standstill_s <= cell.train_s:
            counted.append(stretch)
        at_s += stretch.alone_s + stretch.standstill_s
    if not counted:
        raise RuntimeError(f"{cell}: a cluster ended no outer step after the first {cell.settling_s:g} s")
    return counted


def run_until_quiet(bench: Bench, what: str, run: Callable[[], T], late: Callable[[T], float]) -> T:
    """Run a cell until the machine is quiet enough, some times at most; return its quietest run."""
    tries: list[T] = []
    for number in range(1, MOST_TRIES + 1):
        bench.say(f"{what}, try {number} of at most {MOST_TRIES}")
        tries.append(run())
        if late(tries[-1]) <= MOST_LATE:
            break
    return min(tries, key=late)


class Cells:
    """Measures cells, or reads those that the same commit has measured."""

    def __init__(self, bench: Bench, kept: Path | None) -> None:
        self._bench, self._commit = bench, commit()
        self._kept = kept if not self._commit.endswith("+") else None  # a tree with changes is another one tomorrow
        self.late: list[str] = []
        if self._kept is not None:
            self._kept.mkdir(parents=True, exist_ok=True)

    def measure(self, what: str, cell: Cell) -> CellSeen:
        """Measure a cell until the machine is quiet enough; `what` names it for people."""
        file = None if self._kept is None else self._kept / f"{self._name(cell)}.json"
        if file is not None and file.exists():
            rows = json.loads(file.read_text())
            return CellSeen({name: [Stretch(**s) for s in each] for name, each in rows.items()})
        best = run_until_quiet(self._bench, what, lambda: live(cell), lambda seen: seen.late)
        if best.late > MOST_LATE:
            self.late.append(f"{what}: {best.late:.1%}")
        elif file is not None and commit() == self._commit:
            file.write_text(json.dumps({name: [asdict(s) for s in each] for name, each in best.stretches.items()}))
        return best

    def _name(self, cell: Cell) -> str:
        return sha256(json.dumps([self._commit, asdict(cell)]).encode()).hexdigest()[:20]


# ---- parts ----------------------------------------------------------------------------------------------------------


def measure_methods(bench: Bench, cells: Cells) -> None:
    """All methods at each rate of the fourth link: Figures 9 and 11."""
    shares = FOURTH[::3] if bench.quick else FOURTH
    drawn: dict[str, dict[str, dict[float, CellSeen]]] = {}
    for setting, speeds in list(SPEEDS.items())[1:] if bench.quick else SPEEDS.items():
        drawn[setting] = {}
        for method in (*METHODS, *DIPS):
            drawn[setting][method] = {
                share: cells.measure(f"{setting}, {method}, fourth link {share:g}", Cell(method, speeds, share))
                for share in shares
            }
        _report_setting(bench, setting, drawn[setting], speeds)
    if bench.args.plot is not None:
        draw_methods(drawn, bench.args.plot)


def _report_setting(
    bench: Bench, setting: str, by_method: Mapping[str, Mapping[float, CellSeen]], speeds: Sequence[float]
) -> None:
    best = mean(speeds) / min(speeds)  # of synchronous DiLoCo's tokens, if all else cost nothing
    for method, by_share in by_method.items():
        for share, seen in by_share.items():
            where = f"{setting}, {method}, fourth link {share:g}"
            sync, apart = by_method["sync"][share].tokens, by_method["async"][share].tokens
            promised = {"aligned": 0.96 * best, "full": 0.98 * best}.get(method) if share == 1.0 else None
            against, of = ("synchronous DiLoCo", sync) if share > min(by_share) else ("asynchronous DiLoCo", apart)
            if share == min(by_share) and method in DIPS:
                promised = 1.0
            least = None if bench.quick else promised
            bench.row(f"tokens a second, {where}", seen.tokens, "1/s", against=against, of=of, least=least)
            bench.row(f"  of no outer loop, {where}", seen.tokens, "1/s", against="no outer loop", of=seen.alone)
            bench.row(f"  standstill in a minute, {where}", seen.standstill_s, "s")
            bench.row(f"  on the links in a minute, {where}", seen.moved, "B")
    slowest = min(by_method["async"])
    for method in DIPS:  # without overlap a cluster stands still for what its own link takes, ten times 0.4 s here
        least = 3.07 if method == "full" and not bench.quick else None
        bench.row(
            f"standstill of all, {setting}, {method}, fourth link {slowest:g}", by_method[method][slowest].standstill_s,
            "s", against="asynchronous DiLoCo", of=by_method["async"][slowest].standstill_s, least=least, less=True,
        )  # fmt: skip


def measure_transfers(bench: Bench, cells: Cells) -> None:
    """An outer step alone at ten rates of the fourth link: Figure 2a."""
    for share in TEN_RATES[::5] if bench.quick else TEN_RATES:
        took = {}
        for method in ("sync", "steps"):
            cell = Cell(method, (1.0,) * 4, share, round_s=2.0, wire_share=0.2, rounds=3)
            took[method] = cells.measure(f"transfers, {method}, fourth link {share:g}", cell).round_standstill_s
        bench.row(
            f"an outer step of equal clusters, fourth link {share:g}", took["steps"], "s", against="all-reduce",
            of=took["sync"], less=True,
        )  # fmt: skip


def measure_scaling(bench: Bench, cells: Cells) -> None:
    """One to seven clusters, fastest first, against training without an outer loop: Figure 10.

    A cluster takes the same steps in each cell, since each costs a call of `step`.
    """
    counts = (1, 3) if bench.quick else range(1, len(SCALING_SPEEDS) + 1)
    round_s = 20.0 if bench.quick else 100.0
    for count in counts:
        for method, least in (("aligned", 0.982), ("full", 0.993)):
            speeds = SCALING_SPEEDS[:count]
            slowest_step_s = SLOWEST_STEP_S * min(SCALING_SPEEDS) / min(speeds)
            cell = Cell(
                method, speeds, round_s=round_s, wire_share=0.015, rounds=2, settling=2, slowest_step_s=slowest_step_s
            )
            seen = cells.measure(f"{count} clusters, {method}", cell)
            promised = None if bench.quick or count < len(SCALING_SPEEDS) else least
            bench.row(
                f"tokens a second, {count} clusters, {method}", seen.tokens, "1/s", against="no outer loop",
                of=seen.alone, least=promised,
            )  # fmt: skip


PARTS = {"methods": measure_methods, "transfers": measure_transfers, "scaling": measure_scaling}


def measure(bench: Bench) -> None:
    """Each part that was asked for."""
    bench.skip_if(missing())
    cells = Cells(bench, bench.args.cells)
    for part in bench.args.part or ["methods"]:
        PARTS[part](bench, cells)
    for line in cells.late:
        bench.note(f"the machine was busy in all {MOST_TRIES} tries: steps ended late, {line}")
    bench.note("tokens a second: of all clusters, standstill of the outer loop included, the machine's lateness too")


# ---- pictures -------------------------------------------------------------------------------------------------------


def draw_methods(drawn: Mapping[str, Mapping[str, Mapping[float, CellSeen]]], directory: Path) -> None:
    """Draw Figures 9 and 11 for each setting, and Figure 4: when each cluster trained, at the slowest fourth link."""
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    for setting, by_method in drawn.items():
        shares = sorted(next(iter(by_method.values())), reverse=True)
        figure = Figure(figsize=(12, 4), layout="constrained")
        values = {
            "tokens a second": "tokens",
            "standstill of all, s a minute": "standstill_s",
            "bytes a minute": "moved",
        }
        for place, (title, attribute) in enumerate(values.items(), 1):
            axes = figure.add_subplot(1, 3, place)
            for number, (method, by_share) in enumerate(by_method.items()):
                at = [i + 0.13 * number for i in range(len(shares))]
                axes.bar(at, [getattr(by_share[share], attribute) for share in shares], 0.13, label=method)
            axes.set_xticks([i + 0.3 for i in range(len(shares))], [f"{share:g}" for share in shares])
            axes.set_xlabel("fourth link, of the others")
            axes.set_title(title)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
        figure.savefig(directory / f"endtoend-{setting}.png", dpi=120)
        _draw_timelines(by_method, shares[-1], directory / f"timelines-{setting}.png")


def _draw_timelines(by_method: Mapping[str, Mapping[float, CellSeen]], share: float, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 * len(by_method)), layout="constrained")
    for place, (method, by_share) in enumerate(by_method.items(), 1):
        axes = figure.add_subplot(len(by_method), 1, place)
        stretches = by_share[share].stretches
        begun = min(s.ended - s.alone_s - s.standstill_s for each in stretches.values() for s in each)
        for row, each in enumerate(stretches.values()):
            trained = [(s.ended - s.alone_s - s.standstill_s - begun, s.alone_s) for s in each]
            stood = [(s.ended - s.standstill_s - begun, s.standstill_s) for s in each]
            axes.broken_barh(trained, (row - 0.4, 0.8), color="C0")
            axes.broken_barh(stood, (row - 0.4, 0.8), color="C3")
        axes.set_yticks(range(len(stretches)), list(stretches))
        axes.set_title(f"{method}: training (blue) and standstill (red), fourth link {share:g}", fontsize=9)
    figure.savefig(file, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--part", action="append", choices=list(PARTS), help="methods by default; may be repeated")
    parser.add_argument("--plot", type=Path, metavar="DIRECTORY", help="draw Figures 4, 9 and 11 there")
    parser.add_argument(
        "--cells",
        type=Path,
        metavar="DIRECTORY",
        help="keep cells there, of a commit without changes; those kept are not measured",
    )


if __name__ == "__main__":
    main("endtoend", __doc__, measure, add_arguments)
