"""benchmarks convergence: its rows run on the machinery of studies, and say what holds."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import convergence, convergence_bad, convergence_claims, convergence_rows
from benchmarks.harness import Bench
from dips.study.report import Comparison
from dips.study.runner import StudyResult
from dips.study.study_file import StudyFile, make_study
from tests.unit.study.in_place import compute_in_place
from tests.unit.study.tiny import FACTORY

SHORT = {**convergence_rows.BASE, "inner_steps": 4, "inner.lr": 0.02}
SHORT.pop("task.batch")  # of another factory
CLAIMED = ("synchronous", "aligned", "steps")


@pytest.fixture(name="bench")
def made_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A small task, few rows and few steps; all in this process."""
    compute_in_place(monkeypatch)
    monkeypatch.setattr(convergence, "FACTORY", FACTORY)
    monkeypatch.setattr(convergence, "BASE", SHORT)
    monkeypatch.setattr(convergence, "STEADY", {})
    args = argparse.Namespace(
        look=False, full=False, fresh=False, seed=None, steps=96, part=None, workers=1, output=tmp_path
    )
    return Bench("convergence", True, args, Console(quiet=True))


@pytest.mark.slow
def test_claims_are_printed_first_and_then_held(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are held against those of the rows that claims name, seed by seed."""
    rows = {name: keys for name, keys in convergence_claims.claim_rows([1, 2]).items() if name in CLAIMED}
    monkeypatch.setattr(convergence, "claim_rows", lambda seeds: rows)
    said = list[str]()
    monkeypatch.setattr(Bench, "say", lambda _, text: said.append(text))
    convergence.measure(bench)
    assert said[1] == "aligned: loss at most +1.0% from that of synchronous, end of the interval"
    assert next(i for i, text in enumerate(said) if text.startswith("claims: ")) > len(convergence_claims.CLAIMS)
    assert set(CLAIMED) <= {row.name for row in bench.rows}
    held = {row.name.partition(":")[0] for row in bench.rows if row.least is not None}
    assert held == {"claims", "aligned", "steps"}
    assert (bench.args.output / "claims.csv").exists()


def test_a_row_that_failed_does_not_hold(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claims are not held against anything: they would have been kept by a crash."""
    failed = {"steps": "seed 1: MemoryError"}
    monkeypatch.setattr(convergence, "run_study", lambda study, *_: StudyResult(study, failed=failed))
    rows: convergence_rows.Rows = {"aligned": {}, "steps": {"pace": "steps"}}
    convergence._run_rows(bench, "claims", rows, {**SHORT, "steps": 96}, convergence_rows.FLEETS)
    assert [(row.value, row.of, row.holds) for row in bench.rows] == [(1, 2.0, False)]


def test_every_claim_is_of_rows_that_are_run() -> None:
    """Five seeds for headlines, three for others."""
    rows = convergence_claims.claim_rows(range(11, 16))
    named = {name for claim in convergence_claims.CLAIMS for name in (claim.row, claim.against)}
    assert named - {convergence_claims.AS_MANY} <= rows.keys()
    assert {*convergence_claims.HEADLINES, *convergence_claims.IDEAL} <= rows.keys()
    assert rows["aligned"]["seeds"] == [11, 12, 13, 14, 15] and rows["steps"]["seeds"] == [11, 12, 13]


def test_a_bound_is_held_by_the_mean_or_by_the_end_of_the_interval() -> None:
    """At most and at least, each on its side."""
    held = Comparison(3, 0.02, -0.01, 0.05)
    sides = [(least, surely) for least in (False, True) for surely in (False, True)]
    figures = [convergence_claims.Claim("a", "b", 0.0, least, surely).figure(held) for least, surely in sides]
    assert figures == [0.02, 0.05, 0.02, -0.01]


def test_fewer_effective_clusters_are_held_against_as_many() -> None:
    """Half-way between one and two, and between two and four, by the logarithm; a seed that lacks one is left out."""
    losses = {"synchronous, 1 cluster": 1.0, "synchronous, 2 clusters": 1.1, "synchronous": 1.3, "5.23 ×": 1.2}
    runs = {row: {seed: {"loss": loss, "diverged": False} for seed in (1, 2)} for row, loss in losses.items()}
    for seed, number in ((1, 2**0.5), (2, 2**1.5)):
        runs["5.23 ×"][seed]["effective_clusters"] = number
    bench = Bench("convergence", True, argparse.Namespace(), Console(quiet=True))
    base = {**convergence_rows.BASE, "steps": convergence_rows.CLAIM_STEPS}
    content = {"study": "a", "fleets": convergence_rows.FLEETS, "base": base, "rows": {"a": {}}}
    study = make_study(StudyFile.model_validate(content))
    convergence_claims.report_claims(bench, StudyResult(study, runs))
    (held,) = [row for row in bench.rows if row.name.startswith("5.23 ×: loss at most +2.0%")]
    assert held.value == pytest.approx(1.0 + (1.2 / 1.05 - 1.0 + 1.2 / 1.2 - 1.0) / 2) and not held.holds
    del runs["synchronous"][1]
    bench.rows.clear()
    convergence_claims.report_claims(bench, StudyResult(study, runs))
    (held,) = [row for row in bench.rows if row.name.startswith("5.23 ×: loss at most +2.0%")]
    assert held.value == pytest.approx(1.0) and held.holds
    runs["5.23 ×"][2]["diverged"] = True
    bench.rows.clear()
    convergence_claims.report_claims(bench, StudyResult(study, runs))
    (none,) = [row for row in bench.rows if row.name.startswith("5.23 ×: loss at most +2.0%")]
    assert (none.name, none.against, none.promised, none.times) == (held.name, held.against, held.promised, None)
    assert f"{held.name}: no seed of both ended well" in bench.notes and not none.holds


def test_fresh_seeds_are_above_all_that_were_used(tmp_path: Path) -> None:
    """By the record's tables; the newest may be of any part."""
    (tmp_path / "convergence-fresh.csv").write_text("row,seed,loss\na,207,1.5\nb,4,1.5\n")
    (tmp_path / "convergence-gates.csv").write_text("bad,kind\none of four,nan\n")
    assert convergence_claims.find_fresh_seeds(tmp_path) == [208, 209, 210, 211, 212]
    assert min(convergence_claims.find_fresh_seeds()) > 93


@pytest.mark.slow
def test_bad_data_is_told_by_gates_and_kind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its cost against the run in which the bad clusters were away, and who is blind."""
    chosen = ("dips: one of four, away", "dips: one of four, nan", "none: one of four, sign", "dips: all, lr_x100")
    every = convergence_bad.bad_rows()
    rows = {name: {**every[name], "inner_steps": 4} for name in chosen}
    monkeypatch.setattr(convergence, "bad_rows", lambda: rows)
    bench.args.part, bench.args.steps = ["bad"], 192
    convergence.measure(bench)
    told = {" ".join(note.split()[:4]): note for note in bench.notes}
    assert "100% of" in told["one of four nan"] and "readmitted" in told["one of four nan"]
    assert "blind" in told["one of four sign"] and "%" in told["one of four sign"]
    held = {row.name.partition(" (")[0]: row for row in bench.rows}
    assert held["dips, one of four: bad pushes gated after the first"].holds
    assert "dips, one of four: of the loss with the bad ones away" in held
    assert (bench.args.output / "bad-gates.csv").read_text().count("\n") == 4


def test_the_worst_kind_is_of_the_same_claim_whichever_it_is() -> None:
    """The table would have kept a kind that was the worst once, and did not hold, beside the one that is it now."""
    numbers = {"bad": 10, "bad_gated": 10, "healthy": 10, "healthy_gated": 0}
    names = []
    for dearest in ("nan", "sign"):
        bench = Bench("convergence", True, argparse.Namespace(), Console(quiet=True))
        costs = {"nan": 1.0, "sign": 1.0, dearest: 1.02}
        lines = [convergence_bad.BadLine("two of nine", kind, "dips", numbers, 1.5, costs[kind], 1.0) for kind in costs]
        convergence_bad._hold_list(bench, "dips, two of nine", lines)
        assert [row.holds for row in bench.rows] == [True, True, False]
        names.append([row.name for row in bench.rows])
    assert names[0] == names[1]


def test_bad_ones_are_away_as_long_as_they_would_be_bad() -> None:
    """Of a run without them for a third of its time, as many tokens are accepted meanwhile."""
    fleets = convergence_bad.bad_fleets()
    away = fleets["one of four, away"][0]
    rates = [1 / member["step_s"] for member in fleets["one of four, without"]]
    share = sum(rates) / (sum(rates) + 1 / away["step_s"])
    assert away["returns"] - away["leaves"] == pytest.approx(share / 3)
    assert sum("leaves" in member for member in fleets["two of nine, away"]) == 2
