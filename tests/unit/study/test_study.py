"""Studies: files become runs, finished runs are kept, losses are compared by pairs, and errors are sentences."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks import convergence_bad, convergence_claims, convergence_rows
from dips.cli import cli
from dips.commands.new import read_template
from dips.errors import ConfigError, DipsError
from dips.study import emulator, runner
from dips.study.report import (
    SHOWN,
    compare_paired,
    compare_row,
    describe_gating,
    list_gating,
    list_lines,
    losses_of,
    recommend,
    spell_table,
    student_quantile,
    write_csv,
)
from dips.study.runner import ResultStore, StudyResult
from dips.study.study_file import RunPlan, Study, StudyFile, Tuning, make_study, read_study
from tests.unit.study.in_place import PoolInPlace, compute_in_place
from tests.unit.study.tiny import FACTORY

COMMENTED = re.compile(r"^( *)# ((?:[a-z_.]+:|- \{).*)$", re.MULTILINE)
BASE_STEPS = 48
BASE = {"steps": BASE_STEPS, "fleet": "two", "inner_steps": 4, "pace": "aligned", "inner.lr": 0.02, "outer.clip": {}}
CONTENT: dict[str, Any] = {
    "study": "s", "factory": FACTORY, "seeds": [1, 2], "fleets": {"two": [1.0, 1.5]}, "base": BASE,
    "rows": {"synchronous": {"method": "synchronous"}, "ours": {}}, "compare": "synchronous",
}  # fmt: skip
# Files of a run that name, store, encode and show, and decide nothing that its numbers could depend on.
HANDING_ON = (
    "client/parallel/factory", "config/", "dataclass", "files", "identity/", "ids", "master/app", "master/ledger",
    "master/meters", "master/schema", "plain", "printable", "store/", "tasks", "telemetry/", "transport/gate",
    "transport/lane", "transport/limits", "transport/tls", "view/", "wire/generated", "wire/messages",
    "wire/packed_manifest",
)  # fmt: skip


def study_of(**keys: Any) -> Study:
    compare = {"compare": None} if "rows" in keys else {}
    return make_study(StudyFile.model_validate({**CONTENT, **compare, **keys}))


def refused(**keys: Any) -> str:
    with pytest.raises(ConfigError) as error:
        study_of(**keys)
    return str(error.value)


@pytest.fixture(name="in_place")
def computed_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PoolInPlace]]:
    """Whatever diverges goes on for a minute, and not for five, beyond what its steps may take."""
    monkeypatch.setattr(emulator, "LEAST_S", 60.0)
    yield compute_in_place(monkeypatch)
    runner.digest_code.cache_clear()


def run(study: Study, directory: Path) -> StudyResult:
    return runner.run_study(study, ResultStore(directory, study.factory), 1, lambda _: None)


def test_rows_and_a_grid_become_runs() -> None:
    """Settings of a row come before those of the base; a grid adds every combination."""
    study = study_of(grid={"outer.lr": [0.5, 0.7], "inner_steps": [2, 4]})
    assert [row.name for row in study.rows][:2] == ["synchronous", "ours"] and len(study.rows) == 6
    assert study.run_count == 12
    first = {plan.row: plan.settings for plan in study.plan_results({row.name: () for row in study.rows})}
    assert first["outer.lr 0.5, inner_steps 2"].options.outer.lr == 0.5
    assert first["outer.lr 0.5, inner_steps 2"].fleet.inner_steps == 2
    assert first["ours"].options.outer.clip.norm is None and first["synchronous"].method == "synchronous"


def test_a_row_changes_no_other() -> None:
    """Its dotted key was written into the mapping of `base`, which every row has: all ran with it, silently."""
    study = study_of(rows={"a": {}, "b": {"outer.momentum": 0.1}}, base={"outer": {"momentum": 0.8}, **BASE})
    plans = study.plan_results(dict.fromkeys("ab", ()))
    assert [plan.settings.options.outer.momentum for plan in plans[:2]] == [0.8, 0.1]


def test_equal_runs_have_one_digest_however_they_are_spelt() -> None:
    study = study_of(rows={"a": {}, "b": {"outer": {"lr": 0.7}, "outer.clip": {}}, "c": {"outer.lr": 0.6}})
    plans = study.plan_results(dict.fromkeys("abc", ()))
    digests = [plan.digest("code") for plan in plans]
    assert digests[0] == digests[1] != digests[2]
    assert plans[0].digest("other code") != digests[0]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rows": {"x": {"outer.mergee": "mean"}}}, "rows.x: outer.mergee: unknown key"),
        ({"rows": {"x": {"penalty.beta": -1}}}, "penalty.beta: expected a number from 1e-06"),
        ({"rows": {"x": {"outr.lr": 1}}}, "outr.lr: unknown key of a run"),
        ({"rows": {"x": {"method": "sync"}}}, "method: expected one of dips, data_parallel"),
        ({"rows": {"x": {"fleet": "three"}}}, "fleet: no 'three'; the study has two"),
        ({"rows": {"x": {"fleet": [{"step_s": -1}]}}}, "clusters: step_s: expected a number above 0"),
        ({"rows": {"x": {"fleet": [{"speed": 1}]}}}, "speed: unknown key"),
        ({"rows": {"x": {"fleet": [{"fault": "odd"}]}}}, "fault: expected one of nan"),
        ({"rows": {"x": {"inner.optimizer": "sgd"}}}, "inner.optimizer: expected adamw or muon"),
        ({"rows": {"x": {"pace": "seconds"}}}, "pace: expected steps or aligned"),
        ({"rows": {"x": {"pull_codec": "int8", "outer.step": "sgd"}}}, "pull_codec: a lossy one needs outer.momentum"),
        ({"rows": {"x": {"fragments": 4}}}, "fragments: expected 1 without overlap, got 4"),
        ({"rows": {"x": {"steps": 4}}}, "are not one push of each: expected at least 10"),
        ({"rows": {"x": {"steps": 4, "fleet": [1.0, 1.3]}}}, "are not one push of each: expected at least 10"),
        ({"rows": {"x": {"steps": 1, "method": "data_parallel"}}}, "steps: expected at least 2, one of each cluster"),
        ({"rows": {"x": {"fleet": [1.0], "penalty.gates": ["edit"]}}}, "edit compares clusters with each other"),
        ({"rows": {"x": {"method": "naive", "fleet": [{"fault": "nan"}, 1]}}}, "naive knows no faults"),
        ({"rows": {"x": {"method": "naive", "parallel": 0.1}}}, "parallel: expected method dips or synchronous"),
        ({"rows": {"x": {"parallel": 1.0}}}, "parallel"),
        ({"rows": {"x": {"parallel": 0.99999}}}, "are not one push of each: expected at least"),
        ({"rows": {"x": {"parallel": 0.1, "fleet": [1, {"joins": 0.5}]}}}, "expected joins 0 for each"),
        ({"rows": {}}, "rows: expected one at least"),
        ({"rows": {"x": {"tune": {"outer.clip": [{}]}}}}, "tune: expected keys with lists of numbers or words"),
        ({"compare": "nobody"}, "compare: no row 'nobody'"),
        ({"rows": {"x": {"compare": "y"}}}, "rows.x.compare: no row 'y'; there are x"),
        ({"seeds": [1, 1]}, "seeds: expected different whole numbers"),
        ({"rows": {"x": {"seeds": 3}}}, "rows.x.seeds: expected different whole numbers, one at least, got 3"),
        ({"rows": {"x": {"penalty": None}}}, "rows.x: penalty: expected keys and their values, got None"),
        ({"rows": {"x": {"outer": "nesterov"}}}, "rows.x: outer: expected keys and their values, got 'nesterov'"),
        ({"rows": {"x": {"task": 5}}}, "rows.x: task: expected keys and their values, got 5"),
        ({"rows": {}, "grid": {"inner_steps": [2]}, "tune": {"penalty.gates": [["dips"], []]}}, "tune: expected keys"),
        ({"grid": {"outer.lr": [0.1 * i + 0.1 for i in range(100)], "seeds": [1]}}, "seeds: unknown key of a run"),
    ],
)
def test_what_is_wrong_is_a_sentence(keys: dict[str, Any], said: str) -> None:
    """Before the first run, with row and key."""
    assert said in refused(**keys)


def test_a_study_is_computed_once(in_place: type[PoolInPlace], tmp_path: Path) -> None:
    """Killed after some runs and begun again, it computes the others only, with the same numbers."""
    study = study_of()
    whole = run(study, tmp_path)
    assert in_place.computed == 4 and not whole.failed
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4 and all(set(json.loads(f.read_text())) >= {"settings", "seed", "numbers"} for f in files)
    files[0].unlink()
    files[1].write_text("{ torn")
    again = run(study, tmp_path)
    assert in_place.computed == 6
    spent = {"took_s"}
    for row, runs in whole.runs.items():
        for seed, numbers in runs.items():
            assert {k: v for k, v in again.runs[row][seed].items() if k not in spent} == {
                k: v for k, v in numbers.items() if k not in spent
            }


def test_the_code_that_is_digested_is_there() -> None:
    """A file that was renamed would silently be left out."""
    assert not [name for name in runner.COMPUTING if not (runner.PACKAGE / name).exists()]
    assert not runner.REPORTING - {path.stem for path in (runner.PACKAGE / "study").glob("*.py")}


def list_executed(plan: RunPlan) -> set[str]:
    """Execute a run; return the files whose functions were called."""
    executed: set[str] = set()

    def note_call(frame: FrameType, event: str, argument: object) -> None:
        executed.add(frame.f_code.co_filename)

    sys.setprofile(note_call)
    try:
        runner.execute_run(plan)
    finally:
        sys.setprofile(None)
    return executed


@pytest.mark.slow
def test_what_decides_in_a_run_is_digested() -> None:
    """The shells of the master and the data flow run in it, too: a result of before they changed is not used."""
    (plan,) = study_of(rows={"ours": {}}, seeds=[1]).plan_results({"ours": ()})
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # without the hooks that other tests left
        executed = pool.submit(list_executed, plan).result()
    paths = [runner.PACKAGE / name for name in runner.COMPUTING]
    digested = {str(file) for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    digested -= {str(runner.PACKAGE / f"study/{name}.py") for name in runner.REPORTING}
    left = {Path(file).relative_to(runner.PACKAGE).as_posix() for file in executed - digested if _is_ours(file)}
    assert executed & digested and not [file for file in left if not file.startswith(HANDING_ON)], left


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(runner.PACKAGE)


@pytest.mark.usefixtures("in_place")
def test_results_of_another_python_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default task trains on the sources of Python's standard library, which a minor version changes."""
    (plan,) = study_of(rows={"ours": {}}, seeds=[1]).plan_results({"ours": ()})
    ResultStore(tmp_path, FACTORY).keep(plan, {"loss": 1.0})
    assert ResultStore(tmp_path, FACTORY).find(plan) == {"loss": 1.0}
    with monkeypatch.context() as patch:
        patch.setattr(runner, "python_version", lambda: "3.0.1")
        runner.digest_code.cache_clear()
        assert ResultStore(tmp_path, FACTORY).find(plan) is None
    runner.digest_code.cache_clear()
    assert ResultStore(tmp_path, FACTORY).find(plan) == {"loss": 1.0}


