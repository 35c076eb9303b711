"""What a model learns in an asynchronous outer loop, against data parallel and synchronous DiLoCo at equal tokens.

Real inner steps of a small model on real text in virtual time, on the machinery of `dips study`. By itself it runs what
must hold, 61 runs of 6,000 inner steps, half an hour on two cores: the claims of docs/guides/choosing.md, on the seeds
on which they were looked at. With --fresh they are held on seeds that no run on record has used, and so are the gates
of docs/guides/gates.md; the bounds are printed first; an hour. With --full the methods are compared each at the best of
its own inner and outer rates, then one factor at a time, then some rows at three sizes, then inner rates by the number
of clusters, then one recipe wherever it is put, then gates under bad data: many hours, so every finished run is kept in
--output, and the same command goes on. --look takes a tenth of the claims' steps and promises nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence_bad import SEEN, bad_fleets, bad_rows, report_gates
from benchmarks.convergence_claims import (
    FEW,
    SHOWN,
    claim_rows,
    find_fresh_seeds,
    list_claims,
    report_claims,
)
from benchmarks.convergence_honest import FACTORY as HONEST_FACTORY
from benchmarks.convergence_honest import HONEST_BASE, HONEST_FLEETS, honest_rows, report_honest
from benchmarks.convergence_honest import SHOWN as SHOWN_HONEST
from benchmarks.convergence_rows import (
    BAD_STEPS,
    BASE,
    CLAIM_STEPS,
    FACTOR_ROWS,
    FACTOR_SEEDS,
    FLEETS,
    FULL_STEPS,
    LOOK_STEPS,
    METHOD_ROWS,
    RATE_ROWS,
    RECIPE_ROWS,
    SEEDS,
    SIZE_ROWS,
    STEADY,
    Rows,
)
from benchmarks.harness import Bench, main
from benchmarks.record import ROOT
from dips.study.report import SHOWN as COLUMNS
from dips.study.report import list_lines, losses_of, spell_table, write_csv
from dips.study.runner import ResultStore, StudyResult, run_study
from dips.study.study_file import DEFAULT_FACTORY, Study, StudyFile, make_study
from dips.transport.lane import available_cores

FACTORY = DEFAULT_FACTORY
KEPT = ROOT / "runs" / "convergence"
PARTS = ("methods", "factors", "sizes", "rates", "recipe", "bad", "honest")


def measure(bench: Bench) -> None:
    if bench.args.fresh or not (bench.args.full or bench.args.part):
        _hold_claims(bench)
        return
    chosen = bench.args.part or PARTS
    base = {**BASE, "inner_steps": 64, "steps": bench.args.steps or FULL_STEPS}
    if "methods" in chosen:
        _report_table(bench, _run_rows(bench, "methods", METHOD_ROWS, base, FLEETS), "synchronous")
    if "factors" in chosen:
        _report_table(bench, _run_rows(bench, "factors", FACTOR_ROWS, base, FLEETS, FACTOR_SEEDS), "synchronous")
    if "sizes" in chosen:
        _report_table(bench, _run_rows(bench, "sizes", SIZE_ROWS, base, FLEETS), "synchronous, 0.13 M")
    if "rates" in chosen:
        rates_base = {**BASE, "steps": CLAIM_STEPS}
        _report_table(bench, _run_rows(bench, "rates", RATE_ROWS, rates_base, FLEETS, [1]), "data parallel, 4 clusters")
    if "recipe" in chosen:
        recipe_base = {**BASE, "steps": FULL_STEPS}
        result = _run_rows(bench, "recipe", RECIPE_ROWS, recipe_base, FLEETS, FACTOR_SEEDS)
        _report_table(bench, result, "synchronous, 4")
    if "bad" in chosen:
        _hold_gates(bench, "bad", bad_rows())
    if "honest" in chosen:
        _hold_honest(bench, "honest", bench.args.seed or SHOWN_HONEST)


def _hold_claims(bench: Bench) -> None:
    """The claims of the guides, on seeds of --seed, fresh ones, or those that are shown; bounds are printed first."""
    fresh, look = bench.args.fresh, bench.args.look
    seeds = bench.args.seed or (find_fresh_seeds() if fresh else SHOWN)
    name = "fresh" if fresh else "claims"
    bench.say(f"seeds {', '.join(map(str, seeds))}; what is promised:")
    for claim in list_claims():
        bench.say(claim)
    steps = bench.args.steps or (LOOK_STEPS if look else CLAIM_STEPS)
    result = _run_rows(bench, name, claim_rows(seeds), {**BASE, "steps": steps}, FLEETS)
    _report_table(bench, result, "synchronous")
    if not look:
        report_claims(bench, result)
    if fresh:
        _hold_gates(bench, "fresh-bad", bad_rows(seeds[0], SEEN))
        _hold_honest(bench, "fresh-honest", seeds[:FEW])


def _hold_gates(bench: Bench, name: str, rows: Rows) -> None:
    base = {**BASE, "inner_steps": 64, **STEADY, "steps": bench.args.steps or BAD_STEPS}
    report_gates(bench, _run_rows(bench, name, rows, base, bad_fleets()), bench.args.output / f"{name}-gates.csv")


def _hold_honest(bench: Bench, name: str, seeds: Sequence[int]) -> None:
    result = _run_rows(bench, name, honest_rows(), HONEST_BASE, HONEST_FLEETS, seeds, HONEST_FACTORY)
    report_honest(bench, result, bench.args.output / f"{name}-gated.csv")


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
    ended, of = len(rows) - len(result.failed), float(len(rows))
    bench.row(f"{name}: rows of which no run failed", ended, "", against="all", of=of, least=1.0)
    bench.args.output.mkdir(parents=True, exist_ok=True)
    write_csv(result, bench.args.output / f"{name}.csv")
    return result


def _make_study(
    name: str, rows: Rows, base: dict[str, Any], fleets: dict[str, list[Any]], seeds: Sequence[int], factory: str
) -> Study:
    content = {"study": name, "factory": factory, "seeds": seeds, "fleets": fleets, "base": base, "rows": rows}
    return make_study(StudyFile.model_validate(content))


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
    parser.add_argument("--fresh", action="store_true", help="the claims and the gates on seeds that nobody has used")
    parser.add_argument("--seed", action="append", type=int, help="of the claims or the part honest; may be repeated")
    parser.add_argument("--steps", type=int, help="inner steps of a run, of all clusters together")
    parser.add_argument("--look", action="store_true", help=f"the claims with {LOOK_STEPS} steps: promises nothing")


if __name__ == "__main__":
    main("convergence", __doc__, measure, add_arguments)
