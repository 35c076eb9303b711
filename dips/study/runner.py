"""Runs a study: missing results are computed, several at a time, and each is stored as soon as it is there."""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from math import isfinite
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from platform import python_version
from threading import Thread
from typing import Any

from dips.errors import DipsError
from dips.files import explain_unwritable
from dips.study.baselines import BaselineResult, train_data_parallel, train_naive, train_synchronous
from dips.study.emulator import emulate
from dips.study.learner import Inner
from dips.study.study_file import RunPlan, Settings, Study, Tuned, Tuning
from dips.study.task import BatchDraw, Task, load_task, make_model

# ---- store ----------------------------------------------------------------------------------------------------------
# Results on disk: one file for each finished run, written completely or not at all, and named by everything that
# decides it.
#
# The name is a digest of the run's description and of the code that computes runs, so nothing is computed twice, and
# results of another version of the code, of torch or of Python are not used. The digest is of syntax trees, so comments
# do not count; nor do the modules that only report.


PACKAGE = Path(__file__).parents[1]
COMPUTING = (
    "outer_step.py", "protocol", "outer", "sim", "client/agent", "client/rank/feedback.py", "slave", "codecs.py",
    "quantisers.py", "wire/chunks.py", "wire/frame.py", "transport/intake.py", "transport/backoff.py",
    "master/core.py", "master/runtime.py", "data/steps.py", "demo/data.py", "demo/model.py", "study",
)  # fmt: skip
REPORTING = frozenset({"report", "study_file"})


