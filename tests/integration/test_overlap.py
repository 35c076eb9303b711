"""Training goes on while the push moves, the window is open and the pull arrives (docs/rationale.md#36), with real
processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integration import cluster_harness as harness
from tests.integration import train_constant as constant

HERE = Path(__file__).parent
VERSIONS, STEPS = 4, 12
DELTA = 2.0**-10  # sums of it are exact in fp32


@pytest.mark.torchrun
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("ranks", "fragments"),
    [(2, 3), *(pytest.param(*slow, marks=pytest.mark.slow) for slow in ((1, 1), (2, 1), (1, 3)))],
)
def test_what_is_trained_beside_a_push_is_neither_lost_nor_counted_twice(
    tmp_path: Path, ranks: int, fragments: int
) -> None:
    """One cluster, lr 1, no momentum: θ is the sum of all inner steps on every rank at every step; tokens add up.

    Each fragment is frozen at its own step: in the last version it is as much older or newer.
    """
    tensors = {n: np.zeros(tuple(p.shape), np.float32) for n, p in constant.ConstantModel().named_parameters()}
    shared = {
        "stop": {"versions": VERSIONS},
        "outer": {"lr": 1.0, "momentum": 0.0, "step": "nesterov", "clip": {}},
        "penalty": {"gates": []},
    }
    path, out = str(HERE / "train_overlap.py"), tmp_path / "found"
    command = [sys.executable, path] if ranks == 1 else [*harness.TORCHRUN, str(ranks), path]
    with harness.Run(tmp_path, tensors, shared=shared) as run:
        run.start_servers()
        words = [*command, str(out), "0.02", str(DELTA)]
        cluster = run.start_cluster("a", words, steps=STEPS, overlap="full", fragments=fragments)
        run.wait(cluster, 150)
        rounds = run.versions()

    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(ranks)]
    assert len(rounds) == VERSIONS
    assert all(f["beside"] > VERSIONS for f in found), f"nothing was trained while something moved: {found}"
    pushed = sum(fold.inner_steps for r in rounds for fold in r.folds)
    assert sum(fold.tokens for r in rounds for fold in r.folds) == 8 * pushed
    ends = {end for f in found for end in f["ends"]}
    frozen = {pushed + fragment * (STEPS // (2 * fragments)) for fragment in range(fragments)}
    assert ends == {step * DELTA for step in frozen}, "the last version is what all accepted pushes hold, on every rank"
    assert all(pushed <= f["steps"] <= pushed + 60 for f in found)


@pytest.mark.timeout(90)
def test_a_crash_between_two_fragments_costs_the_push_and_no_more(tmp_path: Path) -> None:
    """Two of three fragments of the first push are frozen when the rank dies: it is dropped, the next attempt pulls."""
    tensors = {n: np.zeros(tuple(p.shape), np.float32) for n, p in constant.ConstantModel().named_parameters()}
    outer = {"lr": 1.0, "momentum": 0.0, "step": "nesterov", "clip": {}}
    out = tmp_path / "found"
    command = [sys.executable, str(HERE / "train_overlap.py"), str(out), "0.01", str(DELTA), "2"]
    shared = {"stop": {"versions": 3}, "outer": outer, "penalty": {"gates": []}}
    with harness.Run(tmp_path, tensors, shared=shared, timing={"window_s": 0.02}, slaves=1) as run:
        run.start_servers()
        cluster = run.start_cluster("a", command, steps=STEPS, overlap="full", fragments=3, max_restarts=1)
        run.wait(cluster, 60)
        folds = [fold for r in run.versions() for fold in r.folds]
        timeline = run.timeline("a").read_text()
    told = [json.loads(line)["kind"] for line in timeline.splitlines()]
    course = [kind for kind in told if kind in ("trainer_start", "push_begin", "push_end")]
    assert course[:5] == ["trainer_start", "push_begin", "trainer_start", "push_begin", "push_end"], course
    found = json.loads((tmp_path / "found.0").read_text())
    pushed = sum(fold.inner_steps for fold in folds)
    assert len(folds) == 3
    assert set(found["ends"]) == {(pushed + n * (STEPS // 6)) * DELTA for n in range(3)}, "nothing of it was folded"