def test_nothing_is_computed_that_cannot_be_kept(in_place: type[PoolInPlace], tmp_path: Path) -> None:
    """An output that is a file, read-only or not mounted is told before the first run, not after each."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .*file/runs: cannot be written: Not a directory"):
        run(study_of(), tmp_path / "file" / "runs")
    assert in_place.computed == 0


def test_rows_of_equal_settings_are_computed_once(in_place: type[PoolInPlace], tmp_path: Path) -> None:
    result = run(study_of(rows={"a": {}, "b": {}}, seeds=[1], compare="a"), tmp_path)
    assert in_place.computed == 1 and result.runs["a"] == result.runs["b"]


def test_each_row_takes_its_own_best_value(in_place: type[PoolInPlace], tmp_path: Path) -> None:
    """All values on a seed of their own, and the best one with all seeds."""
    short = {**BASE, "steps": BASE_STEPS // 2}
    result = run(study_of(base=short, tune={"inner.lr": [1e-5, 0.02, 50.0]}), tmp_path)
    assert result.best == dict.fromkeys(("synchronous", "ours"), (("inner.lr", 0.02),)) and in_place.computed == 10
    assert {row: sorted(runs) for row, runs in result.runs.items()} == {row: [1, 2] for row in result.best}
    write_csv(result, tmp_path / "results.csv")
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert len(lines) == 11 and sum(",inner.lr=0.02,True,0," in line for line in lines) == 2
    assert sum(",inner.lr=0.02,True,1," in line for line in lines) == 2


def tune(tune: dict[str, list[Any]], loss: Callable[..., float], **base: Any) -> tuple[Tuning, list[tuple[Any, ...]]]:
    """Tune a row by a formula in place of runs; return what was tried, too."""
    study = study_of(rows={"x": {"tune": tune}}, base={**BASE, **base})
    tuning, tried = Tuning(study, study.rows[0]), list[tuple[Any, ...]]()
    while wanted := tuning.list_wanted():
        for tuned in wanted:
            values = [value for _, value in tuned]
            tried.append(tuple(values))
            tuning.note_loss(tuned, loss(*values))
    return tuning, tried


def test_keys_are_tuned_one_after_another() -> None:
    """Each at the best of those before it; those after it have the values of the base, or the middle of their lists."""
    lists = {"inner.lr": [0.01, 0.02, 0.04], "outer.lr": [0.5, 0.7, 0.9], "outer.momentum": [0.4, 0.6, 0.8]}
    tuning, tried = tune(
        lists, lambda inner, lr, m: abs(inner - 0.02) + abs(lr - 0.7) + abs(m - 0.6), **{"outer.lr": 0.9}
    )
    assert dict(tuning.best) == {"inner.lr": 0.02, "outer.lr": 0.7, "outer.momentum": 0.6} and not tuning.edges
    assert tried[:3] == [(0.01, 0.9, 0.6), (0.02, 0.9, 0.6), (0.04, 0.9, 0.6)]
    assert tried[3:5] == [(0.02, 0.5, 0.6), (0.02, 0.7, 0.6)]  # 0.9 is known
    assert tried[5:] == [(0.02, 0.7, 0.4), (0.02, 0.7, 0.8)]


@pytest.mark.parametrize(
    ("values", "target", "best", "edges"),
    [
        ([1.0, 2.0], 8.0, 8.0, ()),
        ([1.0, 2.0], 0.26, 0.25, ()),
        ([1.0, 2.0], 1e6, 32.0, ("inner.lr",)),  # four are added at most
        ([1.0, 2.0], 1.9, 2.0, ()),  # 4 was tried
        ([3.0], 1.0, 3.0, ()),
    ],
)
def test_a_list_goes_on_beyond_its_edge(
    values: list[float], target: float, best: float, edges: tuple[str, ...]
) -> None:
    """In its own ratio, until the best value is inside."""
    tuning, _ = tune({"inner.lr": values}, lambda lr: abs(lr - target))
    assert dict(tuning.best) == {"inner.lr": best} and tuning.edges == edges


def test_a_list_ends_where_settings_are_refused() -> None:
    """A momentum of 1 is none: the best stays at the edge, and the table says so."""
    tuning, tried = tune({"outer.momentum": [0.8, 0.9]}, lambda momentum: -momentum)
    assert dict(tuning.best) == {"outer.momentum": 0.9} and tuning.edges == ("outer.momentum",) and len(tried) == 2
    zero, _ = tune({"outer.momentum": [0.0, 0.5]}, lambda momentum: momentum)
    assert dict(zero.best) == {"outer.momentum": 0.0} and not zero.edges  # beyond 0 there is nothing
    whole, _ = tune({"inner_steps": [2, 4]}, lambda steps: abs(steps - 8))
    assert dict(whole.best) == {"inner_steps": 8}


def test_values_that_the_best_of_another_key_forbids_are_left_out() -> None:
    """Eight inner steps are too many for a row whose best is to be data parallel for most of it: the whole study ended
    with that, after the runs before, at each try.
    """
    lists = {"parallel": [0.0, 0.25, 0.75], "inner_steps": [2, 4, 8]}
    tuning, tried = tune(lists, lambda parallel, steps: -parallel - steps)
    assert dict(tuning.best) == {"parallel": 0.75, "inner_steps": 4} and (0.75, 8) not in tried
    same, _ = tune({"outer.lr": [0.7, 0.7]}, lambda lr: lr)
    assert dict(same.best) == {"outer.lr": 0.7} and not same.edges


def test_the_table_says_which_best_value_is_at_an_edge() -> None:
    study = study_of(rows={"x": {"tune": {"outer.lr": [0.5, 0.7]}}}, seeds=[1])
    numbers = {"loss": 1.0, "diverged": False, "finished": True, **dict.fromkeys(("fastest_steps", "clipped"), 1)}
    numbers |= dict.fromkeys(("effective_clusters", "staleness", "cosine", "of_ideal"), None)
    result = StudyResult(study, runs={"x": {1: numbers}}, best={"x": (("outer.lr", 0.7),)}, edges={"x": ("outer.lr",)})
    assert list_lines(result)[0][1] == "outer.lr 0.7 (edge)"


def test_a_row_of_which_no_value_ended_has_no_result(in_place: type[PoolInPlace], tmp_path: Path) -> None:
    """The error stands in its row, and the others go on."""
    broken = {"task.scale": "big", "tune": {"inner.lr": [0.01, 0.02]}}
    result = run(study_of(rows={"broken": broken, "ours": {}}, seeds=[1], compare="ours"), tmp_path)
    assert "broken" not in result.best and set(result.runs) == {"ours"} and in_place.computed
    assert result.failed["broken"].startswith("seed 0: ")


def test_a_run_that_diverges_is_a_row(in_place: type[PoolInPlace], tmp_path: Path) -> None:
    """And is compared with nobody."""
    rows = {"synchronous": {"method": "synchronous"}, "wild": {"inner.lr": 1e6}}
    result = run(study_of(base={**BASE, "steps": BASE_STEPS // 2}, rows=rows, seeds=[1]), tmp_path)
    assert not result.failed
    line = list_lines(result)[1]
    assert line[0] == "wild" and line[2].startswith("diverged") and line[3] == ""
    assert recommend(result)[0].startswith("Nothing to recommend: no row of method dips")


def test_a_row_may_be_held_against_another_than_the_studys(in_place: type[PoolInPlace], tmp_path: Path) -> None:
    """Then it is of another setting: it may end lower, and is not recommended for that."""
    long = {"steps": 2 * BASE_STEPS}
    rows = {
        "synchronous": {"method": "synchronous"}, "ours": {},
        "long, synchronous": {"method": "synchronous", **long}, "long": {"compare": "long, synchronous", **long},
    }  # fmt: skip
    result = run(study_of(rows=rows, seeds=[1]), tmp_path)
    held = compare_row(result, "long")
    assert held == compare_paired(losses_of(result, "long"), losses_of(result, "long, synchronous"))
    assert held != compare_paired(losses_of(result, "long"), losses_of(result, "synchronous"))
    assert losses_of(result, "long")[1] < losses_of(result, "ours")[1]
    assert recommend(result)[0].startswith("Take 'ours'")


def made_up(loss: float, **more: Any) -> dict[str, Any]:
    return {
        "loss": loss, "first_loss": 9.0, "diverged": False, "finished": True, "unit": "nats", "fastest_steps": 8,
        "effective_clusters": 2.0, "clipped": 0.0, "staleness": 0.0, "cosine": None, "of_ideal": 0.9,
        "tokens": 100, "lasted_s": 10.0,
    } | more  # fmt: skip


def result_of(losses: dict[str, float], rows: dict[str, Any], **more: Any) -> StudyResult:
    study = study_of(rows={"synchronous": {"method": "synchronous"}, **rows}, compare="synchronous", **more)
    found = StudyResult(study, best={row.name: () for row in study.rows})
    found.runs = {name: {seed: made_up(loss * (1 + 0.01 * seed)) for seed in (1, 2)} for name, loss in losses.items()}
    return found


def test_only_rows_that_differ_in_method_are_recommended() -> None:
    """Not the lowest loss of all: another fleet or H, more steps or an easier task, or a fault, is another question.

    A gate keeps out a cluster whose sign is flipped, and at equal tokens fewer clusters end lower.
    """
    flipped = [1.0, {"step_s": 1.5, "fault": "sign"}]
    rows = {
        "ours": {}, "clipped": {"outer.clip": {"norm": 1.0}}, "sign": {"fleet": flipped}, "alone": {"fleet": [1.0]},
        "short": {"inner_steps": 2}, "long": {"steps": 2 * BASE_STEPS}, "easy": {"task.scale": 2.0},
        "steps": {"pace": "steps"},
    }  # fmt: skip
    losses = {"synchronous": 2.0, "ours": 1.9, "clipped": 1.8, "steps": 1.95} | dict.fromkeys(
        ("sign", "alone", "short", "long", "easy"), 1.0
    )
    said = recommend(result_of(losses, rows))
    assert said[0].startswith("Take 'clipped'")
    assert "so not compared: 'sign', 'alone', 'short', 'long', 'easy'." in " ".join(said)
    bad = result_of({"synchronous": 2.0, "sign": 1.0}, {"sign": {"fleet": flipped}})
    bad.study = replace(bad.study, compare="sign")
    assert recommend(bad)[0].startswith("Nothing to recommend")


def test_a_comparison_names_the_row_that_it_is_with() -> None:
    """A row with a `compare` of its own was said to be so much better than the study's."""
    rows = {"ours": {}, "clipped": {"outer.clip": {"norm": 1.0}, "compare": "ours"}}
    result = result_of({"synchronous": 3.0, "ours": 2.0, "clipped": 1.0}, rows)
    assert recommend(result)[1].startswith("Against 'ours': -50.0%")
    assert [line[3].partition(": ")[2] for line in list_lines(result)[1:]] == ["better", "better, against ours"]


