"""A training cluster by Ray: on each node of a placement group an actor runs deploy/nodes.sh.

    ray job submit --working-dir . -- python deploy/engines/ray_job.py --nodes 2 --gpus 8 cluster.yaml train.py ARGS

Typed in a directory with cluster.yaml, shared.yaml, the certificates, the script and deploy/. Ray's own workers do not
train: torchrun starts the ranks, as everywhere. When a node is lost, or its torchrun gives up, all are ended and
started anew, up to --restarts times, wherever Ray has room; the cluster joins again under its name and pulls. The exit
code is the first that is not 0. CHECK, RESTARTS, MASTER_PORT and DIPS_AGENT_TOKEN are those of nodes.sh.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

FINAL = (0, 75, 77, 78)  # done; superseded; denied; a wrong configuration: starting again does not help
LOST = 69  # a node that is gone
STOP_S = 330.0  # for a trainer to save a checkpoint
PASSED = ("CHECK", "RESTARTS", "MASTER_PORT", "DIPS_AGENT", "DIPS_AGENT_TOKEN")


@ray.remote(max_concurrency=2, max_restarts=0)
class RayNode:
    """One node: `stop` is called while `run` waits."""

    process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def run(self, words: Sequence[str], environment: dict[str, str]) -> int:
        """Run the node until it ends; return its exit code."""
        command = ["bash", "deploy/nodes.sh", *words]
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
        return self.process.wait()

    def stop(self) -> None:
        """End the node as Slurm or Kubernetes would, so that the agent takes its leave."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def run_cluster(group: PlacementGroup, options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run all nodes until all have ended, or one has not ended well; return that one's exit code."""
    placed = [PlacementGroupSchedulingStrategy(group, i) for i in range(options.nodes)]
    needs = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    nodes = [RayNode.options(scheduling_strategy=place, **needs).remote() for place in placed]
    try:
        head = ray.get(nodes[0].address.remote())
        same = {"NODES": str(options.nodes), "GPUS": str(options.gpus or 1), "MASTER_ADDR": head}
        same |= {name: os.environ[name] for name in PASSED if name in os.environ}
        running = [node.run.remote(words, {**same, "NODE": str(i)}) for i, node in enumerate(nodes)]
        while running:
            ended, running = ray.wait(running)
            if code := ray.get(ended[0]):
                return int(code)
        return 0
    except RayError as error:
        print(f"a node is lost: {error}", file=sys.stderr)
        return LOST
    finally:
        for stopping in [node.stop.remote() for node in nodes]:
            try:
                ray.get(stopping)
            except RayError:
                pass  # it is gone already


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True, help="nodes of this cluster")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node, and its ranks; 0: one rank on a CPU")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of a node that Ray counts as taken")
    parser.add_argument("--restarts", type=int, default=10, help="how often all nodes are started anew")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="cluster.yaml train.py ARGS...")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `ray job stop`: nodes are ended on the way out
    os.environ.setdefault("DIPS_AGENT_TOKEN", secrets.token_hex(32))  # the same on all nodes
    ray.init()
    bundle = {"CPU": options.cpus, "GPU": options.gpus}
    for left in range(options.restarts, -1, -1):
        group = placement_group([{k: n for k, n in bundle.items() if n}] * options.nodes, strategy="STRICT_SPREAD")
        try:
            ray.get(group.ready())
            code = run_cluster(group, options, options.words)
        finally:
            remove_placement_group(group)
        if code in FINAL:
            break
        print(f"ended with {code}; {left} more starts", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