class ResultStore:
    """A directory of results."""

    def __init__(self, directory: Path, factory: str) -> None:
        self.directory, self._code = directory, digest_code(factory)

    def require_writable(self) -> None:
        """Raise ConfigError if no result can be written: better before the runs than after each."""
        with explain_unwritable(f"--output {self.directory}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            (probe := self.directory / f"{os.getpid()}.tmp").touch()
            probe.unlink()

    def find(self, plan: RunPlan) -> Numbers | None:
        """Return the numbers of a finished run; None if its file is missing or cannot be read."""
        try:
            found = json.loads(self._path_of(plan).read_text(encoding="utf-8"))
            numbers: Numbers = found["numbers"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return numbers

    def keep(self, plan: RunPlan, numbers: Numbers) -> None:
        """Write a result, completely or not at all."""
        path = self._path_of(plan)
        content = {"row": plan.row, **plan.description, "numbers": numbers}
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        with explain_unwritable(f"--output {self.directory}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
            beside.replace(path)

    def name_of(self, plan: RunPlan) -> str:
        """Return a name that is equal for runs that must have equal results."""
        return plan.digest(self._code)

    def _path_of(self, plan: RunPlan) -> Path:
        return self.directory / f"{self.name_of(plan)}.json"


@cache
def digest_code(factory: str) -> str:
    """Return the digest of the code that computes runs, including the factory's module, and of the versions of torch
    and of Python, whose standard library is the text that the default task trains on.
    """
    from torch import __version__ as torch_version

    digest = hashlib.blake2b(f"torch {torch_version}, Python {python_version()}".encode(), digest_size=16)
    for name in COMPUTING:
        path = PACKAGE / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if file.parent.name != "study" or file.stem not in REPORTING:
                digest.update(_digest_of(file))
    spec = find_spec(factory.partition(":")[0])
    if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
        digest.update(_digest_of(Path(spec.origin)))
    return digest.hexdigest()


def _digest_of(file: Path) -> bytes:
    tree = ast.dump(ast.parse(file.read_text(encoding="utf-8")))
    return hashlib.blake2b(tree.encode(), digest_size=16).digest()


# ---- runner ---------------------------------------------------------------------------------------------------------
# Runs a study: missing results are computed, several at a time, and each is stored as soon as it is done.
#
# A study that is killed continues where it was: every finished run is a file. Rows with values to tune are first run at
# these, with a seed of their own, and then like the others at their best values with all seeds.


ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # set to 1: a run uses one core
WARM_STEPS, TIMED_STEPS = 3, 10
Say = Callable[[str], None]
Numbers = dict[str, Any]
Finished = Iterator[tuple[RunPlan, Numbers]]


@dataclass(slots=True)
class StudyResult:
    """The numbers of every run, by row and seed; for tuned rows at their best value."""

    study: Study
    runs: dict[str, dict[int, Numbers]] = field(default_factory=dict)
    tuned: dict[str, dict[Tuned, Numbers]] = field(default_factory=dict)  # every value that was tried
    best: dict[str, Tuned] = field(default_factory=dict)
    edges: dict[str, tuple[str, ...]] = field(default_factory=dict)  # row → keys whose best value is at the edge
    failed: dict[str, str] = field(default_factory=dict)  # row → error of a failed run


def run_study(study: Study, store: ResultStore, jobs: int, say: Say) -> StudyResult:
    """Compute the missing results; errors of single runs are stored in the result, and do not end the others. Raise
    ConfigError if results cannot be written, DipsError if a process of the study is killed.
    """
    store.require_writable()
    result, total = StudyResult(study), study.run_count
    progress = _Progress(total, jobs, say)
    with _single_threads(), ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        try:
            _tune_rows(result, lambda plans: _run_all(pool, plans, store, progress, result.failed))
            plans = study.plan_results(result.best)
            progress.expect_runs(len(plans))
            for plan, numbers in _run_all(pool, plans, store, progress, result.failed):
                result.runs.setdefault(plan.row, {})[plan.seed] = numbers
        except BaseException:  # Ctrl-C, SIGTERM: finished runs are stored, running ones are lost
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise
    return result


def _tune_rows(result: StudyResult, run_all: Callable[[list[RunPlan]], Finished]) -> None:
    """Choose the values of every row, all rows at once; a row of which no run ended has none."""
    study = result.study
    tunings = {row.name: Tuning(study, row) for row in study.rows}
    while plans := [
        study.plan_run(row, row.tuning_seed, tuned) for row in study.rows for tuned in tunings[row.name].list_wanted()
    ]:
        for plan, numbers in run_all(plans):
            result.tuned.setdefault(plan.row, {})[plan.tuned] = numbers
        for plan in plans:
            tunings[plan.row].note_loss(plan.tuned, _loss_of(result.tuned.get(plan.row, {}).get(plan.tuned)))
    for row, tuning in tunings.items():
        if row in result.tuned or not study.row(row).list_tunings():
            result.best[row], result.edges[row] = tuning.best, tuning.edges


def _loss_of(numbers: Numbers | None) -> float:
    """Return the loss of a run; infinite if it failed, diverged, or did not finish, with which it may be low."""
    if numbers is None or numbers["diverged"] or not numbers["finished"]:
        return float("inf")
    return float(numbers["loss"])


def _run_all(
    pool: ProcessPoolExecutor,
    plans: Sequence[RunPlan],
    store: ResultStore,
    progress: _Progress,
    failed: dict[str, str],
) -> Finished:
    """Yield each plan with its numbers; plans with equal descriptions are computed once."""
    missing: dict[str, list[RunPlan]] = {}
    for plan in plans:
        numbers = store.find(plan)
        if numbers is not None:
            progress.note_kept()
            yield plan, numbers
        else:
            missing.setdefault(store.name_of(plan), []).append(plan)
    under_way: dict[Future[Numbers | str], list[RunPlan]] = {
        pool.submit(execute_and_keep, same[0], store.directory): same for same in missing.values()
    }
    while under_way:
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            same = under_way.pop(future)
            numbers = _result_of(future, same[0], failed)
            progress.note_done(same, numbers)
            if numbers is not None:
                yield from ((plan, numbers) for plan in same)


def execute_and_keep(plan: RunPlan, directory: Path) -> Numbers | str:
    """Execute a run in its own process and store its result, even if the study is killed meanwhile; return the error
    as text if there is one, since not every exception can be handed to another process.
    """
    try:
        numbers = execute_run(plan)
        gc.collect()  # a simulated world has reference cycles, and holds every version's θ
        ResultStore(directory, plan.factory).keep(plan, numbers)
    except Exception as error:  # noqa: BLE001 (whatever the user's factory, or ours, raises loses this run only)
        return f"{type(error).__name__}: {error}"
    return numbers


def end_with_parent() -> None:
    """End this process of the pool when the study ends, so that a killed study leaves no process running."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, name="end-with-parent", daemon=True).start()


def _result_of(future: Future[Numbers | str], plan: RunPlan, failed: dict[str, str]) -> Numbers | None:
    """Return a run's result; if it failed, store the error under its row and return None.

    Raise DipsError if one of the pool's processes was killed.
    """
    try:
        result = future.result()
    except BrokenProcessPool as error:
        raise DipsError(
            "a process of this study was ended from outside, for want of memory perhaps: finished runs are kept, and "
            "the same command computes the others; name fewer --jobs"
        ) from error
    if isinstance(result, str):
        failed[plan.row] = f"seed {plan.seed}: {result}"
        return None
    return result


class _Progress:
    """Prints what is done, and an estimate of the remaining time."""

    def __init__(self, total: int, jobs: int, say: Say) -> None:
        self._total, self._jobs, self._say = total, jobs, say
        self._kept = self._done = 0
        self._began, self._computed = time.monotonic(), 0

    def expect_runs(self, more: int) -> None:
        """Correct the number of all runs: so many more come, and no others."""
        self._total = self._done + more

    def note_kept(self) -> None:
        self._kept += 1
        self._done += 1

    def note_done(self, same: Sequence[RunPlan], numbers: Numbers | None) -> None:
        self._done += len(same)
        self._computed += 1
        left_s = (time.monotonic() - self._began) / self._computed * (self._total - self._done)
        plan = same[0]
        tuned = "".join(f", {key} {value}" for key, value in plan.tuned)
        told = "failed" if numbers is None else _spell_loss(numbers)
        kept = f" ({self._kept} kept from before)" if self._kept else ""
        self._say(
            f"{self._done} of {self._total}{kept}: {plan.row}{tuned}, seed {plan.seed}: {told}; "
            f"{spell_seconds(left_s)} left"
        )


def _spell_loss(numbers: Numbers) -> str:
    if numbers["loss"] is None or numbers["diverged"]:
        return "diverged"
    late = "" if numbers["finished"] else ", not finished in its time"
    return f"{numbers['loss']:.4f} {numbers['unit']}{late}"


def spell_seconds(seconds: float) -> str:
    """Format a duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def measure_step_s(plan: RunPlan) -> float:
    """Return the seconds of one core that an inner step of this plan takes on this machine."""
    import torch

    torch.set_num_threads(1)
    task = load_task(plan.factory, plan.settings.task)
    draw = BatchDraw(plan.seed, 0, len(plan.settings.fleet.members))
    worker = Inner(task, plan.settings.recipe, draw, make_model(task, plan.seed))
    for _ in range(WARM_STEPS):
        worker.take_step(0.0)
    begun = time.process_time()
    for _ in range(TIMED_STEPS):
        worker.take_step(0.0)
    return (time.process_time() - begun) / TIMED_STEPS


@contextmanager
def _single_threads() -> Iterator[None]:
    """Make processes that start in this block compute with one thread each."""
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---- execute ---------------------------------------------------------------------------------------------------------


def execute_run(plan: RunPlan) -> Numbers:
    """Train and return the numbers of the table's columns; None where a method has no such number."""
    begun = time.process_time()
    settings = plan.settings
    task = load_task(plan.factory, settings.task)
    numbers = _METHODS[settings.method](task, settings, plan.seed)
    loss = numbers["loss"]
    numbers["diverged"] = not (isfinite(loss) and loss < numbers["first_loss"])
    numbers["unit"], numbers["took_s"] = task.unit, round(time.process_time() - begun, 2)
    return {key: value if not isinstance(value, float) or isfinite(value) else None for key, value in numbers.items()}


def _emulate(task: Task, settings: Settings, seed: int) -> Numbers:
    made, gates = emulate(
        task, settings.fleet, settings.recipe, settings.steps, seed, settings.options, settings.pull_codec,
        settings.layers, settings.parallel,
    )  # fmt: skip
    ideal = settings.fleet.step_rate * task.tokens
    return {
        "loss": made.loss, "first_loss": made.first_loss, "finished": made.finished, "tokens": made.tokens,
        "fastest_steps": max(made.steps.values(), default=0), "effective_clusters": round(made.effective_clusters, 4),
        "versions": made.versions, "clipped": made.clipped / max(made.versions, 1), "gated": made.gated,
        "staleness": made.mean_staleness, "cosine": made.mean_cosine, "lasted_s": made.lasted_s,
        "of_ideal": made.tokens / made.lasted_s / ideal if made.lasted_s else 0.0,
        "bad": gates.bad, "bad_gated": gates.bad_gated, "healthy": gates.healthy,
        "healthy_gated": gates.healthy_gated, "recovered_after": gates.recovered_after,
        "readmitted": made.readmitted, "healthy_of": dict(gates.healthy_of), "gated_because": dict(gates.first_reasons),
        "gated_by": {cluster: dict(by) for cluster, by in gates.gated_by.items()}, "usual_loss": made.usual_loss,
    }  # fmt: skip


def _spell_baseline(made: BaselineResult, settings: Settings, task: Task) -> Numbers:
    ideal = settings.fleet.step_rate * task.tokens
    return {
        "loss": made.loss, "first_loss": made.first_loss, "finished": True, "tokens": made.tokens,
        "fastest_steps": made.steps, "effective_clusters": round(made.effective_clusters, 4),
        "versions": made.versions, "clipped": 0.0, "gated": 0, "staleness": None, "cosine": made.cosine,
        "lasted_s": made.lasted_s, "of_ideal": made.tokens / made.lasted_s / ideal,
    }  # fmt: skip


def _data_parallel(task: Task, settings: Settings, seed: int) -> Numbers:
    made = train_data_parallel(task, settings.fleet, settings.recipe, settings.steps, seed)
    return _spell_baseline(made, settings, task)


def _synchronous(task: Task, settings: Settings, seed: int) -> Numbers:
    lr, momentum = float(settings.options.outer.lr), settings.options.outer.momentum
    made = train_synchronous(
        task, settings.fleet, settings.recipe, settings.steps, seed, lr, momentum, settings.parallel
    )
    return _spell_baseline(made, settings, task)


def _naive(task: Task, settings: Settings, seed: int, realigned: bool = False) -> Numbers:
    lr, momentum = float(settings.options.outer.lr), settings.options.outer.momentum
    made = train_naive(task, settings.fleet, settings.recipe, settings.steps, seed, lr, momentum, realigned)
    return _spell_baseline(made, settings, task)


_METHODS: Mapping[str, Callable[[Task, Settings, int], Numbers]] = {
    "dips": _emulate,
    "data_parallel": _data_parallel,
    "synchronous": _synchronous,
    "naive": _naive,
    "heloco": partial(_naive, realigned=True),
}
