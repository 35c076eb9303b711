"""The command `dips study`: compares outer steps by real training of a small model in virtual time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dips.commands.new import read_template
from dips.errors import ConfigError
from dips.files import explain_unwritable, write_output

if TYPE_CHECKING:
    from dips.study.runner import ResultStore, StudyResult
    from dips.study.study_file import Study

TEMPLATE, RUNS, NUMBERS, PICTURE, WORDS = "study.yaml", "runs", "results.csv", "losses.png", "recommendation.txt"


def study(
    file: Annotated[
        Path | None, typer.Argument(metavar="STUDY.yaml", help="The study file, which lists the runs to compare.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The directory of the results; default study-NAME.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Number of runs at a time; default one per core.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and their estimated time only.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Write study.yaml with every key, and exit.")] = False,
) -> None:
    """Compare outer steps, gates and paces on your own model, before spending accelerators on them.

    Each run trains a small model for real, on one core, while clusters, links, master and slaves run in virtual time:
    the master's decisions, ledger and kernels are those of a real run. Options are the keys of dips.yaml, so results
    can be copied there.

    \b
    1. dips study --template             writes study.yaml: a study of the demo's model, explained
    2. name your own model and data in it: `factory: mymodel:task`   (docs/guides/study.md)
    3. dips study study.yaml --dry-run   prints the runs and their time
    4. dips study study.yaml -j 4        runs it; after Ctrl-C the same command continues

    Results: a table with paired 95 % intervals and a recommendation; results.csv, losses.png and a file for each run in
    the output directory. A finished run is never computed twice, as long as its settings and the code are the same.

    Exit codes: 0 done; 1 a run failed (its row says why; others are done); 78 the study is wrong.

    \b
    Example:
      dips study study.yaml -j 2 --output studies/half
    """
    if template:
        _write_template(file or Path(TEMPLATE))
        return
    if file is None:
        raise typer.BadParameter("which study? name its file, or write one with --template", param_hint="STUDY.yaml")
    _require_torch()
    from dips.study.runner import ResultStore, run_study
    from dips.study.study_file import read_study
    from dips.study.task import load_task, make_model

    read = read_study(file)
    first = read.plan_run(read.rows[0], read.rows[0].seeds[0], read.rows[0].untuned)
    make_model(load_task(read.factory, first.settings.task), first.seed)  # so that a wrong factory fails at once
    directory = output or Path(f"study-{read.name}")
    store, cores = ResultStore(directory / RUNS, read.factory), jobs or len(os.sched_getaffinity(0))
    if dry_run:
        _print_plan(read, store, cores)
        return
    result = run_study(read, store, cores, lambda text: print(text, flush=True))
    _print_result(result, directory)
    if result.failed:
        raise typer.Exit(1)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"dips study trains models, and needs torch ({error}): pip install 'di-ps[demo]'") from error


def _write_template(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"--template: {path} exists already; name another file")
    write_output(path, read_template(TEMPLATE))
    print(f"wrote {path}\nnext: dips study {path} --dry-run")


def _print_plan(read: Study, store: ResultStore, jobs: int) -> None:
    """Print every run, whether it is done, and an estimate of the time for the others."""
    from dips.study.runner import measure_step_s, spell_seconds

    tuned = [row for row in read.rows if row.list_tunings()]
    plans = read.plan_tuning() + read.plan_results({row.name: row.untuned for row in read.rows if row not in tuned})
    for plan in plans:
        done = "done" if store.find(plan) is not None else "to do"
        values = "".join(f", {key} {value}" for key, value in plan.tuned)
        print(f"{plan.row}{values}, seed {plan.seed}: {plan.settings.steps} steps, {done}")
    if tuned:
        runs = sum(len(row.seeds) for row in tuned)
        print(
            f"then {', '.join(row.name for row in tuned)} at their best values: {runs} runs; more if one is at an edge"
        )
    steps = sum(plan.settings.steps for plan in plans if store.find(plan) is None)
    steps += sum(len(row.seeds) * read.plan_run(row, row.seeds[0], row.untuned).settings.steps for row in tuned)
    step_s = measure_step_s(plans[0])
    print(
        f"{read.run_count} runs; an inner step takes {step_s * 1e3:.1f} ms of a core here: "
        f"{spell_seconds(steps * step_s / jobs)} with -j {jobs} at least, up to three times as long for small models"
    )


def _print_result(result: StudyResult, directory: Path) -> None:
    from dips.study.report import SHOWN, list_gating, list_lines, recommend, spell_table, write_csv

    heads = ("row", "best", "loss", f"against {result.study.compare}", *SHOWN)
    for line in spell_table([heads, *list_lines(result)]):
        print(line)
    for column, (meaning, _) in SHOWN.items():
        print(f"{column}: {meaning}")
    said = [*list_gating(result), *recommend(result)]
    print("\n".join(said))
    for row, error in result.failed.items():
        print(f"failed: {row}: {error}")
    with explain_unwritable(f"--output {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        write_csv(result, directory / NUMBERS)
        (directory / WORDS).write_text("\n".join(said) + "\n", encoding="utf-8")
        drawn = _draw(result, directory / PICTURE)
    print(f"wrote {directory / NUMBERS}, {directory / WORDS}{drawn}")


def _draw(result: StudyResult, path: Path) -> str:
    """Draw the picture if matplotlib is installed; return text about it for the output."""
    from dips.study.report import draw_study

    try:
        figure = draw_study(result)
    except ImportError:
        return f"; {path.name} needs matplotlib: pip install 'di-ps[plot]'"
    figure.savefig(path, dpi=130)
    return f", {path}"