def test_a_row_without_all_of_its_tokens_is_not_recommended() -> None:
    """A run in which everything was gated ends early, and may be low by then."""
    result = result_of({"synchronous": 2.0, "ours": 1.9, "early": 1.5}, {"ours": {}, "early": {"outer.lr": 0.1}})
    result.runs["early"][2]["finished"] = False
    assert recommend(result)[0].startswith("Take 'ours'")


def test_a_row_of_which_a_run_failed_is_not_recommended() -> None:
    """Its other seeds may be the lucky ones, and others have all of theirs."""
    result = result_of({"synchronous": 2.0, "ours": 1.9, "torn": 1.5}, {"ours": {}, "torn": {"outer.lr": 0.1}})
    del result.runs["torn"][2]
    result.failed["torn"] = "seed 2: OSError: it is torn"
    assert recommend(result)[0].startswith("Take 'ours'")


def test_what_few_seeds_say_is_told() -> None:
    """Of one nothing is known of what it differs from; of three it is not said that they are few."""
    for seeds in ((1,), (1, 2, 3)):
        result = result_of({}, {"ours": {}, "clipped": {"outer.clip": {"norm": 1.0}}}, seeds=seeds)
        for name, loss in (("synchronous", 2.0), ("ours", 1.9), ("clipped", 1.8)):
            result.runs[name] = {seed: made_up(loss) for seed in seeds}
        said = " ".join(recommend(result))
        assert said.startswith("Take 'clipped'") and "cannot be told" not in said
        assert ("Fewer than three seeds" in said) == (seeds == (1,))


