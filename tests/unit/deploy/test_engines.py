"""On each node SkyPilot and dstack start what belongs there: their variables become those of nodes.sh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
ENGINES = ROOT / "deploy" / "engines"
ADDRESSES = ["10.1.0.1", "10.1.0.2"]
SAY = '#!/bin/sh\necho "$(basename "$0")" "$@"\n'  # in place of the programs that nodes.sh starts


def skypilot(task: dict[str, Any], node: int) -> tuple[str, dict[str, str]]:
    """The script of a node and its environment, as SkyPilot documents them."""
    return task["run"], {
        "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "SKYPILOT_NUM_GPUS_PER_NODE": "8", "DIPS_AGENT_TOKEN": "t",
    }  # fmt: skip


def dstack(task: dict[str, Any], node: int) -> tuple[str, dict[str, str]]:
    """Likewise; dstack joins the commands."""
    return " && ".join(task["commands"]), {
        "DSTACK_NODE_RANK": str(node), "DSTACK_NODES_NUM": str(task["nodes"]), "DSTACK_MASTER_NODE_IP": ADDRESSES[0],
        "DSTACK_GPUS_PER_NODE": "8", "DIPS_AGENT_TOKEN": "t",
        **dict(word.split("=", 1) for word in task["env"] if "=" in word),
    }  # fmt: skip


@pytest.mark.parametrize("engine", [skypilot, dstack])
def test_each_node_starts_what_belongs_to_it(engine: Any, tmp_path: Path) -> None:
    """Node 0 looks first and has the agent; the others start torchrun alone; all meet at node 0."""
    for name in ("dips", "dips-client", "torchrun"):
        (tmp_path / name).write_text(SAY)
        (tmp_path / name).chmod(0o755)
    task = yaml.safe_load((ENGINES / f"{engine.__name__}.yaml").read_text())
    for node in range(2):
        script, variables = engine(task, node)
        done = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        *checked, started = done.stdout.splitlines()
        assert checked == (["dips check --config cluster.yaml --factory mymodel:build"] if node == 0 else [])
        assert started.startswith("dips-client --config cluster.yaml -- torchrun" if node == 0 else "torchrun")
        for words in ("--nnodes 2", "--nproc-per-node 8", "--rdzv-endpoint 10.1.0.1:29500", "train.py --data /corpus"):
            assert words in started, started
        assert f"is_host={int(node == 0)}" in started


@pytest.mark.parametrize("cpus", ["64", ""])
def test_slurm_gives_ranks_the_cpus_of_the_job(cpus: str, tmp_path: Path) -> None:
    """srun does not inherit `--cpus-per-task` of sbatch: where tasks are bound, all ranks of a node shared one CPU, and
    all that a command in `before_start` measures by srun.
    """
    for name, script in (("dips", SAY), ("dips-client", "#!/bin/sh\necho ${SRUN_CPUS_PER_TASK-none}\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", **({"SLURM_CPUS_PER_TASK": cpus} if cpus else {})}
    done = subprocess.run(
        ["bash", str(ROOT / "deploy" / "slurm" / "cluster.sbatch")], capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == (cpus or "none"), done.stdout + done.stderr


def test_skypilot_takes_its_file() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not here: its schema was not asked")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(yaml.safe_load((ENGINES / "skypilot.yaml").read_text()), schemas.get_task_schema())


def test_dstack_takes_its_file() -> None:
    models = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="dstack is not here: its models were not asked"
    )
    models.parse_apply_configuration(yaml.safe_load((ENGINES / "dstack.yaml").read_text()))
