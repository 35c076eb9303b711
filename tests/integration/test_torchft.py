"""torchft's DiLoCo, where it is installed: synchronous, of equal tokens, it takes the outer steps of master and slaves.

torchft needs packages that are of no use here: `pip install torchft==0.2.0`, in an environment with torch and Di-PS.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dips.store.version import THETA
from dips.study.task import make_model
from tests.integration import cluster_harness as harness
from tests.integration import train_study as script

HERE = Path(__file__).parent
VERSIONS, INNER_STEPS, CLUSTERS = 20, 5, ("a", "b")
WINDOW_S = 60.0  # that of a synchronous run: it closes as soon as all have committed
WITHIN = 5e-6  # five decimals; sums are rounded in another order


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
def test_its_outer_steps_are_ours(tmp_path: Path) -> None:
    """θ of every version, within 5e-6, after 20 outer steps of two replicas or clusters on the same batches."""
    theirs = train_theirs(tmp_path / "theirs")
    ours = train_ours(tmp_path / "ours")
    assert len(ours) == len(theirs) == VERSIONS * len(list(make_model(script.make_task(), script.SEED).parameters()))
    apart = {name: float(np.abs(theirs[name] - a).max()) for name, a in ours.items()}
    worst = max(apart, key=lambda name: apart[name])
    print(f"largest difference: {apart[worst]:.2e}, in {worst}")
    assert apart[worst] < WITHIN


def train_theirs(directory: Path) -> dict[str, np.ndarray]:
    directory.mkdir()
    numbers = [str(len(CLUSTERS)), str(INNER_STEPS), str(VERSIONS), str(directory / "theta.npz")]
    process = harness.Process("torchft", [sys.executable, str(HERE / "train_torchft.py"), *numbers], directory / "log")
    try:
        process.wait_for_end(120)
        assert process.code == 0, process.tail()
    finally:
        process.kill()
    with np.load(directory / "theta.npz") as found:
        return dict(found)


def train_ours(directory: Path) -> dict[str, np.ndarray]:
    """A real run whose rounds wait for both clusters; its versions are those of the slaves' snapshots."""
    directory.mkdir()
    tensors = {n: p.detach().numpy() for n, p in make_model(script.make_task(), script.SEED).named_parameters()}
    shared = {"stop": {"versions": VERSIONS}, "outer": {"lr": 0.7, "momentum": 0.8, "clip": {}}}
    shared["penalty"] = {"gates": []}
    timing, master = {"window_s": WINDOW_S}, {"keep_every": 1}
    with harness.Run(directory, tensors, shared=shared, timing=timing, master=master) as run:
        run.start_servers()
        path, count = str(HERE / "train_study.py"), str(len(CLUSTERS))
        clusters = [
            run.start_cluster(
                name, [sys.executable, path, str(i), count, str(VERSIONS), str(directory)], steps=INNER_STEPS
            )
            for i, name in enumerate(CLUSTERS)
        ]
        for cluster in clusters:
            run.wait(cluster, 200)
        rounds = run.versions()
        assert all(len(each.folds) == len(CLUSTERS) for each in rounds), "not synchronous"
        found: dict[str, np.ndarray] = {}
        for slave in run.slaves:
            for file in (run.directory / slave).glob("v*@r*/*.safetensors"):
                version = file.parent.name.partition("@")[0].removeprefix("v")
                whole = load_file(file).items()
                found |= {f"{n.removeprefix(THETA)}@{version}": a for n, a in whole if n.startswith(THETA)}
    return {name: a for name, a in found.items() if not name.endswith("@0")}
