"""Execution of one planned run by any method; returns its results as plain numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from dips.study.baselines import BaselineResult, train_data_parallel, train_naive, train_synchronous
from dips.study.emulator import emulate
from dips.study.study_file import RunPlan, Settings
from dips.study.task import Task, load_task

ALONE = 0.1  # share of a post-local run that is data parallel: somewhat longer than the warm-up
Numbers = dict[str, Any]


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
        settings.layers,
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
        "fastest_steps": made.steps, "effective_clusters": float(len(settings.fleet.members)),
        "versions": made.versions, "clipped": 0.0, "gated": 0, "staleness": None, "cosine": made.cosine,
        "lasted_s": made.lasted_s, "of_ideal": made.tokens / made.lasted_s / ideal,
    }  # fmt: skip


def _data_parallel(task: Task, settings: Settings, seed: int) -> Numbers:
    made = train_data_parallel(task, settings.fleet, settings.recipe, settings.steps, seed)
    return _spell_baseline(made, settings, task)


def _synchronous(task: Task, settings: Settings, seed: int) -> Numbers:
    lr, momentum = float(settings.options.outer.lr), settings.options.outer.momentum
    made = train_synchronous(task, settings.fleet, settings.recipe, settings.steps, seed, lr, momentum)
    return _spell_baseline(made, settings, task)


def _post_local(task: Task, settings: Settings, seed: int) -> Numbers:
    made = train_synchronous(task, settings.fleet, settings.recipe, settings.steps, seed, 1.0, 0.0, ALONE)
    return _spell_baseline(made, settings, task)


def _naive(task: Task, settings: Settings, seed: int) -> Numbers:
    lr, momentum = float(settings.options.outer.lr), settings.options.outer.momentum
    made = train_naive(task, settings.fleet, settings.recipe, settings.steps, seed, lr, momentum)
    return _spell_baseline(made, settings, task)


_METHODS: Mapping[str, Callable[[Task, Settings, int], Numbers]] = {
    "dips": _emulate,
    "data_parallel": _data_parallel,
    "synchronous": _synchronous,
    "post_local": _post_local,
    "naive": _naive,
}