def test_a_row_is_asked_what_it_was_run_with() -> None:
    """Its best value, and not that of before: fewer inner steps are another question."""
    result = result_of({"synchronous": 2.0, "ours": 1.9}, {"ours": {"tune": {"inner_steps": [2, 4]}}})
    for best, said in ((4, "Take 'ours'"), (2, "Nothing to recommend")):
        result.best["ours"] = (("inner_steps", best),)
        assert recommend(result)[0].startswith(said)


def test_progress_tells_what_is_left() -> None:
    """So many runs of the expected ones, those that were kept, and the time of the rest as long as those so far."""
    said, plan = list[str](), study_of(rows={"ours": {}}).plan_results({"ours": ()})[0]
    progress = runner._Progress(9, 1, said.append)
    progress._began -= 20.0
    progress.note_kept()
    progress.note_done([plan], made_up(1.9))
    progress.expect_runs(2)
    progress.note_done([plan], made_up(1.9, diverged=True))
    assert said == [
        "2 of 9 (1 kept from before): ours, seed 1: 1.9000 nats; 2 min left",
        "3 of 4 (1 kept from before): ours, seed 1: diverged; 10 s left",
    ]


def test_a_value_whose_run_did_not_finish_is_not_the_best() -> None:
    """It would be taken for all seeds, and its row be recommended for none."""
    result = StudyResult(study_of(rows={"ours": {"tune": {"inner.lr": [0.01, 0.02, 0.04]}}}))
    made = {0.01: made_up(2.0), 0.02: made_up(1.9), 0.04: made_up(1.0, finished=False)}
    runner._tune_rows(result, lambda plans: ((plan, made[dict(plan.tuned)["inner.lr"]]) for plan in plans))
    assert result.best == {"ours": (("inner.lr", 0.02),)} and result.edges == {"ours": ()}


