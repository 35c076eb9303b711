"""deploy/slurm/cluster.sbatch under a real slurmctld: a job trains, and ends with the exit code that says why."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm import Slurm, find_missing
from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
JOB_S = 120.0
TENSORS = script.tensors()
PROGRAMS = {
    "dips": "-m dips.cli",
    "dips-client": "-c 'from dips.client.app import main; main()'",
    "torchrun": "-m torch.distributed.run",
}
# Words of the command line come before those of the script: this machine has one node and no GPU.
HERE = ("--nodes=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10")


@pytest.fixture(name="slurm")
def running_slurm() -> Iterator[Slurm]:
    if why := find_missing():
        pytest.skip(f"NO SLURM: {why}")
    with tempfile.TemporaryDirectory(prefix="dips-") as directory, Slurm(Path(directory)) as slurm:
        yield slurm


@pytest.fixture(name="run")
def made_run(tmp_path: Path) -> Iterator[harness.Run]:
    with harness.Run(tmp_path, TENSORS, shared={"stop": {"versions": 3}, "penalty": {"gates": []}}) as run:
        yield run


def environment(tmp_path: Path, cluster: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GPUS": "1",
        "DIPS_CLUSTER": str(cluster), "RUN_IN": "env IN_CONTAINER=yes",
    }  # fmt: skip


def submit(slurm: Slurm, tmp_path: Path, cluster: Path, *words: str) -> int:
    batch = str(ROOT / "deploy" / "slurm" / "cluster.sbatch")
    where = (f"--chdir={tmp_path}", f"--output={tmp_path}/job.log")
    return slurm.submit(*HERE, *where, batch, *words, environment=environment(tmp_path, cluster))


def test_a_job_trains(slurm: Slurm, run: harness.Run, tmp_path: Path) -> None:
    """sbatch, the preflight, the agent, srun, torchrun: the job ends when the run has its versions."""
    run.make_ready()
    train = str(ROOT / "tests" / "integration" / "train_constant.py")
    job = submit(slurm, tmp_path, run.write_cluster_file("slow"), train, "slow", "24", "1", str(tmp_path / "slow.out"))
    assert slurm.await_end(job, JOB_S) == 0, (tmp_path / "job.log").read_text()
    assert run.head().version == 3


def test_a_job_whose_time_is_over_is_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    """As Slurm signals it before the end: the cluster leaves the run, and the job waits for its next turn."""
    train, out = str(ROOT / "tests" / "integration" / "train_constant.py"), tmp_path / "slow.out"
    with harness.Run(tmp_path, TENSORS, shared={"penalty": {"gates": []}}) as run:
        run.make_ready()
        job = submit(slurm, tmp_path, run.write_cluster_file("slow"), train, "slow", "100000", "1", str(out))
        run.until(run.versions, JOB_S, "the job trains")
        slurm.signal(job, "USR1")
        run.until(lambda: slurm.show(job)["Restarts"] == "1", 60, "the job is queued again")
        assert slurm.show(job)["JobState"] in ("PENDING", "COMPLETING", "REQUEUED"), slurm.show(job)
        slurm.cancel(job)


def test_a_job_that_cannot_begin_says_why(slurm: Slurm, run: harness.Run, tmp_path: Path) -> None:
    """A wrong cluster file ends the job at once, with the exit code of a wrong configuration."""
    job = submit(slurm, tmp_path, run.write_cluster_file("slow", heartbeats=1), "train.py")
    assert slurm.await_end(job, JOB_S) == 78
    assert "heartbeats: unknown key" in (tmp_path / "job.log").read_text()
