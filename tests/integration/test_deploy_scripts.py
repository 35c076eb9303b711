"""The launch scripts of deploy/ start a real cluster: preflight first, then the agent, and its exit code is theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script

HERE = Path(__file__).parent
RAY_OPTIONS = ("--node-ip-address=127.0.0.1", "--min-worker-port=20002", "--max-worker-port=29999")
SLURM = HERE.parents[1] / "deploy" / "slurm"


TENSORS = script.tensors()

# What Slurm and the package put on the path; srun is its command, once for each node.
SRUN = """
while [[ "$1" == --* ]]; do shift; done
if [[ $SLURM_NNODES -eq 1 ]]; then exec "$@"; fi
for ((node = 0; node < SLURM_NNODES; node++)); do
    env -u DIPS_AGENT_HOME SLURM_NODEID=$node "$@" & nodes+=($!)  # as on another host than the agent's
done
for node in "${nodes[@]}"; do wait "$node" || exit; done
"""
PROGRAMS = {
    "dips": 'exec $PYTHON -m dips.cli "$@"',
    "dips-client": 'exec $PYTHON -c "from dips.client.app import main; main()" "$@"',
    "torchrun": 'exec $PYTHON -m torch.distributed.run "$@"',
    "srun": SRUN,
}


@pytest.fixture(name="environment")
def made_environment(tmp_path: Path, python_of_scripts: str) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": python_of_scripts,
        "PYTHONPATH": str(harness.ROOT),
        "GPUS": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "MASTER_PORT": str(harness.free_port()),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@pytest.fixture(name="run")
def made_run(tmp_path: Path) -> Iterator[Any]:
    with harness.Run(tmp_path, TENSORS, shared={"stop": {"versions": 3}, "penalty": {"gates": []}}) as run:
        yield run


def words(run: Any) -> list[str]:
    return [str(HERE / "train_constant.py"), "slow", "24", "1", str(run.directory / "slow.out")]


@pytest.mark.torchrun
@pytest.mark.timeout(240)
def test_a_cluster_trains_to_the_end(run: Any, environment: dict[str, str]) -> None:
    """torchrun.sh: preflight, agent, torchrun, three versions, exit code 0."""
    run.make_ready()
    done = subprocess.run(
        ["bash", str(SLURM / "torchrun.sh"), str(run.write_cluster_file("slow")), *words(run)],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slave ps0" in done.stdout  # the table of the preflight
    assert (run.directory / "slow.out.0").exists()


@pytest.mark.torchrun
@pytest.mark.timeout(240)
def test_slurm_on_two_nodes(run: Any, environment: dict[str, str]) -> None:
    """The ranks of both nodes find the agent by what srun hands them, and train to the end."""
    run.make_ready()
    done = subprocess.run(
        ["bash", str(SLURM / "cluster.sbatch"), *words(run)],
        env={**environment, "SLURM_NNODES": "2", "DIPS_CLUSTER": str(run.write_cluster_file("slow"))},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"agent_line"' in done.stderr
    assert [(run.directory / f"slow.out.{rank}").exists() for rank in range(2)] == [True, True]


@pytest.mark.torchrun
@pytest.mark.timeout(240)
def test_nodes_that_are_started_one_by_one(run: Any, environment: dict[str, str]) -> None:
    """nodes.sh on each of two: the second finds the agent of the first by its address and the token; both end well."""
    run.make_ready()
    path = run.write_cluster_file("slow")
    same = {
        **environment, "NODES": "2", "MASTER_ADDR": "127.0.0.1", "DIPS_AGENT_TOKEN": "0123456789abcdef",
        "DIPS_AGENT": f"tcp://127.0.0.1:{harness.free_port()}",
    }  # fmt: skip
    nodes = []
    for node in ("1", "0"):
        with (run.directory / f"node{node}.log").open("w") as log:
            command = ["bash", str(SLURM.parent / "nodes.sh"), str(path), *words(run)]
            nodes.append(subprocess.Popen(command, env={**same, "NODE": node}, stdout=log, stderr=log))
    try:
        codes = [node.wait(200) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
                node.wait(60)
    assert codes == [0, 0], [(run.directory / f"node{node}.log").read_text()[-4000:] for node in "10"]


@pytest.fixture(name="ray_nodes")
def two_nodes_of_ray(tmp_path: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Two raylets on this machine, and the environment in which their jobs are submitted."""
    pytest.importorskip("ray", reason="ray is not here: its recipe was not run")
    address, environment = f"127.0.0.1:{harness.free_port()}", {**environment, "RAY_USAGE_STATS_ENABLED": "0"}
    start = [environment["PYTHON"], "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *RAY_OPTIONS]
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    raylets = []
    try:
        for words in (head, [f"--address={address}"]):
            path = tmp_path / f"raylet{len(raylets)}.log"
            with path.open("w") as log:
                raylets.append(
                    subprocess.Popen([*start, *words], env=environment, stdout=log, stderr=log, cwd=harness.ROOT)
                )
            until = time.monotonic() + 90
            while "runtime started" not in path.read_text():
                assert time.monotonic() < until and raylets[-1].poll() is None, path.read_text()[-4000:]
                time.sleep(0.2)
        yield {**environment, "RAY_ADDRESS": address}
    finally:
        for raylet in reversed(raylets):
            raylet.terminate()
            raylet.wait(60)


@pytest.mark.slow
@pytest.mark.real_commands
@pytest.mark.timeout(400)
def test_ray_on_two_nodes(run: Any, ray_nodes: dict[str, str]) -> None:
    """ray_job.py places a node on each, node 0 is the head, and the job ends with the run; a wrong file ends it."""
    run.make_ready()
    path = run.write_cluster_file("slow")
    same = {**ray_nodes, "DIPS_AGENT": f"tcp://127.0.0.1:{harness.free_port()}"}
    job = [same["PYTHON"], str(SLURM.parent / "engines" / "ray_job.py"), "--nodes", "2", "--gpus", "0"]

    def submit(*more: str) -> subprocess.CompletedProcess[str]:
        command = [*job, *more, *words(run)]
        return subprocess.run(
            command, env=same, capture_output=True, text=True, timeout=200, cwd=harness.ROOT, check=False
        )

    done = submit(str(path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert [(run.directory / f"slow.out.{rank}").exists() for rank in range(2)] == [True, True]
    done = submit("--restarts", "1", str(run.directory / "none.yaml"))
    assert done.returncode == 78, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.torchrun
@pytest.mark.timeout(240)
def test_slurm_ends_the_job(run: Any, environment: dict[str, str]) -> None:
    """SIGTERM to the batch script, as --signal sends it: the ranks end, the cluster leaves, nothing stays behind."""
    run.make_ready()
    path = run.write_cluster_file("slow")
    wait_for_two = [*words(run)[:3], "2", str(run.directory / "slow.out")]  # trains never: it waits for another cluster
    with (run.directory / "job.log").open("w") as log:
        job = subprocess.Popen(
            ["bash", str(SLURM / "cluster.sbatch"), *wait_for_two],
            env={**environment, "DIPS_CLUSTER": str(path)}, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        run.until(lambda: (run.directory / "slow.out.ready.0").exists(), 120, "the rank has joined")
        agent = int((run.directory / "slow" / "agent.pid").read_text())
        job.send_signal(signal.SIGTERM)
        code = job.wait(60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert code not in (0, 127), (run.directory / "job.log").read_text()
    assert not Path(f"/proc/{agent}").exists()
    run.until(lambda: "cluster_gone" in (run.directory / "master.log").read_text(), 10, "the cluster has left")


def test_a_preflight_that_fails_starts_nothing(run: Any, environment: dict[str, str]) -> None:
    """No master: exit code 1, and no agent ever ran."""
    path = run.write_cluster_file("slow")
    done = subprocess.run(
        ["bash", str(SLURM / "cluster.sbatch"), *words(run)],
        env={**environment, "DIPS_CLUSTER": str(path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 69, done.stdout + done.stderr
    assert "start the master" in done.stdout
    assert not (run.directory / "slow" / "agent.pid").exists()
