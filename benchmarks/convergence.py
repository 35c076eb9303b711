"""What a model learns in an asynchronous outer loop, against data parallel and synchronous DiLoCo at equal tokens.

Real inner steps of a small model on real text in virtual time, on the machinery of `dips study`. The quick table, 31
runs of 6,000 inner steps, some 15 minutes on two cores, is what must hold. With `--full` the methods are compared each
at the best of its own inner learning rates, then one factor at a time, then one recipe wherever it is put, then gates
under bad data: hours, so every finished run is kept in --output, and the same command goes on. `--look` is the quick
table with a tenth of the steps, and promises nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence_bad import bad_fleets, bad_rows, report_gates
from benchmarks.convergence_honest import FACTORY as HONEST_FACTORY
from benchmarks.convergence_honest import HONEST_BASE, HONEST_FLEETS, SHOWN, honest_rows, report_honest
from benchmarks.convergence_rows import (
    BAD_STEPS,
    BASE,
    FACTOR_ROWS,
    FACTOR_SEEDS,
    FLEETS,
    FULL_STEPS,
    LOOK_STEPS,
    METHOD_ROWS,
    QUICK,
    QUICK_STEPS,
    RECIPE_ROWS,
    SEEDS,
    STEADY,
    Rows,
)
from benchmarks.harness import Bench, main
from benchmarks.record import ROOT
from dips.study.report import SHOWN as COLUMNS
from dips.study.report import compare_row, list_lines, losses_of, spell_table, write_csv
from dips.study.runner import ResultStore, StudyResult, run_study
from dips.study.study_file import DEFAULT_FACTORY, Study, StudyFile, make_study
from dips.transport.lane import available_cores

FACTORY = DEFAULT_FACTORY
KEPT = ROOT / "runs" / "convergence"
PARTS = ("methods", "factors", "recipe", "bad", "honest")
NO_WORSE, SHARE_NO_WORSE, RDA_BETTER, NAIVE_WORSE = 0.005, 0.02, 0.01, 0.5  # nats for the last
THROUGHPUT = 0.97  # of what all clusters make alone


def measure(bench: Bench) -> None:
    if not (bench.args.full or bench.args.part):
        steps = bench.args.steps or (LOOK_STEPS if bench.args.look else QUICK_STEPS)
        result = _run_rows(bench, "quick", QUICK, {**BASE, "steps": steps}, FLEETS)
        _report_quick(bench, result, promises=not bench.args.look)
        return
    chosen = bench.args.part or PARTS
    base = {**BASE, "inner_steps": 64, "steps": bench.args.steps or FULL_STEPS}
    if "methods" in chosen:
        _report_table(bench, _run_rows(bench, "methods", METHOD_ROWS, base, FLEETS), "synchronous")
    if "factors" in chosen:
        _report_table(bench, _run_rows(bench, "factors", FACTOR_ROWS, base, FLEETS, FACTOR_SEEDS), "synchronous")
    if "recipe" in chosen:
        recipe_base = {**BASE, "steps": FULL_STEPS}
        result = _run_rows(bench, "recipe", RECIPE_ROWS, recipe_base, FLEETS, FACTOR_SEEDS)
        _report_table(bench, result, "synchronous, 4")
    if "bad" in chosen:
        bad_base = {**base, **STEADY, "steps": bench.args.steps or BAD_STEPS}
        result = _run_rows(bench, "bad", bad_rows(), bad_base, bad_fleets())
        report_gates(bench, result, bench.args.output / "gates.csv")
    if "honest" in chosen:
        seeds = bench.args.seed or SHOWN
        result = _run_rows(bench, "honest", honest_rows(), HONEST_BASE, HONEST_FLEETS, seeds, HONEST_FACTORY)
        report_honest(bench, result, bench.args.output / "honest.csv")


def _run_rows(
    bench: Bench,
    name: str,
    rows: Rows,
    base: dict[str, Any],
    fleets: dict[str, list[Any]],
    seeds: Sequence[int] = SEEDS,
    factory: str = FACTORY,
) -> StudyResult:
    study = _make_study(name, rows, base, fleets, seeds, factory)
    store = ResultStore(bench.args.output / "runs", factory)
    bench.say(f"{name}: {study.run_count} runs; finished ones are kept in {bench.args.output}")
    result = run_study(study, store, bench.args.workers or available_cores(), bench.say)
    for row, error in result.failed.items():
        bench.note(f"{row}: failed: {error}")
    bench.args.output.mkdir(parents=True, exist_ok=True)
    write_csv(result, bench.args.output / f"{name}.csv")
    return result


def _make_study(
    name: str, rows: Rows, base: dict[str, Any], fleets: dict[str, list[Any]], seeds: Sequence[int], factory: str
) -> Study:
    content = {"study": name, "factory": factory, "seeds": seeds, "fleets": fleets, "base": base, "rows": rows}
    return make_study(StudyFile.model_validate(content))


def _report_quick(bench: Bench, result: StudyResult, promises: bool) -> None:
    """The rows that must hold, as far as their options are there."""
    _report_table(bench, result, "synchronous")
    if not promises:
        return
    _hold_no_worse(bench, result, "aligned, 50 %", NO_WORSE)
    _hold_no_worse(bench, result, "steps with share in windows of 60 s, 50 %", SHARE_NO_WORSE)
    _hold_below(bench, result, "aligned with rda, 5.23 ×, H 64", "aligned, 5.23 ×, H 64", 1.0 - RDA_BETTER)
    _hold_below(bench, result, "aligned with Muon, 5.23 ×", "data parallel", 1.0)
    _hold_throughput(bench, result, "aligned, 50 %")
    naive = result.runs.get("naive asynchronous, 50 %")
    if naive:
        good, losses = losses_of(result, "synchronous"), losses_of(result, "naive asynchronous, 50 %")
        worse = min((losses[seed] - good[seed] for seed in losses), default=float("inf"))
        bench.row("naive: worse than synchronous by", worse, "nats", against="at least", of=NAIVE_WORSE, least=1.0)


def _hold_no_worse(bench: Bench, result: StudyResult, row: str, bound: float) -> None:
    held = compare_row(result, row)
    if held is not None:
        text = f"{row}: of synchronous's loss, at the upper end of the interval"
        bench.row(text, 1.0 + held.high, "×", against="at most", of=1.0 + bound, least=1.0, less=True)


def _hold_throughput(bench: Bench, result: StudyResult, row: str) -> None:
    """Of the tokens a second that all clusters make alone: mean(1/t)·max(t) times those of synchronous steps."""
    reached = [numbers["of_ideal"] for numbers in result.runs.get(row, {}).values()]
    if reached:
        bench.row(
            f"{row}: tokens a virtual second", min(reached), "×", against="of the ideal", of=1.0, least=THROUGHPUT
        )


def _hold_below(bench: Bench, result: StudyResult, row: str, other: str, share: float) -> None:
    held = compare_row(result, row, other)
    if held is not None:
        bench.row(
            f"{row}: of the loss of {other}", 1.0 + held.mean, "×", against="at most", of=share, least=1.0, less=True
        )


def _report_table(bench: Bench, result: StudyResult, against: str) -> None:
    """A row for each mean loss, and the whole table as a note."""
    compared = losses_of(result, against)
    for row in result.study.rows:
        losses = losses_of(result, row.name)
        shared = [seed for seed in losses if seed in compared]
        if losses:
            of = mean(compared[seed] for seed in shared) if shared else None
            bench.row(row.name, mean(losses.values()), "nats", against=against, of=of, less=True)
        else:
            bench.note(f"{row.name}: {result.failed.get(row.name, 'diverged with every seed')}")
    heads = ("row", "best", "loss", f"against {against}", *COLUMNS)
    for line in spell_table([heads, *list_lines(result)]):
        bench.note(line)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, help="runs at a time; by default, one for each core")
    parser.add_argument("--output", type=Path, default=KEPT, help=f"where finished runs are kept; default {KEPT}")
    parser.add_argument("--full", action="store_true", help=f"{', '.join(PARTS)}: hours; a killed one goes on")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part of --full; may be repeated")
    parser.add_argument(
        "--seed", action="append", type=int, help="of the part honest, in the place of those that are shown"
    )
    parser.add_argument("--steps", type=int, help="inner steps of a run, of all clusters together")
    parser.add_argument(
        "--look", action="store_true", help=f"the quick table with {LOOK_STEPS} steps: promises nothing"
    )


if __name__ == "__main__":
    main("convergence", __doc__, measure, add_arguments)
