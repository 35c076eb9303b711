"""DeepSpeed on a CPU, where it is installed: its engines and partitions are refused by name, or found out."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration import cluster_harness as harness
from tests.integration import train_deepspeed as script

HERE = Path(__file__).parent
VERSIONS = 6

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

BY_NAME = "the model holds a deepspeed.DeepSpeedEngine"
PARTITIONED = "DeepSpeed ZeRO keeps fp32 masters of these parameters in partitions of its own"
UNDONE = "wrote back the values from before it"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "stage", "said"),
    [
        ("engine", 1, BY_NAME),
        ("module", 1, PARTITIONED),
        ("module", 2, PARTITIONED),
        ("module", 3, "partitioned by DeepSpeed ZeRO-3"),
        ("module", 0, UNDONE),
        ("early", 1, UNDONE),
    ],
)
def test_what_would_undo_every_pull_ends_the_job(tmp_path: Path, mode: str, stage: int, said: str) -> None:
    """ZeRO's masters lie in flat partitions; without ZeRO bf16 has some, too. Unseen when the loop is made, they are
    found out by what they undo."""
    log = train(tmp_path, mode, stage, code=78)
    assert said in log


@pytest.mark.timeout(180)
def test_an_optimizer_with_masters_of_whole_parameters_is_taken(tmp_path: Path) -> None:
    """Given: its masters are what is pushed and pulled, and the run comes to its end."""
    assert UNDONE not in train(tmp_path, "given", 0, code=0)


def train(tmp_path: Path, mode: str, stage: int, code: int) -> str:
    """One cluster of one rank runs the script; return what it printed."""
    tensors = {name: p.detach().numpy() for name, p in script.build().named_parameters()}
    shared = {"stop": {"versions": VERSIONS}, "outer": {"lr": 0.5, "clip": {}}, "penalty": {"gates": []}}
    command = [sys.executable, str(HERE / "train_deepspeed.py"), mode, str(stage)]
    with harness.Run(tmp_path, tensors, shared=shared, timing={"window_s": 0.02}) as run:
        run.start_servers()
        cluster = run.start_cluster("a", command, steps=5)
        run.wait(cluster, 150, code)
        return cluster.log.read_text()
