"""The emulator computes what a real run computes: three clusters as processes, and their arrivals fed to it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dips.config import load_run
from dips.protocol.enums import OutcomeKind
from dips.protocol.records import FoldRow, VersionCommitted
from dips.store.version import MANIFEST_FILE, VersionManifest
from dips.study.fleet import Fleet, FleetCluster
from dips.study.task import make_model
from dips.view.points import RoundHistory
from tests.arrivals import emulate_arrivals, read_arrivals
from tests.integration import cluster_harness as harness
from tests.integration import train_study as script

HERE = Path(__file__).parent
VERSIONS = 20
PACES = ({"steps": 6}, {"seconds": 0.3}, {"aligned": 4})
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "dips": {
        "layers": "module",
        "outer": {"merge": "rda", "step": "share", "clip": {}},
        "penalty": {"gates": ["dips", "replay"], "warmup_rounds": 3},
    },
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rules", list(RULES))
def test_the_emulator_has_the_bits_of_processes(tmp_path: Path, rules: str) -> None:
    """θ and m of every version, norms, scores, weights and scales: all from the order of the arrivals."""
    shared = {"stop": {"versions": VERSIONS}, **RULES[rules]}
    task = script.make_task()
    tensors = {name: p.detach().numpy() for name, p in make_model(task, script.SEED).named_parameters()}
    master, slots = {"keep_every": 1}, {"slots": len(PACES) + 1, "pinned": len(PACES)}
    with harness.Run(tmp_path, tensors, shared=shared, slave=slots, master=master) as run:
        run.start_servers()
        clusters = [run.start_cluster(name, _command(i, tmp_path), pace=PACES[i]) for i, name in enumerate("abc")]
        for cluster in clusters:
            run.wait(cluster, 200)
        history = run.history()  # with rounds whose pushes were all gated
        rounds = [each for each in history if each.version is not None]
        snapshots = [_read_snapshots(run, str(each.version)) for each in rounds]
        file = load_run(run.file)

    assert len(rounds) == VERSIONS and max(len(each.folds) for each in rounds) > 1
    steps = {fold.inner_steps for each in rounds for fold in each.folds}
    assert len(steps) > 2, f"a mixed pace: {steps}"
    late = [fold for each in rounds for fold in each.folds if fold.base != each.parent]
    # A gate may shut out who stood still; no ledger has the base of that push.
    gated = [o.push for each in history for o in each.outcomes if o.kind is OutcomeKind.GATED and o.push.cluster == "b"]
    assert len(late) + len(gated) >= script.LATE, (late, gated)
    fleet = Fleet((FleetCluster(),) * len(PACES))
    made = emulate_arrivals(
        task, fleet, script.RECIPE, read_arrivals(history), script.SEED, file.make_options(), file.shared.layers
    )
    for real, version, layers in zip(rounds, made, snapshots, strict=True):
        assert _spell_round(version.row) == _spell_round(real), real.version
        losses = [fold.loss for fold in real.folds]  # summed up as its steps were told, several at once
        assert [fold.loss for fold in version.row.folds] == pytest.approx(losses, rel=1e-12)
        assert dict(enumerate(zip(version.theta, version.momentum, strict=True))) == layers, real.version


def _command(cluster: int, directory: Path) -> list[str]:
    return [
        sys.executable, str(HERE / "train_study.py"), str(cluster), str(len(PACES)), str(VERSIONS), str(directory),
    ]  # fmt: skip


def _read_snapshots(run: harness.Run, version: str) -> Mapping[int, tuple[str, str]]:
    """Digests of θ and m of each layer, as the slaves wrote them."""
    found: dict[int, tuple[str, str]] = {}
    for name in run.slaves:
        (file,) = (run.directory / name).glob(f"**/{version}/{MANIFEST_FILE}")
        for record in VersionManifest.from_json(file.read_bytes(), str(file)).layers:
            found[record.index] = record.theta, record.momentum
    return found


def _spell_round(row: RoundHistory | VersionCommitted) -> dict[str, Any]:
    """All that was decided, but for times, and numbers of pushes, which count questions that were asked again."""
    return {
        "version": row.version, "parent": row.parent, "step": row.step, "norm": row.delta_norm,
        "clipped": row.clipped, "folds": [_spell_fold(fold) for fold in row.folds],
    }  # fmt: skip


def _spell_fold(fold: FoldRow) -> tuple[object, ...]:
    return (
        fold.push.cluster, fold.base, fold.tokens, fold.inner_steps, fold.weight, fold.norm, fold.score,
        fold.layer_weights,
    )  # fmt: skip