def test_healthy_pushes_that_were_gated_are_told_for_every_row() -> None:
    """By cluster and gate, over all seeds, with what was said of the first: what gates are chosen by."""
    result = result_of({"synchronous": 2.0, "ours": 1.9}, {"ours": {}})
    shut = {"healthy": 50, "healthy_gated": 9, "healthy_of": {"a": 25, "b": 25}, "gated_because": {"b": "cosine -0.3"}}
    result.runs["ours"][1] |= {**shut, "gated_by": {"b": {"direction": 8, "loss": 1}}}
    result.runs["ours"][2] |= {**shut, "gated_by": {"b": {"direction": 9}}}
    heads = ("row", "best", "loss", "against", *SHOWN)
    table = {line[0]: dict(zip(heads, line, strict=True)) for line in list_lines(result)}
    assert (table["synchronous"]["gated"], table["ours"]["gated"]) == ("", "18 of 100")
    assert list_gating(result) == [
        "ours: 18 of 50 healthy pushes of b gated (direction 17, loss 1), the first: cosine -0.3"
    ]


def test_numbers_of_a_row_are_of_all_seeds() -> None:
    result = result_of({"synchronous": 2.0, "ours": 1.9}, {"ours": {}})
    result.runs["ours"][2] |= {"fastest_steps": 16, "of_ideal": 0.5, "staleness": None, "tokens": 300, "lasted_s": 14.0}
    heads = ("row", "best", "loss", "against", *SHOWN)
    ours = dict(zip(heads, list_lines(result)[1], strict=True))
    assert (ours["steps"], ours["ideal"], ours["stale"], ours["cos"]) == ("12", "0.70", "0.00", "")
    assert ours["time"] == "0.60"  # 24 s for 400 tokens, against 10 s for 100


