"""A simulated run's seconds, fitted to real ones; with --check, how far it is from cells that no fit has seen.

Four clusters train behind shaped links as in `endtoend`, with pace `aligned`; the agents' timelines say when each
pushed, waited and pulled. From the cells of FITTED come the seconds of a transfer as a fixed part and a share of the
link's rate, the latency of messages, and what a rank stands still for besides. `dips simulate` then plays each cell,
and its tokens a second and its standstill are set beside those measured: residuals, and for the cells of CHECKED a
prediction, held to OFF.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, linear_regression, median

from benchmarks import endtoend
from benchmarks.endtoend import PARAMETERS, SLAVES, Cell, CellSeen, counted
from benchmarks.harness import Bench, main
from benchmarks.namespaces import missing, network
from benchmarks.timed_rank import Stretch
from dips.config import Shared
from dips.protocol.manifest import BYTES_PER_PARAMETER
from dips.study.sized_run import HOUR_S, SimulatedClusters, SimulatedRun, SizedReport, simulate_sizes
from dips.telemetry import timeline

METHOD = "aligned"
FITTED = (("emulated", 1.0), ("emulated", 0.2))  # speeds, the fourth link's share
CHECKED = (("emulated", 0.5), ("emulated", 0.1), ("real", 1.0), ("real", 0.2))
OFF = {"tokens a second": 0.05, "standstill in a minute": 0.2}  # at most, of what was measured
PHASES = {"push": "push", "wait": "window", "pull": "pull"}  # in whose lines NAME_begin and NAME_end stand
SIMULATED_H = 0.2
MOST_LATENCY_S, HALVINGS = 0.1, 7
MARGIN_S = 0.5  # between a version's install and the agent's line about it
WIDE_GBIT = 100.0  # of the slaves' links, which are not shaped


@dataclass(frozen=True, slots=True)
class CellTimes:
    """One cell as measured: its stretches, and of each cluster the median seconds of a push, a wait and a pull."""

    seen: CellSeen
    phases: dict[str, dict[str, float]]

    @property
    def rest_s(self) -> float:
        """Standstill of an outer step beyond its push, wait and pull: freezing, installing, asking. A mean."""
        rests = [
            fmean(stretch.standstill_s for stretch in stretches) - sum(self.phases[name].values())
            for name, stretches in self.seen.stretches.items()
        ]
        return fmean(rests)


@dataclass(frozen=True, slots=True)
class TransferFit:
    """Seconds of a transfer that would take `nominal_s` at the link's rate: fixed_s + nominal_s / share."""

    fixed_s: float
    share: float

    def seconds(self, nominal_s: float) -> float:
        return self.fixed_s + nominal_s / self.share


@dataclass(frozen=True, slots=True)
class Fit:
    """All that the simulation is told of a real run, beside what its file says."""

    push: TransferFit
    pull: TransferFit
    rest_s: float
    latency_s: float  # of a message; short orders and transactions take as long


# ---- one cell -------------------------------------------------------------------------------------------------------


def live(cell: Cell) -> CellTimes:
    """Run a cell once."""
    with (
        tempfile.TemporaryDirectory(prefix="dips-bench-") as made,
        network(cell.links) as hosts,
        endtoend.make_run(Path(made) / "run", cell, hosts) as run,
    ):
        run.finish(cell.train_s + endtoend.WITHIN_S)
        stretches = {name: counted(cell, run.stretches(name)) for name in cell.clusters}
        phases = {name: _median_phases(run.timeline(name), stretches[name]) for name in cell.clusters}
    return CellTimes(CellSeen(stretches), phases)


def _median_phases(path: Path, stretches: Sequence[Stretch]) -> dict[str, float]:
    """Of those that ended while these stretches lasted, but for a pull, which the last of them may end with."""
    first = stretches[0].ended - stretches[0].alone_s - stretches[0].standstill_s
    marks = [mark for mark in timeline.read_marks(path) if first <= mark["at"] <= stretches[-1].ended + MARGIN_S]
    found = {}
    for phase, name in PHASES.items():
        began, took = None, []
        for mark in marks:
            if mark["kind"] == f"{name}_begin":
                began = mark["at"]
            elif mark["kind"] == f"{name}_end" and began is not None:
                took.append(mark["at"] - began)
                began = None
        found[phase] = median(took)
    return found


def measure_cell(bench: Bench, what: str, cell: Cell) -> CellTimes:
    """Run a cell when the machine is quiet enough, or say that it was not."""
    best = endtoend.run_until_quiet(bench, what, lambda: live(cell), lambda times: times.seen.late)
    if best.seen.late > endtoend.MOST_LATE:
        bench.note(f"the machine was busy in all tries: steps ended {best.seen.late:.1%} late, {what}")
    return best


# ---- the fit --------------------------------------------------------------------------------------------------------