def test_a_factory_that_breaks_loses_its_row_only(in_place: type[PoolInPlace], tmp_path: Path) -> None:
    study = study_of(factory=FACTORY.replace("build", "breaks"))
    result = run(study, tmp_path)
    assert set(result.failed) == {"synchronous", "ours"} and "they ended; repeat the data" in result.failed["ours"]
    assert all(line[2] == "failed" for line in list_lines(result))


@pytest.mark.slow
def test_whatever_a_run_raises_loses_that_run_only(tmp_path: Path) -> None:
    """In real processes, also what cannot be handed from one to another."""
    rows = {"odd": {"task.how": "odd"}, "attribute": {"task.how": "attribute"}, "ours": {}}
    result = run(study_of(factory=FACTORY.replace("build", "misbehaves"), rows=rows, seeds=[1]), tmp_path)
    assert result.failed["odd"] == "seed 1: OddError: it is odd: so"
    assert "has no attribute 'nothing'" in result.failed["attribute"] and set(result.runs) == {"ours"}


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_study_with_what_is_done(tmp_path: Path) -> None:
    """The kernel kills one that takes too much memory: what is done is kept, and the message says what to do."""
    rows = {"ours": {}, "killed": {"task.how": "killed"}}
    study = study_of(factory=FACTORY.replace("build", "misbehaves"), rows=rows, seeds=[1])
    with pytest.raises(DipsError, match=r"was ended from outside, for want of memory perhaps: .* name fewer --jobs"):
        run(study, tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_paired_intervals() -> None:
    """Against a table: t(0.975, 4) = 2.776; the mean of +1 %, +2 %, +3 %, +4 %, +5 % is known to 1.96 points."""
    ones = dict.fromkeys(range(5), 1.0)
    held = compare_paired({i: 1.01 + 0.01 * i for i in range(5)}, ones)
    assert held is not None and held.mean == pytest.approx(0.03) and held.seeds == 5
    assert held.high - held.mean == pytest.approx(2.776 * 0.015811 / 5**0.5, rel=1e-3)
    assert held.verdict == "worse"
    better = compare_paired({0: 0.98, 1: 0.981, 2: 0.979}, ones)
    assert better is not None and better.verdict == "better"
    unsure = compare_paired({0: 0.99, 1: 1.005}, ones)
    assert unsure is not None and unsure.verdict.startswith("no worse by ")
    single = compare_paired({0: 0.9}, ones)
    assert single is not None and single.verdict == "one seed: no interval"
    assert compare_paired({7: 1.0}, ones) is None
    assert student_quantile(13) == student_quantile(12) and student_quantile(10_000) == 1.98


def test_a_blind_gate_is_called_blind() -> None:
    """Over all seeds; whose fault lasts to the end is not said to be shut out."""
    counts = {"bad": 20, "bad_gated": 1, "healthy": 100, "healthy_gated": 1, "recovered_after": 0}
    assert describe_gating([counts]) == "blind; 1.0% of 100 healthy ones gated; accepted again after 0 pushes"
    never = {**counts, "bad_gated": 19, "recovered_after": None}
    assert describe_gating([never]).startswith("95% of 20 bad")
    assert (
        describe_gating([counts, never])
        == "50% of 40 bad pushes gated; 1.0% of 200 healthy ones gated; never accepted again"
    )
    assert describe_gating([never], endless=True).endswith("gated; its fault lasted to the end")
    assert describe_gating([{"bad": 0}]) == "no bad push"


def test_the_table_leaves_empty_columns_out() -> None:
    assert spell_table([("a", "b", "c"), ("1", "", "22"), ("333", "", "4")]) == ["a    c", "1    22", "333  4"]


def test_the_template_is_a_study(tmp_path: Path) -> None:
    """As it stands, and with every commented key put in."""
    path = tmp_path / "study.yaml"
    path.write_text(read_template("study.yaml"))
    assert read_study(path).run_count == 12
    text = COMMENTED.sub(r"\1\2", read_template("study.yaml")).replace("grid: {}", "grid:").replace("tune: {}", "tune:")
    keys = StudyFile.model_validate(yaml.safe_load(text))
    assert set(keys.model_fields_set) == set(StudyFile.model_fields)
    assert make_study(keys).run_count > 12


def test_the_benchmark_s_rows_can_be_read() -> None:
    """All of them, so that none fails after hours."""
    rows_of, claims = convergence_rows, convergence_claims.claim_rows(convergence_claims.SHOWN)
    fleets = {**rows_of.FLEETS, **convergence_bad.bad_fleets()}
    content = {"study": "s", "fleets": fleets, "base": {**rows_of.BASE, "steps": 6000}}
    for rows in (
        claims,
        rows_of.METHOD_ROWS,
        rows_of.FACTOR_ROWS,
        rows_of.SIZE_ROWS,
        rows_of.RATE_ROWS,
        rows_of.RECIPE_ROWS,
        convergence_bad.bad_rows(),
    ):
        make_study(StudyFile.model_validate({**content, "rows": rows}))
    assert make_study(StudyFile.model_validate({**content, "rows": claims})).run_count == 61


def test_the_command_says_what_it_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(yaml.safe_dump(CONTENT))
    said = CliRunner().invoke(cli, ["study", "study.yaml", "--dry-run"])
    assert said.exit_code == 0, said.output
    assert "4 runs; an inner step takes" in said.stdout and "synchronous, seed 1: 48 steps, to do" in said.stdout
    assert CliRunner().invoke(cli, ["study"]).exit_code == 2
    template = CliRunner().invoke(cli, ["study", "--template", "new.yaml"])
    assert template.exit_code == 0 and Path("new.yaml").exists()
    twice = CliRunner().invoke(cli, ["study", "--template", "new.yaml"])
    assert isinstance(twice.exception, ConfigError) and "exists already" in str(twice.exception)


@pytest.mark.usefixtures("in_place")
def test_the_command_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table, sentences and picture, into a directory that is made; the printed sentences are those of the file. All
    but the picture is there without matplotlib.
    """
    monkeypatch.chdir(tmp_path)
    rows = {"synchronous": CONTENT["rows"]["synchronous"]}
    Path("study.yaml").write_text(yaml.safe_dump({**CONTENT, "rows": rows}))
    done = CliRunner().invoke(cli, ["study", "study.yaml", "-j", "1", "--output", "deep/out"])
    assert done.exit_code == 0, repr(done.exception)
    out = Path("deep/out")
    lines = (out / "results.csv").read_text().splitlines()
    assert len(lines) > 1 and any("synchronous" in line for line in lines)
    said = (out / "recommendation.txt").read_text()
    assert said.strip() and said in done.stdout and "losses.png" in done.stdout
    assert (out / "losses.png").read_bytes()[1:4] == b"PNG"
    (out / "losses.png").unlink()
    (out / "results.csv").unlink()
    monkeypatch.delitem(sys.modules, "dips.study.report")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bare = CliRunner().invoke(cli, ["study", "study.yaml", "-j", "1", "--output", "deep/out"])
    assert bare.exit_code == 0, repr(bare.exception)
    assert "losses.png needs matplotlib" in bare.stdout and said in bare.stdout
    assert not (out / "losses.png").exists() and (out / "results.csv").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("factory", "task", "said"),
    [
        ("nowhere:build", {}, "nowhere:build: No module named 'nowhere'"),
        ("dips.study.text:nothing", {}, "has no attribute 'nothing'"),
        ("dips.study.text", {}, "expected MODULE:FUNCTION"),
        (FACTORY.replace("build", "not_a_task"), {}, "expected a dips.study.task.Task, got int"),
        (FACTORY, {"wide": 3}, "it takes scale"),
    ],
)
def test_a_wrong_factory_is_a_sentence(
    factory: str, task: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {**CONTENT, "factory": factory, "base": {**BASE, "task": task}}
    Path("study.yaml").write_text(yaml.safe_dump(content))
    error = CliRunner().invoke(cli, ["study", "study.yaml"]).exception
    assert isinstance(error, ConfigError) and said in str(error)