def fit_cells(cells: Mapping[Cell, CellTimes]) -> Fit:
    """Fit transfers by least squares over clusters, and the latency by halves until waits are as long as measured."""
    push, pull = (_fit_transfer(cells, phase) for phase in ("push", "pull"))
    fit = Fit(push, pull, fmean(times.rest_s for times in cells.values()), MOST_LATENCY_S)
    least_s = 0.0
    for _ in range(HALVINGS):
        middle = replace(fit, latency_s=(least_s + fit.latency_s) / 2)
        if fmean(_lacking_wait_s(cell, times, middle) for cell, times in cells.items()) > 0:
            least_s = middle.latency_s
        else:
            fit = middle
    return fit


def _lacking_wait_s(cell: Cell, times: CellTimes, fit: Fit) -> float:
    """Return by how much a measured wait is longer than a simulated one, as means over clusters."""
    simulated = fmean(cluster.wait_s for cluster in play(cell, fit).clusters)
    return fmean(phases["wait"] for phases in times.phases.values()) - simulated


def _fit_transfer(cells: Mapping[Cell, CellTimes], phase: str) -> TransferFit:
    both = [(cell, times, name) for cell, times in cells.items() for name in cell.clusters]
    line = linear_regression(
        [nominal_s(cell, name) for cell, _, name in both], [times.phases[name][phase] for _, times, name in both]
    )
    return TransferFit(line.intercept, 1.0 / line.slope)


def nominal_s(cell: Cell, name: str) -> float:
    """Seconds of the model's bytes at the rate of a cluster's link."""
    mbit = cell.links[name]
    assert mbit is not None
    return BYTES_PER_PARAMETER * PARAMETERS * 8 / (mbit * 1e6)


# ---- the simulation -------------------------------------------------------------------------------------------------


def play(cell: Cell, fit: Fit) -> SizedReport:
    """Simulate a cell. What a rank does besides counts as a part of its push."""
    clusters = tuple(
        SimulatedClusters(
            name=name, step_s=cell.steps_s[name], push_s=fit.push.seconds(nominal_s(cell, name)) + fit.rest_s,
            pull_s=fit.pull.seconds(nominal_s(cell, name)),
        )
        for name in cell.clusters
    )  # fmt: skip
    run = SimulatedRun(
        parameters=PARAMETERS, hours=SIMULATED_H, clusters=clusters, slaves=SLAVES, slave_gbit=WIDE_GBIT,
        inner_steps=cell.inner_steps, heartbeat_s=Shared.model_fields["heartbeat_s"].default, latency_s=fit.latency_s,
    )  # fmt: skip
    return simulate_sizes(run)


def predict(cell: Cell, report: SizedReport) -> dict[str, float]:
    """Return by OFF's names what was simulated, after the rounds in which a cell settles."""
    lasted_s = report.hours * HOUR_S - cell.settling_s
    names = {member.cluster: member.kind for member in report.timeline.clusters}
    stands_s = dict.fromkeys(cell.clusters, 0.0)
    for span in report.timeline.spans:
        if span.begin_s >= cell.settling_s:
            stands_s[names[span.cluster]] += span.end_s - span.begin_s
    shares = {name: stands / lasted_s for name, stands in stands_s.items()}
    return {
        "tokens a second": sum((1.0 - shares[name]) / cell.steps_s[name] for name in cell.clusters),
        "standstill in a minute": endtoend.MINUTE_S * sum(shares.values()),
    }


# ---- the benchmark --------------------------------------------------------------------------------------------------


def measure(bench: Bench) -> None:
    """Fit, and show what remains; with --check also what was predicted of other cells."""
    bench.skip_if(missing())
    fitted = _name_cells(FITTED[1:] if bench.quick else FITTED)
    times = {cell: measure_cell(bench, what, cell) for what, cell in fitted.items()}
    fit = fit_cells(times)
    bench.note("fit: " + ", ".join(f"{key} {value}" for key, value in asdict(fit).items()))
    for what, cell in fitted.items():
        _report_cell(bench, f"{what}, fitted", cell, times[cell], fit, held=False)
    for what, cell in _name_cells(CHECKED).items() if bench.args.check else ():
        _report_cell(bench, what, cell, measure_cell(bench, what, cell), fit, held=not bench.quick)


def _name_cells(chosen: Iterable[tuple[str, float]]) -> dict[str, Cell]:
    return {f"{name}, fourth link {share:g}": Cell(METHOD, endtoend.SPEEDS[name], share) for name, share in chosen}


def _report_cell(bench: Bench, what: str, cell: Cell, times: CellTimes, fit: Fit, held: bool) -> None:
    measured = {"tokens a second": times.seen.tokens, "standstill in a minute": times.seen.standstill_s}
    for name, value in predict(cell, play(cell, fit)).items():
        unit = "1/s" if name == "tokens a second" else "s"
        bench.row(f"{name}, {what}: simulated", value, unit, against="measured", of=measured[name])
        off = max(1e-6, abs(value / measured[name] - 1.0))
        bench.row(f"  off by, {name}, {what}", off, "", against=f"{OFF[name]:.0%}", of=OFF[name],
                  least=1.0 if held else None, less=True)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether other cells are predicted, too."""
    parser.add_argument("--check", action="store_true", help="predict cells that the fit has not seen, and hold them")


if __name__ == "__main__":
    main("calibrate", __doc__, measure, add_arguments)
